/* Convolutions whose places are lanes, if those of all images are fewer than filters, or windows have few terms.
 *
 *     sums[filter][places] += w[filter, term] * windows[term][places]
 *
 * The windows of the input are unfolded, which moves less memory than to pack the filters and to transpose the results.
 * Each element of a filter is read where it lies.
 *
 * As in gemm.h, each sum is always added up in one order.
 */
#pragma once
#include "direct.h"
#include "geometry.h"
#include "matrix.h"
#include "ort.h"
#include "resources.h"

enum { TILES_AHEAD = 2 }; /* tiles of filters from those that are read to those that are fetched into the cache */

/* All tasks share this. Rows are the places of all images. */
typedef struct {
    Direct d; /* the copy of the input, and where terms and rows lie in it */
    int inside; /* whether no tap leaves the input */
    const float *input; /* the copy, or the input itself */
    int64_t group; /* the distance of groups there */
    int64_t rows, panels;
    int64_t filter_tiles, together; /* of a group; the units (tiles of filters) that take turns */
    int64_t *weights_at; /* where terms lie in a filter, in bytes */
    int64_t copied, unfolded, sums; /* elements of scratch memory: copies of the input, windows, and sums */
    float *windows, *c;
} Unfolded;

/* Return whether to unfold windows moves less memory than direct.h does. */
static int unfolds(const Convolution *u) {
    const int64_t terms = u->channels * product_of(u->taps), rows = u->images * product_of(u->places);
    return rows > 0 && terms > 0 && 4 * terms * rows <= (terms + 2 * rows) * u->filters;
}

/* Return whether no tap of any place leaves the input. */
static int stays_inside(const Direct *d) {
    int inside = 1;
    for (int i = 0; i < 3; i++) inside = inside && d->lowest[i] >= 0 && d->lowest[i] + d->extents[i] <= d->u->sizes[i];
    return inside;
}

/* Unfold the windows of a panel of rows: one row of lanes for each term. */
static void unfold_panel(void *user, size_t index) {
    const Unfolded *a = user;
    const Direct *d = &a->d;
    const int64_t group = (int64_t)index / a->panels, first = (int64_t)index % a->panels * WIDTH;
    const char *input = (const char *)(a->input + group * a->group);
    const int64_t *restrict rows_at = d->rows_at + first;
    const int64_t width = a->rows - first > LANES ? WIDTH : LANES;
    float *restrict to = a->windows + (int64_t)index * d->terms * WIDTH;
    for (int64_t t = 0; t < d->terms; t++, to += width) {
        const char *from = input + d->terms_at[t];
        for (int64_t i = 0; i < width; i++) to[i] = *(const float *)(from + rows_at[i]);
    }
}

/* Write the sums of some rows and filters to the result. Those of a filter are c_row elements after the one before. */
static void store_lanes(const Unfolded *a, int64_t group, int64_t first, int64_t end, int64_t filter, int64_t filters,
                        const float *c, int64_t c_row) {
    const Convolution *u = a->d.u;
    const float *bias = u->bias ? u->bias + group * u->filters + filter : NULL;
    const int64_t step = side_by_side(u->places, u->y_steps) ? 1 : u->y_steps[2];
    for (int64_t r = first, length; r < end; r += length, c += length) {
        float *y;
        length = gemm_min(place_of(u, group, r, &y), end - r);
        for (int64_t f = 0; f < filters; f++)
            finish(y + (filter + f) * u->y_filter, c + f * c_row, step, length, bias ? bias[f] : 0, u->relu);
    }
}

/* Find the filters of a unit, and return its group. */
static int64_t filters_of(const Unfolded *a, int64_t unit, int64_t *filter, int64_t *filters) {
    const int64_t part = unit % a->filter_tiles, all = a->d.u->filters;
    *filter = gemm_begin(all, part, a->filter_tiles);
    *filters = gemm_begin(all, part + 1, a->filter_tiles) - *filter;
    return unit / a->filter_tiles;
}

/* Compute a panel of rows for units from `first` to `end`, block by block of terms. */
static void convolve_panel(const Unfolded *a, int64_t panel, int64_t first, int64_t end, float *c) {
    const Direct *d = &a->d;
    const Convolution *u = d->u;
    const int64_t row = panel * WIDTH, last = gemm_min(a->rows, row + WIDTH), two = last - row > LANES;
    const int64_t blocks = gemm_parts(d->terms, GEMM_KC), size = sizeof(float);
    const int whole = last - row == WIDTH && !u->bias && !u->relu && (u->y_steps[2] == 1 || u->places[2] == 1);
    int64_t filter, filters;
    float *y;
    for (int64_t b = 0; b < blocks; b++)
        for (int64_t unit = first; unit < end; unit++) {
            const int64_t group = filters_of(a, unit, &filter, &filters), term = gemm_begin(d->terms, b, blocks);
            const int stays = place_of(u, group, row, &y) >= WIDTH && whole; /* where the tile writes it */
            direct_tiles[filters - 1][two](gemm_begin(d->terms, b + 1, blocks) - term,
                                    (const char *)(u->w + group * u->w_batch + filter * u->w_filter), u->w_filter * size,
                                    TILES_AHEAD * filters * u->w_filter * size, NULL, a->weights_at + term,
                                    a->windows + (group * a->panels + panel) * d->terms * WIDTH + term * (two ? WIDTH : LANES),
                                    stays ? y + filter * u->y_filter : c + (unit - first) * GEMM_MR * WIDTH,
                                    stays ? u->y_filter : WIDTH, b > 0);
            if (!stays && b == blocks - 1)
                store_lanes(a, group, row, last, filter, filters, c + (unit - first) * GEMM_MR * WIDTH, WIDTH);
        }
}

/* Compute some of the filters, for all rows. */
static void convolve_filters(void *user, size_t task) {
    const Unfolded *a = user;
    const int64_t units = a->d.u->groups * a->filter_tiles;
    const int64_t first = gemm_begin(units, (int64_t)task, a->d.tasks), end = gemm_begin(units, (int64_t)task + 1, a->d.tasks);
    for (int64_t unit = first; unit < end; unit += a->together)
        for (int64_t panel = 0; panel < a->panels; panel++)
            convolve_panel(a, panel, unit, gemm_min(unit + a->together, end), a->c + first * GEMM_MR * WIDTH);
}

/* Lay out a copy of the input, if a tap leaves it, and return how many elements it has. */
static int64_t lay_out_windows(Unfolded *a) {
    Direct *d = &a->d;
    const Convolution *u = d->u;
    a->rows = u->images * product_of(u->places), a->panels = gemm_parts(a->rows, WIDTH);
    d->channels = u->channels, d->terms = u->channels * product_of(u->taps);
    find_reach(d);
    lay_out(d, u->places, 0);
    a->inside = stays_inside(d);
    if (a->inside) memcpy(d->steps, u->steps, sizeof d->steps), d->channel = u->x_channel, d->image = u->x_image;
    a->group = a->inside ? u->channels * u->x_channel : u->images * d->image;
    return a->inside ? 0 : u->groups * a->group;
}

/* Return how many numbers say where terms and rows lie. */
static int64_t listed_windows(const Unfolded *a) { return 2 * a->d.terms + upto(a->rows, WIDTH); }

/* Find where terms and rows lie, and copy the input if a tap leaves it. */
static void find_windows(Context *context, Unfolded *a, int64_t *lists, float *copies) {
    Direct *d = &a->d;
    const Convolution *u = d->u;
    const int64_t of_weights[4] = {u->w_channel, u->w_steps[0], u->w_steps[1], u->w_steps[2]};
    d->copies = copies, d->terms_at = lists, d->rows_at = lists + d->terms, a->weights_at = d->rows_at + upto(a->rows, WIDTH);
    find_places(d, a->rows);
    find(d->terms, u->taps, of_weights, 0, a->weights_at);
    for (int64_t i = a->rows; i < upto(a->rows, WIDTH); i++) d->rows_at[i] = d->rows_at[0];
    a->input = d->copies;
    if (!a->inside) share_tasks(context, d->tasks, d, copy_image, u->groups * u->images);
    else a->input = u->x + d->lowest[0] * u->steps[0] + d->lowest[1] * u->steps[1] + d->lowest[2] * u->steps[2];
}

static Unfolded plan_unfolded(const Convolution *u) {
    Unfolded a = {.d = {.u = u}, .filter_tiles = gemm_parts(u->filters, GEMM_MR)};
    a.copied = lay_out_windows(&a);
    const double work = 2.0 * (double)(a.rows * u->groups) * (double)(u->filters * a.d.terms);
    a.d.tasks = gemm_min(work > 1e6 ? thread_count : 1, u->groups * a.filter_tiles);
    a.together = u->w_filter < u->w_channel && a.d.terms > GEMM_KC ? u->groups * a.filter_tiles : 1;
    a.unfolded = u->groups * a.panels * a.d.terms * WIDTH, a.sums = u->groups * a.filter_tiles * GEMM_MR * WIDTH;
    return a;
}

static size_t unfolded_scratch(const Convolution *u) {
    const Unfolded a = plan_unfolded(u);
    return (size_t)(a.copied + a.unfolded + a.sums) * sizeof(float) + (size_t)listed_windows(&a) * sizeof(int64_t);
}

static void unfolded_run(Context *context, const Convolution *u, void *scratch) {
    Unfolded a = plan_unfolded(u);
    a.windows = scratch, a.c = a.windows + a.unfolded;
    find_windows(context, &a, (int64_t *)(a.c + a.sums + a.copied), a.c + a.sums);
    share_tasks(context, a.d.tasks, &a, unfold_panel, u->groups * a.panels);
    share_tasks(context, a.d.tasks, &a, convolve_filters, a.d.tasks);
}

/* Convolutions of bfloat16 numbers as products of matrices, in tiles; see bfloat16.h.
 *
 *     sums[filter][places] += w[filter][terms] * windows[terms][places]
 *
 * A term is a channel and a tap. Elements of windows are gathered from the input, or its copy, and rounded or split at
 * once. With large images that takes longer than the shifts of tiled.h, but tiles have no gaps, and filters are packed
 * where they lie: it suits small images with many channels, and gradients of weights by few places.
 */
#pragma once
#include "bfloat16.h"
#include "direct.h"
#include "gemm.h"
#include "geometry.h"
#include "lines.h"
#include "matrix.h"
#include "ort.h"
#include "resources.h"
#include "unfolded.h"

#ifdef GEMM_HAS_TILES

enum {
    COPIED = 8,       /* filters that are copied together: more would lie in more pages than a processor finds at once */
    COPIES = 1 << 18, /* elements of filters that are copied before they are multiplied */
};

/* All tasks share this. */
typedef struct {
    Unfolded of;
    int pieces;
    int64_t group, first, lines, row; /* a group and its first filter; the lines of a panel of windows, the elements of a copy of a filter */
    int64_t stride, together, panels; /* of a filter's terms, or 0 if filters are copied; filters in turn; panels of windows */
    size_t window_bytes, before;      /* of scratch memory: of windows, and of what lies before sums, filters and copies */
    int64_t sums, copied;             /* elements of sums, and of copies of filters */
    Line *windows;
    float *filters, *c; /* the filters are copied if their terms are not equally far apart */
    gemm_product product;
} Gathered;

/* Return 16 elements. They lie at `from`, in some distances in bytes. */
GEMM_INLINE __m512 gather(const char *from, const int64_t *distances, int are_together) {
    if (are_together) return _mm512_loadu_ps(from + *distances);
    const __m256 first = _mm512_i64gather_ps(_mm512_loadu_si512(distances), from, 1);
    return _mm512_insertf32x8(_mm512_castps256_ps512(first), _mm512_i64gather_ps(_mm512_loadu_si512(distances + 8), from, 1), 1);
}

/* Gather the windows of 16 rows: tiles of B, whose lines are pairs of terms, as pack_tile makes them. */
GEMM_INLINE void gather_tiles(const Gathered *a, const int64_t *rows_at, int are_together, int pieces, Line *to) {
    const Direct *d = &a->of.d;
    const int64_t apart = pieces == 2 ? 16 : 1, step = pieces == 2 ? 1 : 2;
    const char *input = (const char *)(a->of.input + a->group * a->of.group);
    for (int64_t block = 0; block < d->terms; block += BLOCK_TERMS, to += 2 * TILE_LINES * pieces)
        for (int64_t pair = 0; pair < 16; pair++) {
            const int64_t term = block + pair * step;
            __m512 x = _mm512_setzero_ps(), y = x;
            if (term < d->terms) x = gather(input + d->terms_at[term], rows_at, are_together);
            if (term + apart < d->terms) y = gather(input + d->terms_at[term + apart], rows_at, are_together);
            if (pieces == 2) split_pairs(x, y, to + pair, to + pair + BLOCK_LINES);
            else to[pair] = round_pairs(x, y, 0);
        }
}

/* Gather the windows of 32 rows. */
static void gather_panel(void *user, size_t index) {
    const Gathered *a = user;
    Line *to = a->windows + (int64_t)index * a->lines;
    for (int64_t row = (int64_t)index * BLOCK_LINES, half = 0; half < 2 && row < a->of.rows; half++, row += 16) {
        const int64_t *rows_at = a->of.d.rows_at + row;
        int are_together = 1;
        for (int i = 1; i < 16; i++) are_together = are_together && rows_at[i] - rows_at[0] == i * (int64_t)sizeof(float);
        if (are_together) (a->pieces == 2) ? gather_tiles(a, rows_at, 1, 2, to + half * 16) : gather_tiles(a, rows_at, 1, 1, to + half * 16);
        else (a->pieces == 2) ? gather_tiles(a, rows_at, 0, 2, to + half * 16) : gather_tiles(a, rows_at, 0, 1, to + half * 16);
    }
}

/* Copy some filters, channel by channel: those of a channel may lie together. */
static void copy_filters(void *user, size_t index) {
    const Gathered *a = user;
    const Convolution *u = a->of.d.u;
    const int64_t first = (int64_t)index * COPIED, end = gemm_min(first + COPIED, a->product.m), taps = product_of(u->taps);
    const int joined = side_by_side(u->taps, u->w_steps);
    for (int64_t c = 0; c < u->channels; c++)
        for (int64_t f = first; f < end; f++) {
            const float *from = u->w + a->group * u->w_batch + (a->first + f) * u->w_filter;
            float *to = a->filters + f * a->row + c * taps;
            if (joined) copy_line(to, from + c * u->w_channel, taps);
            else
                for (int64_t t = 0; t < taps; t++) to[t] = *(const float *)((const char *)from + a->of.weights_at[c * taps + t]);
        }
}

/* Return at least so many elements, which are an odd number of lines: rows of them spread over all sets of a cache. */
static int64_t odd_lines(int64_t elements) { return (elements + 15) / 16 * 16 | 16; }

/* Write sums to the result. */
static void store_windows(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
    const Gathered *a = user;
    const int64_t c_row = a->product.c_strides.row;
    (void)batch;
    store_lanes(&a->of, a->group, column0, column1, a->first + row0, row1 - row0, a->c + row0 * c_row + column0, c_row);
}

/* Return how far apart the terms of a filter are where it lies, or 0 if it is packed from a copy. */
static int64_t term_stride(const Convolution *u) {
    const int64_t taps = product_of(u->taps);
    const int is_line = side_by_side(u->taps, u->w_steps) && (u->channels == 1 || u->w_channel == taps);
    const int64_t stride = is_line ? 1 : taps == 1 ? u->w_channel : 0;
    return stride == 1 || u->w_filter == 1 ? stride : 0;
}

/* Return whether the places of all images lie side by side in the result, without more to compute. */
static int are_lines(const Convolution *u) {
    const int64_t many = product_of(u->places);
    return side_by_side(u->places, u->y_steps) && (u->y_image == many || u->images == 1) && !u->bias && !u->relu;
}

/* Compute a group, some filters after others if they are copied: the copies stay in a cache. */
static void multiply_gathered(Context *context, Gathered *a) {
    const Convolution *u = a->of.d.u;
    gemm_product *g = &a->product;
    g->a_strides = a->stride ? (gemm_strides){u->w_filter, a->stride, {0, 0}} : (gemm_strides){a->row, 1, {0, 0}};
    for (a->first = 0; a->first < u->filters; a->first += a->together) {
        g->m = gemm_min(a->together, u->filters - a->first);
        if (!a->stride) share_tasks(context, thread_count, a, copy_filters, (g->m + COPIED - 1) / COPIED);
        g->a = a->stride ? u->w + a->group * u->w_batch : a->filters;
        g->c = g->epilogue ? a->c : u->y + a->group * u->y_batch + a->first * u->y_filter;
        gemm(g);
    }
}

static Gathered plan_gathered(const Convolution *u) {
    Gathered a = {.of = {.d = {.u = u, .tasks = thread_count}}, .pieces = pieces_of_all, .stride = term_stride(u)};
    a.of.copied = lay_out_windows(&a.of);
    const int64_t terms = a.of.d.terms;
    a.lines = panel_lines(terms, a.pieces), a.row = odd_lines(terms);
    const int64_t few = upto(COPIES / a.row + 1, BLOCK_LINES) * thread_count;
    const int direct = are_lines(u);
    a.together = a.stride ? u->filters : gemm_min(few, u->filters);
    a.product = (gemm_product){.m = a.together, .n = a.of.rows, .k = terms, .batch = {1, 1}, .pieces = a.pieces, .threads = thread_count,
                               .parallel_for = run_parallel, .epilogue = direct ? NULL : store_windows};
    a.panels = (a.of.rows + BLOCK_LINES - 1) / BLOCK_LINES;
    a.product.c_strides = (gemm_strides){direct ? u->y_filter : odd_lines(a.of.rows), 1, {0, 0}};
    a.copied = a.stride ? 0 : a.together * a.row, a.sums = direct ? 0 : a.together * a.product.c_strides.row;
    a.window_bytes = (size_t)(a.panels * a.lines) * sizeof(Line);
    a.before = (a.window_bytes + gemm_scratch(&a.product) + (size_t)listed_windows(&a.of) * sizeof(int64_t) + 63) / 64 * 64;
    return a;
}

static size_t gathered_scratch(const Convolution *u) {
    const Gathered a = plan_gathered(u);
    return a.before + (size_t)(a.of.copied + a.copied + a.sums) * sizeof(float);
}

static void gathered_run(Context *context, const Convolution *u, void *scratch) {
    Gathered a = plan_gathered(u);
    gemm_product *g = &a.product;
    a.windows = scratch, a.c = (float *)((char *)scratch + a.before), a.filters = a.c + a.sums;
    g->scratch = (char *)scratch + a.window_bytes, g->panels = scratch, g->pool = context, g->user = &a;
    find_windows(context, &a.of, (int64_t *)((char *)g->scratch + gemm_scratch(g)), a.filters + a.copied);
    for (a.group = 0; a.group < u->groups; a.group++) {
        share_tasks(context, thread_count, &a, gather_panel, a.panels);
        multiply_gathered(context, &a);
    }
}
#endif

/* Convolutions whose filters are lanes. No window is unfolded: each element of the input is read where it lies.
 *
 *     sums[place][filters] += copy[place + tap] * w[channel, tap][filters]
 *
 * The elements of copies and of packed filters are float32 numbers or, in pairs.h, pairs of bfloat16 numbers: one of a
 * channel of the first half, and one of the channel as far in the second half. Terms of a filter then lie as it is stored.
 *
 * A term of the sum is a channel and a tap. A copy of the input has zeros around it, so that each term lies at a fixed
 * distance from the place. A tile of sums stays in registers. Its rows are places side by side on the last axis; or, if
 * lines are short or the kernel is larger than the result, as in gradients of weights, any places of any images.
 *
 * As in gemm.h, each sum is always added up in one order.
 */
#pragma once
#include "bfloat16.h"
#include "float32.h"
#include "geometry.h"
#include "matrix.h"
#include "ort.h"
#include "pairs.h"
#include "resources.h"

enum {
    WIDTH = 2 * LANES, /* filters of a panel */
    SHORT_LINE = 6,    /* places of a line, below which the rows of a tile may be any places */
    BLOCK = 1 << 17,   /* elements of the filters that a block of channels has */
    PART = 3 << 15,    /* elements of the copy and the sums that a task has in its cache */
};

/* All tasks share this. */
typedef struct {
    const Convolution *u;
    int is_paired;                  /* whether elements are pairs of channels, each of which counts as one channel here */
    int64_t depth;                  /* channels, or pairs of them */
    int64_t first, channels, terms; /* of a block of channels */
    int64_t panels, panel, row;     /* of filters; the elements of one, and of a row of sums */
    int64_t slices, tasks;          /* of channels to pack apart, of places */
    int64_t lowest[3], reach[3];    /* of all taps of the first place: the least index, and how far they reach */
    int64_t extents[3], steps[3], channel, image; /* of a copy */
    int64_t parts, cut, sums;       /* of a plane, the axis that they cut; the elements of a task's sums */
    int anywhere;                   /* whether the rows of a tile may be any places */
    int64_t of_filters, of_copies, of_sums, listed; /* elements of scratch memory */
    int64_t *terms_at, *rows_at;    /* where they lie in a copy, in bytes */
    float *w, *copies, *c;
} Direct;

#define TILE_OPERANDS                                                                                                  \
    int64_t terms, const char *a, int64_t a_row, int64_t ahead, const int64_t *rows_at, const int64_t *terms_at,       \
        const float *b, float *c, int64_t c_row, int accumulate

/* Add terms, which are `paired` or not, to mr rows of `vectors` vectors of sums. Row i of a term lies at a +
 * terms_at[term] + i * a_row, or, if `anywhere`, at a + terms_at[term] + rows_at[i]. What lies `ahead` of the rows is
 * fetched into the cache. mr, vectors, anywhere and paired are constants. */
GEMM_INLINE void add_terms(int mr, int vectors, int anywhere, int paired, TILE_OPERANDS) {
    Lanes sums[GEMM_MR][2] = {{{0}}};
    int64_t a_row3 = 3 * a_row;
    __asm__("" : "+r"(a_row3)); /* as in gemm.h */
#pragma GCC unroll 2
    for (int64_t t = 0; t < terms; t++, b += vectors * LANES) {
        const char *a0 = a + terms_at[t], *a5 = a0 + 5 * a_row, *a10 = a0 + 10 * a_row;
        if (!anywhere) __builtin_prefetch(a0 + ahead);
        const Lanes b0 = AT(b), b1 = AT(b + (vectors - 1) * LANES);
#pragma GCC unroll 14
        for (int i = 0; i < mr; i++) {
            const char *from = i < 5 ? a0 : i < 10 ? a5 : a10;
            from = anywhere ? a0 + rows_at[i] : i % 5 == 3 ? from + a_row3 : from + i % 5 * a_row;
            const float x = *(const float *)from;
            if (paired) {
                sums[i][0] = add_dot_products(sums[i][0], x, b0);
                if (vectors > 1) sums[i][1] = add_dot_products(sums[i][1], x, b1);
                continue;
            }
            sums[i][0] += x * b0;
            if (vectors > 1) sums[i][1] += x * b1;
        }
    }
    gemm_store(mr, vectors, sums, c, c_row, accumulate);
}

typedef void (*Tile)(TILE_OPERANDS);
#define TILE(name, mr, vectors, anywhere, paired)                                                            \
    GEMM_WIDE static void name(TILE_OPERANDS) {                                                              \
        add_terms(mr, vectors, anywhere, paired, terms, a, a_row, ahead, rows_at, terms_at, b, c, c_row, accumulate); \
    }
#define FLOAT_TILES(mr)                                            \
    TILE(tile_1_##mr, mr, 1, 0, 0) TILE(tile_2_##mr, mr, 2, 0, 0) \
    TILE(any_1_##mr, mr, 1, 1, 0) TILE(any_2_##mr, mr, 2, 1, 0)
#define FLOAT_POINTERS(mr) tile_1_##mr, tile_2_##mr, any_1_##mr, any_2_##mr
#ifdef GEMM_HAS_PAIRS
#define TILES(mr)                                                   \
    FLOAT_TILES(mr)                                                 \
    TILE(pair_1_##mr, mr, 1, 0, 1) TILE(pair_2_##mr, mr, 2, 0, 1)   \
    TILE(pair_any_1_##mr, mr, 1, 1, 1) TILE(pair_any_2_##mr, mr, 2, 1, 1)
#define TILE_POINTERS(mr) {FLOAT_POINTERS(mr), pair_1_##mr, pair_2_##mr, pair_any_1_##mr, pair_any_2_##mr},
#else
#define TILES FLOAT_TILES
#define TILE_POINTERS(mr) {FLOAT_POINTERS(mr)},
#endif
GEMM_PASTE(GEMM, GEMM_MR)(TILES)
static const Tile direct_tiles[][8] = {GEMM_PASTE(GEMM, GEMM_MR)(TILE_POINTERS)};

/* Pack a panel of filters, term by term. */
static void pack_panel(void *user, size_t index) {
    const Direct *d = user;
    const Convolution *u = d->u;
    const int64_t panel = (int64_t)index / d->slices, group = panel / d->panels, filter = panel % d->panels * WIDTH;
    const int64_t many = gemm_min(u->filters - filter, WIDTH), row = many > LANES ? WIDTH : LANES;
    const int64_t taps = product_of(u->taps);
    const int64_t first = d->first + (d->slices > 1 ? (int64_t)index % d->slices : 0);
    const int64_t channels = d->slices > 1 ? 1 : d->channels, joined = side_by_side(u->taps, u->w_steps);
    const int64_t rest = (u->filters - 1 - filter) * u->w_filter + (u->channels - 1 - first) * u->w_channel + taps;
    const float *w = u->w + group * u->w_batch + filter * u->w_filter + first * u->w_channel;
    float *to = d->w + panel * d->panel + (first - d->first) * taps * row;
    const int is_line = joined && (channels == 1 || u->w_channel == taps);
    if (d->is_paired) {
        const int64_t half = d->depth * u->w_channel, whole = first + channels + d->depth <= u->channels && taps > 1;
        if (is_line && whole) pack_pairs(w, w + half, channels * taps, many, u->w_filter, row, to);
        for (int64_t c = 0; !(is_line && whole) && c < channels; c++, w += u->w_channel) {
            const float *second = first + c + d->depth < u->channels ? w + half : NULL;
            int64_t at[4] = {0};
            if (joined && taps >= LEAST_TURNED) pack_pairs(w, second, taps, many, u->w_filter, row, to + c * taps * row);
            for (int64_t t = 0; !(joined && taps >= LEAST_TURNED) && t < taps; t++, advance(u->taps, at)) {
                const int64_t from = at[1] * u->w_steps[0] + at[2] * u->w_steps[1] + at[3] * u->w_steps[2];
                copy_pairs(w + from, second ? second + from : NULL, u->w_filter, many, 1, 0, (int32_t *)to + (c * taps + t) * row);
            }
        }
        return;
    }
    if (is_line || taps == 1) {
        gemm_pack(channels * taps, many, row, w, is_line ? 1 : u->w_channel, u->w_filter, rest, to);
        return;
    }
    for (int64_t c = 0; c < channels; c++, w += u->w_channel) {
        int64_t at[4] = {0};
        if (joined) gemm_pack(taps, many, row, w, 1, u->w_filter, rest - c * u->w_channel, to + c * taps * row);
        for (int64_t t = 0; !joined && t < taps; t++, advance(u->taps, at)) {
            const float *from = w + at[1] * u->w_steps[0] + at[2] * u->w_steps[1] + at[3] * u->w_steps[2];
            for (int64_t o = 0; o < many; o++) to[(c * taps + t) * row + o] = from[o * u->w_filter];
        }
    }
}

/* Copy a line of at least `many` and at most twice as many elements, where `many` is a constant. */
GEMM_INLINE void copy_ends(float *to, const float *from, int64_t length, int64_t many) {
    memcpy(to, from, (size_t)many * sizeof *to);
    memcpy(to + length - many, from + length - many, (size_t)many * sizeof *to);
}

/* Copy contiguous elements. To call memcpy takes longer than to copy a short line. */
GEMM_INLINE void copy_line(float *to, const float *from, int64_t length) {
    for (; length > 2 * LANES; length -= LANES, to += LANES, from += LANES) AT(to) = AT(from);
    if (length >= LANES) copy_ends(to, from, length, LANES);
    else if (length >= 8) copy_ends(to, from, length, 8);
    else if (length >= 4) copy_ends(to, from, length, 4);
    else
        for (int64_t k = 0; k < length; k++) to[k] = from[k];
}

/* Copy a region of a block's channels, with zeros where it leaves the image. */
static void copy_region(const Direct *d, const float *x, const int64_t from[3], const int64_t extents[3], float *to) {
    const Convolution *u = d->u;
    int64_t low[3], high[3];
    int outside = 0;
    for (int i = 0; i < 3; i++) {
        low[i] = from[i] < 0 ? -from[i] : 0, high[i] = gemm_min(u->sizes[i] - from[i], extents[i]);
        outside |= low[i] > 0 || high[i] < extents[i];
    }
    if (outside) memset(to, 0, (size_t)d->image * sizeof *to);
    if (high[2] <= low[2]) return;
    const int64_t length = high[2] - low[2], step = u->steps[2];
    x += (from[2] + low[2]) * step, to += low[2];
    for (int64_t c = 0; c < d->channels; c++, x += u->x_channel, to += d->channel)
        for (int64_t i = low[0]; i < high[0]; i++) {
            const float *line = x + (from[0] + i) * u->steps[0] + (from[1] + low[1]) * u->steps[1];
            float *copy = to + i * d->steps[0] + low[1] * d->steps[1];
            const float *second = d->first + c + d->depth < u->channels ? line + d->depth * u->x_channel : NULL;
            for (int64_t j = low[1]; j < high[1]; j++, line += u->steps[1], copy += d->steps[1])
                if (d->is_paired) {
                    copy_pairs(line, second, step, length, 1, 0, (int32_t *)copy);
                    if (second) second += u->steps[1];
                } else if (step == 1) copy_line(copy, line, length);
                else
                    for (int64_t k = 0; k < length; k++) copy[k] = line[k * step];
        }
}

/* Add a bias to sums of up to LANES filters, and apply Relu. */
static void activate(const float *bias, int64_t many, int relu, int64_t rows, float *c, int64_t row) {
    float b[LANES] = {0};
    for (int64_t o = 0; bias && o < many; o++) b[o] = bias[o];
    const Lanes add = AT(b), zero = {0};
    for (int64_t i = 0; i < rows; i++, c += row) {
        const Lanes sum = AT(c) + add;
        AT(c) = relu ? (Lanes)((Ints)sum & ~(sum <= zero)) : sum;
    }
}

/* Transpose rows of sums to the result. The rows are the places from number `first` on. */
static void store_rows(const Direct *d, int64_t group, int64_t first, int64_t end, float *c) {
    const Convolution *u = d->u;
    const int64_t step = side_by_side(u->places, u->y_steps) ? 1 : u->y_steps[2];
    for (int64_t r = first, rows; r < end; r += rows, c += rows * d->row) {
        float *y;
        rows = gemm_min(place_of(u, group, r, &y), end - r);
        for (int64_t o = 0; o < u->filters; o += LANES)
            for (int64_t i = 0; i < rows; i += LANES) {
                const int64_t filters = gemm_min(LANES, u->filters - o), length = gemm_min(LANES, rows - i);
                float *to = y + i * step + o * u->y_filter, *from = c + i * d->row + o, square[LANES * LANES];
                if (u->bias || u->relu)
                    activate(u->bias ? u->bias + group * u->filters + o : NULL, filters, u->relu, length, from, d->row);
                if (filters == LANES && length == LANES && step == 1) {
                    gemm_transpose(from, d->row, to, u->y_filter);
                    continue;
                }
                gemm_transpose(from, d->row, square, LANES);
                for (int64_t f = 0; f < filters; f++)
                    for (int64_t k = 0; k < length; k++) to[f * u->y_filter + k * step] = square[f * LANES + k];
            }
    }
}

/* Add terms to rows of sums, for a panel of a group's filters. The rows have the stride `step` in a copy, or lie at
 * rows_at if that is not NULL. */
static void add_block(const Direct *d, int64_t group, int64_t panel, int64_t term, int64_t terms, const float *a,
                      int64_t step, const int64_t *rows_at, int64_t rows, float *c) {
    const int two = d->u->filters - panel * WIDTH > LANES;
    const float *w = d->w + (group * d->panels + panel) * d->panel + term * (two ? WIDTH : LANES);
    const Tile tile = direct_tiles[rows - 1][(d->is_paired ? 4 : 0) + (rows_at ? 2 : 0) + two];
    tile(terms, (const char *)a, step * (int64_t)sizeof *a, 0, rows_at, d->terms_at + term, w, c + panel * WIDTH, d->row,
         term > 0 || d->first > 0);
}

/* Compute some of the parts of all planes, one after the other. A part is some lines, or a piece of a line, with all
 * filters of a group. */
static void convolve_parts(void *user, size_t task) {
    const Direct *d = user;
    const Convolution *u = d->u;
    const int64_t parts = u->images * u->groups * u->places[0] * d->parts, blocks = gemm_parts(d->terms, GEMM_KC);
    const int64_t end = gemm_begin(parts, (int64_t)task + 1, d->tasks), step = u->place_moves[2];
    float *copy = d->copies + (int64_t)task * (d->image + d->sums), *c = copy + d->image;
    for (int64_t part = gemm_begin(parts, (int64_t)task, d->tasks); part < end; part++) {
        const int64_t plane = part / d->parts % u->places[0], unit = part / d->parts / u->places[0];
        const int64_t image = unit / u->groups, group = unit % u->groups;
        int64_t first[3] = {plane, 0, 0}, many[3] = {1, u->places[1], u->places[2]}, from[3], extents[3];
        first[d->cut] = gemm_begin(u->places[d->cut], part % d->parts, d->parts);
        many[d->cut] = gemm_begin(u->places[d->cut], part % d->parts + 1, d->parts) - first[d->cut];
        for (int i = 0; i < 3; i++) {
            from[i] = first[i] * u->place_moves[i] + d->lowest[i];
            extents[i] = (many[i] - 1) * u->place_moves[i] + d->reach[i];
        }
        copy_region(d, u->x + image * u->x_image + group * u->channels * u->x_channel, from, extents, copy);
        const int64_t tiles_of_line = gemm_parts(many[2], GEMM_MR);
        for (int64_t b = 0; b < blocks; b++) {
            const int64_t term = gemm_begin(d->terms, b, blocks), terms = gemm_begin(d->terms, b + 1, blocks) - term;
            for (int64_t panel = 0; panel < d->panels; panel++)
                for (int64_t line = 0; line < many[1]; line++)
                    for (int64_t t = 0; t < tiles_of_line; t++) {
                        const int64_t x = gemm_begin(many[2], t, tiles_of_line);
                        const int64_t rows = gemm_begin(many[2], t + 1, tiles_of_line) - x;
                        const float *a = copy + line * u->place_moves[1] * d->steps[1] + x * step;
                        add_block(d, group, panel, term, terms, a, step, NULL, rows, c + (line * many[2] + x) * d->row);
                    }
        }
        const int64_t row = ((image * u->places[0] + plane) * u->places[1] + first[1]) * u->places[2] + first[2];
        store_rows(d, group, row, row + many[1] * many[2], c);
    }
}

/* Copy a block's channels of an image and a group. */
static void copy_image(void *user, size_t index) {
    const Direct *d = user;
    const int64_t group = (int64_t)index / d->u->images, image = (int64_t)index % d->u->images;
    const float *x = d->u->x + image * d->u->x_image + (group * d->u->channels + d->first) * d->u->x_channel;
    copy_region(d, x, d->lowest, d->extents, d->copies + (int64_t)index * d->image);
}

/* Add a block of channels to some of the places of all images and groups, for all filters of a group. */
static void convolve_places(void *user, size_t task) {
    const Direct *d = user;
    const Convolution *u = d->u;
    const int64_t rows = u->images * product_of(u->places), of_group = gemm_parts(rows, GEMM_MR);
    const int64_t first = gemm_begin(u->groups * of_group, (int64_t)task, d->tasks);
    const int64_t end = gemm_begin(u->groups * of_group, (int64_t)task + 1, d->tasks);
    const int64_t blocks = gemm_parts(d->terms, GEMM_KC);
    for (int64_t b = 0; b < blocks; b++) {
        const int64_t term = gemm_begin(d->terms, b, blocks), terms = gemm_begin(d->terms, b + 1, blocks) - term;
        for (int64_t panel = 0; panel < d->panels; panel++)
            for (int64_t i = first; i < end; i++) {
                const int64_t group = i / of_group, row = gemm_begin(rows, i % of_group, of_group);
                add_block(d, group, panel, term, terms, d->copies + group * u->images * d->image, 0, d->rows_at + row,
                          gemm_begin(rows, i % of_group + 1, of_group) - row, d->c + group * d->sums + row * d->row);
            }
    }
}

static void store_places(void *user, size_t task) {
    const Direct *d = user;
    const int64_t rows = d->u->images * product_of(d->u->places), end = gemm_begin(rows, (int64_t)task + 1, d->tasks);
    for (int64_t g = 0, row = gemm_begin(rows, (int64_t)task, d->tasks); g < d->u->groups; g++)
        store_rows(d, g, row, end, d->c + g * d->sums + row * d->row);
}

/* Find where terms or rows lie in a copy, in bytes: at the sum of their indices times their moves. */
static void find(int64_t many, const int64_t sizes[3], const int64_t moves[4], int64_t start, int64_t *found) {
    const int64_t size = sizeof(float), step = moves[3] * size;
    const int64_t *end = found + many;
    for (int64_t c = 0; found < end; c++)
        for (int64_t i = 0; i < sizes[0]; i++)
            for (int64_t j = 0; j < sizes[1]; j++) {
                int64_t at = (start + c * moves[0] + i * moves[1] + j * moves[2]) * size;
                for (int64_t k = 0; k < sizes[2]; k++, at += step) *found++ = at;
            }
}

/* Find how far all taps of a place reach. */
static void find_reach(Direct *d) {
    for (int i = 0; i < 3; i++) {
        const int64_t last = (d->u->taps[i] - 1) * d->u->tap_moves[i];
        d->lowest[i] = gemm_min(last, 0) - d->u->pads[i];
        d->reach[i] = (last < 0 ? -last : last) + 1;
    }
}

/* Lay out a copy for so many places: channel by channel or, for `lines`, line by line. */
static void lay_out(Direct *d, const int64_t many[3], int lines) {
    for (int i = 0; i < 3; i++) d->extents[i] = (many[i] - 1) * d->u->place_moves[i] + d->reach[i];
    d->steps[2] = 1, d->steps[1] = d->extents[2] * (lines ? d->channels : 1), d->steps[0] = d->steps[1] * d->extents[1];
    d->channel = lines ? d->extents[2] : d->steps[0] * d->extents[0];
    d->image = gemm_padded(d->channels * product_of(d->extents));
}

/* Find where terms lie in a copy, and rows if they may be any places. */
static void find_places(const Direct *d, int64_t rows) {
    const Convolution *u = d->u;
    int64_t of_terms[4] = {d->channel}, of_rows[4] = {d->image}, start = 0;
    for (int i = 0; i < 3; i++) {
        of_terms[i + 1] = u->tap_moves[i] * d->steps[i], of_rows[i + 1] = u->place_moves[i] * d->steps[i];
        start -= (d->lowest[i] + u->pads[i]) * d->steps[i];
    }
    find(d->terms, u->taps, of_terms, start, d->terms_at);
    find(rows, u->places, of_rows, 0, d->rows_at);
}

static Direct plan_direct(const Convolution *u, int is_paired) {
    const int64_t taps = product_of(u->taps), rows = u->images * product_of(u->places);
    const int64_t planes = u->images * u->groups * u->places[0];
    const int anywhere = u->places[2] < SHORT_LINE || taps > product_of(u->places);
    const double work = 2.0 * (double)(rows * u->groups) * (double)(u->filters * u->channels * taps);
    const int64_t threads = work > 1e6 ? thread_count : 1;
    const int64_t depth = is_paired ? (u->channels + 1) / 2 : u->channels;
    Direct d = {.u = u, .is_paired = is_paired, .depth = depth, .channels = depth, .parts = 1, .row = upto(u->filters, LANES), .anywhere = anywhere};
    d.panels = gemm_parts(u->filters, WIDTH);
    find_reach(&d);
    int64_t many[3] = {anywhere ? u->places[0] : 1, u->places[1], u->places[2]}; /* places that a copy is for */
    if (anywhere) {
        d.channels = gemm_min(depth, BLOCK / (taps * u->groups * d.panels * WIDTH + 1) + 1);
        d.sums = (rows + LANES) * d.row;
        d.tasks = gemm_min(threads, u->groups * gemm_parts(rows, GEMM_MR));
    } else {
        const int64_t elements = u->place_moves[1] * u->place_moves[2] * d.reach[0] * depth + d.row;
        d.cut = many[1] > 1 ? 1 : 2;
        d.parts = gemm_parts(many[1] * many[2] * elements, PART);
        if (planes * d.parts < threads) d.parts = gemm_parts(threads, planes);
        d.parts = gemm_min(d.parts, many[d.cut]);
        many[d.cut] = (many[d.cut] + d.parts - 1) / d.parts;
        d.sums = (many[1] * many[2] + LANES) * d.row;
        d.tasks = gemm_min(threads, planes * d.parts);
    }
    lay_out(&d, many, !anywhere);
    d.terms = d.channels * taps, d.panel = (d.terms + LANES) * WIDTH;
    d.slices = taps >= LANES && side_by_side(u->taps, u->w_steps) ? d.channels : 1;
    d.of_filters = u->groups * d.panels * d.panel, d.of_copies = anywhere ? u->groups * u->images * d.image : 0;
    d.of_sums = anywhere ? u->groups * d.sums : d.tasks * (d.image + d.sums);
    d.listed = d.terms + (anywhere ? rows : 0);
    return d;
}

static size_t scratch_of_direct(const Convolution *u, int is_paired) {
    const Direct d = plan_direct(u, is_paired);
    return (size_t)(d.of_filters + d.of_copies + d.of_sums) * sizeof(float) + (size_t)d.listed * sizeof(int64_t);
}

static void compute_direct(Context *context, const Convolution *u, int is_paired, void *scratch) {
    const int64_t taps = product_of(u->taps);
    Direct d = plan_direct(u, is_paired);
    d.w = scratch, d.copies = d.w + d.of_filters, d.c = d.copies + d.of_copies;
    d.terms_at = (int64_t *)(d.c + d.of_sums), d.rows_at = d.terms_at + d.terms;
    find_places(&d, d.listed - d.terms);
    do {
        d.channels = gemm_min(d.channels, d.depth - d.first), d.terms = d.channels * taps;
        d.slices = gemm_min(d.slices, d.channels);
        share_tasks(context, d.tasks, &d, pack_panel, u->groups * d.panels * d.slices);
        if (d.anywhere) share_tasks(context, d.tasks, &d, copy_image, u->groups * u->images);
        share_tasks(context, d.tasks, &d, d.anywhere ? convolve_places : convolve_parts, d.tasks);
    } while ((d.first += d.channels) < d.depth);
    if (d.anywhere) share_tasks(context, d.tasks, &d, store_places, d.tasks);
}

static size_t direct_scratch(const Convolution *u) { return scratch_of_direct(u, 0); }
static void direct_run(Context *context, const Convolution *u, void *scratch) { compute_direct(context, u, 0, scratch); }
static size_t paired_scratch(const Convolution *u) { return scratch_of_direct(u, 1); }
static void paired_run(Context *context, const Convolution *u, void *scratch) { compute_direct(context, u, 1, scratch); }

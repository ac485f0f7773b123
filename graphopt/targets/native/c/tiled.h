/* Convolutions whose operands are bfloat16 numbers, in tiles of AMX; see bfloat16.h.
 *
 * A copy of an operand has zeros around it, and pairs of its channels in one element: what lies below a window is a tile
 * of B as it is, and nothing is unfolded. The indices of windows that follow each other are a *flow*: a line of a copy
 * has only indices that are a stride apart, those of each remainder by the stride (a *phase*) in a plane of their own.
 * So a window moves by one element, from the end of a line on to the next. What a window computes between lines is
 * dropped.
 *
 * In convolutions, the flow are places, each tap shifts the window, and tiles sum over channels:
 *
 *     sums[filter][places] += w[filter][channels] * copy[channels][places + shift]
 *
 * In gradients of weights, whose kernels are larger than their results, the flow are taps, each place shifts the window,
 * and tiles sum over pairs of channels (the images of a batch) and taps:
 *
 *     sums[place][image][filters] += copy[image][taps + shift] * w[taps][filters]
 */
#pragma once
#include "bfloat16.h"
#include "geometry.h"
#include "lines.h"
#include "matrix.h"
#include "ort.h"
#include "pairs.h"
#include "resources.h"

#ifdef GEMM_HAS_TILES

enum {
    WINDOWS = 128,            /* that are stored together */
    CHUNK = 3 << 18,          /* bytes of copies that a task has in its L2 cache */
    BLOCKS_TOGETHER = 8,      /* of both operands, in the L1 cache */
};

/* Tiles of A and of B of a product. Blocks lie at a + a_places[i] and b + b_places[i]; both in bytes. */
typedef struct {
    const char *a, *b;
    int64_t a_line, a_half, a_piece, b_line, b_half, b_piece;
    const int64_t *a_places, *b_places;
} TileProduct;

/* Add the blocks from `begin` to `end` to 32 x 32 sums, whose rows are so many apart. */
GEMM_INLINE void add_tiles(const TileProduct *p, int pieces, int64_t begin, int64_t end, float *sums, int64_t row) {
    const int64_t step = row * 4, a_line = p->a_line, b_line = p->b_line, a_half = p->a_half, b_half = p->b_half;
    float *below = sums + 16 * row;
    if (begin == 0) {
        _tile_zero(0);
        _tile_zero(1);
        _tile_zero(2);
        _tile_zero(3);
    } else {
        _tile_loadd(0, sums, step);
        _tile_loadd(1, sums + 16, step);
        _tile_loadd(2, below, step);
        _tile_loadd(3, below + 16, step);
    }
    for (int64_t i = begin; i < end; i++) {
        const char *a = p->a + p->a_places[i], *b = p->b + p->b_places[i];
#define READ_A(at)                          \
    _tile_loadd(4, at, a_line);             \
    _tile_loadd(5, (at) + a_half, a_line);
#define READ_B(at)                          \
    _tile_loadd(6, at, b_line);             \
    _tile_loadd(7, (at) + b_half, b_line);
#define ADD                                 \
    _tile_dpbf16ps(0, 4, 6);                \
    _tile_dpbf16ps(1, 4, 7);                \
    _tile_dpbf16ps(2, 5, 6);                \
    _tile_dpbf16ps(3, 5, 7);
        READ_A(a)
        if (pieces == 2) {
            READ_B(b + p->b_piece) ADD READ_B(b) ADD READ_A(a + p->a_piece) ADD
        } else {
            READ_B(b) ADD
        }
    }
    _tile_stored(0, sums, step);
    _tile_stored(1, sums + 16, step);
    _tile_stored(2, below, step);
    _tile_stored(3, below + 16, step);
}
static void add_tiles_1(const TileProduct *p, int64_t begin, int64_t end, float *sums, int64_t row) { add_tiles(p, 1, begin, end, sums, row); }
static void add_tiles_2(const TileProduct *p, int64_t begin, int64_t end, float *sums, int64_t row) { add_tiles(p, 2, begin, end, sums, row); }

/* All tasks share this. */
typedef struct {
    const Convolution *u;
    PairedCopy x, w;          /* w in gradients of weights alone */
    int pieces;
    int64_t group, panels, flow, tasks, chunk; /* of 32 filters; of windows; groups of windows, or blocks, that a task computes together */
    int64_t blocks, *a_places, *b_places, *shifts;
    char *filters;            /* in tiles */
    float *sums;
    int64_t filter_bytes, summed, copied; /* scratch memory: of filters; elements of sums, and of copies */
} Tiled;

/* --- Convolutions --- */

/* Pack 32 filters, tap by tap, channels in blocks of 32. */
static void pack_filters(void *user, size_t panel) {
    const Tiled *t = user;
    const Convolution *u = t->u;
    const int64_t taps = product_of(u->taps), blocks = t->blocks / taps;
    const __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0),
                                              _mm512_set1_epi32((int)u->w_channel));
    const __m512 zero = _mm512_setzero_ps();
    Line *to = (Line *)t->filters + (int64_t)panel * t->blocks * t->pieces * 32;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t line = 0; line < 32; line++) {
            const int64_t filter = (int64_t)panel * 32 + line, rest = u->channels - block * 32;
            const int64_t even = gemm_min(16, (rest + 1) / 2), odd = gemm_min(16, rest / 2);
            const __mmask16 firsts = filter < u->filters ? (1u << even) - 1 : 0, seconds = filter < u->filters ? (1u << odd) - 1 : 0;
            const float *from = u->w + t->group * u->w_batch + filter * u->w_filter + block * 32 * u->w_channel;
            int64_t at[4] = {0};
            for (int64_t tap = 0; tap < taps; tap++, advance(u->taps, at)) {
                const float *w = from + at[1] * u->w_steps[0] + at[2] * u->w_steps[1] + at[3] * u->w_steps[2];
                Line *tile = to + (tap * blocks + block) * t->pieces * 32 + line;
                const __m512 x = _mm512_mask_i32gather_ps(zero, firsts, places, w, 4);
                const __m512 y = _mm512_mask_i32gather_ps(zero, seconds, places, w + u->w_channel, 4);
                if (t->pieces == 2) split_pairs(x, y, tile, tile + 32);
                else *tile = round_pairs(x, y, 0);
            }
        }
}

/* Windows that lie side by side in the result, too: the first of some windows, where it is in the result, how many. */
typedef struct {
    int64_t first, at, length;
} Run;

/* Find the runs among the windows from `first` on, without what lies between lines. */
static int64_t find_runs(const Tiled *t, int64_t first, Run *runs) {
    const Convolution *u = t->u;
    const int64_t end = gemm_min(first + WINDOWS, t->flow), *extents = t->x.extents;
    int64_t many = 0;
    for (int64_t p = first, next; p < end; p = next) {
        int64_t at[4];
        indices(extents, p, at);
        next = p + extents[2] - at[3];
        if (at[1] >= u->places[0] || at[2] >= u->places[1] || at[3] >= u->places[2]) continue;
        Run *run = runs + many++;
        run->first = p - first, run->at = at[0] * u->y_image, run->length = gemm_min(u->places[2] - at[3], end - p);
        for (int i = 0; i < 3; i++) run->at += at[i + 1] * u->y_steps[i];
    }
    return many;
}

/* Write the sums of runs of windows to the result, with bias and Relu. */
static void store_runs(const Tiled *t, int64_t panel, const Run *runs, int64_t many, const float *sums) {
    const Convolution *u = t->u;
    const __m512 zero = _mm512_setzero_ps();
    for (int64_t f = 0; f < gemm_min(32, u->filters - panel * 32); f++, sums += WINDOWS) {
        const int64_t filter = panel * 32 + f;
        const float bias = u->bias ? u->bias[t->group * u->filters + filter] : 0;
        float *y = u->y + t->group * u->y_batch + filter * u->y_filter;
        for (const Run *run = runs; run < runs + many; run++) {
            const float *from = sums + run->first;
            float *to = y + run->at;
            if (u->y_steps[2] != 1) finish(to, from, u->y_steps[2], run->length, bias, u->relu);
            for (int64_t i = 0; u->y_steps[2] == 1 && i < run->length; i += 16) {
                const __mmask16 some = (__mmask16)(run->length - i >= 16 ? 0xffff : (1u << (run->length - i)) - 1);
                __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(some, from + i), _mm512_set1_ps(bias));
                if (u->relu) sum = _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(sum, zero, _CMP_NLE_UQ), sum);
                _mm512_mask_storeu_ps(to + i, some, sum);
            }
        }
    }
}

/* Compute some windows for all filters of a group. What is stored together is long enough to fill lines of the cache. */
static void convolve_windows(void *user, size_t task) {
    const Tiled *t = user;
    const int64_t all = (t->flow + WINDOWS - 1) / WINDOWS, begin = gemm_begin(all, (int64_t)task, t->tasks);
    const int64_t end = gemm_begin(all, (int64_t)task + 1, t->tasks), size = t->blocks * t->pieces * 2048;
    float sums[32 * WINDOWS] __attribute__((aligned(64)));
    Run runs[WINDOWS];
    TileProduct p = {.a_line = 64, .a_half = 1024, .a_piece = 2048, .b_line = t->x.pair * 4, .b_half = 64, .b_piece = t->x.piece * 4,
                     .a_places = t->a_places, .b_places = t->b_places};
    begin_tiles();
    for (int64_t chunk = begin; chunk < end; chunk += t->chunk)
        for (int64_t panel = 0; panel < t->panels; panel++)
            for (int64_t i = chunk; i < gemm_min(chunk + t->chunk, end); i++) {
                const int64_t many = find_runs(t, i * WINDOWS, runs);
                p.a = t->filters + panel * size;
                for (int64_t j = 0; j < WINDOWS && i * WINDOWS + j < t->flow; j += 32) {
                    p.b = (const char *)(t->x.to + i * WINDOWS + j);
                    (t->pieces == 2 ? add_tiles_2 : add_tiles_1)(&p, 0, t->blocks, sums + j, WINDOWS);
                }
                store_runs(t, panel, runs, many, sums);
            }
    end_tiles();
}

/* --- Gradients of weights --- */

/* Transpose the copy of w to tiles: 16 taps in pairs of channels, and 16 filters. */
static void turn_filters(void *user, size_t panel) {
    const Tiled *t = user;
    const int64_t pairs = (t->u->channels + 1) / 2, blocks = (t->flow + 15) / 16;
    for (int64_t pair = 0; pair < pairs; pair++)
        for (int64_t block = 0; block < blocks; block++)
            for (int piece = 0; piece < t->pieces; piece++)
                for (int half = 0; half < 2; half++) {
                    const int64_t filter = (int64_t)panel * 32 + half * 16;
                    const int32_t *from = t->w.to + piece * t->w.piece + pair * t->w.pair + filter * t->w.plane + block * 16;
                    char *to = t->filters + ((((int64_t)panel * pairs + pair) * blocks + block) * t->pieces + piece) * 2048 + half * 1024;
                    gemm_transpose((const float *)from, t->w.plane, (float *)to, 16);
                }
}

/* Sum up some units: a place, 32 images and 32 filters. Those of all places follow each other, and read the same blocks,
 * as few of them together as the L1 cache holds. */
static void convolve_taps(void *user, size_t task) {
    const Tiled *t = user;
    const int64_t places = product_of(t->u->places), units = places * t->panels * ((t->u->images + 31) / 32);
    const int64_t first = gemm_begin(units, (int64_t)task, t->tasks), last = gemm_begin(units, (int64_t)task + 1, t->tasks);
    TileProduct p = {.a_line = t->x.plane * 4, .a_half = t->x.plane * 64, .a_piece = t->x.piece * 4, .b_line = 64, .b_half = 1024,
                     .b_piece = 2048, .a_places = t->a_places, .b_places = t->b_places};
    begin_tiles();
    for (int64_t begin = 0; begin < t->blocks; begin += t->chunk)
        for (int64_t unit = first; unit < last; unit++) {
            const int64_t panels = unit / places;
            p.a = (const char *)(t->x.to + panels / t->panels * 32 * t->x.plane + t->shifts[unit % places]);
            p.b = t->filters + panels % t->panels * t->blocks * t->pieces * 2048;
            (t->pieces == 2 ? add_tiles_2 : add_tiles_1)(&p, begin, gemm_min(begin + t->chunk, t->blocks), t->sums + unit * 1024, 32);
        }
    end_tiles();
}

/* Write the sums of 16 filters to the result. */
static void store_taps(void *user, size_t index) {
    const Tiled *t = user;
    const Convolution *u = t->u;
    const int64_t places = product_of(u->places), filter = (int64_t)index * 16;
    const __mmask16 some = (__mmask16)(u->filters - filter >= 16 ? 0xffff : (1u << (u->filters - filter)) - 1);
    const __m512i lanes = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                             _mm512_set1_epi32((int)u->y_filter));
    for (int64_t image = 0; image < u->images; image++) {
        int64_t at[4] = {0};
        for (int64_t place = 0; place < places; place++, advance(u->places, at)) {
            const float *sums = t->sums + ((image / 32 * t->panels + filter / 32) * places + place) * 1024 + image % 32 * 32 + filter % 32;
            float *y = u->y + t->group * u->y_batch + filter * u->y_filter + image * u->y_image;
            for (int i = 0; i < 3; i++) y += at[i + 1] * u->y_steps[i];
            _mm512_mask_i32scatter_ps(y, some, lanes, _mm512_loadu_ps(sums), 4);
        }
    }
}

/* --- Both --- */

/* Return whether kernels are larger than results, as in gradients of weights. */
static int sums_over_taps(const Convolution *u) { return product_of(u->taps) > product_of(u->places); }

/* Return whether tiles can compute a convolution. */
static int can_shift(const Convolution *u) {
    const int by_taps = sums_over_taps(u);
    const int64_t across = by_taps ? u->y_filter : 2 * u->w_channel;
    const int64_t along = u->steps[2] * (by_taps ? u->tap_moves[2] : u->place_moves[2]);
    for (int i = 0; i < 3; i++)
        if (by_taps && u->tap_moves[i] < 1) return 0;
    return across < MOST_STRIDE && along < MOST_STRIDE && u->w_steps[2] < MOST_STRIDE && !(by_taps && (u->bias || u->relu));
}

/* Find where each block of terms lies: in filters or their copy, and in the copy of the input. */
static void find_blocks(Tiled *t) {
    const Convolution *u = t->u;
    const int by_taps = sums_over_taps(u);
    const int64_t *shifting = by_taps ? u->places : u->taps, *moves = by_taps ? u->place_moves : u->tap_moves;
    const int64_t shifts = product_of(shifting), flow_blocks = (t->flow + 15) / 16, channel_blocks = t->blocks / product_of(u->taps);
    int64_t at[4] = {0}, lowest[3];
    for (int i = 0; i < 3; i++) lowest[i] = gemm_min((shifting[i] - 1) * moves[i], 0);
    for (int64_t s = 0; s < shifts; s++, advance(shifting, at)) {
        const int64_t indices[3] = {at[1] * moves[0] - lowest[0], at[2] * moves[1] - lowest[1], at[3] * moves[2] - lowest[2]};
        t->shifts[s] = shift_of(&t->x, indices);
        for (int64_t block = 0; !by_taps && block < channel_blocks; block++) {
            const int64_t i = s * channel_blocks + block;
            t->a_places[i] = i * t->pieces * 2048, t->b_places[i] = (t->shifts[s] + block * 16 * t->x.pair) * 4;
        }
    }
    for (int64_t i = 0; by_taps && i < t->blocks; i++) {
        t->a_places[i] = (i / flow_blocks * t->x.pair + i % flow_blocks * 16) * 4;
        t->b_places[i] = i * t->pieces * 2048;
    }
}

/* Lay out the copies of a group, and cut the work. */
static Tiled plan_shifted(const Convolution *u) {
    Tiled tiled = {.u = u, .pieces = pieces_of_all}, *t = &tiled;
    const int by_taps = sums_over_taps(u);
    const int64_t taps = product_of(u->taps), pairs = by_taps ? (u->channels + 1) / 2 : upto(u->channels, 32) / 2;
    const int64_t *flowing = by_taps ? u->taps : u->places, *moves = by_taps ? u->tap_moves : u->place_moves;
    PairedCopy *x = &t->x;
    *x = (PairedCopy){.images = u->images, .channels = u->channels, .image = u->x_image, .channel = u->x_channel, .pieces = t->pieces};
    for (int i = 0; i < 3; i++) {
        const int64_t shift = by_taps ? (u->places[i] - 1) * u->place_moves[i] : (u->taps[i] - 1) * u->tap_moves[i];
        x->sizes[i] = u->sizes[i], x->steps[i] = u->steps[i], x->strides[i] = moves[i];
        x->lowest[i] = gemm_min(shift, 0) - u->pads[i];
        x->extents[i] = flowing[i] + (shift < 0 ? -shift : shift) / moves[i];
    }
    t->copied = lay_out_pairs(x, pairs, 1);
    t->panels = (u->filters + 31) / 32;
    t->flow = ((flowing[0] - 1) * x->extents[1] + flowing[1] - 1) * x->extents[2] + flowing[2];
    if (by_taps) {
        t->w = (PairedCopy){.images = u->filters, .channels = u->channels, .image = u->w_filter, .channel = u->w_channel, .pieces = t->pieces};
        memcpy(t->w.sizes, u->taps, sizeof u->taps), memcpy(t->w.steps, u->w_steps, sizeof u->taps);
        memcpy(t->w.extents, x->extents, sizeof x->extents);
        for (int i = 0; i < 3; i++) t->w.strides[i] = 1;
        const int64_t blocks = (t->flow + 15) / 16;
        t->copied += lay_out_pairs(&t->w, pairs, 16) + 32 * t->w.plane;
        t->chunk = BLOCKS_TOGETHER / t->pieces;
        t->blocks = pairs * blocks;
        t->filter_bytes = t->panels * pairs * blocks * t->pieces * 2048;
        t->summed = product_of(u->places) * ((u->images + 31) / 32) * t->panels * 1024;
    } else {
        t->flow += (u->images - 1) * x->plane;
        t->blocks = taps * (pairs / 16);
        t->chunk = CHUNK / (pairs * WINDOWS * 4 * t->pieces) + 1;
        t->filter_bytes = t->panels * t->blocks * t->pieces * 2048;
    }
    return tiled;
}

/* Return how many elements sums and copies have. The last tile of images reads beyond the last image; what it computes
 * there is dropped. */
static int64_t shifted_numbers(const Tiled *t) {
    return upto(t->summed + t->copied + (sums_over_taps(t->u) ? 32 * t->x.plane : 0), 16);
}

static size_t shifted_scratch(const Convolution *u) {
    const Tiled t = plan_shifted(u);
    const int64_t shifts = product_of(sums_over_taps(u) ? u->places : u->taps);
    return (size_t)(t.filter_bytes + shifted_numbers(&t) * 4 + (2 * t.blocks + shifts) * 8);
}

static void shifted_run(Context *context, const Convolution *u, void *scratch) {
    const int by_taps = sums_over_taps(u);
    Tiled t = plan_shifted(u);
    const int64_t units = by_taps ? (u->images + 31) / 32 * t.panels * product_of(u->places) : (t.flow + WINDOWS - 1) / WINDOWS;
    t.filters = scratch, t.sums = (float *)(t.filters + t.filter_bytes);
    t.x.to = (int32_t *)(t.sums + t.summed), t.w.to = t.x.to + t.x.piece * t.pieces + (by_taps ? 32 * t.x.plane : 0);
    t.a_places = (int64_t *)(t.sums + shifted_numbers(&t)), t.b_places = t.a_places + t.blocks, t.shifts = t.b_places + t.blocks;
    t.tasks = gemm_min(thread_count, units);
    find_blocks(&t);
    for (t.group = 0; t.group < u->groups; t.group++) {
        t.x.from = u->x + t.group * u->channels * u->x_channel, t.w.from = u->w + t.group * u->w_batch;
        const int64_t pairs = t.x.piece / t.x.pair;
        share_tasks(context, thread_count, &t.x, copy_image_in_pairs, pairs * u->images);
        if (by_taps) share_tasks(context, thread_count, &t.w, copy_image_in_pairs, pairs * u->filters);
        share_tasks(context, thread_count, &t, by_taps ? turn_filters : pack_filters, t.panels);
        share_tasks(context, thread_count, &t, by_taps ? convolve_taps : convolve_windows, t.tasks);
        if (by_taps) share_tasks(context, thread_count, &t, store_taps, (u->filters + 15) / 16);
    }
}
#endif

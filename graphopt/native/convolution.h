/* Convolutions as matrix products: the windows of the input are put in rows or columns while gemm.h packs its operands,
 * so that no unfolded image lies in memory.
 *
 * Filters are rows and places are columns, and each image is a product of its own; or all images are one product, whose
 * result is then scattered, if an image has few places or they do not lie side by side. If the kernel is larger than
 * the result, as in gradients of weights, places are rows and filters are columns. The same holds for images of few
 * places and many channels, whose channels are put side by side first.
 *
 * Operands may be stored transposed. Kernels have up to three axes; the missing ones come first and have size 1.
 */
#pragma once
#include "product.h"

#if defined(__AVX512F__) || defined(__AVX2__)
#include <immintrin.h>
#endif

enum {
    LANES = GEMM_BYTES / (int)sizeof(float),
    FEW_PLACES = 256,   /* of an image, below which images are merged */
    MANY_FILTERS = 128, /* above which packing the windows costs little beside the product */
    LEAST_OF_GROUP = 8, /* channels and filters, below which a product of a group is too small */
};

/* Rows or columns of the unfolded input: an outer index, and an index for each axis of space. */
typedef struct {
    int64_t step, sizes[3], moves[3];
} Side;

/* x, w and y are found by a step for each index. An element of x is at place * place_move + tap * tap_move - pad. */
typedef struct {
    int64_t groups, images, channels, filters; /* channels and filters of a group */
    int64_t sizes[3], taps[3], places[3];      /* of x, w and y */
    int64_t place_moves[3], tap_moves[3], pads[3];
    const float *x, *w, *bias;
    float *y;
    int64_t x_image, x_channel, steps[3];
    int64_t w_batch, w_filter, w_channel, w_steps[3];
    int64_t y_batch, y_image, y_filter, y_steps[3], y_sizes[3];
    int relu;
    Side rows, columns; /* of the unfolded input */
    int64_t batch[2];   /* from one of its batches to the next, in x */
    const float *c;     /* what is scattered to y */
    int64_t c_batch, c_row;
    const float *turned; /* x before its channels were put side by side */
    int64_t turned_image;
} Convolution;

static int64_t downwards(int64_t x, int64_t y) { return x >= 0 ? x / y : -((-x + y - 1) / y); }

static int64_t product_of(const int64_t sizes[3]) { return sizes[0] * sizes[1] * sizes[2]; }

/* Up to a vector of a row: elements `first` to `last` are copied, and the others are 0. */
typedef struct {
    int64_t to, from;
    uint64_t lanes;  /* a bit for each element to read, and for those between them */
    uint32_t stored; /* a bit for each element to write */
    int first, last, length;
} Piece;

GEMM_INLINE void copy_piece(const Piece *p, const float *from, int64_t step, float *to) {
    from += p->from, to += p->to;
#if defined(__AVX512F__)
    const __mmask16 stored = (__mmask16)p->stored;
    if (step == 1) {
        _mm512_mask_storeu_ps(to, stored, _mm512_maskz_loadu_ps((__mmask16)p->lanes, from));
        return;
    }
    if (step == 2) {
        const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
        const __m512 low = _mm512_maskz_loadu_ps((__mmask16)p->lanes, from);
        const __m512 high = _mm512_maskz_loadu_ps((__mmask16)(p->lanes >> 16), from + 16);
        _mm512_mask_storeu_ps(to, stored, _mm512_permutex2var_ps(low, even, high));
        return;
    }
#elif defined(__AVX2__)
    if (step == 1) {
        const __m256i lane = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        const __m256i first = _mm256_cmpgt_epi32(lane, _mm256_set1_epi32(p->first - 1));
        const __m256i last = _mm256_cmpgt_epi32(_mm256_set1_epi32(p->last), lane);
        const __m256 x = _mm256_maskload_ps(from, _mm256_and_si256(first, last));
        if (p->length == LANES) _mm256_storeu_ps(to, x);
        else _mm256_maskstore_ps(to, _mm256_cmpgt_epi32(_mm256_set1_epi32(p->length), lane), x);
        return;
    }
#endif
    for (int64_t l = 0; l < p->length; l++) to[l] = l >= p->first && l < p->last ? from[l * step] : 0;
}

/* Copy the rows i for which i % together is from first to last: the pieces of row i are those of row i % together,
 * from_step further on for each time that `together` is in i. */
GEMM_INLINE void copy_rows(const Piece *pieces, int64_t many, int64_t first, int64_t last, int64_t rows,
                           int64_t together, const float *from, int64_t from_step, int64_t step, float *to, int64_t to_row) {
    for (int64_t start = 0; start < rows; start += together, from += from_step, to += together * to_row)
        for (int64_t i = first; i < gemm_min(last, rows - start); i++)
            for (int64_t p = 0; p < many; p++) copy_piece(pieces + (i - first) * many + p, from, step, to + i * to_row);
}

/* The indices of a row or a column, from its number. */
static inline void indices(const Side *side, int64_t number, int64_t at[4]) {
    for (int i = 2; i >= 0; number /= side->sizes[i--]) at[i + 1] = number % side->sizes[i];
    at[0] = number;
}

static inline void advance(const Side *side, int64_t at[4]) {
    for (int i = 3; ++at[i] == (i ? side->sizes[i - 1] : INT64_MAX); i--) at[i] = 0;
}

/* A quotient, rounded upwards. */
static inline int64_t upwards(int64_t x, int64_t y) { return y == 1 ? x : x > 0 ? (x + y - 1) / y : -(-x / y); }

/* Write a block of the unfolded input. Rows that differ in the outer index alone are copied alike. */
static void unfold(const Convolution *u, const float *x, int64_t row, int64_t rows, int64_t column, int64_t columns,
                   float *to, int64_t to_row) {
    struct {
        int64_t from, at[3], length;
    } runs[GEMM_KC];
    Piece pieces[2 * GEMM_KC], *next;
    int64_t count = 0, many = 0, at[4];
    const int64_t move = u->columns.moves[2], step = move * u->steps[2], together = product_of(u->rows.sizes);
    if (rows == 0) return;
    indices(&u->columns, column, at);
    for (int64_t done = 0; done < columns; done += runs[count++].length) {
        runs[count].from = at[0] * u->columns.step;
        runs[count].length = gemm_min(u->columns.sizes[2] - at[3], columns - done);
        for (int i = 0; i < 3; i++) runs[count].at[i] = at[i + 1] * u->columns.moves[i] - u->pads[i];
        many += (runs[count].length + LANES - 1) / LANES;
        at[3] = u->columns.sizes[2] - 1;
        advance(&u->columns, at);
    }
    indices(&u->rows, row, at);
    const int64_t all = gemm_min(rows, together), most = many ? 2 * GEMM_KC / many : all;
    for (int64_t first = 0, last; first < all; first = last) {
        last = gemm_min(first + most, all);
        next = pieces;
        for (int64_t i = first; i < last; i++, advance(&u->rows, at)) {
            int64_t done = 0;
            for (int64_t r = 0; r < count; done += runs[r++].length) {
                int64_t moved[3], begin = 0, end = 0;
                for (int j = 0; j < 3; j++) moved[j] = runs[r].at[j] + at[j + 1] * u->rows.moves[j];
                if (moved[0] >= 0 && moved[0] < u->sizes[0] && moved[1] >= 0 && moved[1] < u->sizes[1]) {
                    begin = moved[2] < 0 ? upwards(-moved[2], move) : 0;
                    end = gemm_min(upwards(u->sizes[2] - moved[2], move), runs[r].length);
                }
                int64_t from = runs[r].from + at[0] * u->rows.step;
                for (int j = 0; j < 3; j++) from += moved[j] * u->steps[j];
                for (int64_t v = 0; v < runs[r].length; v += LANES, next++) {
                    const int64_t a = gemm_min(begin > v ? begin - v : 0, LANES);
                    const int64_t z = gemm_min(end > v ? end - v : 0, LANES);
                    const int masked = z > a && step <= 2;
                    const uint64_t lanes = masked ? (1ull << ((z - 1) * step + 1)) - (1ull << a * step) : 0;
                    const int64_t length = gemm_min(runs[r].length - v, LANES);
                    *next = (Piece){done + v, from + v * step, lanes, (1u << length) - 1, a, z, length};
                }
            }
        }
        if (step == 1 && many == 2) copy_rows(pieces, 2, first, last, rows, together, x, u->rows.step, 1, to, to_row);
        else if (step == 1) copy_rows(pieces, many, first, last, rows, together, x, u->rows.step, 1, to, to_row);
        else if (step == 2) copy_rows(pieces, many, first, last, rows, together, x, u->rows.step, 2, to, to_row);
        else copy_rows(pieces, many, first, last, rows, together, x, u->rows.step, step, to, to_row);
    }
}

static void pack_windows(void *user, const int64_t batch[2], int64_t row, int64_t rows, int64_t column, int64_t columns,
                         void *to, int64_t to_row) {
    const Convolution *u = user;
    unfold(u, u->x + batch[0] * u->batch[0] + batch[1] * u->batch[1], row, rows, column, columns, to, to_row);
}

/* Write channels and taps of filters as columns. */
static void pack_filters(void *user, const int64_t batch[2], int64_t row, int64_t rows, int64_t column, int64_t columns,
                         void *to, int64_t to_row) {
    const Convolution *u = user;
    const float *w = u->w + batch[1] * u->w_batch + column * u->w_filter;
    float *written = to;
    const int64_t taps = product_of(u->taps);
    if (taps == 1) {
        const int64_t rest = (rows - 1) * u->w_channel + (columns - 1) * u->w_filter + 1;
        gemm_pack_float(rows, columns, to_row, w + row * u->w_channel, u->w_channel, u->w_filter, rest, written);
        return;
    }
    for (int64_t end = row + rows, length; row < end; row += length, written += length * to_row) {
        const float *from = w + row / taps * u->w_channel + row % taps;
        length = gemm_min(taps - row % taps, end - row);
        if (length >= LANES) /* it writes whole vectors */
            gemm_pack_float(length, columns, to_row, from, 1, u->w_filter, (columns - 1) * u->w_filter + length,
                            written);
        else
            for (int64_t p = 0; p < length; p++)
                for (int64_t j = 0; j < columns; j++) written[p * to_row + j] = from[j * u->w_filter + p];
    }
}

/* Copy a result to where it belongs, `step` apart, with its bias. */
static inline void finish(float *restrict to, const float *restrict from, int64_t step, int64_t length, float bias,
                          int relu) {
    int64_t i = 0;
#ifdef __AVX512F__
    const __m512i spread = _mm512_setr_epi32(0, 0, 1, 0, 2, 0, 3, 0, 4, 0, 5, 0, 6, 0, 7, 0);
    for (; step == 2 && i < length; i += LANES / 2) {
        const int64_t count = gemm_min(length - i, LANES / 2);
        const __mmask16 read = (__mmask16)((1u << count) - 1), written = (__mmask16)((1u << 2 * count) - 1) & 0x5555;
        const __m512 sum = _mm512_add_ps(_mm512_maskz_loadu_ps(read, from + i), _mm512_set1_ps(bias));
        const __mmask16 positive = _mm512_cmp_ps_mask(sum, _mm512_setzero_ps(), _CMP_NLE_UQ); /* or NaN */
        const __m512 x = relu ? _mm512_maskz_mov_ps(positive, sum) : sum;
        _mm512_mask_storeu_ps(to + 2 * i, written, _mm512_permutexvar_ps(spread, x));
    }
#endif
    if (step != 1)
        for (; i < length; i++) to[i * step] = relu && from[i] + bias <= 0 ? 0 : from[i] + bias;
    else if (relu)
        for (; i < length; i++) to[i] = from[i] + bias <= 0 ? 0 : from[i] + bias;
    else
        for (; i < length; i++) to[i] = from[i] + bias;
}

/* Add the bias where the result lies. */
static void finish_rows(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0,
                        int64_t column1) {
    const Convolution *u = user;
    float *y = u->y + batch[0] * u->y_image + batch[1] * u->y_batch;
    for (int64_t i = row0; i < row1; i++) {
        const float bias = u->bias ? u->bias[batch[1] * u->filters + i] : 0;
        float *c = y + i * u->y_filter;
        if (u->relu)
            for (int64_t j = column0; j < column1; j++) c[j] = c[j] + bias <= 0 ? 0 : c[j] + bias;
        else
            for (int64_t j = column0; j < column1; j++) c[j] += bias;
    }
}

/* Scatter rows of filters, whose columns are the places of all images. */
static void scatter_rows(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0,
                         int64_t column1) {
    const Convolution *u = user;
    const Side places = {0, {u->y_sizes[0], u->y_sizes[1], u->y_sizes[2]}};
    const float *c = u->c + batch[1] * u->c_batch;
    int64_t start[4], at[4], length;
    indices(&places, column0, start);
    for (int64_t i = row0; i < row1; i++) {
        const float bias = u->bias ? u->bias[batch[1] * u->filters + i] : 0;
        float *y = u->y + batch[1] * u->y_batch + i * u->y_filter;
        memcpy(at, start, sizeof at);
        for (int64_t j = column0; j < column1; j += length) {
            float *to = y + at[0] * u->y_image + at[1] * u->y_steps[0] + at[2] * u->y_steps[1] + at[3] * u->y_steps[2];
            length = gemm_min(places.sizes[2] - at[3], column1 - j);
            finish(to, c + i * u->c_row + j, u->y_steps[2], length, bias, u->relu);
            at[3] += length - 1;
            advance(&places, at);
        }
    }
}

/* Transpose rows of places, whose columns are filters. The places of an image lie side by side. */
static void scatter_columns(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0,
                            int64_t column1) {
    const Convolution *u = user;
    const int64_t many = u->y_sizes[2];
    const float *c = u->c + batch[1] * u->c_batch;
    float *y = u->y + batch[1] * u->y_batch;
    const int joined = u->y_image == many, plain = !u->bias && !u->relu;
    for (int64_t j = column0; j < column1; j += LANES) {
        const int64_t end = gemm_min(j + LANES, column1);
        for (int64_t i = row0, rows; i < row1; i += rows) {
            float *to = y + (joined ? i : i / many * u->y_image + i % many);
            rows = gemm_min(LANES, row1 - i);
            if (!joined) rows = gemm_min(rows, many - i % many);
            if (plain && rows == LANES && end == j + LANES) {
                gemm_transpose_float(c + i * u->c_row + j, u->c_row, to + j * u->y_filter, u->y_filter);
                continue;
            }
            for (int64_t o = j; o < end; o++) {
                const float bias = u->bias ? u->bias[batch[1] * u->filters + o] : 0;
                for (int64_t p = 0; p < rows; p++) {
                    const float sum = c[(i + p) * u->c_row + o] + bias;
                    to[o * u->y_filter + p] = u->relu && sum <= 0 ? 0 : sum;
                }
            }
        }
    }
}

/* Store filters as rows, channels and taps side by side. */
static void copy_filters(const Convolution *u, float *to) {
    for (int64_t g = 0; g < u->groups; g++)
        for (int64_t o = 0; o < u->filters; o++)
            for (int64_t c = 0; c < u->channels; c++) {
                const float *w = u->w + g * u->w_batch + o * u->w_filter + c * u->w_channel;
                for (int64_t d = 0; d < u->taps[0]; d++)
                    for (int64_t h = 0; h < u->taps[1]; h++) {
                        const float *from = w + d * u->w_steps[0] + h * u->w_steps[1];
                        for (int64_t t = 0; t < u->taps[2]; t++) *to++ = from[t * u->w_steps[2]];
                    }
            }
}

static int side_by_side(const int64_t sizes[3], const int64_t steps[3]) {
    int64_t step = 1;
    for (int i = 2; i >= 0; step *= sizes[i--])
        if (sizes[i] != 1 && steps[i] != step) return 0;
    return 1;
}

/* Treat all axes of space as one. */
static void join(int64_t sizes[3], int64_t steps[3]) {
    sizes[2] = product_of(sizes), sizes[0] = sizes[1] = 1, steps[0] = steps[1] = 0, steps[2] = 1;
}

/* Make the last axis the first one, if it has size 1 everywhere: the last axis is copied in vectors. */
static void skip_last(Convolution *u) {
    int64_t *all[] = {u->sizes, u->taps, u->places, u->place_moves, u->tap_moves,
                      u->pads,  u->steps, u->w_steps, u->y_steps};
    if (u->sizes[2] != 1 || u->taps[2] != 1 || u->places[2] != 1 || u->pads[2] != 0) return;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const int64_t last = all[i][2];
        all[i][2] = all[i][1], all[i][1] = all[i][0], all[i][0] = last;
    }
}

/* Write windows of places whose channels lie side by side: a run of channels for each tap. Whole vectors are written:
 * what is after a run is written next, and after a row there is room. */
static void pack_places(void *user, const int64_t batch[2], int64_t row, int64_t rows, int64_t column, int64_t columns,
                        void *to, int64_t to_row) {
    const Convolution *u = user;
    int64_t place[4], first[4], tap[4];
    (void)batch;
    indices(&u->rows, row, place);
    indices(&u->columns, column / u->channels, first);
    for (float *written = to, *start = to; rows > 0; rows--, written = start += to_row, advance(&u->rows, place)) {
        memcpy(tap, first, sizeof tap);
        for (int64_t c = column % u->channels, left = columns, length; left > 0; left -= length, c = 0) {
            const float *from = u->x + place[0] * u->x_image + c;
            int inside = 1;
            for (int i = 0; i < 3; i++) {
                const int64_t at = place[i + 1] * u->place_moves[i] + tap[i + 1] * u->tap_moves[i] - u->pads[i];
                inside &= at >= 0 && at < u->sizes[i];
                from += at * u->steps[i];
            }
            length = gemm_min(u->channels - c, left);
            for (int64_t v = 0; v < length; v += LANES)
                if (inside) memcpy(written + v, from + v, LANES * sizeof *from);
                else memset(written + v, 0, LANES * sizeof *from);
            written += length;
            advance(&u->columns, tap);
        }
    }
}

/* Put the channels of an image side by side. */
static void turn_image(void *user, size_t image) {
    const Convolution *u = user;
    const int64_t pixels = product_of(u->sizes);
    gemm_pack_float(pixels, u->channels, u->steps[2], u->turned + (int64_t)image * u->turned_image, 1, u->x_channel,
                    (u->channels - 1) * u->x_channel + pixels, (float *)u->x + (int64_t)image * u->x_image);
}

/* Places are rows, and filters are columns, after the channels of x are put side by side: a window is a few long runs
 * then, in place of many short ones. */
static OrtStatus *convolve_turned(Context *context, Convolution *u) {
    const int64_t taps = product_of(u->taps), padded = (u->channels + LANES - 1) / LANES * LANES;
    gemm_product g = {.m = u->images * product_of(u->places), .n = u->filters, .k = u->channels * taps, .batch = {1, 1}};
    const Side all_taps = {0, {u->taps[0], u->taps[1], u->taps[2]}};
    const int64_t image = product_of(u->sizes) * padded, turned = u->images * image + LANES, filters = g.k * g.n;
    g.packed = g.user = u, g.pack_a = pack_places, g.epilogue = scatter_columns;
    g.b_strides = g.c_strides = (gemm_strides){g.n, 1, {0, 0}};
    g.threads = thread_count, g.parallel_for = parallel_for, g.pool = context;
    float *memory = borrow((size_t)(turned + filters + g.m * g.n) * sizeof(float) + gemm_scratch_float(&g));
    if (!memory) return api->CreateStatus(1, "native kernel: out of memory");
    float *w = memory + turned;
    int64_t tap[4] = {0};
    for (int64_t t = 0; t < taps; t++, advance(&all_taps, tap)) {
        const float *from = u->w + tap[1] * u->w_steps[0] + tap[2] * u->w_steps[1] + tap[3] * u->w_steps[2];
        for (int64_t c = 0; c < u->channels; c++, w += g.n)
            for (int64_t o = 0; o < g.n; o++) w[o] = from[c * u->w_channel + o * u->w_filter];
    }
    g.b = memory + turned, g.c = w, g.scratch = w + g.m * g.n;
    u->turned = u->x, u->turned_image = u->x_image, u->x = memory, u->x_image = image;
    u->steps[2] = padded, u->steps[1] = padded * u->sizes[2], u->steps[0] = u->steps[1] * u->sizes[1];
    parallel_for(context, turn_image, (size_t)u->images, u);
    u->c = g.c, u->c_row = g.n;
    u->columns = all_taps, u->rows = (Side){0, {u->places[0], u->places[1], u->places[2]}};
    gemm_float(&g);
    give_back(memory);
    return NULL;
}

#include "grouped.h"

static OrtStatus *convolve(Context *context, Convolution *u) {
    skip_last(u), skip_last(u);
    if (u->groups > 1 && gemm_min(u->channels, u->filters) < LEAST_OF_GROUP) return convolve_groups(context, u);
    const int64_t taps = product_of(u->taps), places = product_of(u->places);
    int pointwise = taps == 1 && side_by_side(u->sizes, u->steps);
    const int joined = side_by_side(u->places, u->y_steps), w_joined = side_by_side(u->taps, u->w_steps);
    for (int i = 0; i < 3; i++)
        if (u->place_moves[i] != 1 || u->pads[i] != 0 || u->sizes[i] != u->places[i]) pointwise = 0;
    memcpy(u->y_sizes, u->places, sizeof u->places);
    if (joined) join(u->y_sizes, u->y_steps);
    if (pointwise) join(u->sizes, u->steps), join(u->places, (int64_t[3]){0});
    const int by_columns = joined && w_joined && taps > places && u->tap_moves[2] > 0;
    const int merged = !by_columns && (!joined || (places < FEW_PLACES && u->images > 1));
    if (merged && joined && u->groups == 1 && taps > 1 && side_by_side(u->sizes, u->steps) &&
        product_of(u->sizes) >= LANES && u->channels >= 2 * LANES && u->filters >= LANES && u->filters <= MANY_FILTERS)
        return convolve_turned(context, u);
    Side window = {.step = u->x_channel}, place = {.step = u->x_image};
    for (int i = 0; i < 3; i++) {
        window.sizes[i] = u->taps[i], window.moves[i] = u->tap_moves[i];
        place.sizes[i] = u->places[i], place.moves[i] = u->place_moves[i];
    }
    gemm_product g = {.m = u->filters, .n = places, .k = u->channels * taps, .batch = {1, u->groups}};
    g.packed = g.user = u;
    size_t copied = 0, scattered = 0;
    u->batch[0] = 0, u->batch[1] = u->channels * u->x_channel;
    if (by_columns) {
        u->rows = place, u->columns = window;
        g.m = u->images * places, g.n = u->filters;
        g.pack_a = pack_windows, g.pack_b = pack_filters, g.epilogue = scatter_columns;
    } else {
        u->rows = window, u->columns = place;
        g.a = u->w;
        g.a_strides = (gemm_strides){u->w_filter, taps == 1 ? u->w_channel : 1, {0, u->w_batch}};
        if (taps > 1 && (!w_joined || (u->channels > 1 && u->w_channel != taps))) {
            copied = (size_t)(u->groups * u->filters * g.k);
            g.a_strides = (gemm_strides){g.k, 1, {0, u->filters * g.k}};
        }
        if (merged) {
            g.n = u->images * places, g.pack_b = pack_windows, g.epilogue = scatter_rows;
        } else {
            g.batch[0] = u->images, u->batch[0] = u->x_image;
            g.c = u->y, g.c_strides = (gemm_strides){u->y_filter, 1, {u->y_image, u->y_batch}};
            if (u->bias || u->relu) g.epilogue = finish_rows;
            if (pointwise) g.b = u->x, g.b_strides = (gemm_strides){u->x_channel, 1, {u->batch[0], u->batch[1]}};
            else g.pack_b = pack_windows;
        }
    }
    if (by_columns || merged) {
        u->c_row = merged ? gemm_padded(g.n) : g.n, u->c_batch = g.m * u->c_row;
        g.c_strides = (gemm_strides){u->c_row, 1, {0, u->c_batch}};
        scattered = (size_t)(u->groups * u->c_batch);
    }
    g.threads = thread_count, g.parallel_for = parallel_for, g.pool = context;
    float *memory = borrow((copied + scattered) * sizeof(float) + gemm_scratch_float(&g));
    if (!memory) return api->CreateStatus(1, "native kernel: out of memory");
    if (copied) copy_filters(u, memory), g.a = memory;
    if (scattered) g.c = memory + copied, u->c = g.c;
    g.scratch = memory + copied + scattered;
    gemm_float(&g);
    give_back(memory);
    return NULL;
}

/* Compute an output of the operator from its first two inputs, and a bias from the third. */
OrtStatus *convolution(Context *context, const ConvolutionForm *form) {
    int64_t stored_x[5], stored_w[5], stored_y[5], x[5], w[5], y[5], x_steps[5], w_steps[5], y_steps[5];
    Convolution u = {.relu = form->relu, .groups = form->groups};
    CHECK(input(context, 0, &u.x, stored_x, form->rank_x));
    CHECK(input(context, 1, &u.w, stored_w, form->rank_w));
    const int axes = form->axes, missing = 3 - axes;
    for (int i = 0; i < axes + 2; i++) {
        x[i] = w[i] = 1, x_steps[i] = w_steps[i] = y_steps[i] = 0;
        int64_t step = 1;
        for (int j = form->rank_x - 1; j >= 0; step *= stored_x[j--])
            if (form->x[i] == j) x[i] = stored_x[j], x_steps[i] = step;
        step = 1;
        for (int j = form->rank_w - 1; j >= 0; step *= stored_w[j--])
            if (form->w[i] == j) w[i] = stored_w[j], w_steps[i] = step;
    }
    const int64_t first = form->transposed ? w[1] : w[0], second = form->transposed ? w[0] : w[1];
    u.images = x[0], u.channels = x[1] / u.groups;
    u.filters = form->transposed ? first : first / u.groups;
    if (u.channels * u.groups != x[1] || second != (form->transposed ? x[1] : u.channels)) return unlike();
    if (!form->transposed && first % u.groups) return unlike();
    y[0] = x[0], y[1] = u.filters * u.groups;
    for (int i = 0; i < axes; i++) {
        const int64_t reach = (w[i + 2] - 1) * form->dilations[i] + 1, pads = form->begin[i] + form->end[i];
        y[i + 2] = form->transposed ? (x[i + 2] - 1) * form->strides[i] + form->more[i] + reach - pads
                                    : downwards(x[i + 2] + pads - reach, form->strides[i]) + 1;
        if (y[i + 2] < 0) return unlike();
    }
    for (int j = 0; j < form->rank_y; j++) stored_y[j] = form->y[j] < 0 ? 1 : y[form->y[j]];
    CHECK(output(context, 0, &u.y, stored_y, form->rank_y));
    int64_t step = 1;
    for (int j = form->rank_y - 1; j >= 0; step *= stored_y[j--])
        if (form->y[j] >= 0) y_steps[form->y[j]] = step;
    if (form->biased) {
        int64_t size;
        CHECK(input(context, 2, &u.bias, &size, 1));
        if (size != y[1]) return unlike();
    }
    u.x_image = x_steps[0], u.x_channel = x_steps[1], u.y_image = y_steps[0], u.y_filter = y_steps[1];
    u.y_batch = u.filters * u.y_filter;
    u.w_filter = w_steps[form->transposed ? 1 : 0], u.w_channel = w_steps[form->transposed ? 0 : 1];
    u.w_batch = form->transposed ? u.channels * u.w_channel : u.filters * u.w_filter;
    /* A transposed convolution is one convolution for each remainder of the places by the strides. */
    int64_t strides[3] = {1, 1, 1};
    for (int i = 0; form->transposed && i < axes; i++) strides[missing + i] = form->strides[i];
    int empty = 0; /* a part that no tap reaches */
    for (int i = 0; form->transposed && i < axes; i++) empty = empty || (w[i + 2] < form->strides[i] && !u.bias);
    if (empty) memset(u.y, 0, (size_t)step * sizeof(float));
    for (int64_t part = 0; part < product_of(strides); part++) {
        Convolution v = u;
        int64_t rest = part;
        for (int i = 2; i >= 0; i--) {
            const int at = i - missing;
            v.sizes[i] = v.taps[i] = v.places[i] = v.place_moves[i] = v.tap_moves[i] = 1;
            if (at < 0) continue;
            v.sizes[i] = x[at + 2], v.steps[i] = x_steps[at + 2];
            if (form->transposed) {
                const int64_t stride = strides[i], remainder = rest % stride, pad = form->begin[at] - remainder;
                const int64_t from = -downwards(-pad, stride); /* the first place lies over this element */
                rest /= stride;
                v.taps[i] = remainder < w[at + 2] ? (w[at + 2] - remainder + stride - 1) / stride : 0;
                v.places[i] = -downwards(-(y[at + 2] + pad), stride) - from;
                v.pads[i] = -from, v.tap_moves[i] = -form->dilations[at];
                v.w += remainder * w_steps[at + 2], v.w_steps[i] = stride * w_steps[at + 2];
                v.y += (stride * from - pad) * y_steps[at + 2], v.y_steps[i] = stride * y_steps[at + 2];
            } else {
                v.taps[i] = w[at + 2], v.w_steps[i] = w_steps[at + 2];
                v.places[i] = y[at + 2], v.y_steps[i] = y_steps[at + 2];
                v.place_moves[i] = form->strides[at], v.tap_moves[i] = form->dilations[at], v.pads[i] = form->begin[at];
            }
        }
        if (!empty || product_of(v.taps)) CHECK(convolve(context, &v));
    }
    return NULL;
}

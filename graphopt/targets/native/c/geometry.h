/* The geometry of a convolution, and the arithmetic of its indices. A geometry has three axes of space: convolutions
 * with fewer axes have axes of size 1 first. */
#pragma once
#include "matrix.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

/* Each index of x, w and y has a stride. Tap t of place p reads the element p * place_move + t * tap_move - pad of x. */
typedef struct {
    int64_t groups, images, channels, filters; /* channels and filters of one group */
    int64_t sizes[3], taps[3], places[3];      /* of x, w and y */
    int64_t place_moves[3], tap_moves[3], pads[3];
    const float *x, *w, *bias;
    float *y;
    int64_t x_image, x_channel, steps[3];
    int64_t w_batch, w_filter, w_channel, w_steps[3];
    int64_t y_batch, y_image, y_filter, y_steps[3];
    int relu;
} Convolution;

/* Round up to a multiple. */
static int64_t upto(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Divide and round down. */
static int64_t downwards(int64_t x, int64_t y) { return x >= 0 ? x / y : -((-x + y - 1) / y); }

static int64_t product_of(const int64_t sizes[3]) { return sizes[0] * sizes[1] * sizes[2]; }

/* Split a number into three indices, after the quotient of the number by the product of the sizes. */
static inline void indices(const int64_t sizes[3], int64_t number, int64_t at[4]) {
    for (int i = 2; i >= 0; number /= sizes[i--]) at[i + 1] = number % sizes[i];
    at[0] = number;
}

/* Move indices to those of the next number. */
static inline void advance(const int64_t sizes[3], int64_t at[4]) {
    for (int i = 3; ++at[i] == (i ? sizes[i - 1] : INT64_MAX); i--) at[i] = 0;
}

/* Return whether elements are contiguous. */
static int side_by_side(const int64_t sizes[3], const int64_t steps[3]) {
    int64_t step = 1;
    for (int i = 2; i >= 0; step *= sizes[i--])
        if (sizes[i] != 1 && steps[i] != step) return 0;
    return 1;
}

/* Find where a row, a place of an image, lies in the result of a group, and return how many rows follow it side by side,
 * itself included. */
static inline int64_t place_of(const Convolution *u, int64_t group, int64_t row, float **y) {
    const int64_t many = product_of(u->places), joined = side_by_side(u->places, u->y_steps);
    const int64_t run = !joined ? u->places[2] : u->y_image == many ? u->images * many : many;
    int64_t at[4];
    indices(u->places, row, at);
    *y = u->y + group * u->y_batch + at[0] * u->y_image;
    for (int i = 0; i < 3; i++) *y += at[i + 1] * u->y_steps[i];
    return (row / run + 1) * run - row;
}

/* Copy a line of results to elements that are `step` apart, with its bias and Relu. */
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

/* Copies of an operand of a convolution in pairs of channels, of bfloat16 numbers, with zeros around it; see tiled.h. */
#pragma once
#include "bfloat16.h"
#include "geometry.h"
#include "lines.h"
#include "matrix.h"

enum {
    MOST_STRIDE = 1 << 26, /* of 16 elements that one instruction gathers or scatters */
    LEAST_TURNED = 4,      /* terms of a filter that are packed by transposing them */
};

#if defined(GEMM_HAS_PAIRS) || defined(GEMM_HAS_TILES)
/* Add the products of a pair and of 16 pairs to 16 sums. */
GEMM_INLINE Lanes add_dot_products(Lanes sums, float pair, Lanes pairs) {
    return (Lanes)_mm512_dpbf16_ps((__m512)sums, (__m512bh)_mm512_set1_ps(pair), (__m512bh)pairs);
}

/* Load every other of some elements, up to 16 of them: the processor gathers more slowly. */
GEMM_INLINE __m512 load_every_other(const float *from, int64_t many) {
    const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
    return _mm512_permutex2var_ps(load_first(from, 2 * many - 1), even, load_first(from + 16, 2 * many - 17));
}

/* Copy elements that are `stride` apart of a pair of lines. */
GEMM_INLINE void copy_pairs(const float *first, const float *second, int64_t stride, int64_t count, int pieces, int64_t piece, int32_t *to) {
    const __m512i places = _mm512_mullo_epi32(_mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0),
                                              _mm512_set1_epi32((int)stride));
    const __m512 zero = _mm512_setzero_ps();
    for (int64_t i = 0; i < count; i += 16, first += 16 * stride, second += second ? 16 * stride : 0) {
        const __mmask16 some = (__mmask16)(count - i >= 16 ? 0xffff : (1u << (count - i)) - 1);
        __m512 u, v = zero;
        Line high, low;
        if (stride == 1 || count == 1) {
            u = _mm512_maskz_loadu_ps(some, first);
            if (second) v = _mm512_maskz_loadu_ps(some, second);
        } else if (stride == 2) {
            u = load_every_other(first, count - i);
            if (second) v = load_every_other(second, count - i);
        } else {
            u = _mm512_mask_i32gather_ps(zero, some, places, first, 4);
            if (second) v = _mm512_mask_i32gather_ps(zero, some, places, second, 4);
        }
        if (pieces == 2) split_pairs(u, v, &high, &low), _mm512_mask_storeu_epi32(to + piece + i, some, low);
        else high = round_pairs(u, v, 0);
        _mm512_mask_storeu_epi32(to + i, some, high);
    }
}

/* Pack terms of filters, `filter` apart, as pairs: each term a row of so many elements. */
static void pack_pairs(const float *first, const float *second, int64_t depth, int64_t many, int64_t filter, int64_t row, float *to) {
    float square[LANES * LANES] __attribute__((aligned(64))) = {0};
    for (int64_t j = 0; j < row; j += LANES)
        for (int64_t p = 0; p < depth; p += LANES) {
            const int64_t q = depth < LANES ? 0 : gemm_min(p, depth - LANES); /* squares may overlap */
            for (int64_t i = 0; i < gemm_min(LANES, many - j); i++) {
                const int64_t at = (j + i) * filter + q;
                copy_pairs(first + at, second ? second + at : NULL, 1, gemm_min(LANES, depth), 1, 0, (int32_t *)square + i * LANES);
            }
            gemm_transpose(square, LANES, to + q * row + j, row);
        }
}
#else /* none of this is called */
GEMM_INLINE Lanes add_dot_products(Lanes sums, float pair, Lanes pairs) { return (void)pair, (void)pairs, sums; }
GEMM_INLINE void copy_pairs(const float *first, const float *second, int64_t stride, int64_t count, int pieces, int64_t piece, int32_t *to) {
    (void)first, (void)second, (void)stride, (void)count, (void)pieces, (void)piece, (void)to;
}
static void pack_pairs(const float *first, const float *second, int64_t depth, int64_t many, int64_t filter, int64_t row, float *to) {
    (void)first, (void)second, (void)depth, (void)many, (void)filter, (void)row, (void)to;
}
#endif

#ifdef GEMM_HAS_TILES

enum { SLACK = 64 }; /* elements behind a copy that a window may read */

/* An operand, and where its copy has the element of an index: phase (index - lowest) % stride, at the quotient. */
typedef struct {
    const float *from;
    int64_t images, channels, image, channel, sizes[3], steps[3], lowest[3], strides[3], extents[3];
    int64_t plane, phase, pair; /* elements of an image's plane, of a phase, of a pair of channels with all its phases */
    int64_t piece;              /* from high to low pieces */
    int pieces;
    int32_t *to;
} PairedCopy;

/* Lay out a copy whose planes are multiples of some size, and return how many elements it has. */
static int64_t lay_out_pairs(PairedCopy *x, int64_t most_pairs, int64_t multiple) {
    x->plane = upto(product_of(x->extents), multiple), x->phase = x->plane * x->images;
    x->pair = ((x->phase * product_of(x->strides) + SLACK + 15) / 16 | 1) * 16;
    x->piece = most_pairs * x->pair;
    return x->piece * x->pieces;
}

/* Return where a shift by some indices lies. */
static int64_t shift_of(const PairedCopy *x, const int64_t indices[3]) {
    int64_t phase = 0, at = 0;
    for (int i = 0; i < 3; i++)
        phase = phase * x->strides[i] + indices[i] % x->strides[i], at = at * x->extents[i] + indices[i] / x->strides[i];
    return phase * x->phase + at;
}

/* Copy an image of a pair of channels, which is number pair * images + image. */
static void copy_image_in_pairs(void *user, size_t index) {
    const PairedCopy *x = user;
    const int64_t pair = (int64_t)index / x->images, image = (int64_t)index % x->images, phases = product_of(x->strides);
    const float *first = x->from + 2 * pair * x->channel + image * x->image;
    int32_t *to = x->to + pair * x->pair + image * x->plane;
    for (int64_t phase = 0; phase < phases; phase++)
        for (int piece = 0; piece < x->pieces; piece++)
            memset(to + phase * x->phase + piece * x->piece, 0, (size_t)x->plane * sizeof *to);
    if (image == x->images - 1)
        for (int piece = 0; piece < x->pieces; piece++)
            memset(to + x->plane + (phases - 1) * x->phase + piece * x->piece, 0, (size_t)(x->pair - phases * x->phase) * sizeof *to);
    if (2 * pair >= x->channels) return; /* all zeros */
    const int64_t end = x->lowest[2] + x->extents[2] * x->strides[2]; /* of indices on the last axis */
    for (int64_t i = 0; i < x->sizes[0]; i++)
        for (int64_t j = 0; j < x->sizes[1]; j++) {
            const int64_t at[3] = {i - x->lowest[0], j - x->lowest[1], 0};
            if (at[0] < 0 || at[1] < 0 || at[0] >= x->extents[0] * x->strides[0] || at[1] >= x->extents[1] * x->strides[1]) continue;
            for (int64_t phase = 0; phase < x->strides[2]; phase++) {
                int64_t k = x->lowest[2] + phase; /* the first index of the phase in the image */
                if (k < 0) k += (-k + x->strides[2] - 1) / x->strides[2] * x->strides[2];
                const int64_t last = gemm_min(x->sizes[2], end), count = k < last ? (last - k + x->strides[2] - 1) / x->strides[2] : 0;
                const int64_t indices[3] = {at[0], at[1], k - x->lowest[2]};
                const float *line = first + i * x->steps[0] + j * x->steps[1] + k * x->steps[2];
                if (count > 0)
                    copy_pairs(line, 2 * pair + 1 < x->channels ? line + x->channel : NULL, x->strides[2] * x->steps[2], count,
                               x->pieces, x->piece, to + shift_of(x, indices));
            }
        }
}
#endif

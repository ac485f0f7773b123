/* Tiles of bfloat16 numbers on processors with AVX-512 BF16, and AMX if they have it; see bfloat16.h. */
#pragma once
#include "lines.h"
#include "matrix.h"
#include "narrow.h"
#include <immintrin.h>

/* Round 16 pairs of numbers to the nearest, ties to even. Pairs are neighbours in x and y, or an element of each. */
GEMM_INLINE Line round_pairs(__m512 x, __m512 y, int are_neighbours) {
    const Line order = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5,
                                        20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const Line rounded = (Line)_mm512_cvtne2ps_pbh(y, x);
    return are_neighbours ? rounded : _mm512_permutexvar_epi16(order, rounded);
}

/* Return the upper halves of the elements of x and y as pairs. */
GEMM_INLINE Line pairs_of(Line x, Line y) {
    const Line upper = _mm512_set1_epi32((int)0xffff0000);
    return _mm512_ternarylogic_epi32(_mm512_srli_epi32(x, 16), y, upper, 0xf8 /* x | (y & upper) */);
}

/* Split 16 pairs, an element of x and of y each. Ties are rounded away from zero. */
GEMM_INLINE void split_pairs(__m512 x, __m512 y, Line *high, Line *low) {
    const Line half = _mm512_set1_epi32(0x8000), upper = _mm512_set1_epi32((int)0xffff0000);
    const Line p = _mm512_add_epi32((Line)x, half), q = _mm512_add_epi32((Line)y, half);
    const __m512 r = _mm512_sub_ps(x, (__m512)_mm512_and_si512(p, upper));
    const __m512 s = _mm512_sub_ps(y, (__m512)_mm512_and_si512(q, upper));
    *high = pairs_of(p, q);
    *low = pairs_of(_mm512_add_epi32((Line)r, half), _mm512_add_epi32((Line)s, half));
}

/* Return a mask of the first of some elements. */
GEMM_INLINE uint32_t first_of(int64_t many, int64_t most) {
    return many >= most ? (uint32_t)(((uint64_t)1 << most) - 1) : many > 0 ? (1u << many) - 1 : 0;
}

/* Load the first of 16 numbers, and zeros. */
GEMM_INLINE __m512 load_first(const float *from, int64_t many) {
    return _mm512_maskz_loadu_ps((__mmask16)first_of(many, 16), from);
}

/* Pack a tile of each piece: up to 16 lines of up to 32 terms of an operand, of which the terms or the lines are
 * contiguous. Pairs of terms are neighbours with one piece, and 16 apart with two. What lies `ahead` is fetched. */
GEMM_INLINE void pack_tile(const float *from, int64_t stride, int64_t lines, int64_t terms, int64_t ahead, Line *to,
                           int are_terms_contiguous, int pieces, int is_b, int is_whole) {
    Line x[16], y[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const int apart = pieces == 2 ? 16 : 1, first = are_terms_contiguous ? i : pieces == 2 ? i : 2 * i;
        const float *at = from + first * stride, *other = are_terms_contiguous ? at + 16 : at + apart * stride;
        __m512 u, v;
        __builtin_prefetch(at + ahead), __builtin_prefetch(other + ahead);
        if (is_whole) u = _mm512_loadu_ps(at), v = _mm512_loadu_ps(other);
        else if (are_terms_contiguous) u = load_first(at, i < lines ? terms : 0), v = load_first(other, i < lines ? terms - 16 : 0);
        else u = load_first(at, first < terms ? lines : 0), v = load_first(other, first + apart < terms ? lines : 0);
        if (pieces == 2) split_pairs(u, v, x + i, y + i);
        else x[i] = round_pairs(u, v, are_terms_contiguous);
    }
    if (are_terms_contiguous == is_b) {
        gemm_transpose((float *)x, 16, (float *)to, 16);
        if (pieces == 2) gemm_transpose((float *)y, 16, (float *)(to + BLOCK_LINES), 16);
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        to[i] = x[i];
        if (pieces == 2) to[i + BLOCK_LINES] = y[i];
    }
}

/* Pack a tile of an operand that is stored as bfloat16 numbers; see pack_tile. */
GEMM_INLINE void pack_narrow_tile(const bfloat16 *from, int64_t stride, int64_t lines, int64_t terms, int64_t ahead, Line *to,
                                  int are_terms_contiguous, int is_b) {
    Line x[16];
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) {
        const bfloat16 *at = from + (are_terms_contiguous ? i : 2 * i) * stride, *other = at + stride;
        __builtin_prefetch(at + ahead);
        if (are_terms_contiguous) x[i] = _mm512_maskz_loadu_epi16(i < lines ? first_of(terms, 32) : 0, at);
        else {
            const __mmask16 some = (__mmask16)first_of(lines, 16);
            const __m256i u = _mm256_maskz_loadu_epi16(2 * i < terms ? some : 0, at);
            const __m256i v = _mm256_maskz_loadu_epi16(2 * i + 1 < terms ? some : 0, other);
            x[i] = _mm512_or_si512(_mm512_cvtepu16_epi32(u), _mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
        }
    }
    if (are_terms_contiguous == is_b) {
        gemm_transpose((float *)x, 16, (float *)to, 16);
        return;
    }
#pragma GCC unroll 16
    for (int i = 0; i < 16; i++) to[i] = x[i];
}

/* `from` is an array of float or of bfloat16. */
typedef void (*tile_packer)(const void *from, int64_t stride, int64_t lines, int64_t terms, int64_t ahead, Line *to);
#define PACKER(name, are_terms_contiguous, pieces, is_b)                                                                \
    static void name(const void *from, int64_t stride, int64_t lines, int64_t terms, int64_t ahead, Line *to) {         \
        if (lines >= 16 && terms >= 32)                                                                                 \
            pack_tile(from, stride, lines, terms, ahead, to, are_terms_contiguous, pieces, is_b, 1);                    \
        else pack_tile(from, stride, lines, terms, ahead, to, are_terms_contiguous, pieces, is_b, 0);                   \
    }
PACKER(lines_1a, 0, 1, 0) PACKER(lines_1b, 0, 1, 1) PACKER(lines_2a, 0, 2, 0) PACKER(lines_2b, 0, 2, 1)
PACKER(terms_1a, 1, 1, 0) PACKER(terms_1b, 1, 1, 1) PACKER(terms_2a, 1, 2, 0) PACKER(terms_2b, 1, 2, 1)
#define NARROW_PACKER(name, are_terms_contiguous, is_b)                                                                 \
    static void name(const void *from, int64_t stride, int64_t lines, int64_t terms, int64_t ahead, Line *to) {         \
        pack_narrow_tile(from, stride, lines, terms, ahead, to, are_terms_contiguous, is_b);                            \
    }
NARROW_PACKER(lines_0a, 0, 0) NARROW_PACKER(lines_0b, 0, 1) NARROW_PACKER(terms_0a, 1, 0) NARROW_PACKER(terms_0b, 1, 1)
/* By which is contiguous, terms or lines; the number of pieces, 0 of bfloat16 numbers; and the operand. */
static const tile_packer tile_packers[2][3][2] = {{{lines_0a, lines_0b}, {lines_1a, lines_1b}, {lines_2a, lines_2b}},
                                                  {{terms_0a, terms_0b}, {terms_1a, terms_1b}, {terms_2a, terms_2b}}};

/* Pack a tile in which neither terms nor lines are contiguous, by a copy. */
static void pack_apart(const PackJob *x, const char *from, int64_t lines, int64_t terms, Line *to) {
    float copy[TILE_LINES * BLOCK_TERMS] = {0};
    for (int64_t i = 0; i < lines; i++)
        for (int64_t t = 0; t < gemm_min(terms, BLOCK_TERMS); t++) copy[i * BLOCK_TERMS + t] = number_of(x, from, i, t);
    tile_packers[1][x->pieces][x->is_b](copy, BLOCK_TERMS, 16, BLOCK_TERMS, 0, to);
}

/* Pack a tile. */
static void pack_lines(const PackJob *x, const char *from, int64_t lines, int64_t terms, Line *to) {
    if (x->term != 1 && x->line != 1) pack_apart(x, from, lines, terms, to);
    else tile_packers[x->term == 1][x->is_narrow ? 0 : x->pieces][x->is_b](from, x->term == 1 ? x->line : x->term, lines, terms, x->ahead, to);
}

#ifdef __AMX_BF16__
#define GEMM_HAS_TILES
enum { ROWS_TOGETHER = 256 }; /* of A, whose panels fit the L2 cache */

/* Any code that ran before may have used or released the tiles. */
static inline void begin_tiles(void) {
    struct {
        uint8_t palette, start, reserved[14];
        uint16_t bytes[16];
        uint8_t lines[16];
    } config = {.palette = 1};
    for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.lines[i] = TILE_LINES;
    _tile_loadconfig(&config);
}
static inline void end_tiles(void) { _tile_release(); }

GEMM_INLINE void multiply_tiles(int two_rows, int two_columns, int pieces, TILE_OPERANDS_OF_C) {
    float *below = c + TILE_LINES * c_row;
    const size_t step = (size_t)c_row * sizeof *c;
#define ALL_OF_C(first, right, lower, both)       \
    first;                                        \
    if (two_columns) right;                       \
    if (two_rows) lower;                          \
    if (two_rows && two_columns) both;
#define LOAD_A(piece)                            \
    _tile_loadd(4, a + (piece) * 2048, 64);      \
    if (two_rows) _tile_loadd(5, a + (piece) * 2048 + 1024, 64);
#define LOAD_B(piece)                            \
    _tile_loadd(6, b + (piece) * 2048, 64);      \
    if (two_columns) _tile_loadd(7, b + (piece) * 2048 + 1024, 64);
#define MULTIPLY ALL_OF_C(_tile_dpbf16ps(0, 4, 6), _tile_dpbf16ps(1, 4, 7), _tile_dpbf16ps(2, 5, 6), _tile_dpbf16ps(3, 5, 7))
#pragma GCC unroll 16
    for (int i = 0; i < TILE_LINES; i++) {
        ALL_OF_C(__builtin_prefetch(c + i * c_row, 1), __builtin_prefetch(c + i * c_row + 16, 1),
                 __builtin_prefetch(below + i * c_row, 1), __builtin_prefetch(below + i * c_row + 16, 1))
    }
    if (accumulate) {
        ALL_OF_C(_tile_loadd(0, c, step), _tile_loadd(1, c + 16, step), _tile_loadd(2, below, step), _tile_loadd(3, below + 16, step))
    } else {
        ALL_OF_C(_tile_zero(0), _tile_zero(1), _tile_zero(2), _tile_zero(3))
    }
    for (int64_t i = 0; i < blocks; i++, a += pieces * 2048, b += pieces * 2048) {
        if (pieces == 2) {
            LOAD_A(0) LOAD_B(1) MULTIPLY LOAD_B(0) MULTIPLY LOAD_A(1) MULTIPLY
        } else {
            LOAD_A(0) LOAD_B(0) MULTIPLY
        }
        work_on(jobs);
    }
    ALL_OF_C(_tile_stored(0, c, step), _tile_stored(1, c + 16, step), _tile_stored(2, below, step), _tile_stored(3, below + 16, step))
}
#else
#define GEMM_HAS_PAIRS
enum { ROWS_TOGETHER = 512 }; /* of A: their panels fill half of the L2 cache, 1 MiB, of the AMD EPYC on which this was measured */

static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

/* Add the products of a piece of A and of B to 8 rows of C. */
GEMM_INLINE void add_pairs(int two_columns, const char *a, const char *b, __m512 sums[8][2]) {
    for (int pair = 0; pair < TILE_LINES; pair++, a += 4, b += 64) {
        const __m512bh b0 = (__m512bh)_mm512_load_si512(b), b1 = (__m512bh)_mm512_load_si512(b + (two_columns ? 1024 : 0));
#pragma GCC unroll 8
        for (int i = 0; i < 8; i++) {
            const __m512bh x = (__m512bh)_mm512_set1_epi32(*(const int *)(a + i * 64));
            sums[i][0] = _mm512_dpbf16_ps(sums[i][0], x, b0);
            if (two_columns) sums[i][1] = _mm512_dpbf16_ps(sums[i][1], x, b1);
        }
    }
}

GEMM_INLINE void multiply_tiles(int two_rows, int two_columns, int pieces, TILE_OPERANDS_OF_C) {
    (void)jobs; /* a call within the loop would cost the registers of sums */
    for (int row = 0; row < (two_rows ? 32 : 16); row += 8, c += 8 * c_row) {
        __m512 sums[8][2] = {{{0}}};
        for (int i = 0; accumulate && i < 8; i++)
            for (int v = 0; v <= two_columns; v++) sums[i][v] = _mm512_loadu_ps(c + i * c_row + v * 16);
        for (int64_t i = 0; i < blocks; i++) {
            const char *high_a = a + i * pieces * 2048 + row * 64, *high_b = b + i * pieces * 2048;
            if (pieces == 2) add_pairs(two_columns, high_a, high_b + 2048, sums);
            add_pairs(two_columns, high_a, high_b, sums);
            if (pieces == 2) add_pairs(two_columns, high_a + 2048, high_b, sums);
        }
        for (int i = 0; i < 8; i++)
            for (int v = 0; v <= two_columns; v++) _mm512_storeu_ps(c + i * c_row + v * 16, sums[i][v]);
    }
}
#endif

/* Copy rows of up to 32 numbers. */
static inline void copy_rows(const float *from, int64_t from_row, float *to, int64_t to_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++, from += from_row, to += to_row)
        for (int64_t j = 0; j < columns; j += 16) {
            const __mmask16 some = (__mmask16)(columns - j >= 16 ? 0xffff : (1u << (columns - j)) - 1);
            _mm512_mask_storeu_ps(to + j, some, _mm512_maskz_loadu_ps(some, from + j));
        }
}

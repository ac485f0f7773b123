/* Matrix products whose operands are rounded to bfloat16, or split into two bfloat16 numbers each. Sums are float32.
 *
 * Of a split number, the high piece is the nearest bfloat16 number and the low piece is the nearest to what is left, so
 * that about 16 bits remain. A product of two pieces is high * high + high * low + low * high. (PyTorch's and JAX's
 * precision `high` means the same.) A split infinity has a low piece that is no number, so that its products are not.
 *
 * Operands are packed in tiles of 16 lines of 64 bytes, which are 16 pairs of terms of a sum. A line of a tile of A is a
 * row of A with 32 terms; a line of a tile of B is a pair of terms, in 16 columns. Two tiles side by side are a block of
 * 32 rows of A, or 32 columns of B, with 32 terms. In a block, the tiles of high pieces come before those of low ones.
 * The blocks of a panel are its terms in order.
 *
 * To pack a panel takes about as long as to multiply it, but other units of the processor. So while a panel is
 * multiplied, jobs pack the next ones, a tile at a time.
 */
#pragma once
#include "matrix.h"

#if defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>

enum {
    HAS_BFLOAT16 = 1,
    TILE_LINES = 16,
    BLOCK_TERMS = 32,
    BLOCK_LINES = 32, /* rows of A or columns of B */
    ROWS_TOGETHER = 256, /* of A, whose panels fit the L2 cache */
    COLUMNS_TOGETHER = 512, /* of a result of bfloat16 numbers, whose sums fit it, too */
    PANEL_TERMS = 512,
};

typedef __m512i Line;

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

static inline int64_t size_of(int is_narrow) { return is_narrow ? sizeof(bfloat16) : sizeof(float); }

/* A panel of an operand to pack, a tile at a time. The work for it grows by 2 with each block that is multiplied, and a
 * tile takes `price`. */
typedef struct {
    const char *from;
    int is_narrow; /* an array of bfloat16, not of float */
    int64_t line, term, lines, terms, ahead; /* strides, numbers, and where the panel after this one lies */
    int pieces, is_b;
    Line *to;
    int64_t price, work, done, tiles;
} PackJob;

/* Pack a tile in which neither terms nor lines are contiguous, by a copy. */
static void pack_apart(const PackJob *x, const char *from, int64_t lines, int64_t terms, Line *to) {
    float copy[TILE_LINES * BLOCK_TERMS] = {0};
    for (int64_t i = 0; i < lines; i++)
        for (int64_t t = 0; t < gemm_min(terms, BLOCK_TERMS); t++) {
            const char *at = from + (i * x->line + t * x->term) * size_of(x->is_narrow);
            copy[i * BLOCK_TERMS + t] = x->is_narrow ? from_bfloat16(*(const bfloat16 *)at) : *(const float *)at;
        }
    tile_packers[1][x->pieces][x->is_b](copy, BLOCK_TERMS, 16, BLOCK_TERMS, 0, to);
}

/* Pack the next tile. */
static void pack_next(PackJob *x) {
    const int64_t block = x->done / 2, half = x->done % 2, terms = x->terms - block * BLOCK_TERMS;
    const int64_t lines = gemm_min(x->lines - half * TILE_LINES, TILE_LINES);
    const char *from = x->from + (half * TILE_LINES * x->line + block * BLOCK_TERMS * x->term) * size_of(x->is_narrow);
    Line *to = x->to + (block * x->pieces * 2 + half) * TILE_LINES;
    x->done++;
    if (lines <= 0) return; /* nothing reads this tile */
    if (x->term != 1 && x->line != 1) pack_apart(x, from, lines, terms, to);
    else tile_packers[x->term == 1][x->is_narrow ? 0 : x->pieces][x->is_b](from, x->term == 1 ? x->line : x->term, lines, terms, x->ahead, to);
}

static void pack_rest(PackJob *x) {
    while (x->done < x->tiles) pack_next(x);
}

GEMM_INLINE void work_on(PackJob *const *jobs) {
    for (; *jobs; jobs++)
        for ((*jobs)->work += 2; (*jobs)->work >= (*jobs)->price && (*jobs)->done < (*jobs)->tiles; (*jobs)->work -= (*jobs)->price)
            pack_next(*jobs);
}

/* Blocks of a panel of A and of B to multiply. C has one tile or two side by side, one above the other, or both. */
#define TILE_OPERANDS_OF_C                                                                                           \
    int64_t blocks, const char *a, const char *b, float *c, int64_t c_row, int accumulate, PackJob *const *jobs

#ifdef __AMX_BF16__
#define GEMM_HAS_TILES

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
    for (int row = 0; row < (two_rows ? 32 : 16); row += 8, c += 8 * c_row) {
        __m512 sums[8][2] = {{{0}}};
        for (int i = 0; accumulate && i < 8; i++)
            for (int v = 0; v <= two_columns; v++) sums[i][v] = _mm512_loadu_ps(c + i * c_row + v * 16);
        for (int64_t i = 0; i < blocks; i++) {
            const char *high_a = a + i * pieces * 2048 + row * 64, *high_b = b + i * pieces * 2048;
            if (pieces == 2) add_pairs(two_columns, high_a, high_b + 2048, sums);
            add_pairs(two_columns, high_a, high_b, sums);
            if (pieces == 2) add_pairs(two_columns, high_a + 2048, high_b, sums);
            if (row == 0) work_on(jobs);
        }
        for (int i = 0; i < 8; i++)
            for (int v = 0; v <= two_columns; v++) _mm512_storeu_ps(c + i * c_row + v * 16, sums[i][v]);
    }
}
#endif

typedef void (*tile_multiplier)(TILE_OPERANDS_OF_C);
#define MULTIPLIER(name, two_rows, two_columns, pieces)                                                   \
    static void name(TILE_OPERANDS_OF_C) {                                                                \
        multiply_tiles(two_rows, two_columns, pieces, blocks, a, b, c, c_row, accumulate, jobs);          \
    }
MULTIPLIER(multiply_111, 0, 0, 1) MULTIPLIER(multiply_112, 0, 0, 2) MULTIPLIER(multiply_121, 0, 1, 1)
MULTIPLIER(multiply_122, 0, 1, 2) MULTIPLIER(multiply_211, 1, 0, 1) MULTIPLIER(multiply_212, 1, 0, 2)
MULTIPLIER(multiply_221, 1, 1, 1) MULTIPLIER(multiply_222, 1, 1, 2)
static const tile_multiplier tile_multipliers[2][2][2] = {{{multiply_111, multiply_112}, {multiply_121, multiply_122}},
                                                          {{multiply_211, multiply_212}, {multiply_221, multiply_222}}};

/* Copy rows of up to 32 numbers. */
static inline void copy_rows(const float *from, int64_t from_row, float *to, int64_t to_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++, from += from_row, to += to_row)
        for (int64_t j = 0; j < columns; j += 16) {
            const __mmask16 some = (__mmask16)(columns - j >= 16 ? 0xffff : (1u << (columns - j)) - 1);
            _mm512_mask_storeu_ps(to + j, some, _mm512_maskz_loadu_ps(some, from + j));
        }
}

/* Multiply panels for up to 32 rows and columns of C. */
static void multiply_panels(int pieces, int64_t blocks, const Line *a, const Line *b, int64_t rows, int64_t columns, float *c,
                            int64_t c_row, int accumulate, PackJob *const *jobs) {
    float tile[BLOCK_LINES * BLOCK_LINES] __attribute__((aligned(64)));
    const tile_multiplier multiply = tile_multipliers[rows > TILE_LINES][columns > TILE_LINES][pieces - 1];
    if (rows % TILE_LINES == 0 && columns % TILE_LINES == 0) {
        multiply(blocks, (const char *)a, (const char *)b, c, c_row, accumulate, jobs);
        return;
    }
    if (accumulate) copy_rows(c, c_row, tile, BLOCK_LINES, rows, columns);
    multiply(blocks, (const char *)a, (const char *)b, tile, BLOCK_LINES, accumulate, jobs);
    copy_rows(tile, BLOCK_LINES, c, c_row, rows, columns);
}

/* Return the vectors of a panel. */
static inline int64_t panel_lines(int64_t terms, int pieces) { return (terms + BLOCK_TERMS - 1) / BLOCK_TERMS * BLOCK_LINES * pieces; }

static inline size_t low_task_elements(const gemm_product *g) {
    const int64_t terms = gemm_min(g->k, PANEL_TERMS), panels = (gemm_min(g->m, ROWS_TOGETHER) + BLOCK_LINES - 1) / BLOCK_LINES;
    const int64_t filled = g->source ? terms * BLOCK_LINES : 0;
    const int64_t sums = g->is_narrow[2] ? ROWS_TOGETHER * COLUMNS_TOGETHER : 0;
    return (size_t)((panels + 2) * panel_lines(terms, g->pieces) * 16 + filled + sums + 64);
}

/* Return the job to pack columns of B as a panel. With a source, it first fills `filled`. */
static PackJob job_of_b(const gemm_product *g, const char *b, int64_t p, int64_t terms, int64_t j, int64_t price, float *filled,
                        Line *to) {
    const gemm_strides s = g->b_strides;
    const int64_t columns = gemm_min(BLOCK_LINES, g->n - j);
    PackJob job = {b + (p * s.row + j * s.column) * size_of(g->is_narrow[1]), g->is_narrow[1], s.column, s.row, columns, terms, BLOCK_LINES * s.column, g->pieces, 1, to,
                   price, 0, 0, (terms + BLOCK_TERMS - 1) / BLOCK_TERMS * 2};
    if (g->source) {
        g->source(g->source_user, p, terms, j, columns, BLOCK_LINES, filled);
        job.from = (const char *)filled, job.line = 1, job.term = BLOCK_LINES, job.ahead = 0;
    }
    return job;
}

/* Return where a batch of an operand begins. */
static const char *batch_of(const float *x, int is_narrow, const gemm_strides *s, const int64_t batch[2]) {
    return x ? (const char *)x + (batch[0] * s->batch[0] + batch[1] * s->batch[1]) * size_of(is_narrow) : NULL;
}

/* Round rows of sums to bfloat16 numbers. */
static void round_rows(const float *from, int64_t from_row, bfloat16 *to, int64_t to_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++, from += from_row, to += to_row)
        for (int64_t j = 0; j < columns; j += 16) {
            const __mmask16 some = (__mmask16)first_of(columns - j, 16);
            _mm256_mask_storeu_epi16(to + j, some, (__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(some, from + j)));
        }
}

/* Compute rows i0 to i1 and columns j0 to j1 of one product, between begin_tiles and end_tiles. */
static void low_columns(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                        char *scratch) {
    const gemm_strides sa = g->a_strides, sc = g->c_strides;
    const char *a = batch_of(g->a, g->is_narrow[0], &sa, batch), *b = batch_of(g->b, g->is_narrow[1], &g->b_strides, batch);
    char *result = (char *)batch_of(g->c, g->is_narrow[2], &sc, batch);
    Line *panels_of_b = (Line *)(((uintptr_t)scratch + 63) / 64 * 64);
    const int64_t largest = panel_lines(gemm_min(g->k, PANEL_TERMS), g->pieces), all_blocks = (g->k + BLOCK_TERMS - 1) / BLOCK_TERMS;
    Line *panels_of_a = panels_of_b + 2 * largest;
    float *filled = (float *)(panels_of_a + (gemm_min(g->m, ROWS_TOGETHER) + BLOCK_LINES - 1) / BLOCK_LINES * largest);
    float *sums = filled; /* there is no source then */
    const int64_t row_blocks = gemm_parts(i1 - i0, ROWS_TOGETHER), k_blocks = gemm_parts(g->k, PANEL_TERMS);
    for (int64_t r = 0; r < row_blocks * k_blocks; r++) {
        const int64_t row0 = i0 + gemm_begin(i1 - i0, r / k_blocks, row_blocks);
        const int64_t rows = i0 + gemm_begin(i1 - i0, r / k_blocks + 1, row_blocks) - row0;
        const int64_t p0 = gemm_begin(all_blocks, r % k_blocks, k_blocks) * BLOCK_TERMS;
        const int64_t end_of_p = gemm_begin(all_blocks, r % k_blocks + 1, k_blocks) * BLOCK_TERMS;
        const int64_t depth = gemm_min(end_of_p, g->k) - p0, blocks = (end_of_p - p0) / BLOCK_TERMS;
        const int64_t size = panel_lines(depth, g->pieces), panels = (rows + BLOCK_LINES - 1) / BLOCK_LINES;
        const int accumulate = g->accumulate || p0 > 0, last = p0 + depth == g->k;
        const int64_t c_row = g->is_narrow[2] ? COLUMNS_TOGETHER : sc.row, a_panel = BLOCK_LINES * sa.row * size_of(g->is_narrow[0]);
        float *c = g->is_narrow[2] ? sums : (float *)result + row0 * sc.row + j0;
        PackJob job_b = {0}, job_a = {a + (row0 * sa.row + p0 * sa.column) * size_of(g->is_narrow[0]), g->is_narrow[0], sa.row, sa.column, gemm_min(rows, BLOCK_LINES), depth,
                              BLOCK_LINES * sa.row, g->pieces, 0, panels_of_a, 1, 0, 0, 2 * blocks};
        pack_rest(&job_a);
        if (!g->panels) job_b = job_of_b(g, b, p0, depth, j0, panels, filled, panels_of_b);
        pack_rest(&job_b);
        for (int64_t j = j0, done = j0, odd = 0; j < j1; j += BLOCK_LINES, odd = !odd) {
            const int64_t columns = gemm_min(BLOCK_LINES, j1 - j), end = j + columns;
            const Line *panel = g->panels ? (const Line *)g->panels + j / BLOCK_LINES * panel_lines(g->k, g->pieces) + panel_lines(p0, g->pieces)
                                          : panels_of_b + odd * largest;
            if (!g->panels && end < j1) job_b = job_of_b(g, b, p0, depth, end, panels, filled, panels_of_b + !odd * largest);
            for (int64_t i = 0; i < rows; i += BLOCK_LINES) {
                PackJob *jobs[3] = {NULL}, **job = jobs;
                if (job_b.done < job_b.tiles) *job++ = &job_b;
                if (j == j0 && i + BLOCK_LINES < rows) {
                    job_a.from += a_panel, job_a.lines = gemm_min(rows - i - BLOCK_LINES, BLOCK_LINES);
                    job_a.to += size, job_a.done = job_a.work = 0, *job++ = &job_a;
                }
                multiply_panels(g->pieces, blocks, panels_of_a + i / BLOCK_LINES * size, panel, gemm_min(rows - i, BLOCK_LINES), columns,
                                c + i * c_row + j - j0, c_row, accumulate, jobs);
                pack_rest(&job_a);
            }
            pack_rest(&job_b);
            if (last && g->is_narrow[2])
                round_rows(c + j - j0, c_row, (bfloat16 *)result + row0 * sc.row + j, sc.row, rows, columns);
            if (last && g->epilogue && (end == j1 || (end - done) * rows >= 32768)) {
                g->epilogue(g->user, batch, row0, row0 + rows, done, end);
                done = end;
            }
        }
    }
}

/* Compute rows and columns of one product, as low_columns does. Sums of a narrow result stay in a cache. */
static void low_region(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                       char *scratch) {
    const int64_t step = g->is_narrow[2] ? COLUMNS_TOGETHER : j1 - j0;
    for (int64_t j = j0; j < j1; j += step) low_columns(g, batch, i0, i1, j, gemm_min(j + step, j1), scratch);
}

/* Return how many bytes all of B has in panels. */
static inline size_t low_panel_bytes(const gemm_product *g) {
    return (size_t)((g->n + BLOCK_LINES - 1) / BLOCK_LINES * panel_lines(g->k, g->pieces)) * sizeof(Line);
}

/* Pack all of B in panels. */
static inline void low_panels(const gemm_product *g, float *panels) {
    for (int64_t j = 0; j < g->n; j += BLOCK_LINES) {
        PackJob job = job_of_b(g, (const char *)g->b, 0, g->k, j, 1, NULL, (Line *)panels + j / BLOCK_LINES * panel_lines(g->k, g->pieces));
        pack_rest(&job);
    }
}
#else
/* Without these instructions, all products are of float32 and none of this is called. */
enum { HAS_BFLOAT16 = 0 };
#define low_region gemm_region
static inline size_t low_task_elements(const gemm_product *g) { return (void)g, 0; }
static inline size_t low_panel_bytes(const gemm_product *g) { return (void)g, 0; }
static inline void low_panels(const gemm_product *g, float *panels) { (void)g, (void)panels; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif

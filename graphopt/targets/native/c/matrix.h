/* The description of a matrix product, and what float32.h and bfloat16.h have in common to compute it. */
#pragma once
#include <stddef.h>
#include <stdint.h>
#include <string.h>

/* Strides are counted in elements, and a stride of 0 repeats. The columns of C have stride 1, and the elements of C do
 * not overlap. */
typedef struct {
    int64_t row, column, batch[2];
} gemm_strides;

/* An epilogue gets each block of C once, when the block is final and still in a cache. */
typedef void (*gemm_epilogue)(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0,
                              int64_t column1);

/* A source of B writes rows p to p + depth and columns j to j + width of it, to rows of `padded` elements. */
typedef void (*gemm_source)(void *user, int64_t p, int64_t depth, int64_t j, int64_t width, int64_t padded, float *to);

/* parallel_for runs task(user, 0) to task(user, count - 1), in any order and on any threads, and returns when all are
 * done. */
typedef void (*gemm_task)(void *user, size_t index);
typedef void (*gemm_parallel_for)(void *context, gemm_task task, size_t count, void *user);

typedef struct {
    int64_t m, n, k, batch[2]; /* C is m x n, A is m x k, B is k x n; batch is {1, 1} for one product */
    const float *a, *b;
    float *c;
    gemm_strides a_strides, b_strides, c_strides;
    const float *panels;    /* or NULL; in place of b, all of B as gemm_panels packs it, if it is the same in all batches */
    gemm_source source;     /* or NULL; in place of b, if B is the same in all batches */
    void *source_user;
    int accumulate;         /* C += A B */
    gemm_epilogue epilogue; /* or NULL */
    void *user;             /* for the epilogue */
    int pieces;             /* the bfloat16 numbers that stand for a number of A or B; 0 keeps float32 */
    int is_narrow[3];       /* a, b or c points to bfloat16 numbers; pieces is 1 then, and nothing accumulates */
    void *scratch;          /* as many bytes as gemm_scratch says */
    int64_t threads;        /* 1 needs no parallel_for */
    gemm_parallel_for parallel_for;
    void *pool;
} gemm_product;

#if defined(__AVX512F__)
#define GEMM_BYTES 64
#define GEMM_MR 14
#elif defined(__AVX2__) && defined(__FMA__)
#define GEMM_BYTES 32
#define GEMM_MR 6
#elif defined(__aarch64__)
#define GEMM_BYTES 16
#define GEMM_MR 10
#else
#define GEMM_BYTES 16
#define GEMM_MR 6
#endif

enum {
    LANES = GEMM_BYTES / (int)sizeof(float),
    GEMM_NR = 2 * LANES,               /* columns of a panel of B */
    GEMM_KC = 256,                     /* the largest block of k */
    GEMM_MC = 384 / GEMM_MR * GEMM_MR, /* the largest block of rows */
    GEMM_DIRECT = 256,                 /* columns of C up to which rows of A are read where they lie */
    GEMM_DISTANCE = 32,                /* rows of B from where it is read to where it is fetched into the cache */
    GEMM_STEP = GEMM_MR > 8 ? 16 : 8,  /* from one column to the next in a packed panel of A */
};

/* Vectors of floats are as wide as the processor's registers. AT is the vector at an address of any alignment. */
typedef float Lanes __attribute__((vector_size(GEMM_BYTES)));
typedef int32_t Ints __attribute__((vector_size(GEMM_BYTES)));
typedef float FreeLanes __attribute__((vector_size(GEMM_BYTES), aligned(4), may_alias));
#define AT(pointer) (*(FreeLanes *)(pointer))

static const int64_t gemm_nowhere[GEMM_KC / 2] = {0}; /* what `ahead` points to, and nothing else */

static inline int64_t gemm_min(int64_t x, int64_t y) { return x < y ? x : y; }
static inline int64_t gemm_parts(int64_t size, int64_t most) { return size > most ? (size + most - 1) / most : 1; }
/* Return where a part begins if a size is cut into nearly equal parts. */
static inline int64_t gemm_begin(int64_t size, int64_t part, int64_t parts) {
    return size / parts * part + gemm_min(part, size % parts);
}

/* How rows and k are cut: into parts of rows, and parts of k that consist of units. */
typedef struct {
    int64_t row_parts, k_parts, unit;
} gemm_cut;

/* A block of rows and of k. `last` is whether its sums are final. */
typedef struct {
    int64_t row0, rows, p0, depth;
    int accumulate, last;
} gemm_block;

/* Cut rows and k into parts of nearly the same size, which have so many rows and so many terms at most. */
static inline gemm_cut gemm_cut_of(const gemm_product *g, int64_t rows, int64_t most_rows, int64_t most_terms, int64_t unit) {
    return (gemm_cut){gemm_parts(rows, most_rows), gemm_parts(g->k, most_terms), unit};
}

/* Return a block of rows i0 to i1. Blocks of the same rows follow each other. */
static inline gemm_block gemm_block_of(const gemm_product *g, const gemm_cut *cut, int64_t i0, int64_t i1, int64_t index) {
    const int64_t row = index / cut->k_parts, k = index % cut->k_parts, units = (g->k + cut->unit - 1) / cut->unit;
    const int64_t first = gemm_begin(i1 - i0, row, cut->row_parts), p0 = gemm_begin(units, k, cut->k_parts) * cut->unit;
    const int64_t end = gemm_min(gemm_begin(units, k + 1, cut->k_parts) * cut->unit, g->k);
    return (gemm_block){i0 + first, gemm_begin(i1 - i0, row + 1, cut->row_parts) - first, p0, end - p0,
                        g->accumulate || p0 > 0, end == g->k};
}

#define GEMM_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define GEMM_WIDE __attribute__((min_vector_width(8 * GEMM_BYTES))) /* otherwise clang halves vectors of 64 bytes */
#else
#define GEMM_WIDE
#endif
#define GEMM_PASTE_(x, y) x##_##y
#define GEMM_PASTE(x, y) GEMM_PASTE_(x, y)

#if GEMM_BYTES == 64
#define GEMM_LOW 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23
#define GEMM_HIGH 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31
#elif GEMM_BYTES == 32
#define GEMM_LOW 0, 8, 1, 9, 2, 10, 3, 11
#define GEMM_HIGH 4, 12, 5, 13, 6, 14, 7, 15
#else
#define GEMM_LOW 0, 4, 1, 5
#define GEMM_HIGH 2, 6, 3, 7
#endif
#ifdef __clang__
#define GEMM_ZIP(x, y, order) __builtin_shufflevector(x, y, order)
#else
#define GEMM_ZIP(x, y, ...) __builtin_shuffle(x, y, (Ints){__VA_ARGS__})
#endif

/* Transpose a square: interleave its two halves, once for each factor 2 of its size. */
GEMM_INLINE void gemm_transpose(const float *from, int64_t from_row, float *to, int64_t to_row) {
    Lanes x[LANES], y[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) x[i] = AT(from + i * from_row);
#pragma GCC unroll 4
    for (int done = 1; done < LANES; done *= 2) {
#pragma GCC unroll 8
        for (int i = 0; i < LANES / 2; i++) {
            y[2 * i] = GEMM_ZIP(x[i], x[i + LANES / 2], GEMM_LOW);
            y[2 * i + 1] = GEMM_ZIP(x[i], x[i + LANES / 2], GEMM_HIGH);
        }
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++) x[i] = y[i];
    }
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++) AT(to + i * to_row) = x[i];
}

/* Copy depth x width of `from` to rows of `padded` elements. From `from` on, `rest` elements may be read; what is
 * copied beyond the width is never used. */
GEMM_WIDE static void gemm_pack(int64_t depth, int64_t width, int64_t padded, const float *from, int64_t row,
                                int64_t column, int64_t rest, float *to) {
    if (row == 1 && column != 1) {
        float copy[LANES * LANES] = {0};
        for (int64_t j = 0; j < padded; j += LANES)
            for (int64_t p = 0; p < depth; p += LANES) {
                const int64_t q = depth < LANES ? 0 : gemm_min(p, depth - LANES); /* squares may overlap */
                const float *square = from + q + j * column;
                int64_t step = column;
                if (column < 0 || square - from + (LANES - 1) * column + LANES > rest) {
                    for (int64_t i = 0; i < gemm_min(LANES, width - j); i++)
                        memcpy(copy + i * LANES, square + i * column, gemm_min(LANES, depth) * sizeof *to);
                    square = copy, step = LANES;
                }
                gemm_transpose(square, step, to + q * padded + j, padded);
            }
        return;
    }
    for (int64_t p = 0; p < depth; p++, from += row, rest -= row, to += padded)
        if (column == 1 && padded <= rest)
            for (int64_t j = 0; j < padded; j += LANES) AT(to + j) = AT(from + j);
        else if (column == 1)
            memcpy(to, from, width * sizeof *to);
        else
            for (int64_t j = 0; j < width; j++) to[j] = from[j * column];
}


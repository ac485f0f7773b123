/* Matrix products of float32: C = A B, or C += A B.
 *
 * Two strides find each element of A and of B, so a transposed operand needs no copy. Rows of C are contiguous. A
 * product may have two batch dimensions, whose strides are free, too: transposes before and after it cost nothing.
 *
 * Each element of C is always summed in one order: k is cut into blocks, whose size depends on k alone; the products of
 * a block are added one after the other, each with one rounding; the sum of the block is added to C. So the result
 * depends neither on the number of threads nor on the tiles.
 *
 * The loops, from the outside: blocks of rows, whose part of A fits the L2 cache; blocks of k; panels of columns, whose
 * part of B fits the L1 cache; tiles of up to GEMM_MR rows, whose sums stay in registers.
 *
 * Compile with -O3, with -ffp-contract=fast, so that a * b + c is one instruction with one rounding, and for the
 * machine's own instruction set (-march=native).
 */
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
typedef void (*gemm_parallel_for)(void *pool, gemm_task task, size_t count, void *user);

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

/* Return the rows of a block: few if to store C takes longest, as few rows of it are stored fast. */
static inline int64_t gemm_block_rows(const gemm_product *g) {
    const int stores = !g->panels && g->b_strides.column == 1 && g->k <= 2 * GEMM_BYTES && g->n >= 256;
    return stores ? 32 / GEMM_MR * GEMM_MR : GEMM_MC;
}

/* Return the rows of a packed panel of B. */
static inline int64_t gemm_panel_rows(const gemm_product *g) { return g->k < 16 ? 16 : gemm_min(g->k, GEMM_KC); }

/* Return the stride of rows in a packed block of A. An odd number of cache lines spreads the rows over the cache. */
static inline int64_t gemm_padded(int64_t depth) { return ((depth + 15) / 16 | 1) * 16; }

/* Return how many elements a task needs for a block of A, a panel of B and a tile of C. */
static inline size_t gemm_task_elements(const gemm_product *g) {
    const int64_t depth = gemm_panel_rows(g), rows = gemm_min(g->m, GEMM_MC);
    const int64_t block = (rows / GEMM_MR + 2) * GEMM_STEP * gemm_padded(depth);
    return (size_t)(block + (depth + GEMM_MR) * GEMM_NR + 64) / 16 * 16;
}

/* Split the rows and the columns of each product so that a task has the least to compute and to read. */
static inline void gemm_split(const gemm_product *g, int64_t *row_ways, int64_t *column_ways) {
    const int64_t products = g->batch[0] * g->batch[1];
    int64_t best = INT64_MAX;
    *row_ways = *column_ways = 1;
    if (products >= 4 * g->threads) return;
    for (int64_t ways = 1; ways <= g->threads; ways++) {
        const int64_t other = g->threads / ways, rows = (g->m + ways - 1) / ways;
        const int64_t columns = (gemm_parts(g->n, GEMM_NR) + other - 1) / other * GEMM_NR;
        const int64_t cost = rows * columns + 4 * rows + 8 * columns;
        if (cost < best) best = cost, *row_ways = ways, *column_ways = other;
    }
}

#define GEMM_INLINE static inline __attribute__((always_inline))
#ifdef __clang__
#define GEMM_WIDE __attribute__((min_vector_width(8 * GEMM_BYTES))) /* otherwise clang halves vectors of 64 bytes */
#else
#define GEMM_WIDE
#endif
#define GEMM_PASTE_(x, y) x##_##y
#define GEMM_PASTE(x, y) GEMM_PASTE_(x, y)

/* Write the sums of a tile to C, or add them. */
GEMM_INLINE void gemm_store(int mr, int vectors, Lanes sums[GEMM_MR][2], float *c, int64_t c_row, int accumulate) {
#pragma GCC unroll 14
    for (int i = 0; i < mr; i++, c += c_row) {
        __asm__("" : "+r"(c));
#pragma GCC unroll 2
        for (int v = 0; v < vectors; v++) {
            if (accumulate) sums[i][v] += AT(c + v * LANES);
            AT(c + v * LANES) = sums[i][v];
        }
    }
}

/* These are the operands of a tile. Their strides of A and B are in bytes. */
#define GEMM_OPERANDS                                                                                                \
    int64_t k, const char *a, int64_t a_row, int64_t a_column, const char *ahead, const int64_t *places,             \
        const char *b, int64_t b_row, char *kept, float *c, int64_t c_row, int accumulate

/* Compute mr rows times `vectors` vectors of C. With `keep`, what is read of B is written to `kept`, without gaps. Every
 * second step fetches two lines into the cache, from ahead + places[step / 2]. mr, vectors and keep are constants, so
 * that the sums stay in registers. */
GEMM_INLINE void gemm_tile(int mr, int vectors, int keep, GEMM_OPERANDS) {
    Lanes sums[GEMM_MR][2] = {{{0}}};
    const char *a5 = a + 5 * a_row, *a10 = a + 10 * a_row;
    int64_t a_row3 = 3 * a_row;
    __asm__("" : "+r"(a_row3)); /* three pointers and two strides: a compiler that knows more makes 14 pointers */
    for (int i = 0; i < mr; i++) {
        __builtin_prefetch(c + i * c_row, 1);
        if (vectors > 1 && GEMM_BYTES == 64) __builtin_prefetch(c + i * c_row + LANES, 1);
    }
#pragma GCC unroll 2
    for (int64_t p = 0; p < k; p++) {
        Lanes b0 = AT(b), b1 = AT(b + (vectors - 1) * GEMM_BYTES);
        if (keep) {
            __builtin_prefetch(b + GEMM_DISTANCE * b_row);
            __builtin_prefetch(b + GEMM_DISTANCE * b_row + (vectors - 1) * GEMM_BYTES);
            AT(kept) = b0;
            AT(kept + (vectors - 1) * GEMM_BYTES) = b1;
            kept += vectors * GEMM_BYTES;
        }
#pragma GCC unroll 14
        for (int i = 0; i < mr; i++) {
            const char *from = i < 5 ? a : i < 10 ? a5 : a10;
            const float x = *(const float *)(i % 5 == 3 ? from + a_row3 : from + i % 5 * a_row);
            sums[i][0] += x * b0;
            if (vectors > 1) sums[i][1] += x * b1;
        }
        if (p % 2 == 0) __builtin_prefetch(ahead + places[p / 2]), __builtin_prefetch(ahead + places[p / 2] + 64);
        a += a_column, a5 += a_column, a10 += a_column, b += b_row;
    }
    gemm_store(mr, vectors, sums, c, c_row, accumulate);
}

typedef void (*gemm_tile_function)(GEMM_OPERANDS);
#define GEMM_TILE(name, mr, vectors, keep)                                                                       \
    GEMM_WIDE static void name(GEMM_OPERANDS) {                                                                  \
        gemm_tile(mr, vectors, keep, k, a, a_row, a_column, ahead, places, b, b_row, kept, c, c_row, accumulate); \
    }
#define GEMM_TILES(mr) GEMM_TILE(gemm_1_##mr, mr, 1, 0) GEMM_TILE(gemm_2_##mr, mr, 2, 0) GEMM_TILE(gemm_k_##mr, mr, 2, 1)
#define GEMM_POINTERS(mr) {gemm_1_##mr, gemm_2_##mr, gemm_k_##mr},
#define GEMM_6(X) X(1) X(2) X(3) X(4) X(5) X(6)
#define GEMM_10(X) GEMM_6(X) X(7) X(8) X(9) X(10)
#define GEMM_14(X) GEMM_10(X) X(11) X(12) X(13) X(14)
GEMM_PASTE(GEMM, GEMM_MR)(GEMM_TILES)
/* For each number of rows, the tiles have one vector, two vectors, or two vectors and keep B. */
static const gemm_tile_function gemm_tiles[][3] = {GEMM_PASTE(GEMM, GEMM_MR)(GEMM_POINTERS)};

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

/* Compute rows i0 to i1 and columns j0 to j1 of one product. */
static void gemm_region(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                        char *scratch) {
    const gemm_strides sa = g->a_strides, sb = g->b_strides, sc = g->c_strides;
    const float *a = g->a + batch[0] * sa.batch[0] + batch[1] * sa.batch[1];
    const float *b = g->b ? g->b + batch[0] * sb.batch[0] + batch[1] * sb.batch[1] : NULL;
    float *c = g->c + batch[0] * sc.batch[0] + batch[1] * sc.batch[1];
    float *tile = (float *)(((uintptr_t)scratch + 63) / 64 * 64), *b_panel = tile + GEMM_MR * GEMM_NR;
    float *a_block = b_panel + gemm_panel_rows(g) * GEMM_NR;
    const int64_t row_blocks = gemm_parts(i1 - i0, gemm_block_rows(g)), k_blocks = gemm_parts(g->k, GEMM_KC);
    const int64_t size = sizeof(float);
    for (int64_t r = 0; r < row_blocks * k_blocks; r++) {
        const int64_t row0 = i0 + gemm_begin(i1 - i0, r / k_blocks, row_blocks);
        const int64_t rows = i0 + gemm_begin(i1 - i0, r / k_blocks + 1, row_blocks) - row0;
        const int64_t p0 = gemm_begin(g->k, r % k_blocks, k_blocks);
        const int64_t depth = gemm_begin(g->k, r % k_blocks + 1, k_blocks) - p0;
        const int64_t tiles = gemm_parts(rows, GEMM_MR), low = rows / tiles, higher = rows % tiles;
        const int accumulate = g->accumulate || p0 > 0, last = p0 + depth == g->k;
        int64_t rest = (g->m - row0 - 1) * sa.row + (g->k - p0 - 1) * sa.column + 1;
        const float *block = a + row0 * sa.row + p0 * sa.column;
        int64_t a_row = sa.row, a_column = sa.column, a_panel = 0, mr;
        if (sa.row == 1 && j1 - j0 > 2 * GEMM_NR && sa.column * size > 512) { /* one panel for each tile */
            a_column = GEMM_STEP, a_panel = (depth | 1) * GEMM_STEP;
            for (int64_t p = 0; p < depth; p++, rest -= sa.column) {
                const float *at = block + p * sa.column, *fetched = at + 4 * sa.column;
                const float *end = at + rest - GEMM_STEP;
                float *to = a_block + p * GEMM_STEP;
                for (int64_t i = 0; i < rows; i += 64 / size) __builtin_prefetch(fetched + i);
                for (int64_t t = 0; t < tiles; t++, to += a_panel, at += mr) {
                    mr = low + (t < higher);
                    if (at > end) memcpy(to, at, mr * size);
                    else
                        for (int64_t v = 0; v < GEMM_STEP; v += LANES) AT(to + v) = AT(at + v);
                }
            }
            block = a_block;
        } else if (j1 - j0 > GEMM_DIRECT) {
            a_row = gemm_padded(depth), a_column = 1;
            gemm_pack(rows, depth, a_row, block, sa.row, sa.column, rest, a_block);
            block = a_block;
        }
        /* Tiles of the first panel fetch A for the next tile, if that is a line for each step of k. The others fetch
         * the next panel of B, if it is not in a cache yet, each a share of its rows or columns, evenly: too many lines
         * at once wait for each other. */
        const int fetch_b = !g->source && (r < k_blocks || g->k * g->n * size > 1 << 20);
        const int64_t a_line = a_row == 1 ? a_column * size : a_row == depth && a_column == 1 ? 64 : 0;
        const int by_rows = g->panels || sb.column == 1;
        const int64_t piece = g->panels ? GEMM_NR : by_rows ? sb.row : sb.column, pieces = by_rows ? depth : GEMM_NR;
        const int64_t share = (pieces + tiles - 1) / tiles, bytes = (by_rows ? GEMM_NR : depth) * size;
        const int64_t pairs = share * ((bytes + 127) / 128), steps = (depth + 1) / 2;
        const int64_t repeat = steps > pairs ? steps / pairs : 1;
        int64_t of_a[GEMM_KC / 2], of_b[GEMM_KC / 2], p = 0;
        for (int64_t q = 0; a_line && q < steps; q++) of_a[q] = 2 * q * a_line;
        for (int64_t x = 0; fetch_b && x < share; x++)
            for (int64_t y = 0; y < bytes; y += 128)
                for (int64_t q = 0; q < repeat && p < steps; q++) of_b[p++] = x * piece * size + y;
        while (fetch_b && p < steps) of_b[p++] = 0;
        for (int64_t j = j0, done = j0; j < j1; j += GEMM_NR) {
            const int64_t width = gemm_min(GEMM_NR, j1 - j), end = j + width;
            const int vectors = width > LANES ? 2 : 1, whole = width == vectors * LANES;
            const int64_t p_next = end < j1 ? p0 : last ? 0 : p0 + depth, j_next = end < j1 ? end : j0;
            const float *b_from = b_panel, *b_next = NULL;
            int64_t b_row = vectors * LANES;
            int keep = 0; /* by the first tile */
            if (g->source) {
                g->source(g->source_user, p0, depth, j, width, b_row, b_panel);
            } else if (g->panels) {
                b_from = g->panels + (j / GEMM_NR * g->k + p0) * GEMM_NR, b_row = GEMM_NR;
                b_next = g->panels + (j_next / GEMM_NR * g->k + p_next) * GEMM_NR;
            } else {
                const float *at = b + p0 * sb.row + j * sb.column;
                b_next = b + p_next * sb.row + j_next * sb.column;
                if (whole && sb.column == 1) b_from = at, b_row = sb.row, keep = vectors > 1 && tiles > 1;
                else gemm_pack(depth, width, b_row, at, sb.row, sb.column,
                               (g->k - p0 - 1) * sb.row + (g->n - j - 1) * sb.column + 1, b_panel);
            }
            for (int64_t t = 0, i = 0; t < tiles; t++, i += mr) {
                const float *from = block + (a_panel ? t * a_panel : i * a_row), *ahead = from;
                const int64_t *places = gemm_nowhere;
                float *to = c + (row0 + i) * sc.row + j;
                mr = low + (t < higher);
                if (j == j0 && a_line) ahead += mr * a_row, places = of_a;
                else if (fetch_b) ahead = b_next + t * share * piece, places = of_b;
                gemm_tiles[mr - 1][keep ? 2 : vectors - 1](
                    depth, (const char *)from, a_row * size, a_column * size, (const char *)ahead, places,
                    (const char *)b_from, b_row * size, (char *)b_panel, whole ? to : tile, whole ? sc.row : GEMM_NR,
                    whole && accumulate);
                for (int64_t x = 0; !whole && x < mr; x++)
                    for (int64_t y = 0; y < width; y++)
                        if (accumulate) to[x * sc.row + y] += tile[x * GEMM_NR + y];
                        else to[x * sc.row + y] = tile[x * GEMM_NR + y];
                if (keep) b_from = b_panel, b_row = GEMM_NR, keep = 0;
            }
            if (last && g->epilogue && (end == j1 || (end - done) * rows >= 32768)) {
                g->epilogue(g->user, batch, row0, row0 + rows, done, end);
                done = end;
            }
        }
    }
}

/* Return how many bytes all of B has in panels. */
static inline size_t gemm_panel_bytes(const gemm_product *g) {
    return (size_t)(gemm_parts(g->n, GEMM_NR) * g->k + LANES) * GEMM_NR * sizeof(float);
}

/* Pack all of B, for products that have it in common. */
static inline void gemm_panels(const gemm_product *g, float *panels) {
    const gemm_strides s = g->b_strides;
    for (int64_t j = 0; j < g->n; j += GEMM_NR)
        gemm_pack(g->k, gemm_min(GEMM_NR, g->n - j), GEMM_NR, g->b + j * s.column, s.row, s.column,
                  (g->k - 1) * s.row + (g->n - j - 1) * s.column + 1, panels + j * g->k);
}

typedef struct {
    const gemm_product *of;
    int64_t row_ways, column_ways, units, tasks;
} gemm_plan;

static void gemm_run(void *user, size_t index) {
    const gemm_plan *plan = user;
    const gemm_product *g = plan->of;
    const int64_t panels = gemm_parts(g->n, GEMM_NR), end = gemm_begin(plan->units, (int64_t)index + 1, plan->tasks);
    char *scratch = (char *)g->scratch + index * gemm_task_elements(g) * sizeof(float);
    for (int64_t u = gemm_begin(plan->units, (int64_t)index, plan->tasks); u < end; u++) {
        const int64_t i = u / plan->column_ways % plan->row_ways, j = u % plan->column_ways;
        const int64_t number = u / plan->column_ways / plan->row_ways;
        const int64_t batch[2] = {number / g->batch[1], number % g->batch[1]};
        const int64_t i0 = gemm_begin(g->m, i, plan->row_ways), i1 = gemm_begin(g->m, i + 1, plan->row_ways);
        const int64_t j0 = gemm_begin(panels, j, plan->column_ways) * GEMM_NR;
        const int64_t j1 = gemm_min(gemm_begin(panels, j + 1, plan->column_ways) * GEMM_NR, g->n);
        if (i0 < i1 && j0 < j1) gemm_region(g, batch, i0, i1, j0, j1, scratch);
    }
}

static inline size_t gemm_scratch(const gemm_product *g) {
    return (size_t)g->threads * gemm_task_elements(g) * sizeof(float);
}

static inline void gemm(const gemm_product *g) {
    const int64_t products = g->batch[0] * g->batch[1];
    gemm_plan plan = {g, 1, 1, products, 1};
    if (g->m == 0 || g->n == 0 || products == 0) return;
    if (g->threads > 1 && 2.0 * (double)g->m * (double)g->n * (double)g->k * (double)products > 1e6) {
        gemm_split(g, &plan.row_ways, &plan.column_ways);
        plan.units *= plan.row_ways * plan.column_ways;
        plan.tasks = gemm_min(g->threads, plan.units);
    }
    if (plan.tasks > 1) g->parallel_for(g->pool, gemm_run, (size_t)plan.tasks, &plan);
    else gemm_run(&plan, 0);
}

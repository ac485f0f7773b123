/* Matrix products in float32.
 *
 * The products of a block of k are added one after the other, each with one rounding; the sum of the block is added to
 * C.
 *
 * The loops, from the outside: blocks of rows, whose part of A fits the L2 cache; blocks of k; panels of columns, whose
 * part of B fits the L1 cache; tiles of up to GEMM_MR rows, whose sums stay in registers.
 *
 * Compile with -O3, with -ffp-contract=fast, so that a * b + c is one instruction with one rounding, and for the
 * machine's own instruction set (-march=native).
 */
#pragma once
#include "matrix.h"

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
 * second step fetches two lines into the cache, from ahead + places[step / 2], and a row of C as long as there are any:
 * rows that are fetched all at once wait for each other. mr, vectors and keep are constants, so that the sums stay in
 * registers. */
GEMM_INLINE void gemm_tile(int mr, int vectors, int keep, GEMM_OPERANDS) {
    Lanes sums[GEMM_MR][2] = {{{0}}};
    const char *a5 = a + 5 * a_row, *a10 = a + 10 * a_row;
    int64_t a_row3 = 3 * a_row;
    __asm__("" : "+r"(a_row3)); /* three pointers and two strides: a compiler that knows more makes 14 pointers */
    const float *line = c;
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
        if (p % 2 == 0) {
            __builtin_prefetch(ahead + places[p / 2]), __builtin_prefetch(ahead + places[p / 2] + 64);
            if (p < 2 * mr) {
                __builtin_prefetch(line, 1);
                if (vectors > 1 && GEMM_BYTES == 64) __builtin_prefetch(line + LANES, 1);
                line += c_row;
            }
        }
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

/* Compute rows i0 to i1 and columns j0 to j1 of one product. */
static void gemm_region(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                        char *scratch) {
    const gemm_strides sa = g->a_strides, sb = g->b_strides, sc = g->c_strides;
    const float *a = g->a + batch[0] * sa.batch[0] + batch[1] * sa.batch[1];
    const float *b = g->b ? g->b + batch[0] * sb.batch[0] + batch[1] * sb.batch[1] : NULL;
    float *c = g->c + batch[0] * sc.batch[0] + batch[1] * sc.batch[1];
    float *tile = (float *)(((uintptr_t)scratch + 63) / 64 * 64), *b_panel = tile + GEMM_MR * GEMM_NR;
    float *a_block = b_panel + gemm_panel_rows(g) * GEMM_NR;
    const gemm_cut cut = gemm_cut_of(g, i1 - i0, gemm_block_rows(g), GEMM_KC, 1);
    const int64_t size = sizeof(float);
    for (int64_t r = 0; r < cut.row_parts * cut.k_parts; r++) {
        const gemm_block own = gemm_block_of(g, &cut, i0, i1, r);
        const int64_t row0 = own.row0, rows = own.rows, p0 = own.p0, depth = own.depth;
        const int64_t tiles = gemm_parts(rows, GEMM_MR), low = rows / tiles, higher = rows % tiles;
        const int accumulate = own.accumulate, last = own.last;
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
        const int fetch_b = !g->source && (r < cut.k_parts || g->k * g->n * size > 1 << 20);
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


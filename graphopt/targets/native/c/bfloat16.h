/* Matrix products whose operands are rounded to bfloat16, or split into two bfloat16 numbers each. Sums are float32.
 *
 * Of a split number, the high piece is the nearest bfloat16 number and the low piece is the nearest to what is left, so
 * that about 16 bits remain. A product of two pieces is high * high + high * low + low * high. (PyTorch's and JAX's
 * precision `high` means the same.) A split infinity has a low piece that is no number, so that its products are not.
 *
 * Operands are packed in tiles of 16 rows of A or columns of B with 32 terms of a sum, which are 16 lines of 64 bytes.
 * With AVX-512, a line of a tile of A is a row; a line of a tile of B is a pair of terms, in 16 columns. Two tiles side by
 * side are a block of 32 rows of A, or 32 columns of B, with 32 terms. In a block, the tiles of high pieces come before
 * those of low ones. The blocks of a panel are its terms in order.
 *
 * With AMX or on ARM, to pack a panel takes about as long as to multiply it, but other units of the processor. So while a
 * panel is multiplied, jobs pack the next ones, a tile at a time. With AVX-512 alone, both take the same units and
 * registers, so that a panel is packed before.
 */
#pragma once
#include "lines.h"
#include "matrix.h"
#include "narrow.h"

enum {
    SUMS_TOGETHER = 1 << 17, /* of a result of bfloat16 numbers, which fit it, too */
    PANEL_TERMS = 512,
};

#ifdef TILES_OF_PROCESSOR
#include TILES_OF_PROCESSOR

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

/* Return how many columns of a result of bfloat16 numbers have their sums in a cache: those of a panel, or as many as fit if
 * several parts of k add to them. */
static inline int64_t columns_of_sums(const gemm_product *g) {
    const int64_t rows = gemm_min(g->m, ROWS_TOGETHER);
    return g->k <= PANEL_TERMS ? BLOCK_LINES : SUMS_TOGETHER / (rows + BLOCK_LINES - 1) / BLOCK_LINES * BLOCK_LINES;
}

static inline size_t low_task_elements(const gemm_product *g) {
    const int64_t terms = gemm_min(g->k, PANEL_TERMS), panels = (gemm_min(g->m, ROWS_TOGETHER) + BLOCK_LINES - 1) / BLOCK_LINES;
    const int64_t filled = g->source ? terms * BLOCK_LINES : 0;
    const int64_t sums = g->is_narrow[2] ? gemm_min(g->m, ROWS_TOGETHER) * columns_of_sums(g) : 0;
    return (size_t)((panels + 2) * panel_lines(terms, g->pieces) * 16 + filled + sums + 64);
}

/* Return the job to pack columns of B as a panel. With a source, it first fills `filled`. */
static PackJob job_of_b(const gemm_product *g, const char *b, int64_t p, int64_t terms, int64_t j, int64_t price, float *filled,
                        Line *to) {
    const gemm_strides s = g->b_strides;
    const int64_t columns = gemm_min(BLOCK_LINES, g->n - j);
    PackJob job = {b + (p * s.row + j * s.column) * size_of(g->is_narrow[1]), g->is_narrow[1], s.column, s.row, columns, terms, BLOCK_LINES * s.column, g->pieces, 1, to,
                   price, 0, 0, (terms + BLOCK_TERMS - 1) / BLOCK_TERMS * 2, pack_lines};
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
static void round_rows(const float *restrict from, int64_t from_row, bfloat16 *restrict to, int64_t to_row, int64_t rows,
                       int64_t columns) {
    for (int64_t i = 0; i < rows; i++, from += from_row, to += to_row)
        for (int64_t j = 0; j < columns; j++) to[j] = to_bfloat16(rounded_to_bfloat16(from[j]));
}

/* Compute rows i0 to i1 and columns j0 to j1 of one product, between begin_tiles and end_tiles. */
static void low_columns(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                        char *scratch) {
    const gemm_strides sa = g->a_strides, sc = g->c_strides;
    const char *a = batch_of(g->a, g->is_narrow[0], &sa, batch), *b = batch_of(g->b, g->is_narrow[1], &g->b_strides, batch);
    char *result = (char *)batch_of(g->c, g->is_narrow[2], &sc, batch);
    Line *panels_of_b = (Line *)(((uintptr_t)scratch + 63) / 64 * 64);
    const int64_t largest = panel_lines(gemm_min(g->k, PANEL_TERMS), g->pieces);
    Line *panels_of_a = panels_of_b + 2 * largest;
    float *filled = (float *)(panels_of_a + (gemm_min(g->m, ROWS_TOGETHER) + BLOCK_LINES - 1) / BLOCK_LINES * largest);
    float *sums = filled; /* there is no source then */
    const gemm_cut cut = gemm_cut_of(g, i1 - i0, ROWS_TOGETHER, PANEL_TERMS, BLOCK_TERMS);
    for (int64_t r = 0; r < cut.row_parts * cut.k_parts; r++) {
        const gemm_block own = gemm_block_of(g, &cut, i0, i1, r);
        const int64_t row0 = own.row0, rows = own.rows, p0 = own.p0, depth = own.depth;
        const int64_t blocks = (depth + BLOCK_TERMS - 1) / BLOCK_TERMS;
        const int64_t size = panel_lines(depth, g->pieces), panels = (rows + BLOCK_LINES - 1) / BLOCK_LINES;
        const int accumulate = own.accumulate, last = own.last;
        const int64_t c_row = g->is_narrow[2] ? columns_of_sums(g) : sc.row, a_panel = BLOCK_LINES * sa.row * size_of(g->is_narrow[0]);
        float *c = g->is_narrow[2] ? sums : (float *)result + row0 * sc.row + j0;
        PackJob job_b = {0}, job_a = {a + (row0 * sa.row + p0 * sa.column) * size_of(g->is_narrow[0]), g->is_narrow[0], sa.row, sa.column, gemm_min(rows, BLOCK_LINES), depth,
                              BLOCK_LINES * sa.row, g->pieces, 0, panels_of_a, 1, 0, 0, 2 * blocks, pack_lines};
        pack_rest(&job_a);
        if (!g->panels) job_b = job_of_b(g, b, p0, depth, j0, panels, filled, panels_of_b);
        pack_rest(&job_b);
        for (int64_t j = j0, done = j0, odd = 0; j < j1; j += BLOCK_LINES, odd = !odd) {
            const int64_t columns = gemm_min(BLOCK_LINES, j1 - j), end = j + columns;
            const Line *panel = g->panels ? (const Line *)g->panels + j / BLOCK_LINES * panel_lines(g->k, g->pieces) + panel_lines(p0, g->pieces)
                                          : panels_of_b + odd * largest;
            if (!g->panels && end < j1) job_b = job_of_b(g, b, p0, depth, end, panels, filled, panels_of_b + !odd * largest);
            float *const sums_at = c + (g->is_narrow[2] && cut.k_parts == 1 ? 0 : j - j0);
            for (int64_t i = 0; i < rows; i += BLOCK_LINES) {
                PackJob *jobs[3] = {NULL}, **job = jobs;
                if (job_b.done < job_b.tiles) *job++ = &job_b;
                if (j == j0 && i + BLOCK_LINES < rows) {
                    job_a.from += a_panel, job_a.lines = gemm_min(rows - i - BLOCK_LINES, BLOCK_LINES);
                    job_a.to += size, job_a.done = job_a.work = 0, *job++ = &job_a;
                }
                multiply_panels(g->pieces, blocks, panels_of_a + i / BLOCK_LINES * size, panel, gemm_min(rows - i, BLOCK_LINES), columns,
                                sums_at + i * c_row, c_row, accumulate, jobs);
                pack_rest(&job_a);
            }
            pack_rest(&job_b);
            if (last && g->is_narrow[2])
                round_rows(sums_at, c_row, (bfloat16 *)result + row0 * sc.row + j, sc.row, rows, columns);
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
    const int64_t step = g->is_narrow[2] && g->k > PANEL_TERMS ? columns_of_sums(g) : j1 - j0;
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
static inline void low_region(const gemm_product *g, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                              char *scratch) {
    (void)g, (void)batch, (void)i0, (void)i1, (void)j0, (void)j1, (void)scratch;
}
static inline size_t low_task_elements(const gemm_product *g) { return (void)g, 0; }
static inline size_t low_panel_bytes(const gemm_product *g) { return (void)g, 0; }
static inline void low_panels(const gemm_product *g, float *panels) { (void)g, (void)panels; }
static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}
#endif

/* Matrix products: C = A B, or C += A B.
 *
 * Two strides find each element of A and of B, so a transposed operand needs no copy. Rows of C are contiguous. A
 * product may have two batch dimensions, whose strides are free, too: transposes before and after it cost nothing.
 *
 * Each element of C is always summed in one order: k is cut into blocks, whose size depends on k alone. So the result
 * depends neither on the number of threads nor on the tiles.
 */
#pragma once
#include "bfloat16.h"
#include "float32.h"
#include "lines.h"
#include "matrix.h"

/* Return the columns of a panel of B. */
static inline int64_t gemm_columns(const gemm_product *g) { return g->pieces ? BLOCK_LINES : GEMM_NR; }

/* Split the rows and the columns of each product so that a task has the least to compute and to read. */
static inline void gemm_split(const gemm_product *g, int64_t *row_ways, int64_t *column_ways) {
    const int64_t products = g->batch[0] * g->batch[1];
    int64_t best = INT64_MAX;
    *row_ways = *column_ways = 1;
    if (products >= 4 * g->threads) return;
    for (int64_t ways = 1; ways <= g->threads; ways++) {
        const int64_t other = g->threads / ways, rows = (g->m + ways - 1) / ways;
        const int64_t columns = (gemm_parts(g->n, gemm_columns(g)) + other - 1) / other * gemm_columns(g);
        const int64_t cost = rows * columns + 4 * rows + 8 * columns;
        if (cost < best) best = cost, *row_ways = ways, *column_ways = other;
    }
}

/* Return how many bytes all of B has in panels. */
static inline size_t gemm_panel_bytes(const gemm_product *g) {
    if (g->pieces) return low_panel_bytes(g);
    return (size_t)(gemm_parts(g->n, GEMM_NR) * g->k + LANES) * GEMM_NR * sizeof(float);
}

/* Pack all of B, for products that have it in common. */
static inline void gemm_panels(const gemm_product *g, float *panels) {
    const gemm_strides s = g->b_strides;
    if (g->pieces) low_panels(g, panels);
    for (int64_t j = 0; !g->pieces && j < g->n; j += GEMM_NR)
        gemm_pack(g->k, gemm_min(GEMM_NR, g->n - j), GEMM_NR, g->b + j * s.column, s.row, s.column,
                  (g->k - 1) * s.row + (g->n - j - 1) * s.column + 1, panels + j * g->k);
}

typedef struct {
    const gemm_product *of;
    int64_t row_ways, column_ways, units, tasks;
} gemm_plan;

typedef void (*gemm_compute)(const gemm_product *, const int64_t batch[2], int64_t i0, int64_t i1, int64_t j0, int64_t j1,
                             char *scratch);

/* Return how many elements of scratch a task needs. */
static inline size_t gemm_elements(const gemm_product *g) {
    return g->pieces ? low_task_elements(g) : gemm_task_elements(g);
}

static void gemm_run(void *user, size_t index) {
    const gemm_plan *plan = user;
    const gemm_product *g = plan->of;
    const int64_t width = gemm_columns(g), panels = gemm_parts(g->n, width), end = gemm_begin(plan->units, (int64_t)index + 1, plan->tasks);
    char *scratch = (char *)g->scratch + index * gemm_elements(g) * sizeof(float);
    const gemm_compute region = g->pieces ? low_region : gemm_region;
    if (g->pieces) begin_tiles();
    for (int64_t u = gemm_begin(plan->units, (int64_t)index, plan->tasks); u < end; u++) {
        const int64_t i = u / plan->column_ways % plan->row_ways, j = u % plan->column_ways;
        const int64_t number = u / plan->column_ways / plan->row_ways;
        const int64_t batch[2] = {number / g->batch[1], number % g->batch[1]};
        const int64_t i0 = gemm_begin(g->m, i, plan->row_ways), i1 = gemm_begin(g->m, i + 1, plan->row_ways);
        const int64_t j0 = gemm_begin(panels, j, plan->column_ways) * width;
        const int64_t j1 = gemm_min(gemm_begin(panels, j + 1, plan->column_ways) * width, g->n);
        if (i0 < i1 && j0 < j1) region(g, batch, i0, i1, j0, j1, scratch);
    }
    if (g->pieces) end_tiles();
}

static inline size_t gemm_scratch(const gemm_product *g) {
    return (size_t)g->threads * gemm_elements(g) * sizeof(float);
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

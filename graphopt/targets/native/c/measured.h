/* Measure the rates by which choice.h estimates times. The least time of several is that of a processor that does nothing
 * else. */
#pragma once
#include "calls.h"
#include "gemm.h"
#include "matrix.h"
#include "ort.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>

enum { MEASURED_ROWS = 256, MEASURED_COLUMNS = 512, MEASURED_TIMES = 20 };

static double seconds_now(void) {
    struct timespec now;
    timespec_get(&now, TIME_UTC);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Find the seconds of a multiplication of a product in float32 or, with a piece, in bfloat16; and those to pack a number of
 * an operand that is stored transposed. Return 0 without memory. */
static int time_product(int pieces, double *multiplication, double *packing) {
    const int64_t m = MEASURED_ROWS, n = MEASURED_COLUMNS, k = MEASURED_ROWS;
    gemm_product g = {.m = m, .n = n, .k = k, .batch = {1, 1}, .threads = 1, .pieces = pieces};
    g.a_strides = (gemm_strides){k, 1, {0, 0}}, g.b_strides = (gemm_strides){1, k, {0, 0}}, g.c_strides = (gemm_strides){n, 1, {0, 0}};
    const size_t operands = (size_t)(m * k + k * n + m * n) * sizeof(float);
    char *memory = calloc(operands + gemm_panel_bytes(&g) + gemm_scratch(&g) + 2 * 64, 1);
    if (!memory) return 0;
    float *a = (float *)memory, *panels = align64(memory + operands);
    g.a = a, g.b = a + m * k, g.c = a + m * k + k * n, g.scratch = align64((char *)panels + gemm_panel_bytes(&g));
    *multiplication = *packing = INFINITY;
    for (int i = 0; i < MEASURED_TIMES; i++) {
        const double start = seconds_now();
        gemm_panels(&g, panels);
        g.panels = panels;
        const double packed = seconds_now();
        gemm(&g);
        *multiplication = fmin(*multiplication, (seconds_now() - packed) / (double)(m * n * k));
        *packing = fmin(*packing, (packed - start) / (double)(k * n));
    }
    free(memory);
    return 1;
}

/* Measure all rates, in some 20 milliseconds. Return 0 without memory. */
EXPORT int measure_rates(Rates *to) {
    double low_packing;
    if (!time_product(0, &to->multiplication, &to->copy) || !time_product(HAS_BFLOAT16, &to->tile_multiplication, &low_packing)) return 0;
    to->start = 20 * to->copy;
    return 1;
}

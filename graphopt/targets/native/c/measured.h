/* Measure the rates by which choice.h estimates times. The least time of several is that of a processor that does nothing
 * else. */
#pragma once
#include "bfloat16.h"
#include "calls.h"
#include "gemm.h"
#include "lines.h"
#include "matrix.h"
#include "ort.h"
#include <math.h>
#include <stdlib.h>
#include <time.h>

enum {
    MEASURED_ROWS = 256, /* and terms of a product */
    MEASURED_COLUMNS = 512,
    MEASURED_TILES = 64,
    MEASURED_TIMES = 20,
};

/* Return the seconds of a clock that is never set, where the system has one. */
static double seconds_now(void) {
    struct timespec now;
#ifdef _WIN32
    timespec_get(&now, TIME_UTC);
#else
    clock_gettime(CLOCK_MONOTONIC, &now);
#endif
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

/* Measure a product in float32, and how long it takes to pack an operand that is stored transposed. Return 0 without memory. */
static int measure_product(Rates *to) {
    const int64_t m = MEASURED_ROWS, n = MEASURED_COLUMNS, k = MEASURED_ROWS;
    gemm_product g = {.m = m, .n = n, .k = k, .batch = {1, 1}, .threads = 1};
    g.a_strides = (gemm_strides){k, 1, {0, 0}}, g.b_strides = (gemm_strides){1, k, {0, 0}}, g.c_strides = (gemm_strides){n, 1, {0, 0}};
    const size_t operands = (size_t)(m * k + k * n + m * n) * sizeof(float);
    char *memory = calloc(operands + gemm_panel_bytes(&g) + gemm_scratch(&g) + 2 * 64, 1);
    if (!memory) return 0;
    float *a = (float *)memory, *panels = align64(memory + operands);
    g.a = a, g.b = a + m * k, g.c = a + m * k + k * n, g.scratch = align64((char *)panels + gemm_panel_bytes(&g));
    to->multiplication = to->copy = INFINITY;
    for (int i = 0; i < MEASURED_TIMES; i++) {
        const double start = seconds_now();
        gemm_panels(&g, panels);
        g.panels = panels;
        const double packed = seconds_now();
        gemm(&g);
        to->multiplication = fmin(to->multiplication, (seconds_now() - packed) / (double)(m * n * k));
        to->copy = fmin(to->copy, (packed - start) / (double)(k * n));
    }
    free(memory);
    return 1;
}

/* Measure tiles of bfloat16 numbers that are packed and in a near cache. */
static void measure_tiles(Rates *to) {
#ifdef TILES_OF_PROCESSOR
    static Line panel[PANEL_TERMS];
    float sums[BLOCK_LINES * BLOCK_LINES] __attribute__((aligned(64))) = {0};
    PackJob *const none[] = {NULL};
    const double numbers = (double)MEASURED_TILES * BLOCK_LINES * BLOCK_LINES * PANEL_TERMS;
    to->tile_multiplication = INFINITY;
    begin_tiles();
    for (int i = 0; i < MEASURED_TIMES; i++) {
        const double start = seconds_now();
        for (int j = 0; j < MEASURED_TILES; j++)
            multiply_panels(1, PANEL_TERMS / BLOCK_TERMS, panel, panel, BLOCK_LINES, BLOCK_LINES, sums, BLOCK_LINES, 1, none);
        to->tile_multiplication = fmin(to->tile_multiplication, (seconds_now() - start) / numbers);
    }
    end_tiles();
#else
    to->tile_multiplication = to->multiplication;
#endif
}

/* Measure all rates, in some 20 milliseconds. Return 0 without memory. */
EXPORT int measure_rates(Rates *to) {
    if (!measure_product(to)) return 0;
    measure_tiles(to);
    to->start = 20 * to->copy;
    return 1;
}

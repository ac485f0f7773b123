/* The rates of one processor, for machines on which none were measured.
 *
 * They were fitted to 250 convolutions on 2026-11-27 (commit c5a4c706), and are within a third of most times. The history
 * names neither the processor nor the program. In these days, AMX was measured on an Intel Xeon
 * (examples/benchmarks/RESULTS_INTEL_PRECISION.md).
 */
#pragma once
#include "calls.h"

static Rates rates = {
    .copy = 0.25e-9,
    .multiplication = 0.25e-9 / 25,
#ifdef __AMX_BF16__
    .tile_multiplication = 0.25e-9 / 200,
#else
    .tile_multiplication = 0.25e-9 / 40,
#endif
    .start = 20 * 0.25e-9,
};

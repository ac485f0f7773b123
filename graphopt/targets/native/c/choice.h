/* Choose how to compute a convolution if products may have operands of bfloat16 numbers: in the form whose estimated time
 * is the least. These numbers multiply fast, but to round them, and to put them into tiles, takes time for each number of
 * an operand; with few places, few filters or small groups, that is longer than the product in float32.
 *
 * Times are counted in numbers that are copied, each about a quarter of a nanosecond. They were fitted to 250 convolutions
 * on one processor, and are within a third of most.
 */
#pragma once
#include "gathered.h"

typedef enum {
    IN_FLOAT32,
    AS_PRODUCTS, /* of matrices, one for each image or channel */
    GATHERED,
    SHIFTED,
} Form;

enum {
    FLOAT32_RATE = 25, /* multiplications in the time in which a number is copied */
#ifdef GEMM_HAS_TILES
    TILE_RATE = 200,
#else
    TILE_RATE = 40,
#endif
    STARTING = 20,             /* a task */
    MOST_WINDOWS = 1 << 24,    /* bytes of windows that are gathered */
};

/* How many numbers a group has: of filters, windows, results, and of the input. */
typedef struct {
    double filters, windows, results, input;
} Numbers;

static Numbers numbers_of(const Convolution *u) {
    const double terms = (double)(u->channels * product_of(u->taps)), rows = (double)(u->images * product_of(u->places));
    return (Numbers){(double)u->filters * terms, rows * terms, (double)u->filters * rows, (double)(u->images * u->channels * product_of(u->sizes))};
}

/* Return the time to multiply matrices in tiles. */
static double time_of_tiles(int64_t m, int64_t n, int64_t k) {
    return (double)upto(m, 16) * (double)upto(n, 16) * (double)upto(k, 32) * (pieces_of_all == 2 ? 3 : 1) / TILE_RATE;
}

static double time_in_float32(const Convolution *u, const Numbers *n) {
    const double sums = n->results * (double)(u->channels * product_of(u->taps)) / FLOAT32_RATE;
    return (double)u->groups * (sums + n->filters + 0.6 * n->windows + 0.8 * n->results) + STARTING;
}

/* Products of images, or, with `sums`, of channels. */
static double time_of_products(const Convolution *u, const Numbers *n, int sums) {
    const int64_t taps = product_of(u->taps), many = sums ? u->channels : u->images * u->groups;
    const double tiles = sums ? time_of_tiles(u->filters, u->images, taps) : time_of_tiles(u->filters, product_of(u->places), u->channels);
    const double packed = sums ? n->filters + n->windows : (double)u->images * n->filters + n->windows;
    return (double)many * tiles + (double)u->groups * (0.7 * packed + n->results * (sums ? 0.4 * (double)many : 1)) + 3 * STARTING;
}

#ifdef GEMM_HAS_TILES
static double time_gathered(const Convolution *u, const Numbers *n) {
    const int64_t rows = u->images * product_of(u->places), terms = u->channels * product_of(u->taps);
    const double copied = term_stride(u) ? 0 : u->w_filter < u->w_channel ? 4 : 1.5; /* far apart, or near each other */
    const double packed = n->filters * (1 + copied), gathered = n->windows * (pieces_of_all == 2 ? 1.7 : 1.2);
    if (n->windows * 2 * pieces_of_all > MOST_WINDOWS) return INFINITY;
    return (double)u->groups * (packed + gathered + n->input + 1.2 * n->results + time_of_tiles(u->filters, rows, terms) + STARTING);
}

static double time_shifted(const Convolution *u, const Numbers *n) {
    Tiled t = {.u = u, .pieces = pieces_of_all};
    int64_t filters, sums, copies;
    if (!can_shift(u)) return INFINITY;
    plan_tiles(&t, &filters, &sums, &copies);
    const int64_t windows = sums_over_taps(u) ? upto(u->images, 32) * product_of(u->places) : t.flow;
    const double packed = (pieces_of_all == 2 ? 2.8 : 4.8) * (double)copies + (sums_over_taps(u) ? 0 : 2.2 * n->filters);
    return (double)u->groups * (packed + 2 * n->results + 1.5 * (double)sums + time_of_tiles(32 * t.panels, windows, 32 * t.blocks) + 2 * STARTING);
}
#else
static double time_gathered(const Convolution *u, const Numbers *n) { return (void)u, (void)n, INFINITY; }
static double time_shifted(const Convolution *u, const Numbers *n) { return (void)u, (void)n, INFINITY; }
static OrtStatus *convolve_gathered(Context *context, const Convolution *u) { return (void)context, (void)u, NULL; }
static OrtStatus *convolve_in_tiles(Context *context, const Convolution *u) { return (void)context, (void)u, NULL; }
#endif

/* Return the form whose estimated time is the least; another than float32, if it is clearly less. */
static Form cheapest(const Convolution *u, int is_product, int sums) {
    const Numbers n = numbers_of(u);
    if (!pieces_of_all || n.results * n.filters == 0) return IN_FLOAT32;
    const double times[] = {0.9 * time_in_float32(u, &n), is_product ? time_of_products(u, &n, sums) : INFINITY, time_gathered(u, &n),
                            is_product ? INFINITY : time_shifted(u, &n)};
    Form best = IN_FLOAT32;
#ifdef ONLY_FORM /* as far as it can compute a convolution, for tests */
    if (times[ONLY_FORM] < INFINITY) return ONLY_FORM;
#endif
    for (Form form = AS_PRODUCTS; form <= SHIFTED; form++)
        if (times[form] < times[best]) best = form;
    return best;
}

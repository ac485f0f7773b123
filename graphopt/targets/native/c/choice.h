/* Choose how to compute a convolution: by the algorithm whose estimated time is the least. (bfloat16 numbers multiply fast,
 * but to round them, and to put them into tiles, takes time for each number of an operand; with few places, few filters or
 * small groups, that is longer than the product in float32.)
 */
#pragma once
#include "bfloat16.h"
#include "depthwise.h"
#include "direct.h"
#include "gathered.h"
#include "geometry.h"
#include "grouped.h"
#include "matrix.h"
#include "ort.h"
#include "pairs.h"
#include "pointwise.h"
#include "rates.h"
#include "resources.h"
#include "tiled.h"
#include "unfolded.h"

typedef struct {
    const char *name;
    int (*fits)(const Convolution *);         /* whether it can compute a convolution, which is not empty */
    size_t (*scratch)(const Convolution *);   /* how many bytes of memory it needs */
    double (*seconds)(const Convolution *);   /* an estimate of its time on one thread */
    void (*run)(Context *, const Convolution *, void *scratch);
} Algorithm;

enum {
    LEAST_OF_GROUP = 8,     /* channels and filters of a group: fewer fill too little of a vector */
    MOST_WINDOWS = 1 << 24, /* bytes of windows that are gathered */
};

/* How many numbers a group has: of filters, windows, results, and of the input. */
typedef struct {
    double filters, windows, results, input;
} Numbers;

static Numbers numbers_of(const Convolution *u) {
    const double terms = (double)(u->channels * product_of(u->taps)), rows = (double)(u->images * product_of(u->places));
    return (Numbers){(double)u->filters * terms, rows * terms, (double)u->filters * rows, (double)(u->images * u->channels * product_of(u->sizes))};
}

/* --- In float32: the first one that fits --- */

static const double CLEARLY = 0.9; /* the share of the time in float32 below which another algorithm is clearly faster */

/* Return whether filters, or the channels or filters of a group, are too few for a vector. */
static int has_few(const Convolution *u) {
    return u->filters < FEW_FILTERS || (u->groups > 1 && gemm_min(u->channels, u->filters) < LEAST_OF_GROUP);
}

static int depthwise_fits(const Convolution *u) { return has_few(u) && has_small_groups(u); }
static int always(const Convolution *u) { return (void)u, 1; }

/* Return the seconds of direct.h, and about those of the others, if a multiplication takes so many. */
static double direct_seconds(const Convolution *u, double multiplication) {
    const Numbers n = numbers_of(u);
    const double copied = n.filters + 0.6 * n.windows + 0.8 * n.results, sums = n.results * (double)(u->channels * product_of(u->taps));
    return (double)u->groups * (sums * multiplication + copied * rates.copy) + rates.start;
}

/* Return the seconds that copying each row of the padded input adds to the time per element. The factor 3 was fitted on an
 * AMD EPYC, to convolutions of MobileNetV3, RegNetX and ResNet-18. */
static double seconds_of_lines(const Convolution *u) {
#ifdef GEMM_HAS_PAIRS
    return 3 * rates.start * (double)(u->groups * u->images * u->channels * u->sizes[0] * u->sizes[1]);
#else
    return (void)u, 0;
#endif
}

static double float32_seconds(const Convolution *u) { return CLEARLY * direct_seconds(u, rates.multiplication); }
static double direct_float32_seconds(const Convolution *u) { return float32_seconds(u) + CLEARLY * seconds_of_lines(u); }

/* --- In tiles of bfloat16 numbers --- */

static int fits_tiles(const Convolution *u) { return pieces_of_all && !has_few(u) && u->channels * product_of(u->taps) > 0; }

enum { FAR_RESULTS = 1 << 20 }; /* results, or their transposes, that no near cache has */

/* Pairs of channels multiply as fast as tiles where an instruction multiplies pairs, and copies have half the elements. */
static int paired_fits(const Convolution *u) {
#ifdef GEMM_HAS_PAIRS
    const int is_near = u->w_filter < MOST_STRIDE && u->steps[2] < MOST_STRIDE;
    return fits_tiles(u) && pieces_of_all == 1 && u->channels > 1 && is_near && !is_product(u);
#else
    return (void)u, 0;
#endif
}

/* To pack filters for one panel of places, or to transpose results in memory, took longer than unfolded.h in float32 on an
 * AMD EPYC, the one processor on which this was measured. */
static double paired_seconds(const Convolution *u) {
    const int64_t rows = u->images * product_of(u->places);
    if (unfolds(u) && (rows <= WIDTH || u->filters * rows > FAR_RESULTS)) return INFINITY;
    Convolution half = *u;
    half.channels = (u->channels + 1) / 2;
    return direct_seconds(&half, 2 * rates.tile_multiplication) + seconds_of_lines(&half);
}

static int low_product_fits(const Convolution *u) { return fits_tiles(u) && is_product(u); }

static double seconds_of_tiles(int64_t m, int64_t n, int64_t k) {
    return (double)upto(m, 16) * (double)upto(n, 16) * (double)upto(k, 32) * (pieces_of_all == 2 ? 3 : 1) * rates.tile_multiplication;
}

static double low_product_seconds(const Convolution *u) {
    const Numbers n = numbers_of(u);
    const int sums = !is_product_of_images(u);
    const int64_t taps = product_of(u->taps), many = sums ? u->channels : u->images * u->groups;
    const double tiles = sums ? seconds_of_tiles(u->filters, u->images, taps) : seconds_of_tiles(u->filters, product_of(u->places), u->channels);
    const double packed = sums ? n.filters + n.windows : (double)u->images * n.filters + n.windows;
    const double copied = 0.7 * packed + n.results * (sums ? 0.4 * (double)many : 1);
    return (double)many * tiles + (double)u->groups * copied * rates.copy + 3 * rates.start;
}

#ifdef GEMM_HAS_TILES
static int gathered_fits(const Convolution *u) { return fits_tiles(u) && numbers_of(u).windows * 2 * pieces_of_all <= MOST_WINDOWS; }

static double gathered_seconds(const Convolution *u) {
    const Numbers n = numbers_of(u);
    const int64_t rows = u->images * product_of(u->places), terms = u->channels * product_of(u->taps);
    const double apart = term_stride(u) ? 0 : u->w_filter < u->w_channel ? 4 : 1.5; /* far apart, or near each other */
    const double copied = n.filters * (1 + apart) + n.windows * (pieces_of_all == 2 ? 1.7 : 1.2) + n.input + 1.2 * n.results;
    return (double)u->groups * (copied * rates.copy + seconds_of_tiles(u->filters, rows, terms) + rates.start);
}

static int shifted_fits(const Convolution *u) { return fits_tiles(u) && !is_product(u) && can_shift(u); }

static double shifted_seconds(const Convolution *u) {
    const Numbers n = numbers_of(u);
    const Tiled t = plan_shifted(u);
    const int64_t windows = sums_over_taps(u) ? upto(u->images, 32) * product_of(u->places) : t.flow;
    const double packed = (pieces_of_all == 2 ? 2.8 : 4.8) * (double)t.copied + (sums_over_taps(u) ? 0 : 2.2 * n.filters);
    const double copied = packed + 2 * n.results + 1.5 * (double)t.summed;
    return (double)u->groups * (copied * rates.copy + seconds_of_tiles(32 * t.panels, windows, 32 * t.blocks) + 2 * rates.start);
}
#endif

static const Algorithm algorithms[] = {
    {"depthwise", depthwise_fits, depthwise_scratch, float32_seconds, depthwise_run},
    {"grouped", has_few, grouped_scratch, float32_seconds, grouped_run},
    {"products", is_product, product_scratch, float32_seconds, product_run},
    {"unfolded", unfolds, unfolded_scratch, float32_seconds, unfolded_run},
    {"direct", always, direct_scratch, direct_float32_seconds, direct_run},
    {"paired", paired_fits, paired_scratch, paired_seconds, paired_run},
    {"low_products", low_product_fits, low_product_scratch, low_product_seconds, low_product_run},
#ifdef GEMM_HAS_TILES
    {"gathered", gathered_fits, gathered_scratch, gathered_seconds, gathered_run},
    {"shifted", shifted_fits, shifted_scratch, shifted_seconds, shifted_run},
#endif
};

/* Return the algorithm that computes a convolution in the least time; of several, the first one, as in float32 always. */
static const Algorithm *choose(const Convolution *u) {
    const Algorithm *best = NULL, *end = algorithms + sizeof algorithms / sizeof *algorithms;
    double least = INFINITY;
    for (const Algorithm *a = algorithms; a < end; a++) {
        if (!a->fits(u)) continue;
#ifdef ONLY_ALGORITHM /* as far as it can compute a convolution, for tests */
        if (strcmp(a->name, ONLY_ALGORITHM) == 0) return a;
#endif
        if (!pieces_of_all) return a;
        const double seconds = a->seconds(u);
        if (!best || seconds < least) best = a, least = seconds;
    }
    return best;
}

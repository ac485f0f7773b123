/* Convolutions that are products of matrices: of each image with a kernel of size 1, or, as in gradients of the weights of
 * such kernels, of images with kernels of the same size, summed over channels. */
#pragma once
#include "gemm.h"
#include "geometry.h"
#include "matrix.h"
#include "ort.h"
#include "product.h"
#include "resources.h"

static int same(const int64_t x[3], const int64_t y[3]) { return memcmp(x, y, 3 * sizeof *x) == 0; }

/* Return whether elements of an image are contiguous and no tap leaves it. */
static int is_flat(const Convolution *u) {
    static const int64_t none[3] = {0, 0, 0};
    return same(u->pads, none) && side_by_side(u->sizes, u->steps) && product_of(u->sizes) >= LANES;
}

static int is_product_of_images(const Convolution *u) {
    static const int64_t once[3] = {1, 1, 1};
    return is_flat(u) && same(u->taps, once) && same(u->place_moves, once) && same(u->sizes, u->places) &&
           side_by_side(u->places, u->y_steps);
}

static int is_product_of_channels(const Convolution *u) {
    static const int64_t once[3] = {1, 1, 1};
    return is_flat(u) && same(u->places, once) && same(u->tap_moves, once) && same(u->sizes, u->taps) &&
           side_by_side(u->taps, u->w_steps) && u->y_image == 1 && !u->bias && !u->relu;
}

static int is_product(const Convolution *u) { return is_product_of_images(u) || is_product_of_channels(u); }

/* Return one of the products, which follow each other. Operands are so many bfloat16 numbers, or float32. */
static gemm_product plan_product(const Convolution *u, int pieces) {
    gemm_product g = {.m = u->filters, .k = u->channels, .n = product_of(u->places), .batch = {u->images, u->groups}};
    g.a_strides = (gemm_strides){u->w_filter, u->w_channel, {0, u->w_batch}};
    g.b_strides = (gemm_strides){u->x_channel, 1, {u->x_image, u->channels * u->x_channel}};
    g.c = u->y, g.c_strides = (gemm_strides){u->y_filter, 1, {u->y_image, u->y_batch}};
    if (!is_product_of_images(u)) {
        g.n = u->images, g.k = u->channels ? product_of(u->taps) : 0, g.batch[0] = 1;
        g.a_strides.column = g.b_strides.row = 1, g.b_strides.column = u->x_image;
    }
    g.threads = thread_count, g.parallel_for = run_parallel, g.pieces = pieces;
    return g;
}

static void multiply_all(Context *context, const Convolution *u, int pieces, void *scratch) {
    const int by_images = is_product_of_images(u);
    gemm_product g = plan_product(u, pieces);
    Bias bias = {.bias = u->bias, .row = 1, .batch = u->filters, .to = &g, .relu = u->relu};
    if (by_images && (u->bias || u->relu)) g.epilogue = add_bias;
    g.user = &bias, g.pool = context, g.scratch = scratch;
    int64_t c = 0;
    do { /* once without channels: sums are zeros */
        g.a = u->w + c * u->w_channel, g.b = u->x + c * u->x_channel, g.accumulate = c > 0;
        gemm(&g);
    } while (!by_images && ++c < u->channels);
}

static size_t scratch_of_product(const Convolution *u, int pieces) {
    const gemm_product g = plan_product(u, pieces);
    return gemm_scratch(&g);
}

static size_t product_scratch(const Convolution *u) { return scratch_of_product(u, 0); }
static void product_run(Context *context, const Convolution *u, void *scratch) { multiply_all(context, u, 0, scratch); }
static size_t low_product_scratch(const Convolution *u) { return scratch_of_product(u, pieces_of_all); }
static void low_product_run(Context *context, const Convolution *u, void *scratch) { multiply_all(context, u, pieces_of_all, scratch); }

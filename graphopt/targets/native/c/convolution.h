/* Convolutions of any geometry, and their gradients, by one of the algorithms of choice.h. A convolution with a kernel of
 * size 1 is a product of matrices (pointwise.h). Others multiply elements of the input with rows of filters (direct.h, in
 * float32 or in pairs of bfloat16 numbers) or, if filters are few or groups are small, shifted rows with elements of filters
 * (grouped.h).
 *
 * Operands may be stored transposed. Kernels have up to three axes; the missing ones come first and have size 1.
 */
#pragma once
#include "calls.h"
#include "choice.h"
#include "geometry.h"
#include "ort.h"
#include "product.h"
#include "resources.h"

/* Make the last axis the first one if it has size 1 everywhere, because the last axis is copied in vectors. */
static void skip_last(Convolution *u) {
    int64_t *all[] = {u->sizes, u->taps, u->places, u->place_moves, u->tap_moves,
                      u->pads,  u->steps, u->w_steps, u->y_steps};
    if (u->sizes[2] != 1 || u->taps[2] != 1 || u->places[2] != 1 || u->pads[2] != 0) return;
    for (size_t i = 0; i < sizeof all / sizeof *all; i++) {
        const int64_t last = all[i][2];
        all[i][2] = all[i][1], all[i][1] = all[i][0], all[i][0] = last;
    }
}

/* If an axis has one tap or one place, skip its elements that are not read. */
static void skip_unread(Convolution *u, int axis) {
    const int64_t places = u->places[axis], taps = u->taps[axis];
    int64_t *move = taps == 1 ? &u->place_moves[axis] : &u->tap_moves[axis];
    const int64_t read = taps == 1 ? places : taps;
    if ((taps != 1 && places != 1) || u->pads[axis] != 0 || *move < 0 || (read - 1) * *move >= u->sizes[axis]) return;
    u->steps[axis] *= *move, u->sizes[axis] = read, *move = 1;
}

static OrtStatus *convolve(Context *context, Convolution *u) {
    skip_last(u), skip_last(u);
    for (int i = 0; i < 3; i++) skip_unread(u, i);
    if (u->groups * u->images * u->filters * product_of(u->places) == 0) return NULL;
    const Algorithm *algorithm = choose(u);
    void *memory = borrow(algorithm->scratch(u) + TO_ALIGN);
    if (!memory) return out_of_memory();
    algorithm->run(context, u, align64(memory));
    give_back(memory);
    return NULL;
}

/* Read an operand, and the size and the stride of each axis from where it is stored. */
static OrtStatus *read_operand(Context *context, size_t index, const float **data, int rank, const signed char stored[5],
                               int64_t sizes[5], int64_t strides[5]) {
    int64_t dims[5], steps[5];
    CHECK(input(context, index, data, dims, rank));
    strides_of(rank, dims, steps);
    for (int i = 0; i < 5; i++) {
        const int is_stored = stored[i] >= 0 && stored[i] < rank;
        sizes[i] = is_stored ? dims[stored[i]] : 1, strides[i] = is_stored ? steps[stored[i]] : 0;
    }
    return NULL;
}

/* Compute the output of the operator from its first two inputs, and add its third input, a bias. */
OrtStatus *convolution(Context *context, const ConvolutionForm *form) {
    int64_t stored_y[5], steps[5], x[5], w[5], y[5] = {1, 1, 1, 1, 1}, x_steps[5], w_steps[5], y_steps[5] = {0};
    const int each = form->each; /* an image of x with a filter of its own for each of its channels */
    Convolution u = {.relu = form->relu, .groups = form->groups};
    CHECK(read_operand(context, 0, &u.x, form->rank_x, form->x, x, x_steps));
    CHECK(read_operand(context, 1, &u.w, form->rank_w, form->w, w, w_steps));
    const int axes = form->axes, missing = 3 - axes;
    const int64_t first = form->transposed ? w[1] : w[0], second = form->transposed ? w[0] : w[1];
    const int64_t many = each ? x[1] : 1;
    u.images = x[0], u.channels = each ? 1 : x[1] / u.groups;
    u.filters = form->transposed ? first : first / u.groups;
    if (u.channels * u.groups * many != x[1] || second != (form->transposed || each ? x[1] : u.channels)) return unlike();
    if (!form->transposed && first % u.groups) return unlike();
    y[0] = x[0], y[1] = u.filters * u.groups * many;
    for (int i = 0; i < axes; i++) {
        const int64_t reach = (w[i + 2] - 1) * form->dilations[i] + 1, pads = form->begin[i] + form->end[i];
        y[i + 2] = form->transposed ? (x[i + 2] - 1) * form->strides[i] + form->more[i] + reach - pads
                                    : downwards(x[i + 2] + pads - reach, form->strides[i]) + 1;
        if (y[i + 2] < (each ? form->more[i] : 0)) return unlike();
        if (each) y[i + 2] = form->more[i]; /* what strides have left over is not read */
    }
    for (int j = 0; j < form->rank_y; j++) stored_y[j] = form->y[j] < 0 ? 1 : y[form->y[j]];
    const int64_t elements = strides_of(form->rank_y, stored_y, steps);
    if (elements != y[0] * y[1] * product_of(y + 2)) return unlike(); /* an axis that is not stored has another size than 1 */
    const int64_t of_each[] = {many, 1, u.filters, x[0] * product_of(y + 2)};
    CHECK(output(context, 0, &u.y, each ? of_each : stored_y, each ? 4 : (size_t)form->rank_y));
    for (int j = 0; j < form->rank_y; j++)
        if (form->y[j] >= 0) y_steps[form->y[j]] = steps[j];
    if (form->biased) {
        int64_t size;
        CHECK(input(context, 2, &u.bias, &size, 1));
        if (size != y[1]) return unlike();
    }
    u.x_image = x_steps[0], u.x_channel = x_steps[1], u.y_image = y_steps[0], u.y_filter = y_steps[1];
    u.y_batch = u.filters * u.y_filter;
    u.w_filter = w_steps[form->transposed ? 1 : 0], u.w_channel = w_steps[form->transposed ? 0 : 1];
    u.w_batch = form->transposed ? u.channels * u.w_channel : u.filters * u.w_filter;
    /* A transposed convolution is one convolution for each remainder of the places by the strides. */
    int64_t strides[3] = {1, 1, 1};
    for (int i = 0; form->transposed && i < axes; i++) strides[missing + i] = form->strides[i];
    int empty = 0; /* a part that no tap reaches */
    for (int i = 0; form->transposed && i < axes; i++) empty = empty || (w[i + 2] < form->strides[i] && !u.bias);
    if (empty && elements) memset(u.y, 0, (size_t)elements * sizeof(float));
    for (int64_t part = 0; part < product_of(strides) * many; part++) {
        Convolution v = u;
        if (each) v.x += part * x_steps[1], v.w += part * w_steps[1], v.y += part * u.filters * u.y_filter;
        int64_t rest = part;
        for (int i = 2; i >= 0; i--) {
            const int at = i - missing;
            v.sizes[i] = v.taps[i] = v.places[i] = v.place_moves[i] = v.tap_moves[i] = 1;
            if (at < 0) continue;
            v.sizes[i] = x[at + 2], v.steps[i] = x_steps[at + 2];
            if (form->transposed) {
                const int64_t stride = strides[i], remainder = rest % stride, pad = form->begin[at] - remainder;
                const int64_t from = -downwards(-pad, stride); /* the first place lies over this element */
                rest /= stride;
                v.taps[i] = remainder < w[at + 2] ? (w[at + 2] - remainder + stride - 1) / stride : 0;
                v.places[i] = -downwards(-(y[at + 2] + pad), stride) - from;
                v.pads[i] = -from, v.tap_moves[i] = -form->dilations[at];
                v.w += remainder * w_steps[at + 2], v.w_steps[i] = stride * w_steps[at + 2];
                v.y += (stride * from - pad) * y_steps[at + 2], v.y_steps[i] = stride * y_steps[at + 2];
            } else {
                v.taps[i] = w[at + 2], v.w_steps[i] = w_steps[at + 2];
                v.places[i] = y[at + 2], v.y_steps[i] = y_steps[at + 2];
                v.place_moves[i] = form->strides[at], v.tap_moves[i] = form->dilations[at], v.pads[i] = form->begin[at];
            }
        }
        if (!empty || product_of(v.taps)) CHECK(convolve(context, &v));
    }
    return NULL;
}

/* Convolutions whose groups have few channels or few filters are sums of shifted rows, not matrix products.
 *
 * A channel is copied with zeros around it, once for each remainder of its indices by the strides. Each tap then reads
 * one of these copies at a fixed distance from the place, so that all places of an image are one long row:
 *
 *     y[place] += w[tap] * copy[place + distance of the tap]
 *
 * If the kernel is larger than the result, as in gradients of weights, taps and places change roles: y[place] is the
 * product of the kernel with the copy, at the distance of the place.
 */
#pragma once
#include "geometry.h"
#include "matrix.h"
#include "ort.h"
#include "resources.h"

enum { TOGETHER = 4 }; /* vectors of a row, or products with a kernel, that are computed at once */

/* All tasks share this. Axes have positions in the long row, and shifts of it. */
typedef struct {
    const Convolution *u;
    int64_t positions[3], moves[3], shifts[3], shift_moves[3];
    int64_t first[3], extents[3]; /* of the copies: the least index by the stride, and the size */
    int64_t copies[3], copy, length; /* the number of copies, the elements of one, the elements of the long row */
    int64_t many, results, tasks, elements; /* shifts, the results of a filter, the scratch memory of a task */
    int by_kernel;
    float *scratch;
} Grouped;

static Grouped plan_grouped(const Convolution *u) {
    Grouped a = {.u = u, .by_kernel = product_of(u->taps) > product_of(u->places)};
    for (int i = 0; i < 3 && a.by_kernel; i++) a.by_kernel = u->tap_moves[i] > 0;
    a.copy = a.length = a.many = 1;
    for (int i = 0; i < 3; i++) {
        a.positions[i] = a.by_kernel ? u->taps[i] : u->places[i];
        a.shifts[i] = a.by_kernel ? u->places[i] : u->taps[i];
        a.moves[i] = a.by_kernel ? u->tap_moves[i] : u->place_moves[i];
        a.shift_moves[i] = a.by_kernel ? u->place_moves[i] : u->tap_moves[i];
        const int64_t end = (a.shifts[i] - 1) * a.shift_moves[i];
        a.first[i] = downwards(gemm_min(end, 0) - u->pads[i], a.moves[i]);
        const int64_t last = downwards((end > 0 ? end : 0) - u->pads[i], a.moves[i]);
        a.extents[i] = a.positions[i] + last - a.first[i];
        a.copies[i] = a.moves[i];
        a.copy *= a.extents[i], a.many *= a.shifts[i];
        a.length = (a.length - 1) * a.extents[i] + a.positions[i];
    }
    a.copy = upto(a.copy, LANES) + TOGETHER * LANES; /* vectors read on */
    a.length = upto(a.length, TOGETHER * LANES);
    const int64_t many = upto(a.many, TOGETHER), indices = many * (int64_t)(sizeof(int64_t) / sizeof(float));
    a.results = a.by_kernel ? many * LANES : a.length;
    a.elements = upto(indices + product_of(a.copies) * a.copy + u->filters * a.results + (a.by_kernel ? a.length : many), LANES);
    const double work = (double)(u->images * u->groups) * (double)(u->channels * u->filters * a.many) * (double)a.length;
    a.tasks = work > 1e5 ? gemm_min(thread_count, u->images * u->groups) : 1;
    return a;
}

/* Copy a channel, once for each remainder by the strides. */
static void make_copies(const Grouped *a, const float *x, float *to) {
    const Convolution *u = a->u;
    int64_t r[3], e[3];
    for (r[0] = 0; r[0] < a->copies[0]; r[0]++)
        for (r[1] = 0; r[1] < a->copies[1]; r[1]++)
            for (r[2] = 0; r[2] < a->copies[2]; r[2]++, to += a->copy) {
                float *row = to;
                const int64_t start = a->first[2] * a->moves[2] + r[2], move = a->moves[2];
                const int64_t low = gemm_min(start < 0 ? (-start + move - 1) / move : 0, a->extents[2]);
                int64_t high = gemm_min(start < u->sizes[2] ? (u->sizes[2] - start + move - 1) / move : 0, a->extents[2]);
                if (high < low) high = low;
                for (e[0] = 0; e[0] < a->extents[0]; e[0]++)
                    for (e[1] = 0; e[1] < a->extents[1]; e[1]++, row += a->extents[2]) {
                        const int64_t i = (a->first[0] + e[0]) * a->moves[0] + r[0], j = (a->first[1] + e[1]) * a->moves[1] + r[1];
                        if (i < 0 || i >= u->sizes[0] || j < 0 || j >= u->sizes[1]) {
                            memset(row, 0, (size_t)a->extents[2] * sizeof *row);
                            continue;
                        }
                        const float *from = x + i * u->steps[0] + j * u->steps[1] + start * u->steps[2];
                        const int64_t step = move * u->steps[2];
                        for (int64_t k = 0; k < low; k++) row[k] = 0;
                        if (step == 1)
                            for (int64_t k = low; k < high; k++) row[k] = from[k];
                        else
                            for (int64_t k = low; k < high; k++) row[k] = from[k * step];
                        for (int64_t k = high; k < a->extents[2]; k++) row[k] = 0;
                    }
                memset(row, 0, (size_t)(to + a->copy - row) * sizeof *row);
            }
}

/* Find where each shift begins in the copies. */
static void find_shifts(const Grouped *a, int64_t *shifts) {
    int64_t s[3];
    for (s[0] = 0; s[0] < a->shifts[0]; s[0]++)
        for (s[1] = 0; s[1] < a->shifts[1]; s[1]++)
            for (s[2] = 0; s[2] < a->shifts[2]; s[2]++) {
                int64_t copy = 0, at = 0;
                for (int i = 0; i < 3; i++) {
                    const int64_t index = s[i] * a->shift_moves[i] - a->u->pads[i], q = downwards(index, a->moves[i]);
                    copy = copy * a->copies[i] + index - q * a->moves[i];
                    at = at * a->extents[i] + q - a->first[i];
                }
                *shifts++ = copy * a->copy + at;
            }
}

/* Add w[t] * x[shifts[t]...] to y, for all t. */
GEMM_WIDE static void add_shifted(const Grouped *a, const float *x, const float *w, const int64_t *shifts, float *y) {
    for (int64_t p = 0; p < a->length; p += TOGETHER * LANES) {
        Lanes s0 = AT(y + p), s1 = AT(y + p + LANES), s2 = AT(y + p + 2 * LANES), s3 = AT(y + p + 3 * LANES);
        for (int64_t t = 0; t < a->many; t++) {
            const float *from = x + shifts[t] + p, weight = w[t];
            s0 += weight * AT(from), s1 += weight * AT(from + LANES);
            s2 += weight * AT(from + 2 * LANES), s3 += weight * AT(from + 3 * LANES);
        }
        AT(y + p) = s0, AT(y + p + LANES) = s1, AT(y + p + 2 * LANES) = s2, AT(y + p + 3 * LANES) = s3;
    }
}

/* Add w * x[shifts[t]...] to sums[t], vector by vector. */
GEMM_WIDE static void add_products(const Grouped *a, const float *x, const float *w, const int64_t *shifts, float *sums) {
    for (int64_t t = 0; t < a->many; t += TOGETHER, sums += TOGETHER * LANES) {
        const float *x0 = x + shifts[t], *x1 = x + shifts[t + 1], *x2 = x + shifts[t + 2], *x3 = x + shifts[t + 3];
        Lanes s0 = AT(sums), s1 = AT(sums + LANES), s2 = AT(sums + 2 * LANES), s3 = AT(sums + 3 * LANES);
        for (int64_t p = 0; p < a->length; p += LANES) {
            const Lanes weight = AT(w + p);
            s0 += weight * AT(x0 + p), s1 += weight * AT(x1 + p), s2 += weight * AT(x2 + p), s3 += weight * AT(x3 + p);
        }
        AT(sums) = s0, AT(sums + LANES) = s1, AT(sums + 2 * LANES) = s2, AT(sums + 3 * LANES) = s3;
    }
}

/* Write the taps of a kernel: contiguous, or where the copies have the elements that they are multiplied with. */
static void spread_kernel(const Grouped *a, const float *w, float *to) {
    const Convolution *u = a->u;
    for (int64_t i = 0; i < u->taps[0]; i++)
        for (int64_t j = 0; j < u->taps[1]; j++) {
            const float *from = w + i * u->w_steps[0] + j * u->w_steps[1];
            float *row = to + (a->by_kernel ? (i * a->extents[1] + j) * a->extents[2] : (i * u->taps[1] + j) * u->taps[2]);
            for (int64_t k = 0; k < u->taps[2]; k++) row[k] = from[k * u->w_steps[2]];
        }
}

/* Compute one group of one image. */
static void compute_group(const Grouped *a, int64_t image, int64_t group, float *scratch) {
    const Convolution *u = a->u;
    const int64_t many = upto(a->many, TOGETHER);
    int64_t *shifts = (int64_t *)scratch;
    float *copies = (float *)(shifts + many), *results = copies + product_of(a->copies) * a->copy;
    float *kernel = results + u->filters * a->results;
    const float *x = u->x + image * u->x_image + group * u->channels * u->x_channel, *w = u->w + group * u->w_batch;
    for (int64_t t = a->many; t < many; t++) shifts[t] = 0;
    find_shifts(a, shifts);
    memset(results, 0, (size_t)(u->filters * a->results) * sizeof *results);
    if (a->by_kernel) memset(kernel, 0, (size_t)a->length * sizeof *kernel);
    for (int64_t c = 0; c < u->channels; c++) {
        make_copies(a, x + c * u->x_channel, copies);
        for (int64_t f = 0; f < u->filters; f++) {
            spread_kernel(a, w + f * u->w_filter + c * u->w_channel, kernel);
            if (a->by_kernel) add_products(a, copies, kernel, shifts, results + f * a->results);
            else add_shifted(a, copies, kernel, shifts, results + f * a->results);
        }
    }
    const int64_t pitch = a->by_kernel ? u->places[2] : a->extents[2];
    const int64_t sheet = pitch * (a->by_kernel ? u->places[1] : a->extents[1]);
    for (int64_t f = 0; f < u->filters; f++) {
        float *y = u->y + image * u->y_image + group * u->y_batch + f * u->y_filter, *from = results + f * a->results;
        const float bias = u->bias ? u->bias[group * u->filters + f] : 0;
        for (int64_t t = 0; a->by_kernel && t < a->many; t++) {
            float *lanes = from + t * LANES;
            for (int half = LANES / 2; half; half /= 2)
                for (int l = 0; l < half; l++) lanes[l] += lanes[l + half];
            from[t] = lanes[0];
        }
        for (int64_t i = 0; i < u->places[0]; i++)
            for (int64_t j = 0; j < u->places[1]; j++)
                finish(y + i * u->y_steps[0] + j * u->y_steps[1], from + i * sheet + j * pitch, u->y_steps[2],
                       u->places[2], bias, u->relu);
    }
}

static void run_groups(void *user, size_t task) {
    const Grouped *a = user;
    const int64_t units = a->u->images * a->u->groups, end = gemm_begin(units, (int64_t)task + 1, a->tasks);
    for (int64_t unit = gemm_begin(units, (int64_t)task, a->tasks); unit < end; unit++)
        compute_group(a, unit / a->u->groups, unit % a->u->groups, a->scratch + (int64_t)task * a->elements);
}

static size_t grouped_scratch(const Convolution *u) {
    const Grouped a = plan_grouped(u);
    return (size_t)(a.tasks * a.elements) * sizeof(float);
}

static void grouped_run(Context *context, const Convolution *u, void *scratch) {
    Grouped a = plan_grouped(u);
    a.scratch = scratch;
    run_parallel(context, run_groups, (size_t)a.tasks, &a);
}

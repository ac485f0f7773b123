/* Convolutions whose groups are lanes, for many small groups and small images.
 *
 *     sums[place][groups] += copy[place + tap][groups] * w[tap][groups]
 *
 * The input, the filters and the result are transposed, which costs little as long as images are small. The copy of the
 * input has zeros around it, and a part for each remainder of its indices by the strides, so that the places of a line
 * lie side by side. A tile of sums, some places of some lines, stays in registers.
 */
#pragma once
#include "geometry.h"
#include "matrix.h"
#include "ort.h"
#include "resources.h"

enum {
    MOST_LINES = 5,
    MOST_OF_LINE = 8,
    MOST_SUMS = GEMM_BYTES == 64 ? 25 : 10, /* of a tile */
    SMALL_IMAGE = 1600, /* places or taps */
};

/* All tasks share this. */
typedef struct {
    const Convolution *u;
    int64_t first[3], extents[3], parts[3], steps[3]; /* of a copy: see grouped.h */
    int64_t copy, image, kernel, result;              /* elements of scratch memory */
    int64_t blocks, cuts, tasks;                      /* of groups, of images */
    int64_t *terms_at, *inputs_at;                    /* in a copy; -1 for an element that is not read */
    float *scratch;
} Depthwise;

#define LANE_OPERANDS \
    int64_t terms, const float *a, int64_t a_line, const int64_t *terms_at, const float *w, float *c, int64_t c_line, int accumulate

/* Add terms to the sums of `many` places of each of some lines. many and lines are constants. */
GEMM_INLINE void add_lanes(int many, int lines, LANE_OPERANDS) {
    Lanes sums[MOST_LINES][MOST_OF_LINE];
#pragma GCC unroll 5
    for (int l = 0; l < lines; l++)
#pragma GCC unroll 8
        for (int i = 0; i < many; i++)
            if (accumulate) sums[l][i] = AT(c + l * c_line + i * LANES);
            else sums[l][i] = (Lanes){0};
    for (int64_t t = 0; t < terms; t++, w += LANES) {
        const float *from = a + terms_at[t];
        const Lanes weight = AT(w);
#pragma GCC unroll 5
        for (int l = 0; l < lines; l++)
#pragma GCC unroll 8
            for (int i = 0; i < many; i++) sums[l][i] += weight * AT(from + l * a_line + i * LANES);
    }
#pragma GCC unroll 5
    for (int l = 0; l < lines; l++)
#pragma GCC unroll 8
        for (int i = 0; i < many; i++) AT(c + l * c_line + i * LANES) = sums[l][i];
}

typedef void (*LaneTile)(LANE_OPERANDS);
#define LANE_TILE(many, lines)                                                                    \
    GEMM_WIDE static void lanes_##many##_##lines(LANE_OPERANDS) {                                 \
        add_lanes(many, many *lines <= MOST_SUMS ? lines : 1, terms, a, a_line, terms_at, w, c, c_line, accumulate); \
    }
#define LANE_TILES(many) \
    LANE_TILE(many, 1) LANE_TILE(many, 2) LANE_TILE(many, 3) LANE_TILE(many, 4) LANE_TILE(many, 5)
#define LANE_POINTERS(many) {lanes_##many##_1, lanes_##many##_2, lanes_##many##_3, lanes_##many##_4, lanes_##many##_5},
#define UP_TO_8(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8)
UP_TO_8(LANE_TILES)
static const LaneTile lane_tiles[MOST_OF_LINE][MOST_LINES] = {UP_TO_8(LANE_POINTERS)};

/* Return whether groups are many and images are small. */
static int has_small_groups(const Convolution *u) {
    const int64_t taps = product_of(u->taps), places = product_of(u->places);
    return u->groups >= LANES / 2 && places > 0 && taps > 0 && gemm_min(u->channels, u->filters) == 1 &&
           (taps > places ? taps : places) <= SMALL_IMAGE && side_by_side(u->sizes, u->steps);
}

/* Return where an index of the input lies in a copy; -1 if it lies outside. */
static int64_t place_in_copy(const Depthwise *a, int axis, int64_t index) {
    const int64_t move = a->u->place_moves[axis], q = downwards(index, move), at = q - a->first[axis];
    return at < 0 || at >= a->extents[axis] ? -1 : (index - q * move) * a->parts[axis] + at * a->steps[axis];
}

/* Find where indices lie in a copy: for each axis, `many` of them from `start` on with a move. */
static void find_in_copy(const Depthwise *a, const int64_t many[3], const int64_t moves[3], const int64_t start[3],
                         int64_t *found) {
    for (int64_t i = 0; i < many[0]; i++)
        for (int64_t j = 0; j < many[1]; j++) {
            const int64_t x = place_in_copy(a, 0, start[0] + i * moves[0]), y = place_in_copy(a, 1, start[1] + j * moves[1]);
            for (int64_t k = 0; k < many[2]; k++) {
                const int64_t z = place_in_copy(a, 2, start[2] + k * moves[2]);
                *found++ = x < 0 || y < 0 || z < 0 ? -1 : (x + y + z) * LANES;
            }
        }
}

/* Transpose `size` elements of some groups, which are `stride` apart, to rows of lanes. */
static void to_lanes(const float *from, int64_t size, int64_t stride, int64_t groups, float *to) {
    gemm_pack(size, groups, LANES, from, 1, stride, (groups - 1) * stride + size, to);
}

/* Transpose a filter of some groups. */
static void filter_to_lanes(const Convolution *u, const float *w, int64_t groups, float *to) {
    const int64_t taps = product_of(u->taps);
    int64_t at[4] = {0};
    if (side_by_side(u->taps, u->w_steps)) to_lanes(w, taps, u->w_batch, groups, to);
    else
        for (int64_t t = 0; t < taps; t++, to += LANES, advance(u->taps, at)) {
            const float *from = w + at[1] * u->w_steps[0] + at[2] * u->w_steps[1] + at[3] * u->w_steps[2];
            for (int64_t g = 0; g < groups; g++) to[g] = from[g * u->w_batch];
        }
}

/* Write sums to the result, with bias and Relu. */
static void from_lanes(const Depthwise *a, float *c, const float *bias, int64_t groups, float *y) {
    const Convolution *u = a->u;
    const int joined = side_by_side(u->places, u->y_steps);
    const int64_t run = joined ? product_of(u->places) : u->places[2], lines = product_of(u->places) / run;
    float square[LANES * LANES];
    for (int64_t line = 0; line < lines; line++)
        for (int64_t p = 0; p < run; p += LANES) {
            const int64_t length = gemm_min(LANES, run - p), step = joined ? 1 : u->y_steps[2];
            float *to = y + p * step;
            if (!joined) to += line / u->places[1] * u->y_steps[0] + line % u->places[1] * u->y_steps[1];
            gemm_transpose(c + (line * run + p) * LANES, LANES, square, LANES);
            for (int64_t g = 0; g < groups; g++)
                finish(to + g * u->y_batch, square + g * LANES, step, length, bias ? bias[g * u->filters] : 0, u->relu);
        }
}

/* Compute the sums of all places, for one channel of an image and one filter. */
static void add_channel(const Depthwise *a, const float *copy, const float *w, float *c, int accumulate) {
    const Convolution *u = a->u;
    const int64_t tiles_of_line = gemm_parts(u->places[2], MOST_OF_LINE);
    for (int64_t i = 0; i < u->places[0]; i++)
        for (int64_t t = 0; t < tiles_of_line; t++) {
            const int64_t k = gemm_begin(u->places[2], t, tiles_of_line);
            const int64_t many = gemm_begin(u->places[2], t + 1, tiles_of_line) - k;
            const int64_t most = gemm_min(MOST_LINES, MOST_SUMS / many > 0 ? MOST_SUMS / many : 1);
            for (int64_t j = 0, lines; j < u->places[1]; j += lines) {
                lines = gemm_min(most, u->places[1] - j);
                lane_tiles[many - 1][lines - 1](
                    product_of(u->taps), copy + (i * a->steps[0] + j * a->steps[1] + k) * LANES, a->steps[1] * LANES,
                    a->terms_at, w, c + ((i * u->places[1] + j) * u->places[2] + k) * LANES, u->places[2] * LANES, accumulate);
            }
        }
}

/* Compute some groups of some images. */
static void convolve_lanes(const Depthwise *a, int64_t group, int64_t groups, int64_t image, int64_t end, float *scratch) {
    const Convolution *u = a->u;
    const int64_t size = product_of(u->sizes);
    float *copy = scratch, *flat = copy + a->copy, *w = flat + a->image, *c = w + u->filters * u->channels * a->kernel;
    for (int64_t f = 0; f < u->filters; f++)
        for (int64_t d = 0; d < u->channels; d++)
            filter_to_lanes(u, u->w + group * u->w_batch + f * u->w_filter + d * u->w_channel, groups,
                            w + (f * u->channels + d) * a->kernel);
    for (; image < end; image++) {
        for (int64_t d = 0; d < u->channels; d++) {
            const float *x = u->x + image * u->x_image + (group * u->channels + d) * u->x_channel;
            to_lanes(x, size, u->channels * u->x_channel, groups, flat);
            for (int64_t i = 0; i < size; i++)
                if (a->inputs_at[i] >= 0) AT(copy + a->inputs_at[i]) = AT(flat + i * LANES);
            for (int64_t f = 0; f < u->filters; f++)
                add_channel(a, copy, w + (f * u->channels + d) * a->kernel, c + f * a->result, d > 0);
        }
        for (int64_t f = 0; f < u->filters; f++)
            from_lanes(a, c + f * a->result, u->bias ? u->bias + group * u->filters + f : NULL, groups,
                       u->y + image * u->y_image + group * u->y_batch + f * u->y_filter);
    }
}

/* Return the elements of scratch memory that a task needs. */
static int64_t lane_elements(const Depthwise *a) {
    return a->copy + a->image + a->u->filters * (a->u->channels * a->kernel + a->result);
}

static void run_lanes(void *user, size_t task) {
    const Depthwise *a = user;
    const Convolution *u = a->u;
    const int64_t units = a->blocks * a->cuts, end = gemm_begin(units, (int64_t)task + 1, a->tasks);
    float *scratch = a->scratch + (int64_t)task * lane_elements(a);
    memset(scratch, 0, (size_t)a->copy * sizeof *scratch);
    for (int64_t unit = gemm_begin(units, (int64_t)task, a->tasks); unit < end; unit++) {
        const int64_t group = unit / a->cuts * LANES, cut = unit % a->cuts;
        convolve_lanes(a, group, gemm_min(LANES, u->groups - group), gemm_begin(u->images, cut, a->cuts),
                       gemm_begin(u->images, cut + 1, a->cuts), scratch);
    }
}

static Depthwise plan_depthwise(const Convolution *u) {
    Depthwise a = {.u = u, .blocks = gemm_parts(u->groups, LANES)};
    int64_t size = 1;
    for (int i = 2; i >= 0; i--) {
        const int64_t last = (u->taps[i] - 1) * u->tap_moves[i];
        a.first[i] = downwards(gemm_min(last, 0) - u->pads[i], u->place_moves[i]);
        a.extents[i] = u->places[i] + downwards((last > 0 ? last : 0) - u->pads[i], u->place_moves[i]) - a.first[i];
        a.steps[i] = size, size *= a.extents[i];
    }
    for (int i = 2; i >= 0; i--) a.parts[i] = size, size *= u->place_moves[i];
    const int64_t inputs = product_of(u->sizes), places = product_of(u->places), last = u->places[2];
    a.copy = size * LANES, a.image = upto(inputs, LANES) * LANES;
    a.kernel = upto(product_of(u->taps), LANES) * LANES;
    a.result = upto(places - last + upto(last, LANES), LANES) * LANES; /* squares of the last line are read whole */
    const int64_t threads = (double)(u->groups * u->images) * (double)(u->channels * u->filters * inputs) > 1e4 ? thread_count : 1;
    a.cuts = gemm_min(u->images, gemm_parts(threads, a.blocks));
    a.tasks = gemm_min(threads, a.blocks * a.cuts);
    return a;
}

static size_t depthwise_scratch(const Convolution *u) {
    const Depthwise a = plan_depthwise(u);
    return (size_t)(a.tasks * lane_elements(&a)) * sizeof(float) + (size_t)(product_of(u->sizes) + product_of(u->taps)) * sizeof(int64_t);
}

static void depthwise_run(Context *context, const Convolution *u, void *scratch) {
    static const int64_t once[3] = {1, 1, 1}, none[3] = {0, 0, 0};
    const int64_t start[3] = {-u->pads[0], -u->pads[1], -u->pads[2]};
    Depthwise a = plan_depthwise(u);
    a.scratch = scratch;
    a.terms_at = (int64_t *)(a.scratch + a.tasks * lane_elements(&a)), a.inputs_at = a.terms_at + product_of(u->taps);
    find_in_copy(&a, u->taps, u->tap_moves, start, a.terms_at);
    find_in_copy(&a, u->sizes, once, none, a.inputs_at);
    run_parallel(context, run_lanes, (size_t)a.tasks, &a);
}

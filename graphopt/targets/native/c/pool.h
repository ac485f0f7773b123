/* Pools whose windows tile the input, their gradients, and copies of each element to a window.
 *
 * A window is a row of taps along the last axis, or several such rows. Lanes are windows side by side.
 */
#pragma once
#include "matrix.h"
#include "ort.h"

#ifdef __AVX512F__
#include <immintrin.h>
#endif

enum { POOL_MAXIMUM, POOL_AVERAGE, POOL_REPEAT };
enum { POOL_GRAIN = 1 << 15 }; /* elements of a task */

typedef struct {
    int axes; /* after images and channels, up to three */
    int kernel[3];
    int kind;
} PoolForm;

/* The gradient of a maximum, for the first of the elements that are equal to it. */
typedef struct {
    int axes, kernel[3];
    int gated;         /* multiply with HardSigmoid of the maximum */
    float alpha, beta; /* of HardSigmoid */
} UnpoolForm;

/* Lines are those of the windows along the last axis. `large` has the elements of windows, `small` has one for each. */
typedef struct {
    int64_t planes, counts[3], sizes[3], kernel[3]; /* of windows, of `large`, of a window */
    int64_t lines, tasks;
    const float *large, *small, *given; /* `given` is the gradient of `small` */
    float *to;
    int kind;
    const UnpoolForm *unpool;
} Pool;

#define POOL_INLINE static inline __attribute__((always_inline))

POOL_INLINE Lanes pool_choose(Ints condition, Lanes x, Lanes y) {
    return (Lanes)((condition & (Ints)x) | (~condition & (Ints)y));
}

POOL_INLINE Lanes pool_all(float x) { return (Lanes){0} + x; }

/* Read tap t of so many windows of k taps. */
POOL_INLINE Lanes pool_read(const float *x, int64_t t, int64_t k, int64_t many) {
#ifdef __AVX512F__
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const uint32_t all = (uint32_t)((1ull << many * (k == 2 ? 2 : 1)) - 1);
    if (k == 1) return (Lanes)_mm512_maskz_loadu_ps((__mmask16)all, x);
    if (k == 2) {
        const __m512 low = _mm512_maskz_loadu_ps((__mmask16)all, x);
        const __m512 high = many > 8 ? _mm512_maskz_loadu_ps((__mmask16)(all >> 16), x + 16) : low;
        return (Lanes)_mm512_permutex2var_ps(low, _mm512_add_epi32(_mm512_slli_epi32(places, 1), _mm512_set1_epi32((int)t)), high);
    }
    return (Lanes)_mm512_mask_i32gather_ps(_mm512_setzero_ps(), (__mmask16)all,
                                           _mm512_mullo_epi32(places, _mm512_set1_epi32((int)k)), x + t, 4);
#else
    Lanes y = {0};
    for (int64_t i = 0; i < many; i++) y[i] = x[i * k + t];
    return y;
#endif
}

/* Write tap t of so many windows of k taps. `before` is what the tap before it got: 2 taps are written together. */
POOL_INLINE void pool_write(float *y, int64_t t, int64_t k, int64_t many, Lanes x, Lanes before) {
#ifdef __AVX512F__
    const __m512i places = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
    const __m512i low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    const uint32_t all = (uint32_t)((1ull << many * (k == 2 ? 2 : 1)) - 1);
    if (k == 1) _mm512_mask_storeu_ps(y, (__mmask16)all, (__m512)x);
    else if (k == 2 && t == 1) {
        const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
        _mm512_mask_storeu_ps(y, (__mmask16)all, _mm512_permutex2var_ps((__m512)before, low, (__m512)x));
        if (many > 8) _mm512_mask_storeu_ps(y + 16, (__mmask16)(all >> 16), _mm512_permutex2var_ps((__m512)before, high, (__m512)x));
    } else if (k != 2)
        _mm512_mask_i32scatter_ps(y + t, (__mmask16)all, _mm512_mullo_epi32(places, _mm512_set1_epi32((int)k)), (__m512)x, 4);
#else
    for (int64_t i = 0; i < many; i++) y[i * k + t] = x[i];
#endif
}

/* The taps of windows, in order: those of a row, of rows, and of planes of rows. */
#define POOL_TAPS(p, k, row, t)                                                                                  \
    for (int64_t plane_ = 0; plane_ < (p)->kernel[0]; plane_++)                                                  \
        for (int64_t row_ = 0, row = plane_ * (p)->sizes[1] * (p)->sizes[2]; row_ < (p)->kernel[1]; row_++, row += (p)->sizes[2]) \
            for (int64_t t = 0; t < (k); t++)

/* Compute so many elements of `small` from windows: their maximum, or NaN if one is NaN, or their average. */
POOL_INLINE void pool_reduce(const Pool *p, const float *x, float *y, int64_t k, int64_t many, int average) {
    Lanes sum = pool_all(average ? 0 : -INFINITY);
    POOL_TAPS(p, k, row, t) {
        const Lanes next = pool_read(x + row, t, k, many);
        sum = average ? sum + next : pool_choose((next > sum) | (next != next), next, sum);
    }
    if (average) sum /= pool_all((float)(p->kernel[0] * p->kernel[1] * k));
    pool_write(y, 0, 1, many, sum, sum);
}

POOL_INLINE void pool_repeat(const Pool *p, const float *x, float *y, int64_t k, int64_t many) {
    const Lanes each = pool_read(x, 0, 1, many);
    POOL_TAPS(p, k, row, t) pool_write(y + row, t, k, many, each, each);
}

/* Compute the gradient of so many windows: first * given * gate. If no element equals the maximum, all are first, as in the
 * graph: then they are NaN. */
POOL_INLINE void pool_first(const Pool *p, int64_t large, int64_t small, int64_t k, int64_t many) {
    const UnpoolForm *form = p->unpool;
    const Lanes none = {0}, one = pool_all(1);
    const Lanes most = pool_read(p->small + small, 0, 1, many);
    Lanes before = none, share = pool_read(p->given + small, 0, 1, many);
    Ints unlike = ~(Ints){0}, later = {0};
    POOL_TAPS(p, k, row, t) unlike &= pool_read(p->large + large + row, t, k, many) != most;
    if (form->gated) {
        const Lanes gate = form->alpha * most + form->beta;
        share *= pool_choose(gate < none, none, pool_choose(gate > one, one, gate));
    }
    POOL_TAPS(p, k, row, t) {
        const Ints equal = pool_read(p->large + large + row, t, k, many) == most;
        const Lanes x = pool_choose((equal & ~later) | unlike, one, none) * share;
        later |= equal;
        pool_write(p->to + large + row, t, k, many, x, before);
        before = x;
    }
}

POOL_INLINE void pool_block(const Pool *p, int64_t large, int64_t small, int64_t k, int64_t many) {
    if (p->unpool) pool_first(p, large, small, k, many);
    else if (p->kind == POOL_REPEAT) pool_repeat(p, p->small + small, p->to + large, k, many);
    else if (p->kind == POOL_AVERAGE) pool_reduce(p, p->large + large, p->to + small, k, many, 1);
    else pool_reduce(p, p->large + large, p->to + small, k, many, 0);
}

/* Compute some of the lines. */
POOL_INLINE void pool_lines(const Pool *p, int64_t first, int64_t end) {
    const int64_t k = p->kernel[2], width = p->counts[2];
    int64_t row = first % p->counts[1], plane = first / p->counts[1] % p->counts[0];
    int64_t image = first / p->counts[1] / p->counts[0];
    for (int64_t line = first; line < end; line++) {
        const int64_t start = (image * p->sizes[0] + plane * p->kernel[0]) * p->sizes[1] + row * p->kernel[1];
        const int64_t large = start * p->sizes[2], small = line * width;
        int64_t done = 0;
        for (; done + LANES <= width; done += LANES) pool_block(p, large + done * k, small + done, k, LANES);
        if (done < width) pool_block(p, large + done * k, small + done, k, width - done);
        if (++row == p->counts[1]) row = 0, plane++;
        if (plane == p->counts[0]) plane = 0, image++;
    }
}

/* Compute a part of the lines; the loops over the taps of common windows are unrolled. */
static void pool_task(void *user, size_t task) {
    Pool p = *(const Pool *)user;
    const int64_t first = p.lines * (int64_t)task / p.tasks, end = p.lines * (int64_t)(task + 1) / p.tasks;
    if (p.kernel[0] == 1 && p.kernel[1] == 2 && p.kernel[2] == 2) {
        p.kernel[0] = 1, p.kernel[1] = p.kernel[2] = 2;
        pool_lines(&p, first, end);
    } else pool_lines(&p, first, end);
}

/* Set the sizes of a pool, from the shape of the tensor that has the elements of windows. Missing axes come first. */
static void pool_sizes(Pool *p, int axes, const int *kernel, const int64_t *large) {
    p->planes = large[0] * large[1];
    for (int i = 0; i < 3; i++) {
        const int at = i - (3 - axes);
        p->kernel[i] = at < 0 ? 1 : kernel[at], p->sizes[i] = at < 0 ? 1 : large[at + 2];
        p->counts[i] = p->sizes[i] / p->kernel[i];
    }
    p->lines = p->planes * p->counts[0] * p->counts[1];
    const int64_t tasks = (p->planes * p->sizes[0] * p->sizes[1] * p->sizes[2] + POOL_GRAIN - 1) / POOL_GRAIN;
    p->tasks = p->counts[2] == 0 ? 0 : tasks < p->lines ? tasks : p->lines;
}

/* Compute a pool, or repeat each element along each axis as often as `kernel` says. */
static OrtStatus *pool(Context *context, const PoolForm *form) {
    Pool p = {.kind = form->kind};
    const int repeats = form->kind == POOL_REPEAT;
    int64_t x[5], y[5];
    CHECK(input(context, 0, repeats ? (void *)&p.small : (void *)&p.large, x, form->axes + 2));
    memcpy(y, x, sizeof y);
    for (int i = 0; i < form->axes; i++) {
        y[i + 2] = repeats ? x[i + 2] * form->kernel[i] : x[i + 2] / form->kernel[i];
        if (!repeats && x[i + 2] < form->kernel[i]) return unlike();
    }
    pool_sizes(&p, form->axes, form->kernel, repeats ? y : x);
    CHECK(output(context, 0, &p.to, y, form->axes + 2));
    return in_parallel(context, pool_task, p.tasks, &p);
}

/* Compute the gradient of a maximum, from the tensor, its maximum and the maximum's gradient. */
static OrtStatus *unpool(Context *context, const UnpoolForm *form) {
    Pool p = {.unpool = form};
    int64_t x[5], y[5], dy[5];
    CHECK(input(context, 0, &p.large, x, form->axes + 2));
    CHECK(input(context, 1, &p.small, y, form->axes + 2));
    CHECK(input(context, 2, &p.given, dy, form->axes + 2));
    for (int i = 0; i < form->axes + 2; i++)
        if (dy[i] != y[i] || x[i] != y[i] * (i < 2 ? 1 : form->kernel[i - 2])) return unlike();
    pool_sizes(&p, form->axes, form->kernel, x);
    CHECK(output(context, 0, &p.to, x, form->axes + 2));
    return in_parallel(context, pool_task, p.tasks, &p);
}

/* Functions of float32, without branches, so that compilers vectorize the loops that call them. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* They keep NaN, as the runtime's Max, Min and Clip do. */
#define MAXIMUM(a, b) ((b) > (a) || (b) != (b) ? (b) : (a))
#define MINIMUM(a, b) ((b) < (a) || (b) != (b) ? (b) : (a))
#define CLAMP(x, low, high) ((x) < (low) ? (low) : (x) > (high) ? (high) : (x))
#pragma omp declare reduction(maximum : float, double : omp_out = MAXIMUM(omp_out, omp_in)) \
    initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(minimum : float, double : omp_out = MINIMUM(omp_out, omp_in)) \
    initializer(omp_priv = INFINITY)

/* pow(x, 0.5): the root of -0 is 0, that of -infinity is infinity. */
#define ROOT(x, sqrt) ((x) == -INFINITY ? INFINITY : sqrt((x) + 0))

#define AT_LEAST_1(n) ((n) > 1 ? (n) : 1)

#define INLINE static inline __attribute__((always_inline, unused))

/* For loops that compute more than they load: GCC's own choice is 256 bits on processors with AVX-512. */
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target("prefer-vector-width=512")))
#else
#define WIDE
#endif

INLINE float as_float(int32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

INLINE int32_t as_bits(float x) {
    int32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}

/* 2^n, for -126 <= n <= 127; the upper bits of n do not matter. */
INLINE float power_of_two(int32_t n) { return as_float((int32_t)((uint32_t)(n + 127) << 23)); }

/* e^r = 1 + r + r^2 p(r), for |r| <= ln(2) / 2: p by a minimax fit. */
INLINE float exp_tail(float r) {
    float p = 1.979034132e-4f;
    p = fmaf(p, r, 1.394465915e-3f);
    p = fmaf(p, r, 8.333496749e-3f);
    p = fmaf(p, r, 4.166629538e-2f);
    p = fmaf(p, r, 1.666666567e-1f);
    return fmaf(p, r, 0.5f);
}

#define TO_INTEGER 12582912.0f /* 1.5 2^23: a sum with it has an integer in its last bits */

/* Cody and Waite's reduction: x = n ln(2) + r; return r, and n + TO_INTEGER. NaN stays. */
INLINE float reduced(float x, float *n) {
    *n = fmaf(x, 1.44269504088896341f, TO_INTEGER);
    float whole = *n - TO_INTEGER;
    float r = fmaf(whole, -0.693145751953125f, x);
    return fmaf(whole, -1.42860682030941723212e-6f, r);
}

/* e^x = 2^n e^r, where 2^n is two factors, so that subnormal numbers and those next to infinity come out. */
INLINE float exp_float(float x) {
    float bounded = 89.0f < x ? 89.0f : x; /* in this order, NaN stays */
    bounded = -104.0f > bounded ? -104.0f : bounded;
    float n, half = fmaf(bounded, 0.72134752044448170f, TO_INTEGER);
    float r = reduced(bounded, &n);
    float y = fmaf(r * r, exp_tail(r), r) + 1.0f;
    return y * power_of_two(as_bits(half)) * power_of_two(as_bits(n) - as_bits(half));
}

/* e^x for x <= 0, where subnormal numbers are 0 */
INLINE float exp_negative_float(float x) {
    float n, r = reduced(x, &n);
    float y = (fmaf(r * r, exp_tail(r), r) + 1.0f) * power_of_two(as_bits(n));
    return x < -87.336f ? 0.0f : y;
}

/* e^x - 1, for |x| <= 44 */
INLINE float expm1_bounded(float x) {
    float n, r = reduced(x, &n), scale = power_of_two(as_bits(n));
    float tail = fmaf(r * r, exp_tail(r), r);
    return fmaf(tail, scale, scale - 1.0f);
}

INLINE float expm1_float(float x) {
    float bounded = x < 44.0f ? x : 44.0f;
    bounded = bounded > -44.0f ? bounded : -44.0f;
    float y = expm1_bounded(bounded);
    y = x > 44.0f ? exp_float(x) : y;
    return x == 0.0f || x != x ? x : y;
}

/* Up to 0.625, x + x z p(z) with z = x^2, Cephes' fit; above, u / (u + 2) with u = e^(2x) - 1. */
INLINE float tanh_float(float x) {
    float magnitude = fabsf(x), z = x * x;
    float p = -5.70498872745e-3f;
    p = fmaf(p, z, 2.06390887954e-2f);
    p = fmaf(p, z, -5.37397155531e-2f);
    p = fmaf(p, z, 1.33314422036e-1f);
    p = fmaf(p, z, -3.33332819422e-1f);
    float small = fmaf(p * z, x, x);
    float bounded = magnitude < 10.0f ? magnitude : 10.0f;
    float u = expm1_bounded(2.0f * bounded);
    float large = copysignf(u / (u + 2.0f), x);
    return x != x ? x : magnitude < 0.625f ? small : large;
}

INLINE float sigmoid_float(float x) {
    float e = exp_negative_float(-fabsf(x));
    return (x >= 0.0f ? 1.0f : e) / (1.0f + e);
}

/* log(1 + f) for the fraction of x between sqrt(1/2) and sqrt(2), plus the exponent times ln(2). */
INLINE float log_float(float x) {
    int subnormal = x < 1.17549435e-38f;
    float scaled = subnormal ? x * 8388608.0f : x;
    int32_t bits = as_bits(scaled) - 0x3f3504f3; /* sqrt(1/2) */
    int32_t e = bits >> 23;
    float f = as_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    float n = (float)e - (subnormal ? 23.0f : 0.0f);
    float p = 7.0376836292e-2f;
    p = fmaf(p, f, -1.1514610310e-1f);
    p = fmaf(p, f, 1.1676998740e-1f);
    p = fmaf(p, f, -1.2420140846e-1f);
    p = fmaf(p, f, 1.4249322787e-1f);
    p = fmaf(p, f, -1.6668057665e-1f);
    p = fmaf(p, f, 2.0000714765e-1f);
    p = fmaf(p, f, -2.4999993993e-1f);
    p = fmaf(p, f, 3.3333331174e-1f);
    float square = f * f;
    float tail = fmaf(p * f, square, n * -2.12194440e-4f);
    float y = fmaf(n, 0.693359375f, f + fmaf(-0.5f, square, tail));
    y = x > 3.40282347e38f ? x : y; /* infinity */
    y = x == 0.0f ? -INFINITY : y;
    return x < 0.0f || x != x ? NAN : y;
}

/* Up to 0.92, x + x q(x^2); above, 1 - e^(a r(a)) with a = |x|: q and r by minimax fits. */
INLINE float erf_float(float x) {
    float magnitude = fabsf(x);
    float a = magnitude < 3.95f ? magnitude : 3.95f;
    float z = x * x;
    float q = 8.316775347e-5f;
    q = fmaf(q, z, -8.130013011e-4f);
    q = fmaf(q, z, 5.199906882e-3f);
    q = fmaf(q, z, -2.685894072e-2f);
    q = fmaf(q, z, 1.128368750e-1f);
    q = fmaf(q, z, -3.761263192e-1f);
    q = fmaf(q, z, 1.283791661e-1f);
    float r = -5.297069947e-6f;
    r = fmaf(r, a, 4.994125629e-5f);
    r = fmaf(r, a, 2.743147343e-5f);
    r = fmaf(r, a, -2.869111486e-3f);
    r = fmaf(r, a, 2.257560194e-2f);
    r = fmaf(r, a, -1.051694825e-1f);
    r = fmaf(r, a, -6.356731653e-1f);
    r = fmaf(r, a, -1.128541470e+0f);
    float large = copysignf(-expm1_bounded(r * a), x);
    float y = magnitude < 0.92f ? fmaf(q, x, x) : large;
    return x != x ? x : y;
}

/* log(1 + x) for 0 <= x <= 1: the logarithm of the rounded sum, and what rounding took. */
INLINE float log1p_unit(float x) {
    float sum = 1.0f + x;
    return log_float(sum) + (x - (sum - 1.0f)) / sum;
}

/* log(1 + e^x) */
INLINE float softplus_float(float x) {
    float y = (x > 0.0f ? x : 0.0f) + log1p_unit(exp_float(-fabsf(x)));
    return x != x ? x : y;
}

/* x tanh(log(1 + e^x)) = x n / (n + 2), where n = e^x (e^x + 2); in e^-x above 0. */
INLINE float mish_float(float x) {
    float e = exp_float(-fabsf(x));
    float above = 1.0f + 2.0f * e, below = e * (e + 2.0f);
    float y = x > 0.0f ? x * (above / (above + 2.0f * e * e)) : x * (below / (below + 2.0f));
    return x != x ? x : y;
}

INLINE float gelu_float(float x) { return 0.5f * x * (1.0f + erf_float(x * 0.70710678118654752f)); }

INLINE float gelu_tanh_float(float x) {
    return 0.5f * x * (1.0f + tanh_float(0.79788456080286536f * (x + 0.044715f * x * x * x)));
}

INLINE double sigmoid(double x) { return x >= 0 ? 1 / (1 + exp(-x)) : exp(x) / (1 + exp(x)); }

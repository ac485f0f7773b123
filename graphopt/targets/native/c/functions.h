/* These functions of float32 have no branches, so that compilers vectorize the loops that call them. Some compute in
 * double, with polynomials that are minimax fits to at most 2^-33 of the result, and round once. */
#pragma once
#include <float.h>
#include <math.h>
#include <stdint.h>
#include <string.h>

/* These keep NaN, as the runtime's Max, Min and Clip do. GCC does not vectorize a Relu's extremes with `||`. */
#define MAXIMUM(a, b) ((b) != (b) ? (b) : (b) > (a) ? (b) : (a))
#define MINIMUM(a, b) ((b) != (b) ? (b) : (b) < (a) ? (b) : (a))
#define CLAMP(x, low, high) ((x) < (low) ? (low) : (x) > (high) ? (high) : (x))
#pragma omp declare reduction(maximum : float, double : omp_out = MAXIMUM(omp_out, omp_in)) \
    initializer(omp_priv = -INFINITY)
#pragma omp declare reduction(minimum : float, double : omp_out = MINIMUM(omp_out, omp_in)) \
    initializer(omp_priv = INFINITY)

/* pow(x, 0.5): the root of -0 is 0, that of -infinity is infinity. */
#define ROOT(x, sqrt) ((x) == -INFINITY ? INFINITY : sqrt((x) + 0))

#define AT_LEAST_1(n) ((n) > 1 ? (n) : 1)

#define INLINE static inline __attribute__((always_inline, unused))

/* Mark loops that compute more than they load: GCC's own choice is 256 bits on processors with AVX-512. */
#if defined(__AVX512F__) && defined(__GNUC__) && !defined(__clang__)
#define WIDE __attribute__((target("prefer-vector-width=512")))
#else
#define WIDE
#endif

/* Evaluate a polynomial of x by Horner's rule, with the coefficient of the highest power first. */
#define HORNER(name, real, fma)                                                                \
    INLINE real name(real x, int count, const real *factors) {                                 \
        real y = factors[0];                                                                   \
        _Pragma("GCC unroll 16") for (int i = 1; i < count; i++) y = fma(y, x, factors[i]);     \
        return y;                                                                              \
    }
HORNER(horner_float, float, fmaf)
HORNER(horner_double, double, fma)
#define POLYNOMIAL(real, x, ...) horner_##real(x, sizeof((real[]){__VA_ARGS__}) / sizeof(real), (real[]){__VA_ARGS__})

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

/* Return 2^n, for -126 <= n <= 127. The upper bits of n do not matter. */
INLINE float power_of_two(int32_t n) { return as_float((int32_t)((uint32_t)(n + 127) << 23)); }

/* Return p(r) where e^r = 1 + r + r^2 p(r), for |r| <= ln(2) / 2. p is a minimax fit. */
INLINE float exp_tail(float r) {
    return POLYNOMIAL(float, r, 1.979034132e-4f, 1.394465915e-3f, 8.333496749e-3f, 4.166629538e-2f,
        1.666666567e-1f, 0.5f);
}

#define TO_INTEGER 12582912.0f /* 1.5 2^23: a sum with it has an integer in its last bits */

/* Cody and Waite's reduction: x = n ln(2) + r; return r, and n + TO_INTEGER. NaN stays. */
INLINE float reduced(float x, float *n) {
    *n = fmaf(x, 1.44269504088896341f, TO_INTEGER);
    float whole = *n - TO_INTEGER;
    float r = fmaf(whole, -0.693145751953125f, x);
    return fmaf(whole, -1.42860682030941723212e-6f, r);
}

/* Return e^x = 2^n e^r. 2^n is two factors, so that subnormal numbers and those next to infinity are right. */
INLINE float exp_float(float x) {
    float bounded = 89.0f < x ? 89.0f : x; /* in this order, NaN stays */
    bounded = -104.0f > bounded ? -104.0f : bounded;
    float n, half = fmaf(bounded, 0.72134752044448170f, TO_INTEGER);
    float r = reduced(bounded, &n);
    float y = fmaf(r * r, exp_tail(r), r) + 1.0f;
    return y * power_of_two(as_bits(half)) * power_of_two(as_bits(n) - as_bits(half));
}

/* Return e^x for x <= 0. Subnormal results are 0. */
INLINE float exp_negative_float(float x) {
    float n, r = reduced(x, &n);
    float y = (fmaf(r * r, exp_tail(r), r) + 1.0f) * power_of_two(as_bits(n));
    return x < -87.336f ? 0.0f : y;
}

/* Return e^x - 1, for |x| <= 44. */
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

/* Return x + x z p(z) with z = x^2 up to 0.625, by Cephes' fit, and u / (u + 2) with u = e^(2x) - 1 above. */
INLINE float tanh_float(float x) {
    float magnitude = fabsf(x), z = x * x;
    float p = POLYNOMIAL(float, z, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
        -3.33332819422e-1f);
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

/* Return log(1 + f), where 1 + f is the fraction of x between sqrt(1/2) and sqrt(2), plus the exponent times ln(2). */
INLINE float log_float(float x) {
    int subnormal = x < 1.17549435e-38f;
    float scaled = subnormal ? x * 8388608.0f : x;
    int32_t bits = as_bits(scaled) - 0x3f3504f3; /* sqrt(1/2) */
    int32_t e = bits >> 23;
    float f = as_float((bits & 0x007fffff) + 0x3f3504f3) - 1.0f;
    float n = (float)e - (subnormal ? 23.0f : 0.0f);
    float p = POLYNOMIAL(float, f, 7.0376836292e-2f, -1.1514610310e-1f, 1.1676998740e-1f, -1.2420140846e-1f,
        1.4249322787e-1f, -1.6668057665e-1f, 2.0000714765e-1f, -2.4999993993e-1f, 3.3333331174e-1f);
    float square = f * f;
    float tail = fmaf(p * f, square, n * -2.12194440e-4f);
    float y = fmaf(n, 0.693359375f, f + fmaf(-0.5f, square, tail));
    y = x > 3.40282347e38f ? x : y; /* infinity */
    y = x == 0.0f ? -INFINITY : y;
    return x < 0.0f || x != x ? NAN : y;
}

/* Return x + x q(x^2) up to 0.92, and 1 - e^(a r(a)) with a = |x| above. q and r are minimax fits. */
INLINE float erf_float(float x) {
    float magnitude = fabsf(x);
    float a = magnitude < 3.95f ? magnitude : 3.95f;
    float z = x * x;
    float q = POLYNOMIAL(float, z, 8.316775347e-5f, -8.130013011e-4f, 5.199906882e-3f, -2.685894072e-2f,
        1.128368750e-1f, -3.761263192e-1f, 1.283791661e-1f);
    float r = POLYNOMIAL(float, a, -5.297069947e-6f, 4.994125629e-5f, 2.743147343e-5f, -2.869111486e-3f,
        2.257560194e-2f, -1.051694825e-1f, -6.356731653e-1f, -1.128541470e+0f);
    float large = copysignf(-expm1_bounded(r * a), x);
    float y = magnitude < 0.92f ? fmaf(q, x, x) : large;
    return x != x ? x : y;
}

/* Return log(1 + x) for 0 <= x <= 1: the logarithm of the rounded sum, corrected by the error of rounding. */
INLINE float log1p_unit(float x) {
    float sum = 1.0f + x;
    return log_float(sum) + (x - (sum - 1.0f)) / sum;
}

/* Return log(1 + e^x). */
INLINE float softplus_float(float x) {
    float y = (x > 0.0f ? x : 0.0f) + log1p_unit(exp_float(-fabsf(x)));
    return x != x ? x : y;
}

/* Return x tanh(log(1 + e^x)) = x n / (n + 2), where n = e^x (e^x + 2), written in e^-x above 0. */
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

INLINE double swish(double x, double alpha) { return x * sigmoid(alpha * x); }

/* --- Functions that are computed in double --- */

INLINE double as_double(int64_t bits) {
    double x;
    memcpy(&x, &bits, 8);
    return x;
}

INLINE int64_t as_bits_double(double x) {
    int64_t bits;
    memcpy(&bits, &x, 8);
    return bits;
}

#define TO_INTEGER_DOUBLE 6755399441055744.0 /* 1.5 2^52 */

/* Return 2^x, for -1022 <= x <= 1023. */
INLINE double exp2_double(double x) {
    double n = x + TO_INTEGER_DOUBLE;
    double r = x - (n - TO_INTEGER_DOUBLE);
    double p = POLYNOMIAL(double, r, 1.5303700711365694e-5, 1.5469729214118297e-4, 1.3333478473685415e-3,
        9.6180256133180342e-3, 5.5504109063258666e-2, 2.4022651213498093e-1, 6.9314718055683241e-1,
        9.9999999995956175e-1);
    return p * as_double((int64_t)((uint64_t)(as_bits_double(n) + 1023) << 52));
}

#define PER_LOG_2 1.4426950408889634

/* Return log(x) for normal x > 0. The logarithm of 0 is -infinity; infinity and NaN stay. */
INLINE double log_double(double x) {
    int64_t bits = as_bits_double(x) + 0x3ff0000000000000 - 0x3fe6a09e667f3bcd; /* 1 and sqrt(1/2) */
    double n = as_double((int64_t)((uint64_t)bits >> 52) | 0x4330000000000000) - 4503599627371519.0; /* 2^52 + 1023 */
    double f = as_double((bits & 0x000fffffffffffff) + 0x3fe6a09e667f3bcd) - 1;
    double p = POLYNOMIAL(double, f, -4.7177590533593856e-2, 9.0897545094535187e-2, -9.3428814519668432e-2,
        9.0545055509250049e-2, -9.8789698109920537e-2, 1.1102988279786334e-1, -1.2506640703431108e-1,
        1.4286366102434627e-1, -1.6666490142581625e-1, 1.999998295912731e-1, -2.5000002048164391e-1,
        3.3333333479574099e-1, -4.9999999992971808e-1, 9.9999999999808685e-1);
    double y = fma(n, 0.69314718055994531, p * f);
    y = x <= DBL_MAX ? y : x;
    return x == 0 ? -INFINITY : y;
}

INLINE float pow_float(float x, double y) {
    double a = fabsf(x), t = y * log_double(a) * PER_LOG_2;
    t = t > 300 ? 300 : t;
    t = t < -300 ? -300 : t;
    double power = exp2_double(t), half = 0.5 * y;
    int is_whole = rint(y) == y, is_odd = is_whole & (rint(half) != half);
    power = is_odd ? copysign(power, x) : power;
    power = (x < 0) & (a <= DBL_MAX) & !is_whole ? NAN : power;
    return (x == 1) | (y == 0) | ((a == 1) & (fabs(y) == INFINITY)) ? 1 : power;
}

INLINE float swish_float(float x, float alpha) {
    double t = (double)x * -alpha * PER_LOG_2;
    double power = exp2_double(t < -1000 ? -1000 : t > 1000 ? 1000 : t);
    return x * (1 / (1 + (t > 1000 ? INFINITY : power)));
}

/* These sums of numbers of 28, 28 and 53 bits are 2 / pi. The i-th sum lacks the bits that make, with
 * x >= 2^(16 i + 25), multiples of 4. */
static const double TURNS[3][7] __attribute__((unused)) = {
    {0x1.45f306c000000p-1, 0x1.06dc9c8000000p-17, 0x1.3910548000000p-34, 0x1.529fc20000000p-52,
     0x1.f84eafa000000p-65, 0x1.5f47d4c000000p-82, 0x1.ea69bb8000000p-97},
    {0x1.c9c882a000000p-29, 0x1.054a7f0000000p-46, 0x1.3f84eae000000p-61, 0x1.d5f47d4000000p-78,
     0x1.f534dd0000000p-96, 0x1.377036c000000p-110, 0x1.b6c52a0000000p-129},
    {0x1.4fe13abe8fa9ap-59, 0x1.3abe8fa9a6ee0p-75, 0x1.a3ea69bb81b6cp-89, 0x1.a6ee06db14acdp-107,
     0x1.81b6c52b32788p-121, 0x1.8a5664f10e410p-138, 0x1.3278872083fcap-153},
};

/* Payne and Hanek's reduction is x = (n + r) pi / 2, for x >= 0. Return r, |r| <= 1/2, and n modulo 4. The products with
 * the numbers of 28 bits are exact. */
INLINE double turned(float x, int64_t *n) {
    int32_t i = (as_bits(x) >> 23) - 152;
    i = (i < 0 ? 0 : i) >> 4;
    double first = x * TURNS[0][i], whole = rint(first);
    double second = (first - whole) + x * TURNS[1][i], more = rint(second);
    *n = as_bits_double(whole + more + TO_INTEGER_DOUBLE);
    return (second - more) + x * TURNS[2][i];
}

/* Return sin(r pi / 2). */
INLINE double sin_turned(double r) {
    double z = r * r;
    return r * POLYNOMIAL(double, z, 1.5820630355647733e-4, -4.6812662567262455e-3, 7.969258272563062e-2,
        -6.4596409614679535e-1, 1.5707963267880999);
}

/* Return cos(r pi / 2). */
INLINE double cos_turned(double r) {
    double z = r * r;
    return POLYNOMIAL(double, z, -2.4850963357813637e-5, 9.1916173695395725e-4, -2.0863468002244644e-2,
        2.5366950715370432e-1, -1.2337005501201592, 9.9999999999994441e-1);
}

/* Return x, or -x if the sign bit of `bits` is set. */
INLINE float signed_as(float x, int32_t bits) { return as_float(as_bits(x) ^ (bits & INT32_MIN)); }

INLINE float sin_float(float x) {
    int64_t n;
    double r = turned(fabsf(x), &n);
    float y = n & 1 ? cos_turned(r) : sin_turned(r);
    return signed_as(y, (int32_t)((uint32_t)n << 30) ^ as_bits(x));
}

INLINE float cos_float(float x) {
    int64_t n;
    double r = turned(fabsf(x), &n);
    float y = n & 1 ? sin_turned(r) : cos_turned(r);
    return signed_as(y, (int32_t)((uint32_t)(n + 1) << 30));
}

INLINE float tan_float(float x) {
    int64_t n;
    double r = turned(fabsf(x), &n), s = sin_turned(r), c = cos_turned(r);
    float y = (n & 1 ? -c : s) / (n & 1 ? s : c);
    return signed_as(y, as_bits(x));
}

/* Return asin(x), for 0 <= x <= 1/2 and z = x^2. */
INLINE double asin_half(double x, double z) {
    double p = POLYNOMIAL(double, z, 3.4748424808083896e-2, 7.4010072390753794e-3, 2.4650862660604088e-2,
        3.0102506899661488e-2, 4.4661139308668963e-2, 7.4999419087547185e-2, 1.6666667364186447e-1,
        9.9999999998635368e-1);
    return p * x;
}

#define PI 3.14159265358979324

/* From 1/2 on, asin(x) is pi / 2 - 2 asin(sqrt((1 - x) / 2)). */
INLINE float asin_float(float x) {
    double a = fabsf(x), z = a > 0.5 ? 0.5 * (1 - a) : a * a;
    double y = asin_half(a > 0.5 ? sqrt(z) : a, z);
    return copysign(a > 0.5 ? PI / 2 - 2 * y : y, x);
}

INLINE float acos_float(float x) {
    double a = fabsf(x), z = a > 0.5 ? 0.5 * (1 - a) : a * a;
    double y = asin_half(a > 0.5 ? sqrt(z) : a, z);
    double below = x > 0 ? PI / 2 - y : PI / 2 + y, above = x > 0 ? 2 * y : PI - 2 * y;
    return a > 0.5 ? above : below;
}

INLINE float atan_float(float x) {
    double a = fabsf(x), r = a > 1 ? 1 / a : a, z = r * r;
    double p = POLYNOMIAL(double, z, -6.6339545711047872e-4, 4.7324841934219207e-3, -1.5828322749149416e-2,
        3.3826218952786872e-2, -5.3956680571371718e-2, 7.2282783453772522e-2, -8.9741719583638811e-2,
        1.1091922963683302e-1, -1.4283813255743194e-1, 1.9999901102171554e-1, -3.3333331290889988e-1,
        9.9999999992930368e-1);
    return copysign(a > 1 ? PI / 2 - p * r : p * r, x);
}

INLINE float sinh_float(float x) {
    double a = fabsf(x), z = a * a, p = POLYNOMIAL(double, z, 2.7714303304728886e-6, 1.9840926153673171e-4,
        8.3333336403113427e-3, 1.6666666665707199e-1, 1.000000000000048);
    double power = exp2_double((a > 200 ? 200 : a) * PER_LOG_2);
    return copysign(a < 0.5 ? p * a : 0.5 * (power - 1 / power), x);
}

INLINE float cosh_float(float x) {
    double a = fabsf(x), power = exp2_double((a > 200 ? 200 : a) * PER_LOG_2);
    return 0.5 * (power + 1 / power);
}

INLINE float asinh_float(float x) {
    double a = fabsf(x), z = a * a;
    double y = log_double(a + sqrt(z + 1));
    return copysign(a < 0x1p-12 ? a - a * z * (1.0 / 6) : y, x);
}

INLINE float acosh_float(float x) {
    double a = x, y = log_double(a + sqrt(a * a - 1));
    return x < 1 ? NAN : y;
}

INLINE float atanh_float(float x) {
    double a = fabsf(x);
    double y = a < 0x1p-12 ? a + a * a * a * (1.0 / 3) : 0.5 * log_double((1 + a) / (1 - a));
    return a > 1 ? NAN : copysign(y, x);
}

/* Return the remainder of x / (y 2^k), where the quotient is below 2^29. */
INLINE double remainder_of(double x, double y, double inverse, double scale) {
    double divisor = y * scale;
    double r = fma(-trunc(x * (inverse * (1 / scale))), divisor, x);
    r = r < 0 ? r + divisor : r;
    return r >= divisor ? r - divisor : r;
}

/* Return C's fmod, with 28 bits of the quotient at a time. The quotient has up to 277. */
INLINE float fmod_float(float x, float y) {
    double divisor = fabsf(y), inverse = 1 / divisor, r = fabsf(x);
#pragma GCC unroll 10
    for (int bits = 252; bits >= 0; bits -= 28) r = remainder_of(r, divisor, inverse, as_double((int64_t)(bits + 1023) << 52));
    r = (divisor == INFINITY) & (fabsf(x) <= FLT_MAX) ? fabsf(x) : r;
    return copysign(r, x);
}

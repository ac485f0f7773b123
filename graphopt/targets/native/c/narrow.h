/* Numbers of the type bfloat16: the upper halves of float32 numbers. */
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

typedef uint16_t bfloat16;

static inline float from_bfloat16(bfloat16 x) {
    const uint32_t bits = (uint32_t)x << 16;
    float y;
    memcpy(&y, &bits, 4);
    return y;
}

/* Return a number of the type as its upper half. */
static inline bfloat16 to_bfloat16(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return (bfloat16)(bits >> 16);
}

/* Round to the nearest number of the type, ties to even; NaN stays NaN. */
static inline float rounded_to_bfloat16(float x) {
    uint32_t bits;
    float y;
    memcpy(&bits, &x, 4);
    bits = (bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000;
    memcpy(&y, &bits, 4);
    return x != x ? NAN : y;
}

/* Vectors of floats that are as wide as the processor's registers. */
#pragma once
#include "product.h"

enum { LANES = GEMM_BYTES / (int)sizeof(float) };

typedef float Lanes __attribute__((vector_size(GEMM_BYTES)));
typedef int32_t Ints __attribute__((vector_size(GEMM_BYTES)));
typedef float FreeLanes __attribute__((vector_size(GEMM_BYTES), aligned(4), may_alias));

/* The vector at an address of any alignment. */
#define AT(pointer) (*(FreeLanes *)(pointer))

/* Round up to a multiple. */
static int64_t upto(int64_t x, int64_t multiple) { return (x + multiple - 1) / multiple * multiple; }

/* Operands of bfloat16 numbers in lines, tiles and panels, and the jobs that pack them; see bfloat16.h. */
#pragma once
#include "matrix.h"
#include "narrow.h"

#if defined(ONLY_FLOAT32) /* no kernel of a library multiplies bfloat16 numbers */
#elif defined(__AVX512BF16__) && defined(__AVX512BW__) && defined(__AVX512DQ__)
#include <immintrin.h>
typedef __m512i Line;
#define TILES_OF_PROCESSOR "avx512bf16.h"
#elif defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef struct {
    char bytes[64];
} __attribute__((aligned(64))) Line;
#define TILES_OF_PROCESSOR "neon_bf16.h"
#endif

enum {
    TILE_LINES = 16,
    BLOCK_TERMS = 32,
    BLOCK_LINES = 32, /* rows of A or columns of B */
};

#ifdef TILES_OF_PROCESSOR
enum { HAS_BFLOAT16 = 1 };

static inline int64_t size_of(int is_narrow) { return is_narrow ? sizeof(bfloat16) : sizeof(float); }

/* A panel of an operand to pack, a tile at a time. With AMX and on ARM, the work for it grows by 2 with each block that
 * is multiplied, and a tile takes `price`; with AVX-512 alone, it is packed as a whole, and work and price are not read. */
typedef struct PackJob {
    const char *from;
    int is_narrow; /* an array of bfloat16, not of float */
    int64_t line, term, lines, terms, ahead; /* strides, numbers, and where the panel after this one lies */
    int pieces, is_b;
    Line *to;
    int64_t price, work, done, tiles;
    void (*pack)(const struct PackJob *, const char *from, int64_t lines, int64_t terms, Line *to); /* a tile */
} PackJob;

/* Return a number of an operand, from where a tile begins. */
static inline float number_of(const PackJob *x, const char *from, int64_t line, int64_t term) {
    const char *at = from + (line * x->line + term * x->term) * size_of(x->is_narrow);
    return x->is_narrow ? from_bfloat16(*(const bfloat16 *)at) : *(const float *)at;
}

/* Pack the next tile. */
static void pack_next(PackJob *x) {
    const int64_t block = x->done / 2, half = x->done % 2, terms = x->terms - block * BLOCK_TERMS;
    const int64_t lines = gemm_min(x->lines - half * TILE_LINES, TILE_LINES);
    const char *from = x->from + (half * TILE_LINES * x->line + block * BLOCK_TERMS * x->term) * size_of(x->is_narrow);
    Line *to = x->to + (block * x->pieces * 2 + half) * TILE_LINES;
    x->done++;
    if (lines <= 0) return; /* nothing reads this tile */
    x->pack(x, from, lines, terms, to);
}

static void pack_rest(PackJob *x) {
    while (x->done < x->tiles) pack_next(x);
}

GEMM_INLINE void work_on(PackJob *const *jobs) {
    for (; *jobs; jobs++)
        for ((*jobs)->work += 2; (*jobs)->work >= (*jobs)->price && (*jobs)->done < (*jobs)->tiles; (*jobs)->work -= (*jobs)->price)
            pack_next(*jobs);
}

/* Blocks of a panel of A and of B to multiply. C has one tile or two side by side, one above the other, or both. */
#define TILE_OPERANDS_OF_C                                                                                           \
    int64_t blocks, const char *a, const char *b, float *c, int64_t c_row, int accumulate, PackJob *const *jobs
#else
enum { HAS_BFLOAT16 = 0 };
#endif

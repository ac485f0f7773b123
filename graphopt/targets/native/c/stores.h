/* Move rows between memory and caches: fetch what a loop reads and writes before it does, and store results that nothing
 * reads soon past the caches, where the processor can: their old lines are not read then. */
#pragma once
#include <stdint.h>
#include <string.h>

enum {
    FAR_BLOCK = 512,   /* numbers that are stored at once */
    LEAST_FAR = 16384, /* numbers of a result */
};
#ifndef FETCHED /* tests have smaller ones */
#define FETCHED 256             /* numbers that are fetched at once */
#define LEAST_FETCHED (1 << 17) /* numbers of what a loop computes: with fewer, its operands are in a near cache */
#endif

#if defined(__AVX512F__)
#define FAR_BYTES 64
#elif defined(__AVX__)
#define FAR_BYTES 32
#elif defined(__SSE2__)
#define FAR_BYTES 16
#endif

#ifdef FAR_BYTES
typedef float FarLanes __attribute__((vector_size(FAR_BYTES)));
#if defined(__clang__)
#define STORE_FAR(to, x) __builtin_nontemporal_store(x, (FarLanes *)(to))
#elif FAR_BYTES == 64
#define STORE_FAR(to, x) __builtin_ia32_movntps512(to, x)
#elif FAR_BYTES == 32
#define STORE_FAR(to, x) __builtin_ia32_movntps256(to, x)
#else
#define STORE_FAR(to, x) __builtin_ia32_movntps(to, x)
#endif
#endif

/* Fetch the lines of the block after the one at hand, of numbers with so many bytes each. The processor's own fetching
 * ends with each page. */
static inline void fetch_next(const void *numbers, size_t bytes) {
    for (size_t i = 0; i < FETCHED * bytes; i += 64) __builtin_prefetch((const char *)numbers + FETCHED * bytes + i);
}

/* Store numbers; is_far says that the cache has no line of what they replace. */
static inline void store_far(float *to, const float *from, int64_t count, int is_far) {
    int64_t i = 0;
#ifdef FAR_BYTES
    const int64_t lanes = FAR_BYTES / (int64_t)sizeof(float);
    for (; is_far && i < count && (uintptr_t)(to + i) % FAR_BYTES; i++) to[i] = from[i];
    for (FarLanes x; is_far && i + lanes <= count; i += lanes) {
        memcpy(&x, from + i, sizeof x);
        STORE_FAR(to + i, x);
    }
#endif
    memcpy(to + i, from + i, (size_t)(count - i) * sizeof *to);
}

/* Let other threads see what was stored. */
static inline void end_far_stores(void) {
#ifdef FAR_BYTES
    __builtin_ia32_sfence();
#endif
}

/* Tiles of bfloat16 numbers on ARM's processors with BFMMLA, which multiplies 2 x 4 by 4 x 2 numbers; see bfloat16.h.
 *
 * A tile is eight groups of four terms; a group is eight pairs of lines, of 16 bytes each. */
#pragma once
#include "lines.h"
#include "matrix.h"
#include <arm_neon.h>

enum { GROUP_BYTES = TILE_LINES * 8, TILE_BYTES = TILE_LINES * BLOCK_TERMS * 2 };

/* Split four numbers. Ties are rounded away from zero. */
static inline void split_four(float32x4_t x, uint16_t *high, uint16_t *low) {
    const uint32x4_t half = vdupq_n_u32(0x8000), upper = vdupq_n_u32(0xffff0000);
    const uint32x4_t rounded = vaddq_u32(vreinterpretq_u32_f32(x), half);
    const float32x4_t rest = vsubq_f32(x, vreinterpretq_f32_u32(vandq_u32(rounded, upper)));
    vst1_u16(high, vshrn_n_u32(rounded, 16));
    vst1_u16(low, vshrn_n_u32(vaddq_u32(vreinterpretq_u32_f32(rest), half), 16));
}

/* Pack a tile of each piece: up to 16 lines of up to 32 terms. */
static void pack_lines(const PackJob *x, const char *from, int64_t lines, int64_t terms, Line *to) {
    float copy[TILE_LINES][BLOCK_TERMS] = {{0}};
    for (int64_t i = 0; i < lines; i++)
        for (int64_t t = 0; t < gemm_min(terms, BLOCK_TERMS); t++) copy[i][t] = number_of(x, from, i, t);
    for (int group = 0; group < BLOCK_TERMS / 4; group++)
        for (int i = 0; i < TILE_LINES; i++) {
            char *at = (char *)to + group * GROUP_BYTES + i * 8;
            const float32x4_t four = vld1q_f32(copy[i] + 4 * group);
            if (x->pieces == 2) split_four(four, (uint16_t *)at, (uint16_t *)(at + 2 * TILE_BYTES));
            else vst1_bf16((bfloat16_t *)at, vcvt_bf16_f32(four));
        }
}

enum { ROWS_TOGETHER = 256 };

static inline void begin_tiles(void) {}
static inline void end_tiles(void) {}

/* Add the products of a piece of 8 rows of A and of 8 columns of B. */
GEMM_INLINE void add_groups(const char *a, const char *b, float32x4_t sums[4][4]) {
    for (int group = 0; group < BLOCK_TERMS / 4; group++, a += GROUP_BYTES, b += GROUP_BYTES)
#pragma GCC unroll 4
        for (int i = 0; i < 4; i++)
#pragma GCC unroll 4
            for (int j = 0; j < 4; j++)
                sums[i][j] = vbfmmlaq_f32(sums[i][j], vld1q_bf16((const bfloat16_t *)a + i * 8), vld1q_bf16((const bfloat16_t *)b + j * 8));
}

GEMM_INLINE void multiply_tiles(int two_rows, int two_columns, int pieces, TILE_OPERANDS_OF_C) {
    for (int row = 0; row < (two_rows ? 32 : 16); row += 8)
        for (int column = 0; column < (two_columns ? 32 : 16); column += 8) {
            float *const square = c + row * c_row + column;
            float32x4_t sums[4][4];
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) {
                    const float *at = square + 2 * i * c_row + 2 * j;
                    sums[i][j] = accumulate ? vcombine_f32(vld1_f32(at), vld1_f32(at + c_row)) : vdupq_n_f32(0);
                }
            for (int64_t i = 0; i < blocks; i++) {
                const char *of_a = a + i * pieces * 2 * TILE_BYTES + row / 16 * TILE_BYTES + row % 16 * 8;
                const char *of_b = b + i * pieces * 2 * TILE_BYTES + column / 16 * TILE_BYTES + column % 16 * 8;
                if (pieces == 2) add_groups(of_a, of_b + 2 * TILE_BYTES, sums);
                add_groups(of_a, of_b, sums);
                if (pieces == 2) add_groups(of_a + 2 * TILE_BYTES, of_b, sums);
                if (row == 0 && column == 0) work_on(jobs);
            }
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++) {
                    float *at = square + 2 * i * c_row + 2 * j;
                    vst1_f32(at, vget_low_f32(sums[i][j])), vst1_f32(at + c_row, vget_high_f32(sums[i][j]));
                }
        }
}

static inline void copy_rows(const float *from, int64_t from_row, float *to, int64_t to_row, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) memcpy(to + i * to_row, from + i * from_row, (size_t)columns * sizeof *to);
}

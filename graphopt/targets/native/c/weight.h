/* Frozen weights in 4 or 8 bits, of which products dequantize one panel at a time. */
#pragma once
#include "calls.h"
#include "lines.h"
#include "matrix.h"
#include "ort.h"

enum { AHEAD = 16 }; /* rows from where a weight is read to where it is fetched into the cache */

typedef struct {
    const WeightForm *form;
    const uint8_t *q, *zero; /* zero points or NULL */
    const float *scale;
    int is_transposed; /* operand B is the transpose of the weight */
} Weight;

typedef uint8_t Bytes __attribute__((vector_size(GEMM_BYTES / 4)));

/* Return a number of a matrix of integers. Those of 4 bits lie in pairs, the low bits first. */
static inline float integer_at(const WeightForm *form, const uint8_t *q, int64_t i) {
    const int sign = form->is_signed ? 1 << (form->bits - 1) : 0;
    const int x = form->bits == 8 ? q[i] : q[i / 2] >> i % 2 * 4 & 15;
    return (float)((x ^ sign) - sign);
}

/* Read two vectors of such numbers, the first of which is the first of a pair. */
GEMM_INLINE void integers_at(const WeightForm *form, const uint8_t *q, int64_t i, Lanes to[2]) {
    const int sign = form->is_signed ? 8 : 0;
    Bytes pairs;
    memcpy(&pairs, q + i / 2, sizeof pairs);
    const Ints low = __builtin_convertvector(pairs & 15, Ints), high = __builtin_convertvector(pairs >> 4, Ints);
    const Lanes x = __builtin_convertvector((low ^ sign) - sign, Lanes);
    const Lanes y = __builtin_convertvector((high ^ sign) - sign, Lanes);
    to[0] = GEMM_ZIP(x, y, GEMM_LOW), to[1] = GEMM_ZIP(x, y, GEMM_HIGH);
}

/* Dequantize some columns of some rows of a weight, to rows of `step` elements. */
GEMM_WIDE static void dequantize(const Weight *w, int64_t row, int64_t rows, int64_t column, int64_t columns, float *to,
                                 int64_t step) {
    const WeightForm form = *w->form;
    const uint8_t *q = w->q, *zero = w->zero;
    const float *scales = w->scale;
    const int64_t first_end = form.column_block - column % form.column_block;
    Lanes x[2], points[2] = {{0}};
    for (int64_t r = row; r < row + rows; r++, to += step) {
        const int64_t at = r * form.pitch + column;
        const int64_t first = (form.row_block == 1 ? r : r / form.row_block) * form.row_step + column / form.column_block;
        __builtin_prefetch(q + (at + AHEAD * form.pitch) * form.bits / 8);
        if (form.row_block == 1) __builtin_prefetch(scales + first + AHEAD * form.row_step);
        int64_t i = 0;
        if (form.column_block == 1) {
            for (; form.bits == 4 && at % 2 == 0 && first % 2 == 0 && columns - i >= 2 * LANES; i += 2 * LANES) {
                integers_at(&form, q, at + i, x);
                if (zero) integers_at(&form, zero, first + i, points);
                for (int v = 0; v < 2; v++) AT(to + i + v * LANES) = (x[v] - points[v]) * AT(scales + first + i + v * LANES);
            }
            for (; i < columns; i++) {
                const float point = zero ? integer_at(&form, zero, first + i) : 0;
                to[i] = (integer_at(&form, q, at + i) - point) * scales[first + i];
            }
        }
        for (int64_t end = first_end, block = first; i < columns; end += form.column_block, block++) {
            const float scale = scales[block], point = zero ? integer_at(&form, zero, block) : 0;
            if (end > columns) end = columns;
            for (; form.bits == 4 && (at + i) % 2 == 0 && end - i >= 2 * LANES; i += 2 * LANES) {
                integers_at(&form, q, at + i, x);
                for (int v = 0; v < 2; v++) AT(to + i + v * LANES) = (x[v] - point) * scale;
            }
            for (; i < end; i++) to[i] = (integer_at(&form, q, at + i) - point) * scale;
        }
    }
}

static void fill_panel(void *user, int64_t p, int64_t depth, int64_t j, int64_t width, int64_t padded, float *to) {
    const Weight *w = user;
    float rows[BLOCK_LINES * GEMM_KC]; /* of a panel, in any precision */
    if (!w->is_transposed) {
        dequantize(w, p, depth, j, width, to, padded);
        return;
    }
    for (int64_t done = 0, part; done < depth; done += part, to += part * padded) {
        part = gemm_min(depth - done, GEMM_KC);
        dequantize(w, j, width, p + done, part, rows, part);
        gemm_pack(part, width, padded, rows, 1, part, width * part, to);
    }
}

/* Return an input that a weight is made of, in `data`. Fail if it has not so many elements. */
static OrtStatus *weight_input(Context *context, size_t index, void *data, int rank, int64_t count) {
    int64_t dims[MOST_AXES];
    CHECK(input(context, index, data, dims, (size_t)rank));
    int64_t found = 1;
    for (int i = 0; i < rank; i++) found *= dims[i];
    return found == count ? NULL : unlike();
}

/* Find a weight, whose scales and zero points are inputs from `next` on. */
static OrtStatus *find_weight(Context *context, const WeightForm *form, size_t next, Weight *w) {
    const int64_t scales = (form->rows - 1) / form->row_block * form->row_step + (form->pitch - 1) / form->column_block + 1;
    w->form = form;
    CHECK(weight_input(context, 1, &w->q, form->rank, form->rows * form->pitch));
    CHECK(weight_input(context, next, &w->scale, form->rank_scale, scales));
    return form->rank_zero < 0 ? NULL : weight_input(context, next + 1, &w->zero, form->rank_zero, scales);
}

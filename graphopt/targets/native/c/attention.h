/* Attention, y = softmax(f(q k')) v, where the steps of f scale, add, and put a number where a mask says; and its gradient.
 *
 * Scores are computed for a block of whole rows at a time. None are kept: the gradient computes them again, and the
 * probabilities from the maximum of each row and the reciprocal of its sum (Dao, FlashAttention-2, arXiv 2307.08691):
 *
 *     dv = p' dy      dp = dy v'      ds = p (dp - sum(p dp))      dq = ds k      dk = ds' q
 *
 * Few probabilities are kept all the same, since to compute them again would take longer than to read them.
 * A block ends where all further probabilities of its rows are 0: see `columns_of`. */
#pragma once
#include "calls.h"
#include "float32.h"
#include "functions.h"
#include "gemm.h"
#include "matrix.h"
#include "ort.h"
#include "product.h"
#include "resources.h"

enum {
    SCORES = 1 << 17,      /* of a block: half a megabyte */
    LEAST_BLOCK = 32,      /* rows */
    SMALL_BLOCK = 5,       /* rows, of few that are taken as many */
    MOST_SEEN = 64,        /* rows of a block that may end early */
    MOST_KEPT = 1 << 22,   /* probabilities */
    MOST_KEPT_EARLY = 1 << 19, /* if blocks may end early */
    PARTS = 16,            /* of the gradient, if there are as many blocks */
    CHUNK_OF_MASK = 256,   /* columns */
    LEAST_SKIPPED = 64,    /* columns of scores from which on blocks end early */
};

/* Whether a thread's calls compute few scores as many, so that a comparison with the plain step sees both: see
 * translation.py. */
static _Thread_local int attends_to_many;
EXPORT void attend_to_many(int chosen) { attends_to_many = chosen; }

/* exp(x - y) is 0 for a score x of a masked column and the largest score y, if products are smaller than SMALL. */
static const float MASKED = -1e30f, SEEN = -1e29f, SMALL = 1e28f;

/* A stack of matrices, which may be a third of a tensor. `axes` are those of calls.h. */
typedef struct {
    float *tensor, *data;
    int64_t dims[MOST_AXES], count, rows, columns, row, column, batch[2];
} Stack;

/* What a step adds or chooses by. Strides are those of the axes of scores, as the step sees them. */
typedef struct {
    const void *data;
    int64_t dims[MOST_AXES], sizes[MOST_AXES], strides[MOST_AXES];
} StepTensor;

/* All tasks share this. `sums` are gradients of keys and values of further parts. */
typedef struct {
    const AttentionForm *form;
    Stack q, k, v, dy, results[3];
    StepTensor tensors[MOST_STEPS];
    float *stats, *sums;
    int64_t outer[2], batches, rows, keys, line, block, blocks, parts, tasks;
    int skips, keeps; /* blocks may end early; `stats` are all probabilities */
    char *scratch;
    size_t bytes, block_bytes; /* of a task, of a block of scores */
} Attention;

static void set_strides(Stack *x, int rank, const unsigned char *axes, int64_t *stored, int64_t outer[2], int cut, int third) {
    int64_t strides[MOST_AXES];
    x->count = strides_of(rank, stored, strides), x->data = x->tensor;
    if (cut >= 0) stored[cut] /= 3, x->data += third * stored[cut] * strides[cut];
    x->rows = stored[axes[rank - 2]], x->columns = stored[axes[rank - 1]];
    x->row = strides[axes[rank - 2]], x->column = strides[axes[rank - 1]];
    outer[0] = outer[1] = 1;
    for (int i = 0; i < rank - 2; i++) {
        const int at = i + 4 - rank;
        outer[at] = stored[axes[i]], x->batch[at] = strides[axes[i]];
    }
}

static OrtStatus *find_stack(Context *context, size_t index, int rank, const unsigned char *axes, Stack *x, int64_t outer[2], int cut) {
    CHECK(input(context, index, &x->tensor, x->dims, rank));
    set_strides(x, rank, axes, x->dims, outer, cut, (int)index);
    return NULL;
}

/* Find a result of so many rows and columns, and of the batches of q. */
static OrtStatus *make_result(Context *context, size_t index, Attention *t, int number, int64_t rows, int64_t columns) {
    const int rank = t->form->rank, cut = t->form->cut_results;
    const unsigned char *axes = t->form->results[number];
    int64_t stored[MOST_AXES], outer[2];
    for (int i = 0; i < rank - 2; i++) stored[axes[i]] = t->q.dims[t->form->q[i]];
    stored[axes[rank - 2]] = rows, stored[axes[rank - 1]] = columns;
    if (cut >= 0) stored[cut] *= 3;
    CHECK(output(context, cut >= 0 ? 0 : index, &t->results[number].tensor, stored, rank));
    set_strides(&t->results[number], rank, axes, stored, outer, cut, number);
    return NULL;
}

static inline float *matrix_of(const Attention *t, const Stack *x, int64_t batch) {
    return x->data + batch / t->outer[1] * x->batch[0] + batch % t->outer[1] * x->batch[1];
}

/* Find what steps add or choose by. Sizes of scores are numbers, or those of inputs. */
static OrtStatus *find_tensors(Context *context, Attention *t, const int64_t *const *dims) {
    const AttentionForm *form = t->form;
    size_t index = form->is_gradient ? 5 : 3;
    for (int n = 0; n < form->steps; n++) {
        const ScoreStep *step = form->step + n;
        if (step->kind != SCALED) CHECK(input(context, index++, &t->tensors[n].data, t->tensors[n].dims, step->rank));
    }
    for (int n = 0; n < form->steps; n++) {
        const ScoreStep *step = form->step + n;
        StepTensor *x = t->tensors + n;
        int64_t strides[MOST_AXES], rows = 1;
        if (step->kind == SCALED) continue;
        strides_of(step->rank, x->dims, strides);
        for (int i = 0; i < step->view; i++) {
            const int64_t code = step->sizes[i], at = -1 - code;
            const int own = i - (step->view - step->rank);
            x->sizes[i] = code >= 0 ? code : dims[at / MOST_AXES][at % MOST_AXES];
            if (own >= 0 && x->dims[own] != 1 && x->dims[own] != x->sizes[i]) return unlike();
            x->strides[i] = own < 0 || x->dims[own] == 1 ? 0 : strides[own];
            if (i < step->view - 1) rows *= x->sizes[i];
        }
        if (rows != t->batches * t->rows || x->sizes[step->view - 1] != t->keys) return unlike();
    }
    return NULL;
}

/* Return where the elements of a step's tensor begin for a row of all scores. */
static int64_t element_of(const ScoreStep *step, const StepTensor *x, int64_t row) {
    int64_t place = 0;
    for (int i = step->view - 2; i >= 0; row /= x->sizes[i--]) place += row % x->sizes[i] * x->strides[i];
    return place;
}

#define EACH(type, statement)                                                     \
    {                                                                             \
        const type *x = (const type *)tensor->data + place;                       \
        if (column) {                                                             \
            _Pragma("omp simd") for (int64_t j = 0; j < count; j++) {             \
                const type m = x[j];                                              \
                statement;                                                        \
            }                                                                     \
        } else if (count > 0) {                                                   \
            const type m = x[0];                                                  \
            _Pragma("omp simd") for (int64_t j = 0; j < count; j++) { statement; } \
        }                                                                         \
    }

/* Apply the steps to some scores of a row, or their derivatives to gradients: a mask stops a gradient. */
WIDE static void apply_steps(const Attention *t, int64_t row, int is_gradient, int64_t first, int64_t count, float *restrict s) {
    for (int n = 0; n < t->form->steps; n++) {
        const ScoreStep *step = t->form->step + n;
        const StepTensor *tensor = t->tensors + n;
        const float number = is_gradient && step->kind != SCALED ? 0 : step->number;
        if (step->kind == SCALED) {
            _Pragma("omp simd") for (int64_t j = 0; j < count; j++) s[j] *= number;
            continue;
        }
        if (step->kind == ADDED && is_gradient) continue;
        const int64_t column = tensor->strides[step->view - 1], place = element_of(step, tensor, row) + first * column;
        if (step->kind == ADDED) EACH(float, s[j] += m)
        else if (step->kind == KEPT) EACH(uint8_t, s[j] = m ? s[j] : number)
        else EACH(uint8_t, s[j] = m ? number : s[j])
    }
}

/* Return how many columns a block has to the last one that one of its rows sees: beyond, all probabilities are 0, because
 * steps lower these scores far more than products raise them. Return all where a row sees nothing, whose scores count. */
WIDE static int64_t columns_of(const Attention *t, int64_t row0, int64_t rows) {
    int64_t end = 0;
    if (!t->skips) return t->keys;
    for (int64_t row = row0 + rows - 1; row >= row0; row--) {
        int sees = 0;
        for (int64_t last = t->keys, first; last > 0 && !sees; last = first) {
            float s[CHUNK_OF_MASK] = {0}, most = -INFINITY;
            first = last > CHUNK_OF_MASK ? last - CHUNK_OF_MASK : 0;
            apply_steps(t, row, 0, first, last - first, s);
            _Pragma("omp simd reduction(maximum : most)") for (int64_t j = 0; j < last - first; j++) most = MAXIMUM(most, s[j]);
            for (int64_t j = last; !(most <= MASKED) && j > end && j > first; j--)
                if (!(s[j - 1 - first] <= MASKED)) end = j;
            sees = most >= SEEN && most < INFINITY;
        }
        if (!sees) return t->keys;
    }
    return end;
}

/* Return the largest magnitude of numbers, or NaN. */
WIDE static float largest_of(const Stack *x) {
    float most = 0;
    _Pragma("omp simd reduction(maximum : most)") for (int64_t i = 0; i < x->count; i++) most = MAXIMUM(most, fabsf(x->tensor[i]));
    return most;
}

/* Turn the scores of a row into exp(s - maximum), and note the maximum and the reciprocal of the sum. */
WIDE static void exponentials(float *restrict s, int64_t count, int is_safe, float stats[2]) {
    float most = -INFINITY, sum = 0;
    _Pragma("omp simd reduction(maximum : most)") for (int64_t j = 0; j < count; j++) most = MAXIMUM(most, s[j]);
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < count; j++) {
        s[j] = exp_float(s[j] - most);
        sum += s[j];
    }
    stats[0] = most, stats[1] = 1 / sum;
    if (is_safe && sum != sum) {
        memset(s, 0, count * sizeof *s);
        stats[1] = 0;
    }
}

/* Turn the scores of a row into probabilities. */
WIDE static void probabilities(float *restrict s, int64_t count, int is_safe, const float stats[2]) {
    const float most = stats[0], factor = stats[1];
    if (is_safe && factor == 0) memset(s, 0, count * sizeof *s);
    else
        _Pragma("omp simd") for (int64_t j = 0; j < count; j++) s[j] = exp_float(s[j] - most) * factor;
}

/* Turn the gradients of the probabilities of a row into those of its scores. */
WIDE static void slopes_of(const float *restrict s, float *restrict d, int64_t count) {
    float sum = 0;
    _Pragma("omp simd reduction(+ : sum)") for (int64_t j = 0; j < count; j++) sum += s[j] * d[j];
    _Pragma("omp simd") for (int64_t j = 0; j < count; j++) d[j] = s[j] * (d[j] - sum);
}

/* A matrix, perhaps transposed. */
typedef struct {
    float *data;
    int64_t row, column;
} Matrix;

static void multiply_block(int64_t m, int64_t n, int64_t k, Matrix a, Matrix b, Matrix c, int accumulate, void *scratch) {
    gemm_product g = {.m = m, .n = n, .k = k, .batch = {1, 1}, .a = a.data, .b = b.data, .c = c.data, .threads = 1};
    g.a_strides.row = a.row, g.a_strides.column = a.column;
    g.b_strides.row = b.row, g.b_strides.column = b.column, g.c_strides.row = c.row, g.c_strides.column = 1;
    g.accumulate = accumulate, g.scratch = scratch, g.pieces = pieces_for(&g, 0);
    gemm(&g);
}

static inline Matrix rows_from(const Attention *t, const Stack *x, int64_t batch, int64_t row) {
    return (Matrix){matrix_of(t, x, batch) + row * x->row, x->row, x->column};
}
static inline Matrix flipped(Matrix x) { return (Matrix){x.data, x.column, x.row}; }

/* Compute every so many blocks of rows of the result. */
static void attend(void *user, size_t task) {
    const Attention *t = user;
    char *memory = t->scratch + task * t->bytes, *scratch = memory + t->block_bytes;
    Matrix scores = {(float *)memory, t->line, 1};
    for (int64_t unit = (int64_t)task; unit < t->batches * t->blocks; unit += t->tasks) {
        const int64_t batch = unit / t->blocks, first = unit % t->blocks * t->block;
        const int64_t rows = gemm_min(t->block, t->rows - first), row0 = batch * t->rows + first;
        const int64_t columns = columns_of(t, row0, rows);
        const Matrix y = rows_from(t, &t->results[0], batch, first);
        if (t->keeps) scores.data = t->stats + row0 * t->keys;
        multiply_block(rows, columns, t->q.columns, rows_from(t, &t->q, batch, first), flipped(rows_from(t, &t->k, batch, 0)), scores, 0, scratch);
        for (int64_t i = 0; i < rows; i++) {
            float noted[2], *stats = t->keeps ? noted : t->stats + 2 * (row0 + i), *row = scores.data + i * t->line;
            apply_steps(t, row0 + i, 0, 0, columns, row);
            exponentials(row, columns, t->form->is_safe, stats);
            for (int64_t j = 0; t->keeps && j < columns; j++) row[j] *= stats[1];
        }
        multiply_block(rows, t->v.columns, columns, scores, rows_from(t, &t->v, batch, 0), y, 0, scratch);
        for (int64_t i = 0; !t->keeps && i < rows; i++)
            for (int64_t j = 0; j < t->v.columns; j++) y.data[i * y.row + j] *= t->stats[2 * (row0 + i) + 1];
    }
}

/* Return where a part sums up the gradient of keys or values: the first one in the result itself. */
static Matrix sum_of(const Attention *t, int number, int64_t batch, int64_t part) {
    const Stack *x = &t->results[number];
    const int64_t keys = t->form->wanted[1] ? t->keys * t->k.columns : 0, values = t->form->wanted[2] ? t->keys * t->v.columns : 0;
    if (part == 0) return rows_from(t, x, batch, 0);
    float *all = t->sums + (batch * (t->parts - 1) + part - 1) * (keys + values);
    return (Matrix){all + (number == 2 ? keys : 0), x->columns, 1};
}

static void set_zero(Matrix x, int64_t rows, int64_t columns) {
    for (int64_t i = 0; i < rows; i++) memset(x.data + i * x.row, 0, columns * sizeof *x.data);
}

/* Compute the gradients of some parts: every so many blocks of the rows of a batch. */
static void attend_backward(void *user, size_t task) {
    const Attention *t = user;
    const AttentionForm *form = t->form;
    char *memory = t->scratch + task * t->bytes, *scratch = memory + 2 * t->block_bytes;
    const Matrix slopes = {(float *)(memory + t->block_bytes), t->line, 1};
    Matrix scores = {(float *)memory, t->keeps ? t->keys : t->line, 1};
    for (int64_t unit = (int64_t)task; unit < t->batches * t->parts; unit += t->tasks) {
        const int64_t batch = unit / t->parts, part = unit % t->parts;
        const Matrix k = rows_from(t, &t->k, batch, 0), v = rows_from(t, &t->v, batch, 0);
        for (int number = 1; number < 3; number++)
            if (form->wanted[number]) set_zero(sum_of(t, number, batch, part), t->keys, t->results[number].columns);
        for (int64_t block = part; block < t->blocks; block += t->parts) {
            const int64_t first = block * t->block, rows = gemm_min(t->block, t->rows - first), row0 = batch * t->rows + first;
            const int64_t columns = columns_of(t, row0, rows), depth = t->q.columns, width = t->v.columns;
            const Matrix q = rows_from(t, &t->q, batch, first), dy = rows_from(t, &t->dy, batch, first);
            if (t->keeps) scores.data = t->stats + row0 * t->keys;
            else multiply_block(rows, columns, depth, q, flipped(k), scores, 0, scratch);
            multiply_block(rows, columns, width, dy, flipped(v), slopes, 0, scratch);
            for (int64_t i = 0; i < rows; i++) {
                float *s = scores.data + i * scores.row, *d = slopes.data + i * t->line;
                if (!t->keeps) {
                    apply_steps(t, row0 + i, 0, 0, columns, s);
                    probabilities(s, columns, form->is_safe, t->stats + 2 * (row0 + i));
                }
                slopes_of(s, d, columns);
                apply_steps(t, row0 + i, 1, 0, columns, d);
            }
            if (form->wanted[0]) multiply_block(rows, depth, columns, slopes, k, rows_from(t, &t->results[0], batch, first), 0, scratch);
            if (form->wanted[1]) multiply_block(columns, depth, rows, flipped(slopes), q, sum_of(t, 1, batch, part), 1, scratch);
            if (form->wanted[2]) multiply_block(columns, width, rows, flipped(scores), dy, sum_of(t, 2, batch, part), 1, scratch);
        }
    }
}

/* Add up the parts of a batch. */
static void add_parts(void *user, size_t batch) {
    const Attention *t = user;
    for (int number = 1; number < 3; number++)
        for (int64_t part = 1; t->form->wanted[number] && part < t->parts; part++) {
            const Matrix to = sum_of(t, number, (int64_t)batch, 0), from = sum_of(t, number, (int64_t)batch, part);
            for (int64_t i = 0; i < t->keys; i++)
                for (int64_t j = 0; j < t->results[number].columns; j++) to.data[i * to.row + j] += from.data[i * from.row + j];
        }
}

/* Find whether blocks may end early. */
static void find_skips(Attention *t) {
    const AttentionForm *form = t->form;
    float scale = 1;
    for (int n = 0; n < form->steps; n++) {
        if (form->step[n].kind == SCALED) scale *= fabsf(form->step[n].number) > 1 ? fabsf(form->step[n].number) : 1;
        else t->skips = attends_to_many || t->keys > LEAST_SKIPPED;
    }
    if (!t->skips) return;
    const float products = largest_of(&t->q) * largest_of(&t->k) * (float)t->q.columns;
    t->skips = products * scale < SMALL && largest_of(&t->v) < INFINITY;
}

/* Return the bytes of scratch memory that each product of a task can do with. */
static size_t scratch_of_products(const Attention *t) {
    int64_t most = t->keys > t->block ? t->keys : t->block;
    if (t->q.columns > most) most = t->q.columns;
    if (t->v.columns > most) most = t->v.columns;
    gemm_product g = {.m = most, .n = most, .k = most, .batch = {1, 1}, .threads = 1};
    size_t bytes = gemm_scratch(&g);
    g.pieces = pieces_of_all;
    return ((bytes > gemm_scratch(&g) ? bytes : gemm_scratch(&g)) + 63) / 64 * 64;
}

/* Read q, k and v and, for the gradient, that of y and what the forward pass has noted of each row. Then come the tensors
 * of steps. The results are y and the notes, or those of the gradients of q, k and v that are wanted. */
OrtStatus *attention(Context *context, const AttentionForm *form) {
    Attention all = {.form = form}, *t = &all;
    const int rank = form->rank, has_gradient = form->is_gradient;
    int64_t of_k[2], of_v[2], of_dy[2], notes[MOST_AXES];
    CHECK(find_stack(context, 0, rank, form->q, &t->q, t->outer, form->cut));
    CHECK(find_stack(context, 1, rank, form->k, &t->k, of_k, form->cut));
    CHECK(find_stack(context, 2, rank, form->v, &t->v, of_v, form->cut));
    for (int i = 0; i < 2; i++)
        if (of_k[i] != t->outer[i] || of_v[i] != t->outer[i]) return unlike();
    if (t->k.columns != t->q.columns || t->v.rows != t->k.rows) return unlike();
    t->batches = t->outer[0] * t->outer[1], t->rows = t->q.rows, t->keys = t->k.rows;
    if (has_gradient) {
        CHECK(find_stack(context, 3, rank, form->dy, &t->dy, of_dy, -1));
        CHECK(input(context, 4, &t->stats, notes, rank));
        for (int i = 0; i < 2; i++)
            if (of_dy[i] != t->outer[i]) return unlike();
        if (t->dy.rows != t->rows || t->dy.columns != t->v.columns || notes[rank - 2] != t->rows) return unlike();
        const int64_t rows[] = {t->rows, t->keys, t->keys}, columns[] = {t->q.columns, t->k.columns, t->v.columns};
        for (int number = 0, index = 0; number < 3; number++)
            if (form->wanted[number]) CHECK(make_result(context, index++, t, number, rows[number], columns[number]));
    } else {
        for (int i = 0; i < rank - 1; i++) notes[i] = t->q.dims[form->q[i]];
        CHECK(make_result(context, 0, t, 0, t->rows, t->v.columns));
    }
    const int64_t *dims[5 + MOST_STEPS] = {t->q.dims, t->k.dims, t->v.dims, t->dy.dims, notes};
    for (int n = 0, index = has_gradient ? 5 : 3; n < form->steps; n++)
        if (form->step[n].kind != SCALED) dims[index++] = t->tensors[n].dims;
    CHECK(find_tensors(context, t, dims));
    const int64_t scores = t->batches * t->rows * t->keys;
    if (attends_to_many || scores > MOST_KEPT_EARLY) find_skips(t);
    if (!has_gradient) {
        t->keeps = t->keys < 3 || (!attends_to_many && scores <= (t->skips ? MOST_KEPT_EARLY : MOST_KEPT));
        notes[rank - 1] = t->keeps ? t->keys : 2;
        CHECK(output(context, 1, &t->stats, notes, rank));
    } else t->keeps = notes[rank - 1] == t->keys;
    t->skips = t->skips && !t->keeps;
    if (scores == 0) {
        for (int number = 0; number < 3; number++)
            if (t->results[number].tensor) memset(t->results[number].tensor, 0, t->results[number].count * sizeof(float));
        return NULL;
    }
    t->line = t->keeps && !has_gradient ? t->keys : gemm_padded(t->keys);
    int64_t block = (has_gradient ? SCORES / 2 : SCORES) / t->keys;
    if (t->skips && block > MOST_SEEN) block = MOST_SEEN;
    if (block < LEAST_BLOCK) block = LEAST_BLOCK;
    if (attends_to_many) block = SMALL_BLOCK;
    t->blocks = (t->rows + block - 1) / block, t->block = (t->rows + t->blocks - 1) / t->blocks;
    t->blocks = (t->rows + t->block - 1) / t->block;
    t->parts = t->batches >= PARTS ? 1 : gemm_min(PARTS / t->batches, t->blocks);
    const int64_t threads = context->ort ? thread_count : 1, units = t->batches * (has_gradient ? t->parts : t->blocks);
    t->tasks = gemm_min(threads, units);
    t->block_bytes = (size_t)(t->block * t->line) * sizeof(float);
    t->bytes = t->block_bytes * (has_gradient ? 2 : 1) + scratch_of_products(t);
    const size_t own = t->bytes * (size_t)t->tasks;
    int64_t sums = has_gradient ? t->batches * (t->parts - 1) * t->keys : 0;
    sums *= (form->wanted[1] ? t->k.columns : 0) + (form->wanted[2] ? t->v.columns : 0);
    char *memory = borrow(own + (size_t)sums * sizeof(float));
    if (!memory) return out_of_memory();
    t->scratch = memory, t->sums = (float *)(memory + own);
    share_tasks(context, t->tasks, t, has_gradient ? attend_backward : attend, t->tasks);
    if (has_gradient && t->parts > 1) share_tasks(context, gemm_min(threads, t->batches), t, add_parts, t->batches);
    give_back(memory);
    return NULL;
}

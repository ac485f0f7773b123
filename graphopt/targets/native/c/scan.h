/* The kernel of a scan calls other kernels for each element of sequences, on a table of tensors.
 *
 * The tensors are, in order: the operator's inputs, which are states, sequences and what the body reads from outside;
 * the body's inputs, which are states and elements of sequences; and what the body computes.
 */
#pragma once
#include "ort.h"

enum { SCAN_ROWS = 8 }; /* of a task, at least */

/* A step of the body is a kernel or, without one, a move between tensors and one tensor that joins them. */
typedef struct {
    OrtStatus *(*compute)(Context *);
    int many_inputs, many_outputs;
    int axis;  /* of a move */
    int fixed; /* whether the second input of a kernel is always the same */
    const int *inputs, *outputs;
} Step;

/* The body returns, in order, new states and elements of new sequences. */
typedef struct {
    int tensor;
    int copied;   /* or computed where it belongs */
    int reversed; /* the last element comes first */
} Result;

typedef struct {
    int inputs, states, sequences, tensors, steps, results;
    int by_rows; /* whether the body computes each row of its tensors from that row of others, and from inputs */
    const unsigned char *ranks, *sizes; /* of each tensor: how many axes it has, and the bytes of an element */
    const int64_t *dims;                /* of all tensors; -1 - i is the dimension number i of an earlier tensor */
    const unsigned char *reversed;      /* for each sequence that is read */
    const Step *step;
    const Result *result;
} ScanForm;

static inline int64_t scan_product(const int64_t *dims, size_t rank) {
    int64_t count = 1;
    for (size_t i = 0; i < rank; i++) count *= dims[i];
    return count;
}

/* A sanitizer sees each access between the tensors that a task owns. */
#ifdef __SANITIZE_ADDRESS__
void __asan_poison_memory_region(const volatile void *address, size_t bytes);
static inline size_t scan_padded(size_t bytes) { return bytes / 64 * 64 + 64; }
#else
static inline size_t scan_padded(size_t bytes) { return (bytes + 63) / 64 * 64; }
#endif

/* Return the next part of a task's memory. */
static inline char *scan_part(char **next, size_t bytes) {
    char *part = *next;
    *next += scan_padded(bytes);
#ifdef __SANITIZE_ADDRESS__
    __asan_poison_memory_region(part + bytes, (size_t)(*next - part) - bytes);
#endif
    return part;
}

static inline int scan_alike(const Tensor *x, const Tensor *y) {
    return x->rank == y->rank && memcmp(x->dims, y->dims, x->rank * sizeof *x->dims) == 0;
}

/* Find the tensors of a move that are joined, and the one that joins them. A single tensor has the same elements. */
static inline int scan_parts(const Step *step, const int **parts, int *whole) {
    const int joins = step->many_outputs == 1;
    *parts = joins ? step->inputs : step->outputs, *whole = joins ? step->outputs[0] : step->inputs[0];
    return joins ? step->many_inputs : step->many_outputs;
}

/* Return whether the shapes of a step without a kernel fit. */
static int scan_fits(const Step *step, const Tensor *tensors) {
    const int *parts;
    int whole;
    const int many = scan_parts(step, &parts, &whole);
    const Tensor *all = tensors + whole;
    int64_t sum = 0;
    if (many == 1) return scan_product(all->dims, all->rank) == scan_product(tensors[parts[0]].dims, tensors[parts[0]].rank);
    for (int i = 0; i < many; i++) {
        const Tensor *part = tensors + parts[i];
        if (part->rank != all->rank) return 0;
        for (int d = 0; d < (int)all->rank; d++)
            if (d != step->axis && part->dims[d] != all->dims[d]) return 0;
        sum += part->dims[step->axis];
    }
    return sum == all->dims[step->axis];
}

static void scan_move(const Step *step, Tensor *tensors, const unsigned char *sizes) {
    const int *parts;
    int whole;
    const int many = scan_parts(step, &parts, &whole);
    if (many == 1) {
        tensors[step->outputs[0]].data = tensors[step->inputs[0]].data;
        return;
    }
    const Tensor *all = tensors + whole;
    const int64_t rows = scan_product(all->dims, step->axis);
    const size_t row = (size_t)scan_product(all->dims + step->axis, all->rank - step->axis) * sizes[whole];
    char *start = all->data;
    for (int i = 0; i < many; i++) {
        const Tensor *part = tensors + parts[i];
        const size_t bytes = (size_t)scan_product(part->dims + step->axis, part->rank - step->axis) * sizes[whole];
        char *at = part->data;
        if (step->many_outputs == 1)
            for (int64_t r = 0; r < rows; r++) memcpy(start + r * row, at + r * bytes, bytes);
        else
            for (int64_t r = 0; r < rows; r++) memcpy(at + r * bytes, start + r * row, bytes);
        start += bytes;
    }
}

/* All tasks of a call share this. Each task computes some rows. */
typedef struct {
    const ScanForm *scan;
    OrtKernelContext *ort; /* or NULL, if there are several tasks */
    const Tensor *tensors;
    const size_t *bytes;
    const char *owned; /* for each tensor: whether it needs memory */
    char *const *initial, *const *sequence, *const *result;
    int64_t count, rows;
    OrtStatus **status;
    size_t tasks;
} ScanCall;

static size_t scan_threads = 1;

static void scan_task(void *user, size_t task) {
    const ScanCall *c = user;
    const ScanForm *s = c->scan;
    const int body = s->inputs, computed = s->inputs + s->states + s->sequences;
    const int64_t first = c->rows * (int64_t)task / (int64_t)c->tasks, end = c->rows * (int64_t)(task + 1) / (int64_t)c->tasks;
    Tensor tensors[s->tensors];
    size_t bytes[s->tensors], skipped[s->tensors], memory = TO_ALIGN;
    int64_t many = 0;
    memcpy(tensors, c->tensors, sizeof tensors);
    memcpy(bytes, c->bytes, sizeof bytes);
    memset(skipped, 0, sizeof skipped);
    for (int i = 0; i < s->tensors; i++) many += s->ranks[i];
    int64_t dims[many + 1], *at = dims;
    for (int i = body; c->tasks > 1 && i < s->tensors; at += s->ranks[i++]) {
        memcpy(at, tensors[i].dims, s->ranks[i] * sizeof *at);
        at[0] = end - first;
        tensors[i].dims = at;
        skipped[i] = bytes[i] / (size_t)c->rows * (size_t)first;
        bytes[i] = bytes[i] / (size_t)c->rows * (size_t)(end - first);
    }
    char *buffer[s->states + 1][2];
    for (int i = 0; i < s->states; i++) memory += 2 * scan_padded(bytes[body + i]);
    for (int i = computed; i < s->tensors; i++) memory += c->owned[i] ? scan_padded(bytes[i]) : 0;
    char *allocated = allocate(memory), *next = align64(allocated);
    for (int i = 0; i < s->states; i++)
        for (int j = 0; j < 2; j++) buffer[i][j] = scan_part(&next, bytes[body + i]);
    for (int i = computed; i < s->tensors; i++)
        if (c->owned[i]) tensors[i].data = scan_part(&next, bytes[i]);
    for (int i = 0; i < s->states; i++) {
        tensors[body + i].data = c->initial[i] + skipped[body + i];
        if (c->count == 0) memcpy(c->result[i] + skipped[body + i], tensors[body + i].data, bytes[body + i]);
    }
    OrtStatus *status = NULL;
    void *_Atomic packed[s->steps + 1];
    memset((void *)packed, 0, sizeof packed);
    for (int64_t t = 0; t < c->count && !status; t++) {
        char *to[s->results + 1];
        for (int i = 0; i < s->sequences; i++) {
            const int x = body + s->states + i;
            tensors[x].data = c->sequence[i] + (s->reversed[i] ? c->count - 1 - t : t) * (int64_t)c->bytes[x] + skipped[x];
        }
        for (int i = 0; i < s->results; i++) {
            const Result *y = s->result + i;
            const int64_t place = i < s->states ? 0 : y->reversed ? c->count - 1 - t : t;
            if (i < s->states && t + 1 < c->count) to[i] = buffer[i][t % 2];
            else to[i] = c->result[i] + place * (int64_t)c->bytes[y->tensor] + skipped[y->tensor];
            if (!y->copied) tensors[y->tensor].data = to[i];
        }
        for (int i = 0; i < s->steps && !status; i++) {
            const Step *step = s->step + i;
            Context inner = {c->ort, tensors, step->inputs, step->outputs, step->fixed ? packed + i : NULL};
            if (step->compute) status = step->compute(&inner);
            else scan_move(step, tensors, s->sizes);
        }
        for (int i = 0; i < s->results; i++)
            if (s->result[i].copied) memcpy(to[i], tensors[s->result[i].tensor].data, bytes[s->result[i].tensor]);
        for (int i = 0; i < s->states; i++) tensors[body + i].data = to[i];
    }
    for (int i = 0; i < s->steps; i++) free(packed[i]);
    free(allocated);
    c->status[task] = status;
}

static OrtStatus *scan(Context *context, const ScanForm *s) {
    const int body = s->inputs, computed = s->inputs + s->states + s->sequences;
    size_t most = 0, bytes[s->tensors];
    int64_t count = 0, many = 0;
    Tensor tensors[s->tensors];
    char *initial[s->states + 1], *sequence[s->sequences + 1], *result[s->results + 1];
    char owned[s->tensors];
    for (int i = 0; i < s->tensors; i++) many += s->ranks[i];
    int64_t dims[many + 1], *at = dims;
    for (int i = 0; i < s->tensors; at += s->ranks[i++]) {
        tensors[i] = (Tensor){NULL, at, s->ranks[i]};
        if (i < s->inputs) CHECK(input(context, i, &tensors[i].data, at, s->ranks[i]));
        else
            for (int64_t d = at - dims; d < at - dims + s->ranks[i]; d++) dims[d] = s->dims[d] < 0 ? dims[-1 - s->dims[d]] : s->dims[d];
        bytes[i] = (size_t)scan_product(at, s->ranks[i]) * s->sizes[i];
        owned[i] = i >= computed;
        if (s->ranks[i] > most) most = s->ranks[i];
    }
    for (int i = 0; i < s->states; i++) initial[i] = tensors[i].data;
    for (int i = 0; i < s->sequences; i++) {
        const Tensor *x = tensors + s->states + i;
        sequence[i] = x->data;
        if (i > 0 && x->dims[0] != count) return unlike();
        count = x->dims[0];
    }
    for (int i = 0; i < s->steps; i++) {
        const Step *step = s->step + i;
        if (step->compute) continue;
        if (!scan_fits(step, tensors)) return unlike();
        if (step->many_inputs == 1 && step->many_outputs == 1) owned[step->outputs[0]] = 0;
    }
    for (int i = 0; i < s->results; i++) {
        const Tensor *y = tensors + s->result[i].tensor;
        int64_t shape[most + 1];
        shape[0] = count;
        memcpy(shape + 1, y->dims, y->rank * sizeof *shape);
        if (i < s->states && !scan_alike(y, tensors + body + i)) return unlike();
        if (!s->result[i].copied) owned[s->result[i].tensor] = 0;
        if (i < s->states) CHECK(output(context, i, &result[i], shape + 1, y->rank));
        else CHECK(output(context, i, &result[i], shape, y->rank + 1));
    }
    const int64_t rows = s->by_rows ? tensors[body].dims[0] : 1;
    int by_rows = s->by_rows && context->ort;
    for (int i = body; by_rows && i < s->tensors; i++) by_rows = s->ranks[i] > 0 && tensors[i].dims[0] == rows;
    const size_t most_tasks = by_rows ? (size_t)rows / SCAN_ROWS : 1;
    const size_t tasks = most_tasks < 2 || scan_threads < 2 ? 1 : most_tasks < scan_threads ? most_tasks : scan_threads;
    OrtStatus *status[tasks], *failed = NULL;
    ScanCall call = {s, tasks > 1 ? NULL : context->ort, tensors, bytes, owned, initial, sequence, result, count, rows, status, tasks};
    CHECK(in_parallel(context, scan_task, tasks, &call));
    for (size_t i = 0; i < tasks; i++)
        if (!failed) failed = status[i];
        else if (status[i]) api->ReleaseStatus(status[i]);
    return failed;
}

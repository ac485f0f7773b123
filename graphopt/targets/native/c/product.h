/* Matrix products as ONNX Runtime calls them. Operands and results may be stored transposed. */
#pragma once
#include "calls.h"
#include "gemm.h"
#include "lines.h"
#include "matrix.h"
#include "ort.h"
#include "rates.h"
#include "resources.h"
#include "weight.h"

/* A bias or NULL, with its strides, and the product that it is added to. With `relu`, it has one element for each row. */
typedef struct {
    const float *bias;
    int64_t row, column, batch;
    const gemm_product *to;
    int relu;
} Bias;

enum {
    MOST_ROWS = 512,        /* of a product whose operand B is kept in panels between steps */
    KEPT_ROWS = 64,         /* the rows of such a product, as far as its pieces go */
    LEAST_TERMS = 1 << 16,  /* of a product whose operands are bfloat16 numbers */
};

void begin_products(const OrtApi *functions, int64_t threads, int pieces, const Rates *measured) {
    api = functions, thread_count = threads, pieces_of_all = HAS_BFLOAT16 ? pieces : 0;
    if (measured) rates = *measured;
}

/* Return how many bfloat16 numbers stand for a number of a product's operands: none of a small product, in which most of
 * a tile would be zeros. What is kept in panels has the same pieces for any number of rows. */
static int pieces_for(const gemm_product *g, int is_kept) {
    if (g->is_narrow[2]) return 1;
    const int64_t rows = is_kept ? KEPT_ROWS : g->m, least = gemm_min(gemm_min(rows, g->n), g->k);
    return least >= 16 && rows * g->n * g->k >= LEAST_TERMS ? pieces_of_all : 0;
}

static void add_bias(void *user, const int64_t batch[2], int64_t row0, int64_t row1, int64_t column0, int64_t column1) {
    static const float none = 0;
    const Bias *x = user;
    const gemm_strides *strides = &x->to->c_strides;
    float *all = x->to->c + batch[0] * strides->batch[0] + batch[1] * strides->batch[1];
    for (int64_t i = row0; i < row1; i++) {
        float *restrict c = all + i * strides->row;
        const float *restrict bias = x->bias ? x->bias + batch[1] * x->batch + i * x->row : &none;
        if (x->column)
            for (int64_t j = column0; j < column1; j++) c[j] += bias[j];
        else if (x->relu)
            for (int64_t j = column0; j < column1; j++) c[j] = c[j] + bias[0] <= 0 ? 0 : c[j] + bias[0];
        else
            for (int64_t j = column0; j < column1; j++) c[j] += bias[0];
    }
}

/* Find the strides of contiguous elements, and return how many elements there are. */
static int64_t strides_of(int rank, const int64_t *dims, int64_t *strides) {
    int64_t stride = 1;
    for (int i = rank - 1; i >= 0; stride *= dims[i--]) strides[i] = stride;
    return stride;
}

/* Return B in panels that are kept between calls, and pack them first if they are new; NULL if B may change, or if there
 * are so many rows that to pack B takes little of a product's time. */
static const float *kept_panels(Context *context, const gemm_product *g) {
    float *panels = context->packed ? atomic_load(context->packed) : NULL;
    if (!context->packed || (!panels && !context->tensors && g->m * g->batch[0] * g->batch[1] > MOST_ROWS)) return panels;
    if (!panels) {
        void *expected = NULL;
        panels = allocate(gemm_panel_bytes(g) + TO_ALIGN);
        gemm_panels(g, align64(panels));
        if (!atomic_compare_exchange_strong(context->packed, &expected, panels)) free(panels), panels = expected;
    }
    return align64(panels);
}

/* Return whether to compute C^T = B^T A^T: C is narrow, and columns of A lie together, which are then read in order. */
static int turns(const gemm_product *g) {
    return g->a_strides.row == 1 && g->n <= GEMM_NR && 2 * g->n <= g->m && g->batch[0] * g->batch[1] == 1 && !g->epilogue;
}

/* Return the product whose result is the transpose of another's. */
static gemm_product transposed_product(const gemm_product *g, float *c) {
    gemm_product t = *g;
    t.m = g->n, t.n = g->m, t.a = g->b, t.b = g->a, t.c = c, t.panels = NULL;
    t.a_strides = (gemm_strides){g->b_strides.column, g->b_strides.row, {0, 0}};
    t.b_strides = (gemm_strides){g->a_strides.column, g->a_strides.row, {0, 0}};
    t.c_strides = (gemm_strides){g->m, 1, {0, 0}};
    return t;
}

static OrtStatus *compute_turned(const gemm_product *g) {
    gemm_product t = transposed_product(g, NULL);
    const size_t bytes = ((size_t)(g->m * g->n) * sizeof(float) + 63) / 64 * 64;
    char *memory = borrow(bytes + gemm_scratch(&t));
    if (!memory) return out_of_memory();
    t.c = (float *)memory, t.scratch = memory + bytes;
    gemm(&t);
    for (int64_t i = 0; i < g->m; i++)
        for (int64_t j = 0; j < g->n; j++) g->c[i * g->c_strides.row + j] = t.c[j * g->m + i];
    give_back(memory);
    return NULL;
}

/* Compute the output of the operator from its first two inputs, and add its third input, a bias. */
OrtStatus *product(Context *context, const ProductForm *form) {
    int64_t da[MOST_AXES], db[MOST_AXES], dc[MOST_AXES], la[MOST_AXES], lb[MOST_AXES], logical[MOST_AXES];
    int64_t sa[MOST_AXES], sb[MOST_AXES], sc[MOST_AXES], strides_a[MOST_AXES], strides_b[MOST_AXES], strides_c[MOST_AXES];
    gemm_product g = {0};
    Weight weight = {0};
    memcpy(g.is_narrow, form->is_narrow, sizeof g.is_narrow);
    if (g.is_narrow[2] && !HAS_BFLOAT16) return api->CreateStatus(1, "native kernel: expected a processor with bfloat16");
    CHECK(input(context, 0, &g.a, da, form->rank_a));
    if (form->weight.bits) {
        CHECK(find_weight(context, &form->weight, form->rank_bias < 0 ? 2 : 3, &weight));
        db[0] = form->weight.rows, db[1] = form->weight.columns;
        weight.is_transposed = form->b[0] == 1;
        g.source = fill_panel, g.source_user = &weight;
    } else CHECK(input(context, 1, &g.b, db, form->rank_b));
    const int rank = form->rank_c;
    strides_of(form->rank_a, da, strides_a), strides_of(form->rank_b, db, strides_b);
    for (int i = 0; i < rank; i++) {
        const int ia = i - (rank - form->rank_a), ib = i - (rank - form->rank_b);
        la[i] = ia < 0 ? 1 : da[form->a[ia]], sa[i] = la[i] == 1 ? 0 : strides_a[form->a[ia]];
        lb[i] = ib < 0 ? 1 : db[form->b[ib]], sb[i] = lb[i] == 1 ? 0 : strides_b[form->b[ib]];
    }
    g.m = la[rank - 2], g.k = la[rank - 1], g.n = lb[rank - 1];
    if (lb[rank - 2] != g.k) return unlike();
    for (int i = 0; i < rank - 2; i++) {
        if (la[i] != lb[i] && la[i] != 1 && lb[i] != 1) return unlike();
        logical[i] = la[i] == 1 ? lb[i] : la[i];
    }
    logical[rank - 2] = g.m, logical[rank - 1] = g.n;
    for (int i = 0; i < rank; i++) dc[i] = logical[form->c[i]];
    CHECK(output(context, 0, &g.c, dc, rank));
    strides_of(rank, dc, strides_c);
    for (int i = 0; i < rank; i++) sc[form->c[i]] = strides_c[i];
    g.a_strides.row = sa[rank - 2], g.a_strides.column = sa[rank - 1];
    g.b_strides.row = sb[rank - 2], g.b_strides.column = sb[rank - 1];
    g.c_strides.row = sc[rank - 2], g.c_strides.column = 1;
    Bias bias = {.to = &g};
    if (form->rank_bias >= 0) {
        int64_t d[MOST_AXES];
        CHECK(input(context, 2, &bias.bias, d, form->rank_bias));
        int64_t columns = form->rank_bias > 0 ? d[form->rank_bias - 1] : 1;
        int64_t rows = form->rank_bias > 1 ? d[form->rank_bias - 2] : 1;
        if (form->is_bias_transposed) rows = columns, columns = 1;
        if ((columns != 1 && columns != g.n) || (rows != 1 && rows != g.m)) return unlike();
        bias.row = rows == 1 ? 0 : columns, bias.column = columns != 1;
        g.epilogue = add_bias, g.user = &bias;
    }
    int outer = rank - 2;
    /* Products whose rows lie one after the other, and that have B in common, are rows of one product. */
    while (outer > 0 && !bias.row && (logical[outer - 1] == 1 || (sb[outer - 1] == 0 &&
           sa[outer - 1] == g.m * g.a_strides.row && sc[outer - 1] == g.m * g.c_strides.row)))
        g.m *= logical[--outer];
    g.batch[0] = g.batch[1] = 1;
    for (int i = 0; i < outer; i++) {
        const int at = i + 2 - outer;
        g.batch[at] = logical[i];
        g.a_strides.batch[at] = sa[i], g.b_strides.batch[at] = sb[i], g.c_strides.batch[at] = sc[i];
    }
    g.threads = context->ort ? thread_count : 1, g.parallel_for = run_parallel, g.pool = context;
    g.pieces = pieces_for(&g, context->packed != NULL);
    if (!g.source && !g.is_narrow[2] && turns(&g)) return compute_turned(&g);
    /* B is packed once if it is the same in all calls, or if all products of a call have it and it is transposed. */
    const int common = !g.source && !g.b_strides.batch[0] && !g.b_strides.batch[1];
    if (common) g.panels = kept_panels(context, &g);
    const int packs = common && !g.panels && g.b_strides.column != 1 && g.batch[0] * g.batch[1] > 1;
    const size_t panels = packs ? gemm_panel_bytes(&g) + TO_ALIGN : 0;
    char *memory = borrow(panels + gemm_scratch(&g));
    if (!memory) return out_of_memory();
    g.scratch = memory + panels;
    if (packs) {
        gemm_panels(&g, align64(memory));
        g.panels = align64(memory);
    }
    gemm(&g);
    give_back(memory);
    return NULL;
}

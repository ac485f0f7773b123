/* Kernels call products and convolutions, which are compiled once for a machine, and not for each model. */
#pragma once
#include "ort.h"

/* A matrix of integers of 4 or 8 bits, and how it is dequantized: the number in row r and column c has scale
 * r / row_block * row_step + c / column_block, and the zero point there. `pitch` elements lie from one row to the next. */
typedef struct {
    int bits, is_signed; /* 0 bits stand for a matrix of floats, which has no such form */
    int rank, rank_scale, rank_zero; /* as they are stored; -1 without zero points */
    int64_t rows, columns, pitch, row_block, row_step, column_block;
} WeightForm;

/* The axes of operands and of the result may be stored in another order: `a[i]` is the stored axis that axis i of A is. */
typedef struct {
    int rank_a, rank_b, rank_c;
    unsigned char a[MOST_AXES], b[MOST_AXES], c[MOST_AXES];
    int rank_bias;      /* -1 without a bias */
    int is_bias_transposed; /* the last axis of the bias, a vector, is the rows of C */
    int is_narrow[3];       /* A, B or C is an array of bfloat16 numbers */
    WeightForm weight;      /* of operand B; scales and zero points are the last inputs */
} ProductForm;

/* This is what the graph says of a convolution. The axes of x and y are images, channels and space, those of w are
 * filters, channels and space. Gradients of a kernel by `each` example have examples as channels, which are not added, and
 * the sizes of the kernel in `more`, and y is stored as [examples, 1, filters, images and space]. */
typedef struct {
    int rank_x, rank_w, rank_y, axes;
    signed char x[5], w[5]; /* the stored axis of each axis, or -1 if it has size 1 */
    signed char y[5];       /* the axis of each stored axis, or -1 */
    int strides[3], dilations[3], begin[3], end[3];
    int more[3]; /* output padding */
    int groups, transposed, biased, relu, each;
} ConvolutionForm;

/* What a step does to the scores of attention: multiply them by a number, add a tensor, or keep or drop those where a
 * tensor of truth values says, in whose place it puts the number. */
enum { SCALED, ADDED, KEPT, DROPPED, MOST_STEPS = 4 };

/* A step with the ranks of its tensor and of the scores as it sees them. Their sizes are numbers, or -1 - (i MOST_AXES + j)
 * for the size of axis j of input i. */
typedef struct {
    int kind, rank, view;
    float number;
    int64_t sizes[MOST_AXES];
} ScoreStep;

/* The axes of operands, all of one rank, and of results may be stored in another order, as those of products. */
typedef struct {
    int rank;
    unsigned char q[MOST_AXES], k[MOST_AXES], v[MOST_AXES], dy[MOST_AXES], results[3][MOST_AXES];
    int is_gradient, wanted[3]; /* whether it computes gradients, and of which of q, k and v */
    int is_safe;                /* rows of NaN become 0 */
    int cut, cut_results;       /* the stored axis along which q, k and v, or their gradients, are thirds of one tensor; or -1 */
    int steps;
    ScoreStep step[MOST_STEPS];
} AttentionForm;

/* How fast a processor is: seconds of a thread. */
typedef struct {
    double copy;                /* of a number that is copied */
    double multiplication;      /* in float32 */
    double tile_multiplication; /* in tiles of bfloat16 numbers */
    double start;               /* of a task */
} Rates;

/* Before the other calls, set ONNX Runtime's functions, the number of threads that share a product, and how many bfloat16
 * numbers stand for a number of its operands; 0 keeps float32. The rates by which convolutions choose an algorithm are
 * those that were measured on this machine, or, if that is NULL, those of rates.h. */
void begin_products(const OrtApi *functions, int64_t threads, int pieces, const Rates *measured);
OrtStatus *product(Context *context, const ProductForm *form);
OrtStatus *attention(Context *context, const AttentionForm *form);
OrtStatus *convolution(Context *context, const ConvolutionForm *form);

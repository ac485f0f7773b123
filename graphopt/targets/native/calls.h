/* Products and convolutions, which kernels call. They are compiled once for a machine, apart from the kernels of a model. */
#pragma once
#include "ort.h"

#define MOST_AXES 4

/* Where the axes of operands and of the result lie: `a[i]` is the stored axis that axis i of A is. */
typedef struct {
    int rank_a, rank_b, rank_c;
    unsigned char a[MOST_AXES], b[MOST_AXES], c[MOST_AXES];
    int rank_bias;      /* -1 without a bias */
    int is_bias_turned; /* the last axis of the bias, a vector, is the rows of C */
} ProductForm;

/* What the graph says of a convolution. Axes are: images, channels, space; of the kernel: filters, channels, space. */
typedef struct {
    int rank_x, rank_w, rank_y, axes;
    signed char x[5], w[5]; /* the stored axis of each axis, or -1 if it has size 1 */
    signed char y[5];       /* the axis of each stored axis, or -1 */
    int strides[3], dilations[3], begin[3], end[3], more[3], groups;
    int transposed, biased, relu;
} ConvolutionForm;

/* To be called before the others, with ONNX Runtime's functions and the number of threads that share a product. */
void begin_products(const OrtApi *functions, int64_t threads);
OrtStatus *product(Context *context, const ProductForm *form);
OrtStatus *convolution(Context *context, const ConvolutionForm *form);

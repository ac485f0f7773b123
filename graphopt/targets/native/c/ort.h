/* Declare the part of ONNX Runtime's C API that generated kernels call. The API is a table of functions, to which
 * releases only append. Version 19 is that of ONNX Runtime 1.19. */
#pragma once
#include <math.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#ifdef _WIN32
#define EXPORT __declspec(dllexport)
#else
#define EXPORT __attribute__((visibility("default")))
#endif

#define API_VERSION 19
#define UNUSED(first, last) void *unused_##first[(last) - (first) + 1]

typedef struct OrtStatus OrtStatus;
typedef struct OrtValue OrtValue;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtCustomOpDomain OrtCustomOpDomain;
typedef struct OrtKernelContext OrtKernelContext;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef struct OrtCustomOp OrtCustomOp;
typedef void (*task_t)(void *user, size_t index);

typedef struct {
    OrtStatus *(*CreateStatus)(int code, const char *message);
    UNUSED(1, 25);
    OrtStatus *(*CreateCustomOpDomain)(const char *name, OrtCustomOpDomain **);
    OrtStatus *(*CustomOpDomain_Add)(OrtCustomOpDomain *, const OrtCustomOp *);
    OrtStatus *(*AddCustomOpDomain)(OrtSessionOptions *, OrtCustomOpDomain *);
    UNUSED(29, 50);
    OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
    UNUSED(52, 60);
    OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
    OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
    UNUSED(63, 64);
    OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **);
    UNUSED(66, 89);
    OrtStatus *(*KernelContext_GetInput)(const OrtKernelContext *, size_t, const OrtValue **);
    OrtStatus *(*KernelContext_GetOutput)(OrtKernelContext *, size_t, const int64_t *, size_t, OrtValue **);
    UNUSED(92, 92);
    void (*ReleaseStatus)(OrtStatus *);
    UNUSED(94, 98);
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
    UNUSED(100, 248);
    OrtStatus *(*KernelInfoGetConstantInput_tensor)(const void *info, size_t, int *is_constant, const OrtValue **);
    UNUSED(250, 273);
    OrtStatus *(*KernelContext_ParallelFor)(const OrtKernelContext *, task_t, size_t total, size_t batches, void *);
} OrtApi;

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;

struct OrtCustomOp {
    uint32_t version;
    void *CreateKernel;
    const char *(*GetName)(const OrtCustomOp *);
    const char *(*GetExecutionProviderType)(const OrtCustomOp *);
    int (*GetInputType)(const OrtCustomOp *, size_t);
    size_t (*GetInputTypeCount)(const OrtCustomOp *);
    int (*GetOutputType)(const OrtCustomOp *, size_t);
    size_t (*GetOutputTypeCount)(const OrtCustomOp *);
    void *KernelCompute;
    void (*KernelDestroy)(void *);
    int (*GetInputCharacteristic)(const OrtCustomOp *, size_t);
    int (*GetOutputCharacteristic)(const OrtCustomOp *, size_t);
    int (*GetInputMemoryType)(const OrtCustomOp *, size_t);
    int (*GetVariadicInputMinArity)(const OrtCustomOp *);
    int (*GetVariadicInputHomogeneity)(const OrtCustomOp *);
    int (*GetVariadicOutputMinArity)(const OrtCustomOp *);
    int (*GetVariadicOutputHomogeneity)(const OrtCustomOp *);
    OrtStatus *(*CreateKernelV2)(const OrtCustomOp *, const OrtApi *, const void *info, void **kernel);
    OrtStatus *(*KernelComputeV2)(void *kernel, OrtKernelContext *);
    void *InferOutputShapeFn;
    int (*GetStartVersion)(const OrtCustomOp *);
    int (*GetEndVersion)(const OrtCustomOp *);
    size_t (*GetMayInplace)(int **, int **);
    void (*ReleaseMayInplace)(int *, int *);
    void *GetAliasMap;
    void *ReleaseAliasMap;
};

/* A tensor of a kernel that calls others. */
typedef struct {
    void *data;
    const int64_t *dims;
    size_t rank;
} Tensor;

/* A kernel is called with ONNX Runtime's context and, if another kernel calls it, the tensors of that kernel. */
typedef struct {
    OrtKernelContext *ort;       /* or NULL, within a task */
    const Tensor *tensors;       /* or NULL */
    const int *inputs, *outputs; /* their places among the tensors */
    void *_Atomic *packed;       /* or NULL; where a product whose second operand stays the same keeps it packed */
} Context;

/* A kernel is the operator that ONNX Runtime knows, followed by its description. */
typedef struct {
    OrtCustomOp op;
    const char *name;
    const unsigned char *types; /* of inputs, then of outputs, as ONNX numbers them */
    size_t inputs, outputs;
    OrtStatus *(*compute)(Context *);
} Kernel;

/* A node of a session calls a kernel. */
typedef struct {
    const Kernel *kernel;
    int is_frozen; /* the second input is a weight that stays the same */
    void *_Atomic packed;
} Node;

extern const OrtApi *api; /* the library defines it */

#define CHECK(call)                    \
    do {                               \
        OrtStatus *failed = (call);    \
        if (failed) return failed;     \
    } while (0)

static const char *name_of(const OrtCustomOp *op) { return ((const Kernel *)op)->name; }
static const char *provider_of(const OrtCustomOp *op) { return (void)op, NULL; }
static int input_type(const OrtCustomOp *op, size_t i) { return ((const Kernel *)op)->types[i]; }
static size_t input_count(const OrtCustomOp *op) { return ((const Kernel *)op)->inputs; }
static int output_type(const OrtCustomOp *op, size_t i) { return ((const Kernel *)op)->types[input_count(op) + i]; }
static size_t output_count(const OrtCustomOp *op) { return ((const Kernel *)op)->outputs; }
static int required(const OrtCustomOp *op, size_t i) { return (void)op, (void)i, 0; }
static int one(const OrtCustomOp *op) { return (void)op, 1; }
static int latest(const OrtCustomOp *op) { return (void)op, 0x7fffffff; }
static void destroy(void *node) {
    free(atomic_load(&((Node *)node)->packed));
    free(node);
}
static OrtStatus *create(const OrtCustomOp *op, const OrtApi *a, const void *info, void **made) {
    const OrtValue *value;
    Node *node = calloc(1, sizeof *node);
    if (!node) return a->CreateStatus(1, "native kernel: out of memory");
    *made = node;
    node->kernel = (const Kernel *)op;
    return input_count(op) < 2 ? NULL : a->KernelInfoGetConstantInput_tensor(info, 1, &node->is_frozen, &value);
}
static OrtStatus *compute(void *made, OrtKernelContext *ort) {
    Node *node = made;
    return node->kernel->compute(&(Context){.ort = ort, .packed = node->is_frozen ? &node->packed : NULL});
}

#define KERNEL(name, types, inputs, outputs)                                                                         \
    {{API_VERSION, NULL, name_of, provider_of, input_type, input_count, output_type, output_count, NULL, destroy,    \
      required, required, required, one, one, one, one, create, compute, NULL, one, latest, NULL, NULL, NULL, NULL}, \
     #name, types, inputs, outputs, compute_##name}

static OrtStatus *register_kernels(OrtSessionOptions *options, const OrtApiBase *base, Kernel *kernels, size_t count) {
    OrtCustomOpDomain *domain; /* the session options keep it for as long as they live */
    api = base->GetApi(API_VERSION);
    CHECK(api->CreateCustomOpDomain("ai.graphopt", &domain));
    for (size_t i = 0; i < count; i++) CHECK(api->CustomOpDomain_Add(domain, &kernels[i].op));
    return api->AddCustomOpDomain(options, domain);
}

/* Find memory, with room to align what lies in it. Under AddressSanitizer, memory begins aligned and ends where its last
 * byte does, so that the sanitizer sees each access beyond it. */
#ifdef __SANITIZE_ADDRESS__
enum { TO_ALIGN = 0 };
static inline void *find_memory(size_t bytes) {
    void *memory;
    return posix_memalign(&memory, 64, bytes ? bytes : 1) ? NULL : memory;
}
#else
enum { TO_ALIGN = 64 };
static inline void *find_memory(size_t bytes) { return malloc(bytes ? bytes : 1); }
#endif
static inline void *align64(void *data) { return (void *)(((uintptr_t)data + 63) / 64 * 64); }

/* Return memory. End the process if there is none, because a task cannot report an error. */
static inline void *allocate(size_t bytes) {
    void *memory = find_memory(bytes);
    if (!memory) {
        fputs("graphopt: a kernel found no memory\n", stderr);
        abort();
    }
    return memory;
}

static OrtStatus *unlike(void) {
    return api->CreateStatus(2, "native kernel: an input has another shape than the graph says");
}

/* Return the data of an input in `data`, and its shape in `dims`. Fail if its rank is another. */
static OrtStatus *input(Context *context, size_t index, void *data, int64_t *dims, size_t rank) {
    const OrtValue *value;
    OrtTensorTypeAndShapeInfo *info;
    size_t found;
    if (context->tensors) {
        const Tensor *x = context->tensors + context->inputs[index];
        if (x->rank != rank) return unlike();
        memcpy(dims, x->dims, rank * sizeof *dims);
        memcpy(data, &x->data, sizeof x->data);
        return NULL;
    }
    CHECK(api->KernelContext_GetInput(context->ort, index, &value));
    CHECK(api->GetTensorMutableData((OrtValue *)value, (void **)data));
    CHECK(api->GetTensorTypeAndShape(value, &info));
    OrtStatus *status = api->GetDimensionsCount(info, &found);
    if (!status && found == rank && rank) status = api->GetDimensions(info, dims, rank);
    api->ReleaseTensorTypeAndShapeInfo(info);
    if (!status && found != rank) status = api->CreateStatus(2, "native kernel: an input has another rank than the graph says");
    return status;
}

/* Return in `data` where an output of a shape is to be written. */
static OrtStatus *output(Context *context, size_t index, void *data, const int64_t *dims, size_t rank) {
    OrtValue *value;
    if (context->tensors) {
        const Tensor *y = context->tensors + context->outputs[index];
        if (y->rank != rank || memcmp(y->dims, dims, rank * sizeof *dims)) return unlike();
        memcpy(data, &y->data, sizeof y->data);
        return NULL;
    }
    CHECK(api->KernelContext_GetOutput(context->ort, index, dims, rank, &value));
    return api->GetTensorMutableData(value, (void **)data);
}

/* Run several tasks on ONNX Runtime's threads, unless a task calls this. */
static inline OrtStatus *in_parallel(Context *context, task_t task, size_t count, void *user) {
    if (context->ort && count > 1) return api->KernelContext_ParallelFor(context->ort, task, count, 0, user);
    for (size_t i = 0; i < count; i++) task(user, i);
    return NULL;
}

// Trains from a folder of graphopt.export_hosts, evaluates, and saves a checkpoint. README.md says how to run it.
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct { OrtSession *session; size_t inputs, outputs; char **input, **output; } Graph;
typedef struct { const char *name; OrtValue *value; size_t size; char *saved, *batches; } Tensor;
static const OrtApi *ort;
static OrtEnv *env;
static OrtAllocator *memory;
static void fail(const char *what, const char *why) { fprintf(stderr, "train: %s: %s\n", what, why), exit(1); }
static void check(OrtStatus *status) { if (status) fail("ONNX Runtime", ort->GetErrorMessage(status)); }

static char *read_file(const char *path, size_t *size) {
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) fail(path, "expected a file");
    char *data = calloc(1, (*size = ftell(file)) + 1);
    rewind(file);
    if (fread(data, 1, *size, file) != *size || fclose(file)) fail(path, "cannot be read");
    return data;
}

static Graph open_graph(const char *path) {
    Graph g;
    check(ort->CreateSession(env, path, NULL, &g.session));
    check(ort->SessionGetInputCount(g.session, &g.inputs));
    check(ort->SessionGetOutputCount(g.session, &g.outputs));
    g.input = calloc(g.inputs, sizeof(char *)), g.output = calloc(g.outputs, sizeof(char *));
    for (size_t i = 0; i < g.inputs; i++) check(ort->SessionGetInputName(g.session, i, memory, &g.input[i]));
    for (size_t i = 0; i < g.outputs; i++) check(ort->SessionGetOutputName(g.session, i, memory, &g.output[i]));
    return g;
}

static void *numbers(OrtValue *value) { void *data; check(ort->GetTensorMutableData(value, &data)); return data; }

// Makes the tensor of an input, with as many rows as `size` bytes have if a dimension is free.
static Tensor tensor(Graph graph, size_t index, size_t size, char *saved, char *batches) {
    static const size_t sizes[17] = {[1] = 4, 1, 1, 2, 2, 4, 8, [9] = 1, 2, 8, 4, 8, [16] = 2};  // of ONNX's types
    Tensor made = {graph.input[index], NULL, size, saved, batches};
    size_t rank;
    OrtTypeInfo *info;
    const OrtTensorTypeAndShapeInfo *described;
    ONNXTensorElementDataType type;
    check(ort->SessionGetInputTypeInfo(graph.session, index, &info));
    check(ort->CastTypeInfoToTensorInfo(info, &described));
    check(ort->GetTensorElementType(described, &type));
    check(ort->GetDimensionsCount(described, &rank));
    int64_t dims[rank + 1], *free = NULL;
    check(ort->GetDimensions(described, dims, rank));
    size_t bytes = sizes[(size_t)type < 17 ? type : 0];
    for (size_t i = 0; i < rank; i++) if (dims[i] < 0) free = &dims[i]; else bytes *= dims[i];
    if (free && bytes) bytes *= *free = size / bytes;
    if (!bytes || bytes != size) fail(made.name, "expected as many bytes as its type and shape need");
    check(ort->CreateTensorAsOrtValue(memory, dims, rank, type, &made.value));
    return made;
}

// Finds the tensor that a graph calls by its name and a suffix.
static Tensor *find(Tensor *known, size_t count, const char *name, const char *suffix) {
    for (Tensor *x = known; x < known + count; x++)
        if (!strncmp(name, x->name, strlen(x->name)) && !strcmp(name + strlen(x->name), suffix)) return x;
    if (!*suffix) fail(name, "expected an input of the training graph");
    return NULL;
}

// Runs a graph: puts the successors of state in the place of state, and returns the loss.
static float run(Graph graph, Tensor *known, size_t count) {
    OrtValue *inputs[graph.inputs], *outputs[graph.outputs];
    float loss = 0;
    memset(outputs, 0, sizeof outputs);
    for (size_t i = 0; i < graph.inputs; i++) inputs[i] = find(known, count, graph.input[i], "")->value;
    check(ort->Run(graph.session, NULL, (const char *const *)graph.input, (const OrtValue *const *)inputs, graph.inputs,
                   (const char *const *)graph.output, graph.outputs, outputs));
    for (size_t i = 0; i < graph.outputs; i++) {
        Tensor *state = find(known, count, graph.output[i], ".next");
        if (!strcmp(graph.output[i], "loss")) loss = *(float *)numbers(outputs[i]);
        ort->ReleaseValue(state ? state->value : outputs[i]);
        if (state) state->value = outputs[i];
    }
    return loss;
}

int main(int argc, char **argv) {
    if (argc != 7) fail("usage", "train TRAIN.onnx EVALUATE.onnx STATE BATCHES STEPS SAVED");
    if (!(ort = OrtGetApiBase()->GetApi(ORT_API_VERSION))) fail("ONNX Runtime", "expected one as new as its header");
    check(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "train", &env));
    check(ort->GetAllocatorWithDefaultOptions(&memory));
    size_t size, bytes, steps = strtoul(argv[5], NULL, 10);
    char *state = read_file(argv[3], &size), *end = state + size;  // 8 bytes: size of a header in JSON; it; numbers
    if (size < 8 || *(uint64_t *)state > size - 8 || !steps) fail(argv[3], "expected a safetensors file, and steps");
    char *first = state + 8 + *(uint64_t *)state;
    const Graph train = open_graph(argv[1]), evaluate = open_graph(argv[2]);
    Tensor known[train.inputs];
    for (size_t i = 0; i < train.inputs; i++) {
        char text[4096], *entry;
        snprintf(text, sizeof text, "\"%s\":{", train.input[i]);
        if ((entry = strstr(state + 8, text)) && (entry = strstr(entry, "\"data_offsets\":["))) {
            char *begin = first + strtoul(entry + 16, &entry, 10);
            bytes = first + strtoul(entry + 1, NULL, 10) - begin;
            if (begin > end || bytes > (size_t)(end - begin)) fail(argv[3], "expected all numbers of its header");
            known[i] = tensor(train, i, bytes, begin, NULL);
            memcpy(numbers(known[i].value), begin, bytes);
        } else {
            snprintf(text, sizeof text, "%s/%s.bin", argv[4], train.input[i]);
            char *batches = read_file(text, &bytes);
            known[i] = tensor(train, i, bytes / steps, NULL, batches);
        }
    }
    for (size_t step = 0; step < steps; step++) {
        for (Tensor *x = known; x < known + train.inputs; x++)
            if (x->batches) memcpy(numbers(x->value), x->batches + step * x->size, x->size);
        printf("%.9g\n", run(train, known, train.inputs));
    }
    printf("%.9g\n", run(evaluate, known, train.inputs));
    for (Tensor *x = known; x < known + train.inputs; x++)
        if (x->saved) memcpy(x->saved, numbers(x->value), x->size);
    FILE *file = fopen(argv[6], "wb");
    if (!file || fwrite(state, 1, size, file) != size || fclose(file)) fail(argv[6], "cannot be written");
}

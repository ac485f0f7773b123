#include "graphopt.h"

#include <math.h>
#include <onnxruntime_c_api.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#define CHECK "graphopt.check"  // the output that is finite only if the loss and the new state are
#define TRY(call) do { GraphoptCode code_ = (call); if (code_) return code_; } while (0)
#define RUN(call) TRY(checked(call))
enum { FLOAT = 1, INT64 = 7, FLOAT16 = 10, DOUBLE = 11, BFLOAT16 = 16, RANK = 16, TYPES = 17 };

/* ONNX's types by number: their names in NumPy and in safetensors, and the bytes of one number, of which C feeds some. */
static const struct { const char *name, *stored; size_t bytes; } types[TYPES] = {
    [0] = {"no tensor of numbers", "", 0}, [1] = {"float32", "F32", 4}, [2] = {"uint8", "U8", 1}, [3] = {"int8", "I8", 1},
    [4] = {"uint16", "U16", 2}, [5] = {"int16", "I16", 2}, [6] = {"int32", "I32", 4}, [7] = {"int64", "I64", 8},
    [8] = {"text", "", 0}, [9] = {"bool", "BOOL", 1}, [10] = {"float16", "F16", 2}, [11] = {"float64", "F64", 8},
    [12] = {"uint32", "U32", 4}, [13] = {"uint64", "U64", 8}, [14] = {"complex64", "", 0}, [15] = {"complex128", "", 0},
    [16] = {"bfloat16", "BF16", 2}};

typedef struct {
    const char *file;
    OrtSession *session;
    size_t inputs, outputs;
    char **input, **output;
    OrtValue **given, **made;        // of a run
} Graph;

typedef struct {
    const char *name;
    ONNXTensorElementDataType type;  // below TYPES
    size_t rank, bytes;              // bytes of one number
    int64_t dims[RANK];              // -1 where a size is open
    const char *symbols[RANK];       // names of open sizes
    int64_t sizes[RANK];             // of the value
    OrtValue *value;                 // NULL until it is fed
    OrtTypeInfo *info;               // owns the names
    int is_state, is_replaced;       // whether an output has its next numbers
    int is_proof;                    // whether it has the numbers of a proof
    size_t offset, length;           // of a state, in the file of the state
    double low, high, ignored;       // labels; NaN: none
} Input;

struct GraphoptTrainer {
    OrtEnv *env;
    Graph train, evaluate, adapter;  // the last one is open only if it has computed an adapter's numbers
    Input *input;
    char *folder, *host, *state;     // the last two are the files
    size_t size, steps;              // of the file of the state; done
    int is_wrong;                    // whether the runtime computes other numbers than the proof has
};

static const OrtApi *ort;
static OrtAllocator *memory;
static _Thread_local char message[512];

const char *graphopt_message(void) { return message; }

static GraphoptCode fail(GraphoptCode code, const char *format, ...) {
    va_list given;
    va_start(given, format);
    vsnprintf(message, sizeof message, format, given);
    va_end(given);
    for (char *c = message; *c; c++) if ((unsigned char)*c < ' ' || *c == 127) *c = ' ';
    return code;
}

static GraphoptCode checked(OrtStatus *status) {
    if (!status) return GRAPHOPT_OK;
    fail(GRAPHOPT_RUNTIME, "ONNX Runtime: %s", ort->GetErrorMessage(status));
    ort->ReleaseStatus(status);
    return GRAPHOPT_RUNTIME;
}

static GraphoptCode read_file(const char *folder, const char *name, char **data, size_t *size) {
    char path[4096];
    long end;
    struct stat about;
    int length = snprintf(path, sizeof path, "%s%s%s", folder, *folder ? "/" : "", name);
    if (length >= (int)sizeof path) return fail(GRAPHOPT_FILE, "%.40s...: expected a shorter path, found %d bytes", path, length);
    if (!stat(path, &about) && !S_ISREG(about.st_mode)) return fail(GRAPHOPT_FILE, "%s: expected a file, found none: write it with export_hosts", path);
    FILE *file = fopen(path, "rb");
    if (!file) return fail(GRAPHOPT_FILE, "%s: expected a file, found none: write it with export_hosts", path);
    if (fseek(file, 0, SEEK_END) || (end = ftell(file)) < 0 || !(*data = calloc(1, (size_t)end + 1)))
        return fclose(file), fail(GRAPHOPT_FILE, "%s: expected a file that can be read", path);
    rewind(file);
    *size = fread(*data, 1, (size_t)end, file);
    fclose(file);
    if (*size == (size_t)end) return GRAPHOPT_OK;
    free(*data), *data = NULL;
    return fail(GRAPHOPT_FILE, "%s: expected a file that can be read", path);
}

/* Finds the value of a field of the entry with a name, in a list of host.json. */
static const char *field(const char *host, const char *list, const char *name, const char *key) {
    char text[4096];
    snprintf(text, sizeof text, "\"%s\": [", list);
    const char *found = strstr(host, text), *end;
    snprintf(text, sizeof text, "\"name\": \"%s\"", name);
    if (!found || !(found = strstr(found, text)) || !(end = strchr(found + strlen(text), '}'))) return NULL;
    snprintf(text, sizeof text, "\"%s\": ", key);
    found = strstr(found, text);
    return found && found < end ? found + strlen(text) : NULL;
}

/* Finds the place of a tensor in a safetensors file: 8 bytes with the size of a header in JSON; it; the numbers. Returns 0
   for none, -1 for one that lies beyond the file or if it is no such file, and -2 for one of another type, or of another
   shape than the input of a graph. */
static int place(const char *file, size_t size, const Input *x, size_t *offset, size_t *length) {
    char text[4096], *entry, *last;
    uint64_t header;
    *offset = *length = 0;
    if (size < 8 || (memcpy(&header, file, 8), header > size - 8)) return -1;
    snprintf(text, sizeof text, "\"%s\":{", x->name);
    if (!(entry = strstr(file + 8, text))) return 0;
    if (!(last = strchr(entry + strlen(text), '}')) || (uint64_t)(last - file - 8) >= header) return -1;
    snprintf(text, sizeof text, "\"dtype\":\"%s\"", types[x->type].stored);
    const char *type = strstr(entry, text), *offsets = strstr(entry, "\"data_offsets\":[");
    if (!type || type > last) return -2;
    if (x->info) {
        size_t used = (size_t)snprintf(text, sizeof text, "\"shape\":[");
        for (size_t i = 0; i < x->rank; i++) used += (size_t)snprintf(text + used, sizeof text - used, "%s%lld", i ? "," : "", (long long)x->dims[i]);
        snprintf(text + used, sizeof text - used, "]");
        const char *sizes = strstr(entry, text);
        if (!sizes || sizes > last) return -2;
    }
    if (!offsets || offsets > last) return -1;
    uint64_t begin = strtoull(offsets + 16, &entry, 10), end = *entry == ',' ? strtoull(entry + 1, NULL, 10) : 0;
    if (begin > end || end > size - 8 - header) return -1;
    *offset = (size_t)(8 + header + begin), *length = (size_t)(end - begin);
    return 1;
}

#define PLANNED 19  /* from this minor version on, the memory that ONNX Runtime plans from a first run does not overlap */

static int minor(void) {
    return atoi(OrtGetApiBase()->GetVersionString() + 2);
}

/* Opens a file, or the content of one if it is given, whose weights may lie in the folder. */
static GraphoptCode open_graph(OrtEnv *env, const char *folder, const char *name, const char *content, size_t size, Graph *g) {
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    g->file = name;
    OrtSessionOptions *options;
    RUN(ort->CreateSessionOptions(&options));
    GraphoptCode code = minor() < PLANNED ? checked(ort->DisableMemPattern(options)) : GRAPHOPT_OK;
    if (!code && content) code = checked(ort->AddSessionConfigEntry(options, "session.model_external_initializers_file_folder_path", folder));
    if (!code)
        code = checked(content ? ort->CreateSessionFromArray(env, content, size, options, &g->session) : ort->CreateSession(env, path, options, &g->session));
    ort->ReleaseSessionOptions(options);
    TRY(code);
    RUN(ort->SessionGetInputCount(g->session, &g->inputs));
    RUN(ort->SessionGetOutputCount(g->session, &g->outputs));
    g->input = calloc(g->inputs + 1, sizeof(char *)), g->output = calloc(g->outputs + 1, sizeof(char *));
    g->given = calloc(g->inputs + 1, sizeof(OrtValue *)), g->made = calloc(g->outputs + 1, sizeof(OrtValue *));
    if (!g->input || !g->output || !g->given || !g->made) return fail(GRAPHOPT_RUNTIME, "memory: expected more");
    for (size_t i = 0; i < g->inputs; i++) RUN(ort->SessionGetInputName(g->session, i, memory, &g->input[i]));
    for (size_t i = 0; i < g->outputs; i++) RUN(ort->SessionGetOutputName(g->session, i, memory, &g->output[i]));
    return GRAPHOPT_OK;
}

/* Writes the type and the shape of an input to a text. */
static const char *shape(const Input *x, char *text, size_t room) {
    size_t used = (size_t)snprintf(text, room, "%s [", types[x->type].name);
    for (size_t i = 0; i < x->rank && used < room; i++) {
        char number[24];
        snprintf(number, sizeof number, "%lld", (long long)x->dims[i]);
        const char *size = x->dims[i] >= 0 ? number : x->symbols[i] && *x->symbols[i] ? x->symbols[i] : "?";
        used += (size_t)snprintf(text + used, room - used, "%s%s", i ? "," : "", size);
    }
    if (used < room) snprintf(text + used, room - used, "]");
    return text;
}

/* Reads a type and sizes, -1 for those that are open; type 0 for what is no tensor that C can read. */
static GraphoptCode read_shape(const OrtTensorTypeAndShapeInfo *found, Input *x) {
    x->type = 0, x->rank = 0;
    if (!found) return GRAPHOPT_OK;
    RUN(ort->GetTensorElementType(found, &x->type));
    RUN(ort->GetDimensionsCount(found, &x->rank));
    if (x->type < 0 || x->type >= TYPES || x->rank > RANK) x->type = 0, x->rank = 0;
    x->bytes = types[x->type].bytes;
    RUN(ort->GetDimensions(found, x->dims, x->rank));
    return GRAPHOPT_OK;
}

/* Checks that an input has the type and the shape that host.json says. */
static GraphoptCode check_described(const GraphoptTrainer *t, const Input *x) {
    const char *type = field(t->host, "feeds", x->name, "type"), *sizes = field(t->host, "feeds", x->name, "shape");
    const char *own = types[x->type].name;
    char text[256], *end;
    int alike = !type || (!strncmp(type + 1, own, strlen(own)) && type[1 + strlen(own)] == '"');
    if (sizes && *sizes == '[') {
        sizes++;
        for (size_t i = 0; alike && i < x->rank; i++) {
            sizes += strspn(sizes, ", \n");
            const long long size = strtoll(sizes, &end, 10);
            alike = end > sizes ? size == x->dims[i] : x->dims[i] < 0 && (*sizes == '"' || *sizes == 'n');
            if (end == sizes && *sizes == '"') end += 1 + strcspn(sizes + 1, "\""), end += *end == '"';
            else if (end == sizes) end += strspn(sizes, "nul");
            sizes = end;
        }
        alike = alike && sizes[strspn(sizes, " \n")] == ']';
    }
    if (alike) return GRAPHOPT_OK;
    return fail(GRAPHOPT_FILE, "host.json: %s: expected %s as in train.onnx, found another type or shape: write it with export_hosts",
                x->name, shape(x, text, sizeof text));
}

static GraphoptCode describe(const GraphoptTrainer *t, size_t index, Input *x) {
    const OrtTensorTypeAndShapeInfo *described = NULL;
    x->name = t->train.input[index];
    RUN(ort->SessionGetInputTypeInfo(t->train.session, index, &x->info));
    RUN(ort->CastTypeInfoToTensorInfo(x->info, &described));
    TRY(read_shape(described, x));
    if (!x->bytes) return fail(GRAPHOPT_FILE, "%s: expected numbers of %d axes at most: C cannot feed it", x->name, RANK);
    RUN(ort->GetSymbolicDimensions(described, x->symbols, x->rank));
    TRY(check_described(t, x));
    const char *labels = field(t->host, "feeds", x->name, "labels"), *ignored = field(t->host, "feeds", x->name, "ignored");
    char *next;
    x->low = x->high = x->ignored = NAN;
    if (labels) x->low = strtod(labels + 1, &next), x->high = strtod(next + strspn(next, ", \n"), NULL);
    if (ignored) x->ignored = strtod(ignored, NULL);
    return GRAPHOPT_OK;
}

static Input *find(GraphoptTrainer *t, const char *name, size_t length) {
    for (Input *x = t->input; x < t->input + t->train.inputs; x++)
        if (strlen(x->name) == length && !strncmp(x->name, name, length)) return x;
    return NULL;
}

/* Checks the numbers of labels and of hyperparameters. */
static GraphoptCode check_numbers(const GraphoptTrainer *t, const Input *x, const void *numbers, size_t bytes) {
    size_t length = strlen(x->name);
    int is_rate = length >= 13 && !strcmp(x->name + length - 13, "learning_rate");
    if (x->type == FLOAT && bytes == 4 && field(t->host, "hyperparameters", x->name, "default")) {
        float number = *(const float *)numbers;
        if (!isfinite(number) || (is_rate && number < 0))
            return fail(GRAPHOPT_FEED, "%s: expected a finite number%s, found %g", x->name, is_rate ? ", 0 or more" : "", number);
    }
    for (size_t i = 0; !isnan(x->low) && i < bytes / x->bytes && (x->type == INT64 || x->type == FLOAT); i++) {
        double label = x->type == INT64 ? (double)((const int64_t *)numbers)[i] : ((const float *)numbers)[i];
        if (!(label >= x->low && label <= x->high) && label != x->ignored)
            return fail(GRAPHOPT_FEED, "%s: expected labels %g to %g, found %g", x->name, x->low, x->high, label);
    }
    return GRAPHOPT_OK;
}

GraphoptCode graphopt_feed(GraphoptTrainer *t, const char *name, const void *numbers, size_t bytes, const int64_t *dims) {
    Input *x = find(t, name, strlen(name));
    char text[256];
    int64_t sizes[RANK + 1] = {0};
    size_t count = 1, open = 0;
    if (!x || x->is_state) return fail(GRAPHOPT_FEED, "%s: expected a feed or a hyperparameter in host.json, found none", name);
    shape(x, text, sizeof text);
    if (!numbers) return fail(GRAPHOPT_FEED, "%s: expected %s, found no numbers", name, text);
    for (size_t i = 0; i < x->rank; i++) {
        sizes[i] = dims ? dims[i] : x->dims[i];
        if (dims && (dims[i] < 1 || (x->dims[i] >= 0 && dims[i] != x->dims[i])))
            return fail(GRAPHOPT_FEED, "%s: expected %s, found %lld at axis %zu", name, text, (long long)dims[i], i);
        if (sizes[i] < 0) open++;
        else if (sizes[i] && count > SIZE_MAX / (size_t)sizes[i]) count = 0;
        else count *= (size_t)sizes[i];
    }
    if (open > 1)
        return fail(GRAPHOPT_FEED, "%s: expected the sizes of %s, of which %zu are open, found none: pass dims", name, text, open);
    if (count > SIZE_MAX / x->bytes) count = 0;
    if (open && count && bytes && !(bytes % (count * x->bytes))) {
        for (size_t i = 0; i < x->rank; i++) if (sizes[i] < 0) sizes[i] = (int64_t)(bytes / (count * x->bytes));
    } else if (!count || open || count * x->bytes != bytes) {
        const char *unit = open ? " a row" : "";
        return fail(GRAPHOPT_FEED, "%s: expected %zu bytes%s, of %s, found %zu", name, count * x->bytes, unit, text, bytes);
    }
    TRY(check_numbers(t, x, numbers, bytes));
    if (!x->value || memcmp(sizes, x->sizes, sizeof x->sizes)) {
        OrtValue *made = NULL;
        RUN(ort->CreateTensorAsOrtValue(memory, sizes, x->rank, x->type, &made));
        if (x->value) ort->ReleaseValue(x->value);
        x->value = made;
        memcpy(x->sizes, sizes, sizeof x->sizes);
    }
    void *data;
    RUN(ort->GetTensorMutableData(x->value, &data));
    memcpy(data, numbers, bytes);
    return GRAPHOPT_OK;
}

/* Checks that all inputs of a graph are fed, and that sizes of one name are equal. */
static GraphoptCode check_feeds(GraphoptTrainer *t, const Graph *g) {
    for (size_t i = 0; i < g->inputs; i++) {
        Input *x = find(t, g->input[i], strlen(g->input[i]));
        char text[256];
        if (!x) return fail(GRAPHOPT_FILE, "%s: expected an input of the training graph, found none", g->input[i]);
        if (!x->value) return fail(GRAPHOPT_FEED, "%s: expected %s, found nothing: feed it", x->name, shape(x, text, sizeof text));
        for (size_t j = 0; j < i; j++) {
            Input *y = find(t, g->input[j], strlen(g->input[j]));
            for (size_t a = 0; a < x->rank; a++) for (size_t b = 0; b < y->rank; b++) {
                if (x->dims[a] >= 0 || y->dims[b] >= 0 || !*x->symbols[a] || strcmp(x->symbols[a], y->symbols[b])) continue;
                if (x->sizes[a] != y->sizes[b])
                    return fail(GRAPHOPT_FEED, "%s: expected the same %s as in %s, %lld, found %lld", x->name, x->symbols[a],
                                y->name, (long long)y->sizes[b], (long long)x->sizes[a]);
            }
        }
    }
    return GRAPHOPT_OK;
}

/* Finds the state that an output NAME.next replaces. */
static Input *state_of(GraphoptTrainer *t, const char *output) {
    size_t length = strlen(output);
    Input *x = length > 5 && !strcmp(output + length - 5, ".next") ? find(t, output, length - 5) : NULL;
    return x && x->is_state ? x : NULL;
}

/* Checks an output that this program reads: the loss and the check are one number, and new numbers of a state are like the
   old ones. When a folder is opened, sizes may be open; they are not after a step. */
static GraphoptCode check_output(GraphoptTrainer *t, const Graph *g, size_t index, const OrtTensorTypeAndShapeInfo *found, int is_open) {
    static const Input number = {.type = FLOAT};
    const char *name = g->output[index];
    int is_number = !strcmp(name, "loss") || !strcmp(name, CHECK);
    const Input *x = is_number ? &number : g == &t->train ? state_of(t, name) : NULL;
    Input y = {.name = name};
    char expected[128], other[128];
    if (!x) return GRAPHOPT_OK;
    TRY(read_shape(found, &y));
    int alike = y.type == x->type && (is_number || y.rank == x->rank);
    for (size_t i = 0; alike && i < y.rank; i++)
        alike = y.dims[i] == (is_number ? 1 : x->dims[i]) || (is_open && y.dims[i] < 0);
    if (alike) return GRAPHOPT_OK;
    return fail(GRAPHOPT_FILE, "%s: output %s: expected %s, found %s: write it with export_hosts", g->file, name,
                shape(x, expected, sizeof expected), shape(&y, other, sizeof other));
}

/* Checks all outputs of a graph when it is opened. */
static GraphoptCode check_outputs(GraphoptTrainer *t, const Graph *g) {
    int has_loss = 0;
    for (size_t i = 0; i < g->outputs; i++) {
        OrtTypeInfo *info;
        const OrtTensorTypeAndShapeInfo *found = NULL;
        RUN(ort->SessionGetOutputTypeInfo(g->session, i, &info));
        GraphoptCode code = checked(ort->CastTypeInfoToTensorInfo(info, &found));
        if (!code) code = check_output(t, g, i, found, 1);
        ort->ReleaseTypeInfo(info);
        TRY(code);
        Input *x = state_of(t, g->output[i]);
        if (x) x->is_replaced = 1;
        if (!strcmp(g->output[i], "loss")) has_loss = 1;
    }
    if (!has_loss) return fail(GRAPHOPT_FILE, "%s: expected an output loss, found none: write it with export_hosts", g->file);
    for (Input *x = t->input; g == &t->train && x < t->input + g->inputs; x++)
        if (x->is_state && !x->is_replaced)
            return fail(GRAPHOPT_FILE, "%s: expected an output %s.next, found none: write it with export_hosts", g->file, x->name);
    return GRAPHOPT_OK;
}

/* Checks what a step has computed, before any of it is read. */
static GraphoptCode check_made(GraphoptTrainer *t, const Graph *g) {
    for (size_t i = 0; i < g->outputs; i++) {
        OrtTensorTypeAndShapeInfo *found = NULL;
        OrtStatus *status = ort->GetTensorTypeAndShape(g->made[i], &found);
        if (status) ort->ReleaseStatus(status), found = NULL;  // a sequence, which nobody may read
        GraphoptCode code = check_output(t, g, i, found, 0);
        if (found) ort->ReleaseTensorTypeAndShapeInfo(found);
        TRY(code);
    }
    return GRAPHOPT_OK;
}

static int is_finite(OrtValue *value, size_t bytes) {
    float *numbers;
    if (checked(ort->GetTensorMutableData(value, (void **)&numbers))) return 0;
    for (size_t i = 0; i < bytes / sizeof(float); i++) if (!isfinite(numbers[i])) return 0;
    return 1;
}

/* Puts the new state in the place of the old one if the step is finite; otherwise says what is not. */
static GraphoptCode adopt(GraphoptTrainer *t, OrtValue **outputs, float loss) {
    const Graph *g = &t->train;
    const char *spoiled = NULL;
    int finite = isfinite(loss);
    for (size_t i = 0; i < g->outputs; i++)
        if (!strcmp(g->output[i], CHECK) && !is_finite(outputs[i], sizeof(float))) finite = 0;
    for (size_t i = 0; !finite && !spoiled && i < g->outputs; i++) {
        Input *x = state_of(t, g->output[i]);
        if (x && x->type == FLOAT && !is_finite(outputs[i], x->length)) spoiled = x->name;
    }
    const char *advice = "the state is as before; look for NaN in the batch, lower the learning rate, or clip gradients";
    if (!isfinite(loss))
        return fail(GRAPHOPT_NOT_FINITE, "step %zu: expected a finite loss, found %g: %s", t->steps, loss, advice);
    if (!finite)
        return fail(GRAPHOPT_NOT_FINITE, "step %zu: expected finite numbers in %s%s, found others, though the loss is finite: %s",
                    t->steps, spoiled ? "state " : "the new state", spoiled ? spoiled : "", advice);
    for (size_t i = 0; i < g->outputs; i++) {
        Input *x = state_of(t, g->output[i]);
        if (!x) continue;
        ort->ReleaseValue(x->value);
        x->value = outputs[i], outputs[i] = NULL;
    }
    t->steps++;
    return GRAPHOPT_OK;
}

/* Computes the outputs of a graph. */
static GraphoptCode compute(GraphoptTrainer *t, const Graph *g) {
    for (size_t i = 0; i < g->outputs; i++) g->made[i] = NULL;
    TRY(check_feeds(t, g));
    for (size_t i = 0; i < g->inputs; i++) g->given[i] = find(t, g->input[i], strlen(g->input[i]))->value;
    return checked(ort->Run(g->session, NULL, (const char *const *)g->input, (const OrtValue *const *)g->given, g->inputs,
                            (const char *const *)g->output, g->outputs, g->made));
}

static GraphoptCode call(GraphoptTrainer *t, const Graph *g) {
    TRY(compute(t, g));
    return check_made(t, g);
}

static void release_made(const Graph *g) {
    for (size_t i = 0; i < g->outputs; i++) if (g->made[i]) ort->ReleaseValue(g->made[i]), g->made[i] = NULL;
}

static GraphoptCode run(GraphoptTrainer *t, const Graph *g, float *loss) {
    float *number, found = NAN;
    GraphoptCode code = call(t, g);
    for (size_t i = 0; !code && i < g->outputs; i++)
        if (!strcmp(g->output[i], "loss") && !(code = checked(ort->GetTensorMutableData(g->made[i], (void **)&number)))) found = *number;
    if (loss) *loss = found;
    if (!code && g == &t->train) code = adopt(t, g->made, found);
    release_made(g);
    return code;
}

static void close_graph(Graph *g) {
    for (size_t i = 0; g->input && i < g->inputs; i++) if (g->input[i]) checked(ort->AllocatorFree(memory, g->input[i]));
    for (size_t i = 0; g->output && i < g->outputs; i++) if (g->output[i]) checked(ort->AllocatorFree(memory, g->output[i]));
    free(g->input), free(g->output), free(g->given), free(g->made);
    if (g->session) ort->ReleaseSession(g->session);
}

/* A proof: a batch, and sums of what the plain step computes of it; see graphopt/hosts/proof.py. */
typedef struct { char *data; size_t size; } File;
enum { COLUMNS = 4, MOST_FED = 1 << 26 };  // of a row: how much the sums of an output may differ, and its sums
enum { SIGNS = 3, BLOCK = 1024, LANES = 8 };  // sums of an output; numbers that are read at once
enum { COMPARISON = 1 };  // another number for each other way to compare: what was remembered is compared anew

/* Finds a part of a file by two words of its name; NULL if it has none. */
static const char *part(const File *file, const char *first, const char *second, ONNXTensorElementDataType type, size_t *length) {
    char name[4096];
    size_t offset;
    Input x = {.name = name, .type = type};
    snprintf(name, sizeof name, "%s.%s", first, second);
    return place(file->data, file->size, &x, &offset, length) == 1 ? file->data + offset : NULL;
}

static double number_at(const char *data, ONNXTensorElementDataType type, size_t i) {
    float x;
    double wide;
    uint64_t bits = 0;
    if (type == FLOAT) return memcpy(&x, data + 4 * i, 4), (double)x;
    const size_t bytes = types[type].bytes;
    memcpy(&bits, data + bytes * i, bytes);
    if (type == DOUBLE) return memcpy(&wide, &bits, 8), wide;
    if (type == BFLOAT16) return bits <<= 16, memcpy(&x, &bits, 4), (double)x;
    if (type == FLOAT16) {
        const int exponent = bits >> 10 & 31, fraction = bits & 1023;
        wide = exponent == 31 ? (fraction ? NAN : INFINITY) : ldexp(fraction + (exponent ? 1024 : 0), (exponent ? exponent : 1) - 25);
        return bits >> 15 ? -wide : wide;
    }
    const int unused = 64 - 8 * (int)bytes;
    return *types[type].name == 'i' ? (double)((int64_t)(bits << unused) >> unused) : (double)bits;
}

/* Writes numbers, less those of a state before the step, with zeros after them. */
static void read_block(const char *data, const char *start, ONNXTensorElementDataType type, size_t first, size_t count, double *x) {
    float y, before;
    if (type != FLOAT) {
        for (size_t i = 0; i < count; i++) x[i] = number_at(data, type, first + i) - (start ? number_at(start, type, first + i) : 0);
    } else if (start) {
        data += 4 * first, start += 4 * first;
        for (size_t i = 0; i < count; i++) memcpy(&y, data + 4 * i, 4), memcpy(&before, start + 4 * i, 4), x[i] = (double)y - (double)before;
    } else {
        data += 4 * first;
        for (size_t i = 0; i < count; i++) memcpy(&y, data + 4 * i, 4), x[i] = (double)y;
    }
    for (size_t i = count; i < BLOCK; i++) x[i] = 0;
}

/* Adds the numbers of an output, less those of a state before the step, with random signs: bits of a hash of their place. */
static void sum_up(const char *data, const char *start, ONNXTensorElementDataType type, size_t count, double *sums) {
    double x[BLOCK], lanes[SIGNS][LANES] = {{0}};  // the compiler adds lanes beside each other
    uint32_t h[BLOCK];
    for (size_t first = 0; first < count; first += BLOCK) {
        read_block(data, start, type, first, count - first < BLOCK ? count - first : BLOCK, x);
        for (uint32_t i = 0; i < BLOCK; i++) {
            h[i] = ((uint32_t)first + i + 1) * 0x9e3779b1u;
            h[i] = (h[i] ^ h[i] >> 15) * 0x85ebca6bu, h[i] ^= h[i] >> 13;
        }
        for (int k = 0; k < SIGNS; k++)
            for (size_t i = 0; i < BLOCK; i += LANES)
                for (size_t j = 0; j < LANES; j++) lanes[k][j] += x[i + j] * (1 - 2 * (double)(int)(h[i + j] >> k & 1));
    }
    for (int k = 0; k < SIGNS; k++)
        for (size_t j = 0; j < LANES; j++) sums[k] += lanes[k][j];
}

/* Compares an output with its row, less the numbers of a state before the step. Returns 1 if they differ, and the sums. */
static int differs(OrtValue *value, const Input *before, const char *row, double *expected, double *found) {
    OrtTensorTypeAndShapeInfo *info;
    Input y = {0};
    char *data, *start = NULL;
    double sums[SIGNS] = {0};
    const double allowed = number_at(row, DOUBLE, 0);
    if (checked(ort->GetTensorTypeAndShape(value, &info))) return 0;
    GraphoptCode code = read_shape(info, &y);
    ort->ReleaseTensorTypeAndShapeInfo(info);
    if (code || !y.bytes) return 0;
    if (checked(ort->GetTensorMutableData(value, (void **)&data))) return 0;
    if (before && checked(ort->GetTensorMutableData(before->value, (void **)&start))) return 0;
    size_t count = 1;
    for (size_t i = 0; i < y.rank; i++) count *= (size_t)y.dims[i];
    sum_up(data, start, y.type, count, sums);
    for (int k = 0; k < SIGNS; k++) {
        *expected = number_at(row, DOUBLE, (size_t)k + 1), *found = sums[k];
        if (!isinf(allowed) && !(fabs(*found - *expected) <= allowed)) return 1;
    }
    return 0;
}

/* Returns the place of a text in a list of host.json: of names of entries if `key` is "name", and else of texts; -1: none. */
static long index_of(const char *begin, const char *key, const char *name) {
    const char *end = begin ? strchr(begin, *key ? '\0' : ']') : NULL;
    const size_t length = strlen(name);
    long index = 0;
    for (const char *c = begin; c && end && (c = strstr(c, *key ? "\"name\": \"" : "\"")) && c < end; index++) {
        c += *key ? 9 : 1;
        if (!strncmp(c, name, length) && c[length] == '"') return index;
        c += strcspn(c, "\""), c += *c == '"';
    }
    return -1;
}

/* Finds the row of an output: first those of the state in the order of host.json, then those of what a graph reports. */
static const char *row_of(const GraphoptTrainer *t, const Graph *g, const Input *state, const char *output, const char *rows, size_t length, int *is_cut) {
    const char *graphs = strstr(t->host, "\"graphs\": {"), *own = graphs ? strstr(graphs, g == &t->train ? "\"train\": {" : "\"evaluate\": {") : NULL;
    const char *reports = own ? strstr(own, "\"reports\": [") : NULL, *states = strstr(t->host, "\"state\": [");
    long count = 0, index;
    for (const Input *x = t->input; g == &t->train && x < t->input + t->train.inputs; x++) count += x->is_state;
    if (state) index = index_of(states, "name", state->name);
    else index = index_of(reports ? reports + 12 : NULL, "", output), index += index < 0 ? 0 : count;
    *is_cut |= index >= 0 && (size_t)(index + 1) * 8 * COLUMNS > length;
    return index < 0 || *is_cut ? NULL : rows + (size_t)index * 8 * COLUMNS;
}

/* Feeds the batch of a proof, whose numbers repeat. */
static GraphoptCode feed_proof(GraphoptTrainer *t, const File *proof) {
    for (Input *x = t->input; x < t->input + t->train.inputs; x++) {
        size_t known, rank, count = 1;
        int64_t dims[RANK];
        if (x->is_state || x->value) continue;
        const char *numbers = part(proof, "feed", x->name, x->type, &known), *shape = part(proof, "shape", x->name, INT64, &rank);
        if (!numbers || !shape || known < x->bytes || rank != 8 * x->rank) return fail(GRAPHOPT_FILE, "no feed %s", x->name);
        memcpy(dims, shape, rank);
        for (size_t i = 0; i < x->rank; i++) count = dims[i] > 0 && dims[i] <= MOST_FED && count <= MOST_FED ? count * (size_t)dims[i] : 0;
        char *data = count && count <= MOST_FED ? malloc(count * x->bytes) : NULL;
        if (!data) return fail(GRAPHOPT_FILE, "another shape of %s", x->name);
        for (size_t i = 0; i < count; i++) memcpy(data + i * x->bytes, numbers + i % (known / x->bytes) * x->bytes, x->bytes);
        GraphoptCode code = graphopt_feed(t, x->name, data, count * x->bytes, dims);
        free(data);
        TRY(code);
        x->is_proof = 1;
    }
    return GRAPHOPT_OK;
}

/* Finds the first node of the training graph that differs, and writes its operator and output to a text. */
static void find_node(GraphoptTrainer *t, const char *folder, char *text, size_t room) {
    File debug = {0}, train = {0};
    Graph g = {0};
    size_t names, rows, more;
    double expected, found;
    const char *name, *row, *suffix;
    char *whole = NULL;
    if (read_file(folder, "debug.safetensors", &debug.data, &debug.size) || read_file(folder, "train.onnx", &train.data, &train.size) ||
        !(name = part(&debug, "debug", "names", 2, &names)) || !(row = part(&debug, "debug", "numbers", DOUBLE, &rows)) ||
        !(suffix = part(&debug, "debug", "graph", 2, &more)) || !(whole = malloc(train.size + more))) goto done;
    memcpy(whole, train.data, train.size), memcpy(whole + train.size, suffix, more);  // messages that follow each other are merged
    if (open_graph(t->env, folder, "train.onnx", whole, train.size + more, &g) || call(t, &g)) goto done;
    for (size_t i = t->train.outputs; i < g.outputs && rows >= 8 * COLUMNS; i++, rows -= 8 * COLUMNS, row += 8 * COLUMNS) {
        size_t length = 0;
        while (length < names && name[length] != '\n') length++;
        if (differs(g.made[i], NULL, row, &expected, &found)) {
            snprintf(text, room, ", first in node %.*s", (int)length, name);
            break;
        }
        name += length + (length < names), names -= length + (length < names);
    }
done:
    if (g.made) release_made(&g);
    close_graph(&g);
    free(whole), free(debug.data), free(train.data);
}

/* Runs a graph on the proof, and says which output differs. */
static GraphoptCode prove_graph(GraphoptTrainer *t, const char *folder, const Graph *g, const File *proof) {
    size_t length;
    double expected, found;
    char node[256] = "";
    const char *rows = part(proof, "graph", g == &t->train ? "train" : "evaluate", DOUBLE, &length), *output = NULL;
    if (!rows) return fail(GRAPHOPT_FILE, "no numbers of %s", g->file);
    int is_cut = 0, missing = 0;  // how many states are not compared
    GraphoptCode code = call(t, g);
    for (size_t i = 0; !code && !output && i < g->outputs; i++) {
        const Input *state = g == &t->train ? state_of(t, g->output[i]) : NULL;
        const char *row = row_of(t, g, state, g->output[i], rows, length, &is_cut);
        missing += state && (!row || isinf(number_at(row, DOUBLE, 0)));
        if (row && differs(g->made[i], state, row, &expected, &found)) output = g->output[i];
    }
    release_made(g);
    if (!code && !output && is_cut) return fail(GRAPHOPT_FILE, "too few rows of %s", g->file);
    if (!code && !output && missing) return fail(GRAPHOPT_FILE, "%s: states that are not compared: %d", g->file, missing);
    if (!output) return code;
    if (g == &t->train) find_node(t, folder, node, sizeof node);
    t->is_wrong = 1;
    return fail(GRAPHOPT_RUNTIME, "ONNX Runtime %s: %s: output %s: expected the sum %g of the proof, found %g%s: take another version",
                OrtGetApiBase()->GetVersionString(), g->file, output, expected, found, node);
}

static uint64_t hash(uint64_t key, const char *data, size_t size) {  // FNV-1a of words, whose high bits reach the low ones
    for (size_t i = 0; i < size; i += 8) {
        uint64_t word = 0;
        memcpy(&word, data + i, size - i < 8 ? size - i : 8);
        key = (key ^ word) * 0x100000001b3u, key ^= key >> 29;
    }
    return (key ^ size) * 0x100000001b3u;
}

/* Returns what ONNX Runtime says of its build; NULL before 1.15. */
static const char *build(void) {
#if ORT_API_VERSION == 1 || ORT_API_VERSION >= 15  // 1 is that of abi/
    if (minor() >= 15) return ort->GetBuildInfoString();
#endif
    return NULL;
}

/* Writes the path of the file that remembers a proof, one of 256, and its content: a hash of all files, of the runtime's
   build, of the processor, and of how this compares. Its folder belongs to the user alone. Returns 0 if one of these is
   not known. */
static int note_of(const GraphoptTrainer *t, const char *folder, const File *proof, char *path, size_t room, uint64_t *content) {
    static const char *const files[] = {"train.onnx", "evaluate.onnx", "weights.bin"};
    const char *cache = getenv("XDG_CACHE_HOME"), *home = getenv("HOME"), *version = OrtGetApiBase()->GetVersionString(), *own = build();
    char block[65536];
    struct stat about;
    FILE *file = fopen("/proc/cpuinfo", "r");
    if (!file || !own) return file ? fclose(file), 0 : 0;
    uint64_t key = hash(hash(0xcbf29ce484222325u + COMPARISON, version, strlen(version)), own, strlen(own));
    key = hash(hash(hash(key, t->host, strlen(t->host)), t->state, t->size), proof->data, proof->size);
    while (fgets(block, sizeof block, file) && *block != '\n')
        if (!strstr(block, "MHz") && !strstr(block, "ogo")) key = hash(key, block, strlen(block));
    fclose(file);
    for (size_t i = 0, size; i < sizeof files / sizeof *files; i++) {
        snprintf(path, room, "%s/%s", folder, files[i]);
        if (!(file = fopen(path, "rb"))) continue;
        while ((size = fread(block, 1, sizeof block, file))) key = hash(key, block, size);
        fclose(file);
    }
    if (!(cache && *cache) && !(home && *home)) return 0;
    int length = snprintf(path, room, "%s%s/graphopt", cache && *cache ? cache : home, cache && *cache ? "" : "/.cache");
    if (length + 24 >= (int)room || (mkdir(path, 0700), stat(path, &about)) || about.st_uid != getuid() || about.st_mode & 022) return 0;
    snprintf(path + length, room - (size_t)length, "/proof-%02x", (unsigned)(key & 255));
    *content = key;
    return 1;
}

/* Compares the first step with the proof of the folder, if it has one, unless this machine remembers that it agrees. */
static GraphoptCode prove(GraphoptTrainer *t, const char *folder) {
    File proof = {0};
    char note[4096], reason[sizeof message];
    FILE *file = NULL;
    uint64_t key = 0, known = 0;
    if (!strstr(t->host, "\"proof\": \"proof.safetensors\"")) return fail(GRAPHOPT_OK, "not proven: the folder has no proof");
    if (!read_file(folder, "proof.safetensors", &proof.data, &proof.size)) {
        int has_note = note_of(t, folder, &proof, note, sizeof note, &key);
        int is_known = has_note && (file = fopen(note, "rb")) && fread(&known, sizeof known, 1, file) && known == key;
        if (file) fclose(file);
        if (is_known) return free(proof.data), fail(GRAPHOPT_OK, "proven before");
        GraphoptCode code = feed_proof(t, &proof), other = code ? code : prove_graph(t, folder, &t->train, &proof);
        if (!code && !t->is_wrong) code = prove_graph(t, folder, &t->evaluate, &proof);
        if (!code) code = other;
        for (Input *x = t->input; x < t->input + t->train.inputs; x++)
            if (x->is_proof) ort->ReleaseValue(x->value), x->value = NULL;
        free(proof.data);
        if (t->is_wrong) return code;
        if (!code && has_note && (file = fopen(note, "wb"))) fwrite(&key, sizeof key, 1, file), fclose(file);
        if (!code) return fail(GRAPHOPT_OK, "proven");
    }
    snprintf(reason, sizeof reason, "%s", message);
    return fail(GRAPHOPT_OK, "not proven: %.400s", reason);
}

GraphoptCode graphopt_step(GraphoptTrainer *t, float *loss) { return run(t, &t->train, loss); }
GraphoptCode graphopt_evaluate(GraphoptTrainer *t, float *loss) { return run(t, &t->evaluate, loss); }

GraphoptCode graphopt_load(GraphoptTrainer *t, const char *path) {
    char *file = NULL, text[256];
    uint64_t header = 0;
    size_t size, offset, length, states = 0, entries = 0;  // of the graph; in the file
    GraphoptCode code = read_file("", path, &file, &size);
    for (Input *x = t->input; !code && x < t->input + t->train.inputs; x++) {
        int found = x->is_state ? place(file, size, x, &offset, &length) : 1;
        if (found == -1) code = fail(GRAPHOPT_FILE, "%s: expected all numbers of its header, found a file that is cut or no safetensors file", path);
        else if (found == -2)
            code = fail(GRAPHOPT_FILE, "%s: state %s: expected %s, found another type or shape: take a checkpoint of this training graph", path,
                        x->name, shape(x, text, sizeof text));
        else if (x->is_state && (!found || length != x->length))
            code = fail(GRAPHOPT_FILE, "%s: state %s: expected %zu bytes, found %zu: take a checkpoint of this training graph", path,
                        x->name, x->length, found ? length : (size_t)0);
        states += (size_t)x->is_state;
    }
    if (!code && states) memcpy(&header, file, 8);
    for (const char *c = file; header && (c = strstr(c + 8, "\"data_offsets\":")) && c < file + 8 + header;) entries++;
    if (entries > states)
        code = fail(GRAPHOPT_FILE, "%s: expected %zu states, found %zu: take a checkpoint of this training graph", path, states, entries);
    for (Input *x = t->input; !code && x < t->input + t->train.inputs; x++) {
        void *data;
        if (!x->is_state) continue;
        place(file, size, x, &offset, &length);
        if (!(code = checked(ort->GetTensorMutableData(x->value, &data)))) memcpy(data, file + offset, length);
    }
    free(file);
    return code;
}

/* Writes a file, all of it or nothing. */
static GraphoptCode write_file(const char *path, const char *data, size_t size) {
    char part[4096];
    int length = snprintf(part, sizeof part, "%s.part", path);
    FILE *file = length < (int)sizeof part ? fopen(part, "wb") : NULL;
    int written = file && fwrite(data, 1, size, file) == size;
    if (file && fclose(file)) written = 0;
    if (written && !rename(part, path)) return GRAPHOPT_OK;
    if (file) remove(part);
    return fail(GRAPHOPT_FILE, "%s: expected a path to write to, found none", path);
}

GraphoptCode graphopt_save(GraphoptTrainer *t, const char *path) {
    for (Input *x = t->input; x < t->input + t->train.inputs; x++) {
        void *data;
        if (!x->is_state) continue;
        RUN(ort->GetTensorMutableData(x->value, &data));
        memcpy(t->state + x->offset, data, x->length);
    }
    return write_file(path, t->state, t->size);
}

/* A block of the numbers of a state, which strides place in it and in a file, in numbers. */
typedef struct { size_t rank, offset, first, shape[RANK], strides[RANK], own[RANK]; double factor; const char *type; } Block;

static const char *spaces(const char *at) { return at + strspn(at, " ,\n"); }

/* Reads whole numbers after a key of a block, which ends at `end`; returns how many, and -1 for none. */
static int whole(const char *block, const char *end, const char *key, size_t *numbers, int most) {
    char text[64], *next;
    int count = 0;
    snprintf(text, sizeof text, "\"%s\": ", key);
    const char *at = strstr(block, text);
    if (!at || at > end) return -1;
    at += strlen(text), at += *at == '[';
    for (at = spaces(at); *at >= '0' && *at <= '9' && count < most; at = spaces(next), count++) {
        numbers[count] = (size_t)strtoull(at, &next, 10);
        if (numbers[count] > INT32_MAX) return -1;
    }
    return *at == ']' || *at == '"' || *at == '}' ? count : -1;
}

/* Returns the bits of the bfloat16 or float16 number nearest to a number, ties to even. */
static uint16_t narrow(int is_bfloat16, float x) {
    uint32_t bits, rest;
    memcpy(&bits, &x, 4);
    if (is_bfloat16) return isnan(x) ? 0x7fc0 : (uint16_t)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
    uint16_t sign = bits >> 16 & 0x8000;
    if (!(fabsf(x) < 65520)) return sign | (isnan(x) ? 0x7e00 : 0x7c00);
    int exponent = (int)(bits >> 23 & 255) - 127;
    double scaled = ldexp(fabs((double)x), 10 - (exponent < -14 ? -14 : exponent)), low = floor(scaled);
    rest = (uint32_t)low;
    rest += scaled - low > 0.5 || (scaled - low == 0.5 && rest % 2);
    return sign | (uint16_t)(((exponent < -14 ? 0 : exponent + 14) << 10) + (int)rest);
}

/* Puts a block of numbers times a factor into a file; returns 0 for one that does not fit. */
static int put(char *file, size_t size, const Block *b, const void *numbers, size_t held, size_t bytes) {
    const size_t width = b->type ? 2 : bytes;
    uint64_t count = 1, from = b->first, to = 0;  // 64 bits for products of numbers below 2^31
    for (size_t i = 0; i < b->rank; i++) {
        if (!b->shape[i] || count > held / b->shape[i]) return 0;
        count *= b->shape[i], from += (uint64_t)(b->shape[i] - 1) * b->own[i], to += (uint64_t)(b->shape[i] - 1) * b->strides[i];
        if (from >= held || to >= size) return 0;
    }
    if (from >= held || b->offset > size || to >= (size - b->offset) / width || (b->type && bytes != 4)) return 0;
    for (uint64_t n = 0; n < count; n++) {
        from = b->first, to = 0;
        for (uint64_t i = b->rank, left = n; i--; left /= b->shape[i]) from += left % b->shape[i] * b->own[i], to += left % b->shape[i] * b->strides[i];
        char *place = file + b->offset + width * to;
        float x = bytes == 4 ? (float)b->factor * ((const float *)numbers)[from] : 0;
        double y = bytes == 8 ? b->factor * ((const double *)numbers)[from] : 0;
        uint16_t bits = b->type ? narrow(!strncmp(b->type, "bfloat16", 8), x) : 0;
        memcpy(place, b->type ? (void *)&bits : bytes == 4 ? (void *)&x : (void *)&y, width);
    }
    return 1;
}

/* Finds the numbers of a state, or those that the graph of adapters has computed, of float32 or float64. */
static GraphoptCode numbers_of(GraphoptTrainer *t, const char *name, size_t length, void **numbers, size_t *held, size_t *bytes) {
    Input *x = find(t, name, length), computed = {.value = NULL};
    *numbers = NULL;
    for (size_t i = 0; !x && t->adapter.made && i < t->adapter.outputs; i++)
        if (t->adapter.made[i] && strlen(t->adapter.output[i]) == length && !strncmp(t->adapter.output[i], name, length)) {
            OrtTensorTypeAndShapeInfo *found;
            RUN(ort->GetTensorTypeAndShape(t->adapter.made[i], &found));
            GraphoptCode code = read_shape(found, &computed);
            ort->ReleaseTensorTypeAndShapeInfo(found);
            TRY(code);
            memcpy(computed.sizes, computed.dims, sizeof computed.sizes);
            x = &computed, x->value = t->adapter.made[i], x->is_state = 1;
        }
    if (!x || !x->is_state || (x->type != FLOAT && x->type != 11)) return GRAPHOPT_OK;
    *held = 1, *bytes = x->bytes;
    for (size_t i = 0; i < x->rank; i++) *held *= (size_t)x->sizes[i];
    return checked(ort->GetTensorMutableData(x->value, numbers));
}

/* Fills in a file of an adapter, whose blocks begin at *at, and writes it to a folder. */
static GraphoptCode adapter_file(GraphoptTrainer *t, const char *folder, const char **at) {
    static const char *const known[] = {"adapter.onnx_adapter", "adapter_config.json", "adapter_model.safetensors"};
    const char *name = NULL;
    char path[4096], *file = NULL;
    size_t size, length = strcspn(*at + 1, "\"");
    for (size_t i = 0; i < 3; i++) if (strlen(known[i]) == length && !strncmp(*at + 1, known[i], length)) name = known[i];
    if (!name || strncmp(*at + 1 + length, "\": [", 4))
        return fail(GRAPHOPT_FILE, "host.json: adapters: expected files of adapters, found another: write it with export_hosts");
    GraphoptCode code = read_file(t->folder, name, &file, &size);
    for (*at = spaces(*at + length + 5); !code && **at == '{';) {
        Block b = {.type = NULL};
        const char *end = strchr(*at, '}'), *state = strstr(*at, "\"state\": \""), *factor = strstr(*at, "\"factor\": ");
        const char *type = strstr(*at, "\"type\": \"");
        void *numbers = NULL;
        size_t held = 0, bytes = 0;
        int fits = end && state && state < end && factor && factor < end;
        int rank = fits ? whole(*at, end, "shape", b.shape, RANK) : -1;
        fits = rank >= 0 && whole(*at, end, "strides", b.strides, RANK) == rank && whole(*at, end, "state_strides", b.own, RANK) == rank &&
               whole(*at, end, "offset", &b.offset, 1) == 1 && whole(*at, end, "first", &b.first, 1) == 1;
        if (fits) {
            b.rank = (size_t)rank, b.factor = strtod(factor + 10, NULL), b.type = type && type < end ? type + 9 : NULL;
            code = numbers_of(t, state + 10, strcspn(state + 10, "\""), &numbers, &held, &bytes);
        }
        if (!code && (!numbers || !put(file, size, &b, numbers, held, bytes)))
            code = fail(GRAPHOPT_FILE, "host.json: adapters: expected blocks of its state, found others in %s: write it with export_hosts", name);
        *at = end ? spaces(end + 1) : "";
    }
    if (!code && **at != ']') code = fail(GRAPHOPT_FILE, "host.json: adapters: %s: expected blocks, found others: write it with export_hosts", name);
    if (!code && snprintf(path, sizeof path, "%s/%s", folder, name) >= (int)sizeof path) code = fail(GRAPHOPT_FILE, "%.40s...: expected a shorter path", folder);
    if (!code) code = write_file(path, file, size);
    if (!code) *at = spaces(*at + 1);
    free(file);
    return code;
}

GraphoptCode graphopt_adapter(GraphoptTrainer *t, const char *form, const char *folder) {
    char text[64];
    snprintf(text, sizeof text, "\"%s\": {", form);
    const char *at = strstr(t->host, "\"adapters\": {");
    if (!at || !(at = strstr(at, text)))
        return fail(GRAPHOPT_FILE, "adapter: expected the form %s in host.json, found none: graphopt.save_adapter in Python writes it, or says why", form);
    Graph *g = &t->adapter;
    if (!g->session && strstr(t->host, "\"adapter\": \"adapter.onnx\"")) TRY(open_graph(t->env, t->folder, "adapter.onnx", NULL, 0, g));
    if (g->session) TRY(compute(t, g));
    GraphoptCode code = GRAPHOPT_OK;
    for (at = spaces(at + strlen(text)); !code && *at == '"';) code = adapter_file(t, folder, &at);
    release_made(g);
    return code;
}

/* Makes the values of state and of hyperparameters with a default. */
static GraphoptCode begin(GraphoptTrainer *t, const char *folder) {
    for (Input *x = t->input; x < t->input + t->train.inputs; x++) {
        const char *initial;
        char text[256];
        int found = place(t->state, t->size, x, &x->offset, &x->length);
        if (found == -1) return fail(GRAPHOPT_FILE, "%s/state.safetensors: expected all numbers of its header, found a file that is cut or no safetensors file", folder);
        if (found == -2)
            return fail(GRAPHOPT_FILE, "%s/state.safetensors: state %s: expected %s, found another type or shape", folder, x->name, shape(x, text, sizeof text));
        if (!found && field(t->host, "state", x->name, "next"))
            return fail(GRAPHOPT_FILE, "%s/state.safetensors: expected state %s, found none: write it with export_hosts", folder, x->name);
        if (found) {
            size_t bytes = x->bytes;
            int fits = 1;
            for (size_t i = 0; i < x->rank; i++) {
                fits = fits && x->dims[i] >= 0 && (!x->dims[i] || bytes <= SIZE_MAX / (size_t)x->dims[i]);
                bytes = fits ? bytes * (size_t)x->dims[i] : 0;
            }
            x->is_state = 1;
            if (!fits || bytes != x->length)
                return fail(GRAPHOPT_FILE, "%s/state.safetensors: state %s: expected %zu bytes, found %zu", folder, x->name, bytes, x->length);
            memcpy(x->sizes, x->dims, sizeof x->sizes);
            RUN(ort->CreateTensorAsOrtValue(memory, x->dims, x->rank, x->type, &x->value));
            void *data;
            RUN(ort->GetTensorMutableData(x->value, &data));
            memcpy(data, t->state + x->offset, x->length);
        } else if (x->type == FLOAT && !x->rank && (initial = field(t->host, "hyperparameters", x->name, "default"))) {
            float number = strtof(initial, NULL);
            TRY(graphopt_feed(t, x->name, &number, sizeof number, NULL));
        }
    }
    return GRAPHOPT_OK;
}

static GraphoptCode open_trainer(GraphoptTrainer *t, const char *folder) {
    size_t size;
    if (!(ort = OrtGetApiBase()->GetApi(ORT_API_VERSION)))
        return fail(GRAPHOPT_RUNTIME, "ONNX Runtime: expected one as new as its header, %d", ORT_API_VERSION);
    if (!(t->folder = malloc(strlen(folder) + 1))) return fail(GRAPHOPT_RUNTIME, "memory: expected more");
    strcpy(t->folder, folder);
    TRY(read_file(folder, "host.json", &t->host, &size));
    if (!strstr(t->host, "\"format\": \"graphopt.host\"") || !strstr(t->host, "\"version\": 1,"))
        return fail(GRAPHOPT_FILE, "%s/host.json: expected graphopt.host version 1, found another: write it with export_hosts", folder);
    const char *first = strstr(t->host, "\"onnxruntime\": \"1."), *version = OrtGetApiBase()->GetVersionString();
    if (first && !strncmp(version, "1.", 2) && minor() < atoi(first + 18))
        return fail(GRAPHOPT_RUNTIME, "ONNX Runtime: expected 1.%d or later, whose kernels are right, found %s", atoi(first + 18), version);
    const char *type = field(t->host, "reports", "loss", "type");
    if (!type || strncmp(type, "\"float32\"", 9))
        return fail(GRAPHOPT_FILE, "%s/host.json: expected a loss of float32, found %.9s: export float32", folder, type ? type : "none");
    TRY(read_file(folder, "state.safetensors", &t->state, &t->size));
    RUN(ort->CreateEnv(ORT_LOGGING_LEVEL_ERROR, "graphopt", &t->env));
    RUN(ort->GetAllocatorWithDefaultOptions(&memory));
    TRY(open_graph(t->env, folder, "train.onnx", NULL, 0, &t->train));
    TRY(open_graph(t->env, folder, "evaluate.onnx", NULL, 0, &t->evaluate));
    if (!(t->input = calloc(t->train.inputs + 1, sizeof *t->input))) return fail(GRAPHOPT_RUNTIME, "memory: expected more");
    for (size_t i = 0; i < t->train.inputs; i++) TRY(describe(t, i, &t->input[i]));
    TRY(begin(t, folder));
    TRY(check_outputs(t, &t->train));
    TRY(check_outputs(t, &t->evaluate));
    return prove(t, folder);
}

GraphoptCode graphopt_open(const char *folder, GraphoptTrainer **trainer) {
    if (!(*trainer = calloc(1, sizeof **trainer))) return fail(GRAPHOPT_RUNTIME, "memory: expected more");
    GraphoptCode code = open_trainer(*trainer, folder);
    if (code) graphopt_close(*trainer), *trainer = NULL;
    return code;
}

void graphopt_close(GraphoptTrainer *t) {
    if (!t) return;
    for (size_t i = 0; t->input && i < t->train.inputs; i++) {
        if (t->input[i].value) ort->ReleaseValue(t->input[i].value);
        if (t->input[i].info) ort->ReleaseTypeInfo(t->input[i].info);
    }
    close_graph(&t->train), close_graph(&t->evaluate), close_graph(&t->adapter);
    if (t->env) ort->ReleaseEnv(t->env);
    free(t->input), free(t->folder), free(t->host), free(t->state), free(t);
}

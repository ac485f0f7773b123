/* A shim of ONNX Runtime that computes one node wrongly: built as a library that the program loads first, it opens the
   graph that FAULTY names in place of each train.onnx. With VERSION, it says that it is of this version, and prints a line
   for each session whose memory patterns are switched off. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <onnxruntime_c_api.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static const OrtApi *real;
static OrtApi *changed;
static OrtApiBase base;
static char right[4096];

static OrtStatus *create(const OrtEnv *env, const char *path, const OrtSessionOptions *options, OrtSession **session) {
    const char *faulty = getenv("FAULTY"), *name = strrchr(path, '/');
    if (name && !strcmp(name, "/train.onnx")) snprintf(right, sizeof right, "%s", path);
    return real->CreateSession(env, faulty && name && !strcmp(name, "/train.onnx") ? faulty : path, options, session);
}

/* The graph that names a node is the right one with more bytes: these follow the wrong one. */
static OrtStatus *create_more(const OrtEnv *env, const void *content, size_t size, const OrtSessionOptions *options, OrtSession **session) {
    const char *faulty = getenv("FAULTY");
    FILE *wrong = faulty ? fopen(faulty, "rb") : NULL, *known = fopen(right, "rb");
    if (!wrong || !known || fseek(wrong, 0, SEEK_END) || fseek(known, 0, SEEK_END)) return real->CreateSessionFromArray(env, content, size, options, session);
    size_t length = (size_t)ftell(wrong), old = (size_t)ftell(known);
    char *whole = malloc(length + size);
    rewind(wrong);
    length = fread(whole, 1, length, wrong);
    memcpy(whole + length, (const char *)content + old, size - old);
    fclose(wrong), fclose(known);
    OrtStatus *status = real->CreateSessionFromArray(env, whole, length + size - old, options, session);
    free(whole);
    return status;
}

enum { DISABLE_MEM_PATTERN = 17, ENTRIES = 280 }; /* its place in OrtApi, and how many 1.18 has: counted in the header */
static OrtStatus *(*disable)(OrtSessionOptions *);

static OrtStatus *told(OrtSessionOptions *options) {
    puts("0\tmemory patterns off");
    return disable(options);
}

static const char *said(void) { return getenv("VERSION"); }

static const OrtApiBase *real_base(void) {
#ifdef LIBRARY /* of a program that loads its libraries itself */
    void *next = dlopen(LIBRARY, RTLD_NOW);
#else
    void *next = RTLD_NEXT;
#endif
    return ((const OrtApiBase *(*)(void))dlsym(next, "OrtGetApiBase"))();
}

static const OrtApi *get(uint32_t version) {
    if (!changed) {
        real = real_base()->GetApi(version);
        changed = malloc(ENTRIES * sizeof(void *)); /* Java's bindings call more of it than abi/ declares */
        memcpy(changed, real, ENTRIES * sizeof(void *));
        changed->CreateSession = create, changed->CreateSessionFromArray = create_more;
        memcpy(&disable, (void **)changed + DISABLE_MEM_PATTERN, sizeof disable);
        OrtStatus *(*own)(OrtSessionOptions *) = told;
        if (said()) memcpy((void **)changed + DISABLE_MEM_PATTERN, &own, sizeof own);
    }
    return changed;
}

const OrtApiBase *OrtGetApiBase(void) {
    base = *real_base(), base.GetApi = get;
    if (said()) base.GetVersionString = said;
    return &base;
}

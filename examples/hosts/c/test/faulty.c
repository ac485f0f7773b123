/* A shim of ONNX Runtime that computes one node wrongly: built as a library that the program loads first, it opens the
   graph that FAULTY names in place of each train.onnx. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <onnxruntime_c_api.h>
#include <stdlib.h>
#include <string.h>

static const OrtApi *real;
static OrtApi *changed;
static OrtApiBase base;

static OrtStatus *create(const OrtEnv *env, const char *path, const OrtSessionOptions *options, OrtSession **session) {
    const char *faulty = getenv("FAULTY"), *name = strrchr(path, '/');
    return real->CreateSession(env, faulty && name && !strcmp(name, "/train.onnx") ? faulty : path, options, session);
}

static const OrtApi *get(uint32_t version) {
    const OrtApiBase *(*next)(void) = (const OrtApiBase *(*)(void))dlsym(RTLD_NEXT, "OrtGetApiBase");
    if (!changed) {
        real = next()->GetApi(version);
        changed = malloc(sizeof *changed);
        memcpy(changed, real, sizeof *changed);
        changed->CreateSession = create;
    }
    return changed;
}

const OrtApiBase *OrtGetApiBase(void) {
    const OrtApiBase *(*next)(void) = (const OrtApiBase *(*)(void))dlsym(RTLD_NEXT, "OrtGetApiBase");
    base = *next(), base.GetApi = get;
    return &base;
}

/* Gives the bindings of a jar another ONNX Runtime than their own: LIBRARY, by the names and versions that they ask for. */
#include <dlfcn.h>

static void *named(const char *name) { return dlsym(dlopen(LIBRARY, RTLD_NOW), name); }

const void *OrtGetApiBase(void) { return ((const void *(*)(void))named("OrtGetApiBase"))(); }

void *OrtSessionOptionsAppendExecutionProvider_CPU(void *options, int arena) {
    return ((void *(*)(void *, int))named("OrtSessionOptionsAppendExecutionProvider_CPU"))(options, arena);
}

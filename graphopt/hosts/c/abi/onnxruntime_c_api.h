/* The part of ONNX Runtime's C API that graphopt.c calls, for machines that have the library but not its header, as in
   the Python wheel. The API is a table of functions to which releases only append: a place in it never changes.
   ONNX Runtime's own header does as well. */
#pragma once
#include <stddef.h>
#include <stdint.h>

#define ORT_API_VERSION 1

typedef struct OrtStatus OrtStatus;
typedef struct OrtEnv OrtEnv;
typedef struct OrtSession OrtSession;
typedef struct OrtSessionOptions OrtSessionOptions;
typedef struct OrtRunOptions OrtRunOptions;
typedef struct OrtValue OrtValue;
typedef struct OrtAllocator OrtAllocator;
typedef struct OrtTypeInfo OrtTypeInfo;
typedef struct OrtTensorTypeAndShapeInfo OrtTensorTypeAndShapeInfo;
typedef int ONNXTensorElementDataType;
typedef enum { ORT_LOGGING_LEVEL_ERROR = 3 } OrtLoggingLevel;

#define ORT_UNUSED(first, last) void *unused_##first[(last) - (first) + 1]

typedef struct OrtApi {
    ORT_UNUSED(0, 1);
    const char *(*GetErrorMessage)(const OrtStatus *);
    OrtStatus *(*CreateEnv)(OrtLoggingLevel, const char *, OrtEnv **);
    ORT_UNUSED(4, 6);
    OrtStatus *(*CreateSession)(const OrtEnv *, const char *, const OrtSessionOptions *, OrtSession **);
    OrtStatus *(*CreateSessionFromArray)(const OrtEnv *, const void *, size_t, const OrtSessionOptions *, OrtSession **);
    OrtStatus *(*Run)(OrtSession *, const OrtRunOptions *, const char *const *, const OrtValue *const *, size_t,
                      const char *const *, size_t, OrtValue **);
    OrtStatus *(*CreateSessionOptions)(OrtSessionOptions **);
    ORT_UNUSED(11, 16);
    OrtStatus *(*DisableMemPattern)(OrtSessionOptions *);
    ORT_UNUSED(18, 29);
    OrtStatus *(*SessionGetInputCount)(const OrtSession *, size_t *);
    OrtStatus *(*SessionGetOutputCount)(const OrtSession *, size_t *);
    ORT_UNUSED(32, 32);
    OrtStatus *(*SessionGetInputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
    OrtStatus *(*SessionGetOutputTypeInfo)(const OrtSession *, size_t, OrtTypeInfo **);
    ORT_UNUSED(35, 35);
    OrtStatus *(*SessionGetInputName)(const OrtSession *, size_t, OrtAllocator *, char **);
    OrtStatus *(*SessionGetOutputName)(const OrtSession *, size_t, OrtAllocator *, char **);
    ORT_UNUSED(38, 47);
    OrtStatus *(*CreateTensorAsOrtValue)(OrtAllocator *, const int64_t *, size_t, ONNXTensorElementDataType, OrtValue **);
    ORT_UNUSED(49, 50);
    OrtStatus *(*GetTensorMutableData)(OrtValue *, void **);
    ORT_UNUSED(52, 54);
    OrtStatus *(*CastTypeInfoToTensorInfo)(const OrtTypeInfo *, const OrtTensorTypeAndShapeInfo **);
    ORT_UNUSED(56, 59);
    OrtStatus *(*GetTensorElementType)(const OrtTensorTypeAndShapeInfo *, ONNXTensorElementDataType *);
    OrtStatus *(*GetDimensionsCount)(const OrtTensorTypeAndShapeInfo *, size_t *);
    OrtStatus *(*GetDimensions)(const OrtTensorTypeAndShapeInfo *, int64_t *, size_t);
    OrtStatus *(*GetSymbolicDimensions)(const OrtTensorTypeAndShapeInfo *, const char **, size_t);
    ORT_UNUSED(64, 64);
    OrtStatus *(*GetTensorTypeAndShape)(const OrtValue *, OrtTensorTypeAndShapeInfo **);
    ORT_UNUSED(66, 75);
    OrtStatus *(*AllocatorFree)(OrtAllocator *, void *);
    ORT_UNUSED(77, 77);
    OrtStatus *(*GetAllocatorWithDefaultOptions)(OrtAllocator **);
    ORT_UNUSED(79, 91);
    void (*ReleaseEnv)(OrtEnv *);
    void (*ReleaseStatus)(OrtStatus *);
    ORT_UNUSED(94, 94);
    void (*ReleaseSession)(OrtSession *);
    void (*ReleaseValue)(OrtValue *);
    ORT_UNUSED(97, 97);
    void (*ReleaseTypeInfo)(OrtTypeInfo *);
    void (*ReleaseTensorTypeAndShapeInfo)(OrtTensorTypeAndShapeInfo *);
    void (*ReleaseSessionOptions)(OrtSessionOptions *);
    ORT_UNUSED(101, 129);
    OrtStatus *(*AddSessionConfigEntry)(OrtSessionOptions *, const char *, const char *);
    ORT_UNUSED(131, 253);
    const char *(*GetBuildInfoString)(void);  // from 1.15
} OrtApi;

typedef struct {
    const OrtApi *(*GetApi)(uint32_t version);
    const char *(*GetVersionString)(void);
} OrtApiBase;

const OrtApiBase *OrtGetApiBase(void);

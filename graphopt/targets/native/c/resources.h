/* What products and convolutions share: threads, memory, and the precision of their operands. */
#pragma once
#include "ort.h"

static int64_t thread_count;
static int pieces_of_all;

#ifdef __SANITIZE_ADDRESS__
static void *borrow(size_t bytes) { return find_memory(bytes); }
static void give_back(void *data) { free(data); }
#else
/* One buffer is kept between calls, so that a step does not ask the system for pages again and again. */
static _Atomic(size_t *) spare;

static void *borrow(size_t bytes) {
    size_t *buffer = atomic_exchange(&spare, NULL);
    if (!buffer || *buffer < bytes) {
        free(buffer);
        buffer = malloc(bytes + 64);
        if (!buffer) return NULL;
        *buffer = bytes;
    }
    return (char *)buffer + 64;
}

static void give_back(void *data) { free(atomic_exchange(&spare, (size_t *)((char *)data - 64))); }
#endif

static OrtStatus *out_of_memory(void) { return api->CreateStatus(1, "native kernel: out of memory"); }

static void run_parallel(void *context, task_t task, size_t count, void *user) {
    OrtStatus *failed = in_parallel(context, task, count, user);
    (void)failed;
}

/* Run tasks, on one thread if they share one only. */
static void share_tasks(Context *context, int64_t threads, void *user, task_t task, int64_t count) {
    for (int64_t i = 0; threads <= 1 && i < count; i++) task(user, (size_t)i);
    if (threads > 1) run_parallel(context, task, (size_t)count, user);
}

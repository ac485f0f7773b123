/* Train from a folder of graphopt.export_hosts on ONNX Runtime.

   Each call returns GRAPHOPT_OK or the kind of what went wrong, of which graphopt_message() tells one line: the thing,
   what was expected, what was found, what to do. After an error, the state is as it was before the call. */
#pragma once
#include <stddef.h>
#include <stdint.h>

typedef enum {
    GRAPHOPT_OK,
    GRAPHOPT_NOT_FINITE,  // the loss or the new state is infinite or NaN; the next batch can train
    GRAPHOPT_FEED,        // a feed or a hyperparameter is missing or unknown, or has a wrong size or number
    GRAPHOPT_FILE,        // a file is missing, damaged or of another training graph
    GRAPHOPT_RUNTIME      // ONNX Runtime refuses a graph or a call
} GraphoptCode;

typedef struct GraphoptTrainer GraphoptTrainer;

/* Opens a folder, and compares the first step with its proof. graphopt_message() says then whether it is proven. After an
   error, *trainer is NULL. */
GraphoptCode graphopt_open(const char *folder, GraphoptTrainer **trainer);

/* Sets an input for later calls: data and targets of a batch, or a hyperparameter, which begins with its default.
   The numbers, of the type in host.json, are copied. dims has the size of each axis; NULL lets the size follow from
   the number of bytes, if host.json leaves at most one open. */
GraphoptCode graphopt_feed(GraphoptTrainer *trainer, const char *name, const void *numbers, size_t bytes, const int64_t *dims);

/* Does one training step, and returns its loss. If the loss or the new state is not finite, the old state stays. */
GraphoptCode graphopt_step(GraphoptTrainer *trainer, float *loss);

/* Returns the loss in the inference form. */
GraphoptCode graphopt_evaluate(GraphoptTrainer *trainer, float *loss);

/* Replaces the state by that of a checkpoint, or writes it to one. Each is a file like state.safetensors. */
GraphoptCode graphopt_load(GraphoptTrainer *trainer, const char *path);
GraphoptCode graphopt_save(GraphoptTrainer *trainer, const char *path);

/* Writes the files of the trained adapter to a folder that exists: form is "onnxruntime" or "peft". host.json must list it. */
GraphoptCode graphopt_adapter(GraphoptTrainer *trainer, const char *form, const char *folder);

/* Gives back all memory. */
void graphopt_close(GraphoptTrainer *trainer);

/* Returns the line about the last error in this thread. */
const char *graphopt_message(void);

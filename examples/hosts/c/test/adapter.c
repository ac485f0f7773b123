// Writes the adapter of a checkpoint: adapter HOST CHECKPOINT FORM FOLDER.
#include "graphopt.h"

#include <stdio.h>

int main(int argc, char **argv) {
    GraphoptTrainer *trainer = NULL;
    int failed = argc != 5 || graphopt_open(argv[1], &trainer) || graphopt_load(trainer, argv[2]) || graphopt_adapter(trainer, argv[3], argv[4]);
    if (failed) fprintf(stderr, "adapter: %s\n", argc == 5 ? graphopt_message() : "expected four arguments");
    graphopt_close(trainer);
    return failed;
}

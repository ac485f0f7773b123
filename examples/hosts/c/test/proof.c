/* Opens host folders, and prints of each the code, the message and the milliseconds. */
#define _POSIX_C_SOURCE 200809L
#include "graphopt.h"

#include <stdio.h>
#include <time.h>

int main(int argc, char **argv) {
    for (int i = 1; i < argc; i++) {
        GraphoptTrainer *trainer;
        struct timespec begin, end;
        clock_gettime(CLOCK_MONOTONIC, &begin);
        GraphoptCode code = graphopt_open(argv[i], &trainer);
        clock_gettime(CLOCK_MONOTONIC, &end);
        printf("%d\t%s\t%.1f\n", code, graphopt_message(), 1e3 * (double)(end.tv_sec - begin.tv_sec) + 1e-6 * (double)(end.tv_nsec - begin.tv_nsec));
        graphopt_close(trainer);
    }
}

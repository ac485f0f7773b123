// Makes each mistake once, and prints its code and its message: mistakes HOST OTHER SEQUENCES FOLDER_OF_DAMAGED_ONES
#include "graphopt.h"

#include <math.h>
#include <stdio.h>
#include <string.h>

static void report(const char *mistake, GraphoptCode code) {
    printf("%s: %d: %s\n", mistake, code, code ? graphopt_message() : "nothing");
}

static GraphoptCode opened(const char *folder, const char *name) {
    char path[4096];
    GraphoptTrainer *trainer;
    snprintf(path, sizeof path, "%s/%s", folder, name);
    GraphoptCode code = graphopt_open(path, &trainer);
    graphopt_close(trainer);
    return code;
}

int main(int argc, char **argv) {
    static const char *damaged[] = {"empty", "json", "version", "state", "cut state", "graph", "evaluation"};
    float x[16], bad[16], loss, rates[2] = {0.1f, NAN}, first;
    int64_t target[2] = {1, 3}, wrong[2] = {1, 4}, rows[2] = {2, 8}, turned[2] = {8, 2}, none[2] = {0, 8};
    GraphoptTrainer *t, *sequences;
    char path[4096];
    if (argc != 5 || graphopt_open(argv[1], &t) || graphopt_open(argv[3], &sequences)) return puts(graphopt_message()), 1;
    for (int i = 0; i < 16; i++) x[i] = (float)i / 8, bad[i] = NAN;
    for (size_t i = 0; i < sizeof damaged / sizeof *damaged; i++) report(damaged[i], opened(argv[4], damaged[i]));
    report("no feeds", graphopt_step(t, &loss));
    report("an unknown feed", graphopt_feed(t, "z", x, sizeof x, NULL));
    report("a state as a feed", graphopt_feed(t, "layers.0.bias", x, sizeof x, NULL));
    report("no numbers", graphopt_feed(t, "x", NULL, 0, NULL));
    report("a broken row", graphopt_feed(t, "x", x, 60, NULL));
    report("no rows", graphopt_feed(t, "x", x, 0, NULL));
    report("no rows in dims", graphopt_feed(t, "x", x, 0, none));
    report("turned dims", graphopt_feed(t, "x", x, sizeof x, turned));
    report("other bytes than dims", graphopt_feed(t, "x", x, 32, rows));
    report("a wrong label", graphopt_feed(t, "target", wrong, sizeof wrong, NULL));
    report("two rates", graphopt_feed(t, "base_learning_rate", rates, sizeof rates, NULL));
    report("two open sizes", graphopt_feed(sequences, "x", target, sizeof target, NULL));
    report("x", graphopt_feed(t, "x", x, sizeof x, NULL));
    report("a missing target", graphopt_step(t, &loss));
    report("one target", graphopt_feed(t, "target", target, sizeof *target, NULL));
    report("sizes that differ", graphopt_step(t, &loss));
    report("target", graphopt_feed(t, "target", target, sizeof target, NULL));
    report("a step", graphopt_step(t, &first));
    snprintf(path, sizeof path, "%s/state.safetensors", argv[1]);
    report("the state of the beginning", graphopt_load(t, path));
    report("a bad batch", graphopt_feed(t, "x", bad, sizeof bad, rows) || graphopt_step(t, &loss));
    report("a step on it", graphopt_step(t, &loss));
    report("a rate that is NaN", graphopt_feed(t, "base_learning_rate", rates + 1, sizeof *rates, NULL));
    snprintf(path, sizeof path, "%s/state.safetensors", argv[2]);
    report("a checkpoint of another graph", graphopt_load(t, path));
    report("a checkpoint that is not there", graphopt_load(t, "nowhere"));
    snprintf(path, sizeof path, "%s/cut state/state.safetensors", argv[4]);
    report("a checkpoint that is cut", graphopt_load(t, path));
    report("a path that is not there", graphopt_save(t, "nowhere/saved"));
    graphopt_feed(t, "x", x, sizeof x, rows);
    report("the same step again", graphopt_step(t, &loss) || loss != first);
    graphopt_close(t), graphopt_close(sequences);
    return 0;
}

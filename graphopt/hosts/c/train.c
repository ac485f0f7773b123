// Trains from a folder of graphopt.export_hosts, evaluates, and saves a checkpoint. README.md says how to run it.
#include "graphopt.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define FEEDS 64

typedef struct { char name[256], *numbers; size_t bytes; int64_t dims[16]; int known; } Feed;

static int fail(const char *message) { return fprintf(stderr, "train: %s\n", message), 1; }

// Reads NAME=4,7 from the command line, or NAME alone: a feed, and the sizes of its axes if they do not follow.
static int read_feed(const char *argument, const char *folder, size_t steps, Feed *feed) {
    char path[4096];
    size_t length = strcspn(argument, "=");
    snprintf(feed->name, sizeof feed->name, "%.*s", (int)length, argument);
    for (const char *size = argument + length; *size && feed->known < 16; size += 1 + strcspn(size + 1, ","))
        feed->dims[feed->known++] = strtoll(size + 1, NULL, 10);
    snprintf(path, sizeof path, "%s/%s.bin", folder, feed->name);
    FILE *file = fopen(path, "rb");
    if (!file || fseek(file, 0, SEEK_END)) return fail("expected a file NAME.bin of raw numbers for each feed");
    size_t size = (size_t)ftell(file);
    rewind(file);
    feed->bytes = size / steps;
    if (size % steps || !(feed->numbers = malloc(size)) || fread(feed->numbers, 1, size, file) != size || fclose(file))
        return fail("expected as many numbers in each step");
    return 0;
}

static int run(GraphoptTrainer *trainer, Feed *feeds, size_t count, size_t steps, const char *saved) {
    float loss;
    for (size_t step = 0; step < steps; step++) {
        for (Feed *x = feeds; x < feeds + count; x++) {
            const char *batch = x->numbers + step * x->bytes;
            if (graphopt_feed(trainer, x->name, batch, x->bytes, x->known ? x->dims : NULL)) return fail(graphopt_message());
        }
        GraphoptCode code = graphopt_step(trainer, &loss);
        if (code && code != GRAPHOPT_NOT_FINITE) return fail(graphopt_message());
        if (code) fail(graphopt_message());  // the state is as it was before a bad batch: go on
        printf("%.9g\n", loss);
    }
    if (graphopt_evaluate(trainer, &loss) || graphopt_save(trainer, saved)) return fail(graphopt_message());
    printf("%.9g\n", loss);
    return 0;
}

int main(int argc, char **argv) {
    const char *usage = "expected: train HOST BATCHES STEPS SAVED CHECKPOINT|- FEED[=SIZE,SIZE...]...";
    static Feed feeds[FEEDS];
    size_t steps = argc > 3 ? strtoul(argv[3], NULL, 10) : 0, count = argc > 6 ? (size_t)argc - 6 : 0;
    if (!steps || !count || count > FEEDS) return fail(usage);
    for (size_t i = 0; i < count; i++) if (read_feed(argv[6 + i], argv[2], steps, &feeds[i])) return 1;
    GraphoptTrainer *trainer;
    if (graphopt_open(argv[1], &trainer)) return fail(graphopt_message());
    int failed = strcmp(argv[5], "-") && graphopt_load(trainer, argv[5]) ? fail(graphopt_message())
                                                                        : run(trainer, feeds, count, steps, argv[4]);
    graphopt_close(trainer);
    for (size_t i = 0; i < count; i++) free(feeds[i].numbers);
    return failed;
}

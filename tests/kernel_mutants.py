"""Wrong kernels: each a change of a line of C, in a precision in which tests run.

`python tests/kernel_mutants.py [NUMBER ...]` tries them, prints what each is noticed by, and those that are not.
"""

from __future__ import annotations

import sys
from pathlib import Path

from mutants import Mutant, unnoticed

C = Path("graphopt/targets/native/c")
LOWER = ("medium", "high")


def of(file: str, precisions: tuple[str, ...], tests: str, chosen: str, old: str, new: str) -> list[Mutant]:
    """Return a mutant of a file for each precision: which tests of a file notice it, and the change."""
    tests = f"test_native_{tests}.py"
    return [Mutant(file, "", old, new, tests, chosen, C, precision) for precision in precisions]


MUTANTS = [
    *of(  # the product of low and high pieces
        *("avx512bf16.h", ("high",), "products", "is_the_runtimes"),
        "LOAD_B(0) MULTIPLY LOAD_A(1) MULTIPLY",
        "LOAD_B(0) MULTIPLY",
    ),
    *of(  # the last of an odd number of terms
        *("matrix.h", ("highest", *LOWER), "products", "is_the_runtimes"),
        "* cut->unit, g->k);",
        "* cut->unit, g->k - g->k % 2);",
    ),
    *of(  # the rows of the second tile of a block
        *("lines.h", LOWER, "products", "is_the_runtimes"),
        "x->from + (half * TILE_LINES * x->line",
        "x->from + (half * (TILE_LINES - 1) * x->line",
    ),
    *of(  # blocks of k
        *("matrix.h", ("highest", *LOWER), "products", "is_the_runtimes or wide_one"),
        "g->accumulate || p0 > 0,",
        "g->accumulate,",
    ),
    *of(  # where the second part of a weight begins
        *("weight.h", LOWER, "weights", "dequantize"),
        "dequantize(w, j, width, p + done, part",
        "dequantize(w, j, width, p, part",
    ),
    *of(  # the product of low and high pieces
        *("tiled.h", ("high",), "convolutions", "shifted-high"),
        "READ_B(b) ADD READ_A(a + p->a_piece) ADD",
        "READ_B(b) ADD",
    ),
    *of(  # the last channel of filters
        *("tiled.h", LOWER, "convolutions", "bfloat16 and shifted"),
        "odd = gemm_min(16, rest / 2)",
        "odd = gemm_min(15, rest / 2)",
    ),
    *of(  # the last of an even number of channels
        *("pairs.h", LOWER, "convolutions", "bfloat16 and shifted"),
        "2 * pair + 1 < x->channels ?",
        "2 * pair + 2 < x->channels ?",
    ),
    *of(  # the second of the last pair, of an odd number of channels
        *("direct.h", ("medium",), "convolutions", "bfloat16 and paired"),
        "d->first + c + d->depth < u->channels ? line",
        "d->first + c + d->depth <= u->channels ? line",
    ),
    *of(  # filters of the second half of channels
        *("direct.h", ("medium",), "convolutions", "bfloat16 and paired"),
        "half = d->depth * u->w_channel",
        "half = (d->depth - 1) * u->w_channel",
    ),
    *of(  # a pair of terms of filters
        *("pairs.h", ("medium",), "convolutions", "bfloat16 and paired"),
        "second ? second + at : NULL, 1,",
        "NULL, 1,",
    ),
    *of(  # zeros around an image
        *("pairs.h", LOWER, "convolutions", "bfloat16 and shifted"),
        "if (k < 0) k +=",
        "if (k < -1) k +=",
    ),
    *of(  # the last term of a window
        *("gathered.h", LOWER, "convolutions", "bfloat16 and gathered"),
        "if (term < d->terms)",
        "if (term + 1 < d->terms)",
    ),
    *of(  # filters after the first ones
        *("gathered.h", LOWER, "convolutions", "large and gathered and transposed"),
        "column1, a->first + row0,",
        "column1, row0,",
    ),
    *of(  # a sum over no channels
        *("pointwise.h", ("highest",), "convolutions", "without_images"),
        "do { /* once",
        "if (u->channels) do { /* once",
    ),
    *of(  # rows that see nothing
        *("attention.h", ("highest",), "attention", "see_nothing"),
        "if (!sees) return t->keys;",
        "",
    ),
    *of(  # columns that some rows of a block see
        *("attention.h", ("highest",), "attention", "causal_mask"),
        "<= MASKED)) end = j;",
        "<= MASKED)) end = j - 1;",
    ),
    *of(  # parts of the gradient of keys
        *("attention.h", ("highest",), "attention", "causal_mask"),
        "part < t->parts; part++)",
        "part + 1 < t->parts; part++)",
    ),
    *of(  # queries, keys and values of one projection
        *("attention.h", ("highest",), "attention", "thirds"),
        "x->data += third *",
        "x->data += 0 *",
    ),
    *of(  # the algorithm of least time
        *("choice.h", ("medium",), "convolutions", "rates_of_a_machine"),
        "if (!best || seconds < least)",
        "if (!best || seconds > least)",
    ),
]

if __name__ == "__main__":
    numbers = [int(number) for number in sys.argv[1:]] or range(len(MUTANTS))
    left = unnoticed([MUTANTS[number] for number in numbers])
    print(f"{len(numbers) - len(left)} of {len(numbers)} noticed")

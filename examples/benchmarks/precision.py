"""Show what each `matmul_precision` costs: losses beside float64, networks trained to the end, and rooflines.

- `losses`: 200 steps of five networks from the same weights on the same batches, beside PyTorch in float64; also with
  activations of bfloat16 (`passes.MixedPrecision`).
- `trained`: a CNN on digits and a transformer on characters, trained to the end from five seeds.
- `roofline`: the share of the limits of one core that steps reach: of float32 and bfloat16 arithmetic, and of memory.
- `rates`: times of steps whose convolutions are chosen by rates measured on the machine, and by fitted ones.

Times beside those of peers are of `peers/run.py`, with the peers `graphopt-high`, `graphopt-medium`, `torch-medium`
and `torch-autocast`.

    pip install -e ".[cpu]" torch==2.13.0
    python examples/benchmarks/precision.py [--parts losses trained roofline rates] [--seeds 5] [--steps 200]

It writes its tables to RESULTS_PRECISION.md, or to the page of `--write`, and keeps those of parts that it does not
measure again. No page has `rates` yet.
"""

from __future__ import annotations

import argparse
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import onnx
from limit import SLOTS, operations
from protocol import Job
from report import number, row
from run import machine
from workloads import workload, write

import graphopt
import graphopt.models
import passes
from graphopt.data import Characters, digits, text
from graphopt.targets.native.precision import obstacle, pieces_for, precision_in_words
from graphopt.targets.native.toolchain import FLAGS, compiler

ALL_PRECISIONS = ("highest", "high", "medium")
PRECISIONS = tuple(name for name in ALL_PRECISIONS if obstacle(name) is None)  # of this machine
BFLOAT16 = "bfloat16"  # activations, too
NETWORKS = {
    "mlp-small": "adamw",
    "mlp-wide": "adamw",
    "cnn": "adamw",
    "resnet": "momentum",
    "transformer": "adamw",
}
PAGE = Path(__file__).resolve().parent / "RESULTS_PRECISION.md"
# The peaks of one core, in billions per second: products and sums of float32 in registers, those of bfloat16 in tiles
# or by AVX-512, and bytes read from 64 MB.
PEAKS = r"""
#include <immintrin.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
static double now(void) { struct timespec t; clock_gettime(CLOCK_MONOTONIC, &t); return t.tv_sec + 1e-9 * t.tv_nsec; }
typedef float lanes __attribute__((vector_size(64)));
int main(void) {
    lanes sums[12] = {{0}}, x = {0};
    double best[3] = {0};
    char *memory = malloc(64 << 20);
    memset(memory, 1, 64 << 20);
    for (int round = 0; round < 9; round++) {
        double start = now();
        for (int i = 0; i < 1000000; i++) {
            for (int j = 0; j < 12; j++) sums[j] += x * x;
            for (int j = 0; j < 12; j++) __asm__ volatile("" : "+v"(sums[j]));
        }
        double rate = 1e6 * 12 * 32 / (now() - start);
        if (rate > best[0]) best[0] = rate;
#ifdef __AMX_BF16__
        struct {
            unsigned char palette, start, rest[14];
            unsigned short bytes[16];
            unsigned char rows[16];
        } config = {1};
        for (int i = 0; i < 8; i++) config.bytes[i] = 64, config.rows[i] = 16;
        if (syscall(SYS_arch_prctl, 0x1023, 18) == 0) {
            _tile_loadconfig(&config);
            start = now();
            for (int i = 0; i < 1000000; i++) {
                _tile_dpbf16ps(0, 4, 6);
                _tile_dpbf16ps(1, 4, 7);
                _tile_dpbf16ps(2, 5, 6);
                _tile_dpbf16ps(3, 5, 7);
            }
            rate = 1e6 * 4 * 16384 / (now() - start);
            _tile_release();
            if (rate > best[1]) best[1] = rate;
        }
#elif defined(__AVX512BF16__)
        start = now();
        for (int i = 0; i < 1000000; i++) {
            for (int j = 0; j < 12; j++) sums[j] = (lanes)_mm512_dpbf16_ps((__m512)sums[j], (__m512bh)x, (__m512bh)x);
            for (int j = 0; j < 12; j++) __asm__ volatile("" : "+v"(sums[j]));
        }
        rate = 1e6 * 12 * 64 / (now() - start);
        if (rate > best[1]) best[1] = rate;
#endif
        long sum = 0;
        start = now();
        for (long i = 0; i < (64 << 20) / 8; i += 8) {
            __m512i part = _mm512_loadu_si512(memory + 8 * i);
            __asm__ volatile("" ::"v"(part));
            sum += i;
        }
        rate = (double)(64 << 20) / (now() - start);
        if (rate > best[2]) best[2] = rate;
        __asm__ volatile("" ::"r"(sum));
    }
    printf("%g %g %g\n", best[0] * 1e-9, best[1] * 1e-9, best[2] * 1e-9);
}
"""


def steps_of(job: Job, precision: str, *, deterministic: bool = False) -> Callable[[int], float]:
    """Return a function that trains on a batch and returns the loss."""
    is_narrow = precision == BFLOAT16
    optimizers = {
        "momentum": passes.SGD(job.rate, momentum=0.9),
        "adamw": passes.AdamW(job.rate, weight_decay=0.01),
    }
    training = graphopt.compile(
        job.model,
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy(),
        optimizer=optimizers[job.optimizer],
        **({"precision": passes.MixedPrecision(BFLOAT16)} if is_narrow else {}),
    )
    executor = graphopt.Executor(
        training,
        threads=1,
        report=["loss"],
        native=True,
        deterministic=deterministic,
        matmul_precision="highest" if is_narrow else precision,
    )
    batches = [{"x": x, "target": target} for x, target in job.data]
    return lambda i: executor.step(batches[i % len(batches)])["loss"]


def in_float64(job: Job) -> Callable[[int], float]:
    """Return a function that does the same with PyTorch, in float64."""
    import torch
    from torch_peer import network

    torch.set_num_threads(1)
    built = network(job).double()
    kinds = {
        "momentum": lambda weights: torch.optim.SGD(weights, job.rate, momentum=0.9),
        "adamw": lambda weights: torch.optim.AdamW(weights, job.rate),
    }
    optimizer = kinds[job.optimizer](list(built.parameters()))
    batches = [(torch.from_numpy(x), torch.from_numpy(target)) for x, target in job.data]

    def step(i: int) -> float:
        x, target = batches[i % len(batches)]
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(built(x.double() if x.is_floating_point() else x), target)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def losses(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table of how far the losses of each precision are from those in float64."""
    yield f"Relative differences from PyTorch's losses in float64: the median of {options.steps} steps, the largest."
    yield "`bfloat16`: values of 16 bits (`precision=bfloat16`), products in `highest`."
    yield ""
    yield row("", "optimizer", "first, last loss", *PRECISIONS, BFLOAT16)
    yield row("---", "---", "---", *("---:" for _ in (*PRECISIONS, BFLOAT16)))
    for name in options.networks:
        write(options.work, name)
        job = Job(options.work, name, NETWORKS[name], 1)
        exact = list(map(in_float64(job), range(options.steps)))
        cells = []
        for precision in (*PRECISIONS, BFLOAT16):
            found = list(map(steps_of(job, precision), range(options.steps)))
            apart = [abs(a - b) / abs(b) for a, b in zip(found, exact, strict=True)]
            cells.append(f"{statistics.median(apart):.0e}, {max(apart):.0e}")
        print(name, *cells, flush=True)
        yield row(workload(name).title, job.optimizer, f"{exact[0]:.3f}, {exact[-1]:.4f}", *cells)


def digits_network(seed: int, precision: str) -> float:
    """Return the accuracy of a CNN on digits that it was not trained on."""
    data = digits()
    step = graphopt.compile(
        graphopt.models.cnn((1, 8, 8), 10, channels=(32, 64), hidden=128, seed=seed),
        loss=passes.CrossEntropy(),
        optimizer=passes.AdamW(learning_rate=1e-3),
    )
    executor = graphopt.Executor(step, report=["loss"], native=True, matmul_precision=precision)
    records = list(graphopt.fit(executor, data, epochs=12, batch_size=64, validation=0.2, seed=seed))
    return float(records[-1]["accuracy"])


def character_network(seed: int, precision: str) -> float:
    """Return the loss of a transformer on text that it was not trained on."""
    epochs, batch_size, data = 2, 32, text(context=64, characters=200_000)
    step = graphopt.compile(
        graphopt.models.transformer((64,), Characters.size, width=128, heads=4, layers=2, seed=seed),
        loss=passes.CrossEntropy(axis=-1),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=3e-3),
        schedule=passes.OneCycle(steps=epochs * math.ceil(0.9 * len(data) / batch_size)),
    )
    executor = graphopt.Executor(step, report=["loss"], native=True, matmul_precision=precision)
    records = list(graphopt.fit(executor, data, epochs=epochs, batch_size=batch_size, validation=0.1, seed=seed))
    return float(records[-1]["validation_loss"])


TRAINED = {
    "CNN on 8 x 8 digits, 12 epochs: validation accuracy": digits_network,
    "transformer on characters (2 layers of 128), 2 epochs: validation loss": character_network,
}


def trained(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the final results over some seeds."""
    yield f"Mean and standard deviation over {options.seeds} seeds; in brackets, each seed."
    yield ""
    yield row("", *PRECISIONS)
    yield row("---", *("---" for _ in PRECISIONS))
    for title, result in TRAINED.items():
        cells = []
        for precision in PRECISIONS:
            found = [result(seed, precision) for seed in range(options.seeds)]
            spread = statistics.stdev(found) if len(found) > 1 else 0.0
            each = ", ".join(f"{x:.4f}" for x in found)
            cells.append(f"{statistics.mean(found):.4f} ± {spread:.4f} ({each})")
        print(title, *cells, flush=True)
        yield row(title, *cells)


def peaks(folder: Path) -> list[float]:
    """Return the peaks of one core in billions per second: of float32, of bfloat16 (0 without), of bytes."""
    source, program = folder / "peaks.c", folder / "peaks"
    source.write_text(PEAKS)
    command = compiler()
    if command is None:
        raise SystemExit("expected a C compiler, found none")
    flags = [flag for flag in FLAGS if flag not in ("-fPIC", "-ffp-contract=off")]
    subprocess.run([*command, *flags, "-ffp-contract=fast", str(source), "-o", str(program)], check=True)
    return [float(word) for word in subprocess.run([program], capture_output=True, text=True).stdout.split()]


def milliseconds(step: Callable[[int], float], seconds: float = 2.0) -> float:
    for i in range(3):
        step(i)
    times: list[float] = []
    end = time.perf_counter() + seconds
    while len(times) < 5 or time.perf_counter() < end:
        start = time.perf_counter()
        step(len(times))
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def roofline(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the arithmetic and memory traffic of steps, and the shares of the limits that they reach."""
    single, half, memory = peaks(options.work)
    yield (
        f"One core: {single:.0f} GFLOP/s in float32, {half:.0f} in bfloat16, {memory:.1f} GB/s from memory. "
        "A step's GFLOP are those of its products and convolutions, its bytes one pass over parameters, gradients and "
        "optimizer slots, some of which are in caches. `high` multiplies three times as much. A share is the time that "
        "the limit alone would take, of the time of the step."
    )
    yield ""
    yield row("", "GFLOP", "MB", "", "ms", "arithmetic", "memory")
    yield row("---", "---:", "---:", "---", "---:", "---:", "---:")
    for name in options.networks:
        write(options.work, name)
        job = Job(options.work, name, NETWORKS[name], 1)
        flops = 1e-9 * sum(
            count * flops_of(found) for found, count in operations(onnx.load(job.model), len(job.data[0][0]))
        )
        size = sum(w.size for key, w in job.weights.items() if "running" not in key)
        traffic = 1e-6 * 4 * size * (2 * (1 + SLOTS[job.optimizer]) + 2)
        for precision in PRECISIONS:
            taken = milliseconds(steps_of(job, precision))
            pieces = pieces_for(precision)
            limit = (2 * pieces - 1) * flops / half if pieces else flops / single
            shares = [
                f"{100 * 1e3 * limit / taken:.0f} %",
                f"{100 * traffic / memory / taken:.0f} %",
            ]
            print(name, precision, f"{taken:.2f} ms", *shares, flush=True)
            yield row(workload(name).title, f"{flops:.2f}", number(traffic), precision, number(taken), *shares)


def rates(options: argparse.Namespace) -> Iterator[str]:
    """Yield a table of the times of steps by measured and by fitted rates, in turns."""
    yield "Milliseconds a step, in turns. Steps that are `deterministic` choose convolutions by fitted rates."
    yield ""
    yield row("", "", "measured", "fitted", "fitted : measured")
    yield row("---", "---", "---:", "---:", "---:")
    for name in options.networks:
        write(options.work, name)
        job = Job(options.work, name, NETWORKS[name], 1)
        if not any(node.op_type == "Conv" for node in onnx.load(job.model).graph.node):
            continue
        for precision in PRECISIONS[1:]:
            steps = [steps_of(job, precision, deterministic=fixed) for fixed in (False, True)]
            rounds = [[milliseconds(step, 0.3) for step in steps] for _ in range(9)]
            measured, fitted = map(statistics.median, zip(*rounds, strict=True))
            cells = [number(measured), number(fitted), f"{fitted / measured:.2f}"]
            print(name, precision, *cells, flush=True)
            yield row(workload(name).title, precision, *cells)


def flops_of(operation: Any) -> float:
    """Return the floating-point operations of a product or a convolution of limit.py."""
    kind, a, b, attributes = operation
    if kind == "MatMul":
        return 2.0 * math.prod(a) * b[-1]
    options = dict(attributes)
    axes = len(a) - 2
    strides, pads = options.get("strides", (1,) * axes), options.get("pads", (0,) * 2 * axes)
    places = [(a[i + 2] + pads[i] + pads[axes + i] - b[i + 2]) // strides[i] + 1 for i in range(axes)]
    return 2.0 * a[0] * math.prod(b) * math.prod(places)


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[str]]]] = {
    "losses": ("Losses beside float64", losses),
    "trained": ("Trained to the end", trained),
    "roofline": ("Shares of the limits", roofline),
    "rates": ("Measured rates and fitted ones", rates),
}


def main(given: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--write", type=Path, default=PAGE)
    options = parser.parse_args(given)
    before = options.write.read_text() if options.write.exists() else ""
    sections = dict(section.split("\n\n", 1) for section in before.split("\n## ")[1:])
    with tempfile.TemporaryDirectory() as folder:
        options.work = Path(folder)
        for part in options.parts:
            title, lines = PARTS[part]
            sections[title] = "\n".join(lines(options))
            options.write.write_text(page(options.write, sections))


def page(path: Path, sections: dict[str, str]) -> str:
    """Return the page of the parts that have a section, with the command that writes it."""
    parts = [part for part, (title, _) in PARTS.items() if title in sections]
    command = f"python examples/benchmarks/precision.py --parts {' '.join(parts)}"
    command += "" if path == PAGE else f" --write {path}"
    processor, *others = machine().split(", ")
    head = [
        f"# Precision of products on {processor}",
        "",
        f"`{command}` writes this page, here with {', '.join(others)}.",
        *(f"`{name}` runs {precision_in_words(name)}." for name in ALL_PRECISIONS[1:]),
    ]
    for title in (PARTS[part][0] for part in parts):
        head += ["", f"## {title}", "", sections[title].strip()]
    return "\n".join(head) + "\n"


if __name__ == "__main__":
    main()

"""Measure the check of the first step: its seconds, its share of a first minute, and its verdicts.

Run it: python examples/benchmarks/first_check.py [--threads 1] [--zoo [FAMILY ...]]

The workloads of `peers` and a ResNet-18 are compiled, and checked on a batch as if the machine remembered nothing.
Seconds are those of the processor, which on one thread and an idle machine are those of the clock. With `--zoo`, each
architecture of examples/zoo is exported by its framework, compiled, and checked on its first batch; all of them are
right, so that anything that differs is a false alarm. Results are printed as the tables of RESULTS_FIRST_CHECK.md.
"""

from __future__ import annotations

import argparse
import collections
import importlib
import math
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.checks.findings import CheckTable
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.state_buffers import StateBuffers

sys.path.insert(0, str(Path(__file__).parent / "peers"))
from workloads import WORKLOADS, data, model

ZOO = Path(__file__).resolve().parents[1] / "zoo"
FAMILIES = ("torch_own", "stopped_gradients", "structured_models", "control_flow_models", "half_models")
FAMILIES += ("processed_models", "torchvision_models", "timm_models", "transformers_models", "keras_models")
FAMILIES += ("jax_models", "scikit_learn_models")
SECONDS = 150  # of an architecture
ROUNDS = 3
Arrays = dict[str, np.ndarray]


def networks() -> Iterator[tuple[str, Any, Any, Arrays]]:
    """Yield a title, a model, a loss and a batch for each workload of `peers`, and for a larger network."""
    for work in WORKLOADS.values():
        loss = passes.CrossEntropy() if work.classes else passes.MeanSquaredError()
        batch = {name: rows[0] for name, rows in data(work).items()}
        yield work.title, model(work)[0], loss, batch
    try:
        import torch
        from networks import resnet18
    except ImportError:
        return
    rng = np.random.default_rng(0)
    x = rng.standard_normal((8, 3, 64, 64), np.float32)
    program = torch.onnx.export(resnet18().eval(), (torch.tensor(x),), dynamo=True, optimize=False, verbose=False)
    batch = {program.model_proto.graph.input[0].name: x, "target": rng.integers(0, 10, len(x))}
    yield "ResNet-18, 64 x 64, batch 8", program.model_proto, passes.CrossEntropy(), batch


def checked(step: Any, batch: Arrays, threads: int | None) -> tuple[float, float, CheckTable]:
    """Return the seconds of opening and of a check, and what it finds."""
    begun = time.process_time()
    model = graphopt.load(step)
    device = graphopt.Device("cpu", threads=threads)
    first = FirstCheck(device, model, StateBuffers(device, model))
    types = {x.name: x.dtype.numpy() for x in model.graph.inputs}
    given = {name: np.asarray(x, types[name]) for name, x in batch.items()}
    opened = time.process_time()
    findings = first.findings(given)
    return opened - begun, time.process_time() - opened, CheckTable(findings, "a batch")


def print_costs(threads: int | None) -> None:
    """Print the cost of the check for each network."""
    print("| network | numbers that train | processor (s) | of a minute | agrees | differs | not checked |")
    print("|---|---|---|---|---|---|---|")
    for name, proto, loss, batch in networks():
        step = graphopt.compile(proto, loss=loss, optimizer=passes.AdamW(1e-3), training=passes.TrainingMode())
        trained = sum(math.prod(x.shape.numpy()) for x in with_role(step, Role.PARAMETER))
        rounds = [checked(step, batch, threads)[1:] for _ in range(ROUNDS)]
        seconds = statistics.median(seconds for seconds, _ in rounds)
        counts = collections.Counter(x.verdict for x in rounds[0][1].findings)
        verdicts = " | ".join(str(counts[verdict]) for verdict in ("agrees", "differs", "not checked"))
        print(f"| {name} | {trained:,} | {seconds:.3f} | {seconds / 60:.2%} | {verdicts} |", flush=True)


def check_architecture(family: str, name: str, answers: Any) -> None:
    """Check an architecture of the zoo with each of its exporters, and put what is found into a queue."""
    warnings.simplefilter("ignore")
    from comparison import exported as export

    case = importlib.import_module(family).CASES[name]
    for exporter in case.exporters:
        try:
            made = export(case, exporter)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a framework raises
            answers.put((name, exporter, f"not exported: {type(error).__name__}", None, 0.0))
            continue
        try:
            chosen = {"parameters": passes.Parameters(freeze=case.freeze), "training": case.training}
            step = graphopt.compile(made.proto, loss=case.loss, optimizer=case.optimizers[0], **chosen)
            _, seconds, table = checked(step, made.batches[0].feeds, 1)
            answers.put((name, exporter, "", [(x.part, x.verdict, str(x)) for x in table.findings], seconds))
        except Exception as error:  # noqa: BLE001 - a row says which
            answers.put((name, exporter, f"{type(error).__name__}: {str(error)[:120]}", None, 0.0))


def sweep(families: list[str]) -> None:
    """Print the verdicts of the check on each family of the zoo."""
    sys.path.insert(0, str(ZOO))
    context = multiprocessing.get_context("fork")
    print("| family | files checked | agrees | not checked | false alarms | median (s) | refused or not exported |")
    print("|---|---|---|---|---|---|---|")
    for family in families:
        counts, seconds, skipped = collections.Counter[str](), list[float](), 0
        for name in importlib.import_module(family).CASES:
            answers: Any = context.SimpleQueue()
            process = context.Process(target=check_architecture, args=(family, name, answers))
            process.start()
            begun = time.monotonic()
            while process.is_alive() or not answers.empty():
                if time.monotonic() - begun > SECONDS:
                    process.kill()
                    skipped += 1
                    break
                if answers.empty():
                    time.sleep(0.1)
                    continue
                _, exporter, why, findings, spent = answers.get()
                if findings is None:
                    print(f"skipped: {family}, {name}, {exporter}: {why}", file=sys.stderr)
                    skipped += 1
                    continue
                seconds.append(spent)
                counts.update(verdict for _, verdict, _ in findings)
                for _, verdict, told in findings:
                    if verdict != "agrees":
                        print(f"{verdict}: {family}, {name}, {exporter}: {told}", file=sys.stderr)
            process.join()
        median = statistics.median(seconds) if seconds else 0.0
        row = [counts["agrees"], counts["not checked"], counts["differs"], f"{median:.2f}", skipped]
        print(f"| {family} | {len(seconds)} | {' | '.join(map(str, row))} |", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--zoo", nargs="*", metavar="FAMILY", help="check the zoo, or some of its families")
    arguments = parser.parse_args()
    os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp()
    if arguments.zoo is None:
        print_costs(arguments.threads)
    else:
        sweep(arguments.zoo or [*FAMILIES])


if __name__ == "__main__":
    main()

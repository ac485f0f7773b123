"""Compare the training graphs of files that PyTorch's exporter optimized, and of those with `optimize=False`.

A network is exported by `torch.onnx.export(dynamo=True)` in both ways. A network with BatchNormalization, which the
default folds into convolutions, is exported once, and its file is optimized by onnxscript, which leaves
BatchNormalization. A row counts, for each of the two files, the nodes of the plain training graph, its Shape nodes, the
values with a size that has no declared name, and what remains after lowering: the nodes, and the kernels among them.
With `--times`, it has the times of lowered steps: medians of rounds in which both take turns, on one thread.

Run it: python examples/zoo/unfolded.py [--only NAME ...] [--times] [--resume]
It updates RESULTS_UNFOLDED.md with the rows that it runs; --resume skips those that are there. A NAME is as in run.py.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import onnx
import onnxscript.optimizer
from comparison import Case, exported
from in_torch import TorchCase, TorchModel, trains, warm_up
from run import cases, chosen, told

import graphopt
import passes
from graphopt.graph.traversal import all_nodes
from graphopt.targets.native.lowering import plan

RESULTS = Path(__file__).resolve().parent / "RESULTS_UNFOLDED.md"
OPTIMIZED, UNFOLDED = "dynamo, dynamic", "dynamo unfolded, dynamic"
SECONDS, ROUNDS = 0.1, 7  # of a round; rounds
LIMIT = 240  # seconds of a network
NUMBERS = ("nodes", "Shape", "open", "lowered", "kernels", "us")
COLUMNS = (
    "family",
    "architecture",
    *(f"{x}, {way}" for x in NUMBERS for way in ("optimized", "unfolded")),
    "ratio",
)


def files(case: TorchCase) -> tuple[onnx.ModelProto, onnx.ModelProto, Any]:
    """Return a network's optimized file, the other one, and a batch."""
    unfolded = exported(case, UNFOLDED)
    assert isinstance(unfolded.model, TorchModel)
    if trains(unfolded.model.module):
        optimized = onnxscript.optimizer.optimize(onnx.ModelProto.FromString(unfolded.proto.SerializeToString()))
    else:
        optimized = exported(case, OPTIMIZED).proto
    return optimized, unfolded.proto, unfolded.batches[0].feeds


def counts(step: Any) -> list[int]:
    """Return the numbers of a plain training graph."""
    nodes = list(all_nodes(step.graph))
    shapes = [y.shape for node in nodes for y in node.outputs]
    unnamed = [s is None or any(str(dim).startswith(("unk", "None")) for dim in s) for s in shapes]
    lowered = plan(step)
    rest = len(list(all_nodes(lowered.model.graph)))
    return [len(nodes), sum(x.op_type == "Shape" for x in nodes), sum(unnamed), rest, len(lowered.calls)]


def compared(case: Case, times: bool) -> list[str]:
    """Return the cells of a network."""
    assert isinstance(case, TorchCase)
    optimized, unfolded, batch = files(case)
    chosen = {"parameters": passes.Parameters(freeze=case.freeze), "training": case.training}
    chosen |= {"loss": case.loss, "optimizer": case.optimizers[0]}
    steps = [graphopt.load(graphopt.compile(proto, **chosen)) for proto in (optimized, unfolded)]
    cells = [f"{x:,}" for pair in zip(*map(counts, steps), strict=True) for x in pair]
    if not times:
        return [*cells, "", "", ""]
    executors = [graphopt.Executor(step, threads=1, native=True, verify=False) for step in steps]
    calls = [functools.partial(executor.step, batch) for executor in executors]
    seconds = in_turns(calls)
    return [*cells, *(f"{1e6 * x:,.0f}" for x in seconds), f"{seconds[1] / seconds[0]:.2f}"]


def in_turns(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median time of each call, in rounds in which all take turns."""

    def spent(call: Callable[[], object], repeats: int) -> float:
        start = time.perf_counter()
        for _ in range(repeats):
            call()
        return (time.perf_counter() - start) / repeats

    repeats = [max(1, int(SECONDS / max(spent(call, 3) for _ in range(2)))) for call in calls]
    rounds = [[spent(*one) for one in zip(calls, repeats, strict=True)] for _ in range(ROUNDS)]
    return [statistics.median(taken) for taken in zip(*rounds, strict=True)]


def work(family: str, name: str, times: bool, answers: Any) -> None:
    """Put the row of a network into a queue; an error is its only cell."""
    warnings.simplefilter("ignore")
    try:
        answers.put(compared(cases(family)[name], times))
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a framework raises is a row
        answers.put([told(error).replace("|", "/")])


def answer(family: str, name: str, times: bool) -> list[str]:
    """Return the row of a network, which runs in a separate process."""
    context = multiprocessing.get_context("fork")
    answers = context.SimpleQueue()
    process = context.Process(target=work, args=(family, name, times, answers))
    process.start()
    begun = time.monotonic()
    while answers.empty() and process.is_alive() and time.monotonic() - begun < LIMIT:
        time.sleep(0.05)
    found = ["not done"] if answers.empty() else answers.get()
    process.kill()
    process.join()
    return [family, name, *found, *[""] * (len(COLUMNS) - 2 - len(found))]


def table(path: Path) -> list[list[str]]:
    """Read the rows of a table."""
    lines = path.read_text().splitlines() if path.exists() else []
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("|")]
    return rows[2:]


def written(rows: Sequence[Sequence[str]]) -> str:
    """Return the text of the page."""
    text = (__doc__ or "").partition("Run it:")
    lines = [
        "# Files without optimization",
        "",
        text[0].strip(),
        "",
        f"Run it: {text[2].splitlines()[0].strip()}",
        "",
    ]
    lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *rows)]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--times", action="store_true", help="compile kernels and measure steps")
    parser.add_argument("--resume", action="store_true", help="run only what has no row in the file yet")
    parser.add_argument("--table", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args()
    todo = chosen(options.only, False, [UNFOLDED], None)
    rows = table(options.table)
    done = {tuple(row[:2]) for row in rows} if options.resume else set()
    warm_up()
    for job in todo:
        if (job.family, job.name) in done:
            continue
        row = answer(job.family, job.name, options.times)
        print(" | ".join(row), flush=True)
        at = next((i for i, x in enumerate(rows) if x[:2] == row[:2]), len(rows))
        rows[at : at + 1] = [row]
        options.table.write_text(written(rows))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Train architectures of several frameworks for ten steps, in their framework and in graphopt, and compare the results.

Every row is an architecture, an exporter and an optimizer. Both sides train the same export on the same batches, in
float32, or in 16 bits with float32 masters of the weights. The program compares the losses of each step, the weights
that it finds in the export, the predictions of the trained model, and how many numbers train. A row with a difference
above 1e-4 (2e-3 in 16 bits), or with other trained numbers, is "reported" if graphopt's report names everything that
trains on one side only and what the exporter did to it. It is "chaotic" if the same numbers train and the framework's
own results differ as much between float32 and float64, or with other roundings: other convolutions of PyTorch, inputs
(of Keras, weights) that move by one rounding, up or down by chance. It is "not recorded" if the exporter drops what
stops a gradient (detach, the padding of an embedding) and the framework's training without it agrees. Otherwise, it
"differs".

Run it: python examples/zoo/run.py [--only NAME ...] [--exporters PATTERN ...] [--resume] [--sample] [--jobs 1]
It updates RESULTS.md with the rows that it runs; --resume skips the architectures and exporters that are there. A NAME
is an architecture, a family (torch_own, timm_models, ...) or a shell-style pattern. Each architecture and exporter runs
in a separate process, so that a crash becomes a row.
Install the extra `zoo`: pip install -e ".[cpu,zoo]".
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import json
import multiprocessing
import os
import platform
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

from comparison import Case, NotExported, Row, exported, judge

from graphopt import GraphoptError

HERE = Path(__file__).resolve().parent
RESULTS = HERE / "RESULTS.md"
FAMILIES = {
    "torch_own": "Modules written for the zoo (PyTorch)",
    "stopped_gradients": "Stopped gradients: self-distillation, codebooks, capsules, spikes (PyTorch)",
    "structured_models": "Flows, graphs, recommenders, masks and shared layers (PyTorch)",
    "control_flow_models": "Control flow and lengths that vary (PyTorch)",
    "half_models": "16-bit floats (PyTorch)",
    "processed_models": "Files after onnxslim, onnxsim, onnxoptimizer and ONNX Runtime (PyTorch)",
    "torchvision_models": "torchvision",
    "timm_models": "timm",
    "transformers_models": "transformers",
    "keras_models": "Keras, on PyTorch",
    "jax_models": "JAX, by jax2onnx",
    "scikit_learn_models": "scikit-learn",
}
SAMPLE = {
    "torch_own": ("group normalization", "GPT, tied head", "translation, LSTM", "siamese"),
    "stopped_gradients": ("SimSiam, BatchNormalization", "VAE", "VQ-VAE", "spikes, straight through"),
    "structured_models": ("RealNVP", "DLRM", "two towers", "siamese, BatchNormalization"),
    "control_flow_models": ("GRU, any length", "torch.cond", "scan"),
    "half_models": ("float16 perceptron",),
    "processed_models": ("cnn",),
    "scikit_learn_models": ("MLPRegressor, tanh, Adam", "MLPClassifier, three classes", "SGDRegressor"),
}
PACKAGES = (
    "torch",
    "torchvision",
    "timm",
    "transformers",
    "keras",
    "jax",
    "jax2onnx",
    "skl2onnx",
    "onnxruntime",
    "onnxslim",
    "onnxsim",
    "onnxoptimizer",
)
MARK = "row: "
SECONDS, BYTES = 240, 8 << 30  # limits of an architecture
VERDICTS = (
    "agrees",
    "reported",
    "not recorded",
    "chaotic",
    "differs",
    "false alarm",
    "refused",
    "failed",
    "not exported",
)
COLUMNS = (
    "architecture",
    "exporter",
    "optimizer",
    "verdict",
    "train",
    "losses",
    "weights",
    "predictions",
    "own",
    "first step",
    "cause",
)
NOTE = """\
Differences are the largest relative ones. `train` counts the numbers that train in the framework, tied ones once, and,
if different, those that train in graphopt. The brackets count the framework's weights that are in the export, also
reshaped or transposed, and are therefore compared by name. Rows of a table of positions that the exporter left out do
not count on either side. `own` compares the framework with itself in float64, and with other roundings.
`first step` counts what the check of the first step finds to agree. Rows without it are older than that check, and were
run with onnxslim 0.1.98, onnxsim 0.8.1 and onnxoptimizer 0.4.2, too."""


def cases(family: str) -> dict[str, Case]:
    """Import the framework of a family and return its cases by name."""
    found: dict[str, Case] = importlib.import_module(family).CASES
    return found


@dataclass(frozen=True)
class Job:
    """Hold what a process runs: an architecture with an exporter and its first optimizers."""

    family: str
    name: str
    exporter: str
    optimizers: int | None = None


def tried(case: Case, name: str, exporter: str, optimizers: int | None = None) -> Iterator[Row]:
    """Run an architecture with an exporter and each of the first optimizers; an error becomes a row."""
    try:
        export = exported(case, exporter)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a framework raises is a row
        yield Row(name, exporter, verdict=verdict(error), cause=told(error))
        return
    for optimizer in case.optimizers[:optimizers]:
        row = Row(name, exporter, label(optimizer))
        start = time.perf_counter()
        try:
            judge(row, case, optimizer, export)
        except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever a framework raises is a row
            row.verdict, row.cause = verdict(error), told(error)
        row.seconds = round(time.perf_counter() - start, 1)
        yield row


def label(optimizer: Any) -> str:
    return type(optimizer).__name__ + (" with momentum" if getattr(optimizer, "momentum", 0) else "")


def told(error: BaseException) -> str:
    """Return an error on one line, without colours and folders of packages."""
    text = re.sub(r"\x1b\[[0-9;]*m|\S*/site-packages/", "", str(error))
    return f"{type(error).__name__}: {' '.join(text.split())[:300]}"


def verdict(error: BaseException) -> str:
    """Return a verdict on an error: the exporter's, graphopt's, or an unexpected one."""
    if isinstance(error, NotExported):
        return "not exported"
    return "refused" if isinstance(error, GraphoptError) else "failed"


def work(job: Job, output: str) -> None:
    """Run a job in this process: write a line of JSON per row to a file, and the output of libraries."""
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))
    with open(output, "w") as file:
        os.dup2(file.fileno(), 1)
        os.dup2(file.fileno(), 2)
        for row in tried(cases(job.family)[job.name], job.name, job.exporter, job.optimizers):
            print(MARK + json.dumps(asdict(row)), file=file, flush=True)


class Child:
    """Hold the process of a job, forked from this one if this one has imported the family."""

    def __init__(self, job: Job, fork: bool) -> None:
        self.job = job
        self._output = tempfile.NamedTemporaryFile()  # noqa: SIM115 - it is read when the process has ended
        context = multiprocessing.get_context("fork" if fork else "spawn")
        self._process = context.Process(target=work, args=(job, self._output.name))
        self._process.start()
        self._start = time.monotonic()

    def found(self) -> list[Row] | None:
        """Return the rows after the process has ended or timed out, with a row about a failure; None before."""
        late = time.monotonic() - self._start > SECONDS
        if self._process.is_alive() and not late:
            return None
        self._process.kill()
        self._process.join()
        with self._output:
            lines = Path(self._output.name).read_text(errors="replace").splitlines()
        done = [Row(**json.loads(line.removeprefix(MARK))) for line in lines if line.startswith(MARK)]
        if late or self._process.exitcode:
            how = f"not done after {SECONDS} seconds" if late else f"the process ended with {self._process.exitcode}"
            last = next((line for line in reversed(lines) if line and not line.startswith(MARK)), "")
            done.append(Row(self.job.name, self.job.exporter, verdict="failed", cause=f"{how}: {last[:200]}"))
        return done


def run_all(todo: Sequence[Job], jobs: int) -> Iterator[tuple[Job, list[Row]]]:
    """Run each job in a separate process, and yield its rows."""
    waiting, running, warm = list(todo), [], set()
    while waiting or running:
        if waiting and len(running) < jobs:
            job = waiting.pop(0)
            warm_up = getattr(importlib.import_module(job.family), "warm_up", None)
            if warm_up is not None and job.family not in warm:
                warm_up()
                warm.add(job.family)
            running.append(Child(job, fork=job.family in warm))
            continue
        for child in list(running):
            done = child.found()
            if done is not None:
                running.remove(child)
                yield child.job, done
        time.sleep(0.05)


def chosen(
    only: Sequence[str] | None, sample: bool, exporters: Sequence[str] | None, optimizers: int | None
) -> list[Job]:
    """Return the architectures and exporters to run, by family."""
    found = []
    for family in FAMILIES:
        if (sample and family not in SAMPLE) or (only and family not in only and set(only) <= FAMILIES.keys()):
            continue
        try:
            names = list(cases(family))
        except ImportError as error:
            print(f"{family}: skipped, {error}", file=sys.stderr)
            continue
        if sample:
            names = list(SAMPLE[family])
        if only:
            names = [name for name in names if any(fnmatch.fnmatchcase(x, p) for x in (name, family) for p in only)]
        found += [
            Job(family, name, exporter, optimizers)
            for name in names
            for exporter in cases(family)[name].exporters
            if exporters is None or any(fnmatch.fnmatchcase(exporter, x) for x in exporters)
        ]
    return found


def cells(row: Row) -> list[str]:
    """Return a row of the table."""
    counts = "" if row.theirs is None else f"{row.theirs:,}"
    if row.ours is not None and row.ours != row.theirs:
        counts += f", here {row.ours:,}"
    weights = f"{number(row.weights)} ({row.compared})" if row.compared else ""
    numbers = number(row.losses), weights, number(row.predictions), number(row.own)
    told = [text.replace("|", "/") for text in (row.checked, row.cause)]
    return [row.name, row.exporter, row.optimizer, row.verdict, counts, *numbers, *told]


def number(x: float | None) -> str:
    return "" if x is None else f"{x:.0e}"


def table(path: Path) -> dict[str, list[list[str]]]:
    """Read the rows of a table by family."""
    found: dict[str, list[list[str]]] = {family: [] for family in FAMILIES}
    titles = {f"## {title}": family for family, title in FAMILIES.items()}
    family = ""
    for line in path.read_text().splitlines() if path.exists() else []:
        family = titles.get(line, family)
        parts = [part.strip() for part in line.strip("|").split("|")]
        if family and line.startswith("|") and len(parts) == len(COLUMNS) and parts[0] not in (COLUMNS[0], "---"):
            found[family].append(parts)
    return found


def merge(family: list[list[str]], found: list[list[str]], job: Job) -> None:
    """Replace the old rows of a job, or insert them behind those of the architecture."""
    new = {(row[1], row[2]) for row in found}
    at = max((i + 1 for i, row in enumerate(family) if row[0] == job.name), default=len(family))
    old = [row[0] == job.name and ((row[1], row[2]) in new or row[1:3] == [job.exporter, "-"]) for row in family]
    at = next((i for i, is_old in enumerate(old) if is_old), at)
    family[:] = [row for row, is_old in zip(family, old, strict=True) if not is_old]
    family[at:at] = found


def written(results: dict[str, list[list[str]]]) -> str:
    """Return the text of RESULTS.md."""
    everything = [row for family in results.values() for row in family]
    architectures = len({(family, row[0]) for family, found in results.items() for row in found})
    verdicts = Counter(row[3] for row in everything)
    lines = ["# The zoo", "", *(__doc__ or "").split("Run it:")[0].strip().splitlines(), "", NOTE, ""]
    lines += [f"{architectures} architectures, {len(everything)} rows: {counted(verdicts)}. {versions()}"]
    for family, title in FAMILIES.items():
        if results[family]:
            lines += ["", f"## {title}", "", f"{counted(Counter(row[3] for row in results[family]))}.", ""]
            lines += [f"| {' | '.join(row)} |" for row in (COLUMNS, ("---",) * len(COLUMNS), *results[family])]
    return "\n".join(lines) + "\n"


def counted(verdicts: Counter[str]) -> str:
    return ", ".join(f"{verdicts[verdict]} {verdict}" for verdict in VERDICTS if verdicts[verdict])


def versions() -> str:
    found = []
    for package in PACKAGES:
        try:
            found.append(f"{package} {metadata.version(package)}")
        except metadata.PackageNotFoundError:
            continue
    return f"Run with {', '.join(found)}, Python {platform.python_version()}."


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--only", nargs="+", metavar="NAME")
    parser.add_argument("--sample", action="store_true", help="run the architectures of the tests")
    parser.add_argument("--exporters", nargs="+", metavar="PATTERN", help='such as "graphopt *"; all by default')
    parser.add_argument("--optimizers", type=int, metavar="COUNT", help="the first ones of each architecture")
    parser.add_argument("--resume", action="store_true", help="run only what has no row in the file yet")
    parser.add_argument("--jobs", type=int, default=1)
    parser.add_argument("--table", type=Path, default=RESULTS, help="the file to write")
    options = parser.parse_args(arguments)
    todo = chosen(options.only, options.sample, options.exporters, options.optimizers)
    if not todo:
        parser.error("no architecture of that name")
    results = table(options.table)
    if options.resume:
        done = {(family, row[0], row[1]) for family, found in results.items() for row in found}
        todo = [job for job in todo if (job.family, job.name, job.exporter) not in done]
    for job, found in run_all(todo, options.jobs):
        for row in found:
            print(" | ".join(cells(row)), f"{row.seconds} s", row.worst, sep=" | ", flush=True)
        merge(results[job.family], [cells(row) for row in found], job)
        options.table.write_text(written(results))
    return 0


if __name__ == "__main__":
    sys.exit(main())

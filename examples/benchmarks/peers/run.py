"""Compare graphopt with its peers: step time, samples per second, memory and compile time of the same training steps.

Every peer is a process in a separate environment, which this program creates. It first compares the losses of 20 steps,
and does not measure peers whose losses differ. Then peers take turns in every round, so that the machine treats them
alike. Ratios are a peer's median time divided by graphopt's. Above 1, graphopt is faster. Every process may use as many
cores as threads. limit.py defines the limit.

gpu.py, one folder up, measures the peers on a GPU.

Run it: python examples/benchmarks/peers/run.py
    [--workloads linear cnn ...] [--peers graphopt torch ...] [--threads 1 2] [--rounds 7] [--parts table scaling]
It prints tables, writes them to RESULTS.md and short ones to the guide and the README, and draws cost against batch
size, width and depth, and compile time against the number of nodes. It keeps the results of earlier runs that it does
not measure again. If pip needs another index, set PIP_EXTRA_INDEX_URL.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import re
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import environments
from environments import CACHE, ROOT, Missing
from processes import PEERS, Failure, Process
from report import brief, markdown, summary

HERE = Path(__file__).resolve().parent
REFERENCE, TOLERANCE, ROUNDED = "torch", 1e-3, 5e-2
MARKS = "<!-- peers -->", "<!-- peers end -->"  # around the tables in pages

TABLE = (
    ("linear", "sgd"),
    ("mlp-small", "sgd"),
    ("mlp-small", "momentum"),
    ("mlp-small", "adamw"),
    ("mlp-wide", "adamw"),
    ("cnn", "adamw"),
    ("resnet", "momentum"),
    ("transformer", "adamw"),
    ("lstm", "adamw"),
)
SCALING = {
    "batch": [f"mlp-{batch}x256x2" for batch in (1, 4, 16, 64, 256, 1024)],
    "width": [f"mlp-32x{width}x2" for width in (16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 7168)],
    "depth": [f"mlp-32x64x{depth}" for depth in (1, 2, 4, 8, 16, 32)],
}
SWEPT = list(dict.fromkeys(name for swept in SCALING.values() for name in swept))
SCALED = ("graphopt", "graphopt-run", "torch", "torch-compile", "jax", "onnxruntime-training")
PARTS = ("table", "scaling")


@dataclass
class Result:
    """Hold the results of a peer on a workload; `rounds` are the median microseconds per step of each round."""

    workload: str
    optimizer: str
    threads: int
    peer: str
    samples: int = 0
    compile: float | None = None
    losses: list[float] | None = None
    apart: float | None = None
    peak: float | None = None
    rounds: list[float] = field(default_factory=list)
    error: str | None = None

    @property
    def cell(self) -> tuple[str, str, int]:
        return self.workload, self.optimizer, self.threads

    @property
    def median(self) -> float | None:
        return statistics.median(self.rounds) if self.rounds else None


def disagreement(losses: Sequence[float], reference: Sequence[float]) -> float:
    """Return the largest relative difference of two curves."""
    apart = [abs(a - b) / abs(b) for a, b in zip(losses, reference, strict=True)]
    return max(x if math.isfinite(x) else math.inf for x in apart)


def check(results: Sequence[Result], tolerance: float = TOLERANCE) -> None:
    """Compare curves with PyTorch's, or with the first one; record an error for peers that differ.

    Those that round the operands of products to bfloat16 may differ by `ROUNDED`.
    """
    trained = [result for result in results if result.losses and not result.error]
    if not trained:
        return
    reference = next((result for result in trained if result.peer == REFERENCE), trained[0])
    assert reference.losses is not None
    if max(reference.losses) - min(reference.losses) < 10 * TOLERANCE * abs(reference.losses[0]):
        reference.error = "its losses do not change: nothing to compare"
    for result in trained:
        assert result.losses is not None
        result.apart = disagreement(result.losses, reference.losses)
        rounds = result.peer.endswith(("medium", "autocast"))
        if not result.apart <= (max(ROUNDED, tolerance) if rounds else tolerance):
            result.error = f"trains something else: losses differ from {reference.peer}'s by {result.apart:.2g}"


def compare(
    workload: str,
    optimizer: str,
    threads: int,
    pythons: dict[str, Path | Missing],
    options: argparse.Namespace,
) -> list[Result]:
    """Start the peers one after the other, compare their losses, and time them in turns."""
    running: dict[str, Process] = {}
    results = {}
    for peer in pythons:
        result = results[peer] = Result(workload, optimizer, threads, peer)
        python = pythons[peer]
        if isinstance(python, Missing):
            result.error = f"no environment: {python}"
            continue
        script, _, variant = PEERS[peer]
        process = Process(python, (script, variant), options.work, workload, optimizer, threads)
        try:
            said = process.hear()
        except Failure as failure:
            result.error = str(failure)
            continue
        running[peer] = process
        result.losses, result.compile, result.samples = said["losses"], said["compile"], said["samples"]
    check(list(results.values()))
    for i in range(options.rounds):
        turn = [peer for peer in running if not results[peer].error]
        for peer in turn[i % len(turn) :] + turn[: i % len(turn)] if turn else ():
            time.sleep(0.05)  # until the threads of the previous peer sleep
            try:
                running[peer].say(str(options.seconds))
                said = running[peer].hear()
            except (Failure, BrokenPipeError) as failure:
                results[peer].error = str(failure)
                continue
            results[peer].rounds.append(statistics.median(said["times"]))
            results[peer].peak = said["peak"]
    for process in running.values():
        process.close()
    return list(results.values())


def lines(results: Sequence[Result]) -> Iterator[str]:
    """Yield the lines to print about the peers on one workload."""
    first = results[0]
    yield f"{first.workload}, {first.optimizer}, {first.threads} thread(s)"
    base = next((result.median for result in results if result.peer == "graphopt"), None)
    for result in results:
        median = result.median
        if result.error or median is None:
            yield f"  {result.peer:<26}{result.error or 'not timed'}"
            continue
        ratio = f"{median / base:8.2f}" if base else " " * 8
        compiled = "" if result.compile is None else f"{result.compile:9.2f} s to compile"
        peak = "" if result.peak is None else f"{result.peak:7.0f} MB"
        yield f"  {result.peer:<26}{median:12.1f} us{ratio}{compiled}{peak}"


def machine() -> str:
    """Return the processor's name, its cores, the system and its load."""
    try:
        found = re.search(r"model name\s*: (.*)", Path("/proc/cpuinfo").read_text())
    except OSError:
        found = None
    name = found.group(1) if found else platform.processor() or platform.machine()
    load = f", load {os.getloadavg()[0]:.1f} at the end" if hasattr(os, "getloadavg") else ""
    return f"{name}, {os.cpu_count()} cores, {platform.system()}, Python {platform.python_version()}{load}"


Cell = tuple[str, str, int, Sequence[str]]  # a workload, an optimizer, threads and peers


def table_cells(options: argparse.Namespace) -> list[Cell]:
    pairs = [pair for pair in TABLE if pair[0] in options.workloads]
    if options.optimizers:
        pairs = [(name, kind) for name in dict(pairs) for kind in options.optimizers]
    return [(*pair, threads, options.peers) for pair in pairs for threads in options.threads]


def scaling_cells(options: argparse.Namespace) -> list[Cell]:
    peers = [peer for peer in options.peers if peer in SCALED]
    return [(name, "sgd", 1, peers) for name in SWEPT if name in options.workloads]


def before(path: Path) -> tuple[dict[str, list[Result]], dict[str, str]]:
    """Return the results of earlier runs by part, and the versions of the peers."""
    record = json.loads(path.read_text()) if path.exists() else {}
    results = {part: [Result(**result) for result in record.get(part, [])] for part in PARTS}
    return results, record.get("versions", {})


def place(cell: tuple[str, str, int]) -> tuple[int, int]:
    """Return the position of a cell in the tables."""
    workload, optimizer, threads = cell
    return threads, TABLE.index((workload, optimizer)) if (workload, optimizer) in TABLE else len(TABLE)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    names = [*dict(TABLE), *SWEPT]
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--workloads", nargs="+", choices=names, default=names, metavar="NAME")
    parser.add_argument(
        "--optimizers",
        nargs="+",
        choices=("sgd", "momentum", "adamw"),
        help="instead of those of each workload",
    )
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=0.5, help="the seconds per peer and round")
    parser.add_argument("--environments", type=Path, default=CACHE, help="the folder of the environments")
    parser.add_argument(
        "--python",
        nargs="+",
        default=[],
        metavar="ENVIRONMENT=PYTHON",
        help="an interpreter to use instead of a new environment",
    )
    parser.add_argument("--write", type=Path, default=HERE.parent / "RESULTS.md")
    parser.add_argument("--readme", type=Path, default=ROOT / "README.md", help="the page whose table is replaced")
    guide = ROOT / "examples" / "guides" / "benchmarks.md"
    parser.add_argument("--guide", type=Path, default=guide, help="the page whose tables are replaced")
    parser.add_argument("--pictures", type=Path, default=ROOT / "examples" / "pictures")
    options = parser.parse_args()
    options.work = options.environments / "work"
    options.work.mkdir(parents=True, exist_ok=True)
    return options


def prepare(options: argparse.Namespace) -> dict[str, Path | Missing]:
    """Return an interpreter for each peer, or the reason for a missing one."""
    given = dict(pair.split("=", 1) for pair in options.python)
    found: dict[str, Path | Missing] = {name: Path(path) for name, path in given.items()}
    for name in dict.fromkeys(["graphopt", *(PEERS[peer][1] for peer in options.peers)]):
        if name not in found:
            try:
                found[name] = environments.python_of(name, options.environments)
            except Missing as missing:
                print(f"{name}: {missing}")
                found[name] = missing
    return found


def replace_table(page: Path, table: str) -> None:
    """Replace the text between the marks of a page."""
    text = page.read_text()
    start, end = (text.index(mark) for mark in MARKS)
    page.write_text(f"{text[:start]}{MARKS[0]}\n\n{table}\n\n{text[end:]}")


def main() -> None:
    options = arguments()
    pythons = prepare(options)
    if isinstance(pythons["graphopt"], Missing):
        raise SystemExit(f"graphopt has no environment: {pythons['graphopt']}")
    own = str(pythons["graphopt"])
    cells: dict[str, list[Cell]] = {
        "table": table_cells(options),
        "scaling": scaling_cells(options),
    }
    workloads = {cell[0] for part in options.parts for cell in cells[part]}
    environments.call(own, str(HERE / "workloads.py"), str(options.work), *sorted(workloads))
    path = options.work / "results.json"
    results, used = before(path)
    used |= {n: environments.versions(python) for n, python in pythons.items() if isinstance(python, Path)}
    for part in options.parts:
        for workload, optimizer, threads, peers in cells[part]:
            chosen = {peer: pythons[PEERS[peer][1]] for peer in peers}
            found = compare(workload, optimizer, threads, chosen, options)
            print("\n".join(lines(found)), flush=True)
            replaced = [r for r in results[part] if r.cell != (workload, optimizer, threads)]
            results[part] = sorted(replaced + found, key=lambda result: place(result.cell))
            record: dict[str, Any] = {name: list(map(asdict, of_part)) for name, of_part in results.items()}
            record |= {"machine": machine(), "swept": SCALING, "versions": used}
            path.write_text(json.dumps(record))
    if results["table"]:
        titles = {r.workload: (options.work / f"{r.workload}.txt").read_text() for r in results["table"]}
        options.write.write_text(markdown(results["table"], titles, machine(), used))
        print(f"written to {options.write}")
        replace_table(options.guide, summary(results["table"], titles, machine()))
        replace_table(options.readme, brief(results["table"], titles))
    if "scaling" in options.parts:
        environments.call(own, str(HERE / "pictures.py"), str(path), str(options.pictures))
        print(f"drawn in {options.pictures}")


if __name__ == "__main__":
    main()

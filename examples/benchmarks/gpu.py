"""Run the GPU tests, and measure training steps on an NVIDIA GPU beside PyTorch and JAX, with one command.

It installs nothing and takes the packages of its own environment. What is missing is left out, and a line says so:

    pip install -e ".[gpu,test]" "jax[cuda13]" optax nvidia-ml-py, and PyTorch's build for the same CUDA
    python examples/benchmarks/gpu.py

The peers start from the same weights and read the same rows. First their losses over 20 steps are compared, and peers
whose losses differ are not measured. Then they take turns. The page RESULTS_GPU.md is written after each row, so that
an interruption loses nothing, and keeps the rows of earlier runs. The script stops in time (`--minutes`).

    python examples/benchmarks/gpu.py --device cpu --small

tries the script without a GPU, on small batches.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import platform
import re
import statistics
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

from environments import ROOT, versions
from processes import Failure, Process
from protocol import PRECISIONS
from report import number, row
from run import Result, check
from workloads import workload, write

HERE = Path(__file__).resolve().parent
PYTHON = Path(sys.executable)
ROWS = {
    "mlp-wide": "adamw",
    "cnn": "adamw",
    "resnet": "momentum",
    "transformer": "adamw",
    "lstm": "adamw",
    "mlp-small": "adamw",
}
PEERS = {  # the script, and the words of its variant
    "graphopt": ("graphopt_peer", ""),
    "graphopt-graph": ("graphopt_peer", "graph"),
    "torch": ("torch_peer", ""),
    "torch-compile": ("torch_peer", "compile"),
    "jax": ("jax_peer", ""),
}
HEADINGS = {
    "graphopt": "graphopt",
    "graphopt-graph": "graphopt, CUDA graph",
    "torch": "PyTorch",
    "torch-compile": "torch.compile",
    "jax": "JAX",
}
TOLERANCES = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 5e-2, "float16": 5e-2}
MEASURED = ("float32", "bfloat16", "tf32")  # in this order, as time may run out
FOUND = {  # prints what a package has, or fails
    "graphopt": "import onnxruntime as o; o.preload_dlls() if hasattr(o, 'preload_dlls') else None; "
    "print('onnxruntime', o.__version__, *o.get_available_providers()); "
    "assert KIND == 'cpu' or 'CUDAExecutionProvider' in o.get_available_providers(), 'no CUDA provider'",
    "torch": "import torch; print('PyTorch', torch.__version__, 'CUDA', torch.version.cuda); "
    "assert KIND == 'cpu' or torch.cuda.is_available(), 'its CUDA finds no GPU'",
    "jax": "import jax, optax; print('JAX', jax.__version__, jax.default_backend()); "
    "assert KIND == 'cpu' or jax.default_backend() == 'gpu', 'it finds no GPU'",
}
NEEDED = {
    "graphopt": 'pip install -e ".[gpu]"',
    "torch": "pip install torch",
    "jax": 'pip install "jax[cuda13]" optax',
}
WORKERS = max(1, min(8, (os.cpu_count() or 1) // 2))
TESTS = ["-m", "pytest", "tests/test_gpu.py", "-vv", "-n", str(WORKERS), "--tb=short", "--durations=5"]
TESTS += ["-m", "exhaustive or not exhaustive", "-k", "not poses_as"]  # all but the trial without a GPU
MOST_OF_TESTS, LEAST = 300, 45  # seconds, of all tests, and of a row


class Clock:
    """Tell the seconds that are left."""

    def __init__(self, minutes: float) -> None:
        self._end = time.monotonic() + 60 * minutes

    @property
    def left(self) -> float:
        return max(0.0, self._end - time.monotonic())


def smi(query: str) -> list[str] | None:
    """Return what nvidia-smi tells of the first GPU, or None without one."""
    command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv,noheader,nounits", "--id=0"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired):
        return None
    found = [part.strip() for part in done.stdout.split(",")]
    return found if not done.returncode and found[0] else None


def memory_used() -> float | None:
    """Return the memory of the GPU that is in use, in MB."""
    found = smi("memory.used")
    return float(found[0]) if found and found[0].replace(".", "").isdigit() else None


def machine(kind: str) -> str:
    """Describe the GPU, or the processor."""
    if kind == "cuda" and (found := smi("name,driver_version,memory.total")):
        name, driver, memory = found
        return f"{name}, {memory} MB, driver {driver}, {os.cpu_count()} cores, Python {platform.python_version()}"
    return f"{platform.machine()}, {os.cpu_count()} cores, no GPU: a trial of the script, no measurement"


def found_packages(kind: str) -> dict[str, str]:
    """Return why a package cannot be measured, by its name; print what is there."""
    missing = {}
    for name, code in FOUND.items():
        command = [sys.executable, "-c", f"KIND = {kind!r}; {code}"]
        done = subprocess.run(command, capture_output=True, text=True, env=environment(kind))
        lines = done.stderr.strip().splitlines()
        if done.returncode:
            missing[name] = lines[-1][:200] if lines else f"ended with {done.returncode}"
            print(f"{name}: left out: {missing[name]}: {NEEDED[name]}", flush=True)
        else:
            print(f"{name}: {done.stdout.strip().splitlines()[-1]}", flush=True)
    return missing


def environment(kind: str) -> dict[str, str]:
    """Return the variables of the peers: JAX takes memory as it needs it, as the others do."""
    own = {
        "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
        "PYTHONPATH": f"{ROOT}:{os.environ.get('PYTHONPATH', '')}",
    }
    return {**os.environ, **own, **({"JAX_PLATFORMS": "cpu"} if kind == "cpu" else {})}


def tested(seconds: float, log: Path) -> dict[str, object]:
    """Run the GPU tests and return their summary and the names of those that failed, of the ones that time allowed."""
    print(f"tests/test_gpu.py, at most {seconds:.0f} s; the output is in {log}", flush=True)
    with log.open("w") as output:
        try:
            command = [sys.executable, *TESTS]
            plain = {**os.environ, "GRAPHOPT_NATIVE": "false"}  # the CPU, too, runs what ONNX Runtime has
            subprocess.run(command, cwd=ROOT, stdout=output, stderr=output, timeout=seconds, env=plain)
            end = ""
        except subprocess.TimeoutExpired:
            end = f", stopped after {seconds:.0f} s"
    found = re.findall(r"^\[gw\d+\].*? (PASSED|FAILED|ERROR|SKIPPED) (\S+::.+?) *$", log.read_text(), re.MULTILINE)
    failed = [name for outcome, name in found if outcome in ("FAILED", "ERROR")]
    counts = Counter(outcome.lower() for outcome, _ in found)
    summary = (", ".join(f"{count} {outcome}" for outcome, count in counts.items()) or "none ran") + end
    print(summary, *failed, sep="\n  ", flush=True)
    return {"summary": summary, "failed": failed}


class Cell:
    """Hold the peers of a workload in a precision: they start together, and compile side by side with other cells."""

    def __init__(self, name: str, precision: str, peers: Sequence[str], options: argparse.Namespace) -> None:
        self.name, self.precision, self._options = name, precision, options
        self.results = {peer: Result(name, ROWS[base_of(name)], options.threads, peer) for peer in peers}
        self._running: dict[str, Process] = {}
        for peer in peers:
            script, words = PEERS[peer]
            variant = " ".join(filter(None, [words, precision, "cuda" * (options.device == "cuda")]))
            work = (options.work, name, ROWS[base_of(name)], options.threads)
            self._running[peer] = Process(PYTHON, (script, variant), *work)

    def wait(self, seconds: float) -> None:
        """Wait until the peers have taken their first steps, and compare their losses; those that fail are left out."""
        end = time.monotonic() + seconds
        for peer, process in list(self._running.items()):
            process.patience = max(0.0, end - time.monotonic()) + 1
            if (said := self._heard(peer)) is not None:
                result = self.results[peer]
                result.losses, result.compile, result.samples = (
                    said["losses"],
                    said["compile"],
                    said["samples"],
                )
        check(list(self.results.values()), TOLERANCES[self.precision])

    def time(self, clock: Clock) -> None:
        """Time the peers in turns."""
        for i in range(self._options.rounds):
            turn = [peer for peer in self._running if not self.results[peer].error]
            for peer in turn[i % len(turn) :] + turn[: i % len(turn)] if turn and clock.left else ():
                if (said := self._heard(peer, str(self._options.seconds))) is not None:
                    self.results[peer].rounds.append(statistics.median(said["times"]))
                    if self._options.device == "cpu":
                        self.results[peer].peak = said["peak"]

    def close(self) -> None:
        """End the peers; on a GPU, note the memory that each gives back."""
        before = memory_used() if self._options.device == "cuda" and self._running else None
        while self._running:
            peer, process = self._running.popitem()
            process.close()
            if before is not None and (after := memory_used()) is not None:
                self.results[peer].peak, before = before - after, after

    def _heard(self, peer: str, said: str | None = None) -> dict[str, Any] | None:
        """Return the answer of a peer; if it has ended, keep the reason and return None."""
        try:
            if said is not None:
                self._running[peer].say(said)
            return self._running[peer].hear()
        except (Failure, BrokenPipeError) as failure:
            self.results[peer].error = str(failure)
            del self._running[peer]
            return None


def base_of(name: str) -> str:
    return name.partition("-batch")[0]


def cell_of(result: Result, notes: dict[str, int]) -> str:
    """Return the time and the memory of a result, or the number of the note that says why there is none."""
    if result.median is None or result.error:
        why = result.error or "not timed: no time was left"
        return f"({notes.setdefault(f'{HEADINGS[result.peer]}: {why}', len(notes) + 1)})"
    memory = "" if result.peak is None else f", {result.peak:,.0f} MB"
    return f"{number(result.median)}{memory}"


def table(results: Sequence[Result]) -> Iterator[str]:
    """Yield the table of a precision: a line per workload, and the ratio to the fastest of the others."""
    peers = [peer for peer in PEERS if any(result.peer == peer for result in results)]
    yield row("", "", *(HEADINGS[peer] for peer in peers), "graphopt / fastest other")
    yield row("---", "---", *("---:" for _ in peers), "---:")
    notes: dict[str, int] = {}
    for name in dict.fromkeys(result.workload for result in results):
        found = {result.peer: result for result in results if result.workload == name}
        times = {peer: r.median for peer, r in found.items() if r.median is not None and not r.error}
        own = [time for peer, time in times.items() if peer.startswith("graphopt")]
        others = [time for peer, time in times.items() if not peer.startswith("graphopt")]
        ratio = f"{min(own) / min(others):.2f}" if own and others else "-"
        cells = [cell_of(found[peer], notes) if peer in found else "" for peer in peers]
        optimizer = next(iter(found.values())).optimizer
        yield row(workload(name).title, optimizer, *cells, ratio)
    yield ""
    for text, note in notes.items():
        yield f"({note}) {text}  "


def page(record: Mapping[str, object], results: Mapping[str, Sequence[Result]]) -> str:
    """Return the page of all results."""
    lines = [
        "# graphopt on a GPU",
        "",
        "`python examples/benchmarks/gpu.py` writes this page. Cells are microseconds per step, and the memory of the "
        "GPU that is free again when the process has ended. All peers start from the same weights and read the same "
        "rows, which lie on the GPU, and the loss of each step. The last column divides graphopt's time by that of the "
        "fastest other peer. Below 1, graphopt is faster.",
        "",
        f"{record['machine']}. {record['date']}.",
        "",
    ]
    tests = record.get("tests")
    if isinstance(tests, dict):
        lines += ["## Tests", "", f"`pytest tests/test_gpu.py`: {tests['summary']}", ""]
        lines += [*(f"- {name}" for name in tests["failed"]), ""]
    for precision, found in results.items():
        agree = f"Losses over 20 steps agree to {TOLERANCES[precision]:.0e}."
        lines += [f"## {precision}", "", agree, "", *table(found), ""]
    lines += [
        "## Rounds, and time to compile, of all peers at once",
        "",
        row("workload", "precision", "peer", "seconds to the first step", "rounds, us", "losses apart"),
    ]
    lines += [row(*["---"] * 3, *["---:"] * 3)]
    for precision, found in results.items():
        for r in found:
            if r.median is not None:
                spread = f"{number(min(r.rounds))} to {number(max(r.rounds))}"
                apart = "-" if r.apart is None else f"{r.apart:.0e}"
                lines.append(row(r.workload, precision, HEADINGS[r.peer], number(r.compile), spread, apart))
    lines += ["", "## Versions", "", str(record["versions"]), ""]
    return "\n".join(lines)


def arguments(given: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--minutes", type=float, default=12, help="the time to stop in")
    parser.add_argument("--only", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=" ".join(ROWS))
    parser.add_argument("--peers", nargs="+", choices=PEERS, default=list(PEERS), metavar="PEER", help=" ".join(PEERS))
    parser.add_argument("--precisions", nargs="+", choices=PRECISIONS, default=MEASURED, metavar="PRECISION")
    parser.add_argument("--no-tests", action="store_true")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument(
        "--at-once",
        type=int,
        default=1,
        help="the workloads whose peers compile side by side: cores, divided by 4",
    )
    parser.add_argument("--seconds", type=float, default=0.4, help="the seconds per peer and round")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--small", action="store_true", help="batches of eight rows")
    parser.add_argument("--write", type=Path, default=HERE / "RESULTS_GPU.md")
    parser.add_argument(
        "--work",
        type=Path,
        default=Path.home() / ".cache/graphopt-benchmarks/gpu",
        help="the folder of models and logs",
    )
    options = parser.parse_args(given)
    options.threads = 0 if options.device == "cuda" else 1  # 0: the peer's own choice
    for folder in (options.work, options.write.parent):
        folder.mkdir(parents=True, exist_ok=True)
    return options


def main(given: Sequence[str] | None = None) -> None:
    options = arguments(given)
    if options.device == "cuda" and smi("name") is None:
        raise SystemExit("no NVIDIA GPU: nvidia-smi finds none; --device cpu --small tries the script without one")
    os.environ.update(environment(options.device))
    clock = Clock(options.minutes)
    print(machine(options.device), flush=True)
    missing = found_packages(options.device)
    store = options.write.with_suffix(".json")
    record = json.loads(store.read_text()) if store.exists() else {}
    results = {p: [Result(**r) for r in rows] for p, rows in record.get("results", {}).items()}
    record |= {
        "machine": machine(options.device),
        "date": datetime.date.today().isoformat(),
        "versions": versions(PYTHON),
    }

    def save() -> None:
        record["results"] = {p: list(map(asdict, rows)) for p, rows in results.items()}
        store.write_text(json.dumps(record))
        options.write.write_text(page(record, results))

    if not options.no_tests:
        record["tests"] = tested(min(MOST_OF_TESTS, clock.left / 2), options.write.with_suffix(".log"))
        save()
    peers = [peer for peer in options.peers if peer.split("-")[0] not in missing]
    if options.device == "cpu":
        peers = [peer for peer in peers if peer != "graphopt-graph"]
    names = [f"{name}-batch8" if options.small else name for name in options.only]
    for name in names:
        write(options.work, name)
    wanted = [(precision, name) for precision in options.precisions for name in names]
    for i in range(0, len(wanted), options.at_once):
        together = wanted[i : i + options.at_once]
        if clock.left < LEAST:
            unmeasured = ", ".join(f"{name} in {precision}" for precision, name in together)
            print(f"{unmeasured}: no time left: --only and --precisions measure the rest", flush=True)
            continue
        cells = [Cell(name, precision, peers, options) for precision, name in together]
        try:
            for cell in cells:
                cell.wait(clock.left)
            for cell in cells:
                cell.time(clock)
                cell.close()
                before = results.get(cell.precision, [])
                rest = [r for r in before if r.workload != cell.name or r.peer not in peers]
                found = list(cell.results.values())
                results[cell.precision] = sorted([*rest, *found], key=lambda r: list(ROWS).index(base_of(r.workload)))
                save()
                print(f"{cell.precision}, {clock.left:.0f} s left", *table(found), sep="\n", flush=True)
        finally:
            for cell in cells:
                cell.close()
    print(f"written to {options.write}")


if __name__ == "__main__":
    main()

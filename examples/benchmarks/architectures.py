"""Measure steps of networks of daily life beside PyTorch, eager and compiled, in turns.

Each network is exported once, and trained by AdamW from the same weights on the same batches. Its first losses are
compared with PyTorch's in float64: they may be `BOUND` apart, or `TIMES` as far as PyTorch's in float32.

    pip install -e ".[cpu]" torch==2.13.0
    python examples/benchmarks/architectures.py [--networks vit gat ...] [--threads 1 2] [--rounds 9]

It writes RESULTS_ARCHITECTURES.md, and keeps the rows that it does not measure again.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent / "peers"))

import numpy as np
import torch
from networks import NETWORKS, Arrays, Network
from processes import confined
from protocol import measure
from report import number, row
from run import disagreement, machine

import graphopt
import passes

PAGE = Path(__file__).resolve().parent / "RESULTS_ARCHITECTURES.md"
FORMS = {
    "highest": "graphopt, ms",
    "eager": "PyTorch",
    "compile": "torch.compile",
    "high": "graphopt, `high`",
    "medium": "graphopt, `medium`",
}
RATE, BATCHES, COMPARED = 1e-4, 4, 4  # of AdamW; batches, which repeat; losses that are compared
BOUND = 1e-3  # of relative differences of float32 losses from those in float64
TIMES = 4  # so many times PyTorch's difference is allowed, too: some networks amplify every rounding
Step = Callable[[int], float]


def batches_of(network: Network) -> list[tuple[Arrays, np.ndarray]]:
    random = np.random.default_rng(0)
    found = []
    for _ in range(BATCHES):
        inputs = network.inputs(random)
        x = inputs["x"]
        shape = x.shape if x.dtype == np.int64 else x.shape[:1]
        found.append((inputs, random.integers(0, network.classes, shape) if network.classes else x))
    return found


def exported(module: torch.nn.Module, inputs: Arrays, path: Path) -> Path:
    """Write the model of a module, with a dynamic batch, in training mode: others share equal parameters."""
    axes = {name: {0: "batch"} for name in (*inputs, "y")}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(
            copy.deepcopy(module).train(),
            tuple(torch.from_numpy(np.concatenate([x, x])) for x in inputs.values()),
            str(path),
            dynamo=False,
            training=torch.onnx.TrainingMode.TRAINING,
            do_constant_folding=False,
            opset_version=17,
            input_names=list(inputs),
            output_names=["y"],
            dynamic_axes=axes,
        )
    return path


def torch_step(network: Network, module: torch.nn.Module, form: str) -> Step:
    """Return a function that trains a copy of a module; `form` is `eager`, `compile` or `float64`."""
    trained = copy.deepcopy(module).train()
    element = torch.float64 if form == "float64" else torch.float32
    trained.to(element)

    def tensor(array: np.ndarray) -> torch.Tensor:
        found = torch.from_numpy(array)
        return found.to(element) if found.is_floating_point() else found

    batches = [(list(map(tensor, inputs.values())), tensor(target)) for inputs, target in batches_of(network)]
    optimizer = torch.optim.AdamW(trained.parameters(), RATE, weight_decay=0.01, fused=True)

    def cost(inputs: list[torch.Tensor], target: torch.Tensor) -> torch.Tensor:
        y = trained(*inputs)
        if not network.classes:
            return torch.nn.functional.mse_loss(y, target)
        return torch.nn.functional.cross_entropy(y.flatten(0, -2), target.flatten())

    compared = torch.compile(cost) if form == "compile" else cost

    def step(i: int) -> float:
        optimizer.zero_grad()
        loss = compared(*batches[i % BATCHES])
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def our_step(network: Network, model: Path, precision: str, threads: int) -> Step:
    batches = [{**inputs, "target": target} for inputs, target in batches_of(network)]
    training = graphopt.compile(
        model,
        training=passes.TrainingMode(),
        loss=passes.CrossEntropy(axis=-1) if network.classes else passes.MeanSquaredError(),
        optimizer=passes.AdamW(RATE, weight_decay=0.01),
    )
    executor = graphopt.Executor(training, threads=threads, report=["loss"], native=True, matmul_precision=precision)
    return lambda i: executor.step(batches[i % BATCHES])["loss"]


def measured(
    name: str, threads: int, rounds: int, seconds: float, forms: Sequence[str] = tuple(FORMS)
) -> dict[str, Any]:
    """Return the milliseconds of each form's step, and how far its first losses are from those in float64."""
    network = NETWORKS[name]
    torch.set_num_threads(threads)
    torch.manual_seed(0)
    module = network.build()
    reference = torch_step(network, module, "float64")
    exact = [reference(i) for i in range(COMPARED)]
    with tempfile.TemporaryDirectory() as folder:
        model = exported(module, batches_of(network)[0][0], Path(folder, "model.onnx"))
        steps = {
            form: torch_step(network, module, form)
            if form in ("eager", "compile")
            else our_step(network, model, form, threads)
            for form in forms
        }
    apart = {form: disagreement([step(i) for i in range(COMPARED)], exact) for form, step in steps.items()}
    times: dict[str, list[float]] = {form: [] for form in steps}
    for turn in range(rounds if apart["highest"] <= max(BOUND, TIMES * apart["eager"]) else 0):
        order = list(steps)
        for form in order[turn % len(order) :] + order[: turn % len(order)]:
            time.sleep(0.02)  # until the threads of the previous form sleep
            times[form].append(statistics.median(measure(steps[form], BATCHES, seconds)) / 1000)
    return {"ms": {form: statistics.median(found) for form, found in times.items() if found}, "apart": apart}


def in_a_process(name: str, threads: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return what a fresh process measures on as many cores as threads."""
    command = [sys.executable, __file__, "--alone", name, "--threads", str(threads)]
    found = subprocess.run(
        [*command, "--rounds", str(options.rounds), "--seconds", str(options.seconds)],
        stdout=subprocess.PIPE,
        text=True,
        check=True,
        env={**os.environ, "OMP_NUM_THREADS": str(threads)},
        preexec_fn=confined(threads),
    )
    result: dict[str, Any] = json.loads(found.stdout.splitlines()[-1])
    return result


def page(results: dict[str, dict[str, Any]]) -> str:
    """Return the page of results, which are by network and number of threads."""
    lines = [
        "# Networks of daily life",
        "",
        f"`python examples/benchmarks/architectures.py` writes this page, here on {machine()}, PyTorch "
        f"{torch.__version__}. All are trained by AdamW, from the same weights on the same batches. Times are medians "
        "of rounds in which all take turns. Bold numbers are times relative to graphopt's with `highest`: above 1, "
        "graphopt is faster. Milliseconds per step are in brackets. A dash stands for what was not measured.",
    ]
    for threads in sorted({int(key.split()[1]) for key in results}):
        lines += ["", f"## {threads} thread{'s' * (threads > 1)}", "", row("", *FORMS.values())]
        lines.append(row("---", *["---:"] * len(FORMS)))
        for name, network in NETWORKS.items():
            ms = results.get(f"{name} {threads}", {}).get("ms")
            if ms:
                times = [(ms[form] / ms["highest"], ms[form]) if form in ms else None for form in [*FORMS][1:]]
                ratios = (f"**{ratio[0]:.2f}** ({number(ratio[1])})" if ratio else "-" for ratio in times)
                lines.append(row(network.title, number(ms["highest"]), *ratios))
    lines += [
        "",
        "## Losses",
        "",
        f"The largest relative difference of the first {COMPARED} losses from those of PyTorch in float64, one thread. "
        f"A network is timed if that of `highest` is at most {BOUND:g}, or {TIMES} times PyTorch's.",
        "",
        row("", *(title.removesuffix(", ms") for title in FORMS.values())),
        row("---", *["---:"] * len(FORMS)),
    ]
    for name, network in NETWORKS.items():
        if found := results.get(f"{name} 1", {}).get("apart"):
            lines.append(row(network.title, *(f"{found[form]:.0e}" if form in found else "-" for form in FORMS)))
    numbers = json.dumps(results, indent=None, separators=(",", ":"))
    return "\n".join(lines) + f"\n\n<!-- {numbers} -->\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS), metavar="NAME")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--seconds", type=float, default=0.3, help="the seconds per form and round")
    parser.add_argument("--write", type=Path, default=PAGE)
    parser.add_argument("--alone", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.alone:
        print(json.dumps(measured(options.alone, options.threads[0], options.rounds, options.seconds)))
        return
    text = options.write.read_text() if options.write.exists() else ""
    results = json.loads(text.split("<!-- ")[1].split(" -->")[0]) if text else {}
    for threads in options.threads:
        for name in options.networks:
            results[f"{name} {threads}"] = found = in_a_process(name, threads, options)
            print(name, threads, found, flush=True)
            options.write.write_text(page(results))


if __name__ == "__main__":
    main()

"""Measure Jacobians and Hessians beside torch.func on one thread, in turns, and the memory of integrated gradients.

Run it: python examples/benchmarks/derivatives.py [--seconds 5]
"""

from __future__ import annotations

import argparse
import io
import multiprocessing
import resource
import time
from collections.abc import Callable

import numpy as np
import onnx
import torch
from torch import nn

import graphopt
import passes
from graphopt import models
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session

ROWS, FEATURES = 128, 12


def network(outputs: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, outputs))


def exported(module: nn.Module) -> bytes:
    file = io.BytesIO()
    torch.onnx.export(
        module,
        (torch.randn(4, FEATURES),),
        file,
        input_names=["x"],
        output_names=["y"],
        dynamic_shapes=({0: torch.export.Dim("n")},),
        verbose=False,
    )
    return file.getvalue()


def milliseconds(calls: dict[str, Callable[[], object]], seconds: float) -> dict[str, float]:
    """Return the median time of calls that take turns."""
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        call()
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        for name, call in calls.items():
            start = time.process_time()
            call()
            times[name].append(time.process_time() - start)
    return {name: 1e3 * float(np.median(found)) for name, found in times.items()}


def compare(seconds: float) -> None:
    """Print a line for the Jacobian and the Hessian."""
    torch.set_num_threads(1)
    x = torch.randn(ROWS, FEATURES)
    print("| derivative | shape | rows | graphopt, ms | torch.func, ms | ratio | largest difference |")
    print("| --- | --- | ---: | ---: | ---: | ---: | ---: |")
    for name, outputs, own, peer in [
        ("Jacobian", 8, graphopt.jacobian, torch.func.jacrev),
        ("Hessian", 1, graphopt.hessian, torch.func.hessian),
    ]:
        module = network(outputs).eval()
        of_row = module if name == "Jacobian" else lambda row, module=module: module(row)[0]
        reference = torch.func.vmap(peer(of_row))
        expected = reference(x).detach()
        proto = onnx.load_from_string(exported(module))
        for rows in (1, 4, outputs if outputs > 1 else FEATURES):
            session = Session(Device(threads=1), own(proto, "x", rows=rows, keep=False))
            feeds = {"x": x.numpy()}
            (found,) = session.compute_arrays(feeds).values()
            worst = float(abs(torch.tensor(found) - expected).max() / abs(expected).max())
            times = milliseconds(
                {"own": lambda s=session, f=feeds: s.compute_arrays(f), "peer": lambda r=reference: r(x)},
                seconds,
            )
            ratio = times["peer"] / times["own"]
            print(
                f"| {name} | {list(found.shape)} | {rows} | {times['own']:.2f} | {times['peer']:.2f} | {ratio:.2f} | "
                f"{worst:.1e} |"
            )


def peak(steps: int) -> float:
    """Return the peak of the memory, in MB, of a process that explains images by so many steps."""
    network = models.cnn((3, 32, 32), 10)
    explained = graphopt.explain(network, passes.IntegratedGradients(steps=steps), keep=False)
    feeds = {"x": np.ones((16, 3, 32, 32), np.float32), "class": np.zeros(16, np.int64)}
    Session(Device(threads=1), explained).compute_arrays(feeds)
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3


def main(seconds: float = 5.0) -> dict[int, float]:
    """Print both tables; return the memory by the number of steps."""
    compare(seconds)
    with multiprocessing.get_context("spawn").Pool(1, maxtasksperchild=1) as pool:
        memory = dict(zip((8, 512), pool.map(peak, (8, 512), chunksize=1), strict=True))
    print(f"integrated gradients: {memory[8]:.0f} MB with 8 steps, {memory[512]:.0f} MB with 512")
    return memory


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=5.0)
    main(**vars(parser.parse_args()))

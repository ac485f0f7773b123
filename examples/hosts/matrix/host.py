"""Train by the loop of host.json, on the runtime that an adapter opens, and print the losses.

    python host.py ADAPTER FOLDER

Runs in the environment of one runtime: it imports NumPy, and what the adapter imports.
"""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

Arrays = dict[str, np.ndarray]
Call = Callable[[Arrays], Arrays]  # feeds and state by name -> outputs by name
Open = Callable[[Path, Arrays], Call]  # the file of a graph, and feeds for an example -> the graph


def run(open_graph: Open, folder: Path, batches: Mapping[str, np.ndarray]) -> list[float]:
    """Return the losses of one step for each row of `batches`."""
    contract = json.loads((folder / "host.json").read_text())
    content = (folder / contract["files"]["state"]).read_bytes()
    state = {}
    for x in contract["state"]:
        part = content[x["offset"] : x["offset"] + x["bytes"]]
        state[x["name"]] = np.array(np.frombuffer(part, x["type"])).reshape(x["shape"])
    constants = {x["name"]: np.array(x["default"], x["type"]) for x in contract["hyperparameters"]}
    successors = {x["name"]: x["next"] for x in contract["state"]}

    losses: list[float] = []
    call = None
    for rows in zip(*batches.values(), strict=True):
        inputs = {**dict(zip(batches, rows, strict=True)), **constants, **state}
        call = call or open_graph(folder / contract["files"]["train"], inputs)
        outputs = call(inputs)
        if not np.isfinite(np.asarray(outputs[contract["check"]])).all():
            raise ValueError(f"step {len(losses)}: expected a finite loss and state, found others")
        state = {name: np.asarray(outputs[successor]) for name, successor in successors.items()}
        losses.append(float(np.asarray(outputs["loss"]).reshape(())))
    return losses


def main(adapter: str, folder: str) -> None:
    """Print the losses of the batches in a folder, as the last line."""
    sys.path.insert(0, str(Path(__file__).parent / "adapters"))
    open_graph = importlib.import_module(adapter).open_graph
    with np.load(Path(folder) / "batches.npz") as batches:
        print("\n" + json.dumps(run(open_graph, Path(folder), dict(batches))))


if __name__ == "__main__":
    main(*sys.argv[1:])

"""Operations: a run is killed and goes on, the disk is full, the folder cannot be written, training is repeated."""

from __future__ import annotations

import hashlib
import json
import shutil
import sys
import time
from pathlib import Path

import in_torch
import torch
from desk import Desk
from sklearn.datasets import load_digits

EPOCHS, ROWS, TRAINED = 30, 32, 1437  # of 1,797 rows, in order
RUN = [
    "model=mlp",
    "data=digits",
    f"fit.epochs={EPOCHS}",
    "fit.shuffle=false",
    "fit.export=last",
    "fit.checkpoint.every=20 steps",
    "executor.native=false",
]
START = """
import graphopt
graphopt.save(graphopt.models.mlp((1, 8, 8), 10), "mlp.onnx")
"""


def play(desk: Desk) -> str:
    whole = desk.graphopt(*RUN, "folder=whole")
    desk.commands += 1
    killed = desk.start([sys.executable, "-m", "graphopt", *RUN, "folder=killed"])
    while len(list((desk.folder / "killed").glob("checkpoints/step-*"))) < 2 and killed.poll() is None:
        time.sleep(0.02)
    killed.kill()
    killed.wait()
    desk.graphopt(*RUN, "resume=true", "folder=killed")
    resumed = sha256(desk.folder / "killed") == sha256(desk.folder / "whole")

    desk.graphopt(*RUN, "folder=/proc/run")  # cannot be written
    desk.graphopt(*RUN, "folder=full", limit=4)
    desk.graphopt("evaluate", "folder=nowhere")
    told = sum("graphopt: error:" in refusal for refusal in desk.refusals)
    if desk.has("graphopt/cli/doctor.py"):
        desk.graphopt("doctor")
        desk.graphopt("recipe=whole", "folder=again")
    else:
        desk.command(sys.executable, "-m", "pip", "check")
        desk.graphopt(*RUN, "folder=again")  # the command of then, if somebody has kept it
    repeated = sha256(desk.folder / "again") == sha256(desk.folder / "whole")
    shutil.rmtree(desk.folder / "full", ignore_errors=True)
    assert "written" in whole
    lines = (desk.folder / "killed" / "metrics.jsonl").read_text().splitlines()
    ours = [record["validation_loss"] for record in map(json.loads, lines) if "validation_loss" in record][-1]
    desk.python(START)
    return (
        f"after kill -9 {'the same bits' if resumed else 'OTHER BITS'}; repeated: "
        f"{'the same bits' if repeated else 'OTHER BITS'}; {told} of 3 refusals in a line; held-out loss {ours:.4f} "
        f"(PyTorch, unbroken, {unbroken(desk.folder / 'mlp.onnx'):.4f})"
    )


def unbroken(path: Path) -> float:
    """Return the held-out loss of the same training in PyTorch."""
    digits, net = load_digits(), in_torch.network(path)
    x, y = torch.tensor(digits.images[:, None] / 16, dtype=torch.float32), torch.tensor(digits.target)
    parts = torch.arange(TRAINED).split(ROWS)
    batches = ((x[rows], y[rows]) for _ in range(EPOCHS) for rows in parts)
    in_torch.losses(net, torch.optim.AdamW(net.parameters(), 1e-3), batches)
    with torch.no_grad():
        return float(torch.nn.functional.cross_entropy(net(x[TRAINED:]), y[TRAINED:]))


def sha256(run: Path) -> str:
    return hashlib.sha256((run / "trained.onnx").read_bytes()).hexdigest()

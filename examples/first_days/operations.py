"""Operations: a run is killed and goes on, the disk is full, the folder cannot be written, training is repeated."""

from __future__ import annotations

import hashlib
import shutil
import sys
import time
from pathlib import Path

from desk import Desk

RUN = ["model=mlp", "data=digits", "fit.epochs=30", "fit.checkpoint.every=20 steps", "executor.native=false"]


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
    return (
        f"after kill -9 {'the same bits' if resumed else 'OTHER BITS'}; repeated: "
        f"{'the same bits' if repeated else 'OTHER BITS'}; {told} of 3 refusals in a line"
    )


def sha256(run: Path) -> str:
    return hashlib.sha256((run / "trained.onnx").read_bytes()).hexdigest()

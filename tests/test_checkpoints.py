"""Checkpoints: a run that is interrupted anywhere continues bit for bit, and no good checkpoint is lost."""

from __future__ import annotations

import itertools
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import pytest
import steps
from builders import mlp
from interruptions import StopAt, alike, same

import graphopt
import passes
from graphopt import cli
from graphopt.training.callbacks import Record, Run
from graphopt.training.checkpoints import find, read

RNG = np.random.default_rng(0)
X = RNG.standard_normal((203, 3)).astype(np.float32)
DATA = {"x": X, "target": (X.sum(axis=1) > 0).astype(np.int64)}
OPTIONS: dict[str, Any] = {"epochs": 4, "batch_size": 10}
KILL = signal.SIGKILL if hasattr(signal, "SIGKILL") else signal.SIGTERM


def executor(**options: Any) -> graphopt.Executor:
    chosen = {"optimizer": passes.AdamW(), "schedule": passes.Cosine(steps=80), **options}
    return steps.executor(mlp((3, 8, 2)), loss=passes.CrossEntropy(), **chosen)


@pytest.fixture(autouse=True)
def _written_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave no checkpoint out because the one before is still being written."""
    monkeypatch.setattr(graphopt.Checkpoints, "is_busy", False)


@pytest.fixture(scope="module")
def whole() -> tuple[graphopt.Executor, list[Record]]:
    runner = executor()
    return runner, graphopt.fit(runner, DATA, **OPTIONS)


@pytest.mark.parametrize("reads_state", [True, False])
@pytest.mark.parametrize("step", [1, 16, 17, 18, 40])
@pytest.mark.parametrize("shuffle", [True, "consecutive", False])
@pytest.mark.sample(10)
@pytest.mark.slow
def test_a_stopped_run_continues_bit_for_bit(tmp_path: Path, step: int, shuffle: Any, reads_state: bool) -> None:
    twin = executor(steps_per_call=4)
    expected = graphopt.fit(twin, DATA, **OPTIONS, shuffle=shuffle)
    stop = StopAt(step, reads_state=reads_state)
    options = {**OPTIONS, "shuffle": shuffle, "checkpoint": tmp_path}
    graphopt.fit(executor(steps_per_call=4), DATA, **options, callbacks=[stop])
    runner, seen = executor(), StopAt()
    records = graphopt.fit(runner, DATA, **options, resume=True, callbacks=[seen])
    assert same(runner, twin)
    assert alike(records) == alike(expected)
    assert seen.steps == list(range(stop.steps[-1] + 1, 69))
    assert graphopt.fit(executor(), DATA, **options, resume=True) == records  # nothing is left to do


@pytest.mark.slow
def test_another_batch_size_continues_the_same_order_of_rows(tmp_path: Path) -> None:
    graphopt.fit(executor(), DATA, epochs=1, batch_size=10, checkpoint=tmp_path, callbacks=[StopAt(3)])
    runner, twin = executor(), executor()
    graphopt.fit(runner, DATA, epochs=1, batch_size=7, checkpoint=tmp_path, resume=True)
    held = np.sort(np.random.default_rng(0).permutation(203)[:41])
    order = np.random.default_rng([0, 1]).permutation(np.delete(np.arange(203), held))
    cuts = [*range(0, 30, 10), *range(30, len(order), 7), len(order)]
    for start, end in itertools.pairwise(cuts):
        rows = np.sort(order[start:end])
        twin.step({name: array[rows] for name, array in DATA.items()})
    assert same(runner, twin)


@pytest.mark.slow
def test_which_checkpoints_stay(tmp_path: Path, whole: tuple[graphopt.Executor, list[Record]]) -> None:
    checkpoints = graphopt.Checkpoints(tmp_path, every="7 steps", keep=2, best="accuracy", keep_best=1)
    runner = executor(steps_per_call=5)
    records = graphopt.fit(runner, DATA, **OPTIONS, checkpoint=checkpoints)
    assert same(runner, whole[0])
    best = max(records, key=lambda record: record["accuracy"])["step"]  # the first of equal ones
    names = sorted(path.name for path in tmp_path.glob("step-*"))
    assert names == sorted({f"step-{step:08d}" for step in (63, 68, best)})
    assert (tmp_path / "best").read_text().strip() == f"step-{best:08d}"
    assert (tmp_path / "newest").read_text().strip() == "step-00000068"
    kept = read(tmp_path / f"step-{best:08d}")
    again = executor()
    again.load(kept.path / "state.safetensors")
    measured = graphopt.evaluate(again, DATA)
    assert measured["accuracy"] > 0.5
    assert kept.progress["records"][-1]["step"] == best


@pytest.mark.parametrize("name", ["state.safetensors", "progress.json", "manifest.json"])
@pytest.mark.parametrize("how", ["flipped", "cut", "gone"])
def test_a_damaged_checkpoint_gives_way_to_the_one_before(
    tmp_path: Path, whole: tuple[graphopt.Executor, list[Record]], name: str, how: str
) -> None:
    checkpoints = graphopt.Checkpoints(tmp_path, every="10 steps", best=None)
    graphopt.fit(executor(), DATA, **OPTIONS, checkpoint=checkpoints, callbacks=[StopAt(35)])
    damaged = find(tmp_path) / name
    content = bytearray(damaged.read_bytes())
    if how == "flipped":
        content[len(content) // 2] ^= 4
    damaged.write_bytes(content[: len(content) // 2] if how == "cut" else content)
    if how == "gone":
        damaged.unlink()
    with pytest.raises(graphopt.GraphoptError, match=r"damaged|expected a checkpoint"):
        read(damaged.parent)
    runner, seen = executor(), StopAt()
    with pytest.warns(UserWarning, match="an earlier checkpoint is tried"):
        graphopt.fit(runner, DATA, **OPTIONS, checkpoint=tmp_path, resume=True, callbacks=[seen])
    assert seen.steps[0] == 31
    assert same(runner, whole[0])


def test_another_graphs_checkpoint_is_refused(tmp_path: Path) -> None:
    graphopt.fit(executor(), DATA, **OPTIONS, checkpoint=tmp_path, callbacks=[StopAt(5)])
    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.1))
    other = graphopt.Executor(step, threads=1)
    before = other.state
    with pytest.raises(graphopt.GraphoptError, match="found that of another training graph"):
        graphopt.fit(other, DATA, **OPTIONS, checkpoint=tmp_path, resume=True)
    assert all((other.state[name] == array).all() for name, array in before.items())
    with pytest.raises(graphopt.GraphoptError, match="expected seed 1 as in this run, found seed 0"):
        graphopt.fit(executor(), DATA, **OPTIONS, seed=1, checkpoint=tmp_path, resume=True)


def test_a_file_in_place_of_the_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(graphopt.GraphoptError, match="expected a folder to write to"):
        graphopt.fit(executor(), DATA, **OPTIONS, checkpoint=tmp_path / "file")


@pytest.mark.filterwarnings("ignore:.*checkpoint not written")  # one may be under way
def test_a_removed_folder_comes_back(tmp_path: Path) -> None:
    class Remove(graphopt.Callback):
        def on_step_end(self, run: Run, record: Record) -> None:
            if run.step == 30:
                shutil.rmtree(tmp_path / "c", ignore_errors=True)

    checkpoints = graphopt.Checkpoints(tmp_path / "c", every="10 steps")
    graphopt.fit(executor(), DATA, **OPTIONS, checkpoint=checkpoints, callbacks=[Remove()])
    assert find(tmp_path / "c").name == "step-00000068"


def test_a_full_disk_loses_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Training goes on and says so; the checkpoint from before stays whole."""
    checkpoints = graphopt.Checkpoints(tmp_path, every="10 steps", best=None)
    flush = os.fsync

    class Fill(graphopt.Callback):
        def on_save_end(self, run: Run, path: Path) -> None:
            def full(_: int) -> None:
                raise OSError(28, "No space left on device")

            if path.name == "step-00000020":
                monkeypatch.setattr(os, "fsync", full)

    kept = "checkpoint not written: No space left on device; those from before stay"
    with (
        pytest.warns(UserWarning, match=kept),
        pytest.raises(graphopt.GraphoptError, match="No space left"),
    ):
        graphopt.fit(executor(), DATA, **OPTIONS, checkpoint=checkpoints, callbacks=[Fill()])
    monkeypatch.setattr(os, "fsync", flush)
    assert find(tmp_path).name == "step-00000020"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["newest", "step-00000010", "step-00000020"]


def test_a_loss_that_is_not_finite_leaves_the_last_good_state(tmp_path: Path) -> None:
    options: dict[str, Any] = {**OPTIONS, "shuffle": False, "validation": None, "allow_nan": True}
    x = X.copy()
    x[0] = np.nan
    runner = executor()
    with pytest.raises(graphopt.NonFiniteLoss):
        graphopt.fit(runner, {**DATA, "x": x}, checkpoint=tmp_path, **options)
    assert runner.batches == 0
    runner = executor()
    x[:] = X
    x[57] = np.nan
    with pytest.raises(graphopt.NonFiniteLoss):
        graphopt.fit(runner, {**DATA, "x": x}, checkpoint=tmp_path, **options)
    assert find(tmp_path).name == "step-00000005"
    assert all(np.isfinite(array).all() for array in read(find(tmp_path)).state.values())


# --- Processes that are ended from outside ---

EPOCHS = 30
RECIPE = [
    "data=digits",
    "model=mlp",
    "fit.epochs=6",
    "fit.batch_size=16",
    "fit.checkpoint.every=20 steps",
    "executor.threads=1",
    "executor.native=false",
]


WITHOUT_BUDGET = """
import graphopt.training.checkpoints
graphopt.training.checkpoints._BUDGET = float("inf")
import graphopt.__main__
"""


def start(folder: Path, *more: str) -> subprocess.Popen[str]:
    """Start a run that writes checkpoints one after the other."""
    command = [sys.executable, "-c", WITHOUT_BUDGET, *RECIPE, f"folder={folder}", "resume=true", *more]
    return subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        cwd=folder.parent,
        preexec_fn=_listen if os.name == "posix" else None,
    )


def _listen() -> None:
    """Heed signals, even if these tests run under nohup or in the background."""
    for number in (signal.SIGHUP, signal.SIGINT):
        signal.signal(number, signal.SIG_DFL)


def weights(folder: Path) -> list[bytes]:
    model = onnx.load(folder / "trained.onnx")
    return [one.raw_data for one in model.graph.initializer]


LONG = f"fit.epochs={EPOCHS}"  # seconds of training, and a checkpoint under way at most moments


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[bytes], float]:
    """Return the trained weights of a whole run, and its seconds from the start to the first epoch's end."""
    folder = tmp_path_factory.mktemp("whole") / "run"
    begun = time.perf_counter()
    process = start(folder, LONG)
    while epochs_logged(folder) == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.01)
    seconds = time.perf_counter() - begun
    assert process.wait() == 0, process.communicate()
    return weights(folder), seconds


def epochs_logged(folder: Path) -> int:
    path = folder / "metrics.jsonl"
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.slow
@pytest.mark.parametrize(
    "kills",
    [pytest.param(2, id="2"), pytest.param(50, id="50", marks=pytest.mark.exhaustive)],
)
def test_killed_at_random_moments(tmp_path: Path, uninterrupted: tuple[list[bytes], float], kills: int) -> None:
    """Four of five kills hit training, the fifth a random moment of the start."""
    expected, starting = uninterrupted
    moments = random.Random(kills)
    done = number = 0
    log: list[str] = []
    while done < kills:
        folder = tmp_path / f"run{number}"
        number += 1
        while True:
            before = epochs_logged(folder)
            process = start(folder, LONG)
            if done < kills:
                if done % 5 == 4:
                    time.sleep(moments.uniform(0, starting))
                else:
                    while epochs_logged(folder) <= before and process.poll() is None:
                        time.sleep(0.001)
                    time.sleep(moments.uniform(0, 0.4))
                process.send_signal(KILL)
            output, error = process.communicate(timeout=120)
            if process.returncode == 0:
                break
            assert process.returncode == -KILL, (output, error)
            done += 1
            has_one = (folder / "checkpoints" / "newest").exists()
            log.append(f"{epochs_logged(folder)}/{read(find(folder)).progress['step'] if has_one else '-'}")
        assert weights(folder) == expected, folder
        lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
        assert [line["epoch"] for line in lines] == list(range(1, EPOCHS + 1))
    print(f"\n{done} kills in {number} runs; epochs logged/step of the newest checkpoint: {', '.join(log)}")


@pytest.mark.skipif(os.name != "posix", reason="signals of POSIX")
@pytest.mark.parametrize(
    ("number", "times"),
    [
        *(("SIGUSR1", 1), ("SIGINT", 2)),
        *(pytest.param(number, 1, marks=pytest.mark.exhaustive) for number in ("SIGTERM", "SIGHUP", "SIGINT")),
    ],
)
@pytest.mark.slow
def test_a_signal_saves_and_exits_with_the_usual_code(tmp_path: Path, number: str, times: int) -> None:
    folder = tmp_path / "run"
    process = start(folder, "fit.epochs=100000", "fit.validation=null")
    while not (folder / "metrics.jsonl").exists() or (folder / "metrics.jsonl").stat().st_size == 0:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    for _ in range(times):
        process.send_signal(getattr(signal, number))
        time.sleep(0.02)
    output, error = process.communicate(timeout=60)
    code = getattr(signal, number)
    codes = (128 + code, -code) if times > 1 else (128 + code,)  # the second one may end Python itself
    assert process.returncode in codes, (output, error)
    assert "stopped" in output
    newest = read(find(folder))
    step = newest.progress["step"]
    assert f"after step {step}" in output
    assert weights(folder)
    assert not error


@pytest.mark.slow
def test_a_second_run_in_a_folder_stops_before_it_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    folder = tmp_path / "run"
    first = start(folder, "fit.epochs=100000", "fit.validation=null")
    while not (folder / "metrics.jsonl").exists():
        assert first.poll() is None, first.communicate()
        time.sleep(0.02)
    lasting = {path: path.read_bytes() for path in [folder / "config.yaml", *folder.glob(".hydra/*")]}
    assert len(lasting) == 5
    again = [*RECIPE, f"folder={folder}"]
    assert cli.main(again) == 1 and "found a run that is in progress there" in capsys.readouterr().err
    first.send_signal(signal.SIGINT)
    first.communicate(timeout=60)
    assert cli.main(again) == 1 and "expected a folder without a run" in capsys.readouterr().err
    assert cli.main([*again, "resume=true", "fit.epochs=7"]) == 1
    assert (
        "run: expected a run of the same recipe, found one with fit.epochs=100000, fit.validation=null: "
        "continue it with resume=run, or choose another" in capsys.readouterr().err
    )
    assert lasting == {path: path.read_bytes() for path in lasting}


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("checkpoints_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, tmp_path: Path) -> None:
    messages.refused("checkpoints_mistakes", call, {**globals(), "tmp_path": tmp_path})

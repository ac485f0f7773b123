"""Workers of Ray Train: the records of one process, and restarts after a failure."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest

from graphopt.training.checkpoints import find, read

pytest.importorskip("ray.train", reason="needs the extra `ray`")
ROOT = Path(__file__).parents[1]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "GRAPHOPT_NATIVE": "false"}
RAY = ["launcher=ray", "launcher.workers=2"]


def start(folder: Path, *arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "graphopt", f"folder={folder / 'run'}", *arguments],
        cwd=folder,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finished(run: subprocess.Popen[str]) -> str:
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 0, out
    return out


def epochs(folder: Path) -> list[dict[str, float]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_workers_of_ray_equal_one_process(tmp_path: Path) -> None:
    out = finished(start(tmp_path, *RAY, "fit.epochs=3"))
    assert "2 workers" in out and out.count("written ") == 1
    (tmp_path / "run").rename(tmp_path / "ray")
    finished(start(tmp_path, "fit.epochs=3"))
    one, two = epochs(tmp_path / "run"), epochs(tmp_path / "ray")
    assert len(one) == 3
    for a, b in zip(one, two, strict=True):
        assert a["loss"] == pytest.approx(b["loss"], rel=1e-6)
        assert (a["step"], a["accuracy"]) == (b["step"], b["accuracy"])
    state, other = (read(find(tmp_path / name)).state for name in ("run", "ray"))
    for name, array in state.items():
        np.testing.assert_allclose(array, other[name], atol=2e-6)


def test_an_error_of_the_recipe_is_one_line(tmp_path: Path) -> None:
    run = start(tmp_path, *RAY, "model=missing.onnx")
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 1 and out.count("\n") == 1
    assert out.startswith("graphopt: error: model 'missing.onnx': no such file")


@pytest.mark.exhaustive
def test_an_error_of_a_worker_ends_the_run_with_its_code(tmp_path: Path) -> None:
    run = start(tmp_path, *RAY, "fit.epochs=1", "optimizer.learning_rate=1e30")
    out, _ = run.communicate(timeout=600)
    assert run.returncode == 3, out
    assert out.count("graphopt: error: ") == out.count("found nan") == 1 and "resumed" not in out


def wait_for_epochs(run: subprocess.Popen[str], folder: Path, count: int) -> None:
    metrics, end = folder / "run/metrics.jsonl", time.monotonic() + 300
    while not metrics.exists() or len(metrics.read_text().splitlines()) < count:
        assert time.monotonic() < end and run.poll() is None
        time.sleep(0.1)


@pytest.mark.exhaustive
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_the_workers_after_a_step(tmp_path: Path, number: signal.Signals) -> None:
    run = start(tmp_path, *RAY, "fit.epochs=1000")
    wait_for_epochs(run, tmp_path, 2)
    run.send_signal(number)
    out, _ = run.communicate(timeout=300)
    assert run.returncode == 128 + number, out
    assert re.search(r"stopped +after step \d+", out)
    assert (tmp_path / "run/trained.onnx").exists()


def worker_of(folder: Path) -> int:
    """Return a worker of Ray Train whose working directory is a folder."""
    for entry in Path("/proc").iterdir():
        try:
            if b"RayTrainWorker" in (entry / "cmdline").read_bytes() and (entry / "cwd").resolve() == folder:
                return int(entry.name)
        except OSError:
            continue
    raise AssertionError("found no worker")


@pytest.mark.exhaustive
def test_ray_starts_workers_again_which_continue(tmp_path: Path) -> None:
    run = start(tmp_path, *RAY, "fit.epochs=40", "fit.checkpoint.every=20 steps")
    wait_for_epochs(run, tmp_path, 5)
    os.kill(worker_of(tmp_path.resolve()), signal.SIGKILL)
    out = finished(run)
    assert re.search(r"resumed +after step \d+", out)
    assert [one["epoch"] for one in epochs(tmp_path / "run")] == list(range(1, 41))

"""Two machines: network namespaces of Linux with their own addresses and names, joined by a link."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from graphopt.training.checkpoints import find, read

pytest.importorskip("mpi4py")
MPIEXEC = shutil.which("mpiexec", path=str(Path(sys.executable).parent)) or ""
FILE = Path(__file__).parents[1] / "examples/benchmarks/machines.py"
LONG = ["fit.epochs=100000", "fit.checkpoint.every=20 steps"]


def loaded() -> ModuleType:
    spec = importlib.util.spec_from_file_location("machines", FILE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MODULE = loaded()
pytestmark = [
    pytest.mark.skipif(not MPIEXEC or not MODULE.can_build(), reason="expects Open MPI 5, and root on Linux"),
    pytest.mark.slow,
]


@pytest.fixture
def machines() -> Iterator[Any]:
    with MODULE.machines(2, "1gbit") as found:
        yield found


def start(machines: Any, folder: Path, *arguments: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "graphopt", "launcher=mpi", f"folder={folder}", *arguments]
    environment = {"OMP_NUM_THREADS": "1", "GRAPHOPT_NATIVE": "false", "TTY_COMPATIBLE": "0"}
    return machines.start(MPIEXEC, *command, env=environment)


def validation(out: str) -> list[str]:
    return re.findall(r"validation loss \S+  accuracy \S+", out)


@pytest.mark.exhaustive
def test_two_machines_train_as_one(machines: Any, tmp_path: Path) -> None:
    run = start(machines, tmp_path / "two", "fit.epochs=3")
    out, err = run.communicate(timeout=120)
    assert run.returncode == 0, err
    assert "2 workers" in out
    one = subprocess.run(
        [sys.executable, "-m", "graphopt", f"folder={tmp_path / 'one'}", "fit.epochs=3"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert len(validation(out)) > 2 and validation(out) == validation(one.stdout)


def computing(machines: Any) -> list[int]:
    """Return the processes of workers."""
    commands = {one: Path(f"/proc/{one}/cmdline").read_bytes().split(b"\0") for one in machines.processes()}
    return [one for one, words in commands.items() if b"graphopt" in words and b"-n" not in words]


def test_a_cut_network_ends_the_workers_and_the_run_continues(machines: Any, tmp_path: Path) -> None:
    """Open MPI's mpiexec itself then waits for the other machine."""
    run = start(machines, tmp_path / "run", *LONG, "launcher.timeout=4")
    late = threading.Timer(90, machines.remove)
    late.start()
    while not list((tmp_path / "run").glob("checkpoints/step-*/manifest.json")):
        assert run.poll() is None
        time.sleep(0.1)
    assert len(computing(machines)) == 2
    machines.cut(1)
    assert any("expected an answer of all workers within 4 s, found none" in line for line in run.stderr)
    while computing(machines):
        assert run.poll() is None
        time.sleep(0.1)
    late.cancel()
    checkpoint = read(find(tmp_path / "run"))
    epochs = len(checkpoint.progress["records"]) + 1
    again = [sys.executable, "-m", "graphopt", f"resume={tmp_path / 'run'}", f"fit.epochs={epochs}"]
    found = subprocess.run(again, capture_output=True, text=True, check=True, cwd=tmp_path)
    assert f"after step {checkpoint.progress['step']:,}" in found.stdout

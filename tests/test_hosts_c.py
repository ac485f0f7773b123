"""A program in C trains as graphopt's executor does, and goes on from its checkpoints."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from host_graphs import GRAPHS, Batch, batches

import graphopt

pytestmark = pytest.mark.usefixtures("plain")

SOURCE = Path(__file__).parents[1] / "examples" / "hosts" / "c"
LINES = 120  # that the program has at most
STEPS = 50


@pytest.fixture(scope="module")
def program(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not found:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} has no library libonnxruntime.so in its wheel")
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    build = tmp_path_factory.mktemp("build")
    subprocess.run(["make", "-s", f"LIBRARY={found[0]}", f"BUILD={build}", "CC=gcc"], cwd=SOURCE, check=True)
    return build / "train"


def train(program: Path, folder: Path, state: Path, fed: Sequence[Batch], saved: Path) -> list[float]:
    """Return the losses of a run of the program, and after them that of the last batch in evaluation."""
    raw = saved.with_suffix("")
    raw.mkdir()
    contract = json.loads((folder / "host.json").read_text())
    inputs = {name: np.stack([batch[name] for batch in fed]) for name in fed[0]}
    inputs |= {x["name"]: np.full(len(fed), x["default"], x["type"]) for x in contract["hyperparameters"]}
    for name, array in inputs.items():
        array.tofile(raw / f"{name}.bin")
    files = folder / "train.onnx", folder / "evaluate.onnx", state, raw
    done = subprocess.run([program, *files, str(len(fed)), saved], check=True, capture_output=True, text=True)
    return [float(line) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.slow
def test_c_trains_and_evaluates_as_python_does(name: str, program: Path, tmp_path: Path) -> None:
    step, fed = GRAPHS[name][0](), batches(name, STEPS)
    graphopt.export_hosts(step, tmp_path / "host")
    initial = tmp_path / "host" / "state.safetensors"
    found = train(program, tmp_path / "host", initial, fed, tmp_path / "saved.safetensors")
    executor = graphopt.Executor(step)
    expected = [float(executor.step(batch)["loss"]) for batch in fed]
    expected.append(float(executor.evaluate(fed[-1])["loss"]))
    np.testing.assert_allclose(found, expected, rtol=1e-5)


@pytest.mark.slow
def test_checkpoints_cross(program: Path, tmp_path: Path) -> None:
    step, fed = GRAPHS["cnn"][0](), batches("cnn", 30)
    graphopt.export_hosts(step, tmp_path / "host")
    whole, executor = graphopt.Executor(step), graphopt.Executor(step)
    initial, first, second, third = (
        tmp_path / name
        for name in ("host/state.safetensors", "1.safetensors", "2.safetensors", "3.safetensors")
    )
    train(program, tmp_path / "host", initial, fed[:10], first)
    executor.load(first)  # on from C
    executor.run(fed[10:20])
    executor.save(second, checksum=False)
    train(program, tmp_path / "host", second, fed[20:], third)  # and on from Python
    assert third.stat().st_size == initial.stat().st_size
    executor.load(third)
    whole.run(fed)
    for name, array in whole.state.items():
        np.testing.assert_allclose(executor.state[name], array, rtol=1e-5, atol=1e-6, err_msg=name)


def test_a_damaged_state_is_refused(program: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((tmp_path / "host" / "state.safetensors").read_bytes()[:-4])
    with pytest.raises(subprocess.CalledProcessError) as refused:
        train(program, tmp_path / "host", damaged, batches("linear", 2), tmp_path / "saved.safetensors")
    assert "expected all numbers of its header" in refused.value.stderr
    assert not (tmp_path / "saved.safetensors").exists()


def test_the_program_is_short() -> None:
    assert len((SOURCE / "train.c").read_text().splitlines()) <= LINES

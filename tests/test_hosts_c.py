"""A program in C trains as graphopt's executor does, and goes on from its checkpoints."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import fuzz_hosts
import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
import safetensors.numpy
from builders import model
from host_graphs import (
    ADAPTER_FILES,
    ADAPTERS,
    BAD,
    BAD_AT,
    GRAPHS,
    MORE,
    Batch,
    adapted,
    batches,
    same_adapters,
    with_bad_batches,
)
from steps import assert_close

import graphopt
import passes

pytestmark = pytest.mark.usefixtures("plain")

SOURCE = Path(graphopt.__file__).parent / "hosts" / "c"
PROGRAMS = Path(__file__).parents[1] / "examples" / "hosts" / "c" / "test"
LISTING = Path(__file__).parent / "listings" / "c_mistakes.txt"  # UPDATE_LISTINGS=1 writes it
STEPS = 50


@pytest.fixture(scope="module")
def build(tmp_path_factory: pytest.TempPathFactory) -> Path:
    found = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not found:
        pytest.skip(f"onnxruntime {onnxruntime.__version__} has no library libonnxruntime.so in its wheel")
    for tool in ("make", "gcc"):
        if shutil.which(tool) is None:
            pytest.skip(f"{tool} is not installed")
    folder = tmp_path_factory.mktemp("build")
    make = ["make", "-s", f"LIBRARY={found[0]}", f"BUILD={folder}", "CC=gcc"]
    for source in (SOURCE / "train.c", PROGRAMS / "mistakes.c", PROGRAMS / "adapter.c"):
        subprocess.run([*make, f"PROGRAM={source}"], cwd=SOURCE, check=True)
    return folder


@pytest.fixture(scope="module")
def program(build: Path) -> Path:
    return build / "train"


def train(
    program: Path, folder: Path, state: Path | None, fed: Sequence[Batch], saved: Path, *feeds: str
) -> list[float]:
    """Return the losses of a run of the program, and after them that of the last batch in evaluation."""
    raw = saved.with_suffix("")
    raw.mkdir()
    for name in fed[0]:
        np.stack([batch[name] for batch in fed]).tofile(raw / f"{name}.bin")
    arguments = [folder, raw, str(len(fed)), saved, state or "-", *(feeds or fed[0])]
    environment = {**os.environ, "XDG_CACHE_HOME": str(saved.parent)}
    done = subprocess.run([program, *arguments], check=True, capture_output=True, text=True, env=environment)
    refused[saved] = done.stderr.splitlines()
    return [float(line) for line in done.stdout.splitlines()]


refused: dict[Path, list[str]] = {}  # what a run said of bad batches, by the file that it wrote


@pytest.mark.parametrize("name", [*GRAPHS, *MORE])
@pytest.mark.slow
@pytest.mark.sample(6)
def test_c_trains_and_evaluates_as_python_does(name: str, program: Path, tmp_path: Path) -> None:
    step, fed = {**GRAPHS, **MORE}[name][0](), batches(name, STEPS)
    graphopt.export_hosts(step, tmp_path / "host")
    found = train(program, tmp_path / "host", None, fed, tmp_path / "saved.safetensors")
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
        tmp_path / name for name in ("host/state.safetensors", "1.safetensors", "2.safetensors", "3.safetensors")
    )
    train(program, tmp_path / "host", initial, fed[:10], first)
    executor.load(first)  # on from C
    executor.run(fed[10:20])
    executor.save(second, checksum=False)
    train(program, tmp_path / "host", second, fed[20:], third)  # and on from Python
    assert third.stat().st_size == initial.stat().st_size
    executor.load(third)
    whole.run(fed)
    assert_close(executor.state, whole.state)


def test_a_damaged_state_is_refused(program: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    damaged = tmp_path / "damaged.safetensors"
    damaged.write_bytes((tmp_path / "host" / "state.safetensors").read_bytes()[:-4])
    with pytest.raises(subprocess.CalledProcessError) as refused:
        train(program, tmp_path / "host", damaged, batches("linear", 2), tmp_path / "saved.safetensors")
    assert "expected all numbers of its header" in refused.value.stderr
    assert not (tmp_path / "saved.safetensors").exists()


@pytest.mark.parametrize("is_turned", [True, False])
def test_a_checkpoint_of_another_graph_is_refused(is_turned: bool, program: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    state, other = safetensors.numpy.load_file(tmp_path / "host" / "state.safetensors"), tmp_path / "other.safetensors"
    name = next(name for name, x in state.items() if x.ndim == 2 and x.shape[0] != x.shape[1])
    safetensors.numpy.save_file({**state, name if is_turned else "more": state[name].T.copy()}, other)
    with pytest.raises(subprocess.CalledProcessError) as refused:
        train(program, tmp_path / "host", other, batches("linear", 2), tmp_path / "saved.safetensors")
    rows, columns = state[name].shape
    told = f"state {name}: expected float32 [{rows},{columns}], found another type or shape"
    assert (told if is_turned else f"expected {len(state)} states, found {len(state) + 1}: ") in refused.value.stderr


def test_a_runtime_whose_kernels_are_wrong_is_refused(program: Path, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    contract = tmp_path / "host" / "host.json"
    contract.write_text(re.sub(r'("onnxruntime": )"[^"]*"', r'\1"1.99"', contract.read_text()))
    with pytest.raises(subprocess.CalledProcessError) as refused:
        train(program, tmp_path / "host", None, batches("linear", 2), tmp_path / "saved.safetensors")
    assert "ONNX Runtime: expected 1.99 or later, whose kernels are right, found 1." in refused.value.stderr


@pytest.mark.parametrize("name", BAD)
def test_a_bad_batch_does_not_spoil_the_state(name: str, program: Path, tmp_path: Path) -> None:
    """Good batches train as they do without the bad ones, bit for bit."""
    step, fed = BAD[name][0](), with_bad_batches(name)
    good = [batch for i, batch in enumerate(fed) if i not in BAD_AT]
    graphopt.export_hosts(step, tmp_path / "host")
    with_bad, without = tmp_path / "1.safetensors", tmp_path / "2.safetensors"
    found = train(program, tmp_path / "host", None, fed, with_bad)
    expected = train(program, tmp_path / "host", None, good, without)
    assert [loss for i, loss in enumerate(found) if i not in BAD_AT] == expected
    assert with_bad.read_bytes() == without.read_bytes()
    pattern = re.compile(
        r"train: step (\d+): expected (a finite loss|finite numbers in state \S+), found .*as before; look"
    )
    assert [int(match[1]) for match in map(pattern.match, refused[with_bad]) if match] == [3, 6, 6]
    assert refused[without] == []
    executor = graphopt.Executor(step, threads=1)
    np.testing.assert_allclose(expected[:-1], [executor.step(batch)["loss"] for batch in good], rtol=1e-5)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_files_are_those_of_python(name: str, build: Path, tmp_path: Path) -> None:
    """After training in Python, byte for byte, or to rounding where a graph computes norms."""
    step, batch, forms = adapted(name)
    graphopt.export_hosts(step, tmp_path / "host")
    executor = graphopt.Executor(step, threads=1)
    executor.run([batch] * 5)
    executor.save(tmp_path / "state.safetensors", checksum=False)
    for form in ADAPTER_FILES:
        found, expected = tmp_path / f"{form} found", tmp_path / f"{form} expected"
        found.mkdir()
        command = [build / "adapter", tmp_path / "host", tmp_path / "state.safetensors", form, found]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if form not in forms:
            assert done.stderr.startswith(f"adapter: adapter: expected the form {form} in host.json, found none")
            continue
        assert not done.returncode, done.stderr
        path = expected / ADAPTER_FILES[form][0] if form == "onnxruntime" else expected
        expected.mkdir()
        graphopt.save_adapter(executor, path, form=form)  # type: ignore[arg-type]
        assert sorted(x.name for x in found.iterdir()) == ADAPTER_FILES[form]
        for file in ADAPTER_FILES[form]:
            if form == "onnxruntime" and "dora" in name:
                same_adapters(found / file, expected / file)
            else:
                assert (found / file).read_bytes() == (expected / file).read_bytes(), file


HOSTILE = [
    *(
        {key: value}
        for key in ("offset", "first", "shape", "strides", "state_strides")
        for value in (-1, 2**20, 2**31 - 1, 2**63, [2**31 - 1] * 2, [2**20] * 16, [2] * 17, "[", None)
    ),
    {"shape": [0, 0]},
    *({"state": name} for name in ("x", "learning_rate", "none", "a" * 9999, 5)),
    {"type": "bfloat16", "offset": 10**9},
]


@pytest.mark.slow
def test_hostile_blocks_of_adapters_are_refused(tmp_path: Path) -> None:
    """Under sanitizers."""
    if fuzz_hosts.library() is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc and ONNX Runtime's library")
    (tmp_path / "build").mkdir()
    program = fuzz_hosts.build(tmp_path / "build", PROGRAMS / "adapter.c")
    options = {**os.environ, "ASAN_OPTIONS": "detect_leaks=0"}
    step, _, _ = adapted("dora")
    graphopt.export_hosts(step, tmp_path / "host")
    contract, written = tmp_path / "host" / "host.json", tmp_path / "written"
    written.mkdir()
    command = [
        program,
        tmp_path / "host",
        tmp_path / "host" / "state.safetensors",
        "onnxruntime",
        written,
    ]
    host = json.loads(contract.read_text())
    (blocks,) = host["adapters"]["onnxruntime"].values()
    files = {
        "../adapter.onnx_adapter": blocks,
        "host.json": blocks,
        "": blocks,
    }
    cases = [{"adapter.onnx_adapter": [*blocks, {**blocks[0], **change}]} for change in HOSTILE]
    for case in [*cases, *({name: x} for name, x in files.items())]:
        contract.write_text(json.dumps({**host, "adapters": {"onnxruntime": case}}, indent=1))
        done = subprocess.run(command, capture_output=True, text=True, env=options, check=False)
        assert done.returncode == 1 and done.stderr.count("\n") == 1, (case, done)
        assert "host.json: adapters: expected" in done.stderr
    assert not [*written.iterdir()]


def sequences(*more: int) -> ir.Model:
    """Return a step on sequences of any length, with more axes."""
    axes = ",".join(["B", "T", *map(str, more)])
    return graphopt.compile(
        model(f"g (int64[{axes}] x) => (float[{axes},5] y) {{ y = Gather(table, x) }}", table=np.ones((9, 5))),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.SGD(0.1),
    )


@pytest.mark.parametrize("more", [(), (2,)])
def test_two_open_sizes_train_where_the_sizes_are_given(more: tuple[int, ...], program: Path, tmp_path: Path) -> None:
    step, random = sequences(*more), np.random.default_rng(0)
    shape = (3, 4, *more)
    fed = [{"x": random.integers(0, 9, shape), "target": random.integers(0, 5, shape)} for _ in range(5)]
    graphopt.export_hosts(step, tmp_path / "host")
    sizes = ",".join(map(str, shape))
    found = train(program, tmp_path / "host", None, fed, tmp_path / "1.safetensors", f"x={sizes}", f"target={sizes}")
    executor = graphopt.Executor(step)
    np.testing.assert_allclose(found[:-1], [executor.step(batch)["loss"] for batch in fed], rtol=1e-6)
    with pytest.raises(subprocess.CalledProcessError) as told:
        train(program, tmp_path / "host", None, fed, tmp_path / "2.safetensors")
    axes = ",".join(["B", "T", *map(str, more)])
    assert f"x: expected the sizes of int64 [{axes}], of which 2 are open, found none: pass dims" in told.value.stderr


def damage(host: Path, folder: Path) -> None:
    """Write copies of a host folder, each with one mistake."""
    state = (host / "state.safetensors").read_bytes()
    contract = (host / "host.json").read_text()
    for name, file, content in (
        ("empty", None, b""),
        ("json", "host.json", b"<!doctype html>"),
        ("version", "host.json", contract.replace('"version": 1', '"version": 2').encode()),
        ("state", "state.safetensors", b"abc"),
        ("cut state", "state.safetensors", state[:-4]),
        ("graph", "train.onnx", b"no graph"),
        ("evaluation", "evaluate.onnx", None),
    ):
        copy = folder / name
        copy.mkdir(parents=True)
        for path in host.iterdir() if file else ():
            (copy / path.name).write_bytes(path.read_bytes())
        if file and content is None:
            (copy / file).unlink()
        elif file:
            (copy / file).write_bytes(content)


def test_every_mistake_is_told_in_one_line(build: Path, tmp_path: Path) -> None:
    """The listing has the code of each mistake, too: those of graphopt.h."""
    for name, step in (
        ("mlp", GRAPHS["mlp"][0]()),
        ("linear", GRAPHS["linear"][0]()),
        ("sequences", sequences()),
    ):
        graphopt.export_hosts(step, tmp_path / name)
    damage(tmp_path / "mlp", tmp_path / "damaged")
    folders = [tmp_path / name for name in ("mlp", "linear", "sequences", "damaged")]
    done = subprocess.run([build / "mistakes", *folders], capture_output=True, text=True, cwd=tmp_path, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    found = done.stdout.replace(str(tmp_path), "FOLDER")
    if os.environ.get("UPDATE_LISTINGS"):
        LISTING.write_text(found)
    assert found == LISTING.read_text()


def fuzzed(count: int, seed: int) -> None:
    if fuzz_hosts.library() is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc and ONNX Runtime's library")
    assert fuzz_hosts.failures(count, seed) == []


@pytest.mark.slow
def test_hostile_folders_are_taken_or_refused_in_one_line() -> None:
    """Under sanitizers. Such a folder once wrote a kilobyte of the program's memory to a checkpoint."""
    fuzzed(40, seed=0)


@pytest.mark.exhaustive
def test_many_hostile_folders_are_taken_or_refused_in_one_line() -> None:
    fuzzed(2000, seed=1)


def test_a_hostile_evaluation_without_a_loss_is_refused(tmp_path: Path) -> None:
    if fuzz_hosts.library() is None or shutil.which("gcc") is None:
        pytest.skip("needs gcc and ONNX Runtime's library")
    (tmp_path / "build").mkdir()
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    (tmp_path / "host" / "predict.onnx").replace(tmp_path / "host" / "evaluate.onnx")
    built, saved = fuzz_hosts.build(tmp_path / "build"), tmp_path / "saved.safetensors"
    with pytest.raises(subprocess.CalledProcessError) as refused:
        train(built, tmp_path / "host", None, batches("linear", 2), saved)
    assert "evaluate.onnx: expected an output loss, found none" in refused.value.stderr

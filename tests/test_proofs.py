"""Each host compares its first step with the proof of its folder, and notices a wrong kernel."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import planted_faults
import pytest
import safetensors.numpy
from builders import model
from host_graphs import GRAPHS
from test_hosts_javascript import CHROMIUM, TESTS, javascript

import graphopt
import passes
from graphopt.hosts.proof import proof_batch, sums

pytestmark = pytest.mark.usefixtures("plain")
C = Path(__file__).parents[1] / "examples" / "hosts" / "c" / "test"
SOURCE = Path(graphopt.__file__).parent / "hosts" / "c"
node = pytest.mark.skipif(
    shutil.which("node") is None or not (TESTS / "node_modules" / "onnxruntime-node").exists(),
    reason="needs Node and `npm install --prefix examples/hosts/javascript/test`",
)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, list[str]]]:
    """Return host folders with wrong graphs by network, and what is wrong in each."""
    found = {}
    for name in planted_faults.NETWORKS:
        folder = tmp_path_factory.mktemp(name)
        found[name] = folder, planted_faults.written(name, folder)
    return found


def check_noticed(results: list[Mapping[str, Any]], faults: list[str], *, falls_back: bool = False) -> None:
    """Check that the right graph is proven, and each wrong one told in a line with the node that is wrong."""
    right, *wrong = results
    assert right["proofs"]["train"] == "proven" and not right["warned"]
    for result, fault in zip(wrong, faults, strict=True):
        (line,) = result["warned"] if falls_back else [result["error"]]
        assert "train.onnx: output " in line and "of the proof, found" in line, (fault, line)
        assert f"first in node {fault}" in line, (fault, line)
        if falls_back:
            assert line.endswith(": cpu computes it") and result["proofs"]["train"] == "proven", line


@node
@pytest.mark.parametrize("runtime", ["node", "wasm"])
@pytest.mark.parametrize("name", planted_faults.NETWORKS)
@pytest.mark.slow
def test_javascript_notices_a_wrong_kernel(name: str, runtime: str, folders: Any) -> None:
    folder, faults = folders[name]
    (results,) = javascript("proof.js", runtime, str(len(faults)), folder).values()
    check_noticed(results, faults)


@node
@pytest.mark.exhaustive
@pytest.mark.parametrize("provider", ["wasm", "webgpu"])
def test_a_browser_notices_a_wrong_kernel_and_takes_another_provider(provider: str, folders: Any) -> None:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    count = str(planted_faults.PER_NETWORK)
    found = javascript("proof_in_browser.js", provider, count, *(folder for folder, _ in folders.values()))
    if "skip" in found:
        pytest.skip(found["skip"])
    for folder, faults in folders.values():
        *results, again = found[str(folder)]
        check_noticed(results, faults, falls_back=provider == "webgpu")
        assert again["proofs"]["train"] == "proven before"


@node
@pytest.mark.skipif(not hasattr(onnxruntime, "AdapterFormat"), reason="this onnxruntime has no adapter files")
def test_a_browser_remembers_by_all_that_decides_what_is_computed(folders: Any) -> None:
    folder, _ = folders["adapter"]
    found = javascript("remembered.js", folder)
    keys = found["keys"]
    assert keys["plain"] == keys.pop("again") and "device" not in keys and "webnn" not in keys
    assert len(set(keys.values())) == len(keys) == 7
    assert found["proofs"] == {"train": "proven", "adapter": "not proven: the proof has none of this graph"}
    assert set(found["reads"].values()) == {1} and "proof.safetensors" in found["reads"]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the program that opens folders, and the shim."""
    found = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))
    if not found or not all(map(shutil.which, ("make", "gcc"))):
        pytest.skip("needs make, gcc and ONNX Runtime's library")
    folder = tmp_path_factory.mktemp("built")
    make = ["make", "-s", f"LIBRARY={found[0]}", f"BUILD={folder}", "CC=gcc", f"PROGRAM={C / 'proof.c'}"]
    subprocess.run(make, cwd=SOURCE, check=True)
    shim = [
        "gcc",
        "-shared",
        "-fPIC",
        f"-I{SOURCE / 'abi'}",
        C / "faulty.c",
        "-o",
        folder / "faulty.so",
        "-ldl",
    ]
    subprocess.run(shim, check=True)
    return folder


def opened(built: Path, cache: Path, *folders: Path, **shim: Path | str) -> list[tuple[int, str]]:
    """Return the code and the line of each folder that C opens, with what the shim reads."""
    said = {name: str(value) for name, value in {**shim, "LD_PRELOAD": built / "faulty.so"}.items()} if shim else {}
    environment = {**os.environ, **said, "XDG_CACHE_HOME": str(cache)}
    command = [built / "proof", *folders]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    return [(int(line.split("\t")[0]), line.split("\t")[1]) for line in done.stdout.splitlines()]


@pytest.mark.parametrize("name", planted_faults.NETWORKS)
def test_c_notices_a_wrong_kernel(name: str, built: Path, folders: Any, tmp_path: Path) -> None:
    folder, faults = folders[name]
    for i, fault in enumerate(faults):
        ((code, line),) = opened(built, tmp_path, folder, FAULTY=folder / f"faulty-{i}.onnx")
        assert code == 4 and "train.onnx: output " in line and f"first in node {fault}" in line, (fault, line)
    assert opened(built, tmp_path, folder, folder) == [(0, "proven"), (0, "proven before")]


@pytest.mark.parametrize(("version", "is_off"), [("1.18.1", True), ("1.19.0", False)])
def test_c_switches_plans_of_memory_off_where_they_overlap(
    version: str, is_off: bool, built: Path, folders: Any, tmp_path: Path
) -> None:
    folder, _ = folders["mlp"]
    *told, last = opened(built, tmp_path, folder, VERSION=version)
    assert last[0] == 0 and ({(0, "memory patterns off")} == {*told}) == is_off


def test_another_folder_is_not_remembered(built: Path, folders: Any, tmp_path: Path) -> None:
    """All files that decide what is computed are in the key: those with another number are compared again."""
    folder, _ = folders["adapter"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    assert opened(built, tmp_path, folder, copy) == [(0, "proven"), (0, "proven before")]  # the same files
    (note,) = (tmp_path / "graphopt").glob("proof-??")  # one of 256
    for content in (b"", bytes(8)):
        note.write_bytes(content)
        assert opened(built, tmp_path, folder, copy) == [(0, "proven"), (0, "proven before")]
    for name in ("state.safetensors", "weights.bin"):
        content = (copy / name).read_bytes()
        (copy / name).write_bytes(content[:-1] + bytes([content[-1] ^ 1]))  # the lowest bit of an exponent, or a sign
        ((code, line),) = opened(built, tmp_path, copy)
        assert line != "proven before"
        (copy / name).write_bytes(content)
    shutil.copy(copy / "faulty-0.onnx", copy / "train.onnx")
    ((code, line),) = opened(built, tmp_path, copy)
    assert code == 4 and "of the proof, found" in line


def test_a_folder_that_others_may_write_to_remembers_nothing(built: Path, folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["mlp"]
    cache = tmp_path / "graphopt"
    cache.mkdir()
    cache.chmod(0o777)
    assert opened(built, tmp_path, folder, folder) == [(0, "proven"), (0, "proven")] and not list(cache.iterdir())
    cache.chmod(0o700)
    assert opened(built, tmp_path, folder, folder) == [(0, "proven"), (0, "proven before")]


@pytest.mark.parametrize(("name", "more"), [("weight", 0), ("poids à côté", 0), ("weight", np.inf)])
def test_c_compares_states_of_each_type_and_name(name: str, more: float, built: Path, tmp_path: Path) -> None:
    text = "g (float[N,4] x) => (float[N,2] y) { h = Cast<to=10>(x)\n a = MatMul(h, w)\n y = Cast<to=1>(a) }"
    network = model(text, dtype=np.float16, w=np.random.default_rng(0).standard_normal((4, 2)))
    network.graph.initializer[0].name = network.graph.node[1].input[1] = name
    step = graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.export_hosts(step, tmp_path)
    assert opened(built, tmp_path, tmp_path) == [(0, "proven")]
    proof = dict(safetensors.numpy.load_file(tmp_path / "proof.safetensors"))
    proof["graph.train"][0] += [more, 9, 9, 9]
    safetensors.numpy.save_file(proof, tmp_path / "proof.safetensors")
    ((code, line),) = opened(built, tmp_path, tmp_path)
    if more:
        assert (code, line) == (0, "not proven: train.onnx: states that are not compared: 1")
        if (TESTS / "node_modules" / "onnxruntime-node").exists():
            ((right,),) = javascript("proof.js", "node", "0", tmp_path).values()
            assert right["proofs"]["train"] == "not proven: states that are not compared: 1"
    else:
        assert code == 4 and f"output {name}.next: expected the sum" in line and "first in node" not in line
        debug = dict(safetensors.numpy.load_file(tmp_path / "debug.safetensors"))
        lines = debug["debug.names"].tobytes().decode().splitlines()
        debug["debug.numbers"][lines.index("MatMul a")] += [0, 9, 9, 9]  # of float16
        safetensors.numpy.save_file(debug, tmp_path / "debug.safetensors")
        assert "first in node MatMul a: " in opened(built, tmp_path, tmp_path)[0][1]


def test_older_folders_are_not_proven_and_work(built: Path, folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["mlp"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    contract = json.loads((copy / "host.json").read_text())
    del contract["files"]["proof"], contract["files"]["debug"]
    (copy / "host.json").write_text(json.dumps(contract, indent=1))
    for name in ("proof", "debug"):
        (copy / f"{name}.safetensors").unlink()
    assert opened(built, tmp_path, copy) == [(0, "not proven: the folder has no proof")]
    if (TESTS / "node_modules" / "onnxruntime-node").exists():
        (((right),),) = javascript("proof.js", "node", "0", copy).values()
        assert right["proofs"] == {"train": "not proven: the folder has no proof"}


DAMAGES = ["cut", "bytes", "NaN", "large", "negative", "axes", "empty", "type", "rows", "label", "none"]


def damaged(content: bytes, kind: str) -> bytes:
    arrays = dict(safetensors.numpy.load(content))
    if kind == "cut":
        return content[:-16]
    if kind == "bytes":
        return b"\xff" * 64
    if kind == "NaN":
        arrays["graph.train"] = arrays["graph.train"] * np.nan
    if kind == "large":
        arrays["shape.x"] = np.array([2**62, 8])
    if kind == "negative":
        arrays["shape.x"] = np.array([-1, 8])
    if kind == "axes":
        arrays["shape.x"] = np.array([4] * 40)
    if kind == "empty":
        arrays["feed.x"] = np.zeros(0, np.float32)
    if kind == "type":
        arrays["feed.x"] = np.zeros(3, np.int8)
    if kind == "rows":
        arrays["graph.train"] = arrays["graph.train"][:1]
    if kind == "label":
        arrays["feed.target"] = np.array([2**40])
    if kind == "none":
        arrays.pop("feed.x")
    return safetensors.numpy.save(arrays)


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_proof_is_no_proof(kind: str, built: Path, folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["mlp"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    proof = copy / "proof.safetensors"
    proof.write_bytes(damaged(proof.read_bytes(), kind))
    ((code, line),) = opened(built, tmp_path, copy)
    assert (code, line.partition(":")[0]) in [
        (0, "not proven"),
        (4, "ONNX Runtime " + onnxruntime.__version__),
    ]
    assert (code == 4) == (kind == "NaN") or kind == "rows", line
    if (TESTS / "node_modules" / "onnxruntime-node").exists():
        ((right,),) = javascript("proof.js", "node", "0", copy).values()
        told = right.get("error") or right["proofs"]["train"]
        assert re.match(r"not proven: |GraphoptError: ort: train.onnx: output", told), told


def test_a_damaged_debug_file_names_no_node(built: Path, folders: Any, tmp_path: Path) -> None:
    folder, _ = folders["mlp"]
    copy = tmp_path / "copy"
    shutil.copytree(folder, copy)
    (copy / "proof.safetensors").write_bytes(damaged((copy / "proof.safetensors").read_bytes(), "NaN"))
    debug = (copy / "debug.safetensors").read_bytes()
    for size in (0, 2**61, 2**64 - 8):
        (copy / "debug.safetensors").write_bytes(size.to_bytes(8, "little") + debug[8:])
        ((code, line),) = opened(built, tmp_path, copy)
        assert code == 4 and "first in node" not in line


def test_there_is_no_proof_where_float32_computes_nan(tmp_path: Path) -> None:
    """The exponentials of large numbers overflow in float32, and not in float64."""
    network = model(
        "g (float[N,4] x) => (float[N,3] y) { z = MatMul(x, w)\n e = Exp(z)\n s = ReduceSum(e, a)\n y = Div(e, s) }",
        w=(np.random.default_rng(0).standard_normal((4, 3)) * 400).astype(np.float32),
        a=np.array([1]),
    )
    step = graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.export_hosts(step, tmp_path)
    assert not (tmp_path / "proof.safetensors").exists()


def test_an_invalid_variable_is_not_a_missing_runtime(monkeypatch: pytest.MonkeyPatch) -> None:
    step = GRAPHS["linear"][0]()
    monkeypatch.setenv("GRAPHOPT_MATMUL_PRECISION", "wrong")
    with pytest.raises(graphopt.GraphoptError, match="GRAPHOPT_MATMUL_PRECISION"):
        proof_batch(step)


def test_a_proof_needs_no_debug_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("graphopt.hosts.proof._debug")
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path)
    assert (tmp_path / "proof.safetensors").exists() and not (tmp_path / "debug.safetensors").exists()
    assert "debug" not in json.loads((tmp_path / "host.json").read_text())["files"]


@pytest.mark.parametrize("name", GRAPHS)
def test_the_proof_is_small(name: str, tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS[name][0](), tmp_path)
    assert (tmp_path / "proof.safetensors").stat().st_size <= 20_000


def test_sums_are_those_of_the_hosts() -> None:
    """Numbers by the hash as graphopt.c and proof.js write it."""
    expected = np.zeros(3)
    for i, x in enumerate((0.5, 2.0, -1.25, 3.0, 7.5)):
        h = (i + 1) * 0x9E3779B1 % 2**32
        h = (h ^ h >> 15) * 0x85EBCA6B % 2**32
        h ^= h >> 13
        expected += [-x if h >> k & 1 else x for k in range(3)]
    np.testing.assert_array_equal(sums(np.array([0.5, 2.0, -1.25, 3.0, 7.5])), expected)


NETWORKS = {
    "convolutions that follow each other": (
        """g (float[N,2,6,6] x) => (float[N,3,6,6] y) {
            h = Conv<group=2, pads=[1,1,1,1]>(x, a)\n y = Conv(h, b) }""",
        {"a": (2, 1, 3, 3), "b": (3, 2, 1, 1)},
    ),
    "Gelu": ("g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, a)\n y = Gelu(h) }", {"a": (4, 3)}),
    "lengths by which it divides": (
        """g (float[N,4] x, int64[N,1] lengths) => (float[N,3] y) {
            h = MatMul(x, a)\n n = Cast<to=1>(lengths)\n y = Div(h, n) }""",
        {"a": (4, 3)},
    ),
}


@pytest.mark.parametrize("name", NETWORKS)
def test_such_networks_have_a_proof(name: str, built: Path, tmp_path: Path) -> None:
    text, weights = NETWORKS[name]
    random = np.random.default_rng(0)
    network = model(text, opset=20, **{name: random.standard_normal(shape) / 2 for name, shape in weights.items()})
    graphopt.export_hosts(
        graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)), tmp_path
    )
    assert opened(built, tmp_path, tmp_path) == [(0, "proven")]
    proof = safetensors.numpy.load_file(tmp_path / "proof.safetensors")
    assert proof.get("feed.lengths", np.ones(1)).min() == 1
    proof["graph.train"][0] += [0, 9, 9, 9]
    safetensors.numpy.save_file(proof, tmp_path / "proof.safetensors")
    assert opened(built, tmp_path, tmp_path)[0][0] == 4

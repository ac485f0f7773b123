"""The JavaScript package in Node and in headless Chromium: it trains as Python does, and checkpoints cross."""

from __future__ import annotations

import importlib.util
import json
import os
import random
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import fuzz_hosts
import numpy as np
import pytest
from builders import linear, model
from host_graphs import (
    ADAPTER_FILES,
    ADAPTERS,
    BAD,
    BAD_AT,
    GRAPHS,
    MORE,
    STEPS,
    adapted,
    batches,
    same_adapters,
    with_bad_batches,
)
from steps import assert_close, settled

import graphopt
import passes

PACKAGE = Path(graphopt.__file__).parent / "hosts" / "javascript"
EXAMPLES = Path(__file__).parents[1] / "examples" / "hosts"
TESTS = EXAMPLES / "javascript" / "test"
CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
SAVED = 20  # the batches before the checkpoint that crosses

pytestmark = [
    pytest.mark.skipif(
        shutil.which("node") is None or not (TESTS / "node_modules" / "onnxruntime-node").exists(),
        reason="needs Node and `npm install --prefix examples/hosts/javascript/test`",
    ),
    pytest.mark.usefixtures("plain"),
]
Run = Callable[..., dict[str, Any]]


def javascript(program: str, *arguments: str | os.PathLike[str], timeout: float = 300) -> dict[str, Any]:
    """Run a program of the package's tests, and return the JSON that it prints."""
    command = ["node", TESTS / program, *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=timeout, check=False)
    assert done.returncode == 0, done.stderr
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def described(x: np.ndarray) -> dict[str, Any]:
    numbers = x.view(np.uint16) if x.dtype == np.float16 else x
    data = [
        n if np.isfinite(n) else str(n).replace("inf", "Infinity") for n in numbers.ravel().tolist()
    ]  # JSON has no NaN
    return {"type": x.dtype.name, "dims": x.shape, "data": data}


def write_batches(folder: Path, fed: Sequence[Mapping[str, np.ndarray]]) -> None:
    batches = [{name: described(x) for name, x in batch.items()} for batch in fed]
    (folder / "batches.json").write_text(json.dumps(batches))


class Reference:
    """A host folder, and what Python's executor computes on the same batches."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name, self.folder, self.step = name, folder, {**GRAPHS, **MORE}[name][0]()
        graphopt.export_hosts(self.step, folder)
        write_batches(folder, batches(name))
        self.executor = graphopt.Executor(self.step, threads=1)
        self.losses = self.train(self.executor)

    def train(self, executor: graphopt.Executor, begin: int = 0, end: int = STEPS) -> list[float]:
        return [float(executor.step(batch)["loss"]) for batch in batches(self.name)[begin:end]]


@pytest.fixture(scope="module", params=GRAPHS)
def reference(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return Reference(request.param, tmp_path_factory.mktemp(request.param))


def check(found: Mapping[str, Any], reference: Reference, rtol: float = 1e-5) -> None:
    """Compare what the scenario returns with Python."""
    np.testing.assert_allclose(found["losses"], reference.losses, rtol=rtol)
    np.testing.assert_allclose(found["together"], reference.losses, rtol=rtol)
    assert found.get("refused") in (None, "NonFiniteLoss")
    assert found["difference"] <= 1e-6  # of the state after steps, and after a batch of NaN, and after run
    executor = graphopt.Executor(reference.step, threads=1)
    executor.load(reference.folder / "end.safetensors")
    batch = batches(reference.name, 1)[0]
    np.testing.assert_allclose(found["evaluated"], executor.evaluate(batch)["loss"], rtol=rtol)
    (expected,) = graphopt.run(executor.trained(), {"x": batch["x"]}).values()
    for name in ("predicted", "trained"):
        np.testing.assert_allclose(found[name], expected.ravel(), rtol=rtol, atol=rtol)


def test_the_readme_s_program_trains(tmp_path: Path) -> None:
    page = (PACKAGE / "README.md").read_text()
    python, program = (re.findall(rf"```{x}\n(.*?)```", page, re.DOTALL)[0] for x in ("python", "js"))
    environment = {**os.environ, "PYTHONPATH": str(Path(graphopt.__file__).parents[1])}
    subprocess.run([sys.executable, "-c", python], cwd=tmp_path, env=environment, check=True)
    (tmp_path / "train.mjs").write_text(program)
    modules = tmp_path / "node_modules"
    modules.mkdir()
    (modules / "graphopt").symlink_to(tmp_path / "host" / "javascript")
    for package in ("onnxruntime-node", "onnxruntime-common"):
        (modules / package).symlink_to(TESTS / "node_modules" / package)
    done = subprocess.run(["node", "train.mjs"], cwd=tmp_path, capture_output=True, text=True, check=True)
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 5 and losses[-1] < losses[0] / 10
    assert (tmp_path / "checkpoint.safetensors").exists()


@pytest.mark.parametrize("runtime", ["node", "wasm"])
def test_it_trains_as_python_does(reference: Reference, runtime: str) -> None:
    check(javascript("in_node.js", runtime, reference.folder), reference)


@pytest.mark.parametrize("runtime", ["node", "wasm"])
def test_augmentation_draws_what_python_draws(runtime: str, tmp_path: Path) -> None:
    reference = Reference("augmented", tmp_path)
    check(javascript("in_node.js", runtime, tmp_path), reference)


def test_checkpoints_cross(reference: Reference, tmp_path: Path) -> None:
    javascript("in_node.js", "node", reference.folder)
    executor = graphopt.Executor(reference.step, threads=1)
    executor.load(reference.folder / "saved.safetensors")  # after 20 batches in Node
    losses = reference.train(executor, SAVED)
    np.testing.assert_allclose(losses, reference.losses[SAVED:], rtol=1e-5)

    executor = graphopt.Executor(reference.step, threads=1)
    reference.train(executor, 0, SAVED)
    executor.save(reference.folder / "python.safetensors")
    options = json.dumps({"checkpoint": "python.safetensors", "from": SAVED})
    found = javascript("in_node.js", "node", reference.folder, options)
    np.testing.assert_allclose(found["losses"], reference.losses[SAVED:], rtol=1e-5)
    executor.load(reference.folder / "end.safetensors")
    assert_close(settled(executor.state), settled(reference.executor.state), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ADAPTERS)
def test_adapter_files_are_those_of_python(name: str, tmp_path: Path) -> None:
    """After training, byte for byte, or to rounding where a graph computes norms."""
    step, batch, forms = adapted(name)
    graphopt.export_hosts(step, tmp_path)
    write_batches(tmp_path, [batch] * 5)
    end, executor = tmp_path / "end", graphopt.Executor(step, threads=1)
    files = ADAPTER_FILES

    def compare(folder: Path) -> None:
        for form in forms:
            path = tmp_path / "saved" / (files[form][0] if form == "onnxruntime" else "")
            path.parent.mkdir(exist_ok=True)
            graphopt.save_adapter(executor, path, form=form)  # type: ignore[arg-type]
            for file in files[form]:
                if form == "onnxruntime" and "dora" in name:
                    same_adapters(folder / file, tmp_path / "saved" / file)
                else:
                    assert (folder / file).read_bytes() == (tmp_path / "saved" / file).read_bytes(), file

    compare(tmp_path)  # as exported
    found = javascript("adapters.js", "node", tmp_path)
    for form in files:
        if form not in forms:
            told = f"GraphoptError: form '{form}': unknown; expected {', '.join(forms)}: graphopt.save_adapter"
            assert found.pop(form).startswith(told)
    assert found == {form: files[form] for form in forms}
    before = executor.state
    executor.load(end / "state.safetensors")
    assert any((x != before[name]).any() for name, x in executor.parameters.items())
    compare(end)


def chromium(provider: str, reference: Reference) -> dict[str, Any]:
    if not Path(CHROMIUM).exists() or not (TESTS / "node_modules" / "playwright-core").exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    found = javascript("in_browser.js", provider, reference.folder)
    if "skip" in found:
        pytest.skip(found["skip"])
    return found


@pytest.mark.slow
@pytest.mark.sample(4)
def test_it_trains_in_chromium(reference: Reference) -> None:
    found = chromium("wasm", reference)
    check(found, reference)
    assert found["kept"] == [True, True, None]  # in IndexedDB, in OPFS; what is not there


@pytest.mark.exhaustive
def test_it_trains_in_chromium_on_webgpu(reference: Reference) -> None:
    """Compare with the tolerance of another device's arithmetic."""
    graphopt.export_hosts(reference.step, reference.folder, target="webgpu")
    check(chromium("webgpu", reference), reference, rtol=1e-4)


def test_it_trains_in_16_bits(tmp_path: Path) -> None:
    step = graphopt.compile(linear(dtype=np.float16), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
    graphopt.export_hosts(step, tmp_path)
    fed = [{name: x.astype(np.float16) for name, x in batch.items()} for batch in batches("linear", 5)]
    write_batches(tmp_path, fed)
    executor = graphopt.Executor(step)
    losses = [float(executor.step(batch)["loss"]) for batch in fed]
    for runtime in ("node", "wasm"):
        np.testing.assert_allclose(javascript("in_node.js", runtime, tmp_path)["losses"], losses, rtol=2e-3)


@pytest.mark.parametrize("runtime", ["node", "wasm"])
@pytest.mark.parametrize("name", [*BAD, "rate"])
def test_a_bad_batch_does_not_spoil_the_state(name: str, runtime: str, tmp_path: Path) -> None:
    """Good batches train as they do without the bad ones, bit for bit, in single steps and in several per call."""
    is_rate = name == "rate"
    step = GRAPHS["linear"][0]() if is_rate else BAD[name][0]()
    fed = batches("linear", 14) if is_rate else with_bad_batches(name)
    graphopt.export_hosts(step, tmp_path)
    write_batches(tmp_path, fed)
    rates = {"rates": dict.fromkeys(map(str, BAD_AT), 3e38)} if is_rate else {}
    (tmp_path / "bad.json").write_text(json.dumps({"bad": BAD_AT, **rates}))
    found = javascript("bad_batches.js", runtime, tmp_path)
    executor = graphopt.Executor(step, threads=1)
    expected = [float(executor.step(batch)["loss"]) for i, batch in enumerate(fed) if i not in BAD_AT]
    np.testing.assert_allclose(found["good"]["losses"], expected, rtol=1e-5)
    assert found.keys() == ({"good", "alone"} if is_rate else {"good", "alone", "together", "skipped"})
    for kind, run in found.items():
        assert run["losses"] == found["good"]["losses"], kind
        assert run["state"] == found["good"]["state"], kind
        refused = re.compile(
            r"step (\d+): expected (a finite loss|finite numbers in state '.*'), found .*as before; look"
        )
        steps = [int(match[1]) for match in map(refused.match, run["refused"]) if match]
        assert steps == ([3, 6, 6] if kind in ("alone", "together") else []), run["refused"]


LISTING = Path(__file__).parent / "listings" / "javascript_mistakes.txt"  # UPDATE_LISTINGS=1 writes it


@pytest.fixture(scope="module")
def errors(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("errors")
    step = GRAPHS["mlp"][0]()
    graphopt.export_hosts(step, folder / "mlp")
    graphopt.export_hosts(GRAPHS["linear"][0](), folder / "linear")
    graphopt.save(step, folder / "step.onnx")
    sequences = graphopt.compile(
        model("g (int64[B,T] x) => (float[B,T,5] y) { y = Gather(table, x) }", table=np.ones((9, 5))),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.SGD(0.1),
    )
    graphopt.export_hosts(sequences, folder / "sequences")
    folders = (folder / name for name in ("mlp", "linear", "sequences", "step.onnx"))
    return javascript("errors.js", *folders)


def test_every_mistake_is_told_in_one_line(errors: Mapping[str, str]) -> None:
    lines = [f"{mistake}: {message}" for mistake, message in errors.items()]
    found = "\n".join(re.sub(r"(file://)?/\S+/errors\d*", "FOLDER", line) for line in lines) + "\n"
    if os.environ.get("UPDATE_LISTINGS"):
        LISTING.write_text(found)
    assert found == LISTING.read_text()
    assert len(found.splitlines()) == len(errors)


def test_runtimes_whose_plans_of_memory_overlap_make_none(tmp_path: Path) -> None:
    """Those before 1.19: "sharpness of batches" of capabilities.py differed by 6e-4 at the fourth step on 1.18."""
    graphopt.export_hosts(GRAPHS["linear"][0](), tmp_path / "host")
    program = f"""
import * as ort from "file://{TESTS}/node_modules/onnxruntime-node/dist/index.js";
import {{ Trainer }} from "file://{PACKAGE}/index.js";
const [seen, {{ Tensor, InferenceSession }}] = [[], ort.default];
const create = (file, options) => {{
  seen.push(options.enableMemPattern ?? null);
  return InferenceSession.create(file, options);
}};
for (const common of ["1.18.1", "1.19.0", undefined]) {{
  const env = {{ versions: {{ common }} }};
  await Trainer.create({{ Tensor, env, InferenceSession: {{ create }} }}, "{tmp_path}/host");
}}
console.log(JSON.stringify(seen));"""
    (tmp_path / "program.mjs").write_text(program)
    done = subprocess.run(["node", tmp_path / "program.mjs"], capture_output=True, text=True, check=False)
    assert json.loads(done.stdout or "null") == [False, None, None], done.stderr


def test_its_types_are_what_a_program_needs() -> None:
    compiler = TESTS / "node_modules" / ".bin" / "tsc"
    if not compiler.exists():
        pytest.skip("needs the compiler of TypeScript")
    done = subprocess.run([compiler, "-p", "."], cwd=TESTS, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout


def test_the_package_is_small_and_names_its_files() -> None:
    described = json.loads((PACKAGE / "package.json").read_text())
    assert set(described["files"]) == {path.name for path in PACKAGE.glob("*.[jt]s")}
    assert set(described["peerDependencies"]) == {"onnxruntime-common"} and "dependencies" not in described
    assert sum(len(path.read_text().splitlines()) for path in PACKAGE.glob("*.js")) <= 840  # 200 are the proof


@pytest.mark.slow
def test_the_page_trains_learns_drawn_and_photographed_digits_and_keeps_the_model(tmp_path: Path) -> None:
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    spec = importlib.util.spec_from_file_location("export", EXAMPLES / "browser" / "export.py")
    assert spec is not None and spec.loader is not None
    export = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(export)
    export.main(tmp_path / "site")
    found = javascript("in_page.js", tmp_path / "site")
    assert found["errors"] == []
    assert found["before"] == found["reset"] and found["kept"] == found["restored"]
    assert float(found["trained"].split()[0]) > 90 > 30 > float(found["before"].split()[0])
    assert (found["learned"], found["best"]) == ("Learned your 3.", "3")
    drawn, photographed = found["photographed"].pop("seen")
    assert np.corrcoef(drawn, photographed)[0, 1] > 0.95
    assert found["photographed"] == {
        "status": "three.png: which digit is it? 1 more.",
        "then": "a.png: expected a picture that this browser reads.",
    }
    assert set(found["downloads"]) == {"inference.onnx", "state.safetensors"}
    image, heat = (np.array(numbers, np.float32) for numbers in found["heat"])
    feeds = {"x": image.reshape(1, 1, 8, 8) / 255, "class": np.array([3])}
    explained = graphopt.explain(tmp_path / "inference.onnx", passes.IntegratedGradients(steps=16), keep=False)
    (expected,) = graphopt.run(explained, feeds).values()
    signed = heat[:, 3] * np.where(heat[:, 0] > heat[:, 2], 1, -1) / 255
    # Pixels of the canvas have 8 bits, of which faint ones keep no color.
    np.testing.assert_allclose(abs(signed), abs(expected.ravel()) / abs(expected).max(), atol=0.003)
    assert (signed * expected.ravel())[abs(signed) > 0.1].min() > 0


NODE = """
import * as ort from "onnxruntime-node";
import { Trainer } from "../../../../graphopt/hosts/javascript/index.js";
const feeds = JSON.parse(process.argv[2]);
try {
  const trainer = await Trainer.create(ort, process.argv[1]);
  await trainer.run([feeds, feeds]);
  await trainer.step(feeds);
  await trainer.evaluate(feeds);
  console.log(JSON.stringify({ told: "nothing", bytes: (await trainer.save()).length }));
} catch (error) {
  console.log(JSON.stringify({ told: `${error.name}: ${error.message}` }));
}
"""


@pytest.mark.slow
def test_a_graph_that_computes_another_type_or_shape_is_refused(tmp_path: Path) -> None:
    """Its numbers would become state, or be written to a checkpoint, as those of the contract."""
    fed = {name: x.tolist() for name, x in batches("linear")[0].items()}
    taken = set()
    for number in range(12):
        files = fuzz_hosts.files_of("linear")
        fuzz_hosts.another_output(random.Random(number), files)
        folder = tmp_path / str(number)
        folder.mkdir()
        for name, content in files.items():
            (folder / name).write_bytes(content)
        command = ["node", "--input-type=module", "-e", NODE, folder, json.dumps(fed)]
        done = subprocess.run(command, capture_output=True, text=True, cwd=TESTS, check=False)
        found = json.loads(done.stdout)["told"] if done.returncode == 0 else done.stderr
        assert found.startswith("GraphoptError: ") and "\n" not in found, (number, found)
        taken.add(found.partition("expected")[2][:12])
    assert len(taken) > 3


IN_NODE = """
import * as ort from "onnxruntime-node";
const feeds = {};
for (const [name, { type, dims, data }] of Object.entries(JSON.parse(process.argv[2]))) {
  const values = type === "int64" ? BigInt64Array.from(data, BigInt) : Float32Array.from(data);
  feeds[name] = new ort.Tensor(type, values, dims);
}
const session = await ort.InferenceSession.create(process.argv[1]);
const fed = Object.fromEntries(session.inputNames.map((name) => [name, feeds[name]]));
console.log(JSON.stringify(Object.values(await session.run(fed)).map(({ data }) => [...data])));
"""


@pytest.mark.slow
def test_derivatives_and_explanations_run_in_node_as_in_python(tmp_path: Path) -> None:
    network = graphopt.models.cnn((1, 8, 8), 3)
    files = [
        graphopt.grad(network, "x", keep=False),
        graphopt.jacobian(network, "x", keep=False),
        graphopt.explain(network, passes.GradCAM(), keep=False),
        graphopt.explain(network, passes.IntegratedGradients(steps=4), keep=False),
    ]
    feeds = {"x": np.random.default_rng(0).random((2, 1, 8, 8), np.float32), "class": np.array([-1, 2])}
    said = {name: described(x) for name, x in feeds.items()}
    for number, file in enumerate(files):
        graphopt.save(file, path := tmp_path / f"{number}.onnx")
        words = ["node", "--input-type=module", "-e", IN_NODE, path, json.dumps(said)]
        done = subprocess.run(words, capture_output=True, text=True, cwd=TESTS, check=True)
        (found,) = json.loads(done.stdout)
        (expected,) = graphopt.run(path, {name: feeds[name] for name in list(feeds)[: 1 + (number > 1)]}).values()
        np.testing.assert_allclose(found, expected.ravel(), rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("runtime", ["node", "web"])
def test_calibrated_files_run_in_javascript_as_in_python(runtime: str, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    rows = {"x": rng.random((90, 1, 8, 8), np.float32), "target": rng.integers(0, 3, 90)}
    network = graphopt.models.cnn((1, 8, 8), 3)
    others = [graphopt.models.cnn((1, 8, 8), 3, seed=seed) for seed in (1, 2)]
    masked = "r = Constant<value_float = 0.5>() f = Flatten(x) d = Dropout(f, r) y = MatMul(d, w)"
    network_of_masks = model(f"g (float[N,1,8,8] x) => (float[N,2] y) {{ {masked} }}", w=np.ones((64, 2)))
    files = [
        *(
            graphopt.calibrate(network, rows, passes.VectorScaling(), passes.PredictionSet(0.2, score))
            for score in ("lac", "raps")
        ),
        *(graphopt.calibrate(network, rows, passes.LastLayerLaplace(1.0, kind)) for kind in ("full", "kron")),
        graphopt.explain(network, passes.Ensemble(others)),
        graphopt.explain(network_of_masks, passes.MonteCarloDropout(8)),
    ]
    ones = {"x": np.ones((2, 1, 8, 8), np.float32)}  # of which sums of masks are whole numbers
    program = IN_NODE.replace("onnxruntime-node", f"onnxruntime-{runtime}")
    if runtime == "web":
        program = program.replace("create(process.argv[1])", "create(readFileSync(process.argv[1]))")
        program = f'import {{ readFileSync }} from "node:fs";\n{program}'
    for number, file in enumerate(files):
        feeds = ones if file is files[-1] else {"x": rows["x"][:5]}
        graphopt.save(file, path := tmp_path / f"{number}.onnx")
        said = json.dumps({name: described(x) for name, x in feeds.items()})
        words = ["node", "--input-type=module", "-e", program, path, said]
        done = subprocess.run(words, capture_output=True, text=True, cwd=TESTS, check=True)
        expected = graphopt.run(path, feeds)
        for found, (name, y) in zip(json.loads(done.stdout), expected.items(), strict=True):
            np.testing.assert_allclose(found, y.ravel(), rtol=1e-4, atol=1e-6, err_msg=name)
            if file is files[-1] and name in ("y.mean", "y.variance"):  # the masks are the same bits
                np.testing.assert_array_equal(np.float32(found), y.ravel())

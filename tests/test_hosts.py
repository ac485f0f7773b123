"""A bare ONNX Runtime, by the loop of `host.json`, trains as graphopt's executor does."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import capabilities
import jsonschema
import numpy as np
import onnx
import pytest
import safetensors.numpy
from builders import linear, model
from host_graphs import BAD, BAD_AT, GRAPHS, batches, with_bad_batches
from steps import assert_close, assert_equal, session, settled

import graphopt
import passes

pytestmark = pytest.mark.usefixtures("plain")

STEPS = 12
SCHEMA = json.loads((Path(graphopt.__file__).parent / "hosts" / "host.schema.json").read_text())


class Host:
    """The loop of `host.json`, on ONNX Runtime alone."""

    def __init__(self, folder: Path, state: Mapping[str, np.ndarray] | None = None) -> None:
        self.folder = folder
        self.contract: dict[str, Any] = json.loads((folder / "host.json").read_text())
        self.state = dict(state or safetensors.numpy.load_file(folder / "state.safetensors"))
        self.hyperparameters = {x["name"]: np.array(x["default"], x["type"]) for x in self.contract["hyperparameters"]}

    def run(self, graph: str, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run a graph; a step replaces the state."""
        reads = self.contract["graphs"][graph]
        runner = session(self.folder / self.contract["files"][graph])
        inputs = {name: feeds[name] for name in reads["feeds"]}
        inputs |= {name: self.state[name] for name in reads["state"]}
        inputs |= {name: self.hyperparameters[name] for name in reads["hyperparameters"]}
        found = dict(zip([y.name for y in runner.get_outputs()], runner.run(None, inputs), strict=True))
        self.is_finite = True
        if graph.startswith("train"):
            self.is_finite = bool(np.isfinite(found[self.contract["check"]]).all())
            if self.is_finite:
                self.state = {x["name"]: found[x["next"]] for x in self.contract["state"]}
        return {name: found[name] for name in reads["reports"]}

    def checkpoint(self) -> bytes:
        """Return the file of the state with the numbers of now, at the same offsets."""
        content = bytearray((self.folder / "state.safetensors").read_bytes())
        for x in self.contract["state"]:
            content[x["offset"] : x["offset"] + x["bytes"]] = self.state[x["name"]].tobytes()
        return bytes(content)


@pytest.fixture(scope="module", params=GRAPHS)
def exported(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Any:
    name: str = request.param
    step, folder = GRAPHS[name][0](), tmp_path_factory.mktemp(name)
    graphopt.export_hosts(step, folder)
    return step, folder, batches(name, STEPS)


@pytest.mark.slow
def test_a_host_trains_as_the_executor_does(exported: Any) -> None:
    step, folder, fed = exported
    executor, host = graphopt.Executor(step, threads=1), Host(folder)
    for batch in fed:
        assert_close(host.run("train", batch), executor.step(batch), atol=5e-6)
    assert_close(settled(host.state), settled(executor.state), rtol=1e-4, atol=1e-5)


def test_several_steps_in_one_call_are_single_steps(exported: Any) -> None:
    _, folder, fed = exported
    single, several = Host(folder), Host(folder)
    losses = [single.run("train", batch)["loss"] for batch in fed]
    stacked = several.run("train_steps", {name: np.stack([batch[name] for batch in fed]) for name in fed[0]})
    np.testing.assert_allclose(stacked["loss"], losses, rtol=1e-5)
    assert_close(several.state, single.state, rtol=1e-4)


@pytest.mark.parametrize("name", BAD)
@pytest.mark.parametrize("target", [None, "tract"])
def test_the_check_tells_bad_batches_from_good_ones(name: str, target: str | None, tmp_path: Path) -> None:
    step, fed = BAD[name][0](), with_bad_batches(name)
    graphopt.export_hosts(step, tmp_path, target=target)
    host, clean, executor = Host(tmp_path), Host(tmp_path), graphopt.Executor(step, threads=1)
    found = []
    for i, batch in enumerate(fed):
        loss = host.run("train", batch)["loss"]
        found.append(host.is_finite)
        if i not in BAD_AT:
            assert loss == clean.run("train", batch)["loss"]
            np.testing.assert_allclose(loss, executor.step(batch)["loss"], rtol=1e-5)
    assert found == [i not in BAD_AT for i in range(len(fed))]
    assert_equal(host.state, clean.state)
    several = Host(tmp_path)
    first, last = BAD_AT[0], BAD_AT[1]
    for part in (fed[:first], fed[:last], fed[first + 1 : last]):
        several.run("train_steps", {key: np.stack([batch[key] for batch in part]) for key in part[0]})
        assert several.is_finite == (part != fed[:last])


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_the_check_is_a_number_of_32_bits(dtype: Any, tmp_path: Path) -> None:
    step = graphopt.compile(
        linear(features=3, outputs=2, dtype=dtype),
        loss=passes.MeanSquaredError(),
        optimizer=passes.AdamW(0.01),
    )
    graphopt.export_hosts(step, tmp_path)
    (check,) = (y for y in onnx.load(tmp_path / "train.onnx").graph.output if y.name == "graphopt.check")
    assert check.type.tensor_type.elem_type == onnx.TensorProto.FLOAT and not check.type.tensor_type.shape.dim
    host, (batch,) = Host(tmp_path), batches("linear", 1)
    for number, is_finite in ((1, True), (np.nan, False), (2, True)):
        host.run("train", {name: (x * number).astype(dtype) for name, x in batch.items()})
        assert host.is_finite == is_finite


def test_state_whose_infinities_reach_other_state_is_summed_once(tmp_path: Path) -> None:
    """A momentum is in the parameter that it moves; a second moment is below a fraction line."""
    for optimizer, sums in ((passes.SGD(0.1), 2), (passes.SGD(0.1, momentum=0.9), 2), (passes.AdamW(0.1), 4)):
        step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=optimizer)
        graphopt.export_hosts(step, tmp_path)
        nodes = onnx.load(tmp_path / "train.onnx").graph.node
        (total,) = (node for node in nodes if "graphopt.check" in node.output)
        assert (total.op_type, len(total.input)) == ("Sum", 1 + sums)  # the loss, too


def test_what_may_be_infinite_is_not_checked(tmp_path: Path) -> None:
    """State that is so from the start stays out; so do sums of gradients that a loss scale will drop."""
    network = model(
        "g (float[N,3] x) => (float[N,3] y) { a = Add(x, mask)\n s = Softmax(a)\n y = Mul(s, w) }",
        mask=np.array([0.0, -np.inf, 0.0]),
        w=np.ones(3),
    )
    step = graphopt.compile(
        network,
        parameters=passes.Parameters(pattern="*"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    graphopt.export_hosts(step, tmp_path)
    host = Host(tmp_path)
    host.run("train", {"x": np.ones((2, 3), np.float32), "target": np.ones((2, 3), np.float32)})
    assert host.is_finite


@pytest.mark.parametrize("graph", ["evaluate", "predict"])
def test_a_host_evaluates_and_predicts_as_the_executor_does(exported: Any, graph: str) -> None:
    step, folder, fed = exported
    executor = graphopt.Executor(step, threads=1)
    executor.run(fed)
    data = fed[0] if graph == "evaluate" else {"x": fed[0]["x"]}
    assert_close(Host(folder, executor.state).run(graph, fed[0]), getattr(executor, graph)(data))


@pytest.mark.slow
def test_checkpoints_cross_and_are_the_model(exported: Any, tmp_path: Path) -> None:
    step, folder, fed = exported
    whole, executor, host = graphopt.Executor(step), graphopt.Executor(step), Host(folder)
    whole.run(fed)
    for batch in fed[:4]:
        host.run("train", batch)
    (tmp_path / "state.safetensors").write_bytes(host.checkpoint())
    executor.load(tmp_path / "state.safetensors")  # on from the host's
    executor.run(fed[4:8])
    executor.save(tmp_path / "state.safetensors", checksum=False)
    assert (tmp_path / "state.safetensors").stat().st_size == (folder / "state.safetensors").stat().st_size
    back = Host(folder, safetensors.numpy.load_file(tmp_path / "state.safetensors"))  # and on from Python's
    for batch in fed[8:]:
        back.run("train", batch)
    assert_close(settled(back.state), settled(whole.state), rtol=1e-4, atol=1e-5)

    for name in ("inference.onnx", "weights.bin"):
        if (folder / name).exists():
            (tmp_path / name).write_bytes((folder / name).read_bytes())
    (tmp_path / "state.safetensors").write_bytes(back.checkpoint())
    x = fed[0]["x"]
    expected = graphopt.run(whole.trained(), {"x": x})["y"]
    found = session(tmp_path / "inference.onnx").run(["y"], {"x": x})[0]
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)


def test_graphs_have_plain_inputs_an_old_opset_and_nothing_else(exported: Any) -> None:
    _, folder, _ = exported
    contract = json.loads((folder / "host.json").read_text())
    jsonschema.validate(contract, SCHEMA)
    for name in contract["graphs"]:
        proto = onnx.load(folder / contract["files"][name])
        onnx.checker.check_model(proto, full_check=True)
        inputs = {x.name for x in proto.graph.input}
        reads = contract["graphs"][name]
        assert inputs == {*reads["feeds"], *reads["state"], *reads["hyperparameters"]}
        assert not inputs & {x.name for x in proto.graph.initializer}
        assert not proto.graph.value_info
        assert not any(node.metadata_props or node.doc_string for node in proto.graph.node)
        assert proto.opset_import[0].version <= 18
        assert proto.ir_version <= 8
        notes = {entry.key: entry.value for entry in proto.metadata_props}
        assert notes.keys() == ({"graphopt.host"} if name == "train" else set())
        assert all(json.loads(note) == contract for note in notes.values())


def test_state_stands_where_the_contract_says(exported: Any) -> None:
    _, folder, _ = exported
    content = (folder / "state.safetensors").read_bytes()
    arrays = safetensors.numpy.load(content)
    contract = json.loads((folder / "host.json").read_text())
    assert {x["name"] for x in contract["state"]} == arrays.keys()
    for x in contract["state"]:
        part = content[x["offset"] : x["offset"] + x["bytes"]]
        np.testing.assert_array_equal(np.frombuffer(part, x["type"]).reshape(x["shape"]), arrays[x["name"]])


@pytest.mark.parametrize(("name", "first"), [("mlp", "1.9"), ("lstm", "1.19")])
def test_the_contract_names_the_first_runtime_that_is_right(name: str, first: str, tmp_path: Path) -> None:
    """Up to 1.18, a Scan whose body shares memory is wrong. `train_steps` has opset 15, which 1.8 cannot read."""
    graphopt.export_hosts(GRAPHS[name][0](), tmp_path)
    assert json.loads((tmp_path / "host.json").read_text())["runtime"]["onnxruntime"] == first


def test_a_fixed_batch_leaves_no_dynamic_dimension(tmp_path: Path) -> None:
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.export_hosts(step, tmp_path, batch=4)
    proto = onnx.load(tmp_path / "train.onnx")
    for value in [*proto.graph.input, *proto.graph.output]:
        assert all(dim.HasField("dim_value") for dim in value.type.tensor_type.shape.dim), value.name
    assert not {"Shape", "Size"} & {node.op_type for node in proto.graph.node}
    assert json.loads((tmp_path / "host.json").read_text())["batch"] == 4


def test_labels_and_the_one_that_is_ignored_are_told(tmp_path: Path) -> None:
    loss = passes.CrossEntropy(ignore_index=-100)
    graphopt.export_hosts(graphopt.compile(linear(), loss=loss, optimizer=passes.SGD(0.1)), tmp_path)
    contract = json.loads((tmp_path / "host.json").read_text())
    jsonschema.validate(contract, SCHEMA)
    target = next(x for x in contract["feeds"] if x["role"] == "target")
    assert (target["labels"], target["ignored"]) == ([0, 1], -100)


def test_what_cannot_be_exported_is_told_and_nothing_is_written(tmp_path: Path) -> None:
    with pytest.raises(graphopt.GraphoptError, match="expected a training graph, found an inference model: compile"):
        graphopt.export_hosts(linear(), tmp_path / "out")
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    with pytest.raises(graphopt.GraphoptError, match="batch: expected 1 or more"):
        graphopt.export_hosts(step, tmp_path / "out", batch=0)
    with pytest.raises(
        graphopt.GraphoptError, match="unknown language 'java8', nearest: 'java'; known: c, java, javascript"
    ):
        graphopt.export_hosts(step, tmp_path / "out", language="java8")
    assert not (tmp_path / "out").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(graphopt.GraphoptError, match="expected a folder to write to"):
        graphopt.export_hosts(step, tmp_path / "file")


def test_numbers_of_bfloat16_train_in_a_bare_runtime(tmp_path: Path) -> None:
    """Its CPU provider has no kernels for them: a folder that no version could open was exported."""
    step, fed = capabilities.step("bfloat16"), capabilities.batches("bfloat16", 3)
    graphopt.export_hosts(step, tmp_path)
    executor, host = graphopt.Executor(step, threads=1), Host(tmp_path)
    for batch in fed:
        assert_close(host.run("train", batch), executor.step(batch), rtol=1e-2)


@pytest.mark.parametrize("language", ["javascript", "java", "c"])
def test_the_program_of_a_language_comes_with_the_graphs(language: str, tmp_path: Path) -> None:
    step = graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.export_hosts(step, tmp_path, language=language)
    source = Path(graphopt.__file__).parent / "hosts" / language
    written = {path.relative_to(tmp_path / language) for path in (tmp_path / language).rglob("*") if path.is_file()}
    expected = {"c": {"graphopt.c", "graphopt.h", "train.c", "Makefile", "README.md", "abi/onnxruntime_c_api.h"}}
    if language == "java":
        expected["java"] = {"README.md", *(f"graphopt/{path.name}" for path in source.glob("graphopt/*.java"))}
    if language == "javascript":
        files = json.loads((source / "package.json").read_text())["files"]
        expected["javascript"] = {*files, "package.json", "README.md"}
    assert {path.as_posix() for path in written} == expected[language]
    for path in written:
        assert (tmp_path / language / path).read_bytes() == (source / path).read_bytes()


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.slow
def test_without_loops_a_host_trains_the_same(name: str, tmp_path: Path) -> None:
    step, fed = GRAPHS[name][0](), batches(name, 3)
    graphopt.export_hosts(step, tmp_path, batch=len(fed[0]["target"]), unroll=True)
    contract = json.loads((tmp_path / "host.json").read_text())
    for graph in contract["graphs"]:
        nodes = onnx.load(tmp_path / contract["files"][graph]).graph.node
        assert not {"Loop", "Scan"} & {node.op_type for node in nodes}
    executor, host = graphopt.Executor(step, threads=1), Host(tmp_path)
    for batch in fed:
        assert_close(host.run("train", batch), executor.step(batch), atol=5e-6)


def test_forms_of_a_target_train_the_same_and_are_named(tmp_path: Path) -> None:
    step, fed = GRAPHS["cnn"][0](), batches("cnn", 3)
    graphopt.export_hosts(step, tmp_path, target="tract")
    operators = {node.op_type for node in onnx.load(tmp_path / "train.onnx").graph.node}
    assert not {"BatchNormalization", "Size"} & operators
    executor, host = graphopt.Executor(step, threads=1), Host(tmp_path)
    assert host.contract["target"] == "tract"
    for batch in fed:
        assert_close(host.run("train", batch), executor.step(batch), rtol=1e-4)
    with pytest.raises(graphopt.GraphoptError, match="unknown target 'abacus'; known: cuda, iree"):
        graphopt.export_hosts(step, tmp_path, target="abacus")


def test_the_state_of_adapters_is_theirs_alone_and_the_model_is_in_one_file(tmp_path: Path) -> None:
    step = GRAPHS["adapter"][0]()
    graphopt.export_hosts(step, tmp_path)
    contract = json.loads((tmp_path / "host.json").read_text())
    parameters = [x["name"] for x in contract["state"] if x["role"] == "parameter"]
    assert parameters and all(".lora_" in name for name in parameters)
    assert contract["files"]["weights"] == "weights.bin"
    base = sum(x.const_value.nbytes for x in step.graph.initializers.values() if x not in step.graph.inputs)
    assert (tmp_path / "weights.bin").stat().st_size < 1.1 * base  # once, not once for each graph
    for name in ("train", "train_steps", "evaluate", "predict", "inference"):
        graph = onnx.load(tmp_path / f"{name}.onnx", load_external_data=False).graph
        assert all(len(x.raw_data) < 1024 for x in graph.initializer), name


def test_graphs_for_a_target_contain_their_weights(tmp_path: Path) -> None:
    graphopt.export_hosts(GRAPHS["adapter"][0](), tmp_path, target="tract")
    assert not (tmp_path / "weights.bin").exists()
    host, (batch,) = Host(tmp_path), batches("adapter", 1)
    first = host.run("train", batch)["loss"]
    assert host.run("train", batch)["loss"] < first

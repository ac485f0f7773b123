"""RNN, GRU and LSTM: every variant's gradient against PyTorch's autograd, on the runtime, and as PyTorch trains."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field
from typing import Any

import builders
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from onnx import helper
from torch_oracle import pytorch

import graphopt
import passes
from graphopt.testing import gradients as testing
from passes.gradients.rules import recurrent

STEPS, ROWS, FEATURES, HIDDEN = 3, 2, 2, 2
GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}


@dataclass(frozen=True, eq=False)
class Variant:
    op_type: str
    attributes: dict[str, Any] = field(default_factory=dict)
    bias: bool = True
    lengths: bool = False
    states: bool = False
    peepholes: bool = False
    runtime: bool = True  # ONNX Runtime has a kernel

    def __str__(self) -> str:
        marks = [name for name in ("lengths", "states", "peepholes") if getattr(self, name)]
        attributes = [f"{name}={value}" for name, value in self.attributes.items()]
        return "-".join([self.op_type, *attributes, *marks, *["no-bias"] * (not self.bias)]).replace(" ", "")


TWO = {"direction": "bidirectional"}
VARIANTS = [
    *(Variant(op_type) for op_type in GATES),
    *(Variant(op_type, {"direction": "reverse"}, bias=False) for op_type in GATES),
    *(Variant(op_type, {"direction": "reverse"}, lengths=True, states=True) for op_type in GATES),
    *(Variant(op_type, TWO, lengths=True) for op_type in GATES),
    *(Variant(op_type, {**TWO, "clip": 0.4}, states=True) for op_type in GATES),
    *(Variant(op_type, {**TWO, "layout": 1}, states=True, runtime=False) for op_type in GATES),
    Variant("GRU", {"linear_before_reset": 1}, states=True),
    Variant("GRU", {"linear_before_reset": 1, **TWO}, bias=False),
    Variant("LSTM", {}, states=True, peepholes=True),
    Variant("LSTM", {**TWO, "clip": 0.3}, lengths=True, peepholes=True),
    Variant("LSTM", {"input_forget": 1}),
    Variant("RNN", {"activations": ["Affine"], "activation_alpha": [0.5], "activation_beta": [0.1]}),
    Variant("RNN", {"activations": ["Relu", "Softplus"], **TWO}),
    Variant("RNN", {"activations": ["ThresholdedRelu"], "activation_alpha": [0.2]}),
    Variant("GRU", {"activations": ["LeakyRelu", "Elu"], "activation_alpha": [0.3, 0.7]}),
    Variant(
        "LSTM",
        {
            "activations": ["HardSigmoid", "ScaledTanh", "Softsign"],
            "activation_alpha": [0.3, 1.5],
            "activation_beta": [0.4, 0.7],
        },
    ),
]
each_variant = pytest.mark.parametrize("variant", VARIANTS, ids=str)


def inputs(variant: Variant, dtype: type) -> dict[str, np.ndarray]:
    """Return the floating inputs of a variant, by name."""
    ways = 2 if variant.attributes.get("direction") == "bidirectional" else 1
    gates = GATES[variant.op_type] * HIDDEN
    first, state = (STEPS, ROWS), (ways, ROWS)
    if variant.attributes.get("layout"):
        first, state = first[::-1], state[::-1]
    shapes = {"x": (*first, FEATURES), "w": (ways, gates, FEATURES), "r": (ways, gates, HIDDEN)}
    shapes |= {"b": (ways, 2 * gates)} if variant.bias else {}
    if variant.states:
        shapes |= {"h": (*state, HIDDEN)} | ({"c": (*state, HIDDEN)} if variant.op_type == "LSTM" else {})
    shapes |= {"p": (ways, 3 * HIDDEN)} if variant.peepholes else {}
    random = np.random.default_rng(1)
    return {name: random.uniform(-1, 1, shape).astype(dtype) for name, shape in shapes.items()}


def model_of(variant: Variant, dtype: type, dynamic: bool = False) -> onnx.ModelProto:
    arrays = inputs(variant, dtype)
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
    shapes = {name: list(array.shape) for name, array in arrays.items()}
    if dynamic:
        shapes["x"][:2] = ["T", "N"]
    order = ["x", "w", "r", "b", "lengths", "h", "c", "p"]
    present = {*arrays, *(["lengths"] if variant.lengths else [])}
    outputs = ["y", "y_h", "y_c"][: 3 if variant.op_type == "LSTM" else 2]
    node = helper.make_node(
        variant.op_type,
        [name if name in present else "" for name in order][: 8 if variant.op_type == "LSTM" else 6],
        outputs,
        hidden_size=HIDDEN,
        **variant.attributes,
    )
    graph = helper.make_graph(
        [node],
        "g",
        [helper.make_tensor_value_info(name, kind, shape) for name, shape in shapes.items()],
        [helper.make_tensor_value_info(name, kind, None) for name in outputs],
        [helper.make_tensor("lengths", onnx.TensorProto.INT32, [ROWS], [1, 3])] if variant.lengths else [],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10)
    return onnx.shape_inference.infer_shapes(model, strict_mode=True)


def in_onnxruntime(model: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    taken = {x.name: feeds[x.name].astype(np.float32) for x in session.get_inputs()}
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, taken), strict=True))


@functools.cache
def proved(variant: Variant, large: bool) -> dict[str, np.ndarray]:
    model, point = model_of(variant, np.float64), inputs(variant, np.float64)
    return testing.check_gradient(model, point, oracle=pytorch)


@pytest.fixture(params=["kernel", "scan"])
def large(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether states of all sizes count as large: a Scan goes forward in training, in place of the operator."""
    monkeypatch.setattr(recurrent, "LARGE", 0 if request.param == "scan" else 10**9)
    return request.param == "scan"


@each_variant
@pytest.mark.sample(16)
def test_gradient_equals_pytorchs(variant: Variant, large: bool) -> None:
    proved(variant, large)


@pytest.mark.parametrize("variant", [variant for variant in VARIANTS if variant.runtime], ids=str)
@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.sample(24)
def test_gradient_is_the_same_in_onnxruntime(variant: Variant, dynamic: bool, large: bool) -> None:
    model, feeds = model_of(variant, np.float32, dynamic), inputs(variant, np.float32)
    outputs = testing.evaluate_reference(ir.from_proto(model), feeds)
    for name, y in in_onnxruntime(model, feeds).items():
        np.testing.assert_allclose(y, outputs[name], rtol=1e-4, atol=1e-6)
    gradients = testing.gradient_model(model)
    ir.passes.common.RemoveUnusedNodesPass()(gradients)
    found = in_onnxruntime(ir.to_proto(gradients), feeds | testing.random_seeds(outputs))
    for name, expected in proved(variant, large).items():
        assert testing.distance(found[f"{name}.grad"], expected) <= 2e-5, name


@pytest.mark.parametrize("hidden", [8, 64])
@pytest.mark.parametrize("op_type", GATES)
@pytest.mark.slow
def test_inference_has_the_operator_again(op_type: str, hidden: int) -> None:
    random, gates = np.random.default_rng(0), GATES[op_type] * hidden
    arrays = {
        "w": random.normal(0, 0.3, (2, gates, 3)),
        "r": random.normal(0, 0.3, (2, gates, hidden)),
        "b": random.normal(0, 0.3, (2, 2 * gates)),
        "head": random.normal(0, 0.3, (2 * hidden, 4)),
    }
    proto = builders.model(
        f"""g (float[T,N,3] x) => (float[N,4] y) {{
            s, last = {op_type}<hidden_size = {hidden}, direction = "bidirectional">(x, w, r, b)
            t = Transpose<perm = [1, 0, 2]>(last)
            f = Flatten(t)
            y = MatMul(f, head)
        }}""",
        **arrays,
    )
    step = graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    assert [node.op_type for node in step.graph].count(op_type) == (hidden < recurrent.LARGE)
    executor = graphopt.Executor(step, threads=1)
    x = random.standard_normal((5, 6, 3), np.float32)
    before = executor.predict(x=x)["y"]
    np.testing.assert_allclose(executor.step(x=x, target=np.arange(6) % 4)["y"], before, rtol=1e-4, atol=1e-6)
    trained = executor.trained()
    assert [node.op_type for node in trained.graph.node] == [node.op_type for node in proto.graph.node]
    expected = in_onnxruntime(trained, {"x": x})["y"]
    assert np.abs(expected - before).max() > 1e-3
    np.testing.assert_allclose(executor.step(x=x, target=np.arange(6) % 4)["y"], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("op_type", GATES)
def test_an_output_that_nothing_uses_has_no_gradient(op_type: str) -> None:
    variant = Variant(op_type, {})
    model = model_of(variant, np.float64, dynamic=True)
    del model.graph.output[0]
    testing.check_gradient(model, inputs(variant, np.float64))


def test_a_value_that_is_both_states_gets_the_gradients_of_both() -> None:
    variant = Variant("LSTM", states=True)
    model, feeds = model_of(variant, np.float64), inputs(variant, np.float64)
    model.graph.node[0].input[6] = "h"
    model.graph.input.pop()
    del feeds["c"]
    testing.check_gradient(model, feeds)

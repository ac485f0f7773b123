"""Kinds of weights: one row for an operator of one's own domain makes adapters, merging, slots and files work on it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from builders import mlp, model

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.graph import weight_kinds
from graphopt.graph.weight_kinds import WeightKind, inverse, moved
from passes.gradients import registry

pytestmark = pytest.mark.usefixtures("plain")
needs_files = pytest.mark.skipif(
    not hasattr(onnxruntime, "AdapterFormat"), reason="this onnxruntime has no adapter files"
)


@dataclass(frozen=True)
class Case:
    """Hold an operator, as a function in the model, and how it reads its weight, in PyTorch and as a matrix."""

    body: str
    shape: tuple[int, ...]
    compute: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    to_matrix: Callable[[torch.Tensor], torch.Tensor]
    from_matrix: Callable[[torch.Tensor], torch.Tensor]
    kind: dict[str, Any]
    rule: Callable[..., Any] | None = None


def layer_rule(op: Any, dy: Any, x: Any, w: Any, b: Any) -> Any:
    dw = op.MatMul(op.Transpose(dy, perm=[1, 0]), x)
    return [op.MatMul(dy, w), dw, op.ReduceSum(dy, [0], keepdims=0)]


def heads_rule(op: Any, dy: Any, x: Any, w: Any, b: Any) -> Any:
    turned = op.Reshape(op.Transpose(w, perm=[0, 2, 1]), [6, 8])
    dw = op.Reshape(op.MatMul(op.Transpose(dy, perm=[1, 0]), x), [2, 3, 8])
    return [op.MatMul(dy, turned), op.Transpose(dw, perm=[0, 2, 1]), op.ReduceSum(dy, [0], keepdims=0)]


def squared_rule(op: Any, dy: Any, x: Any, w: Any, b: Any) -> Any:
    dw = op.MatMul(op.Transpose(x, perm=[1, 0]), dy) * w * 2
    return [op.MatMul(dy, op.Transpose(w * w, perm=[1, 0])), dw, op.ReduceSum(dy, [0], keepdims=0)]


LAYER = "t = Transpose<perm=[1,0]>(w)\n m = MatMul(x, t)\n y = Add(m, b)"
HEADS = "t = Transpose<perm=[1,0,2]>(w)\n s = Constant<value_ints=[8, 6]>()\n r = Reshape(t, s)\n y = Gemm(x, r, b)"
TURNED: dict[str, Any] = {"inputs": [-1], "outputs": [-2]}
LINEAR = (
    LAYER, (6, 8), lambda x, w, b: x @ w.T + b, lambda w: w.T, lambda m: m.T,
)  # fmt: skip
CASES = {
    "Inlined": Case(*LINEAR, TURNED),
    "InlinedBeside": Case(*LINEAR, {**TURNED, "x": 0, "bias": 2}),
    "Layer": Case(*LINEAR, TURNED, layer_rule),
    "LayerBeside": Case(*LINEAR, {**TURNED, "x": 0, "bias": 2}, layer_rule),
    "Heads": Case(
        HEADS, (2, 8, 3),
        lambda x, w, b: x @ w.transpose(0, 1).reshape(8, 6) + b,
        lambda w: w.transpose(0, 1).reshape(8, 6), lambda m: m.reshape(8, 2, 3).transpose(0, 1),
        {"inputs": [-2], "outputs": [-3, -1]}, heads_rule,
    ),
    "Squared": Case(
        "s = Mul(w, w)\n m = MatMul(x, s)\n y = Add(m, b)", (8, 6),
        lambda x, w, b: x @ (w * w) + b, lambda w: w, lambda m: m, {}, squared_rule,
    ),
}  # fmt: skip


@pytest.fixture(autouse=True)
def _registered() -> Iterator[None]:
    """Register the operators of this file, and take them back."""
    tables = (weight_kinds.WEIGHT_KINDS, weight_kinds.REGISTERED, registry.RULES, registry.REPLACED)
    before = [table.copy() for table in tables]
    for operator, case in CASES.items():
        passes.weight_kind("my.nets", operator, 1, **case.kind)
        if case.rule is not None:
            passes.gradient("my.nets", operator)(case.rule)
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)  # type: ignore[arg-type]


def build(name: str, rng: np.random.Generator) -> onnx.ModelProto:
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["": 21, "my.nets": 1]>
        g (float[N,8] x) => (float[N,6] y) {{ h = my.nets.{name}(x, w, b)\n y = Tanh(h) }}
        <domain: "my.nets", opset_import: ["": 21]> {name} (x, w, b) => (y) {{ {CASES[name].body} }}"""
    )
    for key, shape in {"w": CASES[name].shape, "b": (6,)}.items():
        array = rng.standard_normal(shape).astype(np.float32) / 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, key))
    return proto


def twin(case: Case, proto: onnx.ModelProto, start: dict[str, np.ndarray], data: Any, steps: int) -> list[float]:
    """Train the same adapter in PyTorch, in float64, and return the losses."""
    x, target = (torch.tensor(array.astype(np.float64)) for array in data)
    w, b = (torch.tensor(onnx.numpy_helper.to_array(t).astype(np.float64)) for t in proto.graph.initializer)
    values = [torch.tensor(array.astype(np.float64), requires_grad=True) for array in start.values()]
    optimizer, losses = torch.optim.SGD(values, 0.1), []
    for _ in range(steps):
        matrix = case.to_matrix(w) + 2 * values[0] @ values[1]
        if len(values) > 2:
            matrix = matrix * values[2] / matrix.detach().norm(dim=0)
        loss = ((case.compute(x, case.from_matrix(matrix), b).tanh() - target) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@needs_files
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_operator_of_one_s_own_trains_merges_and_travels(name: str, dora: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    proto = build(name, rng)
    x, target = rng.standard_normal((5, 8)).astype(np.float32), rng.standard_normal((5, 6)).astype(np.float32)
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    adapter = passes.LoRA("w", rank=2, alpha=4, dora=dora)
    executor = graphopt.Executor(graphopt.compile(proto, adapter=adapter, **steps))
    expected = twin(CASES[name], proto, executor.parameters, (x, target), 8)
    losses = [executor.step(x=x, target=target)["loss"] for _ in range(8)]
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert losses[-1] < losses[0]

    close, y = {"rtol": 1e-5, "atol": 1e-5}, executor.predict(x=x)["y"]
    plain = graphopt.run(proto, {"x": x})["y"]
    assert abs(y - plain).max() > 1e-3
    np.testing.assert_allclose(graphopt.run(executor.trained(), {"x": x})["y"], y, **close)
    np.testing.assert_allclose(graphopt.run(executor.trained(into=proto), {"x": x})["y"], y, **close)

    files = {tmp_path / "a.onnx_adapter": "onnxruntime", tmp_path / "a": "peft"}
    for path, form in files.items():
        graphopt.save_adapter(executor, path, form=form)
        again = graphopt.Executor(graphopt.compile(proto, adapter=passes.LoRA.load(path), **steps))
        np.testing.assert_allclose(again.predict(x=x)["y"], y, **close)
    slots = executor.trained(into=proto, adapters="slots")
    assert [node.op_type for node in slots.graph.node if node.domain] == [name]
    session = onnxruntime.InferenceSession(slots.SerializeToString())
    np.testing.assert_allclose(session.run(["y"], {"x": x})[0], plain, rtol=1e-6, atol=1e-6)
    loaded, run = onnxruntime.LoraAdapter(), onnxruntime.RunOptions()
    loaded.Load(str(tmp_path / "a.onnx_adapter"))
    run.add_active_adapter(loaded)
    np.testing.assert_allclose(session.run(["y"], {"x": x}, run)[0], y, **close)


def test_an_adapter_of_one_s_own_changes_a_weight_of_one_s_own_operator() -> None:
    class Gain(passes.Adapter):
        def initial(self, target: Any, generator: np.random.Generator) -> dict[str, np.ndarray]:
            return {"gain": np.full(target.outputs, 1.5)}

        def delta(self, op: Any, target: Any, x: Any, *values: Any) -> Any:
            return target.product(op) * target.spread(op, values[0] - 1)

        @staticmethod
        def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
            return w * values[0]

    rng = np.random.default_rng(0)
    for name in ("Layer", "LayerBeside", "Heads"):
        proto, x = build(name, rng), rng.standard_normal((5, 8)).astype(np.float32)
        step = graphopt.compile(proto, adapter=Gain("w"), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
        executor = graphopt.Executor(step)
        executor.step(x=x, target=np.zeros((5, 6), np.float32))
        w, b = (torch.tensor(onnx.numpy_helper.to_array(t)) for t in proto.graph.initializer)
        matrix = CASES[name].to_matrix(w) * torch.tensor(executor.parameters["w.gain"])
        expected = CASES[name].compute(torch.tensor(x), CASES[name].from_matrix(matrix), b).tanh().numpy()
        np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_allclose(graphopt.run(executor.trained(), {"x": x})["y"], expected, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("", "MatMul", 1), None),  # the row that is there
        (("my.nets", "Layer", 1), r"my\.nets::Layer, input 1: expected one kind of weight, found a second"),
    ],
)
def test_an_operator_has_one_kind_of_weight_at_an_input(arguments: Any, message: str | None) -> None:
    before = dict(weight_kinds.WEIGHT_KINDS)
    if message is None:
        passes.weight_kind(*arguments, x=0)
    else:
        with pytest.raises(GraphoptError, match=message):
            passes.weight_kind(*arguments)
    assert before == weight_kinds.WEIGHT_KINDS


@pytest.mark.parametrize("axes", [{"inputs": []}, {"inputs": [0]}, {"outputs": [-2]}, {"inputs": [-1, -1]}])
def test_axes_that_are_no_matrix_are_refused(axes: dict[str, list[int]]) -> None:
    with pytest.raises(GraphoptError, match=r"my\.nets::Wrong, input 1: expected axes of inputs and of outputs"):
        passes.weight_kind("my.nets", "Wrong", 1, **axes)
    assert ("my.nets", "Wrong", 1) not in weight_kinds.WEIGHT_KINDS


def test_dropout_of_a_weight_itself_is_refused() -> None:
    proto = build("Layer", np.random.default_rng(0))
    with pytest.raises(
        GraphoptError, match="expected no dropout for a product, whose adapter changes the weight itself"
    ):
        graphopt.compile(proto, adapter=passes.LoRA("w", rank=2, dropout=0.1), loss=passes.MeanSquaredError())


@pytest.mark.parametrize(
    ("text", "reader"),
    [
        ("g (float[N,4] x) => (float[N] y) { y = MatMul(x, w) }", "MatMul"),
        ("g (float[4,N] x) => (float[N] y) { y = MatMul(w, x) }", "MatMul"),
        ("g (float[N,4] x) => (float[N,4] y) { y = PRelu(x, w) }", "PRelu"),
    ],
)
def test_weights_of_fewer_axes_have_no_adapter(text: str, reader: str) -> None:
    passes.weight_kind("", "PRelu", 1, inputs=[-3], outputs=[-2, -1])
    with pytest.raises(GraphoptError, match=f"found 'w', which {reader} reads"):
        graphopt.compile(model(text, w=np.ones(4)), adapter=passes.LoRA("w", rank=1), loss=passes.MeanSquaredError())


@pytest.mark.parametrize("both", [False, True])
def test_slots_do_not_leave_out_an_operator_that_was_inlined(both: bool) -> None:
    proto = build("Inlined", np.random.default_rng(0))
    proto.functions[0].name = proto.graph.node[0].op_type = "Unknown"
    if both:
        proto.graph.node[1].CopyFrom(onnx.helper.make_node("Gemm", ["x", "w"], ["z"], transB=1))
        proto.graph.node.append(onnx.helper.make_node("Add", ["h", "z"], ["y"]))
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    executor = graphopt.Executor(graphopt.compile(proto, adapter=passes.LoRA("w", rank=2), **steps))
    with pytest.raises(GraphoptError, match=r"passes\.weight_kind\('my\.nets', 'Unknown', 1, \.\.\.\) registers it"):
        executor.trained(into=proto, adapters="slots")


def test_moves_have_inverses() -> None:
    rng = np.random.default_rng(0)
    node = graphopt.load(mlp()).graph[0]
    for inputs, outputs in (((-2,), (-1,)), ((-1,), (-2,)), ((-3, -1), (-2,)), ((-1,), (-4, -2))):
        x = rng.standard_normal((2, 3, 4, 5))
        moves = WeightKind(inputs=inputs, outputs=outputs).moves(node, x.shape)
        turned = moved(x, moves)
        size = {name: np.prod([x.shape[axis] for axis in axes]) for name, axes in (("K", inputs), ("N", outputs))}
        assert turned.shape[-2:] == (size["K"], size["N"])
        np.testing.assert_array_equal(moved(turned, inverse(moves, x.shape)), x)


def test_estimators_adapt_what_was_registered_since_the_last_fit() -> None:
    weight_kinds.REGISTERED.clear()
    registry.REPLACED.clear()
    text = """g (float[N,4] x) => (float[N,3] y) {
        h = Einsum<equation="ni,ij->nj">(x, w)
        t = Tanh(h)
        y = MatMul(t, v)
    }"""
    rng = np.random.default_rng(0)
    network = model(text, w=rng.standard_normal((4, 5)), v=rng.standard_normal((5, 3)))
    x, y = rng.standard_normal((8, 4)).astype(np.float32), np.zeros((8, 3), np.float32)

    trainer = graphopt.Trainer(network, adapter=passes.LoRA(rank=1), optimizer=passes.SGD(0.1), max_iter=1)

    def adapted() -> set[str]:
        return {name.partition(".")[0] for name in trainer.fit(x, y)._running().parameters}

    assert adapted() == {"v"}
    passes.weight_kind("", "Einsum", 1, x=0)
    assert adapted() == {"w"}  # and the last product has none

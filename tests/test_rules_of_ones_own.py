"""Rules of a user's own, functions with a backward of their own, and gradients that are stopped."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnxscript
import pytest
from builders import mlp, model
from onnxscript import opset21

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.testing.gradients import evaluate_reference
from passes.gradients.registry import NO_GRADIENT, RULES, UNIFORM, WITH_LOCAL_DERIVATIVES, rule

RNG = np.random.default_rng(3)


@pytest.fixture(autouse=True)
def _registry():
    tables = (RULES, NO_GRADIENT, UNIFORM, WITH_LOCAL_DERIVATIVES)
    kept = [table.copy() for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


def straight_through(op, dy, x, *, threshold):
    """Bengio et al., https://arxiv.org/abs/1308.3432: the step passes the gradient near 0."""
    return [dy * op.Cast(op.Less(op.Abs(x), threshold), to=dy.dtype)]


@onnxscript.script(default_opset=opset21)
def straight_through_script(dy, x):
    return dy * opset21.CastLike(opset21.Less(opset21.Abs(x), opset21.CastLike(1.0, x)), dy)


@onnxscript.script(default_opset=opset21)
def exchanged(dy, a, b):
    return dy * b, dy * a


def binarized(opset: int = 21) -> onnx.ModelProto:
    """Return y = sign(x w) v, where the sign is a function of the model's own, whose true gradient is 0."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : {opset}, "my.domain" : 1]>
        g (float[N,4] x) => (float[N,2] y) {{
            h = MatMul(x, w)
            s = my.domain.Step<threshold=1.0>(h)
            y = MatMul(s, v)
        }}
        <domain: "my.domain", opset_import: ["" : {opset}]>
        Step <threshold> (x) => (s) {{ s = Sign(x) }}"""
    )
    weights = np.random.default_rng(1)
    for name, shape in (("w", (4, 8)), ("v", (8, 2))):
        array = weights.standard_normal(shape).astype(np.float32) / 2
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


@pytest.mark.parametrize("opset", [15, 21])
@pytest.mark.parametrize("rule", [straight_through, straight_through_script])
def test_a_function_gets_a_backward_of_its_own(rule, opset):
    passes.gradient("my.domain", "Step", surrogate=True)(rule)
    step = graphopt.compile(binarized(opset), loss=passes.MeanSquaredError(), optimizer=passes.Adam())
    x = RNG.standard_normal((64, 4)).astype(np.float32)
    target = np.sign(x[:, :2] + x[:, 2:])
    executor = graphopt.Executor(step)
    losses = [executor.step(x=x, target=target, learning_rate=0.03)["loss"] for _ in range(100)]
    assert losses[-1] < 0.5 * losses[0]
    h = x @ step.graph.initializers["w"].const_value.numpy()
    found = evaluate_reference(graphopt.grad(binarized(opset), ["w"]), {"x": x})["y.grad.w"]
    v = step.graph.initializers["v"].const_value.numpy()
    expected = x.T @ (np.tile(v.sum(axis=1), (64, 1)) * (np.abs(h) < 1))
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-4)


def test_without_a_rule_a_function_is_differentiated_through_its_body():
    with pytest.raises(GraphoptError, match="does not depend on 'w'"):
        graphopt.compile(binarized(), loss=passes.MeanSquaredError(), parameters=passes.Parameters(pattern="*"))


def test_an_operator_of_a_foreign_domain_trains_by_its_rule():
    """The types of its outputs are those that the file gives."""
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 21, "my.domain" : 1]>
        g (float[N,4] x) => (float[N,4] y) <float[N,4] h> { h = my.domain.Product(x, w)  y = Tanh(h) }"""
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), "w"))
    with pytest.raises(GraphoptError, match=r"no gradient rule for my\.domain::Product .*register"):
        graphopt.compile(proto, loss=passes.MeanSquaredError())
    passes.gradient("my.domain", "Product")(exchanged)
    lines = graphopt.listing(graphopt.compile(proto, loss=passes.MeanSquaredError()))
    assert "h: float[N,4] = my.domain::Product(x, w)" in lines
    assert "w.grad: float[4] = ReduceSum" in lines


def test_a_rule_of_ones_own_stands_in_for_the_librarys():
    """Guided backpropagation, Springenberg et al., https://arxiv.org/abs/1412.6806."""
    proto = model("g (float[4] x) => (float[4] y) { n = Neg(x)\n r = Relu(n)\n y = Neg(r) }")
    x = np.array([-2, -1, 1, 2], np.float32)
    assert evaluate_reference(graphopt.grad(proto, ["x"]), {"x": x})["y.grad.x"].tolist() == [1, 1, 0, 0]
    passes.gradient("", "Relu")(lambda op, dy, x, y: [op.Relu(dy) * op.Sign(y)])
    assert evaluate_reference(graphopt.grad(proto, ["x"]), {"x": x})["y.grad.x"].tolist() == [0, 0, 0, 0]


def test_a_rule_replaces_the_declaration_that_an_operator_has_no_gradient():
    proto = model("g (float[4] x) => (float[4] y) { r = Round(x)\n y = Neg(r) }")
    passes.gradient("", "Round")(lambda op, dy, x: [dy])
    x = np.array([-2.4, -1, 1, 2], np.float32)
    assert evaluate_reference(graphopt.grad(proto, ["x"]), {"x": x})["y.grad.x"].tolist() == [-1, -1, -1, -1]


def test_a_rule_gets_the_gradient_of_each_element():
    proto = model("g (float[4] x) => (float y) { r = Tanh(x)\n y = ReduceSum<keepdims = 0>(r) }")
    shapes = []
    passes.gradient("", "Tanh")(lambda op, dy, x: [shapes.append(dy.shape.numpy()) or dy])
    graphopt.grad(proto, ["x"])
    assert shapes == [(4,)]


def test_a_second_rule_of_an_operator_is_refused():
    with pytest.raises(GraphoptError, match=r"Relu: expected one rule, found a second: passes\.gradient replaces"):
        rule("Relu")(lambda op, dy, x: [dy])


@pytest.mark.parametrize(
    ("rule", "found"),
    [
        (
            lambda op, dy, x: [op.ReduceSum(dy)],
            r"expected the gradient of 'h', .* in the shape of a value float\[N,8\], found a value float\[1,1\]",
        ),
        (lambda op, dy, x: [dy + op.constant(np.ones(5), like=dy)], "cannot emit Add"),
        (exchanged, "exchanged: expected an onnxscript function of 2 inputs"),
    ],
)
def test_a_wrong_rule_is_told(rule, found):
    passes.gradient("my.domain", "Step", surrogate=True)(rule)
    with pytest.raises(GraphoptError, match=found):
        graphopt.compile(binarized(), loss=passes.MeanSquaredError())


@dataclass(frozen=True)
class Reweighed(passes.Loss):
    """Squared errors, weighed by how large they are: no gradient flows through the weights."""

    def compare(self, op, prediction, target):
        error = prediction - target
        return passes.stop_gradient(op, op.Abs(error)) * error * error


def test_a_loss_holds_a_value_constant():
    proto = mlp((4, 8, 3))
    compiled = graphopt.compile(proto, loss=Reweighed())
    x, target = RNG.standard_normal((6, 4)).astype(np.float32), np.zeros((6, 3), np.float32)
    found = evaluate_reference(compiled, {"x": x, "target": target})
    error = found["y"] - target
    np.testing.assert_allclose(found["fc1.bias.grad"], (2 * np.abs(error) * error).sum(axis=0) / error.size, rtol=1e-5)


def test_nothing_trains_through_a_stopped_value():
    compiled = graphopt.compile(
        mlp((4, 8, 3)),
        normalize=(passes.Normalize(), passes.StopGradient("a0")),
        loss=passes.MeanSquaredError(),
    )
    gradients = [output.name for output in compiled.graph.outputs if output.name.endswith(".grad")]
    assert gradients == ["fc1.bias.grad", "fc1.weight.grad"]
    with pytest.raises(GraphoptError, match=r"stop_gradient.values='z\*'"):
        passes.StopGradient("z*")(ir.from_proto(mlp()))


def test_a_stop_survives_a_file(tmp_path):
    normalize = (passes.Normalize(), passes.StopGradient("a0"))
    pipeline = graphopt.standard(normalize=normalize, loss=passes.MeanSquaredError())
    graphopt.save(pipeline.until("loss")(mlp((4, 8, 3))), tmp_path / "stopped.onnx")
    compiled = pipeline.after("loss")(tmp_path / "stopped.onnx")
    assert "fc0.weight.grad" not in {output.name for output in compiled.graph.outputs}
    again = passes.Normalize()(ir.from_proto(onnx.load(tmp_path / "stopped.onnx"))).model
    assert any(node.op_type == "Identity" for node in again.graph)

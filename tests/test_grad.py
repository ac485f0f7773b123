"""Gradients as graphs: by inputs and weights, and gradients of gradients."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import attention, mlp, model

import graphopt
import passes
from graphopt.testing.reference import evaluator

RNG = np.random.default_rng(5)


def cnn():
    return model(
        """g (double[N,2,6,6] x) => (double[N,3] y) {
            c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, kernel, bias)
            r = Tanh(c)
            p = AveragePool<kernel_shape=[2,2]>(r)
            f = Flatten(p)
            y = MatMul(f, weight)
        }""",
        dtype=np.float64,
        kernel=RNG.standard_normal((4, 2, 3, 3)),
        bias=RNG.standard_normal(4),
        weight=RNG.standard_normal((16, 3)),
    )


MODELS = {
    "mlp": (lambda: mlp((4, 8, 3), dtype=np.float64), (6, 4), "fc0.weight"),
    "cnn": (cnn, (2, 2, 6, 6), "kernel"),
    "attention": (lambda: attention(np.float64), (2, 6, 4), "query"),
}


def run(graph, **feeds):
    names = [value.name for value in graph.graph.outputs]
    return dict(zip(names, evaluator(graph).run(None, feeds), strict=True))


def with_weight(graph, name, array):
    changed = graph.clone()
    changed.graph.initializers[name].const_value = ir.tensor(array, name=name)
    return changed


def slope(function, at, direction, step=1e-5):
    return (function(at + step * direction) - function(at - step * direction)) / (2 * step)


@pytest.mark.parametrize("name", MODELS)
def test_gradients_by_inputs_and_weights(name):
    build, shape, weight = MODELS[name]
    x, proto = RNG.standard_normal(shape), build()
    graph = graphopt.grad(proto, ["x", weight])
    onnx.checker.check_model(ir.to_proto(graph), full_check=True)
    found = run(graph, x=x)
    direction = RNG.standard_normal(shape)
    expected = slope(lambda at: run(graph, x=at)["y"].sum(), x, direction)
    np.testing.assert_allclose(np.vdot(found["y.grad.x"], direction), expected, rtol=1e-6)
    at = graph.graph.initializers[weight].const_value.numpy()
    direction = RNG.standard_normal(at.shape)
    expected = slope(lambda at: run(with_weight(graph, weight, at), x=x)["y"].sum(), at, direction)
    np.testing.assert_allclose(np.vdot(found[f"y.grad.{weight}"], direction), expected, rtol=1e-6)


@pytest.mark.parametrize("by", ["x", "weight"])
@pytest.mark.parametrize("name", MODELS)
def test_hessian_vector_products(name, by):
    build, shape, weight = MODELS[name]
    by = "x" if by == "x" else weight
    x, proto = RNG.standard_normal(shape), build()
    first = graphopt.grad(proto, [by])
    second = graphopt.grad(first, [by], of=f"y.grad.{by}", seeded=True)
    onnx.checker.check_model(ir.to_proto(second), full_check=True)
    if by == "x":
        direction = RNG.standard_normal(shape)
        expected = slope(lambda at: run(first, x=at)["y.grad.x"], x, direction)
    else:
        at = first.graph.initializers[weight].const_value.numpy()
        direction = RNG.standard_normal(at.shape)
        expected = slope(lambda at: run(with_weight(first, weight, at), x=x)[f"y.grad.{by}"], at, direction)
    found = run(second, x=x, **{f"y.grad.{by}.seed": direction})[f"y.grad.{by}.grad.{by}"]
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("formula", "first", "second", "derivative"),
    [
        ("s = Sin(x)\n p = Pow(w, four)\n y = Mul(s, p)", "w", "w", lambda x, w: 12 * np.sin(x) * w**2),
        ("s = Sin(x)\n p = Pow(w, four)\n y = Mul(s, p)", "x", "w", lambda x, w: 4 * np.cos(x) * w**3),
        ("s = Mul(w, w)\n p = Mul(s, w)\n y = Mul(x, p)", "w", "w", lambda x, w: 6 * x * w),
        ("s = Mul(w, w)\n p = Mul(s, w)\n y = Mul(x, p)", "x", "w", lambda x, w: 3 * w**2 + 0 * x),
        ("y = Div(x, w)", "w", "w", lambda x, w: 2 * x / w**3),
        ("y = Div(x, w)", "x", "w", lambda x, w: -1 / w**2 + 0 * x),
        ("p = Mul(w, w)\n y = Where(on, p, x)", "w", "w", lambda x, w: 2 + 0 * x),
    ],
)
def test_second_derivatives_by_weights(formula, first, second, derivative, keep):
    proto = model(
        f"g (double[3] x) => (double[3] y) {{ {formula} }}",
        dtype=np.float64,
        w=np.array(1.7),
        four=np.array(4.0),
        on=np.array(True),
    )
    x = np.array([0.3, 1.1, 2.0])
    once = graphopt.grad(proto, [first], of="y", keep=keep)
    twice = graphopt.grad(once, [second], of=f"y.grad.{first}", keep=keep)
    found = run(twice, x=x)[f"y.grad.{first}.grad.{second}"]
    np.testing.assert_allclose(found, derivative(x, 1.7).sum(), rtol=1e-12)


def test_parameters_train_through_a_gradient_that_the_model_holds():
    """A loss of a gradient: what is computed from the weights alone in it must move as the weights do."""
    proto = model(
        "g (float[N,1] x) => (float[N,1] y) { a = Transpose(w)\n h = MatMul(x, a)\n t = Sin(h)\n y = MatMul(t, w) }",
        w=np.array([[0.5], [1.5]]),
    )
    slopes = graphopt.grad(proto, ["x"], keep=False)
    step = graphopt.compile(slopes, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
    executor = graphopt.Executor(step)
    x = np.linspace(-1, 1, 8, dtype=np.float32)[:, None]
    losses = [executor.step(x=x, target=np.ones_like(x))["loss"] for _ in range(30)]
    w = executor.state["w"][:, 0].astype(np.float64)
    expected = np.mean((sum(w * w * np.cos(x * w) for w in w) - 1) ** 2)
    np.testing.assert_allclose(executor.evaluate(x=x, target=np.ones_like(x))["loss"], expected, rtol=1e-5)
    assert losses[-1] < losses[0] / 2


def test_the_batch_stays_dynamic_and_own_outputs_can_go():
    graph = graphopt.grad(mlp(), ["x"], keep=False)
    for batch in (1, 7):
        outputs = run(graph, x=np.ones((batch, 4), np.float32))
        assert list(outputs) == ["y.grad.x"]
        assert outputs["y.grad.x"].shape == (batch, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"wrt": ["z"]}, "unknown floating-point value 'z'; known: .*fc0.weight"),
        (
            {"wrt": ["x"], "of": "z"},
            r"of='z': expected the name of one floating-point output, the model has \['y'\]",
        ),
        ({"wrt": ["y"]}, None),
    ],
)
def test_names_that_do_not_exist(options, message):
    if message is None:
        assert "y.grad.y" in [value.name for value in graphopt.grad(mlp(), **options).graph.outputs]
        return
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.grad(mlp(), **options)


def test_an_output_that_does_not_depend_on_an_input_is_refused():
    proto = model("g (float[N,2] x, float[N,2] z) => (float[N,2] y, float[N,2] w) { y = Tanh(x)\n w = Tanh(z) }")
    with pytest.raises(graphopt.GraphoptError, match="'y' does not depend on 'z' differentiably"):
        graphopt.grad(proto, ["z"], of="y")


@pytest.mark.parametrize(
    "activation", ["Relu(h)", "Abs(h)", "LeakyRelu(h)", "Max(h, zero)", "Clip(h, zero)", "Identity(h)"]
)
def test_second_derivatives_of_a_piecewise_linear_network_are_zeros(activation):
    proto = model(
        f"g (float[N,4] x) => (float[N,2] y) {{ h = MatMul(x, w)\n a = {activation}\n y = MatMul(a, v) }}",
        w=RNG.standard_normal((4, 5)),
        v=RNG.standard_normal((5, 2)),
        zero=np.zeros(()),
    )
    first = graphopt.grad(proto, ["x"], keep=False)
    x = RNG.standard_normal((3, 4)).astype(np.float32)
    (found,) = graphopt.run(graphopt.grad(first, ["x"], keep=False), {"x": x}).values()
    np.testing.assert_array_equal(found, np.zeros((3, 4)))


def test_differentiate_is_a_pass():
    loaded = graphopt.load(mlp())
    passes.Differentiate(["fc0.bias"])(loaded)
    onnx.checker.check_model(ir.to_proto(loaded), full_check=True)
    assert [value.name for value in loaded.graph.outputs] == ["y", "y.grad.fc0.bias"]

"""Files on which an optimizer of ONNX Runtime ends the process, or loses values, are run, trained and exported.

onnxruntime 1.32 replaces an If whose condition is constant by its branch. It fails if this branch has such an If,
too, in which a node has a body. The oracle is ONNX Runtime without its optimizers.
"""

from __future__ import annotations

import itertools
import subprocess
import sys
from collections.abc import Callable

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model
from steps import outputs

import graphopt
import passes
from graphopt.runtime import session
from graphopt.runtime.optimizers import has_nested_choices

X = np.array([[1, -2], [0.5, 3]], np.float32)
Nodes = Callable[[str], str]  # returns nodes, in ONNX's text, that compute a value of this name
_COUNT = itertools.count()


def plain(operator: str, x: str) -> Nodes:
    return lambda y: f"{y} = {operator}({x})"


def choice(condition: str, then: Nodes, before: str = "") -> Nodes:
    """Return an If; its condition is `yes`, which is constant, or `positive`, which is not."""

    def nodes(y: str) -> str:
        i = next(_COUNT)
        return (
            f"{before} {y} = If({condition}) <then_branch = t{i} () => (float[N,2] p{i}) {{ {then(f'p{i}')} }},"
            f" else_branch = e{i} () => (float[N,2] q{i}) {{ q{i} = Neg(h) }}>"
        )

    return nodes


def loop(start: str, body: Callable[[str], Nodes]) -> Nodes:
    def nodes(y: str) -> str:
        i = next(_COUNT)
        return (
            f"two{i} = Constant<value_int = 2>() {y} = Loop(two{i}, , {start}) <body = l{i} (int64 i{i}, bool k{i},"
            f" float[N,2] a{i}) => (bool o{i}, float[N,2] b{i}) {{ o{i} = Identity(k{i}) {body(f'a{i}')(f'b{i}')} }}>"
        )

    return nodes


def yes(then: Nodes) -> Nodes:
    i = next(_COUNT)
    return choice(f"yes{i}", then, f"yes{i} = Constant<value = bool {{1}}>()")


def maybe(then: Nodes) -> Nodes:
    return choice("positive", then)


def with_value(then: Nodes) -> Nodes:
    return lambda y: f"v = Sigmoid(h) {then(y)}"


FAIL = {
    "a choice of a value": yes(yes(with_value(maybe(plain("Abs", "v"))))),
    "a choice of an outer value": yes(with_value(yes(maybe(plain("Abs", "v"))))),
    "a loop": yes(yes(with_value(loop("h", lambda a: lambda y: f"{y} = Add({a}, v)")))),
    "three constants": yes(yes(yes(with_value(maybe(plain("Abs", "v")))))),
    "in a loop": loop("h", lambda a: yes(yes(with_value(maybe(plain("Abs", a)))))),
    "in a choice": maybe(yes(yes(with_value(maybe(plain("Abs", "v")))))),
}
RUN = {
    "one constant": yes(with_value(maybe(plain("Abs", "v")))),
    "two constants": yes(yes(plain("Abs", "h"))),
    "a constant in a choice": maybe(yes(with_value(maybe(plain("Abs", "v"))))),
    "a choice between": yes(maybe(yes(with_value(maybe(plain("Abs", "v")))))),
    "a loop between": yes(loop("h", lambda a: yes(with_value(maybe(plain("Abs", a)))))),
}


def model_of(nodes: Nodes) -> onnx.ModelProto:
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 20]> g (float[N,2] x) => (float[N,2] y) {{ h = MatMul(x, w)'
        f" most = ReduceMax<keepdims = 0>(x) zero = Constant<value_float = 0.0>() positive = Greater(most, zero)"
        f" {nodes('z')} y = Tanh(z) }}"
    )
    weight = np.random.default_rng(0).standard_normal((2, 2)).astype(np.float32)
    model.graph.initializer.append(onnx.numpy_helper.from_array(weight, "w"))
    return model


def unoptimized(model: onnx.ModelProto) -> np.ndarray:
    return next(iter(outputs(model, {"x": X}, optimize=False).values()))


@pytest.mark.parametrize("name", [*FAIL, *RUN])
def test_files_with_choices_run_and_train(name: str) -> None:
    model = model_of({**FAIL, **RUN}[name])
    expected = unoptimized(model)
    assert has_nested_choices(ir.from_proto(model)) or name in RUN
    np.testing.assert_allclose(graphopt.run(model, {"x": X})["y"], expected, rtol=1e-6)
    np.testing.assert_allclose(graphopt.predict(model, X)["y"], expected, rtol=1e-6)
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, native=False)
    np.testing.assert_allclose(executor.predict(x=X)["y"], expected, rtol=1e-5)
    data = {"x": X, "target": np.zeros_like(X)}
    before = graphopt.evaluate(executor, data)["loss"]
    assert graphopt.fit(executor, data, epochs=2, validation=None)[0]["loss"] == pytest.approx(before, rel=1e-5)
    trained = executor.trained()
    assert not has_nested_choices(ir.from_proto(trained))
    found = onnxruntime.InferenceSession(trained.SerializeToString()).run(None, {"x": X})[0]
    np.testing.assert_allclose(found, executor.predict(x=X)["y"], rtol=1e-5)


def test_choices_in_a_function_are_seen() -> None:
    """The runtime puts functions in place of their calls before it optimizes."""
    model = model_of(yes(lambda y: f"{y} = own.inner(h)"))
    model.opset_import.add(domain="own", version=1)
    inner = yes(maybe(plain("Abs", "h")))("y")
    head = '<opset_import: ["": 20], domain: "own"> inner (h) => (y)'
    text = f"{head} {{ positive = Constant<value = bool {{1}}>() {inner} }}"
    model.functions.append(onnx.parser.parse_function(text.replace("float[N,2] ", "")))
    assert has_nested_choices(ir.from_proto(model))


@pytest.mark.slow
@pytest.mark.skipif(onnxruntime.__version__ != "1.32.0", reason="says what one version does")
@pytest.mark.parametrize("name", [*FAIL, *RUN])
def test_constant_folding_is_the_optimizer_that_fails(name: str, tmp_path) -> None:
    onnx.save(model_of({**FAIL, **RUN}[name]), path := tmp_path / "model.onnx")
    program = (
        "import sys, numpy, onnxruntime\n"
        "session = onnxruntime.InferenceSession(sys.argv[1], disabled_optimizers=sys.argv[2:])\n"
        "session.run(None, {'x': numpy.ones((2, 2), 'float32')})"
    )
    command = [sys.executable, "-c", program, str(path)]
    optimized, *others = (
        subprocess.run([*command, *disabled], capture_output=True, check=False).returncode
        for disabled in ([], ["ConstantFolding"])
    )
    assert (optimized != 0) == (name in FAIL)
    assert others == [0]


# A Gather by a Range from below 0 up, of which the runtime makes a Slice that takes nothing.


def rolled() -> onnx.ModelProto:
    """Return a model that adds the sum of all rows, the last one first, to each row."""
    weights = {
        "w": np.eye(3),
        "z": np.array(0),
        "last": np.array(-1),
        "one": np.array(1),
        "axes": np.array([0]),
    }
    return model(
        """g (float[N,3] x) => (float[N,3] y) {
            s = Shape(x) n = Gather(s, z) e = Sub(n, one) i = Range(last, e, one)
            h = MatMul(x, w) b = Gather(h, i) t = ReduceSum(b, axes) y = Add(h, t)
        }""",
        **weights,
    )


def test_a_gather_by_a_range_from_below_0_trains_as_the_file_says(cache):
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    step = graphopt.compile(rolled(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    executor = graphopt.Executor(step, native=False)
    a = x + x.sum(axis=0)
    assert np.array_equal(executor.predict(x=x)["y"], a)
    executor.step(x=x, target=np.zeros_like(x))
    expected = np.eye(3) - 0.01 * 2 / a.size * a.T.astype(np.float64) @ a
    assert np.allclose(executor.state["w"], expected, rtol=1e-5)


def test_the_first_check_notices_an_optimizer_that_changes_predictions(monkeypatch, cache):
    monkeypatch.setattr(session, "disabled_optimizers", lambda device, model: [])
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    proto = rolled()
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01))
    with pytest.raises(graphopt.GraphoptError, match="output 'y': expected the file's own numbers"):
        graphopt.Executor(step, native=False).step(x=x, target=x)

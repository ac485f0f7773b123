"""If, Scan and Loop: gradients by finite differences, of each other, on the runtime, and in training."""

from __future__ import annotations

import functools

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model as parsed

import graphopt
import passes
from graphopt.graph import inference, roles
from graphopt.testing import gradients as testing

BOTH = "(T[3] x, T[3] w, bool c) => (T[3] y)"
BRANCHES = """{ a = Tanh(x) y = If(c) <
  then_branch = yes () => (T[3] p) { p = Mul(a, w) },
  else_branch = no () => (T[3] q) { e = Exp(a) q = Mul(e, x) }> }"""
LOOPED = "(T[3] s, T[3] w, int64 n) => (T[3] z, T[n, 3] ys)"
CASES = {
    "if": (f"g {BOTH} {BRANCHES}", {"c": np.array(True)}),
    "else": (f"g {BOTH} {BRANCHES}", {"c": np.array(False)}),
    "scan": (
        """g (T[3] s, T[4, 3] x, T[3] w) => (T[3] last, T[4, 3] y) {
        last, y = Scan <num_scan_inputs = 1, body = b (T[3] h, T[3] i) => (T[3] k, T[3] o) {
          a = Mul(h, w) k = Add(a, i) o = Tanh(k) }> (s, x) }""",
        {},
    ),
    "scan with axes and directions": (
        """g (T[3] s, T[3, 4] x, T[4, 3] u, T[3] w) => (T[3] last, T[3, 4] y) {
        last, y = Scan <num_scan_inputs = 2, scan_input_axes = [1, 0], scan_input_directions = [1, 0],
            scan_output_axes = [-1], scan_output_directions = [1],
            body = b (T[3] h, T[3] i, T[3] j) => (T[3] k, T[3] o) {
          a = Mul(h, w) m = Mul(i, j) k = Add(a, m) o = Tanh(k) }> (s, x, u) }""",
        {},
    ),
    "loop": (
        f"""g {LOOPED} {{ z, ys = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k, T[3] o) {{
          go = Identity(on) f = CastLike(i, h) m = Mul(h, w) a = Sin(m) k = Add(a, f) o = Mul(k, h) }}> (n, , s) }}""",
        {"n": np.array(3)},
    ),
    "loop until a condition": (
        """g (T[3] s, T[3] w) => (T[3] z) { yes = Constant <value = bool {1}> () three = Constant <value_int = 3> ()
        z = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k) {
          go = Less(i, three) m = Mul(h, w) k = Sin(m) }> (, yes, s) }""",
        {},
    ),
    "if in a loop": (
        """g (T[3] s, T[3] w, int64 n) => (T[3] z) {
        z = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k) {
          go = Identity(on) one = Constant <value_int = 1> () first = Equal(i, one)
          k = If(first) <then_branch = yes () => (T[3] p) { p = Mul(h, w) },
            else_branch = no () => (T[3] q) { t = Sin(h) q = Mul(t, s) }> }> (n, , s) }""",
        {"n": np.array(3)},
    ),
    "scan in a loop": (
        """g (T[3] s, T[2, 3] x, T[3] w, int64 n) => (T[3] z) {
        z = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k) {
          go = Identity(on)
          k = Scan <num_scan_inputs = 1, body = c (T[3] a, T[3] d) => (T[3] e) { f = Mul(a, w) e = Add(f, d) }> (h, x)
        }> (n, , s) }""",
        {"n": np.array(2)},
    ),
}
each_case = pytest.mark.parametrize("name", CASES)


def model_of(name: str, dtype: str) -> onnx.ModelProto:
    return parsed(CASES[name][0].replace("T[", f"{dtype}["))


def point(name: str) -> dict[str, np.ndarray]:
    random, point = np.random.default_rng(0), dict(CASES[name][1])
    for x in model_of(name, "double").graph.input:
        shape = [dim.dim_value for dim in x.type.tensor_type.shape.dim]
        point.setdefault(x.name, random.uniform(0.4, 1.2, shape))
    return point


@functools.cache
def proved(name: str) -> dict[str, np.ndarray]:
    return testing.check_gradient(model_of(name, "double"), point(name))


def seeded(name: str) -> dict[str, np.ndarray]:
    feeds = point(name)
    return feeds | testing.random_seeds(testing.evaluate_reference(ir.from_proto(model_of(name, "double")), feeds))


def in_onnxruntime(model: ir.Model, feeds: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(ir.to_proto(model).SerializeToString(), providers=["CPUExecutionProvider"])
    types = {"tensor(float)": np.float32, "tensor(int64)": np.int64, "tensor(bool)": np.bool_}
    taken = {x.name: feeds[x.name].astype(types[x.type]) for x in session.get_inputs()}
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, taken), strict=True))


@each_case
def test_gradient_equals_finite_differences(name: str) -> None:
    proved(name)


@each_case
def test_gradient_is_valid_and_the_same_in_onnxruntime(name: str) -> None:
    model = testing.gradient_model(model_of(name, "float"))
    onnx.checker.check_model(ir.to_proto(model), full_check=True)
    found = in_onnxruntime(model, seeded(name))
    for x, expected in proved(name).items():
        assert testing.distance(found.get(f"{x}.grad", np.zeros_like(expected)), expected) <= 2e-5, x


@each_case
def test_gradient_of_a_gradient_equals_finite_differences(name: str) -> None:
    model = testing.gradient_model(model_of(name, "double"))
    for output in model.graph.outputs:
        output.name = f"first.{output.name}"
    testing.check_gradient(model, seeded(name), tolerance=2e-6)


def test_a_loop_without_steps_passes_its_gradient_on() -> None:
    feeds = seeded("loop") | {"n": np.array(0), "ys.seed": np.zeros((0, 3))}
    found = in_onnxruntime(testing.gradient_model(model_of("loop", "float")), feeds)
    np.testing.assert_allclose(found["s.grad"], feeds["z.seed"], rtol=1e-6)
    np.testing.assert_array_equal(found["w.grad"], np.zeros(3))


def test_a_scan_back_that_needs_no_slice_takes_as_many_steps() -> None:
    model = parsed(
        """g (float[3] s, int64[4] x) => (float[3] z) { z = Scan <num_scan_inputs = 1,
        body = b (float[3] h, int64 i) => (float[3] k) { k = Mul(h, w) }> (s, x) }""",
        w=np.array([0.5, 2.0, 3.0]),
    )
    found = in_onnxruntime(graphopt.grad(model, ["s"]), {"s": np.ones(3), "x": np.zeros(4, np.int64)})
    np.testing.assert_allclose(found["z.grad.s"], [0.5**4, 2.0**4, 3.0**4], rtol=1e-6)


def test_a_value_that_is_two_results_of_a_body_gets_the_gradients_of_both() -> None:
    text = """g (float[3] s, float[4, 3] x, float[3] w) => (float[3] z) {{
        last, y = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] i) => (float[3] k, float[3] {}) {{
          a = Mul(h, w) k = Add(a, i) o = Identity(k) }}> (s, x)
        axes = Constant <value_ints = [0]> () total = ReduceSum <keepdims = 0> (y, axes) z = Mul(last, total) }}"""
    random = np.random.default_rng(0)
    feeds = {"s": random.random(3), "x": random.random((4, 3)), "w": random.random(3)}
    found, expected = (
        in_onnxruntime(graphopt.grad(parsed(text.format(name)), list(feeds)), feeds) for name in ("k", "o")
    )
    for name in feeds:
        np.testing.assert_allclose(found[f"z.grad.{name}"], expected[f"z.grad.{name}"], rtol=1e-6)


def test_a_loop_that_fills_a_sequence_is_differentiated() -> None:
    model = parsed(
        """g (float[3] s, int64 n) => (float[k] z) { e = SequenceEmpty() h, l = Loop <
        body = b (int64 i, bool on, float[3] h, seq(float[3]) l) => (bool go, float[3] k, seq(float[3]) m) {
          go = Identity(on) k = Sin(h) m = SequenceInsert(l, k) }> (n, , s, e)
        z = ConcatFromSequence <axis = 0> (l) }"""
    )
    testing.check_gradient(model, {"s": np.array([0.3, -1.2, 0.7]), "n": np.array(3)})


RNG = np.random.default_rng(0)
TRAINED = {
    "if": (
        """g (float[N, 4] x) => (float[N, 3] y) { h = Gemm(x, w, b) total = ReduceSum <keepdims = 0> (x)
        zero = CastLike(none, total) positive = Greater(total, zero)
        y = If(positive) <then_branch = yes () => (float[N, 3] p) { t = Tanh(h) p = MatMul(t, v) },
          else_branch = no () => (float[N, 3] q) { q = MatMul(h, u) }> }"""
    ),
    "if whose gradient hands a value on": (
        """g (float[N, 4] x) => (float[N, 3] y) { h = Gemm(x, w, b) t = Tanh(h) s = MatMul(t, v)
        total = ReduceSum <keepdims = 0> (x) zero = CastLike(none, total) positive = Greater(total, zero)
        y = If(positive) <then_branch = yes () => (float[N, 3] p) { p = Add(s, h) },
          else_branch = no () => (float[N, 3] q) { q = MatMul(h, u) }> }"""
    ),
    "loop": (
        """g (float[N, 4] x) => (float[N, 3] y) { h = Gemm(x, w, b)
        y = Loop <body = b (int64 i, bool on, float[N, 3] s) => (bool go, float[N, 3] k) {
          go = Identity(on) m = MatMul(s, v) a = Tanh(m) c = MatMul(a, u) k = Add(s, c) }> (none, , h) }"""
    ),
}


@pytest.mark.parametrize("name", TRAINED)
def test_weights_in_bodies_train(name: str) -> None:
    model = parsed(
        TRAINED[name],
        w=RNG.standard_normal((4, 3)),
        b=RNG.standard_normal(3),
        v=RNG.standard_normal((3, 3)),
        u=RNG.standard_normal((3, 3)),
        none=np.array(3 if name == "loop" else 0),
    )
    step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05))
    assert {x.name for x in roles.with_role(step, roles.Role.PARAMETER)} == {"w", "b", "v", "u"}
    executor = graphopt.Executor(step, threads=1)
    x, labels = RNG.standard_normal((6, 4)).astype(np.float32), RNG.integers(0, 3, 6)
    first = executor.state
    losses = [executor.step(x=sign * x, target=labels)["loss"] for _ in range(10) for sign in (1, -1)]
    assert sum(losses[-4:]) < sum(losses[:4])
    assert all((first[name] != array).any() for name, array in executor.state.items())
    trained = ir.from_proto(inference.trained(step, executor.state))
    assert testing.evaluate_reference(trained, {"x": x})["y"].shape == (6, 3)

"""The option matmul_precision: kernels that multiply bfloat16 numbers, where the processor has instructions for it."""

import numpy as np
import onnx
import onnxruntime
import pytest
from builders import model

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.translation import Translation
from graphopt.targets.native import precision
from graphopt.targets.native.lowering import lower_to_kernels
from graphopt.targets.native.toolchain import compiler

BOUNDS = {"high": 2e-5, "medium": 1e-2}  # of errors, in standard deviations of a product of normal numbers
needs_compiler = pytest.mark.skipif(compiler() is None, reason="no C compiler: install gcc or clang")


@pytest.fixture(params=["high", "medium"])
def allowed(request, monkeypatch):
    """A precision that this machine has instructions for."""
    for name in ("GRAPHOPT_NATIVE", precision.VARIABLE):
        monkeypatch.delenv(name, raising=False)
    if (reason := precision.obstacle(request.param)) is not None:
        pytest.skip(reason)
    return request.param


def network(rng):
    """Return a perceptron with products of several shapes, from ONNX's own text."""
    model = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        network (float[batch, 70] x) => (float[batch, 33] y) {
            a = MatMul (x, w0)
            b = Add (a, b0)
            c = Tanh (b)
            y = MatMul (c, w1)
        }"""
    )
    for name, shape in {"w0": (70, 150), "b0": (150,), "w1": (150, 33)}.items():
        array = (rng.standard_normal(shape) / np.sqrt(shape[0])).astype(np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return model


def in_float64(weights, x, target):
    """Return the loss, and the gradients of the weights, in NumPy."""
    w0, b0, w1 = (weights[name].astype(np.float64) for name in ("w0", "b0", "w1"))
    c = np.tanh(x @ w0 + b0)
    error = c @ w1 - target
    dy = 2 * error / error.size
    da = (dy @ w1.T) * (1 - c**2)
    return np.mean(error**2), {"w0": x.T @ da, "b0": da.sum(0), "w1": c.T @ dy}


@needs_compiler
def test_gradients_are_those_of_numpy_but_for_rounding(allowed) -> None:
    rng = np.random.default_rng(3)
    step = graphopt.compile(network(rng), loss=passes.MeanSquaredError(), optimizer=passes.SGD(1.0))
    executor = graphopt.Executor(step, native=True, verify=True, matmul_precision=allowed)
    x = rng.standard_normal((96, 70)).astype(np.float32)
    target = rng.standard_normal((96, 33)).astype(np.float32)
    before = {name: np.array(value) for name, value in executor.state.items()}
    loss = executor.step(x=x, target=target)["loss"]
    expected, gradients = in_float64(before, x, target)
    assert abs(loss - expected) < BOUNDS[allowed] * expected
    after, exact = executor.state, graphopt.Executor(step, native=True)
    exact.step(x=x, target=target)
    for name, gradient in gradients.items():
        found = before[name] - np.asarray(after[name])
        error = np.abs(found - gradient).max() / gradient.std()
        assert error < 3 * BOUNDS[allowed], (name, error)
    assert not np.array_equal(after["w0"], exact.state["w0"]), "the precision changes nothing"


@needs_compiler
def test_numbers_do_not_depend_on_threads(allowed) -> None:
    rng = np.random.default_rng(4)
    step = graphopt.compile(network(rng), loss=passes.MeanSquaredError(), optimizer=passes.AdamW())
    x = rng.standard_normal((300, 70)).astype(np.float32)
    target = rng.standard_normal((300, 33)).astype(np.float32)
    states = []
    for threads in 1, 2, 3:
        executor = graphopt.Executor(step, native=True, threads=threads, matmul_precision=allowed)
        for _ in range(3):
            executor.step(x=x, target=target)
        states.append(executor.state)
    for other in states[1:]:
        for name, value in states[0].items():
            np.testing.assert_array_equal(value, other[name], name)


def test_without_kernels_a_warning_says_so(allowed) -> None:
    step = graphopt.compile(
        network(np.random.default_rng(5)), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)
    )
    with pytest.warns(UserWarning, match="expected kernels on the CPU, or CUDA, found neither; products run as"):
        graphopt.Executor(step, native=False, matmul_precision=allowed)


@needs_compiler
def test_only_forms_with_kernels_may_differ_by_the_rounding_of_products(allowed, monkeypatch) -> None:
    units = {}

    def note(self, form, *_):
        units[form.library is not None] = self._unit
        return ""

    monkeypatch.setattr(Translation, "_difference", note)
    step = graphopt.compile(
        network(np.random.default_rng(5)), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)
    )
    feeds = {"x": np.ones((20, 70), np.float32), "target": np.zeros((20, 33), np.float32)}
    graphopt.Executor(step, native=True, verify=True, matmul_precision=allowed).step(feeds)
    with pytest.warns(UserWarning, match="found neither"):
        plain = graphopt.Executor(step, native=False, verify=True, matmul_precision=allowed)
    plain.step(feeds)
    assert units == {True: precision.UNITS[allowed], False: 2.0**-23}


@needs_compiler
def test_a_gradient_that_is_0_but_for_rounding_is_no_difference(allowed) -> None:
    """Of the keys' bias, which no softmax sees: AdamW divides it by its own size, and so moves the bias by rounding."""
    random = np.random.default_rng(0)
    text = """g (float[N,32,128] x) => (float[N,32,128] y) {
        q = MatMul(x, query)
        p = MatMul(x, key)
        k = Add(p, bias)
        v = MatMul(x, value)
        t = Transpose <perm = [0, 2, 1]> (k)
        s = MatMul(q, t)
        a = Softmax(s)
        m = MatMul(a, v)
        y = Add(x, m)
    }"""
    weights = {name: random.standard_normal((128, 128)) / 40 for name in ("query", "key", "value")}
    step = graphopt.compile(
        model(text, **weights, bias=np.zeros(128)),
        loss=passes.MeanSquaredError(),
        optimizer=passes.AdamW(1e-3),
    )
    executor = graphopt.Executor(step, native=True, verify=True, matmul_precision=allowed)
    x, target = random.standard_normal((2, 8, 32, 128), np.float32)
    executor.step(x=x, target=target)


@needs_compiler
def test_without_instructions_the_highest_precision_runs_and_says_so(monkeypatch) -> None:
    monkeypatch.setattr(precision, "macros", lambda: frozenset({"__AVX2__"}))
    step = graphopt.compile(
        network(np.random.default_rng(5)),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    feeds = {"x": np.ones((20, 70), np.float32), "target": np.zeros((20, 33), np.float32)}
    expected = graphopt.Executor(step, native=True)
    expected.step(feeds)
    with pytest.warns(UserWarning, match="matmul_precision: expected a processor with AMX, found one without"):
        executor = graphopt.Executor(step, native=True, matmul_precision="high")
    executor.step(feeds)
    for name, value in expected.state.items():
        np.testing.assert_array_equal(value, executor.state[name], name)
    assert precision.precision_in_words("high").startswith("as 'highest', not 'high': ")
    assert precision.precision_in_words("highest") == "as 'highest': each number of an operand is float32"


def test_the_operating_system_may_refuse_the_registers(monkeypatch) -> None:
    monkeypatch.setattr(precision, "macros", lambda: frozenset({"__AMX_BF16__", *precision._OF_VECTORS}))
    monkeypatch.setattr(precision, "_may_use_tiles", lambda: False)
    assert precision.obstacle("high") == "the operating system does not let processes use AMX"
    assert precision.pieces_for("high") == 0


@pytest.mark.parametrize("amd", [True, False])
def test_vectors_alone_are_for_medium_and_amd(monkeypatch, amd) -> None:
    monkeypatch.setattr(precision, "macros", lambda: frozenset(precision._OF_VECTORS))
    monkeypatch.setattr(precision, "_cpuinfo", lambda: "vendor_id : AuthenticAMD" if amd else "")
    assert precision.pieces_for("medium") == (1 if amd else 0)
    assert precision.pieces_for("high") == 0


def test_the_environment_sets_the_default(allowed, monkeypatch) -> None:
    monkeypatch.setenv(precision.VARIABLE, allowed)
    found = [graphopt.Device("cpu", **options) for options in ({}, {"matmul_precision": "highest"})]
    assert [device.product_precision for device in found] == [allowed, "highest"]
    rng = np.random.default_rng(5)
    a, w = (rng.standard_normal((64, 64)).astype(np.float32) for _ in range(2))
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["": 17]>
        g (float[64, 64] a, float[64, 64] w) => (float[64, 64] y) { y = MatMul(a, w) }"""
    )
    one, other, highest = (
        lowered_session(proto, 1, chosen).compute_arrays({"a": a, "w": w})["y"] for chosen in (None, allowed, "highest")
    )
    np.testing.assert_array_equal(one, other)
    assert not np.array_equal(one, highest)


def test_unknown_precision_of_the_environment(monkeypatch) -> None:
    monkeypatch.setenv(precision.VARIABLE, "low")
    with pytest.raises(
        graphopt.GraphoptError,
        match="environment variable GRAPHOPT_MATMUL_PRECISION: expected highest, high, medium, found 'low'",
    ):
        graphopt.Device("cpu")


def test_unknown_precision() -> None:
    with pytest.raises(graphopt.GraphoptError, match=r"matmul_precision=.low.*: expected .*found .low"):
        graphopt.Device("cpu", matmul_precision="low")


def test_on_cuda_it_sets_tf32(monkeypatch) -> None:
    monkeypatch.setattr(onnxruntime, "get_available_providers", lambda: ["CUDAExecutionProvider"])
    device = graphopt.Device("cuda", matmul_precision="high")
    ((_, options), _) = device.machine.providers(captures=False)
    assert options["use_tf32"] == "1"
    assert device.product_unit == 2.0**-10


def lowered_session(proto, threads, chosen):
    """Return a session of a graph whose nodes kernels compute in a precision."""
    found = lower_to_kernels(load(onnx.shape_inference.infer_shapes(proto)), threads=threads, precision=chosen)
    return Session(Device("cpu", threads=threads, native=False), found.model, library=found.library)


@needs_compiler
@pytest.mark.parametrize(("k", "n"), [(300, 77), (256, 64), (40, 33), (7, 3)])
def test_weights_that_stay_are_packed_once_for_any_number_of_rows(allowed, k, n) -> None:
    rng = np.random.default_rng(k)
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[M, {k}] a) => (float[M, {n}] y) {{ y = Gemm<transB = 1>(a, w) }}"""
    )
    w = rng.standard_normal((n, k)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    sessions = [lowered_session(proto, threads, allowed) for threads in (1, 2)]
    for rows in 1, 5, 600, 64, 1:
        a = rng.standard_normal((rows, k)).astype(np.float32)
        one, two = (session.compute_arrays({"a": a})["y"] for session in sessions)
        exact = a.astype(np.float64) @ w.T
        assert np.abs(one - exact).max() < 3 * BOUNDS[allowed] * np.sqrt(k)
        np.testing.assert_array_equal(one, two)


@needs_compiler
@pytest.mark.parametrize("layer", ["RNN", "GRU", "LSTM"])
@pytest.mark.slow
def test_recurrent_layers_and_attention_on_any_threads(allowed, layer, monkeypatch) -> None:
    """Beside the plain step of ONNX Runtime, in float32."""
    rng = np.random.default_rng(6)
    gates, hidden, features = {"RNN": 1, "GRU": 3, "LSTM": 4}[layer], 64, 48
    proto = onnx.parser.parse_model(
        f"""<ir_version: 8, opset_import: ["": 17]>
        g (float[5, N, {features}] x) => (float[N, {hidden}] y)
        <int64[1] first = {{0}}, float scale = {{0.125}}> {{
            z, h = {layer}<hidden_size = {hidden}>(x, w, r)
            s = Squeeze(z, one)
            t = Transpose<perm = [1, 0, 2]>(s)
            u = Transpose<perm = [0, 2, 1]>(t)
            p = MatMul(t, u)
            q = Mul(p, scale)
            a = Softmax(q)
            m = MatMul(a, t)
            y = ReduceMean<axes = [1], keepdims = 0>(m)
        }}"""
    )
    shapes = {"w": (1, gates * hidden, features), "r": (1, gates * hidden, hidden)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) / 8 for name, shape in shapes.items()}
    arrays["one"] = np.array([1])
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(x, name) for name, x in arrays.items())
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(1e3))
    feeds = {
        "x": rng.standard_normal((5, 70, features)).astype(np.float32),
        "target": rng.standard_normal((70, hidden)).astype(np.float32),
    }
    plain = graphopt.Executor(step, native=False)
    executors = [graphopt.Executor(step, native=True, threads=threads, matmul_precision=allowed) for threads in (1, 2)]
    before = plain.state
    for executor in (plain, *executors):
        executor.step(feeds)
    for name, value in plain.state.items():
        one, two = (executor.state[name] for executor in executors)
        np.testing.assert_array_equal(one, two, name)
        moved = value - before[name]
        if moved.dtype.kind == "f":
            assert np.abs(one - value).max() <= 20 * BOUNDS[allowed] * moved.std(), name

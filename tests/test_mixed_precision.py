"""Mixed precision: what is computed in 16 bits, what stays, and how the loss is scaled.

ONNX Runtime's CPU provider computes much of what is in 16 bits in float32, and drops casts; ONNX's reference evaluator
rounds everything, so both run.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import attention, mlp, model, run
from gradient_cases import CASES
from test_gradient import model_of, run_in_onnxruntime, seeded

import graphopt
import passes
from graphopt import models
from graphopt.graph.roles import Role, with_role
from graphopt.testing import gradients as testing
from graphopt.testing.gradients import distance, gradient_model
from passes.mixed_precision import NARROW

RNG = np.random.default_rng(0)
X = RNG.standard_normal((16, 4)).astype(np.float32)
T = np.tanh(X[:, :3])
IMAGES = RNG.standard_normal((8, 1, 8, 8)).astype(np.float32)
TOKENS = RNG.integers(0, 20, (8, 6))
SCALED = {"gradient": passes.Gradient(loss_scale=2.0**12), "precision": passes.MixedPrecision()}
NETWORKS: dict[str, tuple[Any, Any, np.ndarray, np.ndarray]] = {
    "mlp": (mlp(activation="Relu"), passes.MeanSquaredError(), X, T),
    "cnn": (models.cnn((1, 8, 8), 10), passes.CrossEntropy(), IMAGES, RNG.integers(0, 10, 8)),
    "transformer": (
        models.transformer((6,), 20),
        passes.CrossEntropy(axis=-1),
        TOKENS,
        TOKENS[:, ::-1].copy(),
    ),
    "attention": (
        attention(),
        passes.MeanSquaredError(),
        *RNG.standard_normal((2, 4, 6, 4)).astype(np.float32),
    ),
    "recurrent": (
        model(
            """g (float[N,5,4] x) => (float[N,3] y) {
                t = Transpose<perm=[1,0,2]>(x)
                all, last = GRU<hidden_size=6>(t, w, r)
                s = Squeeze(last, axis)
                y = MatMul(s, head)
            }""",
            w=RNG.standard_normal((1, 18, 4)) / 2,
            r=RNG.standard_normal((1, 18, 6)) / 2,
            head=RNG.standard_normal((6, 3)),
            axis=np.array([0]),
        ),
        passes.MeanSquaredError(),
        *(RNG.standard_normal(shape).astype(np.float32) for shape in ((8, 5, 4), (8, 3))),
    ),
}
each_network = pytest.mark.parametrize("network", NETWORKS)


def compiled(network: str = "mlp", **steps: Any) -> ir.Model:
    proto, loss, _, _ = NETWORKS[network]
    return graphopt.compile(proto, loss=loss, **{"optimizer": passes.SGD(0.01, momentum=0.9), **steps})


def batch(step: ir.Model, network: str = "mlp") -> dict[str, np.ndarray]:
    return dict(zip(graphopt.Executor(step).inputs, NETWORKS[network][2:], strict=True))


def operators(step: ir.Model, dtype: ir.DataType) -> set[str]:
    return {node.op_type for node in step.graph if node.outputs[0].dtype == dtype}


STEPS = 6
OF_CNN = 4  # later, ties of maxima in 16 bits, of which the first has the gradient, have moved its losses apart


@each_network
@pytest.mark.slow
def test_training_is_as_in_float32_but_for_rounding(network: str) -> None:
    expected, found = compiled(network), compiled(network, **SCALED)
    feeds, steps = batch(expected, network), OF_CNN if network == "cnn" else STEPS
    in_single = run(expected, steps, feeds)
    rounded = [outputs["loss"] for outputs in run(found, steps, feeds)]
    executor = graphopt.Executor(found)
    on_runtime = [executor.step(feeds)["loss"] for _ in range(steps)]
    for losses in (rounded, on_runtime):
        np.testing.assert_allclose(losses, [outputs["loss"] for outputs in in_single], rtol=2e-2)
    assert rounded[-1] < rounded[0]
    assert rounded != [outputs["loss"] for outputs in in_single]


@each_network
def test_products_are_narrow_and_state_and_results_are_not(network: str) -> None:
    step = compiled(network, **SCALED, clip=passes.ClipGlobalNorm(1.0))
    narrow = operators(step, ir.DataType.FLOAT16)
    assert narrow & {"MatMul", "Gemm", "Conv"}
    assert not narrow & {"Softmax", "LogSoftmax", "ReduceMean", "LayerNormalization", "Exp", "Log", "GRU"}
    if network != "recurrent":
        assert not operators(step, ir.DataType.FLOAT) & {"Gemm", "Conv"}
    for x in [*step.graph.inputs, *step.graph.outputs]:
        assert x.dtype != ir.DataType.FLOAT16, x.name


def test_what_reads_a_wide_value_stays_wide() -> None:
    proto = model(
        "g (float[N,4] x) => (float[N,3] y) { s = Softmax(x) r = Tanh(s) p = MatMul(r, w) y = Relu(p) }",
        w=RNG.standard_normal((4, 3)),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), precision=passes.MixedPrecision())
    kinds = {node.op_type: node.outputs[0].dtype for node in reversed(step.graph)}
    assert kinds["Tanh"] == ir.DataType.FLOAT
    assert kinds["MatMul"] == kinds["Relu"] == ir.DataType.FLOAT16


@each_network
@pytest.mark.slow
def test_inference_is_the_models_own(network: str) -> None:
    own, step = compiled(network), compiled(network, **SCALED, training=passes.TrainingMode())
    expected, executor = graphopt.Executor(own), graphopt.Executor(step)
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    assert [node.op_type for node in trained.graph.node] == [n.op_type for n in expected.trained().graph.node]
    assert onnx.TensorProto.FLOAT16 not in {tensor.data_type for tensor in trained.graph.initializer}
    feeds = batch(step, network)
    assert executor.evaluate(feeds)["loss"] == pytest.approx(expected.evaluate(feeds)["loss"], rel=1e-6)
    found = executor.predict(feeds)
    for name, value in expected.predict(feeds).items():
        np.testing.assert_allclose(found[name], value, rtol=1e-5, atol=1e-6)


def test_a_gelu_of_an_opset_without_it_is_written_out_again() -> None:
    """Without the casts of training, values have other types, which the operators of a Gelu need."""
    text = """g (float[N,4] x) => (float[N,3] y) {
        h = MatMul(x, w)\n d = Div(h, root)\n e = Erf(d)\n f = Add(e, one)\n k = Mul(h, f)\n a = Mul(k, half)
        y = MatMul(a, v)
    }"""
    weights = {"w": RNG.standard_normal((4, 5)), "v": RNG.standard_normal((5, 3))}
    numbers = {"root": np.array(2**0.5), "one": np.array(1.0), "half": np.array(0.5)}
    proto = model(text, opset=17, **weights, **numbers)
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1), **SCALED}
    executor = graphopt.Executor(graphopt.compile(proto, **steps))
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    assert [(x.domain, x.version) for x in trained.opset_import] == [("", 17)]
    np.testing.assert_allclose(graphopt.run(trained, {"x": X})["y"], graphopt.run(proto, {"x": X})["y"], rtol=1e-5)


def test_hosts_predict_without_the_casts_of_training(tmp_path: Path) -> None:
    """The forms of a target, here of a Gelu's Erf, need the types of values that training casts."""
    proto = model(
        "g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w)\n a = Gelu(h)\n y = MatMul(a, v) }",
        w=RNG.standard_normal((4, 5)),
        v=RNG.standard_normal((5, 3)),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), **SCALED)
    graphopt.export_hosts(step, tmp_path, target="webgpu")
    predict = onnx.load(tmp_path / "predict.onnx")
    assert onnx.TensorProto.FLOAT16 not in {x.type.tensor_type.elem_type for x in predict.graph.value_info}


def test_frozen_weights_stay_float32_in_the_trained_model() -> None:
    step = compiled(**SCALED, parameters=passes.Parameters(freeze="fc0.*"))
    trained = graphopt.Executor(step).trained()
    onnx.checker.check_model(trained, full_check=True)
    own = {tensor.name: tensor for tensor in NETWORKS["mlp"][0].graph.initializer}
    for tensor in trained.graph.initializer:
        np.testing.assert_array_equal(onnx.numpy_helper.to_array(tensor), onnx.numpy_helper.to_array(own[tensor.name]))


@pytest.mark.slow
def test_batch_normalization_keeps_its_statistics() -> None:
    text = """g (float[N,1,8,8] x) => (float[N,3] y) {
        c = Conv<pads=[1,1,1,1]>(x, kernel)
        b = BatchNormalization(c, scale, shift, mean, var)
        r = Relu(b)
        d = Conv<strides=[2,2]>(r, second)
        p = GlobalAveragePool(d)
        y = Flatten(p)
    }"""
    weights = {
        "kernel": RNG.standard_normal((2, 1, 3, 3)),
        "scale": np.ones(2),
        "shift": np.zeros(2),
        "mean": np.zeros(2),
        "var": np.ones(2),
        "second": RNG.standard_normal((3, 2, 3, 3)),
    }
    executors = []
    for steps in ({}, SCALED):
        step = graphopt.compile(
            model(text, **weights),
            loss=passes.CrossEntropy(),
            optimizer=passes.SGD(0.05),
            training=passes.TrainingMode(),
            **steps,
        )
        executors.append(graphopt.Executor(step))
        for _ in range(5):
            executors[-1].step(x=IMAGES, target=np.arange(8) % 3)
    for name, value in executors[0].state.items():
        np.testing.assert_allclose(executors[1].state[name], value, rtol=2e-2, atol=2e-3, err_msg=name)
    kinds = [[node.op_type for node in executor.trained().graph.node] for executor in executors]
    assert kinds[0] == kinds[1]


def test_small_gradients_vanish_unless_the_loss_is_scaled() -> None:
    def gradient(scale: float | None, target: np.ndarray) -> dict[str, np.ndarray]:
        step = compiled(precision=passes.MixedPrecision(), gradient=passes.Gradient(loss_scale=scale), optimizer=None)
        outputs: dict[str, np.ndarray] = run(step, 1, {"x": X, "target": target})[0]
        return outputs

    y = gradient(None, T)["y"]
    target = y + np.float32(3e-7)
    expected = np.sum(2 * (y - target) / y.size, axis=0)
    np.testing.assert_array_equal(gradient(None, target)["fc1.bias.grad"], 0)
    np.testing.assert_allclose(gradient(2.0**12, target)["fc1.bias.grad"], expected, rtol=1e-2)


@pytest.mark.parametrize("scale", [1.0, 2.0**10, 3e4])
def test_a_scaled_loss_has_the_same_gradients(scale: float) -> None:
    plain = run(compiled(optimizer=None), 1, {"x": X, "target": T})[0]
    step = compiled(optimizer=None, gradient=passes.Gradient(loss_scale=scale))
    scaled = run(step, 1, {"x": X, "target": T})[0]
    assert scaled["loss"] == plain["loss"]
    for name in [name for name in plain if name.endswith(".grad")]:
        np.testing.assert_allclose(scaled[name], plain[name], rtol=1e-5, atol=1e-8)


def dynamic(scale: float, interval: int = 2, **steps: Any) -> ir.Model:
    return compiled(
        gradient=passes.Gradient(loss_scale=scale),
        loss_scale=passes.DynamicLossScale(interval=interval),
        optimizer=passes.AdamW(0.01),
        **steps,
    )


def test_the_scale_grows_while_gradients_are_finite() -> None:
    executor = graphopt.Executor(dynamic(8.0, interval=3))
    scales = []
    for _ in range(7):
        executor.step(x=X, target=T)
        scales.append(float(executor.state["loss_scale"]))
    assert scales == [8, 8, 16, 16, 16, 32, 32]
    assert executor.state["step"] == 7


def test_a_step_whose_gradients_are_not_finite_changes_the_scale_alone() -> None:
    executor = graphopt.Executor(dynamic(2.0**127, schedule=passes.Cosine(steps=9)))
    before = executor.state
    loss = executor.step(x=100 * X, target=T)["loss"]
    after = executor.state
    assert np.isfinite(loss)
    assert after["loss_scale"] == before["loss_scale"] / 2
    for name in before.keys() - {"loss_scale"}:
        np.testing.assert_array_equal(after[name], before[name], err_msg=name)
    assert (executor.steps, executor.batches) == (0, 1)
    for _ in range(40):
        executor.step(x=100 * X, target=T)
    assert 0 < executor.state["step"] < 41


@pytest.mark.parametrize(
    "options",
    [
        {"target": "plain"},
        {"target": "onnxruntime"},
        pytest.param({"native": True}, marks=pytest.mark.slow),
    ],
    ids=str,
)
@pytest.mark.parametrize("exponent", [16, 20, 40, 80, 100, 126, 127])
def test_an_overflow_changes_the_scale_alone(exponent: int, options: dict[str, Any]) -> None:
    """A step either updates as float32 does, or leaves the state unchanged and halves the scale."""
    steps = {"optimizer": passes.SGD(0.1)}
    step = compiled(
        **steps,
        gradient=passes.Gradient(loss_scale=2.0**exponent),
        precision=passes.MixedPrecision("float16"),
        loss_scale=passes.DynamicLossScale(),
    )
    exact, executor = graphopt.Executor(compiled(**steps)), graphopt.Executor(step, threads=1, **options)
    before = executor.parameters
    exact.step(x=X, target=T)
    executor.step(x=X, target=T)
    is_skipped = float(executor.state["loss_scale"]) == 2.0 ** (exponent - 1)
    assert is_skipped or executor.state["loss_scale"] == 2.0**exponent
    for name, x in executor.parameters.items():
        np.testing.assert_allclose(
            x, before[name] if is_skipped else exact.parameters[name], atol=1e-3 * (not is_skipped)
        )


def test_the_scale_and_the_weights_are_those_of_torchs_grad_scaler() -> None:
    """Gradients of about 1e10 overflow in float32 at scales of about 2**95."""
    x, target = 1e5 * X, 1e5 * T
    step = graphopt.compile(
        mlp((4, 3)),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(1e-12),
        gradient=passes.Gradient(loss_scale=2.0**96),
        loss_scale=passes.DynamicLossScale(interval=3),
    )
    executor = graphopt.Executor(step, target="plain")
    w = {name: torch.tensor(value.copy(), requires_grad=True) for name, value in executor.parameters.items()}
    optimizer = torch.optim.SGD(w.values(), 1e-12)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**96, growth_interval=3)
    scales = []
    for _ in range(20):
        executor.step(x=x, target=target)
        y = torch.tensor(x) @ w["fc0.weight"].T + w["fc0.bias"]
        optimizer.zero_grad()
        scaler.scale(torch.nn.functional.mse_loss(y, torch.tensor(target))).backward()
        scaler.step(optimizer)
        scaler.update()
        scales.append(scaler.get_scale())
        assert executor.state["loss_scale"] == scales[-1]
        for name, value in executor.parameters.items():
            np.testing.assert_allclose(value, w[name].detach(), rtol=1e-5)
    assert min(scales) < 2.0**96 and max(scales) > min(scales)


def test_accumulated_gradients_that_are_not_finite_are_thrown_away() -> None:
    executor = graphopt.Executor(dynamic(2.0**127, accumulate=passes.Accumulate(2)))
    before = executor.parameters
    for _ in range(2):
        executor.step(x=100 * X, target=T)
    state = executor.state
    assert state["loss_scale"] == 2.0**126
    assert state["step"] == 0
    assert state["accumulated"] == 0
    assert not any(np.any(value) for name, value in state.items() if name.endswith(".accumulated"))
    for name, value in executor.parameters.items():
        np.testing.assert_array_equal(value, before[name])


NARROW_CASES = [case for case in CASES if case.op_type in NARROW and case.double]


@pytest.mark.parametrize("op_type", sorted({case.op_type for case in NARROW_CASES}))
@pytest.mark.sample(12)
def test_gradients_of_what_is_computed_in_16_bits_are_as_in_64_but_for_rounding(op_type: str) -> None:
    for case in (case for case in NARROW_CASES if case.op_type == op_type):
        feeds = seeded(case, np.float16)
        double = {name: x.astype(np.float64) if x.dtype == np.float16 else x for name, x in feeds.items()}
        expected = testing.evaluate_reference(gradient_model(model_of(case, np.float64)), double)
        narrow = gradient_model(model_of(case, np.float16))
        runs = [testing.evaluate_reference(narrow, feeds)]
        if op_type != "Dropout" and not case.newer:  # the former drops others, the latter is refused by some versions
            runs.append(run_in_onnxruntime(narrow, feeds))
        for found in runs:
            for name, gradient in found.items():
                assert distance(gradient, expected[name]) < 1e-2, f"{case}: {name}"


@pytest.mark.parametrize(
    "activation",
    [
        "Relu(c)",
        "LeakyRelu(c)",
        "Clip(c, low, high)",
        "Max(c, low)",
        "Max(c, low, high)",
        "Min(c, high)",
        "MaxPool<kernel_shape=[2,2], strides=[2,2]>(c)",
    ],
)
def test_a_model_in_float16_has_the_gradients_of_one_in_float32(activation: str) -> None:
    """Also where the runtime computes in float32 and rounds what some operators read, and others not."""
    found = []
    for name, dtype in (("float", np.float32), ("float16", np.float16)):
        random = np.random.default_rng(0)
        network = model(
            f"""g ({name}[N,1,8,8] x) => ({name}[N,3] y) {{
                c = Conv<pads=[1,1,1,1]>(x, first)  a = {activation}  d = Conv<strides=[2,2]>(a, second)
                p = GlobalAveragePool(d)  y = Flatten(p)
            }}""",
            dtype=dtype,
            first=random.standard_normal((4, 1, 3, 3)),
            second=random.standard_normal((3, 4, 3, 3)) / 3,
            low=np.array(0.0),
            high=np.array(1.0),
        )
        step = graphopt.compile(network, loss=passes.CrossEntropy())
        weights = {str(x.name): x.const_value.numpy() for x in with_role(step, Role.PARAMETER)}
        feeds = {"x": IMAGES.astype(dtype), "target": np.arange(8) % 3, **weights}
        found.append(run_in_onnxruntime(step, feeds)["first.grad"])
    assert distance(found[1], found[0]) < 1e-2


def test_a_node_can_be_kept_and_numbers_beyond_the_range_are() -> None:
    text = """g (float[N,4] x) => (float[N,3] y) {
        [first] a = MatMul(x, u)
        b = Mul(a, large)
        [second] y = MatMul(b, w)
    }"""
    proto = model(text, u=RNG.standard_normal((4, 4)), w=RNG.standard_normal((4, 3)), large=np.array(1e6))
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), precision=passes.MixedPrecision(keep="sec*"))
    dtypes = {node.op_type: node.outputs[0].dtype for node in list(step.graph)[:5]}
    assert dtypes["Mul"] == ir.DataType.FLOAT
    assert operators(step, ir.DataType.FLOAT) >= {"MatMul", "Mul"}
    assert "MatMul" in operators(step, ir.DataType.FLOAT16)


def test_bfloat16_has_products_alone_that_the_opset_defines() -> None:
    step = compiled(precision=passes.MixedPrecision("bfloat16"))
    assert operators(step, ir.DataType.BFLOAT16) >= {"Gemm", "Relu"}
    with pytest.raises(
        graphopt.GraphoptError,
        match="Conv, ConvTranspose, Gemm, MatMul nodes of float32 that support bfloat16",
    ):
        graphopt.compile(
            model("g (float[N,1,8,8] x) => (float[N,2,6,6] y) { y = Conv(x, w) }", w=np.ones((2, 1, 3, 3))),
            loss=passes.MeanSquaredError(),
            precision=passes.MixedPrecision("bfloat16"),
        )


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("mixed_precision_mistakes"))
def test_refusals(call: str) -> None:
    messages.refused("mixed_precision_mistakes", call, globals())

"""On a GPU: what needs one is skipped without, and says so.

With a GPU: pip install -e ".[gpu,test]" and pytest tests/test_gpu.py -n 0 -m "exhaustive or not exhaustive".
Without one, GRAPHOPT_POSED_GPU=1 runs the tests on the CPU, which poses as a GPU: see posed_gpu.py.
"""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import posed_gpu
import pytest
from builders import mlp, model
from steps import assert_close, assert_equal

import graphopt
import passes
from graphopt import GraphoptError, cli, models
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.device import Device
from graphopt.runtime.tensors import to_ort
from graphopt.training.fit import fit

POSED = bool(os.environ.get("GRAPHOPT_POSED_GPU"))
if POSED:
    posed_gpu.pose()

RNG = np.random.default_rng(0)
IMAGES = RNG.standard_normal((32, 1, 8, 8)).astype(np.float32)
TOKENS = np.random.default_rng(1).integers(0, 50, (32, 16))  # no Relu of the tests is at 0 but for rounding
LABELS = RNG.integers(0, 10, 32)


def strided() -> Any:
    """Return a network whose second convolution has strides, whose gradient needs pads that are not even."""
    shapes = {"first": (4, 1, 3, 3), "second": (8, 4, 3, 3), "head": (128, 10)}
    return model(
        """g (float[N,1,8,8] x) => (float[N,10] y) {
            a = Conv<pads=[1,1,1,1]>(x, first)
            b = Relu(a)
            c = Conv<pads=[1,1,1,1], strides=[2,2]>(b, second)
            d = BatchNormalization<momentum=0.9>(c, scale, shift, mean, variance)
            e = Relu(d)
            f = Flatten(e)
            y = MatMul(f, head)
        }""",
        **{name: RNG.standard_normal(shape) / np.sqrt(np.prod(shape[1:])) for name, shape in shapes.items()},
        **{"scale": np.ones(8), "shift": np.zeros(8), "mean": np.zeros(8), "variance": np.ones(8)},
    )


NETWORKS: dict[str, tuple[Any, Any, np.ndarray, np.ndarray]] = {
    "mlp": (models.mlp((64,), 10, hidden=(32,)), passes.CrossEntropy(), IMAGES.reshape(32, 64), LABELS),
    "cnn": (models.cnn((1, 8, 8), 10), passes.CrossEntropy(), IMAGES, LABELS),
    "strided": (strided(), passes.CrossEntropy(), IMAGES, LABELS),
    "transformer": (
        models.transformer((16,), 50),
        passes.CrossEntropy(axis=-1),
        TOKENS,
        TOKENS[:, ::-1].copy(),
    ),
}

OPTIMIZERS = {
    "descent": passes.SGD(0.02),
    "momentum": passes.SGD(0.02, momentum=0.9, weight_decay=0.01),
    "adamw": passes.AdamW(1e-3, epsilon=1e-4, weight_decay=0.01),
    "lion": passes.Lion(1e-4),
    "rmsprop": passes.RMSprop(1e-3, epsilon=1e-4),
}


def no_gpu() -> str:
    """Return why there is no GPU to test on, or nothing."""
    if POSED:
        return ""
    if "CUDAExecutionProvider" not in onnxruntime.get_available_providers():
        return "this onnxruntime has no CUDA provider: pip install onnxruntime-gpu[cuda,cudnn]"
    try:
        if hasattr(onnxruntime, "preload_dlls"):
            onnxruntime.preload_dlls()
        onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1), "cuda", 0)
    except RuntimeError as error:
        return f"no GPU: {str(error).splitlines()[0]}"
    return ""


WHY = no_gpu()
on_gpu = pytest.mark.skipif(bool(WHY), reason=WHY)
on_a_real_gpu = pytest.mark.skipif(bool(WHY) or POSED, reason=WHY or "the CPU only poses as a GPU")
each_network = pytest.mark.parametrize("network", NETWORKS)
each_optimizer = pytest.mark.parametrize("optimizer", OPTIMIZERS)
plain_and_captured = pytest.mark.parametrize("graph_capture", [False, True])
FLOAT32 = {"use_tf32": 0}  # products of float32 in float32


@functools.cache
def compiled(network: str, **steps: Any) -> Any:
    proto, loss, _, _ = NETWORKS[network]
    return graphopt.compile(proto, loss=loss, **{"optimizer": passes.AdamW(1e-3, epsilon=1e-4), **steps})


def executor(step: Any, device: str = "cuda", **options: Any) -> graphopt.Executor:
    """Return an executor, on the GPU with the CPU's precision."""
    own = {} if device == "cpu" else {"provider_options": FLOAT32}
    return graphopt.Executor(step, device=device, **{**own, **options})


def batch(executor: graphopt.Executor, network: str, rows: int = 32) -> dict[str, np.ndarray]:
    _, _, x, target = NETWORKS[network]
    return dict(zip(executor.inputs, (x[:rows], target[:rows]), strict=True))


def same(first: graphopt.Executor, second: graphopt.Executor) -> None:
    """Check that states are equal, as far as kernels in another order of sums allow.

    Arrays are compared as a whole: one Relu of a number that is 0 but for rounding changes some elements by 1 %.
    """
    for name, value in first.state.items():
        apart = np.linalg.norm(np.asarray(second.state[name], np.float64) - value)
        assert apart <= 2e-3 * np.linalg.norm(value) + 2e-4 * np.sqrt(value.size), (name, apart)


MIXED = {
    "precision": passes.MixedPrecision(),
    "gradient": passes.Gradient(loss_scale=2.0**12),
    "loss_scale": passes.DynamicLossScale(interval=2),
}


@pytest.mark.slow
def test_the_report_says_what_the_cpu_runs(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.chdir(tmp_path)
    graphopt.save(mlp(), "my.onnx")
    arguments = ["report", "my.onnx", "folder=out"]
    assert cli.main([*arguments, "executor=cuda"]) == 0
    expected = "not known: " if WHY else r"[\d,]+ nodes? on the device, \d+ on the CPU"
    assert re.search(f"on cuda    {expected}", capsys.readouterr().out)
    assert "on cuda" in Path("out/report.txt").read_text()
    assert cli.main(arguments) == 0
    assert "on cuda" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.skipif(not WHY, reason="there is a GPU, or the CPU poses as one")
@pytest.mark.parametrize("cases", ["not slow", pytest.param("slow or exhaustive", marks=pytest.mark.exhaustive)])
def test_what_a_gpu_runs_runs_on_a_cpu_that_poses_as_one(cases: str) -> None:
    command = [sys.executable, "-m", "pytest", __file__, "-q", "-n", "0", "-m", cases]
    environment = {**os.environ, "GRAPHOPT_POSED_GPU": "1", "GRAPHOPT_SAMPLE": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, cwd=Path(__file__).parent)
    assert done.returncode == 0, done.stdout[-5000:]


# Numbers


@on_gpu
@each_network
def test_steps_equal_those_on_the_cpu(network: str) -> None:
    """The checks of the first step raise an error here if they doubt a form; `filterwarnings` in pyproject.toml."""
    step = compiled(network, clip=passes.ClipGlobalNorm(0.5), schedule=passes.Cosine(steps=20, warmup=3))
    on_cpu, on_cuda = (executor(step, device) for device in ("cpu", "cuda"))
    for rows in (32, 32, 7, 32):
        feeds = batch(on_cpu, network, rows)
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-3)
    same(on_cpu, on_cuda)
    assert on_cuda.evaluate(feeds)["loss"] == pytest.approx(on_cpu.evaluate(feeds)["loss"], rel=1e-3)
    assert_close(on_cuda.predict(feeds), on_cpu.predict(feeds), rtol=1e-2, atol=1e-3)


@on_gpu
@each_network
def test_tf32_is_near(network: str) -> None:
    """It is the provider's default, which the checks of the first step accept."""
    on_cpu, on_cuda = executor(compiled(network), "cpu"), graphopt.Executor(compiled(network), device="cuda")
    for _ in range(3):
        feeds = batch(on_cpu, network)
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-2)


@on_gpu
@each_network
@plain_and_captured
def test_float16_is_as_on_the_cpu_but_for_rounding(network: str, graph_capture: bool) -> None:
    """The loss scale grows in every other step, in the loss and in the division of the gradients alike."""
    on_cpu = executor(compiled(network), "cpu")
    on_cuda = executor(compiled(network, **MIXED), graph_capture=graph_capture)
    feeds = batch(on_cpu, network)
    for _ in range(6):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=2e-2)
    assert on_cuda.state["step"] == 6
    assert on_cuda.state["loss_scale"] == 2.0**15


@on_a_real_gpu
@each_network
@plain_and_captured
def test_bfloat16_is_as_on_the_cpu_but_for_rounding(network: str, graph_capture: bool) -> None:
    on_cpu = executor(compiled(network), "cpu")
    on_cuda = executor(compiled(network, precision=passes.MixedPrecision("bfloat16")), graph_capture=graph_capture)
    feeds = batch(on_cpu, network)
    for _ in range(5):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=5e-2)


@on_gpu
@each_network
def test_no_operator_falls_back_but_arithmetic_on_shapes(network: str) -> None:
    on_cuda = executor(compiled(network))
    if not hasattr(onnxruntime.InferenceSession, "get_provider_graph_assignment_info"):
        pytest.skip("onnxruntime 1.24 and later tell where operators run")
    placement = on_cuda.placement()
    scalars = {"Cast", "Concat", "Div", "Gather", "Mul", "Neg", "Reciprocal", "ReduceProd", "Squeeze", "Sub"}
    assert sum(placement["CUDAExecutionProvider"].values()) > 20
    assert set(placement.get("CPUExecutionProvider", ())) <= scalars
    static = executor(compiled(network), static_shapes=True)
    static.step(batch(static, network))
    assert set(static.placement()) == {"CUDAExecutionProvider"}


# State that lies on the GPU


@on_gpu
@plain_and_captured
def test_what_is_written_between_steps_is_read_by_the_next(graph_capture: bool) -> None:
    step = compiled("mlp")
    on_cpu, on_cuda = executor(step, "cpu"), executor(step, graph_capture=graph_capture)
    feeds = batch(on_cpu, "mlp")
    for i in range(5):
        rate = 1e-3 / (1 + i)
        assert on_cuda.step(feeds, learning_rate=rate)["loss"] == pytest.approx(
            on_cpu.step(feeds, learning_rate=rate)["loss"], rel=1e-3
        )
        halved = {name: x / 2 for name, x in on_cpu.parameters.items()}
        for each in (on_cpu, on_cuda):
            each.update_state(halved)
        assert on_cuda.evaluate(feeds)["loss"] == pytest.approx(on_cpu.evaluate(feeds)["loss"], rel=1e-3)
    same(on_cpu, on_cuda)


@on_gpu
def test_a_loss_scale_that_the_cpu_reads_is_the_current_one() -> None:
    """The provider computes numbers of shapes on the CPU, among them the loss scale divided by the rows."""
    sgd = passes.SGD(0.05)
    on_cpu, on_cuda = (
        executor(compiled("mlp", optimizer=sgd), "cpu"),
        executor(compiled("mlp", optimizer=sgd, **MIXED)),
    )
    feeds = batch(on_cpu, "mlp")
    for scale in (
        2.0**12,
        2.0**4,
        2.0**4,
        2.0**8,
        2.0**8,
    ):  # with an old one in the loss, gradients are 256 times as large
        on_cuda.update_state({"loss_scale": np.array(scale, np.float32)})
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=2e-2)


@on_gpu
@each_network
@pytest.mark.parametrize("report", [None, ["loss"], []])
def test_graph_captures_are_the_same_steps(network: str, report: list[str] | None) -> None:
    """Of both sets of buffers, of batches of two shapes, of changing data and hyperparameters."""
    step = compiled(network)
    plain = executor(step)
    captured = executor(step, graph_capture=True, report=report)
    for i, rows in enumerate((32, 32, 32, 7, 32, 7, 32)):
        feeds = {name: np.roll(x, i, axis=0) for name, x in batch(plain, network, rows).items()}
        rate = 1e-3 / (1 + i)
        expected = plain.step(feeds, learning_rate=rate)
        found = captured.step(feeds, learning_rate=rate)
        assert list(found) == [name for name in expected if report is None or name in report]
        assert_close(found, {name: expected[name] for name in found}, rtol=1e-3, atol=1e-4)
    same(plain, captured)
    assert captured.steps == 7


@on_gpu
@plain_and_captured
@each_optimizer
def test_many_arrays_are_updated_as_one(optimizer: str, graph_capture: bool) -> None:
    """A captured graph joins at most 32 values at once, and this network has 80 arrays, some of them matrices."""
    proto = models.mlp((64,), 10, hidden=(16,) * 39)
    step = graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=OPTIMIZERS[optimizer])
    on_cpu, on_cuda = executor(step, "cpu"), executor(step, graph_capture=graph_capture)
    feeds = batch(on_cpu, "mlp")
    for _ in range(3):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-3)
    same(on_cpu, on_cuda)


@on_gpu
@each_optimizer
@pytest.mark.parametrize("network", ["cnn", "strided"])
def test_each_optimizer_takes_the_steps_of_the_cpu(network: str, optimizer: str) -> None:
    step = compiled(network, optimizer=OPTIMIZERS[optimizer], clip=passes.ClipGlobalNorm(1.0))
    on_cpu, on_cuda = executor(step, "cpu"), executor(step)
    feeds = batch(on_cpu, network)
    for _ in range(4):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-3)
    same(on_cpu, on_cuda)


@on_gpu
def test_a_graph_capture_takes_steps_of_several_threads() -> None:
    plain, captured = executor(compiled("mlp")), executor(compiled("mlp"), graph_capture=True)
    feeds, found = batch(plain, "mlp"), []

    def step() -> None:
        found.append(captured.step(feeds)["loss"])

    for _ in range(3):
        step()
        thread = threading.Thread(target=step)
        thread.start()
        thread.join()
    expected = [plain.step(feeds)["loss"] for _ in range(6)]
    np.testing.assert_allclose(found, expected, rtol=1e-3)


@on_gpu
def test_a_graph_capture_of_control_flow_is_refused() -> None:
    captured = executor(compiled("mlp", accumulate=passes.Accumulate(2)), graph_capture=True)
    with pytest.raises(GraphoptError, match=r"control flow.*UnrollLoops"):
        captured.step(batch(captured, "mlp"))


@on_gpu
def test_a_graph_capture_takes_loops_that_are_written_out() -> None:
    recurrent = model(
        """g (float[N,16,4] x) => (float[N,10] y) {
            steps = Transpose<perm=[1,0,2]>(x)
            all, last = LSTM<hidden_size=8>(steps, w, r, b)
            one = Constant<value_ints=[0]>()
            h = Squeeze(last, one)
            y = MatMul(h, head)
        }""",
        **{
            name: RNG.standard_normal(shape) / 4
            for name, shape in {"w": (1, 32, 4), "r": (1, 32, 8), "b": (1, 64), "head": (8, 10)}.items()
        },
    )
    step = graphopt.compile(recurrent, loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3, epsilon=1e-4))
    written_out = passes.UnrollLoops()(step.clone()).model
    on_cpu, on_cuda = executor(step, "cpu"), executor(written_out, graph_capture=True)
    feeds = dict(zip(on_cpu.inputs, (IMAGES.reshape(32, 16, 4), LABELS), strict=True))
    for _ in range(4):
        assert on_cuda.step(feeds)["loss"] == pytest.approx(on_cpu.step(feeds)["loss"], rel=1e-4)
    same(on_cpu, on_cuda)


@on_gpu
def test_a_captured_output_needs_a_shape() -> None:
    nonzero = model(
        "g (float[N,4] x) => (float[N,3] y, int64[2,K] z) { y = MatMul(x, w) z = NonZero(y) }",
        w=np.ones((4, 3)),
    )
    step = graphopt.compile(nonzero, loss=passes.Losses({"y": passes.MeanSquaredError()}), optimizer=passes.SGD())
    captured = executor(step, graph_capture=True)
    target = str(with_role(step, Role.TARGET)[0].name)
    with pytest.raises(GraphoptError, match="output 'z': expected a shape that follows from the batch's"):
        captured.step({"x": np.ones((2, 4), np.float32), target: np.ones((2, 3), np.float32)})


@on_gpu
def test_accumulated_gradients_and_several_steps_per_call_are_as_on_the_cpu() -> None:
    step = compiled("mlp", accumulate=passes.Accumulate(2))
    on_cpu, on_cuda = executor(step, "cpu"), executor(step, steps_per_call=4)
    batches = [batch(on_cpu, "mlp")] * 8
    expected = [report["loss"] for report in on_cpu.run(batches)]
    np.testing.assert_allclose([report["loss"] for report in on_cuda.run(batches)], expected, rtol=1e-3)
    same(on_cpu, on_cuda)


# What is not finite


@on_gpu
@plain_and_captured
@pytest.mark.parametrize("on_nonfinite", ["raise", "skip"])
def test_a_step_that_is_not_finite_changes_nothing(graph_capture: bool, on_nonfinite: Any) -> None:
    on_cuda = executor(compiled("mlp"), graph_capture=graph_capture, on_nonfinite=on_nonfinite, report=["loss"])
    feeds = batch(on_cuda, "mlp")
    on_cuda.step(feeds)
    before = on_cuda.state
    bad = {name: np.where(x == x, np.nan, x) if x.dtype.kind == "f" else x for name, x in feeds.items()}
    bad = {name: x.astype(feeds[name].dtype) for name, x in bad.items()}
    if on_nonfinite == "raise":
        with pytest.raises(graphopt.NonFiniteLoss):
            on_cuda.step(bad)
    else:
        with pytest.warns(UserWarning, match="step skipped"):
            on_cuda.step(bad)
    assert_equal(on_cuda.state, before)
    assert np.isfinite(on_cuda.step(feeds)["loss"])


@on_gpu
@plain_and_captured
def test_a_state_that_overflows_is_seen_though_the_loss_is_finite(graph_capture: bool) -> None:
    step = compiled("mlp", optimizer=passes.SGD(0.05))
    on_cuda = executor(step, graph_capture=graph_capture, report=["loss"])
    feeds = {name: 100 * x if x.dtype.kind == "f" else x for name, x in batch(on_cuda, "mlp").items()}
    on_cuda.step(feeds, learning_rate=1e-6)
    with pytest.raises(graphopt.NonFiniteLoss, match="in state"):
        on_cuda.step(feeds, learning_rate=3e38)


@on_gpu
@plain_and_captured
def test_a_step_reads_once_from_the_gpu(graph_capture: bool, monkeypatch: Any) -> None:
    reads = []
    on_cuda = executor(compiled("mlp"), graph_capture=graph_capture, report=["loss"])
    feeds = on_cuda.on_device(batch(on_cuda, "mlp"))
    on_cuda.step(feeds)
    numpy = onnxruntime.OrtValue.numpy
    monkeypatch.setattr(
        onnxruntime.OrtValue,
        "numpy",
        lambda value: (reads.append(value.shape()) if value.device_name() != "cpu" else None, numpy(value))[1],
    )
    on_cuda.step(feeds)
    assert len(reads) <= 1


# Tensors in and out


@on_gpu
@each_network
def test_batches_that_lie_on_the_gpu_are_not_copied(network: str) -> None:
    on_cuda, expected = executor(compiled(network)), executor(compiled(network))
    feeds = batch(on_cuda, network)
    placed = on_cuda.on_device(feeds)
    assert {value.device_name() for value in placed.values()} == {"cuda"}
    for _ in range(3):
        assert on_cuda.step(placed)["loss"] == pytest.approx(expected.step(feeds)["loss"], rel=1e-5)


@on_gpu
@plain_and_captured
def test_values_that_stay_on_the_gpu_outlive_the_next_step(graph_capture: bool) -> None:
    on_cuda = executor(compiled("mlp"), graph_capture=graph_capture, as_numpy=False)
    expected = executor(compiled("mlp"))
    feeds = batch(on_cuda, "mlp")
    name = next(name for name in expected.reported if name not in ("loss", "learning_rate"))
    kept = [on_cuda.step(feeds)[name] for _ in range(3)]
    assert {value.device_name() for value in kept} == {"cuda"}
    for value in kept:
        np.testing.assert_allclose(value.numpy(), expected.step(feeds)[name], rtol=1e-3, atol=1e-4)


@on_gpu
def test_scalars_are_written_in_the_type_of_the_state() -> None:
    on_cuda = executor(compiled("mlp", **MIXED))
    on_cuda.update_state({"loss_scale": 8.0, "step": np.int32(7)})
    assert on_cuda.state["loss_scale"] == 8.0
    assert on_cuda.steps == 7


@on_a_real_gpu
def test_tensors_of_pytorch_are_read_where_they_are() -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    device = Device("cuda")
    for dtype in (torch.float32, torch.float16, torch.int64, torch.bfloat16):
        tensor = torch.arange(12, device="cuda").reshape(3, 4).to(dtype)
        value = to_ort(device, tensor, np.dtype(np.float32))
        assert value.data_ptr() == tensor.data_ptr() and value.device_name() == "cuda"
        back = torch.from_dlpack(value._get_c_value())
        assert back.data_ptr() == tensor.data_ptr() and torch.equal(back, tensor)
    with pytest.raises(GraphoptError, match="detach"):
        to_ort(device, torch.ones(3, device="cuda", requires_grad=True), np.dtype(np.float32))
    mask = torch.tensor([True, False], device="cuda")
    assert to_ort(device, mask, np.dtype(np.bool_)).numpy().tolist() == [True, False]


@on_a_real_gpu
@plain_and_captured
def test_a_step_waits_for_the_kernels_of_pytorch_that_make_its_batch(graph_capture: bool) -> None:
    torch = pytest.importorskip("torch")
    if not torch.cuda.is_available():
        pytest.skip("this PyTorch has no CUDA")
    on_cuda, expected = executor(compiled("mlp"), graph_capture=graph_capture), executor(compiled("mlp"))
    feeds = batch(on_cuda, "mlp")
    tensors = {name: torch.from_numpy(x).cuda() for name, x in feeds.items()}
    name = next(name for name, x in feeds.items() if x.dtype.kind == "f")
    on_cuda.step(tensors), expected.step(feeds)
    busy = torch.ones(8192, 8192, device="cuda") / 8192
    for stream in (torch.cuda.default_stream(), torch.cuda.Stream()):
        with torch.cuda.stream(stream):
            made = {**tensors, name: torch.full_like(tensors[name], 1e6)}
            torch.cuda.synchronize()
            for _ in range(40):
                busy = busy @ busy
            made[name].copy_(tensors[name])  # runs when the products have run
            found = on_cuda.step(made)["loss"]
        assert found == pytest.approx(expected.step(feeds)["loss"], rel=1e-3)


@on_gpu
def test_a_layer_gives_the_gradients_of_the_cpu() -> None:
    x = RNG.standard_normal((5, 64)).astype(np.float32)
    seed = RNG.standard_normal((5, 10)).astype(np.float32)
    layers = [
        graphopt.ForwardBackward(NETWORKS["mlp"][0], device=device, engine="graphs")
        for device in ("cpu", Device("cuda", provider_options=FLOAT32))
    ]
    on_cpu, on_cuda = [layer.forward(x) for layer in layers]
    assert_close(on_cuda, on_cpu, rtol=1e-3, atol=1e-4)
    gradients, found = on_cpu.backward(seed), on_cuda.backward(seed)
    assert_close(found, gradients, rtol=1e-3, atol=1e-4)


# Devices, memory, processes


@on_gpu
def test_a_gpu_that_is_not_there_is_named() -> None:
    with pytest.raises(GraphoptError, match="'cuda:63'"):
        executor(compiled("mlp"), "cuda:63")


@on_a_real_gpu
@plain_and_captured
def test_the_second_gpu_takes_the_same_steps(graph_capture: bool) -> None:
    try:
        onnxruntime.OrtValue.ortvalue_from_numpy(np.zeros(1), "cuda", 1)
    except RuntimeError:
        pytest.skip("there is one GPU")
    first, second = (executor(compiled("cnn"), device, graph_capture=graph_capture) for device in ("cuda:0", "cuda:1"))
    feeds = batch(first, "cnn")
    for _ in range(3):
        assert second.step(feeds)["loss"] == pytest.approx(first.step(feeds)["loss"], rel=1e-4)
    same(first, second)


@on_a_real_gpu
def test_too_little_memory_is_one_line_and_the_state_stays() -> None:
    limited = executor(compiled("cnn"), provider_options={**FLOAT32, "gpu_mem_limit": 2**16})
    before = limited.state
    with pytest.raises(GraphoptError, match="memory") as caught:
        limited.step(batch(limited, "cnn"))
    assert "\n" not in str(caught.value)
    assert_equal(limited.state, before)
    frugal = executor(compiled("cnn"), provider_options={**FLOAT32, "arena_extend_strategy": "kSameAsRequested"})
    assert np.isfinite(frugal.step(batch(frugal, "cnn"))["loss"])


@on_gpu
@pytest.mark.parametrize("options", [{}, {"graph_capture": True}], ids=str)
def test_fit_and_checkpoints(options: dict[str, Any], tmp_path: Path) -> None:
    on_cpu = executor(compiled("cnn"), "cpu", report=["loss"])
    on_cuda = executor(compiled("cnn"), report=["loss"], **options)
    data = batch(on_cpu, "cnn")
    records = [fit(each, data, epochs=3, batch_size=10, validation=0.25) for each in (on_cpu, on_cuda)]
    for expected, found in zip(*records, strict=True):
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-3)
        assert found["validation_loss"] == pytest.approx(expected["validation_loss"], rel=1e-3)
    on_cuda.save(tmp_path / "state.safetensors")
    loss = on_cuda.step(data)["loss"]
    on_cpu.load(tmp_path / "state.safetensors")
    assert on_cpu.step(data)["loss"] == pytest.approx(loss, rel=1e-3)
    on_cuda.load(tmp_path / "state.safetensors")
    assert on_cuda.step(data)["loss"] == pytest.approx(loss, rel=1e-5)


TRAINED_AND_FAILED = """
import numpy as np, graphopt, passes
from graphopt import models
step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
executor = graphopt.Executor(step, device="cuda", graph_capture=CAPTURED)
feeds = dict(zip(executor.inputs, (np.ones((2, 4), np.float32), np.zeros(2, np.int64))))
for _ in range(3):
    executor.step(feeds)
try:
    executor.step(feeds | {next(iter(feeds)): np.full((2, 4), np.nan, np.float32)})
except graphopt.NonFiniteLoss:
    print("refused")
"""


@on_a_real_gpu
@plain_and_captured
def test_a_process_that_trained_and_failed_ends_cleanly(graph_capture: bool) -> None:
    code = TRAINED_AND_FAILED.replace("CAPTURED", str(graph_capture))
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, "refused\n"), done.stderr[-2000:]

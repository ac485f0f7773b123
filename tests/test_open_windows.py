"""Windows whose pads or counts depend on open sizes train as in PyTorch, which gets explicit pads, at several sizes."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from builders import model
from torch import Tensor
from torch.nn import functional
from twins import descended

import graphopt
import passes

SIZES = [(2, 6, 7), (1, 5, 4), (3, 9, 8), (2, 3, 3)]  # batch, height, width
KERNEL, STRIDES = (3, 2), (2, 3)
WINDOW = "kernel_shape=[3,2], strides=[2,3]"


def same(x: Tensor, is_upper: bool) -> Tensor:
    """Pad the last two axes as SAME does: as many windows as strides begin in them."""
    pads: list[int] = []
    for size, kernel, stride in zip(x.shape[2:], KERNEL, STRIDES, strict=True):
        total = max((-(-size // stride) - 1) * stride + kernel - size, 0)
        less, more = total // 2, total - total // 2
        pads = [*((less, more) if is_upper else (more, less)), *pads]
    return functional.pad(x, pads)


def average(x: Tensor, is_upper: bool, counts_pads: bool) -> Tensor:
    sums = functional.avg_pool2d(same(x, is_upper), KERNEL, STRIDES)
    return sums if counts_pads else sums / functional.avg_pool2d(same(torch.ones_like(x), is_upper), KERNEL, STRIDES)


def power(x: Tensor, is_upper: bool) -> Tensor:
    return (functional.avg_pool2d(same(x, is_upper) ** 2, KERNEL, STRIDES) * 6).sqrt()


def transposed(x: Tensor, w: Tensor, is_upper: bool, more: int) -> Tensor:
    y = functional.conv_transpose2d(x, w, stride=STRIDES, output_padding=more)
    for axis, (kernel, stride) in enumerate(zip(KERNEL, STRIDES, strict=True), 2):
        total = max(kernel + more - stride, 0)
        begin = total // 2 if is_upper else total - total // 2
        y = y.narrow(axis, begin, y.shape[axis] - total)
    return y


CASES = {
    f"{op} {'upper' if is_upper else 'lower'}": (node.replace("MODE", mode), reference)
    for is_upper, mode in ((True, 'auto_pad="SAME_UPPER"'), (False, 'auto_pad="SAME_LOWER"'))
    for op, node, reference in [
        (
            "average without pads",
            f"AveragePool<{WINDOW}, MODE>(v)",
            lambda v, w, is_upper=is_upper: average(v, is_upper, False),
        ),
        (
            "average with pads",
            f"AveragePool<{WINDOW}, count_include_pad=1, MODE>(v)",
            lambda v, w, is_upper=is_upper: average(v, is_upper, True),
        ),
        ("norm", f"LpPool<{WINDOW}, MODE>(v)", lambda v, w, is_upper=is_upper: power(v, is_upper)),
        (
            "maximum",
            f"MaxPool<{WINDOW}, MODE>(v)",
            lambda v, w, is_upper=is_upper: functional.max_pool2d(same(v + 9, is_upper), KERNEL, STRIDES) - 9,
        ),
        (
            "convolution",
            "Conv<strides=[2,3], MODE>(v, w)",
            lambda v, w, is_upper=is_upper: functional.conv2d(same(v, is_upper), w, stride=STRIDES),
        ),
        *(
            (
                f"transposed convolution, {more} more",
                f"ConvTranspose<strides=[2,3], output_padding=[{more},{more}], MODE>(v, w)",
                lambda v, w, is_upper=is_upper, more=more: transposed(v, w, is_upper, more),
            )
            for more in (0, 1)
        ),
    ]
} | {
    f"average rounded up, pads {pads}, {'counted' if counts else 'not counted'}": (
        f"AveragePool<kernel_shape=[3,3], strides=[2,3], ceil_mode=1, pads=[{pads},{pads},{pads},{pads}], "
        f"count_include_pad={counts}>(v)",
        lambda v, w, pads=pads, counts=counts: functional.avg_pool2d(v, 3, STRIDES, pads, True, bool(counts)),
    )
    for pads in (0, 1)
    for counts in (0, 1)
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.sample(9)
def test_open_sizes_train_as_in_pytorch(case):
    node, reference = CASES[case]
    rng = np.random.default_rng(0)
    arrays = {"s": rng.standard_normal((1, 2, 1, 1)), "w": rng.standard_normal((2, 2, *KERNEL))}
    text = f"g (float[N,2,H,W] x) => (float[N,2,A,B] y) {{ v = Mul(x, s) y = {node} }}"
    read = {name: array for name, array in arrays.items() if name in ("s", "w")[: 1 + ("w)" in node)]}
    step = graphopt.compile(model(text, **read), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05))
    ours = [graphopt.Executor(step, native=native, threads=1) for native in (False, True)]
    weights = {name: torch.tensor(array, dtype=torch.float32, requires_grad=True) for name, array in read.items()}
    optimizer = torch.optim.SGD(weights.values(), 0.05)
    for batch, height, width in SIZES:
        x = rng.standard_normal((batch, 2, height, width)).astype(np.float32)
        y = reference(torch.tensor(x) * weights["s"], weights.get("w"))
        target = rng.standard_normal(y.shape).astype(np.float32)
        loss = functional.mse_loss(y, torch.tensor(target))
        descended(loss, optimizer)
        for executor in ours:
            np.testing.assert_allclose(executor.step(x=x, target=target)["loss"], loss.item(), rtol=1e-5)
            for name, weight in weights.items():
                np.testing.assert_allclose(executor.parameters[name], weight.detach().numpy(), rtol=2e-5, atol=1e-6)


@pytest.mark.skipif(onnxruntime.__version__.startswith("1.19"), reason="onnxruntime 1.19 multiplies no rows")
@pytest.mark.parametrize("pool", ["GlobalMaxPool(a)", "GlobalAveragePool(a)", "GlobalLpPool(a)", "LRN<size = 3>(a)"])
def test_a_batch_without_rows_has_gradients_of_zero(pool: str) -> None:
    """A worker may have one: its sums count nothing."""
    proto = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> g (float[N,3,L,M] x) => (float[N,4] y)'
        f" {{ a = Conv(x, k) b = {pool} g = GlobalAveragePool(b) f = Flatten(g) y = MatMul(f, w) }}"
    )
    rng = np.random.default_rng(0)
    for name, shape in {"k": (5, 3, 2, 2), "w": (5, 4)}.items():
        array = rng.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    graph = graphopt.compile(proto, loss=passes.MeanSquaredError(reduction="sum"))
    feeds = {"x": np.zeros((0, 3, 5, 5), np.float32), "target": np.zeros((0, 4), np.float32)}
    found = graphopt.run(graph, feeds)
    assert not found["k.grad"].any() and not found["w.grad"].any()


@pytest.mark.parametrize("attribute", ["", "<onesided = 1>", "<onesided = 0>"])
@pytest.mark.parametrize("dims", ["N,64,1", "N,S,1", "N,S"])
def test_a_spectrum_has_the_bins_that_the_runtime_computes(attribute: str, dims: str) -> None:
    """ONNX's inference takes the default of `onesided` for 0, and the standard has 1.

    It infers nothing for signals of open lengths, and refuses those of two axes, which speech packages have.
    """
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[{dims}] x) => (float[N] y)'
        f" {{ s = STFT{attribute}(x, hop, window, length) q = Mul(s, s)"
        " m = ReduceMean<axes = [1, 2, 3], keepdims = 0>(q)"
        " y = Mul(m, g) }"
    )
    rng = np.random.default_rng(0)
    window, g = rng.random(16).astype(np.float32), np.array([1.5], np.float32)
    for name, array in {"hop": np.array(12), "length": np.array(16), "window": window, "g": g}.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    x, target = rng.standard_normal((3, 64)).astype(np.float32), np.ones(3, np.float32)
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters("window"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(1.0),
    )
    executor = graphopt.Executor(step, native=False)
    w = torch.tensor(window, requires_grad=True)
    signal = x if dims == "N,S" else x[..., None]
    frames = torch.tensor(x).unfold(1, 16, 12) * w
    spectrum = torch.fft.fft(frames) if "0" in attribute else torch.fft.rfft(frames)
    y = torch.view_as_real(spectrum).square().mean((1, 2, 3)) * 1.5
    loss = (y - 1).square().mean()
    (gradient,) = torch.autograd.grad(loss, w)
    np.testing.assert_allclose(executor.predict(x=signal)["y"], y.detach(), rtol=1e-4)
    assert executor.step(x=signal, target=target)["loss"] == pytest.approx(loss.item(), rel=1e-4)
    np.testing.assert_allclose(executor.parameters["window"], window - gradient.numpy(), rtol=1e-3, atol=1e-4)

"""PyTorch's autograd as an oracle of gradients: ONNX's operators as PyTorch computes them, in float64.

`python tests/torch_oracle.py [OPERATOR ...]` is `python tests/onnx_node_tests.py` with PyTorch as the first oracle.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
import onnx_node_tests
import torch
import torch.nn.functional as F  # noqa: N812
from torch import Tensor

from graphopt.graph.operators import defaults
from graphopt.testing.gradients import NoOracle

Arrays = dict[str, np.ndarray]
Values = dict[str, "Tensor | None"]

OPERATORS: dict[str, Callable[..., Any]] = {}


def operator(*op_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        OPERATORS.update(dict.fromkeys(op_types, function))
        return function

    return register


def simple(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return an operator of a function that takes no attributes."""
    return lambda *inputs, **_: function(*inputs)


def outputs_of(model: ir.Model, inputs: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Run a model in PyTorch, and return its outputs by name.

    Raises:
        NoOracle: PyTorch has no equivalent of an operator, or of what its attributes ask for.
    """
    values: Values = {str(x.name): tensor(x.const_value.numpy()) for x in model.graph.initializers.values()}
    values.update(inputs)
    run_graph(model.graph, values, model.opset_imports[""])
    return {str(y.name): values[str(y.name)] for y in model.graph.outputs if y.dtype.is_floating_point()}


def run_graph(graph: ir.Graph, values: Values, version: int) -> None:
    """Add what the nodes of a graph compute to the values by name."""
    for node in graph:
        if node.op_type not in OPERATORS or node.domain:
            raise NoOracle(f"PyTorch has no {node.op_type}")
        attributes = defaults("", node.op_type, version) | {
            name: attribute.value for name, attribute in node.attributes.items()
        }
        inputs = [None if x is None else values[str(x.name)] for x in node.inputs]
        if any(isinstance(attribute, ir.Graph) for attribute in attributes.values()):
            attributes |= {"outer": values, "version": version}
        found = OPERATORS[node.op_type](*inputs, node=node, **attributes)
        results = found if isinstance(found, tuple | list) else [found]
        for y, value in zip(node.outputs, results, strict=False):
            values[str(y.name)] = value
        missing = [y.name for y in node.outputs[len(results) :] if y.uses()]
        if missing:
            raise NoOracle(f"PyTorch's {node.op_type} has no output {missing[0]!r}")


def pytorch(model: ir.Model, point: Mapping[str, np.ndarray], seeds: Mapping[str, np.ndarray]) -> tuple[Arrays, Arrays]:
    """Return a model's outputs at a point, and the gradients of their sum weighed by `NAME.seed`, in float64.

    Raises:
        NoOracle: PyTorch has no equivalent of an operator.
    """
    inputs = {name: tensor(x) for name, x in point.items()}
    floating = {name: x.requires_grad_() for name, x in inputs.items() if x.is_floating_point()}
    found = outputs_of(model, inputs)
    weighed = [(found[name.removesuffix(".seed")], tensor(seed)) for name, seed in seeds.items()]
    outputs = {name: y.detach().numpy() for name, y in found.items()}
    return outputs, vector_jacobian(weighed, floating)


def second(model: ir.Model, feeds: Mapping[str, np.ndarray], further: Mapping[str, np.ndarray]) -> Arrays:
    """Return the gradients, by all that is fed, of the sum of a model's gradients weighed by `NAME.grad.seed`.

    Args:
        feeds: a point, and the seeds `NAME.seed` of the first gradients.

    Raises:
        NoOracle: PyTorch has no equivalent of an operator, or no second gradient.
    """
    fed = {name: tensor(x) for name, x in feeds.items()}
    floating = {name: x.requires_grad_() for name, x in fed.items() if x.is_floating_point()}
    seeds = {name: x for name, x in floating.items() if name.endswith(".seed")}
    outputs = outputs_of(model, {name: x for name, x in fed.items() if name not in seeds})
    wrt = {name: x for name, x in floating.items() if name not in seeds}
    try:
        first = vector_jacobian(
            [(outputs[name.removesuffix(".seed")], seed) for name, seed in seeds.items()], wrt, again=True
        )
        weighed = [(first[name.removesuffix(".grad.seed")], tensor(seed)) for name, seed in further.items()]
        found = vector_jacobian(weighed, floating)
    except RuntimeError as error:
        raise NoOracle(f"PyTorch has no second gradient: {error}") from error
    if not all(np.isfinite(gradient).all() for gradient in found.values()):
        raise NoOracle("PyTorch's second gradient is no number")
    return found


def vector_jacobian(weighed: Sequence[tuple[Tensor, Tensor]], wrt: Mapping[str, Tensor], again: bool = False) -> Any:
    """Return the gradients of a weighed sum, zeros where it does not depend on a tensor."""
    total = sum((torch.sum(y.nan_to_num(0, 0, 0) * seed) for y, seed in weighed), torch.zeros((), dtype=torch.float64))
    if not total.requires_grad:
        return {name: (torch.zeros_like(x) if again else np.zeros(x.shape)) for name, x in wrt.items()}
    found = torch.autograd.grad(
        total, list(wrt.values()), create_graph=again, allow_unused=True, materialize_grads=True
    )
    return dict(zip(wrt, found if again else map(array, found), strict=True))


def array(x: Tensor) -> np.ndarray:
    return (x.detach() + torch.zeros(x.shape, dtype=x.dtype)).numpy()  # some zeros of autograd's have no memory


def tensor(x: np.ndarray) -> Tensor:
    x = np.asarray(x)
    if "float" in x.dtype.name:
        x = x.astype(np.float64)
    elif x.dtype != bool:
        x = x.astype(np.int64)
    return torch.from_numpy(np.ascontiguousarray(x).reshape(x.shape).copy())


def ints(x: Tensor | None) -> list[int]:
    return [] if x is None else [int(n) for n in x.reshape(-1).tolist()]


# Elementwise operators.

OPERATORS.update(
    {
        name: simple(function)
        for name, function in {
            "Abs": torch.abs, "Acos": torch.acos, "Acosh": torch.acosh, "Add": torch.add, "Asin": torch.asin,
            "Asinh": torch.asinh, "Atan": torch.atan, "Atanh": torch.atanh, "Ceil": torch.ceil, "Cos": torch.cos,
            "Cosh": torch.cosh, "Erf": torch.erf, "Exp": torch.exp, "Floor": torch.floor, "HardSwish": F.hardswish,
            "Identity": torch.clone, "Log": torch.log, "MatMul": torch.matmul, "Mish": F.mish, "Mul": torch.mul,
            "Neg": torch.neg, "Reciprocal": torch.reciprocal, "Relu": torch.relu, "Round": torch.round,
            "Sigmoid": torch.sigmoid, "Sign": torch.sign, "Sin": torch.sin, "Sinh": torch.sinh,
            "Softplus": functools.partial(F.softplus, threshold=1e3), "Softsign": F.softsign, "Sqrt": torch.sqrt,
            "Sub": torch.sub, "Tan": torch.tan, "Tanh": torch.tanh, "Det": torch.linalg.det, "Where": torch.where,
            "And": torch.logical_and, "Or": torch.logical_or, "Not": torch.logical_not, "Xor": torch.logical_xor,
            "Equal": torch.eq, "Greater": torch.gt, "GreaterOrEqual": torch.ge, "Less": torch.lt,
            "LessOrEqual": torch.le, "IsNaN": torch.isnan, "Pow": torch.pow,
            "OptionalGetElement": torch.clone,
        }.items()
    }
)  # fmt: skip


OPERATORS |= {
    "Div": lambda a, b, **_: a / b if a.is_floating_point() else torch.div(a, b, rounding_mode="trunc"),
    "Mod": lambda a, b, fmod, **_: torch.fmod(a, b) if fmod else torch.remainder(a, b),
    "Sum": lambda *inputs, **_: functools.reduce(torch.add, inputs),
    "Max": lambda *inputs, **_: functools.reduce(torch.maximum, inputs),
    "Min": lambda *inputs, **_: functools.reduce(torch.minimum, inputs),
    "LeakyRelu": lambda x, alpha, **_: F.leaky_relu(x, alpha),
    "ThresholdedRelu": lambda x, alpha, **_: F.threshold(x, alpha, 0.0),
    "HardSigmoid": lambda x, alpha, beta, **_: torch.clamp(alpha * x + beta, 0, 1),
    "Elu": lambda x, alpha, **_: torch.where(x > 0, x, alpha * torch.expm1(x)),
    "Celu": lambda x, alpha, **_: F.celu(x, alpha),
    "Selu": lambda x, alpha, gamma, **_: gamma * torch.where(x > 0, x, alpha * torch.expm1(x)),
    "Gelu": lambda x, approximate, **_: F.gelu(x, approximate=approximate),
    "PRelu": lambda x, slope, **_: torch.where(x < 0, slope * x, x),
}


@operator("Mean")
def mean(*inputs: Tensor, **_: Any) -> Tensor:
    return functools.reduce(torch.add, inputs) / len(inputs)


@operator("Shrink")
def shrink(x: Tensor, lambd: float, bias: float, **_: Any) -> Tensor:
    return torch.where(x < -lambd, x + bias, torch.where(x > lambd, x - bias, 0.0))


@operator("Clip")
def clip(x: Tensor, low: Tensor | None = None, high: Tensor | None = None, **_: Any) -> Tensor:
    return x.clone() if low is None and high is None else torch.clamp(x, low, high)


@operator("Cast", "CastLike")
def cast(x: Tensor, like: Tensor | None = None, to: int = 0, **_: Any) -> Tensor:
    if like is not None:
        return x.to(like.dtype)
    dtype = ir.DataType(to)
    if dtype.is_floating_point():
        return x.to(torch.float64)
    return x.to(torch.bool if dtype == ir.DataType.BOOL else torch.int64)


@operator("IsInf")
def is_inf(x: Tensor, detect_negative: int, detect_positive: int, **_: Any) -> Tensor:
    return torch.isinf(x) & ((x > 0) if not detect_negative else torch.ones_like(x, dtype=torch.bool))


@operator("Dropout")
def dropout(x: Tensor, ratio: Tensor | None = None, training: Tensor | None = None, **_: Any) -> Any:
    if training is not None and bool(training):
        raise NoOracle("PyTorch draws another mask")
    return x.clone(), torch.ones_like(x, dtype=torch.bool)


# Matrix products.


@operator("Gemm")
def gemm(
    a: Tensor,
    b: Tensor,
    c: Tensor | None = None,
    *,
    alpha: float,
    beta: float,
    transA: int,
    transB: int,
    **_: Any,
) -> Tensor:
    product = alpha * ((a.T if transA else a) @ (b.T if transB else b))
    return product if c is None else product + beta * c


@operator("Einsum")
def einsum(*inputs: Tensor, equation: str, **_: Any) -> Tensor:
    return torch.einsum(equation.replace(" ", ""), *inputs)


# Windows.


def each(numbers: Sequence[int] | None, n: int, default: int = 1) -> list[int]:
    return list(numbers) if numbers else [default] * n


def pads_of(
    sizes: Sequence[int], kernel: Sequence[int], strides: Sequence[int], dilations: Sequence[int],
    auto_pad: str, pads: Sequence[int] | None,
) -> list[int]:  # fmt: skip
    """Return the pads of spatial axes, all begins and then all ends."""
    n = len(sizes)
    if auto_pad == "NOTSET":
        return each(pads, 2 * n, 0)
    if auto_pad == "VALID":
        return [0] * 2 * n
    begins, ends = [], []
    for size, taps, stride, dilation in zip(sizes, kernel, strides, dilations, strict=True):
        total = max((math.ceil(size / stride) - 1) * stride + (taps - 1) * dilation + 1 - size, 0)
        half = total // 2
        begins.append(half if auto_pad == "SAME_UPPER" else total - half)
        ends.append(total - begins[-1])
    return begins + ends


def padded(x: Tensor, pads: Sequence[int], value: float = 0.0) -> Tensor:
    """Pad spatial axes."""
    n = x.dim() - 2
    flat = [p for i in reversed(range(n)) for p in (pads[i], pads[n + i])]
    return F.pad(x, flat, value=value)


def more_for_ceil(
    x: Tensor,
    sizes: Sequence[int],
    pads: Sequence[int],
    kernel: Sequence[int],
    strides: Sequence[int],
    dilations: Sequence[int],
) -> list[int]:
    """Return how much is missing at the end of padded axes so that a last, partial window fits.

    No window starts in the pads at the end.
    """
    n, more = len(sizes), []
    for i, size in enumerate(sizes):
        extent = (kernel[i] - 1) * dilations[i] + 1
        room = size + pads[i] + pads[n + i] - extent
        windows = math.ceil(room / strides[i]) + 1
        if (windows - 1) * strides[i] >= size + pads[i]:
            windows -= 1
        more.append(max((windows - 1) * strides[i] - room, 0))
    return more


CONVOLUTIONS = {1: F.conv1d, 2: F.conv2d, 3: F.conv3d}
TRANSPOSED = {1: F.conv_transpose1d, 2: F.conv_transpose2d, 3: F.conv_transpose3d}
MAXIMA = {1: F.max_pool1d, 2: F.max_pool2d, 3: F.max_pool3d}


@operator("Conv")
def conv(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, group: int, auto_pad: str, pads: Any = None,
    strides: Any = None, dilations: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = x.dim() - 2
    strides, dilations = each(strides, n), each(dilations, n)
    pads = pads_of(x.shape[2:], w.shape[2:], strides, dilations, auto_pad, pads)
    return CONVOLUTIONS[n](padded(x, pads), w, bias, strides, 0, dilations, group)


@operator("ConvTranspose")
def conv_transpose(
    x: Tensor, w: Tensor, bias: Tensor | None = None, *, group: int, auto_pad: str, pads: Any = None,
    strides: Any = None, dilations: Any = None, output_padding: Any = None, output_shape: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = x.dim() - 2
    strides, dilations, more = each(strides, n), each(dilations, n), each(output_padding, n, 0)
    whole = TRANSPOSED[n](x, w, None, strides, 0, 0, group, dilations)
    pads = each(pads, 2 * n, 0)
    if output_shape or auto_pad.startswith("SAME"):
        wanted = output_shape or [size * stride for size, stride in zip(x.shape[2:], strides, strict=True)]
        totals = [max(whole.shape[2 + i] + more[i] - wanted[i], 0) for i in range(n)]
        begins = [t // 2 if auto_pad == "SAME_UPPER" else t - t // 2 for t in totals]
        pads = begins + [whole.shape[2 + i] + more[i] - wanted[i] - begins[i] for i in range(n)]
    y = padded(
        whole,
        [-begin for begin in pads[:n]] + [extra - end for extra, end in zip(more, pads[n:], strict=True)],
    )
    return y if bias is None else y + bias.reshape(-1, *[1] * n)


@operator("Col2Im")
def col2im(
    x: Tensor,
    image: Tensor,
    block: Tensor,
    *,
    pads: Any = None,
    strides: Any = None,
    dilations: Any = None,
    **_: Any,
) -> Tensor:
    size, kernel = ints(image), ints(block)
    if len(size) != 2:
        raise NoOracle("PyTorch folds images alone")
    pads = each(pads, 4, 0)
    whole = [size[i] + pads[i] + pads[2 + i] for i in range(2)]
    y = F.fold(x, whole, kernel, dilation=each(dilations, 2), stride=each(strides, 2))
    return y[:, :, pads[0] : pads[0] + size[0], pads[1] : pads[1] + size[1]]


@operator("MaxPool")
def max_pool(
    x: Tensor, *, kernel_shape: list[int], auto_pad: str, ceil_mode: int, pads: Any = None, strides: Any = None,
    dilations: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides, dilations = each(strides, n), each(dilations, n)
    pads = pads_of(x.shape[2:], kernel_shape, strides, dilations, auto_pad, pads)
    if ceil_mode:
        more = more_for_ceil(x, x.shape[2:], pads, kernel_shape, strides, dilations)
        pads = pads[:n] + [end + extra for end, extra in zip(pads[n:], more, strict=True)]
    return MAXIMA[n](padded(x, pads, -math.inf), kernel_shape, strides, 0, dilations)


def window_sums(x: Tensor, kernel: list[int], strides: list[int], dilations: list[int]) -> Tensor:
    planes = x.reshape(-1, 1, *x.shape[2:])
    sums = CONVOLUTIONS[len(kernel)](planes, torch.ones(1, 1, *kernel, dtype=x.dtype), None, strides, 0, dilations)
    return sums.reshape(*x.shape[:2], *sums.shape[2:])


@operator("AveragePool")
def average_pool(
    x: Tensor, *, kernel_shape: list[int], auto_pad: str, ceil_mode: int, count_include_pad: int, pads: Any = None,
    strides: Any = None, dilations: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides, dilations = each(strides, n), each(dilations, n)
    pads = pads_of(x.shape[2:], kernel_shape, strides, dilations, auto_pad, pads)
    more = more_for_ceil(x, x.shape[2:], pads, kernel_shape, strides, dilations) if ceil_mode else [0] * n
    counted = padded(torch.ones_like(x), pads, 1.0 if count_include_pad else 0.0)
    data, counted = (padded(v, [0] * n + more) for v in (padded(x, pads), counted))
    sums, counts = (window_sums(v, kernel_shape, strides, dilations) for v in (data, counted))
    return sums / counts


@operator("LpPool")
def lp_pool(
    x: Tensor, *, kernel_shape: list[int], auto_pad: str, ceil_mode: int, p: int, pads: Any = None,
    strides: Any = None, dilations: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides, dilations = each(strides, n), each(dilations, n)
    pads = pads_of(x.shape[2:], kernel_shape, strides, dilations, auto_pad, pads)
    if ceil_mode:
        more = more_for_ceil(x, x.shape[2:], pads, kernel_shape, strides, dilations)
        pads = pads[:n] + [end + extra for end, extra in zip(pads[n:], more, strict=True)]
    return window_sums(padded(x, pads).abs() ** p, kernel_shape, strides, dilations) ** (1 / p)


@operator("MaxUnpool")
def max_unpool(
    x: Tensor, indices: Tensor, shape: Tensor | None = None, *, kernel_shape: list[int], pads: Any = None,
    strides: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n = len(kernel_shape)
    strides, pads = each(strides, n), each(pads, 2 * n, 0)
    sizes = [(x.shape[2 + i] - 1) * strides[i] + kernel_shape[i] - pads[i] - pads[n + i] for i in range(n)]
    size = [*x.shape[:2], *sizes]
    y = torch.zeros(math.prod(size), dtype=x.dtype).scatter(0, indices.reshape(-1), x.reshape(-1)).reshape(size)
    if shape is None:
        return y
    return padded(y, [0] * n + [wanted - have for wanted, have in zip(ints(shape)[2:], sizes, strict=True)])


def spatial(x: Tensor) -> list[int]:
    return list(range(2, x.dim()))


OPERATORS |= {
    "GlobalAveragePool": lambda x, **_: x.mean(spatial(x), keepdim=True),
    "GlobalLpPool": lambda x, p, **_: torch.linalg.vector_norm(x, p, spatial(x), keepdim=True),
}


@operator("GlobalMaxPool")
def global_max_pool(x: Tensor, **_: Any) -> Tensor:
    return x.flatten(2).max(dim=2, keepdim=True)[0].reshape(*x.shape[:2], *[1] * len(spatial(x)))


@operator("MaxRoiPool")
def max_roi_pool(x: Tensor, rois: Tensor, *, pooled_shape: list[int], spatial_scale: float, **_: Any) -> Tensor:
    results = []
    for batch, *corners in rois.detach().numpy():
        left, top, right, bottom = (math.floor(corner * spatial_scale + 0.5) for corner in corners)
        spans = [(top, max(bottom - top + 1, 1)), (left, max(right - left + 1, 1))]
        for place in itertools.product(*map(range, pooled_shape)):
            ends = [
                (begin + math.floor(i * size / bins), begin + math.ceil((i + 1) * size / bins))
                for (begin, size), i, bins in zip(spans, place, pooled_shape, strict=True)
            ]
            part = x[
                int(batch),
                :,
                max(ends[0][0], 0) : max(ends[0][1], 0),
                max(ends[1][0], 0) : max(ends[1][1], 0),
            ]
            results.append(part.flatten(1).max(dim=1)[0] if part.numel() else torch.zeros(x.shape[1], dtype=x.dtype))
    return torch.stack(results).reshape(len(rois), *pooled_shape, -1).movedim(-1, 1)


# Sampling.


@operator("GridSample")
def grid_sample(x: Tensor, grid: Tensor, *, mode: str, padding_mode: str, align_corners: int, **_: Any) -> Tensor:
    if x.dim() == 3:
        raise NoOracle("PyTorch samples no lines")
    names = {"linear": "bilinear", "cubic": "bicubic"}
    return F.grid_sample(x, grid, names.get(mode, mode), padding_mode, bool(align_corners))


def sampled(x: Tensor, at: Tensor) -> Tensor:
    """Return the pixels of each channel of `x` at some positions, an axis a row, weighed linearly; 0 outside."""
    first, total = torch.floor(at).detach(), torch.zeros(x.shape[0], at.shape[1], dtype=x.dtype)
    sizes = torch.tensor(x.shape[1:])[:, None]
    for corner in itertools.product((0, 1), repeat=len(at)):
        pixel = first + torch.tensor(corner)[:, None]
        inside = ((pixel >= 0) & (pixel < sizes)).all(0)
        place = torch.minimum(pixel.clamp(min=0).long(), sizes - 1)
        total = total + x[(slice(None), *place)] * torch.prod(1 - (at - pixel).abs(), 0) * inside
    return total


@operator("DeformConv")
def deform_conv(
    x: Tensor, w: Tensor, offset: Tensor, bias: Tensor | None = None, weights: Tensor | None = None, *, group: int,
    offset_group: int, dilations: Any = None, pads: Any = None, strides: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    n, kernel, out = x.dim() - 2, list(w.shape[2:]), list(offset.shape[2:])
    taps, channels = math.prod(kernel), x.shape[1] // offset_group
    steps = [each(numbers, n, default) for numbers, default in ((strides, 1), (pads, 0), (dilations, 1))]
    place, tap = torch.from_numpy(np.indices(out)), torch.from_numpy(np.indices(kernel)).reshape(n, taps)
    stride, begin, dilation = (torch.tensor(numbers[:n]) for numbers in steps)
    base = (place * stride.reshape(-1, *[1] * n) - begin.reshape(-1, *[1] * n))[:, None]
    base = base + (tap * dilation[:, None]).reshape(n, taps, *[1] * n)
    parts = offset.reshape(len(x), offset_group, taps, n, *out)
    ones = torch.ones(len(x), offset_group, taps, *out, dtype=x.dtype)
    weights = ones if weights is None else weights.reshape(ones.shape)
    images = []
    for i, image in enumerate(x):
        pixels = [
            sampled(image[g * channels : (g + 1) * channels], (base + parts[i, g].transpose(0, 1)).reshape(n, -1))
            * weights[i, g].reshape(-1)
            for g in range(offset_group)
        ]
        columns = torch.cat(pixels).reshape(group, -1, taps, math.prod(out))
        kernels = w.reshape(group, -1, w.shape[1], taps)
        images.append(torch.einsum("gock,gckp->gop", kernels, columns).reshape(-1, *out))
    y = torch.stack(images)
    return y if bias is None else y + along_channels(bias, y)


@operator("RoiAlign")
def roi_align(
    x: Tensor, rois: Tensor, batch: Tensor, *, mode: str, coordinate_transformation_mode: str, output_height: int,
    output_width: int, sampling_ratio: int, spatial_scale: float, **_: Any,
) -> Tensor:  # fmt: skip
    if mode != "avg":
        raise NoOracle("PyTorch has no largest of weighed pixels")
    aligned, bins, results = coordinate_transformation_mode == "half_pixel", (output_height, output_width), []
    for roi, image in zip(rois * spatial_scale - (0.5 if aligned else 0.0), batch, strict=True):
        axes, inside = [], []
        for i in range(2):
            begin, length = roi[1 - i], roi[3 - i] - roi[1 - i]
            length = length if aligned else torch.clamp(length, min=1.0)
            count = sampling_ratio or math.ceil(float(length.detach()) / bins[i])
            at = begin + (torch.arange(bins[i] * count) + 0.5) * length / (bins[i] * count)
            size = x.shape[2 + i]
            inside.append((at >= -1) & (at <= size))
            axes.append(torch.clamp(at, 0, size - 1))
        grid = torch.stack([v.reshape(-1) for v in torch.meshgrid(*axes, indexing="ij")])
        pixels = sampled(x[int(image)], grid) * (inside[0][:, None] & inside[1][None]).reshape(-1)
        split = pixels.reshape(-1, bins[0], len(axes[0]) // bins[0], bins[1], len(axes[1]) // bins[1])
        results.append(split.mean((2, 4)))
    return torch.stack(results)


@operator("AffineGrid")
def affine_grid(theta: Tensor, size: Tensor, *, align_corners: int, **_: Any) -> Tensor:
    return F.affine_grid(theta, ints(size), align_corners=bool(align_corners))


@operator("Resize")
def resize(
    x: Tensor, roi: Tensor | None = None, scales: Tensor | None = None, sizes: Tensor | None = None, *, mode: str,
    coordinate_transformation_mode: str, cubic_coeff_a: float, nearest_mode: str, antialias: int, exclude_outside: int,
    keep_aspect_ratio_policy: str, axes: Any = None, **_: Any,
) -> Tensor:  # fmt: skip
    known = scales if scales is not None and scales.numel() else sizes
    if axes or keep_aspect_ratio_policy != "stretch" or antialias or exclude_outside or cubic_coeff_a != -0.75:
        raise NoOracle("PyTorch resizes otherwise")
    if known is scales:
        out = [math.floor(size * scale) for size, scale in zip(x.shape, scales.tolist(), strict=True)]
    else:
        out = ints(sizes)
    if out[:2] != list(x.shape[:2]) or x.dim() > 4 or (mode == "cubic" and x.dim() != 4):
        raise NoOracle("PyTorch resizes spatial axes alone")
    aligned = coordinate_transformation_mode == "align_corners"
    if mode == "nearest" and (coordinate_transformation_mode, nearest_mode) != ("asymmetric", "floor"):
        raise NoOracle("PyTorch has other nearest pixels")
    if mode != "nearest" and not aligned and coordinate_transformation_mode not in ("half_pixel", "pytorch_half_pixel"):
        raise NoOracle("PyTorch has no such coordinates")
    name = {"nearest": "nearest", "linear": ["linear", "bilinear"][x.dim() - 3], "cubic": "bicubic"}[mode]
    options: dict[str, Any] = {} if mode == "nearest" else {"align_corners": aligned}
    if known is scales and not aligned:
        return F.interpolate(x, scale_factor=scales.tolist()[2:], mode=name, recompute_scale_factor=False, **options)
    return F.interpolate(x, size=out[2:], mode=name, **options)


# Normalization.


def along_channels(vector: Tensor, x: Tensor) -> Tensor:
    return vector.reshape(-1, *[1] * (x.dim() - 2))


@operator("BatchNormalization")
def batch_normalization(
    x: Tensor, scale: Tensor, bias: Tensor, mean: Tensor, variance: Tensor, *, epsilon: float, momentum: float,
    training_mode: int, **_: Any,
) -> Any:  # fmt: skip
    if not training_mode:
        shift, by = along_channels(mean, x), torch.rsqrt(along_channels(variance, x) + epsilon)
        return (x - shift) * by * along_channels(scale, x) + along_channels(bias, x)
    rest = [0, *spatial(x)]
    y = F.batch_norm(x, None, None, scale, bias, training=True, eps=epsilon)
    means, variances = x.mean(rest), x.var(rest, correction=0)
    return y, momentum * mean + (1 - momentum) * means, momentum * variance + (1 - momentum) * variances


@operator("LayerNormalization")
def layer_normalization(
    x: Tensor, scale: Tensor, bias: Tensor | None = None, *, axis: int, epsilon: float, **_: Any
) -> Any:
    axes = list(range(axis % x.dim(), x.dim()))
    y = F.layer_norm(x, x.shape[axes[0] :], None, None, epsilon) * scale
    means, variances = x.mean(axes, keepdim=True), x.var(axes, correction=0, keepdim=True)
    return (y if bias is None else y + bias), means, torch.rsqrt(variances + epsilon)


@operator("InstanceNormalization")
def instance_normalization(x: Tensor, scale: Tensor, bias: Tensor, *, epsilon: float, **_: Any) -> Tensor:
    return F.instance_norm(x, None, None, scale, bias, eps=epsilon)


OPERATORS |= {
    "Softmax": lambda x, axis, **_: torch.softmax(x, axis),
    "LogSoftmax": lambda x, axis, **_: torch.log_softmax(x, axis),
    "LpNormalization": lambda x, axis, p, **_: F.normalize(x, p, axis, eps=0.0),
}


@operator("LRN")
def lrn(x: Tensor, *, size: int, alpha: float, beta: float, bias: float, **_: Any) -> Tensor:
    """PyTorch's own takes one channel more before than after where the size is even, ONNX one more after."""
    planes = x.reshape(x.shape[0], x.shape[1], -1)
    squares = F.pad(planes**2, [0, 0, (size - 1) // 2, size // 2]).unfold(1, size, 1).sum(-1)
    return (planes / (bias + alpha / size * squares) ** beta).reshape(x.shape)


# Quantization: rounding is passed straight through, and clipping acts on what is rounded.


def rounded(x: Tensor) -> Tensor:
    return x + (torch.round(x) - x).detach()


def stretched(scale: Tensor, x: Tensor, axis: int, block_size: int) -> Tensor:
    if scale.dim() == 0 or scale.numel() == 1:
        return scale.reshape(())
    if block_size:
        return scale.repeat_interleave(block_size, axis).narrow(axis, 0, x.shape[axis])
    return scale.reshape([-1 if i == axis % x.dim() else 1 for i in range(x.dim())])


@operator("QuantizeLinear")
def quantize_linear(
    x: Tensor,
    scale: Tensor,
    zero: Tensor | None = None,
    *,
    axis: int,
    block_size: int,
    node: ir.Node,
    **_: Any,
) -> Tensor:
    kind = node.outputs[0].dtype
    steps = rounded(x / stretched(scale, x, axis, block_size))
    steps = steps if zero is None else steps + stretched(zero, x, axis, block_size)
    return torch.clamp(steps, float(kind.min), float(kind.max))


@operator("DequantizeLinear")
def dequantize_linear(
    x: Tensor, scale: Tensor, zero: Tensor | None = None, *, axis: int, block_size: int, **_: Any
) -> Tensor:
    steps = x if zero is None else x - stretched(zero, x, axis, block_size)
    return steps * stretched(scale, x, axis, block_size)


@operator("DynamicQuantizeLinear")
def dynamic_quantize_linear(x: Tensor, **_: Any) -> Any:
    most, least = torch.clamp(x.max(), min=0), torch.clamp(x.min(), max=0)
    scale = (most - least) / 255
    zero = torch.round(torch.clamp(-least / scale, 0, 255)).detach()
    return torch.clamp(rounded(x / scale) + zero, 0, 255), scale, zero


# Fourier transforms.


@operator("DFT")
def dft(
    x: Tensor,
    length: Tensor | None = None,
    axis: Tensor | None = None,
    *,
    inverse: int,
    onesided: int,
    **_: Any,
) -> Tensor:
    at = -2 if axis is None else int(axis)
    at = at % x.dim()
    n = None if length is None else int(length)
    z = torch.complex(x[..., 0], x[..., 1] if x.shape[-1] == 2 else torch.zeros_like(x[..., 0]))
    if inverse and onesided:
        return torch.fft.irfft(z, n, at)[..., None]
    y = torch.fft.ifft(z, n, at) if inverse else torch.fft.fft(z, n, at)
    if onesided:
        y = y.narrow(at, 0, y.shape[at] // 2 + 1)
    return torch.view_as_real(y.resolve_conj())


@operator("STFT")
def stft(
    x: Tensor,
    step: Tensor,
    window: Tensor | None = None,
    length: Tensor | None = None,
    *,
    onesided: int,
    **_: Any,
) -> Tensor:
    size = len(window) if length is None else int(length)
    frames = x.squeeze(-1).unfold(1, size, int(step))
    frames = frames if window is None else frames * window
    y = torch.fft.fft(frames)
    return torch.view_as_real(y[..., : size // 2 + 1] if onesided else y)


# Reductions.


def axes_of(x: Tensor, axes: Tensor | None, noop: int) -> list[int] | None:
    """Return the axes of a reduction, None where nothing is to do."""
    known = ints(axes)
    return known or (None if noop else list(range(x.dim())))


def reduction(function: Callable[[Tensor, list[int], bool], Tensor]) -> Callable[..., Tensor]:
    def reduced(x: Tensor, axes: Tensor | None = None, *, keepdims: int, noop_with_empty_axes: int, **_: Any) -> Tensor:
        known = axes_of(x, axes, noop_with_empty_axes)
        return function(x, known or [], bool(keepdims)) if known or x.dim() == 0 else function(x[None], [0], False)

    return reduced


def some(x: Tensor) -> Tensor:
    if not x.numel():
        raise NoOracle("PyTorch has no extreme of nothing")
    return x


def product(x: Tensor, axes: list[int], keep: bool) -> Tensor:
    for axis in sorted((axis % x.dim() for axis in axes), reverse=True):
        x = torch.prod(x, axis, keepdim=keep)
    return x


OPERATORS.update(
    ReduceSum=reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep)),
    ReduceMean=reduction(lambda x, axes, keep: x.mean(axes, keepdim=keep)),
    ReduceMax=reduction(lambda x, axes, keep: torch.amax(some(x), axes, keepdim=keep)),
    ReduceMin=reduction(lambda x, axes, keep: torch.amin(some(x), axes, keepdim=keep)),
    ReduceProd=reduction(product),
    ReduceL1=reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 1, axes, keepdim=keep)),
    ReduceL2=reduction(lambda x, axes, keep: torch.linalg.vector_norm(x, 2, axes, keepdim=keep)),
    ReduceSumSquare=reduction(lambda x, axes, keep: x.square().sum(axes, keepdim=keep)),
    ReduceLogSum=reduction(lambda x, axes, keep: x.sum(axes, keepdim=keep).log()),
    ReduceLogSumExp=reduction(lambda x, axes, keep: torch.logsumexp(x, axes, keepdim=keep)),
)


def cumulative(function: Callable[..., Tensor], start: float) -> Callable[..., Tensor]:
    def along(x: Tensor, axis: Tensor, *, exclusive: int, reverse: int, **_: Any) -> Tensor:
        at = int(axis)
        x = x.flip(at) if reverse else x
        if exclusive:
            first = torch.full_like(x.narrow(at, 0, 1), start)
            x = torch.cat([first, x.narrow(at, 0, x.shape[at] - 1)], at)
        y = function(x, at)
        return y.flip(at) if reverse else y

    return along


OPERATORS.update(CumSum=cumulative(torch.cumsum, 0.0), CumProd=cumulative(torch.cumprod, 1.0))


@operator("ArgMax", "ArgMin")
def arg_extreme(x: Tensor, axis: int, keepdims: int, node: ir.Node, **_: Any) -> Tensor:
    return (torch.argmax if node.op_type == "ArgMax" else torch.argmin)(x, axis, bool(keepdims))


@operator("Range")
def range_(start: Tensor, limit: Tensor, delta: Tensor, **_: Any) -> Tensor:
    count = max(math.ceil((limit - start).item() / delta.item()), 0)
    return start + delta * torch.arange(count, dtype=start.dtype)


# Shapes.


@operator("Constant")
def constant(**attributes: Any) -> Tensor:
    (value,) = (attributes[name] for name in attributes if name.startswith("value"))
    return tensor(value.numpy() if hasattr(value, "numpy") else np.array(value))


@operator("ConstantOfShape")
def constant_of_shape(shape: Tensor, value: Any = None, **_: Any) -> Tensor:
    number = tensor(np.zeros(1, np.float32) if value is None else value.numpy())
    return number.reshape(()).expand(ints(shape)).clone()


@operator("EyeLike")
def eye_like(x: Tensor, k: int, **_: Any) -> Tensor:
    return torch.diag_embed(torch.ones(max(*x.shape) + abs(k), dtype=x.dtype), k)[: x.shape[0], : x.shape[1]]


OPERATORS |= {
    "Shape": lambda x, start, end=None, **_: torch.tensor(x.shape[start:end], dtype=torch.int64),
    "NonZero": lambda x, **_: torch.nonzero(x).T,
    "Reshape": lambda x, shape, allowzero, **_: x.reshape(
        [x.shape[i] if n == 0 and (not allowzero) else n for i, n in enumerate(ints(shape))]
    ),
    "Squeeze": lambda x, axes=None, **_: x.squeeze() if axes is None else x.squeeze(ints(axes)),
    "Transpose": lambda x, perm=None, **_: x.permute(list(perm) if perm else list(range(x.dim()))[::-1]),
    "Expand": lambda x, shape, **_: x.expand(torch.broadcast_shapes(x.shape, ints(shape))),
    "Concat": lambda *inputs, axis, **_: torch.cat(inputs, axis),
    "Tile": lambda x, repeats, **_: x.repeat(ints(repeats)),
}


@operator("Size")
def size(x: Tensor, **_: Any) -> Tensor:
    return torch.tensor(x.numel())


@operator("Flatten")
def flatten(x: Tensor, axis: int, **_: Any) -> Tensor:
    axis = axis + x.dim() if axis < 0 else axis
    return x.reshape(math.prod(x.shape[:axis]), math.prod(x.shape[axis:]))


@operator("Unsqueeze")
def unsqueeze(x: Tensor, axes: Tensor, **_: Any) -> Tensor:
    at = sorted(axis % (x.dim() + axes.numel()) for axis in ints(axes))
    for axis in at:
        x = x.unsqueeze(axis)
    return x


@operator("Split")
def split(
    x: Tensor,
    sizes: Tensor | None = None,
    *,
    axis: int,
    num_outputs: int | None = None,
    node: ir.Node,
    **_: Any,
) -> Any:
    count = num_outputs or len(node.outputs)
    return torch.split(x, ints(sizes) if sizes is not None else math.ceil(x.shape[axis] / count), axis)


@operator("Slice")
def slice_(
    x: Tensor, starts: Tensor, ends: Tensor, axes: Tensor | None = None, steps: Tensor | None = None, **_: Any
) -> Tensor:
    count = len(starts)
    for start, end, axis, step in zip(
        ints(starts), ints(ends), ints(axes) or range(count), ints(steps) or [1] * count, strict=True
    ):
        places = range(*slice(start, end if end > -(2**62) else None, step).indices(x.shape[axis]))
        if step < 0 and end < -x.shape[axis]:
            places = range(*slice(start, None, step).indices(x.shape[axis]))
        x = x.index_select(axis, torch.tensor(list(places), dtype=torch.int64))
    return x


@operator("Pad")
def pad(
    x: Tensor, pads: Tensor, value: Tensor | None = None, axes: Tensor | None = None, *, mode: str, **_: Any
) -> Tensor:
    known = [axis % x.dim() for axis in ints(axes)] or list(range(x.dim()))
    widths = ints(pads)
    for i, axis in enumerate(known):
        begin, end = widths[i], widths[len(known) + i]
        size = x.shape[axis]
        x = x.narrow(axis, max(-begin, 0), size - max(-begin, 0) - max(-end, 0))
        size, begin, end = x.shape[axis], max(begin, 0), max(end, 0)
        if mode == "constant":
            number = torch.zeros((), dtype=x.dtype) if value is None else value.reshape(())
            ends = [[size if j == axis else n for j, n in enumerate(x.shape)] for size in (begin, end)]
            x = torch.cat([number.expand(ends[0]), x, number.expand(ends[1])], axis)
        else:
            how = {"reflect": "reflect", "edge": "edge", "wrap": "wrap"}[mode]
            x = x.index_select(axis, torch.from_numpy(np.pad(np.arange(size), (begin, end), mode=how)))  # type: ignore[call-overload]
    return x


@operator("Trilu")
def trilu(x: Tensor, k: Tensor | None = None, *, upper: int, **_: Any) -> Tensor:
    return (torch.triu if upper else torch.tril)(x, 0 if k is None else int(k))


@operator("DepthToSpace")
def depth_to_space(x: Tensor, blocksize: int, mode: str, **_: Any) -> Tensor:
    if mode == "DCR":
        n, c, *sizes = x.shape
        x = x.reshape(n, blocksize**2, c // blocksize**2, *sizes).transpose(1, 2).reshape(n, c, *sizes)
    return F.pixel_shuffle(x, blocksize)


@operator("SpaceToDepth")
def space_to_depth(x: Tensor, blocksize: int, mode: str = "DCR", **_: Any) -> Tensor:
    y = F.pixel_unshuffle(x, blocksize)
    if mode == "CRD":
        return y
    n, c, *sizes = y.shape
    return y.reshape(n, c // blocksize**2, blocksize**2, *sizes).transpose(1, 2).reshape(n, c, *sizes)


@operator("ReverseSequence")
def reverse_sequence(x: Tensor, lengths: Tensor, *, batch_axis: int, time_axis: int, **_: Any) -> Tensor:
    rows = x.movedim((batch_axis, time_axis), (0, 1))
    turned = [torch.cat([row[:n].flip(0), row[n:]]) for row, n in zip(rows, ints(lengths), strict=True)]
    return torch.stack(turned).movedim((0, 1), (batch_axis, time_axis))


# Positions.


def wrapped(indices: Tensor, size: int) -> Tensor:
    return torch.where(indices < 0, indices + size, indices)


@operator("Gather")
def gather(x: Tensor, indices: Tensor, axis: int, **_: Any) -> Tensor:
    return x[(*[slice(None)] * (axis % x.dim()), wrapped(indices, x.shape[axis]))]


@operator("GatherElements")
def gather_elements(x: Tensor, indices: Tensor, axis: int, **_: Any) -> Tensor:
    return torch.gather(x, axis, wrapped(indices, x.shape[axis]))


@operator("GatherND")
def gather_nd(x: Tensor, indices: Tensor, batch_dims: int, **_: Any) -> Tensor:
    if batch_dims:
        return torch.stack([gather_nd(part, at, batch_dims - 1) for part, at in zip(x, indices, strict=True)])
    return x[tuple(indices.movedim(-1, 0))]


@operator("TopK")
def top_k(x: Tensor, k: Tensor, *, axis: int, largest: int, sorted: int, **_: Any) -> Any:
    return torch.topk(x, int(k), axis, bool(largest))


@operator("Compress")
def compress(x: Tensor, condition: Tensor, axis: int | None = None, **_: Any) -> Tensor:
    at = torch.nonzero(condition).reshape(-1)
    return x.reshape(-1)[at] if axis is None else x.index_select(axis, at)


@operator("Unique")
def unique(x: Tensor, *, axis: int | None = None, sorted: int, **_: Any) -> Any:
    _, first, inverse, counts = np.unique(
        x.detach().numpy(), return_index=True, return_inverse=True, return_counts=True, axis=axis
    )
    if not sorted:
        order = np.argsort(first)
        first, counts, inverse = first[order], counts[order], np.argsort(order)[inverse]
    at = torch.from_numpy(first)
    others = (torch.from_numpy(np.ascontiguousarray(v)) for v in (inverse.reshape(-1), counts))
    return x.reshape(-1)[at] if axis is None else x.index_select(axis, at), at, *others


@operator("OneHot")
def one_hot(indices: Tensor, depth: Tensor, values: Tensor, axis: int, **_: Any) -> Tensor:
    count = int(depth)
    hot = wrapped(indices.to(torch.int64), count)[..., None] == torch.arange(count)
    return torch.where(hot, values[1], values[0]).movedim(-1, axis)


REDUCTIONS = {"add": "sum", "mul": "prod", "max": "amax", "min": "amin"}


@operator("ScatterElements")
def scatter_elements(x: Tensor, indices: Tensor, updates: Tensor, *, axis: int, reduction: str, **_: Any) -> Tensor:
    at = wrapped(indices, x.shape[axis])
    if reduction == "none":
        return x.scatter(axis, at, updates)
    return x.scatter_reduce(axis, at, updates, REDUCTIONS[reduction])


@operator("ScatterND")
def scatter_nd(x: Tensor, indices: Tensor, updates: Tensor, *, reduction: str, **_: Any) -> Tensor:
    depth = indices.shape[-1]
    flat = torch.arange(x.numel()).reshape(x.shape)[tuple(indices.movedim(-1, 0))].reshape(-1)
    assert updates.shape == (*indices.shape[:-1], *x.shape[depth:])
    return scatter_elements(x.reshape(-1), flat, updates.reshape(-1), axis=0, reduction=reduction).reshape(x.shape)


@operator("TensorScatter")
def tensor_scatter(x: Tensor, update: Tensor, start: Tensor | None = None, *, axis: int, mode: str, **_: Any) -> Tensor:
    axis %= x.dim()
    rows = []
    for i, (row, new) in enumerate(zip(x, update, strict=True)):
        at = torch.arange(new.shape[axis - 1]) + (0 if start is None else int(start[i]))
        at = at % row.shape[axis - 1] if mode == "circular" else at
        rows.append(row.index_copy(axis - 1, at, new))
    return torch.stack(rows)


# Control flow.


def run_body(body: ir.Graph, inputs: Sequence[Tensor], outer: Values, version: int) -> list[Tensor]:
    values = outer | {str(x.name): tensor(x.const_value.numpy()) for x in body.initializers.values()}
    values |= dict(zip((str(x.name) for x in body.inputs), inputs, strict=True))
    run_graph(body, values, version)
    return [values[str(y.name)] for y in body.outputs]  # type: ignore[misc]


@operator("If")
def if_(
    condition: Tensor, *, then_branch: ir.Graph, else_branch: ir.Graph, outer: Values, version: int, **_: Any
) -> Any:
    return run_body(then_branch if bool(condition) else else_branch, [], outer, version)


@operator("Loop")
def loop(
    trips: Tensor | None,
    going: Tensor | None,
    *states: Tensor,
    body: ir.Graph,
    outer: Values,
    version: int,
    **_: Any,
) -> Any:
    stacks: list[list[Tensor]] = []
    on = going is None or bool(going)
    while on and (trips is None or len(stacks) < int(trips)):
        on, *results = run_body(body, [torch.tensor(len(stacks)), torch.tensor(True), *states], outer, version)
        states, on = tuple(results[: len(states)]), bool(on)
        stacks.append(results[len(states) :])
    if not stacks:
        raise NoOracle("a Loop without a step")
    return [*states, *(torch.stack(steps) for steps in zip(*stacks, strict=True))]


@operator("Scan")
def scan(
    *inputs: Tensor, body: ir.Graph, num_scan_inputs: int, outer: Values, version: int, scan_input_axes: Any = None,
    scan_input_directions: Any = None, scan_output_axes: Any = None, scan_output_directions: Any = None, **_: Any,
) -> Any:  # fmt: skip
    n = len(inputs) - num_scan_inputs
    states, count = inputs[:n], len(body.outputs) - n
    ways, axes = each(scan_input_directions, num_scan_inputs, 0), each(scan_input_axes, num_scan_inputs, 0)
    rows = [x.movedim(axis, 0) for x, axis in zip(inputs[n:], axes, strict=True)]
    rows = [x.flip(0) if way else x for x, way in zip(rows, ways, strict=True)]
    stacks = []
    for slices in zip(*rows, strict=True):
        results = run_body(body, [*states, *slices], outer, version)
        states = tuple(results[:n])
        stacks.append(results[n:])
    ys = [torch.stack(steps) for steps in zip(*stacks, strict=True)]
    ys = [y.flip(0) if way else y for y, way in zip(ys, each(scan_output_directions, count, 0), strict=True)]
    return [
        *states,
        *(y.movedim(0, axis) for y, axis in zip(ys, each(scan_output_axes, count, 0), strict=True)),
    ]


# Recurrent operators.

ACTIVATIONS: dict[str, Callable[[Tensor, Any, Any], Tensor]] = {
    "affine": lambda x, a, b: a * x + b,
    "elu": lambda x, a, b: F.elu(x, a),
    "hardsigmoid": lambda x, a, b: torch.clamp(a * x + b, 0, 1),
    "leakyrelu": lambda x, a, b: F.leaky_relu(x, a),
    "relu": lambda x, a, b: torch.relu(x),
    "scaledtanh": lambda x, a, b: a * torch.tanh(b * x),
    "sigmoid": lambda x, a, b: torch.sigmoid(x),
    "softplus": lambda x, a, b: F.softplus(x),
    "softsign": lambda x, a, b: F.softsign(x),
    "tanh": lambda x, a, b: torch.tanh(x),
    "thresholdedrelu": lambda x, a, b: F.threshold(x, a, 0.0),
}
CHOSEN = {"RNN": ["Tanh"], "GRU": ["Sigmoid", "Tanh"], "LSTM": ["Sigmoid", "Tanh", "Tanh"]}


@operator("RNN", "GRU", "LSTM")
def recurrent(
    x: Tensor, w: Tensor, r: Tensor, b: Tensor | None = None, lengths: Tensor | None = None, h: Tensor | None = None,
    c: Tensor | None = None, p: Tensor | None = None, *, node: ir.Node, direction: str, layout: int = 0,
    activations: Any = None, activation_alpha: Any = None, activation_beta: Any = None, clip: float | None = None,
    linear_before_reset: int = 0, input_forget: int = 0, **_: Any,
) -> Any:  # fmt: skip
    ways, hidden, kind = len(w), r.shape[-1], node.op_type
    if layout:
        x, h, c = (None if v is None else v.transpose(0, 1) for v in (x, h, c))
    steps, rows = x.shape[:2]
    count = len(CHOSEN[kind])
    names = [name.lower() for name in activations or CHOSEN[kind] * ways]
    names = names if len(names) == count * ways else names * ways
    alphas, betas = ([*(given or [])] for given in (activation_alpha, activation_beta))
    results = []
    for d in range(ways):
        functions = []
        for i in range(count):
            a, z = (given.pop(0) if given else None for given in (alphas, betas))
            function = functools.partial(ACTIVATIONS[names[d * count + i]], a=a, b=z)
            limit = math.inf if clip is None or i == 2 else clip
            functions.append(lambda v, function=function, limit=limit: function(torch.clamp(v, -limit, limit)))
        wb, rb = torch.zeros(2, w.shape[1], dtype=x.dtype) if b is None else b[d].reshape(2, -1)
        peep = torch.zeros(3, hidden, dtype=x.dtype) if p is None else p[d].reshape(3, -1)
        state = torch.zeros(rows, hidden, dtype=x.dtype) if h is None else h[d]
        memory = torch.zeros(rows, hidden, dtype=x.dtype) if c is None else c[d]
        backwards = direction == "reverse" or d == 1
        ys: list[Any] = [None] * steps
        for t in reversed(range(steps)) if backwards else range(steps):
            inside = torch.ones(rows, 1, dtype=torch.bool) if lengths is None else (t < lengths)[:, None]
            following, kept = step(
                kind,
                x[t],
                state,
                memory,
                w[d],
                r[d],
                wb,
                rb,
                peep,
                functions,
                linear_before_reset,
                input_forget,
            )
            ys[t] = torch.where(inside, following, 0.0)
            state, memory = torch.where(inside, following, state), torch.where(inside, kept, memory)
        results.append((torch.stack(ys), state, memory))
    y, last, memory = (torch.stack(parts, 1 if i == 0 else 0) for i, parts in enumerate(zip(*results, strict=True)))
    if layout:
        y, last, memory = y.permute(2, 0, 1, 3), last.transpose(0, 1), memory.transpose(0, 1)
    return y, last, memory


def step(kind, x, h, c, w, r, wb, rb, peep, functions, linear_before_reset, input_forget):  # type: ignore[no-untyped-def]
    wx = x @ w.T + wb
    if kind == "RNN":
        return functions[0](wx + h @ r.T + rb), c
    if kind == "LSTM":
        i, o, f, g = (wx + h @ r.T + rb).chunk(4, 1)
        i = functions[0](i + peep[0] * c)
        f = 1 - i if input_forget else functions[0](f + peep[2] * c)
        following = f * c + i * functions[1](g)
        return functions[0](o + peep[1] * following) * functions[2](following), following
    (xz, xr, xh), (rz, rr, rh), (bz, br, bh) = wx.chunk(3, 1), r.chunk(3), rb.chunk(3)
    z, reset = functions[0](xz + h @ rz.T + bz), functions[0](xr + h @ rr.T + br)
    new = reset * (h @ rh.T + bh) if linear_before_reset else (reset * h) @ rh.T + bh
    return (1 - z) * functions[1](xh + new) + z * h, c


if __name__ == "__main__":
    onnx_node_tests.main(pytorch)

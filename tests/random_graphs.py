"""Random valid models: a table of makers, each of which adds an operator with random attributes to a growing graph.

Every value is known when it is made, so that operators get numbers that they are defined for, off their kinks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import torch
import torch_oracle
from onnx import helper

from graphopt.graph.operators import defaults

OPSET = 21
MOST_ELEMENTS, LARGEST = 300, 30.0

# Operators that have float32 alone: a graph with one of them is not computed in float64.
FLOAT32_ALONE = {"Celu", "QuantizeLinear", "DequantizeLinear", "DynamicQuantizeLinear"}


class Rejected(Exception):
    """An operator does not fit: its result is too large, is no number, or it finds no input."""


class Growing:
    """A graph that grows by one node at a time."""

    def __init__(self, seed: int) -> None:
        self.r = np.random.default_rng(seed)
        self.nodes: list[onnx.NodeProto] = []
        self.values: dict[str, torch.Tensor] = {}
        self.floating: list[str] = []
        self.inputs: list[str] = []
        self.fixed: set[str] = set()  # inputs of static shape: weights
        self.constants: dict[str, np.ndarray] = {}
        self.used: set[str] = set()
        self.captured: set[str] = set()  # what bodies use

    def chance(self, share: float = 0.5) -> bool:
        return bool(self.r.random() < share)

    def one_of(self, choices: Sequence[Any]) -> Any:
        return choices[self.r.integers(len(choices))]

    def number(self, low: int, high: int) -> int:
        """Return an integer of `low` to `high`, both included."""
        return int(self.r.integers(low, high + 1))

    def new(self, shape: Sequence[int], low: float = -2.0, high: float = 2.0, fixed: bool = False) -> str:
        """Add an input of distinct numbers, in float32."""
        name, count = f"x{len(self.inputs)}", int(np.prod(shape))
        spaced = low + (high - low) * (np.arange(count) + 0.53) / max(count, 1)
        array = self.r.permutation(spaced).reshape(shape).astype(np.float32)
        self.inputs.append(name)
        self.values[name] = torch_oracle.tensor(array)
        if fixed:
            self.fixed.add(name)
        else:
            self.floating.append(name)
        return name

    def constant(self, array: Any, dtype: Any = np.int64) -> str:
        name = f"c{len(self.constants)}"
        self.constants[name] = np.asarray(array, dtype)
        self.values[name] = torch_oracle.tensor(self.constants[name])
        return name

    def shape(self, name: str) -> list[int]:
        return list(self.values[name].shape)

    def dims(self, name: str, dynamic: bool) -> list[Any]:
        return [f"{name}_{axis}" if dynamic else size for axis, size in enumerate(self.shape(name))]

    def pick(self, low: int = 0, high: int = 4, where: Callable[[torch.Tensor], bool] = lambda x: True) -> str:
        """Return a value of a rank in a range, that was there or, sometimes or where there is none, a new input."""
        there = [x for x in self.floating if low <= self.values[x].dim() <= high and where(self.values[x])]
        if there and self.chance(0.85):
            return self.one_of(there[-6:])
        name = self.new([self.number(1, 4) for _ in range(self.number(max(low, 1), min(high, 4)))])
        if not where(self.values[name]):
            raise Rejected
        return name

    def distinct(self, low: int = 1, high: int = 4) -> str:
        """Return a value without equal elements, near which an extreme would change its place."""
        return self.pick(low, high, lambda x: gap(x) > 1e-3)

    def add(self, op_type: str, inputs: Sequence[str], outputs: int = 1, **attributes: Any) -> str:
        """Add a node and return its first output; the others stay in the graph, too."""
        names = [f"{op_type.lower()}{len(self.nodes)}_{i}" for i in range(outputs)]
        proto = helper.make_node(op_type, inputs, names, f"n{len(self.nodes)}", **attributes)
        parsed = [ir.serde.deserialize_attribute(attribute) for attribute in proto.attribute]
        node = ir.Node("", op_type, [], parsed, num_outputs=outputs)
        if op_type == "QuantizeLinear":
            node.outputs[0].dtype = ir.DataType.UINT8
        given = {name: attribute.value for name, attribute in node.attributes.items()}
        args = [self.values[x] if x else None for x in inputs]
        if "body" in given or "then_branch" in given:
            given |= {"outer": dict(self.values), "version": OPSET}
        with np.errstate(all="ignore"):
            found = torch_oracle.OPERATORS[op_type](*args, node=node, **(defaults("", op_type, OPSET) | given))
        results = list(found) if isinstance(found, tuple | list) else [found]
        for y in results[:outputs]:
            largest = 300.0 if op_type == "QuantizeLinear" else LARGEST
            if y.numel() == 0 or y.numel() > MOST_ELEMENTS or not (y.abs() < largest).all():
                raise Rejected
        self.nodes.append(proto)
        self.used.update(inputs)
        for name, y in zip(names, results, strict=False):
            self.values[name] = y
            if y.is_floating_point() and op_type != "QuantizeLinear":
                self.floating.append(name)
        return names[0]

    def positive(self, x: str) -> str:
        if float(self.values[x].min()) > 0.2:
            return x
        return self.add("Add", [self.add("Sigmoid", [x]), self.constant(0.3, np.float32)])

    def bounded(self, x: str) -> str:
        if float(self.values[x].abs().max()) < 0.9:
            return x
        return self.add("Mul", [self.add("Tanh", [x]), self.constant(0.85, np.float32)])

    def partner(self, x: str, like: Callable[[str], str] = lambda x: x) -> str:
        """Return a value that broadcasts with another, or to which that broadcasts."""
        shape = self.shape(x)
        there = [y for y in self.floating if broadcasts(shape, self.shape(y))]
        if there and self.chance():
            return like(self.one_of(there))
        kind = self.number(0, 3)
        if kind == 0:
            shape = shape[self.number(0, len(shape)) :]
        elif kind == 1:
            shape = [1 if self.chance() else n for n in shape]
        elif kind == 2 and len(shape) < 4:
            shape = [2, *shape]
        return like(self.new(shape))

    def to_model(self, dynamic: bool) -> tuple[onnx.ModelProto, dict[str, np.ndarray]]:
        """Return the model, all its ends and one value on the way as outputs, and its inputs."""
        floats = [x for x in self.floating if x not in self.inputs]
        ends = [x for x in floats if x not in self.used]
        on_the_way = [x for x in floats if x in self.used]
        outputs = ends + ([self.one_of(on_the_way)] if on_the_way and self.chance(0.3) else [])
        inputs = []
        taken = {x for node in self.nodes for x in node.input} | self.captured
        for name in filter(taken.__contains__, self.inputs):
            shape = self.dims(name, dynamic and name not in self.fixed)
            inputs.append(helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, shape))
        graph = helper.make_graph(
            self.nodes,
            "random",
            inputs,
            [helper.make_tensor_value_info(y, onnx.TensorProto.FLOAT, self.dims(y, dynamic)) for y in outputs],
            [onnx.numpy_helper.from_array(x, name) for name, x in self.constants.items()],
        )
        model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", OPSET)], ir_version=10)
        model = onnx.shape_inference.infer_shapes(model, data_prop=True)
        return model, {str(x.name): self.values[x.name].numpy().astype(np.float32) for x in inputs}


def gap(x: torch.Tensor) -> float:
    """Return the smallest distance of two elements."""
    ordered = x.detach().reshape(-1).sort().values
    return float((ordered[1:] - ordered[:-1]).min()) if len(ordered) > 1 else 1.0


def broadcasts(a: Sequence[int], b: Sequence[int]) -> bool:
    return all(m == n or 1 in (m, n) for m, n in zip(a[::-1], b[::-1], strict=False))


Maker = Callable[[Growing], Any]
MAKERS: dict[str, Maker] = {}


def maker(*op_types: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        for op_type in op_types:
            MAKERS[op_type] = lambda g, op_type=op_type: function(g, op_type)
        return function

    return register


@maker(
    *("Abs", "Asinh", "Atan", "Cos", "Cosh", "Erf", "Exp", "HardSwish", "Identity", "Mish", "Neg", "Relu"),
    *("Sigmoid", "Sin", "Sinh", "Softplus", "Softsign", "Tanh"),
)
def unary(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.pick()])


@maker("Log", "Reciprocal", "Sqrt")
def of_positive(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.positive(g.pick())])


@maker("Acos", "Asin", "Atanh", "Tan")
def of_bounded(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.bounded(g.pick())])


@maker("Acosh")
def acosh(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.add("Add", [g.positive(g.pick()), g.constant(1.2, np.float32)])])


PARAMETERS: dict[str, dict[str, tuple[float, float]]] = {
    "Celu": {"alpha": (0.5, 2)}, "Elu": {"alpha": (0.5, 2)}, "HardSigmoid": {"alpha": (0.1, 0.4), "beta": (0.3, 0.6)},
    "LeakyRelu": {"alpha": (0.05, 0.6)}, "Selu": {"alpha": (1, 2), "gamma": (0.7, 1.3)},
    "Shrink": {"lambd": (0.2, 0.8), "bias": (0, 0.3)}, "ThresholdedRelu": {"alpha": (0.2, 1)},
}  # fmt: skip


@maker(*PARAMETERS)
def with_parameters(g: Growing, op_type: str) -> None:
    given = {name: float(g.r.uniform(*ends)) for name, ends in PARAMETERS[op_type].items() if g.chance(0.8)}
    g.add(op_type, [g.pick()], **given)


@maker("Gelu")
def gelu(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.pick()], approximate=g.one_of(["none", "tanh"]))


@maker("Add", "Sub", "Mul")
def arithmetic(g: Growing, op_type: str) -> None:
    x = g.pick()
    g.add(op_type, [x, g.partner(x)] if g.chance(0.8) else [x, x])


@maker("Div")
def div(g: Growing, op_type: str) -> None:
    x = g.pick()
    g.add(op_type, [x, g.partner(x, g.positive)])


@maker("Pow")
def power(g: Growing, op_type: str) -> None:
    x = g.positive(g.pick())
    if g.chance():
        g.add(op_type, [x, g.constant(g.one_of([2, 3, 0.5, -1, 1.7, 1, 0]), np.float32)])
    else:
        g.add(op_type, [x, g.partner(x)])


@maker("Mod")
def mod(g: Growing, op_type: str) -> None:
    x = g.pick()
    g.add(op_type, [x, g.partner(x, g.positive)], fmod=1)


@maker("Sum", "Mean", "Max", "Min")
def several(g: Growing, op_type: str) -> None:
    x = g.pick()
    inputs = [x, *(g.new(g.shape(x)[g.number(0, 1) :]) for _ in range(g.number(0, 2)))]
    if op_type in ("Sum", "Mean") and g.chance():
        inputs.append(x)
    g.add(op_type, inputs)


@maker("PRelu")
def prelu(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    shape = g.shape(x)
    g.add(op_type, [x, g.new(g.one_of([shape, shape[1:] or [1], [1]]), fixed=True)])


@maker("Clip")
def clip(g: Growing, op_type: str) -> None:
    low, high = g.new([], -0.9, -0.6), g.new([], 1.0, 1.3)
    g.add(op_type, [g.pick(), *g.one_of([[low], ["", high], [low, high]])])


@maker("Where")
def where(g: Growing, op_type: str) -> None:
    x = g.pick()
    g.add(op_type, [g.constant(g.r.random(g.shape(x)) < 0.5, bool), x, g.partner(x)])


@maker("Cast", "CastLike", "OptionalGetElement")
def cast(g: Growing, op_type: str) -> None:
    if op_type == "OptionalGetElement":  # ONNX Runtime has no kernel for tensors
        raise Rejected
    x = g.pick()
    g.add(op_type, [x, g.pick()] if op_type == "CastLike" else [x], **({"to": 1} if op_type == "Cast" else {}))


@maker("Dropout")
def dropout(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.pick()])


@maker("MatMul")
def matmul(g: Growing, op_type: str) -> None:
    x = g.pick(1, 4)
    inner, before = g.shape(x)[-1], g.shape(x)[:-2]
    columns = g.number(1, 4)
    others = [[inner], [inner, columns], [*before, inner, columns], [*(1 for _ in before), inner, columns]]
    g.add(op_type, [x, g.new(g.one_of(others), fixed=g.chance())])


@maker("Gemm")
def gemm(g: Growing, op_type: str) -> None:
    x, a, b, columns = g.pick(2, 2), g.number(0, 1), g.number(0, 1), g.number(1, 4)
    rows, inner = g.shape(x)[::-1] if a else g.shape(x)
    w = g.new([columns, inner] if b else [inner, columns], fixed=True)
    c = [g.new(g.one_of([[columns], [1], [rows, columns], [rows, 1], [1, columns]]), fixed=True)]
    factors = {"alpha": float(g.r.uniform(0.3, 1.5)), "beta": float(g.r.uniform(0.3, 1.5))}
    g.add(op_type, [x, w, *(c if g.chance(0.7) else [])], transA=a, transB=b, **(factors if g.chance() else {}))


@maker("Einsum")
def einsum(g: Growing, op_type: str) -> None:
    equation = g.one_of(["ab,bc->ac", "ab,bc->ca", "ab,cb", "...b,bc->...c", "...b,bc", "ab->ba", "ab->a", "...a->..."])
    x = g.pick(2, 3 if "..." in equation else 2)
    size, n = g.shape(x)[-1], g.number(1, 3)
    second = [n, size] if equation == "ab,cb" else [size, n]
    g.add(op_type, [x, *([g.new(second)] if "," in equation else [])], equation=equation)


@maker("Det")
def det(g: Growing, op_type: str) -> None:
    n = g.number(1, 3)
    x = g.new([*([2] if g.chance() else []), n, n], fixed=True)
    g.add(op_type, [g.add("Sin", [x])])


def geometry(g: Growing, sizes: Sequence[int], kernel: Sequence[int]) -> dict[str, Any]:
    """Return random strides, dilations and pads that leave at least a window."""
    n = len(sizes)
    dilations = [g.number(1, 2) if (k - 1) * 2 < size else 1 for k, size in zip(kernel, sizes, strict=True)]
    given: dict[str, Any] = {"dilations": dilations} if g.chance(0.4) else {}
    if g.chance(0.6):
        given["strides"] = [g.number(1, 2) for _ in range(n)]
    return given


def padding(g: Growing, kernel: Sequence[int], automatic: bool = True) -> dict[str, Any]:
    if automatic and g.chance(0.3):
        return {"auto_pad": g.one_of(["SAME_UPPER", "SAME_LOWER", "VALID"])}
    return {"pads": [g.number(0, k - 1) for k in [*kernel, *kernel]]} if g.chance(0.7) else {}


def image(g: Growing, channels: int | None = None, low: int = 3, high: int = 6, distinct: bool = False) -> str:
    """Return a value with a batch, channels and one or two spatial axes."""
    there = [
        x
        for x in g.floating
        if 3 <= g.values[x].dim() <= 4
        and min(g.shape(x)[2:]) >= low
        and (channels is None or g.shape(x)[1] == channels)
    ]
    there = [x for x in there if not distinct or gap(g.values[x]) > 1e-3]
    if there and g.chance(0.8):
        return g.one_of(there)
    return g.new([g.number(1, 2), channels or g.number(1, 3), *(g.number(low, high) for _ in range(g.number(1, 2)))])


@maker("Conv")
def conv(g: Growing, op_type: str) -> None:
    x = image(g)
    group = g.one_of([1, g.shape(x)[1]])
    out, kernel = group * g.number(1, 2), [g.number(1, 3) for _ in g.shape(x)[2:]]
    given = geometry(g, g.shape(x)[2:], kernel)
    pads = padding(g, kernel, "dilations" not in given)
    w = g.new([out, g.shape(x)[1] // group, *kernel], -1, 1, fixed=True)
    g.add(op_type, [x, w, *([g.new([out], fixed=True)] if g.chance() else [])], group=group, **given, **pads)


@maker("ConvTranspose")
def conv_transpose(g: Growing, op_type: str) -> None:
    x = image(g)
    group = g.one_of([1, g.shape(x)[1]])
    kernel = [g.number(1, 3) for _ in g.shape(x)[2:]]
    given = geometry(g, g.shape(x)[2:], kernel)
    pads = {"pads": [g.number(0, (k - 1) // 2) for k in kernel * 2]} if g.chance() else {}
    if "strides" in given and g.chance():
        pads["output_padding"] = [s - 1 for s in given["strides"]]
    w = g.new([g.shape(x)[1], g.number(1, 2), *kernel], -1, 1, fixed=True)
    out = g.shape(w)[1] * group
    g.add(op_type, [x, w, *([g.new([out], fixed=True)] if g.chance() else [])], group=group, **given, **pads)


@maker("Col2Im")
def col2im(g: Growing, op_type: str) -> None:
    x = g.new([g.number(1, 2), g.number(1, 2) * 4, 6])
    g.add(op_type, [x, g.constant([3, 4]), g.constant([2, 2])])


@maker("MaxPool", "AveragePool", "LpPool")
def pool(g: Growing, op_type: str) -> None:
    x = image(g, distinct=op_type == "MaxPool")
    kernel = [g.number(1, 3) for _ in g.shape(x)[2:]]
    given = (
        geometry(g, g.shape(x)[2:], kernel) if op_type == "MaxPool" else {"strides": [g.number(1, 2) for _ in kernel]}
    )
    if op_type == "MaxPool" and g.chance():  # windows side by side
        given = {"strides": kernel}
    given |= padding(g, kernel, "dilations" not in given)
    if op_type == "AveragePool":
        given["count_include_pad"] = g.number(0, 1)
    if op_type == "LpPool":
        x, given["p"] = g.positive(x), g.number(1, 3)
    if "auto_pad" not in given and not any(given.get("pads", [])) and g.chance(0.4) and op_type != "LpPool":
        given["ceil_mode"] = 1
    g.add(op_type, [x], kernel_shape=kernel, **given)


@maker("GlobalAveragePool", "GlobalMaxPool", "GlobalLpPool")
def global_pool(g: Growing, op_type: str) -> None:
    x = image(g, low=1, distinct=op_type == "GlobalMaxPool")
    g.add(op_type, [x], **({"p": g.number(1, 3)} if op_type == "GlobalLpPool" else {}))


@maker("MaxUnpool")
def max_unpool(g: Growing, op_type: str) -> None:
    x = g.new([1, 1, 2, 2])
    g.add(op_type, [x, g.constant([[[[5, 2], [8, 15]]]])], kernel_shape=[2, 2], strides=[2, 2])


@maker("MaxRoiPool")
def max_roi_pool(g: Growing, op_type: str) -> None:
    x = g.distinct(4, 4)
    rois = np.array([[0, 0, 0, 2, 2], [0, 1, 1, 3, 3]], np.float32)
    g.add(op_type, [x, g.constant(rois, np.float32)], pooled_shape=[g.number(1, 2), g.number(1, 2)])


@maker("GridSample")
def grid_sample(g: Growing, op_type: str) -> None:
    x = g.new([2, g.number(1, 2), 3, 4])
    grid = g.new([2, 2, 3, 2], -0.85, 0.85)
    mode = g.one_of(["linear", "nearest", "cubic"])
    pad = g.one_of(["zeros", "border", "reflection"])
    g.add(op_type, [x, grid], mode=mode, padding_mode=pad, align_corners=g.number(0, 1))


@maker("AffineGrid")
def affine_grid(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.new([2, 2, 3]), g.constant([2, 1, 3, 4])], align_corners=g.number(0, 1))


@maker("Resize")
def resize(g: Growing, op_type: str) -> None:
    x = image(g, low=2)
    mode = g.one_of(["linear", "nearest"] if len(g.shape(x)) == 3 else ["linear", "nearest", "cubic"])
    how = {"coordinate_transformation_mode": "asymmetric", "nearest_mode": "floor"} if mode == "nearest" else {}
    if mode != "nearest" and g.chance():
        how = {"coordinate_transformation_mode": "align_corners"}
    sizes = [*g.shape(x)[:2], *(g.number(n, 2 * n) for n in g.shape(x)[2:])]
    g.add(op_type, [x, "", "", g.constant(sizes)], mode=mode, **how)


@maker("BatchNormalization")
def batch_normalization(g: Growing, op_type: str) -> None:
    x = g.pick(2, 4)
    n = g.shape(x)[1]
    vectors = [g.new([n], fixed=True) for _ in range(3)]
    g.add(op_type, [x, *vectors, g.new([n], 0.4, 2, fixed=True)], epsilon=g.one_of([1e-5, 0.1]))


@maker("LayerNormalization")
def layer_normalization(g: Growing, op_type: str) -> None:
    x = g.pick(1, 4, lambda x: x.shape[-1] > 1)
    axis = g.number(-1 if g.chance() else -len(g.shape(x)), -1)
    shape = g.shape(x)[axis:]
    vectors = [g.new(shape, fixed=True) for _ in range(g.number(1, 2))]
    g.add(op_type, [x, *vectors], axis=axis, epsilon=g.one_of([1e-2, 0.1]))


@maker("InstanceNormalization")
def instance_normalization(g: Growing, op_type: str) -> None:
    x = image(g)
    g.add(op_type, [x, *(g.new([g.shape(x)[1]], fixed=True) for _ in range(2))], epsilon=g.one_of([1e-2, 0.1]))


@maker("Softmax", "LogSoftmax")
def softmax(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    g.add(op_type, [x], axis=g.number(-len(g.shape(x)), len(g.shape(x)) - 1))


@maker("LpNormalization")
def lp_normalization(g: Growing, op_type: str) -> None:
    x = g.pick(1, 4, lambda x: bool((x.abs() > 0.05).all()))
    g.add(op_type, [x], axis=g.number(-len(g.shape(x)), len(g.shape(x)) - 1), p=g.number(1, 2))


@maker("LRN")
def lrn(g: Growing, op_type: str) -> None:
    x = g.pick(4, 4)
    g.add(
        op_type,
        [x],
        size=g.one_of([1, 3, 5]),
        alpha=float(g.r.uniform(0.1, 1)),
        beta=float(g.r.uniform(0.3, 1.2)),
    )


@maker("QuantizeLinear", "DequantizeLinear")
def quantize(g: Growing, op_type: str) -> None:
    x, scale, zero = g.pick(), g.constant(0.037, np.float32), g.constant(120, np.uint8)
    g.add("DequantizeLinear", [g.add("QuantizeLinear", [x, scale, zero]), g.new([], 0.02, 0.05), zero])


@maker("DynamicQuantizeLinear")
def dynamic_quantize(g: Growing, op_type: str) -> None:
    raise Rejected  # its extremes have gradients through the scale, which tests/test_quantization.py compares


@maker("DFT")
def dft(g: Growing, op_type: str) -> None:
    x = g.new([2, g.number(3, 6), 2])
    g.add(op_type, [x, "", g.constant(1)], inverse=g.number(0, 1))


@maker("STFT")
def stft(g: Growing, op_type: str) -> None:
    x = g.new([2, 8, 1], fixed=True)
    g.add(op_type, [x, g.constant(g.number(1, 3)), g.new([4], 0.4, 1.2, fixed=True)], onesided=0)


@maker(
    *(f"Reduce{x}" for x in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min")),
    *("ReduceProd", "ReduceSum", "ReduceSumSquare"),
)
def reduction(g: Growing, op_type: str) -> None:
    x = g.distinct() if op_type in ("ReduceMax", "ReduceMin") else g.pick(1)
    if op_type in ("ReduceLogSum", "ReduceL2", "ReduceProd"):
        x = g.positive(x)
    rank = len(g.shape(x))
    axes = sorted(g.r.permutation(rank)[: g.number(0, rank)].tolist())
    axes = [axis - rank if g.chance(0.3) else axis for axis in axes]
    noop = int(not axes and g.chance(0.3))
    g.add(
        op_type,
        [x, *([g.constant(axes)] if axes or g.chance() else [])],
        keepdims=g.number(0, 1),
        noop_with_empty_axes=noop,
    )


@maker("CumSum")
def cumulative(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    axis = g.number(-len(g.shape(x)), len(g.shape(x)) - 1)
    g.add(op_type, [x, g.constant(axis)], exclusive=g.number(0, 1), reverse=g.number(0, 1))


@maker("Range")
def range_(g: Growing, op_type: str) -> None:
    raise Rejected  # how many elements there are depends on the numbers: tests/gradient_cases.py


@maker("Reshape")
def reshape(g: Growing, op_type: str) -> None:
    x = g.pick()
    count = int(g.values[x].numel())
    sizes = [n for n in range(1, count + 1) if count % n == 0]
    first = g.one_of(sizes)
    g.add(op_type, [x, g.constant(g.one_of([[-1], [first, count // first], [first, -1], [1, count]]))])


@maker("Flatten")
def flatten(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    g.add(op_type, [x], axis=g.number(-len(g.shape(x)), len(g.shape(x))))


@maker("Squeeze")
def squeeze(g: Growing, op_type: str) -> None:
    x = g.add("Unsqueeze", [g.pick(0, 3), g.constant([0])])
    ones = [axis for axis, n in enumerate(g.shape(x)) if n == 1]
    g.add(op_type, [x, g.constant([g.one_of(ones)])])


@maker("Unsqueeze")
def unsqueeze(g: Growing, op_type: str) -> None:
    x = g.pick(0, 3)
    g.add(op_type, [x, g.constant([g.number(-1, len(g.shape(x)))])])


@maker("Transpose")
def transpose(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    perm = g.r.permutation(len(g.shape(x))).tolist()
    g.add(op_type, [x], **({"perm": perm} if g.chance(0.8) else {}))


@maker("Expand")
def expand(g: Growing, op_type: str) -> None:
    x = g.new([1 if g.chance() else g.number(1, 3) for _ in range(g.number(1, 3))])
    shape = [g.number(2, 3) if n == 1 and g.chance() else n for n in g.shape(x)]
    g.add(op_type, [x, g.constant([2, *shape] if g.chance() else shape)])


@maker("Concat")
def concat(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    shape, axis = g.shape(x), g.number(0, len(g.shape(x)) - 1)
    others = []
    for _ in range(g.number(0, 2)):
        others.append(g.new([*shape[:axis], g.number(1, 3), *shape[axis + 1 :]]))
    g.add(op_type, [x, *others, *([x] if g.chance(0.3) else [])], axis=axis - (len(shape) if g.chance() else 0))


@maker("Split")
def split(g: Growing, op_type: str) -> None:
    x = g.pick(1, 4, lambda x: max(x.shape) > 1)
    axis = int(np.argmax(g.shape(x)))
    size = g.shape(x)[axis]
    first = g.number(1, size - 1)
    if g.chance():
        g.add(op_type, [x, g.constant([first, size - first])], 2, axis=axis)
    elif size % 2 == 0:
        g.add(op_type, [x], 2, axis=axis, num_outputs=2)


@maker("Slice")
def slice_(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    axis = g.number(0, len(g.shape(x)) - 1)
    size = g.shape(x)[axis]
    start = g.number(0, size - 1)
    ends = {1: size, 2: 2**62, -1: -(2**62)}
    step = g.one_of([1, 1, 2, -1])
    given = [[start - (size if g.chance() and step > 0 else 0)], [ends[step]], [axis], [step]]
    g.add(op_type, [x, *(g.constant(n) for n in given[: g.one_of([3, 4]) if step == 1 else 4])])


@maker("Tile")
def tile(g: Growing, op_type: str) -> None:
    x = g.pick(1, 3)
    g.add(op_type, [x, g.constant([g.number(1, 2) for _ in g.shape(x)])])


@maker("Pad")
def pad(g: Growing, op_type: str) -> None:
    x = g.pick(1, 4, lambda x: min(x.shape) > 1)
    n = len(g.shape(x))
    mode = g.one_of(["constant", "constant", "reflect", "edge", "wrap"])
    low = -1 if mode == "constant" and min(g.shape(x)) > 2 else 0
    pads = [g.number(low, 1) for _ in range(2 * n)]
    value = [g.new([], 0.3, 0.9)] if mode == "constant" and g.chance() else []
    g.add(op_type, [x, g.constant(pads), *value], mode=mode)


@maker("Trilu")
def trilu(g: Growing, op_type: str) -> None:
    k = [g.constant(g.number(-1, 1))] if g.chance() else []
    g.add(op_type, [g.pick(2), *k], upper=g.number(0, 1))


@maker("DepthToSpace")
def depth_to_space(g: Growing, op_type: str) -> None:
    g.add(
        op_type,
        [g.new([g.number(1, 2), 4 * g.number(1, 2), 2, 3])],
        blocksize=2,
        mode=g.one_of(["DCR", "CRD"]),
    )


@maker("SpaceToDepth")
def space_to_depth(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.new([g.number(1, 2), g.number(1, 2), 4, 2])], blocksize=2)


@maker("ReverseSequence")
def reverse_sequence(g: Growing, op_type: str) -> None:
    x = g.pick(2)
    time = g.number(0, 1)
    lengths = [g.number(1, g.shape(x)[time]) for _ in range(g.shape(x)[1 - time])]
    g.add(op_type, [x, g.constant(lengths)], batch_axis=1 - time, time_axis=time)


@maker("Gather")
def gather(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    axis = g.number(-len(g.shape(x)), len(g.shape(x)) - 1)
    size = g.shape(x)[axis]
    shape = g.one_of([[], [1], [3], [2, 2]])
    dtype = g.one_of([np.int64, np.int32])
    g.add(op_type, [x, g.constant(g.r.integers(-size, size, shape), dtype)], axis=axis)


@maker("GatherElements")
def gather_elements(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    axis = g.number(0, len(g.shape(x)) - 1)
    size = g.shape(x)[axis]
    g.add(op_type, [x, g.constant(g.r.integers(-size, size, g.shape(x)))], axis=axis)


@maker("GatherND")
def gather_nd(g: Growing, op_type: str) -> None:
    x = g.pick(2)
    sizes = g.shape(x)
    if g.chance() and len(sizes) > 2:
        g.add(op_type, [x, g.constant([[g.number(0, sizes[1] - 1)] for _ in range(sizes[0])])], batch_dims=1)
    else:
        g.add(op_type, [x, g.constant([[g.number(-n, n - 1) for n in sizes[:2]] for _ in range(3)])])


@maker("TopK")
def top_k(g: Growing, op_type: str) -> None:
    x = g.distinct()
    axis = g.number(-len(g.shape(x)), len(g.shape(x)) - 1)
    g.add(op_type, [x, g.constant([g.number(1, g.shape(x)[axis])])], 2, axis=axis, largest=g.number(0, 1))


@maker("Compress")
def compress(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    axis = g.number(0, len(g.shape(x)) - 1)
    flat = g.chance(0.3)
    size = int(g.values[x].numel()) if flat else g.shape(x)[axis]
    condition = g.r.random(size) < 0.6
    condition[g.number(0, size - 1)] = True
    g.add(op_type, [x, g.constant(condition, bool)], **({} if flat else {"axis": axis}))


@maker("Unique")
def unique(g: Growing, op_type: str) -> None:
    g.add(op_type, [g.distinct()], sorted=g.number(0, 1))


@maker("OneHot")
def one_hot(g: Growing, op_type: str) -> None:
    g.add(
        op_type,
        [g.constant(g.r.integers(-3, 3, 4)), g.constant(3), g.new([2], fixed=True)],
        axis=g.number(-1, 1),
    )


@maker("ScatterElements", "ScatterND")
def scatter(g: Growing, op_type: str) -> None:
    reduction = g.one_of(["none", "add", "mul", "max", "min"])
    x = g.distinct() if reduction in ("max", "min") else g.pick(1)
    if reduction == "mul":
        x = g.positive(x)
    rows, rest = g.shape(x)[0], g.shape(x)[1:]
    count = g.number(1, rows)
    at = g.r.permutation(rows)[:count]
    updates = g.new([count, *rest], 0.31, 1.9)
    where = (
        np.broadcast_to(at.reshape(-1, *[1] * len(rest)), [count, *rest])
        if op_type == "ScatterElements"
        else at[:, None]
    )
    g.add(op_type, [x, g.constant(where), updates], reduction=reduction)


def body(name: str, text: str) -> onnx.GraphProto:
    return onnx.parser.parse_graph(f"{name} {text}")


@maker("If")
def if_(g: Growing, op_type: str) -> None:
    x = g.pick(1)
    count = len(g.nodes)
    then = body(f"then{count}", f"() => (float t{count}) {{ t{count} = Tanh({x}) }}")
    other = body(f"else{count}", f"() => (float e{count}) {{ e{count} = Mul({x}, {x}) }}")
    for branch in (then, other):
        branch.output[0].type.CopyFrom(helper.make_tensor_type_proto(onnx.TensorProto.FLOAT, None))
    g.used.add(x)
    g.captured.add(x)
    g.add(op_type, [g.constant(g.chance(), bool)], then_branch=then, else_branch=other)


@maker("Scan")
def scan(g: Growing, op_type: str) -> None:
    length, width = g.number(1, 3), g.number(1, 3)
    text = (
        f"(float[{width}] s, float[{width}] v) => (float[{width}] n, float[{width}] y)"
        " { m = Mul(s, v) n = Tanh(m) y = Add(n, v) }"
    )
    way = g.number(0, 1)
    g.add(
        op_type,
        [g.new([width], fixed=True), g.new([length, width], fixed=True)],
        2,
        body=body("scan", text),
        num_scan_inputs=1,
        scan_input_directions=[way],
        scan_output_directions=[g.number(0, 1)],
    )


@maker("Loop")
def loop(g: Growing, op_type: str) -> None:
    width = g.number(1, 3)
    text = (
        f"(int64 i, bool on, float[{width}] s) => (bool still, float[{width}] n, float[{width}] y)"
        " { still = Identity(on) q = Mul(s, s) n = Sin(q) y = Add(n, s) }"
    )
    g.add(
        op_type,
        [g.constant(g.number(1, 3)), g.constant(True, bool), g.new([width], fixed=True)],
        2,
        body=body("loop", text),
    )


@maker("RNN", "GRU", "LSTM")
def recurrent(g: Growing, op_type: str) -> None:
    direction = g.one_of(["forward", "reverse", "bidirectional"])
    ways, gates = 1 + (direction == "bidirectional"), {"RNN": 1, "GRU": 3, "LSTM": 4}[op_type]
    hidden, features = 2, g.number(1, 3)
    x = g.new([g.number(1, 3), g.number(1, 2), features])
    w = g.new([ways, gates * hidden, features], -1, 1, fixed=True)
    r = g.new([ways, gates * hidden, hidden], -1, 1, fixed=True)
    b = [g.new([ways, 2 * gates * hidden], -1, 1, fixed=True)] if g.chance() else []
    more = {"linear_before_reset": g.number(0, 1)} if op_type == "GRU" else {}
    count = 3 if op_type == "LSTM" else 2
    g.add(op_type, [x, w, r, *b], count, hidden_size=hidden, direction=direction, **more)


def grown(seed: int) -> Growing:
    """Return a random graph of 3 to 12 nodes, of which the first is, by turns, of each operator of the table."""
    g = Growing(seed)
    wanted = g.number(3, 12)
    names = list(MAKERS)
    attempts = [names[seed % len(names)]]
    for _ in range(400):
        name = attempts.pop() if attempts else g.one_of(names)
        before = (len(g.nodes), len(g.floating), len(g.inputs))
        try:
            MAKERS[name](g)
        except Rejected:
            if len(g.nodes) == before[0]:  # inputs that it made stay, if a later node takes them
                continue
        if len(g.nodes) >= wanted:
            break
    return g

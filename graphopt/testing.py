"""Proves gradients: what rules emit against finite differences, in float64, by the reference evaluator."""

from __future__ import annotations

import math
import pkgutil
from collections.abc import Collection, Mapping
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun
from onnx.reference.ops import op_conv_transpose, op_pad, op_scan

from graphopt.emitter import Emitter
from graphopt.errors import GraphoptError
from graphopt.loading import Source, load

Arrays = dict[str, np.ndarray]

FLOATING = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}


def check_gradient(
    source: Source,
    inputs: Mapping[str, np.ndarray],
    *,
    tolerance: float = 1e-6,
    step: float = 1e-5,
    double: bool = True,
    held: Collection[str] = (),
    sample: int | None = None,
) -> Arrays:
    """Compare the gradient of a random projection of a model's floating outputs with finite differences.

    Both are computed by the reference evaluator, in float64 whatever the model's precision is, unless
    `double` is false: for operators that have no float64.

    Args:
        inputs: the point, an array for each of the model's inputs: no kink may be within `step` of it.
        tolerance: the largest error, relative to the largest element of an input's gradient.
        held: inputs that are not moved.
        sample: how many random elements of each input are moved; all by default.

    Returns:
        The emitted gradient of each floating input.

    Raises:
        GraphoptError: a gradient is wrong, names all that are; or there is no rule for an operator.
    """
    model = in_double(normalized(source)) if double else load(source)
    doubles = {x.name for x in model.graph.inputs if double and x.dtype == ir.DataType.DOUBLE}
    point = {name: as_double(x) if name in doubles else x for name, x in inputs.items()}
    forward = evaluator(model)
    outputs = dict(zip(names(model.graph.outputs), forward.run(None, point), strict=True))
    seeds = random_seeds(outputs)
    weighed = (
        np.vdot(np.abs(finite(outputs[name.removesuffix(".seed")])), seed) for name, seed in seeds.items()
    )
    rounding = np.finfo(np.float64 if double else np.float32).eps * float(sum(weighed)) / step
    gradients = run(gradient_model(model), point | seeds)
    wrong = []
    for name, x in point.items():
        if name in held or not is_floating(x):
            continue
        found = gradients.setdefault(f"{name}.grad", np.zeros_like(x))
        at = chosen(x, sample)
        expected = differences(forward, point, name, seeds, step, at)
        scale = float(np.max(np.abs(found), initial=rounding / tolerance))
        if found.shape == x.shape:
            found = found[at]
        error = distance(found, expected, scale)
        if not error <= tolerance:
            wrong.append(f"{name!r} by {error:.1e} (found {found.tolist()}, expected {expected.tolist()})")
    if wrong:
        raise GraphoptError(
            f"gradients differ from finite differences by more than {tolerance:g}: {'; '.join(wrong)}"
        )
    return {name.removesuffix(".grad"): array for name, array in gradients.items()}


def gradient_model(source: Source) -> ir.Model:
    """Return the model from inputs, and a seed `NAME.seed` a floating output, to gradients `NAME.grad`."""
    model = normalized(source)
    differentiable = pkgutil.resolve_name("passes.gradient.walk:is_differentiable")
    wrt, seeds = [x for x in model.graph.inputs if differentiable(x)], {}
    for y in filter(differentiable, model.graph.outputs):
        seeds[y] = ir.Value(name=f"{y.name}.seed", type=y.type, shape=y.shape)
    model.graph.inputs.extend(seeds.values())
    with Emitter(model) as op:
        gradients = pkgutil.resolve_name("passes.gradient:backward")(op, model.graph, seeds, wrt)
        model.graph.outputs.clear()
        for x, gradient in gradients.items():
            output = op.Identity(gradient, _outputs=[f"{x.name}.grad"])
            output.type, output.shape = x.type, x.shape
            model.graph.outputs.append(output)
    model.graph.sort()
    return model


def normalized(source: Source) -> ir.Model:
    """Return a copy of a model in the form that rules expect."""
    model = load(source)
    pkgutil.resolve_name("passes:Normalize")()(model)
    return model


def in_double(source: Source) -> ir.Model:
    """Return a copy of a model with float64 in the place of every other floating type."""
    model = load(source)
    for output in model.graph.outputs:
        output.type = output.shape = None
    for graph in model.graphs():
        for value in [*graph.inputs, *graph.outputs] if graph is not model.graph else []:
            value.type = ir.TensorType(ir.DataType.DOUBLE) if value.dtype in FLOATING else value.type
    for value in {*model.graph.inputs, *model.graph.initializers.values()}:
        if value.dtype not in FLOATING or not all(
            takes_double(*use, model.opset_imports[""]) for use in value.uses()
        ):
            continue
        value.type = ir.TensorType(ir.DataType.DOUBLE)
        if value.const_value is not None:
            value.const_value = ir.tensor(as_double(value.const_value.numpy()), name=value.name)
    for node in model.graph.all_nodes():
        for output in node.outputs:
            if output not in model.graph.outputs:
                output.type = output.shape = None
        if not all(
            takes_double(*use, model.opset_imports[""]) for output in node.outputs for use in output.uses()
        ):
            continue
        if node.op_type == "ConstantOfShape" and not node.attributes:
            node.attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1))))
        for name, attribute in list(node.attributes.items()):
            if name == "value_float":
                del node.attributes[name]
                node.attributes.add(ir.AttrTensor("value", ir.tensor(np.float64(attribute.as_float()))))
            elif attribute.type == ir.AttributeType.TENSOR:
                node.attributes.add(ir.AttrTensor(name, ir.tensor(as_double(attribute.as_tensor().numpy()))))
            elif _is_precision(node, name) and attribute.as_int() in FLOATING:
                node.attributes.add(ir.AttrInt64(name, ir.DataType.DOUBLE))
    return model


def _is_precision(node: ir.Node, name: str) -> bool:
    """Tell whether an attribute names an element type that may be float64."""
    names = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}
    return name in names and (node.op_type, name) != ("LayerNormalization", "stash_type")


def takes_double(node: ir.Node, index: int, version: int) -> bool:
    """Tell whether an input of a node may be float64; a few are float32 alone."""
    if node.domain != "":
        return True
    schema = onnx.defs.get_schema(node.op_type, version, "")
    formal = schema.inputs[min(index, len(schema.inputs) - 1)]
    return not any("float" in name for name in formal.types) or any("double" in name for name in formal.types)


def as_double(array: np.ndarray) -> np.ndarray:
    """Return floating numbers as float64 and others as they are."""
    return array.astype(np.float64) if is_floating(array) else array


def is_floating(array: Any) -> bool:
    """Tell whether `array` is one of floating numbers, of 2 bytes or more."""
    return isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)


def finite(array: np.ndarray) -> np.ndarray:
    """Return an array with 0 for what is no number."""
    return np.nan_to_num(array, nan=0, posinf=0, neginf=0)


def chosen(x: np.ndarray, sample: int | None) -> tuple[np.ndarray, ...]:
    """Return the indices of all finite elements, or of a random sample of them."""
    flat = np.flatnonzero(np.isfinite(x))
    if sample is not None and sample < flat.size:
        flat = np.sort(np.random.default_rng(0).choice(flat, sample, replace=False))
    return np.unravel_index(flat, x.shape) if x.shape else ()


def random_seeds(outputs: Mapping[str, np.ndarray]) -> Arrays:
    """Return the weights `NAME.seed` of a projection, for each floating output; 0 for what is no number."""
    random = np.random.default_rng(0)
    floating = {name: y for name, y in outputs.items() if is_floating(y)}
    return {
        f"{name}.seed": np.asarray(random.uniform(0.5, 1.5, y.shape) * np.isfinite(y), y.dtype)
        for name, y in floating.items()
    }


def differences(
    forward: ReferenceEvaluator,
    point: Mapping[str, np.ndarray],
    name: str,
    seeds: Arrays,
    step: float,
    at: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Return the central differences of the projected outputs by the elements `at` some indices of one input."""
    projected = [name.removesuffix(".seed") for name in seeds]
    slopes = np.zeros_like(point[name][at])
    indices = zip(*at, strict=True) if at else [()]
    for number, index in enumerate(indices):
        values = []
        for sign in (1, -1):
            moved = point[name].copy()
            moved[index] += sign * step
            outputs = map(finite, forward.run(projected, {**point, name: moved}))
            values.append(sum(np.vdot(y, seed) for y, seed in zip(outputs, seeds.values(), strict=True)))
        slopes[number if at else ()] = (values[0] - values[1]) / (2 * step)
    return slopes


def distance(found: np.ndarray, expected: np.ndarray, least: float = 0.0) -> float:
    """Return the largest difference, relative to the largest expected number, or `least`, unless all are 0."""
    if found.shape != expected.shape:
        return float("inf")
    scale = float(np.max(np.abs(expected), initial=least)) or 1.0
    return float(np.max(np.abs(found.astype(np.float64) - expected), initial=0.0)) / scale


def run(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Run a model by the reference evaluator and return its outputs by name."""
    return dict(zip(names(model.graph.outputs), evaluator(model).run(None, dict(inputs)), strict=True))


def names(values: Any) -> list[str]:
    """Return the names of values."""
    return [value.name for value in values]


def evaluator(model: ir.Model) -> ReferenceEvaluator:
    """Return the reference evaluator of a model, with operators mended that onnx 1.23 computes wrong."""
    proto: onnx.ModelProto = ir.to_proto(model)
    return ReferenceEvaluator(
        proto, new_ops=[ConvTranspose, Erf, GatherElements, Gelu, GlobalMaxPool, LRN, MaxPool, Pad, Scan]
    )


class ConvTranspose(OpRun):
    """The reference, a group at a time: by itself it mixes the channels of groups."""

    op_domain = ""

    def _run(self, x: np.ndarray, w: np.ndarray, bias: np.ndarray | None = None, **attributes: Any) -> Any:
        group = attributes.pop("group") or 1
        whole: Any = op_conv_transpose.ConvTranspose._run
        parts = [
            whole(self, data, weights, None, group=1, **attributes)[0]
            for data, weights in zip(np.split(x, group, 1), np.split(w, group, 0), strict=True)
        ]
        y = np.concatenate(parts, axis=1)
        return (y if bias is None else y + bias.reshape(-1, *[1] * (x.ndim - 2)),)


class MaxPool(OpRun):
    """Maxima with their positions: the reference has none for strides of 1, and mistakes SAME_LOWER."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        auto_pad: str = "NOTSET",
        ceil_mode: int = 0,
        dilations: list[int] | None = None,
        kernel_shape: list[int] | None = None,
        pads: list[int] | None = None,
        storage_order: int = 0,
        strides: list[int] | None = None,
    ) -> Any:
        kernel = list(kernel_shape or [])
        n, sizes = len(kernel), x.shape[2:]
        pads, strides, dilations = pads or [0] * 2 * n, strides or [1] * n, dilations or [1] * n
        position, inside = np.zeros((), np.int64), np.ones((), bool)
        for i, (size, stride) in enumerate(zip(sizes, strides, strict=True)):
            extent, begin, end = (kernel[i] - 1) * dilations[i] + 1, pads[i], pads[n + i]
            if auto_pad.startswith("SAME"):
                total = max((-(-size // stride) - 1) * stride + extent - size, 0)
                begin = total // 2 if auto_pad == "SAME_UPPER" else total - total // 2
                end = total - begin
            room = size + begin + end - extent
            windows = (-(-room // stride) if ceil_mode else room // stride) + 1
            if ceil_mode and (windows - 1) * stride >= size + begin:
                windows -= 1
            at = np.arange(windows)[:, None] * stride + np.arange(kernel[i]) * dilations[i] - begin
            position = np.add.outer(position * size, np.clip(at, 0, size - 1))
            inside = np.logical_and.outer(inside, (at >= 0) & (at < size))
        windows_first = [*range(0, 2 * n, 2), *range(1, 2 * n, 2)]
        position, inside = position.transpose(windows_first), inside.transpose(windows_first)
        flat = x.reshape(*x.shape[:2], -1)[:, :, position]
        shape = (*flat.shape[: 2 + n], -1)
        best = np.where(inside, flat, -np.inf).reshape(shape).argmax(-1)[..., None]
        chosen = np.take_along_axis(np.broadcast_to(position, flat.shape).reshape(shape), best, -1)[..., 0]
        y = np.take_along_axis(flat.reshape(shape), best, -1)[..., 0]
        if len(self.onnx_node.output) == 1:
            return (y,)
        if storage_order:
            chosen = np.ravel_multi_index(np.unravel_index(chosen, sizes), sizes, order="F")
        planes = np.arange(x.shape[0] * x.shape[1]).reshape(*x.shape[:2], *[1] * n) * np.prod(
            sizes, dtype=np.int64
        )
        return y, planes + chosen


class GlobalMaxPool(OpRun):
    """The reference takes every input for an image."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> Any:
        return (x.max(axis=tuple(range(2, x.ndim)), keepdims=True),)


def erf(x: np.ndarray) -> np.ndarray:
    return np.vectorize(math.erf, otypes=[x.dtype])(x)


class Erf(OpRun):
    """The reference has float32's digits alone."""

    op_domain = ""

    def _run(self, x: np.ndarray) -> Any:
        return (erf(x),)


class Gelu(OpRun):
    """The reference expands it to its own Erf."""

    op_domain = ""

    def _run(self, x: np.ndarray, approximate: str = "none") -> Any:
        if approximate == "tanh":
            return (0.5 * x * (1 + np.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),)
        return (0.5 * x * (1 + erf(x * math.sqrt(0.5))),)


class LRN(OpRun):
    """The reference takes the batch for the channels."""

    op_domain = ""

    def _run(self, x: np.ndarray, alpha: float, beta: float, bias: float, size: int) -> Any:
        channels = np.arange(x.shape[1])
        offset = channels - channels[:, None]
        near = (offset >= -((size - 1) // 2)) & (offset <= size // 2)
        squares = np.einsum("ij,nj...->ni...", near.astype(x.dtype), x * x)
        return (x / (bias + alpha / size * squares) ** beta,)


class Scan(op_scan.Scan):
    """The reference goes forward alone."""

    op_domain = ""

    def __init__(self, onnx_node: onnx.NodeProto, run_params: dict[str, Any]) -> None:
        given = {x.name: list(x.ints) for x in onnx_node.attribute if x.name.endswith("_directions")}
        forward = onnx.NodeProto()
        forward.CopyFrom(onnx_node)
        for attribute in [x for x in forward.attribute if x.name in given]:
            forward.attribute.remove(attribute)
        super().__init__(forward, run_params)  # type: ignore[no-untyped-call]
        self.backward_inputs = given.get("scan_input_directions", [])
        self.backward_outputs = given.get("scan_output_directions", [])

    def _run(self, *args: Any, **attributes: Any) -> Any:
        first = len(args) - self.num_scan_inputs  # type: ignore[attr-defined]
        whole: Any = super()._run
        outputs = list(whole(*turned(args, first, self.backward_inputs), **attributes))
        return tuple(turned(outputs, first, self.backward_outputs))


def turned(arrays: Any, first: int, directions: list[int]) -> list[Any]:
    """Return arrays, those from the `first` on that have a direction turned about."""
    arrays = list(arrays)
    for i, backward in enumerate(directions, first):
        arrays[i] = np.flip(arrays[i], 0) if backward else arrays[i]
    return arrays


class GatherElements(OpRun):
    """The reference takes no more than 64 elements, and no fewer than there are along the other axes."""

    op_domain = ""

    def _run(self, x: np.ndarray, indices: np.ndarray, axis: int = 0) -> Any:
        places: list[np.ndarray] = list(np.indices(indices.shape))
        places[axis] = indices
        return (x[tuple(places)],)


class Pad(OpRun):
    """The reference refuses negative pads."""

    op_domain = ""

    def _run(
        self,
        x: np.ndarray,
        pads: np.ndarray,
        value: np.ndarray | None = None,
        axes: np.ndarray | None = None,
        mode: str = "constant",
    ) -> Any:
        begin, end = np.reshape(pads, (2, -1))
        cut = [slice(None)] * x.ndim
        for axis, first, last in zip(range(x.ndim) if axes is None else axes, begin, end, strict=True):
            cut[axis] = slice(max(-first, 0), x.shape[axis] - max(-last, 0))
        pad: Any = op_pad.Pad_18._run
        return pad(self, x[tuple(cut)], np.maximum(pads, 0), value, axes, mode)

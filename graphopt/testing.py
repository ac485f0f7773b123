"""Proves gradients: what rules emit against finite differences, in float64, by the reference evaluator."""

from __future__ import annotations

import pkgutil
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphopt.emitter import Emitter
from graphopt.errors import GraphoptError
from graphopt.loading import Source, load
from graphopt.reference import evaluator
from graphopt.schemas import takes

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
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    model = in_precision(normalized(source), dtype)
    point = in_types(model, inputs)
    forward = evaluator(model)
    outputs = dict(zip(names(model.graph.outputs), forward.run(None, point), strict=True))
    seeds = random_seeds(outputs)
    weighed = (
        np.vdot(np.abs(finite(outputs[name.removesuffix(".seed")])), seed) for name, seed in seeds.items()
    )
    rounding = np.finfo(dtype.numpy()).eps * float(sum(weighed)) / step
    gradients = run(gradient_model(model), point | seeds)
    wrong = []
    for name, x in point.items():
        if name in held or not is_floating(x):
            continue
        found = gradients.setdefault(f"{name}.grad", np.zeros_like(x))
        at = chosen(x, sample, outputs.values())
        expected = differences(forward, point, name, seeds, step, at)
        scale = float(np.nanmax(np.abs(found), initial=rounding / tolerance))
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


def in_types(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Return arrays in the precisions that a model's inputs have."""
    dtypes = {x.name: x.dtype for x in model.graph.inputs if x.dtype in FLOATING}
    return {name: as_precision(x, dtypes[name]) if name in dtypes else x for name, x in inputs.items()}


def gradient_model(
    source: Source, gradient: str = "passes.Gradient", by: Collection[str] | None = None
) -> ir.Model:
    """Return the model from inputs, and a seed `NAME.seed` a floating output, to gradients `NAME.grad`.

    Args:
        gradient: the pass that the gradients come from.
        by: the inputs to differentiate by; all floating ones by default.
    """
    model = normalized(source)
    differentiable = pkgutil.resolve_name("passes.gradients.walk:is_differentiable")
    wrt = [x for x in model.graph.inputs if differentiable(x) and (by is None or x.name in by)]
    seeds = {}
    for y in filter(differentiable, model.graph.outputs):
        seeds[y] = ir.Value(name=f"{y.name}.seed", type=y.type, shape=y.shape)
    model.graph.inputs.extend(seeds.values())
    with Emitter(model) as op:
        gradients = pkgutil.resolve_name(gradient)().backward(op, model, seeds, wrt)
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


def in_precision(source: Source, dtype: ir.DataType) -> ir.Model:
    """Return a copy of a model with one floating type in the place of every other, where operators take it."""
    model = load(source)
    version = model.opset_imports[""]
    results = {y for graph in model.graphs() for y in graph.outputs}
    for graph in model.graphs():
        for x in [*graph.inputs, *graph.initializers.values()]:
            _retype(x, dtype, version)
        for y in graph.outputs if graph is not model.graph else []:
            y.type = ir.TensorType(dtype) if y.dtype in FLOATING else y.type
    inferred = {y: y.shape for node in model.graph.all_nodes() for y in node.outputs if y not in results}
    for y in {*inferred, *model.graph.outputs}:
        y.type = y.shape = None
    for node in model.graph.all_nodes():
        if not all(takes(dtype, version, *use) for output in node.outputs for use in output.uses()):
            continue
        if node.op_type == "ConstantOfShape" and not node.attributes:
            node.attributes.add(ir.AttrTensor("value", ir.tensor(np.zeros(1))))
        for name, attribute in list(node.attributes.items()):
            if name in ("value_float", "value_floats"):
                del node.attributes[name]
                node.attributes.add(
                    ir.AttrTensor("value", ir.tensor(np.array(attribute.value, dtype.numpy())))
                )
            elif attribute.type == ir.AttributeType.TENSOR:
                array = as_precision(attribute.as_tensor().numpy(), dtype)
                node.attributes.add(ir.AttrTensor(name, ir.tensor(array)))
            elif _is_precision(node, name) and attribute.as_int() in FLOATING:
                node.attributes.add(ir.AttrInt64(name, dtype))
    pkgutil.resolve_name("passes.shapes:infer")(model)
    for y, shape in inferred.items():  # some ranks are known where a rule emits a node, and lost without
        y.shape = shape if y.shape is None else y.shape
    return model


def _retype(x: ir.Value, dtype: ir.DataType, version: int) -> None:
    """Change the floating type of an input or initializer, where all that use it take another."""
    if x.dtype in FLOATING and all(takes(dtype, version, *use) for use in x.uses()):
        x.type = ir.TensorType(dtype)
        if x.const_value is not None:
            x.const_value = ir.tensor(as_precision(x.const_value.numpy(), dtype), name=x.name)


def _is_precision(node: ir.Node, name: str) -> bool:
    """Tell whether an attribute names an element type that may be float64."""
    names = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}
    return name in names and (node.op_type, name) != ("LayerNormalization", "stash_type")


def as_precision(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Return floating numbers in a precision and others as they are."""
    return array.astype(dtype.numpy()) if is_floating(array) else array


def is_floating(array: Any) -> bool:
    """Tell whether `array` is one of floating numbers, of 2 bytes or more."""
    return isinstance(array, np.ndarray) and np.issubdtype(array.dtype, np.floating)


def finite(array: np.ndarray) -> np.ndarray:
    """Return an array with 0 for what is no number."""
    return np.nan_to_num(array, nan=0, posinf=0, neginf=0)


def chosen(x: np.ndarray, sample: int | None, outputs: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the indices of all elements, or of a random sample of them, that are finite.

    In outputs of the same shape they are too: where a function of each element is no number, it has no slope.
    """
    defined = np.isfinite(x)
    for y in outputs:
        if is_floating(y) and y.shape == x.shape:
            defined = defined & np.isfinite(y)
    flat = np.flatnonzero(defined)
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

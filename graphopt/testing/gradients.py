"""Prove gradients: compare those that rules emit with an independent oracle, or with finite differences.

Both sides are float64. ONNX Runtime computes the forward and the emitted gradient where it has kernels for float64;
the reference evaluator does elsewhere, and its forward is compared with the runtime's in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import values
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.names import gradient_of, output_of, seed_of
from graphopt.graph.operators import DRAWING
from graphopt.graph.schemas import takes
from graphopt.graph.shapes import infer
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.testing.reference import evaluator

if TYPE_CHECKING:
    from passes import GradientSource

Arrays = dict[str, np.ndarray]

PRECISIONS = {ir.DataType.FLOAT16, ir.DataType.BFLOAT16, ir.DataType.FLOAT, ir.DataType.DOUBLE}
FLOATING = {dtype for dtype in ir.DataType if dtype.is_floating_point()}


# Inputs of up to so many elements are compared whole by finite differences, others by a sample of so many.
WHOLE, SAMPLE = 1000, 8

# How far a forward in float32, or by an oracle, may be from that in float64, relative to the largest element.
FORWARD_TOLERANCE = 1e-4

# Operators on which ONNX Runtime 1.19 ends the process.
FATAL = {"RotaryEmbedding"}

# How far a gradient may be from an oracle's, relative to the largest element: scales of Resize are float32.
ORACLE_TOLERANCE = {ir.DataType.DOUBLE: 2e-6, ir.DataType.FLOAT: 2e-5}

# The step of finite differences in float32, and how far a gradient may be from them.
ROUGH_STEP, ROUGH_TOLERANCE = 1e-2, 1e-3

DIFFERENCES = "finite differences"

Oracle = Callable[[ir.Model, Arrays, Arrays], tuple[Arrays, Arrays]]


class NoOracle(GraphoptError):
    """An oracle has no equivalent of an operator."""


class OtherForward(GraphoptError):
    """Two evaluators compute different outputs."""


@dataclass(frozen=True)
class Proof:
    """Hold a comparison of gradients.

    Args:
        gradients: the emitted gradient of each floating input.
        forward: what computed the outputs.
        oracle: what the gradients were compared with: the name of the oracle's function, or finite differences.
        compared, total: how many elements were, and how many there are.
        vacuous: whether all that were compared are 0, so that a rule of zeros would pass.
        by_nature: whether they must be: no operator on the way has a slope, or there are no elements.
    """

    gradients: Arrays
    forward: str
    oracle: str
    compared: int
    total: int
    vacuous: bool
    by_nature: bool


def check_gradient(source: Source, inputs: Mapping[str, np.ndarray], **options: Any) -> Arrays:
    """Prove the gradients of a model, as `prove` does, and return them by the names of its inputs."""
    return prove(source, inputs, **options).gradients


def prove(
    source: Source,
    inputs: Mapping[str, np.ndarray],
    *,
    tolerance: float = 1e-6,
    step: float = 1e-5,
    double: bool = True,
    held: Collection[str] = (),
    sample: int | None = None,
    oracle: Oracle | None = None,
) -> Proof:
    """Compare the gradient of a random projection of a model's floating outputs with an oracle's.

    All is float64 whatever the model's precision is, unless `double` is false: for operators that have no float64.
    Where ONNX Runtime has an operator in float32 alone, and the reference evaluator computes another thing, all is
    float32.

    Args:
        inputs: the point, an array for each of the model's inputs; without an oracle no kink is within `step` of it.
        tolerance: the largest error from finite differences, relative to the largest element of an input's gradient.
        step: of finite differences.
        held: inputs that are not moved.
        sample: how many random elements of each input finite differences move; by default all of up to 1,000, and 8
            of more.
        oracle: returns a model's outputs at a point, and the gradients by its inputs of their sum weighed by the
            seeds `NAME.seed`, or raises NoOracle. By default, and where it has no equivalent of the model or computes
            other outputs, central differences of the forward are the oracle.

    Raises:
        GraphoptError: a gradient is wrong, names all that are; or there is no rule for an operator.
    """
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    model = in_precision(normalized(source), dtype)
    point = in_types(model, inputs)
    try:
        forward, outputs, by = forward_of(model, point)
    except OtherForward:
        rough: dict[str, Any] = {"step": ROUGH_STEP, "tolerance": max(tolerance, ROUGH_TOLERANCE)}
        return prove(source, inputs, double=False, held=held, sample=sample, oracle=oracle, **rough)
    if dtype == ir.DataType.FLOAT and by == "runtime":
        by = "runtime in float32"
    seeds = random_seeds(outputs)
    differentiated = gradient_model(model)
    found = computed(differentiated, point | seeds)
    expected, oracle_name = _asked(oracle, model, point, seeds, outputs)
    largest = sum(float(np.vdot(np.abs(finite(outputs[output_of(name)])), x)) for name, x in seeds.items())
    rounding = np.finfo(dtype.numpy()).eps * largest / step if expected is None else 0.0
    if expected is not None:
        tolerance = ORACLE_TOLERANCE[dtype]
    gradients, wrong, compared, total, steepest = {}, [], 0, 0, 0.0
    for name, x in point.items():
        if name in held or not is_floating(x):
            continue
        gradient = gradients[name] = found.get(gradient_of(name), np.zeros_like(x))
        count = sample if sample is not None else None if x.size <= WHOLE else SAMPLE
        at = chosen(x, count if expected is None else None, outputs.values())
        slopes = (
            differences(forward, point, name, seeds, step, at) if expected is None else expected[name][at]
        )
        scale = float(np.nanmax(np.abs(gradient), initial=rounding / tolerance))
        ours = gradient[at] if gradient.shape == x.shape else gradient
        error = distance(ours, slopes, scale)
        if not error <= tolerance:
            wrong.append(f"{name!r} by {error:.1e} (found {ours.tolist()}, expected {slopes.tolist()})")
        compared, total = compared + slopes.size, total + x.size
        steepest = max(steepest, float(np.max(np.abs(slopes), initial=0.0)) - rounding)
    if wrong:
        raise GraphoptError(
            f"gradients differ from {oracle_name} by more than {tolerance:g}: {'; '.join(wrong)}"
        )
    empty = not total or not any(seed.size for seed in seeds.values())
    flat = empty or not differentiated.graph.outputs
    return Proof(gradients, by, oracle_name, compared, total, steepest <= 0, flat)


def forward_of(model: ir.Model, point: Arrays) -> tuple[Any, Arrays, str]:
    """Return what runs a model, the runtime where it has the kernels, its outputs at a point, and who that is.

    Raises:
        OtherForward: the reference evaluator runs it, and its outputs are not those of the runtime in float32.
    """
    found = by_runtime(model, point)
    if found is not None:
        return found[0], found[1], "runtime"
    reference = evaluator(model)
    outputs = run(model, point)
    single = in_precision(model, ir.DataType.FLOAT)
    theirs = by_runtime(single, in_types(single, point))
    if theirs is None:
        return reference, outputs, "reference alone"
    for name, y in theirs[1].items():
        if not _is_same(outputs[name], y):
            raise OtherForward(f"the reference evaluator's {name!r} is not ONNX Runtime's")
    return reference, outputs, "reference, as the runtime"


def _is_same(found: Any, expected: Any) -> bool:
    """Return whether two outputs are the same but for float32's rounding; integers are not compared."""
    if not is_floating(expected):
        return True
    return distance(finite(np.asarray(found)), finite(expected), 1e-3) <= FORWARD_TOLERANCE


class _Copying:
    """A session that leaves its feeds as they are: BatchNormalization in training writes into its inputs."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self._taken = [x.name for x in session.ort.get_inputs()]

    def run(self, outputs: list[str], feeds: Mapping[str, np.ndarray]) -> list[Any]:
        return self._session.ort.run(outputs, {name: feeds[name].copy() for name in self._taken})


def by_runtime(model: ir.Model, feeds: Arrays) -> tuple[_Copying, Arrays] | None:
    """Return a session and a model's outputs, None where the runtime has no kernels, or draws its own numbers."""
    if any(map(_draws, model.graph.all_nodes())):
        return None
    device, outputs = Device("cpu", threads=1, flush_denormals=False), names(model.graph.outputs)
    if device.ort.__version__.startswith("1.19") and any(x.op_type in FATAL for x in model.graph.all_nodes()):
        return None
    try:
        session = _Copying(Session(device, model))
        return session, dict(zip(outputs, session.run(outputs, feeds), strict=True))
    except Exception:  # noqa: BLE001 - the bindings of two versions raise types of their own
        return None


def _draws(node: ir.Node) -> bool:
    """Return whether a node draws random numbers, each evaluator its own."""
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    known = None if training is None else ir.convenience.get_const_tensor(training)
    return node.op_type in DRAWING or (training is not None and (known is None or bool(known.numpy())))


def computed(model: ir.Model, feeds: Arrays) -> Arrays:
    """Run a model by ONNX Runtime, or by the reference evaluator where the runtime has no kernels for it."""
    if not model.graph.outputs:
        return {}
    found = by_runtime(model, feeds)
    return run(model, feeds) if found is None else found[1]


def _asked(
    oracle: Oracle | None, model: ir.Model, point: Arrays, seeds: Arrays, outputs: Arrays
) -> tuple[Arrays | None, str]:
    """Return an oracle's gradients, and its name; None where it has none."""
    if oracle is not None:
        try:
            theirs, expected = oracle(model, point, seeds)
        except NoOracle:
            return None, DIFFERENCES
        defined = all(np.isfinite(gradient).all() for gradient in expected.values())
        if defined and all(_is_same(y, outputs[name]) for name, y in theirs.items()):
            return expected, oracle.__name__
    return None, DIFFERENCES


def in_types(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> Arrays:
    """Return arrays in the precisions that a model's inputs have."""
    dtypes = {x.name: x.dtype.numpy() for x in model.graph.inputs if x.dtype in PRECISIONS}
    return {name: x.astype(dtypes[name]) if name in dtypes else x for name, x in inputs.items()}


def gradient_model(
    source: Source, gradient: GradientSource | None = None, by: Collection[str] | None = None
) -> ir.Model:
    """Return the model from inputs, and a seed `NAME.seed` a floating output, to gradients `NAME.grad`.

    Args:
        gradient: the pass that the gradients come from; `passes.Gradient()` by default.
        by: the inputs to differentiate by; all floating ones by default.
    """
    import passes

    model = normalized(source)
    wrt = [x for x in model.graph.inputs if values.is_floating(x) and (by is None or x.name in by)]
    seeds = {}
    for y in filter(values.is_floating, model.graph.outputs):
        seeds[y] = ir.Value(name=seed_of(y), type=y.type, shape=y.shape)
    model.graph.inputs.extend(seeds.values())
    with Emitter(model) as op:
        gradients = (gradient or passes.Gradient()).backward(op, model, seeds, wrt)
        model.graph.outputs.clear()
        for x, dx in gradients.items():
            output = op.Identity(dx, _outputs=[gradient_of(x)])
            output.type, output.shape = x.type, x.shape
            model.graph.outputs.append(output)
    model.graph.sort()
    return model


def normalized(source: Source) -> ir.Model:
    """Return a copy of a model in the form that rules expect."""
    model = load(source)
    import passes

    passes.Normalize()(model)
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
    infer(model)
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
    """Return whether an attribute names an element type that may be float64."""
    names = {"to", "dtype", "output_dtype", "softmax_precision", "stash_type"}
    return name in names and (node.op_type, name) != ("LayerNormalization", "stash_type")


def as_precision(array: np.ndarray, dtype: ir.DataType) -> np.ndarray:
    """Return floating numbers in a precision and others as they are."""
    return array.astype(dtype.numpy()) if is_floating(array) else array


def is_floating(array: Any) -> bool:
    """Return whether `array` is one of floating numbers, of 2 bytes or more."""
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
        seed_of(name): np.asarray(random.uniform(0.5, 1.5, y.shape) * np.isfinite(y), y.dtype)
        for name, y in floating.items()
    }


def differences(
    forward: Any,
    point: Mapping[str, np.ndarray],
    name: str,
    seeds: Arrays,
    step: float,
    at: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Return the central differences of the projected outputs by the elements `at` some indices of one input."""
    projected = [output_of(name) for name in seeds]
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

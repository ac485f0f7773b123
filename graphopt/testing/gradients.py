"""Prove emitted gradients by comparing them with those of an independent oracle, or with finite differences.

Both are computed in float64. ONNX Runtime computes the forward pass and the emitted gradient if it has float64 kernels.
Otherwise, the reference evaluator does, and its forward pass is compared with that of ONNX Runtime in float32.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.derivatives import normal_form
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.operators import DRAWING
from graphopt.graph.precision import as_precision as as_precision
from graphopt.graph.precision import is_floating_array, retype
from graphopt.graph.shapes import infer
from graphopt.graph.values import dtype_of, gradient_of, is_floating, name_of, output_of, seed_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.testing.reference import evaluator

if TYPE_CHECKING:
    from passes import GradientSource

NamedArrays = dict[str, np.ndarray]

# Finite differences compare all elements of inputs with up to WHOLE elements, and SAMPLE elements of larger ones.
WHOLE, SAMPLE = 1000, 8

# The largest error of a forward pass in float32 or by an oracle, relative to the largest element.
FORWARD_TOLERANCE = 1e-4

# Operators that crash ONNX Runtime 1.19 (tests/faults.py: RotaryEmbedding).
FATAL = {"RotaryEmbedding"}

# The largest error of a gradient from an oracle's, relative to the largest element: scales of Resize are float32.
ORACLE_TOLERANCE = {ir.DataType.DOUBLE: 2e-6, ir.DataType.FLOAT: 2e-5}

# The step of finite differences in float32, and the largest error of a gradient from them.
ROUGH_STEP, ROUGH_TOLERANCE = 1e-2, 1e-3

DIFFERENCES = "finite differences"

_Forward = Callable[..., Any]  # takes names of outputs, and a point; returns these outputs
Oracle = Callable[[ir.Model, NamedArrays, NamedArrays], tuple[NamedArrays, NamedArrays]]


class NoOracle(GraphoptError):
    """Report that an oracle has no equivalent of an operator."""


class OtherForward(GraphoptError):
    """Report that two evaluators compute different outputs."""


@dataclass(frozen=True)
class Proof:
    """Hold the result of comparing gradients.

    Args:
        gradients: the emitted gradient of each floating-point input.
        forward: the evaluator that computed the outputs.
        oracle: the name of the oracle's function, or finite differences.
        compared, total: the number of compared elements, and of all elements.
        vacuous: whether all compared elements are 0, so that a rule that returns zeros would pass.
        by_nature: whether they have to be 0: no operator on the path has a derivative, or an input or output is empty.
    """

    gradients: NamedArrays
    forward: str
    oracle: str
    compared: int
    total: int
    vacuous: bool
    by_nature: bool


@checked()
def check_gradient(source: Source, inputs: Mapping[str, np.ndarray], **options: Any) -> NamedArrays:
    """Prove the gradients of a model, as `prove` does, and return them by the names of its inputs."""
    return prove(source, inputs, **options).gradients


def prove(
    source: Source,
    inputs: Mapping[str, np.ndarray],
    *,
    tolerance: float = 1e-6,
    step: float = 1e-5,
    double: bool = True,
    fixed_inputs: Collection[str] = (),
    sample: int | None = None,
    oracle: Oracle | None = None,
) -> Proof:
    """Compare the gradient of a random projection of a model's floating-point outputs with an oracle's.

    Both are computed in float64, whatever the model's precision. They are computed in float32 if `double` is false, or
    if ONNX Runtime has an operator only in float32 and the reference evaluator computes other outputs or none.

    Args:
        source: a path, an onnx.ModelProto or an onnx_ir.Model.
        inputs: the point, an array for each of the model's inputs. Finite differences need a function that is smooth
            within `step` of the point.
        tolerance: the largest error from finite differences, relative to the largest element of an input's gradient.
        step: the step of finite differences.
        double: compute in float64; false for operators that do not support it.
        fixed_inputs: the names of inputs whose gradients are not compared.
        sample: the number of random elements of each input that finite differences compare. The default is all
            elements of inputs with up to 1,000, and 8 elements of larger inputs.
        oracle: a function that returns a model's outputs at a point, and the gradients, by input, of their sum weighted
            by the seeds `NAME.seed`. It raises NoOracle if it has no equivalent of the model. In this case, if it
            computes other outputs, and by default, the oracle is central differences of the forward pass.

    Raises:
        GraphoptError: gradients are wrong, all of which the message names, or an operator has no rule.
    """
    dtype = ir.DataType.DOUBLE if double else ir.DataType.FLOAT
    model = in_precision(normal_form(source), dtype)
    point = in_types(model, inputs)
    try:
        forward, outputs, by = evaluator_of(model, point)
    except OtherForward:
        rough: dict[str, Any] = {"step": ROUGH_STEP, "tolerance": max(tolerance, ROUGH_TOLERANCE)}
        rough |= {"fixed_inputs": fixed_inputs, "sample": sample, "oracle": oracle}
        return prove(source, inputs, double=False, **rough)
    if dtype == ir.DataType.FLOAT and by == "runtime":
        by = "runtime in float32"
    seeds = random_seeds(outputs)
    differentiated = gradient_model(model)
    actual = computed(differentiated, point | seeds)
    expected, oracle_name = _asked(oracle, model, point, seeds, outputs)
    largest = sum(float(np.vdot(np.abs(finite(outputs[output_of(name)])), x)) for name, x in seeds.items())
    rounding = np.finfo(dtype.numpy()).eps * largest / step if expected is None else 0.0
    if expected is not None:
        tolerance = ORACLE_TOLERANCE[dtype]
    gradients, wrong, compared, total, steepest = {}, [], 0, 0, 0.0
    for name, x in point.items():
        if name in fixed_inputs or not is_floating_array(x):
            continue
        gradient = gradients[name] = actual.get(gradient_of(name), np.zeros_like(x))
        count = sample if sample is not None else None if x.size <= WHOLE else SAMPLE
        at = chosen(x, count if expected is None else None, outputs.values())
        slopes = differences(forward, point, name, seeds, step, at) if expected is None else expected[name][at]
        scale = float(np.nanmax(np.abs(gradient), initial=rounding / tolerance))
        ours = gradient[at] if gradient.shape == x.shape else gradient
        error = distance(ours, slopes, scale)
        if not error <= tolerance:
            wrong.append(f"{name!r} by {error:.1e} (found {ours.tolist()}, expected {slopes.tolist()})")
        compared, total = compared + slopes.size, total + x.size
        steepest = max(steepest, float(np.max(np.abs(slopes), initial=0.0)) - rounding)
    if wrong:
        raise GraphoptError(f"gradients differ from {oracle_name} by more than {tolerance:g}: {'; '.join(wrong)}")
    empty = not total or not any(seed.size for seed in seeds.values())
    flat = empty or not differentiated.graph.outputs
    return Proof(gradients, by, oracle_name, compared, total, steepest <= 0, flat)


def evaluator_of(model: ir.Model, point: NamedArrays) -> tuple[_Forward, NamedArrays, str]:
    """Return a function that evaluates a model, the outputs at a point, and the evaluator's name.

    The evaluator is ONNX Runtime if it has the kernels, otherwise the reference.

    Raises:
        OtherForward: only ONNX Runtime in float32 computes the outputs, or it computes others than the reference.
    """
    result = by_runtime(model, point)
    if result is not None:
        return *result, "runtime"
    single = in_precision(model, ir.DataType.FLOAT)
    theirs = by_runtime(single, in_types(single, point))
    try:
        reference = evaluator(model).run
        outputs = dict(zip(map(name_of, model.graph.outputs), reference(None, point), strict=True))
    except Exception as error:
        if theirs is None:
            raise
        raise OtherForward("the reference evaluator fails") from error
    if theirs is None:
        return reference, outputs, "reference alone"
    for name, y in theirs[1].items():
        if not _is_same(outputs[name], y):
            raise OtherForward(f"output {name!r} of the reference evaluator differs from ONNX Runtime's")
    return reference, outputs, "reference, as the runtime"


def _is_same(actual: object, expected: object) -> bool:
    """Return whether two outputs agree within float32's rounding; integers are not compared."""
    if not is_floating_array(expected):
        return True
    return distance(finite(np.asarray(actual)), finite(expected), 1e-3) <= FORWARD_TOLERANCE


def by_runtime(model: ir.Model, feeds: NamedArrays) -> tuple[_Forward, NamedArrays] | None:
    """Return a function that runs a model in ONNX Runtime, and the outputs.

    Return None without kernels, or if the model draws numbers.
    """
    if any(map(_draws, model.graph.all_nodes())):
        return None
    device = Device("cpu", threads=1, flush_denormals=False)
    outputs = list(map(name_of, model.graph.outputs))
    if device.ort.__version__.startswith("1.19") and any(x.op_type in FATAL for x in model.graph.all_nodes()):
        return None

    def run(outputs: Sequence[str], feeds: NamedArrays) -> list[np.ndarray]:
        # BatchNormalization in training writes to its inputs.
        return session.ort.run(outputs, {x.name: feeds[x.name].copy() for x in session.ort.get_inputs()})

    try:
        session = Session(device, model)
        return run, dict(zip(outputs, run(outputs, feeds), strict=True))
    except Exception:  # noqa: BLE001 - versions raise different types
        return None


def _draws(node: ir.Node) -> bool:
    """Return whether a node draws random numbers, which differ between evaluators."""
    training = node.inputs[2] if node.op_type == "Dropout" and len(node.inputs) > 2 else None
    known = None if training is None else ir.convenience.get_const_tensor(training)
    return node.op_type in DRAWING or (training is not None and (known is None or bool(known.numpy())))


def computed(model: ir.Model, feeds: NamedArrays) -> NamedArrays:
    """Run a model in ONNX Runtime, or in the reference evaluator if ONNX Runtime has no kernels for it."""
    if not model.graph.outputs:
        return {}
    result = by_runtime(model, feeds)
    return evaluate_reference(model, feeds) if result is None else result[1]


def _asked(
    oracle: Oracle | None, model: ir.Model, point: NamedArrays, seeds: NamedArrays, outputs: NamedArrays
) -> tuple[NamedArrays | None, str]:
    """Return an oracle's gradients and name; None and finite differences if it cannot compute them."""
    if oracle is not None:
        try:
            theirs, expected = oracle(model, point, seeds)
        except NoOracle:
            return None, DIFFERENCES
        defined = all(np.isfinite(gradient).all() for gradient in expected.values())
        if defined and all(_is_same(y, outputs[name]) for name, y in theirs.items()):
            return expected, oracle.__name__
    return None, DIFFERENCES


def in_types(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> NamedArrays:
    """Cast arrays to the precisions of a model's inputs."""
    dtypes = {x.name: dtype_of(x).numpy() for x in model.graph.inputs if is_floating(x)}
    return {name: x.astype(dtypes[name]) if name in dtypes else x for name, x in inputs.items()}


def gradient_model(
    source: Source, gradient: GradientSource | None = None, by: Collection[str] | None = None
) -> ir.Model:
    """Return the model that computes gradients `NAME.grad` from inputs and a seed `NAME.seed` per output.

    Args:
        gradient: the pass that differentiates; `passes.Gradient()` by default.
        by: the inputs to differentiate with respect to; by default all floating-point inputs.
    """
    import passes

    model = normal_form(source)
    wrt = [x for x in model.graph.inputs if is_floating(x) and (by is None or x.name in by)]
    seeds = {}
    for y in filter(is_floating, model.graph.outputs):
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


def in_precision(source: Source, dtype: ir.DataType) -> ir.Model:
    """Return a copy of a model with one floating-point type instead of all others, if its operators accept it."""
    model = load(source)
    inferred = retype(model, dtype)
    infer(model)
    for y, shape in inferred.items():  # inference loses some ranks that rules set
        y.shape = shape if y.shape is None else y.shape
    return model


def finite(array: np.ndarray) -> np.ndarray:
    """Replace NaN and infinities by 0."""
    return np.nan_to_num(array, nan=0, posinf=0, neginf=0)


def chosen(x: np.ndarray, sample: int | None, outputs: Iterable[np.ndarray]) -> tuple[np.ndarray, ...]:
    """Return the indices of the finite elements, or of a random sample of them.

    The elements are finite in outputs of the same shape, too: elementwise functions have no derivative at NaN.
    """
    defined = np.isfinite(x)
    for y in outputs:
        if is_floating_array(y) and y.shape == x.shape:
            defined = defined & np.isfinite(y)
    flat = np.flatnonzero(defined)
    if sample is not None and sample < flat.size:
        flat = np.sort(np.random.default_rng(0).choice(flat, sample, replace=False))
    return np.unravel_index(flat, x.shape) if x.shape else ()


def random_seeds(outputs: Mapping[str, np.ndarray]) -> NamedArrays:
    """Return random weights `NAME.seed` for each floating-point output; 0 where the output is not finite."""
    random = np.random.default_rng(0)
    floating = {name: y for name, y in outputs.items() if is_floating_array(y)}
    return {
        seed_of(name): np.asarray(random.uniform(0.5, 1.5, y.shape) * np.isfinite(y), y.dtype)
        for name, y in floating.items()
    }


def differences(
    forward: _Forward,
    point: NamedArrays,
    name: str,
    seeds: NamedArrays,
    step: float,
    at: tuple[np.ndarray, ...],
) -> np.ndarray:
    """Return central differences of the projected outputs with respect to the elements `at` of one input."""
    projected = [output_of(name) for name in seeds]
    slopes = np.zeros_like(point[name][at])
    indices = zip(*at, strict=True) if at else [()]
    for number, index in enumerate(indices):
        slope = 0.0
        for sign in (1, -1):
            moved = point[name].copy()
            moved[index] += sign * step
            outputs = map(finite, forward(projected, {**point, name: moved}))
            slope += sign * sum(np.vdot(y, seed) for y, seed in zip(outputs, seeds.values(), strict=True))
        slopes[number if at else ()] = slope / (2 * step)
    return slopes


def distance(actual: np.ndarray, expected: np.ndarray, least: float = 0.0) -> float:
    """Return the error relative to the larger of the largest expected number and `least`."""
    if actual.shape != expected.shape:
        return float("inf")
    scale = float(np.max(np.abs(expected), initial=least)) or 1.0
    return float(np.max(np.abs(actual.astype(np.float64) - expected), initial=0.0)) / scale


def evaluate_reference(model: ir.Model, inputs: Mapping[str, np.ndarray]) -> NamedArrays:
    """Run a model in the reference evaluator and return its outputs by name."""
    return dict(zip(map(name_of, model.graph.outputs), evaluator(model).run(None, dict(inputs)), strict=True))

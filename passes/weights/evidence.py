"""Distinguish constants from weights by their uses in the graph and their numbers, if no exporter recorded it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.graph.operators import ARITHMETIC, INITIAL_STATES, LAYOUT, PRODUCTS, SCATTERING
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import constant_of, dims_of, given, is_floating
from passes.gradients.registry import carries
from passes.gradients.walk import carries_gradient, passes_gradient
from passes.weights.initializers import array, fill_value, is_weight

_Rule = tuple[Callable[[ir.Value, np.ndarray], bool], str]  # whether it holds, and what it shows

_BROADCASTING = ARITHMETIC | {"Where"}
_LAYOUT = LAYOUT | {"Cast", "Concat"}  # not Gather, which may read an embedding
_BEFORE_WAVES = _LAYOUT | {"Div", "Einsum", "MatMul", "Mul"}
_BEFORE_STATISTICS = _LAYOUT | {"Div", "Mul", "Sub"}
_IN_INFERENCE_FORM = "of a BatchNormalization, which the exporter wrote out in its inference form"
_TABLE = "a table of sines and cosines of positions"
_LARGE_ARRAY, _PART_SIZE = 2**20, 2**12  # numbers: of an array whose parts are looked at, and of a part
# Functions that keep a parameter positive or in an interval. What is constant is stored after them.
_CONSTRAINING = {"Abs", "Clip", "Exp", "HardSigmoid", "Relu", "Sigmoid", "Softmax", "Softplus", "Tanh"}
_BEFORE_SCALES = {"Cast", "CastLike", "Gather", "Reshape", "Squeeze", "Sub", "Transpose", "Unsqueeze"}
_MASKING = -10.0  # a number of at most this size, added to scores, masks them in a softmax


def reached(graph: ir.Graph, known: Iterable[ir.Value] = ()) -> set[ir.Value]:
    """Return all values from which a gradient flows to an output of a graph, including values in bodies."""
    result = {*known, *filter(is_floating, graph.outputs)}
    for node in reversed(graph):
        if passes_gradient(node) and not result.isdisjoint(node.outputs):
            inputs = (x for i, x in enumerate(node.inputs) if carries(node, i))
            result.update(x for x in inputs if x is not None and carries_gradient(x))
            for body in subgraphs(node):
                result = reached(body, result)
    return result


def constant_use(node: ir.Node, index: int) -> str | None:
    """Return the reason why a node uses an initializer as a constant, or None."""
    x = given(node.inputs[index])
    if node.domain != "":
        return None
    if node.op_type in SCATTERING and index == 0 and fill_value(x) is not None:
        return "the initial value of a scatter"
    if (node.op_type == "Clip" and index > 0) or (node.op_type in ("Max", "Min") and array(x).size == 1):
        return f"a bound of {node.op_type}"
    if node.op_type == "OneHot":
        return "the values of OneHot"
    if index in INITIAL_STATES.get(node.op_type, ()) and fill_value(x) == 0:
        return "the zero initial state of a recurrence"
    if node.op_type == "Expand" and array(x).size == 1:
        return "one number, which Expand spreads"
    if node.op_type == "InstanceNormalization" and index in (1, 2):
        scale, bias = node.inputs[1], node.inputs[2]
        if fill_value(scale) == 1 and fill_value(bias) == 0:
            return "the unit scale and zero bias of a normalization"
    return None


def constant_value(x: ir.Value) -> Origin | None:
    """Return the kind of an initializer if its numbers and all its uses show that it is a constant.

    Parts of a large array show that it is none, except for a table or numbers whose uses decide.
    """
    if is_irregular(array(x)):
        return _likely(x, array(x), _LIKELY[_LIKELY.index(_WAVE) :])
    numbers = _numbers(x)
    if numbers.size == 0 or not np.isfinite(numbers).all():
        return Origin(Kind.CONSTANT, "not finite: a mask" if numbers.size else "empty")
    if _is_constrained(x):
        return None
    low = numbers.min()
    if numbers.ndim > 1 and low <= _MASKING and np.isin(numbers, (0, low)).all() and numbers.max() == 0:
        return Origin(Kind.CONSTANT, "a mask: 0 and a large negative number")
    return _likely(x, numbers, _LIKELY)


def _likely(x: ir.Value, numbers: np.ndarray, rules: Sequence[_Rule]) -> Origin | None:
    why = next((why for is_so, why in rules if is_so(x, numbers)), None)
    return None if why is None else Origin(Kind.CONSTANT, why, certain=False)


def written_out(x: ir.Value) -> Origin | None:
    """Return the kind of an initializer if it is the mean or the scale of (x - mean) * scale + shift, per channel."""
    for node, index in x.uses():
        before = node if node.op_type == "Sub" else node.inputs[0] and node.inputs[0].producer()
        if index != 1 or not before or before.op_type != "Sub" or not _is_channelwise(before.inputs[1]):
            continue
        scaled = _then(before, "Mul")
        if scaled is None or _then(scaled, "Add") is None:
            continue
        if x is before.inputs[1]:
            return Origin(Kind.BUFFER, f"the mean {_IN_INFERENCE_FORM}", certain=False)
        if x is scaled.inputs[1]:
            return Origin(Kind.COMPUTED, f"weight and variance {_IN_INFERENCE_FORM}", certain=False)
    return None


def _then(node: ir.Node, op_type: str) -> ir.Node | None:
    """Return the only reader of a node, if it is an `op_type` whose second input is an initializer per channel."""
    users = node.outputs[0].consumers()
    channelwise = [user for user in users if user.op_type == op_type and _is_channelwise(user.inputs[1])]
    return channelwise[0] if len(channelwise) == len(users) == 1 else None


def _is_channelwise(x: ir.Value | None) -> bool:
    """Return whether a value is an initializer of several numbers along one axis."""
    return x is not None and is_weight(x) and sum(dim != 1 for dim in array(x).shape) == 1


def _is_constrained(x: ir.Value) -> bool:
    """Return whether only functions that constrain a parameter read an initializer."""
    uses = list(x.uses())
    return bool(uses) and all(node.op_type in _CONSTRAINING and index == 0 for node, index in uses)


def is_table(x: ir.Value) -> bool:
    """Return whether an initializer contains sines and cosines of positions, which are rarely trained."""
    return _is_wave(x, _numbers(x))


def of_integers(x: ir.Value, recorded: bool = False) -> Origin | None:
    """Return the kind of an initializer if it has the integers of a quantized weight, or the scales of one.

    A `recorded` parameter is no such integers, and the scales of integers that are no recorded parameter.
    """
    users = list(x.consumers())
    if users and all(user.op_type == "Mul" for user in users):
        others = [[y for y in user.inputs if y is not x] for user in users]  # none in a square
        if all(factors and all(_has_integers(y, recorded) for y in factors) for factors in others):
            return Origin(Kind.CONSTANT, "the scale of a quantized weight", certain=False)
    if not recorded and scale_of_whole(x) is not None:
        return Origin(Kind.PARAMETER, "whole numbers behind a scale: a quantized weight", certain=False)
    if not recorded and _is_whole(array(x)) and _is_scaled(x):
        return Origin(Kind.CONSTANT, "whole numbers behind a scale, as of a quantized weight", certain=False)
    return None


def scale_of_whole(x: ir.Value) -> tuple[ir.Value, int] | None:
    """Return the scale of a weight that consists of whole numbers from -128 to 127, and its axis of the weight.

    It multiplies the weight, or the outputs of the one MatMul that reads the weight, by a number for each channel.
    """
    uses, sizes = list(x.uses()), dims_of(x)
    if len(uses) == 1 and uses[0][0].op_type == "MatMul" and uses[0][1] == 1 and len(sizes) == 2:
        uses, sizes = list(uses[0][0].outputs[0].uses()), (1, sizes[1])
    if len(uses) != 1 or uses[0][0].op_type != "Mul" or uses[0][0].domain:
        return None
    scale = given(uses[0][0].inputs[1 - uses[0][1]])
    steps = array(scale).astype(np.float64) if is_weight(scale) else np.zeros(1)
    rank = len(sizes)
    dims = (1,) * (rank - steps.ndim) + steps.shape
    axes = [axis for axis, dim in enumerate(dims) if dim != 1]
    if len(dims) > rank or len(axes) != 1 or dims[axes[0]] != sizes[axes[0]]:
        return None  # one number scales a table of distances or positions, or three values
    if not np.isfinite(steps).all() or not steps.all() or not _is_whole(array(x)):
        return None
    if array(x).min() < -128 or array(x).max() > 127:
        return None
    return scale, axes[0]


def _is_scaled(x: ir.Value) -> bool:
    """Return whether an initializer, or a product with it, is multiplied by an initializer."""
    front = [x]
    while front:
        for user in front.pop().consumers():
            if user.op_type == "Mul" and any(is_weight(y) for y in user.inputs):
                return True
            if user.op_type in _BEFORE_SCALES | PRODUCTS:
                front.extend(user.outputs)
    return False


def _has_integers(x: ir.Value | None, unrecorded: bool) -> bool:
    """Return whether a value is an initializer of few bits or of whole numbers, or a product with one."""
    node = None if x is None else x.producer()
    if node is not None:
        if node.op_type in _BEFORE_SCALES:
            return _has_integers(node.inputs[0], unrecorded)
        return node.op_type in PRODUCTS and _has_integers(node.inputs[1], unrecorded)
    numbers = constant_of(x)
    if x is None or x.dtype is None or numbers is None:
        return False
    origin = Origin.read(x) if unrecorded else None
    is_parameter = origin is not None and origin.trains and origin.certain and origin.named
    return x.dtype.bitwidth <= 8 if x.dtype.is_integer() else not is_parameter and _is_whole(numbers)


def _is_whole(numbers: np.ndarray) -> bool:
    """Return whether an array has three and more different numbers, all of them integers of eight bits."""
    if numbers.size < 16:
        return False
    parts = (numbers.reshape(-1)[:_PART_SIZE], numbers)
    if not all(np.isfinite(x).all() and not (x.astype(np.float32) % 1).any() for x in parts):
        return False
    return bool(np.abs(numbers).max() <= 255 and len(np.unique(numbers)) >= 3)


def is_irregular(numbers: np.ndarray) -> bool:
    """Return whether parts of a large array are finite, and one has many distinct numbers in no order."""
    if numbers.size < _LARGE_ARRAY:
        return False
    flat = numbers.reshape(-1)
    starts = np.linspace(0, numbers.size - _PART_SIZE, 5, dtype=np.int64)
    parts = [flat[start : start + _PART_SIZE].astype(np.float64) for start in starts]
    return all(np.isfinite(part).all() for part in parts) and any(map(_is_disordered, parts))


def _is_disordered(numbers: np.ndarray) -> bool:
    steps, distinct = np.diff(numbers), np.unique(np.round(numbers, 5))
    return bool(steps.min() < 0 < steps.max() and 8 * len(distinct) > numbers.size and (32 * numbers % 1).any())


def _numbers(x: ir.Value) -> np.ndarray:
    numbers = array(x)
    return numbers if numbers.dtype == np.float64 else numbers.astype(np.float32, copy=False)


def is_literal(x: ir.Value) -> bool:
    """Return whether an initializer is one number in arithmetic, of rank 0 or broadcast over an axis."""
    shape = None if x.const_value is None else tuple(x.const_value.shape)
    if shape == ():
        return True
    if shape != (1,):
        return False
    if any(user.op_type in ("Sub", "Div") and user.inputs[0] is x for user in x.consumers()):
        return True  # as in 1 - p, or 1 / p
    results = [user.outputs[0].shape for user in x.consumers() if user.op_type in _BROADCASTING]
    return any(shape is not None and (all(dim == 1 for dim in shape) or shape[-1] != 1) for shape in results)


def is_short(x: ir.Value) -> bool:
    """Return whether a single number has at most three digits, as numbers that people write do."""
    return _are_short(array(x).ravel())


def is_regular(numbers: np.ndarray) -> bool:
    """Return whether numbers are short, few, mostly zeros, in order or symmetric, unlike those of a trained weight.

    A weight may start with equal numbers, but not with a whole number above 1.
    """
    flat = numbers.astype(np.float64).ravel()
    distinct = np.unique(flat)
    if distinct.size < 2:
        return bool((distinct > 1).any() and not (distinct % 1).any())
    if all(map(_is_written, distinct[:256])) or (flat.size >= 16 and distinct.size <= flat.size / 4):
        return True
    if flat.size >= 8 and (flat == 0).mean() >= 0.5:
        return True
    steps = np.diff(flat)
    if flat.size >= 6 and ((steps >= 0).all() or (steps <= 0).all()):
        return True
    spread = 1e-5 * np.ptp(flat)
    return flat.size >= 6 and any(np.abs(x - x[::-1]).max() <= spread for x in (flat, flat[1:]))


def _is_written(number: float) -> bool:
    """Return whether six digits tell a number of float32 from all others, as of a few in a hundred by chance."""
    return len(np.format_float_scientific(np.float32(number), trim="-").partition("e")[0].lstrip("-")) <= 7


def _are_short(numbers: np.ndarray) -> bool:
    return all(float(f"{n:.3g}") == float(f"{n:.6g}") for n in numbers[:256])


def is_masked(numbers: np.ndarray) -> bool:
    """Return whether some numbers are 0 and the others differ, as in a product of a weight and a mask."""
    others = numbers[numbers != 0]
    return 1 < others.size < numbers.size and len(np.unique(others)) > others.size / 2


def _is_switch(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether zeros and ones, other than those of an identity, multiply something."""
    if not (np.isin(numbers, (0, 1)).all() and 0 < numbers.sum() < numbers.size):
        return False
    identity = numbers.ndim == 2 and np.array_equal(numbers, np.eye(*numbers.shape))
    return not identity and all(user.op_type == "Mul" for user in x.consumers())


def _is_grid(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether numbers are multiples of 1/32, one above 1, or form or repeat an arithmetic progression."""
    if numbers.size < 2 or np.ptp(numbers) == 0 or array(x).dtype.itemsize < 4:
        return False
    if max(numbers.shape) == numbers.size > 3:  # a line
        steps, largest = np.diff(numbers.ravel().astype(np.float64)), np.abs(numbers).max()
        if np.allclose(steps, steps.mean(), rtol=1e-3, atol=1e-6 * largest):
            return True
    if any(user.op_type not in _BROADCASTING | _LAYOUT for user in x.consumers()):
        return False
    if np.abs(numbers).max() > 1 and not (32 * numbers % 1).any():
        return True
    distinct = np.unique(np.round(numbers.astype(np.float64), 5))
    steps = np.diff(distinct)
    even = len(distinct) > 3 and np.allclose(steps, steps[0], rtol=1e-3, atol=1e-6)
    # Many random numbers fill each step of the rounding.
    return even and steps[0] > 1e-4 and 2 * len(distinct) <= numbers.size


def _is_filter(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether filters of a convolution are equal and symmetric, or whole numbers, and not an identity."""
    uses = [use for y in _spread(x) for use in y.uses()]
    if numbers.ndim < 3 or not all(node.op_type == "Conv" and index == 1 for node, index in uses):
        return False
    if np.ptp(numbers) == 0 or np.isin(numbers, (0, 1)).all() or numbers[0, 0].size < 3:
        return False
    axes = tuple(range(2, numbers.ndim))
    symmetric = all(np.allclose(np.abs(numbers), np.abs(np.flip(numbers, axis)), atol=1e-7) for axis in axes)
    equal = np.allclose(numbers, numbers[:1, :1], atol=1e-7)
    return (symmetric and equal) or not (numbers % 1).any()


def _spread(x: ir.Value) -> list[ir.Value]:
    """Return what Expand, Tile and Concat make of a value, or the value itself."""
    users = x.consumers()
    if not users or any(user.op_type not in ("Concat", "Expand", "Tile") for user in users):
        return [x]
    return [y for user in users for y in _spread(user.outputs[0])]


def _is_triangle(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether the last two axes have ones on one side of the diagonal and zeros on the other."""
    rows, columns = numbers.shape[-2:] if numbers.ndim > 1 else (0, 0)
    if rows != columns or rows < 3 or not np.isin(numbers[..., 0, :], (0, 1)).all():
        return False
    lower = np.tri(rows), np.tri(rows, k=-1)
    return any((numbers == triangle).all() or (numbers == 1 - triangle).all() for triangle in lower)


def _is_wave(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether y[n + 1] + y[n - 1] = 2 cos(w) y[n] along the last axis but one, in columns that vary."""
    if numbers.ndim < 2 or numbers.shape[-2] < 5:
        return False
    table = np.moveaxis(numbers, -2, 0)[:64].astype(np.float64)
    table = table.reshape(len(table), -1)
    if np.abs(table).max() > 1 + 1e-5:
        return False
    table = table[:, np.ptp(table, axis=0) > 1e-3]
    if table.shape[1] == 0:
        return False
    middle, ends = table[1:-1], table[2:] + table[:-2]
    products, squares = (middle * ends).sum(0), (middle * middle).sum(0)  # 2 cos(w) is their quotient
    residuals = np.abs(ends * squares - products * middle)
    return bool((residuals < 1e-3 * squares).all() and (np.abs(products) < 2 * squares).all())


def _is_progression(numbers: np.ndarray) -> bool:
    """Return whether numbers form an arithmetic or a geometric progression."""
    if len(numbers) < 3:
        return False
    steps = np.diff(numbers)
    if np.allclose(steps, steps[0], rtol=1e-3, atol=0) and steps[0] != 0:
        return True
    if (numbers <= 0).any():
        return False
    ratios = numbers[1:] / numbers[:-1]
    return bool(np.allclose(ratios, ratios[0], rtol=1e-3) and abs(ratios[0] - 1) > 1e-3)


def _waves(x: ir.Value) -> set[str]:
    """Return which of Sin and Cos read an initializer through products and layout changes, if nothing else reads it."""
    front, seen, waves = [x], {x}, set()
    while front:
        for user in front.pop().consumers():
            if user.op_type in ("Sin", "Cos"):
                waves.add(user.op_type)
            elif user.op_type in _BEFORE_WAVES:
                front.extend(y for y in user.outputs if y not in seen)
                seen.update(user.outputs)
            else:
                return set()
    return waves


def _is_frequency(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether sines and cosines read numbers, or one of them a progression of numbers."""
    waves = _waves(x)
    line = max(numbers.shape, default=1) == numbers.size
    return len(waves) == 2 or (len(waves) == 1 and line and _is_progression(numbers.ravel()))


def _is_input_statistic(x: ir.Value, numbers: np.ndarray) -> bool:
    """Return whether a single number, or one per channel, is subtracted from an input of the model or divides it."""
    dims = [dim for dim in numbers.shape if dim != 1]
    return len(dims) <= 1 and any(
        user.op_type in ("Sub", "Div") and user.inputs[1] is x and _is_data(user.inputs[0]) for user in x.consumers()
    )


def _is_data(x: ir.Value | None) -> bool:
    """Return whether a value is an input of the model, up to its type, layout and scale."""
    node = None if x is None else x.producer()
    if node is not None and node.op_type in _BEFORE_STATISTICS:
        return _is_data(node.inputs[0])
    return x is not None and x.is_graph_input() and x.const_value is None


_WAVE: _Rule = (_is_wave, _TABLE)
# What numbers and uses suggest. Uses alone decide the rules after _WAVE, and a part of a table that one.
_LIKELY: tuple[_Rule, ...] = (
    (_is_switch, "a mask: zeros and ones"),
    (_is_grid, "a grid, or whole numbers such as anchors and strides"),
    (_is_filter, "a symmetric filter, the same for all channels"),
    (_is_triangle, "a causal mask: a triangle of ones"),
    _WAVE,
    (_is_frequency, "frequencies of sines and cosines"),
    (_is_input_statistic, "shifts or scales an input of the model"),
)

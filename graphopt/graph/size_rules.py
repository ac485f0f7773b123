"""Derive the sizes of operators' outputs, and the elements of vectors of sizes, as formulas.

A rule returns one list for each output, with a formula for each axis, or None for an axis that it does not know; it
raises `Unknown` if it knows none. What it says holds for all positive sizes of the inputs at which the model runs
without an error.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import Protocol, TypeVar

import onnx_ir as ir

from graphopt.graph.formulas import (
    Formula,
    ceiling,
    floor,
    is_nonnegative,
    largest,
    number,
    quotient,
    smallest,
)
from graphopt.graph.operators import ELEMENTWISE_OPERATORS, POOLS, Attributes
from graphopt.graph.values import fixed
from graphopt.graph.windows import is_same, window_of

Maybe = Formula | None
_Sizes = list[Maybe]  # of one output
_T = TypeVar("_T")

_REDUCTIONS = (
    *("ReduceL1", "ReduceL2", "ReduceLogSum", "ReduceLogSumExp", "ReduceMax", "ReduceMean", "ReduceMin"),
    *("ReduceProd", "ReduceSum", "ReduceSumSquare", "ArgMax", "ArgMin"),
)
_FAR = 2**31 - 1  # the end of a slice that exporters write for the end of an axis
_ALIGNED_SINCE = 7  # opset; before, an attribute said which axes broadcast
_UNEVEN_SINCE = 18  # opset; before, a Split without sizes made equal parts
_MOST_BITS = 12  # of the denominator of a scale that float32 multiplies exactly


class Unknown(Exception):
    """Report that a rule needs sizes or numbers that are not known."""


def _known(x: _T | None) -> _T:
    if x is None:
        raise Unknown
    return x


class _Facts(Protocol):
    """Provide the known sizes and elements of values."""

    def of_shape(self, x: ir.Value) -> list[Formula] | None: ...

    def values(self, x: ir.Value | None) -> list[Maybe] | None: ...

    def of(self, size: int | str) -> Formula: ...

    def is_open(self, size: int | str) -> bool: ...


@dataclass(frozen=True)
class NodeSizes:
    """Read a node and what is known of its inputs."""

    node: ir.Node
    attributes: Attributes
    version: int
    facts: _Facts

    def input(self, i: int) -> ir.Value | None:
        """Return an input, or None where it is missing."""
        return self.node.inputs[i] if i < len(self.node.inputs) else None

    def shape_if_known(self, i: int) -> list[Formula] | None:
        """Return the sizes of an input, or None if one is unknown."""
        x = self.input(i)
        return None if x is None else self.facts.of_shape(x)

    def shape(self, i: int) -> list[Formula]:
        """Return the sizes of an input."""
        return _known(self.shape_if_known(i))

    def values(self, i: int) -> list[Maybe]:
        """Return the elements of an input that is a short vector of integers."""
        return _known(self.facts.values(self.input(i)))

    def numbers(self, i: int) -> list[int]:
        """Return the elements of an input that are all constant."""
        return _numbers(self.values(i))

    def option(self, i: int, name: str) -> list[Maybe]:
        """Return integers from an input, or from the attribute that older opsets have."""
        if name in self.attributes:
            given = self.attributes[name]
            return [number(int(each)) for each in (given if isinstance(given, Sequence) else [given])]
        return self.values(i)

    def axes(self, i: int, name: str, rank: int) -> list[int]:
        """Return axes from an input or an attribute, counted from the front."""
        return [axis % rank for axis in _numbers(self.option(i, name))]

    @property
    def to(self) -> _Sizes:
        """The sizes of the first output that are known already."""
        names = [dim if isinstance(dim, int) else dim.value for dim in _known(self.node.outputs[0].shape)]
        return [None if x is None or self.facts.is_open(x) else self.facts.of(x) for x in names]


def _numbers(values: Sequence[Maybe]) -> list[int]:
    found = [_known(_known(x).number) for x in values]
    if any(x.denominator != 1 for x in found):
        raise Unknown
    return [int(x) for x in found]


def broadcast(shapes: Sequence[Sequence[Maybe]]) -> list[Maybe]:
    """Return the sizes of arrays of some sizes once they broadcast against each other."""
    rank = max(map(len, shapes))
    padded = [[*[number(1)] * (rank - len(shape)), *shape] for shape in shapes]
    return [_broadcast(place) for place in zip(*padded, strict=True)]


def _broadcast(sizes: Sequence[Maybe]) -> Maybe:
    """Return the size of an axis: all sizes but 1 are equal."""
    left = {x for x in sizes if x is None or x.number != 1}
    if len(left) < 2:
        return next(iter(left), number(1))
    for x in left:
        if x is not None and x.number is not None and x.number > 1:
            return x
    known = [x for x in left if x is not None]
    return largest(*known) if len(known) == len(left) and all(map(_is_positive, known)) else None


def _is_positive(x: Formula) -> bool:
    return is_nonnegative(x - 1)


def _elementwise(read: NodeSizes) -> list[_Sizes]:
    shapes = [read.facts.of_shape(x) for x in read.node.inputs if x is not None]
    return [broadcast(list(map(_known, shapes)))] if shapes and read.version >= _ALIGNED_SINCE else []


def _matmul(read: NodeSizes) -> list[_Sizes]:
    a, b = read.shape(0), read.shape(1)
    return [] if min(len(a), len(b)) < 2 else [[*broadcast([a[:-2], b[:-2]]), a[-2], b[-1]]]


def _gemm(read: NodeSizes) -> list[_Sizes]:
    a, b = read.shape_if_known(0), read.shape_if_known(1)
    rows = a[1 if read.attributes.get("transA") else 0] if a is not None and len(a) == 2 else None
    columns = b[0 if read.attributes.get("transB") else 1] if b is not None and len(b) == 2 else None
    return [[rows, columns]]


def _reshape(read: NodeSizes) -> list[_Sizes]:
    x, to = read.shape_if_known(0), read.to
    wanted, result = list[Maybe](), list(to)
    with contextlib.suppress(Unknown):
        wanted = read.option(1, "shape")
    if len(wanted) == len(to):
        for i, size in enumerate(wanted):
            if size is not None and size.number == 0 and not read.attributes.get("allowzero"):
                result[i] = x[i] if x is not None and i < len(x) else to[i]
            elif size is not None and size.number == -1:
                result[i] = to[i]
            elif size is not None and _is_positive(size):
                result[i] = size
    return [_solved(x, result)]


def _solved(x: list[Formula] | None, result: list[Maybe]) -> list[Maybe]:
    """Solve for the only size that is not known, as input and output have the same number of elements."""
    if x is None or result.count(None) != 1:
        return result
    known = [size for size in result if size is not None]
    if any(size.number == 0 for size in known):
        return result
    return [quotient(x, known) if size is None else size for size in result]


def _flatten(read: NodeSizes) -> list[_Sizes]:
    x = read.shape(0)
    axis = read.attributes["axis"] + len(x) * (read.attributes["axis"] < 0)
    return [[_volume(x[:axis]), _volume(x[axis:])]]


def _volume(sizes: Sequence[Formula]) -> Formula:
    return functools.reduce(Formula.__mul__, sizes, number(1))


def _slice(read: NodeSizes) -> list[_Sizes]:
    x, starts, ends = read.shape(0), read.option(1, "starts"), read.option(2, "ends")
    has_axes = "axes" in read.attributes or read.input(3) is not None
    axes = read.axes(3, "axes", len(x)) if has_axes else list(range(len(starts)))
    steps = [1 if read.input(4) is None else 0] * len(starts)  # 0 stands for an unknown one
    with contextlib.suppress(Unknown):
        steps = read.numbers(4)
    result: list[Maybe] = list(x)
    for i, axis in enumerate(axes):
        result[axis] = _sliced(x[axis], starts[i], ends[i], steps[i])
    return [result]


def _sliced(size: Formula, start: Maybe, end: Maybe, step: int) -> Maybe:
    if start is None or end is None or step == 0:
        return None
    if step < 0:
        is_whole = step == -1 and start.number in (-1, _FAR, 2**63 - 1) and (end.number or 0) < -_FAR
        return size if is_whole else None
    first, last = _bound(size, start), _bound(size, end)
    if first is None or last is None:
        return None
    return largest(number(0), ceiling((last - first) * Fraction(1, step)))


def _bound(size: Formula, bound: Formula) -> Maybe:
    """Return where a slice begins or ends: a bound below 0 counts from the end."""
    if bound.number is not None and bound.number >= _FAR:
        return size
    if is_nonnegative(bound):
        return smallest(bound, size)
    return largest(number(0), size + bound) if is_nonnegative(bound * -1 - 1) else None


def _concat(read: NodeSizes) -> list[_Sizes]:
    known = list(map(read.shape, range(len(read.node.inputs))))
    if not known or not known[0]:
        return []
    axis = read.attributes.get("axis", 1) % len(known[0])
    total = functools.reduce(Formula.__add__, (shape[axis] for shape in known))
    return [[total if i == axis else None for i in range(len(known[0]))]]


def _split(read: NodeSizes) -> list[_Sizes]:
    x, count = read.shape(0), len(read.node.outputs)
    axis = read.attributes["axis"] % len(x)
    parts: Sequence[Maybe] | None = None
    if "split" in read.attributes or read.input(1) is not None:
        parts = read.option(1, "split")
    elif read.version < _UNEVEN_SINCE:
        parts = [quotient([x[axis]], [number(count)])] * count
    elif x[axis].number is not None or count == 2:
        each = ceiling(x[axis] * Fraction(1, count))
        parts = [*[each] * (count - 1), x[axis] - each * (count - 1)]
    if parts is None or len(parts) != count:
        return []
    return [[*x[:axis], part, *x[axis + 1 :]] for part in parts]


def _pad(read: NodeSizes) -> list[_Sizes]:
    if "paddings" in read.attributes:
        return []
    x, pads = read.shape(0), read.option(1, "pads")
    axes = list(range(len(x))) if read.input(3) is None else read.axes(3, "axes", len(x))
    if len(pads) != 2 * len(axes):
        return []
    result: list[Maybe] = list(x)
    for i, axis in enumerate(axes):
        begin, end = pads[i], pads[i + len(axes)]
        result[axis] = None if begin is None or end is None else x[axis] + begin + end
    return [result]


def _windows(read: NodeSizes) -> list[_Sizes]:
    """Count windows of a convolution or a pool along each axis, as ONNX Runtime does since opset 22."""
    is_pool, x = read.node.op_type in POOLS, read.shape(0)
    w = [] if is_pool else read.shape(1)
    kernel = read.attributes.get("kernel_shape")
    taps = list(map(number, kernel)) if kernel else w[2:]
    window = window_of(read.node, kernel or [1] * len(taps))
    counts: list[Maybe] = []
    for i, size in enumerate(x[2:]):
        by = Fraction(1, window.strides[i])
        if is_same(read.node):
            counts.append(ceiling(size * by))
            continue
        room = size + window.begin[i] + window.end[i] - (taps[i] - 1) * window.dilations[i] - 1
        if read.attributes.get("ceil_mode"):
            # A last window that begins in the padding at the end does not count
            count = smallest(ceiling(room * by) + 1, ceiling((size + window.begin[i]) * by))
        else:
            count = floor(room * by) + 1
        # Where no window fits, the runtime rounds to 0, not down, and counts one.
        counts.append(count if count.number is None or is_nonnegative(room) else None)
    return [[x[0], x[1] if is_pool else w[0], *counts]] * len(read.node.outputs)


def _transposed_windows(read: NodeSizes) -> list[_Sizes]:
    x, w = read.shape(0), read.shape(1)
    n, channels = len(x) - 2, w[1] * int(read.attributes.get("group") or 1)
    if "output_shape" in read.attributes:
        return [[x[0], channels, *map(number, read.attributes["output_shape"][-n:])]]
    window = window_of(read.node, [1] * n)
    more = list(read.attributes.get("output_padding") or [0] * n)
    sizes: list[Maybe] = []
    for i, size in enumerate(x[2:]):
        reach = (w[i + 2] - 1) * window.dilations[i] + 1 + more[i]  # of one window
        pads = number(window.begin[i] + window.end[i])
        crop = largest(reach - window.strides[i], number(0)) if is_same(read.node) else pads
        sizes.append((size - 1) * window.strides[i] + reach - crop)
    return [[x[0], channels, *sizes]]


def _resize(read: NodeSizes) -> list[_Sizes]:
    """Derive sizes from given sizes, or from scales that float32, in which the runtime multiplies, has exactly."""
    x, sizes = read.shape(0), read.facts.values(read.input(3))
    policy = read.attributes.get("keep_aspect_ratio_policy", "stretch")
    if read.attributes.get("axes") or policy != "stretch":
        return []
    if read.node.op_type == "Resize" and sizes and len(sizes) == len(x):
        return [sizes]
    at = 2 if read.node.op_type == "Resize" and read.version > 10 else 1
    scales = read.attributes.get("scales")
    if scales is None and (array := fixed(read.input(at))) is not None:
        scales = array.ravel().tolist()
    if scales is None or len(scales) != len(x):
        return []
    return [[_scaled(size, Fraction(float(scale))) for size, scale in zip(x, scales, strict=True)]]


def _scaled(size: Formula, scale: Fraction) -> Maybe:
    is_exact = scale.denominator <= 2**_MOST_BITS and scale.numerator <= 2**_MOST_BITS
    return floor(size * scale) if is_exact and scale > 0 else None


def _tile(read: NodeSizes) -> list[_Sizes]:
    x, repeats = read.shape(0), read.values(1)
    if len(repeats) != len(x):
        return []
    return [[None if n is None else size * n for size, n in zip(x, repeats, strict=True)]]


def _reduction(read: NodeSizes) -> list[_Sizes]:
    x = read.shape(0)
    if read.node.outputs[0].shape is None:
        return []
    if "axis" in read.attributes:
        axes = [read.attributes["axis"] % len(x)]
    elif "axes" in read.attributes or read.input(1) is not None:
        axes = read.axes(1, "axes", len(x))
    else:
        axes = [] if read.attributes.get("noop_with_empty_axes") else list(range(len(x)))
    is_kept = bool(read.attributes.get("keepdims", 1))
    return [[number(1) if i in axes else size for i, size in enumerate(x) if is_kept or i not in axes]]


def _squeeze(read: NodeSizes) -> list[_Sizes]:
    x = read.shape(0)
    axes = read.axes(1, "axes", len(x))
    return [[size for i, size in enumerate(x) if i not in axes]]


def _unsqueeze(read: NodeSizes) -> list[_Sizes]:
    x, rank = read.shape(0), len(_known(read.node.outputs[0].shape))
    axes = read.axes(1, "axes", rank)
    if rank != len(x) + len({*axes}):
        return []
    sizes = iter(x)
    return [[number(1) if i in axes else next(sizes) for i in range(rank)]]


def _range(read: NodeSizes) -> list[_Sizes]:
    start, limit, step = (_known(next(iter(read.values(i)), None)) for i in range(3))
    if not step.number:
        return []
    return [[largest(number(0), ceiling((limit - start) * (1 / step.number)))]]


def _top(read: NodeSizes) -> list[_Sizes]:
    x, k = read.shape(0), read.option(1, "k")
    axis = read.attributes.get("axis", -1) % len(x)
    return [[*x[:axis], k[0], *x[axis + 1 :]]] * 2


def _one_hot(read: NodeSizes) -> list[_Sizes]:
    x, depth = read.shape(0), read.values(1)
    axis = read.attributes.get("axis", -1) % (len(x) + 1)
    return [[*x[:axis], depth[0], *x[axis:]]]


def _depth_to_space(read: NodeSizes) -> list[_Sizes]:
    x, block = read.shape(0), read.attributes["blocksize"]
    if len(x) != 4:
        return []
    if read.node.op_type == "DepthToSpace":
        return [[x[0], quotient([x[1]], [number(block**2)]), x[2] * block, x[3] * block]]
    return [[x[0], x[1] * block**2, *(quotient([size], [number(block)]) for size in x[2:])]]


RULES: dict[str, Callable[[NodeSizes], list[_Sizes]]] = {
    **dict.fromkeys(ELEMENTWISE_OPERATORS, _elementwise),
    **dict.fromkeys([*POOLS, "Conv", "ConvInteger"], _windows),
    **dict.fromkeys(_REDUCTIONS, _reduction),
    "Concat": _concat,
    "ConstantOfShape": lambda read: [read.values(0)],
    "ConvTranspose": _transposed_windows,
    "DepthToSpace": _depth_to_space,
    "Expand": lambda read: [broadcast([read.shape(0), read.values(1)])],
    "Flatten": _flatten,
    "Gemm": _gemm,
    "MatMul": _matmul,
    "OneHot": _one_hot,
    "Pad": _pad,
    "Range": _range,
    "Reshape": _reshape,
    "Resize": _resize,
    "Slice": _slice,
    "SpaceToDepth": _depth_to_space,
    "Split": _split,
    "Squeeze": _squeeze,
    "Tile": _tile,
    "TopK": _top,
    "Unsqueeze": _unsqueeze,
    "Upsample": _resize,
}


def _shape_values(read: NodeSizes) -> list[Maybe]:
    names = [dim if isinstance(dim, int) else dim.value for dim in _known(_known(read.input(0)).shape)]
    sizes = [None if name is None else read.facts.of(name) for name in names]
    return sizes[read.attributes.get("start", 0) : read.attributes.get("end")]


def _cast(read: NodeSizes) -> list[Maybe]:
    """Take integers of another type, but not from floats, which round."""
    to = read.attributes["to"] if read.node.op_type == "Cast" else _known(read.input(1)).dtype
    if to not in (ir.DataType.INT64, ir.DataType.INT32):
        raise Unknown
    return read.values(0)


def _cut(read: NodeSizes) -> list[Maybe]:
    x = read.values(0)
    starts, ends = _numbers(read.option(1, "starts")), _numbers(read.option(2, "ends"))
    steps = read.numbers(4) if read.input(4) is not None else [1]
    if len(starts) != 1:
        raise Unknown
    return x[starts[0] : ends[0] : steps[0]]


def _joined(read: NodeSizes) -> list[Maybe]:
    parts = [read.facts.values(x) for x in read.node.inputs]
    if None in parts:
        shapes = [None if x is None else read.facts.of_shape(x) for x in read.node.inputs]
        lengths = [_known(shape[0].number if shape else None) for shape in shapes]
        unknown: list[list[Maybe]] = [[None] * min(int(n), 99) for n in lengths]
        parts = [gap if part is None else part for part, gap in zip(parts, unknown, strict=True)]
    return [x for part in parts for x in part or ()]


def _each(function: Callable[..., Maybe]) -> Callable[[NodeSizes], list[Maybe]]:
    """Return a rule that computes elements from those of vectors that broadcast."""
    return lambda read: [None if None in row else function(*row) for row in _rows(read)]


def _rows(read: NodeSizes) -> list[tuple[Maybe, ...]]:
    """Return the elements of a node's inputs in the same place, once these broadcast."""
    known = list(map(read.values, range(len(read.node.inputs))))
    count = max(map(len, known))
    if any(len(x) not in (1, count) for x in known):
        raise Unknown
    return list(zip(*(x * count if len(x) == 1 else x for x in known), strict=True))


def _divided(a: Formula, b: Formula) -> Maybe:
    """Return an integer quotient, which the runtime rounds to zero."""
    if not is_nonnegative(a) or not _is_positive(b):
        return None
    return floor(a * (1 / b.number)) if b.number is not None else quotient([a], [b]) if a == b else None


def _rest(a: Formula, b: Formula) -> Maybe:
    whole = _divided(a, b)
    return None if whole is None else a - whole * b


def _truth(is_true: bool, is_false: bool) -> Maybe:
    return number(1) if is_true else number(0) if is_false else None


def _equal(a: Formula, b: Formula) -> Maybe:
    return _truth(a == b, _is_positive(a - b) or _is_positive(b - a))


def _less(a: Formula, b: Formula) -> Maybe:
    return _truth(_is_positive(b - a), is_nonnegative(a - b))


def _chosen(condition: Maybe, x: Maybe, y: Maybe) -> Maybe:
    if x == y or (condition is not None and condition.number == 1):
        return x
    return y if condition is not None and condition.number == 0 else None


def _filled(read: NodeSizes) -> list[Maybe]:
    count, fill = read.numbers(0), read.attributes.get("value")
    if len(count) != 1 or not 0 <= count[0] <= 99 or (fill is not None and fill.size != 1):
        raise Unknown
    return [number(0 if fill is None else int(fill.numpy().item()))] * count[0]


def _reduced(function: Callable[..., Formula]) -> Callable[[NodeSizes], list[Maybe]]:
    def rule(read: NodeSizes) -> list[Maybe]:
        known = list(map(_known, read.values(0)))
        if not known or len(_known(_known(read.input(0)).shape)) != 1:
            raise Unknown
        if read.attributes.get("noop_with_empty_axes") and read.input(1) is None:
            return [*known]
        return [function(*known)]

    return rule


VALUES: dict[str, Callable[[NodeSizes], list[Maybe]]] = {
    **dict.fromkeys(["Identity", "Reshape", "Squeeze", "Unsqueeze"], lambda read: read.values(0)),
    "Abs": _each(lambda a: a if is_nonnegative(a) else None),
    "Add": _each(Formula.__add__),
    **dict.fromkeys(["Cast", "CastLike"], _cast),
    "Concat": _joined,
    "ConstantOfShape": _filled,
    "Div": _each(_divided),
    "Equal": _each(_equal),
    "Gather": lambda read: [read.values(0)[i] for i in read.numbers(1)],
    "Greater": _each(lambda a, b: _less(b, a)),
    "GreaterOrEqual": _each(lambda a, b: _less(b - 1, a)),
    "Less": _each(_less),
    "LessOrEqual": _each(lambda a, b: _less(a - 1, b)),
    "Max": _each(largest),
    "Min": _each(smallest),
    "Mod": _each(_rest),
    "Mul": _each(Formula.__mul__),
    "Neg": _each(lambda a: a * -1),
    "Not": _each(lambda a: number(1) - a),
    "ReduceMax": _reduced(largest),
    "ReduceMin": _reduced(smallest),
    "ReduceProd": _reduced(lambda *sizes: _volume(sizes)),
    "ReduceSum": _reduced(lambda *sizes: functools.reduce(Formula.__add__, sizes)),
    "Shape": _shape_values,
    "Size": lambda read: [_volume(read.shape(0))],
    "Slice": _cut,
    "Sub": _each(Formula.__sub__),
    "Where": lambda read: [_chosen(*row) for row in _rows(read)],
}

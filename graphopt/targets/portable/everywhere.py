"""Write operators in forms that any runtime computes."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.flat_indices import flat_indices, flat_indices_of_rows
from graphopt.graph.values import constant_of, rank
from graphopt.graph.windows import is_same, window_of
from graphopt.targets.portable.form import Form, given, known_sizes

_INTEGERS = ir.DataType.INT32, ir.DataType.INT64
_EXACT = 2**24  # the largest number up to which float32 has all integers
_REDUCED = ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.INT32, ir.DataType.INT64  # by ScatterElements on CPUs


def product_of_shape(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Size as the product of the shape. Importers for JAX and tinygrad do not know Size."""
    return [op.ReduceProd(op.shape_of(given(node.inputs[0])), keepdims=0)]


def chain_of_sums(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write a Sum as Adds, from the first to the last. WebGPU has no kernel for Sum."""
    first, *others = map(given, node.inputs)
    return [functools.reduce(op.Add, others, first) if others else op.Identity(first)]


def mean(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Mean as Adds and a product. WebGPU and CUDA have no kernel for Mean."""
    return [chain_of_sums(op, node)[0] * (1 / len(node.inputs))]


def celu(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Celu as Elu with a scale. WebGPU and CUDA have no kernel for Celu."""
    alpha = node.attributes.get_float("alpha", 1.0)
    return [op.Elu(given(node.inputs[0]) * (1 / alpha)) * alpha]


def _along_no_axis(function: Callable[[Emitter, ir.Value], ir.Value]) -> Form:
    """Return the form of a reduction along no axes, which is a function of each element.

    WebGPU's and CUDA's kernels return their input.
    """

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        axes = np.array([]) if len(node.inputs) < 2 or node.inputs[1] is None else constant_of(node.inputs[1])
        whole = axes is None or axes.size or not node.attributes.get_int("noop_with_empty_axes", 0)
        return None if whole else [function(op, given(node.inputs[0]))]

    return form


ALONG_NO_AXIS: dict[str, Form] = {
    "ReduceL1": _along_no_axis(lambda op, x: op.Abs(x)),
    "ReduceL2": _along_no_axis(lambda op, x: op.Abs(x)),
    "ReduceLogSum": _along_no_axis(lambda op, x: op.Log(x)),
    "ReduceSumSquare": _along_no_axis(lambda op, x: op.Mul(x, x)),
    **{
        f"Reduce{name}": _along_no_axis(lambda op, x: op.Identity(x))
        for name in ("LogSumExp", "Max", "Mean", "Min", "Prod")
    },
}


def average_of_whole_windows(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Widen the pads of an AveragePool that counts them and cuts its last windows off, and scale these windows.

    ONNX Runtime up to 1.24 divides the sums of such windows by the number of all their elements.
    """
    counted, rounded = (node.attributes.get_int(name, 0) for name in ("count_include_pad", "ceil_mode"))
    x, n = given(node.inputs[0]), len(window_of(node).kernel)
    sizes, shape = known_sizes(x), known_sizes(node.outputs[0])
    if not (counted and rounded) or is_same(node) or sizes is None or shape is None:
        return None
    window, counts, ends = window_of(node), [], []
    for i in range(n):
        size, windows = sizes[2 + i], shape[2 + i]
        if size is None or windows is None:
            return None
        padded, starts = window.begin[i] + size + window.end[i], window.strides[i] * np.arange(windows)
        taps = window.dilations[i] * np.arange(window.kernel[i])
        counts.append((starts[:, None] + taps < padded).sum(1))
        ends.append(max(window.end[i], int(starts[-1]) + window.extent[i] - window.begin[i] - size))
    kept = {name: x for name, x in node.attributes.items() if name in ("kernel_shape", "strides", "dilations")}
    y = op.AveragePool(x, **kept, pads=[*window.begin, *ends], count_include_pad=1)
    factors = window.taps / functools.reduce(np.multiply.outer, counts)
    return [op.Mul(y, op.constant(factors, like=y))]


def product_by_a_copy(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Gemm by the transpose of a frozen weight that others read as a product by a transposed copy.

    OpenVINO 2026.4 multiplies by the weight itself in some graphs, such as that of an adapter beside a square weight.
    """
    a, b, *c = node.inputs
    attributes = {name: attribute.value for name, attribute in node.attributes.items()}
    is_product = attributes.pop("transB", 0) and attributes.pop("alpha", 1.0) == 1 and not attributes.get("transA")
    w = constant_of(b) if is_product and not any(c) and b is not None and not b.is_graph_input() else None
    if a is None or b is None or w is None or len(b.uses()) < 2:
        return None
    return [op.MatMul(a, op.constant(np.ascontiguousarray(w.T)))]


def rows_by_element(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a ScatterND that reduces as a ScatterElements along one flat axis.

    On several threads of a CPU, ONNX Runtime's ScatterND loses rows (tests/faults.py: ScatterND-threads), and
    ScatterElements takes all in order.
    """
    x, where, rows = map(given, node.inputs)
    columns = (known_sizes(where) or [None])[-1]
    how = node.attributes.get_string("reduction", "none")
    if how == "none" or x.dtype not in _REDUCED or x.shape is None or not columns or 0 in x.shape:
        return None
    shape = op.Shape(x)
    if columns > 1:  # the number of the row that several columns name, which this looks up and checks
        where = op.GatherND(flat_indices(op, op.Slice(shape, [0], [columns])), where)
    where = flat_indices_of_rows(op, shape, where, columns, rank(x))
    flat = [op.Reshape(value, [-1]) for value in (x, where, rows)]
    return [op.Reshape(op.ScatterElements(*flat, axis=0, reduction=how), shape, allowzero=1)]


def added_by_product(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a ScatterElements that adds as a product of marks: MNN keeps the last of the numbers for one place.

    The array becomes a matrix, nearly square if its size S has such factors: then n numbers have 2 n sqrt(S) marks.
    """
    x, where, values = map(given, node.inputs)
    sizes = known_sizes(x)
    if node.attributes.get_string("reduction") != "add" or not sizes or None in sizes or 0 in sizes:
        return None
    size = math.prod(sizes)  # type: ignore[arg-type]
    columns = next(n for n in range(math.isqrt(size), 0, -1) if size % n == 0)
    places = op.Reshape(op.Range(0, size, 1), sizes)
    axis = node.attributes.get_int("axis", 0)
    where = op.Where(op.Less(where, 0), where + sizes[axis], where)  # MNN's GatherElements counts from the start alone
    where = op.Reshape(op.GatherElements(places, where, axis=axis), [-1, 1])
    row = op.cast(op.Equal(op.Range(0, size // columns, 1), where / columns), x.dtype)
    column = op.cast(op.Equal(op.Range(0, columns, 1), op.Mod(where, columns)), x.dtype)
    total = op.MatMul(op.Transpose(row * op.Reshape(values, [-1, 1]), perm=[1, 0]), column)
    return [x + op.Reshape(total, sizes)]


def product_of_limbs(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a product of integers by exact ones of their limbs of 11 bits in float32; it wraps around in 32 bits.

    MNN multiplies the numbers as float32, which round above 2^24 (tests/faults.py: MNN-integers): random numbers were
    others. Its int64 has 32 bits. Its sums, quotients and comparisons of integers are exact.
    """
    dtype = node.outputs[0].dtype
    if dtype not in _INTEGERS:
        return None
    a, b = (_limbs(op, op.cast(given(x), ir.DataType.INT32)) for x in node.inputs)
    parts = [[op.Mul(a[i], b[total - i]) for i in range(total + 1)] for total in range(3)]
    low, middle, high = (op.cast(functools.reduce(op.Add, terms), ir.DataType.INT32) for terms in parts)
    return [op.cast(low + _shifted(op, middle + _shifted(op, high)), dtype)]


def extreme_by_comparison(comparison: str) -> Form:
    """Return the form of a Max or Min of integers, which MNN rounds to float32, too."""

    def form(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        def chosen(a: ir.Value, b: ir.Value) -> ir.Value:
            return op.Where(op.call_op(comparison, [a, b], {}), b, a)

        first, *others = map(given, node.inputs)
        if first.dtype not in _INTEGERS:
            return None
        return [functools.reduce(chosen, others, first) if others else op.Identity(first)]

    return form


def clip_by_extremes(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Clip of integers, which MNN rounds to float32, as Max and Min."""
    x, *bounds = node.inputs
    y = given(x)
    if y.dtype not in _INTEGERS:
        return None
    for name, bound in zip(("Max", "Min"), bounds, strict=False):
        y = y if bound is None else op.call_op(name, [y, bound], {})  # type: ignore[assignment]
    return [op.Identity(y)]


def abs_by_comparison(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write an Abs of integers, which MNN rounds to float32, by the opposites of those below 0."""
    x = given(node.inputs[0])
    return [op.Where(op.Less(x, 0), op.Neg(x), x)] if x.dtype in _INTEGERS else None


def range_by_sums(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Range of integers as sums of its steps: MNN computes in float32 how many there are."""
    bounds = start, limit, delta = [given(x) for x in node.inputs]
    known = [constant_of(x) for x in bounds if not x.is_graph_input()]
    is_exact = len(known) == 3 and all(x is not None and abs(x.item()) <= _EXACT for x in known)
    if start.dtype not in _INTEGERS or is_exact:
        return None
    count = op.Max((limit - start + delta - op.Sign(delta)) / delta, 0)
    steps = op.Expand(delta, op.Reshape(op.cast(count, ir.DataType.INT64), [1]))
    return [start + op.CumSum(steps, op.constant(0), exclusive=1)]


def of_near_indices(form: Form | None = None) -> Form:
    """Return a form that refuses to read or write single elements of an array of more than 2^24 numbers.

    MNN rounds their indices to float32 (tests/faults.py: MNN-indices).
    """

    def checked(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
        sizes = known_sizes(node.inputs[0])
        if sizes and None not in sizes and math.prod(sizes) > _EXACT:  # type: ignore[arg-type]
            raise GraphoptError(
                f"{node.op_type} {node.name}: expected an array of at most {_EXACT} numbers, since MNN rounds "
                f"indices to float32, found {' x '.join(map(str, sizes))}: train on another runtime"
            )
        return None if form is None else form(op, node)

    return checked


def _limbs(op: Emitter, x: ir.Value) -> list[ir.Value]:
    """Return numbers of 11, 11 and 10 bits with the sign of x as float32: x is the first + 2^11 second + 2^22 third."""
    rest = x / 2**11
    top = rest / 2**11
    limbs = x - _scaled(op, rest, 2**11), rest - _scaled(op, top, 2**11), top
    return [op.cast(limb, ir.DataType.FLOAT) for limb in limbs]


def _scaled(op: Emitter, x: ir.Value, factor: int) -> ir.Value:
    """Return an int32 number of less than 24 bits times a power of 2."""
    return op.cast(op.cast(x, ir.DataType.FLOAT) * factor, ir.DataType.INT32)


def _shifted(op: Emitter, x: ir.Value) -> ir.Value:
    """Return an int32 number times 2^11, which wraps around."""
    half = _scaled(op, x - _scaled(op, x / 2**21, 2**21), 2**10)
    return op.Add(half, half)

"""Lower operators of com.microsoft whose weights are stored in 2, 4 or 8 bits, in blocks that share a scale.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. A weight stays packed:
DequantizeLinear reads the bytes that the file has. It is frozen unless it is asked for by name.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.packed import gathered, unpacked, view_of
from graphopt.graph.values import dims_of, dtype_of, name_of, rank
from passes.lowering.registry import freeze, lowers, plus, stored

BITS = (2, 4, 8)
MAT_MUL = "MatMulNBits"
_PACKED = (MAT_MUL, "QMoE")  # operators that read the weights that `viewed` replaces


@lowers(MAT_MUL, domain=MICROSOFT)
def mat_mul_n_bits(
    op: Emitter,
    a: Value,
    b: Value,
    scales: Value,
    zero_points: Input = None,
    group_index: Input = None,
    bias: Input = None,
    *,
    K: int,
    N: int,
    bits: int = 4,
    block_size: int,
    accuracy_level: int = 0,
    node: ir.Node,
) -> Value:
    """Compute a w^T + bias for a packed weight [N,K], whose rows of blocks become the rows of one DequantizeLinear.

    One scale for each row is the form that runtimes compute fastest and do not fuse with the product, which would
    round `a`. `accuracy_level`, which permits a runtime to round `a`, is ignored.
    """
    if bits not in BITS:
        raise GraphoptError(f"its attribute bits={bits} is not covered: expected 2, 4 or 8")
    blocks = -(-K // block_size)
    groups = None if group_index is None else stored(group_index, "groups").ravel()
    if groups is not None and not np.array_equal(groups, np.arange(K) // block_size):
        if len(groups) != K or groups.min() < 0 or groups.max() >= blocks:
            raise GraphoptError(f"expected its input 4 to be {K} numbers below {blocks}, found others")
        q = viewed(b, "weight", integer_type(bits), [N * blocks, block_size], bits)
        w = _of_groups(op, q, scales, zero_points, groups, N, bits)
        return plus(op.MatMul(a, op.Transpose(w, perm=[1, 0])), bias)
    w = packed_matrix(op, b, scales, zero_points, N, K, block_size, bits)
    return plus(op.MatMul(a, op.Transpose(w, perm=[1, 0])), bias)


def packed_matrix(
    op: Emitter,
    b: Value,
    scales: Value,
    zero_points: Input,
    n: int,
    k: int,
    block_size: int,
    bits: int,
    lines: int | None = None,
) -> Value:
    """Return a packed weight as floats, [n,k].

    Args:
        b: the integers, of which rows of `block_size` share a scale.
        lines: the number of rows of packed zero points, which are padded to whole bytes; n by default.
    """
    blocks = -(-k // block_size)
    rows, dtype, lines = n * blocks, integer_type(bits), lines or n
    q = viewed(b, "weight", dtype, [rows, block_size], bits)
    scale, shift = viewed(scales, "scales", None, [rows]), None
    zero: Input = None
    if zero_points is None:
        zero = op.constant(np.full(rows, 2 ** (bits - 1)).astype(dtype.numpy()))
    elif zero_points.dtype is ir.DataType.UINT8:
        points = unpacked(stored(zero_points, "zero points").reshape(lines, -1), bits)[:, : rows // lines]
        zero = op.constant(points.ravel().astype(dtype.numpy()))
    else:
        shift = op.Unsqueeze(scale * viewed(zero_points, "zero points", None, [rows]), [1])
    return dequantized_rows(op, q, scale, zero, n, k, shift)


def _of_groups(
    op: Emitter, q: Value, scales: Value, zero_points: Input, groups: np.ndarray, n: int, bits: int
) -> Value:
    """Return a weight [n,K] of which each column has the scale and the zero point of its group, as by `act_order`."""
    blocks = dims_of(q)[0] // n
    middle = op.constant(np.array(0 if zero_points else 2 ** (bits - 1)).astype(integer_type(bits).numpy()))
    numbers = dequantized_rows(op, q, op.CastLike(1.0, scales), middle, n, len(groups))

    def each(x: Value) -> Value:
        return op.Gather(op.Reshape(x, [n, blocks]), op.constant(groups.astype(np.int64)), axis=1)

    if zero_points is not None and zero_points.dtype is ir.DataType.UINT8:  # tests/faults.py: act-order-zero-points
        raise GraphoptError(
            f"its packed zero points {zero_points.name!r} beside groups are not covered: ONNX Runtime's CPU provider "
            "ignores them: quantize symmetrically, or without reordering (act_order)"
        )
    if zero_points is not None:
        numbers = numbers - each(freeze(zero_points))
    return numbers * each(freeze(scales))


def dequantized_rows(op: Emitter, q: Value, scale: Value, zero: Input, n: int, k: int, shift: Input = None) -> Value:
    """Return a weight [n,k] from integers, of which each row is a block of one of its rows, without padding.

    Args:
        shift: what to subtract from each row of the integers after they are multiplied by the scale.
    """
    rows = op.DequantizeLinear(q, scale, zero, axis=0)
    padded = dims_of(q)[0] * dims_of(q)[1] // n
    w = op.Reshape(rows if shift is None else rows - shift, [n, -1])
    w.shape = ir.Shape([n, padded])
    return w if padded == k else op.Slice(w, [0], [k], [1])


def viewed(x: Value, name: str, dtype: ir.DataType | None, shape: Sequence[int], bits: int | None = None) -> Value:
    """Return a frozen initializer with the bytes of another in another shape or type, which such operators read.

    It takes the place of the other one, and its name, unless other nodes read that. Two bits become 4.
    """
    tensor, graph = x.const_value, x.graph
    if tensor is None or graph is None or not x.is_initializer() or x.is_graph_input():
        raise GraphoptError(f"expected its {name} {x.name!r} to be an initializer, found a computed value")
    dtype = dtype or tensor.dtype
    if tensor.dtype == dtype and list(tensor.shape) == shape:
        return freeze(x)
    expected = math.prod(shape) * (bits or dtype.bitwidth)
    if tensor.nbytes * 8 != expected:
        raise GraphoptError(f"expected its {name} {x.name!r} to have {expected // 8:,} bytes, found {tensor.nbytes:,}")
    view = ir.val(None, const_value=view_of(tensor, dtype, shape, bits))
    for node, index in list(x.uses()):
        if node.op_type in _PACKED and node.domain == MICROSOFT:
            node.replace_input_with(index, view)
    view.name = name_of(x)
    if x.uses() or x.is_graph_output():
        view.name += ".rows"
    else:
        del graph.initializers[name_of(x)]
    metadata.copy(x, view)
    graph.register_initializer(view)
    return freeze(view)


@lowers("GatherBlockQuantized", domain=MICROSOFT)
def gather_block_quantized(
    op: Emitter,
    data: Value,
    indices: Value,
    scales: Value,
    zero_points: Input = None,
    *,
    bits: int = 4,
    block_size: int = 128,
    gather_axis: int = 0,
    quantize_axis: int = 1,
) -> Value:
    """Gather packed rows of a frozen table, and dequantize only these."""
    dims, dtype = list(dims_of(data)), dtype_of(data)
    gathers, blocks = gather_axis % len(dims), quantize_axis % len(dims)
    if dtype not in (ir.DataType.UINT8, ir.DataType.INT4, ir.DataType.UINT4) or bits not in BITS:
        raise GraphoptError(
            f"its input 0, {data.name!r}, of {dtype.name.lower()} with bits={bits} is not covered: expected uint8 with "
            f"2, 4 or 8 bits, int4 or uint4"
        )
    if gathers == blocks or gathers == len(dims) - 1:
        raise GraphoptError(
            f"its attributes gather_axis={gather_axis} and quantize_axis={quantize_axis} are not covered: expected two "
            f"axes, and to gather along another than the last"
        )
    bits = bits if dtype is ir.DataType.UINT8 else 4
    middle = 0 if dtype is ir.DataType.UINT4 else 2 ** (bits - 1)
    rows = gathered(op, data, indices, gathers, bits)
    place = blocks + (rank(indices) - 1) * (blocks > gathers)
    size = dims_of(rows)[place]
    if not isinstance(size, int):
        raise GraphoptError(f"expected its input 0, {data.name!r}, to have a known shape, found {data.shape}")
    blocks_of = op.constant(np.arange(size) // block_size)
    scale = op.Gather(op.Gather(freeze(scales), indices, axis=gathers), blocks_of, axis=place)
    if zero_points is None:
        zero: Value | float = float(middle)
    else:
        points = gathered(op, zero_points, indices, gathers, bits)
        zero = op.Cast(op.Gather(points, blocks_of, axis=place), to=scale.dtype)
    numbers = op.Cast(rows, to=scale.dtype)
    return (numbers if zero_points is None and not middle else numbers - zero) * scale


def integer_type(bits: int) -> ir.DataType:
    """Return the smallest type of opset 21 that holds so many bits."""
    return ir.DataType.UINT8 if bits == 8 else ir.DataType.UINT4

"""Lower matrix products with packed weights of com.microsoft."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import constant_of
from passes.lowering.contrib import plus
from passes.lowering.registry import freeze, lowers, off


@lowers("MatMulNBits", domain=MICROSOFT)
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
    weight_prepacked: int = 0,
    node: ir.Node,
) -> Value:
    """Compute a w + bias for a frozen weight that stays packed: DequantizeLinear also reads two numbers per byte.

    Frozen weights, most of such a model, therefore need an eighth of the memory of float32, and other parameters
    receive exact gradients. `accuracy_level`, which permits a runtime to round `a`, is ignored. The weight has three
    axes, [blocks, block_size, N], because runtimes would fuse a weight of two axes with the product and round `a`
    again.
    """
    off(weight_prepacked=weight_prepacked)
    if bits not in (2, 4, 8):
        raise GraphoptError(f"its attribute bits={bits} is not covered: expected 2, 4 or 8")
    if group_index is not None:
        raise GraphoptError(f"its input 4, {group_index.name!r}, is not covered: expected none")
    packed, points = constant_of(b), None
    if packed is None:
        raise GraphoptError(f"expected its weight {b.name!r} to be an initializer, found a computed value")
    blocks = -(-K // block_size)
    numbers = _unpacked(packed.reshape(N, -1), bits)
    if zero_points is None:
        points = np.full((N, blocks), 2 ** (bits - 1), np.uint8)
    elif zero_points.dtype == ir.DataType.UINT8:
        known = constant_of(zero_points)
        if known is None:
            raise GraphoptError(
                f"expected its zero points {zero_points.name!r} to be an initializer, found a computed value"
            )
        points = _unpacked(known.reshape(N, -1), bits)[:, :blocks]
    scales = _by_block(op, scales, N, blocks)
    w = op.DequantizeLinear(
        _integers(op, node, "weight", numbers.T.reshape(blocks, block_size, N), bits),
        scales,
        None if points is None else _integers(op, node, "zero_points", points.T[:, None], bits),
        axis=1,
        block_size=block_size,
    )
    if zero_points is not None and points is None:
        w = w - scales * _by_block(op, zero_points, N, blocks)
    w = op.Reshape(w, [blocks * block_size, N])
    if blocks * block_size != K:
        w = op.Slice(w, [0], [K], [0])
    return plus(op.MatMul(a, w), bias)


def _by_block(op: Emitter, x: Value, n: int, blocks: int) -> Value:
    """Return the frozen numbers of each row's blocks as [blocks,1,n]."""
    return op.Unsqueeze(op.Transpose(op.Reshape(freeze(x), [n, blocks]), perm=[1, 0]), [1])


def _unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of packed rows, low bits of each byte first."""
    parts = [rows >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(len(rows), -1)


def _integers(op: Emitter, node: ir.Node, label: str, numbers: np.ndarray, bits: int) -> Value:
    dtype = ir.DataType.UINT8 if bits == 8 else ir.DataType.UINT4
    return op.initializer(ir.tensor(numbers.astype(dtype.numpy()), name=f"{node.outputs[0].name}.{label}"))

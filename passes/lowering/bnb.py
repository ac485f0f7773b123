"""Lower MatMulBnb4 of com.microsoft, whose weight is stored in the 4 bits of bitsandbytes.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md; the tables are those of
https://arxiv.org/abs/2305.14314 (NF4) and of bitsandbytes (FP4).
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import constant_of, dtype_of
from passes.lowering.registry import freeze, lowers

_FP4 = (0.0, 5.208333333e-3, 0.66666667, 1.0, 0.33333333, 0.5, 0.16666667, 0.25)
_NF4 = (
    *(-1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635),
    *(-0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725),
    *(
        0.24611230194568634,
        0.33791524171829224,
        0.44070982933044434,
        0.5626170039176941,
        0.7229568362236023,
        1.0,
    ),
)
_TABLES = ((*_FP4, *(-x for x in _FP4)), _NF4)


@lowers("MatMulBnb4", domain=MICROSOFT)
def mat_mul_bnb4(
    op: Emitter,
    a: Value,
    b: Value,
    absmax: Value,
    *,
    K: int,
    N: int,
    block_size: int,
    quant_type: int,
    transB: int = 1,
    training_mode: int = 0,
) -> Value:
    """Compute a w^T for [N,K] numbers of a table, each times the largest of its block.

    Two numbers share a byte, the one in the high bits first. The weight stays packed and frozen.
    """
    if quant_type not in (0, 1) or transB != 1 or block_size < 2:
        raise GraphoptError(
            f"its attributes quant_type={quant_type}, transB={transB} and block_size={block_size} are not covered: "
            f"expected 0 or 1, 1, and at least 2"
        )
    packed, scales, count = constant_of(b), constant_of(absmax), N * K
    blocks = -(-count // block_size)
    if packed is None or scales is None or packed.size != -(-count // 2) or scales.size != blocks:
        raise GraphoptError(
            f"expected its weight {b.name!r} and {absmax.name!r} to be initializers of {-(-count // 2):,} bytes and "
            f"{blocks:,} numbers, found others"
        )
    table = np.array(_TABLES[quant_type])
    pairs = np.stack([np.repeat(table, 16), np.tile(table, 16)], axis=1)  # of each byte
    of_bytes = ir.tensor(pairs.astype(dtype_of(absmax).numpy()), name=f"{absmax.name}.table")
    places = op.DequantizeLinear(freeze(b), op.CastLike(1.0, absmax))  # which stay bytes in memory
    numbers = op.Gather(freeze(op.initializer(of_bytes)), op.Cast(places, to=ir.DataType.INT32))
    flat = op.Reshape(numbers, [-1])
    missing = blocks * block_size - 2 * packed.size
    if missing:
        flat = op.Pad(flat, [0, missing]) if missing > 0 else op.Slice(flat, [0], [blocks * block_size], [0])
    scaled = op.Reshape(flat, [blocks, block_size]) * op.Reshape(freeze(absmax), [blocks, 1])
    w = op.Reshape(scaled, [-1])
    w = w if blocks * block_size == count else op.Slice(w, [0], [count], [0])
    return op.MatMul(a, op.Transpose(op.Reshape(w, [N, K]), perm=[1, 0]))

"""Read integers of 2, 4 or 8 bits that are packed in bytes, low bits first."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.mapped import RoomyTensor
from graphopt.graph.values import dims_of, dtype_of


def gathered(op: Emitter, x: Value, indices: Value, axis: int, bits: int) -> Value:
    """Return rows of packed integers, one number in each element; bytes hold several along the last axis."""
    dtype = dtype_of(x)
    if dtype is not ir.DataType.UINT8:
        x, bits = _as_bytes(op, x)
    rows = op.Gather(x, indices, axis=axis)
    if bits < 8:
        parts = [op.BitShift(rows, op.constant(shift, like=rows), direction="RIGHT") for shift in range(0, 8, bits)]
        whole = op.Concat(*(op.Unsqueeze(part, [-1]) for part in parts), axis=-1)
        *before, packed = dims_of(rows)
        if not isinstance(packed, int):
            raise GraphoptError(f"expected {x.name!r} to have a known shape, found {x.shape}")
        numbers = op.Reshape(whole, op.Concat(op.shape_of(rows, 0, -1), [packed * 8 // bits], axis=0))
        numbers.shape = ir.Shape([*before, packed * 8 // bits])
        rows = op.BitwiseAnd(numbers, op.constant(2**bits - 1, like=rows))
    if dtype is ir.DataType.INT4:  # from a number with a sign to one from 0 to 15, whose middle is 8
        rows = op.BitwiseXor(rows, op.constant(8, like=rows))
    return rows


def _as_bytes(op: Emitter, x: Value) -> tuple[Value, int]:
    """Return a table of 4 bits as bytes, which Gather takes, and the bits of a number: 8 if rows are no whole bytes."""
    tensor = x.const_value
    if tensor is None or x.graph is None:
        raise GraphoptError(f"expected {x.name!r} to be an initializer, found a computed value")
    name, dims = f"{x.name}.bytes", tensor.shape.numpy()
    bits = 8 if dims[-1] % 2 else 4
    if name in x.graph.initializers:  # of another Gather of the table
        return x.graph.initializers[name], bits
    if bits == 8:
        low = tensor.numpy().astype(np.int8).astype(np.uint8) & 15
        return op.initializer(ir.tensor(low, name=name)), bits
    return op.initializer(view_of(tensor, ir.DataType.UINT8, [*dims[:-1], dims[-1] // 2]), name), bits


def view_of(
    tensor: ir.TensorProtocol, dtype: ir.DataType, shape: Sequence[int], bits: int | None = None
) -> ir.TensorProtocol:
    """Return the bytes of a tensor in another shape or type; `bits` of a number if they differ from the type's."""
    if bits is not None and bits < dtype.bitwidth < 8:
        numbers = unpacked(tensor.numpy().reshape(1, -1), bits).ravel()
        return RoomyTensor(numbers[::2] | numbers[1::2] << 4, dtype, shape)
    if isinstance(tensor, ir.ExternalTensor):
        place = tensor.location, tensor.offset, tensor.length
        return ir.ExternalTensor(*place, dtype, shape=ir.Shape(shape), name=tensor.name or "", base_dir=tensor.base_dir)
    if dtype.bitwidth < 8:
        return RoomyTensor(tensor.numpy(), dtype, shape)
    if tensor.dtype.bitwidth < 8:
        return ir.tensor(np.frombuffer(tensor.tobytes(), np.uint8).reshape(shape))
    return ir.tensor(tensor.numpy().reshape(shape))


def unpacked(rows: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers of packed rows, low bits of each byte first."""
    parts = [rows >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, axis=-1).reshape(len(rows), -1)

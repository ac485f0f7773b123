"""Lower operators of com.microsoft that ONNX Runtime's optimizer and quantization create.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT, schema_of
from graphopt.graph.values import rank
from passes.lowering.registry import lowers, plus


@lowers("DequantizeLinear", "Gelu", "LayerNormalization", "QuantizeLinear", domain=MICROSOFT)
def as_in_onnx(
    op: Emitter, x: Value, scale: Input = None, more: Input = None, *, node: ir.Node, **attributes: object
) -> Value:
    """Emit the operator of the same name in ONNX's domain, which has the same inputs and attributes."""
    inputs = [value for value in (x, scale, more) if value is not None]
    return op.call_op(node.op_type, inputs, attributes)  # type: ignore[return-value]


lowers("BiasGelu", domain=MICROSOFT)(lambda op, x, bias: op.Gelu(x + bias))
lowers("FastGelu", domain=MICROSOFT)(lambda op, x, bias=None: op.Gelu(plus(x, bias), approximate="tanh"))
lowers("QuickGelu", domain=MICROSOFT)(lambda op, x, *, alpha=1.702: x * op.Sigmoid(alpha * x))


def activate(op: Emitter, x: Value, activation: str, numbers: Sequence[float | None]) -> Value:
    """Return an activation of `x`. `numbers` are its attributes in schema order, with None for a default."""
    if not activation:
        return x
    if activation == "Clip":
        return op.Clip(x, *numbers)
    schema = schema_of("", activation, op.versions[""])
    if schema is None:
        raise GraphoptError(f"its activation {activation!r} is not covered")
    attributes = dict(zip(sorted(schema.attributes), numbers, strict=False))
    present = {name: value for name, value in attributes.items() if value is not None}
    result = op.call_op(activation, [x], present)
    assert isinstance(result, Value)
    return result


@lowers("FusedGemm", domain=MICROSOFT)
def fused_gemm(op: Emitter, a: Value, b: Value, c: Input = None, *, activation: str = "", **attributes: Any) -> Value:
    numbers = [attributes.pop(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")]
    return activate(op, op.Gemm(a, b, c, **attributes), activation, numbers)


@lowers("FusedConv", domain=MICROSOFT)
def fused_conv(
    op: Emitter, x: Value, w: Value, b: Input = None, z: Input = None, *, activation: str = "", **window: Any
) -> Value:
    numbers = window.pop("activation_params", ())
    return activate(op, plus(op.Conv(x, w, b, **window), z), activation, numbers)


@lowers("FusedMatMul", "TransposeMatMul", domain=MICROSOFT)
def fused_mat_mul(
    op: Emitter,
    a: Value,
    b: Value,
    *,
    alpha: float = 1.0,
    transA: int = 0,
    transB: int = 0,
    transBatchA: int = 0,
    transBatchB: int = 0,
) -> Value:
    y = op.MatMul(_transposed(op, a, transA, transBatchA), _transposed(op, b, transB, transBatchB))
    return y if alpha == 1 else alpha * y


def _transposed(op: Emitter, x: Value, last: int, batch: int) -> Value:
    """Move the first axis behind the batch axes if `batch` is set, and swap the last two axes if `last` is set."""
    axes = list(range(rank(x)))
    if len(axes) < 2:
        return x
    if batch:
        axes = [*axes[1:-1], 0, axes[-1]]
    if last:
        axes[-2:] = axes[:-3:-1]
    return x if axes == sorted(axes) else op.Transpose(x, perm=axes)


@lowers("SimplifiedLayerNormalization", domain=MICROSOFT)
def root_mean_square(
    op: Emitter, x: Value, scale: Value, *, axis: int = -1, epsilon: float = 1e-5, stash_type: int = 1
) -> Value:
    """Compute scale x / sqrt(mean(x^2) + epsilon) (Zhang, Sennrich, https://arxiv.org/abs/1910.07467)."""
    half = x.dtype in (ir.DataType.FLOAT16, ir.DataType.BFLOAT16) and x.dtype != stash_type
    z = op.Cast(x, to=stash_type) if half else x
    axes = list(range(axis % rank(x), rank(x)))
    z = z / op.Sqrt(op.ReduceMean(z * z, axes) + epsilon)
    return scale * (op.Cast(z, to=scale.dtype) if half else z)


@lowers("SkipLayerNormalization", domain=MICROSOFT)
def skip_layer_normalization(
    op: Emitter,
    x: Value,
    skip: Value,
    scale: Value,
    shift: Input = None,
    bias: Input = None,
    *,
    epsilon: float = 1e-12,
) -> Sequence[Value | None]:
    total = plus(x + skip, bias)
    return op.LayerNormalization(total, scale, shift, epsilon=epsilon), None, None, total


@lowers("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    op: Emitter, x: Value, skip: Value, scale: Value, bias: Input = None, *, epsilon: float = 1e-12
) -> Sequence[Value | None]:
    total = plus(x + skip, bias)
    return root_mean_square(op, total, scale, epsilon=epsilon), None, None, total


@lowers("EmbedLayerNormalization", domain=MICROSOFT)
def embed_layer_normalization(
    op: Emitter,
    ids: Value,
    segments: Input,
    words: Value,
    positions: Value,
    segment_embedding: Input,
    scale: Value,
    shift: Value,
    mask: Input = None,
    position_ids: Input = None,
    *,
    epsilon: float = 1e-12,
    mask_index_type: int = 1,
) -> Sequence[Value | None]:
    """Normalize word + position + segment embeddings. The mask index is the number of 1s in each row of the mask."""
    if position_ids is None:
        position_ids = op.Range(0, op.Squeeze(op.Shape(ids, start=1, end=2), [0]), 1)
    total = op.Gather(words, ids) + op.Gather(positions, position_ids)
    if segments is not None:
        total = total + op.Gather(segment_embedding, segments)
    if mask is None:
        mask = op.CastLike(op.ConstantOfShape(op.Shape(ids)), ids)
    count = op.ReduceSum(mask, [1], keepdims=0) if mask_index_type else None
    return op.LayerNormalization(total, scale, shift, epsilon=epsilon), count, total


@lowers("BiasSoftmax", domain=MICROSOFT)
def bias_softmax(op: Emitter, x: Value, bias: Value, *, axis: int = 1, is_inner_broadcast: int = 0) -> Value:
    if axis % rank(x) != rank(x) - 1:
        raise GraphoptError(f"its attribute axis={axis} is not covered: expected the last axis")
    return op.Softmax(x + bias, axis=-1)


@lowers("BiasDropout", domain=MICROSOFT)
def bias_dropout(
    op: Emitter,
    x: Value,
    bias: Value,
    residual: Input = None,
    ratio: Input = None,
    training_mode: Input = None,
    *,
    seed: int | None = None,
) -> Sequence[Value]:
    attributes = {} if seed is None else {"seed": seed}
    y, mask = op.Dropout(x + bias, ratio, training_mode, _outputs=2, **attributes)
    return plus(y, residual), mask

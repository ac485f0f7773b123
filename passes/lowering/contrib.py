"""Lower operators of com.microsoft that ONNX Runtime's optimizer and quantization create.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Attention is computed as by ONNX
Runtime's CPU provider, with dimensions B batch, S query positions, T key positions including past ones, N heads, and H
numbers per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT, schema_of
from graphopt.graph.values import rank
from passes.lowering.registry import freeze, lowers

MASKED = -10000.0


def _plus(x: Value, bias: Input) -> Value:
    """Return x + bias, or x if `bias` is None."""
    return x if bias is None else x + bias


@lowers("DequantizeLinear", "Gelu", "LayerNormalization", "QuantizeLinear", domain=MICROSOFT)
def as_in_onnx(
    op: Emitter, x: Value, scale: Input = None, more: Input = None, *, node: ir.Node, **attributes: Any
) -> Value:
    """Emit the operator of the same name in ONNX's domain, which has the same inputs and attributes."""
    inputs = [value for value in (x, scale, more) if value is not None]
    return op.call_op(node.op_type, inputs, attributes)  # type: ignore[return-value]


lowers("BiasGelu", domain=MICROSOFT)(lambda op, x, bias: op.Gelu(x + bias))
lowers("FastGelu", domain=MICROSOFT)(lambda op, x, bias=None: op.Gelu(_plus(x, bias), approximate="tanh"))
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
    attributes: dict[str, Any] = dict(zip(sorted(schema.attributes), numbers, strict=False))
    present = {name: value for name, value in attributes.items() if value is not None}
    result = op.call_op(activation, [x], present)
    assert isinstance(result, Value)
    return result


@lowers("FusedGemm", domain=MICROSOFT)
def fused_gemm(
    op: Emitter, a: Value, b: Value, c: Input = None, *, activation: str = "", **attributes: Any
) -> Value:
    numbers = [attributes.pop(f"activation_{name}", None) for name in ("alpha", "beta", "gamma")]
    return activate(op, op.Gemm(a, b, c, **attributes), activation, numbers)


@lowers("FusedConv", domain=MICROSOFT)
def fused_conv(
    op: Emitter, x: Value, w: Value, b: Input = None, z: Input = None, *, activation: str = "", **window: Any
) -> Value:
    numbers = window.pop("activation_params", ())
    return activate(op, _plus(op.Conv(x, w, b, **window), z), activation, numbers)


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
    total = _plus(x + skip, bias)
    return op.LayerNormalization(total, scale, shift, epsilon=epsilon), None, None, total


@lowers("SkipSimplifiedLayerNormalization", domain=MICROSOFT)
def skip_simplified_layer_normalization(
    op: Emitter, x: Value, skip: Value, scale: Value, bias: Input = None, *, epsilon: float = 1e-12
) -> Sequence[Value | None]:
    total = _plus(x + skip, bias)
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
    return _plus(y, residual), mask


@lowers("Attention", domain=MICROSOFT)
def attention(
    op: Emitter,
    x: Value,
    weights: Value,
    bias: Input = None,
    mask_index: Input = None,
    past: Input = None,
    attention_bias: Input = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float = 0.0,
    qkv_hidden_sizes: Sequence[int] = (),
    mask_filter_value: float = MASKED,
) -> Sequence[Value | None]:
    """Compute softmax(q k^T scale + mask) v, with q, k and v concatenated in x weights + bias."""
    sizes = list(qkv_hidden_sizes) or [_size(weights, 1) // 3] * 3
    parts = op.Split(_plus(op.MatMul(x, weights), bias), sizes, axis=-1, _outputs=3)
    past_key, past_value = (past and op.Gather(past, i, axis=0) for i in range(2))
    y, k, v = multi_head_attention(
        op,
        *(*parts, None, mask_index, attention_bias, past_key, past_value),
        num_heads=num_heads,
        unidirectional=unidirectional,
        scale=scale,
        mask_filter_value=mask_filter_value,
    )
    alike = sizes[1] == sizes[2]
    return y, op.Concat(op.Unsqueeze(k, [0]), op.Unsqueeze(v, [0]), axis=0) if alike else None


@lowers("MultiHeadAttention", domain=MICROSOFT)
def multi_head_attention(
    op: Emitter,
    query: Value,
    key: Input = None,
    value: Input = None,
    bias: Input = None,
    key_padding_mask: Input = None,
    attention_bias: Input = None,
    past_key: Input = None,
    past_value: Input = None,
    *,
    num_heads: int,
    unidirectional: int = 0,
    scale: float = 0.0,
    mask_filter_value: float = MASKED,
) -> Sequence[Value]:
    """Compute softmax(q k^T scale + mask) v, with q, k and v from three, two or one input, depending on their ranks."""
    parts = _parts(op, query, key, value)
    sizes = [_size(x, -1) * (num_heads if rank(x) == 4 else 1) for x in parts]
    if bias is not None:
        biases = op.Split(bias, sizes, axis=0, _outputs=3)
        pairs = zip(parts, biases, strict=True)
        parts = [x + (op.Reshape(b, [num_heads, 1, -1]) if rank(x) == 4 else b) for x, b in pairs]
    q, k, v = (
        x if rank(x) == 4 else _split_heads(op, x, num_heads, size)
        for x, size in zip(parts, sizes, strict=True)
    )
    fresh = k
    if past_key is not None:
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    mask = _mask(op, q, k, fresh, key_padding_mask, unidirectional, mask_filter_value)
    scores = op.MatMul((scale or 1 / math.sqrt(_size(q, -1))) * q, op.Transpose(k, perm=[0, 1, 3, 2]))
    y = op.MatMul(op.Softmax(_plus(_plus(scores, mask), attention_bias), axis=-1), v)
    return _merge_heads(op, y, sizes[2]), k, v


def _parts(op: Emitter, query: Value, key: Input, value: Input) -> list[Value]:
    """Return query, key and value as [B,S,NH], or as [B,N,S,H] if the heads are split already.

    A packed query or key of [B,S,N,parts,H] contains those that are left out.
    """
    if key is not None and value is not None:
        return [query, key, value]
    packed, first = (query, []) if key is None else (key, [query])
    if rank(packed) != 5:
        raise GraphoptError(
            "expected query, key and value, or a packed query or key of 5 axes, found neither"
        )
    count = _size(packed, 3)
    if count not in (2, 3):
        raise GraphoptError(f"expected 2 or 3 packed parts, found {packed.name!r} of shape {packed.shape}")
    parts = (op.Gather(packed, i, axis=3) for i in range(count))
    return [*first, *(op.Transpose(part, perm=[0, 2, 1, 3]) for part in parts)]


def _split_heads(op: Emitter, x: Value, heads: int, size: int) -> Value:
    """Reshape [B,S,NH] to [B,N,S,H]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, size // heads]), perm=[0, 2, 1, 3])


def _merge_heads(op: Emitter, y: Value, size: int) -> Value:
    """Reshape [B,N,S,H] to [B,S,NH]."""
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, size])


def _mask(
    op: Emitter, q: Value, k: Value, fresh: Value, mask: Input, unidirectional: int, masked: float
) -> Value | None:
    """Return the term to add to the scores, in a shape that broadcasts to [B,N,S,T], or None."""
    padding = None if mask is None else _padding(op, q, k, mask, masked)
    if not unidirectional:
        return padding
    positions, before = _length(op, q), _length(op, k) - _length(op, fresh)
    rows = op.Unsqueeze(op.Range(0, positions, 1) + before, [1])
    seen = op.LessOrEqual(op.Range(0, _length(op, k), 1), rows)
    lowest = op.constant(float(np.finfo(q.dtype.numpy()).min), like=q)  # type: ignore[union-attr]
    return op.Where(seen, op.CastLike(0.0, q) if padding is None else padding, lowest)


def _padding(op: Emitter, q: Value, k: Value, mask: Value, masked: float) -> Value:
    """Return `masked` for ignored keys and 0 for others, from any of the mask formats of the operators.

    [B,T] and [B,S,T]: 1 for keys that count. [B]: the number of keys that count in each row. [2B]: for each row the end
    of the keys that count, then for each row their start.
    """
    if rank(mask) in (2, 3):
        unmasked = op.Unsqueeze(op.Greater(mask, 0), [1, 2] if rank(mask) == 2 else [1])
    elif rank(mask) == 1:
        rows = op.Shape(q, start=0, end=1)
        zeros = op.Expand(op.CastLike(0, mask), rows)
        bounds = op.Slice(op.Concat(mask, zeros, axis=0), [0], 2 * rows, [0])
        bounds = op.Reshape(bounds, op.Concat([2], rows, [1, 1, 1], axis=0))
        positions = op.CastLike(op.Range(0, _length(op, k), 1), mask)
        end, start = op.Gather(bounds, 0, axis=0), op.Gather(bounds, 1, axis=0)
        unmasked = op.And(op.Less(positions, end), op.GreaterOrEqual(positions, start))
    else:
        raise GraphoptError(
            f"its mask {mask.name!r} of {rank(mask)} axes is not covered: expected 1 to 3 axes"
        )
    return op.Where(unmasked, op.CastLike(0.0, q), op.constant(masked, like=q))


def _length(op: Emitter, x: Value) -> Value:
    """Return the number of positions of [B,N,S,H] as a scalar."""
    return op.Squeeze(op.Shape(x, start=2, end=3), [0])


def _size(x: Value, axis: int) -> int:
    assert x.shape is not None
    size = x.shape[axis]
    if not isinstance(size, int):
        raise GraphoptError(f"expected a known size of {x.name!r} along axis {axis}, found {x.shape}")
    return size


@lowers("RotaryEmbedding", domain=MICROSOFT)
def rotary_embedding(
    op: Emitter,
    x: Value,
    position_ids: Value,
    cosines: Value,
    sines: Value,
    *,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Value:
    """Rotate pairs of numbers of each head by their position (Su et al., https://arxiv.org/abs/2104.09864).

    The first `rotary_embedding_dim` numbers of each head rotate, by default all. A pair consists of a number of the
    first half and one of the second half, or of neighbours if `interleaved`. If `position_ids` has rank 1, it is the
    first position.
    """
    if scale != 1:
        raise GraphoptError(f"its attribute scale={scale} is not covered: expected 1.0")
    rotary_dim = 2 * _size(cosines, 1)
    heads_first, axes = x, [1]
    if rank(x) != 4:
        head = _size(x, -1) // num_heads if num_heads else rotary_dim
        heads_first = _split_heads(op, x, _size(x, -1) // head, _size(x, -1))
    if rank(position_ids) == 1:
        position_ids = position_ids + op.CastLike(op.Range(0, _length(op, heads_first), 1), position_ids)
        axes = [0, 1]
    cosine, sine = (op.Unsqueeze(op.Gather(freeze(cache), position_ids), axes) for cache in (cosines, sines))

    def rotated(a: Value, b: Value) -> tuple[Value, Value]:
        return a * cosine - b * sine, b * cosine + a * sine

    rest = _size(heads_first, -1) - rotary_dim
    part = heads_first
    if rest:
        part, tail = op.Split(heads_first, [rotary_dim, rest], axis=-1, _outputs=2)
    if interleaved:
        pairs = op.Reshape(part, [0, 0, 0, rotary_dim // 2, 2])
        a, b = (op.Gather(pairs, i, axis=4) for i in range(2))
        turn = op.Concat(*(op.Unsqueeze(x, [4]) for x in rotated(a, b)), axis=4)
        turn = op.Reshape(turn, [0, 0, 0, rotary_dim])
    else:
        a, b = op.Split(part, num_outputs=2, axis=-1, _outputs=2)
        turn = op.Concat(*rotated(a, b), axis=-1)
    y = op.Concat(turn, tail, axis=-1) if rest else turn
    return y if rank(x) == 4 else _merge_heads(op, y, _size(x, -1))

"""Lower attention operators of com.microsoft to the computation of ONNX Runtime's CPU provider.

Dimensions: B batch, S query positions, T key positions including past ones, N heads, H numbers per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import rank
from passes.lowering.contrib import plus
from passes.lowering.registry import freeze, lowers

MASKED = -10000.0


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
    parts = op.Split(plus(op.MatMul(x, weights), bias), sizes, axis=-1, _outputs=3)
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
    y = op.MatMul(op.Softmax(plus(plus(scores, mask), attention_bias), axis=-1), v)
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
    if rank(x) == 4:
        heads_first = x
    else:
        head = _size(x, -1) // num_heads if num_heads else rotary_dim
        heads_first = _split_heads(op, x, _size(x, -1) // head, _size(x, -1))
    if rank(position_ids) == 1:
        position_ids = position_ids + op.CastLike(op.Range(0, _length(op, heads_first), 1), position_ids)
        axes = [0, 1]
    else:
        axes = [1]
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

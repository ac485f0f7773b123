"""Lower attention and rotary embeddings of com.microsoft, as ONNX Runtime's CPU provider computes them.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Dimensions are B batch, S query
positions, T key positions including past ones, N heads, K heads of keys, and H numbers per head.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import TOKEN_POSITIONS, Flag
from graphopt.graph.operators import ARITHMETIC, MICROSOFT, VIEWS
from graphopt.graph.shapes import places_of
from graphopt.graph.values import dims_of, dtype_of, rank
from passes.lowering.registry import freeze, lowers, plus

MASKED = -10000.0

# In self-attention: the node of scores [rows, ..., queries, keys] with all masks, before the softmax
ATTENTION_SCORES = Flag("graphopt.attention_scores")


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
    sizes = list(qkv_hidden_sizes) or [static_size(weights, 1) // 3] * 3
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
    sizes = [static_size(x, -1) * (num_heads if rank(x) == 4 else 1) for x in parts]
    if bias is not None:
        biases = op.Split(bias, sizes, axis=0, _outputs=3)
        pairs = zip(parts, biases, strict=True)
        parts = [x + (op.Reshape(b, [num_heads, 1, -1]) if rank(x) == 4 else b) for x, b in pairs]
    q, k, v = (x if rank(x) == 4 else split_heads(op, x, num_heads, size) for x, size in zip(parts, sizes, strict=True))
    before = None
    if past_key is not None:
        before = op.Squeeze(op.Shape(past_key, start=2, end=3), [0])
        k, v = op.Concat(past_key, k, axis=2), op.Concat(past_value, v, axis=2)
    terms = [key_padding_mask and _padding(op, q, k, key_padding_mask, mask_filter_value), attention_bias]
    if unidirectional:
        terms.append(causal_mask(op, q, k, before))
    return attend(op, q, k, v, terms, heads=num_heads, of_keys=num_heads, scale=scale), k, v


def attend(
    op: Emitter,
    q: Value,
    k: Value,
    v: Value,
    terms: Sequence[Input] = (),
    *,
    heads: int,
    of_keys: int,
    scale: float = 0.0,
    softcap: float = 0.0,
    sink: Input = None,
) -> Value:
    """Return softmax(q k^T scale + terms) v as [B,S,N H], of queries [B,N,S,H] and of keys and values [B,K,T,H].

    The query heads n of key head n // (N / K) become rows of one product, so that no key is repeated.

    Args:
        heads, of_keys: N and K.
        terms: what is added to the scores, each in a shape that broadcasts to [B,N,S,T], or None.
        scale: 1 / sqrt(H) by default.
        softcap: c > 0 makes c tanh(s / c) of scores s, before the terms are added.
        sink: a number for each head, [N], whose exponential is one more term of the softmax's divisor.
    """

    def grouped(x: Value) -> Value:
        sizes = op.Concat([0, of_keys, -1], op.shape_of(x, 3), axis=0)
        return x if heads == of_keys else op.Reshape(x, sizes)

    def apart(x: Value, last: Value) -> Value:
        if heads == of_keys:
            return x
        y = op.Reshape(x, op.Concat([0, heads], op.shape_of(q, 2, 3), last, axis=0))
        y.shape = ir.Shape([*dims_of(q)[:3], dims_of(x)[3]])
        return y

    q = (scale or 1 / math.sqrt(static_size(q, -1))) * q
    scores = apart(op.MatMul(grouped(q), op.Transpose(k, perm=[0, 1, 3, 2])), op.shape_of(k, 2, 3))
    if softcap:
        scores = softcap * op.Tanh(scores / softcap)
    for term in terms:
        scores = plus(scores, term)
    if dims_of(q)[2] == dims_of(k)[2]:
        ATTENTION_SCORES.mark(scores)
    if sink is None:
        weights = op.Softmax(scores, axis=-1)
    else:
        column = op.Expand(op.Reshape(sink, [heads, 1, 1]), op.Concat(op.shape_of(scores, 0, 3), [1], axis=0))
        weights = op.Softmax(op.Concat(scores, column, axis=3), axis=-1)
        weights = op.Slice(weights, [0], [-1], [3])
    y = apart(op.MatMul(grouped(weights), v), op.shape_of(v, 3))
    return merge_heads(op, y, heads * static_size(v, -1))


def _parts(op: Emitter, query: Value, key: Input, value: Input) -> list[Value]:
    """Return query, key and value as [B,S,NH], or as [B,N,S,H] if the heads are split already.

    A packed query or key of [B,S,N,parts,H] contains those that are left out.
    """
    if key is not None and value is not None:
        return [query, key, value]
    packed, first = (query, []) if key is None else (key, [query])
    if rank(packed) != 5:
        raise GraphoptError("expected query, key and value, or a packed query or key of 5 axes, found neither")
    count = static_size(packed, 3)
    if count not in (2, 3):
        raise GraphoptError(f"expected 2 or 3 packed parts, found {packed.name!r} of shape {packed.shape}")
    parts = (op.Gather(packed, i, axis=3) for i in range(count))
    return [*first, *(op.Transpose(part, perm=[0, 2, 1, 3]) for part in parts)]


def split_heads(op: Emitter, x: Value, heads: int, size: int) -> Value:
    """Reshape [B,S,NH] to [B,N,S,H]."""
    return op.Transpose(op.Reshape(x, [0, 0, heads, size // heads]), perm=[0, 2, 1, 3])


def merge_heads(op: Emitter, y: Value, size: int) -> Value:
    """Reshape [B,N,S,H] to [B,S,NH]."""
    return op.Reshape(op.Transpose(y, perm=[0, 2, 1, 3]), [0, 0, size])


def causal_mask(op: Emitter, q: Value, k: Value, before: Input = None, window: int = 0) -> Value:
    """Return the mask [S,T] to add to scores, by which positions see none after them, and the last `window` alone.

    Args:
        before: the number of past positions, which come first in `k`.
        window: how many positions are seen; all by default.
    """
    keys = positions_of(op, k)
    rows = op.Unsqueeze(plus(positions_of(op, q), before), [1])
    seen = op.LessOrEqual(keys, rows)
    if window > 0:
        seen = op.And(seen, op.Greater(keys, rows - window))
    return _term(op, q, seen)


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
        positions = op.CastLike(positions_of(op, k), mask)
        end, start = op.Gather(bounds, 0, axis=0), op.Gather(bounds, 1, axis=0)
        unmasked = op.And(op.Less(positions, end), op.GreaterOrEqual(positions, start))
    else:
        raise GraphoptError(f"its mask {mask.name!r} of {rank(mask)} axes is not covered: expected 1 to 3 axes")
    return _term(op, q, unmasked, masked)


def keys_before(op: Emitter, k: Value, ends: Value) -> Value:
    """Return the mask [B,1,1,T] to add to scores, by which only keys before `ends`, [B,1,1,1], are seen."""
    return _term(op, k, op.Less(op.CastLike(positions_of(op, k), ends), ends))


def _term(op: Emitter, like: Value, seen: Value, masked: float | None = None) -> Value:
    """Return 0 for keys that are seen and `masked` for others, by default the lowest number of the type."""
    lowest = float(np.finfo(dtype_of(like).numpy()).min) if masked is None else masked
    return op.Where(seen, op.CastLike(0.0, like), op.constant(lowest, like=like))


def positions_of(op: Emitter, x: Value) -> Value:
    """Return the numbers of the positions of [B,N,S,H], counted up to a size of an input of the model if it has S."""
    dim = dims_of(x)[2]
    source, axis = (x, 2) if isinstance(dim, int) else places_of(op.inputs).get(dim.value, (x, 2))
    counted = op.Range(0, op.Squeeze(op.shape_of(source, axis, axis + 1), [0]), 1)
    counted.shape = ir.Shape([dim])
    return counted


def static_size(x: Value, axis: int) -> int:
    size = dims_of(x)[axis]
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
    rotary_dim = 2 * static_size(cosines, 1)
    heads_first = x
    if rank(x) != 4:
        head = static_size(x, -1) // num_heads if num_heads else rotary_dim
        heads_first = split_heads(op, x, static_size(x, -1) // head, static_size(x, -1))
    if rank(position_ids) == 1:
        counted = op.CastLike(positions_of(op, heads_first), position_ids)
        position_ids = TOKEN_POSITIONS.mark(op.Unsqueeze(position_ids + counted, [0]))
    tables = [op.Unsqueeze(op.Gather(freeze(cache), position_ids), [1]) for cache in (cosines, sines)]
    y = _rotated(op, heads_first, *tables, interleaved=interleaved)
    return y if rank(x) == 4 else merge_heads(op, y, static_size(x, -1))


def _rotated(op: Emitter, x: Value, cosine: Value, sine: Value, *, interleaved: int) -> Value:
    """Rotate the first numbers of heads [B,N,S,H], twice as many as [B,1,S,R/2] has."""

    def rotated(a: Value, b: Value) -> tuple[Value, Value]:
        return a * cosine - b * sine, b * cosine + a * sine

    rotary_dim = 2 * static_size(cosine, -1)
    rest = static_size(x, -1) - rotary_dim
    part = x
    if rest:
        part, tail = op.Split(x, [rotary_dim, rest], axis=-1, _outputs=2)
    if interleaved:
        pairs = op.Reshape(part, [0, 0, 0, rotary_dim // 2, 2])
        a, b = (op.Gather(pairs, i, axis=4) for i in range(2))
        turn = op.Concat(*(op.Unsqueeze(x, [4]) for x in rotated(a, b)), axis=4)
        turn = op.Reshape(turn, [0, 0, 0, rotary_dim])
    else:
        a, b = op.Split(part, num_outputs=2, axis=-1, _outputs=2)
        turn = op.Concat(*rotated(a, b), axis=-1)
    return op.Concat(turn, tail, axis=-1) if rest else turn


@lowers("MRotaryEmbedding", domain=MICROSOFT)
def rotary_embedding_of_three(
    op: Emitter,
    x: Value,
    position_ids: Value,
    cosines: Value,
    sines: Value,
    *,
    mrope_section: Sequence[int],
    mrope_layout: int = 0,
    interleaved: int = 0,
    num_heads: int = 0,
    rotary_embedding_dim: int = 0,
    scale: float = 1.0,
) -> Value:
    """Rotate as RotaryEmbedding does, each pair by one of three positions [3,B,S]: time, height and width.

    The pairs of the three follow one another, or with `mrope_layout` 1, time's are every pair that is none of the first
    pairs 1, 4, ... for height and 2, 5, ... for width.
    """
    if scale != 1:
        raise GraphoptError(f"its attribute scale={scale} is not covered: expected 1.0")
    pairs = static_size(cosines, 1)
    if len(mrope_section) != 3 or sum(mrope_section) != pairs or min(mrope_section) < 0:
        raise GraphoptError(f"its attribute mrope_section={list(mrope_section)} is not covered: expected 3 of {pairs}")
    own = np.repeat(np.arange(3), mrope_section)
    if mrope_layout:
        own = np.zeros(pairs, int)
        for i in (1, 2):
            own[i : 3 * mrope_section[i] : 3] = i
    heads_first = x
    if rank(x) != 4:
        heads = num_heads or static_size(x, -1) // (2 * pairs)
        heads_first = split_heads(op, x, heads, static_size(x, -1))
    tables = []
    for cache in (cosines, sines):
        rows = [op.Gather(freeze(cache), op.Gather(position_ids, i, axis=0)) for i in range(3)]
        time, *others = (op.Unsqueeze(row, [1]) for row in rows)
        for i, row in enumerate(others, 1):
            time = op.Where(op.constant(own == i), row, time)
        tables.append(time)
    y = _rotated(op, heads_first, *tables, interleaved=interleaved)
    return y if rank(x) == 4 else merge_heads(op, y, static_size(x, -1))


# Product and softmax, or softmax and product
_BETWEEN = ARITHMETIC | VIEWS | {"Cast", "Clip", "Dropout", "Tanh", "Where"}


def mark_scores(graph: ir.Graph) -> None:
    """Mark the scores of self-attention that is written out: a softmax along the last axis between two products."""
    sizes = {dim for x in graph.inputs for dim in x.shape or ()}
    for node in graph:
        scores = node.inputs[0] if node.op_type == "Softmax" and node.domain == "" else None
        maker = None if scores is None else scores.producer()
        if scores is None or maker is None or scores.shape is None or len(scores.shape) < 3:
            continue
        known = [dim for dim in scores.shape[-2:] if isinstance(dim, int) or dim in sizes]
        if (len(known) < 2 or known[0] == known[1]) and _leads(maker, back=True) and _leads(node, back=False):
            ATTENTION_SCORES.set(maker)


def _leads(node: ir.Node, *, back: bool, steps: int = 8) -> bool:
    """Return whether a product is a few steps before or behind a node."""
    values = node.inputs if back else node.outputs[:1]
    around = [x.producer() for x in values if x] if back else [y for x in values if x for y in x.consumers()]
    for other in [other for other in around if other is not None and other.domain == ""]:
        if other.op_type == "MatMul" or (
            other.op_type in _BETWEEN and steps and _leads(other, back=back, steps=steps - 1)
        ):
            return True
    return back and node.op_type == "MatMul"

"""Lower GroupQueryAttention of com.microsoft, of which decoder files of onnxruntime-genai's builder consist.

Dimensions are those of `passes.lowering.attention`. Query head n reads key head n // (N / K).
"""

from __future__ import annotations

from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import TOKEN_POSITIONS
from graphopt.graph.operators import MICROSOFT
from passes.lowering.attention import (
    attend,
    causal_mask,
    keys_before,
    positions_of,
    rotary_embedding,
    split_heads,
    static_size,
)
from passes.lowering.contrib import root_mean_square
from passes.lowering.registry import lowers


@lowers("GroupQueryAttention", domain=MICROSOFT)
def group_query_attention(
    op: Emitter,
    query: Value,
    key: Input = None,
    value: Input = None,
    past_key: Input = None,
    past_value: Input = None,
    seqlens_k: Input = None,
    total_sequence_length: Input = None,
    cos_cache: Input = None,
    sin_cache: Input = None,
    position_ids: Input = None,
    attention_bias: Input = None,
    head_sink: Input = None,
    k_scale: Input = None,
    v_scale: Input = None,
    q_norm_weight: Input = None,
    k_norm_weight: Input = None,
    query_seqlens: Input = None,
    *,
    num_heads: int,
    kv_num_heads: int,
    causal: int = 1,
    do_rotary: int = 0,
    k_norm_epsilon: float = 0.0,
    k_quant_type: str = "NONE",
    local_window_size: int = -1,
    q_norm_epsilon: float = 0.0,
    qk_norm_epsilon: float = 1e-6,
    rotary_interleaved: int = 0,
    scale: float = 0.0,
    sliding_window_cache: int = 0,
    smooth_softmax: int = 0,
    softcap: float = 0.0,
    v_quant_type: str = "NONE",
) -> list[Value]:
    """Compute attention of the first positions of rows that are padded on the right.

    The past is empty, and rotated keys and values are the present. A position that counts does not depend on those of
    padding, except if `causal` is 0: `seqlens_k` then masks them. `total_sequence_length`, `query_seqlens` and
    `sliding_window_cache` have no effect.
    """
    _check_cache(past_key, past_value, k_quant_type, v_quant_type)
    q, k, v = _heads(op, query, key, value, num_heads, kv_num_heads)
    if q_norm_weight is not None and k_norm_weight is not None:
        q = root_mean_square(op, q, q_norm_weight, epsilon=q_norm_epsilon or qk_norm_epsilon)
        k = root_mean_square(op, k, k_norm_weight, epsilon=k_norm_epsilon or qk_norm_epsilon)
    if do_rotary:
        caches = cos_cache, sin_cache
        q, k = _rotated(op, (q, k), position_ids, caches, interleaved=rotary_interleaved)
    mask = None
    if causal:
        mask = causal_mask(op, q, k, window=local_window_size)
    elif seqlens_k is not None:
        mask = keys_before(op, k, op.Reshape(seqlens_k, [-1, 1, 1, 1]) + 1)
    if smooth_softmax and head_sink is None:
        head_sink = op.CastLike(op.ConstantOfShape([num_heads]), q)
    sizes = {"heads": num_heads, "of_keys": kv_num_heads}
    y = attend(op, q, k, v, [attention_bias, mask], **sizes, scale=scale, softcap=softcap, sink=head_sink)
    return [y, k, v]


def _check_cache(past_key: Input, past_value: Input, *kinds: str) -> None:
    """Raise an error if there is a past, or a cache is quantized."""
    for past in (past_key, past_value):
        if past is not None and past.shape is not None and past.shape[2] != 0:
            raise GraphoptError(f"its past {past.name!r} is not covered: expected an input that only caches read")
    if {*kinds} != {"NONE"}:
        raise GraphoptError("its quantized cache is not covered: export with k_quant_type and v_quant_type NONE")


def _rotated(
    op: Emitter,
    heads: tuple[Value, Value],
    position_ids: Input,
    caches: tuple[Input, Input],
    *,
    interleaved: int,
) -> tuple[Value, Value]:
    """Return query and key rotated by the positions, by default those in the row."""
    cos, sin = caches
    if cos is None or sin is None:
        raise GraphoptError("expected inputs cos_cache and sin_cache for do_rotary=1, found none")
    places = position_ids or TOKEN_POSITIONS.mark(op.Unsqueeze(positions_of(op, heads[0]), [0]))
    q, k = (rotary_embedding(op, x, places, cos, sin, interleaved=interleaved) for x in heads)
    return q, k


def _heads(op: Emitter, query: Value, key: Input, value: Input, heads: int, of_keys: int) -> tuple[Value, Value, Value]:
    """Return query, key and value as [B,N,S,H] and [B,K,T,H]; a packed query [B,S,(N+2K)H] contains all three."""
    if key is None or value is None:
        size = static_size(query, -1) // (heads + 2 * of_keys)
        sizes = [size * n for n in (heads, of_keys, of_keys)]
        query, key, value = op.Split(query, sizes, axis=-1, _outputs=3)
    q = split_heads(op, query, heads, static_size(query, -1))
    k, v = (split_heads(op, x, of_keys, static_size(x, -1)) for x in (key, value))
    return q, k, v

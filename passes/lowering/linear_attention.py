"""Lower the layers of hybrid decoders that carry a state of a fixed size: linear attention and causal convolutions.

See https://github.com/microsoft/onnxruntime/blob/main/docs/ContribOperators.md. Dimensions are B batch, T positions,
H heads of values, K and V numbers per head of a key and a value, C positions of a chunk, and N chunks.
"""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.values import dims_of, name_of, rank
from passes.gradients.rules.control_flow import scan_over
from passes.lowering.attention import static_size
from passes.lowering.registry import lowers

_CHUNK = 32  # positions whose products are computed together; the state passes from one chunk to the next
_RULES = ("linear", "gated", "delta", "gated_delta")
_END = 2**31 - 1


@lowers("CausalConvWithState", domain=MICROSOFT)
def causal_conv_with_state(
    op: Emitter,
    x: Value,
    weight: Value,
    bias: Input = None,
    past_state: Input = None,
    *,
    activation: str = "none",
    ndim: int = 1,
    dilation: int = 1,
    channels_last: int = 0,
    state_channels_last: int = -1,
) -> list[Value]:
    """Convolve each channel of [B,C,T] with its own filter over past positions, which are 0 before the first one.

    The state is the end of the input, as many positions as the filter reaches back.
    """
    if ndim != 1 or state_channels_last not in (-1, channels_last) or (channels_last and rank(x) != 3):
        raise GraphoptError(
            f"its attributes ndim={ndim}, channels_last={channels_last} and state_channels_last={state_channels_last} "
            f"with an input of {rank(x)} axes are not covered: expected one spatial axis and a state of the same layout"
        )
    turn = [0, 2, 1] if channels_last else [0, 1, 2]
    x, past = op.Transpose(x, perm=turn), past_state and op.Transpose(past_state, perm=turn)
    back = (static_size(weight, 2) - 1) * dilation
    longer = op.Pad(x, [0, 0, back, 0, 0, 0]) if past is None else op.Concat(past, x, axis=2)
    first, before = (x, back) if past is None else (longer, 0)
    y = op.Conv(first, weight, bias, pads=[before, 0], group=static_size(x, 1), dilations=[dilation])
    y = _activated(op, y, activation)
    present = op.Slice(longer, [-back if back else _END], [_END], [2])
    return [op.Transpose(y, perm=turn), op.Transpose(present, perm=turn)]


def _activated(op: Emitter, x: Value, activation: str) -> Value:
    """Return x, x sigmoid(x) or sigmoid(x)."""
    if activation not in ("none", "silu", "swish", "sigmoid"):
        raise GraphoptError(f"its attribute activation={activation!r} is not covered: expected silu or none")
    if activation == "none":
        return x
    return op.Sigmoid(x) if activation == "sigmoid" else x * op.Sigmoid(x)


@lowers("LinearAttentionGate", domain=MICROSOFT)
def linear_attention_gate(
    op: Emitter, a: Value, dt_bias: Value, decay_scale: Value, b: Input = None
) -> list[Value | None]:
    """Compute the decay, decay_scale softplus(a + dt_bias), and the rate, sigmoid(b).

    `decay_scale` is -exp of what models train, and a positive one diverges: it is frozen unless selected by name.
    """
    if decay_scale.is_initializer():
        Origin(Kind.CONSTANT, "minus the exponential of a decay; unfreeze trains it").write(decay_scale)
    decay = decay_scale * op.Softplus(op.cast(a, dt_bias.dtype) + dt_bias)
    return [op.cast(decay, a.dtype), b and op.Sigmoid(b)]


@lowers("GatedRMSNorm", domain=MICROSOFT)
def gated_rms_norm(
    op: Emitter, x: Value, scale: Value, gate: Value, *, epsilon: float = 1e-5, activation: str = "silu"
) -> Value:
    """Compute scale x / sqrt(mean(x^2) + epsilon) act(gate), the mean over as many numbers as `scale` has."""
    size = static_size(scale, 0)
    shape = [*[0] * (rank(x) - 1), static_size(x, -1) // size, size]
    z = op.Reshape(x, shape)
    z = z / op.Sqrt(op.ReduceMean(z * z, [-1]) + epsilon) * scale
    return op.Reshape(z, [*[0] * (rank(x) - 1), static_size(x, -1)]) * _activated(op, gate, activation)


@lowers("GatedAdd", domain=MICROSOFT)
def gated_add(op: Emitter, x: Value, y: Value, gate: Value) -> Value:
    return x + y * gate


@lowers("LinearAttention", domain=MICROSOFT)
def linear_attention(
    op: Emitter,
    query: Value,
    key: Value,
    value: Value,
    past_state: Input = None,
    decay: Input = None,
    beta: Input = None,
    *,
    q_num_heads: int,
    kv_num_heads: int,
    update_rule: str = "gated_delta",
    scale: float = 0.0,
    chunk_size: int = 64,
) -> list[Value]:
    """Compute scale q_t S_t, with S_t = exp(g_t) S_{t-1} + k_t d_t and d_t = b_t (v_t - k_t exp(g_t) S_{t-1}).

    `decay` is g, or 0 by the rules `linear` and `delta`. `beta` is b; by the rules `linear` and `gated`, d_t is v_t.
    Within a chunk that starts from S, the d_t solve a triangular system (I + A) d = b (v - exp(G) k S), with G the sum
    of g up to t and A_ts = b_t exp(G_t - G_s) k_t k_s for s < t (Yang et al., https://arxiv.org/abs/2412.06464). A
    decay for each number of a key takes chunks of one position. `chunk_size`, a hint, has no effect.
    """
    if update_rule not in _RULES:
        raise GraphoptError(f"its attribute update_rule={update_rule!r} is not covered: expected one of {_RULES}")
    size = static_size(query, 2) // q_num_heads
    of_keys, of_values = static_size(key, 2) // size, static_size(value, 2) // kv_num_heads
    decay, beta = decay if "gated" in update_rule else None, beta if "delta" in update_rule else None
    if (decay is None) == ("gated" in update_rule) or (beta is None) == ("delta" in update_rule):
        raise GraphoptError(f"expected inputs decay and beta as update_rule={update_rule!r} needs them, found none")
    for_each = decay is not None and static_size(decay, 2) != kv_num_heads
    chunks = _Chunks(op, query, 1 if for_each else _CHUNK)
    q, k, v = chunks.of(query, q_num_heads), chunks.of(key, of_keys), chunks.of(value, kv_num_heads)
    k, q = chunks.repeated(k, kv_num_heads // of_keys), chunks.repeated(q, kv_num_heads // q_num_heads)
    lower = np.tril(np.ones((chunks.size, chunks.size), bool))
    grown, left, kept, growth = None, k, None, None
    if decay is not None:
        g = chunks.of(decay, kv_num_heads)
        total, whole = op.CumSum(g, 3), op.ReduceSum(g, [3])
        grown, left, kept = op.Exp(total), k * op.Exp(whole - total), _turned(op, op.Exp(whole))
        if not for_each:
            growth = op.Exp(_where(op, lower, total - _turned(op, total)))
    deltas, reads = v, None
    if beta is not None:
        b = chunks.of(beta, static_size(beta, 2))
        alike = b * op.MatMul(k, _turned(op, k))
        solved = _inverse(op, alike if growth is None else alike * growth)
        deltas, reads = b * v, b * (k if grown is None else k * grown)
        if solved is not None:
            deltas, reads = op.MatMul(solved, deltas), op.MatMul(solved, reads)
    q = (scale or 1 / math.sqrt(size)) * q
    groups = max(q_num_heads // kv_num_heads, 1)
    if groups > 1:  # the rows of the queries that share a state
        q = op.Reshape(q, [0, 0, kv_num_heads, groups, chunks.size, size])
        k, (grown, growth) = op.Unsqueeze(k, [3]), (x and op.Unsqueeze(x, [3]) for x in (grown, growth))
    within = _where(op, lower, op.MatMul(q, _turned(op, k)))
    within = within if growth is None else within * growth
    q, rows = q if grown is None else q * grown, groups * chunks.size
    if groups > 1:
        q, within = (op.Reshape(x, [0, 0, kv_num_heads, rows, n]) for x, n in ((q, size), (within, chunks.size)))

    def step(op: Emitter, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        (state,), (q, within, left, deltas, *others) = states, slices
        if reads is not None:
            deltas = deltas - op.MatMul(others[0], state)
        y = op.MatMul(q, state) + op.MatMul(within, deltas)
        before = state if kept is None else others[-1] * state
        return [before + op.MatMul(_turned(op, left), deltas)], [y]

    zeros = op.Expand(op.CastLike(0.0, v), op.Concat(op.shape_of(query, 0, 1), [kv_num_heads, size, of_values], axis=0))
    start = zeros if past_state is None else op.CastLike(past_state, v)
    start.shape = ir.Shape([dims_of(query)[0], kv_num_heads, size, of_values])
    sequences = [x for x in (q, within, left, deltas, reads, kept) if x is not None]
    last, y = scan_over(op, step, [start], sequences)
    return [
        chunks.joined(y, kv_num_heads * groups, of_values),
        last if past_state is None else op.CastLike(last, past_state),
    ]


def _turned(op: Emitter, x: Value) -> Value:
    """Exchange the last two axes."""
    axes = range(rank(x))
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


def _where(op: Emitter, mask: np.ndarray, x: Value) -> Value:
    """Return x where a mask is true, and 0 elsewhere."""
    return x if mask.all() else op.Where(op.constant(mask), x, op.constant(0.0, like=x))


def _inverse(op: Emitter, a: Value) -> Value | None:
    """Return the inverse of I + A for the part A of `a` below the diagonal, or None if that is empty.

    The inverse of [[P,0],[R,Q]] is [[P',0],[-Q'RP',Q']] for inverses P' and Q': blocks double from 1 on.
    """
    size, inverse, n = static_size(a, -1), None, 1
    blocks = np.arange(size)
    while n < size:
        odd = (blocks[:, None] // n % 2 == 1) & (blocks[:, None] // n - 1 == blocks // n)
        below = _where(op, odd, a)
        product = below if inverse is None else op.MatMul(op.MatMul(inverse, below), inverse)
        inverse = (op.Cast(op.constant(np.eye(size, dtype=bool)), to=a.dtype) if inverse is None else inverse) - product
        n *= 2
    return inverse


class _Chunks:
    """Turn [B,T,H D] into chunks [N,B,H,C,D], the last filled up with zeros, which change no state; and back."""

    def __init__(self, op: Emitter, x: Value, size: int) -> None:
        self.op, self.batch, self.positions = op, *dims_of(x)[:2]
        self.size = min(size, self.positions) if isinstance(self.positions, int) else size
        self.end = op.shape_of(x, 1, 2)
        self.behind = None if self.size == 1 else op.Mod(op.Neg(self.end), self.size)
        self.name = name_of(x)

    def of(self, x: Value, heads: int) -> Value:
        op, width = self.op, static_size(x, 2)
        if self.behind is not None:
            x = op.Pad(x, op.Concat([0, 0, 0, 0], self.behind, [0], axis=0))
            x.shape = ir.Shape([self.batch, f"{self.name}/padded", width])
        x = op.Reshape(x, [0, -1, self.size, heads, width // heads])
        x.shape = ir.Shape([self.batch, f"{self.name}/chunks", self.size, heads, width // heads])
        return op.Transpose(x, perm=[1, 0, 3, 2, 4])

    def repeated(self, x: Value, times: int) -> Value:
        if times <= 1:
            return x
        op, (*_, heads, size, width) = self.op, dims_of(x)
        wide = op.Expand(op.Unsqueeze(x, [3]), [1, 1, 1, times, 1, 1])
        return op.Reshape(wide, [0, 0, heads * times, size, width])

    def joined(self, x: Value, heads: int, width: int) -> Value:
        op = self.op
        x = op.Transpose(op.Reshape(x, [0, 0, heads, self.size, width]), perm=[1, 0, 3, 2, 4])
        x = op.Reshape(x, [0, -1, heads * width])
        if self.behind is not None:
            x = op.Slice(x, [0], self.end, [1])
        x.shape = ir.Shape([self.batch, self.positions, heads * width])
        return x

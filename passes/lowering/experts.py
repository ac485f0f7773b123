"""Lower mixtures of experts of com.microsoft, MoE and QMoE, as ONNX Runtime's CPU provider computes them.

Sources: the operators' schemas, onnxruntime/contrib_ops/cpu/moe of ONNX Runtime, and runs of version 1.32, which
`tests/test_lowering.py` repeats. Dimensions are T tokens of D numbers, E experts, k of them for each token, and I
numbers between the products of an expert. Its first product has I outputs, or 2 I if the gates are fused with it.

- `router_probs` are logits. MoE takes the softmax over all experts, keeps the k largest, and divides by their sum if
  `normalize_routing_weights` is 1. QMoE takes the softmax over the k largest, whatever that attribute is.
- With `router_weights`, the logits of QMoE only select, and the weights mix, of which those up to 1e-8 count as 0. They
  are divided by their sum if `normalize_routing_weights` is 1.
- Gelu is the approximation by tanh. Gates are clipped from above, and the numbers that they multiply on both sides.
- Weights are [E, outputs, inputs]. Packed ones have low bits first, a scale for each block of inputs or each output,
  and the zero point 2^(bits - 1) by default.

The CPU provider has neither a third product nor gates that are not interleaved; the schemas say what these compute. In
products by blocks of 8 bits it rounds the inputs (by up to 3 % of the largest output was seen), and by blocks of 2 bits
it may (0.4 %); here, such weights are exact. It ignores `use_sparse_mixer`. Of experts with equal logits it takes the
last, and the lowering the first.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.values import dims_of, dtype_of
from passes.lowering.attention import static_size
from passes.lowering.quantized import BITS, packed_matrix
from passes.lowering.registry import lowers, plus

_GATED = "swiglu"
_ACTIVATIONS: dict[str, Callable[[Emitter, Value], Value]] = {
    "relu": lambda op, x: op.Relu(x),
    "gelu": lambda op, x: op.Gelu(x, approximate="tanh"),
    "silu": lambda op, x: x * op.Sigmoid(x),
    "identity": lambda op, x: x,
}
_LEAST = 1e-8  # up to which the CPU provider leaves out an expert by `router_weights`
_JITTER = 0.01  # of SparseMixer, in Phi-3.5-MoE and in ONNX Runtime's other providers
_ZERO = ir.tensor([0], dtype=ir.DataType.INT64)


@lowers("MoE", domain=MICROSOFT)
def mixture_of_experts(
    op: Emitter,
    input: Value,
    router_probs: Value,
    fc1_experts_weights: Value,
    fc1_experts_bias: Input = None,
    fc2_experts_weights: Input = None,
    fc2_experts_bias: Input = None,
    fc3_experts_weights: Input = None,
    fc3_experts_bias: Input = None,
    *,
    k: int = 1,
    activation_type: str = "relu",
    normalize_routing_weights: int = 0,
    use_sparse_mixer: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float = math.inf,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
) -> Value:
    """Compute the sum of the outputs of k experts for each token, by the factors that a router gives them."""
    experts = _Experts(
        input,
        router_probs,
        weights=(fc1_experts_weights, fc2_experts_weights, fc3_experts_weights),
        biases=(fc1_experts_bias, fc2_experts_bias, fc3_experts_bias),
        packed=(1, 1, 1),
        k=k,
        activation_type=activation_type,
        swiglu_fusion=swiglu_fusion,
        swiglu_limit=swiglu_limit,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
    )
    experts.check(use_sparse_mixer)
    if use_sparse_mixer:
        scores, chosen = _sparse_mixer(op, router_probs)
    else:
        scores, chosen = _top(op, op.Softmax(router_probs, axis=-1), k)
        scores = _shares(op, scores) if normalize_routing_weights else scores
    return experts.mixed(op, scores, chosen, lambda i: op.Transpose(_given(experts.weights[i], i + 1), perm=[0, 2, 1]))


@lowers("QMoE", domain=MICROSOFT)
def mixture_of_packed_experts(
    op: Emitter,
    input: Value,
    router_probs: Value,
    fc1_experts_weights: Value,
    fc1_scales: Input = None,
    fc1_experts_bias: Input = None,
    fc2_experts_weights: Input = None,
    fc2_scales: Input = None,
    fc2_experts_bias: Input = None,
    fc3_experts_weights: Input = None,
    fc3_scales: Input = None,
    fc3_experts_bias: Input = None,
    fc1_zero_points: Input = None,
    fc2_zero_points: Input = None,
    fc3_zero_points: Input = None,
    router_weights: Input = None,
    *,
    k: int = 1,
    activation_type: str = "relu",
    normalize_routing_weights: int = 0,
    use_sparse_mixer: int = 0,
    swiglu_fusion: int = 0,
    swiglu_limit: float = math.inf,
    activation_alpha: float = 1.0,
    activation_beta: float = 0.0,
    expert_weight_bits: int = 4,
    fc1_expert_weight_bits: int = 0,
    fc2_expert_weight_bits: int = 0,
    fc3_expert_weight_bits: int = 0,
    block_size: int = 0,
    quant_type: str = "int",
    weights_prepacked: int = 0,
    accuracy_level: int = 0,
) -> Value:
    """Compute a mixture of experts whose weights are packed, frozen, and dequantized for each use.

    `accuracy_level`, which permits a runtime to round activations, is ignored.
    """
    if quant_type != "int" or weights_prepacked == 1:
        raise GraphoptError(
            f"its attributes quant_type={quant_type!r} and weights_prepacked={weights_prepacked} are not covered: "
            "expected integers as the file for CPUs has them: build it with -e cpu"
        )
    given = (fc1_expert_weight_bits, fc2_expert_weight_bits, fc3_expert_weight_bits)
    bits = [own or expert_weight_bits for own in given]
    if not {*bits} <= {*BITS}:
        raise GraphoptError(f"its weights of {bits[:2]} bits are not covered: expected 2, 4 or 8")
    experts = _Experts(
        input,
        router_probs,
        weights=(fc1_experts_weights, fc2_experts_weights, fc3_experts_weights),
        biases=(fc1_experts_bias, fc2_experts_bias, fc3_experts_bias),
        packed=[8 // own for own in bits],
        k=k,
        activation_type=activation_type,
        swiglu_fusion=swiglu_fusion,
        swiglu_limit=swiglu_limit,
        activation_alpha=activation_alpha,
        activation_beta=activation_beta,
    )
    experts.check(use_sparse_mixer)
    scales = (fc1_scales, fc2_scales, fc3_scales)
    zero_points = (fc1_zero_points, fc2_zero_points, fc3_zero_points)
    for w, scale, zeros, shape, own in zip(experts.weights, scales, zero_points, experts.shapes, bits, strict=True):
        _check_packed(w, scale, zeros, shape, own, block_size)
    if router_weights is not None:
        _, chosen = _top(op, router_probs, k)
        scores = op.GatherElements(router_weights, chosen, axis=-1)
        scores = op.Where(op.Greater(scores, _LEAST), scores, op.CastLike(0.0, scores))
        scores = _shares(op, scores) if normalize_routing_weights else scores
    elif use_sparse_mixer:
        scores, chosen = _sparse_mixer(op, router_probs)
    else:
        scores, chosen = _top(op, router_probs, k)
        scores = op.Softmax(scores, axis=-1)

    def weight(i: int) -> Value:
        count, outputs, inputs = experts.shapes[i]
        q, scale, block = _given(experts.weights[i], i + 1), scales[i], block_size or inputs
        assert scale is not None
        lines = count * outputs if block_size else count  # rows of zero points that are padded to bytes
        w = packed_matrix(op, q, scale, zero_points[i], count * outputs, inputs, block, bits[i], lines=lines)
        return op.Transpose(op.Reshape(w, [count, outputs, inputs]), perm=[0, 2, 1])

    return experts.mixed(op, scores, chosen, weight)


def _check_packed(w: Input, scale: Input, zeros: Input, shape: Sequence[int], bits: int, block_size: int) -> None:
    """Raise an error if the scales or the zero points of a weight of a shape do not fit it."""
    if w is None:
        return
    count, outputs, inputs = shape
    if scale is None or block_size < 0 or (block_size and inputs % block_size) or inputs * bits % 8:
        raise GraphoptError(
            f"expected its input {w.name!r} with scales, of blocks that {inputs} numbers are a multiple of, found "
            f"block_size={block_size} and {'no' if scale is None else 'some'} scales"
        )
    blocks = inputs // block_size if block_size else 1
    check_shape(scale, (count, outputs, blocks) if block_size else (count, outputs))
    if zeros is not None:
        padded = -(-(blocks if block_size else outputs) * bits // 8)
        check_shape(zeros, (count, outputs, padded) if block_size else (count, padded))


@dataclass(frozen=True)
class _Experts:
    """Hold the inputs and the attributes that MoE and QMoE have in common, and compute the experts.

    Args:
        weights: the weights of the three products, [E, outputs, inputs]; None for no third one.
        biases: their biases, [E, outputs], or None.
        packed: how many numbers an element of each weight holds.
    """

    x: Value
    router_probs: Value
    weights: Sequence[Input]
    biases: Sequence[Input]
    packed: Sequence[int]
    k: int
    activation_type: str
    swiglu_fusion: int
    swiglu_limit: float
    activation_alpha: float
    activation_beta: float

    @property
    def count(self) -> int:
        """Return the number of experts."""
        return static_size(self.router_probs, -1)

    @property
    def shapes(self) -> list[tuple[int, int, int]]:
        """Return the shapes of the weights as numbers, not packed."""
        size, inner = static_size(self.x, -1), static_size(_given(self.weights[1], 1), 2) * self.packed[1]
        first = 2 * inner if self.is_fused else inner
        return [(self.count, first, size), (self.count, size, inner), (self.count, inner, size)]

    @property
    def is_fused(self) -> bool:
        """Return whether the first product computes the gates, too."""
        return self.activation_type == _GATED and self.swiglu_fusion > 0

    def check(self, use_sparse_mixer: int) -> None:
        """Raise an error for attributes and shapes of which nothing can be computed."""
        known = [*_ACTIVATIONS, _GATED]
        if self.activation_type not in known or self.swiglu_fusion not in (0, 1, 2):
            raise GraphoptError(
                f"its attributes activation_type={self.activation_type!r} and swiglu_fusion={self.swiglu_fusion} are "
                f"not covered: expected {', '.join(known)}, and 0, 1 or 2"
            )
        if not 1 <= self.k <= self.count:
            raise GraphoptError(f"its attribute k={self.k}: expected 1 to {self.count}, the number of experts")
        if not self.swiglu_limit > 0:
            raise GraphoptError(f"its attribute swiglu_limit={self.swiglu_limit}: expected a number above 0")
        if use_sparse_mixer and (self.k != 2 or self.weights[2] is None):
            raise GraphoptError(
                f"its attribute use_sparse_mixer={use_sparse_mixer} is not covered with k={self.k} and "
                f"{'no' if self.weights[2] is None else 'a'} third product: expected k=2 and one, as in Phi-3.5-MoE: "
                "ONNX Runtime's CPU provider ignores the attribute, others obey it"
            )
        is_gated = self.activation_type == _GATED and not self.is_fused
        if (self.weights[2] is None and is_gated) or (self.weights[2] is not None and self.is_fused):
            raise GraphoptError(
                f"its input fc3_experts_weights: expected {'one' if is_gated else 'none'} with activation_type="
                f"{_GATED!r} and swiglu_fusion={self.swiglu_fusion}, found {'none' if is_gated else 'one'}"
            )
        parts = zip(self.weights, self.biases, self.shapes, self.packed, strict=True)
        for i, (w, bias, (count, outputs, inputs), packed) in enumerate(parts, 1):
            if w is not None or i < 3:
                check_shape(_given(w, i), (count, outputs, -(-inputs // packed)))
            if bias is not None:
                check_shape(bias, (count, outputs))

    def mixed(self, op: Emitter, scores: Value, chosen: Value, weight: Callable[[int], Value]) -> Value:
        """Emit the sum of the outputs of experts.

        Each expert computes as many rows as the one chosen most often, so that no weight is copied, and never more than
        there are tokens. Rows that are left over repeat the first token, and nothing reads what is computed of them. On
        one thread, a step of 512 tokens of 128 numbers took 0.28 of the time of experts that compute all tokens with 2
        of 8 experts (165 MB in place of 203), 0.22 with 8 of 64 (275 in place of 539), and 0.54 with 2 of 4.

        Args:
            scores, chosen: the factors and the numbers of the experts of each token, [T,k].
            weight: emits the weight of a product, [E, inputs, outputs].
        """
        size = static_size(self.x, -1)
        x = op.Reshape(self.x, [-1, size])
        tokens = op.Range(0, op.Squeeze(op.Shape(x, end=1), [0]), 1)
        numbers = op.Unsqueeze(tokens, [1])
        if self.k == self.count:
            place, rows, taken = numbers, op.Shape(x, end=1), op.Unsqueeze(x, [0])
        else:
            free = op.ConstantOfShape(op.Concat(op.Shape(x, end=1), [self.count], axis=0), value=_ZERO)
            ones = op.ScatterElements(free, chosen, op.Expand(1, op.Shape(chosen)), axis=1)
            place = op.GatherElements(op.CumSum(ones, 0, exclusive=1), chosen, axis=1)
            rows = op.ReduceMax(op.ReduceSum(ones, [0], keepdims=0), keepdims=1)
            index = op.ConstantOfShape(self.count * rows, value=_ZERO)
            at = op.Reshape(chosen * rows + place, [-1])
            index = op.ScatterElements(index, at, op.Reshape(op.Expand(numbers, op.Shape(chosen)), [-1]))
            taken = op.Reshape(op.Gather(x, index), [self.count, -1, size])
        y = op.Reshape(self._outputs(op, taken, weight), [-1, size])
        y = op.MatMul(op.Unsqueeze(scores, [1]), op.Gather(y, chosen * rows + place))
        return op.Reshape(y, op.shape_of(self.x))

    def _outputs(self, op: Emitter, x: Value, weight: Callable[[int], Value]) -> Value:
        """Emit what each expert computes of rows of its own, or of the same rows, [E or 1, rows, D]."""

        def product(i: int, x: Value) -> Value:
            bias = self.biases[i]
            return plus(op.MatMul(x, weight(i)), None if bias is None else op.Unsqueeze(bias, [1]))

        first = product(0, x)
        third = None if self.weights[2] is None else product(2, x)
        if self.activation_type != _GATED:
            inner = _ACTIVATIONS[self.activation_type](op, first)
            return product(1, inner if third is None else inner * third)
        gate, linear = first, third
        if linear is None:
            size = self.shapes[1][2]
            pairs = [size, 2] if self.swiglu_fusion == 1 else [2, size]
            axis = pairs.index(2) + 2
            both = op.Reshape(first, [0, 0, *pairs])
            gate, linear = (op.Gather(both, part, axis=axis) for part in range(2))
        if math.isfinite(self.swiglu_limit):
            limit = op.constant(self.swiglu_limit, like=gate)
            gate, linear = op.Min(gate, limit), op.Clip(linear, op.Neg(limit), limit)
        gate = gate * op.Sigmoid(self.activation_alpha * gate)
        return product(1, gate * (linear + self.activation_beta))


def _given(w: Input, number: int) -> Value:
    if w is None:
        raise GraphoptError(f"expected its input fc{number}_experts_weights, found none")
    return w


def check_shape(x: Value, shape: Sequence[int]) -> None:
    """Raise an error if an input does not have a shape."""
    if tuple(dims_of(x)) != tuple(shape):
        raise GraphoptError(f"expected its input {x.name!r} of shape {[*shape]}, found {[*dims_of(x)]}")


def _top(op: Emitter, logits: Value, k: int) -> tuple[Value, Value]:
    """Emit the k largest numbers of each row, and their places."""
    values, places = op.TopK(logits, op.constant([k]), axis=-1, _outputs=2)
    return values, places


def _shares(op: Emitter, scores: Value) -> Value:
    return scores / op.ReduceSum(scores, [-1], keepdims=1)


def _sparse_mixer(op: Emitter, logits: Value) -> tuple[Value, Value]:
    """Emit the factors and the numbers of two experts: SparseMixer (Liu et al. 2024, https://arxiv.org/abs/2409.12136).

    The second is chosen as the first, without the first. The factor of each is its softmax among those whose logits are
    close. As in inference, nothing is drawn at random.
    """
    lowest, left = op.constant(float(dtype_of(logits).min), like=logits), logits
    factors, chosen = [], []
    for _ in range(2):
        best, expert = _top(op, left, 1)
        is_far = op.Greater((best - logits) / op.Max(op.Abs(logits), best), 2 * _JITTER)
        factors.append(op.GatherElements(op.Softmax(op.Where(is_far, lowest, left), axis=-1), expert, axis=-1))
        chosen.append(expert)
        left = op.ScatterElements(left, expert, op.Expand(lowest, op.Shape(expert)), axis=1)
    return op.Concat(*factors, axis=1), op.Concat(*chosen, axis=1)

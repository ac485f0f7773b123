"""Store the weights of products in few bits, as a frozen base for adapters."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.mapped import RoomyTensor
from graphopt.graph.metadata import FROZEN
from graphopt.graph.rewriting import Pass, Pattern, selects
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import dtype_of, is_static, like, name_of, rank
from graphopt.graph.weight_kinds import (
    CONVOLUTION,
    PRODUCT,
    TRANSPOSED_CONVOLUTION,
    WeightKind,
    weight_kinds_of,
)
from passes.lowering.quantized import dequantized_rows, integer_type
from passes.lowering.registry import freeze
from passes.parameters import origin_in_file
from passes.weights.initializers import array, is_weight, replace_by

_NUMBERS_AT_ONCE = 2**20  # to bound the memory of the quantization


@dataclass(frozen=True)
class QuantizeWeights(Pass):
    """Store the weights of matrix products in a few bits, and freeze them: a base for adapters (QLoRA).

    Each block of numbers along the summed axis has a scale. Rounding is that of ONNX Runtime's
    `MatMulNBitsQuantizer` with its default algorithm, number by number. A product with such a weight dequantizes it
    anew in the forward and in the backward pass, so that one weight at a time is in memory in full precision
    (Dettmers et al. 2023, https://arxiv.org/abs/2305.14314). Weights that another operator also reads, such as an
    embedding that is the transpose of the last layer, are left as they are.

    Args:
        pattern: quantize only the weights with these names, shell-style, one or several; by default, all that train
            in the exported program.
        leave_out: do not quantize these.
        bits: 2, 4 or 8.
        block: the numbers that share a scale: 16, 32, 64, 128 or 256.
        symmetric: whether 0 is in the middle of the range; otherwise, each block has a zero point.

    Raises:
        GraphoptError: an option has another value, a pattern matches no weight that can be quantized, or a weight is
            not finite.

    >>> steps = {"quantize": passes.QuantizeWeights(bits=4), "adapter": passes.LoRA("layers.0.*", rank=2)}
    >>> step = graphopt.compile(models.mlp((64,), 3), **steps, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> step.graph.initializers["layers.0.weight"].dtype
    UINT4
    """

    alters: ClassVar[str] = "rounds weights"

    pattern: Pattern = None
    leave_out: Pattern = None
    bits: Literal[2, 4, 8] = 4
    block: Literal[16, 32, 64, 128, 256] = 32
    symmetric: bool = True

    def requires(self, model: ir.Model) -> None:
        self.precedes_gradient(model)

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        weights = dict(product_weights(model))
        chosen = chosen_weights(self, weights, self.pattern, self.leave_out)
        if not chosen:
            raise GraphoptError(
                f"QuantizeWeights: expected weights of MatMul or Gemm, found none: the model has "
                f"{some([repr(x.name) for x in weights]) or 'none that only such products read'}"
            )
        with Emitter(model) as op:
            for w in chosen:
                self._quantize(op, model, w, weights[w])

    def _quantize(self, op: Emitter, model: ir.Model, w: ir.Value, summed: int) -> None:
        """Replace a weight by integers, of which each row belongs to one output and to one block of inputs."""
        numbers, name = array(w), name_of(w)
        outputs = numbers if summed else numbers.T
        n, k = outputs.shape
        rows = n * -(-k // self.block)
        pieces = zip(*self._pieces(outputs, name), strict=True)
        packed, scales, points = (np.concatenate(piece) for piece in pieces)
        dtype, stored = integer_type(self.bits), dtype_of(w)
        tensor = ir.tensor(packed) if dtype.bitwidth == 8 else RoomyTensor(packed, dtype, [rows, self.block])
        q = ir.val(f"{name}.packed", const_value=tensor)
        scale = ir.tensor(scales.astype(stored.numpy()), dtype=stored, name=f"{name}.scales")
        zero = op.constant(points.astype(dtype.numpy()))
        model.graph.register_initializer(q)
        result = dequantized_rows(op, q, freeze(op.initializer(scale)), zero, n, k)
        replace_by(model, w, like(result if summed else op.Transpose(result, perm=[1, 0]), w))
        metadata.copy(w, q)
        FROZEN.set(q)
        w.const_value = None
        w.name = f"{name}/float"
        q.name = name

    def _pieces(self, outputs: np.ndarray, name: str) -> Iterator[tuple[np.ndarray, np.ndarray, np.ndarray]]:
        """Yield packed integers, scales and zero points of some outputs after the other."""
        n, k = outputs.shape
        step = max(1, _NUMBERS_AT_ONCE // k)
        for start in range(0, n, step):
            rows = np.ascontiguousarray(outputs[start : start + step], np.float32)
            if not np.isfinite(rows).all():
                raise GraphoptError(
                    f"QuantizeWeights: expected finite numbers in {name!r}, found others: name it in leave_out"
                )
            blocks = np.pad(rows, ((0, 0), (0, -k % self.block))).reshape(-1, self.block)
            q, scales, points = quantized(blocks, self.bits, symmetric=self.symmetric)
            yield q if self.bits == 8 else q[:, ::2] | q[:, 1::2] << 4, scales, points


def quantized(blocks: np.ndarray, bits: int, *, symmetric: bool) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the integers, the scale and the zero point of each block, as ONNX Runtime's quantizer does.

    See BlockwiseQuantizer in onnxruntime/core/mlas/lib/q4_dq.cpp. A symmetric scale has the opposite sign of the
    number that is largest in magnitude, which becomes 0, the integer of the largest magnitude below the middle.
    """
    top, middle, low, high = 2**bits - 1, 2 ** (bits - 1), blocks.min(1), blocks.max(1)
    if symmetric:
        scales = np.where(np.abs(high) > np.abs(low), high, low) / np.float32(-middle)
        points = np.full(len(blocks), middle, np.float32)
    else:
        low, high = np.minimum(low, 0), np.maximum(high, 0)
        scales = (high - low) / np.float32(top)
        points = np.divide(-low, scales, out=np.zeros_like(low), where=scales != 0)
        points = _rounded(np.clip(points, 0, top))
    inverse = np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)
    numbers = np.clip(_rounded(blocks * inverse[:, None] + points[:, None]), 0, top)
    return numbers.astype(np.uint8), scales, points.astype(np.uint8)


def _rounded(x: np.ndarray) -> np.ndarray:
    """Round halves up, as C rounds numbers that are not negative; others are clipped to 0."""
    return np.floor(x + np.float32(0.5))


def product_weights(model: ir.Model) -> Iterator[tuple[ir.Value, int]]:
    """Yield the matrices that only products read, and the axis that these sum over."""
    for w in list(model.graph.initializers.values()):
        if is_weight(w) and is_static(w) and len(w.shape or ()) == 2 and not w.is_graph_output():
            found = list(readings_of(w))
            if found and all(kind is not None and not kind.left for _, kind, _ in found):
                yield w, min(axis for _, _, axis in found)


def readings_of(
    x: ir.Value, through: Collection[str] = ("Identity",), axes: Sequence[int] = ()
) -> Iterator[tuple[ir.Node, WeightKind | None, int]]:
    """Yield each reader of a weight, its kind, and the axis of the weight that it sums over.

    Of filters, that is the axis of the channels. The kind of what is no product is None.

    Args:
        x: the weight, or what a walk has reached.
        through: the operators beside Transpose behind which readers are found.
        axes: the axes of the weight that are those of `x`.
    """
    axes = axes or range(rank(x))
    for node, index in x.uses():
        y, is_turned = node.outputs[0], node.op_type == "Transpose"
        if node.domain == "" and index == 0 and (is_turned or node.op_type in through) and not y.is_graph_output():
            perm = node.attributes.get_ints("perm", range(len(axes))[::-1]) if is_turned else range(len(axes))
            yield from readings_of(y, through, [axes[i] for i in perm])
            continue
        kind = weight_kinds_of(node).get(index)
        summed = {CONVOLUTION: 1, TRANSPOSED_CONVOLUTION: 0}
        if kind is not None and kind.name == PRODUCT and not kind.has_layout:
            summed[PRODUCT] = -1 if kind.is_transposed(node) else -2
        if kind is None or kind.name not in summed:
            yield node, None, 0
        else:
            yield node, kind, axes[summed[kind.name]]


def chosen_weights(
    owner: Pass, weights: Iterable[ir.Value], pattern: Pattern, leave_out: Pattern, *, trained: bool = True
) -> list[ir.Value]:
    """Return the weights of products that a pass changes.

    Args:
        owner: the pass.
        weights: all such weights.
        pattern, leave_out: those to change, and to leave.
        trained: without a pattern, change those alone that train in the exported program.

    Raises:
        GraphoptError: a pattern matches none.
    """
    weights = list(weights)
    for field, each in (("pattern", pattern), ("leave_out", leave_out)):
        if each and not any(selects(each, w) for w in weights):
            raise GraphoptError(
                f"{type(owner).__name__}: {field}={each!r} matches no weight that only products read; the model has "
                f"{some([repr(x.name) for x in weights]) or 'none'}"
            )
    kept = [w for w in weights if not selects(leave_out, w)]
    return [w for w in kept if (selects(pattern, w) if pattern else not trained or origin_in_file(w).trains)]

"""Factorize the weights of products into two of a low rank."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass, Pattern
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import given, is_static
from graphopt.intervals import within
from passes.quantization.quantize_weights import chosen_weights, product_weights, readings_of
from passes.weights.initializers import array, is_weight, register


@dataclass(frozen=True)
class LowRank(Pass):
    """Replace the weight of a product by two, whose product is its best approximation of a rank: x W by (x A) B.

    Both train. They are U S^(1/2) and S^(1/2) V', of the singular value decomposition W = U S V' (Eckart and Young
    1936). B has the name and the layout of W, and A is `NAME.low_rank`. A weight that would not become smaller stays.
    Filters [outputs, inputs, ...] of a Conv without groups are a matrix, too: A are as large with fewer outputs, and B
    [outputs, rank, 1, ...] follows (Zhang et al. 2015, https://arxiv.org/abs/1505.06798).

    Args:
        rank: the rank of all weights.
        energy: in place of a rank for all: of each weight, the smallest rank whose squared singular values sum to this
            share of all.
        pattern: factorize only the weights with these names, shell-style, one or several; by default, all that train
            in the exported program.
        leave_out: do not factorize these.

    Raises:
        GraphoptError: neither rank nor energy is given, or both, or no weight of a product becomes smaller.

    >>> steps = {"quantize": passes.LowRank(rank=4), "loss": passes.CrossEntropy(), "optimizer": passes.AdamW()}
    >>> step = graphopt.compile(models.mlp((64,), 3), **steps)
    >>> {w.name: tuple(w.shape) for w in step.graph.inputs if "layers.0.weight" in w.name and "exp" not in w.name}
    {'layers.0.weight': (4, 128), 'layers.0.weight.low_rank': (64, 4)}
    """

    alters: ClassVar[str] = "cuts weights to a low rank"

    rank: int | None = within("[1, inf)", None)
    energy: float | None = within("(0, 1]", None)
    pattern: Pattern = None
    leave_out: Pattern = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if (self.rank is None) == (self.energy is None):
            raise GraphoptError(
                f"LowRank: expected rank or energy, found {'neither' if self.rank is None else 'both'}: write "
                "passes.LowRank(energy=0.9)"
            )

    def requires(self, model: ir.Model) -> None:
        self.precedes_gradient(model)

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        known = dict(product_weights(model)) | dict.fromkeys(_filters(model), 1)
        weights = chosen_weights(self, known, self.pattern, self.leave_out)
        if not any([self._factorize(model, w, known[w]) for w in weights]):
            raise GraphoptError(
                f"LowRank: expected weights of MatMul, Gemm or Conv that become smaller, found none: "
                f"{some([f'{w.name!r} of {w.shape}' for w in weights]) or 'no weight'} matches: choose a lower rank, "
                "or weights that one product reads"
            )

    def _factorize(self, model: ir.Model, w: ir.Value, summed: int) -> bool:
        """Replace a weight, and return whether it becomes smaller."""
        stored = array(w)
        is_filter = stored.ndim > 2
        flat = stored.reshape(stored.shape[0], math.prod(stored.shape[1:]))
        matrix = (flat.T if summed else flat).astype(np.float64)
        if not np.isfinite(matrix).all():
            raise GraphoptError(f"LowRank: expected finite numbers in {w.name!r}, found others: name it in leave_out")
        u, s, v = np.linalg.svd(matrix, full_matrices=False)
        if self.energy is None:
            rank = self.rank or 1
        else:
            shares = np.cumsum(np.square(s)) / max(np.square(s).sum(), np.finfo(np.float64).tiny)
            rank = min(int(np.searchsorted(shares, self.energy - 1e-12)) + 1, len(s))
        products = list(readings_of(w))
        readers = [node for node, _, _ in products]
        if (
            rank * sum(matrix.shape) >= matrix.size
            or (not is_filter and {axis for _, _, axis in products} != {summed})
            or any(node.graph is not model.graph or node.attributes.get_int("transA", 0) for node in readers)
        ):
            return False
        roots = np.sqrt(s[:rank])
        a, b = u[:, :rank] * roots, roots[:, None] * v[:rank]
        b = np.ascontiguousarray((b.T if summed else b).astype(stored.dtype))
        if is_filter:
            a = a.T.reshape(rank, *stored.shape[1:])
            b = b.reshape(*b.shape, *[1] * (stored.ndim - 2))
        down = register(model, f"{w.name}.low_rank", a.astype(stored.dtype))
        w.const_value, w.shape = ir.tensor(b, name=w.name), ir.Shape(b.shape)
        for node, _ in w.uses():
            if node not in readers:  # the transposes between
                node.outputs[0].shape = ir.Shape(b.shape[::-1])
        with Emitter(model) as op:
            for node in readers:
                with op.before(node):
                    x = given(node.inputs[0])
                    inner = op.Conv(x, down, **node.attributes) if is_filter else op.MatMul(x, down)
                node.replace_input_with(0, inner)
                if is_filter:  # it sums over the channels alone
                    node.attributes.clear()
        return True


def _filters(model: ir.Model) -> Iterator[ir.Value]:
    """Yield the weights that only convolutions without groups read as their filters."""
    for w in list(model.graph.initializers.values()):
        kinds = {(x.domain, x.op_type, index, x.attributes.get_int("group", 1)) for x, index in w.uses()}
        if is_weight(w) and is_static(w) and kinds == {("", "Conv", 1, 1)} and not w.is_graph_output():
            yield w

"""Define optimizers that use the rows and columns of matrices."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of, dtype_of
from graphopt.graph.weight_kinds import PRODUCT, weight_kinds_of
from graphopt.intervals import within
from passes.optimizers.adaptive import AdamW
from passes.optimizers.optimizer import Optimizer, Start, ValueTuple, check_optimizer

__all__ = ["Adafactor", "Muon"]

_ALIKE = {"Cast", "Identity"}  # operators whose output has the axes of their input


@dataclass(frozen=True)
class Muon(Optimizer):
    """Update a matrix by its orthogonalized momentum, and other parameters by AdamW (Jordan et al. 2024).

    The update is w - rate s O, where O is the matrix with the singular vectors of the momentum, and with singular
    values near 1, which Newton-Schulz iterations x' = a x + (b x x^T + c (x x^T)^2) x compute. Matrices whose rows a
    Gather reads are embeddings and belong to the other parameters. Give the last layer to another optimizer, too, by a
    group: `passes.Group("head.weight", optimizer=passes.AdamW(3e-4))`. The iterations run in float32, where PyTorch
    rounds to bfloat16.

    Args:
        weight_decay: the share of each parameter that a step removes, times the rate.
        momentum: the decay of the mean of gradients.
        nesterov: use the gradient plus the mean of the next step.
        iterations: the number of iterations.
        coefficients: the numbers a, b and c.
        epsilon: the least norm by which the momentum is divided.
        adjust: the factor s of the rate, or its rule: `original` for the root of rows / columns, if that is above 1, of
            a matrix with a row for each output; `match_rms_adamw` for 0.2 times the root of the larger of the two, so
            that rates for AdamW fit (Liu et al. 2025).
        others: the optimizer of the other parameters, whose rate keeps its ratio to that of Muon; by default, AdamW
            with Muon's rate and weight decay.

    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.Muon(0.02))
    >>> [name for name in graphopt.Executor(step).state if "layers.0" in name and "." in name[9:]]  # doctest: +ELLIPSIS
    ['layers.0.bias.exp_sum', 'layers.0.bias.exp_sum_sq', 'layers.0.weight.momentum']
    """

    weight_decay: float = within("[0, inf)", 0.1, kw_only=True)
    momentum: float = within("[0, 1)", 0.95)
    nesterov: bool = True
    iterations: int = within("[1, 99]", 5)
    coefficients: tuple[float, float, float] = within("(-inf, inf)", (3.4445, -4.775, 2.0315), whole=False)
    epsilon: float = within("(0, inf)", 1e-7)
    adjust: Literal["original", "match_rms_adamw"] | float = within(
        "(0, inf)", "original", whole=False, choices=("original", "match_rms_adamw")
    )
    others: Optimizer | None = None

    decoupled: ClassVar[bool] = True

    def __post_init__(self) -> None:
        super().__post_init__()
        check_optimizer(self.others, "Muon(others)")
        if len(self.coefficients) != 3:
            raise GraphoptError(f"Muon(coefficients={self.coefficients!r}): expected three numbers")

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0}

    def of(self, w: Value) -> Optimizer:
        if w.shape is None or len(w.shape) != 2 or _is_embedding(w):
            adamw = AdamW(self.learning_rate, weight_decay=self.weight_decay, slot_bits=self.slot_bits)
            return (self.others or replace(adamw, fused=self.fused)).of(w)
        rows, columns = w.shape.numpy() if _has_rows_of_outputs(w) else w.shape.numpy()[::-1]
        rules = {
            "original": math.sqrt(max(1, rows / columns)),
            "match_rms_adamw": 0.2 * math.sqrt(max(rows, columns)),
        }
        return replace(self, adjust=rules[self.adjust] if isinstance(self.adjust, str) else self.adjust)

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        b = self.momentum * slots[0] + (1 - self.momentum) * g
        x = (1 - self.momentum) * g + self.momentum * b if self.nesterov else b
        rows, columns = ir.Shape(dims_of(g)).numpy()
        tall = rows > columns
        x = op.Transpose(x, perm=[1, 0]) if tall else x
        x = x / op.Max(op.Sqrt(op.ReduceSumSquare(x, keepdims=0)), self.epsilon)
        one, two, three = self.coefficients
        for _ in range(self.iterations):
            gram = op.Gemm(x, x, transB=1)
            x = op.Gemm(op.Gemm(gram, gram, gram, alpha=three, beta=two), x, x, beta=one)
        x = op.Transpose(x, perm=[1, 0]) if tall else x
        return w - (rate * self.adjust) * x, b


def _readers(w: Value) -> list[tuple[Node, int, bool]]:
    """Return what reads a matrix, in the order of the graph: node, number of the input, whether it is transposed."""
    found = []
    for node, index in w.uses():
        if node.op_type in _ALIKE or node.op_type == "Transpose":
            swaps = node.op_type == "Transpose"
            found += [(user, i, swapped != swaps) for user, i, swapped in _readers(node.outputs[0])]
        else:
            found.append((node, index, False))
    return found


def _is_embedding(w: Value) -> bool:
    """Return whether a Gather reads the rows of a matrix."""
    return any(node.op_type == "Gather" and index == 0 for node, index, _ in _readers(w))


def _has_rows_of_outputs(w: Value) -> bool:
    """Return whether a matrix has a row, not a column, for each output of the first product that reads it."""
    for node, index, transposed in _readers(w):
        kind = weight_kinds_of(node).get(index)
        if kind is not None and kind.name == PRODUCT:
            return kind.is_transposed(node) != transposed
    return True


@dataclass(frozen=True)
class Adafactor(Optimizer):
    """Update by w - rate' g / sqrt(v), clipped, where v is a product of the means of rows and columns of g^2.

    Shazeer, Stern 2018. A slot for each row and each column of the last two axes replaces one for each number. The rate
    is the smaller of `learning_rate` and 1 / sqrt(t), times the root mean square of the parameter.

    Args:
        learning_rate: the largest relative rate, or with `relative_step=False` the rate.
        weight_decay: the share of each parameter that a step removes, times `learning_rate`.
        decay_power: the power p of the decay 1 - t^p of the means.
        least_scale: the least root mean square of a parameter by which the rate is multiplied.
        clip_threshold: the root mean square above which an update is scaled down to it.
        epsilon: the least mean of squared gradients is its square; None for the precision of the number type.
        scale_parameter: multiply the rate by the root mean square of the parameter.
        relative_step: limit the rate to 1 / sqrt(t). Hugging Face's Trainer sets this and `scale_parameter` to False.

    >>> step = graphopt.compile(models.linear((6,), 3), loss=passes.MeanSquaredError(), optimizer=passes.Adafactor())
    >>> state = graphopt.Executor(step).state
    >>> {name: state[name].shape for name in state if ".weight." in name}
    {'layers.0.weight.row_var': (6, 1), 'layers.0.weight.col_var': (1, 3)}
    """

    learning_rate: float = within("[0, inf)", 1e-2)
    decay_power: float = within("(-inf, 0]", -0.8)
    least_scale: float = within("[0, inf)", 1e-3)
    clip_threshold: float = within("[1, inf)", 1.0)
    epsilon: float | None = within("[0, inf)", None, whole=False)
    scale_parameter: bool = True
    relative_step: bool = True

    def slots(self) -> dict[str, Start]:
        return {
            "variance": lambda w: np.zeros_like(w) if w.ndim < 2 else None,
            "row_var": lambda w: np.zeros_like(w[..., :1]) if w.ndim >= 2 else None,
            "col_var": lambda w: np.zeros_like(w[..., :1, :]) if w.ndim >= 2 else None,
        }

    def decayed(self, op: Emitter, w: Value, g: Value, rate: Value) -> tuple[Value, Value]:
        return w, g  # the update scales the rate by the parameter as it was before

    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        least = float(np.finfo(dtype_of(w).numpy()).eps) if self.epsilon is None else self.epsilon
        share = op.Pow(t, op.constant(self.decay_power, like=t))
        squares = g * g
        axes = [[-1], [-2]] if len(slots) == 2 else [None]
        means = [squares if axis is None else op.ReduceMean(squares, axis, keepdims=1) for axis in axes]
        new = [slot + share * (mean - slot) for slot, mean in zip(slots, means, strict=True)]
        v = new[0]
        if len(new) == 2:
            v = new[0] * new[1] / op.Max(op.ReduceMean(new[0], [-2], keepdims=1), least)
        u = g / op.Sqrt(op.Max(v, least * least))
        step = op.Min(rate, 1 / op.Sqrt(t)) if self.relative_step else rate
        if self.scale_parameter:
            step = step * op.Max(_root_mean_square(op, w), self.least_scale)
        kept = w * (1 - rate * self.weight_decay) if self.weight_decay else w
        return kept - (step / op.Max(_root_mean_square(op, u) / self.clip_threshold, 1.0)) * u, *new


def _root_mean_square(op: Emitter, x: Value) -> Value:
    return op.Sqrt(op.ReduceMean(x * x, keepdims=0))

"""Predict sets of classes and intervals that contain the target with a probability that is chosen."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of, name_of
from graphopt.intervals import within
from passes.calibration import Learning, OfClasses, OnRows, wide
from passes.losses.loss import epsilon

__all__ = ["PredictionInterval", "PredictionSet"]


@dataclass(frozen=True)
class _Conformal(Learning):
    """Learn a threshold of scores: the k-th smallest of n rows, k = ceil((n + 1)(1 - alpha)) (Vovk et al. 2005).

    Args:
        alpha: the share of rows whose target may be left out.
        threshold: the threshold; None learns it.
    """

    alpha: float = within("(0, 1)", 0.1)
    threshold: tuple[float, ...] | None = field(default=None, repr=False, kw_only=True)

    learnt_as: ClassVar[str] = "threshold"

    def threshold_of(self, scores: np.ndarray, what: str = "") -> float:
        """Return the k-th smallest score, without interpolation.

        Raises:
            GraphoptError: there are too few rows.
        """
        k = max(math.ceil((len(scores) + 1) * (1 - self.alpha) - 1e-9), 1)
        if k > len(scores):
            raise self.wrong(
                f"needs at least {math.ceil(1 / self.alpha - 1e-9) - 1} rows{what} for alpha={self.alpha:g}, found "
                f"{len(scores)}"
            )
        return float(np.sort(scores)[k - 1])


@dataclass(frozen=True)
class PredictionSet(OfClasses, _Conformal):
    """Add outputs `probability` [N, classes] and `set` [N, classes]: the set has the right class in 1 - alpha of rows.

    The score of a class is minus its probability for `lac` (Sadinle, Lei, Wasserman 2019). For `aps`, it is minus the
    sum of the smaller probabilities, which orders classes as the sum from the largest to its own does, but keeps the
    digits of sure networks (Romano, Sesia, Candes 2020; without their random numbers, as in arXiv:2107.07511). `raps`
    adds `penalty` for each rank after `rank` (Angelopoulos et al. 2021). A set has the classes whose score is at most
    the threshold, and may be empty.

    Args:
        score: `lac` for the smallest sets, `aps` or `raps` for sets that grow with the difficulty of a row.
        by_class: learn a threshold for each class (Mondrian), so that 1 - alpha holds for the rows of each.
        penalty: of `raps`.
        rank: of `raps`.

    Raises:
        GraphoptError: there is no single output of classes, or there are too few rows for alpha.

    >>> digits = graphopt.data.digits()
    >>> sure = graphopt.calibrate(models.mlp((1, 8, 8), 10), digits, passes.PredictionSet(alpha=0.1))
    >>> graphopt.run(sure, {"x": digits.arrays["x"][:5]})["set"].shape
    (5, 10)
    """

    score: Literal["lac", "aps", "raps"] = "lac"
    by_class: bool = False
    penalty: float = within("[0, inf)", 0.01, kw_only=True)
    rank: int = within("[0, inf)", 5, kw_only=True)

    def learn(self, model: ir.Model, on_rows: OnRows) -> PredictionSet:
        known = self.looked_at(model, on_rows)
        with Emitter(model) as op:
            p = known.scores(model).emit_probabilities(op)
            y = op.Identity(self._likelihoods(op, p), _outputs=["set.likelihoods"])
        likelihoods, targets = on_rows(y)
        numbers = self.class_numbers(targets, likelihoods.shape[1])
        own = -np.take_along_axis(likelihoods, numbers[:, None], axis=1)[:, 0]
        if not self.by_class:
            return replace(known, threshold=(self.threshold_of(own),))
        of_classes = (self.threshold_of(own[numbers == c], f" of class {c}") for c in range(likelihoods.shape[1]))
        return replace(known, threshold=tuple(of_classes))

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        scores = self.scores(model)
        self.check_count("threshold", 1, 2 if scores.is_binary else dims_of(scores.output)[1])
        p, least = scores.emit_probabilities(op), -np.array(self.threshold)
        least -= 8 * epsilon(p) * np.abs(least)  # rounding leaves no class out
        outside = op.Less(self._likelihoods(op, p), op.constant(least, like=p))
        return scores.output, {"probability": p, "set": op.Not(outside)}  # of NaN, every class

    def _likelihoods(self, op: Emitter, p: ir.Value) -> ir.Value:
        """Emit, for each class, minus its score: the larger, the likelier."""
        if self.score == "lac":
            return p
        falling, order = op.TopK(p, op.shape_of(p, 1), axis=1, _outputs=2)
        less_likely = op.CumSum(falling, 1, exclusive=1, reverse=1)  # of the least likely class, 0 in each row
        less_likely = less_likely + 0.0 * falling  # but NaN in a row of NaN
        if self.score == "raps":
            rank = op.Range(1, op.Squeeze(op.shape_of(p, 1)) + 1, 1)
            less_likely = less_likely - self.penalty * op.Max(op.Cast(rank - self.rank, to=p.dtype), 0.0)
        return op.ScatterElements(less_likely, order, less_likely, axis=1)


@dataclass(frozen=True)
class PredictionInterval(_Conformal):
    """Add outputs `lower` and `upper` to a regression, between which the target lies in 1 - alpha of rows.

    `absolute` puts both as far from the prediction [N] or [N, 1] as the k-th smallest absolute error. `cqr` moves two
    quantiles, the output [N, 2], such as of two `passes.Quantile`, away from each other (Romano, Patterson, Candes
    2019).

    Args:
        score: `absolute` or `cqr`.

    Raises:
        GraphoptError: the output has another shape, or there are too few rows for alpha.

    >>> rows = {"x": numpy.zeros((19, 2), numpy.float32), "target": numpy.arange(19.0)[:, None]}
    >>> sure = graphopt.calibrate(models.linear((2,), 1), rows, passes.PredictionInterval(alpha=0.1))
    >>> graphopt.run(sure, {"x": rows["x"][:1]})["upper"].tolist()  # the model predicts 0
    [[17.0]]
    """

    score: Literal["absolute", "cqr"] = "absolute"

    def learn(self, model: ir.Model, on_rows: OnRows) -> PredictionInterval:
        predicted, targets = on_rows(self._output(model))
        ends = predicted.reshape(len(predicted), -1)
        t = self.matching(targets, ends[:, :1])
        errors = np.maximum(ends[:, :1] - t, t - ends[:, -1:])[:, 0]
        return replace(self, threshold=(self.threshold_of(errors),))

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        y = self._output(model)
        self.check_count("threshold", 1)
        low = high = wide(op, y)
        if self.score == "cqr":
            low, high = op.Split(low, [1, 1], axis=1, _outputs=2)
        margin = op.constant(np.array(self.threshold), like=low)
        return y, {"lower": low - margin, "upper": high + margin}

    def _output(self, model: ir.Model) -> ir.Value:
        y = self.own_output(model)
        fits, due = dims_of(y)[1:] in ((), (1,)), "[N] or [N, 1]"
        if self.score == "cqr":
            fits, due = dims_of(y)[1:] == (2,), "[N, 2], a lower and an upper quantile"
        if not y.shape or not fits:
            raise self.wrong(f"expected an output {due}, found {name_of(y)!r} of shape {y.shape}")
        return y

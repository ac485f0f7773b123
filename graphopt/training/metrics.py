"""Compute metrics of predictions batch by batch, exactly as on all rows at once.

`Metrics` reads outputs and targets as labels, numbers and probabilities. `METRICS` has the mathematics of each metric.
scikit-learn's metrics of the same names define the values.
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import check_function
from graphopt.errors import GraphoptError, kind_of, unknown
from graphopt.graph.classified import activation_of
from graphopt.graph.roles import TargetSpec
from graphopt.moments import Moments

# A name, a name with options such as {"top_k": {"k": 3}}, or a function of all targets and predictions
Wanted = str | Mapping[str, Any] | Callable[[np.ndarray, np.ndarray], float]

_NO_SETS = "metrics: {}: expected prediction {}, found none: calibrate the file with passes.PredictionSet()"
AVERAGES = ("macro", "micro", "weighted", "binary")
RECORDED = (  # what a record has beside metrics
    *("epoch", "step", "rows", "loss", "validation_loss", "learning_rate", "seconds"),
    *("samples_per_second", "tokens_per_second"),
)


@dataclass(frozen=True)
class ScoredBatch:
    """Hold the predictions and targets of a batch for metrics, without ignored elements."""

    target: np.ndarray  # the label of each element, or the numbers of each row
    predicted: np.ndarray  # in the same shape
    scores: np.ndarray  # the output that decides on each label: one for each element (and class)
    spec: TargetSpec
    expected: np.ndarray | None = None  # the probability of each class, if the target has probabilities
    beside: Mapping[str, np.ndarray] = field(default_factory=dict)  # derived outputs, by kind

    def log_probabilities(self) -> np.ndarray:
        """Return the logarithm of the probability of each class of each element."""
        scores = self.scores.astype(np.float64)
        if not self.spec.from_logits:
            return np.log(np.maximum(scores, _number_type(self.scores).eps))
        scores -= scores.max(axis=1, keepdims=True)
        return scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))

    def probabilities(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the probability of each class of each element, and 1 for its own class, 0 for the others."""
        if self.spec.labels is None:
            p, numbers = np.exp(self.log_probabilities()), self.target.astype(np.int64)
        else:
            activation, numbers = (
                activation_of(self.spec),
                (self.target == self.spec.labels[1]).astype(np.int64),
            )
            if activation is None:
                raise GraphoptError("metrics: expected a loss of probabilities, found none: leave out ece and brier")
            p = self.scores.astype(np.float64)
            p = 0.5 * (1 + np.tanh(0.5 * p)) if activation else p
            p = np.stack([1 - p, p], axis=1)
        p = self.beside.get("probability", p).astype(np.float64)
        return p, np.eye(p.shape[1])[numbers] if self.expected is None else self.expected


class Metric(ABC):
    """Accumulate batches to a number. `tasks` are those for which it is defined."""

    tasks: Sequence[str] = ("binary", "classification")

    @abstractmethod
    def update(self, batch: ScoredBatch) -> None:
        """Accumulate a batch."""

    @abstractmethod
    def result(self) -> object:
        """Return the value on all batches so far, of which at least one has elements."""

    def name(self, known_as: str) -> str:
        """Return the name in records of the metric that `METRICS` names `known_as`."""
        return known_as


class OfMean(Metric):
    """Average the terms of each element or row, and then, after a function of each column's mean, over columns."""

    def __init__(
        self,
        terms: Callable[[ScoredBatch], np.ndarray],
        tasks: Sequence[str] = Metric.tasks,
        of_mean: Callable[[np.ndarray], np.ndarray] = np.asarray,
        /,
    ) -> None:
        self._terms, self.tasks, self._of_mean = terms, tasks, of_mean
        self._count = 0
        self._sum: np.ndarray = np.zeros(())

    def update(self, batch: ScoredBatch) -> None:
        terms = self._terms(batch)
        self._count += len(terms)
        self._sum = self._sum + terms.sum(axis=0)

    def result(self) -> float:
        return float(np.mean(self._of_mean(self._sum / self._count)))


class TopK(OfMean):
    """Compute the share of targets among the k classes with the highest scores.

    Of equal scores, the one of the larger class number counts as higher, as in scikit-learn.
    """

    def __init__(self, k: int = 5) -> None:
        if type(k) is not int or k < 1:
            raise GraphoptError(f"metrics: top_k: expected k of 1 or more, found {k!r}")
        super().__init__(self._is_among, ("classification",))
        self._k = k

    def name(self, known_as: str) -> str:
        return f"top_{self._k}_accuracy"

    def _is_among(self, batch: ScoredBatch) -> np.ndarray:
        own = np.take_along_axis(batch.scores, batch.target[:, None].astype(np.int64), axis=1)
        later = np.arange(batch.scores.shape[1]) > batch.target[:, None]
        higher = (batch.scores > own) | ((batch.scores == own) & later)
        return np.less(higher.sum(axis=1), self._k)


class CalibrationError(Metric):
    """Compute the expected calibration error (Naeini, Cooper, Hauskrecht 2015), between confidence and accuracy.

    The probabilities of the predicted classes fall into `bins` of equal width. The error is the mean distance of their
    mean from the share that is right, weighted by the rows of each bin.
    """

    def __init__(self, bins: int = 15) -> None:
        if type(bins) is not int or not 1 <= bins <= 10_000:
            raise GraphoptError(f"metrics: ece: expected bins from 1 to 10000, found {bins!r}")
        self.sums = np.zeros((3, bins))  # of rows, of their confidences, and of those that are right

    def update(self, batch: ScoredBatch) -> None:
        p, own = batch.probabilities()
        numbers = own.argmax(axis=1)
        most, bins = p.max(axis=1), self.sums.shape[1]
        place = np.clip(np.ceil(most * bins).astype(np.int64) - 1, 0, bins - 1)
        for row, values in zip(self.sums, (np.ones(len(p)), most, p.argmax(axis=1) == numbers), strict=True):
            row += np.bincount(place, values, bins)

    def result(self) -> float:
        count, confidence, right = self.sums
        return float(np.abs(confidence - right).sum() / count.sum())


class R2(OfMean):
    """Compute the coefficient of determination, as the mean over columns."""

    def __init__(self) -> None:
        super().__init__(_squared_errors, ("regression",))
        self._target = Moments()

    def update(self, batch: ScoredBatch) -> None:
        super().update(batch)
        self._target.add(_columns(batch.target))

    def result(self) -> float:
        return r2(self._sum, self._target.squares)


class OfCounts(Metric):
    """Compute a number from the counts of each label."""

    def __init__(self) -> None:
        self._counts: dict[float, np.ndarray] = {}

    def update(self, batch: ScoredBatch) -> None:
        self._spec = batch.spec
        right = batch.target[batch.predicted == batch.target]
        for place, labels in enumerate((right, batch.predicted, batch.target)):
            for label, count in zip(*np.unique(labels, return_counts=True), strict=True):
                self._counts.setdefault(label.item(), np.zeros(3, np.int64))[place] += count

    def result(self) -> float:
        return float(self.of(*np.array(list(self._counts.values())).T))

    @abstractmethod
    def of(self, right: np.ndarray, predicted: np.ndarray, target: np.ndarray) -> float:
        """Return the number, from how often each label is predicted rightly, is predicted, and is in the target."""


class BalancedAccuracy(OfCounts):
    """Compute the mean of the recall of each class in the target."""

    def of(self, right: np.ndarray, predicted: np.ndarray, target: np.ndarray) -> float:
        return np.mean(right[target > 0] / target[target > 0])


class OfClasses(OfCounts):
    """Average a number of each class; a class without a denominator counts as 0.

    Args:
        of_class: returns the number of each class, from the arguments of `of`.
        average: `macro` for the mean over the classes in targets or predictions; `weighted` for the mean weighted by
            their number in targets; `micro` for the number of all classes' counts together; `binary` for that of the
            second label. None is `binary` for a binary loss, and `macro` for several classes.
    """

    def __init__(self, of_class: Callable[..., np.ndarray], /, average: str | None = None) -> None:
        super().__init__()
        if average is not None and average not in AVERAGES:
            raise GraphoptError(f"metrics: {unknown('average', average, AVERAGES)}")
        self._of_class, self._average = of_class, average

    def name(self, known_as: str) -> str:
        return known_as if self._average is None else f"{known_as}_{self._average}"

    def of(self, right: np.ndarray, predicted: np.ndarray, target: np.ndarray) -> float:
        average = self._average or ("binary" if self._spec.task == "binary" else "macro")
        if average == "micro":
            right, predicted, target = (np.atleast_1d(counts.sum()) for counts in (right, predicted, target))
        weights = target if average == "weighted" else np.ones(len(target))
        if average == "binary":
            positive = 1 if self._spec.labels is None else self._spec.labels[1]
            weights = np.array([label == positive for label in self._counts])
            if self._spec.labels is None and not set(self._counts) <= {0, 1}:
                raise GraphoptError(
                    f"metrics: average=binary: expected classes 0 and 1, found {max(self._counts)}: use macro, micro "
                    f"or weighted"
                )
            if not weights.any():
                return 0.0
        return np.average(self._of_class(right, predicted, target), weights=weights)


class ConfusionMatrix(Metric):
    """Count how often each label (row) is predicted as each label (column).

    The labels are all class numbers if their number is known, otherwise those in targets or predictions.
    """

    def __init__(self) -> None:
        self._counts: Counter[tuple[float, float]] = Counter()

    def update(self, batch: ScoredBatch) -> None:
        spec = batch.spec
        self._labels = spec.labels or (None if spec.classes is None else range(spec.classes))
        pairs = np.stack([batch.target, batch.predicted], axis=1)
        for pair, count in zip(*np.unique(pairs, axis=0, return_counts=True), strict=True):
            self._counts[tuple(pair.tolist())] += int(count)

    def result(self) -> list[list[int]]:
        labels = self._labels or sorted({label for pair in self._counts for label in pair})
        return [[self._counts[row, column] for column in labels] for row in labels]


class Collected(Metric):
    """Compute a function of arrays of all elements: it keeps those that `arrays` returns for each batch."""

    def __init__(
        self,
        arrays: Callable[[ScoredBatch], Sequence[np.ndarray]],
        function: Callable[..., float],
        tasks: Sequence[str] = Metric.tasks,
        /,
    ) -> None:
        self._arrays, self._function, self.tasks = arrays, function, tasks
        self._parts: list[Sequence[np.ndarray]] = []

    def update(self, batch: ScoredBatch) -> None:
        self._parts.append(self._arrays(batch))

    def result(self) -> float:
        found = self._function(*map(np.concatenate, zip(*self._parts, strict=True)))
        try:
            return float(found)
        except (TypeError, ValueError) as error:
            name = getattr(self._function, "__name__", type(self._function).__name__)
            raise GraphoptError(f"metrics: {name}: expected a number, found {kind_of(found)}: return one") from error


def area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the area under the ROC curve: the share of pairs in which the positive element has the higher score.

    This is the statistic of Mann and Whitney (1947) as a share; pairs of equal scores count half.
    """
    _, places, counts = np.unique(scores, return_inverse=True, return_counts=True)
    ranks = np.cumsum(counts) - (counts - 1) / 2  # equal scores share their mean rank
    positives = int(positive.sum())
    pairs = positives * (len(scores) - positives)
    above = ranks[places.reshape(-1)][positive].sum() - positives * (positives + 1) / 2
    return float(above / pairs) if pairs else float("nan")


def mean_area(scores: np.ndarray, positive: np.ndarray) -> float:
    """Return the mean of `area` over the columns, classes against all others, that have a positive element."""
    areas = [area(x, own) for x, own in zip(scores.T, positive.T, strict=True) if own.any()]
    return float(np.mean(areas)) if areas else float("nan")


def _scores_of_classes(batch: ScoredBatch) -> Sequence[np.ndarray]:
    """Return a score of each element and class, or of the second label, and whether the target is this class."""
    if batch.spec.labels is not None:
        return batch.scores[:, None], (batch.target == batch.spec.labels[1])[:, None]
    scores = np.exp(batch.log_probabilities())
    return scores, batch.target[:, None] == np.arange(scores.shape[1])


def r2(squared_error: np.ndarray, spread: np.ndarray) -> float:
    """Return the mean coefficient of determination over columns, as scikit-learn's `r2_score` does.

    A column without spread around its mean counts as 1 without errors, and as 0 with errors.
    """
    with np.errstate(divide="ignore", invalid="ignore"):
        columns = np.where(spread > 0, 1 - squared_error / spread, np.where(squared_error > 0, 0.0, 1.0))
    return float(np.mean(columns))


def _cross_entropies(batch: ScoredBatch) -> np.ndarray:
    log_p = batch.log_probabilities()
    if batch.expected is None:
        return -np.take_along_axis(log_p, batch.target[:, None].astype(np.int64), axis=1)
    return -(batch.expected * log_p).sum(axis=1)


def _log_losses(batch: ScoredBatch) -> np.ndarray:
    p, own = batch.probabilities()
    return -(own * np.log(np.maximum(p, _number_type(batch.scores).tiny))).sum(axis=1)


def _covered(batch: ScoredBatch) -> np.ndarray:
    """Return whether the target is in the set or the interval of its row, or, without these, at most the prediction."""
    if "set" in batch.beside:
        own = batch.probabilities()[1].argmax(axis=1)
        return np.take_along_axis(batch.beside["set"], own[:, None], axis=1)[:, 0]
    if batch.spec.task != "regression":
        raise GraphoptError(_NO_SETS.format("coverage", "sets of classes"))
    t, ends = _columns(batch.target), batch.beside
    low = _columns(ends["lower"]) if "lower" in ends else np.array(-np.inf)
    return np.logical_and(low <= t, t <= _columns(ends.get("upper", batch.predicted)))


def _widths(batch: ScoredBatch) -> np.ndarray:
    """Return the number of classes in each set, or the width of each interval."""
    if not {"set", "lower"} & {*batch.beside}:
        raise GraphoptError(_NO_SETS.format("mean_width", "sets or intervals"))
    if "set" in batch.beside:
        return batch.beside["set"].sum(axis=1)
    return _columns(batch.beside["upper"]) - _columns(batch.beside["lower"])


def _absolute_errors(batch: ScoredBatch) -> np.ndarray:
    return np.abs(_columns(batch.predicted) - _columns(batch.target))


def _squared_errors(batch: ScoredBatch) -> np.ndarray:
    return np.square(_absolute_errors(batch))


def _brier_scores(batch: ScoredBatch) -> np.ndarray:
    """Return the squared errors of probabilities; of two classes, that of one, as scikit-learn does."""
    p, own = batch.probabilities()
    return np.square(p - own).sum(axis=1) / (2 if p.shape[1] == 2 else 1)


METRICS: dict[str, Callable[..., Metric]] = {
    "accuracy": partial(OfMean, lambda batch: np.equal(batch.predicted, batch.target)),
    "balanced_accuracy": BalancedAccuracy,
    "brier": partial(OfMean, _brier_scores),
    "confusion_matrix": ConfusionMatrix,
    "coverage": partial(OfMean, _covered, ("binary", "classification", "regression")),
    "ece": CalibrationError,
    "f1": partial(OfClasses, lambda right, predicted, target: 2 * right / np.maximum(predicted + target, 1)),
    "log_loss": partial(OfMean, _log_losses),
    "mae": partial(OfMean, _absolute_errors, ("regression",)),
    "mean_width": partial(OfMean, _widths, ("binary", "classification", "regression")),
    "mse": partial(OfMean, _squared_errors, ("regression",)),
    "perplexity": partial(OfMean, _cross_entropies, ("classification",), np.exp),
    "precision": partial(OfClasses, lambda right, predicted, target: right / np.maximum(predicted, 1)),
    "r2": R2,
    "recall": partial(OfClasses, lambda right, predicted, target: right / np.maximum(target, 1)),
    "rmse": partial(OfMean, _squared_errors, ("regression",), np.sqrt),
    "roc_auc": partial(Collected, _scores_of_classes, mean_area),
    "top_k": TopK,
}
DEFAULTS = {"binary": ("accuracy",), "classification": ("accuracy",), "regression": ("r2", "mae")}


def named(wanted: Wanted) -> tuple[str, Metric]:
    """Return a new metric with its name in records; raise an error if it or one of its options is unknown."""
    if callable(wanted):
        name = getattr(wanted, "__name__", type(wanted).__name__)
        check_function(wanted, f"metrics: {name}", ("targets", "predictions"))
        if name in RECORDED:
            raise GraphoptError(f"metrics: expected a name that records do not have, found {name!r}: rename it")
        return name, Collected(lambda batch: (batch.target, batch.predicted), wanted, tuple(DEFAULTS))
    chosen: Mapping[str, Any] = wanted if isinstance(wanted, Mapping) else {wanted: None}
    if len(chosen) != 1:
        raise GraphoptError(f"metrics: expected one name with its options, found {dict(chosen)}")
    ((known_as, options),) = chosen.items()
    if known_as not in METRICS:
        raise GraphoptError(unknown("metric", str(known_as), METRICS))
    kind, options = METRICS[known_as], {} if options is None else options
    if not isinstance(options, Mapping):
        raise GraphoptError(f"metrics: {known_as}: expected a mapping of options, found {options!r}")
    parameters = inspect.signature(kind).parameters
    known = [name for name, x in parameters.items() if x.kind is not x.POSITIONAL_ONLY]
    for option in options:
        if option not in known:
            raise GraphoptError(f"metrics: {known_as}: {unknown('option', str(option), known)}")
    metric = kind(**options)
    return metric.name(known_as), metric


class Metrics:
    """Accumulate batches, and return the metrics of a target: the wanted ones that suit its task, or all that suit."""

    def __init__(self, spec: TargetSpec, wanted: Sequence[Wanted] | None = None, *, by_losses: bool = False) -> None:
        self._spec = spec
        by_losses = by_losses and spec.shift > 0 and not spec.label_smoothing
        self._empty = True
        default = DEFAULTS[spec.task]
        if spec.shift:  # logits take more than their loss
            default = ("perplexity",) if by_losses else ()
        chosen = [named(metric) for metric in (default if wanted is None else wanted)]
        for name, _ in chosen:
            if [other for other, _ in chosen].count(name) > 1:
                raise GraphoptError(f"metrics: expected each metric once, found {name!r} twice")
        self._metrics = {name: metric for name, metric in chosen if spec.task in metric.tasks}
        self._tokens = np.zeros(2)  # the sum of their losses, and their number
        self.of_losses = by_losses and self._metrics.pop("perplexity", None) is not None

    @property
    def is_shifted(self) -> bool:
        """Return whether the target is ahead of the prediction, as in a causal language model."""
        return self._spec.shift > 0

    @property
    def is_empty(self) -> bool:
        """Return whether there is no metric of predictions to compute."""
        return not self._metrics

    def predicted(self, prediction: np.ndarray) -> np.ndarray:
        """Return the predicted labels, class numbers or numbers."""
        if self._spec.labels is not None:
            low, high = self._spec.labels
            return np.where(prediction > self._spec.threshold, high, low)
        return prediction if self._spec.axis is None else np.asarray(prediction.argmax(self._spec.axis))

    def batch(
        self,
        prediction: np.ndarray,
        target: np.ndarray,
        weights: np.ndarray | None = None,
        **beside: np.ndarray,
    ) -> ScoredBatch:
        """Return an output and its target in the form that metrics read; tokens whose weight is 0 do not count."""
        if self._spec.shift:
            prediction, target = prediction[:, : -self._spec.shift], target[:, self._spec.shift :]
        spec, predicted = self._spec, self.predicted(prediction)
        if spec.axis is None:
            if spec.labels is None:
                if predicted.size != target.size:
                    raise GraphoptError(
                        f"metrics: expected a prediction of shape {list(target.shape)}, as the target, found "
                        f"{list(predicted.shape)}: leave metrics out, metrics=[]"
                    )
                return ScoredBatch(target, predicted.reshape(target.shape), predicted, spec, beside=beside)
            low, high = spec.labels
            expected = np.where(target > (low + high) / 2, high, low)
            expected, predicted, scores = (x.reshape(-1) for x in (expected, predicted, prediction))
            return ScoredBatch(expected, predicted, scores, spec, beside=beside)
        probabilities = _by_class(target, spec.axis) if spec.target_probabilities else None
        expected = target.reshape(-1) if probabilities is None else probabilities.argmax(axis=1)
        valid = np.full(expected.size, True) if spec.ignore_index is None else expected != spec.ignore_index
        if self._spec.shift and weights is not None:
            valid &= weights[:, : -self._spec.shift].reshape(-1) > 0
        return ScoredBatch(
            expected[valid],
            predicted.reshape(-1)[valid],
            _by_class(prediction, spec.axis)[valid],
            spec,
            None if probabilities is None else probabilities[valid],
            {kind: x[valid] for kind, x in beside.items() if len(x) == len(valid)},
        )

    def add_losses(self, loss: float, weights: np.ndarray) -> None:
        """Accumulate the mean loss of the tokens of a batch, by the weights of these."""
        count = float(weights.sum(dtype=np.float64))
        self._tokens += count * loss if count else 0.0, count

    def add(self, *scored: np.ndarray | None, **beside: np.ndarray) -> None:
        """Accumulate a batch, of the arguments of `batch`."""
        batch = self.batch(*scored, **beside)  # type: ignore[arg-type]
        if batch.target.size:
            self._empty = False
            for metric in self._metrics.values():
                metric.update(batch)

    def result(self) -> dict[str, Any]:
        """Return the metrics by name; none if there was no row, or all were ignored."""
        total, count = self._tokens.tolist()
        found = {"perplexity": float(np.exp(total / count))} if count else {}
        return found if self._empty else found | {name: x.result() for name, x in self._metrics.items()}


def listed(wanted: Wanted | Sequence[Wanted] | None) -> Sequence[Wanted] | None:
    """Return one or several wanted metrics as a list."""
    if isinstance(wanted, str | Mapping) or callable(wanted):
        return [wanted]
    if wanted is not None and not isinstance(wanted, Sequence):
        raise GraphoptError(f"metrics: expected names such as 'accuracy', or functions, found {kind_of(wanted)}")
    return wanted


def metrics(
    inputs: Mapping[str, ir.Value], wanted: Sequence[Wanted] | None = None, *, by_losses: bool = False
) -> dict[str, tuple[str, Metrics]]:
    """Return the output to compare and new metrics for each target among a training graph's inputs.

    Each of the `wanted` metrics has to be defined for a target. With `by_losses`, the perplexity of a language model
    follows from its losses, which `add_losses` gets.
    """
    specs = {name: TargetSpec.read(x) for name, x in inputs.items()}
    tasks = list(dict.fromkeys(spec.task for spec in specs.values() if spec))
    for name, metric in map(named, wanted or ()):
        if not any(task in metric.tasks for task in tasks):
            found = " and ".join(tasks) or "no target that a loss compares"
            raise GraphoptError(f"metrics: {name}: expected {' or '.join(metric.tasks)}, found {found}")
    return {name: (spec.output, Metrics(spec, wanted, by_losses=by_losses)) for name, spec in specs.items() if spec}


def weighted_r2(predicted: np.ndarray, target: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the coefficient of determination of weighted rows."""
    average = partial(np.average, axis=0, weights=weights)
    return r2(average((target - predicted) ** 2), average((target - average(target)) ** 2))


def weighted_accuracy(predicted: np.ndarray, target: np.ndarray, weights: np.ndarray | None) -> float:
    """Return the share of correct labels, averaged over weighted rows."""
    right = (predicted == target).reshape(len(target), -1).mean(axis=1)
    return float(np.average(right, weights=weights))


def _by_class(array: np.ndarray, axis: int) -> np.ndarray:
    """Return a row for each element, and a column for each class."""
    return np.moveaxis(array, axis, -1).reshape(-1, array.shape[axis])


def _number_type(scores: np.ndarray) -> np.finfo:
    """Return the limits of the numbers that scores have as probabilities: those of whole numbers are float64's."""
    return np.finfo(scores.dtype if scores.dtype.kind == "f" else np.float64)


def _columns(array: np.ndarray) -> np.ndarray:
    return np.reshape(array, (len(array), -1)).astype(np.float64)

"""Compute what passes learn from data: means, standard deviations and class weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from graphopt.errors import GraphoptError

_Rows = range | np.ndarray
_MANY = 2**24  # classes, whose counts fit into memory
ELEMENTS = 2**20  # of a piece, whose numbers are copied as float64


def mean_and_scale(x: np.ndarray, rows: _Rows | None = None, *, axis: int = 1) -> tuple[np.ndarray, np.ndarray]:
    """Return the mean and the standard deviation of each feature of an array, as float64.

    The array may be memory-mapped; see `Moments` for the features and the formulas.

    Args:
        x: an array whose first axis is the rows.
        rows: the indices of the rows to use; all by default.
        axis: the axis of the features.

    Raises:
        GraphoptError: the array has no such axis, or a mean or a standard deviation is not finite.

    >>> import numpy
    >>> mean, scale = graphopt.data.mean_and_scale(numpy.array([[1.0, 5.0], [3.0, 5.0]]))
    >>> mean.tolist(), scale.tolist()  # a constant feature has the scale 1
    ([2.0, 5.0], [1.0, 1.0])
    """
    moments = Moments(axis)
    for part in pieces(range(len(x)) if rows is None else rows, x[:1].size):
        moments.add(x[row_index(part)])
    return moments.mean, moments.scale


def balanced_class_weights(
    target: np.ndarray,
    rows: _Rows | None = None,
    *,
    classes: int | None = None,
    ignore_index: int | None = None,
) -> tuple[float, ...]:
    """Return n / (k c) for each class, for n labels, k classes and c labels of the class.

    These are the weights of scikit-learn's `compute_class_weight("balanced")`.

    Args:
        target: class numbers from 0, in any shape; the first axis is the rows.
        rows: the indices of the rows to use; all by default.
        classes: the number of classes; the largest label + 1 by default.
        ignore_index: a label that does not count.

    Raises:
        GraphoptError: labels are not class numbers, or a class has no label.

    >>> import numpy
    >>> graphopt.data.balanced_class_weights(numpy.array([0, 0, 0, 1]))
    (0.6666666666666666, 2.0)
    """
    target = np.asarray(target)
    parts = pieces(range(len(target)) if rows is None else rows, target[:1].size)
    return weights_of((target[row_index(part)] for part in parts), classes, ignore_index)


def weights_of(
    parts: Iterable[np.ndarray], classes: int | None = None, ignore_index: int | None = None
) -> tuple[float, ...]:
    """Return balanced class weights of labels that come in pieces; see `balanced_class_weights`."""
    most = _MANY if classes is None else classes
    if most > _MANY:
        raise GraphoptError(f"class weights: expected at most {_MANY} classes, found {most}")
    counts = np.zeros(classes or 0, np.int64)
    for part in parts:
        if part.dtype.kind not in "iub":
            raise GraphoptError(f"class weights: expected class numbers as target, found {part.dtype}")
        labels = part.ravel()
        if ignore_index is not None:
            labels = labels[labels != ignore_index]
        for label in (labels.min(initial=0), labels.max(initial=0)):
            if not 0 <= label < most:
                raise GraphoptError(f"class weights: expected labels from 0 to {most - 1} as target, found {label}")
        counted = np.bincount(labels.astype(np.int64), minlength=len(counts))
        counted[: len(counts)] += counts
        counts = counted
    if missing := np.flatnonzero(counts == 0).tolist() or ([0] if not counts.size else []):
        raise GraphoptError(
            f"class weights: expected rows of each of {max(len(counts), 1)} classes to train on, found none of class "
            f"{', '.join(map(str, missing[:10]))}: give a number for each class instead"
        )
    return tuple((counts.sum() / (len(counts) * counts)).tolist())


class Moments:
    """Gather the mean and the variance of each feature from pieces of an array, in float64.

    Along all axes but `axis`, numbers are those of one feature. An array without this axis, of a number per row, is
    one feature. Pieces are centered by the mean of the first one, and join by the formulas of Chan, Golub and LeVeque
    (1983), so that nothing cancels.

    Args:
        axis: the axis of the features, by default the channels of images [N, C, H, W] and the columns of a table.

    Attributes:
        squares: the sum of squared differences from the mean of each feature.
    """

    def __init__(self, axis: int = 1) -> None:
        self._axis = axis
        self._count = 0
        self._center = self._mean = self.squares = np.zeros(0)  # the mean is that of what is centered

    def add(self, x: np.ndarray) -> None:
        """Add a piece: rows of the array.

        Raises:
            GraphoptError: the array has no such axis.
        """
        if x.ndim > 1 and not (-x.ndim <= self._axis < x.ndim and self._axis % x.ndim):
            raise GraphoptError(
                f"axis={self._axis}: expected an axis of the features, from 1 to {x.ndim - 1}, in rows of shape "
                f"{list(x.shape[1:])}"
            )
        columns = (x[:, None] if x.ndim == 1 else np.moveaxis(x, self._axis, -1)).astype(np.float64)
        columns = columns.reshape(-1, columns.shape[-1])
        count = len(columns)
        if not count:
            return
        with np.errstate(invalid="ignore", over="ignore"):
            if not self._count:
                self._center = columns.mean(axis=0)
                self._mean = self.squares = np.zeros_like(self._center)
            columns -= self._center
            mean = columns.mean(axis=0)
            columns -= mean
            share, distance = count / (self._count + count), mean - self._mean
            self._mean = self._mean + share * distance
            self.squares = self.squares + (columns * columns).sum(axis=0) + self._count * share * distance * distance
        self._count += count

    @property
    def mean(self) -> np.ndarray:
        """Return the mean of each feature.

        Raises:
            GraphoptError: a mean or a standard deviation is not finite.
        """
        mean = self._center + self._mean
        wrong = ~(np.isfinite(mean) & np.isfinite(self.squares))
        if wrong.any():
            raise GraphoptError(
                f"mean and scale: expected finite numbers whose squares are finite, found others in feature "
                f"{int(np.argmax(wrong))}: fill in what is missing, or leave it out"
            )
        return mean

    @property
    def deviation(self) -> np.ndarray:
        """Return the standard deviation of each feature (dividing by n)."""
        return np.sqrt(self.squares / max(self._count, 1))

    @property
    def scale(self) -> np.ndarray:
        """Return the standard deviation of each feature (dividing by n), or 1 where the feature is constant.

        A feature is constant if its variance is within the rounding errors of its mean, as in scikit-learn's
        StandardScaler.

        Raises:
            GraphoptError: a mean or a standard deviation is not finite.
        """
        epsilon = np.finfo(np.float64).eps
        mean, variance = self.mean, self.squares / max(self._count, 1)
        rounding = self._count * epsilon * variance + (self._count * mean * epsilon) ** 2
        return np.where(variance <= rounding, 1.0, self.deviation)


def pieces(rows: _Rows, size: int) -> Iterator[_Rows]:
    """Cut rows of `size` numbers into pieces that fit into memory."""
    step = max(1, ELEMENTS // max(size, 1))
    for start in range(0, len(rows), step):
        yield rows[start : start + step]


def row_index(rows: _Rows) -> slice | np.ndarray:
    """Return an index for rows, which copies nothing if they are neighbours."""
    if isinstance(rows, range):
        return slice(rows.start, rows.stop) if rows.step == 1 else np.asarray(rows)
    return rows

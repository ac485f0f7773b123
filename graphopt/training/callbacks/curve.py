"""Keep the course of a number over a run of any length in a bounded number of bins."""

from __future__ import annotations


class Curve:
    """Keep the means of a number over equal bins of steps.

    Args:
        most: the largest number of bins, an even number.
        bins: the count, last step and sum of each bin so far.
    """

    def __init__(self, most: int, bins: list[list[float]] | None = None) -> None:
        self._most, self.bins = most, bins or []
        self._width = max((count for count, _, _ in self.bins), default=1)

    def add(self, step: int, value: float) -> None:
        """Add a value; merge pairs of bins if all are full."""
        if not self.bins or self.bins[-1][0] >= self._width:
            if len(self.bins) == self._most:
                pairs = zip(self.bins[::2], self.bins[1::2], strict=True)
                self.bins = [[a[0] + b[0], b[1], a[2] + b[2]] for a, b in pairs]
                self._width *= 2
            self.bins.append([0, step, 0.0])
        last = self.bins[-1]
        last[0], last[1], last[2] = last[0] + 1, step, last[2] + value

    def points(self) -> tuple[list[float], list[float]]:
        """Return the last step and the mean of each bin."""
        return [step for _, step, _ in self.bins], [total / count for count, _, total in self.bins]

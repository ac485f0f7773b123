"""Follow a measure of the epochs: whether it improves, and how long it has not."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from graphopt.errors import GraphoptError, unknown
from graphopt.intervals import check_intervals, within
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.checkpoints import larger_is_better

_MODES = ("auto", "min", "max")


@dataclass
class Monitor(Callback, ABC):
    """Count the epochs in which a measure has not improved. This is the base class of callbacks that act on it.

    A subclass implements `stalled`. Epochs without the measure, because they were not validated, do not count.

    Args:
        monitor: the measure of an epoch to follow, such as `validation_loss`, `accuracy` or `loss`.
        patience: the number of epochs without an improvement after which to act.
        min_delta: the amount by which the measure has to be better than the best so far.
        mode: `min` if less is better, `max` if more is; `auto` decides by the name.
    """

    monitor: str = "validation_loss"
    patience: int = within("[1, inf)", 3)
    min_delta: float = within("[0, inf)", 0.0)
    mode: Literal["auto", "min", "max"] = "auto"

    reads_state = False
    saved: ClassVar[Sequence[str]] = ("best", "waited")

    def __post_init__(self) -> None:
        check_intervals(self)
        if self.mode not in _MODES:
            raise GraphoptError(f"{type(self).__name__}: {unknown('mode', str(self.mode), _MODES)}")
        self._larger = self.mode == "max" or (self.mode == "auto" and larger_is_better(self.monitor))
        self._reset()

    def _reset(self) -> None:
        self.best, self.waited = -math.inf if self._larger else math.inf, 0

    @abstractmethod
    def stalled(self, run: Run) -> None:
        """Act after `patience` epochs without an improvement."""

    def improved(self, run: Run, record: Record) -> None:
        """See the best epoch so far."""

    def on_fit_begin(self, run: Run) -> None:
        if run.resumed is None:
            self._reset()
        if self.monitor == "validation_loss" and run.validation_rows == 0:
            raise GraphoptError(
                f"{type(self).__name__}(monitor='validation_loss'): expected rows held out, found none: set "
                "`validation`, or monitor='loss'"
            )

    def beats(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one by more than `min_delta`."""
        return value > other + self.min_delta if self._larger else value < other - self.min_delta

    def measure(self, run: Run, record: Record) -> float | None:
        """Return the measure in an epoch's record, or None if the epoch was not validated.

        Raises:
            GraphoptError: the record does not have such a measure.
        """
        value: float | None = record.get(self.monitor)
        if value is None and ("validation_loss" in record or run.validation_rows == 0):
            numbers = [name for name, value in record.items() if isinstance(value, float)]
            raise GraphoptError(f"{type(self).__name__}: {unknown('measure', self.monitor, numbers)}")
        return value

    def on_epoch_end(self, run: Run, record: Record) -> None:
        value = self.measure(run, record)
        if value is None:
            return
        if self.beats(value, self.best):
            self.best, self.waited = value, 0
            self.improved(run, record)
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.stalled(run)

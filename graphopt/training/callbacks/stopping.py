"""Follow measures of a training, and end it before its last epoch."""

from __future__ import annotations

import math
import statistics
import time
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np

from graphopt import privacy
from graphopt.errors import GraphoptError, unknown
from graphopt.fields import check_options
from graphopt.files import ReadPath
from graphopt.graph import state
from graphopt.inspection.words import counted, label_of
from graphopt.intervals import within
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.callbacks.logs import read_json_lines
from graphopt.training.checkpoints import larger_is_better, seconds

__all__ = ["EarlyStopping", "MedianStopping", "Monitor", "PrivacyBudget", "StopOnNaN", "TimeLimit"]

_MODES = ("auto", "min", "max")
_WEIGHTS = "weights/"  # before the name of a weight in what a checkpoint keeps


@dataclass
class Monitor(Callback, ABC):
    """Count the epochs in which a measure has not improved. This is the base class of callbacks that act on it.

    A subclass implements `stalled`. Epochs without the measure, because they were not validated, do not count.

    Args:
        monitor: the measure of an epoch to follow, such as `validation_loss`, `accuracy` or `loss`.
        patience: the number of epochs without an improvement after which to act.
        min_delta: the amount by which the measure has to be better than the best so far.
        mode: `min` if less is better, `max` if more is; `auto` decides by the name. A mode against the name, such as
            `max` for a loss, is obeyed, as by Keras, with a warning.
    """

    monitor: str = "validation_loss"
    patience: int = within("[1, inf)", 3)
    min_delta: float = within("[0, inf)", 0.0)
    mode: Literal["auto", "min", "max"] = "auto"

    reads_state = False
    saved: ClassVar[Sequence[str]] = ("best", "waited")

    def __post_init__(self) -> None:
        if self.mode not in _MODES:
            raise GraphoptError(f"{type(self).__name__}: {unknown('mode', str(self.mode), _MODES)}")
        check_options(self)
        larger = larger_is_better(self.monitor)
        if self.mode == ("min" if larger else "max") and larger != ("loss" in self.monitor.lower()):
            warnings.warn(
                f"{type(self).__name__}(monitor={self.monitor!r}, mode={self.mode!r}): a "
                f"{'larger' if larger else 'smaller'} value is better, and this mode takes the worst epoch for the "
                "best: leave mode out",
                stacklevel=3,
            )
        self._larger = self.mode == "max" or (self.mode == "auto" and larger)
        super().__post_init__()

    def reset(self) -> None:
        self.best, self.waited = -math.inf if self._larger else math.inf, 0

    @abstractmethod
    def stalled(self, run: Run) -> None:
        """Act after `patience` epochs without an improvement."""

    def improved(self, run: Run, record: Record) -> None:
        """Act on the best epoch so far."""

    def on_fit_begin(self, run: Run) -> None:
        if self.monitor == "validation_loss" and run.validation_rows == 0:
            raise GraphoptError(
                f"{type(self).__name__}(monitor='validation_loss'): expected rows held out, found none: set "
                "`validation`, or monitor='loss'"
            )

    def beats(self, value: float, other: float) -> bool:
        """Return whether a value is better than another one by more than `min_delta`."""
        return value > other + self.min_delta if self._larger else value < other - self.min_delta

    def measure(self, run: Run, record: Record) -> float | None:
        """Return the measure in an epoch's record, or None if it was not validated; raise an error if it is unknown."""
        value: float | None = record.get(self.monitor)
        if value is None and ("validation_loss" in record or run.validation_rows == 0):
            numbers = [name for name, value in record.items() if isinstance(value, float)]
            raise GraphoptError(f"{type(self).__name__}: {unknown('measure', self.monitor, numbers)}")
        return value

    def on_epoch_end(self, run: Run, record: Record) -> None:
        if not run.epochs:  # nothing trains
            return
        value = self.measure(run, record)
        if value is None or run.is_pruning:
            return
        if self.beats(value, self.best):
            self.best, self.waited = value, 0
            self.improved(run, record)
            return
        self.waited += 1
        if self.waited >= self.patience:
            self.stalled(run)


@dataclass
class EarlyStopping(Monitor):
    """Stop if a measure has not improved for several epochs, and restore the weights of the best epoch.

    The rule is Keras's. The weights are restored at the end of a run that ends by itself, also after its last epoch.
    Checkpoints keep the last weights, from which a resumed run continues.

    Args:
        restore_best: restore the weights of the best epoch; otherwise keep the last ones.

    >>> graphopt.callbacks.EarlyStopping(monitor="accuracy", patience=5).patience
    5
    """

    restore_best: bool = True

    saved = ("best", "waited", "record")

    def reset(self) -> None:
        super().reset()
        self._weights: dict[str, np.ndarray] = {}
        self.record: Record | None = None

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        if self.waited >= self.patience:
            self.stalled(run)

    def improved(self, run: Run, record: Record) -> None:
        self.record = dict(record)
        if self.restore_best:
            self._weights = run.weights()

    def stalled(self, run: Run) -> None:
        best = "" if self.record is None else f": the best was epoch {self.record['epoch']}"
        run.stop(f"{label_of(self.monitor)} has not improved in {counted(self.waited, 'epoch')}{best}")

    def on_fit_end(self, run: Run) -> None:
        if self._weights and run.has_ended:
            run.executor.update_state(self._weights)
            run.restored = self.record

    def state_dict(self) -> dict[str, Any]:
        weights = {f"{_WEIGHTS}{name}": array for name, array in self._weights.items()}
        return {**super().state_dict(), **weights}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        super().load_state_dict(state)
        self._weights = {k.removeprefix(_WEIGHTS): x for k, x in state.items() if k.startswith(_WEIGHTS)}


@dataclass
class MedianStopping(Monitor):
    """Stop a run of a sweep whose measure is worse than the median of the other runs at the same epoch.

    The best value so far of this run is compared with the values of the others. The rule is that of Optuna's
    MedianPruner, and close to the one of Golovin et al., "Google Vizier" (2017), section 3.2.1.

    Args:
        folder: the folder of the sweep, with a folder for each run. In recipes, it is the one above that of the run.
        patience: the number of consecutive epochs in which the run has to be worse.
        min_delta: the amount by which it has to be worse.
        at_least: the number of other runs that have to have reached the epoch.
        warmup: the number of first epochs after which no run is stopped.

    >>> graphopt.callbacks.MedianStopping(folder="sweep", at_least=3, warmup=2).warmup
    2
    """

    on_every_worker = False

    folder: ReadPath = "."
    patience: int = within("[1, inf)", 1)
    at_least: int = within("[1, inf)", 4)
    warmup: int = within("[0, inf)", 0)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        value = self.measure(run, record)
        if value is None:
            return
        self.best = max(self.best, value) if self._larger else min(self.best, value)
        others = [loss for loss in self._others(run.epoch) if loss is not None]
        if run.epoch <= self.warmup or len(others) < self.at_least:
            return
        median = statistics.median(others)
        self.waited = self.waited + 1 if self.beats(median, self.best) else 0
        if self.waited >= self.patience:
            run.stop(f"{self.monitor} {self.best:.4g} is worse than {median:.4g}, the median of {len(others)} runs")

    def stalled(self, run: Run) -> None:
        """Do nothing: a run without an improvement may still be better than the others."""

    def _others(self, epoch: int) -> Iterator[float | None]:
        for path in Path(self.folder).glob("*/metrics.jsonl"):
            for record in read_json_lines(path):
                value = record.get(self.monitor)
                if "seconds" in record and record.get("epoch") == epoch and isinstance(value, int | float):
                    yield value


@dataclass
class TimeLimit(Callback):
    """Stop after the first step beyond a time limit. The time before an interruption counts, too.

    Args:
        limit: the time, such as `90 s`, `10 min` or `1.5 h`.

    >>> graphopt.callbacks.TimeLimit("10 min").limit
    '10 min'
    """

    limit: str

    reads_state = False

    def __post_init__(self) -> None:
        duration = seconds(self.limit) if isinstance(self.limit, str) else None
        if duration is None:
            raise GraphoptError(f"TimeLimit: expected a time such as '90 s', '10 min' or '2 h', found {self.limit!r}")
        self._seconds = duration
        self.reset()

    def reset(self) -> None:
        self._before, self._start = 0.0, time.monotonic()

    def on_fit_begin(self, run: Run) -> None:
        self._start = time.monotonic()

    def on_step_end(self, run: Run, record: Record) -> None:
        if self._spent() >= self._seconds:
            run.stop(f"the time limit of {self.limit} has passed")

    def _spent(self) -> float:
        return self._before + time.monotonic() - self._start

    def state_dict(self) -> dict[str, Any]:
        return {"seconds": self._spent()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._before = state["seconds"]


@dataclass
class StopOnNaN(Callback):
    """Stop after a loss that is infinite or NaN.

    It sees such a loss of a step if the executor's `on_nonfinite` is `skip` or `warn`; otherwise the executor's error
    ends the run. It always sees such a `validation_loss`.

    Args:
        patience: the number of consecutive steps with such a loss after which to stop.

    >>> graphopt.callbacks.StopOnNaN(patience=10).patience
    10
    """

    patience: int = within("[1, inf)", 1)

    reads_state = False
    saved = ("found",)

    def reset(self) -> None:
        self.found = 0

    def on_step_end(self, run: Run, record: Record) -> None:
        self.found = 0 if math.isfinite(record["loss"]) else self.found + 1
        if self.found >= self.patience:
            run.stop(f"the loss of step {record['step']} is {record['loss']}")

    def on_evaluate_end(self, run: Run, record: Record) -> None:
        if not math.isfinite(record["validation_loss"]):
            run.stop(f"the validation_loss after step {run.step} is {record['validation_loss']}")


@dataclass
class PrivacyBudget(Callback):
    """Record the `epsilon` of private training at the end of each epoch, and stop before a step that exceeds a budget.

    Steps of earlier calls of `fit` count, too, if the same object has followed them. The weights are kept. What passes
    learn from the rows before, such as the means of `Standardize` and class weights, is not accounted for.

    Args:
        epsilon: the budget; None to record only.
        delta: the probability with which the bound may fail; None for 1 / (2 rows).

    Raises:
        GraphoptError: the training has no noise, its batches are not drawn by `sampling="poisson"`, or earlier steps
            had other rows, batches or noise.

    >>> graphopt.callbacks.PrivacyBudget(epsilon=8.0, delta=1e-5).epsilon
    8.0
    """

    epsilon: float | None = within("(0, inf)", None)
    delta: float | None = within("(0, 1)", None)

    reads_state = False

    def __post_init__(self) -> None:
        super().__post_init__()
        self._followed: list[Any] = []  # the facts and the number of steps so far

    def on_fit_begin(self, run: Run) -> None:
        numbers = run.executor.hyperparameters
        if state.MULTIPLIER not in numbers or run.sampled_rows is None:
            raise GraphoptError(
                "PrivacyBudget: expected gradient=passes.PrivateGradient(...), clip=passes.GaussianNoise(...) and "
                "fit(sampling='poisson'), found another training: its rows are not protected"
            )
        self._facts: dict[str, Any] = {
            "rows": run.sampled_rows,
            "batch_size": round(float(numbers[state.EXPECTED_ROWS])),
            "multiplier": float(numbers[state.MULTIPLIER]),
            "delta": 0.5 / run.sampled_rows if self.delta is None else self.delta,
        }
        accounted = [*self._facts.values()][:3]
        if run.step and self._followed != [*accounted, run.step]:
            raise GraphoptError(
                f"PrivacyBudget: expected to have followed the {run.step:,} steps before, with the same rows, "
                f"batch_size and multiplier, {accounted}, found {self._followed[:3] or 'none of them'}: give the "
                f"object that has followed them, resume from a checkpoint, or begin with a new executor"
            )
        self._followed = [*accounted, run.step]
        last = self._end = run.step + (run.epochs - len(run.records)) * (run.steps or 0)
        self._last = math.inf if self.epsilon is None else privacy.steps_for(self.epsilon, most=last, **self._facts)
        if self.epsilon is not None and run.step >= self._last < last:
            self._stop(run)

    def on_step_end(self, run: Run, record: Record) -> None:
        self._followed[-1] = run.step
        if self.epsilon is not None and self._last <= run.step < self._end:
            self._stop(run)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        record["epsilon"] = privacy.epsilon(steps=run.step, **self._facts)

    def state_dict(self) -> dict[str, Any]:
        return {"followed": list(self._followed)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._followed = list(state["followed"])

    def _stop(self, run: Run) -> None:
        run.stop(f"the privacy budget of epsilon {self.epsilon:g} is used up")

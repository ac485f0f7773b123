"""Set the learning rate, or average the weights, from outside of the training graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError
from graphopt.graph.state import LEARNING_RATE, NOISE_KEY, averages, masks
from graphopt.inspection.words import label_of
from graphopt.intervals import within
from graphopt.runtime.steps import NonFiniteLoss
from graphopt.runtime.tensors import Tensor
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.callbacks.stopping import Monitor

__all__ = ["Adaptive", "LearningRateFinder", "ReduceOnPlateau", "WeightAverage"]

ADAPTIVE_DIVISOR = 5  # of the learning rate, as in scikit-learn's schedule `adaptive`
ADAPTIVE_LEAST_RATE = 1e-6  # also scikit-learn's
LEAST_RELATIVE_FALL = 1e-6  # per step of a range test; a loss that falls by less may be rounding
UNSETTLED_LOSSES = 10  # of a range test: the average of the first ones still moves


@dataclass
class ReduceOnPlateau(Monitor):
    """Multiply the learning rate by a factor if a measure has not improved for several epochs.

    The rule is that of PyTorch's ReduceLROnPlateau, with a threshold that is an absolute amount. `patience` counts as
    in Keras: PyTorch's patience is one less.

    Args:
        factor: the factor of the rate.
        cooldown: the number of epochs after a reduction that do not count.
        min_learning_rate: the least rate.

    >>> graphopt.callbacks.ReduceOnPlateau(factor=0.5).patience
    10
    """

    patience: int = within("[1, inf)", 10)
    min_delta: float = within("[0, inf)", 1e-4)
    factor: float = within("(0, 1)", 0.1)
    cooldown: int = within("[0, inf)", 0)
    min_learning_rate: float = within("[0, inf)", 0.0)

    saved = ("best", "waited", "cooling")

    def reset(self) -> None:
        super().reset()
        self.cooling = 0

    def on_fit_begin(self, run: Run) -> None:
        super().on_fit_begin(run)
        check_rate_is_free(self, run)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        if self.cooling and self.monitor in record:
            self.cooling -= 1
            self.waited = -1  # the end of this epoch makes it 0
        super().on_epoch_end(run, record)

    def stalled(self, run: Run) -> None:
        rate = max(run.executor.learning_rate * self.factor, self.min_learning_rate)
        if rate < run.executor.learning_rate:
            run.executor.learning_rate = rate
            run.notes.append(f"rate      {rate:.3g}: {label_of(self.monitor)} no longer improves")
        self.waited, self.cooling = 0, self.cooldown


@dataclass
class Adaptive(Callback):
    """Divide the learning rate by 5 if the training loss has not fallen for several epochs.

    scikit-learn's schedule `adaptive` ends training once the rate falls below 1e-6. This one keeps the rate instead.

    Args:
        patience: the number of consecutive epochs.
        tolerance: the amount by which the mean loss of an epoch has to be less than the least loss so far.

    >>> graphopt.callbacks.Adaptive(patience=2).tolerance
    0.001
    """

    patience: int = within("[1, inf)", 5)
    tolerance: float = within("[0, inf)", 1e-3)

    reads_state = False
    saved = ("least", "waited")

    def reset(self) -> None:
        self.least, self.waited = math.inf, 0

    def on_fit_begin(self, run: Run) -> None:
        check_rate_is_free(self, run)

    def on_epoch_end(self, run: Run, record: Record) -> None:
        loss = record.get("loss", math.inf)
        self.waited = self.waited + 1 if loss > self.least - self.tolerance else 0
        self.least = min(self.least, loss)
        if self.waited >= self.patience and run.executor.learning_rate > ADAPTIVE_LEAST_RATE:
            run.executor.learning_rate /= ADAPTIVE_DIVISOR
            run.notes.append(f"rate      {run.executor.learning_rate:.3g}: the loss no longer falls")
            self.waited = 0


@dataclass
class LearningRateFinder(Callback):
    """Find a learning rate with a range test before the first step, restore the state, and train with the rate.

    The test trains with rates that grow exponentially from step to step (Smith, Cyclical Learning Rates for Training
    Neural Networks, 2017, section 3.3). It ends early if the loss explodes. The suggestion is the rate at which the
    smoothed loss falls fastest before it is least: later, a loss that has exploded may fall, too. `rates`, `losses`
    and `suggestion` show the result, and so does the page of a run of the command.

    Args:
        min_learning_rate: the first rate.
        max_learning_rate: the last rate.
        steps: the number of steps.
        smoothing: the factor of the exponential average of the losses.
        stop_factor: the multiple of the least smoothed loss at which the test ends.

    Raises:
        GraphoptError: a schedule sets the rate, or the gradients have the noise of `GaussianNoise`.

    >>> graphopt.callbacks.LearningRateFinder(max_learning_rate=1.0).steps
    100
    """

    min_learning_rate: float = within("(0, inf)", 1e-7)
    max_learning_rate: float = within("(0, inf)", 10.0)
    steps: int = within("[20, inf)", 100)
    smoothing: float = within("[0, 1)", 0.98)
    stop_factor: float = within("(1, inf]", 4.0)

    reads_state = False
    saved = ("rates", "losses", "suggestion")

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.max_learning_rate <= self.min_learning_rate:
            raise GraphoptError(
                f"LearningRateFinder(max_learning_rate={self.max_learning_rate}): expected more than "
                f"min_learning_rate={self.min_learning_rate}"
            )

    def reset(self) -> None:
        self.rates: list[float] = []
        self.losses: list[float] = []
        self.suggestion: float | None = None

    def on_fit_begin(self, run: Run) -> None:
        check_rate_is_free(self, run)
        if run.resumed is not None:
            return
        executor = run.executor
        if NOISE_KEY in executor.hyperparameters:
            raise GraphoptError(
                "LearningRateFinder: expected a training without GaussianNoise, found its noise, which the test would "
                "use twice, and which PrivacyBudget would not account for: leave the finder out"
            )
        state, batches, rate = executor.state, executor.batches, executor.learning_rate
        try:
            self._test(run)
        finally:
            executor.update_state(state)
            executor.set_batches(batches)
            executor.learning_rate = rate
        self.suggestion = self._steepest()
        if self.suggestion is None:
            warnings.warn(
                f"LearningRateFinder: expected a rate at which the loss falls, found none; the rate stays {rate:g}",
                stacklevel=2,
            )
        else:
            executor.learning_rate = self.suggestion
            run.notes.append(
                f"rate      {self.suggestion:.3g}, at which the loss fell fastest in a range test of "
                f"{len(self.rates)} steps"
            )

    def _test(self, run: Run) -> None:
        def batches() -> Iterator[dict[str, Tensor]]:
            while True:
                yield from run.draw()

        rates = np.geomspace(self.min_learning_rate, self.max_learning_rate, self.steps)
        for rate, batch in zip(rates, batches(), strict=False):
            run.executor.learning_rate = rate
            try:
                loss = run.executor.step(batch)["loss"]
            except NonFiniteLoss:
                return
            if not math.isfinite(loss):
                return
            self.rates.append(float(rate))
            self.losses.append(loss)
            smooth = self.smoothed()
            if smooth[-1] > self.stop_factor * min(smooth) and len(smooth) > UNSETTLED_LOSSES:
                return

    def smoothed(self) -> list[float]:
        """Return the exponential average of the losses, corrected for its start."""
        smooth, average = [], 0.0
        for i, loss in enumerate(self.losses, 1):
            average = self.smoothing * average + (1 - self.smoothing) * loss
            smooth.append(average / (1 - self.smoothing**i))
        return smooth

    def _steepest(self) -> float | None:
        """Return the rate at which the smoothed loss falls fastest before it is least, without the first losses."""
        smooth = self.smoothed()[UNSETTLED_LOSSES:-1]
        smooth = smooth[: smooth.index(min(smooth)) + 1] if smooth else smooth
        if len(smooth) < 2:
            return None
        counts = np.arange(UNSETTLED_LOSSES + 1, UNSETTLED_LOSSES + 1 + len(smooth))
        slopes = np.gradient(smooth) * (1 - self.smoothing**counts)  # few losses are noise
        falls = slopes.min() < -LEAST_RELATIVE_FALL * abs(smooth[0])
        return self.rates[UNSETTLED_LOSSES + int(slopes.argmin())] if falls else None


@dataclass
class WeightAverage(Callback):
    """Keep an exponential moving average of the parameters; validate with it, and end with it.

    After each step, average = decay * average + (1 - decay) * parameter, from the parameters after the first step on
    (Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; Kingma and Ba, Adam, 2015,
    section 7.2; PyTorch's `get_ema_multi_avg_fn`). Training goes on with the parameters themselves. Other state, such
    as running means, is not averaged. The average of 16-bit parameters is in float32. `passes.EMA` keeps the average
    in the training graph instead, where hosts in other languages have it, too.

    Args:
        decay: the weight of the previous average.
        every: the number of steps from one update of the average to the next.

    >>> graphopt.callbacks.WeightAverage(decay=0.99).every
    1
    """

    decay: float = within("[0, 1)", 0.999)
    every: int = within("[1, inf)", 1)

    def reset(self) -> None:
        self._average: dict[str, np.ndarray] = {}
        self._own: dict[str, np.ndarray] = {}  # the parameters, while the executor has the average

    def on_fit_begin(self, run: Run) -> None:
        if averages(run.executor.model):
            raise GraphoptError(
                "WeightAverage: expected a training graph without averages, found some: leave this callback out, or "
                "the graph's average"
            )
        if masks(run.executor.model):
            raise GraphoptError(
                "WeightAverage: expected a training graph without passes.Prune, whose zeros an average loses, found "
                "one: average in the graph, with average=passes.EMA()"
            )
        run.averaged = self._average or None

    def on_step_end(self, run: Run, record: Record) -> None:
        if record["step"] % self.every:
            return
        for name, array in run.executor.parameters.items():
            new = array.astype(np.float32) if array.dtype.itemsize < 4 else array
            old = self._average.get(name, new)
            self._average[name] = old + (new - old) * new.dtype.type(1 - self.decay)
        run.averaged = self._average

    def on_evaluate_begin(self, run: Run) -> None:
        self._own = run.executor.parameters
        self._set(run)

    def on_evaluate_end(self, run: Run, record: Record) -> None:
        self._put_back(run)

    def on_save_begin(self, run: Run) -> None:
        self._put_back(run)  # an error has ended the validation

    def on_fit_end(self, run: Run) -> None:
        self._put_back(run)
        if run.has_ended and run.restored is None:
            self._set(run)

    def _set(self, run: Run) -> None:
        own = run.executor.parameters
        run.executor.update_state({name: x.astype(own[name].dtype) for name, x in self._average.items()})

    def _put_back(self, run: Run) -> None:
        run.executor.update_state(self._own)
        self._own = {}

    def state_dict(self) -> dict[str, Any]:
        return dict(self._average)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._average = dict(state)


def check_rate_is_free(callback: Callback, run: Run) -> None:
    """Raise an error unless the training graph has the input `learning_rate`, which a schedule replaces."""
    if LEARNING_RATE not in run.executor.hyperparameters:
        raise GraphoptError(
            f"{type(callback).__name__}: expected a training graph with the input {LEARNING_RATE}, found one that "
            "computes its rate: compile it with an optimizer and schedule=None (in a recipe, schedule=none)"
        )

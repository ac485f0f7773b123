"""Average weights over the steps of a training."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from graphopt.intervals import within
from graphopt.training.callbacks.callback import Callback, Record, Run

__all__ = ["WeightAverage"]


@dataclass
class WeightAverage(Callback):
    """Keep an exponential moving average of the parameters; validate with it, and end with it.

    After each step, average = decay * average + (1 - decay) * parameter, from the parameters after the first step on
    (Polyak and Juditsky, Acceleration of Stochastic Approximation by Averaging, 1992; Kingma and Ba, Adam, 2015,
    section 7.2; PyTorch's `get_ema_multi_avg_fn`). Training goes on with the parameters themselves. Other state, such
    as running means, is not averaged. The average of 16-bit parameters is in float32.

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

"""Run several steps in one call of the runtime on stacked batches, if a measurement shows that it is faster."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np

from graphopt.runtime.bound_session import Reported
from graphopt.runtime.runners import StepRunner
from graphopt.runtime.signature import description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor
from graphopt.runtime.translation import Mistranslated

SHAPE = attrgetter("shape")
Batch = Mapping[str, Tensor]


class SeveralSteps:
    """Run several steps in one call, by a graph whose Scan iterates over stacked batches.

    Args:
        runner_of: creates a runner of several steps per call.
        fed: the names of the inputs that can be stacked: all but hyperparameters.
        stacks: whether reported values can be stacked; values on a device cannot.
        insists: whether it is an error if the steps compute other numbers than single steps.
    """

    def __init__(
        self, runner_of: Callable[[], StepRunner], fed: Collection[str], *, stacks: bool, insists: bool
    ) -> None:
        self.pace = Pace()
        self._runner_of, self._fed, self._stacks, self._insists = runner_of, {*fed}, stacks, insists
        self._runner: StepRunner | None = None
        self._checked: list[Any] | None = None  # the description of the arrays that were checked last

    def step(self, buffers: StateBuffers, batches: Sequence[Batch]) -> list[Reported] | None:
        """Run a step on each batch and return what each reports, or None if the steps have to run one by one.

        Raises:
            GraphoptError: an array has the wrong type or shape. No step has run.
        """
        if len(batches) == 1 or not (self._stacks and self._can_be_stacked(batches[0])):
            return None
        with self.pace.timed(len(batches)):
            if self._runner is None:
                self._runner = self._runner_of()
            stacked = {name: np.array([*map(itemgetter(name), batches)]) for name in batches[0]}
            if self._checked != (facts := description(stacked)):
                self._runner.check(stacked)
                self._checked = facts
            self._runner.signature.check_labels(stacked)
            try:
                reported = self._runner.step(buffers.current, stacked)
            except Mistranslated as error:
                if self._insists:
                    raise
                warnings.warn(str(error), stacklevel=4)
                self._stacks = False
                self.close()
                return None
            if buffers.not_finite(reported) is not None:
                return None
            buffers.swap()
            return unstacked(reported, len(batches))

    def _can_be_stacked(self, batch: Batch) -> bool:
        """Return whether a batch has arrays alone, and no hyperparameters."""
        return batch.keys() <= self._fed and all(isinstance(x, np.ndarray) for x in batch.values())

    def close(self) -> None:
        """Release the session."""
        self._runner = self._checked = None


def unstacked(reported: Reported, steps: int) -> list[Reported]:
    """Split stacked reports into one report per step."""
    if not reported:
        return [{} for _ in range(steps)]
    columns = (array.tolist() if array.ndim == 1 else array for array in reported.values())
    return [dict(zip(reported, row, strict=True)) for row in zip(*columns, strict=True)]


def alike(batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
    """Group consecutive batches whose tensors have the same names and shapes."""
    try:
        sizes = [{*map(SHAPE, map(itemgetter(name), batches))} for name in batches[0]]
        sizes.append({*map(len, batches)})
    except (AttributeError, KeyError):  # not an array, or no tensor of this name
        sizes = []
    if sizes and all(len(shapes) == 1 for shapes in sizes):
        yield batches
        return
    shapes = ([(name, getattr(x, "shape", None)) for name, x in batch.items()] for batch in batches)
    for _, group in itertools.groupby(zip(shapes, batches, strict=True), itemgetter(0)):
        yield [batch for _, batch in group]


class Pace:
    """Choose the number of steps per call by measuring single steps and calls of several steps.

    The first steps run alone, and the next ones in calls of about `CALL` seconds. Later steps run alone unless the
    calls were faster by `MARGIN`.
    """

    CALL = 4e-3
    MOST = 256
    MARGIN = 0.9
    TRIED = 5  # single steps to measure, and calls of several steps

    def __init__(self) -> None:
        self._alone: list[float] = []
        self._together: list[float] = []

    @property
    def steps(self) -> int:
        if len(self._alone) < self.TRIED:
            return 1
        alone = min(self._alone)  # the minimum: first steps take longer, and other programs may run
        together = min(self._together) if len(self._together) == self.TRIED else 0.0
        if together > self.MARGIN * alone:
            return 1
        return max(1, min(self.MOST, int(self.CALL / alone)))

    @property
    def alone(self) -> bool:
        """Return whether single steps are faster."""
        return self.steps == 1 and len(self._alone) == self.TRIED

    @contextlib.contextmanager
    def timed(self, steps: int = 1) -> Iterator[None]:
        """Measure the time of a call of `steps` steps."""
        times = self._alone if steps == 1 else self._together
        start = time.perf_counter()
        yield
        if len(times) < self.TRIED:
            times.append((time.perf_counter() - start) / steps)

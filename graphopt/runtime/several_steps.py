"""Run several steps in one call of the runtime on stacked batches, if a measurement shows that it is faster."""

from __future__ import annotations

import contextlib
import itertools
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.roles import FED, with_role
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import Tensor
from graphopt.runtime.translation import Mistranslated

SHAPE = attrgetter("shape")
Batch = Mapping[str, Tensor]


class SeveralSteps:
    """Run several steps in one call, by a graph whose Scan iterates over stacked batches.

    Args:
        model: the graph of one step.
        runner_of: creates a runner of several steps per call for a graph.
        stacks: whether reported values can be stacked; values on a device cannot.
        insists: whether it is an error if the steps compute other numbers than single steps.
    """

    def __init__(
        self, model: ir.Model, runner_of: Callable[[ir.Model], StepRunner], *, stacks: bool, insists: bool
    ) -> None:
        self.pace = Pace()
        self._model, self._runner_of, self._stacks, self._insists = model, runner_of, stacks, insists
        self._fed = {str(x.name) for x in with_role(model, *FED)}
        self._runner: StepRunner | None = None

    def takes(self, batches: Sequence[Batch]) -> bool:
        """Return whether batches of one shape can be stacked: arrays without hyperparameters."""
        first = batches[0]
        return (
            len(batches) > 1
            and self._stacks
            and all(isinstance(x, np.ndarray) for x in first.values())
            and first.keys() <= self._fed
        )

    def step(self, buffers: StateBuffers, batches: Sequence[Batch]) -> list[Reported] | None:
        """Run a step on each batch and return what each reports, or None if the steps have to run one by one.

        Raises:
            GraphoptError: an array has the wrong type or shape. No step has run.
        """
        try:
            reported = self._stacked(buffers.current, batches)
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

    def close(self) -> None:
        """Release the session."""
        self._runner = None

    def _stacked(self, source: int, batches: Sequence[Batch]) -> Reported:
        """Run a step on each batch, from the state in set `source`; return the stacked reports."""
        if self._runner is None:
            self._runner = self._runner_of(self._model)
        stacked = {name: np.array([*map(itemgetter(name), batches)]) for name in batches[0]}
        self._runner.check(stacked)
        self._runner.signature.check_labels(stacked)
        return self._runner.step(source, stacked)


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
    if sizes and all(len(found) == 1 for found in sizes):
        yield batches
        return
    for _, group in itertools.groupby(batches, _shapes):
        yield list(group)


def _shapes(batch: Batch) -> list[tuple[str, Any]]:
    return [(name, getattr(tensor, "shape", None)) for name, tensor in batch.items()]


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
        """Return whether single steps turned out to be faster."""
        return self.steps == 1 and len(self._alone) == self.TRIED

    @contextlib.contextmanager
    def timed(self, steps: int = 1) -> Iterator[None]:
        """Measure the time of a call of `steps` steps."""
        taken = self._alone if steps == 1 else self._together
        start = time.perf_counter()
        yield
        if len(taken) < self.TRIED:
            taken.append((time.perf_counter() - start) / steps)

"""Run steps of a training graph, one or several in a call of the runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import Protocol

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.contest import MOST_STEPS_PER_CALL, SECONDS_PER_CALL, WORTH_STACKING, Clock
from graphopt.runtime.device import Device
from graphopt.runtime.forms import StepForms, StepSessions, unrolled
from graphopt.runtime.signature import Seen, Signature
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.system_memory import taken
from graphopt.runtime.tensors import Tensor, check_rows
from graphopt.runtime.translation import Mistranslated

ALONE, TOGETHER = "a single step", "a step among several"
Batch = Mapping[str, Tensor]


class Runner(Protocol):
    """Run steps of a training graph on the two sets of a `StateBuffers`.

    `StepRunner` runs a whole step in one session. `SplitRunner` runs it in two halves, between which workers exchange
    gradients.
    """

    def check(self, feeds: Mapping[str, Tensor]) -> None:
        """Check the tensors of the next steps, which have the same names, shapes and types; choose their sessions.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type or shape. Nothing has changed.
        """

    @property
    def settled(self) -> BoundSession | None:
        """Return the session that runs all steps on tensors like those of the latest step, if it is one and known."""
        return None

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs of checked tensors.

        The caller decides whether to keep the new state: a step on the same set can be repeated, unless kernels write
        in place.
        """

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest step found its new state to be finite; not all steps look."""

    @property
    def forms(self) -> list[BoundSession]:
        """Return the sessions of the latest step, each with its graph.

        Raises:
            GraphoptError: sessions depend on shapes, and no step has run yet.
        """


class Rounds(Protocol):
    """Train workers separately, and synchronize them every few steps, which are a round."""

    @property
    def is_synchronized(self) -> bool:
        """Return whether all workers have the same weights."""

    def step(self, feeds: Mapping[str, Tensor], train: Callable[[Mapping[str, Tensor]], Reported]) -> Reported:
        """Train on tensors by `train`, synchronize the workers at the end of a round, and return what is reported."""

    def synchronize(self) -> None:
        """Synchronize the workers, unless they are synchronized."""

    def restart(self) -> None:
        """Begin a round with the weights of the last synchronization."""


class StepRunner(Runner):
    """Run a training graph from one set of state buffers to the other.

    Args:
        single: run several steps per call, on stacked batches, in the form that this runner of single steps has chosen.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        options: RunnerOptions,
        single: StepRunner | None = None,
    ) -> None:
        self._parts, self._options, self._single = (device, model, buffers), options, single
        self.signature = Signature(device, with_role(unrolled(model) if single else model, *FED))
        self._held = taken()
        self._by_shapes: dict[tuple[tuple[str, Sequence[int]], ...], StepForms] = {}
        self._forms = None if options.static_shapes else self._opened()

    def check(self, feeds: Mapping[str, Tensor]) -> None:
        shapes = self.signature.check(feeds)
        if self._options.static_shapes:
            key = tuple(sorted(shapes.items()))
            if key not in self._by_shapes:
                self._by_shapes[key] = self._opened(shapes)
            self._forms = self._by_shapes[key]

    @property
    def settled(self) -> BoundSession | None:
        return self._forms.form if self._forms is not None and self._forms.is_settled else None

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        forms = self._forms
        assert forms is not None
        return forms.step(source, feeds)

    def wait(self) -> None:
        """Wait until the graph is lowered, if another process does that."""
        if self._forms is not None:
            self._forms.wait()

    @property
    def native(self) -> bool | None:
        """Return whether steps are lowered to the machine; None as long as a measurement is to decide."""
        return None if self._forms is None else self._forms.native

    def _opened(self, shapes: Mapping[str, Sequence[int]] | None = None) -> StepForms:
        """Return the forms of the graph; several steps run in that of single ones, so that the results are equal."""
        options, single = self._options, self._single
        if single is not None:
            single.wait()
            options = dataclasses.replace(options, native=single.native, as_numpy=True)
        sessions = StepSessions(*self._parts, options, shapes, several=single is not None, held=self._held)
        return StepForms(sessions)

    @property
    def state_is_finite(self) -> bool:
        return self._forms is not None and self._forms.form.state_is_finite

    @property
    def forms(self) -> list[BoundSession]:
        if self._forms is None:
            raise GraphoptError(
                "placement: expected a step before it, as sessions depend on shapes, found none: run a step first"
            )
        return [self._forms.form]


class SeveralSteps:
    """Run several steps in one call, by a graph whose Scan iterates over stacked batches.

    Args:
        runner_of: creates a runner of several steps per call from that of single steps.
        single: the runner of single steps, if several steps may run in a call.
        fed: the names of the inputs that can be stacked: all but hyperparameters; none if reports cannot be.
        pace: chooses the number of steps per call.
        insists: whether it is an error if the steps compute other numbers than single steps.
    """

    def __init__(
        self,
        runner_of: Callable[..., StepRunner],
        single: StepRunner | None,
        fed: Collection[str],
        pace: Pace,
        *,
        insists: bool,
    ) -> None:
        self.pace, self._runner_of, self._fed, self._insists = pace, runner_of, {*fed}, insists
        self._single = single
        self._runner: StepRunner | None = None
        self._seen = Seen()

    def step(self, buffers: StateBuffers, batches: Sequence[Batch]) -> list[Reported] | None:
        """Run a step on each batch and return what each reports, or None if the steps have to run one by one.

        Raises:
            GraphoptError: an array has the wrong type or shape. No step has run.
        """
        first = batches[0]
        if len(batches) == 1 or not first or not first.keys() <= self._fed:
            return None
        if not all(isinstance(x, np.ndarray) for x in first.values()):
            return None
        if not self.pace.is_chosen and self._single is not None and self._single.native is None:
            return None  # the form of single steps is not settled
        with self.pace.timed(len(batches)):
            if self._runner is None:
                self._runner = self._runner_of(single=self._single)
            stacked = {name: np.array([*map(itemgetter(name), batches)]) for name in first}
            if stacked not in self._seen:
                check_rows(first)
                self._runner.check(stacked)
                self._seen.add(stacked)
            self._runner.signature.check_labels(stacked)
            try:
                reported = self._runner.step(buffers.current, stacked)
            except Mistranslated as error:
                if self._insists:
                    raise
                warnings.warn(str(error), stacklevel=4)
                self._fed = set()
                self.close()
                return None
            if buffers.advance(reported, self._runner.state_is_finite, len(batches)) is not None:
                return None
            return unstacked(reported, len(batches))

    def close(self) -> None:
        """Release the session."""
        self._runner, self._seen = None, Seen()


def unstacked(reported: Reported, steps: int) -> list[Reported]:
    """Split stacked reports into one report per step."""
    if not reported:
        return [{} for _ in range(steps)]
    columns = (array.tolist() if array.ndim == 1 else array for array in reported.values())
    return [dict(zip(reported, row, strict=True)) for row in zip(*columns, strict=True)]


def alike(batches: Sequence[Batch]) -> Iterator[Sequence[Batch]]:
    """Group consecutive batches whose tensors have the same names and shapes."""
    try:
        sizes = [{*map(attrgetter("shape"), map(itemgetter(name), batches))} for name in batches[0]]
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

    The first steps run alone, and the next ones in calls of about `SECONDS_PER_CALL`. Later steps run alone unless
    the calls were faster by `WORTH_STACKING`. A number that the user has chosen stays.
    """

    def __init__(self, chosen: int | None = None) -> None:
        self._chosen = chosen
        self.clock = Clock((ALONE, TOGETHER))

    @property
    def is_chosen(self) -> bool:
        """Return whether the user has chosen a number of steps per call."""
        return self._chosen is not None

    @property
    def steps(self) -> int:
        """Return the number of steps of the next call."""
        if self._chosen is not None:
            return self._chosen
        if not self.clock.has(ALONE):
            return 1
        alone = self.clock.seconds[ALONE]
        if self.clock.has(TOGETHER) and self.clock.seconds[TOGETHER] > WORTH_STACKING * alone:
            return 1
        return max(1, min(MOST_STEPS_PER_CALL, int(SECONDS_PER_CALL / alone)))

    @property
    def alone(self) -> bool:
        """Return whether all later steps run alone."""
        return self.steps == 1 and (self._chosen == 1 or self.clock.has(ALONE))

    @contextlib.contextmanager
    def timed(self, steps: int = 1) -> Iterator[None]:
        """Measure the time of a call of `steps` steps."""
        begun = time.perf_counter()
        yield
        self.clock.add(ALONE if steps == 1 else TOGETHER, (time.perf_counter() - begun) / steps)

"""Run the steps of an executor, and keep their new state."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.communicator import SINGLE, Communicator
from graphopt.errors import GraphoptError, kind_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.checks.findings import Disagreement
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.device import Device
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.inputs import Inputs
from graphopt.runtime.runners import Batch, Pace, Rounds, Runner, SeveralSteps, StepRunner, alike
from graphopt.runtime.signature import Seen, chosen_outputs, numbers, reporting
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, check_rows, rows_of


class NonFiniteLoss(GraphoptError):
    """Report a loss, or a new state, that is infinite or NaN. The state remains as it was before the step.

    Attributes:
        reported: what the step reported.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> huge = numpy.full((4, 1), 1e30, numpy.float32)
    >>> try:
    ...     graphopt.Executor(step).step(x=huge, target=huge)
    ... except graphopt.NonFiniteLoss:
    ...     print("refused")
    refused
    """

    def __init__(self, message: str, reported: Reported | None = None) -> None:
        super().__init__(message)
        self.reported = reported or {}


@dataclass(frozen=True, eq=False)
class Parts:
    """Hold the parts of an executor.

    Args:
        model: the training graph without its initial state.
        buffers: its state.
        runner_of: returns the runner of single steps; by default, they run whole.
        rounds: when workers that train separately synchronize.
    """

    options: ExecutorOptions
    device: Device
    model: ir.Model
    buffers: StateBuffers
    workers: Communicator = SINGLE
    runner_of: Callable[[RunnerOptions], Runner] | None = None
    rounds: Rounds | None = None

    @functools.cached_property
    def inputs(self) -> Inputs:
        """Return what takes the tensors of calls."""
        return Inputs(self.device, self.model, self.buffers)

    @functools.cached_property
    def lock(self) -> threading.RLock:
        """Return the lock that keeps calls of an executor from overlapping."""
        return self.device.machine.lock or threading.RLock()

    @functools.cached_property
    def report(self) -> list[str]:
        """Return the names of the outputs that a step reports, `loss` first."""
        return chosen_outputs(self.model, self.options.report)


class Steps:
    """Run steps, one or several in a call of the runtime.

    Attributes:
        runner: what runs single steps.
        several: what runs several steps in a call.
        first: the check of the first step, until it has run.
    """

    _settled: BoundSession | None  # what runs steps on tensors like the last ones

    def __init__(self, parts: Parts) -> None:
        self._parts, self._inputs, self._buffers = parts, parts.inputs, parts.buffers
        self._lock, self._rounds, self._workers = parts.lock, parts.rounds, parts.workers
        (is_checked,) = parts.workers.any(bool(parts.device.verify))
        self.first = FirstCheck(parts.device, parts.model, parts.buffers) if is_checked else None
        self.open()

    def open(self) -> None:
        """Create the runner of single steps, and drop that of several steps."""
        parts, device, options = self._parts, self._parts.device, self._parts.options
        chosen = RunnerOptions(
            report=parts.report,
            as_numpy=options.as_numpy,
            static_shapes=options.static_shapes or device.graph_capture or device.memory is not None,
            in_place=options.in_place,
        )
        # A bound method would make a cycle, which delays the release of memory.
        model = reporting(parts.model, parts.report)
        runner_of = functools.partial(StepRunner, device, model, self._buffers, chosen)
        if parts.runner_of is None:
            self.runner: Runner = (single := runner_of())
        elif device.memory is not None:
            raise GraphoptError("memory: expected one process that computes whole steps, found workers: leave it out")
        else:
            self.runner, single = parts.runner_of(chosen), None
        self._seen, self._settled = Seen(), None
        arrays = any(y.name in parts.report and y.shape != () for y in model.graph.outputs)
        alone = self._rounds is not None or options.in_place or self._workers.size > 1
        steps = options.steps_per_call
        self.several = SeveralSteps(
            runner_of,
            single,
            self._inputs.signature.accepted if options.as_numpy or not arrays else (),
            Pace(1 if alone or device.memory or (steps is None and not device.on_cpu) else steps),
            insists=device.verify is True,
        )

    def step(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Run one step and return what it reports; of workers that train separately, count it in their round."""
        self._lock.acquire()  # as `with` does, in half the time
        try:
            if self._rounds is None:
                return self._train(feeds)
            return self._rounds.step(feeds, self._train if rows_of(feeds) else self._pass)
        finally:
            self._lock.release()

    def _train(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Run one step, and keep its new state if it is finite."""
        buffers, form, signature = self._buffers, self._settled, self._inputs.signature
        check = signature.check_labels if signature.labels else None
        reported = None if form is None else form.again(buffers.current, feeds, check)
        if form is None or reported is None:
            feeds, runner = self._inputs.accepted(self._seen, feeds, self._check_batch), self.runner
            self._check_first(feeds)
            reported, is_finite = runner.step(buffers.current, feeds), runner.state_is_finite
            self._settled = runner.settled
        else:
            is_finite = form.state_is_finite
        wrong = buffers.advance(reported, is_finite)
        if wrong is not None and self._keeps(wrong, reported):
            buffers.advance({})
        return reported

    def _check_first(self, feeds: Mapping[str, Tensor]) -> None:
        """Check the plain step on the first batch that has rows, before the first update.

        Of several workers, each checks it on its rows of their first batch, and all raise the error of one.

        Raises:
            Disagreement: it disagrees with its file, with its loss, or with the rule of its optimizer.
        """
        if self.first is None or (self._workers.size == 1 and rows_of(feeds) == 0):
            return
        message = ""
        try:
            if rows_of(feeds) != 0:
                self.first.check(self._inputs.signature.arrays(feeds))
        except GraphoptError as error:
            message = str(error)
        for told in self._workers.gather_json(message):
            if told:
                raise Disagreement(told)
        self.first = None

    def _check_batch(self, feeds: Mapping[str, Tensor]) -> None:
        if self._workers.size == 1:
            check_rows(feeds)
        self.runner.check(feeds)

    def _pass(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Count a batch without rows, which trains nothing."""
        self._buffers.feed(self._inputs.separated(feeds)[0])
        self._check_first(feeds)
        self._buffers.batches += 1
        return dict.fromkeys(numbers(self._parts.model.graph.outputs, self._parts.report), 0.0)

    def _keeps(self, wrong: str, reported: Reported) -> bool:
        """Return whether to keep the state after a step that is not finite; raise an error, or warn."""
        in_place, chosen = self._parts.options.in_place, self._parts.options.on_nonfinite
        changed = ", and the state has changed in place" if in_place else ""
        self._buffers.version += in_place
        message = f"step {self._buffers.batches}: {wrong}{changed}"
        if chosen == "raise":
            raise NonFiniteLoss(
                f"{message}; lower the learning rate, clip gradients, or look for NaN in the data", reported
            )
        warnings.warn(message + (", step skipped" if chosen == "skip" else ""), stacklevel=4)
        return chosen == "warn"

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Reported]:
        """Check the first batch, and return an iterator that trains on each."""
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
            raise GraphoptError(
                f"run: expected an iterable of batches, found {kind_of(batches)}: a single batch is for "
                "executor.step(batch)"
            )
        signature, encoding = self._inputs.signature, self._inputs.encoding
        if encoding is not None:
            batches = map(encoding.encoded, batches)
        left = map(signature.completed, batches)
        for first in left:
            with self._lock:
                fed, feeds = self._inputs.separated(first)
                signature.check(feeds)
                self._buffers.check_hyperparameters(fed)
                signature.check_labels(feeds)
            return self._calls(itertools.chain([first], left))
        return iter(())

    def _calls(self, left: Iterator[Batch]) -> Iterator[Reported]:
        """Yield what a step on each batch reports; run the chosen number of steps per call, or the fastest number."""
        while not self.several.pace.alone:
            waiting: list[Batch] = []
            try:
                waiting.extend(itertools.islice(left, self.several.pace.steps))
            finally:  # if drawing a batch fails, those before it train
                for batches in alike(waiting) if waiting else ():
                    yield from self._call(batches)
            if not waiting:
                return
        with self._lock:
            self.several.close()
        yield from map(self.step, left)

    def _call(self, batches: Sequence[Batch]) -> Iterable[Reported]:
        """Run a step on each of several batches with the same shapes, in one call if they can be stacked."""
        with self._lock:
            if self.first is not None and len(batches) > 1:
                self._check_first(self._inputs.accepted(self._seen, batches[0], self._check_batch))
            reported = self.several.step(self._buffers, batches)
        return map(self._alone, batches) if reported is None else reported

    def _alone(self, batch: Batch) -> Reported:
        with self._lock, self.several.pace.timed():
            return self.step(batch)

"""Run training graphs on ONNX Runtime."""

from __future__ import annotations

import functools
import itertools
import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked, keywords_of
from graphopt.communicator import SINGLE, Communicator
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import FED, STATE, Role, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.values import name_of
from graphopt.pipeline import garbage_waits
from graphopt.runtime import placement
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.checks.findings import Disagreement
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.device import Device
from graphopt.runtime.encoding import encoding_of
from graphopt.runtime.evaluation import Evaluation, evaluation_of, weights_of_means
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.executor_state import ExecutorState
from graphopt.runtime.runners import Batch, Pace, Rounds, Runner, SeveralSteps, StepRunner, alike
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec, Seen, Signature, chosen_outputs, numbers, reporting
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, check_rows, rows_of

# The outputs that methods compute.
_WEIGHTS = "weights"
_COMPUTED = {
    "evaluate": (Role.LOSS, Role.METRIC, Role.PREDICTION),
    "losses": (Role.LOSS, Role.METRIC),
    "predict": (Role.PREDICTION,),
}


@checked()
def run(model: Source, inputs: Mapping[str, np.ndarray], threads: int = 1) -> dict[str, np.ndarray]:
    """Run any graph once, on the CPU, and return its outputs by name.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model.
        inputs: an array for each input, by name.
        threads: the number of threads per operator.

    Raises:
        GraphoptError: no ONNX Runtime is installed, it has no kernel for an operator, or an input is missing.

    >>> import numpy
    >>> from graphopt import models
    >>> outputs = graphopt.run(models.linear((2,), 1), {"x": numpy.zeros((3, 2), numpy.float32)})
    >>> outputs["y"].shape
    (3, 1)
    """
    if not isinstance(inputs, Mapping):
        raise GraphoptError(f"run: expected arrays by name, such as {{'x': ...}}, found {kind_of(inputs)}")
    device = Device("cpu", threads=threads, flush_denormals=False)
    loaded = load(model)
    for value in loaded.graph.inputs:
        array = inputs.get(name_of(value))
        if isinstance(array, np.ndarray) and array.dtype.kind in "iufb" and value.dtype is not None:
            InputSpec(value).check_type(array.dtype, array.shape)
    return Session(device, loaded).compute_arrays(inputs)


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


def fed_by(
    executor: Executor, data: Mapping[str, Tensor] | None, more: Sequence[object], named: Mapping[str, Tensor]
) -> Mapping[str, Tensor]:
    """Return the tensors of a call by name.

    Raises:
        GraphoptError: they have no names.
    """
    if data is None and not more:
        return named
    if data is not None and (more or not isinstance(data, Mapping)):
        names = ", ".join(f"{name!r}: ..." for name in executor.inputs)
        raise GraphoptError(
            f"data: expected arrays by the names of the graph's inputs, {{{names}}}, found "
            f"{' and '.join(map(kind_of, (data, *more)))}"
        )
    return {**(data or {}), **named} if named else data or {}


def _check_initial(model: ir.Model) -> None:
    """Raise an error if state has no initial value, as in the graph that an executor holds."""
    for x in with_role(model, *STATE):
        if x.const_value is None:
            raise GraphoptError(
                f"step: expected a training graph with its state, found {name_of(x)!r} without a value: pass the graph "
                "that an executor was opened with, not executor.model"
            )


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


class Executor(ExecutorState):
    """Run a training graph step by step. The state stays on the device.

    Threads may share an executor. Its calls do not overlap: other threads wait until a call ends. `run` and `iterate`
    let other threads in after each call of the runtime.

    The options are the fields of `ExecutorOptions` and `DeviceOptions`, which explain each of them. They do not change
    later.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.

    Attributes:
        options: the options.
        workers: the workers that train together; in most executors, only this process.

    Raises:
        GraphoptError: no ONNX Runtime is installed, the device or the provider is not available, or the graph trains
            nothing.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.Executor(step)
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    [1.0, 0.64, 0.4096]
    """

    workers: Communicator
    _first: FirstCheck | None  # until the first step
    _settled: BoundSession | None  # what runs steps on tensors like the last ones

    @keywords_of(ExecutorOptions)
    def __init__(self, step: Source, **options: Any) -> None:
        chosen = ExecutorOptions(**options)
        with garbage_waits():
            device, model = chosen.opened(), load(step)
            _check_initial(model)
            self._assemble(Parts(chosen, device, model, StateBuffers(device, model)))

    def _assemble(self, parts: Parts) -> None:
        """Put the parts of an executor together."""
        device, model = parts.device, parts.model
        self.options, self._device, self._model, self.workers = parts.options, device, model, parts.workers
        self._buffers, self._runner_of, self._rounds = parts.buffers, parts.runner_of, parts.rounds
        self._lock = device.machine.lock or threading.RLock()
        self.properties, self._labels = {}, None
        self._signature = Signature(device, with_role(model, *FED))
        self._encoding = encoding_of(device, model)
        self._report = chosen_outputs(model, parts.options.report)
        (is_checked,) = parts.workers.any(bool(device.verify))
        self._first = FirstCheck(device, model, parts.buffers) if is_checked else None
        self._open()

    def step(
        self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor
    ) -> Reported:
        """Run one step on tensors named like the graph's inputs and return what it reports.

        Scalars come back as Python numbers, `loss` first. Contiguous arrays, onnxruntime's OrtValues and tensors of
        any package that supports DLPack are read in place. A hyperparameter that you feed keeps its new value in
        later steps.

        Raises:
            GraphoptError: an array is missing, is unknown or has the wrong type or shape, or the loss does not accept
                a label in host memory. Nothing has run.
            NonFiniteLoss: the loss or the new state is infinite or NaN, and `on_nonfinite` is `raise`.
        """
        feeds = data if type(data) is dict and not (unnamed or named) else fed_by(self, data, unnamed, named)
        if self._encoding is not None:
            feeds = self._encoding.encoded(feeds)
        self._lock.acquire()  # as `with` does, in half the time
        try:
            if self._rounds is None:
                return self._train(feeds)
            return self._rounds.step(feeds, self._train if rows_of(feeds) else self._pass)
        finally:
            self._lock.release()

    def _train(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Run one step, and keep its new state if it is finite."""
        buffers, form, signature = self._buffers, self._settled, self._signature
        check = signature.check_labels if signature.labels else None
        reported = None if form is None else form.again(buffers.current, feeds, check)
        if form is None or reported is None:
            feeds, runner = self._fed(feeds), self._runner
            if check is not None:
                check(feeds)
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
        if self._first is None or (self.workers.size == 1 and rows_of(feeds) == 0):
            return
        message = ""
        try:
            if rows_of(feeds) != 0:
                self._first.check(self._signature.arrays(feeds))
        except GraphoptError as error:
            message = str(error)
        for told in self.workers.gather_json(message):
            if told:
                raise Disagreement(told)
        self._first = None

    def _fed(self, feeds: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Set hyperparameters, check tensors unless they are like the last ones, and return the tensors."""
        fed, feeds = self._unlike(self._seen, feeds, self._check_batch)
        if fed:
            self.set_hyperparameters(**fed)
        return feeds

    def _check_batch(self, feeds: Mapping[str, Tensor]) -> None:
        if self.workers.size == 1:
            check_rows(feeds)
        self._runner.check(feeds)

    def _unlike(
        self, seen: Seen, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Tensor]], object]
    ) -> tuple[dict[str, Tensor], Mapping[str, Tensor]]:
        """Separate hyperparameters from tensors, and check these unless they are like the last ones."""
        if feeds in seen:
            return {}, feeds
        fed, tensors = self._split(feeds)
        if tensors not in seen:
            check(tensors)
            seen.add(tensors)
        return fed, tensors

    def _pass(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Count a batch without rows, which trains nothing."""
        self.set_hyperparameters(**self._split(feeds)[0])
        self._check_first(feeds)
        self._buffers.batches += 1
        return dict.fromkeys(numbers(self._model.graph.outputs, self._report), 0.0)

    def run(self, batches: Iterable[Batch]) -> list[Reported]:
        """Train on all batches and return what each step reports; see `iterate`."""
        return list(self.iterate(batches))

    def iterate(self, batches: Iterable[Batch]) -> Iterator[Reported]:
        """Return an iterator that trains on each batch and yields what its step reports.

        The first batch is checked immediately. Steps run as you read the iterator. With the option `steps_per_call`,
        several steps run in one call of the runtime: a Scan in the graph iterates over stacked batches. The results
        equal those of single steps. Batches of a different shape, such as the last one of an epoch, run in separate
        calls.

        Raises:
            GraphoptError: an array has the wrong type or shape. No step of its call has run.
            NonFiniteLoss: a loss or the new state is infinite or NaN. The steps of its call are repeated one by one,
                so that the state is the one before the failing step.
        """
        if not isinstance(batches, Iterable) or isinstance(batches, Mapping | str):
            raise GraphoptError(
                f"run: expected an iterable of batches, found {kind_of(batches)}: a single batch is for "
                "executor.step(batch)"
            )
        if self._encoding is not None:
            batches = map(self._encoding.encoded, batches)
        left = map(self._signature.completed, batches)
        for first in left:
            with self._lock:
                fed, feeds = self._split(first)
                self._signature.check(feeds)
                self._buffers.check_hyperparameters(fed)
                self._signature.check_labels(feeds)
            return self._steps(itertools.chain([first], left))
        return iter(())

    def _steps(self, left: Iterator[Batch]) -> Iterator[Reported]:
        """Yield what a step on each batch reports; run the chosen number of steps per call, or the fastest number."""
        while not self._several.pace.alone:
            waiting: list[Batch] = []
            try:
                waiting.extend(itertools.islice(left, self._several.pace.steps))
            finally:  # if drawing a batch fails, those before it train
                for batches in alike(waiting) if waiting else ():
                    yield from self._call(batches)
            if not waiting:
                return
        with self._lock:
            self._several.close()
        yield from map(self.step, left)

    def _call(self, batches: Sequence[Batch]) -> Iterable[Reported]:
        """Run a step on each of several batches with the same shapes, in one call if they can be stacked."""
        with self._lock:
            if self._first is not None and len(batches) > 1:
                feeds = self._fed(batches[0])
                self._signature.check_labels(feeds)
                self._check_first(feeds)
            reported = self._several.step(self._buffers, batches)
        return map(self._alone, batches) if reported is None else reported

    def _alone(self, batch: Batch) -> Reported:
        with self._lock, self._several.pace.timed():
            return self.step(batch)

    @property
    def is_synchronized(self) -> bool:
        """Return whether all workers have the same weights."""
        return self._rounds is None or self._rounds.is_synchronized

    def synchronize(self) -> None:
        """Synchronize the workers' weights. Every worker must call this.

        Raises:
            NonFiniteLoss: the workers have dropped the third round in succession.
        """
        if self._rounds is not None:
            with self._lock:
                self._rounds.synchronize()

    def placement(self) -> dict[str, dict[str, int]]:
        """Return for each execution provider the operators of a step that it runs, and how many nodes of each.

        Raises:
            GraphoptError: onnxruntime is older than 1.24 and does not report this, or sessions depend on shapes and no
                step has run yet.
        """
        return placement.operators_by_provider(form.session for form in self._runner.forms)

    def fallbacks(self) -> dict[str, str]:
        """Return the nodes of a step that run on the CPU instead of the device, by name, each with the reason.

        Raises:
            GraphoptError: as `placement` does.
        """
        forms = [] if self._device.on_cpu else self._runner.forms
        found = [placement.fallbacks(form.session, form.model) for form in forms]
        return {name: reason for nodes in found for name, reason in nodes.items()}

    def evaluate(
        self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor
    ) -> Reported:
        """Return the losses and the model's outputs on some data, without changing the state.

        Raises:
            GraphoptError: as `step` does.
        """
        return self._forward("evaluate", data, unnamed, named)

    def losses(
        self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor
    ) -> Reported:
        """Return the losses on some data as `evaluate` does, without the model's outputs.

        Raises:
            GraphoptError: as `step` does.
        """
        return self._forward("losses", data, unnamed, named)

    def predict(
        self, data: Mapping[str, Tensor] | None = None, /, *unnamed: object, **named: Tensor
    ) -> Reported:
        """Return the model's outputs. Targets are optional, and are checked if they are fed.

        Raises:
            GraphoptError: as `step` does, or the model has no output other than its own loss.
        """
        return self._forward("predict", data, unnamed, named)

    @property
    def has_loss_weights(self) -> bool:
        """Return whether one loss is a mean with weights."""
        return len(weights_of_means(self._model)) == 1

    def loss_weights(self, data: Mapping[str, Tensor]) -> np.ndarray:
        """Return the weights of the loss's mean on some data; `has_loss_weights` tells whether there are any."""
        (weights,) = self._forward(_WEIGHTS, data, (), {}).values()
        return np.asarray(weights if self.options.as_numpy else weights.numpy())

    @property
    def learning_rate(self) -> float:
        """Return the learning rate of the next step. You can set it if the graph has no schedule."""
        if LEARNING_RATE in self.hyperparameters:
            return float(self.hyperparameters[LEARNING_RATE])
        if LEARNING_RATE in self.outputs:
            return float(self._forward(LEARNING_RATE, {}, (), {})[LEARNING_RATE])
        raise GraphoptError("learning_rate: expected an optimizer in the training graph, found none: add one")

    @learning_rate.setter
    def learning_rate(self, rate: float) -> None:
        if LEARNING_RATE not in self.hyperparameters:
            raise GraphoptError(
                "learning_rate: a schedule in the graph computes it; compile with schedule=None to set it, or feed "
                f"base_{LEARNING_RATE}"
            )
        self.set_hyperparameters(learning_rate=rate)

    def _open(self) -> None:
        """Create the runner of single steps, and drop the runners of several steps and of evaluation."""
        device, options, model = self._device, self.options, reporting(self._model, self._report)
        chosen = RunnerOptions(
            report=self._report,
            as_numpy=options.as_numpy,
            static_shapes=options.static_shapes or device.graph_capture or device.memory is not None,
            in_place=options.in_place,
        )
        # A bound method would make a cycle, which delays the release of memory.
        runner_of = functools.partial(StepRunner, device, model, self._buffers, chosen)
        if self._runner_of is None:
            self._runner: Runner = (single := runner_of())
        elif device.memory is not None:
            raise GraphoptError(
                "memory: expected one process that computes whole steps, found workers: leave it out"
            )
        else:
            self._runner, single = self._runner_of(chosen), None
        self._seen, self._settled = Seen(), None
        arrays = any(y.name in self._report and y.shape != () for y in model.graph.outputs)
        alone = (
            self._rounds is not None or self.in_place or self.workers.size > 1 or device.memory is not None
        )
        steps = options.steps_per_call
        self._several = SeveralSteps(
            runner_of,
            single,
            self._signature.accepted if options.as_numpy or not arrays else (),
            Pace(1 if alone or (steps is None and not device.on_cpu) else steps),
            insists=device.verify is True,
        )
        self._evaluations: dict[str, Evaluation] = {}  # by the names of their methods

    def _keeps(self, wrong: str, reported: Reported) -> bool:
        """Return whether to keep the state after a step that is not finite; raise an error, or warn."""
        changed = ", and the state has changed in place" if self.in_place else ""
        self._buffers.version += self.in_place
        message, chosen = f"step {self.batches}: {wrong}{changed}", self.options.on_nonfinite
        if chosen == "raise":
            raise NonFiniteLoss(
                f"{message}; lower the learning rate, clip gradients, or look for NaN in the data", reported
            )
        warnings.warn(message + (", step skipped" if chosen == "skip" else ""), stacklevel=3)
        return chosen == "warn"

    def _split(self, feeds: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
        """Separate the hyperparameters in `feeds` from the tensors."""
        fed = {name: value for name, value in feeds.items() if name in self.hyperparameters}
        tensors = {name: tensor for name, tensor in feeds.items() if name not in fed}
        return fed, dict(self._signature.completed(tensors))

    def _forward(
        self,
        call: str,
        data: Mapping[str, Tensor] | None,
        unnamed: Sequence[object],
        named: Mapping[str, Tensor],
    ) -> Reported:
        """Compute the outputs of a method in the graph's inference form, with the fed hyperparameters."""
        feeds = data if type(data) is dict and not (unnamed or named) else fed_by(self, data, unnamed, named)
        if self._encoding is not None:
            feeds = self._encoding.encoded(feeds)
        self._lock.acquire()  # as `with` does, in half the time
        try:
            evaluation = self._evaluations.get(call) or self._evaluation(call)
            check = self._signature.check_labels if self._signature.labels else None
            reported = evaluation.again(feeds, check)
            if reported is not None:
                return reported
            needed = functools.partial(self._signature.check, needed=evaluation.inputs)
            fed, feeds = self._unlike(evaluation.seen, feeds, needed)
            if check is not None:
                check(feeds)
            if fed:
                self.set_hyperparameters(**fed)
            return evaluation.compute(feeds)
        finally:
            self._lock.release()

    def _evaluation(self, call: str) -> Evaluation:
        """Open what computes the outputs of a method."""
        if call == _WEIGHTS:
            names = [*map(name_of, weights_of_means(self._model))]
        else:
            names = [LEARNING_RATE] if call == LEARNING_RATE else self._of(*_COMPUTED[call])
        if not names:
            raise GraphoptError(
                "predict: expected an output other than the model's own loss, found none: use evaluate"
            )
        alone = self._rounds is None and self.workers.size == 1
        chosen = {"as_numpy": self.options.as_numpy, "alone": alone}
        opened = evaluation_of(self._device, self._model, self._buffers, names, **chosen)
        return self._evaluations.setdefault(call, opened)

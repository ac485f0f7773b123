"""Compute outputs of a training graph in its inference form."""

from __future__ import annotations

import functools
import hashlib
import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import inference
from graphopt.graph.dequantization import dequantize_late
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.roles import FED, STATE, Role, with_role
from graphopt.graph.storage import identity_of
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.contest import (
    CONSTANTS,
    KERNELS,
    MEASURED_EVALUATIONS,
    MEASURING_SECONDS,
    OPENING,
    PLAIN,
    WORTH_CONSTANTS,
    Candidate,
    Contest,
    Memory,
)
from graphopt.runtime.device import Device
from graphopt.runtime.forms import StepSessions
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec, Seen
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.steps import Parts
from graphopt.runtime.tensors import Tensor, number_or_array, to_ort
from graphopt.runtime.translation import Translation
from graphopt.targets.native.cache import own_version

NEVER = -1
# The outputs that methods of an executor compute.
WITH_WEIGHTS = " with weights"  # after such a method: also the weights of the loss's mean
_COMPUTED = {
    "evaluate": (Role.LOSS, Role.METRIC, Role.PREDICTION),
    "losses": (Role.LOSS, Role.METRIC),
    "predict": (Role.PREDICTION,),
}


def evaluation_of(
    device: Device,
    model: ir.Model,
    buffers: StateBuffers,
    names: Sequence[str],
    *,
    as_numpy: bool,
    alone: bool,
) -> Evaluation:
    """Return what computes outputs of a training graph.

    Args:
        as_numpy: return NumPy arrays; otherwise values on the device.
        alone: whether only this process changes the state.
    """
    outputs = {name_of(y): y for y in (*weights_of_means(model), *model.graph.outputs)}
    part = inference.extract(model, [outputs[name] for name in names])
    dequantize_late(part)
    part = device.machine.with_forms(part)
    options = RunnerOptions(report=names, as_numpy=as_numpy)
    chooses = alone and device.on_cpu and placement_of(device, part) == "packed"
    return (ChosenEvaluation if chooses else Evaluation)(device, part, buffers, options)


class Evaluations:
    """Compute outputs of a training graph on data, with the fed hyperparameters, for the methods of an executor.

    Attributes:
        opened: what computes the outputs of a method, by its name.
    """

    def __init__(self, parts: Parts) -> None:
        self._parts, self._inputs, self._lock = parts, parts.inputs, parts.lock
        self.opened: dict[str, Evaluation] = {}

    def compute(self, call: str, feeds: Mapping[str, Tensor]) -> Reported:
        """Return the outputs of a method."""
        signature = self._inputs.signature
        self._lock.acquire()  # as `with` does, in half the time
        try:
            evaluation = self.opened.get(call) or self._open(call)
            reported = evaluation.again(feeds, signature.check_labels if signature.labels else None)
            if reported is not None:
                return reported
            needed = functools.partial(signature.check, needed=evaluation.inputs)
            return evaluation.compute(self._inputs.accepted(evaluation.seen, feeds, needed))
        finally:
            self._lock.release()

    def _open(self, call: str) -> Evaluation:
        parts = self._parts
        roles = _COMPUTED.get(call.removesuffix(WITH_WEIGHTS))
        names = [call] if roles is None else [*map(name_of, with_role(parts.model, *roles))]
        if call.endswith(WITH_WEIGHTS):
            names += map(name_of, weights_of_means(parts.model))
        if not names:
            raise GraphoptError("predict: expected an output other than the model's own loss, found none: use evaluate")
        alone = parts.rounds is None and parts.workers.size == 1
        chosen = {"as_numpy": parts.options.as_numpy, "alone": alone}
        opened = evaluation_of(parts.device, parts.model, parts.buffers, names, **chosen)
        return self.opened.setdefault(call, opened)


def reductions_of(model: ir.Model) -> dict[ir.Value, str]:
    """Return how the losses of a training graph are reduced, by the values that say so."""
    values = [*model.graph.inputs, *(y for node in model.graph for y in node.outputs)]
    return {y: kind for y in values if (kind := BATCH_WEIGHT.read(y)) is not None}


def weights_of_means(model: ir.Model) -> list[ir.Value]:
    """Return the weights whose sums the losses of a training graph divide by."""
    return [y for y, kind in reductions_of(model).items() if kind == "mean"]


class Evaluation:
    """Compute outputs of a graph from the state at hand.

    Attributes:
        inputs: the names of the tensors that are needed.
        seen: the tensors that were checked last.
    """

    def __init__(self, device: Device, part: ir.Model, buffers: StateBuffers, options: RunnerOptions) -> None:
        self._device, self._part, self._buffers, self._options = device, part, buffers, options
        self._types = {name_of(x): InputSpec(x).dtype for x in with_role(part, *FED)}
        self.inputs = [*self._types]
        self.seen = Seen()
        self._open()

    def _open(self) -> None:
        self._session = Session(self._device, self._part)

    def again(
        self, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Tensor]], None] | None
    ) -> Reported | None:
        """Compute outputs from arrays like those of the latest call, after a check.

        Return None if a tensor is no such array, or if the form of the graph may be another.
        """
        return None

    def compute(self, feeds: Mapping[str, Tensor]) -> Reported:
        """Return the outputs for checked tensors, of which those that are not inputs are ignored."""
        fed = {name: to_ort(self._device, feeds[name], dtype) for name, dtype in self._types.items()}
        outputs = self._session.compute({**self._buffers.read(), **fed})
        return {
            name: number_or_array(x.numpy()) if self._options.as_numpy or not x.shape() else x
            for name, x in outputs.items()
        }


class Choice(NamedTuple):
    """Hold the form in which evaluations of tensors of some shapes run."""

    kernels: bool = False  # whether they are faster than the graph as it is
    waits: int = NEVER  # after so many calls with one state, it pays to open a session with constant weights


def choice_of(seconds: Mapping[str, float]) -> Choice:
    """Return which form to take by the seconds of each."""
    plain, kernels, constant = (seconds.get(name, math.inf) for name in (PLAIN, KERNELS, CONSTANTS))
    varying, waits = min(plain, kernels), NEVER
    if constant < WORTH_CONSTANTS * varying:
        waits = math.ceil(seconds.get(OPENING, 0.0) / (varying - constant))
    return Choice(kernels < plain, waits)


class ChosenEvaluation(Evaluation):
    """Compute outputs of a graph on the CPU in the fastest of three forms, whose numbers differ by rounding.

    They are the graph as it is, whose weights are inputs; its kernels; and a graph whose weights are constants, which
    ONNX Runtime packs and folds, but which has to be opened again once the state has changed.

    The graph as it is runs until calls with the same shapes have taken `MEASURING_SECONDS`. Then the forms are
    measured. The machine remembers the times, and later executors run so from the start.
    """

    _settled: BoundSession | None  # the form of the latest call, if more calls do not change it

    def _open(self) -> None:
        facts = (self._device.ort.__version__, self._device.threads, self._device.native, own_version())
        digest = hashlib.sha256(identity_of(self._part)[0] + repr(facts).encode()).hexdigest()
        self._memory = Memory(lambda: digest)
        self._computed = Seen()  # the tensors of the latest call
        self._seconds: dict[str, float] = {}  # of calls as the graph is, by the names of notes
        self._bind()

    def _bind(self) -> None:
        """Open the session of the graph as it is; bindings are for the buffers at hand."""
        self._sets, self._version, self._calls = self._buffers.sets, self._buffers.version, 0
        given = self._device, self._part, self._buffers, self._options
        self._plain = plain = BoundSession(*given, "the evaluation as it is")
        self._constants = Candidate(functools.partial(_with_constants, *given), is_momentary=True)
        self._kernels = Candidate(functools.partial(_with_kernels, StepSessions(*given)))
        candidates = {PLAIN: Candidate(lambda: plain), CONSTANTS: self._constants, KERNELS: self._kernels}
        oracle = None
        if self._device.verify:
            oracle = Translation(*given[:3], {}, self._options.report, several=False)
        self._contest = Contest(self._part, candidates, oracle, self._memory, MEASURED_EVALUATIONS)
        self._settled = None

    def _expect(self, feeds: Mapping[str, Tensor]) -> None:
        """Look up the form for tensors of other shapes than the last ones."""
        self._note = self._memory.note_of(self._computed.add(feeds))
        known = self._memory.read(self._note)
        self._choice = None if known is None else choice_of(known)
        if self._device.deterministic:
            self._choice = Choice()

    def again(
        self, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Tensor]], None] | None
    ) -> Reported | None:
        form, buffers = self._settled, self._buffers
        if form is None or self._version != buffers.version or self._sets is not buffers.sets:
            return None
        return form.again(buffers.current, feeds, check)

    def compute(self, feeds: Mapping[str, Tensor]) -> Reported:
        if self._sets is not self._buffers.sets:
            self._bind()
        if len(feeds) > len(self.inputs):
            feeds = {name: feeds[name] for name in self.inputs}
        if feeds not in self._computed:
            self._expect(feeds)
        source = self._buffers.current
        if self._choice is None and self._seconds.get(self._note, 0.0) > MEASURING_SECONDS:
            self._constants.close()  # may be of an earlier state
            self._choice = choice_of(self._contest.times(self._memory, source, feeds))
            self._constants.close()
        if self._choice is not None:
            form = self._form(self._choice, source, feeds)
            is_last = form.name == CONSTANTS or self._choice.waits == NEVER
            self._settled = form if is_last else None
            return form.call(source, feeds)
        begun = time.perf_counter()
        reported = self._plain.call(source, feeds)
        self._seconds[self._note] = self._seconds.get(self._note, 0.0) + time.perf_counter() - begun
        return reported

    def _form(self, choice: Choice, source: int, feeds: Mapping[str, Tensor]) -> BoundSession:
        """Return the form of the call that begins."""
        if self._version != self._buffers.version:
            self._version, self._calls = self._buffers.version, 0
            self._constants.close()
        form = None
        if choice.waits != NEVER:
            self._calls += 1
            if self._constants.is_open or self._calls > choice.waits:
                form = self._constants.form
        if form is None and choice.kernels and self._contest.agrees(KERNELS, source, feeds):
            form = self._kernels.form
        return form or self._plain


def _with_kernels(sessions: StepSessions) -> BoundSession | None:
    """Return a graph with kernels, if there are any."""
    kernels = sessions.kernels()
    return None if kernels is None else kernels.form


def _with_constants(device: Device, part: ir.Model, buffers: StateBuffers, options: RunnerOptions) -> BoundSession:
    """Return a graph with the state at hand as constants."""
    model = part.clone()
    inputs = with_role(model, *STATE)
    arrays = buffers.arrays(map(name_of, inputs))
    for x in inputs:
        x.const_value = ir.tensor(arrays[name_of(x)], name=x.name)
        model.graph.inputs.remove(x)
        model.graph.register_initializer(x)
    return BoundSession(device, model, buffers, options, CONSTANTS)

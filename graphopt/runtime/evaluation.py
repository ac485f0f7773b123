"""Compute outputs of a training graph in its inference form."""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import math
import time
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.graph import inference
from graphopt.graph.dequantization import dequantize_late
from graphopt.graph.roles import FED, STATE, with_role
from graphopt.graph.storage import skeleton
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.checks.verdicts import read_note, write_note
from graphopt.runtime.device import Device
from graphopt.runtime.forms import StepForms
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, number_or_array, to_ort
from graphopt.runtime.translation import Form, Mistranslated, Translation
from graphopt.targets.native.cache import own_version

TRIED = 1.0  # seconds of evaluations after which other forms are measured
GAIN = 0.99  # of the time of evaluations with weights as inputs, for which constant weights are worth their memory
ROUNDS = 2  # of measuring the forms in turns, as other programs may run
SECONDS, MOST = 0.1, 200  # of measuring a form in a round, and its calls
NEVER = -1
CONSTANT = "constant weights"


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
        alone: whether this process alone changes the state.
    """
    outputs = {name_of(y): y for y in model.graph.outputs}
    part = inference.extract(model, [outputs[name] for name in names])
    dequantize_late(part)
    part = device.machine.with_forms(part)
    options = RunnerOptions(report=names, as_numpy=as_numpy)
    chooses = alone and device.on_cpu and placement_of(device, part) == "packed"
    return (ChosenEvaluation if chooses else Evaluation)(device, part, buffers, options)


class Evaluation:
    """Compute outputs of a graph from the state at hand.

    Attributes:
        inputs: the names of the tensors that are needed.
        checked: the description of the tensors that were checked last.
    """

    def __init__(self, device: Device, part: ir.Model, buffers: StateBuffers, options: RunnerOptions) -> None:
        self._device, self._part, self._buffers, self._options = device, part, buffers, options
        self._types = {name_of(x): InputSpec(x).dtype for x in with_role(part, *FED)}
        self.inputs = [*self._types]
        self.checked: list[Any] | None = None
        self._open()

    def _open(self) -> None:
        self._session = Session(self._device, self._part)

    def expect(self, facts: list[Any]) -> None:
        """Take note of the description of tensors that have been checked, and will be computed with."""
        self.checked = facts

    def again(
        self, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Any]], None] | None
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


@dataclass(frozen=True)
class Choice:
    """Say in which form evaluations of tensors of some shapes run.

    Args:
        kernels: whether kernels are faster than the graph as it is.
        waits: the calls with the same state that take as much longer than those with constant weights as it takes to
            open these; `NEVER` if they are not faster.
    """

    kernels: bool = False
    waits: int = NEVER


class ChosenEvaluation(Evaluation):
    """Compute outputs of a graph on the CPU in the fastest of three forms, whose numbers differ by rounding.

    They are the graph as it is, whose weights are inputs; its kernels; and a graph whose weights are constants, which
    ONNX Runtime packs and folds, but which has to be opened again once the state has changed.

    The graph as it is runs until calls with the same shapes have taken `TRIED` seconds. Then the forms are measured.
    The machine remembers the choice, and later executors run so from the start.
    """

    _constant: BoundSession | None  # with the state at hand
    _settled: BoundSession | None  # the form of the latest call, if more calls do not change it

    def _open(self) -> None:
        facts = (self._device.ort.__version__, self._device.threads, self._device.native, own_version(), GAIN)
        self._digest = hashlib.sha256(skeleton(self._part)[0] + repr(facts).encode())
        self._choices: dict[str, Choice | None] = {}  # by the names of their notes
        self._seconds: dict[str, float] = {}
        self._bind()

    def _bind(self) -> None:
        """Open the session of the graph as it is; bindings are for the buffers at hand."""
        self._sets, self._version, self._calls = self._buffers.sets, self._buffers.version, 0
        self._plain = BoundSession(
            self._device, self._part, self._buffers, self._options, "the evaluation as it is"
        )
        self._kernels: BoundSession | None = None
        self._has_tried_kernels = False
        self._constant = self._settled = None

    def expect(self, facts: list[Any]) -> None:
        super().expect(facts)
        digest = self._digest.copy()
        digest.update(repr(facts).encode())
        self._note = f"{digest.hexdigest()[:32]}.evaluation.json"
        if self._note not in self._choices:
            kernels, waits = (
                read_note("native", self._note, "kernels", bool),
                read_note("native", self._note, "waits", int),
            )
            is_known = kernels is not None and waits is not None
            self._choices[self._note] = Choice(bool(kernels), waits or 0) if is_known else None
        self._choice = Choice() if self._device.deterministic else self._choices[self._note]

    def again(
        self, feeds: Mapping[str, Tensor], check: Callable[[Mapping[str, Any]], None] | None
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
        source = self._buffers.current
        if self._choice is None and self._seconds.get(self._note, 0.0) > TRIED:
            self._choice = self._choices[self._note] = self._measured(source, feeds)
        if self._choice is not None:
            form = self._form(self._choice, source, feeds)
            is_last = form is self._constant or self._choice.waits == NEVER
            self._settled = form if is_last else None
            return form.call(source, feeds)
        begun = time.perf_counter()
        reported = self._plain.call(source, feeds)
        self._seconds[self._note] = self._seconds.get(self._note, 0.0) + time.perf_counter() - begun
        return reported

    def _form(self, choice: Choice, source: int, feeds: Mapping[str, Tensor]) -> BoundSession:
        """Return the form of the call that begins."""
        if self._version != self._buffers.version:
            self._version, self._calls, self._constant = self._buffers.version, 0, None
        if choice.waits != NEVER:
            self._calls += 1
            if self._constant is None and self._calls > choice.waits:
                self._constant = self._with_constants()
            if self._constant is not None:
                return self._constant
        return (choice.kernels and self._with_kernels(source, feeds)) or self._plain

    def _measured(self, source: int, feeds: Mapping[str, Tensor]) -> Choice:
        """Measure the forms, and note which to take."""
        begun = time.perf_counter()
        constant = self._with_constants()
        opening = time.perf_counter() - begun
        kernels = self._with_kernels(source, feeds)
        forms = [self._plain, constant] if kernels is None else [self._plain, constant, kernels]
        rounds = [[steady(form, source, feeds) for form in forms] for _ in range(ROUNDS)]
        plain, fixed, compiled = [*map(min, *rounds), math.inf][:3]
        varying = min(plain, compiled)
        is_faster = fixed < GAIN * varying and self._agrees(constant, source, feeds)
        choice = Choice(compiled < plain, math.ceil(opening / (varying - fixed)) if is_faster else NEVER)
        seconds = {"plain": plain, "kernels": str(compiled), "constant": fixed, "opening": opening}
        write_note("native", self._note, {**dataclasses.asdict(choice), "seconds": seconds})
        return choice

    def _with_kernels(self, source: int, feeds: Mapping[str, Tensor]) -> BoundSession | None:
        """Return the graph with kernels, if there are any and they compute the same."""
        if not self._has_tried_kernels and self._device.native:
            options = dataclasses.replace(self._options, native=True)  # measured here
            forms = StepForms(self._device, self._part, self._buffers, options)
            if forms.native:
                forms.settle(source, feeds)
            self._kernels = forms.form if forms.native else None
        self._has_tried_kernels = True
        return self._kernels

    def _agrees(self, form: Form, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether a form computes what the graph does; warn if it does not."""
        if not self._device.verify:
            return True
        names = self._options.report
        translation = Translation(self._device, self._part, self._buffers, {}, names, several=False)
        try:
            translation.check(form, source, feeds)
        except Mistranslated as error:
            if self._device.verify is True:
                raise
            warnings.warn(str(error), stacklevel=2)
            return False
        return True

    def _with_constants(self) -> BoundSession:
        """Return the graph with the state at hand as constants."""
        model = self._part.clone()
        inputs = with_role(model, *STATE)
        arrays = self._buffers.arrays(map(name_of, inputs))
        for x in inputs:
            x.const_value = ir.tensor(arrays[name_of(x)], name=x.name)
            model.graph.inputs.remove(x)
            model.graph.register_initializer(x)
        return BoundSession(self._device, model, self._buffers, self._options, CONSTANT)


def steady(form: Form, source: int, feeds: Mapping[str, Tensor]) -> float:
    """Return the least seconds of some calls in succession, as caches then hold what they can."""
    call = functools.partial(form.call, source, feeds)
    first = timeit.timeit(call, number=1)
    return min(timeit.repeat(call, number=1, repeat=max(1, min(MOST, int(SECONDS / first)))))

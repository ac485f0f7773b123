"""Choose the form in which a plain training graph runs: compiled kernels, or another target, whichever is faster."""

from __future__ import annotations

import functools
import hashlib
import math
import statistics
import sys
import time
import timeit
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.folding import fold
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.storage import weight_bytes
from graphopt.graph.strictness import is_strict
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.checks.verdicts import read_note, write_note
from graphopt.runtime.device import Device
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.signature import description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.switch import ROUNDS, Rehearsed, Switch
from graphopt.runtime.tensors import Tensor, overwrite
from graphopt.runtime.translation import Mistranslated, Sample, Translation
from graphopt.targets.bfloat16 import compute_bfloat16_in_float32, is_of_bfloat16
from graphopt.targets.native.lowering import (
    Lowered,
    kept_kernels,
    lacks_parts,
    lower_to_kernels,
    threads_of,
)
from graphopt.targets.packing import pack_numbers
from graphopt.targets.target import ONNXRUNTIME

WORTH_COMPILING = 10_000  # numbers in parameters, from which `auto` compiles kernels
LONG = 500  # nodes, from which lowering takes longer than a second: another process does it while steps run
SMALL_MODEL = 2**26  # bytes of constants that such a process reads
MARK = b"\xa5"  # no step computes a state of these bytes alone
SECONDS = 1.0  # of measuring, after which there are no more rounds


class StepForms:
    """Hold a training graph lowered to kernels or for ONNX Runtime; the first step shows which form is faster.

    Before a form runs, its numbers in the first step are compared with those of the plain graph; see `Translation`.

    Args:
        model: the plain graph of one step.
        shapes: fixed shapes of the data.
        several: run several steps per call, on stacked batches.
        rehearse: starts a process that prepares a form; without it, `auto` prepares kernels before the first step.

    Raises:
        GraphoptError: `native` is True, and the device is not the CPU, there is no compiler, or it fails.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        options: RunnerOptions,
        shapes: Mapping[str, Sequence[int]] | None = None,
        *,
        several: bool = False,
        rehearse: Callable[..., Rehearsed] | None = None,
    ) -> None:
        self._device, self._buffers, self._options = device, buffers, options
        self._shapes, self._several = shapes, several
        self._model = model if several else with_shapes(model, shapes)
        self._plain_model = _runnable(device, self._model)
        self._translation = None
        if options.verified and device.verify:
            self._translation = Translation(
                device, _runnable(device, model), buffers, options.fixed, options.report, several=several
            )
        self._digest: str | None = None
        self._is_low = placement_of(device, model) == "low"  # to measure steps would take minutes
        self.is_settled = False
        self._rehearse = rehearse
        self._switch: Switch | None = None  # while another process prepares a form, and forms are measured
        self._warn_of_precision()
        is_free = device.native == "auto" and options.native is None
        self._may_measure = is_free and not (device.deterministic or options.in_place or self._is_low)
        lowered = None if options.native is False else self._lowered()
        self._measures = lowered is not None and self._may_measure
        self.native: bool | None = None if self._measures or self._switch else lowered is not None
        self.form = lowered or (self._switch.form if self._switch else self.for_runtime())

    def wait(self) -> None:
        """Wait for the process that prepares a form, if there is one."""
        if self._switch is not None:
            self._switch.wait()

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Run a step in the form that is chosen, or in one that is measured."""
        if not self.is_settled:
            self.settle(source, feeds)
        if self._switch is None:
            return self.form.call(source, feeds)
        reported = self._switch.call(source, feeds)
        self.form = self._switch.form
        return reported

    def settle(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Choose the form to run: not kernels, and then not a lowered graph, that compute other numbers.

        As long as another process prepares a form, or forms are measured on steps that train, the choice is open; see
        `Switch`. Otherwise, this measures forms on a step, unless the machine remembers. A step reads one set of state
        buffers and writes the other, so that it can be repeated.

        Raises:
            GraphoptError: the option `verify` is True, and a form differs from the plain graph; or the provider does
                not write the new state.
            Mistranslated: a form of several steps differs from the plain graph.
        """
        if self._switch is not None:
            self._switch.advance(self, source, feeds)
            self.form, self.native = self._switch.form, self._switch.native
            if self.native is None:
                return
            self._switch = None
        else:
            self._choose(source, feeds)
        self.is_settled, self._translation = True, None

    def _choose(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Choose the form to run by a step that does not train."""
        if not self._device.on_cpu:
            self._check_delivery(source, feeds)
        if self.native is not False and not self.agrees(self.form, source, feeds):
            if self.form.shared:
                self._buffers.separate()
            self.form, self._measures, self.native = self.for_runtime(), False, False
        if self._measures:
            self._measure(source, feeds)
        is_lowered = self.native is False and self.form.model is not self._plain_model
        if is_lowered and not self.agrees(self.form, source, feeds):
            self.form = self._plain()

    def _check_delivery(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Check on one step that a provider writes the new state where the executor reads it."""
        buffers = self._buffers.sets[1 - source]
        marks = {name: MARK * np.asarray(buffers[name].numpy()).nbytes for name in self._buffers.updated}
        for name, mark in marks.items():
            array = np.asarray(buffers[name].numpy())
            overwrite(self._device, buffers[name], np.frombuffer(mark, array.dtype).reshape(array.shape))
        self.form.call(source, feeds)
        for name, mark in marks.items():
            if mark and buffers[name].numpy().tobytes() == mark:
                raise GraphoptError(
                    f"{self._device.execution_provider}: expected the new state in the memory that it was given, "
                    f"found {name!r} as before: take another provider"
                )

    def sample(self, source: int, feeds: Mapping[str, Tensor]) -> Sample | None:
        """Return the numbers of a step, on which another process may compare forms; None if it is not to do so."""
        return None if self._translation is None else self._translation.sample(source, feeds)

    def agrees(self, form: BoundSession, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether a form computes what the plain graph does; warn, or raise an error, if it does not."""
        try:
            if self._translation is not None:
                self._translation.check(form, source, feeds)
        except Mistranslated as error:
            trusts_plain = self._device.machine.is_oracle
            if self._device.verify is True or not trusts_plain or (self._several and self.native is False):
                raise
            warnings.warn(str(error), stacklevel=2)
            return False
        return True

    def _measure(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Take the faster form: that of kernels or the other one."""
        kernels, other = self.form, functools.cache(self.for_runtime)
        calls = [lambda: kernels.call(source, feeds), lambda: other().call(source, feeds)]
        self.native = fastest(self._key(description(feeds)), calls) == 0
        if not self.native:
            self.form = other()

    def _key(self, facts: Sequence[object]) -> tuple[object, ...]:
        """Return what decides which form is the fastest."""
        return self._digest, self._device.ort.__version__, self._device.threads, facts

    def fastest(self, facts: Sequence[object]) -> int | None:
        """Return 0 if kernels are the fastest form on batches like that, 1 if another is, None if it is not known."""
        return remembered(self._key(facts))

    def note_fastest(self, facts: Sequence[object], seconds: Sequence[float]) -> None:
        """Note how long the forms take."""
        remember(self._key(facts), seconds)

    def for_runtime(self) -> BoundSession:
        """Return the graph lowered for the runtime, or the plain one if that fails."""
        target, device = self._device.runtime_target, self._device
        if self._is_low and target is ONNXRUNTIME and (device.native, device.verify) == ("auto", "first"):
            return self._plain()
        name = "several steps per call" if self._several else f"the step for {target.name}"
        try:
            lowered = target.lower(self._model)
            return self._opened(lowered, name)
        except Exception as error:  # whatever fails here, the plain graph computes the same
            if device.verify is True or target is not ONNXRUNTIME:
                raise
            form = self._plain()
            warnings.warn(f"{error}; the step runs as it was before its fusion", stacklevel=2)
            return form

    def _plain(self) -> BoundSession:
        return self._opened(self._plain_model, "the plain step")

    def _opened(self, model: ir.Model, name: str, **kernels: Any) -> BoundSession:
        """Open the session of a graph of one step, lowered or not; of several steps if they are to run."""
        options, packed = self._options, []
        if not self._device.machine.in_host_memory and "loss" in options.report and not options.fixed:
            model = model.clone()
            packed = pack_numbers(model, options.report, self._buffers.infinite)
        if self._several:
            model = with_shapes(unrolled(model), self._shapes)
        return BoundSession(self._device, model, self._buffers, options, name, packed=packed, **kernels)

    def _warn_of_precision(self) -> None:
        """Warn if products run in a higher precision than they may."""
        reason = self._device.machine.precision_obstacle(self._device.native)
        if reason is not None:
            warnings.warn(f"matmul_precision: {reason}; products run as 'highest'", stacklevel=2)

    def _lowered(self) -> BoundSession | None:
        """Lower the graph and open its session; return None if the graph is to run as it is."""
        native, options, model = self._device.native, self._options, self._model
        if not self._device.on_cpu or not native:
            return None
        is_large = is_large_enough([model]) if options.is_large is None else options.is_large
        # Of float16, kernels round each result and ONNX Runtime some: they may overflow in one form alone.
        types = (y.dtype for node in model.graph.all_nodes() for y in node.outputs)
        if native == "auto" and (not is_large or ir.DataType.FLOAT16 in types):
            return None
        return self._guarded(self._begun)

    def _begun(self) -> BoundSession | None:
        """Lower the graph, or have a process lower it if that takes long and the session may change its form."""
        model, facts = self._model, self._kernel_facts
        kept = kept_kernels(model, *facts) if self._may_measure else None
        may_wait = self._may_measure and not self._several and weight_bytes(model) <= SMALL_MODEL
        is_long = sys.executable and (len(model.graph) >= LONG or (not is_strict() and lacks_parts(model)))
        if kept is None and may_wait and is_long and self._rehearse is not None:
            self._switch = Switch(self._plain(), self._rehearse)
            return None
        threads, precision = facts
        in_place = self._options.in_place
        return self._bound(
            kept or lower_to_kernels(model, threads=threads, in_place=in_place, precision=precision)
        )

    @property
    def _kernel_facts(self) -> tuple[int, str]:
        """Return what kernels depend on in addition to the graph: the number of threads and the precision."""
        return threads_of(self._device.threads), self._device.product_precision

    def kernels(self, rehearsal: Rehearsed) -> BoundSession | None:
        """Return the graph with the kernels that a process has prepared; None after a warning if there are none."""

        def prepared() -> BoundSession | None:
            rehearsal.wait()
            return self._bound(kept_kernels(self._model, *self._kernel_facts))

        return self._guarded(prepared)

    def _bound(self, lowered: Lowered | None) -> BoundSession | None:
        if lowered is None:
            return None
        self._digest = lowered.digest
        check = None if self._several else lowered.check
        kernels = {"library": lowered.library, "check": check, "shared": lowered.shared}
        return self._opened(lowered.model, "kernels", **kernels)

    def _guarded(self, session_of: Callable[[], BoundSession | None]) -> BoundSession | None:
        """Return a session of kernels; None after a warning if there is none, unless the user insists."""
        native = self._device.native
        try:
            return session_of()
        except GraphoptError as error:
            if native is True:
                raise
            text = str(error)
        except Exception as error:  # whatever fails here, the graph as it is computes the same
            text = f"native: {type(error).__name__}: {line(error)[:200]}"
            if native is True:
                raise GraphoptError(f"{text}; pass native=False, and please report it") from error
        warnings.warn(f"{text}; steps run without kernels of their own", stacklevel=2)
        return None


def _runnable(device: Device, model: ir.Model) -> ir.Model:
    """Return a graph as a device can run it: the CPU does not compute in bfloat16."""
    if not device.on_cpu or not any(map(is_of_bfloat16, model.graph.all_nodes())):
        return model
    model = model.clone()
    compute_bfloat16_in_float32(model)
    return model


def unrolled(model: ir.Model) -> ir.Model:
    """Return the graph of several steps per call."""
    model = model.clone()
    Unroll().apply(model)
    return model


def with_shapes(model: ir.Model, shapes: Mapping[str, Sequence[int]] | None) -> ir.Model:
    """Return a training graph for fixed data shapes, if any, with the constants that follow folded."""
    if not shapes:
        return model
    model = model.clone()
    sizes = {}
    for value in with_role(model, *FED):
        for dim, size in zip(value.shape or (), shapes[name_of(value)], strict=False):
            if not isinstance(dim, int) and dim.value is not None:
                sizes[dim.value] = size
        value.shape = ir.Shape(shapes[name_of(value)])
    for value in ir.convenience.create_value_mapping(model.graph).values():
        if value.shape is not None:
            value.shape = ir.Shape(
                [d if isinstance(d, int) else sizes.get(str(d.value), d) for d in value.shape]
            )
    fold(model)
    return model


def is_large_enough(models: Sequence[ir.Model]) -> bool:
    """Return whether graphs have so many parameters together that compiling kernels is worth its time."""
    shapes = {x.name: x.shape for model in models for x in with_role(model, Role.PARAMETER)}
    known = [shape.numpy() for shape in shapes.values() if shape is not None and shape.is_static()]
    return sum(map(math.prod, known)) >= WORTH_COMPILING


def fastest(key: Sequence[object], calls: Sequence[Callable[[], object]]) -> int:
    """Return the index of the fastest call, by the median of calls in turns; the machine remembers it by the key."""
    index = remembered(key)
    return remember(key, medians(calls)) if index is None else index


def remembered(key: Sequence[object]) -> int | None:
    """Return the index of the fastest form, if the machine remembers it."""
    return read_note("native", _note_of(key), "fastest", int)


def remember(key: Sequence[object], seconds: Sequence[float]) -> int:
    """Note and return the index of the fastest form."""
    index = seconds.index(min(seconds))
    write_note("native", _note_of(key), {"fastest": index, "seconds": [*seconds]})
    return index


def _note_of(key: Sequence[object]) -> str:
    return f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.time.json"


def medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median time of each call in seconds, from calls in turns after a first one."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    begun = time.perf_counter()
    while len(times[0]) < ROUNDS and (not times[0] or time.perf_counter() - begun < SECONDS):
        for own, call in zip(times, calls, strict=True):
            own.append(timeit.timeit(call, number=1))
    return [statistics.median(own) for own in times]

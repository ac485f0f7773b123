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
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.simplify import fold
from graphopt.graph.storage import weight_bytes
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import BoundSession, RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.frozen import placement_of
from graphopt.runtime.signature import description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, overwrite
from graphopt.runtime.translation import Mistranslated, Translation, read_note, write_note
from graphopt.targets.bfloat16 import compute_bfloat16_in_float32, is_of_bfloat16
from graphopt.targets.native.background import Lowering
from graphopt.targets.native.lowering import Lowered, kept_kernels, lower_to_kernels, threads_of
from graphopt.targets.native.precision import obstacle
from graphopt.targets.packing import pack_numbers
from graphopt.targets.target import ONNXRUNTIME

WORTH_COMPILING = 10_000  # numbers in parameters, from which `auto` compiles kernels
LONG = (
    500  # nodes, from which lowering takes longer than a second: another process then does it while steps run
)
SMALL_MODEL = 2**26  # bytes of constants that such a process reads
MARK = b"\xa5"  # no step computes a state of these bytes alone
ROUNDS, SECONDS = 5, 1.0  # of measuring: so many turns, fewer if they take longer


class StepForms:
    """Hold a training graph lowered to kernels or for ONNX Runtime; the first step shows which form is faster.

    Before a form runs, its numbers in the first step are compared with those of the plain graph; see `Translation`.

    Args:
        model: the plain graph of one step.
        shapes: fixed shapes of the data.
        several: run several steps per call, on stacked batches.

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
        self._lowering: Lowering | None = (
            None  # the process that lowers the graph, while the plain graph runs
        )
        self._warn_of_precision()
        is_free = device.native == "auto" and options.native is None
        self._may_measure = is_free and not (device.deterministic or options.in_place or self._is_low)
        self._take(None if options.native is False else self._lowered())

    def _take(self, lowered: BoundSession | None) -> None:
        """Run kernels, or what the graph is for the runtime; the plain graph as long as another process lowers it."""
        self._measures = lowered is not None and self._may_measure
        self.native: bool | None = None if self._measures or self._lowering else lowered is not None
        self.form = lowered or (self._plain() if self._lowering else self._for_runtime())

    def wait(self) -> None:
        """Wait for the process that lowers the graph, if there is one."""
        if self._lowering is not None:
            self._take(self._guarded(self._finished))

    def settle(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Choose the form to run: not kernels, and then not a lowered graph, that compute other numbers.

        As long as another process lowers the graph, the plain one runs. Then this checks the forms and measures them
        on a step, unless the machine remembers. A step reads one set of state buffers and writes the other, so that it
        can be repeated.

        Raises:
            GraphoptError: the option `verify` is True, and a form differs from the plain graph; or the provider does
                not write the new state.
            Mistranslated: a form of several steps differs from the plain graph.
        """
        if self._lowering is not None and self._lowering.is_running:
            return
        self.wait()
        if not self._device.on_cpu:
            self._check_delivery(source, feeds)
        if self.native is not False and not self._agrees(source, feeds):
            if self.form.shared:
                self._buffers.separate()
            self.form, self._measures, self.native = self._for_runtime(), False, False
        if self._measures:
            self._measure(source, feeds)
        if (
            self.native is False
            and self.form.model is not self._plain_model
            and not self._agrees(source, feeds)
        ):
            self.form = self._plain()
        self.is_settled, self._translation = True, None

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

    def _agrees(self, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether the form computes what the plain graph does; warn, or raise an error, if it does not."""
        try:
            if self._translation is not None:
                self._translation.check(self.form, source, feeds)
        except Mistranslated as error:
            trusts_plain = self._device.kind != "webgpu"
            if self._device.verify is True or not trusts_plain or (self._several and self.native is False):
                raise
            warnings.warn(str(error), stacklevel=2)
            return False
        return True

    def _measure(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Take the faster form: that of kernels or the other one."""
        key = (self._digest, self._device.ort.__version__, self._device.threads, description(feeds))
        kernels, other = self.form, functools.cache(self._for_runtime)
        calls = [lambda: kernels.call(source, feeds), lambda: other().call(source, feeds)]
        self.native = fastest(key, calls) == 0
        if not self.native:
            self.form = other()

    def _for_runtime(self) -> BoundSession:
        """Return the graph lowered for the runtime, or the plain one if that fails."""
        target, device = self._device.runtime_target, self._device
        if self._is_low and target is ONNXRUNTIME and device.native == device.verify == "auto":
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
        if self._device.kind != "cpu" and "loss" in options.report and not options.fixed:
            model = model.clone()
            packed = pack_numbers(model, options.report, self._buffers.infinite)
        if self._several:
            model = with_shapes(unrolled(model), self._shapes)
        return BoundSession(self._device, model, self._buffers, options, name, packed=packed, **kernels)

    def _warn_of_precision(self) -> None:
        """Warn if products run in a higher precision than they may."""
        device, reason = self._device, None
        if device.product_precision != "highest" and device.kind != "cuda":
            if device.on_cpu and device.native:
                reason = obstacle(device.product_precision)
            else:
                reason = "expected kernels on the CPU, or CUDA, found neither"
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
        is_long = len(model.graph) >= LONG and weight_bytes(model) <= SMALL_MODEL and sys.executable
        if is_long and self._may_measure and not self._several and kept_kernels(model, *facts) is None:
            self._lowering = Lowering(model, *facts)
            return None
        threads, precision = facts
        in_place = self._options.in_place
        return self._bound(lower_to_kernels(model, threads=threads, in_place=in_place, precision=precision))

    @property
    def _kernel_facts(self) -> tuple[int, str]:
        """Return what kernels depend on in addition to the graph: the number of threads and the precision."""
        return threads_of(self._device.threads), self._device.product_precision

    def _finished(self) -> BoundSession | None:
        """Return the session of the graph that a process has lowered."""
        lowering, self._lowering = self._lowering, None
        assert lowering is not None
        lowering.finish()
        return self._bound(kept_kernels(self._model, *self._kernel_facts))

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
    Unroll()(model)
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
    note = f"{hashlib.sha256(repr(key).encode()).hexdigest()[:32]}.time.json"
    index = read_note("native", note, "fastest", int)
    if index is None:
        seconds = medians(calls)
        index = seconds.index(min(seconds))
        write_note("native", note, {"fastest": index, "seconds": seconds})
    return index


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

"""Open the forms in which a plain training graph runs, and run the fastest: kernels, or the form of the runtime."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import sys
import time
import warnings
from collections.abc import Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.folding import fold
from graphopt.graph.memory import step_bytes
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.state import put_initial
from graphopt.graph.storage import Weights, identity_of, weight_bytes
from graphopt.graph.strictness import is_strict
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.contest import (
    COMPILED_PARAMETERS,
    KERNELS,
    REHEARSED_NODES,
    RUNTIME,
    Candidate,
    Contest,
    Memory,
    Step,
    live,
)
from graphopt.runtime.device import Device
from graphopt.runtime.fitting import fitted
from graphopt.runtime.frozen import frozen_bytes, placement_of
from graphopt.runtime.rehearsal import Rehearsal
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.system_memory import available
from graphopt.runtime.tensors import Tensor, buffer, overwrite
from graphopt.runtime.translation import LARGEST_WEIGHTS, Sample, Translation
from graphopt.targets.bfloat16 import compute_bfloat16_in_float32, is_of_bfloat16
from graphopt.targets.native.lowering import Lowered, kept_kernels, lacks_parts, lower_to_kernels, threads_of
from graphopt.targets.native.toolchain import logger
from graphopt.targets.packing import pack_numbers
from graphopt.targets.portable.portable import scatter_by_element
from graphopt.targets.target import ONNXRUNTIME

MARK = b"\xa5"  # no step computes a state of only these bytes
FEW_NUMBERS = 512  # in the data of a step, of which the memory is not estimated: that takes 0.4 s of 5,000 nodes


@dataclass(eq=False)
class StepSessions:
    """Open sessions of one training graph: as it is, lowered for the runtime, and lowered to kernels.

    Args:
        model: the plain graph of one step.
        shapes: fixed shapes of the data.
        several: run several steps per call, on stacked batches.
        held: bytes that the process holds beside a step, which the option `memory` counts.
    """

    device: Device
    model: ir.Model
    buffers: StateBuffers
    options: RunnerOptions
    shapes: Mapping[str, Sequence[int]] | None = None
    several: bool = False
    held: int = 0
    _digest: str | None = field(default=None, init=False)  # of the kernels that are open
    _has_shared: bool = field(default=False, init=False)  # whether they write in place
    _rooms: dict[str, bool] = field(default_factory=dict, init=False)  # for plain steps, by shapes

    @functools.cached_property
    def plain_model(self) -> ir.Model:
        """Return the graph as the device can run it, with its shapes."""
        return runnable(self.device, self._model)

    @functools.cached_property
    def is_low(self) -> bool:
        """Return whether weights stay where they are, so that to measure steps would take too long."""
        return placement_of(self.device, self.model) == "low"

    @functools.cached_property
    def _identity(self) -> tuple[bytes, Weights]:
        return identity_of(self._model)

    @functools.cached_property
    def _model(self) -> ir.Model:
        if self.several:
            return self.model
        model = with_shapes(self.model, self.shapes)
        size = self.device.memory
        return model if size is None or not self.shapes else fitted(model, size, self.held)

    def facts(self) -> tuple[object, ...]:
        """Return what decides how long forms take, in addition to the machine and the data."""
        return self._digest, self.device.ort.__version__, self.device.threads

    def plain(self, *, is_brief: bool = False) -> BoundSession:
        """Return the plain form; if it runs few steps, without the runtime's optimization, which they do not repay."""
        return self._opened(self.plain_model, "the plain step", optimized=not is_brief)

    def has_room_for_plain(self, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether a plain step takes no more memory than PyTorch's, if weights stay where they are.

        On few numbers, its values are smaller than the weights. Otherwise, twice the weights are as much as PyTorch
        with peft takes (`examples/benchmarks/large.py --defaults`, 256 tokens).
        """
        if not self.is_low:
            return True
        shapes = {name: x.shape() if callable(x.shape) else x.shape for name, x in feeds.items()}
        key = str(shapes)
        if key not in self._rooms:
            self._rooms[key] = sum(map(math.prod, shapes.values())) <= FEW_NUMBERS
            with contextlib.suppress(GraphoptError):
                most = min(2 * frozen_bytes(self.model, as_floats=True), available())
                self._rooms[key] = self._rooms[key] or step_bytes(self.plain_model, shapes) <= most
        return self._rooms[key]

    def for_runtime(self) -> BoundSession:
        """Return the graph lowered for the runtime, or the plain one if that fails."""
        target, device = self.device.runtime_target, self.device
        if self.is_low and target is ONNXRUNTIME and (device.native, device.verify) == ("auto", "first"):
            return self.plain()
        name = "several steps per call" if self.several else f"the step for {target.name}"
        try:
            return self._opened(target.lower(self._model), name)
        except Exception as error:  # whatever fails here, the plain graph computes the same
            if device.verify is True or target is not ONNXRUNTIME:
                raise
            form = self.plain()
            warnings.warn(f"{error}; the step runs as it was before its fusion", stacklevel=2)
            return form

    def kernels(self, *, may_wait: bool = False) -> Candidate | None:
        """Return the graph lowered to kernels; None if it is not to have them, or after a warning.

        Args:
            may_wait: let another process lower it if that takes long.

        Raises:
            GraphoptError: `native` is True, and the device is not the CPU, there is no compiler, or it fails.
        """
        native, options, model = self.device.native, self.options, self._model
        if not self.device.compiles or options.native is False:
            return None
        is_large = is_large_enough([model]) if options.is_large is None else options.is_large
        # Of float16, kernels round each result and ONNX Runtime some: they may overflow in only one form.
        types = (y.dtype for node in model.graph.all_nodes() for y in node.outputs)
        if native == "auto" and (not is_large or ir.DataType.FLOAT16 in types):
            return None
        with self._guarded():
            kept = self._kept() if may_wait else None
            is_sent = (
                weight_bytes(model) <= LARGEST_WEIGHTS
            )  # else, weights that follow from shapes could not be folded
            is_light = not self.several and (is_sent or (self.is_low and not self.shapes))
            is_long = sys.executable and (
                len(model.graph) >= REHEARSED_NODES
                or (not is_strict() and lacks_parts(model, self.device.product_precision))
            )
            if kept is None and may_wait and is_light and is_long:
                rehearsal = self.rehearsal(native=True)
                logger.info("compiling for this machine, once for this graph; steps run without kernels meanwhile")
                return Candidate(functools.partial(self._rehearsed, rehearsal), lambda: rehearsal)
            form = self._bound(kept or self._lowered())
            return None if form is None else Candidate(lambda: form)
        return None

    def rehearsal(self, *, native: bool) -> Rehearsal:
        """Start a process that prepares kernels, or the graph for the runtime."""
        device = dataclasses.replace(self.device, native=native)
        content = None
        if native and self._model is self.model and weight_bytes(self.model) > LARGEST_WEIGHTS:
            content, _ = self._identity
        task = functools.partial(_rehearse, device, list(self.options.report), self.shapes)
        return Rehearsal(self.model, task, content)

    def _rehearsed(self, rehearsal: Rehearsal) -> BoundSession | None:
        """Return the graph with the kernels that a process has prepared; None after a warning if there are none."""
        with self._guarded():
            if self.is_low:  # a process that had needed the weights has failed
                with contextlib.suppress(GraphoptError):
                    rehearsal.wait()
                return self._bound(self._lowered())
            rehearsal.wait()
            return self._bound(self._kept())
        return None

    def _lowered(self) -> Lowered | None:
        """Return the graph with its kernels, from the cache or made now."""
        threads, precision = self.device.threads, self.device.product_precision
        in_place, measures = self.options.in_place, not self.device.deterministic
        return lower_to_kernels(self._model, threads=threads, in_place=in_place, precision=precision, measures=measures)

    def _kept(self) -> Lowered | None:
        """Return the graph with its kernels, if the cache has them."""
        device = self.device
        return kept_kernels(self._model, threads_of(device.threads), device.product_precision, self._identity)

    def _bound(self, lowered: Lowered | None) -> BoundSession | None:
        if lowered is None:
            return None
        form = self._opened(lowered.model, "kernels", lowered)
        self._digest, self._has_shared = lowered.digest, bool(lowered.shared)
        return form

    def _opened(
        self, model: ir.Model, name: str, lowered: Lowered | None = None, *, optimized: bool = True
    ) -> BoundSession:
        """Open the session of a graph of one step, lowered or not; of several steps if they are to run."""
        options, packed = self.options, []
        if self._has_shared:  # by kernels that are not taken
            self.buffers.separate()
        if not self.device.machine.in_host_memory and "loss" in options.report and not options.fixed:
            model = model.clone()
            packed = pack_numbers(model, options.report, self.buffers.infinite)
        if self.several:
            model = with_shapes(unrolled(model), self.shapes)
            lowered = lowered and dataclasses.replace(lowered, check=None)
        optimized = optimized or lowered is not None
        return BoundSession(self.device, model, self.buffers, options, name, lowered, packed, optimized=optimized)

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Warn of an error while kernels are opened, unless the user insists on them."""
        native = self.device.native
        try:
            yield
            return
        except GraphoptError as error:
            if native is True:
                raise
            text = str(error)
        except Exception as error:  # whatever fails here, the graph as it is computes the same
            text = f"native: {type(error).__name__}: {line(error)[:200]}"
            if native is True:
                raise GraphoptError(f"{text}; pass native=False, and please report it") from error
        warnings.warn(f"{text}; steps run without kernels of their own", stacklevel=2)


class StepForms:
    """Run a training graph in its fastest form: lowered to kernels or for ONNX Runtime.

    Before a form runs, its numbers in the first step are compared with those of the plain graph; see `Translation`.

    Attributes:
        form: the form of the latest step, or of the next one.
        native: whether it has kernels; None as long as a measurement is to decide.
        is_settled: whether all later steps run in this form.

    Raises:
        GraphoptError: `native` is True, and the device is not the CPU, there is no compiler, or it fails.
    """

    def __init__(self, sessions: StepSessions) -> None:
        self._sessions, self.is_settled = sessions, False
        device, buffers, options = sessions.device, sessions.buffers, sessions.options
        oracle = None
        if options.verified and device.verify:
            plain = runnable(device, sessions.model) if device.memory is None else sessions.plain_model
            given = options.fixed, options.report
            oracle = Translation(device, plain, buffers, *given, several=sessions.several)
        _warn_of_precision(device)
        is_free = device.native == "auto" and options.native is None
        may_wait = is_free and not (device.deterministic or options.in_place or device.memory)
        kernels = sessions.kernels(may_wait=may_wait)
        waits = kernels is not None and kernels.rehearsal is not None
        candidates = {} if kernels is None else {KERNELS: kernels}
        may_measure = may_wait and kernels is not None and not sessions.is_low
        rehearse = functools.partial(sessions.rehearsal, native=False) if may_measure else None
        candidates[RUNTIME] = Candidate(sessions.for_runtime, rehearse)
        memory = Memory(sessions.facts) if may_measure else None
        self.native: bool | None = None if memory or waits else kernels is not None
        self._contest: Contest | None = Contest(sessions.plain_model, candidates, oracle, memory)
        self._live: Generator[BoundSession, Step, str | None] | None = None
        self._latest: float | None = None  # the seconds of the latest step
        if waits:
            self._begin()
        else:
            self.form = next(iter(candidates.values())).form or sessions.plain()

    def _begin(self) -> None:
        """Begin with plain steps, until another form is ready."""
        assert self._contest is not None
        self._live = live(self._contest, self._sessions.plain(is_brief=self._sessions.is_low))
        self.form = next(self._live)

    def wait(self) -> None:
        """Wait for the process that prepares kernels, if there is one, whether or not it fails."""
        kernels = self._contest and self._contest.candidates.get(KERNELS)
        if kernels and kernels.rehearsal is not None:
            with contextlib.suppress(GraphoptError):
                kernels.rehearsal.wait()

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Run a step in the form that is chosen, or in one that is measured."""
        if not self.is_settled:
            self.settle(source, feeds)
        self._latest, begun = None, time.perf_counter()
        reported = self.form.call(source, feeds)
        self._latest = time.perf_counter() - begun
        return reported

    def settle(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Choose the form to run: not kernels, and then not a lowered graph, that compute other numbers.

        As long as another process prepares a form, or forms are measured on steps that train, the choice is open; see
        `live`. Otherwise, this measures forms on a step, unless the machine remembers. A step reads one set of state
        buffers and writes the other, so that it can be repeated.

        Raises:
            GraphoptError: the option `verify` is True, and a form differs from the plain graph; or the provider does
                not write the new state.
            Mistranslated: a form of several steps differs from the plain graph.
        """
        contest = self._contest
        assert contest is not None
        if self._live is None:
            if not self._sessions.device.on_cpu:
                self._check_delivery(source, feeds)
            winner = contest.fastest(source, feeds)
        else:
            if not self._sessions.has_room_for_plain(feeds):
                self.wait()
            try:
                self.form = self._live.send((source, feeds, self._latest))
                return
            except StopIteration as end:
                winner = end.value
            except BaseException:  # the next step finds it again
                self._begin()
                raise
        form = None if winner is None else contest.candidates[winner].form
        self.form, self.native = form or self._sessions.plain(), winner == KERNELS
        self.is_settled, self._contest, self._live = True, None, None

    def _check_delivery(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Check on one step that a provider writes the new state where the executor reads it."""
        device, own = self._sessions.device, self._sessions.buffers
        buffers = own.sets[1 - source]
        marks = {name: MARK * np.asarray(buffers[name].numpy()).nbytes for name in own.updated}
        for name, mark in marks.items():
            array = np.asarray(buffers[name].numpy())
            overwrite(device, buffers[name], np.frombuffer(mark, array.dtype).reshape(array.shape))
        self.form.call(source, feeds)
        for name, mark in marks.items():
            if mark and buffers[name].numpy().tobytes() == mark:
                raise GraphoptError(
                    f"{device.execution_provider}: expected the new state in the memory that it was given, "
                    f"found {name!r} as before: take another provider"
                )


def _rehearse(
    device: Device,
    report: Sequence[str],
    shapes: Mapping[str, Sequence[int]] | None,
    model: ir.Model,
    sample: Sample | None,
) -> None:
    """Leave a lowered graph in the cache, with its kernels; with a sample, a note of whether it is right."""
    if sample is None:
        shaped = with_shapes(model, shapes)
        if device.native:
            lower_to_kernels(shaped, threads=device.threads, precision=device.product_precision)
        else:
            device.runtime_target.lower(shaped)
        return
    put_initial(model, sample.state)
    buffers = StateBuffers(device, model)
    fixed = {name: buffer(device, x) for name, x in sample.fixed.items()}
    options = RunnerOptions(report=report, fixed=fixed)
    StepForms(StepSessions(device, model, buffers, options, shapes)).settle(0, sample.batch)


def _warn_of_precision(device: Device) -> None:
    """Warn if products run in a higher precision than they may."""
    reason = device.machine.precision_obstacle(device.compiles)
    if reason is not None:
        warnings.warn(f"matmul_precision: {reason}; products run as 'highest'", stacklevel=2)


def runnable(device: Device, model: ir.Model) -> ir.Model:
    """Return a graph as a device can run it: the CPU does not compute in bfloat16, and loses rows of a ScatterND."""
    nodes = model.graph.all_nodes()
    if not device.on_cpu or not any(is_of_bfloat16(node) or node.op_type == "ScatterND" for node in nodes):
        return model
    model = model.clone()
    scatter_by_element(model)
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
            value.shape = ir.Shape([d if isinstance(d, int) else sizes.get(str(d.value), d) for d in value.shape])
    fold(model)
    return model


def is_large_enough(models: Sequence[ir.Model]) -> bool:
    """Return whether graphs have so many parameters together that compiling kernels is worth its time."""
    shapes = {x.name: x.shape for model in models for x in with_role(model, Role.PARAMETER)}
    known = [shape.numpy() for shape in shapes.values() if shape is not None and shape.is_static()]
    return sum(map(math.prod, known)) >= COMPILED_PARAMETERS

"""Choose the form in which a plain training graph runs: compiled kernels, or another target, whichever is faster."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.device import Device
from graphopt.runtime.signature import description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor
from graphopt.runtime.translation import Form, Mistranslated, Translation, check_delivery
from graphopt.targets.known import ONNXRUNTIME
from graphopt.targets.native.cache import cache_folder, read_regular
from graphopt.targets.native.lowering import Lowered, lower_to_kernels

WORTH_COMPILING = 10_000  # numbers in parameters, from which `auto` compiles kernels
HALVES = (ir.DataType.FLOAT16, ir.DataType.BFLOAT16)
ROUNDS, SECONDS = 5, 1.0  # of measuring: so many turns, fewer if they take longer


class Forms:
    """Hold a training graph lowered to kernels or for ONNX Runtime; the first step shows which form is faster.

    Before a form runs, its numbers in the first step are compared with those of the plain graph; see `Translation`.

    Args:
        model: the plain graph of one step.
        buffers: the buffers of the state.
        bind: creates the session of a form.
        fixed: values for inputs and outputs of the graph that stay where they are.
        plain: the graph to compare with; by default, `model`.
        arranged: returns the graph of several steps to run from that of one step, lowered or not; by default, that
            graph itself.
        native: the form to take; by default, the device's option decides.
        in_place: let kernels write the new state over the old one; then take them without measuring.
        is_large: whether `auto` compiles kernels; by default, if the graph has enough parameters.
        verified: whether to compare forms with the plain graph.

    Raises:
        GraphoptError: `native` is True, and the device is not the CPU, there is no compiler, or it fails.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        bind: Callable[..., BoundSession],
        *,
        plain: ir.Model | None = None,
        fixed: Mapping[str, Any] | None = None,
        arranged: Callable[[ir.Model], ir.Model] | None = None,
        native: bool | None = None,
        in_place: bool = False,
        is_large: bool | None = None,
        verified: bool = True,
    ) -> None:
        self._device, self._buffers = device, buffers
        self._is_large = is_large_enough([model]) if is_large is None else is_large
        self._model, self._bind, self._arranged, self._in_place = model, bind, arranged, in_place
        self._translation = (
            Translation(device, plain or model, buffers, fixed, several=arranged is not None)
            if verified and device.verify
            else None
        )
        self._digest: str | None = None
        self._is_settled = False
        self.native: bool | None = None
        lowered = None if native is False else self._lowered()
        self._measures = (
            lowered is not None
            and native is None
            and device.native == "auto"
            and not (device.deterministic or in_place)
        )
        if not self._measures:
            self.native = lowered is not None
        self._form = lowered or self._for_runtime()

    @property
    def latest(self) -> BoundSession:
        """Return the form that runs, or that would run next."""
        return self._form.bound

    def chosen(self, source: int, feeds: Mapping[str, Tensor]) -> BoundSession:
        """Return the faster form.

        The first call checks the forms and measures them on its step, unless the machine remembers. A step reads one
        set of state buffers and writes the other, so that it can be repeated.

        Raises:
            GraphoptError: the option `verify` is True, and a form differs from the plain graph; or the provider does
                not write the new state.
            Mistranslated: a form of several steps differs from the plain graph.
        """
        if not self._is_settled:
            self._settle(source, feeds)
            self._is_settled, self._translation = True, None
        return self._form.bound

    def _settle(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Choose the form to run."""
        if not self._device.on_cpu:
            check_delivery(self._device, self._form.bound, self._buffers, source, feeds)
        if self.native is not False:
            self._check_lowered(source, feeds)
        if self._measures:
            self._measure(source, feeds)
        if self.native is False and self._form.model is not self._model:
            self._check_for_runtime(source, feeds)

    def _check_lowered(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Take another form if kernels compute other numbers."""
        if not self._agrees(source, feeds):
            if self._form.shared:
                self._buffers.separate()
            self._form, self._measures, self.native = self._for_runtime(), False, False

    def _check_for_runtime(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Take the plain graph if the graph that was lowered for the runtime computes other numbers."""
        if not self._agrees(source, feeds):
            self._form = Form("the plain step", self._opened(self._model), self._model)

    def _agrees(self, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether the form computes what the plain graph does; warn, or raise an error, if it does not."""
        try:
            if self._translation is not None:
                self._translation.check(self._form, source, feeds)
        except Mistranslated as error:
            if self._device.verify is True or (self._arranged is not None and self.native is False):
                raise
            warnings.warn(str(error), stacklevel=2)
            return False
        return True

    def _measure(self, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Take the faster form: that of kernels or the other one."""
        key = (self._digest, self._device.ort.__version__, self._device.threads, description(feeds))
        fastest = remembered(key)
        if fastest != 0:
            other = self._for_runtime()
            calls = [functools.partial(form.bound.call, source, feeds) for form in (self._form, other)]
            fastest = fastest or measured(key, calls)
            self._form = other if fastest else self._form
        self.native = not fastest

    def _for_runtime(self) -> Form:
        """Return the graph lowered for the runtime, or the plain one if that fails."""
        target, device = self._device.runtime_target, self._device
        name = "several steps per call" if self._arranged else f"the step for {target.name}"
        try:
            lowered = target.lower(self._model)
            return Form(name, self._opened(lowered), lowered)
        except Exception as error:  # whatever fails here, the plain graph computes the same
            if device.verify is True or target is not ONNXRUNTIME:
                raise
            form = Form("the plain step", self._opened(self._model), self._model)
            warnings.warn(f"{error}; the step runs as it was before its fusion", stacklevel=2)
            return form

    def _opened(self, model: ir.Model, **options: Any) -> BoundSession:
        return self._bind(model=self._arranged(model) if self._arranged else model, **options)

    def _lowered(self) -> Form | None:
        """Lower the graph and open its session; return None if the graph is to run as it is."""
        device, native = self._device, self._device.native
        if not device.on_cpu or not native:
            return None
        if native == "auto" and (not self._is_large or has_halves(self._model)):
            return None
        try:
            found = lower_to_kernels(self._model, threads=device.threads, in_place=self._in_place)
            return None if found is None else self._opened_lowered(found)
        except Exception as error:  # whatever fails here, the graph as it is computes the same
            if native is True and isinstance(error, GraphoptError):
                raise
            reason = " ".join(str(error).split())[:200]
            text = (
                str(error)
                if isinstance(error, GraphoptError)
                else f"native: {type(error).__name__}: {reason}"
            )
            if native is True:
                raise GraphoptError(f"{text}; pass native=False, and please report it") from error
            warnings.warn(f"{text}; steps run without kernels of their own", stacklevel=2)
            return None

    def _opened_lowered(self, found: Lowered) -> Form:
        self._digest = found.digest
        check = found.check if self._arranged is None else None
        options = {"library": found.library, "check": check, "shared": found.shared}
        bound = self._opened(found.model, **options)
        return Form("kernels", bound, found.model, found.library, found.shared)


def is_large_enough(models: Sequence[ir.Model]) -> bool:
    """Return whether graphs have so many parameters together that compiling kernels is worth its time."""
    shapes = {x.name: x.shape for model in models for x in with_role(model, Role.PARAMETER)}
    known = [shape.numpy() for shape in shapes.values() if shape is not None and shape.is_static()]
    return sum(map(math.prod, known)) >= WORTH_COMPILING


def has_halves(model: ir.Model) -> bool:
    """Return whether a graph computes in 16 bits.

    Kernels round each result, ONNX Runtime rounds some: in one form numbers may overflow that do not in the other.
    """
    return any(y.dtype in HALVES for node in model.graph.all_nodes() for y in node.outputs)


def remembered(key: Sequence[object]) -> int | None:
    """Return the index of the fastest call that was measured on this machine, or None."""
    try:
        return int(json.loads(read_regular(_note(key)) or b"")["fastest"])
    except (GraphoptError, OSError, ValueError, KeyError, TypeError):
        return None


def measured(key: Sequence[object], calls: Sequence[Callable[[], object]]) -> int:
    """Return the index of the fastest call, by the median of calls in turns; the machine remembers it.

    Args:
        key: what the choice depends on.
    """
    found = medians(calls)
    fastest = found.index(min(found))
    with contextlib.suppress(GraphoptError, OSError):  # a cache that cannot be written to forgets
        write(_note(key), json.dumps({"fastest": fastest, "seconds": found}))
    return fastest


def medians(calls: Sequence[Callable[[], object]]) -> list[float]:
    """Return the median time of each call in seconds, from calls in turns after a first one."""
    for call in calls:
        call()
    times: list[list[float]] = [[] for _ in calls]
    begun = time.perf_counter()
    while len(times[0]) < ROUNDS and (not times[0] or time.perf_counter() - begun < SECONDS):
        for taken, call in zip(times, calls, strict=True):
            start = time.perf_counter()
            call()
            taken.append(time.perf_counter() - start)
    return [statistics.median(taken) for taken in times]


def _note(key: Sequence[object]) -> Path:
    digest = hashlib.sha256(repr(key).encode()).hexdigest()
    return cache_folder() / f"{digest[:32]}.time.json"

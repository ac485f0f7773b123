"""Run a training graph as it is or lowered to the machine, whichever is faster."""

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
from graphopt.native.cache import cache_folder, read_regular
from graphopt.native.lowering import Lowered, lower
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.device import Device
from graphopt.runtime.signature import description
from graphopt.runtime.tensors import Tensor

WORTH_COMPILING = 10_000  # numbers in parameters, from which `auto` compiles kernels
ROUNDS, SECONDS = 5, 1.0  # of measuring: so many turns, fewer if they take longer


class Forms:
    """Hold a training graph lowered to the machine or as it is; the first step shows which form is faster.

    Args:
        model: the graph of one step.
        bind: creates the session of a form.
        arranged: returns the graph to run from that of one step, lowered or not; by default, that graph itself.
        native: the form to take; by default, the device's option decides.
        in_place: let kernels write the new state over the old one; then take them without measuring.
        is_large: whether `auto` compiles kernels; by default, if the graph has enough parameters.

    Raises:
        GraphoptError: `native` is True, and the device is not the CPU, there is no compiler, or it fails.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        bind: Callable[..., BoundSession],
        *,
        arranged: Callable[[ir.Model], ir.Model] | None = None,
        native: bool | None = None,
        in_place: bool = False,
        is_large: bool | None = None,
    ) -> None:
        self._device = device
        self._is_large = is_large_enough([model]) if is_large is None else is_large
        self._model, self._bind, self._arranged, self._in_place = model, bind, arranged, in_place
        found = None if native is False else self._lowered()
        measures = (
            found and native is None and device.native == "auto" and not (device.deterministic or in_place)
        )
        self._digest = found.digest if found and measures else None
        self.native = None if measures else found is not None
        if not found:
            self._bound = self._opened(model)

    @property
    def latest(self) -> BoundSession:
        """Return the form that runs, or that would run next."""
        return self._bound

    def chosen(self, source: int, feeds: Mapping[str, Tensor]) -> BoundSession:
        """Return the faster form.

        The first call measures both on its step, unless the machine remembers. A step reads one set of state buffers
        and writes the other, so that it can be repeated.
        """
        if self._digest is not None:
            key = (self._digest, self._device.ort.__version__, self._device.threads, description(feeds))
            fastest = remembered(key)
            if fastest != 0:
                plain = self._opened(self._model)
                calls = [functools.partial(form.call, source, feeds) for form in (self._bound, plain)]
                fastest = fastest or measured(key, calls)
                self._bound = plain if fastest else self._bound
            self._digest, self.native = None, not fastest
        return self._bound

    def _opened(self, model: ir.Model, **options: Any) -> BoundSession:
        return self._bind(model=self._arranged(model) if self._arranged else model, **options)

    def _lowered(self) -> Lowered | None:
        """Lower the graph and open its session; return None if the graph is to run as it is."""
        native = self._device.native
        if not self._device.on_cpu or not native or (native == "auto" and not self._is_large):
            return None
        try:
            device = self._device
            found = lower(self._model, device.native_without, device.threads, in_place=self._in_place)
            if found:
                check = found.check if self._arranged is None else None
                self._bound = self._opened(
                    found.model, library=found.library, check=check, shared=found.shared
                )
        except GraphoptError as error:
            if native is True:
                raise
            warnings.warn(f"{error}; steps run without kernels of their own", stacklevel=2)
            return None
        return found


def is_large_enough(models: Sequence[ir.Model]) -> bool:
    """Return whether graphs have so many parameters together that compiling kernels is worth its time."""
    shapes = {x.name: x.shape for model in models for x in with_role(model, Role.PARAMETER)}
    known = [shape.numpy() for shape in shapes.values() if shape is not None and shape.is_static()]
    return sum(map(math.prod, known)) >= WORTH_COMPILING


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

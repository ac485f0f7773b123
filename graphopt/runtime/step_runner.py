"""Steps of a training graph: tensors are checked once, and a session is chosen by their shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.runtime.bound_session import BoundSession, Reported
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor


class StepRunner:
    """Run a training graph from one set of state buffers to the other.

    Args:
        buffers: of the state; a step reads one set and writes the other.
        report: the outputs to return.
        static_shapes: a session for each set of shapes that is fed, which the runtime knows beforehand.
        as_numpy: return arrays; otherwise values on the device.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        report: Sequence[str],
        *,
        static_shapes: bool = False,
        as_numpy: bool = True,
    ) -> None:
        self.signature = Signature(device, with_role(model, *FED))
        self._static = static_shapes
        self._bind = functools.partial(BoundSession, device, model, buffers, report, as_numpy)
        self._by_shapes: dict[Any, BoundSession] = {}
        self._bound = None if static_shapes else self._bind({})
        self._checked: list[Any] | None = None  # the names, shapes and types that were last found to fit

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether tensors have the names, shapes and types of those that were checked last, by `description`."""
        return self._checked == [
            (name, getattr(x, "shape", None), getattr(x, "dtype", None)) for name, x in feeds.items()
        ]

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Raise an error unless tensors fit, and choose the session of their shapes."""
        if self.fits(feeds):
            return
        shapes = self.signature.check(feeds)
        if self._static:
            key = tuple(sorted(shapes.items()))
            if key not in self._by_shapes:
                self._by_shapes[key] = self._bind(shapes)
            self._bound = self._by_shapes[key]
        self._checked = description(feeds)

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read state of set `source`, write the other, and return what is reported.

        Args:
            feeds: tensors that `check` has just let through.
        """
        assert self._bound is not None
        return self._bound.call(source, feeds)

    @property
    def session(self) -> Session:
        """The session of the latest step."""
        if self._bound is None:
            raise GraphoptError("placement: expected a step before, since shapes are static, found none")
        return self._bound.session

"""Run steps of a training graph: check tensors once, and choose a session by their shapes."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.graph.unroll import Unroll
from graphopt.runtime.bound_session import BoundSession, Reported, with_shapes
from graphopt.runtime.device import Device
from graphopt.runtime.forms import Forms
from graphopt.runtime.runner import Runner
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor


class StepRunner(Runner):
    """Run a training graph from one set of state buffers to the other.

    Args:
        buffers: the buffers of the state; a step reads one set and writes the other.
        report: the outputs to return.
        fixed: values for inputs and outputs of the graph that stay where they are.
        static_shapes: create a session for each set of shapes, so that the runtime knows them in advance.
        as_numpy: return NumPy arrays; otherwise values on the device.
        single: run several steps per call, on stacked batches, in the form that this runner of single steps has chosen.
        options: options of `Forms`.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        report: Sequence[str],
        *,
        fixed: Mapping[str, Any] | None = None,
        static_shapes: bool = False,
        as_numpy: bool = True,
        single: StepRunner | None = None,
        **options: Any,
    ) -> None:
        self._model, self._single, self._static = model, single, static_shapes
        self.signature = Signature(device, with_role(_unrolled(model) if single else model, *FED))
        bind = functools.partial(
            BoundSession, device, buffers=buffers, report=report, as_numpy=as_numpy, fixed=fixed
        )
        self._forms_of: Callable[..., Forms] = functools.partial(
            Forms, device, buffers=buffers, bind=bind, fixed=fixed, **options
        )
        self._by_shapes: dict[Any, Forms] = {}
        self._forms = None if static_shapes else self._opened()
        self._checked: list[Any] | None = None  # the description of the tensors that were checked last

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        return self._checked == description(feeds)

    def check(self, feeds: Mapping[str, Any]) -> None:
        if self.fits(feeds):
            return
        shapes = self.signature.check(feeds)
        if self._static:
            key = tuple(sorted(shapes.items()))
            if key not in self._by_shapes:
                self._by_shapes[key] = self._opened(shapes)
            self._forms = self._by_shapes[key]
        self._checked = description(feeds)

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        assert self._forms is not None
        return self._forms.chosen(source, feeds).call(source, feeds)

    @property
    def native(self) -> bool | None:
        """Return whether steps are lowered to the machine; None as long as a measurement is to decide."""
        return None if self._forms is None else self._forms.native

    def _opened(self, shapes: Mapping[str, Sequence[int]] | None = None) -> Forms:
        """Return the forms of the graph, for fixed shapes of data if they are given."""
        single = self._single
        if single is None:
            return self._forms_of(
                with_shapes(self._model, shapes) if shapes else self._model, plain=self._model
            )
        # Kernels are those of single steps, so that the results are, too.
        arranged = functools.partial(_unrolled, shapes=shapes)
        return self._forms_of(self._model, arranged=arranged, native=single.native)

    @property
    def state_is_finite(self) -> bool:
        return self._forms is not None and self._forms.latest.state_is_finite

    @property
    def sessions(self) -> list[Session]:
        if self._forms is None:
            raise GraphoptError(
                "placement: expected a step before it, as sessions depend on shapes, found none: run a step first"
            )
        return [self._forms.latest.session]


def _unrolled(model: ir.Model, shapes: Mapping[str, Sequence[int]] | None = None) -> ir.Model:
    """Return the graph of several steps per call, for fixed shapes of stacked data if they are given."""
    model = model.clone()
    Unroll()(model)
    return with_shapes(model, shapes) if shapes else model

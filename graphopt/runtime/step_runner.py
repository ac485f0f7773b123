"""Run steps of a training graph: check tensors once, and choose a session by their shapes."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.graph.unroll import Unroll
from graphopt.runtime.bound_session import BoundSession, Reported, with_shapes
from graphopt.runtime.device import Device
from graphopt.runtime.forms import Forms
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor


class StepRunner:
    """Run a training graph from one set of state buffers to the other.

    Args:
        buffers: the buffers of the state; a step reads one set and writes the other.
        report: the outputs to return.
        static_shapes: create a session for each set of shapes, so that the runtime knows them in advance.
        as_numpy: return NumPy arrays; otherwise values on the device.
        in_place: let kernels write the new state over the old one.
        fixed: values for inputs and outputs of the graph that stay where they are.
        native: whether to lower the graph to the machine; by default, a measurement decides.
        verified: whether to compare forms of the graph with the plain one in the first step.
        is_large: whether the graph is large enough to be lowered; by default, its parameters decide.
        single: run several steps per call, on stacked batches, in the form that this runner of single steps has chosen.
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
        in_place: bool = False,
        fixed: Mapping[str, Any] | None = None,
        native: bool | None = None,
        is_large: bool | None = None,
        verified: bool = True,
        single: StepRunner | None = None,
    ) -> None:
        self._device, self._model, self._single, self._static = device, model, single, static_shapes
        self.signature = Signature(device, with_role(_unrolled(model) if single else model, *FED))
        self._in_place, self._native, self._is_large = in_place, native, is_large
        bind = functools.partial(
            BoundSession, device, buffers=buffers, report=report, as_numpy=as_numpy, fixed=fixed
        )
        self._forms_of = functools.partial(
            Forms, device, buffers=buffers, bind=bind, fixed=fixed, verified=verified
        )
        self._by_shapes: dict[Any, Forms] = {}
        self._forms = None if static_shapes else self._opened()
        self._checked: list[Any] | None = (
            None  # names, shapes and types of the tensors that were checked last
        )

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether tensors have the same names, shapes and types as those checked last."""
        return self._checked == [
            (name, getattr(x, "shape", None), getattr(x, "dtype", None)) for name, x in feeds.items()
        ]

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Check tensors and choose the session for their shapes."""
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
        """Read the state from set `source`, write the other set, and return the reported outputs.

        Args:
            feeds: tensors that `check` has accepted.
        """
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
            model = with_shapes(self._model, shapes) if shapes else self._model
            return self._forms_of(
                model,
                plain=self._model,
                native=self._native,
                in_place=self._in_place,
                is_large=self._is_large,
            )
        # Kernels are those of single steps, so that the results are, too.
        arranged = functools.partial(_unrolled, shapes=shapes)
        return self._forms_of(self._model, arranged=arranged, native=single.native)

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest step found its new state to be finite; not all steps look."""
        return self._forms is not None and self._forms.latest.state_is_finite

    @property
    def sessions(self) -> list[Session]:
        """Return the session of the latest step, as a list."""
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

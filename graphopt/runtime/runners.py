"""Run steps of a training graph, and parts of it for evaluation: check tensors, and choose a session."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import inference
from graphopt.graph.roles import FED, with_role
from graphopt.graph.values import name_of
from graphopt.runtime.bound_session import Reported, RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.forms import StepForms, unrolled
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, number_or_array, to_ort


class Runner(Protocol):
    """Run steps of a training graph on the two sets of a `StateBuffers`.

    `StepRunner` runs a whole step in one session. `SplitRunner` runs it in two halves, between which workers exchange
    gradients.
    """

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Check the tensors of the next steps, which have the same names, shapes and types; choose their sessions.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type or shape. Nothing has changed.
        """

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs.

        The caller decides whether to keep the new state: a step on the same set can be repeated, unless kernels write
        in place.

        Args:
            feeds: tensors that `check` has accepted.
        """

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest step found its new state to be finite; not all steps look."""

    @property
    def sessions(self) -> list[Session]:
        """Return the sessions of the latest step.

        Raises:
            GraphoptError: sessions depend on shapes, and no step has run yet.
        """


class StepRunner(Runner):
    """Run a training graph from one set of state buffers to the other.

    Args:
        single: run several steps per call, on stacked batches, in the form that this runner of single steps has chosen.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        buffers: StateBuffers,
        options: RunnerOptions,
        single: StepRunner | None = None,
    ) -> None:
        self._parts, self._options, self._single = (device, model, buffers), options, single
        self.signature = Signature(device, with_role(unrolled(model) if single else model, *FED))
        self._by_shapes: dict[Any, StepForms] = {}
        self._forms = None if options.static_shapes else self._opened()

    def check(self, feeds: Mapping[str, Any]) -> None:
        shapes = self.signature.check(feeds)
        if self._options.static_shapes:
            key = tuple(sorted(shapes.items()))
            if key not in self._by_shapes:
                self._by_shapes[key] = self._opened(shapes)
            self._forms = self._by_shapes[key]

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        forms = self._forms
        assert forms is not None
        if not forms.is_settled:
            forms.settle(source, feeds)
        return forms.form.call(source, feeds)

    @property
    def native(self) -> bool | None:
        """Return whether steps are lowered to the machine; None as long as a measurement is to decide."""
        return None if self._forms is None else self._forms.native

    def _opened(self, shapes: Mapping[str, Sequence[int]] | None = None) -> StepForms:
        """Return the forms of the graph; several steps run in that of single ones, so that the results are equal."""
        if self._single is None:
            return StepForms(*self._parts, self._options, shapes)
        options = dataclasses.replace(self._options, native=self._single.native)
        return StepForms(*self._parts, options, shapes, several=True)

    @property
    def state_is_finite(self) -> bool:
        return self._forms is not None and self._forms.form.state_is_finite

    @property
    def sessions(self) -> list[Session]:
        if self._forms is None:
            raise GraphoptError(
                "placement: expected a step before it, as sessions depend on shapes, found none: run a step first"
            )
        return [self._forms.form.session]


class ForwardRunner:
    """Compute outputs of a training graph without changing the state.

    Args:
        signature: the signature of all inputs of a step, to check tensors.
        as_numpy: return NumPy arrays; otherwise values on the device.
    """

    def __init__(
        self, device: Device, model: ir.Model, buffers: StateBuffers, signature: Signature, *, as_numpy: bool
    ) -> None:
        self._device, self._model, self._buffers = device, model, buffers
        self._signature, self._as_numpy = signature, as_numpy
        self._sessions: dict[tuple[str, ...], Session] = {}
        self._checked: dict[tuple[str, ...], Any] = {}  # descriptions of the tensors that were checked last

    def check(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> None:
        """Check tensors as a step does, except that inputs which the outputs `names` do not need may be missing.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type, shape or labels.
        """
        facts = description(tensors)
        if self._checked.get(tuple(names)) != facts:
            self._signature.check(tensors, self._session(names).inputs)
            self._checked[tuple(names)] = facts
        self._signature.check_labels(tensors)

    def compute(self, names: Sequence[str], tensors: Mapping[str, Tensor]) -> Reported:
        """Return outputs by name, of tensors that `check` has accepted."""
        session, accepted = self._session(names), self._signature.accepted
        fed = [name for name in session.inputs if name in accepted]
        values = {name: to_ort(self._device, tensors[name], accepted[name].dtype) for name in fed}
        outputs = session.compute(self._buffers.read() | values)
        return {
            name: number_or_array(x.numpy()) if self._as_numpy or not x.shape() else x
            for name, x in outputs.items()
        }

    def _session(self, names: Sequence[str]) -> Session:
        """Return the session of the part of the graph that computes outputs; open it on first use."""
        key = tuple(names)
        if key not in self._sessions:
            outputs = {name_of(y): y for y in self._model.graph.outputs}
            part = inference.extract(self._model, [outputs[name] for name in names])
            self._sessions[key] = Session(self._device, part)
        return self._sessions[key]

"""Run a training step in two halves, between which workers average their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.names import of_worker, state_of_local
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.communicator import Communicator
from graphopt.runtime.device import Device
from graphopt.runtime.reported_outputs import numbers, reporting
from graphopt.runtime.session import Session
from graphopt.runtime.shared_update import part_of_update
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import Allocate, Tensor, buffer, buffers, rows_of

FIRST_ROW, SHARE = "first_row", "share"  # inputs of the halves: see `passes.halves`


class SplitRunner:
    """Run the half `grad` on a worker's rows, average over all workers, and run the half `apply`.

    Gradients of one type lie in one buffer, which both halves are bound to. `average_statistics` averages the running
    statistics of BatchNormalization with them; otherwise each worker keeps its own.

    Args:
        grad: computes the loss, gradients and the weight of a batch.
        apply: computes the new state.
        buffers: the buffers of the state.
        report: the outputs to return.
        communicator: the workers.
        allocate: returns memory that all workers share, in which their state lies, too. Each worker then computes a
            part of the new state, from the gradients of all, where they lie. None if workers sum their gradients, and
            each updates a copy of the state.
    """

    def __init__(
        self,
        device: Device,
        grad: ir.Model,
        apply: ir.Model,
        state: StateBuffers,
        report: Sequence[str],
        communicator: Communicator,
        *,
        allocate: Allocate | None = None,
        average_statistics: bool = True,
        static_shapes: bool = False,
        as_numpy: bool = True,
        in_place: bool = False,
    ) -> None:
        self._device, self._report, self._communicator = device, list(report), communicator
        self._state, self._is_shared = state, allocate is not None
        weight = next(y for y in grad.graph.outputs if BATCH_WEIGHT.read(y))
        self._weight, self._is_sum = str(weight.name), BATCH_WEIGHT.read(weight) == "sum"
        self._losses = {str(y.name) for y in with_role(grad, Role.LOSS)} if self._is_sum else set()
        averaged = (Role.GRADIENT, Role.SAVED) if average_statistics else (Role.GRADIENT,)
        met = {y: _zeros(y) for y in grad.graph.outputs if role_of(y) in (Role.GRADIENT, Role.SAVED)}
        exchanged = {str(y.name): array for y, array in met.items() if role_of(y) in averaged}
        self._own = {
            str(y.name): buffer(device, array) for y, array in met.items() if role_of(y) not in averaged
        }
        others: dict[str, Tensor] = {}
        if allocate:
            others = self._share(exchanged, allocate)
            apply = part_of_update(apply, exchanged, communicator.rank, communicator.size)
        else:
            self._met, self._memory = buffers(device, exchanged)
        self._first_row = buffer(device, np.zeros((), np.int32))
        self._has_positions = any(x.name == FIRST_ROW for x in grad.graph.inputs)
        share = buffer(device, np.array(1 if self._is_sum else 1 / communicator.size, np.float32))
        fixed = {**self._met, **others, **self._own, FIRST_ROW: self._first_row, SHARE: share}
        self._means = numbers(grad, report)
        updates = [name for name in report if name in {y.name for y in apply.graph.outputs}]
        # The update comes first, because it may give the state one set of buffers in place of two.
        self._apply = self._updating(
            lambda native: StepRunner(
                device,
                reporting(apply, updates),
                state,
                updates,
                fixed=fixed,
                in_place=in_place,
                as_numpy=as_numpy,
                native=native,
            ),
            in_place,
        )
        self._apply.check({})
        reported = [*(name for name in report if name in {y.name for y in grad.graph.outputs}), self._weight]
        self._grad = StepRunner(
            device,
            reporting(grad, reported),
            state,
            reported,
            fixed=fixed,
            static_shapes=static_shapes,
            as_numpy=as_numpy,
        )

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether tensors have the same names, shapes and types as those checked last."""
        return self._grad.fits(feeds)

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Check tensors and choose the session for their shapes."""
        self._grad.check(feeds)

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs.

        Args:
            feeds: tensors of this worker's rows, which `check` has accepted; without rows, it reports no arrays.
        """
        rows = rows_of(feeds)
        if self._has_positions:
            self._place(rows)
        reported: Reported = dict.fromkeys([*self._means, self._weight], 0.0)
        if rows:
            reported = self._grad.step(source, feeds)
        self._average(reported, rows)
        self._keep_own(source, rows)
        reported |= self._apply.step(source, {})
        self._is_finite = self._apply.state_is_finite
        if self._is_shared:  # and all have read the gradients
            self._is_finite = not self._communicator.any(not self._is_finite)[0]
        return {name: reported[name] for name in self._report if name in reported}

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest step found its new state to be finite; not all steps look."""
        return self._is_finite

    @property
    def native(self) -> bool | None:
        """Return whether the half `grad` is lowered to the machine; None as long as a measurement is to decide."""
        return self._grad.native

    @property
    def session(self) -> Session:
        """Return the session of the half `grad`."""
        return self._grad.session

    @property
    def bytes_per_step(self) -> int:
        """Return the size of a worker's gradients, which the others read or sum in each step."""
        return sum(flat.nbytes for flat in self._memory)

    def _share(self, exchanged: Mapping[str, np.ndarray], allocate: Allocate) -> dict[str, Tensor]:
        """Place the gradients of each worker where all read them, and return them by the names that the update has."""
        each = [buffers(self._device, exchanged, allocate) for _ in range(self._communicator.size)]
        self._met, self._memory = each[self._communicator.rank]
        return {
            of_worker(name, rank): x for rank, (values, _) in enumerate(each) for name, x in values.items()
        }

    def _updating(self, runner_of: Callable[[bool], StepRunner], in_place: bool) -> StepRunner:
        """Return the runner of the update, in the same form on all workers, so that copies stay the same bits.

        Args:
            runner_of: returns the runner, lowered to the machine where there is a compiler, or not.
        """
        runner, size = runner_of(True), self._communicator.size
        lowered = np.array([float(runner.native is True)])
        self._communicator.sum(lowered)  # and all have written the initial state
        if self._is_shared or lowered.item() in (0, size):
            return runner
        if in_place:
            raise GraphoptError(
                "in_place: expected a compiler on the machine of each worker, found some without: leave it out"
            )
        return runner_of(False)

    def _place(self, rows: int) -> None:
        """Tell masks the position of this worker's first row."""
        communicator = self._communicator
        counts = np.zeros(communicator.size)
        counts[communicator.rank] = rows
        communicator.sum(counts)
        self._first_row.update_inplace(np.array(counts[: communicator.rank].sum(), np.int32))

    def _keep_own(self, source: int, rows: int) -> None:
        """Undo the division by the number of workers for statistics that each worker has for itself."""
        before = self._state.sets[source]
        for name, value in self._own.items():
            kept = value if rows else before[state_of_local(name)]
            value.update_inplace(kept.numpy() * kept.numpy().dtype.type(self._communicator.size))

    def _average(self, reported: Reported, rows: int) -> None:
        """Replace numbers and gradients by their means over all workers, weighted by their batches."""
        weight = reported.pop(self._weight)
        communicator = self._communicator
        totals = np.array([weight, *(weight * reported[name] for name in self._means)], np.float64)
        communicator.sum(totals)
        for name, number in zip(self._means, totals[1:], strict=True):
            total = 1.0 if name in self._losses else totals[0]
            reported[name] = float(number / total) if total else 0.0
        scale = 1.0 if self._is_sum else weight * communicator.size / (totals[0] or 1.0)
        memory = self._memory or [value.numpy().ravel() for value in self._met.values()]
        for flat in memory:
            if not rows:
                flat[...] = 0
            elif scale != 1:
                np.multiply(flat, flat.dtype.type(scale), out=flat)
            if not self._is_shared:
                communicator.sum(flat)
        if self._is_shared:
            communicator.wait()
        if not self._memory:
            for value, flat in zip(self._met.values(), memory, strict=True):
                value.update_inplace(flat.reshape(value.shape()))


def _zeros(y: ir.Value) -> np.ndarray:
    assert y.shape is not None and y.dtype is not None
    return np.zeros(y.shape.numpy(), y.dtype.numpy())

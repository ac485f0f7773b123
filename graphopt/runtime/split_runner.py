"""Run a training step in two halves, between which workers average their gradients."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.names import of_worker
from graphopt.graph.roles import Role, role_of
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.communicator import Communicator
from graphopt.runtime.device import Device
from graphopt.runtime.reported_outputs import numbers, reporting
from graphopt.runtime.session import Session
from graphopt.runtime.shared_update import part_of_update
from graphopt.runtime.staged_runner import StagedRunner
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.summed_buffers import SummedBuffers
from graphopt.runtime.tensors import Allocate, Tensor, buffer, rows_of

FIRST_ROW, ROWS, SHARE = (
    "first_row",
    "rows",
    "share",
)  # inputs and an output of the halves: see `passes.halves`


class SplitRunner:
    """Run the half `grad` on a worker's rows, average over all workers, and run the half `apply`.

    Gradients of one type lie in one buffer, which both halves are bound to.

    Args:
        grad: computes the loss, gradients and the weight of a batch, in stages.
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
        grad: Sequence[ir.Model],
        apply: ir.Model,
        state: StateBuffers,
        report: Sequence[str],
        communicator: Communicator,
        *,
        allocate: Allocate | None = None,
        static_shapes: bool = False,
        as_numpy: bool = True,
        in_place: bool = False,
    ) -> None:
        self._device, self._report, self._communicator = device, list(report), communicator
        self._is_shared = allocate is not None
        outputs = [y for stage in grad for y in stage.graph.outputs]
        self._is_sum = any(y.name == ROWS and BATCH_WEIGHT.read(y) == "sum" for y in outputs)
        self._losses = {str(y.name) for y in outputs if role_of(y) is Role.LOSS} if self._is_sum else set()
        fixed: dict[str, Tensor] = {}
        self._met: dict[Role, SummedBuffers] = {}
        for role in (Role.GRADIENT, Role.SAVED):  # saved: new running statistics
            met = [y for y in outputs if role_of(y) is role]
            if allocate:
                each = [SummedBuffers(device, met, allocate) for _ in range(communicator.size)]
                self._met[role] = each[communicator.rank]
                for rank, one in enumerate(each):
                    fixed |= {of_worker(name, rank): x for name, x in one.values.items()}
            else:
                self._met[role] = SummedBuffers(device, met)
            fixed |= self._met[role].values
        if allocate:
            names = [name for buffers in self._met.values() for name in buffers.values]
            apply = part_of_update(apply, names, communicator.rank, communicator.size)
        self._first_row = buffer(device, np.zeros((), np.int32))
        self._has_positions = any(x.name == FIRST_ROW for stage in grad for x in stage.graph.inputs)
        self._share = 1.0 if self._is_sum else 1 / communicator.size
        share = buffer(device, np.array(self._share, np.float32))
        fixed |= {FIRST_ROW: self._first_row, SHARE: share}
        self._means = numbers(outputs, report)
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
        reported = [*(name for name in report if name in {y.name for y in outputs}), ROWS]
        self._grad = StagedRunner(
            device,
            grad,
            state,
            reported,
            communicator,
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
        reported: Reported = dict.fromkeys([*self._means, ROWS], 0.0)
        if rows:
            reported = self._grad.step(source, feeds)
        else:
            self._grad.skip()
        self._average(reported, rows)
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
    def sessions(self) -> list[Session]:
        """Return the sessions of both halves."""
        return [*self._grad.sessions, *self._apply.sessions]

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

    def _average(self, reported: Reported, rows: int) -> None:
        """Replace numbers and gradients by their means over all workers, weighted by their batches."""
        weight = reported.pop(ROWS)
        communicator = self._communicator
        factors = [1.0 if name in self._losses else weight for name in self._means]
        numbers = [factor * reported[name] for factor, name in zip(factors, self._means, strict=True)]
        totals = np.array([weight, *numbers], np.float64)
        communicator.sum(totals)
        total = totals[0] or 1.0
        for name, number in zip(self._means, totals[1:], strict=True):
            reported[name] = float(number if name in self._losses else number / total)
        for role, buffers in self._met.items():
            is_sum = self._is_sum and role is Role.GRADIENT
            scale = 1.0 if is_sum else weight / total / self._share
            with buffers.flat() as arrays:
                for flat in arrays:
                    if not rows:
                        flat[...] = 0
                    elif scale != 1:
                        np.multiply(flat, flat.dtype.type(scale), out=flat)
                    if not self._is_shared:
                        communicator.sum(flat)
        if self._is_shared:
            communicator.wait()

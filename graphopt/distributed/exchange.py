"""Average over all workers what each has computed on its rows: numbers, gradients and statistics."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.communicator import Communicator
from graphopt.distributed.shared_update import part_of_update
from graphopt.distributed.summed_buffers import SummedBuffers
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.names import FIRST_ROW, ROWS, SHARE, of_worker
from graphopt.graph.roles import Role, role_of
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.device import Device
from graphopt.runtime.reported_outputs import numbers
from graphopt.runtime.tensors import Allocate, Tensor, buffer


class Exchange:
    """Average over all workers what the half `grad` computes, weighted by their batches; each has copies of the sums.

    Gradients of one type lie in one buffer, which both halves are bound to.

    Attributes:
        fixed: values for inputs and outputs of both halves.

    Args:
        grad: computes the loss, gradients and the weight of a batch, in stages.
        report: the outputs to return.
    """

    def __init__(
        self,
        device: Device,
        grad: Sequence[ir.Model],
        report: Sequence[str],
        communicator: Communicator,
    ) -> None:
        self._device, self._communicator = device, communicator
        outputs = [y for stage in grad for y in stage.graph.outputs]
        self._is_sum = any(y.name == ROWS and BATCH_WEIGHT.read(y) == "sum" for y in outputs)
        self._losses = {str(y.name) for y in outputs if role_of(y) is Role.LOSS} if self._is_sum else set()
        self._means = numbers(outputs, report)
        self._weighed = max(  # the stage after which the numbers are known that are averaged
            i for i, stage in enumerate(grad) if {ROWS, *self._means} & {y.name for y in stage.graph.outputs}
        )
        self._first_row = buffer(device, np.zeros((), np.int32))
        self._has_positions = any(x.name == FIRST_ROW for stage in grad for x in stage.graph.inputs)
        self._share = 1.0 if self._is_sum else 1 / communicator.size
        share = buffer(device, np.array(self._share, np.float32))
        self.fixed: dict[str, Tensor] = {FIRST_ROW: self._first_row, SHARE: share}
        self._sums = [
            (role, self._buffers([y for y in outputs if role_of(y) is role]))
            for role in (Role.GRADIENT, Role.SAVED)
        ]

    def update(self, apply: ir.Model) -> ir.Model:
        """Return what this worker computes of the half `apply`."""
        return apply

    def agree(self, is_finite: bool) -> bool:
        """Return whether the new state is finite, if this worker has found it to be."""
        return is_finite

    def begin(self, rows: int) -> None:
        """Tell masks the position of this worker's first row, before `grad` runs."""
        if self._has_positions:
            communicator = self._communicator
            counts = np.zeros(communicator.size)
            counts[communicator.rank] = rows
            communicator.sum(counts)
            self._first_row.update_inplace(np.array(counts[: communicator.rank].sum(), np.int32))

    def average(self, stages: Iterable[Reported], rows: int) -> Reported:
        """Run the stages of `grad`, and return what they report, with means over all workers.

        Args:
            stages: yields what each stage reports.
            rows: the number of this worker's rows.
        """
        reported: Reported = dict.fromkeys([*self._means, ROWS], 0.0)
        for stage, found in enumerate(stages):
            reported |= found
            if stage == self._weighed:
                self._average(reported)
        for role, buffers in self._sums:
            self._sum(role, buffers, rows)
        return reported

    def _buffers(self, outputs: Sequence[ir.Value]) -> SummedBuffers:
        """Return this worker's buffers for outputs of `grad`."""
        own = SummedBuffers(self._device, outputs)
        self.fixed |= own.values
        return own

    def _average(self, reported: Reported) -> None:
        """Replace numbers by their means over all workers, weighted by their batches, and learn the weight of all."""
        weight = reported.pop(ROWS)
        factors = [1.0 if name in self._losses else weight for name in self._means]
        weighted = [factor * reported[name] for factor, name in zip(factors, self._means, strict=True)]
        totals = np.array([weight, *weighted], np.float64)
        self._communicator.sum(totals)
        total = totals[0] or 1.0
        for name, number in zip(self._means, totals[1:], strict=True):
            reported[name] = float(number if name in self._losses else number / total)
        self._part = weight / total

    def _sum(self, role: Role, buffers: SummedBuffers, rows: int) -> None:
        """Weigh what this worker has computed by its batch, and sum it over all workers."""
        scale = 1.0 if self._is_sum and role is Role.GRADIENT else self._part / self._share
        with buffers.flat() as arrays:
            for flat in arrays:
                if not rows:
                    flat[...] = 0
                elif scale != 1:
                    np.multiply(flat, flat.dtype.type(scale), out=flat)
                self._reduce(flat)

    def _reduce(self, array: np.ndarray) -> None:
        """Sum an array over all workers."""
        self._communicator.sum(array)


class SharedExchange(Exchange):
    """Average in memory that all workers share: each updates a part of the state, from the gradients of all.

    Args:
        allocate: returns such memory.
    """

    def __init__(
        self,
        device: Device,
        grad: Sequence[ir.Model],
        report: Sequence[str],
        communicator: Communicator,
        allocate: Allocate,
    ) -> None:
        self._allocate = allocate
        super().__init__(device, grad, report, communicator)

    def update(self, apply: ir.Model) -> ir.Model:
        names = [name for _, buffers in self._sums for name in buffers.values]
        return part_of_update(apply, names, self._communicator.rank, self._communicator.size)

    def agree(self, is_finite: bool) -> bool:
        return not self._communicator.any(not is_finite)[0]  # and all have read the gradients

    def average(self, stages: Iterable[Reported], rows: int) -> Reported:
        reported = super().average(stages, rows)
        self._communicator.wait()
        return reported

    def _buffers(self, outputs: Sequence[ir.Value]) -> SummedBuffers:
        each = [SummedBuffers(self._device, outputs, self._allocate) for _ in range(self._communicator.size)]
        for rank, buffers in enumerate(each):
            self.fixed |= {of_worker(name, rank): x for name, x in buffers.values.items()}
        own = each[self._communicator.rank]
        self.fixed |= own.values
        return own

    def _reduce(self, array: np.ndarray) -> None: ...

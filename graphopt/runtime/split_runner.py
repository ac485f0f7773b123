"""Run a training step in two halves, between which workers average their gradients."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError
from graphopt.graph.memory import bytes_of
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.names import FIRST_ROW, ROWS, SHARE, of_worker
from graphopt.graph.roles import Role, role_of
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.device import Device
from graphopt.runtime.reported_outputs import numbers, reporting
from graphopt.runtime.session import Session
from graphopt.runtime.shared_update import part_of_update
from graphopt.runtime.staged_runner import StagedRunner
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.summed_buffers import SummedBuffers
from graphopt.runtime.tensors import Allocate, Tensor, buffer, rows_of

BUCKET = 2**20  # bytes of gradients to sum before the others are known; a sum of less is mostly waiting


class SplitRunner:
    """Run the half `grad` on a worker's rows, average over all workers, and run the half `apply`.

    Gradients of one type lie in one buffer, which both halves are bound to, or in several if sums overlap with `grad`.

    Args:
        grad: computes the loss, gradients and the weight of a batch, in stages.
        apply: computes the new state.
        buffers: the buffers of the state.
        report: the outputs to return.
        communicator: the workers.
        allocate: returns memory that all workers share, in which their state lies, too. Each worker then computes a
            part of the new state, from the gradients of all, where they lie. None if workers sum their gradients, and
            each updates a copy of the state.
        overlap: whether a thread sums the gradients of a stage of `grad` while the next ones run.
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
        overlap: bool = False,
        static_shapes: bool = False,
        as_numpy: bool = True,
        in_place: bool = False,
    ) -> None:
        self._device, self._report, self._communicator = device, list(report), communicator
        self._is_shared = allocate is not None
        outputs = [y for stage in grad for y in stage.graph.outputs]
        self._is_sum = any(y.name == ROWS and BATCH_WEIGHT.read(y) == "sum" for y in outputs)
        self._losses = {str(y.name) for y in outputs if role_of(y) is Role.LOSS} if self._is_sum else set()
        self._means = numbers(outputs, report)
        self._weighed = max(  # the stage after which the numbers are known that are averaged
            i for i, one in enumerate(grad) if any(y.name in {ROWS, *self._means} for y in one.graph.outputs)
        )
        beside = communicator.beside() if overlap and device.on_cpu and not allocate else None
        self._summing = beside or communicator
        self._thread = ThreadPoolExecutor(1) if beside else None
        self._pending: list[Future[None]] = []
        fixed: dict[str, Tensor] = {}
        self._met: list[tuple[int, Role, SummedBuffers]] = []
        for stage, role, met in self._meetings(grad):
            if allocate:
                each = [SummedBuffers(device, met, allocate) for _ in range(communicator.size)]
                own = each[communicator.rank]
                for rank, one in enumerate(each):
                    fixed |= {of_worker(name, rank): x for name, x in one.values.items()}
            else:
                own = SummedBuffers(device, met)
            self._met.append((stage, role, own))
            fixed |= own.values
        if allocate:
            names = [name for _, _, buffers in self._met for name in buffers.values]
            apply = part_of_update(apply, names, communicator.rank, communicator.size)
        self._first_row = buffer(device, np.zeros((), np.int32))
        self._has_positions = any(x.name == FIRST_ROW for stage in grad for x in stage.graph.inputs)
        self._share = 1.0 if self._is_sum else 1 / communicator.size
        share = buffer(device, np.array(self._share, np.float32))
        fixed |= {FIRST_ROW: self._first_row, SHARE: share}
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
                verified=False,  # all workers update in the same form
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
        for stage, found in enumerate(self._grad.run(source, feeds) if rows else self._grad.skip()):
            reported |= found
            if stage == self._weighed:
                self._exchange(functools.partial(self._average, reported))
            for after, role, buffers in self._met:
                if after == stage:
                    self._exchange(functools.partial(self._sum, role, buffers, rows))
        while self._pending:
            self._pending.pop(0).result()
        if self._is_shared:
            self._communicator.wait()
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

    def _meetings(self, grad: Sequence[ir.Model]) -> Iterator[tuple[int, Role, list[ir.Value]]]:
        """Yield the stages after which workers sum, the role of what they sum, and the values."""
        gradients: list[ir.Value] = []
        for i, stage in enumerate(grad):
            gradients += [y for y in stage.graph.outputs if role_of(y) is Role.GRADIENT]
            is_large = sum(map(bytes_of, gradients)) >= BUCKET
            if i == len(grad) - 1 or (self._thread and is_large and i >= self._weighed):
                yield i, Role.GRADIENT, gradients
                gradients = []
        outputs = [y for stage in grad for y in stage.graph.outputs]
        statistics = [y for y in outputs if role_of(y) is Role.SAVED]
        yield len(grad) - 1, Role.SAVED, statistics

    def _exchange(self, work: Callable[[], None]) -> None:
        """Exchange numbers with the other workers: now, or in a thread, in the order of the calls."""
        if self._thread:
            self._pending.append(self._thread.submit(work))
        else:
            work()

    def _average(self, reported: Reported) -> None:
        """Replace numbers by their means over all workers, weighted by their batches, and learn the weight of all."""
        weight = reported.pop(ROWS)
        factors = [1.0 if name in self._losses else weight for name in self._means]
        numbers = [factor * reported[name] for factor, name in zip(factors, self._means, strict=True)]
        totals = np.array([weight, *numbers], np.float64)
        self._summing.sum(totals)
        total = totals[0] or 1.0
        for name, number in zip(self._means, totals[1:], strict=True):
            reported[name] = float(number if name in self._losses else number / total)
        self._part = weight / total

    def _sum(self, role: Role, buffers: SummedBuffers, rows: int) -> None:
        """Weigh what this worker has computed by its batch, and sum it over all workers unless they share memory."""
        is_sum = self._is_sum and role is Role.GRADIENT
        scale = 1.0 if is_sum else self._part / self._share
        with buffers.flat() as arrays:
            for flat in arrays:
                if not rows:
                    flat[...] = 0
                elif scale != 1:
                    np.multiply(flat, flat.dtype.type(scale), out=flat)
                if not self._is_shared:
                    self._summing.sum(flat)

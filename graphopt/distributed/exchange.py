"""Average the numbers, gradients and statistics of all workers' rows."""

from __future__ import annotations

import functools
import math
import sys
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.communicator import SINGLE, Communicator
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import BATCH_WEIGHT
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.state import owners
from graphopt.graph.values import FIRST_ROW, ROWS, SHARE, dtype_of, name_of, of_worker, redirect, state_of
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.device import Device
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.providers import for_workers
from graphopt.runtime.signature import numbers
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import SUMMED, Allocate, Tensor, allocated, buffer, buffers, zeros_of


@dataclass(frozen=True, kw_only=True, eq=False)
class WorkerOptions(ExecutorOptions):
    """Declare the options of an executor with several workers."""

    communicator: Communicator = SINGLE

    def opened(self) -> Device:
        device = super().opened()
        if not device.machine.takes_workers and self.communicator.size > 1:
            raise GraphoptError(
                f"device: expected {for_workers()} for {self.communicator.size} workers, found {device.kind}: train "
                f"with one"
            )
        return device


class SummedBuffers:
    """Hold a buffer for each of some outputs of a graph, by name; on the CPU, those of one type lie in one array."""

    def __init__(self, device: Device, outputs: Iterable[ir.Value], allocate: Allocate = allocated) -> None:
        self.values, self._flat = buffers(device, {name_of(y): zeros_of(y) for y in outputs}, allocate)

    def sum(self, reduce: Callable[[np.ndarray], None], scale: float = 1.0) -> None:
        """Multiply all buffers by a number, and sum them over the workers by `reduce`."""
        for array in (arrays := self._flat or [value.numpy().ravel() for value in self.values.values()]):
            if not scale:
                array[...] = 0
            elif scale != 1:
                np.multiply(array, array.dtype.type(scale), out=array)
            reduce(array)
        if not self._flat:
            for value, array in zip(self.values.values(), arrays, strict=True):
                value.update_inplace(array.reshape(value.shape()))


class SharedBuffers(StateBuffers):
    """Hold a state that all workers of one machine read and write where it lies."""

    def __init__(self, device: Device, model: ir.Model, communicator: Communicator) -> None:
        self._communicator = communicator
        super().__init__(device, model, functools.partial(_allocated, communicator))

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays and sys.exc_info()[0] is None:  # after an error, the others may not come
            self._communicator.wait()  # the others may still read the old state
        super().update(arrays)


class Exchange:
    """Average the outputs of the half `grad` over all workers, weighted by their batches; each has copies of the sums.

    Gradients of one type lie in one buffer, which both halves are bound to.

    Attributes:
        fixed: values for inputs and outputs of both halves.

    Args:
        grad: computes the loss, gradients and the weight of a batch, in stages.
        report: the outputs to return.
        allocate: returns the memory of the sums.
    """

    def __init__(
        self,
        device: Device,
        grad: Sequence[ir.Model],
        report: Sequence[str],
        communicator: Communicator,
        allocate: Allocate,
    ) -> None:
        self._device, self._communicator, self._allocate = device, communicator, allocate
        outputs = [y for stage in grad for y in stage.graph.outputs]
        self._is_sum = any(y.name == ROWS and BATCH_WEIGHT.read(y) == "sum" for y in outputs)
        self._losses = {name_of(y) for y in outputs if role_of(y) is Role.LOSS} if self._is_sum else set()
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
            (role, self._buffers([y for y in outputs if role_of(y) is role])) for role in (Role.GRADIENT, Role.SAVED)
        ]

    def update(self, apply: ir.Model) -> ir.Model:
        """Return the part of the half `apply` that this worker computes."""
        return apply

    def agree(self, is_finite: bool) -> bool:
        """Return whether the new state is finite, if this worker has found it to be."""
        return is_finite

    def begin(self, rows: int) -> None:
        """Set the position of this worker's first row, which random masks read, before `grad` runs."""
        if self._has_positions:
            communicator = self._communicator
            counts = np.zeros(communicator.size)
            counts[communicator.rank] = rows
            communicator.sum(counts)
            self._first_row.update_inplace(np.array(counts[: communicator.rank].sum(), np.int32))

    def average(self, stages: Iterable[Reported], rows: int) -> Reported:
        """Run the stages of `grad` on this worker's rows, and return their reports, with means over all workers."""
        reported: Reported = dict.fromkeys([*self._means, ROWS], 0.0)
        for stage, outputs in enumerate(stages):
            reported |= outputs
            if stage == self._weighed:
                self._average(reported)
        for role, sums in self._sums:  # a batch without rows adds nothing
            is_sum = self._is_sum and role is Role.GRADIENT
            sums.sum(self._reduce, rows and (1.0 if is_sum else self._part / self._share))
        return reported

    def _buffers(self, outputs: Sequence[ir.Value]) -> SummedBuffers:
        """Return this worker's buffers for outputs of `grad`."""
        own = SummedBuffers(self._device, outputs, self._allocate)
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

    def _reduce(self, array: np.ndarray) -> None:
        """Sum an array over all workers."""
        self._communicator.sum(array)


class SharedExchange(Exchange):
    """Average in memory that all workers share: each updates a part of the state, from the gradients of all."""

    def update(self, apply: ir.Model) -> ir.Model:
        names = [name for _, sums in self._sums for name in sums.values]
        return part_of_update(apply, names, self._communicator.rank, self._communicator.size)

    def agree(self, is_finite: bool) -> bool:
        return not self._communicator.any(not is_finite)[0]  # and all have read the gradients

    def average(self, stages: Iterable[Reported], rows: int) -> Reported:
        reported = super().average(stages, rows)
        self._communicator.wait()
        return reported

    def _buffers(self, outputs: Sequence[ir.Value]) -> SummedBuffers:
        each = [SummedBuffers(self._device, outputs, self._allocate) for _ in range(self._communicator.size)]
        for rank, sums in enumerate(each):
            self.fixed |= {of_worker(name, rank): x for name, x in sums.values.items()}
        own = each[self._communicator.rank]
        self.fixed |= own.values
        return own

    def _reduce(self, array: np.ndarray) -> None: ...


def _allocated(communicator: Communicator, size: int) -> np.ndarray:
    """Return memory that all workers share."""
    memory = communicator.shared_memory(size)
    if memory is None:
        raise GraphoptError(
            f"share_state: expected {size / 1e6:.0f} MB of memory for the workers together, found less: train with "
            f"one process"
        )
    return memory


def part_of_update(apply: ir.Model, summed: Collection[str], rank: int, workers: int) -> ir.Model:
    """Return the part of the half `apply` that one worker computes.

    It reads `NAME.0`, `NAME.1`, ... of all workers in place of their sum NAME.

    Args:
        summed: the names of the inputs that are sums over all workers.
    """
    part = apply.clone()
    ranks = _ranks(part, workers)
    with Emitter(part) as op:
        for x in [x for x in part.graph.inputs if x.name in summed]:
            each = [ir.Value(name=of_worker(x, other), type=x.type, shape=x.shape) for other in range(workers)]
            part.graph.inputs.remove(x)
            part.graph.inputs.extend(set_role(own, Role.SAVED) for own in each)
            uses, total = list(x.uses()), op.Sum(*each)
            redirect(uses, total)
    part.graph.outputs[:] = [y for y in part.graph.outputs if ranks.get(name_of(y), rank) == rank]
    RemoveUnusedNodesPass()(part)
    part.graph.inputs[:] = [x for x in part.graph.inputs if x.uses()]
    part.graph.sort()
    return part


def _ranks(apply: ir.Model, workers: int) -> dict[str, int]:
    """Return which worker computes each floating-point output: that of a parameter computes its slots, too.

    The largest parameter goes first, each to the worker with the fewest numbers so far.
    """
    parameters = {x.name for x in with_role(apply, Role.PARAMETER)}
    slots = owners(apply.graph)
    groups: dict[str, list[ir.Value]] = {}
    for y in with_role(apply, Role.NEXT):
        if dtype_of(y).numpy() in SUMMED:
            owner = slots.get(state_of(y), "")
            groups.setdefault(owner if owner in parameters else state_of(y), []).append(y)
    loads = [0] * workers
    ranks: dict[str, int] = {}
    sizes = {
        name: sum(math.prod(y.shape.numpy()) for y in group if y.shape is not None) for name, group in groups.items()
    }
    for name in sorted(groups, key=lambda name: (-sizes[name], name)):
        rank = loads.index(min(loads))
        loads[rank] += sizes[name]
        ranks |= {name_of(y): rank for y in groups[name]}
    return ranks

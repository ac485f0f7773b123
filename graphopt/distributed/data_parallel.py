"""Train on all rows of a batch together: each worker computes gradients on its part."""

from __future__ import annotations

import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.communicator import SINGLE, Communicator, digest
from graphopt.compiler import StepHalves
from graphopt.distributed.exchange import Exchange, SharedExchange
from graphopt.distributed.split_runner import SplitRunner
from graphopt.distributed.staged_runner import StagedRunner
from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.graph.loading import load
from graphopt.graph.names import ROWS
from graphopt.graph.state import initial
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.executor_options import ExecutorOptions, keywords_of
from graphopt.runtime.reported_outputs import reporting
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelOptions(ExecutorOptions):
    """Declare the options of `DataParallel`."""

    communicator: Communicator = SINGLE
    share_state: bool = True


class DataParallel(Executor):
    """Run a training step on the rows of several workers, as one process does on all rows.

    Each worker feeds its part of a batch: different numbers of rows, or none, are allowed. All workers average their
    gradients, weighted by rows, or by the sums of weights if the loss is a weighted mean. The losses and metrics that
    a step reports are means over all workers; other outputs are those of a worker's own rows. A single worker runs the
    whole step, as `Executor` does.

    On one machine with Linux, workers on the CPU share one copy of the state, of which each updates a part, from the
    gradients of all, where they lie. Elsewhere, and with `in_place`, they sum their gradients, and each updates its own
    copy. All workers call `update_state`, and each method that changes the state.

    Args:
        step: the halves of a training graph, from `graphopt.split_step`.
        communicator: the workers, such as `graphopt.MPI()`.
        share_state: let workers share one copy of the state; the attribute is False if they cannot.

    Raises:
        GraphoptError: as `Executor` does, or the workers have different graphs, initial states or options.

    >>> import numpy
    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.DataParallel(graphopt.split_step(pipeline, models.linear((1,), 1)))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    [1.0, 0.64, 0.4096]
    """

    Options = DataParallelOptions

    @keywords_of(DataParallelOptions)
    def __init__(self, step: StepHalves, **options: Any) -> None:
        chosen = DataParallelOptions(**options)
        device, model, workers = chosen.opened(), load(step.step), chosen.communicator
        if workers.size == 1:
            self._assemble(chosen, device, model, StateBuffers(device, model), workers=workers)
            return
        _check_alike(step, model, chosen)
        on_host = device.on_cpu and not chosen.in_place
        if chosen.share_state and on_host and workers.shared_memory(1) is not None:
            buffers: StateBuffers = SharedBuffers(device, model, workers)
        else:
            buffers = StateBuffers(device, model)
        runner_of = functools.partial(_split_runner, device, step, buffers, chosen)
        self._assemble(chosen, device, model, buffers, workers=workers, runner_of=runner_of)

    @property
    def share_state(self) -> bool:
        """Return whether the workers share one copy of the state."""
        return isinstance(self._buffers, SharedBuffers)


class SharedBuffers(StateBuffers):
    """Hold a state that all workers of one machine read and write where it lies."""

    def __init__(self, device: Device, model: ir.Model, communicator: Communicator) -> None:
        self._communicator, self.allocate = communicator, functools.partial(_allocated, communicator)
        super().__init__(device, model, self.allocate)

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        if arrays and sys.exc_info()[0] is None:  # after an error, the others may not come
            self._communicator.wait()  # the others may still read the old state
        super().update(arrays)


def _check_alike(step: StepHalves, model: ir.Model, options: DataParallelOptions) -> None:
    """Check that all workers have the same graphs, initial states and options."""
    values = [found.numpy() for x in model.graph.inputs if (found := initial(x)) is not None]
    alike = {"share_state": options.share_state, "in_place": options.in_place}
    options.communicator.check_alike(
        {
            "training graph": ", ".join(map(storage.model_digest, (*step.grad, step.apply))),
            "state": digest(b"".join(array.tobytes() for array in values)),
            "options": ", ".join(f"{name} {value}" for name, value in alike.items()),
        }
    )


def _split_runner(
    device: Device,
    halves: StepHalves,
    buffers: StateBuffers,
    options: DataParallelOptions,
    report: Sequence[str],
) -> SplitRunner:
    """Return the runner of a step in two halves."""
    communicator, parts = options.communicator, (device, halves.grad, report, options.communicator)
    exchange = (
        SharedExchange(*parts, buffers.allocate) if isinstance(buffers, SharedBuffers) else Exchange(*parts)
    )
    apply = exchange.update(halves.apply)
    updates = [name for name in report if name in {y.name for y in apply.graph.outputs}]
    update = functools.partial(
        StepRunner,
        device,
        reporting(apply, updates),
        buffers,
        updates,
        fixed=exchange.fixed,
        as_numpy=options.as_numpy,
        in_place=options.in_place,
        verified=False,  # all workers update in the same form
    )
    # The update comes first, because it may give the state one set of buffers in place of two.
    updater = update(native=True)  # lowered to the machine where there is a compiler
    if not _is_same_for_all(updater, options, isinstance(buffers, SharedBuffers)):
        updater = update(native=False)
    updater.check({})
    outputs = {y.name for stage in halves.grad for y in stage.graph.outputs}
    grad = StagedRunner(
        device,
        halves.grad,
        buffers,
        [*(name for name in report if name in outputs), ROWS],
        communicator,
        fixed=exchange.fixed,
        static_shapes=options.static_shapes or device.cuda_graph,
        as_numpy=options.as_numpy,
    )
    return SplitRunner(grad, exchange, updater, report)


def _is_same_for_all(update: StepRunner, options: DataParallelOptions, is_shared: bool) -> bool:
    """Return whether all workers update in the same form, so that copies of the state stay the same bits."""
    lowered = np.array([float(update.native is True)])
    options.communicator.sum(lowered)  # and all have written the initial state
    if is_shared or lowered.item() in (0, options.communicator.size):
        return True
    if options.in_place:
        raise GraphoptError(
            "in_place: expected a compiler on the machine of each worker, found some without: leave it out"
        )
    return False


def _allocated(communicator: Communicator, size: int) -> np.ndarray:
    """Return memory that all workers share."""
    memory = communicator.shared_memory(size)
    if memory is None:
        raise GraphoptError(
            f"share_state: expected {size / 1e6:.0f} MB of memory for the workers together, found less: train with "
            f"one process"
        )
    return memory

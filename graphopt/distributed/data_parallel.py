"""Train on all rows of a batch together: each worker computes gradients on its part."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from graphopt.communicator import SINGLE, Communicator, digest
from graphopt.compiler import StepHalves
from graphopt.distributed.exchange import SharedBuffers
from graphopt.distributed.split_runner import SplitRunner
from graphopt.graph import storage
from graphopt.graph.loading import load
from graphopt.graph.state import initial
from graphopt.runtime.executor import Executor
from graphopt.runtime.executor_options import ExecutorOptions, keywords_of
from graphopt.runtime.state_buffers import StateBuffers


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
        tensors = [tensor for x in model.graph.inputs if (tensor := initial(x)) is not None]
        workers.check_alike(
            {
                "training graph": ", ".join(map(storage.model_digest, (*step.grad, step.apply))),
                "state": digest(b"".join(tensor.tobytes() for tensor in tensors)),
                "options": f"share_state {chosen.share_state}, in_place {chosen.in_place}",
            }
        )
        on_host = device.on_cpu and not chosen.in_place
        if chosen.share_state and on_host and workers.shared_memory(1) is not None:
            buffers: StateBuffers = SharedBuffers(device, model, workers)
        else:
            buffers = StateBuffers(device, model)
        runner_of = functools.partial(SplitRunner, device, step, buffers, workers)
        self._assemble(chosen, device, model, buffers, workers=workers, runner_of=runner_of)

    @property
    def share_state(self) -> bool:
        """Return whether the workers share one copy of the state."""
        return isinstance(self._buffers, SharedBuffers)

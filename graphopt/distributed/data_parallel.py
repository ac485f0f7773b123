"""Train on all rows of a batch together: each worker computes gradients on its part."""

# No `from __future__ import annotations` here: Python 3.10 cannot resolve an InitVar in a string annotation.

import functools
import sys
from collections.abc import Callable, Mapping
from dataclasses import InitVar, dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.communicator import SINGLE, Communicator, digest
from graphopt.compiler import StepHalves
from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.runtime.executor import Executor
from graphopt.runtime.split_runner import SplitRunner
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import Allocate, allocated


@dataclass(kw_only=True, eq=False, repr=False)
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
        share_state: let workers share one copy of the state; False afterwards if they cannot.

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

    step: InitVar[StepHalves] = field(kw_only=False)
    communicator: Communicator = field(default_factory=lambda: SINGLE)
    share_state: bool = True

    def __post_init__(self, step: StepHalves) -> None:
        self._halves = step
        self.steps_per_call = 1
        super().__post_init__(step.step)

    @property
    def workers(self) -> Communicator:
        return self.communicator

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        if self._shared and arrays and sys.exc_info()[0] is None:  # after an error, the others may not come
            self.communicator.wait()  # the others may still read the old state
        super().update_state(arrays)

    def _buffers_of(self, model: ir.Model) -> StateBuffers:
        self._shared: Allocate | None = None
        communicator, halves = self.communicator, [*self._halves.grad, self._halves.apply]
        if communicator.size > 1:
            options = {
                "share_state": self.share_state,
                "in_place": self.in_place,
                "overlap": self._halves.overlap,
            }
            arrays = [x.const_value.numpy() for x in model.graph.inputs if x.const_value is not None]
            communicator.check_alike(
                {
                    "training graph": ", ".join(map(storage.digest, halves)),
                    "state": digest(b"".join(array.tobytes() for array in arrays)),
                    "options": ", ".join(f"{name} {value}" for name, value in options.items()),
                }
            )
            on_host = self._device.on_cpu and not self.in_place
            if self.share_state and on_host and communicator.shared_memory(1) is not None:
                self._shared = functools.partial(_allocated, communicator)
        self.share_state = self._shared is not None
        return StateBuffers(self._device, model, self._shared or allocated)

    def _runner_of(
        self, runner_of: Callable[[ir.Model], StepRunner], model: ir.Model
    ) -> StepRunner | SplitRunner:
        if self.communicator.size == 1:
            return runner_of(model)
        return SplitRunner(
            self._device,
            self._halves.grad,
            self._halves.apply,
            self._buffers,
            self._report,
            self.communicator,
            allocate=self._shared,
            overlap=self._halves.overlap,
            static_shapes=self.static_shapes or self._device.cuda_graph,
            as_numpy=self.as_numpy,
            in_place=self.in_place,
        )


def _allocated(communicator: Communicator, size: int) -> np.ndarray:
    """Return memory that all workers share."""
    memory = communicator.shared_memory(size)
    if memory is None:
        raise GraphoptError(
            f"share_state: expected {size / 1e6:.0f} MB of memory for the workers together, found less: train with "
            f"one process"
        )
    return memory

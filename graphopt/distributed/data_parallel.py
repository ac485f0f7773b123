"""Train on all rows of a batch together: each worker computes gradients on its part."""

# No `from __future__ import annotations` here: Python 3.10 cannot resolve an InitVar in a string annotation.

from collections.abc import Callable
from dataclasses import InitVar, dataclass, field
from typing import Literal

import onnx_ir as ir

from graphopt.compiler import StepHalves
from graphopt.runtime.communicator import SINGLE, Communicator
from graphopt.runtime.executor import Executor
from graphopt.runtime.split_runner import SplitRunner
from graphopt.runtime.step_runner import StepRunner


@dataclass(kw_only=True, eq=False, repr=False)
class DataParallel(Executor):
    """Run a training step on the rows of several workers, as one process does on all rows.

    Each worker feeds its part of a batch: different numbers of rows, or none, are allowed. All workers average their
    gradients, weighted by rows, or by the sums of weights if the loss is a weighted mean. They then update equal
    copies of the state. The losses and metrics that a step reports are means over all workers; other outputs are
    those of a worker's own rows. A single worker runs the whole step, as `Executor` does.

    BatchNormalization normalizes by the mean and the variance of a worker's own rows. Its running statistics are
    averaged over the workers, or kept by each worker with `statistics="local"`.

    Args:
        step: the halves of a training graph, from `graphopt.split_step`.
        communicator: the workers, such as `graphopt.MPI()`.
        statistics: `synchronized` averages running statistics in each step; with `local`, each worker has its own, and
            the first worker's are saved.

    Raises:
        GraphoptError: as `Executor` does, or the workers have different graphs or versions.

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
    statistics: Literal["synchronized", "local"] = "synchronized"

    def __post_init__(self, step: StepHalves) -> None:
        self._halves = step
        self.steps_per_call = 1
        super().__post_init__(step.step)

    @property
    def workers(self) -> Communicator:
        return self.communicator

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
            average_statistics=self.statistics == "synchronized",
            static_shapes=self.static_shapes or self._device.cuda_graph,
            as_numpy=self.as_numpy,
            in_place=self.in_place,
        )

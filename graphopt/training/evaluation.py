"""Evaluate on rows that do not train: mean losses and metrics."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.communicator import SINGLE, Communicator
from graphopt.data import Batches
from graphopt.data.batches import Rows
from graphopt.data.streams import Stream
from graphopt.graph.roles import Role, role_of
from graphopt.graph.values import name_of
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Record
from graphopt.training.metrics import Wanted
from graphopt.training.metrics import metrics as metrics_of
from graphopt.training.options import Data
from graphopt.training.sources import read_batches
from graphopt.training.workers import evaluated, summed


def evaluate(
    executor: Executor,
    data: Data,
    *,
    metrics: Sequence[Wanted] | None = None,
    batch_size: int = 256,
    allow_nan: bool = False,
) -> dict[str, Any]:
    """Return the loss and the metrics on a data set.

    Args:
        executor: the executor of a training graph.
        data: the data, as in `fit`.
        metrics: the metrics, as in `fit`.
        batch_size: the number of rows per call; batches of an iterable have their own.
        allow_nan: accept data that contains NaN or infinities.

    Raises:
        GraphoptError: the data does not fit the model, or a metric is wrong.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> sorted(graphopt.evaluate(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, metrics=["r2", "rmse"]))
    ['loss', 'r2', 'rmse']
    """
    metrics_of(executor.inputs, metrics)  # raises an error if one is wrong
    return HeldOut(read_batches(data, executor, allow_nan), batch_size, metrics).measure(executor)


def reported(step: ir.Model) -> list[str]:
    """Return the names of the outputs that go into a record: losses, metrics and diagnostics."""
    roles = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC)
    return [name_of(value) for value in step.graph.outputs if role_of(value) in roles]


@dataclass
class Mean:
    """Sum numbers up over rows, and keep the last learning rate."""

    rows: int = 0
    sums: dict[str, float] = field(default_factory=dict)
    rate: float | None = None

    def add(self, rows: int, values: Mapping[str, Any]) -> None:
        self.rows += rows
        for name, value in values.items():
            if isinstance(value, float):
                self.sums[name] = self.sums.get(name, 0.0) + rows * value
        if rows:
            self.rate = values.get("learning_rate")

    def result(self, communicator: Communicator = SINGLE) -> Record:
        """Return the mean of each number over the rows of all workers, and the last learning rate."""
        rows, sums = summed(communicator, self.rows, self.sums)
        means: Record = {name: value / rows for name, value in sums.items()}
        if "learning_rate" in means:
            means["learning_rate"] = self.rate
        return means


class HeldOut:
    """Hold rows out of training and evaluate them."""

    def __init__(
        self,
        batches: Batches | Stream,
        batch_size: int,
        metrics: Sequence[Wanted] | None,
        rows: Rows | None = None,
    ) -> None:
        self._metrics = metrics
        self.count: int | None = None  # an iterable does not tell
        self._feeds: Callable[[], Iterable[dict[str, np.ndarray]]]
        if isinstance(batches, Stream):
            self._feeds = lambda: (drawn.arrays for drawn in batches)
        else:
            chosen = range(len(batches)) if rows is None else rows
            self.count = len(chosen)
            self._feeds = lambda: map(batches.take, Batches.split(chosen, batch_size))

    def evaluated(self, executor: Executor) -> Iterator[tuple[dict[str, np.ndarray], Mapping[str, Any]]]:
        """Yield the data and the evaluation of each batch."""
        for feeds in self._feeds():
            yield feeds, executor.evaluate(feeds)

    def measure(self, executor: Executor) -> Record:
        """Return the mean losses and the metrics over the rows."""
        chosen = metrics_of(executor.inputs, self._metrics)
        mean = Mean()
        for feeds, values in evaluated(executor.workers, self._feeds(), executor.evaluate):
            for target, (output, metric) in chosen.items():
                metric.add(values[output], feeds[target])
            mean.add(len(next(iter(feeds.values()))), values)
        measured = mean.result()
        for target, (_, metric) in chosen.items():
            prefix = "" if len(chosen) == 1 else f"{target}."
            measured |= {f"{prefix}{name}": value for name, value in metric.result().items()}
        return measured

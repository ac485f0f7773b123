"""Train on a data set: epochs of batches, and validation."""

from __future__ import annotations

import contextlib
import math
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np
import onnx_ir as ir

from graphopt.data import Batches, Dataset
from graphopt.data.batches import Rows
from graphopt.data.loader import Shuffle, draw
from graphopt.data.prefetch import prefetched
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, role_of
from graphopt.runtime.executor import Executor
from graphopt.runtime.tensors import Tensor
from graphopt.training.metrics import metrics

AHEAD = 2  # batches that are prefetched
SLOWEST = 1e-6  # the learning rate below which `Adaptive` does not divide it

Record = dict[str, Any]
Data = Dataset | Mapping[str, np.ndarray]


class Observer(Protocol):
    """Watch a training run: `start` is called once, `step` after each step and `epoch` after each epoch.

    During `step`, the executor has the state after exactly this step, and can save it. An observer that does not read
    the state sets its attribute `reads_state` to False. If all observers do so, several steps may run in one call
    before the first one is observed.
    """

    def start(self, *, epochs: int, steps: int, rows: int, validation_rows: int) -> None: ...

    def step(self, record: Record) -> None: ...

    def epoch(self, record: Record) -> None: ...


def fit(
    executor: Executor,
    data: Data,
    *,
    epochs: int = 20,
    batch_size: int = 32,
    shuffle: Shuffle = True,
    seed: int = 0,
    validation: float | Data | None = 0.2,
    validation_every: int = 1,
    allow_nan: bool = False,
    prefetch: int | None = None,
    observers: Sequence[Observer] = (),
) -> list[Record]:
    """Train on all batches of a data set, and return a record per epoch.

    A record has the epoch, the number of steps so far, the mean of each reported number over the epoch, the
    `learning_rate`, `validation_loss` and metrics of held-out rows, `seconds` and `samples_per_second`.

    The order of rows in an epoch depends only on the seed and on the number of epochs so far. Two epochs, followed by
    `executor.save`, `load` and two more epochs, therefore give the same bits as four epochs.

    Args:
        executor: the executor of a training graph.
        data: a data set, or arrays named like the model's inputs, and `target`.
        epochs: the number of times to train on all rows.
        batch_size: the number of rows of a batch; the last batch of an epoch may have fewer.
        shuffle: True to draw the held-out rows and the order of each epoch; `consecutive` to draw the order of
            batches of neighbouring rows; False to keep the order of the rows and hold out the last ones.
        seed: the seed of what is drawn.
        validation: the share of rows to hold out, another data set, or None.
        validation_every: the number of epochs from one validation to the next; the last epoch is always validated.
        allow_nan: train on data that contains NaN or infinities.
        prefetch: the number of batches that a thread prepares while steps run; None for 2 with memory-mapped data or
            on a GPU, and 0 otherwise.
        observers: objects that watch the run, such as a display; see `graphopt.training.fit.Observer`.

    Raises:
        GraphoptError: the data does not fit the model, or an option is wrong.
        NonFiniteLoss: the loss is infinite or not a number.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> records = graphopt.fit(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, epochs=50, batch_size=10)
    >>> len(records), records[-1]["validation_loss"] < 1e-3
    (50, True)
    """
    if epochs < 1:
        raise GraphoptError(f"epochs: expected 1 or more, found {epochs}")
    if shuffle not in (True, False, "consecutive"):
        raise GraphoptError(f"shuffle: expected True, False or 'consecutive', found {shuffle!r}")
    if validation_every < 1:
        raise GraphoptError(f"validation_every: expected 1 or more, found {validation_every}")
    if seed < 0:
        raise GraphoptError(f"seed: expected 0 or more, found {seed}")
    if "loss" not in executor.reported:
        raise GraphoptError(
            "report: expected an executor that reports its loss, found an empty report: leave it out"
        )
    batches = Batches(data, executor.inputs, allow_nan=allow_nan)
    held_out = None
    rows: Rows = range(len(batches))
    if isinstance(validation, Mapping | Dataset):
        held_out = _HeldOut(Batches(validation, executor.inputs, allow_nan=allow_nan))
    elif validation:
        count = held_out_rows(len(batches), validation)
        chosen = np.random.default_rng(seed).permutation(len(batches))[:count]
        order = np.sort(chosen) if shuffle else rows[len(rows) - count :]
        held_out = _HeldOut(batches, order)
        rows = np.delete(np.arange(len(batches)), order) if shuffle else rows[: len(rows) - count]
    if prefetch is None:
        prefetch = AHEAD if batches.memory_mapped or executor.device != "cpu" else 0
    elif prefetch < 0:
        raise GraphoptError(f"prefetch: expected 0 or more batches, or None, found {prefetch}")
    _check_sizes(batches.fixed_size, batch_size, [rows, held_out.rows if held_out else rows])
    for observer in observers:
        observer.start(
            epochs=epochs,
            steps=epochs * math.ceil(len(rows) / batch_size),
            rows=len(rows),
            validation_rows=len(held_out.rows) if held_out else 0,
        )
    records = []
    before = round(executor.batches / math.ceil(len(rows) / batch_size))  # epochs in previous calls
    for epoch in range(1, epochs + 1):
        start = time.perf_counter()
        drawn = draw(rows, batch_size, shuffle, np.random.default_rng([seed, before + epoch]))
        record = _mean(_steps(executor, batches, drawn, prefetch, observers, epoch))
        seconds = time.perf_counter() - start
        record = {"epoch": epoch, "step": executor.batches, **record}
        if held_out is not None and (epoch % validation_every == 0 or epoch == epochs):
            measured = held_out.measure(executor, batch_size)
            record |= {"validation_loss": measured.pop("data_loss", measured["loss"])}
            record |= {name: value for name, value in measured.items() if name not in record}
        record |= {"seconds": seconds, "samples_per_second": len(rows) / seconds}
        records.append(record)
        for observer in observers:
            observer.epoch(record)
    return records


class Adaptive:
    """Divide the learning rate by 5 if the loss has not fallen for several epochs. This is an observer for `fit`.

    scikit-learn's schedule `adaptive` ends training once the rate falls below 1e-6. This one keeps the rate instead.

    Args:
        executor: the executor whose `learning_rate` is set; its graph has no schedule.
        patience: the number of consecutive epochs.
        tolerance: the amount by which the mean loss of an epoch has to be less than the least loss so far.
    """

    reads_state = False

    def __init__(self, executor: Executor, *, patience: int = 5, tolerance: float = 1e-3) -> None:
        self._executor, self._patience, self._tolerance = executor, patience, tolerance
        self._least, self._waited = math.inf, 0

    def start(self, **_: int) -> None: ...

    def step(self, record: Record) -> None: ...

    def epoch(self, record: Record) -> None:
        """Compare the loss of an epoch with the least loss so far."""
        self._waited = self._waited + 1 if record["loss"] > self._least - self._tolerance else 0
        self._least = min(self._least, record["loss"])
        if self._waited >= self._patience and self._executor.learning_rate > SLOWEST:
            self._executor.learning_rate /= 5
            self._waited = 0


def evaluate(
    executor: Executor, data: Data, *, batch_size: int = 256, allow_nan: bool = False
) -> dict[str, float]:
    """Return the loss and the metrics on a data set: the accuracy, or R2 and the mean absolute error.

    Args:
        executor: the executor of a training graph.
        data: a data set, or arrays named like the model's inputs, and `target`.
        batch_size: the number of rows per call.
        allow_nan: accept data that contains NaN or infinities.

    Raises:
        GraphoptError: the data does not fit the model.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> sorted(graphopt.evaluate(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}))
    ['loss', 'mae', 'r2']
    """
    return _HeldOut(Batches(data, executor.inputs, allow_nan=allow_nan)).measure(executor, batch_size)


def held_out_rows(rows: int, share: float) -> int:
    """Return the number of rows to hold out for validation.

    Raises:
        GraphoptError: the share is not in [0, 1), or leaves no row to train on.
    """
    if not 0 <= share < 1:
        raise GraphoptError(
            f"validation: expected a share of the rows, at least 0 and less than 1, found {share}"
        )
    count = math.ceil(rows * share)
    if count >= rows:
        raise GraphoptError(
            f"validation: expected a share that leaves rows to train on, found {share} of {rows} rows"
        )
    return count


def reported(step: ir.Model) -> list[str]:
    """Return the names of the outputs that go into a record: losses, metrics and diagnostics."""
    roles = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC)
    return [str(value.name) for value in step.graph.outputs if role_of(value) in roles]


class _HeldOut:
    """Hold rows out of training and evaluate them."""

    def __init__(self, batches: Batches, rows: Rows | None = None) -> None:
        self.rows: Rows = range(len(batches)) if rows is None else rows
        self._batches = batches

    def measure(self, executor: Executor, batch_size: int) -> dict[str, float]:
        """Return the mean losses and the metrics over the rows."""
        chosen = metrics(executor.inputs)

        def losses() -> Iterator[tuple[int, Record]]:
            for rows in Batches.split(self.rows, batch_size):
                feeds = self._batches.take(rows)
                values = executor.evaluate(feeds)
                for target, (output, metric) in chosen.items():
                    metric.add(values[output], feeds[target])
                yield len(rows), {name: value for name, value in values.items() if isinstance(value, float)}

        measured = _mean(losses())
        for target, (_, metric) in chosen.items():
            prefix = "" if len(chosen) == 1 else f"{target}."
            measured |= {f"{prefix}{name}": value for name, value in metric.result().items()}
        return measured


def _steps(
    executor: Executor,
    batches: Batches,
    order: Iterable[Rows],
    prefetch: int,
    observers: Sequence[Observer],
    epoch: int,
) -> Iterator[tuple[int, Record]]:
    drawn: deque[int] = deque()  # the sizes of batches whose results are pending

    def feeds() -> Iterator[dict[str, Tensor]]:
        for rows in order:
            if isinstance(rows, np.ndarray):
                rows.sort()  # read memory-mapped rows in the file's order
            drawn.append(len(rows))
            yield executor.on_device(batches.take(rows))

    step = executor.batches
    one_by_one = any(getattr(observer, "reads_state", True) for observer in observers)
    with contextlib.closing(prefetched(feeds(), prefetch)) as ahead:
        for values in executor.iterate(ahead, steps_per_call=1 if one_by_one else None):
            step += 1
            rows = drawn.popleft()
            values.setdefault("learning_rate", executor.hyperparameters.get("learning_rate"))
            for observer in observers:
                observer.step({"epoch": epoch, "step": step, "rows": rows, **values})
            yield rows, values


def _mean(measured: Iterator[tuple[int, Record]]) -> Record:
    """Return the mean of each number, weighted by rows, and the last learning rate."""
    total = 0
    sums: dict[str, float] = {}
    last: Record = {}
    for rows, values in measured:
        total += rows
        last = values
        for name, value in values.items():
            if isinstance(value, float):
                sums[name] = sums.get(name, 0.0) + rows * value
    means: Record = {name: value / total for name, value in sums.items()}
    if "learning_rate" in means:
        means["learning_rate"] = last["learning_rate"]
    return means


def _check_sizes(fixed: int | None, batch_size: int, parts: Sequence[Rows]) -> None:
    if batch_size < 1:
        raise GraphoptError(f"batch_size: expected 1 or more, found {batch_size}")
    if fixed is not None and (batch_size != fixed or any(len(rows) % fixed for rows in parts)):
        raise GraphoptError(
            f"batch_size: expected {fixed}, the batch of the model, and a multiple of it as number of rows, found "
            f"batch_size={batch_size} and {' and '.join(str(len(rows)) for rows in parts)} rows: export the model with "
            f"a dynamic batch"
        )

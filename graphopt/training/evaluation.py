"""Compute mean losses, metrics and outputs on rows that do not train."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors.numpy

from graphopt.arguments import checked
from graphopt.communicator import SINGLE, Communicator
from graphopt.compiler import Steps, standard
from graphopt.data import Batches, Columns, Dataset
from graphopt.data.foreign import as_columns, as_dataset, features_of, has_rows, relabelled
from graphopt.data.loader import Rows
from graphopt.data.streams import Stream
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.classified import Derived, classes_of, classification_of, labels_in
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import FED, Role, role_of, set_role, with_role
from graphopt.graph.state import NORMS
from graphopt.graph.values import name_of
from graphopt.runtime.checkpoint import state_bytes
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.session import Session
from graphopt.training.callbacks.callback import Outputs, Record
from graphopt.training.metrics import Wanted, listed
from graphopt.training.metrics import metrics as metrics_of
from graphopt.training.options import Data
from graphopt.training.sources import read_batches

_Compute = Callable[[dict[str, np.ndarray]], Outputs]
_POSITION = "graphopt.position"  # of a batch, beside what its evaluation returns


@checked("give X and y as one tuple, evaluate(executor, (X, y)), and name the options")
def evaluate(
    executor: Executor,
    data: Data,
    *,
    metrics: Wanted | Sequence[Wanted] | None = None,
    batch_size: int = 256,
    allow_nan: bool = False,
) -> dict[str, Any]:
    """Return the loss and the metrics on a data set.

    A loss that is a weighted mean is averaged over all rows, whatever `batch_size` is. A sum, several losses with
    weights of their own, and what is reported beside a loss, are averaged over batches, weighted by their rows.

    Args:
        executor: the executor of a training graph.
        data: the data, as in `fit`.
        metrics: the metrics, as in `fit`.
        batch_size: the number of rows per call; batches of an iterable have their own.
        allow_nan: accept data that contains NaN or infinities.

    Raises:
        GraphoptError: the data does not fit the model, or a metric is wrong.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> sorted(graphopt.evaluate(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, metrics=["r2", "rmse"]))
    ['loss', 'r2', 'rmse']
    """
    check_executor("evaluate", executor, data)
    check_batch_size("evaluate", batch_size)
    if has_rows(data):
        data = relabelled(as_dataset(data, executor.inputs), executor.labels, "data")
    return HeldOut(read_batches(data, executor, allow_nan), batch_size, listed(metrics)).measure(executor)


def check_executor(name: str, executor: object, data: object) -> None:
    """Raise an error unless a function, which `name` calls, has an executor and something else as data."""
    if isinstance(executor, Executor) and not isinstance(data, Executor):
        return
    mend = f"write {name}(graphopt.Executor(step), data), where step = graphopt.compile(model, loss=..., optimizer=...)"
    if isinstance(data, Executor):
        mend = f"write {name}(executor, data)"
    raise GraphoptError(f"{name}: expected an executor first, found {kind_of(executor)}: {mend}")


def check_batch_size(name: str, size: object) -> None:
    """Raise an error unless a batch size is a whole number of 1 or more."""
    if not isinstance(size, int | np.integer) or size < 1:
        raise GraphoptError(f"{name}(batch_size={size!r}): expected a whole number of 1 or more, found {size!r}")


@checked()
def predict(
    model: Executor | Source,
    data: Any,
    *,
    batch_size: int = 256,
    allow_nan: bool = False,
    device: str | Device | None = None,
) -> dict[str, np.ndarray]:
    """Return the outputs of a model on all rows of a data set, by name. Targets and weights in the data are ignored.

    For a model that has been trained to classify rows, and has no such outputs of its own, there are also `label`, the
    names or the numbers of the classes, and `probabilities`, if the loss knows them.

    Args:
        model: an executor, which computes with its current weights, or an inference model.
        data: data with rows, as in `fit`, or only X, which feeds the only input; a table, for a model that takes its
            columns, `graphopt.data.Columns.before`.
        batch_size: the number of rows per call; a model with a fixed batch uses its own.
        allow_nan: accept data that contains NaN or infinities.
        device: where to compute with a model; by default, the CPU. An executor has its own.

    Raises:
        GraphoptError: the data does not fit the model, or an output does not have a row for each row of data.

    >>> X = numpy.zeros((1000, 2), numpy.float32)
    >>> graphopt.predict(models.linear((2,), 3), X)["y"].shape
    (1000, 3)
    """
    check_batch_size("predict", batch_size)
    if isinstance(data, Executor | ir.Model):
        raise GraphoptError("predict: expected a model first, found data: write predict(executor, X)")
    device = Device(device) if isinstance(device, str) else device
    model = model if isinstance(model, Executor) else load(model)
    inputs, compute = _outputs_of(model, device)
    columns = None if isinstance(model, Executor) else Columns.taken_by(model)
    if columns is None:
        chosen = features_of(data, inputs)
    else:
        table = data[0] if isinstance(data, tuple) and data else data  # (X, y)
        table = (table.table or table.arrays) if isinstance(table, Dataset) else as_columns(table)
        chosen, allow_nan = Dataset(columns.inputs(table)), True
    if set(inputs) <= set(chosen.arrays):  # a data set may have arrays for other models, too
        arrays = {name: chosen.arrays[name] for name in inputs}
        chosen = Dataset(arrays, table=chosen.table, source=chosen.source, cells_of=chosen.cells_of)
    outputs = by_batches(compute, Batches(chosen, inputs, allow_nan=allow_nan), batch_size)
    graph, labels = (model.model, model.labels) if isinstance(model, Executor) else (model, labels_in(model))
    spec = classification_of(graph)
    if spec is None or spec.output not in outputs or outputs[spec.output].dtype.kind != "f":
        return outputs
    return {**outputs, **classes_of(outputs[spec.output], spec, labels), **outputs}


@checked()
def example_norms(
    model: Source,
    data: Data,
    loss: Steps,
    *,
    batch_size: int = 256,
    allow_nan: bool = False,
    device: str | Device | None = None,
) -> np.ndarray:
    """Return the norm of the gradient of each row's loss by all weights of the model together [rows].

    It is large for hard, mislabelled and rare rows. Dropout and BatchNormalization work as in inference. The step of a
    training, `passes.ExampleNorms`, takes only the parameters that train, such as those of an adapter.

    Args:
        model: an inference model, trained.
        data: data with rows and targets, as in `fit`.
        loss: the loss, as `passes.CrossEntropy()`.
        batch_size, allow_nan, device: as in `predict`.

    Raises:
        GraphoptError: the data does not fit the model, or gradients of rows are refused, as by
            `passes.PrivateGradient`.

    >>> rows = {"x": numpy.eye(4, dtype=numpy.float32), "target": numpy.arange(4) % 3}
    >>> graphopt.example_norms(models.mlp((4,), 3), rows, passes.CrossEntropy()).shape
    (4,)
    """
    import passes

    check_batch_size("example_norms", batch_size)
    device = Device(device) if isinstance(device, str) else device
    loaded = load(model)
    graph = standard(loss=loss, training=None, gradient=passes.ExampleNorms())(loaded)
    for y in [y for y in graph.graph.outputs if y.name != NORMS]:
        graph.graph.outputs.remove(y)
    inputs = {name_of(x): x for x in with_role(graph, *FED)}
    data = relabelled(as_dataset(data, inputs), labels_in(loaded), "data")
    batches = Batches(data, inputs, allow_nan=allow_nan)
    return by_batches(Session(device or Device(), graph).compute_arrays, batches, batch_size)[NORMS]


def by_batches(compute: _Compute, batches: Batches, batch_size: int) -> dict[str, np.ndarray]:
    """Return the outputs of a function for all rows, by name; a fixed batch is filled up.

    Raises:
        GraphoptError: an array does not have a row for each row of data.
    """
    size = batches.fixed_size or batch_size
    parts: dict[str, list[np.ndarray]] = {}
    for rows in Batches.split(np.arange(len(batches)), size):
        filled = np.resize(rows, size) if batches.fixed_size else rows
        for name, array in compute(batches.take(filled)).items():
            if np.ndim(array) == 0 or len(array) != len(filled):
                raise GraphoptError(
                    f"output {name!r}: expected a row for each of {len(filled)} rows of data, found shape "
                    f"{list(np.shape(array))}"
                )
            parts.setdefault(name, []).append(array[: len(rows)])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}


def _outputs_of(model: Executor | ir.Model, device: Device | None) -> tuple[dict[str, ir.Value], _Compute]:
    """Return the inputs of a model, and the function that computes its outputs."""
    if isinstance(model, Executor):
        if device is not None:
            raise GraphoptError(f"device: expected none beside an executor, found {device.name!r}: leave it out")
        executor = model
        inputs = {name: x for name, x in executor.inputs.items() if role_of(x) is Role.DATA}
        return inputs, lambda batch: {name: np.asarray(y) for name, y in executor.predict(batch).items()}
    if with_role(model, Role.NEXT):
        raise GraphoptError(
            "predict: expected an inference model or an executor, found a training graph: write "
            "predict(graphopt.Executor(step), data)"
        )
    weights = model.graph.initializers
    inputs = {name_of(x): set_role(x, Role.DATA) for x in model.graph.inputs if x.name not in weights}
    return inputs, Session(device or Device(), model).compute_arrays


def reported(step: ir.Model) -> list[str]:
    """Return the names of the outputs that go into a record: losses, metrics and diagnostics."""
    roles = (Role.LOSS, Role.METRIC, Role.DIAGNOSTIC)
    return [name_of(value) for value in step.graph.outputs if role_of(value) in roles]


@dataclass
class Mean:
    """Sum numbers up over rows, or over the weights of a loss, and keep the last learning rate."""

    rows: float = 0
    sums: dict[str, float] = field(default_factory=dict)
    rate: float | None = None

    def add(self, rows: float, values: Outputs) -> None:
        self.rows += rows
        for name, value in values.items():
            if isinstance(value, float):
                self.sums[name] = self.sums.get(name, 0.0) + rows * value
        if rows:
            self.rate = values.get("learning_rate")

    def result(self, communicator: Communicator = SINGLE) -> Record:
        """Return the mean of each number over the rows or the weights of all workers, and the last learning rate."""
        totals = np.array([self.rows, *self.sums.values()], np.float64)
        communicator.sum(totals)  # all workers have the same names
        means: Record = dict(zip(self.sums, (totals[1:] / (totals[0] or 1)).tolist(), strict=True))
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
        self._metrics, self.rows = metrics, rows
        self.count: int | None = None  # an iterable does not tell
        self.table: Mapping[str, np.ndarray] = {}  # the cells that the rows are made of, with those of other rows
        self._feeds: Callable[[], Iterable[dict[str, np.ndarray]]]
        if isinstance(batches, Stream):
            self._feeds = lambda: (drawn.arrays for drawn in batches)
        else:
            chosen = range(len(batches)) if rows is None else rows
            self.count, self.table = len(chosen), batches.data.table
            self._feeds = lambda: map(batches.take, Batches.split(chosen, batch_size))

    def evaluated(
        self, executor: Executor, workers: Communicator = SINGLE, *, outputs: bool = True, weights: bool = False
    ) -> Iterator[tuple[dict[str, np.ndarray], Outputs]]:
        """Yield the data and the evaluation of each batch; the workers evaluate different batches at the same time.

        Without `outputs`, it consists of the losses only; with `weights`, those of the loss's mean are beside them.
        """
        compute: _Compute = executor.evaluate if outputs else executor.losses
        if weights:
            compute = functools.partial(executor.with_weights, outputs=outputs)
        left = iter(self._feeds())
        while group := list(itertools.islice(left, workers.size)):
            own = workers.rank
            values: Mapping[int, Outputs] = {own: compute(group[own])} if own < len(group) else {}
            if workers.size > 1:
                values = _exchanged(workers, values)
            yield from ((group[i], value) for i, value in values.items())
            lost = [batch for i, batch in enumerate(group) if i not in values]  # with a worker that has died
            left = itertools.chain(lost, left)

    def measure(self, executor: Executor) -> Record:
        """Return the mean losses and the metrics over the rows.

        The mean of a loss with weights is that of all rows, in however many batches. Several losses that have weights
        of their own, and what else a step reports, are means of those of batches by their rows.
        """
        weighing = executor.loss_weights
        chosen = metrics_of(executor.inputs, self._metrics, by_losses=weighing is not None)
        losses = {"loss", "data_loss", *(f"loss_{output}" for output, _ in chosen.values())}
        by_rows, by_weights = Mean(), Mean()
        outputs = any(not metric.is_empty for _, metric in chosen.values())
        is_only = executor.has_one_loss
        if not is_only and not any(metric.is_shifted for _, metric in chosen.values()):
            weighing = None
        is_computed = weighing is not None and weighing not in executor.inputs
        derived = {name: Derived.all(executor.model, name) for name, _ in chosen.values()}
        for feeds, values in self.evaluated(executor, executor.workers, outputs=outputs, weights=is_computed):
            weights = None if weighing is None else np.asarray((values if is_computed else feeds)[weighing])
            for target, (output, metric) in chosen.items():
                if outputs:
                    beside = {kind: values[name_of(y)] for kind, y in derived[output].items()}
                    metric.add(values[output], feeds[target], weights, **beside)
                if metric.of_losses and weights is not None:
                    own = values.get("data_loss", values["loss"])
                    metric.add_losses(values.get(f"loss_{output}", own), weights)
            by_rows.add(len(next(iter(feeds.values()))), values)
            if is_only and weights is not None:
                weighed = {name: x for name, x in values.items() if name in losses}
                by_weights.add(float(weights.sum(dtype=np.float64)), weighed)
        measured = by_rows.result() | (by_weights.result() if by_weights.rows else {})
        for target, (_, metric) in chosen.items():
            prefix = "" if len(chosen) == 1 else f"{target}."
            measured |= {f"{prefix}{name}": value for name, value in metric.result().items()}
        return measured


def _exchanged(communicator: Communicator, own: Mapping[int, Outputs]) -> dict[int, Outputs]:
    """Return the numbers and arrays of all workers by the position of their batch."""
    results: dict[int, Outputs] = {}
    arrays = [{_POSITION: np.array(position), **values} for position, values in own.items()]
    for content in communicator.gather(state_bytes(arrays[0] if arrays else {})):
        values = safetensors.numpy.load(content)
        if values:
            position = int(values.pop(_POSITION))
            results[position] = {name: x if x.ndim else x.item() for name, x in values.items()}
    return results

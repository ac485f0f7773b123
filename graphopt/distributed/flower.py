"""Train as a client of Flower, the extra `federated`: a server averages the weights that its clients have trained."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import EXPECTED_ROWS, MAX_NORM, MULTIPLIER, NOISE_KEY
from graphopt.graph.values import name_of
from graphopt.runtime.executor import Executor
from graphopt.training.evaluation import evaluate
from graphopt.training.fit import fit
from graphopt.training.options import Data

OWN, BATCHES = "graphopt.state", "graphopt.batches"  # what a client keeps in its context, and an entry of it


def arrays(executor: Executor) -> ArrayRecord:
    """Return the arrays that travel between a server and its clients, by name in alphabetical order.

    These are the parameters and the running statistics of BatchNormalization. Frozen weights do not travel: of a model
    that trains only adapters, only the adapters do.

    Args:
        executor: the executor of a training graph.

    >>> from graphopt import models
    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.Adam()}
    >>> step = graphopt.compile(models.mlp((4,), 1), parameters=passes.Parameters("layers.4.*"), **steps)
    >>> list(arrays(graphopt.Executor(step)))
    ['layers.4.bias', 'layers.4.weight']
    """
    names = sorted(name_of(value) for value in with_role(executor.model, Role.PARAMETER, Role.STATISTIC))
    state = executor.state
    return ArrayRecord({name: Array(state[name]) for name in names})


def set_arrays(executor: Executor, record: ArrayRecord) -> None:
    """Replace the arrays that travel by those of a record, such as the result of a strategy of Flower.

    Args:
        executor: the executor of a training graph.
        record: an array for each name in `arrays`. Floating-point numbers are converted to the type of the state.

    Raises:
        GraphoptError: a name is missing or unknown, or an array has the wrong type or shape. Nothing is replaced.

    >>> from graphopt import models
    >>> steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    >>> one, other = (graphopt.Executor(graphopt.compile(models.linear((n,), 1), **steps)) for n in (2, 3))
    >>> try:
    ...     set_arrays(one, arrays(other))
    ... except graphopt.GraphoptError as error:
    ...     print(error)
    input 'layers.0.weight': expected shape [2,1], found [3, 1]
    """
    expected = arrays(executor)
    if wrong := sorted(expected.keys() ^ record.keys()):
        raise GraphoptError(
            f"arrays: expected {len(expected)} as in this training graph, found {len(record)}; only one side has "
            f"{', '.join(map(repr, wrong))}: use the same training graph on the server and on each client"
        )
    new = {name: array.numpy() for name, array in record.items()}
    types = {name: expected[name].dtype if x.dtype.kind == "f" else x.dtype for name, x in new.items()}
    executor.update_state({name: x.astype(types[name]) for name, x in new.items()})


class FlowerClient:
    """Train and evaluate on the data of one client, when a server of Flower asks for it.

    What a client sends weighs as much as it has rows. The optimizer's state and the counters do not travel: Flower
    keeps them in the client's context from round to round, until you clear `context.state`. A server can feed
    hyperparameters of the training graph, such as `learning_rate`, by name in its `train_config`.

    Args:
        executor: the executor of a training graph.
        data: data with rows, as in `graphopt.fit`.
        validation: the held-out data that `evaluate` measures.
        options: options of `graphopt.fit`, such as `epochs`, which is 1 by default, `batch_size` and `metrics`.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> client = FlowerClient(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, epochs=2, batch_size=10)
    >>> app = client_app(lambda context: client)
    """

    def __init__(self, executor: Executor, data: Data, validation: Data | None = None, **options: Any) -> None:
        self._executor, self._data, self._validation = executor, as_dataset(data, executor.inputs), validation
        self._options = {"epochs": 1, **options, "validation": None}
        self._initial = self._own()

    def train(self, message: Message, context: Context) -> Message:
        """Train from the arrays of a message, and return a reply with the trained arrays and `train_loss`.

        Raises:
            GraphoptError: the arrays are another graph's, the data does not fit, the strategy is FedProx, whose term
                the loss of a training graph does not have, or a hyperparameter protects rows.
            NonFiniteLoss: the loss is infinite or not a number.
        """
        executor, config = self._executor, ChainMap(*message.content.config_records.values())
        if mu := config.get("proximal-mu"):
            raise GraphoptError(f"proximal-mu: expected 0, found {mu}: use FedAvg instead of FedProx")
        if private := sorted(config.keys() & {MAX_NORM, MULTIPLIER, EXPECTED_ROWS, NOISE_KEY}):
            raise GraphoptError(
                f"train_config: expected hyperparameters that do not protect rows, found {private[0]!r}, which the "
                f"client sets: leave it out"
            )
        own = context.state.array_records.get(OWN, self._initial)
        state = {name: array.numpy() for name, array in own.items()}
        batches = int(state.pop(BATCHES))
        executor.update_state(state)
        executor.set_batches(batches)
        (received,) = message.content.array_records.values()
        set_arrays(executor, received)
        executor.set_hyperparameters(**{x: config[x] for x in executor.hyperparameters if x in config})
        loss = fit(executor, self._data, **{"verbose": False, **self._options})[-1]["loss"]
        context.state[OWN], trained = self._own(), arrays(executor)
        trained = ArrayRecord({name: trained[name] for name in received})  # strategies pair them by position
        return _reply(message, len(self._data), {"train_loss": loss}, arrays=trained)

    def evaluate(self, message: Message) -> Message:
        """Measure the arrays of a message on the held-out data, and return a reply with the loss and the metrics.

        Raises:
            GraphoptError: the client has no held-out data, or the arrays are another graph's.
        """
        if self._validation is None:
            raise GraphoptError("validation: expected data, found none: give it, or set fraction_evaluate=0")
        set_arrays(self._executor, *message.content.array_records.values())
        options = {name: self._options[name] for name in ("metrics", "allow_nan") if name in self._options}
        measured = evaluate(self._executor, self._validation, **options)
        numbers = {name: value for name, value in measured.items() if isinstance(value, float)}
        return _reply(message, len(as_dataset(self._validation)), numbers)

    def _own(self) -> ArrayRecord:
        """Return the state that does not travel, and the number of batches, on which the order of rows depends."""
        travelling = arrays(self._executor)
        own = {name: array for name, array in self._executor.state.items() if name not in travelling}
        own[BATCHES] = np.array(self._executor.batches)
        return ArrayRecord({name: Array(array) for name, array in own.items()})


def client_app(client: Callable[[Context], FlowerClient], mods: Iterable[Any] = ()) -> ClientApp:
    """Return an app of Flower whose clients train and evaluate.

    Args:
        client: a function that returns the client of a context; it runs for each message.
        mods: mods of Flower around training, such as `flwr.clientapp.mod.fixedclipping_mod`.

    An example is in `FlowerClient`.
    """
    app = ClientApp()
    app.train(mods=list(mods))(lambda message, context: client(context).train(message, context))
    app.evaluate()(lambda message, context: client(context).evaluate(message))
    return app


def _reply(message: Message, rows: int, metrics: dict[str, float], **records: ArrayRecord) -> Message:
    counted = MetricRecord({**metrics, "num-examples": rows})
    return Message(RecordDict({**records, "metrics": counted}), reply_to=message)

"""Federated training: clients of Flower, under Flower's own strategies, against training on all data in one place."""

from __future__ import annotations

import doctest
import functools
import math
from collections.abc import Callable, Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from builders import model

import graphopt
import passes
from graphopt import GraphoptError, data, models

pytest.importorskip("flwr.serverapp", reason="needs the extra `federated`")
from flwr.app import Array, ArrayRecord, ConfigRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp, mod
from flwr.serverapp import Grid, ServerApp, strategy
from flwr.simulation import run_simulation
from flwr.supercore.task_identity import TaskIdentity

from graphopt.distributed import flower
from graphopt.distributed.flower import FlowerClient, arrays, client_app, set_arrays

FEATURES, ROWS = 5, 40
Rows = dict[str, np.ndarray]


class InOneProcess(Grid):
    """Hand the messages of a strategy to the clients of an app, in this process."""

    run = property(lambda self: SimpleNamespace())

    def __init__(self, app: ClientApp, clients: int) -> None:
        TaskIdentity.task_id, TaskIdentity.run_id, TaskIdentity.node_id = 0, 0, 0
        self._app = app
        self._contexts = {
            i: Context(0, i, {"partition-id": i, "num-partitions": clients}, RecordDict(), {}) for i in range(clients)
        }

    def get_node_ids(self) -> list[int]:
        return list(self._contexts)

    def send_and_receive(self, messages: Iterable[Message], *, timeout: float | None = None) -> list[Message]:
        return [self._app(message, self._contexts[message.metadata.dst_node_id]) for message in messages]

    def set_run(self, run: Any) -> None: ...
    def create_message(self, *_: Any, **__: Any) -> Any: ...
    def push_messages(self, messages: Iterable[Message]) -> Any: ...
    def pull_messages(self, message_ids: Iterable[str]) -> Any: ...


@functools.cache
def regression(optimizer: passes.Optimizer) -> Any:
    net = models.mlp((FEATURES,), 2, hidden=[7])
    return graphopt.compile(net, loss=passes.MeanSquaredError(), optimizer=optimizer)


def executor(optimizer: passes.Optimizer | None = None) -> graphopt.Executor:
    return graphopt.Executor(regression(optimizer or passes.SGD(0.1)), threads=1)


def rows() -> Rows:
    random = np.random.default_rng(0)
    x = random.standard_normal((ROWS, FEATURES)).astype(np.float32)
    return {"x": x, "target": np.stack([x.sum(axis=1), x[:, 0] ** 2], axis=1)}


def parted(whole: Rows, *sizes: int) -> list[Rows]:
    """Cut rows into parts of these sizes."""
    ends = np.cumsum(sizes)
    return [
        {name: array[end - size : end] for name, array in whole.items()} for size, end in zip(sizes, ends, strict=True)
    ]


def federated(
    parts: list[Rows],
    chosen: strategy.Strategy,
    make: Callable[[], graphopt.Executor] = executor,
    rounds: int = 1,
    mods: Iterable[Any] = (),
    train_config: dict[str, Any] | None = None,
    **options: Any,
) -> tuple[graphopt.Executor, Any]:
    """Return an executor with the arrays of a federated training, and the strategy's result."""
    options = {"batch_size": max(len(part["target"]) for part in parts), "shuffle": False, **options}

    def client(context: Context) -> FlowerClient:
        part = parts[int(context.node_config["partition-id"])]
        return FlowerClient(make(), part, part, **options)

    server = make()
    grid = InOneProcess(client_app(client, mods), len(parts))
    config = ConfigRecord(train_config or {})
    result = chosen.start(grid, arrays(server), num_rounds=rounds, train_config=config)
    set_arrays(server, result.arrays)
    return server, result


def fed_avg(**options: Any) -> strategy.FedAvg:
    return strategy.FedAvg(**{"min_train_nodes": 1, "min_evaluate_nodes": 1, "min_available_nodes": 1, **options})


def central(whole: Rows, make: Callable[[], graphopt.Executor] = executor, **options: Any) -> graphopt.Executor:
    """Return an executor that has trained on all rows in one place, by default for one step."""
    trained = make()
    options = {"batch_size": ROWS, "epochs": 1, "shuffle": False, "validation": None, **options}
    graphopt.fit(trained, whole, **options)
    return trained


def distance(one: graphopt.Executor, other: graphopt.Executor) -> float:
    return float(np.abs(one.contiguous() - other.contiguous()).max())


@pytest.mark.parametrize("sizes", [(20, 20), (10, 30), (1, 2, 37)], ids=str)
def test_fed_avg_of_one_full_batch_step_is_the_central_step(sizes: tuple[int, ...]) -> None:
    whole = rows()
    server, result = federated(parted(whole, *sizes), fed_avg())
    expected = central(whole)
    assert distance(server, expected) < 1e-6 < 1e-3 < distance(server, executor())
    mean = graphopt.evaluate(executor(), whole)["loss"]
    assert math.isclose(result.train_metrics_clientapp[1]["train_loss"], mean, rel_tol=1e-5)
    measured = graphopt.evaluate(expected, whole)
    found = result.evaluate_metrics_clientapp[1]
    assert math.isclose(found["loss"], measured["loss"], rel_tol=1e-5)
    assert math.isclose(found["mae"], measured["mae"], rel_tol=1e-5)


def test_several_rounds_equal_several_central_steps() -> None:
    whole = rows()
    server, _ = federated(parted(whole, 20, 20), fed_avg(), rounds=5)
    assert distance(server, central(whole, epochs=5)) < 1e-6


@functools.cache
def regression_with_dropout() -> Any:
    """Return a training graph whose steps depend on all kinds of state: slots, a counter, statistics."""
    proto = model(
        """g (float[N,5] x) => (float[N,2] y) {
            h = MatMul(x, w)
            n = BatchNormalization(h, scale, shift, mean, variance)
            d = Dropout(n, ratio)
            y = MatMul(d, v)
        }""",
        w=np.random.default_rng(1).standard_normal((5, 6)),
        v=np.random.default_rng(2).standard_normal((6, 2)),
        scale=np.ones(6),
        shift=np.zeros(6),
        mean=np.zeros(6),
        variance=np.ones(6),
        ratio=np.array(0.3),
    )
    return graphopt.compile(
        proto,
        training=passes.TrainingMode(),
        loss=passes.MeanSquaredError(),
        optimizer=passes.AdamW(1e-2),
        schedule=passes.Cosine(steps=30),
    )


def with_dropout() -> graphopt.Executor:
    return graphopt.Executor(regression_with_dropout(), threads=1)


def test_rounds_of_one_client_are_the_epochs_of_one_training_bit_for_bit() -> None:
    options: dict[str, Any] = {"batch_size": 8, "shuffle": True, "seed": 3}
    server, _ = federated([rows()], fed_avg(), with_dropout, rounds=3, **options)
    expected = central(rows(), with_dropout, epochs=3, **options)
    names = list(arrays(expected))
    assert {"mean", "variance", "scale", "w"} <= set(names)
    assert all((server.state[name] == expected.state[name]).all() for name in names)


def test_a_client_begins_anew_where_its_context_is_cleared() -> None:
    whole, make = rows(), lambda: executor(passes.Adam(1e-2))
    client = FlowerClient(make(), whole, batch_size=ROWS)
    app = client_app(lambda context: context.state.clear() or client)  # type: ignore[func-returns-value]
    result = fed_avg(fraction_evaluate=0).start(InOneProcess(app, 1), arrays(make()), num_rounds=2)
    once = central(whole, make)
    again = make()
    again.update_state(once.parameters)
    graphopt.fit(again, whole, batch_size=ROWS, epochs=1, validation=None)
    server = make()
    set_arrays(server, result.arrays)
    assert distance(server, again) == 0


def test_a_server_feeds_hyperparameters() -> None:
    server, _ = federated(parted(rows(), 20, 20), fed_avg(), train_config={"learning_rate": 0.0})
    assert distance(server, executor()) == 0


def test_a_server_cannot_lower_the_noise_of_a_client() -> None:
    config = RecordDict({"config": ConfigRecord({"noise_multiplier": 0.0})})
    with pytest.raises(GraphoptError, match="train_config: expected hyperparameters that do not protect rows"):
        FlowerClient(executor(), rows()).train(SimpleNamespace(content=config), Context(0, 0, {}, RecordDict(), {}))


@pytest.mark.parametrize(
    "chosen",
    [
        strategy.FedAvgM(server_learning_rate=1.0, server_momentum=0.5),
        strategy.FedAdam(eta=0.03),
        strategy.FedAdagrad(eta=0.03),
        strategy.FedYogi(eta=0.03),
        strategy.FedMedian(),
        strategy.FedTrimmedAvg(),
        strategy.Krum(),
        strategy.MultiKrum(),
        strategy.Bulyan(),
        strategy.QFedAvg(client_learning_rate=0.1, q=0.1),
        strategy.FedProx(proximal_mu=0.0),
    ],
    ids=lambda chosen: type(chosen).__name__,
)
@pytest.mark.sample(5)
def test_strategies_of_flower_learn(chosen: strategy.Strategy) -> None:
    _, result = federated(parted(rows(), 8, 8, 8, 8, 8), chosen, rounds=5)
    losses = [measured["loss"] for _, measured in sorted(result.evaluate_metrics_clientapp.items())]
    assert len(losses) == 5 and losses[-1] < 0.9 * graphopt.evaluate(executor(), rows())["loss"]


def test_fed_prox_is_refused() -> None:
    with pytest.raises(GraphoptError, match=r"proximal-mu: expected 0, found 0\.1"):
        federated(parted(rows(), 20, 20), strategy.FedProx(proximal_mu=0.1))


CLIP = 1e-2
PRIVATE = {
    "server, fixed": (strategy.DifferentialPrivacyServerSideFixedClipping, (0.0, CLIP, 2), {}, None),
    "client, fixed": (
        strategy.DifferentialPrivacyClientSideFixedClipping,
        (0.0, CLIP, 2),
        {},
        mod.fixedclipping_mod,
    ),
    "server, adaptive": (
        strategy.DifferentialPrivacyServerSideAdaptiveClipping,
        (0.0, 2),
        {"initial_clipping_norm": CLIP, "clipped_count_stddev": 0.0},
        None,
    ),
    "client, adaptive": (
        strategy.DifferentialPrivacyClientSideAdaptiveClipping,
        (0.0, 2),
        {"initial_clipping_norm": CLIP, "clipped_count_stddev": 0.0},
        mod.adaptiveclipping_mod,
    ),
}


@pytest.mark.parametrize("case", PRIVATE)
def test_differential_privacy_clips_the_updates(case: str) -> None:
    wrapper, positional, named, client_mod = PRIVATE[case]
    parts = parted(rows(), 20, 20)
    mods = [] if client_mod is None else [client_mod]
    server, result = federated(parts, wrapper(fed_avg(), *positional, **named), mods=mods)
    start = executor().contiguous()
    updates = [central(part).contiguous() - start for part in parts]
    assert all(np.linalg.norm(update) > CLIP for update in updates)
    expected = start + np.mean([update * CLIP / np.linalg.norm(update) for update in updates], axis=0)
    assert np.abs(server.contiguous() - expected).max() < 1e-6
    assert result.evaluate_metrics_clientapp[1]["loss"] > 0


def test_differential_privacy_adds_noise() -> None:
    private = strategy.DifferentialPrivacyServerSideFixedClipping(fed_avg(), 1.0, 1e-3, 2)
    server, _ = federated(parted(rows(), 20, 20), private)
    noise = server.contiguous() - executor().contiguous()
    assert 0.3 < noise.std() / (1e-3 / 2) < 1.7 and server.contiguous().dtype == np.float32


def test_differential_privacy_of_each_client_adds_noise() -> None:
    local = mod.LocalDpMod(clipping_norm=1e-3, sensitivity=1e-3, epsilon=1.0, delta=0.1)
    server, _ = federated(parted(rows(), 20, 20), fed_avg(), mods=[local])
    deviation = 1e-3 * math.sqrt(2 * math.log(1.25 / 0.1)) / math.sqrt(2)
    assert 0.5 < (server.contiguous() - executor().contiguous()).std() / deviation < 1.5


@functools.cache
def regression_with_adapters() -> Any:
    """Return a training graph of a frozen layer's adapters, the factors of an update of low rank (LoRA)."""
    random = np.random.default_rng(0)
    proto = model(
        """g (float[N,5] x) => (float[N,2] y) {
            h = MatMul(x, "base.weight")
            a = MatMul(x, "lora.A")
            b = MatMul(a, "lora.B")
            s = Add(h, b)
            r = Relu(s)
            y = MatMul(r, "head.weight")
        }""",
        **{
            "base.weight": random.standard_normal((5, 256)),
            "lora.A": random.standard_normal((5, 2)),
            "lora.B": np.zeros((2, 256)),
            "head.weight": random.standard_normal((256, 2)),
        },
    )
    return graphopt.compile(
        proto,
        parameters=passes.Parameters("lora.*"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.Adam(1e-3),
    )


def with_adapters() -> graphopt.Executor:
    return graphopt.Executor(regression_with_adapters(), threads=1)


def test_adapters_alone_travel() -> None:
    sent: list[ArrayRecord] = []

    def watch(message: Message, context: Context, following: Any) -> Message:
        reply = following(message, context)
        sent.extend(record for m in (message, reply) for record in m.content.array_records.values())
        return reply

    server, _ = federated(parted(rows(), 20, 20), fed_avg(), with_adapters, mods=[watch])
    assert len(sent) == 4 and all(list(record) == ["lora.A", "lora.B"] for record in sent)
    numbers = 5 * 2 + 2 * 256
    assert all(4 * numbers <= sum(len(x.data) for x in record.values()) < 4 * numbers + 300 for record in sent)
    assert (server.parameters["lora.B"] != 0).any()


def test_ten_simulated_clients_learn_the_digits(tmp_path: Path) -> None:
    ray = pytest.importorskip("ray", reason="needs flwr[simulation]")
    step = graphopt.compile(
        models.mlp((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1, momentum=0.9)
    )
    path = str(tmp_path / "step.onnx")
    graphopt.save(step, path)
    found: list[Any] = []

    def client(context: Context) -> FlowerClient:
        mine = slice(int(context.node_config["partition-id"]), 1500, 10)
        part = {name: array[mine] for name, array in data.digits().arrays.items()}
        return FlowerClient(graphopt.Executor(path, threads=1), part, epochs=4)

    server = ServerApp()

    @server.main()
    def main(grid: Grid, context: Context) -> None:
        start = arrays(graphopt.Executor(path))
        found.append(strategy.FedAvg(fraction_evaluate=0.0).start(grid, start, num_rounds=4))

    try:
        run_simulation(server, client_app(client), num_supernodes=10)
    finally:
        ray.shutdown()
    trained = graphopt.Executor(path)
    set_arrays(trained, found[0].arrays)
    unseen = {name: array[1500:] for name, array in data.digits().arrays.items()}
    assert graphopt.evaluate(trained, unseen)["accuracy"] > 0.86


def replaced(record: ArrayRecord, **changed: np.ndarray | None) -> ArrayRecord:
    kept = {name: array for name, array in record.items() if name not in changed}
    return ArrayRecord(kept | {name: Array(x) for name, x in changed.items() if x is not None})


BIAS = "layers.0.bias"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {BIAS: None},
            f"arrays: expected 4 as in this training graph, found 3; only one side has '{BIAS}': ",
        ),
        ({"extra": np.zeros(7, np.float32)}, "found 5; only one side has 'extra'"),
        ({BIAS: np.zeros(6, np.float32)}, BIAS),
        ({BIAS: np.zeros(7, np.int64)}, BIAS),
    ],
    ids=["missing", "unknown", "shape", "type"],
)
def test_arrays_of_another_graph_are_refused(change: dict[str, Any], message: str) -> None:
    one = executor()
    before = one.contiguous()
    with pytest.raises(GraphoptError, match=message) as error:
        set_arrays(one, replaced(arrays(one), **change))
    assert "\n" not in str(error.value) and (one.contiguous() == before).all()


def test_arrays_in_float64_and_in_another_order_are_accepted() -> None:
    one, whole = executor(), rows()
    start = arrays(executor())
    shuffled = ArrayRecord({name: Array(start[name].numpy().astype(np.float64)) for name in reversed(list(start))})
    client = FlowerClient(one, whole, batch_size=ROWS, shuffle=False)
    chosen = strategy.FedAvgM(fraction_evaluate=0.0, min_train_nodes=1, min_available_nodes=1, server_learning_rate=0.5)
    result = chosen.start(InOneProcess(client_app(lambda _: client), 1), shuffled, num_rounds=1)
    server = executor()
    set_arrays(server, result.arrays)
    middle = (executor().contiguous() + central(whole).contiguous()) / 2
    assert np.abs(server.contiguous() - middle).max() < 1e-6


def test_a_client_without_held_out_data_does_not_evaluate() -> None:
    app = client_app(lambda _: FlowerClient(executor(), rows()))
    with pytest.raises(
        GraphoptError, match="validation: expected data, found none: give it, or set fraction_evaluate=0"
    ):
        fed_avg().start(InOneProcess(app, 1), arrays(executor()), num_rounds=1)


def test_wrong_data_is_refused() -> None:
    whole = {"x": rows()["x"][:, :3], "target": rows()["target"]}
    with pytest.raises(GraphoptError, match="data 'x': expected rows of shape"):
        federated([whole], fed_avg())
    with pytest.raises(GraphoptError, match="a DataFrame or a data set, found a list"):
        FlowerClient(executor(), [whole])  # batches have no number of rows, by which a server could weigh them


def test_the_examples_in_docstrings_run() -> None:
    assert doctest.testmod(flower, extraglobs={"graphopt": graphopt, "passes": passes}) == (0, 14)

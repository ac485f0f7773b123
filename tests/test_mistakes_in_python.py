"""A newcomer's mistakes in Python have one line: the thing, what was expected and found, what to do.

The calls and the lines are in `tests/listings/mistakes_in_python.txt`.
"""

from __future__ import annotations

import copy
import inspect
import pickle
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Protocol, runtime_checkable

import messages
import numpy as np
import pytest

import graphopt
import passes
from graphopt import callbacks, data, models

RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((60, 4)).astype(np.float32)
Y = (X[:, 0] > 0).astype(np.int64)
MODEL = models.mlp(4, 2, hidden=8)
LOSS, SGD = passes.CrossEntropy(), passes.SGD(0.1)
PIPELINE = graphopt.standard(loss=LOSS, optimizer=SGD)
STEP = graphopt.compile(MODEL, loss=LOSS, optimizer=SGD)


class Unfinished(passes.Loss):
    def forward(self, op, prediction, target):
        return op.Abs(prediction - target)


class Keras(graphopt.Callback):
    def on_train_begin(self, run):
        pass


class Short(graphopt.Callback):
    def on_epoch_end(self, run):
        pass


def compiled(**steps: Any) -> Any:
    return graphopt.compile(MODEL, **{"loss": LOSS, "optimizer": SGD, **steps})


def fitted(t: Any, **options: Any) -> Any:
    return graphopt.fit(t.executor, (X, Y), **{"epochs": 1, **options})


def torch_module(t: Any) -> Any:
    return pytest.importorskip("torch").nn.Linear(2, 3)


def torch_loss(t: Any) -> Any:
    return pytest.importorskip("torch").nn.CrossEntropyLoss()


def session(t: Any) -> Any:
    return pytest.importorskip("onnxruntime").InferenceSession("model.onnx", providers=["CPUExecutionProvider"])


def estimator(t: Any) -> Any:
    return pytest.importorskip("sklearn.linear_model").LinearRegression()


def twice(t: Any) -> Any:
    for _ in range(2):
        graphopt.fit(graphopt.Executor(STEP, native=False), (X, Y), epochs=1, checkpoint="run")


EXECUTOR = graphopt.Executor(STEP, native=False)
ATTRIBUTES = [
    (lambda: EXECUTOR.fit, "call graphopt.fit(executor, data)"),
    (lambda: EXECUTOR.train, "call graphopt.fit(executor, data)"),
    (lambda: passes.Adamw, "nearest: 'AdamW'"),
    (lambda: passes.MSE, "nearest: 'MeanSquaredError'"),
    (lambda: graphopt.train, "nearest: 'fit'"),
    (lambda: graphopt.Exector, "nearest: 'Executor'"),
    (lambda: graphopt.AdamW, "passes.AdamW is it"),
    (lambda: graphopt.EarlyStopping, "graphopt.callbacks.EarlyStopping is it"),
    (lambda: models.resnet, "nearest: 'cnn'; known: cnn, linear, mlp, transformer"),
    (lambda: data.read_csv, "nearest: 'csv'"),
    (lambda: callbacks.EarlyStop, "nearest: 'EarlyStopping'"),
]


@pytest.fixture(scope="module")
def things(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SimpleNamespace]:
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("mistakes"))
        graphopt.save(MODEL, "model.onnx")
        yield SimpleNamespace(executor=graphopt.Executor(STEP, native=False))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("mistakes_in_python"))
def test_a_mistake_is_answered_in_one_line(things: SimpleNamespace, call: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        messages.refused("mistakes_in_python", call, {**globals(), "t": things})
    assert {path.name for path in Path().iterdir()} <= {"model.onnx", "run"}


@pytest.mark.parametrize(("get", "remedy"), ATTRIBUTES)
def test_an_unknown_attribute_names_the_nearest(get: Callable[[], Any], remedy: str) -> None:
    with pytest.raises(AttributeError) as caught:
        get()
    assert remedy in str(caught.value)
    assert "\n" not in str(caught.value)


def test_attributes_with_underscores_cost_no_search() -> None:
    for module in (graphopt, passes, models, data, callbacks):
        assert not hasattr(module, "__path_that_is_not__")
        with pytest.raises(AttributeError, match="no attribute '_x'"):
            module._x  # noqa: B018


def test_errors_of_ones_own_functions_stay_as_they_are(things: SimpleNamespace) -> None:
    def broken(batch: Any, random: Any) -> Any:
        return len(3)  # type: ignore[arg-type]

    with pytest.raises(TypeError, match="has no len"):
        fitted(things, transform=broken)


def test_a_wrong_argument_is_a_type_error_too() -> None:
    with pytest.raises(TypeError) as caught:
        passes.SGD(lr=0.1)  # type: ignore[call-arg]
    assert isinstance(caught.value, graphopt.GraphoptError)


def test_arguments_are_checked_without_a_metaclass() -> None:
    """A protocol has a metaclass of its own."""

    @runtime_checkable
    class Named(Protocol):
        title: str

    @dataclass(frozen=True)
    class Titled(passes.SGD, Named):
        title: str = ""

    first = Titled.__new__(Titled)  # as a copy before the first call
    assert inspect.signature(Titled).parameters.keys() == {each.name for each in fields(Titled)}
    with pytest.raises(graphopt.GraphoptError, match="Titled: unknown argument 'titel', nearest: 'title'"):
        Titled(titel="a")  # type: ignore[call-arg]
    titled = Titled(0.1, title="a")
    assert pickle.loads(pickle.dumps(passes.SGD(0.1))) == copy.deepcopy(passes.SGD(0.1)) == passes.SGD(0.1)
    assert isinstance(titled, Named)
    assert type(first) is type(copy.copy(titled)) is Titled
    assert [*inspect.signature(titled).parameters] == ["model"]  # of a call of the pass, not of its class

"""Numbers that cannot be meant are refused where they are given, before anything is compiled or runs."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal

import messages
import numpy as np
import onnxruntime
import pytest
import torch
from builders import linear, mlp

import graphopt
import passes
from graphopt.data import Batches
from graphopt.graph.rewriting import Pass
from graphopt.intervals import within

NAN, INF = math.nan, math.inf


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("options_mistakes"))
def test_a_number_out_of_its_interval_is_refused(call: str) -> None:
    messages.refused("options_mistakes", call, globals())


NUMBERLESS = {"axis", "seed"}  # of any value, or checked against the model


def test_every_number_of_these_families_has_an_interval() -> None:
    for kind in vars(passes).values():
        families = passes.Optimizer, passes.Schedule, passes.Clip, passes.Regularizer, passes.Loss
        if isinstance(kind, type) and issubclass(kind, families):
            for field in dataclasses.fields(kind):
                number = isinstance(field.default, int | float) and not isinstance(field.default, bool)
                if number and field.name not in NUMBERLESS and "Literal" not in str(field.type):
                    assert "interval" in field.metadata, f"{kind.__name__}.{field.name}"


@dataclasses.dataclass(frozen=True)
class Own(Pass):
    share: float = within("(0, 1]", 0.5)
    counts: tuple[int, ...] = within("[1, inf)", (), whole=True)
    weights: Mapping[str, float] = within("[0, inf)", dict)

    def rewrite(self, model: Any) -> None: ...


def test_a_pass_of_ones_own_declares_intervals() -> None:
    Own(share=1, counts=(1, np.int64(3), 2.0), weights={"a": 0, "b": np.float32(2.5)})
    for options, message in [
        ({"share": 0}, r"Own\(share=0\): expected a number in \(0, 1\], found 0$"),
        ({"counts": (1, 0)}, r"Own\(counts=\(1, 0\)\): expected a whole number in \[1, inf\), found 0$"),
        ({"counts": (1.5,)}, "expected a whole number"),
        ({"weights": {"a": 1, "b": -1}}, r"expected a number in \[0, inf\), found -1$"),
    ]:
        with pytest.raises(graphopt.GraphoptError, match=message):
            Own(**options)


@dataclasses.dataclass(frozen=True)
class OwnLoss(passes.MeanSquaredError):
    schedule: Unresolved | None = None  # type: ignore[name-defined]  # noqa: F821
    kind: Literal["a", "b"] = "a"


def test_a_field_whose_type_does_not_resolve_leaves_the_others_checked() -> None:
    OwnLoss(reduction="sum", kind="b")
    with pytest.raises(graphopt.GraphoptError, match="expected 'mean', 'sum' or 'none', found 'average'"):
        OwnLoss(reduction="average")
    with pytest.raises(graphopt.GraphoptError, match="expected 'a' or 'b', found 'c'"):
        OwnLoss(kind="c")


X = np.random.default_rng(0).standard_normal((8, 4)).astype(np.float32)
TARGET = X[:, :3].copy()


@pytest.mark.parametrize("rate", [NAN, INF, -0.1])
def test_a_rate_that_is_fed_is_checked(rate: float) -> None:
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    message = "hyperparameter 'learning_rate': expected a finite number, 0 or more, found"
    with pytest.raises(graphopt.GraphoptError, match=message):
        executor.set_hyperparameters(learning_rate=rate)
    with pytest.raises(graphopt.GraphoptError, match=message):
        executor.step(x=X, target=TARGET, learning_rate=rate)
    with pytest.raises(graphopt.GraphoptError, match=message):
        executor.learning_rate = rate
    assert executor.steps == 0 and executor.learning_rate == pytest.approx(0.1)


LABELS = np.array([0, 1, 2, 0, 1, 2, 0, 1])


@pytest.mark.parametrize("kind", ["array", "torch", "OrtValue", "run", "evaluate"])
@pytest.mark.parametrize("wrong", [3, -1, 2**40, -(2**63)])
def test_labels_outside_the_classes_are_refused_by_a_step(kind: str, wrong: int) -> None:
    step = graphopt.compile(mlp(), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1, steps_per_call=2)
    bad = LABELS.copy()
    bad[5] = wrong
    given = {"torch": torch.from_numpy, "OrtValue": onnxruntime.OrtValue.ortvalue_from_numpy}
    make = given.get(kind, np.asarray)
    message = f"input 'target': expected labels from 0 to 2, found {wrong}"
    feeds = {"x": X, "target": make(bad)}
    calls = {
        "run": lambda: executor.run([{"x": X, "target": LABELS}, feeds]),
        "evaluate": lambda: executor.evaluate(feeds),
    }
    call = calls.get(kind, lambda: executor.step(feeds))
    with pytest.raises(graphopt.GraphoptError, match=message):
        call()
    assert executor.steps == 0
    executor.step(x=X, target=make(LABELS))


@pytest.mark.slow
def test_ignored_labels_probabilities_and_the_two_of_a_binary_loss_through_a_step() -> None:
    def step(loss: Any, target: np.ndarray) -> None:
        graph = graphopt.compile(mlp(), loss=loss, optimizer=passes.SGD(0.1))
        graphopt.Executor(graph, threads=1).step(x=X, target=target)

    ignored = np.where(LABELS == 1, -100, LABELS)
    step(passes.CrossEntropy(ignore_index=-100), ignored)
    with pytest.raises(graphopt.GraphoptError, match="expected labels from 0 to 2, found -100"):
        step(passes.CrossEntropy(), ignored)
    step(passes.CrossEntropy(target_probabilities=True), np.full((8, 3), 1 / 3, np.float32))
    step(passes.BinaryCrossEntropy(), np.full((8, 3), 0.5, np.float32))
    with pytest.raises(graphopt.GraphoptError, match="expected labels 0 and 1, found 2"):
        step(passes.BinaryCrossEntropy(), np.full((8, 3), 2, np.float32))
    step(passes.Hinge(), np.sign(TARGET))
    with pytest.raises(graphopt.GraphoptError, match="expected labels -1 and 1, found 0"):
        step(passes.Hinge(), np.zeros((8, 3), np.float32))


@pytest.mark.parametrize("number", [NAN, INF, -INF, 1e39])
@pytest.mark.parametrize("name", ["x", "target"])
def test_data_that_is_not_finite_in_the_graphs_type_is_refused(name: str, number: float) -> None:
    step = graphopt.compile(linear(4, 3), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    inputs = graphopt.Executor(step, threads=1).inputs
    data = {"x": X.astype(np.float64), "target": TARGET.astype(np.float64)}
    data[name][6, 1] = number
    with pytest.raises(
        graphopt.GraphoptError,
        match=f"data '{name}': expected (finite numbers|numbers in the range of float32), found .* in row 6",
    ):
        Batches(data, inputs)
    Batches(data, inputs, allow_nan=True)


def test_options_of_an_executor_do_not_change() -> None:
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1, on_nonfinite="warn")
    assert (executor.options.threads, executor.options.on_nonfinite, executor.device) == (1, "warn", "cpu")
    for name, value in {"threads": 2, "on_nonfinite": "skip", "device": "cuda"}.items():
        with pytest.raises(graphopt.GraphoptError, match=f"{name}: .* do not change, found {value!r}"):
            setattr(executor, name, value)
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(executor.options, name, value)
    with pytest.raises(dataclasses.FrozenInstanceError):
        executor.device_options.threads = 2  # type: ignore[misc]

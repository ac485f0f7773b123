"""Train ten steps in a framework and in graphopt from the same export, and measure the differences."""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

import graphopt
import passes
from graphopt.graph.metadata import Kind, LeftOut, Origin
from graphopt.graph.roles import Role, with_role

Arrays = Mapping[str, np.ndarray]
Move = Callable[[np.ndarray], np.ndarray]
Pairs = dict[
    str, tuple[str, Move]
]  # for each weight, the initializer that contains it, and how the exporter rearranged its numbers

STEPS = 10
TOLERANCE = 1e-4
CHAOS = 0.3  # the share of a difference that the framework's own rounding must explain
EQUAL = 1e-6  # the largest difference between a weight and its export


@dataclass(frozen=True)
class Batch:
    """Hold inputs by their names in the export, and the targets of the predictions."""

    inputs: Arrays
    target: np.ndarray


@dataclass(frozen=True)
class Training:
    """Hold the results of ten steps: the losses, the weights by name, and the predictions for a last batch.

    `trained` counts the numbers that train by the names of weights, tied ones once. For graphopt, `said` contains the
    lines of the report about weights that the exporter changed, and `initial` the initial parameters.
    """

    losses: Sequence[float]
    weights: Arrays
    predictions: np.ndarray
    trained: Mapping[str, int]
    said: Mapping[str, str] = field(default_factory=dict)
    initial: Arrays = field(default_factory=dict)


@dataclass(frozen=True)
class Case(ABC):
    """Describe an architecture in its framework.

    Args:
        loss: the pass for the framework's loss.
        optimizer: the pass for the framework's optimizer.
        training: the pass that enables the training behaviour; None for a model without one.
        freeze: the parameters that the framework freezes, which no ONNX file records.
    """

    loss: Any = field(default_factory=passes.MeanSquaredError, kw_only=True)
    optimizer: Any = field(default_factory=lambda: passes.SGD(0.01, momentum=0.9), kw_only=True)
    training: Any = field(default_factory=passes.TrainingMode, kw_only=True)
    freeze: str | None = field(default=None, kw_only=True)

    @property
    @abstractmethod
    def exporters(self) -> Sequence[str]:
        """Return the exporters, each of which is a row of the table."""

    @abstractmethod
    def model(self, exporter: str) -> Model:
        """Build the framework's model, with different values in every weight."""


class Model(ABC):
    """Hold a model with its weights, in its framework."""

    @abstractmethod
    def batches(self, count: int) -> list[Batch]:
        """Return batches, the same ones in each call."""

    @abstractmethod
    def parameters(self) -> Arrays:
        """Return the initial values of all parameters by name, tied ones once."""

    @abstractmethod
    def export(self) -> onnx.ModelProto:
        """Export the model without changing it."""

    @abstractmethod
    def train(self, batches: Sequence[Batch], double: bool) -> Training:
        """Train a copy on all batches except the last, and predict the last one, in float32 or float64."""


class NotExported(Exception):
    """Report that the framework's exporter refuses the architecture."""


@dataclass
class Row:
    """Hold a row of the table; differences are the largest relative ones."""

    name: str
    exporter: str
    verdict: str = ""
    cause: str = ""
    theirs: int | None = None
    ours: int | None = None
    compared: str = ""
    losses: float | None = None
    weights: float | None = None
    predictions: float | None = None
    own: float | None = None  # the framework in float32 compared with itself in float64
    worst: str = ""
    seconds: float = 0.0


def judge(row: Row, case: Case) -> None:
    """Fill a row: export a model, train it in the framework and in graphopt, and compare the results."""
    model = case.model(row.exporter)
    batches = model.batches(STEPS + 1)
    initial = model.parameters()
    theirs = model.train(batches, double=False)
    if not all(map(math.isfinite, theirs.losses)):
        raise ValueError(f"the framework's own losses are not finite: {theirs.losses}")
    try:
        proto = model.export()
    except Exception as error:
        raise NotExported(f"{type(error).__name__}: {error}") from error
    ours = train_here(proto, case, batches)
    pairs = same(initial, [*constants(proto), *ours.initial.items()])
    row.ours, row.theirs = sum(ours.trained.values()), sum(in_export(theirs, pairs).values())
    differences(row, ours, theirs, pairs)
    worst = max(row.losses or 0, row.weights or 0, row.predictions or 0)
    if worst > TOLERANCE:
        exact = Row(row.name, row.exporter)
        double = model.train(batches, double=True)
        differences(exact, theirs, double, {name: (name, np.ravel) for name in theirs.weights})
        row.own = max(exact.losses or 0, exact.weights or 0, exact.predictions or 0)
    if row.ours == row.theirs and worst <= TOLERANCE:
        row.verdict = "agrees"
        return
    extra, missing = apart(ours, theirs, initial, pairs)
    row.cause = f"here alone: {listed(extra)}; in the framework alone: {listed(missing)}"
    if (extra or missing) and is_said(ours.said, extra, missing):
        row.verdict = "reported"
        named = [ours.said[name] for name in extra] or list(ours.said.values())
        row.cause = f"{row.cause}. The report: {'; '.join(named[:2])}"
    elif row.ours == row.theirs and row.own is not None and row.own > CHAOS * worst:
        row.verdict, row.cause = "chaotic", ""
    else:
        row.verdict = "differs"


def apart(
    ours: Training, theirs: Training, initial: Arrays, pairs: Pairs
) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameters that train only in graphopt and only in the framework, by their values, with counts."""
    found = {other for other, _ in pairs.values()}
    numbers_there = np.concatenate([x.ravel() for x in initial.values()])
    numbers_here = np.concatenate([x.ravel() for x in ours.initial.values()])
    extra = {
        name: count
        for name, count in ours.trained.items()
        if name not in found and not is_part(ours.initial[name], numbers_there)
    }
    missing = {
        name: count
        for name, count in in_export(theirs, pairs).items()
        if (name not in pairs or pairs[name][0] not in ours.trained)
        and not is_part(initial[name], numbers_here)
    }
    return extra, missing


def is_part(numbers: np.ndarray, of: np.ndarray) -> bool:
    """Return whether numbers, each of them once, are among others."""
    return len(np.unique(numbers)) == numbers.size and bool(np.isin(numbers, of).all())


def is_said(said: Mapping[str, str], extra: Mapping[str, int], missing: Mapping[str, int]) -> bool:
    """Return whether the report names everything that trains on one side only.

    For a weight of the framework, it may name the module. If the exporter drops names, it must name a weight of the
    same size that trains only in graphopt.
    """
    text = " ".join(said.values())
    return all(name in said for name in extra) and all(
        name in text or (name.rpartition(".")[0] or name) in text or count in extra.values()
        for name, count in missing.items()
    )


def in_export(theirs: Training, pairs: Pairs) -> dict[str, int]:
    """Return how many numbers train in the framework, without rows of tables that the exporter left out."""
    return {
        name: pairs[name][1](theirs.weights[name]).size if name in pairs else count
        for name, count in theirs.trained.items()
    }


def listed(counts: Mapping[str, int]) -> str:
    some = [f"{name} ({count})" for name, count in counts.items()]
    more = f" and {len(some) - 4} more" if len(some) > 4 else ""
    return ", ".join(some[:4]) + more or "nothing"


def train_here(proto: onnx.ModelProto, case: Case, batches: Sequence[Batch]) -> Training:
    """Compile an export, train it on all batches except the last, and predict the last one with the trained model."""
    steps = {"loss": case.loss, "optimizer": case.optimizer, "training": case.training}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(proto, parameters=passes.Parameters(freeze=case.freeze), **steps)
    weights = with_role(step, Role.PARAMETER)
    numbers = {str(value.name): math.prod(value.shape) for value in weights}
    initial = {str(value.name): value.const_value.numpy() for value in weights}
    executor = graphopt.Executor(step, threads=1)
    losses = [executor.step({**batch.inputs, "target": batch.target})["loss"] for batch in batches[:-1]]
    trained = executor.trained()
    predicted = graphopt.run(trained, batches[-1].inputs)
    prediction = next(array for array in predicted.values() if np.issubdtype(array.dtype, np.floating))
    return Training(losses, dict(constants(trained)), prediction, numbers, said(step, weights), initial)


def said(step: Any, weights: Sequence[Any]) -> dict[str, str]:
    """Return the report's lines about weights that the exporter computed or left out, or that a rule decided."""
    found = {name: f"{name}: left out by the exporter" for name in (LeftOut.read(step) or LeftOut()).names}
    for value in weights:
        origin = Origin.read(value)
        if not origin.certain or origin.kind is Kind.COMPUTED:
            found[value.name] = f"{value.name}: {origin.reason}"
    return found


def constants(proto: onnx.ModelProto) -> list[tuple[str, np.ndarray]]:
    """Return the weights in a file: initializers and constants."""
    found = [(x.name, onnx.numpy_helper.to_array(x)) for x in proto.graph.initializer]
    for node in proto.graph.node:
        if node.op_type == "Constant" and node.attribute[0].name == "value":
            found.append((node.output[0], onnx.numpy_helper.to_array(node.attribute[0].t)))
    return found


def same(initial: Arrays, exported: Sequence[tuple[str, np.ndarray]]) -> Pairs:
    """Match each weight of the framework with the initializer that contains its values, however rearranged."""
    found: Pairs = {}
    for name, weight in initial.items():
        for other, array in sorted(exported, key=lambda one: one[0] != name):
            if array.dtype == weight.dtype and name not in found:
                move = moved(weight, array)
                if move is not None:
                    found[name] = other, move
    return found


def moved(weight: np.ndarray, array: np.ndarray) -> Move | None:
    """Return how `array` follows from `weight`: a reshape, a permutation of axes or a choice of rows; or None."""
    if array.size == weight.size:
        for axes in itertools.permutations(range(weight.ndim)):
            if close(weight.transpose(axes).ravel(), array.ravel()):
                return lambda w: w.transpose(axes).ravel()
    if (
        weight.ndim == 2
        and array.ndim > 1
        and array.shape[-1] == weight.shape[1]
        and 1 < array.size <= weight.size
    ):
        rows = array.reshape(-1, weight.shape[1])
        for start in range(len(weight) - len(rows) + 1):
            if close(weight[start : start + len(rows)], rows):
                return lambda w: w[start : start + len(rows)].ravel()
        places = {row.tobytes(): i for i, row in enumerate(weight)}
        chosen = [places[row.tobytes()] for row in rows if row.tobytes() in places]
        if array.ndim == 2 and len(chosen) == len(rows):
            return lambda w: w[chosen].ravel()
    return None


def close(a: np.ndarray, b: np.ndarray) -> bool:
    return bool(np.allclose(a, b, rtol=EQUAL, atol=0))


def differences(row: Row, ours: Training, theirs: Training, pairs: Pairs) -> None:
    """Fill in the largest relative differences of losses, weights and predictions."""
    row.losses = max(abs(a - b) / max(abs(b), 1e-12) for a, b in zip(ours.losses, theirs.losses, strict=True))
    apart = {}
    for name, weight in theirs.weights.items():
        other, move = pairs.get(name, ("", np.ravel))
        if other in ours.weights:
            apart[name] = relative(ours.weights[other].ravel(), move(weight))
    row.compared = f"{len(apart)} of {len(theirs.weights)}"
    if apart:
        row.weights = max(apart.values())
        row.worst = max(apart, key=apart.__getitem__)
    row.predictions = relative(ours.predictions, theirs.predictions)


def relative(a: np.ndarray, b: np.ndarray) -> float:
    """Return the largest difference of two arrays, relative to the largest number of the second."""
    if a.shape != b.shape:
        return math.inf
    finite = np.isfinite(b)
    if not np.array_equal(finite, np.isfinite(a)):
        return math.inf
    if not finite.any():
        return 0.0
    return float(np.abs(a - b)[finite].max() / max(np.abs(b[finite]).max(), 1e-12))

"""Train ten steps in a framework and in graphopt from the same export, and measure the differences."""

from __future__ import annotations

import itertools
import math
import warnings
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.graph.origins import Kind, LeftOut, Origin
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.checks.findings import CheckTable

Arrays = Mapping[str, np.ndarray]
Move = Callable[[np.ndarray], np.ndarray]
Pairs = dict[
    str, tuple[str, Move]
]  # for each weight, the initializer that contains it, and how the exporter rearranged its numbers

RECORDED = "graphopt"  # begins the names of the exporters of graphopt.export
STEPS = 10
TOLERANCE = 1e-4
CHAOS = 0.3  # the share of a difference that the framework's own rounding must explain
ROUNDINGS = 4  # of the inputs, of which one may move a number past a kink and others not
EQUAL = 1e-6  # the largest difference between a weight and its export


def optimizers(rate: float) -> tuple[Any, ...]:
    """Return SGD without momentum and AdamW, whose epsilon hides the rounding of gradients that are 0."""
    return passes.SGD(rate), passes.AdamW(rate / 10, epsilon=1e-4)


@dataclass(frozen=True)
class Batch:
    """Hold inputs by their names in the export, and targets unless the model returns its loss."""

    inputs: Arrays
    target: np.ndarray | None

    @property
    def feeds(self) -> Arrays:
        return self.inputs if self.target is None else {**self.inputs, "target": self.target}


@dataclass(frozen=True)
class Training:
    """Hold the results of ten steps: the losses, the weights by name, and the predictions for a last batch.

    `trained` counts the numbers that train by the names of weights, tied ones once. For graphopt, `said` contains the
    lines of the report about weights that the exporter changed, `initial` the initial parameters, and `computed` the
    names of those that the exporter computed.
    """

    losses: Sequence[float]
    weights: Arrays
    predictions: np.ndarray
    trained: Mapping[str, int]
    said: Mapping[str, str] = field(default_factory=dict)
    initial: Arrays = field(default_factory=dict)
    computed: Sequence[str] = ()
    warned: str = ""  # that another tool has removed the exporter's records
    checked: CheckTable = field(default_factory=CheckTable)  # of the first step


@dataclass(frozen=True)
class Case(ABC):
    """Describe an architecture in its framework.

    Args:
        loss: the pass for the framework's loss; `passes.OwnLoss` for a model that returns its loss.
        optimizers: the passes for the framework's optimizers, each of which is a row of the table.
        training: the pass that enables the training behaviour; None for a model without one.
        freeze: the parameters that the framework freezes, which no ONNX file records.
        unrecorded: the words of exporters or tools that drop what stops gradients: detach(), or the row of an embedding
            that pads, which does not train; or that merge weights with equal numbers.
        tolerance: the largest relative difference of an agreement.
    """

    loss: Any = field(default_factory=passes.MeanSquaredError, kw_only=True)
    optimizers: Sequence[Any] = field(default=optimizers(0.01), kw_only=True)
    training: Any = field(default_factory=passes.TrainingMode, kw_only=True)
    freeze: str | None = field(default=None, kw_only=True)
    unrecorded: Sequence[str] = field(default=(), kw_only=True)
    tolerance: float = field(default=TOLERANCE, kw_only=True)

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
    def train(self, optimizer: Any, batches: Sequence[Batch], double: bool) -> Training:
        """Train a copy on all batches except the last, and predict the last one, in float32 or float64."""

    def rounded_otherwise(self, optimizer: Any, batches: Sequence[Batch]) -> Iterator[Training]:
        """Train in float32 with other roundings: of each input, up or down by chance."""
        for seed in range(ROUNDINGS):
            rng = np.random.default_rng(seed)
            moved = [
                Batch({name: nudged(x, rng) for name, x in batch.inputs.items()}, batch.target) for batch in batches
            ]
            yield self.train(optimizer, moved, double=False)

    def train_as_recorded(self, optimizer: Any, batches: Sequence[Batch]) -> Training:
        """Train with the gradients that the exporter does not stop."""
        raise NotImplementedError


class NotExported(Exception):
    """Report that the framework's exporter refuses the architecture."""


@dataclass
class Row:
    """Hold a row of the table; differences are the largest relative ones."""

    name: str
    exporter: str
    optimizer: str = "-"
    verdict: str = ""
    cause: str = ""
    theirs: int | None = None
    ours: int | None = None
    compared: str = ""
    losses: float | None = None
    weights: float | None = None
    predictions: float | None = None
    own: float | None = None  # the framework compared with itself in float64, and with other roundings
    checked: str = ""  # what the check of the first step finds
    worst: str = ""
    seconds: float = 0.0

    @property
    def difference(self) -> float:
        return max(self.losses or 0, self.weights or 0, self.predictions or 0)


@dataclass(frozen=True)
class Export:
    """Hold a model with its initial weights, its export and its batches."""

    model: Model
    initial: Arrays
    proto: onnx.ModelProto
    batches: Sequence[Batch]
    recorded: bool = False  # by graphopt.export: what trains, and how, needs no options


def exported(case: Case, exporter: str) -> Export:
    """Build a model and export it."""
    model = case.model(exporter)
    batches = model.batches(STEPS + 1)
    initial = model.parameters()
    try:
        return Export(model, initial, model.export(), batches, exporter.startswith(RECORDED))
    except (NotExported, GraphoptError):
        raise
    except Exception as error:
        raise NotExported(f"{type(error).__name__}: {error}") from error


def judge(row: Row, case: Case, optimizer: Any, export: Export) -> None:
    """Fill a row: train an export in the framework and in graphopt, and compare the results."""
    model, batches, initial = export.model, export.batches, export.initial
    theirs = model.train(optimizer, batches, double=False)
    if not all(map(math.isfinite, theirs.losses)):
        raise ValueError(f"the framework's own losses are not finite: {theirs.losses}")
    ours = train_here(export, case, optimizer)
    pairs = same(initial, [*constants(export.proto), *ours.initial.items()])
    row.ours, row.theirs = sum(ours.trained.values()), sum(in_export(theirs, pairs).values())
    differences(row, ours, theirs, pairs)
    row.checked = counted(ours.checked)
    if alarms := ours.checked.differences:
        row.verdict, row.cause = "false alarm", str(alarms[0])
        return
    if row.ours == row.theirs and row.difference <= case.tolerance:
        row.verdict = "agrees"
        return
    row.own = distance(theirs, model.train(optimizer, batches, double=True))
    others = model.rounded_otherwise(optimizer, batches)
    while row.own <= CHAOS * row.difference and (other := next(others, None)) is not None:
        row.own = max(row.own, distance(theirs, other))
    extra, missing = apart(ours, theirs, initial, pairs)
    row.cause = f"here alone: {listed(extra)}; in the framework alone: {listed(missing)}"
    if (extra or missing) and not export.recorded and is_said(ours.said, extra, missing):
        row.verdict = "reported"
        named = [ours.said[name] for name in (*extra, *missing) if name in ours.said] or list(ours.said.values())
        row.cause = f"{row.cause}. The report: {'; '.join(named[:2])}"
    elif row.ours == row.theirs and row.own > CHAOS * row.difference:
        row.verdict, row.cause = "chaotic", ""
    elif (
        not export.recorded
        and any(word in row.exporter for word in case.unrecorded)
        and follows(export, case, optimizer, ours, pairs)
    ):
        row.verdict, row.cause = (
            "not recorded",
            "the file does not say what stops a gradient, or which weights are merged; the framework without it trains "
            "the same",
        )
    elif ours.warned:
        row.verdict, row.cause = "reported", f"{row.cause}. The warning: {ours.warned}"
    else:
        row.verdict = "differs"


def counted(table: CheckTable) -> str:
    """Return how many findings of the check of the first step agree, and why the first of the others does not."""
    agree = sum(x.verdict == "agrees" for x in table.findings)
    others = [x for x in table.findings if x.verdict != "agrees"]
    told = f"; {len(others)} {others[0].verdict}: {others[0].reason[:100]}" if others else ""
    return f"{agree} of {len(table.findings)}{told}"


def nudged(x: np.ndarray, rng: np.random.Generator) -> np.ndarray:
    """Return an array whose floating-point numbers are the next ones up or down, each by chance."""
    if x.dtype.kind != "f":
        return x
    return np.nextafter(x, rng.choice([-np.inf, np.inf], x.shape).astype(x.dtype))


def distance(one: Training, other: Training) -> float:
    """Return the largest relative difference of two trainings in the framework."""
    row = Row("", "")
    differences(row, one, other, {name: (name, np.ravel) for name in other.weights})
    return row.difference


def follows(export: Export, case: Case, optimizer: Any, ours: Training, pairs: Pairs) -> bool:
    """Return whether graphopt trains what the exporter recorded."""
    row = Row("", "")
    differences(row, ours, export.model.train_as_recorded(optimizer, export.batches), pairs)
    return row.difference <= case.tolerance


def apart(ours: Training, theirs: Training, initial: Arrays, pairs: Pairs) -> tuple[dict[str, int], dict[str, int]]:
    """Return the parameters that train only in graphopt and only in the framework, by their values, with counts.

    What the exporter computed from parameters trains only in graphopt, even if some of its numbers are theirs. A
    parameter of which the file has no number is not missing if something was computed by the exporter.
    """
    found = {other for other, _ in pairs.values()}
    training = {other for name, (other, _) in pairs.items() if name in theirs.trained}
    numbers_there = np.concatenate([x.ravel() for x in initial.values()])
    numbers_here = np.concatenate([x.ravel() for x in ours.initial.values()])
    extra = {
        name: count
        for name, count in ours.trained.items()
        if name not in training
        and (name in found or name in ours.computed or not is_part(ours.initial[name], numbers_there))
    }
    missing = {
        name: count
        for name, count in in_export(theirs, pairs).items()
        if (pairs[name][0] not in ours.trained if name in pairs else not ours.computed)
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


def train_here(export: Export, case: Case, optimizer: Any) -> Training:
    """Compile an export, train it on all batches except the last, and predict the last one with the trained model."""
    batches, steps = export.batches, {"loss": case.loss, "optimizer": optimizer}
    if not export.recorded:
        steps |= {"training": case.training, "parameters": passes.Parameters(freeze=case.freeze)}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        step = graphopt.compile(export.proto, **steps)
    weights = with_role(step, Role.PARAMETER)
    numbers = {str(value.name): math.prod(value.shape) for value in weights}
    initial = {str(value.name): value.const_value.numpy() for value in weights}
    checked = graphopt.check(step, batches[0].feeds, verify="first", threads=1)
    executor = graphopt.Executor(step, threads=1, verify="first" if checked.agrees else False)
    losses = [executor.step(batch.feeds)["loss"] for batch in batches[:-1]]
    trained = executor.trained()
    predicted = graphopt.run(trained, batches[-1].inputs)
    prediction = next(array for array in predicted.values() if np.issubdtype(array.dtype, np.floating))
    computed = [str(value.name) for value in weights if Origin.read(value).kind is Kind.COMPUTED]
    warned = next((text for one in caught if "removed the records" in (text := str(one.message))), "")
    names = said(step, weights)
    return Training(losses, dict(constants(trained)), prediction, numbers, names, initial, computed, warned, checked)


def said(step: Any, weights: Sequence[Any]) -> dict[str, str]:
    """Return the report's lines about weights that the exporter changed, that a rule decided, or that are frozen."""
    found = {name: f"{name}: left out by the exporter" for name in (LeftOut.read(step) or LeftOut()).names}
    for value in weights:
        origin = Origin.read(value)
        if not origin.certain or origin.kind is Kind.COMPUTED:
            found[value.name] = f"{value.name}: {origin.reason} {' '.join(origin.sources)}".strip()
    for value in step.graph.initializers.values():
        origin = Origin.read(value)
        if origin is not None and origin.trains:
            found[str(value.name)] = f"{value.name}: {origin.reason}"
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
            if array.dtype.kind == "f" and name not in found:
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
    if weight.ndim == 2 and array.ndim > 1 and array.shape[-1] == weight.shape[1] and 1 < array.size <= weight.size:
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

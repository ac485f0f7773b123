"""Calibrate what a model predicts on rows that did not train: probabilities, and variances of a regression."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, state
from graphopt.graph.classified import activation_of, classification_of
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import Derived
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.roles import TargetSpec
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import dims_of, dtype_of, given, is_floating, name_of, rank, redirect, wide_type
from graphopt.intervals import within
from passes.differentiate import floating_output
from passes.losses.classification import activation_behind
from passes.losses.loss import epsilon, positive
from passes.quantization.calibration import watching
from passes.weights.initializers import register

__all__ = ["Calibration", "Platt", "Temperature", "VarianceScaling", "VectorScaling"]

_PASSING = {
    *("Cast", "Clip", "DequantizeLinear", "Flatten", "Identity", "Log", "QuantizeLinear"),
    *("Reshape", "Squeeze", "Transpose", "Unsqueeze"),
}
_ACTIVATIONS = ("LogSoftmax", "Sigmoid", "Softmax")
_BESIDE = ("mean", "mutual_information", "variance")  # called OUTPUT.KIND; the first of others is KIND
_FROM_ONE = 1e-3  # of a sum of probabilities, by rounding
_ALL = 2**31  # rows
_TURNS, _GRADIENT, _GAIN = 100, 1e-10, 1e-18  # of Newton's method; the decrement: twice the loss left to gain
_CERTAIN = 1e-6  # the mean loss that means: no mistake is left
_Own = TypeVar("_Own", bound="Learning")
_Of = TypeVar("_Of", bound="OfClasses")
_Calibration = TypeVar("_Calibration", bound="Calibration")
OnRows = Callable[..., list[np.ndarray]]


@dataclass(frozen=True)
class Learning(Pass):
    """Learn from the rows of `graphopt.calibrate` how sure a model may be, and write this into the model.

    Args:
        output: the name of the output; by default, the only floating-point one that no such pass has added.
    """

    output: str | None = field(default=None, kw_only=True)

    alters: ClassVar[str] = "calibrates predictions"
    follows: ClassVar[bool] = True
    learnt_as: ClassVar[str] = "scale"  # the field that None leaves to be learnt

    @property
    def learns(self) -> bool:
        return getattr(self, self.learnt_as, self) is None

    def requires(self, model: ir.Model) -> None:
        name = type(self).__name__
        if self.learns:
            raise GraphoptError(
                f"{name} learns from rows that did not train: call graphopt.calibrate(model, data, passes.{name}(...))"
            )

    def wrong(self, message: str) -> GraphoptError:
        """Return the error of the pass."""
        return GraphoptError(f"{type(self).__name__}: {message}")

    def adapted(self: _Own, model: ir.Model, read: Read) -> _Own:
        model = model.clone()
        ensure_typed(model)
        return self.learn(model, functools.partial(self._on_rows, model, read))

    def learn(self: _Own, model: ir.Model, on_rows: OnRows) -> _Own:
        """Return the pass with what it learns. `on_rows` gives values of the model and the targets, as float64."""
        raise NotImplementedError

    def _on_rows(self, model: ir.Model, read: Read, *values: ir.Value) -> list[np.ndarray]:
        names = [*dict.fromkeys(map(name_of, values))]
        model = watching(model, names)
        target = ir.Value(name="target", type=ir.TensorType(ir.DataType.DOUBLE))
        model.graph.inputs.append(target)
        with Emitter(model) as op:
            found = [*model.graph.outputs, target]
            model.graph.outputs[:] = [op.Cast(y, to=ir.DataType.DOUBLE) for y in found]
        parts = [[*part.values()] for part in read.run(model, _ALL)]
        if not parts:
            raise self.wrong("expected rows to learn from, found none")
        arrays = dict(zip([*names, "target"], map(np.concatenate, zip(*parts, strict=True)), strict=True))
        for name, numbers in arrays.items():
            if not np.isfinite(numbers).all():
                raise self.wrong(f"expected finite numbers of {name!r}, found others")
        return [arrays[name] for name in (*map(name_of, values), "target")]

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        with Emitter(model) as op:
            y, made = self.emit(op, model)
            for kind, value in made.items():
                self._add(op, model, y, kind, value)

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        """Emit the values that describe an output; return the output, and these by their kinds."""
        raise NotImplementedError

    def _add(self, op: Emitter, model: ir.Model, y: ir.Value, kind: str, value: ir.Value) -> None:
        """Make a value an output, and note what it says, and of which output."""
        taken = {x.name: Derived.read(x) for x in model.graph.outputs}
        of_another = (note := taken.get(kind)) is not None and note.of != y.name
        name = f"{y.name}.{kind}" if kind in _BESIDE or of_another else kind
        if name in taken:
            raise self.wrong(
                f"expected a model without the output {name!r}, which it adds, found one, as another such pass "
                "adds: take one of them, or start from the file before"
            )
        state.check_free(model, name)
        added = op.Identity(value) if value.producer() is None or value.is_graph_output() else value
        added.name = name
        model.graph.outputs.append(Derived(name_of(y), kind).write(added))

    def class_numbers(self, targets: np.ndarray, classes: int) -> np.ndarray:
        """Return the number of the class of each row."""
        numbers = targets.reshape(len(targets), -1)
        wrong = numbers[(numbers != np.floor(numbers)) | (numbers < 0) | (numbers >= classes)]
        if numbers.shape[1] != 1 or wrong.size:
            found = f"rows of {numbers.shape[1]}" if numbers.shape[1] != 1 else f"{wrong[0]:g}"
            raise self.wrong(f"expected a class from 0 to {classes - 1} as the target of each row, found {found}")
        return numbers[:, 0].astype(np.int64)

    def matching(self, targets: np.ndarray, predicted: np.ndarray) -> np.ndarray:
        """Return targets in the shape of what is predicted."""
        if targets.size != predicted.size:
            raise self.wrong(f"expected targets of shape {list(predicted.shape)}, found {list(targets.shape)}")
        return targets.reshape(predicted.shape)

    def check_count(self, name: str, *due: object) -> None:
        """Raise an error unless the numbers of a field, which may be given by hand, are so many; None has none."""
        numbers = getattr(self, name, None)
        if numbers is not None and all(isinstance(count, int) for count in due) and len(numbers) not in due:
            raise self.wrong(
                f"{name}: expected {' or '.join(map(str, due))} number{'s' * (due != (1,))}, found {len(numbers)}"
            )

    def own_output(self, model: ir.Model) -> ir.Value:
        return floating_output(model, self.output, "output")

    def number(self, model: ir.Model, name: str, value: object, like: ir.Value) -> ir.Value:
        """Add numbers as an initializer, which a training of the file leaves as it is, unless told its name."""
        found = register(model, name, np.asarray(value, dtype_of(like).numpy()))
        metadata.FROZEN.set(found)
        return found


def wide(op: Emitter, x: ir.Value) -> ir.Value:
    """Return numbers of 16 bits as float32, in which they are summed."""
    return op.cast(x, wide_type(x))


def are_probabilities(y: np.ndarray) -> bool:
    """Return whether numbers [N, classes] lie between 0 and 1, and those of each row sum to 1."""
    return _are_rates(y) and bool(np.abs(y.sum(1) - 1).max() <= _FROM_ONE)


def _are_rates(y: np.ndarray) -> bool:
    """Return whether numbers lie between 0 and 1, but for rounding: a sum over trees is -7e-7 in ONNX Runtime."""
    return bool((np.abs(y - 0.5) <= 0.5 + _FROM_ONE).all())


@dataclass(frozen=True)
class OfClasses(Learning):
    """Read the scores of classes.

    Args:
        from_logits: whether an output behind which no Softmax or Sigmoid is found holds logits. By default, it does,
            unless its rows are probabilities, which sum to 1.
    """

    from_logits: bool | None = field(default=None, kw_only=True)

    def looked_at(self: _Of, model: ir.Model, on_rows: OnRows) -> _Of:
        """Return the pass that knows from the rows whether an output whose origin is unknown holds logits.

        Raises:
            GraphoptError: one number for each row is between 0 and 1, as some logits are; or all rows sum to another
                number than 1, such as percentages.
        """
        scores = self.scores(model)
        if self.from_logits is not None or scores.logits is not scores.output or scores.noted is not None:
            return self
        y, _ = on_rows(scores.output)
        if scores.is_binary and _are_rates(y):
            raise self.wrong(
                f"expected from_logits=true or false, since {scores.output.name!r} is between 0 and 1 in all rows, as "
                "probabilities and some logits are, found null: set it"
            )
        is_rate = not scores.is_binary and are_probabilities(y)
        sums = y.sum(-1)
        if not is_rate and y.ndim > 1 and y.min() >= 0 < sums.min() and np.ptp(sums) <= _FROM_ONE * sums[0]:
            raise self.wrong(
                f"expected logits, or probabilities that sum to 1, found that each row of {scores.output.name!r} sums "
                f"to {sums[0]:g}: divide by it, or set from_logits"
            )
        return replace(self, from_logits=not is_rate)

    def scores(self, model: ir.Model) -> Scores:
        """Return the output whose classes have probabilities."""
        y = self.own_output(model)
        if y.shape is None or rank(y) not in (1, 2):
            raise self.wrong(
                f"expected an output [N, classes], or [N] or [N, 1] of two classes, found {y.name!r} of shape {y.shape}"
            )
        noted = classification_of(model)
        noted = noted if noted is not None and noted.output == y.name else None
        node, inner, scores = _activation(y), y, Scores(y, y, None, noted)
        are_labels = noted is not None and noted.labels is not None
        if node is not None:
            scores, axis = Scores(y, given(node.inputs[0]), node.op_type, noted), node.attributes.get_int("axis", -1)
            are_labels = node.op_type == "Sigmoid"
            if not are_labels and (scores.is_binary or axis % 2 == 0):
                raise self.wrong(
                    f"expected a {node.op_type} over the classes of each row, found {y.name!r} of shape {y.shape}, "
                    f"axis {axis}"
                )
        if are_labels and not scores.is_binary:
            raise self.wrong(
                f"expected one label for each row, found a Sigmoid for each of {dims_of(y)[1]} columns of {y.name!r}"
            )
        if node is not None:
            return scores
        while (node := inner.producer()) is not None and node.domain == "" and node.op_type in _PASSING:
            inner = given(node.inputs[0])
        if inner is not y and (node := _activation(inner)) is not None:
            raise self.wrong(
                f"expected logits, found that {y.name!r} comes out of the {node.op_type} {inner.name!r}: make "
                f"{given(node.inputs[0]).name!r}, the value before it, the output"
            )
        is_rate = self.from_logits is False or (noted is not None and activation_of(noted) == "")
        return replace(scores, logits=None if is_rate or activation_behind(y) else y)


def _activation(y: ir.Value) -> ir.Node | None:
    """Return the node that computes a value if it makes rates of logits."""
    node = y.producer()
    return node if node is not None and node.domain == "" and node.op_type in _ACTIVATIONS else None


@dataclass(frozen=True)
class Scores:
    """Hold an output of classes: its logits, if the graph shows them, and the operator that makes rates of them.

    Args:
        noted: how the file says that the output classifies.
    """

    output: ir.Value
    logits: ir.Value | None
    activation: str | None
    noted: TargetSpec | None = None

    @property
    def is_binary(self) -> bool:
        """Return whether one number for each row decides between two classes."""
        return dims_of(self.output)[1:] in ((), (1,))

    def emit_logits(self, op: Emitter) -> ir.Value:
        """Return the logits; the logarithms of probabilities if the graph shows none."""
        if self.logits is not None:
            return wide(op, self.logits)
        p = wide(op, self.output)
        if not self.is_binary:
            return op.Log(positive(op, p))
        p = op.Clip(p, epsilon(p), 1 - epsilon(p))
        return op.Log(p) - op.Log(1 - p)

    def emit_rates(self, op: Emitter, logits: ir.Value) -> ir.Value:
        return op.Sigmoid(logits) if self.is_binary else op.Softmax(logits, axis=1)

    def emit_probabilities(self, op: Emitter) -> ir.Value:
        """Return the probability of each class, [N, classes]."""
        p = wide(op, self.output)
        p = self.emit_rates(op, p) if self.logits is self.output else p
        if not self.is_binary:
            return op.Exp(p) if self.activation == "LogSoftmax" else p
        p = op.Reshape(p, [-1, 1])
        return op.Concat(1 - p, p, axis=1)


@dataclass(frozen=True)
class Calibration(OfClasses):
    """Scale logits, so that probabilities are as large as the share of rows in which they are right.

    The scale and the bias are those of the least cross-entropy, a convex function, found by Newton's method in float64.
    The logits of an output that is probabilities are what its Softmax or Sigmoid reads, else their logarithms.

    Raises:
        GraphoptError: there is no single output of classes; a Softmax is in between; the targets are no class numbers;
            the rows show no mistake; or a class of `VectorScaling` has no row.

    >>> class PerClass(passes.VectorScaling):  # without biases
    ...     has_bias = False
    >>> scaled = PerClass(scale=(0.5,) * 10)(graphopt.load(models.mlp((1, 8, 8), 10))).model
    """

    per_class: ClassVar[bool] = False
    has_bias: ClassVar[bool] = False
    of_two: ClassVar[bool | None] = None  # whether there are two classes, of one number; None for both

    def learnt(self, scale: np.ndarray, bias: np.ndarray) -> Any:
        """Return the pass with the numbers that it has learnt."""
        raise NotImplementedError

    def calibrate(self, op: Emitter, model: ir.Model, logits: ir.Value, name: str) -> ir.Value:
        """Emit the calibrated logits; `name` is that of the output."""
        z = logits * self.number(model, f"{name}.scale", getattr(self, "scale", 1.0), logits)
        return z + self.number(model, f"{name}.bias", getattr(self, "bias", None) or 0.0, logits)

    def learn(self: _Calibration, model: ir.Model, on_rows: OnRows) -> _Calibration:
        known = self.looked_at(model, on_rows)
        scores = known.scores(model)
        with Emitter(model) as op:
            logits = scores.emit_logits(op)
        logits.name = logits.name or "calibration.logits"
        z, targets = on_rows(logits)
        if scores.is_binary:
            z = np.stack([np.zeros(len(z)), z.reshape(-1)], 1)
        numbers = self.class_numbers(targets, z.shape[1])
        missing = np.flatnonzero(np.bincount(numbers, minlength=z.shape[1]) == 0)
        if self.per_class and missing.size:
            raise self.wrong(
                f"expected rows of each of {z.shape[1]} classes, found none of class {missing[0]}: passes.Temperature "
                "needs no row of each class"
            )
        return known._fitted(z, numbers)

    def _fitted(
        self: _Calibration, z: np.ndarray, numbers: np.ndarray, weights: np.ndarray | None = None
    ) -> _Calibration:
        """Return the pass with the numbers of the least cross-entropy of logits [N, classes]."""
        weights = np.ones(len(z)) if weights is None else weights
        found = _most_likely(z, numbers, weights / weights.sum(), z.shape[1] if self.per_class else 1, self.has_bias)
        if found is None:
            raise self.wrong(
                f"expected rows with mistakes, by which the best scale is finite, found {len(z)} rows without: take "
                "more rows, none of which trained"
            )
        if not self.per_class and found[0] <= 0:
            raise self.wrong(
                f"expected larger logits of the right classes, found a best scale of {found[0].item():.3g}: train the "
                "model before, or look at the order of its classes"
            )
        learnt: _Calibration = self.learnt(*found)
        return learnt

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        scores = self.scores(model)
        y = scores.output if scores.logits is None else scores.logits
        for name in ("scale", "bias") if self.per_class else ():
            self.check_count(name, dims_of(y)[1])
        uses = list(y.uses())
        z = self.calibrate(op, model, scores.emit_logits(op), name_of(scores.output))
        return replace_output(op, model, y, scores.emit_rates(op, z) if scores.logits is None else z, uses), {}

    def scores(self, model: ir.Model) -> Scores:
        scores = super().scores(model)
        if self.of_two not in (None, scores.is_binary):
            due, other = ("[N] or [N, 1] of two classes", "VectorScaling") if self.of_two else ("[N, classes]", "Platt")
            raise self.wrong(
                f"expected an output {due}, found {scores.output.name!r} of shape {scores.output.shape}: take "
                f"passes.{other}"
            )
        if learnt := Derived.all(model, scores.output.name):
            raise self.wrong(
                f"expected scores from which nothing has been learnt, found the output "
                f"{next(iter(learnt.values())).name!r}: calibrate before PredictionSet, LastLayerLaplace and others"
            )
        return scores


def replace_output(
    op: Emitter, model: ir.Model, y: ir.Value, new: ir.Value, uses: Sequence[tuple[ir.Node, int]]
) -> ir.Value:
    """Give a value the type, the name, the notes and the place of another, which may be an output, and return it."""
    redirect(uses, new := op.cast(new, dtype_of(y)))
    if y.producer() is None and not y.is_graph_output():  # an input keeps its name
        return new
    name, y.name = y.name, f"{y.name}/before"
    metadata.copy(y, new)
    new.name, new.type, new.shape = name, y.type, y.shape
    model.graph.outputs[:] = [new if x is y else x for x in model.graph.outputs]
    return new


@dataclass(frozen=True)
class Temperature(Calibration):
    """Divide logits by a temperature (Guo, Pleiss, Sun, Weinberger 2017, arXiv:1706.04599): labels stay as they are.

    Args:
        log_temperature: the logarithm of the temperature; None learns it.

    >>> calibrated = passes.Temperature(0.5)(graphopt.load(models.mlp((1, 8, 8), 10))).model
    >>> [name for name in calibrated.graph.initializers if "temperature" in name]
    ['y.log_temperature']
    """

    log_temperature: float | None = within("[-50, 50]", None)

    learnt_as: ClassVar[str] = "log_temperature"

    def learnt(self, scale: np.ndarray, bias: np.ndarray) -> Temperature:
        return replace(self, log_temperature=-math.log(scale.item()))

    @classmethod
    def of(cls, p: np.ndarray, numbers: np.ndarray, weights: np.ndarray | None = None) -> Temperature:
        """Return the pass of probabilities [N, classes], of the numbers of the right classes, and of rows' weights."""
        return cls()._fitted(_logarithms(p), numbers, weights)

    def of_probabilities(self, p: np.ndarray) -> np.ndarray:
        """Return calibrated probabilities [N, classes]."""
        rates = np.exp(_log_softmax(_logarithms(p) * math.exp(-(self.log_temperature or 0.0))))
        return rates.astype(p.dtype, copy=False)

    def calibrate(self, op: Emitter, model: ir.Model, logits: ir.Value, name: str) -> ir.Value:
        return logits / op.Exp(self.number(model, f"{name}.log_temperature", self.log_temperature, logits))


@dataclass(frozen=True)
class VectorScaling(Calibration):
    """Multiply the logits of each class by a number of its own, and add one (Guo et al. 2017).

    Args:
        scale: the factor of each class; None learns it.
        bias: the summand of each class.

    >>> calibrated = passes.VectorScaling((0.5,) * 10)(graphopt.load(models.mlp((1, 8, 8), 10))).model
    """

    scale: tuple[float, ...] | None = field(default=None, repr=False)
    bias: tuple[float, ...] | None = field(default=None, repr=False)

    per_class: ClassVar[bool] = True
    has_bias: ClassVar[bool] = True
    of_two: ClassVar[bool | None] = False

    def learnt(self, scale: np.ndarray, bias: np.ndarray) -> VectorScaling:
        return replace(self, scale=tuple(scale.tolist()), bias=tuple(bias.tolist()))


@dataclass(frozen=True)
class Platt(Calibration):
    """Multiply the logit of two classes by a number, and add one (Platt 1999), without smoothing the targets.

    Args:
        scale: the factor; None learns it.
        bias: the summand.

    >>> calibrated = passes.Platt(scale=0.5)(graphopt.load(models.mlp((4,), 1))).model
    """

    scale: float | None = None
    bias: float = 0.0

    has_bias: ClassVar[bool] = True
    of_two: ClassVar[bool | None] = True

    def learnt(self, scale: np.ndarray, bias: np.ndarray) -> Platt:
        return replace(self, scale=scale.item(), bias=float(bias[1] - bias[0]))


def _log_softmax(z: np.ndarray) -> np.ndarray:
    z = z - z.max(1, keepdims=True)
    return np.asarray(z - np.log(np.exp(z).sum(1, keepdims=True)))


def _logarithms(p: np.ndarray) -> np.ndarray:
    return np.log(np.maximum(p.astype(np.float64), np.finfo(p.dtype).tiny))


def _most_likely(
    z: np.ndarray, target: np.ndarray, weights: np.ndarray, scales: int, has_bias: bool
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return the scales and biases of logits that give targets the largest likelihood; None if there are none.

    The weights of rows sum to 1. Each step of Newton's method is solved by conjugate gradients, without a matrix.
    """
    rows, classes = np.arange(len(z)), z.shape[1]
    x = np.concatenate([np.ones(scales), np.zeros(classes if has_bias else 0)])

    def logits(x: np.ndarray) -> np.ndarray:
        return x[:scales] * z + (x[scales:] if has_bias else 0.0)

    def back(g: np.ndarray) -> np.ndarray:
        g = g * weights[:, None]
        scale = (g * z).sum(axis=0 if scales > 1 else None, keepdims=scales == 1).reshape(-1)
        return np.concatenate([scale, g.sum(0) if has_bias else []])

    def loss(x: np.ndarray) -> float:
        return -float(weights @ _log_softmax(logits(x))[rows, target])

    for _ in range(_TURNS):
        p = np.exp(_log_softmax(logits(x)))
        excess = p.copy()
        excess[rows, target] -= 1
        gradient = back(excess)
        before, size = loss(x), 1.0
        step = _solved(lambda v, p=p: back(p * ((u := logits(v)) - (p * u).sum(1, keepdims=True))), -gradient)  # type: ignore[misc]
        if np.abs(gradient).max() < _GRADIENT or -float(gradient @ step) < _GAIN:
            break
        while size > 1e-10 and not loss(x + size * step) <= before + 1e-4 * size * float(gradient @ step):
            size /= 2
        if size <= 1e-10:
            break
        x = x + size * step
    return None if loss(x) < _CERTAIN else (x[:scales], x[scales:])


def _solved(times: Callable[[np.ndarray], np.ndarray], b: np.ndarray) -> np.ndarray:
    """Solve a system whose matrix is positive semidefinite by conjugate gradients (Hestenes, Stiefel 1952)."""
    x, residual = np.zeros_like(b), b.copy()
    direction, square = residual, float(b @ b)
    for _ in range(4 * len(b)):
        product = times(direction)
        curvature = float(direction @ product)
        if curvature <= 0 or square <= 1e-24 * float(b @ b):
            break
        x = x + square / curvature * direction
        residual = residual - square / curvature * product
        square, last = float(residual @ residual), square
        direction = residual + square / last * direction
    return x if x.any() else b


@dataclass(frozen=True)
class VarianceScaling(Learning):
    """Add an output `OUTPUT.variance` to a regression, or scale the one that it has (Laves et al. 2020).

    Without a variance, it is the mean squared error of each column. With one, it is multiplied by the mean of
    (t - y)^2 / variance, which makes the likelihood of normally distributed targets t largest (arXiv:2104.12376,
    section 3).

    Args:
        scale: the variance of each column, or the factor; None learns it.
        variance: the name of an output that the model itself has, with a number for each one that it predicts or for
            each row; by default, the variance that another pass has added.

    >>> rows = {"x": numpy.zeros((4, 2), numpy.float32), "target": numpy.float32([[1], [2], [-1], [-2]])}
    >>> calibrated = graphopt.calibrate(models.linear((2,), 1), rows, passes.VarianceScaling())
    >>> graphopt.run(calibrated, {"x": rows["x"][:1]})["y.variance"].tolist()  # the model predicts 0
    [[2.5]]
    """

    scale: tuple[float, ...] | None = field(default=None, repr=False)
    variance: str | None = field(default=None, kw_only=True)

    def learn(self, model: ir.Model, on_rows: OnRows) -> VarianceScaling:
        y, variance = self._values(model)
        predicted, of_rows, targets = on_rows(y, variance or y)
        squares = np.square(predicted - self.matching(targets, predicted))
        if variance is None:
            return replace(self, scale=tuple(squares.reshape(len(squares), -1).mean(0).tolist()))
        if of_rows.size not in (len(squares), squares.size):
            expected = " or ".join(map(str, dict.fromkeys([len(squares), squares.size])))
            raise self.wrong(f"expected {expected} numbers of {variance.name!r}, found {of_rows.size}")
        squares, of_rows = (x.reshape(len(squares), -1) for x in (squares, of_rows))
        if not (of_rows > 0).all():
            raise self.wrong(f"expected {variance.name!r} above 0, found {of_rows.min():g}")
        return replace(self, scale=(float((squares / of_rows).mean()),))

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        y, variance = self._values(model)
        if variance is not None:
            self.check_count("scale", 1)
            uses, numbers = list(variance.uses()), wide(op, variance)
            return replace_output(
                op, model, variance, numbers * op.constant(np.array(self.scale), like=numbers), uses
            ), {}
        scale, shape = np.array(self.scale), [size for size in dims_of(y)[1:] if isinstance(size, int)]
        if len(shape) == rank(y) - 1:
            self.check_count("scale", math.prod(shape))
            scale = scale.reshape(shape)
        elif rank(y) > 2:
            raise self.wrong(
                f"expected an output {name_of(y)!r} with known sizes behind its rows, found shape {y.shape}: fix them "
                "when you export"
            )
        return y, {"variance": op.Expand(op.constant(scale, like=wide(op, y)), op.shape_of(y))}

    def _values(self, model: ir.Model) -> tuple[ir.Value, ir.Value | None]:
        if self.variance is None:
            y = self.own_output(model)
            return y, Derived.all(model, y.name).get("variance")
        variance = floating_output(model, self.variance, "variance")
        others = [x for x in model.graph.outputs if x is not variance and is_floating(x) and not Derived.is_on(x)]
        name = others[0].name if len(others) == 1 else None
        return floating_output(model, self.output or name, "output"), variance

"""Define losses of predicted classes, and of sequences of these, from logits or probabilities."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import ON_DEMAND
from graphopt.graph.operators import LAYOUT, VIEWS
from graphopt.graph.rewriting import Read
from graphopt.graph.values import (
    constant_number,
    constant_of,
    dims_of,
    is_floating,
    name_of,
    rank,
    wide_type,
)
from graphopt.intervals import within
from graphopt.moments import weights_of
from passes.differentiate import stop_gradient
from passes.gradients.rules.control_flow import scan_over
from passes.losses.head import losses_of_tokens
from passes.losses.loss import Loss, epsilon, new_input, positive

__all__ = ["BinaryCrossEntropy", "CTC", "CrossEntropy", "Entropy", "Hinge", "KLDivergence"]

_MANY_CLASSES = 2**20  # classes from which on the graph computes the class numbers instead of storing them
_KEEPING = VIEWS | {"Cast", "Clip", "Transpose"}
_WRITING = LAYOUT | {"Add", "Cast", "Concat", "Where", "ScatterElements", "ScatterND"}  # constants into logits
_BESIDE_A_SUM = {"Add", "Cast", "Clip", "Expand", "Identity", "Max", "Reshape", "Unsqueeze"}
IMPOSSIBLE = -1e30  # the logarithm of a probability of 0; with infinity, gradients would be NaN


@dataclass(frozen=True)
class Hinge(Loss):
    """Compute max(0, 1 - t p), for a prediction p and a target t of -1 or 1.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.Hinge())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[-1], [1]])
    >>> float(graphopt.run(step, {"x": zero, "target": target})["loss"])  # the model predicts 0
    1.0
    """

    task = "binary"

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return op.Relu(1 - target * prediction)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {"threshold": 0.0, "labels": [-1, 1]}


@dataclass(frozen=True)
class BinaryCrossEntropy(Loss):
    """Compute -w1 t log p - w0 (1 - t) log(1 - p), for a probability p, a target t from 0 to 1, and weights w.

    Args:
        from_logits: the model predicts logits x, and p = sigmoid(x). The loss is then softplus(x) - t x, which does
            not overflow. Otherwise the model predicts probabilities, which are clipped away from 0 and 1 unless a
            Sigmoid computes them.
        class_weights: the weights w0 and w1 of the targets 0 and 1, in all columns. The mean is weighted by
            w1 t + w0 (1 - t). `balanced` learns them as in `CrossEntropy`. PyTorch's `pos_weight` is w1 / w0.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.BinaryCrossEntropy())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.float32([[0], [1]])
    >>> round(float(graphopt.run(step, {"x": zero, "target": target})["loss"]), 4)  # the logarithm of 2
    0.6931
    """

    from_logits: bool = True
    class_weights: tuple[float, ...] | Literal["balanced"] | None = within("[0, inf)", None, choices=("balanced",))

    task = "binary"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.class_weights not in (None, "balanced") and len(self.class_weights) != 2:
            raise GraphoptError(
                f"BinaryCrossEntropy(class_weights=...): expected 2 numbers, of the targets 0 and 1, found "
                f"{len(self.class_weights)}"
            )

    @property
    def learns(self) -> bool:
        return self.class_weights == "balanced"

    def adapted(self, model: ir.Model, read: Read, target_name: str = "target") -> Loss:
        return replace(self, class_weights=weights_of(map(_class_numbers, read(target_name)), 2))

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        logits = _logits(prediction, "Sigmoid", self.from_logits)
        if logits is None:
            p = op.Clip(prediction, epsilon(prediction), 1 - epsilon(prediction))
            log_p, log_rest = op.Log(p), op.Log(1 - p)
        elif self.class_weights is None:
            return softplus(op, logits) - target * logits
        else:
            log_p, log_rest = -softplus(op, -logits), -softplus(op, logits)
        w0, w1 = self._weights()
        return -(_times(w1, target) * log_p + _times(w0, 1 - target) * log_rest)

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value, *others: ir.Value) -> ir.Value | None:
        if self.class_weights is None:
            return None
        w0, w1 = self._weights()
        return _times(w1, target) + _times(w0, 1 - target)

    def _weights(self) -> tuple[float, ...]:
        return (1.0, 1.0) if self.class_weights is None else _known(self, self.class_weights)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {"threshold": 0.0 if self.from_logits else 0.5, "labels": [0, 1]}

    def probabilities(self, prediction: np.ndarray) -> np.ndarray:
        """Return the probability of the label 1."""
        return 0.5 * (1 + np.tanh(0.5 * prediction)) if self.from_logits else prediction  # a sigmoid


@dataclass(frozen=True)
class _OverClasses(Loss):
    """Compare the distributions over the classes along an axis."""

    axis: int = 1
    from_logits: bool = True

    task = "classification"

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        return {
            "axis": self.axis,
            "classes": self._classes(prediction),
            "target_probabilities": True,
            "from_logits": self.from_logits,
        }

    def _classes(self, prediction: ir.Value) -> int | None:
        """Return the number of classes of a prediction, or None if it is only known at run time."""
        classes = dims_of(prediction)[self.axis]
        return classes if isinstance(classes, int) else None


@dataclass(frozen=True)
class CrossEntropy(_OverClasses):
    """Compute -sum_c q_c w_c log p_c over the classes c along `axis`, for predicted probabilities p and targets q.

    Args:
        axis: the axis of the classes.
        from_logits: the model predicts logits x, and p = softmax(x). Otherwise it predicts probabilities, which are
            clipped away from 0 unless a Softmax computes them. A class whose logit the model's mask sets to -inf adds
            nothing to the loss; a row whose target it is has an infinite loss, as in PyTorch.
        target_probabilities: targets are probabilities in the shape of the prediction. Otherwise they are int64
            class indices in this shape without `axis`.
        label_smoothing: the share of q that is spread over all classes (Szegedy et al. 2016).
        class_weights: a weight w for each class. The mean over integer targets is weighted by the weights of their
            classes. `balanced` lets `graphopt.adapt` and recipes learn them from the labels of the training rows, as
            `graphopt.data.balanced_class_weights` does.
        ignore_index: the integer target that adds nothing to the loss or to its count.
        blocks: the number of blocks of tokens in which a step computes the logits and their loss, as in
            `CausalLanguageModel`, for large vocabularies. It needs logits along the last axis, integer targets and
            equal class weights. None computes all logits at once.

    >>> step = graphopt.compile(models.linear((1,), 4), loss=passes.CrossEntropy())
    >>> zero, target = numpy.zeros((2, 1), numpy.float32), numpy.array([0, 3])
    >>> round(float(graphopt.run(step, {"x": zero, "target": target})["loss"]), 4)  # the logarithm of 4
    1.3863
    """

    target_probabilities: bool = False
    label_smoothing: float = within("[0, 1]", 0.0)
    class_weights: tuple[float, ...] | Literal["balanced"] | None = within("[0, inf)", None, choices=("balanced",))
    ignore_index: int | None = None
    blocks: int | Literal["auto"] | None = within("[1, inf)", None, whole=True, choices=("auto",))

    @property
    def learns(self) -> bool:
        return self.class_weights == "balanced"

    def adapted(self, model: ir.Model, read: Read, target_name: str = "target") -> Loss:
        if self.target_probabilities:
            raise GraphoptError(
                "CrossEntropy(class_weights='balanced'): expected class numbers as targets, found "
                "target_probabilities=True: give a number for each class"
            )
        outputs = [y for y in model.graph.outputs if is_floating(y) and self.output in (None, y.name)]
        axes = len(outputs[0].shape or ()) if len(outputs) == 1 else 0
        classes = self._classes(outputs[0]) if -axes <= self.axis < axes else None
        return replace(self, class_weights=weights_of(read(target_name), classes, self.ignore_index))

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        if self.blocks is not None:
            return self._in_blocks(op, prediction, target)
        log_p = _log_probabilities(op, prediction, self.from_logits, self.axis)
        q = target if self.target_probabilities else self._one_hot(op, prediction, target)
        if not self.target_probabilities and not self.label_smoothing and _may_leave_out(prediction):
            log_p = op.Where(op.Greater(q, 0.0), log_p, op.constant(0.0, like=log_p))  # 0 times -inf is no number
        if self.label_smoothing:
            whole = op.ReduceSum(q, [self.axis]) if self.ignore_index is not None else 1.0
            share = self.label_smoothing / op.count(prediction, [self.axis])
            q = (1 - self.label_smoothing) * q + whole * share
        if self.class_weights is not None:
            q = q * self._weights(op, prediction)
        return -op.ReduceSum(q * log_p, [self.axis], keepdims=0)

    def _in_blocks(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        is_last = self.axis in (-1, rank(prediction) - 1)
        if not (is_last and self.from_logits) or self.target_probabilities or self.class_weights is not None:
            raise GraphoptError(
                f"CrossEntropy(blocks={self.blocks!r}): expected logits with classes along the last axis, axis=-1, "
                f"class numbers as targets and no class weights, found axis={self.axis} of {rank(prediction)} axes, "
                f"from_logits={self.from_logits}, target_probabilities={self.target_probabilities}, "
                f"class_weights={self.class_weights}: leave blocks out"
            )
        ON_DEMAND.set(prediction)
        counts = self._counts(op, target)
        label = target if counts is None else op.Where(counts, target, 0)
        losses = losses_of_tokens(op, prediction, label, self.label_smoothing, self.blocks, "CrossEntropy")
        return losses if counts is None else op.Where(counts, losses, op.constant(0.0, like=losses))

    def _counts(self, op: Emitter, target: ir.Value) -> ir.Value | None:
        """Emit whether each label counts; None if all do."""
        return None if self.ignore_index is None else op.Not(op.Equal(target, self.ignore_index))

    def probabilities(self, prediction: np.ndarray) -> np.ndarray:
        """Return the probability of each class, along `axis`."""
        if not self.from_logits:
            return prediction
        powers = np.exp(prediction - prediction.max(self.axis, keepdims=True))
        return powers / powers.sum(self.axis, keepdims=True)

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value, *others: ir.Value) -> ir.Value | None:
        if self.target_probabilities or (self.class_weights is None and self.ignore_index is None):
            return None
        if self.blocks is not None and (counts := self._counts(op, target)) is not None:
            return op.Cast(counts, to=prediction.dtype)
        q = self._one_hot(op, prediction, target)
        if self.class_weights is not None:
            q = q * self._weights(op, prediction)
        return op.ReduceSum(q, [self.axis], keepdims=0)

    def target_type(self, prediction: ir.Value) -> tuple[ir.DataType, ir.Shape]:
        if self.target_probabilities:
            return super().target_type(prediction)
        dims = list(dims_of(prediction))
        if not -len(dims) <= self.axis < len(dims):
            raise GraphoptError(
                f"CrossEntropy(axis={self.axis}): expected an axis of {prediction.name!r}, found that it has "
                f"{len(dims)} axes"
            )
        if self.axis % len(dims) == 0 and not isinstance(dims[0], int):
            raise GraphoptError(
                f"CrossEntropy(axis={self.axis}): expected the axis of the classes, found the axis of the rows in "
                f"{prediction.name!r} of shape {prediction.shape}"
            )
        del dims[self.axis]
        return ir.DataType.INT64, ir.Shape(dims)

    def metric(self, prediction: ir.Value) -> dict[str, Any]:
        own = {"ignore_index": self.ignore_index, "target_probabilities": self.target_probabilities}
        return super().metric(prediction) | own

    def _along_axis(self, prediction: ir.Value) -> list[int]:
        """Return the shape in which one number per class broadcasts to the prediction."""
        shape = [1] * rank(prediction)
        shape[self.axis] = -1
        return shape

    def _one_hot(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        classes = self._classes(prediction)
        if classes is None or classes > _MANY_CLASSES:
            size = op.Squeeze(op.Gather(op.shape_of(prediction), [self.axis]))
            numbers = op.Reshape(op.Range(0, size, 1), self._along_axis(prediction))
        else:
            numbers = op.constant(np.arange(classes).reshape(self._along_axis(prediction)))
        hot: ir.Value = op.Cast(op.Equal(op.Unsqueeze(target, [self.axis]), numbers), to=prediction.dtype)
        if self.ignore_index is not None and self.ignore_index in range(classes or 2**63):
            counts = op.Not(op.Equal(op.Unsqueeze(target, [self.axis]), self.ignore_index))
            hot = hot * op.Cast(counts, to=hot.dtype)
        return hot

    def _weights(self, op: Emitter, prediction: ir.Value) -> ir.Value:
        assert self.class_weights is not None
        weights = np.array(_known(self, self.class_weights))
        classes = self._classes(prediction)
        if classes not in (None, len(weights)):
            raise GraphoptError(
                f"CrossEntropy(class_weights=...): expected {classes} numbers, one per class, found {len(weights)}"
            )
        return op.constant(weights.reshape(self._along_axis(prediction)).tolist(), like=prediction)


@dataclass(frozen=True)
class KLDivergence(_OverClasses):
    """Compute sum_c t_c (log t_c - log p_c) over the classes c along `axis`, for target probabilities t.

    Args:
        axis: the axis of the classes.
        from_logits: the model predicts logits x, and p = softmax(x). Otherwise it predicts probabilities.

    >>> step = graphopt.compile(models.linear((1,), 2), loss=passes.KLDivergence())
    >>> zero, target = numpy.zeros((1, 1), numpy.float32), numpy.float32([[0.5, 0.5]])
    >>> abs(float(graphopt.run(step, {"x": zero, "target": target})["loss"])) < 1e-6  # the model predicts the same
    True
    """

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value) -> ir.Value:
        log_p = _log_probabilities(op, prediction, self.from_logits, self.axis)
        divergence = target * (op.Log(positive(op, target)) - log_p)
        return op.ReduceSum(divergence, [self.axis], keepdims=0)


@dataclass(frozen=True)
class Entropy(Loss):
    """Compute -sum_c p_c log p_c over the classes c along `axis`, a loss without a target (Wang et al. 2021, "Tent").

    A file adapts to shifted rows while it predicts them: train `passes.Parameters(operators="BatchNormalization")` in
    training mode, one step a batch; the step returns the predictions (arXiv:2006.10726).

    Args:
        axis: the axis of the classes, two or more.
        from_logits: as in `CrossEntropy`. A class whose logit is -inf adds nothing.

    Raises:
        GraphoptError: there is one class.

    >>> step = graphopt.compile(models.linear((1,), 4), loss=passes.Entropy())
    >>> round(float(graphopt.run(step, {"x": numpy.zeros((2, 1), numpy.float32)})["loss"]), 4)  # the logarithm of 4
    1.3863
    """

    axis: int = 1
    from_logits: bool = True

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        return []

    def compare(self, op: Emitter, prediction: ir.Value, *_: ir.Value) -> ir.Value:
        if dims_of(prediction)[self.axis] == 1:
            raise GraphoptError(
                f"Entropy: expected two classes or more along axis {self.axis} of {name_of(prediction)!r}, found 1, "
                "whose entropy is always 0"
            )
        log_p = _log_probabilities(op, prediction, self.from_logits, self.axis)
        p = op.Exp(log_p)
        return -op.ReduceSum(p * op.Where(op.Greater(p, 0.0), log_p, 0.0), [self.axis], keepdims=0)


@dataclass(frozen=True)
class CTC(Loss):
    """Compute -log p(labels) of labels without times: connectionist temporal classification, for speech and text.

    The input `target` has the class numbers of the labels of each row, int64 [rows, most labels], and negative numbers
    after the last one. `mean` divides the loss of each row by the number of its labels, as PyTorch does.

    Args:
        blank: the class that means no label.
        axis: the axis of the classes in the prediction, which has three axes.
        time_axis: the axis of the steps. The rows are along the remaining axis.
        from_logits: the model predicts logits or logarithms of probabilities. Otherwise it predicts probabilities.
        input_lengths: add an input `input_lengths`, int64 [rows], with the number of steps of each row, 1 or more.
        zero_infinity: rows whose labels do not fit into their steps have no loss. Otherwise, their loss is infinite.

    Raises:
        GraphoptError: the prediction has other axes, or `blank` is none of its classes.

    Source: Graves et al., "Connectionist Temporal Classification: Labelling Unsegmented Sequence Data with Recurrent
    Neural Networks", ICML 2006, section 4.1.

    >>> import onnx
    >>> model = onnx.parser.parse_model(
    ...     '''<ir_version: 10, opset_import: ["" : 21]>
    ...     g (float[N,T,3] x) => (float[N,T,3] y) <float[3] w = {0, 0, 0}> { y = Add(x, w) }'''
    ... )
    >>> step = graphopt.compile(model, loss=passes.CTC(), optimizer=passes.SGD(0.1))
    >>> feeds = {"x": numpy.zeros((1, 2, 3), numpy.float32), "target": numpy.int64([[1, -1]])}
    >>> round(float(graphopt.Executor(step).step(feeds)["loss"]), 4)  # 3 of 9 paths: 1 1, 0 1 and 1 0
    1.0986
    """

    blank: int = within("[0, inf)", 0)
    axis: int = within("[-3, 2]", 2)
    time_axis: int = within("[-3, 2]", 1)
    from_logits: bool = True
    input_lengths: bool = False
    zero_infinity: bool = False

    task = "sequence"

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        dims = dims_of(prediction)
        if len(dims) != 3 or len({axis % 3 for axis in (self.axis, self.time_axis)}) != 2:
            raise GraphoptError(
                f"CTC(axis={self.axis}, time_axis={self.time_axis}): expected two of three axes, found "
                f"{prediction.name!r} of shape {prediction.shape}"
            )
        rows, classes = dims[self.row_axis], dims[self.axis]
        if isinstance(classes, int) and self.blank >= classes:
            raise GraphoptError(
                f"CTC(blank={self.blank}): expected one of the classes of {prediction.name!r}, found {classes} classes"
            )
        shapes = {target_name: ir.Shape([rows, f"{target_name}_labels"])}
        if self.input_lengths:
            shapes[target_name.replace("target", "input_lengths", 1)] = ir.Shape([rows])
        return [new_input(model, name, ir.DataType.INT64, shape) for name, shape in shapes.items()]

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value, lengths: ir.Value | None = None) -> ir.Value:
        scores = _log_probabilities(op, prediction, self.from_logits, self.axis)
        scores = op.Transpose(
            op.cast(scores, wide_type(prediction)), perm=[self.time_axis % 3, self.row_axis, self.axis % 3]
        )
        states = self._states(op, target)
        sizes = op.Concat(op.Shape(scores, end=1), op.shape_of(states), axis=0)
        emissions = op.GatherElements(scores, op.Expand(op.Unsqueeze(states, [0]), sizes), axis=2)
        emissions.shape = ir.Shape([dims_of(scores)[0], *dims_of(states)])
        sequences = [emissions]  # the score of the class of each state in each step
        if lengths is not None:
            sequences.append(_running(op, scores, lengths))
        alpha = self._forward(op, states, sequences)

        labels = op.ReduceSum(op.Cast(op.GreaterOrEqual(target, 0), to=ir.DataType.INT64), [1])
        ends = op.Concat(2 * labels, op.Max(2 * labels - 1, 0), axis=1)
        missing = op.And(op.Equal(labels, 0), op.constant([[False, True]]))
        last = op.GatherElements(alpha, ends, axis=1) + _barred(op, missing, alpha)
        loss = -op.ReduceLogSumExp(last, [1], keepdims=0)
        unfit = op.constant(0.0 if self.zero_infinity else np.inf, like=loss)
        loss = op.Where(op.Less(loss, -IMPOSSIBLE / 2), loss, unfit)
        if self.reduction == "mean":
            loss = loss / op.Cast(op.Squeeze(op.Max(labels, 1), [1]), to=loss.dtype)
        return op.cast(loss, prediction.dtype)

    @property
    def row_axis(self) -> int:
        return 3 - self.time_axis % 3 - self.axis % 3

    def _states(self, op: Emitter, target: ir.Value) -> ir.Value:
        """Emit the class of each state: the labels, with blanks before, between and after them."""
        rows, most = dims_of(target)
        blanks = op.Expand(op.constant([[self.blank]]), op.shape_of(target))
        pairs = op.Concat(op.Unsqueeze(blanks, [2]), op.Unsqueeze(op.Max(target, 0), [2]), axis=2)
        last = op.Expand(op.constant([[self.blank]]), op.Concat(op.Shape(target, end=1), [1], axis=0))
        states = op.Concat(op.Reshape(pairs, [0, -1]), last, axis=1)
        states.shape = ir.Shape([rows, f"{most}_and_blanks"])
        return states

    def _forward(self, op: Emitter, states: ir.Value, sequences: list[ir.Value]) -> ir.Value:
        """Emit the logarithm of the probability of all paths that end in each state after the last step."""
        like = sequences[0]
        column = op.Concat(op.Shape(states, end=1), [1], axis=0)
        blank = op.Expand(op.constant([[self.blank]]), column)
        earlier = _moved(op, _moved(op, states, blank), blank)
        barred = op.Or(op.Equal(states, self.blank), op.Equal(states, earlier))
        barred = _barred(op, barred, like)  # a path skips the blank between different labels
        wall = op.Expand(op.constant([[IMPOSSIBLE]], like=like), column)

        def step(op: Emitter, carried: list[ir.Value], slices: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            alpha, (emitted, *running) = carried[0], slices
            from_one = _moved(op, alpha, wall)
            from_two = _moved(op, from_one, wall) + barred
            most = stop_gradient(op, op.Max(alpha, from_one, from_two))
            total = op.Exp(alpha - most) + op.Exp(from_one - most) + op.Exp(from_two - most)
            following = most + op.Log(total) + emitted
            return [op.Where(running[0], following, alpha) if running else following], []

        places = op.Range(0, op.Squeeze(op.Shape(states, start=1)), 1)
        start = op.Expand(_barred(op, op.Greater(places, 0), like), op.shape_of(states))
        start.shape = states.shape
        (alpha,) = scan_over(op, step, [start], sequences)
        return alpha


def _known(loss: Loss, weights: tuple[float, ...] | Literal["balanced"]) -> tuple[float, ...]:
    if weights == "balanced":
        raise GraphoptError(
            f"{type(loss).__name__}(class_weights='balanced'): expected a number for each class, found none: learn "
            "them by graphopt.adapt, or by graphopt.data.balanced_class_weights"
        )
    return weights


def _class_numbers(target: np.ndarray) -> np.ndarray:
    """Return binary targets, which may be floats, as whole numbers."""
    if target.dtype.kind != "f":
        return target
    wrong = (target != 0) & (target != 1)
    if wrong.any():
        raise GraphoptError(f"class weights: expected targets 0 and 1, found {target[wrong][0]}")
    return target.astype(np.int64)


def _times(factor: float, value: ir.Value) -> ir.Value:
    return value if factor == 1 else factor * value


def _logits(prediction: ir.Value, activation: str, from_logits: bool, axis: int | None = None) -> ir.Value | None:
    """Return the logits from which a prediction is computed, or None if the graph does not show them."""
    node = prediction.producer()
    if node is not None and (node.domain, node.op_type) != ("", activation):
        node = None
    if node is not None and axis is not None and (node.attributes.get_int("axis", -1) - axis) % rank(prediction):
        node = None
    if from_logits:
        found = activation_behind(prediction)
        if found:
            warnings.warn(
                f"{prediction.name!r} comes out of {found}, but the loss expects logits: "
                "set from_logits=False in the loss",
                stacklevel=2,
            )
        return prediction
    return None if node is None else node.inputs[0]


def activation_behind(x: ir.Value | None) -> str | None:
    """Return what makes probabilities of which a value consists, or None; scikit-learn puts 1 - p beside p."""
    beside = ""
    while x is not None and (node := x.producer()) is not None and node.domain == "":
        if node.op_type in ("Sigmoid", "Softmax"):
            return node.op_type + beside
        if node.op_type == "Div" and _is_sum(node.inputs[1], node.inputs[0]):
            return "a division by its own sum"
        if node.op_type == "Concat" and _is_pair(x, node.inputs):
            beside = " with 1 - p beside p"
        is_share = node.op_type == "Concat" or _is_rest(x)
        x = node.inputs[-1] if is_share else node.inputs[0] if node.op_type in _KEEPING else None
    return None


def _is_pair(x: ir.Value, parts: Sequence[ir.Value | None]) -> bool:
    """Return whether a value is two columns, p and 1 - p, of its two parts."""
    last = [None if y is None or not y.shape else y.shape[-1] for y in (x, *parts)]
    return last == [2, 1, 1] and any(_is_rest(*pair) for pair in itertools.permutations(parts))


def _is_rest(x: ir.Value | None, of: ir.Value | None = None) -> bool:
    """Return whether a value is 1 - p, of a given p or of any."""
    node = None if x is None else x.producer()
    if node is None or node.op_type != "Sub" or constant_number(node.inputs[0]) != 1:
        return False
    return of is None or node.inputs[1] is of


def _is_sum(total: ir.Value | None, x: ir.Value | None) -> bool:
    """Return whether a value is the sum of another, or of its magnitudes, kept away from 0 or not."""
    while total is not None and (node := total.producer()) is not None and node.domain == "":
        if node.op_type in ("ReduceSum", "ReduceL1"):
            (summed,) = node.inputs[:1]
            of = None if summed is None else summed.producer()
            return summed is x or (of is not None and of.op_type == "Abs" and of.inputs[0] is x)
        if node.op_type not in _BESIDE_A_SUM:
            return False
        total = next((y for y in node.inputs if y is not None and constant_of(y) is None), None)
    return False


def _log_probabilities(op: Emitter, prediction: ir.Value, from_logits: bool, axis: int) -> ir.Value:
    logits = _logits(prediction, "Softmax", from_logits, axis)
    return op.Log(positive(op, prediction)) if logits is None else op.LogSoftmax(logits, axis=axis)


def _may_leave_out(logits: ir.Value) -> bool:
    """Return whether a model writes constants of -inf into logits, as a mask of classes does."""
    left, seen = [logits], set()
    while left:
        x = left.pop()
        array, node = constant_of(x), x.producer()
        if array is not None:
            if array.dtype.kind == "f" and np.isneginf(array).any():
                return True
        elif node is not None and node not in seen and node.domain == "" and node.op_type in _WRITING:
            seen.add(node)
            left += [y for y in node.inputs if y is not None]
    return False


def softplus(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit log(1 + e^x). In float64, which onnxruntime's Softplus does not support, emit two parts that join at 0."""
    if x.dtype != ir.DataType.DOUBLE:
        return op.Softplus(x)
    return 0.5 * (x + op.Abs(x)) + op.Log(1.0 + op.Exp(-op.Abs(x)))


def _running(op: Emitter, scores: ir.Value, lengths: ir.Value) -> ir.Value:
    """Emit whether each step is one of its row, bool [steps, rows, 1]."""
    steps = op.Range(0, op.Squeeze(op.Shape(scores, end=1)), 1)
    running = op.Unsqueeze(op.Less(op.Unsqueeze(steps, [1]), op.Unsqueeze(lengths, [0])), [2])
    running.shape = ir.Shape([*dims_of(scores)[:2], 1])
    return running


def _moved(op: Emitter, x: ir.Value, first: ir.Value) -> ir.Value:
    """Emit `x` moved by one state, behind `first`."""
    moved = op.Concat(first, op.Slice(x, [0], [-1], [1]), axis=1)
    moved.shape = x.shape
    return moved


def _barred(op: Emitter, where: ir.Value, like: ir.Value) -> ir.Value:
    """Emit the logarithm of a probability of 0 or 1, in the element type of `like`."""
    return op.Where(where, op.constant(IMPOSSIBLE, like=like), op.constant(0.0, like=like))

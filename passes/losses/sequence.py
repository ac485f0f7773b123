"""Define losses of sequences."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from onnx_ir import DataType, Model, Shape, Value

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.values import dims_of, wide_type
from graphopt.intervals import within
from passes.differentiate import stop_gradient
from passes.gradients.rules.control_flow import scan_over
from passes.losses.classification import log_probabilities
from passes.losses.loss import Loss, new_input

__all__ = ["CTC"]

IMPOSSIBLE = -1e30  # the logarithm of a probability of 0; with infinity, gradients would be NaN


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

    task: ClassVar[str] = "sequence"

    def operands(self, model: Model, prediction: Value, target_name: str) -> list[Value]:
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
        shapes = {target_name: Shape([rows, f"{target_name}_labels"])}
        if self.input_lengths:
            shapes[target_name.replace("target", "input_lengths", 1)] = Shape([rows])
        return [new_input(model, name, DataType.INT64, shape) for name, shape in shapes.items()]

    def compare(self, op: Emitter, prediction: Value, target: Value, lengths: Value | None = None) -> Value:
        scores = log_probabilities(op, prediction, self.from_logits, self.axis)
        scores = op.Transpose(
            op.cast(scores, wide_type(prediction)), perm=[self.time_axis % 3, self.row_axis, self.axis % 3]
        )
        states = self._states(op, target)
        sizes = op.Concat(op.Shape(scores, end=1), op.shape_of(states), axis=0)
        emissions = op.GatherElements(scores, op.Expand(op.Unsqueeze(states, [0]), sizes), axis=2)
        emissions.shape = Shape([dims_of(scores)[0], *dims_of(states)])
        sequences = [emissions]  # the score of the class of each state in each step
        if lengths is not None:
            sequences.append(_running(op, scores, lengths))
        alpha = self._forward(op, states, sequences)

        labels = op.ReduceSum(op.Cast(op.GreaterOrEqual(target, 0), to=DataType.INT64), [1])
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

    def _states(self, op: Emitter, target: Value) -> Value:
        """Emit the class of each state: the labels, with blanks before, between and after them."""
        rows, most = dims_of(target)
        blanks = op.Expand(op.constant([[self.blank]]), op.shape_of(target))
        pairs = op.Concat(op.Unsqueeze(blanks, [2]), op.Unsqueeze(op.Max(target, 0), [2]), axis=2)
        last = op.Expand(op.constant([[self.blank]]), op.Concat(op.Shape(target, end=1), [1], axis=0))
        states = op.Concat(op.Reshape(pairs, [0, -1]), last, axis=1)
        states.shape = Shape([rows, f"{most}_and_blanks"])
        return states

    def _forward(self, op: Emitter, states: Value, sequences: list[Value]) -> Value:
        """Emit the logarithm of the probability of all paths that end in each state after the last step."""
        like = sequences[0]
        column = op.Concat(op.Shape(states, end=1), [1], axis=0)
        blank = op.Expand(op.constant([[self.blank]]), column)
        earlier = _moved(op, _moved(op, states, blank), blank)
        barred = op.Or(op.Equal(states, self.blank), op.Equal(states, earlier))
        barred = _barred(op, barred, like)  # a path skips the blank between different labels
        wall = op.Expand(op.constant([[IMPOSSIBLE]], like=like), column)

        def step(op: Emitter, carried: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
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


def _running(op: Emitter, scores: Value, lengths: Value) -> Value:
    """Emit whether each step is one of its row, bool [steps, rows, 1]."""
    steps = op.Range(0, op.Squeeze(op.Shape(scores, end=1)), 1)
    running = op.Unsqueeze(op.Less(op.Unsqueeze(steps, [1]), op.Unsqueeze(lengths, [0])), [2])
    running.shape = Shape([*dims_of(scores)[:2], 1])
    return running


def _moved(op: Emitter, x: Value, first: Value) -> Value:
    """Emit `x` moved by one state, behind `first`."""
    moved = op.Concat(first, op.Slice(x, [0], [-1], [1]), axis=1)
    moved.shape = x.shape
    return moved


def _barred(op: Emitter, where: Value, like: Value) -> Value:
    """Emit the logarithm of a probability of 0 or 1, in the element type of `like`."""
    return op.Where(where, op.constant(IMPOSSIBLE, like=like), op.constant(0.0, like=like))

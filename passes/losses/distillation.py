"""Define the loss of a model that learns from another, its teacher."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.files import ReadPath
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import load
from graphopt.graph.rewriting import Read
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import dims_of, dtype_of, is_floating, may_be_alike, name_of
from graphopt.intervals import within
from passes.augment import trained_on
from passes.losses.classification import CrossEntropy
from passes.losses.frozen import put_in
from passes.losses.loss import Loss, new_input
from passes.normalize import Normalize

__all__ = ["Distillation"]

_TEACHER = "teacher"


@dataclass(frozen=True)
class Distillation(Loss):
    """Compute alpha T^2 KL(softmax(teacher / T), softmax(logits / T)) + (1 - alpha) loss (Hinton, Vinyals, Dean 2015).

    Args:
        teacher: the path of another .onnx file, whose nodes and weights become a part of the training graph that does
            not train, and which reads the model's inputs by their names. None adds an input `teacher` for the teacher's
            logits, computed beforehand.
        loss: the loss that compares the logits with the target; by default, `CrossEntropy()`. What it ignores, such as
            padding, has no weight in the divergence either.
        temperature: the number T by which logits are divided.
        alpha: the share of the divergence. 1 needs no target.
        teacher_output: the name of the teacher's output, if it has several floating-point ones.

    Raises:
        GraphoptError: the file is no model, it reads other inputs, or the shape of its output is another.

    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.Distillation(), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'teacher', 'target']
    """

    teacher: ReadPath | None = None
    loss: Loss | None = None
    temperature: float = within("(0, inf)", 2.0)
    alpha: float = within("[0, 1]", 0.5)
    teacher_output: str | None = None

    task = "classification"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.loss is not None and not isinstance(self.loss, Loss):
            raise GraphoptError(
                f"Distillation(loss): expected a loss such as passes.CrossEntropy(), found {kind_of(self.loss)}"
            )

    @property
    def _hard(self) -> Loss:
        return self.loss or CrossEntropy()

    @property
    def learns(self) -> bool:
        return self._hard.learns

    def adapted(self, model: ir.Model, read: Read, target_name: str = "target") -> Distillation:
        hard = replace(self._hard, output=self.output).adapted(model, read, target_name)
        return replace(self, loss=hard)

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        name = target_name.replace("target", _TEACHER, 1)
        if self.teacher is None:
            logits = new_input(model, name, dtype_of(prediction), ir.Shape(dims_of(prediction)))
        else:
            logits = self._put_in(model, prediction, self.teacher)
        return [logits, *(self._hard.operands(model, prediction, target_name) if self.alpha < 1 else ())]

    def _put_in(self, model: ir.Model, prediction: ir.Value, teacher: str | os.PathLike[str]) -> ir.Value:
        """Put the teacher into the graph, and return its logits."""
        part, where = load(teacher), f"Distillation: teacher {os.fspath(teacher)!r}"
        Normalize()(part)
        floating = {name_of(y): y for y in part.graph.outputs if is_floating(y)}
        named = [y for name, y in floating.items() if self.teacher_output in (None, name)]
        if len(named) != 1:
            raise GraphoptError(
                f"{where}: teacher_output={self.teacher_output!r}: expected the name of one floating-point output, "
                f"the file has {', '.join(floating)}"
            )
        part.graph.outputs[:] = named
        own = {name_of(x): x for x in with_role(model, Role.DATA)}
        read = [name_of(x) for x in part.graph.inputs if x.uses()]
        inputs = dict(zip(read, own.values(), strict=True)) if len(read) == len(own) == 1 else own
        if missing := [name for name in read if name not in inputs]:
            raise GraphoptError(
                f"{where}: expected one that reads the model's inputs {', '.join(own)}, found {missing[0]!r}: rename it"
            )
        for x in [x for x in part.graph.inputs if not x.uses()]:
            part.graph.inputs.remove(x)
        with Emitter(model) as op:
            seen = {name: trained_on(x) for name, x in inputs.items()}  # augmented as for the model
            (logits,) = put_in(model, part, seen, _TEACHER)
            if not may_be_alike(prediction.shape, logits.shape):
                dims, found = (list(dims_of(x)) for x in (prediction, logits))
                raise GraphoptError(f"{where}: expected logits of shape {dims}, found {found}")
            return op.cast(logits, prediction.dtype)

    def compare(self, op: Emitter, prediction: ir.Value, target: ir.Value, *operands: ir.Value) -> ir.Value:
        axis = getattr(self._hard, "axis", -1)
        theirs, ours = (op.LogSoftmax(x / self.temperature, axis=axis) for x in (target, prediction))
        divergence = op.ReduceSum(op.Exp(theirs) * (theirs - ours), [axis], keepdims=0)
        soft = (self.alpha * self.temperature**2) * divergence
        if not operands:
            return soft
        weight = self.weight(op, prediction, target, *operands)
        soft = soft if weight is None else soft * weight
        return soft + (1 - self.alpha) * self._hard.compare(op, prediction, *operands)

    def weight(self, op: Emitter, prediction: ir.Value, target: ir.Value, *others: ir.Value) -> ir.Value | None:
        return self._hard.weight(op, prediction, *others) if others else None

    def rows_of(self, prediction: ir.Value, operands: Sequence[ir.Value]) -> ir.Value:
        return self._hard.rows_of(prediction, operands[1:])

    @property
    def row_axis(self) -> int:
        return self._hard.row_axis

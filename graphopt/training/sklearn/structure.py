"""Compile the training graphs of estimators: equal structures share one graph."""

from __future__ import annotations

import dataclasses
import functools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.compiler import DEFAULT, compile
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import Role, with_role
from graphopt.runtime.executor import Executor

SHARED = 2**22  # bytes of a model up to which its training graph is kept for other estimators


@dataclass(frozen=True)
class Structure:
    """Describe all that determines a training graph.

    Args:
        model: the serialized inference model.
        loss, optimizer, schedule, training, parameters: passes, or None.
        alpha: the strength of the penalty.
    """

    model: bytes
    loss: Any
    optimizer: Any
    schedule: Any
    training: Any
    parameters: Any
    alpha: float

    def executor(self, device: str, threads: int | None) -> Executor:
        """Return a new executor of the training graph, which reports the loss, with the penalty and without."""
        step = _shared(self) if len(self.model) <= SHARED and self._hashable() else _compiled(self)
        losses = [str(value.name) for value in step.graph.outputs if value.name in ("loss", "data_loss")]
        return Executor(step, device=device, threads=threads, report=losses)

    def _hashable(self) -> bool:
        try:
            hash(self)
        except TypeError:  # an option of a pass is a list, for example
            return False
        return True


def _compiled(structure: Structure) -> ir.Model:
    from graphopt.training.sklearn import objective

    return compile(
        onnx.load_model_from_string(structure.model),
        parameters=structure.parameters or DEFAULT,
        training=structure.training or DEFAULT,
        loss=structure.loss,
        regularizer=objective.WeightPenalty(structure.alpha) if structure.alpha else None,
        optimizer=structure.optimizer,
        schedule=structure.schedule,
    )


_shared = functools.lru_cache(32)(_compiled)


@dataclass(frozen=True)
class Interface:
    """Describe what a model reads and predicts.

    Args:
        dtype: the type of its input.
        row: the shape of a row of its input; None for a size that the model does not fix.
        op_type: the operator that computes its output.
        outputs: the number of outputs of a row, or None if the model does not fix it.
    """

    dtype: str
    row: tuple[int | None, ...]
    op_type: str
    outputs: int | None


def serialized(source: Source) -> bytes:
    """Return a model as bytes."""
    proto = source if isinstance(source, onnx.ModelProto) else ir.to_proto(load(source))
    return proto.SerializeToString()


def interface(model: bytes) -> Interface:
    """Return the interface of a serialized model with one input and one floating-point output.

    Raises:
        GraphoptError: the model has several inputs or outputs, or its batch has a fixed size.
    """
    import passes

    loaded = load(onnx.load_model_from_string(model))
    predictions = {
        y.name for y in loaded.graph.outputs if y.dtype is not None and y.dtype.is_floating_point()
    }
    passes.Normalize()(loaded)
    inputs = [x for x in loaded.graph.inputs if x.name not in loaded.graph.initializers]
    outputs = [y for y in loaded.graph.outputs if y.name in predictions]
    for kind, found in (("input", inputs), ("floating-point output", outputs)):
        if len(found) != 1 or found[0].shape is None or found[0].dtype is None:
            raise GraphoptError(
                f"model: expected one {kind} of known type and shape, found {[x.name for x in found]}: use "
                f"graphopt.Trainer, or graphopt.fit"
            )
    (x,), (y,) = inputs, outputs
    batch, *row = _dims(x)
    if batch is not None:
        raise GraphoptError(
            f"model: expected a batch of any size, found {batch} rows in input {x.name!r}: export the model with a "
            f"dynamic batch"
        )
    sizes, node = _dims(y)[1:], y.producer()
    assert x.dtype is not None
    return Interface(
        dtype=np.dtype(x.dtype.numpy()).name,
        row=tuple(row),
        op_type="" if node is None or node.domain else node.op_type,
        outputs=None if None in sizes else math.prod(size for size in sizes if size is not None),
    )


def _dims(value: ir.Value) -> list[int | None]:
    assert value.shape is not None
    return [dim if isinstance(dim, int) else None for dim in value.shape]


def weighted(loss: Any, weighted: bool) -> Any:
    """Return a loss with or without an input for weights of rows."""
    return dataclasses.replace(loss, sample_weight=weighted)


def solution(executor: Executor) -> dict[str, np.ndarray]:
    """Return the parameters and statistics of an executor, without what belongs to its optimizer."""
    names = {str(x.name) for x in with_role(executor.model, Role.PARAMETER, Role.STATISTIC)}
    return {name: array for name, array in executor.state.items() if name in names}

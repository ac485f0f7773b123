"""Read what the models of estimators take and return."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir

import passes
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load


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
    loaded = load(onnx.load_model_from_string(model))
    predictions = {
        y.name for y in loaded.graph.outputs if y.dtype is not None and y.dtype.is_floating_point()
    }
    passes.Normalize()(loaded)
    inputs = [x for x in loaded.graph.inputs if x.name not in loaded.graph.initializers]
    outputs = [y for y in loaded.graph.outputs if y.name in predictions]
    for kind, values in (("input", inputs), ("floating-point output", outputs)):
        if len(values) != 1 or values[0].shape is None or values[0].dtype is None:
            raise GraphoptError(
                f"model: expected one {kind} of known type and shape, found {[x.name for x in values]}: use "
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

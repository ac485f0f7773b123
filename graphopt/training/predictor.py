"""Write a trained model as a predictor: features in, and labels with their probabilities, or numbers, out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import load
from graphopt.graph.metadata import TargetSpec
from graphopt.graph.values import dims_of, is_floating, rank, swap

_OUTPUTS = ("label", "probabilities", "scores", "variable")  # as skl2onnx names them


def predictor(
    trained: onnx.ModelProto, spec: TargetSpec, loss: object, classes: np.ndarray | None, dtype: str
) -> onnx.ModelProto:
    """Return a model of labels and probabilities, or of numbers, from one whose only output is a prediction.

    Args:
        spec: how the loss compares the prediction with its target.
        loss: the loss. If it knows no probabilities, there are `scores` in their place.
        classes: the labels; class numbers, or 0 and 1, if None.
        dtype: the type of features, probabilities and numbers.
    """
    model, kind = load(trained), ir.DataType.from_numpy(np.dtype(dtype))
    graph = model.graph
    for name, value in ir.convenience.create_value_mapping(graph).items():
        value.name = f"{name}.trained" if name in _OUTPUTS else name
    with Emitter(model) as op:
        for i, x in enumerate(graph.inputs):
            if is_floating(x) and x.dtype != kind:
                graph.inputs[i] = fed = ir.Value(name=x.name, type=ir.TensorType(kind), shape=x.shape)
                x.name = f"{x.name}.trained"
                swap(x, op.cast(fed, x.dtype))
        (y,) = graph.outputs
        if spec.task == "regression":
            outputs = {"variable": op.Reshape(y, [-1, 1]) if rank(y) == 1 else y}
        else:
            code, rates = (
                _of_classes(op, y, spec, loss) if spec.labels is None else _of_two(op, y, spec, loss)
            )
            if classes is not None and len(classes) == 1:  # which has the only column
                code, rates = code * 0, op.Slice(rates, [0], [1], [1]) * 0.0 + 1.0
            label = code if classes is None else op.Gather(_label_constant(op, classes), code)
            outputs = {"label": label, "probabilities" if hasattr(loss, "probabilities") else "scores": rates}
        graph.outputs.clear()
        for name, value in outputs.items():
            output = op.Identity(op.cast(value, kind) if is_floating(value) else value, _outputs=[name])
            output.shape = ir.Shape([dims_of(y)[0], *dims_of(output)[1:]])
            graph.outputs.append(output)
    graph.sort()
    return ir.to_proto(model)


def _of_classes(op: Emitter, y: ir.Value, spec: TargetSpec, loss: Any) -> tuple[ir.Value, ir.Value]:
    """Return the class number of each element, and the probabilities of all classes."""
    is_logit = hasattr(loss, "probabilities") and loss.from_logits
    rates = op.Softmax(y, axis=spec.axis) if is_logit else y
    return op.ArgMax(y, axis=spec.axis, keepdims=0), rates


def _of_two(op: Emitter, y: ir.Value, spec: TargetSpec, loss: Any) -> tuple[ir.Value, ir.Value]:
    """Return 0 or 1 for each element, and the probability of 1; for one element a row, those of 0 and 1 in columns."""
    code = op.Cast(op.Greater(y, op.constant(spec.threshold, like=y)), to=ir.DataType.INT64)
    rates = op.Sigmoid(y) if hasattr(loss, "probabilities") and loss.from_logits else y
    if math.prod(dim if isinstance(dim, int) else 2 for dim in dims_of(y)[1:]) != 1:
        return code, rates
    rates = op.Reshape(rates, [-1, 1])
    if hasattr(loss, "probabilities"):
        rates = op.Concat(1.0 - rates, rates, axis=1)
    return op.Reshape(code, [-1]), rates


def _label_constant(op: Emitter, classes: np.ndarray) -> ir.Value:
    """Return labels as text, whole numbers, or other numbers."""
    if classes.dtype.kind in "OUS":
        text: ir.Value = op.Constant(value=ir.tensor([str(label) for label in classes]))
        return text
    whole = classes.dtype.kind in "biu" or (classes == np.round(classes)).all()
    return op.constant(classes.astype(np.int64 if whole else np.float64))

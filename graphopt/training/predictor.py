"""Write a trained model as a predictor: features in, and labels with their probabilities, or numbers, out."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.classified import (
    LABEL,
    PROBABILITIES,
    activation_of,
    class_name,
    emit_classes,
    named_classes,
    set_labels,
)
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import load
from graphopt.graph.roles import TargetSpec
from graphopt.graph.values import dims_of, is_floating, rank, swap

_OUTPUTS = (LABEL, PROBABILITIES, "scores", "variable")  # as skl2onnx names them


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
    graph, activation = model.graph, activation_of(spec) if hasattr(loss, "probabilities") else None
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
            code, rates = emit_classes(op, y, spec, activation)
            if classes is not None and len(classes) == 1:  # which has the only column
                code, rates = code * 0, op.Slice(rates, [0], [1], [1]) * 0.0 + 1.0
            label = code if classes is None else named_classes(op, code, classes)
            outputs = {LABEL: label, PROBABILITIES if activation is not None else "scores": rates}
        graph.outputs.clear()
        for name, value in outputs.items():
            output = op.Identity(op.cast(value, kind) if is_floating(value) else value, _outputs=[name])
            output.shape = ir.Shape([dims_of(y)[0], *dims_of(output)[1:]])
            graph.outputs.append(output)
    graph.sort()
    written = ir.to_proto(model)
    if classes is not None:
        set_labels(written, [*map(class_name, classes)], keep=True)
    return written

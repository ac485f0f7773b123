"""Derive the label of each row, and the probabilities of the classes, from the scores that a model predicts."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import DERIVED, LABELS, Note, add_note, names_in
from graphopt.graph.operators import VIEWS
from graphopt.graph.roles import Role, TargetSpec, with_role
from graphopt.graph.values import constant_of, dims_of, given, rank

LABEL, PROBABILITIES = "label", "probabilities"  # as skl2onnx names them


@dataclass(frozen=True)
class Derived(Note, key=DERIVED, expected="the name of an output, and what is computed from it"):
    """Record that an output says how sure another one is.

    Args:
        of: the name of that output.
        kind: what is computed: `probability`, `set`, `lower`, `upper`, `mean`, `variance` or `mutual_information`.
    """

    of: str
    kind: str

    @classmethod
    def all(cls, model: ir.Model, output: str | None) -> dict[str, ir.Value]:
        """Return what is computed from an output, by its kind."""
        notes = [(cls.read(x), x) for x in model.graph.outputs]
        return {note.kind: x for note, x in notes if note is not None and note.of == output}


def classification_of(model: ir.Model) -> TargetSpec | None:
    """Return how the scores of a training graph, or of a model that notes it, classify; None if they do not."""
    noted = TargetSpec.read(model)
    specs = [noted] if noted is not None else [*map(TargetSpec.read, with_role(model, Role.TARGET))]
    only = specs[0] if len(specs) == 1 else None
    return None if only is None or only.task == "regression" or only.shift else only


def note_classification(proto: onnx.ModelProto, model: ir.Model) -> None:
    """Note in the trained model of a training graph how its scores classify."""
    spec = classification_of(model)
    if spec is not None and any(y.name == spec.output for y in proto.graph.output):
        add_note(proto, spec)


def labels_in(model: ir.Model) -> list[str] | None:
    """Return the names of the classes in a model's metadata, or None."""
    return names_in(LABELS.read(model))


def set_labels(proto: onnx.ModelProto, labels: Sequence[str], *, keep: bool = False) -> None:
    """Write the names of the classes into a model's metadata, in place of others unless these shall stay."""
    LABELS.write_in(proto, json.dumps(list(labels)), keep=keep)


def activation_of(spec: TargetSpec) -> str | None:
    """Return the operator that makes probabilities of scores, an empty text if they are some, or None if none does.

    A binary loss of the labels 0 and 1 predicts logits if its threshold is 0, and probabilities if it is 1 / 2.
    """
    if spec.task == "classification":
        return "Softmax" if spec.from_logits else ""
    return {0.0: "Sigmoid", 0.5: ""}.get(spec.threshold or 0.0) if spec.labels == (0, 1) else None


def emit_classes(op: Emitter, y: ir.Value, spec: TargetSpec, activation: str | None) -> list[ir.Value]:
    """Emit the class number of each element, and the probabilities of the classes, or the scores if there are none.

    Two classes of one score in each row have two columns of probabilities; of more scores, each is a label of its own.
    """
    if spec.labels is None:
        rates = op.Softmax(y, axis=spec.axis) if activation else y
        return [op.ArgMax(y, axis=spec.axis, keepdims=0), rates]
    code = op.Cast(op.Greater(y, op.constant(spec.threshold, like=y)), to=ir.DataType.INT64)
    rates = op.Sigmoid(y) if activation else y
    if math.prod(dim if isinstance(dim, int) else 2 for dim in dims_of(y)[1:]) != 1:
        return [code, rates]
    rates = op.Reshape(rates, [-1, 1])
    if activation is not None:
        rates = op.Concat(1.0 - rates, rates, axis=1)
    return [op.Reshape(code, [-1]), rates]


def named_classes(op: Emitter, code: ir.Value, names: Sequence[str] | np.ndarray) -> ir.Value:
    """Emit the names of class numbers: text, whole numbers, or other numbers."""
    classes = np.asarray(names, object if isinstance(names, list | tuple) else None)
    if classes.dtype.kind in "OUS":
        return op.Gather(op.Constant(value=ir.tensor([str(label) for label in classes])), code)
    whole = classes.dtype.kind in "biu" or (classes == np.round(classes)).all()
    return op.Gather(op.constant(classes.astype(np.int64 if whole else np.float64)), code)


def class_name(label: object) -> str:
    """Return the name of a class: text, or a number, without a point if it is whole."""
    if isinstance(label, str | bytes):
        return label.decode() if isinstance(label, bytes) else str(label)
    number: Any = label
    is_whole = isinstance(label, int | np.integer | np.bool_) or float(number).is_integer()
    return str(int(number)) if is_whole else f"{float(number):.17g}"


def class_names(model: ir.Model) -> list[str] | None:
    """Return the names of a model's classes: noted, or of scikit-learn's operator that computes its only label.

    There are as many as scores. Other constants that operators read, such as the targets of neighbours, are no names.
    """
    if (noted := labels_in(model)) is not None:
        return noted
    outputs, known = model.graph.outputs, (ir.DataType.STRING, ir.DataType.INT32, ir.DataType.INT64)
    found = [names for y in outputs if y.dtype in known and (names := _names_behind(y))]
    if len(found) != 1 or len({*found[0]}) < len(found[0]):
        return None
    due = {(len(found[0]),), *([(), (1,)] if len(found[0]) == 2 else ())}
    for y in (y for y in outputs if y.dtype not in known):
        columns = None if y.shape is None else dims_of(y)[1:]  # those of a ZipMap are open
        if columns is None or columns in due or not all(isinstance(size, int) for size in columns):
            return found[0]
    return None


def _names_behind(y: ir.Value) -> list[str]:
    """Return the names of the classes among which an operator of scikit-learn's chooses a label; none of another."""
    while (node := y.producer()) is not None and node.domain == "" and node.op_type in VIEWS | {"Cast"}:
        y = given(node.inputs[0])
    labels: Iterable[object] = ()
    if node is not None and node.op_type == "ArrayFeatureExtractor":
        array = constant_of(node.inputs[0])
        labels = () if array is None else array.reshape(-1).tolist()
    elif node is not None and y is node.outputs[0]:
        for name in ("classlabels_strings", "classlabels_ints", "classlabels_int64s"):
            labels = labels or (node.attributes[name].value if name in node.attributes else ())
    return [*map(class_name, labels)]


def are_numbers(names: Sequence[str]) -> bool:
    """Return whether names of classes are but their numbers, from 0."""
    return [*names] == [*map(str, range(len(names)))]


def has_label_per_row(y: ir.Value | np.ndarray, spec: TargetSpec) -> bool:
    """Return whether scores classify each row as a whole."""
    axes = rank(y) if isinstance(y, ir.Value) else y.ndim
    if spec.labels is not None:
        return axes in (1, 2)
    return axes == 2 and spec.axis in (1, -1)


def classes_of(y: np.ndarray, spec: TargetSpec, names: Sequence[str] | None) -> dict[str, np.ndarray]:
    """Return `label` and `probabilities` of rows, as `emit_classes` and `named_classes` compute them."""
    if not has_label_per_row(y, spec):
        return {}
    activation = activation_of(spec)
    if spec.labels is None:
        code, rates = y.argmax(axis=1), y
        if activation:
            powers = np.exp(y - y.max(axis=1, keepdims=True))
            rates = powers / powers.sum(axis=1, keepdims=True)
    else:
        code = (y > spec.threshold).astype(np.int64)
        rates = (0.5 * (1 + np.tanh(0.5 * y.astype(np.float64)))).astype(y.dtype) if activation else y
        if y.size == len(y):
            code, rates = code.reshape(-1), rates.reshape(-1, 1)
            rates = np.concatenate([1 - rates, rates], axis=1)
    count = 2 if spec.labels is not None else y.shape[1]
    label = np.asarray(names)[code] if names is not None and len(names) == count else code
    return {LABEL: label, **({} if activation is None else {PROBABILITIES: rates})}

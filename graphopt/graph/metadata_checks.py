"""Check graphopt's metadata once, when a model is loaded: a file may contain any metadata.

Metadata written by passes is valid by construction and is not checked again.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection

import onnx_ir as ir
from google.protobuf.message import DecodeError

from graphopt.errors import GraphoptError
from graphopt.graph.checking import check_proto
from graphopt.graph.metadata import (
    GRADIENT_OF,
    ORIGINAL_NAME,
    Detached,
    InferenceForm,
    LeftOut,
    Misdeclared,
    Notes,
    Origin,
    TargetSpec,
    Text,
    Versions,
    original_name,
)
from graphopt.graph.roles import INPUTS, OUTPUTS, STATE, Role, role_of
from graphopt.graph.values import name_of

_OF_MODEL = (None, Role.DATA, Role.PARAMETER, Role.STATISTIC, Role.PREDICTION, Role.SOURCE)


def check_metadata(model: ir.Model) -> None:
    """Check graphopt's metadata in a model."""
    graph = model.graph
    for values, roles in ((graph.inputs, INPUTS), (graph.outputs, OUTPUTS)):
        for value in values:
            role = role_of(value)
            if role is not None and role not in roles:
                raise GraphoptError(
                    f"{value.name!r}: role {role.value!r}: expected one of {', '.join(sorted(r.value for r in roles))}"
                )
    names = {value.name for value in graph.inputs}
    for value in graph.inputs:
        _check_input(model, value)
    _check_original_names(model)
    for node in graph:
        for y in node.outputs:
            form = InferenceForm.read(y)
            if form is not None:
                if not any(role_of(x) in STATE for x in graph.inputs):
                    raise InferenceForm.wrong(y, "none in a model without parameters")
                _check_inference(node, y, form, names)
            if GRADIENT_OF.read(y) not in (None, *names):
                raise _wrong(y, GRADIENT_OF, "the name of an input")
    check_detached(model)
    for note in (Versions, LeftOut, Misdeclared, Notes):
        note.read(model)
    for value in graph.initializers.values():
        Origin.read(value)


def _check_input(model: ir.Model, value: ir.Value) -> None:
    role = role_of(value)
    if role in STATE or role is Role.HYPERPARAMETER:
        initial, plain = value.const_value, not any(x.is_initializer() for x in model.graph.inputs)
        if (initial is None and not plain) or (initial is not None and initial.dtype is ir.DataType.STRING):
            raise GraphoptError(
                f"input {value.name!r}: role {role.value!r}: expected an initial value, found none"
            )
    elif role is not None and value.is_initializer():
        raise GraphoptError(
            f"input {value.name!r}: role {role.value!r}: expected no initial value, found one"
        )
    spec = TargetSpec.read(value)
    if spec is None:
        return
    output = next((y for y in model.graph.outputs if y.name == spec.output), None)
    if output is None:
        raise TargetSpec.wrong(value, "the name of an output")
    rank = math.inf if output.shape is None else len(output.shape)
    if spec.axis is not None and not -rank <= spec.axis < rank:
        raise TargetSpec.wrong(value, "an axis of the output")


def _check_original_names(model: ir.Model) -> None:
    graph = model.graph
    interface = [x for x in [*graph.inputs, *graph.outputs] if role_of(x) in _OF_MODEL]
    values = dict.fromkeys([*interface, *(x for x in graph.initializers.values() if not x.is_graph_input())])
    names = {x: original_name(x) for x in values}
    counts = Counter(names.values())
    for value, name in names.items():
        if ORIGINAL_NAME.read(value) is not None and (not name or counts[name] > 1):
            raise _wrong(value, ORIGINAL_NAME, "a name that no other value has")


def _check_inference(
    node: ir.Node, value: ir.Value, form: InferenceForm, inputs: Collection[str | None]
) -> None:
    present = [i for i, x in enumerate(node.inputs) if x is not None]
    if form.same_as not in (None, *present):
        raise InferenceForm.wrong(value, "the number of an input")
    if not all(i in range(len(node.inputs)) and name in inputs for i, name in form.inputs.items()):
        raise InferenceForm.wrong(value, "inputs by number, and inputs of the graph by name")


def check_detached(model: ir.Model) -> None:
    """Check the metadata of detached outputs; also called before more outputs are detached."""
    detached = Detached.read(model)
    if detached is None:
        return
    names = {name_of(output) for output in model.graph.outputs}
    try:
        parts = detached.models()
    except (ValueError, DecodeError) as error:
        raise Detached.wrong(model) from error
    for part in parts:
        check_proto(part)
        names |= {output.name for output in part.graph.output}
    if not {*detached.outputs} <= names:
        raise Detached.wrong(model, f"outputs of the model or of its parts, {', '.join(map(repr, names))}")


def _wrong(value: ir.Value, note: Text, expected: str) -> GraphoptError:
    return GraphoptError(
        f"value {value.name!r}: metadata {note.key!r}: expected {expected}, found {(note.read(value) or '')[:80]!r}"
    )

"""The metadata by which passes talk to each other, as a file may have it: checked once, when a model is loaded.

What passes write is right by construction; what a file says may be anyone's.
"""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections import Counter
from collections.abc import Mapping
from types import NoneType
from typing import Any

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from graphopt import aside
from graphopt.checking import check_proto
from graphopt.errors import GraphoptError
from graphopt.origins import Origin, left_out
from graphopt.roles import (
    CAME_IN,
    GRADIENT_OF,
    INFERENCE,
    INPUTS,
    METRIC,
    ORIGINAL_NAME,
    OUTPUTS,
    STATE,
    Role,
    role_of,
)

_OF_MODEL = (None, Role.DATA, Role.PARAMETER, Role.STATISTIC, Role.PREDICTION, Role.SOURCE)
_MANY = 64  # more outputs than any operator has


def check(model: ir.Model) -> None:
    """Check the metadata that a model has of graphopt's.

    Raises:
        GraphoptError: names the value, the key, what was expected and what was found.
    """
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
            if INFERENCE in y.metadata_props:
                if not any(role_of(x) in STATE for x in graph.inputs):
                    raise _wrong(y, INFERENCE, "none in a model without parameters")
                _check_inference(node, y, names)
            if GRADIENT_OF in y.metadata_props and y.metadata_props[GRADIENT_OF] not in names:
                raise _wrong(y, GRADIENT_OF, "the name of an input")
    check_aside(model)
    _check_versions(model)
    left_out(model)
    for value in graph.initializers.values():
        Origin.read(value)


def _check_input(model: ir.Model, value: ir.Value) -> None:
    role = role_of(value)
    if role in STATE or role is Role.HYPERPARAMETER:
        initial, plain = value.const_value, not any(x.is_initializer() for x in model.graph.inputs)
        if (initial is None and not plain) or (initial is not None and initial.dtype is ir.DataType.STRING):
            raise GraphoptError(
                f"input {value.name!r}: role {role.value!r}: expected numbers that it starts with"
            )
    elif role is not None and value.is_initializer():
        raise GraphoptError(
            f"input {value.name!r}: role {role.value!r}: expected no initial value, found one"
        )
    if METRIC in value.metadata_props:
        _check_metric(model, value)


def _check_metric(model: ir.Model, value: ir.Value) -> None:
    noted = _parsed(value, METRIC)
    output = next((y for y in model.graph.outputs if y.name == noted.get("output")), None)
    if output is None:
        raise _wrong(value, METRIC, "the name of an output")
    task = noted.get("task")
    if task == "classification":
        axis, rank = noted.get("axis"), math.inf if output.shape is None else len(output.shape)
        whole = [noted.get("classes"), noted.get("ignore_index")]
        if (
            type(axis) is not int
            or not -rank <= axis < rank
            or any(type(x) not in (int, NoneType) for x in whole)
        ):
            raise _wrong(value, METRIC, "an axis of the output, and whole numbers")
    elif task == "binary":
        labels = noted.get("labels")
        numbers = (
            [noted.get("threshold"), *labels] if isinstance(labels, list) and len(labels) == 2 else [None]
        )
        if any(type(x) not in (int, float) for x in numbers):
            raise _wrong(value, METRIC, "a threshold and two labels")
    elif task != "regression":
        raise _wrong(value, METRIC, "the task classification, binary or regression")


def _check_original_names(model: ir.Model) -> None:
    graph = model.graph
    interface = [x for x in [*graph.inputs, *graph.outputs] if role_of(x) in _OF_MODEL]
    values = dict.fromkeys([*interface, *(x for x in graph.initializers.values() if not x.is_graph_input())])
    names = {x: x.metadata_props.get(ORIGINAL_NAME, x.name) for x in values}
    counts = Counter(names.values())
    for value, name in names.items():
        if ORIGINAL_NAME in value.metadata_props and (not name or counts[name] > 1):
            raise _wrong(value, ORIGINAL_NAME, "a name that no other value has")


def _check_inference(node: ir.Node, value: ir.Value, inputs: set[str | None]) -> None:
    noted = _parsed(value, INFERENCE)
    if "operator" in noted:
        operator, read, output = noted["operator"], noted.get("read"), noted.get("output")
        if not (
            isinstance(operator, list)
            and [type(part) for part in operator] == [str, dict]
            and isinstance(read, list)
            and all(isinstance(name, str) for name in read)
            and type(output) is int
            and 0 <= output < _MANY
            and _are_attributes(operator[1])
        ):
            raise _wrong(value, INFERENCE, "an operator, its attributes, what it reads and an output")
    same_as, changed = noted.get("same_as"), noted.get("inputs", {})
    if same_as is not None and not (_is_input(node, same_as) and node.inputs[same_as] is not None):
        raise _wrong(value, INFERENCE, "the number of an input")
    if not isinstance(changed, dict) or not all(
        index.isdecimal() and _is_input(node, int(index)) and name in inputs
        for index, name in changed.items()
    ):
        raise _wrong(value, INFERENCE, "inputs by number, and inputs of the graph by name")


def _is_input(node: ir.Node, index: Any) -> bool:
    return type(index) is int and 0 <= index < len(node.inputs)


def _are_attributes(attributes: Mapping[str, Any]) -> bool:
    try:
        ir.convenience.convert_attributes(attributes)
    except (TypeError, ValueError):
        return False
    return True


def check_aside(model: ir.Model) -> None:
    """Check what a model says was set aside: also before anything more is, which comes before all other checks."""
    if aside.KEY not in model.metadata_props:
        return
    noted = _parsed(model, aside.KEY)
    names = {output.name for output in model.graph.outputs}
    try:
        for text in noted["parts"]:
            part = onnx.ModelProto.FromString(base64.b64decode(text, validate=True))
            check_proto(part)
            names |= {output.name for output in part.graph.output}
        complete = {*noted["outputs"]} <= names
    except (KeyError, TypeError, binascii.Error, DecodeError) as error:
        raise _wrong(model, aside.KEY, "outputs and the parts that compute them") from error
    if not complete:
        raise _wrong(model, aside.KEY, f"outputs of the model or of its parts, {', '.join(map(repr, names))}")


def _check_versions(model: ir.Model) -> None:
    if CAME_IN in model.metadata_props:
        noted = _parsed(model, CAME_IN)
        opset, ir_version = noted.get("opset"), noted.get("ir_version")
        numbers = [ir_version] if opset is None else [opset, ir_version]
        if any(type(x) is not int or not 1 <= x <= _MANY for x in numbers):
            raise _wrong(model, CAME_IN, "an opset and an IR version")


def _parsed(holder: ir.Value | ir.Model, key: str) -> dict[str, Any]:
    try:
        noted = json.loads(holder.metadata_props[key])
    except (ValueError, RecursionError) as error:
        raise _wrong(holder, key, "JSON") from error
    if not isinstance(noted, dict):
        raise _wrong(holder, key, "a mapping in JSON")
    return noted


def _wrong(holder: ir.Value | ir.Model, key: str, expected: str) -> GraphoptError:
    name = "the model" if isinstance(holder, ir.Model) else f"value {holder.name!r}"
    return GraphoptError(
        f"{name}: metadata {key!r}: expected {expected}, found {holder.metadata_props[key][:80]!r}"
    )

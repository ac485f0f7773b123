"""Check graphopt's metadata in a loaded model: a file may contain any."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Iterable

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from graphopt.errors import GraphoptError
from graphopt.graph import metadata, origins
from graphopt.graph.checking import check_proto
from graphopt.graph.declarations import Misdeclared
from graphopt.graph.encoders import Encoders
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import malformed, original_name
from graphopt.graph.opsets import Versions
from graphopt.graph.origins import Folded
from graphopt.graph.postprocessing import Caches, Detached, Notes
from graphopt.graph.roles import INPUTS, OF_MODEL, OUTPUTS, STATE, Role, TargetSpec, role_of
from graphopt.graph.values import name_of


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
            _check_inference(graph, node, y, names)
            if metadata.GRADIENT_OF.read(y) not in (None, *names):
                raise malformed(y, metadata.GRADIENT_OF.key, "the name of an input")
    check_detached(model)
    _check_encoders(model)
    for note in (Caches, origins.Exported, Versions, origins.LeftOut, Misdeclared):
        note.read(model)
    if folded := Folded.read(model):
        _checked_parts(model, folded, folded.parts.values())
    if notes := Notes.read(model):
        check_proto(onnx.ModelProto(graph=notes.graph()))
    for value in graph.initializers.values():
        origins.Origin.read(value)


def _check_input(model: ir.Model, value: ir.Value) -> None:
    role = role_of(value)
    if role in STATE or role is Role.HYPERPARAMETER:
        initial, plain = value.const_value, not any(x.is_initializer() for x in model.graph.inputs)
        if (initial is None and not plain) or (initial is not None and initial.dtype is ir.DataType.STRING):
            raise GraphoptError(f"input {value.name!r}: role {role.value!r}: expected an initial value, found none")
    elif role is not None and value.is_initializer():
        raise GraphoptError(f"input {value.name!r}: role {role.value!r}: expected no initial value, found one")
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
    interface = [x for x in [*graph.inputs, *graph.outputs] if role_of(x) in OF_MODEL]
    values = dict.fromkeys([*interface, *(x for x in graph.initializers.values() if not x.is_graph_input())])
    names = {x: original_name(x) for x in values}
    counts = Counter(names.values())
    for value, name in names.items():
        if metadata.ORIGINAL_NAME.read(value) is not None and (not name or counts[name] > 1):
            raise malformed(value, metadata.ORIGINAL_NAME.key, "a name that no other value has")


def _check_inference(graph: ir.Graph, node: ir.Node, y: ir.Value, names: Collection[str | None]) -> None:
    form = InferenceForm.read(y)
    if form is None:
        return
    if not form.merged and not any(role_of(x) in STATE for x in graph.inputs):
        raise InferenceForm.wrong(y, "none in a model without parameters")
    if form.same_as not in (None, *(i for i, x in enumerate(node.inputs) if x is not None)):
        raise InferenceForm.wrong(y, "the number of an input")
    if not all(i in range(len(node.inputs)) and name in names for i, name in form.inputs.items()):
        raise InferenceForm.wrong(y, "inputs by number, and inputs of the graph by name")


def check_detached(model: ir.Model) -> None:
    """Check the metadata of detached outputs; also called before more outputs are detached."""
    detached = Detached.read(model)
    if detached is None:
        return
    parts = _checked_parts(model, detached, detached.parts)
    names = {name_of(output) for output in model.graph.outputs}.union(*map(_output_names, parts))
    if not {*detached.outputs} <= names:
        raise Detached.wrong(model, f"outputs of the model or of its parts, {', '.join(map(repr, names))}")


def _check_encoders(model: ir.Model) -> None:
    encoders = Encoders.read(model)
    if encoders is None:
        return
    (part,) = _checked_parts(model, encoders, [encoders.part])
    inputs = {name_of(x) for x in model.graph.inputs}
    if not _output_names(part) <= inputs:
        raise Encoders.wrong(model, f"a part that computes inputs, {', '.join(map(repr, inputs))}")


def _checked_parts(model: ir.Model, note: metadata.Note, serialized: Iterable[bytes]) -> list[onnx.ModelProto]:
    """Return the models in a note; raise an error if one is malformed."""
    try:
        parts = [onnx.ModelProto.FromString(part) for part in serialized]
    except DecodeError as error:
        raise note.wrong(model) from error
    for part in parts:
        check_proto(part)
    return parts


def _output_names(part: onnx.ModelProto) -> set[str]:
    return {y.name for y in part.graph.output}

"""Extract the inference model from a training graph."""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping, Sequence
from typing import Literal

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import IdentityEliminationPass, RemoveUnusedNodesPass, RemoveUnusedOpsetsPass

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import metadata
from graphopt.graph.encoders import Encoders, restore_encoders
from graphopt.graph.merging import merged_weights
from graphopt.graph.metadata import InferenceForm
from graphopt.graph.operators import Attributes, attributes_of
from graphopt.graph.opsets import ir_version_of, rewrite_in, versions_of
from graphopt.graph.parts import ModelParts
from graphopt.graph.postprocessing import Detached, restore, restore_notes, store
from graphopt.graph.rewriting import interface_kept, needed, protect, remove_unused_nodes
from graphopt.graph.roles import STATE, Role, outputs_of_model, role_of, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.state import averages_read
from graphopt.graph.storage import declare_inputs
from graphopt.graph.traversal import computed_from, extracted_model
from graphopt.graph.values import given, is_floating, is_read, like, name_of, swap

_Adapters = Literal["merged", "left out", "kept"]

_OF_LOSS = (Role.LOSS, Role.METRIC)
INITIALIZERS_ALONE_SINCE = 4  # IR version; in older ones, each initializer is also an input


def stand_in(node: ir.Node, outputs: Sequence[ir.Value]) -> None:
    """Replace an operator's outputs by the first outputs of other nodes in training; inference keeps the operator."""
    attributes = attributes_of(node)
    inputs = [x.name if x is not None and x.name else "" for x in node.inputs]
    for i, (own, y) in enumerate(zip(node.outputs, outputs, strict=False)):
        if own.name:
            swap(own, like(y, own))
            if not InferenceForm.is_on(y):  # keep an earlier form: that of the model's own operator
                InferenceForm(operator=(node.op_type, attributes), reads=tuple(inputs), output=i).write(y)


def extract(model: ir.Model, outputs: Sequence[ir.Value], *, merged: bool = False, quantized: bool = True) -> ir.Model:
    """Return the part of a training graph that computes `outputs`, in its inference form.

    Args:
        model: the training graph.
        outputs: what to compute.
        merged: leave out adapters, for weights into which they are merged.
        quantized: round as fake quantization does; otherwise, leave its nodes out.
    """
    extracted = extracted_model(model, list(model.graph.inputs), list(outputs))
    with interface_kept(extracted):
        predicts = not any(role_of(y) in _OF_LOSS for y in outputs)
        changes_types = _switch_to_inference(extracted.graph, merged, predicts)
        if not quantized:
            _leave_out_rounding(extracted.graph)
    # Extract again: the first time, values that only bodies of unused nodes read were kept.
    extracted = extracted_model(extracted, list(extracted.graph.inputs), list(extracted.graph.outputs))
    remove_unused_results(extracted.graph)
    with interface_kept(extracted), protect(needed(extracted)):  # of two outputs that are one value, it loses a name
        IdentityEliminationPass()(extracted)
    unread = {x.name for x in model.graph.inputs if role_of(x) is Role.DATA and not x.uses()}
    _remove_unused(extracted, unread)
    if changes_types:
        ensure_typed(extracted)
    return extracted


def _remove_unused(model: ir.Model, kept: Collection[str | None] = ()) -> None:
    """Remove nodes, inputs and opsets that nothing uses, except some inputs."""
    RemoveUnusedNodesPass()(model)
    for x in list(model.graph.inputs):
        if not is_read(x) and x.name not in kept:
            model.graph.initializers.pop(x.name or "", None)
            model.graph.inputs.remove(x)
    RemoveUnusedOpsetsPass()(model)


def _switch_to_inference(graph: ir.Graph, merged: bool, predicts: bool) -> bool:
    """Let nodes compute their inference form; return whether that changes types, which are to be inferred anew."""
    inputs = {value.name: value for value in graph.inputs}
    same: dict[str, ir.Value] = {}
    cast: set[ir.DataType | None] = set()
    made: dict[str, ir.Node] = {}
    for node in list(graph):
        form = InferenceForm.read(node.outputs[0])
        if form is None or (form.merged and not merged) or (form.predicting and not predicts):
            continue
        InferenceForm.remove(node.outputs[0])
        for index, name in form.inputs.items():
            node.replace_input_with(index, inputs[name])
            metadata.OF_BATCH.remove(node)  # its statistics are inputs now
        if form.same_as is not None:
            x, y = given(node.inputs[form.same_as]), node.outputs[0]
            same[name_of(y)] = x
            if form.predicting and x.is_graph_input():
                x.shape = y.shape
            if y.is_graph_output():
                x.type = y.type
            elif x.dtype != y.dtype:
                cast |= {x.dtype, y.dtype}
            ir.convenience.replace_all_uses_with(y, x, replace_graph_outputs=True)
        if form.operator is not None and (other := _operator(graph, node, made, same, form)) is not None:
            swap(node.outputs[0], like(other, node.outputs[0]))
    for y in (y for node in graph for y in node.outputs if y.dtype in cast and not y.is_graph_output()):
        y.type = y.shape = None  # the type changes because its inputs are no longer cast
    return bool(cast)


def _leave_out_rounding(graph: ir.Graph) -> None:
    """Let the readers of rounded numbers read the numbers themselves."""
    for node in graph:
        if metadata.FAKE.is_set(node):
            reached = [node.outputs[0]]
            for y in (user.outputs[0] for x in reached for user in x.consumers()):
                if y.dtype is not None and not is_floating(y):  # rows of a table, or its transpose
                    y.type = y.shape = None
                    reached.append(y)
            ir.convenience.replace_all_uses_with(node.outputs[0], given(node.inputs[0]), replace_graph_outputs=True)


def _operator(
    graph: ir.Graph, place: ir.Node, made: dict[str, ir.Node], same: dict[str, ir.Value], form: InferenceForm
) -> ir.Value | None:
    """Return an output of the operator that replaces a node in inference; create the operator once.

    Return None if a rewriter has removed one of its inputs. Inference then keeps the training form.
    """
    assert form.operator is not None
    (op_type, attributes), read = form.operator, form.reads
    key = json.dumps([op_type, attributes, read])
    if key not in made:
        values = ir.convenience.create_value_mapping(graph, include_subgraphs=False) | same
        if not {*read, ""} <= {*values, ""}:
            return None
        made[key] = ir.node(op_type, [values[name] if name else None for name in read], attributes)
        graph.insert_before(place, made[key])
    node, index = made[key], form.output
    node.resize_outputs(max(index + 1, len(node.outputs)))
    for y in node.outputs:
        y.name = y.name or ""
    return node.outputs[index]


def trained(
    model: ir.Model,
    state: Mapping[str, np.ndarray],
    *,
    as_stored: bool = True,
    adapters: _Adapters = "merged",
) -> onnx.ModelProto:
    """Return the inference model inside a training graph as one message; see `trained_parts`."""
    return trained_parts(model, state, as_stored=as_stored, adapters=adapters).message()


def trained_parts(
    model: ir.Model,
    state: Mapping[str, np.ndarray],
    outputs: Sequence[str] | None = None,
    *,
    as_stored: bool = True,
    adapters: _Adapters = "merged",
    quantized: bool = True,
) -> ModelParts:
    """Return the inference model inside a training graph, with the values of `state` as its weights.

    Inputs, outputs and weights have the names of the model that was compiled. The file has the opset and IR version
    of that model if all operators allow it.

    Args:
        model: the training graph.
        state: the values of the state by name.
        outputs: the names of the outputs or inner values to compute; the model's outputs by default.
        as_stored: store weights in the form of the original file, such as float16 or integers; otherwise as they train.
        adapters: whether they are merged into the weights, left out, or kept as operators.
        quantized: whether the model rounds as fake quantization does in training.
    """
    lost = [name_of(y) for y in model.graph.outputs if role_of(y) is None]
    if lost and with_role(model, Role.LOSS):
        raise GraphoptError(
            f"trained: expected the role 'prediction' of the output {lost[0]!r}, found none: a pass has replaced the "
            "output: replace values by graphopt.graph.values.swap(old, new), which keeps the role"
        )
    inference = extract(model, outputs_of_model(model), merged=adapters != "kept", quantized=quantized)
    graph = inference.graph
    averaged = {owner: state[name] for name, owner in averages_read(model).items()}
    changed = merged_weights(model, {**state, **averaged}) if adapters == "merged" else {}
    for value in [value for value in graph.inputs if role_of(value) in STATE]:
        graph.inputs.remove(value)
        graph.initializers.pop(value.name or "", None)
        array = state[value.name or ""]
        value.name = metadata.original_name(value)
        if value.name in graph.initializers:
            raise metadata.malformed(value, metadata.ORIGINAL_NAME.key, "a name that no other value has")
        value.const_value = ir.tensor(array)
        value.const_value.name = value.name
        graph.register_initializer(value)
    for value in list(graph.initializers.values()):
        value.name = metadata.original_name(value)
        if value.name in changed:
            value.const_value = changed.pop(value.name)
            value.const_value.name = value.name
    if as_stored:
        store(inference)
    for value in [*graph.inputs, *graph.outputs, *graph.initializers.values()]:
        metadata.remove_own(value)
    for name in ("producer_name", "producer_version", "domain", "model_version", "doc_string"):
        setattr(inference, name, getattr(model, name))
    metadata.copy(model, inference)
    metadata.remove_own(inference)
    found = _as_it_came(inference, model)
    return found if outputs is None else ModelParts(_computing(found.proto, outputs), found.weights)


def _as_it_came(inference: ir.Model, model: ir.Model) -> ModelParts:
    """Restore an inference model's detached outputs, and the opset and IR version of the original file.

    If an operator has no equivalent in that opset, use the lowest opset that has one.
    """
    opset, ir_version = versions_of(model)
    now = inference.opset_imports.get("", opset)
    detached, encoders = Detached.read(model) or Detached((), ()), Encoders.read(model)
    parts = detached.models()[::-1] + ([] if encoders is None else [encoders.model()])
    opsets = [{entry.domain: entry.version for entry in part.opset_import} for part in parts]
    later = {i: part for i, part in enumerate(parts) if opsets[i].get("") == now != opset}
    rewritten = {i: ir.from_proto(part) for i, part in later.items()}
    version = rewrite_in([inference, *rewritten.values()], opset)
    if version != opset or inference.functions:
        ir_version = max(ir_version, ir_version_of(version), 8 if inference.functions else 0)
    inference.ir_version = ir_version
    whole = ModelParts.of(inference)
    proto = whole.proto
    parts = [ir.to_proto(rewritten[i]) if i in rewritten else part for i, part in enumerate(parts)]
    before = None if encoders is None else parts.pop()
    if parts:
        restore(proto, parts, detached.outputs)
    if encoders is not None and before is not None:
        restore_encoders(proto, before, encoders.inputs)
    restore_notes(proto, model)
    if ir_version < INITIALIZERS_ALONE_SINCE:
        declare_inputs(proto.graph, proto.graph.initializer)
    return whole


def as_it_came(model: ir.Model, own: Sequence[str]) -> ir.Model:
    """Return a rewritten model with the outputs of its file and the new ones.

    In place of an output that is no tensor, such as scikit-learn's dictionaries, it returns what that is made of.

    It has the opset and the IR version of the file, or the lowest opset that has all operators.

    Args:
        own: the names of the outputs before it was rewritten, some of which the file computes but does not return.
    """
    opset, ir_version = versions_of(model)
    detached = Detached.read(model) or Detached(tuple(own), ())
    aside = detached.models()[::-1]
    parts = [ir.from_proto(part) for part in aside if has_tensors(part)]
    others = [part.graph for part in aside if not has_tensors(part)]
    made_of = {y.name: [x.name for x in graph.input] for graph in others for y in graph.output}
    version = rewrite_in([model, *parts], opset)
    model.ir_version = ir_version if version == opset else max(ir_version, ir_version_of(version))
    proto = ir.to_proto(model)
    known = {y.name for y in [*proto.graph.output, *(y for part in parts for y in part.graph.outputs)]}
    order = [x for name in detached.outputs for x in made_of.get(name, [name]) if x in known]
    order += [name_of(y) for y in model.graph.outputs if y.name not in own]
    restore(proto, [ir.to_proto(part) for part in parts], order)
    restored = ir.from_proto(proto)
    Detached.remove(restored)
    return restored


def has_tensors(part: onnx.ModelProto) -> bool:
    """Return whether all outputs of a detached part are tensors."""
    return all(y.type.HasField("tensor_type") for y in part.graph.output)


def _computing(proto: onnx.ModelProto, outputs: Sequence[str]) -> onnx.ModelProto:
    """Return the part of a model that computes the values with some names."""
    model = ir.from_proto(proto)
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    for name in outputs:
        if name not in values:
            raise GraphoptError(unknown("value", name, values))
    model.graph.outputs[:] = [values[name] for name in outputs]
    _remove_unused(model)
    return ir.to_proto(model)


def replace_weights(model: onnx.ModelProto, trained: onnx.ModelProto) -> None:
    """Replace the weights of a model by the weights of the same names in a trained one."""
    weights = {x.name: x for x in trained.graph.initializer}
    initializers = [x for x in model.graph.initializer if x.name in weights]
    if not initializers:
        raise GraphoptError(
            f"get_trained_onnx: expected a model with the trained weights {', '.join(weights)}, found none of them"
        )
    for x in initializers:
        weight = weights[x.name]
        if (x.data_type, x.dims) != (weight.data_type, weight.dims):
            raise GraphoptError(
                f"get_trained_onnx: weight {x.name!r}: expected type {weight.data_type} and shape "
                f"{list(weight.dims)}, found {x.data_type} and {list(x.dims)} in the other model"
            )
        x.CopyFrom(weight)


def remove_unused_results(graph: ir.Graph) -> None:
    """Remove unread outputs and states of each Scan in a graph, and what only they read."""
    for node in reversed(list(graph)):
        if (node.domain, node.op_type) == ("", "Scan") and not all(map(is_read, node.outputs)):
            _shrink(graph, node)


def _shrink(graph: ir.Graph, node: ir.Node) -> None:
    """Remove unread outputs and states of a Scan."""
    body = node.attributes["body"].as_graph()
    sliced = node.attributes["num_scan_inputs"].as_int()
    states = len(node.inputs) - sliced
    kept = [i for i, y in enumerate(node.outputs) if is_read(y)]
    if not kept:
        return
    while True:  # a state stays if what stays depends on it
        read = computed_from(body.outputs[i] for i in kept)
        more = [i for i in range(states) if i not in kept and body.inputs[i] in read]
        if not more:
            break
        kept = sorted([*kept, *more])
    rows = [i for i in range(states, len(body.inputs)) if body.inputs[i] in read] or [states]
    inputs = [*(i for i in kept if i < states), *rows]
    outputs = [node.outputs[i] for i in kept]
    attributes: Attributes = {
        "body": body,
        "num_scan_inputs": len(rows),
        **_chosen(node, "input", [i - states for i in rows]),
        **_chosen(node, "output", [i - states for i in kept if i >= states]),
    }
    body.outputs[:] = [body.outputs[i] for i in kept]
    body.inputs[:] = [body.inputs[i] for i in inputs]
    remove_unused_nodes(body)
    made = [ir.Value(type=y.type, shape=y.shape) for y in outputs]
    other = ir.node("Scan", [node.inputs[i] for i in inputs], attributes, outputs=made)
    metadata.copy(node, other)
    ir.convenience.replace_nodes_and_values(graph, node, [node], [other], outputs, made)


def _chosen(node: ir.Node, side: str, numbers: Sequence[int]) -> dict[str, list[int]]:
    """Return the attributes of some of the sequences of a Scan."""
    names = (f"scan_{side}_axes", f"scan_{side}_directions")
    given = {name: node.attributes.get_ints(name, ()) for name in names}
    return {name: [values[i] for i in numbers] for name, values in given.items() if values}

"""Name the opsets that graphopt and its runtimes speak, and write a model in the opset that it came in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import Note, expect
from graphopt.graph.operators import Attributes, attributes_of, defaults, fits, formal_of, schema_of
from graphopt.graph.traversal import nodes_of
from graphopt.graph.values import constant_of, given, like, swap

OPSET, IR_VERSION = 21, 10  # what graphopt writes
MANY = 64  # an upper bound for opsets, IR versions and outputs of an operator
ORT_TRAINING_OPSET, ORT_TRAINING_IR_VERSION = 21, 10  # the newest that onnxruntime-training 1.19.2 reads

# Operators whose meaning changed in an opset although the schema looks alike.
MEANT_ELSE_BEFORE = dict(DFT=20, GroupNormalization=21, Resize=11, RoiAlign=16, Scan=9, Upsample=10)
ALONG_ONE_AXIS_SINCE_13 = ("Softmax", "LogSoftmax", "Hardmax")  # before, along `axis` and all axes after it
NEGATIVE_AXES_SINCE = 11
GELU_SINCE = 20
# Inputs that were attributes with other names.
RENAMED = {("Pad", "constant_value"): "value", ("TopK", "K"): "k"}
DOES_NOTHING = {("Slice", "steps"): 1, ("Dropout", "training_mode"): False, ("AveragePool", "dilations"): 1}
_MODES = {"linear": "bilinear", "cubic": "bicubic"}  # of GridSample: names since opset 20, and names before

_Form = tuple[Attributes, list[ir.Value | None]]  # a node's attributes and inputs


@dataclass(frozen=True)
class Versions(Note, key="graphopt.came_in", expected="an opset and an IR version"):
    """Record the original opset of the default domain and the original IR version."""

    ir_version: int
    opset: int | None = None

    def check(self) -> None:
        expect(*(1 <= x <= MANY for x in (self.ir_version, self.opset) if x is not None))


def versions_of(model: ir.Model) -> tuple[int, int]:
    """Return the opset and the IR version of a model as it was loaded."""
    now = model.opset_imports.get("", 1)
    came_in = Versions.read(model)
    if came_in is None:
        return now, model.ir_version
    known = [opset for _, its_ir, opset, *_ in onnx.helper.VERSION_TABLE if its_ir <= came_in.ir_version]
    return came_in.opset or min(now, max(known, default=1)), came_in.ir_version


def check_training_version(model: ir.Model, where: str, advice: str) -> None:
    """Raise an error if onnxruntime-training is too old for a model's opset or IR version."""
    version = model.opset_imports[""]
    if version > ORT_TRAINING_OPSET or model.ir_version > ORT_TRAINING_IR_VERSION:
        raise GraphoptError(
            f"{where}: expected a model of opset {ORT_TRAINING_OPSET} and IR version {ORT_TRAINING_IR_VERSION} or "
            f"older, found {version} and {model.ir_version}{advice}"
        )


def ir_version_of(opset: int) -> int:
    """Return the IR version that ONNX released with an opset of the default domain."""
    return onnx.helper.find_min_ir_version_for([onnx.helper.make_opsetid("", opset)], ignore_unknown=True)


def rewrite_in(models: Sequence[ir.Model], version: int) -> int:
    """Convert models in place to the common opset closest to `version` that can express all of them.

    Returns: The new opset of the default domain.
    """
    now = models[0].opset_imports.get("", version)
    for candidate in range(version, now, 1 if version < now else -1):
        if all(_rewritten(model, now, candidate) for model in models):
            return candidate
    return now


def _rewritten(model: ir.Model, now: int, version: int) -> bool:
    """Convert a model and return True, or return False and leave it unchanged if a node has no equivalent."""
    nodes = [node for node in nodes_of(model) if node.domain == ""]
    forms: dict[ir.Node, _Form] = {}
    for node in nodes:
        exact = node.attributes.get_string("approximate", "none") == "none"
        if node.op_type == "Gelu" and version < GELU_SINCE and exact and node.graph is model.graph:
            continue
        form = _form(node, now, version)
        if form is None:
            return False
        forms[node] = form
    for node, (attributes, inputs) in forms.items():
        if attributes != attributes_of(node):
            node.attributes.clear()
            node.attributes.update({x.name: x for x in ir.convenience.convert_attributes(attributes)})
        for i in range(len(inputs), len(node.inputs)):
            node.replace_input_with(i, None)
        node.resize_inputs(len(inputs))
    for node in nodes:
        node.version = None
        if node not in forms:  # a Gelu: x (1 + erf(x / sqrt 2)) / 2
            x, y = given(node.inputs[0]), node.outputs[0]
            with Emitter(model) as op:
                swap(y, like(x * 0.5 * (1.0 + op.Erf(x * math.sqrt(0.5))), y))
            model.graph.remove(node, safe=True)
            model.graph.sort()
    model.opset_imports[""] = version
    RemoveUnusedNodesPass()(model)
    return True


def _form(node: ir.Node, now: int, version: int) -> _Form | None:
    """Return a node's attributes and inputs in another opset, or None if it has no equivalent."""
    new, old = (schema_of("", node.op_type, opset) for opset in (now, version))
    attributes = attributes_of(node)
    inputs = list(node.inputs)
    if new is None or old is None or new.deprecated or old.deprecated:
        return None
    if new.since_version == old.since_version:
        return attributes, inputs
    is_ref = any(attribute.is_ref() for attribute in node.attributes.values())
    if is_ref or version > now or version < MEANT_ELSE_BEFORE.get(node.op_type, 0):
        return None
    count = _turn_into_attributes(node, attributes, new, old)
    if count is None or not _written(node, attributes, old, version):
        return None
    inputs = inputs[:count]
    for name, default in defaults("", node.op_type, now).items():
        if name not in old.attributes and attributes.get(name) == default:
            del attributes[name]
    for name in attributes.keys() - old.attributes.keys():
        if _does_nothing(node.op_type, name, np.asarray(attributes[name])):
            del attributes[name]
    is_valid = (
        attributes.keys() <= old.attributes.keys()
        and all(name in attributes for name, attribute in old.attributes.items() if attribute.required)
        and old.min_input <= len(inputs) <= old.max_input
        and len(node.outputs) <= old.max_output
        and _is_typed(inputs, old)
    )
    return (attributes, inputs) if is_valid else None


def _turn_into_attributes(
    node: ir.Node, attributes: Attributes, new: onnx.defs.OpSchema, old: onnx.defs.OpSchema
) -> int | None:
    """Turn constant inputs into the attributes that they were in an older opset; return the number of other inputs."""
    inputs, count = node.inputs, len(node.inputs)
    for i, formal in list(enumerate(new.inputs))[len(old.inputs) :]:
        if formal.option == onnx.defs.OpSchema.FormalParameterOption.Variadic:
            continue
        count = min(count, i)
        if i >= len(inputs) or inputs[i] is None:
            continue
        name, array = RENAMED.get((node.op_type, formal.name), formal.name), constant_of(inputs[i])
        if array is None:
            return None
        if name in old.attributes:
            kind = old.attributes[name].type
            whole = kind in (onnx.defs.OpSchema.AttrType.INTS, onnx.defs.OpSchema.AttrType.FLOATS)
            attributes[name] = array.ravel().tolist() if whole else array.item()
        elif not _does_nothing(node.op_type, formal.name, array):
            return None
    return count


def _does_nothing(op_type: str, name: str, array: np.ndarray) -> bool:
    """Return whether an input that an older schema lacks has the value that the schema implies."""
    return set(array.ravel().tolist()) == {DOES_NOTHING.get((op_type, name))}


def _written(node: ir.Node, attributes: Attributes, old: onnx.defs.OpSchema, version: int) -> bool:
    """Change attributes to the form of an older schema; return whether it can express them."""
    x = node.inputs[0] if node.inputs else None
    dims = None if x is None or x.shape is None else list(x.shape)
    if node.op_type in ALONG_ONE_AXIS_SINCE_13 and version < 13:
        if dims is None or attributes.get("axis", -1) not in (-1, len(dims) - 1):
            return False
        attributes["axis"] = len(dims) - 1
    if node.op_type == "Split" and "num_outputs" in attributes and "num_outputs" not in old.attributes:
        size = None if dims is None else dims[attributes.get("axis", 0)]
        if not isinstance(size, int) or size % len(node.outputs):
            return False
        del attributes["num_outputs"]
    if node.op_type == "Reshape" and version < 14 and len(node.inputs) > 1 and node.inputs[1] is not None:
        sizes, maker = constant_of(node.inputs[1]), node.inputs[1].producer()
        of_values = maker is not None and maker.op_type == "Shape"  # only an empty value has a size 0
        if of_values if sizes is None else sizes.all():
            attributes.pop("allowzero", None)
    if node.op_type == "GridSample" and version < 20:
        mode = attributes.get("mode", "linear")
        attributes["mode"] = _MODES.get(mode, mode)
    if version < NEGATIVE_AXES_SINCE:
        indexed = node.outputs[0] if node.op_type == "Unsqueeze" else x
        for name in attributes.keys() & {"axis", "axes"}:
            axes = np.array(attributes[name])
            if (axes < 0).any():
                if indexed is None or indexed.shape is None:
                    return False
                attributes[name] = (axes % len(indexed.shape)).tolist()
    return True


def _is_typed(inputs: Sequence[ir.Value | None], old: onnx.defs.OpSchema) -> bool:
    """Return whether a schema accepts inputs of these types and its type constraints hold."""
    bound: dict[str, ir.DataType] = {}
    for i, x in enumerate(inputs):
        formal = formal_of(old, i)
        if x is None and formal.option != onnx.defs.OpSchema.FormalParameterOption.Optional:
            return False
        if x is None or x.dtype is None or not isinstance(x.type, ir.TensorType):
            continue
        if formal.is_homogeneous and bound.setdefault(formal.type_str, x.dtype) != x.dtype:
            return False
    return fits(old, inputs)

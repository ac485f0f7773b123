"""Brings any inference model into the one form that the other passes work on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.version_converter

import passes.gradient as gradient
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass, outputs_kept
from graphopt.roles import Role, role_of, set_role

OPSET = 21
IR_VERSION = 10


@dataclass(frozen=True)
class Normalize(Pass):
    """Convert to opset 21 and IR version 10, inline functions without a rule, lift weights, infer every type.

    Weights that nodes make (`Constant` and `ConstantOfShape` of more than one number) become initializers;
    initializers stop being inputs; unknown dimensions get names of their own. A model that
    needs a newer opset keeps it, with a warning.

    Raises:
        GraphoptError: the model is invalid, or a value's type cannot be inferred; names the node.
    """

    def rewrite(self, model: ir.Model) -> None:
        with outputs_kept(model):
            self._prepare(model)
        infer(model)
        for value in model.graph.inputs:
            set_role(value, role_of(value) or Role.DATA)
        for value in model.graph.outputs:
            set_role(value, role_of(value) or Role.PREDICTION)

    def _prepare(self, model: ir.Model) -> None:
        common.InlinePass(criteria=lambda function: not gradient.has_rule(function.domain, function.name))(
            model
        )
        common.RemoveUnusedFunctionsPass()(model)  # type: ignore[no-untyped-call]
        convert(model)
        common.RemoveInitializersFromInputsPass()(model)
        materialize(model)
        common.LiftConstantsToInitializersPass(lift_all_constants=False, size_limit=2)(model)
        common.IdentityEliminationPass()(model)
        common.RemoveUnusedNodesPass()(model)
        common.NameFixPass()(model)


def convert(model: ir.Model) -> None:
    """Convert the default domain to the working opset; a model that needs a newer one keeps it."""
    version = model.opset_imports.get("", OPSET)
    if version < OPSET:
        onnxscript.version_converter.convert_version(model, OPSET, fallback=True)
    if version > OPSET:
        newer = {
            node.op_type
            for node in model.graph.all_nodes()
            if node.domain == ""
            and onnx.defs.get_schema(node.op_type, version).since_version > OPSET
            and not _same_but_for_types(node.op_type, version)
        }
        if newer:
            warnings.warn(
                f"the model uses opset {version} for {', '.join(sorted(newer))}: its training graph keeps that opset "
                f"and asks for a runtime that has it",
                stacklevel=2,
            )
            return
        _set_opset(model, OPSET)
    model.ir_version = IR_VERSION


def _same_but_for_types(op_type: str, version: int) -> bool:
    """Tell whether an operator of a newer opset differs from its working version in element types alone."""
    new = onnx.defs.get_schema(op_type, version)
    try:
        old = onnx.defs.get_schema(op_type, OPSET)
    except onnx.defs.SchemaError:
        return False
    return set(new.attributes) == set(old.attributes) and len(new.inputs) == len(old.inputs)


def _set_opset(model: ir.Model, version: int) -> None:
    model.opset_imports[""] = version
    for node in model.graph.all_nodes():
        if node.domain == "":
            node.version = None


def materialize(model: ir.Model) -> None:
    """Replace `ConstantOfShape` nodes of a constant floating shape by initializers that hold the numbers."""
    for node in list(model.graph):
        if node.op_type != "ConstantOfShape" or node.domain != "":
            continue
        shape = ir.convenience.get_const_tensor(node.inputs[0])  # type: ignore[arg-type]
        fill = node.attributes.get_tensor("value", None)
        array = np.zeros(1, np.float32) if fill is None else fill.numpy()
        if shape is None or array.dtype.kind != "f" or shape.numpy().prod() < 2:
            continue
        tensor = ir.tensor(np.full(shape.numpy(), array.item(), array.dtype), name=node.outputs[0].name)
        weight = ir.Value(
            name=tensor.name,
            type=ir.TensorType(tensor.dtype),
            shape=ir.Shape(tensor.shape),
            const_value=tensor,
        )
        node.outputs[0].name = f"{tensor.name}/replaced"
        ir.convenience.replace_all_uses_with(node.outputs[0], weight, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(weight)


def infer(model: ir.Model) -> None:
    """Infer the type and shape of every value of the main graph; unknown dimensions get names."""
    names = (f"unknown_{i}" for i in range(2**62))
    name_dimensions(model.graph.inputs, names)
    inferred = _inferred(model)
    for node in model.graph:
        for output in node.outputs:
            found = inferred.get(output.name or "")
            if found is not None and found.type is not None:
                output.type, output.shape = found.type, found.shape
            if output.type is None or (output.shape is None and isinstance(output.type, ir.TensorType)):
                operator = f"{node.domain}::{node.op_type}" if node.domain else node.op_type
                raise GraphoptError(
                    f"cannot infer the type of {output.name!r}, output of {operator} node {node.name!r}: expected an "
                    f"operator of ONNX or a function in the model"
                )
    name_dimensions((output for node in model.graph for output in node.outputs), names)


def _inferred(model: ir.Model) -> dict[str, ir.Value]:
    """Return the values of the model as ONNX's inference types them; it is spared the weights."""
    proto = ir.to_proto(model)
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.ByteSize() > 1000]:
        proto.graph.input.append(onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims))
        proto.graph.initializer.remove(tensor)
    try:
        typed = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise GraphoptError(f"cannot infer the model's shapes: {' '.join(str(error).split())}") from error
    return dict(ir.convenience.create_value_mapping(ir.from_proto(typed).graph, include_subgraphs=False))


def name_dimensions(values: Iterable[ir.Value], names: Iterator[str]) -> None:
    """Give every unknown dimension a name, so that equal names mean equal sizes."""
    for value in values:
        if value.shape is not None and value.shape.has_unknown_dim():
            value.shape = ir.Shape([_named(dim, names) for dim in value.shape.dims])


def _named(dim: int | ir.SymbolicDim, names: Iterator[str]) -> int | str:
    if isinstance(dim, int):
        return dim
    return next(names) if dim.value is None else dim.value

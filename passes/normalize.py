"""Brings any inference model into the one form that the other passes work on."""

from __future__ import annotations

import warnings
from dataclasses import dataclass

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.version_converter

import passes.gradient as gradient
from graphopt.rewriting import Pass, outputs_kept
from graphopt.roles import Role, role_of, set_role
from passes.shapes import fold_shapes, infer

__all__ = ["Normalize"]

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
            fold_shapes(model)
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
            shape=ir.Shape(shape.numpy().tolist()),
            const_value=tensor,
        )
        node.outputs[0].name = f"{tensor.name}/replaced"
        ir.convenience.replace_all_uses_with(node.outputs[0], weight, replace_graph_outputs=True)
        model.graph.remove(node, safe=True)
        model.graph.register_initializer(weight)

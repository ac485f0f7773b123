"""Brings any inference model into the one form that the other passes work on."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnx_ir.passes.common as common
import onnxscript.optimizer
import onnxscript.rewriter
import onnxscript.version_converter
from onnxscript.rewriter.pattern import RewriteRule
from onnxscript.rewriter.rules.common import materialize_reshape_shape_rule

import passes.gradient as gradient
from graphopt.errors import GraphoptError
from graphopt.rewriting import Pass, outputs_kept
from graphopt.roles import Role, role_of, set_role

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


def fold_shapes(model: ir.Model) -> None:
    """Compute what is known of shapes: integers alone, since a transposed weight must stay what it is."""
    onnxscript.rewriter.rewrite(model, [STATIC_DIMENSION])
    onnxscript.optimizer.fold_constants(model, onnx_shape_inference=True, should_fold=_is_integral)
    onnxscript.rewriter.rewrite(model, [materialize_reshape_shape_rule])


def _is_integral(node: ir.Node) -> bool | None:
    return None if not any(map(gradient.is_differentiable, node.outputs)) else False


def _dimension(op: Any, x: ir.Value, index: ir.Value) -> ir.Value:
    return op.Gather(op.Shape(x), index, axis=0)


def _sizes(x: ir.Value, index: ir.Value) -> np.ndarray | None:
    """Return the sizes of `x` along the axes `index`, or None where they are not known."""
    axes = ir.convenience.get_const_tensor(index)
    if axes is None or x.shape is None:
        return None
    dims = [x.shape[axis] for axis in axes.numpy().ravel().tolist()]
    known = all(isinstance(dim, int) for dim in dims)
    return np.array(dims, np.int64).reshape(axes.numpy().shape) if known else None


def _is_static(context: Any, x: ir.Value, index: ir.Value) -> bool:
    return _sizes(x, index) is not None


def _as_constant(op: Any, x: ir.Value, index: ir.Value) -> ir.Value:
    sizes = _sizes(x, index)
    assert sizes is not None
    return op.Constant(value=ir.tensor(sizes))


STATIC_DIMENSION = RewriteRule(_dimension, _as_constant, _is_static)


def infer(model: ir.Model) -> None:
    """Infer the type and shape of every value of the main graph; unknown dimensions get names."""
    names = (f"unknown_{i}" for i in range(2**62))
    name_dimensions(model.graph.inputs, names)
    _infer_all(model)
    untyped = next(_untyped(model), None)
    while untyped is not None:
        if not all(_type_by_schema(untyped, output) for output in untyped.outputs):
            operator = f"{untyped.domain}::{untyped.op_type}" if untyped.domain else untyped.op_type
            raise GraphoptError(
                f"cannot infer the type of {untyped.outputs[0].name!r}, output of {operator} node {untyped.name!r}: "
                f"expected an operator of ONNX or a function in the model"
            )
        _infer_all(model)
        untyped = next(_untyped(model), None)
    name_dimensions((output for node in model.graph for output in node.outputs), names)


def _untyped(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if any(output.type is None for output in node.outputs))


def _type_by_schema(node: ir.Node, output: ir.Value) -> bool:
    """Type an output, of unknown shape, by an input of the same type: some schemas come without inference."""
    try:
        schema = onnx.defs.get_schema(node.op_type, node.graph.opset_imports[node.domain], node.domain)  # type: ignore[union-attr]
    except (onnx.defs.SchemaError, KeyError):
        return False
    variable = schema.outputs[output.index()].type_str  # type: ignore[index]
    for formal, x in zip(schema.inputs, node.inputs, strict=False):
        if x is not None and formal.type_str == variable:
            output.type = x.type
    return output.type is not None


def _infer_all(model: ir.Model) -> None:
    """Type values as ONNX's inference does; it is spared the weights."""
    proto = ir.to_proto(model)
    for tensor in [tensor for tensor in proto.graph.initializer if tensor.ByteSize() > 1000]:
        proto.graph.input.append(
            onnx.helper.make_tensor_value_info(tensor.name, tensor.data_type, tensor.dims)
        )
        proto.graph.initializer.remove(tensor)
    try:
        typed = onnx.shape_inference.infer_shapes(proto, check_type=True, strict_mode=True, data_prop=True)
    except onnx.shape_inference.InferenceError as error:
        raise GraphoptError(f"cannot infer the model's shapes: {' '.join(str(error).split())}") from error
    inferred = ir.convenience.create_value_mapping(ir.from_proto(typed).graph, include_subgraphs=False)
    for node in model.graph:
        for output in node.outputs:
            found = inferred.get(output.name or "")
            if found is not None and found.type is not None:
                output.type, output.shape = found.type, found.shape


def name_dimensions(values: Iterable[ir.Value], names: Iterator[str]) -> None:
    """Give every unknown dimension a name, so that equal names mean equal sizes."""
    for value in values:
        if value.shape is not None and value.shape.has_unknown_dim():
            value.shape = ir.Shape([_named(dim, names) for dim in value.shape])


def _named(dim: int | ir.SymbolicDim, names: Iterator[str]) -> int | str:
    if isinstance(dim, int):
        return dim
    return next(names) if dim.value is None else dim.value

"""Infer types and shapes, compute static sizes, and name unknown dimensions."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass
from onnxscript.rewriter.pattern import RewriteRule
from onnxscript.rewriter.rules.common import materialize_reshape_shape_rule

from graphopt.errors import GraphoptError, line
from graphopt.graph.emitter import Emitter
from graphopt.graph.folding import fold
from graphopt.graph.limits import are_vectors_short, check_constants
from graphopt.graph.message_inference import INFERENCE_ERRORS, infer_message
from graphopt.graph.metadata import TOKEN_POSITIONS
from graphopt.graph.operators import GROWING, POOLS, SEQUENCE_READERS, schema_of
from graphopt.graph.rewriting import needed, protect
from graphopt.graph.rules import rewrite
from graphopt.graph.traversal import all_nodes, forward_nodes, sort, subgraphs, values_in
from graphopt.graph.typed_messages import infer_types, message_for_inference, take_types
from graphopt.graph.values import constant_of, is_static, operator_of, size_name, size_names


def ensure_typed(model: ir.Model) -> None:
    """Infer types if some are missing, as in a model without `Normalize`."""
    if next(_untyped(model), None) is not None:
        infer(model)


def fold_shapes(model: ir.Model) -> None:
    """Fold computations of static sizes; only integers, because a transposed weight must not become a constant.

    An If with a constant condition is replaced by its branch, which may make later shapes static.
    """
    while fold_integers(model):
        infer(model)
    rewrite(model, [materialize_reshape_shape_rule])
    RemoveUnusedNodesPass()(model)


def ifs(model: ir.Model) -> int:
    """Return the number of If nodes, also of those in bodies."""
    return sum(node.op_type == "If" for node in all_nodes(model.graph))


def fold_integers(model: ir.Model) -> bool:
    """Fold integers and booleans that are constant, once, and return whether fewer If nodes remain."""
    before = ifs(model)
    rewrite(model, STATIC_DIMENSIONS)
    nodes = list(all_nodes(model.graph))
    dropouts = [node for node in nodes if node.op_type == "Dropout" and node.domain == ""]
    positions = [node for node in nodes if TOKEN_POSITIONS.is_set(node)]
    with protect([*dropouts, *positions, *needed(model)]):  # a later pass may enable Dropout, or count anew
        fold(model, only_integers=True)
    return ifs(model) < before


def _sizes(x: ir.Value, index: ir.Value) -> np.ndarray | None:
    """Return the sizes of `x` along the axes `index`, or None if one is dynamic."""
    axes = constant_of(index)
    if axes is None or x.shape is None or not all(-len(x.shape) <= axis < len(x.shape) for axis in axes.flat):
        return None
    dims = [x.shape[int(axis)] for axis in axes.flat]
    known = all(isinstance(dim, int) for dim in dims)
    return np.array(dims, np.int64).reshape(axes.shape) if known else None


def _sizes_between(x: ir.Value, start: ir.Value, end: ir.Value) -> np.ndarray | None:
    """Return the sizes of `x` from one axis to another, or None if one is dynamic."""
    bounds = [constant_of(start), constant_of(end)]
    if x.shape is None or any(bound is None or bound.size != 1 for bound in bounds):
        return None
    dims = list(x.shape)[slice(*(int(bound.item()) for bound in bounds if bound is not None))]
    return np.array(dims, np.int64) if all(isinstance(dim, int) for dim in dims) else None


STATIC_DIMENSIONS = [
    RewriteRule(
        lambda op, x, index: op.Gather(op.Shape(x, _allow_other_attributes=False), index, axis=0),
        lambda op, x, index: op.Constant(value=ir.tensor(_sizes(x, index))),  # type: ignore[arg-type]
        lambda context, x, index: _sizes(x, index) is not None,
    ),
    RewriteRule(
        lambda op, x, start, end: op.Slice(op.Shape(x, _allow_other_attributes=False), start, end),
        lambda op, x, start, end: op.Constant(value=ir.tensor(_sizes_between(x, start, end))),  # type: ignore[arg-type]
        lambda context, x, start, end: _sizes_between(x, start, end) is not None,
    ),
]


def infer(model: ir.Model, propagate: bool | None = None) -> None:
    """Infer the type and shape of every value, including values in bodies, and name unknown dimensions.

    Args:
        propagate: what `check_expanded` returned before the form of the model changed; by default, the model is
            checked.
    """
    names = new_names(model)
    name_dimensions(model.graph.inputs, names)
    if propagate is None:
        propagate = check_expanded(model)
    _infer_all(model, propagate)
    while shape_states(model.graph):
        _infer_all(model, propagate)
    while (untyped := next(_untyped(model), None)) is not None:
        if not all(_type_by_schema(untyped, output) for output in untyped.outputs):
            raise GraphoptError(
                f"cannot infer the type of {untyped.outputs[0].name!r}, output of {operator_of(untyped)} node "
                f"{untyped.name!r}: expected an operator of ONNX, a function in the model, or its type and shape in "
                f"value_info"
            )
        _infer_all(model, propagate)
    name_dimensions((x for graph in model.graphs() for x in graph.inputs), names)
    name_dimensions((output for node in all_nodes(model.graph) for output in node.outputs), names)


def is_inferred(model: ir.Model) -> bool:
    """Return whether all values have types, and shapes whose dimensions have names.

    A pool that rounds up is inferred wrongly before opset 22, so that the answer is no.
    """
    nodes = list(all_nodes(model.graph))
    values = [y for node in nodes for y in node.outputs if y.name]
    shapes = [y.shape for y in values if y.type is not None and y.shape is not None]
    is_named = all(_is_known(dim) for shape in shapes for dim in shape)
    return len(shapes) == len(values) and is_named and not any(map(is_ceiled, nodes))


def infer_anew(model: ir.Model) -> None:
    """Infer the types and shapes of all computed values from inputs and weights, whatever the model declares.

    What cannot be inferred has no shape. A type stays declared only if inference does not know the operator: ONNX
    Runtime compares all declared types with its own.
    """
    computed = [y for node in all_nodes(model.graph) for y in node.outputs]
    inner = [x for graph in model.graphs() if graph is not model.graph for x in graph.inputs]
    declared = {x: x.type for x in [*computed, *inner]}

    def forget() -> None:
        for x in declared:
            x.shape, node = None, x.producer()
            known = node is None or (node.domain == "" and onnx.defs.has(node.op_type, ""))
            x.type = None if known else declared[x]

    forget()
    try:
        infer(model)
    except GraphoptError:
        forget()
        name_dimensions(model.graph.inputs, new_names(model))
        with contextlib.suppress(*INFERENCE_ERRORS):
            infer_types(model)
    for x, kind in declared.items():
        x.type = x.type or kind


def new_names(model: ir.Model) -> Iterator[str]:
    """Return names of dimensions that the model lacks."""
    taken = size_names(x for graph in model.graphs() for x in values_in(graph))
    return (name for i in itertools.count() if (name := f"unknown_{i}") not in taken)


def _untyped(model: ir.Model) -> Iterator[ir.Node]:
    return (node for node in model.graph if any(output.type is None for output in node.outputs))


def _type_by_schema(node: ir.Node, output: ir.Value) -> bool:
    """Copy an output's type from an input of the same type variable: some schemas have no inference."""
    versions = node.graph.opset_imports  # type: ignore[union-attr]
    schema = schema_of(node.domain, node.op_type, versions.get(node.domain, 0))
    if schema is None:
        return False
    variable = schema.outputs[output.index()].type_str  # type: ignore[index]
    for formal, x in zip(schema.inputs, node.inputs, strict=False):
        if x is not None and formal.type_str == variable:
            output.type = x.type
    return output.type is not None


def check_expanded(model: ir.Model) -> bool:
    """Check the memory of constants before they are computed.

    Sizes come from folding and from ONNX's inference without data propagation, which itself computes vectors of
    integers.

    Returns:
        whether all vectors are short enough for data propagation.
    """
    probe = model.clone()
    try:
        infer_types(probe)
    except INFERENCE_ERRORS as error:
        raise GraphoptError(f"cannot infer the model's shapes: {line(error)}") from error
    if any(node.op_type in GROWING and not is_static(node.outputs[0]) for node in all_nodes(probe.graph)):
        fold_integers(probe)
    check_constants(probe)
    return are_vectors_short(probe.graph, lambda x: x.shape)


def is_ceiled(node: ir.Node) -> bool:
    """Return whether a node is a pool that rounds its output size up, with a partial last window."""
    return node.domain == "" and node.op_type in POOLS and bool(node.attributes.get_int("ceil_mode", 0))


def _infer_all(model: ir.Model, propagate: bool) -> None:
    """Set types and shapes by ONNX's inference, without passing it the weights.

    Pools of opset 21 with `ceil_mode` are inferred as of opset 22, which differs only there: before, inference counted
    a window that begins beyond the elements (tests/faults.py: ceil-mode). The model may contain such sizes.
    """
    proto = message_for_inference(model, propagate)
    ceiled = any(map(is_ceiled, all_nodes(model.graph)))
    for opset in proto.opset_import:
        if ceiled and (opset.domain, opset.version) == ("", 21):
            opset.version = 22
    try:
        typed = infer_message(proto, propagate=propagate, strict=True)
    except INFERENCE_ERRORS:
        if ceiled:
            del proto.graph.value_info[:]
            for y in proto.graph.output:
                y.type.tensor_type.ClearField("shape")
        try:  # data are propagated through an outer product incorrectly (tests/faults.py: outer-product)
            typed = infer_message(proto, strict=True)
        except INFERENCE_ERRORS as error:
            raise GraphoptError(f"cannot infer the model's shapes: {line(error)}") from error
    take_types(model.graph, typed.graph)


def reads_sequence(node: ir.Node | None) -> bool:
    """Return whether a node takes a tensor from a sequence."""
    return node is not None and node.domain == "" and node.op_type in SEQUENCE_READERS


def separate_elements(model: ir.Model) -> bool:
    """Give the open sizes of each tensor that is taken from a sequence names of their own.

    ONNX's inference gives all elements of a sequence one shape, also where their sizes differ.

    Returns:
        whether the model has such sizes.
    """
    named = {dim for x in model.graph.inputs for dim in x.shape or ()}
    found = False
    for node in all_nodes(model.graph):
        for y in node.outputs if reads_sequence(node) else ():
            dims = list(enumerate(y.shape or ()))
            own = [dim if isinstance(dim, int) or dim in named else f"{y.name}/{i}" for i, dim in dims]
            if y.shape is not None and y.shape != own:
                y.shape, found = ir.Shape(own), True
    return found


def shape_states(graph: ir.Graph) -> bool:
    """Infer the shapes of Loop states from their initial values, except for dimensions that an iteration changes.

    ONNX infers no shape, because an iteration may change even the rank.

    Returns:
        whether a shape changed.
    """
    new = False
    for node in graph:
        for body in subgraphs(node):
            new |= shape_states(body)
            if node.op_type == "Loop":
                states = zip(node.inputs[2:], body.inputs[2:], body.outputs[1:], node.outputs, strict=False)
                new |= any([_shape_state(body, *state) for state in states])
    return new


def _shape_state(body: ir.Graph, initial: ir.Value | None, before: ir.Value, after: ir.Value, last: ir.Value) -> bool:
    if initial is None or initial.shape is None:
        return False
    if before.shape is None:
        before.shape = initial.shape
        return True
    if after.shape is None or len(after.shape) != len(before.shape):
        return False
    common = ir.Shape([d if d == e else None for d, e in zip(before.shape, after.shape, strict=True)])
    triples = zip(initial.shape, before.shape, after.shape, strict=False)
    if len(initial.shape) == len(before.shape) and any(_is_known(c) and c == d != e for c, d, e in triples):
        before.shape = common
        for node in body.all_nodes():
            for output in node.outputs:
                output.shape = None
        return True
    if last.shape is None:
        last.shape = common
        return True
    return False


def sizes_of_inputs(model: ir.Model) -> None:
    """Make the backward pass read sizes from inputs with the same dimension instead of from intermediate values.

    Otherwise these values would stay in memory only for their shapes.
    """
    forward = forward_nodes(model)
    inner = [
        node
        for node in model.graph
        if node.op_type == "Shape" and node not in forward and node.inputs[0] not in model.graph.inputs
    ]
    with Emitter(model) as op:
        read_sizes(op, inner, places_of(model.graph.inputs))
    sort(model.graph)


Places = Mapping[str | None, tuple[ir.Value, int]]  # for each dimension's name, a value and an axis with it


def places_of(values: Iterable[ir.Value], first: int = 0) -> Places:
    """Return a value and an axis for each named dimension of `values`; axes before `first` are ignored."""
    places: dict[str | None, tuple[ir.Value, int]] = {}
    for x in values:
        for axis, dim in list(enumerate(x.shape or ()))[first:]:
            if name := size_name(dim):
                places.setdefault(name, (x, axis))
    return places


def read_sizes(op: Emitter, nodes: Iterable[ir.Node], places: Places) -> None:
    """Replace Shape and Size nodes by sizes of the values in `places`, if these have all dimensions that are read."""
    for node in nodes:
        value = node.inputs[0]
        if value is None or value.shape is None:
            continue
        start, end = (node.attributes.get_int(*bound) for bound in (("start", 0), ("end", len(value.shape))))
        dims = list(value.shape)[start:end]
        known = [isinstance(dim, int) or dim.value in places for dim in dims]
        if node.op_type == "Shape" and not all(known):
            for reader in [reader for reader in node.outputs[0].consumers() if reader.op_type == "Gather"]:
                index = constant_of(reader.inputs[1])
                if index is not None and index.size == 1 and known[index.item()]:
                    first = op.constant(np.zeros(index.shape, np.int64))
                    one = op.Gather(size_of(op, dims[index.item()], places), first)
                    ir.convenience.replace_all_uses_with(reader.outputs[0], one)
                    reader.graph.remove(reader, safe=True)  # type: ignore[union-attr]
            if not node.outputs[0].uses() and not node.outputs[0].is_graph_output():
                node.graph.remove(node, safe=True)  # type: ignore[union-attr]
        elif dims and all(known):
            sizes = [size_of(op, dim, places) for dim in dims]
            whole = sizes[0] if len(sizes) == 1 else op.Concat(*sizes, axis=0)
            if node.op_type == "Size":
                whole = op.ReduceProd(whole, keepdims=0)
            ir.convenience.replace_all_uses_with(node.outputs[0], whole)
            node.graph.remove(node, safe=True)  # type: ignore[union-attr]


def size_of(op: Emitter, dim: int | ir.SymbolicDim, places: Places) -> ir.Value:
    """Return a size as a vector of one element."""
    if isinstance(dim, int):
        return op.constant(np.array([dim], np.int64))
    x, axis = places[dim.value]
    return op.Shape(x, start=axis, end=axis + 1)


def name_dimensions(values: Iterable[ir.Value], names: Iterator[str]) -> None:
    """Name every unknown dimension, so that equal names mean equal sizes."""
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([_named(dim, names) for dim in value.shape])


def _named(dim: int | ir.SymbolicDim, names: Iterator[str]) -> int | str:
    """Return a dimension, or a new name if it is unknown, which some exporters write as -1 or `?`."""
    if not _is_known(dim):
        return next(names)
    return dim if isinstance(dim, int) else str(dim.value)


def _is_known(dim: int | ir.SymbolicDim) -> bool:
    return dim >= 0 if isinstance(dim, int) else dim.value not in (None, "?")

"""Replace the shapes and types that a file declares by inferred ones: exporters and builders declare wrong ones.

A declared shape or type stays only where inference finds none, as for outputs of custom operators. An inferred
dimension without a name gets the name of an input's dimension, or a number, if inference finds this size for several
sizes of the inputs.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph import shapes
from graphopt.graph.limits import are_surely_small, are_vectors_short
from graphopt.graph.metadata import Misdeclared
from graphopt.graph.storage import without_weights
from graphopt.graph.traversal import subgraphs
from graphopt.graph.typed_messages import bodies_in, declared_in, shape_of, sizes_of, type_of, types_in
from graphopt.graph.values import is_static, name_of

Dim = int | ir.SymbolicDim
Declared = dict[ir.Value, ir.Shape]

_WHOLE = onnx.numpy_helper.from_array(np.zeros(1, np.int64))
_ROUNDS = 4  # of inference, each with the declared shapes that the one before lacked
# The first sizes of inputs that are tried: odd and even, small and large, so that no rounding goes unnoticed.
TRIED = (61, 7, 94)
_FEW = (2, 3, 5)  # sizes that all inputs have at once, because a Slice such as [-3:3] depends on them alone


def forget(model: ir.Model) -> bool:
    """Infer the shape of every value from the inputs and weights, whatever the model declares.

    The model gets a note of the values whose declared shapes are wrong.

    Returns: What `graphopt.graph.shapes.check_expanded` returns.
    """
    shapes.name_dimensions(model.graph.inputs, (f"unknown_{i}" for i in itertools.count()))
    declared = {x: x.shape for x in _inferable(model.graph) if x.shape is not None}
    for x in declared:
        x.shape = None
    types = {y: y.type for y in _inferable(model.graph) if y.producer() is not None}
    for y in types:
        y.type = None
    message = _infer_small(model)
    propagate = message is not None or shapes.check_expanded(model)
    if message is None:
        _infer(model, propagate)
    for y, kind in types.items():
        y.type = y.type or kind
    while shapes.ifs(model) and shapes.fold_integers(model):
        _infer(model, propagate)
        message = None
    kept = _keep_undetermined(model, declared, propagate)
    _name_sizes(model, declared, kept, message if not kept else None, propagate)
    _note_wrong(model, declared)
    return propagate


def _infer_small(model: ir.Model) -> onnx.ModelProto | None:
    """Infer with data propagation a model whose vectors and constants are small for sure.

    Returns: The message of the model; None, and no shapes, if `graphopt.graph.shapes.check_expanded` must look closely.
    """
    message = without_weights(model)
    try:
        plain = onnx.shape_inference.infer_shapes(message)
    except shapes.INFERENCE_ERRORS:
        return None
    known = {x: shape_of(found) for x, found in types_in(model.graph, plain.graph)}
    if not are_vectors_short(model.graph, known.get):
        return None
    _count_ranges(message)
    _infer(model, True, message)
    if are_surely_small(model):
        return message
    for x in _inferable(model.graph):
        x.shape = None
    return None


def _inferable(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values that ONNX may infer, also in bodies."""
    for node in graph:
        if onnx.defs.has(node.op_type, node.domain) and not _is_inferred_wrongly(node):
            yield from (y for y in node.outputs if y.name)
        for body in subgraphs(node):
            if node.op_type in ("Loop", "Scan"):
                yield from body.inputs[2 if node.op_type == "Loop" else 0 :]
            yield from _inferable(body)


def _is_inferred_wrongly(node: ir.Node | None) -> bool:
    """Return whether ONNX's inference ignores attributes of a node that decide its shape (onnx 1.23)."""
    if node is None or node.op_type not in ("ConvTranspose", "Resize"):
        return False
    if node.op_type == "ConvTranspose":
        return "output_shape" in node.attributes
    return node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch"


def _infer(model: ir.Model, propagate: bool, message: onnx.ModelProto | None = None) -> None:
    """Infer what can be inferred. Errors are left to `graphopt.graph.shapes.infer`, once the model is converted.

    Args:
        model: the model.
        propagate: whether inference propagates data.
        message: the model's message, by default a new one.
    """
    more = True
    while more:
        typed = _typed(message or _message(model, propagate), propagate)
        for value, found in types_in(model.graph, typed):
            if not _is_inferred_wrongly(value.producer()):
                shape = shape_of(found)
                value.type = value.type or type_of(found)
                value.shape = value.shape if shape is None else shape
        more, message = shapes.shape_states(model.graph), None


def _message(model: ir.Model, propagate: bool) -> onnx.ModelProto:
    """Return a message of a model for inference."""
    message = without_weights(model)
    if propagate:
        _count_ranges(message)
    return message


def _typed(message: onnx.ModelProto, propagate: bool) -> onnx.GraphProto:
    """Return the graph of a message with inferred types."""
    try:
        return onnx.shape_inference.infer_shapes(message, data_prop=propagate).graph
    except shapes.INFERENCE_ERRORS:
        return message.graph


def _dimensions(
    message: onnx.ModelProto, names: Collection[str]
) -> list[tuple[onnx.TensorShapeProto.Dimension, str]]:
    """Return the dimensions that have one of some names, with these."""
    graph = message.graph
    shaped = [x.type.tensor_type.shape for x in (*graph.input, *graph.value_info, *graph.output)]
    return [(dim, dim.dim_param) for shape in shaped for dim in shape.dim if dim.dim_param in names]


def _count_ranges(message: onnx.ModelProto) -> None:
    """Replace each Range(a, b, 1) of a message for inference by ConstantOfShape(b - a), whose size ONNX infers."""
    version = next((opset.version for opset in message.opset_import if opset.domain == ""), 1)
    for graph in _graphs(message.graph):
        if any(node.op_type == "Range" for node in graph.node):
            _count_by_shape(graph, version)


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Return the message of a graph, and those of its bodies."""
    bodies = [x.g for node in graph.node for x in node.attribute if x.type == onnx.AttributeProto.GRAPH]
    return [graph, *(inner for body in bodies for inner in _graphs(body))]


def _count_by_shape(graph: onnx.GraphProto, version: int) -> None:
    numbers = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    numbers |= {x.name: x for x in graph.initializer}

    def is_number(name: str, number: int) -> bool:
        tensor = numbers.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.INT64 or math.prod(tensor.dims) != 1:
            return False
        return int(onnx.numpy_helper.to_array(tensor).item()) == number

    counts = {x.output[0]: x for x in graph.node if x.op_type == "Range" and is_number(x.input[2], 1)}
    make, nodes = onnx.helper.make_node, []
    for node in graph.node:
        if counts.keys().isdisjoint(node.output):
            nodes.append(node)
            continue
        (start, limit, _), y = node.input, node.output[0]
        if not is_number(start, 0):
            nodes.append(make("Sub", [limit, start], [f"{y}/count"]))
            limit = f"{y}/count"
        axis: dict[str, Any]
        axis, axes = {"axes": [0]} if version < 13 else {}, [] if version < 13 else [f"{y}/axis"]
        nodes += [make("Constant", [], axes, value_ints=[0])] if axes else []
        nodes.append(make("Unsqueeze", [limit, *axes], [f"{y}/size"], **axis))
        nodes.append(onnx.helper.make_node("ConstantOfShape", [f"{y}/size"], [y], node.name, value=_WHOLE))
    if counts:
        copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
        del graph.node[:]
        graph.node.extend(copies)


def _keep_undetermined(model: ir.Model, declared: Declared, propagate: bool) -> set[ir.Value]:
    """Give the values of unknown rank their declared shapes: first those whose inputs have shapes.

    Returns: The values that keep their declared shapes.
    """
    kept: set[ir.Value] = set()
    for i in range(_ROUNDS):
        missing = [x for x in declared if x.shape is None]
        first = [x for x in missing if _inputs_have_shapes(x)] if i < _ROUNDS - 1 else missing
        for value in first or missing:
            value.shape = declared[value]
            kept.add(value)
        if missing:
            _infer(model, propagate)
    return kept


def _inputs_have_shapes(value: ir.Value) -> bool:
    node = value.producer()
    return node is None or all(x is None or x.shape is not None for x in node.inputs)


def _name_sizes(
    model: ir.Model,
    declared: Declared,
    kept: set[ir.Value],
    message: onnx.ModelProto | None,
    propagate: bool,
) -> None:
    """Replace names that inference made up by sizes of the inputs and by numbers, if these are equal to them."""
    dynamic = _symbols_of(model.graph.inputs)
    values = [*_inferable(model.graph)]
    made_up = _symbols_of(values) - dynamic
    if not made_up:
        return
    unkept = [x for x in values if x not in kept]
    message = message or _without_shapes(model, unkept, propagate)
    sizes = _resolved(model, message, _with_names(unkept, made_up), sorted(dynamic), propagate)
    if not dynamic:  # nothing is dynamic but what depends on data
        sizes |= _numbers_declared(model, declared, made_up - sizes.keys())
    sizes |= _names_of_outputs(model, declared, made_up - sizes.keys())
    for value in values:
        if value.shape is not None:
            value.shape = ir.Shape([sizes.get(_name(dim), dim) for dim in value.shape])


def _symbols_of(values: Iterable[ir.Value]) -> set[str]:
    return {name for x in values for dim in x.shape or () if (name := _name(dim))}


def _name(dim: Dim) -> str:
    return "" if isinstance(dim, int) or dim.value is None else dim.value


def _without_shapes(model: ir.Model, values: Sequence[ir.Value], propagate: bool) -> onnx.ModelProto:
    """Return a message of a model for inference in which some values have no shapes."""
    shapes_now = [x.shape for x in values]
    for x in values:
        x.shape = None
    message = _message(model, propagate)
    for x, shape in zip(values, shapes_now, strict=True):
        x.shape = shape
    return message


def _with_names(values: Sequence[ir.Value], names: Collection[str]) -> dict[ir.Value, list[str]]:
    """Return the values whose shapes have one of some names, with these, and the empty name for other dimensions."""
    found = {x: [name if (name := _name(dim)) in names else "" for dim in x.shape or ()] for x in values}
    return {x: own for x, own in found.items() if any(own) and not _is_inferred_wrongly(x.producer())}


def _resolved(
    model: ir.Model,
    message: onnx.ModelProto,
    names: dict[ir.Value, list[str]],
    symbols: Sequence[str],
    propagate: bool,
) -> dict[str, int | str]:
    """Return the sizes of inputs, or the numbers, that names stand for at all sizes that are tried."""
    inputs = _dimensions(message, symbols)
    distinct = [{name: start + 6 * i + i * i for i, name in enumerate(symbols)} for start in TRIED]
    meanings: dict[str, set[int | str]] = {}  # a number, or the names of inputs' dimensions of this size
    distinguished: Counter[str] = Counter()
    tried = [*distinct, *(dict.fromkeys(symbols, size) for size in _FEW)]
    for i, sizes in enumerate(tried if symbols else ()):
        if i == 2:  # a name without a meaning now gets none
            names = {x: own for x, own in names.items() if any(map(meanings.get, own))}
            for dim, name in inputs:
                dim.dim_param = name
            message = _part(message, {name_of(x) for x in names})
            inputs = _dimensions(message, symbols)
        if not names:
            break
        for dim, name in inputs:
            dim.dim_value = sizes[name]
        once: dict[str, int] = {}
        for value, sized in _known(model.graph, _typed(message, propagate)):
            for name, size in zip(names.get(value, ()), sized, strict=False):
                if name:
                    once.setdefault(name, size)
        for name, size in once.items():
            found: set[int | str] = {size, *(symbol for symbol, its in sizes.items() if its == size)}
            meanings[name] = meanings.get(name, found) & found
        distinguished.update(once.keys() if sizes in distinct else ())
    return {name: found.pop() for name, found in meanings.items() if distinguished[name] > 1 and found}


def _part(message: onnx.ModelProto, wanted: set[str]) -> onnx.ModelProto:
    """Return a message with the nodes alone that compute some values; the message itself if these are most nodes."""
    nodes = []
    for node in reversed(message.graph.node):
        if not wanted.isdisjoint(node.output):
            nodes.append(node)
            bodies = [x.g for x in node.attribute if x.type == onnx.AttributeProto.GRAPH]
            inner = (own for body in bodies for graph in _graphs(body) for own in graph.node)
            wanted.update(node.input, *(own.input for own in inner))
            wanted.update(y.name for body in bodies for graph in _graphs(body) for y in graph.output)
    if 2 * len(nodes) > len(message.graph.node):
        return message
    part = onnx.ModelProto()
    part.CopyFrom(message)
    del part.graph.node[:]
    part.graph.node.extend(reversed(nodes))
    return part


def _known(graph: ir.Graph, typed: onnx.GraphProto) -> Iterator[tuple[ir.Value, Sequence[int]]]:
    """Yield the values whose static shapes follow from static shapes alone, with these, from a graph's message.

    ONNX takes the number for the result of broadcasting a number and an unknown size, which may be larger.
    """
    declared = declared_in(typed)
    known = {x for x in graph.initializers.values() if is_static(x)}

    def known_of(x: ir.Value) -> Iterator[tuple[ir.Value, Sequence[int]]]:
        found = declared.get(x.name or "")
        sizes = None if found is None else sizes_of(found)
        if sizes is not None:
            known.add(x)
            yield x, sizes

    for x in graph.inputs:
        yield from known_of(x)
    for node in graph:
        if all(x is None or x in known or x.graph is not graph for x in node.inputs):
            for y in node.outputs:
                yield from known_of(y)
    for body, typed_body in bodies_in(graph, typed):
        yield from _known(body, typed_body)


def _numbers_declared(model: ir.Model, declared: Declared, names: set[str]) -> dict[str, int]:
    """Return the declared numbers for names made up.

    Inference makes up one name for all parts of a split sequence. If they have several sizes, each value gets its own,
    and what is computed from them is left to the next inference.
    """
    numbers: dict[str, set[int]] = {}
    for x, shape in declared.items():
        for dim, size in zip(x.shape or (), shape, strict=False):
            if _name(dim) in names and isinstance(size, int) and size > 0:
                numbers.setdefault(_name(dim), set()).add(size)
    several = {name for name, sizes in numbers.items() if len(sizes) > 1}
    for x in _inferable(model.graph):
        if x.shape is not None and any(_name(dim) in several for dim in x.shape):
            own = declared.get(x)
            x.shape = own if own is not None and len(own) == len(x.shape) else None
    return {name: sizes.pop() for name, sizes in numbers.items() if name not in several}


def _names_of_outputs(model: ir.Model, declared: Declared, names: set[str]) -> dict[str, str]:
    """Return the declared names of sizes of outputs for names made up, if nothing else has these names."""
    result: dict[str, str] = {}
    dynamic = _symbols_of(model.graph.inputs)
    for y in model.graph.outputs:
        for dim, own in zip(y.shape or (), declared.get(y, ()), strict=False):
            made, name = _name(dim), _name(own)
            if made in names and name and name not in dynamic and name not in result.values():
                result.setdefault(made, name)
    return result


def _note_wrong(model: ir.Model, declared: Declared) -> None:
    """Note the values whose declared shapes are wrong: not only less exact."""
    dynamic = _symbols_of(model.graph.inputs)

    def differ(a: Dim, b: Dim) -> bool:
        return a != b and all(isinstance(dim, int) or _name(dim) in dynamic for dim in (a, b))

    def is_wrong(x: ir.Value, shape: ir.Shape) -> bool:
        return x.shape is not None and (len(shape) != len(x.shape) or any(map(differ, shape, x.shape)))

    wrong = {x: shape for x, shape in declared.items() if is_wrong(x, shape)}
    if wrong:
        before = Misdeclared.read(model) or Misdeclared(0, "")
        first = next((x for x in model.graph.outputs if x in wrong), next(iter(wrong)))
        example = f"{first.name!r} as {wrong[first]} for {first.shape}"
        Misdeclared(before.count + len(wrong), before.example or example).write(model)

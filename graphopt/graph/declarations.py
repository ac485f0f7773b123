"""Replace the shapes that a file declares by inferred ones: exporters and builders declare wrong ones.

A declared shape stays only where inference finds none, as for outputs of custom operators. An inferred dimension
without a name gets the name of an input's dimension, or a number, if inference finds this size for several sizes of the
inputs.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph import shapes
from graphopt.graph.metadata import Misdeclared
from graphopt.graph.storage import without_weights
from graphopt.graph.traversal import all_nodes, subgraphs
from graphopt.graph.typed_messages import bodies_in, declared_in, shape_of, type_of, types_in
from graphopt.graph.values import is_static

Dim = int | ir.SymbolicDim
Declared = dict[ir.Value, ir.Shape]

_COUNT = "graphopt.count"  # the name of nodes that only inference has
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
    propagate = shapes.check_expanded(model)
    _infer(model, propagate)
    while shapes.ifs(model) and shapes.fold_integers(model):
        _infer(model, propagate)
    kept = _keep_undetermined(model, declared, propagate)
    _name_sizes(model, declared, kept, propagate)
    _note_wrong(model, declared)
    return propagate


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
    if node is None:
        return False
    if node.op_type == "ConvTranspose":
        return "output_shape" in node.attributes
    policy = node.attributes.get_string("keep_aspect_ratio_policy", "stretch")
    return node.op_type == "Resize" and policy != "stretch"


def _infer(model: ir.Model, propagate: bool) -> None:
    """Infer what can be inferred. Errors are left to `graphopt.graph.shapes.infer`, once the model is converted."""
    more = True
    while more:
        for value, found in types_in(model.graph, _Copy.of(model, propagate).typed()):
            if not _is_inferred_wrongly(value.producer()):
                shape = shape_of(found)
                value.type = value.type or type_of(found)
                value.shape = value.shape if shape is None else shape
        more = shapes.shape_states(model.graph)


@dataclass(frozen=True)
class _Copy:
    """A message of a model for inference.

    Args:
        proto: the message.
        propagate: whether inference propagates data.
        replaced: nodes of the model that the message has another form of, by the names of their outputs.
    """

    proto: onnx.ModelProto
    propagate: bool
    replaced: dict[str, onnx.NodeProto]

    @staticmethod
    def of(model: ir.Model, propagate: bool) -> _Copy:
        proto = without_weights(model)
        replaced: dict[str, onnx.NodeProto] = {}
        if propagate and any(node.op_type == "Range" for node in all_nodes(model.graph)):
            version = next((opset.version for opset in proto.opset_import if opset.domain == ""), 1)
            for graph in _graphs(proto.graph):
                replaced |= _count_by_shape(graph, version)
        return _Copy(proto, propagate, replaced)

    def dimensions(self, names: Collection[str]) -> list[tuple[onnx.TensorShapeProto.Dimension, str]]:
        """Return the dimensions that have one of some names, with these."""
        graph = self.proto.graph
        shaped = [x.type.tensor_type.shape for x in (*graph.input, *graph.value_info, *graph.output)]
        return [(dim, dim.dim_param) for shape in shaped for dim in shape.dim if dim.dim_param in names]

    def typed(self) -> onnx.GraphProto:
        """Return the graph with inferred types."""
        try:
            typed = onnx.shape_inference.infer_shapes(self.proto, data_prop=self.propagate)
        except shapes.INFERENCE_ERRORS:
            typed = onnx.ModelProto()
            typed.CopyFrom(self.proto)
        for graph in _graphs(typed.graph) if self.replaced else ():
            nodes = [node for node in graph.node if node.name != _COUNT]
            nodes = [self.replaced.get(node.output[0], node) if node.output else node for node in nodes]
            del graph.node[:]
            graph.node.extend(nodes)
        return typed.graph


def _graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    """Return the message of a graph, and those of its bodies."""
    bodies = [x.g for node in graph.node for x in node.attribute if x.type == onnx.AttributeProto.GRAPH]
    return [graph, *(inner for body in bodies for inner in _graphs(body))]


def _count_by_shape(graph: onnx.GraphProto, version: int) -> dict[str, onnx.NodeProto]:
    """Replace each Range(a, b, 1) of a copy for inference by ConstantOfShape(b - a), whose size ONNX infers.

    Returns: The nodes that were replaced, by the names of their outputs.
    """
    numbers = {node.output[0]: node.attribute[0].t for node in graph.node if node.op_type == "Constant"}
    numbers |= {x.name: x for x in graph.initializer}

    def is_number(name: str, number: int) -> bool:
        tensor = numbers.get(name)
        if tensor is None or tensor.data_type != onnx.TensorProto.INT64 or math.prod(tensor.dims) != 1:
            return False
        return int(onnx.numpy_helper.to_array(tensor).item()) == number

    counts = {x.output[0]: x for x in graph.node if x.op_type == "Range" and is_number(x.input[2], 1)}
    make, nodes = functools.partial(onnx.helper.make_node, name=_COUNT), []
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
    counts = {name: onnx.NodeProto.FromString(node.SerializeToString()) for name, node in counts.items()}
    if counts:
        del graph.node[:]
        graph.node.extend(nodes)
    return counts


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


def _name_sizes(model: ir.Model, declared: Declared, kept: set[ir.Value], propagate: bool) -> None:
    """Replace names that inference made up by sizes of the inputs and by numbers, if these are equal to them."""
    dynamic = _symbols_of(model.graph.inputs)
    values = [*_inferable(model.graph)]
    made_up = _symbols_of(values) - dynamic
    if not made_up:
        return
    sizes = _resolved(model, [x for x in values if x not in kept], sorted(dynamic), propagate)
    sizes = {name: size for name, size in sizes.items() if name in made_up}
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


def _resolved(
    model: ir.Model, values: Sequence[ir.Value], symbols: Sequence[str], propagate: bool
) -> dict[str, int | str]:
    """Return the sizes of inputs, or the numbers, that names stand for at all sizes that are tried."""
    shapes_now = {x: x.shape for x in values}
    for value in values:
        value.shape = None
    copy = _Copy.of(model, propagate)
    for value, shape in shapes_now.items():
        value.shape = shape
    names = {
        x: [*map(_name, shape)]
        for x, shape in shapes_now.items()
        if shape is not None and not shape.is_static()
    }
    names = {x: its for x, its in names.items() if not _is_inferred_wrongly(x.producer())}
    inputs = copy.dimensions(symbols)
    distinct = [{name: start + 6 * i + i * i for i, name in enumerate(symbols)} for start in TRIED]
    meanings: dict[str, set[int | str]] = {}  # a number, or the names of inputs' dimensions of this size
    distinguished: Counter[str] = Counter()
    for sizes in [*distinct, *(dict.fromkeys(symbols, size) for size in _FEW)] if symbols else ():
        for dim, name in inputs:
            dim.dim_value = sizes[name]
        once: dict[str, int] = {}
        for value, sized in _known(model.graph, copy.typed()):
            for name, size in zip(names.get(value, ()), sized, strict=False):
                if name:
                    once.setdefault(name, size)
        for name, size in once.items():
            found: set[int | str] = {size, *(symbol for symbol, its in sizes.items() if its == size)}
            meanings[name] = meanings.get(name, found) & found
        distinguished.update(once.keys() if sizes in distinct else ())
    return {name: found.pop() for name, found in meanings.items() if distinguished[name] > 1 and found}


def _known(graph: ir.Graph, typed: onnx.GraphProto) -> Iterator[tuple[ir.Value, Sequence[int]]]:
    """Yield the values whose static shapes follow from static shapes alone, with these, from a graph's message.

    ONNX takes the number for the result of broadcasting a number and an unknown size, which may be larger.
    """
    declared = declared_in(typed)
    known = {x for x in graph.initializers.values() if is_static(x)}

    def known_of(x: ir.Value) -> Iterator[tuple[ir.Value, Sequence[int]]]:
        found = declared.get(x.name or "")
        shape = None if found is None else shape_of(found)
        if shape is not None and shape.is_static():
            known.add(x)
            yield x, shape.numpy()

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

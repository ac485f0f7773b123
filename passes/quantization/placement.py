"""Say for each operator where QuantizeLinear and DequantizeLinear go, and which integer kernel it has.

The table was tried on ONNX Runtime 1.32. What it does not list computes in float between a DequantizeLinear and a
QuantizeLinear.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.operators import RECURRENT
from graphopt.graph.values import given, is_floating, name_of
from passes.weights.initializers import is_weight


@dataclass(frozen=True)
class Row:
    """Describe how an operator computes on integers.

    Args:
        kernel: the runtime's operator on integers; empty if there is none.
        weights: the inputs that may be weights in integers.
        channel: of a product, the axis of its weights that has one scale per output.
        rounds: whether the kernel needs a QuantizeLinear after it.
        keeps: whether the output has the scale of the first input.
        joins: whether it computes on integers only where its inputs, or its output, are integers anyway.
    """

    kernel: str = ""
    weights: tuple[int, ...] = ()
    channel: int | None = None
    rounds: bool = False
    keeps: bool = False
    joins: bool = False


ROWS: dict[str, Row] = {
    "Conv": Row("QLinearConv", (1,), channel=0, rounds=True),
    "ConvTranspose": Row("", (1,), channel=1),
    "Gemm": Row("QGemm", (1,), channel=-1),
    "MatMul": Row("QLinearMatMul", (1,), channel=-1),
    **dict.fromkeys(sorted(RECURRENT), Row("", (1, 2), channel=1)),
    "Gather": Row("Gather", (0,), keeps=True),
    **{
        op_type: Row(op_type, keeps=True)
        for op_type in (
            *("Flatten", "MaxPool", "Reshape", "Resize", "Slice", "Split", "Squeeze", "Transpose"),
            "Unsqueeze",
        )
    },
    "Add": Row("QLinearAdd", joins=True),
    "Concat": Row("QLinearConcat", joins=True),
    "GlobalAveragePool": Row("QLinearGlobalAveragePool", joins=True),
    "LeakyRelu": Row("QLinearLeakyRelu", joins=True),
    "Mul": Row("QLinearMul", joins=True),
    "Sigmoid": Row("QLinearSigmoid", joins=True),
    "Where": Row("QLinearWhere", joins=True),
}
_SORTS = ("Concat", "Slice", "Unsqueeze")  # gates of a recurrence, and stacks its directions
FUSED = ("Clip", "Relu")  # after a product, a sum or a join, before its QuantizeLinear


@dataclass(frozen=True)
class Product:
    """Hold a product of an activation and a weight, or a row of a table of embeddings.

    Args:
        node: the node.
        weight: the initializer.
        read: the value to round, which is the weight or its transpose.
        axis: the axis of `read` that has one scale per output; None for one scale.
        readers: of a table, the nodes that read rows of it or multiply by it, and what they read: it, or its transpose.
    """

    node: ir.Node
    weight: ir.Value
    read: ir.Value
    axis: int | None
    readers: tuple[tuple[ir.Node, ir.Value], ...] = ()

    @property
    def products(self) -> list[ir.Node]:
        """Return the nodes that multiply by the weight."""
        return [self.node] if self.axis is not None else [node for node, _ in self.readers if node.op_type != "Gather"]


def row_of(node: ir.Node) -> Row:
    """Return the row of a node; an operator without one computes in float."""
    row = ROWS.get(node.op_type, Row()) if node.domain == "" else Row()
    if node.op_type == "Resize" and node.attributes.get_string("mode", "nearest") != "nearest":
        return Row()
    return row


def products(graph: ir.Graph) -> Iterator[Product]:
    """Yield the products, and the tables of embeddings, with weights of floats that nothing else reads.

    A table may also be the weight of products, as in a tied embedding.
    """
    for node in graph:
        for read in (given(node.inputs[index]) for index in row_of(node).weights if index < len(node.inputs)):
            if node.op_type in RECURRENT and read.producer() is not None:
                parts = [x for x in _parts(read) if is_weight(x) and len(x.shape or ()) == 2]
                yield from (Product(node, x, x, 0) for x in parts if _is_of_recurrences(x))
                continue
            weight: ir.Value | None = read
            while weight is not None and (before := weight.producer()) is not None:
                weight = before.inputs[0] if _is_view(before) and len(weight.uses()) == 1 else None
            if weight is None or read.shape is None or not is_weight(weight):
                continue
            if node.op_type in ("Gather", "MatMul") and len(read.shape) != 2:
                continue  # the runtime has no kernel for a scale for each output of several matrices
            if node.op_type == "Gather":
                readers = _readers_of_table(weight)
                if next((reader for reader, _ in readers if reader.op_type == "Gather"), None) is node:
                    yield Product(node, weight, weight, None, tuple(readers))
            elif len(weight.uses()) == 1 and not weight.is_graph_output():
                yield Product(node, weight, read, _channel(node, read.shape))


def _is_view(node: ir.Node) -> bool:
    return node.op_type in ("Identity", "Transpose") and node.domain == ""


def _readers_of_table(w: ir.Value) -> list[tuple[ir.Node, ir.Value]]:
    """Return the nodes that read rows of a matrix or multiply by it, and what they read; none if others read it."""
    views = [w, *(node.outputs[0] for node in w.consumers() if _is_view(node))]
    uses = [(use, x) for x in views for use in x.uses() if not (x is w and _is_view(use.node))]
    for use, _ in uses:
        is_matrix = use.node.op_type in ("Gather", "Gemm", "MatMul") and use.idx in row_of(use.node).weights
        if not is_matrix or (use.node.op_type == "Gather" and use.node.attributes.get_int("axis", 0) % 2):
            return []  # or it reads columns: no table
    return [] if any(x.is_graph_output() for x in views) else [(use.node, x) for use, x in uses]


def _parts(x: ir.Value) -> list[ir.Value]:
    """Return what the weight of a recurrence is made of: PyTorch's exporter sorts gates, and stacks directions."""
    reached = [x]
    for y in reached:
        node = y.producer()
        if node is not None and node.op_type in _SORTS:
            read = node.inputs if node.op_type == "Concat" else node.inputs[:1]
            reached += [z for z in dict.fromkeys(map(given, read)) if z not in reached]
    return [y for y in reached if y.producer() is None]


def _is_of_recurrences(x: ir.Value) -> bool:
    """Return whether a value is read as a part of the weights of recurrences alone."""
    reached = [x]
    for y in reached:
        uses = [use for use in y.uses() if use.node.op_type not in RECURRENT or use.idx not in row_of(use.node).weights]
        if y.is_graph_output() or not all(use.node.op_type in _SORTS for use in uses):
            return False
        reached += [z for use in uses for z in use.node.outputs if z not in reached]
    return True


def _channel(node: ir.Node, shape: ir.Shape) -> int | None:
    channel = row_of(node).channel
    if node.op_type == "Gemm" and node.attributes.get_int("transB", 0) != 0:
        return 0
    if node.op_type in RECURRENT and shape[0] != 1:
        return 0  # of two directions, each has a scale
    return None if channel is None else channel % len(shape)


def stopped(node: ir.Node) -> str:
    """Return what keeps a product from its integer kernel, or an empty text."""
    if not row_of(node).kernel:
        return f"the runtime has no integer kernel for {node.op_type}"
    if node.op_type == "Gemm":
        factors = [node.attributes.get_float(name, 1.0) for name in ("alpha", "beta")]
        if factors != [1.0, 1.0] or node.attributes.get_int("transA", 0) != 0:
            return "alpha, beta or transA is set"
    if node.op_type == "MatMul" and len(getattr(node.inputs[1], "shape", None) or ()) < 2:
        return "its weight is a vector"
    return ""


def kernels(graph: ir.Graph) -> Iterator[tuple[str, str, str]]:
    """Yield for each product of a graph that is rounded its weight, its operator, and its kernel or what stops it."""
    for node in graph:
        row = row_of(node)
        for w in (node.inputs[index] for index in row.weights if row.channel is not None):
            why, rounding = stopped(node), _rounding(w)
            if not why and rounding is None:
                why = "its second factor stays in floats: it is no weight of its own, or is left out"
            elif not why and rounding is not None and given(rounding.inputs[0]).dtype is ir.DataType.INT4:
                why = "the runtime has no integer kernel for weights of 4 bits"
            elif not why and _rounding(node.inputs[0]) is None:
                why = "its input stays in floats"
            elif not why and any(x is not None and _rounding(x) is None for x in node.inputs[2:]):
                why = "its bias stays in floats"
            elif not why and row.rounds and not _follows(end_of(node.outputs[0])):
                why = "its output stays in floats"
            name = name_of(node) if w is None else name_of(_origin(w))
            yield name, node.op_type, f"float: {why}" if why else row.kernel


def _origin(x: ir.Value) -> ir.Value:
    """Return the initializer that a value is made from, or the value."""
    origin = x
    while (node := origin.producer()) is not None and node.inputs and node.inputs[0] is not None:
        origin = node.inputs[0]
    return origin if origin.is_initializer() else x


def undropped(x: ir.Value) -> ir.Value:
    """Return what a Dropout drops elements of: in integers, it is the same."""
    node = x.producer()
    return x if node is None or node.op_type != "Dropout" or node.domain else undropped(given(node.inputs[0]))


def _rounding(x: ir.Value | None) -> ir.Node | None:
    """Return the DequantizeLinear that a value comes from, whose gradient may pass straight through a sum."""
    node = None if x is None else undropped(x).producer()
    if node is not None and node.op_type == "Add" and InferenceForm.is_on(node.outputs[0]):
        node = given(node.inputs[0]).producer()
    return node if node is not None and node.op_type == "DequantizeLinear" else None


def _follows(y: ir.Value) -> bool:
    """Return whether a QuantizeLinear alone reads a value."""
    readers = [*y.consumers()]
    return bool(readers) and all(node.op_type == "QuantizeLinear" for node in readers)


def end_of(y: ir.Value) -> ir.Value:
    """Return the value that a QuantizeLinear after a node rounds: the node's output, after a Relu or Clip."""
    users = list(y.uses())
    if len(users) == 1 and not y.is_graph_output():
        node, index = users[0]
        if node.op_type in FUSED and node.domain == "" and index == 0:
            return node.outputs[0]
    return y


def tensors(graph: ir.Graph, chosen: Iterable[ir.Node], *, others: bool) -> dict[ir.Value, ir.Value]:
    """Return the activations to round, in the order of the graph, each with the one whose range it has.

    Args:
        chosen: the products to compute on integers.
        others: whether products of two activations are computed on integers, too.
    """
    found: dict[ir.Value, ir.Value] = {}

    def add(x: ir.Value) -> ir.Value:
        """Add an activation, and return the one whose range it has."""
        views = []
        while x not in found:
            views.append(x)
            node = x.producer()
            source = node.inputs[0] if node is not None and row_of(node).keeps else None
            if source is None or not _is_activation(source):
                break
            x = source
        root = found.get(x, x)
        found.update(dict.fromkeys([x, *views], root))
        return root

    nodes, own = list(graph), set(chosen)
    for node in nodes:
        row = row_of(node)
        pair = [undropped(x) for x in node.inputs[:2] if x is not None]
        is_free = node.op_type == "MatMul" and len(pair) == 2 and all(map(_is_activation, pair)) and others
        if (node in own or is_free) and not stopped(node):
            for x in pair if is_free else pair[:1]:
                add(x)
            if row.rounds:
                add(end_of(node.outputs[0]))
    changed = True
    while changed:
        before = len(found)
        for node in nodes:
            read = [undropped(x) for x in node.inputs if x is not None and is_floating(x)]
            if row_of(node).joins and read and all(map(_is_activation, read)):
                end = end_of(node.outputs[0])
                if not end.is_graph_output() and (end in found or all(x in found for x in read)):
                    for x in [*read, end]:
                        add(x)
        changed = len(found) > before
    order = [*graph.inputs, *(y for node in nodes for y in node.outputs)]
    return {x: found[x] for x in order if x in found}


def _is_activation(x: ir.Value) -> bool:
    """Return whether a value is of float32 and no weight, nor the transpose of one."""
    if x.dtype is not ir.DataType.FLOAT or ir.convenience.get_const_tensor(x) is not None:
        return False
    node = x.producer()
    return _is_activation(given(node.inputs[0])) if node is not None and _is_view(node) else not x.is_initializer()

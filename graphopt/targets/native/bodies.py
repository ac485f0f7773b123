"""Find the bodies of scans, and move nodes into and out of them where kernels compute them better."""

from __future__ import annotations

from collections.abc import Sequence

import onnx_ir as ir

from graphopt.graph.operators import VIEWS
from graphopt.graph.traversal import subgraphs
from graphopt.targets.native.forms import Forms, sizes_of
from graphopt.targets.native.products import accepts_product
from graphopt.targets.scan import body_of, is_scan

BY_ROWS = "rows"  # a note on a body
_MOVES = {*VIEWS, "Split", "Concat"}


def bodies(graph: ir.Graph) -> list[ir.Graph]:
    """Return the bodies of scans within a graph, at any depth."""
    inner = [(node, body) for node in graph for body in subgraphs(node)]
    return [x for node, body in inner for x in [*[body] * is_scan(node), *bodies(body)]]


def states_of(scan: ir.Node) -> int:
    """Return the number of states of a Scan, which are its first inputs."""
    return len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()


def goes_along_first_axes(node: ir.Node) -> bool:
    """Return whether a node is a Scan whose sequences, read and written, are all along the first axis."""
    axes = [node.attributes.get(f"scan_{kind}_axes") for kind in ("input", "output")]
    return is_scan(node) and not any(any(each.as_ints()) for each in axes if each is not None)


def move_constants_out(scan: ir.Node) -> None:
    """Move constants out of the body of a Scan."""
    body, outside = body_of(scan), scan.graph
    assert outside is not None
    for node in list(body):
        is_constant = node.domain == "" and node.op_type in ("Constant", "ConstantOfShape")
        if is_constant and not any(x is not None and x.graph is body for x in node.inputs):
            body.remove(node)
            node.outputs[0].name = f"{scan.outputs[0].name}/{node.outputs[0].name}"
            outside.insert_before(scan, node)


def note_rows(body: ir.Graph, forms: Forms) -> None:
    """Note on a body, before it is lowered, whether threads may share the rows that a symbol counts.

    They may if the symbol is the first axis of all that the body computes, and occurs nowhere else; if what it reads
    from outside lacks the symbol, and is the second operand of products; and if no reduction is along the first axis.
    """
    symbol = next((size for x in body.inputs[:1] for size in (x.shape or ())[:1]), 0)
    is_symbol = not isinstance(symbol, int)
    body.meta[BY_ROWS] = is_symbol and all(_keeps_rows(node, body, str(symbol), forms) for node in body)


def _keeps_rows(node: ir.Node, body: ir.Graph, symbol: str, forms: Forms) -> bool:
    if node.domain == "" and node.op_type == "Constant":
        return True
    form, moves = forms.of(node), node.op_type in _MOVES
    inputs = node.inputs[:1] if moves and node.op_type != "Concat" else node.inputs
    inside = [x is not None and x.graph is body and not _is_constant(x) for x in inputs]
    for x, is_inside in [*zip(inputs, inside, strict=True), *((y, True) for y in node.outputs)]:
        if x is None or x.shape is None:
            return False
        if [i for i, size in enumerate(sizes_of(x)) if size == symbol] != [0] * is_inside:
            return False
    if form is not None:
        return 0 not in form.reduced
    return moves or (accepts_product(node, forms) and inside[:2] == [True, False])


def _is_constant(x: ir.Value) -> bool:
    node = x.producer()
    return x.is_initializer() or (node is not None and node.op_type == "Constant")


def move_into_bodies(graph: ir.Graph, forms: Forms) -> None:
    """Move elementwise nodes that compute sequences into the bodies of the scans that read them.

    Only scans that kernels are likely to compute: there, an element of a sequence is still in a cache.
    """
    for node in list(graph):
        for inner in subgraphs(node):
            move_into_bodies(inner, forms)
        if goes_along_first_axes(node) and _has_kernels(body_of(node), forms):
            while any(_moved_in(node, x, forms) for x in node.inputs):
                pass


def _has_kernels(body: ir.Graph, forms: Forms) -> bool:
    moves = {*_MOVES, "Constant", "ConstantOfShape"}
    return all(node.op_type in moves or forms.of(node) or accepts_product(node, forms) for node in body)


def _moved_in(scan: ir.Node, x: ir.Value | None, forms: Forms) -> bool:
    """Move the node that computes a sequence into the body of a Scan that alone reads it; return whether it fits."""
    node = None if x is None else x.producer()
    graph = scan.graph
    if x is None or node is None or graph is None or node.graph is not graph or len(x.uses()) != 1:
        return False
    if x.is_graph_output() or not forms.is_map(node):
        return False
    if not all(y is None or sizes_of(y) in (sizes_of(x), []) for y in node.inputs):
        return False  # neither a sequence like x nor a number
    body, states = body_of(scan), states_of(scan)
    place = list(scan.inputs).index(x) - states
    if place < 0:
        return False
    directions = (forms.attributes_of(scan) or {}).get("scan_input_directions") or [0] * len(scan.inputs)
    sequences = list(zip(scan.inputs[states:], body.inputs[states:], directions, strict=False))
    _, element, direction = sequences.pop(place)
    graph.remove(node)
    body.inputs.remove(element)
    body.extend([node])
    for i, operand in enumerate(node.inputs):
        if operand is None or not sizes_of(operand):
            continue
        inside = next((y for z, y, way in sequences if z is operand and way == direction), None)
        if inside is None:
            inside = ir.Value(name=f"{x.name}/{operand.name}", shape=element.shape, type=operand.type)
            sequences.append((operand, inside, direction))
            body.inputs.append(inside)
        node.replace_input_with(i, inside)
    _read(scan, states, [z for z, _, _ in sequences], [way for _, _, way in sequences])
    x.shape = element.shape
    forms.forget([node])
    ir.convenience.replace_all_uses_with(element, x, replace_graph_outputs=True)
    body.sort()
    return True


def _read(
    scan: ir.Node, states: int, sequences: Sequence[ir.Value | None], directions: Sequence[int]
) -> None:
    """Make a Scan read other sequences."""
    inputs = [*scan.inputs[:states], *sequences]
    for i in range(len(scan.inputs)):
        scan.replace_input_with(i, None)
    scan.resize_inputs(len(inputs))
    for i, x in enumerate(inputs):
        scan.replace_input_with(i, x)
    scan.attributes["num_scan_inputs"] = ir.AttrInt64("num_scan_inputs", len(sequences))
    scan.attributes["scan_input_axes"] = ir.AttrInt64s("scan_input_axes", [0] * len(sequences))
    scan.attributes["scan_input_directions"] = ir.AttrInt64s("scan_input_directions", directions)

"""Find the bodies of scans, and move nodes into and out of them where kernels compute them better."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.operators import VIEWS
from graphopt.graph.traversal import subgraphs
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.forms import form_of, sizes_of
from graphopt.targets.native.products import product_kernel

ROWS = "rows"  # a note on a body
KINDS = ("axes", "directions")


def is_scan(node: ir.Node) -> bool:
    """Return whether a node is a Scan whose body and attributes have an entry for each of its inputs and outputs."""
    if node.domain != "" or node.op_type != "Scan":
        return False
    body, read = body_of(node), node.attributes["num_scan_inputs"].as_int()
    written = len(node.outputs) - (len(node.inputs) - read)
    given = {
        f"scan_{kind}_{what}": many for kind, many in (("input", read), ("output", written)) for what in KINDS
    }
    return (
        1 <= read <= len(node.inputs) == len(body.inputs)
        and len(node.outputs) == len(body.outputs)
        and written >= 0
        and all(len(x.as_ints()) == given[name] for name, x in node.attributes.items() if name in given)
    )


def body_of(scan: ir.Node) -> ir.Graph:
    """Return the body of a Scan."""
    return scan.attributes["body"].as_graph()


def bodies(graph: ir.Graph) -> list[ir.Graph]:
    """Return the bodies of scans within a graph, at any depth."""
    found = []
    for node in graph:
        for inner in subgraphs(node):
            found += [inner] * is_scan(node) + bodies(inner)
    return found


def goes_along_first_axes(scan: ir.Node) -> bool:
    """Return whether all sequences of a Scan, read and written, are along the first axis."""
    axes = [scan.attributes.get(f"scan_{kind}_axes") for kind in ("input", "output")]
    return not any(any(each.as_ints()) for each in axes if each is not None)


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


def note_rows(body: ir.Graph, versions: Mapping[str, int]) -> None:
    """Note on a body, before it is lowered, whether threads may share the rows that a symbol counts.

    They may if the symbol is the first axis of all that the body computes, and occurs nowhere else; if what it reads
    besides lacks the symbol, and is the second operand of products; and if no reduction is along the first axis.
    """
    sizes = {
        str(size.value) for x in body.inputs[:1] for size in (x.shape or ())[:1] if not isinstance(size, int)
    }
    body.meta[ROWS] = all(
        _keeps_rows(node, body, size, versions) for size in sizes for node in body
    ) and bool(sizes)


def _keeps_rows(node: ir.Node, body: ir.Graph, symbol: str, versions: Mapping[str, int]) -> bool:
    if node.domain == "" and node.op_type == "Constant":
        return True
    form, moves = form_of(node, versions), node.op_type in {*VIEWS, "Split", "Concat"}
    inputs = node.inputs[:1] if moves and node.op_type != "Concat" else node.inputs
    inside = [x is not None and x.graph is body and not _is_constant(x) for x in inputs]
    for x, is_inside in [*zip(inputs, inside, strict=True), *((y, True) for y in node.outputs)]:
        if x is None or x.shape is None:
            return False
        places = [i for i, size in enumerate(sizes_of(x)) if size == symbol]
        if places != [0] * is_inside:
            return False
    if form is not None:
        return 0 not in form.reduced
    return moves or (product_kernel(node, versions) is not None and inside[:2] == [True, False])


def _is_constant(x: ir.Value) -> bool:
    node = x.producer()
    return x.is_initializer() or (node is not None and node.op_type == "Constant")


def move_into_bodies(graph: ir.Graph, versions: Mapping[str, int]) -> None:
    """Move elementwise nodes that compute sequences into the bodies of the scans that read them.

    Only scans that kernels are likely to compute: there, an element of a sequence is still in a cache.
    """
    for node in list(graph):
        for inner in subgraphs(node):
            move_into_bodies(inner, versions)
        if is_scan(node) and goes_along_first_axes(node) and _has_kernels(body_of(node), versions):
            while any(_moved_in(node, x, versions) for x in node.inputs):
                pass


def _has_kernels(body: ir.Graph, versions: Mapping[str, int]) -> bool:
    moves = {*VIEWS, "Split", "Concat", "Constant", "ConstantOfShape"}
    return all(
        node.op_type in moves or form_of(node, versions) or product_kernel(node, versions) for node in body
    )


def _moved_in(scan: ir.Node, x: ir.Value | None, versions: Mapping[str, int]) -> bool:
    """Move the node that computes a sequence into the body of a Scan that alone reads it; return whether it fits."""
    node = None if x is None else x.producer()
    graph = scan.graph
    if x is None or node is None or graph is None or node.graph is not graph or len(x.uses()) != 1:
        return False
    if x.is_graph_output():
        return False
    form = form_of(node, versions)
    if form is None or form.kind != "map" or not all(y is None or _is_along(y, x) for y in node.inputs):
        return False
    body, states = body_of(scan), len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()
    place = list(scan.inputs).index(x) - states
    if place < 0:
        return False
    directions = (attributes_of(scan, versions) or {}).get("scan_input_directions") or [0] * len(scan.inputs)
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
    ir.convenience.replace_all_uses_with(element, x, replace_graph_outputs=True)
    body.sort()
    return True


def _is_along(operand: ir.Value, x: ir.Value) -> bool:
    """Return whether an operand is a sequence like the result, or one number."""
    return sizes_of(operand) in (sizes_of(x), [])


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

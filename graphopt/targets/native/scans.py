"""Lower scans: move nodes into and out of their bodies, and call the bodies' kernels for each element of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.operators import LITERALS, VIEWS
from graphopt.graph.sizes import sizes_of
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import constant_of, dtype_of
from graphopt.targets.native.forms import NodeForms, rank_of
from graphopt.targets.native.library import Item, Kernel, Replacement, braced
from graphopt.targets.native.operators import STORED_TYPES
from graphopt.targets.native.products import accepts_product
from graphopt.targets.scan import ScanParts, ScanRows, is_scan

BY_ROWS = "rows"  # a note on a body
_MOVES = {*VIEWS, "Split", "Concat"}
_MOST_TENSORS, _MOST_AXES = 2**12, 2**6  # which a task holds on its stack


def bodies(graph: ir.Graph) -> list[ir.Graph]:
    """Return the bodies of scans within a graph, at any depth."""
    inner = [(node, body) for node in graph for body in subgraphs(node)]
    return [x for node, body in inner for x in [*[body] * is_scan(node), *bodies(body)]]


def _accepted(node: ir.Node, forms: NodeForms) -> ScanParts | None:
    """Return the parts of a Scan with all its inputs, whose sequences are all along the first axis; otherwise None."""
    if not is_scan(node) or forms.versions.get("", 1) < 9 or None in node.inputs:
        return None
    scan = ScanParts(node)
    return None if any(rows.axis for rows in (*scan.inputs, *scan.outputs)) else scan


def _move_constants_out(scan: ScanParts) -> None:
    for node in list(scan.body):
        is_constant = node.domain == "" and node.op_type in LITERALS
        if is_constant and not any(x is not None and x.graph is scan.body for x in node.inputs):
            scan.body.remove(node)
            node.outputs[0].name = f"{scan.node.outputs[0].name}/{node.outputs[0].name}"
            scan.node.prepend(node)


def note_rows(body: ir.Graph, forms: NodeForms) -> None:
    """Note on a body, before it is lowered, whether threads may share the rows that a symbol counts.

    They may if the symbol is the first axis of all that the body computes, and occurs nowhere else; if what it reads
    from outside lacks the symbol, and is the second operand of products; and if no reduction is along the first axis.
    """
    symbol = next((size for x in body.inputs[:1] for size in (x.shape or ())[:1]), 0)
    is_symbol = not isinstance(symbol, int)
    body.meta[BY_ROWS] = is_symbol and all(_keeps_rows(node, body, str(symbol), forms) for node in body)


def _keeps_rows(node: ir.Node, body: ir.Graph, symbol: str, forms: NodeForms) -> bool:
    if node.domain == "" and node.op_type == "Constant":
        return True
    form, moves = forms.of(node), node.op_type in _MOVES
    inputs = node.inputs[:1] if moves and node.op_type != "Concat" else node.inputs
    inside = [x is not None and x.graph is body and constant_of(x) is None for x in inputs]
    for x, is_inside in [*zip(inputs, inside, strict=True), *((y, True) for y in node.outputs)]:
        if x is None or x.shape is None:
            return False
        if [i for i, size in enumerate(sizes_of(x)) if size == symbol] != [0] * is_inside:
            return False
    if form is not None:
        return 0 not in form.reduced
    return moves or (accepts_product(node, forms) and inside[:2] == [True, False])


def move_into_bodies(graph: ir.Graph, forms: NodeForms) -> None:
    """Move elementwise nodes that compute sequences into the bodies of the scans that read them.

    Only scans that kernels are likely to compute: there, an element of a sequence is still in a cache.
    """
    for node in list(graph):
        for inner in subgraphs(node):
            move_into_bodies(inner, forms)
        scan = _accepted(node, forms)
        if scan is not None and _has_kernels(scan.body, forms):
            while any(_moved_in(scan, rows, forms) for rows in scan.inputs):
                pass


def _has_kernels(body: ir.Graph, forms: NodeForms) -> bool:
    moves = _MOVES | LITERALS
    return all(node.op_type in moves or forms.of(node) or accepts_product(node, forms) for node in body)


def _moved_in(scan: ScanParts, rows: ScanRows, forms: NodeForms) -> bool:
    """Move the node that computes a sequence into the Scan that is its only reader; return whether it fits."""
    x, element, graph = rows.sequence, rows.row, scan.node.graph
    node = x.producer()
    if node is None or graph is None or node.graph is not graph or len(x.uses()) != 1:
        return False
    if x.is_graph_output() or not forms.is_map(node):
        return False
    if not all(y is None or sizes_of(y) in (sizes_of(x), []) for y in node.inputs):
        return False  # neither a sequence like x nor a number
    graph.remove(node)
    scan.inputs.remove(rows)
    scan.body.extend([node])
    for i, operand in enumerate(node.inputs):
        if operand is None or not sizes_of(operand):
            continue
        alike = (other for other in scan.inputs if other.sequence is operand)
        inside = next((other.row for other in alike if other.direction == rows.direction), None)
        if inside is None:
            inside = ir.Value(name=f"{x.name}/{operand.name}", shape=element.shape, type=operand.type)
            scan.inputs.append(ScanRows(inside, operand, 0, rows.direction))
        node.replace_input_with(i, inside)
    scan.read_inputs()
    x.shape = element.shape
    forms.forget(node)
    ir.convenience.replace_all_uses_with(element, x, replace_graph_outputs=True)
    scan.body.sort()
    return True


@dataclass(frozen=True)
class _Step:
    """Describe what a node of a body does."""

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    function: str = "NULL"  # of a kernel in C; NULL for a node that joins, splits or reshapes tensors
    axis: int = 0


def scan_kernel(node: ir.Node, forms: NodeForms, calls: Mapping[ir.Node, Kernel]) -> Replacement | None:
    """Return the kernel of a Scan along first axes whose body has only kernels and moves; None for any other node.

    Args:
        calls: the nodes that call kernels of the plan, the only ones that are taken for kernels.
    """
    scan = _accepted(node, forms)
    if scan is None:
        return None
    _move_constants_out(scan)
    steps = _steps(scan.body, forms, calls)
    if steps is None:
        return None
    computed = [y for step in steps for y in step.outputs]
    inside = {*scan.body.inputs, *computed}
    read = [*(x for step in steps for x in step.inputs), *scan.body.outputs]
    outside = dict.fromkeys(x for x in read if x not in inside)
    inputs = [*(x for x in node.inputs if x is not None), *outside]
    tensors = [*inputs, *scan.body.inputs, *computed]
    dims = _dims(tensors, len(node.inputs), len(inputs), len(scan.states))
    if (
        dims is None
        or len(tensors) > _MOST_TENSORS
        or any(rank_of(x) > _MOST_AXES for x in tensors)
        or any(x.dtype not in STORED_TYPES for x in [*tensors, *node.outputs])
        or any(x.graph is scan.body for x in outside)  # initializers
    ):
        return None
    form, before = _form_of(scan, steps, tensors, len(inputs), dims)
    return Kernel.calling("scan", form, inputs, node.outputs, "scan.h", before), [node]


def _form_of(
    scan: ScanParts, steps: Sequence[_Step], tensors: Sequence[ir.Value], inputs: int, dims: Sequence[int]
) -> tuple[list[Item], str]:
    """Return the structure in scan.h of a Scan, and the declarations that it refers to."""
    places = {x: i for i, x in enumerate(tensors)}
    returned = [*((state.after, 0) for state in scan.states), *((y.row, y.direction) for y in scan.outputs)]
    writing = (step for step in steps if step.function != "NULL" or len([*step.inputs, *step.outputs]) > 2)
    results, homes = [], {y for step in writing for y in step.outputs}  # a change of shape writes nothing
    for y, backward in returned:
        results.append([places[y], int(y not in homes), backward])
        homes.discard(y)
    functions = dict.fromkeys(step.function for step in steps if step.function != "NULL")
    before = [f"OrtStatus *{name}(Context *);" for name in functions]
    rows: list[Item] = []
    for i, step in enumerate(steps):
        for kind, values in (("inputs", step.inputs), ("outputs", step.outputs)):
            before.append(f"static const int {kind}_@_{i}[] = {braced([places[x] for x in values])};")
        is_fixed = step.function != "NULL" and len(step.inputs) > 1 and places[step.inputs[1]] < inputs
        counts = [len(step.inputs), len(step.outputs), step.axis, int(is_fixed)]
        rows.append([step.function, *counts, f"inputs_@_{i}", f"outputs_@_{i}"])
    arrays: dict[str, Sequence[Item]] = {
        "unsigned char ranks": [rank_of(x) for x in tensors],
        "unsigned char sizes": [int(dtype_of(x).itemsize) for x in tensors],
        "int64_t dims": [*dims, 0],
        "unsigned char reversed": [x.direction for x in scan.inputs],
        "Step steps": rows,
        "Result results": results,
    }
    before += [f"static const {name}_@[] = {braced(items)};" for name, items in arrays.items()]
    counts = [inputs, len(scan.states), len(scan.inputs), len(tensors), len(steps), len(results)]
    names = [f"{name.split()[-1]}_@" for name in arrays]
    return [*counts, int(scan.body.meta.get(BY_ROWS, False)), *names], "\n".join([*before, "", ""])


def _steps(body: ir.Graph, forms: NodeForms, calls: Mapping[ir.Node, Kernel]) -> list[_Step] | None:
    """Return the steps of a body; None if a node is neither a kernel nor a move."""
    body.sort()
    steps = []
    for node in body:
        inputs = [x for x in node.inputs if x is not None]
        if (kernel := calls.get(node)) is not None:
            steps.append(_Step(inputs, node.outputs, f"compute_{kernel.name}"))
        elif node.domain == "" and node.op_type in VIEWS:
            steps.append(_Step(inputs[:1], node.outputs))
        elif node.domain == "" and node.op_type in ("Split", "Concat"):
            parts = inputs[:1] if node.op_type == "Split" else inputs
            axis = (forms.attributes_of(node) or {}).get("axis", 0)
            if rank_of(parts[0]) < 1:
                return None
            steps.append(_Step(parts, node.outputs, axis=axis % rank_of(parts[0])))
        else:
            return None
    return steps


def _dims(tensors: Sequence[ir.Value], own: int, inputs: int, states: int) -> list[int] | None:
    """Return all dimensions, those that symbols name as -1 minus the place of one of that name; None if one is unknown.

    The first `own` tensors are states and sequences.
    """
    dims: list[int] = []
    symbols: dict[str, int] = {}
    starts: list[int] = []
    for i, x in enumerate(tensors):
        if x.shape is None:
            return None
        starts.append(len(dims))
        if i < inputs:  # known when it is read
            dims += [0] * len(x.shape)
        elif i < inputs + own:
            source = i - inputs
            outer = starts[source] + (source >= states)
            if rank_of(tensors[source]) != len(x.shape) + (source >= states):
                return None
            dims += [-1 - outer - axis for axis in range(len(x.shape))]
        else:
            for size in x.shape:
                if not isinstance(size, int) and size.value not in symbols:
                    return None
                dims.append(size if isinstance(size, int) else -1 - symbols[str(size.value)])
        for axis, size in enumerate(x.shape if own <= i < inputs + own else ()):
            if not isinstance(size, int) and size.value is not None:
                symbols.setdefault(str(size.value), starts[i] + axis)
    return dims

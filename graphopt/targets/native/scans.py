"""Lower scans: move nodes into and out of their bodies, and call the bodies' kernels for each element of sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.operators import VIEWS
from graphopt.graph.traversal import subgraphs
from graphopt.targets.native.forms import NodeForms, rank_of, sizes_of
from graphopt.targets.native.library import Kernel, Replacement, braced
from graphopt.targets.native.operators import STORED_TYPES
from graphopt.targets.native.products import accepts_product
from graphopt.targets.scan import body_of, is_scan

BY_ROWS = "rows"  # a note on a body
_MOVES = {*VIEWS, "Split", "Concat"}
_MOST_TENSORS, _MOST_AXES = 2**12, 2**6  # which a task holds on its stack


def bodies(graph: ir.Graph) -> list[ir.Graph]:
    """Return the bodies of scans within a graph, at any depth."""
    inner = [(node, body) for node in graph for body in subgraphs(node)]
    return [x for node, body in inner for x in [*[body] * is_scan(node), *bodies(body)]]


def _states_of(scan: ir.Node) -> int:
    """Return the number of states of a Scan, which are its first inputs."""
    return len(scan.inputs) - scan.attributes["num_scan_inputs"].as_int()


def _goes_along_first_axes(node: ir.Node) -> bool:
    """Return whether a node is a Scan whose sequences, read and written, are all along the first axis."""
    axes = [node.attributes.get(f"scan_{kind}_axes") for kind in ("input", "output")]
    return is_scan(node) and not any(any(each.as_ints()) for each in axes if each is not None)


def _move_constants_out(scan: ir.Node) -> None:
    """Move constants out of the body of a Scan."""
    body, outside = body_of(scan), scan.graph
    assert outside is not None
    for node in list(body):
        is_constant = node.domain == "" and node.op_type in ("Constant", "ConstantOfShape")
        if is_constant and not any(x is not None and x.graph is body for x in node.inputs):
            body.remove(node)
            node.outputs[0].name = f"{scan.outputs[0].name}/{node.outputs[0].name}"
            outside.insert_before(scan, node)


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


def move_into_bodies(graph: ir.Graph, forms: NodeForms) -> None:
    """Move elementwise nodes that compute sequences into the bodies of the scans that read them.

    Only scans that kernels are likely to compute: there, an element of a sequence is still in a cache.
    """
    for node in list(graph):
        for inner in subgraphs(node):
            move_into_bodies(inner, forms)
        if _goes_along_first_axes(node) and _has_kernels(body_of(node), forms):
            while any(_moved_in(node, x, forms) for x in node.inputs):
                pass


def _has_kernels(body: ir.Graph, forms: NodeForms) -> bool:
    moves = {*_MOVES, "Constant", "ConstantOfShape"}
    return all(node.op_type in moves or forms.of(node) or accepts_product(node, forms) for node in body)


def _moved_in(scan: ir.Node, x: ir.Value | None, forms: NodeForms) -> bool:
    """Move the node that computes a sequence into the body of a Scan that alone reads it; return whether it fits."""
    node = None if x is None else x.producer()
    graph = scan.graph
    if x is None or node is None or graph is None or node.graph is not graph or len(x.uses()) != 1:
        return False
    if x.is_graph_output() or not forms.is_map(node):
        return False
    if not all(y is None or sizes_of(y) in (sizes_of(x), []) for y in node.inputs):
        return False  # neither a sequence like x nor a number
    body, states = body_of(scan), _states_of(scan)
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


@dataclass(frozen=True)
class _Step:
    """Describe what a node of a body does."""

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    function: str = "NULL"  # of a kernel in C; NULL for a node that joins, splits or reshapes tensors
    axis: int = 0

    @property
    def writes(self) -> bool:
        """Return whether the step writes elements: a change of shape does not."""
        return self.function != "NULL" or len(self.inputs) > 1 or len(self.outputs) > 1


@dataclass(frozen=True)
class _Scan:
    """A scan with what its body computes."""

    node: ir.Node
    steps: Sequence[_Step]
    inputs: Sequence[ir.Value]  # the scan's inputs, then what the body reads from outside
    tensors: Sequence[ir.Value]  # `inputs`, then the inputs of the body, then what it computes
    dims: Sequence[int]  # the dimensions of all tensors, as scan.h describes them


def scan_kernel(node: ir.Node, forms: NodeForms, calls: Mapping[ir.Node, Kernel]) -> Replacement | None:
    """Return the kernel of a Scan along first axes whose body has only kernels and moves; None for any other node.

    Args:
        calls: the nodes that call kernels of the plan, which alone are taken for kernels.
    """
    if not _accepts(node, forms):
        return None
    _move_constants_out(node)
    scan = _surroundings(node, forms, calls)
    return None if scan is None else (_kernel_of(scan, forms), [node])


def _accepts(node: ir.Node, forms: NodeForms) -> bool:
    """Return whether a node is a Scan along first axes, with all its inputs."""
    return (
        _goes_along_first_axes(node)
        and forms.versions.get("", 1) >= 9
        and forms.attributes_of(node) is not None
        and None not in node.inputs
    )


def _surroundings(node: ir.Node, forms: NodeForms, calls: Mapping[ir.Node, Kernel]) -> _Scan | None:
    """Return a Scan with the tensors that its body reads; None if scan.h does not compute it."""
    body = body_of(node)
    steps = _steps(body, forms, calls)
    if steps is None:
        return None
    own = [x for x in node.inputs if x is not None]
    computed = [y for step in steps for y in step.outputs]
    inside = {*body.inputs, *computed}
    read = [*(x for step in steps for x in step.inputs), *body.outputs]
    outside = dict.fromkeys(x for x in read if x not in inside)
    inputs = [*own, *outside]
    tensors = [*inputs, *body.inputs, *computed]
    dims = _dims(tensors, len(own), len(inputs), _states_of(node))
    if (
        dims is None
        or len(tensors) > _MOST_TENSORS
        or any(rank_of(x) > _MOST_AXES for x in tensors)
        or any(x.dtype not in STORED_TYPES for x in [*tensors, *node.outputs])
        or any(x.graph is body for x in outside)  # initializers
    ):
        return None
    return _Scan(node, steps, inputs, tensors, dims)


def _kernel_of(scan: _Scan, forms: NodeForms) -> Kernel:
    node, steps, tensors = scan.node, scan.steps, scan.tensors
    body, states, attributes = body_of(node), _states_of(node), forms.attributes_of(node) or {}
    places = {x: i for i, x in enumerate(tensors)}
    inside = set(tensors[len(scan.inputs) :])
    backwards = attributes.get("scan_output_directions") or [0] * (len(body.outputs) - states)
    results, homes = [], {y for step in steps if step.writes for y in step.outputs}
    for y, backward in zip(body.outputs, [*[0] * states, *backwards], strict=True):
        results.append([places[y], int(y not in homes), backward])
        homes.discard(y)
    sequences = len(node.inputs) - states
    functions = dict.fromkeys(step.function for step in steps if step.function != "NULL")
    before = [f"static OrtStatus *{name}(Context *);" for name in functions]
    rows = []
    for i, step in enumerate(steps):
        for kind, values in (("inputs", step.inputs), ("outputs", step.outputs)):
            before.append(f"static const int {kind}_@_{i}[] = {braced([places[x] for x in values])};")
        is_fixed = step.function != "NULL" and len(step.inputs) > 1 and step.inputs[1] not in inside
        counts = [len(step.inputs), len(step.outputs), step.axis, int(is_fixed)]
        rows.append([step.function, *counts, f"inputs_@_{i}", f"outputs_@_{i}"])
    arrays = {
        "unsigned char ranks": [rank_of(x) for x in tensors],
        "unsigned char sizes": [int(x.dtype.itemsize) for x in tensors if x.dtype is not None],
        "int64_t dims": [*scan.dims, 0],
        "unsigned char reversed": attributes.get("scan_input_directions") or [0] * sequences,
        "Step steps": rows,
        "Result results": results,
    }
    before += [f"static const {name}_@[] = {braced(items)};" for name, items in arrays.items()]
    counts = [len(scan.inputs), states, sequences, len(tensors), len(steps), len(results)]
    names = [f"{name.split()[-1]}_@" for name in arrays]
    form = [*counts, int(body.meta.get(BY_ROWS, False)), *names]
    return Kernel.calling("scan", form, scan.inputs, node.outputs, "scan.h", "\n".join([*before, "", ""]))


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

"""Lower scans: one kernel calls the kernels of the body for each element of the sequences."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.operators import VIEWS
from graphopt.targets.native.attributes import attributes_of
from graphopt.targets.native.bodies import ROWS, body_of, goes_along_first_axes, is_scan, move_constants_out
from graphopt.targets.native.kernels import Kernel
from graphopt.targets.native.operators import STORED
from graphopt.targets.native.products import braced, rank_of

MOST_TENSORS, MOST_AXES = 2**12, 2**6  # which a task holds on its stack


@dataclass(frozen=True)
class Step:
    """Describe what a node of a body does.

    Args:
        function: the C function of a kernel; NULL for a node that joins or splits tensors, or changes their shape.
    """

    inputs: Sequence[ir.Value]
    outputs: Sequence[ir.Value]
    function: str = "NULL"
    axis: int = 0


def scan_kernel(
    node: ir.Node, versions: Mapping[str, int], calls: Mapping[ir.Node, Kernel]
) -> tuple[Kernel, list[ir.Node]] | None:
    """Return the kernel of a Scan along first axes whose body has only kernels and moves; None for any other node.

    Args:
        calls: the nodes that call kernels of the plan, which alone are taken for kernels.
    """
    if not is_scan(node) or not goes_along_first_axes(node) or versions.get("", 1) < 9:
        return None
    attributes = attributes_of(node, versions)
    if attributes is None:
        return None
    body, sequences = body_of(node), attributes["num_scan_inputs"]
    move_constants_out(node)
    steps = _steps(body, versions, calls)
    given = [x for x in node.inputs if x is not None]
    if steps is None or sequences < 1 or len(given) < len(node.inputs):
        return None
    states = len(given) - sequences
    computed = [y for step in steps for y in step.outputs]
    inside = {*body.inputs, *computed}
    read = [x for step in steps for x in step.inputs]
    besides = dict.fromkeys(x for x in [*read, *body.outputs] if x not in inside)
    if any(x.graph is body for x in besides):
        return None  # initializers
    inputs = [*given, *besides]
    tensors = [*inputs, *body.inputs, *computed]
    dims = _dims(tensors, len(given), len(inputs), states)
    if dims is None or len(tensors) > MOST_TENSORS or any(rank_of(x) > MOST_AXES for x in tensors):
        return None
    if any(x.dtype not in STORED for x in [*tensors, *node.outputs]):
        return None
    places = {x: i for i, x in enumerate(tensors)}
    backwards = list(attributes.get("scan_output_directions") or [0] * (len(body.outputs) - states))
    results, homes = (
        [],
        {y for step in steps if step.function != "NULL" or _moves(step) for y in step.outputs},
    )
    for y, backward in zip(body.outputs, [0] * states + backwards, strict=True):
        results.append([places[y], int(y not in homes), backward])
        homes.discard(y)
    by_rows = int(body.meta.get(ROWS, False))
    lists = [[places[x] for x in values] for step in steps for values in (step.inputs, step.outputs)]
    code = "\n".join(
        [
            *dict.fromkeys(
                f"static OrtStatus *{x.function}(Context *);" for x in steps if x.function != "NULL"
            ),
            f"static const unsigned char types_@[] = {braced([_type(x) for x in [*inputs, *node.outputs]])};",
            *(f"static const int places_@_{i}[] = {braced(x)};" for i, x in enumerate(lists)),
            "static const Step steps_@[] = {",
            *(
                f"    {{{x.function}, {len(x.inputs)}, {len(x.outputs)}, {x.axis}, {int(_is_fixed(x, inside))}, "
                f"places_@_{2 * i}, places_@_{2 * i + 1}}},"
                for i, x in enumerate(steps)
            ),
            "};",
            f"static const Result results_@[] = {braced(results)};",
            f"static const unsigned char ranks_@[] = {braced([rank_of(x) for x in tensors])};",
            f"static const unsigned char sizes_@[] = {braced([_bytes(x) for x in tensors])};",
            f"static const int64_t dims_@[] = {braced([*dims, 0])};",
            "static const unsigned char reversed_@[] = "
            f"{braced(list(attributes.get('scan_input_directions') or [0] * sequences))};",
            "",
            "static OrtStatus *compute_@(Context *context) {",
            "    static const Scan form = {",
            f"        {len(inputs)}, {states}, {sequences}, {len(tensors)}, {len(steps)}, {len(results)}, {by_rows},",
            "        ranks_@, sizes_@, dims_@, reversed_@, steps_@, results_@,",
            "    };",
            "    return scan(context, &form);",
            "}",
            "",
        ]
    )
    name = "s" + hashlib.sha256(code.encode()).hexdigest()[:16]
    return Kernel(name, code.replace("@", name), tuple(inputs), tuple(node.outputs), "scan.h"), [node]


def _type(x: ir.Value) -> int:
    assert x.dtype is not None
    return x.dtype.value


def _bytes(x: ir.Value) -> int:
    assert x.dtype is not None
    return int(x.dtype.itemsize)


def _moves(step: Step) -> bool:
    """Return whether a step without a function writes elements."""
    return len(step.inputs) > 1 or len(step.outputs) > 1


def _is_fixed(step: Step, inside: Collection[ir.Value]) -> bool:
    """Return whether the second input of a kernel is the same in all iterations."""
    return step.function != "NULL" and len(step.inputs) > 1 and step.inputs[1] not in inside


def _steps(body: ir.Graph, versions: Mapping[str, int], calls: Mapping[ir.Node, Kernel]) -> list[Step] | None:
    """Return the steps of a body; None if a node is neither a kernel nor a move."""
    body.sort()
    steps = []
    for node in body:
        inputs = [x for x in node.inputs if x is not None]
        if (kernel := calls.get(node)) is not None:
            steps.append(Step(inputs, node.outputs, f"compute_{kernel.name}"))
        elif node.domain == "" and node.op_type in VIEWS:
            steps.append(Step(inputs[:1], node.outputs))
        elif node.domain == "" and node.op_type in ("Split", "Concat"):
            parts = inputs[:1] if node.op_type == "Split" else inputs
            axis = (attributes_of(node, versions) or {}).get("axis", 0)
            if rank_of(parts[0]) < 1:
                return None
            steps.append(Step(parts, node.outputs, axis=axis % rank_of(parts[0])))
        else:
            return None
    return steps


def _dims(tensors: Sequence[ir.Value], given: int, inputs: int, states: int) -> list[int] | None:
    """Return all dimensions, those that symbols name as -1 minus the place of one of that name; None if one is unknown.

    Args:
        given: the number of states and sequences, which are the first inputs.
    """
    if any(x.shape is None for x in tensors):
        return None
    starts = [0]
    for x in tensors:
        starts.append(starts[-1] + rank_of(x))
    found: list[int] = []
    symbols: dict[str, int] = {}
    for i, x in enumerate(tensors):
        assert x.shape is not None
        if i < inputs:  # known when it is read
            found += [0] * len(x.shape)
            if i >= given:
                _note(symbols, x, starts[i])
        elif i < inputs + given:
            of = i - inputs
            outer = starts[of] + (of >= states)
            if rank_of(tensors[of]) != len(x.shape) + (of >= states):
                return None
            found += [-1 - outer - axis for axis in range(len(x.shape))]
            _note(symbols, x, starts[i])
        else:
            for size in x.shape:
                if not isinstance(size, int) and size.value not in symbols:
                    return None
                found.append(size if isinstance(size, int) else -1 - symbols[str(size.value)])
    return found


def _note(symbols: dict[str, int], x: ir.Value, start: int) -> None:
    """Note where the symbols of a shape are found."""
    for axis, size in enumerate(x.shape or ()):
        if not isinstance(size, int) and size.value is not None:
            symbols.setdefault(str(size.value), start + axis)

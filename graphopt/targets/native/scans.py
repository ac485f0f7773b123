"""Lower scans: one kernel calls the kernels of the body for each element of the sequences."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.operators import VIEWS
from graphopt.targets.native.bodies import BY_ROWS, goes_along_first_axes, move_constants_out, states_of
from graphopt.targets.native.forms import Forms, rank_of
from graphopt.targets.native.library import Kernel, Replacement, braced
from graphopt.targets.native.operators import STORED
from graphopt.targets.scan import body_of

_MOST_TENSORS, _MOST_AXES = 2**12, 2**6  # which a task holds on its stack


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


def scan_kernel(node: ir.Node, forms: Forms, calls: Mapping[ir.Node, Kernel]) -> Replacement | None:
    """Return the kernel of a Scan along first axes whose body has only kernels and moves; None for any other node.

    Args:
        calls: the nodes that call kernels of the plan, which alone are taken for kernels.
    """
    if not _accepts(node, forms):
        return None
    move_constants_out(node)
    scan = _surroundings(node, forms, calls)
    return None if scan is None else (_kernel_of(scan, forms), [node])


def _accepts(node: ir.Node, forms: Forms) -> bool:
    """Return whether a node is a Scan along first axes, with all its inputs."""
    return (
        goes_along_first_axes(node)
        and forms.versions.get("", 1) >= 9
        and forms.attributes_of(node) is not None
        and None not in node.inputs
    )


def _surroundings(node: ir.Node, forms: Forms, calls: Mapping[ir.Node, Kernel]) -> _Scan | None:
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
    dims = _dims(tensors, len(own), len(inputs), states_of(node))
    if (
        dims is None
        or len(tensors) > _MOST_TENSORS
        or any(rank_of(x) > _MOST_AXES for x in tensors)
        or any(x.dtype not in STORED for x in [*tensors, *node.outputs])
        or any(x.graph is body for x in outside)  # initializers
    ):
        return None
    return _Scan(node, steps, inputs, tensors, dims)


def _kernel_of(scan: _Scan, forms: Forms) -> Kernel:
    node, steps, tensors = scan.node, scan.steps, scan.tensors
    body, states, attributes = body_of(node), states_of(node), forms.attributes_of(node) or {}
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


def _steps(body: ir.Graph, forms: Forms, calls: Mapping[ir.Node, Kernel]) -> list[_Step] | None:
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

"""Make kernels check that the new state is finite while they have it, and write it over the old one."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence

import onnx_ir as ir

from graphopt.graph.emitter import Emitter
from graphopt.graph.memory import base_of
from graphopt.graph.operators import VIEWS
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import owners
from graphopt.graph.values import is_floating, name_of, state_of
from graphopt.targets.native.forms import NodeForms
from graphopt.targets.native.library import Kernel
from graphopt.targets.native.reach import Reach

_CHECK = "ai.graphopt.check"


def add_state_check(model: ir.Model, forms: NodeForms) -> str | None:
    """Add an output that is 0 if the new state is finite, and NaN if it is not; return its name.

    Return None, and add nothing, unless elementwise operators compute all of the new state in float32: only then does
    the check cost no pass over memory.
    """
    slots = owners(model.graph)
    written: dict[tuple[str, str], list[ir.Value]] = {}  # by the parameter that they belong to, and by shape
    for y in with_role(model, Role.NEXT):
        if is_floating(y):
            state = state_of(y)
            written.setdefault((slots.get(state, state), str(y.shape)), []).append(y)
    values = [y for group in written.values() for y in group]
    if not written or not all(x.dtype == ir.DataType.FLOAT and forms.is_map(x.producer()) for x in values):
        return None
    with Emitter(model) as op:
        zeros = [
            op.ReduceSum(functools.reduce(op.Add, (op.Mul(x, 0.0) for x in group)), keepdims=0)
            for group in written.values()
        ]
        model.graph.outputs.append(op.Sum(*zeros, _outputs=[_CHECK]))
    return _CHECK


def write_in_place(model: ir.Model, calls: Mapping[ir.Node, Kernel]) -> tuple[list[str], list[Kernel]]:
    """Make kernels wait until all others have read the state that they replace.

    A session that gets one buffer for a state and its next value then writes the one over the other. Only kernels that
    replace element by element may do so.

    Args:
        calls: the nodes that call kernels.

    Returns:
        the names of the state that may share a buffer with its next value, and the other kernels that the graph calls.
    """
    inputs = {x.name: x for x in model.graph.inputs}
    reach = Reach(model.graph, model.graph)
    shared: list[str] = []
    waits: dict[ir.Node, dict[ir.Value, None]] = {}
    for y in with_role(model, Role.NEXT):
        x, node = inputs[state_of(y)], y.producer()
        kernel = calls.get(node) if node is not None else None
        readers = _readers(x, model.graph)
        if node is None or kernel is None or readers is None:
            continue
        pairs = [(i, node.outputs.index(y)) for i, v in enumerate(node.inputs) if v and base_of(v) is x]
        if len(pairs) > 1 or not all(pair in kernel.aligned for pair in pairs):
            continue
        others = [reader for reader in model.graph if reader in readers and reader is not node]
        if reach.leads(node, others):
            continue
        shared.append(name_of(x))
        waits.setdefault(node, {}).update(
            (reader.outputs[0], None) for reader in others if not reach.leads(reader, [node])
        )
        reach.connect(others, node)
    variants = [_waiting(node, calls[node], [*values]) for node, values in waits.items() if values]
    model.graph.sort()
    return shared, variants


def _readers(x: ir.Value, graph: ir.Graph) -> set[ir.Node] | None:
    """Return the nodes that read a value or a view of it; None if one is in a body or has no type to wait for."""
    readers: set[ir.Node] = set()
    for use in x.uses():
        node = use.node
        if node.graph is not graph or node.outputs[0].dtype is None:
            return None
        readers.add(node)
        if node.op_type in VIEWS and node.domain == "":  # it may share its input's memory
            further = _readers(node.outputs[0], graph)
            if further is None:
                return None
            readers |= further
    return None if x.is_graph_output() else readers


def _waiting(node: ir.Node, kernel: Kernel, waits: Sequence[ir.Value]) -> Kernel:
    """Make a node call its kernel with further inputs, which it does not read; return the kernel that it calls."""
    code = f"OrtStatus *compute_@(Context *context) {{ return compute_{kernel.name}(context); }}\n"
    inputs = [*kernel.inputs, *waits]
    variant = Kernel.named(f"{kernel.name}_", code, inputs, kernel.outputs, header="ort.h", aligned=kernel.aligned)
    node.op_type = variant.name
    node.resize_inputs(len(inputs))
    for i, x in enumerate(waits, start=len(kernel.inputs)):
        node.replace_input_with(i, x)
    return variant

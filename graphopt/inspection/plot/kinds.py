"""Colour values and nodes of a graph by their purpose."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.graph.names import state_of
from graphopt.graph.roles import Role, role_of
from graphopt.graph.state import owners
from graphopt.graph.traversal import ancestors, values_read


@dataclass(frozen=True)
class Kind:
    """Describe a kind of box: its name in the legend, and its colours."""

    name: str
    fill: str
    line: str
    is_node: bool = False


DATA = Kind("data", "#d0ebff", "#1971c2")
TARGET = Kind("target", "#d3f9d8", "#2f9e44")
PARAMETER = Kind("parameter", "#ffd8a8", "#e8590c")
STATE_BESIDE = Kind("other state", "#ffec99", "#e67700")
HYPERPARAMETER = Kind("hyperparameter", "#eebefa", "#9c36b5")
INITIALIZER = Kind("initializer", "#e9ecef", "#868e96")
LOSS = Kind("loss", "#ffa8a8", "#c92a2a")
OUTPUT = Kind("output", "#99e9f2", "#0c8599")
BODY = Kind("of a body", "#f8f9fa", "#868e96")
MODEL_NODE = Kind("model", "#ffffff", "#495057", is_node=True)
LOSS_NODE = Kind("loss", "#fff0f0", "#c92a2a", is_node=True)
GRADIENT_NODE = Kind("gradient", "#e5dbff", "#6741d9", is_node=True)
UPDATE_NODE = Kind("update", "#fff9db", "#e67700", is_node=True)
KINDS = (
    *(DATA, TARGET, PARAMETER, STATE_BESIDE, HYPERPARAMETER, INITIALIZER, LOSS, OUTPUT, BODY),
    *(MODEL_NODE, LOSS_NODE, GRADIENT_NODE, UPDATE_NODE),
)

_KIND_OF_ROLE = {
    Role.TARGET: TARGET,
    Role.SAMPLE_WEIGHT: TARGET,
    Role.PARAMETER: PARAMETER,
    Role.SLOT: STATE_BESIDE,
    Role.STATISTIC: STATE_BESIDE,
    Role.COUNTER: STATE_BESIDE,
    Role.HYPERPARAMETER: HYPERPARAMETER,
}
_UPDATING = (Role.SLOT, Role.STATISTIC, Role.COUNTER, Role.HYPERPARAMETER)


def kind_of_input(value: ir.Value) -> Kind:
    """Return the kind of a graph input."""
    role = role_of(value)
    if role is None:
        return INITIALIZER if value.is_initializer() else DATA
    return _KIND_OF_ROLE.get(role, DATA)


def kind_of_output(value: ir.Value, inputs: Mapping[str, ir.Value]) -> Kind:
    """Return the kind of a graph output; the next value of a state has the kind of that input."""
    if role_of(value) is Role.NEXT:
        return kind_of_input(inputs[state_of(value)])
    return LOSS if role_of(value) is Role.LOSS else OUTPUT


def kinds_of_nodes(graph: ir.Graph) -> dict[ir.Node, Kind]:
    """Classify nodes by whether they compute the model's outputs, the loss, gradients or updates.

    A node after the loss belongs to a gradient unless it depends on a hyperparameter, slot, statistic or counter.
    """
    of_model = ancestors(_outputs(graph, None, Role.PREDICTION, Role.SOURCE))
    of_loss = ancestors(_outputs(graph, Role.LOSS, Role.METRIC))
    updating = {value for value in graph.inputs if role_of(value) in _UPDATING}
    kinds = {}
    for node in graph:
        if node in of_model:
            kinds[node] = MODEL_NODE
        elif node in of_loss:
            kinds[node] = LOSS_NODE
        elif updating.isdisjoint(values_read(node)):
            kinds[node] = GRADIENT_NODE
        else:
            kinds[node] = UPDATE_NODE
            updating.update(node.outputs)
    order = {node: i for i, node in enumerate(graph)}
    for values in _next_by_owner(graph):
        updates = [node for node in ancestors(values) if kinds[node] is UPDATE_NODE]
        front = {before for node in updates for before in _gradients_before(node, kinds)}
        # An update may read several values that depend on the gradient: the gradient is where their paths join.
        while len(front) > 1:
            last = max(front, key=order.__getitem__)
            front = front - {last} | _gradients_before(last, kinds)
            kinds[last] = UPDATE_NODE
    return kinds


def _next_by_owner(graph: ir.Graph) -> Iterable[list[ir.Value]]:
    """Group the next values of each parameter with those of its slots; other state forms groups of one."""
    slots = owners(graph)
    by_owner: dict[str, list[ir.Value]] = {}
    for value in _outputs(graph, Role.NEXT):
        state = state_of(value)
        by_owner.setdefault(slots.get(state, state), []).append(value)
    return by_owner.values()


def _outputs(graph: ir.Graph, *roles: Role | None) -> list[ir.Value]:
    return [value for value in graph.outputs if role_of(value) in roles]


def _gradients_before(node: ir.Node, kinds: Mapping[ir.Node, Kind]) -> set[ir.Node]:
    return {before for before in node.predecessors() if kinds[before] is GRADIENT_NODE}

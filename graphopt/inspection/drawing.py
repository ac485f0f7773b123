"""Lay out a picture of graphs: boxes for values and nodes in the colours of their purposes, and edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum

import numpy as np
import onnx_ir as ir

from graphopt.graph.listing import inline, number_text, shown_attributes, type_text
from graphopt.graph.operators import input_name
from graphopt.graph.roles import Role, role_of
from graphopt.graph.state import owners
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import name_of, operator_of, state_of

_MOST = 4  # numbers: larger tensors are abbreviated
_FEW = 3  # numbers shown of an abbreviated tensor
_LONGEST = 36  # characters of a line


class BoxKind(Enum):
    """Name the kinds of boxes: title in the legend, colour, colour of the border, and whether the box is a node."""

    DATA = "data", "#d0ebff", "#1971c2"
    TARGET = "target", "#d3f9d8", "#2f9e44"
    PARAMETER = "parameter", "#ffd8a8", "#e8590c"
    OTHER_STATE = "other state", "#ffec99", "#e67700"
    HYPERPARAMETER = "hyperparameter", "#eebefa", "#9c36b5"
    INITIALIZER = "initializer", "#e9ecef", "#868e96"
    LOSS = "loss", "#ffa8a8", "#c92a2a"
    OUTPUT = "output", "#99e9f2", "#0c8599"
    BODY = "of a body", "#f8f9fa", "#868e96"
    MODEL_NODE = "model", "#ffffff", "#495057", True
    LOSS_NODE = "loss", "#fff0f0", "#c92a2a", True
    GRADIENT_NODE = "gradient", "#e5dbff", "#6741d9", True
    UPDATE_NODE = "update", "#fff9db", "#e67700", True

    def __init__(self, title: str, fill: str, line: str, is_node: bool = False) -> None:
        self.title, self.fill, self.line, self.is_node = title, fill, line, is_node


_KIND_OF_ROLE: dict[Role | None, BoxKind] = {
    **dict.fromkeys((Role.TARGET, Role.SAMPLE_WEIGHT), BoxKind.TARGET),
    **dict.fromkeys((Role.SLOT, Role.STATISTIC, Role.COUNTER), BoxKind.OTHER_STATE),
    **{Role.PARAMETER: BoxKind.PARAMETER, Role.HYPERPARAMETER: BoxKind.HYPERPARAMETER},
    Role.LOSS: BoxKind.LOSS,
}
_UPDATING = (Role.SLOT, Role.STATISTIC, Role.COUNTER, Role.HYPERPARAMETER)


def _kind_of_input(value: ir.Value) -> BoxKind:
    return _KIND_OF_ROLE.get(role_of(value), BoxKind.INITIALIZER if value.is_initializer() else BoxKind.DATA)


def _kind_of_output(value: ir.Value, inputs: Mapping[str, ir.Value]) -> BoxKind:
    """Return the kind of a graph output; the next value of a state has the kind of that input."""
    if role_of(value) is Role.NEXT:
        return _kind_of_input(inputs[state_of(value)])
    return _KIND_OF_ROLE.get(role_of(value), BoxKind.OUTPUT)


def kinds_of_nodes(graph: ir.Graph) -> dict[ir.Node, BoxKind]:
    """Classify nodes by whether they compute the model's outputs, the loss, gradients or updates.

    A node after the loss belongs to a gradient unless it depends on a hyperparameter, slot, statistic or counter.
    """
    of_model = ancestors(_outputs(graph, None, Role.PREDICTION, Role.SOURCE))
    of_loss = ancestors(_outputs(graph, Role.LOSS, Role.METRIC))
    updating = {value for value in graph.inputs if role_of(value) in _UPDATING}
    kinds = {}
    for node in graph:
        if node in of_model:
            kinds[node] = BoxKind.MODEL_NODE
        elif node in of_loss:
            kinds[node] = BoxKind.LOSS_NODE
        elif updating.isdisjoint(values_read(node)):
            kinds[node] = BoxKind.GRADIENT_NODE
        else:
            kinds[node] = BoxKind.UPDATE_NODE
            updating.update(node.outputs)
    order = {node: i for i, node in enumerate(graph)}
    for values in _next_by_owner(graph):
        updates = [node for node in ancestors(values) if kinds[node] is BoxKind.UPDATE_NODE]
        front = {before for node in updates for before in _gradients_before(node, kinds)}
        # An update may read several values that depend on the gradient: the gradient is where their paths join.
        while len(front) > 1:
            last = max(front, key=order.__getitem__)
            front = front - {last} | _gradients_before(last, kinds)
            kinds[last] = BoxKind.UPDATE_NODE
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


def _gradients_before(node: ir.Node, kinds: Mapping[ir.Node, BoxKind]) -> set[ir.Node]:
    return {before for before in node.predecessors() if kinds[before] is BoxKind.GRADIENT_NODE}


@dataclass(frozen=True)
class Box:
    """Describe a box for a value or a node: a title, and lines below it."""

    id: str
    kind: BoxKind
    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Edge:
    """Describe an edge from box `start` to box `end`; a `returned` edge leads from a body to its node."""

    start: str
    end: str
    label: str = ""
    returned: bool = False


@dataclass(frozen=True)
class Frame:
    """Describe a graph, or a body of a node: its boxes, and its inner frames."""

    id: str
    title: str
    boxes: list[Box] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)


class Drawing:
    """Lay out graphs side by side.

    Args:
        names: write the names of values on the edges between nodes.
        types: write the element types and shapes of values on the edges between nodes.
    """

    def __init__(self, *, names: bool = False, types: bool = False) -> None:
        self.frames: list[Frame] = []
        self.boxes: list[Box] = []  # of all frames
        self.edges: list[_Edge] = []
        self._names, self._types = names, types
        self._versions: Mapping[str, int] = {}
        self._starts: dict[ir.Value, Box] = {}

    def add(self, title: str, graph: ir.Graph) -> None:
        """Add a graph to the right of the previous ones."""
        self._versions = graph.opset_imports
        self.frames.append(self._frame(f"g{len(self.frames)}", title, graph, kinds_of_nodes(graph)))

    def kinds(self) -> list[BoxKind]:
        """Return the kinds of boxes in the drawing, for the legend."""
        present = {box.kind for box in self.boxes}
        return [kind for kind in BoxKind if kind in present]

    def _frame(
        self, id: str, title: str, graph: ir.Graph, kinds: Mapping[ir.Node, BoxKind], owner: Box | None = None
    ) -> Frame:
        frame = Frame(id, title)
        for value in graph.inputs:
            self._value(frame, BoxKind.BODY if owner else _kind_of_input(value), value)
        for value in graph.initializers.values():
            if not value.is_graph_input() and _inside(value) is None:
                self._value(frame, BoxKind.INITIALIZER, value)
        for node in graph:
            self._node(frame, node, kinds)
        inputs = {name_of(value): value for value in graph.inputs}
        for value in graph.outputs:
            kind = BoxKind.BODY if owner else _kind_of_output(value, inputs)
            box = self._box(frame, kind, name_of(value), [type_text(value)])
            self._edge(value, box)
            if owner is not None:
                self.edges.append(_Edge(box.id, owner.id, returned=True))
        return frame

    def _node(self, frame: Frame, node: ir.Node, kinds: Mapping[ir.Node, BoxKind]) -> None:
        if node.op_type == "Constant" and ir.convenience.get_const_tensor(node.outputs[0]) is not None:
            if _inside(node.outputs[0]) is None:
                self._value(frame, BoxKind.INITIALIZER, node.outputs[0])
            return
        box = self._box(frame, kinds[node], operator_of(node), self._details(node))
        for x in node.inputs:
            self._edge(x, box)
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                body = attribute.as_graph()
                inner = dict.fromkeys(body, kinds[node])
                frame.frames.append(self._frame(f"{box.id}_{name}", name, body, inner, box))
        self._starts.update(dict.fromkeys(node.outputs, box))

    def _details(self, node: ir.Node) -> Iterator[str]:
        """Return lines for small constants that a node reads, and for attributes that differ from their defaults."""
        version = self._versions.get(node.domain, 0)
        for i, x in enumerate(node.inputs):
            if x is not None and (text := _inside(x)) is not None:
                yield f"{input_name(node.domain, node.op_type, version, i)}={text}"
        for name, text in shown_attributes(node, self._versions):
            if node.op_type == "Cast" and name == "to":
                text = ir.DataType(int(text)).name.lower()
            if node.attributes[name].type != ir.AttributeType.GRAPH:
                yield f"{name}={text}"

    def _edge(self, value: ir.Value | None, end: Box) -> None:
        if value is None or value not in self._starts:
            return
        start, label = self._starts[value], ""
        if start.kind.is_node and end.kind.is_node:  # the value's own box would show the same
            types = self._types and value.type is not None
            label = " ".join([name_of(value)] * self._names + [type_text(value)] * types)
        self.edges.append(_Edge(start.id, end.id, _clipped(label)))

    def _box(self, frame: Frame, kind: BoxKind, title: str, lines: Iterable[str]) -> Box:
        box = Box(f"{frame.id}_{len(frame.boxes)}", kind, _clipped(title), tuple(map(_clipped, lines)))
        frame.boxes.append(box)
        self.boxes.append(box)
        return box

    def _value(self, frame: Frame, kind: BoxKind, value: ir.Value) -> None:
        tensor = ir.convenience.get_const_tensor(value)
        numbers = [] if tensor is None else [_numbers(tensor.numpy())]
        self._starts[value] = self._box(frame, kind, name_of(value), [type_text(value), *numbers])


def _numbers(array: np.ndarray) -> str:
    if array.size > _MOST:
        return f"{number_text(array.reshape(-1)[:_FEW], digits=3)[:-1]},...]"
    return number_text(array, digits=3 if array.ndim else 6)


def _inside(value: ir.Value) -> str | None:
    """Return the numbers of a constant shown inside the nodes that read it; None for weights, which have boxes."""
    weight = value.is_initializer() and value.shape and value.dtype and value.dtype.is_floating_point()
    return None if weight else inline(value)


def _clipped(text: str) -> str:
    """Shorten text to the length of a line in the middle, because long names differ at both ends."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= _LONGEST else f"{text[: _LONGEST // 2 - 1]}..{text[1 - _LONGEST // 2 :]}"

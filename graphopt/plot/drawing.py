"""What a picture of a graph shows: boxes for values and nodes, coloured by what they are for, and edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.emitter import captured
from graphopt.listing import inline, numbers, operator_of, shown_attributes, type_of
from graphopt.roles import Role, role_of
from graphopt.schemas import input_name

MOST = 4  # numbers shown of a tensor
LONGEST = 32  # characters of a line


@dataclass(frozen=True)
class Kind:
    """What a box is for: its name in the legend, and its colours."""

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


@dataclass(frozen=True)
class Box:
    """A value or a node: a title, and lines below it."""

    id: str
    kind: Kind
    title: str
    lines: tuple[str, ...] = ()


@dataclass(frozen=True)
class Edge:
    """A value's way from box `start` to box `end`; `returned` leads from a body to its node."""

    start: str
    end: str
    label: str = ""
    returned: bool = False


@dataclass(frozen=True)
class Frame:
    """A graph, or a body of a node: boxes, and frames inside."""

    id: str
    title: str
    boxes: list[Box] = field(default_factory=list)
    frames: list[Frame] = field(default_factory=list)

    def all_boxes(self) -> Iterator[Box]:
        """Return the boxes of this frame and of those inside."""
        yield from self.boxes
        for frame in self.frames:
            yield from frame.all_boxes()


class Drawing:
    """Graphs beside each other.

    Args:
        names: write the names of values on the edges between nodes.
        types: write the element types and shapes of values on the edges between nodes.
    """

    def __init__(self, *, names: bool = False, types: bool = False) -> None:
        self.frames: list[Frame] = []
        self.edges: list[Edge] = []
        self._names, self._types = names, types
        self._versions: Mapping[str, int] = {}
        self._boxes: dict[ir.Value, Box] = {}

    def add(self, title: str, graph: ir.Graph) -> None:
        """Draw a graph beside those that are there."""
        self._versions = graph.opset_imports
        self.frames.append(self._frame(f"g{len(self.frames)}", title, graph, _kinds_of_nodes(graph)))

    def boxes(self) -> list[Box]:
        """Return the boxes of all graphs."""
        return [box for frame in self.frames for box in frame.all_boxes()]

    def kinds(self) -> list[Kind]:
        """Return the kinds of boxes that there are: a legend."""
        found = {box.kind for box in self.boxes()}
        return [kind for kind in KINDS if kind in found]

    def _frame(
        self, id: str, title: str, graph: ir.Graph, kinds: Mapping[ir.Node, Kind], owner: Box | None = None
    ) -> Frame:
        frame = Frame(id, title)
        for value in graph.inputs:
            self._boxes[value] = _value(frame, BODY if owner else _kind_of_input(value), value)
        for value in graph.initializers.values():
            if not value.is_graph_input() and _inside(value) is None:
                self._boxes[value] = _value(frame, INITIALIZER, value)
        for node in graph:
            self._node(frame, node, kinds)
        kinds_of_next = {f"{value.name}.next": _kind_of_input(value) for value in graph.inputs}
        for value in graph.outputs:
            kind = LOSS if role_of(value) is Role.LOSS else kinds_of_next.get(str(value.name), OUTPUT)
            box = _box(frame, BODY if owner else kind, str(value.name), [type_of(value)])
            self._edge(value, box)
            if owner is not None:
                self.edges.append(Edge(box.id, owner.id, returned=True))
        return frame

    def _node(self, frame: Frame, node: ir.Node, kinds: Mapping[ir.Node, Kind]) -> None:
        if node.op_type == "Constant" and ir.convenience.get_const_tensor(node.outputs[0]) is not None:
            if _inside(node.outputs[0]) is None:
                self._boxes[node.outputs[0]] = _value(frame, INITIALIZER, node.outputs[0])
            return
        box = _box(frame, kinds[node], operator_of(node), self._details(node))
        for x in node.inputs:
            self._edge(x, box)
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                body, title = attribute.as_graph(), f"{name} of {node.op_type}"
                inner = dict.fromkeys(body, kinds[node])
                frame.frames.append(self._frame(f"{box.id}_{name}", title, body, inner, box))
        self._boxes.update(dict.fromkeys(node.outputs, box))

    def _details(self, node: ir.Node) -> Iterator[str]:
        """Say what small constants a node reads, and its attributes that differ from their defaults."""
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
        if value is None or value not in self._boxes:
            return
        start, label = self._boxes[value], ""
        if start.kind.is_node and end.kind.is_node:  # a box of the value itself says the same
            label = " ".join([str(value.name)] * self._names + [type_of(value)] * self._types)
        self.edges.append(Edge(start.id, end.id, _clipped(label)))


def _box(frame: Frame, kind: Kind, title: str, lines: Iterable[str]) -> Box:
    box = Box(f"{frame.id}_{len(frame.boxes)}", kind, _clipped(title), tuple(map(_clipped, lines)))
    frame.boxes.append(box)
    return box


def _value(frame: Frame, kind: Kind, value: ir.Value) -> Box:
    tensor = ir.convenience.get_const_tensor(value)
    numbers = [] if tensor is None else [_numbers(tensor.numpy())]
    return _box(frame, kind, str(value.name), [type_of(value), *numbers])


def _numbers(array: np.ndarray) -> str:
    shown = numbers(array.reshape(-1)[:MOST] if array.size > MOST else array, digits=3 if array.ndim else 6)
    return f"{shown[:-1]},...]" if array.size > MOST else shown


def _inside(value: ir.Value) -> str | None:
    """Return the numbers of a constant that stands in the nodes that read it: of no small weight, which has a name."""
    weight = value.is_initializer() and value.shape and value.dtype and value.dtype.is_floating_point()
    return None if weight else inline(value)


def _clipped(text: str) -> str:
    """Return text that fits in a line: long names differ at both ends."""
    text = "".join(c if c.isprintable() else "?" for c in text)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2 - 1]}..{text[1 - LONGEST // 2 :]}"


def _kind_of_input(value: ir.Value) -> Kind:
    role = role_of(value)
    if role is None:
        return INITIALIZER if value.is_initializer() else DATA
    return _KIND_OF_ROLE.get(role, DATA)


def _kinds_of_nodes(graph: ir.Graph) -> dict[ir.Node, Kind]:
    """Tell apart the nodes that the model's outputs need, the loss, the gradients and the updates.

    What is after the loss and depends on no hyperparameter, slot or counter, other than through the forward pass, is a
    gradient.
    """
    by_role: dict[Role | None, list[ir.Value]] = {}
    for value in graph.outputs:
        by_role.setdefault(role_of(value), []).append(value)
    of_model = _behind(
        graph, [x for role in (None, Role.PREDICTION, Role.SOURCE) for x in by_role.get(role, [])]
    )
    of_loss = _behind(graph, [x for role in (Role.LOSS, Role.METRIC) for x in by_role.get(role, [])])
    kinds = {}
    updating = {value for value in graph.inputs if role_of(value) in _UPDATING}
    for node in graph:
        if node in of_model:
            kinds[node] = MODEL_NODE
        elif node in of_loss:
            kinds[node] = LOSS_NODE
        elif updating.isdisjoint([*node.inputs, *captured(node)]):
            kinds[node] = GRADIENT_NODE
        else:
            kinds[node] = UPDATE_NODE
            updating.update(node.outputs)
    place = {node: i for i, node in enumerate(graph)}
    for value in by_role.get(Role.NEXT, []):
        behind = _behind(graph, [value])
        front = {
            x
            for node in behind
            if kinds[node] is UPDATE_NODE
            for x in node.predecessors()
            if kinds[x] is GRADIENT_NODE
        }
        while len(front) > 1:
            last = max(front, key=place.__getitem__)
            kinds[last] = UPDATE_NODE
            front = front - {last} | {x for x in last.predecessors() if kinds[x] is GRADIENT_NODE}
    return kinds


def _behind(graph: ir.Graph, values: Iterable[ir.Value]) -> set[ir.Node]:
    """Return the nodes that `values` are computed by."""
    wanted: set[ir.Value | None] = set(values)
    found = set()
    for node in reversed(graph):
        if not wanted.isdisjoint(node.outputs):
            found.add(node)
            wanted.update(node.inputs, captured(node))
    return found

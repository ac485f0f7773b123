"""Lay out a picture of graphs: boxes for values and nodes, and edges."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.graph.listing import inline, number_text, operator_of, shown_attributes, type_of
from graphopt.graph.schemas import input_name
from graphopt.graph.values import name_of
from graphopt.inspection.plot.kinds import (
    BODY,
    INITIALIZER,
    KINDS,
    BoxKind,
    kind_of_input,
    kind_of_output,
    kinds_of_nodes,
)

_MOST = 4  # numbers: larger tensors are abbreviated
_FEW = 3  # numbers shown of an abbreviated tensor
_LONGEST = 36  # characters of a line


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

    def all_boxes(self) -> Iterator[Box]:
        """Return the boxes of this frame and of its inner frames."""
        yield from self.boxes
        for frame in self.frames:
            yield from frame.all_boxes()


class Drawing:
    """Lay out graphs side by side.

    Args:
        names: write the names of values on the edges between nodes.
        types: write the element types and shapes of values on the edges between nodes.
    """

    def __init__(self, *, names: bool = False, types: bool = False) -> None:
        self.frames: list[Frame] = []
        self.edges: list[_Edge] = []
        self._names, self._types = names, types
        self._versions: Mapping[str, int] = {}
        self._boxes: dict[ir.Value, Box] = {}

    def add(self, title: str, graph: ir.Graph) -> None:
        """Add a graph to the right of the previous ones."""
        self._versions = graph.opset_imports
        self.frames.append(self._frame(f"g{len(self.frames)}", title, graph, kinds_of_nodes(graph)))

    def boxes(self) -> list[Box]:
        """Return the boxes of all graphs."""
        return [box for frame in self.frames for box in frame.all_boxes()]

    def kinds(self) -> list[BoxKind]:
        """Return the kinds of boxes in the drawing, for the legend."""
        present = {box.kind for box in self.boxes()}
        return [kind for kind in KINDS if kind in present]

    def _frame(
        self, id: str, title: str, graph: ir.Graph, kinds: Mapping[ir.Node, BoxKind], owner: Box | None = None
    ) -> Frame:
        frame = Frame(id, title)
        for value in graph.inputs:
            self._boxes[value] = _value(frame, BODY if owner else kind_of_input(value), value)
        for value in graph.initializers.values():
            if not value.is_graph_input() and _inside(value) is None:
                self._boxes[value] = _value(frame, INITIALIZER, value)
        for node in graph:
            self._node(frame, node, kinds)
        inputs = {name_of(value): value for value in graph.inputs}
        for value in graph.outputs:
            kind = BODY if owner else kind_of_output(value, inputs)
            box = _box(frame, kind, name_of(value), [type_of(value)])
            self._edge(value, box)
            if owner is not None:
                self.edges.append(_Edge(box.id, owner.id, returned=True))
        return frame

    def _node(self, frame: Frame, node: ir.Node, kinds: Mapping[ir.Node, BoxKind]) -> None:
        if node.op_type == "Constant" and ir.convenience.get_const_tensor(node.outputs[0]) is not None:
            if _inside(node.outputs[0]) is None:
                self._boxes[node.outputs[0]] = _value(frame, INITIALIZER, node.outputs[0])
            return
        box = _box(frame, kinds[node], operator_of(node), self._details(node))
        for x in node.inputs:
            self._edge(x, box)
        for name, attribute in node.attributes.items():
            if attribute.type == ir.AttributeType.GRAPH:
                body = attribute.as_graph()
                inner = dict.fromkeys(body, kinds[node])
                frame.frames.append(self._frame(f"{box.id}_{name}", name, body, inner, box))
        self._boxes.update(dict.fromkeys(node.outputs, box))

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
        if value is None or value not in self._boxes:
            return
        start, label = self._boxes[value], ""
        if start.kind.is_node and end.kind.is_node:  # the value's own box would show the same
            types = self._types and value.type is not None
            label = " ".join([name_of(value)] * self._names + [type_of(value)] * types)
        self.edges.append(_Edge(start.id, end.id, _clipped(label)))


def _box(frame: Frame, kind: BoxKind, title: str, lines: Iterable[str]) -> Box:
    box = Box(f"{frame.id}_{len(frame.boxes)}", kind, _clipped(title), tuple(map(_clipped, lines)))
    frame.boxes.append(box)
    return box


def _value(frame: Frame, kind: BoxKind, value: ir.Value) -> Box:
    tensor = ir.convenience.get_const_tensor(value)
    numbers = [] if tensor is None else [_numbers(tensor.numpy())]
    return _box(frame, kind, name_of(value), [type_of(value), *numbers])


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

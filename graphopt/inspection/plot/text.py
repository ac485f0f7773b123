"""Write drawings as text in Graphviz's DOT language or as Mermaid flowcharts."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from graphopt.inspection.plot.drawing import Box, Drawing, Frame
from graphopt.inspection.plot.kinds import BoxKind

_FONT = "Helvetica,Arial,sans-serif"
_HEAD = f"""\
digraph {{
graph [fontname="{_FONT}", fontsize=14, labelloc=t, nodesep=0.15, ranksep=0.3, pad=0.1]
node [fontname="{_FONT}", fontsize=11, shape=box, height=0.3, margin="0.1,0.04"]
edge [fontname="{_FONT}", fontsize=9, color="#868e96", fontcolor="#495057", arrowsize=0.6]"""

# Use faster layouts above these numbers of boxes: 300 boxes take 0.8 s, and the time grows with the cube.
_LAYOUT_LIMITS = (
    (300, "nslimit=2; nslimit1=2; mclimit=0.2"),
    (800, "nslimit=0.5; nslimit1=1; mclimit=0.1; splines=line"),
)


def to_dot(drawing: Drawing) -> str:
    """Return a drawing in Graphviz's DOT language (https://graphviz.org/doc/info/lang.html)."""
    return "\n".join(_dot(drawing)) + "\n"


def _dot(drawing: Drawing) -> Iterator[str]:
    yield _HEAD
    boxes = len(drawing.boxes())
    yield from (setting for most, setting in _LAYOUT_LIMITS if boxes > most)
    yield f"label=<{''.join(_legend(drawing.kinds()))}>"
    for frame in drawing.frames:
        yield from _cluster(frame, "peripheries=0")
    for edge in drawing.edges:
        label = f', label="{_escaped(edge.label)}"' if edge.label else ""
        yield f"{edge.start} -> {edge.end} [style={'dashed' if edge.returned else 'solid'}{label}]"
    yield "}"


def _cluster(frame: Frame, style: str) -> Iterator[str]:
    yield f"subgraph cluster_{frame.id} {{"
    yield f"label=<<b>{html.escape(frame.title)}</b>>; {style}" if frame.title else f'label=""; {style}'
    for box in frame.boxes:
        style_of_box = "filled" if box.kind.is_node else "filled,rounded"
        colours = f'fillcolor="{box.kind.fill}", color="{box.kind.line}"'
        yield f'{box.id} [label=<{_label(box)}>, style="{style_of_box}", {colours}]'
    for inner in frame.frames:
        yield from _cluster(
            inner, 'peripheries=1; style="rounded,dashed"; labeljust=l; fontsize=10; color="#868e96"'
        )
    yield "}"


def _label(box: Box) -> str:
    """Return a box's text as a table in Graphviz's HTML, in which, unlike in plain text, lines do not touch."""
    title = f"<b>{html.escape(box.title)}</b>"
    if not box.lines:
        return title
    lines = "<br/>".join(map(html.escape, box.lines))
    rows = f'<tr><td>{title}</td></tr><tr><td><font point-size="10">{lines}</font></td></tr>'
    return f'<table border="0" cellborder="0" cellspacing="0" cellpadding="1">{rows}</table>'


def _legend(kinds: list[BoxKind]) -> Iterator[str]:
    """Return a legend in Graphviz's HTML: a row for values and a row for nodes."""
    yield '<table border="0" cellspacing="3" cellpadding="3">'
    for is_node, title in ((False, "values"), (True, "nodes")):
        yield f'<tr><td align="left"><font point-size="10">{title}</font></td>'
        for kind in kinds:
            if kind.is_node is is_node:
                style = ' style="rounded"' if not is_node else ""
                yield f'<td border="1"{style} bgcolor="{kind.fill}" color="{kind.line}">'
                yield f'<font point-size="10">{kind.name}</font></td>'
        yield "</tr>"
    yield "</table>"


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace('"', '\\"')


def to_mermaid(drawing: Drawing) -> str:
    """Return a drawing as a Mermaid flowchart (https://mermaid.js.org/syntax/flowchart.html)."""
    return "\n".join(_mermaid(drawing)) + "\n"


def _mermaid(drawing: Drawing) -> Iterator[str]:
    kinds = {
        kind: f"{'node' if kind.is_node else 'value'}_{kind.name.replace(' ', '_')}"
        for kind in drawing.kinds()
    }
    yield "flowchart TB"
    legend = [Box(f"legend_{id}", kind, kind.name) for kind, id in kinds.items()]
    yield from _subgraph(Frame("legend", "legend", legend), kinds, "LR")
    for frame in reversed(drawing.frames):  # Mermaid draws them from right to left
        yield from _subgraph(frame, kinds)
    for edge in drawing.edges:
        label = f'|"{_entities(edge.label)}"|' if edge.label else ""
        yield f"{edge.start} {'-.->' if edge.returned else '-->'}{label} {edge.end}"
    for kind, id in kinds.items():
        yield f"classDef {id} fill:{kind.fill},stroke:{kind.line},color:#000"


def _subgraph(frame: Frame, kinds: Mapping[BoxKind, str], direction: str = "TB") -> Iterator[str]:
    yield f'subgraph {frame.id}["{_entities(frame.title) or " "}"]'
    yield f"direction {direction}"
    for box in frame.boxes:
        text = "<br/>".join([f"<b>{_entities(box.title)}</b>", *map(_entities, box.lines)])
        start, end = ("[", "]") if box.kind.is_node else ("(", ")")
        yield f'{box.id}{start}"{text}"{end}:::{kinds[box.kind]}'
    for inner in frame.frames:
        yield from _subgraph(inner, kinds)
    yield "end"
    yield f"style {frame.id} fill:none,stroke:#adb5bd"


def _entities(text: str) -> str:
    """Escape text for a quoted label with Mermaid's entities."""
    return "".join(f"#{ord(c)};" if c in '"<>&#`' else c for c in text)

"""Drawings as text: Graphviz's DOT language, and Mermaid."""

from __future__ import annotations

import html
from collections.abc import Iterator, Mapping

from graphopt.plot.drawing import Box, Drawing, Frame, Kind

_FONT = "Helvetica,Arial,sans-serif"
_HEAD = f"""\
digraph {{
graph [fontname="{_FONT}", fontsize=14, labelloc=t, nodesep=0.15, ranksep=0.3, pad=0.1]
node [fontname="{_FONT}", fontsize=11, shape=box, height=0.3, margin="0.1,0.05"]
edge [fontname="{_FONT}", fontsize=9, color="#868e96", fontcolor="#495057", arrowsize=0.6]"""


def dot(drawing: Drawing) -> str:
    """Return a drawing in Graphviz's DOT language, as https://graphviz.org/doc/info/lang.html has it."""
    return "\n".join(_dot(drawing)) + "\n"


def _dot(drawing: Drawing) -> Iterator[str]:
    yield _HEAD
    yield f"label=<{''.join(_table(drawing.kinds()))}>"
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
        lines = "".join(f'<br/><font point-size="9">{html.escape(line)}</font>' for line in box.lines)
        colours = f'fillcolor="{box.kind.fill}", color="{box.kind.line}"'
        yield f'{box.id} [label=<<b>{html.escape(box.title)}</b>{lines}>, style="{style_of_box}", {colours}]'
    for inner in frame.frames:
        yield from _cluster(inner, 'style="rounded,dashed"; fontsize=10; color="#868e96"')
    yield "}"


def _table(kinds: list[Kind]) -> Iterator[str]:
    """Return a legend in Graphviz's own HTML: a row for values, and one for nodes."""
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


def mermaid(drawing: Drawing) -> str:
    """Return a drawing as a Mermaid flowchart, as https://mermaid.js.org/syntax/flowchart.html has it."""
    return "\n".join(_mermaid(drawing)) + "\n"


def _mermaid(drawing: Drawing) -> Iterator[str]:
    kinds = {
        kind: f"{'node' if kind.is_node else 'value'}_{kind.name.replace(' ', '_')}"
        for kind in drawing.kinds()
    }
    yield "flowchart TB"
    for frame in drawing.frames:
        yield from _subgraph(frame, kinds)
    yield from _subgraph(
        Frame("legend", "legend", [Box(f"legend_{id}", kind, kind.name) for kind, id in kinds.items()]), kinds
    )
    for edge in drawing.edges:
        label = f'|"{_entities(edge.label)}"|' if edge.label else ""
        yield f"{edge.start} {'-.->' if edge.returned else '-->'}{label} {edge.end}"
    for kind, id in kinds.items():
        yield f"classDef {id} fill:{kind.fill},stroke:{kind.line},color:#000"


def _subgraph(frame: Frame, kinds: Mapping[Kind, str]) -> Iterator[str]:
    yield f'subgraph {frame.id}["{_entities(frame.title) or " "}"]'
    for box in frame.boxes:
        text = "<br/>".join([f"<b>{_entities(box.title)}</b>", *map(_entities, box.lines)])
        start, end = ("[", "]") if box.kind.is_node else ("(", ")")
        yield f'{box.id}{start}"{text}"{end}:::{kinds[box.kind]}'
    for inner in frame.frames:
        yield from _subgraph(inner, kinds)
    yield "end"


def _entities(text: str) -> str:
    """Return text for a quoted label, with Mermaid's own entities for what HTML and Mermaid would read otherwise."""
    return "".join(f"#{ord(c)};" if c in '"<>&#`' else c for c in text)

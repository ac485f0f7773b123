"""Draw graphs: `plot` with Graphviz (the extra `plot`), `dot` and `mermaid` as text without a package."""

from __future__ import annotations

import html
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from graphopt.arguments import checked
from graphopt.errors import GraphoptError
from graphopt.files import replacing
from graphopt.graph.loading import Source, load
from graphopt.inspection.drawing import Box, BoxKind, Drawing, Frame

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


def _dot(drawing: Drawing) -> Iterator[str]:
    """Return a drawing in Graphviz's DOT language (https://graphviz.org/doc/info/lang.html)."""
    yield _HEAD
    yield from (setting for most, setting in _LAYOUT_LIMITS if len(drawing.boxes) > most)
    yield f"label=<{''.join(_legend(drawing.kinds()))}>"
    for frame in drawing.frames:
        yield from _cluster(frame, "peripheries=0")
    for edge in drawing.edges:
        text = edge.label.replace("\\", "\\\\").replace('"', '\\"')
        label = f', label="{text}"' if text else ""
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
        yield from _cluster(inner, 'peripheries=1; style="rounded,dashed"; labeljust=l; fontsize=10; color="#868e96"')
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
                yield f'<font point-size="10">{kind.title}</font></td>'
        yield "</tr>"
    yield "</table>"


def _mermaid(drawing: Drawing) -> Iterator[str]:
    """Return a drawing as a Mermaid flowchart (https://mermaid.js.org/syntax/flowchart.html)."""
    yield "flowchart TB"
    legend = [Box(f"legend_{kind.name}", kind, kind.title) for kind in drawing.kinds()]
    yield from _subgraph(Frame("legend", "legend", legend), "LR")
    for frame in reversed(drawing.frames):  # Mermaid draws them from right to left
        yield from _subgraph(frame)
    for edge in drawing.edges:
        label = f'|"{_entities(edge.label)}"|' if edge.label else ""
        yield f"{edge.start} {'-.->' if edge.returned else '-->'}{label} {edge.end}"
    for kind in drawing.kinds():
        yield f"classDef {kind.name} fill:{kind.fill},stroke:{kind.line},color:#000"


def _subgraph(frame: Frame, direction: str = "TB") -> Iterator[str]:
    yield f'subgraph {frame.id}["{_entities(frame.title) or " "}"]'
    yield f"direction {direction}"
    for box in frame.boxes:
        text = "<br/>".join([f"<b>{_entities(box.title)}</b>", *map(_entities, box.lines)])
        start, end = ("[", "]") if box.kind.is_node else ("(", ")")
        yield f'{box.id}{start}"{text}"{end}:::{box.kind.name}'
    for inner in frame.frames:
        yield from _subgraph(inner)
    yield "end"
    yield f"style {frame.id} fill:none,stroke:#adb5bd"


def _entities(text: str) -> str:
    """Escape text for a quoted label with Mermaid's entities."""
    return "".join(f"#{ord(c)};" if c in '"<>&#`' else c for c in text)


PICTURES = (".svg", ".png", ".pdf")
MOST_BOXES = 5000  # Graphviz takes minutes for so many
TEXTS = {".dot": _dot, ".gv": _dot, ".mmd": _mermaid, ".mermaid": _mermaid}


class Svg(str):
    """Hold a picture as SVG text, which notebooks display."""

    def _repr_svg_(self) -> str:
        return str(self)


@checked()
def plot(
    model: Source,
    *more: Source,
    path: str | os.PathLike[str] | None = None,
    titles: Sequence[str] = (),
    names: bool = False,
    types: bool = False,
) -> Svg | None:
    """Draw graphs side by side into a file, or without `path` as SVG, which notebooks display.

    Colours show the roles of values, and whether nodes compute the model, the loss, gradients or updates. Constants of
    at most four numbers are shown inside the nodes that read them. Frames show the bodies of If, Loop and Scan.
    Graphviz takes 0.6 s for 300 nodes, 3 s for 1000, and half a minute for 2000.

    Args:
        model, more: paths, onnx.ModelProtos or onnx_ir.Models.
        path: the file to write. Graphviz draws .svg, .png and .pdf; this needs the package pygraphviz, which the extra
            `plot` installs. .dot and .gv are in Graphviz's language, .mmd and .mermaid are Mermaid flowcharts; these
            need no package.
        titles: the titles of the graphs, one for each.
        names: write the names of values on the edges between nodes.
        types: write the element types and shapes of values on the edges between nodes.

    Raises:
        GraphoptError: a model cannot be read, `path` has another ending, pygraphviz is not installed, a picture has too
            many boxes, or the number of titles differs from the number of graphs.

    >>> from graphopt import models
    >>> graphopt.plot(models.linear((2,), 1), path="graph.mmd")
    """
    ending = ".svg" if path is None else Path(path).suffix.lower()
    if ending not in (*PICTURES, *TEXTS):
        raise GraphoptError(f"{path}: expected {', '.join((*PICTURES, *TEXTS))}, found {ending or 'no ending'!r}")
    drawing = _drawing([model, *more], titles, names, types)
    written = _text(drawing, ending).encode() if ending in TEXTS else _picture(drawing, ending)
    if path is None:
        return Svg(written.decode())
    with replacing(path) as temporary:
        Path(temporary).write_bytes(written)
    return None


@checked()
def dot(model: Source, *more: Source, titles: Sequence[str] = (), names: bool = False, types: bool = False) -> str:
    """Return the picture that `plot` draws, in Graphviz's language; see `plot` for arguments and errors.

    >>> from graphopt import models
    >>> graphopt.dot(models.linear((2,), 1)).split()[0]
    'digraph'
    """
    return _text(_drawing([model, *more], titles, names, types), ".dot")


@checked()
def mermaid(model: Source, *more: Source, titles: Sequence[str] = (), names: bool = False, types: bool = False) -> str:
    """Return the picture that `plot` draws, as a Mermaid flowchart; see `plot` for arguments and errors.

    >>> from graphopt import models
    >>> "flowchart" in graphopt.mermaid(models.linear((2,), 1))
    True
    """
    return _text(_drawing([model, *more], titles, names, types), ".mmd")


def _drawing(models: Sequence[Source], titles: Sequence[str], names: bool, types: bool) -> Drawing:
    if titles and len(titles) != len(models):
        raise GraphoptError(f"titles: expected {len(models)}, one for each graph, found {len(titles)}")
    drawing = Drawing(names=names, types=types)
    for title, model in zip(titles or [""] * len(models), models, strict=True):
        drawing.add(title, load(model).graph)
    return drawing


def _text(drawing: Drawing, ending: str) -> str:
    return "\n".join([*TEXTS[ending](drawing), ""])


def _picture(drawing: Drawing, ending: str) -> bytes:
    """Lay out and draw a drawing with Graphviz."""
    try:
        import pygraphviz
    except ImportError as error:
        raise GraphoptError(
            f"a picture ({ending}): expected the package pygraphviz, found none: "
            f"pip install pygraphviz, or write {', '.join(TEXTS)}"
        ) from error
    boxes = len(drawing.boxes)
    if boxes > MOST_BOXES:
        raise GraphoptError(
            f"a picture ({ending}): expected at most {MOST_BOXES} boxes, found {boxes}: draw a part with "
            f"onnx_ir.convenience.extract, or write {', '.join(TEXTS)}"
        )
    return pygraphviz.AGraph(string=_text(drawing, ".dot")).draw(format=ending[1:], prog="dot")

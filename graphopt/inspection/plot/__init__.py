"""Draw graphs: `plot` with Graphviz (the extra `plot`), `dot` and `mermaid` as text without a package."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.files import replacing
from graphopt.graph.loading import Source, load
from graphopt.inspection.plot import text
from graphopt.inspection.plot.drawing import Drawing

PICTURES = (".svg", ".png", ".pdf")
MOST_BOXES = 5000  # Graphviz takes minutes for so many
TEXTS = {".dot": text.to_dot, ".gv": text.to_dot, ".mmd": text.to_mermaid, ".mermaid": text.to_mermaid}


class Svg(str):
    """Hold a picture as SVG text, which notebooks display."""

    def _repr_svg_(self) -> str:
        return str(self)


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
        raise GraphoptError(
            f"{path}: expected {', '.join((*PICTURES, *TEXTS))}, found {ending or 'no ending'!r}"
        )
    drawing = _drawing([model, *more], titles, names, types)
    written = TEXTS[ending](drawing).encode() if ending in TEXTS else _picture(drawing, ending)
    if path is None:
        return Svg(written.decode())
    with replacing(path) as temporary:
        Path(temporary).write_bytes(written)
    return None


def dot(
    model: Source, *more: Source, titles: Sequence[str] = (), names: bool = False, types: bool = False
) -> str:
    """Return the picture that `plot` draws, in Graphviz's language; see `plot` for arguments and errors.

    >>> from graphopt import models
    >>> graphopt.dot(models.linear((2,), 1)).split()[0]
    'digraph'
    """
    return text.to_dot(_drawing([model, *more], titles, names, types))


def mermaid(
    model: Source, *more: Source, titles: Sequence[str] = (), names: bool = False, types: bool = False
) -> str:
    """Return the picture that `plot` draws, as a Mermaid flowchart; see `plot` for arguments and errors.

    >>> from graphopt import models
    >>> "flowchart" in graphopt.mermaid(models.linear((2,), 1))
    True
    """
    return text.to_mermaid(_drawing([model, *more], titles, names, types))


def _drawing(models: Sequence[Source], titles: Sequence[str], names: bool, types: bool) -> Drawing:
    if titles and len(titles) != len(models):
        raise GraphoptError(f"titles: expected {len(models)}, one for each graph, found {len(titles)}")
    drawing = Drawing(names=names, types=types)
    for title, model in zip(titles or [""] * len(models), models, strict=True):
        drawing.add(title, load(model).graph)
    return drawing


def _picture(drawing: Drawing, ending: str) -> bytes:
    """Lay out and draw a drawing with Graphviz."""
    try:
        import pygraphviz
    except ImportError as error:
        raise GraphoptError(
            f"a picture ({ending}): expected the package pygraphviz, found none: "
            f"pip install pygraphviz, or write {', '.join(TEXTS)}"
        ) from error
    boxes = len(drawing.boxes())
    if boxes > MOST_BOXES:
        raise GraphoptError(
            f"a picture ({ending}): expected at most {MOST_BOXES} boxes, found {boxes}: draw a part with "
            f"onnx_ir.convenience.extract, or write {', '.join(TEXTS)}"
        )
    return pygraphviz.AGraph(string=text.to_dot(drawing)).draw(format=ending[1:], prog="dot")

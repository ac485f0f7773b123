"""Pictures of graphs: `plot` with Graphviz, by the extra `plot`; `dot` and `mermaid` as text, with no library."""

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
MOST_BOXES = 5000  # which take minutes
TEXTS = {".dot": text.dot, ".gv": text.dot, ".mmd": text.mermaid, ".mermaid": text.mermaid}


class Svg(str):
    """A picture as SVG text, which notebooks show."""

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
    """Draw graphs side by side, into a file or, without `path`, as SVG, which notebooks show.

    Values are coloured by role, and nodes by what needs them: the model, the loss, gradients or updates. Constants of
    at most four numbers stand inside the nodes that read them. Bodies of If, Loop and Scan are frames. Graphviz
    takes 0.6 s for 300 nodes, 3 s for 1000, and half a minute for 2000.

    Args:
        model, more: paths, onnx.ModelProtos or onnx_ir.Models.
        path: the file to write: .svg, .png and .pdf are drawn by Graphviz, from the package pygraphviz of the extra
            `plot`; .dot and .gv are Graphviz's language, .mmd and .mermaid a Mermaid flowchart, and need no package.
        titles: the title above each graph, one for each.
        names: write the names of values on the edges between nodes.
        types: write the element types and shapes of values on the edges between nodes.

    Raises:
        GraphoptError: a model cannot be read; the ending of `path` is another one; pygraphviz is not installed; there
            are too many boxes for a picture; there are titles, but not one for each graph.

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
    return text.dot(_drawing([model, *more], titles, names, types))


def mermaid(
    model: Source, *more: Source, titles: Sequence[str] = (), names: bool = False, types: bool = False
) -> str:
    """Return the picture that `plot` draws, as a Mermaid flowchart; see `plot` for arguments and errors.

    >>> from graphopt import models
    >>> "flowchart" in graphopt.mermaid(models.linear((2,), 1))
    True
    """
    return text.mermaid(_drawing([model, *more], titles, names, types))


def _drawing(models: Sequence[Source], titles: Sequence[str], names: bool, types: bool) -> Drawing:
    if titles and len(titles) != len(models):
        raise GraphoptError(f"titles: expected {len(models)}, one for each graph, found {len(titles)}")
    drawing = Drawing(names=names, types=types)
    for title, model in zip(titles or [""] * len(models), models, strict=True):
        drawing.add(title, load(model).graph)
    return drawing


def _picture(drawing: Drawing, ending: str) -> bytes:
    """Have Graphviz lay a drawing out and draw it."""
    try:
        import pygraphviz
    except ImportError as error:
        raise GraphoptError(
            f"a picture ({ending}) needs the package pygraphviz, which is not installed: "
            f"pip install pygraphviz, or write {', '.join(TEXTS)}"
        ) from error
    boxes = len(drawing.boxes())
    if boxes > MOST_BOXES:
        raise GraphoptError(
            f"a picture ({ending}): expected at most {MOST_BOXES} boxes, found {boxes}: draw a part, by "
            f"onnx_ir.convenience.extract, or write {', '.join(TEXTS)}"
        )
    return pygraphviz.AGraph(string=text.dot(drawing)).draw(format=ending[1:], prog="dot")

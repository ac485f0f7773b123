"""Print a graph as text, one line per node, for golden files, reports and diffs."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.graph.loading import Source, load
from graphopt.graph.operators import defaults
from graphopt.graph.roles import role_of
from graphopt.graph.values import name_of, operator_of


@checked()
def listing(model: Source) -> str:
    """Return a line for each input, initializer, node and output of a model.

    Small constants are written inline. Attributes with default values are omitted. Anonymous values are numbered in
    the order of the lines: %0, %1, ....

    Args:
        model: an onnx_ir.Model, such as the result of `compile`, an onnx.ModelProto, or a path.

    >>> import graphopt, passes
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError())
    >>> print(graphopt.listing(step).splitlines()[0])
    data x: float[batch,2]
    """
    whole = model if isinstance(model, ir.Model) else load(model)
    return "\n".join(_lines(whole.graph, _Names())) + "\n"


def size(model: ir.Model) -> int:
    """Return the number of nodes except constants."""
    return sum(node.op_type != "Constant" for node in model.graph)


class _Names:
    """Return the names that a listing shows; values that an emitter numbered get new numbers."""

    _ANONYMOUS = re.compile(r"(.*/)?(val|body\d+)_\d+")

    def __init__(self) -> None:
        self._numbers: dict[ir.Value, int] = {}

    def __getitem__(self, value: ir.Value) -> str:
        if not self._ANONYMOUS.fullmatch(name_of(value)) or value.is_graph_input() or value.is_graph_output():
            return name_of(value)
        return f"%{self._numbers.setdefault(value, len(self._numbers))}"


def _lines(graph: ir.Graph, names: _Names) -> Iterator[str]:
    for value in graph.inputs:
        default = inline(value, anywhere=True)
        kind = "input" if (role := role_of(value)) is None else role.value
        yield f"{kind} {_typed(value, names)}" + ("" if default is None else f" = {default}")
    for value in graph.initializers.values():
        if not value.is_graph_input() and inline(value) is None:
            yield f"initializer {_typed(value, names)}"
    for node in graph:
        if node.op_type != "Constant" or inline(node.outputs[0]) is None:
            outputs = ", ".join(_typed(value, names) for value in node.outputs)
            inputs = ", ".join("-" if x is None else inline(x) or names[x] for x in node.inputs)
            attributes = [f" {name}={text}" for name, text in shown_attributes(node, graph.opset_imports)]
            yield f"{outputs} = {operator_of(node)}({inputs}){''.join(attributes)}"
    for value in graph.outputs:
        kind = "" if (role := role_of(value)) is None else f" {role.value}"
        yield f"output{kind} {_typed(value, names)}"


def shown_attributes(node: ir.Node, versions: Mapping[str, int]) -> list[tuple[str, str]]:
    """Return the names and values of a node's attributes that differ from their defaults."""
    known = defaults(node.domain, node.op_type, versions.get(node.domain, 0))
    return [
        (name, _attribute(attribute))
        for name, attribute in sorted(node.attributes.items())
        if name not in known or known[name] != attribute.value
    ]


def _attribute(attribute: ir.Attr) -> str:
    if attribute.type == ir.AttributeType.TENSOR:
        return number_text(attribute.as_tensor().numpy())
    if attribute.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS):
        return "{...}"
    value = attribute.value
    return f"{value:.9g}" if isinstance(value, float) else str(value).replace(" ", "")


def _typed(value: ir.Value, names: _Names) -> str:
    return f"{names[value]}: {type_text(value)}"


def type_text(value: ir.Value) -> str:
    """Return a value's element type and shape."""
    dtype = "?" if value.dtype is None else value.dtype.name.lower()
    dims = [str(dim) if isinstance(dim, int) else dim.value or "?" for dim in value.shape or ()]
    shape = "" if value.shape is None else f"[{','.join(dims)}]"
    return f"{dtype}{shape}"


def inline(value: ir.Value, anywhere: bool = False) -> str | None:
    """Return a constant of at most four numbers as text, or None for anything else."""
    tensor = ir.convenience.get_const_tensor(value)
    if tensor is None or (value.is_graph_input() and not anywhere) or tensor.size > 4:
        return None
    node = value.producer()
    if value.is_graph_output() or (node is not None and node.op_type != "Constant"):
        return None
    return number_text(tensor.numpy())


def number_text(array: np.ndarray, digits: int = 6) -> str:
    """Return up to four numbers as text; for more, the element type and shape."""
    if array.size > 4:
        return f"{array.dtype}{list(array.shape)}"
    texts = [f"{x:.{digits}g}" if array.dtype.kind == "f" else str(x) for x in array.flat]
    return f"[{','.join(texts)}]" if array.ndim else texts[0]

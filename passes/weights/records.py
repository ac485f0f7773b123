"""Read what `graphopt.export` recorded of a PyTorch module's weights."""

from __future__ import annotations

import warnings

import onnx_ir as ir

from graphopt.errors import some
from graphopt.graph.origins import Evidence, Exported, Kind, Origin
from graphopt.graph.values import name_of
from passes.weights.initializers import literals_in, weights_in

_WHY = {
    Kind.PARAMETER: "a parameter of the exported module",
    Kind.FROZEN: "a parameter of the exported module with requires_grad=False",
    Kind.BUFFER: "a buffer of the exported module",
}


def origins(model: ir.Model, exported: Exported) -> dict[str, Origin]:
    """Return the kinds of all initializers and constants by name, or none if another tool has rewritten the file."""
    present = {name for graph in model.graphs() for name in graph.initializers}
    if missing := [name for name in exported.weights if name not in present]:
        warnings.warn(
            f"another tool has rewritten the file of graphopt.export: {some(missing, 4)} are missing, so that rules "
            f"decide what trains: compile the file that graphopt.export wrote",
            stacklevel=2,
        )
        return {}
    constant = Origin(Kind.CONSTANT, "a constant of the exported module", Evidence.EXPORT)
    found = dict.fromkeys([*map(name_of, weights_in(model)), *literals_in(model)], constant)
    for name, weight in exported.weights.items():
        others = tuple(path for path in weight.paths if path != name)
        shared = f", also {some(others)}" if others else ""
        found[name] = Origin(weight.kind, f"{_WHY[weight.kind]}{shared}", Evidence.EXPORT, named=True, sources=others)
    return found

"""Choose the outputs that a step reports, and remove all others from the graph."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.graph.values import name_of


def reportable(model: ir.Model) -> list[str]:
    """Return the names of the outputs of a training graph that are not state, `loss` first."""
    return [name_of(y) for y in model.graph.outputs if role_of(y) not in (Role.NEXT, Role.SOURCE)]


def chosen_outputs(model: ir.Model, report: Sequence[str] | None) -> list[str]:
    """Return the names of the outputs to report: all, or those of `report` and the loss.

    Raises:
        GraphoptError: the graph has no state to update, or no output with one of the names.
    """
    if not with_role(model, Role.NEXT):
        raise GraphoptError("expected a training graph, found one without state to update: add an optimizer")
    if isinstance(report, str) or not isinstance(report, Iterable | None):
        raise GraphoptError(f"report: expected names of outputs, found {report!r}")
    names = reportable(model)
    unknown = [name for name in report or () if name not in names]
    if unknown:
        raise GraphoptError(f"report: unknown outputs {unknown}; the graph has {', '.join(names)}")
    return [name for name in names if report is None or name in report or (report and name == "loss")]


def reporting(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a training graph, or a half of one, without the nodes that only compute unreported outputs."""
    if names == reportable(model):
        return model
    model = model.clone()
    always = (Role.NEXT, Role.GRADIENT, Role.SAVED, Role.SUMMED)
    model.graph.outputs[:] = [y for y in model.graph.outputs if role_of(y) in always or y.name in names]
    RemoveUnusedNodesPass()(model)
    return model


def numbers(outputs: Iterable[ir.Value], report: Sequence[str]) -> list[str]:
    """Return which of the reported outputs are floating-point numbers, of which workers take means."""
    floats = {
        y.name for y in outputs if y.shape == () and y.dtype is not None and y.dtype.is_floating_point()
    }
    return [name for name in report if name in floats]

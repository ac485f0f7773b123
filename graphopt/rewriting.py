"""The base class of every pass."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import final

import onnx_ir as ir

from graphopt.state import detached


@dataclass(frozen=True)
class Pass(ir.passes.InPlacePass):
    """A rewriting of a model: a frozen dataclass whose fields are its options, a callable on an onnx_ir model.

    A leaf gives `rewrite`. Between passes the model is a valid, self-contained ONNX model; while `rewrite` runs,
    initial values of state are apart (see `graphopt.state`), so any rewriter is safe there.
    """

    @final
    def call(self, model: ir.Model) -> ir.passes.PassResult:
        with detached(model):
            self.rewrite(model)
            model.graph.sort()
        return ir.passes.PassResult(model, modified=True)

    @abstractmethod
    def rewrite(self, model: ir.Model) -> None:
        """Rewrite `model` in place."""


Pattern = str | tuple[str, ...] | list[str] | None


def matches(name: str | None, pattern: Pattern) -> bool:
    """Tell whether `name` fits a shell-style pattern or one of several; None fits nothing."""
    patterns = [pattern] if isinstance(pattern, str) else pattern or []
    return any(fnmatchcase(name or "", one) for one in patterns)

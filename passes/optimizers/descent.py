"""Gradient descent."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.intervals import within
from passes.optimizers.optimizer import Optimizer


@dataclass(frozen=True)
class SGD(Optimizer):
    """w - rate * d, where d is g or, with momentum, b = momentum b + (1 - dampening) g; g + momentum b if Nesterov.

    As in PyTorch, b is g in the first step (Sutskever et al. 2013).

    Args:
        rate_in_velocity: w - d, where d is v = momentum v + rate (1 - dampening) g; rate g + momentum v if Nesterov:
            scikit-learn's and Keras's form. The same while the rate is; under a schedule past gradients keep theirs.
    """

    momentum: float = within("[0, 1]", 0.0)
    dampening: float = within("[0, 1]", 0.0)
    nesterov: bool = False
    rate_in_velocity: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.nesterov and not self.momentum:
            raise GraphoptError(
                "SGD(nesterov=True): expected a momentum above 0, found 0: set momentum=0.9, say"
            )

    def slots(self) -> dict[str, float]:
        return {"momentum": 0.0} if self.momentum else {}

    def kernel(self, decay: float) -> tuple[str, dict[str, Any]] | None:
        return None if self.momentum else ("SGDOptimizerV2", {})

    def update(
        self, op: Emitter, w: ir.Value, g: ir.Value, rate: ir.Value, t: ir.Value, *slots: ir.Value
    ) -> tuple[ir.Value, ...]:
        if not slots:
            return (w - rate * g,)
        fresh = g
        if self.dampening:
            later = op.Cast(op.Greater(t, 1.0), to=t.dtype)
            fresh = (1 - self.dampening * later) * g
        if self.rate_in_velocity:
            g, fresh = rate * g, rate * fresh
        b = self.momentum * slots[0] + fresh
        d = g + self.momentum * b if self.nesterov else b
        return (w - d if self.rate_in_velocity else w - rate * d), b

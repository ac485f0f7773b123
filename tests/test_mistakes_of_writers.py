"""Mistakes of people who write passes have one line: the class, the method, what is due, and what came back.

The calls and the lines are in `tests/listings/mistakes_of_writers.txt`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, make_dataclass
from typing import Any

import messages
import numpy as np
import onnx_ir as ir
import pytest

import graphopt
import passes
from graphopt import models
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass
from passes.gradients.registry import (
    NO_GRADIENT,
    REPLACED,
    RULES,
    SURROGATES,
    UNIFORM,
    WITH_LOCAL_DERIVATIVES,
)

MODEL = models.mlp((4,), 3, hidden=[5])
LOSS, SGD = passes.MeanSquaredError(), passes.SGD(0.1)


@pytest.fixture(autouse=True)
def _registry() -> Iterator[None]:
    tables: tuple[Any, ...] = (RULES, NO_GRADIENT, REPLACED, SURROGATES, UNIFORM, WITH_LOCAL_DERIVATIVES)
    kept = [table.copy() for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


def own(base: type, **methods: Any) -> Any:
    """Return an instance of a class My with these methods."""
    for name, method in methods.items():
        if callable(method) and not isinstance(method, staticmethod):
            method.__module__ = __name__
            method.__name__ = name
    return make_dataclass("My", [], bases=(base,), namespace=methods, frozen=True)()


def steps(**own_steps: Any) -> Any:
    return graphopt.compile(MODEL, **{"loss": LOSS, "optimizer": SGD, **own_steps})


def loss(compare: Callable[..., Any] = lambda self, op, p, t: op.Abs(p - t), **methods: Any) -> Any:
    """Compile with a loss of these methods; options are those of the loss."""
    options = {name: methods.pop(name) for name in ("reduction", "sample_weight") if name in methods}
    namespace = {"compare": compare, **methods}
    made = type(own(passes.Loss, **namespace))(**options)
    return steps(loss=made)


def clip(clip: Any) -> Any:
    return steps(clip=own(passes.Clip, clip=clip))


def penalty(penalty: Any) -> Any:
    return steps(regularizer=own(passes.Regularizer, penalty=penalty))


def rate(rate: Any) -> Any:
    return steps(schedule=own(passes.Schedule, rate=rate))


def share(share: Any) -> Any:
    return steps(average=own(passes.Average, share=share))


def optimizer(update: Any, slots: Any = None, **methods: Any) -> Any:
    more = {} if slots is None else {"slots": slots if callable(slots) else lambda self: slots}
    return steps(optimizer=own(passes.Optimizer, update=update, **more, **methods))


def adapter(**methods: Any) -> Any:
    """Compile with an adapter that scales outputs, but for these methods."""
    namespace = {
        "initial": lambda self, target, generator: {"scaling": np.zeros(target.outputs)},
        "delta": lambda self, op, target, x, scaling: target.product(op) * target.spread(op, scaling),
        "merge": staticmethod(lambda w, scale, scaling: w * (1 + scaling)),
    }
    return steps(adapter=own(passes.Adapter, **{**namespace, **methods}))


def rewrite(rewrite: Any, **methods: Any) -> Any:
    return steps(clip=own(Pass, rewrite=rewrite, **methods))


def rule(rule: Any, operator: str = "Relu") -> Any:
    return steps(rules={("", operator): rule})


def emit(function: Callable[[Any, ir.Value], Any]) -> Any:
    """Emit into a model, as a pass does, with its input of float32[batch,4]."""
    model = graphopt.load(MODEL)
    with Emitter(model) as op:
        return function(op, model.graph.inputs[0])


def integers(op: Any, x: ir.Value) -> ir.Value:
    return op.Cast(x, to=ir.DataType.INT64)


@dataclass(frozen=True)
class Sets(passes.Loss):
    count: int = 0

    def compare(self, op, prediction, target):
        self.count = 1  # type: ignore[misc]
        return prediction - target


class Learns(passes.Loss):
    learns = True  # type: ignore[assignment]

    def compare(self, op, prediction, target):
        return prediction - target

    def adapted(self, model, read, target_name="target"):
        return 3


def adapted() -> Any:
    data = {"x": np.zeros((8, 4), np.float32), "target": np.zeros((8, 3), np.float32)}
    return graphopt.adapt(graphopt.standard(loss=Learns(), optimizer=SGD), MODEL, data)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("mistakes_of_writers"))
def test_a_mistake_is_answered_in_one_line(call: str) -> None:
    messages.refused("mistakes_of_writers", call, {**globals(), "math": math})

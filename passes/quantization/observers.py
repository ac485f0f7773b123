"""Move the ranges of rounded activations while a model trains."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import RANGE, STOP_GRADIENT, Note, expect
from graphopt.graph.postprocessing import STORED_AS
from graphopt.graph.roles import Role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import dims_of, given, name_of, producer_of

_LEVELS = 255
_Ends = dict[str, tuple[ir.Node, ir.Value]]  # low and high, each with the node that reads it


@dataclass(frozen=True)
class Observer(Note, key="graphopt.observer", expected="how the range of an activation follows training"):
    """Mark a QuantizeLinear whose range training moves; see `passes.FakeQuantize`.

    Args:
        kind: `ema` or `lsq`.
        momentum: the share that a moving average keeps of itself in a step.
        freeze_after: the number of steps after which it stays.
    """

    kind: str
    momentum: float = 0.0
    freeze_after: int | None = None

    def check(self) -> None:
        expect(self.kind in ("ema", "lsq"), 0 <= self.momentum < 1, (self.freeze_after or 0) >= 0)


def observe(model: ir.Model, node: ir.Node, observer: Observer) -> None:
    """Give the range of what a QuantizeLinear rounds its training form."""
    ends = _range(node)
    if set(ends) != {"low", "high"}:
        raise Observer.wrong(node, "a QuantizeLinear whose zero point follows from a range")
    if observer.kind == "ema":
        _follow_range(model, node, observer, ends)
    else:
        _learn_scale(model, node)


def _follow_range(model: ir.Model, node: ir.Node, observer: Observer, ends: _Ends) -> None:
    """Make the range of what a QuantizeLinear rounds the moving average of the batches' ranges.

    The step rounds by the new range, and inference by the stored one, as PyTorch's MovingAverageMinMaxObserver does.
    """
    x = given(node.inputs[0])
    for end, (reader, old) in ends.items():
        state.promote(model, old, Role.STATISTIC)
        with Emitter(model) as op:
            seen = (op.ReduceMin if end == "low" else op.ReduceMax)(x, keepdims=0)
            new = observer.momentum * old + (1 - observer.momentum) * seen
            if observer.freeze_after is not None:
                new = op.Where(op.Less(state.counter(model), observer.freeze_after), new, old)
            reader.replace_input_with(0, new)
            InferenceForm(inputs={0: name_of(old)}).write(reader.outputs[0])
            state.set_next(model, old, op.Identity(new))


def _learn_scale(model: ir.Model, node: ir.Node) -> None:
    """Multiply the scale by which a QuantizeLinear rounds by a parameter that starts at 1; its zero point stays.

    Optimizers such as Adam move parameters by their learning rate, whatever the size of a gradient: a share of the
    scale is what they can move. Its gradient is multiplied by 1 / sqrt(n 255), of the n numbers of a row (Esser et al.
    2020, section 2.2).
    """
    x, limit = given(node.inputs[0]), producer_of(given(node.inputs[1]))
    name = STORED_AS.read(limit)  # a free one
    if name is None:
        raise Observer.wrong(node, "a scale with a name in the file")
    parameter = state.declare(model, name, np.array(1, np.float32), Role.PARAMETER)
    count = math.prod(dim for dim in dims_of(x)[1:] if isinstance(dim, int))
    with Emitter(model) as op:
        moved = parameter * (1 / math.sqrt(count * _LEVELS))
        passed = moved - STOP_GRADIENT.mark(op.Identity(moved))
        learnt = InferenceForm(same_as=0).write(STOP_GRADIENT.mark(op.Identity(parameter)) + passed)
        STOP_GRADIENT.remove(limit)
        STORED_AS.remove(limit)  # the file stores it under the name of the parameter
        limit.replace_input_with(0, learnt * given(limit.inputs[0]))


def _range(node: ir.Node) -> _Ends:
    """Return both ends of the range behind a QuantizeLinear's zero point, each with the node that reads it."""
    found: _Ends = {}
    zero = node.inputs[2] if len(node.inputs) > 2 else None
    for reader in ancestors([] if zero is None else [zero]):
        end = None if not reader.inputs or reader.inputs[0] is None else RANGE.read(reader.inputs[0])
        if end is not None:
            found[end] = reader, given(reader.inputs[0])
    return found

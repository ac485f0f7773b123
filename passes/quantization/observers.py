"""Move the ranges of rounded activations while a model trains."""

from __future__ import annotations

import math

import numpy as np
import onnx_ir as ir

from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import RANGE, STOP_GRADIENT, STORED_AS, InferenceForm, Observer
from graphopt.graph.roles import Role
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import dims_of, given, name_of

LEVELS = 255


def observe(model: ir.Model, node: ir.Node, observer: Observer) -> None:
    """Give the range of what a QuantizeLinear rounds its training form."""
    if observer.kind == "ema":
        _follow_range(model, node, observer)
    else:
        _learn_scale(model, node)


def _follow_range(model: ir.Model, node: ir.Node, observer: Observer) -> None:
    """Make the range of what a QuantizeLinear rounds the moving average of the batches' ranges.

    The step rounds by the new range, and inference by the stored one, as PyTorch's MovingAverageMinMaxObserver does.
    """
    x = given(node.inputs[0])
    for end, (reader, old) in _range(node).items():
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
    """Make the scale by which a QuantizeLinear rounds a parameter, whose zero point stays.

    Its gradient is multiplied by 1 / sqrt(n 255), of the n numbers of a row (Esser et al. 2020, section 2.2).
    """
    x, scale = given(node.inputs[0]), given(node.inputs[1])
    ends = _range(node)
    low, high = (float(given(old).const_value.numpy()) for _, old in (ends["low"], ends["high"]))  # type: ignore[union-attr]
    start = np.float32(max(high, 0.0)) - np.float32(min(low, 0.0))
    name = name_of(ends["low"][1]).removesuffix(".low")
    parameter = state.declare(
        model, f"{name}.scale", np.array(start / np.float32(LEVELS), np.float32), Role.PARAMETER
    )
    count = math.prod(dim for dim in dims_of(x)[1:] if isinstance(dim, int))
    share = 1 / math.sqrt(count * LEVELS)
    limit = scale.producer()
    assert limit is not None
    with Emitter(model) as op:
        moved = parameter * share
        passed = moved - STOP_GRADIENT.mark(op.Identity(moved))
        learnt = STOP_GRADIENT.mark(op.Identity(parameter)) + passed
        InferenceForm(same_as=0).write(learnt)
        STOP_GRADIENT.remove(limit)
        STORED_AS.remove(limit)  # the file stores it under the name of the parameter
        limit.replace_input_with(0, learnt)


def _range(node: ir.Node) -> dict[str, tuple[ir.Node, ir.Value]]:
    """Return both ends of the range behind a QuantizeLinear's zero point, each with the node that reads it."""
    found = {}
    for reader in ancestors([given(node.inputs[2])]):
        end = None if not reader.inputs or reader.inputs[0] is None else RANGE.read(reader.inputs[0])
        if end is not None:
            found[end] = reader, given(reader.inputs[0])
    return found

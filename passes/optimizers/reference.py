"""Compute the updates of optimizers and clipping in NumPy, by their published formulas, to compare graphs with them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.rewriting import selects
from passes.clipping import ClipGlobalNorm, ClipValue, GradientNorm, ReportGradients
from passes.optimizers.adaptive import LAMB, Adagrad, Adam, AdamW, RMSprop
from passes.optimizers.descent import SGD, Lion
from passes.optimizers.optimizer import Group, Optimizer

Arrays = Mapping[str, np.ndarray]
Update = Callable[[Any, np.ndarray, np.ndarray, float, int, Arrays], np.ndarray]
_Clip = Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]]


def _sgd(o: SGD, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: Arrays) -> np.ndarray:
    g = g + o.weight_decay * w
    if not o.momentum:
        return w - rate * g
    scale = rate if o.rate_in_velocity else 1.0
    b = o.momentum * slots["momentum"] + (1 - o.dampening * (t > 1)) * scale * g
    d = scale * g + o.momentum * b if o.nesterov else b
    return w - (1.0 if o.rate_in_velocity else rate) * d


def _adam(o: Adam, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: Arrays) -> np.ndarray:
    m = (1 - o.beta1) * (o.beta1 * slots["exp_sum"] + g) / (1 - o.beta1**t)
    v = (1 - o.beta2) * (o.beta2 * slots["exp_sum_sq"] + g**2) / (1 - o.beta2**t)
    return w - rate * m / (np.sqrt(v) + o.epsilon)


def _lamb(o: LAMB, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: Arrays) -> np.ndarray:
    u = o.weight_decay * w - _adam(o, np.zeros_like(w), g, 1.0, t, slots)
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - rate * (norms[0] / norms[1] if all(norms) else 1.0) * u


def _rmsprop(o: RMSprop, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: Arrays) -> np.ndarray:
    g = g + o.weight_decay * w
    v = o.alpha * slots["square_avg"] + (1 - o.alpha) * g**2
    if o.centered:
        v = v - (o.alpha * slots["grad_avg"] + (1 - o.alpha) * g) ** 2
    d = g / (np.sqrt(v) + o.epsilon)
    return w - rate * (o.momentum * slots["momentum"] + d if o.momentum else d)


UPDATES: dict[type[Optimizer], Update] = {
    SGD: _sgd,
    Adam: lambda o, w, g, rate, t, slots: _adam(o, w, g + o.weight_decay * w, rate, t, slots),
    AdamW: lambda o, w, g, rate, t, slots: _adam(o, w, g, rate, t, slots) - rate * o.weight_decay * w,
    LAMB: _lamb,
    RMSprop: _rmsprop,
    Adagrad: lambda o, w, g, rate, t, slots: (
        w - rate * (d := g + o.weight_decay * w) / (np.sqrt(slots["sum"] + d**2) + o.epsilon)
    ),
    Lion: lambda o, w, g, rate, t, slots: (
        w * (1 - rate * o.weight_decay) - rate * np.sign(o.beta1 * slots["exp_avg"] + (1 - o.beta1) * g)
    ),
}

CLIPS: dict[type, _Clip] = {
    ClipGlobalNorm: lambda c, g: {
        name: x * min(1.0, c.max_norm / (np.sqrt(sum(np.sum(y**2) for y in g.values())) + 1e-6))
        for name, x in g.items()
    },
    ClipValue: lambda c, g: {name: np.clip(x, -c.limit, c.limit) for name, x in g.items()},
    GradientNorm: lambda c, g: g,
    ReportGradients: lambda c, g: g,
}


def clipped(clips: Sequence[Any], gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Return gradients after clipping passes; None if one of these is not known here."""
    for item in clips:
        if type(item) not in CLIPS:
            return None
        gradients = CLIPS[type(item)](item, gradients)
    return gradients


def update_of(optimizer: Optimizer, parameter: ir.Value) -> tuple[Optimizer, float] | None:
    """Return the optimizer of a parameter and the factor of its rate; None if its update is not known here."""
    group = next((group for group in optimizer.groups if selects(group.pattern, parameter)), Group(None))
    own, factor = group.optimizer or optimizer, group.learning_rate
    if type(own) not in UPDATES or own.slot_bits == 8 or own.fused:
        return None
    if own.learning_rate != optimizer.learning_rate:
        factor *= own.learning_rate / optimizer.learning_rate
    if group.weight_decay is not None:
        own = replace(own, weight_decay=group.weight_decay)
    return own, factor

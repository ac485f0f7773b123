"""Compute updates, averages and clipping in NumPy, by their published formulas, as an oracle of graphs.

The sources: Kingma, Ba 2015 (Adam); Loshchilov, Hutter 2019 (AdamW); You et al. 2020 (LAMB); Duchi et al. 2011
(Adagrad); Chen et al. 2023 (Lion); Defazio et al. 2024, Algorithm 1, and the package schedulefree (ScheduleFreeAdamW);
Jordan et al. 2024, https://kellerjordan.github.io/posts/muon (Muon); Shazeer, Stern 2018, Algorithms 4 to 6, and
torch.optim.Adafactor; torch.optim for SGD, RMSprop and swa_utils.AveragedModel; Dettmers et al. 2022 for 8-bit slots.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from passes.averages import EMA, SWA, Average
from passes.clipping import ClipGlobalNorm, ClipValue, GradientNorm, ReportGradients
from passes.optimizers.adaptive import LAMB, Adagrad, Adam, AdamW, RMSprop, ScheduleFreeAdamW
from passes.optimizers.descent import SGD, Lion
from passes.optimizers.optimizer import Optimizer
from passes.optimizers.structured import Adafactor, Muon

_Arrays = Mapping[str, np.ndarray]
Updated = tuple[np.ndarray, dict[str, np.ndarray]]  # the parameter and its slots
Update = Callable[[Any, np.ndarray, np.ndarray, float, int, _Arrays], Updated]
_Clip = Callable[[Any, dict[str, np.ndarray]], dict[str, np.ndarray]]


def _sgd(o: SGD, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    g = g + o.weight_decay * w
    if not o.momentum:
        return w - rate * g, {}
    scale = rate if o.rate_in_velocity else 1.0
    b = o.momentum * slots["momentum"] + (1 - o.dampening * (t > 1)) * scale * g
    d = scale * g + o.momentum * b if o.nesterov else b
    return w - (1.0 if o.rate_in_velocity else rate) * d, {"momentum": b}


def _adam(o: Adam, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    sums = {"exp_sum": o.beta1 * slots["exp_sum"] + g, "exp_sum_sq": o.beta2 * slots["exp_sum_sq"] + g**2}
    m = (1 - o.beta1) * sums["exp_sum"] / (1 - o.beta1**t)
    v = (1 - o.beta2) * sums["exp_sum_sq"] / (1 - o.beta2**t)
    return w - rate * m / (np.sqrt(v) + o.epsilon), sums


def _adamw(o: AdamW, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    new, sums = _adam(o, w, g, rate, t, slots)
    return new - rate * o.weight_decay * w, sums


def _lamb(o: LAMB, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    minus, sums = _adam(o, np.zeros_like(w), g, 1.0, t, slots)
    u = o.weight_decay * w - minus
    norms = np.linalg.norm(w), np.linalg.norm(u)
    return w - rate * (norms[0] / norms[1] if all(norms) else 1.0) * u, sums


def _schedule_free(o: ScheduleFreeAdamW, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    y = o.beta1 * w + (1 - o.beta1) * slots["z"]
    v = o.beta2 * slots["exp_avg_sq"] + (1 - o.beta2) * g**2
    z = slots["z"] - rate * (g / (np.sqrt(v / (1 - o.beta2**t)) + o.epsilon) + o.weight_decay * y)
    largest = max(float(slots["largest_rate"]), float(slots["learning_rate"]))
    weight = t**o.weight_power * largest**o.rate_power
    total = float(slots["weight_sum"]) + weight
    share = weight / total if total else 0.0
    return (1 - share) * w + share * z, {"z": z, "exp_avg_sq": v}


def _adagrad(o: Adagrad, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    g = g + o.weight_decay * w
    s = slots["sum"] + g**2
    return w - rate * g / (np.sqrt(s) + o.epsilon), {"sum": s}


def _rmsprop(o: RMSprop, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    g = g + o.weight_decay * w
    new = {"square_avg": o.alpha * slots["square_avg"] + (1 - o.alpha) * g**2}
    v = new["square_avg"]
    if o.centered:
        new["grad_avg"] = o.alpha * slots["grad_avg"] + (1 - o.alpha) * g
        v = v - new["grad_avg"] ** 2
    d = g / (np.sqrt(v) + o.epsilon)
    if o.momentum:
        d = new["momentum"] = o.momentum * slots["momentum"] + d
    return w - rate * d, new


def _lion(o: Lion, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    m = slots["exp_avg"]
    d = np.sign(o.beta1 * m + (1 - o.beta1) * g)
    return w * (1 - rate * o.weight_decay) - rate * d, {"exp_avg": o.beta2 * m + (1 - o.beta2) * g}


def _muon(o: Muon, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    m = slots["momentum"] + (1 - o.momentum) * (g - slots["momentum"])
    x = g + o.momentum * (m - g) if o.nesterov else m
    x = x / max(float(np.linalg.norm(x)), o.epsilon)
    a, b, c = o.coefficients
    for _ in range(o.iterations):  # Newton-Schulz, an odd polynomial of the singular values
        gram = x.T @ x if x.shape[0] > x.shape[1] else x @ x.T
        polynomial = b * gram + c * gram @ gram
        x = a * x + (x @ polynomial if x.shape[0] > x.shape[1] else polynomial @ x)
    return w * (1 - rate * o.weight_decay) - rate * o.adjust * x, {"momentum": m}  # type: ignore[operator]


def _adafactor(o: Adafactor, w: np.ndarray, g: np.ndarray, rate: float, t: int, slots: _Arrays) -> Updated:
    least = np.finfo(np.float32).eps if o.epsilon is None else o.epsilon
    kept = 1 - t**o.decay_power
    new = {}
    for name, axis in (("row_var", -1), ("col_var", -2), ("variance", None)):
        if name in slots:
            mean = g**2 if axis is None else np.mean(g**2, axis=axis, keepdims=True)
            new[name] = kept * slots[name] + (1 - kept) * mean
    if w.ndim < 2:
        v = new["variance"]
    else:
        rows = new["row_var"]
        v = rows @ new["col_var"] / np.maximum(rows.mean(axis=-2, keepdims=True), least)
    u = g / np.sqrt(np.maximum(v, least**2))
    size, change = (np.linalg.norm(x) / np.sqrt(x.size) for x in (w, u))
    step = min(rate, t**-0.5) if o.relative_step else rate
    step *= max(o.least_scale, size) if o.scale_parameter else 1.0
    return w * (1 - rate * o.weight_decay) - step * u / max(1.0, change / o.clip_threshold), new


UPDATES: dict[type[Optimizer], Update] = {
    SGD: _sgd,
    Adam: lambda o, w, g, rate, t, slots: _adam(o, w, g + o.weight_decay * w, rate, t, slots),
    AdamW: _adamw,
    LAMB: _lamb,
    ScheduleFreeAdamW: _schedule_free,
    RMSprop: _rmsprop,
    Adagrad: _adagrad,
    Lion: _lion,
    Muon: _muon,
    Adafactor: _adafactor,
}
WHOLE = (LAMB, Muon, Adafactor)  # whose update of a number reads others

CLIPS: dict[type, _Clip] = {
    ClipGlobalNorm: lambda c, g: {
        name: x * min(1.0, c.max_norm / (np.sqrt(sum(np.sum(y**2) for y in g.values())) + 1e-6))
        for name, x in g.items()
    },
    ClipValue: lambda c, g: {name: np.clip(x, -c.limit, c.limit) for name, x in g.items()},
    GradientNorm: lambda c, g: g,
    ReportGradients: lambda c, g: g,
}


def clipped(clips: Sequence[object], gradients: dict[str, np.ndarray]) -> dict[str, np.ndarray] | None:
    """Return gradients after clipping passes; None if one of these is not known here."""
    for item in clips:
        if type(item) not in CLIPS:
            return None
        gradients = CLIPS[type(item)](item, gradients)
    return gradients


def update_of(optimizer: Optimizer, parameter: ir.Value) -> tuple[Optimizer, float] | None:
    """Return the optimizer of a parameter and the factor of its rate; None if its update is not known here."""
    own, factor = optimizer.assigned(parameter)
    return None if type(own) not in UPDATES or own.fused else (own, factor)


def share_of(average: Average, t: int) -> float | None:
    """Return the share of parameters in their averages after update t; None if it is not known here."""
    if type(average) not in (EMA, SWA):
        return None
    count, rest = divmod(t - average.start, average.every)
    if count < 0 or t == average.start:
        return 1.0
    if rest or not count:
        return 0.0
    return 1 - average.decay if isinstance(average, EMA) else 1 / (count + 1)


def slot_numbers(codes: np.ndarray, largest: np.ndarray, shape: Sequence[int], signed: bool) -> tuple[np.ndarray, ...]:
    """Return the numbers of an 8-bit slot, and half of the gaps beside each, which rounding to 8 bits may change.

    The table is `create_dynamic_map` of bitsandbytes: for each power of ten, the centers of equal intervals.
    """
    numbers = [0.0, 1.0]
    for i in range(7):
        edges = np.linspace(0.1, 1, 2 ** (i + (not signed)) + 1)
        centers = 10.0 ** (i - 6) * (edges[1:] + edges[:-1]) / 2
        numbers += [*centers, *(-centers if signed else ())]
    table = np.sort(numbers)
    gaps = np.maximum(np.diff(table, prepend=table[0]), np.diff(table, append=table[-1])) / 2
    count = int(np.prod(shape))
    return tuple((x[codes] * largest).ravel()[:count].reshape(shape) for x in (table, gaps))

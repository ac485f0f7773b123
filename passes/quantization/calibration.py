"""Learn the ranges of activations from training rows."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.rewriting import Read

BINS = 2048  # of a histogram between -m and m, the largest magnitude
_LEVELS = 128  # of a distribution that is compared with that of a histogram
PERCENTILE = 99.999
_UNSEEN = 1e-4  # the share of a bin that rounding empties

Range = tuple[float, float]


def ranges_of(method: str, model: ir.Model, names: Sequence[str], read: Read) -> dict[str, Range]:
    """Return the ranges of some values of a model on the training rows.

    Args:
        method: one of `METHODS`.
        model: the model, which is not changed.
        names: the names of the values.
        read: returns the training rows.

    Raises:
        GraphoptError: a value is not finite, or there are no rows.
    """
    watched = watching(model, names)
    lows, highs = (dict.fromkeys(names, sign * np.inf) for sign in (1, -1))
    for outputs in read.run(watched):
        for name, array in outputs.items():
            lows[name] = min(lows[name], float(np.min(array, initial=np.inf)))
            highs[name] = max(highs[name], float(np.max(array, initial=-np.inf)))
    for name in names:
        if not np.isfinite([lows[name], highs[name]]).all():
            raise GraphoptError(
                f"FakeQuantize: expected finite numbers of {name!r} on the training rows, found others: name the "
                "product's weight in leave_out"
            )
    ends = {name: (lows[name], highs[name]) for name in names}
    chosen = METHODS[method]
    if chosen is None:
        return ends
    most = {name: max(abs(low), abs(high)) or 1.0 for name, (low, high) in ends.items()}
    counts = {name: np.zeros(BINS) for name in names}
    for outputs in read.run(watched):
        for name, array in outputs.items():
            counts[name] += np.histogram(array, BINS, (-most[name], most[name]))[0]
    return {
        name: (max(low, found[0]), min(high, found[1]))
        for name, (low, high) in ends.items()
        for found in [chosen(counts[name], np.linspace(-most[name], most[name], BINS + 1))]
    }


def watching(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a copy of a model whose outputs are values of it."""
    watched = model.clone()
    values = ir.convenience.create_value_mapping(watched.graph, include_subgraphs=False)
    watched.graph.outputs[:] = [values[name] for name in names]
    return watched


def _percentiles(counts: np.ndarray, edges: np.ndarray) -> Range:
    """Return the range that leaves out an equal share of the numbers at both ends, as ONNX Runtime's does."""
    shares, tail = np.cumsum(counts) / counts.sum(), (100 - PERCENTILE) / 200
    return float(edges[np.searchsorted(shares, tail)]), float(edges[np.searchsorted(shares, 1 - tail) + 1])


def _least_entropy(counts: np.ndarray, edges: np.ndarray) -> Range:
    """Return the range around 0 whose clipped and rounded distribution is nearest to the histogram's.

    This is the search by relative entropy of TensorRT and of ONNX Runtime's EntropyCalibrater (Migacz, 8-bit
    inference with TensorRT, 2017), in steps of 8 bins.
    """
    middle, best = BINS // 2, (np.inf, BINS // 2)
    for i in range(_LEVELS // 2, middle + 1, 8):
        inner = counts[middle - i : middle + i]
        p = inner.copy()
        p[0] += counts[: middle - i].sum()
        p[-1] += counts[middle + i :].sum()
        level = np.arange(2 * i) * _LEVELS // (2 * i)
        is_seen = inner > 0
        sums, places = (np.bincount(level, x, _LEVELS) for x in (inner, is_seen))
        q = np.where(is_seen, (sums / np.maximum(places, 1))[level], 0)
        p, q = p / p.sum(), q / max(q.sum(), 1)
        at = p > 0
        best = min(best, (float(np.sum(p[at] * np.log(p[at] / np.maximum(q[at], _UNSEEN / BINS)))), i))
    return float(edges[middle - best[1]]), float(edges[middle + best[1]])


METHODS: dict[str, Callable[[np.ndarray, np.ndarray], Range] | None] = {
    "minmax": None,
    "percentile": _percentiles,
    "entropy": _least_entropy,
}

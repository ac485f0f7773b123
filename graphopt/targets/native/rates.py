"""Measure how fast this processor multiplies and copies, by which convolutions choose an algorithm."""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Sequence

from graphopt.targets.native.cache import read_cached, write_cached
from graphopt.targets.native.library import source
from graphopt.targets.native.toolchain import Objects, build, code_digest

_MEMBERS = 4  # of `Rates` in calls.h


def measured_rates(parts: Sequence[str], begun: Objects | None = None) -> tuple[float, ...] | None:
    """Return the members of `Rates` in calls.h, which are measured once on a machine and kept in the cache folder.

    Args:
        parts: the C sources that have the kernels of convolutions, as `library.parts` returns them.
        begun: objects that are being compiled, those of the parts perhaps.

    Returns:
        None if there is no memory to measure, or a clock that does not advance: those of rates.h serve.

    Raises:
        GraphoptError: there is no compiler, or it fails.
        OSError: the cache folder cannot be written to.
    """
    name = f"{code_digest('rates', *parts)}.json"
    kept = read_cached(name)
    if kept is None:
        rates = (ctypes.c_double * _MEMBERS)()
        measure = ctypes.CDLL(str(build(source([], 1), (), parts, begun))).measure_rates
        found = [*rates] if measure(rates) else []
        kept = json.dumps(found if all(map(_is_rate, found)) else []).encode()
        write_cached(name, kept)
    return tuple(json.loads(kept)) or None


def _is_rate(seconds: float) -> bool:
    return math.isfinite(seconds) and seconds > 0

"""Measure how fast this processor multiplies and copies, by which convolutions choose an algorithm."""

from __future__ import annotations

import ctypes
import json
import math

from graphopt.targets.native.cache import MEASURED, read_cached, write_first
from graphopt.targets.native.library import parts_for, source
from graphopt.targets.native.toolchain import Objects, build, code_digest

_MEMBERS = 4  # of `Rates` in calls.h


def measured_rates(begun: Objects | None = None) -> tuple[float, ...] | None:
    """Return the members of `Rates` in calls.h, which are measured once on a machine and kept in the cache folder.

    Of processes that measure at once, all return what the first one keeps.

    Args:
        begun: objects that are being compiled, those of convolutions perhaps.

    Returns:
        None, and nothing is kept, if there is no memory to measure, or a clock that does not advance: those of rates.h
        serve.

    Raises:
        GraphoptError: there is no compiler, or it fails.
        OSError: the cache folder cannot be written to.
    """
    if kept_rates() is None:
        rates = (ctypes.c_double * _MEMBERS)()
        measure = ctypes.CDLL(str(build(source([], 1), (), _parts(), begun))).measure_rates
        if not measure(rates) or not all(math.isfinite(rate) and rate > 0 for rate in rates):
            return None
        write_first(rates_file(), json.dumps([*rates]).encode())
    return kept_rates()


def kept_rates() -> tuple[float, ...] | None:
    """Return what `measured_rates` has left in the cache; None if it is not there."""
    kept = read_cached(rates_file())
    return None if kept is None else tuple(json.loads(kept))


def rates_file() -> str:
    """Return the name of the file of rates in the cache."""
    return f"{MEASURED}{code_digest('rates', *_parts())}.json"


def _parts() -> list[str]:
    """Return the C sources of convolutions, with what is measured."""
    return parts_for({"Conv"}, is_low=True)

"""Choose the numbers in which kernels multiply: float32, or bfloat16 where the processor has instructions for it."""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import sys
from pathlib import Path
from typing import Literal

from graphopt.errors import GraphoptError
from graphopt.targets.native.toolchain import macros

MatmulPrecision = Literal["highest", "high", "medium"]
VARIABLE = "GRAPHOPT_MATMUL_PRECISION"  # of the environment
# How many bfloat16 numbers stand for a float32 operand of a product; 0 keeps float32.
PIECES: dict[str, int] = {"highest": 0, "high": 2, "medium": 1}
UNITS = {"high": 2.0**-16, "medium": 2.0**-8}  # the rounding of an operand
# The macros that bfloat16.h needs, on x86-64 and on ARM.
_OF_VECTORS = {"__AVX512BF16__", "__AVX512BW__", "__AVX512DQ__"}
_OF_ARM = "__ARM_FEATURE_BF16_VECTOR_ARITHMETIC"
_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA = 158, 0x1023, 18  # of Linux on x86-64


def chosen_precision(precision: str | None) -> str:
    """Return a precision, or the environment's; without either, `highest`.

    Raises:
        GraphoptError: it is unknown.
    """
    found = os.environ.get(VARIABLE, "highest") if precision is None else precision
    if found not in PIECES:
        what = f"environment variable {VARIABLE}" if precision is None else "matmul_precision"
        raise GraphoptError(f"{what}: expected {', '.join(PIECES)}, found {found!r}")
    return found


def obstacle(precision: str) -> str | None:
    """Return why kernels multiply in float32 although a lower precision is allowed, or None if they do not."""
    if precision == "highest":
        return None
    found = macros()
    has_vectors = found >= _OF_VECTORS
    if has_vectors and "__AMX_BF16__" in found:
        return None if _may_use_tiles() else "the operating system does not let processes use AMX"
    if precision == "medium" and has_vectors and "AuthenticAMD" in _cpuinfo():
        return None  # twice the rate of float32 there, and no more than that on Intel's processors
    if precision == "medium" and _OF_ARM in found and (sys.platform != "linux" or "bf16" in _cpuinfo().split()):
        return None
    expected = "AMX" if precision == "high" else "AMX, AVX-512 BF16 by AMD, or ARM's BFMMLA"
    return f"expected a processor with {expected}, found one without"


@functools.cache
def _may_use_tiles() -> bool:
    """Ask Linux, once for all threads of a process, for the registers of AMX; return whether it gives them."""
    if sys.platform != "linux" or platform.machine() != "x86_64":
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    return libc.syscall(_ARCH_PRCTL, _REQUEST_PERMISSION, _TILE_DATA) == 0


def precision_in_words(precision: str) -> str:
    """Describe in one line how kernels multiply on this machine."""
    reason = obstacle(precision)
    if reason is not None:
        return f"as 'highest', not {precision!r}: {reason}"
    where = ", where that takes less time"
    operands = {0: "float32", 1: f"bfloat16{where}", 2: f"the sum of two bfloat16 numbers{where}"}
    return f"as {precision!r}: each number of an operand is {operands[PIECES[precision]]}"


def pieces_for(precision: str) -> int:
    """Return how many bfloat16 numbers stand for a float32 operand on this machine; 0 keeps float32."""
    return 0 if obstacle(precision) else PIECES[precision]


def multiplies_bfloat16() -> bool:
    """Return whether products of bfloat16 numbers have kernels on this machine; else they are products of float32."""
    return obstacle("medium") is None


def _cpuinfo() -> str:
    try:
        return Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""

"""Flush denormal numbers, which are close to 0 and can slow a processor down a hundred times."""

from __future__ import annotations

import ctypes
import functools
import platform
import sys
import threading
from collections.abc import Callable

FLUSH = 0x8040  # the bits FTZ and DAZ of the register MXCSR: denormal results are 0, and denormal operands count as 0


class Modes(ctypes.Structure):
    """Lay out `femode_t` of C on Linux and x86-64: how floating-point numbers are computed, without past exceptions."""

    _fields_ = (("control", ctypes.c_uint32), ("mxcsr", ctypes.c_uint32))


class Flushing(threading.local):
    """Compute with 0 in place of denormal numbers in the calling thread, inside a `with` block.

    ONNX Runtime's `session.set_denormal_as_zero` affects the threads of its pools and, permanently, the thread that
    created the first session of the process. NumPy would flush denormal numbers in that thread, too.
    """

    def __init__(self) -> None:
        self.modes = modes()

    def __enter__(self) -> None:
        get, put, before, flushing = self.modes
        get(before)
        put(flushing)

    def __exit__(self, *_: object) -> None:
        put, before = self.modes[1:3]
        put(before)


Switches = tuple[Callable[[object], None], Callable[[object], None], object, object]
AS_THEY_ARE: Switches = (lambda _: None, lambda _: None, None, None)  # `modes` where nothing is to change


def modes() -> Switches:
    """Return functions that get and set the modes, memory for the modes before, and the modes that flush.

    They are made once and not looked up again, since a step takes only some microseconds.
    """
    libc = _libc()
    before, now = Modes(), Modes()
    libc.fegetmode(ctypes.byref(now))
    flushing = Modes(now.control, now.mxcsr | FLUSH)
    return libc.fegetmode, libc.fesetmode, ctypes.byref(before), ctypes.byref(flushing)


@functools.cache
def _libc() -> ctypes.PyDLL:
    """Return the C library, whose functions keep the interpreter's lock, and whose results are not converted."""
    libc = ctypes.PyDLL(None)
    libc.fegetmode.restype = libc.fesetmode.restype = None
    return libc


def supported() -> bool:
    """Return whether `Flushing` works here: on Linux and x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"

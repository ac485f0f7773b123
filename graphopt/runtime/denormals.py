"""Flush denormal numbers, which are close to 0 and can slow a processor down a hundred times."""

from __future__ import annotations

import ctypes
import platform
import sys
import threading

SIZE = 32  # bytes of C's fenv_t on Linux and x86-64; the last four are the register MXCSR
FLUSH = 0x8040  # its bits FTZ and DAZ: denormal results are 0, and denormal operands count as 0


class Flushing(threading.local):
    """Compute with 0 in place of denormal numbers in the calling thread, inside a `with` block.

    ONNX Runtime's `session.set_denormal_as_zero` affects the threads of its pools and, permanently, the thread that
    created the first session of the process. NumPy would flush denormal numbers in that thread, too.
    """

    def __init__(self) -> None:
        libc = ctypes.PyDLL(None)
        self._get, self._set = libc.fegetenv, libc.fesetenv
        before, now = ctypes.create_string_buffer(SIZE), ctypes.create_string_buffer(SIZE)
        self._get(now)
        register = int.from_bytes(now.raw[-4:], "little") | FLUSH
        flushing = ctypes.create_string_buffer(now.raw[:-4] + register.to_bytes(4, "little"), SIZE)
        self._buffers = before, flushing
        self._before, self._flushing = map(ctypes.c_void_p, map(ctypes.addressof, self._buffers))

    def __enter__(self) -> None:
        self._get(self._before)
        self._set(self._flushing)

    def __exit__(self, *_: object) -> None:
        self._set(self._before)


def supported() -> bool:
    """Return whether `Flushing` works here: on Linux and x86-64."""
    return sys.platform == "linux" and platform.machine() == "x86_64"

"""Run a test file as a program whose kernels are compiled with AddressSanitizer and UndefinedBehaviorSanitizer."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from graphopt.targets.native import toolchain

_FLAGS = ("-fsanitize=address,undefined", "-fno-sanitize=alignment", "-fno-sanitize-recover=undefined")
# Each tensor has memory of its own, so that a sanitizer sees what is beside it.
APART = {"enable_cpu_mem_arena": False, "enable_mem_pattern": False, "enable_mem_reuse": False}


def _libraries() -> str | None:
    """Return the libraries to load first: libasan, and what throws exceptions, which it looks for at the start."""
    names = ("libasan.so", "libstdc++.so.6")
    ask = [[toolchain.compiler()[0], f"-print-file-name={name}"] for name in names]  # type: ignore[index]
    found = [subprocess.run(each, capture_output=True, text=True, check=False).stdout.strip() for each in ask]
    return " ".join(found) if all(map(os.path.isabs, found)) else None


def run_sanitized(file, *arguments, cache) -> str:
    """Run a program that calls `sanitize`, and return what it prints; skip the test without a sanitizer."""
    libraries = _libraries() if sys.platform == "linux" else None
    if libraries is None:
        pytest.skip("no libasan")
    environment = {
        **os.environ,
        "LD_PRELOAD": libraries,
        "ASAN_OPTIONS": "detect_leaks=0",
        "XDG_CACHE_HOME": str(cache),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, file, *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-500:] + done.stderr[-3000:]
    return done.stdout


def sanitize() -> None:
    """Compile the kernels of this process with the sanitizers."""
    del os.environ["LD_PRELOAD"]  # for the compiler, which this process starts
    toolchain.FLAGS = (*toolchain.FLAGS, *_FLAGS, "-O1", "-fno-omit-frame-pointer", "-g1")

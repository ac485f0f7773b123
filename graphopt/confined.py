"""Run a program in a process of its own, with limits of time and memory: files of others may crash or never end."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError

# A system without one of the limits goes without it.
_LIMITED = 'ulimit -t {} 2>/dev/null; ulimit -v {} 2>/dev/null; exec "$@"'


def confined(arguments: Sequence[str], *, megabytes: int, seconds: int) -> list[str]:
    """Return the command of a process of Python that may take so much memory and processor time."""
    shell = ["/bin/sh", "-c", _LIMITED.format(seconds, megabytes * 1024), "sh"] if os.name == "posix" else []
    return [*shell, sys.executable, *arguments]


def answer(program: Path, asked: str, what: str, *, megabytes: int, seconds: int) -> dict[str, Any]:
    """Return the answer in JSON of a program that reads JSON.

    Args:
        program: a file in Python, which imports nothing of graphopt.
        asked: JSON.
        what: what the process reads, for errors.
        megabytes: the memory that it may take.
        seconds: the processor time that it may take.

    Raises:
        GraphoptError: the process needs more, or crashes.
    """
    try:
        done = subprocess.run(
            confined([str(program)], megabytes=megabytes, seconds=seconds),
            input=asked.encode(),
            capture_output=True,
            timeout=2 * seconds,
            check=True,
        )
        return dict(json.loads(done.stdout))
    except (subprocess.TimeoutExpired, subprocess.CalledProcessError) as error:
        raise GraphoptError(
            f"expected {what} within {seconds} s and {megabytes:,} MB, found one that needs more, or crashes"
        ) from error

"""Type commands and programs as a person does, in a folder of its own, and count them."""

from __future__ import annotations

import os
import resource
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Desk:
    """Run the graphopt of a checkout, and count what was typed and what was refused.

    Args:
        checkout: the repository whose graphopt runs.
        folder: where everything is written.
    """

    checkout: Path
    folder: Path
    commands: int = 0
    lines: int = 0
    refusals: list[str] = field(default_factory=list)
    tracebacks: int = 0
    _started: float = field(default_factory=lambda: _seconds())

    def has(self, place: str) -> bool:
        """Return whether the checkout has a file or a folder."""
        return (self.checkout / place).exists()

    def graphopt(self, *words: str, limit: int | None = None) -> str:
        """Type a command of graphopt; return what it prints.

        Args:
            words: the arguments.
            limit: the largest size of a file that it can write, in blocks of 1,024 bytes, as on a full disk.
        """
        command = [sys.executable, "-m", "graphopt", *words]
        return self.command(*(command if limit is None else ["bash", "-c", f'ulimit -f {limit}; "$@"', "-", *command]))

    def command(self, *words: str) -> str:
        """Type a command; return what it prints."""
        self.commands += 1
        return self._noted(self.start(words).communicate()[0])

    def python(self, program: str) -> str:
        """Write a program and run it; return what it prints."""
        self.lines += sum(bool(line.strip()) for line in program.splitlines())
        return self._noted(self.start([sys.executable, "-c", program]).communicate()[0])

    def start(self, words: Sequence[str]) -> subprocess.Popen[str]:
        """Start a command without waiting for its end."""
        environment = {
            **os.environ,
            "PYTHONPATH": str(self.checkout),
            "OMP_NUM_THREADS": "1",
            "COLUMNS": "200",
        }
        pipe = subprocess.PIPE
        self._running = subprocess.Popen(
            words, cwd=self.folder, env=environment, text=True, stdout=pipe, stderr=subprocess.STDOUT
        )
        return self._running

    def _noted(self, said: str) -> str:
        if self._running.returncode:
            self.refusals.append(said.strip().splitlines()[-1] if said.strip() else "")
            self.tracebacks += "Traceback" in said
        return said

    def row(self, role: str, result: str) -> str:
        """Return a row of the table in guides/first_days.md."""
        seconds = f"{_seconds() - self._started:.0f}"
        numbers = [self.commands, self.lines, len(self.refusals), self.tracebacks]
        return f"| {role} | {' | '.join(map(str, numbers))} | {seconds} | {result} |"


def _seconds() -> float:
    """Return the processor time of all programs that have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime

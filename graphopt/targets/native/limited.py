"""Run a command that may take too much time or memory, and that must not outlive this process."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
from collections.abc import Sequence
from pathlib import Path

from graphopt.errors import GraphoptError

SECONDS = 300
BYTES = 2**32

# The shell's input is a pipe from this process. It ends when this process ends, however that happens; then the whole
# group of processes does. A system without one of the limits goes without it.
_WATCHED = """ulimit -c 0; ulimit -t {seconds} 2>/dev/null; ulimit -v {kilobytes} 2>/dev/null; exec 3<&0
(read _ <&3; kill -9 0) >/dev/null 2>&1 &
"$@" </dev/null 3<&- &
wait $!"""


def run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Return the exit code of a command and what it says about errors.

    Args:
        folder: a folder for temporary files.

    Raises:
        GraphoptError: it takes longer than `SECONDS`.
    """
    shell = shutil.which("sh") if os.name == "posix" else None
    watched = _WATCHED.format(seconds=SECONDS, kilobytes=BYTES // 1024)
    whole = [shell, "-c", watched, "sh", *command] if shell else list(command)
    with (folder / "errors").open("w+", errors="replace") as errors:
        process = subprocess.Popen(
            whole,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=bool(shell),
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        )
        try:
            code = process.wait(SECONDS)
        except subprocess.TimeoutExpired as error:
            raise GraphoptError(
                f"native: expected {command[0]} to compile the kernels in {SECONDS} seconds, found that it takes longer"
            ) from error
        finally:
            _end(process, is_group=bool(shell))
        errors.seek(0)
        return code, errors.read(2**16)


def _end(process: subprocess.Popen[bytes], is_group: bool) -> None:
    """End a process with all that it started."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
        if is_group:
            os.killpg(process.pid, signal.SIGKILL)
        else:
            process.kill()
    assert process.stdin is not None
    process.stdin.close()
    process.wait()

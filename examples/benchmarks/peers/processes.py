"""Run peers as processes, controlled by the protocol of `protocol.py`, each on as many cores as threads.

0 threads mean all cores.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
PATIENCE = 900  # seconds that a peer may take to compile, or for a round
ENDING = 30  # seconds that it may take to end

# peers: the script, the environment and the words of the variant of each
PEERS = {
    "graphopt": ("graphopt_peer", "graphopt", "native"),
    "graphopt-high": ("graphopt_peer", "graphopt", "native high"),
    "graphopt-medium": ("graphopt_peer", "graphopt", "native medium"),
    "graphopt-in-place": ("graphopt_peer", "graphopt", "native in-place"),
    "graphopt-run": ("graphopt_peer", "graphopt", "native run"),
    "graphopt-plain": ("graphopt_peer", "graphopt", ""),
    "graphopt-1.19": ("graphopt_peer", "graphopt-training", "native"),
    "graphopt-1.19-fused": ("graphopt_peer", "graphopt-training", "fused"),
    "torch": ("torch_peer", "torch", ""),
    "torch-compile": ("torch_peer", "torch", "compile"),
    "torch-medium": ("torch_peer", "torch", "medium"),
    "torch-compile-medium": ("torch_peer", "torch", "compile medium"),
    "torch-autocast": ("torch_peer", "torch", "bfloat16"),
    "torch-compile-autocast": ("torch_peer", "torch", "compile bfloat16"),
    "jax": ("jax_peer", "jax", ""),
    "onnxruntime-training": ("onnxruntime_training_peer", "onnxruntime-training", ""),
    "onnxsim": ("onnxsim_peer", "onnxsim", ""),
    "limit": ("limit", "graphopt", ""),
}


class Failure(Exception):
    """Report why a peer ended."""


class Process:
    """Hold a running peer: `say` writes a line to it, `hear` returns its answer.

    Args:
        peer: the script, and the words of its variant.
        patience: the seconds after which `hear` ends the process.
    """

    def __init__(
        self,
        python: Path,
        peer: tuple[str, str],
        folder: Path,
        workload: str,
        optimizer: str,
        threads: int,
        patience: float = PATIENCE,
    ) -> None:
        script, variant = peer
        command = [str(python), str(HERE / f"{script}.py"), str(folder), workload, optimizer]
        self._log, self.patience = folder / f"{workload} {script} {variant}.log", patience
        with self._log.open("w") as log:
            self._process = subprocess.Popen(
                [*command, "--threads", str(threads), "--variant", variant],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                text=True,
                env={**os.environ, **({"OMP_NUM_THREADS": str(threads)} if threads else {})},
                preexec_fn=confined(threads),
            )

    def say(self, line: str) -> None:
        assert self._process.stdin is not None
        self._process.stdin.write(line + "\n")
        self._process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        """Return the next JSON line.

        Raises:
            Failure: the process ended, or took too long.
        """
        assert self._process.stdout is not None
        timer = threading.Timer(self.patience, self._process.kill)
        timer.start()
        try:
            for line in self._process.stdout:
                if line.startswith("{"):
                    found: dict[str, Any] = json.loads(line)
                    return found
        finally:
            timer.cancel()
        code = self._process.wait()
        raise Failure(reason(self._log.read_text(), code, self.patience))

    def close(self) -> None:
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.close()
        try:
            self._process.wait(ENDING)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()


def confined(cores: int) -> Callable[[], None] | None:
    """Return a function that restricts a new process to some cores, or None if this is not wanted or not possible."""
    if not cores or not hasattr(os, "sched_setaffinity"):
        return None
    chosen = sorted(os.sched_getaffinity(0))[:cores]
    return lambda: os.sched_setaffinity(0, chosen)


def reason(errors: str, code: int, patience: float = PATIENCE) -> str:
    """Return the line of a traceback that names the error."""
    if code < 0:
        return f"ended by signal {-code}" + (f": out of memory, or over {patience:.0f} s" if code == -9 else "")
    lines = [line.strip() for line in errors.splitlines() if line.strip()]
    named = [line for line in lines if re.match(r"[\w.]*(Error|Exception|Fail)\b.*: ", line)]
    return (named or lines or [f"ended with {code}"])[-1][:250]

"""Start the workers of a training run, or join those that MPI has started."""

from __future__ import annotations

import ctypes
import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any, Literal

from graphopt.communicator import SINGLE, Communicator
from graphopt.distributed.mpi import MPI
from graphopt.errors import GraphoptError
from graphopt.fields import check_intervals
from graphopt.intervals import within
from graphopt.training.signals import handling

# Variables that mpiexec and srun set in the processes that they start.
RANKS = ("OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK")
# Open MPI 4 and 5: use any core, and start more processes than there are cores.
ANY_CORE = {
    "OMPI_MCA_hwloc_base_binding_policy": "none",
    "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe",
}
# Workers of one machine exchange arrays by shared memory, and listen on no network.
NO_NETWORK = {"OMPI_MCA_btl": "^tcp"}
OPEN_MPI_5 = re.compile(r"Open MPI\) ([5-9]|\d\d)\.")  # and later: they tolerate faults
WORKERS_END = getattr(signal, "SIGUSR1", signal.SIGTERM)
# The command, which searches the same folders for modules as this process. `python -m` would search the working
# directory first, where files of someone else may lie.
COMMAND = "import sys; sys.path[:] = {path!r}; import runpy; runpy.run_module('graphopt', None, '__main__', True)"
RunCommand = Callable[[Sequence[str]], int]
AS_ROOT = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}


@dataclass(frozen=True)
class Launcher:
    """Train in this process only. A subclass has several workers.

    Args:
        sync_every: the number of steps after which workers average their weights, as `graphopt.LocalSGD` does; None
            to average their gradients in each step, as `graphopt.DataParallel` does.
        outer: as in `graphopt.LocalSGD`.
        statistics: as in `graphopt.split_step`.

    Raises:
        GraphoptError: a number is outside its interval, or an option is unknown.
    """

    sync_every: int | None = within("[1, inf)", None, whole=True, kw_only=True)
    outer: Any = field(default=None, kw_only=True)
    statistics: Literal["synchronized", "local"] = field(default="synchronized", kw_only=True)

    def __post_init__(self) -> None:
        check_intervals(self)
        if self.statistics not in ("synchronized", "local"):
            raise GraphoptError(f"launcher.statistics: expected 'synchronized' or 'local', found {self.statistics!r}")
        if self.outer is not None and not hasattr(self.outer, "slots"):
            raise GraphoptError(
                f"launcher.outer: expected an optimizer such as {{_target_: passes.SGD}}, found {self.outer!r}"
            )
        if self.outer is not None and self.sync_every is None:
            raise GraphoptError("launcher.outer: expected sync_every with it, found none: set launcher.sync_every")

    def starts(self) -> bool:
        """Return whether `start` is to start the workers; otherwise this process is one of them."""
        return False

    def start(self, arguments: Sequence[str], folder: Path, run: RunCommand) -> None:
        """Start the workers, wait for their end, and exit.

        Args:
            arguments: those of the `graphopt` command.
            folder: the folder of the run.
            run: runs the command in this process.
        """

    def communicator(self) -> Communicator:
        """Join the other workers."""
        return SINGLE


@dataclass(frozen=True)
class MPILauncher(Launcher):
    """Train with the processes that `mpiexec` or `srun` has started.

    Args:
        timeout: the seconds after which the run ends if a worker does not answer.
    """

    timeout: float = within("(0, inf)", 300.0)

    def communicator(self) -> Communicator:
        return MPI(self.timeout)


@dataclass(frozen=True)
class LocalLauncher(MPILauncher):
    """Train with several processes of this machine, which `mpiexec` starts.

    SIGINT, SIGTERM and SIGHUP reach the workers as SIGUSR1: `mpiexec` passes it on, but kills them after the others.

    Args:
        workers: the number of processes; None for one on each core.
    """

    workers: int | None = within("[1, inf)", None, whole=True)

    def starts(self) -> bool:
        return not any(name in os.environ for name in RANKS)

    def start(self, arguments: Sequence[str], folder: Path, run: RunCommand) -> None:
        own = str(Path(sys.executable).parent)
        mpiexec = shutil.which("mpiexec", path=own) or shutil.which("mpiexec")
        if mpiexec is None:
            raise GraphoptError(
                "launcher=local: expected the program mpiexec, found none: pip install graphopt[mpi], or install Open "
                "MPI or MPICH"
            )
        for name, value in NO_NETWORK.items():  # of this process, too
            os.environ.setdefault(name, value)
        MPI(None)  # raises an error if mpi4py is missing
        environment = {**ANY_CORE, **(AS_ROOT if os.geteuid() == 0 else {}), **_terminal(), **os.environ}
        command = [mpiexec, *self._tolerance(mpiexec), "-n", str(self.workers or os.cpu_count() or 1)]
        sys.stdout.flush()
        process = subprocess.Popen(
            [*command, sys.executable, "-c", COMMAND.format(path=sys.path), *arguments],
            env=environment,
            start_new_session=True,
            preexec_fn=_end_with_parent if sys.platform == "linux" else None,
        )
        with passing_on_signals(
            lambda _: process.send_signal(WORKERS_END), lambda _: process.send_signal(signal.SIGTERM)
        ) as received:
            code = process.wait()
        raise SystemExit(128 + received[0] if received else code)

    def _tolerance(self, mpiexec: str) -> list[str]:
        """Return the options with which workers that train separately survive the death of one of them."""
        if self.sync_every is None:
            return []
        said = subprocess.run([mpiexec, "--version"], capture_output=True, text=True).stdout
        return ["--with-ft", "ulfm"] if OPEN_MPI_5.search(said) else []


@contextmanager
def passing_on_signals(end: Callable[[int], None], end_now: Callable[[int], None]) -> Iterator[list[int]]:
    """Handle signals that ask the process to end, in a `with` block, and return a list of those that have arrived.

    Args:
        end: lets the workers end after a step, at the first signal.
        end_now: ends them at once, at the next ones.
    """
    received: list[int] = []

    def called(number: int, frame: FrameType | None) -> None:
        received.append(number)
        (end if len(received) == 1 else end_now)(number)

    with handling(called):
        yield received


def _end_with_parent() -> None:
    """Ask the kernel to end this process when its parent ends (PR_SET_PDEATHSIG of prctl)."""
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


def _terminal() -> dict[str, str]:
    """Return variables that tell rich about this process's output, since mpiexec gives each worker a terminal."""
    if sys.stdout.isatty():
        return {"COLUMNS": str(shutil.get_terminal_size().columns)}
    return {"TTY_COMPATIBLE": "0", "TTY_INTERACTIVE": "0"}

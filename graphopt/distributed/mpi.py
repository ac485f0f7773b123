"""Exchange numbers between workers by MPI."""

from __future__ import annotations

import atexit
import contextlib
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np

from graphopt.communicator import Communicator, WorkerLost
from graphopt.errors import GraphoptError, line

LATE_CODE = 124  # the exit code after the time limit, as that of `timeout`
# Open MPI 5.0 sends and receives at the same time only if it has two connections, and then sums take half the time. A
# thread that waits for others leaves its core to one that computes.
_SETTINGS = {"OMPI_MCA_btl_tcp_links": "2", "OMPI_MCA_mpi_yield_when_idle": "1"}


class MPI(Communicator):
    """Exchange numbers between the processes that `mpiexec` has started, by mpi4py.

    If one of them does not answer within the time limit, because its process stands still or the network is cut, all
    end with exit code 124. If one of them dies, MPI ends the others, unless it tolerates faults (ULFM): `mpiexec
    --with-ft ulfm` of Open MPI 5 and later.

    Args:
        timeout: the time limit of each exchange in seconds, or None. The first steps compile kernels, and a validation
            reads data: an exchange waits for the slowest worker.

    Raises:
        GraphoptError: mpi4py or its MPI library is not installed.

    >>> graphopt.MPI().size
    1
    """

    _has_lost = False  # whether a worker has died, of all communicators of this process

    def __init__(self, timeout: float | None = 300.0) -> None:
        try:
            import mpi4py

            os.environ |= {**_SETTINGS, **os.environ}
            mpi4py.rc.finalize = False  # `_finish` does it
            from mpi4py import MPI as library  # noqa: N811
        except (ImportError, RuntimeError) as error:
            raise GraphoptError(
                f"launcher: expected mpi4py with an MPI library, found none ({line(error)}): "
                f"pip install graphopt[mpi], and install Open MPI or MPICH"
            ) from error
        self._library, self._in_place = library, library.IN_PLACE
        self._world: Any = library.COMM_WORLD
        self.rank, self.size = self._world.rank, self._world.size
        machine = self._world.Split_type(library.COMM_TYPE_SHARED)
        self.local_rank, self.local_size = machine.rank, machine.size
        self._may_lose = hasattr(self._world, "Agree")  # since mpi4py 4.1
        self._waits_since: float | None = None
        if timeout is not None and self.size > 1:
            threading.Thread(target=self._watch, args=[timeout], daemon=True).start()
        atexit.register(self._finish)

    def sum(self, array: np.ndarray) -> None:
        if self.size == 1:
            return
        if array.dtype == np.float16:  # MPI has no such type
            wide = array.astype(np.float32)
            self.sum(wide)
            array[...] = wide
            return
        with self._waiting():
            self._world.Allreduce(self._in_place, array)

    def gather(self, content: bytes) -> list[bytes]:
        sizes = np.zeros(self.size, np.int64)
        sizes[self.rank] = len(content)
        self.sum(sizes)
        gathered = np.empty(sizes.sum(), np.uint8)
        with self._waiting():
            self._world.Allgatherv(np.frombuffer(content, np.uint8), [gathered, sizes])
        return [part.tobytes() for part in np.split(gathered, np.cumsum(sizes)[:-1])]

    def regroup(self, *, is_whole: bool) -> list[int]:
        if self.size == 1 or not self._may_lose:
            return []
        try:
            with self._waiting():
                is_whole = bool(self._world.Agree(is_whole))
        except WorkerLost:
            is_whole = False
        if is_whole:
            return []
        before = self._world
        with self._waiting():
            self._world = before.Shrink()
        new = before.group.Translate_ranks(None, self._world.group)
        lost = [rank for rank, own in enumerate(new) if own == self._library.UNDEFINED]
        self.rank, self.size = self._world.rank, self._world.size
        MPI._has_lost = True
        if 0 in lost:
            raise GraphoptError(
                "worker 0: expected the worker that writes the run's files, found it dead; resume=true continues from "
                "the last checkpoint"
            )
        return lost

    def abort(self, code: int) -> None:
        sys.stdout.flush()
        sys.stderr.flush()
        self._world.Abort(code)

    def _finish(self) -> None:
        """End the use of MPI as the process ends.

        After a worker has died, MPI_Finalize of Open MPI may wait for it without end. The others then wait here
        instead, because `mpiexec` may end all once one exits.
        """
        if not MPI._has_lost:
            if not self._library.Is_finalized():
                self._library.Finalize()
            return
        sys.stdout.flush()
        sys.stderr.flush()
        with contextlib.suppress(self._library.Exception):
            self._world.Barrier()

    @contextmanager
    def _waiting(self) -> Iterator[None]:
        """Limit the time of a block that waits for all workers.

        Raises:
            WorkerLost: one of them has died.
        """
        self._waits_since = time.monotonic()
        try:
            yield
        except self._library.Exception as error:
            library = self._library
            lost = (library.ERR_PROC_FAILED, library.ERR_REVOKED) if self._may_lose else ()
            if error.Get_error_class() not in lost:
                raise
            self._world.Revoke()  # all others stop to wait, too
            raise WorkerLost(
                f"expected an answer of {self.size} workers, found one of them dead; resume=true continues from the "
                f"last checkpoint"
            ) from error
        finally:
            self._waits_since = None

    def _watch(self, timeout: float) -> None:
        """End all workers if an exchange takes longer than the time limit."""
        while True:
            time.sleep(min(1.0, timeout / 4))
            since = self._waits_since
            if since is not None and time.monotonic() - since > timeout:
                print(
                    f"graphopt: error: worker {self.rank} of {self.size}: expected an answer of all workers within "
                    f"{timeout:g} s, found none: a process stands still or the network is cut; resume=true continues "
                    f"from the last checkpoint",
                    file=sys.stderr,
                )
                self.abort(LATE_CODE)

"""Declare how the processes of one training run, its workers, exchange numbers."""

from __future__ import annotations

import contextlib
import hashlib
import json
import mmap
import os
import warnings
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError


class WorkerLost(GraphoptError):
    """Report that a worker has died while the others waited for it."""


class Communicator:
    """Exchange numbers between workers. This class has one worker; a subclass knows the others.

    A subclass sets `rank` and `size`, and implements `sum`, `gather` and `abort`. All workers call the same methods in
    the same order.

    Attributes:
        rank: the number of this worker, from 0.
        size: the number of workers.
        local_rank: the number of this worker on its machine, from 0.
        local_size: the number of workers on this machine.

    >>> import numpy
    >>> from graphopt.communicator import Communicator
    >>> alone, numbers = Communicator(), numpy.ones(3)
    >>> alone.sum(numbers)
    >>> alone.size, alone.gather(b"state"), numbers.tolist()
    (1, [b'state'], [1.0, 1.0, 1.0])
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    def sum(self, array: np.ndarray) -> None:
        """Replace a contiguous array by its sum over all workers, in place."""

    def gather(self, content: bytes) -> list[bytes]:
        """Return the bytes that each worker gives, in the order of their ranks."""
        return [content]

    def shared_memory(self, size: int) -> np.ndarray | None:
        """Return `size` bytes, zeros at first, that all workers read and write where they lie; None if they cannot.

        They can on one machine with Linux, where `/proc` gives a worker the first one's anonymous file. The memory is
        free again once no worker refers to it.
        """
        if self.local_size < self.size or not hasattr(os, "memfd_create"):
            return None
        own = memory = None
        with contextlib.suppress(OSError):
            if self.leads:
                own = open(os.memfd_create("graphopt"), "r+b")  # noqa: SIM115
                own.truncate(size)
        path = self.gather_json(own and f"/proc/{os.getpid()}/fd/{own.fileno()}")[0]
        with contextlib.suppress(OSError), open(path or "", "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        is_missing = self.any(memory is None)[0]  # the first worker's file stays open until all have it
        if own:
            own.close()
        return None if memory is None or is_missing else np.frombuffer(memory, np.uint8)

    def wait(self) -> None:
        """Wait until all workers have called this."""
        self.any(False)

    def regroup(self, *, is_whole: bool) -> list[int]:
        """Go on without workers that have died, and return the ranks that they had. A subclass may be able to.

        All workers call this after exchanges of which each needs to know whether they have succeeded for all. `rank`
        and `size` change.

        Args:
            is_whole: whether this worker's exchanges have succeeded, without a `WorkerLost`.

        Raises:
            GraphoptError: the first worker has died, which writes the run's files.
        """
        return []

    def asked_to_end(self) -> bool:
        """Return whether this worker is to end after this step, for another reason than a signal."""
        return False

    def abort(self, code: int) -> None:
        """End all workers at once with an exit code, without waiting for them."""

    @property
    def leads(self) -> bool:
        """Return whether this is the worker that prints and writes files."""
        return self.rank == 0

    def any(self, *flags: bool) -> list[bool]:
        """Return for each flag whether any worker has raised it."""
        if self.size == 1:
            return list(flags)
        counts = np.array(flags, np.float64)
        self.sum(counts)
        return [bool(count) for count in counts]

    def share(self, length: int) -> slice:
        """Return this worker's part of a batch: neighbouring rows, as equal in number as possible."""
        return slice(length * self.rank // self.size, length * (self.rank + 1) // self.size)

    def gather_json(self, value: Any) -> list[Any]:
        """Return the value that each worker gives, in the order of their ranks; values are written as JSON."""
        if self.size == 1:
            return [value]
        return [json.loads(content) for content in self.gather(json.dumps(value).encode())]

    def check_alike(self, facts: Mapping[str, str]) -> None:
        """Check that all workers have the same files, versions and options.

        Args:
            facts: texts or SHA-256 sums by name.

        Raises:
            GraphoptError: a worker differs.
        """
        for name, texts in zip(facts, zip(*self.gather_json(list(facts.values())), strict=True), strict=True):
            for rank, other in enumerate(texts):
                if other != texts[0]:
                    raise GraphoptError(
                        f"worker {rank}: expected {name} {_short(texts[0])} as worker 0 has, found {_short(other)}: "
                        f"give all workers the same files, versions and options"
                    )


SINGLE = Communicator()


class Survivors(Communicator):
    """Exchange numbers between the workers of another communicator, and go on without those that die.

    An exchange during which a worker dies is repeated without it. A warning names the worker.

    Args:
        workers: a communicator that can `regroup`; with another one, the death of a worker is an error.
    """

    def __init__(self, workers: Communicator) -> None:
        self._workers = workers
        self._read()

    def sum(self, array: np.ndarray) -> None:
        own = array.copy()
        while self.lost_in(lambda: self._workers.sum(array)):
            array[...] = own

    def gather(self, content: bytes) -> list[bytes]:
        contents: list[bytes] = []
        while self.lost_in(lambda: contents.extend(self._workers.gather(content))):
            contents.clear()
        return contents

    def asked_to_end(self) -> bool:
        return self._workers.asked_to_end()

    def abort(self, code: int) -> None:
        self._workers.abort(code)

    def lost_in(self, exchange: Callable[[], None]) -> list[int]:
        """Return the ranks of the workers that have died in an exchange, whose result then does not count.

        Raises:
            WorkerLost: the other workers cannot go on.
        """
        before, error = self.size, None
        try:
            exchange()
        except WorkerLost as lost_worker:
            error = lost_worker
        lost = self._workers.regroup(is_whole=error is None)
        if error and not lost:
            raise error
        self._read()
        if lost and self.leads:
            warnings.warn(
                f"worker {', '.join(map(str, lost))} of {before}: expected an answer, found it dead; {self.size} go on",
                stacklevel=3,
            )
        return lost

    def _read(self) -> None:
        workers = self._workers
        self.rank, self.size = workers.rank, workers.size
        self.local_rank, self.local_size = workers.local_rank, workers.local_size


def digest(content: bytes) -> str:
    """Return the SHA-256 sum of bytes."""
    return hashlib.sha256(content).hexdigest()


def _short(text: str) -> str:
    return f"{text[:12]}..." if len(text) == 64 else text

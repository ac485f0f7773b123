"""Run the first step's check in a thread while steps train; nothing that they train is read before its verdict."""

from __future__ import annotations

import threading

from graphopt.runtime.checks.findings import Disagreement
from graphopt.runtime.checks.first_check import FirstCheck, Undecided
from graphopt.runtime.checks.slopes import Arrays
from graphopt.runtime.state_buffers import StateBuffers


class CheckBeside:
    """Hold a thread that checks a training graph by copies of its state and a batch.

    Args:
        check: the check, from `FirstCheck.beside`.
        buffers: the state, which is put back if the check fails.
        batch: the first batch.
    """

    def __init__(self, check: FirstCheck, buffers: StateBuffers, batch: Arrays) -> None:
        self._check, self._buffers, self._batch = check, buffers, batch
        self._state, self._batches = buffers.arrays(), buffers.batches
        self._error: Exception | None = None
        self._thread = threading.Thread(target=self._run, name="the check of the first step")
        self._thread.start()

    def _run(self) -> None:
        try:
            self._check.copy_model()
            self._check.check(self._batch)
        except Exception as error:  # noqa: BLE001 (the thread that trains raises it)
            self._error = error

    @property
    def is_running(self) -> bool:
        return self._thread.is_alive()

    def verdict(self) -> None:
        """Wait for the verdict; if some tokens of the batch are not enough, check all of it.

        Raises:
            Disagreement: an output, a gradient or an update differs. The state is that before the first step.
        """
        self._thread.join()
        error = self._error
        if isinstance(error, Undecided):
            self._check.is_beside, error = False, None
            try:
                self._check.check(self._batch)
            except Disagreement as found:
                error = found
        if error is not None:
            self._buffers.update(self._state)
            self._buffers.batches = self._batches
            raise error

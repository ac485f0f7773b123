"""Train several workers apart, and average their weights every few steps."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

import numpy as np
import onnx_ir as ir

from graphopt.communicator import SINGLE, Communicator, Survivors
from graphopt.compiler import outer_step
from graphopt.distributed.round_buffers import RoundBuffers
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source
from graphopt.pipeline import Step
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.executor import Executor, NonFiniteLoss
from graphopt.runtime.reported_outputs import numbers
from graphopt.runtime.several_steps import Batch
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, rows_of

DROPPED = 3  # rounds in succession: no worker's bad luck any more


@dataclass(kw_only=True, eq=False, repr=False)
class LocalSGD(Executor):
    """Run training steps on each worker's own rows, and let the workers meet every `sync_every` steps.

    The steps between two synchronisations are a round. At its end, the workers average what they have subtracted from
    the weights, and an outer optimizer updates the weights of the last synchronisation by it. This is DiLoCo (Douillard
    et al. 2023), with AdamW inside and Nesterov's momentum outside; with `outer=passes.SGD(1.0)`, the new weights are
    the mean over the workers, which is local SGD (Stich 2019). Running statistics of BatchNormalization are averaged.
    Moments and other slots of the optimizer in the training graph are each worker's own; a run that resumes gives all
    workers the first one's.

    `state`, `evaluate`, `trained` and checkpoints have the weights of the last synchronisation, and the slots of this
    worker. `fit` validates them after each epoch, and lets the workers meet after the last one. Signals, callbacks'
    requests and checkpoints that are due wait for a synchronisation. A step reports the numbers of the worker's own
    rows; records of epochs have means over all workers.

    If the loss or the state of a worker is not finite, or what it has computed is missing, all workers drop the round:
    a warning names the worker, and the weights return to the last synchronisation. The third round in succession is an
    error. `on_nonfinite="skip"` only skips the step. If a worker dies, and MPI tolerates faults (see `graphopt.MPI`),
    the others drop the round, too, and go on without it; without the first worker, they end.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.
        communicator: the workers, such as `graphopt.MPI()`.
        sync_every: the number of steps of a round.
        outer: the optimizer that updates the weights; `passes.SGD(0.7, momentum=0.9, nesterov=True)` by default, for
            hundreds of rounds. In fewer rounds, a momentum of 0.5 overshoots less.

    Raises:
        GraphoptError: as `Executor` does, or the workers have different options.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.LocalSGD(step, sync_every=2, outer=passes.SGD(1.0))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> losses = [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    >>> losses, round(executor.evaluate(x=zero, target=one)["loss"], 4), executor.is_synchronized
    ([1.0, 0.64, 0.4096], 0.4096, False)
    """

    communicator: Communicator = field(default_factory=lambda: SINGLE)
    sync_every: int = 50
    outer: Step | None = None

    def __post_init__(self, step: Source) -> None:
        if self.sync_every < 1:
            raise GraphoptError(f"sync_every: expected 1 or more, found {self.sync_every}")
        if self.in_place:
            raise GraphoptError(
                "in_place: expected an executor that drops no round, found LocalSGD, which may return to an "
                "earlier state: leave it out"
            )
        self.communicator.check_alike(
            {"sync_every": str(self.sync_every), "outer": repr(self.outer), "on_nonfinite": self.on_nonfinite}
        )
        self._survivors = Survivors(self.communicator)
        self.steps_per_call = 1
        self._done = 0  # steps of this round
        self._dropped = 0  # rounds that were dropped in succession
        self._failure: str | None = None  # of this worker in this round
        super().__post_init__(step)

    def _buffers_of(self, model: ir.Model) -> StateBuffers:
        self._rounds = RoundBuffers(
            self._device, model, outer_step(model, self.outer), self.communicator.size
        )
        return self._rounds

    @property
    def workers(self) -> Communicator:
        return self._survivors

    @property
    def is_synchronized(self) -> bool:
        return self._done == 0

    @property
    def bytes_per_step(self) -> float:
        """Return the size of what this worker sums with the others, divided by the number of steps of a round."""
        return self._rounds.flat.nbytes / self.sync_every

    def set_batches(self, count: int) -> None:
        super().set_batches(count)
        self._rounds.begin()
        self._done, self._failure = 0, None

    def step(  # type: ignore[misc]
        self, data: Mapping[str, Tensor] | None = None, /, **named: Tensor
    ) -> Reported:
        """Run one step as `Executor.step` does, and synchronise the workers if it is the last one of the round.

        A worker without rows runs no step, but meets the others.

        Raises:
            GraphoptError: as `Executor.step` does.
            NonFiniteLoss: the workers have dropped the third round in succession.
        """
        feeds = {**(data or {}), **named}
        with self._lock:
            if rows_of(feeds):
                reported = super().step(feeds)
            else:
                self.set_hyperparameters(**self._split(feeds)[0])
                reported = dict.fromkeys(numbers(self._model.graph.outputs, self._report), 0.0)
                self._batches += 1
            self._done += 1
            if self._done == self.sync_every:
                self.synchronize()
            return reported

    def synchronize(self) -> None:
        """Let the workers meet and begin a new round, unless they have just met. All of them call this.

        Raises:
            NonFiniteLoss: the workers have dropped the third round in succession.
        """
        with self._lock:
            if self.is_synchronized:
                return
            rounds, workers = self._rounds, self._survivors
            rounds.present[...] = 0
            is_finite = rounds.collect()
            if self._failure is None and is_finite:
                rounds.present[workers.rank] = 1
            else:
                rounds.flat[...] = 0
            missing = workers.lost_in(lambda: self.communicator.sum(rounds.flat))
            missing = missing or np.flatnonzero(rounds.present[: workers.size] != 1).tolist()
            rounds.flat /= workers.size
            kept = not missing and rounds.apply()
            rounds.begin()
            self._dropped = 0 if kept else self._dropped + 1
            if not kept:
                self._tell_dropped(missing)
            self._done, self._failure = 0, None

    def _steps(self, left: Iterator[Batch], chosen: int | None) -> Iterator[Reported]:
        return super()._steps(left, 1)

    def _tell_dropped(self, missing: list[int]) -> None:
        """Warn about a dropped round, or raise an error if it is the last that may be."""
        who = f"worker {', '.join(map(str, missing))}" if missing else "all workers together"
        own = f" ({self._failure})" if self._failure else ""
        message = (
            f"step {self._batches}: expected finite weights of each worker, found others or none of {who}{own}: round "
            f"of {self._done} steps dropped"
        )
        if self._dropped >= DROPPED:
            self._done, self._failure = 0, None
            raise NonFiniteLoss(
                f"{message}, for the third time in succession; lower the learning rate, clip gradients, or look "
                f"for NaN in the data"
            )
        if self.communicator.leads or own:
            warnings.warn(f"{message}; the weights return to the last synchronisation", stacklevel=4)

    def _accept(self, reported: Reported) -> bool:
        try:
            return super()._accept(reported)
        except NonFiniteLoss as error:
            self._failure = self._failure or str(error)
            return False

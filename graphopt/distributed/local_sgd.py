"""Train several workers separately, and average their weights every few steps."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import keywords_of
from graphopt.communicator import Survivors
from graphopt.distributed.exchange import WorkerOptions
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import Role, check_trains, with_role
from graphopt.graph.state import Pruning
from graphopt.graph.values import name_of, value_of
from graphopt.pipeline import Step, check_step
from graphopt.runtime.bound_session import Reported, RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.runners import Rounds, StepRunner
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.steps import NonFiniteLoss, Parts
from graphopt.runtime.tensors import Tensor, buffer, zeros_of

if TYPE_CHECKING:
    import onnxruntime

MOST_DROPPED = 3  # rounds in succession: so many are no accident of a worker


@dataclass(frozen=True, kw_only=True, eq=False)
class LocalSGDOptions(WorkerOptions):
    """Declare the options of `LocalSGD`."""

    sync_every: int = 50
    outer: Step | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.sync_every < 1:
            raise GraphoptError(f"sync_every: expected 1 or more, found {self.sync_every}")
        if self.in_place:
            raise GraphoptError(
                "in_place: expected an executor that drops no round, found LocalSGD, which may return to an "
                "earlier state: leave it out"
            )


class LocalSGD(Executor):
    """Run training steps on each worker's own rows, and synchronize the workers every `sync_every` steps.

    The steps between two synchronizations are a round. At its end, the workers average what they have subtracted from
    the weights, and an outer optimizer updates the weights of the last synchronization by it. This is DiLoCo (Douillard
    et al. 2023), with AdamW inside and Nesterov's momentum outside; with `outer=passes.SGD(1.0)`, the new weights are
    the mean over the workers, which is local SGD (Stich 2019). Running statistics of BatchNormalization are averaged.
    Moments and other slots of the optimizer in the training graph are each worker's own; a run that resumes gives all
    workers the first one's.

    `state`, `evaluate`, `trained` and checkpoints have the weights of the last synchronization, and the slots of this
    worker. `fit` validates them after each epoch, and synchronizes the workers after the last one. Signals, callbacks'
    requests and checkpoints that are due wait for a synchronization. A step reports the numbers of the worker's own
    rows; records of epochs have means over all workers.

    If the loss or the state of a worker is not finite, or what it has computed is missing, all workers drop the round:
    a warning names the worker, and the weights return to the last synchronization. The third round in succession is an
    error. `on_nonfinite="skip"` only skips the step. If a worker dies, and MPI tolerates faults (see `graphopt.MPI`),
    the others drop the round, too, and go on without it; without the first worker, they end. A worker without rows
    runs no step, and takes part in the synchronization.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.
        communicator: the workers, such as `graphopt.MPI()`.
        sync_every: the number of steps of a round.
        outer: the optimizer that updates the weights; `passes.SGD(0.7, momentum=0.9, nesterov=True)` by default, for
            hundreds of rounds. In fewer rounds, a momentum of 0.5 overshoots less.

    Attributes:
        bytes_per_step: the size of what this worker sums with the others, divided by the number of steps of a round.

    Raises:
        GraphoptError: as `Executor` does, or the workers have different options.
        NonFiniteLoss: by `step` and `synchronize`, if the workers drop the third round in succession.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.LocalSGD(step, sync_every=2, outer=passes.SGD(1.0))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> losses = [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    >>> losses, round(executor.evaluate(x=zero, target=one)["loss"], 4), executor.is_synchronized
    ([1.0, 0.64, 0.4096], 0.4096, False)
    """

    Options = LocalSGDOptions
    options: LocalSGDOptions

    @keywords_of(LocalSGDOptions)
    def __init__(self, step: Source, **options: Any) -> None:
        import passes
        from passes.parts.halves import outer_update

        chosen = LocalSGDOptions(**options)
        if chosen.outer is not None:
            check_step(chosen.outer, "outer")
        chosen.communicator.check_alike(
            {name: str(getattr(chosen, name)) for name in ("sync_every", "outer", "on_nonfinite")}
        )
        device, model = chosen.opened(), load(step)
        check_trains(model, "LocalSGD")
        if (pruning := Pruning.read(model)) is not None and pruning.end:
            raise GraphoptError(
                "LocalSGD: expected masks that stay, found passes.Prune with a schedule, by which each worker "
                "prunes other weights: prune at once, give masks, or use DataParallel"
            )
        outer = outer_update(model, chosen.outer or passes.SGD(0.7, momentum=0.9, nesterov=True))
        buffers = _RoundBuffers(device, model, outer, chosen.communicator.size)
        rounds = _Rounds(chosen, buffers)
        self.bytes_per_step = buffers.flat.nbytes / chosen.sync_every
        self._assemble(Parts(chosen, device, model, buffers, workers=rounds.workers, rounds=rounds))


class _Rounds(Rounds):
    """Count the steps of a round, and average the workers' changes of the weights at its end."""

    def __init__(self, options: LocalSGDOptions, buffers: _RoundBuffers) -> None:
        self._options, self._buffers, self.workers = options, buffers, Survivors(options.communicator)
        self._done = 0  # steps of this round
        self._dropped = 0  # rounds that were dropped in succession
        self._failure: str | None = None  # of this worker in this round

    @property
    def is_synchronized(self) -> bool:
        return self._done == 0

    def step(self, feeds: Mapping[str, Tensor], train: Callable[[Mapping[str, Tensor]], Reported]) -> Reported:
        """Train, and synchronize the workers if this step is the last one of the round.

        Raises:
            NonFiniteLoss: the workers have dropped the third round in succession.
        """
        try:
            reported = train(feeds)
        except NonFiniteLoss as error:
            self._failure = self._failure or str(error)
            reported = error.reported
        self._done += 1
        if self._done == self._options.sync_every:
            self.synchronize()
        return reported

    def restart(self) -> None:
        self._buffers.begin()
        self._done, self._failure = 0, None

    def synchronize(self) -> None:
        if self.is_synchronized:
            return
        buffers, workers = self._buffers, self.workers
        buffers.present[...] = 0
        is_finite = buffers.collect()
        if self._failure is None and is_finite:
            buffers.present[workers.rank] = 1
        else:
            buffers.flat[...] = 0
        missing = workers.lost_in(lambda: self._options.communicator.sum(buffers.flat))
        missing = missing or np.flatnonzero(buffers.present[: workers.size] != 1).tolist()
        buffers.flat /= workers.size
        is_applied = not missing and buffers.apply()
        buffers.begin()
        self._dropped = 0 if is_applied else self._dropped + 1
        if not is_applied:
            self._tell_dropped(missing)
        self._done, self._failure = 0, None

    def _tell_dropped(self, missing: list[int]) -> None:
        """Warn about a dropped round, or raise an error if it is the last that may be."""
        who = f"worker {', '.join(map(str, missing))}" if missing else "all workers together"
        own = f" ({self._failure})" if self._failure else ""
        message = (
            f"step {self._buffers.batches}: expected finite weights of each worker, found others or none of {who}"
            f"{own}: round of {self._done} steps dropped"
        )
        if self._dropped >= MOST_DROPPED:
            self._done, self._failure = 0, None
            raise NonFiniteLoss(
                f"{message}, for the third time in succession; lower the learning rate, clip gradients, or look "
                f"for NaN in the data"
            )
        if self._options.communicator.leads or own:
            warnings.warn(f"{message}; the weights return to the last synchronization", stacklevel=5)


class _RoundBuffers(StateBuffers):
    """Hold a worker's own state for steps, and for users that of the last synchronization.

    Attributes:
        flat: what the workers sum in a synchronization: changes of the weights, and a number for each worker.
        present: the part of `flat` with a number for each worker.
    """

    def __init__(self, device: Device, model: ir.Model, outer: ir.Model, workers: int) -> None:
        super().__init__(device, model)
        self._shared = StateBuffers(device, outer)
        zeros = {name_of(x): zeros_of(x) for x in with_role(outer, Role.GRADIENT) if x in outer.graph.inputs}
        self._weights = [value_of(name) for name in zeros]
        clashes = sorted(set(self._shared.names) & set(super().names) - set(self._weights))
        if clashes:
            raise GraphoptError(
                f"state {clashes[0]!r}: expected no name that the outer optimizer needs, found it: rename the weight"
            )
        self._gradients = {name: buffer(device, x) for name, x in zeros.items()}
        # All workers run the same form of the update, so that their weights stay the same bits.
        options = RunnerOptions(fixed=self._gradients, native=False, verified=False)
        self._outer = StepRunner(device, outer, self._shared, options)
        self._outer.check({})
        ends = np.cumsum([x.size for x in zeros.values()])
        self.flat = np.zeros(int(ends[-1]) + workers, np.result_type(*zeros.values()))
        *parts, self.present = np.split(self.flat, ends)
        self._parts = [part.reshape(x.shape) for part, x in zip(parts, zeros.values(), strict=True)]

    @property
    def names(self) -> list[str]:
        return list(dict.fromkeys([*super().names, *self._shared.names]))

    def read(self) -> dict[str, onnxruntime.OrtValue]:
        shared = self._shared.read()
        return super().read() | {name: shared[name] for name in self._weights}

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        names = self.names if names is None else list(names)
        shared = self._shared.arrays(name for name in names if name in self._shared.names)
        return {name: shared[name] if name in shared else self._own(name) for name in names}

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. The worker's own weights change as much as the synchronized ones."""
        shared = {name: x for name, x in arrays.items() if name in self._shared.names}
        self._shared.check(shared)
        own = {name: x for name, x in arrays.items() if name not in shared}
        for name in shared.keys() & set(self._weights):
            own[name] = np.asarray(shared[name] + (self._own(name) - self._shared.arrays([name])[name]))
        super().update(own)
        self._shared.update(shared)

    def begin(self) -> None:
        """Give the worker the weights of the last synchronization."""
        super().update(self._shared.arrays(self._weights))

    def collect(self) -> bool:
        """Write the worker's change of the weights to `flat`; return whether it is finite."""
        shared = self._shared.arrays(self._weights)
        for name, part in zip(self._weights, self._parts, strict=True):
            np.subtract(shared[name], self._own(name), out=part, dtype=part.dtype)
        return bool(np.isfinite(self.flat).all())

    def apply(self) -> bool:
        """Update the weights by `flat`, the mean over the workers, if the new ones are finite; return whether."""
        if not np.isfinite(self.flat).all():
            return False
        for value, part in zip(self._gradients.values(), self._parts, strict=True):
            value.update_inplace(np.asarray(part, value.numpy().dtype, order="C"))
        self._outer.step(self._shared.current, {})
        if self._shared.spoiled() is not None:
            return False
        self._shared.advance({})
        return True

    def _own(self, name: str) -> np.ndarray:
        return super().arrays([name])[name]

"""Train on a data set: epochs of batches, validation, callbacks and checkpoints."""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import os
import pathlib
import time
import warnings
from collections import deque
from collections.abc import Generator, Iterable, Iterator, Sequence
from importlib import metadata
from typing import Any

import numpy as np

from graphopt.communicator import digest
from graphopt.data.batches import Rows, fixed_batch
from graphopt.data.loader import Shuffle
from graphopt.data.prefetch import prefetched
from graphopt.data.streams import Drawn, Stream
from graphopt.data.training_rows import hold_out
from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.runtime.executor import Executor
from graphopt.runtime.tensors import Tensor, rows_of
from graphopt.training.callbacks.callback import Callback, Record, Run
from graphopt.training.checkpoints import Checkpoint, Checkpoints, find, read
from graphopt.training.evaluation import HeldOut, Mean
from graphopt.training.metrics import Wanted
from graphopt.training.metrics import metrics as metrics_of
from graphopt.training.signals import Signals, deferred
from graphopt.training.sources import Data, Order, Passes, read_batches
from graphopt.training.workers import agree, from_first

AHEAD = 2  # batches that are prefetched

Path = str | os.PathLike[str]


def fit(
    executor: Executor,
    data: Data,
    *,
    epochs: int = 20,
    steps_per_epoch: int | None = None,
    batch_size: int = 32,
    shuffle: Shuffle = True,
    seed: int = 0,
    validation: float | Data | None = 0.2,
    validation_every: int = 1,
    metrics: Sequence[Wanted] | None = None,
    allow_nan: bool = False,
    prefetch: int | None = None,
    callbacks: Sequence[Callback] = (),
    checkpoint: Checkpoints | Path | None = None,
    resume: bool | Path = False,
) -> list[Record]:
    """Train on all batches of a data set, and return a record per epoch.

    A record has the epoch, the number of steps so far, the mean of each reported number over the epoch, the
    `learning_rate`, `validation_loss` and metrics of held-out rows, `seconds` and `samples_per_second`.

    The order of rows in an epoch depends only on the seed and on the number of epochs so far. Two epochs, followed by
    `executor.save`, `load` and two more epochs, therefore give the same bits as four epochs. With `resume`, an
    interrupted run continues from a checkpoint, in the middle of an epoch too, to the same bits.

    Data may also be an iterable of batches, such as the data loader of another library. It keeps its own order and
    needs no length: an epoch is one pass over it. With `resume`, it continues where it was if it has `state_dict` and
    `load_state_dict`, or its iterators have `get_state` and `set_state`. Otherwise it starts over, and a warning says
    so.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 take effect between two steps. With `checkpoint`, the state is written before.

    Args:
        executor: the executor of a training graph.
        data: a data set, arrays named like the model's inputs, and `target`, or an iterable of batches: mappings from
            these names to arrays, tensors or lists.
        epochs: the number of times to train on all rows.
        steps_per_epoch: the number of batches of an iterable in an epoch; None for one pass, which needs an end.
        batch_size: the number of rows of a batch; the last batch of an epoch may have fewer. Batches of an iterable
            have their own.
        shuffle: True to draw the held-out rows and the order of each epoch; `consecutive` to draw the order of
            batches of neighbouring rows; False to keep the order of the rows and hold out the last ones.
        seed: the seed of what is drawn.
        validation: the share of rows to hold out, other data, or None. An iterable has no rows to hold out.
        validation_every: the number of epochs from one validation to the next; the last epoch is always validated.
        metrics: the metrics of held-out rows: names such as `accuracy`, names with options such as
            `{"top_k": {"k": 3}}`, and functions of all targets and predictions. None for the accuracy of a
            classification, and for R2 and the mean absolute error of a regression.
        allow_nan: train on data that contains NaN or infinities.
        prefetch: the number of batches that a thread prepares while steps run; None for 2 with data that is read
            when a batch needs it or on a GPU, and 0 otherwise.
        callbacks: objects that watch the run and steer it; see `graphopt.Callback`.
        checkpoint: when and where to write checkpoints, or only the folder; None to write none.
        resume: True to continue from the newest checkpoint of `checkpoint`, if there is one; or the path of a
            checkpoint, or of a folder of checkpoints. `epochs` then counts those before the interruption, too.

    Raises:
        GraphoptError: the data does not fit the model, an option is wrong, or a checkpoint cannot be written or is
            another graph's.
        NonFiniteLoss: the loss is infinite or not a number.

    >>> import numpy
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> records = graphopt.fit(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, epochs=50, batch_size=10)
    >>> len(records), records[-1]["validation_loss"] < 1e-3
    (50, True)
    """
    if epochs < 1:
        raise GraphoptError(f"epochs: expected 1 or more, found {epochs}")
    if shuffle not in (True, False, "consecutive"):
        raise GraphoptError(f"shuffle: expected True, False or 'consecutive', found {shuffle!r}")
    if validation_every < 1:
        raise GraphoptError(f"validation_every: expected 1 or more, found {validation_every}")
    if seed < 0:
        raise GraphoptError(f"seed: expected 0 or more, found {seed}")
    if "loss" not in executor.reported:
        raise GraphoptError(
            "report: expected an executor that reports its loss, found an empty report: leave it out"
        )
    metrics_of(executor.inputs, metrics)  # raises an error if one is wrong
    if batch_size < 1:
        raise GraphoptError(f"batch_size: expected 1 or more, found {batch_size}")
    share, held_out = 0.0, None
    if isinstance(validation, int | float):
        share = validation
    elif validation is not None:
        held_out = HeldOut(read_batches(validation, executor, allow_nan), batch_size, metrics)
    batches = read_batches(data, executor, allow_nan, steps_per_epoch, keep_positions=checkpoint is not None)
    source: Order | Passes
    if isinstance(batches, Stream):
        if share:
            raise GraphoptError(
                f"validation: expected other data or None, found a share, {share}, of the rows of an iterable"
            )
        source = Passes(batches, steps_per_epoch)
        if steps_per_epoch is None and batches.steps:
            batches.passes = round(executor.batches / batches.steps)
    else:
        rows: Rows = range(len(batches))
        if share:
            rows, held = hold_out(len(batches), share, shuffle=shuffle, seed=seed)
            held_out = HeldOut(batches, batch_size, metrics, held)
        source = Order(batches, rows, batch_size, shuffle, seed, executor.workers)
        source.before = round(executor.batches / source.steps)
    if prefetch is None:
        prefetch = AHEAD if batches.is_lazy or executor.device != "cpu" else 0
    elif prefetch < 0:
        raise GraphoptError(f"prefetch: expected 0 or more batches, or None, found {prefetch}")
    communicator = executor.workers
    counts = [part.count for part in (source, held_out or source) if part.count is not None]
    if counts:
        _check_sizes(fixed_batch(executor.inputs), batch_size, communicator.size, counts)
    if communicator.size > 1:
        if isinstance(batches, Stream):
            raise GraphoptError(
                f"data: expected rows, which {communicator.size} workers share, found an iterable, {batches.name}"
            )
        device = executor.device_options
        versions = {**_versions(), "onnxruntime": device.ort.__version__}
        facts = {
            "versions": ", ".join(f"{name} {version}" for name, version in versions.items()),
            "training graph": graph_digest(executor),
            "state": digest(b"".join(x.tobytes() for x in executor.state.values())),
            "data": batches.digest(),
            "options of fit": f"batch_size {batch_size}, shuffle {shuffle}, seed {seed}, epochs {epochs}",
        }
        communicator.check_alike(facts)
        callbacks = [one for one in callbacks if communicator.leads or one.on_every_worker]
    if checkpoint is not None and not isinstance(checkpoint, Checkpoints):
        checkpoint = Checkpoints(checkpoint)
    if resume is True and checkpoint is None:
        raise GraphoptError(
            "resume: expected a folder of checkpoints, found none: give `checkpoint`, or a path"
        )
    if not communicator.leads:
        checkpoint = None
    if checkpoint is not None:
        checkpoint.prepare()
    validation_rows = held_out.count if held_out is not None else 0
    run = Run(executor, epochs, source.steps, source.count, validation_rows, step=executor.batches)
    if held_out is not None:
        run.evaluated = functools.partial(held_out.evaluated, executor)
    loop = _Loop(run, source, held_out, validation_every, prefetch, callbacks, checkpoint)
    continued = None
    if resume is True and checkpoint is not None:
        continued = checkpoint.newest()
    elif not isinstance(resume, bool) and communicator.leads:
        continued = read(find(resume))
    loop.load(from_first(communicator, continued))
    loop.train()
    return run.records


class _Loop:
    """Run the epochs of a training, call callbacks, and write checkpoints."""

    def __init__(
        self,
        run: Run,
        order: Order | Passes,
        held_out: HeldOut | None,
        validation_every: int,
        prefetch: int,
        callbacks: Sequence[Callback],
        checkpoint: Checkpoints | None,
    ) -> None:
        self._run, self._order, self._held_out = run, order, held_out
        self._validation_every, self._prefetch = validation_every, prefetch
        self._callbacks, self._checkpoint = callbacks, checkpoint
        self._mean = Mean()
        self._position: Any = None  # of the data
        self._seconds = 0.0  # of this epoch before an interruption
        self._skipped = run.step - run.executor.batches  # steps that the executor does not count
        self._is_due = False  # whether a checkpoint is due, which waits until the workers meet
        self._is_cut = False  # whether a callback has stopped the last epoch before its end
        self._stops = self._ends = False  # what all workers have agreed on: a callback's stop, a signal's end
        self._one_by_one = any(callback.reads_state for callback in callbacks)
        run.draw = lambda: map(self._on_device, order.peek(len(run.records) + 1, run.row))

    def train(self) -> None:
        """Train until the last epoch, a callback's `should_stop` or a signal; write the last checkpoint."""
        run = self._run
        with deferred() as signals:
            try:
                self._tell("on_fit_begin")
                while len(run.records) < run.epochs and not self._agree(signals):
                    self._epoch(signals)
                if signals.received:
                    run.stopped = run.stopped or signals.received.name
                if not self._is_cut:
                    self._save(last=True)
            except Exception:
                if run.executor.batches + self._skipped == run.step and not run.executor.in_place:
                    with contextlib.suppress(GraphoptError):
                        self._save(last=True)
                raise
            finally:
                self._tell("on_fit_end")

    def load(self, checkpoint: Checkpoint | None) -> None:
        """Continue from a checkpoint, if there is one.

        Raises:
            GraphoptError: it is that of another graph, or of other data.
        """
        if checkpoint is None:
            return
        run, progress, order = self._run, checkpoint.progress, self._order
        expected = self._identity
        for name, value in expected.items():
            if progress.get(name) != value:
                what = (
                    "the checkpoint of another training graph"
                    if name == "graph"
                    else f"{name} {progress.get(name)}"
                )
                raise GraphoptError(
                    f"{checkpoint.path}: expected {name} {value} as in this run, found {what}"
                )
        for name, value in self._environment.items():
            if progress["environment"].get(name) != value:
                found = progress["environment"].get(name)
                warnings.warn(
                    f"{checkpoint.path}: written with {name} {found}, continues with {value}: results may differ in "
                    "their last bits",
                    stacklevel=3,
                )
        run.executor.update_state(checkpoint.state)
        run.executor.set_batches(progress["step"])
        run.executor.set_hyperparameters(**progress["hyperparameters"])
        self._skipped = 0
        run.resumed, run.step, run.records = checkpoint.path, progress["step"], list(progress["records"])
        run.epoch, run.row = progress["epoch"], progress["row"]
        order.before = progress["before"]
        self._position = progress.get("data")
        if self._position is not None:
            order.load(self._position)
        self._mean, self._seconds = Mean(**progress["mean"]), progress["seconds"]
        for name, callback in self._named_callbacks():
            kept = dict(progress["callbacks"].get(name, {}))
            start = f"{name}/"
            kept |= {
                key.removeprefix(start): x for key, x in checkpoint.arrays.items() if key.startswith(start)
            }
            if kept:
                callback.load_state_dict(kept)
        if self._checkpoint is not None:
            self._checkpoint.load_values(progress["best_values"])

    def _epoch(self, signals: Signals) -> None:
        run = self._run
        if run.row == 0:
            run.epoch = len(run.records) + 1
            self._tell("on_epoch_begin")
        start = time.perf_counter()
        has_ended = self._steps(signals)
        seconds = self._seconds + time.perf_counter() - start
        if self._ends:
            self._seconds = seconds
            return
        if not has_ended:
            self._save(last=True)  # a run that continues from here has the rest of the epoch before it
        if run.epoch == run.epochs:
            run.executor.synchronize()
        record = {"epoch": run.epoch, "step": run.step, **self._mean.result(run.executor.workers)}
        if self._held_out is not None and (
            run.epoch % self._validation_every == 0 or run.epoch == run.epochs or self._stops
        ):
            measured = self._evaluate()
            record |= {name: value for name, value in measured.items() if name not in record}
        record |= {"seconds": seconds, "samples_per_second": run.row / seconds}
        self._is_cut = not has_ended
        self._tell("on_epoch_end", record)
        run.records.append(record)
        if self._is_cut:
            return
        run.row, self._mean, self._seconds = 0, Mean(), 0.0
        checkpoint = self._checkpoint
        if checkpoint is not None:
            best = checkpoint.is_best(record)
            if best or checkpoint.is_due_after(run.epoch) or run.control.should_save:
                self._save(best=record[checkpoint.best] if best and checkpoint.best else None)

    def _steps(self, signals: Signals) -> bool:
        """Run the steps of an epoch from its current row on; return False if callbacks or a signal end it before."""
        run, executor, order = self._run, self._run.executor, self._order
        pending: deque[tuple[int, int, Any]] = (
            deque()
        )  # of batches without results: rows, own rows, the position

        def feeds() -> Iterator[dict[str, Tensor]]:
            for drawn in order.draw(run.epoch, run.row):
                pending.append((drawn.rows, rows_of(drawn.arrays), drawn.position))
                yield self._on_device(drawn)

        with contextlib.closing(prefetched(feeds(), self._prefetch)) as ahead:
            for values in self._reported(ahead):
                rows, own, self._position = pending.popleft()
                run.step += 1
                run.row += rows
                values.setdefault("learning_rate", executor.hyperparameters.get("learning_rate"))
                self._mean.add(own, values)
                self._tell("on_step_end", {"epoch": run.epoch, "step": run.step, "rows": rows, **values})
                if self._checkpoint is not None and self._checkpoint.is_due(run.step):
                    self._is_due = True
                if self._is_even() and executor.is_synchronized and self._is_to_stop(signals):
                    return run.row == order.count
        self._position = order.end
        return True

    def _is_even(self) -> bool:
        """Return whether the executor has the state after exactly the steps that have ended, not after later ones."""
        ahead = self._run.executor.batches + self._skipped - self._run.step
        self._skipped -= min(ahead, 0)  # the executor has skipped a step that is not finite
        return ahead <= 0

    def _on_device(self, drawn: Drawn) -> dict[str, Tensor]:
        return self._run.executor.on_device(drawn.arrays)

    def _reported(self, batches: Generator[dict[str, Tensor], None, None]) -> Iterator[Record]:
        """Yield what each step reports; end a call of several steps where a checkpoint is due."""
        run, executor = self._run, self._run.executor
        if self._one_by_one:
            for batch in batches:
                self._tell("on_step_begin")
                yield executor.step(batch)
            return
        while True:
            before = run.step
            due = self._checkpoint.next_step(before) if self._checkpoint else math.inf
            part: Iterable[dict[str, Tensor]] = batches
            if math.isfinite(due):
                part = itertools.islice(batches, int(due) - before)
            for values in executor.iterate(part):
                self._tell("on_step_begin")
                yield values
            if run.step == before or not math.isfinite(due):
                return

    def _is_to_stop(self, signals: Signals) -> bool:
        """Do what callbacks asked for, write a checkpoint that is due, and return whether to stop."""
        control, checkpoint = self._run.control, self._checkpoint
        self._agree(signals)
        if control.should_evaluate:
            control.should_evaluate = False
            self._evaluate()
            self._agree(signals)
        if checkpoint is not None:
            self._tell_saved(checkpoint.finished())
            if control.should_save or (self._is_due and not checkpoint.is_busy):
                self._save()
        control.should_save = self._is_due = False
        return self._stops or self._ends

    def _agree(self, signals: Signals) -> bool:
        """Return whether to stop, because a callback of any worker has asked for it or a signal has arrived."""
        run = self._run
        self._ends = agree(run.executor.workers, run.control, signals)
        self._stops = run.control.should_stop
        return self._stops or self._ends

    def _evaluate(self) -> Record:
        """Return the measures on held-out rows, `validation_loss` first."""
        if self._held_out is None:
            return {}
        self._tell("on_evaluate_begin")
        measured = self._held_out.measure(self._run.executor)
        record = {"validation_loss": measured.pop("data_loss", measured["loss"]), **measured}
        self._tell("on_evaluate_end", record)
        return record

    def _save(self, *, last: bool = False, best: float | None = None) -> None:
        """Start to write a checkpoint; write the last one before this returns."""
        run, checkpoint = self._run, self._checkpoint
        run.control.should_save = False
        if checkpoint is None:
            return
        position = (run.step, len(run.records), run.row)
        if not (last and checkpoint.saved == position):
            self._tell_saved(checkpoint.finished(wait=True))
            self._tell("on_save_begin")
            states = {name: callback.state_dict() for name, callback in self._named_callbacks()}
            progress = {
                **self._identity,
                "step": run.step,
                "epoch": run.epoch,
                "row": run.row,
                "before": self._order.before,
                "data": self._position,
                "mean": {"rows": self._mean.rows, "sums": dict(self._mean.sums), "rate": self._mean.rate},
                "seconds": self._seconds,
                "records": list(run.records),
                "hyperparameters": {
                    name: value.tolist() if isinstance(value, np.ndarray) else value
                    for name, value in run.executor.hyperparameters.items()
                },
                "environment": self._environment,
                "callbacks": {
                    name: {key: x for key, x in state.items() if not isinstance(x, np.ndarray)}
                    for name, state in states.items()
                },
            }
            arrays = {
                f"{name}/{key}": np.array(x)
                for name, state in states.items()
                for key, x in state.items()
                if isinstance(x, np.ndarray)
            }
            checkpoint.save(position, run.executor.state, arrays, progress, best)
        if last:
            self._tell_saved(checkpoint.wait())

    def _tell_saved(self, path: pathlib.Path | None) -> None:
        if path is not None:
            self._tell("on_save_end", path)

    @functools.cached_property
    def _identity(self) -> dict[str, Any]:
        """Return what a checkpoint and the run that continues it have in common."""
        return {**self._order.identity, "graph": graph_digest(self._run.executor)}

    @functools.cached_property
    def _environment(self) -> dict[str, Any]:
        """Return what the last bits of results depend on."""
        device = self._run.executor.device_options
        return {
            **_versions(),
            "onnxruntime": device.ort.__version__,
            "device": device.name,
            "threads": device.threads,
            "workers": self._run.executor.workers.size,
        }

    def _named_callbacks(self) -> Iterator[tuple[str, Callback]]:
        """Yield each callback with the name of its class, which is numbered from the second one on."""
        found: dict[str, int] = {}
        for callback in self._callbacks:
            name = type(callback).__name__
            found[name] = found.get(name, 0) + 1
            yield name if found[name] == 1 else f"{name}.{found[name]}", callback

    def _tell(self, event: str, *arguments: Any) -> None:
        for callback in self._callbacks:
            getattr(callback, event)(self._run, *arguments)


def _versions() -> dict[str, str]:
    return {name: metadata.version(name) for name in ("graphopt", "onnx", "numpy")}


def graph_digest(executor: Executor) -> str:
    """Return the SHA-256 sum of an executor's training graph, without the initial state."""
    return storage.digest(executor.model)


def _check_sizes(fixed: int | None, batch_size: int, workers: int, counts: Sequence[int]) -> None:
    fixed = fixed and fixed * workers
    if fixed is not None and (batch_size != fixed or any(count % fixed for count in counts)):
        raise GraphoptError(
            f"batch_size: expected {fixed}, the batch of the model, and a multiple of it as number of rows, found "
            f"batch_size={batch_size} and {' and '.join(map(str, counts))} rows: export the model with a dynamic batch"
        )

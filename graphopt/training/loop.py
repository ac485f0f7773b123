"""Run the epochs and steps of a training, call callbacks, and write checkpoints, from which a run continues."""

from __future__ import annotations

import contextlib
import functools
import itertools
import signal
import time
from collections.abc import Iterator
from enum import Enum
from pathlib import Path

import numpy as np

from graphopt.data.loader import prefetched
from graphopt.data.streams import Drawn
from graphopt.errors import GraphoptError
from graphopt.graph.storage import model_digest
from graphopt.runtime.executor import Executor
from graphopt.runtime.tensors import Tensor, rows_of
from graphopt.training.callbacks.callback import CallbackGroup, Record, Run, callbacks_of
from graphopt.training.checkpoints import Checkpoints, find, from_first, read
from graphopt.training.evaluation import HeldOut, Mean
from graphopt.training.options import FitOptions
from graphopt.training.progress import Progress, versions
from graphopt.training.signals import Signals, deferred
from graphopt.training.sources import Epochs

PREFETCHED_BATCHES = 2

_Batch = tuple[Drawn, dict[str, Tensor]]  # as drawn, and on the device


class After(Enum):
    """Name the event that follows a step or an epoch."""

    GO_ON = "the next step or epoch"
    FINISH = "the record of the epoch and the end of the run, because a callback has asked for it"
    LEAVE = "the end of the run at once, because a signal has arrived"


class TrainingLoop:
    """Run the epochs of a training."""

    def __init__(self, executor: Executor, source: Epochs, held_out: HeldOut | None, options: FitOptions) -> None:
        self._source, self._held_out, self._options = source, held_out, options
        validation_rows, leads = 0 if held_out is None else held_out.count, executor.workers.leads
        self.run = run = Run(
            executor, options.epochs, source.steps, source.count, validation_rows, step=executor.batches
        )
        run.names, run.row_tokens = source.names, source.row_tokens
        run.sampled_rows = source.sampled_rows
        if held_out is not None:
            run.evaluated = functools.partial(held_out.evaluated, executor)
            run.held_out_rows, run.held_out_table = held_out.rows, held_out.table
        run.draw = lambda: map(self._on_device, source.peek(len(run.records) + 1, run.row))
        self._callbacks = CallbackGroup([x for x in callbacks_of(options.callbacks) if leads or x.on_every_worker], run)
        self._tell = self._callbacks.tell
        self._checkpoints: Checkpoints | None = None
        if options.checkpoint is not None and leads:
            folder = options.checkpoint
            self._checkpoints = folder if isinstance(folder, Checkpoints) else Checkpoints(folder)
            self._checkpoints.prepare(options.resume)
        self._signals = Signals()
        self._mean = Mean()
        self._identity: dict[str, object] = {}  # what a checkpoint and the run that continues it have in common
        self._position: object = None  # of the data
        self._seconds = 0.0  # of this epoch
        self._skipped = 0  # steps that the executor does not count
        self._is_due = False  # whether a checkpoint waits until the workers are synchronized
        is_slow = source.is_lazy or options.transform is not None
        is_ahead = is_slow or not executor.device_options.machine.in_host_memory
        prefetch = PREFETCHED_BATCHES if is_ahead and not source.reads_state else 0
        self._prefetch = prefetch if options.prefetch is None else options.prefetch

    def begin(self) -> None:
        """Begin a run, or continue it from a checkpoint, which has to be of the same graph and data."""
        run, executor, resume = self.run, self.run.executor, self._options.resume
        if resume or self._checkpoints is not None:
            self._identity = {**self._source.identity, "graph": model_digest(executor.model)}
        checkpoint = None
        if executor.workers.leads and not isinstance(resume, bool):
            checkpoint = read(find(resume))
        elif resume and self._checkpoints is not None:
            checkpoint = self._checkpoints.newest()
        checkpoint = from_first(executor.workers, checkpoint)
        if checkpoint is None:
            self._callbacks.reset()
            return
        progress = Progress.of(checkpoint, self._identity, self._environment)
        executor.update_state(checkpoint.state)
        executor.set_batches(progress.step)
        known = executor.hyperparameters
        executor.set_hyperparameters(
            **{
                name: np.asarray(value, known[name].dtype) if isinstance(known.get(name), np.ndarray) else value
                for name, value in progress.hyperparameters.items()
            }
        )
        run.resumed, run.records = checkpoint.path, list(progress.records)
        run.step, run.epoch, run.row = progress.step, progress.epoch, progress.row
        self._mean, self._seconds, self._position = progress.mean, progress.seconds, progress.data
        self._source.load(progress.before, progress.data)
        self._callbacks.load_state(progress.callbacks, checkpoint.arrays)
        if self._checkpoints is not None:
            self._checkpoints.load_values(checkpoint.progress["best_values"])

    def train(self) -> None:
        """Train until the last epoch, a callback's `should_stop` or a signal; write the last checkpoint."""
        run, after = self.run, After.GO_ON
        with deferred() as self._signals:
            try:
                self._tell("on_fit_begin")
                while after is After.GO_ON and len(run.records) < run.epochs and self._agree() is After.GO_ON:
                    after = self._epoch()
                if self._signals.received:
                    run.stopped = run.stopped or self._signals.received.name
                if after is not After.FINISH:
                    self._save(last=True)
                if not run.epochs and not run.records:
                    record = self._record(validates=True)  # no checkpoint counts it
                    self._tell("on_epoch_end", record)
                    run.records.append(record)
            except Exception:
                if run.executor.batches + self._skipped == run.step and not run.executor.in_place:
                    with contextlib.suppress(GraphoptError):
                        self._save(last=True)
                raise
            finally:
                self._tell("on_fit_end")

    def _epoch(self) -> After:
        """Run an epoch, or the rest of it; return FINISH if a callback has cut it, and its checkpoint is written."""
        run = self.run
        if run.row == 0:
            run.epoch = len(run.records) + 1
            self._tell("on_epoch_begin")
        start = time.perf_counter()
        after = self._steps()
        self._seconds += time.perf_counter() - start
        if after is After.LEAVE:
            return after
        is_cut = after is After.FINISH and run.row != self._source.count
        if is_cut:
            self._save(last=True)  # a run that continues from here has the rest of the epoch before it
        record = self._record(validates=after is After.FINISH or run.epoch % self._options.validation_every == 0)
        self._tell("on_epoch_end", record)
        run.records.append(record)
        if is_cut:
            return After.FINISH
        run.row, self._mean, self._seconds = 0, Mean(), 0.0
        checkpoints = self._checkpoints
        if checkpoints is not None:
            best = None if run.is_pruning else checkpoints.best_of(record)
            if best is not None or checkpoints.is_due_after(run.epoch) or run.control.should_save:
                self._save(best=best)
        return After.GO_ON

    def _steps(self) -> After:
        """Run the steps of an epoch from its current row on."""
        run, executor = self.run, self.run.executor
        fed = ((drawn, self._on_device(drawn)) for drawn in self._source.draw(run.epoch, run.row))
        with contextlib.closing(prefetched(fed, self._prefetch)) as batches:
            for drawn, values in self._reported(batches):
                run.step += 1
                run.row += drawn.rows
                self._position = drawn.position
                values.setdefault("learning_rate", executor.hyperparameters.get("learning_rate"))
                self._mean.add(rows_of(drawn.arrays), values)
                self._tell("on_step_end", {"epoch": run.epoch, "step": run.step, "rows": drawn.rows, **values})
                if self._checkpoints is not None and self._checkpoints.is_due(run.step):
                    self._is_due = True
                if self._is_current() and executor.is_synchronized:
                    after = self._between_steps()
                    if after is not After.GO_ON:
                        return after
        self._position = self._source.end
        return After.GO_ON

    def _reported(self, batches: Iterator[_Batch]) -> Iterator[tuple[Drawn, Record]]:
        """Yield each batch with the numbers of its step; end a call of several steps where a checkpoint is due."""
        run, executor, checkpoints = self.run, self.run.executor, self._checkpoints
        if self._callbacks.reads_state or self._source.reads_state:
            for drawn, feeds in batches:
                self._tell("on_step_begin")
                yield drawn, executor.step(feeds)
            return
        fed, trained = itertools.tee(batches)
        left = (feeds for _, feeds in fed)
        while True:
            before = run.step
            due = checkpoints.next_step(before) if checkpoints else None
            part = itertools.islice(left, None if due is None else due - before)
            for values, (drawn, _) in zip(executor.iterate(part), trained, strict=False):
                self._tell("on_step_begin")
                yield drawn, values
            if due is None or run.step == before:
                return

    def _between_steps(self) -> After:
        """Carry out the requests of callbacks, write a checkpoint that is due, and return the next event."""
        control, checkpoints = self.run.control, self._checkpoints
        after = self._agree()
        if control.should_evaluate:
            control.should_evaluate = False
            self._evaluate()
            after = self._agree()
        if checkpoints is not None:
            self._tell_saved(checkpoints.finished())
            if control.should_save or (self._is_due and not checkpoints.is_busy):
                self._save()
        control.should_save = self._is_due = False
        return after

    def _agree(self) -> After:
        """Return the next event. A request of any worker's callback, and a signal to any worker, count for all."""
        workers, control, signals = self.run.executor.workers, self.run.control, self._signals
        ended = signals.received is not None or workers.asked_to_end()
        control.should_stop, control.should_evaluate, ended = workers.any(
            control.should_stop, control.should_evaluate, ended
        )
        if ended:
            signals.received = signals.received or signal.SIGTERM
            return After.LEAVE
        return After.FINISH if control.should_stop else After.GO_ON

    def _on_device(self, drawn: Drawn) -> dict[str, Tensor]:
        """Copy a batch to a GPU in the thread that draws it; the WebGPU provider is not made for threads."""
        executor = self.run.executor
        is_threaded = executor.device_options.machine.lock is None
        return executor.on_device(drawn.arrays) if is_threaded else {**drawn.arrays}

    def _is_current(self) -> bool:
        """Return whether the executor has the state after exactly the steps that have ended, not after later ones."""
        ahead = self.run.executor.batches + self._skipped - self.run.step
        self._skipped -= min(ahead, 0)  # the executor has skipped a step that is not finite
        return ahead <= 0

    def _record(self, *, validates: bool) -> Record:
        """Return the record of an epoch: means over its rows, the measures of its validation, and times."""
        run = self.run
        is_last = run.epoch == run.epochs
        if is_last:
            run.executor.synchronize()
        record = {"epoch": run.epoch, "step": run.step, **self._mean.result(run.executor.workers)}
        if validates or is_last:
            measured = self._evaluate()
            record |= {
                f"validation_{name}" if name in record else name: value
                for name, value in measured.items()
                if name not in ("loss", "penalty")  # validation_loss; the same for all rows
            }
        record["seconds"] = self._seconds
        if run.row:
            record["samples_per_second"] = run.row / self._seconds
        if run.row and run.row_tokens is not None:
            record["tokens_per_second"] = record["samples_per_second"] * run.row_tokens
        return record

    def _evaluate(self) -> Record:
        """Return the measures on held-out rows, `validation_loss` first."""
        if self._held_out is None:
            return {}
        self._tell("on_evaluate_begin")
        measured = self._held_out.measure(self.run.executor)
        record = {"validation_loss": measured.pop("data_loss", measured["loss"]), **measured}
        self._tell("on_evaluate_end", record)
        return record

    def _save(self, *, last: bool = False, best: float | None = None) -> None:
        """Start to write a checkpoint; write the last one before this returns."""
        run, checkpoints = self.run, self._checkpoints
        run.control.should_save = False
        if checkpoints is None:
            return
        position = (run.step, len(run.records), run.row)
        if not (last and checkpoints.saved == position):
            self._tell_saved(checkpoints.finished(wait=True))
            self._tell("on_save_begin")
            values, arrays = self._callbacks.state()
            progress = Progress(
                environment=self._environment,
                step=run.step,
                epoch=run.epoch,
                row=run.row,
                before=self._source.before,
                data=self._position,
                mean=self._mean,
                seconds=self._seconds,
                records=list(run.records),
                hyperparameters=run.executor.hyperparameters,
                callbacks=values,
            )
            content = {**self._identity, **progress.to_json()}
            checkpoints.save(position, run.executor.state, arrays, content, best)
        if last:
            self._tell_saved(checkpoints.wait())

    def _tell_saved(self, path: Path | None) -> None:
        if path is not None:
            self._tell("on_save_end", path)

    @functools.cached_property
    def _environment(self) -> dict[str, object]:
        """Return the facts on which the last bits of results depend."""
        executor = self.run.executor
        device, workers = executor.device_options, executor.workers.size
        return {**versions(executor), "device": device.name, "threads": device.threads, "workers": workers}

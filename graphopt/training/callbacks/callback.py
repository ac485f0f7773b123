"""Declare the events that a callback of `fit` sees, and the requests that it can make."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from graphopt.arguments import Checked, check_function
from graphopt.errors import GraphoptError, kind_of, nearest
from graphopt.fields import check_options
from graphopt.graph.roles import Role, with_role
from graphopt.graph.state import Pruning, averages
from graphopt.runtime.executor import Executor
from graphopt.runtime.tensors import Tensor

__all__ = ["Callback", "Control", "Record", "Run"]

Record = dict[str, Any]
Outputs = Mapping[str, Any]  # numbers and arrays by name


def copied_weights(executor: Executor) -> dict[str, np.ndarray]:
    """Return copies of the parameters, their averages and statistics, without the optimizer's state."""
    model = executor.model
    weights = [*with_role(model, Role.PARAMETER, Role.STATISTIC), *averages(model)]
    names = {value.name for value in weights}
    return {name: array for name, array in executor.state.items() if name in names}


@dataclass
class Control:
    """Hold the requests of callbacks; `fit` looks at them after each step and each epoch, and resets those it has met.

    Args:
        should_stop: end the training.
        should_evaluate: validate now. The callbacks get the measures in `on_evaluate_end`.
        should_save: write a checkpoint now, if `fit` has a folder for checkpoints.
    """

    should_stop: bool = False
    should_evaluate: bool = False
    should_save: bool = False


@dataclass
class Run:
    """Hold the facts about a training run that callbacks see.

    Args:
        executor: the executor that trains.
        epochs: the number of epochs to train.
        steps: the number of steps of an epoch; None if the data does not tell.
        rows: the number of rows of an epoch; None if the data does not tell.
        validation_rows: the number of held-out rows; None if the data does not tell.
        epoch: the current epoch, from 1.
        step: the number of steps so far, in all epochs.
        row: the number of rows of this epoch so far.
        records: the records of the epochs so far, the last one latest.
        control: what callbacks ask for.
        evaluated: yields the data and the evaluation of each batch of held-out rows; None if no rows are held out.
        stopped: why the training ended before its last epoch, in words; a callback that stops it says so here.
        resumed: the checkpoint that the run continues, or None.
        draw: a function that returns the batches from here to the end of the epoch, without moving the training on.
        averaged: the parameters that validation measures, if a callback averages them; otherwise None.
        restored: the record of the epoch whose weights a callback has restored at the end, or None.
        held_out_rows: the numbers of the held-out rows in the data; None if other data or no rows are held out.
        held_out_table: columns of cells by name, as the data has them, of which held-out rows are made; empty without.
        names: the names of the features, if the data has them.
        row_tokens: the mean number of tokens of a row of text; None for other data.
        sampled_rows: the number of rows of which `sampling="poisson"` draws batches; otherwise None.
        notes: lines that callbacks have for the person who watches; `ProgressBar` prints and removes them.
    """

    executor: Executor
    epochs: int
    steps: int | None
    rows: int | None
    validation_rows: int | None
    epoch: int = 0
    step: int = 0
    row: int = 0
    records: list[Record] = field(default_factory=list)
    control: Control = field(default_factory=Control)
    evaluated: Callable[[], Iterator[tuple[Outputs, Outputs]]] | None = None
    stopped: str | None = None
    resumed: Path | None = None
    draw: Callable[[], Iterator[dict[str, Tensor]]] = lambda: iter(())
    averaged: Mapping[str, np.ndarray] | None = None
    restored: Record | None = None
    held_out_rows: Sequence[int] | np.ndarray | None = None
    held_out_table: Mapping[str, np.ndarray] = field(default_factory=dict)
    names: Sequence[str] | None = None
    row_tokens: float | None = None
    sampled_rows: int | None = None
    notes: list[str] = field(default_factory=list)

    @property
    def labels(self) -> Sequence[str] | None:
        """Return the names of the classes, those of the data or of the model, or None."""
        return self.executor.labels

    @property
    def is_pruning(self) -> bool:
        """Return whether `passes.Prune` goes on, so that no epoch so far has weights like those of the end."""
        plan = Pruning.read(self.executor.model)
        return plan is not None and self.executor.steps < plan.end

    @property
    def has_ended(self) -> bool:
        """Return whether all epochs are done or a callback has stopped the run: no error or signal has ended it."""
        return self.control.should_stop or len(self.records) >= self.epochs

    def weights(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters and statistics that validation measures."""
        averaged = {name: np.array(array) for name, array in (self.averaged or {}).items()}
        return copied_weights(self.executor) | averaged

    def stop(self, reason: str) -> None:
        """Ask for the end of the training, and say why."""
        self.control.should_stop = True
        self.stopped = self.stopped or reason


class Callback(Checked):
    """Watch a training run and steer it: override the events that matter, all others do nothing.

    A function of `(run, record)` is a callback, too: `fit` calls it at the end of each epoch.

    Events come in this order: `on_fit_begin`, then for each epoch `on_epoch_begin`, for each step `on_step_begin` and
    `on_step_end`, and `on_epoch_end`; last `on_fit_end`, also after an error or a signal. `on_evaluate_begin`,
    `on_evaluate_end`, `on_save_begin` and `on_save_end` come in between; the validation of an epoch is before its
    `on_epoch_end`, whose record has its measures.

    During each event, the executor has the state after exactly the steps that have ended. A callback whose step
    events do not read or change the executor's state sets `reads_state` to False. If all do so, several steps may run
    in one call of the runtime: `on_step_begin` and `on_step_end` then follow for all of them.

    A checkpoint keeps the attributes that `saved` names. Override `state_dict` and `load_state_dict` to keep more, and
    `reset`, which is called before a run that continues no other, to forget earlier runs.

    With several workers, each has its own callback, which sees the same numbers. A callback that prints or writes sets
    `on_every_worker` to False: only the first worker's then sees the run. What one worker's callback asks for, except
    `should_save`, counts for all.

    >>> class Print(graphopt.Callback):
    ...     def on_epoch_end(self, run, record):
    ...         print(run.epoch, record["loss"] < 1)
    ...         if record["loss"] < 0.1:
    ...             run.stop("the loss is below 0.1")
    """

    reads_state = True
    on_every_worker = True
    saved: ClassVar[Sequence[str]] = ()

    def __post_init__(self) -> None:
        """Check the intervals of a dataclass's fields, and set its other attributes."""
        check_options(self)
        self.reset()

    def reset(self) -> None:
        """Forget earlier runs. A callback that is a dataclass also calls this when it is created."""

    def on_fit_begin(self, run: Run) -> None:
        """Act before the first step of a run, which has been checked and may continue another."""

    def on_epoch_begin(self, run: Run) -> None:
        """Act when an epoch begins; a resumed one does not begin again."""

    def on_step_begin(self, run: Run) -> None:
        """Act when a step begins."""

    def on_step_end(self, run: Run, record: Record) -> None:
        """Act on the numbers of a step: `epoch`, `step`, `rows`, losses, metrics, diagnostics and `learning_rate`."""

    def on_evaluate_begin(self, run: Run) -> None:
        """Act when a validation begins."""

    def on_evaluate_end(self, run: Run, record: Record) -> None:
        """Act on the measures of a validation, `validation_loss` first."""

    def on_save_begin(self, run: Run) -> None:
        """Act when a checkpoint begins."""

    def on_save_end(self, run: Run, path: Path) -> None:
        """Act on the folder of a checkpoint; it is complete when the next event comes."""

    def on_epoch_end(self, run: Run, record: Record) -> None:
        """Act on the record of an epoch: means over its rows, the measures of its validation, and times."""

    def on_fit_end(self, run: Run) -> None:
        """Act at the end of a run, whatever ended it."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state that a checkpoint keeps: numbers, strings, lists and NumPy arrays by name."""
        return {name: getattr(self, name) for name in self.saved}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Continue from a state that `state_dict` returned."""
        for name in self.saved:
            setattr(self, name, state[name])


class OfFunction(Callback):
    """Call a function with the run and the record at the end of each epoch.

    Args:
        function: a function of a `Run` and a record.

    Raises:
        GraphoptError: the function takes other arguments.
    """

    reads_state = False
    on_every_worker = False

    def __init__(self, function: Callable[[Run, Record], object]) -> None:
        check_function(function, "callbacks", ("run", "record"))
        self._function = function

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self._function(run, record)


_EVENTS = [name for name, method in vars(Callback).items() if name.startswith("on_") and callable(method)]
Watcher = Callback | Callable[[Run, Record], object]
Watchers = Watcher | Sequence[Watcher] | None


def callbacks_of(given: object) -> tuple[Callback, ...]:
    """Return callbacks, functions among them, one or several, as a tuple of objects.

    Raises:
        GraphoptError: one is something else.
    """
    several = given if isinstance(given, Iterable) and not isinstance(given, str | Mapping) else [given]
    return () if given is None else tuple(map(_checked_callback, several))


def _checked_callback(given: object) -> Callback:
    if isinstance(given, Callback):
        _check_events(given)
        return given
    if callable(given) and not isinstance(given, type):
        return OfFunction(given)
    mend = "a function of the run and its record is one, too"
    if isinstance(given, type):
        mend = f"write {given.__name__}(...), an instance of it"
    elif isinstance(given, str) and (meant := nearest(given, _kinds())):
        mend = f"write graphopt.callbacks.{meant}(...)"
    raise GraphoptError(f"callbacks: expected objects of graphopt.callbacks, found {kind_of(given)}: {mend}")


def _check_events(given: Callback) -> None:
    """Raise an error if a callback has a method that looks like an event, or an event with other arguments."""
    for name in dir(type(given)):
        method, event = getattr(type(given), name), getattr(Callback, name, None)
        if not name.startswith("on_") or method is event or not callable(method):
            continue
        where = f"callbacks: {type(given).__name__}"
        if callable(event):
            arguments = list(inspect.signature(event).parameters)[1:]
            check_function(getattr(given, name), f"{where}.{name}", arguments)
        elif meant := nearest(name, _EVENTS):
            raise GraphoptError(f"{where}: unknown event {name!r}, nearest: {meant!r}; known: {', '.join(_EVENTS)}")


def _kinds(base: type[Callback] = Callback) -> list[str]:
    """Return the names of the callbacks that are loaded."""
    return [name for kind in base.__subclasses__() for name in (kind.__name__, *_kinds(kind))]


class CallbackGroup:
    """Call callbacks in order, and name each by its class, which is numbered from the second one on."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._run = run
        self._named: dict[str, Callback] = {}
        for callback in callbacks:
            name = type(callback).__name__
            count = sum(type(other).__name__ == name for other in self._named.values())
            self._named[f"{name}.{count + 1}" if count else name] = callback

    @property
    def reads_state(self) -> bool:
        """Return whether step events of any callback read or change the executor's state."""
        return any(callback.reads_state for callback in self._named.values())

    def tell(self, event: str, *arguments: object) -> None:
        """Call the method of an event of all callbacks."""
        for callback in self._named.values():
            getattr(callback, event)(self._run, *arguments)

    def reset(self) -> None:
        """Reset all callbacks."""
        for callback in self._named.values():
            callback.reset()

    def state(self) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
        """Return the values of each callback for JSON, and copies of the arrays of all by `callback/name`."""
        values: dict[str, dict[str, Any]] = {name: {} for name in self._named}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._named.items():
            for key, value in callback.state_dict().items():
                if isinstance(value, np.ndarray):
                    arrays[f"{name}/{key}"] = np.array(value)
                else:
                    values[name][key] = value
        return values, arrays

    def load_state(self, values: Mapping[str, Mapping[str, object]], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from a state that `state` returned."""
        for name, callback in self._named.items():
            start = f"{name}/"
            own = {key.removeprefix(start): x for key, x in arrays.items() if key.startswith(start)}
            state = {**values.get(name, {}), **own}
            if state:
                callback.load_state_dict(state)

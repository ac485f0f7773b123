"""Train by a recipe: in this process, or as one of several workers."""

from __future__ import annotations

import logging
import math
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path

import onnx_ir as ir
from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode
from rich.console import Console

from graphopt.cli.check import first_rows
from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.messages import NOT_FINITE, compilations, complain, say, tell_record
from graphopt.cli.run_folder import (
    ADAPTER_FILES,
    CHECKPOINTS,
    CONFIG,
    METRICS_FILE,
    MODEL,
    REPORT,
    RESULT,
    STATE_FILE,
    STEP,
    locked,
    result,
    resumed,
    write_result,
)
from graphopt.cli.trained import write_trained
from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError
from graphopt.graph.listing import size
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import save
from graphopt.inspection.words import counted
from graphopt.runtime.steps import NonFiniteLoss
from graphopt.training.callbacks import JSONL, Callback, Record, Run
from graphopt.training.callbacks.page import Page
from graphopt.training.callbacks.progress import ProgressBar, measures
from graphopt.training.callbacks.terminal import open_console, print_line
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.fit import fit
from graphopt.training.progress import AnotherRun
from graphopt.training.signals import deferred

_SECONDS_FOR_FIRST = 2.0  # that other workers leave to the first one to report the same error


def train(recipe: Recipe, folder: Path, main: Callable[[Sequence[str]], int]) -> float | None:
    """Train by a recipe; return the loss of held-out rows, or of training, if this worker is the first one.

    Hydra has made the folder. `main` runs the command in this process.
    """
    launcher = recipe.launcher
    if recipe.fields.get("launcher") and _is_sweep():
        raise GraphoptError(
            "launcher: expected a single run, found a sweep: leave it out, or run the jobs of the sweep one by one"
        )
    if launcher.starts():
        folder, _ = _open(recipe, folder)
        _leave_to_first(recipe, folder)
        recipe.program()  # raises its errors before any worker starts
        launcher.start(list(recipe.command_line.arguments), folder, main)
    communicator = launcher.communicator()
    with _ending_together(communicator):
        if communicator.leads:
            return _lead(recipe, communicator, folder)
        _follow(recipe, communicator, folder)
    return None


def _lead(recipe: Recipe, communicator: Communicator, folder: Path) -> float:
    """Train as the worker that prints and writes."""
    console = open_console(quiet=recipe.fields["quiet"])
    hydra = HydraConfig.get()
    title = f"[{hydra.job.num}] {' '.join(hydra.overrides.task)}" if _is_sweep() else None
    folder, resume = _open(recipe, folder)
    with locked(folder, is_new=not resume), compilations(console):
        if title and (value := result(folder, recipe.fields)) is not None:
            say(console, "complete", f"{title}: {folder}")
            return value
        tell_record(console, recipe.command_line)
        try:
            files = _train(recipe, communicator, folder, console, title, resume)
        except NonFiniteLoss as error:
            if not title:
                raise
            complain(error)
            write_result(folder, math.inf)
            return math.inf
        run = files.run
        final = run.restored or run.records[-1]
        value = next((float(final[x]) for x in ("validation_loss", "loss") if x in final), math.nan)
        write_result(folder, value, final["epoch"])
    _summarize(run, final, console, is_complete=files.is_complete)
    checkpoints = "" if recipe.fields["fit"].get("checkpoint") is None else ", checkpoints"
    models = [name for name in (MODEL, *ADAPTER_FILES, STATE_FILE) if (folder / name).exists()]
    written = f"{REPORT}, {STEP}, {', '.join(models)}, {METRICS_FILE}, {CONFIG}{checkpoints}"
    say(console, "written", f"{folder}: {written}")
    return value


def _open(recipe: Recipe, folder: Path) -> tuple[Path, Path | bool]:
    """Return the folder of the run, and the checkpoint to continue; a sweep that is run again continues its runs."""
    resume = recipe.fields.get("resume", False) or _is_sweep()
    return resumed(resume, folder, recipe.fields, search=not _is_sweep() and not recipe.names_folder)


def _train(
    recipe: Recipe,
    communicator: Communicator,
    folder: Path,
    console: Console,
    title: str | None,
    resume: Path | bool,
) -> _Files:
    """Train, and write the trained model, also after a signal or a loss that is not finite."""
    fields, model, reader = recipe.fields["fit"], recipe.fields["model"], recipe.choices["data"]
    step, opened = recipe.program()
    if recipe.fields["reward"] is None:
        first_rows(recipe, step)  # wrong data is refused before kernels are compiled
    executor = opened(communicator)
    files = _Files(folder, step, recipe)
    header = _Header(console, title, recipe, step, communicator.size)
    callbacks = recipe.callbacks(folder, is_new=not resume)
    page = Page(
        folder / REPORT,
        f"{model} on {reader}",
        model=recipe.model(),
        recipe=recipe.text(),
        batch_size=fields["batch_size"],
        facts={
            **{name: recipe.choices[name].replace("_", " ") for name in ("loss", "optimizer")},
            **{name.replace("_", " "): str(fields[name]) for name in ("batch_size", "seed")},
        },
        callbacks=callbacks,
        norms=recipe.example_norms,
    )
    own = [files, header, ProgressBar(console, epochs=title is None), page]
    checkpoint = fields.get("checkpoint")
    try:
        data, options = recipe.fed(executor)
        fit(
            executor,
            data,
            **options,
            callbacks=[*callbacks, *own],
            checkpoint=None if checkpoint is None else Checkpoints(folder / CHECKPOINTS, **checkpoint),
            resume=False if resume is True else resume,
        )
    except AnotherRun as error:
        raise GraphoptError(f"{error}: {_what_differs(recipe)}") from error
    except (KeyboardInterrupt, SystemExit, NonFiniteLoss) as error:
        spoiled = executor.in_place and isinstance(error, NonFiniteLoss)
        if executor.batches and not spoiled:
            with deferred():
                written = write_trained(recipe, executor, folder)
                say(console, "stopped", f"after step {executor.batches}: {written}")
                page.write()
        raise
    with deferred():
        write_trained(recipe, executor, folder)
        page.write()
    return files


class _Files(JSONL):
    """Write the recipe, step.onnx and metrics.jsonl of a training run, once `fit` has checked the data."""

    def __init__(self, folder: Path, step: ir.Model, recipe: Recipe) -> None:
        super().__init__(folder / METRICS_FILE, log_steps=bool(recipe.fields["fit"]["log_steps"]))
        self._folder, self._step, self._recipe = folder, step, recipe

    def on_fit_begin(self, run: Run) -> None:
        self.run, self.is_complete = run, run.resumed is not None and len(run.records) >= run.epochs
        self._recipe.write_record(self._folder)
        (self._folder / RESULT).unlink(missing_ok=True)  # of an earlier part of this run
        save(self._step, self._folder / STEP)
        super().on_fit_begin(run)


@dataclass
class _Header(Callback):
    """Print the model, the data and the length of the run."""

    reads_state = False
    on_every_worker = False
    console: Console
    title: str | None
    recipe: Recipe
    step: ir.Model
    workers: int

    def on_fit_begin(self, run: Run) -> None:
        if self.title is not None:
            print_line(self.console, self.title, style="bold")
        held_out = f", {run.validation_rows:,} held out" if run.validation_rows else ""
        rows = "rows" if run.rows is None else f"{run.rows:,} rows"
        steps = "" if run.steps is None else f", {counted(run.epochs * run.steps, 'step')}"
        workers = f", {counted(self.workers, 'worker')}" if self.workers > 1 else ""
        lines = {
            "model": f"{self.recipe.fields['model']}, {parameter_count(self.step)}",
            "data": f"{self.recipe.choices['data']}, {rows} to train on{held_out}",
            **self.recipe.learnt,
            "run": f"{counted(run.epochs, 'epoch')}{steps}{workers}",
        }
        if run.resumed is not None:
            lines["resumed"] = f"after step {run.step:,}, in epoch {run.epoch}: {run.resumed}"
        for topic, text in lines.items():
            say(self.console, topic, text)


def _what_differs(recipe: Recipe) -> str:
    """Return why a run cannot continue, and what to do."""
    changed = ", ".join(recipe.command_line.replaced)
    if changed:
        return f"this command has {changed}: leave out what changes the training graph or the data"
    return "the recipe, the data, the model's file or graphopt has changed: start a new run, without resume"


def _summarize(run: Run, final: Record, console: Console, *, is_complete: bool) -> None:
    """Print how a run has ended, with the record of the epoch whose weights it has."""
    if run.stopped is not None:
        say(console, "stopped", run.stopped)
    last, seconds = run.records[-1], sum(record["seconds"] for record in run.records)
    if is_complete:
        what = f"the run has its {counted(run.epochs, 'epoch')}; a larger fit.epochs continues it"
        say(console, "complete", f"nothing to train: {what}")
    elif last["step"]:
        say(console, "trained", f"{counted(last['step'], 'step')} in {seconds:.1f} s, loss {last['loss']:.4g}")
    if final["epoch"] != last["epoch"]:
        say(console, "restored", f"the weights of epoch {final['epoch']}")
    if held_out := {name: final[name] for name in dropwhile("validation_loss".__ne__, final)}:
        say(console, "held out", measures(held_out))
    validated = [record for record in run.records if "validation_loss" in record]
    best = min(validated, key=lambda record: record["validation_loss"], default=final)
    if run.restored is None and best["epoch"] != final["epoch"] and not is_complete:
        say(
            console,
            "best",
            f"epoch {best['epoch']} had validation loss {best['validation_loss']:.4g}; the weights are those of the "
            "last epoch: fit.export=best keeps the best",
        )


def _is_sweep() -> bool:
    return bool(HydraConfig.get().mode == RunMode.MULTIRUN)


def parameter_count(step: ir.Model) -> str:
    """Return the numbers of parameters and nodes of a training graph in words."""
    trained = with_role(step, Role.PARAMETER)
    numbers = sum(math.prod(value.shape.numpy()) for value in trained if value.shape is not None)
    tensors = counted(len(trained), "tensor")
    return f"{counted(numbers, 'parameter')} in {tensors}, a step of {size(step)} nodes"


def _leave_to_first(recipe: Recipe, folder: Path) -> None:
    """Write no log, and remove the folder that Hydra has made: the first worker has the run's folder."""
    for handler in list(logging.getLogger().handlers):
        if isinstance(handler, logging.FileHandler):
            logging.getLogger().removeHandler(handler)
    if not recipe.names_folder:
        with suppress(OSError):
            folder.rmdir()


def _follow(recipe: Recipe, communicator: Communicator, folder: Path) -> None:
    """Train as a worker that prints and writes nothing."""
    _leave_to_first(recipe, folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the first worker has the same
        _, opened = recipe.program()
        callbacks = recipe.callbacks(folder)
        fit(opened(communicator), recipe.data, **recipe.fit, callbacks=callbacks, verbose=False)


@contextmanager
def _ending_together(communicator: Communicator) -> Iterator[None]:
    """End all workers if one of them fails in a `with` block."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit, NonFiniteLoss) as error:  # all workers end so, after the same step
        communicator.gather(b"")
        if isinstance(error, NonFiniteLoss) and not communicator.leads:
            raise SystemExit(NOT_FINITE) from error
        raise
    except Exception as error:
        if communicator.size == 1:
            raise
        if not communicator.leads:
            time.sleep(_SECONDS_FOR_FIRST)
            print(f"graphopt: worker {communicator.rank} of {communicator.size}:", end=" ", file=sys.stderr)
        communicator.abort(complain(error))

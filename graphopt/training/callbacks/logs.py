"""Write the records of a training to files, or send them to programs that show them."""

from __future__ import annotations

import contextlib
import csv
import inspect
import io
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from graphopt.data.files import imported
from graphopt.errors import GraphoptError, line, unknown
from graphopt.fields import check_options
from graphopt.files import WritePath, json_of, making, open_to_append, read_regular, replacing
from graphopt.training.callbacks.callback import Callback, Record, Run

__all__ = ["CSV", "JSONL", "Log", "MLflow", "TensorBoard", "Tracker"]

TRACKERS = ("trackio", "wandb")
POSITION = ("epoch", "step", "rows")


@dataclass
class Log(Callback, ABC):
    """Log a record per epoch, and per step if asked. This is the base class of logs; a subclass implements `log`.

    Args:
        log_steps: log a record per step, in addition to the record per epoch.
    """

    log_steps: bool = field(default=False, kw_only=True)

    reads_state = False
    on_every_worker = False

    _has_failed = False

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log a record; that of an epoch has `seconds`."""

    def _warn_once(self, message: str) -> None:
        """Warn, once in a run, that a record could not be logged."""
        if not self._has_failed:
            warnings.warn(f"{message}; training goes on", stacklevel=3)
        self._has_failed = True

    def on_step_end(self, run: Run, record: Record) -> None:
        if self.log_steps:
            self.log({name: value for name, value in record.items() if isinstance(value, int | float)})

    def on_epoch_end(self, run: Run, record: Record) -> None:
        self.log(record)


@dataclass
class FileLog(Log):
    """Log to a file. This is the base class of such logs; a subclass implements `text` and `records`.

    A resumed run first removes the steps and epochs from the file that are yet to come. If the file cannot be written
    to later, for example because the disk is full, a warning says so, and training goes on.

    Args:
        path: the file. If it exists, a new run replaces it, and a resumed run continues it.
    """

    path: WritePath

    def __post_init__(self) -> None:
        check_options(self)
        self._path = Path(self.path)

    @abstractmethod
    def text(self, records: Sequence[Record]) -> str:
        """Return records as the text of a file."""

    @abstractmethod
    def records(self, text: str) -> list[Record]:
        """Return the whole records in the text of a file."""

    def add(self, record: Record) -> None:
        """Add a record at the end of the file."""
        self._append(self.text([record]))

    def on_fit_begin(self, run: Run) -> None:
        self._has_failed = False
        if self._path.exists() and not self._path.is_file():
            raise GraphoptError(f"{self._path}: expected a file to write to, found something else")
        with making(self._path, "file"):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            records = self._read() if run.resumed is not None else []
        self._write([record for record in records if _is_done(record, run)])

    def log(self, record: Record) -> None:
        try:
            self.add(record)
        except (OSError, GraphoptError) as error:
            self._warn_once(f"{self._path}: {error.strerror if isinstance(error, OSError) else error}")

    def _append(self, text: str) -> None:
        with open(open_to_append(self._path), "a", encoding="utf-8", newline="") as file:
            file.write(text)

    def _read(self) -> list[Record]:
        """Return the records of the file, without a last line that was being written."""
        if not self._path.exists():
            return []
        with open(self._path, encoding="utf-8", errors="replace", newline="") as file:
            whole, newline, _ = file.read().rpartition("\n")
        return self.records(whole + newline)

    def _write(self, records: Sequence[Record]) -> None:
        """Replace the file."""
        with replacing(self._path) as temporary:
            Path(temporary).write_bytes(self.text(records).encode())


def _is_done(record: Record, run: Run) -> bool:
    """Return whether a resumed run has the epoch or the step of a record behind it."""
    with contextlib.suppress(KeyError, TypeError, ValueError):  # the line of another program
        if "seconds" in record:  # that of no epochs comes again, if there are none
            return (0 if run.epochs else 1) <= int(record["epoch"]) <= len(run.records)
        return int(record["step"]) <= run.step
    return False


@dataclass
class JSONL(FileLog):
    """Write a line of JSON per record; numbers that are not finite become null.

    >>> graphopt.callbacks.JSONL("log.jsonl", log_steps=True).path
    'log.jsonl'
    """

    def text(self, records: Sequence[Record]) -> str:
        return "".join(json.dumps({name: json_value(x) for name, x in record.items()}) + "\n" for record in records)

    def records(self, text: str) -> list[Record]:
        return json_lines(text)


@dataclass
class CSV(FileLog):
    """Write a table with a row per record, and a column for each number that any record has.

    >>> graphopt.callbacks.CSV("log.csv").path
    'log.csv'
    """

    def text(self, records: Sequence[Record]) -> str:
        self._columns = list(dict.fromkeys(name for record in records for name in record))
        return self._rows([{name: name for name in self._columns}, *records] if records else [])

    def records(self, text: str) -> list[Record]:
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [{name: x for name, x in row.items() if name and x} for row in rows]

    def add(self, record: Record) -> None:
        if set(record) <= set(self._columns):
            self._append(self._rows([record]))
        else:
            self._write([*self._read(), record])

    def _rows(self, records: Sequence[Record]) -> str:
        text = io.StringIO(newline="")
        csv.DictWriter(text, self._columns, lineterminator="\n").writerows(records)
        return text.getvalue()


def read_json_lines(path: Path) -> list[Record]:
    """Return the mappings in the lines of a file, which may be missing; see `json_lines`."""
    return json_lines((read_regular(path) or b"").decode(errors="replace"))


def json_lines(text: str) -> list[Record]:
    """Return the mappings in the lines of a text; a line that is being written, or is no JSON, is left out."""
    found = []
    for row in text.splitlines():
        with contextlib.suppress(GraphoptError):
            found.append(json_of(row, "a line"))
    return [record for record in found if isinstance(record, dict)]


def json_value(value: object) -> object:
    """Return a value for JSON, with None in place of a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value


@dataclass
class TensorBoard(Log):
    """Write event files for TensorBoard, which show numbers of epochs and of steps as separate charts.

    The package tensorboardX writes them.

    Args:
        path: the folder of the event files.

    >>> graphopt.callbacks.TensorBoard.__name__  # TensorBoard("events"), if tensorboardX is installed
    'TensorBoard'
    """

    path: WritePath

    def __post_init__(self) -> None:
        self._writers = imported("TensorBoard", "tensorboardX")
        self._writer: Any = None

    def on_fit_begin(self, run: Run) -> None:
        purge = None if run.resumed is None else run.step + 1
        suffix = f".{run.step:09d}"  # files are named by the second, and read in order of their names
        with making(self.path):
            self._writer = self._writers.SummaryWriter(os.fspath(self.path), purge_step=purge, filename_suffix=suffix)

    def log(self, record: Record) -> None:
        for name, value in _prefixed_numbers(record).items():
            self._writer.add_scalar(name, value, record["step"])

    def on_fit_end(self, run: Run) -> None:
        if self._writer is not None:
            self._writer.close()


@dataclass
class Tracker(Log):
    """Send records to wandb or trackio, or to a module with the same calls.

    The calls are `run = module.init(project=..., name=..., config=...)`, `run.log(numbers, step=...)` and
    `run.finish()`. A resumed run continues the tracker's run, if it has one of the same id or name.

    Args:
        module: `wandb`, `trackio` or a module.
        project: the name of the project.
        name: the name of the run; by default, the tracker chooses it.
        config: what to note about the run; the command notes the recipe.
        init: further arguments of `init`, by name.

    >>> graphopt.callbacks.Tracker.__name__  # Tracker("wandb", project="digits"), if wandb is installed
    'Tracker'
    """

    module: str | ModuleType
    project: str = "graphopt"
    name: str | None = None
    config: Mapping[str, Any] | None = None
    init: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not hasattr(self.module, "init") and self.module not in TRACKERS:
            raise GraphoptError(f"Tracker: {unknown('module', str(self.module), TRACKERS)}; pass another as a module")
        self._module = imported("Tracker", self.module) if isinstance(self.module, str) else self.module
        self._run: Any = None
        self._kept: Mapping[str, object] = {}

    def on_fit_begin(self, run: Run) -> None:
        options: dict[str, object] = {"name": self.name, **self.init}
        if run.resumed is not None and self._kept:
            options |= {"name": self._kept["name"], "resume": "allow"}
            if "id" in inspect.signature(self._module.init).parameters:
                options["id"] = self._kept["id"]
        config = None if self.config is None else dict(self.config)
        try:
            self._run = self._module.init(project=self.project, config=config, **options)
        except Exception as error:
            raise GraphoptError(f"Tracker: {self._module.__name__}.init: {line(error)}") from error

    def log(self, record: Record) -> None:
        self._run.log(_prefixed_numbers(record), step=record["step"])

    def on_fit_end(self, run: Run) -> None:
        if self._run is not None:
            self._run.finish()

    def state_dict(self) -> dict[str, Any]:
        return {name: getattr(self._run, name, None) for name in ("id", "name")}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self._kept = state


@dataclass
class MLflow(Log):
    """Send records to MLflow as metrics, and the config as parameters. A resumed run continues the MLflow run.

    Args:
        experiment: the name of the experiment.
        name: the name of the run; by default, MLflow chooses it.
        config: the parameters of the run; the command notes the recipe.
        tracking_uri: where MLflow keeps runs; by default, where MLFLOW_TRACKING_URI says.

    >>> graphopt.callbacks.MLflow.__name__  # MLflow("digits"), if mlflow is installed
    'MLflow'
    """

    experiment: str = "graphopt"
    name: str | None = None
    config: Mapping[str, Any] | None = None
    tracking_uri: str | None = None

    saved = ("id",)

    def __post_init__(self) -> None:
        self._mlflow = imported("MLflow", "mlflow")
        self.id: str | None = None
        self._is_running = False

    def on_fit_begin(self, run: Run) -> None:
        run_id = self.id if run.resumed is not None else None
        try:
            if self.tracking_uri is not None:
                self._mlflow.set_tracking_uri(self.tracking_uri)
            self._mlflow.set_experiment(self.experiment)
            self.id = self._mlflow.start_run(run_id=run_id, run_name=self.name).info.run_id
            self._is_running = True
            if run_id is None and self.config:
                self._mlflow.log_params(dict(nested_items(self.config)))
        except self._mlflow.MlflowException as error:
            raise GraphoptError(f"MLflow: {line(error)}") from error

    def log(self, record: Record) -> None:
        try:
            self._mlflow.log_metrics(_prefixed_numbers(record), step=record["step"], run_id=self.id)
        except self._mlflow.MlflowException as error:
            self._warn_once(f"MLflow: {line(error)}")

    def on_fit_end(self, run: Run) -> None:
        if self._is_running:
            self._mlflow.end_run("FINISHED" if run.has_ended else "KILLED")
            self._is_running = False


def _prefixed_numbers(record: Record) -> dict[str, float]:
    """Return the numbers of a record, whose names start with `epoch/` or `step/`."""
    kind = "epoch" if "seconds" in record else "step"
    numbers = {name: value for name, value in record.items() if isinstance(value, int | float)}
    return {f"{kind}/{name}": float(value) for name, value in numbers.items() if name not in POSITION}


def nested_items(node: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each with its path."""
    for name, value in node.items():
        place = f"{path}.{name}" if path else str(name)
        if isinstance(value, Mapping):
            yield from nested_items(value, place)
        else:
            yield place, value

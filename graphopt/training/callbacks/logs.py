"""Write the records of a training to files."""

from __future__ import annotations

import contextlib
import csv
import io
import json
import math
import os
import warnings
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from graphopt.errors import GraphoptError
from graphopt.files import replacing
from graphopt.training.callbacks.callback import Callback, Record, Run


@dataclass
class Log(Callback, ABC):
    """Log a record per epoch, and per step if asked. This is the base class of logs; a subclass implements `log`.

    Args:
        log_steps: log a record per step, in addition to the record per epoch.
    """

    log_steps: bool = field(default=False, kw_only=True)

    reads_state = False
    on_every_worker = False

    @abstractmethod
    def log(self, record: Record) -> None:
        """Log a record; that of an epoch has `seconds`."""

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

    path: str | os.PathLike[str]

    def __post_init__(self) -> None:
        self._path = Path(self.path)
        self._failed = False

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
        self._failed = False
        if self._path.exists() and not self._path.is_file():
            raise GraphoptError(f"{self._path}: expected a file to write to, found something else")
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            records = self._read() if run.resumed is not None else []
        except OSError as error:
            raise GraphoptError(f"{self._path}: expected a file to write to: {error.strerror}") from error
        self._write([record for record in records if _is_done(record, run)])

    def log(self, record: Record) -> None:
        try:
            self.add(record)
        except (OSError, GraphoptError) as error:
            if not self._failed:
                reason = error.strerror if isinstance(error, OSError) else str(error)
                warnings.warn(f"{self._path}: {reason}; training goes on", stacklevel=2)
            self._failed = True

    def _append(self, text: str) -> None:
        with open(self._path, "a", encoding="utf-8", newline="") as file:
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
        if record.get("seconds"):
            return int(record["epoch"]) <= len(run.records)
        return int(record["step"]) <= run.step
    return False


@dataclass
class JSONL(FileLog):
    """Write a line of JSON per record; numbers that are not finite become null.

    >>> graphopt.callbacks.JSONL("log.jsonl", log_steps=True).path
    'log.jsonl'
    """

    def text(self, records: Sequence[Record]) -> str:
        return "".join(
            json.dumps({name: json_value(x) for name, x in record.items()}) + "\n" for record in records
        )

    def records(self, text: str) -> list[Record]:
        records = []
        for line in text.splitlines():
            with contextlib.suppress(ValueError):
                record = json.loads(line)
                records += [record] if isinstance(record, dict) else []
        return records


@dataclass
class CSV(FileLog):
    """Write a table with a row per record, and a column for each number that any record has.

    >>> graphopt.callbacks.CSV("log.csv").path
    'log.csv'
    """

    def text(self, records: Sequence[Record]) -> str:
        self._columns = list(dict.fromkeys(name for record in records for name in record))
        return self._rows(records, header=bool(records))

    def records(self, text: str) -> list[Record]:
        rows = csv.DictReader(io.StringIO(text, newline=""))
        return [{name: x for name, x in row.items() if name and x} for row in rows]

    def add(self, record: Record) -> None:
        if set(record) <= set(self._columns):
            self._append(self._rows([record]))
        else:
            self._write([*self._read(), record])

    def _rows(self, records: Sequence[Record], *, header: bool = False) -> str:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, self._columns, lineterminator="\n")
        if header:
            writer.writeheader()
        writer.writerows(records)
        return text.getvalue()


def json_value(value: Any) -> Any:
    """Return a value for JSON, with None in place of a number that is not finite."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

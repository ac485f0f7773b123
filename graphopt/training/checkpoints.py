"""Write and read checkpoints: folders from which a training run continues bit for bit."""

from __future__ import annotations

import hashlib
import json
import math
import os
import re
import shutil
import sys
import tempfile
import time
import uuid
import warnings
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
import safetensors
import safetensors.numpy

from graphopt.arguments import Checked
from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError, kind_of, unknown
from graphopt.fields import check_options
from graphopt.files import WritePath, json_of, making, read_file, read_regular, write, write_durably
from graphopt.intervals import within
from graphopt.runtime.checkpoint import state_bytes

_STATE, _CALLBACKS = "state.safetensors", "callbacks.safetensors"
_PROGRESS, _MANIFEST = "progress.json", "manifest.json"
NEWEST, BEST = "newest", "best"  # files that name a checkpoint
_LONGEST_NAME = 1000  # bytes
_FOLDER = re.compile(r"step-(\d+)")
_EVERY = re.compile(r"([0-9]+) *(step|epoch)s?")
_TIME = re.compile(r"([0-9]+\.?[0-9]*|\.[0-9]+) *(?:(s|seconds?)|(min|minutes?)|(h|hours?))")
_BUDGET = 0.05  # of the time, for the thread that writes
_LARGER_IS_BETTER = ("accuracy", "auc", "f1", "precision", "r2", "recall", "reward", "score")


def larger_is_better(measure: str) -> bool:
    """Return whether a larger value of a measure, such as `accuracy` or `r2`, is the better one; a loss is not one."""
    return any(part in measure.lower() for part in _LARGER_IS_BETTER)


def seconds(text: str) -> float | None:
    """Return the seconds in a time such as `90 s`, `10 min` or `1.5 h`; None if it is not a time above 0."""
    match = _TIME.fullmatch(text)
    if not match:
        return None
    unit = 1 if match[2] else 60 if match[3] else 3600
    return float(match[1]) * unit or None


@dataclass(frozen=True)
class Checkpoint:
    """Hold the contents of a checkpoint: state by name, callbacks' arrays, and the progress of the run as JSON."""

    path: Path
    state: Mapping[str, np.ndarray]
    arrays: Mapping[str, np.ndarray]
    progress: Mapping[str, Any]


@dataclass
class Checkpoints(Checked):
    """Declare when and where `fit` writes checkpoints, and which of them stay.

    A checkpoint is a folder `step-N`: the state and the arrays of callbacks in safetensors files, the progress of the
    run in progress.json, and a manifest of their SHA-256 sums. A thread writes it under a temporary name, flushes it to
    disk and renames it, while steps run. A checkpoint that is due by the number of steps or by time is left out while
    another is being written, and until the thread has used no more than 5 % of the time since that one began. The files
    `newest` and `best` name the newest checkpoint and the best one.

    Args:
        folder: the folder of all checkpoints of one run.
        every: how often: `100 steps`, `1 epoch`, `5 min`; None for the end of the run only.
        keep: the number of newest checkpoints that stay.
        best: the measure that decides which checkpoints are the best; a record of an epoch has it. None for no best.
        keep_best: the number of best checkpoints that stay.

    Raises:
        GraphoptError: an option is wrong.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> data = {"x": X, "target": 2 * X + 1}
    >>> checkpoints = graphopt.Checkpoints("run", every="1 epoch")
    >>> records = graphopt.fit(graphopt.Executor(step), data, epochs=2, checkpoint=checkpoints)
    >>> records = graphopt.fit(graphopt.Executor(step), data, epochs=3, checkpoint="run", resume=True)
    >>> [record["epoch"] for record in records]
    [1, 2, 3]
    """

    folder: WritePath
    every: str | None = "1 min"
    keep: int = within("[1, inf)", 2)
    best: str | None = "validation_loss"
    keep_best: int = within("[0, inf)", 1)

    def __post_init__(self) -> None:
        if not str(self.folder):
            raise GraphoptError("checkpoint: expected a folder, found '': name one, such as 'run'")
        every = str(self.every)
        count, time_between = _EVERY.fullmatch(every), seconds(every)
        if self.every is not None and not (time_between or (count and int(count[1]))):
            raise GraphoptError(
                f"checkpoint.every: expected '100 steps', '1 epoch', '5 min' or null, found {self.every!r}"
            )
        check_options(self)
        self._folder = Path(self.folder)
        self._values: dict[str, float] = {}  # of the best checkpoints
        self._larger = larger_is_better(self.best or "")
        self._has_warned = False
        self._steps = int(count[1]) if count and count[2] == "step" else None
        self._epochs = int(count[1]) if count and count[2] == "epoch" else None
        self._seconds = time_between or math.inf
        self._thread = ThreadPoolExecutor(1, "graphopt-checkpoint")
        self._writing: Future[Path] | None = None
        self._saved_at = time.monotonic()
        self._cost = 0.0  # seconds of a processor for the latest checkpoint
        self.saved: tuple[int, ...] | None = None  # the position of the latest checkpoint

    def prepare(self, resume: bool | str | os.PathLike[str] = True) -> None:
        """Make the folder, or raise an error; remove the files that an interrupted process has left there.

        Args:
            resume: the option of `fit`: a folder with the checkpoints of a run belongs to a run that continues it.
        """
        if not isinstance(resume, bool):
            find(resume)
        found = (_FOLDER.fullmatch(path.name) for path in self._folder.glob("step-*"))
        if not self._continues(resume) and any(match and int(match[1]) for match in found):
            raise GraphoptError(
                f"{self._folder}: expected an empty folder for checkpoints, found those of another run: continue it by "
                "resume=True, or give another folder"
            )
        with making(self._folder):
            self._folder.mkdir(parents=True, exist_ok=True)
            tempfile.TemporaryFile(dir=self._folder).close()  # raises an error if the folder is read-only
            for left in self._folder.glob(".step-*"):
                shutil.rmtree(left)
        self._saved_at = time.monotonic()

    def _continues(self, resume: bool | str | os.PathLike[str]) -> bool:
        """Return whether a run continues from the folder, from a part of it, or from the run's folder."""
        if isinstance(resume, bool):
            return resume
        own, other = self._folder.resolve(), Path(resume).resolve()
        return own == other or own in other.parents or other in own.parents

    def next_step(self, step: int) -> int | None:
        """Return the next step after which a checkpoint is due by the number of steps, or None."""
        return None if self._steps is None else (step // self._steps + 1) * self._steps

    @property
    def is_busy(self) -> bool:
        """Return whether a checkpoint is being written, or has taken more than its share of the time so far."""
        if self._writing is not None and not self._writing.done():
            return True
        return self._cost > _BUDGET * (time.monotonic() - self._saved_at)

    def is_due(self, step: int) -> bool:
        """Return whether a checkpoint is due after a step."""
        if self._steps is not None:
            return step % self._steps == 0
        return time.monotonic() - self._saved_at >= self._seconds

    def is_due_after(self, epoch: int) -> bool:
        return self._epochs is not None and epoch % self._epochs == 0

    def best_of(self, record: Mapping[str, object]) -> float | None:
        """Return the measure of an epoch if it is among the best so far, otherwise None."""
        value = record.get(self.best) if self.best else None
        if value is None and self.best not in (None, "validation_loss") and not self._has_warned:
            self._has_warned = True
            problem = unknown("measure", str(self.best), record)
            warnings.warn(f"checkpoint.best: {problem}: no checkpoint is the best", stacklevel=5)
        if not isinstance(value, int | float) or not math.isfinite(value):
            return None
        return value if "" in self._ranked({**self._values, "": value}) else None

    def _ranked(self, values: Mapping[str, float]) -> dict[str, float]:
        """Return the best values, the best one first; of equal ones, those that are there already."""
        ranked = sorted(values.items(), key=itemgetter(1), reverse=self._larger)
        return dict(ranked[: self.keep_best])

    def save(
        self,
        position: tuple[int, ...],
        state: Mapping[str, np.ndarray],
        arrays: Mapping[str, np.ndarray],
        progress: Mapping[str, object],
        best: float | None,
    ) -> None:
        """Start to write copies that nobody changes, as a checkpoint; the one before is complete.

        Args:
            position: the number of steps, with what else distinguishes two positions of a run.
            best: the value of the measure, if this checkpoint is among the best.
        """
        self._saved_at, self.saved = time.monotonic(), position
        name = f"step-{position[0]:08d}"
        values = dict(self._values)
        if best is not None:
            values[name] = best
        checkpoint = Checkpoint(self._folder / name, state, arrays, progress)
        self._writing = self._thread.submit(self._write, checkpoint, values)

    def finished(self, *, wait: bool = False) -> Path | None:
        """Return the folder of a checkpoint that has been written since the last call; warn if it could not be."""
        if self._writing is None or not (wait or self._writing.done()):
            return None
        try:
            return self.wait()
        except GraphoptError as error:
            warnings.warn(f"{error}; training goes on", stacklevel=3)
            return None

    def wait(self) -> Path | None:
        """Wait for the checkpoint that is being written, and return its folder; raise an error if it is not written."""
        writing, self._writing = self._writing, None
        if writing is None:
            return None
        try:
            return writing.result()
        except OSError as error:
            raise GraphoptError(
                f"{self._folder}: checkpoint not written: {error.strerror or error}; those from before stay"
            ) from error

    def newest(self) -> Checkpoint | None:
        """Return the newest checkpoint that is whole, or None; warn of newer ones that are damaged."""
        first = _pointer(self._folder / NEWEST)
        paths = [path for path in self._folder.glob("step-*") if not path.is_symlink()]
        for path in sorted(paths, key=lambda path: (path.name == first, path.name), reverse=True):
            try:
                return read(path)
            except GraphoptError as error:
                warnings.warn(f"{error}; an earlier checkpoint is tried", stacklevel=2)
        return None

    def load_values(self, values: Mapping[str, float]) -> None:
        """Continue with the best values of a run so far."""
        self._values = {name: value for name, value in values.items() if (self._folder / name).is_dir()}

    def _write(self, checkpoint: Checkpoint, values: dict[str, float]) -> Path:
        """Write a checkpoint and remove those that need not stay; this runs in the thread."""
        start = time.thread_time()
        target = checkpoint.path
        temporary = _hidden(target)
        values = self._ranked(values)
        contents = {
            _STATE: state_bytes(checkpoint.state),
            _PROGRESS: json.dumps({**checkpoint.progress, "best_values": values}, indent=1).encode(),
        }
        if checkpoint.arrays:
            contents[_CALLBACKS] = state_bytes(checkpoint.arrays)
        sums = {file_name: hashlib.sha256(content).hexdigest() for file_name, content in contents.items()}
        contents[_MANIFEST] = json.dumps({"sha256": sums}, indent=1).encode()
        try:
            temporary.mkdir(parents=True)
            for file_name, content in contents.items():
                write_durably(temporary / file_name, content)
            _flush(temporary)
            _replace_folder(temporary, target)
            _flush(self._folder)
            _point(self._folder / NEWEST, target.name)
            if values:
                _point(self._folder / BEST, next(iter(values)))
            self._values = values
            names = sorted(path.name for path in self._folder.glob("step-*") if _FOLDER.fullmatch(path.name))
            names = [name for name in names if name <= target.name] + [target.name]
            for name in {*names} - {*names[-1 - self.keep :], *values}:
                shutil.rmtree(self._folder / name, ignore_errors=True)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)
            self._cost = time.thread_time() - start
        return target


def read(path: str | os.PathLike[str]) -> Checkpoint:
    """Return the contents of a checkpoint; raise an error if it is missing, incomplete or damaged."""
    folder = Path(path)
    try:
        sums = json_of(read_file(folder / _MANIFEST), str(folder / _MANIFEST))["sha256"]
        names = (_STATE, _PROGRESS, _CALLBACKS) if _CALLBACKS in sums else (_STATE, _PROGRESS)
        contents = {name: read_file(folder / name, sys.maxsize) for name in names}
        for name, content in contents.items():
            if hashlib.sha256(content).hexdigest() != sums[name]:
                raise GraphoptError(f"{folder / name}: damaged: expected the checksum of the manifest, found another")
        state = safetensors.numpy.load(contents[_STATE])
        arrays = safetensors.numpy.load(contents[_CALLBACKS]) if _CALLBACKS in contents else {}
        progress = json_of(contents[_PROGRESS], str(folder / _PROGRESS))
        if not isinstance(progress, dict):
            raise GraphoptError(f"{folder / _PROGRESS}: expected an object in JSON, found {kind_of(progress)}")
        return Checkpoint(folder, state, arrays, progress)
    except GraphoptError:
        raise
    except OSError as error:
        raise GraphoptError(f"{error.filename}: expected a checkpoint of fit: {error.strerror}") from error
    except (ValueError, KeyError, TypeError, safetensors.SafetensorError) as error:
        raise GraphoptError(f"{folder}: expected a whole checkpoint, found a damaged one: {error}") from error


def from_first(communicator: Communicator, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint of the first worker, whose disk the others need not share."""
    if communicator.size == 1:
        return checkpoint
    parts = ({}, {}) if checkpoint is None else (checkpoint.state, checkpoint.arrays)
    state, arrays = (communicator.gather(state_bytes(part))[0] for part in parts)
    about = communicator.gather_json(checkpoint and [str(checkpoint.path), checkpoint.progress])[0]
    if communicator.leads or about is None:
        return checkpoint
    load = safetensors.numpy.load
    return Checkpoint(Path(about[0]), load(state), load(arrays), about[1])


def find(path: str | os.PathLike[str]) -> Path:
    """Return the checkpoint that a path names: itself, or the newest one in it or in its folder `checkpoints`."""
    folder = Path(path)
    for place in (folder, folder / "checkpoints"):
        if (place / _MANIFEST).is_file():
            return place
        newest = Checkpoints(place).newest()
        if newest is not None:
            return newest.path
    raise GraphoptError(f"resume={os.fspath(path)}: expected a checkpoint or a run's folder with one, found none")


def _pointer(path: Path) -> str | None:
    content = read_regular(path, _LONGEST_NAME)
    return None if content is None else content.decode(errors="replace").strip()


def _point(path: Path, name: str) -> None:
    """Write a checkpoint's name to a file, which is not flushed: without it, `newest` reads the folders' names."""
    if _pointer(path) != name:
        write(path, f"{name}\n")


def _replace_folder(written: Path, target: Path) -> None:
    """Rename a folder; an existing target is removed only once the new folder is in place."""
    old = _hidden(target)
    has_old = target.exists()
    if has_old:
        os.rename(target, old)
    try:
        os.rename(written, target)
    except OSError:
        if has_old:
            os.rename(old, target)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _hidden(path: Path) -> Path:
    """Return a new name in the folder of a path, which `prepare` removes after an interruption."""
    return path.with_name(f".{path.name}-{uuid.uuid4().hex}")


def _flush(folder: Path) -> None:
    """Flush the names in a folder to disk, on systems that can."""
    if os.name == "posix":
        handle = os.open(folder, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)

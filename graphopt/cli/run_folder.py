"""Find the folder of a run that another run continues, and keep others out of it."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from graphopt.cli.composition.expansion import MOST_BYTES, read_config
from graphopt.errors import GraphoptError, escaped
from graphopt.files import check_folder, json_of, open_to_append, read_file, write
from graphopt.training.callbacks.callback import Record
from graphopt.training.callbacks.logs import json_value, nested_items
from graphopt.training.checkpoints import find

METRICS_FILE, CONFIG, CHECKPOINTS, RESULT = "metrics.jsonl", "config.yaml", "checkpoints", "result.json"
STEP, MODEL, REPORT = "step.onnx", "trained.onnx", "report.html"
CALIBRATED, CALIBRATION_PAGE = "calibrated.onnx", "calibration.html"
STATE_FILE = "state.safetensors"  # what trains in floats and trained.onnx has in integers
ADAPTER_FILES = "adapter.onnx_adapter", "adapter.safetensors"  # for slots, and the state of adapters
LOCK, LOG = ".lock", "graphopt.log"
# Fields that a run has from its command line only
OF_COMMAND_LINE = (
    *(
        "base_name",
        "folder",
        "form",
        "launcher",
        "predictions",
        "prompt",
        "quiet",
        "recipe",
        "resume",
        "rows",
        "run",
        "time",
    ),
)
OWN_FILES = (
    *(METRICS_FILE, CONFIG, CHECKPOINTS, RESULT, STEP, MODEL, REPORT, LOG),
    *(*ADAPTER_FILES, STATE_FILE, CALIBRATED, CALIBRATION_PAGE, ".hydra", LOCK, ".ray", "."),
)
_OF_SWEEPS = ("multirun.yaml", "optimization_results.yaml")  # which Hydra writes


def check_run(folder: Path, *, whole: bool = False) -> None:
    """Raise an error if the folder of a run has links, devices or files with several names, and follow none.

    Args:
        whole: look at all that the folder has, as in a run of someone else; otherwise at what runs read and write, and
            at the runs of a sweep.
    """
    if not folder.is_dir():
        return
    if whole:
        check_folder(folder)
    else:
        check_folder(folder, lambda name: name.isdigit() or name.casefold() in (*OWN_FILES, *_OF_SWEEPS))


class LineFormatter(logging.Formatter):
    """Format a record as one line: names of steps may have line breaks. graphopt.yaml has Hydra use this class."""

    def format(self, record: logging.LogRecord) -> str:
        return escaped(super().format(record))


class LogFile(logging.FileHandler):
    """Add to the log file of a run, which must not be a link. graphopt.yaml has Hydra use this class."""

    def _open(self) -> Any:
        return open(open_to_append(self.baseFilename), self.mode, encoding=self.encoding)


def resumed(
    resume: bool | str, folder: Path, fields: Mapping[str, object], *, search: bool
) -> tuple[Path, Path | bool]:
    """Return the folder of a run, and the checkpoint that it continues, or False for a new run.

    A run that ended before its first checkpoint gives True instead: it starts over.

    Args:
        resume: True for the newest run of the same recipe; the path of a run or of a checkpoint; False for a new run.
        folder: the folder that Hydra has made for the run.
        fields: the recipe.
        search: look for the newest run in neighbouring folders, too, because the folder's name is the time.
    """
    if not resume:
        return folder, False
    if isinstance(resume, str):
        check_run(Path(resume))
        checkpoint = find(resume)
        run = checkpoint.parents[1]
        if not (run / CONFIG).is_file():
            return folder, checkpoint
        if run.resolve() != folder.resolve():
            leave(folder, run)
        return run, checkpoint
    wanted = _recipe_identity(fields)
    candidates = folder.resolve().parents[1].glob(f"*/*/{CONFIG}") if search else ()
    places = [folder, *(Path(os.path.relpath(path.parent)) for path in candidates)]
    places = [path for path in dict.fromkeys(places) if (path / CONFIG).is_file()]
    for place in sorted(places, key=lambda path: (path != folder, -path.stat().st_mtime)):
        if _is_run_of(place, wanted, is_named=place == folder):
            with contextlib.suppress(GraphoptError):
                checkpoint = find(place)
                if place != folder:
                    leave(folder, place)
                return place, checkpoint
            if place == folder:
                return folder, True
    if folder in places and _holds_run(folder):
        others = sorted(_as_overrides(_identity_of(folder)).items() - _as_overrides(wanted).items())
        raise GraphoptError(
            f"{folder}: expected a run of the same recipe, found one with "
            f"{', '.join(f'{name}={value}' for name, value in others[:3]) or 'fewer fields'}: continue it with "
            f"resume={folder}, or choose another with folder=..."
        )
    return folder, False


def write_result(folder: Path, value: float, epoch: int | None = None) -> None:
    """Note that a run is complete, the number that a sweep minimizes, and the epoch whose weights the run has."""
    write(
        folder / RESULT,
        json.dumps({"value": json_value(value)} | ({} if epoch is None else {"epoch": epoch})),
    )


def final_record(noted: Mapping[str, object], records: Sequence[Record]) -> Record:
    """Return the record of the epoch whose weights a run has, as its result notes; without a note, the last one."""
    if "epoch" in noted:
        named = [record for record in records if record.get("epoch") == noted["epoch"]]
    else:  # of graphopt 0.1 before its release
        value = noted.get("value")
        named = [x for x in records if value is not None and value in (x.get("validation_loss"), x.get("loss"))]
    return next(iter(named or records[-1:]), {})


def result(folder: Path, fields: Mapping[str, object]) -> float | None:
    """Return the result of a complete run of the same recipe in a folder, or None if there is no such run."""
    if not (folder / RESULT).is_file() or _identity_of(folder) != _recipe_identity(fields):
        return None
    noted = json_of(read_file(folder / RESULT, MOST_BYTES), str(folder / RESULT))
    value = noted.get("value", ...) if isinstance(noted, dict) else ...
    if isinstance(value, bool) or not isinstance(value, int | float | None):
        raise GraphoptError(
            f'{folder / RESULT}: expected {{"value": NUMBER}} or null: remove it, to run this job again'
        )
    return math.inf if value is None else float(value)


def leave(folder: Path, place: Path) -> None:
    """Remove the folder that Hydra has made for a run, and write its log files, which are yet empty, elsewhere."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is None:
            handler.baseFilename = os.path.abspath(place / Path(handler.baseFilename).name)
    with contextlib.suppress(OSError):
        folder.rmdir()


class Before:
    """Remember the files in the folder of a run before the command, which leaves nothing if the run does not begin."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._missing = [place for place in (folder, *folder.parents) if not place.exists()]
        self._names = {entry.name for entry in folder.iterdir()} if folder.is_dir() else set()

    def clear(self) -> None:
        """Remove new folders, and locks and logs in them, unless they have other files."""
        entries = self._folder.iterdir() if self._folder.is_dir() else ()
        new = [entry for entry in entries if entry.name not in self._names]
        files = [path for entry in new for path in (entry, *entry.rglob("*")) if not path.is_dir()]
        if all(file.name in (LOCK, LOG, "multirun.yaml") for file in files) and not _is_locked(self._folder / LOCK):
            root = logging.getLogger()
            for handler in [x for x in root.handlers if isinstance(x, logging.FileHandler)]:
                root.removeHandler(handler)  # or else the next record of this process would open its file again
                handler.close()
            for entry in new:
                shutil.rmtree(entry) if entry.is_dir() else entry.unlink()
        for place in self._missing:
            with contextlib.suppress(OSError):
                place.rmdir()


def _is_locked(path: Path) -> bool:
    """Return whether another process holds a lock."""
    try:
        if path.is_file():
            FileLock(path, timeout=0).acquire().lock.release()
    except (Timeout, OSError):
        return True
    return False


@contextlib.contextmanager
def locked(folder: Path, is_new: bool) -> Iterator[None]:
    """Keep other processes from running in a folder, without a run if `is_new`, in a `with` block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / LOCK, timeout=0).acquire()
    except Timeout as error:
        raise GraphoptError(f"{folder}: expected a folder of its own, found a run that is in progress there") from error
    except OSError as error:
        raise GraphoptError(f"{folder}: expected a folder to write to: {error.strerror}") from error
    with lock:
        if is_new:
            check_no_run(folder)
        yield


def check_no_run(folder: Path, verb: str = "") -> None:
    """Raise an error if a folder has a run, whose files others would replace, or which a verb does not use."""
    if _holds_run(folder):
        instead = f"name its model, {verb} {folder / MODEL}" if verb else f"continue it with resume={folder}"
        raise GraphoptError(
            f"{folder}: expected a folder without a run, found one: {instead}, or choose another with folder=..."
        )


def _holds_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).exists() or any((folder / CHECKPOINTS).glob("step-*"))


def _as_overrides(fields: Mapping[str, Any]) -> dict[str, str]:
    """Return the values of nested fields as overrides have them, by their dotted names."""
    return {name: x if isinstance(x, str) else json.dumps(x, default=str) for name, x in nested_items(fields)}


def _is_run_of(folder: Path, wanted: Mapping[str, object], *, is_named: bool) -> bool:
    """Return whether a folder has a run of a recipe; only the named folder raises errors of refused files."""
    try:
        check_run(folder)
        return _identity_of(folder) == wanted
    except GraphoptError:
        if is_named:
            raise
        return False


def _identity_of(folder: Path) -> dict[str, object]:
    """Return the fields that two runs of the same recipe have in common."""
    config = read_config(folder / CONFIG)
    if not isinstance(config, dict):
        raise GraphoptError(f"{folder / CONFIG}: expected the recipe of a run, found no mapping")
    return _recipe_identity(config)


def _recipe_identity(config: Mapping[str, object]) -> dict[str, object]:
    others = (*OF_COMMAND_LINE, "generate")
    return {name: value for name, value in config.items() if name not in others}

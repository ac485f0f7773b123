"""Check a recipe before anything in it is built."""

from __future__ import annotations

import dataclasses
import inspect
import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from graphopt.cli.composition.hydra_config import CommandLine, flattened, on_the_command_line
from graphopt.cli.composition.validation import (
    CALLBACKS,
    MISSING,
    TARGET_KEY,
    check,
    check_fields,
    metrics_of,
    resolve,
)
from graphopt.cli.run_folder import OWN_FILES
from graphopt.data.files import EXPANSION, check_ending
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.hosts.export import export_hosts
from graphopt.training.callbacks import Log, MLflow, Tracker
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.fit import fit

OF_COMMAND = ("log_steps", "checkpoint")  # fields of `fit` that are no arguments of the function
PARTS = ("data", "executor", "fit", "hosts", "limits", "models", "pipeline")
PLAIN: dict[str, Any] = {  # what takes the fields of the parts that name no class or function
    "fit": fit,
    "fit.checkpoint": Checkpoints,
    "hosts": export_hosts,
    "limits": Limits,
}
_ADDED: dict[str, Sequence[str]] = {  # arguments that the command adds
    "executor": ("step",),
    "fit": ("executor", "data", "callbacks", "checkpoint", "resume", "steps_per_epoch"),
    "fit.checkpoint": ("folder",),
    "hosts": ("step", "folder"),
}
_PREDICTIONS = "predictions"  # the name, without its ending, of the file that run=predict writes
# These may name libraries to load and files to write.
_HOST = ("executor.provider_options", "executor.session_options", "executor.custom_ops")
# Of numbers that take memory, however small the data is.
_MOST = {"executor.steps_per_call": 10_000, "fit.prefetch": 1_000}
LIMITS = {  # these protect the memory from a small file that describes a large model
    "data.expansion": EXPANSION,
    **{f"limits.{name}": value for name, value in dataclasses.asdict(Limits()).items()},
}
COMMAND_LINE_ONLY = {*_HOST, *LIMITS, "trust", "callbacks.tracker", "callbacks.mlflow"}


def check_recipe(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Check the names, fields and types of a recipe, and the restrictions of untrusted recipes."""
    leaves = dict(flattened(fields))
    for field, value in leaves.items():
        if isinstance(value, str) and "\0" in value:
            raise GraphoptError(f"{field}: expected text without the character NUL, found {value!r}")
    for field, value, kind, text in _plain(fields):
        if not isinstance(value, kind):
            raise GraphoptError(f"{field}: expected {text}, found {value!r}")
    models, added = {}, dict(_ADDED)
    for name, node in fields["models"].items():
        outputs = node.get("outputs")  # null: the number that the data needs
        if outputs is not None and (type(outputs) is not int or outputs < 1):
            raise GraphoptError(
                f"models.{name}.outputs: expected a number of outputs or null, found {outputs!r}"
            )
        models[name] = {field: value for field, value in node.items() if field != "outputs"}
        added[f"models.{name}"] = ("features", "outputs")
    for key in sorted(fields, key="pipeline".__eq__):  # the pipeline repeats the others, so it comes last
        check(models if key == "models" else fields[key], str(key), command_line.trust, added)
    training = {name: value for name, value in fields["fit"].items() if name not in OF_COMMAND}
    checkpoint = fields["fit"].get("checkpoint") or {}
    parts = {**fields, "fit": {**training, "validation": None}, "fit.checkpoint": checkpoint}
    for key, target in PLAIN.items():
        check_fields(target, parts[key], key, _ADDED.get(key, ()))
    check_ending("predictions", fields["predictions"])
    for field, most in _MOST.items():
        if isinstance(leaves.get(field), int) and leaves[field] > most:
            raise GraphoptError(f"{field}: expected at most {most:,}, found {leaves[field]}")
    metrics_of(training.get("metrics"), command_line.trust)
    _check_logs(fields["callbacks"], command_line)
    if command_line.folders:
        _check_untrusted(fields["models"], leaves, command_line)


def _plain(fields: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any, str]]:
    """Yield the fields that name no class, with the value and the expected type of each."""
    yield from ((key, fields.get(key), str, "a name") for key in ("model", "run", "predictions"))
    yield "quiet", fields.get("quiet"), bool, "true or false"
    yield from ((key, fields.get(key), dict, "a mapping of fields") for key in PARTS)
    yield from ((f"models.{name}", x, dict, "a mapping of fields") for name, x in fields["models"].items())
    yield "fit.checkpoint", fields["fit"].get("checkpoint"), dict | None, "a mapping of fields or null"
    yield "resume", fields.get("resume", False), bool | str, "true, false or a path"


def _check_untrusted(models: Iterable[str], leaves: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if a recipe sets options of the machine, raises limits, or names files of the user."""
    folders = [os.getcwd(), *(folder.removeprefix("file://") for folder in command_line.folders)]
    folders = [os.path.realpath(folder) for folder in folders]
    for field, value in leaves.items():
        is_guarded = field.startswith(_HOST) or field in LIMITS
        if is_guarded and value != LIMITS.get(field) and not command_line.names(field):
            raise on_the_command_line(field)
        if not isinstance(value, str) or command_line.names(field):
            continue
        if field == "resume":
            raise GraphoptError("resume: expected a path on the command line alone, found it in a recipe")
        if field == "predictions" and os.path.splitext(value)[0] != _PREDICTIONS:
            raise _elsewhere(field, f"{_PREDICTIONS} with .npz, .csv or .parquet", value)
        is_file = field in ("model", "fit.validation") or re.fullmatch(r"data\.(.*\.)?path", field)
        if is_file and value != MISSING and (field != "model" or value not in models):
            for path in map(os.path.realpath, (value, *_beneath(value))):
                if not any(os.path.commonpath((path, folder)) == folder for folder in folders):
                    raise _elsewhere(
                        field, "a file below the working directory or the recipe's folder", value
                    )


def _elsewhere(field: str, expected: str, path: str, place: Path | None = None) -> GraphoptError:
    """Return the error of a file that only the command line may name; `place` is where the path leads."""
    log = field.removesuffix(".path") if field.startswith("callbacks.") else ""
    setting = f"{log}={{path: {path}}}" if log else f"{field}={path}"
    return GraphoptError(
        f"{field}: expected {expected}, found {str(place or path)!r} in a recipe: to allow it, say {setting} on the "
        "command line"
    )


def _beneath(folder: str) -> Iterator[str]:
    """Yield what lies in a folder and below it, and below links to folders in it."""
    tops = [folder, *(entry.path for entry in os.scandir(folder))] if os.path.isdir(folder) else []
    for top in tops:
        for at, folders, files in os.walk(top):
            yield from (os.path.join(at, name) for name in (*folders, *files))


def _check_logs(callbacks: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if a log replaces a file of the run, or a recipe logs to other places than the run's folder."""
    for name, node in callbacks.items():
        key, path = f"callbacks.{name}", node.get("path")
        kind = resolve(node[TARGET_KEY], key, command_line.trust)
        if not (inspect.isclass(kind) and issubclass(kind, Log)):
            continue
        if issubclass(kind, Tracker | MLflow):
            for field, value in flattened(node, key) if command_line.folders else ():
                is_class = field == f"{key}.{TARGET_KEY}"
                is_short = is_class and value == CALLBACKS.get(name)
                if not command_line.names(key if is_short else field):
                    raise on_the_command_line(key if is_class else field)
        elif isinstance(path, str):
            place = os.path.normpath(path)
            top = place.split(os.sep)[0]
            if top.casefold() in OWN_FILES:
                raise GraphoptError(
                    f"{key}.path: expected a name that the run's own files do not have, found {path!r}"
                )
            outside = os.path.isabs(place) or top == os.pardir
            if outside and command_line.folders and not command_line.names(f"{key}.path"):
                raise _elsewhere(f"{key}.path", "a file below the run's folder", path)


def check_new_logs(
    callbacks: Mapping[str, Any], folder: Path, command_line: CommandLine, is_new: bool
) -> None:
    """Raise an error if a recipe's log is outside the run's folder by a link, or replaces a file there."""
    for name, node in callbacks.items():
        field, path = f"callbacks.{name}.path", node.get("path")
        if isinstance(path, str) and not command_line.names(field):
            place = Path(folder, path)
            if not place.resolve().is_relative_to(folder.resolve()) or (is_new and place.is_file()):
                raise _elsewhere(field, "a new file in the run's folder", path, place)

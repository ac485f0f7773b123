"""Check a recipe before anything in it is built."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from graphopt.cli.composition.hydra_config import CommandLine, leaves, on_the_command_line
from graphopt.cli.composition.validation import (
    CALLBACKS,
    MISSING,
    TARGET,
    check,
    check_fields,
    mappings,
    metrics_of,
    resolve,
)
from graphopt.cli.run_folder import OWN
from graphopt.data.files import EXPANSION
from graphopt.data.writing import check_ending
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.hosts.export import export_hosts
from graphopt.training.callbacks import Log, MLflow, Tracker
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.fit import fit

PARTS = ("data", "executor", "fit", "hosts", "limits", "models", "pipeline")
OF_COMMAND = ("log_steps", "checkpoint")  # fields of `fit` that are no arguments of the function
PREDICTIONS = "predictions"  # the name, without its ending, of the file that run=predict writes
FILES = ("path",)  # names of fields whose values are files
# These may name libraries to load and files to write.
HOST = ("executor.provider_options", "executor.session_options", "executor.custom_ops")
# Of numbers that take memory, however small the data is.
MOST = {"executor.steps_per_call": 10_000, "fit.prefetch": 1_000}
LIMITS = {  # these protect the memory from a small file that describes a large model
    "data.expansion": EXPANSION,
    **{f"limits.{name}": value for name, value in dataclasses.asdict(Limits()).items()},
}

COMMAND_LINE_ONLY = {*HOST, *LIMITS, "trust", "callbacks.tracker", "callbacks.mlflow"}


def check_recipe(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Check the names, fields and types of a recipe, and the restrictions of untrusted recipes."""
    for field, value in leaves(fields):
        if isinstance(value, str) and "\0" in value:
            raise GraphoptError(f"{field}: expected text without the character NUL, found {value!r}")
    _check_types(fields)
    for key in sorted(fields, key="pipeline".__eq__):  # the pipeline repeats the others, so it comes last
        if key == "callbacks":
            for name, node in fields[key].items():
                check(node, f"{key}.{name}", command_line.trust)
        elif key == "models":
            for name, node in fields[key].items():
                _check_model(node, f"{key}.{name}", command_line)
        else:
            check(fields[key], str(key), command_line.trust, ("step",) if key == "executor" else ())
    training = {name: value for name, value in fields["fit"].items() if name not in OF_COMMAND}
    if fields["fit"].get("checkpoint") is not None:
        check_fields(Checkpoints, fields["fit"]["checkpoint"], "fit.checkpoint", ("folder",))
    check_ending("predictions", fields["predictions"])
    check_fields(Limits, fields["limits"], "limits")
    check_fields(export_hosts, fields["hosts"], "hosts", ("step", "folder"))
    check_fields(
        fit,
        {**training, "validation": None},
        "fit",
        ("executor", "data", "callbacks", "checkpoint", "resume", "steps_per_epoch"),
    )
    for path, most in MOST.items():
        group, _, name = path.partition(".")
        number = fields[group].get(name)
        if isinstance(number, int) and number > most:
            raise GraphoptError(f"{path}: expected at most {most:,}, found {number}")
    metrics_of(training.get("metrics"), command_line.trust)
    _check_logs(fields["callbacks"], command_line)
    if command_line.folders:
        _check_files(fields, command_line)
        _check_written(fields, command_line)
        _check_host(fields, command_line)


def _check_types(fields: Mapping[str, Any]) -> None:
    """Raise an error if a field that names no class has another type than expected."""
    expected: list[tuple[str, Any, Any, str]] = [
        *((key, fields.get(key), str, "a name") for key in ("model", "run", "predictions")),
        ("quiet", fields.get("quiet"), bool, "true or false"),
        *((key, fields.get(key), dict, "a mapping of fields") for key in PARTS),
    ]
    for key, value, kind, text in expected:
        if not isinstance(value, kind):
            raise GraphoptError(f"{key}: expected {text}, found {value!r}")
    for name, model in fields["models"].items():
        if not isinstance(model, dict):
            raise GraphoptError(f"models.{name}: expected a mapping of fields, found {model!r}")
    checkpoint, resume = fields["fit"].get("checkpoint"), fields.get("resume", False)
    if not isinstance(checkpoint, dict | None):
        raise GraphoptError(f"fit.checkpoint: expected a mapping of fields or null, found {checkpoint!r}")
    if not isinstance(resume, bool | str):
        raise GraphoptError(f"resume: expected true, false or a path, found {resume!r}")


def _check_model(node: Mapping[str, Any], key: str, command_line: CommandLine) -> None:
    node, given = dict(node), ("features", "outputs")
    outputs = node.pop("outputs", None)  # null: the number that the data needs
    if outputs is not None and (type(outputs) is not int or outputs < 1):
        raise GraphoptError(f"{key}.outputs: expected a number of outputs or null, found {outputs!r}")
    check(node, key, command_line.trust, given)


def _check_files(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if the recipe names a file outside the working directory and the recipes' folders."""
    allowed = [os.getcwd(), *(one.removeprefix("file://") for one in command_line.folders)]
    allowed = [os.path.realpath(one) for one in allowed]
    for field, file in _files(fields):
        if command_line.names(field):
            continue
        for path in map(os.path.realpath, (file, *_beneath(file))):
            if not any(os.path.commonpath((path, folder)) == folder for folder in allowed):
                raise GraphoptError(
                    f"{field}: expected a file below the working directory or the recipe's folder, "
                    f"found {file!r} in a recipe: to allow it, say {field}={file} on the command line"
                )


def _beneath(folder: str) -> Iterator[str]:
    """Yield what lies in a folder and below it, and below links to folders in it."""
    tops = [folder, *(entry.path for entry in os.scandir(folder))] if os.path.isdir(folder) else []
    for top in tops:
        for at, folders, files in os.walk(top):
            yield from (os.path.join(at, name) for name in (*folders, *files))


def _check_written(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if the recipe names a run to write to, or a file that could replace one of the user's."""
    if isinstance(fields.get("resume"), str) and not command_line.names("resume"):
        raise GraphoptError("resume: expected a path on the command line alone, found it in a recipe")
    predictions = str(fields.get("predictions", ""))
    if os.path.splitext(predictions)[0] != PREDICTIONS and not command_line.names("predictions"):
        raise GraphoptError(
            f"predictions: expected {PREDICTIONS} with .npz, .csv or .parquet, found {predictions!r} in a recipe: to "
            f"allow it, say predictions={predictions} on the command line"
        )


def _check_logs(callbacks: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if a log replaces a file of the run, or a recipe logs to other places than the run's folder."""
    for name, node in callbacks.items():
        key, path = f"callbacks.{name}", node.get("path")
        kind = resolve(node[TARGET], key, command_line.trust)
        if not (inspect.isclass(kind) and issubclass(kind, Log)):
            continue
        if issubclass(kind, Tracker | MLflow):
            for field, value in leaves(node, key) if command_line.folders else ():
                is_class = field == f"{key}.{TARGET}"
                is_short = is_class and value == CALLBACKS.get(name)
                if not command_line.names(key if is_short else field):
                    raise on_the_command_line(key if is_class else field)
        elif isinstance(path, str):
            place = os.path.normpath(path)
            if place.split(os.sep)[0].casefold() in OWN:
                raise GraphoptError(
                    f"{key}.path: expected a name that the run's own files do not have, found {path!r}"
                )
            outside = os.path.isabs(place) or place.split(os.sep)[0] == os.pardir
            if outside and command_line.folders and not command_line.names(f"{key}.path"):
                raise GraphoptError(
                    f"{key}.path: expected a file below the run's folder, found {path!r} in a recipe: to allow it, "
                    f"say {key}={{path: {path}}} on the command line"
                )


def check_new_logs(
    callbacks: Mapping[str, Any], folder: Path, command_line: CommandLine, is_new: bool
) -> None:
    """Raise an error if a recipe's log is outside the run's folder by a link, or replaces a file there."""
    for name, node in callbacks.items():
        field, path = f"callbacks.{name}.path", node.get("path")
        if not isinstance(path, str) or command_line.names(field):
            continue
        place = Path(folder, path)
        if not place.resolve().is_relative_to(folder.resolve()) or (is_new and place.is_file()):
            raise GraphoptError(
                f"{field}: expected a new file in the run's folder, found {str(place)!r} in a recipe: to allow it, "
                f"say callbacks.{name}={{path: {path}}} on the command line"
            )


def _check_host(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if the recipe sets options of the machine or raises limits."""
    for path, value in (
        pair for group in ("executor", "data", "limits") for pair in leaves(fields[group], group)
    ):
        default = LIMITS.get(path)
        guarded = path.startswith(HOST) or path in LIMITS
        if guarded and value != default and not command_line.names(path):
            raise on_the_command_line(path)


def _files(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields that name files, with the file of each."""
    if fields["model"] not in fields["models"]:
        yield "model", str(fields["model"])
    if isinstance(fields["fit"].get("validation"), str):
        yield "fit.validation", fields["fit"]["validation"]
    for where, mapping in mappings(fields["data"], "data"):
        for name in FILES:
            if isinstance(mapping.get(name), str) and mapping[name] != MISSING:
                yield f"{where}.{name}", mapping[name]

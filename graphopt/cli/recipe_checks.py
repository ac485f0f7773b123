"""Check a recipe before anything in it is built."""

from __future__ import annotations

import dataclasses
import inspect
import os
from collections.abc import Iterator, Mapping
from typing import Any

from graphopt.cli.hydra_config import CommandLine
from graphopt.cli.run_folder import OWN
from graphopt.cli.validation import MISSING, TARGET, check, check_fields, mappings, metrics_of, resolve
from graphopt.data.files import EXPANSION
from graphopt.data.writing import check_ending
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.hosts.export import export_hosts
from graphopt.training.callbacks import Log, MLflow, Tracker
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.fit import fit

FILES = ("path",)  # names of fields whose values are files
HOST = (
    "executor.provider_options",
    "executor.session_options",
    "launcher.address",
    "launcher.workers",
)  # these may name libraries to load and files to write, or start many processes
LIMITS = {  # these protect the memory from a small file that describes a large model
    "data.expansion": EXPANSION,
    **{f"limits.{name}": value for name, value in dataclasses.asdict(Limits()).items()},
}


def check_recipe(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Check the names, fields and types of a recipe, and the restrictions of untrusted recipes.

    Raises:
        GraphoptError: the recipe names code, files or options that it may not name, or has invalid fields.
    """
    for key in ("data", "executor", "fit", "hosts", "limits", "models", "pipeline"):
        if not isinstance(fields.get(key), dict):
            raise GraphoptError(f"{key}: expected a mapping of fields, found {fields.get(key)!r}")
    for name, model in fields["models"].items():
        if not isinstance(model, dict):
            raise GraphoptError(f"models.{name}: expected a mapping of fields, found {model!r}")
    for key in sorted(fields, key="pipeline".__eq__):  # the pipeline repeats the others, so it comes last
        if key in ("callbacks", "models"):
            for name, node in fields[key].items():
                given = ("features", "outputs") if key == "models" else ()
                check(node, f"{key}.{name}", command_line.trust, given)
        else:
            check(fields[key], str(key), command_line.trust, ("step",) if key == "executor" else ())
    left = ("log_steps", "checkpoint")
    training = {name: value for name, value in fields["fit"].items() if name not in left}
    checkpoint = fields["fit"].get("checkpoint")
    if checkpoint is not None:
        if not isinstance(checkpoint, dict):
            raise GraphoptError(f"fit.checkpoint: expected a mapping of fields or null, found {checkpoint!r}")
        check_fields(Checkpoints, checkpoint, "fit.checkpoint", ("folder",))
    if not isinstance(fields.get("resume", False), bool | str):
        raise GraphoptError(f"resume: expected true, false or a path, found {fields['resume']!r}")
    check_ending("predictions", str(fields.get("predictions", "")))
    check_fields(Limits, fields["limits"], "limits")
    check_fields(export_hosts, fields["hosts"], "hosts", ("step", "folder"))
    check_fields(
        fit,
        {**training, "validation": None},
        "fit",
        ("executor", "data", "callbacks", "checkpoint", "resume", "steps_per_epoch"),
    )
    metrics_of(training.get("metrics"), command_line.trust)
    _check_logs(fields["callbacks"], command_line)
    if command_line.folders:
        _check_files(fields, command_line)
        _check_host(fields, command_line)


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


def _check_logs(callbacks: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if a log replaces a file of the run, or a recipe logs to other places than the run's folder."""
    for name, node in callbacks.items():
        key, path = f"callbacks.{name}", node.get("path")
        kind = resolve(node[TARGET], key, command_line.trust)
        if not (inspect.isclass(kind) and issubclass(kind, Log)):
            continue
        if issubclass(kind, Tracker | MLflow):
            if command_line.folders and not command_line.names(key):
                raise GraphoptError(f"{key}: expected it on the command line alone, found it in a recipe")
        elif isinstance(path, str):
            place = os.path.normpath(path)
            if place.split(os.sep)[0] in OWN:
                raise GraphoptError(
                    f"{key}.path: expected a name that the run's own files do not have, found {path!r}"
                )
            outside = os.path.isabs(place) or place.split(os.sep)[0] == os.pardir
            if outside and command_line.folders and not command_line.names(f"{key}.path"):
                raise GraphoptError(
                    f"{key}.path: expected a file below the run's folder, found {path!r} in a recipe: to allow it, "
                    f"say {key}={{path: {path}}} on the command line"
                )


def _check_host(fields: Mapping[str, Any], command_line: CommandLine) -> None:
    """Raise an error if the recipe sets options of the machine or raises limits."""
    for path, value in (
        pair for group in ("executor", "data", "launcher", "limits") for pair in _values(fields[group], group)
    ):
        default = LIMITS.get(path)
        guarded = path.startswith(HOST) or path in LIMITS
        if guarded and value != default and not command_line.names(path):
            raise GraphoptError(f"{path}: expected it on the command line alone, found it in a recipe")


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


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested mappings, each with its path."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _values(value, f"{path}.{name}")
    else:
        yield path, node

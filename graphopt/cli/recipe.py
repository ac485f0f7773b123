"""A composed recipe, checked as a whole, and what it builds."""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from omegaconf import DictConfig, OmegaConf

from graphopt.cli.hydra_config import CommandLine
from graphopt.cli.validation import MISSING, build, check, check_fields, mappings
from graphopt.data import Dataset
from graphopt.data.files import EXPANSION
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.graph.loading import load
from graphopt.graph.roles import Role, with_role
from graphopt.pipeline import Pipeline
from graphopt.runtime.executor import Executor
from graphopt.training.fit import fit, held_out_rows, reported

FILES = ("path",)  # fields of what recipes may name whose values are files
HOST = (
    "executor.provider_options",
    "executor.session_options",
)  # may name libraries to load and files to write
LIMITS = {  # which keep a file from filling the memory
    "data.expansion": EXPANSION,
    **{f"limits.{name}": value for name, value in dataclasses.asdict(Limits()).items()},
}


class Recipe:
    """A composed config, resolved once and checked, and what it builds.

    Args:
        config: the config, without the node `hydra`.
        choices: the option that each group has.
        command_line: what the user has said.

    Raises:
        GraphoptError: the recipe names code, files or options that it may not, or fields that do not fit.
    """

    def __init__(self, config: DictConfig, choices: Mapping[str, str], command_line: CommandLine) -> None:
        self.choices = choices
        self._command_line = command_line
        self._trust = command_line.trust
        OmegaConf.set_struct(config, False)
        for group, choice in choices.items():
            if choice == "none" and group in config:
                config[group] = None  # an experiment may have fields for a step that is left out
        if self._resolve(config, steps=1):
            self._resolve(config, steps=self.steps)

    @functools.cached_property
    def data(self) -> Dataset:
        data: Dataset = self._build("data")
        return data

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        pipeline: Pipeline = self._build("pipeline")
        return pipeline

    @functools.cached_property
    def fit(self) -> dict[str, Any]:
        """The arguments of `fit`, with a validation file read."""
        fields = {name: value for name, value in self.fields["fit"].items() if name != "log_steps"}
        validation = fields.pop("validation", None)
        if isinstance(validation, str):
            if "path" not in self.fields["data"]:
                raise GraphoptError(
                    f"fit.validation={validation}: data={self.choices['data']} reads no file; "
                    f"expected a share of the rows"
                )
            validation = self._build("data", path=validation)
        elif validation is not None and not isinstance(validation, int | float):
            raise GraphoptError(
                f"fit.validation: expected a share of the rows or a file, found {validation!r}"
            )
        return {**fields, "validation": validation}

    @property
    def steps(self) -> int:
        """The steps of the whole training run, which only the data tells."""
        rows = len(self.data)
        fields = self.fields["fit"]
        if isinstance(fields.get("validation"), float):
            rows -= held_out_rows(rows, fields["validation"])
        return int(fields["epochs"] * math.ceil(rows / fields["batch_size"]))

    def model(self) -> ir.Model:
        """Return the model of a file, or a built-in one that fits the data."""
        name, models = str(self.fields["model"]), self.fields["models"]
        if name not in models:
            if not Path(name).exists():
                raise GraphoptError(f"model {name!r}: no such file; built-in: {', '.join(models)}")
            return load(name, limits=Limits(**self.fields["limits"]))
        inputs = self.data.inputs()
        if len(inputs) != 1:
            raise GraphoptError(f"model {name}: expected data with one input, found {', '.join(inputs)}")
        task = next((step.task for step in self.pipeline.get("loss", ()) if hasattr(step, "task")), "")
        outputs = models[name].get("outputs") or self.data.outputs(task)
        features = next(iter(inputs.values())).shape[1:]
        model: ir.Model = self._build(f"models.{name}", features=features, outputs=outputs)
        return model

    def compile(self) -> ir.Model:
        """Return the training graph."""
        if not with_role(step := self.pipeline(self.model()), Role.NEXT):
            raise GraphoptError("pipeline: expected an optimizer, found none that makes a training graph")
        return step

    def executor(self, step: ir.Model) -> Executor:
        report = self.fields["executor"].get("report")
        report = reported(step) if report is None else report
        executor: Executor = self._build("executor", step=step, report=report)
        return executor

    def text(self) -> str:
        """Return the recipe as YAML, every reference in it resolved."""
        return str(OmegaConf.to_yaml(self.fields))

    def _resolve(self, config: DictConfig, steps: int) -> bool:
        """Make the recipe a plain, checked mapping; tell whether it refers to the steps of the run."""
        referred = []

        def training_steps() -> int:
            referred.append(True)
            return steps

        OmegaConf.register_new_resolver("training_steps", training_steps, replace=True)
        fields: Any = OmegaConf.to_container(config, resolve=True)
        self._check(fields)
        self.fields: dict[str, Any] = fields
        return bool(referred)

    def _check(self, fields: dict[str, Any]) -> None:
        """Refuse what a recipe may not say."""
        for key in ("data", "executor", "fit", "limits", "models", "pipeline"):
            if not isinstance(fields.get(key), dict):
                raise GraphoptError(f"{key}: expected a mapping of fields, found {fields.get(key)!r}")
        for name, model in fields["models"].items():
            if not isinstance(model, dict):
                raise GraphoptError(f"models.{name}: expected a mapping of fields, found {model!r}")
        for key in sorted(fields, key="pipeline".__eq__):  # which repeats the others, last
            if key == "models":
                for name, node in fields[key].items():
                    check(node, f"models.{name}", self._trust, ("features", "outputs"))
            else:
                check(fields[key], str(key), self._trust, ("step",) if key == "executor" else ())
        training = {name: value for name, value in fields["fit"].items() if name != "log_steps"}
        check_fields(Limits, fields["limits"], "limits")
        check_fields(fit, {**training, "validation": None}, "fit", ("executor", "data", "observers"))
        if self._command_line.folders:
            self._check_files(fields)
            self._check_host(fields)

    def _check_files(self, fields: Mapping[str, Any]) -> None:
        """Refuse files that a recipe names, unless they are below the working directory or a recipes' folder."""
        allowed = [os.getcwd(), *(one.removeprefix("file://") for one in self._command_line.folders)]
        allowed = [os.path.realpath(one) for one in allowed]
        for field, file in _files(fields):
            if self._command_line.names(field):
                continue
            beneath = [os.path.join(file, name) for name in os.listdir(file)] if os.path.isdir(file) else []
            for path in map(os.path.realpath, (file, *beneath)):
                if not any(os.path.commonpath((path, folder)) == folder for folder in allowed):
                    raise GraphoptError(
                        f"{field}: expected a file below the working directory or the recipe's folder, "
                        f"found {file!r} in a recipe: {field}={file} on the command line allows it"
                    )

    def _check_host(self, fields: Mapping[str, Any]) -> None:
        """Refuse options of the machine that a recipe sets, and limits that it raises."""
        for path, value in (
            pair for group in ("executor", "data", "limits") for pair in _values(fields[group], group)
        ):
            default = LIMITS.get(path)
            guarded = path.startswith(HOST) or path in LIMITS
            if guarded and value != default and not self._command_line.names(path):
                raise GraphoptError(f"{path}: expected it on the command line alone, found it in a recipe")

    def _build(self, key: str, **given: Any) -> Any:
        """Build a node of the recipe, some of its arguments given."""
        node: Any = functools.reduce(lambda node, name: node[name], key.split("."), self.fields)
        node = {name: value for name, value in node.items() if name not in given}
        if _missing(node):
            raise GraphoptError(f"{key}.{_missing(node)}: missing: set {key}.{_missing(node)}=...")
        return build(node, key, self._trust, **given)


def _files(fields: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the fields that name files, and the files."""
    if fields["model"] not in fields["models"]:
        yield "model", str(fields["model"])
    if isinstance(fields["fit"].get("validation"), str):
        yield "fit.validation", fields["fit"]["validation"]
    for where, mapping in mappings(fields["data"], "data"):
        for name in FILES:
            if isinstance(mapping.get(name), str) and mapping[name] != MISSING:
                yield f"{where}.{name}", mapping[name]


def _values(node: Any, path: str) -> Iterator[tuple[str, Any]]:
    """Yield the values in nested mappings that are not mappings, and where they stand."""
    if isinstance(node, Mapping) and node:
        for name, value in node.items():
            yield from _values(value, f"{path}.{name}")
    else:
        yield path, node


def _missing(node: Mapping[str, Any]) -> str | None:
    """Return the place of a value that a recipe leaves to be set."""
    for name, value in node.items():
        if value == MISSING:
            return str(name)
        if isinstance(value, Mapping) and _missing(value):
            return f"{name}.{_missing(value)}"
    return None

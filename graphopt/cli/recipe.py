"""A composed recipe, checked as a whole, and what it builds."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import onnx_ir as ir
from omegaconf import DictConfig, OmegaConf

from graphopt.cli.hydra_config import CommandLine
from graphopt.cli.recipe_checks import check_recipe
from graphopt.cli.validation import MISSING, build
from graphopt.data import Dataset
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.graph.loading import load
from graphopt.graph.roles import Role, with_role
from graphopt.pipeline import Pipeline
from graphopt.runtime.executor import Executor
from graphopt.training.fit import held_out_rows, reported


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
        check_recipe(fields, self._command_line)
        self.fields: dict[str, Any] = fields
        return bool(referred)

    def _build(self, key: str, **given: Any) -> Any:
        """Build a node of the recipe, some of its arguments given."""
        node: Any = functools.reduce(lambda node, name: node[name], key.split("."), self.fields)
        node = {name: value for name, value in node.items() if name not in given}
        if _missing(node):
            raise GraphoptError(f"{key}.{_missing(node)}: missing: set {key}.{_missing(node)}=...")
        return build(node, key, self._command_line.trust, **given)


def _missing(node: Mapping[str, Any]) -> str | None:
    """Return the place of a value that a recipe leaves to be set."""
    for name, value in node.items():
        if value == MISSING:
            return str(name)
        if isinstance(value, Mapping) and _missing(value):
            return f"{name}.{_missing(value)}"
    return None

"""The `graphopt` command: a Hydra application; its configs are the recipes. No other module imports hydra."""

from __future__ import annotations

import functools
import math
import os
import re
import sys
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import hydra
import onnx_ir as ir
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.utils import create_config_search_path, get_args_parser
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException, InstantiationException, MissingConfigException
from hydra.experimental.callback import Callback
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError  # type: ignore[import-untyped]

from graphopt.artifacts import FILES, export_artifacts
from graphopt.data import Dataset
from graphopt.display import Display, Header, counted, measures, say
from graphopt.errors import GraphoptError, known
from graphopt.executor import Executor, NonFiniteLoss
from graphopt.fit import fit, held_out_rows, reported
from graphopt.listing import size
from graphopt.loading import load, save
from graphopt.pipeline import Pipeline
from graphopt.report import report
from graphopt.roles import Role, with_role
from graphopt.runs import RunFolder, sweep_table, write
from graphopt.trust import MISSING, check, check_fields, mappings, resolve

INTERRUPTED = 130
PLAIN_WIDTH = 200
HYDRA = ("graphopt", "hydra", "hydra_plugins", "logging")  # whose code may stand in the node `hydra`
MENDABLE = (GraphoptError, HydraException, OmegaConfBaseException, YAMLError, OSError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code: 0, 1 after an error, 130 after Ctrl-C.

    Args:
        arguments: what stands after `graphopt` on the command line; sys.argv by default.
    """
    if arguments is not None:
        sys.argv = ["graphopt", *arguments]
    before = os.environ.get("HYDRA_FULL_ERROR")
    os.environ["HYDRA_FULL_ERROR"] = "1"  # otherwise Hydra prints errors its own way and exits
    try:
        with warnings.catch_warnings():
            warnings.showwarning = _warn
            _check_hydra()
            _run()
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit:
        return int(exit.code or 0)
    except MENDABLE as error:
        _complain(error)
        return 1
    finally:
        os.environ.pop("HYDRA_FULL_ERROR")
        if before is not None:
            os.environ["HYDRA_FULL_ERROR"] = before
    return 0


@hydra.main(version_base="1.3", config_path="pkg://recipes", config_name="graphopt")
def _run(config: DictConfig) -> float | None:
    """Do what a recipe says; return the validation loss, or the training loss where no rows are held out."""
    try:
        recipe = _Recipe(config)
        runs = {"train": _train, "compile": _compile, "artifacts": _artifacts, "report": _report}
        if config.run not in runs:
            raise GraphoptError(known("run", config.run, runs))
        return runs[config.run](recipe)
    except MENDABLE as error:
        _complain(error)
        raise SystemExit(1) from error  # which Hydra lets through, without a line of its own


def _check_hydra() -> None:
    """Refuse a folder of recipes that makes Hydra itself run code: callbacks, logging handlers, ..."""
    arguments = get_args_parser().parse_args()
    if not (arguments.config_dir or arguments.config_path or "searchpath" in str(arguments.overrides)):
        return
    search_path = create_config_search_path(arguments.config_path or "pkg://recipes")
    if arguments.config_dir:
        anchor = SearchPathQuery(provider="schema")
        search_path.prepend("command-line", f"file://{os.path.abspath(arguments.config_dir)}", anchor)
    config = ConfigLoaderImpl(search_path).load_configuration(
        arguments.config_name or "graphopt",
        list(arguments.overrides),
        RunMode.MULTIRUN if arguments.multirun else RunMode.RUN,
        validate_sweep_overrides=False,
    )
    trust = [override for override in arguments.overrides if override.startswith("trust=")]
    for path, mapping in mappings(OmegaConf.to_container(config.hydra), "hydra"):
        for key in ("_target_", "()", "class"):
            if key in mapping:
                resolve(mapping[key], f"{path}.{key}", list(config.trust) if trust else (), HYDRA)
        if path == "hydra.sweeper.params" and "trust" in mapping:
            raise GraphoptError(
                f"{path}.trust: expected trust on the command line alone, found it in a recipe"
            )


def _train(recipe: _Recipe) -> float:
    console = Console()
    step = recipe.compile()
    executor = recipe.executor(step)
    fields = recipe.fit
    sweep = recipe.hydra.mode == RunMode.MULTIRUN
    trained = recipe.folder / "trained.onnx"
    folder = RunFolder(recipe.folder, step, recipe.text(), log_steps=bool(recipe.config.fit.log_steps))
    title = f"[{recipe.hydra.job.num}] {' '.join(recipe.hydra.overrides.task)}" if sweep else None
    model = f"{recipe.config.model}, {_parameters(step)}"
    header = Header(console, title, model=model, data=recipe.hydra.runtime.choices["data"])
    try:
        with Display(console, epochs=not sweep) as display:
            records = fit(executor, recipe.data, **fields, observers=[folder, header, display])
    except (KeyboardInterrupt, NonFiniteLoss) as error:
        if executor.steps:
            save(executor.trained(), trained)
            say(console, "stopped", f"after step {executor.steps}: {trained}")
        if isinstance(error, NonFiniteLoss) and sweep:
            _complain(error)
            return math.inf
        raise
    save(executor.trained(), trained)
    last = records[-1]
    seconds = sum(record["seconds"] for record in records)
    say(console, "trained", f"{counted(last['step'], 'step')} in {seconds:.1f} s, loss {last['loss']:.4g}")
    if "validation_loss" in last:
        names = list(last)
        held_out = {name: last[name] for name in names[names.index("validation_loss") :]}
        say(console, "held out", measures(held_out))
    say(console, "written", f"{recipe.folder}: step.onnx, trained.onnx, metrics.jsonl, config.yaml")
    return float(last["validation_loss"] if "validation_loss" in last else last["loss"])


def _compile(recipe: _Recipe) -> None:
    console = Console()
    step = recipe.compile()
    save(step, recipe.folder / "step.onnx")
    write(recipe.folder / "config.yaml", recipe.text())
    say(console, "model", f"{recipe.config.model}, {_parameters(step)}")
    say(console, "written", f"{recipe.folder}/step.onnx, {size(step)} nodes")


def _artifacts(recipe: _Recipe) -> None:
    export_artifacts(recipe.model(), recipe.pipeline, recipe.folder)
    write(recipe.folder / "config.yaml", recipe.text())
    say(Console(), "written", f"{recipe.folder}: {', '.join(FILES)}")


def _report(recipe: _Recipe) -> None:
    found = report(recipe.model(), recipe.pipeline, recipe.config.fit.batch_size)
    summary = found.summary()
    if str(recipe.config.executor.device).startswith("cuda"):
        summary += found.on_cuda()
    write(recipe.folder / "report.txt", f"{summary}\n{found.listings()}")
    write(recipe.folder / "config.yaml", recipe.text())
    console = Console()
    console.print(summary, markup=False, highlight=False, soft_wrap=True, end="")
    files = "report.txt, with the graph after each pass"
    if found.picture(recipe.folder / "graph.svg"):
        files += "; graph.svg, before the first pass and after the last"
    say(console, "written", f"{recipe.folder}/{files}")


class _Recipe:
    """A composed config, and what it builds; checks all that it names first."""

    def __init__(self, config: DictConfig) -> None:
        self.config = config
        self.hydra = HydraConfig.get()
        self.folder = Path(os.path.relpath(self.hydra.runtime.output_dir))
        OmegaConf.set_struct(config, False)
        for group, choice in self.hydra.runtime.choices.items():
            if (
                choice == "none" and group in config
            ):  # an experiment may have fields for the step that is left out
                config[group] = None
        self._trust = [str(package) for package in config.trust or []]
        if self._trust and not any(override.startswith("trust=") for override in self.hydra.overrides.task):
            raise GraphoptError("trust: expected it on the command line alone, found it in a recipe")
        steps = self.steps if "${training_steps:}" in OmegaConf.to_yaml(config) else None
        OmegaConf.register_new_resolver("training_steps", lambda: steps, replace=True)
        self._check()

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
        fields = self._plain("fit")
        fields.pop("log_steps", None)
        validation = fields.pop("validation", None)
        check_fields(fit, fields, "fit", ("executor", "data"))
        if isinstance(validation, str):
            if "path" not in self.config.data:
                raise GraphoptError(
                    f"fit.validation={validation}: data={self.hydra.runtime.choices['data']} reads no file; "
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
        if isinstance(self.config.fit.validation, float):
            rows -= held_out_rows(rows, self.config.fit.validation)
        return int(self.config.fit.epochs * math.ceil(rows / self.config.fit.batch_size))

    def model(self) -> ir.Model:
        """Return the model of a file, or a built-in one that fits the data."""
        name = str(self.config.model)
        if name not in self.config.models:
            if not Path(name).exists():
                raise GraphoptError(
                    f"model {name!r}: no such file; built-in: {', '.join(self.config.models)}"
                )
            return load(name)
        inputs = self.data.inputs()
        if len(inputs) != 1:
            raise GraphoptError(f"model {name}: expected data with one input, found {', '.join(inputs)}")
        task = next((step.task for step in self.pipeline.get("loss", ()) if hasattr(step, "task")), "")
        outputs = self.config.models[name].get("outputs") or self.data.outputs(task)
        features = next(iter(inputs.values())).shape[1:]
        model: ir.Model = self._build(f"models.{name}", features=features, outputs=outputs)
        return model

    def compile(self) -> ir.Model:
        """Return the training graph."""
        if not with_role(step := self.pipeline(self.model()), Role.NEXT):
            raise GraphoptError("pipeline: expected an optimizer, found none that makes a training graph")
        return step

    def executor(self, step: ir.Model) -> Executor:
        report = self.config.executor.report or reported(step)
        executor: Executor = self._build("executor", step=step, report=report)
        return executor

    def text(self) -> str:
        """Return the recipe as YAML, every reference in it resolved."""
        return OmegaConf.to_yaml(self.config, resolve=True)

    def _check(self) -> None:
        """Refuse code that is not trusted and fields that do not fit, before anything is built."""
        for key in sorted(self.config, key="pipeline".__eq__):  # which repeats the others, last
            if key == "models":
                for name in self.config.models:
                    check(
                        self._plain(f"models.{name}"), f"models.{name}", self._trust, ("features", "outputs")
                    )
            elif isinstance(self.config[key], DictConfig):
                check(self._plain(str(key)), str(key), self._trust, ("step",) if key == "executor" else ())

    def _plain(self, key: str) -> dict[str, Any]:
        plain = OmegaConf.to_container(OmegaConf.select(self.config, key), resolve=True)
        if not isinstance(plain, dict):
            raise GraphoptError(f"{key}: expected a mapping of fields, found {plain!r}")
        return {str(name): value for name, value in plain.items()}

    def _build(self, key: str, **given: Any) -> Any:
        """Build a node of the recipe, some of its arguments given."""
        node = {name: value for name, value in self._plain(key).items() if name not in given}
        check(node, key, self._trust, tuple(given))
        if _missing(node):
            raise GraphoptError(f"{key}.{_missing(node)}: missing: set {key}.{_missing(node)}=...")
        try:
            return hydra.utils.instantiate(node, _partial_=True, _convert_="all")(**given)
        except InstantiationException as error:
            raise error.__cause__ or error from None


class SweepTable(Callback):
    """Prints a table after a multirun."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        console = Console()
        console.print(sweep_table(config.hydra.sweep.dir), width=None if console.is_terminal else PLAIN_WIDTH)


def _missing(node: Mapping[str, Any]) -> str | None:
    """Return the place of a value that a recipe leaves to be set."""
    for name, value in node.items():
        if value == MISSING:
            return str(name)
        if isinstance(value, Mapping) and _missing(value):
            return f"{name}.{_missing(value)}"
    return None


def _parameters(step: ir.Model) -> str:
    trained = with_role(step, Role.PARAMETER)
    numbers = sum(math.prod(value.shape.numpy()) for value in trained if value.shape is not None)
    tensors = counted(len(trained), "tensor")
    return f"{counted(numbers, 'parameter')} in {tensors}, a step of {size(step)} nodes"


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"graphopt: warning: {' '.join(str(message).split())}", file=sys.stderr)


def _complain(error: BaseException) -> None:
    print(f"graphopt: error: {_line(error)}", file=sys.stderr)


def _line(error: BaseException) -> str:
    """Return an error as one line that says what there is instead."""
    text = " ".join(str(error).split())
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        return (
            known(group, name, error.options) if error.options else text.partition(" Config search path")[0]
        )
    override = re.match(r"Could not override '([^']+)'", text)
    if override:
        parent = getattr(error.__cause__, "parent_node", None)
        path, _, name = override[1].rpartition(".")
        if isinstance(parent, DictConfig):
            names = [key for key in parent if not str(key).startswith("_")]
            return f"{path}: {known('field', name, names)}" if path else known("option", name, names)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error.filename}: {error.strerror}" if error.filename else text
    return re.sub(r" (See https|full_key:|object_type=|To append).*", "", text)

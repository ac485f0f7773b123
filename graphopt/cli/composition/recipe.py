"""Check a composed recipe as a whole and build the model, the data and the training graph."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import json
import math
import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from omegaconf import DictConfig, OmegaConf

from graphopt.cli.composition.expansion import Fields, flattened, plain_of
from graphopt.cli.composition.hydra_config import CommandLine
from graphopt.cli.composition.record import write_record
from graphopt.cli.composition.validation import (
    MISSING,
    OF_COMMAND,
    PARTS,
    TARGET_KEY,
    check_mapping,
    check_new_logs,
    check_recipe,
    create,
    expanded,
    metrics_of,
    resolve,
    reward_of,
    rules_of,
)
from graphopt.cli.run_folder import CONFIG
from graphopt.communicator import Communicator
from graphopt.compiler import StepHalves, split_step
from graphopt.data import Columns, Dataset
from graphopt.data.foreign import as_dataset, relabelled
from graphopt.data.language.tokenizer import tokenizer_beside
from graphopt.data.loader import Rows, hold_out
from graphopt.derivatives import derive
from graphopt.distributed.data_parallel import DataParallel
from graphopt.distributed.launchers import Launcher
from graphopt.distributed.local_sgd import LocalSGD
from graphopt.errors import GraphoptError, nearest, some
from graphopt.files import check_plain, write
from graphopt.graph import provenance
from graphopt.graph.classified import are_numbers, class_names, labels_in
from graphopt.graph.encoders import Encoders, string_inputs
from graphopt.graph.limits import Limits
from graphopt.graph.loading import load
from graphopt.graph.metadata import LABELS, PIXEL_RANGE, column_names_in, note_column_names
from graphopt.graph.postprocessing import Caches
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import STATE, Role, data_inputs, with_role
from graphopt.graph.state import NORMS
from graphopt.graph.storage import save
from graphopt.graph.values import name_of
from graphopt.pipeline import Pipeline
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.providers import PROVIDERS, for_workers
from graphopt.training.callbacks import Callback, EarlyStopping, MedianStopping, PrivacyBudget, Record, Run
from graphopt.training.callbacks.logs import FileLog, MLflow, TensorBoard, Tracker
from graphopt.training.evaluation import example_norms, reported
from graphopt.training.fit import adapt
from graphopt.training.metrics import Wanted
from graphopt.training.rollouts import Rollouts

_OTHER_MODELS = {
    **dict.fromkeys((".pt", ".pth", ".ckpt", ".bin"), "PyTorch's: export it with torch.onnx.export"),
    **dict.fromkeys((".h5", ".keras", ".pb"), "TensorFlow's: export it with tf2onnx, or model.export(format='onnx')"),
    ".tflite": "TensorFlow Lite's: convert it with tf2onnx",
    **dict.fromkeys((".pkl", ".pickle", ".joblib"), "a pickle: convert it with skl2onnx"),
    ".safetensors": "weights without a graph: name the model that they belong to",
    ".ort": "ONNX Runtime's own format: name the .onnx file that it was made of",
}
OWN_EXECUTOR = "graphopt.Executor"
# A training graph, and what returns the executor of one of the workers that run it.
_Program = tuple[ir.Model, Callable[[Communicator], Executor]]


def check_format(file: str) -> None:
    """Raise an error if a file, by its name, has the model of another framework."""
    if "://" in file:
        raise GraphoptError(f"{file}: expected a file, found an address: download it, and name the file")
    if (ending := Path(file).suffix.lower()) in _OTHER_MODELS:
        raise GraphoptError(f"{file}: expected an ONNX model, found {_OTHER_MODELS[ending]}")


def nearest_file(missing: str, ending: str) -> str | None:
    """Return the path of the file with an ending whose name is nearest to that of a missing one, or None."""
    place = Path(missing)
    near = nearest(place.stem, sorted(file.stem for file in place.parent.glob(f"*{ending}") if file.exists()))
    return near and str(place.with_name(f"{near}{ending}"))


def _names_target(node: object) -> bool:
    """Return whether a node of a recipe names what it builds, so that no option of its group need be chosen."""
    return isinstance(node, DictConfig) and "_target_" in node


class _BestWeights(EarlyStopping):
    """Restore the weights of the best epoch; `Checkpoints` warns of a measure that records lack."""

    def measure(self, run: Run, record: Record) -> float | None:
        return record.get(self.monitor)


class Recipe:
    """Resolve and check a composed config, without the node `hydra`, once, and build its parts.

    `choices` has the chosen option of each group. Without `reads`, the data is not read for the number of its steps.
    """

    def __init__(
        self, config: DictConfig, choices: Mapping[str, str], command_line: CommandLine, *, reads: bool = True
    ) -> None:
        self.choices = choices
        self._trained: Path | None = None
        self.command_line = command_line
        OmegaConf.set_struct(config, False)
        for group, choice in choices.items():
            if choice == "none" and (f"{group}=none" in command_line.said or not _names_target(config.get(group))):
                config[group] = None  # an experiment may set fields of a step that is omitted
        self.composed = config.copy()  # for `.hydra`
        plain = plain_of(config)
        for part in PARTS:
            node = plain.get(part)
            if not str(node).startswith("${"):
                check_mapping(node, part)
        if self._resolve(config, steps=1) and reads:
            self._resolve(config, steps=self.steps)

    @property
    def names_folder(self) -> bool:
        """Return whether the command line names the folder of the run."""
        return any(item.startswith(("folder=", "hydra.run.dir=")) for item in self.command_line.overrides)

    @functools.cached_property
    def data(self) -> Dataset:
        """Return the data, with the features of columns that have learnt from the rows that train."""
        data = self._read
        if isinstance(data, Dataset) and data.columns is not None and not data.columns.has_learnt:
            data = data.learn(self.split(len(data))[0])
        return as_dataset(data)

    @functools.cached_property
    def _read(self) -> Any:
        """Return the data as it is read: a table with the columns and the classes of the model, if it notes them."""
        if not self._reads_table:
            return self._build("data", **self._beside_model)
        columns, labels = self._noted
        data: Dataset = self._build("data", **(self._by_input if columns is None else {"columns": columns}))
        return data if self.fields["data"].get("labels") else relabelled(data, labels, data.source)

    @property
    def columns(self) -> Columns | None:
        """Return the columns of a table that the model or the recipe has, which have learnt."""
        if not self._reads_table:
            return None
        return self._noted[0] or (None if self.fields["data"].get("columns") is None else self.data.columns)

    def follow(self, trained: Path | None) -> None:
        """Read data with the columns and the classes of a trained model or its training graph."""
        self._trained = trained
        for name in ("data", "_noted", "_read"):
            self.__dict__.pop(name, None)

    @property
    def _reads_table(self) -> bool:
        """Return whether the data is read by a function of columns, such as `csv`."""
        reader = resolve(self.fields["data"].get(TARGET_KEY), "data", self.command_line.trust)
        return "columns" in inspect.signature(reader).parameters

    @property
    def _beside_model(self) -> dict[str, object]:
        """Return the tokenizer that lies beside the model, for data of text that names none."""
        tokenizer = self.tokenizer if "tokenizer" in self.fields["data"] else None
        return {"tokenizer": tokenizer} if tokenizer else {}

    @property
    def tokenizer(self) -> str | None:
        """Return the tokenizer that the data names, or else the file beside the model, if there is one."""
        named, model = self.fields["data"].get("tokenizer"), self.fields["model"]
        if named is None and model not in self.fields["models"]:
            named = tokenizer_beside(model)
        return None if named is None else str(named)

    @functools.cached_property
    def _noted(self) -> tuple[Columns | None, list[str] | None]:
        """Return the columns and the classes in the metadata of the model, or of the file that `follow` names."""
        name = str(self._trained or self.fields["model"])
        if name in self.fields["models"] or not Path(name).is_file():
            return None, None
        model = load(name, limits=self.limits)
        names = class_names(model) or []
        return Columns.of(model), labels_in(model) if are_numbers(names) else names

    @property
    def _by_input(self) -> dict[str, object]:
        """Return the columns of a model that takes strings, or has trained on some, if the recipe names none."""
        name, fields = str(self._trained or self.fields["model"]), self.fields["data"]
        is_told = fields.get("features") is not None or fields.get("columns") is not None
        if is_told or name in self.fields["models"] or not Path(name).is_file():
            return {}
        model = load(name, limits=self.limits)
        note = Encoders.read(model)  # of a training graph
        inputs = [name_of(x) for x in model.graph.inputs if not x.is_initializer()] if note is None else note.inputs
        if note is not None or string_inputs(model):
            return {"features": dict(zip(inputs, inputs, strict=True))}
        names = column_names_in(data_inputs(model))
        return {} if names is None else {"features": names}

    def fed(self, executor: Executor) -> tuple[Dataset | Rollouts, dict[str, Any]]:
        """Return the data and the options of `fit`; with a reward, the data is completions of prompts."""
        reward = reward_of(self.fields["reward"], self.command_line.trust)
        if reward is None:
            return self.data, self.fit
        fields, model, held_out = self.fields["fit"], str(self.fields["model"]), self.fit["validation"]

        def completed(prompts: Dataset | Sequence[Mapping[str, object]], *, shuffle: bool) -> Rollouts:
            return Rollouts(
                executor,
                prompts,
                reward,
                model=None if model in self.fields["models"] else model,
                tokenizer=self.fields["generate"]["tokenizer"] or self.tokenizer,
                batch_size=fields["batch_size"],
                shuffle=shuffle,
                seed=fields["seed"],
                **self.fields["rollouts"],
            )

        trained: Dataset | list[dict[str, object]] = self.data
        if isinstance(held_out, int | float) and held_out:
            table = self.data.table
            rows = [dict(zip(table, cells, strict=True)) for cells in zip(*table.values(), strict=True)]
            trained, held_out = ([rows[i] for i in part] for part in self.split(len(rows)))
        validation = completed(held_out, shuffle=False) if held_out else None
        return completed(trained, shuffle=bool(fields["shuffle"])), {**self.fit, "validation": validation}

    def split(self, rows: int) -> tuple[Rows, Rows]:
        """Return the rows of the data that `fit` trains on, and those that it holds out."""
        fields = self.fields["fit"]
        share = fields.get("validation")
        share = share if isinstance(share, int | float) else 0.0
        return hold_out(rows, share, shuffle=fields.get("shuffle", True), seed=fields.get("seed", 0))

    @functools.cached_property
    def pipeline(self) -> Pipeline:
        return self._adapted(self.described)

    @functools.cached_property
    def described(self) -> Pipeline:
        """Return the pipeline as the recipe describes it, before its passes learn from data."""
        pipeline: Pipeline = self._build("pipeline")
        rules = rules_of(self.fields["rules"], self.command_line.trust)
        return pipeline.with_rules(rules) if rules else pipeline

    def _adapted(self, pipeline: Pipeline) -> Pipeline:
        """Return a pipeline whose passes have learnt from the training rows, if any of them learns."""
        if not pipeline.learns:
            return pipeline
        fields = {"validation": None, **self.fields["fit"]}
        names = [name for name in ("validation", "shuffle", "seed", "allow_nan") if name in fields]
        return adapt(pipeline, self.model(), self.data, **{name: fields[name] for name in names})

    @functools.cached_property
    def fit(self) -> dict[str, Any]:
        """Return the arguments of `fit`. If `fit.validation` is a file, load it."""
        fields = {name: value for name, value in self.fields["fit"].items() if name not in OF_COMMAND}
        validation = fields.pop("validation", None)
        if isinstance(validation, str):
            if "path" not in self.fields["data"]:
                reader = self.choices["data"]
                raise GraphoptError(
                    f"fit.validation: expected a share of the rows, such as 0.2, found {validation!r}: data={reader} "
                    "reads no file"
                )
            learnt = self._beside_model
            if self._reads_table:
                learnt = {"labels": self.data.labels, "columns": self.data.columns}
                names = self.data.column_names
                learnt |= {"features": names} if names is not None else {}
                learnt |= self._by_input if self.data.columns is None else {}
            validation = self._build("data", path=validation, **learnt)
        return {**fields, "validation": validation, "metrics": self.metrics}

    @property
    def learnt(self) -> dict[str, str]:
        """Return lines about the columns and classes of a table, by their topics."""
        columns, labels = self.data.columns, self.data.labels
        classes = {"classes": some(labels, 20)} if labels and self._reads_table else {}
        return classes if columns is None else {"columns": columns.summary(), **classes}

    @property
    def metrics(self) -> list[Wanted] | None:
        """Return the metrics of held-out rows; None for those that suit the loss."""
        return metrics_of(self.fields["fit"].get("metrics"), self.command_line.trust)

    @property
    def limits(self) -> Limits:
        """Return the bounds on the expansion of a model's file."""
        return Limits(**self.fields["limits"])

    @property
    def device(self) -> Device:
        """Return the device of the executor, with its options."""
        fields = {**self.fields["executor"], "name": self.fields["executor"].get("device", "cpu")}
        names = [field.name for field in dataclasses.fields(Device) if field.name in fields]
        return Device(**{name: fields[name] for name in names})

    def callbacks(self, folder: Path, *, is_new: bool = False) -> list[Callback]:
        """Return the callbacks; in a new run, no log of an untrusted recipe replaces a file in the folder."""
        if self.command_line.strangers:
            check_new_logs(self.fields["callbacks"], folder, self.command_line, is_new)
        nodes = self.fields["callbacks"].items()
        callbacks = [self._callback(f"callbacks.{name}", node, folder) for name, node in nodes]
        fields = self.fields["fit"]
        restores = any(isinstance(callback, EarlyStopping) for callback in callbacks)
        if fields["export"] == "best" and fields.get("validation") and not restores:
            measure = (fields.get("checkpoint") or {}).get("best") or "validation_loss"
            callbacks.append(_BestWeights(monitor=measure, patience=fields["epochs"] or 1))
        private = fields.get("sampling") == "poisson" and self.choices.get("clip") == "gaussian_noise"
        if private and "privacy_budget" not in self.fields["callbacks"] and find_spec("dp_accounting"):
            callbacks.append(PrivacyBudget())  # it records epsilon
        return callbacks

    def _callback(self, key: str, node: Fields, folder: Path) -> Callback:
        kind = resolve(node[TARGET_KEY], key, self.command_line.trust)
        arguments: dict[str, object] = {}
        if inspect.isclass(kind) and issubclass(kind, FileLog | TensorBoard) and node["path"] != MISSING:
            arguments["path"] = folder / node["path"]
        if kind is MedianStopping:
            arguments["folder"] = folder.parent
        if inspect.isclass(kind) and issubclass(kind, Tracker | MLflow) and node.get("config") is None:
            arguments["config"] = self.fields
        callback = self._build(key, **arguments)
        if not isinstance(callback, Callback):
            raise GraphoptError(f"{key}: expected a graphopt.Callback, found {type(callback).__name__}")
        return callback

    @property
    def steps(self) -> int:
        """Return the number of steps of the whole training run, which depends on the data."""
        fields, (trained, _) = self.fields["fit"], self.split(len(self._read))
        again = 1 if self.fields["reward"] is None else self.fields["rollouts"]["iterations"]
        return int((fields["epochs"] or 1) * again * math.ceil(len(trained) / fields["batch_size"]))

    def model(self, file: Path | None = None) -> ir.Model:
        """Return the model of a file, by default the recipe's, or a built-in one with the data's shape."""
        name, models = str(file or self.fields["model"]), self.fields["models"]
        if name not in models:
            self.check_model(name)
            model = load(name, limits=self.limits)
            if file is None and with_role(model, *STATE):
                raise GraphoptError(
                    f"{name}: expected an inference model, found a training graph: name the model that it was made of, "
                    "or trained.onnx of its run"
                )
            provenance.note_source(model, Path(name), {})
            return Columns.without(model)
        inputs = {name: x for name, x in self.data.inputs().items() if name not in self.data.spare}
        if len(inputs) != 1:
            raise GraphoptError(f"model {name}: expected data with one input, found {', '.join(inputs)}")
        task = next((step.task for step in self.described.get("loss", ()) if hasattr(step, "task")), "")
        outputs = models[name].get("outputs") or self.data.outputs(task)
        features = next(iter(inputs.values())).shape[1:]
        built: ir.Model = self._build(f"models.{name}", features=features, outputs=outputs)
        return built

    def check_model(self, file: str | None = None) -> None:
        """Raise an error if the model, by default the recipe's, is neither built-in nor a file of ONNX by its name."""
        name, models = file or self.fields["model"], self.fields["models"]
        if name in models:
            return
        check_format(name)
        if not Path(name).exists() and Path(name).is_symlink():
            raise GraphoptError(f"{name}: expected a file, found a link to {os.readlink(name)}, which is missing")
        if not Path(name).exists():
            meant = [nearest(Path(name).stem, models), nearest_file(name, ".onnx")]
            if name.endswith(".onnx"):
                meant.reverse()
            near = meant[0] or meant[1]
            raise GraphoptError(
                f"model {name!r}: no such file{f', nearest: {near!r}' if near else ''}; built-in: {', '.join(models)}"
            )

    @functools.cached_property
    def launcher(self) -> Launcher:
        """Return the launcher of the run's workers."""
        launcher: Launcher = self._build("launcher") if self.fields.get("launcher") else Launcher()
        return launcher

    def compile(self, file: Path | None = None, *, is_trained: bool = False) -> ir.Model:
        """Return the training graph; a trained model standardizes its inputs itself, if at all."""
        pipeline = self._adapted(self.described.without("standardize")) if is_trained else self.pipeline
        if not with_role(step := pipeline(self.model(file)), Role.NEXT):
            raise GraphoptError("pipeline: expected an optimizer, found none that makes a training graph")
        return self._with_columns(step)

    def derived(self, key: str) -> ir.Model:
        """Return the model with the outputs that a pass of the recipe adds: `derive` or `explain`."""
        return derive(self.model(), self._build(key))

    @property
    def example_norms(self) -> Callable[..., np.ndarray] | None:
        """Return what computes the norms of the gradients of rows by a model, if the recipe asks for them."""
        if self.choices.get("clip") != NORMS:
            return None
        chosen = {name: self.fields["fit"][name] for name in ("batch_size", "allow_nan")}
        return functools.partial(example_norms, loss=self.described["loss"], device=self.device, **chosen)

    @property
    def calibration(self) -> list[Pass]:
        """Return the passes that calibrate, one after the other."""
        found = [self._build(key) for key in ("calibrate", "conformal") if self.fields.get(key)]
        if not found:
            raise GraphoptError("calibrate: expected calibrate or conformal, found calibrate=none conformal=none")
        return found

    def halves(self) -> StepHalves:
        """Return the training graph with its halves, between which workers average gradients."""
        halves = split_step(self.pipeline, self.model(), statistics=self.launcher.statistics)
        self._with_columns(halves.step)
        return halves

    def _with_columns(self, step: ir.Model) -> ir.Model:
        """Note the columns of a table, if features come from one, in a training graph."""
        return step if self.columns is None else self.columns.noted(step)

    def program(self) -> _Program:
        """Return the training graph, with the classes of the data, and the function that opens a worker's executor."""
        launcher, shared = self.launcher, self._shared
        program: _Program
        if not self.fields.get("launcher"):
            step = self.compile()
            program = step, lambda _: self.executor(step)
        elif launcher.sync_every is None:
            halves = self.halves()
            program = halves.step, lambda workers: DataParallel(halves, **shared(halves.step, workers))
        else:
            step, rounds = self.compile(), {"sync_every": launcher.sync_every, "outer": launcher.outer}
            program = step, lambda workers: LocalSGD(step, **rounds, **shared(step, workers))
        if self.data.labels is not None:
            LABELS.write(program[0], json.dumps(list(self.data.labels)))
        if self.data.pixel_range is not None:
            PIXEL_RANGE.write(program[0], self.data.pixel_range)
        inputs, names = data_inputs(program[0]), self.data.column_names
        if names is not None and column_names_in(inputs) is None:
            note_column_names(inputs, names)
        return program

    def save_trained(self, executor: Executor, path: Path) -> None:
        """Write the trained model, with the columns of a table if the data had some, and with a decoder's caches."""
        columns = Columns.of(executor.model)
        if Caches.is_on(executor.model):
            try:
                executor.save_trained(path, into=Path(self.fields["model"]))
                return
            except GraphoptError as error:  # of a weight that has another form in the file
                warnings.warn(f"the trained model has no cache: {error}", stacklevel=2)
        if columns is None:
            executor.save_trained(path)
            return
        save(columns.before(executor.trained(), labels_in(executor.model)), path)

    def executor(self, step: ir.Model, **changed: Any) -> Executor:
        """Return the executor of a training graph, with fields that differ from those of the recipe."""
        executor: Executor = self._build("executor", step=step, **self._reported(step), **changed)
        return executor

    def _shared(self, step: ir.Model, workers: Communicator) -> dict[str, Any]:
        """Return the options of a worker's executor, on a GPU of its own or on its share of the cores."""
        fields = {**self.fields["executor"], "communicator": workers, **self._reported(step)}
        target = fields.pop(TARGET_KEY)
        if target != OWN_EXECUTOR:
            raise GraphoptError(f"executor: expected {OWN_EXECUTOR} with a launcher, found {target}")
        kind = PROVIDERS.get(str(fields.get("device")))
        if kind is not None and not kind.takes_workers:
            raise GraphoptError(
                f"executor.device: expected {for_workers()} for workers, found {kind.kind}: leave out the launcher"
            )
        if kind is not None and kind.is_numbered:
            fields["device"] = f"{kind.kind}:{workers.local_rank}"
        elif fields.get("threads") is None:
            fields["threads"] = max(1, (os.cpu_count() or 1) // workers.local_size)
        return fields

    def _reported(self, step: ir.Model) -> dict[str, Any]:
        return {"report": reported(step)} if self.fields["executor"].get("report") is None else {}

    def text(self) -> str:
        """Return the recipe as YAML with all references resolved."""
        return str(OmegaConf.to_yaml(self.fields))

    def write_record(self, folder: Path) -> None:
        """Write the recipe to the folder of a run, for commands that name the run."""
        write_record(folder, self.composed, self.command_line.record, self.command_line.strangers)
        write(folder / CONFIG, self.text())

    def _resolve(self, config: DictConfig, steps: int) -> bool:
        """Resolve the recipe to a plain, checked mapping; return whether it refers to the steps of the run."""
        referred = []

        def training_steps() -> int:  # later sweeps of this process pickle it
            referred.append(True)
            return steps

        OmegaConf.register_new_resolver("training_steps", training_steps, replace=True)
        fields: Any = OmegaConf.to_container(config, resolve=True)
        check_plain(fields, "recipe")
        fields["callbacks"] = expanded(fields.get("callbacks"))
        fit = fields.get("fit")
        if isinstance(fit, dict) and isinstance(fit.get("metrics"), str | dict):
            fit["metrics"] = [fit["metrics"]]  # one metric, without a list
        if isinstance(fit, dict) and fields.get("reward") is not None:
            if not self.command_line.names("fit.validation"):
                fit["validation"] = None  # completions are rewarded while they train
            if not self.command_line.names("fit.checkpoint.best") and isinstance(fit.get("checkpoint"), dict):
                fit["checkpoint"]["best"] = "validation_reward"
        if fields.get("reward") is None:
            for override in self.command_line.overrides:
                if override.startswith("rollouts"):
                    raise GraphoptError(
                        f"{override}: expected reward=module:function beside it, found none: name one, or leave it out"
                    )
        check_recipe(fields, self.command_line)
        self.fields: dict[str, Any] = fields
        return bool(referred)

    def _build(self, key: str, **arguments: Any) -> Any:
        """Build a node of the recipe; `arguments` are added to those of the recipe."""
        node: Any = functools.reduce(lambda node, name: node[name], key.split("."), self.fields)
        node = {name: value for name, value in node.items() if name not in arguments}
        for place, value in flattened(node, key):
            if value == MISSING:
                part = place.removeprefix("pipeline.")  # which refers to the parts of the recipe
                field = part if part.partition(".")[0] in self.fields else place
                raise GraphoptError(f"{field}: expected a value, found none: set {field}=...")
        return create(node, key, self.command_line.trust, **arguments)

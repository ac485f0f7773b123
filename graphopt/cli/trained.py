"""Find the model that a run has trained, evaluate it, and write its predictions."""

from __future__ import annotations

import contextlib
import functools
import json
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from rich.console import Console

from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.composition.record import RunRecord
from graphopt.cli.messages import print_matrix, print_table, say
from graphopt.cli.rows import chosen_rows
from graphopt.cli.run_folder import ADAPTER_FILES, CHECKPOINTS, CONFIG, MODEL, STATE_FILE, STEP, resumed
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import write_rows
from graphopt.errors import GraphoptError, some
from graphopt.files import write
from graphopt.graph.classified import LABEL, classes_of, classification_of, labels_in
from graphopt.graph.loading import load
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import FAKE, original_name
from graphopt.graph.postprocessing import Caches, standing_for
from graphopt.graph.roles import STATE, Role, role_of
from graphopt.graph.state import NORMS, averages_read, put_initial, take_initial
from graphopt.graph.values import name_of
from graphopt.runtime.checkpoint import load_state, save_state
from graphopt.runtime.executor import Executor
from graphopt.runtime.saved_adapter import save_adapter
from graphopt.training.callbacks.logs import json_value
from graphopt.training.checkpoints import find, read
from graphopt.training.evaluation import evaluate, predict

_METRICS = "metrics.json"
_MOST_LABELS = 10  # in the terminal


@dataclass(frozen=True)
class Trained:
    """Hold where trained weights are: in a checkpoint, in the folder of a run, or in a model's file.

    A training graph or a model that is None is the recipe's.
    """

    recipe: Recipe
    folder: Path
    checkpoint: Path | None = None
    step: Path | None = None
    model: Path | None = None
    record: RunRecord | None = None

    @classmethod
    def find(cls, recipe: Recipe, folder: Path) -> Trained:
        """Return the weights of `resume=PATH`, else of the run in `folder=PATH`, else of `model=FILE`."""
        asked, model = recipe.fields.get("resume", False), folder / MODEL
        step, record = _step_of(folder), recipe.command_line.record
        recipe.follow(step or (model if model.is_file() else None))
        if asked:
            place, checkpoint = resumed(asked, folder, recipe.fields, search=not recipe.names_folder)
            if isinstance(checkpoint, bool):
                raise GraphoptError(
                    f"resume={str(asked).lower()}: expected a run of the same recipe with a checkpoint, found none"
                )
            recipe.follow(step := _step_of(checkpoint.parents[1]))
            return cls(recipe, place, checkpoint, step, record=record or RunRecord.read(place))
        is_named = any(item.startswith("model=") for item in recipe.command_line.overrides)
        if recipe.names_folder and model.is_file():
            named = recipe.fields["model"]
            own = [model, *([] if record is None else [Path(str(record.resolved.get("model")))])]
            if is_named and Path(named).absolute() not in {path.absolute() for path in own}:
                raise GraphoptError(
                    f"{recipe.fields['run']}: expected one model, found {named} and {model}: leave model or folder out"
                )
            return cls(recipe, folder, None, step, model, record)
        if recipe.fields["model"] in recipe.fields["models"] or (record is not None and not is_named):
            expected, found = "the folder of a run with trained.onnx", str(folder)
            if not recipe.names_folder:
                expected, found = "a trained model", f"the built-in model {recipe.fields['model']}"
                remedy = ": train first, with graphopt, or name FILE.onnx, folder=RUN or resume=RUN"
            elif any((folder / CHECKPOINTS).glob("step-*")):
                remedy = f" with checkpoints alone: take the newest, resume={folder}"
            elif runs := sorted(folder.glob(f"*/{model.name}")):
                remedy = f", which holds runs: name one of them, such as {recipe.fields['run']} {runs[0].parent}"
            elif files := sorted(x for x in folder.glob("*.onnx") if x.name != STEP):
                remedy = f", which holds a model: name its file, {recipe.fields['run']} {files[0]}"
            else:
                remedy = f" without: train first, with graphopt folder={folder}"
            raise GraphoptError(f"{recipe.fields['run']}: expected {expected}, found {found}{remedy}")
        return cls(recipe, folder)

    @classmethod
    def resumed(cls, recipe: Recipe, folder: Path) -> Trained:
        """Return the checkpoint that `resume=PATH` names, whose graph another folder gets."""
        resume = recipe.fields["resume"]
        if not isinstance(resume, str):
            raise GraphoptError(
                f"{recipe.fields['run']}: expected resume=RUN, the folder of a run, found resume={str(resume).lower()}"
            )
        checkpoint = find(resume)
        recipe.follow(step := _step_of(checkpoint.parents[1]))
        return cls(recipe, folder, checkpoint, step)

    @functools.cached_property
    def chosen(self) -> tuple[Dataset, str]:
        """Return the rows of the data that the recipe chooses, and their description."""
        return chosen_rows(self.recipe, self.record)

    @property
    def batches(self) -> dict[str, Any]:
        """Return how the data is read."""
        return {name: self.recipe.fields["fit"][name] for name in ("batch_size", "allow_nan")}

    @property
    def caches(self) -> bool:
        """Return whether the trained model has caches, which its training graph lacks."""
        return self.step is not None and Caches.is_on(self.recipe.model(self.step))

    def prepare(self) -> None:
        """Write the recipe to a folder that has none."""
        if not (self.folder / CONFIG).exists():
            self.recipe.write_record(self.folder)

    def classes(self, outputs: Mapping[str, np.ndarray], labels: Sequence[str] | None) -> dict[str, np.ndarray]:
        """Return the labels and the probabilities of rows, as the loss of the run's training graph knows them."""
        spec = None if self.step is None else classification_of(self.recipe.model(self.step))
        known = spec is not None and spec.output in outputs
        return classes_of(outputs[spec.output], spec, labels) if spec is not None and known else {}

    def graph(self) -> ir.Model:
        """Return the training graph, with the state of the checkpoint if there is one."""
        if self.step is not None:
            step = self.recipe.model(self.step)
        elif self.checkpoint is not None and self.recipe.described.learns:
            raise GraphoptError(
                f"{self.checkpoint}: expected step.onnx in the folder of the run, which has what it learnt from its "
                "data, found none"
            )
        else:
            step = self.recipe.compile(self.model, is_trained=self.checkpoint is None)
        if self.checkpoint is not None:
            before, state = take_initial(step), read(self.checkpoint).state
            for name, x in state.items():
                if name not in before or (x.dtype, x.shape) != (before[name].dtype, before[name].shape):
                    raise GraphoptError(
                        f"{self.checkpoint}: expected the state of {self.step or 'the recipe'}, found another {name!r}"
                    )
            put_initial(step, {**before, **state})
        return step

    def executor(self) -> Executor:
        """Return the executor of the training graph, with the trained weights."""
        executor = self.recipe.executor(self.graph())
        if self.checkpoint is None and self.model is not None and self.step is not None:
            executor.update_state(_trained_weights(self.step, executor, self.recipe.model(self.model)))
        return executor


def _step_of(run: Path) -> Path | None:
    """Return the training graph of a run, if it has one."""
    return step if (step := run / STEP).is_file() else None


def write_trained(recipe: Recipe, executor: Executor, folder: Path) -> Path:
    """Write trained.onnx to the folder of a run, and the state that it has not as it trains.

    With adapters of low rank, also write the file of these, and their state.
    """
    notes, (file, state) = adapted(executor.model), ADAPTER_FILES
    recipe.save_trained(executor, folder / MODEL)
    if any(map(FAKE.is_set, executor.model.graph)):
        roles, averaged = (Role.PARAMETER, Role.STATISTIC), averages_read(executor.model)
        kept = [name_of(x) for x in executor.model.graph.inputs if role_of(x) in roles or x.name in averaged]
        save_state({name: executor.state[name] for name in kept}, folder / STATE_FILE, {})
    if notes:
        values = {name: x for name, x in executor.parameters.items() if any(name in note.values for note in notes)}
        save_state(values, folder / state, {})
        with (
            warnings.catch_warnings(),
            contextlib.suppress(GraphoptError),
        ):  # of adapters that have no such file
            warnings.simplefilter("ignore")
            save_adapter(executor, folder / file)
    return folder / MODEL


def _trained_weights(step: Path, executor: Executor, trained: ir.Model) -> dict[str, np.ndarray]:
    """Return the state of a training graph that an inference model has, under the names of the graph."""
    state = step.with_name(ADAPTER_FILES[1])
    weights = load_state(state)[0] if adapted(executor.model) and state.is_file() else {}
    if any(map(FAKE.is_set, executor.model.graph)) and (whole := step.with_name(STATE_FILE)).is_file():
        weights |= load_state(whole)[0]
    for value in executor.model.graph.inputs:
        if value.name in weights:
            continue
        weight = trained.graph.initializers.get(original_name(value)) if role_of(value) in STATE else None
        numbers = None if weight is None else standing_for(weight)
        if numbers is not None and value.dtype is not None:
            weights[name_of(value)] = numbers.astype(value.dtype.numpy())
        elif role_of(value) is Role.PARAMETER:
            raise GraphoptError(
                f"{step}: expected the training graph of trained.onnx, which lacks the parameter {value.name!r}"
            )
    return weights


def write_metrics(trained: Trained, console: Console) -> Path:
    """Evaluate on the chosen rows of the recipe's data, print a table, and write metrics.json; return its path."""
    recipe = trained.recipe
    if recipe.fields["reward"] is not None:
        raise GraphoptError(
            f"{trained.folder}: evaluate: expected a run on rows with a loss, found one with rewards of completions: "
            "fit.validation=0.2 measures them on held-out prompts while it trains, and generate writes completions"
        )
    executor = trained.executor()
    data, _ = trained.chosen
    measured = evaluate(executor, data, metrics=recipe.metrics, **trained.batches)
    trained.prepare()
    path = trained.folder / _METRICS
    record = {"rows": len(data), **{name: json_value(value) for name, value in measured.items()}}
    write(path, json.dumps(record, indent=1) + "\n")
    rows = [[name, f"{value:.6g}"] for name, value in measured.items() if isinstance(value, float)]
    print_table(console, ["metric", "value"], rows)
    for name, value in measured.items():
        if isinstance(value, list):
            known = recipe.data.labels or labels_in(executor.model) or ()
            names = known if len(known) == len(value) else list(map(str, range(len(value))))
            print_matrix(console, name.replace("_", " "), names, value)
    return path


def write_predictions(trained: Trained, console: Console) -> Path:
    """Write the outputs on the chosen rows of the recipe's data to a file, and return its path.

    With `clip=example_norms` and targets, the norm of the gradient of each row is a column, too.
    """
    recipe = trained.recipe
    path = trained.folder / recipe.fields["predictions"]
    if trained.checkpoint is None and not trained.caches:
        model = recipe.model(trained.model)
    else:
        model = load(trained.executor().trained(), limits=recipe.limits)
    outputs = dict(predict(model, trained.chosen[0], device=recipe.device, **trained.batches))
    labels = recipe.data.labels or labels_in(model)
    if LABEL not in outputs:
        outputs |= {name: x for name, x in trained.classes(outputs, labels).items() if name not in outputs}
    classified = {name: labels for name, y in outputs.items() if labels is not None and y.shape[1:] == (len(labels),)}
    if len(classified) == 1 and LABEL not in outputs:
        ((name, known),) = classified.items()
        outputs[LABEL] = np.array(known)[outputs[name].argmax(axis=1)]
    if recipe.example_norms is not None and TARGET in trained.chosen[0].arrays:
        outputs[NORMS] = recipe.example_norms(model, trained.chosen[0])
    trained.prepare()
    write_rows(path, outputs, classified)
    if LABEL in outputs:
        say(console, LABEL, some([str(label) for label in outputs[LABEL]], _MOST_LABELS))
    return path

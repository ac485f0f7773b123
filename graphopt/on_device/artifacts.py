"""Write artifacts for onnxruntime-training's Module and Optimizer, and read trained checkpoints."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError
from graphopt.files import write_folder
from graphopt.graph import inference
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import original_name
from graphopt.graph.roles import TRAINING_RUNTIME, Role, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.storage import whole
from graphopt.graph.values import COUNTERS, name_of
from graphopt.on_device.checkpoint import CHECKPOINT, checkpoint_bytes, declared, fitting, read_checkpoint
from graphopt.pipeline import Pipeline, check_pipeline

TRAINING, EVALUATION, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
FILES = (TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT)

_PathLike = str | os.PathLike[str]


@checked()
def export_artifacts(
    model: Source,
    pipeline: Pipeline,
    folder: _PathLike,
    *,
    state: Mapping[str, np.ndarray] | _PathLike | None = None,
) -> None:
    """Write the files from which onnxruntime-training's Module and Optimizer train `model` on a device.

    The files are `training_model.onnx`, `eval_model.onnx`, `optimizer_model.onnx` and `checkpoint`. After an error,
    none is written. Module takes the data in the order of the training graph's inputs. It returns the loss in training,
    and the losses and the model's outputs in evaluation. Parameters keep their names. Every ONNX Runtime can write the
    files.

    Args:
        model: an inference model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        pipeline: the passes: `graphopt.standard(loss=..., optimizer=...)`.
        folder: the folder to write to.
        state: train on from here, as the executor of this model and pipeline would: `executor.state`, or a checkpoint
            that it has saved. Weights, statistics, moments and the number of steps cross; the learning rate is the
            pipeline's. None begins with the weights of the model.

    Raises:
        GraphoptError: the model cannot be read, a device does not support a step of the pipeline, or the state is that
            of another model or optimizer.

    >>> import os
    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-3))
    >>> graphopt.export_artifacts(models.linear((2,), 1), pipeline, "artifacts")
    >>> sorted(os.listdir("artifacts"))
    ['checkpoint', 'eval_model.onnx', 'optimizer_model.onnx', 'training_model.onnx']
    """
    from graphopt.on_device.graphs import compile_on_device
    from graphopt.on_device.state import state_on_device

    check_pipeline(pipeline, "export_artifacts", "export_artifacts(model, graphopt.standard(...), folder)")
    made = compile_on_device(model, pipeline)
    contents = {
        TRAINING: whole(made.training),
        EVALUATION: whole(made.evaluation),
        OPTIMIZER: made.optimizer.SerializeToString(),
        CHECKPOINT: checkpoint_bytes(state_on_device(made, state), made.optimizer_pass.learning_rate),
    }
    write_folder(folder, contents)


@checked()
def load_artifacts(folder: _PathLike, *, device: str = "cpu") -> tuple[Any, Any, Any]:
    """Return onnxruntime-training's CheckpointState, Module and Optimizer for a folder's files.

    Args:
        folder: the folder that `export_artifacts` wrote.
        device: the device to train on.

    Raises:
        GraphoptError: a file is missing, or onnxruntime-training or PyTorch, which it imports, is not installed.

    >>> state, module, optimizer = graphopt.load_artifacts("artifacts")  # doctest: +SKIP
    """
    missing = [name for name in FILES if not Path(folder, name).is_file()]
    if missing:
        raise GraphoptError(
            f"{folder}: expected {', '.join(FILES)}, found no {', '.join(missing)}: export the artifacts again"
        )
    try:
        from onnxruntime.training import api
    except ImportError as error:
        raise GraphoptError(
            f"training artifacts: expected {TRAINING_RUNTIME} and torch, which it imports, found: {error}: pip install "
            f"onnxruntime-training==1.19.2 torch in an environment without another onnxruntime"
        ) from error
    try:
        state = api.CheckpointState.load_checkpoint(Path(folder, CHECKPOINT))
        module = api.Module(Path(folder, TRAINING), state, Path(folder, EVALUATION), device=device)
        optimizer = api.Optimizer(Path(folder, OPTIMIZER), module)
    except RuntimeError as error:
        raise GraphoptError(
            f"{folder}: {TRAINING_RUNTIME} cannot load the artifacts: {' '.join(str(error).split())}"
        ) from error
    if LEARNING_RATE in state.properties:
        optimizer.set_learning_rate(state.properties[LEARNING_RATE])
    return state, module, optimizer


def parameters(checkpoint: _PathLike) -> dict[str, np.ndarray]:
    """Return the arrays of a checkpoint by name: parameters, running statistics and counters.

    Args:
        checkpoint: the file, or the folder of artifacts that contains it.

    Raises:
        GraphoptError: the file is missing, is not such a checkpoint or does not contain the values, or no ONNX Runtime
            is installed to read it.
    """
    found = read_checkpoint(checkpoint)
    return {**found.trained, **found.untrained}


@checked()
def from_checkpoint(model: Source, checkpoint: _PathLike) -> onnx.ModelProto:
    """Return an inference model with the parameters of a checkpoint, which are matched by name.

    Args:
        model: the exported model, its `eval_model.onnx`, or a training graph compiled from it: a path, an
            onnx.ModelProto or an onnx_ir.Model; it is not changed.
        checkpoint: the file, or the folder of artifacts that contains it.

    Raises:
        GraphoptError: the checkpoint cannot be read, or belongs to another model: a name, a shape or a type differs.

    >>> from graphopt import models
    >>> model = models.linear((2,), 1)
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-3))
    >>> graphopt.export_artifacts(model, pipeline, "artifacts")
    >>> trained = graphopt.from_checkpoint(model, "artifacts")
    """
    read = parameters(checkpoint)
    arrays = {name: array for name, array in read.items() if not name.startswith(COUNTERS)}
    loaded = load(model)
    state = {original_name(x): x for x in with_role(loaded, Role.PARAMETER, Role.STATISTIC)}
    values = state or dict(loaded.graph.initializers)
    unknown = (arrays.keys() - values.keys()) | (state.keys() - arrays.keys())
    if unknown:
        raise GraphoptError(
            f"{checkpoint}: expected the parameters of this model, found those of another: only one of the two has "
            f"{', '.join(sorted(unknown)[:5])}: use the {EVALUATION} beside the checkpoint as the model"
        )
    for name, array in arrays.items():
        place = f"{checkpoint}: parameter {name!r}"
        fitting(place, array, declared(values[name]), "use the checkpoint of this model")
    if state:
        return inference.trained(loaded, {name_of(x): arrays[name] for name, x in state.items()})
    for name, array in arrays.items():
        values[name].const_value = ir.tensor(array, name=name)
    return ir.to_proto(loaded)


def state_from_checkpoint(step: Source, pipeline: Pipeline, checkpoint: _PathLike) -> dict[str, np.ndarray]:
    """Return the state of a checkpoint as that of a training graph, for `executor.update_state`.

    Weights, running statistics, the optimizer's moments and the number of its steps cross.

    Args:
        step: the training graph that `graphopt.compile(model, **pipeline)` returns: a path, an onnx.ModelProto or an
            onnx_ir.Model. It may have a schedule, too.
        pipeline: the passes that `export_artifacts` had.
        checkpoint: the file, or the folder of artifacts that contains it. On the device, save it with
            `include_optimizer_state=True`.

    Raises:
        GraphoptError: the checkpoint cannot be read, has no moments, or belongs to another model or optimizer.

    >>> from graphopt import models
    >>> model = models.linear((2,), 1)
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-3))
    >>> executor = graphopt.Executor(graphopt.compile(model, **pipeline))
    >>> graphopt.export_artifacts(model, pipeline, "artifacts", state=executor.state)
    >>> executor.update_state(graphopt.state_from_checkpoint(executor.model, pipeline, "artifacts"))
    """
    from graphopt.on_device.graphs import optimizer_of
    from graphopt.on_device.state import state_of_step

    loaded = load(step)
    if not with_role(loaded, Role.NEXT):
        raise GraphoptError(
            "state_from_checkpoint: expected a training graph, found one without state to update: use from_checkpoint"
        )
    return state_of_step(loaded, optimizer_of(pipeline), read_checkpoint(checkpoint), str(checkpoint))

"""Write artifacts for onnxruntime-training's Module and Optimizer, and read trained checkpoints.

The checkpoint is a flatbuffer. The classes that read and write it are part of every ONNX Runtime. The schema is
onnxruntime/core/flatbuffers/schema/ort_training_checkpoint.fbs.
"""

from __future__ import annotations

import importlib
import os
import struct
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
from graphopt.pipeline import Pipeline, check_pipeline

TRAINING, EVALUATION, OPTIMIZER = "training_model.onnx", "eval_model.onnx", "optimizer_model.onnx"
CHECKPOINT = "checkpoint"
FILES = (TRAINING, EVALUATION, OPTIMIZER, CHECKPOINT)
_VERSION = 2  # of the checkpoint's format in onnxruntime-training 1.19.2
_LIMIT = 2**31 - 2**20  # bytes of parameters: a flatbuffer's offsets are signed 32-bit numbers

_PathLike = str | os.PathLike[str]


@checked()
def export_artifacts(model: Source, pipeline: Pipeline, folder: _PathLike) -> None:
    """Write the files from which onnxruntime-training's Module and Optimizer train `model` on a device.

    The files are `training_model.onnx`, `eval_model.onnx`, `optimizer_model.onnx` and `checkpoint`. After an error,
    none is written. Module takes the data in the order of the training graph's inputs. It returns the loss in training,
    and the losses and the model's outputs in evaluation. Parameters keep their names. Every ONNX Runtime can write the
    files.

    Args:
        model: an inference model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        pipeline: the passes: `graphopt.standard(loss=..., optimizer=...)`.
        folder: the folder to write to.

    Raises:
        GraphoptError: the model cannot be read, or a device does not support a step of the pipeline.

    >>> import os
    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.AdamW(1e-3))
    >>> graphopt.export_artifacts(models.linear((2,), 1), pipeline, "artifacts")
    >>> sorted(os.listdir("artifacts"))
    ['checkpoint', 'eval_model.onnx', 'optimizer_model.onnx', 'training_model.onnx']
    """
    from graphopt.on_device.graphs import compile_on_device

    check_pipeline(pipeline, "export_artifacts", "export_artifacts(model, graphopt.standard(...), folder)")
    made = compile_on_device(model, pipeline)
    contents = {
        TRAINING: whole(made.training),
        EVALUATION: whole(made.evaluation),
        OPTIMIZER: made.optimizer.SerializeToString(),
        CHECKPOINT: _written(made.trained, made.untrained, made.learning_rate),
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
    path = Path(checkpoint, CHECKPOINT) if Path(checkpoint).is_dir() else Path(checkpoint)
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    fbs = _classes()
    if len(content) < 8 or not fbs.Checkpoint.Checkpoint.CheckpointBufferHasIdentifier(content, 0):
        raise GraphoptError(f"{path}: expected a checkpoint of {TRAINING_RUNTIME}, found another file")
    try:
        state = fbs.Checkpoint.Checkpoint.GetRootAs(content).ModuleState()
        if state is not None and not state.IsNominalState() and not state.HasExternalData():
            tensors = [state.RequiresGradParams(i) for i in range(state.RequiresGradParamsLength())]
            tensors += [state.FrozenParams(i) for i in range(state.FrozenParamsLength())]
            return {tensor.Name().decode(): _array(tensor) for tensor in tensors}
    except (struct.error, ValueError, TypeError, IndexError, AttributeError) as error:
        raise GraphoptError(f"{path}: the checkpoint is damaged: {error}") from error
    raise GraphoptError(
        f"{path}: expected a checkpoint that contains the parameters, found one without: save it again"
    )


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
        x = values[name]
        assert x.dtype is not None and x.shape is not None
        if x.dtype.numpy() != array.dtype or x.shape.numpy() != array.shape:
            raise GraphoptError(
                f"{checkpoint}: parameter {name!r}: expected {x.dtype.numpy()}{list(x.shape)}, found "
                f"{array.dtype}{list(array.shape)}: use the checkpoint of this model"
            )
    if state:
        return inference.trained(loaded, {name_of(x): arrays[name] for name, x in state.items()})
    for name, array in arrays.items():
        values[name].const_value = ir.tensor(array, name=name)
    return ir.to_proto(loaded)


def _classes() -> Any:
    """Return the classes that read and write the checkpoint, which are in a folder of ONNX Runtime's tools."""
    try:
        import onnxruntime.tools.ort_format_model  # noqa: F401 - puts their folder on the path

        return importlib.import_module("ort_flatbuffers_py.fbs")
    except ImportError as error:
        raise GraphoptError(
            f"a checkpoint of {TRAINING_RUNTIME}: expected an ONNX Runtime to read and write it, found none ({error}): "
            f"pip install onnxruntime"
        ) from error


def _array(tensor: Any) -> np.ndarray:
    dtype = ir.DataType(tensor.DataType()).numpy()
    dims = [tensor.Dims(i) for i in range(tensor.DimsLength())]
    return np.array(np.frombuffer(tensor.RawDataAsNumpy().tobytes(), dtype).reshape(dims))


def _written(
    trained: Mapping[str, np.ndarray], untrained: Mapping[str, np.ndarray], learning_rate: float
) -> bytes:
    size = sum(array.nbytes for array in [*trained.values(), *untrained.values()])
    if size > _LIMIT:
        raise GraphoptError(
            f"on-device artifacts: expected parameters of less than 2 GB, the limit of a checkpoint, found "
            f"{size / 2**30:.1f} GB: freeze some"
        )
    fbs = _classes()
    builder = importlib.import_module("flatbuffers").Builder(size + 4096)

    def table(kind: str, **fields: Any) -> int:
        schema = getattr(fbs, kind)
        getattr(schema, f"{kind}Start")(builder)
        for field, value in fields.items():
            getattr(schema, f"{kind}Add{field}")(builder, value)
        return getattr(schema, f"{kind}End")(builder)

    def vector(offsets: list[int]) -> int:
        builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            builder.PrependUOffsetTRelative(offset)
        return builder.EndVector()

    def tensors(arrays: Mapping[str, np.ndarray]) -> int:
        # Bytes that are written first are last in the file: the tables before them show that a file is truncated.
        return vector(
            [
                table(
                    "Tensor",
                    RawData=builder.CreateByteVector(array.tobytes()),
                    Dims=builder.CreateNumpyVector(np.array(array.shape, np.int64)),
                    Name=builder.CreateString(name),
                    DataType=int(ir.DataType.from_numpy(array.dtype)),
                )
                for name, array in arrays.items()
            ]
        )

    state = table("ModuleState", RequiresGradParams=tensors(trained), FrozenParams=tensors(untrained))
    rate = table("FloatProperty", Name=builder.CreateString(LEARNING_RATE), Value=learning_rate)
    properties = table("PropertyBag", Floats=vector([rate]))
    checkpoint = table("Checkpoint", Version=_VERSION, ModuleState=state, PropertyBag=properties)
    builder.Finish(checkpoint, file_identifier=b"ODTC")
    return bytes(builder.Output())

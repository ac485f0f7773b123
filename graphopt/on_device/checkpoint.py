"""Read and write checkpoints of onnxruntime-training: weights, other state, the optimizer's moments and steps.

A checkpoint is a flatbuffer. The classes that read and write it are part of every ONNX Runtime. The schema is
onnxruntime/core/flatbuffers/schema/ort_training_checkpoint.fbs.
"""

from __future__ import annotations

import importlib
import os
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import TRAINING_RUNTIME
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.values import dims_of, dtype_of

CHECKPOINT = "checkpoint"  # its name in a folder of artifacts
_VERSION = 2  # of the format in onnxruntime-training 1.19.2
_GROUP = "group0"  # the only group of parameters that its Optimizer has
_LIMIT = 2**31 - 2**20  # bytes of arrays: a flatbuffer's offsets are signed 32-bit numbers


@dataclass(frozen=True)
class DeviceState:
    """Hold what a checkpoint of onnxruntime-training contains."""

    trained: dict[str, np.ndarray]  # the parameters
    untrained: dict[str, np.ndarray]  # running statistics and counters
    # By parameter, as the optimizer has them
    moments: dict[str, list[np.ndarray]] = field(default_factory=dict)
    steps: int | None = None  # that the optimizer has done; None if the checkpoint does not say


def fitting(what: str, array: np.ndarray | None, expected: str, advice: str) -> np.ndarray:
    """Return an array, which `what` calls, or raise an error unless its type and shape are the expected ones."""
    found = "none" if array is None else f"{array.dtype}{[*array.shape]}"
    if array is None or found != expected:
        raise GraphoptError(f"{what}: expected {expected}, found {found}: {advice}")
    return array


def declared(x: ir.Value) -> str:
    """Return the type and shape of a weight or of other state as `fitting` expects them."""
    return f"{dtype_of(x).numpy()}{[*dims_of(x)]}"


def read_checkpoint(checkpoint: str | os.PathLike[str]) -> DeviceState:
    """Return all that a checkpoint, or that in a folder of artifacts, contains.

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
        saved = fbs.Checkpoint.Checkpoint.GetRootAs(content)
        state = saved.ModuleState()
        if state is not None and not state.IsNominalState() and not state.HasExternalData():
            group: Any = saved.OptimizerGroups(0) if saved.OptimizerGroupsLength() else None
            count = 0 if group is None else group.OptimizerStatesLength()
            kept = map(group.OptimizerStates, range(count)) if count else ()
            return DeviceState(
                trained=_arrays(state.RequiresGradParams, state.RequiresGradParamsLength()),
                untrained=_arrays(state.FrozenParams, state.FrozenParamsLength()),
                moments={
                    x.ParamName().decode(): [
                        array for _, array in sorted(_arrays(x.Momentums, x.MomentumsLength()).items())
                    ]
                    for x in kept
                },
                steps=None if group is None else int(group.Step()),
            )
    except (struct.error, ValueError, TypeError, IndexError, AttributeError) as error:
        raise GraphoptError(f"{path}: the checkpoint is damaged: {error}") from error
    raise GraphoptError(f"{path}: expected a checkpoint that contains the parameters, found one without: save it again")


def _classes() -> ModuleType:
    """Return the classes that read and write the checkpoint, which are in a folder of ONNX Runtime's tools."""
    try:
        import onnxruntime.tools.ort_format_model  # noqa: F401 - puts their folder on the path

        return importlib.import_module("ort_flatbuffers_py.fbs")
    except ImportError as error:
        raise GraphoptError(
            f"a checkpoint of {TRAINING_RUNTIME}: expected an ONNX Runtime to read and write it, found none ({error}): "
            f"pip install onnxruntime"
        ) from error


def _arrays(tensor_at: Callable[[int], Any], count: int) -> dict[str, np.ndarray]:
    return {tensor.Name().decode(): _array(tensor) for tensor in map(tensor_at, range(count))}


def _array(tensor: Any) -> np.ndarray:
    dtype = ir.DataType(tensor.DataType()).numpy()
    dims = [tensor.Dims(i) for i in range(tensor.DimsLength())]
    return np.array(np.frombuffer(tensor.RawDataAsNumpy().tobytes(), dtype).reshape(dims))


def checkpoint_bytes(state: DeviceState, learning_rate: float) -> bytes:
    """Return the file of a checkpoint.

    Raises:
        GraphoptError: the arrays are larger than a file can be, or no ONNX Runtime is installed to write it.
    """
    arrays = [
        *state.trained.values(),
        *state.untrained.values(),
        *(x for some in state.moments.values() for x in some),
    ]
    size = sum(array.nbytes for array in arrays)
    if size > _LIMIT:
        raise GraphoptError(
            f"on-device artifacts: expected parameters of less than 2 GB, the limit of a checkpoint, found "
            f"{size / 2**30:.1f} GB: freeze some"
        )
    writer = _Writer(size)
    table, text, tensors = writer.table, writer.text, writer.tensors
    kept = [
        table(
            "ParameterOptimizerState",
            Momentums=tensors({f"momentum{i}": array for i, array in enumerate(some)}),
            ParamName=text(name),
        )
        for name, some in state.moments.items()
    ]
    groups = {}
    if state.steps is not None:
        states, name = writer.vector(kept), text(_GROUP)
        rates = {"Step": state.steps, "InitialLearningRate": learning_rate}
        group = table("OptimizerGroup", GroupName=name, OptimizerStates=states, **rates)
        groups["OptimizerGroups"] = writer.vector([group])
    module = table("ModuleState", RequiresGradParams=tensors(state.trained), FrozenParams=tensors(state.untrained))
    rate = table("FloatProperty", Name=text(LEARNING_RATE), Value=learning_rate)
    properties = table("PropertyBag", Floats=writer.vector([rate]))
    root = table("Checkpoint", Version=_VERSION, ModuleState=module, PropertyBag=properties, **groups)
    return writer.finished(root)


class _Writer:
    """Write the tables of a checkpoint; what a table contains is written before it."""

    def __init__(self, size: int) -> None:
        self._schema = _classes()
        self._builder = importlib.import_module("flatbuffers").Builder(size + 4096)
        self.text: Callable[[str], int] = self._builder.CreateString

    def table(self, kind: str, **fields: object) -> int:
        schema = getattr(self._schema, kind)
        getattr(schema, f"{kind}Start")(self._builder)
        for name, value in fields.items():
            getattr(schema, f"{kind}Add{name}")(self._builder, value)
        return int(getattr(schema, f"{kind}End")(self._builder))

    def vector(self, offsets: list[int]) -> int:
        self._builder.StartVector(4, len(offsets), 4)
        for offset in reversed(offsets):
            self._builder.PrependUOffsetTRelative(offset)
        return int(self._builder.EndVector())

    def tensors(self, arrays: Mapping[str, np.ndarray]) -> int:
        # Bytes that are written first are last in the file: the tables before them show that a file is truncated.
        return self.vector(
            [
                self.table(
                    "Tensor",
                    RawData=self._builder.CreateByteVector(array.tobytes()),
                    Dims=self._builder.CreateNumpyVector(np.array(array.shape, np.int64)),
                    Name=self.text(name),
                    DataType=int(ir.DataType.from_numpy(array.dtype)),
                )
                for name, array in arrays.items()
            ]
        )

    def finished(self, root: int) -> bytes:
        self._builder.Finish(root, file_identifier=b"ODTC")
        return bytes(self._builder.Output())

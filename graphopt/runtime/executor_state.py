"""Read, replace, save and load the state of an executor."""

from __future__ import annotations

import functools
import hashlib
import os
import threading
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NoReturn

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import Checked, checked
from graphopt.errors import GraphoptError, kind_of, nearest, unknown
from graphopt.graph import inference
from graphopt.graph.classified import note_classification
from graphopt.graph.loading import Source
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import FAKE, UNTRAINED, add_labels, labels_in, set_labels
from graphopt.graph.not_a_model import check_path
from graphopt.graph.parts import ModelParts
from graphopt.graph.roles import FED, Role, with_role
from graphopt.graph.state import STEP, accumulators
from graphopt.graph.storage import path_of_file
from graphopt.graph.values import name_of
from graphopt.runtime.checkpoint import Property, load_state, save_state
from graphopt.runtime.device import Device
from graphopt.runtime.encoding import Encoding
from graphopt.runtime.executor_options import ExecutorOptions
from graphopt.runtime.frozen import FrozenPlacement, placement_of
from graphopt.runtime.original import trained_into
from graphopt.runtime.runners import Rounds
from graphopt.runtime.signature import reportable
from graphopt.runtime.state_buffers import Copies, StateBuffers
from graphopt.runtime.tensors import Tensor, to_ort

_SETTABLE = ("learning_rate", "properties", "state")
# Of an executor and data
_FUNCTIONS = {name: name for name in ("evaluate", "fit", "predict")} | {"train": "fit"}
_BATCHES = "graphopt.batches"  # properties of checkpoints
_SETTER = "update_state({name: array})"
_BASE = "graphopt.base"  # of adapters: a digest of the weights beside which they train


class ExecutorState(Checked):
    """Hold a training graph, its options, its state on a device, and the number of batches so far.

    An executor is one, and has none: all of these members are public there, and would need as many that forward them.
    """

    Options: ClassVar[type[ExecutorOptions]] = ExecutorOptions  # explains the options to the command
    options: ExecutorOptions
    _device: Device
    _model: ir.Model
    _buffers: StateBuffers
    _encoding: Encoding | None  # of the strings that the file takes
    _rounds: Rounds | None  # of workers that train separately
    _lock: threading.RLock
    _labels: list[str] | None  # of the data
    _report: list[str]  # the outputs that a step reports
    properties: dict[str, Property]  # set by the user and saved in checkpoints

    def __setattr__(self, name: str, value: object) -> None:
        if name in self.Options.__dataclass_fields__:
            raise GraphoptError(
                f"{name}: expected no new value, as the options of an executor do not change, found {value!r}: create "
                f"another executor"
            )
        is_own = name[:1] == "_" or name in _SETTABLE or hasattr(type(self), name)
        if not is_own and nearest(name, _SETTABLE):
            raise GraphoptError(f"executor: {unknown('attribute', name, _SETTABLE)}")
        super().__setattr__(name, value)

    if not TYPE_CHECKING:  # for type checkers, an unknown attribute stays one

        def __getattr__(self, name: str) -> NoReturn:
            meant = _FUNCTIONS.get(name)
            called = f": call graphopt.{meant}(executor, data)" if meant else ""
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}{called}")

    def __repr__(self) -> str:
        weights = [x for x in with_role(self._model, Role.PARAMETER) if x.shape is not None]
        sizes = sum(int(np.prod(x.shape.numpy())) for x in weights if x.shape is not None)
        shared = "" if self.frozen == "packed" else f", frozen weights {self.frozen}"
        return (
            f"{type(self).__name__}({self._model.graph.name!r}, device={self.device!r}, "
            f"provider={self._device.execution_provider!r}, target={str(self._device.target)!r}: "
            f"{self.batches:,} batches so far, {sizes:,} parameters in {len(weights)} tensors{shared})"
        )

    def __reduce__(self) -> NoReturn:
        raise GraphoptError(
            f"{type(self).__name__}: expected a training graph to pickle, found its session, which another process "
            "cannot use: save a checkpoint with save(PATH), and load it there"
        )

    def _open(self) -> None:
        """Create the sessions that read the model's weights."""

    @property
    def device(self) -> str:
        """Return the name of the device."""
        return self._device.name

    @property
    def device_options(self) -> Device:
        """Return the device with its options."""
        return self._device

    @property
    def frozen(self) -> FrozenPlacement:
        """Return where the weights lie that do not train: the option `frozen`, or what `auto` chose by their size.

        `packed`: in each session; `mapped`: in memory that all sessions share; `low`: so, and values of a step are
        freed early.
        """
        return placement_of(self._device, self._model)

    @property
    def in_place(self) -> bool:
        """Return whether a step writes the new state over the old one."""
        return self.options.in_place

    def on_device(self, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """Copy a batch to the GPU ahead of `step`. On the CPU, return the batch itself."""
        device = self._device
        if self._encoding is not None:
            batch = self._encoding.encoded(batch)
        if device.machine.in_host_memory or device.graph_capture:
            return {**batch}
        arrays = {name: x for name, x in batch.items() if isinstance(x, np.ndarray)}
        return {**batch, **{name: to_ort(device, x, x.dtype) for name, x in arrays.items()}}

    @property
    def model(self) -> ir.Model:
        """Return the training graph without its initial state."""
        return self._model

    @checked()
    def trained(
        self,
        outputs: Sequence[str] | None = None,
        *,
        into: Source | None = None,
        adapters: Literal["merged", "slots"] = "merged",
        quantized: bool = True,
    ) -> onnx.ModelProto:
        """Return the inference model with the trained weights, under the names of the model that was compiled.

        Args:
            outputs: the names of the outputs or inner values to compute; the model's outputs by default.
            into: the model that was compiled, whose nodes, inputs and outputs stay as they are: a path, bytes, an
                onnx.ModelProto or an onnx_ir.Model. By default, the model is written anew from the training graph,
                without operators and outputs that training has removed.
            adapters: merge adapters into the weights (`merged`), or add inputs for them to the model `into` (`slots`):
                its outputs are those of the model without adapters until a file of `graphopt.save_adapter` is active.
                Nothing can be merged into integers: if the model has quantized weights with adapters, adapters stay
                operators.
            quantized: return the model in integers if it trains by `passes.FakeQuantize`; otherwise, in floats.

        Raises:
            GraphoptError: the inference model has no value with one of these names, or `into` is another model.
        """
        if isinstance(outputs, str):
            raise GraphoptError(
                f"trained: expected the names of outputs, found {outputs!r}: write trained([{outputs!r}]); for a file, "
                f"executor.save_trained({outputs!r})"
            )
        return self._trained("trained", outputs, into, adapters, quantized).message()

    @checked()
    def save_trained(
        self,
        path: str | os.PathLike[str],
        outputs: Sequence[str] | None = None,
        *,
        into: Source | None = None,
        adapters: Literal["merged", "slots"] = "merged",
        quantized: bool = True,
    ) -> None:
        """Write the model that `trained` returns to the file that `graphopt.save` would write.

        Beyond 2 GB, weights are written one at a time: those that do not train go from the mapped file of the model to
        the new one, and adapters are merged into one weight after the other. Smaller models are one message in memory.

        Args:
            path: the file to write; beyond 2 GB, its weights are in `PATH.data`.
            outputs: as in `trained`.
            into: as in `trained`.
            adapters: as in `trained`.
            quantized: as in `trained`.

        Raises:
            GraphoptError: as in `trained`, or the file cannot be written. Nothing is changed.
        """
        check_path(path, "save_trained", "executor.save_trained('trained.onnx')")
        path = path_of_file(path, "save_trained")
        self._trained("save_trained", outputs, into, adapters, quantized).save(path)

    def _trained(
        self, call: str, outputs: Sequence[str] | None, into: Source | None, adapters: str, quantized: bool
    ) -> ModelParts:
        """Return the inference model with the trained weights; errors name the method `call`."""
        if adapters not in ("merged", "slots"):
            raise GraphoptError(f"{call}: adapters: expected 'merged' or 'slots', found {adapters!r}")
        if into is not None:
            if outputs is not None:
                raise GraphoptError(
                    f"{call}: outputs: expected none with into, whose outputs stay, found some"
                )
            if any(FAKE.is_set(node) for node in self._model.graph):
                raise GraphoptError(
                    f"{call}: into: expected none, since a model that trains by FakeQuantize has other operators in "
                    "integers, and folded weights, found a model: leave into out"
                )
            trained = trained_into(self._model, self.state, into, slots=adapters == "slots")
        elif adapters == "slots":
            raise GraphoptError(
                f"{call}: into: expected the model that gets slots, found None: name its file"
            )
        else:
            packed = any(note.quantized for _, note in adapted(self._model))
            trained = inference.trained_parts(
                self._model, self.state, outputs, adapters="kept" if packed else "merged", quantized=quantized
            )
        if into is not None and self.labels is not None:
            set_labels(trained.proto, self.labels)
        elif self._labels is not None:
            add_labels(trained.proto, self._labels)
        if into is None:
            note_classification(trained.proto, self._model)
        return trained

    @property
    def labels(self) -> list[str] | None:
        """Return the names of the classes: those of the data that `fit` had, or of the model, or None."""
        return labels_in(self._model) if self._labels is None else self._labels

    @labels.setter
    def labels(self, labels: Sequence[str] | None) -> None:
        if labels is not None and (isinstance(labels, str) or not isinstance(labels, Iterable)):
            raise GraphoptError(
                f"labels: expected the names of the classes, or None for those of the model, found {kind_of(labels)}: "
                "set a list, such as ['cat', 'dog']"
            )
        self._labels = None if labels is None else list(map(str, labels))

    @property
    def inputs(self) -> dict[str, ir.Value]:
        """Return the inputs to feed in each step by name: data, targets and sample weights."""
        if self._encoding is not None:
            return dict(self._encoding.inputs)
        return {name_of(value): value for value in with_role(self._model, *FED)}

    @property
    def outputs(self) -> list[str]:
        """Return the names of all outputs that a step can report, `loss` first."""
        return reportable(self._model)

    @property
    def reported(self) -> list[str]:
        """Return the names of the outputs that a step reports, `loss` first."""
        return list(self._report)

    @property
    def state(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name: parameters, optimizer slots and counters.

        They cannot be written to. `update_state`, or `executor.state = arrays`, changes the state.
        """
        with self._lock:
            return Copies(self._buffers.arrays(), _SETTER)

    @state.setter
    def state(self, arrays: Mapping[str, np.ndarray]) -> None:
        self.update_state(arrays)

    def update_state(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. If an array has the wrong type or shape, nothing is replaced.

        Raises:
            GraphoptError: a name is unknown, or an array has the wrong type or shape.
        """
        if not isinstance(arrays, Mapping):
            raise GraphoptError(f"state: expected arrays by name, found {kind_of(arrays)}")
        with self._lock:
            self._buffers.update(arrays)
            if STEP in arrays:
                self._buffers.batches = int(arrays[STEP])

    @property
    def steps(self) -> int:
        """Return the number of parameter updates so far: the counter `step`, which schedules read.

        A batch does not count if `passes.Accumulate` only accumulates its gradients, or if `passes.DynamicLossScale`
        skips it. `batches` counts all of them. A graph without the counter updates the parameters in every batch.
        """
        with self._lock:
            counter = self._buffers.sets[self._buffers.current].get(STEP)
            return self._buffers.batches if counter is None else int(counter.numpy())

    @property
    def batches(self) -> int:
        """Return the number of batches so far, including those without a parameter update. Checkpoints contain it.

        A step that `on_nonfinite` refuses or skips does not change the state and does not count. If `update_state`
        sets the counter `step`, it sets this number too.
        """
        return self._buffers.batches

    def set_batches(self, count: int) -> None:
        """Set the number of batches so far, as a checkpoint has it."""
        self._buffers.batches = count
        if self._rounds is not None:
            self._rounds.restart()

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name, in alphabetical order.

        They cannot be written to. `update_state` changes parameters.
        """
        with self._lock:
            return Copies(self._buffers.arrays(sorted(self._of(Role.PARAMETER))), _SETTER)

    def contiguous(self, *, frozen: bool = False) -> np.ndarray:
        """Return the parameters concatenated into one vector, in alphabetical order.

        Args:
            frozen: include the model's weights that do not train.

        Raises:
            GraphoptError: their types differ.
        """
        return _joined(self._weights(frozen))

    def set_contiguous(self, vector: np.ndarray, *, frozen: bool = False) -> None:
        """Replace the parameters by the parts of a vector in the layout of `contiguous`.

        Raises:
            GraphoptError: the vector has the wrong type or size. Nothing is replaced.
        """
        weights = self._weights(frozen)
        expected = _joined(weights)
        if vector.shape != expected.shape or vector.dtype != expected.dtype:
            raise GraphoptError(
                f"set_contiguous: expected {expected.dtype}{list(expected.shape)}, found "
                f"{vector.dtype}{list(vector.shape)}"
            )
        parts = np.split(vector, np.cumsum([array.size for array in weights.values()])[:-1])
        new = {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
        with self._lock:
            self.update_state({name: new.pop(name) for name in self._of(Role.PARAMETER)})
            for name, array in new.items():
                self._model.graph.initializers[name].const_value = ir.tensor(np.array(array), name=name)
            if new:  # frozen weights are constants of the sessions
                self.__dict__.pop("_base", None)
                self._open()

    def reset_gradients(self) -> None:
        """Reset the gradients that `passes.Accumulate` has accumulated since the last update."""
        names = [name_of(x) for x in accumulators(self._model)]
        if not names:
            raise GraphoptError(
                "reset_gradients: expected a graph that accumulates gradients, found none: add passes.Accumulate"
            )
        with self._lock:
            arrays = self._buffers.arrays(names)
            self.update_state({name: np.zeros_like(array) for name, array in arrays.items()})

    @property
    def hyperparameters(self) -> dict[str, Any]:
        """Return the values of the hyperparameters by name."""
        return self._buffers.hyperparameters

    def set_hyperparameters(self, **values: object) -> None:
        """Set hyperparameters for all later steps.

        Raises:
            GraphoptError: a hyperparameter is unknown, or its value has the wrong type or shape, is not finite, or is
                a negative rate.
        """
        with self._lock:
            self._buffers.feed(values)

    @checked()
    def save(self, path: str | os.PathLike[str], *, checksum: bool = True) -> None:
        """Write all state and `properties` to a checkpoint, from which `load` continues bit for bit.

        Args:
            path: the file to write.
            checksum: write a checksum, which finds a damaged file. Without it and `properties`, the file has the
                layout of `state.safetensors` that `graphopt.export_hosts` writes and hosts read.

        Raises:
            GraphoptError: the path is that of a model, `NAME.onnx`. Nothing is written.
        """
        check_path(path, "save", "executor.save('state.safetensors')")
        if os.fspath(path).lower().endswith(".onnx"):
            raise GraphoptError(
                f"save: expected the path of a checkpoint, such as state.safetensors, found {path}, that of a model: "
                f"for the trained model, call graphopt.save(executor.trained(), {os.fspath(path)!r})"
            )
        with self._lock:
            arrays, properties = self._buffers.arrays(), {**self.properties, _BATCHES: self.batches}
        if checksum and (base := self._base) is not None:
            properties[_BASE] = base
        save_state(arrays, path, properties if checksum else None)

    @checked()
    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state and `properties` by those of a checkpoint.

        Raises:
            GraphoptError: the file is not a checkpoint, is damaged, or belongs to another training graph. Nothing is
                replaced.
        """
        check_path(path, "load", "executor.load('state.safetensors')")
        arrays, properties = load_state(path)
        unlike = sorted(set(arrays) ^ set(self._buffers.names))
        if unlike:
            raise GraphoptError(
                f"{path}: expected the state of this training graph, found another's: "
                f"{', '.join(unlike[:5])} are not in both"
            )
        if (base := properties.pop(_BASE, None)) not in (None, self._base):
            raise GraphoptError(
                f"{path}: expected adapters of this model, whose weights that do not train have the digest "
                f"{str(self._base)[:12]}, found those of a model with {str(base)[:12]}: compile the model that they "
                "were trained on"
            )
        with self._lock:
            self.update_state(arrays)
            self.set_batches(int(properties.pop(_BATCHES, self.steps)))
            self.properties = properties

    @functools.cached_property
    def _base(self) -> str | None:
        """Return a digest of the weights that do not train beside adapters; None without adapters."""
        if not any(adapted(self._model)):
            return None
        sums = hashlib.sha256()
        for name, value in sorted(self._model.graph.initializers.items()):
            if value.const_value is not None and not value.is_graph_input():
                sums.update(f"{name}:{value.const_value.dtype}:{value.const_value.shape};".encode())
                sums.update(value.const_value.tobytes())
        return sums.hexdigest()

    def _of(self, *roles: Role) -> list[str]:
        """Return the names of the inputs and outputs with one of the roles."""
        return [name_of(value) for value in with_role(self._model, *roles)]

    def _weights(self, frozen: bool) -> dict[str, np.ndarray]:
        """Return the parameters in alphabetical order, with the weights that do not train if `frozen`."""
        untrained = {
            name: value.const_value.numpy()
            for name, value in self._model.graph.initializers.items()
            if frozen and UNTRAINED.is_set(value) and value.const_value is not None
        }
        return dict(sorted({**self.parameters, **untrained}.items()))


def _joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenate arrays of one type into one vector."""
    types = {array.dtype for array in arrays.values()}
    if len(types) > 1:
        raise GraphoptError(
            f"contiguous: expected parameters of one type, found {', '.join(map(str, types))}"
        )
    return np.concatenate([array.ravel() for array in arrays.values()])

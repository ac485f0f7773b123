"""Read, replace, save and load the state of an executor."""

from __future__ import annotations

import functools
import hashlib
import json
import os
from collections.abc import Mapping, Sequence

import numpy as np
import onnx_ir as ir

from graphopt.adapters.combined import adaptations, combined
from graphopt.adapters.slots import add_slots
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph import inference
from graphopt.graph.classified import labels_in, note_classification, set_labels
from graphopt.graph.loading import Source, read_original
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import COLUMN_NAMES, FAKE, UNTRAINED, column_names_in, names_in, note_column_names
from graphopt.graph.not_a_model import check_path
from graphopt.graph.original import write_weights
from graphopt.graph.parts import ModelParts
from graphopt.graph.roles import Role, data_inputs, with_role
from graphopt.graph.state import STEP, accumulators
from graphopt.graph.storage import path_of_file
from graphopt.graph.values import name_of
from graphopt.runtime.checkpoint import Property, load_state, save_state
from graphopt.runtime.state_buffers import Copies
from graphopt.runtime.steps import Parts

_BATCHES = "graphopt.batches"  # properties of checkpoints
_SETTER = "update_state({name: array})"
_BASE = "graphopt.base"  # of adapters: a digest of the weights beside which they train


class ExecutorState:
    """Hold what training has changed: parameters, slots, counters, and what a checkpoint has beside them.

    The methods of `Executor` with the same names explain these.

    Attributes:
        properties: set by the user and saved in checkpoints.
        own_labels: the names of the classes of the data, if any.
    """

    def __init__(self, parts: Parts) -> None:
        self._model, self._buffers = parts.model, parts.buffers
        self._rounds, self._lock = parts.rounds, parts.lock
        self.properties: dict[str, Property] = {}
        self.own_labels: list[str] | None = None

    @property
    def labels(self) -> list[str] | None:
        """Return the names of the classes: those of the data, or of the model, or None."""
        return labels_in(self._model) if self.own_labels is None else self.own_labels

    def copies(self) -> dict[str, np.ndarray]:
        """Return copies of all state by name."""
        with self._lock:
            return Copies(self._buffers.arrays(), _SETTER)

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name."""
        if not isinstance(arrays, Mapping):
            raise GraphoptError(f"state: expected arrays by name, found {kind_of(arrays)}")
        with self._lock:
            self._buffers.update(arrays)
            if STEP in arrays:
                self._buffers.batches = int(arrays[STEP])

    @property
    def steps(self) -> int:
        """Return the number of parameter updates so far."""
        with self._lock:
            counter = self._buffers.sets[self._buffers.current].get(STEP)
            return self._buffers.batches if counter is None else int(counter.numpy())

    def set_batches(self, count: int) -> None:
        """Set the number of batches so far."""
        self._buffers.batches = count
        if self._rounds is not None:
            self._rounds.restart()

    @property
    def parameters(self) -> dict[str, np.ndarray]:
        """Return copies of the parameters by name, in alphabetical order."""
        with self._lock:
            names = sorted(map(name_of, with_role(self._model, Role.PARAMETER)))
            return Copies(self._buffers.arrays(names), _SETTER)

    def weights(self, frozen: bool) -> dict[str, np.ndarray]:
        """Return the parameters in alphabetical order, with the weights that do not train if `frozen`."""
        untrained = {
            name: value.const_value.numpy()
            for name, value in self._model.graph.initializers.items()
            if frozen and UNTRAINED.is_set(value) and value.const_value is not None
        }
        return dict(sorted({**self.parameters, **untrained}.items()))

    def set_contiguous(self, vector: np.ndarray, frozen: bool) -> bool:
        """Replace the parameters by the parts of a vector; return whether weights changed that do not train."""
        weights = self.weights(frozen)
        expected = joined(weights)
        if vector.shape != expected.shape or vector.dtype != expected.dtype:
            raise GraphoptError(
                f"set_contiguous: expected {expected.dtype}{list(expected.shape)}, found "
                f"{vector.dtype}{list(vector.shape)}"
            )
        parts = np.split(vector, np.cumsum([array.size for array in weights.values()])[:-1])
        new = {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
        with self._lock:
            self.update({name: new.pop(name) for name in self.parameters})
            for name, array in new.items():
                self._model.graph.initializers[name].const_value = ir.tensor(np.array(array), name=name)
            if new:
                self.__dict__.pop("_base", None)
        return bool(new)

    def reset_gradients(self) -> None:
        """Reset the gradients that `passes.Accumulate` has accumulated since the last update."""
        names = [name_of(x) for x in accumulators(self._model)]
        if not names:
            raise GraphoptError(
                "reset_gradients: expected a graph that accumulates gradients, found none: add passes.Accumulate"
            )
        with self._lock:
            arrays = self._buffers.arrays(names)
            self.update({name: np.zeros_like(array) for name, array in arrays.items()})

    def save(self, path: str | os.PathLike[str], checksum: bool) -> None:
        """Write all state and `properties` to a checkpoint."""
        check_path(path, "save", "executor.save('state.safetensors')")
        if os.fspath(path).lower().endswith(".onnx"):
            raise GraphoptError(
                f"save: expected the path of a checkpoint, such as state.safetensors, found {path}, that of a model: "
                f"for the trained model, call graphopt.save(executor.trained(), {os.fspath(path)!r})"
            )
        path = path_of_file(path, "save", "state.safetensors")
        with self._lock:
            arrays, properties = self._buffers.arrays(), {**self.properties, _BATCHES: self._buffers.batches}
        if checksum and (base := self._base) is not None:
            properties[_BASE] = base
        if (names := column_names_in(data_inputs(self._model))) is not None:
            properties[COLUMN_NAMES.key] = json.dumps(names)
        save_state(arrays, path, properties if checksum else None)

    def load(self, path: str | os.PathLike[str]) -> None:
        """Replace all state and `properties` by those of a checkpoint."""
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
            self.update(arrays)
            self.set_batches(int(properties.pop(_BATCHES, self.steps)))
            names = names_in(str(properties.pop(COLUMN_NAMES.key, "")))
            if names is not None:
                note_column_names(data_inputs(self._model), names)
            self.properties = properties

    @functools.cached_property
    def _base(self) -> str | None:
        """Return a digest of the weights that do not train beside adapters; None without adapters."""
        if not adapted(self._model):
            return None
        sums = hashlib.sha256()
        for name, value in sorted(self._model.graph.initializers.items()):
            if value.const_value is not None and not value.is_graph_input():
                sums.update(f"{name}:{value.const_value.dtype}:{value.const_value.shape};".encode())
                sums.update(value.const_value.tobytes())
        return sums.hexdigest()

    def trained(
        self, call: str, outputs: Sequence[str] | None, into: Source | None, adapters: str, quantized: bool
    ) -> ModelParts:
        """Return the inference model with the trained weights; errors name the method `call`."""
        if adapters not in ("merged", "slots"):
            raise GraphoptError(f"{call}: adapters: expected 'merged' or 'slots', found {adapters!r}")
        if into is not None:
            if outputs is not None:
                raise GraphoptError(f"{call}: outputs: expected none with into, whose outputs stay, found some")
            if any(FAKE.is_set(node) for node in self._model.graph):
                raise GraphoptError(
                    f"{call}: into: expected none, since a model that trains by FakeQuantize has other operators in "
                    "integers, and folded weights, found a model: leave into out"
                )
            trained = trained_into(self._model, self.copies(), into, slots=adapters == "slots")
        elif adapters == "slots":
            raise GraphoptError(f"{call}: into: expected the model that gets slots, found None: name its file")
        else:
            packed = any(note.quantized for note in adapted(self._model))
            trained = inference.trained_parts(
                self._model,
                self.copies(),
                outputs,
                adapters="kept" if packed else "merged",
                quantized=quantized,
            )
        if into is not None and self.labels is not None:
            set_labels(trained.proto, self.labels)
        elif self.own_labels is not None:
            set_labels(trained.proto, self.own_labels, keep=True)
        if into is None:
            note_classification(trained.proto, self._model)
        return trained


def joined(arrays: Mapping[str, np.ndarray]) -> np.ndarray:
    """Concatenate arrays of one type into one vector."""
    types = {array.dtype for array in arrays.values()}
    if len(types) > 1:
        raise GraphoptError(f"contiguous: expected parameters of one type, found {', '.join(map(str, types))}")
    return np.concatenate([array.ravel() for array in arrays.values()])


def trained_into(model: ir.Model, state: Mapping[str, np.ndarray], into: Source, *, slots: bool) -> ModelParts:
    """Return a copy of the model that was compiled, with the weights of a training graph.

    Args:
        model: the training graph.
        state: the values of its state by name.
        into: the model that was compiled.
        slots: add slots for adapters. Otherwise, adapters are merged into the weights, or, if one of these is
            quantized, stay operators.

    Raises:
        GraphoptError: `into` is another model, or adapters can neither be merged nor stay operators.
    """
    beside = slots or any(note.quantized for note in adapted(model))
    found = adaptations(model, state, "trained") if beside else []
    trained = inference.trained_parts(model, state, adapters="left out" if beside else "merged")
    original = read_original(into)
    write_weights(original, trained, model, merged=not beside)
    if found:
        add_slots(original.proto, combined(found), filled=not slots)
    return original

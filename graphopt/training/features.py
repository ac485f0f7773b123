"""Compute the features of frozen layers once for each row, and train the layers behind them."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

import numpy as np

from graphopt.data import Dataset
from graphopt.data.dataset import LazyArray
from graphopt.data.foreign import as_dataset
from graphopt.data.loader import Batches
from graphopt.errors import GraphoptError
from graphopt.graph.encoders import Encoders
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.graph.state import put_initial
from graphopt.graph.values import dtype_of, name_of
from graphopt.runtime.executor import Executor
from graphopt.runtime.session import Session

IN_MEMORY = 2**30  # bytes of features; more lie in a file that ends with the process


class FrozenLayers:
    """Hold the frozen layers of a training graph, and an executor that trains on their features.

    Raises:
        GraphoptError: the graph has none, its inputs are strings, or an executor of several workers runs it.
    """

    def __init__(self, executor: Executor) -> None:
        from passes.parts.features import cut_features

        if executor.workers.size > 1:
            raise GraphoptError(f"cache_features: expected one worker, found {executor.workers.size}: leave it out")
        if Encoders.read(executor.model) is not None:
            raise GraphoptError("cache_features: expected inputs of numbers, found strings: leave it out")
        self._frozen, rest = cut_features(executor.model)
        rates = with_role(rest, Role.HYPERPARAMETER)
        values = {name_of(x): np.asarray(executor.hyperparameters[name_of(x)], dtype_of(x).numpy()) for x in rates}
        put_initial(rest, {**executor.state, **values})
        changed = {
            field.name: value
            for field in dataclasses.fields(executor.options)
            if (value := getattr(executor.options, field.name)) != field.default
        }
        self.executor = Executor(rest, **changed)
        self.executor.set_batches(executor.batches)
        if executor.labels:
            self.executor.labels = executor.labels
        self._session = Session(executor.device_options, self._frozen)
        self._whole = executor

    def features(self, data: Dataset, batch_size: int, *, allow_nan: bool) -> Dataset:
        """Return data with features in place of what frozen layers read, each computed when it is first read."""
        inputs = {name: x for name, x in self._whole.inputs.items() if role_of(x) is Role.DATA}
        data = as_dataset(data, inputs)
        fed = data.feeding(list(inputs))
        batches = Batches(Dataset({name: fed[name] for name in inputs}), inputs, allow_nan=allow_nan)
        outputs = [name_of(y) for y in self._frozen.graph.outputs]
        # A batch may be read in another thread
        lock = self._whole.device_options.machine.lock or threading.Lock()
        cache = _Cache(self._session, batches, outputs, batch_size, lock)
        others = {name: x for name, x in fed.items() if name not in inputs or name in self.executor.inputs}
        read: dict[str, Any] = {name: fed[name] for name in inputs}  # lazy ones are read where a page shows rows
        return Dataset(
            {**cache.arrays, **others},
            classes=data.classes,
            labels=data.labels,
            source=data.source,
            table=data.table or read,
            names=data.column_names,
        )

    def give_back(self) -> None:
        """Give the state of what was trained to the executor of the whole graph."""
        self._whole.update_state(self.executor.state)
        self._whole.set_hyperparameters(**self.executor.hyperparameters)
        self._whole.set_batches(self.executor.batches)
        if self.executor.labels:
            self._whole.labels = self.executor.labels


class _Cache:
    """Compute features of rows that are read for the first time, and keep them."""

    def __init__(
        self,
        session: Session,
        batches: Batches,
        names: Sequence[str],
        batch_size: int,
        lock: AbstractContextManager[object],
    ) -> None:
        self._session, self._batches, self._size = session, batches, batches.fixed_size or batch_size
        self._lock, self._is_there = lock, np.zeros(len(batches), bool)
        first = self._computed(np.zeros(1, np.int64))
        self._kept = {name: _room((len(batches), *first[name].shape[1:]), first[name].dtype) for name in names}
        self.arrays = {name: _Features(self, name, x.shape, x.dtype) for name, x in self._kept.items()}

    def _computed(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        filled = np.resize(rows, self._size) if self._batches.fixed_size else rows
        return {name: x[: len(rows)] for name, x in self._session.compute_arrays(self._batches.take(filled)).items()}

    def read(self, name: str, rows: np.ndarray) -> np.ndarray:
        with self._lock:
            for part in Batches.split(np.unique(rows[~self._is_there[rows]]), self._size):
                if len(part):
                    for key, x in self._computed(np.asarray(part)).items():
                        self._kept[key][part] = x
                    self._is_there[part] = True
            return np.asarray(self._kept[name][rows])


class _Features(LazyArray):
    """Read the features of rows from a cache."""

    def __init__(self, cache: _Cache, name: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        super().__init__(shape, dtype)
        self._cache, self._name = cache, name

    def read(self, rows: np.ndarray) -> np.ndarray:
        return self._cache.read(self._name, rows)


def _room(shape: tuple[int, ...], dtype: np.dtype) -> np.ndarray:
    """Return an array in memory, or in a file without a name if it is large."""
    if int(np.prod(shape, dtype=np.int64)) * dtype.itemsize <= IN_MEMORY:
        return np.empty(shape, dtype)
    with tempfile.TemporaryFile() as file:
        return np.memmap(file, dtype, "w+", shape=shape)

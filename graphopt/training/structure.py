"""Compile the training graphs of estimators, and keep their executors."""

from __future__ import annotations

import functools
from abc import abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.compiler import compile
from graphopt.data.dataset import TARGET
from graphopt.graph.loading import Source
from graphopt.runtime.executor import Executor
from graphopt.training.evaluation import reported
from graphopt.training.metrics import Metrics, metrics

CHUNK = 1024  # how many are predicted at a time
_SHARED = 2**22  # bytes of a model up to which its training graph is cached for other estimators


@dataclass(frozen=True)
class Structure:
    """Describe all that determines an executor: a model, or its bytes, the steps of `compile`, and a device."""

    model: Source | bytes
    steps: tuple[tuple[str, Any], ...]
    device: str
    threads: int | None

    def executor(self) -> Executor:
        """Return a new executor, which reports the losses; equal structures share one training graph."""
        is_small = isinstance(self.model, bytes) and len(self.model) <= _SHARED
        compiled = _shared if is_small and self._is_hashable() else _compiled
        step = compiled(self.model, self.steps)  # type: ignore[arg-type]  # a model need not be hashable
        return Executor(step, device=self.device, threads=self.threads, report=reported(step))

    def _is_hashable(self) -> bool:
        try:
            hash(self)
        except TypeError:  # an option of a pass is a list, for example
            return False
        return True


def _compiled(model: Source | bytes, steps: tuple[tuple[str, Any], ...]) -> ir.Model:
    source = onnx.load_model_from_string(model) if isinstance(model, bytes) else model
    return compile(source, **dict(steps))


_shared = functools.lru_cache(32)(_compiled)


class Estimator:
    """Keep an executor through changes of options, and its state through pickling.

    All attributes are of the class, because scikit-learn expects __init__ to set its arguments only.
    """

    model: Source | None
    _structure: Structure | None = None
    _executor: Executor | None = None
    _kept: Mapping[str, np.ndarray] | None = None  # the state of an estimator that was pickled

    _transient: ClassVar[Sequence[str]] = ("_executor",)  # what pickling leaves out

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in vars(self).items() if name not in self._transient}
        if isinstance(self.model, ir.Model):
            state["model"] = ir.to_proto(self.model)
        return state if self._executor is None else {**state, "_kept": self._executor.state}

    def _use(self, structure: Structure, executor: Executor, state: Mapping[str, np.ndarray]) -> Executor:
        """Train with an executor from now on; continue from a state as far as its graph has one of the same name."""
        known = executor.state
        executor.update_state({name: array for name, array in state.items() if name in known})
        self._structure, self._executor, self._kept = structure, executor, None
        return executor

    @abstractmethod
    def _running(self) -> Executor:
        """Return the executor; open it for an estimator that was pickled."""

    def _metric(self) -> tuple[str, Metrics] | None:
        """Return the name of the output that has targets, and the metric that compares the two, if known."""
        return metrics(self._running().inputs).get(TARGET)

    def _predictions(self, batches: Iterable[Mapping[str, np.ndarray]]) -> np.ndarray:
        """Return the output that has targets, or the first one, for the rows of all batches."""
        known = self._metric()
        parts = [self._running().predict(batch) for batch in batches]
        return np.concatenate([part[known[0] if known else next(iter(part))] for part in parts])

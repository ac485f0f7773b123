"""Describe how far a run has come, so that another process can continue it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Record
from graphopt.training.checkpoints import Checkpoint
from graphopt.training.evaluation import Mean


@dataclass(frozen=True)
class Progress:
    """Hold how far a run has come: what a checkpoint has in JSON."""

    identity: Mapping[str, Any]  # of the data and the training graph, which a run that continues shares
    environment: Mapping[str, Any]  # what the last bits of results depend on
    step: int
    epoch: int
    row: int
    before: int  # epochs in earlier calls of `fit`
    data: Any  # its position, if it keeps one
    mean: Mean
    seconds: float
    records: Sequence[Record]
    hyperparameters: Mapping[str, Any]
    callbacks: Mapping[str, Mapping[str, Any]]  # without arrays

    def to_json(self) -> dict[str, Any]:
        """Return the progress as JSON; the items of `identity` are at the top level."""
        fields = {name: value for name, value in vars(self).items() if name != "identity"}
        rates = {
            name: value.tolist() if isinstance(value, np.ndarray) else value
            for name, value in self.hyperparameters.items()
        }
        return {**self.identity, **fields, "mean": dataclasses.asdict(self.mean), "hyperparameters": rates}

    @classmethod
    def from_json(cls, content: Mapping[str, Any]) -> Progress:
        """Return the progress that `to_json` described; in older checkpoints, data has no position."""
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {"data": None, **{name: value for name, value in content.items() if name in names}}
        identity = {name: value for name, value in content.items() if name not in names}
        return cls(**{**fields, "identity": identity, "mean": Mean(**content["mean"])})

    @classmethod
    def of(
        cls, checkpoint: Checkpoint, identity: Mapping[str, Any], environment: Mapping[str, Any]
    ) -> Progress:
        """Return the progress in a checkpoint; warn if the environment is another one.

        Raises:
            GraphoptError: the checkpoint is that of another graph, or of other data.
        """
        progress = cls.from_json(checkpoint.progress)
        for name, value in identity.items():
            found = progress.identity.get(name)
            if found != value:
                what = "the checkpoint of another training graph" if name == "graph" else f"{name} {found}"
                raise GraphoptError(
                    f"{checkpoint.path}: expected {name} {value} as in this run, found {what}"
                )
        for name, value in environment.items():
            found = progress.environment.get(name)
            if found != value:
                warnings.warn(
                    f"{checkpoint.path}: written with {name} {found}, continues with {value}: results may differ in "
                    "their last bits",
                    stacklevel=4,
                )
        return progress


def versions(executor: Executor) -> dict[str, str]:
    """Return the versions of the packages that results depend on."""
    packages = {name: metadata.version(name) for name in ("graphopt", "onnx", "numpy")}
    return {**packages, "onnxruntime": executor.device_options.ort.__version__}


def environment_of(executor: Executor) -> dict[str, Any]:
    """Return what the last bits of an executor's results depend on."""
    device = executor.device_options
    return {
        **versions(executor),
        "device": device.name,
        "threads": device.threads,
        "workers": executor.workers.size,
    }


def graph_digest(executor: Executor) -> str:
    """Return the SHA-256 sum of an executor's training graph, without the initial state."""
    return storage.model_digest(executor.model)

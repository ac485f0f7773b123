"""Hold how far a run has come, as a checkpoint has it."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from typing import Any

import numpy as np

from graphopt.errors import GraphoptError
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.callback import Record
from graphopt.training.checkpoints import Checkpoint
from graphopt.training.evaluation import Mean
from graphopt.training.sources import COLUMNS


class AnotherRun(GraphoptError):
    """Report a checkpoint of another training graph or of other data than the run that would continue it."""


@dataclass(frozen=True)
class Progress:
    """Hold the progress of a run, as a checkpoint has it in JSON, without the identity of the data and the graph."""

    environment: Mapping[str, object]  # what the last bits of results depend on
    step: int
    epoch: int
    row: int
    before: int  # epochs in earlier calls of `fit`
    data: object  # its position, if it keeps one
    mean: Mean
    seconds: float
    records: Sequence[Record]
    hyperparameters: Mapping[str, Any]
    callbacks: Mapping[str, Mapping[str, object]]  # without arrays

    def to_json(self) -> dict[str, object]:
        """Return the progress as JSON."""
        rates = {name: np.asarray(value).tolist() for name, value in self.hyperparameters.items()}
        return {**vars(self), "mean": dataclasses.asdict(self.mean), "hyperparameters": rates}

    @classmethod
    def of(cls, checkpoint: Checkpoint, identity: Mapping[str, object], environment: Mapping[str, object]) -> Progress:
        """Return the progress in a checkpoint, which has no position of the data if it is old.

        Warn if the environment is another one.

        Raises:
            AnotherRun: the checkpoint is that of another graph, or of other data.
        """
        names = {field.name for field in dataclasses.fields(cls)}
        fields = {name: value for name, value in checkpoint.progress.items() if name in names}
        progress = cls(**{"data": None, **fields, "mean": Mean(**fields["mean"])})
        for name, value in identity.items():
            found = checkpoint.progress.get(name)
            if found != value and name == "graph":
                raise AnotherRun(
                    f"{checkpoint.path}: expected the checkpoint of this training graph, found that of another "
                    "training graph"
                )
            if found is None and name == COLUMNS:  # of arrays, or old
                continue
            if found != value:
                raise AnotherRun(f"{checkpoint.path}: expected {name} {value} as in this run, found {name} {found}")
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

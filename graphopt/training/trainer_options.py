"""Declare the options of the estimator, which scikit-learn reads and sets."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from typing import Any, TypeVar

from graphopt.data.loader import Shuffle
from graphopt.errors import GraphoptError, unknown
from graphopt.graph.loading import Source
from graphopt.pipeline import Step

# scikit-learn's schedules, and the classes of `passes` that implement them
SCHEDULES = {"constant": None, "adaptive": None, "invscaling": "InverseScaling", "optimal": "Optimal"}

Options = TypeVar("Options", bound="TrainerOptions")


@dataclass(kw_only=True, eq=False, repr=False)
class TrainerOptions:
    """Declare the arguments of `Trainer`, and convert them to passes."""

    model: Source = field(kw_only=False)
    loss: Step | None = None
    optimizer: Step | None = None
    regularizer: Step | None = None
    clip: Step | None = None
    training: Step | None = None
    parameters: Step | None = None
    schedule: str | Step | None = "constant"
    max_iter: int = 100
    batch_size: int = 10
    shuffle: Shuffle = True
    validation_every: int = 1
    warm_start: bool = False
    random_state: int = 0
    device: str = "cpu"
    threads: int | None = None

    def get_params(self, deep: bool = True) -> dict[str, Any]:
        """Return the options by name; with `deep`, also those of passes, such as `optimizer__learning_rate`."""
        params = {option.name: getattr(self, option.name) for option in dataclasses.fields(self)}
        if deep:
            for name, value in list(params.items()):
                if dataclasses.is_dataclass(value):
                    fields = dataclasses.fields(value)
                    params |= {f"{name}__{field.name}": getattr(value, field.name) for field in fields}
        return params

    def set_params(self: Options, **params: Any) -> Options:
        """Set options by name, including those of passes such as `optimizer__learning_rate`; return the trainer.

        Raises:
            GraphoptError: an option is unknown.
        """
        for name, value in params.items():
            if name not in self.get_params():
                raise GraphoptError(unknown("option", name, self.get_params()))
            own, _, field = name.partition("__")
            setattr(self, own, dataclasses.replace(getattr(self, own), **{field: value}) if field else value)
        return self

    def __repr__(self) -> str:
        options = {
            option.name: option.default for option in dataclasses.fields(self) if option.name != "model"
        }
        changed = [name for name, default in options.items() if getattr(self, name) is not default]
        return f"{type(self).__name__}({', '.join(f'{name}={getattr(self, name)!r}' for name in changed)})"

    def _steps(self, weighted: bool) -> dict[str, Any]:
        import passes

        schedule = self.schedule
        if isinstance(schedule, str):
            if schedule not in SCHEDULES:
                raise GraphoptError(unknown("schedule", schedule, SCHEDULES))
            name = SCHEDULES[schedule]
            schedule = getattr(passes, name)() if name else None
        steps = {
            "loss": self._loss(weighted),
            "optimizer": self.optimizer or passes.SGD(0.01),
            "schedule": schedule,
            "regularizer": self.regularizer,
            "clip": self.clip,
            "training": self.training,
        }
        return steps if self.parameters is None else {**steps, "parameters": self.parameters}

    def _loss(self, weighted: bool, **fields: Any) -> Any:
        import passes

        loss: Any = self.loss or passes.MeanSquaredError()
        if isinstance(loss, passes.OwnLoss):  # its inputs and output are fixed
            if fields:
                raise GraphoptError(
                    "losses: expected a loss per row, found a loss that the model reduces: use a loss of `passes`"
                )
            return loss
        return dataclasses.replace(loss, sample_weight=weighted, **fields)

    @property
    def _task(self) -> str:
        return str(self._loss(False).task)

"""Declare the options of `fit`."""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, dataclass
from typing import Any

import numpy as np

from graphopt.data import Dataset
from graphopt.data.loader import Shuffle
from graphopt.errors import GraphoptError
from graphopt.intervals import check_intervals, within
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.metrics import Wanted

Data = Dataset | Mapping[str, np.ndarray] | Iterable[Mapping[str, Any]]
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Hold how `fit` trains; its docstring explains each option.

    Raises:
        GraphoptError: an option is not valid.
    """

    epochs: int = within("[1, inf)", MISSING, whole=True)
    steps_per_epoch: int | None
    batch_size: int = within("[1, inf)", MISSING, whole=True)
    shuffle: Shuffle
    seed: int = within("[0, inf)", MISSING, whole=True)
    validation: float | Data | None
    validation_every: int = within("[1, inf)", MISSING, whole=True)
    metrics: Sequence[Wanted] | None
    allow_nan: bool
    prefetch: int | None = within("[0, inf)", None, whole=True)
    checkpoint: Checkpoints | PathLike | None
    resume: bool | PathLike

    def __post_init__(self) -> None:
        check_intervals(self, owner="fit")
        if self.shuffle not in (True, False, "consecutive"):
            raise GraphoptError(f"shuffle: expected True, False or 'consecutive', found {self.shuffle!r}")
        if self.resume is True and self.checkpoint is None:
            raise GraphoptError(
                "resume: expected a folder of checkpoints, found none: give `checkpoint`, or a path"
            )

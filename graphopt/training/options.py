"""Declare the options of `fit`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from graphopt.arguments import check_function
from graphopt.data import Dataset
from graphopt.data.loader import Shuffle
from graphopt.errors import GraphoptError
from graphopt.fields import check_options
from graphopt.intervals import within
from graphopt.training.callbacks.callback import Watchers, callbacks_of
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.metrics import Wanted, listed

Data = Dataset | Mapping[str, np.ndarray] | tuple[Any, ...] | Iterable[Mapping[str, Any]]
Transform = Callable[[dict[str, np.ndarray], np.random.Generator], Mapping[str, np.ndarray]]
PathLike = str | os.PathLike[str]


@dataclass(frozen=True, kw_only=True)
class FitOptions:
    """Hold the options of `fit`, whose docstring explains them."""

    epochs: int = within("[0, inf)", 20, kw_only=True)
    steps_per_epoch: int | None = None
    batch_size: int = within("[1, inf)", 32, kw_only=True)
    shuffle: Shuffle = True
    sampling: Literal["epochs", "poisson"] = "epochs"
    seed: int = within("[0, inf)", 0, kw_only=True)
    validation: float | Data | None = 0.2
    validation_every: int = within("[1, inf)", 1, kw_only=True)
    metrics: Wanted | Sequence[Wanted] | None = None
    allow_nan: bool = False
    prefetch: int | None = within("[0, inf)", None, whole=True, kw_only=True)
    callbacks: Watchers = ()
    checkpoint: Checkpoints | PathLike | None = None
    resume: bool | PathLike = False
    transform: Transform | None = None
    cache_features: bool = False
    verbose: bool | int | None = None

    def __post_init__(self) -> None:
        check_options(self, "fit")
        for name in ("epochs", "batch_size", "seed", "validation_every"):  # 8.0 is a whole number, too
            object.__setattr__(self, name, int(getattr(self, name)))
        object.__setattr__(self, "callbacks", callbacks_of(self.callbacks))
        object.__setattr__(self, "metrics", listed(self.metrics))
        if self.transform is not None:
            check_function(self.transform, "transform", ("batch", "random"))
        if self.shuffle not in (True, False, "consecutive"):
            raise GraphoptError(f"shuffle: expected True, False or 'consecutive', found {self.shuffle!r}")
        if self.resume is True and self.checkpoint is None:
            raise GraphoptError("resume: expected a folder of checkpoints, found none: give `checkpoint`, or a path")

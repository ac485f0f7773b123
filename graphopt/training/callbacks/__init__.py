"""Callbacks: watch a training run and steer it."""

from graphopt.training.callbacks import callback, logs, progress, steering, stopping
from graphopt.training.callbacks.callback import *
from graphopt.training.callbacks.logs import *
from graphopt.training.callbacks.progress import *
from graphopt.training.callbacks.steering import *
from graphopt.training.callbacks.stopping import *

__all__: list[str] = []
for _family in (callback, stopping, steering, logs, progress):
    __all__ += _family.__all__

"""Callbacks of `fit`: `graphopt.callbacks.EarlyStopping` and others, and the base classes for your own."""

from graphopt.training.callbacks import *  # noqa: F403
from graphopt.training.callbacks import __all__ as __all__

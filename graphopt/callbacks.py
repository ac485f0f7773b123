"""Callbacks of `fit`: `graphopt.callbacks.EarlyStopping` and others, and the base classes for your own."""

from typing import NoReturn

from graphopt.arguments import no_attribute
from graphopt.training.callbacks import *  # noqa: F403
from graphopt.training.callbacks import __all__ as __all__


def __getattr__(name: str) -> NoReturn:
    raise no_attribute(__name__, name, __all__)

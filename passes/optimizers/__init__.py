"""Optimizers: how a parameter follows its gradient."""

from passes.optimizers.adaptive import Adagrad, Adam, AdamW, Lion, RMSprop
from passes.optimizers.descent import SGD
from passes.optimizers.optimizer import Group, Optimizer

__all__ = ["SGD", "Adagrad", "Adam", "AdamW", "Group", "Lion", "Optimizer", "RMSprop"]

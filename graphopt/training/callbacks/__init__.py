"""Callbacks: watch a training run and steer it."""

from graphopt.training.callbacks.callback import Callback, Control, Record, Run

__all__ = ["Callback", "Control", "Record", "Run"]

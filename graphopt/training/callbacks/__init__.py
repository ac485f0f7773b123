"""Callbacks: watch a training run and steer it."""

from graphopt.training.callbacks.averaging import WeightAverage
from graphopt.training.callbacks.callback import Callback, Control, Record, Run
from graphopt.training.callbacks.logs import CSV, JSONL, Log, MLflow, TensorBoard, Tracker
from graphopt.training.callbacks.progress import ProgressBar
from graphopt.training.callbacks.rates import Adaptive, LearningRateFinder, ReduceOnPlateau
from graphopt.training.callbacks.stopping import EarlyStopping, MedianStopping, Monitor, StopOnNaN, TimeLimit

__all__ = [
    "Adaptive",
    "CSV",
    "Callback",
    "Control",
    "EarlyStopping",
    "JSONL",
    "LearningRateFinder",
    "Log",
    "MLflow",
    "MedianStopping",
    "Monitor",
    "ProgressBar",
    "Record",
    "ReduceOnPlateau",
    "Run",
    "StopOnNaN",
    "TensorBoard",
    "TimeLimit",
    "Tracker",
    "WeightAverage",
]

"""graphopt: a compiler from ONNX inference models to self-contained ONNX training graphs."""

from graphopt.errors import GraphoptError
from graphopt.executor import Executor, NonFiniteLoss
from graphopt.forward_backward import ForwardBackward
from graphopt.listing import listing
from graphopt.loading import load, save
from graphopt.pipeline import Pipeline, compile, grad, standard
from graphopt.trainer import Trainer
from graphopt.plot import dot, mermaid, plot

__all__ = [
    "Executor",
    "ForwardBackward",
    "NonFiniteLoss",
    "GraphoptError",
    "Pipeline",
    "Trainer",
    "compile",
    "dot",
    "grad",
    "listing",
    "load",
    "mermaid",
    "plot",
    "save",
    "standard",
]

"""graphopt: a compiler from ONNX inference models to self-contained ONNX training graphs."""

from graphopt.artifacts import export_artifacts, from_checkpoint, load_artifacts
from graphopt.errors import GraphoptError
from graphopt.executor import Executor, NonFiniteLoss
from graphopt.forward_backward import ForwardBackward
from graphopt.listing import listing
from graphopt.loading import load, save
from graphopt.pipeline import Pipeline, compile, grad, standard
from graphopt.plot import dot, mermaid, plot
from graphopt.trainer import Trainer

__all__ = [
    "Executor",
    "ForwardBackward",
    "NonFiniteLoss",
    "GraphoptError",
    "Pipeline",
    "Trainer",
    "compile",
    "dot",
    "export_artifacts",
    "from_checkpoint",
    "grad",
    "listing",
    "load",
    "load_artifacts",
    "mermaid",
    "plot",
    "save",
    "standard",
]

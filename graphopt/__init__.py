"""Compile ONNX inference models to self-contained ONNX training graphs, and run them.

A typical program calls `compile`, `Executor`, `fit` and `Executor.trained`. Examples in docstrings assume `import
graphopt, passes`.
"""

from typing import TYPE_CHECKING, Any

from graphopt import deferred as deferred  # isort: skip (before anything imports onnx_ir)
from graphopt import namesakes as namesakes  # isort: skip (before anything imports passes)
from graphopt import callbacks as callbacks
from graphopt import privacy as privacy
from graphopt.arguments import no_attribute
from graphopt.compiler import StepHalves, compile, split_step, standard
from graphopt.derivatives import explain, family, grad, hessian, jacobian
from graphopt.distributed.data_parallel import DataParallel
from graphopt.distributed.local_sgd import LocalSGD
from graphopt.distributed.mpi import MPI
from graphopt.errors import GraphoptError
from graphopt.exporting.export import export
from graphopt.generation.text import TextGenerator, generate
from graphopt.graph.channels import remove_channels
from graphopt.graph.listing import listing
from graphopt.graph.loading import load
from graphopt.graph.storage import save
from graphopt.hosts.export import export_hosts
from graphopt.influence import fisher, influence
from graphopt.inspection.check import check
from graphopt.inspection.plot import dot, mermaid, plot
from graphopt.inspection.summary import summary
from graphopt.layer.layer import ForwardBackward
from graphopt.on_device.artifacts import (
    export_artifacts,
    from_checkpoint,
    load_artifacts,
    state_from_checkpoint,
)
from graphopt.pipeline import Pipeline
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor, run
from graphopt.runtime.saved_adapter import save_adapter
from graphopt.runtime.saved_folder import save_folder
from graphopt.runtime.steps import NonFiniteLoss
from graphopt.targets.target import Target, lower
from graphopt.training.calibrate import calibrate
from graphopt.training.callbacks import Callback
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.estimator import Trainer
from graphopt.training.evaluation import evaluate, example_norms, predict
from graphopt.training.fit import adapt, fit
from graphopt.training.rollouts import Rollouts
from graphopt.training.sklearn import ESTIMATORS, estimator, from_sklearn, register_skl2onnx, to_onnx
from graphopt.training.tables import FittedTable, fit_table

if TYPE_CHECKING:
    __version__: str
    from graphopt.training.sklearn.estimators import OnnxClassifier, OnnxRegressor

__all__ = [
    "Callback",
    "Checkpoints",
    "DataParallel",
    "Device",
    "Executor",
    "FittedTable",
    "ForwardBackward",
    "LocalSGD",
    "MPI",
    "NonFiniteLoss",
    "GraphoptError",
    "OnnxClassifier",
    "OnnxRegressor",
    "Pipeline",
    "Rollouts",
    "StepHalves",
    "Target",
    "TextGenerator",
    "Trainer",
    "adapt",
    "calibrate",
    "check",
    "compile",
    "dot",
    "evaluate",
    "example_norms",
    "explain",
    "family",
    "export",
    "export_artifacts",
    "export_hosts",
    "from_checkpoint",
    "fisher",
    "fit",
    "fit_table",
    "from_sklearn",
    "generate",
    "grad",
    "hessian",
    "influence",
    "jacobian",
    "listing",
    "load",
    "load_artifacts",
    "lower",
    "mermaid",
    "plot",
    "predict",
    "register_skl2onnx",
    "remove_channels",
    "run",
    "save",
    "save_adapter",
    "save_folder",
    "split_step",
    "standard",
    "state_from_checkpoint",
    "summary",
    "to_onnx",
]


def _version() -> str:
    """Return the version of the installed package; `unknown` if Python finds the code without its metadata."""
    from importlib import metadata

    try:
        return metadata.version(__name__)
    except metadata.PackageNotFoundError:
        return "unknown"


def __getattr__(name: str) -> Any:
    if name == "__version__":
        return _version()
    if name in ESTIMATORS:  # which import scikit-learn
        return estimator(name)
    import passes

    for module in (passes, callbacks):
        if name in module.__all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}: {module.__name__}.{name} is it")
    if name == "testing":
        import graphopt.testing as testing

        return testing
    if name in ("artifacts", "compare", "doctor", "hosts", "report", "tune"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}: it is a command, graphopt {name}")
    raise no_attribute(__name__, name, [*__all__, "callbacks", "data", "models"])

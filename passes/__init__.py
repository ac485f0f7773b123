"""Provide the passes for graphopt's pipelines: losses, optimizers, schedules, gradients and others.

Each file contains one family. The base class of a family does everything except the mathematics. Examples in
docstrings assume `import graphopt, numpy, passes` and `from graphopt import models`.
"""

from graphopt.graph.simplify import Simplify
from graphopt.graph.unroll import Unroll
from graphopt.targets.onnxruntime.fuse import Fuse
from graphopt.targets.portable import Portable
from passes import clipping, losses, optimizers, regularizers, schedules
from passes.accumulate import Accumulate
from passes.clipping import *
from passes.diagnostics import GradientNorm, ReportGradients
from passes.differentiate import Differentiate
from passes.gradient_stops import StopGradient, stop_gradient
from passes.gradients import Gradient, GradientSource
from passes.gradients.registry import gradient
from passes.losses.classification import *
from passes.losses.combined import *
from passes.losses.loss import *
from passes.losses.sequence import *
from passes.mixed_precision import DynamicLossScale, MixedPrecision
from passes.normalize import Normalize
from passes.optimizers import *
from passes.ort_gradient import OrtGradient
from passes.parameters import Parameters, Untie
from passes.parts.vector_jacobian import VectorJacobianProduct
from passes.recompute import Recompute
from passes.regularizers import *
from passes.schedules import *
from passes.sort_initializers import SortInitializers
from passes.standardize import Standardize
from passes.training_mode import TrainingMode
from passes.unroll_loops import UnrollLoops

__all__ = [
    "Accumulate",
    "Differentiate",
    "DynamicLossScale",
    "Fuse",
    "Gradient",
    "GradientNorm",
    "GradientSource",
    "MixedPrecision",
    "Normalize",
    "OrtGradient",
    "Parameters",
    "Portable",
    "Recompute",
    "ReportGradients",
    "Simplify",
    "SortInitializers",
    "Standardize",
    "StopGradient",
    "TrainingMode",
    "Unroll",
    "UnrollLoops",
    "Untie",
    "VectorJacobianProduct",
    "gradient",
    "stop_gradient",
]
for _family in (
    clipping,
    losses.classification,
    losses.combined,
    losses.loss,
    losses.sequence,
    optimizers,
    regularizers,
    schedules,
):
    __all__ += _family.__all__

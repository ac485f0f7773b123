"""Provide the passes for graphopt's pipelines: losses, optimizers, schedules, gradients and others.

Each file contains one family. The base class of a family does everything except the mathematics. Examples in
docstrings assume `import graphopt, numpy, passes` and `from graphopt import models`.
"""

from graphopt.graph.simplify import Simplify
from graphopt.graph.unroll import Unroll
from graphopt.targets.onnxruntime.fuse import Fuse
from graphopt.targets.portable import Portable
from passes.accumulate import Accumulate
from passes.clipping import Clip, ClipGlobalNorm, ClipValue
from passes.diagnostics import GradientNorm, ReportGradients
from passes.differentiate import Differentiate
from passes.gradient_stops import StopGradient, stop_gradient
from passes.gradients import Gradient, GradientSource
from passes.gradients.registry import gradient
from passes.losses.classification import BinaryCrossEntropy, CrossEntropy, Hinge, KLDivergence
from passes.losses.combined import CustomLoss, Losses, OwnLoss
from passes.losses.loss import Elastic, Huber, Loss, MeanAbsoluteError, MeanSquaredError, Poisson, Quantile
from passes.losses.sequence import CTC
from passes.mixed_precision import DynamicLossScale, MixedPrecision
from passes.normalize import Normalize
from passes.optimizers import SGD, Adagrad, Adam, AdamW, Group, Lion, Optimizer, RMSprop
from passes.ort_gradient import OrtGradient
from passes.parameters import Parameters, Untie
from passes.parts.vector_jacobian import VectorJacobianProduct
from passes.recompute import Recompute
from passes.regularizers import L1, L2, ElasticPenalty, Regularizer
from passes.schedules import (
    Constant,
    Cosine,
    Exponential,
    InverseScaling,
    Linear,
    OneCycle,
    Optimal,
    Polynomial,
    Schedule,
    StepDecay,
)
from passes.sort_initializers import SortInitializers
from passes.standardize import Standardize
from passes.training_mode import TrainingMode
from passes.unroll_loops import UnrollLoops

__all__ = [
    "CTC",
    "Accumulate",
    "Adagrad",
    "Adam",
    "AdamW",
    "BinaryCrossEntropy",
    "Clip",
    "ClipGlobalNorm",
    "ClipValue",
    "Constant",
    "Cosine",
    "CrossEntropy",
    "CustomLoss",
    "Differentiate",
    "DynamicLossScale",
    "Elastic",
    "ElasticPenalty",
    "Exponential",
    "Fuse",
    "Gradient",
    "GradientNorm",
    "GradientSource",
    "Group",
    "Hinge",
    "Huber",
    "InverseScaling",
    "KLDivergence",
    "L1",
    "L2",
    "Linear",
    "Lion",
    "Loss",
    "Losses",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "MixedPrecision",
    "Normalize",
    "OneCycle",
    "Optimal",
    "Optimizer",
    "OrtGradient",
    "OwnLoss",
    "Parameters",
    "Poisson",
    "Polynomial",
    "Portable",
    "Quantile",
    "RMSprop",
    "Recompute",
    "Regularizer",
    "ReportGradients",
    "SGD",
    "Schedule",
    "Simplify",
    "SortInitializers",
    "Standardize",
    "StepDecay",
    "StopGradient",
    "TrainingMode",
    "Unroll",
    "UnrollLoops",
    "Untie",
    "VectorJacobianProduct",
    "gradient",
    "stop_gradient",
]

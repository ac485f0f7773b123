"""The library of passes: a file is a family, a family has one base class that owns the plumbing."""

from passes.clipping import Clip, ClipGlobalNorm, ClipValue
from passes.gradient import Gradient
from passes.losses import (
    BinaryCrossEntropy,
    CrossEntropy,
    CustomLoss,
    Elastic,
    Hinge,
    Huber,
    KLDivergence,
    Loss,
    Losses,
    MeanAbsoluteError,
    MeanSquaredError,
    Poisson,
    Quantile,
)
from passes.normalize import Normalize
from passes.optimizers import SGD, Adagrad, Adam, AdamW, Group, Lion, Optimizer, RMSprop
from passes.parameters import Parameters
from passes.regularizers import L1, L2, ElasticPenalty, Regularizer
from passes.renaming import SortInitializers
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
from passes.simplify import Simplify

__all__ = [
    "L1",
    "L2",
    "SGD",
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
    "Elastic",
    "ElasticPenalty",
    "Exponential",
    "Gradient",
    "Group",
    "Hinge",
    "Huber",
    "InverseScaling",
    "KLDivergence",
    "Linear",
    "Lion",
    "Loss",
    "Losses",
    "MeanAbsoluteError",
    "MeanSquaredError",
    "Normalize",
    "OneCycle",
    "Optimal",
    "Optimizer",
    "Parameters",
    "Poisson",
    "Polynomial",
    "Quantile",
    "RMSprop",
    "Regularizer",
    "Schedule",
    "Simplify",
    "SortInitializers",
    "StepDecay",
]

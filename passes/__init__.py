"""Provide the passes for graphopt's pipelines: losses, optimizers, schedules, gradients and others.

Each file contains one family. The base class of a family does everything except the mathematics. Examples in
docstrings assume `import graphopt, numpy, passes` and `from graphopt import models`.
"""

from typing import NoReturn as _NoReturn

from graphopt.arguments import no_attribute as _no_attribute
from graphopt.graph.simplify import Simplify as Simplify
from graphopt.graph.unroll import Unroll as Unroll
from graphopt.graph.weight_kinds import weight_kind as weight_kind
from graphopt.targets.onnxruntime.fuse import Fuse as Fuse
from graphopt.targets.portable import Portable as Portable
from passes.accumulate import Accumulate as Accumulate
from passes.adapters import *
from passes.augment import AugmentImages as AugmentImages
from passes.augment import MixUp as MixUp
from passes.averages import *
from passes.calibration import *
from passes.clipping import *
from passes.conformal import *
from passes.differentiate import Differentiate as Differentiate
from passes.differentiate import Hessian as Hessian
from passes.differentiate import HessianVector as HessianVector
from passes.differentiate import Jacobian as Jacobian
from passes.differentiate import StopGradient as StopGradient
from passes.differentiate import VectorJacobianProduct as VectorJacobianProduct
from passes.differentiate import stop_gradient as stop_gradient
from passes.example_gradients import *
from passes.explanations import *
from passes.gradients import Gradient as Gradient
from passes.gradients import GradientSource as GradientSource
from passes.gradients.registry import gradient as gradient
from passes.gradients.registry import surrogate as surrogate
from passes.losses.causal import *
from passes.losses.classification import *
from passes.losses.combined import *
from passes.losses.distillation import *
from passes.losses.loss import *
from passes.losses.pairs import *
from passes.losses.policy import *
from passes.losses.preference import *
from passes.low_rank import LowRank as LowRank
from passes.mixed_precision import DynamicLossScale as DynamicLossScale
from passes.mixed_precision import MixedPrecision as MixedPrecision
from passes.normalize import Normalize as Normalize
from passes.optimizers import *
from passes.ort_gradient import OrtGradient as OrtGradient
from passes.parameters import Parameters as Parameters
from passes.parameters import SortInitializers as SortInitializers
from passes.parameters import Untie as Untie
from passes.private import *
from passes.prune import Prune as Prune
from passes.quantization import *
from passes.recompute import Recompute as Recompute
from passes.regularizers import *
from passes.schedules import *
from passes.second_pass import *
from passes.standardize import Standardize as Standardize
from passes.training_mode import TrainingMode as TrainingMode
from passes.uncertainty import *
from passes.unroll_loops import UnrollLoops as UnrollLoops

# All but the submodules, which belong to no module themselves.
__all__ = [name for name, member in globals().items() if name[0] != "_" and hasattr(member, "__module__")]


def __getattr__(name: str) -> _NoReturn:
    raise _no_attribute(__name__, name, __all__)

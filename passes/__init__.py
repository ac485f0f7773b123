"""The library of passes: a file is a family, a family has one base class that owns the plumbing."""

from passes.gradient import Gradient
from passes.losses import Loss, MeanSquaredError
from passes.normalize import Normalize
from passes.optimizers import SGD, Group, Optimizer
from passes.parameters import Parameters
from passes.renaming import SortInitializers
from passes.simplify import Simplify

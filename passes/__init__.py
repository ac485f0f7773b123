"""The library of passes: a file is a family, a family has one base class that owns the plumbing."""

from passes.accumulate import *
from passes.clipping import *
from passes.diagnostics import *
from passes.differentiate import *
from passes.fusion import Fuse as Fuse
from passes.gradients import Gradient as Gradient
from passes.gradients import GradientSource as GradientSource
from passes.gradients.registry import gradient as gradient
from passes.losses import *
from passes.mixed_precision import *
from passes.normalize import *
from passes.optimizers import *
from passes.ort_gradient import *
from passes.parameters import *
from passes.recompute import *
from passes.regularizers import *
from passes.renaming import *
from passes.schedules import *
from passes.simplify import *
from passes.split import *
from passes.stop_gradient import *
from passes.training_mode import *
from passes.unroll import *

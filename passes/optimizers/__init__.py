"""Update parameters from their gradients."""

from passes.optimizers.adaptive import *
from passes.optimizers.descent import *
from passes.optimizers.optimizer import *
from passes.optimizers.structured import *

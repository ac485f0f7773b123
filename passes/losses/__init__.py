"""Losses: what a prediction costs, given its target.

A leaf of the base class is its mathematics, `compare(op, prediction, target)`.
"""

from passes.losses import classification, combined, own, regression
from passes.losses.classification import *
from passes.losses.combined import *
from passes.losses.loss import Loss
from passes.losses.own import *
from passes.losses.regression import *

__all__ = ["Loss"]
__all__ += classification.__all__
__all__ += combined.__all__
__all__ += own.__all__
__all__ += regression.__all__

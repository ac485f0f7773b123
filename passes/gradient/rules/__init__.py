"""The rules, a file a family; importing this package registers them all."""

from passes.gradient.rules import elementwise as elementwise
from passes.gradient.rules import linear as linear
from passes.gradient.rules import reduction as reduction

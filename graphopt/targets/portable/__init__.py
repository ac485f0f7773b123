"""Rewrite operators into forms that runtimes other than ONNX Runtime's CPU provider compute correctly."""

from graphopt.targets.portable.portable import FORMS as FORMS
from graphopt.targets.portable.portable import Portable as Portable
from graphopt.targets.portable.webgpu.integers import nodes_on_shapes as nodes_on_shapes

"""Compute matrix products in 16 bits, and keep parameters and precision-sensitive operators in 32 bits.

Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import GRADIENT_OF, ROLE
from graphopt.graph.operators import LAYOUT, PRODUCTS, takes
from graphopt.graph.rewriting import Pass, Pattern, matches, no_match, retire
from graphopt.graph.roles import STATE, Role, role_of, set_role, updated, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.state import LOSS_SCALE
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import constant_of, like, name_of, next_of
from graphopt.intervals import within

_WIDE = ir.DataType.FLOAT
_LARGEST_SCALE = 2.0**96  # by which rates can be divided without underflow

# The operators that run in 16 bits in addition to products. They move numbers or round each number once, and run in 16
# bits if all their floating inputs do. Operators whose gradient compares an input with the output, such as MaxPool, are
# missing: the CPU provider may round only one of the two.
FOLLOWING = LAYOUT | {
    *("Abs", "Add", "Clip", "Div", "Max", "Min", "Mul", "Neg", "Sub", "Where"),
    *("AveragePool", "Concat", "Dropout", "Gather", "Pad"),
    *("Elu", "Gelu", "HardSigmoid", "HardSwish", "LeakyRelu", "PRelu", "Relu", "Selu", "Sigmoid"),
    *("Softsign", "Tanh"),
}
NARROW = PRODUCTS | FOLLOWING


@dataclass(frozen=True)
class MixedPrecision(Pass):
    """Compute matrix products, convolutions and the operators between them in 16 bits. Run it before Gradient.

    Parameters, their gradients, slots, reductions, normalizations, Softmax, recurrent operators, bodies of If, Loop
    and Scan, the loss, and all inputs and outputs of the graph stay in float32. Evaluation, prediction and the trained
    model use float32 throughout. In float16 small gradients underflow: scale the loss with `Gradient(loss_scale=...)`
    and `DynamicLossScale`.

    Args:
        dtype: `float16`, or `bfloat16`, which has the range of float32. ONNX Runtime computes with it on CUDA, and the
            kernels of an executor do on CPUs.
        keep: shell-style patterns of the names of nodes to leave in float32, one or several.

    Raises:
        GraphoptError: `dtype` is another type, `keep` matches no node, the model already has gradients, or no operator
            can be cast.

    >>> steps = {"loss": passes.CrossEntropy(), "precision": passes.MixedPrecision("float16")}
    >>> step = graphopt.compile(models.mlp((4,), 3), **steps)
    >>> "FLOAT16" in {value.dtype.name for node in step.graph for value in node.outputs if value.dtype}
    True
    """

    dtype: Literal["float16", "bfloat16"] = "float16"
    keep: Pattern = None
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        nodes = list(model.graph)
        if self.keep and not any(matches(node.name, self.keep) for node in nodes):
            known = (node.name for node in nodes if node.op_type in PRODUCTS)
            raise no_match(f"MixedPrecision: keep={self.keep!r}", "node", known, "has")
        ensure_typed(model)
        narrow = _Narrow(model, ir.DataType[self.dtype.upper()])
        for node in nodes:
            if not matches(node.name, self.keep) and narrow.fits(node):
                narrow.cast(node)
        if not narrow.of:
            raise GraphoptError(
                f"MixedPrecision: expected {', '.join(sorted(PRODUCTS))} nodes of float32 that support {self.dtype} in "
                f"opset {model.opset_imports['']}, found none: leave precision out"
            )


class _Narrow:
    """Track the 16-bit copies of float32 values of a model."""

    def __init__(self, model: ir.Model, dtype: ir.DataType) -> None:
        self._model, self._dtype = model, dtype
        self._made: set[ir.Value] = set()
        self.of: dict[ir.Value, ir.Value] = {}

    def fits(self, node: ir.Node) -> bool:
        """Return whether a node can run in 16 bits, given the nodes before it."""
        if node.domain or subgraphs(node) or node.op_type not in NARROW:
            return False
        wide = [(i, x) for i, x in enumerate(node.inputs) if x is not None and x.dtype == _WIDE]
        version = self._model.opset_imports[""]
        if not wide or not all(takes(self._dtype, version, node, i) and self._holds(x) for i, x in wide):
            return False
        read = [x for _, x in wide if role_of(x) is not Role.PARAMETER and constant_of(x) is None]
        return node.op_type in PRODUCTS or (bool(read) and self._made.issuperset(read))

    def cast(self, node: ir.Node) -> None:
        """Run a node in 16 bits, and cast its results back for existing readers."""
        with Emitter(self._model) as op:
            for i, x in enumerate(node.inputs):
                if x is not None and x.dtype == _WIDE:
                    if x not in self.of:
                        self.of[x] = _cast(op, x, self._dtype)
                    node.replace_input_with(i, self.of[x])
            for y in [y for y in node.outputs if y.dtype == _WIDE]:
                y.type = ir.TensorType(self._dtype)
                wide = _cast(op, y, _WIDE)
                self.of[wide] = y
                self._made.add(wide)
                ir.convenience.replace_all_uses_with(y, wide, replace_graph_outputs=True)
                wide.producer().replace_input_with(0, y)  # type: ignore[union-attr]
                if wide.is_graph_output():
                    wide.name, y.name = y.name, f"{y.name}/{self._dtype.name.lower()}"
                    if (role := role_of(y)) is not None:
                        ROLE.remove(y)
                        set_role(wide, role)

    def _holds(self, x: ir.Value) -> bool:
        """Return whether the range of the 16-bit type covers a value, as far as its numbers are known."""
        numbers = constant_of(x)
        return numbers is None or bool(np.max(np.abs(numbers), initial=0) <= self._dtype.max)


def _cast(op: Emitter, x: ir.Value, dtype: ir.DataType) -> ir.Value:
    """Emit a cast that inference leaves out."""
    return InferenceForm(same_as=0).write(op.Cast(x, to=dtype))


@dataclass(frozen=True)
class DynamicLossScale(Pass):
    """Skip a step whose gradients overflow, and adapt the scale of the loss.

    If a gradient is not finite, or the scale is larger than 2**96, the step leaves all state unchanged and reduces the
    scale. After `interval` steps with finite gradients the scale grows, to 2**96 at most. The scale becomes state. Run
    the pass after the optimizer and the schedule, and before `Accumulate`.

    Args:
        growth: the factor of the scale after `interval` steps in which all gradients were finite.
        backoff: the factor of the scale after a step in which a gradient was not finite.
        interval: the number of steps with finite gradients after which the scale grows.

    Raises:
        GraphoptError: a factor is outside its interval, the loss has no scale, or the model has no optimizer.

    >>> steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    >>> scaled = {"gradient": passes.Gradient(loss_scale=1024.0), "loss_scale": passes.DynamicLossScale()}
    >>> executor = graphopt.Executor(graphopt.compile(models.linear((2,), 3), **steps, **scaled))
    >>> float(executor.state["loss_scale"])
    1024.0
    """

    growth: float = within("[1, inf)", 2.0)
    backoff: float = within("(0, 1)", 0.5)
    interval: int = within("[1, inf)", 2000)

    def requires(self, model: ir.Model) -> None:
        is_scaled = any(x.name == LOSS_SCALE for x in with_role(model, Role.HYPERPARAMETER))
        if not is_scaled or not updated(model):
            missing = "no optimizer" if is_scaled else "no scale"
            raise GraphoptError(
                f"DynamicLossScale: expected a scaled loss and an optimizer's update, found {missing}: set "
                f"gradient.loss_scale, and run the optimizer first"
            )
        if state.accumulators(model):
            raise GraphoptError("DynamicLossScale: expected it before Accumulate, found it after: run it first")

    def rewrite(self, model: ir.Model) -> None:
        scale = next(x for x in with_role(model, Role.HYPERPARAMETER) if x.name == LOSS_SCALE)
        gradients = [y for node in model.graph for y in node.outputs if GRADIENT_OF.read(y)]
        following = with_role(model, Role.NEXT)
        states = {next_of(x): x for x in with_role(model, *STATE)}
        with Emitter(model) as op:
            sums = [op.ReduceSum(op.Cast(gradient, to=_WIDE), keepdims=0) for gradient in gradients]
            is_invertible = op.LessOrEqual(scale, _LARGEST_SCALE)
            finite = op.And(op.Less(op.Abs(op.Sum(*sums)), math.inf), is_invertible)
            for y in following:
                x = states[name_of(y)]
                model.graph.outputs.remove(y)
                retire(model, y)
                if x.dtype == ir.DataType.BOOL:  # ONNX Runtime has no Where of them
                    kept = op.Or(op.And(finite, y), op.And(op.Not(finite), x))
                else:
                    kept = op.Where(finite, y, x)
                state.set_next(model, x, like(kept, x))
            steps = state.declare_slot(model, LOSS_SCALE, "steps", np.array(0, np.int64))
            done = op.Add(steps, 1)
            grows = op.GreaterOrEqual(done, self.interval)
            grown = op.Where(grows, op.Min(self.growth * scale, _LARGEST_SCALE), scale)
            state.set_next(model, set_role(scale, Role.SLOT), op.Where(finite, grown, self.backoff * scale))
            state.set_next(model, steps, op.Where(op.And(finite, op.Not(grows)), done, 0))

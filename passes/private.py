"""Train with differential privacy: clip the gradient of each example, add noise, and report norms of examples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import roles, state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import GRADIENT_OF, SURROGATE
from graphopt.graph.randomness import normal, uniform
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role, set_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.state import EXPECTED_ROWS, MAX_NORM, MULTIPLIER, NOISE_KEY, NORMS
from graphopt.graph.values import dims_of, like
from graphopt.intervals import within
from passes.clipping import Clip
from passes.gradients import GradientSource
from passes.gradients.examples import Examples

__all__ = ["ExampleNorms", "GaussianNoise", "PrivateGradient"]

_OF_PRIVACY = 2**31 + 7  # random numbers apart from those of training and explanations


@dataclass(frozen=True)
class PrivateGradient(GradientSource):
    """Clip the gradient of each example before they are added (Abadi et al. 2016, arXiv:1607.00133).

    The gradient is sum_n min(1, max_norm / |g_n|) g_n / rows, for the gradient g_n of an example by all parameters
    together, plus that of a penalty, which no example has a part in. `example_norms` reports the norms, which are not
    private. Without `GaussianNoise` nothing is private.

    Args:
        max_norm: the largest norm of an example's gradient.
        rows: the expected number of rows of a batch, by which the sum is divided; `fit` sets the hyperparameter
            `expected_rows` to its `batch_size`.
        scan: whether operators without a formula for gradients of examples run in a Scan over examples, which is slow.

    Raises:
        GraphoptError: the batch is static, rows depend on each other, or the loss is not a sum or a mean over rows.

    >>> steps = {"gradient": passes.PrivateGradient(1.0), "clip": passes.GaussianNoise(1.1)}
    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.5), **steps)
    >>> "example_norms" in [output.name for output in step.graph.outputs]
    True
    """

    max_norm: float = within("(0, inf)", 1.0)
    rows: int = within("[1, inf)", 32)
    scan: bool = True

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        ((loss, seed),) = seeds.items()
        examples = Examples(op, model, loss, wrt, seed, self.scan)
        for part in examples.parts:
            SURROGATE.mark(part)  # the gradient is not the slope of the loss
        squares = examples.squared_norms()
        norms = op.cast(op.Sqrt(squares) / op.cast(seed, squares.dtype), ir.DataType.FLOAT)
        report_norms(op, model, norms)
        bound = state.declare(model, MAX_NORM, np.array(self.max_norm, np.float32), Role.HYPERPARAMETER)
        rows = state.declare(model, EXPECTED_ROWS, np.array(self.rows, np.float32), Role.HYPERPARAMETER)
        factors = op.Min(bound / (norms + 1e-6), 1.0)
        finite = op.Less(norms, float(np.finfo(np.float32).max))  # false for NaN, too
        weights = op.Where(finite, factors, op.constant(0.0, like=factors)) / rows
        gradients = examples.combined(weights)
        for w, penalty in examples.of_penalty.items():
            gradients[w] = gradients[w] + penalty if w in gradients else penalty
        return gradients


@dataclass(frozen=True)
class GaussianNoise(Clip):
    """Add noise of the standard deviation multiplier * max_norm / expected_rows to the gradients of `PrivateGradient`.

    The noise comes from a hash of a counter that starts from the secret hyperparameter `noise_key`, two int32 numbers.
    `fit` draws them by the system's generator; a program that steps an executor itself feeds them, in the first step.
    Without them, as they are 0, no noise is secret: the new weights are not finite, which an executor refuses.
    The hash is not cryptographic, and the low bits of floating-point noise tell of what is added to (Mironov 2012,
    On significance of the least significant bits for differential privacy).

    Args:
        multiplier: the standard deviation as a multiple of `max_norm`; `graphopt.privacy.multiplier_for` computes it.

    Raises:
        GraphoptError: the gradients are not those of `PrivateGradient`, or others have changed them.

    >>> passes.GaussianNoise(multiplier=1.1)
    GaussianNoise(multiplier=1.1)
    """

    multiplier: float = within("[0, inf)", 1.0)

    def clip(self, op: Emitter, model: ir.Model, gradients: Sequence[ir.Value]) -> list[ir.Value]:
        inputs = {x.name: x for x in roles.with_role(model, Role.HYPERPARAMETER)}
        if MAX_NORM not in inputs:
            raise GraphoptError(
                "GaussianNoise: expected gradients of clipped examples, found others: set "
                "gradient=passes.PrivateGradient(max_norm)"
            )
        shapes = {w.name: w.shape.numpy() for w in roles.with_role(model, Role.PARAMETER) if w.shape is not None}
        if changed := [g.name for g in gradients if GRADIENT_OF.read(g) is None]:
            raise GraphoptError(
                f"GaussianNoise: expected the gradients of PrivateGradient as they are, found {changed[0]!r}, which "
                f"another pass has changed: put GaussianNoise first in clip"
            )
        multiplier = state.declare(model, MULTIPLIER, np.array(self.multiplier, np.float32), Role.HYPERPARAMETER)
        key = state.declare(model, NOISE_KEY, np.zeros(2, np.int32), Role.HYPERPARAMETER)
        is_keyed = op.ReduceSumSquare(op.cast(key, ir.DataType.FLOAT), keepdims=0) > 0
        scale = multiplier * inputs[MAX_NORM] / inputs[EXPECTED_ROWS] / op.cast(is_keyed, ir.DataType.FLOAT)
        noisy = []
        for number, gradient in enumerate(gradients):
            step = state.counter(model)
            shape = shapes[GRADIENT_OF.read(gradient)]  # that of the gradient may have unknown sizes
            count = math.prod(shape)
            half = op.constant(np.array([(count + 1) // 2]))
            pair = [uniform(op, half, step, _OF_PRIVACY, 2 * number + i, key) for i in (0, 1)]
            drawn = normal(op, pair.__getitem__, twice=True, scale=scale)
            drawn = op.Slice(drawn, [0], [count]) if count % 2 else drawn
            noise = op.cast(op.Reshape(drawn, [*shape]), gradient.dtype)
            noisy.append(gradient + like(noise, gradient))
        return noisy


@dataclass(frozen=True)
class ExampleNorms(Pass):
    """Report the norm of the gradient of each example as `example_norms`: large for hard and mislabelled rows.

    The gradient is that by the parameters that train; `graphopt.example_norms` takes all weights of a model.

    Args:
        scan: whether operators without a formula for gradients of examples run in a Scan over examples, which is slow.

    Raises:
        GraphoptError: as `PrivateGradient`.

    >>> steps = {"loss": passes.CrossEntropy(), "clip": passes.ExampleNorms(), "optimizer": passes.SGD(0.1)}
    >>> graphopt.Executor(graphopt.compile(models.mlp((4,), 3), **steps)).reported
    ('loss', 'y', 'example_norms')
    """

    scan: bool = True

    def rewrite(self, model: ir.Model) -> None:
        loss = roles.only(model, Role.LOSS, "ExampleNorms")
        ensure_typed(model)
        with Emitter(model) as op:
            examples = Examples(op, model, loss, roles.with_role(model, Role.PARAMETER), scan=self.scan)
            report_norms(op, model, op.Sqrt(examples.squared_norms()))


def report_norms(op: Emitter, model: ir.Model, norms: ir.Value) -> None:
    """Report the norms [n] of the gradients of examples."""
    state.check_free(model, NORMS)
    norms = op.Identity(norms, _outputs=[NORMS])
    batch = next(x for x in roles.with_role(model, *roles.FED) if x.shape is not None and len(x.shape))
    norms.shape = ir.Shape([dims_of(batch)[0]])
    model.graph.outputs.append(set_role(norms, Role.DIAGNOSTIC))

"""Run the model a second time in the same step: at weights or inputs near by, where the loss is larger."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import roles
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.rewriting import Pass, retire
from graphopt.graph.roles import Role, data_inputs
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import is_floating, like, name_of, redirect, wide_type
from graphopt.intervals import within
from passes.augment import trained_on
from passes.differentiate import again_from, stop_gradient
from passes.explanations import PGD
from passes.gradients import GradientSource
from passes.gradients.walk import backward, between

__all__ = ["AdversarialTraining", "SharpnessAware"]


@dataclass(frozen=True)
class SharpnessAware(GradientSource):
    """Differentiate the loss where it is largest near the parameters (SAM; Foret et al. 2021, arXiv:2010.01412).

    Emit the gradient g at the parameters w, the forward pass again at w + rho g / |g|, and the gradients there, which
    the optimizer applies to w. Norms are of all parameters together. A step costs two. Both passes have the same masks
    of Dropout, and running statistics follow the first one, as does the reported loss. With `passes.Accumulate` or
    several workers, each batch has a place of its own, as in the paper. `passes.Recompute` recomputes values of the
    first pass only.

    Args:
        rho: the distance of the second pass.
        adaptive: measure distances relative to each weight, w + rho w^2 g / |w g| (ASAM; Kwon et al. 2021,
            arXiv:2102.11600), so that the scales of weights do not count. A usual `rho` is 10 times as large.

    Raises:
        GraphoptError: as for `Gradient`.

    >>> steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1, momentum=0.9)}
    >>> step = graphopt.compile(models.mlp((4,), 3), gradient=passes.SharpnessAware(0.05), **steps)
    """

    rho: float = within("(0, inf)", 0.05)
    adaptive: bool = False
    is_slope = False

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        # Rules change what they differentiate, so that the second pass is emitted first.
        places = {w: like(op.Identity(w), w) for w in wrt}
        copies = again_from(op, model.graph, seeds, places)
        first = backward(op, model.graph, seeds, wrt)
        if not first:
            return {}
        scaled = {w: op.Abs(w) * g if self.adaptive else g for w, g in first.items()}
        squares = [op.ReduceSumSquare(op.cast(g, wide_type(g)), keepdims=0) for g in scaled.values()]
        common = max((square.dtype for square in squares), key=lambda dtype: dtype.itemsize)
        norm = op.Sqrt(op.Sum(*[op.cast(square, common) for square in squares]))
        scale = self.rho / (norm + 1e-12)
        for w, g in scaled.items():
            way = op.cast(op.cast(g, common) * scale, w.dtype)
            uses = list(places[w].uses())
            places[w] = like(w + (op.Abs(w) * way if self.adaptive else way), w)
            redirect(uses, places[w])
        model.graph.sort()
        second = backward(op, model.graph, {copies[y]: seed for y, seed in seeds.items()}, places.values())
        return {w: second[places[w]] for w in first}


@dataclass(frozen=True)
class AdversarialTraining(Pass):
    """Train on inputs that an attack has moved to a larger loss (Madry et al. 2018, arXiv:1706.06083).

    The loss becomes (1 - share) L(x) + share L(x + d), for the d with |d| <= epsilon that `steps` steps of signs of
    gradients find: one is FGSM (Goodfellow, Shlens, Szegedy 2015, arXiv:1412.6572), several are PGD. The weights'
    gradients do not pass through d. All passes have the same masks of Dropout; running statistics and predictions are
    those of x, and evaluation and the trained model have no attack. The step belongs after the loss, as `regularizer`.
    Before penalties: behind one, the reported `data_loss` and `penalty` are those of x, which do not sum to `loss`.

    Args:
        epsilon: the largest change of an element, in units of the input.
        steps: how many steps the attack has. Each costs a forward and a backward pass.
        size: how far each element moves in a step; by default, epsilon for one step, else 2.5 epsilon / steps.
        share: the share of the changed rows in the loss.
        low, high: the range that inputs have; None for no bound.
        input: the name of the input to change, if the model has several of floating-point numbers.

    Raises:
        GraphoptError: the model has no loss or has gradients already, the input is unknown or of integers, or the loss
            does not depend on it.

    >>> steps = {"loss": passes.CrossEntropy(), "regularizer": passes.AdversarialTraining(0.1, steps=3)}
    >>> step = graphopt.compile(models.mlp((4,), 3), optimizer=passes.SGD(0.1), **steps)
    """

    epsilon: float = within("(0, inf)", 0.03)
    steps: int = within("[1, 1000]", 1)
    size: float | None = within("(0, inf)", None)
    share: float = within("(0, 1]", 1.0)
    low: float | None = within("(-inf, inf)", None)
    high: float | None = within("(-inf, inf)", None)
    input: str | None = None
    changes_forward = True

    def __post_init__(self) -> None:
        super().__post_init__()
        self._attack()

    def _attack(self) -> PGD:
        size = self.size or (self.epsilon if self.steps == 1 else 2.5 * self.epsilon / self.steps)
        return PGD(self.epsilon, step=size, steps=self.steps, low=self.low, high=self.high)

    def requires(self, model: ir.Model) -> None:
        roles.only(model, Role.LOSS, type(self).__name__)
        self.precedes_gradient(model)

    def rewrite(self, model: ir.Model) -> None:
        loss = roles.only(model, Role.LOSS, type(self).__name__)
        ensure_typed(model)
        floating = [x for x in data_inputs(model) if is_floating(x)]
        inputs = [x for x in floating if self.input in (None, x.name)]
        if len(inputs) != 1:
            names = ", ".join(map(name_of, floating)) or "none"
            raise GraphoptError(
                f"AdversarialTraining(input={self.input!r}): expected the name of one floating-point input, the model "
                f"has {names}: set `input`"
            )
        x = trained_on(inputs[0])
        if not between(model.graph, [loss], [x]):
            raise GraphoptError(
                f"AdversarialTraining: the loss does not depend on {inputs[0].name!r} differentiably: set `input`"
            )
        with Emitter(model) as op:
            place = like(stop_gradient(op, self._attack().attack(op, model, x, loss)), x)
            moved = again_from(op, model.graph, [loss], {x: place})[loss]
            clean = loss if self.share < 1 else stop_gradient(op, loss)
            total = moved if self.share == 1 else (1 - self.share) * clean + self.share * moved
            position = list(model.graph.outputs).index(loss)
            model.graph.outputs.remove(loss)
            retire(model, loss)
            total = op.Where(op.constant(np.array(True)), total, clean, _outputs=["loss"])  # inference: clean
            InferenceForm(same_as=2).write(like(total, loss))
            model.graph.outputs.insert(position, roles.set_role(total, Role.LOSS))

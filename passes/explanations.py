"""Explain a prediction inside the file: where a class is seen, and which inputs would change it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph import state
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import ADDITIVE, remove_own
from graphopt.graph.operators import CONVOLUTIONS, VIEWS
from graphopt.graph.randomness import normal, uniform
from graphopt.graph.rewriting import Pass
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors, values_read
from graphopt.graph.values import dims_of, dtype_of, given, is_floating, like, name_of, rank
from graphopt.intervals import within
from passes.differentiate import elsewhere, floating_output, floating_value, of_embeddings, ones_like
from passes.gradients.rules.control_flow import scan_over
from passes.gradients.walk import backward, between, zeros
from passes.losses.loss import Loss

__all__ = ["FGSM", "PGD", "Explanation", "GradCAM", "IntegratedGradients", "Saliency", "SmoothGrad"]

CLASS = "class"  # the name of the input
_OF_NOISE = 2**31 + 3  # random numbers apart from those of training


@dataclass(frozen=True)
class Explanation(Pass):
    """Add an output `OUTPUT.explanation`, by which a prediction of class `class` is explained. A leaf emits it.

    `class`, int64 [N], is a new input: the class of each row to explain, or -1 for the predicted one. A number beyond
    the last class stands for the last one. An output of one number for each row has no such input.

    Args:
        input: the name of the input, or of another floating-point value, whose elements explain the prediction. By
            default, the only floating-point input. For tokens, it is the output of the embedding.
        output: the name of the output to explain: [N], [N, 1] or [N, classes]. By default, the only one of floats.

    Raises:
        GraphoptError: a name is unknown or that of integers, the output has another shape, or it does not depend on the
            input.

    >>> class GradientTimesInput(passes.Explanation):
    ...     def explain(self, op, model, x, y, seed):
    ...         return x * passes.Saliency().explain(op, model, x, y, seed)
    >>> graphopt.explain(models.linear((4,), 1), GradientTimesInput()).graph.outputs[1].name
    'y.explanation'
    """

    input: str | None = field(default=None, kw_only=True)
    output: str | None = field(default=None, kw_only=True)

    is_additive: ClassVar[bool] = False  # whether elements sum to a difference of outputs

    def explain(self, op: Emitter, model: ir.Model, x: ir.Value, y: ir.Value, seed: ir.Value) -> ir.Value:
        """Emit the explanation of the sum of `y` times `seed`, which chooses a class of each row."""
        raise NotImplementedError

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        x, y = self.values(model)
        name = f"{y.name}.explanation"
        state.check_free(model, name)
        with Emitter(model) as op:
            explanation = self.explain(op, model, x, y, self._seed(op, model, y))
            output = op.Identity(explanation, _outputs=[name])
            if self.is_additive:
                ADDITIVE.set(output)
            model.graph.outputs.append(output)

    def values(self, model: ir.Model) -> tuple[ir.Value, ir.Value]:
        """Return the value that explains, and the output."""
        y = floating_output(model, self.output, "output")
        inputs = [x for x in model.graph.inputs if is_floating(x) and not x.is_initializer()]
        if self.input is None and len(inputs) != 1:
            names = ", ".join(map(name_of, inputs)) or "none"
            instead = of_embeddings(model.graph.inputs) or ": name a value as input"
            raise GraphoptError(f"input: expected one floating-point input, found {names}{instead}")
        x = inputs[0] if self.input is None else floating_value(model, self.input, "input")
        if not between(model.graph, [y], [x]):
            raise GraphoptError(f"{y.name!r} does not depend on {x.name!r} differentiably: name another input")
        return x, y

    def _seed(self, op: Emitter, model: ir.Model, y: ir.Value) -> ir.Value:
        if dims_of(y)[1:] in ((), (1,)):
            return ones_like(op, y)
        if rank(y) != 2:
            raise GraphoptError(
                f"output: expected [N], [N, 1] or [N, classes], found {y.name!r} of shape {y.shape}: name another one"
            )
        state.check_free(model, CLASS)
        chosen = ir.Value(name=CLASS, type=ir.TensorType(ir.DataType.INT64), shape=ir.Shape(dims_of(y)[:1]))
        model.graph.inputs.append(chosen)
        number = op.shape_of(y, 1)
        known = op.Where(op.Less(chosen, 0), op.ArgMax(y, axis=1, keepdims=0), op.Min(chosen, number - 1))
        chosen = op.OneHot(known, number, op.constant(np.array([0, 1], np.float32)))
        return like(op.cast(chosen, y.dtype), y)


def _gradient(op: Emitter, graph: ir.Graph, y: ir.Value, seed: ir.Value, x: ir.Value) -> ir.Value:
    found = backward(op, graph, {y: seed}, [x])
    return found[x] if x in found else zeros(op, x)


def _nodes(model: ir.Model, y: ir.Value) -> list[ir.Node]:
    """Return the nodes that compute `y`, in order, but sizes, which are the same elsewhere."""
    needed = ancestors([y])
    return [node for node in model.graph if node in needed and node.op_type not in ("Shape", "Size")]


def _gradient_at(
    op: Emitter, nodes: Sequence[ir.Node], x: ir.Value, place: ir.Value, y: ir.Value, seed: ir.Value
) -> ir.Value:
    """Emit the nodes again at another place, and the gradient there, in the body of a loop."""
    place = like(op.Identity(place), x)
    return _gradient(op, op.graph, elsewhere(op, nodes, {x: place})[y], seed, place)


@dataclass(frozen=True)
class Saliency(Explanation):
    """Explain by the gradient of the class by the input (Simonyan, Vedaldi, Zisserman 2014, arXiv:1312.6034).

    Args:
        absolute: return absolute values.

    >>> explained = graphopt.explain(models.mlp((4,), 3), passes.Saliency())
    >>> [value.name for value in (*explained.graph.inputs, *explained.graph.outputs)]
    ['x', 'class', 'y', 'y.explanation']
    """

    absolute: bool = False

    def explain(self, op: Emitter, model: ir.Model, x: ir.Value, y: ir.Value, seed: ir.Value) -> ir.Value:
        gradient = _gradient(op, model.graph, y, seed, x)
        return op.Abs(gradient) if self.absolute else gradient


@dataclass(frozen=True)
class SmoothGrad(Explanation):
    """Explain by the mean of gradients at noisy inputs (Smilkov et al. 2017, arXiv:1706.03825).

    The noise is normal (Box and Muller 1958), from a counter, so that it is the same on every runtime and in each call.

    Args:
        samples: how many noisy inputs.
        std: the standard deviation of the noise, in units of the input.
        seed: the seed of the noise.

    >>> explained = graphopt.explain(models.mlp((4,), 3), passes.SmoothGrad(samples=8))
    """

    samples: int = within("[1, inf)", 25)
    std: float = within("[0, inf)", 0.1)
    seed: int = within("[0, inf)", 0)

    def explain(self, op: Emitter, model: ir.Model, x: ir.Value, y: ir.Value, seed: ir.Value) -> ir.Value:
        nodes = _nodes(model, y)

        def turn(op: Emitter, total: list[ir.Value], numbers: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            noise = normal(op, lambda i: uniform(op, op.shape_of(x), numbers[0], self.seed, _OF_NOISE + i))
            place = x + self.std * op.cast(noise, x.dtype)
            return [total[0] + _gradient_at(op, nodes, x, place, y, seed)], []

        (total,) = scan_over(op, turn, [zeros(op, x)], [op.constant(np.arange(self.samples))])
        return total / self.samples


@dataclass(frozen=True)
class IntegratedGradients(Explanation):
    """Explain by the gradients on the way from a baseline (Sundararajan, Taly, Yan 2017, arXiv:1703.01365).

    The integral is a sum by Gauss and Legendre, in a Scan: memory does not depend on `steps`. The sum over the elements
    of an explanation approaches the difference of the outputs at the input and at the baseline.

    Args:
        steps: the number of places on the way.
        baseline: the number that all elements of the baseline have.

    >>> explained = graphopt.explain(models.mlp((4,), 3), passes.IntegratedGradients(steps=20))
    """

    steps: int = within("[1, 10000]", 50)
    baseline: float = within("(-inf, inf)", 0.0)

    is_additive = True

    def explain(self, op: Emitter, model: ir.Model, x: ir.Value, y: ir.Value, seed: ir.Value) -> ir.Value:
        nodes, way = _nodes(model, y), x - self.baseline
        places, weights = np.polynomial.legendre.leggauss(self.steps)
        sequences = [op.constant((1 + places) / 2, like=x), op.constant(weights / 2, like=x)]

        def turn(op: Emitter, total: list[ir.Value], at: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            gradient = _gradient_at(op, nodes, x, self.baseline + at[0] * way, y, seed)
            return [total[0] + at[1] * gradient], []

        (mean,) = scan_over(op, turn, [zeros(op, x)], sequences)
        return way * mean


@dataclass(frozen=True)
class GradCAM(Explanation):
    """Explain by the activations of a layer, weighted by mean gradients (Selvaraju et al. 2017, arXiv:1610.02391).

    The map is relu(sum over channels of A mean(G)): [N, 1, H, W], or [N, places] for tokens and sequences.

    Args:
        layer: the name of a value [N, C, H, W], [N, C, L] or [N, tokens, C]. By default, the last one of a
            convolution before the spatial mean; for transformers, the LayerNormalization before the last attention.
        resize: interpolate the map of an image to the height and width of the input, linearly.
        normalize: scale each map to [0, 1].

    Raises:
        GraphoptError: no layer has such a shape; the nearest by name are named.

    >>> explained = graphopt.explain(models.cnn((1, 8, 8), 3), passes.GradCAM())
    """

    layer: str | None = None
    resize: bool = True
    normalize: bool = False

    def explain(self, op: Emitter, model: ir.Model, x: ir.Value, y: ir.Value, seed: ir.Value) -> ir.Value:
        a = self._layer(model, x, y)
        gradient = _gradient(op, model.graph, y, seed, a)
        of_tokens = rank(a) == 3 and a not in _of_convolutions(model.graph)
        weights = op.ReduceMean(gradient, [1] if of_tokens else [*range(2, rank(a))], keepdims=1)
        image = op.Relu(op.ReduceSum(a * weights, [2] if of_tokens else [1], keepdims=int(rank(a) == 4)))
        axes = [*range(1, rank(image))]
        if self.resize and rank(a) == rank(x) == 4:
            sizes = op.shape_of(x, 1, 3) if _is_channels_last(x) else op.shape_of(x, 2)
            sizes = op.Concat(op.shape_of(image, 0, 2), sizes, axis=0)
            image = op.Resize(image, None, None, sizes, mode="linear")
        if self.normalize:
            image = image - op.ReduceMin(image, axes, keepdims=1)
            image = image / (op.ReduceMax(image, axes, keepdims=1) + 1e-7)
        return image

    def _layer(self, model: ir.Model, x: ir.Value, y: ir.Value) -> ir.Value:
        on_path = [z for node in between(model.graph, [y], [x]) for z in node.outputs if is_floating(z)]
        fitting = [z for z in on_path if z.shape is not None and rank(z) in (3, 4)]
        if self.layer is not None:
            a = floating_value(model, self.layer, "layer")
            if a not in fitting:
                names = ", ".join(name_of(z) for z in fitting[-3:]) or "none"
                raise GraphoptError(
                    f"layer: expected a value [N, C, H, W] or [N, tokens, C] between input and output, found "
                    f"{a.name!r} of shape {a.shape}: the last ones are {names}"
                )
            return a
        images = _of_convolutions(model.graph)
        layers = [z for z in fitting if z in images and {*dims_of(z)[2:]} != {1}]
        layers += _before_attention(on_path)
        if not layers:
            raise GraphoptError(
                "layer: expected a value [N, C, H, W], or an attention after a LayerNormalization, found none: "
                "passes.IntegratedGradients explains every network"
            )
        return layers[-1]


def _of_convolutions(graph: ir.Graph) -> set[ir.Value]:
    """Return the values [N, C, ...] that convolutions compute, and what follows them place by place."""
    found: set[ir.Value] = set()
    for node in graph:
        follows = node.op_type not in VIEWS | {"MatMul", "Transpose"} and not found.isdisjoint(values_read(node))
        if node.op_type in CONVOLUTIONS or follows:
            found.update(node.outputs)
    return found


def _is_channels_last(x: ir.Value) -> bool:
    """Return whether the first thing that happens to images [N, H, W, C] is that channels move to the front."""
    perms = [node.attributes.get_ints("perm", ()) for node in x.consumers() if node.op_type == "Transpose"]
    return bool(perms) and all(tuple(perm) == (0, 3, 1, 2) for perm in perms)


def _before_attention(values: Sequence[ir.Value]) -> Iterator[ir.Value]:
    """Yield the outputs [N, tokens, C] of LayerNormalizations before the last attention."""
    nodes = [(z, node) for z in values if (node := z.producer()) is not None]
    scores = [given(node.inputs[0]) for z, node in nodes if node.op_type == "Softmax" and rank(z) > 2]
    before = ancestors(scores[-1:])
    for z, node in nodes:
        if node in before and node.op_type == "LayerNormalization" and rank(z) == 3:
            yield z


@dataclass(frozen=True)
class _Attack(Explanation):
    """Add an output `X.adversarial`, an input near X with a larger loss, and the input `target` of the loss.

    Args:
        epsilon: the largest change of an element.
        loss: the loss to increase, such as `passes.CrossEntropy()`.
    """

    epsilon: float = within("(0, inf)", 0.03)
    loss: Loss | None = None

    def attack(self, op: Emitter, model: ir.Model, x: ir.Value, loss: ir.Value) -> ir.Value:
        """Emit the changed input."""
        raise NotImplementedError

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        x, _ = self.values(model)
        if not isinstance(self.loss, Loss):
            raise GraphoptError(
                f"{type(self).__name__}: expected a loss, as loss=passes.CrossEntropy(), found {kind_of(self.loss)}"
            )
        name = f"{x.name}.adversarial"
        state.check_free(model, name)
        with Emitter(model) as op:
            own = {*model.graph.inputs}
            adversarial = self.attack(op, model, x, self.loss.term(model, op))
            for target in {*model.graph.inputs} - own:
                remove_own(target)  # what training reads
            model.graph.outputs.append(op.Identity(like(adversarial, x), _outputs=[name]))


@dataclass(frozen=True)
class FGSM(_Attack):
    """Move each element by epsilon to a larger loss (Goodfellow, Shlens, Szegedy 2015, arXiv:1412.6572).

    An element whose gradient is less than 1e-6 of the largest one of its row stays: its sign is rounding.

    >>> attacked = graphopt.explain(models.mlp((4,), 3), passes.FGSM(0.1, passes.CrossEntropy()))
    >>> [value.name for value in (*attacked.graph.inputs, *attacked.graph.outputs)]
    ['x', 'target', 'y', 'x.adversarial']
    """

    def attack(self, op: Emitter, model: ir.Model, x: ir.Value, loss: ir.Value) -> ir.Value:
        gradient = _gradient(op, model.graph, loss, ones_like(op, loss), x)
        size = op.Abs(gradient)
        largest = op.ReduceMax(size, [*range(1, rank(x))], keepdims=1)
        is_sure = op.Cast(size > 1e-6 * largest, to=dtype_of(x))
        return x + self.epsilon * op.Sign(gradient) * is_sure


@dataclass(frozen=True)
class PGD(_Attack):
    """Move to a larger loss in steps, within epsilon of the input (Madry et al. 2018, arXiv:1706.06083).

    Args:
        step: how far each element moves in a step.
        steps: the number of steps.
        low, high: the range that inputs have; None for no bound.

    >>> attacked = graphopt.explain(models.mlp((4,), 3), passes.PGD(0.1, passes.CrossEntropy(), step=0.03, steps=7))
    """

    step: float = within("(0, inf)", 0.01)
    steps: int = within("[1, 10000]", 10)
    low: float | None = within("(-inf, inf)", None)
    high: float | None = within("(-inf, inf)", None)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.low is not None and self.high is not None and self.low >= self.high:
            raise GraphoptError(f"PGD: expected low < high, found {self.low} and {self.high}")

    def attack(self, op: Emitter, model: ir.Model, x: ir.Value, loss: ir.Value) -> ir.Value:
        def moved(op: Emitter, at: ir.Value, gradient: ir.Value) -> ir.Value:
            inside = op.Max(op.Min(at + self.step * op.Sign(gradient), x + self.epsilon), x - self.epsilon)
            inside = inside if self.low is None else op.Max(inside, self.low)
            return inside if self.high is None else op.Min(inside, self.high)

        nodes, seed = _nodes(model, loss), ones_like(op, loss)
        first = moved(op, x, _gradient(op, model.graph, loss, seed, x))
        if self.steps == 1:
            return first

        def turn(op: Emitter, at: list[ir.Value], _: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            return [moved(op, at[0], _gradient_at(op, nodes, x, at[0], loss, seed))], []

        (adversarial,) = scan_over(op, turn, [first], [op.constant(np.zeros(self.steps - 1, np.int64))])
        return adversarial

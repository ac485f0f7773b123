"""Say how sure a prediction is, inside the file: by other weights that fit as well, by dropout, by several models."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import constant_of, dtype_of, given, like, may_be_alike, name_of, rank
from graphopt.intervals import within
from passes.calibration import OfClasses, OnRows, Scores, wide
from passes.gradients.rules.control_flow import scan_over
from passes.gradients.walk import zeros
from passes.losses.frozen import put_in
from passes.normalize import Normalize
from passes.training_mode import drop, ratio_of

__all__ = ["Ensemble", "LastLayerLaplace", "MonteCarloDropout"]

_OF_MASKS = 2**31 + 1024  # random numbers apart from those of training, and of explanations
_MOST_WEIGHTS = 8192  # of a matrix that is solved


@dataclass(frozen=True)
class LastLayerLaplace(OfClasses):
    """Add the variance of each output, by the weights of the last layer that fit the rows that trained nearly as well.

    The posterior of these weights is a normal distribution around them, whose precision is the generalized Gauss-Newton
    matrix, a sum over the rows, plus that of the prior (Daxberger et al. 2021, arXiv:2106.14806). `OUTPUT.variance`
    is that of the output, linear in the weights. Classes get `probability`, softmax(y / sqrt(1 + pi variance / 8))
    (MacKay 1992).

    Args:
        prior_precision: the precision of the prior; `marginal` takes the one under which the rows are most likely, by
            MacKay's fixed point.
        structure: what of the matrix is kept: `full`; `kron`, a product of a matrix of features and one of outputs; or
            `diag`. With F features, `full` adds about the cost of one layer of F outputs for each output of
            the model, and `kron` that of one such layer, unless `rank` is less.
        rank: the number of directions of features that are kept, those of the smallest posterior variance; `full` keeps
            so many for each output. The others get the mean of their variances. None keeps all.
        task: `classification` or `regression`.
        noise: the variance of a regression's targets around the prediction.
        factors: R, M and m, by which the variances are (x R)^2 M + m for features x, with a 1 for the bias of `full`;
            before m, the mean variance of the directions that R leaves out. For `diag`, D and m: x^2 D + m. None learns
            them.

    Raises:
        GraphoptError: the output does not come out of one Gemm with a constant weight, or the layer is too large.

    >>> digits = graphopt.data.digits()
    >>> unsure = graphopt.calibrate(models.mlp((1, 8, 8), 10, hidden=[16]), digits, passes.LastLayerLaplace())
    >>> [output.name for output in unsure.graph.outputs]
    ['y', 'y.variance', 'probability']
    """

    prior_precision: float | Literal["marginal"] = within("(0, inf)", "marginal", choices=("marginal",))
    structure: Literal["full", "kron", "diag"] = "full"
    task: Literal["classification", "regression"] = "classification"
    noise: float = within("(0, inf)", 1.0)
    rank: int | None = within("[1, inf)", None)
    factors: tuple[np.ndarray, ...] | None = field(default=None, repr=False, compare=False)

    learnt_as: ClassVar[str] = "factors"

    def learn(self, model: ir.Model, on_rows: OnRows) -> LastLayerLaplace:
        if self.rank is not None and self.structure == "diag":
            raise self.wrong("rank: expected structure full or kron, found diag: leave rank out")
        y, read, weight, features = self._layer(model)
        x, z, _ = on_rows(read, y)
        x = np.concatenate([x, np.ones((len(x), len(weight) - x.shape[1]))], axis=1)
        return replace(self, factors=self._factors(x, self._curvature(z.reshape(len(z), -1)), weight, features))

    def _curvature(self, z: np.ndarray) -> np.ndarray:
        """Return the second derivatives of the loss of each row by its outputs, [N, outputs, outputs]."""
        if self.task == "regression":
            return np.broadcast_to(np.eye(z.shape[1]) / self.noise, (*z.shape, z.shape[1]))
        if z.shape[1] == 1:
            p = 0.5 * (1 + np.tanh(0.5 * z))
            return (p * (1 - p))[:, :, None]
        p = np.exp(z - z.max(1, keepdims=True))
        p /= p.sum(1, keepdims=True)
        return p[:, :, None] * (np.eye(p.shape[1]) - p[:, None, :])

    def _factors(
        self, x: np.ndarray, curvature: np.ndarray, weight: np.ndarray, features: int
    ) -> tuple[np.ndarray, ...]:
        """Return the factors of the variances; a bias is an input of 1, the last, beside so many features."""
        (rows, inputs), outputs = x.shape, curvature.shape[1]
        if self.structure == "diag":
            sums = np.einsum("ncc,nd->dc", curvature, x * x)
            variances = 1 / (sums + self._prior(sums, weight))
            return variances[:features], variances[features:].sum(0)
        if self.structure == "full":
            by_pair = [[(x * pair[:, None]).T @ x for pair in of_output] for of_output in curvature.T]
            precision, vectors = np.linalg.eigh(np.block(by_pair))
            vectors, precision = vectors.reshape(outputs, inputs, -1), precision.clip(0)
            covariance = vectors / (precision + self._prior(precision, weight)) @ vectors.swapaxes(1, 2)
            variances, axes = np.linalg.eigh(covariance)  # of each output, the smallest first
            count = min(self.rank or inputs, inputs)
            mean = variances[:, count:].sum(1) / max(inputs - count, 1)
            axes = axes[..., :count].transpose(1, 0, 2).reshape(inputs, -1)
            weights = np.repeat(np.eye(outputs), count, axis=0) * variances[:, :count].reshape(-1, 1)
            moves, bias = (axes, weights), np.zeros(outputs)
        else:  # features and the bias have factors of their own, as KFAC of a linear layer has
            left, u = np.linalg.eigh(curvature.sum(0))
            right, v = np.linalg.eigh(x[:, :features].T @ x[:, :features] / rows)
            right = np.append(right[::-1].clip(0), np.ones(inputs - features))
            precision = np.outer(right, left.clip(0))
            variances = 1 / (precision + self._prior(precision, weight)) @ np.square(u).T
            count = min(self.rank or features, features)
            mean = variances[count:features].sum(0) / max(features - count, 1)
            moves = v[:, ::-1][:, :count], variances[:count]
            bias = variances[features:].sum(0)
        return (*moves, *([mean] if mean.any() else []), bias)

    def _prior(self, precision: np.ndarray, weight: np.ndarray) -> float:
        """Return the precision of the prior, for the eigenvalues of the matrix (MacKay 1992, equation 4.9)."""
        if self.prior_precision != "marginal":
            return float(self.prior_precision)
        found, square = 1.0, float(np.square(weight).sum())
        if not square:
            raise self.wrong(
                "prior_precision='marginal': expected last weights other than 0, found all 0: train the model, or name "
                "a number"
            )
        for _ in range(1000):
            found, last = float((precision / (precision + found)).sum()) / square, found
            if abs(found - last) <= 1e-9 * found:
                break
        return max(found, 1e-12)

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        logits, x, weight, features = self._layer(model)
        found, outputs = [np.shape(factor) for factor in self.factors or ()], weight.shape[1]
        is_full = self.structure == "full"
        groups, inputs = (outputs, len(weight)) if is_full else (1, features)  # of directions
        count = found[0][1] // groups if found and len(found[0]) == 2 else inputs
        due = [(features, outputs), (outputs,)]
        if self.structure != "diag":
            due = [(inputs, groups * count), (groups * count, outputs), *[(outputs,)] * (2 if len(found) == 4 else 1)]
        if found != due:
            raise self.wrong(f"factors: expected arrays of shapes {due}, found {found}")
        y, x, logits = self.own_output(model), wide(op, x), wide(op, logits)
        first, *weights, added = map(np.asarray, self.factors or ())
        if is_full and len(weights) > 1:  # a difference to all of x^2, which would cancel in float32
            x, (kept, mean) = op.Cast(x, to=ir.DataType.DOUBLE), weights
            weights[0], added = np.where(kept, kept - mean, 0.0), added + (inputs - features) * mean
        numbers = functools.partial(self.number, model, f"{y.name}.laplace", like=x)
        if not weights:
            variance = op.Gemm(x * x, numbers(first), numbers(added))
        else:
            directions = numbers(first[:features])
            moved = op.Gemm(x, directions, *map(numbers, first[features:]))
            variance = op.Gemm(moved * moved, numbers(weights[0]), numbers(added))
            for mean in weights[1:]:
                rest = x if is_full else op.Gemm(moved, directions, x, alpha=-1.0, transB=1)
                variance = op.Gemm(op.ReduceSumSquare(rest, [1]), numbers(mean[None]), variance)
            variance = op.cast(variance, logits.dtype)
        if self.task == "regression":
            return y, {"variance": variance}
        scaled = like(logits / op.Sqrt(1 + (np.pi / 8) * variance), logits)
        return y, {"variance": variance, "probability": Scores(scaled, scaled, None).emit_probabilities(op)}

    def _layer(self, model: ir.Model) -> tuple[ir.Value, ir.Value, np.ndarray, int]:
        """Return the last layer's output, what it reads, its weight with the bias as last row, and its features."""
        y = self.own_output(model)
        if self.task == "classification":
            y = self.scores(model).logits or y
        node, bias, weight = y.producer(), None, None
        if node is not None and node.op_type == "Add":
            first, second = sorted(map(given, node.inputs), key=lambda x: constant_of(x) is not None)
            bias, node = constant_of(second), first.producer()
            if bias is None:
                raise self.wrong(f"expected {name_of(y)!r} to come out of one layer, found a sum of two values")
        kind = None if node is None else node.op_type
        if node is not None and kind in ("Gemm", "MatMul"):
            weight, *biases = map(constant_of, node.inputs[1:])
            bias = biases[0] if biases else bias
            turns_x, turned = (node.attributes.get_int(name, 0) for name in ("transA", "transB"))
            is_scaled = any(node.attributes.get_float(name, 1.0) != 1 for name in ("alpha", "beta"))
            weight = None if turns_x or is_scaled else weight
            weight = weight.T if weight is not None and turned else weight
        if node is None or weight is None or (weight.ndim, rank(y)) != (2, 2):
            raise self.wrong(
                f"expected {name_of(y)!r} to come out of a Gemm or MatMul with a constant weight [F, C], found "
                f"{kind or 'none'}: name an output of such a layer"
            )
        features, outputs = weight.shape
        inputs = features + (bias is not None)
        if bias is not None and bias.size not in (1, outputs):
            raise self.wrong(
                f"expected a bias of {outputs} numbers before {name_of(y)!r}, found one of shape {bias.shape}: name an "
                "output of a plain layer"
            )
        solved = {"full": inputs * outputs, "kron": max(features, outputs), "diag": 0}[self.structure]
        if solved > _MOST_WEIGHTS:
            raise self.wrong(
                f"expected at most {_MOST_WEIGHTS} weights for structure={self.structure!r}, found {solved}: take "
                "'kron' or 'diag'"
            )
        if bias is not None:
            weight = np.concatenate([weight, np.broadcast_to(bias.reshape(1, -1), (1, outputs))])
        return y, given(node.inputs[0]), weight, features


@dataclass(frozen=True)
class _Samples(OfClasses):
    """Add outputs `OUTPUT.mean` and `OUTPUT.variance` over several predictions, and for classes two more.

    `probability` is the mean of the probabilities, and `OUTPUT.mutual_information` the entropy of this mean minus the
    mean entropy (Depeweg et al. 2018), in nats: what is unsure because the predictions differ. The variance divides by
    the number of predictions.

    Args:
        task: `classification` or `regression`.
    """

    task: Literal["classification", "regression"] = field(default="classification", kw_only=True)

    def emit(self, op: Emitter, model: ir.Model) -> tuple[ir.Value, dict[str, ir.Value]]:
        y = self.own_output(model)
        scores = self.scores(model) if self.task == "classification" else None
        count, sums = self.sums(op, model, y, scores)
        distance, square, *rates = (total / count for total in sums)
        found = {"mean": wide(op, y) + distance, "variance": op.Max(square - distance * distance, 0.0)}  # rounding
        if rates:
            found |= {"probability": rates[0], "mutual_information": op.Max(_entropy(op, rates[0]) - rates[1], 0.0)}
        return y, found

    def sums(self, op: Emitter, model: ir.Model, y: ir.Value, scores: Scores | None) -> tuple[float, list[ir.Value]]:
        """Return the number of predictions, and the sums of what `terms` emits for each."""
        raise NotImplementedError


def _terms(op: Emitter, sample: ir.Value, y: ir.Value, scores: Scores | None) -> list[ir.Value]:
    """Emit the distance of a prediction from `y`, its square, the probabilities and their entropy."""
    distance = wide(op, sample) - wide(op, y)
    found = [distance, distance * distance]
    if scores is not None:
        other = replace(scores, output=sample, logits=sample if scores.logits is scores.output else None)
        p = other.emit_probabilities(op)
        found += [p, _entropy(op, p)]
    return found


def _entropy(op: Emitter, p: ir.Value) -> ir.Value:
    return -op.ReduceSum(p * op.Log(op.Max(p, float(np.finfo(dtype_of(p).numpy()).tiny))), [1], keepdims=0)


@dataclass(frozen=True)
class MonteCarloDropout(_Samples):
    """Predict several times with Dropout, in a Scan (Gal, Ghahramani 2016, arXiv:1506.02142).

    Masks are those of `passes.TrainingMode`: from a counter, so that they are the same on every runtime and in each
    call, differ between predictions, and memory does not grow with their number.

    Args:
        samples: the number of predictions.
        seed: the seed of the masks.

    Raises:
        GraphoptError: the model has no Dropout before the output, or one without a constant ratio.

    >>> import onnx
    >>> text = 'g (float[N,8] x) => (float[N,8] y) { y = Dropout(x) }'
    >>> file = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 21]> {text}')
    >>> unsure = graphopt.explain(file, passes.MonteCarloDropout(50))
    >>> [output.name for output in unsure.graph.outputs]
    ['y', 'y.mean', 'y.variance', 'probability', 'y.mutual_information']
    """

    samples: int = within("[1, 1000000]", 50)
    seed: int = within("[0, inf)", 0)

    def sums(self, op: Emitter, model: ir.Model, y: ir.Value, scores: Scores | None) -> tuple[float, list[ir.Value]]:
        needed = ancestors([y])
        nodes = [node for node in model.graph if node in needed]
        if not any(_is_dropout(node) for node in nodes):
            raise self.wrong(
                f"expected Dropout before {y.name!r}, found none: export the model with its "
                "Dropout, in training mode, or take passes.Ensemble"
            )

        def turn(op: Emitter, totals: list[ir.Value], at: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            copies: dict[ir.Value, ir.Value] = {}
            for number, node in enumerate(nodes):
                if _is_dropout(node):
                    x = given(node.inputs[0])
                    x = copies.get(x, x)
                    dropped, _ = drop(op, x, ratio_of(node), at[0], self.seed, _OF_MASKS + number)
                    copies[node.outputs[0]] = like(dropped, node.outputs[0])
                else:
                    copies |= again(op, [node], copies)
            terms = _terms(op, copies[y], y, scores)
            return [total + term for total, term in zip(totals, terms, strict=True)], []

        states = [zeros(op, term) for term in _terms(op, y, y, scores)]
        return float(self.samples), scan_over(op, turn, states, [op.constant(np.arange(self.samples))])


def _is_dropout(node: ir.Node) -> bool:
    return (node.domain, node.op_type) == ("", "Dropout")


@dataclass(frozen=True)
class Ensemble(_Samples):
    """Predict with several models beside each other (Lakshminarayanan, Pritzel, Blundell 2017, arXiv:1612.01474).

    Args:
        members: the files of the other models, whose inputs, outputs and opset are those of the model.

    Raises:
        GraphoptError: a file has other inputs, or an output of another name, type or shape.

    >>> unsure = graphopt.explain(models.mlp((4,), 3), passes.Ensemble([models.mlp((4,), 3, seed=1)]))
    >>> found = graphopt.run(unsure, {"x": numpy.ones((2, 4), numpy.float32)})
    >>> found["y.variance"].shape, found["probability"].sum(1).round(5).tolist()
    ((2, 3), [1.0, 1.0])
    """

    members: Sequence[Source]

    def __post_init__(self) -> None:
        super().__post_init__()
        if not isinstance(self.members, list | tuple) or not self.members:
            raise GraphoptError(
                f"Ensemble: expected a list of one other model or more, found "
                f"{kind_of(self.members) if self.members else 'none'}: write passes.Ensemble([model])"
            )

    def sums(self, op: Emitter, model: ir.Model, y: ir.Value, scores: Scores | None) -> tuple[float, list[ir.Value]]:
        sums = _terms(op, y, y, scores)
        inputs = {name_of(x): x for x in model.graph.inputs if not x.is_initializer()}
        for number, member in enumerate(self.members, 1):
            other = load(member)
            Normalize().apply(other)
            ensure_typed(other)
            for x in other.graph.inputs:
                if not x.is_initializer() and not _fits(x, inputs.get(name_of(x))):
                    raise self.wrong(
                        f"member {number}: expected the inputs {', '.join(inputs)} of the model, found {x.name!r}, "
                        f"{x.dtype}{x.shape}"
                    )
            own = next((z for z in other.graph.outputs if z.name == y.name), None)
            if own is None or not _fits(own, y):
                found = ", ".join(f"{z.name!r} {z.dtype}{z.shape}" for z in other.graph.outputs)
                raise self.wrong(f"member {number}: expected an output {y.name!r} {y.dtype}{y.shape}, found {found}")
            other.graph.outputs[:] = [own]
            (sample,) = put_in(model, other, inputs, f"member{number}")
            terms = _terms(op, sample, y, scores)
            sums = [total + term for total, term in zip(sums, terms, strict=True)]
        return float(len(self.members) + 1), sums


def _fits(x: ir.Value, y: ir.Value | None) -> bool:
    """Return whether types agree, and shapes where both are known."""
    return y is not None and x.dtype == y.dtype and may_be_alike(x.shape, y.shape)

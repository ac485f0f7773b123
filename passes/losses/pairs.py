"""Define losses of several rows for each example: embeddings of pairs and triplets."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.roles import FED, Role, TargetSpec, role_of, set_role
from graphopt.graph.values import dims_of, dtype_of, name_of, redirect
from graphopt.intervals import within
from passes.losses.loss import Loss, new_input

__all__ = ["CosineEmbedding", "CosineSimilarity", "InfoNCE", "PairLoss", "Triplet"]

_PAIRS = "pairs"  # the dimension of examples, each of which has several rows
_ROWS = "/rows"  # the end of the name of an output with the rows of all companions
_LEAST_SQUARE = 1e-24  # the least square of a norm


@dataclass(frozen=True)
class PairLoss(Loss):
    """Compare the outputs of a model for several rows of each example, in one forward pass.

    This is the base class of losses of pairs. Each input `NAME` of the model, with a row for each example, gets
    companions such as `NAME_positive`. The graph concatenates their rows, runs the model once and splits its outputs.
    Rows that belong together therefore stay together when data is shuffled, split or shared out to workers. Prediction
    and the trained model read `NAME` alone. Other dimensions of an input and its companions have one size: pad texts of
    different lengths, and mask the padding. A subclass implements `companions` and `compare`.

    Raises:
        GraphoptError: the number of rows of an input is fixed.

    >>> class Closer(passes.PairLoss):
    ...     def companions(self):
    ...         return ["near"]
    ...     def compare(self, op, prediction, first, near):
    ...         return op.Pow(first - near, 2)
    >>> step = graphopt.compile(models.linear((2,), 3), loss=Closer(), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'x_near']
    """

    @abstractmethod
    def companions(self) -> list[str]:
        """Return what the names of the companions end with."""

    @abstractmethod
    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        """Emit the loss of each example from the outputs for its rows, those of `NAME` first.

        `prediction` has the rows of all.
        """

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        names = self.companions()
        with Emitter(model) as op:
            stack_inputs(model, op, names, type(self).__name__)
            return split_outputs(model, op, prediction, 1 + len(names))

    def rows_of(self, prediction: ir.Value, operands: Sequence[ir.Value]) -> ir.Value:
        return operands[0]


def stack_inputs(model: ir.Model, op: Emitter, companions: Sequence[str], loss: str) -> dict[ir.Value, ir.Value]:
    """Replace each input with rows by the rows of a new input of its name and of its companions; return both."""
    fed = [x for x in model.graph.inputs if role_of(x) in (None, *FED) and not x.is_initializer() and x.shape]
    stacked = [x for x in fed if not isinstance(dims_of(x)[0], int)]
    if not stacked:
        shapes = ", ".join(f"{x.name!r} of shape {x.shape}" for x in fed)
        raise GraphoptError(
            f"{loss}: expected a model of any number of rows, found inputs {shapes}: export it with a dynamic batch, "
            "or set pipeline.normalize.batch=free, passes.Normalize(batch='free')"
        )
    replaced = {}
    for x in stacked:
        name, role, place = name_of(x), role_of(x) or Role.DATA, model.graph.inputs.index(x)
        shape = ir.Shape([ir.SymbolicDim(_PAIRS), *dims_of(x)[1:]])
        TargetSpec.remove(x)
        del model.graph.inputs[place]
        x.name = f"{name}/first"
        uses = list(x.uses())
        first = new_input(model, name, dtype_of(x), shape, role)
        model.graph.inputs.insert(place, model.graph.inputs.pop())
        metadata.copy(x, first)
        others = [new_input(model, f"{name}_{other}", dtype_of(x), shape) for other in companions]
        rows = op.Concat(first, *others, axis=0)
        rows.shape = x.shape
        redirect(uses, rows)
        replaced[x] = InferenceForm(same_as=0, predicting=True).write(rows)
    return replaced


def split_outputs(model: ir.Model, op: Emitter, prediction: ir.Value, count: int) -> list[ir.Value]:
    """Split a prediction into the rows of each companion, and let the graph's outputs have those of the first."""
    found: list[ir.Value] = []
    own = [y for y in model.graph.outputs if role_of(y) in (None, Role.PREDICTION)]
    for y in own:
        if y.shape is None or not len(y.shape) or isinstance(dims_of(y)[0], int):
            continue
        parts = split_rows(op, y, count)
        InferenceForm(same_as=0, predicting=True).write(parts[0])
        name, y.name = y.name, f"{y.name}{_ROWS}"
        result = op.Identity(parts[0], _outputs=[name])
        for note in (metadata.ORIGINAL_NAME.key, metadata.ON_DEMAND.key):
            if note in metadata.all_of(y):
                metadata.all_of(result)[note] = metadata.all_of(y).pop(note)
        metadata.ROLE.remove(y)
        set_role(result, Role.PREDICTION)
        model.graph.outputs[model.graph.outputs.index(y)] = result
        if y is prediction:
            found = parts
    return found


def split_rows(op: Emitter, x: ir.Value, count: int) -> list[ir.Value]:
    parts = op.Split(x, axis=0, num_outputs=count, _outputs=count)
    for part in parts:
        part.shape, part.type = ir.Shape([ir.SymbolicDim(_PAIRS), *dims_of(x)[1:]]), x.type
    return list(parts)


def _normalized(op: Emitter, x: ir.Value) -> ir.Value:
    """Emit the rows of a matrix, divided by their norms."""
    return x / op.Sqrt(op.Max(op.ReduceSumSquare(x, [-1], keepdims=1), _LEAST_SQUARE))


def _cosine(op: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
    return op.ReduceSum(_normalized(op, x) * _normalized(op, y), [-1], keepdims=0)


def _check_embeddings(loss: PairLoss, prediction: ir.Value) -> None:
    if len(dims_of(prediction)) != 2:
        name = name_of(prediction).removesuffix(_ROWS)
        raise GraphoptError(
            f"{type(loss).__name__}: expected embeddings of shape [rows, numbers], found {name!r} of shape "
            f"{prediction.shape}: pool them in the model, or name another output"
        )


@dataclass(frozen=True)
class InfoNCE(PairLoss):
    """Compute the cross-entropy of finding an example's positive among those of the batch (van den Oord et al. 2018).

    Embeddings of `NAME` are compared with those of `NAME_positive` of all examples, and with those of all negatives.
    sentence-transformers' MultipleNegativesRankingLoss does the same, and has a scale, which is 1 / temperature.

    Args:
        temperature: the number by which similarities are divided.
        similarity: `cosine`, or `dot` for the product of embeddings.
        negatives: the number of negatives of each example: `NAME_negative`, or `NAME_negative_1` and so on.
        symmetric: also find the example of each positive, and take the mean of both.

    >>> step = graphopt.compile(models.linear((2,), 3), loss=passes.InfoNCE(negatives=1), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'x_positive', 'x_negative']
    """

    temperature: float = within("(0, inf)", 0.05)
    similarity: Literal["cosine", "dot"] = "cosine"
    negatives: int = within("[0, 1000]", 0)
    symmetric: bool = False

    def companions(self) -> list[str]:
        several = [f"negative_{i}" for i in range(1, self.negatives + 1)]
        return ["positive", *(["negative"] if self.negatives == 1 else several)]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        _check_embeddings(self, prediction)
        if self.similarity == "cosine":
            rows = tuple(_normalized(op, x) for x in rows)
        anchor, positive = rows[0] / self.temperature, rows[1]
        others = op.Concat(*rows[1:], axis=0) if len(rows) > 2 else positive
        scores = op.MatMul(anchor, op.Transpose(others, perm=[1, 0]))
        total = op.ReduceLogSumExp(scores, [1], keepdims=0)
        if self.symmetric:
            back = op.MatMul(positive, op.Transpose(anchor, perm=[1, 0]))
            total = 0.5 * (total + op.ReduceLogSumExp(back, [1], keepdims=0))
        return total - op.ReduceSum(anchor * positive, [1], keepdims=0)


@dataclass(frozen=True)
class Triplet(PairLoss):
    """Compute max(0, d(a, p) - d(a, n) + margin), for embeddings of an anchor a, a positive p and a negative n.

    They are those of `NAME`, `NAME_positive` and `NAME_negative`. It is PyTorch's TripletMarginLoss, and
    sentence-transformers' TripletLoss, whose margin is 5 by default.

    Args:
        margin: the difference of distances from which on a triplet has no loss.
        distance: `euclidean`, `manhattan`, or `cosine` for 1 - cosine.

    >>> step = graphopt.compile(models.linear((2,), 3), loss=passes.Triplet(), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'x_positive', 'x_negative']
    """

    margin: float = within("[0, inf)", 1.0)
    distance: Literal["euclidean", "manhattan", "cosine"] = "euclidean"

    def companions(self) -> list[str]:
        return ["positive", "negative"]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        _check_embeddings(self, prediction)
        anchor, positive, negative = rows
        return op.Relu(self._distance(op, anchor, positive) - self._distance(op, anchor, negative) + self.margin)

    def _distance(self, op: Emitter, x: ir.Value, y: ir.Value) -> ir.Value:
        if self.distance == "cosine":
            return 1 - _cosine(op, x, y)
        difference = x - y + 1e-6  # as in PyTorch, so that equal embeddings have a gradient
        norm = op.ReduceL1 if self.distance == "manhattan" else op.ReduceL2
        return norm(difference, [-1], keepdims=0)


@dataclass(frozen=True)
class CosineSimilarity(PairLoss):
    """Compute (cos(a, b) - t)^2, for embeddings a and b of `NAME` and `NAME_other`, and a target t of each pair.

    It is sentence-transformers' CosineSimilarityLoss.

    >>> step = graphopt.compile(models.linear((2,), 3), loss=passes.CosineSimilarity(), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'x_other', 'target']
    """

    def companions(self) -> list[str]:
        return ["other"]

    def operands(self, model: ir.Model, prediction: ir.Value, target_name: str) -> list[ir.Value]:
        rows = super().operands(model, prediction, target_name)
        target = new_input(model, target_name, dtype_of(prediction), ir.Shape([ir.SymbolicDim(_PAIRS)]))
        return [*rows, target]

    def compare(self, op: Emitter, prediction: ir.Value, *rows: ir.Value) -> ir.Value:
        _check_embeddings(self, prediction)
        first, other, target = rows
        return self.of_similarity(op, _cosine(op, first, other), target)

    def of_similarity(self, op: Emitter, similarity: ir.Value, target: ir.Value) -> ir.Value:
        """Emit the loss of each pair from its cosine similarity."""
        return op.Pow(similarity - target, 2)


@dataclass(frozen=True)
class CosineEmbedding(CosineSimilarity):
    """Compute 1 - cos(a, b) for pairs of target 1, and max(0, cos(a, b) - margin) for those of target -1.

    It is PyTorch's CosineEmbeddingLoss. The embeddings are those of `NAME` and `NAME_other`.

    Args:
        margin: the similarity up to which a pair of target -1 has no loss.

    >>> step = graphopt.compile(models.linear((2,), 3), loss=passes.CosineEmbedding(), optimizer=passes.SGD(0.1))
    >>> list(graphopt.Executor(step).inputs)
    ['x', 'x_other', 'target']
    """

    margin: float = within("[-1, 1]", 0.0)

    def of_similarity(self, op: Emitter, similarity: ir.Value, target: ir.Value) -> ir.Value:
        apart = op.Relu(similarity - self.margin)
        return op.Where(op.Greater(target, 0.0), 1 - similarity, apart)

"""Standardize the inputs of a model."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import FROZEN
from graphopt.graph.rewriting import Pass, Pattern, Read, matches
from graphopt.graph.roles import data_inputs
from graphopt.graph.traversal import computed_from
from graphopt.graph.values import dtype_of, is_floating, name_of, redirect
from graphopt.moments import Moments
from passes.weights.initializers import register

_Numbers = float | Sequence[float]


@dataclass(frozen=True)
class Standardize(Pass):
    """Replace each floating-point input x by (x - mean) / scale, for numbers of each feature that do not train.

    The training graph, the trained model and graphs for hosts then take raw input. Without numbers, the pass learns
    them from the training rows: `graphopt.adapt` and recipes set them to the mean and the standard deviation (1 for a
    constant feature), as scikit-learn's StandardScaler does.

    Args:
        mean: a number per feature, or one for all; for several inputs, those of each, by name.
        scale: the divisors, in the same form.
        axis: the axis of the features: 1 for the columns of a table and the channels of images [N, C, H, W], as in
            BatchNormalization; -1 for sequences of features [N, T, C].
        inputs: shell-style patterns of the names of inputs, one or several. By default, all floating-point inputs,
            except those that only a single number reads, such as the targets of a model that computes its own loss.

    Raises:
        GraphoptError: the model has no such input, its rank is unknown, it is already standardized, the numbers do not
            fit its features or its type, or there are none.

    >>> X = numpy.array([[1, 200], [3, 400]], numpy.float32)
    >>> scaling = passes.Standardize(*graphopt.data.mean_and_scale(X))
    >>> step = graphopt.compile(models.linear((2,), 1), standardize=scaling, loss=passes.MeanSquaredError())
    >>> [node.op_type for node in step.graph][:2]
    ['Sub', 'Div']
    """

    alters: ClassVar[str] = "scales the inputs"

    mean: _Numbers | Mapping[str, _Numbers] | None = field(default=None, repr=False)
    scale: _Numbers | Mapping[str, _Numbers] | None = field(default=None, repr=False)
    axis: int = 1
    inputs: Pattern = None
    changes_forward = True

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("mean", "scale"):
            object.__setattr__(self, name, _plain(name, getattr(self, name)))
        forms = {type(numbers) for numbers in (self.mean, self.scale)}
        names = [set(numbers) for numbers in (self.mean, self.scale) if isinstance(numbers, dict)]
        if len(forms) > 1 or (names and names[0] != names[1]):
            raise GraphoptError(
                "Standardize: expected mean and scale, of the same inputs, or neither to learn them, found others"
            )

    @property
    def learns(self) -> bool:
        return self.mean is None

    def adapted(self, model: ir.Model, read: Read) -> Standardize:
        mean, scale = {}, {}
        for x in self._chosen(model):
            name, moments = name_of(x), Moments(self.axis)
            try:
                for piece in read(name):
                    moments.add(piece)
                mean[name], scale[name] = moments.mean.tolist(), moments.scale.tolist()
            except GraphoptError as error:
                raise GraphoptError(f"Standardize: {error}") from error
        return replace(self, mean=mean, scale=scale)

    def rewrite(self, model: ir.Model) -> None:
        if self.mean is None or self.scale is None:
            raise GraphoptError(
                "Standardize: expected mean and scale, found none: learn them by graphopt.adapt, or by "
                "graphopt.data.mean_and_scale"
            )
        chosen = {name_of(x): x for x in self._chosen(model)}
        if not isinstance(self.mean, Mapping) and len(chosen) > 1:
            raise GraphoptError(
                f"Standardize: expected mean and scale by the names of the inputs, {', '.join(map(repr, chosen))}, "
                "found those of one"
            )
        means, scales = (
            numbers if isinstance(numbers, Mapping) else dict.fromkeys(chosen, numbers)
            for numbers in (self.mean, self.scale)
        )
        if unknown := sorted(set(means) - set(chosen)):
            raise GraphoptError(
                f"Standardize: expected floating-point inputs, {', '.join(map(repr, chosen))}, found numbers of "
                f"{unknown[0]!r}"
            )
        for name in means:
            _standardize(model, chosen[name], np.array(means[name]), np.array(scales[name]), self.axis)

    def _chosen(self, model: ir.Model) -> list[ir.Value]:
        """Return the inputs to standardize."""
        inputs = data_inputs(model)
        if self.inputs is not None:
            chosen = [x for x in inputs if is_floating(x) and matches(x.name, self.inputs)]
        else:
            results = [y for y in model.graph.outputs if y.shape is None or any(dim != 1 for dim in y.shape)]
            needed = computed_from(results)
            chosen = [x for x in inputs if is_floating(x) and (x in needed or not results)]
        if not chosen:
            wanted = "" if self.inputs is None else f" {self.inputs!r}"
            found = ", ".join(f"{x.name!r} of type {x.dtype}" for x in inputs)
            raise GraphoptError(
                f"Standardize: expected a floating-point input{wanted}, the model has {found or 'no input'}"
            )
        return chosen


def _plain(name: str, numbers: object) -> object:
    """Return numbers as a tuple, or tuples by name, of floats."""
    if numbers is None:
        return None
    if isinstance(numbers, Mapping):
        return {str(key): _plain(name, values) for key, values in numbers.items()}
    try:
        array = np.atleast_1d(np.asarray(numbers, np.float64))
    except (TypeError, ValueError):
        array = np.full((0, 0), np.nan)
    right = np.isfinite(array) & (array > 0 if name == "scale" else True)
    if array.ndim != 1 or not array.size or not right.all():
        what = "positive numbers" if name == "scale" else "numbers"
        raise GraphoptError(f"Standardize({name}=...): expected {what}, one per feature, found {numbers!r}")
    return tuple(array.tolist())


def _standardize(model: ir.Model, x: ir.Value, mean: np.ndarray, scale: np.ndarray, axis: int) -> None:
    if x.shape is None:
        raise GraphoptError(f"Standardize: expected an input of known rank, found {x.name!r}: declare its shape")
    uses = list(x.uses())
    centering = [n.op_type == "Sub" and any(y and FROZEN.is_set(y) for y in n.inputs) for n, _ in uses]
    if uses and all(centering):
        raise GraphoptError(
            f"Standardize: expected an input that is not standardized, found that the model standardizes {x.name!r}: "
            "leave out this step, or train the original model"
        )
    rank = len(x.shape)
    if rank > 1 and not (-rank <= axis < rank and axis % rank):
        raise GraphoptError(
            f"Standardize(axis={axis}): expected an axis of the features of {x.name!r}, from 1 to {rank - 1}"
        )
    size = x.shape[axis] if rank > 1 else 1
    size = size if isinstance(size, int) else max(len(mean), len(scale))
    for numbers in (mean, scale):
        if len(numbers) not in (1, size):
            raise GraphoptError(
                f"Standardize: input {x.name!r}: expected {size} numbers, one per feature, or one for all, found "
                f"{len(numbers)}"
            )
    _warn(x, mean, scale)
    put_before(model, x, uses, mean, scale, axis)


def put_before(
    model: ir.Model,
    x: ir.Value,
    uses: Sequence[tuple[ir.Node, int]],
    mean: np.ndarray,
    scale: np.ndarray,
    axis: int,
) -> None:
    """Make nodes read (x - mean) / scale in place of x, for numbers of each feature along an axis, or one for all."""
    rank = len(x.shape or ())
    shape = [-1 if i == axis % rank else 1 for i in range(rank)]
    with Emitter(model) as op:
        centered = op.Sub(x, _constant(model, x, "mean", mean.reshape(shape)))
        standardized = op.Div(centered, _constant(model, x, "scale", scale.reshape(shape)))
    redirect(uses, standardized)


def _warn(x: ir.Value, mean: np.ndarray, scale: np.ndarray) -> None:
    """Warn about a feature that varies by less than the distance of numbers near its mean."""
    resolution = float(np.spacing(np.ones((), dtype_of(x).numpy())))
    means, scales = np.broadcast_arrays(mean, scale)
    varies = scales != 1  # the scale of a constant feature
    coarse = np.flatnonzero(varies & (scales < resolution * np.abs(means)))
    if coarse.size:
        warnings.warn(
            f"Standardize: input {x.name!r}: {x.dtype} cannot tell numbers of feature {coarse[0]} apart, whose mean is "
            f"{means[coarse[0]]:g} and whose scale is {scales[coarse[0]]:g}: subtract a constant from the data",
            stacklevel=2,
        )


def _constant(model: ir.Model, x: ir.Value, name: str, numbers: np.ndarray) -> ir.Value:
    """Add an initializer that does not train, in the type of an input."""
    with np.errstate(over="ignore"):
        array = numbers.astype(dtype_of(x).numpy())
    plain = array.astype(np.float64)
    if not np.isfinite(plain).all() or (name == "scale" and not (plain > 0).all()):
        raise GraphoptError(
            f"Standardize: input {x.name!r}: expected a {name} in the range of {x.dtype}, found "
            f"{numbers.ravel()[int(np.argmax(~np.isfinite(plain) | (plain == 0)))]:g}: scale the data"
        )
    value = register(model, f"{x.name}.{name}", array)
    FROZEN.set(value)
    return value

"""Differentiate the loss of each example: the gradients of rows of a batch, their norms, and weighted sums of them.

    with Emitter(model) as op:                             # in a pass, after the loss
        examples = Examples(op, model, loss, parameters)
        squares = examples.squared_norms()                 # [n], over all parameters
        gradients = examples.gradients()                   # {parameter: [n, *its shape]}
        total = examples.combined(weights)                 # {parameter: its shape}: the sum of weights[n] gradients[n]

An example's loss is its part of a sum, and n times its part of a mean over n rows. A *site* is a node that reads rows
and something computed from parameters alone, its *operand*. One ordinary backward walk computes the gradients of the
sites' outputs. The table `SITES` says how an operand's gradient for each example follows from these and the site's
inputs, and gives its norm without computing it if that is cheaper (Goodfellow 2015, arXiv:1510.01799; Li et al. 2022,
arXiv:2110.05679). Other sites run in a Scan over examples.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.blocks import parts_of, starts_of_blocks
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.metadata import BATCH_WEIGHT, FAKE, OF_BATCH
from graphopt.graph.operators import VIEWS, full_attributes
from graphopt.graph.roles import FED, role_of
from graphopt.graph.traversal import values_read
from graphopt.graph.values import (
    dims_of,
    dtype_of,
    given,
    is_floating,
    like,
    node_label,
    rank,
    wide_type,
)
from passes.free_batch import Rows, places_of_rows
from passes.gradients.registry import WITH_LOCAL_DERIVATIVES, Active, is_in, rule_of
from passes.gradients.rules.control_flow import scan_over
from passes.gradients.rules.recurrent import CELLS, GATES, Factors, factors_of
from passes.gradients.walk import backward, between

_Values = dict[ir.Value, ir.Value]
_KEEPING = VIEWS | {"Cast", "Transpose"}  # operators that keep the numbers of a weight, in another order
_ADDING = VIEWS | {
    "Add",
    "Cast",
    "Mean",
    "Neg",
    "Sub",
    "Sum",
    "Where",
}  # what adds terms of a loss, or keeps one


@dataclass(frozen=True)
class Known:
    """An operand's gradients [n, *shape]."""

    value: ir.Value

    def gradient(self, op: Emitter) -> ir.Value:
        """Emit the gradients [n, *shape]."""
        return self.value

    def total(self, op: Emitter, weights: ir.Value) -> ir.Value:
        """Emit the sum over examples of their gradients, times `weights` [n]; one of weight 0 counts as 0."""
        flat = op.Reshape(self.value, [0, -1])
        rows = op.Where(op.Greater(op.Unsqueeze(weights, [1]), 0.0), flat, op.constant(0.0, like=flat))
        summed = op.MatMul(op.Unsqueeze(op.cast(weights, flat.dtype), [0]), rows)
        return op.Reshape(summed, op.shape_of(self.value, 1))


@dataclass(frozen=True)
class Product:
    """The gradients `a' b` of a matrix, or of one for each group, for `a` [n, ..., T, i] and `b` [n, ..., T, o]."""

    a: ir.Value
    b: ir.Value
    operand: ir.Value

    def gradient(self, op: Emitter) -> ir.Value:
        axes = [*range(rank(self.a))]
        product = op.MatMul(op.Transpose(self.a, perm=[*axes[:-2], axes[-1], axes[-2]]), self.b)
        return op.Reshape(product, op.Concat([0], op.shape_of(self.operand), axis=0))

    def total(self, op: Emitter, weights: ir.Value) -> ir.Value:
        """Emit the sum over examples of their gradients, times weights [n], for `a` and `b` of four axes."""
        a = op.Reshape(op.Transpose(_weighted(op, self.a, weights), perm=[1, 3, 0, 2]), [0, 0, -1])
        b = op.Transpose(self.b, perm=[1, 0, 2, 3])
        b = op.Reshape(b, op.Concat([0, -1], op.shape_of(b, 3), axis=0))
        return op.Reshape(op.MatMul(a, b), op.shape_of(self.operand))

    @property
    def has_norm(self) -> bool:
        """Return whether the norms of examples are cheaper than their gradients."""
        places, rows, columns = dims_of(self.a)[-2], dims_of(self.a)[-1], dims_of(self.b)[-1]
        known = [size for size in (places, rows, columns) if isinstance(size, int)]
        return len(known) < 3 or 2 * known[0] ** 2 < known[1] * known[2] or (places == 1 and rank(self.a) == 3)

    @property
    def of_pairs(self) -> bool:
        """Return whether the norm is an inner product of two matrices of pairs of places."""
        return self.has_norm and not (dims_of(self.a)[-2] == 1 and rank(self.a) == 3)

    def squared_norm(self, op: Emitter, *others: Product) -> ir.Value:
        """Emit the squared norm of the gradients, together with those of others that have the same `a`."""
        if not self.of_pairs:
            return _sum_square(op, self.a) * _sum_square(op, self.b)
        pairs = [_by_pairs(op, form.b) for form in (self, *others)]
        return _inner(op, _by_pairs(op, self.a), op.Sum(*pairs) if others else pairs[0])


@dataclass(frozen=True)
class Picked:
    """The gradients of a table [V, d], of which `b` [n, T, d] belong to the rows `numbers` [n, T]."""

    numbers: ir.Value
    b: ir.Value
    operand: ir.Value
    has_norm = True

    def gradient(self, op: Emitter) -> ir.Value:
        size = op.shape_of(self.operand, 0, 1)
        ones = op.OneHot(self.numbers, size, op.constant([0, 1], like=self.b))
        product = op.MatMul(op.Transpose(ones, perm=[0, 2, 1]), self.b)
        return op.Reshape(product, op.Concat([0], op.shape_of(self.operand), axis=0))

    def squared_norm(self, op: Emitter) -> ir.Value:
        size = op.Cast(op.shape_of(self.operand, 0, 1), to=self.numbers.dtype)
        numbers = op.Where(op.Less(self.numbers, 0), self.numbers + size, self.numbers)
        equal = op.Equal(op.Unsqueeze(numbers, [1]), op.Unsqueeze(numbers, [2]))
        return _inner(op, op.Cast(equal, to=self.b.dtype), _by_pairs(op, self.b))


_Form = Known | Product | Picked


@dataclass(frozen=True)
class Site:
    """A node, the number of the input that is its operand, and the gradients of its outputs."""

    node: ir.Node
    index: int
    dys: tuple[Input, ...]
    rows: Rows
    n: ir.Value
    matrices: dict[tuple[ir.Value, ir.Value, bool], ir.Value] = field(repr=False, compare=False)  # that sites share

    @property
    def operand(self) -> ir.Value:
        return given(self.node.inputs[self.index])

    def opened(self, op: Emitter, x: ir.Value, model: ir.Value | None = None) -> ir.Value:
        """Emit `x`, which has rows where `model` has them, as [n, *sizes], with the part of a row in place of all.

        Floating-point numbers of 16 bits become float32.
        """
        model = x if model is None else model
        x = op.cast(x, wide_type(x)) if is_floating(x) else x
        before, after = dims_of(model)[: (axis := self.rows.axes.get(model, 0))], dims_of(model)[axis + 1 :]
        length: int | None = self.rows.lengths.get(model, 1)
        if model in self.rows.merged:
            length = math.prod(n if isinstance(n, int) else 0 for n in self.rows.merged[model][:-1]) or None
            split = op.Reshape(x, op.Concat([-1], self.n, op.shape_of(model, 1), axis=0))
            y = op.Transpose(split, perm=[1, 0, *range(2, rank(x) + 1)])
        elif length == 1:
            order = [axis, *(i for i in range(rank(x)) if i != axis)]
            y = op.Unsqueeze(op.Transpose(x, perm=order) if axis else x, [axis + 1])
        else:
            shape = op.Concat(op.shape_of(model, 0, axis), self.n, [length], op.shape_of(model, axis + 1), axis=0)
            shape = shape if axis else op.Concat(self.n, [length], op.shape_of(model, 1), axis=0)
            y = op.Reshape(x, shape)
            order = [axis, *(i for i in range(rank(x) + 1) if i != axis)]
            y = op.Transpose(y, perm=order) if axis else y
        y.shape = ir.Shape([None, *before, length, *after])
        return y

    def matrix(self, op: Emitter, x: ir.Value, model: ir.Value | None = None, columns: bool = False) -> ir.Value:
        """Emit `x` [..., i], or [..., i, T] with `columns`, as [n, T, i], for a sum over all places T of a row."""
        if (known := self.matrices.get(key := (x, model or x, columns))) is not None:
            return known
        y = self.opened(op, x, model)
        if columns:
            y = _swapped(op, y)
        last, sizes = dims_of(y)[-1], dims_of(y)[1:-1]
        places = math.prod(size for size in sizes if isinstance(size, int))
        flat = op.Reshape(y, op.Concat([0, -1], op.shape_of(y, rank(y) - 1), axis=0))
        flat.shape = ir.Shape([None, places if all(isinstance(n, int) for n in sizes) else None, last])
        self.matrices[key] = flat
        return flat

    def summed(self, op: Emitter, terms: ir.Value, model: ir.Value, dims: Iterable[int | ir.SymbolicDim]) -> Known:
        """Sum terms in the shape of `model` over the places of a row along which an operand of `dims` is repeated."""
        y = self.opened(op, terms, model)
        dims = list(dims)
        aligned = [1] * (rank(y) - 1 - len(dims)) + dims
        axes = [i + 1 for i, (size, own) in enumerate(zip(aligned, dims_of(y)[1:], strict=True)) if size == 1 != own]
        y = op.ReduceSum(y, axes, keepdims=1) if axes else y
        return Known(op.Reshape(y, op.Concat([0], op.shape_of(self.operand), axis=0)))


def _sum_square(op: Emitter, x: ir.Value) -> ir.Value:
    return op.ReduceSumSquare(x, [*range(1, rank(x))], keepdims=0) if rank(x) > 1 else x * x


def _weighted(op: Emitter, x: ir.Value, weights: ir.Value) -> ir.Value:
    """Multiply each example of `x` [n, ...] by its weight; one of weight 0 becomes 0, also if it is not finite."""
    weights = op.Unsqueeze(weights, [*range(1, rank(x))])
    return op.Where(op.Greater(weights, 0.0), x * op.cast(weights, x.dtype), op.constant(0.0, like=x))


def _swapped(op: Emitter, x: ir.Value) -> ir.Value:
    axes = [*range(rank(x))]
    return op.Transpose(x, perm=[*axes[:-2], axes[-1], axes[-2]])


def _by_pairs(op: Emitter, a: ir.Value) -> ir.Value:
    """Emit the inner products [n, ..., T, T] of the rows of each matrix of `a`."""
    return op.MatMul(a, _swapped(op, a))


def _inner(op: Emitter, a: ir.Value, b: ir.Value) -> ir.Value:
    return op.ReduceSum(a * b, [*range(1, rank(b))], keepdims=0)


def _matmul(op: Emitter, site: Site) -> _Form | None:
    (dy,), (x, w) = site.dys, map(given, site.node.inputs)
    if rank(site.operand) != 2 or rank(x if site.index else w) < 2:
        return None
    y = site.node.outputs[0]
    if site.index:
        return Product(site.matrix(op, x), site.matrix(op, given(dy), y), w)
    return Product(site.matrix(op, given(dy), y, columns=True), site.matrix(op, w, columns=True), x)


def _gemm(op: Emitter, site: Site, *, alpha: float, beta: float, transA: int, transB: int) -> _Form | None:
    dy, y = given(site.dys[0]), site.node.outputs[0]
    if site.index == 2:
        return site.summed(op, dy * beta, y, dims_of(site.operand))
    if site.index == 0:
        return None
    a, b = site.matrix(op, given(site.node.inputs[0])), site.matrix(op, dy * alpha if alpha != 1 else dy, y)
    return Product(b, a, site.operand) if transB else Product(a, b, site.operand)


def _conv(op: Emitter, site: Site, *, group: int) -> _Form | None:
    """Unfold the input by a depthwise Conv with one kernel for each place of a window."""
    node, dy = site.node, given(site.dys[0])
    x, w = given(node.inputs[0]), given(node.inputs[1])
    if site.rows.axes.get(x) != 0 or site.rows.lengths[x] != 1:
        return None
    if site.index == 2:
        return Known(op.ReduceSum(op.cast(dy, wide_type(dy)), [*range(2, rank(dy))], keepdims=0))
    taps, channels = dims_of(w)[2:], dims_of(x)[1]
    if not isinstance(channels, int) or not all(isinstance(size, int) for size in taps):
        return None
    places = math.prod(size for size in taps if isinstance(size, int))
    x, dy = op.cast(x, wide_type(x)), op.cast(dy, wide_type(dy))
    moves = [
        *(n != 1 for n in node.attributes.get_ints("strides", ())),
        *node.attributes.get_ints("pads", ()),
    ]
    if places > 1 or any(moves):
        kernels = np.tile(np.eye(places).reshape(places, 1, *taps), (channels, *[1] * (rank(w) - 1)))
        attributes = {**dict(node.attributes), "group": channels}
        x = op.Conv(x, op.constant(kernels, like=x), **attributes)
    sizes = dims_of(dy)[2:]
    length = math.prod(n for n in sizes if isinstance(n, int)) if all(isinstance(n, int) for n in sizes) else None
    parts = []
    for value, count in ((dy, dims_of(w)[0]), (x, channels * places)):
        part = _swapped(op, op.Reshape(value, [0, group, count // group, -1]))
        part.shape = ir.Shape([None, group, length, count // group])
        parts.append(part)
    return Product(parts[0], parts[1], w)


def _gather(op: Emitter, site: Site, *, axis: int) -> _Form | None:
    numbers = given(site.node.inputs[1])
    if site.index or axis or rank(site.operand) != 2:
        return None
    flat = op.cast(op.Reshape(site.opened(op, numbers), [0, -1]), ir.DataType.INT64)
    flat.shape = ir.Shape([None, None])
    return Picked(flat, site.matrix(op, given(site.dys[0]), site.node.outputs[0]), site.operand)


def _normalization(op: Emitter, site: Site) -> _Form | None:
    """Normalize again with the scale 1 and the bias 0: a scale's gradient is this times that of the output."""
    node, dy, y = site.node, given(site.dys[0]), site.node.outputs[0]
    x, scale, *rest = node.inputs
    if any(site.dys[1:]) or site.index > 2:
        return None
    terms = dy
    if site.index == 1:
        ones = op.Expand(op.constant(1.0, like=given(scale)), op.shape_of(given(scale)))
        bias = [op.Expand(op.constant(0.0, like=b), op.shape_of(b)) for b in rest[:1] if b is not None]
        (again, *_) = op.emit_again(node, [x, ones, *bias, *rest[1:]])
        terms = dy * op.cast(again, dy.dtype)
    by_channel = node.op_type not in ("LayerNormalization", "RMSNormalization")
    dims = [*dims_of(site.operand), *[1] * (rank(y) - 2 if by_channel else 0)]
    return site.summed(op, terms, y, dims)


def _elementwise(op: Emitter, site: Site) -> _Form | None:
    """Multiply by the local derivative, in the shape of the output."""
    node, y = site.node, site.node.outputs[0]
    function = rule_of(node)
    assert function is not None
    named = {**full_attributes(node, op.versions), "y": y, "active": frozenset([site.operand])}
    terms = given(function(op, site.dys[0], *node.inputs, **named)[site.index])
    return site.summed(op, op.Expand(terms, op.shape_of(y)), y, dims_of(site.operand))


def _recurrent(op: Emitter, site: Site, factors: Factors | None) -> _Form | None:
    """Stack the directions of a recurrent operator's factors as [n, directions, steps, sizes]."""
    if factors is None or site.index > 3:
        return None

    def stack(values: list[ir.Value]) -> ir.Value:
        parts = [op.Unsqueeze(op.Transpose(op.cast(x, wide_type(x)), perm=[1, 0, 2]), [1]) for x in values]
        y = op.Concat(*parts, axis=1) if len(parts) > 1 else parts[0]
        steps, _, size = dims_of(values[0])
        y.shape = ir.Shape([None, len(parts), steps, size])
        return y

    if site.index < 3:
        of, read = ((factors.of_x, [factors.x]), (factors.of_h, factors.h))[site.index - 1]
        return Product(stack(of), stack(read), site.operand)
    sums = [op.ReduceSum(stack(of), [2], keepdims=0) for of in (factors.of_x, factors.of_h)]
    return Known(op.Concat(*sums, axis=2))


def _moves_gates(site: Site, w: ir.Value) -> bool:
    """Return whether an operand has each gate of a parameter, in another order, as PyTorch's exporter has."""
    gates = GATES.get(site.node.op_type)
    is_whole = gates is not None and starts_of_blocks(site.operand, gates) is not None
    return is_whole and {part.source for part in parts_of(site.operand)} == {w}


SITES: dict[str, Callable[..., _Form | None]] = {
    **dict.fromkeys(CELLS, _recurrent),
    **{"MatMul": _matmul, "Gemm": _gemm, "Conv": _conv, "Gather": _gather},
    **dict.fromkeys(
        ("BatchNormalization", "InstanceNormalization", "LayerNormalization", "RMSNormalization"),
        _normalization,
    ),
}
_TAKEN = {"Gemm": ("alpha", "beta", "transA", "transB"), "Conv": ("group",), "Gather": ("axis",)}


class Examples:
    """Hold the sites of parameters, and emit what depends on the gradients of single examples.

    Args:
        op: emits into the model, whose types must be inferred.
        model: a model with a loss, whose batch is open.
        loss: the loss, a sum or a mean over rows, perhaps plus a penalty, whose gradient is no example's.
        parameters: the values to differentiate by.
        seed: the factor of the loss, 1 by default.
        scan: whether sites that are not in the table run in a Scan over examples; otherwise, they are refused.

    Raises:
        GraphoptError: the batch is static, rows depend on each other, the loss has weights in its divisor, or a site is
            refused.
    """

    def __init__(
        self,
        op: Emitter,
        model: ir.Model,
        loss: ir.Value,
        parameters: Iterable[ir.Value],
        seed: ir.Value | None = None,
        scan: bool = True,
    ) -> None:
        self.op, self.graph, self.scan, self.parameters = op, model.graph, scan, list(parameters)
        self._of_steps: dict[ir.Node, Factors | None] = {}
        self._whole = _Values()  # gradients [n, *shape] that have been emitted
        fed = [x for x in model.graph.inputs if role_of(x) in (None, *FED) and not x.is_initializer()]
        batched = [x for x in fed if x not in self.parameters and x.shape is not None and len(x.shape)]
        fixed = [x for x in batched if isinstance(dims_of(x)[0], int)]
        if fixed or not batched:
            name = repr(fixed[0].name) if fixed else "none"
            raise GraphoptError(
                f"gradients of examples: expected inputs with an open batch, found {name} of shape "
                f"{fixed[0].shape if fixed else '[]'}: export a dynamic batch, or set normalize.batch=free"
            )
        if len(axes := {str(dims_of(x)[0]): x for x in batched}) > 1:
            raise GraphoptError(
                f"gradients of examples: expected inputs that share the axis of the rows, found "
                f"{', '.join(f'{x.name!r} of shape {x.shape}' for x in axes.values())}: name it alike"
            )
        if any(map(FAKE.is_set, self.graph)):
            raise GraphoptError(
                "gradients of examples: expected a model in floats, found the rounding of passes.FakeQuantize, which "
                "has no gradients of examples: set quantize=none"
            )
        for node in self.graph:
            if OF_BATCH.is_set(node) or bool(node.attributes.get_int("training_mode", 0)):
                raise GraphoptError(
                    f"gradients of examples: expected rows that do not depend on each other, found batch "
                    f"statistics in {node_label(node)}: set training=none, or replace it by GroupNormalization"
                )
        others = [x for x in model.graph.inputs if x not in batched]
        self.rows = places_of_rows(model, batched, constant=others, drawn=True)
        self.n = op.shape_of(batched[0], 0, 1)
        self.parts = self._parts_of(loss)
        elements = [given(node.inputs[0]) for node in map(ir.Value.producer, self.parts) if node is not None]
        path = between(self.graph, elements, self.parameters)
        for node in path:
            mixed = [y for y in node.outputs if y.name and not self.rows.has(y) and y not in self.rows.fixed]
            if mixed:
                raise GraphoptError(
                    f"gradients of examples: expected operators that treat each row of an open batch by itself, found "
                    f"{node_label(node)}, of which this is not known"
                )
        self._chain = [node for node in path if not any(map(self.rows.has, node.outputs))]
        self._of_weights = of_weights = {*self.parameters, *(y for node in self._chain for y in node.outputs)}
        at = [
            (node, i) for node in path if node not in self._chain for i, x in enumerate(node.inputs) if x in of_weights
        ]
        # Penalties, and the factors of several losses.
        inner = {node for y in self.parts for node in (given(y).producer(),)} | {
            node for node in path if any(map(self.rows.has, node.outputs))
        }
        rest = [node for node in between(self.graph, [loss], [*self.parameters, *self.parts]) if node not in inner]
        seed = op.constant(1.0, like=loss) if seed is None else seed
        if loss in self.parts:
            seeds, self.of_penalty = {loss: seed}, {}
        else:
            self._check_rest(rest)
            outer = backward(op, _view(rest, op), {loss: seed}, [*self.parameters, *self.parts])
            seeds = {y: outer[y] for y in self.parts if y in outer}
            self.of_penalty = {w: outer[w] for w in self.parameters if w in outer}
            if not seeds:
                raise self._not_of_rows(loss)
        for y in seeds:
            if BATCH_WEIGHT.read(y) == "rows":
                seeds[y] = seeds[y] * op.Cast(op.Squeeze(self.n, [0]), to=seeds[y].dtype)
        outputs = dict.fromkeys(y for node, _ in at for y in node.outputs if y.name)
        self._dys = backward(op, self.graph, seeds, outputs, self._dx_of_steps) if outputs else {}
        matrices: dict[tuple[ir.Value, ir.Value, bool], ir.Value] = {}
        self.sites = [
            Site(node, i, dys, self.rows, self.n, matrices)
            for node, i in at
            if any(dys := tuple(self._dys.get(y) for y in node.outputs))
        ]

    def _parts_of(self, loss: ir.Value) -> list[ir.Value]:
        """Return the sums and means over rows that the loss consists of."""
        computed = (y for node in self.graph for y in node.outputs)
        noted = {y: note for y in (*self.graph.inputs, *computed) if (note := BATCH_WEIGHT.read(y))}
        if "mean" in noted.values():
            raise GraphoptError(
                "gradients of examples: expected a loss whose divisor does not depend on the rows, found a weighted "
                "mean: set loss.reduction=sum, or leave out weights and ignore_index"
            )
        parts = [y for y, note in noted.items() if note in ("rows", "sum") and y.producer() is not None]
        if not parts or len(parts) < len(noted):
            raise self._not_of_rows(loss)
        return parts

    @staticmethod
    def _not_of_rows(loss: ir.Value) -> GraphoptError:
        return GraphoptError(
            f"gradients of examples: expected a loss that is a sum or a mean of losses of rows, found "
            f"{loss.name!r}, of which this is not known: use a loss of passes, such as passes.CrossEntropy(), "
            f"which compares each row with its target"
        )

    def _check_rest(self, rest: Iterable[ir.Node]) -> None:
        """Raise an error unless a loss adds multiples of its parts to penalties, which read parameters alone."""
        of_parts, of_weights = {*self.parts}, {*self.parameters}
        for node in rest:
            read = values_read(node)
            parts = [x for x in read if x in of_parts]
            others = [x for x in read if x not in of_parts]
            scales = node.op_type in ("Mul", "Div") and len(parts) == 1 and of_weights.isdisjoint(others)
            is_linear = node.op_type in _ADDING or (scales and (node.op_type == "Mul" or read[0] in of_parts))
            if not self.rows.fixed.issuperset(others) or (parts and (node.domain or not is_linear)):
                raise GraphoptError(
                    f"gradients of examples: expected a loss of multiples of losses of rows, and penalties of "
                    f"parameters alone, found {node_label(node)}, which computes another part of it from rows: "
                    f"leave this part out"
                )
            (of_parts if parts else of_weights).update(node.outputs)

    @cached_property
    def forms(self) -> list[tuple[Site, _Form]]:
        """The gradient of the operand of each site, for each example."""
        return [(site, self._form(site)) for site in self.sites]

    def _form(self, site: Site) -> _Form:
        node, function = site.node, None if site.node.domain else SITES.get(site.node.op_type)
        form = None
        if function is not None:
            attributes = full_attributes(node, self.op.versions)
            taken = {name: attributes[name] for name in _TAKEN.get(node.op_type, ())}
            form = function(self.op, site, **taken, **self._factors(site))
        elif is_in(node, WITH_LOCAL_DERIVATIVES):
            form = _elementwise(self.op, site)
        if form is None and not self.scan:
            raise GraphoptError(
                f"gradients of examples: expected a site with a formula, found {node_label(node)}, which reads "
                f"{site.operand.name!r}: set scan=True, which is slow"
            )
        return form or self._scanned(site)

    def _factors(self, site: Site) -> dict[str, Factors | None]:
        """Return the factors of the weights of a recurrent operator, which its sites share."""
        if site.node.op_type not in CELLS:
            return {}
        return {"factors": self._steps_of(site.node, site.dys)}

    def _steps_of(self, node: ir.Node, dys: Sequence[Input], of_input: bool = False) -> Factors | None:
        x = given(node.inputs[0])
        if node not in self._of_steps:
            fits = self.rows.axes.get(x) == 1 and self.rows.lengths.get(x) == 1
            self._of_steps[node] = factors_of(self.op, node, dys, of_input) if fits else None
        return self._of_steps[node]

    def _dx_of_steps(self, node: ir.Node, dys: list[Input], active: Active) -> Sequence[Input] | None:
        """Return the gradient of what a recurrent operator reads, from the walk through its steps for its weights."""
        if node.domain or node.op_type not in CELLS or not active.isdisjoint(filter(None, node.inputs[1:])):
            return None
        found = self._steps_of(node, dys, of_input=True) if not self._of_weights.isdisjoint(node.inputs) else None
        return None if found is None else [found.dx]

    def _scanned(self, site: Site) -> Known:
        """Run the node and its rule on one row after the other."""
        node, op = site.node, self.op
        own = [x for x in dict.fromkeys(node.inputs) if x is not None and self.rows.has(x)]
        outputs = [y for y, dy in zip(node.outputs, site.dys, strict=True) if dy is not None]
        sequences = [site.opened(op, x) for x in own]
        sequences += [site.opened(op, given(dy), y) for y, dy in zip(node.outputs, site.dys, strict=True) if dy]

        def turn(op: Emitter, _: list[ir.Value], slices: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            read = dict(zip(own, slices, strict=False))
            made = [ir.Value() for _ in node.outputs]
            inputs = [x and read.get(x, x) for x in node.inputs]
            inputs[site.index] = own_w = like(op.Identity(site.operand), site.operand)  # read once
            op.call_op(
                node.op_type,
                inputs,
                dict(node.attributes),
                domain=node.domain,
                outputs=made,
            )
            seeds = {}
            for y, dy in zip(outputs, slices[len(own) :], strict=True):
                copy = made[list(node.outputs).index(y)]
                copy.type, copy.shape = y.type, dy.shape
                seeds[copy] = op.cast(dy, y.dtype)
            copied = given(made[0]).producer()
            assert copied is not None
            return [], [backward(op, _view([copied], op), seeds, [own_w])[own_w]]

        (stack,) = scan_over(op, turn, [], sequences)
        return Known(op.cast(stack, wide_type(stack)))

    def squared_norms(self) -> ir.Value:
        """Emit the squared norms [n] of the gradients of examples by all parameters together."""
        squares, together = [], dict[ir.Value, list[Product]]()
        for w in self.parameters:
            form = self._with_norm(w)
            if isinstance(form, Product) and form.of_pairs:
                together.setdefault(form.a, []).append(form)
            elif self._forms_of(w):
                squares.append(form.squared_norm(self.op) if form else _sum_square(self.op, self._gradient(w)))
        squares += [first.squared_norm(self.op, *others) for first, *others in together.values()]
        common = max(map(dtype_of, squares), key=lambda dtype: dtype.itemsize)
        return self.op.Sum(*(self.op.cast(square, common) for square in squares))

    def _with_norm(self, w: ir.Value) -> Product | Picked | None:
        """Return the form of a parameter that one site reads, if its norms are cheaper than its gradients."""
        if len(forms := self._forms_of(w)) != 1:
            return None
        ((site, form),) = forms
        keeps = self._keeps(w, site.operand) or _moves_gates(site, w)
        return form if keeps and not isinstance(form, Known) and form.has_norm else None

    def gradients(self) -> _Values:
        """Emit the gradients [n, *shape] of examples by each parameter on which the loss depends."""
        return {w: self._gradient(w) for w in self.parameters if self._forms_of(w)}

    def _forms_of(self, w: ir.Value) -> list[tuple[Site, _Form]]:
        return [(site, form) for site, form in self.forms if site.operand in self._computed_from(w)]

    def _computed_from(self, w: ir.Value) -> Collection[ir.Value]:
        found = {w}
        for node in self._chain:
            if not found.isdisjoint(node.inputs):
                found.update(node.outputs)
        return found

    def _keeps(self, w: ir.Value, operand: ir.Value) -> bool:
        """Return whether an operand has the numbers of a parameter, in another order or shape."""
        while operand is not w:
            node = operand.producer()
            if node is None or node.op_type not in _KEEPING or node.domain:
                return False
            operand = given(node.inputs[0])
        return True

    def _gradient(self, w: ir.Value) -> ir.Value:
        """Sum the gradients of a parameter over the sites that read it, and what is computed from it."""
        if w in self._whole:
            return self._whole[w]
        op, total = self.op, None
        for site, form in self._forms_of(w):
            gradient = form.gradient(op)
            gradient.shape = ir.Shape([None, *dims_of(site.operand)])
            if site.operand is not w and (moved := self._moved(gradient, site.operand, w)) is not None:
                gradient = moved
            elif site.operand is not w:

                def turn(
                    op: Emitter, _: list[ir.Value], slices: list[ir.Value], v: ir.Value = site.operand
                ) -> tuple[list[ir.Value], list[ir.Value]]:
                    seed = like(op.Identity(op.cast(slices[0], v.dtype)), v)
                    return [], [backward(op, _view(self._chain, op), {v: seed}, [w])[w]]

                (gradient,) = scan_over(op, turn, [], [gradient])
                gradient = op.cast(gradient, wide_type(gradient))
            total = gradient if total is None else total + gradient
        assert total is not None
        total.shape = ir.Shape([None, *dims_of(w)])
        self._whole[w] = total
        return total

    def _moved(self, gradient: ir.Value, operand: ir.Value, w: ir.Value) -> ir.Value | None:
        """Put the gradients of an operand that only moves numbers where these lie in a parameter; None for others."""
        op, at, end, pieces = self.op, 0, 0, list[tuple[int, int, int]]()
        for part in parts_of(operand):
            size = part.stop - part.start
            if part.source is w:
                pieces.append((part.start, at, size))
            elif part.source in self._computed_from(w):
                return None
            at += size
        if not pieces:
            return None
        total = math.prod(ir.Shape(dims_of(w)).numpy())
        flat, found = op.Reshape(gradient, [0, -1]), list[ir.Value]()
        for start, place, size in [*sorted(pieces), (total, 0, 0)]:
            if start < end:
                return None  # a number that is read twice
            if start > end:
                found.append(op.Expand(op.constant(0.0, like=flat), op.Concat(self.n, [start - end], axis=0)))
            if size:
                found.append(op.Slice(flat, [place], [place + size], [1]))
            end = start + size
        return op.Reshape(op.Concat(*found, axis=1), op.Concat([0], op.shape_of(w), axis=0))

    def combined(self, weights: ir.Value) -> _Values:
        """Emit the sum over examples of their gradients, times `weights` [n], without that of a penalty.

        Gradients that norms have needed whole are added as they are; those of others come from weighted seeds. An
        example of weight 0 counts as 0, also if its gradient is not finite. But where an input of a product is not
        finite, the sum is not, either: 0 times it is NaN.
        """
        op, total = self.op, _Values()
        for w, g in self._whole.items():
            total[w] = like(op.cast(op.Reshape(Known(g).total(op, weights), op.shape_of(w)), w.dtype), w)
        left = [w for w in self.parameters if w not in total]
        for node in dict.fromkeys(site.node for w in left for site, _ in self._forms_of(w)):
            seeds = {}
            if node in self._of_steps:  # without a second walk through its steps
                for site, form in self.forms:
                    if site.node is node and not isinstance(form, Picked):
                        seeds[site.operand] = like(op.cast(form.total(op, weights), site.operand.dtype), site.operand)
            for y in node.outputs if not seeds else ():
                if (dy := self._dys.get(y)) is not None:
                    factor = self._placed(weights, y)
                    seeds[y] = like(
                        op.Where(op.Greater(factor, 0.0), dy * op.cast(factor, dy.dtype), op.constant(0.0, like=dy)),
                        y,
                    )
            view = _view(self._chain if node in self._of_steps else [*self._chain, node], op)
            for w, gradient in backward(op, view, seeds, left).items():
                total[w] = total[w] + gradient if w in total else gradient
        return total

    def _placed(self, weights: ir.Value, y: ir.Value) -> ir.Value:
        """Emit one number for each row where `y` has this row."""
        op, axis = self.op, self.rows.axes.get(y, 0)
        if y in self.rows.merged:
            copies = op.Div(op.shape_of(y, 0, 1), self.n)
            weights = op.Reshape(op.Expand(weights, op.Concat(copies, self.n, axis=0)), [-1])
        elif (length := self.rows.lengths[y]) != 1:
            weights = op.Expand(op.Unsqueeze(weights, [1]), op.Concat(self.n, [length], axis=0))
            weights = op.Reshape(weights, [-1])
        after = rank(y) - 1 - axis
        return op.Unsqueeze(weights, [*range(1, after + 1)]) if after else weights


def _view(nodes: Iterable[ir.Node], op: Emitter) -> ir.GraphView:
    return ir.GraphView([], [], nodes=list(nodes), opset_imports=op.versions)

"""Compute derivatives as a graph: gradients, Jacobians, Hessians and products with them; stop gradients."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph import state
from graphopt.graph.classified import Derived
from graphopt.graph.copying import again
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import BATCH_WEIGHT, ROLE, STOP_GRADIENT, Flag
from graphopt.graph.rewriting import Pass, Pattern, matches
from graphopt.graph.roles import Role, role_of, set_role, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.traversal import all_nodes, ancestors
from graphopt.graph.values import (
    dims_of,
    dtype_of,
    given,
    gradient_of,
    is_floating,
    like,
    name_of,
    producer_of,
    rank,
    redirect,
    seed_of,
)
from graphopt.intervals import within
from passes.free_batch import values_of_rows
from passes.gradients.rules.control_flow import LoopStep, scan_over
from passes.gradients.walk import backward, between, lost, zeros

_MANY = 2000  # nodes, from which on a loop that is computed twice is told
DERIVATIVE = Flag("graphopt.derivative")  # an output that is the derivative of another


@dataclass(frozen=True)
class Derivative(Pass):
    """Add an output for each X of `wrt`: a derivative of output `of` with respect to X. A leaf emits it.

    Args:
        wrt: the name of an input, a weight or another value of the graph, or several. By default, all floating-point
            inputs.
        of: the output to differentiate. By default, the only floating-point output.
        name: the name of the new output, if `wrt` has one name. By default, `OF.grad.X` for a gradient.
        sign: a factor, 1 or -1, as for forces, which are -1 times the gradient of an energy.

    Raises:
        GraphoptError: a name is unknown or that of integers, `of` does not depend on a value of `wrt`, or an operator
            has no rule.
    """

    wrt: tuple[str, ...] | list[str] | str | None = None
    of: str | None = None
    name: str | None = field(default=None, kw_only=True)
    sign: Literal[1, -1] = field(default=1, kw_only=True)

    suffix: ClassVar[str]  # of the name of the new output, before X

    def emit(self, op: Emitter, model: ir.Model, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        """Emit the derivatives of `y` by each of `wrt`; None where `y` does not depend on it."""
        raise NotImplementedError

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        y, wrt = self.chosen(model)
        if DERIVATIVE.is_set(y) and sum(1 for _ in all_nodes(model.graph)) >= _MANY:
            loops = sorted({node.op_type for node in model.graph if node.op_type in ("If", "Loop", "Scan")})
            if loops:
                warnings.warn(
                    f"{y.name!r} is a derivative itself: each {', '.join(loops)} of it is computed twice",
                    stacklevel=2,
                )
        if self.name is not None and len(wrt) != 1:
            names = ", ".join(map(name_of, wrt))
            raise GraphoptError(f"name={self.name!r}: expected one value in wrt, found {names}: leave name out")
        with Emitter(model) as op:
            for x, derivative in zip(wrt, self.emit(op, model, y, wrt), strict=True):
                if derivative is None:
                    raise GraphoptError(
                        f"{y.name!r} does not depend on {x.name!r} differentiably: leave {x.name!r} out of wrt"
                    )
                name = self.name or f"{y.name}.{self.suffix}.{x.name}"
                state.check_free(model, name)
                output = op.Identity(derivative if self.sign == 1 else op.Neg(derivative), _outputs=[name])
                DERIVATIVE.set(output)
                model.graph.outputs.append(output)

    def chosen(self, model: ir.Model) -> tuple[ir.Value, list[ir.Value]]:
        """Return the output to differentiate, and the values to differentiate by."""
        y = floating_output(model, self.of, "of")
        if self.wrt is None:
            inputs = [x for x in model.graph.inputs if is_floating(x) and not x.is_initializer()]
            if not inputs:
                instead = of_embeddings(model.graph.inputs) or ": name values as wrt"
                raise GraphoptError(f"wrt: expected floating-point inputs, found none{instead}")
            return y, inputs
        wrt = [self.wrt] if isinstance(self.wrt, str) else self.wrt
        if not wrt:
            raise GraphoptError("wrt: expected the name of a value to differentiate by, found none")
        return y, [floating_value(model, name, "wrt") for name in wrt]


@dataclass(frozen=True)
class Differentiate(Derivative):
    """Add an output `OF.grad.X` for each X of `wrt`: the gradient of the sum of output `of` with respect to X.

    The derivative of a derivative is 0 where it is piecewise constant, as in a network of Relu.

    Args:
        seeded: add an input `OF.seed` in the shape of `of`. Its elements weight the elements of `of` in the sum, which
            gives a vector-Jacobian product.

    >>> pipeline = graphopt.Pipeline(normalize=passes.Normalize(), grad=passes.Differentiate(("x",)))
    >>> model = pipeline(models.linear((2,), 1))
    >>> [output.name for output in model.graph.outputs]
    ['y', 'y.grad.x']
    """

    seeded: bool = False

    suffix = "grad"

    def emit(self, op: Emitter, model: ir.Model, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        return _gradients(op, model.graph, y, _seed(model, y, seed_of(y)) if self.seeded else ones_like(op, y), wrt)


@dataclass(frozen=True)
class HessianVector(Derivative):
    """Add an output `OF.hessian_vector.X` for each X of `wrt`: the Hessian of the sum of `of` by X, times `X.vector`.

    It is the gradient of the inner product of the gradient and the vector (Pearlmutter 1994, Fast exact multiplication
    by the Hessian), and has the shape of X, as has the new input `X.vector`. Each X has its own block of the Hessian.

    >>> pipeline = graphopt.Pipeline(normalize=passes.Normalize(), derive=passes.HessianVector(("x",)))
    >>> model = pipeline(models.mlp((2,), 1))
    >>> [value.name for value in (*model.graph.inputs, *model.graph.outputs) if "x" in value.name]
    ['x', 'x.vector', 'y.hessian_vector.x']
    """

    suffix = "hessian_vector"

    def emit(self, op: Emitter, model: ir.Model, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        first = _gradients(op, model.graph, y, ones_like(op, y), wrt)
        products: list[Input] = []
        for x, gradient in zip(wrt, first, strict=True):
            vector = _seed(model, x, f"{x.name}.vector")
            products += [None] if gradient is None else _gradients(op, model.graph, gradient, vector, [x], zero=True)
        return products


@dataclass(frozen=True)
class _OfRows(Derivative):
    """Differentiate each row of a batch by the same row, in a Scan over the unit vectors of what is differentiated.

    The forward pass stays outside the Scan and runs once.

    Args:
        rows: how many unit vectors a turn of the Scan takes. The forward pass runs on `rows` copies of the batch, so
            that memory grows with it and the number of turns falls. More than 1 needs an open batch.
    """

    rows: int = within("[1, 4096]", 1)

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        inputs = [x for x in model.graph.inputs if not x.is_initializer()]
        of_rows = values_of_rows(model, inputs)
        y, wrt = self.chosen(model)
        for x in (y, *wrt):
            if not of_rows.get(x):
                raise GraphoptError(
                    f"{self.suffix}: expected values whose rows are computed from the same rows of the inputs, found "
                    f"{x.name!r} of shape {x.shape}, of which this is not known: passes.Differentiate with seeded=True "
                    f"gives products with the Jacobian"
                )
        super().rewrite(model)

    def emit(self, op: Emitter, model: ir.Model, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        self.check_output(y)
        copies: dict[ir.Value, ir.Value] = {}
        if self.rows > 1:
            inputs = [x for x in model.graph.inputs if not x.is_initializer()]
            copies = _repeated(op, model, inputs, self.rows)
        results = self.emit_by_row(op, model.graph, copies.get(y, y), [copies.get(x, x) for x in wrt])
        for x, result in zip(wrt, results, strict=True):
            if result is not None:
                result.shape = ir.Shape([*self.dims(y, x), *dims_of(x)[1:]])
        return results

    def dims(self, y: ir.Value, x: ir.Value) -> Sequence[int | ir.SymbolicDim]:
        """Return the first dimensions of the derivative by `x`, before those of a row of `x`."""
        return dims_of(y)

    def check_output(self, y: ir.Value) -> None:
        """Raise an error if the derivative has no meaning for the output."""
        raise NotImplementedError

    def emit_by_row(self, op: Emitter, graph: ir.Graph, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        """Emit the derivatives of each row of `y` by each of `wrt`; None where `y` does not depend on it."""
        raise NotImplementedError

    def jacobians(self, op: Emitter, graph: ir.Graph, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        """Emit the derivatives [N, *Y, *X] of `y` [N, *Y] by each of `wrt` [N, *X]."""
        if not between(graph, [y], wrt) and not DERIVATIVE.is_set(y):
            return [None] * len(wrt)
        n = op.ReduceProd(op.shape_of(y, 1), keepdims=1)
        turns = op.Div(n + (self.rows - 1), self.rows)
        shape = op.Concat(turns * self.rows, n, axis=0)
        units = op.EyeLike(op.ConstantOfShape(shape, value=ir.tensor([0], dtype=dtype_of(y))))
        units = op.Reshape(units, op.Concat(turns, [self.rows, 1], op.shape_of(y, 1), axis=0))
        batch = op.Div(op.shape_of(y, 0, 1), self.rows)

        def turn(op: Emitter, _: list[ir.Value], units: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            spread = op.Expand(units[0], op.Concat([1], batch, [1] * (rank(y) - 1), axis=0))
            seed = like(op.Reshape(spread, op.Concat([-1], op.shape_of(y, 1), axis=0)), y)  # also of no rows
            return [], [given(x) for x in _gradients(op, graph, y, seed, wrt, zero=True)]

        results: list[Input] = []
        for x, stack in zip(wrt, scan_over(op, turn, [], [units]), strict=True):
            if self.rows > 1:
                stack = op.Reshape(stack, op.Concat(turns * self.rows, batch, op.shape_of(x, 1), axis=0))
                stack = op.Slice(stack, [0], n, [0])
            result = op.Transpose(stack, perm=[1, 0, *range(2, rank(x) + 1)])
            if rank(y) != 2:
                result = op.Reshape(result, op.Concat([-1], op.shape_of(y, 1), op.shape_of(x, 1), axis=0))
            results.append(result)
        return results


@dataclass(frozen=True)
class Jacobian(_OfRows):
    """Add an output `OF.jacobian.X` [N, m, *X] for each X of `wrt`: output `of` [N, m] by X [N, *X], row by row.

    >>> pipeline = graphopt.Pipeline(normalize=passes.Normalize(), derive=passes.Jacobian(("x",)))
    >>> model = pipeline(models.mlp((3,), 2))
    >>> model.graph.outputs[1].name, list(model.graph.outputs[1].shape)[1:]
    ('y.jacobian.x', [2, 3])
    """

    suffix = "jacobian"

    def check_output(self, y: ir.Value) -> None:
        if rank(y) != 2:
            raise GraphoptError(
                f"jacobian: expected an output [N, m], found {y.name!r} of shape {y.shape}: flatten its rows, or take "
                f"passes.Differentiate with seeded=True for products with the Jacobian"
            )

    def emit_by_row(self, op: Emitter, graph: ir.Graph, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        return self.jacobians(op, graph, y, wrt)


@dataclass(frozen=True)
class Hessian(_OfRows):
    """Add an output `OF.hessian.X` [N, *X, *X] for each X of `wrt`: the second derivatives of `of` [N] or [N, 1] by X.

    It is the Jacobian of the gradient.

    >>> pipeline = graphopt.Pipeline(normalize=passes.Normalize(), derive=passes.Hessian(("x",)))
    >>> model = pipeline(models.mlp((3,), 1))
    >>> model.graph.outputs[1].name, list(model.graph.outputs[1].shape)[1:]
    ('y.hessian.x', [3, 3])
    """

    suffix = "hessian"

    def dims(self, y: ir.Value, x: ir.Value) -> Sequence[int | ir.SymbolicDim]:
        return dims_of(x)

    def check_output(self, y: ir.Value) -> None:
        if dims_of(y)[1:] not in ((), (1,)):
            raise GraphoptError(
                f"hessian: expected a number for each row, an output [N] or [N, 1], found {y.name!r} of shape "
                f"{y.shape}: reduce its rows first, or take graphopt.jacobian of graphopt.grad"
            )

    def emit_by_row(self, op: Emitter, graph: ir.Graph, y: ir.Value, wrt: Sequence[ir.Value]) -> list[Input]:
        second: list[Input] = []
        for x, gradient in zip(wrt, _gradients(op, graph, y, ones_like(op, y), wrt), strict=True):
            if gradient is not None:
                DERIVATIVE.set(gradient)
                second += self.jacobians(op, graph, gradient, [x])
            else:
                second.append(None)
        return second


@dataclass(frozen=True)
class Adjoint(Pass):
    """Add an input `adj_Y` for each output Y, and an output `adj_X` for each input X: the seeds times the Jacobian.

    CasADi finds these names and shapes: k seeds of a matrix [r, c] are a matrix [r, k c], and those of a value of
    another rank the columns of a matrix. The forward pass runs once, the backward pass in a Scan over the seeds.
    """

    prefix: ClassVar[str] = "adj"

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        inputs = [x for x in model.graph.inputs if is_floating(x) and not x.is_initializer()]
        outputs = [y for y in model.graph.outputs if is_floating(y)]
        if not inputs or not outputs:
            raise GraphoptError(f"{self.prefix}: expected floating-point inputs and outputs, found none")
        with Emitter(model) as op:
            to, of = (outputs, inputs) if self.prefix == "adj" else (inputs, outputs)
            seeds = [self._opened(op, model, x) for x in to]
            turn = self.turn(op, model.graph, inputs, outputs)
            for x, stack in zip(of, scan_over(op, turn, [], seeds), strict=True):
                name = f"{self.prefix}_{x.name}"
                state.check_free(model, name)
                columns = op.shape_of(x, 1, 2) if rank(x) == 2 else [1]
                split = op.Reshape(stack, op.Concat(op.shape_of(stack, 0, 1), [-1], columns, axis=0))
                joined = op.Transpose(split, perm=[1, 0, 2])
                rows = op.ReduceProd(op.Concat([1], op.shape_of(x, 0, 1 if rank(x) == 2 else None), axis=0))
                y = op.Reshape(joined, op.Concat(rows, [-1], axis=0), _outputs=[name])
                y.shape = self._shape(x)
                DERIVATIVE.set(y)
                model.graph.outputs.append(y)

    def turn(self, op: Emitter, graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> LoopStep:
        """Return what computes the products with one seed."""

        def turn(op: Emitter, _: list[ir.Value], seeds: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            found = backward(op, graph, dict(zip(outputs, seeds, strict=True)), inputs)
            return [], [found.get(x) or zeros(op, x) for x in inputs]

        return turn

    def _opened(self, op: Emitter, model: ir.Model, x: ir.Value) -> ir.Value:
        """Add the input of the seeds of `x`, and emit them as [k, *its shape]."""
        name = f"{self.prefix}_{x.name}"
        state.check_free(model, name)
        seed = ir.Value(name=name, type=x.type, shape=self._shape(x))
        model.graph.inputs.append(seed)
        columns = op.shape_of(x, 1, 2) if rank(x) == 2 else [1]
        split = op.Transpose(op.Reshape(seed, op.Concat([0, -1], columns, axis=0)), perm=[1, 0, 2])
        opened = op.Reshape(split, op.Concat([-1], op.shape_of(x), axis=0))
        opened.shape = ir.Shape([None, *dims_of(x)])
        return opened

    def _shape(self, x: ir.Value) -> ir.Shape:
        """Return the shape of the seeds of `x`; CasADi computes a named size from the others."""
        count, dims = f"n{self.prefix}", dims_of(x)
        if len(dims) == 2:
            return ir.Shape([dims[0], count if dims[1] == 1 else f"{count}_x{dims[1]}"])
        sizes = [size for size in dims if isinstance(size, int)]
        rows = math.prod(sizes) if len(sizes) == len(dims) else dims[0] if len(dims) == 1 else f"{x.name}_rows"
        return ir.Shape([rows, count])


@dataclass(frozen=True)
class Tangent(Adjoint):
    """Add an input `fwd_X` for each input X, and an output `fwd_Y` for each output Y: the Jacobian times the seeds.

    Names and shapes are as those of `Adjoint`. The products with J are the gradient of u' J v by u.
    """

    prefix = "fwd"

    def turn(self, op: Emitter, graph: ir.Graph, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> LoopStep:
        us = {y: like(op.Expand(op.constant(0.0, like=y), op.shape_of(y)), y) for y in outputs}
        products = backward(op, graph, us, inputs)

        def turn(op: Emitter, _: list[ir.Value], seeds: list[ir.Value]) -> tuple[list[ir.Value], list[ir.Value]]:
            ends = {products[x]: seed for x, seed in zip(inputs, seeds, strict=True) if x in products}
            found = backward(op, graph, ends, us.values())
            return [], [found.get(u) or zeros(op, u) for u in us.values()]

        return turn


def _gradients(
    op: Emitter, graph: ir.Graph, y: ir.Value, seed: ir.Value, wrt: Sequence[ir.Value], zero: bool = False
) -> list[Input]:
    """Emit the gradients of `y` by each of `wrt`; without one, zeros if `zero` is set or `y` is a derivative."""
    found = backward(op, graph, {y: seed}, wrt)
    return [found[x] if x in found else zeros(op, x) if zero or DERIVATIVE.is_set(y) else None for x in wrt]


def ones_like(op: Emitter, y: ir.Value) -> ir.Value:
    """Emit ones in the type and shape of `y`."""
    return like(op.Expand(op.constant(1.0, like=y), op.shape_of(y)), y)


def _seed(model: ir.Model, x: ir.Value, name: str) -> ir.Value:
    """Add an input in the type and shape of `x`."""
    state.check_free(model, name)
    seed = ir.Value(name=name, type=x.type, shape=x.shape)
    model.graph.inputs.append(seed)
    return seed


def floating_output(model: ir.Model, name: str | None, option: str) -> ir.Value:
    """Return the floating-point output of a name, or the only one of the file itself, from which others are derived."""
    floating = [output for output in model.graph.outputs if is_floating(output)]
    outputs = [output for output in floating if name in (None, output.name)]
    if name is None:
        outputs = [y for y in floating if not Derived.is_on(y) and role_of(y) is not Role.SOURCE]
    if len(outputs) != 1:
        names = [output.name for output in floating]
        raise GraphoptError(
            f"{option}={name!r}: expected the name of one floating-point output, the model has {names}: set `{option}`"
        )
    return outputs[0]


def floating_value(model: ir.Model, name: str, option: str) -> ir.Value:
    values = ir.convenience.create_value_mapping(model.graph, include_subgraphs=False)
    if name in values and is_floating(values[name]):
        return values[name]
    if name in values:
        raise GraphoptError(
            f"{option}: expected a floating-point value, found {name!r} of {values[name].dtype}"
            f"{of_embeddings([values[name]])}"
        )
    known = [name for name, value in values.items() if is_floating(value)]
    raise GraphoptError(unknown("floating-point value", name, known))


def of_embeddings(tokens: Iterable[ir.Value]) -> str:
    """Return the end of an error that names the output of an embedding of tokens, or nothing."""
    nodes = [node for x in tokens for node in x.consumers() if node.op_type == "Gather"]
    rows = [name_of(node.outputs[0]) for node in nodes if is_floating(node.outputs[0])]
    return f": take the embedding's output {rows[0]!r}" if rows else ""


def _repeated(op: Emitter, model: ir.Model, inputs: Sequence[ir.Value], count: int) -> dict[ir.Value, ir.Value]:
    """Compute everything again from `count` copies of the batch, one after the other; return all values' copies."""
    nodes, copies = list(model.graph), dict[ir.Value, ir.Value]()
    for x in inputs:
        if not rank(x):
            continue
        if isinstance(dims_of(x)[0], int):
            raise GraphoptError(
                f"rows={count}: expected an open batch, found {x.name!r} of shape {x.shape}: "
                f"passes.Normalize(batch='free') opens it"
            )
        spread = op.Expand(x, op.Concat([count], op.shape_of(x), axis=0))
        copies[x] = op.Reshape(spread, op.Concat([-1], op.shape_of(x, 1), axis=0))
    return copies | elsewhere(op, nodes, copies)


def elsewhere(op: Emitter, nodes: Iterable[ir.Node], replaced: Mapping[ir.Value, ir.Value]) -> dict[ir.Value, ir.Value]:
    """Compute nodes again from other values, and return the copies of their outputs, which have no inference form."""
    copies = again(op, nodes, replaced, notes=True)
    for y in copies.values():
        InferenceForm.remove(y)
        InferenceForm.remove(producer_of(y))
    return copies


def again_from(
    op: Emitter, graph: ir.Graph, results: Iterable[ir.Value], replaced: Mapping[ir.Value, ir.Value]
) -> dict[ir.Value, ir.Value]:
    """Compute `results` again in the same graph from replaced values of the same shapes, and return the copies.

    Sizes, and masks whose shapes they are, are those of the first time.
    """
    needed = ancestors(results)
    nodes = [node for node in graph if node in needed and node.op_type not in ("Shape", "Size")]
    copies = elsewhere(op, nodes, replaced)
    for y in copies.values():
        ROLE.remove(y)
        BATCH_WEIGHT.remove(y)
    return copies


@dataclass(frozen=True)
class VectorJacobianProduct(Pass):
    """Differentiate by the inputs and parameters, for a loss outside the model: add an output `X.grad` for each X.

    Each floating-point output Y gets an input `Y.seed` of the same shape: the gradient of the objective by Y. An input
    on which no output depends differentiably has no `X.grad`.

    Args:
        inputs: shell-style patterns of the floating-point inputs to differentiate by. None selects none.

    Raises:
        GraphoptError: no floating-point output depends differentiably on anything, or none on a parameter; or
            operators in between have no rule.

    >>> layer = graphopt.ForwardBackward(models.linear((2,), 1), gradient=passes.VectorJacobianProduct(inputs=None))
    >>> [value.name for value in layer.backward_model.graph.outputs]
    ['layers.0.bias.grad', 'layers.0.weight.grad']
    """

    inputs: Pattern = "*"

    def rewrite(self, model: ir.Model) -> None:
        ensure_typed(model)
        data = [x for x in with_role(model, Role.DATA) if is_floating(x) and matches(x.name, self.inputs)]
        parameters = with_role(model, Role.PARAMETER)
        outputs = [y for y in with_role(model, Role.PREDICTION) if is_floating(y)]
        seeds = {y: ir.Value(name=seed_of(y), type=y.type, shape=y.shape) for y in outputs}
        for seed in seeds.values():
            state.check_free(model, name_of(seed))
            model.graph.inputs.append(set_role(seed, Role.SEED))
        with Emitter(model) as op:
            gradients = backward(op, model.graph, seeds, [*data, *parameters])
            missing = [lost(parameter) for parameter in parameters if parameter not in gradients]
            if missing:
                raise GraphoptError(f"the outputs do not depend on {', '.join(missing)}: freeze them")
            if not gradients:
                raise GraphoptError(
                    "no gradient to compute: expected parameters, or floating-point inputs that outputs depend on "
                    "differentiably, found none: set inputs, or run Parameters first"
                )
            for x in gradients:
                gradient = op.Identity(gradients[x], _outputs=[gradient_of(x)])
                model.graph.outputs.append(set_role(gradient, Role.GRADIENT))


def stop_gradient(op: Emitter, x: ir.Value) -> ir.Value:
    """Return the value of `x` as a constant for gradients. Call it in traced functions.

    >>> def distillation(op, prediction, target):
    ...     return op.Pow(prediction - passes.stop_gradient(op, target), 2)
    >>> passes.CustomLoss(distillation).reduction
    'mean'
    """
    return STOP_GRADIENT.mark(like(op.Identity(x), x))


@dataclass(frozen=True)
class StopGradient(Pass):
    """Treat the values named `values` as constants for gradients, so that nothing trains through them.

    Args:
        values: shell-style patterns of the names of values, one or several.

    Raises:
        GraphoptError: no value of the graph has a matching name.

    >>> steps = {"loss": passes.MeanSquaredError(), "gradient": [passes.StopGradient("x"), passes.Gradient()]}
    >>> step = graphopt.compile(models.linear((2,), 1), **steps)
    """

    values: Pattern
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        matching = [x for node in model.graph for x in node.outputs if matches(x.name, self.values)]
        matching += [x for x in model.graph.inputs if matches(x.name, self.values)]
        if not matching:
            raise GraphoptError(
                f"stop_gradient.values={self.values!r}: expected names of values in the graph, found no match: "
                f"graphopt.listing shows the names"
            )
        with Emitter(model) as op:
            for x in matching:
                uses = list(x.uses())
                stopped = stop_gradient(op, x)
                redirect(uses, stopped)

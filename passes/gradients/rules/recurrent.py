"""Differentiate RNN, GRU and LSTM through an equivalent Scan.

https://onnx.ai/onnx/operators lists the equations of a step. One Gemm computes the input's products of all steps.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir
from onnx_ir import Node, Value

from graphopt.errors import GraphoptError
from graphopt.graph.blocks import starts_of_blocks
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.inference import stand_in
from graphopt.graph.values import dims_of, dtype_of, like, producer_of
from passes.gradients.rules.control_flow import KNOWN, SAVING, scan_over
from passes.gradients.rules.shape import elements_along, indices_along
from passes.gradients.walk import backward, expansion, further_output, zeros

Activation = Callable[[Emitter, Value], Value]
Cell = Callable[..., list[Value]]

DIRECTIONS = {"forward": (False,), "reverse": (True,), "bidirectional": (False, True)}

# The default parameters of each activation, and a function of op, x and the parameters.
_ACTIVATIONS: dict[str, tuple[tuple[float, ...], Callable[..., Value]]] = {
    "affine": ((1.0, 0.0), lambda op, x, a, b: a * x + b),
    "elu": ((1.0,), lambda op, x, a: op.Elu(x, alpha=a)),
    "hardsigmoid": ((0.2, 0.5), lambda op, x, a, b: op.HardSigmoid(x, alpha=a, beta=b)),
    "leakyrelu": ((0.01,), lambda op, x, a: op.LeakyRelu(x, alpha=a)),
    "relu": ((), lambda op, x: op.Relu(x)),
    "scaledtanh": ((1.0, 1.0), lambda op, x, a, b: a * op.Tanh(b * x)),
    "sigmoid": ((), lambda op, x: op.Sigmoid(x)),
    "softplus": ((), lambda op, x: op.Softplus(x)),
    "softsign": ((), lambda op, x: op.Softsign(x)),
    "tanh": ((), lambda op, x: op.Tanh(x)),
    "thresholdedrelu": ((1.0,), lambda op, x, a: op.ThresholdedRelu(x, alpha=a)),
}


def rnn(op: Emitter, h: Value, gates: Value, r: Value, f: Activation) -> list[Value]:
    return [f(op, op.Gemm(h, r, gates, transB=1))]


def gru(
    op: Emitter,
    h: Value,
    gates: Value,
    rzr: Value,
    rh: Value,
    bias: Input,
    order: Sequence[int],
    f: Activation,
    g: Activation,
) -> list[Value]:
    """Multiply the state by its weights before the reset if the recurrent bias is given as `bias`."""
    zr, candidate = op.Split(gates, [2 * width(h), width(h)], axis=-1, _outputs=2)
    both = op.Split(f(op, op.Gemm(h, rzr, zr, transB=1)), num_outputs=2, axis=-1, _outputs=2)
    z, reset = (both[place] for place in order[:2])
    if bias is None:
        candidate = op.Gemm(reset * h, rh, candidate, transB=1)
    else:
        candidate = candidate + reset * op.Gemm(h, rh, bias, transB=1)
    n = g(op, candidate)
    return [n + z * (h - n)]


def lstm(
    op: Emitter,
    h: Value,
    c: Value,
    gates: Value,
    r: Value,
    peepholes: Sequence[Value] | None,
    coupled: bool,
    order: Sequence[int],
    f: Activation,
    g: Activation,
    squash: Activation,
) -> list[Value]:
    parts = op.Split(op.Gemm(h, r, gates, transB=1), num_outputs=4, axis=-1, _outputs=4)
    i, o, forget, cell = (parts[place] for place in order)
    pi, po, pf = peepholes or (None, None, None)
    i = f(op, i if pi is None else i + pi * c)
    forget = 1 - i if coupled else f(op, forget if pf is None else forget + pf * c)
    following = forget * c + i * g(op, cell)
    o = f(op, o if po is None else o + po * following)
    return [o * squash(op, following), following]


# From this many units on, a step's products take longer than the launch of its operators: the Scan replaces the
# operator in training and saves its gates for the gradient. With fewer units, the operator runs the forward pass.
LARGE = 32

GATES = {"RNN": 1, "GRU": 3, "LSTM": 4}
CELLS: dict[str, Cell] = {"RNN": rnn, "GRU": gru, "LSTM": lstm}


def expanded(
    op: Emitter,
    x: Value,
    w: Value,
    r: Value,
    *optional: Input,
    node: Node,
    direction: str,
    layout: int = 0,
    products: list[Value] | None = None,
) -> list[Value]:
    """Emit the outputs of a recurrent operator: Y, Y_h and, for an LSTM, Y_c."""
    b, lengths, h, c, p = (*optional, *[None] * 5)[:5]
    ways = _ways(direction)
    hidden_size = node.attributes.get_int("hidden_size", 0)
    if hidden_size and not isinstance(dims_of(r)[-1], int):
        r.shape = ir.Shape([len(ways), GATES[node.op_type] * hidden_size, hidden_size])
    x = op.Transpose(x, perm=[1, 0, 2]) if layout else x
    known: list[Value | None] = [None] * len(ways)
    if width(r) < LARGE:
        steps, rows, _ = dims_of(x)
        y = further_output(node, 0, dtype_of(x), ir.Shape([steps, len(ways), rows, width(r)]))
        known = _parts(op, op.Transpose(y, perm=[1, 2, 0, 3]) if layout else y, len(ways), 1)
    outputs = steps_of(op, x, [w, r, b, p], lengths, [h, c], node, known, layout=layout, products=products)
    if width(r) >= LARGE and any(y.uses() for y in node.outputs):
        stand_in(node, outputs)
    return outputs


expansion(*CELLS)(expanded)


def _ways(direction: str | None) -> tuple[bool, ...]:
    """Return for each direction whether it runs backwards."""
    if direction not in DIRECTIONS:
        raise GraphoptError(f"expected a direction of {', '.join(DIRECTIONS)}, found {direction!r}")
    return DIRECTIONS[direction]


def steps_of(
    op: Emitter,
    x: Value,
    weights: Sequence[Input],
    lengths: Input,
    starts: Sequence[Input],
    node: Node,
    known: Sequence[Input] = (None, None),
    *,
    layout: int = 0,
    read: Activation | None = None,
    products: list[Value] | None = None,
) -> list[Value]:
    """Emit the Scans of a recurrent operator, and return its outputs.

    Args:
        x: the input [steps, rows, inputs].
        weights: the weights of the input and of the state, the biases and the peepholes, of all directions.
        lengths: the numbers of steps of the rows.
        starts: the initial states.
        node: the operator, for its type and its attributes.
        known: the outputs of the operator itself for each direction; see `_run`.
        layout: that of the initial states and of the outputs.
        read: what the products of an LSTM read of a state in place of the state itself.
        products: where to put the input's part of the gates of all steps, for each direction.
    """
    ways = _ways(node.attributes.get_string("direction", "forward"))
    lengths = None if lengths is None else op.Cast(lengths, to=ir.DataType.INT64)
    parts = zip(*(_parts(op, v, len(ways)) for v in weights), strict=True)
    starts = starts if node.op_type == "LSTM" else starts[:1]
    states = zip(*(_parts(op, v, len(ways), layout) for v in starts), strict=True)
    functions = activations(node, len(ways))
    results = []
    for reverse, (wi, ri, bi, pi), initial, chosen, hs in zip(
        ways, parts, states, functions, known[: len(ways)], strict=True
    ):
        gates, cell = prepared(op, node, x, wi, ri, bi, pi, chosen)
        if products is not None:
            products.append(gates)
        if read is not None:
            cell = functools.partial(_reading, read, cell)
        shape = op.Concat(op.Shape(x, start=1, end=2), [width(ri)], axis=0)
        nothing = op.ConstantOfShape(shape, value=ir.tensor([0], dtype=dtype_of(x)))
        start = [nothing if state is None else state for state in initial]
        for state in start:  # a computation may hide its shape
            state.shape = ir.Shape([dims_of(x)[1], width(ri)])
        results.append(_run(op, cell, start, gates, hs, lengths, reverse))
    ys, *lasts = (list(values) for values in zip(*results, strict=True))
    y = stacked(op, ys, 1)
    return [
        op.Transpose(y, perm=[2, 0, 1, 3]) if layout else y,
        *(stacked(op, last, layout) for last in lasts),
    ]


def _reading(read: Activation, cell: Cell, op: Emitter, h: Value, *others: Value) -> list[Value]:
    return cell(op, read(op, h), *others)


def prepared(
    op: Emitter, node: Node, x: Value, w: Value, r: Value, b: Input, p: Input, functions: Sequence[Activation]
) -> tuple[Value, Cell]:
    """Return the input's part of the gates of all steps, with every bias that fits in, and the cell.

    Weights that the graph lays out anew, as those of PyTorch, are multiplied in their own order of gates, so that
    `gather_blocks` finds that nothing moves.
    """
    order, n = _order(node.op_type, r), width(r)
    biases = [None, None] if b is None else op.Split(b, num_outputs=2, axis=0, _outputs=2)
    wb, rb = (v and _reordered(op, v, order) for v in biases)
    w, r = (_reordered(op, v, order) for v in (w, r))
    gates = op.MatMul(x, op.Transpose(w))
    extra: tuple[object, ...] = (r,)
    if node.op_type == "LSTM":
        peepholes = None if p is None else op.Split(p, num_outputs=3, axis=0, _outputs=3)
        extra = r, peepholes, bool(node.attributes.get_int("input_forget", 0)), order
    elif node.op_type == "GRU":
        extra = *op.Split(r, [2 * n, n], axis=0, _outputs=2), None
        if node.attributes.get_int("linear_before_reset", 0):
            rb = op.constant([0.0] * 3 * n, like=x) if rb is None else rb
            zr, own = op.Split(rb, [2 * n, n], axis=0, _outputs=2)
            extra, rb = (*extra[:2], own), op.Pad(zr, [0, n])
        extra = *extra, order
    for bias in (wb, rb):
        gates = gates if bias is None else gates + bias
    return gates, lambda op, *values: CELLS[node.op_type](op, *values, *extra, *functions)


def _order(op_type: str, r: Value) -> list[int]:
    """Return the place of each gate of ONNX in the array that the graph has laid out anew as `r`."""
    same = [*range(GATES[op_type])]
    starts = starts_of_blocks(r, len(same))
    order = same if starts is None else np.argsort(np.argsort(starts)).tolist()
    return same if op_type == "GRU" and order[2] != 2 else order  # whose last gate has products of its own


def _reordered(op: Emitter, v: Value, order: Sequence[int]) -> Value:
    """Return an array with its gates in an order in which it was before."""
    if [*order] == sorted(order):
        return v
    parts = op.Split(v, num_outputs=len(order), axis=0, _outputs=len(order))
    return like(op.Concat(*(parts[gate] for gate in np.argsort(order)), axis=0), v)


def _run(
    op: Emitter, cell: Cell, states: list[Value], gates: Value, known: Input, lengths: Input, reverse: bool
) -> list[Value]:
    """Return the outputs of all steps, 0 after a sequence's end, and the states at the end of each sequence.

    If `known` holds the operator's own output, a step's gradient reads its states there. Otherwise the Scan saves its
    gates.
    """

    def step(op: Emitter, states: list[Value], slices: list[Value]) -> tuple[list[Value], list[Value]]:
        following = cell(op, *states, slices[0])
        if lengths is None:
            return following, following[:1]
        masked = [state + slices[1] * (y - state) for state, y in zip(states, following, strict=True)]
        return masked, [slices[1] * following[0]]

    def turn(v: Value) -> Value:
        return v if lengths is None or not reverse else like(op.ReverseSequence(v, lengths), v)

    sequences = [turn(gates)]
    if lengths is not None:
        inside = op.Less(indices_along(op, gates, 0, 1), op.Unsqueeze(lengths, [0]))
        mask = op.Cast(op.Unsqueeze(inside, [2]), to=gates.dtype)
        mask.shape = ir.Shape([*dims_of(gates)[:2], 1])
        sequences.append(mask)
    backwards = reverse and lengths is None
    *lasts, y = scan_over(op, step, states, sequences, backwards)
    scan = producer_of(y)
    if known is None:
        scan.meta[SAVING] = True
    else:
        scan.meta[KNOWN] = {0: _before(op, turn(known), states[0], backwards)}
    return [turn(y), *lasts]


def _before(op: Emitter, known: Value, first: Value, backwards: bool) -> Value:
    """Return the states at the start of each step, for those at its end."""
    first = op.Unsqueeze(first, [0])
    rest = op.Slice(known, [1], [2**31], [0]) if backwards else op.Slice(known, [0], [-1], [0])
    return like(op.Concat(*((rest, first) if backwards else (first, rest)), axis=0), known)


@dataclass(frozen=True)
class Factors:
    """Hold, for each direction, two factors for each weight, whose product, summed over all steps, is its gradient.

    Args:
        x: the input [steps, rows, inputs].
        h: the states before each step [steps, rows, units].
        of_x: the gradients [steps, rows, gates * units] of the products of the input, and of their biases.
        of_h: those of the products of the states, and of their biases.
        dx: the gradient of the input, if it is asked for.
    """

    x: Value
    h: list[Value]
    of_x: list[Value]
    of_h: list[Value]
    dx: Input = None


def factors_of(op: Emitter, node: Node, dys: Sequence[Input], of_input: bool = False) -> Factors | None:
    """Emit the factors of a recurrent operator for the gradients of its outputs.

    Return None for an operator without such a formula: a GRU with linear_before_reset=0, rows on the first axis, or
    rows of different lengths that are read backwards from a state that is given.
    """
    kind = node.op_type
    x, w, r, _, lengths, h = (*node.inputs, *[None] * 3)[:6]
    others = {"linear_before_reset": int(kind == "GRU"), "layout": 0}
    direction, count = node.attributes.get_string("direction", "forward"), GATES[kind]
    ways, start, gates = _ways(direction), len(op.graph), list[Value]()
    starts_anywhere = lengths is not None and h is not None and True in ways
    if starts_anywhere or any(node.attributes.get_int(name, 0) != due for name, due in others.items()):
        return None
    assert x is not None and w is not None and r is not None
    outputs = expanded(op, x, w, r, *node.inputs[3:], node=node, direction=direction or "", products=gates)
    part = ir.GraphView([], outputs, nodes=list(op.graph)[start:], opset_imports=op.versions)
    seeds = {y: like(op.Identity(op.cast(dy, dtype_of(y))), y) for y, dy in zip(outputs, dys, strict=False) if dy}
    found = backward(op, part, seeds, [*gates, *[x] * of_input])
    n = width(r)
    nothing = op.ConstantOfShape(op.Concat(op.shape_of(x, 1, 2), [n], axis=0), value=ir.tensor([0], dtype=dtype_of(x)))
    known, rs = elements_along(op, outputs[0], len(ways), 1), elements_along(op, r, len(ways), 0)
    result = Factors(x, [], [], [], found.get(x))
    for i, first in enumerate(_parts(op, h, len(ways))):
        states = known[i]
        states.shape = ir.Shape([*dims_of(x)[:2], n])
        before = _before(op, states, first or nothing, ways[i])
        order, own = [0], [found.get(gates[i]) or zeros(op, gates[i])]
        if count > 1:
            order, own = _order(kind, rs[i]), op.Split(own[0], num_outputs=count, axis=-1, _outputs=count)
        of_x = [own[place] for place in order]
        of_h = of_x
        if kind == "GRU":
            reset = op.Split(gates[i], num_outputs=3, axis=-1, _outputs=3)[order[1]]
            reset = reset + op.MatMul(before, op.Transpose(op.Slice(rs[i], [n], [2 * n], [0])))
            f, _ = [*activations(node, len(ways))][i]
            of_h = [*of_x[:2], of_x[2] * f(op, like(reset, states))]
        result.h.append(before)
        for parts, values in ((of_x, result.of_x), (of_h, result.of_h)):
            values.append(op.Concat(*parts, axis=-1))
            values[-1].shape = ir.Shape([*dims_of(x)[:2], count * n])
    return result


def activations(node: Node, directions: int) -> Iterator[list[Activation]]:
    """Yield the activations of each direction, and assign alpha and beta in order to those that use them."""
    numbers = [list(node.attributes.get_floats(f"activation_{name}", ())) for name in ("alpha", "beta")]
    clip = node.attributes.get_float("clip", None)
    count = {"RNN": 1, "GRU": 2, "LSTM": 3}[node.op_type]
    default = ["tanh"] if count == 1 else ["sigmoid", "tanh", "tanh"][:count]
    names = [name.lower() for name in node.attributes.get_strings("activations", ())] or default
    names = names if len(names) == count * directions else names[:count] * directions
    result: list[Activation] = []
    for i, name in enumerate(names):
        if name not in _ACTIVATIONS:
            raise GraphoptError(f"{node.op_type} node {node.name!r}: expected a standard activation, found {name!r}")
        defaults, function = _ACTIVATIONS[name]
        pairs = zip(defaults, numbers, strict=False)
        parameters = [rest.pop(0) if rest else default for default, rest in pairs]
        result.append(functools.partial(_activated, function, parameters, None if i % count == 2 else clip))
    for i in range(0, len(result), count):
        yield result[i : i + count]


def _activated(
    function: Callable[..., Value], parameters: Sequence[float], clip: float | None, op: Emitter, x: Value
) -> Value:
    return function(op, x if clip is None else like(op.Clip(x, -clip, clip), x), *parameters)


def _parts(op: Emitter, value: Input, count: int, axis: int = 0) -> list[Value | None]:
    """Return the part of an input for each direction, or None for each if the input is left out."""
    return [None] * count if value is None else list(elements_along(op, value, count, axis))


def stacked(op: Emitter, values: Sequence[Value], axis: int) -> Value:
    """Stack the directions' results along a new axis."""
    rows = [op.Unsqueeze(value, [axis]) for value in values]
    return rows[0] if len(rows) == 1 else op.Concat(*rows, axis=axis)


def width(x: Value) -> int:
    """Return the hidden size: the last dimension of states and recurrent weights."""
    size = dims_of(x)[-1]
    if not isinstance(size, int):
        raise GraphoptError(
            f"expected a known hidden size, the last dimension of its recurrent weight, found shape {x.shape}: set the "
            f"attribute hidden_size"
        )
    return size

"""Warn about patterns that select a part of a layer, where the file does not tell the rest."""

from __future__ import annotations

import warnings
from collections.abc import Iterable

import onnx_ir as ir

from graphopt.errors import some
from graphopt.graph.operators import LAYOUT, PRODUCTS
from graphopt.graph.origins import Origin
from graphopt.graph.rewriting import Pattern, matches, names_of, selects

_ENDS = {".bias": ".weight", ".in_proj_bias": ".in_proj_weight"}
_PASSED = LAYOUT | {"Cast", "Mul"}


def warn_of_parts(place: str, pattern: Pattern, values: Iterable[ir.Value]) -> None:
    """Warn about biases that a pattern selects without the weights of their layers, and about parts of joined values.

    The pattern matches the path that such a weight should have, but the file does not tell which one has it. An
    exporter joins parameters, such as both directions of an LSTM, into values that train as a whole.

    Args:
        place: the option that has the pattern.
        values: the weights and biases that it can select.
    """
    values = list(values)
    known = {name for value in values for name in names_of(value)}
    apart = []
    for bias in [value for value in values if selects(pattern, value)]:
        paths = [
            name.removesuffix(end) + weight
            for name in names_of(bias)
            for end, weight in _ENDS.items()
            if name.endswith(end)
        ]
        weight = _weight(bias)
        if weight in values and not selects(pattern, weight):
            apart += [(bias, path, weight) for path in paths if path not in known and matches(path, pattern)]
    joined = {}
    for value in [value for value in values if not matches(value.name, pattern)]:
        origin = Origin.read(value)
        rest = [] if origin is None else [path for path in origin.sources if not matches(path, pattern)]
        if origin is not None and 0 < len(rest) < len(origin.sources):
            joined[value] = rest
    if joined:
        pairs = [f"{value.name!r}, which has {some(rest)}, too" for value, rest in joined.items()]
        warnings.warn(f"{place}={pattern!r}: selects {some(pairs)}: the exporter joined them", stacklevel=2)
    if apart:
        pairs = [f"{bias.name!r} and not {path!r}, which may be {x.name!r}" for bias, path, x in apart]
        warnings.warn(
            f"{place}={pattern!r}: expected the weights of layers beside their biases, found {some(pairs)}: the file "
            f"does not tell the paths of these weights: add their names to the pattern",
            stacklevel=2,
        )


def _weight(bias: ir.Value) -> ir.Value | None:
    """Return the weight of the product to which a bias is added, or None."""
    for node, index in bias.uses():
        product: ir.Node | None = node
        if node.op_type == "Add":
            other = node.inputs[1 - index]
            product = None if other is None else other.producer()
            while product is not None and product.op_type in _PASSED and product.inputs[0] is not None:
                product = product.inputs[0].producer()
        if product is not None and product.op_type in PRODUCTS:
            return _source(product.inputs[1])
    return None


def _source(x: ir.Value | None) -> ir.Value | None:
    """Return the initializer that a value was computed from by changes of its layout, its type or its scale."""
    while x is not None and (node := x.producer()) is not None:
        if node.op_type not in _PASSED:
            return None
        x = node.inputs[0]
    return x

"""Train weights that a file stores in few bits by their *masters*: float32 state, which the graph rounds.

Micikevicius et al. 2018, https://arxiv.org/abs/1710.03740: an update that is much smaller than a 16-bit weight would be
rounded away. Jacob et al. 2018, https://arxiv.org/abs/1712.05877: the forward pass computes with the dequantized
weights, and the gradient passes to the master.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph import metadata, state
from graphopt.graph.emitter import Emitter, Input
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import STOP_GRADIENT, Text
from graphopt.graph.origins import Origin
from graphopt.graph.postprocessing import (
    DEQUANTIZE,
    STORED,
    STORED_AS,
    STORED_TYPE,
    broadcastable,
    dequantized,
    is_dequantized,
)
from graphopt.graph.roles import Role, set_role
from graphopt.graph.values import constant_of, dtype_of, given, is_floating, like, name_of, producer_of
from passes.lowering.integers import FOLLOWS
from passes.weights import evidence
from passes.weights.initializers import array, is_weight, replace_by

QUANTIZED = Text("graphopt.quantized")  # of an initializer: which integers it stands for

_WIDE = ir.DataType.FLOAT
_FEWEST = 63  # levels of the integers whose scale follows their range: of 7 bits and a sign, rounded
_LEAST = float(np.finfo(np.float32).eps)  # of the size of a range beside the file's
_LIMITS = {ir.DataType.INT8: (-128.0, 127.0), ir.DataType.UINT8: (0.0, 255.0)}
INT32_RANGE = -(2.0**31), 2.0**31 - 128  # the float32 numbers that an int32 holds


@dataclass(frozen=True)
class Quantized:
    """Hold the integers of a weight and how a DequantizeLinear reads them."""

    integers: ir.TensorProtocol
    node: ir.Node  # one of the nodes that read them, all of which are alike

    @property
    def numbers(self) -> np.ndarray:
        """Return what the integers stand for."""
        numbers = dequantized(self.node)
        assert numbers is not None
        return numbers

    def shown(self, name: str) -> ir.TensorProtocol:
        """Return a tensor of what the integers stand for, which is computed whenever it is read."""
        y = self.node.outputs[0]
        dtype, shape = dtype_of(y), ir.Shape(self.integers.shape.numpy())
        return ir.LazyTensor(
            lambda: ir.tensor(self.numbers.astype(dtype.numpy()), dtype=dtype), dtype, shape, name=name
        )


def promote_with_master(model: ir.Model, weight: ir.Value, role: Role, quantized: Quantized | None = None) -> ir.Value:
    """Turn an initializer into state, of float32 if the file stores fewer bits; inside a pass only."""
    if quantized is None and (not is_floating(weight) or dtype_of(weight).itemsize >= 4):
        return state.promote(model, weight, role)
    numbers = array(weight).astype(np.float32) if quantized is None else quantized.numbers
    master = _declare(model, weight, numbers, role)
    if role is Role.STATISTIC:  # the graph computes with it in float32
        STORED_TYPE.write(master, dtype_of(weight).name)
        ir.convenience.replace_all_uses_with(weight, master)
        return master
    with Emitter(model) as op:
        if quantized is None:
            rounded = STORED.mark(op.Cast(master, to=weight.dtype))
        else:
            rounded = _rounded(op, master, quantized)
        ir.convenience.replace_all_uses_with(weight, like(rounded, weight), replace_graph_outputs=True)
    return master


class QuantizedWeights:
    """Show quantized weights as floating-point initializers while it is decided which of them train."""

    def __init__(self, model: ir.Model) -> None:
        self._model = model
        self._found: dict[str, Quantized] = {}
        self._whole: dict[str, tuple[ir.Value, int]] = {}  # scales of integers in floats, and their axes
        for x in filter(is_weight, model.graph.initializers.values()):
            origin = Origin.read(x)
            is_recorded = origin is not None and origin.certain and origin.named and origin.trains
            if not is_recorded and (scale := evidence.scale_of_whole(x)) is not None:
                self._whole[name_of(x)] = scale
                QUANTIZED.write(x, name_of(x))
        for integers, nodes in _readers(model.graph).items():
            if _why_it_stays(integers, nodes):
                continue
            assert integers.const_value is not None
            name = name_of(integers)
            self._found[name] = quantized = Quantized(integers.const_value, nodes[0])
            shown = ir.val(name, const_value=quantized.shown(name))
            metadata.copy(integers, shown)
            QUANTIZED.write(shown, name)
            del model.graph.initializers[name]
            model.graph.register_initializer(shown)
            for node in nodes:
                ir.convenience.replace_all_uses_with(node.outputs[0], shown, replace_graph_outputs=True)
                model.graph.remove(node, safe=node is not nodes[0])  # its scale and zero point are used again

    def check_scales(self, weights: Collection[ir.Value]) -> None:
        """Raise an error if quantized weights train together with their own scales."""
        names = {x: QUANTIZED.read(x) for x in weights}
        scales = {
            name: self._whole[name][0] if name in self._whole else self._found[name].node.inputs[1]
            for name in names.values()
            if name is not None
        }
        both = {name: name_of(scale) for name, scale in scales.items() if scale in names and scale is not None}
        if both:
            raise GraphoptError(
                f"Parameters: expected quantized weights or their scales to train, found both: "
                f"{some([f'{name!r} with {scale!r}' for name, scale in both.items()], 3)}: add the names of one "
                f"kind to freeze, such as freeze={[*dict.fromkeys(both.values())][:3]}"
            )

    def promote(self, weight: ir.Value) -> ir.Value:
        """Turn an initializer into state, which the graph rounds as the file does.

        Raises:
            GraphoptError: the file stores floats of 8 bits, which are not rounded to a grid.
        """
        quantized = self._of(weight)
        if (whole := self._whole.get(name_of(weight))) is not None:
            return _promote_whole(self._model, weight, *whole)
        if quantized is not None and quantized.integers.dtype.is_floating_point():
            raise GraphoptError(
                f"weight {name_of(weight)!r}: expected integers behind a DequantizeLinear, found "
                f"{quantized.integers.dtype.name.lower()}: freeze it, or train the file from before the quantization"
            )
        return promote_with_master(self._model, weight, Role.PARAMETER, quantized)

    def restore(self) -> None:
        """Write the integers of the weights that do not train back."""
        for weight in list(self._model.graph.initializers.values()):
            if (quantized := self._of(weight)) is not None:
                integers = ir.val(name_of(weight), const_value=quantized.integers)
                metadata.copy(weight, integers)
                with Emitter(self._model) as op:
                    restored = _dequantize(op, integers, quantized.node)
                replace_by(self._model, weight, like(restored, weight))
                self._model.graph.register_initializer(integers)
        for quantized in self._found.values():
            for i in range(len(quantized.node.inputs)):
                quantized.node.replace_input_with(i, None)

    def _of(self, weight: ir.Value) -> Quantized | None:
        name = QUANTIZED.read(weight)
        QUANTIZED.remove(weight)
        return None if name is None else self._found.get(name)


def staying(graph: ir.Graph) -> Iterator[tuple[str, str]]:
    """Yield the integer initializers that DequantizeLinear nodes read and no master trains, and why."""
    for x, nodes in _readers(graph).items():
        if why := _why_it_stays(x, nodes):
            yield name_of(x), why


def _readers(graph: ir.Graph) -> dict[ir.Value, list[ir.Node]]:
    """Return the integer initializers that DequantizeLinear nodes read, with these nodes."""
    readers: dict[ir.Value, list[ir.Node]] = defaultdict(list)
    for node in graph:
        x = node.inputs[0] if node.op_type == DEQUANTIZE and node.domain == "" else None
        if x is not None and x.is_initializer() and not x.is_graph_input() and not x.is_graph_output():
            readers[x].append(node)
    return readers


def _why_it_stays(x: ir.Value, nodes: Sequence[ir.Node]) -> str:
    """Return why integers have no master, or an empty text."""
    first = nodes[0]
    scale = constant_of(first.inputs[1])
    if scale is None or not is_dequantized(first):
        return "its scale is computed"
    alike = all([*node.inputs] == [*first.inputs] and node.attributes == first.attributes for node in nodes)
    if not alike or len(x.uses()) != len(nodes):
        return "nodes read it in several ways"
    steps = scale.astype(np.float32)
    return "" if np.isfinite(steps).all() and steps.all() else "its scale is 0 or not finite"


def _declare(model: ir.Model, weight: ir.Value, numbers: np.ndarray, role: Role) -> ir.Value:
    """Declare state with the name and the notes of an initializer, which it replaces."""
    name = name_of(weight)
    del model.graph.initializers[name]
    weight.const_value = None  # renaming a value renames its tensor, which may belong to the caller
    weight.name = f"{name}/stored"
    master = state.declare(model, name, numbers, role)
    metadata.copy(weight, master)
    return set_role(master, role)


def _promote_whole(model: ir.Model, weight: ir.Value, scale: ir.Value, axis: int) -> ir.Value:
    """Turn whole numbers in floats into state, which the graph divides by their scale and rounds."""
    whole, steps = (array(x).astype(np.float32) for x in (weight, scale))
    steps = steps.ravel()
    spread = steps.reshape([-1 if i == axis else 1 for i in range(whole.ndim)])
    master = _declare(model, weight, whole * spread, Role.PARAMETER)
    with Emitter(model) as op:
        zero = op.constant(np.zeros(steps.shape, np.int8))
        integers = op.QuantizeLinear(master, op.constant(steps), zero, axis=axis)
        integers.shape = master.shape
        rounded = STORED.mark(op.DequantizeLinear(integers, op.constant(np.ones((), np.float32))))
        ir.convenience.replace_all_uses_with(weight, like(op.cast(rounded, weight.dtype), weight))
    return master


def _rounded(op: Emitter, master: ir.Value, quantized: Quantized) -> ir.Value:
    """Emit the numbers that the integers nearest to a master stand for; the gradient passes to the master."""
    node, dtype = quantized.node, quantized.integers.dtype
    _, scale, zero = [*node.inputs, None][:3]
    scale, zero = _following(op, master, quantized) or (given(scale), zero)
    if dtype.itemsize < 4:
        layout = {name: node.attributes[name] for name in ("axis", "block_size") if name in node.attributes}
        extra = {} if zero is not None else {"output_dtype": dtype}
        integers = op.QuantizeLinear(master, op.cast(scale, _WIDE), zero, **extra, **layout)
        integers.shape = master.shape
        return _dequantize(op, STORED.mark(integers), node, scale, zero)
    steps = constant_of(scale)
    assert steps is not None
    size = op.constant(broadcastable(node, steps.astype(np.float32), quantized.numbers.shape))
    integers = op.Cast(op.Clip(op.Round(master / size), *INT32_RANGE), to=dtype)
    integers.shape = master.shape
    rounded = _dequantize(op, STORED.mark(integers), node)
    passed = master - STOP_GRADIENT.mark(op.Identity(master))
    return InferenceForm(same_as=0).write(rounded + op.CastLike(passed, rounded))


def _following(op: Emitter, master: ir.Value, quantized: Quantized) -> tuple[ir.Value, Input] | None:
    """Emit the scale and the zero point by which quantize_dynamic rounds a weight; None if the file has others.

    The scale of the file is multiplied by what the range has grown, so that it is the file's before the first step.
    """
    node, dtype = quantized.node, quantized.integers.dtype
    scale, zero = given(node.inputs[1]), [*node.inputs, None][2]
    steps, points = constant_of(scale), 0 if zero is None else constant_of(zero)
    if not FOLLOWS.is_set(node) or steps is None or points is None or not _is_own(scale):
        return None
    w, q = quantized.numbers, quantized.integers.numpy().astype(np.int64)
    axis = node.attributes.get_int("axis", 1) % w.ndim
    axes = tuple(i for i in range(w.ndim) if steps.size == 1 or i != axis)
    q = q - broadcastable(node, np.array(points, np.int64), q.shape)
    low, high = q.min(axes, initial=0), q.max(axes, initial=0)
    is_symmetric = dtype is ir.DataType.INT8 and not np.any(points) and low.min() > -128
    levels = np.maximum(high, -low) if is_symmetric else high - low
    if scale.dtype is not _WIDE or levels.min(initial=255) < max(levels.max(initial=0) - 1, _FEWEST):
        return None
    if not is_symmetric and (np.shape(points) != steps.shape or not _is_own(zero)):
        return None
    if is_symmetric:
        span, before = op.ReduceMax(op.Abs(master), [*axes], keepdims=0), np.abs(w).max(axes)
    else:
        least = op.Min(op.ReduceMin(master, [*axes], keepdims=0), 0.0)
        span = op.Max(op.ReduceMax(master, [*axes], keepdims=0), 0.0) - least
        before = w.max(axes, initial=0) - w.min(axes, initial=0)
    grown = op.Max(span / op.constant(before), _LEAST) * op.constant(steps)
    new = STOP_GRADIENT.mark(STORED.mark(grown))
    STORED_AS.write(producer_of(new), name_of(scale))
    if is_symmetric:
        return new, zero
    first = np.float32(points + low)
    point = STORED.mark(op.Cast(op.Clip(op.Round(least / new) * -1.0 + op.constant(first), *_LIMITS[dtype]), to=dtype))
    STORED_AS.write(producer_of(point), name_of(given(zero)))
    return new, point


def _is_own(x: Input) -> bool:
    """Return whether one node alone reads an initializer."""
    return x is not None and x.is_initializer() and len(x.uses()) == 1


def _dequantize(op: Emitter, integers: ir.Value, node: ir.Node, *by: Input) -> ir.Value:
    """Emit a DequantizeLinear like another, by its scale and zero point or by others."""
    inputs, attributes = [integers, *(by or node.inputs[1:])], dict(node.attributes)
    return op.call_op(DEQUANTIZE, inputs, attributes, name=node.name)  # type: ignore[return-value]

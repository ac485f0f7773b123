"""Simulate integers in the forward pass, so that a model trains for its form in few bits."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import FAKE, FROZEN, RANGE, STOP_GRADIENT
from graphopt.graph.operators import RECURRENT, SHAPE_READERS
from graphopt.graph.postprocessing import STORED, STORED_AS
from graphopt.graph.rewriting import Pass, Pattern, Read
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import fixed, given, is_floating, like, name_of, producer_of, redirect, swap
from graphopt.intervals import within
from passes.parameters import origin_in_file
from passes.quantization import placement
from passes.quantization.calibration import ranges_of
from passes.quantization.fold import FoldBatchNormalization, drop_last, pool_means, write_apart
from passes.quantization.observers import Observer
from passes.quantization.placement import Product
from passes.quantization.quantize_weights import chosen_weights
from passes.weights.initializers import free_name, register
from passes.weights.masters import INT32_RANGE

_LEAST = float(np.finfo(np.float32).eps)  # of a scale, as PyTorch's observers
_LIMITS = {"int8": 127, "int4": 7}
_BIAS = 2.0**30  # of the int32 range, half
QUANTIZERS = ("DequantizeLinear", "DynamicQuantizeLinear", "QuantizeLinear")


@dataclass(frozen=True)
class FakeQuantize(Pass):
    """Round weights and activations to integers and back, as the model's form in few bits will.

    A weight w of a product becomes s round(w / s), where s is max |w| / `weight_range` of each output, or of each
    block. An activation x becomes s (clip(round(x / s) + z, 0, 255) - z), where s and z follow from the range of x;
    biases become 32-bit integers. A table of embeddings becomes 8-bit integers with one scale, also where a product
    multiplies by it, as a tied embedding; a bias of such a product stays in floats. The weights of a recurrence have a
    scale for each output, or for each of two directions, and are multiplied in floats. Gradients pass rounding straight
    through, and are 0 outside of the range (Jacob et al. 2018, https://arxiv.org/abs/1712.05877).
    `Executor.trained()` returns the model in integers, and `trained(quantized=False)` in floats. Activations are
    rounded where ONNX Runtime then computes on integers. A weight with an adapter, such as `LoRA`, is rounded
    after the adapter's change; both models have the merged weight.

    Ranges are learnt from the training rows: `graphopt.adapt` and recipes set them. While the model trains, they follow
    the batches; `TrainingMode`, which the standard pipeline has, gives them this form.

    Args:
        weights: the integers that weights become. The runtime has no integer kernel for 4-bit weights: with activations
            in integers, they compute slower than floats, so set `activations=None` beside them.
        block: how many numbers along the summed axis of a matrix share a scale; by default, all of an output.
        weight_range: the largest integer of a weight, 127 or, for processors that add pairs of products in 16 bits
            (AVX2 without VNNI), 63; by default, the largest of `weights`.
        activations: the integers that activations become; None leaves them and the biases as they are.
        ranges: the smallest and the largest number of each activation, by name. None learns them.
        calibrate: the ranges that are learnt: the smallest and the largest numbers, percentiles 0.001 and 99.999, or
            the range whose histogram has the least relative entropy.
        bias: round biases as the runtime does.
        observer: how ranges follow training: as moving averages of the smallest and the largest number of each batch
            (`ema`), by scales that train (`lsq`: Esser et al. 2020, https://arxiv.org/abs/1902.08153), or not at all.
            `auto` is `lsq` beside 4-bit weights, and `ema` beside 8-bit ones.
        momentum: the share that a moving average keeps of itself in a step.
        freeze_after: the number of steps after which moving averages stay as they are; None for never.
        fold: first fold BatchNormalization into products, as `FoldBatchNormalization` does.
        pattern: quantize only products whose weights have these names, shell-style, one or several.
        leave_out: do not quantize these.

    Raises:
        GraphoptError: the model is quantized already, or has no such product in float32; an option has another value;
            there are no ranges, or those of other tensors.

    >>> data, model = graphopt.data.digits(), models.mlp((1, 8, 8), 10)
    >>> steps = {"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-3)}
    >>> pipeline = graphopt.standard(quantize=passes.FakeQuantize(), **steps)
    >>> executor = graphopt.Executor(graphopt.adapt(pipeline, model, data)(model))
    >>> records = graphopt.fit(executor, data, epochs=1)
    >>> [x.data_type for x in executor.trained().graph.initializer if x.name == "layers.1.weight"]  # int8
    [3]
    """

    alters: ClassVar[str] = "rounds weights and activations"
    follows: ClassVar[bool] = True

    weights: Literal["int8", "int4"] = "int8"
    block: int | None = within("[2, inf)", None, whole=True)
    weight_range: int | None = None
    activations: Literal["uint8", "int8"] | None = "uint8"
    ranges: Mapping[str, tuple[float, float]] | None = field(default=None, repr=False)
    calibrate: Literal["minmax", "percentile", "entropy"] = "minmax"
    bias: bool = True
    observer: Literal["auto", "ema", "lsq"] | None = "auto"
    momentum: float = within("[0, 1)", 0.99)
    freeze_after: int | None = within("[0, inf)", None, whole=True)
    fold: bool = True
    pattern: Pattern = None
    leave_out: Pattern = None

    def __post_init__(self) -> None:
        super().__post_init__()
        limit = _LIMITS[self.weights]
        if self.weight_range is not None and not 1 <= self.weight_range <= limit:
            raise _wrong("weight_range", f"1 to {limit}, the largest {self.weights}", self.weight_range)
        if self.ranges is not None:
            ranges = {str(name): _range(name, x) for name, x in self.ranges.items()}
            object.__setattr__(self, "ranges", ranges)

    @property
    def learns(self) -> bool:
        return self.ranges is None and self.activations is not None

    def adapted(self, model: ir.Model, read: Read) -> FakeQuantize:
        model = model.clone()
        self._prepare(model)
        rounded = placement.tensors(model.graph, self._nodes(self._products(model)), others=not self.pattern)
        names = [*dict.fromkeys(map(name_of, rounded.values()))]
        return replace(self, ranges=ranges_of(self.calibrate, model, names, read))

    def alone(self, model: ir.Model) -> dict[str, FakeQuantize]:
        """Return by the name of each weight the pass that rounds its product alone, for a model before the pass."""
        model = model.clone()
        self._prepare(model)
        found = {}
        for product in self._products(model):
            rounded = placement.tensors(model.graph, self._nodes([product]), others=False)
            names = {name_of(root) for root in rounded.values()}
            ranges = {name: x for name, x in (self.ranges or {}).items() if name in names}
            name = name_of(product.weight)
            found[name] = replace(self, pattern=glob.escape(name), leave_out=None, ranges=ranges)
        return found

    def requires(self, model: ir.Model) -> None:
        self.precedes_gradient(model)
        if self.learns:
            raise GraphoptError(
                "FakeQuantize learns from training rows: run graphopt.adapt(pipeline, model, data), or set ranges"
            )

    def rewrite(self, model: ir.Model) -> None:
        self._prepare(model)
        products = self._products(model)
        rounded: dict[ir.Value, ir.Value] = {}
        is_alone = self.block is not None and self.activations is None
        if self.activations is not None:
            rounded = placement.tensors(model.graph, self._nodes(products), others=not self.pattern)
        self._check_ranges(map(name_of, rounded.values()))
        with Emitter(model) as op:
            writer = _Writer(model, op, self)
            for x, root in rounded.items():
                writer.round_activation(x, root)
            for product in products:
                writer.round_weight(write_apart(op, product) if is_alone else product)
        model.graph.sort()

    def _prepare(self, model: ir.Model) -> None:
        """Write a model in the operators that have integer kernels."""
        ensure_typed(model)
        if self.fold:
            FoldBatchNormalization().rewrite(model)
        if self.activations is not None:
            pool_means(model)
            drop_last(model)

    def _products(self, model: ir.Model) -> list[Product]:
        """Return the products whose weights are to be rounded."""
        for node in model.graph:
            if node.op_type in QUANTIZERS:
                raise GraphoptError(
                    f"FakeQuantize: expected a model of floating-point numbers, found {node.op_type} node "
                    f"{node.name!r}: it is quantized already: leave quantize out to train it as it is, or quantize the "
                    "float file"
                )
        read = {
            x.read: x
            for x in placement.products(model.graph)
            if x.axis is not None or self.pattern or origin_in_file(x.weight).trains  # no cosines of positions
        }
        found = [*read.values()]
        weights = [x.weight for x in found]
        ours = set(chosen_weights(self, weights, self.pattern, self.leave_out, trained=False))
        chosen = [x for x in found if x.weight in ours]
        narrow = next((x.weight for x in chosen if x.weight.dtype is not ir.DataType.FLOAT), None)
        if narrow is not None:
            raise GraphoptError(
                f"FakeQuantize: expected weights of float32, found {narrow.dtype} in {name_of(narrow)!r}: convert the "
                "model to float32"
            )
        if not chosen:
            raise GraphoptError(
                f"FakeQuantize: expected products with weights, {', '.join(_PRODUCTS)}, found none: leave quantize out"
            )
        return chosen

    @staticmethod
    def _nodes(products: Iterable[Product]) -> list[ir.Node]:
        return [node for product in products for node in product.products]

    def _check_ranges(self, names: Iterable[str]) -> None:
        """Raise an error unless there are ranges of these activations, and of no others."""
        needed = [*dict.fromkeys(names)]
        given = self.ranges or {}
        wrong = [name for name in needed if name not in given] or [name for name in given if name not in needed]
        if wrong and self.activations is not None:
            raise GraphoptError(
                f"FakeQuantize: ranges: expected those of {some([*map(repr, needed)])}, found "
                f"{'none of' if wrong[0] in needed else 'one of'} {wrong[0]!r}: leave ranges out to learn them"
            )


_PRODUCTS = [op_type for op_type, row in placement.ROWS.items() if row.channel is not None]


class _Writer:
    """Write Q and DQ around activations, weights and biases of a model."""

    def __init__(self, model: ir.Model, op: Emitter, options: FakeQuantize) -> None:
        self._model, self._op, self._options = model, op, options
        self._taken = set(ir.convenience.create_value_mapping(model.graph))
        self._points: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}  # scales and zero points by the root
        self._scales: dict[ir.Value, ir.Value] = {}  # of rounded activations

    def round_activation(self, x: ir.Value, root: ir.Value) -> None:
        """Make the readers of an activation read its rounded numbers."""
        options = self._options
        uses = [(node, index) for node, index in x.uses() if node.op_type not in SHAPE_READERS]
        if root not in self._points:
            self._points[root] = self._point(name_of(root))
        scale, zero = self._points[root]
        integers = self._integers(x, scale, zero)
        rounded, quantizer = like(self._floats(integers, scale, zero), x), producer_of(integers)
        if x is not root:
            rounded = self._straight(rounded, x)  # it is rounded already
        elif (kind := options.observer) is not None:
            kind = kind if kind != "auto" else "ema" if options.weights == "int8" else "lsq"
            Observer(kind, options.momentum, options.freeze_after).write(quantizer)
        redirect(uses, rounded)
        if x.is_graph_output() and x is root:
            swap(x, rounded)
            quantizer.replace_input_with(0, x)
        self._scales[rounded] = scale

    def _point(self, name: str) -> tuple[ir.Value, ir.Value]:
        """Emit the scale and the zero point of an activation from its range."""
        op = self._op
        assert self._options.ranges is not None
        low, high = (
            self._range(f"{name}.{end}", end, number)
            for end, number in zip(("low", "high"), self._options.ranges[name], strict=True)
        )
        least, most = op.Min(low, 0.0), op.Max(high, 0.0)
        step = (most - least) / 255.0
        scale = STOP_GRADIENT.mark(op.Max(step, _LEAST))
        zero = op.Clip(op.Round(op.Neg(least) / op.Max(step, _LEAST)), 0.0, 255.0)  # stays if the scale trains
        dtype = ir.DataType[str(self._options.activations).upper()]
        zero = op.Cast(zero - 128.0 if dtype is ir.DataType.INT8 else zero, to=dtype)
        return self._stored(scale, f"{name}.scale"), self._stored(zero, f"{name}.zero_point")

    def _range(self, name: str, end: str, number: float) -> ir.Value:
        value = register(self._model, name, np.array(number, np.float32), self._taken)
        self._taken.add(name_of(value))
        RANGE.write(value, end)
        FROZEN.set(value)
        return value

    def round_weight(self, product: Product) -> None:
        """Make a node read its weight, and a product its bias, as integers stand for them; of a table, 8-bit rows."""
        node, w, op, options = product.node, product.read, self._op, self._options
        axis, sizes, bias, uses = product.axis, _sizes(w), [*node.inputs, None, None][2], list(w.uses())
        kind = "int8" if axis is None else options.weights
        limit = (kind == options.weights and options.weight_range) or _LIMITS[kind]
        layout = {} if axis is None else {"axis": product.axis}
        is_blocked = options.block is not None and node.op_type in ("Gemm", "MatMul")
        if axis is None or not is_blocked:
            axes = [other for other in range(len(sizes)) if other != axis]
            largest = op.ReduceMax(op.Abs(w), axes, keepdims=0)
        else:
            largest = self._largest_of_blocks(w, 1 - axis, sizes)
            layout = {"axis": 1 - axis, "block_size": options.block}
        scale, step = op.Max(largest / float(limit), _LEAST), None
        if options.bias and not is_blocked and node.op_type not in RECURRENT and fixed(bias) is not None:
            vectors = [[sizes[axis or 0]], [1, sizes[axis or 0]]]
            step = self._scales.get(placement.undropped(given(node.inputs[0])))
            step = step if is_floating(bias) and _sizes(given(bias)) in vectors else None
        if step is not None:
            is_shared = len(given(bias).uses()) > 1  # by a product with another scale
            flat = op.Reshape(bias, [-1]) if len(_sizes(given(bias))) != 1 else given(bias)
            scale = op.Max(scale, op.Abs(flat) / (step * _BIAS))
        scale = self._stored(STOP_GRADIENT.mark(scale), f"{name_of(product.weight)}.scale")
        zero = op.constant(np.zeros(_sizes(scale), np.int8)) if kind == "int8" else None
        integers = STORED.mark(self._integers(w, scale, zero, **layout))
        if axis is None:
            for reader, x in product.readers:
                self._read_table(reader, x, integers, scale, zero)
        else:
            rounded = self._floats(integers, scale, zero, **layout)
            redirect(uses, self._straight(rounded, w))
        if step is not None:
            node.replace_input_with(2, self._round_bias(given(bias), flat, step * scale, is_shared))

    def _read_table(
        self, node: ir.Node, x: ir.Value, integers: ir.Value, scale: ir.Value, zero: ir.Value | None
    ) -> None:
        """Make a node read a table, or its transpose, as its integers stand for it: rows, or all of it."""
        op, view, q = self._op, x.producer(), integers
        if view is not None:
            q = op.call_op(view.op_type, [integers], dict(view.attributes))  # type: ignore[assignment]
        if node.op_type != "Gather":
            node.replace_input_with(1, self._straight(self._floats(q, scale, zero), x))
            return
        rows = like(op.Gather(x, node.inputs[1]), node.outputs[0])
        swap(node.outputs[0], self._straight(self._floats(op.Gather(q, node.inputs[1]), scale, zero), rows))
        op.graph.remove(node, safe=True)

    def _largest_of_blocks(self, w: ir.Value, axis: int, sizes: list[int]) -> ir.Value:
        """Emit the largest magnitude in each block along an axis of a matrix; the last block may be shorter."""
        op, block = self._op, self._options.block or 0
        count = math.ceil(sizes[axis] / block)
        pads = [0, 0, 0, 0]
        pads[2 + axis] = count * block - sizes[axis]
        padded = op.Pad(op.Abs(w), pads) if any(pads) else op.Abs(w)
        shape = [*sizes]
        shape[axis : axis + 1] = [count, block]
        return op.ReduceMax(op.Reshape(padded, shape), [axis + 1], keepdims=0)

    def _round_bias(self, bias: ir.Value, flat: ir.Value, scale: ir.Value, is_shared: bool) -> ir.Value:
        """Emit a bias as 32-bit integers of a scale stand for it; the gradient passes to the bias."""
        op = self._op
        name = name_of(bias)
        scale = self._stored(STOP_GRADIENT.mark(scale), f"{name}.scale")
        steps = [op.Div(flat, scale)]
        steps.append(op.Round(steps[-1]))
        steps.append(op.Clip(steps[-1], *INT32_RANGE))
        integers = op.Cast(steps[-1], to=ir.DataType.INT32)
        STORED.mark(integers)
        if is_shared:
            STORED_AS.write(producer_of(integers), self._free(f"{name}.integers"))
        rounded = op.DequantizeLinear(integers, scale, axis=0)
        for y in [*steps, integers, rounded]:
            FAKE.mark(y)
        return self._straight(rounded, flat)

    def _straight(self, rounded: ir.Value, x: ir.Value) -> ir.Value:
        """Emit rounded numbers whose gradient passes to the numbers themselves: y = r + (x - x), with r constant."""
        op = self._op
        passed = x - STOP_GRADIENT.mark(op.Identity(x))
        return like(InferenceForm(same_as=0).write(STOP_GRADIENT.mark(rounded) + passed), x)

    def _integers(self, x: ir.Value, scale: ir.Value, zero: ir.Value | None, **layout: Any) -> ir.Value:
        extra = {} if zero is not None else {"output_dtype": ir.DataType.INT4}
        integers = FAKE.mark(self._op.QuantizeLinear(x, scale, zero, **extra, **layout))
        integers.shape = x.shape
        return integers

    def _floats(self, integers: ir.Value, scale: ir.Value, zero: ir.Value | None, **layout: Any) -> ir.Value:
        return FAKE.mark(self._op.DequantizeLinear(integers, scale, zero, **layout))

    def _stored(self, value: ir.Value, name: str) -> ir.Value:
        """Mark what the trained model stores as a constant, under a name."""
        STORED.mark(value)
        STORED_AS.write(producer_of(value), self._free(name))
        return value

    def _free(self, name: str) -> str:
        free = free_name(name, self._taken)
        self._taken.add(free)
        return free


def _sizes(w: ir.Value) -> list[int]:
    assert w.shape is not None
    return list(w.shape.numpy())


def _range(name: object, numbers: Sequence[float]) -> tuple[float, float]:
    try:
        low, high = map(float, numbers)
    except (TypeError, ValueError):
        low = high = math.nan
    if not (math.isfinite(low) and math.isfinite(high) and low <= high):
        raise _wrong("ranges", f"two finite numbers of {name!r}, the smaller one first", numbers)
    return low, high


def _wrong(name: str, expected: str, found: object) -> GraphoptError:
    return GraphoptError(f"FakeQuantize({name}={found!r}): expected {expected}, found {found!r}")

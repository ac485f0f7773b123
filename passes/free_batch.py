"""Free the fixed batch of a model: prove that its rows do not depend on each other, and leave their number open.

A value is *of rows* along an axis if that axis consists of a block of equal length for each row of the batch, and each
block depends on its row only. Inputs are of rows along their first axis. Every operator that reads such values has a
rule below, which returns the axis of its results, or refuses it.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.declarations import forget
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import OF_BATCH
from graphopt.graph.operators import (
    ELEMENTWISE_OPERATORS,
    INITIAL_STATES,
    POOLS,
    RANDOM,
    RECURRENT,
    VIEWS,
    full_attributes,
)
from graphopt.graph.roles import data_inputs
from graphopt.graph.shapes import infer
from graphopt.graph.storage import message
from graphopt.graph.traversal import captured, sort, values_read
from graphopt.graph.values import (
    constant_before,
    constant_of,
    dims_of,
    dtype_of,
    given,
    is_floating,
    name_of,
    rank,
)

BATCH = "batch"  # the name of the freed dimension
_Axes = dict[ir.Value, int]  # of values of rows
Dims = tuple[int | ir.SymbolicDim, ...]
Edit = Callable[[Emitter], None]

# Operators that compute each place of the first axis of their first input by itself; their other inputs are weights.
_OF_FIRST = POOLS | {
    *("BatchNormalization", "Conv", "ConvTranspose", "DepthToSpace", "GlobalAveragePool", "GlobalLpPool"),
    *("GlobalMaxPool", "GroupNormalization", "InstanceNormalization", "LRN", "SpaceToDepth"),
}
_ALONG_AN_AXIS = {"ArgMax", "ArgMin", "Hardmax", "LogSoftmax", "Softmax", "Split", "TopK"}


def free_batch(model: ir.Model) -> None:
    """Replace the fixed first dimension of a model's inputs by a symbol. Shapes must be inferred and folded.

    Raises:
        GraphoptError: an operator is not known to compute each row from that row alone, or the runtime computes
            something else for two batches together than for one after the other.
    """
    inputs = [x for x in data_inputs(model) if x.shape is not None and len(x.shape)]
    sizes = {size for x in inputs if isinstance(size := dims_of(x)[0], int)}
    if not sizes:
        return
    if len(sizes) > 1:
        shapes = ", ".join(f"{x.name!r} of shape {x.shape}" for x in inputs)
        raise GraphoptError(f"batch='free': expected inputs of one batch, found {shapes}")
    (rows,) = sizes
    before, axes, edits = message(model), dict.fromkeys(inputs, 0), list[Edit]()
    try:
        _walk(model, axes, edits, rows)
    except _Mixed as problem:
        raise GraphoptError(f"batch='free': {problem}: export the model with a dynamic batch") from problem
    with Emitter(model) as op:
        for edit in edits:
            edit(op)
    sort(model.graph)
    for x in inputs:
        x.shape = ir.Shape([BATCH, *dims_of(x)[1:]])
    for y in axes:
        if y not in inputs:
            y.shape = None
    infer(model)
    _compare(before, message(model), inputs, [axes.get(y) for y in model.graph.outputs], rows)


def name_squeezed_axes(model: ir.Model) -> bool:
    """Name the axes that a Squeeze without axes removes, such as PyTorch's `squeeze()`: those that always have size 1.

    The file removes an open axis, too, if its size is 1. If the only open axis is the first one of an input, it stays
    here, if all that follows is proved to treat each place of this axis by itself: results then differ in their shapes
    only. Otherwise, a warning names the node.

    Returns: whether the model has changed.
    """
    if next(_without_axes(model), None) is None:
        return False
    trial = model.clone()
    named = _name_all(trial)
    try:
        for node in named:
            y = node.outputs[0]
            (axis,) = (i for i, size in enumerate(dims_of(y)) if not isinstance(size, int))
            _walk(trial, {y: axis}, [])
    except _Mixed as problem:
        warnings.warn(
            f"Squeeze node {name_of(node)!r} names no axes, so that it also removes the batch if its size is 1, and "
            f"{problem}: export it with axes, such as squeeze(-1) in PyTorch",
            stacklevel=2,
        )
        return False
    _name_all(model)
    return True


@dataclass(frozen=True)
class Rows:
    """Hold where the rows of a batch are in values that depend on inputs row by row.

    Args:
        axes: the axis along which a value has a block for each row.
        lengths: the lengths of blocks.
        merged: values whose first axis holds the axes of these sizes, of which rows are the last.
        fixed: values that depend on no input, and those that depend on their sizes only.
    """

    axes: _Axes
    lengths: dict[ir.Value, int]
    merged: dict[ir.Value, Dims]
    fixed: set[ir.Value]

    def has(self, x: ir.Value | None) -> bool:
        return x in self.axes or x in self.merged


def values_of_rows(
    model: ir.Model, inputs: Sequence[ir.Value], left: Collection[ir.Node | None] = ()
) -> dict[ir.Value, bool]:
    """Return the values that depend on inputs only, row by row, and whether a value has one place for each row, first.

    Nothing in them is drawn or gathered from a batch.

    Args:
        inputs: inputs of the graph, whose first axis is the rows.
        left: nodes to leave out, with what depends on them.
    """
    rows = places_of_rows(model, inputs, left)
    return {y: not axis and rows.lengths[y] == 1 for y, axis in rows.axes.items()}


def places_of_rows(
    model: ir.Model,
    inputs: Sequence[ir.Value],
    left: Collection[ir.Node | None] = (),
    constant: Collection[ir.Value] = (),
    drawn: bool = False,
) -> Rows:
    """Return where rows are in the values that depend on inputs row by row.

    Args:
        inputs: inputs of the graph, whose first axis is the rows.
        left: nodes to leave out, with what depends on them.
        constant: other inputs, on which values may depend.
        drawn: whether values may depend on masks that are drawn for each row, as those of Dropout.
    """
    inputs = [x for x in inputs if x.shape is not None and len(x.shape)]
    axes, lengths = dict.fromkeys(inputs, 0), dict.fromkeys(inputs, 1)
    fixed = {x for x in model.graph.initializers.values() if not x.is_graph_input()} | {*constant}
    sizes: set[ir.Value] = set()  # which depend on the sizes of inputs alone
    merged: dict[ir.Value, Dims] = {}  # whose first axis holds several, of which rows are the last
    for node in model.graph:
        read = [x for x in values_read(node) if x not in fixed]
        if node.op_type == "Reshape" and node.inputs[0] in fixed and read and InferenceForm.read(node.outputs[0]):
            fixed.update(node.outputs)  # a scale of `dequantize_late`, which waits for rows, and keeps its numbers
            continue
        varies = node.op_type in RANDOM or (any(map(InferenceForm.read, node.outputs)) and not drawn)
        if node in left or varies or OF_BATCH.is_set(node):
            continue
        if not read:
            fixed.update(node.outputs)
            continue
        if node.op_type in ("Shape", "Size") or all(x in sizes for x in read):
            place = _place_of_copies(node, dims_of(inputs[0])[0], fixed, drawn) if inputs else None
            sizes.update(node.outputs if place is None else ())
            axes.update({} if place is None else {node.outputs[0]: place})
            lengths[node.outputs[0]] = 1
            continue
        if node.op_type == "Reshape" and read[-1] in sizes:
            read = read[:1]
        batch = dims_of(inputs[0])[0] if inputs else 1
        if node.op_type == "Reshape" and (dims := _leading(node, axes, lengths, merged, batch)):
            if node.inputs[0] in merged:
                axes[node.outputs[0]], lengths[node.outputs[0]] = len(dims) - 1, 1
            else:
                merged[node.outputs[0]] = dims
        elif len(read) == 1 and read[0] in merged and _is_of_first(node, read[0]):
            merged[node.outputs[0]] = merged[read[0]]
        elif all(x in axes for x in read):
            rule = _Rule(node, axes, full_attributes(node, model.opset_imports), [], lengths)
            with suppress(_Mixed):
                axes.update(zip(node.outputs, rule.axes_of_outputs(), strict=False))
                lengths.update(dict.fromkeys(node.outputs, rule.length or lengths[read[0]]))
    return Rows(axes, lengths, merged, fixed | sizes)


def _leading(
    node: ir.Node,
    axes: _Axes,
    lengths: Mapping[ir.Value, int],
    merged: Mapping[ir.Value, Dims],
    batch: int | ir.SymbolicDim,
) -> Dims:
    """Return the axes up to that of rows that a Reshape merges into its first axis, or restores; () of others.

    What a block holds beside a row, such as the heads of attention, stands behind the row then.
    """
    x, y = given(node.inputs[0]), node.outputs[0]
    if x in merged:
        return merged[x] if dims_of(y)[: len(merged[x])] == merged[x] else ()
    axis, length = axes.get(x, 0), lengths.get(x, 1)
    rests = (length, *dims_of(x)[axis + 1 :]), dims_of(y)[1:]
    if not axis or not all(isinstance(dim, int) for rest in rests for dim in rest):
        return ()
    leading = (*dims_of(x)[:axis], dims_of(x)[axis] if length == 1 else batch)
    return leading if math.prod(rests[0]) == math.prod(rests[1]) else ()


def _is_of_first(node: ir.Node, x: ir.Value) -> bool:
    """Return whether a node computes each place of the first axis of `x` from it and weights alone."""
    y, weights = node.outputs[0], [v for v in node.inputs if v is not None and v is not x]
    if node.op_type in ELEMENTWISE_OPERATORS:
        return all(rank(v) < rank(x) or dims_of(v)[0] == 1 for v in weights) and rank(y) == rank(x)
    is_product = node.op_type in ("Gemm", "MatMul") and node.inputs[0] is x and rank(x) == 2
    transposes = node.attributes.get_int("transA", 0)
    return is_product and not transposes and rank(y) == 2 and all(rank(v) < 2 or v is node.inputs[1] for v in weights)


def _place_of_copies(
    node: ir.Node, batch: int | ir.SymbolicDim, fixed: Collection[ir.Value], drawn: bool
) -> int | None:
    """Return the axis along which a node repeats a constant for each row of an open batch; None of others.

    Args:
        drawn: whether it may draw numbers for each row, in place of a constant.
    """
    y, x = node.outputs[0], given(node.inputs[0])
    kinds = ("ConstantOfShape", "Expand", "Reshape") if drawn else ("ConstantOfShape", "Expand")
    if node.op_type not in kinds or isinstance(batch, int) or y.shape is None:
        return None
    places = [i for i, dim in enumerate(y.shape) if dim == batch]
    if node.op_type == "Expand" and places:
        own = rank(x) - rank(y) + places[0]  # its axis in what is repeated
        return places[0] if x in fixed and len(places) == 1 and (own < 0 or dims_of(x)[own] == 1) else None
    return places[0] if len(places) == 1 else None


def _without_axes(model: ir.Model) -> Iterator[ir.Node]:
    """Yield the nodes that squeeze axes of size 1 beside a batch, whose size is open."""
    batches = [[x.shape[0]] for x in model.graph.inputs if x.shape and not isinstance(x.shape[0], int)]
    for node in model.graph:
        x = node.inputs[0] if node.op_type == "Squeeze" and not node.domain else None
        is_given = len(node.inputs) > 1 and node.inputs[1] is not None
        if x is None or x.shape is None or 1 not in x.shape or is_given:
            continue
        if [size for size in x.shape if not isinstance(size, int)] in batches:
            yield node


def _name_all(model: ir.Model) -> list[ir.Node]:
    """Give each Squeeze without axes those that have size 1, which may say the shapes of others; return the nodes."""
    named = []
    while (node := next(_without_axes(model), None)) is not None:
        _name_axes(node)
        named.append(node)
        forget(model)
    return named


def _name_axes(node: ir.Node) -> None:
    """Give a Squeeze the axes of its input that have size 1."""
    (x,) = (v for v in node.inputs if v is not None)
    axes = constant_before(node, np.array([i for i, size in enumerate(dims_of(x)) if size == 1]), "axes")
    node.resize_inputs(2)
    node.replace_input_with(1, axes)


def _walk(model: ir.Model, axes: _Axes, edits: list[Edit], rows: int | None = None) -> None:
    """Add the axes of rows of all values that depend on those that are given.

    Raises:
        _Mixed: a node is not known to treat each row by itself.
    """
    for node in model.graph:
        if not any(x in axes for x in (*node.inputs, *captured(node))):
            continue
        try:
            found = _Rule(node, axes, full_attributes(node, model.opset_imports), edits).axes_of_outputs()
            for y, axis in zip(node.outputs, found, strict=False):
                length = dims_of(y)[axis] if y.shape is not None and axis < len(y.shape) else None
                if y.name and rows is not None and (not isinstance(length, int) or length % rows):
                    raise _Mixed("its result has no axis of the batch")
                axes[y] = axis
        except _Mixed as problem:
            raise _Mixed(
                f"{node.op_type} node {node.name or node.outputs[0].name!r}: expected an operator that treats each row "
                f"by itself, found another: {problem}"
            ) from problem


class _Mixed(Exception):
    """Explain why a node is not known to treat each row by itself."""


class _Rule:
    """Decide whether a node treats each row by itself, and note how it changes for any number of rows."""

    def __init__(
        self,
        node: ir.Node,
        axes: _Axes,
        attributes: dict[str, Any],
        edits: list[Edit],
        lengths: Mapping[ir.Value, int] | None = None,
    ) -> None:
        self.node, self.axes, self.attributes, self.edits = node, axes, attributes, edits
        self.lengths = lengths  # of the blocks of values, if what a row has is asked for, not how to free the batch
        self.length = 0  # of the blocks of the outputs, if it is another than that of the inputs

    def axes_of_outputs(self) -> Sequence[int]:
        """Return the axis of rows of each output."""
        node, inputs = self.node, self.node.inputs
        name, x = node.op_type, inputs[0] if inputs else None
        if node.domain or captured(node) or any(v is not None and v.shape is None for v in (*inputs, node.outputs[0])):
            raise _Mixed("it is not known how it computes")
        if name in ("Shape", "Size"):
            raise _Mixed("its result is the size of the batch")
        if name in ELEMENTWISE_OPERATORS:
            return [self._aligned(inputs)]
        if name == "MatMul":
            return [self._product(*inputs)]
        if name == "Concat":
            return [self._joined()]
        if name == "Gather":
            return [self._gathered(*inputs)]
        if name in RECURRENT:
            return self._recurrent()
        if x not in self.axes or any(other in self.axes for other in inputs[1:]):
            raise _Mixed("another input than its first depends on the batch")
        axis = self.axes[given(x)]
        if name in VIEWS:
            return [self._view(x, axis)]
        if name in ("Dropout", "Transpose"):
            order = self.attributes.get("perm", [*range(rank(x))][::-1])
            return [order.index(axis)] if name == "Transpose" else [axis, axis]
        if name in _OF_FIRST or name == "Gemm":
            return [self._of_first(axis)]
        if name in _ALONG_AN_AXIS:
            along = self.attributes["axis"] % rank(x)
            if along == axis:
                raise _Mixed("it works along the batch")
            fewer = name.startswith("Arg") and not self.attributes["keepdims"] and along < axis
            return [axis - fewer] * len(node.outputs)
        if name == "LayerNormalization":
            if self.attributes["axis"] % rank(x) <= axis:
                raise _Mixed("it normalizes over the batch")
            return [axis]
        if name.startswith("Reduce"):
            return [self._reduced(x, axis)]
        self._by_numbers(x, axis)
        return [axis]

    def _aligned(self, inputs: Sequence[ir.Value | None], from_end: int = 0) -> int:
        """Broadcast operands whose axes of rows meet, and weights that are the same for all rows."""
        y = self.node.outputs[0]
        (place, *others) = {self.axes[x] - rank(x) for x in inputs if x is not None and x in self.axes}
        if others or place >= -from_end:
            raise _Mixed("rows of one operand meet another axis of the other")
        for x in inputs:
            if x is None or (x not in self.axes and rank(x) < -place):
                continue
            if dims_of(x)[place] != (dims_of(y)[place] if x in self.axes else 1):
                raise _Mixed(f"{x.name!r} differs from row to row")
        return rank(y) + place

    def _product(self, a: ir.Value | None, b: ir.Value | None) -> int:
        a, b = given(a), given(b)
        if rank(a) == 1 or (rank(b) == 1 and (b in self.axes or self.axes[a] == rank(a) - 1)):
            raise _Mixed("it sums over the batch")
        if rank(b) == 1:
            return self.axes[a]
        if b not in self.axes and rank(a) >= 2 and self.axes[a] == rank(a) - 2:
            return rank(self.node.outputs[0]) - 2
        return self._aligned([a, b], from_end=2)

    def _joined(self) -> int:
        """Repeat weights for each row, such as the token of a class."""
        node = self.node
        whole, axis = next((x, self.axes[x]) for x in node.inputs if x in self.axes and x is not None)
        if self.attributes["axis"] % rank(whole) == axis or any(
            self.axes.get(x, axis) != axis for x in node.inputs if x
        ):
            raise _Mixed("it joins along the batch")
        for i, x in enumerate(node.inputs):
            if x is not None and x not in self.axes:
                self._repeat(i, x, axis, whole, axis)
        return axis

    def _repeat(self, index: int, x: ir.Value, axis: int, whole: ir.Value, its: int) -> None:
        """Note that an input, of which there is one for all rows, is repeated as often as another value has rows."""
        if dims_of(x)[axis] != 1:
            raise _Mixed(f"{x.name!r} differs from row to row")

        def edit(op: Emitter) -> None:
            sizes = [op.constant([1])] * rank(x)
            sizes[axis] = op.Shape(whole, start=its, end=its + 1)
            self.node.replace_input_with(index, op.Expand(x, op.Concat(*sizes, axis=0)))

        self.edits.append(edit)

    def _gathered(self, table: ir.Value | None, places: ir.Value | None) -> int:
        table, places = given(table), given(places)
        along = self.attributes["axis"] % rank(table)
        if table not in self.axes:
            return along + self.axes[places]
        axis = self.axes[table]
        if places in self.axes or along == axis:
            raise _Mixed("it looks up rows of the batch")
        return axis if axis < along else axis + rank(places) - 1

    def _recurrent(self) -> list[int]:
        """Run over sequences, whose second axis is the batch."""
        node, x = self.node, self.node.inputs[0]
        states = [i for i in INITIAL_STATES[node.op_type] if i < len(node.inputs)]
        lengths = node.inputs[4] if len(node.inputs) > 4 else None
        weights = [v for i, v in enumerate(node.inputs) if i not in (0, 4, *states)]
        if x is None or self.axes.get(x) != 1 or self.attributes["layout"]:
            raise _Mixed("it runs along the batch")
        if lengths is not None and self.axes.get(lengths) != 0:
            raise _Mixed("the lengths of its rows are not of the batch")
        if any(v in self.axes for v in weights):
            raise _Mixed("its weights depend on the batch")
        for i in states:
            state = node.inputs[i]
            if state is not None and state not in self.axes:
                self._repeat(i, state, 1, x, 1)
            elif state is not None and self.axes[state] != 1:
                raise _Mixed("its state is not of the batch")
        return [2, 1, 1]

    def _view(self, x: ir.Value, axis: int) -> int:
        """Keep the order of elements: what stands before the axis stays there, and the axis gets an open size."""
        y, node = self.node.outputs[0], self.node
        if node.op_type == "Identity":
            return axis
        moved = self._moved(x, axis)
        if moved is not None:
            return moved
        sizes = dims_of(y)
        before, place = math.prod(map(_number, dims_of(x)[:axis])), 0
        while place < len(sizes) and math.prod(map(_number, sizes[:place])) != before:
            place += 1
        if place >= len(sizes):
            raise _Mixed("it joins the batch with the axes before it")
        if self.lengths is not None:
            numbers = self.lengths[x] * math.prod(map(_number, dims_of(x)[axis + 1 :]))
            self.length, rest = divmod(numbers, math.prod(map(_number, sizes[place + 1 :])) or 1)
            if rest or not self.length:
                raise _Mixed("it cuts rows into parts")
            return place
        target = [*map(_number, sizes)]
        target[place] = 0 if place == axis and dims_of(x)[axis] == sizes[place] else -1

        def edit(op: Emitter) -> None:
            node.op_type = "Reshape"
            node.attributes.clear()
            node.resize_inputs(2)
            node.replace_input_with(1, op.constant(np.array(target, np.int64)))

        self.edits.append(edit)
        return place

    def _moved(self, x: ir.Value, axis: int) -> int | None:
        """Return the new place of an open axis that a Squeeze or Unsqueeze of others leaves; None for other nodes."""
        given = constant_of(self.node.inputs[1]) if len(self.node.inputs) > 1 else None
        is_open = not isinstance(dims_of(x)[axis], int)
        if given is None or not is_open or self.node.op_type not in ("Squeeze", "Unsqueeze"):
            return None
        if self.node.op_type == "Unsqueeze":
            made = {*(given % rank(self.node.outputs[0])).tolist()}
            return [i for i in range(rank(self.node.outputs[0])) if i not in made][axis]
        gone = {*(given % rank(x)).tolist()}
        return None if axis in gone else axis - sum(other < axis for other in gone)

    def _of_first(self, axis: int) -> int:
        node = self.node
        if axis:
            raise _Mixed("the batch is not its first axis")
        bias = node.inputs[2] if node.op_type == "Gemm" and len(node.inputs) > 2 else None
        if self.attributes.get("transA") or (bias is not None and rank(bias) == 2 and dims_of(bias)[0] != 1):
            raise _Mixed("it mixes rows")
        if self.attributes.get("training_mode"):
            raise _Mixed("it normalizes by the batch")
        return 0

    def _reduced(self, x: ir.Value, axis: int) -> int:
        given = self.node.inputs[1] if len(self.node.inputs) > 1 else None
        numbers = constant_of(given)
        if given is None and self.attributes["noop_with_empty_axes"]:
            return axis
        if numbers is None or not numbers.size or axis in numbers % rank(x):
            raise _Mixed("it reduces the batch")
        return axis if self.attributes["keepdims"] else axis - int((numbers % rank(x) < axis).sum())

    def _by_numbers(self, x: ir.Value, axis: int) -> None:
        """Judge an operator by the constants that it reads."""
        name, y = self.node.op_type, self.node.outputs[0]
        later = [None if each is None else constant_of(each) for each in self.node.inputs[1:]]
        first = None if not later or later[0] is None else later[0].ravel()
        is_apart = False
        if name == "Slice":
            axes = later[2] if len(later) > 2 else None
            is_apart = axes is not None and axis not in axes % rank(x)
        elif name == "Resize":
            is_apart = self._resized(x, axis, later)
        elif first is None:
            is_apart = False
        elif name in ("DequantizeLinear", "QuantizeLinear"):
            is_apart = later[0] is not None and later[0].ndim == 0
        elif name == "CumSum":
            is_apart = bool(first[0] % rank(x) != axis)
        elif name == "Tile":
            is_apart = bool(first[axis] == 1)
        elif name == "Pad":
            is_apart = len(first) == 2 * rank(x) and not first[axis] and not first[axis + rank(x)]
        elif name == "Expand" and len(first) == rank(x) and dims_of(x)[axis] == dims_of(y)[axis]:
            sizes = first.astype(np.int64)
            sizes[axis] = 1
            self.edits.append(lambda op: self.node.replace_input_with(1, op.constant(sizes)))
            is_apart = True
        if not is_apart:
            raise _Mixed("it works along the batch, or it is not known how it treats the batch")

    def _resized(self, x: ir.Value, axis: int, later: Sequence[np.ndarray | None]) -> bool:
        """Resize other axes. Sizes of all axes become those of the others."""
        node = self.node
        roi, scales, sizes = (*later, None, None, None)[:3]
        axes = [each % rank(x) for each in node.attributes.get_ints("axes", [*range(rank(x))])]
        if roi is not None and roi.size:
            return False
        if axis not in axes:
            return True
        if scales is not None and scales.size:
            return bool(scales[axes.index(axis)] == 1)
        if sizes is None or sizes[axes.index(axis)] != dims_of(x)[axis]:
            return False
        others = [each for each in axes if each != axis]
        kept = np.delete(sizes, axes.index(axis))

        def edit(op: Emitter) -> None:
            node.attributes.add(ir.AttrInt64s("axes", others))
            node.replace_input_with(3, op.constant(kept))

        self.edits.append(edit)
        return True


def _number(size: int | ir.SymbolicDim) -> int:
    if not isinstance(size, int):
        raise _Mixed("other sizes are open, too")
    return size


def _compare(
    before: tuple[bytes, object],
    after: tuple[bytes, object],
    inputs: Sequence[ir.Value],
    axes: Sequence[int | None],
    rows: int,
) -> None:
    """Run two batches one after the other by the model as it was, and together by the freed one."""
    import onnxruntime

    if before[1] or after[1]:
        return  # weights of 2 GB and more: the proof alone decides
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    # It ends some processes
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    sessions = [
        onnxruntime.InferenceSession(content, options, providers=["CPUExecutionProvider"])
        for content in (before[0], after[0])
    ]
    random = np.random.default_rng(0)
    feeds = {name_of(x): _drawn(random, x, rows) for x in inputs}
    halves = [{name: array[i * rows : (i + 1) * rows] for name, array in feeds.items()} for i in range(2)]
    names = [y.name for y in sessions[0].get_outputs()]
    apart = [sessions[0].run(names, half) for half in halves]
    together = sessions[1].run(names, feeds)
    for name, first, second, both, axis in zip(names, *apart, together, axes, strict=True):
        expected = first if axis is None else np.concatenate([first, second], axis)
        scale = np.abs(expected).max(initial=0) if expected.dtype.kind == "f" else 0
        if expected.shape != both.shape or not np.allclose(expected, both, 1e-3, 1e-4 * scale, equal_nan=True):
            raise GraphoptError(
                f"batch='free': output {name!r}: expected the same numbers for two batches together as for one after "
                f"the other, found others: export the model with a dynamic batch"
            )


def _drawn(random: np.random.Generator, x: ir.Value, rows: int) -> np.ndarray:
    """Return numbers for two batches; sizes that are open are 2."""
    shape = [2 * rows, *(size if isinstance(size, int) else 2 for size in dims_of(x)[1:])]
    numbers = random.uniform(0.1, 1, shape) if is_floating(x) else random.integers(0, 2, shape)
    return numbers.astype(dtype_of(x).numpy())

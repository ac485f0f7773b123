"""Replace the shapes and types that a file declares by inferred ones: exporters and builders declare wrong ones.

A declared shape stays only for outputs of custom operators, a declared type where inference finds none. Where
inference finds no rank, the declared rank stays, without its sizes: an exporter writes those of its example. A
dimension that inference gives a name of its own becomes a number, or gets the name of an input's dimension, if its
formula proves this (`graphopt.graph.sizes`).
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from graphopt.graph import shapes
from graphopt.graph.limits import are_surely_small, are_vectors_short
from graphopt.graph.message_inference import INFERENCE_ERRORS, infer_message
from graphopt.graph.metadata import Note, expect
from graphopt.graph.sizes import unify_sizes
from graphopt.graph.storage import without_weights
from graphopt.graph.traversal import subgraphs
from graphopt.graph.typed_messages import message_for_inference, shape_of, type_of, types_in
from graphopt.graph.values import name_of, size_name, size_names

Dim = int | ir.SymbolicDim
Declared = dict[ir.Value, ir.Shape]

_ROUNDS = 4  # of inference, each with the declared shapes that the one before lacked


@dataclass(frozen=True)
class Misdeclared(Note, key="graphopt.misdeclared", expected="a number of values and an example"):
    """Record how many values have wrong shapes in the file, and one of them with both shapes."""

    count: int = 0
    example: str = ""

    def check(self) -> None:
        expect(0 <= self.count < 2**31, len(self.example) < 2000)


def forget(model: ir.Model) -> bool:
    """Infer the shape of every value from the inputs and weights, whatever the model declares.

    The model gets a note of the values whose declared shapes are wrong.

    Returns: What `graphopt.graph.shapes.check_expanded` returns.
    """
    shapes.name_dimensions(model.graph.inputs, (f"unknown_{i}" for i in itertools.count()))
    declared = {x: x.shape for x in _inferable(model.graph) if x.shape is not None}
    for x in declared:
        x.shape = None
    types = {y: y.type for y in _inferable(model.graph) if y.producer() is not None}
    for y in types:
        y.type = None
    for x in _values(model.graph):
        if x.shape is not None and _is_inferred_wrongly(x.producer()):
            x.shape = _rank_of(x.shape)
    is_small = _infer_small(model)
    propagate = is_small or shapes.check_expanded(model)
    if not is_small:
        _infer(model, propagate)
    if shapes.separate_elements(model):
        for x in _inferable(model.graph):
            x.shape = x.shape if shapes.reads_sequence(x.producer()) else None
        _infer(model, propagate)
    for y, kind in types.items():
        y.type = y.type or kind
    while shapes.ifs(model) and shapes.fold_integers(model):
        _infer(model, propagate)
    _infer_ranks(model, propagate)
    _complete(model, propagate)
    _keep_undetermined(model, declared, propagate)
    shapes.name_dimensions(_values(model.graph), shapes.new_names(model))
    unify_sizes(model)
    _name_outputs(model, declared)
    _note_wrong(model, declared)
    return propagate


def _infer_small(model: ir.Model) -> bool:
    """Infer with data propagation a model whose vectors and constants are small for sure.

    Returns: Whether they are. If not, there are no shapes: `graphopt.graph.shapes.check_expanded` must look closely.
    """
    try:
        plain = infer_message(message_for_inference(model, False))
    except INFERENCE_ERRORS:
        return False
    known = {x: shape_of(found) for x, found in types_in(model.graph, plain.graph)}
    if not are_vectors_short(model.graph, known.get):
        return False
    _infer(model, True)
    if are_surely_small(model):
        return True
    for x in _inferable(model.graph):
        x.shape = None
    return False


def _inferable(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values that ONNX may infer, also in bodies."""
    for node in graph:
        if onnx.defs.has(node.op_type, node.domain) and not _is_inferred_wrongly(node):
            yield from (y for y in node.outputs if y.name)
        for body in subgraphs(node):
            if node.op_type in ("Loop", "Scan"):
                yield from body.inputs[2 if node.op_type == "Loop" else 0 :]
            yield from _inferable(body)


def _values(graph: ir.Graph) -> Iterator[ir.Value]:
    """Yield the values that nodes compute, also in bodies, and the inputs of bodies."""
    for node in graph:
        yield from node.outputs
        for body in subgraphs(node):
            yield from body.inputs
            yield from _values(body)


def _is_inferred_wrongly(node: ir.Node | None) -> bool:
    """Return whether ONNX infers a shape without attributes that decide it (tests/faults.py: ConvTranspose)."""
    if node is None or node.op_type not in ("ConvTranspose", "Resize"):
        return False
    if node.op_type == "ConvTranspose":
        is_same = node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME")
        return "output_shape" in node.attributes or (is_same and "output_padding" in node.attributes)
    return node.attributes.get_string("keep_aspect_ratio_policy", "stretch") != "stretch"


def _infer(model: ir.Model, propagate: bool) -> None:
    """Infer what can be inferred. Errors are left to `graphopt.graph.shapes.infer`, once the model is converted."""
    more = True
    while more:
        typed = message_for_inference(model, propagate)
        with contextlib.suppress(*INFERENCE_ERRORS):
            typed = infer_message(typed, propagate=propagate)
        for value, found in types_in(model.graph, typed.graph):
            node = value.producer()
            if not _is_inferred_wrongly(node):
                shape = shape_of(found)
                if shape is not None and node is not None and node.op_identifier()[:2] == ("", "Attention"):
                    # Its unknown sizes are inferred as 0 (tests/faults.py: Attention)
                    shape = ir.Shape([None if dim == 0 else dim for dim in shape])
                value.type = value.type or type_of(found)
                value.shape = value.shape if shape is None else shape
        more = shapes.shape_states(model.graph)


def _infer_ranks(model: ir.Model, propagate: bool) -> None:
    """Infer the shapes that ONNX's inference leaves out although ranks follow from ranks and lengths of vectors."""
    while True:
        missing = [x for x in _inferable(model.graph) if x.shape is None]
        found = {x: shape for x in missing if (shape := _by_ranks(x.producer())) is not None}
        if not found:
            return
        for x, shape in found.items():
            x.shape = shape
        _infer(model, propagate)


def _by_ranks(node: ir.Node | None) -> ir.Shape | None:
    """Return the shape of a node's output as far as ranks and the length of its second or third input say it."""
    if node is None or node.domain:
        return None
    x, vector, window = [*node.inputs, None, None, None][:3]
    if node.op_type == "STFT":
        bins = None if window is None or window.shape is None else window.shape[0]
        if isinstance(bins, int) and node.attributes.get_int("onesided", None) != 0:
            bins = bins // 2 + 1
        rows = None if x is None or x.shape is None else x.shape[0]
        return ir.Shape([rows, None, bins if isinstance(bins, int) else None, 2])
    if node.op_type not in ("Reshape", "Unsqueeze", "Squeeze"):
        return None
    length = None if vector is None or vector.shape is None or len(vector.shape) != 1 else vector.shape[0]
    if not isinstance(length, int):
        return None
    if node.op_type == "Reshape":
        return ir.Shape([None] * length)
    if x is None or x.shape is None:
        return None
    rank = len(x.shape) + (length if node.op_type == "Unsqueeze" else -length)
    return ir.Shape([None] * rank) if rank >= 0 else None


def _complete(model: ir.Model, propagate: bool) -> None:
    """Infer again while ranks are missing that follow from what formulas say of vectors of sizes."""
    missing, before = [x for x in _inferable(model.graph) if x.shape is None], 0
    named = size_names(model.graph.inputs)
    while len(missing) != before and any(_may_follow(x, named) for x in missing):
        unify_sizes(model)
        _infer(model, propagate)
        before, missing = len(missing), [x for x in missing if x.shape is None]


def _may_follow(x: ir.Value, named: set[str]) -> bool:
    """Return whether a rank may follow once formulas say more of the sizes that the value's node reads."""
    node = x.producer()
    read = [] if node is None else [y for y in node.inputs if y is not None]
    return node is None or bool(subgraphs(node)) or not named.issuperset(size_names(read))


def _rank_of(shape: ir.Shape) -> ir.Shape:
    return ir.Shape([None] * len(shape))


def _keep_undetermined(model: ir.Model, declared: Declared, propagate: bool) -> None:
    """Give the values of unknown rank their declared ranks: first those whose inputs have shapes."""
    for i in range(_ROUNDS):
        missing = [x for x in declared if x.shape is None]
        first = [x for x in missing if _inputs_have_shapes(x)] if i < _ROUNDS - 1 else missing
        for value in first or missing:
            value.shape = _rank_of(declared[value])
        if missing:
            _infer(model, propagate)


def _inputs_have_shapes(value: ir.Value) -> bool:
    node = value.producer()
    return node is None or all(x is None or x.shape is not None for x in node.inputs)


def _name_outputs(model: ir.Model, declared: Declared) -> None:
    """Give sizes of outputs that have names of their own the declared names, if nothing else has these names."""
    values = [*_values(model.graph)]
    taken = size_names([*model.graph.inputs, *values])
    names: dict[str, str] = {}
    for y in model.graph.outputs:
        for dim, own in zip(y.shape or (), declared.get(y, ()), strict=False):
            made, name = size_name(dim), size_name(own)
            if made and name and name not in taken and made not in size_names(model.graph.inputs):
                taken.add(names.setdefault(made, name))
    for value in values if names else ():
        if value.shape is not None:
            value.shape = ir.Shape([names.get(size_name(dim), dim) for dim in value.shape])


def _note_wrong(model: ir.Model, declared: Declared) -> None:
    """Note the values whose declared shapes are wrong: not only less exact."""
    dynamic = size_names(model.graph.inputs)

    def differ(a: Dim, b: Dim) -> bool:
        return a != b and all(isinstance(dim, int) or size_name(dim) in dynamic for dim in (a, b))

    def is_wrong(x: ir.Value, shape: ir.Shape) -> bool:
        return x.shape is not None and (len(shape) != len(x.shape) or any(map(differ, shape, x.shape)))

    wrong = {x: shape for x, shape in declared.items() if is_wrong(x, shape)}
    if wrong:
        before = Misdeclared.read(model) or Misdeclared(0, "")
        first = next((x for x in model.graph.outputs if x in wrong), next(iter(wrong)))
        example = f"{first.name!r} as {wrong[first]} for {first.shape}"
        Misdeclared(before.count + len(wrong), before.example or example).write(model)


_LARGEST_RANK = 6


def find_ranks(model: ir.Model) -> None:
    """Give each input without a shape the only rank that ONNX's inference accepts, with sizes of its own names.

    An input that may have several ranks stays without a shape. Ranks that the file declares for outputs count.
    """
    for x in model.graph.inputs:
        if x.shape is None and isinstance(x.type, ir.TensorType):
            message = without_weights(model)
            del message.graph.value_info[:]
            possible = [rank for rank in range(_LARGEST_RANK + 1) if _is_possible(message, name_of(x), rank)]
            if len(possible) == 1:
                x.shape = ir.Shape([f"{x.name}_{axis}" for axis in range(possible[0])])


def _is_possible(message: onnx.ModelProto, name: str, rank: int) -> bool:
    """Return whether all nodes of a model accept an input of a rank."""
    shape = next(x for x in message.graph.input if x.name == name).type.tensor_type.shape
    shape.Clear()
    for axis in range(rank):
        shape.dim.add(dim_param=f"{name}_{axis}")
    shape.SetInParent()
    try:
        infer_message(message, strict=True)
    except INFERENCE_ERRORS:
        return False
    return True

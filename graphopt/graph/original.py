"""Write trained weights into the file that was compiled, which keeps its operators, caches and quantized weights."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import onnx
import onnx_ir as ir
from onnx.reference import ReferenceEvaluator

from graphopt.errors import GraphoptError
from graphopt.graph.checking import messages_of
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import ONNX
from graphopt.graph.mapped import MappedTensor
from graphopt.graph.merging import adapted
from graphopt.graph.message_inference import infer_message
from graphopt.graph.metadata import original_name
from graphopt.graph.origins import Folded
from graphopt.graph.packed import view_of
from graphopt.graph.parts import ModelParts, are_equal
from graphopt.graph.postprocessing import STORED_AS
from graphopt.graph.roles import Role, with_role
from graphopt.graph.traversal import ancestors, extracted_between
from graphopt.graph.values import is_floating, name_of, tensor_bytes

MOST_FOLDED = 2**22  # bytes of constants in a note
_MOST_NODES = 32  # of a fold
_PACKED = {onnx.TensorProto.UINT4, onnx.TensorProto.UINT8}  # types of which a byte has the same numbers
_LONGEST = 2**12  # size up to which inference propagates data, one by one
_MOST_GROWTH = 4  # how many times as many elements as its inputs a step of a fold may have
_ELEMENTWISE = ("Abs", "Add", "Div", "Exp", "Log", "Mul", "Neg", "Pow", "Reciprocal", "Relu", "Sqrt", "Sub")
_ACTIVATIONS = ("LogSoftmax", "Sigmoid", "Softmax", "Softplus", "Tanh")
_MOVING = ("Cast", "Concat", "Constant", "Gather", "Identity", "Reshape", "Transpose")
_FOLDING = {("", op_type) for op_type in (*_ELEMENTWISE, *_ACTIVATIONS, *_MOVING)}


def note_fold(model: ir.Model, value: ir.Value, computed: ir.Value) -> None:
    """Note how an initializer of the file is computed from weights, of which its readers read the result from now on.

    A fold by many numbers, such as the places of elements, has no note.
    """
    nodes = ancestors([computed])
    read = dict.fromkeys(x for node in nodes for x in node.inputs if x is not None and x.is_initializer())
    roots = [x for x in [*read, computed] if x.is_initializer() and is_floating(x)]
    if sum(tensor_bytes(x.const_value) for x in read if x not in roots) > MOST_FOLDED:
        return
    if computed in roots:
        same = ir.val(computed.name, computed.dtype, computed.shape)
        graph = ir.Graph([same], [], nodes=[], opset_imports=dict(model.opset_imports))
        with Emitter(part := ir.Model(graph, ir_version=model.ir_version)) as op:
            graph.outputs.append(op.Identity(same))
    else:
        part = ir.Model(extracted_between(model.graph, roots, [computed]), ir_version=model.ir_version)
    part.graph.outputs[0].name = f"{value.name}.folded"
    folds = Folded.read(model) or Folded({})
    Folded({**folds.parts, name_of(value): ir.to_proto(part).SerializeToString()}).write(model)


def write_weights(original: ModelParts, trained: ModelParts, model: ir.Model, *, merged: bool = True) -> None:
    """Replace the weights of the file that was compiled by those of its trained inference model.

    Args:
        original: the file.
        trained: the inference model.
        model: the training graph.
        merged: whether adapters are merged into the weights.

    Raises:
        GraphoptError: the file is not the one that was compiled: it lacks a weight, or a weight that does not train has
            other numbers.
    """
    weights = {x.name: x for x in trained.proto.graph.initializer}
    notes = adapted(model)
    changed = {original_name(x) for x in with_role(model, Role.PARAMETER, Role.STATISTIC)}
    changed = {*changed, *(note.weight for note in notes if merged)}.difference(*(note.values for note in notes))
    changed |= {name for node in model.graph if (name := STORED_AS.read(node))}
    places, folds = _places(original.proto), (Folded.read(model) or Folded({})).models()
    folds = {name: part for name, part in folds.items() if name in places}
    sources = {x.name for part in folds.values() for x in part.graph.input}
    for name in sorted(changed - sources - places.keys()):
        raise GraphoptError(
            f"expected the file that was compiled, with weight {name!r}, found none of this name: it is another file, "
            "an exporter has merged equal weights, or a node has it as an attribute: take the trained model instead, "
            "trained.onnx of a run, or trained() without into"
        )
    reshaped = False
    for name, tensors in places.items():
        if name in folds:
            weights[name] = onnx.numpy_helper.from_array(_computed(name, folds, weights, trained), name)
        if name in weights:
            before = [*tensors[0].dims]
            alike = _alike(tensors, weights[name], name, name in changed or name in folds)
            if name in changed or name in folds:
                _replace(alike, weights[name], original, trained)
            else:
                _check_unchanged(alike, weights[name], original, trained)
            reshaped = reshaped or [*tensors[0].dims] != before
    if reshaped:
        _redeclare(original.proto, trained.proto)


def _redeclare(original: onnx.ModelProto, trained: onnx.ModelProto) -> None:
    """Give the file the output types of its trained model, after passes.Head has changed the number of classes."""
    types = {y.name: y.type for y in trained.graph.output}
    del original.graph.value_info[:]
    for y in original.graph.output:
        if y.name in types:
            y.type.CopyFrom(types[y.name])


def _alike(
    tensors: Sequence[onnx.TensorProto], new: onnx.TensorProto, name: str, changes: bool
) -> Sequence[onnx.TensorProto]:
    """Return the tensors that a weight stands for, of those of its name; raise an error if none may be replaced."""
    typed = [x for x in tensors if (x.data_type, len(x.dims)) == (new.data_type, len(new.dims))]
    alike = [x for x in typed if x.dims == new.dims]
    if changes and not alike:
        alike = [x for x in tensors if _is_packed(x, new)]
    if changes and not alike:  # passes.Head changes the number of classes
        alike = [x for x in typed if sum(a != b for a, b in zip(x.dims, new.dims, strict=True)) == 1]
    if changes and not alike:
        found = tensors[0]
        kinds = [f"{onnx.TensorProto.DataType.Name(x.data_type)}{[*x.dims]}" for x in (new, found)]
        raise GraphoptError(
            f"into: weight {name!r}: expected the file that was compiled, with {kinds[0]}, found {kinds[1]}"
        )
    return alike


def _is_packed(old: onnx.TensorProto, new: onnx.TensorProto) -> bool:
    """Return whether integers of a file have the bits of others in another shape, as the weight of a MatMulNBits."""
    bits = [ir.DataType(x.data_type).bitwidth * math.prod(x.dims) for x in (old, new)]
    is_same = (old.data_type, old.dims) == (new.data_type, new.dims)
    return not is_same and {old.data_type, new.data_type} <= _PACKED and bits[0] == bits[1]


def _replace(
    tensors: Sequence[onnx.TensorProto], new: onnx.TensorProto, original: ModelParts, trained: ModelParts
) -> None:
    """Replace tensors of the file by a weight of its trained inference model."""
    for old in tensors:
        own, dims = (old.name, old.doc_string, old.data_type), [*old.dims]
        is_packed = _is_packed(old, new)
        old.CopyFrom(new)
        if is_packed:
            old.dims[:] = dims
        old.name, old.doc_string, old.data_type = own
        if trained.refers(new):
            weight = trained.weights[new.name]
            dtype = ir.DataType(old.data_type)
            original.weights[old.name] = view_of(weight, dtype, dims) if is_packed else weight


def _check_unchanged(
    tensors: Sequence[onnx.TensorProto], new: onnx.TensorProto, original: ModelParts, trained: ModelParts
) -> None:
    """Raise an error if no tensor of the file has the numbers of a weight that does not train."""
    weight = trained.weights.get(new.name) if trained.refers(new) else None
    if isinstance(weight, MappedTensor):
        for old in [x for x in tensors if original.refers(x)]:
            if weight.is_at_place_of(original.weights[old.name]):
                original.weights[old.name] = weight  # whose pages are in memory
                return
    numbers = trained.numbers(new)
    if tensors and not any(are_equal(original.numbers(x), numbers) for x in tensors):
        raise GraphoptError(
            f"into: weight {new.name!r}, which does not train: expected the numbers of the file that was compiled, "
            "found others"
        )


def _places(model: onnx.ModelProto) -> dict[str, list[onnx.TensorProto]]:
    """Return the tensors of a file by the names of their values, also those in nodes and in bodies."""
    places: dict[str, list[onnx.TensorProto]] = defaultdict(list)
    for graph in messages_of(onnx.GraphProto, model):
        for tensor in graph.initializer:
            places[tensor.name].append(tensor)
        for node in graph.node:
            if node.op_type == "Constant" and node.domain in ONNX and node.attribute[0].HasField("t"):
                places[node.output[0]].append(node.attribute[0].t)
    return places


def _computed(
    name: str,
    folds: dict[str, onnx.ModelProto],
    weights: dict[str, onnx.TensorProto],
    trained: ModelParts,
    depth: int = 0,
) -> np.ndarray:
    """Return the numbers of an initializer of the file that is computed from weights."""
    part = folds[name]
    for x in [x.name for x in part.graph.input if x.name not in weights]:
        if depth > len(folds) or x not in folds:
            raise GraphoptError(f"into: weight {name!r}: expected the weight {x!r} that it is made of, found none")
        weights[x] = onnx.numpy_helper.from_array(_computed(x, folds, weights, trained, depth + 1), x)
    feeds = {x.name: trained.numbers(weights[x.name]) for x in part.graph.input}
    _check_small(part, name, sum(array.size for array in feeds.values()))
    (numbers,) = ReferenceEvaluator(part).run(None, feeds)
    return np.asarray(numbers)


def _check_small(part: onnx.ModelProto, name: str, elements: int) -> None:
    """Raise an error if a note, which may come from a stranger, is not a small computation."""
    nodes = part.graph.node
    known = len(nodes) <= _MOST_NODES and {(x.domain, x.op_type) for x in nodes} <= _FOLDING
    sizes = _inferred_sizes(part, elements) if known else []
    if len(sizes) < len(nodes) or not known or max(sizes, default=0) > _MOST_GROWTH * elements + MOST_FOLDED:
        raise GraphoptError(f"into: weight {name!r}: expected a small computation from other weights, found another")


def _inferred_sizes(part: onnx.ModelProto, elements: int) -> list[int]:
    """Return the numbers of elements of the values that a part computes, as far as inference tells them."""
    is_short = all(math.prod(x.dims) <= _LONGEST for x in messages_of(onnx.TensorProto, part))
    fed = [x.type.tensor_type.shape.dim for x in part.graph.input]
    propagate = is_short and all(dim.dim_value <= _LONGEST for shape in fed for dim in shape)
    inferred = infer_message(part, propagate=propagate).graph
    shapes = [x.type.tensor_type.shape.dim for x in [*inferred.value_info, *inferred.output]]
    return [math.prod(dim.dim_value if dim.HasField("dim_value") else elements for dim in shape) for shape in shapes]

"""Rewrite operators into forms that runtimes other than ONNX Runtime's CPU provider compute correctly.

A form is a traced function of a node. It returns the outputs of the form, or None where the node stays.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import InferenceForm
from graphopt.graph.rewriting import Pass
from graphopt.graph.simplify import Simplify
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import dims_of, is_floating, like, name_of, rank, swap

_Form = Callable[[Emitter, ir.Node], Sequence[ir.Value] | None]


def product_of_shape(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write Size as the product of the shape. Importers for JAX and tinygrad do not know Size."""
    x = node.inputs[0]
    assert x is not None
    return [op.ReduceProd(op.shape_of(x), keepdims=0)]


def chain_of_sums(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Sum of several inputs as Adds, from the first to the last. WebGPU has no kernel for such a Sum."""
    if len(node.inputs) < 3:
        return None
    return [functools.reduce(op.Add, node.inputs)]  # type: ignore[list-item]


def _log_softmax(op: Emitter, node: ir.Node) -> Sequence[ir.Value]:
    """Write LogSoftmax as x - max - log sum exp (x - max). WebGPU has no kernel for LogSoftmax."""
    x, axis = node.inputs[0], [node.attributes.get_int("axis", -1)]
    shifted = op.Sub(x, op.ReduceMax(x, axis))
    return [op.Sub(shifted, op.Log(op.ReduceSum(op.Exp(shifted), axis)))]


def convolution_of_whole_vectors(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Give each group of a grouped convolution a multiple of 4 filters, of which the further ones are zero.

    ONNX Runtime's WebGPU provider computes 2 to 4 neighbouring outputs at once, as the number of all filters allows,
    although a group may begin between them.
    """
    group = node.attributes.get_int("group", 1)
    x, w, *bias = node.inputs
    filters = w.shape[0] if w is not None and w.shape is not None else None
    if w is None or group == 1 or not isinstance(filters, int):
        return None
    of_group = filters // group
    if of_group < 4 or all(of_group % size == 0 for size in (4, 3, 2) if filters % size == 0):
        return None  # every group begins where the provider's vector of 4, 3 or 2 outputs does
    added = -of_group % 4

    def padded(y: ir.Value) -> ir.Value:
        rows = op.Pad(op.Reshape(y, [group, of_group, -1]), [0, 0, 0, 0, added, 0])
        shape = [op.constant([group * (of_group + added)]), *([op.shape_of(y, 1)] if rank(y) > 1 else [])]
        result: ir.Value = op.Reshape(rows, op.Concat(*shape, axis=0))
        result.shape = ir.Shape([group * (of_group + added), *dims_of(y)[1:]])
        return result

    y: ir.Value = op.Conv(x, padded(w), *(padded(y) for y in bias if y is not None), **node.attributes)
    y.shape = ir.Shape([None, None, *dims_of(node.outputs[0])[2:]])
    groups = op.Slice(op.Reshape(y, [0, group, of_group + added, -1]), [0], [of_group], [2])
    return [op.Reshape(groups, op.Concat([0, filters], op.shape_of(y, 2), axis=0))]


def _batch_normalization(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write BatchNormalization as arithmetic: Tract and MNN refuse statistics that are no constants."""
    x, *inputs = node.inputs
    if x is None or x.shape is None or node.attributes.get_int("training_mode"):
        return None
    scale, bias, mean, variance = inputs
    deviation = op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5)))
    factor = op.Div(_cast(op, scale, deviation), deviation)
    axes = list(range(1, len(x.shape) - 1))

    def by_channel(y: ir.Value) -> ir.Value:
        return op.Unsqueeze(_cast(op, y, x), axes) if axes else _cast(op, y, x)

    assert bias is not None and mean is not None
    centered = op.Sub(x, by_channel(mean))
    return [op.Add(op.Mul(centered, by_channel(factor)), by_channel(bias))]


def _layer_normalization(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write LayerNormalization as reductions if its further outputs are used: OpenVINO lacks them, TVM is wrong."""
    x, scale, *bias = node.inputs
    used = [y for y in node.outputs[1:] if y.uses() or y.is_graph_output()]
    if x is None or x.shape is None or not used:
        return None
    first = node.attributes.get_int("axis", -1) % len(x.shape)
    axes = list(range(first, len(x.shape)))
    wide = op.Cast(x, to=used[0].dtype) if x.dtype != used[0].dtype else x
    mean = op.ReduceMean(wide, axes)
    centered = op.Sub(wide, mean)
    variance = op.ReduceMean(op.Mul(centered, centered), axes)
    inverse = op.Reciprocal(op.Sqrt(op.Add(variance, node.attributes.get_float("epsilon", 1e-5))))
    y = op.Mul(_cast(op, op.Mul(centered, inverse), x), scale)
    for shift in bias:
        y = y if shift is None else op.Add(y, shift)
    return [y, mean, inverse]


def _cast(op: Emitter, value: ir.Value | None, model: ir.Value) -> ir.Value:
    assert value is not None
    return value if value.dtype == model.dtype or not is_floating(model) else op.Cast(value, to=model.dtype)


def slices(op: Emitter, node: ir.Node) -> Sequence[ir.Value] | None:
    """Write a Split of many outputs as Slices. A kernel on WebGPU may read and write 8 buffers at least, often 10."""
    axis = node.attributes.get_int("axis", 0)
    sizes = [size for y in node.outputs if isinstance(size := dims_of(y)[axis], int)]
    if len(node.outputs) < 8 or len(sizes) < len(node.outputs):
        return None
    places = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return [op.Slice(node.inputs[0], [start], [end], [axis]) for start, end in places]


# Forms that cost nothing, by operator.
ALWAYS: dict[str, _Form] = {"Size": product_of_shape, "Sum": chain_of_sums}

# Further forms for a runtime that has no kernel for the operator, or a wrong or slow one.
FORMS: dict[str, Mapping[str, _Form]] = {
    "iree": {},
    "mnn": {"BatchNormalization": _batch_normalization},
    "openvino": {"LayerNormalization": _layer_normalization},
    "tinygrad": {},
    "tract": {"BatchNormalization": _batch_normalization},
    "tvm": {"LayerNormalization": _layer_normalization},
    "webgpu": {"LogSoftmax": _log_softmax, "Conv": convolution_of_whole_vectors, "Split": slices},
}


@dataclass(frozen=True)
class Portable(Pass):
    """Rewrite operators that runtimes other than ONNX Runtime's CPU provider lack, or compute wrongly or slowly.

    Results stay the same up to rounding.

    Args:
        target: the runtime to write for, from `graphopt.targets.portable.FORMS`. None rewrites only what costs
            nothing.

    Raises:
        GraphoptError: `target` is unknown.

    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> "Size" in {node.op_type for node in passes.Portable()(step).model.graph}
    False
    """

    target: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.target is not None and self.target not in FORMS:
            raise GraphoptError(unknown("target", self.target, FORMS))

    def rewrite(self, model: ir.Model) -> None:
        forms = {**ALWAYS, **(FORMS[self.target] if self.target is not None else {})}
        with Emitter(model) as op:
            changed = _rewrite(op, model.graph, forms)
        if changed:
            model.graph.sort()
            Simplify().rewrite(model)


def _rewrite(op: Emitter, graph: ir.Graph, forms: Mapping[str, _Form]) -> bool:
    """Rewrite the nodes of a graph, and of the bodies in it; return whether any node was replaced."""
    changed = False
    for node in list(graph):
        for body in subgraphs(node):
            with op.within(body) as inner:
                changed |= _rewrite(inner, body, forms)
        form = forms.get(node.op_type) if node.domain == "" else None
        results = form(op, node) if form is not None else None
        if results is not None:
            for own, y in zip(node.outputs, results, strict=False):
                if own.name:
                    _keep_inference(node, own)
                    swap(own, like(y, own))
            graph.remove(node, safe=True)
            changed = True
    return changed


def _keep_inference(node: ir.Node, y: ir.Value) -> None:
    """Let inference have the operator, if it differs from that of training by inputs, which the form does not have."""
    form = InferenceForm.read(y)
    if form is not None and form.inputs:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        reads = [form.inputs.get(i, "" if x is None else name_of(x)) for i, x in enumerate(node.inputs)]
        InferenceForm(operator=(node.op_type, attributes), reads=tuple(reads), output=y.index() or 0).write(y)

"""Rewrite operators into forms that runtimes other than ONNX Runtime's CPU provider compute correctly.

A form is a traced function of a node. It returns the outputs of the form, or None where the node stays.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.rewriting import Pass, interface_kept
from graphopt.graph.simplify import Simplify
from graphopt.graph.traversal import subgraphs
from graphopt.graph.values import like, name_of, swap
from graphopt.targets.portable.cuda import CUDA, join_small_arrays
from graphopt.targets.portable.everywhere import (
    ALONG_NO_AXIS,
    abs_by_comparison,
    added_by_product,
    average_of_whole_windows,
    chain_of_sums,
    clip_by_extremes,
    extreme_by_comparison,
    of_near_indices,
    product_by_a_copy,
    product_of_limbs,
    product_of_shape,
    range_by_sums,
    rows_by_element,
)
from graphopt.targets.portable.form import Form
from graphopt.targets.portable.normalizations import batch_normalization, centered, layer_normalization
from graphopt.targets.portable.webgpu import WEBGPU

# Forms that cost nothing, by operator.
ALWAYS: dict[str, Form] = {"Size": product_of_shape, "Sum": chain_of_sums}

# Further forms for an ONNX Runtime of any version, whose CPU provider computes some operators wrongly; see
# tests/runtime_sweep.py.
ANY_VERSION: dict[str, Form] = {
    **ALONG_NO_AXIS,
    "AveragePool": average_of_whole_windows,
    "InstanceNormalization": centered(2),
    "LayerNormalization": centered(-1),
}

# Further forms for a runtime that has no kernel for the operator, or a wrong or slow one.
FORMS: dict[str, Mapping[str, Form]] = {
    "cuda": CUDA,
    "iree": {},
    "mnn": {
        "Abs": abs_by_comparison,
        "BatchNormalization": batch_normalization,
        "Clip": clip_by_extremes,
        "GatherElements": of_near_indices(),
        "GatherND": of_near_indices(),
        "Max": extreme_by_comparison("Less"),
        "Min": extreme_by_comparison("Greater"),
        "Mul": product_of_limbs,
        "Range": range_by_sums,
        "ScatterElements": of_near_indices(added_by_product),
        "ScatterND": of_near_indices(rows_by_element),
    },
    "openvino": {"Gemm": product_by_a_copy, "LayerNormalization": layer_normalization},
    "tinygrad": {},
    "tract": {"BatchNormalization": batch_normalization},
    "tvm": {"LayerNormalization": layer_normalization},
    "webgpu": WEBGPU,
}

# Rewritings of whole graphs before the forms, which make a runtime faster.
REWRITINGS: dict[str, Callable[[ir.Model], bool]] = {"cuda": join_small_arrays}


@dataclass(frozen=True)
class Portable(Pass):
    """Rewrite operators that runtimes other than ONNX Runtime's CPU provider lack, or compute wrongly or slowly.

    Results stay the same up to rounding.

    Args:
        target: the runtime to write for, from `graphopt.targets.portable.FORMS`; None is ONNX Runtime of any version.

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
        forms = {**ALWAYS, **(ANY_VERSION if self.target is None else FORMS[self.target])}
        changed = False
        if self.target in REWRITINGS:
            with interface_kept(model):
                changed = REWRITINGS[self.target](model)
        if _write(model, forms) or changed:
            model.graph.sort()
            Simplify().rewrite(model)


def scatter_by_element(model: ir.Model) -> bool:
    """Reduce rows by ScatterElements in place of ScatterND, which loses some on several threads of a CPU."""
    changed = _write(model, {"ScatterND": rows_by_element})
    if changed:
        model.graph.sort()
    return changed


def _write(model: ir.Model, forms: Mapping[str, Form]) -> bool:
    """Write the operators of a model in forms; return whether any was written."""
    with Emitter(model) as op:
        return _rewrite(op, model.graph, forms)


def _rewrite(op: Emitter, graph: ir.Graph, forms: Mapping[str, Form]) -> bool:
    """Rewrite the nodes of a graph, of the bodies in it, and of forms; return whether any node was replaced."""
    changed, waiting = False, list(graph)
    while waiting:
        node, last = waiting.pop(), graph[-1]
        for body in subgraphs(node):
            with op.within(body) as inner:
                changed |= _rewrite(inner, body, forms)
        form = forms.get(node.op_type) if node.domain == "" else None
        results = form(op, node) if form is not None else None
        if results is not None:
            waiting += _emitted_after(last)
            for own, y in zip(node.outputs, results, strict=False):
                if own.name:
                    _keep_inference(node, own)
                    swap(own, like(y, own))
            graph.remove(node, safe=True)
            changed = True
    return changed


def _emitted_after(node: ir.Node) -> Iterable[ir.Node]:
    """Return the nodes that a graph has after another, from the last to the first."""
    assert node.graph is not None
    return itertools.takewhile(lambda emitted: emitted is not node, reversed(node.graph))


def _keep_inference(node: ir.Node, y: ir.Value) -> None:
    """Keep the operator for inference, if it differs from that of training by inputs, which the form does not have."""
    form = InferenceForm.read(y)
    if form is not None and form.inputs:
        attributes = {name: attribute.value for name, attribute in node.attributes.items()}
        reads = [form.inputs.get(i, "" if x is None else name_of(x)) for i, x in enumerate(node.inputs)]
        InferenceForm(operator=(node.op_type, attributes), reads=tuple(reads), output=y.index() or 0).write(y)

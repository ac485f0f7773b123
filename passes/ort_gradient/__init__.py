"""Differentiate with onnxruntime-training's GradientGraphBuilder, which emits its own fused operators."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir import Value

from graphopt.graph.emitter import Emitter
from graphopt.graph.roles import needs_training_runtime
from graphopt.graph.values import like, name_of, swap
from passes.gradients import GradientSource
from passes.gradients.walk import between
from passes.ort_gradient.builder import Builder, seeded
from passes.ort_gradient.limits import fit_to_builder, wrong


@dataclass(frozen=True)
class OrtGradient(GradientSource):
    """Differentiate the loss by onnxruntime-training: add an output `NAME.grad` for each parameter.

    The graph then contains operators of com.microsoft that only onnxruntime-training runs. Its metadata records this.

    Raises:
        GraphoptError: onnxruntime-training is not installed; its opset is older than the model's; the model has no
            loss or no parameter; operators without a gradient block a parameter; or the loss depends on none.

    >>> graphopt.standard(loss=passes.MeanSquaredError(), gradient=passes.OrtGradient())["gradient"]
    (OrtGradient(loss_scale=None),)
    """

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[Value, Value], wrt: Sequence[Value]
    ) -> dict[Value, Value]:
        builder = Builder(model)
        path = between(model.graph, seeds, wrt)
        wrt = [x for x in wrt if any(user in path for user in x.consumers())]
        if not wrt:
            return {}
        seeds = {y: seed for y, seed in seeds.items() if y.producer() in path}
        for node in path:
            fit_to_builder(op, node)
        model.graph.sort()
        active = frozenset(wrt).union(*(node.outputs for node in path))
        if any(wrong(node, active) for node in path):
            raise builder.refusal(path, active)
        part = builder.extract(path, list(seeds))
        try:
            built = builder.build(part, wrt)
        except RuntimeError as error:
            raise builder.refusal(path, active, error) from error
        needs_training_runtime(model)
        return _insert_gradients(model, part, built, seeds, wrt)


def _insert_gradients(
    model: ir.Model,
    part: ir.Model,
    built: onnx.ModelProto,
    seeds: Mapping[Value, Value],
    wrt: Sequence[Value],
) -> dict[Value, Value]:
    """Add the nodes of `built` that `part` lacks to `model`, and return the gradients of `wrt`."""
    built.graph.input.extend(onnx.ValueInfoProto(name=f"{seeded(y)}_grad") for y in seeds)
    graph = ir.from_proto(built).graph
    ours = ir.convenience.create_value_mapping(model.graph)
    theirs = ir.convenience.create_value_mapping(graph)
    known = set(ir.convenience.create_value_mapping(part.graph))
    same = {theirs[name]: ours[name] for name in known & ours.keys()}
    same |= {theirs[f"{seeded(y)}_grad"]: seed for y, seed in seeds.items()}
    added = [node for node in graph if any(y.name not in known for y in node.outputs if y.name)]
    for y in (y for node in added for y in node.outputs):
        if y in same:  # the builder replaced this operator
            _replace(model, same.pop(y), y)
        elif y.name in ours:
            y.name = None
    for twin, value in same.items():
        ir.convenience.replace_all_uses_with(twin, value)
    graph.outputs.clear()
    graph.remove(added)
    model.graph.extend(added)
    for value in [value for name, value in graph.initializers.items() if name not in known]:
        del graph.initializers[name_of(value)]
        value.name = f"{value.name}.{len(model.graph)}" if value.name in ours else value.name
        model.graph.register_initializer(value)
    for domain in {node.domain for node in added}:
        model.opset_imports.setdefault(domain, 1)
    return {x: like(theirs[f"{x.name}_grad"], x) for x in wrt}


def _replace(model: ir.Model, old: Value, new: Value) -> None:
    swap(old, like(new, old))
    node = old.producer()
    if node is not None and node.graph is model.graph:
        model.graph.remove(node)

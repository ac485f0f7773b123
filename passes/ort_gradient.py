"""Gradients from onnxruntime-training's GradientGraphBuilder, in its own fused operators.

The builder is given the part of the graph between the parameters and the loss alone, so that it holds constant what
`Gradient` holds constant. Weights are inputs there: it folds none of them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir

from graphopt.emitter import Emitter, like
from graphopt.errors import GraphoptError, Lacking, NoGradient
from graphopt.roles import TRAINING_RUNTIME, needs_training_runtime
from passes.gradients import GradientSource
from passes.gradients.walk import between, constant_of, further_output, may_broadcast, reaches, reads

__all__ = ["OrtGradient"]

OPSET, IR_VERSION = 21, 10  # the newest that onnxruntime-training 1.19.2, the last one, takes
SMALL = 100  # numbers in a constant that the builder is shown: axes, exponents
UNREGISTERED = "has not been registered"
LOCATION = r"^/\S+:\d+ .*?\) (const )?|^.*\[ONNXRuntimeError\] : \d+ : \w+ : "


@dataclass(frozen=True)
class OrtGradient(GradientSource):
    """Differentiate the loss by every parameter, as onnxruntime-training does: an output `NAME.grad` each.

    The graph has operators of com.microsoft that onnxruntime-training alone runs; its metadata say so.

    Raises:
        GraphoptError: onnxruntime-training is not installed; the model's opset is newer than it; there is no loss or
            no parameter; operators without a gradient there block a parameter; or the loss does not depend on one.
    """

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[ir.Value, ir.Value], wrt: Sequence[ir.Value]
    ) -> dict[ir.Value, ir.Value]:
        builder = _Builder(model)
        path = between(model.graph, seeds, wrt)
        wrt = [x for x in wrt if any(user in path for user in x.consumers())]
        if not wrt:
            return {}
        seeds = {y: seed for y, seed in seeds.items() if y.producer() in path}
        for node in path:
            _prepare(op, node)
        model.graph.sort()
        active = frozenset(wrt).union(*(node.outputs for node in path))
        if any(_wrong(node, active) for node in path):
            raise builder.refusal(path, active)
        part = builder.part(path, list(seeds))
        try:
            built = builder.build(part, wrt)
        except RuntimeError as error:
            raise builder.refusal(path, active, error) from error
        needs_training_runtime(model)
        return _graft(model, part, built, seeds, wrt)


class _Builder:
    """onnxruntime-training's builder of gradient graphs, for parts of one model."""

    def __init__(self, model: ir.Model) -> None:
        try:
            from onnxruntime.capi import onnxruntime_pybind11_state as runtime

            self._builder, self._options = runtime.GradientGraphBuilder, runtime.SessionOptions()
        except (ImportError, AttributeError) as error:
            raise GraphoptError(
                "OrtGradient needs onnxruntime-training, which is not installed: pip install 'graphopt[training]' in "
                "an environment without another onnxruntime, or use Gradient"
            ) from error
        version = model.opset_imports[""]
        if version > OPSET or model.ir_version > IR_VERSION:
            raise GraphoptError(
                f"OrtGradient: expected a model of opset {OPSET} and IR version {IR_VERSION} or older, found "
                f"{version} and {model.ir_version}: use Gradient"
            )
        self._options.log_severity_level = 4  # what goes wrong is raised
        self._model = model

    def part(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Model:
        """Return the graph of `nodes`, its `outputs` behind an Identity each; other values are inputs."""
        made = {y for node in nodes for y in node.outputs}
        read = dict.fromkeys(x for node in nodes for x in reads(node) if x is not None and x not in made)
        inputs = [x for x in read if not _is_small(x)]
        graph = ir.convenience.extract(self._model.graph, inputs, outputs)
        for x in graph.inputs:
            if x.is_initializer():
                del graph.initializers[str(x.name)]
                x.const_value = None
        for i, y in enumerate(graph.outputs):  # the gradient of what others use too is a sum
            seeded = ir.node("Identity", [y])
            seeded.outputs[0].name, seeded.outputs[0].type, seeded.outputs[0].shape = (
                _seeded(y),
                y.type,
                y.shape,
            )
            graph.append(seeded)
            graph.outputs[i] = seeded.outputs[0]
        functions = list(self._model.functions.values())
        return ir.Model(graph, ir_version=self._model.ir_version, functions=functions)

    def build(self, part: ir.Model, wrt: Sequence[ir.Value]) -> onnx.ModelProto:
        """Return `part` with its gradients: of a value NAME it is NAME_grad, which of outputs is left undefined."""
        names = {str(y.name) for y in part.graph.outputs}
        text = ir.to_proto(part).SerializeToString()
        builder = self._builder(text, names, {str(x.name) for x in wrt}, "", self._options)
        builder.build()
        return onnx.load_from_string(builder.get_model())

    def refusal(
        self, path: Sequence[ir.Node], active: frozenset[ir.Value], error: RuntimeError | None = None
    ) -> GraphoptError:
        """Return the error that names every operator of `path` that the builder by itself refuses, or has wrong."""
        refused: dict[tuple[str, str], dict[ir.Node, str]] = {}
        for node in path:
            reason = _wrong(node, active) or self._complaint(node, path, active)
            if reason:
                refused.setdefault((node.domain, node.op_type), {})[node] = f"{TRAINING_RUNTIME} {reason}"
        if not refused:
            return GraphoptError(f"{TRAINING_RUNTIME} refuses the model, {_said(error)}: use Gradient")
        lacking = []
        wrt = [x for x in active if x.producer() not in path]
        for (domain, op_type), nodes in sorted(refused.items()):
            blocks = tuple(sorted(str(x.name) for x in wrt if reaches(x, list(nodes))))
            names = tuple(str(node.name) for node in nodes)
            lacking.append(Lacking(domain, op_type, names, blocks, next(iter(nodes.values()))))
        return NoGradient(lacking, "use Gradient")

    def _complaint(self, node: ir.Node, path: Sequence[ir.Node], active: frozenset[ir.Value]) -> str:
        """Return what the builder says of one node, or nothing."""
        used = [y for y in node.outputs if y.is_graph_output() or any(user in path for user in y.consumers())]
        try:
            self.build(self.part([node], used), [x for x in reads(node) if x is not None and x in active])
        except RuntimeError as error:
            return _said(error)
        return ""


def _graft(
    model: ir.Model,
    part: ir.Model,
    built: onnx.ModelProto,
    seeds: Mapping[ir.Value, ir.Value],
    wrt: Sequence[ir.Value],
) -> dict[ir.Value, ir.Value]:
    """Add to `model` what `built` has and `part` has not; return the gradients of `wrt`."""
    built.graph.input.extend(onnx.ValueInfoProto(name=f"{_seeded(y)}_grad") for y in seeds)
    graph = ir.from_proto(built).graph
    ours = ir.convenience.create_value_mapping(model.graph)
    theirs = ir.convenience.create_value_mapping(graph)
    known = set(ir.convenience.create_value_mapping(part.graph))
    same = {theirs[name]: ours[name] for name in known & ours.keys()}
    same |= {theirs[f"{_seeded(y)}_grad"]: seed for y, seed in seeds.items()}
    added = [node for node in graph if any(y.name not in known for y in node.outputs if y.name)]
    for y in (y for node in added for y in node.outputs):
        if y in same:  # the builder has put another operator in the place of ours
            _replace(model, same.pop(y), y)
        elif y.name in ours:
            y.name = None
    for twin, value in same.items():
        ir.convenience.replace_all_uses_with(twin, value)
    graph.outputs.clear()
    graph.remove(added)
    model.graph.extend(added)
    for value in [value for name, value in graph.initializers.items() if name not in known]:
        del graph.initializers[str(value.name)]
        value.name = f"{value.name}.{len(model.graph)}" if value.name in ours else value.name
        model.graph.register_initializer(value)
    for domain in {node.domain for node in added}:
        model.opset_imports.setdefault(domain, 1)
    return {x: like(theirs[f"{x.name}_grad"], x) for x in wrt}


def _replace(model: ir.Model, old: ir.Value, new: ir.Value) -> None:
    like(new, old).metadata_props.update(old.metadata_props)
    ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
    node = old.producer()
    if node is not None and node.graph is model.graph:
        model.graph.remove(node)


def _prepare(op: Emitter, node: ir.Node) -> None:
    """Give a node the form that the builder takes: with the outputs that it reads, and numbers of one type."""
    if node.domain != "":
        return
    x = node.inputs[0]
    if node.op_type == "LayerNormalization":
        for index in (1, 2):
            further_output(node, index, ir.DataType(node.attributes.get_int("stash_type", 1)), None)
    elif node.op_type == "Dropout" and _is_trained(node):
        further_output(node, 1, ir.DataType.BOOL, node.outputs[0].shape)
    elif node.op_type == "Dropout" and not any(mask.uses() for mask in node.outputs[1:]):
        node.op_type = "Identity"
        node.attributes.clear()
        node.resize_inputs(1)
        node.resize_outputs(1)
    elif node.op_type == "Pow":
        exponent = node.inputs[1]
        assert x is not None and exponent is not None
        if exponent.dtype != x.dtype:
            known = constant_of(exponent)
            typed = op.Cast(exponent, to=x.dtype) if known is None else op.constant(known, like=x)
            node.replace_input_with(1, typed)


def _is_trained(node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (constant_of(mode) is None or bool(constant_of(mode)))


def _pads_itself(node: ir.Node) -> bool:
    return node.attributes.get_string("auto_pad", "NOTSET").startswith("SAME")


def _dims(x: ir.Value | None) -> tuple[int | ir.SymbolicDim, ...]:
    return () if x is None or x.shape is None else tuple(x.shape)


def _are_known(dims: Iterable[int | ir.SymbolicDim]) -> bool:
    return all(isinstance(dim, int) for dim in dims)


def _broadcasts_unseen(node: ir.Node, active: frozenset[ir.Value]) -> bool:
    """Tell whether only the run shows if an input is stretched."""
    skipped = 2 if node.op_type == "MatMul" else 0  # the dimensions of the matrices
    inputs = node.inputs[2:] if node.op_type == "Gemm" else node.inputs
    have = _dims(node.outputs[0])
    have = have[: len(have) - skipped]
    wanted = [_dims(x) for x in inputs if x in active]
    wanted = [dims[: len(dims) - skipped] for dims in wanted]
    pairs = [pair for want in wanted for pair in zip(reversed(have), reversed(want), strict=False)]
    return any(may_broadcast(*pair) for pair in pairs)


# What the builder has wrong, without a word unless the reason says so, and the reason.
WRONG: tuple[tuple[str, Callable[[ir.Node, frozenset[ir.Value]], bool], str], ...] = (
    ("AveragePool", lambda node, _: _pads_itself(node), "does not pad by auto_pad"),
    ("AveragePool", lambda node, _: node.attributes.get_int("ceil_mode", 0) == 1, "ignores ceil_mode"),
    (
        "AveragePool",
        lambda node, _: any(size != 1 for size in node.attributes.get_ints("dilations", ())),
        "ignores dilations",
    ),
    ("AveragePool", lambda node, _: len(_dims(node.inputs[0])) == 5, "is wrong in three dimensions"),
    ("AveragePool", lambda node, _: not _are_known(_dims(node.inputs[0])), "needs all sizes of its input"),
    ("Conv", lambda node, _: _pads_itself(node), "does not pad by auto_pad"),
    ("Dropout", lambda node, _: not _is_trained(node), "drops in inference, too"),
    (
        "Gelu",
        lambda node, _: node.attributes.get_string("approximate", "none") == "tanh",
        "is the exact one's",
    ),
    (
        "Gemm",
        lambda node, _: len(node.inputs) > 2 and _dims(node.inputs[2]) == (),
        "does not sum to a scalar C",
    ),
    (
        "LayerNormalization",
        lambda node, active: any(
            y.is_graph_output() or any(user for user in y.uses()) for y in node.outputs[1:]
        ),
        "ignores its mean and deviation",
    ),
    (
        "MaxPool",
        lambda node, _: not _are_known(_dims(node.inputs[0])[1:]),
        "needs all sizes of its input but the first",
    ),
    ("MaxPool", lambda node, _: node.attributes.get_int("storage_order", 0) == 1, "ignores storage_order"),
    ("Pad", lambda node, _: len(node.inputs) > 3 and node.inputs[3] is not None, "ignores axes"),
    (
        "ScatterElements",
        lambda node, _: node.attributes.get_string("reduction", "none") != "none",
        "ignores reduction",
    ),
    (
        "ScatterND",
        lambda node, _: node.attributes.get_string("reduction", "none") != "none",
        "ignores reduction",
    ),
    (
        "Where",
        lambda node, active: any(
            x in active and x.shape != node.outputs[0].shape for x in node.inputs[1:] if x
        ),
        "does not sum where it broadcasts",
    ),
    *(
        (op_type, _broadcasts_unseen, "takes sizes of different names for equal ones")
        for op_type in ("Add", "Sub", "Mul", "Div", "Pow", "Max", "Min", "MatMul", "Gemm", "Expand")
    ),
)


def _wrong(node: ir.Node, active: frozenset[ir.Value]) -> str:
    """Return what is wrong with the builder's gradient of a node, or nothing."""
    if node.domain != "":
        return ""
    reasons = (reason for op_type, test, reason in WRONG if op_type == node.op_type and test(node, active))
    return ", ".join(f"has it wrong: it {reason}" for reason in reasons)


def _seeded(y: ir.Value) -> str:
    return f"{y.name}.seeded"


def _is_small(x: ir.Value) -> bool:
    tensor = ir.convenience.get_const_tensor(x)
    return tensor is not None and tensor.size <= SMALL


def _said(error: RuntimeError | None) -> str:
    """Return what the builder says of an operator, without where in its source."""
    text = " ".join(str(error).split())
    if UNREGISTERED in text:
        return "has none"
    missing = re.search(r"NodeArg by name: (.*)_grad|partial derivative for '(.*)' as", text)
    if missing:
        return f"has none by {missing[1] or missing[2]!r}"
    return f"says: {re.sub(LOCATION, '', text)}"

"""Differentiate with onnxruntime-training's GradientGraphBuilder, which emits its own fused operators.

The builder receives only the part of the graph between the parameters and the loss, so that it treats the same values
as constants as `Gradient` does. Weights are inputs of this part, so that it folds none of them. Only this module of
passes imports onnxruntime.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir import Value

from graphopt.errors import GraphoptError, NoGradient
from graphopt.graph.emitter import Emitter
from graphopt.graph.opsets import check_training_version
from graphopt.graph.roles import TRAINING_RUNTIME, needs_training_runtime
from graphopt.graph.storage import whole
from graphopt.graph.traversal import extracted_between
from graphopt.graph.values import constant_of, given, like, name_of, swap
from graphopt.pipeline import rules_in_use
from passes.gradients import GradientSource
from passes.gradients.rules.blocks import TokenBlocks
from passes.gradients.walk import between, blocking, further_output, inputs_of

_MOST_SHOWN = 100  # the largest number of elements in a constant that the builder sees, such as axes or exponents
LOCATION = r"^/\S+:\d+ .*?\) (const )?|^.*\[ONNXRuntimeError\] : \d+ : \w+ : "


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

    def requires(self, model: ir.Model) -> None:
        if rules_in_use():
            raise GraphoptError(
                "OrtGradient: expected no rules, since onnxruntime-training differentiates by its own, found some: "
                "leave rules out, or use Gradient"
            )
        super().requires(model)

    def backward(
        self, op: Emitter, model: ir.Model, seeds: Mapping[Value, Value], wrt: Sequence[Value]
    ) -> dict[Value, Value]:
        builder = Builder(model)
        path = between(model.graph, seeds, wrt)
        wrt = [x for x in wrt if any(user in path for user in x.consumers())]
        if not wrt:
            return {}
        if any(TokenBlocks.read(node) for node in path):
            raise GraphoptError(
                "OrtGradient: expected a loss of all logits at once, found one in blocks of tokens, which "
                f"{TRAINING_RUNTIME} cannot differentiate: set blocks=None of the loss, or use Gradient"
            )
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
            old = same.pop(y)
            swap(old, like(y, old))
            node = old.producer()
            if node is not None and node.graph is model.graph:
                model.graph.remove(node)
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


class Builder:
    """Build gradient graphs of parts of one model with onnxruntime-training."""

    def __init__(self, model: ir.Model) -> None:
        try:
            from onnxruntime.capi import onnxruntime_pybind11_state as runtime

            self._builder, self._options = runtime.GradientGraphBuilder, runtime.SessionOptions()
        except (ImportError, AttributeError) as error:
            raise GraphoptError(
                "OrtGradient needs onnxruntime-training, which is not installed: pip install "
                "onnxruntime-training==1.19.2 in an environment without another onnxruntime, or use Gradient"
            ) from error
        check_training_version(model, "OrtGradient", ": use Gradient")
        self._options.log_severity_level = 4  # errors are raised instead
        self._model = model

    def extract(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Model:
        """Return the graph of `nodes` with each of `outputs` behind an Identity. Other values are inputs."""
        made = {y for node in nodes for y in node.outputs}
        read = dict.fromkeys(x for node in nodes for x in inputs_of(node))
        needed = [x for x in read if x is not None and x not in made]
        constants = {x: ir.convenience.get_const_tensor(x) for x in needed}
        inputs = [x for x, tensor in constants.items() if tensor is None or tensor.size > _MOST_SHOWN]
        graph = extracted_between(self._model.graph, inputs, outputs)
        for x in graph.inputs:
            if x.is_initializer():
                del graph.initializers[name_of(x)]
                x.const_value = None
        for i, y in enumerate(graph.outputs):  # the gradient of a value that has other readers is a sum
            output = ir.Value(name=seeded(y), type=y.type, shape=y.shape)
            graph.append(ir.node("Identity", [y], outputs=[output]))
            graph.outputs[i] = output
        functions = list(self._model.functions.values())
        return ir.Model(graph, ir_version=self._model.ir_version, functions=functions)

    def build(self, part: ir.Model, wrt: Sequence[ir.Value]) -> onnx.ModelProto:
        """Return `part` with its gradients NAME_grad. For outputs with other readers it is left undefined."""
        outputs, inputs = set(map(name_of, part.graph.outputs)), set(map(name_of, wrt))
        builder = self._builder(whole(part), outputs, inputs, "", self._options)
        builder.build()
        return onnx.load_from_string(builder.get_model())

    def refusal(
        self, path: Sequence[ir.Node], active: frozenset[ir.Value], error: RuntimeError | None = None
    ) -> GraphoptError:
        """Return the error that names every operator of `path` that the builder refuses or gets wrong."""
        refused: dict[tuple[str, str], dict[ir.Node, str]] = {}
        for node in path:
            reason = wrong(node, active) or self._complaint(node, path, active)
            if reason:
                refused.setdefault((node.domain, node.op_type), {})[node] = f"{TRAINING_RUNTIME} {reason}"
        if not refused:
            return GraphoptError(f"{TRAINING_RUNTIME} refuses the model, {_said(error)}: use Gradient")
        wrt = sorted((x for x in active if x.producer() not in path), key=name_of)
        found = [nodes for _, nodes in sorted(refused.items())]
        return NoGradient([blocking(list(nodes), wrt, next(iter(nodes.values()))) for nodes in found], "use Gradient")

    def _complaint(self, node: ir.Node, path: Sequence[ir.Node], active: frozenset[ir.Value]) -> str:
        """Return the builder's error for one node, or an empty text."""
        used = [y for y in node.outputs if y.is_graph_output() or any(user in path for user in y.consumers())]
        try:
            wrt = [x for x in inputs_of(node) if x is not None and x in active]
            self.build(self.extract([node], used), wrt)
        except RuntimeError as error:
            return _said(error)
        return ""


def seeded(y: ir.Value) -> str:
    """Return the name of the Identity of an output."""
    return f"{y.name}.seeded"


def _said(error: RuntimeError | None) -> str:
    """Return the builder's error about an operator, without its source location."""
    text = " ".join(str(error).split())
    if "has not been registered" in text:
        return "has none"
    missing = re.search(r"NodeArg by name: (.*)_grad|partial derivative for '(.*)' as", text)
    if missing:
        return f"has none by {missing[1] or missing[2]!r}"
    return f"says: {re.sub(LOCATION, '', text)}"


def fit_to_builder(op: Emitter, node: ir.Node) -> None:
    """Convert a node to the form that the builder supports: with the outputs that it reads, and one number type."""
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
        x, exponent = given(x), given(node.inputs[1])
        if exponent.dtype != x.dtype:
            known = constant_of(exponent)
            typed = op.Cast(exponent, to=x.dtype) if known is None else op.constant(known, like=x)
            node.replace_input_with(1, typed)


def _is_trained(node: ir.Node) -> bool:
    mode = node.inputs[2] if len(node.inputs) > 2 else None
    return mode is not None and (constant_of(mode) is None or bool(constant_of(mode)))


def _dims(x: ir.Value | None) -> tuple[int | ir.SymbolicDim, ...]:
    return () if x is None or x.shape is None else tuple(x.shape)


def _is_stretched(x: ir.Value | None, y: ir.Value) -> bool:
    want, have = _dims(x), _dims(y)
    return len(want) < len(have) or any(w == 1 and h != 1 for w, h in zip(want, have, strict=True))


def faults(node: ir.Node, active: frozenset[ir.Value]) -> dict[str, object]:
    """Return whether a node has each of the errors in the builder's gradient of its operator, by the error.

    The builder raises none of them unless the text says so.
    """
    ints, texts = node.attributes.get_int, node.attributes.get_string
    dims = _dims(node.inputs[0] if node.inputs else None)
    unknown = [i for i, dim in enumerate(dims) if not isinstance(dim, int)]
    match node.op_type:
        case "AveragePool":
            return {
                "does not pad by auto_pad": "SAME" in texts("auto_pad", ""),
                "counts no padding under ceil_mode": ints("ceil_mode", 0) and ints("count_include_pad", 0),
                "ignores dilations": {*node.attributes.get_ints("dilations", ())} - {1},
                "is wrong in three dimensions": len(dims) == 5,
                "needs all sizes of its input": bool(unknown),
            }
        case "Conv":
            return {"does not pad by auto_pad": "SAME" in texts("auto_pad", "")}
        case "Dropout":
            return {"drops in inference, too": not _is_trained(node)}
        case "Gelu":
            return {"is the exact one's": texts("approximate", "none") == "tanh"}
        case "Gemm":
            scalar = any(x in active and _dims(x) == () for x in node.inputs[2:])
            beta = node.attributes.get_float("beta", 1.0)
            return {"does not sum to a scalar C under beta": scalar and beta != 1}
        case "LayerNormalization":
            used = any(y.is_graph_output() or y.uses() for y in node.outputs[1:])
            return {"ignores its mean and deviation": used}
        case "MatMul":
            return {"takes matrices alone": any(len(_dims(x)) == 1 for x in node.inputs)}
        case "MaxPool":
            return {
                "needs all sizes of its input but the first": any(unknown),
                "ignores storage_order": ints("storage_order", 0) == 1,
            }
        case "Pad":
            return {"ignores axes": len(node.inputs) > 3 and node.inputs[3] is not None}
        case "ScatterElements" | "ScatterND":
            return {"ignores reduction": texts("reduction", "none") != "none"}
        case "Where":
            stretched = (x in active and _is_stretched(x, node.outputs[0]) for x in node.inputs[1:])
            return {"does not sum where it broadcasts": any(stretched)}
    return {}


def wrong(node: ir.Node, active: frozenset[ir.Value]) -> str:
    """Return the errors in the builder's gradient of a node, or an empty text."""
    found = faults(node, active).items() if node.domain == "" else ()
    return ", ".join(f"has it wrong: it {reason}" for reason, is_affected in found if is_affected)

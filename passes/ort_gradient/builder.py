"""Wrap onnxruntime-training's builder of gradient graphs. Only this module of passes imports onnxruntime.

The builder receives only the part of the graph between the parameters and the loss, so that it treats the same values
as constants as `Gradient` does. Weights are inputs of this part, so that it folds none of them.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import onnx
import onnx_ir as ir

from graphopt.errors import BlockingOperator, GraphoptError, NoGradient
from graphopt.graph.opsets import ORT_TRAINING_IR_VERSION, ORT_TRAINING_OPSET
from graphopt.graph.roles import TRAINING_RUNTIME
from graphopt.graph.storage import whole
from graphopt.graph.traversal import extracted_between
from graphopt.graph.values import name_of
from passes.gradients.walk import inputs_of, reaches
from passes.ort_gradient.limits import wrong

_SMALL = 100  # the largest number of elements in a constant that the builder sees, such as axes or exponents
UNREGISTERED = "has not been registered"
LOCATION = r"^/\S+:\d+ .*?\) (const )?|^.*\[ONNXRuntimeError\] : \d+ : \w+ : "


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
        version = model.opset_imports[""]
        if version > ORT_TRAINING_OPSET or model.ir_version > ORT_TRAINING_IR_VERSION:
            raise GraphoptError(
                f"OrtGradient: expected a model of opset {ORT_TRAINING_OPSET} and IR version "
                f"{ORT_TRAINING_IR_VERSION} or older, found {version} and {model.ir_version}: use Gradient"
            )
        self._options.log_severity_level = 4  # errors are raised instead
        self._model = model

    def extract(self, nodes: Sequence[ir.Node], outputs: Sequence[ir.Value]) -> ir.Model:
        """Return the graph of `nodes` with each of `outputs` behind an Identity. Other values are inputs."""
        made = {y for node in nodes for y in node.outputs}
        read = dict.fromkeys(x for node in nodes for x in inputs_of(node))
        needed = [x for x in read if x is not None and x not in made]
        constants = {x: ir.convenience.get_const_tensor(x) for x in needed}
        inputs = [x for x, tensor in constants.items() if tensor is None or tensor.size > _SMALL]
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
        names = {name_of(y) for y in part.graph.outputs}
        text = whole(part)
        builder = self._builder(text, names, {name_of(x) for x in wrt}, "", self._options)
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
        blocking = []
        wrt = [x for x in active if x.producer() not in path]
        for (domain, op_type), nodes in sorted(refused.items()):
            blocks = tuple(sorted(name_of(x) for x in wrt if reaches(x, list(nodes))))
            names = tuple(name_of(node) for node in nodes)
            blocking.append(BlockingOperator(domain, op_type, names, blocks, next(iter(nodes.values()))))
        return NoGradient(blocking, "use Gradient")

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
    if UNREGISTERED in text:
        return "has none"
    missing = re.search(r"NodeArg by name: (.*)_grad|partial derivative for '(.*)' as", text)
    if missing:
        return f"has none by {missing[1] or missing[2]!r}"
    return f"says: {re.sub(LOCATION, '', text)}"

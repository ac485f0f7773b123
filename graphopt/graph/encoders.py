"""Cut nodes that encode strings off a model: ONNX Runtime binds no strings in a training step, and none has a gradient.

The executor runs these nodes before each step, and the trained model has them again.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError
from graphopt.graph.message_inference import INFERENCE_ERRORS
from graphopt.graph.metadata import Note
from graphopt.graph.postprocessing import add_opsets, detach_outputs
from graphopt.graph.storage import replace_nodes
from graphopt.graph.traversal import extracted_between, values_in, values_read
from graphopt.graph.typed_messages import infer_types
from graphopt.graph.values import is_read, like, name_of, operator_of

_PREFIX = "graphopt/encoders/"  # of values inside, whose names the trained model may have, too


@dataclass(frozen=True)
class Encoders(Note, key="graphopt.encoders", expected="names of inputs and the part that encodes strings"):
    """Record the inputs of a file that takes strings, and the part that computes numbers of these.

    Args:
        inputs: the names of all inputs of the file.
        part: a serialized model, whose outputs are inputs of the training graph.
    """

    inputs: tuple[str, ...]
    part: bytes

    def model(self) -> onnx.ModelProto:
        """Return the part."""
        return onnx.ModelProto.FromString(self.part)


def string_inputs(model: ir.Model) -> list[ir.Value]:
    return [x for x in model.graph.inputs if x.dtype is ir.DataType.STRING]


def detach_encoders(model: ir.Model) -> None:
    """Move the nodes that read strings of the inputs into the metadata; the numbers that they compute become inputs.

    Outputs of the model among what such nodes compute are detached.

    Raises:
        GraphoptError: the type of what such a node computes cannot be inferred.
    """
    graph, texts = model.graph, set(string_inputs(model))
    if not texts:
        return
    _infer(model)
    numbers: list[ir.Value] = []
    for node in graph:
        if texts.isdisjoint(values_read(node)):
            continue
        for y in node.outputs:
            if y.type is None and is_read(y):
                raise GraphoptError(
                    f"cannot infer the type of {y.name!r}, output of {operator_of(node)} node {node.name!r}, which "
                    "reads strings: declare its type and shape in value_info"
                )
            (texts.add if y.dtype is ir.DataType.STRING else numbers.append)(y)
    if copied := [y for y in graph.outputs if y in texts or y in numbers]:
        detach_outputs(model, copied, lambda value: value.is_graph_input())
    read = [y for y in numbers if y.uses()]
    if read:
        part = extracted_between(graph, list(graph.inputs), read)
    else:
        part = ir.Graph([like(ir.Value(name=x.name), x) for x in graph.inputs], [], nodes=[])
    encoders = ir.Model(part, ir_version=model.ir_version)
    _set_apart(encoders)
    packed = ir.to_proto(encoders).SerializeToString()
    Encoders(tuple(map(name_of, graph.inputs)), packed).write(model)
    for y in read:
        fed = like(ir.Value(name=y.name), y)
        y.name = f"{_PREFIX}{y.name}"
        ir.convenience.replace_all_uses_with(y, fed)
        graph.inputs.append(fed)
    RemoveUnusedNodesPass()(model)
    for x in string_inputs(model):
        graph.inputs.remove(x)


def _infer(model: ir.Model) -> None:
    """Infer the types of values as far as ONNX does, and those of ONNX Runtime's Tokenizer."""
    tokenizers = [node for node in model.graph if node.op_type == "Tokenizer"]
    for node in [*tokenizers, None]:
        try:
            infer_types(model)
        except INFERENCE_ERRORS:
            return
        if node is not None and node.outputs[0].type is None and (x := node.inputs[0]) is not None:
            node.outputs[0].type = ir.TensorType(ir.DataType.STRING)
            node.outputs[0].shape = None if x.shape is None else ir.Shape([*x.shape, None])


def _set_apart(part: ir.Model) -> None:
    """Rename the values inside of a model."""
    interface = {*part.graph.inputs, *part.graph.outputs}
    for graph in part.graphs():
        for x in (*values_in(graph), *graph.initializers.values()):
            if x.name and x not in interface:
                x.name = f"{_PREFIX}{x.name}"


def restore_encoders(proto: onnx.ModelProto, part: onnx.ModelProto, order: Sequence[str]) -> None:
    """Put the nodes that encode strings back into an inference model.

    Args:
        part: these nodes, in the opset of the model.
        order: the names of the inputs of the file.
    """
    graph, computed = proto.graph, {y.name for y in part.graph.output}
    inputs = {x.name: x for x in [*part.graph.input, *graph.input] if x.name not in computed}
    replace_nodes(graph, [*part.graph.node, *graph.node])
    del graph.input[:]
    graph.input.extend(inputs.pop(name) for name in order if name in inputs)
    graph.input.extend(inputs.values())
    graph.initializer.extend(part.graph.initializer)
    add_opsets(proto, part)

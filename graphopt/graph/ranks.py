"""Find the ranks of inputs that a file declares no shape of: the operators that read them often allow one alone."""

from __future__ import annotations

import onnx
import onnx_ir as ir

from graphopt.graph.message_inference import INFERENCE_ERRORS, infer_message
from graphopt.graph.storage import without_weights
from graphopt.graph.values import name_of

_LARGEST = 6


def find_ranks(model: ir.Model) -> None:
    """Give each input without a shape the only rank that ONNX's inference accepts, with sizes of its own names.

    An input that may have several ranks stays without a shape. Ranks that the file declares for outputs count.
    """
    for x in model.graph.inputs:
        if x.shape is None and isinstance(x.type, ir.TensorType):
            message = without_weights(model)
            del message.graph.value_info[:]
            possible = [rank for rank in range(_LARGEST + 1) if _is_possible(message, name_of(x), rank)]
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

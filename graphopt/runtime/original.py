"""Put trained weights, and slots for adapters, into the model that was compiled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.adapters.combined import slots_of, trained_adapters
from graphopt.adapters.slots import add_slots
from graphopt.graph import inference
from graphopt.graph.loading import Source, read_original
from graphopt.graph.original import write_weights


def trained_into(
    model: ir.Model, state: Mapping[str, np.ndarray], into: Source, *, slots: bool
) -> onnx.ModelProto:
    """Return a copy of the model that was compiled, with the weights of a training graph.

    Args:
        model: the training graph.
        state: the values of its state by name.
        into: the model that was compiled.
        slots: add slots for adapters instead of merging them.

    Raises:
        GraphoptError: `into` is another model, or adapters cannot be merged.
    """
    found = trained_adapters(model, state, "slots") if slots else []
    trained = inference.trained(model, state, adapters="left out" if slots else "merged")
    original = read_original(into)
    write_weights(original, trained, model, merged=not slots)
    if found:
        add_slots(original, slots_of(model, found))
    return original

"""Put trained weights, and slots for adapters, into the model that was compiled."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphopt.adapters.combined import adaptations, combined
from graphopt.adapters.slots import add_slots
from graphopt.graph import inference
from graphopt.graph.loading import Source, read_original
from graphopt.graph.merging import adapted
from graphopt.graph.original import write_weights
from graphopt.graph.parts import ModelParts


def trained_into(
    model: ir.Model, state: Mapping[str, np.ndarray], into: Source, *, slots: bool
) -> ModelParts:
    """Return a copy of the model that was compiled, with the weights of a training graph.

    Args:
        model: the training graph.
        state: the values of its state by name.
        into: the model that was compiled.
        slots: add slots for adapters. Otherwise, adapters are merged into the weights, or, if one of these is
            quantized, stay operators.

    Raises:
        GraphoptError: `into` is another model, or adapters can neither be merged nor stay operators.
    """
    beside = slots or any(note.quantized for _, note in adapted(model))
    found = adaptations(model, state, "trained") if beside else []
    trained = inference.trained_parts(model, state, adapters="left out" if beside else "merged")
    original = read_original(into)
    write_weights(original, trained, model, merged=not beside)
    if found:
        add_slots(original.proto, combined(found), filled=not slots)
    return original

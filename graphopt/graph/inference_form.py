"""Note how inference computes what training computes in another way."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import onnx_ir as ir

from graphopt.graph.metadata import Note, expect
from graphopt.graph.opsets import MANY


@dataclass(frozen=True)
class InferenceForm(
    Note,
    key="graphopt.inference",
    expected="inputs by number, the number of an input, or an operator, its attributes, what it reads and an output",
):
    """Describe how inference computes a node's first output, if training computes it in another way.

    Args:
        inputs: names of graph inputs that replace the node's inputs, by input number.
        same_as: the number of the input that the output equals.
        operator: the operator that computes the output in inference, with its attributes; `reads` are the names of
            its inputs, and `output` is the number of its output.
        merged: whether the form holds only once adapters are merged into the weights.
        predicting: whether the form holds only for predictions, and not for the evaluation of the loss.
    """

    inputs: Mapping[int, str] = field(default_factory=dict)
    same_as: int | None = None
    operator: tuple[str, dict[str, Any]] | None = None
    reads: tuple[str, ...] = ()
    output: int = 0
    merged: bool = False
    predicting: bool = False

    def check(self) -> None:
        expect(all(index >= 0 for index in self.inputs), 0 <= self.output < MANY)
        if self.operator is not None:
            ir.convenience.convert_attributes(self.operator[1])

"""Compile a model for a page that trains it: from its bytes and what a visitor chose to the files of a host folder.

It needs no ONNX Runtime and starts no process, so that it can run where the page runs.
"""

from __future__ import annotations

import glob
import json
import os
import sys
import tempfile
import warnings
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.compiler import compile
from graphopt.errors import GraphoptError, escaped, kind_of, unknown
from graphopt.fields import check_options
from graphopt.graph.limits import Limits
from graphopt.graph.loading import load
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import dims_of, is_floating, name_of
from graphopt.hosts.export import export_hosts
from graphopt.intervals import within
from graphopt.runtime.checkpoint import state_bytes

_LIMITS = Limits(nodes=20_000, constant_bytes=2**25)
MOST_BYTES = 2**31  # of an answer
REFUSED = 3  # the exit status where the output is an error's line


@dataclass(frozen=True)
class Choice:
    """Say how a page trains a model.

    Args:
        trains: `head` is a new last layer; `lora` is adapters of all products; `all` is every weight of the file.
        loss: `cross_entropy` is for classes, `mean_squared_error` for numbers.
        outputs: the number of classes, or of columns of numbers. A model of another number gets a new last layer.
        optimizer: AdamW, or SGD with a momentum of 0.9.
        learning_rate: the initial rate of the optimizer.
        rank: of the adapters.
        device: what the page trains on.

    Raises:
        GraphoptError: a field has another type, or lies outside of its interval.
    """

    trains: Literal["head", "lora", "all"] = "all"
    loss: Literal["cross_entropy", "mean_squared_error"] = "cross_entropy"
    outputs: int = within("[1, 10000]", 1, whole=True)
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = within("(0, 1000]", 1e-3)
    rank: int = within("[1, 1024]", 4, whole=True)
    device: Literal["wasm", "webgpu"] = "wasm"

    def __post_init__(self) -> None:
        check_options(self)

    @classmethod
    def of(cls, said: object) -> Choice:
        """Return the choice that JSON of anyone says."""
        if not isinstance(said, Mapping):
            raise GraphoptError(f"choice: expected fields by name, found {kind_of(said)}")
        known = [field.name for field in fields(cls)]
        for name in said:
            if name not in known:
                raise GraphoptError(f"choice: {unknown('field', str(name), known)}")
        return cls(**said)


def compile_for_page(model: bytes, choice: Choice) -> dict[str, bytes]:
    """Return the files of the host folder of a model, by name, as `export_hosts` writes them.

    Args:
        model: an ONNX file that contains its weights. It may be untrusted, as `graphopt.load` says.
        choice: what trains, and how.

    Raises:
        GraphoptError: the bytes are no such model, a pass does not fit it, or the files are larger than a page reads.

    >>> from graphopt import models
    >>> from graphopt.hosts.for_page import Choice, compile_for_page
    >>> model = onnx_ir.to_proto(models.mlp((4,), 3, hidden=[8])).SerializeToString()
    >>> "train.onnx" in compile_for_page(model, Choice(trains="head", outputs=5))
    True
    """
    import passes
    from passes.losses.classification import activation_behind

    loaded = load(model, limits=_LIMITS)
    is_fixed = any(isinstance(dim, int) for x in loaded.graph.inputs for dim in dims_of(x)[:1])
    normalize = passes.Normalize(batch="free" if is_fixed else None)
    normal = normalize(loaded.clone()).model
    output = next((y for y in normal.graph.outputs if is_floating(y)), None)
    if output is None:
        raise GraphoptError("the model: expected an output of floating-point numbers, found none")
    is_of_classes = choice.loss == "cross_entropy"
    activation = activation_behind(output) if is_of_classes else None
    if activation == "Sigmoid":
        raise GraphoptError(
            "the model: expected logits, or probabilities that a Softmax computes, found a Sigmoid, of labels that "
            "need not exclude each other: train it in Python with passes.BinaryCrossEntropy"
        )
    loss = passes.CrossEntropy(output=name_of(output), from_logits=activation is None)
    is_new = choice.trains == "head" or [*dims_of(output)[-1:]] != [choice.outputs]
    adapters = [passes.LoRA(rank=choice.rank)] if choice.trains == "lora" else []
    heads = [passes.Head(output=name_of(output), classes=choice.outputs)] if is_new else []
    rate = choice.learning_rate
    step = compile(
        loaded,
        normalize=normalize,
        adapter=[*adapters, *heads] or None,
        parameters=passes.Parameters(unfreeze=_trained(normal) if is_new and choice.trains == "all" else None),
        loss=loss if is_of_classes else passes.MeanSquaredError(output=name_of(output)),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(rate) if choice.optimizer == "adamw" else passes.SGD(rate, momentum=0.9),
    )
    with tempfile.TemporaryDirectory() as folder:
        export_hosts(step, folder, target="webgpu" if choice.device == "webgpu" else None)
        paths = sorted(Path(folder).iterdir())
        size = sum(path.stat().st_size for path in paths)
        if size > MOST_BYTES:
            raise GraphoptError(
                f"the model: expected at most {MOST_BYTES:,} bytes of graphs and state, found {size:,}: train "
                "adapters, a new last layer, or a smaller model"
            )
        return {path.name: path.read_bytes() for path in paths}


def _trained(normal: ir.Model) -> list[str]:
    """Return patterns of the weights of a normalized model that train without a new last layer."""
    import passes

    found = passes.Parameters()(normal.clone()).model
    return [glob.escape(name_of(x)) for x in with_role(found, Role.PARAMETER)]


def main() -> None:
    """Compile the model in the standard input, as the JSON in the first argument chooses, and write safetensors."""
    with os.fdopen(os.dup(1), "wb") as answer:
        os.dup2(2, 1)  # what libraries print
        try:
            files = compile_for_page(sys.stdin.buffer.read(), Choice.of(json.loads(sys.argv[1])))
            answer.write(state_bytes({name: np.frombuffer(data, np.uint8) for name, data in files.items()}))
        except GraphoptError as error:
            answer.write(escaped(str(error)).encode())
            sys.exit(REFUSED)


if __name__ == "__main__":
    warnings.simplefilter("ignore")
    main()

"""Export a training graph as a folder from which a program in any language trains."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import onnx
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedOpsetsPass

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, unknown
from graphopt.files import write_folder
from graphopt.graph import inference, metadata
from graphopt.graph.loading import Source, load
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import original_name
from graphopt.graph.opsets import ir_version_of, rewrite_in
from graphopt.graph.roles import FED, STATE, Role, check_trains, role_of, with_role
from graphopt.graph.shapes import fold_shapes, infer
from graphopt.graph.simplify import Simplify
from graphopt.graph.state import take_initial
from graphopt.graph.storage import whole
from graphopt.graph.traversal import subgraphs
from graphopt.graph.unroll import Unroll
from graphopt.graph.values import name_of, next_of, tensor_bytes
from graphopt.hosts.adapters import adapter_files, adapter_graph
from graphopt.hosts.contract import HOST, Place, contract, places
from graphopt.hosts.proof import DEBUG, PROOF, proof_batch, proof_files
from graphopt.runtime.checkpoint import state_bytes
from graphopt.targets.check import add_check, not_finite
from graphopt.targets.portable import FORMS
from graphopt.targets.target import target_of

STATE_FILE, CONTRACT = "state.safetensors", "host.json"
INFERENCE, _WEIGHTS_FILE = "inference.onnx", "weights.bin"
_LARGE, _MANY, _ALIGNED = 2**10, 2**22, 64  # bytes: of a weight and of all graphs' in a file of their own
_LOWEST_OPSET = 14  # importers and ONNX's evaluator have fewer operators, or wrong ones, of earlier opsets
# In which there is a program, and its files.
LANGUAGES = {"c": ("*", "abi/*"), "java": ("*", "graphopt/*"), "javascript": ("*",)}
REPORTED = (Role.LOSS, Role.METRIC, Role.PREDICTION)  # in evaluation

_PathLike = str | os.PathLike[str]


@checked()
def export_hosts(
    step: Source,
    folder: _PathLike,
    *,
    batch: int | None = None,
    unroll: bool = False,
    target: str | None = None,
    language: str | None = None,
) -> None:
    """Export a training graph for programs in any language, on ONNX Runtime or another runtime for ONNX.

    All files are written, or none:

    - `train.onnx` runs one step. State and hyperparameters are plain inputs. `train_steps.onnx` runs several steps.
    - `evaluate.onnx` and `predict.onnx` are the inference form, with the same names.
    - `state.safetensors` contains the initial state. A checkpoint is the same file with other numbers.
    - `inference.onnx` is the trained model, which reads its weights from `state.safetensors`.
    - `weights.bin` contains the weights that do not train, once for all graphs, if the model has adapters or many of
      them; graphs for a target contain theirs. A browser that trains adapters downloads it once.
    - `adapter.onnx` computes from the state the arrays of DoRA's adapter files that depend on the norms of weights.
    - `adapter.onnx_adapter` and `adapter_model.safetensors` with `adapter_config.json` are the adapters of the initial
      state in the forms of `graphopt.save_adapter` that they have, where a host puts the numbers of its state.
    - `proof.safetensors` has a batch, and sums of what the plain step computes from it in float64: hosts compare their
      first step with them. By `debug.safetensors`, they find the first node that differs.
    - `host.json` lists names, types, shapes, and the output that replaces each state.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        folder: the folder to write to.
        batch: fix the number of rows of a batch, for runtimes without dynamic shapes.
        unroll: unroll Scan and Loop, for runtimes without loops; see `passes.UnrollLoops`.
        target: the runtime whose missing or incorrect operators the graphs avoid; see `passes.Portable`.
        language: write the program that trains, too, to a folder of this name: `javascript`, a package for Node and
            browsers; `java`, a package for Android and others; or `c`, a library.

    Raises:
        GraphoptError: the model trains nothing, or cannot be written in this form.

    >>> import os
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> graphopt.export_hosts(step, "host")
    >>> sorted(os.listdir("host"))  # doctest: +NORMALIZE_WHITESPACE
    ['debug.safetensors', 'evaluate.onnx', 'host.json', 'inference.onnx', 'predict.onnx', 'proof.safetensors',
     'state.safetensors', 'train.onnx', 'train_steps.onnx']
    """
    if target is not None and target not in FORMS:
        raise GraphoptError(unknown("target", target, FORMS))
    if language is not None and language not in LANGUAGES:
        raise GraphoptError(unknown("language", language, LANGUAGES))
    model = load(step)
    check_trains(model, "export_hosts")
    if batch is not None:
        _fix_batch(model, batch)
    proven_on = proof_batch(model)
    initial = take_initial(model)
    trained = inference.trained(model, initial, as_stored=False, adapters="kept")
    model.graph.outputs[:] = [y for y in model.graph.outputs if role_of(y) is not Role.SOURCE]
    plain, adapter = _plain(model), adapter_graph(model, initial)
    models = _graphs({**plain, **({"adapter": adapter} if adapter is not None else {})}, initial, unroll, target)
    content = state_bytes({name_of(x): initial[name_of(x)] for x in with_role(model, *STATE)})
    where = places(content)
    trained = _with_weights_in_state(trained, model, where)
    described = contract(model, initial, where, models)
    proof = {}
    if proven_on is not None:
        nexts = [next_of(x) for x in with_role(model, *STATE)]
        reports = cast("dict[str, dict[str, list[str]]]", described["graphs"])
        compared = {name: reports[name]["reports"] for name in plain}
        compared["train"] = nexts + compared["train"]
        proof = proof_files(plain, models["train"], compared, initial, proven_on)
    shared = b"" if target is not None else _shared([*models.values()], trained, bool(adapted(model)))
    adapters, blocks = adapter_files(model, initial, computes="adapter" in models)
    described = {
        **described,
        "files": {
            **{name: f"{name}.onnx" for name in models},
            **{"inference": INFERENCE, "state": STATE_FILE},
            **({"weights": _WEIGHTS_FILE} if shared else {}),
            **{name: file for name, file in (("proof", PROOF), ("debug", DEBUG)) if file in proof},
        },
        "batch": batch,
        "target": target,
        **({"adapters": blocks} if blocks else {}),
    }
    for graph in models.values():
        _strip(graph)
    HOST.write(models["train"], json.dumps(described))
    write_folder(
        folder,
        {
            **{f"{name}.onnx": whole(graph) for name, graph in models.items()},
            INFERENCE: trained.SerializeToString(),
            **({_WEIGHTS_FILE: shared} if shared else {}),
            STATE_FILE: content,
            **adapters,
            **proof,
            CONTRACT: json.dumps(described, indent=1, ensure_ascii=False).encode() + b"\n",
            **(_program(language) if language is not None else {}),
        },
    )


def _plain(model: ir.Model) -> dict[str, ir.Model]:
    """Return the graphs to export, by name, before they are lowered."""
    evaluated, predicted = with_role(model, *REPORTED), with_role(model, Role.PREDICTION)
    train = model.clone()
    train.graph.outputs[:] = [y for y in train.graph.outputs if not metadata.ON_DEMAND.is_set(y)]
    graphs = {"train": train, "evaluate": inference.extract(model, evaluated)}
    return graphs | ({"predict": inference.extract(model, predicted)} if predicted else {})


def _graphs(
    plain: Mapping[str, ir.Model], initial: Mapping[str, np.ndarray], unroll: bool, target: str | None
) -> dict[str, ir.Model]:
    """Return the graphs to export, by name, lowered for the target; state is plain inputs, the opset the oldest."""
    graphs = {name: graph.clone() for name, graph in plain.items()}
    if unroll:
        import passes

        for graph in graphs.values():
            passes.UnrollLoops().apply(graph)
    graphs = {name: target_of(target or "portable").lower(graph) for name, graph in graphs.items()}
    add_check(graphs["train"], not_finite(initial), chained=target is not None)
    if not unroll:
        graphs["train_steps"] = graphs["train"].clone()
        Unroll().apply(graphs["train_steps"])
    for graph in graphs.values():
        Simplify().apply(graph)
        RemoveUnusedOpsetsPass()(graph)
        graph.ir_version = ir_version_of(rewrite_in([graph], _LOWEST_OPSET))
    return graphs


def _shared(models: Sequence[ir.Model], trained: onnx.ModelProto, has_adapters: bool) -> bytes:
    """Move weights of several graphs to one file, to which they refer, and return its content, which may be empty."""
    places: dict[bytes, tuple[int, int]] = {}
    content: list[bytes] = []

    def place(numbers: bytes) -> tuple[int, int]:
        key = hashlib.sha256(numbers).digest()
        if key not in places:
            offset = sum(map(len, content))
            places[key] = offset, len(numbers)
            content.append(numbers + bytes(-len(numbers) % _ALIGNED))
        return places[key]

    weights = dict(pair for model in models for pair in _large_weights(model))
    tensors = [x for x in trained.graph.initializer if len(x.raw_data) >= _LARGE]
    if not has_adapters and sum(x.nbytes for x in weights.values()) < _MANY:
        return b""
    for x, tensor in weights.items():
        offset, size = place(tensor.tobytes())
        shape = ir.Shape(tensor.shape.numpy())
        x.const_value = ir.ExternalTensor(_WEIGHTS_FILE, offset, size, tensor.dtype, shape=shape, name=name_of(x))
    for y in tensors:
        offset, size = place(y.raw_data)
        onnx.external_data_helper.set_external_data(y, _WEIGHTS_FILE, offset=offset, length=size)
        y.ClearField("raw_data")
    return b"".join(content)


def _large_weights(model: ir.Model) -> Iterator[tuple[ir.Value, ir.TensorProtocol]]:
    """Yield the initializers of a graph that are large enough for a file of their own, with their numbers."""
    for x in model.graph.initializers.values():
        tensor = x.const_value
        if tensor is not None and not x.is_graph_input() and tensor_bytes(tensor) >= _LARGE:
            yield x, tensor


def _program(language: str) -> dict[str, bytes]:
    """Return the files of the program that trains in a language, by their paths in the host folder."""
    source = Path(__file__).parent / language
    found = [path for pattern in LANGUAGES[language] for path in source.glob(pattern) if path.is_file()]
    return {path.relative_to(source.parent).as_posix(): path.read_bytes() for path in sorted(found)}


def _strip(model: ir.Model) -> None:
    """Remove the documentation and the metadata of a model, and the types of inner values, which runtimes infer."""
    nodes = [*model.graph.all_nodes()]
    graphs = [model.graph, *(body for node in nodes for body in subgraphs(node))]
    inner = [x for graph in graphs for x in graph.initializers.values()]
    inner += [y for node in nodes for y in node.outputs]
    holders: list[metadata.Holder] = [model, *graphs, *nodes, *model.graph.inputs, *inner]
    for holder in holders:
        metadata.all_of(holder).clear()
        holder.doc_string = None
    for x in inner:
        if not x.is_graph_input() and not x.is_graph_output():
            x.type = x.shape = None


def _fix_batch(model: ir.Model, batch: int) -> None:
    """Fix the first dimension of each feed, and every dimension of the same name."""
    if not isinstance(batch, int) or batch < 1:
        raise GraphoptError(f"batch: expected 1 or more, or None, found {batch!r}")
    first = [x.shape[0] for x in with_role(model, *FED) if x.shape]
    fixed = {dim.value for dim in first if isinstance(dim, ir.SymbolicDim)} - {None}
    for x in [*model.graph.inputs, *(y for node in model.graph.all_nodes() for y in node.outputs)]:
        if x.shape is not None:
            dims = [batch if isinstance(d, ir.SymbolicDim) and d.value in fixed else d for d in x.shape]
            x.shape = ir.Shape(dims)
    infer(model)
    fold_shapes(model)


def _with_weights_in_state(trained: onnx.ModelProto, model: ir.Model, where: Mapping[str, Place]) -> onnx.ModelProto:
    """Make the trained model read its weights from the state file, and return it."""
    owners = {original_name(x): name_of(x) for x in with_role(model, *STATE)}
    for tensor in trained.graph.initializer:
        if tensor.name in owners:
            place = where[owners[tensor.name]]
            onnx.external_data_helper.set_external_data(tensor, STATE_FILE, offset=place.offset, length=place.size)
            tensor.ClearField("raw_data")
    return trained

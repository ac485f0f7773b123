"""Describe a training graph in JSON: its feeds, its state and successors, its hyperparameters and its reports."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from importlib import metadata
from typing import NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import Text
from graphopt.graph.roles import FED, STATE, Role, labels_of, role_of, with_role
from graphopt.graph.traversal import nodes_of
from graphopt.graph.values import dtype_of, name_of, next_of
from graphopt.targets.check import CHECK

HOST = Text("graphopt.host")  # of a model: host.json; see graphopt.hosts.contract

# The first ONNX Runtime that reads an opset: https://onnxruntime.ai/docs/reference/compatibility.html
_ONNXRUNTIME = ("1.8", "1.9", "1.11", "1.12", "1.14", "1.15", "1.17", "1.18", "1.21", "1.22")
_FIRST_RUNTIME = dict(enumerate(_ONNXRUNTIME, start=14))
FORMAT, _VERSION = "graphopt.host", 1

Entry = dict[str, object]


class Place(NamedTuple):
    """Locate a tensor's numbers, in bytes from the beginning of a file."""

    offset: int
    size: int


def places(content: bytes) -> dict[str, Place]:
    """Return the place of each tensor in a safetensors file, by name.

    Source: https://github.com/huggingface/safetensors, section Format.
    """
    (length,) = struct.unpack_from("<Q", content)
    begin = 8 + length
    header = json.loads(content[8:begin])
    ends = {name: entry["data_offsets"] for name, entry in header.items() if name != "__metadata__"}
    return {name: Place(begin + start, end - start) for name, (start, end) in ends.items()}


def _first_runtime(models: Mapping[str, ir.Model]) -> str:
    """Return the first ONNX Runtime that reads models and computes all operators correctly on CPUs, but train_steps's.

    tests/runtime_sweep.py shows what older ones compute.
    """
    opset = 1
    wanted = ["1.8"]
    for name, model in models.items():
        opset = max(opset, model.opset_imports.get("", 1))
        for node in nodes_of(model) if name != "train_steps" else ():
            if node.op_type == "Scan":  # a plan of memory that its body shares is wrong
                wanted.append("1.19")
            elif node.op_type == "GridSample" and node.attributes.get_string("mode", "") in (
                "cubic",
                "bicubic",
            ):
                wanted.append("1.18")
            elif node.op_type.endswith("Pool") and node.attributes.get_int("ceil_mode", 0) > 0:
                wanted.append("1.30" if node.attributes.get_int("count_include_pad", 0) else "1.21")
    if opset not in _FIRST_RUNTIME:
        return "the newest"
    return max([*wanted, _FIRST_RUNTIME[opset]], key=lambda version: int(version.split(".")[1]))


def contract(
    step: ir.Model,
    initial: Mapping[str, np.ndarray],
    places: Mapping[str, Place],
    models: Mapping[str, ir.Model],
) -> Entry:
    """Return the contract as `host.schema.json` describes it, without the files.

    Args:
        step: the training graph.
        initial: the initial values of its state and hyperparameters, by name.
        places: the place of each state in the state file.
        models: the exported graphs, by name.
    """
    opset = max(model.opset_imports.get("", 1) for model in models.values())
    domains = {name: v for model in models.values() for name, v in model.opset_imports.items() if name}
    return {
        "format": FORMAT,
        "version": _VERSION,
        "producer": f"graphopt {metadata.version('graphopt')}",
        "runtime": {
            "onnxruntime": _first_runtime(models),
            "opset": opset,
            "ir_version": max(model.ir_version for model in models.values()),
            "domains": domains,
        },
        "feeds": [_feed(x) for x in with_role(step, *FED)],
        "state": [_state(x, places[name_of(x)]) for x in with_role(step, *STATE)],
        "hyperparameters": [
            {**_described(x), "default": initial[name_of(x)].tolist()} for x in with_role(step, Role.HYPERPARAMETER)
        ],
        "check": CHECK,
        "reports": [_described(y) for y in step.graph.outputs if role_of(y) is not Role.NEXT],
        "graphs": {name: _interface(model) for name, model in models.items()},
    }


def _interface(model: ir.Model) -> Entry:
    return {
        "feeds": [name_of(x) for x in with_role(model, *FED)],
        "state": [name_of(x) for x in with_role(model, *STATE)],
        "hyperparameters": [name_of(x) for x in with_role(model, Role.HYPERPARAMETER)],
        "reports": [name_of(y) for y in model.graph.outputs if role_of(y) is not Role.NEXT and y.name != CHECK],
    }


def _state(x: ir.Value, place: Place) -> Entry:
    return {**_described(x), "next": next_of(x), "offset": place.offset, "bytes": place.size}


def _feed(x: ir.Value) -> Entry:
    labels = labels_of(x)
    if labels is None or math.isinf(labels.high):
        return _described(x)
    ignored = {} if labels.ignored is None else {"ignored": labels.ignored}
    return {**_described(x), "labels": [labels.low, labels.high], **ignored}


def _described(value: ir.Value) -> Entry:
    role = role_of(value)
    assert role is not None
    dims = None if value.shape is None else [d if isinstance(d, int) else d.value for d in value.shape]
    return {"name": name_of(value), "role": role.value, "type": dtype_of(value).numpy().name, "shape": dims}

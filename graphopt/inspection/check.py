"""Check training graphs without training, and return what is found as a table."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.compiler import compile
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph import inference
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import FED, Role, labels_of, role_of, with_role
from graphopt.graph.values import is_floating, name_of
from graphopt.runtime.checks.findings import CheckTable
from graphopt.runtime.checks.first_check import FirstCheck
from graphopt.runtime.device import Device
from graphopt.runtime.encoding import encoding_of
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature
from graphopt.runtime.state_buffers import StateBuffers

ROWS = 4  # of random inputs
SIZES = (16, 32, 64, 224)  # of axes that the graph leaves open, tried in this order


@checked()
def check(
    model: Source,
    data: Mapping[str, Any] | None = None,
    *,
    verify: Literal["first", "full"] = "full",
    threads: int | None = None,
    **steps: Any,
) -> CheckTable:
    """Check a model's training graph on a batch without training, by oracles that share nothing with what made it.

    The training graph's predictions are compared with those of the file, run by ONNX Runtime as it is; gradients with
    central differences of the loss; updates with the published formula of the optimizer. Executors do the same before
    their first step; see their option `verify`. Which weights train is not checked: `report` lists them.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model: an inference model, which is compiled, or a training
            graph.
        data: a batch, arrays by the names of the training graph's inputs; random numbers of the declared types by
            default.
        verify: compare the gradient of each parameter (`full`), or of all along one direction (`first`).
        threads: the number of threads per operator; by default, the runtime's choice.
        steps: the steps of `compile`, such as `loss=passes.CrossEntropy()`. Without a loss, all is checked on a mean
            squared error, and without an optimizer no update.

    Raises:
        GraphoptError: the model cannot be compiled, or the data does not fit. A difference is in the table, and is no
            error.

    >>> from graphopt import models
    >>> table = graphopt.check(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> table.agrees, {finding.verdict for finding in table.findings}
    (True, {'agrees'})
    """
    loaded = _compiled(model, steps)
    device = Device("cpu", threads=threads, verify=verify, native=False)
    buffers = StateBuffers(device, loaded)
    first = FirstCheck(device, loaded, buffers)
    signature = Signature(device, with_role(loaded, *FED))
    if data is not None:
        if not isinstance(data, Mapping):
            raise GraphoptError(f"data: expected arrays by name, found {kind_of(data)}")
        encoding = encoding_of(device, loaded)
        tensors = signature.completed(data if encoding is None else encoding.encoded(data))
        signature.check(tensors)
        signature.check_labels(tensors)
        texts = {name: x for name, x in data.items() if name not in signature.accepted}
        return CheckTable(first.findings({**texts, **signature.arrays(tensors)}), "the data")
    for size in SIZES:
        findings = first.findings(_random_batch(loaded, size, device, buffers))
        if any(x.part == "gradient" and x.name != "all" for x in findings):
            break
    return CheckTable(findings, "random inputs of the declared types")


def _compiled(model: Source, steps: Mapping[str, Any]) -> ir.Model:
    """Return a training graph, or a copy of the one that is given."""
    given = load(model)
    if with_role(given, Role.PARAMETER):
        if steps:
            raise GraphoptError(f"check: expected a training graph alone, found it with {', '.join(steps)}")
        return given
    if steps.get("loss") is None:
        import passes

        outputs = [name_of(y) for y in given.graph.outputs if is_floating(y)]
        steps = {**steps, "loss": passes.MeanSquaredError(output=outputs[0] if len(outputs) > 1 else None)}
    return load(compile(model, **steps))


def _random_batch(model: ir.Model, size: int, device: Device, buffers: StateBuffers) -> dict[str, np.ndarray]:
    """Return random inputs of the declared types for a training graph.

    Args:
        size: the size of axes other than the first one that the graph leaves open; of one name, the same.
    """
    rng, sizes = np.random.default_rng(0), dict[str, int]()
    fed = with_role(model, *FED)
    batch = {name_of(x): _random(x, _shape(x, sizes, size), rng) for x in fed if role_of(x) is Role.DATA}
    others = [x for x in fed if name_of(x) not in batch]
    if any(name not in sizes for x in others for name in _names(x)):
        sizes = {**_predicted(model, batch, device, buffers), **sizes}
    return {**batch, **{name_of(x): _random(x, _shape(x, sizes, size), rng) for x in others}}


def _names(x: ir.Value) -> list[str]:
    return [dim.value for dim in x.shape or () if not isinstance(dim, int) and dim.value is not None]


def _shape(x: ir.Value, sizes: dict[str, int], size: int) -> list[int]:
    """Return a shape for an input, and add the sizes of its names."""
    shape = []
    for axis, dim in enumerate(x.shape or ()):
        own = ROWS if axis == 0 else size
        if isinstance(dim, int):
            shape.append(dim)
        else:
            shape.append(own if dim.value is None else sizes.setdefault(dim.value, own))
    return shape


def _predicted(
    model: ir.Model, batch: Mapping[str, np.ndarray], device: Device, buffers: StateBuffers
) -> dict[str, int]:
    """Return the sizes of the axes of predictions by name, such as of boxes, whose number the image's size decides."""
    predictions = [y for y in with_role(model, Role.PREDICTION) if _names(y)]
    if not predictions:
        return {}
    state = {
        name: np.asarray(x.numpy()) for name, x in {**buffers.sets[buffers.current], **buffers.fed}.items()
    }
    try:
        session = Session(device, inference.extract(model, predictions))
        found = session.compute_arrays({**state, **batch})
    except Exception:  # noqa: BLE001 - the runtime raises many types if sizes do not fit; the caller tries others
        return {}
    sizes = {}
    for y in predictions:
        for dim, length in zip(y.shape or (), found[name_of(y)].shape, strict=True):
            if not isinstance(dim, int) and dim.value is not None:
                sizes[dim.value] = length
    return sizes


def _random(x: ir.Value, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return random numbers that an input may have."""
    assert x.dtype is not None
    labels, dtype = labels_of(x), x.dtype.numpy()
    if labels is not None:
        options = labels.all() if np.isfinite(labels.high) else np.array([0, 1])
        return rng.choice(options, shape).astype(dtype)
    if role_of(x) is Role.SAMPLE_WEIGHT:
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    if is_floating(x):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)

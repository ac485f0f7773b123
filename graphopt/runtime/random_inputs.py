"""Make random inputs for training graphs, of sizes that their networks take."""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphopt.graph import inference
from graphopt.graph.roles import FED, STATE, Role, labels_of, role_of, with_role
from graphopt.graph.values import dtype_of, is_floating, is_static, name_of, size_name, size_names
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.state_buffers import StateBuffers

ROWS = 4
SIZES = (16, 32, 64, 224, 1024)  # of axes that the graph leaves open, tried in this order
_MOST_NUMBERS = 2**26  # of an input that is tried

_Arrays = dict[str, np.ndarray]


def random_inputs(model: ir.Model, size: int, device: Device, buffers: StateBuffers) -> _Arrays:
    """Return random inputs of the declared types for a training graph.

    Args:
        size: the size of axes other than the first one that the graph leaves open; of one name, the same. Targets
            have the sizes of the predictions.
    """
    rng, sizes = np.random.default_rng(0), dict[str, int]()
    fed = with_role(model, *FED)
    batch = {name_of(x): _random(x, _shape(x, sizes, size), rng) for x in fed if role_of(x) is Role.DATA}
    others = [x for x in fed if name_of(x) not in batch]
    if not size_names(others) <= sizes.keys():
        sizes = {**(_predicted(model, batch, device, buffers) or {}), **sizes}
    return {**batch, **{name_of(x): _random(x, _shape(x, sizes, size), rng) for x in others}}


def open_sizes(model: ir.Model, rows: int) -> tuple[dict[str, int], int | None] | None:
    """Return sizes by name for the axes that the inputs of a training graph leave open.

    First axes get `rows`. Others get the first of `SIZES` with which ONNX Runtime can compute the predictions: smaller
    ones may end the process (tests/faults.py: negative-sizes).

    Returns: the sizes, and the one of other axes, None without such axes; None if no size runs.
    """
    fed = with_role(model, *FED)
    firsts = {name for x in fed for dim in (x.shape or ())[:1] if (name := size_name(dim))}
    if size_names(fed) <= firsts:
        return dict.fromkeys(firsts, rows), None
    copy = model.clone()
    device = Device("cpu", verify=False, native=False)
    buffers = StateBuffers(device, copy)
    for size in SIZES:
        if any(math.prod(_shape(x, {}, size)) > _MOST_NUMBERS for x in fed):
            return None
        inputs = random_inputs(copy, size, device, buffers)
        if _predicted(copy, inputs, device, buffers) is not None:
            shapes = [(x.shape or (), inputs[name_of(x)].shape) for x in with_role(copy, *FED)]
            named = [(dim, n) for dims, sizes in shapes for dim, n in zip(dims, sizes, strict=True)]
            sizes = {name: n for dim, n in named if (name := size_name(dim))}
            return {**sizes, **dict.fromkeys(firsts, rows)}, size
    return None


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
) -> dict[str, int] | None:
    """Return the sizes of the axes of predictions by name, such as of boxes, whose number the image's size decides.

    Returns: None if ONNX Runtime cannot compute the predictions.
    """
    predictions = with_role(model, Role.PREDICTION) or with_role(model, Role.LOSS)
    shapes = {x: x.shape.numpy() for x in with_role(model, *STATE) if x.shape is not None and is_static(x)}
    state = {name_of(x): np.zeros(shape, dtype_of(x).numpy()) for x, shape in shapes.items()}
    state |= {  # an executor has taken the initial values out of its graph
        name: np.asarray(x.numpy()) for name, x in {**buffers.sets[buffers.current], **buffers.fed}.items()
    }
    try:
        session = Session(device, inference.extract(model, predictions))
        found = session.compute_arrays({**state, **batch})
    except Exception:  # noqa: BLE001 - the runtime raises many types if sizes do not fit; the caller tries others
        return None
    sizes = {}
    for y in predictions:
        for dim, length in zip(y.shape or (), found[name_of(y)].shape, strict=True):
            if name := size_name(dim):
                sizes[name] = length
    return sizes


def _random(x: ir.Value, shape: list[int], rng: np.random.Generator) -> np.ndarray:
    """Return random numbers that an input may have."""
    labels, dtype = labels_of(x), dtype_of(x).numpy()
    if labels is not None:
        options = labels.all() if np.isfinite(labels.high) else np.array([0, 1])
        return rng.choice(options, shape).astype(dtype)
    if role_of(x) is Role.SAMPLE_WEIGHT:
        return rng.uniform(0.5, 1.5, shape).astype(dtype)
    if is_floating(x):
        return rng.standard_normal(shape).astype(dtype)
    return rng.integers(0, 2, shape).astype(dtype)

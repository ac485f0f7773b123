"""Carry the state of a training graph to a device and back: weights, statistics, moments, the number of steps."""

from __future__ import annotations

import os
from collections.abc import Mapping

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.metadata import KIND, original_name
from graphopt.graph.roles import STATE, Role, role_of, with_role
from graphopt.graph.state import ACCUMULATED, STEP, owners
from graphopt.graph.values import COUNTERS, name_of
from graphopt.on_device.checkpoint import DeviceState, declared, fitting
from graphopt.on_device.graphs import COUNTED, OnDevice, moments
from graphopt.runtime.checkpoint import load_state
from passes.optimizers import Optimizer

_FROM_EXECUTOR = "pass the state of an executor whose graph is compiled from this model, with this optimizer"
_WITH_MOMENTS = "save it with include_optimizer_state=True"


def state_on_device(made: OnDevice, given: Mapping[str, np.ndarray] | str | os.PathLike[str] | None) -> DeviceState:
    """Return the initial state of compiled graphs, or that of a training graph in a device's form.

    Raises:
        GraphoptError: the state is of a graph of another model or pipeline.
    """
    if given is None:
        return DeviceState(made.trained, made.untrained)
    arrays = load_state(given)[0] if isinstance(given, str | os.PathLike) else given
    if not isinstance(arrays, Mapping):
        raise GraphoptError(
            f"state: expected arrays by name or the path of a checkpoint, found {kind_of(given)}: write executor.state"
        )

    def taken(name: str, like: np.ndarray) -> np.ndarray:
        array = np.asarray(arrays[name]) if name in arrays else None
        return fitting(f"state {name!r}", array, f"{like.dtype}{[*like.shape]}", _FROM_EXECUTOR)

    factors = moments(made.optimizer_pass)
    slots = {
        own: [(taken(f"{made.names[own]}.{kind}", w) * factor).astype(w.dtype) for kind, factor in factors.items()]
        for own, w in made.trained.items()
    }
    steps = int(arrays.get(STEP, np.array(0)))
    return DeviceState(
        trained={own: taken(made.names[own], w) for own, w in made.trained.items()},
        untrained={
            own: np.array(steps % COUNTED, x.dtype) if own.startswith(COUNTERS) else taken(made.names[own], x)
            for own, x in made.untrained.items()
        },
        moments={own: found or [np.zeros_like(made.trained[own])] for own, found in slots.items()},
        steps=steps,
    )


def state_of_step(step: ir.Model, optimizer: Optimizer, found: DeviceState, where: str) -> dict[str, np.ndarray]:
    """Return the state of a training graph that a device's state is, by name.

    Args:
        where: what messages call the device's state.

    Raises:
        GraphoptError: the state is of another graph or optimizer, or has no moments.
    """
    factors, owner = moments(optimizer), owners(step.graph)
    slots = {KIND.read(x) or "" for x in with_role(step, Role.SLOT)} - {ACCUMULATED}
    if slots != set(factors):
        names = ", ".join(sorted(slots)) or "none"
        raise GraphoptError(
            f"pipeline: expected the optimizer of the training graph, whose slots are {names}, "
            f"found {optimizer}: pass the pipeline that the graph was compiled by"
        )
    arrays = {**found.trained, **found.untrained}
    originals = {name_of(x): original_name(x) for x in with_role(step, Role.PARAMETER)}
    state: dict[str, np.ndarray] = {}
    for x in with_role(step, *STATE):
        kind = KIND.read(x)
        if role_of(x) is Role.SLOT and kind not in factors:
            continue  # the gradients of a part of a batch
        array = arrays.get(original_name(x))
        advice = "take the checkpoint of this model and pipeline"
        if role_of(x) is Role.COUNTER:
            array = None if found.steps is None else np.array(found.steps, np.int64)
            advice = _WITH_MOMENTS
        elif kind in factors:
            kept = found.moments.get(originals[owner[name_of(x)]], [])
            place = list(factors).index(kind)
            array = kept[place] / np.float32(factors[kind]) if place < len(kept) else None
            advice = advice if kept else _WITH_MOMENTS
        state[name_of(x)] = fitting(f"{where}: {name_of(x)!r}", array, declared(x), advice)
    return state

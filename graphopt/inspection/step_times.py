"""Measure what lowering a step to the machine saves."""

from __future__ import annotations

import functools
from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.runtime.executor import Executor
from graphopt.runtime.forms import medians
from graphopt.runtime.signature import InputSpec


def saved_by_kernels(model: ir.Model, opened: Callable[[bool], Executor], batch: int) -> str:
    """Return a line with the time of a step with kernels and without, on random numbers and on labels of 0.

    Args:
        model: the training graph of the executors.
        opened: returns an executor, with kernels or without.
        batch: the size of symbolic dimensions.
    """
    rng = np.random.default_rng(0)
    feeds = {}
    for x in with_role(model, *FED):
        spec = InputSpec(x)
        shape = [batch if size is None else size for size in spec.shape or ()]
        is_floating = np.issubdtype(spec.dtype, np.floating)
        feeds[str(x.name)] = (rng.standard_normal(shape) if is_floating else np.zeros(shape)).astype(
            spec.dtype
        )
    try:
        native, plain = medians([functools.partial(opened(kind).step, feeds) for kind in (True, False)])
    except GraphoptError as error:
        return f"  saves      not measured: {error}"
    times = f"{1e3 * native:.3g} ms with kernels, {1e3 * plain:.3g} ms without"
    return f"  a step     {times}: {plain / native:.2f} times as fast, at batch size {batch}"

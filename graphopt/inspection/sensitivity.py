"""Measure how much each layer changes what a model computes when it alone is rounded to integers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import numpy as np
import onnx_ir as ir

from graphopt.inspection.report import Report
from graphopt.pipeline import Pipeline

# Yields the outputs of a model on rows of data
Predict = Callable[[ir.Model], Iterator[Mapping[str, np.ndarray]]]


def sensitivity(result: Report, pipeline: Pipeline, run: Predict) -> Iterator[str]:
    """Yield a line for each product that `FakeQuantize` rounds, the most sensitive one first; none without the pass.

    The error is |y - r| / |y| over all floating-point outputs y of the model and r of the model in which the product
    alone is rounded.

    Args:
        result: the report of the pipeline.
        pipeline: the pipeline, which has learnt its ranges.
        run: runs a model on rows of data.
    """
    import passes

    model = result.model
    chosen = None
    for name, text, after, _ in result.stages:
        matching = (x for x in pipeline[name] if isinstance(x, passes.FakeQuantize) and repr(x) == text)
        chosen = next(matching, None)
        if chosen is not None:
            break
        model = after
    if chosen is None:
        return
    plain = [_floats(y) for y in run(model)]
    size = sum(float(np.sum(y**2)) for y in plain) or 1.0
    errors = {}
    for name, alone in chosen.alone(model).items():
        rounded = model.clone()
        alone.apply(rounded)
        found = (_floats(y) for y in run(rounded))
        errors[name] = (sum(float(np.sum((y - r) ** 2)) for y, r in zip(plain, found, strict=True)) / size) ** 0.5
    yield "sensitive  to the rounding of one product alone: |change| / |outputs|, on training rows"
    for name, error in sorted(errors.items(), key=lambda item: -item[1]):
        yield f"  {error:.2e}  {name}"


def _floats(outputs: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return all numbers of the floating-point outputs, in float64."""
    arrays = [y.ravel().astype(np.float64) for y in outputs.values() if y.dtype.kind == "f"]
    return np.concatenate([*arrays, np.zeros(0)])

"""Warn of options that are allowed, but that hardly anyone means."""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx_ir as ir

from graphopt.data import Batches
from graphopt.data.dataset import TARGET, LazyArray
from graphopt.graph.roles import Role, TargetSpec, role_of
from graphopt.graph.values import is_floating
from graphopt.training.options import FitOptions

_MOST_CLASSES = 20
ROWS_OF_BYTES = 100  # whose largest number tells how they are scaled
ROWS_READ = 100_000  # of a target, to guess whether it numbers classes
_KEEP = ("Cast", "Flatten", "Identity", "Reshape", "Squeeze", "Transpose", "Unsqueeze")  # the numbers stay
DEFAULT_BATCH = FitOptions.batch_size


def advise(batches: Batches, rows: int, batch_size: int) -> None:
    """Warn of a batch larger than the rows that train, and of class numbers that train a regression."""
    level = _level()
    if rows < batch_size and batch_size > DEFAULT_BATCH:
        warnings.warn(
            f"batch_size={batch_size}: more than the {rows:,} rows that train, so that an epoch is a single step: "
            f"choose a smaller one, such as {min(DEFAULT_BATCH, max(rows // 10, 1))}",
            stacklevel=level,
        )
    for name, value in batches.inputs.items():
        if (node := _product_of(value)) and (largest := _largest_byte(batches, name)) > 1:
            warnings.warn(
                f"data {name!r}: whole numbers up to {largest} go into {node} as they are: if the model was made for "
                "numbers of 0 to 1, divide by 255, as graphopt.data.images does",
                stacklevel=level,
            )
        spec = TargetSpec.read(value) if role_of(value) is Role.TARGET else None
        names = batches.data.labels
        if spec is not None and spec.classes and names and len(names) != spec.classes:
            warnings.warn(
                f"data {name!r}: {len(names)} classes have names, the model has {spec.classes} outputs: give it one "
                "output per class",
                stacklevel=level,
            )
        if spec is not None and spec.task == "regression" and (classes := _class_count(batches, name)):
            loss = "binary_cross_entropy" if classes == 2 else "cross_entropy"
            kind = "BinaryCrossEntropy" if classes == 2 else "CrossEntropy"
            warnings.warn(
                f"data {name!r}: whole numbers from 0 to {classes - 1} train a regression: if they number classes, "
                f"choose loss={loss} (passes.{kind}), which does not take one class for larger than another",
                stacklevel=level,
            )


def _product_of(value: ir.Value) -> str:
    """Return the node of a product that reads an input of floats as it is fed, and nothing if none does."""
    if not is_floating(value) or role_of(value) is Role.TARGET:
        return ""
    for node in value.consumers():
        if node.op_type in ("Conv", "Gemm", "MatMul") and node.inputs[0] is value:
            return f"{node.op_type} node {node.name!r}"
        if node.op_type in _KEEP and (found := _product_of(node.outputs[0])):
            return found
    return ""


def _largest_byte(batches: Batches, name: str) -> int:
    """Return the largest number of the first rows of an array of bytes; 0 for other arrays."""
    array = batches.data.arrays.get(name)
    if array is None or isinstance(array, LazyArray) or array.dtype != np.uint8 or not len(array):
        return 0
    return int(np.max(array[:ROWS_OF_BYTES]))


def _level() -> int:
    """Return how many calls above `advise` graphopt was called."""
    frame, level = sys._getframe(1), 1
    while frame.f_back is not None and frame.f_globals.get("__name__", "").startswith("graphopt."):
        frame, level = frame.f_back, level + 1
    return level


def _class_count(batches: Batches, name: str) -> int:
    """Return the number of classes if a target looks like their numbers, otherwise 0.

    It does if its numbers are whole, and the data says so, or none of 0 to the largest is rare, as counts and grades
    have rare ones.
    """
    data = batches.data
    target = data.arrays.get(name, data.arrays.get(TARGET))
    if target is None or isinstance(target, LazyArray) or target.dtype.kind not in "iub" or target.ndim > 2:
        return 0
    numbers = np.asarray(target[:ROWS_READ]).reshape(-1)
    known = data.classes or len(data.labels or ())
    if known > 1 or int(numbers.max()) >= _MOST_CLASSES or int(numbers.min()) != 0:
        return known if known > 1 else 0
    counts = np.bincount(numbers.astype(np.int64))
    is_even = len(counts) > 1 and counts.min() * 4 * len(counts) >= len(numbers) and counts.min() >= 5
    return len(counts) if is_even else 0

"""Random graphs: gradients, and gradients of gradients, are those of PyTorch's autograd, in float64 and on the runtime.

`python tests/test_random_graphs.py SEED ...` runs single seeds and prints their nodes; `pytest -m exhaustive
tests/test_random_graphs.py` runs 2,000 and more.
"""

from __future__ import annotations

import sys
import warnings

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from random_graphs import FLOAT32_ALONE, MAKERS, grown
from torch_oracle import pytorch, second

from graphopt import GraphoptError
from graphopt.derivatives import normal_form
from graphopt.runtime.executor import run as execute
from graphopt.testing.gradients import (
    NamedArrays,
    NoOracle,
    OtherForward,
    by_runtime,
    computed,
    distance,
    evaluator_of,
    gradient_model,
    in_precision,
    in_types,
    random_seeds,
)
from passes.gradients.registry import RULES

FEW, MANY, PART = 100, 2100, 100

# Rules that need nothing but a case of their own: draws, ranges, what ONNX Runtime lacks, and operators with a kink
# at every number.
ELSEWHERE = {"CumProd", "TensorScatter", "DeformConv", "RoiAlign"}

DOUBLE_TOLERANCE, SINGLE_TOLERANCE = 2e-6, 2e-3


def near_a_kink(model: ir.Model, point: NamedArrays, seeds: NamedArrays, expected: NamedArrays) -> bool:
    """Tell whether the gradient jumps when all inputs move a little, so that float32 may be on the other side."""
    random = np.random.default_rng(0)
    moved = {name: x + 1e-5 * random.standard_normal(x.shape) for name, x in point.items()}
    return not all(distance(pytorch(model, moved, seeds)[1][name], x, 1e-3) < 1e-2 for name, x in expected.items())


def differences(found: NamedArrays, expected: NamedArrays, tolerance: float, where: str) -> list[str]:
    """Return a line for each gradient that differs."""
    lines = []
    for name, gradient in expected.items():
        error = distance(found.get(f"{name}.grad", np.zeros_like(gradient)), gradient, 1e-2)
        if not error <= tolerance:
            lines.append(f"{where}: gradient by {name} differs by {error:.1e}")
    return lines


def check(seed: int) -> str:
    """Compare one random graph; return how, or raise what differs, with the seed.

    Raises:
        AssertionError: a gradient differs.
    """
    grown_graph = grown(seed)
    types = {node.op_type for node in grown_graph.nodes}
    how = "dynamic" if seed % 2 else "static"
    proto, point = grown_graph.to_model(dynamic=bool(seed % 2))
    try:
        model = normal_form(proto)
        differentiated = gradient_model(model)
    except GraphoptError:  # a rule that needs sizes says so, and does not with them
        if how == "static":
            raise
        how = "static, as sizes are needed"
        proto, point = grown_graph.to_model(dynamic=False)
        model = normal_form(proto)
        differentiated = gradient_model(model)
    outputs, _ = pytorch(model, point, {})
    seeds = random_seeds(outputs)
    _, expected = pytorch(model, point, seeds)
    if not all(np.isfinite(x).all() for x in expected.values()) or near_a_kink(model, point, seeds, expected):
        return "near a kink"
    lines = []
    double = None if types & FLOAT32_ALONE else in_precision(model, ir.DataType.DOUBLE)
    if double is not None and is_right(double, in_types(double, point)):
        first = gradient_model(double)
        fed = in_types(first, point | seeds)
        lines += differences(computed(first, fed), expected, DOUBLE_TOLERANCE, "in float64")
        if not lines and first.graph.outputs and len(grown_graph.nodes) <= 8:
            lines += second_differences(double, first, fed, how != "dynamic")
    forward = by_runtime(model, in_types(model, point))
    if forward is not None:
        for name, y in outputs.items():
            assert distance(forward[1][name], y, 1e-2) < 1e-3, f"the oracle computes another {name}"
        if differentiated.graph.outputs:
            found = execute(differentiated, in_types(differentiated, point | seeds))
            lines += differences(found, expected, SINGLE_TOLERANCE, "on the runtime")
    assert not lines, "\n".join(lines)
    return how


def is_right(model: ir.Model, point: NamedArrays) -> bool:
    """Tell whether the runtime runs a model, or the reference evaluator does and computes the same."""
    try:
        evaluator_of(model, point)
    except OtherForward:
        return False
    return True


def second_differences(model: ir.Model, first: ir.Model, feeds: NamedArrays, sized: bool) -> list[str]:
    """Return a line for each gradient of the gradient that differs; a rule may refuse what is not `sized`."""
    further = random_seeds(computed(first, feeds))
    try:
        expected, differentiated = second(model, feeds, further), gradient_model(first)
    except NoOracle:  # PyTorch has no second gradient
        return []
    except GraphoptError:  # a rule needs sizes
        if sized:
            raise
        return []
    found = computed(differentiated, feeds | further)
    return differences(found, expected, DOUBLE_TOLERANCE, "the gradient's gradient")


def wrong(seeds: range) -> list[str]:
    """Return what is wrong with the graphs of some seeds, a line each with its seed."""
    lines = []
    with warnings.catch_warnings(), np.errstate(all="ignore"):
        warnings.simplefilter("ignore")
        for seed in seeds:
            try:
                check(seed)
            except Exception as error:  # noqa: BLE001 - whatever goes wrong is told with its seed
                reason = " ".join(str(error).split())[:300]
                lines.append(f"python tests/test_random_graphs.py {seed}: {type(error).__name__}: {reason}")
    return lines


@pytest.mark.parametrize("start", range(0, FEW, 20))
@pytest.mark.slow
@pytest.mark.sample(2)
def test_gradients_of_random_graphs_are_pytorchs(start: int) -> None:
    assert not wrong(range(start, start + 20))


@pytest.mark.exhaustive
@pytest.mark.parametrize("start", range(FEW, MANY, PART))
def test_gradients_of_many_random_graphs_are_pytorchs(start: int) -> None:
    assert not wrong(range(start, start + PART))


def test_random_graphs_are_of_every_rule() -> None:
    assert {op_type for domain, op_type in RULES if domain == ""} - ELSEWHERE == set(MAKERS)


def main() -> None:
    for seed in map(int, sys.argv[1:]):
        proto, _ = grown(seed).to_model(dynamic=bool(seed % 2))
        print(onnx.printer.to_text(proto.graph))
        print(f"{seed}: {check(seed)}")


if __name__ == "__main__":
    main()

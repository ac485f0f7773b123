"""What the target `webgpu` writes computes the same on WebGPU, and leaves to the CPU only what is named here.

The cases are those of the gradient rules, and steps with each loss, optimizer, schedule and layer. They run in another
process, so that a crash ends one case alone. All of them: pytest -m "exhaustive or not exhaustive"
tests/test_webgpu_forms.py, or python tests/gpu_sweep.py, which prints a table.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator, Mapping
from typing import Any

import pytest
from gpu_sweep import CASES, NOT_HERE, Result, Worker, is_noise
from test_webgpu import missing

pytestmark = [pytest.mark.skipif(bool(missing()), reason=missing()), pytest.mark.slow]

# Operators without a kernel, by case: what cannot be written with others exactly, or is rare.
ON_THE_CPU: dict[str, set[str]] = {
    "*/Mod-*": {"Mod"},  # of floating-point numbers: a quotient that is rounded loses the remainder
    "*/GridSample-*": {"GridSample", "Mod"},
    "*/Cast-*to=11": {"Cast"},  # float64
    **{
        f"*/{name}-*": {name}
        for name in (
            *("AffineGrid", "Col2Im", "Compress", "DFT", "DeformConv", "Det", "MaxRoiPool", "MaxUnpool"),
            *("ReverseSequence", "RoiAlign", "Unique"),
        )
    },
    "*/unknown/MaxPool-*": {"MaxPool", "Cast"},  # windows that depend on unknown sizes
    "*/unknown/LpPool-*": {"LpPool"},
    "*/unknown/AveragePool-*": {"AveragePool"},
    "*/unknown/Einsum-*": {"EyeLike"},
    "*/Resize-*": {"EyeLike"},
    "*/MaxUnpool-*": {"MaxUnpool", "Greater"},
    "*/RoiAlign-*": {"RoiAlign", "Equal"},
    "*/RNN *": {"RNN", "Scan"},
    "*/GRU *": {"GRU", "Scan"},
    "*/LSTM *": {"Scan"},
    "*/ctc*": {"Scan", "Equal", "Greater"},
    "step/several/*": {"Scan", "Loop", "Identity"},
    "step/host/lstm": {"Scan"},
    "step/host/control_flow": {"Loop", "Identity"},
}
# What is read back, although no operator above is in the case.
READ = {
    "step/*/accumulate": "the condition of an If",
    "step/*/recompute": "a shape that depends on gradients, which orders the backward pass",
    "*/RoiAlign-*": "the conditions of an If",
    "step/Conv/*group=*": "sizes that the runtime gathers",
    "*-fed*": "indices that are inputs",
    "*/Resize-*none-[[]*": "sizes that are inputs",
    **{f"gradient/unknown/{name}-*": "positions, of unknown sizes" for name in ("GatherND", "Pad", "Slice", "Tile")},
}
# WGSL's functions are less exact than the CPU's.
INEXACT = {"*/DFT-*": 1e-3, "step/*": 2e-4, "*/+300/*": 5e-4}
REFUSED = {
    "step/*mixed": "requires f16",  # by an adapter without 16-bit floats
    "*/unknown/Einsum-*...*": "Ellipsis dimensions mismatch",  # of a size of 1 that is unknown
}


def of(case: str, table: Mapping[str, Any]) -> list[Any]:
    return [value for pattern, value in table.items() if fnmatch.fnmatchcase(case, pattern)]


@pytest.fixture(scope="module")
def worker() -> Iterator[Worker]:
    worker = Worker()
    yield worker
    worker.close()


def checked(result: Result) -> None:
    case = result.case
    if result.failed.startswith(NOT_HERE):
        pytest.skip(result.failed)
    refused = of(case, REFUSED)
    if result.failed and refused and refused[0] in result.failed:
        pytest.skip(result.failed)
    assert not result.failed
    tolerance = max([5e-5, *of(case, INEXACT)])
    for name, error in result.errors.items():
        assert error <= tolerance or is_noise(case, name), (name, error)
    named = set().union(*of(case, ON_THE_CPU))
    left = {node.split(" ")[0] for node in result.cpu if not is_on_shapes(node)}
    assert left <= named
    assert not result.reads or named or of(case, READ), result.reads


def is_on_shapes(node: str) -> bool:
    """Return whether a node on the CPU computes sizes or indices, or makes zeros."""
    operator, kind = node.split(" ", 1)
    return kind.startswith("int64") or kind in ("int32[]", "int32[1]") or operator == "ConstantOfShape"


@pytest.mark.parametrize("case", [name for name in CASES if name.startswith("step/")])
@pytest.mark.sample(30)
def test_steps(case: str, worker: Worker) -> None:
    checked(worker.run(case))


@pytest.mark.parametrize("case", [name for name in CASES if not name.startswith("step/")])
@pytest.mark.sample(90)
def test_operators_and_gradients(case: str, worker: Worker) -> None:
    checked(worker.run(case))


@pytest.mark.parametrize("case", ["step/host/mlp", "step/network/dropout", "step/loss/smoothed"])
def test_without_kernels_for_64_bits(case: str, worker: Worker) -> None:
    """In browsers, casts of integers run on the CPU."""
    result = worker.run(case, int64=False)
    assert not result.failed
    assert max(result.errors.values()) <= 2e-4

"""ONNX's node tests: how many have a gradient that PyTorch or finite differences prove; the number may only rise."""

from __future__ import annotations

import functools

import onnxruntime
import pytest
from onnx_node_tests import (
    Case,
    Tally,
    attempt,
    cases,
    proved,
    refusal,
    report,
    runtime_refusal,
)
from torch_oracle import pytorch

from graphopt.testing.gradients import DIFFERENCES, Proof

TOTAL, PASSED, IN_RUNTIME = 896, 895, 852
ELEMENTS, BY_PYTORCH, VACUOUS = 873_000, 820, 39
SAMPLE, SAMPLE_PASSED, SAMPLE_IN_RUNTIME = slice(None, None, 9), 99, 95

newest = pytest.mark.skipif(
    onnxruntime.__version__.startswith("1.19"),
    reason="ONNX Runtime 1.19 ends the process on a RotaryEmbedding",
)


@functools.cache
def all_cases() -> list[Case]:
    return list(cases())


def proofs(some: list[Case]) -> list[Proof]:
    """Prove cases by PyTorch, and by finite differences where it has no such operator."""
    found: list[Proof] = []
    for case in some:
        attempt(lambda case=case: found.append(proved(case, pytorch)))
    return found


@pytest.mark.slow
def test_onnx_has_as_many_cases_as_recorded() -> None:
    assert len(all_cases()) == TOTAL


@pytest.mark.slow
def test_a_sample_of_cases_passes() -> None:
    found = proofs(all_cases()[SAMPLE])
    assert len(found) >= SAMPLE_PASSED
    assert all(proof.by_nature for proof in found if proof.vacuous)
    assert sum(proof.compared for proof in found) >= 0.99 * sum(proof.total for proof in found)


@pytest.mark.exhaustive
def test_all_recorded_cases_pass() -> None:
    found = proofs(all_cases())
    assert len(found) >= PASSED
    assert sum(proof.compared for proof in found) >= ELEMENTS
    assert sum(proof.oracle == "pytorch" for proof in found) >= BY_PYTORCH
    assert all(proof.by_nature for proof in found if proof.vacuous)
    assert sum(proof.vacuous for proof in found) <= VACUOUS


@pytest.mark.slow
def test_finite_differences_of_the_runtime_prove_what_pytorch_does() -> None:
    """Without PyTorch, as users run it: of an operator that ONNX Runtime has in float64, and of one that it has not."""
    for op_type in ("Tanh", "LogSoftmax", "Conv", "GatherND"):
        for case in cases([op_type]):
            proof = proved(case)
            assert proof.oracle == DIFFERENCES and proof.compared == proof.total and not proof.vacuous


@pytest.mark.slow
def test_the_table_counts_what_shows_nothing() -> None:
    of = Tally([proved(case, pytorch) for case in cases(["Floor", "Tanh"])])
    assert (of.vacuous(by_nature=True), of.vacuous(by_nature=False)) == (2, 0)
    lines = list(report({"Floor, Tanh": of}))
    assert any("2 by nature" in line and "0 others" in line for line in lines)
    assert lines[-1] == "oracle: 4 by pytorch"


def test_a_refused_operator_says_why() -> None:
    reasons = [refusal(case) for case in cases(["Scan"])]
    assert sorted(map(bool, reasons)) == [False, False, False, True]
    assert any("expected a Scan without a batch axis" in reason for reason in reasons)


@newest
@pytest.mark.slow
def test_a_sample_of_cases_is_the_same_in_onnxruntime() -> None:
    assert sum(not runtime_refusal(case) for case in all_cases()[SAMPLE]) >= SAMPLE_IN_RUNTIME


@newest
@pytest.mark.exhaustive
def test_all_recorded_cases_are_the_same_in_onnxruntime() -> None:
    assert sum(not runtime_refusal(case) for case in all_cases()) >= IN_RUNTIME

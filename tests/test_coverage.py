"""ONNX's own node tests: how many of them have a gradient that finite differences prove; the number may only rise."""

from __future__ import annotations

import functools

import onnxruntime
import pytest

from graphopt.coverage import Case, cases, refusal, runtime_refusal

TOTAL, PASSED, IN_RUNTIME = 896, 895, 852
SAMPLE, SAMPLE_PASSED, SAMPLE_IN_RUNTIME = slice(None, None, 9), 99, 95

newest = pytest.mark.skipif(
    onnxruntime.__version__.startswith("1.19"),
    reason="ONNX Runtime 1.19 ends the process on a RotaryEmbedding",
)


@functools.cache
def all_cases() -> list[Case]:
    return list(cases())


def passed(some: list[Case]) -> int:
    return sum(not refusal(case) for case in some)


def test_onnx_has_as_many_cases_as_recorded() -> None:
    assert len(all_cases()) == TOTAL


def test_a_sample_of_cases_passes() -> None:
    assert passed(all_cases()[SAMPLE]) >= SAMPLE_PASSED


@pytest.mark.exhaustive
def test_all_recorded_cases_pass() -> None:
    assert passed(all_cases()) >= PASSED


def test_a_refused_operator_says_why() -> None:
    reasons = [refusal(case) for case in cases(["Scan"])]
    assert sorted(map(bool, reasons)) == [False, False, False, True]
    assert any("Scan of opset 8 has a batch axis" in reason for reason in reasons)


@newest
def test_a_sample_of_cases_is_the_same_in_onnxruntime() -> None:
    assert sum(not runtime_refusal(case) for case in all_cases()[SAMPLE]) >= SAMPLE_IN_RUNTIME


@newest
@pytest.mark.exhaustive
def test_all_recorded_cases_are_the_same_in_onnxruntime() -> None:
    assert sum(not runtime_refusal(case) for case in all_cases()) >= IN_RUNTIME

"""ONNX's own node tests: how many of them have a gradient that finite differences prove; the number may only rise."""

from __future__ import annotations

import functools

import pytest

from graphopt.coverage import Case, cases, refusal

TOTAL, PASSED = 896, 825
SAMPLE, SAMPLE_PASSED = slice(None, None, 9), 89


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
    reasons = [refusal(case) for case in cases(["MaxUnpool"])]
    assert sorted(bool(reason) for reason in reasons) == [False, True]
    assert any("MaxUnpool of 'xT'" in reason for reason in reasons)

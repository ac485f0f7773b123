"""Faults in the newest rooms are noticed by fast tests: a sample in CI, all with `pytest -m exhaustive`."""

from __future__ import annotations

import pytest
from mutants import unnoticed
from room_mutants import MUTANTS

from graphopt.targets.native import toolchain

LEAST = 60


def test_each_mutant_is_a_change_of_what_is_there() -> None:
    for mutant in MUTANTS:
        assert mutant.mutated()
    assert len(MUTANTS) >= LEAST


@pytest.mark.slow
def test_some_faults_are_noticed() -> None:
    assert unnoticed([MUTANTS[0], MUTANTS[16], MUTANTS[31], MUTANTS[37]]) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
def test_faults_in_the_newest_rooms_are_noticed() -> None:
    assert unnoticed(MUTANTS) == []

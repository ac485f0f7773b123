"""Wrong rules are noticed: a sample in CI, all with `pytest -m exhaustive tests/test_mutants.py`."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, Mutant, unnoticed

LEAST, ALLOWED = 60, 2
FEW = [MUTANTS[0], MUTANTS[26], MUTANTS[-2]]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_a_change_of_what_is_there(mutant: Mutant) -> None:
    compile(mutant.mutated(), mutant.file, "exec")


@pytest.mark.slow
def test_some_wrong_rules_are_noticed() -> None:
    assert unnoticed(FEW) == []


@pytest.mark.exhaustive
def test_wrong_rules_are_noticed() -> None:
    assert len(MUTANTS) >= LEAST
    assert len(unnoticed(MUTANTS)) <= ALLOWED

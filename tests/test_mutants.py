"""Wrong rules are noticed: a sample in CI, all with `pytest -m exhaustive tests/test_mutants.py`."""

from __future__ import annotations

import pytest
from mutants import MUTANTS, Mutant, unnoticed

LEAST, ALLOWED = 60, 2
FEW = [MUTANTS[0], MUTANTS[26], MUTANTS[-2]]


@pytest.mark.parametrize("mutant", MUTANTS, ids=str)
def test_a_mutant_is_a_change_of_what_is_there(mutant: Mutant) -> None:
    assert mutant.mutated()


def test_a_mutant_that_reads_a_name_which_nothing_defines_is_refused() -> None:
    with pytest.raises(ValueError, match=r"expected names that elementwise\.py defines, found LEAST"):
        Mutant("elementwise.py", "", MUTANTS[0].old, "alpha=LEAST, beta=-1e-30").mutated()


@pytest.mark.slow
def test_some_wrong_rules_are_noticed() -> None:
    assert unnoticed(FEW) == []


@pytest.mark.exhaustive
def test_wrong_rules_are_noticed() -> None:
    assert len(MUTANTS) >= LEAST
    assert len(unnoticed(MUTANTS)) <= ALLOWED

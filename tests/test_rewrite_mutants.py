"""Wrong rewritings are noticed by fast tests.

CI tries a sample, and `pytest -m exhaustive tests/test_rewrite_mutants.py` all.
"""

from __future__ import annotations

import pytest
from mutants import unnoticed
from rewrite_mutants import CHOOSING, FUSIONS, MUTANTS, SIMPLIFYING, SPLITTING, SURE

from graphopt.targets.native import toolchain

LEAST = 40


def test_each_mutant_is_a_change_of_what_is_there() -> None:
    for mutant in MUTANTS:
        assert mutant.mutated()
    assert len(MUTANTS) >= LEAST


@pytest.mark.slow
def test_some_wrong_rewritings_are_noticed() -> None:
    assert unnoticed([FUSIONS[1], SIMPLIFYING[0], SPLITTING[0], CHOOSING[0], SURE[0]]) == []


@pytest.mark.exhaustive
@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
def test_wrong_rewritings_are_noticed() -> None:
    assert unnoticed(MUTANTS) == []

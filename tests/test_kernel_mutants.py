"""Wrong kernels are noticed by the native tests in each precision."""

from __future__ import annotations

import pytest
from kernel_mutants import MUTANTS
from mutants import unnoticed

from graphopt.targets.native import toolchain
from graphopt.targets.native.precision import obstacle

needs_compiler = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")


def test_each_mutant_is_a_change_of_what_is_there() -> None:
    assert all(mutant.mutated() for mutant in MUTANTS)


@needs_compiler
@pytest.mark.exhaustive
@pytest.mark.parametrize("precision", ["highest", "high", "medium"])
def test_wrong_kernels_are_noticed(precision: str) -> None:
    if (reason := obstacle(precision)) is not None:
        pytest.skip(reason)
    assert unnoticed([mutant for mutant in MUTANTS if mutant.precision == precision]) == []

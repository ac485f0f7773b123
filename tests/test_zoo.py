"""What trains in PyTorch and scikit-learn trains here, with the same numbers: a sample of examples/zoo."""

from __future__ import annotations

import pytest
import run as zoo


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in zoo.SAMPLE for name in zoo.SAMPLE[family]]
)
def test_trains_as_in_its_framework(family, name):
    for row in zoo.rows(family, name):
        assert row.verdict == "agrees", row
        assert row.ours == row.theirs
        assert row.weights is None or row.weights < 1e-4

"""What trains in PyTorch and scikit-learn trains here, with the same numbers: a sample of examples/zoo."""

from __future__ import annotations

import pytest
import run as zoo

TOOLS = ("onnxslim", "onnxsim", "onnxoptimizer")  # which the tests do without


@pytest.mark.parametrize(("family", "name"), [(family, name) for family in zoo.SAMPLE for name in zoo.SAMPLE[family]])
@pytest.mark.slow
@pytest.mark.sample(2)
def test_trains_as_in_its_framework(family, name):
    case = zoo.cases(family)[name]
    for exporter in case.exporters:
        if exporter.rpartition(", ")[2] in TOOLS:
            continue
        for row in zoo.tried(case, name, exporter):
            if row.verdict == "refused" and "PyTorch's exporter refuses the module" in row.cause:
                continue
            expected = "not recorded" if row.exporter.startswith(tuple(case.unrecorded)) else "agrees"
            assert row.verdict == expected, row
            assert row.ours == row.theirs

"""What trains in PyTorch and scikit-learn trains here, with the same numbers: a sample of examples/zoo."""

from __future__ import annotations

import pytest
import run as zoo

EXPORTERS = ("dynamo, dynamic", "torchscript, static", "skl2onnx")  # of which an architecture may have more


@pytest.mark.parametrize(
    ("family", "name"), [(family, name) for family in zoo.SAMPLE for name in zoo.SAMPLE[family]]
)
@pytest.mark.slow
def test_trains_as_in_its_framework(family, name):
    case = zoo.cases(family)[name]
    for exporter in case.exporters:
        if exporter in EXPORTERS:
            row = zoo.tried(case, name, exporter)
            assert row.verdict == "agrees", row
            assert row.ours == row.theirs

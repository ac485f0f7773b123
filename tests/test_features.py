"""The table of features names tests that exist."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
PAGE = TESTS.parent / "examples/guides/features.md"


def test_each_feature_names_tests_that_exist() -> None:
    rows = [line for line in PAGE.read_text().splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    for row in rows:
        feature, own, *others = (cell.strip() for cell in row.strip("|").split("|"))
        assert len(others) == 4 and own.startswith("yes"), feature
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", own)
        assert named, feature
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text())
            assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}, (
                file,
                name,
            )

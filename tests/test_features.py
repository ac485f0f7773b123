"""Tests that exist show each row of the table of features."""

from __future__ import annotations

import ast
import re
from pathlib import Path

TESTS = Path(__file__).parent
GUIDES = TESTS.parent / "examples/guides"


def rows(page: str) -> list[list[str]]:
    lines = [line for line in (GUIDES / page).read_text().splitlines() if line.startswith("| ")]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in lines[1:]]


def test_tests_that_exist_show_each_feature() -> None:
    features, evidence = rows("features.md"), dict(rows("what_is_proved.md"))
    assert len(features) > 25 and [row[0] for row in features] == list(evidence)
    for feature, own, *others in features:
        assert len(others) == 4 and own.startswith("yes"), feature
        named = re.findall(r"`(test_\w+\.py)::(test_\w+)`", evidence[feature])
        assert named, feature
        for file, name in named:
            tree = ast.parse((TESTS / file).read_text())
            functions = {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}
            assert name in functions, (file, name)

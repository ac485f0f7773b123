"""The examples in docstrings of public names run, and say what they return."""

from __future__ import annotations

import doctest
from pathlib import Path
from typing import Any

import pytest

import graphopt
import passes

FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = [(module, name) for module in (graphopt, passes) for name in module.__all__]


def examples(module: Any, name: str) -> doctest.DocTest:
    member = getattr(module, name)
    return doctest.DocTestParser().get_doctest(
        str(member.__doc__), {"graphopt": graphopt, "passes": passes}, name, member.__module__, None
    )


@pytest.mark.parametrize(
    ("module", "name"), NAMES, ids=lambda part: part if isinstance(part, str) else part.__name__
)
def test_the_example_of_a_public_name_runs(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(module, name)
    monkeypatch.chdir(tmp_path)
    messages: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(found, out=messages.append)
    assert not result.failed, "".join(messages)

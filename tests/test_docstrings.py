"""The examples in docstrings of public names run, and say what they return."""

from __future__ import annotations

import ast
import dataclasses
import doctest
import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import graphopt
import graphopt.models
import passes
from graphopt.cli.composition.validation import CALLBACKS
from graphopt.cli.help import described
from graphopt.graph import weight_kinds
from graphopt.targets.check import CHECK
from passes.gradients import registry

ROOT = Path(__file__).parents[1]
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
NAMES = [(module, name) for module in (graphopt, passes) for name in module.__all__]
BUILT_IN = sorted(name.rpartition(".")[2] for name in CALLBACKS.values())
NAMES += [(graphopt.callbacks, name) for name in BUILT_IN]


def examples(module: Any, name: str) -> doctest.DocTest:
    member = getattr(module, name)
    known = {"graphopt": graphopt, "models": graphopt.models, "numpy": np, "passes": passes}
    return doctest.DocTestParser().get_doctest(str(member.__doc__), known, name, member.__module__, None)


@pytest.mark.parametrize(("module", "name"), NAMES, ids=lambda part: part if isinstance(part, str) else part.__name__)
@pytest.mark.slow
def test_the_example_of_a_public_name_runs(
    module: Any, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = examples(module, name)
    assert found.examples, f"{module.__name__}.{name} has no example in its docstring"
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(weight_kinds, "WEIGHT_KINDS", dict(weight_kinds.WEIGHT_KINDS))
    monkeypatch.setattr(weight_kinds, "REGISTERED", set())
    messages: list[str] = []
    result = doctest.DocTestRunner(optionflags=FLAGS).run(found, out=messages.append)
    assert not result.failed, "".join(messages)


def docstrings() -> Iterator[tuple[str, str]]:
    """Yield the docstrings of all sources, and the pages, each with its place."""
    for path in sorted(path for folder in ("graphopt", "passes") for path in (ROOT / folder).rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                yield f"{path.name}:{getattr(node, 'name', '')}", ast.get_docstring(node) or ""
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "examples/guides").glob("*.md")):
        yield page.name, page.read_text()


def exists(name: str) -> bool:
    """Tell whether a dotted name is a module, or something in one."""
    first, *rest = name.split(".")
    found, path = importlib.import_module(first), first
    for part in rest:
        path = f"{path}.{part}"
        if not hasattr(found, part):
            try:
                importlib.import_module(path)
            except ImportError:
                return False
        found = getattr(found, part)
    return True


@pytest.mark.slow
def test_names_in_docstrings_and_pages_exist() -> None:
    missing = {
        f"{place}: {name}"
        for place, text in docstrings()
        for name in re.findall(r"`((?:graphopt|passes)(?:\.\w+)+)", text)
        if not exists(name) and name != CHECK
    }
    assert not missing


@pytest.mark.parametrize("name", [name for name in passes.__all__ if dataclasses.is_dataclass(getattr(passes, name))])
def test_every_field_of_a_pass_is_explained(name: str) -> None:
    kind = getattr(passes, name)
    assert {field.name for field in dataclasses.fields(kind)} <= set(described(kind))


@pytest.mark.parametrize(
    "name",
    sorted({*graphopt.__all__, *BUILT_IN} - {"GraphoptError", "NonFiniteLoss", "dot", "mermaid", "standard"}),
)
def test_every_argument_of_a_public_name_is_explained(name: str) -> None:
    member = getattr(graphopt, name, None) or getattr(graphopt.callbacks, name)
    missing = set(inspect.signature(member).parameters) - set(described(member))
    assert not missing

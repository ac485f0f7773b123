"""Imports go one way, and the runtime and Hydra stay in their rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("graphopt", "passes", "recipes") for path in (ROOT / folder).rglob("*.py")
)


COMMAND = {str(path.relative_to(ROOT)) for path in SOURCES if "cli" in path.parts}


def imported(path: Path) -> set[str]:
    """Return the top-level packages that a source file imports, anywhere in it."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found.update(name.name.split(".")[0] for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            found.add(node.module.split(".")[0])
    return found


def typing_only(path: Path) -> set[str]:
    """Return what a source file imports under `if TYPE_CHECKING` alone."""
    found = set()
    for node in ast.parse(path.read_text()).body:
        if isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            found.update(name.name.split(".")[0] for child in node.body for name in child.names)
    return found


@pytest.mark.parametrize("path", SOURCES, ids=lambda path: str(path.relative_to(ROOT)))
def test_imports_go_one_way(path):
    folder = path.relative_to(ROOT).parts[0]
    forbidden = {"graphopt": {"passes", "recipes"}, "passes": {"recipes"}, "recipes": {"graphopt", "passes"}}
    assert not imported(path) & forbidden[folder]


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        (
            "onnxruntime",
            {
                "graphopt/on_device/artifacts.py",
                "graphopt/runtime/device.py",
                "passes/ort_gradient/builder.py",
            },
        ),
        ("hydra", COMMAND),
        ("omegaconf", COMMAND),
        ("pygraphviz", {"graphopt/inspection/plot/__init__.py"}),
    ],
)
def test_a_package_is_imported_in_its_room_alone(package, rooms):
    users = {str(path.relative_to(ROOT)) for path in SOURCES if package in imported(path) - typing_only(path)}
    assert users <= rooms


def test_no_folder_or_file_is_a_drawer():
    assert not {path.stem for path in SOURCES} & {
        "utils",
        "util",
        "common",
        "base",
        "core",
        "helpers",
        "misc",
    }

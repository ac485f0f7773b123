"""Imports go down a table of floors, a room at a time, and circle nowhere; runtime and Hydra stay in their rooms."""

from __future__ import annotations

import ast
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(path for folder in ("graphopt", "passes", "recipes") for path in (ROOT / folder).rglob("*.py"))

# A room is a file or a folder of `graphopt`, or `passes`. It imports rooms of lower floors only.
FLOORS = [
    {"errors", "deferred", "intervals"},
    {"arguments", "confined", "fields", "files", "moments", "communicator", "namesakes", "overrides"},
    {"graph"},
    {"pipeline", "data", "models", "adapters", "privacy"},
    {"targets"},
    {"passes"},
    {"runtime", "compiler", "derivatives"},
    {"influence", "inspection", "testing", "on_device", "hosts", "layer", "generation", "exporting"},
    {"training"},
    {"distributed"},
    {"cli", "callbacks"},
    {"__init__", "__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Where names of modules are data: a recipe's `_target_` is checked against these, and programs of trials are texts.
LISTS_NAMES = {"graphopt/cli/composition/validation.py", "graphopt/testing/trials.py"}

COMMAND = {str(path.relative_to(ROOT)) for path in SOURCES if "cli" in path.parts}


def name_of(path: Path) -> str:
    return str(path.relative_to(ROOT))


def room_of(module: str) -> str:
    """Return the room that a module is in, or None where it is none of ours."""
    first, *rest = module.split(".")
    if first == "passes":
        return "passes"
    return rest[0] if rest else "__init__"


def module_of(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" and len(parts) > 2 else parts)


MODULES = {module_of(path) for path in SOURCES} | {"graphopt", "passes"}


def imports(tree: ast.AST) -> set[str]:
    """Return the modules of ours that a tree imports."""
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            found.update(name.name for name in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
            submodules = {f"{node.module}.{name.name}" for name in node.names} & MODULES
            found |= submodules or {node.module}
    return {name for name in found if name.split(".")[0] in ("graphopt", "passes", "recipes")}


def is_typing_only(node: ast.stmt) -> bool:
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    room = room_of(module_of(path))
    for module in imports(ast.parse(path.read_text())):
        assert module.split(".")[0] != "recipes"
        other = room_of(module)
        assert other == room or FLOOR[other] < FLOOR[room], f"{name_of(path)} imports {module}"


def test_passes_know_no_target() -> None:
    """A compiled model is plain: `passes` lists the passes of targets that a pipeline may end with, and no more."""
    users = {
        name_of(path)
        for path in SOURCES
        if name_of(path).startswith("passes/")
        and any(room_of(name) == "targets" for name in imports(ast.parse(path.read_text())))
    }
    assert users == {"passes/__init__.py"}


@pytest.mark.slow
def test_no_imports_circle() -> None:
    graph = {
        module_of(path): imports(ast.parse(path.read_text())) & MODULES
        for path in SOURCES
        if path.name != "__init__.py"
    }
    done: set[str] = set()

    def visit(module: str, above: tuple[str, ...]) -> None:
        assert module not in above, " -> ".join((*above, module))
        if module in graph and module not in done:
            for other in sorted(graph[module]):
                visit(other, (*above, module))
            done.add(module)

    for module in sorted(graph):
        visit(module, ())


def names_a_module(text: str) -> bool:
    """Tell whether a text is a module of ours, or something in one: `passes:SGD`, `graphopt.graph.shapes.infer`."""
    return text in MODULES - {"graphopt", "passes"} or text.replace(":", ".").rpartition(".")[0] in MODULES - {
        "graphopt"
    }


@pytest.mark.parametrize("path", [path for path in SOURCES if name_of(path) not in LISTS_NAMES], ids=name_of)
def test_no_import_hides_in_a_string(path: Path) -> None:
    texts = [node.value for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Constant)]
    assert not [text for text in texts if isinstance(text, str) and names_a_module(text)]


@pytest.mark.parametrize(
    ("package", "rooms"),
    [
        (
            "onnxruntime",
            {
                "graphopt/adapters/adapter_file.py",
                "graphopt/cli/doctor.py",
                "graphopt/on_device/artifacts.py",
                "graphopt/on_device/checkpoint.py",
                "graphopt/runtime/device.py",
                "passes/free_batch.py",
                "passes/ort_gradient.py",
            },
        ),
        ("hydra", COMMAND),
        ("omegaconf", COMMAND),
        ("pygraphviz", {"graphopt/inspection/plot.py"}),
    ],
)
@pytest.mark.slow
def test_a_package_is_imported_in_its_room_alone(package: str, rooms: set[str]) -> None:
    def users(path: Path) -> bool:
        body = [node for node in ast.parse(path.read_text()).body if not is_typing_only(node)]
        found = {
            name.name.split(".")[0]
            for part in body
            for node in ast.walk(part)
            if isinstance(node, ast.Import)
            for name in node.names
        }
        found |= {
            node.module.split(".")[0]
            for part in body
            for node in ast.walk(part)
            if isinstance(node, ast.ImportFrom) and node.module
        }
        return package in found

    assert {name_of(path) for path in SOURCES if users(path)} <= rooms


def test_metadata_is_read_and_written_in_one_file() -> None:
    users = {name_of(path) for path in SOURCES if "metadata_props" in path.read_text()}
    own, of_files = "graphopt/graph/metadata.py", "graphopt/graph/postprocessing.py"
    assert users == {own, of_files}


def test_onnx_infers_in_two_files() -> None:
    """They keep from ONNX the sizes at which its inference ends the process."""
    calls = re.compile(r"shape_inference\.infer_|ShapeInferencePass")
    users = {name_of(path) for path in SOURCES if calls.search(path.read_text())}
    examples = {"graphopt/graph/blocks.py"}
    assert users - examples == {"graphopt/graph/message_inference.py", "graphopt/graph/node_inference.py"}


def test_no_room_compares_the_kind_of_a_device() -> None:
    """What differs between devices is a call or an attribute of their provider."""
    kinds = {path.stem for path in (ROOT / "graphopt" / "runtime" / "providers").glob("*.py")}

    def asks(node: ast.AST) -> bool:
        sides = [node.left, *node.comparators] if isinstance(node, ast.Compare) else []
        constants = {each.value for side in sides for each in ast.walk(side) if isinstance(each, ast.Constant)}
        return bool(constants & kinds) and any(isinstance(x, ast.Attribute) and x.attr == "kind" for x in sides)

    assert {"cpu", "cuda", "webgpu"} <= kinds
    assert not {name_of(path) for path in SOURCES if any(map(asks, ast.walk(ast.parse(path.read_text()))))}


def test_no_folder_or_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "base", "core", "helpers", "misc"}
    assert not {path.stem for path in SOURCES} & drawers


@pytest.mark.skipif(shutil.which("git") is None or not (ROOT / ".git").exists(), reason="needs a checkout of git")
def test_no_symbolic_link_is_a_file_of_the_project() -> None:
    listed = subprocess.run(["git", "ls-files", "-s"], cwd=ROOT, check=True, capture_output=True, text=True).stdout
    assert listed
    assert not [line for line in listed.splitlines() if line.startswith("120000")]


def test_sympy_is_imported_when_it_is_used() -> None:
    program = """
import sys, graphopt, onnx_ir
assert "sympy.core" not in sys.modules
assert str(onnx_ir.SymbolicDim("N") * 2) == "2*N"
assert "sympy.core" in sys.modules
"""
    subprocess.run([sys.executable, "-c", program], check=True)

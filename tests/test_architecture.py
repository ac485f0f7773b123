"""Imports go down a table of floors, a room at a time, and circle nowhere; runtime and Hydra stay in their rooms."""

from __future__ import annotations

import ast
from pathlib import Path

import onnx
import pytest

ROOT = Path(__file__).parents[1]
SOURCES = sorted(
    path for folder in ("graphopt", "passes", "recipes") for path in (ROOT / folder).rglob("*.py")
)

# A room is a file or a folder of `graphopt`, or `passes`. It imports rooms of lower floors only.
FLOORS = [
    {"errors"},
    {"intervals", "files", "statistics"},
    {"graph"},
    {"native", "passes", "pipeline", "data", "models"},
    {"runtime", "compiler"},
    {"inspection", "testing", "on_device", "hosts", "layer"},
    {"training"},
    {"distributed"},
    {"cli", "callbacks"},
    {"__init__", "__main__"},
]
FLOOR = {room: floor for floor, rooms in enumerate(FLOORS) for room in rooms}

# Files that import `passes` inside functions, so that an executor runs a training graph without the library of passes.
NEED_PASSES_LATE = {
    "graphopt/compiler.py",
    "graphopt/hosts/export.py",
    "graphopt/testing/coverage.py",
    "graphopt/testing/gradients.py",
    "graphopt/training/sklearn/estimators.py",
    "graphopt/training/sklearn/options.py",
    "graphopt/training/sklearn/structure.py",
    "graphopt/training/trainer_options.py",
}
# Files that nothing imports before they are needed, and so import `passes` at their top.
NEED_PASSES = {
    "graphopt/on_device/graphs.py",
    "graphopt/on_device/update.py",
    "graphopt/training/sklearn/objective.py",
}

# Where names of modules are data: a recipe's `_target_` is checked against these.
LISTS_NAMES = {"graphopt/cli/validation.py"}

# Facts about operators stand in one file. Others have tables of their own: what they do with an operator.
FACTS = "graphopt/graph/operators.py"
OWN_TABLES = {
    "graphopt/graph/folding.py": "operators that evaluators agree on bit for bit",
    "graphopt/graph/opsets.py": "operators that changed between opsets",
    "graphopt/inspection/cuda_kernels.py": "kernels of ONNX Runtime's CUDA provider",
    "graphopt/native/forms.py": "views that kernels see through",
    "graphopt/native/operators.py": "what each operator computes, in C",
    "graphopt/testing/coverage.py": "inputs of ONNX's node tests that are not moved",
    "graphopt/testing/reference/loops.py": "activation functions in NumPy",
    "passes/gradients/registry.py": "inputs to which no gradient flows",
    "passes/gradients/rules/recurrent.py": "rules of recurrent operators",
    "passes/gradients/rules/reduction.py": "rules of reductions",
    "passes/lowering/classical.py": "operators that scale data in exported classical models",
    "passes/mixed_precision.py": "operators that are computed in 16 bits",
    "passes/ort_gradient/limits.py": "operators whose gradient onnxruntime-training has wrong",
    "passes/weights/folds.py": "operators that calls of ATen become, in NumPy",
    "passes/portable.py": "forms for other runtimes",
    "passes/simplify.py": "rewrite rules",
    "passes/weights/evidence.py": "operators between constants and what tells them from weights",
    "passes/weights/exported_program.py": "operators that calls of ATen become",
    "passes/weights/torchscript.py": "operators that read what PyTorch's older exporter folds",
}

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


def at_top(path: Path) -> set[str]:
    """Return the modules of ours that a source file imports when it is imported itself."""
    tree = ast.parse(path.read_text())
    body = [node for node in tree.body if not is_typing_only(node)]
    functions = [node for part in body for node in ast.walk(part) if isinstance(node, ast.FunctionDef)]
    late = {name for function in functions for name in imports(function)}
    return imports(ast.Module(body, [])) - late | {
        name for node in body if isinstance(node, (ast.Import, ast.ImportFrom)) for name in imports(node)
    }


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_go_down(path: Path) -> None:
    room = room_of(module_of(path))
    for module in imports(ast.parse(path.read_text())):
        assert module.split(".")[0] != "recipes"
        other = room_of(module)
        late = other == "passes" and name_of(path) in NEED_PASSES_LATE and module not in at_top(path)
        assert other == room or late or FLOOR[other] < FLOOR[room], f"{name_of(path)} imports {module}"


def test_passes_are_imported_where_the_lists_say() -> None:
    users = {
        name_of(path)
        for path in SOURCES
        if room_of(module_of(path)) != "passes"
        and any(room_of(module) == "passes" for module in imports(ast.parse(path.read_text())))
    }
    assert users == NEED_PASSES | NEED_PASSES_LATE


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
    return text in MODULES - {"graphopt", "passes"} or text.replace(":", ".").rpartition(".")[
        0
    ] in MODULES - {"graphopt"}


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


OPERATORS = {schema.name for schema in onnx.defs.get_all_schemas_with_history()}


def operators_in(value: ast.AST) -> set[str]:
    """Return the operators that literals in an expression name; a text counts if it names nothing else."""
    texts = [node.value for node in ast.walk(value) if isinstance(node, ast.Constant)]
    names = [set(text.split()) for text in texts if isinstance(text, str)]
    return {name for found in names if found <= OPERATORS for name in found}


def constants_of(source: str) -> dict[str, ast.expr]:
    """Return the constants of a module, and the expressions of their values."""
    constants = {}
    for node in ast.parse(source).body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and node.value is not None:
            constants |= {x.id: node.value for x in targets if isinstance(x, ast.Name) and x.id != "__all__"}
    return constants


def tables_of(source: str) -> set[str]:
    """Return the constants of a module whose literals name three operators or more."""
    return {name for name, value in constants_of(source).items() if len(operators_in(value)) > 2}


def sets_of(source: str, facts: set[str]) -> set[str]:
    """Return the constants of a module that name operators, or are made of facts about operators."""
    return {
        name
        for name, value in constants_of(source).items()
        if operators_in(value) or facts & {x.id for x in ast.walk(value) if isinstance(x, ast.Name)}
    }


@pytest.mark.parametrize(
    ("source", "tables"),
    [
        ('A = {"Add", "Mul", "Sub"}', {"A"}),
        ('A: set[str] = frozenset({"Add", *("Mul", "Sub")})', {"A"}),
        ('A = "Add Mul Sub".split()', {"A"}),
        ('A = {"Add": 1, "Mul": 2, "Sub": 3}', {"A"}),
        ('A = [("", "Add"), ("", "Mul"), ("", "Sub")]', {"A"}),
        ('A = VIEWS | {"Add", "Mul"}', set()),
        ('A = "Add and Mul If Not Loop"', set()),
        ('A = {"add", "mul", "sub"}', set()),
        ('def f():\n    A = {"Add", "Mul", "Sub"}', set()),
    ],
)
def test_tables_of_operators_are_found(source: str, tables: set[str]) -> None:
    assert tables_of(source) == tables


def test_facts_about_operators_stand_in_one_file() -> None:
    found = {name_of(path): tables_of(path.read_text()) for path in SOURCES}
    assert {path for path, tables in found.items() if tables} == {FACTS, *OWN_TABLES}


def test_no_two_sets_of_operators_have_one_name() -> None:
    facts = set(constants_of((ROOT / FACTS).read_text()))
    homes: dict[str, list[str]] = {}
    for path in SOURCES:
        for name in sets_of(path.read_text(), facts):
            homes.setdefault(name, []).append(name_of(path))
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}


def test_metadata_is_read_and_written_in_one_file() -> None:
    users = {name_of(path) for path in SOURCES if "metadata_props" in path.read_text()}
    own, of_files = "graphopt/graph/metadata.py", "graphopt/graph/file_notes.py"
    assert users == {own, of_files}


def test_no_folder_or_file_is_a_drawer() -> None:
    drawers = {"utils", "util", "common", "base", "core", "helpers", "misc"}
    assert not {path.stem for path in SOURCES} & drawers


@pytest.mark.parametrize(
    "folder",
    sorted({path.parent for path in SOURCES if path.parent.parent == ROOT / "graphopt"}),
    ids=name_of,
)
def test_each_room_says_what_lives_there(folder: Path) -> None:
    docstring = ast.get_docstring(ast.parse((folder / "__init__.py").read_text()))
    assert docstring and "mports" in docstring

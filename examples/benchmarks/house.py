"""Count lines, rooms, arrows and habits of graphopt's own code at some commits, and write them to RESULTS_HOUSE.md.

A room is a file or a folder of `graphopt/`, or all of `passes/`, as in CONTRIBUTING.md, or `recipes/`; an arrow is a
room that imports another. It reads the files of git and runs none of them. What stands in the page after the first
table stays.

Run it: python examples/benchmarks/house.py [COMMIT ...]
"""

from __future__ import annotations

import ast
import io
import subprocess
import sys
import tarfile
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "examples" / "benchmarks" / "RESULTS_HOUSE.md"
REVIEWED = "24dedb21"  # the commit to compare with
DEVICES = {"cpu", "cuda", "webgpu"}
PARAMETERS = 10  # of a function that has many
LONGEST = 3  # functions and classes in the table
END = "<!-- end of the table -->"


class File(NamedTuple):
    """A file of Python: its module, its text and its tree."""

    module: str
    text: str
    tree: ast.Module


def git(*words: str) -> bytes:
    """Return what git prints."""
    return subprocess.run(["git", *words], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout


def files_at(commit: str) -> dict[str, str]:
    """Return the texts of the files of a commit by path."""
    with tarfile.open(fileobj=io.BytesIO(git("archive", commit))) as files:
        ours = [x for x in files if x.isfile() and x.name.endswith((".py", ".h", ".c"))]
        return {x.name: files.extractfile(x).read().decode() for x in ours}  # type: ignore[union-attr]


def lines(texts: Iterable[str]) -> int:
    """Return how many lines texts have."""
    return sum(text.count("\n") for text in texts)


def module_of(path: str) -> str:
    """Return the name of the module in a file."""
    return path.removesuffix(".py").replace("/", ".").removesuffix(".__init__")


def room_of(module: str) -> str:
    """Return the room of a module."""
    first, *rest = module.split(".")
    return first if first != "graphopt" else rest[0] if rest else "__init__"


def imports(file: File, modules: set[str]) -> set[str]:
    """Return the modules of ours that a file imports, also inside functions."""
    found = set()
    for node in ast.walk(file.tree):
        if isinstance(node, ast.Import):
            found |= {name.name for name in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            inner = {f"{node.module}.{name.name}" for name in node.names} & modules
            found |= inner or {node.module}
    return found & modules - {file.module}


def circles(arrows: Mapping[str, set[str]]) -> int:
    """Return how many modules are in a circle of imports."""

    def reached(start: str) -> set[str]:
        found, front = set[str](), set(arrows[start])
        while front:
            found |= front
            front = set().union(*(arrows[x] for x in front)) - found
        return found

    return sum(x in reached(x) for x in arrows)


def floors(arrows: Mapping[str, set[str]]) -> int:
    """Return how many rooms stand above each other; rooms in a circle share a floor."""
    floor = dict.fromkeys(arrows, 1)
    for _ in arrows:
        floor = {x: 1 + max((floor[y] for y in arrows[x]), default=0) for x in arrows}
        if max(floor.values()) > len(arrows):
            return -1
    return max(floor.values())


def parameters(function: ast.FunctionDef | ast.AsyncFunctionDef) -> int:
    """Return how many parameters a function has beside `self`."""
    of = function.args
    named = [x.arg for x in [*of.posonlyargs, *of.args, *of.kwonlyargs] if x.arg not in ("self", "cls")]
    return len(named) + (of.vararg is not None) + (of.kwarg is not None)


def asks_a_device(node: ast.AST) -> bool:
    """Return whether an expression compares the kind of a device, or asks if it is the CPU."""
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
        return node.attr == "on_cpu"
    if not isinstance(node, ast.Compare):
        return False
    sides = [node.left, *node.comparators]
    kinds = {getattr(x, "attr", getattr(x, "id", None)) for x in sides}
    words = {each.value for x in sides for each in ast.walk(x) if isinstance(each, ast.Constant)}
    return bool(kinds & {"kind", "device", "name"} and words & DEVICES)


def public_names(file: File) -> set[str]:
    """Return the public functions, classes and constants that a module defines."""
    found = set()
    for node in file.tree.body:
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            found.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            found |= {x.id for x in targets if isinstance(x, ast.Name)}
    return {name for name in found if not name.startswith("_")}


def longest(nodes: Iterable[tuple[str, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef]]) -> str:
    """Return the longest definitions with their lines."""
    sizes = {f"{module}.{x.name}": (x.end_lineno or x.lineno) - x.lineno + 1 for module, x in nodes}
    most = sorted(sizes, key=lambda name: -sizes[name])[:LONGEST]
    return ", ".join(f"{name.rpartition('.')[2]} {sizes[name]}" for name in most)


def measures(commit: str) -> dict[str, object]:
    """Return what a commit's files have."""
    texts = files_at(commit)
    product = {x: text for x, text in texts.items() if x.startswith(("graphopt/", "passes/", "recipes/"))}
    files = [File(module_of(x), text, ast.parse(text)) for x, text in product.items() if x.endswith(".py")]
    modules = {x.module for x in files}
    of_files = {x.module: imports(x, modules) for x in files if x.module not in ("graphopt", "passes")}
    of_rooms: dict[str, set[str]] = defaultdict(set)
    for module, others in of_files.items():
        of_rooms[room_of(module)] |= {room_of(x) for x in others} - {room_of(module)}
    rooms = {x: of_rooms[x] & of_rooms.keys() for x in of_rooms}
    known = {x: others & of_files.keys() for x, others in of_files.items()}
    nodes = [(x.module, node) for x in files for node in ast.walk(x.tree)]
    functions = [(x, node) for x, node in nodes if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))]
    classes = [(x, node) for x, node in nodes if isinstance(node, ast.ClassDef)]
    names = Counter(name for x in files if not x.module.endswith("__init__") for name in public_names(x))
    sizes = Counter({room: lines(x.text for x in files if room_of(x.module) == room) for room in rooms})
    return {
        "lines of Python, product": lines(x.text for x in files),
        "lines of C": lines(text for x, text in product.items() if x.endswith((".h", ".c"))),
        "lines of Python, tests": lines(text for x, text in texts.items() if x.startswith("tests/")),
        "files of the product": len(files),
        "rooms": len(rooms),
        "floors of rooms": floors(rooms),
        "arrows between rooms": sum(map(len, rooms.values())),
        "arrows between files": sum(map(len, known.values())),
        "files in circles": circles(known),
        "longest functions": longest(functions),
        "longest classes": longest(classes),
        f"functions of {PARAMETERS} parameters or more": sum(parameters(x) >= PARAMETERS for _, x in functions),
        "questions which device it is": sum(asks_a_device(node) for _, node in nodes),
        "of these outside its provider": sum(asks_a_device(node) for x, node in nodes if ".providers." not in x),
        "`Any`, without imports": sum(
            line.count("Any") for x in files for line in x.text.splitlines() if "import" not in line
        ),
        "`assert`": sum(isinstance(node, ast.Assert) for _, node in nodes),
        "`type: ignore`": sum(x.text.count("type: ignore") for x in files),
        "public names with several definitions": sum(count > 1 for count in names.values()),
        **{f"lines of `{room}`": size for room, size in sorted(sizes.items(), key=lambda item: -item[1])},
    }


def main(*commits: str) -> None:
    """Print the table, and write it into the page."""
    commits = commits or (REVIEWED, "HEAD")
    columns = [measures(commit) for commit in commits]
    rows = list(dict.fromkeys(name for column in columns for name in column))
    shown = [f"{x:,}" if isinstance(x, int) else str(x) for name in rows for x in (c.get(name, 0) for c in columns)]
    names = [git("show", "-s", "--format=%h, %cs", commit).decode().strip() for commit in commits]
    table = [f"| | {' | '.join(names)} |", "|---" + "|---:" * len(commits) + "|"]
    table += [f"| {name} | {' | '.join(shown[i * len(commits) :][: len(commits)])} |" for i, name in enumerate(rows)]
    found = " ".join(name.partition(",")[0] for name in names)
    head = f"# The code in numbers\n\n`python examples/benchmarks/house.py {found}` writes this table.\n"
    rest = PAGE.read_text().partition(END)[2] if PAGE.exists() else "\n"
    PAGE.write_text("\n".join([head, *table, "", END]) + rest)
    print("\n".join(table))


if __name__ == "__main__":
    main(*sys.argv[1:])

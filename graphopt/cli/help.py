"""Write the text of `graphopt --help` from comments in recipes and docstrings of classes."""

from __future__ import annotations

import inspect
import re
import shutil
import textwrap
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from graphopt.cli.validation import TARGET, resolve
from graphopt.training.fit import fit

USAGE = """\
Train an ONNX model with a recipe.

  graphopt                                         train a classifier of handwritten digits
  graphopt my.onnx data=npz data.path=train.npz    train your own model
  graphopt my.onnx optimizer=sgd optimizer.learning_rate=0.1
  graphopt evaluate folder=runs/mine               compute metrics of what a run has trained
  graphopt predict folder=runs/mine                write its outputs
  graphopt report my.onnx                          list what would train, and what blocks training
  graphopt compile my.onnx                         write step.onnx without training
  graphopt hosts my.onnx                           write files for hosts in other languages
  graphopt artifacts my.onnx                       write artifacts for onnxruntime-training
  graphopt experiment=text_transformer             run another recipe
  graphopt -m optimizer=sgd,adamw fit.epochs=5,10  run every combination, and print a table
  graphopt compare folder=runs                     put runs side by side
  graphopt --config-dir my_recipes experiment=mine run your own recipe
  graphopt --cfg job                               show the whole recipe without running it
"""
BASE = "base"  # the base recipe of a group, which is not an option
ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
COMMENTED = re.compile(r"( *)(?:- )?(\w+):.*?(?: # (.*))?")


def described(target: Any) -> dict[str, str]:
    """Return the descriptions of arguments in the docstring of a function, or of a class and its bases."""
    found: dict[str, str] = {}
    owners = inspect.getmro(target) if inspect.isclass(target) else (target,)
    if inspect.isclass(options := getattr(target, "Options", None)):
        owners += inspect.getmro(options)
    for owner in reversed(owners):
        lines = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2].splitlines()
        names: list[str] = []
        for line in lines:
            entry = ENTRY.fullmatch(line)
            if entry:
                names = entry[1].split(", ")
                found.update(dict.fromkeys(names, entry[2]))
            elif line.startswith("        "):
                found.update({name: f"{found[name]} {line.strip()}" for name in names})
            else:
                break
    return found


def commented(path: Path) -> dict[str, str]:
    """Return the comments after the fields of a recipe, by the path of the field."""
    found: dict[str, str] = {}
    parents: list[str] = []
    for line in path.read_text(encoding="utf-8").splitlines():
        field = COMMENTED.fullmatch(line)
        if field:
            parents[len(field[1]) // 2 :] = [field[2]]
            if field[3]:
                found[".".join(parents)] = field[3]
    return found


def fields(
    recipe: Mapping[str, Any], folder: Path, choices: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    """Yield the path, value and description of each field of a composed recipe.

    Args:
        recipe: the recipe as plain mappings, with unresolved references.
        folder: the folder of recipes.
        choices: the chosen option of each group.
    """
    comments = commented(folder / "graphopt.yaml")
    for group, choice in choices.items():
        for path in (folder / group / f"{BASE}.yaml", folder / group / f"{choice}.yaml"):
            if path.exists():
                comments.update({f"{group}.{name}": text for name, text in commented(path).items()})
    yield from _fields(recipe, "", comments)


def page(options: str, groups: str, described_fields: Iterable[tuple[str, Any, str]]) -> str:
    """Return the text of `graphopt --help`.

    Args:
        options: the lines of the options that start with dashes.
        groups: a line per group of recipes.
        described_fields: the fields, as `fields` yields them.
    """
    width = max(80, shutil.get_terminal_size((110, 24)).columns) - 1
    lines = []
    for place, value, text in described_fields:
        head = f"  {place}={_written(value)}"
        lines += textwrap.wrap(text, width, initial_indent=f"{head:<40}  ", subsequent_indent=" " * 42) or [
            head
        ]
    groups = textwrap.indent(re.sub(rf"\b{BASE}, ", "", groups), "  ")
    parts = [USAGE, f"Options:\n\n{options}", f"Choose one of each group with GROUP=OPTION:\n\n{groups}"]
    title = (
        "Set any field with FIELD=VALUE (graphopt --help GROUP=OPTION lists the fields of another option):\n"
    )
    return "\n".join([*parts, title, *lines])


def _written(value: Any) -> str:
    """Return a value in the syntax of the command line."""
    if isinstance(value, list):
        return f"[{','.join(map(_written, value))}]"
    if isinstance(value, Mapping):
        return f"{{{','.join(f'{name}:{_written(one)}' for name, one in value.items())}}}"
    return "null" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def _fields(
    node: Mapping[str, Any], path: str, comments: Mapping[str, str]
) -> Iterator[tuple[str, Any, str]]:
    target = fit if path == "fit" else resolve(node[TARGET], path) if TARGET in node else None
    texts = described(target) if target is not None else {}
    for name, value in node.items():
        place = f"{path}.{name}" if path else str(name)
        if name == TARGET:
            continue
        if isinstance(value, Mapping) and (
            TARGET in value or place in ("callbacks", "fit", "hosts", "models")
        ):
            yield from _fields(value, place, comments)
        elif value is not None or path:  # otherwise a group that is omitted
            if path == "pipeline" and value == f"${{{name}}}":
                continue
            yield place, value, comments.get(place) or texts.get(name, "")

"""Check a training graph without training, for `graphopt check`."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, Literal

import numpy as np
import onnx_ir as ir

from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.messages import say
from graphopt.cli.run_folder import check_no_run, leave
from graphopt.data import Batches
from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, with_role
from graphopt.graph.values import name_of
from graphopt.inspection.check import check
from graphopt.runtime.device import Device
from graphopt.runtime.inputs import encoding_of
from graphopt.training.callbacks.terminal import open_console, print_line


def write_check(recipe: Recipe, folder: Path) -> None:
    """Print the differences that checks of the model find, on the first rows of the recipe's data if it names some.

    Raises:
        GraphoptError: something differs.
    """
    if recipe.names_folder:
        check_no_run(folder, "check")
    else:
        leave(folder, folder.parents[1])
    console = open_console(quiet=recipe.fields["quiet"])
    named = recipe.fields["executor"].get("verify")
    verify: Literal["first", "full"] = "first" if named == "first" else "full"
    threads = recipe.fields["executor"].get("threads")
    if says(recipe, "data") or recipe.fields["model"] in recipe.fields["models"]:
        step = recipe.compile()
        table = check(step, first_rows(recipe, step), verify=verify, threads=threads)
    else:
        steps: dict[str, Any] = {**recipe.described, "rules": recipe.described.rules}
        if not says(recipe, "loss"):
            steps.pop("loss", None)
        table = check(recipe.model(), verify=verify, threads=threads, **steps)
    say(console, "model", str(recipe.fields["model"]))
    for text in str(table).splitlines():
        print_line(console, text, indent=4)
    if not table.agrees:
        worst = table.differences[0]
        raise GraphoptError(
            f"check: expected no differences, found {len(table.differences)}: {worst.part} {worst.name!r}: expected "
            f"{worst.expected}, found {worst.found}"
        )


def says(recipe: Recipe, group: str) -> bool:
    """Return whether the command line names a field of a group."""
    keys = (item.lstrip("+~").partition("=")[0] for item in recipe.command_line.said)
    return any(key == group or key.startswith(f"{group}.") for key in keys)


def first_rows(recipe: Recipe, step: ir.Model) -> Mapping[str, np.ndarray]:
    """Return the first batch of the rows that would train, in their order and in the types of the graph."""
    encoding = encoding_of(Device(), step)
    inputs = {name_of(x): x for x in with_role(step, *FED)} if encoding is None else encoding.inputs
    data = recipe.data
    train, _ = recipe.split(len(data))
    rows = np.sort(np.asarray(train))[: recipe.fields["fit"]["batch_size"]]
    return Batches(data, inputs, allow_nan=True).take(rows)

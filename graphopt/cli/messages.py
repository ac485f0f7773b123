"""Print lines of the command: facts about a run, and errors."""

from __future__ import annotations

import contextlib
import logging
import re
import sys
from collections.abc import Iterator, Sequence

from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig
from rich import box
from rich.console import Console
from rich.markup import escape
from rich.table import Column, Table

from graphopt.cli.composition.hydra_config import BASE, RECIPES, CommandLine, known_fields, options_of
from graphopt.cli.words import reader_of
from graphopt.errors import escaped, line, nearest, shortened, unknown
from graphopt.runtime.steps import NonFiniteLoss
from graphopt.targets.native import toolchain
from graphopt.training.callbacks.logs import TRACKERS
from graphopt.training.callbacks.terminal import open_console, print_line

PLAIN_WIDTH = 10_000  # characters, of a file or a pipe
NOT_FINITE = 3  # the exit code after a loss or a state that is not finite
_NOT_FOUND = {  # of Hydra's and OmegaConf's messages: where the command line or a recipe names a field
    r"Could not delete from config. '([^']+)' does not exist": "~{}",
    r"Interpolation key '([^']+)' not found": "${{{}}}",
}
PLUGINS = {  # of recipes/sweep
    "joblib": "hydra-joblib-launcher",
    "optuna": "hydra-optuna-sweeper",
    "ray": "hydra-ray-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}


def say(console: Console, what: str, text: str) -> None:
    """Print a line that starts with its topic."""
    print_line(console, f"{what:<9} {text}", indent=10)


def tell_record(console: Console, command_line: CommandLine) -> None:
    """Print from which run a recipe is, and which of its fields the command line changes."""
    record = command_line.record
    if record is not None:
        changed = ", ".join(command_line.replaced)
        launcher = record.choices.get("launcher", "none")
        alone = launcher != "none" and not command_line.names("launcher")
        without = f"; without launcher={launcher}, which starts workers if you name it again" if alone else ""
        say(console, "recipe", f"{record.folder}{f', with {changed}' if changed else ''}{without}")


def print_table(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], *, title: str = "", texts: int = 1
) -> None:
    """Print a table; in a terminal that is narrower, a part for each row.

    Args:
        texts: the number of columns that are text, from the first on; all others are numbers.
    """
    if _print_whole(console, header, rows, title, texts):
        return
    if title:
        print_line(console, title, style="bold")
    longest = max(map(len, header))
    for first, *others in rows:
        print_line(console, f"{header[0]} {first}")
        for name, text in zip(header[1:], others, strict=True):
            print_line(console, f"  {name:<{longest}}  {text}", indent=4)


def _print_whole(
    console: Console, header: Sequence[str], rows: Sequence[Sequence[str]], title: str, texts: int = 1
) -> bool:
    """Print a table if the terminal has room for it; a file or a pipe has. Return whether it was printed."""
    columns = (
        Column(escape(escaped(name)), justify="left" if i < texts else "right", no_wrap=True)
        for i, name in enumerate(header)
    )
    table = Table(*columns, box=box.SIMPLE_HEAD, pad_edge=False)
    for row in rows:
        table.add_row(*(escape(escaped(text)) for text in row))
    unbounded = open_console(width=PLAIN_WIDTH, quiet=console.quiet)
    if console.is_terminal and unbounded.measure(table).maximum > console.width:
        return False
    if title:
        print_line(console, title, style="bold")
    (console if console.is_terminal else unbounded).print(table)
    return True


def print_matrix(console: Console, title: str, names: Sequence[str], counts: Sequence[Sequence[int]]) -> None:
    """Print a confusion matrix; in a terminal that is narrower, the classes that are confused."""
    rows = [[name, *map(str, row)] for name, row in zip(names, counts, strict=True)]
    if _print_whole(console, ["target \\ predicted", *names], rows, title):
        return
    cells = [(x, names[i], names[j]) for i, row in enumerate(counts) for j, x in enumerate(row) if i != j and x]
    confused = [[target, predicted, f"{x:,}"] for x, target, predicted in sorted(cells, key=lambda cell: -cell[0])]
    right = sum(row[i] for i, row in enumerate(counts))
    print_line(console, f"{title}: {right:,} of {sum(map(sum, counts)):,} are right", style="bold")
    if confused:
        print_table(console, ["target", "predicted", "rows"], confused, texts=2)


@contextlib.contextmanager
def compilations(console: Console) -> Iterator[None]:
    """Print a line when the compiler starts, which may take long; once for several graphs."""
    told = set[str]()

    class Lines(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()) not in told:
                told.add(text)
                say(console, "kernels", text)

    handler, level = Lines(), toolchain.logger.level
    toolchain.logger.addHandler(handler)
    toolchain.logger.setLevel(logging.INFO)
    try:
        yield
    finally:
        toolchain.logger.removeHandler(handler)
        toolchain.logger.setLevel(level)


def warn(message: Warning | str, *_: object, **__: object) -> None:
    """Print a warning in one line; this is a `warnings.showwarning`."""
    text = escaped(shortened(" ".join(str(message).split())))
    print(f"graphopt: warning: {text}", file=sys.stderr)


def complain(error: BaseException) -> int:
    """Print an error in one line, and return the exit code."""
    print(f"graphopt: error: {escaped(shortened(line_of(error)))}", file=sys.stderr)
    return NOT_FINITE if isinstance(error, NonFiniteLoss) else 1


def line_of(error: BaseException) -> str:
    """Return an error as one line that lists the alternatives."""
    text = line(error).partition("full_key:")[0].strip() or " ".join(str(error.__cause__).split())
    if isinstance(error, MemoryError):
        return f"out of memory: {text}: try a smaller fit.batch_size or model"
    if isinstance(error, MissingConfigException):
        return _missing_recipe(error, text)
    override = re.match(r"Could not override '([^']+)'", text)
    parent = getattr(error.__cause__, "parent_node", None)
    if override and isinstance(parent, DictConfig):
        names = [str(key) for key in parent if not str(key).startswith("_")]
        return _unknown_field(override[1], names, text.rpartition("use +")[2])
    for pattern, named in _NOT_FOUND.items():
        if missing := re.search(pattern, text):
            near = nearest(missing[1], known_fields())
            meant = f", nearest: {near!r}" if near else ""
            return f"{named.format(missing[1])}: expected a field of the recipe, found none{meant}"
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error.filename}: {error.strerror}" if error.filename else text
    if merged := re.search(r"Error merging override (.+)", text):
        expected = "expected a value like that of the recipe, found another kind"
        return f"{merged[1]}: {expected}: set single fields, as in {merged[1].partition('=')[0]}.FIELD=VALUE"
    text = re.sub(r" (See https|full_key:|object_type=|To append).*", "", text)
    field = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    return f"{field}: {text}" if field and str(field) not in text else text


_MEANT = {  # what people call fields, and where those are
    **dict.fromkeys(
        ("fit.max_steps", "fit.steps", "fit.num_steps"),
        "fit.epochs and fit.batch_size set the number of steps",
    ),
    **{f"callbacks.{name}": f"set callbacks.tracker={name}" for name in TRACKERS},
    "fit.callbacks": "set callbacks.NAME=true, such as callbacks.early_stopping=true",
    **dict.fromkeys(
        ("fit.early_stopping", "fit.patience"),
        "set callbacks.early_stopping=true, or ={patience: 5} for its fields",
    ),
}


def _unknown_field(path: str, names: Sequence[str], line: str) -> str:
    """Return the error of a field that the recipe does not have; `line` is the argument that sets it."""
    place, _, name = path.rpartition(".")
    if path in _MEANT:
        return f"{place}: unknown field {name!r}: {_MEANT[path]}"
    if not place:
        groups = [path.parent.name for path in RECIPES.glob("*/*.yaml")]
        return unknown("option", name, {*names, *groups}, known_fields())
    options = [option for option, fields in options_of(place).items() if name in fields]
    chosen = f": it is a field of {place}={', '.join(options)}" if options else ""
    kind = reader_of(line.partition("=")[2])
    if path == "data.path" and kind in options:
        chosen = f": to read a file, set data={kind} {line}"
    if place == "hydra" or place.startswith("hydra."):
        return f"{place}: {unknown('field', name, names)}"
    if place == "callbacks" and "_target_" in line:
        chosen = f": add a class of your own with +{line}"
    if place.startswith("callbacks.") and not names:
        return f"{path}: expected the fields of {place} in braces, which it is off without: set {place}={{{name}: ...}}"
    if not names and "." not in place:
        return f"{path}: expected an option of {place} beside it, found {place}=none{chosen}"
    return f"{place}: {unknown('field', name, names, [] if options else known_fields())}{chosen}"


def _missing_recipe(error: MissingConfigException, text: str) -> str:
    """Return the error of an option that a group does not have."""
    file = str(error.missing_cfg_file or "")
    group, _, name = file.rpartition("/") if file.startswith("hydra/") else file.partition("/")
    if group == "data" and (kind := reader_of(name)):
        return f"data={name}: expected a reader, found what it reads: data={kind} data.path={name}"
    if name in PLUGINS:
        return f"{group}={name}: expected the package {PLUGINS[name]}, which is not installed: pip install it"
    if error.options:
        return unknown(group, name, [option for option in error.options if option != BASE])
    return text.partition(" Config search path")[0]

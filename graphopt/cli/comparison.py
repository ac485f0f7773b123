"""Compare runs: a table, and a page with their curves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.table import Column, Table

from graphopt.cli.messages import new_console, wide
from graphopt.cli.run_folder import METRICS_FILE
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.inspection import html
from graphopt.training.callbacks import Record

PAGE = "compare.html"
LEFT_OUT = ("step", "learning_rate", "seconds", "samples_per_second")
MOST_LINES = 8  # of a chart; more runs have their best ones drawn
OVERRIDES = Path(".hydra", "overrides.yaml")


@dataclass(frozen=True)
class _Run:
    """Hold what a run has written: its overrides and the records of its epochs."""

    name: str
    overrides: dict[str, str]
    records: list[Record]

    @classmethod
    def read(cls, path: Path, name: str) -> _Run:
        """Read the files of a run; those that are missing count as empty."""
        overrides = yaml.safe_load((path / OVERRIDES).read_text(encoding="utf-8"))
        options = dict(str(override).split("=", 1) for override in overrides if "=" in str(override))
        metrics = path / METRICS_FILE
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return cls(name, options, [record for record in map(json.loads, lines) if "seconds" in record])

    @property
    def last(self) -> Record:
        return self.records[-1] if self.records else {}


def compare(folder: str | os.PathLike[str]) -> Path:
    """Print a table of the runs below a folder, such as that of a sweep; write a page with it and the curves.

    The table has the overrides that differ, and the last epoch of each run. Return the path of the page.
    """
    folder = Path(folder)
    paths = sorted((path.parents[1] for path in folder.rglob(str(OVERRIDES))), key=_order)
    runs = [_Run.read(path, str(path.relative_to(folder))) for path in paths]
    if not runs:
        raise GraphoptError(f"{folder}: expected a folder with runs, found none: give it with folder=...")
    names = dict.fromkeys(name for run in runs for name in run.overrides if name not in ("folder", "resume"))
    options = [name for name in names if len({run.overrides.get(name) for run in runs}) > 1]
    names = dict.fromkeys(name for run in runs for name, x in run.last.items() if not isinstance(x, list))
    measures = [name for name in names if name not in LEFT_OUT]
    header, rows = ["run", *options, *measures], []
    for run in runs:
        numbers = [run.last.get(name) for name in measures]
        texts = [f"{number:.4g}" if isinstance(number, int | float) else "-" for number in numbers]
        rows.append([run.name, *(run.overrides.get(name, "") for name in options), *texts])
    columns = [Column(name, justify="left" if name in options else "right") for name in header]
    table = Table(*columns, title=str(folder), title_justify="left", title_style="")
    for row in rows:
        table.add_row(*row)
    wide(new_console()).print(table)
    curves = html.section("Curves", html.charts(_charts(runs, options, measures)))
    last = html.section("Last epoch of each run", html.table(header, rows))
    write(folder / PAGE, html.page(str(folder), f"{len(runs)} runs", curves, last))
    return folder / PAGE


def _charts(runs: list[_Run], options: Sequence[str], measures: Sequence[str]) -> Iterator[str]:
    """Yield the curve of each measure; many runs have their best ones drawn."""
    runs = [run for run in runs if run.records]
    main = "validation_loss" if any("validation_loss" in run.last for run in runs) else "loss"
    best = sorted(runs, key=lambda run: _least(run.records, main))[:MOST_LINES]
    drawn = [run for run in runs if run in best]
    which = f", best {MOST_LINES} runs" if len(runs) > MOST_LINES else ""
    epochs = range(1, max((len(run.records) for run in runs), default=0) + 1)
    for measure in measures if runs else ():
        if measure != "epoch":
            lines = {}
            for run in drawn:
                values = ", ".join(run.overrides.get(name, "-") for name in options)
                label = f"{run.name}: {values}" if values else run.name
                lines[label] = [record.get(measure) for record in run.records]
            title = f"{measure.replace('_', ' ')}{which}"
            yield html.line_chart(title, epochs, lines, logarithmic="loss" in measure)


class SweepTable(Callback):
    """Print and write the comparison of a sweep's runs. graphopt.yaml registers this class as a callback of Hydra."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        compare(config.hydra.sweep.dir)


def _order(path: Path) -> tuple[tuple[int, str], ...]:
    """Sort numbers in paths as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.parts)


def _least(records: list[Record], measure: str) -> float:
    values = [record.get(measure) for record in records]
    return min((value for value in values if isinstance(value, int | float)), default=float("inf"))

"""Compare runs: a table, and a page with their curves."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml  # type: ignore[import-untyped]
from hydra.experimental.callback import Callback
from omegaconf import DictConfig
from rich.console import Console
from rich.table import Table

from graphopt.cli.messages import wide
from graphopt.cli.run_folder import METRICS_FILE
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.inspection import html
from graphopt.inspection.html import line_chart
from graphopt.training.callbacks import Record

PAGE = "compare.html"
LEFT_OUT = ("step", "learning_rate", "seconds", "samples_per_second")
MOST_LINES = 8  # of a chart; more runs have their best ones drawn
OVERRIDES = Path(".hydra", "overrides.yaml")


@dataclass(frozen=True)
class RunFiles:
    """Hold what a run has written: its overrides and the records of its epochs."""

    path: Path
    overrides: dict[str, str]
    records: list[Record]

    @classmethod
    def read(cls, path: Path) -> RunFiles:
        """Read the files of a run; those that are missing count as empty."""
        overrides = yaml.safe_load((path / OVERRIDES).read_text(encoding="utf-8"))
        options = dict(str(override).split("=", 1) for override in overrides if "=" in str(override))
        metrics = path / METRICS_FILE
        lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
        return cls(path, options, [record for record in map(json.loads, lines) if "seconds" in record])

    @property
    def last(self) -> Record:
        return self.records[-1] if self.records else {}


class Comparison:
    """Compare the runs below a folder, such as that of a sweep."""

    def __init__(self, folder: str | os.PathLike[str]) -> None:
        self._folder = Path(folder)
        paths = [path.parents[1] for path in self._folder.rglob(str(OVERRIDES))]
        self._runs = [RunFiles.read(path) for path in sorted(paths, key=_order)]
        if not self._runs:
            raise GraphoptError(f"{folder}: expected a folder with runs, found none: give it with folder=...")
        options = dict.fromkeys(name for run in self._runs for name in run.overrides)
        self._options = [
            name
            for name in options
            if name not in ("folder", "resume") and len({run.overrides.get(name) for run in self._runs}) > 1
        ]
        names = dict.fromkeys(
            name for run in self._runs for name, x in run.last.items() if not isinstance(x, list)
        )
        self._measures = [name for name in names if name not in LEFT_OUT]

    def print(self) -> None:
        """Print the table of the runs: the overrides that differ, and the last epoch of each."""
        table = Table(title=str(self._folder), title_justify="left", title_style="")
        for name in self._header:
            table.add_column(name, justify="left" if name in self._options else "right")
        for row in self._rows():
            table.add_row(*row)
        wide(Console()).print(table)

    def write(self) -> Path:
        """Write the page with the table and the curves of the runs, and return its path."""
        path = self._folder / PAGE
        about = f"{len(self._runs)} runs"
        table = html.section("Last epoch of each run", html.table(self._header, self._rows()))
        write(
            path,
            html.page(str(self._folder), about, html.section("Curves", html.charts(self._charts())), table),
        )
        return path

    @property
    def _header(self) -> list[str]:
        return ["run", *self._options, *self._measures]

    def _rows(self) -> Iterator[list[str]]:
        for run in self._runs:
            numbers = [
                f"{run.last[name]:.4g}" if _is_number(run.last.get(name)) else "-" for name in self._measures
            ]
            yield [self._name(run), *(run.overrides.get(name, "") for name in self._options), *numbers]

    def _charts(self) -> Iterator[str]:
        runs = [run for run in self._runs if run.records]
        main = "validation_loss" if any("validation_loss" in run.last for run in runs) else "loss"
        best = sorted(runs, key=lambda run: _least(run.records, main))[:MOST_LINES]
        drawn = [run for run in runs if run in best]
        epochs = range(1, max((len(run.records) for run in runs), default=0) + 1)
        for measure in self._measures:
            if measure == "epoch" or not drawn:
                continue
            lines = {}
            for run in drawn:
                values = [record.get(measure) for record in run.records]
                lines[self._label(run)] = [*values, *[None] * (len(epochs) - len(values))]
            title = measure.replace("_", " ") + (
                f", best {MOST_LINES} runs" if len(runs) > MOST_LINES else ""
            )
            yield line_chart(title, epochs, lines, logarithmic="loss" in measure)

    def _name(self, run: RunFiles) -> str:
        return str(run.path.relative_to(self._folder))

    def _label(self, run: RunFiles) -> str:
        values = ", ".join(run.overrides.get(name, "-") for name in self._options)
        return f"{self._name(run)}: {values}" if values else self._name(run)


class SweepTable(Callback):
    """Print and write the comparison of a sweep's runs. graphopt.yaml registers this class as a callback of Hydra."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        comparison = Comparison(config.hydra.sweep.dir)
        comparison.print()
        comparison.write()


def _order(path: Path) -> tuple[tuple[int, str], ...]:
    """Sort numbers in paths as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.parts)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float)


def _least(records: list[Record], measure: str) -> float:
    return min(
        (record[measure] for record in records if _is_number(record.get(measure))), default=float("inf")
    )

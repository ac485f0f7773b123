"""Write the folder of a run, and compare the runs of a sweep in a table."""

from __future__ import annotations

import json
import math
import os
from pathlib import Path
from typing import Any

import onnx_ir as ir
import yaml  # type: ignore[import-untyped]
from rich.table import Table

from graphopt.files import write
from graphopt.graph.loading import save
from graphopt.training.fit import Record

LEFT_OUT = ("step", "learning_rate", "seconds", "samples_per_second")


class RunFolder:
    """Write the files of a training run as an observer of `fit`, once the data has been checked.

    Args:
        path: the folder.
        step: the training graph, for step.onnx.
        config: the recipe, for config.yaml.
        log_steps: write a line per step to metrics.jsonl, in addition to the line per epoch.
    """

    reads_state = False

    def __init__(self, path: Path, step: ir.Model, config: str, *, log_steps: bool = False) -> None:
        self._path = path
        self._model = step
        self._config = config
        self._log_steps = log_steps

    def start(self, *, epochs: int, steps: int, rows: int, validation_rows: int) -> None:
        save(self._model, self._path / "step.onnx")
        write(self._path / "config.yaml", self._config)
        write(self._path / "metrics.jsonl", "")

    def step(self, record: Record) -> None:
        if self._log_steps:
            self.epoch({name: value for name, value in record.items() if isinstance(value, int | float)})

    def epoch(self, record: Record) -> None:
        with open(self._path / "metrics.jsonl", "a", encoding="utf-8") as file:
            file.write(json.dumps({name: _finite(value) for name, value in record.items()}) + "\n")


def sweep_table(folder: str | os.PathLike[str]) -> Table:
    """Return a table of the runs in a sweep's folder: the overrides that differ, and the last epoch of each."""
    folders = [path for path in Path(folder).iterdir() if path.name.isdigit()]
    runs = [_read(path) for path in sorted(folders, key=lambda path: int(path.name))]
    options = list(dict.fromkeys(name for overrides, _ in runs for name in overrides))
    options = [name for name in options if len({overrides.get(name) for overrides, _ in runs}) > 1]
    measures = list(dict.fromkeys(name for _, record in runs for name in record if name not in LEFT_OUT))
    table = Table(title=str(folder), title_justify="left", title_style="")
    for name in ("run", *options, *measures):
        table.add_column(name, justify="left" if name in options else "right")
    for i, (overrides, record) in enumerate(runs):
        numbers = [f"{record[name]:.4g}" if record.get(name) is not None else "-" for name in measures]
        table.add_row(str(i), *(overrides.get(name, "") for name in options), *numbers)
    return table


def _read(folder: Path) -> tuple[dict[str, str], Record]:
    """Return a run's overrides and the record of its last epoch, each empty if missing."""
    overrides = yaml.safe_load((folder / ".hydra" / "overrides.yaml").read_text(encoding="utf-8"))
    options = dict(str(override).split("=", 1) for override in overrides if "=" in str(override))
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [record for record in map(json.loads, lines) if "seconds" in record]
    return options, records[-1] if records else {}


def _finite(value: Any) -> Any:
    """Return a value for JSON, with None in place of a non-finite number."""
    return None if isinstance(value, float) and not math.isfinite(value) else value

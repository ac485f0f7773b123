"""The runs of a sweep, side by side."""

from __future__ import annotations

import json
import os
from pathlib import Path

from omegaconf import OmegaConf
from rich.table import Table

from graphopt.fit import Record

LEFT_OUT = ("step", "learning_rate", "seconds", "samples_per_second")


def sweep_table(folder: str | os.PathLike[str]) -> Table:
    """Return a table of the runs in a sweep's folder: what differs between them, and the last epoch of each."""
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
    """Return the overrides of a run and its last epoch's record, empty where it has none."""
    overrides = OmegaConf.load(folder / ".hydra" / "overrides.yaml")
    options = dict(str(override).split("=", 1) for override in overrides if "=" in str(override))
    metrics = folder / "metrics.jsonl"
    lines = metrics.read_text(encoding="utf-8").splitlines() if metrics.exists() else []
    records = [record for record in map(json.loads, lines) if "seconds" in record]
    return options, records[-1] if records else {}

"""Compare runs: a table with the best run first, and a page with their curves."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

import yaml  # type: ignore[import-untyped]
from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from graphopt.cli.messages import counted, print_table, say
from graphopt.cli.run_folder import CONFIG, METRICS_FILE, RESULT
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.inspection import html
from graphopt.inspection.charts import COLORS, line_chart
from graphopt.inspection.words import is_share, label_of, measure_text, readable
from graphopt.training.callbacks import Record
from graphopt.training.callbacks.terminal import open_console
from graphopt.training.metrics import METRICS

PAGE, REPORT = "compare.html", "report.html"
LEFT_OUT = ("step", "learning_rate", "seconds", "samples_per_second")
FALLING = ("mae", "mse", "rmse", "perplexity")  # metrics that are better if they are less
OVERRIDES, HYDRA = Path(".hydra", "overrides.yaml"), Path(".hydra", "hydra.yaml")


@dataclass(frozen=True)
class _Run:
    """Hold what a run has written: its options, the records of its epochs, and its result, if it is complete."""

    name: str
    path: Path
    overrides: dict[str, str]
    choices: Mapping[str, Any]
    config: Mapping[str, Any]
    is_of_sweep: bool
    records: list[Record]
    result: Mapping[str, Any]

    @classmethod
    def read(cls, path: Path, name: str) -> _Run:
        """Read the files of a run; those that are missing or broken count as empty."""
        overrides, config = _yaml(path / OVERRIDES, []), _yaml(path / CONFIG, {})
        hydra = _yaml(path / HYDRA, {}).get("hydra", {})
        options = dict(str(override).split("=", 1) for override in overrides if "=" in str(override))
        records = [record for record in _json_lines(path / METRICS_FILE) if "seconds" in record]
        result = next(iter(_json_lines(path / RESULT)), {})
        choices, mode = hydra.get("runtime", {}).get("choices", {}), hydra.get("mode")
        return cls(name, path, options, choices, config, mode == "MULTIRUN", records, result)

    def option(self, name: str) -> str:
        """Return the value of an option: what the command line said, or else what the recipe has."""
        if name in self.overrides:
            return self.overrides[name]
        value: Any = self.choices.get(name, self.config)
        for part in name.split(".") if value is self.config else ():
            value = value.get(part) if isinstance(value, Mapping) else None
        return "" if value is None or isinstance(value, Mapping) else str(value)

    @property
    def final(self) -> Record:
        """Return the record of the epoch whose weights the run has ended with."""
        value = self.result.get("value")
        named = (x for x in self.records if value is not None and value in (x.get("validation_loss"), x.get("loss")))
        return next(named, self.records[-1] if self.records else {})

    @property
    def state(self) -> str:
        """Say what became of a run of a sweep that has no number."""
        if "value" in self.result:
            return "not finite" if self.result["value"] is None else ""
        if not self.records:
            return "failed" if self.is_of_sweep else "no epoch"
        return "unfinished" if self.is_of_sweep else ""

    def key(self, measure: str) -> float:
        """Return a number that is less for better runs."""
        value = self.final.get(measure)
        if self.state in ("failed", "not finite") or not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return float(value) if "loss" in measure or measure in FALLING else -float(value)


def compare(folder: str | os.PathLike[str]) -> Path:
    """Print a table of the runs below a folder, such as that of a sweep; write a page with it and the curves.

    The table has the options that differ, and the measures of each run, with the best run first. Return the path of
    the page.
    """
    folder = Path(folder)
    paths = sorted((path.parents[1] for path in folder.rglob(str(OVERRIDES))), key=_order)
    runs = [_Run.read(path, str(path.relative_to(folder))) for path in paths]
    if not runs:
        raise GraphoptError(f"{folder}: expected a folder with runs, found none: give it with folder=...")
    names = dict.fromkeys(name for run in runs for name in run.overrides if name not in ("folder", "resume"))
    options = [name for name in names if len({run.option(name) for run in runs}) > 1]
    measures = _measures(runs)
    by = _decisive(measures, options)
    runs.sort(key=lambda run: (run.key(by), bool(run.state)))
    least = runs[0].key(by)
    states = ["best" if run.key(by) == least < math.inf else run.state for run in runs]
    header = ["run", *options, *map(label_of, measures)]
    rows = [
        [run.name, *map(run.option, options), *(_text(name, run.final.get(name)) for name in measures)] for run in runs
    ]
    title = f"{folder}: {counted(len(runs), 'run')}, best by {label_of(by)}"
    marked = [[row[0], state, *row[1:]] for row, state in zip(rows, states, strict=True)]
    print_table(open_console(), [header[0], "", *header[1:]], marked, title=title, texts=2 + len(options))
    write(folder / PAGE, _page(folder, runs, options, measures, header, rows, states, by))
    return folder / PAGE


def _page(
    folder: Path,
    runs: Sequence[_Run],
    options: Sequence[str],
    measures: Sequence[str],
    header: Sequence[str],
    rows: Sequence[Sequence[str]],
    states: Sequence[str],
    by: str,
) -> str:
    """Return the page: the best run, the table, and the curves."""
    about = f"{counted(len(runs), 'run')}, the best first by {label_of(by)}"
    best, links = runs[0], {i: f"{quote(run.name)}/{REPORT}" for i, run in enumerate(runs) if (run.path / REPORT).exists()}
    parts = []
    if states[0] == "best":
        shown = [name for name in measures if name not in ("epoch", "loss")] or ["loss"]
        numbers = [(label_of(name), _text(name, best.final.get(name)), "c1" if name == by else "") for name in shown]
        facts = {name: best.option(name) for name in options}
        parts.append(
            html.section(f"Best run: {best.name}", html.figures(numbers), html.facts(facts) if facts else "")
        )
    table = html.table(header, rows, marks=dict(enumerate(states)), links=links, texts=1 + len(options))
    curves = html.charts(_charts(runs, options, measures))
    return html.page(str(folder), about, *parts, html.section("Runs", table), html.section("Curves", curves))


def _measures(runs: Sequence[_Run]) -> list[str]:
    """Return the names of numbers that any run has, those of held-out rows first."""
    names = dict.fromkeys(name for run in runs for name, x in run.final.items() if isinstance(x, int | float))
    held_out = dict.fromkeys(name for run in runs for name in _after("validation_loss", list(run.final)))
    ordered = [name for name in held_out if name in names] + [name for name in names if name not in held_out]
    return [name for name in ordered if name not in (*LEFT_OUT, "epoch")] + ["epoch"]


def _after(first: str, names: list[str]) -> list[str]:
    return names[names.index(first) :] if first in names else []


def _decisive(measures: Sequence[str], options: Sequence[str]) -> str:
    """Return the measure that ranks runs; runs with different losses are ranked by a metric, if they have one."""
    losses = [name for name in ("validation_loss", "loss") if name in measures] or ["loss"]
    metrics = [name for name in measures if name in METRICS or is_share(name)]
    has_losses = any(name.split(".")[0] == "loss" for name in options)
    return metrics[0] if has_losses and metrics else losses[0]


def _charts(runs: Sequence[_Run], options: Sequence[str], measures: Sequence[str]) -> Iterator[str]:
    """Yield the curve of each measure; of many runs, the best ones are drawn."""
    with_epochs = [run for run in runs if run.records]
    drawn = with_epochs[:COLORS]
    which = f", best {COLORS} of {len(with_epochs)} runs" if len(with_epochs) > COLORS else ""
    epochs = range(1, max((len(run.records) for run in drawn), default=0) + 1)
    for measure in measures if drawn else ():
        if measure != "epoch":
            factor, unit = (100, " %") if is_share(measure) else (1, "")
            lines = {}
            for run in drawn:
                values = ", ".join(run.option(name) for name in options)
                numbers = [_number(record.get(measure)) for record in run.records]
                line = [None if x is None else factor * x for x in numbers]
                lines[f"{run.name}: {values}" if values else run.name] = line + [None] * (len(epochs) - len(line))
            title = label_of(measure)
            yield line_chart(
                f"{title[:1].upper()}{title[1:]}{which}", epochs, lines, logarithmic="loss" in measure, unit=unit
            )


class SweepTable(Callback):
    """Print and write the comparison of a sweep's runs. graphopt.yaml registers this class as a callback of Hydra."""

    def on_multirun_end(self, config: DictConfig, **_: Any) -> None:
        say_compared(config.hydra.sweep.dir)


def say_compared(folder: str | os.PathLike[str]) -> None:
    """Compare the runs below a folder, and say where the page is."""
    page = compare(folder)
    say(open_console(), "written", str(page))


def _order(path: Path) -> tuple[tuple[int, str], ...]:
    """Sort numbers in paths as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.parts)


def _text(name: str, value: Any) -> str:
    number = _number(value)
    if number is None:
        return "-"
    return readable(value) if name == "epoch" else measure_text(name, number)


def _number(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) else None


def _yaml(path: Path, missing: Any) -> Any:
    """Return the content of a YAML file of the type of `missing`."""
    with contextlib.suppress(OSError, ValueError, yaml.YAMLError):
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if isinstance(content, type(missing)):
            return content
    return missing


def _json_lines(path: Path) -> list[dict[str, Any]]:
    """Return the whole lines of a file that hold mappings."""
    lines = []
    with contextlib.suppress(OSError, ValueError):
        for text in path.read_text(encoding="utf-8").splitlines():
            with contextlib.suppress(ValueError):
                lines.append(json.loads(text))
    return [line for line in lines if isinstance(line, dict)]

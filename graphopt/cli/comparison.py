"""Compare runs: a table with the best run first, and a page with their curves."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import dropwhile
from pathlib import Path
from urllib.parse import quote

from hydra.experimental.callback import Callback
from omegaconf import DictConfig

from graphopt.cli.composition.expansion import read_config
from graphopt.cli.composition.record import HYDRA, OPTIONS, OVERRIDES, enter, mapping, select
from graphopt.cli.messages import print_table, say
from graphopt.cli.run_folder import CONFIG, METRICS_FILE, REPORT, RESULT
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.inspection import html
from graphopt.inspection.charts import COLORS, line_chart
from graphopt.inspection.words import counted, is_share, label_of, measure_text
from graphopt.training.callbacks import Record
from graphopt.training.callbacks.logs import read_json_lines
from graphopt.training.callbacks.terminal import open_console
from graphopt.training.checkpoints import larger_is_better
from graphopt.training.metrics import METRICS

PAGE = "compare.html"
LEFT_OUT = ("epoch", "step", "learning_rate", "seconds", "samples_per_second", "tokens_per_second")
PLACES = ("folder", "resume")


@dataclass(frozen=True)
class _Run:
    """Hold the files of a run: its options, the records of its epochs, and its result, if it is complete."""

    name: str
    path: Path
    overrides: dict[str, str]
    choices: Mapping[str, object]
    config: Mapping[str, object]
    is_of_sweep: bool
    records: list[Record]
    result: Mapping[str, object]

    @classmethod
    def read(cls, path: Path, name: str) -> _Run:
        """Read the files of a run; those that are missing or broken count as empty."""
        overrides, config, hydra = map(
            _yaml_content, (path / HYDRA / OVERRIDES, path / CONFIG, path / HYDRA / OPTIONS)
        )
        lines = map(str, overrides if isinstance(overrides, list) else ())
        return cls(
            name,
            path,
            dict(line.split("=", 1) for line in lines if "=" in line),
            mapping(select(hydra, "hydra.runtime.choices")),
            mapping(config),
            select(hydra, "hydra.mode") == "MULTIRUN",
            [record for record in read_json_lines(path / METRICS_FILE) if "seconds" in record],
            next(iter(read_json_lines(path / RESULT)), {}),
        )

    def option(self, name: str) -> str:
        """Return the value of an option: that of the command line, or else that of the recipe."""
        if name in self.overrides:
            return self.overrides[name]
        value = self.choices[name] if name in self.choices else select(self.config, name)
        return "" if value is None or isinstance(value, Mapping) else str(value)

    @property
    def has_report(self) -> bool:
        return (self.path / REPORT).is_file()

    @property
    def final(self) -> Record:
        """Return the record of the epoch whose weights the run has ended with."""
        value = self.result.get("value")
        named = [x for x in self.records if value in (x.get("validation_loss"), x.get("loss"))]
        return next(iter((named if value is not None else []) or self.records[-1:]), {})

    @property
    def state(self) -> str:
        """Return why a run has no number, in words; nothing for a complete run."""
        if "value" in self.result:
            return "not finite" if self.result["value"] is None else ""
        if not self.records:
            return "failed" if self.is_of_sweep else "no epoch"
        return "unfinished" if self.is_of_sweep else ""

    def key(self, measure: str) -> float:
        """Return a number that is less for better runs."""
        value = self.final.get(measure)
        if self.state == "not finite" or not isinstance(value, int | float) or not math.isfinite(value):
            return math.inf
        return -float(value) if larger_is_better(measure) else float(value)


@dataclass(frozen=True)
class _Comparison:
    """Hold runs with the best first, the options that differ, and the measures, one of which ranks the runs."""

    folder: Path
    runs: Sequence[_Run]
    options: Sequence[str]
    measures: Sequence[str]
    by: str

    @classmethod
    def of(cls, folder: Path) -> _Comparison:
        """Compare the runs below a folder."""
        paths = sorted((path.parents[1] for path in folder.rglob(f"{HYDRA}/{OVERRIDES}")), key=_path_order)
        for path in paths:
            enter(path)
        runs = [_Run.read(path, str(path.relative_to(folder))) for path in paths]
        runs = [run for run in runs if run.config.get("run", "train") == "train"]
        if not runs:
            raise GraphoptError(f"{folder}: expected a folder with runs, found none: give it with folder=...")
        names = dict.fromkeys(name for run in runs for name in run.overrides)
        options = [
            name for name in names if len({run.option(name) for run in runs}) > 1 and name not in PLACES
        ]
        measures = _measure_names(runs)
        by = _decisive(measures, options)
        return cls(
            folder, sorted(runs, key=lambda run: (run.key(by), bool(run.state))), options, measures, by
        )

    @property
    def about(self) -> str:
        return f"{counted(len(self.runs), 'run')}, best by {_measure_label(self.by)}"

    def states(self) -> list[str]:
        """Return `best` for the best runs, and why the others have no number."""
        least = self.runs[0].key(self.by)
        return ["best" if run.key(self.by) == least < math.inf else run.state for run in self.runs]

    def rows(self, text: Callable[[str, float], str]) -> Iterator[list[str]]:
        """Yield the name, the options and the measures of each run, the latter by a function of name and number."""
        for run in self.runs:
            numbers = {name: run.final.get(name) for name in self.measures}
            texts = (text(name, x) if isinstance(x, int | float) else "-" for name, x in numbers.items())
            yield [run.name, *map(run.option, self.options), *texts]

    def page(self) -> str:
        """Return the page: the best run, the table, and the curves."""
        best, states = self.runs[0], self.states()
        links = {i: f"{quote(run.name)}/{REPORT}" for i, run in enumerate(self.runs) if run.has_report}
        labels = list(map(label_of, _short_names(self.options)))
        parts = []
        if states[0] == "best":
            shown = [name for name in self.measures if name not in ("epoch", "loss")] or ["loss"]
            numbers = [(name, best.final[name]) for name in shown if name in best.final]
            figures = [
                (_measure_label(name), measure_text(name, x), "c1" if name == self.by else "")
                for name, x in numbers
            ]
            facts = dict(zip(labels, map(best.option, self.options), strict=True))
            parts = [html.figures(figures), *([html.facts(facts)] if facts else [])]
            parts = [html.section(f"Best run: {best.name}", *parts)]
        header, rows = ["run", *labels, *map(_measure_label, self.measures)], self.rows(measure_text)
        marks, texts = dict(enumerate(states)), 1 + len(self.options)
        return html.page(
            str(self.folder),
            self.about,
            *parts,
            html.section("Runs", html.html_table(header, rows, marks=marks, links=links, texts=texts)),
            html.section("Curves", html.charts(self._charts())),
        )

    def _charts(self) -> Iterator[str]:
        """Yield the curve of each measure; of many runs, the best ones are drawn."""
        with_epochs = [run for run in self.runs if run.records]
        if not with_epochs:
            return
        drawn = with_epochs[:COLORS]
        which = f", best {COLORS} of {len(with_epochs)} runs" if len(with_epochs) > COLORS else ""
        epochs = range(1, max(len(run.records) for run in drawn) + 1)
        for measure in (name for name in self.measures if name != "epoch"):
            factor, unit = (100, " %") if is_share(measure) else (1, "")
            lines = {}
            for run in drawn:
                values = ", ".join(filter(None, map(run.option, self.options)))
                records: list[Record] = [*run.records, *({} for _ in epochs)]
                numbers = [record.get(measure) for record in records[: len(epochs)]]
                lines[f"{run.name}: {values}" if values else run.name] = [
                    factor * x if isinstance(x, int | float) else None for x in numbers
                ]
            title = _measure_label(measure)
            title = f"{title[:1].upper()}{title[1:]}{which}"
            yield line_chart(title, epochs, lines, logarithmic="loss" in measure, unit=unit)


def compare(folder: str | os.PathLike[str]) -> Path:
    """Print a table of the runs below a folder, such as that of a sweep; write a page with it and the curves.

    The table has the options that differ, and the measures of each run, with the best run first. Return the path of
    the page.
    """
    comparison = _Comparison.of(Path(folder))
    rows = list(comparison.rows(lambda name, number: f"{number:.4g}"))
    for row, state in zip(rows, comparison.states(), strict=True):
        row[0] = f"{row[0]}  {state}".rstrip()
    console, measures = open_console(), map(_measure_label, comparison.measures)
    options = _short_names(comparison.options) if console.is_terminal else comparison.options
    title = f"{folder}: {comparison.about}"
    print_table(console, ["run", *options, *measures], rows, title=title, texts=1 + len(options))
    write(Path(folder, PAGE), comparison.page())
    return Path(folder, PAGE)


def _measure_names(runs: Sequence[_Run]) -> list[str]:
    """Return the names of numbers that any run has, those of held-out rows first."""
    names = dict.fromkeys(name for run in runs for name, x in run.final.items() if isinstance(x, int | float))
    held_out = {name for run in runs for name in dropwhile("validation_loss".__ne__, run.final)}
    ordered = sorted(names, key=lambda name: name not in held_out)
    return [*(name for name in ordered if name not in LEFT_OUT), "epoch"]


def _decisive(measures: Sequence[str], options: Sequence[str]) -> str:
    """Return the measure that ranks runs; runs with different losses are ranked by a metric, if they have one."""
    losses = [name for name in ("validation_loss", "loss") if name in measures] or ["loss"]
    metrics = [name for name in measures if name in METRICS or is_share(name)]
    has_losses = any(name.split(".")[0] == "loss" for name in options)
    return metrics[0] if has_losses and metrics else losses[0]


def _measure_label(name: str) -> str:
    return "training loss" if name == "loss" else label_of(name)


def _short_names(names: Sequence[str]) -> list[str]:
    """Return the last parts of dotted names, where these differ."""
    last = [name.rpartition(".")[2] for name in names]
    return [short if last.count(short) == 1 else name for short, name in zip(last, names, strict=True)]


class SweepTable(Callback):
    """Print and write the comparison of a sweep's runs. graphopt.yaml registers this class as a callback of Hydra."""

    def on_multirun_end(self, config: DictConfig, **_: object) -> None:
        say_compared(config.hydra.sweep.dir)


def say_compared(folder: str | os.PathLike[str]) -> None:
    """Compare the runs below a folder, and print the path of the page."""
    page = compare(folder)
    say(open_console(), "written", str(page))


def _path_order(path: Path) -> tuple[tuple[int, str], ...]:
    """Sort numbers in paths as numbers."""
    return tuple((int(part), "") if part.isdigit() else (-1, part) for part in path.parts)


def _yaml_content(path: Path) -> object:
    """Return the content of a YAML file, or None if it is missing or broken."""
    with contextlib.suppress(GraphoptError):
        return read_config(path)
    return None

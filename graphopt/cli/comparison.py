"""Compare runs: a table with the best run first, and a page with their curves."""

from __future__ import annotations

import contextlib
import math
import os
import statistics
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
from graphopt.cli.run_folder import CONFIG, METRICS_FILE, REPORT, RESULT, final_record
from graphopt.errors import GraphoptError
from graphopt.files import write
from graphopt.inspection import html
from graphopt.inspection.charts import COLORS, PERCENT, line_chart
from graphopt.inspection.words import counted, is_share, label_of, measure_text
from graphopt.training.callbacks import Record
from graphopt.training.callbacks.logs import read_json_lines
from graphopt.training.callbacks.terminal import open_console, print_line
from graphopt.training.checkpoints import larger_is_better
from graphopt.training.metrics import METRICS

_PAGE = "compare.html"
LEFT_OUT = ("epoch", "step", "learning_rate", "seconds", "samples_per_second", "tokens_per_second")
OF_PLACES = ("folder", "resume")
LOSSES = ("validation_loss", "loss")
DIGITS = 4  # significant ones of numbers
MOST_NAMED = 3  # options whose values name curves
MOST_VALUES = 4  # of an option, whose means are compared one by one
PLACES = 2  # decimal places of per cents


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
        overrides, config, hydra = map(_yaml_content, (path / HYDRA / OVERRIDES, path / CONFIG, path / HYDRA / OPTIONS))
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
        if value is None or isinstance(value, Mapping):
            return ""
        return str(value).lower() if isinstance(value, bool) else str(value)

    @property
    def has_report(self) -> bool:
        return (self.path / REPORT).is_file()

    @property
    def final(self) -> Record:
        """Return the record of the epoch whose weights the run has ended with."""
        return final_record(self.result, self.records)

    @property
    def state(self) -> str:
        """Return why a run has no number, in words; nothing for a complete run."""
        if "value" in self.result:
            if self.result["value"] is not None:
                return ""
            return "no epoch" if self.result.get("epoch") == 0 and "validation_loss" not in self.final else "not finite"
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
class _Effect:
    """Hold the values of an option with the best and the worst mean of a measure, and these means."""

    option: str
    best: tuple[str, float]
    worst: tuple[str, float]

    @classmethod
    def of(cls, option: str, runs: Sequence[_Run], measure: str, least: int) -> _Effect | None:
        """Compare the means of runs by the value of an option; None if the runs do not tell.

        Args:
            runs: runs that have the measure.
            least: the number of runs that each value needs: another option may make the difference of single runs.
        """
        groups: dict[str, list[float]] = {}
        values = [run.option(option) for run in runs]
        names = _halves(values) if len(set(values)) > MOST_VALUES else map(_option_text, values)
        for name, run in zip(names, runs, strict=True):
            groups.setdefault(name or "none", []).append(float(run.final[measure]))
        means = {name: sum(numbers) / len(numbers) for name, numbers in groups.items()}
        if len(means) < 2 or len(runs) < 3 or min(map(len, groups.values())) < least:
            return None
        ordered = sorted(means.items(), key=lambda item: item[1], reverse=larger_is_better(measure))
        return cls(option, ordered[0], ordered[-1])


def _halves(values: Sequence[str]) -> Sequence[str]:
    """Name the half of the numbers that each value is in; values that are no numbers stay."""
    try:
        numbers = [float(value) for value in values]
    except ValueError:
        return values
    middle = statistics.median_low(numbers)
    text = _option_text(f"{middle:.{DIGITS}g}")
    return [f"up to {text}" if number <= middle else f"above {text}" for number in numbers]


@dataclass(frozen=True)
class _Comparison:
    """Hold runs with the best first, the options that differ, and the measures, one of which ranks the runs."""

    folder: Path
    runs: Sequence[_Run]
    options: Sequence[str]
    measures: Sequence[str]
    by: str

    @classmethod
    def of(cls, folder: Path, paths: Sequence[Path] = ()) -> _Comparison:
        """Compare the runs below a folder, all of them or those in some folders."""
        paths = paths or sorted((path.parents[1] for path in folder.rglob(f"{HYDRA}/{OVERRIDES}")), key=_path_order)
        for path in paths:
            enter(path)
        own = folder.resolve().name
        runs = [_Run.read(path, own if path == folder else str(path.relative_to(folder))) for path in paths]
        runs = [run for run in runs if run.config.get("run", "train") == "train"]
        if not runs:
            raise GraphoptError(f"{folder}: expected a folder with runs, found none: give it with folder=...")
        names = dict.fromkeys(name for run in runs for name in run.overrides)
        options = [name for name in names if len({run.option(name) for run in runs}) > 1 and name not in OF_PLACES]
        measures = _measure_names(runs)
        by = _decisive(runs, measures, options)
        return cls(folder, sorted(runs, key=lambda run: (run.key(by), bool(run.state))), options, measures, by)

    @property
    def about(self) -> str:
        return f"{counted(len(self.runs), 'run')}, best by {label_of(self.by)}"

    @property
    def others(self) -> Iterator[str]:
        """Yield a line for each other held-out metric by which another run is the best one."""
        best = self.runs[0]
        for name in self.measures:
            if name == self.by or not (name in METRICS or is_share(name)):
                continue
            leader = min(self.runs, key=lambda run: run.key(name))
            if leader.key(name) < best.key(name):
                numbers = [
                    measure_text(name, run.final[name], PLACES) if name in run.final else "none"
                    for run in (leader, best)
                ]
                yield (
                    f"by {label_of(name)}, run {leader.name} is the best: {numbers[0]}, where run {best.name} has "
                    f"{numbers[1]}"
                )

    def effects(self) -> list[_Effect]:
        """Return what the values of each option make of the deciding measure, the largest difference first."""
        ranked = [run for run in self.runs if run.key(self.by) < math.inf]
        least = 1 if len(self.options) == 1 else 2
        found = [_Effect.of(name, ranked, self.by, least) for name in self.options]
        return sorted((x for x in found if x is not None), key=lambda x: -abs(x.best[1] - x.worst[1]))

    def states(self) -> list[str]:
        """Return `best` for the best runs, and why the others have no number."""
        least = self.runs[0].key(self.by)
        return ["best" if run.key(self.by) == least < math.inf else run.state for run in self.runs]

    def rows(self, text: Callable[[str, float], str]) -> Iterator[list[str]]:
        """Yield the name, the options and the measures of each run, the latter by a function of name and number."""
        for run in self.runs:
            numbers = {name: run.final.get(name) for name in self.measures}
            texts = (text(name, x) if isinstance(x, int | float) else "-" for name, x in numbers.items())
            yield [run.name, *map(_option_text, map(run.option, self.options)), *texts]

    def keys(self) -> list[list[float | str]]:
        """Return what the cells of `rows` are sorted by."""
        return [
            [
                run.name,
                *map(run.option, self.options),
                *(x if isinstance(x := run.final.get(name), int | float) else "" for name in self.measures),
            ]
            for run in self.runs
        ]

    def page(self) -> str:
        """Return the page: the best run, the table, and the curves."""
        best, states = self.runs[0], self.states()
        places = [quote(str(run.path.relative_to(self.folder))) for run in self.runs]
        links = {i: f"{places[i]}/{REPORT}" for i, run in enumerate(self.runs) if run.has_report}
        labels = list(map(label_of, _short_names(self.options)))
        parts = []
        if states[0] == "best":
            shown = [name for name in self.measures if name not in ("epoch", "loss")] or ["loss"]
            numbers = [(name, best.final[name]) for name in shown if name in best.final]
            figures = [
                (label_of(name), measure_text(name, x, PLACES), "c1" if name == self.by else "") for name, x in numbers
            ]
            values = map(_option_text, map(best.option, self.options))
            facts = {label: value for label, value in zip(labels, values, strict=True) if value}
            parts = [html.figures(figures), *([html.facts(facts)] if facts else [])]
            parts += [html.note(f"{line[:1].upper()}{line[1:]}.") for line in self.others]
            parts = [html.section(f"Best run: {best.name}", *parts)]
        header = ["run", *labels, *map(label_of, self.measures)]
        rows = self.rows(lambda name, number: measure_text(name, number, PLACES))
        marks, texts = dict(enumerate(states)), 1 + len(self.options)
        table = html.html_table(header, rows, marks=marks, links=links, texts=texts, keys=self.keys())
        return html.page(
            self.folder.resolve().name,
            self.about,
            *parts,
            html.section("Runs", table),
            *self._effects_section(dict(zip(self.options, labels, strict=True))),
            html.section("Curves", html.charts(self._charts())),
        )

    def _effects_section(self, labels: Mapping[str, str]) -> Iterator[str]:
        """Yield the section that says which options mattered, if the runs tell."""
        if not (effects := self.effects()):
            return
        mean = label_of(self.by)
        header = ["option", "best", f"mean {mean}", "worst", f"mean {mean}"]
        rows = []
        for effect in effects:
            pairs = ((value, measure_text(self.by, x, PLACES)) for value, x in (effect.best, effect.worst))
            rows.append([labels[effect.option], *(text for pair in pairs for text in pair)])
        yield html.section(
            "Which option mattered",
            html.html_table(header, rows),
            html.note(
                "Means of all runs with a value, the largest difference first. Of a number with many values, smaller "
                "ones are compared with larger ones. With few runs, differences may be chance."
            ),
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
            factor, unit = (100, PERCENT) if is_share(measure) else (1, "")
            lines = {}
            for run in drawn:
                options = self.options if len(self.options) <= MOST_NAMED else ()
                values = ", ".join(filter(None, map(_option_text, map(run.option, options))))
                records: list[Record] = [*run.records, *({} for _ in epochs)]
                numbers = [record.get(measure) for record in records[: len(epochs)]]
                lines[f"{run.name}: {values}" if values else run.name] = [
                    factor * x if isinstance(x, int | float) else None for x in numbers
                ]
            title = label_of(measure)
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
    console, measures = open_console(), map(label_of, comparison.measures)
    options = _short_names(comparison.options) if console.is_terminal else comparison.options
    title = f"{comparison.folder.resolve().name}: {comparison.about}"
    print_table(console, ["run", *options, *measures], rows, title=title, texts=1 + len(options))
    for line in comparison.others:
        print_line(console, line)
    if effects := comparison.effects():
        option, (value, mean) = effects[0].option, effects[0].best
        print_line(
            console,
            f"{option} mattered most: {label_of(comparison.by)} {mean:.4g} on average with {value}, "
            f"{effects[0].worst[1]:.4g} with {effects[0].worst[0]}",
        )
    write(Path(folder, _PAGE), comparison.page())
    return Path(folder, _PAGE)


def finals(first: Path, *others: Path) -> tuple[str, dict[Path, float]]:
    """Return the measure that ranks a run and others below its folder, and its value in each, the best run first."""
    comparison = _Comparison.of(first, (first, *others))
    numbers = {run.path: run.final.get(comparison.by) for run in comparison.runs}
    return comparison.by, {path: x for path, x in numbers.items() if isinstance(x, int | float)}


def _measure_names(runs: Sequence[_Run]) -> list[str]:
    """Return the names of numbers that any run has, those of held-out rows first."""
    names = dict.fromkeys(name for run in runs for name, x in run.final.items() if isinstance(x, int | float))
    held_out = {name for run in runs for name in dropwhile("validation_loss".__ne__, run.final)}
    ordered = sorted(names, key=lambda name: name not in held_out)
    return [*(name for name in ordered if name not in LEFT_OUT), "epoch"]


def _decisive(runs: Sequence[_Run], measures: Sequence[str], options: Sequence[str]) -> str:
    """Return the measure that ranks runs: the one that chose the epochs, if the runs name the same.

    Runs with different losses are ranked by a metric, if they have one.
    """
    chosen = {_chooses(run.config) for run in runs}
    if len(chosen) == 1 and (name := chosen.pop()) in measures and name not in LOSSES:
        return name
    losses = [name for name in LOSSES if name in measures] or ["loss"]
    metrics = [name for name in measures if name in METRICS or is_share(name)]
    has_losses = any(name.split(".")[0] == "loss" for name in options)
    return metrics[0] if has_losses and metrics else losses[0]


def _chooses(config: Mapping[str, object]) -> str:
    """Return the measure that chooses the epoch whose weights a run exports, if its recipe names one."""
    monitor = mapping(select(config, "callbacks.early_stopping")).get("monitor")
    return str(monitor or select(config, "fit.checkpoint.best"))


def _option_text(value: str) -> str:
    """Return the value of an option; a number has at most four significant digits."""
    with contextlib.suppress(ValueError):
        short = f"{float(value):.{DIGITS}g}"
        if not value.isdigit() and float(short) != float(value):
            return short
    return value


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

"""The pages of runs: self-contained, drawn by a real browser, with the numbers of scikit-learn."""

from __future__ import annotations

import html.parser
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import confusion_matrix

import graphopt
from graphopt import cli, data
from graphopt.inspection.html import line_chart
from graphopt.training.callbacks.page import MOST_BINS
from graphopt.training.callbacks.progress import Curve

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
]
RECIPE = ["folder=run", "fit.epochs=4", "clip=global_norm", "executor.threads=1"]


class Tables(html.parser.HTMLParser):
    """Collects the cells of tables, and what a page refers to."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.tags: list[str] = []
        self._cell = False
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.references += [str(x) for name, x in attributes if name in ("src", "href", "xlink:href")]
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        self._cell = tag in ("td", "th")
        if self._cell:
            self.tables[-1][-1].append("")

    def handle_data(self, text: str) -> None:
        if self._cell:
            self.tables[-1][-1][-1] += text

    def handle_endtag(self, tag: str) -> None:
        self._cell = False


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def browsed(path: Path) -> str:
    """Return the page as a browser has it once it is drawn."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    profile = f"--user-data-dir={path.parent.resolve() / 'profile'}"
    command = [CHROMIUM, *QUIET, profile, "--dump-dom", path.resolve().as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


@pytest.mark.slow
def test_the_report_of_a_classifier() -> None:
    assert cli.main(RECIPE) == 0
    text = Path("run/report.html").read_text(encoding="utf-8")
    page = Tables(text)
    assert page.references == [] and "@import" not in text and "script" not in page.tags
    drawn = ("loss, by epoch", "accuracy, by epoch", "loss, by step", "learning rate, by step")
    for title in (*drawn, "gradient norm, by step", "Recipe", "peak memory"):
        assert title in text
    epochs = next(table for table in page.tables if table[0][0] == "epoch")
    with open("run/metrics.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    for name in ("loss", "validation_loss", "accuracy"):
        column = epochs[0].index(name)
        assert [float(row[column]) for row in epochs[1:]] == pytest.approx(
            [x[name] for x in records], rel=1e-5
        )

    matrix = next(table for table in page.tables if table[0][0].startswith("target"))
    arrays = data.digits().arrays
    counts = np.array([[int(x) for x in row[1:]] for row in matrix[1:]])
    held_out = np.random.default_rng(0).permutation(len(arrays["x"]))[: counts.sum()]
    predicted = graphopt.run("run/trained.onnx", {"x": arrays["x"][held_out]})["y"].argmax(-1)
    expected = confusion_matrix(arrays["target"][held_out], predicted)
    assert (counts == expected).all()


@pytest.mark.slow
def test_the_report_of_a_regression() -> None:
    assert cli.main(["experiment=diabetes_regression", "folder=run", "fit.epochs=2"]) == 0
    text = Path("run/report.html").read_text(encoding="utf-8")
    assert "Residuals of target on held-out rows" in text
    assert len(re.findall(r'class="dot', text)) >= 88


@pytest.mark.slow
def test_a_browser_draws_the_report() -> None:
    assert cli.main(RECIPE) == 0
    text = browsed(Path("run/report.html"))
    assert text.count("<svg") == len(re.findall("<figure>", text)) >= 5
    assert "No data" not in text


@pytest.mark.slow
def test_a_resumed_run_s_report_has_the_whole_curve() -> None:
    assert cli.main(RECIPE) == 0
    whole = re.findall(r"loss, by step.*?</svg>", Path("run/report.html").read_text(), re.DOTALL)
    short = ["folder=two", *RECIPE[1:]]
    assert cli.main([*short, "fit.epochs=2"]) == 0
    assert cli.main([*short, "resume=two"]) == 0
    again = re.findall(r"loss, by step.*?</svg>", Path("two/report.html").read_text(), re.DOTALL)
    assert [re.findall(r"<path d=\"([^\"]*)", one) for one in again] == [
        re.findall(r"<path d=\"([^\"]*)", one) for one in whole
    ]


@pytest.mark.slow
def test_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "folder=runs", "optimizer=sgd,adamw", "fit.epochs=3"]
    assert cli.main(sweep) == 0
    capsys.readouterr()
    assert cli.main(["compare", "folder=runs"]) == 0
    said = capsys.readouterr().out
    assert [line.split("│")[2].strip() for line in said.splitlines() if line.startswith("│")] == [
        "sgd",
        "adamw",
    ]
    page = Tables(browsed(Path("runs/compare.html")))
    assert [row[:2] for row in page.tables[0]] == [["run", "optimizer"], ["0", "sgd"], ["1", "adamw"]]
    assert page.tags.count("svg") == 3 and page.references == []


@pytest.mark.slow
def test_nothing_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["compare", "folder=empty"]) == 1
    assert "expected a folder with runs, found none" in capsys.readouterr().err
    assert cli.main(["compare"]) == 1


def test_numbers_that_are_not_finite_leave_gaps() -> None:
    chart = line_chart(
        "t", [1, 2, 3], {"a": [1.0, float("nan"), 3.0], "b": [float("inf"), None, -1.0]}, logarithmic=True
    )
    assert "nan" not in chart.lower() and "inf" not in chart.lower()


def test_a_long_curve_keeps_the_mean() -> None:
    curve, values = Curve(MOST_BINS), np.random.default_rng(0).standard_normal(10_001)
    for step, value in enumerate(values.tolist(), 1):
        curve.add(step, value)
    steps, means = curve.points()
    assert MOST_BINS // 2 <= len(steps) <= MOST_BINS and steps[-1] == 10_001
    counts = [bin[0] for bin in curve.bins]
    assert np.average(means, weights=counts) == pytest.approx(values.mean())


@pytest.mark.slow
def test_the_command_writes_the_page_of_an_interrupted_run() -> None:
    folder = Path("run")
    command = [sys.executable, "-m", "graphopt", *RECIPE, "fit.epochs=100000", "fit.validation=null"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "stopped: SIGTERM" in (folder / "report.html").read_text()

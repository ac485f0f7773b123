"""The pages of runs: self-contained, drawn by a real browser, with the numbers of scikit-learn and NumPy."""

from __future__ import annotations

import base64
import hashlib
import html
import html.parser
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from rich.console import Console
from sklearn.metrics import confusion_matrix

import graphopt
import passes
from graphopt import callbacks, cli, data, models
from graphopt.cli import comparison
from graphopt.cli.messages import print_matrix
from graphopt.inspection.charts import MOST_POINTS, PERCENT, line_chart, scatter_chart
from graphopt.inspection.html import picture
from graphopt.inspection.words import measure_text, percent, readable
from graphopt.training.callbacks import predictions
from graphopt.training.callbacks.page import MOST_BINS
from graphopt.training.callbacks.progress import Curve

CHROMIUM = os.environ.get("CHROMIUM", "/usr/bin/chromium")
QUIET = [
    *("--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking"),
    *("--disable-component-update", "--disable-sync", "--disable-quic"),
]
RECIPE = [
    "fit.epochs=4",
    "clip=global_norm",
    "executor.threads=1",
    "callbacks.learning_rate_finder={steps: 40}",
]


class Tables(html.parser.HTMLParser):
    """Collects the cells of tables, what a page refers to, and its words outside of scripts, styles and code."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.references: list[str] = []
        self.words: list[str] = []
        self._cell, self._skipped = False, 0
        self.feed(text)

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.references += [str(x) for name, x in attributes if name in ("src", "href", "xlink:href")]
        self._skipped += tag in ("script", "style", "pre")
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        if tag in ("td", "th"):
            self._cell = True
            self.tables[-1][-1].append("")

    def handle_data(self, text: str) -> None:
        if not self._skipped:
            self.words.append(text)
        if self._cell:
            self.tables[-1][-1][-1] += text

    def handle_endtag(self, tag: str) -> None:
        self._skipped -= tag in ("script", "style", "pre")
        self._cell = self._cell and tag not in ("td", "th")


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def classifier(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a run on digits."""
    folder = tmp_path_factory.mktemp("classifier") / "run"
    assert cli.main([*RECIPE, f"folder={folder}"]) == 0
    return folder


def page_of(folder: Path) -> str:
    return (folder / "report.html").read_text(encoding="utf-8")


def browsed(text: str) -> str:
    """Return a page as a browser has it once it is drawn."""
    if not Path(CHROMIUM).exists():
        pytest.skip(f"needs Chromium at {CHROMIUM}")
    path = Path("browsed.html").resolve()
    path.write_text(text, encoding="utf-8")
    command = [CHROMIUM, *QUIET, f"--user-data-dir={path.parent / 'profile'}", "--dump-dom", path.as_uri()]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout


def framed(text: str, width: int) -> str:
    """Return a page that shows another one in a frame; its title says how wide that is, and how many charts point."""
    watch = (
        "onload=() => { const page = document.querySelector('iframe').contentDocument;"
        "document.title = page.documentElement.scrollWidth + ' ' + page.querySelectorAll('.rule').length }"
    )
    frame = f'<iframe width="{width}" height="3000" style="border:0" srcdoc="{html.escape(text)}"></iframe>'
    return f"{frame}<script>{watch}</script>"


@pytest.mark.slow
def test_the_report_of_a_classifier(classifier: Path) -> None:
    text = page_of(classifier)
    page = Tables(text)
    assert all(address.startswith("data:image/png;base64,") for address in page.references)
    assert "@import" not in text and "http://" not in text and "https://" not in text and len(text) < 300_000
    titles = re.findall(r"<figcaption><b>(.*?)</b> <span>(.*?)</span>", text)
    drawn = [f"{title} {about.partition(',')[0]}" for title, about in titles]
    names = ["Loss", "Gradient norm", "Accuracy"]
    by_step = ["Loss by step", "Gradient norm by step"]
    assert drawn[:-2] == [*(f"{name} by epoch" for name in names), *by_step]
    assert drawn[-2:] == ["Learning rate finder by learning rate", "Samples/s by epoch"]
    with open(classifier / "metrics.jsonl", encoding="utf-8") as file:
        records = [json.loads(line) for line in file]
    epochs = next(table for table in page.tables if table[0][0] == "epoch")
    for name in ("loss", "validation_loss", "accuracy"):
        column = epochs[0].index(name.replace("_", " "))
        assert [row[column] for row in epochs[1:]] == [measure_text(name, x[name]) for x in records]
    best = min(records, key=lambda record: record["validation_loss"])["epoch"]
    assert [row[0] for row in epochs[1:] if "best" in row[0]] == [f"{best} best"]

    matrix = next(table for table in page.tables if table[0][0] == "target")
    counts = np.array([[int(x) for x in row[1:-1]] for row in matrix[1:]])
    held_out, scores, target = evaluated(classifier)
    expected = confusion_matrix(target, scores.argmax(-1))
    assert (counts == expected).all() and counts.sum() == len(held_out)
    assert [row[-1] for row in matrix[1:]] == [
        percent(x) for x in (expected.diagonal() / expected.sum(axis=1)).tolist()
    ]


def evaluated(folder: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the numbers of the held-out rows of digits, the outputs on them, and the targets."""
    arrays = data.digits().arrays
    held_out = np.random.default_rng(0).permutation(len(arrays["x"]))[:360]
    outputs = graphopt.run(folder / "trained.onnx", {"x": arrays["x"][held_out]})["y"]
    return held_out, outputs, np.asarray(arrays["target"])[held_out]


@pytest.mark.slow
def test_the_result_comes_first(classifier: Path) -> None:
    text = page_of(classifier)
    sections = re.findall(r"<h2>(.*?)</h2>", text)
    assert sections[:2] == ["Result", "Curves"]
    result = text[text.index("<h2>Result") : text.index("<h2>Curves")]
    shown = dict(re.findall(r"<dt>(.*?)</dt><dd>(.*?)</dd>", result))
    records = map(json.loads, (classifier / "metrics.jsonl").read_text().splitlines())
    best = min(records, key=lambda record: record["validation_loss"])  # whose weights trained.onnx has
    assert next(iter(shown)) == "accuracy" and shown["accuracy"] == percent(best["accuracy"])
    assert shown["validation loss"] == readable(best["validation_loss"])
    assert shown["best epoch"] == f"{best['epoch']} of 4"
    assert shown["seed"] == "0" and shown["rows"] == "1,437 to train on, 360 held out"
    assert shown["parameters"] == "17,226" and shown["device"] == "CPU, 1 thread"
    assert re.fullmatch(r"\d+ \w+ 20\d\d, \d\d:\d\d", shown["date"])


@pytest.mark.slow
def test_words_and_numbers_are_for_people(classifier: Path) -> None:
    text = page_of(classifier)
    read = " ".join(Tables(text[: text.index("<h2>Training graph")]).words)
    assert not re.findall(r"\b[a-z]+_[a-z_]+\b", read)  # names as programs have them
    assert not re.findall(r"\de[+-]?\d", read)  # 3.6e+04
    assert not re.findall(r"\d\.\d{7,}", read)
    labels = re.findall(r'role="img" aria-label="(.*?)"', text)
    assert labels and all(re.search(r"from [\d.,]+.* to [\d.,]+", label) for label in labels)
    assert text.startswith("<!doctype html>") and '<html lang="en">' in text


@pytest.mark.slow
def test_the_page_runs_its_own_script_alone(classifier: Path) -> None:
    text = page_of(classifier)
    policy = re.search(r'http-equiv="Content-Security-Policy" content="(.*?)"', text)
    scripts = re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL)
    assert policy and len(scripts) == 1
    digest = base64.b64encode(hashlib.sha256(scripts[0].encode()).digest()).decode()
    assert f"script-src 'sha256-{digest}'" in policy[1] and "default-src 'none'" in policy[1]


@pytest.mark.slow
def test_rows_most_in_error_are_those_of_numpy(classifier: Path) -> None:
    text = page_of(classifier)
    shown = re.findall(
        r'<img src="data:image/png;base64,(.*?)".*?<b>(.*?)</b><span>(.*?)</span><span>(.*?)</span><span>row (\d+)<',
        text,
    )
    held_out, scores, target = evaluated(classifier)
    scores = scores.astype(np.float64)
    log_p = scores - np.log(np.exp(scores).sum(axis=1, keepdims=True))
    losses = -log_p[np.arange(len(target)), target]
    places = {row: place for place, row in enumerate(held_out.tolist())}
    worst = [places[int(row)] for *_, row in shown]
    assert len(set(worst)) == 12
    np.testing.assert_allclose(losses[worst], np.sort(losses)[::-1][:12], rtol=1e-5)
    for (content, name, said, sure, row), i in zip(shown, worst, strict=True):
        predicted = scores[i].argmax()
        assert name == str(target[i])
        assert said == ("right" if predicted == target[i] else f"taken for {predicted}")
        assert sure == f"{percent(float(np.exp(log_p[i].max())))} sure"
        pixels = np.asarray(Image.open(io.BytesIO(base64.b64decode(content))), np.float64)
        image = np.asarray(data.digits().arrays["x"])[int(row), 0]
        assert np.corrcoef(pixels.ravel(), image.ravel())[0, 1] > 0.9999


@pytest.mark.slow
def test_the_learning_rate_finder_shows_its_curve(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*RECIPE, "folder=run"]) == 0
    said = re.findall(r"^rate      ([\d.e+-]+), at which", capsys.readouterr().out, re.MULTILINE)
    text = page_of(Path("run"))
    chart = text[text.index("<b>Learning rate finder") :]
    assert len(said) == 1 and re.search(r">chosen: ([\d.]+)<", chart)[1] == readable(float(said[0]), 3)  # type: ignore[index]


@pytest.mark.slow
def test_a_rate_is_found_before_the_loss_explodes() -> None:
    digits = data.digits()
    for model, optimizer, clip in (
        (models.cnn((1, 8, 8), 10), passes.SGD(0.1), None),  # noise of the first losses is not a fall
        (
            models.mlp((1, 8, 8), 10),
            passes.AdamW(),
            passes.ClipGlobalNorm(),
        ),  # a loss that has exploded falls again
    ):
        finder = callbacks.LearningRateFinder()
        step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=optimizer, clip=clip)
        graphopt.fit(graphopt.Executor(step, threads=1), digits, epochs=1, callbacks=[finder])
        least = finder.rates[int(np.argmin(finder.losses))]
        assert finder.suggestion is not None and least / 100 < finder.suggestion <= 2 * least


@pytest.mark.slow
def test_the_report_of_a_regression() -> None:
    assert cli.main(["experiment=diabetes_regression", "folder=run", "fit.epochs=2"]) == 0
    text = page_of(Path("run"))
    assert "Predictions on 89 held-out rows" in text
    dots = re.findall(r'class="dots c1" d="(.*?)"', text)
    assert [path.count("M") for path in dots] == [89, 89]
    table = next(table for table in Tables(text).tables if table[0][:2] == ["row", "target"])
    errors = [abs(float(row[1].replace(",", "")) - float(row[2].replace(",", ""))) for row in table[1:]]
    shown = [float(row[3]) for row in table[1:]]
    assert shown == sorted(shown, reverse=True) and np.allclose(errors, shown, rtol=2e-2)
    assert table[0][3] == "error" and len(table) == 13


@pytest.mark.slow
def test_names_of_classes_and_hostile_ones() -> None:
    random = np.random.default_rng(0)
    names = ["cats & dogs", "<script>alert(1)</script>", "snake_case"]
    for number, name in enumerate(names):
        folder = Path("pictures", name.replace("/", "\N{DIVISION SLASH}"))
        folder.mkdir(parents=True)
        for i in range(12):
            pixels = random.integers(0, 60, (8, 8, 3)) + 60 * number
            Image.fromarray(pixels.astype(np.uint8)).save(folder / f"{i}.png")
    assert (
        cli.main(
            [
                "data=images",
                "data.path=pictures",
                "data.size=[8,8]",
                "model=cnn",
                "fit.epochs=2",
                "folder=run",
            ]
        )
        == 0
    )
    text = page_of(Path("run"))
    shown = sorted(name.replace("/", "\N{DIVISION SLASH}") for name in names)
    matrix = next(table for table in Tables(text).tables if table[0][0] == "target")
    assert set(matrix[0][1:-1]) <= set(shown) and [row[0] for row in matrix[1:]] == matrix[0][1:-1]
    assert text.count("<script") == 1 and "<script>alert" not in browsed(text)


@pytest.mark.slow
def test_a_browser_draws_the_report(classifier: Path) -> None:
    text = page_of(classifier)
    drawn = browsed(text)
    assert drawn.count("<svg") == drawn.count("<figcaption>") - drawn.count("<img") >= 6


@pytest.mark.slow
@pytest.mark.parametrize("width", [390, 800, 1240])
def test_pages_fit_a_phone(classifier: Path, width: int) -> None:
    said = re.search(r"<title>(\d+) (\d+)</title>", browsed(framed(page_of(classifier), width)))
    assert said and int(said[1]) <= width
    assert int(said[2]) == page_of(classifier).count("data-chart=")  # the policy lets the script run


@pytest.mark.slow
def test_a_pointer_shows_numbers(classifier: Path) -> None:
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", page_of(classifier))
    point = (
        "const plot = document.querySelector('[data-chart]'), box = plot.getBoundingClientRect();"
        "plot.dispatchEvent(new PointerEvent('pointermove', {clientX: box.left + 0.65 * box.width}))"
    )
    drawn = browsed(text.replace("</body>", f'<script type="module">{point}</script></body>'))
    tip = html.unescape(re.sub("<.*?>", " ", re.search(r'<div class="tip".*?</div>', drawn)[0]))  # type: ignore[index]
    record = json.loads((classifier / "metrics.jsonl").read_text().splitlines()[2])
    assert tip.split() == [
        *("epoch", "3", "loss", readable(record["loss"])),
        *("validation", "loss", readable(record["validation_loss"])),
    ]


@pytest.mark.slow
def test_a_resumed_run_s_report_has_the_whole_curve() -> None:
    recipe = ["fit.epochs=4", "clip=global_norm", "executor.threads=1"]

    def curve(folder: str) -> list[str]:
        charts = re.findall(r"<b>Loss</b> <span>by step.*?</svg>", page_of(Path(folder)), re.DOTALL)
        return re.findall(r'<path class="line.*? d="([^"]*)', charts[0])

    assert cli.main([*recipe, "folder=run"]) == 0
    assert cli.main([*recipe, "folder=two", "fit.epochs=2"]) == 0
    assert cli.main([*recipe, "folder=two", "resume=two"]) == 0
    assert curve("two") == curve("run")


@pytest.mark.slow
def test_runs_side_by_side(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "folder=runs", "optimizer=sgd,adamw", "fit.epochs=3"]
    assert cli.main(sweep) == 0
    told = capsys.readouterr().out
    assert cli.main(["compare", "folder=runs"]) == 0
    said = capsys.readouterr().out
    assert told.endswith(said)
    assert re.findall(r"^ (\d)\s+(best)?\s+(\w+)", said, re.MULTILINE) == [
        ("1", "best", "adamw"),
        ("0", "", "sgd"),
    ]
    page = Tables(browsed(Path("runs/compare.html").read_text()))
    assert [row[:2] for row in page.tables[0]] == [["run", "optimizer"], ["1 best", "adamw"], ["0", "sgd"]]
    assert page.references == ["1/report.html", "0/report.html"]


def written_run(number: int, overrides: list[str], losses: list[float | None], **result: Any) -> None:
    """Write what a run of a sweep leaves."""
    folder = Path(f"sweep/{number}")
    (folder / ".hydra").mkdir(parents=True)
    (folder / ".hydra/overrides.yaml").write_text(yaml.safe_dump(overrides))
    choices = {"runtime": {"choices": {"optimizer": "adamw"}}, "mode": "MULTIRUN"}
    (folder / ".hydra/hydra.yaml").write_text(yaml.safe_dump({"hydra": choices}))
    (folder / "config.yaml").write_text(yaml.safe_dump({"fit": {"batch_size": 32}}))
    records = [
        {"epoch": i, "step": i, "loss": 2.0, "validation_loss": x, "accuracy": 0.5, "seconds": 1.0}
        for i, x in enumerate(losses, 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(f"{json.dumps(record)}\n" for record in records) + '{"epoch": 9')
    if result:
        (folder / "result.json").write_text(json.dumps(result))


@pytest.fixture
def sweep() -> None:
    written_run(0, ["optimizer=sgd"], [3.0, 1.0], value=1.0)
    written_run(1, ["fit.batch_size=8"], [2.0, 0.5, 0.75], value=0.5)  # the weights of its second epoch
    written_run(2, ["fit.batch_size=16"], [0.5], value=0.5)
    written_run(3, ["fit.batch_size=1"], [0.1, None], value=None)
    written_run(4, ["fit.batch_size=2"], [])
    written_run(5, ["fit.batch_size=4"], [0.6])


def test_the_best_run_comes_first(sweep: None, capsys: pytest.CaptureFixture[str]) -> None:
    comparison.say_compared("sweep")
    said = capsys.readouterr().out
    rows = [line.split("  ") for line in said.splitlines() if re.match(r" \d", line)]
    cells = [[cell.strip() for cell in row if cell.strip()] for row in rows]
    assert [row[:-4] for row in cells] == [
        ["1", "best", "adamw", "8"],
        ["2", "best", "adamw", "16"],
        ["5", "unfinished", "adamw", "4"],
        ["0", "sgd", "32"],
        ["3", "not finite", "adamw", "1"],
        ["4", "failed", "adamw", "2"],
    ]
    assert cells[0][-4:] == ["0.5", "0.5", "2", "2"] and cells[-1][-4:] == ["-"] * 4
    assert said.startswith("sweep: 6 runs, best by validation loss\n") and "written   sweep/compare.html" in said
    page = Tables(Path("sweep/compare.html").read_text())
    assert [row[0] for row in page.tables[0][1:]] == [" ".join(row[: len(row) - 6]) for row in cells]


@pytest.mark.parametrize("width", [20, 40, 60, 80, 120])
def test_tables_fit_a_terminal(sweep: None, width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=width, color_system=None)
    monkeypatch.setattr(comparison, "open_console", lambda: console)
    comparison.say_compared("sweep")
    names = [f"class {i}" for i in range(12)]
    counts = np.diag(np.arange(1000, 13000, 1000))
    counts[3, 4] = 12345
    print_matrix(console, "confusion matrix", names, counts.tolist())
    said = console.file.getvalue()  # type: ignore[attr-defined]
    lines = said.splitlines()
    assert "…" not in said and "12345" in said.replace(",", "")
    assert all(len(line) <= width or " " not in line.strip() for line in lines)
    assert said.index("best") < said.index("not finite")


def test_runs_with_different_losses_are_ranked_by_a_metric(capsys: pytest.CaptureFixture[str]) -> None:
    written_run(0, ["loss=hinge"], [0.1], value=0.1)
    written_run(1, ["loss=cross_entropy"], [0.2], value=0.2)
    comparison.compare("sweep")
    said = capsys.readouterr().out
    assert "best by accuracy" in said and said.count("best") == 3  # the title, and both: their accuracies are equal


def test_runs_are_ranked_by_the_measure_that_chose_their_epochs(capsys: pytest.CaptureFixture[str]) -> None:
    for number, (loss, accuracy) in enumerate([(0.1, 0.9), (0.2, 0.93)]):
        written_run(number, [f"fit.seed={number}"], [loss], value=loss)
        metrics = Path(f"sweep/{number}/metrics.jsonl")
        metrics.write_text(metrics.read_text().replace('"accuracy": 0.5', f'"accuracy": {accuracy}'))
    comparison.compare("sweep")
    said = capsys.readouterr().out
    assert said.startswith("sweep: 2 runs, best by validation loss\n") and "0  best" in said
    other = "y accuracy, run 1 is the best: 93.00 %, where run 0 has 90.00 %"
    page = Path("sweep/compare.html").read_text().replace("\N{NO-BREAK SPACE}", " ")
    assert f"b{other}" in said and f"B{other}." in page
    for number in (0, 1):
        Path(f"sweep/{number}/config.yaml").write_text("fit: {checkpoint: {best: accuracy}}\n")
    comparison.compare("sweep")
    said = capsys.readouterr().out
    assert said.startswith("sweep: 2 runs, best by accuracy\n") and "1  best" in said


def test_a_comparison_says_which_option_mattered(capsys: pytest.CaptureFixture[str]) -> None:
    rates = [3.162277660168379e-4, 1e-3, 3e-3, 0.01, 0.031622776601683794, 0.1]
    for number, rate in enumerate(rates):
        kind, loss = ("adamw", "sgd")[number % 2], float(number < 3) + 0.25 * (number % 2)
        options = [f"optimizer={kind}", f"optimizer.learning_rate={rate}"]
        written_run(number, options, [loss], value=loss)
    comparison.compare("sweep")
    said = capsys.readouterr().out
    assert "mattered most: validation loss 0.1667 on average with above 0.003, 1.083 with up to 0.003" in said
    assert "0.0003162" in said and "0.00031622" not in said
    table = Tables(Path("sweep/compare.html").read_text()).tables[1]
    assert [row[0] for row in table] == ["option", "learning rate", "optimizer"]
    assert table[2][1:] == ["sgd", "0.5833", "adamw", "0.6667"]


@pytest.mark.slow
def test_columns_of_a_comparison_are_sorted_by_their_heads(sweep: None) -> None:
    comparison.compare("sweep")
    text = re.sub(r'<meta http-equiv="Content-Security-Policy".*?>', "", Path("sweep/compare.html").read_text())
    press = "const head = document.querySelectorAll('thead button')[2]; head.focus(); head.click()"
    for script, sizes in ((press, [1, 2, 4, 8, 16, 32]), (f"{press}; head.click()", [32, 16, 8, 4, 2, 1])):
        drawn = browsed(text.replace("</body>", f'<script type="module">{script}</script></body>'))
        assert [int(row[2]) for row in Tables(drawn).tables[0][1:]] == sizes
        assert len(re.findall(r"<th[^>]* aria-sort=", drawn)) == 1


def test_folders_that_train_nothing_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    written_run(0, ["optimizer=sgd"], [1.0], value=1.0)
    written_run(1, ["run=report"], [])
    Path("sweep/1/config.yaml").write_text("run: report\n")
    comparison.compare("sweep")
    assert capsys.readouterr().out.startswith("sweep: 1 run, best by validation loss")


def test_a_run_of_another_cannot_fill_the_memory_of_a_comparison(capsys: pytest.CaptureFixture[str]) -> None:
    written_run(0, ["optimizer=sgd"], [1.0], value=1.0)
    written_run(1, ["fit.seed=1"], [2.0], value=2.0)
    lists = "\n".join(f"a{i}: &a{i} [{', '.join([f'*a{i - 1}'] * 9)}]" for i in range(1, 30))
    Path("sweep/0/config.yaml").write_text(f"a0: &a0 [1]\n{lists}\nfit: {{seed: *a29}}\n")
    comparison.compare("sweep")
    said = capsys.readouterr().out
    assert "sweep: 2 runs" in said and len(said) < 2_000


@pytest.mark.slow
def test_a_sweep_with_a_failed_job_shows_the_others(capsys: pytest.CaptureFixture[str]) -> None:
    sweep = ["-m", "folder=runs", "optimizer.learning_rate=-1,0.01", "fit.epochs=1", "quiet=true"]
    assert cli.main(sweep) == 1
    said = capsys.readouterr()
    assert re.search(r"^ 1  best .*\n 0  failed   -1", said.out, re.MULTILINE)
    assert "written   runs/compare.html" in said.out
    assert said.err.splitlines()[-1].startswith("graphopt: error: AdamW(learning_rate=-1)")
    # The job's recipe may be one that was refused: nothing vouches for it.
    assert json.loads(Path("runs/0/.hydra/signature.json").read_text())["hmac"] is None
    assert json.loads(Path("runs/1/.hydra/signature.json").read_text())["hmac"]


def test_numbers_that_are_not_finite_leave_gaps() -> None:
    chart = line_chart(
        "t", [1, 2, 3], {"a": [1.0, float("nan"), 3.0], "b": [float("inf"), None, -1.0]}, logarithmic=True
    )
    assert "nan" not in chart.lower() and "inf" not in chart.lower()


NUMBERS = [
    0.0,
    1.0,
    -1.0,
    5e-324,
    1e308,
    -1e308,
    3.4e38,
    float("nan"),
    float("inf"),
    1 + 2e-16,
    1e15 + 0.5,
    None,
]


def test_charts_hold_for_all_numbers() -> None:
    random = np.random.default_rng(0)
    for _ in range(300):
        y = [NUMBERS[i] for i in random.integers(len(NUMBERS), size=random.integers(6))]
        y += (10.0 ** random.uniform(-300, 300, random.integers(3))).tolist()
        chart = line_chart("t", [*range(1, len(y) + 1)], {"y": y}, logarithmic=bool(random.integers(2)))
        places = re.findall(r"[ML]([\d.]+) ([\d.e+-]+)", chart)
        assert all(0 <= float(a) <= 1000 and 0 <= float(b) <= 1000 for a, b in places)
        scatter_chart("t", [(a or 0.0, b or 0.0) for a, b in zip(y, y[::-1], strict=True)], "x", "y", through="y = x")
    assert line_chart("t", range(9999), {"y": [1.0] * 9999}).count("L") <= MOST_POINTS


def test_ticks_are_round_numbers() -> None:
    def ticks(low: float, high: float) -> list[str]:
        chart = line_chart("t", [1, 2], {"y": [low, high]}, logarithmic=True)
        return re.findall(r'class="y".*?>(.*?)<', chart)

    def share_ticks(share: float) -> list[str]:
        chart = line_chart("t", [1, 2], {"y": [share, share]}, unit=PERCENT)
        return re.findall(r'class="y".*?>(.*?)<', chart)

    assert share_ticks(100.0) == share_ticks(0.0) == ["0 %", "20 %", "40 %", "60 %", "80 %", "100 %"]
    assert ticks(0.027, 1.76) == ["0.02", "0.05", "0.1", "0.2", "0.5", "1", "2"]
    assert ticks(36_000, 250_000) == ["0", "50,000", "100,000", "150,000", "200,000", "250,000"]
    assert ticks(0.001, 0.001) == ["0.0000", "0.0005", "0.0010", "0.0015"]
    assert ticks(1e-9, 10) == ["10⁻⁹", "10⁻⁷", "10⁻⁵", "0.001", "0.1", "10"]


@pytest.mark.parametrize(
    ("number", "text"),
    [
        *(
            (0.070561, "0.07056"),
            (3450.4, "3,450"),
            (36_000.0, "36,000"),
            (0.5, "0.5"),
            (12, "12"),
            (-0.25, "-0.25"),
        ),
        *(
            (1e-5, "10⁻⁵"),
            (-3.2e-7, "-3.2 \N{MULTIPLICATION SIGN} 10⁻⁷"),
            (0.0, "0"),
            (999.999, "1,000"),
            (5e-324, "4.941 \N{MULTIPLICATION SIGN} 10⁻³²⁴"),
        ),
        *((float("nan"), "not a number"), (float("inf"), "∞"), (None, "not a number")),
    ],
)
def test_numbers_are_readable(number: float | None, text: str) -> None:
    assert readable(number) == text


def test_only_all_is_a_hundred_percent() -> None:
    shares = (0.0, 1e-9, 0.5, 0.98056, 0.9996, 1 - 1e-9, 1.0)
    assert [percent(x).replace("\N{NO-BREAK SPACE}", " ") for x in shares] == [
        *("0 %", "0.001 %", "50.0 %", "98.1 %", "99.960 %", "99.999 %", "100 %")
    ]


@pytest.mark.parametrize("shape", [(8, 8, 1), (4, 300, 3), (300, 5, 1), (64, 64, 3), (65, 1, 3)])
def test_pictures_are_png(shape: tuple[int, int, int]) -> None:
    pixels = np.random.default_rng(0).random(shape)
    content = base64.b64decode(picture(pixels).partition(",")[2])
    image = np.asarray(Image.open(io.BytesIO(content)), np.float64) / 255
    assert max(image.shape) <= 64 and image.shape[2:] == (() if shape[2] == 1 else (3,))
    assert abs(image.mean() - pixels.mean()) < 0.05
    if max(shape) <= 64:
        assert np.abs(image.reshape(shape) - pixels).max() <= 0.5 / 255 + 1e-9


def test_a_long_validation_is_read_in_part(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(predictions, "MOST_ROWS", 64)
    step = graphopt.compile(models.mlp((1, 8, 8), 10), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    runs: list[graphopt.Run] = []

    class Keep(graphopt.Callback):
        def on_fit_end(self, run: graphopt.Run) -> None:
            runs.append(run)

    graphopt.fit(graphopt.Executor(step, threads=1), data.digits(), epochs=1, callbacks=[Keep()])
    matrix, worst = predictions.predictions(runs[0])
    counts = Tables(matrix).tables[0][1:]
    assert sum(int(x) for row in counts for x in row[1:-1]) == 64
    assert "The 12 of the first 64 of 360 held-out rows" in worst


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
    command = [sys.executable, "-m", "graphopt", "folder=run", "fit.epochs=100000", "fit.validation=null"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    while not (folder / "metrics.jsonl").exists() or not (folder / "metrics.jsonl").stat().st_size:
        assert process.poll() is None, process.communicate()
        time.sleep(0.02)
    process.send_signal(signal.SIGTERM)
    process.communicate(timeout=60)
    assert "stopped: SIGTERM" in (folder / "report.html").read_text()

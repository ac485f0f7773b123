"""Every code block of the README and of the guides runs, long ones for fewer epochs: each page is one program."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import pytest
import yaml
from adapter import ADAPTER, LIBRARIES, missing
from environments import environment
from test_architecture import FLOORS

import graphopt
from graphopt import compiler
from graphopt.cli.help import described

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "examples/guides").glob("*.md"))]
DECISIONS = sorted((ROOT / "examples/guides/decisions").glob("*.md"))
INSTALLS = "python -m venv"  # blocks that install graphopt; CI's jobs do that
# Packages of pages and of commands that only the environment of the extras `federated` and `cluster` has.
NEEDS = {"federated": ("flwr", "ray"), "sweep=ray": ("hydra_plugins.hydra_ray_launcher",)}
SHORTER = {"data", "fine_tune", "language_models", "prune"}  # pages most of whose seconds are epochs
NOT_RUN = {"csharp", "rust", "swift"}  # as the page says


def blocks(page: Path, language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    return [
        line
        for block in blocks(page, "sh")
        if INSTALLS not in block
        for line in block.replace("\\\n", " ").splitlines()
        if line.strip()
    ]


def lacking(text: str) -> list[str]:
    """Return the packages of a page or a command that the environment lacks."""
    needed = [package for name, packages in NEEDS.items() if name in text for package in packages]
    return [package for package in needed if not _is_there(package)]


def _is_there(package: str) -> bool:
    try:
        return importlib.util.find_spec(package) is not None
    except ModuleNotFoundError:  # of the package around it
        return False


def requirements(page: Path) -> list[str]:
    """Return what the reader of a page has installed: by the README's first command, and what the page names."""
    text = page.read_text()
    named = re.findall(r'pip install "([^"]+)"', text)
    extras = re.findall(r"extras? ((?:`[\w-]+`(?:, | and )?)+)", text)
    extras = [extra for group in extras for extra in re.findall(r"`([\w-]+)`", group)]
    is_cpu = any(name == "onnxruntime" for name in metadata.packages_distributions()["onnxruntime"])
    own = ",".join(["cpu" if is_cpu else "training", "sklearn", *extras])
    return [f"graphopt[{own}]", *(name.replace(".[", "graphopt[") for name in named)]


Run = Callable[[Path, str, Path], str]


@pytest.fixture(scope="module")
def run_on(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Return a function that runs a program in a folder with only the packages of a page, and returns its output."""
    pythons: dict[tuple[str, ...], Path] = {}

    def run(page: Path, program: str, folder: Path) -> str:
        needed = tuple(requirements(page))
        if needed not in pythons:
            pythons[needed] = environment(tmp_path_factory.mktemp("environment"), [*needed])
        path = tmp_path_factory.mktemp("program") / "page.py"  # not beside what the page's commands read
        path.write_text(program)
        binaries = f"{pythons[needed].parent}{os.pathsep}{os.environ['PATH']}"
        left_out = ("PYTHONPATH", "VIRTUAL_ENV")
        own = {name: value for name, value in os.environ.items() if name not in left_out}
        if page.stem == "gpu":
            own |= {**ADAPTER, "LD_LIBRARY_PATH": LIBRARIES}
        done = subprocess.run(
            [pythons[needed], path], cwd=folder, env={**own, "PATH": binaries}, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


@pytest.fixture(scope="module")
def folder_of(tmp_path_factory: pytest.TempPathFactory, run_on: Run) -> Callable[[Path], Path]:
    """Return a function that runs a page's Python blocks, once, as one program, and returns the folder it ran in.

    Pages of `SHORTER` train for at most 3 epochs at a time.
    """
    folders: dict[Path, Path] = {}

    def run(page: Path) -> Path:
        if page not in folders:
            if packages := lacking(page.stem):
                pytest.skip(f"expects {', '.join(packages)}")
            if page.stem == "gpu" and (reason := missing()):
                pytest.skip(reason)
            folder = tmp_path_factory.mktemp(page.stem)
            program = "\n".join(blocks(page, "python"))
            if page.stem in SHORTER:
                program = re.sub(r"\bepochs=(\d+)", lambda found: f"epochs={min(int(found[1]), 3)}", program)
            printed = run_on(page, program, folder)
            (folder / "printed.txt").write_text(printed)
            folders[page] = folder
        return folders[page]

    return run


def test_the_first_example_prints_what_the_page_says(folder_of: Callable[[Path], Path]) -> None:
    folder = folder_of(ROOT / "README.md")
    assert {"my.onnx", "step.onnx", "trained.onnx"} <= set(os.listdir(folder))
    printed = (folder / "printed.txt").read_text()
    loss, accuracy = map(float, re.findall(r"\d\.\d+", printed))
    said = map(float, re.findall(r"prints `loss (\d\.\d+), accuracy (\d\.\d+)`", (ROOT / "README.md").read_text())[0])
    assert (loss, accuracy) == pytest.approx(tuple(said), abs=0.015)


# Runs commands in one process, since starting one takes longer than most of them.
RUN_COMMANDS = """
import sys
from graphopt import cli
for command, searches_here in {commands!r}:
    sys.path[:0] = [""] if searches_here else []
    if cli.main(command) != 0:
        sys.exit(f"{{command}}")
    del sys.path[:searches_here]
"""


@pytest.mark.parametrize("page", [x for x in PAGES if blocks(x, "python") or commands(x)], ids=lambda page: page.stem)
@pytest.mark.slow
def test_a_page_runs(page: Path, folder_of: Callable[[Path], Path], run_on: Run) -> None:
    """The commands run in their order after the Python, as they read what it and others write, for at most 6 epochs."""
    folder, left_out, run = folder_of(page), [], []
    for command in commands(page):
        searches_here = command.startswith("python -m ")
        program, *arguments = shlex.split(command.removeprefix("python -m "), comments=True)
        assert program == "graphopt"
        if arguments == ["serve"]:  # until Ctrl-C: tests/test_serve.py
            continue
        if lacking(command):
            left_out.append(command)
            continue
        shorter = [] if {"--help", "doctor"} & {*arguments} or "fit.epochs" in command else ["fit.epochs=1"]
        arguments = [re.sub(r"^fit\.epochs=\d\d+$", "fit.epochs=6", argument) for argument in arguments]
        run.append(([*arguments, *shorter], searches_here))
    if run:
        run_on(page, RUN_COMMANDS.format(commands=run), folder)
    if left_out:
        pytest.skip(f"the environment lacks packages of {left_out}; all other commands ran")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_block_is_run(page: Path) -> None:
    languages = re.findall(r"^```(\w*)\n.*?^```", page.read_text(), re.DOTALL | re.MULTILINE)
    elsewhere = {"other_languages": NOT_RUN, "command_line": {"yaml"}}  # a recipe, which test_schema.py runs
    assert set(languages) <= {"python", "sh", "mermaid"} | elsewhere.get(page.stem, set())


def test_there_is_a_page_for_each_kind_of_user() -> None:
    index = (ROOT / "examples/guides/README.md").read_text()
    assert all(f"({page.name})" in index for page in PAGES if page.name != "README.md")
    assert sum(len(commands(page)) for page in PAGES) >= 10


def anchors(page: Path) -> set[str]:
    """Return the names under which GitHub links to the headings of a page."""
    headings = re.findall(r"^#+ (.*)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize(
    "page",
    [*PAGES, *DECISIONS, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"],
    ids=lambda page: page.stem,
)
def test_links_lead_somewhere(page: Path) -> None:
    for link in re.findall(r"\]\(([^)]+)\)", page.read_text()):
        if not link.startswith("https://"):
            path, _, anchor = link.partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.exists(), link
            assert not anchor or anchor in anchors(target), link


def test_contributing_has_the_floors_of_the_architecture_test() -> None:
    floors: list[set[str]] = [set() for _ in FLOORS]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    for floor, rooms in re.findall(r"^\| (\d+) \| (.*?) \|", text, re.MULTILINE):
        floors[int(floor)].update(re.findall(r"`(\w+)`", rooms))
    assert floors == FLOORS


def test_named_tests_and_programs_are_there() -> None:
    for page in [*PAGES, *DECISIONS, ROOT / "CONTRIBUTING.md"]:
        for name in re.findall(r"\b(?:tests|examples|passes|graphopt|recipes)/[\w/]+\.\w+", page.read_text()):
            assert (ROOT / name).exists(), f"{page.name}: {name}"


def test_decisions_have_four_sections_and_a_line_in_the_index() -> None:
    index, *notes = sorted(DECISIONS, key=lambda page: page.name != "README.md")
    assert "examples/guides/decisions/README.md" in (ROOT / "CONTRIBUTING.md").read_text()
    for page in notes:
        text = page.read_text()
        sections = ["Context", "Decision", "What was tried", "Consequences"]
        assert re.findall(r"^## (.*)$", text, re.MULTILINE) == sections, page.name
        assert f"- [{text.splitlines()[0][2:]}]({page.name})" in index.read_text()
        assert len(text.splitlines()) <= 60 and max(map(len, text.splitlines())) <= 150, page.name


def test_hooks_run_what_contributing_says() -> None:
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text())["repos"][0]["hooks"]
    text = (ROOT / "CONTRIBUTING.md").read_text()
    assert [hook["entry"].split("/")[-1] for hook in hooks] == ["ruff format", "ruff check", "mypy"]
    for hook in hooks:
        assert hook["language"] == "system" and hook["entry"] in text


def test_the_table_of_passes_is_the_docstring_of_compile() -> None:
    """UPDATE_GUIDES=1 rewrites the table."""
    steps = described(graphopt.compile)
    del steps["model"], steps["rules"]
    assert list(steps) == list(compiler.STANDARD)
    by_default = {name for name, text in steps.items() if re.search(r"`passes\.\w+\([^)]*\)` by default", text)}
    assert by_default == set(compiler.standard())
    rows = ["| step | what it does |", "|---|---|", *(f"| {name} | {text} |" for name, text in steps.items())]
    page = ROOT / "examples/guides/passes.md"
    table = "".join(f"{row}\n" for row in rows)
    expected = re.sub(r"(?:^\|.*\n)+", lambda _: table, page.read_text(), count=1, flags=re.MULTILINE)
    if os.environ.get("UPDATE_GUIDES"):
        page.write_text(expected)
    assert page.read_text() == expected, "run: UPDATE_GUIDES=1 pytest tests/test_readme.py"

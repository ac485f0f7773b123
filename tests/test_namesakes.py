"""A module of another project that has the name of the package `passes` is named in one line, wherever it hides it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMPILE = "from graphopt import models\ngraphopt.grad(models.mlp((3,), 1), ['x'])\n"
FIT = "import numpy\nx = numpy.ones((20, 3), numpy.float32)\ngraphopt.{}.fit(x, x[:, {}])\n"
SCRIPTS = {
    "compile": f"import graphopt\n{COMPILE}",
    "their own first": f"import passes\nimport graphopt\n{COMPILE}",
    "ours": "import graphopt\nimport passes\npasses.SGD(0.1)\n",
    "trainer": f"import graphopt\nfrom graphopt import models\n{FIT.format('Trainer(models.mlp((3,), 1))', ':1')}",
    "regressor": f"import graphopt\n{FIT.format('OnnxRegressor()', '0')}",
    "attribute": "import graphopt\ngraphopt.SGD\n",
    "recipe": "from graphopt.cli import main\nimport sys\nsys.argv = ['graphopt', 'run=compile']\nmain()\n",
}
WORKER = f"""import concurrent.futures, multiprocessing
def work():
    import graphopt
    exec({COMPILE!r})
if __name__ == '__main__':
    spawned = multiprocessing.get_context("spawn")
    with concurrent.futures.ProcessPoolExecutor(1, mp_context=spawned) as pool:
        pool.submit(work).result()
"""
# As an editable installation: found after all places on the path.
EDITABLE = f"""import sys
from importlib.machinery import PathFinder
class Finder:
    @staticmethod
    def find_spec(name, path=None, target=None):
        if name in ("graphopt", "passes", "recipes"):
            return PathFinder.find_spec(name, [{str(ROOT)!r}])
sys.meta_path.insert(sys.meta_path.index(PathFinder) + 1, Finder)
"""


def said(folder: Path, *arguments: str, path: Path = ROOT) -> str:
    """Return the last line that a program writes to a terminal, or an empty text if it ends well."""
    program = subprocess.run(
        [sys.executable, *arguments],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": str(path)},
        capture_output=True,
        text=True,
    )
    return program.stderr.strip().splitlines()[-1] if program.returncode else ""


def expected(place: Path) -> str:
    kind = "folder" if place.is_dir() else "file"
    return re.escape(
        f"{place}: expected another name: this {kind} hides graphopt's package 'passes', which graphopt imports: "
        f"rename the {kind}"
    )


@pytest.mark.slow
def test_a_module_without_a_file_is_a_namesake(tmp_path: Path) -> None:
    stub = "import sys, types\nsys.modules['passes'] = types.ModuleType('passes')\n"
    assert "sys.modules['passes']: expected another name: this module hides" in said(
        tmp_path, "-c", stub + SCRIPTS["compile"]
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
@pytest.mark.parametrize("kind", ["file", "folder"])
def test_a_script_beside_a_namesake(name: str, kind: str, tmp_path: Path) -> None:
    if name == "recipe" and kind == "folder":
        pytest.skip("the command searches the folder last")
    place = tmp_path / ("passes.py" if kind == "file" else "passes")
    code = place if kind == "file" else place / "__init__.py"
    code.parent.mkdir(exist_ok=True)
    code.write_text("mine = 1\n")
    (tmp_path / "train.py").write_text(SCRIPTS[name])
    line = said(tmp_path, "train.py")
    if name == "recipe":
        assert line == ""
        return
    assert re.fullmatch(f"graphopt.errors.GraphoptError: {expected(place)}", line)


@pytest.mark.slow
def test_a_notebook_that_goes_to_a_folder_with_a_namesake(tmp_path: Path) -> None:
    """A notebook searches the working directory, which may change after the import."""
    place = tmp_path / "project" / "passes.py"
    place.parent.mkdir()
    place.write_text("mine = 1\n")
    line = said(tmp_path, "-c", f"import graphopt, os\nos.chdir('project')\n{COMPILE}")
    assert re.fullmatch(f"graphopt.errors.GraphoptError: {expected(place)}", line)


@pytest.mark.slow
def test_a_worker_beside_a_namesake(tmp_path: Path) -> None:
    (tmp_path / "passes.py").write_text("mine = 1\n")
    (tmp_path / "train.py").write_text(WORKER)
    line = said(tmp_path, "train.py")
    assert re.fullmatch(f"graphopt.errors.GraphoptError: {expected(tmp_path / 'passes.py')}", line)


@pytest.mark.slow
@pytest.mark.parametrize("is_editable", [False, True], ids=["on the path", "editable"])
def test_the_command_beside_a_namesake(is_editable: bool, tmp_path: Path) -> None:
    """The command searches the working directory last, but an editable installation comes later still."""
    folder, path = tmp_path / "project", tmp_path / "path"
    for each in (folder, path):
        each.mkdir()
    place = folder / "passes.py"
    place.write_text("mine = 1\n")
    (path / "sitecustomize.py").write_text(EDITABLE)
    line = said(folder, "-m", "graphopt", "run=compile", "model=mlp", path=path if is_editable else ROOT)
    assert re.fullmatch(f"graphopt: error: {expected(place)}" if is_editable else "", line)


@pytest.mark.slow
def test_a_folder_without_code_before_an_editable_installation(tmp_path: Path) -> None:
    """Python's search ends at the folder, which it takes for a package."""
    folder, path = tmp_path / "project", tmp_path / "path"
    (folder / "passes").mkdir(parents=True)
    path.mkdir()
    (path / "sitecustomize.py").write_text(EDITABLE)
    (folder / "train.py").write_text(SCRIPTS["compile"])
    assert said(folder, "train.py", path=path) == ""
    assert said(folder, "-m", "graphopt", "run=compile", "model=mlp", path=path) == ""
    (folder / "train.py").write_text(SCRIPTS["their own first"])
    line = said(folder, "train.py", path=path)
    assert re.fullmatch(f"graphopt.errors.GraphoptError: {expected(folder / 'passes')}", line)


@pytest.mark.slow
@pytest.mark.parametrize("names", [("passes", "recipes"), ("passes", "recipes/__init__.py"), ("passes", "recipes.py")])
@pytest.mark.sample(1)
def test_what_hides_nothing_does_no_harm(names: tuple[str, ...], tmp_path: Path) -> None:
    for place in (tmp_path / name for name in names):
        place.parent.mkdir(exist_ok=True)
        (place.write_text("mine = 1\n") if place.suffix else (place / "notes.txt").parent.mkdir())
    (tmp_path / "train.py").write_text(f"import graphopt\n{COMPILE}")
    assert said(tmp_path, "train.py") == ""
    assert said(tmp_path, "-m", "graphopt", "run=compile", "model=mlp") == ""

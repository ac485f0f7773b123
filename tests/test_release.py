"""What a release consists of agrees: the packages' metadata, the citation, and the files that users copy."""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
import types
from importlib import metadata
from pathlib import Path

import numpy as np
import pytest
import yaml
from packaging.requirements import Requirement

import graphopt
from graphopt import models

ROOT = Path(__file__).parents[1]
RETRAIN = ROOT / "examples" / "retrain"
WORKFLOW = yaml.safe_load((RETRAIN / "retrain.yml").read_text())
STEPS = WORKFLOW["jobs"]["retrain"]["steps"]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> types.ModuleType:
    """Load what builds the packages, which writes the long description, in a folder of its own."""
    pytest.importorskip("setuptools")
    for name in ("pyproject.toml", "README.md"):
        (tmp_path / name).write_bytes((ROOT / name).read_bytes())
    monkeypatch.chdir(tmp_path)
    spec = importlib.util.spec_from_file_location("backend", ROOT / ".ci" / "backend.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_links_of_the_long_description_lead_into_the_repository(backend: types.ModuleType) -> None:
    page, project = Path("build/README.md").read_text(), backend.project
    base = project["urls"]["Repository"]
    targets = re.findall(r'(?:\]\(|\b(?:src|srcset|href)=")([^)\s"]+)', page)
    assert len(targets) > 20 and all(target.startswith(("https://", "#")) for target in targets)
    for kind, path in re.findall(rf"{re.escape(base)}/(blob|raw)/v{project['version']}/([^)#\s\"]+)", page):
        assert (ROOT / path).exists() and (kind == "raw") == path.endswith((".png", ".svg", ".gif", ".jpg"))
    fenced = re.compile(r"^```.*?^```", re.MULTILINE | re.DOTALL)
    assert fenced.findall(page) == fenced.findall((ROOT / "README.md").read_text())


def test_the_citation_is_of_this_version(backend: types.ModuleType) -> None:
    """UPDATE_GUIDES=1 writes it."""
    project = backend.project
    citation = {
        "cff-version": "1.2.0",
        "message": "If you use graphopt in a publication, please cite it.",
        "type": "software",
        "title": project["name"],
        "abstract": project["description"],
        "authors": [{"name": author["name"]} for author in project["authors"]],
        "version": project["version"],
        "license": project["license"],
        "repository-code": project["urls"]["Repository"],
        "url": project["urls"]["Documentation"],
        "keywords": project["keywords"],
    }
    page = ROOT / "CITATION.cff"
    if os.environ.get("UPDATE_GUIDES"):
        page.write_text(yaml.safe_dump(citation, sort_keys=False, width=110))
    assert yaml.safe_load(page.read_text()) == citation, "run: UPDATE_GUIDES=1 pytest tests/test_release.py"


def test_versions_agree(backend: types.ModuleType) -> None:
    version = backend.project["version"]
    assert metadata.version("graphopt") == version
    assert getattr(graphopt, "__version__", version) == version
    assert re.search(rf"^## {re.escape(version)}\b", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)
    assert Requirement(install()).specifier.contains(version)


def install() -> str:
    (command,) = [step["run"] for step in STEPS if step["name" if "name" in step else "uses"] == "Install graphopt"]
    return shlex.split(command)[-1]


def test_files_for_users_name_what_is_there(backend: types.ModuleType) -> None:
    lines = re.sub(r"\\\n", " ", (RETRAIN / "Dockerfile").read_text()).splitlines()
    instructions = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    names = [name for name, _ in instructions]
    assert names[0] == "FROM" and set(names) <= {
        "FROM",
        "COPY",
        "RUN",
        "ENV",
        "USER",
        "WORKDIR",
        "ENTRYPOINT",
        "CMD",
    }
    (entry,) = [yaml.safe_load(text) for name, text in instructions if name == "ENTRYPOINT"]
    assert set(entry) <= set(backend.project["scripts"])
    (extras,) = re.findall(r"/source\[(.*?)\]", (RETRAIN / "Dockerfile").read_text())
    known = backend.project["optional-dependencies"]
    assert {*extras.split(","), *Requirement(install()).extras} <= set(known)
    assert all(re.fullmatch(r"actions/[\w-]+@v\d+", step["uses"]) for step in STEPS if "uses" in step)


@pytest.mark.slow
def test_the_workflow_trains_a_model_again(tmp_path: Path) -> None:
    names = WORKFLOW["env"]
    graphopt.save(models.mlp((4,), 3, hidden=[16]), tmp_path / names["MODEL"])
    x = np.random.default_rng(0).normal(size=(200, 4))
    labels = (x[:, 0] > 0).astype(int) + (x[:, 1] > 0)
    rows = [",".join([*map(str, row), str(label)]) for row, label in zip(x, labels, strict=True)]
    (tmp_path / names["DATA"]).parent.mkdir()
    (tmp_path / names["DATA"]).write_text("\n".join([f"a,b,c,d,{names['TARGET']}", *rows]))
    command = f'graphopt() {{ {shlex.quote(sys.executable)} -m graphopt "$@"; }}\n'
    script = "".join(f"{step['run']}\n" for step in STEPS if step.get("run", "").startswith("graphopt "))
    assert script.count("graphopt ") == 3
    own = {**os.environ, **names, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(["bash", "-e", "-c", command + script], cwd=tmp_path, env=own, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (uploaded,) = [step["with"]["path"].split() for step in STEPS if "upload" in step.get("uses", "")]
    assert all((tmp_path / path).is_file() for path in uploaded)

"""Values that a field does not expect: each run works or ends with one line."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import pytest
import yaml
from builders import mlp

import graphopt
import passes
from graphopt import cli, models
from graphopt.cli.composition.hydra_config import RECIPES
from graphopt.errors import LONGEST, GraphoptError

pytestmark = pytest.mark.usefixtures("plain")

ODD = {
    "a list": "[1]",
    "lists": "[[1], []]",
    "a mapping": "{a: 1}",
    "a text": "text",
    "NUL": '"nul\\0"',
    "a huge number": "99999999999999999999",
    "an infinite number": "inf",
    "a negative number": "-5",
    "null": "null",
    "nan": "nan",
    "a long text": "x" * 10**5,
}
KNOWN = [  # each once ended in a traceback
    ("model", "a list"),
    ("loss.function", "a list"),
    ("loss.function", "lists"),
    ("callbacks.csv", "a list"),
    ("launcher.outer", "a text"),
    ("data.path", "NUL"),
    ("model", "NUL"),
    ("executor.threads", "a huge number"),
    ("fit.checkpoint", "a list"),
    ("run", "a mapping"),
    ("models", "a list"),
    ("callbacks", "a text"),
    ("optimizer", "a long text"),
    ("fit.epochs", "a long text"),
]


def _paths(node: Any, path: str = "") -> list[str]:
    inner = (
        [one for key, value in node.items() for one in _paths(value, f"{path}.{key}".lstrip("."))]
        if isinstance(node, dict)
        else []
    )
    return [path, *inner] if path else inner


def _options() -> dict[str, str]:
    """Return the fields of all recipes, each with an option that has it."""
    found = {path: "" for path in _paths(yaml.safe_load((RECIPES / "graphopt.yaml").read_text()))}
    for file in sorted(RECIPES.glob("*/*.yaml")):
        group = file.parent.name
        if group not in ("experiment", "sweep") and file.stem != "base":
            option = f"{group}={file.stem}"
            base = RECIPES / group / "base.yaml"
            for one in (file, base):
                fields = yaml.safe_load(one.read_text()) or {} if one.exists() else {}
                found |= {path: found.get(path, option) for path in _paths(fields, group)}
    return {path: option for path, option in found.items() if not path.startswith(("hydra", "defaults"))}


OPTIONS = _options()
EVERY = [
    pytest.param(path, odd, marks=[] if (path, odd) in KNOWN else [pytest.mark.exhaustive])
    for path in OPTIONS
    for odd in ODD
]


@pytest.mark.parametrize(("path", "odd"), EVERY)
@pytest.mark.slow
def test_an_odd_value_of_a_field_works_or_is_an_error_of_one_line(
    path: str, odd: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    onnx.save(mlp((4, 5, 3)), "m.onnx")
    x = np.random.default_rng(0).standard_normal((20, 4)).astype(np.float32)
    np.savez("t.npz", x=x, target=np.arange(20) % 3)
    option = OPTIONS[path]
    arguments = [
        "model=m.onnx",
        "data=npz",
        "data.path=t.npz",
        "fit.epochs=1",
        "executor.native=false",
        "folder=out",
    ]
    if option:
        arguments.append(option)
    run = "compile" if "launcher" in path else "train"
    code = cli.main([*arguments, f"run={run}", f"{path}={ODD[odd]}"])
    said = [line for line in capfd.readouterr().err.splitlines() if not line.startswith("graphopt: warning: ")]
    assert all(len(line) < LONGEST + 100 for line in said)
    assert said == [] if code == 0 else len(said) == 1 and said[0].startswith("graphopt: error: ")


def _executor() -> graphopt.Executor:
    step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    return graphopt.Executor(step)


def test_an_executor_is_not_pickled() -> None:
    with pytest.raises(GraphoptError, match=r"Executor: expected .* save a checkpoint with save\(PATH\)"):
        pickle.dumps(_executor())


def test_long_names_in_errors_are_cut() -> None:
    message = f"unknown field {'a' * 10**5!r}; known: {', '.join(f'n{i}' for i in range(10**4))}: remove it"
    found = str(GraphoptError(message))
    assert len(found) <= LONGEST
    assert found.startswith("unknown field 'aaa") and found.endswith(": remove it") and "...aaa" in found
    assert str(GraphoptError("short 'name'")) == "short 'name'"
    assert os.linesep not in found


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("odd_fields_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("odd_fields_mistakes", call, globals())

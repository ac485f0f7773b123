"""Recipes for the fuzzer: a command line and a folder of recipes of someone else's."""

from __future__ import annotations

import contextlib
import functools
import io
import logging
import random
from pathlib import Path
from typing import Any

import onnx
import yaml
from builders import mlp

import recipes
from graphopt.cli import main
from graphopt.errors import GraphoptError

VALUES: list[Any] = [
    0, 1, -1, 2**63, 1e308, -0.5, float("nan"), float("inf"), True, None, "", "x", "null", "a b", "[", "{a: 1}", "${",
    "${seed}", "${oc.env:HOME}", "\\${x}", "???", [], [1, 2], {}, {"a": {"b": []}}, "\N{SNOWMAN}", "../x", "/dev/null",
    {"_target_": "os.system", "command": "touch CANARY"}, {"_target_": "builtins.open", "file": "CANARY", "mode": "w"},
    {"_target_": "graphopt.files.write", "path": "CANARY", "text": ""}, {"_target_": "passes.SGD"},
    "${oc.create:{_target_: os.mkdir, path: CANARY}}",
]  # fmt: skip
GROUPS = [
    "loss",
    "optimizer",
    "schedule",
    "clip",
    "regularizer",
    "training",
    "precision",
    "gradient",
    "data",
    "executor",
]
FOLDER = Path(recipes.__file__).parent


@functools.cache
def _files() -> list[Path]:
    return sorted(path for path in FOLDER.glob("*/*.yaml"))


def _fields(node: Any, path: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [path]
    return [field for key, value in node.items() for field in _fields(value, f"{path}.{key}".lstrip("."))]


@functools.cache
def _paths() -> list[str]:
    found = _fields(yaml.safe_load((FOLDER / "graphopt.yaml").read_text()))
    for file in _files():
        if file.parent.name != "experiment":
            found += _fields(yaml.safe_load(file.read_text()) or {}, file.parent.name)
    return [path for path in found if "defaults" not in path and "_target_" not in path]


def _value(draw: random.Random) -> str:
    return yaml.safe_dump(draw.choice(VALUES), default_flow_style=True, width=10**6).removesuffix("\n...\n").strip()


def write(draw: random.Random, folder: Path) -> list[str]:
    """Write a folder of recipes, mutated, and return a command line that uses it."""
    onnx.save(mlp((4, 5, 3)), folder / "m.onnx")
    (folder / "t.csv").write_text("a,b,c,d,target\n" + "1,2,3,4,1\n5,6,7,8,2\n" * 5)
    run = draw.choice(["compile", "compile", "train", "report"])
    arguments = [
        "model=m.onnx",
        "data=csv",
        "data.path=t.csv",
        "loss=cross_entropy",
        "fit.epochs=1",
        f"run={run}",
    ]
    arguments.append("folder=out")
    for _ in range(draw.choice([0, 1, 1, 2])):
        kind = draw.random()
        if kind < 0.5:
            sign = draw.choice(["", "", "", "+", "++", "~"])
            path = draw.choice(_paths())
            arguments.append(f"{sign}{path}={_value(draw)}")
        elif kind < 0.8:
            group = draw.choice(GROUPS)
            names = [file.stem for file in _files() if file.parent.name == group]
            arguments.append(f"{group}={draw.choice([*names, 'none', 'zzz', ''])}")
        else:
            arguments.append(draw.choice(["a", "=", "a=", "=b", "-", "x=[", "x={", "model=", "--cfg", "~optimizer"]))
    if draw.random() < 0.3:
        arguments += write_run(draw, folder)
    if draw.random() < 0.5:
        arguments += ["--config-dir", "own", "experiment=own"]
        own = folder / "own" / "experiment"
        own.mkdir(parents=True)
        node: dict[str, Any] = {}
        for _ in range(draw.choice([1, 1, 2, 3])):
            place = node
            *parents, last = draw.choice([*_paths(), "pipeline.own", "trust", "hydra.job.name"]).split(".")
            for name in parents:
                place[name] = place = place[name] if isinstance(place.get(name), dict) else {}
            place[last] = draw.choice(VALUES)
        text = "# @package _global_\n" + yaml.safe_dump(node)
        if draw.random() < 0.2:
            place_of_change = draw.randrange(len(text))
            text = text[:place_of_change] + draw.choice("\t{}[]:&*!%@\0\"'- ") + text[place_of_change + 1 :]
        (own / "own.yaml").write_text(text)
    return arguments


@functools.cache
def _composed() -> str:
    """Return a recipe as a run records it."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        main(["--cfg", "job", "data=csv", "data.path=t.csv", "model=m.onnx", "fit.epochs=1"])
    return printed.getvalue()


def write_run(draw: random.Random, folder: Path) -> list[str]:
    """Write the folder of a run of someone else, mutated, and return arguments that name it."""
    record = folder / "theirs" / ".hydra"
    record.mkdir(parents=True)
    fields = yaml.safe_load(_composed())
    for _ in range(draw.choice([0, 1, 1, 2, 3])):
        place = fields
        *parents, last = draw.choice([*_paths(), "pipeline.own", "trust", "hydra.job.name", "unused"]).split(".")
        for name in parents:
            place[name] = place = place[name] if isinstance(place.get(name), dict) else {}
        place[last] = draw.choice(VALUES)
    hydra: Any = {"hydra": {"runtime": {"choices": {"data": "csv", "optimizer": "adamw"}, "cwd": draw.choice(VALUES)}}}
    contents = {
        "config.yaml": fields,
        "hydra.yaml": hydra,
        "overrides.yaml": ["trust=[os]", draw.choice(VALUES)],
    }
    texts = {name: yaml.safe_dump(content, sort_keys=False) for name, content in contents.items()}
    texts["signature.json"] = draw.choice(["", "[]", '{"strangers": [], "hmac": ""}', '{"hmac": 3}'])
    if draw.random() < 0.5:
        name = draw.choice(sorted(texts))
        place_of_change = draw.randrange(len(texts[name]) + 1)
        change = draw.choice(["", "\t", "{", "[", ":", "&a ", "*a", "!!python/name:os.system ", "\0", "\xff"])
        texts[name] = texts[name][:place_of_change] + change + texts[name][place_of_change + 1 :]
    for name, text in texts.items():
        if draw.random() < 0.95:
            (record / name).write_text(text, encoding="latin-1")
    (record.parent / "config.yaml").write_text(texts["config.yaml"], encoding="latin-1")
    return draw.choice([["run=evaluate", "folder=theirs"], ["run=predict", "folder=theirs"], ["resume=theirs"]])


def attempt(arguments: list[str], folder: Path) -> None:
    """Run the command: it does what it was told, or prints one line that says what is wrong."""
    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(io.StringIO()):
        code = main(arguments)
    logging.getLogger().handlers.clear()  # the command's, into a folder that is gone soon
    assert not list(folder.rglob("CANARY*")), "a recipe ran code"
    errors = [line for line in printed.getvalue().splitlines() if not line.startswith("graphopt: warning:")]
    assert code in (0, 1, 2), code
    if code == 2:  # what argparse cannot read, with its usage
        raise GraphoptError(errors[-1])
    if code:
        assert len(errors) == 1, errors
        assert errors[0].startswith("graphopt: error: "), errors
        raise GraphoptError(errors[0])
    assert not errors, errors

"""The JSON Schema of recipes accepts those that ship and those of the guides, and marks what the command refuses."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from pkgutil import resolve_name
from typing import Any

import pytest
import yaml
from jsonschema import Draft202012Validator
from omegaconf import OmegaConf
from test_readme import PAGES, blocks, commands
from test_recipes import EXPERIMENTS, FOLDER, composed

from graphopt import cli
from graphopt.cli.composition import validation
from graphopt.cli.schema import recipe_schema
from graphopt.cli.words import field_of
from graphopt.errors import GraphoptError

VERBS = [
    "train",
    "evaluate",
    "predict",
    "calibrate",
    "generate",
    "compile",
    "hosts",
    "artifacts",
    "derive",
    "explain",
    "report",
    "check",
    "export",
    "compare",
]
SCHEMA = json.loads(json.dumps(recipe_schema(VERBS)))
COMMANDS = [command for page in PAGES for command in commands(page)]


def errors(recipe: Any, group: str | None = None) -> list[str]:
    schema = SCHEMA if group is None else {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{group}"}
    return [f"{error.json_path}: {error.message}" for error in Draft202012Validator(schema).iter_errors(recipe)]


def test_it_is_a_schema() -> None:
    Draft202012Validator.check_schema(SCHEMA)
    known = {f"#/$defs/{name}" for name in SCHEMA["$defs"]}
    assert {node["$ref"] for node in _nodes(SCHEMA) if "$ref" in node} <= known


def test_every_field_is_described() -> None:
    without = {"_target_", "defaults", "callbacks", "checkpoint", "hydra", "models", "pipeline", "parameters"}
    for name, definition in SCHEMA["$defs"].items():
        for field, schema in definition.get("properties", {}).items():
            if "." in name and field not in without:
                assert schema.get("description"), f"{name}.{field}"
    for field, schema in SCHEMA["else"]["properties"].items():
        assert "description" in schema or "$ref" in schema or field in without, field


def _nodes(schema: Any) -> Iterator[dict[str, Any]]:
    items = schema.values() if isinstance(schema, dict) else schema if isinstance(schema, list) else ()
    if isinstance(schema, dict):
        yield schema
    for item in items:
        yield from _nodes(item)


@pytest.mark.parametrize("path", sorted(FOLDER.rglob("*.yaml")), ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_that_ship_are_valid(path: Path) -> None:
    text = path.read_text()
    is_whole = path.parent == FOLDER or text.startswith("# @package _global_")
    assert not errors(yaml.safe_load(text), None if is_whole else path.parent.name)


@pytest.mark.parametrize("command", COMMANDS)
def test_recipes_of_the_guides_commands_are_valid(command: str) -> None:
    words = shlex.split(command, comments=True)[1:]
    words = [word for word in words if not word.startswith("--")]
    known = [word for word in words if "=" in word or word in VERBS or word.endswith(".onnx")]
    overrides = [field_of(word, VERBS) for word in known if not word.startswith("sweep=")]
    recipe: Any = composed(*([] if "-m" in words else overrides))
    assert not errors(OmegaConf.to_container(recipe, resolve=False))


@pytest.mark.parametrize("resolve", [False, True])
@pytest.mark.parametrize("experiment", EXPERIMENTS)
def test_whole_recipes_are_valid(experiment: str, resolve: bool) -> None:
    assert not errors(OmegaConf.to_container(composed(f"experiment={experiment}"), resolve=resolve))


VALUES = [
    None,
    True,
    0,
    1.5,
    "x",
    [],
    ["a"],
    [1.5],
    [None],
    {},
    {"a": 1},
    {"a": ["b"]},
    [{"_target_": "passes.L2"}],
]
ELSEWHERE = {"outputs", "function"}  # null is for the command, and names are of trusted code


@pytest.mark.parametrize("name", [name for name in SCHEMA["$defs"] if name.startswith(("graphopt.", "passes."))])
def test_what_the_command_refuses_is_marked(name: str) -> None:
    fields = SCHEMA["$defs"][name]["properties"]
    for field in fields.keys() - {"_target_", "defaults", *ELSEWHERE}:
        others = {*fields, "step", "features"} - {field}
        for value in VALUES:
            try:
                validation.check_fields(resolve_name(name), {field: value}, name, [*others])
            except GraphoptError:
                place = {"$defs": SCHEMA["$defs"], "$ref": f"#/$defs/{name}"}
                assert not Draft202012Validator(place).is_valid({field: value}), f"{field}: {value}"


def test_the_recipe_of_the_guide_is_valid_and_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (block,) = [block for page in PAGES for block in blocks(page, "yaml")]
    assert "# yaml-language-server: $schema=../../recipes.schema.json" in block.splitlines()
    assert not errors(yaml.safe_load(block))
    place = tmp_path / "my_recipes/experiment/mine.yaml"
    place.parent.mkdir(parents=True)
    place.write_text(block)
    monkeypatch.chdir(tmp_path)
    assert cli.main(["--config-dir", "my_recipes", "experiment=mine", "--cfg", "job", "--package", "optimizer"]) == 0
    assert "learning_rate: 0.002" in capsys.readouterr().out


def test_the_command_writes_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "recipes.schema.json"
    assert cli.main(["--schema", str(path)]) == 0
    assert "yaml-language-server: $schema=" in capsys.readouterr().out
    assert json.loads(path.read_text()) == SCHEMA


# Recipes with something wrong, and where an editor marks it.
WRONG = {
    "optimiser: {}": "$:",
    "run: trane": "$.run:",
    "quiet: 1": "$.quiet:",
    "rows: some": "$.rows:",
    "trust: my_package": "$.trust:",
    "data: {_target_: graphopt.data.csv, patch: x.csv}": "$.data:",
    "executor: {frozen: sometimes}": "$.executor:",
    "executor: {steps: 3}": "$.executor:",
    "fit: {epoch: 3}": "$.fit:",
    "fit: {epochs: 1.5}": "$.fit.epochs:",
    "fit: {epochs: '3'}": "$.fit.epochs:",
    "fit: {epochs: true}": "$.fit.epochs:",
    "fit: {shuffle: sometimes}": "$.fit.shuffle:",
    "fit: {validation: [1]}": "$.fit.validation:",
    "fit: {checkpoint: {keep: 0}}": "$.fit.checkpoint:",
    "generate: {top_p: 1.5}": "$.generate.top_p:",
    "limits: {nodes: -1}": "$.limits.nodes:",
    "models: {mlp: {hidden: wide}}": "$.models.mlp:",
    "models: {mlp: {features: 3}}": "$.models.mlp:",
    "callbacks: {early_stopping: 3}": "$.callbacks.early_stopping:",
    "callbacks: {early_stopping: {patiance: 3}}": "$.callbacks.early_stopping:",
    "callbacks: {early_stoping: true}": "$.callbacks.early_stoping:",
    "loss: {_target_: passes.CrossEntropie}": "$.loss:",
    "loss: {_target_: passes.CrossEntropy, label_smoothing: 2}": "$.loss:",
    "loss: {reduction: median}": "$.loss:",
    "optimizer: adamw": "$.optimizer:",
    "optimizer: {lr: 0.1}": "$.optimizer:",
    "optimizer: {learning_rate: -0.1}": "$.optimizer:",
    "optimizer: {learning_rate: .inf}": "$.optimizer:",
    "optimizer: {_target_: passes.AdamW, momentum: 0.9}": "$.optimizer:",
    "optimizer: {groups: [{_target_: passes.L2}]}": "$.optimizer:",
    "optimizer: {groups: [{_target_: passes.Group, pattern: x, learning_rate: -1}]}": "$.optimizer:",
    "regularizer: [{_target_: passes.L2, strength: -1}]": "$.regularizer:",
    "pipeline: {normalize: {batch: some}}": "$.pipeline.normalize:",
    "launcher: {timeout: soon}": "$.launcher:",
    "{_target_: passes.AdamW, lr: 0.1}": "$:",
    "defaults: {optimizer: adamw}": "$.defaults:",
}
RIGHT = [
    "{}",
    "optimizer: {learning_rate: '${rate}'}",
    "optimizer: {learning_rate: '???'}",
    "optimizer: {learning_rate: 1}",
    "loss: {_target_: my_package.Own, anything: [1]}",
    "{_target_: my_package.Own, anything: [1]}",
    "regularizer: [{_target_: passes.L2}, {_target_: my_package.Own}]",
    "pipeline: {optimizer: {learning_rate: 0.1}, mine: {_target_: my_package.Own}, regularizer: null}",
    "optimizer: {groups: [{_target_: passes.Group, pattern: x}]}",
    "callbacks: {early_stopping: true, csv: table.csv, time_limit: {limit: 3 h}, mine: {_target_: my_package.Own}}",
    "callbacks: {stop_on_nan: null, jsonl: false}",
    "fit: {validation: held.npz, metrics: [accuracy, {top_k: {k: 3}}], checkpoint: null}",
    "fit: {metrics: accuracy}",
    "models: {mlp: {outputs: 3, hidden: [8, 8]}, wide: {_target_: graphopt.models.mlp, hidden: 1000}}",
    "launcher: {_target_: graphopt.distributed.launchers.LocalLauncher, outer: {_target_: passes.SGD}}",
    "resume: runs/mine",
    "hydra: {sweeper: {params: {fit.epochs: '1,2'}}}",
    "defaults: [{override /optimizer: mine}, _self_, other]",
]


@pytest.mark.parametrize(("recipe", "place"), WRONG.items(), ids=WRONG)
def test_what_is_wrong_is_marked(recipe: str, place: str) -> None:
    (error,) = errors(yaml.safe_load(recipe))
    assert error.startswith(place)


@pytest.mark.parametrize("recipe", RIGHT)
def test_what_is_right_is_not_marked(recipe: str) -> None:
    assert not errors(yaml.safe_load(recipe))

"""Recipes: each instantiates, and its keys and defaults are those of what it builds."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import pkgutil
import re
import typing
from pathlib import Path
from typing import Any

import hydra
import pytest
import yaml
from hydra import compose, initialize_config_module
from omegaconf import DictConfig, OmegaConf

import graphopt
import passes
import recipes
from graphopt.cli.composition import validation
from graphopt.cli.help import fields
from graphopt.compiler import STANDARD
from graphopt.runtime.executor_options import ExecutorOptions

FOLDER = Path(recipes.__file__).parent
FILES = sorted(
    path for path in FOLDER.glob("*/*.yaml") if path.parent.name not in ("experiment", "sweep") and path.stem != "base"
)
EXPERIMENTS = sorted(path.stem for path in (FOLDER / "experiment").glob("*.yaml"))
REQUIRED = {  # what a recipe leaves to be set, for the test to set
    "loss/custom": {"function": lambda op, p, t: op.Abs(p - t)},
    "adapter/loaded": {"path": "folder"},
    "loss/several": {"losses": {"y": passes.MeanSquaredError()}},
}
FROM_ELSEWHERE = {"executor": {"step"}}

OF_PYTHON = ("steps_per_epoch", "transform", "verbose")  # options of fit that recipes do not have


@functools.cache
def composed(*overrides: str) -> DictConfig:
    OmegaConf.register_new_resolver("training_steps", lambda: 100, replace=True)
    with initialize_config_module(version_base="1.3", config_module="recipes"):
        return compose("graphopt", list(overrides))


def defaults(target: Any) -> dict[str, Any]:
    """Return a signature's fields and defaults as YAML has them."""
    if dataclasses.is_dataclass(target):
        found = {
            field.name: field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
            for field in dataclasses.fields(target)
        }
    else:
        found = {name: p.default for name, p in inspect.signature(target).parameters.items()}
    missing = (dataclasses.MISSING, inspect.Parameter.empty)
    return {
        name: "???" if value in missing else list(value) if isinstance(value, tuple) else value
        for name, value in found.items()
    }


def options(path: Path) -> dict[str, Any]:
    """Return the fields of a recipe, with those of the base that it names."""
    node = OmegaConf.to_container(OmegaConf.load(path))
    base = options(path.parent / "base.yaml") if "base" in node.pop("defaults", ()) else {}
    return {**base, **node}


def check(node: dict[str, Any], elsewhere: set[str] = frozenset()) -> None:
    expected = defaults(pkgutil.resolve_name(node["_target_"]))
    expected = {name: value for name, value in expected.items() if name not in elsewhere}
    written = {name: value for name, value in node.items() if name != "_target_"}
    assert set(written) == set(expected)
    for name, value in written.items():
        if not str(value).startswith("${"):  # what only the data or the run tells
            assert value == expected[name], name
            assert isinstance(value, bool) == isinstance(expected[name], bool), name


# The defaults of what recipes of one class choose.
OF_INTEGERS: dict[str, dict[str, object]] = {
    "int8_lsq": {"observer": "auto"},
    "int8_avx2": {"weight_range": None},
    "int4_weights": {"weights": "int8", "block": None, "activations": "uint8"},
}


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_keys_and_defaults_are_the_class_s(path: Path) -> None:
    node = yaml.safe_load(path.read_text())
    if path.stem == "none":
        assert node == {path.parent.name: None}
    elif path.parent.name == "executor" and path.stem != "cpu":
        assert node == {"defaults": ["cpu"], "device": path.stem}
    elif path.parent.name == "precision":
        node = node.get("precision", node)  # float16 is about more than its group
        assert node["dtype"] == path.stem
        check({**node, "dtype": "float16"})
    elif path.stem == "dora":
        assert node == {"defaults": ["lora", "_self_"], "dora": True}
    elif path.parent.name == "prune":
        check({**options(path), "sparsity": None, "structure": "element"})
    elif path.stem == "low_rank":
        check({**options(path), "energy": None})
    elif path.stem in OF_INTEGERS:
        check({**options(path), **OF_INTEGERS[path.stem]})
    elif path.stem == "exported":
        assert options(path)["as_exported"] is True
        check({**options(path), "as_exported": False})
    else:
        check(options(path), FROM_ELSEWHERE.get(path.parent.name, set()))


@pytest.mark.parametrize("group", sorted(path.parent.name for path in FOLDER.glob("*/base.yaml")))
def test_fields_of_a_base_class_are_written_once(group: str) -> None:
    shared = yaml.safe_load((FOLDER / group / "base.yaml").read_text())
    for path in (FOLDER / group).glob("*.yaml"):
        own = yaml.safe_load(path.read_text())
        if "base" in own.get("defaults", ()):
            assert not {name for name in own if name in shared and own[name] == shared[name]}, path


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_instantiates(path: Path) -> None:
    group, name = path.parent.name, path.stem
    node = composed(f"{group}={name}")[group]
    if group in ("data", "executor"):
        assert callable(pkgutil.resolve_name(node._target_))
    elif node is not None:
        fields = {key: node[key] for key in node if not OmegaConf.is_missing(node, key)}
        built = hydra.utils.instantiate({**fields, **REQUIRED.get(f"{group}/{name}", {})}, _convert_="all")
        assert callable(built) or (group == "launcher" and callable(built.communicator))


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_every_field_is_described(path: Path) -> None:
    if path.stem == "none":
        return
    recipe: Any = OmegaConf.to_container(composed(f"{path.parent.name}={path.stem}"), resolve=False)
    for place, _, text in fields(recipe):
        if place.split(".")[0] in (path.parent.name, "fit", "models", "parameters", "pipeline") or "." not in place:
            assert len(text) > 3, place


@pytest.mark.parametrize("path", FILES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_recipes_may_name_what_ours_name(path: Path) -> None:
    node = OmegaConf.to_container(composed(f"{path.parent.name}={path.stem}"), resolve=True)[path.parent.name]
    if node is not None:
        validation.resolve(node["_target_"], path.parent.name)


def test_every_pass_of_a_family_has_a_recipe() -> None:
    families = {
        "loss": passes.Loss,
        "regularizer": passes.Regularizer,
        "gradient": passes.GradientSource,
        "clip": passes.Clip,
        "schedule": passes.Schedule,
        "optimizer": passes.Optimizer,
        "average": passes.Average,
    }
    for group, family in families.items():
        named = {yaml.safe_load(path.read_text()).get("_target_") for path in (FOLDER / group).glob("*.yaml")}
        leaves = {
            f"passes.{name}"
            for name, member in vars(passes).items()
            if inspect.isclass(member) and issubclass(member, family) and not inspect.isabstract(member)
        } - {"passes.ElasticWeights"}  # its arrays are no text
        assert leaves <= named, group


@pytest.mark.slow
def test_every_pass_and_every_option_of_an_executor_is_in_a_test() -> None:
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    options = [field.name for field in dataclasses.fields(ExecutorOptions)]
    assert not [name for name in passes.__all__ if not re.search(rf"\bpasses\.{name}\b", tests)]
    assert not [name for name in options if not re.search(rf"\b{name}\b", tests)]


def test_the_primary_config_has_the_standard_pipeline() -> None:
    config = OmegaConf.load(FOLDER / "graphopt.yaml")
    chosen = {group: option for one in config.defaults if one != "_self_" for group, option in one.items()}
    steps = {name: step for name, step in OmegaConf.to_container(config.pipeline).items() if name != "_target_"}
    assert list(steps) == list(STANDARD)
    standard = graphopt.standard()
    for name in STANDARD:
        node = steps[name]
        if node == f"${{{name}}}":
            path = FOLDER / name / f"{chosen.get(name)}.yaml"
            node = OmegaConf.to_container(config[name]) if name in config else options(path)
        if name in standard:
            assert node["_target_"] == f"passes.{type(standard[name][0]).__name__}"
            check({**node, "as_exported": False} if name == "training" else node)
        else:
            assert steps[name] == f"${{{name}}}"


def test_the_primary_config_has_the_models_and_fit() -> None:
    config = OmegaConf.to_container(OmegaConf.load(FOLDER / "graphopt.yaml"))
    for node in config["models"].values():
        expected = {**defaults(pkgutil.resolve_name(node["_target_"])), "outputs": None}
        written = {name: value for name, value in node.items() if name not in ("_target_", "seed")}
        assert written == {name: value for name, value in expected.items() if name not in ("features", "seed")}
    expected = defaults(pkgutil.resolve_name("graphopt.training.fit:fit"))
    expected = {
        name: value
        for name, value in expected.items()
        if name not in {*OF_PYTHON, "executor", "data", "callbacks", "checkpoint", "resume"}
    }
    every = {name: x for name, x in defaults(graphopt.Checkpoints).items() if name != "folder"}
    assert config["fit"] == {**expected, "checkpoint": every, "log_steps": False, "export": "best"}


def test_types_of_the_executors_fields_are_found_so_that_recipes_are_checked() -> None:
    hints = typing.get_type_hints(graphopt.Executor.Options)
    assert hints["threads"] == int | None
    assert hints["as_numpy"] is bool
    with pytest.raises(graphopt.GraphoptError, match=r"threads: expected int or null, found 2.5"):
        validation.check_fields(graphopt.Executor, {"threads": 2.5}, "executor", ("step",))


def test_float16_scales_the_loss_unless_told_otherwise() -> None:
    config = composed("precision=float16")
    assert config.gradient.loss_scale == 2**15
    assert config.loss_scale._target_ == "passes.DynamicLossScale"
    assert composed("precision=float16", "loss_scale=none").loss_scale is None
    for other in (composed(), composed("precision=bfloat16")):
        assert other.gradient.loss_scale is None and other.loss_scale is None


def test_a_bare_run_is_digits_mlp() -> None:
    bare, named = composed(), composed("experiment=digits_mlp")
    assert {**bare, "folder": ""} == {**named, "folder": ""}


@pytest.mark.parametrize("name", EXPERIMENTS)
def test_experiments_build_a_pipeline(name: str) -> None:
    config = composed(f"experiment={name}")
    pipeline = hydra.utils.instantiate(config.pipeline, _convert_="all")
    assert isinstance(pipeline, graphopt.Pipeline)


def test_steps_can_be_chosen_and_left_out() -> None:
    config = composed("regularizer=l2", "optimizer=sgd", "clip=global_norm", "~pipeline.clip")
    pipeline = hydra.utils.instantiate(config.pipeline, _convert_="all")
    assert pipeline["regularizer"] == (passes.L2(),)
    assert pipeline["optimizer"] == (passes.SGD(groups=[]),)
    assert "clip" not in pipeline

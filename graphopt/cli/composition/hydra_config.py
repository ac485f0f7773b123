"""Compose recipes with Hydra, and keep untrusted recipes from setting Hydra's own config."""

from __future__ import annotations

import contextlib
import copy
import functools
import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

import hydra
import yaml  # type: ignore[import-untyped]
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra._internal.config_repository import CachingConfigRepository, ConfigRepository
from hydra.core.config_search_path import ConfigSearchPath, SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.plugins.config_source import ConfigResult, ConfigSource
from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.resolvers import oc

from graphopt.cli.composition.expansion import check_expansion
from graphopt.errors import GraphoptError

# A path, because `recipes` could be a package in the working directory.
RECIPES = Path(__file__).parents[3] / "recipes"
PRIMARY = "graphopt"
BASE = "base"  # the base recipe of a group, which is not an option
UNTRUSTED = "command-line"  # the provider of folders of recipes that the command line adds
MOST_BYTES = 100_000  # of a recipe; graphopt's largest has 6,000
MOST_DEEP = 50  # levels of a recipe's mappings and lists
MOST_READ = 20_000  # values of recipes, each counted as often as it is read
_HOST = re.compile(r"[+~]*(sweep|launcher)\b")  # what starts processes: a recipe cannot set it
_RUNS = 10_000  # the largest sweep that a recipe may ask for
SEARCH_PATH = "hydra.searchpath"
SET_BY_HYDRA = ("job.override_dirname.", "runtime.choices.", "runtime.config_sources.")
REFUSED_RESOLVERS = {f"oc.{name}": getattr(oc, name) for name in ("create", "decode", "deprecated", "env")}
# What Hydra raises for configs of unexpected shapes.
COMPOSITION_ERRORS = (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class CommandLine:
    """Hold the arguments of the command line: those of `key=value`, further folders of recipes, and all of them.

    A folder is `file://FOLDER` or `pkg://PACKAGE`.
    """

    overrides: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()

    @classmethod
    def of(cls, overrides: Sequence[str], folder: str | None) -> CommandLine:
        """Return the command line of a run with `--config-dir folder`."""
        if folder is not None and not os.path.isdir(folder):
            raise GraphoptError(f"--config-dir: expected a folder of recipes, found {folder!r}")
        added = [override.value() for override in _parsed(*overrides) if override.key_or_group == SEARCH_PATH]
        named = [folder] if folder else []
        named += [str(item) for value in added for item in (value if isinstance(value, list) else [value])]
        return cls(
            tuple(overrides),
            tuple(folder if "://" in folder else f"file://{os.path.abspath(folder)}" for folder in named),
            (*overrides, *(["--config-dir", folder] if folder else [])),
        )

    @property
    def trust(self) -> tuple[str, ...]:
        """Return the packages whose code recipes may name."""
        trusted: Any = []
        for override in self._setting("trust"):
            trusted = override.value()
            if not isinstance(trusted, list) or not all(isinstance(name, str) and name for name in trusted):
                raise GraphoptError(
                    f"trust: expected a list of packages, as in trust=[my_package], found {override.input_line!r}"
                )
        return tuple(trusted)

    @property
    def is_sweep(self) -> bool:
        """Return whether the command line sets `hydra.mode=MULTIRUN`."""
        return any(override.value() == "MULTIRUN" for override in self._setting("hydra.mode"))

    def _setting(self, field: str) -> list[Override]:
        return [override for override in _parsed(*self.overrides) if override.key_or_group == field]

    def names(self, field: str) -> bool:
        """Return whether the command line sets a field of the recipe, alone or in a mapping.

        A mapping sets the fields that it has; a recipe may add others. A choice of a group sets none.
        """
        for override in _parsed(*self.overrides):
            if override.is_delete() or override.package is not None:
                continue
            key, value = override.key_or_group, override.value()
            if field == key:
                return True
            is_choice = "." not in key and not isinstance(value, dict)
            inside = field.removeprefix(f"{key}.")
            if inside != field and not is_choice and _has(value, inside.split(".")):
                return True
        return False


def _has(value: Any, names: Sequence[str]) -> bool:
    """Return whether nested mappings have a value at a path, or a plain value in place of one of its parents."""
    if not names or not isinstance(value, dict):
        return True
    return names[0] in value and _has(value[names[0]], names[1:])


class _Reader(CachingConfigRepository):
    """Bound untrusted recipes: each is checked before it is parsed, and can name others many times."""

    def __init__(self, delegate: ConfigRepository) -> None:
        super().__init__(delegate)
        self._find, self._left = delegate._find_object_source, MOST_READ

    def load_config(self, config_path: str) -> ConfigResult | None:
        source = self._find(config_path, ObjectType.CONFIG)
        is_new = f"config_path={config_path}" not in self.cache
        if is_new and source and any(entry.provider == UNTRUSTED for entry in self.get_sources()):
            if os.path.isabs(config_path) or os.path.normpath(config_path).split(os.sep)[0] == os.pardir:
                raise GraphoptError(f"{config_path}: expected a recipe below its folder, found another file")
            if source.provider == UNTRUSTED:
                _check_file(source, config_path)
        result = super().load_config(config_path)
        if result is not None and result.provider == UNTRUSTED:
            self._left -= 1 + sum(1 for _ in flattened(result.config))
            if self._left < 0:
                raise GraphoptError(
                    f"{config_path}: expected recipes of at most {MOST_READ:,} fields with the recipes that they "
                    "name, found more"
                )
        return result


def _check_file(source: ConfigSource, config_path: str) -> None:
    """Raise an error if a recipe is a link, large or deep, or has YAML aliases: few lines can expand without end."""
    name = source._normalize_file_name(config_path)
    folder: Any = Path(source.path) if source.scheme() == "file" else resources.files(source.path)
    file = folder.joinpath(name)
    if isinstance(file, Path) and not file.resolve().is_relative_to(Path(str(folder)).resolve()):
        raise GraphoptError(f"{file}: expected a recipe below its folder, found a link to {file.resolve()}")
    with file.open("rb") as stream:
        text = stream.read(MOST_BYTES + 1)
    if len(text) > MOST_BYTES:
        raise GraphoptError(f"{file}: expected a recipe of at most {MOST_BYTES:,} bytes, found more")
    depth = 0
    for event in yaml.parse(text):
        if isinstance(event, yaml.AliasEvent):
            raise GraphoptError(f"{file}: expected a recipe without YAML aliases, found one")
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MOST_DEEP:
            raise GraphoptError(
                f"{file}: expected mappings and lists of at most {MOST_DEEP} levels, found more"
            )


class RecipeLoader(ConfigLoaderImpl):
    """Compose recipes, and reject forbidden fields of untrusted recipes before Hydra acts on them.

    Hydra calls `load_configuration` for a single run, for each run of a sweep and for help. The node `hydra` of a
    composed config must equal the one from graphopt's own recipes and the command line, except for the values to
    sweep over, `hydra.sweeper.params`.
    """

    def __init__(self, search_path: ConfigSearchPath, command_line: CommandLine) -> None:
        whole = copy.deepcopy(search_path)
        for folder in command_line.folders:
            whole.prepend(UNTRUSTED, folder, SearchPathQuery(provider="schema"))
        super().__init__(whole)
        self._own = ConfigLoaderImpl(search_path)
        self._command_line = command_line

    def load_configuration(
        self, config_name: str | None, overrides: list[str], *how: Any, **named: Any
    ) -> DictConfig:
        for name in REFUSED_RESOLVERS:
            OmegaConf.clear_resolver(name)
        overrides = [str(item.input_line) for item in _parsed(*overrides) if item.key_or_group != SEARCH_PATH]
        try:
            config = super().load_configuration(config_name, overrides, *how, **named)
            if self._command_line.folders:
                self._check(config, config_name, overrides, *how, **named)
            check_expansion(config)
        except COMPOSITION_ERRORS as error:
            if isinstance(error, GraphoptError):
                raise
            raise GraphoptError(f"recipe: expected a config that Hydra can compose: {error}") from error
        return config

    def _parse_overrides_and_create_caching_repo(
        self, config_name: str | None, overrides: list[str]
    ) -> tuple[list[Override], CachingConfigRepository]:
        return OverridesParser.create().parse_overrides(overrides), _Reader(self.repository)

    def _check(
        self, config: DictConfig, config_name: str | None, overrides: list[str], *how: Any, **named: Any
    ) -> None:
        """Raise an error if a recipe sets `folder`, `launcher`, `trust` or Hydra's own config."""
        lines: dict[bool, list[str]] = {True: [], False: []}
        for override in _parsed(*overrides):
            lines[override.is_hydra_override()].append(str(override.input_line))
        said = self._command_line.overrides
        allowed = [line for line in lines[True] if line in said or line.startswith("hydra.mode=")]
        allowed += [line for line in lines[False] if line in said and _HOST.match(line)]
        expected = self._own.load_configuration(config_name, allowed, *how, **named)
        own: Any = OmegaConf.to_container(expected, resolve=False)
        plain: Any = OmegaConf.to_container(config, resolve=False)
        ours, theirs = own["hydra"], plain["hydra"]
        ours["overrides"] = {"hydra": lines[True], "task": lines[False]}
        values = theirs["sweeper"].pop("params", None) if isinstance(theirs["sweeper"], dict) else None
        ours["sweeper"].pop("params", None)
        self._check_runs(values or {})
        ours, theirs = dict(flattened(ours)), dict(flattened(theirs))
        for field in sorted(ours.keys() | theirs.keys()):
            if not f"{field}.".startswith(SET_BY_HYDRA) and ours.get(field, ...) != theirs.get(field, ...):
                raise on_the_command_line(f"hydra.{field}")
        for field in ("folder", "launcher", "trust") if config_name is not None else ():
            is_named = field != "launcher" and self._command_line.names(field)
            if plain.get(field) != own[field] and not is_named:
                raise on_the_command_line(field)

    def _check_runs(self, swept: Mapping[str, Any]) -> None:
        """Raise an error if a recipe asks for too many runs, such as `range(0,1e9)`, before Hydra lists them."""
        for name, value in swept.items():
            if not isinstance(value, bool | int | float | str) or "${" in str(value):
                raise GraphoptError(
                    f"hydra.sweeper.params.{name}: expected values such as 1,2,3, found {value!r}"
                )
        runs, parser = 1, OverridesParser.create(config_loader=self)
        for override in parser.parse_overrides([f"{name}={value}" for name, value in swept.items()]):
            if override.is_sweep_override():
                runs *= sum(1 for _ in itertools.islice(override.sweep_iterator(), _RUNS + 1))
            if runs > _RUNS:
                raise GraphoptError(f"hydra.sweeper.params: expected at most {_RUNS:,} runs, found more")


@contextlib.contextmanager
def composing(command_line: CommandLine) -> Iterator[Any]:
    """Yield Hydra, configured to compose and run recipes, in a `with` block."""
    GlobalHydra.instance().clear()
    try:
        with hydra.initialize_config_dir(str(RECIPES), job_name=PRIMARY, version_base="1.3"):
            application: Any = GlobalHydra.instance().hydra
            application.config_loader = RecipeLoader(
                application.config_loader.get_search_path(), command_line
            )
            yield application
    finally:
        for name, resolver in REFUSED_RESOLVERS.items():
            OmegaConf.register_new_resolver(name, resolver, replace=True)


@functools.lru_cache
def _parsed(*overrides: str) -> list[Override]:
    """Parse arguments with Hydra's grammar."""
    return OverridesParser.create().parse_overrides(list(overrides))


def on_the_command_line(field: str) -> GraphoptError:
    """Return the error of a field, or of an item of a list in it, that recipes must not set."""
    name = field.rstrip("0123456789").removesuffix(".")
    return GraphoptError(f"{name}: expected it on the command line alone, found it in a recipe")


def flattened(node: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the path and value of each leaf of nested mappings and lists, including empty ones."""
    if isinstance(node, DictConfig | ListConfig):
        node = OmegaConf.to_container(node, resolve=False)
    items: Any = (
        node.items() if isinstance(node, Mapping) else enumerate(node) if isinstance(node, list) else ()
    )
    if not items:
        yield path, node
    for key, value in items:
        yield from flattened(value, f"{path}.{key}" if path else str(key))

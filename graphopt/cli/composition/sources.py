"""Read recipes that others have written for Hydra, by its plugins: each is checked as text before it is parsed."""

from __future__ import annotations

import io
import os
from collections.abc import Mapping
from contextvars import ContextVar
from importlib import resources, util
from pathlib import Path
from typing import Any

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from graphopt.cli.composition.expansion import MOST_BYTES, check_text, flattened, plain_of
from graphopt.errors import GraphoptError, line
from graphopt.files import check_plain, read_file

MOST_READ = 20_000  # values of recipes, each counted as often as it is read
EACH = 40  # values for which the name of a recipe counts, whose merge costs Hydra as much
# The folders of others in which this thread has Hydra look; None outside of graphopt's own compositions.
FOLDERS: ContextVar[tuple[str, ...] | None] = ContextVar("FOLDERS", default=None)


class StrangersFolder(ConfigSource):
    """Read recipes of `untrusted://file://FOLDER` or `untrusted://pkg://PACKAGE`.

    Hydra copies a source for each recipe that it composes, so that each begins with the whole budget.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        kind, _, place = self.path.partition("://")
        if kind not in ("file", "pkg"):
            raise GraphoptError(f"hydra.searchpath: expected file://FOLDER or pkg://PACKAGE, found {self.path}")
        if kind == "pkg":
            _check_package(_module(place), self.path)
        if kind == "file" and not Path(place).is_dir():
            raise GraphoptError(f"hydra.searchpath: expected a folder of recipes, found {self.path}")
        self._left = MOST_READ

    @property
    def _root(self) -> Any:
        """Return the folder; that of a package may lie in an archive, which Hydra cannot copy with its source."""
        kind, _, place = self.path.partition("://")
        return resources.files(_module(place)) if kind == "pkg" else Path(place)

    @staticmethod
    def scheme() -> str:
        return "untrusted"

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return bool(self._root.joinpath(config_path).is_dir())

    def is_config(self, config_path: str) -> bool:
        return bool(self._root.joinpath(_file_name(config_path)).is_file())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        files = [file for file in self._root.joinpath(config_path).iterdir() if file.name != "__pycache__"]
        groups = [file.name for file in files if file.is_dir() and results_filter is not ObjectType.CONFIG]
        options = [file.name for file in files if file.is_file() and results_filter is not ObjectType.GROUP]
        return sorted([*groups, *(name.removesuffix(".yaml") for name in options if name.endswith(".yaml"))])

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._root.joinpath(_file_name(config_path))
        if isinstance(file, Path):
            place = file.resolve()
            if not place.is_relative_to(self._root.resolve()):
                raise GraphoptError(f"{file}: expected a recipe below its folder, found a link to {place}")
            content = read_file(place, MOST_BYTES)
        else:
            content = file.read_bytes()
        check_text(str(file), content)
        text = io.StringIO(content.decode("utf-8-sig"))
        text.name = str(file)  # which errors of YAML name
        config = OmegaConf.load(text)
        check_plain(plain_of(config), config_path)
        first = text.getvalue().lstrip().partition("\n")[0].lstrip("#").split()
        package = first[1] if first[:1] == ["@package"] and len(first) == 2 else None
        return _Counted(self, config_path, config, {"package": package})

    def spend(self, config_path: str, fields: int) -> None:
        """Count fields that Hydra reads; raise an error if it has read too many."""
        self._left -= fields
        if self._left < 0:
            raise GraphoptError(
                f"{config_path}: expected recipes of at most {MOST_READ:,} fields with the recipes that they "
                "name, found more"
            )


class _Counted(ConfigResult):
    """Count the fields of a stranger's recipe each time that Hydra asks which others it names: a few name thousands."""

    def __init__(self, source: StrangersFolder, config_path: str, config: Any, header: dict[str, str | None]) -> None:
        costs = [EACH if field.startswith("defaults") else 1 for field, _ in flattened(config)]
        self._source, self._name, self._fields = source, config_path, 1 + sum(costs)
        super().__init__(source.provider, source.path, config, header)

    @property
    def defaults_list(self) -> Any:
        self._source.spend(self._name, self._fields)
        return self._defaults_list

    @defaults_list.setter
    def defaults_list(self, names: Any) -> None:
        self._defaults_list = names


class RunsRecipe(ConfigSource):
    """Give Hydra the recipe of a run, in parts, before graphopt's own; and refuse names that lead out of a folder.

    `configs` has the parts by their names: the primary config, and the kept option of each group.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        self.configs: Mapping[str, Mapping[str, object]] = {}

    @staticmethod
    def scheme() -> str:
        return "run"

    def available(self) -> bool:
        return True

    def is_group(self, config_path: str) -> bool:
        return False

    def is_config(self, config_path: str) -> bool:
        if os.path.isabs(config_path) or os.path.normpath(config_path).split(os.sep)[0] == os.pardir:
            raise GraphoptError(f"{config_path}: expected a recipe below its folder, found another file")
        return config_path in self.configs

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        return []

    def load_config(self, config_path: str) -> ConfigResult:
        config = self.configs[config_path]
        is_part = "/" in config_path  # whose field `defaults` is no list of recipes
        fields = {name: node for name, node in config.items() if not (is_part and name == "defaults")}
        header = {"package": None if config else "_global_"}
        return ConfigResult(self.provider, self.path, OmegaConf.create(fields), header)


class Sources(SearchPathPlugin):
    """Have Hydra look for recipes in a run first, and in folders of others last."""

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        if (folders := FOLDERS.get()) is not None:
            search_path.prepend("run", f"{RunsRecipe.scheme()}://")
            for folder in folders:
                search_path.append("command-line", f"{StrangersFolder.scheme()}://{folder}")


def _module(place: str) -> str:
    return place.replace("/", ".").rstrip(".")


def _check_package(name: str, path: str) -> None:
    """Raise an error unless a module is a package that has a file, which others lack that are only folders."""
    found = path
    try:
        spec = util.find_spec(name)
        if spec is not None and spec.origin is not None and spec.submodule_search_locations is not None:
            resources.files(name)
            return
    except Exception as error:  # noqa: BLE001 - a package's own code raises what it likes
        found = f"{path}, whose import fails: {type(error).__name__}: {line(error)}"
    raise GraphoptError(f"hydra.searchpath: expected an installed package with __init__.py, found {found}")


def _file_name(config_path: str) -> str:
    return config_path if config_path.endswith(".yaml") else f"{config_path}.yaml"


def register() -> None:
    """Have Hydra know these plugins."""
    for plugin in (StrangersFolder, RunsRecipe, Sources):
        Plugins.instance().register(plugin)

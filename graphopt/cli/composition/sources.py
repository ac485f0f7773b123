"""Read recipes that others have written for Hydra, by its plugins: each is checked as text before it is parsed."""

from __future__ import annotations

import contextlib
import io
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any, ClassVar

from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.object_type import ObjectType
from hydra.core.plugins import Plugins
from hydra.plugins.config_source import ConfigResult, ConfigSource
from hydra.plugins.search_path_plugin import SearchPathPlugin
from omegaconf import OmegaConf

from graphopt.cli.composition.expansion import MOST_BYTES, check_text, flattened, plain_of
from graphopt.errors import GraphoptError
from graphopt.files import check_plain, read_file

MOST_READ = 20_000  # values of recipes, each counted as often as it is read


class StrangersFolder(ConfigSource):
    """Read recipes of `untrusted://file://FOLDER` or `untrusted://pkg://PACKAGE`.

    Hydra copies a source for each recipe that it composes, so that each begins with the whole budget.
    """

    def __init__(self, provider: str, path: str) -> None:
        super().__init__(provider, path)
        kind, _, place = self.path.partition("://")
        self._root: Any = Path(place)
        if kind == "pkg":
            with contextlib.suppress(ValueError, ModuleNotFoundError, TypeError):  # it has no recipes then
                self._root = resources.files(place.replace("/", ".").rstrip("."))
        elif kind != "file":
            raise GraphoptError(f"hydra.searchpath: expected file://FOLDER or pkg://PACKAGE, found {self.path}")
        self._left = MOST_READ

    @staticmethod
    def scheme() -> str:
        return "untrusted"

    def available(self) -> bool:
        return self.is_group("")

    def is_group(self, config_path: str) -> bool:
        return bool(self._root.joinpath(config_path).is_dir())

    def is_config(self, config_path: str) -> bool:
        return bool(self._root.joinpath(self._normalize_file_name(config_path)).is_file())

    def list(self, config_path: str, results_filter: ObjectType | None) -> list[str]:
        names: list[str] = []
        for file in self._root.joinpath(config_path).iterdir():
            self._list_add_result(names, os.path.join(config_path, file.name), file.name, results_filter)
        return sorted(names)

    def load_config(self, config_path: str) -> ConfigResult:
        file = self._root.joinpath(self._normalize_file_name(config_path))
        if isinstance(file, Path):
            if not file.resolve().is_relative_to(self._root.resolve()):
                raise GraphoptError(f"{file}: expected a recipe below its folder, found a link to {file.resolve()}")
            content = read_file(file.resolve(), MOST_BYTES)
        else:
            content = file.read_bytes()
        check_text(str(file), content)
        text = io.StringIO(content.decode())
        text.name = str(file)  # which errors of YAML name
        config = OmegaConf.load(text)
        check_plain(plain_of(config), config_path)
        return _Counted(self, config_path, config, self._get_header_dict(text.getvalue()))

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
        self._source, self._name, self._fields = source, config_path, 1 + sum(1 for _ in flattened(config))
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

    folders: ClassVar[tuple[str, ...]] = ()

    def manipulate_search_path(self, search_path: ConfigSearchPath) -> None:
        search_path.prepend("run", f"{RunsRecipe.scheme()}://")
        for folder in self.folders:
            search_path.append("command-line", f"{StrangersFolder.scheme()}://{folder}")


def register() -> None:
    """Have Hydra know these plugins."""
    for plugin in (StrangersFolder, RunsRecipe, Sources):
        Plugins.instance().register(plugin)

"""Compose recipes with Hydra, and keep untrusted recipes from setting Hydra's own config."""

from __future__ import annotations

import contextlib
import functools
import io
import itertools
import json
import os
import re
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import hydra
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import ConfigSearchPath
from hydra.core.global_hydra import GlobalHydra
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import OverrideParseException
from hydra.plugins.config_source import ConfigSource
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.resolvers import oc

from graphopt.cli.composition.expansion import check_expansion, flattened, plain_of
from graphopt.cli.composition.record import NOT_TAKEN, RunRecord, enter, mapping, run_of
from graphopt.cli.composition.sources import FOLDERS, RunsRecipe, register
from graphopt.cli.run_folder import Before
from graphopt.errors import GraphoptError, unknown
from graphopt.overrides import in_shell, quoted

# A path, because `recipes` could be a package in the working directory.
RECIPES = Path(__file__).parents[3] / "recipes"
PRIMARY = "graphopt"
BASE = "base"  # the base recipe of a group, which is not an option
BRACKETS = (("[", "]"), ("{", "}"), ("(", ")"))
_HOST = re.compile(r"[+~]*(sweep|launcher)\b")  # what starts processes: a recipe cannot set it
_RUNS = 10_000  # the largest sweep that a recipe may ask for
_OF_TRAINED = (
    "calibrate",
    "evaluate",
    "predict",
    "generate",
    "export",
)  # verbs that use what a run has trained
_FIELDS_OF = {  # and the verbs that use them
    **dict.fromkeys(("base_name", "form"), ("export",)),
    "generate": ("generate",),
    "generate.tokenizer": ("generate", "train"),  # which may generate what it rewards
    "hosts": ("hosts",),
    "predictions": ("predict",),
    "prompt": ("generate",),
    "rows": ("evaluate", "explain", "predict", "calibrate"),
    "time": ("report",),
    "sensitivity": ("report",),
}
SEARCH_PATH = "hydra.searchpath"
SET_BY_HYDRA = ("job.override_dirname.", "runtime.choices.", "runtime.config_sources.")
REFUSED_RESOLVERS = {f"oc.{name}": getattr(oc, name) for name in ("create", "decode", "deprecated", "env")}
_of_hydra = threading.Lock()  # of its one global object
# What Hydra raises for configs of unexpected shapes.
COMPOSITION_ERRORS = (AssertionError, AttributeError, KeyError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class CommandLine:
    """Hold the arguments of the command line: those of `key=value`, further folders of recipes, and all of them.

    A folder is `file://FOLDER` or `pkg://PACKAGE`. `record` is the recipe of the run that the command line names.
    """

    overrides: tuple[str, ...] = ()
    folders: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    record: RunRecord | None = None

    @classmethod
    def of(cls, overrides: Sequence[str], folder: str | None) -> CommandLine:
        """Return the command line of a run with `--config-dir folder`."""
        if folder is not None and not os.path.isdir(folder):
            raise GraphoptError(f"--config-dir: expected a folder of recipes, found {folder!r}")
        added = [override.value() for override in _parse(*overrides) if override.key_or_group == SEARCH_PATH]
        named = [folder] if folder else []
        named += [str(item) for value in added for item in (value if isinstance(value, list) else [value])]
        return cls(
            tuple(overrides),
            tuple(folder if "://" in folder else f"file://{os.path.abspath(folder)}" for folder in named),
            (*overrides, *(["--config-dir", folder] if folder else [])),
            _record(overrides),
        )

    @property
    def strangers(self) -> tuple[str, ...]:
        """Return where recipes of others come from: folders, and the run whose recipe another has written."""
        return (*self.folders, *(() if self.record is None else self.record.strangers))

    @property
    def said(self) -> tuple[str, ...]:
        """Return the user's arguments, after those of the user's run that they name."""
        if self.record is None or not self.record.is_own:
            return self.overrides
        own = [x for x in _parse(*self.record.overrides) if x.key_or_group not in {*NOT_TAKEN} - {"trust"}]
        return (*(str(override.input_line) for override in own), *self.overrides)

    @property
    def replaced(self) -> list[str]:
        """Return the arguments that change fields of the named run, as in `fit.epochs=5 in place of fit.epochs=3`."""
        record, texts = self.record, {}
        if record is None:
            return []
        for override in _parse(*self.overrides):
            key, value = override.key_or_group, None if override.is_delete() else override.value()
            if override.is_hydra_override() or key.partition(".")[0] in NOT_TAKEN:
                continue
            old = record.choices[key] if key in record.choices else record.value(key)
            if value != old:
                new = override.get_value_string() if override.is_sweep_override() else _override_text(value)
                texts[key] = f"{key}={new} in place of {key}={_override_text(old)}"
        return list(texts.values())

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

    def check_sweep(self, *, is_multirun: bool) -> None:
        """Raise an error if the arguments ask for a sweep, which `-m` runs, or for another kind than chosen."""
        keys = [override.key_or_group for override in _parse(*self.overrides)]
        if is_multirun and self.record is not None and not {"resume", "recipe"} & {*keys}:
            raise GraphoptError(
                f"folder={self.record.folder}: expected no -m beside the folder of a run, found it: run the command "
                "once for each value"
            )
        for override in _parse(*self.overrides):
            line = override.input_line
            if is_multirun:
                _check_values(override)
                if override.is_sweep_override() and override.key_or_group in ("folder", "resume"):
                    raise GraphoptError(
                        f"{line}: expected one folder, found several: run the command for each of them, without -m"
                    )
                if override.is_interval_sweep() and not {"sweep", "hydra/sweeper"} & {*keys}:
                    raise GraphoptError(f"{line}: expected sweep=optuna beside it, which draws from intervals")
                continue
            if override.key_or_group == "sweep" and override.value() not in ("none", None):
                raise GraphoptError(f"{line}: expected -m beside it, found none: graphopt -m {line} ...")
            if override.is_interval_sweep():
                raise GraphoptError(f"{line}: expected one value, found an interval: search it with -m sweep=optuna")
            if override.is_sweep_override():
                raise GraphoptError(
                    f"{line}: expected one value, found several: run each with -m, or write a list as [a,b] and a "
                    "text with a comma in quotes"
                )

    def check_fields_of_verbs(self, verb: str) -> None:
        """Raise an error if the arguments set a field that only other verbs use."""
        for override in _parse(*self.overrides):
            field = override.key_or_group
            verbs = _FIELDS_OF.get(field) or _FIELDS_OF.get(field.partition(".")[0])
            if verbs is not None and verb not in verbs and not override.is_delete():
                raise GraphoptError(
                    f"{override.input_line}: expected {' or '.join(verbs)} beside it, found {verb}: leave it out, or "
                    f"write graphopt {verbs[0]} ..."
                )

    def _setting(self, field: str) -> list[Override]:
        return [override for override in _parse(*self.said) if override.key_or_group == field]

    def names(self, field: str) -> bool:
        """Return whether the command line sets a field of the recipe, by its name or in a mapping.

        A mapping sets the fields that it has; a recipe may add others. A choice of a group sets none.
        """
        for override in _parse(*self.said):
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


def _classes_of(group: str, options: Sequence[str]) -> list[str]:
    configs = (plain_of(OmegaConf.load(RECIPES / group / f"{option}.yaml")) for option in options)
    return [config["_target_"] for config in configs if "_target_" in config]


def _record(overrides: Sequence[str]) -> RunRecord | None:
    """Return the record of the run that `recipe=RUN` or `resume=PATH` names, or `folder=RUN` to use what it trained."""
    fields = {x.key_or_group: x.value() for x in _parse(*overrides) if not x.is_delete()}
    for name in ("data.path", "folder", "model", "recipe", "resume"):
        value = fields.get(name)
        if name in fields and (value in (None, "") or isinstance(value, list | dict)):
            raise GraphoptError(f"{name}: expected a path, found {_override_text(value) or 'an empty text'}")
    resume, folder, recipe = fields.get("resume"), fields.get("folder"), fields.get("recipe")
    if isinstance(recipe, str):
        if fields.get("run") in _OF_TRAINED:
            raise GraphoptError(f"recipe={recipe}: expected folder={recipe}, whose trained model {fields['run']} uses")
        record = None if isinstance(resume, str) else RunRecord.read(Path(recipe))
        if record is None:
            found = "resume beside it" if isinstance(resume, str) else "none there"
            raise GraphoptError(f"recipe={recipe}: expected the folder of a run, for a new run, found {found}")
        return record
    if isinstance(resume, str):
        run = run_of(resume)
        return None if run is None else RunRecord.read(run)
    uses = fields.get("run") in _OF_TRAINED and not resume and isinstance(folder, str)
    return RunRecord.read(Path(str(folder))) if uses else None


def _check_values(override: Override) -> None:
    """Raise an error if an argument of a sweep has no value to try."""
    values: Any = override.value()
    if override.is_interval_sweep() and not values.start < values.end:
        raise GraphoptError(
            f"{override.input_line}: expected the smaller number first, found {values.start} before {values.end}"
        )
    if override.is_discrete_sweep() and not any(True for _ in override.sweep_iterator()):
        raise GraphoptError(f"{override.input_line}: expected values to try, found none")


def _override_text(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, default=str)


def _has(value: object, names: Sequence[str]) -> bool:
    """Return whether nested mappings have a value at a path, or a plain value in place of one of its parents."""
    if not names or not isinstance(value, dict):
        return True
    return names[0] in value and _has(value[names[0]], names[1:])


class RecipeLoader(ConfigLoader):
    """Compose recipes, and reject forbidden fields of untrusted recipes before Hydra acts on them.

    Hydra calls `load_configuration` for a single run, for each run of a sweep and for help. The node `hydra` of a
    composed config must equal the one from graphopt's own recipes and the command line, except for the values to
    sweep over, `hydra.sweeper.params`.

    Args:
        hydras: Hydra's loader, which searches the folders of the command line, too.
        own: Hydra's loader of graphopt's own recipes.
    """

    def __init__(self, hydras: ConfigLoader, own: ConfigLoader, command_line: CommandLine) -> None:
        self._hydras, self._own = hydras, own
        self._command_line, self._record = command_line, command_line.record
        self.before: Before | None = None  # what the folder has, once a recipe is composed
        self.check: Callable[[DictConfig], object] | None = None  # of each job of a sweep, before the first one
        self._entered: set[str] = set()  # the folders of runs that were checked
        self._kept: dict[str, str] = {}  # the options that the recipe has from the record
        self._changed: dict[str, Any] = {}  # the options that the command line has in place of those of the record

    def load_configuration(self, config_name: str | None, overrides: list[str], *how: Any, **named: Any) -> DictConfig:
        for name in REFUSED_RESOLVERS:
            OmegaConf.clear_resolver(name)
        overrides = _without_folders(overrides)
        self._check_groups(overrides)
        if self._record is not None:
            overrides = self._repeatable(self._record, overrides)
            source = next(source for source in self.get_sources() if isinstance(source, RunsRecipe))
            source.configs = self._parts(self._record)
        try:
            config = self._hydras.load_configuration(config_name, overrides, *how, **named)
            choices: Any = config.hydra.runtime.choices
            with open_dict(choices):
                choices.update(self._kept)
            if self._command_line.folders:
                self._check(config, config_name, overrides, *how, **named)
            self._check_new_fields(config, overrides)
            if config.get("experiment"):
                name = config.hydra.runtime.choices.experiment
                raise GraphoptError(
                    f"experiment={name}: expected '# @package _global_' as the first line, without which it sets "
                    "nothing, found another"
                )
            check_expansion(config)
            if config_name is not None:
                places = config.hydra.run.dir, config.hydra.sweep.dir
                for place in {*places} - self._entered:
                    enter(Path(place))
                self._entered |= {*places}
                self.before = self.before or Before(Path(config.hydra.run.dir))
        except COMPOSITION_ERRORS as error:
            if isinstance(error, GraphoptError):
                raise
            raise GraphoptError(f"recipe: expected a config that Hydra can compose: {error}") from error
        return config

    def load_sweep_config(self, master_config: DictConfig, sweep_overrides: list[str]) -> DictConfig:
        overrides = [*plain_of(master_config.hydra.overrides.hydra), *sweep_overrides]
        config = self.load_configuration(master_config.hydra.job.config_name, overrides, RunMode.RUN)
        OmegaConf.copy_cache(from_config=master_config, to_config=config)  # the time is the same in all jobs
        if self.check is not None:
            self.check(config)
        return config

    def get_search_path(self) -> ConfigSearchPath:
        return self._hydras.get_search_path()

    def get_sources(self) -> list[ConfigSource]:
        return self._hydras.get_sources()

    def list_groups(self, parent_name: str) -> list[str]:
        return self.get_group_options(parent_name, ObjectType.GROUP)

    def get_group_options(
        self, group_name: str, results_filter: ObjectType | None = ObjectType.CONFIG, *_: Any, **__: Any
    ) -> list[str]:
        sources = [source for source in self.get_sources() if source.is_group(group_name)]
        return sorted({option for source in sources for option in source.list(group_name, results_filter)})

    def compute_defaults_list(self, config_name: str | None, overrides: list[str], run_mode: RunMode) -> Any:
        return self._hydras.compute_defaults_list(config_name, _without_folders(overrides), run_mode)

    def _is_group(self, name: str) -> bool:
        return any(source.is_group(name) for source in self.get_sources())

    def _check_groups(self, overrides: list[str]) -> None:
        """Raise an error if the value of a group is no option, or a group is deleted to which the recipe refers."""
        for override in _parse(*overrides):
            group, line = override.key_or_group, override.input_line
            is_gone = override.is_delete() and f"~pipeline.{group}" not in overrides
            if not group:
                raise GraphoptError(f"{line}: expected FIELD=VALUE, found no field")
            if not self._is_group(group):
                if is_gone and group in base_recipe().keys() - {"defaults", "hydra"}:
                    raise GraphoptError(f"{line}: expected a recipe with {group}, found its removal: leave {line} out")
                continue
            if override.is_add() and (RECIPES / group).is_dir():
                raise GraphoptError(
                    f"{line}: expected it without +, because the recipe has this group: {str(line).lstrip('+')}"
                )
            options = [x for x in self.get_group_options(group) if x != BASE]
            none = f": {group}=none leaves it out" if "none" in options else ""
            known = f"expected an option of {group}, {', '.join(options)}"
            if is_gone and not override.value() and group != "experiment":
                raise GraphoptError(f"{line}: {known}, found its removal{none}")
            is_value = not override.is_delete() and not override.is_sweep_override()
            if is_value and not isinstance(override.value(), str):
                found, several = override.get_value_string(), override.value()
                is_group = group in base_recipe()["pipeline"]
                if is_group and isinstance(several, list) and {*several} <= {*options}:
                    first, *others = several
                    if others and len(classes := _classes_of(group, others)) == len(others):
                        more = ",".join(f"{{_target_:{x}}}" for x in classes)
                        raise GraphoptError(
                            f"{line}: expected one option of {group}, found {len(several)}: write {group}={first} "
                            f"'pipeline.{group}=[${{{group}}},{more}]'"
                        )
                field = none if found in ("null", "false") else f": its fields are set by {group}.FIELD=VALUE"
                raise GraphoptError(f"{line}: {known}, found {found}{field}")

    def _check_new_fields(self, config: DictConfig, overrides: list[str]) -> None:
        """Raise an error if the command line adds a field to the recipe that nothing in it refers to."""
        known = {*base_recipe(), *config.hydra.runtime.choices} - {"defaults"}
        for override in _parse(*overrides):
            name = override.key_or_group.partition(".")[0]
            is_new = (override.is_add() or override.is_force_add()) and name not in known
            is_own = self._record is not None and name in self._record.fields
            if is_new and not is_own and f"${{{name}" not in OmegaConf.to_yaml(config):
                names = [x for x in known if not str(x).startswith("hydra/")]
                raise GraphoptError(f"{override.input_line}: {unknown('option', name, names, known_fields())}")

    def _repeatable(self, record: RunRecord, overrides: list[str]) -> list[str]:
        """Return overrides without those that a record has already and that Hydra would not do again.

        Note the groups of which the record's option is kept.
        """
        items = _parse(*overrides)
        named = {x.key_or_group: x.value() for x in items if not x.is_delete() and isinstance(x.value(), str)}
        self._changed = {
            group: choice
            for group, choice in named.items()
            if self._is_group(group) and choice != record.choices.get(group)
        }
        for group, choice in self._changed.items():
            is_whole = group == "experiment" or group not in record.fields
            if is_whole and group not in (*NOT_TAKEN, "sweep"):
                raise GraphoptError(
                    f"{group}={choice}: expected single groups and fields beside the recipe of {record.folder}, "
                    "found a whole recipe: name groups and fields"
                )
        self._kept = {
            group: choice
            for group, choice in record.choices.items()
            if not group.startswith("hydra/") and group not in {*NOT_TAKEN, "sweep", *self._changed}
        }
        lines = []
        for item in items:
            line = str(item.input_line)
            if line in record.overrides and item.is_add():
                line = f"+{line}"
            if not (line in record.overrides and item.is_delete()):
                lines.append(line)
        return lines

    def _parts(self, record: RunRecord) -> dict[str, Mapping[str, object]]:
        """Return a record as recipes: the primary one, and the option of each group that is kept."""
        base = base_recipe()
        own = {name: node for name, node in record.fields.items() if name not in {*NOT_TAKEN, "sweep", *self._changed}}
        if "fit" in own:  # an older run lacks fields that have been added since
            own["fit"] = {**base["fit"], **mapping(own["fit"])}
        chosen = {
            group: option for default in base["defaults"] if default != "_self_" for group, option in default.items()
        }
        recorded = [group for group in chosen if group in own or group == "experiment"]  # which has set fields before
        chosen |= {group: name for group in recorded if re.fullmatch(r"[\w-]+", name := self._kept.get(group, ""))}
        parts = {f"{group}/{chosen[group]}": mapping(own.get(group)) for group in recorded}
        defaults = [x if x == "_self_" else {group: chosen[group] for group in x} for x in base["defaults"]]
        return {**parts, PRIMARY: {**base, **own, "defaults": defaults}}

    def _check(
        self, config: DictConfig, config_name: str | None, overrides: list[str], *how: Any, **named: Any
    ) -> None:
        """Raise an error if a recipe sets `folder`, `launcher`, `trust` or Hydra's own config."""
        lines: dict[bool, list[str]] = {True: [], False: []}
        for override in _parse(*overrides):
            lines[override.is_hydra_override()].append(str(override.input_line))
        said = self._command_line.overrides
        allowed = [line for line in lines[True] if line in said or line.startswith("hydra.mode=")]
        allowed += [line for line in lines[False] if line in said and _HOST.match(line)]
        expected = self._own.load_configuration(config_name, allowed, *how, **named)
        own, plain = plain_of(expected), plain_of(config)
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

    def _check_runs(self, swept: Mapping[str, object]) -> None:
        """Raise an error if a recipe asks for too many runs, such as `range(0,1e9)`, before Hydra lists them."""
        for name, value in swept.items():
            if not isinstance(value, bool | int | float | str) or "${" in str(value):
                raise GraphoptError(f"hydra.sweeper.params.{name}: expected values such as 1,2,3, found {value!r}")
        runs, parser = 1, OverridesParser.create(config_loader=self)
        for override in parser.parse_overrides([f"{name}={value}" for name, value in swept.items()]):
            if override.is_sweep_override():
                runs *= sum(1 for _ in itertools.islice(override.sweep_iterator(), _RUNS + 1))
            if runs > _RUNS:
                raise GraphoptError(f"hydra.sweeper.params: expected at most {_RUNS:,} runs, found more")


@contextlib.contextmanager
def composing(command_line: CommandLine) -> Iterator[Any]:
    """Yield Hydra, configured to compose and run recipes, in a `with` block."""
    returned: Any = JobReturn.return_value
    JobReturn.return_value = returned.getter(functools.partial(_returned, returned))  # type: ignore[method-assign]
    try:
        own, application = _hydra_of(()), _hydra_of(command_line.folders)
        application.config_loader = RecipeLoader(application.config_loader, own.config_loader, command_line)
        yield application
    finally:
        JobReturn.return_value = returned  # type: ignore[method-assign]
        GlobalHydra.instance().clear()
        for name, resolver in REFUSED_RESOLVERS.items():
            OmegaConf.register_new_resolver(name, resolver, replace=True)


def _hydra_of(folders: tuple[str, ...]) -> Any:
    """Return Hydra, which finds graphopt's recipes and those of others in some folders."""
    with _of_hydra:
        register()
        GlobalHydra.instance().clear()
        given = FOLDERS.set(folders)
        try:
            hydra.initialize_config_dir(str(RECIPES), job_name=PRIMARY, version_base="1.3")
        finally:
            FOLDERS.reset(given)
        return GlobalHydra.instance().hydra


def _without_folders(overrides: list[str]) -> list[str]:
    """Return overrides without those of Hydra's search path, which has their folders already."""
    return [str(item.input_line) for item in _parse(*overrides) if item.key_or_group != SEARCH_PATH]


def _returned(hydras: property, job: JobReturn) -> Any:
    """Return what a job of a sweep has returned, or raise its error, without the line that Hydra prints before."""
    with contextlib.redirect_stderr(io.StringIO()):
        return hydras.__get__(job)


@functools.lru_cache
def _parse(*overrides: str) -> list[Override]:
    """Parse arguments with Hydra's grammar."""
    try:
        return OverridesParser.create().parse_overrides(list(overrides))
    except OverrideParseException as error:
        line = str(error.override)
        key = line.partition("=")[0].lstrip("+~")
        if any(line.count(one) != line.count(other) for one, other in BRACKETS):
            mend = f'close its brackets, and quote it if it has spaces, as in "{key}=[a, b]"'
        else:
            text = line.partition("=")[2]
            example = [f"{key}={quoted(text if text.count(chr(39)) % 2 else 'a text')}"]
            mend = f"write one = and no comma at the end, and quote a text, as in {in_shell(example)}"
        raise GraphoptError(f"{line}: expected FIELD=VALUE, found what Hydra cannot read: {mend}") from error


@functools.cache
def base_recipe() -> dict[str, Any]:
    """Return graphopt's own recipe, as its file has it."""
    return dict(plain_of(OmegaConf.load(RECIPES / f"{PRIMARY}.yaml")))


@functools.cache
def known_fields() -> tuple[str, ...]:
    """Return the paths of all fields in graphopt's own recipes, those that are named most last."""
    fields = [name for name, _ in flattened(base_recipe())]
    own = [name for name in fields if not name.startswith(("defaults", "hydra", "models", "pipeline"))]
    groups = sorted(path for path in RECIPES.glob("*/*.yaml") if path.parent.name not in ("experiment", "sweep"))
    parts = [f"{path.parent.name}.{name}" for path in groups for name, _ in flattened(OmegaConf.load(path)) if name]
    groups_alone = [path.parent.name for path in groups]
    return tuple(dict.fromkeys(x.partition("[")[0] for x in reversed([*own, *groups_alone, *parts])))


def options_of(group: str) -> dict[str, dict[str, Any]]:
    """Return the options of a group, with their fields."""
    files = sorted((RECIPES / group).glob("*.yaml"))
    recipes = {x.stem: plain_of(OmegaConf.load(x)) or {} for x in files}
    base = recipes.pop(BASE, {})
    return {name: {**(base if BASE in x.get("defaults", ()) else {}), **x} for name, x in recipes.items()}


def on_the_command_line(field: str) -> GraphoptError:
    """Return the error of a field, or of an item of a list in it, that recipes must not set."""
    name = field.rstrip("0123456789").removesuffix(".")
    return GraphoptError(f"{name}: expected it on the command line alone, found it in a recipe")

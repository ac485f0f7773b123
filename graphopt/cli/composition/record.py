"""Keep the recipe of a run in its folder, and read it from there: as a stranger's recipe, unless this user wrote it."""

from __future__ import annotations

import hmac
import json
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from filelock import FileLock
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from graphopt.cli.composition.expansion import MOST_BYTES, Fields, read_config
from graphopt.cli.run_folder import CHECKPOINTS, CONFIG, METRICS_FILE, OF_COMMAND_LINE, check_run
from graphopt.errors import GraphoptError
from graphopt.files import json_of, read_regular, write_folder
from graphopt.targets.native.cache import cache_folder, read_cached, write_cached

HYDRA = ".hydra"
COMPOSED, OPTIONS, OVERRIDES = "config.yaml", "hydra.yaml", "overrides.yaml"
SIGNATURE = "signature.json"  # of the three files, by a key in the user's cache, and the folders of recipes
# Fields that another run does not take from the record
NOT_TAKEN = (*OF_COMMAND_LINE, "hydra", "trust")
_KEY, _ROOM = "key", "runs"
_SECRET = 0o600  # only this user reads and writes the key


@dataclass(frozen=True)
class RunRecord:
    """Hold the recipe of a run.

    Args:
        folder: the run.
        fields: the recipe as it was composed, with references.
        resolved: the recipe with all references resolved.
        choices: the chosen option of each group.
        overrides: the command lines of the run.
        strangers: where recipes of others came from, as in `CommandLine.folders`.
        is_own: whether this user has run this recipe, so that all that it says was said or checked before.
        started_in: the working directory of the command.
    """

    folder: Path
    fields: Fields
    resolved: Fields
    choices: Mapping[str, str] = field(default_factory=dict)
    overrides: tuple[str, ...] = ()
    strangers: tuple[str, ...] = ()
    is_own: bool = False
    started_in: str = ""

    @classmethod
    def read(cls, folder: Path) -> RunRecord | None:
        """Return the record of a run; None if there is no run. An old run has only its resolved recipe."""
        strangers = enter(folder)
        if not (folder / CONFIG).is_file():
            return None
        resolved = mapping(read_config(folder / CONFIG))
        place = folder / HYDRA
        if not all((place / name).is_file() for name in (COMPOSED, OPTIONS, OVERRIDES)):
            return cls(folder, _with_references(resolved), resolved, _choices(resolved), strangers=(_uri(folder),))
        fields, hydra, overrides = (read_config(place / name) for name in (COMPOSED, OPTIONS, OVERRIDES))
        runtime = mapping(select(hydra, "hydra.runtime"))
        return cls(
            folder,
            mapping(fields),
            resolved,
            {str(group): str(choice) for group, choice in mapping(runtime.get("choices")).items()},
            tuple(map(str, overrides)) if isinstance(overrides, list) else (),
            (_uri(folder),) if strangers is None else strangers,
            strangers is not None,
            str(runtime.get("cwd", "")),
        )

    def value(self, name: str) -> object:
        """Return a field of the recipe as the run named it, or None."""
        named = select(self.fields, name)
        return select(self.resolved, name) if "${" in str(named) else named


def enter(folder: Path) -> tuple[str, ...] | None:
    """Check the folder of a run before anything in it is read or written: all of it, if the run is someone else's.

    Return the folders of recipes in the signature of the run, or None if it is not this user's.

    Raises:
        GraphoptError: it has links, devices, pipes or files with several names.
    """
    check_run(folder)
    strangers = _signed(folder / HYDRA)
    holds_run = any((folder / name).exists() for name in (HYDRA, CHECKPOINTS, METRICS_FILE))
    if strangers is None and holds_run:
        check_run(folder, whole=True)
    return strangers


def run_of(path: str) -> Path | None:
    """Return the folder of the run that a path names: the run, its checkpoints, or one of them."""
    place = Path(path)
    run = next((x.parent for x in (place, place.parent) if x.name == CHECKPOINTS), place)
    return run if (run / CONFIG).is_file() else None


def write_record(
    folder: Path,
    config: DictConfig,
    record: RunRecord | None = None,
    strangers: tuple[str, ...] = (),
    *,
    is_checked: bool = True,
) -> None:
    """Write `.hydra` as Hydra does: the recipe, Hydra's own options, and the overrides of all command lines so far.

    It is signed unless the recipe comes from a `record` that is not.

    Args:
        strangers: where recipes of others came from.
        is_checked: sign it, because the recipe has passed all checks.
    """
    hydra: Any = HydraConfig.instance().cfg
    task = list(hydra.hydra.overrides.task)
    before = [] if record is None else [line for line in record.overrides if line not in task]
    parts = {COMPOSED: config, OPTIONS: hydra, OVERRIDES: OmegaConf.create([*before, *task])}
    texts = {name: OmegaConf.to_yaml(part).encode() for name, part in parts.items()}
    key = _key() if is_checked and (record is None or record.is_own) else None
    note = {"strangers": list(strangers), "hmac": _mac(key, texts, strangers) if key else None}
    write_folder(folder / HYDRA, {**texts, SIGNATURE: json.dumps(note).encode()})


def _signed(place: Path) -> tuple[str, ...] | None:
    """Return the folders of recipes in a signature by this user, or None if there is none."""
    texts = {name: read_regular(place / name, MOST_BYTES) or b"" for name in (COMPOSED, OPTIONS, OVERRIDES)}
    try:
        note = json_of(read_regular(place / SIGNATURE, MOST_BYTES) or b"null", SIGNATURE)
        strangers, found = tuple(map(str, note["strangers"])), str(note["hmac"])
    except (GraphoptError, KeyError, TypeError):
        return None
    key = _key()
    is_own = key is not None and hmac.compare_digest(_mac(key, texts, strangers).encode(), found.encode())
    return strangers if is_own else None


def _mac(key: bytes, texts: Mapping[str, bytes], strangers: tuple[str, ...]) -> str:
    parts = [*(texts[name] for name in (COMPOSED, OPTIONS, OVERRIDES)), json.dumps(strangers).encode()]
    return hmac.new(key, b"".join(b"%d %s" % (len(part), part) for part in parts), "sha256").hexdigest()


def _key() -> bytes | None:
    """Return the key that signs the runs of this user; None if no folder for it belongs to this user only."""
    try:
        with FileLock(cache_folder(_ROOM) / ".lock"):
            key = read_cached(_KEY, _ROOM)
            if key is None:
                key = secrets.token_bytes(32)
                write_cached(_KEY, key, _ROOM, mode=_SECRET)
            (cache_folder(_ROOM) / _KEY).chmod(_SECRET)  # older versions let others read it
            return key
    except (GraphoptError, OSError):
        return None


def select(node: object, name: str) -> Any:
    for key in name.split("."):
        node = node.get(key) if isinstance(node, Mapping) else None
    return node


def mapping(node: object) -> Fields:
    return node if isinstance(node, Mapping) else {}


def _with_references(resolved: object) -> Mapping[str, object]:
    """Return a resolved recipe whose pipeline refers to the other parts again."""
    fields = dict(mapping(resolved))
    steps = mapping(fields.get("pipeline"))
    pipeline = {
        name: f"${{{name}}}" if name in fields and fields[name] == step else step for name, step in steps.items()
    }
    return {**fields, "pipeline": pipeline}


def _choices(resolved: Fields) -> dict[str, str]:
    """Return names for the options of a recipe that does not say them: `none`, or the name of the class."""
    parts = {name: node for name, node in resolved.items() if node is None or "_target_" in mapping(node)}
    return {name: "none" if node is None else str(node["_target_"]).rpartition(".")[2] for name, node in parts.items()}


def _uri(folder: Path) -> str:
    return f"file://{folder.resolve()}"

"""Write the folder of a run, and find the one that a run continues."""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import onnx_ir as ir
import yaml  # type: ignore[import-untyped]
from filelock import FileLock, Timeout
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from graphopt.errors import GraphoptError
from graphopt.files import write, write_folder
from graphopt.graph.storage import save
from graphopt.training.callbacks import JSONL, Run
from graphopt.training.callbacks.logs import json_value
from graphopt.training.checkpoints import find

METRICS_FILE, CONFIG, CHECKPOINTS, RESULT = "metrics.jsonl", "config.yaml", "checkpoints", "result.json"
OWN_FILES = (
    *(METRICS_FILE, CONFIG, CHECKPOINTS, RESULT, "step.onnx", "trained.onnx", "report.html", "graphopt.log"),
    *(".hydra", ".lock", ".ray", "."),
)


class RunFolder(JSONL):
    """Write step.onnx, config.yaml and metrics.jsonl of a training run, once `fit` has checked the data."""

    def __init__(self, folder: Path, step: ir.Model, config: str, *, log_steps: bool = False) -> None:
        super().__init__(folder / METRICS_FILE, log_steps=log_steps)
        self._folder, self._step, self._config = folder, step, config

    def on_fit_begin(self, run: Run) -> None:
        self.run = run
        save(self._step, self._folder / "step.onnx")
        write(self._folder / CONFIG, self._config)
        super().on_fit_begin(run)


def resumed(resume: bool | str, folder: Path, config: str, *, search: bool) -> tuple[Path, Path | bool]:
    """Return the folder of a run, and the checkpoint that it continues, or False for a new run.

    A run that ended before its first checkpoint gives True instead: it starts over.

    Args:
        resume: True for the newest run of the same recipe; the path of a run or of a checkpoint; False for a new run.
        folder: the folder that Hydra has made for the run.
        config: the recipe.
        search: look for the newest run in neighbouring folders, too, because the folder's name is the time.
    """
    if not resume:
        return folder, False
    if isinstance(resume, str):
        checkpoint = find(resume)
        run = checkpoint.parents[1]
        return (run if (run / CONFIG).is_file() else folder), checkpoint
    wanted = _identity(config)
    candidates = folder.resolve().parents[1].glob(f"*/*/{CONFIG}") if search else ()
    places = [folder, *(Path(os.path.relpath(path.parent)) for path in candidates)]
    places = [path for path in dict.fromkeys(places) if (path / CONFIG).is_file()]
    for place in sorted(places, key=lambda path: (path != folder, -path.stat().st_mtime)):
        if _identity_of(place) == wanted:
            with contextlib.suppress(GraphoptError):
                checkpoint = find(place)
                if place != folder:
                    leave(folder, place)
                return place, checkpoint
            if place == folder:
                return folder, True
    if folder in places and _holds_run(folder):
        others = sorted(_leaves(_identity_of(folder)).items() - _leaves(wanted).items())
        raise GraphoptError(
            f"{folder}: expected a run of the same recipe, found one with "
            f"{', '.join(f'{name}={value}' for name, value in others[:3]) or 'fewer fields'}: continue it with "
            f"resume={folder}, or choose another with folder=..."
        )
    return folder, False


def write_result(folder: Path, value: float) -> None:
    """Note that a run of a sweep is complete, and the number that the sweep minimizes."""
    write(folder / RESULT, json.dumps({"value": json_value(value)}))


def result(folder: Path, config: str) -> float | None:
    """Return what a complete run of the same recipe in a folder has noted, or None if there is no such run."""
    if not (folder / RESULT).is_file() or _identity_of(folder) != _identity(config):
        return None
    value = json.loads((folder / RESULT).read_text(encoding="utf-8"))["value"]
    return math.inf if value is None else float(value)


def leave(folder: Path, place: Path) -> None:
    """Remove the folder that Hydra has made for a run, and write its log files, which are yet empty, elsewhere."""
    for handler in logging.getLogger().handlers:
        if isinstance(handler, logging.FileHandler) and handler.stream is None:
            handler.baseFilename = os.path.abspath(place / Path(handler.baseFilename).name)
    folder.rmdir()


def write_hydra(folder: Path, config: DictConfig) -> None:
    """Write `.hydra` as Hydra does: the recipe, Hydra's own options, and the overrides."""
    hydra: Any = HydraConfig.instance().cfg
    parts = {"config": config, "hydra": hydra, "overrides": hydra.hydra.overrides.task}
    texts = {f"{name}.yaml": OmegaConf.to_yaml(part).encode() for name, part in parts.items()}
    write_folder(folder / ".hydra", texts)


@contextlib.contextmanager
def locked(folder: Path, is_new: bool) -> Iterator[None]:
    """Keep other processes from running in a folder, without a run if `is_new`, in a `with` block."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / ".lock", timeout=0).acquire()
    except Timeout as error:
        raise GraphoptError(
            f"{folder}: expected a folder of its own, found a run that is in progress there"
        ) from error
    except OSError as error:
        raise GraphoptError(f"{folder}: expected a folder to write to: {error.strerror}") from error
    with lock:
        if is_new and _holds_run(folder):
            raise GraphoptError(
                f"{folder}: expected a folder without a run, found one: continue it with resume=true, or choose "
                "another with folder=..."
            )
        yield


def _holds_run(folder: Path) -> bool:
    return (folder / METRICS_FILE).exists() or any((folder / CHECKPOINTS).glob("step-*"))


def _leaves(fields: Any, name: str = "") -> dict[str, str]:
    """Return the values of nested fields as overrides have them, by their dotted names."""
    if not isinstance(fields, dict):
        return {name: fields if isinstance(fields, str) else json.dumps(fields, default=str)}
    parts = (_leaves(value, f"{name}.{key}" if name else str(key)) for key, value in fields.items())
    return {leaf: value for part in parts for leaf, value in part.items()}


def _identity_of(folder: Path) -> dict[str, Any]:
    return _identity((folder / CONFIG).read_text(encoding="utf-8"))


def _identity(config: str) -> dict[str, Any]:
    """Return what makes two recipes the same."""
    others = ("folder", "launcher", "predictions", "quiet", "resume", "run")
    return {name: value for name, value in (yaml.safe_load(config) or {}).items() if name not in others}

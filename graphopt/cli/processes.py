"""Keep modules of the working directory from hiding installed ones, here and in the processes of a run."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from importlib.machinery import all_suffixes
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from graphopt.errors import GraphoptError

HOME = Path(__file__).parents[2]  # what `graphopt` itself is imported from
SAFE = "PYTHONSAFEPATH"  # read by Python 3.11 and later: `python -m` does not search the working directory
_PLAIN = "NO_COLOR"  # read by Optuna's log, too
IN_THIS_PROCESS = "BasicLauncher"  # of Hydra
SEARCHES_HERE = "hydra_plugins.hydra_ray_launcher"  # Ray has its workers search the working directory first


@contextlib.contextmanager
def installed_first() -> Iterator[None]:
    """Search the working directory for modules after all other places, in a `with` block.

    `python -m graphopt` searches it first. Processes that start in the block do not search it, or search it last.
    """
    path, environment = list(sys.path), dict(os.environ)
    sys.path[:] = sorted(path, key=_is_here)
    set_here = [SAFE, *([] if sys.stderr.isatty() else [_PLAIN])]
    for name in set_here:
        os.environ.setdefault(name, "1")
    try:
        yield
    finally:
        sys.path[:] = path
        for name in set_here:
            if name not in environment:
                os.environ.pop(name, None)


def check_processes(hydra: DictConfig) -> None:
    """Raise an error if processes of a sweep would search a working directory that has Python modules."""
    launcher = str(OmegaConf.select(hydra, "launcher._target_"))
    if launcher.endswith(IN_THIS_PROCESS) or (sys.version_info >= (3, 11) and not launcher.startswith(SEARCHES_HERE)):
        return
    endings = tuple(all_suffixes())
    for entry in sorted(Path.cwd().iterdir()):
        is_module = entry.name.endswith(endings)
        if is_module or (entry.is_dir() and any(file.name.endswith(endings) for file in entry.iterdir())):
            raise GraphoptError(
                f"hydra/launcher={hydra.runtime.choices['hydra/launcher']}: expected a working directory without "
                f"Python modules, which its processes would search first, found {entry.name}{'' if is_module else '/'}"
                ": start it in another folder, or use sweep=parallel with Python 3.11 or later"
            )


def _is_here(place: str) -> bool:
    here = os.path.realpath(place) == os.path.realpath(os.getcwd())
    return here and not HOME.samefile(os.getcwd())

"""Make environments with only the packages of some extras, as users have them, out of the one that runs the tests."""

from __future__ import annotations

import functools
import subprocess
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[1]


def packages_of(requirement: str, found: set[tuple[str, str]] | None = None) -> set[str]:
    """Return the names of the installed packages that pip installs for a requirement such as `graphopt[cpu]`."""
    found = set() if found is None else found
    wanted = Requirement(requirement)
    name = canonicalize_name(wanted.name)
    for extra in ("", *wanted.extras):
        if (name, extra) in found:
            continue
        try:
            needed = metadata.requires(name) or []
        except metadata.PackageNotFoundError:
            continue
        found.add((name, extra))
        for text in needed:
            marker = Requirement(text).marker
            if marker is None or marker.evaluate({"extra": extra}):
                packages_of(text, found)
    return {name for name, _ in found}


@functools.cache
def installed() -> tuple[dict[str, set[str]], dict[str, dict[str, list[Path]]]]:
    """Return who owns each file or folder at the top of site-packages, and the files of each package below these."""
    owners: dict[str, set[str]] = defaultdict(set)
    files: dict[str, dict[str, list[Path]]] = defaultdict(lambda: defaultdict(list))
    for distribution in metadata.distributions():
        name = canonicalize_name(distribution.name)
        for file in distribution.files or ():
            owners[file.parts[0]].add(name)
            files[name][file.parts[0]].append(file)
    return owners, files


def environment(folder: Path, requirements: list[str]) -> Path:
    """Make an environment with links to the files of some packages and all that they need; return its Python."""
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", folder], check=True)
    (site,) = folder.glob("lib/python*/site-packages")
    allowed = {name for requirement in requirements for name in packages_of(requirement)}
    owners, files = installed()
    for name in allowed:
        place = Path(metadata.distribution(name).locate_file(""))
        for top, parts in files[name].items():
            is_own = top != ".." and owners[top] <= allowed
            for part in [Path(top)] if is_own else parts:  # such as the plugins of Hydra, and commands
                (site / part).parent.mkdir(parents=True, exist_ok=True)
                if not (site / part).exists():
                    (site / part).symlink_to(place / part)
    (site / "graphopt.pth").write_text(f"{ROOT}\n")
    return folder / "bin" / "python"

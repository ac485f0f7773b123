"""Build packages as setuptools does, with a README whose links lead into the repository, from wherever it is shown."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from setuptools import build_meta
from setuptools.build_meta import *  # noqa: F403

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

LINK = re.compile(r'(\]\(|\b(?:src|srcset|href)=")(?![a-z]+:|#)([^)\s"]+)')
PICTURES = (".gif", ".jpg", ".png", ".svg")

__all__ = build_meta.__all__


def with_absolute_links(text: str, repository: str, version: str) -> str:
    """Let relative links of a page lead to the files of a version, which the repository tags as v0.1.0."""

    def lead(found: re.Match[str]) -> str:
        kind = "raw" if found[2].endswith(PICTURES) else "blob"
        return f"{found[1]}{repository}/{kind}/v{version}/{found[2]}"

    return LINK.sub(lead, text)


project = tomllib.loads(Path("pyproject.toml").read_text(encoding="utf-8"))["project"]
page = Path("build/README.md")
page.parent.mkdir(exist_ok=True)
page.write_text(
    with_absolute_links(
        Path("README.md").read_text(encoding="utf-8"), project["urls"]["Repository"], project["version"]
    ),
    encoding="utf-8",
)

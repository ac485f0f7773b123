"""Refuse a module of another project that has the name of the package `passes`."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

from graphopt.errors import GraphoptError

NAME = "passes"
_OWN = Path(__file__).parents[1] / NAME / "__init__.py"


class _Checked:
    """Find the package only if Python's search ends at graphopt's own."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        if name == NAME:
            found = PathFinder.find_spec(name)
            check_namesake(None if found is None else found.origin)
            if found is not None and found.origin is None:  # a folder without code, before an editable installation
                return spec_from_file_location(NAME, _OWN)
        return None


def check_namesake(file: str | None) -> None:
    """Raise an error if a file is another one than that of the package; a folder without code has no file."""
    if file is None or Path(file).resolve() == _OWN.resolve():
        return
    raise _hidden(*(("folder", Path(file).parent) if Path(file).stem == "__init__" else ("file", file)))


def _hidden(kind: str, place: object) -> GraphoptError:
    return GraphoptError(
        f"{place}: expected another name: this {kind} hides graphopt's package {NAME!r}, which graphopt imports: "
        f"rename the {kind}"
    )


_imported = sys.modules.get(NAME)
_folders = getattr(_imported, "__path__", ())  # of a package without code, too
_file = getattr(_imported, "__file__", None) or next((f"{x}/__init__.py" for x in _folders), None)
if _imported is not None and _file is None:
    raise _hidden("module", f"sys.modules[{NAME!r}]")
check_namesake(_file)
sys.meta_path.insert(0, _Checked)

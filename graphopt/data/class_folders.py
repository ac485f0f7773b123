"""Find the files of a folder that has a folder for each class."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

import numpy as np

from graphopt.data.files import reason
from graphopt.data.tabular import refuse_twice
from graphopt.errors import GraphoptError, some

_Size = TypeVar("_Size")


def files_and_labels(
    root: Path, what: str, is_labelled: bool, labels: Sequence[str] | None
) -> tuple[list[Path], np.ndarray, tuple[str, ...]]:
    """Return the files, the class of each, and the names of the classes; without labels, one file stands for itself."""
    if root.is_file() and not is_labelled:
        return [root], np.zeros(0, np.int64), ()
    if not root.is_dir():
        raise GraphoptError(f"{root}: expected a folder of {what}, found {'a file' if root.exists() else 'none'}")
    if not is_labelled:
        return _files(root, what), np.zeros(0, np.int64), ()
    folders = [root / name for name in _shown(next(os.walk(root, onerror=_cannot_read))[1])]
    if not folders:
        raise GraphoptError(
            f"{root}: expected a folder for each class, found none: put the {what} of each class in "
            f"a folder of its name, or set data.target=null for {what} without classes"
        )
    names = tuple(folder.name for folder in folders) if labels is None else tuple(map(str, labels))
    if len(names) < 2:
        raise GraphoptError(f"{root}: expected the folders of two classes or more, found {', '.join(map(repr, names))}")
    if labels is None and (parts := parts_of_split(names)):
        raise GraphoptError(
            f"{root}: expected a folder for each class, found the parts of a split, {', '.join(map(repr, names))}: set "
            f"data.path={root / parts[0]} and fit.validation={root / parts[-1]}"
        )
    refuse_twice(str(root), "label", names)
    files: list[Path] = []
    classes: list[int] = []
    for folder in folders:
        if folder.name not in names:
            raise GraphoptError(
                f"{folder}: expected a folder of {', '.join(names)}: add it to data.labels, or remove it"
            )
        files += _files(folder, what)
        classes += [names.index(folder.name)] * (len(files) - len(classes))
    return files, np.array(classes, np.int64), names


def parts_of_split(names: Sequence[str]) -> list[str]:
    """Return the folders to train on and to validate on, if all have names that people give to these; else none."""
    training = [name for name in names if name.lower() in ("train", "training")]
    others = [name for name in names if name.lower() in ("val", "valid", "validation", "dev", "eval")]
    tests = [name for name in names if name.lower() in ("test", "testing")]
    is_split = training and len(training) + len(others) + len(tests) == len(names)
    return [training[0], (others or tests)[0]] if is_split else []


def _files(root: Path, what: str) -> list[Path]:
    """Return the files in a folder and below it, in order."""
    files = []
    for at, folders, names in os.walk(root, onerror=_cannot_read):
        folders[:] = _shown(folders)
        files += [Path(at, name) for name in _shown(names)]
    if not files:
        raise GraphoptError(f"{root}: expected {what}, found an empty folder: add some, or remove the folder")
    return files


def _shown(names: list[str]) -> list[str]:
    return sorted(name for name in names if not name.startswith("."))


def _cannot_read(error: OSError) -> None:
    raise GraphoptError(f"{error.filename}: {reason(error)}") from error


def without_others(
    root: Path, what: str, files: Sequence[Path], classes: np.ndarray, size_of: Callable[[Path], _Size | None]
) -> tuple[list[Path], np.ndarray, list[_Size]]:
    """Return the files that `size_of` knows, the class and the size of each; warn of the others."""
    with ThreadPoolExecutor() as threads:
        sizes = list(threads.map(size_of, files))
    there = [i for i, size in enumerate(sizes) if size is not None]
    if others := [str(file) for file, size in zip(files, sizes, strict=True) if size is None]:
        if not there or (len(classes) and len(set(classes[there])) < len(set(classes))):
            if root.is_file():
                raise GraphoptError(f"{root}: expected {what}, found another file")
            raise GraphoptError(
                f"{root}: expected {what} in each folder, found only {some(others)}: add {what}, or remove the folder"
            )
        warnings.warn(f"{root}: skipped files that are not {what}: {some(others)}", stacklevel=4)
    return (
        [files[i] for i in there],
        classes[there] if len(classes) else classes,
        [s for s in sizes if s is not None],
    )

"""Write files atomically: whole or not at all."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

from graphopt.errors import GraphoptError


@contextlib.contextmanager
def making(path: str | os.PathLike[str], what: str = "folder") -> Iterator[None]:
    """Say in an error of a `with` block that `path` is not what can be written to."""
    try:
        yield
    except OSError as error:
        raise GraphoptError(f"{path}: expected a {what} to write to: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Yield a temporary path in the same folder; replace `path` by it if the block succeeds."""
    target = Path(path)
    if target.is_dir():
        raise GraphoptError(
            f"{path}: expected the path of a file to write, found a folder: name a file in it"
        )
    with making(target):
        handle, temporary = tempfile.mkstemp(target.suffix, f".{target.name}.", target.parent)
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, 0o666 & ~_umask())
        os.replace(temporary, target)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write(path: Path, text: str) -> None:
    """Write a text file atomically."""
    with replacing(path) as temporary:
        Path(temporary).write_text(text, encoding="utf-8")


def write_folder(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Write all files to a folder, or none, and create the folder if it is missing.

    Raises:
        GraphoptError: the folder cannot be made or written to.
    """
    with making(folder):
        os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for name in contents:
            Path(folder, name).parent.mkdir(exist_ok=True)
        temporary = {name: stack.enter_context(replacing(Path(folder, name))) for name in contents}
        for name, content in contents.items():
            Path(temporary[name]).write_bytes(content)

"""Keep files in the user's cache folder, each with its size and a hash: a damaged file counts as missing.

What lowered graphs depend on, in addition to the graphs, is `own_version`.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import shutil
import stat
import sys
import tempfile
import time
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.files import read_regular, replacing, write_durably

_PACKAGES = ("graphopt", "onnx", "onnx_ir", "onnxscript", "numpy")
_MODULES = ("arguments", "errors", "fields", "files", "intervals", "pipeline")
_SOURCES = ("graph", "targets", *(f"{name}.py" for name in _MODULES))
SUM = ".sum"  # the suffix of the file with the size and the hash of another
MEASURED = "measured-"  # what the name of a file begins with that is measured once on a machine
MOST_BYTES = 2**30  # of the files of a room that were not used in the last day
_DAY = 24 * 60 * 60  # seconds
_WEEK = 7 * _DAY  # a process may wait in its folder for the first step


def cache_folder(room: str = "native") -> Path:
    """Return a folder of the cache, by default that of compiled libraries; it belongs only to the user.

    Raises:
        GraphoptError: the folder cannot be made, or others may write to it.
    """
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA", Path.home() / "AppData" / "Local"))
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = base / "graphopt" / room
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        status = folder.stat()
    except OSError as error:
        raise GraphoptError(f"native: expected a cache folder, found none: {error}") from error
    if hasattr(os, "getuid") and (status.st_uid != os.getuid() or status.st_mode & 0o022):
        raise GraphoptError(f"{folder}: expected a folder that only you can write to: chmod 700 {folder}")
    return folder


def read_cached(name: str, room: str = "native") -> bytes | None:
    """Return the content of a file of the cache; None if it is missing or is not what was written."""
    path = cache_folder(room) / name
    content, noted = read_regular(path), read_regular(path.with_name(name + SUM), most=1000)
    if content is None or noted != _sum(content):
        return None
    with contextlib.suppress(OSError):
        os.utime(path)  # `trim` deletes what was used longest ago
    return content


def write_cached(name: str, content: bytes, room: str = "native", mode: int = 0o666) -> Path:
    """Write a file to the cache, and return its path once it is on the disk.

    Args:
        mode: who may read and write it, which the process may narrow.

    Raises:
        OSError: the folder cannot be written to.
    """
    path = cache_folder(room) / name
    for target, data in ((path, content), (path.with_name(name + SUM), _sum(content))):
        if target.is_dir() and not target.is_symlink():
            shutil.rmtree(target)
        with replacing(target, mode) as temporary:
            write_durably(temporary, data)
    return path


def write_first(name: str, content: bytes, room: str = "native") -> Path:
    """Write a file as `write_cached` does, unless the cache has it; of processes that write it at once, the first does.

    A damaged file is replaced.
    """
    path = cache_folder(room) / name
    if read_cached(name, room) is None and path.with_name(name + SUM).exists():
        path.unlink(missing_ok=True)
    with contextlib.suppress(OSError), tempfile.TemporaryDirectory(dir=path.parent) as work:
        write_durably(Path(work, name), content)
        os.link(Path(work, name), path)
    first = read_regular(path)
    return write_cached(name, content if first is None else first, room)


def trim(room: str = "native") -> None:
    """Delete files not used for a day, the least recently used first, until these take at most `MOST_BYTES`.

    What was measured once stays. Folders that are a week old go: those of processes that were killed, and reproducers.
    """
    files, now = [], time.time()
    for path in cache_folder(room).iterdir():
        with contextlib.suppress(OSError):  # another process has just moved it
            status = path.lstat()
            if stat.S_ISDIR(status.st_mode) and status.st_mtime < now - _WEEK:
                shutil.rmtree(path, ignore_errors=True)
            is_kept = path.suffix == SUM or path.name.startswith(MEASURED)
            if stat.S_ISREG(status.st_mode) and status.st_mtime < now - _DAY and not is_kept:
                files.append((status.st_mtime, status.st_size, path))
    left = sum(size for _, size, _ in files)
    for used, size, path in sorted(files):
        if left <= MOST_BYTES:
            return
        with contextlib.suppress(OSError):  # on Windows, a process has loaded it
            left -= size
            if path.lstat().st_mtime == used:  # no process has used it since
                path.unlink()
                path.with_name(path.name + SUM).unlink(missing_ok=True)


def read_model(name: str, weights: Mapping[str, ir.TensorProtocol], room: str = "native") -> ir.Model | None:
    """Return a model of the cache, which keeps it without large weights, with these; None if it is missing."""
    content = read_cached(name, room)
    if content is None:
        return None
    model = ir.from_proto(onnx.load_model_from_string(content))
    for weight in weights.keys() & model.graph.initializers.keys():
        model.graph.initializers[weight].const_value = weights[weight]
    return model


def _sum(content: bytes) -> bytes:
    return f"{len(content)} {hashlib.sha256(content).hexdigest()}\n".encode()


def sources() -> list[Path]:
    """Return the files of the code that lowers graphs, and of all that it imports from graphopt."""
    package = Path(__file__).parents[2]
    paths = [path for name in _SOURCES for path in (package / name, *sorted((package / name).rglob("*.py")))]
    return [path for path in paths if path.is_file()]


@functools.cache
def own_version() -> str:
    """Return a hash of what decides how targets of this package lower a graph: its code, and the packages it uses."""
    versions = [f"{name} {metadata.version(name)}".encode() for name in _PACKAGES]
    contents = [path.read_bytes() for path in sources()]
    return hashlib.sha256(b"\0".join([*versions, *contents])).hexdigest()

"""Write files atomically, and read files and folders that others may have made without following links."""

from __future__ import annotations

import contextlib
import enum
import errno
import json
import math
import os
import stat
import tempfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any

from graphopt.errors import GraphoptError


class Access(enum.Enum):
    """Say what is done with the file that an argument names: a recipe of others may name some files only."""

    READ = "read"
    WRITE = "write"


ReadPath = Annotated[str | os.PathLike[str], Access.READ]
ReadName = Annotated[str, Access.READ]  # a path as text
WritePath = Annotated[str | os.PathLike[str], Access.WRITE]

NO_LINKS = getattr(os, "O_NOFOLLOW", 0) | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0)
_FOLDER = getattr(os, "O_DIRECTORY", 0)
_BY_HANDLE = os.scandir in os.supports_fd and os.open in os.supports_dir_fd  # not on Windows
_MOST_ENTRIES, _MOST_DEEP = 100_000, 32  # of a folder that others have made
_DEEPEST = 50  # levels of lists and mappings in a file
_LARGEST = 2**128  # of whole numbers in a file: states of random generators have as many bits
# What files begin with, what they are then, and how they become files that can be read
ZIP = "a zip archive"
SAVED_AS_CSV = "save the sheet as CSV, or write pandas.read_excel(...).to_csv('FILE.csv', index=False)"
_BINARY = {
    b"PK\x03\x04": (ZIP, "unpack it"),
    b"\xd0\xcf\x11\xe0": ("an Excel workbook (.xls)", SAVED_AS_CSV),
    b"\x1f\x8b": ("a file compressed by gzip", "unpack it, gunzip FILE.gz"),
    b"BZh": ("a file compressed by bzip2", "unpack it, bunzip2 FILE.bz2"),
    b"\xfd7zXZ": ("a file compressed by xz", "unpack it, unxz FILE.xz"),
    b"\x28\xb5\x2f\xfd": ("a file compressed by Zstandard", "unpack it, unzstd FILE.zst"),
    b"SQLite format 3": ("a database of SQLite", "write pandas.read_sql(...).to_csv('FILE.csv', index=False)"),
    b"PAR1": ("a Parquet file", "data=parquet (graphopt.data.parquet) reads it"),
    b"ARROW1": ("an Arrow file", "data=arrow (graphopt.data.arrow) reads it"),
    b"\xff\xfe": ("text in UTF-16", "save it as UTF-8, iconv -f UTF-16 -t UTF-8"),
    **dict.fromkeys((b"\x89PNG", b"\xff\xd8\xff", b"GIF8"), ("a picture", "name the file that is meant")),
}
# The same of files of text; web pages begin in upper or lower case
_TEXTS = {
    b"version https://git-lfs": ("a pointer of Git LFS in place of the file", "fetch it, git lfs pull"),
    **dict.fromkeys((b"<!doctype", b"<html"), ("a web page", "download the file itself")),
}
_KINDS = {
    stat.S_IFLNK: "a link",
    stat.S_IFIFO: "a pipe",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
}


@contextlib.contextmanager
def making(path: str | os.PathLike[str], what: str = "folder") -> Iterator[None]:
    """Turn an OSError of a `with` block into an error that `path` cannot be written to."""
    try:
        yield
    except OSError as error:
        raise GraphoptError(f"{path or repr(path)}: expected a {what} to write to: {error.strerror}") from error


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str], mode: int = 0o666) -> Iterator[str]:
    """Yield a temporary path in the same folder; replace `path` by it if the block succeeds.

    Args:
        mode: who may read and write the file, which the process may narrow.
    """
    target = Path(path)
    if target.is_dir():
        raise GraphoptError(
            f"{path or repr(path)}: expected the path of a file to write, found a folder: name a file in it"
        )
    with making(target):
        handle, temporary = tempfile.mkstemp(target.suffix, f".{target.name}.", target.parent)
    os.close(handle)
    try:
        yield temporary
        os.chmod(temporary, mode & ~_umask())
        os.replace(temporary, target)
    except OSError as error:
        error.filename = error.filename or os.fspath(target)  # which the system does not name on a full disk
        raise
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


def write_durably(path: str | os.PathLike[str], content: bytes) -> None:
    """Write a file, and return once it is on the disk."""
    with open(path, "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())


def write_folder(folder: str | os.PathLike[str], contents: Mapping[str, bytes]) -> None:
    """Write all files to a folder, or none, and create the folder if it is missing.

    Raises:
        GraphoptError: the folder cannot be made or written to.
    """
    with making(folder):
        os.makedirs(folder, exist_ok=True)
    with contextlib.ExitStack() as stack:
        for parent in sorted({Path(folder, name).parent for name in contents} - {Path(folder)}):
            if parent.is_symlink():
                raise GraphoptError(f"{parent}: expected a folder to write to, found a link: remove it")
            parent.mkdir(exist_ok=True)
        temporary = {name: stack.enter_context(replacing(Path(folder, name))) for name in contents}
        for name, content in contents.items():
            Path(temporary[name]).write_bytes(content)


def read_regular(path: Path, most: int = 2**31) -> bytes | None:
    """Return the content of a regular file of at most so many bytes; None for a link, a pipe, a folder or no file."""
    try:
        handle = os.open(path, os.O_RDONLY | NO_LINKS)
    except (OSError, ValueError):
        return None
    try:
        status = os.fstat(handle)
        if not stat.S_ISREG(status.st_mode) or status.st_size > most:
            return None
        with open(handle, "rb", closefd=False) as file:
            return file.read(status.st_size)
    finally:
        os.close(handle)


def read_file(path: str | os.PathLike[str], most: int = 2**31) -> bytes:
    """Return the content of a regular file of at most so many bytes, and follow no link.

    Raises:
        FileNotFoundError: there is no file.
        GraphoptError: it is a link, a pipe, a device or a folder, or it is larger.
    """
    content = read_regular(Path(path), most)
    if content is None:
        status = os.lstat(path)
        found = "a folder" if stat.S_ISDIR(status.st_mode) else _KINDS.get(stat.S_IFMT(status.st_mode))
        found = found or (f"{status.st_size:,}" if status.st_size > most else "one that cannot be read")
        raise GraphoptError(f"{os.fspath(path)}: expected a file of at most {most:,} bytes, found {found}")
    return content


def check_file(path: str | os.PathLike[str]) -> None:
    """Raise an error if a path, after links, leads to something else than a file: a device or a pipe may never end."""
    place = Path(path)
    if place.exists() and not place.is_file():
        found = "a folder" if place.is_dir() else "a device or a pipe"
        raise GraphoptError(f"{os.fspath(path)}: expected a file, found {found}")


def foreign_content(path: str | os.PathLike[str], *, is_text: bool = False) -> tuple[str, str] | None:
    """Return what a file is by how it begins, and what to do with it, if that is known.

    A number is taken as a file name, not as an open file.

    Args:
        is_text: whether the file can be read as text, whose first word may begin with letters such as PAR1 or BZh, and
            which has no NUL.
    """
    with open(Path(path), "rb") as file:
        start = file.read(32)
    known = _TEXTS if is_text and b"\0" not in start else {**_TEXTS, **_BINARY}
    start = start.lower() if start.startswith(b"<") else start
    return next((found for begin, found in known.items() if start.startswith(begin)), None)


def json_of(text: bytes | str, where: str) -> Any:
    """Return what a text in JSON says, which anyone may have written.

    Raises:
        GraphoptError: it is no JSON in UTF-8, is deep, or has a number or a character that no file needs.
    """
    try:
        value = json.loads(text if isinstance(text, str) else text.decode("utf-8-sig"))
    except UnicodeDecodeError as error:
        raise GraphoptError(f"{where}: expected text in UTF-8, found byte {error.start:,}, which is not") from error
    except (ValueError, RecursionError) as error:
        raise GraphoptError(f"{where}: expected JSON, found another form: {error}") from error
    check_plain(value, where)
    return value


def check_plain(value: object, where: str) -> None:
    """Raise an error if nested values are deep, or a key is no text, a number is huge or a text cannot be written.

    >>> check_plain({"step": 10**400}, "metrics.jsonl")
    Traceback (most recent call last):
    ...
    graphopt.errors.GraphoptError: metrics.jsonl: step: expected a number of at most 39 digits, found one of 401
    """
    waiting: list[tuple[str, object, int]] = [("", value, 0)]
    while waiting:
        place, item, depth = waiting.pop()
        at = f"{where}: {place}: " if place else f"{where}: "
        if depth > _DEEPEST:
            raise GraphoptError(f"{at}expected at most {_DEEPEST} levels of lists and mappings, found more")
        if isinstance(item, Mapping):
            for key, inner in item.items():
                if not isinstance(key, str):
                    raise GraphoptError(f"{at}expected a text as a key, found {key!r}: put it in quotes")
                waiting += [(place, key, depth), (f"{place}.{key}" if place else key, inner, depth + 1)]
        elif isinstance(item, list | tuple):
            waiting += [(f"{place}[{i}]", inner, depth + 1) for i, inner in enumerate(item)]
        elif isinstance(item, int) and abs(item) >= _LARGEST:
            digits = int(item.bit_length() * math.log10(2)) + 1
            raise GraphoptError(f"{at}expected a number of at most 39 digits, found one of {digits:,}")
        elif isinstance(item, str) and not _is_text(item):
            raise GraphoptError(f"{at}expected text, found half of a character (a lone surrogate)")


def _is_text(text: str) -> bool:
    """Return whether a text can be written in UTF-8."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def open_to_append(path: str | os.PathLike[str]) -> int:
    """Return a handle that writes at the end of a file, which is made if it is missing.

    Raises:
        OSError: the path is a link, or the file has several names or is none.
    """
    handle = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | NO_LINKS, 0o666)
    if kind := _kind(os.fstat(handle)):
        os.close(handle)
        raise OSError(errno.EINVAL, f"expected a file to write to, found {kind}", os.fspath(path))
    return handle


def check_folder(folder: str | os.PathLike[str], is_read: Callable[[str], bool] = lambda name: True) -> None:
    """Raise an error if a folder has links, devices, pipes or files with several names, at any depth.

    No link below the folder is followed, and no file is opened. The folder itself may be named by a link.

    Args:
        is_read: whether to look at what has a name in the folder itself.
    """
    place = os.fspath(folder)
    try:
        handle = os.open(place, os.O_RDONLY | _FOLDER) if _BY_HANDLE else None
        try:
            for count, (path, status) in enumerate(_below(place, handle, is_read)):
                if kind := _kind(status):
                    raise GraphoptError(
                        f"{path}: expected only folders and files with one name in the folder of a run, found {kind}: "
                        "remove it, or put the file itself there"
                    )
                if count >= _MOST_ENTRIES:
                    raise GraphoptError(
                        f"{place}: expected the folder of a run with at most {_MOST_ENTRIES:,} files, found more"
                    )
        finally:
            if handle is not None:
                os.close(handle)
    except OSError as error:
        raise GraphoptError(f"{error.filename or place}: cannot be read: {error.strerror}") from error


def _below(
    place: str, handle: int | None, is_read: Callable[[str], bool] = lambda name: True, depth: int = 1
) -> Iterator[tuple[str, os.stat_result]]:
    """Yield the path and the status of what lies below an open folder."""
    if depth > _MOST_DEEP:
        raise GraphoptError(f"{place}: expected at most {_MOST_DEEP} levels of folders, found more")
    with os.scandir(place if handle is None else handle) as entries:
        for entry in entries:
            if not is_read(entry.name):
                continue
            path = os.path.join(place, entry.name)
            # On Windows, an entry does not have the number of a file's names.
            status = os.lstat(path) if handle is None else entry.stat(follow_symlinks=False)
            yield path, status
            if stat.S_ISDIR(status.st_mode):
                inner = None if handle is None else os.open(entry.name, os.O_RDONLY | _FOLDER | NO_LINKS, dir_fd=handle)
                try:
                    yield from _below(path, inner, depth=depth + 1)
                finally:
                    if inner is not None:
                        os.close(inner)


def _kind(status: os.stat_result) -> str | None:
    """Return what an entry of a folder is, or None if it is a folder or a file with one name."""
    if getattr(status, "st_reparse_tag", 0) == getattr(stat, "IO_REPARSE_TAG_MOUNT_POINT", -1):
        return "a link"  # of Windows, to a folder
    if stat.S_ISDIR(status.st_mode):
        return None
    if stat.S_ISREG(status.st_mode):
        return "a file with several names (hard links)" if status.st_nlink > 1 else None
    return _KINDS.get(stat.S_IFMT(status.st_mode), "something else")

"""Read how much memory this process has, and may still take, and give back what is free; on Linux."""

from __future__ import annotations

import contextlib
import ctypes
import math
import re
from pathlib import Path

from graphopt.errors import GraphoptError

_UNITS = {"kB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12} | {
    "KiB": 2**10,
    "MiB": 2**20,
    "GiB": 2**30,
    "TiB": 2**40,
}
_SIZE = re.compile(rf"([0-9]+(?:\.[0-9]+)?) ?({'|'.join(_UNITS)})")
_PROC, _GROUPS = Path("/proc"), Path("/sys/fs/cgroup")
# In a control group of version 2, and of version 1: the limit, and what is taken.
_FILES = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))


class NoRoom(GraphoptError):
    """Report that something needs more memory than there is."""


def bytes_of_size(text: object) -> int:
    """Return the bytes of a size such as '2 GB' or '512 MiB'.

    Raises:
        GraphoptError: it is no positive number with a unit.
    """
    found = _SIZE.fullmatch(text) if isinstance(text, str) else None
    size = 0.0 if found is None else float(found[1]) * _UNITS[found[2]]
    if not 1 <= size < 2**63:
        raise GraphoptError(
            f"memory: expected a positive number with a unit, such as '2 GB' or '512 MiB', found {text!r}"
        )
    return int(size)


def check_room(needed: float, size: str | None, what: str) -> None:
    """Raise `NoRoom` unless the machine, the control groups and the option `memory` have room for something."""
    left = available() if size is None else min(available(), bytes_of_size(size) - taken())
    if needed > left:
        left = max(0.0, left)
        raise NoRoom(f"{what} needs about {needed / 1e6:,.0f} MB of memory, and {left / 1e6:,.0f} are left")


def taken() -> int:
    """Return the bytes of this process in no file, which the system cannot drop; 0 where that is not known."""
    return int(_entry(_PROC / "self" / "status", "RssAnon") or 0)


def available() -> float:
    """Return the bytes that this process may still take, of the machine and of its control groups.

    Return infinity where that is not known. The pages of files in a group are counted as free.
    """
    free = _entry(_PROC / "meminfo", "MemAvailable")
    return min([math.inf if free is None else free, *map(_left, _groups())])


def give_back() -> None:
    """Give the system what the C library holds and nobody uses, where that is glibc."""
    with contextlib.suppress(OSError, AttributeError, TypeError):  # another library, or Windows
        ctypes.CDLL(None).malloc_trim(0)


def _groups() -> list[Path]:
    """Return the folders of the control groups of this process, and of those above them."""
    folders = []
    for line in _read(_PROC / "self" / "cgroup").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers in ("", "memory"):
            own = _GROUPS / controllers / path.lstrip("/")
            folders += [own, *(x for x in own.parents if x.is_relative_to(_GROUPS))]
    return folders


def _left(group: Path) -> float:
    """Return the bytes that a control group has left; infinity if it has no limit."""
    for limit, used in _FILES:
        numbers = [_read(group / name).strip() for name in (limit, used)]
        if all(map(str.isdigit, numbers)):
            cached = re.search(r"^(?:total_)?inactive_file (\d+)$", _read(group / "memory.stat"), re.MULTILINE)
            return int(numbers[0]) - int(numbers[1]) + (int(cached[1]) if cached else 0)
    return math.inf


def _entry(path: Path, name: str) -> int | None:
    """Return the bytes of an entry of a file such as /proc/meminfo."""
    found = re.search(rf"^{name}:\s+(\d+) kB$", _read(path), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def _read(path: Path) -> str:
    with contextlib.suppress(OSError, ValueError):
        return path.read_text()
    return ""

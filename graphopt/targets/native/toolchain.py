"""Compile C to libraries with the system's compiler, and keep them in the user's cache folder.

The compiler may take too much time or memory, and must not outlive this process.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import logging
import os
import platform
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

from graphopt.errors import GraphoptError
from graphopt.files import read_regular
from graphopt.targets.native.cache import cache_folder, read_cached, write_cached

logger = logging.getLogger(__name__)
FOLDER = Path(__file__).parent / "c"
HEADERS = tuple(sorted(path.name for path in FOLDER.glob("*.h")))
_PROCESSOR = "-march=native" if platform.machine().lower() in ("x86_64", "amd64") else "-mcpu=native"
FLAGS = (
    *("-std=gnu11", "-O3", _PROCESSOR, "-fPIC", "-fvisibility=hidden", "-fopenmp-simd"),
    *("-fno-math-errno", "-fno-trapping-math", "-ffp-contract=off", "-w"),
)
_OBJECT, PART, _LIBRARY = ["-c"], ["-c", "-ffp-contract=fast"], ["-shared", "-lm"]  # how to compile a source
PROCESSORS = os.cpu_count() or 1
_SECONDS = 300
BYTES = 2**32

# The shell's input is a pipe from this process. It ends when this process ends, however that happens; then the whole
# group of processes does. A system without one of the limits goes without it.
_WATCHED = """ulimit -c 0; ulimit -t {seconds} 2>/dev/null; ulimit -v {kilobytes} 2>/dev/null; exec 3<&0
(read _ <&3; kill -9 0) >/dev/null 2>&1 &
"$@" </dev/null 3<&- &
wait $!"""


@functools.cache
def compiler() -> tuple[str, ...] | None:
    """Return the command of a C compiler: $CC, cc, gcc or clang, else the wheel ziglang; None if there is none."""
    for name in (os.environ.get("CC"), "cc", "gcc", "clang"):
        found = shutil.which(name) if name else None
        if found:
            return (found,)
    spec = importlib.util.find_spec("ziglang")
    for folder in (spec and spec.submodule_search_locations) or ():
        found = shutil.which("zig", path=folder)  # `python -m ziglang` searches the working directory
        if found:
            return (found, "cc")
    return None


class Objects:
    """Compile C sources side by side.

    >>> with Objects() as objects:
    ...     objects.add([])
    []
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(PROCESSORS)
        self._begun: dict[str, Future[Path]] = {}

    def __enter__(self) -> Objects:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(cancel_futures=True)

    def add(self, sources: Sequence[str], flags: Sequence[str] = _OBJECT) -> list[str]:
        """Begin to compile sources that the cache lacks, and return the names of their objects."""
        names = [_object_of(source, flags) for source in sources]
        for name, source in zip(names, sources, strict=True):
            if name not in self._begun and read_cached(name) is None:
                self._begun[name] = self._pool.submit(_compiled, name, source, flags)
        return names

    def wait(self) -> None:
        """Wait until all are compiled.

        Raises:
            GraphoptError: the compiler fails.
        """
        for made in self._begun.values():
            made.result()


def are_compiled(parts: Sequence[str]) -> bool:
    """Return whether the cache has the objects of sources that are the same for all libraries."""
    return all(read_cached(_object_of(source, PART)) is not None for source in parts)


def _object_of(source: str, flags: Sequence[str]) -> str:
    return f"{code_digest(source, *flags)}.o"


def build(source: str, objects: Sequence[str] = (), parts: Sequence[str] = (), begun: Objects | None = None) -> Path:
    """Return the library of a C source; compile it unless the cache has it.

    Args:
        objects: C sources to link with it, which are compiled side by side.
        parts: further ones, the same for all libraries. They add products without rounding the products.
        begun: objects that are being compiled, some of these perhaps.

    Raises:
        GraphoptError: there is no compiler, or it fails.
    """
    linked = [_object_of(code, PART) for code in parts] + [_object_of(code, _OBJECT) for code in objects]
    name, folder = f"{code_digest(source, *_LIBRARY, *linked)}.so", cache_folder()
    if read_cached(name) is not None:
        return folder / name
    logger.info("compiling for this machine, once for this graph")
    with begun or Objects() as made:
        made.add(parts, PART)
        made.add(objects)
        made.wait()
    return _compiled(name, source, _LIBRARY, [folder / own for own in linked])


def _compiled(name: str, source: str, flags: Sequence[str], objects: Sequence[Path] = ()) -> Path:
    """Return a file of the cache that the compiler makes of a C source and objects."""
    with tempfile.TemporaryDirectory(dir=cache_folder()) as work:
        code, target = Path(work) / "kernels.c", Path(work) / name
        code.write_text(source)
        files = [str(code), *map(str, objects), "-o", str(target)]
        failed, said = _run([*_command(), *FLAGS, f"-I{FOLDER}", *files, *flags], Path(work))
        content = None if failed else read_regular(target)
        if content is None:
            lines = said.splitlines()
            reason = next((line for line in lines if "error" in line), " ".join(lines) or "it was killed")
            raise GraphoptError(f"native: {_command()[0]} does not compile the kernels: {reason[:200]}")
        return write_cached(name, content)


def code_digest(*texts: str) -> str:
    """Return a hash of texts, and of what else compiled code depends on: headers, flags, compiler and processor.

    Raises:
        GraphoptError: there is no compiler.
    """
    return hashlib.sha256("\0".join([*texts, *_environment(_command())]).encode()).hexdigest()[:32]


@functools.cache
def macros() -> frozenset[str]:
    """Return the names of the macros that the compiler defines for this processor; none without a compiler."""
    command = compiler()
    if command is None:
        return frozenset()
    listed = subprocess.run(
        [*command, *FLAGS, "-dM", "-E", "-x", "c", os.devnull],
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    return frozenset(words[1] for words in map(str.split, listed.stdout.splitlines()) if len(words) > 1)


def _command() -> tuple[str, ...]:
    command = compiler()
    if command is None:
        raise GraphoptError("native: expected a C compiler, found none: install gcc or clang, or pip install ziglang")
    return command


@functools.cache
def _environment(command: tuple[str, ...]) -> tuple[str, ...]:
    """Return what else a library depends on: headers, flags, the compiler and the processor."""
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, timeout=_SECONDS).stdout
    headers = tuple((FOLDER / name).read_text() for name in HEADERS)
    return (*headers, *FLAGS, *command, version, processor())


def processor() -> str:
    """Return what decides which instructions `-march=native` stands for."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    wanted = ("model name", "flags", "Features", "CPU part")
    return "\n".join(dict.fromkeys(line for line in lines if line.startswith(wanted)))


def _run(command: Sequence[str], folder: Path) -> tuple[int, str]:
    """Return the exit code of a command, which writes temporary files to a folder, and what it says about errors."""
    shell = shutil.which("sh") if os.name == "posix" else None
    watched = _WATCHED.format(seconds=_SECONDS, kilobytes=BYTES // 1024)
    whole = [shell, "-c", watched, "sh", *command] if shell else list(command)
    with (
        (folder / "errors").open("w+", errors="replace") as errors,
        subprocess.Popen(
            whole,
            stdin=subprocess.PIPE,
            stdout=errors,
            stderr=errors,
            start_new_session=bool(shell),
            env={**os.environ, "LC_ALL": "C", "TMPDIR": str(folder)},
        ) as process,
    ):
        try:
            code = process.wait(_SECONDS)
        except subprocess.TimeoutExpired as error:
            raise GraphoptError(
                f"native: expected {command[0]} to compile the kernels in {_SECONDS} seconds, found that it takes "
                "longer"
            ) from error
        finally:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                if shell:  # with all that it started
                    os.killpg(process.pid, signal.SIGKILL)
                else:
                    process.kill()
        errors.seek(0)
        return code, errors.read(2**16)

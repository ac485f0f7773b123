"""Remember what comparisons have found, and write reproducers of differences."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import io
import json
import os
import platform
import tempfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.files import read_regular, write, write_folder
from graphopt.graph.storage import identity_of, skeleton, whole
from graphopt.graph.values import tensor_bytes
from graphopt.runtime.checks.slopes import Arrays
from graphopt.targets.native.cache import cache_folder
from graphopt.targets.native.toolchain import processor

_T = TypeVar("_T")

ROOM = "steps"  # of the cache
# Bytes of inputs and constants that a reproducer has, and of weights that become noisy
LARGEST_REPRODUCER = 2**26


@functools.cache
def machine() -> str:
    """Return a short hash of the processor, since machines may share a home directory."""
    facts = (processor(), platform.machine(), os.cpu_count())
    return hashlib.sha256(repr(facts).encode()).hexdigest()[:8]


def digest_of(models: Iterable[ir.Model], sources: Iterable[Path], facts: object) -> str:
    """Return a hash of graphs, of the code that compares them, and of other facts on which a verdict depends."""
    parts = [*(identity_of(model)[0] for model in models), *(path.read_bytes() for path in sources)]
    return hashlib.sha256(b"\0".join([*parts, repr(facts).encode()])).hexdigest()[:32]


def write_reproducer(digest: str, models: Mapping[str, ir.Model], inputs: Arrays, facts: Mapping[str, object]) -> Path:
    """Write graphs, their inputs and what differs to a folder of the cache, or a temporary one, and return the folder.

    Inputs and large weights are left out if they are many.
    """
    try:
        room = cache_folder(ROOM)
    except GraphoptError:
        room = Path(tempfile.mkdtemp(prefix="graphopt-"))
    folder = room / f"difference-{digest[:16]}"
    constants = [
        sum(tensor_bytes(x.const_value) for x in model.graph.initializers.values()) for model in models.values()
    ]
    is_small = sum(x.nbytes for x in inputs.values()) + max(constants) <= LARGEST_REPRODUCER
    files = {f"{name}.onnx": whole(model) if is_small else skeleton(model)[0] for name, model in models.items()}
    if is_small:
        archive = io.BytesIO()
        np.savez(archive, **inputs)  # type: ignore[arg-type]
        files["inputs.npz"] = archive.getvalue()
    files["difference.json"] = json.dumps(facts, indent=1).encode()
    with contextlib.suppress(GraphoptError, OSError):
        write_folder(folder, files)
    return folder


def read_note(room: str, name: str, key: str, kind: type[_T]) -> _T | None:
    """Return what a note in the cache says of this machine, or None if there is none."""
    with contextlib.suppress(GraphoptError, OSError, ValueError, KeyError, TypeError):
        value = json.loads(read_regular(cache_folder(room) / f"{machine()}-{name}") or b"")[key]
        return value if isinstance(value, kind) else None
    return None


def write_note(room: str, name: str, note: Mapping[str, object]) -> None:
    """Write a note about this machine to the cache; if that fails, the cache forgets."""
    with contextlib.suppress(GraphoptError, OSError):
        write(cache_folder(room) / f"{machine()}-{name}", json.dumps(note))

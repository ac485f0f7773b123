"""Remember, in this process only, from which file and by which passes a model was made."""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.graph import storage
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.values import name_of, tensor_bytes

META = "graphopt.provenance"
# Up to so many bytes, content is hashed; of larger files, size and time are compared, of larger messages the size.
DIGESTED = 2**28
BINARY = (".onnx", "")  # suffixes of files that ONNX Runtime reads


@dataclass(frozen=True)
class SourceFile:
    """Refer to a model as the user gave it, without a copy of its weights.

    Args:
        source: a path, bytes, or the user's own message; of an onnx_ir.Model, a clone that shares its weights.
        mark: what tells whether it is still the same.
        small: of a file, the message without large weights, which need not be read again.
    """

    source: Path | bytes | onnx.ModelProto | ir.Model
    mark: object
    small: onnx.ModelProto | None = None

    @classmethod
    def of(cls, source: object) -> SourceFile | None:
        """Return a reference to a model, or None if there is none to refer to."""
        if isinstance(source, str | os.PathLike):
            path = Path(source).absolute()
            content = _content(path)
            if content is None or path.suffix not in BINARY:
                return cls(path, _mark(path))
            return cls(path, _mark_of(content), storage.outline(onnx.ModelProto.FromString(content)))
        if isinstance(source, bytes | onnx.ModelProto):
            return cls(source, _mark(source))
        return cls(source.clone(), None) if isinstance(source, ir.Model) else None

    def digest(self) -> object:
        """Return what tells the model from others."""
        if not isinstance(self.source, ir.Model):
            return self.mark
        if storage.is_large(self.source):
            return hashlib.sha256(storage.skeleton(self.source)[0]).hexdigest()
        return storage.model_digest(self.source)

    def is_same(self, content: bytes | str | None = None) -> bool:
        """Return whether the model is still the one that was compiled; its content is written again unless given."""
        if isinstance(self.source, onnx.ModelProto) and isinstance(content, bytes):
            return self.mark == _mark_of(content)
        return isinstance(self.source, bytes) or self.mark == _mark(self.source)

    def content(self) -> bytes | str | None:
        """Return the model as ONNX Runtime opens it: bytes, or a path; None if it has too many weights."""
        if isinstance(self.source, onnx.ModelProto):  # as it was for the mark
            return self.source.SerializeToString(deterministic=True)
        if isinstance(self.source, Path):
            if self.source.suffix in BINARY:
                return str(self.source)
            return onnx.load(self.source).SerializeToString()
        if isinstance(self.source, bytes):
            return self.source
        return None if storage.is_large(self.source) else storage.whole(self.source)

    def outline(self) -> onnx.ModelProto:
        """Return the model's message, perhaps without large weights, and without those that are in other files."""
        if isinstance(self.source, Path):
            return self.small or onnx.load(self.source, load_external_data=False)
        if isinstance(self.source, bytes):
            return onnx.ModelProto.FromString(self.source)
        return self.source if isinstance(self.source, onnx.ModelProto) else ir.to_proto(self.source)


def _content(path: Path) -> bytes | None:
    """Return the bytes of a file that is not too large to be hashed; None of others, and if it cannot be read."""
    with contextlib.suppress(OSError):
        return None if path.stat().st_size > DIGESTED else path.read_bytes()
    return None


def _mark(source: object) -> object:
    """Return what tells whether a model is still the same."""
    if isinstance(source, Path):
        if (content := _content(source)) is not None:
            return _mark_of(content)
        try:
            status = source.stat()
            return status.st_size, status.st_mtime_ns
        except OSError as error:
            return str(error)
    if isinstance(source, bytes):
        return _mark_of(source)
    if isinstance(source, onnx.ModelProto):
        size = source.ByteSize()
        return size if size > DIGESTED else _mark_of(source.SerializeToString(deterministic=True))
    return None


def _mark_of(content: bytes) -> object:
    return len(content) if len(content) > DIGESTED else hashlib.sha256(content).hexdigest()


@dataclass(frozen=True)
class Provenance:
    """Hold the file that a model was compiled from, and the passes that made it.

    Args:
        file: the file as the user gave it; None if it is not known.
        passes: the passes, by the names of their steps, in order.
        initial: the initial state that the passes have left, which the model shares.
    """

    file: SourceFile | None
    passes: Mapping[str, tuple[Any, ...]]
    initial: Mapping[str, ir.TensorProtocol]

    def is_initial(self, state: Mapping[str, np.ndarray]) -> bool:
        """Return whether a state is the one that the passes have left."""
        return state.keys() == self.initial.keys() and all(
            np.array_equal(x, self.initial[name].numpy()) for name, x in state.items()
        )


def of(model: ir.Model) -> Provenance | None:
    """Return what is known of a model's making."""
    return model.meta.get(META)


def carry(source: ir.Model, copy: ir.Model) -> None:
    """Give a copy of a model the provenance of the model."""
    if META in source.meta:
        copy.meta[META] = source.meta[META]


def note_source(model: ir.Model, source: object, passes: Mapping[str, tuple[Any, ...]]) -> None:
    before = of(source) if isinstance(source, ir.Model) else None
    if before is None:
        before = Provenance(SourceFile.of(source), {}, {})
    tensors = {name_of(x): x.const_value for x in with_role(model, *STATE) if x.const_value is not None}
    if sum(map(tensor_bytes, tensors.values())) > DIGESTED:
        tensors = {}
    model.meta[META] = replace(before, passes={**before.passes, **passes}, initial=tensors)


def forget_source(model: ir.Model) -> None:
    """Remove the provenance of a model."""
    model.meta.pop(META, None)

"""Models from files and back."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import onnx
import onnx_ir as ir
from google.protobuf.message import DecodeError

from graphopt.errors import GraphoptError

Source = str | os.PathLike[str] | onnx.ModelProto | ir.Model


def load(source: Source) -> ir.Model:
    """Return a model of one's own, from a path, an onnx.ModelProto or an onnx_ir.Model (copied).

    External data is read into memory by the onnx package, which refuses paths that leave the model's folder.

    Raises:
        GraphoptError: the file is missing, or is no valid ONNX model, or has an output that is no tensor.
    """
    if isinstance(source, ir.Model):
        return source.clone()
    proto = source if isinstance(source, onnx.ModelProto) else _read(Path(source))
    name = "the model" if isinstance(source, onnx.ModelProto) else str(source)
    if not proto.opset_import or not proto.HasField("graph"):
        raise GraphoptError(f"{name}: expected an ONNX model, found no graph or no opset in it")
    try:
        onnx.checker.check_model(proto)
    except onnx.checker.ValidationError as error:
        raise GraphoptError(f"{name}: not a valid ONNX model: {' '.join(str(error).split())}") from error
    except (
        ValueError
    ):  # larger than protobuf's 2 GB: the checker takes only its file, and external data is inlined
        pass
    for output in proto.graph.output:
        if not output.type.HasField("tensor_type"):
            raise GraphoptError(
                f"{name}: output {output.name!r}: expected a tensor, found a "
                f"{output.type.WhichOneof('value').removesuffix('_type')}: export without it "
                f"(scikit-learn's converter: options={{'zipmap': False}})"
            )
    return ir.from_proto(proto)


def save(model: ir.Model | onnx.ModelProto, path: str | os.PathLike[str]) -> None:
    """Write a model to one file, whole or not at all."""
    proto = ir.to_proto(model) if isinstance(model, ir.Model) else model
    with replacing(path) as temporary:
        onnx.save(proto, temporary)


@contextlib.contextmanager
def replacing(path: str | os.PathLike[str]) -> Iterator[str]:
    """Give a temporary path beside `path` to write to, which replaces `path` when the block ends well."""
    target = Path(path)
    try:
        handle, temporary = tempfile.mkstemp(
            prefix=f".{target.name}.", suffix=target.suffix, dir=target.parent
        )
    except OSError as error:
        raise GraphoptError(f"{target}: cannot write there: {error.strerror}") from error
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


def _read(path: Path) -> onnx.ModelProto:
    try:
        return onnx.load(path)
    except FileNotFoundError as error:
        raise GraphoptError(f"{path}: no such file") from error
    except IsADirectoryError as error:
        raise GraphoptError(f"{path}: expected an ONNX file, found a folder") from error
    except (DecodeError, onnx.checker.ValidationError) as error:
        raise GraphoptError(f"{path}: expected an ONNX model, found a file that is none ({error})") from error

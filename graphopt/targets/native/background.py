"""Lower a graph to kernels in another process, which leaves them in the cache, while this process trains."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import tempfile
import threading
import weakref
from pathlib import Path

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.storage import whole
from graphopt.targets.native.cache import cache_folder, own_version
from graphopt.targets.native.lowering import KernelOptions, digest_of_graph, lower_as
from graphopt.targets.native.precision import pieces_for
from graphopt.targets.native.toolchain import logger

_CODE = f"import sys; sys.path[:] = sys.argv[1].split(chr(10)); from {__name__} import main; main()"
_FAILED = 3  # the exit code after an error, which the process then has written


class Lowering:
    """Hold a process that lowers a graph; it ends with this process, or when nobody asks for it any more.

    Args:
        threads: the number of threads of a session.
        precision: of matrix products.

    Raises:
        GraphoptError: the process cannot be started.
    """

    def __init__(self, model: ir.Model, threads: int, precision: str) -> None:
        self._folder = tempfile.TemporaryDirectory(dir=cache_folder())
        (Path(self._folder.name) / "step.onnx").write_bytes(whole(model))
        options = KernelOptions((), threads, False, pieces_for(precision))
        facts = ["\n".join(sys.path), self._folder.name, digest_of_graph(model, options), own_version()]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, *facts, str(threads), str(options.pieces)],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise GraphoptError(f"native: expected a process that compiles, found none: {error}") from error
        self._end = weakref.finalize(self, _ended, self._process, self._folder)
        logger.info("compiling for this machine, once for this graph; steps run without kernels meanwhile")

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def finish(self) -> None:
        """Wait until the kernels are in the cache.

        Raises:
            GraphoptError: the process failed.
        """
        code = self._process.wait()
        said = Path(self._folder.name) / "error"
        text = (
            said.read_text()
            if code == _FAILED and said.exists()
            else f"native: the process that compiles ended with {code}"
        )
        self._end()
        if code:
            raise GraphoptError(text)


def _ended(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    folder.cleanup()


def main() -> None:
    """Lower the graph that the arguments name; end when the process that asked for it does."""
    _, _, name, digest, version, threads, pieces = sys.argv
    folder = Path(name)
    gc.disable()  # of a short process, which makes many objects: a sixth of its time
    threading.Thread(target=_end_with_input, daemon=True).start()
    try:
        if own_version() != version:
            raise GraphoptError(
                "native: expected the same version of graphopt in another process, found another"
            )
        model = ir.from_proto(onnx.load_model(folder / "step.onnx"))
        lower_as(digest, model, KernelOptions((), int(threads), False, int(pieces)))
    except Exception as error:  # noqa: BLE001 (the process that trains tells of whatever fails)
        text = (
            str(error)
            if isinstance(error, GraphoptError)
            else f"native: {type(error).__name__}: {line(error)[:200]}"
        )
        (folder / "error").write_text(text)
        sys.exit(_FAILED)


def _end_with_input() -> None:
    """End this process at the end of its input, a pipe from the process that started it, however that ended."""
    os.read(sys.stdin.fileno(), 1)  # a read of the file object would hold its lock when the process ends
    os._exit(1)

"""Open a form of a step in another process, which leaves what it finds in the cache, while this process trains."""

from __future__ import annotations

import contextlib
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Callable
from pathlib import Path

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.storage import skeleton, weight_bytes, whole
from graphopt.runtime.translation import LARGEST_WEIGHTS, Sample
from graphopt.targets.native.cache import cache_folder, own_version

_CODE = f"import sys; sys.path[:] = sys.argv[1].split(chr(10)); from {__name__} import rehearse; rehearse()"
_FAILED = 3  # the exit code after an error, which the process then has written


class Rehearsal:
    """Hold a process that prepares a form of a step, and compares a step with that of the plain graph.

    What the process makes and finds is in the cache. It ends with this process, or when nobody asks for it any more.

    Args:
        model: the plain graph of one step. It has its weights there unless these are large.
        task: a function that is pickled. Of the graph, it leaves the form in the cache, with its kernels; of the graph
            and the numbers of a step, a note of whether the form computes what the plain graph does.
        content: the graph without its weights, if that is known.

    Attributes:
        is_told: whether the process knows on which numbers to compare the form, or that it is not to.

    Raises:
        GraphoptError: the process cannot be started.
    """

    def __init__(
        self, model: ir.Model, task: Callable[[ir.Model, Sample | None], None], content: bytes | None = None
    ) -> None:
        self.is_told, self._failure = False, ""
        self._folder = tempfile.TemporaryDirectory(dir=cache_folder())
        folder = Path(self._folder.name)
        if content is None:
            is_small = weight_bytes(model) <= LARGEST_WEIGHTS
            content = whole(model) if is_small else skeleton(model)[0]
        (folder / "step.onnx").write_bytes(content)
        (folder / "task").write_bytes(pickle.dumps(task))
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _CODE, "\n".join(sys.path), str(folder), own_version()],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
            )
        except OSError as error:
            raise GraphoptError(f"native: expected a process that compiles, found none: {error}") from error
        self._end = weakref.finalize(self, _ended, self._process, self._folder)

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def compare_on(self, sample: Sample | None) -> None:
        """Make it compare a step on these numbers with the plain one, or end without that."""
        self.is_told = True
        if sample is not None:
            (Path(self._folder.name) / "sample").write_bytes(pickle.dumps(sample))
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):  # it has ended
            os.write(self._process.stdin.fileno(), b"\n")

    def wait(self) -> None:
        """Wait until it ends.

        Raises:
            GraphoptError: it failed.
        """
        if not self.is_told:
            self.compare_on(None)
        if self._end.alive and (code := self._process.wait()):
            said = Path(self._folder.name) / "error"
            is_said = code == _FAILED and said.exists()
            self._failure = said.read_text() if is_said else f"native: the process that compiles ended with {code}"
        self._end()
        if self._failure:
            raise GraphoptError(self._failure)


def _ended(process: subprocess.Popen[bytes], folder: tempfile.TemporaryDirectory[str]) -> None:
    process.kill()
    process.wait()
    if process.stdin is not None:
        process.stdin.close()
    folder.cleanup()


def rehearse() -> None:
    """Rehearse the form in the folder that the arguments name; end when the process that asked for it does."""
    _, _, name, version = sys.argv
    folder, told = Path(name), threading.Event()
    gc.disable()  # of a short process, which makes many objects: a sixth of its time
    threading.Thread(target=_listen, args=[told], daemon=True).start()
    try:
        if own_version() != version:
            raise GraphoptError("native: expected the same version of graphopt in another process, found another")
        task = pickle.loads((folder / "task").read_bytes())
        model = ir.from_proto(onnx.load_model(folder / "step.onnx", load_external_data=False))
        task(model, None)
        told.wait()
        if (folder / "sample").exists():
            sample = pickle.loads((folder / "sample").read_bytes())
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # the process that trains reads the note, and warns
                # If this fails, there is no note, and the process that trains compares by itself.
                with contextlib.suppress(Exception):
                    task(model, sample)
    except Exception as error:  # noqa: BLE001 (the process that trains tells of whatever fails)
        text = (
            str(error) if isinstance(error, GraphoptError) else f"native: {type(error).__name__}: {line(error)[:200]}"
        )
        (folder / "error").write_text(text)
        sys.exit(_FAILED)


def _listen(told: threading.Event) -> None:
    """Note when a byte arrives on standard input, and end this process when standard input closes.

    It is a pipe from the process that started this one, and closes when that process ends, in whatever way.
    """
    # A read of the file object would hold its lock when this process ends.
    while os.read(sys.stdin.fileno(), 1):
        told.set()
    os._exit(1)

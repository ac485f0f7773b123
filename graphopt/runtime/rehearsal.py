"""Open a form of a step in another process, which leaves what it finds in the cache, while this process trains."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import warnings
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError, line
from graphopt.graph.state import put_initial
from graphopt.graph.storage import whole
from graphopt.runtime.bound_session import RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.forms import StepForms, with_shapes
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import buffer
from graphopt.runtime.translation import Sample
from graphopt.targets.native.cache import cache_folder, own_version
from graphopt.targets.native.lowering import lower_to_kernels
from graphopt.targets.native.toolchain import logger

_CODE = f"import sys; sys.path[:] = sys.argv[1].split(chr(10)); from {__name__} import main; main()"
_FAILED = 3  # the exit code after an error, which the process then has written


@dataclass(frozen=True)
class _Task:
    """Hold what a process needs to know of a form, in addition to the graph."""

    device: Device
    shapes: Mapping[str, Sequence[int]] | None
    report: Sequence[str]
    native: bool


class Rehearsal:
    """Hold a process that prepares a form of a step: it lowers the graph, compiles kernels, and compares a step.

    The step is compared with that of the plain graph. What the process makes and finds is in the cache. It ends with
    this process, or when nobody asks for it any more.

    Args:
        model: the plain graph of one step.
        shapes: fixed shapes of the data.
        native: whether the form runs kernels; otherwise, it is that for the runtime.

    Raises:
        GraphoptError: the process cannot be started.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        report: Sequence[str],
        shapes: Mapping[str, Sequence[int]] | None,
        *,
        native: bool,
    ) -> None:
        self.native, self._is_told = native, False
        self._folder = tempfile.TemporaryDirectory(dir=cache_folder())
        folder = Path(self._folder.name)
        (folder / "step.onnx").write_bytes(whole(model))
        (folder / "task").write_bytes(pickle.dumps(_Task(device, shapes, list(report), native)))
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
        if native:
            logger.info(
                "compiling for this machine, once for this graph; steps run without kernels meanwhile"
            )

    @property
    def is_running(self) -> bool:
        return self._process.poll() is None

    def compare_on(self, sample: Sample | None) -> None:
        """Have it compare a step on these numbers with the plain one, or end without that."""
        self._is_told = True
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
        if not self._is_told:
            self.compare_on(None)
        code = self._process.wait()
        said = Path(self._folder.name) / "error"
        if code:
            is_told = code == _FAILED and said.exists()
            text = said.read_text() if is_told else f"native: the process that compiles ended with {code}"
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
    """Rehearse the form in the folder that the arguments name; end when the process that asked for it does."""
    _, _, name, version = sys.argv
    folder, told = Path(name), threading.Event()
    gc.disable()  # of a short process, which makes many objects: a sixth of its time
    threading.Thread(target=_listen, args=[told], daemon=True).start()
    try:
        if own_version() != version:
            raise GraphoptError(
                "native: expected the same version of graphopt in another process, found another"
            )
        task: _Task = pickle.loads((folder / "task").read_bytes())
        model = ir.from_proto(onnx.load_model(folder / "step.onnx"))
        _lower(task, model)
        told.wait()
        if (folder / "sample").exists():
            _compare(task, model, pickle.loads((folder / "sample").read_bytes()))
    except Exception as error:  # noqa: BLE001 (the process that trains tells of whatever fails)
        text = (
            str(error)
            if isinstance(error, GraphoptError)
            else f"native: {type(error).__name__}: {line(error)[:200]}"
        )
        (folder / "error").write_text(text)
        sys.exit(_FAILED)


def _lower(task: _Task, model: ir.Model) -> None:
    """Leave the lowered graph in the cache, with its kernels."""
    shaped, device = with_shapes(model, task.shapes), task.device
    if task.native:
        lower_to_kernels(shaped, threads=device.threads, precision=device.product_precision)
    else:
        device.runtime_target.lower(shaped)


def _compare(task: _Task, model: ir.Model, sample: Sample) -> None:
    """Leave a note in the cache of whether the form computes what the plain graph does."""
    device = dataclasses.replace(task.device, native=task.native)
    put_initial(model, sample.state)
    buffers = StateBuffers(device, model)
    fixed = {name: buffer(device, x) for name, x in sample.fixed.items()}
    options = RunnerOptions(report=task.report, fixed=fixed)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the process that trains reads the note, and warns
        # If this fails, there is no note, and the process that trains compares by itself.
        with contextlib.suppress(Exception):
            StepForms(device, model, buffers, options, task.shapes).settle(0, sample.batch)


def _listen(told: threading.Event) -> None:
    """Note when a byte arrives on standard input, and end this process when standard input closes.

    It is a pipe from the process that started this one, and closes when that process ends, in whatever way.
    """
    while os.read(
        sys.stdin.fileno(), 1
    ):  # a read of the file object would hold its lock when this process ends
        told.set()
    os._exit(1)

"""Open ONNX Runtime on a GPU by NVIDIA."""

from __future__ import annotations

import contextlib
import functools
import io
from collections.abc import Iterable
from types import ModuleType
from typing import TYPE_CHECKING

from numpy import ndarray

from graphopt.runtime.providers.provider import Provider

if TYPE_CHECKING:
    import onnxruntime

# As on the CPU, no search for the fastest convolution at each new shape.
_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}


class Cuda(Provider):
    """Open ONNX Runtime on a GPU by NVIDIA, `cuda` or `cuda:N`.

    Steps, evaluations and copies run in streams of their own, of which other packages do not know.
    """

    kind, own, package = "cuda", "CUDAExecutionProvider", "onnxruntime-gpu"
    is_numbered = captures = True
    # It makes one Split of Slices: an uneven Split copies a table of all positions to the device in each step.
    slow_optimizers = ("GatherSliceToSplitFusion",)

    def load(self) -> None:
        _load(self.ort)

    @functools.cached_property
    def product_unit(self) -> float | None:
        chosen = {**self.own_options(), **(self.options.provider_options or {})}
        return None if chosen["use_tf32"] in (0, "0") else 2.0**-10

    def precision_obstacle(self, compiles: bool) -> str | None:
        return None

    def own_options(self, captures: bool = False) -> dict[str, object]:
        rounds = {"use_tf32": int(self.precision != "highest")}
        return {
            "device_id": self.index,
            **_OPTIONS,
            **rounds,
            **({"enable_cuda_graph": 1} if captures else {}),
        }

    def await_writers(self, binding: onnxruntime.IOBinding, tensors: Iterable[object] | None = None) -> None:
        own = ndarray, self.ort.OrtValue
        if tensors is None or not all(isinstance(x, own) for x in tensors):
            binding.synchronize_inputs()

    def agent_memory(self) -> object:
        c = self.ort.capi._pybind_state
        return c.OrtDevice(c.OrtDevice.cuda(), c.OrtDevice.default_memory(), self.index)


@functools.cache
def _load(ort: ModuleType) -> None:
    """Load CUDA and cuDNN from their wheels, if these are installed, once a process."""
    # Otherwise, each session warns where the GPU's folder in /sys is not to be seen.
    ort.set_default_logger_severity(3)
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            ort.preload_dlls()

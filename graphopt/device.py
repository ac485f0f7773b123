"""Where sessions run and state lives: the one module, beside passes that build on it, that imports onnxruntime."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError

if TYPE_CHECKING:
    import onnxruntime

# onnxruntime 1.19 fuses a Transpose and a MatMul into an operator that it lacks in double.
UNSAFE_IN_DOUBLE = ["MatmulTransposeFusion"]


class Device:
    """A device of ONNX Runtime: `cpu`, `cuda` or `cuda:N`."""

    def __init__(self, device: str, threads: int | None, deterministic: bool) -> None:
        self.kind, _, index = device.partition(":")
        if self.kind not in ("cpu", "cuda") or (index and (self.kind == "cpu" or not index.isdigit())):
            raise GraphoptError(f"device: expected 'cpu', 'cuda' or 'cuda:N', found {device!r}")
        self.index = int(index or 0)
        self._ort = _runtime()
        self._options = self._ort.SessionOptions()
        self._options.log_severity_level = 4  # what goes wrong is raised
        self._options.intra_op_num_threads = threads or 0
        self._options.use_deterministic_compute = deterministic
        if self.kind == "cuda" and "CUDAExecutionProvider" not in self._ort.get_available_providers():
            raise GraphoptError(
                f"device {device!r}: expected CUDAExecutionProvider, this onnxruntime has "
                f"{', '.join(self._ort.get_available_providers())}: pip install 'graphopt[gpu]'"
            )

    def session(self, model: ir.Model) -> onnxruntime.InferenceSession:
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.kind == "cuda":
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": self.index}))
        try:
            session = self._ort.InferenceSession(
                ir.to_proto(model).SerializeToString(),
                sess_options=self._options,
                providers=providers,
                disabled_optimizers=UNSAFE_IN_DOUBLE if _is_double(model) else None,
            )
        except Exception as error:
            raise GraphoptError(
                f"onnxruntime {self._ort.__version__} refuses the graph: {' '.join(str(error).split())}"
            ) from error
        if self.kind == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
            raise GraphoptError(
                f"device 'cuda:{self.index}': the CUDA provider did not start: look for its libraries and a GPU"
            )
        return session

    def buffer(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Return a buffer on the device of its own, never memory shared with `array`."""
        value = self._ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, self.kind, self.index
        )
        value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
        return value

    def bind(self, binding: onnxruntime.IOBinding, name: str, array: np.ndarray) -> None:
        binding.bind_cpu_input(name, array if array.flags.c_contiguous else np.ascontiguousarray(array))

    def run(self, session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding) -> None:
        try:
            session.run_with_iobinding(binding)
        except RuntimeError as error:
            raise GraphoptError(f"onnxruntime stopped: {' '.join(str(error).split())}") from error


def _is_double(model: ir.Model) -> bool:
    return any(value.dtype == ir.DataType.DOUBLE for value in model.graph.inputs)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(
            "executing needs an ONNX Runtime, found none: pip install 'graphopt[cpu]', 'graphopt[gpu]' or "
            "'graphopt[training]', exactly one of them in an environment"
        ) from error
    return onnxruntime

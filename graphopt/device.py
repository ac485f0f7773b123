"""Where sessions run and state lives: the one module, beside passes that build on it, that imports onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.roles import RUNTIME, TRAINING_RUNTIME

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
        self.ort = _runtime()
        self._threads, self._deterministic = threads or 0, deterministic
        self._options = self.options()
        if self.kind == "cuda" and "CUDAExecutionProvider" not in self.ort.get_available_providers():
            raise GraphoptError(
                f"device {device!r}: expected CUDAExecutionProvider, this onnxruntime has "
                f"{', '.join(self.ort.get_available_providers())}: pip install 'graphopt[gpu]'"
            )

    def session(
        self, model: ir.Model, options: onnxruntime.SessionOptions | None = None
    ) -> onnxruntime.InferenceSession:
        providers: list[Any] = ["CPUExecutionProvider"]
        if self.kind == "cuda":
            providers.insert(0, ("CUDAExecutionProvider", {"device_id": self.index}))
        try:
            session = self.ort.InferenceSession(
                ir.to_proto(model).SerializeToString(),
                sess_options=options or self._options,
                providers=providers,
                disabled_optimizers=UNSAFE_IN_DOUBLE if _is_double(model) else None,
            )
        except Exception as error:
            if model.metadata_props.get(RUNTIME) == TRAINING_RUNTIME and not self.trains:
                raise GraphoptError(
                    f"the graph needs {TRAINING_RUNTIME}, found onnxruntime {self.ort.__version__}: pip install "
                    f"'graphopt[training]' in an environment of its own, or compile without OrtGradient and fused "
                    f"kernels"
                ) from error
            raise GraphoptError(
                f"onnxruntime {self.ort.__version__} refuses the graph: {' '.join(str(error).split())}"
            ) from error
        if self.kind == "cuda" and "CUDAExecutionProvider" not in session.get_providers():
            raise GraphoptError(
                f"device 'cuda:{self.index}': the CUDA provider did not start: look for its libraries and a GPU"
            )
        return session

    @property
    def trains(self) -> bool:
        """Whether the runtime is onnxruntime-training."""
        return hasattr(self.ort.capi._pybind_state, "GradientGraphBuilder")

    def options(self) -> onnxruntime.SessionOptions:
        """Return options for a session of its own."""
        options = self.ort.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        options.intra_op_num_threads = self._threads
        options.use_deterministic_compute = self._deterministic
        return options

    def buffer(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Return a buffer on the device of its own, never memory shared with `array`."""
        value = self.ort.OrtValue.ortvalue_from_shape_and_type(
            list(array.shape), array.dtype.type, self.kind, self.index
        )
        value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
        return value

    def host(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Return a buffer in the host's memory."""
        return self.ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type)

    def value(self, tensor: Any, dtype: np.dtype[Any]) -> onnxruntime.OrtValue:
        """Return a tensor of NumPy, ONNX Runtime, or any package that speaks DLPack, copied only if it lies elsewhere.

        Raises:
            GraphoptError: it is none of these, or cannot be shared: it is not contiguous, say.
        """
        c = self.ort.capi._pybind_state
        if isinstance(tensor, self.ort.OrtValue):
            return tensor
        if isinstance(tensor, c.OrtValue):
            return self.ort.OrtValue(tensor)
        if isinstance(tensor, np.ndarray):
            array = np.ascontiguousarray(tensor).reshape(tensor.shape)
            return self.ort.OrtValue.ortvalue_from_numpy(array, self.kind, self.index)
        if not hasattr(tensor, "__dlpack__"):
            raise GraphoptError(
                f"expected an array, an OrtValue or a tensor with DLPack, found {type(tensor).__name__}"
            )
        try:
            if dtype == np.bool_:  # which ONNX Runtime does not take by DLPack
                return self.value(np.from_dlpack(tensor), dtype)
            return self.ort.OrtValue(c.OrtValue.from_dlpack(tensor.__dlpack__()))
        except (BufferError, RuntimeError) as error:
            raise GraphoptError(f"expected a tensor to share: {' '.join(str(error).split())}") from error

    def compute(
        self,
        session: onnxruntime.InferenceSession,
        feeds: Mapping[str, onnxruntime.OrtValue],
        names: Sequence[str],
    ) -> dict[str, onnxruntime.OrtValue]:
        """Run a session on values and return its outputs `names`, which stay on the device."""
        binding = session.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, self.kind, self.index)
        self.run(session, binding)
        return dict(zip(names, binding.get_outputs(), strict=True))

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

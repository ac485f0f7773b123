"""Where sessions run and state lives: the one module, beside passes that build on it, that imports onnxruntime."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.large_models import is_large, weights_apart
from graphopt.graph.metadata import RUNTIME
from graphopt.graph.roles import TRAINING_RUNTIME
from graphopt.runtime.denormals import Flushing, supported

if TYPE_CHECKING:
    import onnxruntime

Tensor = Any  # an np.ndarray, an OrtValue of ONNX Runtime, or what speaks DLPack
CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SUFFIX = "ExecutionProvider"
THREADS = {"OpenVINOExecutionProvider": "num_of_threads", "XnnpackExecutionProvider": "intra_op_num_threads"}
HOST = 1  # DLPack's number of the host's memory
SESSION_OPTIONS = (
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
    *("graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level"),
    *("log_verbosity_level", "use_deterministic_compute", "use_per_session_threads"),
)
ENTRIES = ("session.", "optimization.", "mlas.")
ALIGNED = 64  # bytes, as the runtime's own buffers are
SUMMED = (np.dtype(np.float32), np.dtype(np.float64), np.dtype(np.float16))
DENORMALS = "session.set_denormal_as_zero"  # in the threads of the session's pool
PLACEMENT = "session.record_ep_graph_assignment_info"

# It makes a / b of 1 / b * a, and loses a if another rule removes its node (microsoft/onnxruntime#32416).
UNSAFE = ["DivMulFusion"]
# onnxruntime 1.19 fuses a Transpose and a MatMul into an operator that it lacks in double.
UNSAFE_IN_DOUBLE = ["MatmulTransposeFusion"]


class Device:
    """Where memory is, and the execution provider that computes.

    Args:
        device: `cpu`, `cuda` or `cuda:N`.
        threads: threads an operator may use; the runtime's choice by default.
        deterministic: ask the runtime for kernels that give the same numbers each run.
        provider: an execution provider of the installed ONNX Runtime, its whole name or as in `openvino`; the device's
            by default. What it has no kernel for runs on the CPU.
        provider_options: the provider's own options.
        cuda_graph: capture what a step does on the GPU once, and replay it.
        session_options: of ONNX Runtime's sessions, by name: attributes of its SessionOptions, such as
            `inter_op_num_threads`, and configuration entries, such as `session.intra_op.allow_spinning`; none that
            reads or writes files, as recipes may set them.
        flush_denormals: compute with 0 in place of denormal numbers, those below 1e-38 in float32, which processors are
            slow with; on the CPU, on Linux and x86-64. Other code of the calling thread is as before.
        low_memory: give each buffer back after its last reader: no plan of a step's memory, and no buffers kept for
            others to come. Small graphs are slower for it.

    Raises:
        GraphoptError: no ONNX Runtime is installed, or it lacks the device or the provider.
    """

    def __init__(
        self,
        device: str,
        threads: int | None = None,
        deterministic: bool = False,
        *,
        provider: str | None = None,
        provider_options: Mapping[str, Any] | None = None,
        cuda_graph: bool = False,
        low_memory: bool = False,
        flush_denormals: bool = False,
        session_options: Mapping[str, Any] | None = None,
    ) -> None:
        self.kind, _, index = device.partition(":")
        if self.kind not in ("cpu", "cuda") or (index and (self.kind == "cpu" or not index.isdigit())):
            raise GraphoptError(f"device: expected 'cpu', 'cuda' or 'cuda:N', found {device!r}")
        self.name, self.index = device, int(index or 0)
        self.ort = _runtime()
        if threads is not None and threads < 0:
            raise GraphoptError(
                f"threads: expected 1 or more, or None for the runtime's choice, found {threads}"
            )
        self._threads, self._deterministic = threads or 0, deterministic
        self._low_memory = low_memory
        self._session_options = dict(session_options or {})
        self._flushing = Flushing() if flush_denormals and supported() and self.kind == "cpu" else None
        self._options = self.options()
        # Large weights lie in memory of ours as long as a session reads them.
        self._weights: WeakKeyDictionary[onnxruntime.InferenceSession, list[Any]] = WeakKeyDictionary()
        available = self.ort.get_available_providers()
        if provider is None and self.kind == "cuda" and CUDA not in available:
            raise GraphoptError(
                f"device {device!r}: expected {CUDA}, this onnxruntime has {', '.join(available)}: "
                f"pip install onnxruntime-gpu"
            )
        wanted = provider or (CUDA if self.kind == "cuda" else CPU)
        names = {name.lower().removesuffix(SUFFIX.lower()): name for name in available}
        short = wanted.lower().removesuffix(SUFFIX.lower())
        if short not in names:
            raise GraphoptError(
                f"provider {wanted!r}: expected one of the installed onnxruntime's, found {', '.join(available)}"
            )
        self.provider = names[short]
        self.cuda_graph = cuda_graph
        if cuda_graph and (self.kind, self.provider) != ("cuda", CUDA):
            raise GraphoptError(
                f"cuda_graph: expected device 'cuda' and its own provider, found {device!r} and {self.provider}"
            )
        chosen: dict[str, Any] = {}
        if self.kind == "cuda":
            chosen["device_id"] = self.index
        if threads and self.provider in THREADS:
            chosen[THREADS[self.provider]] = threads
        if cuda_graph:
            chosen["enable_cuda_graph"] = 1
        chosen |= provider_options or {}
        self._providers: list[Any] = [(self.provider, {name: str(value) for name, value in chosen.items()})]
        if self.provider != CPU:
            self._providers.append(CPU)

    @property
    def _not_started(self) -> str:
        return f"device {self.name!r}: {self.provider} did not start: look for its libraries and a device"

    def session(
        self,
        model: ir.Model,
        options: onnxruntime.SessionOptions | None = None,
    ) -> onnxruntime.InferenceSession:
        """Return a session of a graph.

        Args:
            options: those from `options`, changed.

        Raises:
            GraphoptError: the runtime refuses the graph, or the provider does not start.
        """
        try:
            content, given, weights = self._serialized(model, options)
            with (
                self._flushing or contextlib.nullcontext()
            ):  # the first session would change this thread for good
                session = self.ort.InferenceSession(
                    content,
                    sess_options=given,
                    providers=self._providers,
                    disabled_optimizers=UNSAFE + (UNSAFE_IN_DOUBLE if _is_double(model) else []),
                    enable_fallback=0,  # to another provider, with a line on the terminal
                )
        except Exception as error:
            if RUNTIME.read(model) == TRAINING_RUNTIME and not self.trains:
                raise GraphoptError(
                    f"the graph needs {TRAINING_RUNTIME}, found onnxruntime {self.ort.__version__}: pip install "
                    f"onnxruntime-training==1.19.2 in an environment of its own, or compile without OrtGradient and "
                    f"fused kernels"
                ) from error
            by = "" if self.provider == CPU else f"{self.provider} of "
            reason = " ".join(str(error).split())
            if "NOT_IMPLEMENTED" in reason:
                reason += ", for these element types: take another precision, runtime or provider"
            raise GraphoptError(
                f"{by}onnxruntime {self.ort.__version__} refuses the graph: {reason}"
            ) from error
        if self.provider not in session.get_providers():
            raise GraphoptError(self._not_started)
        self._weights[session] = weights
        return session

    def _serialized(
        self, model: ir.Model, options: onnxruntime.SessionOptions | None
    ) -> tuple[bytes, onnxruntime.SessionOptions, list[onnxruntime.OrtValue]]:
        """Return a graph as bytes, options, and the weights that the options refer to, being too large for bytes."""
        if not is_large(model):
            return ir.to_proto(model).SerializeToString(), options or self._options, []
        with weights_apart(model) as weights:
            content = ir.to_proto(model).SerializeToString()
        values = [self.ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in weights.values()]
        options = options or self.options()
        options.add_external_initializers([*weights], values)
        return content, options, values

    def placement(self, session: onnxruntime.InferenceSession) -> dict[str, dict[str, int]]:
        """Return for each execution provider the operators that it runs, and how many nodes of each.

        Raises:
            GraphoptError: the runtime does not tell; onnxruntime 1.24 and later do.
        """
        if not hasattr(session, "get_provider_graph_assignment_info"):
            raise GraphoptError(
                f"placement: expected onnxruntime 1.24 or later, found {self.ort.__version__}"
            )
        found: dict[str, Counter[str]] = {}
        for part in session.get_provider_graph_assignment_info():
            found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
        return {name: dict(counts.most_common()) for name, counts in found.items()}

    @property
    def on_cpu(self) -> bool:
        """Whether ONNX Runtime's own CPU kernels compute."""
        return self.provider == CPU

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
        options.enable_mem_pattern = options.enable_mem_reuse = not self._low_memory
        options.add_session_config_entry(PLACEMENT, "1")
        if self._flushing is not None:
            options.add_session_config_entry(DENORMALS, "1")
        for name, value in self._session_options.items():
            if name in SESSION_OPTIONS:
                self._set(options, name, value)
            elif name.startswith(ENTRIES) and not any(word in name for word in ("file", "path", "model")):
                options.add_session_config_entry(name, str(value))
            else:
                raise GraphoptError(
                    unknown("session option", name, [*SESSION_OPTIONS, *(f"{x}..." for x in ENTRIES)])
                )
        return options

    @staticmethod
    def _set(options: onnxruntime.SessionOptions, name: str, value: Any) -> None:
        try:
            setattr(options, name, value)
        except (AttributeError, TypeError) as error:
            raise GraphoptError(
                f"session_options.{name}: expected another value, found {value!r}: {str(error).splitlines()[0]}"
            ) from error

    def buffer(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Return a buffer on the device of its own, never memory shared with `array`.

        Raises:
            GraphoptError: the device does not start.
        """
        try:
            value = self.ort.OrtValue.ortvalue_from_shape_and_type(
                list(array.shape), array.dtype.type, self.kind, self.index
            )
        except RuntimeError as error:
            raise GraphoptError(self._not_started) from error
        value.update_inplace(np.ascontiguousarray(array).reshape(array.shape))
        return value

    def buffers(
        self, arrays: Mapping[str, np.ndarray]
    ) -> tuple[dict[str, onnxruntime.OrtValue], list[np.ndarray]]:
        """Return a buffer for each of some arrays and, on the CPU, the memory in which those of one type lie in a row.

        Between them are zeros, so that each starts at a multiple of `ALIGNED` bytes.
        """
        values, memory = {}, []
        for dtype in SUMMED if self.kind == "cpu" else ():
            alike = {name: array for name, array in arrays.items() if array.dtype == dtype}
            if not alike:
                continue
            sizes = [-(-array.nbytes // ALIGNED) * ALIGNED for array in alike.values()]
            raw = np.zeros(sum(sizes) + ALIGNED, np.uint8)
            start = -raw.ctypes.data % ALIGNED
            flat = raw[start : start + sum(sizes)].view(dtype)
            for (name, array), part in zip(alike.items(), _cut(flat, sizes), strict=True):
                part = part[: array.size].reshape(array.shape)
                part[...] = array
                values[name] = self.shared(part)
            memory.append(flat)
        return {name: values.get(name) or self.buffer(array) for name, array in arrays.items()}, memory

    def shared(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Return a value in the host's memory that is `array`'s.

        Raises:
            GraphoptError: the runtime takes no arrays of its element type.
        """
        try:
            return self.ort.OrtValue.ortvalue_from_numpy(array)
        except RuntimeError as error:
            raise GraphoptError(
                f"expected an element type that onnxruntime takes as an array, found {array.dtype}"
            ) from error

    def value(self, tensor: Tensor, dtype: np.dtype[Any]) -> onnxruntime.OrtValue:
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
            if self.kind == "cpu":
                return self.shared(array)
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

    def on_host(self, tensor: Tensor) -> np.ndarray | None:
        """Return a tensor as an array without a copy, or None if it lies on a device."""
        if isinstance(tensor, np.ndarray):
            return tensor
        if isinstance(tensor, self.ort.OrtValue):
            return tensor.numpy() if tensor.device_name() == "cpu" else None
        if hasattr(tensor, "__dlpack_device__") and tensor.__dlpack_device__()[0] == HOST:
            return np.from_dlpack(tensor)
        return None

    def placed(self, tensor: Tensor) -> Tensor:
        """Return an array on the device: on the CPU as it is; other tensors stay where they are."""
        if self.kind == "cpu" or self.cuda_graph or not isinstance(tensor, np.ndarray):
            return tensor
        return self.value(tensor, tensor.dtype)

    def fill(self, buffer: onnxruntime.OrtValue, tensor: Tensor, dtype: np.dtype[Any]) -> None:
        """Copy a tensor as `value` takes it into a buffer of its shape, by way of the host."""
        array = tensor if isinstance(tensor, np.ndarray) else self.value(tensor, dtype).numpy()
        buffer.update_inplace(np.ascontiguousarray(array).reshape(array.shape))

    def captured(self, graph: int) -> onnxruntime.RunOptions | None:
        """Return the options of a run that is captured as a session's CUDA graph of a number, or replays it."""
        if not self.cuda_graph:
            return None
        options = self.ort.RunOptions()
        options.add_run_config_entry("gpu_graph_id", str(graph))
        return options

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

    def bind(self, binding: onnxruntime.IOBinding, name: str, tensor: Tensor, dtype: np.dtype[Any]) -> Any:
        """Bind an input to a tensor as `value` takes it; return what has to live until the run."""
        if isinstance(tensor, np.ndarray):
            array = tensor if tensor.flags.c_contiguous else np.ascontiguousarray(tensor)
            binding.bind_cpu_input(name, array)
            return array
        value = self.value(tensor, dtype)
        binding.bind_ortvalue_input(name, value)
        return value

    def kept(self, value: onnxruntime.OrtValue) -> onnxruntime.OrtValue:
        """Return a binding's output that stays as it is; in ONNX Runtime 1.19 its binding's next run replaces it."""
        vector = self.ort.capi._pybind_state.OrtValueVector()
        vector.push_back(value._ortvalue)
        return self.ort.OrtValue(vector[0])

    def bind_output(self, binding: onnxruntime.IOBinding, name: str, *, on_host: bool) -> None:
        """Let a run allocate an output, in the host's memory or on the device."""
        binding.bind_output(name, *(("cpu",) if on_host else (self.kind, self.index)))

    def run(
        self,
        session: onnxruntime.InferenceSession,
        binding: onnxruntime.IOBinding,
        options: onnxruntime.RunOptions | None = None,
    ) -> None:
        """Run a session once.

        Raises:
            GraphoptError: the runtime stops.
        """
        try:
            if self._flushing is None:
                session.run_with_iobinding(binding, options)
            else:
                with self._flushing:
                    session.run_with_iobinding(binding, options)
        except RuntimeError as error:
            raise GraphoptError(f"onnxruntime stopped: {' '.join(str(error).split())}") from error


def _cut(flat: np.ndarray, sizes: Sequence[int]) -> list[np.ndarray]:
    """Return parts of some bytes each of a vector."""
    return np.split(flat, np.cumsum(sizes)[:-1] // flat.itemsize)


def _is_double(model: ir.Model) -> bool:
    return any(value.dtype == ir.DataType.DOUBLE for value in model.graph.inputs)


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(
            "executing needs an ONNX Runtime, found none: pip install onnxruntime, onnxruntime-gpu or "
            "onnxruntime-training==1.19.2, exactly one of them in an environment"
        ) from error
    return onnxruntime

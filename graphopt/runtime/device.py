"""Where memory is and what computes: a device, its execution provider and its options; imports onnxruntime."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from graphopt.errors import GraphoptError, unknown
from graphopt.runtime.denormals import Flushing, supported

if TYPE_CHECKING:
    import onnxruntime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SUFFIX = "ExecutionProvider"
THREADS = {"OpenVINOExecutionProvider": "num_of_threads", "XnnpackExecutionProvider": "intra_op_num_threads"}
SESSION_OPTIONS = (
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
    *("graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level"),
    *("log_verbosity_level", "use_deterministic_compute", "use_per_session_threads"),
)
ENTRIES = ("session.", "optimization.", "mlas.")
DENORMALS = "session.set_denormal_as_zero"  # in the threads of the session's pool
PLACEMENT = "session.record_ep_graph_assignment_info"


@dataclass(kw_only=True, eq=False, repr=False)  # an executor inherits them
class DeviceOptions:
    """Declare the options of a device: the one place of an option of the runtime, beside its line in a recipe.

    Args:
        threads: threads an operator may use; the runtime's choice by default.
        deterministic: ask the runtime for kernels that give the same numbers each run.
        provider: an execution provider of the installed ONNX Runtime, its whole name or as in `openvino`; the device's
            by default. What it has no kernel for runs on the CPU.
        provider_options: the provider's own options.
        cuda_graph: capture what a step does on the GPU once, and replay it. Every shape of the batch has a graph of its
            own; a step with If, Loop or Scan has none.
        low_memory: give each buffer back after its last reader: no plan of a step's memory, and no buffers kept for
            others to come. Small graphs are slower for it.
        flush_denormals: compute with 0 in place of denormal numbers, those below 1e-38 in float32, which processors are
            slow with; on the CPU, on Linux and x86-64. Other code of the calling thread is as before.
        session_options: of ONNX Runtime's sessions, by name: attributes of its SessionOptions, such as
            `inter_op_num_threads`, and configuration entries, such as `session.intra_op.allow_spinning`; none that
            reads or writes files, as recipes may set them.
    """

    threads: int | None = None
    deterministic: bool = False
    provider: str | None = None
    provider_options: Mapping[str, Any] | None = None
    cuda_graph: bool = False
    low_memory: bool = False
    flush_denormals: bool = True
    session_options: Mapping[str, Any] | None = None


@dataclass(eq=False)
class Device(DeviceOptions):
    """Choose a device, and the execution provider that computes on it.

    >>> import graphopt
    >>> graphopt.Device("cpu", threads=2).execution_provider
    'CPUExecutionProvider'

    Args:
        name: `cpu`, `cuda` or `cuda:N`.

    Raises:
        GraphoptError: no ONNX Runtime is installed, it lacks the device or the provider, or an option does not fit.
    """

    name: str = "cpu"

    def __post_init__(self) -> None:
        self.kind, _, index = self.name.partition(":")
        if self.kind not in ("cpu", "cuda") or (index and (self.kind == "cpu" or not index.isdigit())):
            raise GraphoptError(f"device: expected 'cpu', 'cuda' or 'cuda:N', found {self.name!r}")
        if self.threads is not None and self.threads < 0:
            raise GraphoptError(
                f"threads: expected 1 or more, or None for the runtime's choice, found {self.threads}"
            )
        self.index = int(index or 0)
        self.ort = _runtime()
        self.flushing = Flushing() if self.flush_denormals and supported() and self.kind == "cpu" else None
        self.new_session_options()  # which refuses unknown ones
        self.execution_provider = self._found_provider()
        if self.cuda_graph and (self.kind, self.execution_provider) != ("cuda", CUDA):
            raise GraphoptError(
                f"cuda_graph: expected device 'cuda' and its own provider, found {self.name!r} and "
                f"{self.execution_provider}"
            )

    @classmethod
    def of(cls, device: str | Device, options: DeviceOptions) -> Device:
        """Return a device by its name with options, or a device that has options of its own.

        Raises:
            GraphoptError: as the class says, or a device is given and options beside it.
        """
        fields = dataclasses.fields(DeviceOptions)
        if not isinstance(device, Device):
            return cls(device, **{field.name: getattr(options, field.name) for field in fields})
        for field in fields:
            found = getattr(options, field.name)
            if found != field.default:
                raise GraphoptError(
                    f"{field.name}: expected it in the Device that is given, found {found!r} beside it"
                )
        return device

    @property
    def on_cpu(self) -> bool:
        """Return whether ONNX Runtime's own CPU kernels compute."""
        return self.execution_provider == CPU

    @property
    def trains(self) -> bool:
        """Return whether the runtime is onnxruntime-training."""
        return hasattr(self.ort.capi._pybind_state, "GradientGraphBuilder")

    @property
    def providers(self) -> list[Any]:
        """The provider with its options, and the CPU's behind it, as sessions take them."""
        chosen: dict[str, Any] = {}
        if self.kind == "cuda":
            chosen["device_id"] = self.index
        if self.threads and self.execution_provider in THREADS:
            chosen[THREADS[self.execution_provider]] = self.threads
        if self.cuda_graph:
            chosen["enable_cuda_graph"] = 1
        chosen |= self.provider_options or {}
        first = (self.execution_provider, {name: str(value) for name, value in chosen.items()})
        return [first] if self.on_cpu else [first, CPU]

    def new_session_options(self) -> onnxruntime.SessionOptions:
        """Return options for one session.

        Raises:
            GraphoptError: an option of `session_options` is unknown, or of another type.
        """
        options = self.ort.SessionOptions()
        options.log_severity_level = 4  # what goes wrong is raised
        options.intra_op_num_threads = self.threads or 0
        options.use_deterministic_compute = self.deterministic
        options.enable_mem_pattern = options.enable_mem_reuse = not self.low_memory
        options.add_session_config_entry(PLACEMENT, "1")
        if self.flushing is not None:
            options.add_session_config_entry(DENORMALS, "1")
        for name, value in (self.session_options or {}).items():
            if name in SESSION_OPTIONS:
                _set(options, name, value)
            elif name.startswith(ENTRIES) and not any(word in name for word in ("file", "path", "model")):
                options.add_session_config_entry(name, str(value))
            else:
                raise GraphoptError(
                    unknown("session option", name, [*SESSION_OPTIONS, *(f"{x}..." for x in ENTRIES)])
                )
        return options

    def not_started(self) -> GraphoptError:
        """Return the error of a provider that does not start."""
        return GraphoptError(
            f"device {self.name!r}: {self.execution_provider} did not start: look for its libraries and a device"
        )

    def _found_provider(self) -> str:
        """Return the whole name of the provider."""
        available = self.ort.get_available_providers()
        if self.provider is None and self.kind == "cuda" and CUDA not in available:
            raise GraphoptError(
                f"device {self.name!r}: expected {CUDA}, this onnxruntime has {', '.join(available)}: "
                f"pip install onnxruntime-gpu"
            )
        wanted = self.provider or (CUDA if self.kind == "cuda" else CPU)
        names = {name.lower().removesuffix(SUFFIX.lower()): name for name in available}
        short = wanted.lower().removesuffix(SUFFIX.lower())
        if short not in names:
            raise GraphoptError(
                f"provider {wanted!r}: expected one of the installed onnxruntime's, found {', '.join(available)}"
            )
        return names[short]


def _set(options: onnxruntime.SessionOptions, name: str, value: Any) -> None:
    try:
        setattr(options, name, value)
    except (AttributeError, TypeError) as error:
        raise GraphoptError(
            f"session_options.{name}: expected another value, found {value!r}: {str(error).splitlines()[0]}"
        ) from error


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(
            "executing needs an ONNX Runtime, found none: pip install onnxruntime, onnxruntime-gpu or "
            "onnxruntime-training==1.19.2, exactly one of them in an environment"
        ) from error
    return onnxruntime

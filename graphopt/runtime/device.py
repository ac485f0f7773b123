"""Choose a device, its execution provider and its options. This module imports onnxruntime."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import os
import re
import weakref
from collections.abc import Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import onnx_ir as ir

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError, line, unknown
from graphopt.fields import check_options
from graphopt.files import ReadPath
from graphopt.runtime.arena import share_arena
from graphopt.runtime.denormals import Flushing, supported
from graphopt.runtime.webgpu import CAPTURES, LOCK, WEBGPU, copier, entry_of, no_adapter, plugin_device
from graphopt.targets.native.precision import UNITS as PRODUCT_UNITS
from graphopt.targets.native.precision import MatmulPrecision, chosen_precision, obstacle
from graphopt.targets.target import AUTO, NATIVE, ONNXRUNTIME, Target, target_of

if TYPE_CHECKING:
    import onnxruntime

CPU, CUDA = "CPUExecutionProvider", "CUDAExecutionProvider"
SUFFIX = "ExecutionProvider"
THREADS = {"OpenVINOExecutionProvider": "num_of_threads", "XnnpackExecutionProvider": "intra_op_num_threads"}
_FROZEN = ("auto", "packed", "mapped", "low")
MOST_THREADS = 1_024  # more would take the memory, or end the process
SESSION_OPTIONS = (
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
    *("graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level"),
    *("log_verbosity_level", "use_deterministic_compute", "use_per_session_threads"),
)
ENTRIES = ("session.", "optimization.", "mlas.")
DENORMALS = "session.set_denormal_as_zero"  # for the threads of the session's pool
NATIVE_VARIABLE, VERIFY = "GRAPHOPT_NATIVE", "GRAPHOPT_VERIFY"  # of the environment
# Integer kernels in place of float ones between quantized weights, which round otherwise than the graph does. Moving a
# DequantizeLinear over a Reshape makes some graphs invalid (tests/faults.py: DequantizeLinear-Reshape).
AS_WRITTEN = {"session.disable_quant_qdq": "1", "session.qdq_matmulnbits_accuracy_level": "1"}
# As on the CPU, no search for the fastest convolution at each new shape.
_CUDA_OPTIONS = {"cudnn_conv_algo_search": "HEURISTIC"}
PLACEMENT = "session.record_ep_graph_assignment_info"


@dataclass(frozen=True, kw_only=True, eq=False)
class DeviceOptions(metaclass=Checked):
    """Declare the options of a device. A new option needs a field here and a line in a recipe.

    Args:
        threads: the number of threads per operator; by default, the runtime's choice.
        deterministic: use kernels that return the same numbers in each run, and evaluate in one form.
        provider: an execution provider of the installed ONNX Runtime, by its full or short name, such as `openvino`;
            by default, the device's own. Operators without a kernel run on the CPU.
        provider_options: the options of the provider. On CUDA, `use_tf32: 1` rounds products to 10 bits and is faster,
            `cudnn_conv_algo_search: EXHAUSTIVE` times all algorithms for each new shape, and `gpu_mem_limit` holds for
            each session, without state and batches. On WebGPU, the first session's options, such as `powerPreference`,
            hold for all sessions of a process.
        graph_capture: on a GPU, capture the commands of a step, once per batch shape, and replay them. Steps with If,
            Loop or Scan, or with nodes on the CPU, are not supported.
        low_memory: free each buffer after its last reader, without a memory plan or buffers for reuse. Small graphs
            become slower.
        frozen: where the weights lie that do not train. `packed`: each session has copies in the layout of its kernels,
            up to three on CPUs; the fastest for small batches. `mapped`: all sessions read the same memory, which for
            large files is the file itself, and a GPU has one copy. `low`: as `mapped`, and each value of a step is
            freed after its last reader, as with `low_memory`; on CPUs, these sessions share the memory of values,
            which the process keeps. `auto`: `packed` below 512 MB, `low` from 2 GB.
        flush_denormals: compute with 0 in place of denormal numbers (below 1e-38 in float32), which are slow; on CPUs
            with Linux and x86-64 only. Other code in the calling thread is not affected.
        native: lower steps to the machine: compile kernels for it with the system's C compiler. `auto` does so on the
            CPU for models of 10,000 parameters or more without float16 values, keeps the faster form, and runs the
            graph as it is without a compiler. A graph of 500 nodes or more also runs as it is while another process
            compiles and compares, and then in both forms in turns, unless steps are `deterministic`. Where `frozen` is
            `low`, as for files from 2 GB, it takes kernels without measuring both forms, which would take minutes.
            True insists; None takes the environment variable GRAPHOPT_NATIVE, or `auto`. Evaluations and predictions
            that take longer than a second run in kernels, too, or with the weights as constants as long as the state
            stays the same, where that is faster.
        target: what steps are lowered for: `native` and `onnxruntime` are as `native=True` and `native=False`,
            `plain` runs the graph as it is, and a `graphopt.Target` has passes of its own. `auto` takes the option
            `native`.
        matmul_precision: the precision in which matrix products, convolutions, attention and recurrent layers multiply
            float32 numbers; sums are float32, and so is all else. `highest` multiplies float32 numbers. `high` takes
            each as the sum of two bfloat16 numbers and leaves out the product of the smaller ones: results differ by
            about 1e-5. `medium` rounds them to bfloat16: about 1e-2. On CPUs, both need kernels (`native`) and a
            processor with AMX, or for `medium` AVX-512 BF16 by AMD or ARM's BFMMLA; elsewhere `highest` runs, and a
            warning says so. On CUDA, both set `use_tf32`, as in PyTorch. None takes the environment variable
            GRAPHOPT_MATMUL_PRECISION, or `highest`.
        verify: what to check before the first update. `first` checks the plain step on the first batch, once per graph,
            form of the batch and machine: its predictions are those of the file run by ONNX Runtime as it is, its
            gradient is the slope of the loss by central differences (along the gradients of all parameters, which
            are halved where it differs, and along random signs), and the optimizer's update follows its formula.
            A disagreement is an error that names a reproducer. Then, the first step of each form that was rewritten
            for speed (fused, kernels, in place, several steps per call) is compared with the plain step. If they
            differ by more than rounding, the plain step runs, and a warning names a reproducer. `full` checks the
            gradient of each parameter. True does what `first` does each time, and raises an error for other forms,
            too. False checks and compares nothing. `auto` is the same as `first`; None takes the environment variable
            GRAPHOPT_VERIFY, or `first`.
        session_options: options of ONNX Runtime's sessions by name: attributes of SessionOptions, such as
            `inter_op_num_threads`, and configuration entries, such as `session.intra_op.allow_spinning`. Options that
            read or write files are not supported, because recipes may set them.
        custom_ops: libraries of custom operators that the graph calls, which its sessions load. Libraries are code:
            a recipe cannot name them.
    """

    threads: int | None = None
    deterministic: bool = False
    provider: str | None = None
    provider_options: Mapping[str, Any] | None = None
    graph_capture: bool = False
    low_memory: bool = False
    frozen: Literal["auto", "packed", "mapped", "low"] = "auto"
    flush_denormals: bool = True
    native: bool | Literal["auto"] | None = None
    target: str | Target = AUTO
    matmul_precision: MatmulPrecision | None = None
    verify: bool | Literal["auto", "first", "full"] | None = None
    session_options: Mapping[str, Any] | None = None
    custom_ops: Sequence[ReadPath] | None = None


@dataclass(frozen=True, eq=False)
class Device(DeviceOptions):
    """Choose a device, and the execution provider that computes on it.

    >>> import graphopt
    >>> graphopt.Device("cpu", threads=2).execution_provider
    'CPUExecutionProvider'

    Args:
        name: `cpu`, `cuda` or `cuda:N` (NVIDIA), or `webgpu` (any GPU, by Vulkan, Metal or D3D12).

    Raises:
        GraphoptError: no ONNX Runtime is installed, it lacks the device or the provider, or an option is invalid.
    """

    name: str = "cpu"
    kind: str = field(init=False, repr=False)
    index: int = field(init=False, repr=False)
    ort: Any = field(init=False, repr=False)
    flushing: Flushing | None = field(init=False, repr=False)
    execution_provider: str = field(init=False, repr=False)
    plugin: Any = field(init=False, repr=False)  # its device, where the provider is a plugin
    runtime_target: Target = field(init=False, repr=False)
    product_precision: str = field(init=False, repr=False)  # the option or the environment's
    # Weights that sessions share, by the identity of their tensors and whether they lie in host memory.
    shared: MutableMapping[tuple[int, bool], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not re.fullmatch(r"cpu|cuda(:\d+)?|webgpu", self.name):
            raise GraphoptError(f"device: expected 'cpu', 'cuda', 'cuda:N' or 'webgpu', found {self.name!r}")
        check_options(self, "device")
        keep = functools.partial(object.__setattr__, self)
        kind, _, index = self.name.partition(":")
        keep("kind", kind)
        if self.threads is not None and not 1 <= self.threads <= MOST_THREADS:
            least = "1 or more, or None for the runtime's choice"
            expected = least if self.threads < 1 else f"at most {MOST_THREADS:,}"
            raise GraphoptError(f"threads: expected {expected}, found {self.threads}")
        keep("product_precision", chosen_precision(self.matmul_precision))
        if self.frozen not in _FROZEN:
            raise GraphoptError(f"frozen: expected {', '.join(_FROZEN)}, found {self.frozen!r}")
        keep("index", int(index or 0))
        keep("ort", _runtime())
        keep("shared", weakref.WeakValueDictionary())
        if self.kind == "cuda":
            _load_cuda(self.ort)
        keep("flushing", Flushing() if self.flush_denormals and supported() and self.kind == "cpu" else None)
        keep("plugin", plugin_device(self.ort) if self.kind == "webgpu" else None)
        keep("execution_provider", self._found_provider())
        self.new_session_options()  # rejects unknown options
        if (self.native is True or self.target == NATIVE) and not self.on_cpu:
            raise GraphoptError(
                f"native: expected the device 'cpu' and its own provider, found {self.execution_provider}: leave it out"
            )
        takes_native = self.target in (AUTO, NATIVE)
        native = takes_native and (self.target == NATIVE or self.native)
        if self.native not in (None, native):
            raise GraphoptError(
                f"target: expected one of the options native and target, found native={self.native} and "
                f"target={self.target!r}: leave one out"
            )
        keep("native", _resolved("native", NATIVE_VARIABLE, native))
        own = ONNXRUNTIME if self.kind == "cpu" else target_of(self.kind)
        keep("runtime_target", own if takes_native else target_of(self.target))
        keep("verify", _resolved("verify", VERIFY, self.verify, ("first", "full")))
        if self.verify == "auto":
            keep("verify", "first")
        if "enable_cuda_graph" in (self.provider_options or {}):
            raise GraphoptError(
                "provider_options: expected the option graph_capture, which captures steps alone, found "
                "enable_cuda_graph, which captures evaluations, too: write graph_capture=True"
            )
        if self.graph_capture and self.execution_provider not in (CUDA, WEBGPU):
            raise GraphoptError(
                f"graph_capture: expected device 'cuda' or 'webgpu' and its own provider, found {self.name!r} and "
                f"{self.execution_provider}"
            )
        if self.kind == "webgpu":
            self.copier(ir.DataType.FLOAT)  # starts the device

    def __reduce__(self) -> tuple[Any, ...]:
        """Copy the name and the options: a copy, in this process or another one, opens the device itself."""
        chosen = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}
        return functools.partial(type(self), **chosen), ()

    @classmethod
    def of(cls, device: str | Device, options: DeviceOptions) -> Device:
        """Return a device by name with options, or a given `Device` with its own options.

        Raises:
            GraphoptError: the device is invalid, or both a `Device` and options are given.
        """
        fields = dataclasses.fields(DeviceOptions)
        if not isinstance(device, Device):
            return cls(device, **{option.name: getattr(options, option.name) for option in fields})
        for option in fields:
            value = getattr(options, option.name)
            if value != option.default:
                raise GraphoptError(
                    f"{option.name}: expected this option in the given Device, found {value!r} outside: move it there"
                )
        return device

    @property
    def lock(self) -> contextlib.AbstractContextManager[Any]:
        """Return the lock to hold while anything is done on the device; of other devices than WebGPU, threads share."""
        return LOCK if self.kind == "webgpu" else contextlib.nullcontext()

    @property
    def on_cpu(self) -> bool:
        """Return whether ONNX Runtime's own CPU kernels compute."""
        return self.execution_provider == CPU

    @functools.cached_property
    def product_unit(self) -> float | None:
        """Return the rounding of operands in products of float32 numbers, on CPUs of kernels; None without rounding."""
        if self.kind == "cuda":
            return None if self._cuda_options()["use_tf32"] in (0, "0") else 2.0**-10
        is_rounded = self.on_cpu and obstacle(self.product_precision) is None
        return PRODUCT_UNITS.get(self.product_precision) if is_rounded else None

    def _cuda_options(self) -> dict[str, Any]:
        """Return the options of the CUDA provider."""
        rounds = {"use_tf32": int(self.product_precision != "highest")}
        return {**_CUDA_OPTIONS, **rounds, **(self.provider_options or {})}

    @property
    def trains(self) -> bool:
        """Return whether the runtime is onnxruntime-training."""
        return hasattr(self.ort.capi._pybind_state, "GradientGraphBuilder")

    def _providers(self, captures: bool) -> list[Any]:
        """Return the provider with its options, followed by the CPU provider, in the form for sessions."""
        if self.kind == "webgpu":  # its options are those of the session, and a plugin's device, too
            return [] if self.plugin is not None else [WEBGPU, CPU]
        chosen: dict[str, Any] = {}
        if self.kind == "cuda":
            chosen |= {"device_id": self.index, **self._cuda_options()}
        if self.threads and self.execution_provider in THREADS:
            chosen[THREADS[self.execution_provider]] = self.threads
        if captures:
            chosen["enable_cuda_graph"] = 1
        chosen |= self.provider_options or {}
        first = (self.execution_provider, {name: str(value) for name, value in chosen.items()})
        return [first] if self.on_cpu else [first, CPU]

    def new_session_options(
        self, *, captures: bool = False, low_memory: bool = False, optimized: bool = True
    ) -> onnxruntime.SessionOptions:
        """Return options for one session.

        Args:
            captures: whether the session captures its graph, as those of steps do.
            low_memory: free each buffer after its last reader, whatever the option says; all sessions of a process
                that do so share the memory.
            optimized: let the runtime optimize the graph. Without, a session opens faster, has no fusions, and runs
                files on which the optimizers end the process (tests/faults.py: optimizers-end-the-process).

        Raises:
            GraphoptError: an option in `session_options` is unknown or has the wrong type, or a library of custom
                operators cannot be loaded.
        """
        options = self.ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised, not logged
        if not optimized:
            options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = self.threads or 0
        options.use_deterministic_compute = self.deterministic
        options.enable_mem_pattern = options.enable_mem_reuse = not (self.low_memory or low_memory)
        options.enable_cpu_mem_arena = not low_memory
        if low_memory and self.on_cpu:
            share_arena(self.ort, options)
        for name, entry in {PLACEMENT: "1", **AS_WRITTEN}.items():
            options.add_session_config_entry(name, entry)
        if self.flushing is not None:
            options.add_session_config_entry(DENORMALS, "1")
        if self.kind == "webgpu":
            self._add_webgpu(options, captures)
        for name, value in (self.session_options or {}).items():
            if name in SESSION_OPTIONS:
                try:
                    setattr(options, name, value)
                except (AttributeError, TypeError) as error:
                    raise GraphoptError(
                        f"session_options.{name}: expected another value, found {value!r}: "
                        f"{str(error).splitlines()[0]}"
                    ) from error
            elif name.startswith(ENTRIES) and not any(word in name for word in ("file", "path", "model")):
                options.add_session_config_entry(name, str(value))
            else:
                raise GraphoptError(
                    unknown("session option", name, [*SESSION_OPTIONS, *(f"{x}..." for x in ENTRIES)])
                )
        libraries = self.custom_ops or ()
        for library in [libraries] if isinstance(libraries, str | Path) else libraries:
            try:
                options.register_custom_ops_library(str(Path(library).resolve()))
            except Exception as error:
                raise GraphoptError(
                    f"custom_ops: expected a library of custom operators of ONNX Runtime, found {str(library)!r}: "
                    f"{line(error)}"
                ) from error
        return options

    def _add_webgpu(self, options: onnxruntime.SessionOptions, captures: bool) -> None:
        """Add the WebGPU provider's options, and the plugin's device if there is a plugin."""
        options.add_session_config_entry(CAPTURES, str(int(captures)))
        for name, value in {"enableInt64": 1, **(self.provider_options or {})}.items():
            options.add_session_config_entry(*entry_of(name, value))
        if self.plugin is not None:
            options.add_provider_for_devices([self.plugin], {})

    def open(
        self,
        content: bytes | str,
        options: onnxruntime.SessionOptions | None = None,
        disabled_optimizers: Sequence[str] = (),
        *,
        captures: bool = False,
    ) -> onnxruntime.InferenceSession:
        """Open a session of a graph on the device.

        Args:
            content: the graph as bytes, or the path of its file.
            captures: whether the session captures its graph.

        Raises:
            Exception: the runtime rejects the graph, or the provider does not start.
        """
        with self.lock:
            return self.ort.InferenceSession(
                content,
                sess_options=options or self.new_session_options(captures=captures),
                providers=self._providers(captures),
                disabled_optimizers=disabled_optimizers,
                enable_fallback=0,  # do not fall back to another provider and print a line
            )

    def copier(self, dtype: ir.DataType) -> onnxruntime.InferenceSession:
        """Return a session that copies a tensor to the WebGPU device.

        Raises:
            GraphoptError: the device does not start.
        """
        try:
            return copier(self.open, dtype)
        except Exception as error:
            if "adapter" in str(error):
                raise GraphoptError(no_adapter()) from error
            raise self.not_started(error) from error

    def not_started(self, reason: Exception | None = None) -> GraphoptError:
        """Return the error for a provider that does not start, or lacks memory."""
        found = "" if reason is None else f" ({line(reason)})"
        return GraphoptError(
            f"device {self.name!r}: {self.execution_provider} did not start{found}: look for its libraries, a device "
            f"and free memory"
        )

    def _found_provider(self) -> str:
        """Return the full name of the provider."""
        available = self.ort.get_available_providers()
        if self.provider is None and self.kind == "cuda" and CUDA not in available:
            raise GraphoptError(
                f"device {self.name!r}: expected {CUDA}, found an ONNX Runtime with only {', '.join(available)}: "
                f"pip install onnxruntime-gpu"
            )
        wanted = self.provider or {"cuda": CUDA, "webgpu": WEBGPU}.get(self.kind, CPU)
        names = {name.lower().removesuffix(SUFFIX.lower()): name for name in available}
        names |= {"webgpu": WEBGPU} if self.kind == "webgpu" else {}
        short = wanted.lower().removesuffix(SUFFIX.lower())
        if (short == "webgpu") != (self.kind == "webgpu"):
            raise GraphoptError(
                f"provider {wanted!r}: expected the provider of device {self.name!r}, found another device's: write "
                f"device='webgpu' for WebGPU, and leave out the provider"
            )
        if short not in names:
            raise GraphoptError(
                f"provider {wanted!r}: expected a provider of the installed ONNX Runtime: {', '.join(available)}"
            )
        return names[short]


def _resolved(name: str, variable: str, option: Any, further: Sequence[str] = ()) -> bool | str:
    """Return an option, or the environment's: a Boolean, `auto`, or a further word."""
    words: dict[str, bool | str] = {"true": True, "false": False, "auto": "auto"}
    words |= {word: word for word in further}
    text = os.environ.get(variable, "auto") if option is None else option
    chosen = words.get(str(text).lower())
    if chosen is None:
        what = f"environment variable {variable}" if option is None else name
        expected = f"{', '.join(['auto', *further, 'true'])} or false"
        raise GraphoptError(f"{what}: expected {expected}, found {text!r}")
    return chosen


@functools.cache
def _load_cuda(ort: Any) -> None:
    """Load CUDA and cuDNN from their wheels, if these are installed, once a process."""
    ort.set_default_logger_severity(
        3
    )  # else, each session warns where the GPU's folder in /sys is not to be seen
    if hasattr(ort, "preload_dlls"):
        with contextlib.redirect_stdout(io.StringIO()):  # it prints what it does not find
            ort.preload_dlls()


def _runtime() -> Any:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(
            "runtime: expected an ONNX Runtime, found none: pip install onnxruntime, onnxruntime-gpu, "
            "onnxruntime-webgpu or onnxruntime-training==1.19.2, exactly one of them in an environment"
        ) from error
    return onnxruntime

"""Open ONNX Runtime on a device of one kind: what all kinds share, and the questions whose answers differ."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, ClassVar

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line, unknown
from graphopt.runtime.denormals import Flushing
from graphopt.runtime.device_options import DeviceOptions
from graphopt.targets.native.precision import chosen_precision
from graphopt.targets.target import NATIVE, Target, target_of

if TYPE_CHECKING:
    import onnxruntime

CPU, SUFFIX = "CPUExecutionProvider", "ExecutionProvider"
SESSION_OPTIONS = (
    *("enable_cpu_mem_arena", "enable_mem_pattern", "enable_mem_reuse", "execution_mode", "execution_order"),
    *("graph_optimization_level", "inter_op_num_threads", "intra_op_num_threads", "log_severity_level"),
    *("log_verbosity_level", "use_deterministic_compute", "use_per_session_threads"),
)
ENTRIES = ("session.", "optimization.", "mlas.")
# Integer kernels in place of float ones between quantized weights, which round otherwise than the graph does. Moving a
# DequantizeLinear over a Reshape makes some graphs invalid (tests/faults.py: DequantizeLinear-Reshape).
AS_WRITTEN = {"session.disable_quant_qdq": "1", "session.qdq_matmulnbits_accuracy_level": "1"}
PLACEMENT = "session.record_ep_graph_assignment_info"


class Provider:
    """Open ONNX Runtime on a device of one kind, whose values lie in the memory of that device.

    A kind of device is a subclass, in the table `PROVIDERS`.

    Args:
        ort: the module onnxruntime.
        name: the name of the device, such as `cuda:1`.

    Attributes:
        kind: the name without a number.
        own: the full name of the execution provider of this kind.
        execution_provider: that of the device: its own, or the one of the option `provider`.
        is_numbered: whether there may be several such devices, `KIND:N`.
        in_host_memory: whether values lie in memory that NumPy reads, too.
        is_oracle: whether the numbers of the plain step are right, so that other forms are compared with them.
        captures: whether its own provider captures graphs.
        takes_workers: whether several workers may train on such devices.
        lock: the lock to hold while anything is done on the device; None if threads may share it.
        slow_optimizers: the runtime's optimizers without which the device is faster.
        flushing: what flushes denormal numbers in the calling thread, if it is to.
        precision: the precision of products.

    Raises:
        GraphoptError: the runtime lacks the provider, or an option does not fit.
    """

    kind: ClassVar[str]
    own: ClassVar[str]
    package: ClassVar[str]  # that contains the provider
    is_numbered: ClassVar[bool] = False
    in_host_memory: ClassVar[bool] = False
    is_oracle: ClassVar[bool] = True
    captures: ClassVar[bool] = False
    takes_workers: ClassVar[bool] = True
    lock: ClassVar[threading.RLock | None] = None
    slow_optimizers: ClassVar[Sequence[str]] = ()
    flushing: Flushing | None = None

    def __init__(self, ort: ModuleType, options: DeviceOptions, name: str) -> None:
        self.ort, self.options, self.name = ort, options, name
        self.index = int(name.partition(":")[2] or 0)
        self.precision = chosen_precision(options.matmul_precision)
        self.load()
        self.execution_provider = self._found()
        self.new_session_options()  # rejects unknown options
        self._check()

    def load(self) -> None:
        """Load what the provider needs, before it is looked for."""

    def start(self) -> None:
        """Start the device, once the options have been checked."""

    @property
    def on_cpu(self) -> bool:
        """Return whether ONNX Runtime's own CPU kernels compute."""
        return self.execution_provider == CPU

    @property
    def title(self) -> str:
        """Return the name of the runtime in errors, with a provider that is not its own for the CPU."""
        by = "" if self.on_cpu else f"{self.execution_provider} of "
        return f"{by}onnxruntime {self.ort.__version__}"

    def _available(self) -> list[str]:
        """Return the full names of the providers that the runtime has."""
        return list(self.ort.get_available_providers())

    def _accepts(self, short: str) -> bool:
        """Return whether the device may have a provider, by its short name: that of WebGPU has a device of its own."""
        return short != "webgpu"

    def _found(self) -> str:
        """Return the full name of the provider."""
        available = self._available()
        if self.options.provider is None and self.own not in available:
            raise GraphoptError(
                f"device {self.name!r}: expected {self.own}, found an ONNX Runtime with only {', '.join(available)}: "
                f"pip install {self.package}"
            )
        wanted = self.options.provider or self.own
        names = {name.lower().removesuffix(SUFFIX.lower()): name for name in available}
        short = wanted.lower().removesuffix(SUFFIX.lower())
        if not self._accepts(short):
            raise GraphoptError(
                f"provider {wanted!r}: expected the provider of device {self.name!r}, found another device's: write "
                f"device='webgpu' for WebGPU, and leave out the provider"
            )
        if short not in names:
            raise GraphoptError(
                f"provider {wanted!r}: expected a provider of the installed ONNX Runtime: {', '.join(available)}"
            )
        return names[short]

    def _check(self) -> None:
        """Raise an error unless the options fit the device."""
        options = self.options
        if (options.native is True or options.target == NATIVE) and not self.on_cpu:
            raise GraphoptError(
                f"native: expected the device 'cpu' and its own provider, found {self.execution_provider}: leave it out"
            )
        if "enable_cuda_graph" in (options.provider_options or {}):
            raise GraphoptError(
                "provider_options: expected the option graph_capture, which captures steps alone, found "
                "enable_cuda_graph, which captures evaluations, too: write graph_capture=True"
            )
        if options.graph_capture and not (self.captures and self.execution_provider == self.own):
            raise GraphoptError(
                f"graph_capture: expected device 'cuda' or 'webgpu' and its own provider, found {self.name!r} and "
                f"{self.execution_provider}"
            )

    @property
    def target(self) -> Target:
        """Return what steps are lowered for if the user names no target."""
        return target_of(self.kind)

    def with_forms(self, part: ir.Model) -> ir.Model:
        """Return a part of a training graph in the forms that the device needs, whatever target its steps have."""
        return target_of(self.kind).lower(part)

    @functools.cached_property
    def product_unit(self) -> float | None:
        """Return the rounding of operands in products of float32 numbers; None without rounding."""
        return None

    def precision_obstacle(self, compiles: bool) -> str | None:
        """Return why products run in a higher precision than they may; None if they do not.

        Args:
            compiles: whether steps may run in kernels.
        """
        if self.precision == "highest":
            return None
        return "expected kernels on the CPU, or CUDA, found neither"

    def new_session_options(
        self, *, captures: bool = False, low_memory: bool = False, optimized: bool = True
    ) -> onnxruntime.SessionOptions:
        """Return options for one session; see `Device.new_session_options`."""
        chosen, options = self.options, self.ort.SessionOptions()
        options.log_severity_level = 4  # errors are raised, not logged
        if not optimized:
            options.graph_optimization_level = self.ort.GraphOptimizationLevel.ORT_DISABLE_ALL
        options.intra_op_num_threads = chosen.threads or 0
        options.use_deterministic_compute = chosen.deterministic
        options.enable_mem_pattern = options.enable_mem_reuse = not (chosen.low_memory or low_memory)
        options.enable_cpu_mem_arena = not low_memory
        for name, entry in {PLACEMENT: "1", **AS_WRITTEN}.items():
            options.add_session_config_entry(name, entry)
        self.add_own(options, captures=captures, low_memory=low_memory)
        for name, value in (chosen.session_options or {}).items():
            if name in SESSION_OPTIONS:
                try:
                    setattr(options, name, value)
                except (AttributeError, TypeError) as error:
                    raise GraphoptError(
                        f"session_options.{name}: expected another value, found {value!r}: {str(error).splitlines()[0]}"
                    ) from error
            elif name.startswith(ENTRIES) and not any(word in name for word in ("file", "path", "model")):
                options.add_session_config_entry(name, str(value))
            else:
                raise GraphoptError(unknown("session option", name, [*SESSION_OPTIONS, *(f"{x}..." for x in ENTRIES)]))
        libraries = chosen.custom_ops or ()
        for library in [libraries] if isinstance(libraries, str | Path) else libraries:
            try:
                options.register_custom_ops_library(str(Path(library).resolve()))
            except Exception as error:
                raise GraphoptError(
                    f"custom_ops: expected a library of custom operators of ONNX Runtime, found {str(library)!r}: "
                    f"{line(error)}"
                ) from error
        return options

    def add_own(self, options: onnxruntime.SessionOptions, *, captures: bool, low_memory: bool) -> None:
        """Add the options of sessions of this kind of device, which the option `session_options` may change."""

    def place_nodes(self, options: onnxruntime.SessionOptions, model: ir.Model) -> None:
        """Place some nodes of a graph on the CPU, in a session that captures nothing."""

    def own_options(self, captures: bool = False) -> dict[str, object]:
        """Return the options that the provider gets before those of the user."""
        return {}

    def providers(self, captures: bool) -> list[object]:
        """Return the provider with its options, followed by the CPU provider, in the form for sessions."""
        chosen = {**self.own_options(captures), **(self.options.provider_options or {})}
        first = (self.execution_provider, {name: str(value) for name, value in chosen.items()})
        return [first] if self.on_cpu else [first, CPU]

    def open(
        self,
        content: bytes | str,
        options: onnxruntime.SessionOptions | None = None,
        disabled_optimizers: Sequence[str] = (),
        *,
        captures: bool = False,
    ) -> onnxruntime.InferenceSession:
        """Open a session of a graph; see `Device.open`."""
        with self.lock or contextlib.nullcontext():
            return self.ort.InferenceSession(
                content,
                sess_options=options or self.new_session_options(captures=captures),
                providers=self.providers(captures),
                disabled_optimizers=disabled_optimizers,
                enable_fallback=0,  # do not fall back to another provider and print a line
            )

    def run_options(self, *, low_memory: bool) -> onnxruntime.RunOptions | None:
        """Return the options of one run, where they differ from those of all runs."""
        return None

    def await_writers(self, binding: onnxruntime.IOBinding, tensors: Iterable[object] | None = None) -> None:
        """Wait for other packages that may still write tensors that they share, before these are bound.

        Args:
            tensors: the tensors; by default, any.
        """

    def not_started(self, reason: Exception | None = None) -> GraphoptError:
        """Return the error for a provider that does not start, or lacks memory."""
        found = "" if reason is None else f" ({line(reason)})"
        return GraphoptError(
            f"device {self.name!r}: {self.execution_provider} did not start{found}: look for its libraries, a device "
            f"and free memory"
        )

    def agent_memory(self) -> object:
        """Return the memory of values of onnxruntime's TrainingAgent."""
        c = self.ort.capi._pybind_state
        return c.OrtDevice(c.OrtDevice.cpu(), c.OrtDevice.default_memory(), self.index)

    @property
    def place(self) -> tuple[str, int]:
        """Return the runtime's name of the memory of values, and its number."""
        return self.kind, self.index

    def share(self, array: np.ndarray) -> onnxruntime.OrtValue:
        try:
            return self.ort.OrtValue.ortvalue_from_numpy(array)
        except RuntimeError as error:
            raise _unsupported(array) from error

    def allocate(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Copy an array to a new buffer."""
        try:
            value = self.ort.OrtValue.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, *self.place)
        except RuntimeError as error:
            if array.dtype.isbuiltin == 2:  # of another package, such as bfloat16
                raise _unsupported(array) from error
            raise self.not_started(error) from error
        self.overwrite(value, array)
        return value

    def overwrite(self, value: onnxruntime.OrtValue, array: np.ndarray) -> None:
        """Copy an array into a buffer of its type and shape."""
        value.update_inplace(np.asarray(array, order="C"))


def _unsupported(array: np.ndarray) -> GraphoptError:
    """Return the error for an array of an element type that the runtime does not take."""
    return GraphoptError(f"expected an element type that onnxruntime takes as an array, found {array.dtype}")

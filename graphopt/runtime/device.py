"""Choose a device and its options. This module imports onnxruntime."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import weakref
from collections.abc import MutableMapping, Sequence
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from graphopt.errors import GraphoptError
from graphopt.runtime.denormals import Flushing
from graphopt.runtime.device_options import DeviceOptions, check_device_options, native_of, verify_of
from graphopt.runtime.providers import provider_of
from graphopt.runtime.providers.provider import Provider
from graphopt.targets.target import AUTO, NATIVE, Target, target_of

if TYPE_CHECKING:
    import onnxruntime


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
    machine: Provider = field(init=False, repr=False)
    kind: str = field(init=False, repr=False)
    index: int = field(init=False, repr=False)
    ort: ModuleType = field(init=False, repr=False)
    flushing: Flushing | None = field(init=False, repr=False)
    execution_provider: str = field(init=False, repr=False)
    runtime_target: Target = field(init=False, repr=False)
    product_precision: str = field(init=False, repr=False)  # the option or the environment's
    # Weights that sessions share, by the identity of their tensors and whether they lie in host memory.
    shared: MutableMapping[tuple[int, bool], Any] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        kind = provider_of(self.name)
        check_device_options(self)
        options = DeviceOptions(**{each.name: getattr(self, each.name) for each in _OPTIONS})
        machine = kind(_runtime(), options, self.name)
        has_own_target = self.target in (AUTO, NATIVE)
        facts = {
            "machine": machine,
            "kind": machine.kind,
            "index": machine.index,
            "ort": machine.ort,
            "flushing": machine.flushing,
            "execution_provider": machine.execution_provider,
            "native": native_of(options),
            "runtime_target": machine.target if has_own_target else target_of(self.target),
            "product_precision": machine.precision,
            "verify": verify_of(options),
            "shared": weakref.WeakValueDictionary(),
        }
        for name, fact in facts.items():
            object.__setattr__(self, name, fact)
        machine.start()

    def __reduce__(self) -> tuple[object, ...]:
        """Copy the name and the options: a copy, in this process or another one, opens the device itself."""
        chosen = {each.name: getattr(self, each.name) for each in dataclasses.fields(self) if each.init}
        return functools.partial(type(self), **chosen), ()

    @classmethod
    def of(cls, device: str | Device, options: DeviceOptions) -> Device:
        """Return a device by name with options, or a given `Device` with its own options.

        Raises:
            GraphoptError: the device is invalid, or both a `Device` and options are given.
        """
        if not isinstance(device, Device):
            return cls(device, **{option.name: getattr(options, option.name) for option in _OPTIONS})
        for option in _OPTIONS:
            value = getattr(options, option.name)
            if value != option.default:
                raise GraphoptError(
                    f"{option.name}: expected this option in the given Device, found {value!r} outside: move it there"
                )
        return device

    @property
    def lock(self) -> contextlib.AbstractContextManager[object]:
        """Return the lock to hold while anything is done on the device; of other devices than WebGPU, threads share."""
        return self.machine.lock or contextlib.nullcontext()

    @property
    def on_cpu(self) -> bool:
        """Return whether ONNX Runtime's own CPU kernels compute."""
        return self.machine.on_cpu

    @property
    def compiles(self) -> bool:
        """Return whether graphs may be lowered to compiled kernels."""
        return self.on_cpu and bool(self.native)

    @property
    def product_unit(self) -> float | None:
        """Return the rounding of operands in products of float32 numbers, on CPUs of kernels; None without rounding."""
        return self.machine.product_unit

    @property
    def trains(self) -> bool:
        """Return whether the runtime is onnxruntime-training."""
        return hasattr(self.ort.capi._pybind_state, "GradientGraphBuilder")

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
        return self.machine.new_session_options(captures=captures, low_memory=low_memory, optimized=optimized)

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
        return self.machine.open(content, options, disabled_optimizers, captures=captures)


_OPTIONS = dataclasses.fields(DeviceOptions)


def _runtime() -> ModuleType:
    try:
        import onnxruntime
    except ImportError as error:
        raise GraphoptError(
            "runtime: expected an ONNX Runtime, found none: pip install onnxruntime, onnxruntime-gpu, "
            "onnxruntime-webgpu or onnxruntime-training==1.19.2, exactly one of them in an environment"
        ) from error
    return onnxruntime

"""Open ONNX Runtime on any GPU by WebGPU, in the package onnxruntime-webgpu or by a plugin."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Sequence
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
import onnx
import onnx.helper
import onnx_ir as ir

from graphopt.errors import GraphoptError, line, unknown
from graphopt.runtime.providers.provider import CPU, Provider
from graphopt.targets.portable import nodes_on_shapes

if TYPE_CHECKING:
    import onnxruntime

_WEBGPU = "WebGpuExecutionProvider"
_CACHE, _FLAG, _NUMBER = "disabled|lazyRelease|simple|bucket", "0|1", "[1-9][0-9]*"
# The option `graph_capture` sets another one. Some contain addresses of memory, which a recipe must not choose.
# Source: onnxruntime/core/providers/webgpu/webgpu_provider_options.h
_OPTIONS = {
    "dawnBackendType": "D3D12|Vulkan",
    "defaultBufferCacheMode": _CACHE,
    "enableInt64": _FLAG,
    "enableRobustness": _FLAG,
    "forceCpuNodeNames": "(?s:.*)",
    "maxNumPendingDispatches": _NUMBER,
    "maxStorageBufferBindingSize": _NUMBER,
    "powerPreference": "high-performance|low-power",
    "preferredLayout": "NCHW|NHWC",
    "queryResolveBufferCacheMode": _CACHE,
    "sessionBufferPoolGenerations": "[0-9]+",
    "storageBufferCacheMode": _CACHE,
    "uniformBufferCacheMode": _CACHE,
    "validationMode": "disabled|wgpuOnly|basic|full",
}
# The provider records commands of all sessions in one encoder, which is not made for several threads.
LOCK = threading.RLock()
atexit.register(LOCK.acquire)  # a thread that computes while the process ends would abort it
_ENTRY = f"ep.{_WEBGPU.lower()}."  # begins the names of the provider's options among those of a session
_ON_CPU = "forceCpuNodeNames"
_LONGEST = 8_192  # bytes of an entry: ConfigOptions::kMaxValueLength
_CAPTURES = f"{_ENTRY}enableGraphCapture"
_INSTALL = "pip install onnxruntime-webgpu, or onnxruntime-ep-webgpu beside onnxruntime 1.24.4 or later"


_COPIERS: dict[int, onnxruntime.InferenceSession] = {}  # by element type


class WebGpu(Provider):
    """Open ONNX Runtime on any GPU, by Vulkan, Metal or D3D12; some kernels are missing, and some are wrong.

    The provider is built in, or a plugin's device, whose options are those of the session.
    """

    kind, own, package = "webgpu", _WEBGPU, "onnxruntime-webgpu"
    captures = True
    is_oracle = takes_workers = False
    lock = LOCK
    _plugin: onnxruntime.OrtEpDevice | None

    def load(self) -> None:
        self._plugin = _plugin_device(self.ort)

    def start(self) -> None:
        self._copier(ir.DataType.FLOAT)

    def _available(self) -> list[str]:
        return [*super()._available(), _WEBGPU]

    def _accepts(self, short: str) -> bool:
        return not super()._accepts(short)

    def add_own(self, options: onnxruntime.SessionOptions, *, captures: bool, low_memory: bool) -> None:
        options.add_session_config_entry(_CAPTURES, str(int(captures)))
        for name, value in {"enableInt64": 1, **(self.options.provider_options or {})}.items():
            options.add_session_config_entry(*_entry_of(name, value))
        if self._plugin is not None:
            options.add_provider_for_devices([self._plugin], {})

    def place_nodes(self, options: onnxruntime.SessionOptions, model: ir.Model) -> None:
        chosen = str((self.options.provider_options or {}).get(_ON_CPU, ""))
        options.add_session_config_entry(_ENTRY + _ON_CPU, _lines_that_fit([chosen, *nodes_on_shapes(model)]))

    def providers(self, captures: bool) -> list[object]:
        return [] if self._plugin is not None else [_WEBGPU, CPU]

    def allocate(self, array: np.ndarray) -> onnxruntime.OrtValue:
        """Copy an array to a new value, by a session: the package has no function that allocates."""
        value = self.share(np.asarray(array, order="C"))
        session = self._copier(ir.DataType(value.element_type()))
        with LOCK:
            binding = session.io_binding()
            binding.bind_ortvalue_input("x", value)
            binding.bind_output("y", self.kind)
            try:
                session.run_with_iobinding(binding)
            except RuntimeError as error:
                raise self.not_started(error) from error
            (result,) = binding.get_outputs()
        return result

    def overwrite(self, value: onnxruntime.OrtValue, array: np.ndarray) -> None:
        array = np.asarray(array, order="C")
        with LOCK:
            self.ort.copy_tensors([self.share(array)], [value])

    def _copier(self, element_type: int) -> onnxruntime.InferenceSession:
        """Return a session that copies a tensor of any shape to the device; it lives as long as the process.

        The runtime's WebGPU context ends with its last session, and a value on the device that outlives it ends the
        process with a segmentation fault (tests/faults.py: webgpu-context). At exit, Python releases objects in any
        order.

        Raises:
            GraphoptError: the device does not start.
        """
        try:
            with LOCK:
                if element_type not in _COPIERS:
                    session = _COPIERS[element_type] = self.open(_identity(element_type))
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
                return _COPIERS[element_type]
        except Exception as error:
            if "adapter" in str(error):
                raise GraphoptError(_no_adapter()) from error
            raise self.not_started(error) from error


def _plugin_device(ort: ModuleType) -> onnxruntime.OrtEpDevice | None:
    """Return the device of the plugin beside an ONNX Runtime, or None if the provider is built in.

    Raises:
        GraphoptError: there is no plugin, it does not fit the runtime, or it finds no graphics adapter.
    """
    devices = _devices(ort)
    if not devices and _WEBGPU in ort.get_available_providers():
        return None
    if not devices:  # a registered plugin is among the available providers, too
        _register(ort)
        devices = _devices(ort)
    if not devices:
        raise GraphoptError(_no_adapter())
    return max(devices, key=lambda device: device.device.type == ort.OrtHardwareDeviceType.GPU)


def _devices(ort: ModuleType) -> list[onnxruntime.OrtEpDevice]:
    """Return the devices of a registered plugin."""
    found = ort.get_ep_devices() if hasattr(ort, "get_ep_devices") else []
    return [device for device in found if device.ep_name == _WEBGPU]


@functools.cache
def _register(ort: ModuleType) -> None:
    """Register the plugin, once a process."""
    try:
        import onnxruntime_ep_webgpu
    except ImportError as error:
        raise GraphoptError(
            f"device 'webgpu': expected {_WEBGPU}, found an ONNX Runtime without it: {_INSTALL}"
        ) from error
    try:
        ort.set_default_logger_severity(3)  # else, the plugin warns of each node that it leaves to the CPU
        ort.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
    except Exception as error:
        raise GraphoptError(
            f"device 'webgpu': expected a plugin that fits onnxruntime {ort.__version__}, found another: "
            f"{line(error)}: {_INSTALL}"
        ) from error


def _no_adapter() -> str:
    """Return the message for a machine without a graphics adapter."""
    return (
        "device 'webgpu': expected a graphics adapter, found none: install the driver of the GPU, on Linux with Vulkan "
        "(libvulkan1 and, for AMD and Intel, mesa-vulkan-drivers), or take device='cpu'"
    )


def _entry_of(name: str, value: object) -> tuple[str, str]:
    """Return the entry of a session's options for an option of the provider.

    Raises:
        GraphoptError: the option is unknown, or the provider does not take the value.
    """
    if name not in _OPTIONS:
        raise GraphoptError(f"provider_options: {unknown('option of WebGPU', str(name), _OPTIONS)}")
    text = str(int(value) if isinstance(value, bool) else value)
    if not re.fullmatch(_OPTIONS[name], text):
        expected = {_FLAG: "0 or 1", _NUMBER: "1 or more", "[0-9]+": "0 or more"}.get(_OPTIONS[name])
        words = expected or " or ".join(map(repr, _OPTIONS[name].split("|")))
        raise GraphoptError(f"provider_options.{name}: expected {words}, found {value!r}")
    return _ENTRY + name, text


def _identity(element_type: int) -> bytes:
    """Return a graph that copies its input."""
    x, y = (onnx.helper.make_tensor_value_info(name, element_type, None) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "copy", [x], [y])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return model.SerializeToString()


def _lines_that_fit(lines: Sequence[str]) -> str:
    """Return lines as an entry of a session's options, without those for which it has no room."""
    ends = itertools.accumulate(len(each.encode()) + 1 for each in lines)
    return "\n".join(each for each, end in zip(lines, ends, strict=True) if end <= _LONGEST)

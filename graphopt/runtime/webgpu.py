"""Find ONNX Runtime's WebGPU provider, in the package onnxruntime-webgpu or in a plugin, and start it."""

from __future__ import annotations

import atexit
import ctypes
import functools
import itertools
import re
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import onnx
import onnx.helper

from graphopt.errors import GraphoptError, line, unknown

if TYPE_CHECKING:
    import onnxruntime

WEBGPU = "WebGpuExecutionProvider"
_CACHE, _FLAG, _NUMBER = "disabled|lazyRelease|simple|bucket", "0|1", "[1-9][0-9]*"
# The option `graph_capture` sets another one. Some contain addresses of memory, which a recipe must not choose.
# Source: onnxruntime/core/providers/webgpu/webgpu_provider_options.h
OPTIONS = {
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
ENTRY = f"ep.{WEBGPU.lower()}."  # begins the names of the provider's options among those of a session
ON_CPU = "forceCpuNodeNames"
_LONGEST = 8_192  # bytes of an entry: ConfigOptions::kMaxValueLength
CAPTURES = f"{ENTRY}enableGraphCapture"
INSTALL = "pip install onnxruntime-webgpu, or onnxruntime-ep-webgpu beside onnxruntime 1.24.4 or later"


def plugin_device(ort: Any) -> Any:
    """Return the device of the plugin beside an ONNX Runtime, or None if the provider is built in.

    Raises:
        GraphoptError: there is no plugin, it does not fit the runtime, or it finds no graphics adapter.
    """
    devices = _devices(ort)
    if not devices and WEBGPU in ort.get_available_providers():
        return None
    if not devices:  # a registered plugin is among the available providers, too
        _register(ort)
        devices = _devices(ort)
    if not devices:
        raise GraphoptError(no_adapter())
    return max(devices, key=lambda device: device.device.type == ort.OrtHardwareDeviceType.GPU)


def _devices(ort: Any) -> list[Any]:
    """Return the devices of a registered plugin."""
    found = ort.get_ep_devices() if hasattr(ort, "get_ep_devices") else []
    return [device for device in found if device.ep_name == WEBGPU]


@functools.cache
def _register(ort: Any) -> None:
    """Register the plugin, once a process."""
    try:
        import onnxruntime_ep_webgpu
    except ImportError as error:
        raise GraphoptError(
            f"device 'webgpu': expected {WEBGPU}, found an ONNX Runtime without it: {INSTALL}"
        ) from error
    try:
        ort.set_default_logger_severity(3)  # else, the plugin warns of each node that it leaves to the CPU
        ort.register_execution_provider_library("webgpu", onnxruntime_ep_webgpu.get_library_path())
    except Exception as error:
        raise GraphoptError(
            f"device 'webgpu': expected a plugin that fits onnxruntime {ort.__version__}, found another: "
            f"{line(error)}: {INSTALL}"
        ) from error


def no_adapter() -> str:
    """Return the message for a machine without a graphics adapter."""
    return (
        "device 'webgpu': expected a graphics adapter, found none: install the driver of the GPU, on Linux with Vulkan "
        "(libvulkan1 and, for AMD and Intel, mesa-vulkan-drivers), or take device='cpu'"
    )


def entry_of(name: str, value: object) -> tuple[str, str]:
    """Return the entry of a session's options for an option of the provider.

    Raises:
        GraphoptError: the option is unknown, or the provider does not take the value.
    """
    if name not in OPTIONS:
        raise GraphoptError(f"provider_options: {unknown('option of WebGPU', str(name), OPTIONS)}")
    text = str(int(value) if isinstance(value, bool) else value)
    if not re.fullmatch(OPTIONS[name], text):
        expected = {_FLAG: "0 or 1", _NUMBER: "1 or more", "[0-9]+": "0 or more"}.get(OPTIONS[name])
        words = expected or " or ".join(map(repr, OPTIONS[name].split("|")))
        raise GraphoptError(f"provider_options.{name}: expected {words}, found {value!r}")
    return ENTRY + name, text


_COPIERS: dict[int, onnxruntime.InferenceSession] = {}  # by element type


def copier(
    open_session: Callable[[bytes], onnxruntime.InferenceSession], element_type: int
) -> onnxruntime.InferenceSession:
    """Return a session that copies a tensor of any shape to the device; it lives as long as the process.

    The runtime's WebGPU context ends with its last session, and a value on the device that outlives it ends the process
    with a segmentation fault (tests/faults.py: webgpu-context). At exit, Python releases objects in any order.
    """
    with LOCK:
        if element_type not in _COPIERS:
            session = _COPIERS[element_type] = open_session(_identity(element_type))
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(session))
        return _COPIERS[element_type]


def _identity(element_type: int) -> bytes:
    """Return a graph that copies its input."""
    x, y = (onnx.helper.make_tensor_value_info(name, element_type, None) for name in "xy")
    graph = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["y"])], "copy", [x], [y])
    model = onnx.helper.make_model(graph, ir_version=8, opset_imports=[onnx.helper.make_opsetid("", 17)])
    return model.SerializeToString()


def lines_that_fit(lines: Sequence[str]) -> str:
    """Return lines as an entry of a session's options, without those for which it has no room."""
    ends = itertools.accumulate(len(each.encode()) + 1 for each in lines)
    return "\n".join(each for each, end in zip(lines, ends, strict=True) if end <= _LONGEST)

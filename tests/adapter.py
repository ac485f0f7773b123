"""Prepare WebGPU in this process: a machine without a GPU takes the software adapter that Chromium carries."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import importlib.util
import os
import sys
from pathlib import Path

import onnxruntime

_CHROMIUM = Path("/usr/lib/chromium")  # of Debian's package
_LOADER, _DRIVER = _CHROMIUM / "libvulkan.so.1", _CHROMIUM / "vk_swiftshader_icd.json"
_CARDS = ("/dev/dri/renderD128", "/dev/nvidia0")

# What a process needs in its environment; and LD_LIBRARY_PATH, if it does not load the library itself.
ADAPTER = {
    "VK_DRIVER_FILES": str(_DRIVER),
    "VK_ICD_FILENAMES": str(_DRIVER),
    "ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER": "1",  # the plugin's
}
LIBRARIES = str(_CHROMIUM)


@functools.cache
def software_adapter() -> str:
    """Make a software adapter visible to this process where there is no GPU; return why there is none, or nothing.

    Call it before the first session on WebGPU. It does nothing where Vulkan has a GPU or drivers of its own.
    """
    if sys.platform != "linux" or os.environ.get("VK_DRIVER_FILES", str(_DRIVER)) != str(_DRIVER):
        return ""
    if ctypes.util.find_library("vulkan") and any(map(os.path.exists, _CARDS)):
        return ""
    if not (_LOADER.exists() and _DRIVER.exists()):
        return f"no WebGPU adapter: expected a GPU with Vulkan, or {_DRIVER} of Debian's package chromium"
    os.environ |= ADAPTER
    ctypes.CDLL(str(_LOADER))  # later calls for libvulkan.so.1 find this one
    return ""


def missing() -> str:
    """Return why WebGPU cannot be tested here, or nothing."""
    built_in = "WebGpuExecutionProvider" in onnxruntime.get_available_providers()
    if not built_in and importlib.util.find_spec("onnxruntime_ep_webgpu") is None:
        return "no WebGPU provider: pip install onnxruntime-webgpu, or onnxruntime-ep-webgpu beside onnxruntime"
    if not built_in and tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 25):
        return "the plugin of WebGPU needs onnxruntime 1.24.4 or later"
    return software_adapter()

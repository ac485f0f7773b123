"""Prepare WebGPU in this process: a machine without a GPU takes the software adapter that Chromium carries."""

from __future__ import annotations

import ctypes
import ctypes.util
import functools
import os
import sys
from pathlib import Path

_CHROMIUM = Path("/usr/lib/chromium")  # of Debian's package
_LOADER, _DRIVER = _CHROMIUM / "libvulkan.so.1", _CHROMIUM / "vk_swiftshader_icd.json"
_CARDS = ("/dev/dri/renderD128", "/dev/nvidia0")


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
    os.environ["VK_DRIVER_FILES"] = os.environ["VK_ICD_FILENAMES"] = str(_DRIVER)
    os.environ["ORT_WEBGPU_EP_ALLOW_SOFTWARE_ADAPTER"] = "1"  # the plugin's
    ctypes.CDLL(str(_LOADER))  # later calls for libvulkan.so.1 find this one
    return ""

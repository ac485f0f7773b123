"""Share the memory of values between the sessions of a process."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import onnxruntime


def share_arena(ort: ModuleType, options: onnxruntime.SessionOptions) -> None:
    """Make a session take buffers from the process's arena, which grows by as much as is asked for.

    A session's own arena grows in powers of two. Without an arena, each step gets its memory from the system anew.
    """
    _register(ort)
    options.enable_cpu_mem_arena = True
    options.add_session_config_entry("session.use_env_allocators", "1")


@functools.cache
def _register(ort: ModuleType) -> None:
    memory = ort.OrtMemoryInfo("Cpu", ort.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, ort.OrtMemType.DEFAULT)
    by_request = ort.OrtArenaCfg({"arena_extend_strategy": 1})
    with contextlib.suppress(RuntimeError):  # the program has registered an arena of its own
        ort.create_and_register_allocator(memory, by_request)

"""Open ONNX Runtime on the CPU: by its own kernels, or by another provider for CPUs."""

from __future__ import annotations

import contextlib
import functools
from types import ModuleType
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime.denormals import Flushing, supported
from graphopt.runtime.providers.provider import CPU, Provider
from graphopt.targets.native.precision import UNITS, obstacle
from graphopt.targets.portable.portable import scatter_by_element
from graphopt.targets.target import ONNXRUNTIME, Target

if TYPE_CHECKING:
    import onnxruntime

_THREADS = {"OpenVINOExecutionProvider": "num_of_threads", "XnnpackExecutionProvider": "intra_op_num_threads"}
_DENORMALS = "session.set_denormal_as_zero"  # for the threads of the session's pool


class Cpu(Provider):
    """Open ONNX Runtime on the CPU; the options `native`, `flush_denormals` and `low_memory` are its own."""

    kind, own, package = "cpu", CPU, "onnxruntime"
    in_host_memory = True

    def load(self) -> None:
        self.flushing = Flushing() if self.options.flush_denormals and supported() else None

    @property
    def target(self) -> Target:
        return ONNXRUNTIME

    def with_forms(self, part: ir.Model) -> ir.Model:
        scatter_by_element(part)
        return part

    @functools.cached_property
    def product_unit(self) -> float | None:
        is_rounded = self.on_cpu and obstacle(self.precision) is None
        return UNITS.get(self.precision) if is_rounded else None

    def precision_obstacle(self, compiles: bool) -> str | None:
        is_lowered = self.precision != "highest" and compiles
        return obstacle(self.precision) if is_lowered else super().precision_obstacle(compiles)

    def _frees(self, low_memory: bool) -> bool:
        return low_memory and self.on_cpu

    def add_own(self, options: onnxruntime.SessionOptions, *, captures: bool, low_memory: bool) -> None:
        if self._frees(low_memory):
            share_arena(self.ort, options)
            # Shape nodes run first, so that no value lives on for its shape alone.
            options.execution_order = self.ort.ExecutionOrder.PRIORITY_BASED
        if self.flushing is not None:
            options.add_session_config_entry(_DENORMALS, "1")

    def own_options(self, captures: bool = False) -> dict[str, object]:
        name = _THREADS.get(self.execution_provider)
        return {name: self.options.threads} if name and self.options.threads else {}

    def run_options(self, *, low_memory: bool) -> onnxruntime.RunOptions | None:
        if not self._frees(low_memory):
            return None
        options = self.ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options


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

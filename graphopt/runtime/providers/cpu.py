"""Open ONNX Runtime on the CPU: by its own kernels, or by another provider for CPUs."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING

import onnx_ir as ir

from graphopt.runtime.arena import share_arena
from graphopt.runtime.denormals import Flushing, supported
from graphopt.runtime.providers.provider import CPU, Provider
from graphopt.targets.native.precision import UNITS, obstacle
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
        return part

    @functools.cached_property
    def product_unit(self) -> float | None:
        is_rounded = self.on_cpu and obstacle(self.precision) is None
        return UNITS.get(self.precision) if is_rounded else None

    def precision_obstacle(self, native: bool | str | None) -> str | None:
        is_lowered = self.precision != "highest" and self.on_cpu and native
        return obstacle(self.precision) if is_lowered else super().precision_obstacle(native)

    def add_own(self, options: onnxruntime.SessionOptions, *, captures: bool, low_memory: bool) -> None:
        if low_memory and self.on_cpu:
            share_arena(self.ort, options)
            # Shape nodes run first, so that no value lives on for its shape alone.
            options.execution_order = self.ort.ExecutionOrder.PRIORITY_BASED
        if self.flushing is not None:
            options.add_session_config_entry(_DENORMALS, "1")

    def own_options(self, captures: bool = False) -> dict[str, object]:
        name = _THREADS.get(self.execution_provider)
        return {name: self.options.threads} if name and self.options.threads else {}

    def run_options(self, *, low_memory: bool) -> onnxruntime.RunOptions | None:
        if not low_memory or not self.on_cpu:
            return None
        options = self.ort.RunOptions()
        options.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        return options

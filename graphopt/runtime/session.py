"""Create and run sessions of ONNX Runtime, and report its errors in one line."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.graph.metadata import RUNTIME
from graphopt.graph.roles import TRAINING_RUNTIME
from graphopt.runtime.device import Device

if TYPE_CHECKING:
    import onnxruntime

# It rewrites 1 / b * a to a / b, and loses a if another rule removes its node (microsoft/onnxruntime#32416).
UNSAFE = ["DivMulFusion"]
# onnxruntime 1.19 fuses a Transpose and a MatMul into an operator that has no kernel for double.
UNSAFE_IN_DOUBLE = ["MatmulTransposeFusion"]


class SessionRefused(GraphoptError):
    """Report a graph that the runtime does not open."""


class Session:
    """Run a graph on a device.

    Args:
        options: modified options of the session; `Device.new_session_options()` by default.
        library: a library of the kernels that the graph calls.

    Raises:
        GraphoptError: the runtime rejects the graph, or the provider does not start.
    """

    def __init__(
        self,
        device: Device,
        model: ir.Model,
        options: onnxruntime.SessionOptions | None = None,
        library: Path | None = None,
    ) -> None:
        self.device = device
        try:
            options = options or device.new_session_options()
            if library is not None:
                options.register_custom_ops_library(str(library))
            content, self._weights = _serialized(device, model, options)
            # The first session would change denormals in this thread permanently.
            with device.flushing or contextlib.nullcontext():
                self.ort: onnxruntime.InferenceSession = device.ort.InferenceSession(
                    content,
                    sess_options=options,
                    providers=device.providers,
                    disabled_optimizers=UNSAFE + (UNSAFE_IN_DOUBLE if _is_double(model) else []),
                    enable_fallback=0,  # do not fall back to another provider and print a line
                )
        except Exception as error:
            raise _refusal(device, model, error) from error
        if device.execution_provider not in self.ort.get_providers():
            raise device.not_started()

    def execute(self, binding: onnxruntime.IOBinding, options: onnxruntime.RunOptions | None = None) -> None:
        """Run once on a binding.

        Raises:
            GraphoptError: the runtime fails.
        """
        try:
            if self.device.flushing is None:
                self.ort.run_with_iobinding(binding, options)
            else:
                with self.device.flushing:
                    self.ort.run_with_iobinding(binding, options)
        except RuntimeError as error:
            raise GraphoptError(f"onnxruntime stopped: {' '.join(str(error).split())}") from error

    def compute(
        self, feeds: Mapping[str, onnxruntime.OrtValue], names: Sequence[str]
    ) -> dict[str, onnxruntime.OrtValue]:
        """Run once on values and return outputs by name, which stay on the device."""
        binding = self.ort.io_binding()
        for name, value in feeds.items():
            binding.bind_ortvalue_input(name, value)
        for name in names:
            binding.bind_output(name, self.device.kind, self.device.index)
        self.execute(binding)
        return dict(zip(names, binding.get_outputs(), strict=True))

    def compute_arrays(self, feeds: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
        """Run once on arrays and return all outputs by name. Arrays that are not inputs are ignored."""
        inputs = [x.name for x in self.ort.get_inputs()]
        if not set(inputs) <= set(feeds):
            raise GraphoptError(f"inputs: expected {', '.join(inputs)}, found {', '.join(feeds) or 'none'}")
        taken = {name: feeds[name] for name in inputs}
        names = [y.name for y in self.ort.get_outputs()]
        return dict(zip(names, self.ort.run(names, taken), strict=True)) if names else {}


def placement(sessions: Iterable[Session]) -> dict[str, dict[str, int]]:
    """Return for each execution provider the operators that it runs, and how many nodes of each.

    Raises:
        GraphoptError: onnxruntime is older than 1.24 and does not report this.
    """
    found: dict[str, Counter[str]] = {}
    for session in sessions:
        if not hasattr(session.ort, "get_provider_graph_assignment_info"):
            raise GraphoptError(
                f"placement: expected onnxruntime 1.24 or later, found {session.device.ort.__version__}"
            )
        for part in session.ort.get_provider_graph_assignment_info():
            found.setdefault(part.ep_name, Counter()).update(node.op_type for node in part.get_nodes())
    return {name: dict(counts.most_common()) for name, counts in found.items()}


def _serialized(
    device: Device, model: ir.Model, options: onnxruntime.SessionOptions
) -> tuple[bytes, list[Any]]:
    """Return a graph as bytes; if its weights are too large, register them in `options` and return them, too.

    The caller must keep the returned weights alive as long as the session reads them.
    """
    content, weights = storage.message(model)
    values = [device.ort.OrtValue.ortvalue_from_numpy(tensor.numpy()) for tensor in weights.values()]
    if weights:
        options.add_external_initializers([*weights], values)
    return content, values


def _refusal(device: Device, model: ir.Model, error: Exception) -> SessionRefused:
    """Return the error for a graph that the runtime rejects."""
    version = device.ort.__version__
    if RUNTIME.read(model) == TRAINING_RUNTIME and not device.trains:
        return SessionRefused(
            f"the graph needs {TRAINING_RUNTIME}, found onnxruntime {version}: pip install "
            f"onnxruntime-training==1.19.2 in an environment of its own, or compile without OrtGradient and "
            f"fused kernels"
        )
    by = "" if device.on_cpu else f"{device.execution_provider} of "
    reason = " ".join(str(error).split())
    if "NOT_IMPLEMENTED" in reason:
        reason += ", for these element types: take another precision, runtime or provider"
    if "is not a registered function/op" in reason:
        reason += ": name the library of this custom operator with custom_ops"
    return SessionRefused(f"{by}onnxruntime {version} refuses the graph: {reason}")


def _is_double(model: ir.Model) -> bool:
    return any(value.dtype == ir.DataType.DOUBLE for value in model.graph.inputs)

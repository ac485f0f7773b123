"""Let ONNX Runtime's CPU provider pose as CUDA's, so that the paths that only a GPU runs are tried without one.

`pose` replaces classes of the installed onnxruntime in this process. Values know the device that they are on, and the
host does not share their memory. A session with `enable_cuda_graph` refuses control flow, demands buffers for inputs
and outputs, and refuses other addresses than those of its first run, which a replayed graph would read and write again.
Copies, streams and kernels are not those of a GPU.
"""

from __future__ import annotations

import weakref
from typing import Any

import numpy as np
import onnx
import onnxruntime
from onnxruntime.capi import onnxruntime_inference_collection as collection

CUDA, CPU = "CUDAExecutionProvider", "CPUExecutionProvider"
_placed: weakref.WeakValueDictionary[int, PosedValue] = weakref.WeakValueDictionary()  # by address


class PosedValue(onnxruntime.OrtValue):
    """Pose as a value on the device "cuda", or be one in host memory."""

    def __init__(self, ortvalue: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(ortvalue, *args, **kwargs)
        self.on = "cuda" if ortvalue.has_value() and ortvalue.data_ptr() in _placed else "cpu"

    def placed(self, device: str) -> PosedValue:
        self.on = device
        if device == "cuda":
            _placed[self.data_ptr()] = self
        return self

    def device_name(self) -> str:
        return self.on

    def numpy(self) -> np.ndarray:
        return super().numpy().copy() if self.on == "cuda" else super().numpy()

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray, device: str = "cpu", index: int = 0) -> Any:
        if device == "cpu":
            return super().ortvalue_from_numpy(array)
        value = cls.ortvalue_from_shape_and_type(list(array.shape), array.dtype.type, device, index)
        value.update_inplace(array)
        return value

    @classmethod
    def ortvalue_from_shape_and_type(cls, shape: Any, kind: Any, device: str = "cpu", index: int = 0) -> Any:
        if index:
            raise RuntimeError("The provided device id doesn't match any available GPUs on the machine.")
        return super().ortvalue_from_shape_and_type(shape, kind, "cpu", 0).placed(device)


class PosedBinding(collection.IOBinding):
    """Remember where values lie."""

    def __init__(self, session: Any) -> None:
        super().__init__(session)
        self.inputs: dict[str, int | None] = {}
        self.outputs: dict[str, Any] = {}

    def bind_cpu_input(self, name: str, array: np.ndarray) -> None:
        super().bind_cpu_input(name, array.copy())  # a GPU's copy, too, keeps what the array contains now
        self.inputs[name] = None

    def bind_ortvalue_input(self, name: str, value: Any) -> None:
        super().bind_ortvalue_input(name, value)
        self.inputs[name] = value.data_ptr() if value.on == "cuda" else None

    def bind_output(self, name: str, device: str = "cpu", *args: Any) -> None:
        super().bind_output(name, "cpu", 0)
        self.outputs[name] = device

    def bind_ortvalue_output(self, name: str, value: Any) -> None:
        super().bind_ortvalue_output(name, value)
        self.outputs[name] = value

    def get_outputs(self) -> list[Any]:
        places = (place if isinstance(place, str) else place.on for place in self.outputs.values())
        return [PosedValue(x._ortvalue).placed(on) for x, on in zip(super().get_outputs(), places, strict=True)]


class PosedSession(onnxruntime.InferenceSession):
    """Pose as a session of the CUDA provider, unless its only provider is the CPU's."""

    def __init__(self, content: Any, sess_options: Any = None, providers: Any = (), **kwargs: Any) -> None:
        name, chosen = providers[0] if providers and isinstance(providers[0], tuple) else (CPU, {})
        self._posed = [CUDA, CPU] if name == CUDA else [CPU]
        self._captures, self._captured = chosen.get("enable_cuda_graph") == "1", {}
        nodes = onnx.load_model_from_string(content).graph.node if self._captures else ()
        if any(node.op_type in ("If", "Loop", "Scan") for node in nodes):
            raise RuntimeError("This session cannot use the graph capture: the model has control flow nodes")
        super().__init__(content, sess_options, providers=[CPU], **kwargs)

    def get_providers(self) -> list[str]:
        return self._posed

    def get_input_memory_infos(self) -> list[Any]:
        kind = type("MemoryInfo", (), {"name": "Cuda" if CUDA in self._posed else "Cpu"})
        return [kind() for _ in self.get_inputs()]

    def get_provider_graph_assignment_info(self) -> list[Any]:
        kind = type("Subgraph", (), {"ep_name": self._posed[0]})
        parts = []
        for own in super().get_provider_graph_assignment_info():
            parts.append(kind())
            parts[-1].get_nodes = own.get_nodes
        return parts

    def io_binding(self) -> PosedBinding:
        return PosedBinding(self)

    def run_with_iobinding(self, binding: Any, options: Any = None) -> None:
        if self._captures:
            graph = options.get_run_config_entry("gpu_graph_id") if options is not None else "0"
            outputs = [None if isinstance(x, str) else x.data_ptr() for x in binding.outputs.values()]
            places = [*binding.inputs.values(), *outputs]
            if None in places:
                raise RuntimeError(f"CUDA graph {graph}: an input or output has no address on the device")
            if self._captured.setdefault(graph, places) != places:
                raise RuntimeError(f"CUDA graph {graph}: replayed with another address")
        super().run_with_iobinding(binding, options)


def pose() -> None:
    """Replace the classes of onnxruntime in this process."""
    found = onnxruntime.get_available_providers()
    onnxruntime.get_available_providers = lambda: [CUDA, *found]
    for module in (onnxruntime, collection):
        module.OrtValue, module.InferenceSession = PosedValue, PosedSession

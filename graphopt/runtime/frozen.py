"""Decide where the frozen weights of sessions lie, and give sessions of one device the same ones."""

from __future__ import annotations

from typing import Literal

import numpy as np
import onnx_ir as ir

from graphopt.graph.mapped import RoomyTensor
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import tensor_bytes
from graphopt.runtime.device import Device
from graphopt.runtime.tensors import buffer, share

FrozenPlacement = Literal["packed", "mapped", "low"]
_MAPPED_FROM = 2**29  # bytes of frozen weights, from which `auto` lets sessions share them
# Bytes, from which it also frees each value after its last reader. A step has several forms, each with copies: in its
# first run, 6.8 GB of a decoder of 0.1 billion weights. On 256 tokens, it takes 1.15 s in place of 1.13 with copies, on
# 16 tokens 0.106 in place of 0.090, and holds 0.2 GB in place of 1.9 (kernels on one thread of an AMD EPYC). Weights of
# 4 bits count as floats.
_LOW_FROM, _LOW_STEP_FROM = 2**31, 2**28


def placement_of(device: Device, model: ir.Model) -> FrozenPlacement:
    """Return where the frozen weights of a graph lie: the option `frozen`, or what fits their size."""
    if device.frozen != "auto":
        return device.frozen
    if device.memory is not None:
        return "low"
    on_cpu = device.on_cpu
    if device.machine.in_host_memory and not on_cpu:
        return "packed"  # other providers for CPUs compile graphs, and want constants
    return placement_by_size(model, on_cpu=on_cpu)


def placement_by_size(model: ir.Model, *, on_cpu: bool = True) -> FrozenPlacement:
    """Return where `auto` puts the frozen weights of a graph."""
    size = frozen_bytes(model)
    of_step = on_cpu and with_role(model, Role.NEXT)
    if size >= _LOW_FROM or (of_step and frozen_bytes(model, as_floats=True) >= _LOW_STEP_FROM):
        return "low"
    return "packed" if size < _MAPPED_FROM else "mapped"


def frozen_bytes(model: ir.Model, *, as_floats: bool = False) -> int:
    """Return the bytes of the weights that are no state, or those of their floats; 8-bit integers may hold two of 4."""
    values = [x for x in model.graph.initializers.values() if not x.is_graph_input()]
    weights = [x.const_value for x in values if x.const_value is not None]
    grows = [as_floats and x.dtype.is_integer() and x.dtype.bitwidth <= 8 for x in weights]
    return sum(tensor_bytes(x) * (8 if each else 1) for x, each in zip(weights, grows, strict=True))


class SharedWeight:
    """Hold a weight on a device as long as a session reads it.

    Attributes:
        value: the weight as a value of ONNX Runtime. On CPUs, it is the memory of the tensor itself.
    """

    def __init__(self, device: Device, tensor: ir.TensorProtocol, *, on_host: bool) -> None:
        self._tensor = tensor  # as long as it lives, no other object has its identity
        if tensor.dtype.bitwidth == 4:
            roomy = tensor if isinstance(tensor, RoomyTensor) else _roomy(tensor)
            self._room = roomy.room
            self.value = device.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(roomy.room, tensor.dtype.value)
            return
        array = np.ascontiguousarray(tensor.numpy())
        if array.dtype.isbuiltin == 2:  # of another package, such as bfloat16
            number = array.view(f"u{array.itemsize}")
            self.value = device.ort.OrtValue.ortvalue_from_numpy_with_onnx_type(number, tensor.dtype.value)
        else:
            self.value = share(device, array) if on_host else buffer(device, array)


def _roomy(tensor: ir.TensorProtocol) -> RoomyTensor:
    packed = np.frombuffer(tensor.tobytes(), np.uint8)
    return RoomyTensor(packed, tensor.dtype, tensor.shape.numpy())


def shared(device: Device, tensor: ir.TensorProtocol, *, on_host: bool) -> SharedWeight:
    """Return a weight on a device, or in host memory; all sessions of the device share it."""
    key = (id(tensor), on_host)
    with device.lock:
        weight = device.shared.get(key)
        if weight is None:
            device.shared[key] = weight = SharedWeight(device, tensor, on_host=on_host)
    return weight


def is_shareable(device: Device, tensor: ir.TensorProtocol) -> bool:
    """Return whether the runtime takes a weight as a value."""
    if tensor.dtype.bitwidth < 8:
        return is_packed(device, tensor)
    return tensor.dtype.numpy().isbuiltin != 2 or _takes_types(device)


def is_packed(device: Device, tensor: ir.TensorProtocol) -> bool:
    """Return whether a weight has 4 bits, which kernels read as they are, and the runtime takes it as a value."""
    return tensor.dtype.bitwidth == 4 and device.on_cpu and _takes_types(device)


def _takes_types(device: Device) -> bool:
    return device.machine.in_host_memory and hasattr(device.ort.OrtValue, "ortvalue_from_numpy_with_onnx_type")

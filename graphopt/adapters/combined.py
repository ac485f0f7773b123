"""Combine the adapters of each weight into one, in which the scale is part of B, for slots and adapter files."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.adapters.slots import LORA_A, LORA_B, LORA_FACTOR, AdapterSlot
from graphopt.errors import GraphoptError
from graphopt.graph.merging import adapted, as_matrix, merged
from graphopt.graph.metadata import STORED, Adapted, original_name
from graphopt.graph.postprocessing import standing_for
from graphopt.graph.state import averages_read, initial
from graphopt.graph.values import name_of

_LORA = "LoRA"  # the adapter whose values the formats of other libraries have


@dataclass(frozen=True)
class TrainedAdapter:
    """Hold an adapter with its numbers: the note, A, B and the magnitude of DoRA, as the graph stores them."""

    note: Adapted
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None


def trained_adapters(
    model: ir.Model, state: Mapping[str, np.ndarray], needed_by: str
) -> list[TrainedAdapter]:
    """Return the adapters of a training graph.

    Raises:
        GraphoptError: it has none, or one that is not low-rank.
    """
    state = {**state, **{owner: state[name] for name, owner in averages_read(model).items()}}
    values = {original_name(x): x for x in [*model.graph.inputs, *model.graph.initializers.values()]}
    found = []
    for _, note in adapted(model):
        if note.adapter != _LORA or len(note.values) not in (2, 3) or not {*note.values} <= {*values}:
            raise GraphoptError(
                f"{needed_by}: weight {note.weight!r}: expected an adapter of low rank, found {note.adapter!r}: merge "
                "it, by executor.trained()"
            )
        found.append(TrainedAdapter(note, *(_array(values[name], state) for name in note.values)))
    if not found:
        raise GraphoptError(
            f"{needed_by}: expected a training graph with adapters, found none: compile with adapter=passes.LoRA(...)"
        )
    return found


def _array(x: ir.Value, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the numbers of a value of an adapter, which does not train if the loss does not depend on it."""
    tensor = initial(x)
    return state[name_of(x)] if tensor is None or name_of(x) in state else tensor.numpy()


def arrays_of(model: ir.Model, adapters: Sequence[TrainedAdapter]) -> dict[str, np.ndarray]:
    """Return the arrays of an adapter file by the names of a model's slots, in the type in which the model multiplies.

    Raises:
        GraphoptError: DoRA changes the outputs of a product by other than one factor each.
    """
    arrays: dict[str, np.ndarray] = {}
    types = {original_name(x): _stored_type(x) for x in model.graph.inputs}
    for name, several in _by_name(adapters).items():
        found = zip((LORA_A, LORA_B, LORA_FACTOR), _combined(model, several), strict=True)
        dtype = types.get(several[0].note.values[0])
        for suffix, x in found:
            if x is not None:
                arrays[f"{name}.{suffix}"] = x if dtype is None else x.astype(dtype.numpy())
    return arrays


def _stored_type(x: ir.Value) -> ir.DataType | None:
    """Return the type to which the graph rounds a value, of fewer bits than its state, or None."""
    rounded = (
        node.outputs[0].dtype for node in x.consumers() if STORED.is_set(node) and node.op_type == "Cast"
    )
    return next(rounded, None)


def slots_of(model: ir.Model, adapters: Sequence[TrainedAdapter]) -> list[AdapterSlot]:
    """Return the slots for the weights of adapters."""
    slots = []
    for name, several in _by_name(adapters).items():
        note = several[0].note
        axis_a, axis_b, axis = rank_axes(note.kind)
        a, b = list(several[0].a.shape), list(several[0].b.shape)
        a[axis_a] = b[axis_b] = 0
        b[axis] = outputs_of(model, several[0])
        slots.append(
            AdapterSlot(name, note.weight, note.kind, a, b, any(x.magnitude is not None for x in several))
        )
    return slots


def _by_name(adapters: Sequence[TrainedAdapter]) -> dict[str, list[TrainedAdapter]]:
    """Return the adapters of each weight by the name of its slots."""
    groups: dict[str, list[TrainedAdapter]] = {}
    for adapter in adapters:
        groups.setdefault(adapter.note.weight, []).append(adapter)
    names = [several[0].note.name for several in groups.values()]
    return {
        several[0].note.name if names.count(several[0].note.name) == 1 else weight: several
        for weight, several in groups.items()
    }


def rank_axes(kind: str) -> tuple[int, int, int]:
    """Return the axes of the rank in A and in B of a kind of adapters, and the axis of the outputs in B."""
    return {"convolution": (0, 1, 0), "transposed convolution": (1, 1, 0)}.get(kind, (-1, -2, -1))


def outputs_of(model: ir.Model, adapter: TrainedAdapter) -> int:
    """Return the number of outputs of a product, of which an adapter may change some."""
    note, b = adapter.note, adapter.b
    if note.columns is None:
        return b.shape[rank_axes(note.kind)[2]]
    weight = weight_of(model, note)
    dims = [*weight.shape.numpy()] if weight.shape is not None else []
    if note.quantized:  # [N, blocks, bytes], or a matrix whose other dimension is the number of inputs
        return dims[0] if len(dims) == 3 else dims[1 - dims.index(adapter.a.shape[-2])]
    return _moved(note, np.broadcast_to(np.float32(0), dims)).shape[-1]


def weight_of(model: ir.Model, note: Adapted) -> ir.Value:
    """Return the weight of an adapter in a training graph."""
    values = [*model.graph.initializers.values(), *model.graph.inputs]
    for value in values:
        if original_name(value) == note.weight:
            return value
    raise GraphoptError(f"weight {note.weight!r}: expected it in the training graph, found none")


def _moved(note: Adapted, w: np.ndarray) -> np.ndarray:
    """Return a weight of the file as the product reads it."""
    for how, numbers in note.moves:
        w = w.transpose(numbers) if how == "transpose" else w.reshape(numbers)
    return w


def _combined(
    model: ir.Model, adapters: Sequence[TrainedAdapter]
) -> tuple[np.ndarray, np.ndarray, np.ndarray | None]:
    """Return A, B and the factor of one weight, the sum of whose terms is A B."""
    note = adapters[0].note
    axis_a, axis_b, axis = rank_axes(note.kind)
    outputs = outputs_of(model, adapters[0])
    factor = np.ones(outputs, adapters[0].b.dtype)
    w = _numbers(model, note) if any(x.magnitude is not None for x in adapters) else None
    all_a: list[np.ndarray] = []
    all_b: list[np.ndarray] = []
    for adapter in adapters:
        own = adapter.note
        columns = slice(*own.columns) if own.columns else slice(None)
        dims = list(adapter.b.shape)
        dims[axis] = outputs
        b = np.zeros(dims, adapter.b.dtype)
        np.moveaxis(b, axis, -1)[..., columns] = np.moveaxis(own.scale * adapter.b, axis, -1)
        all_a.append(adapter.a)
        all_b.append(b)
        if adapter.magnitude is not None and w is not None:
            ratio = _ratio(own, w, adapter).astype(b.dtype)
            factor[columns] *= ratio
            for term in all_b:
                np.moveaxis(term, axis, -1)[..., columns] *= ratio
        if w is not None:
            w = merged(
                own, w, adapter.a, adapter.b, *([] if adapter.magnitude is None else [adapter.magnitude])
            )
    return _joined(all_a, axis_a, note), _joined(all_b, axis_b, note), None if w is None else factor


def _ratio(note: Adapted, w: np.ndarray, adapter: TrainedAdapter) -> np.ndarray:
    """Return the magnitudes of DoRA over the norms of the weight with the change, for each output."""
    columns = slice(*note.columns) if note.columns else slice(None)
    matrix = as_matrix(note, _moved(note, merged(note, w, adapter.a, adapter.b)))[..., columns]
    norms = np.sqrt((matrix * matrix).sum(-2))
    if adapter.magnitude is None or (
        norms.ndim > 1 and norms.size != adapter.b.shape[rank_axes(note.kind)[2]]
    ):
        raise GraphoptError(
            f"weight {note.weight!r}: expected one factor for each output, as slots for DoRA have it, found "
            f"{list(norms.shape)}: merge the adapter, by executor.trained()"
        )
    return adapter.magnitude.ravel() / norms.ravel()


def _numbers(model: ir.Model, note: Adapted) -> np.ndarray:
    """Return the numbers of the weight of an adapter with DoRA, of 32 bits or more."""
    weight = weight_of(model, note)
    tensor = initial(weight)
    numbers = standing_for(weight) if note.quantized else tensor.numpy() if tensor is not None else None
    if numbers is None:
        raise GraphoptError(
            f"weight {note.weight!r}: expected floating-point numbers, whose norms DoRA divides by, found packed ones: "
            "train without dora"
        )
    return numbers if numbers.dtype.itemsize > 4 else numbers.astype(np.float32)


def _joined(parts: Sequence[np.ndarray], axis: int, note: Adapted) -> np.ndarray:
    """Join values along the rank; in a convolution, those of each group."""
    if len(parts) == 1:
        return parts[0]
    if note.kind != "convolution" or axis != 0:
        return np.concatenate(parts, axis)
    grouped = [x.reshape(note.groups, -1, *x.shape[1:]) for x in parts]
    return np.concatenate(grouped, 1).reshape(-1, *parts[0].shape[1:])

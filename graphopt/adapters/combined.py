"""Combine the adapters of each weight into one, in which the scale is part of B, for slots and adapter files."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.adapters.targets import outputs_of
from graphopt.errors import GraphoptError
from graphopt.graph.merging import Adapted, adapted, merged
from graphopt.graph.metadata import original_name
from graphopt.graph.postprocessing import STORED, standing_for
from graphopt.graph.state import averages_read, initial
from graphopt.graph.values import is_floating, name_of
from graphopt.graph.weight_kinds import TRANSPOSED_CONVOLUTION, WeightKind, moved, shape_after

LORA_A, LORA_B, LORA_FACTOR = "lora_A", "lora_B", "lora_factor"  # of slots and adapter files
_LORA = "LoRA"  # the adapter whose values the formats of other libraries have


@dataclass(frozen=True)
class Adaptation:
    """Hold an adapter of a training graph with its weight and its numbers.

    Args:
        note: the note of the adapter.
        base: the weight in the graph, or None if a constant stands for it there.
        stored: the type to which the graph rounds the numbers, of fewer bits than the state; None if it does not.
        a, b: A and B as the graph stores them.
        magnitude: the magnitude of DoRA, or None.
    """

    note: Adapted
    base: ir.Value | None
    stored: ir.DataType | None
    a: np.ndarray
    b: np.ndarray
    magnitude: np.ndarray | None = None

    @property
    def kind(self) -> WeightKind:
        return WeightKind(self.note.kind)

    @property
    def weight(self) -> ir.Value:
        if self.base is None:
            raise GraphoptError(f"weight {self.note.weight!r}: expected it in the training graph, found none")
        return self.base

    @property
    def columns(self) -> slice:
        """Return the outputs that the adapter changes."""
        return slice(*self.note.columns) if self.note.columns else slice(None)

    @property
    def outputs(self) -> int:
        """Return the number of outputs of the product, of which the adapter may change some."""
        if self.note.columns is None:
            return self.b.shape[self.kind.axes[2]]
        if not is_floating(self.weight):
            return outputs_of(self.weight)
        dims = [*self.weight.shape.numpy()] if self.weight.shape is not None else []
        return shape_after(self.note.moves, dims)[-1]


def adaptations(model: ir.Model, state: Mapping[str, np.ndarray], needed_by: str) -> list[Adaptation]:
    """Return the adapters of a training graph.

    Raises:
        GraphoptError: it has none, or one that is not low-rank.
    """
    state = {**state, **{owner: state[name] for name, owner in averages_read(model).items()}}
    values = {original_name(x): x for x in [*model.graph.inputs, *model.graph.initializers.values()]}
    found = []
    for note in adapted(model):
        if note.adapter != _LORA or len(note.values) not in (2, 3) or not {*note.values} <= {*values}:
            raise GraphoptError(
                f"{needed_by}: weight {note.weight!r}: expected an adapter of low rank, found {note.adapter!r}: merge "
                "it, by executor.trained()"
            )
        own = [values[name] for name in note.values]
        arrays = (_array(x, state) for x in own)
        found.append(Adaptation(note, values.get(note.weight), _stored_type(own[0]), *arrays))
    if not found:
        raise GraphoptError(
            f"{needed_by}: expected a training graph with adapters, found none: compile with adapter=passes.LoRA(...)"
        )
    return found


def _array(x: ir.Value, state: Mapping[str, np.ndarray]) -> np.ndarray:
    """Return the numbers of a value of an adapter, which does not train if the loss does not depend on it."""
    tensor = initial(x)
    return state[name_of(x)] if tensor is None or name_of(x) in state else tensor.numpy()


def _stored_type(x: ir.Value) -> ir.DataType | None:
    """Return the type to which the graph rounds a value, of fewer bits than its state, or None."""
    rounded = (node.outputs[0].dtype for node in x.consumers() if STORED.is_set(node) and node.op_type == "Cast")
    return next(rounded, None) if x.is_graph_input() else None


@dataclass(frozen=True)
class CombinedAdapter:
    """Hold the adapters of one weight, the sum of whose terms is A B.

    Args:
        name: the name of its slots, to which `.lora_A` and `.lora_B` are appended.
    """

    name: str
    adapters: Sequence[Adaptation]

    @property
    def first(self) -> Adaptation:
        return self.adapters[0]

    @property
    def has_factor(self) -> bool:
        """Return whether the outputs of the product have a factor each, as those of DoRA do."""
        return any(adapter.magnitude is not None for adapter in self.adapters)

    def defaults(self) -> Iterator[tuple[str, np.ndarray, Sequence[int | str]]]:
        """Yield the name, the default and the declared shape of each input of a slot, with 0 for the rank."""
        (axis_a, axis_b, axis), kind = self.first.kind.axes, self.first.kind
        a, b, rank = list(self.first.a.shape), list(self.first.b.shape), f"{self.name}.rank"
        a[axis_a] = b[axis_b] = 0
        b[axis] = self.first.outputs
        of_group = f"{rank}_of_group" if kind.is_filters else rank  # groups may share the rank
        symbol = of_group if kind.name == TRANSPOSED_CONVOLUTION else rank
        yield f"{self.name}.{LORA_A}", np.zeros(a), [size or symbol for size in a]
        yield f"{self.name}.{LORA_B}", np.zeros(b), [size or of_group for size in b]
        if self.has_factor:
            yield f"{self.name}.{LORA_FACTOR}", np.ones(1), [f"{self.name}.outputs"]

    def arrays(self) -> dict[str, np.ndarray]:
        """Return the numbers of the inputs by name, in the type in which the model multiplies.

        Raises:
            GraphoptError: DoRA changes the outputs of a product by other than one factor each.
        """
        kind, dtype = self.first.kind, self.first.stored
        axis_a, axis_b, axis = kind.axes
        factor = np.ones(self.first.outputs, self.first.b.dtype)
        w = _numbers(self.first) if self.has_factor else None
        terms: list[np.ndarray] = []
        for adapter in self.adapters:
            dims = list(adapter.b.shape)
            dims[axis] = len(factor)
            terms.append(np.zeros(dims, adapter.b.dtype))
            outputs_last = [np.moveaxis(term, axis, -1)[..., adapter.columns] for term in terms]
            outputs_last[-1][...] = np.moveaxis(adapter.note.scale * adapter.b, axis, -1)
            if adapter.magnitude is not None and w is not None:
                ratio = _ratio(adapter, w).astype(adapter.b.dtype)
                for scaled in (factor[adapter.columns], *outputs_last):
                    scaled *= ratio
            if w is not None:
                values = (adapter.a, adapter.b, adapter.magnitude)
                w = merged(adapter.note, w, *(x for x in values if x is not None))
        a = _joined([x.a for x in self.adapters], axis_a, self.first)
        numbers = [a, _joined(terms, axis_b, self.first), *([factor] if self.has_factor else [])]
        numbers = [x if dtype is None else x.astype(dtype.numpy()) for x in numbers]
        return {name: x for (name, *_), x in zip(self.defaults(), numbers, strict=True)}


def combined(adapters: Sequence[Adaptation]) -> list[CombinedAdapter]:
    groups: dict[str, list[Adaptation]] = {}
    for adapter in adapters:
        groups.setdefault(adapter.note.weight, []).append(adapter)
    names = [several[0].note.name for several in groups.values()]
    return [
        CombinedAdapter(name if names.count(name) == 1 else weight, several)
        for name, (weight, several) in zip(names, groups.items(), strict=True)
    ]


def _ratio(adapter: Adaptation, w: np.ndarray) -> np.ndarray:
    """Return the magnitudes of DoRA over the norms of the weight with the change, for each output."""
    note, kind = adapter.note, adapter.kind
    changed = moved(merged(note, w, adapter.a, adapter.b), note.moves)
    matrix = kind.matrix(changed, note.groups)[..., adapter.columns]
    norms = np.sqrt((matrix * matrix).sum(-2))
    if adapter.magnitude is None or (norms.ndim > 1 and norms.size != adapter.b.shape[kind.axes[2]]):
        raise GraphoptError(
            f"weight {note.weight!r}: expected one factor for each output, as slots for DoRA have it, found "
            f"{list(norms.shape)}: merge the adapter, by executor.trained()"
        )
    return adapter.magnitude.ravel() / norms.ravel()


def _numbers(adapter: Adaptation) -> np.ndarray:
    """Return the numbers of the weight of an adapter with DoRA, of 32 bits or more."""
    weight = adapter.weight
    tensor = initial(weight)
    numbers = standing_for(weight) if adapter.note.quantized else tensor.numpy() if tensor is not None else None
    if numbers is None:
        raise GraphoptError(
            f"weight {adapter.note.weight!r}: expected floating-point numbers, whose norms DoRA divides by, found "
            "packed ones: train without dora"
        )
    return numbers if numbers.dtype.itemsize > 4 else numbers.astype(np.float32)


def _joined(parts: Sequence[np.ndarray], axis: int, adapter: Adaptation) -> np.ndarray:
    """Join values along the rank; in a convolution, those of each group."""
    if len(parts) == 1:
        return parts[0]
    if not adapter.kind.is_filters or axis != 0:
        return np.concatenate(parts, axis)
    grouped = [x.reshape(adapter.note.groups, -1, *x.shape[1:]) for x in parts]
    return np.concatenate(grouped, 1).reshape(-1, *parts[0].shape[1:])

"""Turn the adapters of a graph into those of modules, as peft has them, and back."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphopt.adapters.combined import Adaptation
from graphopt.adapters.naming import OF_BUILDER, Names, Naming, part_sizes, widths_of
from graphopt.adapters.peft import Module
from graphopt.adapters.stacked import order_of_experts, parameter_of_experts, to_parameter
from graphopt.adapters.targets import readers_of, widths
from graphopt.errors import GraphoptError
from graphopt.graph.merging import Adapted, adapted
from graphopt.graph.metadata import EXPORTED_CALL, original_name
from graphopt.graph.origins import Kind, Layout, Origin
from graphopt.graph.roles import STATE, Role, role_of
from graphopt.graph.state import initial
from graphopt.graph.values import is_floating, name_of

# Of PyTorch's MultiheadAttention: peft adapts the first weight by the module's name, and adds the change of the other
# twice.
_IN, _OUT = ".in_proj_weight", ".out_proj.weight"


@dataclass(frozen=True)
class _Part:
    """Hold what an adapter changes of a module: the rows of B, which begin at `first` of the module's outputs.

    The module has its outputs in an order of its own, if there is one.
    """

    module: Module
    first: int
    outputs: int
    order: np.ndarray | None = None


def modules(model: ir.Model, adapters: Sequence[Adaptation], names: Names | Naming = None) -> list[Module]:
    """Return the adapters of a training graph as those of modules.

    Args:
        model: the training graph.
        adapters: its adapters.
        names: how its weights are named; see `graphopt.save_adapter`.

    Raises:
        GraphoptError: peft has no adapter for such a weight, or the parts of a packed weight are unknown.
    """
    found: dict[str, list[_Part]] = {}
    naming = Naming.of(model, names)
    values = {original_name(x): x for x in [*model.graph.inputs, *model.graph.initializers.values()]}
    sizes = part_sizes(values, naming)
    for adapter in _in_order(model, adapters):
        for part in _parts(model, adapter, naming, sizes):
            found.setdefault(part.module.path, []).append(part)
    return [_whole(parts) for parts in found.values()]


def _in_order(model: ir.Model, adapters: Sequence[Adaptation]) -> list[Adaptation]:
    """Return adapters with those of stacked weights last, in the order in which the graph reads the weights."""
    places = {node: i for i, node in enumerate(model.graph, 1)}

    def place(adapter: Adaptation) -> int:
        is_stacked = adapter.note.kind == "product" and adapter.a.ndim == 3
        return min(places.get(node, 0) for node, _ in readers_of(adapter.weight)) if is_stacked else 0

    return sorted(adapters, key=place)


def _parts(model: ir.Model, adapter: Adaptation, naming: Naming, sizes_in: Mapping[str, int]) -> Iterator[_Part]:
    """Yield the modules of one adapter: several if the weight is packed."""
    note, weight = adapter.note, adapter.weight
    _check_convolution(weight, note, is_dora=adapter.magnitude is not None)
    _check_attention(model, note)
    if note.kind == "product" and adapter.a.ndim == 3 and adapter.magnitude is None:
        known = [original_name(x) for x in [*model.graph.inputs, *model.graph.initializers.values()]]
        parameter = parameter_of_experts(note.name)
        path = naming.modules_of(parameter)[0][0] or parameter
        order = order_of_experts(note.name, known, adapter.b.shape[2])
        b = adapter.b if order is None else adapter.b[..., order]
        values, (experts, *_) = to_parameter(adapter.a, b), adapter.a.shape
        module = Module(path, *values, note.scale, rank_stabilized=note.rank_stabilized, experts=experts)
        yield _Part(module, 0, adapter.outputs)
        return
    if note.kind in ("recurrence", "transposed convolution") or (note.kind == "product" and adapter.a.ndim > 2):
        raise GraphoptError(
            f"weight {note.weight!r}: expected that of a Linear, Conv, Embedding or Conv1D, which peft adapts, "
            f"found that of a {note.kind}: save it by form='onnxruntime', or merge it, by executor.trained()"
        )
    a, b = _as_peft(adapter)
    outputs, parts = adapter.outputs, naming.modules_of(note.name)
    if not parts[0][0]:
        raise naming.refusal(note.name)
    sizes = widths_of(note.name, parts, outputs, widths(weight))
    start, stop = note.columns or (0, outputs)
    for (path, _), end, size in zip(parts, np.cumsum(sizes).tolist(), sizes, strict=True):
        first, last = max(start, end - size), min(stop, end)
        if first < last:
            rows = slice(first - start, last - start)
            magnitude = None if adapter.magnitude is None else adapter.magnitude.ravel()[rows]
            holder, members = naming.holder(path) if path in sizes_in else (path, (path,))
            before = sum(sizes_in[x] for x in members[: members.index(path)])
            total = sum(sizes_in[x] for x in members) if len(members) > 1 else size
            module = Module(
                holder.removesuffix(".in_proj_weight"),
                a,
                b[rows],
                note.scale,
                magnitude,
                is_embedding=note.kind == "embedding",
                keeps_inputs_first=_keeps_inputs_first(note),
                rank_stabilized=note.rank_stabilized,
            )
            order = naming.order(holder, [sizes_in[x] for x in members]) if len(members) > 1 else None
            yield _Part(module, before + first - end + size, total, order)


def _check_convolution(weight: ir.Value, note: Adapted, *, is_dora: bool) -> None:
    """Raise an error for a convolution for which peft computes something else."""
    if note.kind != "convolution":
        return
    problem = "DoRA of groups, whose norms peft takes of other numbers" if is_dora and note.groups > 1 else None
    if _is_folded(weight, note):
        problem = "numbers of other modules that the exporter folded into it, such as BatchNormalization"
    for node, _ in readers_of(weight):
        x = node.inputs[0].producer() if node.op_type == "Conv" and node.inputs[0] is not None else None
        if any(size > 1 for size in node.attributes.get_ints("dilations", [1])):
            problem = "dilations, which peft's A lacks"
        elif x is not None and x.op_type == "Pad" and x.attributes.get_string("mode", "constant") != "constant":
            problem = "padding by other numbers than 0, which peft's A lacks"
    if problem:
        raise GraphoptError(
            f"weight {note.weight!r}: expected a convolution of which peft computes the same, found one with "
            f"{problem}: save it by form='onnxruntime', or merge it, by executor.trained()"
        )


def _check_attention(model: ir.Model, note: Adapted) -> None:
    """Raise an error for the last product of a MultiheadAttention, for which peft computes something else."""
    attention = note.name.removesuffix(_OUT)
    values = [*model.graph.inputs, *model.graph.initializers.values()]
    known = {original_name(x) for x in values} if note.name.endswith(_OUT) else set()
    if known & {f"{attention}{_IN}", f"{attention}.in_proj_bias"}:
        raise GraphoptError(
            f"weight {note.name!r}: expected one of which peft computes the same, found that of a MultiheadAttention, "
            "whose change peft adds twice or not at all: leave it out, save it by form='onnxruntime', or merge it, by "
            "executor.trained()"
        )


def _is_folded(weight: ir.Value, note: Adapted) -> bool:
    """Return whether the exporter multiplied the weight of a convolution by others, and named it anew."""
    calls = [EXPORTED_CALL.read(node) or "" for node, _ in readers_of(weight)]
    return note.weight.startswith("onnx::") or any("batch_norm" in call for call in calls)


def _keeps_inputs_first(note: Adapted) -> bool:
    """Return whether the module of a product has its weight as [in, out]: its own weight is in the file, not turned."""
    turns = sum(how == "transpose" for how, _ in note.moves) % 2
    return (
        note.kind == "product"
        and note.name == note.weight
        and not turns
        and not OF_BUILDER.search(note.name)  # which has weights of Linear as [in, out]
    )


def _as_peft(adapter: Adaptation) -> tuple[np.ndarray, np.ndarray]:
    """Return A and B in peft's layout."""
    note, weight, a, b = adapter.note, adapter.weight, adapter.a, adapter.b
    if note.kind != "convolution":
        return a.T, b.T
    window = a.shape[2:] if weight.shape is None else weight.shape.numpy()[2:]  # as the module has it
    width = a.shape[1]
    grouped = a.reshape(note.groups, -1, width, *window)
    whole = np.zeros((*grouped.shape[:2], note.groups, *grouped.shape[2:]), a.dtype)
    for group in range(note.groups):  # peft's A reads all channels
        whole[group, :, group] = grouped[group]
    return whole.reshape(len(a), -1, *window), b.reshape(*b.shape[:2], *[1] * len(window))


def _whole(parts: Sequence[_Part]) -> Module:
    first, outputs = parts[0].module, parts[0].outputs
    if len(parts) == 1 and len(first.b) == outputs:
        return first
    if any(part.outputs != outputs or part.module.a.shape[1:] != first.a.shape[1:] for part in parts):
        raise GraphoptError(
            f"module {first.path!r}: expected adapters of one weight, found those of several, whose own modules the "
            "file does not tell: give names="
        )
    columns: dict[int, int] = {}  # of B, by the A that they are for
    blocks = list({id(part.module.a): part.module for part in parts}.values())
    for own in blocks:
        columns[id(own.a)] = sum(x.b.shape[1] for x in blocks[: len(columns)])
    b = np.zeros((outputs, sum(x.b.shape[1] for x in blocks), *first.b.shape[2:]), first.b.dtype)
    magnitude = np.zeros(outputs, first.b.dtype)
    covered = 0
    for part in parts:
        own = part.module
        rows = slice(part.first, part.first + len(own.b))
        column = columns[id(own.a)]
        b[rows, column : column + own.b.shape[1]] = own.b * (own.scale / first.scale)
        if own.magnitude is not None:
            magnitude[rows] = own.magnitude
            covered += len(own.b)
    if covered and sum(len(part.module.b) for part in parts) > outputs:
        raise GraphoptError(
            f"module {first.path!r}: expected one adapter of outputs with DoRA, as peft has it, found several: save "
            "it by form='onnxruntime', or merge it, by executor.trained()"
        )
    if 0 < covered < outputs:
        raise GraphoptError(
            f"module {first.path!r}: expected DoRA of all its {outputs} outputs, found that of {covered}: "
            "adapt all parts, or train without dora"
        )
    a = np.concatenate([x.a for x in blocks])
    order, stabilized = parts[0].order, len(blocks) == 1 and first.rank_stabilized
    b, magnitude = (b, magnitude) if order is None else (b[order], magnitude[order])
    return replace(first, a=a, b=b, magnitude=magnitude if covered else None, rank_stabilized=stabilized)


def saved_modules(
    model: ir.Model, state: Mapping[str, np.ndarray], paths: Collection[str], names: Names | Naming = None
) -> dict[str, np.ndarray]:
    """Return the parameters of the modules that trained in full, in PyTorch's layout, by their names.

    Of the modules with adapters, whose paths are given, these are the parameters that train.
    """
    naming = Naming.of(model, names)
    own = {name for note in adapted(model) for name in note.values}
    found: dict[str, np.ndarray] = {}
    trained: set[str] = set()
    for x in dict.fromkeys([*model.graph.inputs, *model.graph.initializers.values()]):
        tensor, role = initial(x), role_of(x)
        if original_name(x) in own or not is_floating(x) or role not in (None, Role.PARAMETER, Role.STATISTIC):
            continue
        if name_of(x) not in state and tensor is None:
            continue
        array = state[name_of(x)] if role in STATE else tensor.numpy()  # type: ignore[union-attr]
        name = parameter_of(x, naming)
        found[name] = in_module(x, array, naming)
        if role is Role.PARAMETER and "." not in name:
            raise GraphoptError(
                f"weight {original_name(x)!r}: expected a parameter of a module, as peft saves it, found one whose "
                "module the file does not tell: leave it frozen, or merge the adapter, by executor.trained()"
            )
        if role is Role.PARAMETER:
            trained.add(name)
    whole = {name.rpartition(".")[0] for name in trained} - {*paths}
    saved = {name: x for name, x in found.items() if name in trained or name.rpartition(".")[0] in whole}
    counted = {name.replace("running_mean", "num_batches_tracked") for name in saved if name.endswith(".running_mean")}
    return saved | {name: np.array(0) for name in counted}


def is_turned(x: ir.Value, array: np.ndarray) -> bool:
    """Return whether a file has the matrix of a module transposed: exporters that fold weights of Linear do so."""
    origin = Origin.read(x)
    is_recorded = origin is not None and origin.layout is Layout.TRANSPOSED
    return array.ndim == 2 and (is_recorded or OF_BUILDER.search(original_name(x)) is not None)


def in_module(x: ir.Value, array: np.ndarray, naming: Naming, *, back: bool = False) -> np.ndarray:
    """Return the numbers of an initializer as its module has them, or the other way round."""
    if naming.adds_one and original_name(x).endswith("layernorm.weight"):
        return array + 1 if back else array - 1
    return array.T if is_turned(x, array) else array


def name_of_parameter(x: ir.Value) -> str:
    """Return the name of the parameter that an initializer is, or from which the exporter made it."""
    origin = Origin.read(x)
    if origin is None or len(origin.sources) != 1 or Layout.ANEW is origin.layout or origin.kind is Kind.COMPUTED:
        return original_name(x)
    return origin.sources[0]


def parameter_of(x: ir.Value, naming: Naming) -> str:
    """Return the name of an initializer's parameter in PyTorch: that of its module, and its own.

    It is empty if a file of onnxruntime-genai's builder has some rows of the parameter, or those of several.
    """
    name = name_of_parameter(x)
    stem, _, own = name.rpartition(".")
    (path, _), *others = naming.modules_of(f"{stem.removesuffix('.Add')}.weight")
    if not naming.is_builders:
        return name if others or not stem else f"{path}.{own}"
    path, members = naming.holder(path)
    return "" if others or not path or len(members) > 1 else f"{path}.{own}"

"""Read adapters that other libraries, or other runs, have trained, in the layout of a graph."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx_ir as ir

from graphopt.adapters import adapter_file, peft
from graphopt.adapters.combined import LORA_A, LORA_B, LORA_FACTOR
from graphopt.adapters.modules import in_module, parameter_of
from graphopt.adapters.naming import Names, Naming, matched, part_sizes, prefix_of, widths_of
from graphopt.adapters.peft import Module
from graphopt.adapters.stacked import from_parameter, order_of_experts, parameter_of_experts
from graphopt.adapters.targets import AdapterTarget, targets_in, widths
from graphopt.errors import GraphoptError, some
from graphopt.graph.metadata import original_name
from graphopt.graph.model_folders import MOST_LETTERS, Architecture
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.rewriting import Pattern, matches
from graphopt.graph.values import dims_of, dtype_of, is_floating, name_of
from passes.parameters import ADAPTER

_STATISTICS = ("running_mean", "running_var")
_COUNT = "num_batches_tracked"


@dataclass(frozen=True)
class Given:
    """Hold what a file gives to a weight: the options of `LoRA`, and the values of each part by name."""

    weight: str
    rank: int
    scale: float
    rank_stabilized: bool = False
    dora: bool = False
    sizes: tuple[tuple[str, int], ...] = ()  # of the parts; those whose names begin with `_` have no adapter
    arrays: Mapping[str, Sequence[np.ndarray]] = field(default_factory=dict)


def given_by(model: ir.Model, path: str | os.PathLike[str], names: Names, leave_out: Pattern = None) -> list[Given]:
    """Return what a folder of peft or an adapter file gives to the weights of a model.

    Modules that trained in full are set in the model.

    Raises:
        GraphoptError: it is malformed, or is of another model.
    """
    known: dict[str, AdapterTarget] = {}
    for target in targets_in(model):
        known.setdefault(target.name, target)
    place = os.fspath(path)
    if Path(path).is_dir():
        return _of_folder(model, place, known, Naming.of(model, names), leave_out)
    return _of_file(place, known)


def _of_folder(
    model: ir.Model, place: str, known: Mapping[str, AdapterTarget], naming: Naming, leave_out: Pattern
) -> list[Given]:
    """Return what a folder of peft gives to each weight, and set the weights that trained in full."""
    stacked = stacked_in(known, naming)
    adapter = peft.read_folder(place, [*stacked])
    modules = {module.path.replace(".base_layer.", "."): module for module in adapter.modules}
    modules = {path: module for path, module in modules.items() if not matches(path, leave_out)}
    saved = {x: array for x, array in adapter.saved.items() if not matches(x.rpartition(".")[0], leave_out)}
    owners = {path: name for name in known for path, _ in naming.modules_of(name) if path} | stacked
    owners |= {name.removesuffix(".in_proj_weight"): name for name in known if name.endswith(".in_proj_weight")}
    if not owners and known:
        raise naming.refusal(next(iter(known)))
    sizes = part_sizes({name: target.source.weight for name, target in known.items()}, naming)
    members = {holder: parts for holder, parts in map(naming.holder, sizes) if all(x in sizes for x in parts)}
    renamed = matched(place, [*modules], {**owners, **members})
    groups: dict[str, dict[str, Module]] = {}
    for path, own in renamed.items():
        parts = members.get(own, ())
        for part, module in _split(
            place, modules[path], parts or (own,), sizes, naming.order(own, [sizes[x] for x in parts])
        ):
            groups.setdefault(owners[part], {})[part] = module
    given = [_of_modules(place, known[name], several, naming) for name, several in groups.items()]
    renamed |= _set_saved(model, place, saved, naming)
    about, (added, removed) = Architecture.read(model) or Architecture(), prefix_of(renamed)
    base, task = (x[:MOST_LETTERS] for x in (adapter.base or about.base, adapter.task or about.task))
    replace(about, base=base, task=task, added=added, removed=removed).write(model)
    return given


def _split(
    place: str, module: Module, parts: Sequence[str], sizes: Mapping[str, int], order: np.ndarray | None
) -> Iterator[tuple[str, Module]]:
    """Yield the parts of a module whose rows several weights have, each without the columns of B that are 0 there."""
    if len(parts) == 1:
        yield parts[0], module
        return
    ends = np.cumsum([sizes[part] for part in parts])
    if len(module.b) != ends[-1]:
        raise GraphoptError(
            f"{place}: module {module.path!r}: expected {ends[-1]} outputs, those of the model, found {len(module.b)}"
        )
    back = np.arange(ends[-1]) if order is None else np.argsort(order)
    b, magnitude = module.b[back], module.magnitude
    for i, part in enumerate(parts):
        rows = slice(ends[i] - sizes[part], ends[i])
        own = b[rows]
        used = own.any(0)
        norms = None if magnitude is None else magnitude[back][rows]
        if used.all() or not used.any():
            yield part, replace(module, b=own, magnitude=norms)
        else:
            yield (
                part,
                replace(module, a=module.a[used], b=own[:, used], magnitude=norms, rank_stabilized=False),
            )


def stacked_in(known: Mapping[str, AdapterTarget], naming: Naming) -> dict[str, str]:
    """Return the weights of stacked experts by the names of their parameters."""
    stacked = [name for name, x in known.items() if len(x.dims) == 3 and x.kind == "product"]
    parameters = {parameter_of_experts(name): name for name in stacked}
    return {naming.modules_of(path)[0][0] or path: name for path, name in parameters.items()}


def _names_in(target: AdapterTarget) -> list[str]:
    """Return the names of the initializers of a target's model."""
    graph = target.source.weight.graph
    return [] if graph is None else [*map(original_name, graph.initializers.values())]


def _of_modules(place: str, target: AdapterTarget, modules: Mapping[str, Module], naming: Naming) -> Given:
    """Return what the adapters of a weight's modules give to it."""
    parts = naming.modules_of(target.name)
    if len(modules) == len(parts) > 1 and len({id(module.a) for module in modules.values()}) == 1:
        first, *_ = own = [modules[path] for path, _ in parts]  # one adapter of a packed weight
        norms = (
            None if first.magnitude is None else np.concatenate([x.magnitude for x in own if x.magnitude is not None])
        )
        modules = {target.name: replace(first, b=np.concatenate([x.b for x in own]), magnitude=norms)}
        parts = [(target.name, None)]
    stabilized, dora = (
        all(x) for x in zip(*((m.rank_stabilized, m.magnitude is not None) for m in modules.values()), strict=True)
    )
    rank = max(module.rank for module in modules.values())
    scale = next(iter(modules.values())).scale
    scale = scale if scale > 0 else 1.0
    if len(parts) == 1:
        (module,) = modules.values()
        arrays = _in_graph(place, target, module, rank, scale)
        return Given(name_of(target.source.weight), rank, scale, stabilized, dora, (), {"": arrays})
    sizes = [(path, len(modules[path].b) if path in modules else size) for path, size in parts]
    ends = widths_of(target.name, sizes, target.outputs, widths(target.source.weight))
    labels = [path.rpartition(".")[2] if path in modules else f"_{path.rpartition('.')[2]}" for path, _ in parts]
    values = {
        label: _in_graph(place, target, modules[path], rank, scale, size)
        for label, (path, _), size in zip(labels, parts, ends, strict=True)
        if path in modules
    }
    return Given(name_of(target.source.weight), rank, scale, False, dora, tuple(zip(labels, ends, strict=True)), values)


def _in_graph(
    place: str, target: AdapterTarget, module: Module, rank: int, scale: float, outputs: int | None = None
) -> list[np.ndarray]:
    """Return the values of a module's adapter in the layout of the graph, with zeros up to a rank."""
    axis_a, axis_b, axis = target.reading.axes
    shapes = [list(shape) for shape in target.shapes(module.rank)]
    if outputs is not None:
        shapes[1][axis] = outputs
    a, b = module.a, module.b
    try:
        if module.experts:
            a, b = from_parameter(a, b, module.experts)
            if (order := order_of_experts(target.name, _names_in(target), b.shape[2])) is not None:
                b = b[..., np.argsort(order)]
        elif target.kind == "convolution":
            _check_dilations(place, target, module)
            a, b = _of_groups(a, target.groups).reshape(shapes[0]), b.reshape(shapes[1])
        else:
            a, b = a.T, b.T
        fits = [*a.shape] == shapes[0] and [*b.shape] == shapes[1]
    except GraphoptError:
        raise
    except ValueError:
        fits = False
    if not fits or module.is_embedding != (target.kind == "embedding"):
        raise GraphoptError(
            f"{place}: module {module.path!r}: expected an adapter of the {target.kind} by {target.name!r}, of shapes "
            f"{shapes[0]} and {shapes[1]} in the graph, found {list(module.a.shape)} and {list(module.b.shape)}"
        )
    wide_a, wide_b = ([(0, 0)] * x.ndim for x in (a, b))
    more = (rank - module.rank) // (target.groups if axis_b == 1 else 1)
    wide_a[axis_a], wide_b[axis_b] = (0, rank - module.rank), (0, more)
    values = [np.pad(a, wide_a), np.pad(b, wide_b) * (module.scale / scale)]
    return values if module.magnitude is None else [*values, module.magnitude]


def _check_dilations(place: str, target: AdapterTarget, module: Module) -> None:
    """Raise an error for an adapter of a dilated convolution, whose A peft computes without dilations."""
    if any(size > 1 for size in target.node.attributes.get_ints("dilations", [1])):
        raise GraphoptError(
            f"{place}: module {module.path!r}: expected a convolution without dilations, found one with some, which "
            "peft's A lacks, so that it cannot be merged: train without this module"
        )


def _of_groups(a: np.ndarray, groups: int) -> np.ndarray:
    """Return the filters of each group of a convolution, which read the channels of the group alone."""
    parts = a.reshape(groups, len(a) // groups, groups, -1, *a.shape[2:])
    own = np.stack([parts[group, :, group] for group in range(groups)])
    if np.count_nonzero(own) != np.count_nonzero(a):
        raise GraphoptError(
            "convolution: expected an adapter whose filters read the channels of their own group, found one of peft's, "
            "which read all of them, so that it cannot be merged: train without this module"
        )
    return own


def _of_file(place: str, known: Mapping[str, AdapterTarget]) -> list[Given]:
    """Return what an adapter file of ONNX Runtime gives to each weight."""
    arrays = adapter_file.read_adapter_file(Path(place))
    by_weight = {name_of(target.source.weight): target for target in known.values()}
    by_weight |= known
    stems = dict.fromkeys(name.rpartition(".")[0] for name in arrays)
    needed = {f"{stem}.{suffix}" for stem in stems for suffix in (LORA_A, LORA_B)}
    wrong = [stem for stem in stems if stem not in by_weight]
    wrong += sorted(needed ^ (arrays.keys() - {f"{stem}.{LORA_FACTOR}" for stem in stems}))
    if wrong or not stems:
        found, own = some([*map(repr, wrong)]) or "none", some([*map(repr, known)]) or "none"
        raise GraphoptError(
            f"{place}: expected lora_A and lora_B for weights of the model, found {found}; the model has {own}"
        )
    return [
        _of_slots(
            place,
            by_weight[stem],
            *(arrays.get(f"{stem}.{suffix}") for suffix in (LORA_A, LORA_B, LORA_FACTOR)),
        )
        for stem in stems
    ]


def _of_slots(
    place: str, target: AdapterTarget, a: np.ndarray | None, b: np.ndarray | None, factor: np.ndarray | None
) -> Given:
    """Return what the slots of a weight give to it."""
    assert a is not None and b is not None
    axis = target.reading.axes[0]
    rank = a.shape[axis] * (target.groups if axis == 1 else 1) if a.ndim > 1 else 0
    shapes = target.shapes(rank) if rank else ((), ())
    if not rank or (a.shape, b.shape) != shapes or (factor is not None and factor.size != target.outputs):
        raise GraphoptError(
            f"{place}: {target.name!r}: expected A and B of shapes {[*shapes[0]]} and {[*shapes[1]]}, found "
            f"{list(a.shape)} and {list(b.shape)}"
        )
    weight = name_of(target.source.weight)
    if factor is None:
        return Given(weight, rank, 1.0, arrays={"": [a, b]})
    if not factor.all():
        raise GraphoptError(f"{place}: {target.name!r}: expected factors other than 0, found 0")
    shape = [-1] + [1] * (b.ndim - 1) if target.reading.is_filters else [-1]
    b = b / factor.reshape(shape)
    w, down, up = (target.reading.matrix(x, target.groups, up=x is b) for x in (target.numbers(), a, b))
    matrix = w + down @ up
    norms = np.sqrt((matrix * matrix).sum(-2)).ravel()
    return Given(weight, rank, 1.0, dora=True, arrays={"": [a, b, factor * norms]})


def _set_saved(model: ir.Model, place: str, saved: Mapping[str, np.ndarray], naming: Naming) -> dict[str, str]:
    """Set the weights of modules that trained in full, and return their names in the file by those in the folder."""
    numbers = {name: x for name, x in saved.items() if not name.endswith(_COUNT)}
    known = {parameter_of(x, naming): x for x in model.graph.initializers.values() if is_floating(x)}
    known.pop("", None)
    renamed = matched(place, [*numbers], known)
    for name, own in renamed.items():
        value, array = known[own], numbers[name]
        set_value(value, in_module(value, array, naming, back=True), f"{place}: {name!r}")
        if not name.endswith(_STATISTICS):
            ADAPTER.set(value)
            Origin(Kind.PARAMETER, "of a module that trained in full", named=True).write(value)
    return renamed


def set_value(value: ir.Value, array: np.ndarray, where: str) -> None:
    """Set an initializer to numbers of its shape; errors begin with `where`."""
    shape = ir.Shape(dims_of(value)).numpy()
    if array.size != np.prod(shape, dtype=int) or (array.ndim > 1 and array.shape != tuple(shape)):
        raise GraphoptError(f"{where}: expected shape {[*shape]}, that of {value.name!r}, found {list(array.shape)}")
    if not np.isfinite(array).all():
        raise GraphoptError(f"{where}: {value.name!r}: expected finite numbers, found others: train the adapter anew")
    value.const_value = ir.tensor(array.reshape(shape).astype(dtype_of(value).numpy()), name=value.name)

"""Merge adapters into the weights that they change, as matrices; see `graphopt.graph.weight_kinds`."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from types import FunctionType

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph import metadata
from graphopt.graph.metadata import Note, expect
from graphopt.graph.state import initial
from graphopt.graph.values import name_of
from graphopt.graph.weight_kinds import NAMES, Moves, WeightKind, inverse, moved, shape_after

_LAZY_FROM = 2**24  # bytes of a weight
_PLAIN = (bool, int, float, str)
Merge = Callable[..., np.ndarray]

MERGES: dict[str, Merge] = {}  # by the name in an adapter's note: w' = merge(w, scale, *values), of matrices


@dataclass(frozen=True)
class Adapted(
    Note,
    key="graphopt.adapter",
    expected="an adapter, the weight that it changes, its values and how they become matrices",
):
    """Record how an adapter changes a weight. The note is on the first of the adapter's values, such as NAME.lora_A.

    As matrices, the weight w and the values a and b are laid out so that w' = w + scale a b for LoRA: [..., K, N],
    [..., K, r] and [..., r, N]. See `graphopt.graph.weight_kinds`.

    Args:
        adapter: the name of the adapter's class, such as `LoRA` or `my.module.Scaling`; see `register_merge`.
        weight: the name of the weight in the original model.
        name: the name of the parameter from which the exporter made the weight, or that of the weight.
        values: the names of the adapter's values, in the order in which its `merge` takes them.
        kind: the layout of the weight, such as `product` or `convolution`.
        scale: the factor of the change.
        alpha: the numerator of the factor.
        rank_stabilized: whether the denominator is the root of the rank, not the rank.
        part: the name of the part of a packed projection that it changes.
        groups: the groups of a convolution.
        moves: the permutations of axes and the shapes that turn the file's weight into what the product multiplies by.
        columns: the first and the last + 1 of the outputs that it changes; None for all.
        quantized: whether the file stores the weight in integers, into which nothing can be merged.
        place: the number of adapters of the weight that were there before; a later one is nearer to the product.
    """

    adapter: str
    weight: str
    name: str
    values: tuple[str, ...]
    kind: str
    scale: float = 1.0
    alpha: float = 1.0
    rank_stabilized: bool = False
    part: str = ""
    groups: int = 1
    moves: Moves = ()
    columns: tuple[int, int] | None = None
    quantized: bool = False
    place: int = 0

    def check(self) -> None:
        expect(self.kind in NAMES, self.groups > 0, math.isfinite(self.scale), bool(self.values))
        expect(all(how in ("transpose", "reshape") for how, _ in self.moves))


def register_merge(kind: type, merge: Merge) -> str:
    """Register how a class of adapters merges its values, and return the name for the notes of its adapters.

    Classes of `passes` have their own names, and others those of their modules before them. A class that inherits
    `merge` has the name of its base class. A class of the same name takes the place of an earlier one with the same
    code, as in a cell of a notebook that runs again. With other code it gets a new name, so that the weights of each
    graph are merged by the class with which it was compiled.

    Raises:
        GraphoptError: `passes` has another adapter of this name.
    """
    inherited = next((name for name, other in MERGES.items() if other is merge), None)
    if inherited is not None:
        return inherited
    is_own = kind.__module__.partition(".")[0] == "passes"
    name = kind.__name__ if is_own else f"{_module_of(kind)}.{kind.__qualname__}"
    names = itertools.chain([name], (f"{name}@{i}" for i in itertools.count(2)))
    chosen = next(x for x in names if x not in MERGES or _alike(MERGES[x], merge))
    if is_own and chosen != name:
        raise GraphoptError(f"adapter {name}: expected one class of this name in passes, found two: rename one")
    MERGES[chosen] = merge
    return chosen


def _module_of(kind: type) -> str:
    """Return the name under which other programs import the module of a class, also if it is the program itself."""
    if kind.__module__ not in ("__main__", "__mp_main__"):
        return kind.__module__
    module = sys.modules.get(kind.__module__)
    spec, file = getattr(module, "__spec__", None), getattr(module, "__file__", None)
    return str(spec.name) if spec else Path(file).stem if file else "__main__"


def _alike(first: object, second: object) -> bool:
    """Return whether two functions have the same code, and read the same variables."""
    if not (isinstance(first, FunctionType) and isinstance(second, FunctionType)):
        return first is second
    values = _read_by(first), _read_by(second)
    return (
        first.__code__ == second.__code__
        and first.__globals__ is second.__globals__
        and len(values[0]) == len(values[1])
        and all(
            x is y or (type(x) is type(y) and isinstance(x, _PLAIN) and x == y) for x, y in zip(*values, strict=True)
        )
    )


def _read_by(function: FunctionType) -> list[object]:
    """Return the values of the variables around a function, and the defaults of its arguments."""
    values = [*(function.__defaults__ or ()), *itertools.chain(*(function.__kwdefaults__ or {}).items())]
    for cell in function.__closure__ or ():
        try:
            values.append(cell.cell_contents)
        except ValueError:  # it has no value yet
            values.append(cell)
    return values


def adapted(model: ir.Model) -> list[Adapted]:
    """Return the notes of a model's adapters in the order in which their terms apply: of one weight, the last first."""
    return sorted((note for _, note in Adapted.of_values(model)), key=lambda note: -note.place)


def merged_weights(model: ir.Model, state: Mapping[str, np.ndarray]) -> dict[str, ir.TensorProtocol]:
    """Return the weights with the adapters of a training graph, by their names in the original model.

    Large ones are computed when they are read.

    Args:
        model: the training graph.
        state: the values of the state by name.

    Raises:
        GraphoptError: the file stores a weight in integers, or an adapter is unknown.
    """
    notes = adapted(model)
    arrays = dict(_arrays(model, state)) if notes else {}
    weights: dict[str, ir.TensorProtocol] = {}
    for note in notes:
        if note.quantized and note.weight not in arrays:
            raise GraphoptError(
                f"weight {note.weight!r}: expected floating-point numbers to merge an adapter into, found integers: "
                "save the adapter alone, or the model with slots"
            )
        values = [arrays[name] for name in note.values if name in arrays]
        if note.weight not in arrays or len(values) < len(note.values):
            missing = next(name for name in (note.weight, *note.values) if name not in arrays)
            raise GraphoptError(f"adapter of {note.weight!r}: expected the value {missing!r}, found none in the graph")
        base = weights.get(note.weight) or ir.tensor(arrays[note.weight])
        merge = partial(_merged, note, base, values)
        is_small = base.nbytes < _LAZY_FROM
        weights[note.weight] = merge() if is_small else ir.LazyTensor(merge, base.dtype, ir.Shape(base.shape.numpy()))
    return weights


def _merged(note: Adapted, base: ir.TensorProtocol, values: Sequence[np.ndarray]) -> ir.TensorProtocol:
    return ir.tensor(merged(note, base.numpy(), *values))


def _arrays(model: ir.Model, state: Mapping[str, np.ndarray]) -> Iterable[tuple[str, np.ndarray]]:
    """Yield the values of state and of weights by their original names."""
    for value in dict.fromkeys([*model.graph.inputs, *model.graph.initializers.values()]):
        name, tensor = name_of(value), initial(value)
        if name in state:
            yield metadata.original_name(value), state[name]
        elif tensor is not None and tensor.dtype.is_floating_point():
            yield metadata.original_name(value), tensor.numpy()


def merged(note: Adapted, w: np.ndarray, *values: np.ndarray) -> np.ndarray:
    """Return a weight with an adapter, in the layout and the type of the weight in the file.

    Args:
        note: the note of the adapter.
        w: the weight as the file has it.
        values: the adapter's values, in the order of the note.

    Raises:
        GraphoptError: the adapter's class is unknown here, or the values do not fit the weight.
    """
    if note.adapter not in MERGES:
        raise GraphoptError(
            f"weight {note.weight!r}: expected a known adapter, found {note.adapter!r}: import the module that "
            "defines it"
        )
    wide = np.float64 if w.dtype == np.float64 else np.float32
    try:
        kind, moves = WeightKind(note.kind), note.moves
        moves = (*moves, *kind.to_matrices(shape_after(moves, w.shape), note.groups))
        matrix = moved(w.astype(wide), moves).copy()
        columns = slice(*note.columns) if note.columns else slice(None)
        factors = [kind.matrix(x.astype(wide), note.groups, up=i > 0) for i, x in enumerate(values)]
        matrix[..., columns] = MERGES[note.adapter](matrix[..., columns], note.scale, *factors)
        changed = moved(matrix, inverse(moves, w.shape))
    except (ValueError, IndexError) as error:
        found = ", ".join(str(list(x.shape)) for x in values)
        raise GraphoptError(
            f"weight {note.weight!r} of shape {list(w.shape)}: expected an adapter that fits it, found values of "
            f"{found}: {error}"
        ) from error
    return np.ascontiguousarray(changed, dtype=w.dtype)

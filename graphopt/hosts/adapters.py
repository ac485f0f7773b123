"""Say where a host puts the numbers of its state in adapter files, so that it writes them without Python.

A file has the numbers of a state in blocks: transposed, as some of its rows, or times a factor. The blocks are found by
writing the arrays of a file from states of ones and of consecutive numbers. DoRA divides by norms of weights, so that
its arrays are no blocks of the state: a graph computes them, and the file has blocks of its outputs.
"""

from __future__ import annotations

import contextlib
import functools
import math
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import onnx_ir as ir
import safetensors.numpy

from graphopt.adapters.adapter_file import located
from graphopt.adapters.combined import LORA_A, LORA_B, CombinedAdapter, adaptations, combined
from graphopt.adapters.peft import WEIGHTS, folder_contents
from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference import extract
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import original_name
from graphopt.graph.roles import Role, set_role
from graphopt.graph.values import given
from graphopt.hosts.contract import Entry, places
from graphopt.runtime.device import Device
from graphopt.runtime.saved_adapter import peft_adapter, slot_arrays
from graphopt.runtime.saved_folder import ADAPTER_FILE
from graphopt.runtime.session import Session

_COMPUTED = "computed"  # ends the names of outputs of the graph that computes arrays of files
_TYPES = ("float32", "float64")  # that a host multiplies
_NARROW = ("float16", "bfloat16")  # that it rounds float32 to

_State = Mapping[str, np.ndarray]
_Arrays = dict[str, np.ndarray]


def adapter_files(model: ir.Model, initial: _State, *, computes: bool) -> tuple[dict[str, bytes], Entry]:
    """Return the adapter files of the initial state by name, and the blocks of each file by form and name.

    A form that `graphopt.save_adapter` refuses, or whose numbers are no blocks of the state's, is left out.

    Args:
        computes: whether there is an `adapter_graph`, of whose outputs a file may have blocks, too.
    """
    files: dict[str, bytes] = {}
    described: Entry = {}
    initial = {**initial, **_computed(model, initial)} if computes else initial
    for form, of in (("onnxruntime", _slots), ("peft", _peft)) if adapted(model) else ():
        with warnings.catch_warnings(), contextlib.suppress(GraphoptError):
            warnings.simplefilter("ignore")
            arrays, kept = (
                functools.partial(_arrays, model, form),
                _arrays(model, form, initial, rounded=True),
            )
            made, name, offsets = of(model, initial)
            types = {x: array.dtype for x, array in kept.items()}
            described[form] = {**{x: [] for x in made}, name: [*_blocks(arrays, types, initial, offsets)]}
            files |= made
    return files, described


def adapter_graph(model: ir.Model, initial: _State) -> ir.Model | None:
    """Return a graph that computes the arrays of DoRA's files from a state; None without DoRA, or if it is not right.

    The norms are those of the training graph. It is compared with Python on a state beside the initial one.
    """
    rng = np.random.default_rng(0)
    noise = {name: rng.uniform(0.1, 0.2, x.shape).astype(x.dtype) for name, x in initial.items()}
    moved = {name: x + noise[name] if x.dtype.kind == "f" else x for name, x in initial.items()}
    try:
        expected = _computed(model, moved) if adapted(model) else {}
        if not expected:
            return None
        model = model.clone()
        with Emitter(model) as op:
            own = [x for x in combined(adaptations(model, initial, "hosts")) if x.has_factor]
            made = {name: y for x in own for name, y in _emitted(op, model, x).items()}
        for name, y in made.items():
            y.name = name
            model.graph.outputs.append(set_role(y, Role.PREDICTION))
        graph = extract(model, [*made.values()])
        found = Session(Device("cpu"), graph).compute_arrays(moved)
    except GraphoptError:
        return None
    is_right = all(np.allclose(found[name], x, rtol=1e-4, atol=1e-6) for name, x in expected.items())
    return graph if is_right else None


def _computed(model: ir.Model, state: _State) -> _Arrays:
    """Return what adapter files have of DoRA, but A, by the names of the graph's outputs."""
    own = [replace(x, stored=None) for x in adaptations(model, state, "hosts")]
    arrays = {name: x for each in combined(own) if each.has_factor for name, x in each.arrays().items()}
    return {f"{name}.{_COMPUTED}": x for name, x in arrays.items() if not name.endswith(LORA_A)}


def _emitted(op: Emitter, model: ir.Model, adapter: CombinedAdapter) -> dict[str, ir.Value]:
    """Emit what `CombinedAdapter.arrays` has but A, and return the values by the names of the graph's outputs."""
    values = {original_name(x): _read(x) for x in reversed(model.graph.inputs)}  # averages come last
    _, rank_axis, axis = adapter.first.kind.axes
    factor, terms = op.constant(np.ones(adapter.first.outputs, np.float32)), list[ir.Value]()
    for each in adapter.adapters:
        first, last, _ = each.columns.indices(adapter.first.outputs)
        ends = [first, adapter.first.outputs - last]
        b, rank = values[each.note.values[1]], each.b.ndim
        pads = np.zeros((2, rank), np.int64)
        pads[:, axis] = ends
        terms.append(op.Pad(each.note.scale * b, op.constant(pads.ravel())))
        if each.magnitude is not None:
            magnitude = values[each.note.values[2]]
            ratio = next(
                (y.outputs[0] for y in magnitude.consumers() if (y.op_type, y.inputs[0]) == ("Div", magnitude)),
                None,
            )
            shape = [-1 if i == axis % rank else 1 for i in range(rank)]
            padded = op.Pad(op.Reshape(given(ratio), [-1]), op.constant(np.array(ends)), op.constant(np.float32(1)))
            factor, terms = factor * padded, [term * op.Reshape(padded, shape) for term in terms]
    b = op.Concat(*terms, axis=rank_axis) if terms[1:] else terms[0]
    return {
        f"{name}.{_COMPUTED}": op.Identity(b if name.endswith(LORA_B) else factor)
        for name, *_ in adapter.defaults()
        if not name.endswith(LORA_A)
    }


def _read(x: ir.Value) -> ir.Value:
    """Return what the model reads of a state: in inference, perhaps its average in place of it."""
    return next((y for node in x.consumers() if node.op_type == "Identity" for y in node.outputs), x)


def _slots(model: ir.Model, initial: _State) -> tuple[dict[str, bytes], str, dict[str, int]]:
    """Return the adapter file of ONNX Runtime, its name, and the place of each array in it."""
    content, offsets = located(_arrays(model, "onnxruntime", initial, rounded=True))
    return {ADAPTER_FILE: content}, ADAPTER_FILE, offsets


def _peft(model: ir.Model, initial: _State) -> tuple[dict[str, bytes], str, dict[str, int]]:
    """Return the files of a folder of peft, the name of that with arrays, and the place of each array in it."""
    found = peft_adapter(model, initial, adaptations(model, initial, "hosts"), None)
    files = folder_contents(found)
    return files, WEIGHTS, {name: place.offset for name, place in places(files[WEIGHTS]).items()}


def _arrays(model: ir.Model, form: str, state: _State, *, rounded: bool = False) -> _Arrays:
    """Return the arrays of a file by name, those of slots before they are rounded to 16 bits unless asked for."""
    if form == "onnxruntime":
        own = adaptations(model, state, "hosts")
        if rounded:
            return slot_arrays(own)
        arrays = slot_arrays([replace(x, stored=None) for x in own])
        return {name: state.get(f"{name}.{_COMPUTED}", x) for name, x in arrays.items()}
    return safetensors.numpy.load(_peft(model, state)[0][WEIGHTS])


def _blocks(
    of: Callable[[_State], _Arrays],
    types: Mapping[str, np.dtype[Any]],
    initial: _State,
    offsets: Mapping[str, int],
) -> Iterator[Entry]:
    """Yield each block that a file has of a state: its place and its strides in the file and in the state."""
    names = [*initial]
    firsts = np.cumsum([1, *(x.size for x in initial.values())])
    consecutive = {
        name: np.arange(first, first + x.size, dtype=np.float64).reshape(x.shape)
        for (name, x), first in zip(initial.items(), firsts[:-1], strict=True)
    }
    zeros, ones, numbered = (
        of({name: f(x) for name, x in consecutive.items()}) for f in (np.zeros_like, np.ones_like, np.copy)
    )
    for name, base in sorted(zeros.items()):
        factors = np.asarray(ones[name] - base, np.float64)
        numbers = np.asarray(numbered[name] - base, np.float64)
        places = np.rint(np.divide(numbers, factors, out=np.zeros_like(numbers), where=factors != 0))
        owners = np.searchsorted(firsts, places, "right") - 1  # -1 where nothing of the state is
        for owner in np.unique(owners[owners >= 0]).tolist():
            inside = owners == owner
            block = tuple(slice(x.min(), x.max() + 1) for x in np.nonzero(inside))
            (factor, *others), part = np.unique(factors[block]).tolist(), places[block] - firsts[owner]
            strides = [int(np.diff(part, axis=i).flat[0]) if n > 1 else 0 for i, n in enumerate(part.shape)]
            origin = [x.start for x in block]
            steps = [math.prod(base.shape[i + 1 :]) for i in range(base.ndim)]
            state, dtype = names[owner], types[name]
            own = initial[state].dtype
            is_rounded = dtype.name in _NARROW and own == np.float32
            if (
                others
                or not inside[block].all()
                or base[block].any()
                or (part != _strided(int(part.flat[0]), part.shape, strides)).any()
                or not np.allclose(numbers[block], (part + firsts[owner]) * factor, rtol=1e-9)
                or not (is_rounded or (dtype == own and dtype.name in _TYPES))
            ):
                raise GraphoptError(f"hosts: {name!r}: expected blocks of the state, found other numbers")
            yield {
                "state": state,
                "offset": offsets[name] + dtype.itemsize * int(np.dot(origin, steps)),
                "shape": [*part.shape],
                "strides": steps,
                "first": int(part.flat[0]),
                "state_strides": strides,
                "factor": factor,
                **({"type": dtype.name} if is_rounded else {}),
            }


def _strided(first: int, shape: tuple[int, ...], strides: list[int]) -> np.ndarray:
    """Return the number that a view with strides has at each place, of an array of consecutive numbers."""
    axes = np.ix_(*(np.arange(size) * stride for size, stride in zip(shape, strides, strict=True)))
    return np.asarray(first + sum(axes))

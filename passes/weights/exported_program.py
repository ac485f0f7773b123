"""Read the records of PyTorch's exporter (`dynamo=True`).

Its metadata contains the signature of the exported program, for each folded value the names from which it was made,
and for each node the call of the program from which it comes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphopt.errors import some
from graphopt.graph.metadata import EXPORTED_CALL, Kind, Origin, note, note_of
from graphopt.graph.names import constant_copy_of
from graphopt.graph.operators import CONVOLUTIONS, LITERALS
from graphopt.graph.values import name_of
from passes.weights import folds, gathers, initializers, ties
from passes.weights.detached import DETACHING, FOLDED_FROM, SIGNATURE, call_of
from passes.weights.initializers import array, duplicate, fill_value, is_weight, register, weights_in

_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_PLACEHOLDER = "pkg.torch.onnx.original_node_name"

_KINDS = {"PARAMETER": Kind.PARAMETER, "BUFFER": Kind.BUFFER, "CONSTANT_TENSOR": Kind.CONSTANT}

# Calls of ATen that only change the layout.
_LAYOUT = {
    *("alias", "clone", "contiguous", "lift_fresh_copy", "flatten", "reshape", "squeeze", "unflatten"),
    *("unsqueeze", "view", "_unsafe_view", "movedim", "permute", "t", "transpose"),
}
# Calls that only move numbers, or leave some out.
_MOVING = _LAYOUT | {
    *("detach", "detach_", "to", "_to_copy", "cat", "stack", "expand", "repeat", "tile", "flip", "roll"),
    *("chunk", "diagonal", "embedding", "getitem", "index", "index_select", "narrow", "select", "slice"),
    *("split", "split_with_sizes", "unbind"),
}
# Calls that make numbers out of none.
_MAKING = {
    *("arange", "full", "full_like", "ones", "ones_like", "scalar_tensor", "scalar_tensor_default", "val"),
    *("zeros", "zeros_like"),
}
_TURNING = {"permute", "t", "transpose"}
# Calls in this list that may repeat numbers.
_REPEATING = {"embedding", "expand", "index", "index_select", "repeat", "tile"}
# Operators from which the exporter drops a bias of zeros.
_BIASED = CONVOLUTIONS | {"Gemm"}
_INVERSES = {call: inverse for call, (_, inverse) in folds.UNARY.items() if inverse is not None}


@dataclass(frozen=True)
class Spec:
    """Describe an input of an exported program: its kind, and its path in the module."""

    kind: Kind
    target: str


_Signature = Mapping[str, Spec]
_Use = tuple[ir.Value, ir.Node, int]


def signature(model: ir.Model) -> dict[str, Spec]:
    """Return the parameters and buffers of the exported program by their placeholders."""
    text = note_of(model.graph, SIGNATURE) or ""
    records = re.findall(r"^(\w+): (\w+) target='([^']*)'", text, re.MULTILINE)
    specs = {name: Spec(_KINDS[kind], target) for name, kind, target in records if kind in _KINDS}
    targets = {spec.target for spec in specs.values()}
    for value in weights_in(model):
        kind = note_of(value, _KIND)
        if kind in _KINDS and value.name not in targets:
            placeholder = note_of(value, _PLACEHOLDER) or name_of(value)
            specs[placeholder] = Spec(_KINDS[kind], name_of(value))
    return specs


def is_stripped(model: ir.Model) -> bool:
    """Return whether this exporter wrote a file from which another tool removed its records."""
    if model.producer_name != "pytorch" or note_of(model.graph, SIGNATURE) is not None:
        return False
    return any(re.fullmatch(r"val_\d+", name_of(x)) for x in model.graph.initializers.values()) or any(
        re.match(r"node_\w+", node.name or "") for node in model.graph
    )


def restore_records(model: ir.Model, specs: _Signature) -> None:
    """Derive from which parameters values were folded, from the calls that read them, if another tool removed that."""
    if any(note_of(value, FOLDED_FROM) for value in weights_in(model)):
        return
    parameters = {name: spec.target for name, spec in specs.items() if spec.kind is Kind.PARAMETER}
    targets = {spec.target for spec in specs.values()}
    folded = [x for x in weights_in(model) if name_of(x) not in targets and fill_value(x) is None]
    sources: dict[ir.Value, set[str]] = {}
    for x in folded:
        calls = [note_of(user, EXPORTED_CALL) or "" for user in x.consumers()]
        named = {parameters[name] for call in calls for name in _arguments(call) if name in parameters}
        own = {y.name for user in x.consumers() for y in user.inputs if y is not None}
        sources[x] = (named - own) or named
    known = set(model.graph.initializers).union(*sources.values())
    missing = [name for name in parameters.values() if name not in known]
    for x in folded:
        if names := sorted(sources[x]) or (missing if len(x.shape or ()) else []):
            note(x, FOLDED_FROM, repr(names))


def program_origins(model: ir.Model, specs: _Signature) -> Iterator[tuple[str, Origin]]:
    """Yield name and kind of each floating-point initializer and constant that the signature determines.

    Keras's variables are not parameters for PyTorch's exporter: their values are constants, as literals are.
    """
    kinds = {spec.target: spec.kind for spec in specs.values()}
    placeholders = {spec.target: name for name, spec in specs.items()}
    leaves_open = not any(kinds.get(name) is Kind.PARAMETER for name in _names_present(model))
    if not leaves_open:
        for node in model.graph.all_nodes():
            if node.op_type in LITERALS and node.domain == "":
                yield name_of(node.outputs[0]), Origin(Kind.CONSTANT, "a constant of the exported program")
    for value in weights_in(model):
        name = name_of(value)
        sources = tuple(source for source in _sources(value) if source in kinds)
        if leaves_open and (name in kinds or (sources and call_of(name) in _MOVING)):
            continue
        if leaves_open and sources and fill_value(value) != 0:
            why = f"computed from {some(sources)} by the exporter, and trains in its place"
            yield name, Origin(Kind.COMPUTED, why, certain=False, sources=sources)
            continue
        if name in kinds:
            yield name, _named(kinds[name])
            continue
        parameters = tuple(source for source in sources if kinds[source] is Kind.PARAMETER)
        layer = name.removesuffix("_bias")
        if kinds.get(layer) is Kind.PARAMETER:
            why = f"made by the exporter, which folded a BatchNormalization into {layer}"
            yield name, Origin(Kind.COMPUTED, why, certain=False, sources=(layer,))
        elif not parameters or _calls_of(value, kinds) & DETACHING:
            why = f"computed from {some(sources)}" if sources else "a constant of the exported program"
            yield name, Origin(Kind.CONSTANT, why, sources=sources)
        elif _is_moved(value, [placeholders[source] for source in parameters], kinds):
            others = [source for source in sources if kinds[source] is not Kind.PARAMETER]
            joined = f", joined with {some(others)}, which is no parameter" if others else ""
            why = f"{some(parameters)}, laid out anew by the exporter{joined}"
            yield name, Origin(Kind.PARAMETER, why, certain=not others, sources=parameters)
        else:
            present = any(name in model.graph.initializers for name in parameters)
            where = "beside it" if present else "in its place"
            why = f"computed from {some(parameters)} by the exporter, and trains {where}"
            yield name, Origin(Kind.COMPUTED, why, certain=False, sources=parameters)


def separate_parameters(model: ir.Model, specs: _Signature) -> dict[str, Origin]:
    """Separate weights that were merged into one initializer, and return their kinds by name.

    The call from which a node comes names the parameters that it reads. If an initializer is none of them, it replaces
    one of them that was merged with it or, if all are known, a constant with equal values. The exporter folded
    something into an initializer that no call names.
    """
    placeholders = {spec.target: name for name, spec in specs.items()}
    parted: dict[str, Origin] = {}
    copies: dict[tuple[ir.Value, str], ir.Value] = {}
    calls = _calls(model)
    named = {name for call in calls for name in _arguments(call)}
    for call, uses in calls.items():
        taken = [name for name in _arguments(call) if name in specs]
        names = {x: {name_of(x), *_sources(x)} for x, _, _ in uses}
        own = {x: {placeholders[n] for n in names[x] & placeholders.keys()} for x in names}
        left = [name for name in taken if not any(name in names for names in own.values())]
        for x, node, index in uses:
            if not taken or not own[x] & named or own[x] & set(taken) or (not left and fill_value(x) is None):
                continue
            name, origin = constant_copy_of(x), Origin(Kind.CONSTANT, f"a constant, merged with {x.name}")
            if left:
                ends = tuple(placeholder.rpartition("_")[2] for placeholder in own[x])
                spec = specs[next((name for name in left if name.endswith(ends)), left[0])]
                left = [placeholder for placeholder in left if specs[placeholder] != spec]
                name, origin = spec.target, _named(spec.kind, f", merged with {x.name}")
            copy = copies.get((x, name)) or duplicate(model, x, name)
            copies[x, name] = copy
            parted[name_of(copy)] = origin
            node.replace_input_with(index, copy)
    return parted


def invert(model: ir.Model, specs: _Signature) -> dict[str, Origin]:
    """Recompute values that the exporter computed from one parameter, and return the kinds of these parameters."""
    parameters = {spec.target for spec in specs.values() if spec.kind is Kind.PARAMETER}
    inverted: dict[str, Origin] = {}
    for value in weights_in(model):
        sources = _sources(value)
        paths = [source for source in sources if source in parameters]
        calls = [call_of(name) for name in (*sources, name_of(value)) if name not in paths]
        if len(paths) != 1 or not 0 < len(calls) <= 2 or not _INVERSES.keys() >= set(calls):
            continue
        numbers = array(value).astype(np.float64)
        with np.errstate(all="ignore"):
            for call in reversed(calls):
                numbers = _INVERSES[call](numbers)
        path = paths[0]
        existing = model.graph.initializers.get(path)
        other = numbers if existing is None else array(existing)
        if not np.isfinite(numbers).all() or not np.allclose(other, numbers, rtol=1e-4, atol=1e-5):
            continue
        last = existing or register(model, path, np.asarray(numbers, array(value).dtype))
        inverted[path] = _named(Kind.PARAMETER, f", from which {value.name} is computed again")
        for call in calls:
            last = initializers.prepend(model, value, call, call.capitalize(), [last])
        initializers.replace_by(model, value, last)
    return inverted


def restore_gathers(model: ir.Model, specs: _Signature) -> dict[str, Origin]:
    """Recompute gathers that the exporter folded from one parameter, and return the kinds of these parameters."""
    kinds = {spec.target: spec.kind for spec in specs.values()}
    restored: dict[str, Origin] = {}
    for value in weights_in(model):
        paths = [source for source in _sources(value) if kinds.get(source) is Kind.PARAMETER]
        calls = _calls_of(value, kinds) - {"val"}
        if len(paths) == 1 and calls & _REPEATING and gathers.undo(model, value, paths[0]):
            origin = _named(Kind.PARAMETER, f", whose rows {value.name} gathers")
            restored[paths[0]] = replace(origin, certain=calls <= _MOVING)
    return restored


def recompute(model: ir.Model, specs: _Signature) -> dict[str, Origin]:
    """Compute folded values again from their parameters, where numbers prove how, and return kinds of parameters.

    A value that holds the numbers of one parameter in another layout stands for a parameter that is not in the file.
    A parameter that is only in a joined value becomes an initializer.
    """
    kinds = {spec.target: spec.kind for spec in specs.values()}
    restored: dict[str, Origin] = {}
    standing = _standing(model, kinds)
    for value in weights_in(model):
        sources = [source for source in _sources(value) if source in kinds]
        present = {name: standing[name] for name in sources if standing.get(name, value) is not value}
        parameters = [x for source, x in present.items() if kinds[source] is Kind.PARAMETER]
        constants = [x for source, x in present.items() if kinds[source] is not Kind.PARAMETER]
        missing = [name for name in sources if kinds[name] is Kind.PARAMETER and name not in present]
        calls = _calls_of(value, kinds) - _MAKING
        detached = calls & DETACHING
        if not parameters or value in standing.values():
            continue
        if calls <= _MOVING:
            if len(sources) == 1 and not detached and ties.relation(parameters[0], value, transposed=True):
                continue  # tying computes it by simpler nodes
            rest = folds.move(model, value, [*parameters, *constants], missing, bool(detached))
            if rest is not None and missing:
                restored[name_of(rest)] = _named(Kind.PARAMETER, f", of which {value.name} was joined")
        elif not missing:
            functions = sorted(calls - (_MOVING - _TURNING))
            folds.compute(model, value, parameters, constants, functions, bool(detached))
    return restored


def _standing(model: ir.Model, kinds: Mapping[str, Kind]) -> dict[str, ir.Value]:
    """Return the initializer for each parameter or buffer: its own, or one with its numbers in another layout."""
    result: dict[str, ir.Value] = {}
    for value in weights_in(model):
        sources = [source for source in _sources(value) if source in kinds]
        calls = _calls_of(value, kinds)
        repeats = calls & _REPEATING and gathers.repeats(array(value))
        if len(sources) == 1 and calls <= _LAYOUT | {"val"} and not repeats:
            result.setdefault(sources[0], value)
    own = {name_of(x): x for x in weights_in(model) if name_of(x) in kinds}
    return result | own


def _calls_of(value: ir.Value, inputs: Collection[str]) -> set[str]:
    """Return the calls that made a folded value."""
    return {call_of(name) for name in (*_sources(value), name_of(value)) if name not in inputs}


def restore_biases(model: ir.Model, specs: _Signature) -> dict[str, Origin]:
    """Restore the biases that the exporter dropped because they start at zero, and return their kinds by name."""
    present = _names_present(model)
    restored: dict[str, Origin] = {}
    for node in model.graph.all_nodes():
        if node.op_type not in _BIASED or node.domain != "" or len(node.inputs) != 2:
            continue
        arguments = [specs[name] for name in _arguments(note_of(node, EXPORTED_CALL) or "") if name in specs]
        parameters = [spec.target for spec in arguments if spec.kind is Kind.PARAMETER]
        gone = [target for target in parameters if target not in present]
        shape, weight = node.outputs[0].shape, node.inputs[1]
        channels = None if shape is None or len(shape) < 2 else shape[1]
        if len(gone) != 1 or not gone[0].endswith("bias") or not isinstance(channels, int) or weight is None:
            continue
        existing = model.graph.initializers.get(gone[0])
        assert weight.dtype is not None
        bias = existing or register(model, gone[0], np.zeros(channels, weight.dtype.numpy()))
        node.resize_inputs(3)
        node.replace_input_with(2, bias)
        restored[gone[0]] = _named(Kind.PARAMETER, ", which the exporter dropped because it is zero")
    return restored


def parameters_left_out(model: ir.Model, specs: _Signature) -> list[str]:
    """Return the parameters that the file does not contain in any form.

    The exporter folds BatchNormalization into a convolution before it.
    """
    present = _names_present(model)
    taken = {name for call in _calls(model) for name in _arguments(call)}
    gone = {name: spec for name, spec in specs.items() if spec.target not in present}
    mean = ".running_mean"
    folded = {spec.target.removesuffix(mean) for spec in gone.values() if spec.target.endswith(mean)}
    return [
        spec.target
        for name, spec in gone.items()
        if spec.kind is Kind.PARAMETER and (name in taken or spec.target.rpartition(".")[0] in folded)
    ]


def _names_present(model: ir.Model) -> set[str]:
    """Return the names of the values in the file, and of those from which the exporter computed its values."""
    return {name for value in weights_in(model) for name in (name_of(value), *_sources(value))}


def _calls(model: ir.Model) -> dict[str, list[_Use]]:
    """Return the calls of the program from which nodes come, and the floating-point initializers that these read."""
    calls: dict[str, list[_Use]] = {}
    for node in model.graph.all_nodes():
        uses = [(x, node, i) for i, x in enumerate(node.inputs) if x is not None and is_weight(x)]
        if call := note_of(node, EXPORTED_CALL):
            calls.setdefault(call, []).extend(uses)
    return calls


def _arguments(call: str) -> list[str]:
    """Return the values that a call reads."""
    return re.findall(r"%(\w+)", call.partition("](args = ")[2])


def _is_moved(value: ir.Value, placeholders: Sequence[str], inputs: Collection[str]) -> bool:
    """Return whether a folded value contains numbers of parameters instead of others computed from them.

    Either calls read the parameters themselves, so that the exporter only changed the layout, or the folded calls only
    move numbers. Numbers must not repeat, because the gradients of repetitions belong to one number of a parameter.
    """
    folded = _calls_of(value, inputs) - {"val"}
    if folded & _REPEATING and gathers.repeats(array(value)):
        return False
    calls = [_arguments(note_of(node, EXPORTED_CALL) or "") for node in value.consumers()]
    if any(calls) and all(set(placeholders) <= set(arguments) for arguments in calls if arguments):
        return True
    return bool(folded) and folded <= _MOVING | {"arange"}  # which makes positions, not weights


def _sources(value: ir.Value) -> tuple[str, ...]:
    """Return the names from which the exporter computed a value."""
    try:
        names = ast.literal_eval(note_of(value, FOLDED_FROM) or "[]")
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _named(kind: Kind, more: str = "") -> Origin:
    return Origin(kind, f"a {kind.value} of the exported program{more}", named=True)

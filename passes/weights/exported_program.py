"""Read the records of PyTorch's exporter (`dynamo=True`).

Its metadata contains the signature of the exported program, for each folded value the names from which it was made,
and for each node the call of the program from which it comes.
"""

from __future__ import annotations

import ast
import functools
import re
from collections import defaultdict
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphopt.errors import some
from graphopt.graph.metadata import EXPORTED_CALL, EXPORTED_GRAPH, Text, all_of
from graphopt.graph.operators import CONVOLUTIONS
from graphopt.graph.origins import Evidence, Kind, Layout, Origin
from graphopt.graph.values import constant_copy_of, dtype_of, name_of, redirect
from passes.weights import evidence, folds
from passes.weights.initializers import array, fill_value, is_weight, literals_in, register, weights_in
from passes.weights.zeros import ZEROS_STAY

FOLDED_FROM = Text("pkg.onnxscript.optimizer.folded_from")
_KIND = Text("pkg.torch.export.graph_signature.InputSpec.kind")
_PLACEHOLDER = Text("pkg.torch.onnx.original_node_name")
# Of a node: the modules around it, from the outermost, and its call
_SCOPES = Text("pkg.torch.onnx.name_scopes")

_KINDS = {"PARAMETER": Kind.PARAMETER, "BUFFER": Kind.BUFFER, "CONSTANT_TENSOR": Kind.CONSTANT}

DETACHING = {"detach", "detach_"}
# Calls of ATen that only change the layout.
_LAYOUT = {
    *("alias", "clone", "contiguous", "lift_fresh_copy", "flatten", "reshape", "squeeze", "unflatten"),
    *("unsqueeze", "view", "_unsafe_view", "movedim", "permute", "t", "transpose"),
}
# Calls that the exporter drops where they change nothing, whatever else it drops.
_SAME = _LAYOUT | {"_to_copy", "to", "dropout", "alpha_dropout", "feature_dropout", "getitem", "sym_size_int"}
# Calls that take a part of the numbers.
_PART = {
    "chunk",
    "diagonal",
    "index_select",
    "narrow",
    "select",
    "slice",
    "split",
    "split_with_sizes",
    "unbind",
}
# Calls that only move numbers, or leave some out.
_MOVING = _LAYOUT | {
    *(*DETACHING, "to", "_to_copy", "cat", "stack", "expand", "repeat", "tile", "flip", "roll"),
    *("chunk", "diagonal", "embedding", "getitem", "index", "index_select", "narrow", "select", "slice"),
    *("split", "split_with_sizes", "unbind"),
}
# Calls that make numbers out of none.
_MAKING = {
    *("arange", "full", "full_like", "ones", "ones_like", "scalar_tensor", "scalar_tensor_default", "val"),
    *("zeros", "zeros_like"),
}
# Calls that make masks of zeros and ones, and those that put zeros in place of numbers.
_MASKING = {
    "eye",
    "ne",
    "gt",
    "ge",
    "lt",
    "le",
    "tril",
    "triu",
    "ones",
    "zeros",
    "ones_like",
    "lift_fresh_copy",
}
_CUTTING = {"masked_fill", "tril", "triu", "where"}
# The nodes inside of onnxscript's Softplus.
_SOFTPLUS = {"beta", "beta_0_cast", "beta_cast", "self_scaled", "threshold", "threshold_cast", "tmp"}
_TURNING = {"permute", "t", "transpose"}
# Calls in this list that may repeat numbers.
_REPEATING = {"embedding", "expand", "index", "index_select", "repeat", "tile"}
# Operators from which the exporter drops a bias of zeros.
_BIASED = CONVOLUTIONS | {"Gemm"}


@dataclass(frozen=True)
class Call:
    """Describe a call of the exported program: its name, its target and the names of what it reads."""

    name: str
    target: str
    arguments: tuple[str, ...]

    @staticmethod
    def of(node: ir.Node | None) -> Call | None:
        return _parsed("" if node is None else EXPORTED_CALL.read(node) or "")

    @property
    def detaches(self) -> bool:
        """Return whether the call returns its argument without a gradient."""
        return self.target.startswith(("torch.ops.aten.detach.", "torch.ops.aten.detach_."))


@functools.lru_cache(maxsize=4096)
def _parsed(text: str) -> Call | None:
    match = re.match(r"%(\w+) .*?\[target=([^\]]*)\](.*)", text, re.DOTALL)
    return match and Call(match[1], match[2], tuple(re.findall(r"%(\w+)", match[3])))


def call_of(name: str) -> str:
    return re.sub(r"_\d+$", "", name)


class ExportedProgram:
    """Read the exported program from the records in a model."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        inputs, _, outputs = (EXPORTED_GRAPH.read(model.graph) or "").partition("# outputs")
        records = re.findall(r"^(\w+): (\w+) target='([^']*)'", inputs, re.MULTILINE)
        targets = {target for _, _, target in records}
        for x in weights_in(model):
            if (name := name_of(x)) not in targets:
                records.append((_PLACEHOLDER.read(x) or name, _KIND.read(x), name))
        # Paths in the module of the parameters, buffers and constants, by their placeholders, and kinds by the paths.
        self.paths = {name: path for name, kind, path in records if kind in _KINDS}
        self.kinds = {path: _KINDS[kind] for _, kind, path in records if kind in _KINDS}
        self.placeholders = {path: name for name, path in self.paths.items()}
        self.inputs = re.findall(r"^(\w+): USER_INPUT", inputs, re.MULTILINE)
        self.outputs = re.findall(r"^(\w+): \w+", outputs, re.MULTILINE)

    def is_parameter(self, path: str) -> bool:
        return self.kinds.get(path) is Kind.PARAMETER

    def folded_from(self, value: ir.Value) -> tuple[str, ...]:
        """Return the names from which the exporter computed a value."""
        return _names_in(FOLDED_FROM.read(value))

    def sources(self, value: ir.Value) -> tuple[str, ...]:
        """Return the parameters, buffers and constants from which the exporter computed a value."""
        return tuple(name for name in self.folded_from(value) if name in self.kinds)

    def parameters_of(self, value: ir.Value) -> tuple[str, ...]:
        """Return the parameters from which the exporter computed a value."""
        return tuple(filter(self.is_parameter, self.folded_from(value)))

    def calls_of(self, value: ir.Value) -> list[str]:
        """Return the calls that made a folded value, in their order."""
        names = (*self.folded_from(value), name_of(value))
        return [call_of(name) for name in names if name not in self.kinds]

    def names(self) -> set[str]:
        """Return the names of the values in the file, and of those from which the exporter computed its values."""
        return {name for x in weights_in(self.model) for name in (name_of(x), *self.folded_from(x))}

    def known(self) -> set[str]:
        """Return the names of the values that the file has, and of what the program is given."""
        computed = {name_of(y) for node in self.model.graph.all_nodes() for y in node.outputs}
        return self.names() | computed | {*self.paths, *self.inputs}

    def is_merged(self, value: ir.Value) -> bool:
        """Return whether some calls read a value by its name, and others an equal one that the file lacks."""
        read = [call.arguments for node in value.consumers() if (call := Call.of(node))]
        own = {name_of(value), *(self.placeholders[path] for path in self.sources(value))}
        others = [names for names in read if own.isdisjoint(names)]
        return len(others) < len(read) and any(not self.known().issuperset(names) for names in others)

    def calls(self) -> list[tuple[Call, list[ir.Node]]]:
        groups: dict[tuple[ir.Graph | None, Call], list[ir.Node]] = defaultdict(list)
        for node in self.model.graph.all_nodes():
            if (call := Call.of(node)) is not None:
                groups[node.graph, call].append(node)
        return [(call, nodes) for (_, call), nodes in groups.items()]


def _names_in(text: str | None) -> tuple[str, ...]:
    """Return the names in a list that the exporter wrote as text."""
    try:
        names = ast.literal_eval(text or "[]")
    except (MemoryError, RecursionError, SyntaxError, ValueError):
        return ()
    return tuple(map(str, names)) if isinstance(names, list) else ()


def _scope(node: ir.Node) -> str:
    """Return the path of the module from which a node comes."""
    return "".join(_names_in(_SCOPES.read(node))[-2:-1])


def is_stripped(model: ir.Model) -> bool:
    """Return whether this exporter wrote a file from which another tool removed its records."""
    if model.producer_name != "pytorch" or EXPORTED_GRAPH.read(model.graph) is not None:
        return False
    if any((node.name or "").startswith("/") for node in model.graph):  # a scope of the TorchScript exporter
        return False
    return any(re.fullmatch(r"val_\d+", name_of(x)) for x in model.graph.initializers.values()) or any(
        re.match(r"node_\w+", node.name or "") for node in model.graph
    )


def restore_records(program: ExportedProgram) -> None:
    """Derive from which parameters values were folded, from the calls that read them, if another tool removed that."""
    weights = weights_in(program.model)
    if any(FOLDED_FROM.read(value) for value in weights):
        return
    folded = [x for x in weights if name_of(x) not in program.kinds and fill_value(x) is None]
    sources: dict[ir.Value, set[str]] = {}
    for x in folded:
        read = {name for user in x.consumers() if (call := Call.of(user)) for name in call.arguments}
        named = {path for name in read if program.is_parameter(path := program.paths.get(name, ""))}
        own = {y.name for user in x.consumers() for y in user.inputs if y is not None}
        sources[x] = (named - own) or named
    known = set(program.model.graph.initializers).union(*sources.values())
    missing = [path for path in program.kinds if program.is_parameter(path) and path not in known]
    for x in folded:
        if names := sorted(sources[x]) or (missing if len(x.shape or ()) else []):
            FOLDED_FROM.write(x, repr(names))


def program_origins(program: ExportedProgram) -> dict[str, Origin]:
    """Return the kind of each floating-point initializer and constant that the signature determines, by its name.

    Keras's variables are not parameters for PyTorch's exporter: their values are constants, as literals are. What
    nodes read that another tool added after the program, such as a head, is neither.
    """
    added = _added(program.model.graph)
    weights = [
        value
        for value in weights_in(program.model)
        if name_of(value) in program.kinds or program.sources(value) or not added & {*value.consumers()}
    ]
    if any(map(program.is_parameter, program.names())):
        constants = dict.fromkeys(literals_in(program.model), _constant(()))
        return constants | {name_of(value): _origin(program, value) for value in weights}
    origins: dict[str, Origin] = {}
    for value in weights:
        name, sources = name_of(value), program.sources(value)
        if name not in program.kinds and not (sources and call_of(name) in _MOVING):
            is_computed = bool(sources) and fill_value(value) != 0
            origins[name] = _computed(sources, "in its place") if is_computed else _constant(sources)
    return origins


def _added(graph: ir.Graph) -> set[ir.Node]:
    """Return the nodes without a record after which no node has one."""
    added: set[ir.Node] = set()
    for node in reversed(graph):
        if not all_of(node) and all(added.issuperset(y.consumers()) for y in node.outputs):
            added.add(node)
    return added


def _origin(program: ExportedProgram, value: ir.Value) -> Origin:
    """Return the kind of an initializer of a program whose parameters are known."""
    name, sources, parameters = name_of(value), program.sources(value), program.parameters_of(value)
    if name in program.kinds:
        return _named(program.kinds[name])
    layer = name.removesuffix("_bias")
    if program.is_parameter(layer):
        why = f"made by the exporter, which folded a BatchNormalization into {layer}"
        return Origin(Kind.COMPUTED, why, Evidence.RECORD, certain=False, sources=(layer,))
    if not parameters or not DETACHING.isdisjoint(program.calls_of(value)):
        return _constant(sources)
    if _is_moved(program, value):
        others = [source for source in sources if source not in parameters]
        joined = f", joined with {some(others)}, which is no parameter" if others else ""
        layout = _layout(program, value)
        why = f"{some(parameters)}, {layout.value} by the exporter{joined}"
        return Origin(Kind.PARAMETER, why, Evidence.RECORD, certain=not others, sources=parameters, layout=layout)
    present = not program.model.graph.initializers.keys().isdisjoint(parameters)
    return _computed(parameters, "beside it" if present else "in its place")


def _layout(program: ExportedProgram, value: ir.Value) -> Layout:
    """Return the layout of a folded value with the numbers of parameters: a matrix that no view changes is turned."""
    is_turned = array(value).ndim == 2 and _TURNING.issuperset({*program.calls_of(value)} - {"val"})
    return Layout.TRANSPOSED if is_turned else Layout.ANEW


def _named(kind: Kind, more: str = "") -> Origin:
    why = f"a {kind.value} of the exported program{more}"
    return Origin(kind, why, Evidence.RECORD, named=True)


def _computed(sources: tuple[str, ...], where: str) -> Origin:
    why = f"computed from {some(sources)} by the exporter, and trains {where}"
    return Origin(Kind.COMPUTED, why, Evidence.RECORD, certain=False, sources=sources)


def _constant(sources: tuple[str, ...]) -> Origin:
    why = f"computed from {some(sources)}" if sources else "a constant of the exported program"
    return Origin(Kind.CONSTANT, why, Evidence.RECORD, sources=sources)


def _is_moved(program: ExportedProgram, value: ir.Value) -> bool:
    """Return whether a folded value contains numbers of parameters instead of others computed from them.

    Either calls read the parameters themselves, so that the exporter only changed the layout, or the folded calls only
    move numbers. Numbers must not repeat, because the gradients of repetitions belong to one number of a parameter.
    """
    folded = set(program.calls_of(value)) - {"val"}
    if folded & _REPEATING and folds.repeats(array(value)):
        return False
    placeholders = {program.placeholders[path] for path in program.parameters_of(value)}
    read = [call.arguments for node in value.consumers() if (call := Call.of(node)) and call.arguments]
    if read and all(placeholders.issubset(arguments) for arguments in read):
        return True
    return bool(folded) and folded <= _MOVING | {"arange"}  # which makes positions, not weights


def separate_parameters(program: ExportedProgram) -> dict[str, Origin]:
    """Separate weights that were merged into one initializer, and return their kinds by name.

    The call from which a node comes names the parameters that it reads. If an initializer is none of them, it replaces
    one of them that was merged with it or, if all are known, a constant with equal values. The exporter folded
    something into an initializer that no call names.
    """
    parted: dict[str, Origin] = {}
    copies: dict[tuple[ir.Value, str], ir.Value] = {}
    calls = program.calls()
    named = {name for call, _ in calls for name in call.arguments}
    for call, nodes in calls:
        uses = [(x, node, i) for node in nodes for i, x in enumerate(node.inputs) if x and is_weight(x)]
        taken = [name for name in call.arguments if name in program.paths]
        paths = {x: {name_of(x), *program.sources(x)} & program.kinds.keys() for x, _, _ in uses}
        own = {x: {program.placeholders[path] for path in paths[x]} for x in paths}
        left = [name for name in taken if not any(name in names for names in own.values())]
        for x, node, index in uses:
            if not taken or not own[x] & named or own[x] & set(taken) or (not left and fill_value(x) is None):
                continue
            name, origin = constant_copy_of(x), Origin(Kind.CONSTANT, f"a constant, merged with {x.name}")
            if left:
                ends = tuple(placeholder.rpartition("_")[2] for placeholder in own[x])
                name = program.paths[next((name for name in left if name.endswith(ends)), left[0])]
                left = [placeholder for placeholder in left if program.paths[placeholder] != name]
                origin = _named(program.kinds[name], f", merged with {x.name}")
            if (x, name) not in copies:
                copies[x, name] = register(program.model, name, array(x).copy())
            parted[name_of(copies[x, name])] = origin
            node.replace_input_with(index, copies[x, name])
    return parted


def separate_layouts(program: ExportedProgram) -> dict[str, Origin]:
    """Separate values that the exporter folded from several parameters and merged, and return uncertain kinds by name.

    A call that reads a value `view_1` which the file lacks, by an initializer `view`, reads what was merged with it. If
    `view` comes from parameter `0.gamma` and its reader is in module `0`, then `view_1` comes from `1.gamma` if its
    reader is in module `1` and the file lacks that parameter. In one module, the parameters that the file lacks are
    taken in their order, which is uncertain. Each becomes an initializer with the record of what it was folded from.
    """
    edges: dict[ir.Value, dict[str, list[tuple[ir.Node, int]]]] = {}
    homes: dict[ir.Value, str] = {}
    present = program.known()
    for call, nodes in program.calls():
        uses = [(x, node, i) for node in nodes for i, x in enumerate(node.inputs) if x and is_weight(x)]
        absent = [name for name in call.arguments if name not in present]
        for x, node, index in uses:
            if not program.parameters_of(x) and not program.is_parameter(name_of(x)):
                continue
            own = name_of(x) if name_of(x) in call.arguments else program.placeholders.get(name_of(x), "")
            if own in call.arguments:
                homes.setdefault(x, _scope(node))
            elif len(merged := [name for name in absent if _is_like(name, x)]) == 1:
                edges.setdefault(x, {}).setdefault(merged[0], []).append((node, index))
    uncertain: dict[str, Origin] = {}
    for x, groups in edges.items():
        for name, uses_of_name in groups.items():
            sources = program.sources(x) or (name_of(x),)
            found = _sources_elsewhere(program, sources, homes.get(x), _scope(uses_of_name[0][0]))
            if found is None and not _PART.isdisjoint(program.calls_of(x)):
                why = f"a part of {some(sources)}, merged by the exporter with {name}, which may be another part"
                uncertain[name_of(x)] = Origin(Kind.PARAMETER, why, certain=False, sources=sources)
            if found is None:
                continue
            others, certain = found
            copy = register(program.model, name, array(x).copy())
            renamed = dict(zip(sources, others, strict=True))
            names = [renamed.get(source, source) for source in program.folded_from(x) or sources]
            FOLDED_FROM.write(copy, repr(names))
            redirect(uses_of_name, copy)
            if not certain:
                why = f"{some(others)} or another parameter, merged with {x.name} by the exporter"
                uncertain[name_of(copy)] = Origin(Kind.PARAMETER, why, certain=False, sources=others)
    return uncertain


def _is_like(name: str, x: ir.Value) -> bool:
    """Return whether a value of the program may be one that only has another layout than a parameter, as x is."""
    return call_of(name) == call_of(name_of(x)) or call_of(name) in _LAYOUT


def _sources_elsewhere(
    program: ExportedProgram, sources: tuple[str, ...], home: str | None, scope: str
) -> tuple[tuple[str, ...], bool] | None:
    """Return what a value in a module was folded from, and whether that is certain, if an equal one elsewhere is known.

    Args:
        sources: what the equal value was folded from.
        home: the path of the module that reads the equal value, if it is known.
        scope: the path of the module.
    """
    missing = [path for path in program.kinds if program.is_parameter(path) and path not in program.names()]
    parents = [source.rpartition(".")[0] for source in sources]
    start = parents[0] if home is None else home
    if scope != start:
        moved = tuple(_moved(source, start, scope) for source in sources)
        return (moved, True) if moved != sources and all(path in program.kinds for path in moved) else None
    others = [path for path in missing if path.rpartition(".")[0] == parents[0]]
    return ((others[0],), False) if len(sources) == 1 and others else None


def _moved(path: str, start: str, end: str) -> str:
    """Return a path in a module as the same path in another one."""
    inside = path.startswith(f"{start}.") if start else True
    return f"{end}.{path.removeprefix(f'{start}.') if start else path}".lstrip(".") if inside else path


def keep_zeros(program: ExportedProgram) -> None:
    """Mark values that the exporter multiplied by a mask, as of pruning, so that their zeros stay."""
    for value in weights_in(program.model):
        calls, sources = set(program.calls_of(value)), program.sources(value)
        masked = "mul" in calls and (len(program.parameters_of(value)) < len(sources) or calls & _MASKING)
        if program.parameters_of(value) and (masked or calls & _CUTTING) and evidence.is_masked(array(value)):
            ZEROS_STAY.set(value)


def invert(program: ExportedProgram) -> dict[str, Origin]:
    """Recompute values that the exporter computed from one parameter, and return the kinds of these parameters."""
    inverted: dict[str, Origin] = {}
    for value in weights_in(program.model):
        paths, calls = program.parameters_of(value), _functions(program, value)
        masked = ZEROS_STAY.is_set(value) and calls[-1:] == ["mul"]
        if masked:
            calls = [call for call in calls[:-1] if call not in _MAKING | _MASKING]
        if len(paths) != 1 or (len(program.sources(value)) > 1 and not masked) or program.is_merged(value):
            continue
        if folds.compute_by_inverse(program.model, value, paths[0], calls, masked):
            origin = _named(Kind.PARAMETER, f", from which {value.name} is computed again")
            inverted[paths[0]] = replace(origin, certain=not masked, named=not masked)
    return inverted


def _functions(program: ExportedProgram, value: ir.Value) -> list[str]:
    """Return the calls that made a folded value, the last one last; the nodes of onnxscript's Softplus are one."""
    calls = program.calls_of(value)
    if "self_scaled" not in calls:
        return calls if set(calls) <= _MAKING | _MASKING | folds.FUNCTIONS | {"mul"} else []
    # Beside them, its product has a name `softplus_2`, and the call `softplus` if it is not the value itself.
    outer = [call for call in calls if call not in _SOFTPLUS]
    last, times = outer[-1], outer.count("softplus")
    rest = [call for call in outer[:-1] if call != "softplus"]
    return [*rest, *["softplus"] * (times - 1 - (last == "softplus")), last] if times == 2 else []


def restore_gathers(program: ExportedProgram) -> dict[str, Origin]:
    """Recompute gathers that the exporter folded from one parameter, and return the kinds of these parameters."""
    restored: dict[str, Origin] = {}
    for value in weights_in(program.model):
        paths, calls = program.parameters_of(value), set(program.calls_of(value)) - {"val"}
        if len(paths) == 1 and calls & _REPEATING and folds.gather_rows(program.model, value, paths[0]):
            origin = _named(Kind.PARAMETER, f", whose rows {value.name} gathers")
            restored[paths[0]] = replace(origin, certain=calls <= _MOVING)
    return restored


def recompute(program: ExportedProgram) -> dict[str, Origin]:
    """Compute folded values again from their parameters, where numbers prove how, and return kinds of parameters.

    A value that holds the numbers of one parameter in another layout stands for a parameter that is not in the file.
    A parameter that is only in a joined value becomes an initializer.
    """
    restored: dict[str, Origin] = {}
    standing = _standing(program)
    for value in weights_in(program.model):
        sources = program.sources(value)
        present = [source for source in sources if standing.get(source, value) is not value]
        parameters = [standing[source] for source in present if program.is_parameter(source)]
        constants = [standing[source] for source in present if not program.is_parameter(source)]
        missing = [path for path in program.parameters_of(value) if path not in present]
        calls = set(program.calls_of(value)) - _MAKING
        detached = bool(calls & DETACHING)
        if not parameters or value in standing.values():
            continue
        if calls <= _MOVING:
            if len(sources) == 1 and not detached and folds.relation(parameters[0], value, transposed=True):
                continue  # tying computes it by simpler nodes
            rest = folds.move(program.model, value, [*parameters, *constants], missing, detached)
            if rest is not None and missing:
                restored[name_of(rest)] = _named(Kind.PARAMETER, f", of which {value.name} was joined")
        elif not missing and not program.is_merged(value):
            functions = sorted(calls - (_MOVING - _TURNING))
            folds.compute(program.model, value, parameters, constants, functions, detached)
    return restored


def _standing(program: ExportedProgram) -> dict[str, ir.Value]:
    """Return the initializer for each parameter or buffer: its own, or one with its numbers in another layout."""
    result: dict[str, ir.Value] = {}
    weights = weights_in(program.model)
    for value in weights:
        sources = program.sources(value)
        if len(sources) == 1 and _LAYOUT.issuperset({*program.calls_of(value)} - {"val"}):
            result.setdefault(sources[0], value)
    return result | {name_of(x): x for x in weights if name_of(x) in program.kinds}


def restore_biases(program: ExportedProgram) -> dict[str, Origin]:
    """Restore the biases that the exporter dropped because they start at zero, and return their kinds by name."""
    model, present = program.model, program.names()
    restored: dict[str, Origin] = {}
    for node in model.graph.all_nodes():
        call = Call.of(node)
        if node.op_type not in _BIASED or node.domain != "" or len(node.inputs) != 2 or call is None:
            continue
        paths = [program.paths[name] for name in call.arguments if name in program.paths]
        gone = [path for path in paths if program.is_parameter(path) and path not in present]
        shape, weight = node.outputs[0].shape, node.inputs[1]
        channels = None if shape is None or len(shape) < 2 else shape[1]
        if len(gone) != 1 or not gone[0].endswith("bias") or not isinstance(channels, int) or weight is None:
            continue
        zeros = np.zeros(channels, dtype_of(weight).numpy())
        bias = model.graph.initializers.get(gone[0]) or register(model, gone[0], zeros)
        node.resize_inputs(3)
        node.replace_input_with(2, bias)
        restored[gone[0]] = _named(Kind.PARAMETER, ", which the exporter dropped because it is zero")
    return restored


def parameters_left_out(program: ExportedProgram) -> list[str]:
    """Return the parameters that the file does not contain in any form.

    They are those of a BatchNormalization in a convolution, those from which a bias was computed that starts at
    zero and that the exporter dropped, and a module's own ones, such as a scale of 1, whose calls it dropped because
    they change nothing yet or equal others: a call reads a value that the file lacks.
    """
    present = program.names()
    taken = {name for call, _ in program.calls() for name in call.arguments}
    known = program.known() | {call.name for call, _ in program.calls()}
    lacks = any(call_of(name) not in _SAME | _MAKING for name in taken - known)
    gone = {name: path for name, path in program.paths.items() if path not in present}
    mean = ".running_mean"
    folded = {path.removesuffix(mean) for path in gone.values() if path.endswith(mean)} | _without_bias(program)
    return [
        path
        for name, path in gone.items()
        if program.is_parameter(path)
        and (
            name in taken
            or path.rpartition(".")[0] in folded
            or (lacks and path.rpartition(".")[2] not in ("bias", "weight"))  # of layers, which may be tied
        )
    ]


def _without_bias(program: ExportedProgram) -> set[str]:
    """Return the modules in which a product lacks the bias that its call computes from something."""
    nodes = program.model.graph.all_nodes()
    known = {name_of(y) for node in nodes for y in node.outputs} | program.names()
    known |= {*program.paths, *program.inputs, *(call.name for call, _ in program.calls())}
    return {
        _scope(node)
        for call, own in program.calls()
        for node in own
        if node.op_type in _BIASED and len(node.inputs) == 2 and not known.issuperset(call.arguments)
    }

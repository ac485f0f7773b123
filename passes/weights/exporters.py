"""Read what exporters write down about initializers: which are parameters, and which were merged or folded.

PyTorch's exporter (`dynamo=True`) keeps the signature of the exported program in the graph's metadata, the names that
a folded value was made from beside that value, and the call of the program that a node comes from beside the node.
PyTorch's older exporter names parameters and buffers by their path in the module, what it folds of them
`onnx::MatMul_12`, and keeps literals as Constant nodes.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir

from graphopt.origins import Kind, Origin
from passes.weights import ties

_SIGNATURE = "pkg.torch.export.ExportedProgram.graph_signature"
_KIND = "pkg.torch.export.graph_signature.InputSpec.kind"
_CALL = "pkg.torch.onnx.fx_node"
_FOLDED_FROM = "pkg.onnxscript.optimizer.folded_from"

_KINDS = {"PARAMETER": Kind.PARAMETER, "BUFFER": Kind.BUFFER, "CONSTANT_TENSOR": Kind.CONSTANT}

# Calls of ATen that move numbers and compute none, by the names of their results.
_MOVING = frozenset(
    [
        "alias",
        "cat",
        "chunk",
        "clone",
        "contiguous",
        "detach",
        "diagonal",
        "expand",
        "flatten",
        "flip",
        "getitem",
        "index",
        "index_select",
        "lift_fresh_copy",
        "movedim",
        "narrow",
        "permute",
        "pixel_shuffle",
        "repeat",
        "reshape",
        "roll",
        "select",
        "slice",
        "split",
        "split_with_sizes",
        "squeeze",
        "stack",
        "t",
        "tile",
        "to",
        "_to_copy",
        "transpose",
        "unbind",
        "unflatten",
        "unsqueeze",
        "view",
        "_unsafe_view",
    ]
)
# Names of buffers in PyTorch's own modules and in the usual libraries.
_BUFFERS = frozenset(
    [
        "anchors",
        "attn_mask",
        "attention_mask",
        "causal_mask",
        "cos",
        "cos_cached",
        "embed_scale",
        "final_logits_bias",
        "freqs",
        "inv_freq",
        "mask",
        "num_batches_tracked",
        "original_inv_freq",
        "pe",
        "position_ids",
        "position_table",
        "relative_coords_table",
        "relative_position_index",
        "running_mean",
        "running_var",
        "sin",
        "sin_cached",
    ]
)


@dataclass(frozen=True)
class _Spec:
    """An input of an exported program: a parameter or buffer, and its path in the module."""

    kind: Kind
    target: str


def read(model: ir.Model) -> dict[str, Origin]:
    """Return what the exporter says of the floating initializers and constants of a model, by name."""
    signature = _signature(model)
    if signature:
        return dict(_read_exported_program(model, signature))
    if model.producer_name == "pytorch":
        return dict(_read_torchscript(model))
    if (model.producer_name or "").startswith("tf2onnx"):
        return dict(_read_tensorflow(model))
    return {}


def part(model: ir.Model) -> dict[str, Origin]:
    """Give weights that PyTorch's exporters merged, as their first values were equal, an initializer each again.

    Returns:
        What the new initializers are, by name.
    """
    signature = _signature(model)
    if signature:
        return _part_exported_program(model, signature)
    return _part_aliases(model) if model.producer_name == "pytorch" else {}


def _signature(model: ir.Model) -> dict[str, _Spec]:
    """Return the parameters and buffers of the program that PyTorch exported, by their placeholders."""
    text = model.graph.metadata_props.get(_SIGNATURE, "")
    found = re.findall(r"^(\w+): (\w+) target='([^']*)'", text, re.MULTILINE)
    specs = {
        placeholder: _Spec(_KINDS[kind], target) for placeholder, kind, target in found if kind in _KINDS
    }
    for value in model.graph.initializers.values():
        kind = value.metadata_props.get(_KIND)
        if kind in _KINDS and not any(spec.target == value.name for spec in specs.values()):
            placeholder = value.metadata_props.get("pkg.torch.onnx.original_node_name", str(value.name))
            specs[placeholder] = _Spec(_KINDS[kind], str(value.name))
    return specs


def _sources(value: ir.Value) -> tuple[str, ...]:
    """Return the names of what the exporter computed a value from."""
    try:
        names = ast.literal_eval(value.metadata_props.get(_FOLDED_FROM, "[]"))
    except (SyntaxError, ValueError):
        return ()
    return tuple(str(name) for name in names) if isinstance(names, list) else ()


def _read_exported_program(model: ir.Model, signature: Mapping[str, _Spec]) -> Iterator[tuple[str, Origin]]:
    kinds = {spec.target: spec.kind for spec in signature.values()}
    placeholders = {spec.target: placeholder for placeholder, spec in signature.items()}
    for value in _floating_initializers(model):
        name = str(value.name)
        if name in kinds:
            kind = kinds[name]
            yield name, Origin(kind, f"a {kind.value} of the exported program", named=True)
            continue
        sources = tuple(source for source in _sources(value) if source in kinds)
        parameters = tuple(source for source in sources if kinds[source] is Kind.PARAMETER)
        if not parameters:
            why = f"computed from {_some(sources)}" if sources else "a constant of the exported program"
            yield name, Origin(Kind.CONSTANT, why, sources=sources)
        elif _is_moved(value, [placeholders[source] for source in parameters]):
            why = f"{_some(parameters)}, laid out anew by the exporter"
            yield name, Origin(Kind.PARAMETER, why, sources=parameters)
        else:
            why = f"computed from {_some(parameters)} by the exporter, and trains in its place"
            yield name, Origin(Kind.COMPUTED, why, certain=False, sources=parameters)


def _is_moved(value: ir.Value, placeholders: Sequence[str]) -> bool:
    """Tell whether a folded value holds the numbers of parameters, and not others computed from them.

    It does where calls take the parameters themselves, of which the exporter has then changed the layout alone, and
    where the folded call is named for a movement of numbers.
    """
    calls = [_arguments(node) for node, _ in value.uses()]
    if any(calls) and all(set(placeholders) <= set(arguments) for arguments in calls if arguments):
        return True
    return re.sub(r"_\d+$", "", str(value.name)) in _MOVING


def _arguments(node: ir.Node) -> list[str]:
    """Return the values that the call of the exported program takes that a node comes from."""
    _, _, arguments = node.metadata_props.get(_CALL, "").partition("](args = ")
    return re.findall(r"%(\w+)", arguments)


def _part_exported_program(model: ir.Model, signature: Mapping[str, _Spec]) -> dict[str, Origin]:
    """Part what was merged by the calls that nodes come from: they name the parameters that they take."""
    placeholders = {spec.target: placeholder for placeholder, spec in signature.items()}
    calls: dict[str, list[tuple[ir.Value, ir.Node, int]]] = {}
    for node in model.graph.all_nodes():
        call = node.metadata_props.get(_CALL)
        uses = [
            (x, node, i) for i, x in enumerate(node.inputs) if x is not None and _is_floating_initializer(x)
        ]
        if call and uses:
            calls.setdefault(call, []).extend(uses)
    parted: dict[str, Origin] = {}
    copies: dict[tuple[ir.Value, str], ir.Value] = {}
    for uses in calls.values():
        taken = [name for name in _arguments(uses[0][1]) if name in signature]
        own = {x: {placeholders.get(name, "") for name in (str(x.name), *_sources(x))} for x, _, _ in uses}
        left = [name for name in taken if not any(name in names for names in own.values())]
        for x, node, index in uses:
            if not taken or own[x].intersection(taken) or own[x] == {""}:
                continue
            spec = signature[_closest(left, x, own[x])] if left else None
            if spec is not None and _closest(left, x, own[x]) in left:
                left.remove(_closest(left, x, own[x]))
            origin = (
                Origin(Kind.CONSTANT, "a constant, merged with a weight of equal values")
                if spec is None
                else Origin(
                    spec.kind,
                    f"a {spec.kind.value} of the exported program, merged with {x.name}",
                    named=True,
                )
            )
            if spec is None and not _is_uniform(x):
                continue
            name = spec.target if spec is not None else f"{x.name}.constant"
            copy = copies.get((x, name)) or ties.duplicate(model, x, name)
            copies[x, name] = copy
            parted[str(copy.name)] = origin
            node.replace_input_with(index, copy)
    return parted


def _closest(left: Sequence[str], x: ir.Value, own: set[str]) -> str:
    """Return the placeholder that ends as that of `x` does, or the first."""
    ends = tuple(name.rpartition("_")[2] for name in own if name)
    return next((name for name in left if name.endswith(ends)), left[0])


def _part_aliases(model: ir.Model) -> dict[str, Origin]:
    """Part what PyTorch's older exporter merged: it left an Identity that bears the other name."""
    parted: dict[str, Origin] = {}
    for node in list(model.graph):
        x, y = (node.inputs[0], node.outputs[0]) if node.op_type == "Identity" else (None, None)
        if x is None or y is None or not _is_floating_initializer(x) or y.is_graph_output():
            continue
        name = str(y.name)
        y.name = f"{name}/alias"
        copy = ties.duplicate(model, x, name)
        ir.convenience.replace_all_uses_with(y, copy)
        model.graph.remove(node, safe=True)
        parted[str(copy.name)] = replace(_by_path(str(copy.name)), named=True)
    return parted


def _read_torchscript(model: ir.Model) -> Iterator[tuple[str, Origin]]:
    for value in _floating_initializers(model):
        yield str(value.name), _by_path(str(value.name), [str(node.name) for node in value.consumers()])
    for node in model.graph.all_nodes():
        if node.op_type == "Constant" and node.domain == "":
            yield str(node.outputs[0].name), Origin(Kind.CONSTANT, "a literal of the exported program")


def _by_path(name: str) -> Origin:
    """Return what the name tells that PyTorch's older exporter gave an initializer."""
    if name.startswith("onnx::") or name.isdigit():
        return Origin(
            Kind.PARAMETER, "folded by the exporter from a parameter", certain=False, by_exporter=True
        )
    if name.rpartition(".")[2] in _BUFFERS:
        return Origin(Kind.BUFFER, "its name is one that buffers have", certain=False, named=True)
    return Origin(
        Kind.PARAMETER, "an attribute of the exported module", certain=False, named=True, by_exporter=True
    )


def _read_tensorflow(model: ir.Model) -> Iterator[tuple[str, Origin]]:
    for value in _floating_initializers(model):
        if "ReadVariableOp" in str(value.name):
            yield str(value.name), Origin(Kind.PARAMETER, "a variable of the exported program", named=True)


def _floating_initializers(model: ir.Model) -> list[ir.Value]:
    return [
        value
        for graph in model.graphs()
        for value in graph.initializers.values()
        if _is_floating_initializer(value)
    ]


def _is_floating_initializer(x: ir.Value) -> bool:
    tensor = x.const_value if x.is_initializer() and not x.is_graph_input() else None
    return tensor is not None and tensor.dtype.is_floating_point()


def _is_uniform(x: ir.Value) -> bool:
    """Tell whether a value holds one number alone."""
    assert x.const_value is not None
    array = x.const_value.numpy()
    return array.size > 0 and bool(np.all(array == array.flat[0]))


def _some(names: Sequence[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} more" if len(names) > 3 else "")

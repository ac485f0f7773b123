"""Read the records of PyTorch's older exporter (`dynamo=False`).

It names parameters and buffers by their path in the module, and folded values `onnx::MatMul_12`. Where it merges two
equal values, it leaves an Identity with the other name. Literals are Constant nodes. A node is named after its module.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

import onnx_ir as ir

from graphopt.graph.metadata import Kind, Origin
from graphopt.graph.operators import LITERALS, MATRIX_PRODUCTS, RECURRENT
from passes.weights import gathers
from passes.weights.initializers import duplicate, floating, is_weight

# Names of buffers in PyTorch's modules and in common libraries.
_BUFFERS = {
    *("anchors", "attention_mask", "attn_mask", "causal_mask", "mask"),
    *("cos", "cos_cached", "sin", "sin_cached", "freqs", "frequencies", "inv_freq", "original_inv_freq"),
    *("pe", "position_ids", "position_table", "relative_coords_table", "relative_position_index"),
    *("running_mean", "running_var", "num_batches_tracked", "embed_scale", "final_logits_bias"),
}
# Operators that read a folded value of which the exporter only changed the layout: a transpose, a new axis.
_READERS = MATRIX_PRODUCTS | RECURRENT | {"Add", "Concat", "Div", "Expand", "Gather", "Mul", "Sub"}


def read(model: ir.Model) -> Iterator[tuple[str, Origin]]:
    """Yield name and kind of each floating-point initializer and constant."""
    for value in floating(model):
        yield str(value.name), _origin(str(value.name), value.consumers())
    for node in model.graph.all_nodes():
        if node.op_type in LITERALS and node.domain == "":
            yield str(node.outputs[0].name), Origin(Kind.CONSTANT, "a literal of the exported program")


def read_buffers(model: ir.Model) -> Iterator[tuple[str, Origin]]:
    """Yield name and kind of each initializer whose name is one that buffers have."""
    for value in floating(model):
        if str(value.name).rpartition(".")[2] in _BUFFERS:
            yield str(value.name), _origin(str(value.name), value.consumers())


def separate_merged(model: ir.Model) -> dict[str, Origin]:
    """Separate weights that were merged into one initializer, and return their kinds by name.

    A folded value that one module reads at several places stays one initializer.
    """
    parted: dict[str, Origin] = {}
    modules = {path.rpartition(".")[0] for path in map(str, model.graph.initializers)}
    for node in [node for node in model.graph if node.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or not is_weight(x) or y.is_graph_output():
            continue
        name, readers = str(y.name), list(y.consumers())
        own = [reader for reader in x.consumers() if reader.op_type != "Identity"]
        y.name = f"{name}/alias"
        copy = x
        if not (_is_folded(name) and _modules(own, modules) & _modules(readers, modules)):
            copy = duplicate(model, x, name)
            parted[str(copy.name)] = _origin(name, readers, named=True)
        ir.convenience.replace_all_uses_with(y, copy)
        model.graph.remove(node, safe=True)
    return parted


def restore_rows(model: ir.Model) -> dict[str, Origin]:
    """Recompute gathers and sums that the exporter folded, as for biases of relative positions; return the kinds."""
    restored: dict[str, Origin] = {}
    for value in floating(model):
        name, readers = str(value.name), list(value.consumers())
        added = bool(readers) and all(reader.op_type == "Add" for reader in readers)
        if added and _is_folded(name) and len(value.shape or ()) > 2:
            table = gathers.undo(model, value, f"{name}.table")
            if table is not None:
                of = f" of {module}" if (module := _module(readers[0])) else ""
                why = f"rows of a parameter{of}, which {name} gathers"
                restored[str(table.name)] = Origin(Kind.PARAMETER, why, certain=False, by_exporter=True)
    return restored


def _origin(name: str, readers: Iterable[ir.Node], named: bool = False) -> Origin:
    """Return the kind of an initializer from its name and the nodes that read it."""
    if name.rpartition("/")[2].startswith("Constant_"):  # in a file that a runtime has rewritten
        return Origin(Kind.CONSTANT, "a literal of the exported program")
    if _is_folded(name):
        readers = list(readers)
        of = f" of {module}" if (module := next(map(_module, readers), "")) else ""
        if all(reader.op_type in _READERS for reader in readers):
            why = f"folded by the exporter from a parameter{of}"
            return Origin(Kind.PARAMETER, why, certain=False, named=named, by_exporter=True)
        why = f"computed by the exporter from parameters{of}, as of a weight norm or BatchNormalization, in whose place"
        return Origin(Kind.COMPUTED, f"{why} it trains", certain=False, named=named, by_exporter=True)
    if name.rpartition(".")[2] in _BUFFERS:
        return Origin(Kind.BUFFER, "its name is one that buffers have", certain=False, named=True)
    why = "an attribute of the exported module"
    return Origin(Kind.PARAMETER, why, certain=False, named=True, by_exporter=True)


def _is_folded(name: str) -> bool:
    return name.startswith(("onnx::", "/")) or name.isdigit()


def _module(node: ir.Node) -> str:
    """Return the path of the module from which a node comes."""
    return (node.name or "").rpartition("/")[0][1:].replace("/", ".")


def _modules(nodes: Iterable[ir.Node], known: set[str]) -> set[str]:
    """Return the modules from which nodes come. Further calls of a module, and non-modules, have a numeric suffix."""
    paths = map(_module, nodes)
    return {path if path in known else re.sub(r"_\d+(?=\.|$)", "", path) for path in paths}

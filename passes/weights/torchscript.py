"""Read the records of PyTorch's older exporter (`dynamo=False`).

It names parameters and buffers by their path in the module, and folded values `onnx::MatMul_12`. Where it merges two
equal values, it leaves an Identity with the other name. Literals are Constant nodes. A node is named after its module.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import ZEROS_STAY, Kind, Origin
from graphopt.graph.operators import ARITHMETIC, RECURRENT
from graphopt.graph.values import name_of
from passes.weights import evidence, folds, zeros
from passes.weights.initializers import array, is_weight, register, weights_in

# Names of buffers in PyTorch's modules and in common libraries, without a prefix such as `pixel_` or `anchor_`.
_BUFFERS = {
    *("alibi", "anchor", "anchors", "default_boxes", "dboxes", "grid", "grids", "prior_boxes", "priors"),
    *("slopes", "stride", "strides", "attention_mask", "attn_mask", "causal_mask", "mask", "masks", "tril"),
    *("triu", "cos", "cos_cached", "sin", "sin_cached", "freqs", "frequencies", "inv_freq"),
    *("pe", "position_ids", "position_table", "relative_coords_table", "relative_position_index"),
    *("running_mean", "running_var", "running_std", "num_batches_tracked", "embed_scale"),
    *("final_logits_bias", "mean", "means", "std", "stds", "ema", "embed_avg", "cluster_size"),
    *("alphas_cumprod", "betas", "filt", "mel_basis", "window"),
}
_PREFIXES = ("running_", "num_batches", "alphas_cumprod", "ema_", "gaussian_", "posterior_", "sqrt_")
# Operators that read a folded value of which the exporter only changed the layout: a transpose, a new axis.
_READERS = RECURRENT | {"Add", "Concat", "Div", "Expand", "Gather", "MatMul", "Mul", "PRelu", "Sub"}
_READERS_OF_LITERALS = ARITHMETIC | {"Clip", "Concat", "Where"}


def separate_merged(model: ir.Model) -> dict[str, Origin]:
    """Separate weights that were merged into one initializer, and return their kinds by name.

    A folded value that one module reads at several places stays one initializer.
    """
    parted: dict[str, Origin] = {}
    modules = {path.rpartition(".")[0] for path in map(str, model.graph.initializers)}
    taken = set(ir.convenience.create_value_mapping(model.graph))
    for node in [node for node in model.graph if node.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or not is_weight(x) or y.is_graph_output():
            continue
        name, y.name = name_of(y), f"{y.name}/alias"
        taken.discard(name)
        taken.add(name_of(y))
        own = [reader for reader in x.consumers() if reader.op_type != "Identity"]
        is_one = is_generated(name) and _modules(own, modules) & _modules(y.consumers(), modules)
        copy = x if is_one else register(model, name, array(x).copy(), taken)
        taken.add(name_of(copy))
        ir.convenience.replace_all_uses_with(y, copy)
        model.graph.remove(node, safe=True)
        if not is_one:
            parted[name_of(copy)] = replace(origin_of(copy, model), named=True)
    return parted


def restore_rows(model: ir.Model) -> dict[str, Origin]:
    """Recompute gathers and sums that the exporter folded, as for biases of relative positions; return the kinds."""
    restored: dict[str, Origin] = {}
    for value in weights_in(model):
        name, readers = name_of(value), list(value.consumers())
        added = bool(readers) and all(reader.op_type == "Add" for reader in readers)
        if not (added and is_generated(name)) or len(value.shape or ()) < 3 or evidence.constant_value(value):
            continue
        if (table := folds.gather_rows(model, value, f"{name}.table")) is not None:
            why = f"rows of a parameter{_of(readers[0])}, which {name} gathers"
            restored[name_of(table)] = Origin(Kind.PARAMETER, why, certain=False, by_exporter=True)
    return restored


def keep_zeros(model: ir.Model) -> dict[str, Origin]:
    """Mark folded weights with zeros, as those of pruning, so that their zeros stay; return the kinds."""
    restored: dict[str, Origin] = {}
    for value in weights_in(model):
        name = name_of(value)
        if is_generated(name) and zeros.is_factor(value) and evidence.is_sparse(array(value)):
            ZEROS_STAY.set(value)
            why = f"computed by the exporter from parameters{_of(next(iter(value.consumers())))}"
            restored[name] = Origin(Kind.COMPUTED, why, certain=False, by_exporter=True)
    return restored


def origin_of(value: ir.Value, model: ir.Model) -> Origin:
    """Return the kind of an initializer from its name, its size and the nodes that read it."""
    name, known = name_of(value), model.graph.initializers
    if name.rpartition("/")[2].startswith("Constant_"):  # in a file that a runtime has rewritten
        return Origin(Kind.CONSTANT, "a literal of the exported program")
    pair = [known.get(f"{name[:-1]}{letter}") for letter in "uv"]
    if name.endswith(("_u", "_v")) and all(x is not None and array(x).ndim == 1 for x in pair):
        why = "a singular vector, which spectral normalization estimates"
        return Origin(Kind.BUFFER, why, certain=False, named=True)
    if is_generated(name):
        return _folded(value, known)
    if is_buffer(name):
        return Origin(Kind.BUFFER, "its name is one that buffers have", certain=False, named=True)
    why = "an attribute of the exported module"
    return Origin(Kind.PARAMETER, why, certain=False, named=True, by_exporter=True)


def _folded(value: ir.Value, known: Collection[str]) -> Origin:
    """Return the kind of a value that the exporter computed."""
    readers = value.consumers()
    of = next(map(_of, readers), "")
    reads_literals = all(reader.op_type in _READERS_OF_LITERALS for reader in readers)
    if array(value).size == 1 and reads_literals and not _is_bias(value, readers):
        return Origin(Kind.CONSTANT, "one number, taken for a literal", certain=evidence.is_short(value))
    numbers = array(value)
    is_table = numbers.size >= 16 and 1 < len(np.unique(numbers)) <= numbers.size / 4
    if is_table and all(reader.op_type in ARITHMETIC for reader in readers):
        return Origin(Kind.CONSTANT, "a table of a few numbers, such as sizes of boxes", certain=False)
    products = [reader for reader in readers if reader.op_type == "MatMul"]
    if all(reader.op_type in _READERS for reader in readers) and all(_is_linear(x, known) for x in products):
        why = f"folded by the exporter from a parameter{of}"
        return Origin(Kind.PARAMETER, why, certain=False, by_exporter=True)
    why = f"computed by the exporter from parameters{of}, as of a weight norm or BatchNormalization, in whose place"
    return Origin(Kind.COMPUTED, f"{why} it trains", certain=False, by_exporter=True)


def _is_bias(value: ir.Value, readers: Sequence[ir.Node]) -> bool:
    """Return whether a value of rank 1 is added to nothing but products of matrices. Literals have rank 0."""
    others = [x for reader in readers for x in reader.inputs if x is not None and x is not value]
    adds = all(reader.op_type == "Add" for reader in readers)
    return array(value).ndim == 1 and adds and all(map(_is_product, others))


def _is_product(x: ir.Value) -> bool:
    node = x.producer()
    while node is not None and node.op_type == "Cast" and node.inputs[0] is not None:
        node = node.inputs[0].producer()
    return node is not None and node.op_type == "MatMul"


def _is_linear(product: ir.Node, known: Collection[str]) -> bool:
    """Return whether a product is that of a Linear layer, whose weight is missing because it was transposed."""
    module = module_path(product)
    layers = [module] if module else []
    for reader in product.outputs[0].consumers():
        names = [name_of(x) for x in reader.inputs if x]
        layers += [name.removesuffix(".bias") for name in names if name.endswith(".bias")]
    return any(f"{layer}.weight" not in known for layer in layers)


def is_buffer(name: str) -> bool:
    """Return whether the last part of a name is that of a buffer, with or without a word before it."""
    leaf = name.rpartition(".")[2]
    words = leaf.split("_")
    return any("_".join(words[i:]) in _BUFFERS for i in range(len(words))) or leaf.startswith(_PREFIXES)


def is_generated(name: str) -> bool:
    """Return whether the exporter made up a name, as it does for the values that it computes."""
    return name.startswith(("onnx::", "/")) or name.isdigit()


def _of(node: ir.Node) -> str:
    module = module_path(node)
    return f" of {module}" if module else ""


def module_path(node: ir.Node) -> str:
    """Return the path of the module from which a node comes.

    A Sequential is a scope of its own, whose children repeat its name: `/layer/layer.0/Gemm`. So do the children of a
    ModuleList of the same name in a module `layer`, which names of other parameters tell.
    """
    path: list[str] = []
    for scope in (node.name or "").split("/")[1:-1]:
        is_child = bool(path) and scope.startswith(f"{path[-1]}.") and scope.rpartition(".")[2].isdigit()
        if is_child and not _is_known(node, ".".join([*path, scope])):
            path.pop()
        path.append(scope)
    return ".".join(path)


def _is_known(node: ir.Node, path: str) -> bool:
    """Return whether a parameter has a path."""
    names = getattr(node.graph, "initializers", ())
    return any(name.startswith(f"{path}.") for name in names)


def weight_of(node: ir.Node, index: int, bias: ir.Value | None) -> str:
    """Return the name of the parameter that input `index` of a node was folded from, or "".

    The name of a bias tells it more reliably than the scope. A recurrence has a node for each layer.
    """
    path, own = module_path(node), "" if bias is None else name_of(bias)
    if node.op_type in RECURRENT:
        layer = re.search(r"_(\d+)$", node.name or "")
        end = f"weight_{'ih' if index == 1 else 'hh'}_l{layer[1] if layer else 0}"
        return f"{path}.{end}" if path else ""
    if bias is None or is_generated(own) or any(module_path(reader) != path for reader in bias.consumers()):
        own = ""
    for end, weight in ((".bias", ".weight"), (".in_proj_bias", ".in_proj_weight")):
        if own.endswith(end):
            return f"{own.removesuffix(end)}{weight}"
    return f"{path}.weight" if path else ""


def _modules(nodes: Iterable[ir.Node], known: set[str]) -> set[str]:
    """Return the modules from which nodes come. Further calls of a module, and non-modules, have a numeric suffix."""
    paths = map(module_path, nodes)
    return {path if path in known else re.sub(r"_\d+(?=\.|$)", "", path) for path in paths}

"""Read the records of PyTorch's older exporter (`dynamo=False`).

It names parameters and buffers by their path in the module, and folded values `onnx::MatMul_12`. Where it merges two
equal values, it leaves an Identity with the other name. Literals are Constant nodes. A node is named after its module.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import replace

import numpy as np
import onnx_ir as ir

from graphopt.errors import some
from graphopt.graph.operators import ARITHMETIC, CONVOLUTIONS, RECURRENT
from graphopt.graph.origins import Evidence, Kind, Layout, Origin
from graphopt.graph.values import name_of
from passes.weights import evidence, folds, zeros
from passes.weights.initializers import array, is_weight, register, weights_in
from passes.weights.zeros import ZEROS_STAY

# Names of parameters in PyTorch's modules, after the path of the module.
_PARAMETERS = re.compile(
    r"weight|bias|in_proj_(weight|bias)|[qkv]_proj_weight|bias_[kv]|original\d*"
    r"|(weight|bias)_(g|v|orig|(ih|hh|hr)(_l\d+)?(_reverse)?)"
)
# Names that only buffers have, in PyTorch's modules and in common libraries, whose numbers may look like a weight's.
_STATE = {
    *(
        "running_mean",
        "running_var",
        "running_std",
        "num_batches_tracked",
        "ema",
        "embed_avg",
        "cluster_size",
    ),
    *("relative_coords_table", "relative_position_index", "final_logits_bias", "embed_scale"),
    *("cos_cached", "sin_cached", "alibi"),
}
_STATE_PREFIXES = ("running_", "num_batches", "alphas_cumprod", "ema_")
# Names that buffers often have and parameters sometimes, with or without a word before, such as `pixel_` or `anchor_`.
_BUFFERS = {
    *("anchor", "anchors", "grid", "grids", "slopes", "stride", "strides", "mask", "masks", "tril", "triu"),
    *("position_ids", "default_boxes", "prior_boxes", "priors", "dboxes"),
    *("cos", "sin", "freq", "freqs", "frequencies", "pe", "position_table"),
    *("mean", "means", "std", "stds", "betas", "filt", "mel_basis", "window"),
}
_PREFIXES = ("gaussian_", "posterior_", "sqrt_")
_BY_ONNXSIM = re.compile(r"_v_\d+")  # the names of what it computes
_LEARNED = {"log", "learned", "learnable", "trainable"}  # words before which such a name is a parameter's
_STATISTICS = ("mean", "std", "var")
_WRITTEN_OUT = "weight or bias of a normalization that the module computes itself; a frozen one has it as a buffer"
# Operators that read a folded value of which the exporter only changed the layout: a transpose, a new axis.
_READERS = RECURRENT | {"Add", "Concat", "Div", "Expand", "Gather", "MatMul", "Mul", "PRelu", "Sub"}
_READERS_OF_LITERALS = ARITHMETIC | {"Clip", "Concat", "Where"}
_OF_LINEAR = {"Add", "Gemm", "MatMul"}
# Operators that a layer may have beside its own.
_BESIDE = {"Cast", "Constant", "ConstantOfShape", "Identity", "Pad", "Shape", "Transpose"}


class ExportedModule:
    """Read the paths of modules from the names of initializers and nodes."""

    def __init__(self, model: ir.Model) -> None:
        self.model = model
        self.known = model.graph.initializers
        merged = [y for node in model.graph if node.op_type == "Identity" for y in node.outputs]
        names = [name_of(x) for x in (*self.known.values(), *merged)]
        self._parents = {name[:end] for name in names for end, letter in enumerate(name) if letter == "."}
        self._operators: dict[str, set[str]] = defaultdict(set)
        for node in model.graph.all_nodes():
            if node.op_type not in _BESIDE:
                self._operators[self.path(node)].add(node.op_type)
        types = [x.const_value.dtype for x in self.known.values() if x.const_value is not None and is_weight(x)]
        self.is_narrow = all(dtype.bitwidth < 32 for dtype in types)

    def path(self, x: ir.Node | ir.Value) -> str:
        """Return the path of the module from which a node comes, or a value that is named after one.

        A Sequential is a scope of its own, whose children repeat its name: `/layer/layer.0/Gemm`. So do the children
        of a ModuleList of the same name in a module `layer`, which names of other parameters tell. In further calls of
        a module, scopes end in a number: `/layer/layer.0_1/Gemm`.
        """
        path: list[str] = []
        for scope in (x.name or "").split("/")[1:-1]:
            first = re.sub(r"_\d+$", "", scope)
            is_numbered = re.search(r"\.\d+$", first) is not None
            if is_numbered or (self._has([*path, first]) and not self._has([*path, scope])):
                scope = first
            is_child = bool(path) and scope.startswith(f"{path[-1]}.") and scope.rpartition(".")[2].isdigit()
            if is_child and not self._has([*path, scope]):
                path.pop()
            path.append(scope)
        return ".".join(path)

    def _has(self, path: Sequence[str]) -> bool:
        return ".".join(path) in self._parents

    def paths(self, nodes: Iterable[ir.Node]) -> set[str]:
        """Return the modules from which nodes may come. In further calls, one without a name has a number, too."""
        found = set(map(self.path, nodes))
        return found | {re.sub(r"_\d+(?=\.|$)", "", path) for path in found - self._parents}

    def sources(self, value: ir.Value) -> tuple[tuple[str, ...], Layout]:
        """Return the paths of the parameters that a folded value was made from, and how it stores their numbers.

        The name of a bias that is added to a product tells the weight. Otherwise, the scope of a node does, if it has
        the operators of a layer and no others. What has its own name in the file was not folded.
        """
        for node, index in value.uses():
            paths, layout = self._read(node, index)
            if paths and self.known.keys().isdisjoint(paths):
                return paths, layout
        module = self.path(value)
        is_linear = self._operators[module] <= _OF_LINEAR and f"{module}.weight" not in self.known
        if is_linear and re.fullmatch(r"/.+/Transpose_output_0", name_of(value)):
            return (f"{module}.weight",), Layout.TRANSPOSED  # by a tool that folded what the exporter had not
        return (), Layout.SAME

    def _read(self, node: ir.Node, index: int) -> tuple[tuple[str, ...], Layout]:
        """Return the paths of what a node reads, if it is that of a layer, and the layout."""
        path = self.path(node)
        if node.op_type == "MatMul" and index == 1:
            return self._of_product(node), Layout.TRANSPOSED
        if not path or index == 0:
            return (), Layout.SAME
        if node.op_type in RECURRENT:
            layer = re.search(r"_(\d+)$", node.name or "")
            both = node.attributes.get_string("direction", "forward") == "bidirectional"
            kinds = {1: ("weight_ih",), 2: ("weight_hh",), 3: ("bias_ih", "bias_hh")}.get(index, ())
            ends = ("", "_reverse") if both else ("",)
            number = layer[1] if layer else 0
            return tuple(f"{path}.{kind}_l{number}{end}" for end in ends for kind in kinds), Layout.ANEW
        operators = self._operators[path]
        if operators == {"InstanceNormalization", "Mul", "Add", "Reshape"} and node.op_type in ("Mul", "Add"):
            return (f"{path}.{'weight' if node.op_type == 'Mul' else 'bias'}",), Layout.ANEW
        if operators == {"PRelu"}:
            return (f"{path}.weight",), Layout.ANEW
        if len(operators) == 1 and node.op_type in CONVOLUTIONS | {"Gemm"}:
            return (f"{path}.{'weight' if index == 1 else 'bias'}",), Layout.SAME
        return (), Layout.SAME

    def _of_product(self, product: ir.Node) -> tuple[str, ...]:
        """Return the path of the weight of a Linear layer, or of a projection in a MultiheadAttention."""
        path = self.path(product)
        adds = [reader for reader in product.outputs[0].consumers() if reader.op_type == "Add"]
        for bias in [name_of(x) for add in adds for x in add.inputs if x is not None and is_weight(x)]:
            for end, weight in ((".bias", ".weight"), (".in_proj_bias", ".in_proj_weight")):
                if bias.endswith(end) and not is_generated(bias):
                    return (f"{bias.removesuffix(end)}{weight}",)
        return (f"{path}.weight",) if path and self._operators[path] <= _OF_LINEAR else ()


def separate_merged(module: ExportedModule) -> dict[str, Origin]:
    """Separate weights that were merged into one initializer, and return their kinds by name.

    A folded value that one module reads at several places stays one initializer.
    """
    parted: dict[str, Origin] = {}
    model = module.model
    taken = set(ir.convenience.create_value_mapping(model.graph))
    for node in [node for node in model.graph if node.op_type == "Identity"]:
        x, y = node.inputs[0], node.outputs[0]
        if x is None or not is_weight(x) or y.is_graph_output():
            continue
        name, y.name = name_of(y), f"{y.name}/alias"
        taken.discard(name)
        taken.add(name_of(y))
        own = [reader for reader in x.consumers() if reader.op_type != "Identity"]
        is_one = is_generated(name) and module.paths(own) & module.paths(y.consumers())
        copy = x if is_one else register(model, name, array(x).copy(), taken)
        taken.add(name_of(copy))
        ir.convenience.replace_all_uses_with(y, copy)
        model.graph.remove(node, safe=True)
        if not is_one and (origin := origin_of(copy, module)) is not None:
            parted[name_of(copy)] = replace(origin, named=True)
    return parted


def restore_rows(module: ExportedModule) -> dict[str, Origin]:
    """Recompute gathers and sums that the exporter folded, as for biases of relative positions; return the kinds."""
    restored: dict[str, Origin] = {}
    model = module.model
    for value in weights_in(model):
        name, readers = name_of(value), list(value.consumers())
        added = bool(readers) and all(reader.op_type == "Add" for reader in readers)
        if not (added and is_generated(name)) or len(value.shape or ()) < 3 or evidence.constant_value(value):
            continue
        if (table := folds.gather_rows(model, value, f"{name}.table")) is not None:
            why = f"rows of a parameter{_of(module, readers[:1])}, which {name} gathers"
            restored[name_of(table)] = Origin(Kind.PARAMETER, why, certain=False, by_exporter=True)
    return restored


def keep_zeros(module: ExportedModule) -> dict[str, Origin]:
    """Mark folded weights with zeros, as those of pruning, so that their zeros stay; return the kinds."""
    restored: dict[str, Origin] = {}
    model = module.model
    for value in weights_in(model):
        name = name_of(value)
        if is_generated(name) and zeros.is_factor(value) and evidence.is_masked(array(value)):
            ZEROS_STAY.set(value)
            why = f"computed by the exporter from parameters{_of(module, value.consumers()[:1])}"
            restored[name] = Origin(Kind.COMPUTED, why, certain=False, by_exporter=True)
    return restored


def origin_of(value: ir.Value, module: ExportedModule) -> Origin | None:
    """Return the kind of an initializer from its name, its numbers and the nodes that read it.

    None stands for an initializer that another tool added, with the nodes that read it.
    """
    name, known = name_of(value), module.known
    leaf = name.rpartition(".")[2]
    if name.rpartition("/")[2].startswith("Constant_"):  # in a file that a runtime has rewritten
        return Origin(Kind.CONSTANT, "a literal of the exported program", Evidence.NAME)
    pair = [known.get(f"{name[:-1]}{letter}") for letter in "uv"]
    if name.endswith(("_u", "_v")) and all(x is not None and array(x).ndim == 1 for x in pair):
        why = "a singular vector, which spectral normalization estimates"
        return Origin(Kind.BUFFER, why, Evidence.NAME, certain=False, named=True)
    if is_generated(name):
        return _folded(value, module)
    parameter = Origin(Kind.PARAMETER, "a parameter by its name", Evidence.NAME, named=True, by_exporter=True)
    if _PARAMETERS.fullmatch(leaf):
        beside = f"{name.removesuffix(leaf)}running_var" in known
        is_norm = all(node.op_type == "BatchNormalization" for node in value.consumers())
        if beside and not is_norm:
            return replace(parameter, certain=False, why=_WRITTEN_OUT)
        return parameter
    if not any(map(_is_named, value.consumers())) and any(map(_is_named, module.model.graph)):
        return None
    if is_buffer(name):
        return _buffer(value, known)
    why = "an attribute of the exported module, a parameter or a buffer"
    return replace(parameter, why=why, certain=False)


def _is_named(node: ir.Node) -> bool:
    return bool(re.match(r"/|[A-Z]\w*_\d+$", node.name or ""))


def _buffer(value: ir.Value, known: Collection[str]) -> Origin:
    """Return the kind of an initializer whose name is one that buffers have."""
    origin = Origin(Kind.BUFFER, "its name is one that buffers have", Evidence.NAME, certain=False, named=True)
    leaf = name_of(value).rpartition(".")[2].strip("_")
    # A statistic shifts or divides, and what multiplies alone may be a weight.
    is_state = not leaf.startswith("running_") or any(x.op_type != "Mul" for x in value.consumers())
    is_state = is_state and leaf.startswith(_STATE_PREFIXES)
    if leaf in _STATE or is_state or any(leaf.endswith(f"_{x}") for x in _STATE):
        return origin
    if _has_statistics(name_of(value), known):
        return replace(origin, why=f"{origin.why}, beside that of another statistic")
    if evidence.constant_value(value) or evidence.is_regular(array(value)):
        return replace(origin, why=f"{origin.why}, and its numbers are regular")
    why = "its numbers are those of a weight, though its name is one that buffers have"
    return replace(origin, kind=Kind.PARAMETER, why=why, by_exporter=True)


def _has_statistics(name: str, known: Collection[str]) -> bool:
    """Return whether a name is that of a mean or a deviation, and a module has both."""
    path, _, leaf = name.rpartition(".")
    words = [word for word in _STATISTICS if word in leaf]
    others = (leaf.replace(word, other) for word in words for other in _STATISTICS if other != word)
    return any((f"{path}.{other}" if path else other) in known for other in others)


def _folded(value: ir.Value, module: ExportedModule) -> Origin:
    """Return the kind of a value that the exporter computed, and from which parameters, if its readers tell."""
    readers, numbers = value.consumers(), array(value)
    of = _of(module, readers)
    reads_literals = all(reader.op_type in _READERS_OF_LITERALS for reader in readers)
    if numbers.size == 1 and reads_literals and not _is_bias(value, readers):
        return Origin(Kind.CONSTANT, "one number, taken for a literal", certain=evidence.is_short(value))
    is_table = numbers.size >= 16 and 1 < len(np.unique(numbers)) <= numbers.size / 4
    if is_table and all(reader.op_type in ARITHMETIC for reader in readers):
        return Origin(Kind.CONSTANT, "a table of a few numbers, such as sizes of boxes", certain=False)
    sources, layout = module.sources(value)
    path = "" if sources else _first(module, readers) or module.path(value)
    origin = Origin(Kind.PARAMETER, "", certain=False, by_exporter=True, sources=sources, module=path, layout=layout)
    if sources and layout is not Layout.SAME:
        why = f"{some(sources)}, {layout.value} by the exporter"
        if numbers.dtype.itemsize < 4 and not module.is_narrow:
            return replace(origin, why=f"{why} and rounded to {numbers.dtype}, as parameters are in autocast")
        return replace(origin, why=why, evidence=Evidence.NAME, certain=True)
    products = [reader for reader in readers if reader.op_type == "MatMul"]
    if all(reader.op_type in _READERS for reader in readers) and not products:
        return replace(origin, why=f"folded by the exporter from a parameter{of}")
    why = f"computed by the exporter from parameters{of}, as of a weight norm or BatchNormalization, in whose place"
    return replace(origin, kind=Kind.COMPUTED, why=f"{why} it trains")


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


def is_buffer(name: str) -> bool:
    """Return whether the last part of a name is that of a buffer, with or without a word before it."""
    leaf = name.rpartition(".")[2].strip("_")
    words = leaf.split("_")
    if leaf in _STATE or leaf.startswith((*_STATE_PREFIXES, *_PREFIXES)):
        return True
    ends = ("_".join(words[i:]) for i in range(len(words)))
    return _LEARNED.isdisjoint(words) and any(end in _STATE | _BUFFERS for end in ends)


def is_generated(name: str) -> bool:
    """Return whether the exporter made up a name, as it does for the values that it computes."""
    return name.startswith(("onnx::", "/")) or name.isdigit() or bool(_BY_ONNXSIM.fullmatch(name))


def _of(module: ExportedModule, nodes: Iterable[ir.Node]) -> str:
    path = _first(module, nodes)
    return f" of {path}" if path else ""


def _first(module: ExportedModule, nodes: Iterable[ir.Node]) -> str:
    return next((path for node in nodes if (path := module.path(node))), "")

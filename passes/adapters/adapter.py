"""Add trainable terms to the outputs of products whose weights stay as they are."""

from __future__ import annotations

import math
import warnings
import zlib
from abc import abstractmethod
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, final

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common

from graphopt.adapters.targets import AdapterTarget, note_of, targets_in
from graphopt.errors import GraphoptError, nearest, some
from graphopt.graph.authored import ask, floating, name_of_method, told
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.merging import adapted, register_merge
from graphopt.graph.metadata import copy, original_name
from graphopt.graph.operators import VIEWS
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.postprocessing import DEQUANTIZE
from graphopt.graph.rewriting import Pass, Pattern, matches
from graphopt.graph.roles import Role, check_inference, role_of
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.values import dims_of, dtype_of, like, name_of, redirect
from graphopt.intervals import within
from passes.parameters import ADAPTER, origin_in_file
from passes.weights.initializers import register

_PRODUCTS = {"Conv", "ConvTranspose", "Einsum", "Gemm", "MatMul"}
_SELECTING = {"Cast", DEQUANTIZE, "Gather", "GatherElements", "GatherND", "Slice", "Split", "Transpose"}
_CHOOSING = {"ArgMax", "TopK"}  # what routers of experts end in

_Parts = tuple[str, ...] | list[str] | Mapping[str, int] | None


@dataclass(frozen=True)
class Adapter(Pass):
    """Add a term with few weights of its own to the output of each matching product, and train these weights alone.

    This is the base class of adapters. It finds the places, adds the weights, named `NAME.SUFFIX` after the weight
    NAME, and adds the term. A subclass implements `initial`, `delta` and `merge`. Every other weight is frozen, unless
    `parameters.unfreeze` names it. `executor.trained()` merges the term into the weights of the original model, by the
    class with which the graph was compiled. In another program, it is found by its module and its name.

    Adapters change the weights of MatMul, Gemm, MatMulNBits, MoE, QMoE, Conv, ConvTranspose, Gather, RNN, LSTM and GRU,
    and of the operators that `passes.weight_kind` registers. All nodes that read one weight share an adapter.

    Args:
        pattern: shell-style patterns of names of weights, one or several: names of initializers, and of the parameters
            from which the exporter made them. By default, as "all-linear" in PEFT, all except embeddings, the weight
            of the last product before an output, those that choose among stacked experts, and weights that the adapter
            does not fit. A warning tells the share of what no adapter can change.
        leave_out: patterns of weights to leave as they are.
        parts: the parts of the outputs of a packed projection, which get an adapter each: their names, for parts of one
            size, or their sizes by name. Parts whose names begin with `_` get none.
        seed: the seed of the initial weights.

    Raises:
        GraphoptError: a pattern matches no weight that an adapter can change, nodes read a weight in different ways,
            or an option does not fit a weight.

    >>> class Scaling(passes.Adapter):
    ...     def initial(self, target, generator):
    ...         return {"scaling": numpy.ones(target.outputs)}
    ...     def delta(self, op, target, x, scaling):
    ...         return target.product(op) * target.spread(op, scaling - 1)
    ...     @staticmethod
    ...     def merge(w, scale, scaling):
    ...         return w * scaling
    >>> steps = {"adapter": Scaling("layers.0.*"), "loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3, hidden=[8]), **steps))
    >>> list(executor.parameters)
    ['layers.0.weight.scaling']
    """

    pattern: Pattern = None
    leave_out: Pattern = field(default=None, kw_only=True)
    parts: _Parts = field(default=None, kw_only=True)
    seed: int = within("[0, inf)", 0, kw_only=True)

    def __init_subclass__(cls) -> None:
        super().__init_subclass__()
        register_merge(cls, cls.merge)

    @abstractmethod
    def initial(self, target: AdapterTarget, generator: np.random.Generator) -> dict[str, np.ndarray]:
        """Return the initial values of the weights to add for a target, by the suffixes of their names."""

    @abstractmethod
    def delta(self, op: Emitter, target: AdapterTarget, x: ir.Value, *values: ir.Value) -> ir.Value:
        """Emit the term to add to a target's output.

        Args:
            op: the emitter.
            target: the place, which multiplies by values as by its weight.
            x: what the target's weight is multiplied by.
            values: the values of `initial`, in their order.
        """

    @staticmethod
    @abstractmethod
    def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
        """Return a weight, as matrices [..., inputs, outputs], that computes the output with the term.

        Args:
            w: the weight of the original model.
            scale: the factor in the adapter's note.
            values: the values of `initial`, in their order, as matrices.
        """

    def fits(self, target: AdapterTarget) -> bool:
        """Return whether a target is adapted without a pattern."""
        return True

    def check(self, target: AdapterTarget) -> None:
        """Raise an error if the options do not fit a target."""

    def noted(self, target: AdapterTarget) -> dict[str, Any]:
        """Return further fields of the adapter's note."""
        return {}

    def requires(self, model: ir.Model) -> None:
        check_inference(model, type(self).__name__)

    @final
    def rewrite(self, model: ir.Model) -> None:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        ensure_typed(model)
        for targets in self._chosen(model):
            self._adapt(model, targets)

    def _chosen(self, model: ir.Model) -> Iterable[list[AdapterTarget]]:
        """Return the targets of each weight to adapt."""
        groups: dict[ir.Value, list[AdapterTarget]] = {}
        for target in targets_in(model):
            weight = target.source.weight
            trains = target.source.quantized or origin_in_file(weight).trains
            if not ADAPTER.is_set(weight) and (trains or self._names(weight)):
                groups.setdefault(weight, []).append(target)
        left = [] if self.pattern else [*_last_products(model, groups), *_routers(model, groups), *_embeddings(groups)]
        named = {
            weight: targets
            for weight, targets in groups.items()
            if not any(target.matches(self.leave_out) for target in targets)
            and (any(target.matches(self.pattern) for target in targets) if self.pattern else weight not in left)
        }
        chosen = {weight: targets for weight, targets in named.items() if self.pattern or self.fits(targets[0])}
        for name in ("pattern", "leave_out"):
            self._check_pattern(name, model, groups)
        if not chosen:
            for first, *_ in named.values():
                self.check(first)  # why it does not fit
            raise GraphoptError(
                f"{type(self).__name__}: expected weights to adapt, found none: name them by pattern; the model has: "
                f"{some([targets[0].name for targets in groups.values()]) or 'none that an adapter can change'}"
            )
        for weight, targets in chosen.items():
            _check_alike(weight, targets)
            self.check(targets[0])
            self._check_norms(model, targets[0])
        if not self.pattern and self.leave_out is None:
            _tell_share(model, chosen, [*left, *named])
        return chosen.values()

    def _check_norms(self, model: ir.Model, target: AdapterTarget) -> None:
        """Raise an error if DoRA has changed outputs that this adapter changes, too.

        A later adapter is nearer to the product, but the norms of DoRA are those of the weight of the file.
        """
        weight, everything = original_name(target.source.weight), (0, math.inf)
        own = [columns or everything for name, columns in self._columns(target) if not name.startswith("_")]
        for note in adapted(model):
            first, last = note.columns or everything
            has_norms = note.weight == weight and note.adapter == "LoRA" and len(note.values) == 3
            if has_norms and any(start < last and first < end for start, end in own):
                raise GraphoptError(
                    f"{type(self).__name__}: weight {target.name!r}: expected DoRA as the last adapter of a "
                    f"weight, found one after {note.values[2]!r}: give DoRA last, or merge it first, by "
                    "executor.trained()"
                )

    def _names(self, weight: ir.Value) -> bool:
        """Return whether the pattern names a weight itself, without wildcards."""
        patterns = [self.pattern] if isinstance(self.pattern, str) else self.pattern or []
        return name_of(weight) in patterns

    def _check_pattern(self, field_name: str, model: ir.Model, groups: Mapping[ir.Value, list[AdapterTarget]]) -> None:
        """Raise an error if one of the patterns of a field matches no weight that an adapter can change."""
        given = getattr(self, field_name)
        if given is not None and not given and not isinstance(given, str):
            raise GraphoptError(
                f"{type(self).__name__}: {field_name}={given!r}: expected names of weights, found none: leave it out"
            )
        for pattern in [given] if isinstance(given, str) else given or []:
            found = [target for targets in groups.values() for target in targets]
            if any(target.matches(pattern) for target in found):
                continue
            names = [*dict.fromkeys(target.name for target in found)]
            near = nearest(pattern.strip("*"), names)
            other = next((x for x in model.graph.initializers.values() if matches(x.name, pattern)), None)
            readers = "" if other is None else ", ".join(sorted({user.op_type for user in other.consumers()}))
            named = f"{other.name!r}, which {readers or 'nothing'} reads" if other is not None else "none"
            raise GraphoptError(
                f"{type(self).__name__}: {field_name}={pattern!r}: expected the name of a weight that an adapter can "
                f"change, found {named}"
                + (f": did you mean {near!r}?" if near else "")
                + f"; the model has: {some(names) or 'none'}"
            )

    def _adapt(self, model: ir.Model, targets: Sequence[AdapterTarget]) -> None:
        """Add the adapters of a weight, and their terms wherever a node reads it."""
        parts = [(name, columns) for name, columns in self._columns(targets[0]) if not name.startswith("_")]
        added = {name: self._values(model, replace(targets[0], columns=columns), name) for name, columns in parts}
        with Emitter(model) as op:
            for target in targets:
                uses, terms, whole = target.uses, [], target.laid_out(op)
                for name, columns in self._columns(target):
                    own = replace(whole, columns=columns)
                    is_left = name not in added
                    values = [] if is_left else _laid_out(op, target, added[name])
                    terms.append(_zeros(op, own) if is_left else _term(self, op, own, values))
                term = terms[0] if len(terms) == 1 else op.Concat(*terms, axis=whole.axis)
                changed = op.Add(target.y, target.given_back(op, term))
                _place(model, target, like(changed, target.y), uses)

    def _columns(self, target: AdapterTarget) -> list[tuple[str, tuple[int, int] | None]]:
        """Return the parts of a target's outputs, by name."""
        if not self.parts:
            return [("", None)]
        _, outputs = target.sizes
        sizes = self.parts
        if not isinstance(sizes, Mapping):
            sizes = {name if name != "_" else f"_{i}": outputs // len(sizes) for i, name in enumerate(sizes)}
        wrong = next((x for x in sizes.values() if not isinstance(x, int) or isinstance(x, bool) or x < 1), None)
        if wrong is not None:
            raise GraphoptError(
                f"{type(self).__name__}: parts={self.parts!r}: expected numbers of outputs, found {wrong!r}"
            )
        if sum(sizes.values()) != outputs or (target.kind, target.axis) != ("product", -1):
            raise GraphoptError(
                f"{type(self).__name__}: parts={self.parts!r}: expected parts of the {outputs} outputs of a product by "
                f"{target.name!r}, found {sum(sizes.values())} of a {target.kind}: name the packed projections "
                "by pattern"
            )
        ends = np.cumsum([*sizes.values()]).tolist()
        return [(name, (end - size, end)) for (name, size), end in zip(sizes.items(), ends, strict=True)]

    def _values(self, model: ir.Model, target: AdapterTarget, part: str) -> list[ir.Value]:
        """Add the weights of an adapter, with their notes."""
        stem = f"{target.name}.{part}" if part else target.name
        generator = np.random.default_rng([self.seed, zlib.crc32(stem.encode())])
        arrays = _initial(self, target, generator)
        values_by_name = ir.convenience.create_value_mapping(model.graph)
        taken = {*values_by_name, *map(original_name, values_by_name.values())}
        names = (stem if not i else f"{stem}.{i}" for i in range(len(taken) + 1))
        stem = next(name for name in names if not any(f"{name}.{suffix}" in taken for suffix in arrays))
        dtype = dtype_of(target.y)
        values = []
        for suffix, array in arrays.items():
            value = register(model, f"{stem}.{suffix}", array.astype(dtype.numpy()))
            ADAPTER.set(value)
            Origin(Kind.PARAMETER, f"of an adapter of {target.source.weight.name}", named=True).write(value)
            values.append(value)
        names_of_values = tuple(map(name_of, values))
        name = register_merge(type(self), self.merge)
        note = note_of(target, name, names_of_values, **self.noted(target))
        place = sum(other.weight == note.weight for other in adapted(model))
        replace(note, part=part, place=place).write(values[0])
        return values


def _initial(adapter: Adapter, target: AdapterTarget, generator: np.random.Generator) -> Mapping[str, np.ndarray]:
    """Return the initial values that `initial` has returned."""
    found, where = ask(adapter, "initial", target, generator), name_of_method(adapter, "initial")
    due = "arrays of floating-point numbers by the suffixes of their names, at least one"
    if not isinstance(found, Mapping) or not found:
        raise GraphoptError(f"{where}: expected {due}, found {told(found)}")
    for suffix, array in found.items():
        if not isinstance(suffix, str) or not isinstance(array, np.ndarray) or array.dtype.kind != "f":
            raise GraphoptError(f"{where}: expected {due}, found {told(array)} for {suffix!r}")
    return found


def _term(adapter: Adapter, op: Emitter, target: AdapterTarget, values: Sequence[ir.Value]) -> ir.Value:
    """Return the term that `delta` has returned."""
    found = ask(adapter, "delta", op, target, target.x, *values)
    return floating(found, name_of_method(adapter, "delta"), "the term to add to the output of the target")


def _laid_out(op: Emitter, target: AdapterTarget, values: Sequence[ir.Value]) -> Sequence[ir.Value]:
    """Emit the values of filters that an adapter changes themselves as matrices."""
    is_own = target.is_weight_itself and target.reading.is_filters
    return [target.matrix(op, x, up=i > 0) for i, x in enumerate(values)] if is_own else values


def _zeros(op: Emitter, target: AdapterTarget) -> ir.Value:
    """Emit zeros for the outputs of a part without an adapter."""
    shape = op.Concat(op.shape_of(target.y, 0, -1), [target.outputs], axis=0)
    return op.ConstantOfShape(shape, value=ir.tensor([0], dtype=dtype_of(target.y)))


def _place(model: ir.Model, target: AdapterTarget, changed: ir.Value, uses: Sequence[tuple[ir.Node, int]]) -> None:
    """Make the readers of a target's output read the changed one."""
    y = target.y
    InferenceForm(same_as=0, merged=True).write(changed)
    redirect(uses, changed)
    if y.is_graph_output():
        copy(y, changed)
        InferenceForm.remove(y)
        outputs = model.graph.outputs
        outputs[:] = [changed if output is y else output for output in outputs]
        name, y.name = y.name, f"{y.name}/base"
        changed.name = name


def _check_alike(weight: ir.Value, targets: Sequence[AdapterTarget]) -> None:
    """Raise an error if nodes read a weight in ways for which one adapter cannot serve."""
    first = targets[0]
    for other in targets[1:]:
        if (other.kind, other.moves, other.sizes) != (first.kind, first.moves, first.sizes):
            raise GraphoptError(
                f"weight {weight.name!r}: expected nodes that read it in one way, found {first.node.op_type} node "
                f"{first.node.name!r} and {other.node.op_type} node {other.node.name!r}, as in a tied embedding: leave "
                f"it out by leave_out={weight.name!r}, or copy it for each use: "
                f"adapter=[passes.Untie({weight.name!r}), ...]"
            )


def _last_products(model: ir.Model, groups: Mapping[ir.Value, Sequence[AdapterTarget]]) -> list[ir.Value]:
    """Return the weights of products that alone lead to an output and to no other product, as a classifier's head."""
    by_node = {target.node: weight for weight, targets in groups.items() for target in targets}
    found: list[ir.Value] = []
    for output in (y for y in model.graph.outputs if role_of(y) is not Role.SOURCE):
        last = _met([output], by_node, lambda x: [x.producer()], lambda node: node.inputs)
        if len(last) == 1 and len(groups) > 1:
            (node,) = last
            if not _met(node.outputs, by_node, lambda x: x.consumers(), lambda node: node.outputs):
                found.append(by_node[node])
    return found


def _routers(model: ir.Model, groups: Mapping[ir.Value, Sequence[AdapterTarget]]) -> list[ir.Value]:
    """Return the weights of routers: of products with one output for each expert, from which the largest are chosen."""
    by_node = {target.node: weight for weight, targets in groups.items() for target in targets}
    stacked = (x for x in model.graph.initializers.values() if x.shape is not None and len(x.shape) == 3)
    counts = {dims_of(x)[0] for x in stacked if _multiplies(x)}
    counts |= {target.dims[0] for (target, *_) in groups.values() if len(target.dims) == 3}
    chosen = [node.inputs[0] for node in model.graph if node.op_type in _CHOOSING and node.domain == ""]
    logits = (x for x in chosen if x is not None)
    nodes = (_met([x], by_node, lambda x: [x.producer()], lambda node: node.inputs[:1]) for x in logits)
    found = [by_node[node] for some_nodes in nodes for node in some_nodes]
    return [weight for weight in found if groups[weight][0].sizes[1] in counts]


def _embeddings(groups: Mapping[ir.Value, Sequence[AdapterTarget]]) -> list[ir.Value]:
    return [weight for weight, targets in groups.items() if any(x.kind == "embedding" for x in targets)]


def _tell_share(model: ir.Model, chosen: Collection[ir.Value], left: Collection[ir.Value], least: float = 0.01) -> None:
    """Warn of weights that products read in ways that no adapter can change, if they are a large share of all."""
    weights = [x for x in model.graph.initializers.values() if x.shape is not None and len(x.shape) > 1]
    sizes = {
        x: math.prod(ir.Shape(dims_of(x)).numpy()) for x in weights if x in chosen or (x not in left and _multiplies(x))
    }
    without = [x for x in sizes if x not in chosen]
    names = some([*map(name_of, without)])
    share = sum(sizes[x] for x in without) / max(sum(sizes.values()), 1)
    if share >= least:
        warnings.warn(
            f"{share:.0%} of the weights of products have no adapter: {names}: operators "
            "read them in ways that adapters cannot change; name the weights to adapt by pattern to leave this out",
            stacklevel=2,
        )


def _multiplies(x: ir.Value) -> bool:
    """Return whether a product reads a weight, or a part of it."""
    for node in x.consumers():
        if node.op_type in _PRODUCTS:
            return True
        if node.op_type in VIEWS | _SELECTING and node.inputs[0] is x and any(map(_multiplies, node.outputs)):
            return True
    return False


def _met(
    start: Iterable[ir.Value],
    nodes: Collection[ir.Node],
    neighbours: Callable[[ir.Value], Iterable[ir.Node | None]],
    values: Callable[[ir.Node], Iterable[ir.Value | None]],
) -> set[ir.Node]:
    """Return the nodes among some that a walk from values meets first, in the direction of the functions."""
    front, seen, met = [*start], set[ir.Node](), set[ir.Node]()
    while front:
        for node in neighbours(front.pop()):
            if node is None or node in seen:
                continue
            if node in nodes:
                met.add(node)
            else:
                seen.add(node)
                front += [x for x in values(node) if x is not None]
    return met

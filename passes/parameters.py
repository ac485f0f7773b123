"""Select the parameters that train; copy and sort initializers."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

import onnx_ir as ir
import onnx_ir.passes.common as common

from graphopt.adapters.targets import readers_of
from graphopt.errors import GraphoptError, some
from graphopt.graph import metadata
from graphopt.graph.metadata import FROZEN, RANGE, UNTRAINED, Flag
from graphopt.graph.origins import EXPORT_ANEW, Evidence, Kind, LeftOut, Origin
from graphopt.graph.rewriting import Pass, Pattern, matches, names_of, no_match, selects
from graphopt.graph.roles import Role, check_inference, role_of
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.shown import elements
from graphopt.graph.values import constant_copy_of, is_floating, name_of, redirect
from passes.gradients.walk import dead_ends
from passes.lowering.classical import is_tree
from passes.weights import FOLDED_BY_TF2ONNX, evidence, folds, zeros
from passes.weights.initializers import array, register
from passes.weights.layers import warn_of_parts
from passes.weights.masters import QUANTIZED, QuantizedWeights

# An initializer that an adapter added or replaced, and that trains in place of others
ADAPTER = Flag("graphopt.is_of_adapter")


@dataclass(frozen=True)
class Untie(Pass):
    """Copy the matching initializers for every use, as `NAME.1`, `NAME.2`, ..., so that the copies train separately.

    Args:
        weights: shell-style patterns of names, one or several.

    Raises:
        GraphoptError: `weights` matches no floating-point initializer.

    >>> model = graphopt.load(models.linear((2,), 1))
    >>> result = passes.Untie("*.weight")(model)
    """

    weights: Pattern
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        floating = _floating(model)
        _check("Untie: weights", self.weights, floating)
        for value in [value for value in floating if selects(self.weights, value)]:
            for number, (node, index) in enumerate(list(value.uses())[1:], start=1):
                copy = register(model, f"{value.name}.{number}", array(value).copy())
                metadata.copy(value, copy)
                node.replace_input_with(index, copy)


@dataclass(frozen=True)
class SortInitializers(Pass):
    """Sort initializers, and the parameter inputs made from them, alphabetically.

    Args:
        rename: a template with `{index}` (zero-padded, in graph order) and `{name}`, such as "{index}_{name}". It keeps
            the graph order and changes names so that their alphabetical order agrees with it. The trained model has
            the original names.

    Raises:
        GraphoptError: `rename` does not produce distinct names in alphabetical order.

    >>> model = graphopt.load(models.linear((2,), 1))
    >>> list(passes.SortInitializers(rename="{index}_{name}")(model).model.graph.initializers)
    ['0_layers.0.weight', '1_layers.0.bias']
    """

    rename: str | None = None

    def rewrite(self, model: ir.Model) -> None:
        graph = model.graph
        parameters = [value for value in graph.inputs if role_of(value) is Role.PARAMETER]
        initializers = list(graph.initializers.values())
        if self.rename is None:
            graph.initializers.clear()
            graph.initializers.update((name_of(value), value) for value in sorted(initializers, key=name_of))
        else:
            values = [*parameters, *initializers]
            width = len(str(len(values)))
            indexed = [self.rename.replace("{index}", f"{i:0{width}}") for i in range(len(values))]
            names = [own.replace("{name}", name_of(x)) for own, x in zip(indexed, values, strict=True)]
            if names != sorted(set(names)):
                raise GraphoptError(
                    f"rename={self.rename!r}: expected distinct names in alphabetical order, found others: start it "
                    f"with {{index}}"
                )
            for value, name in zip(values, names, strict=True):
                metadata.ORIGINAL_NAME.write(value, metadata.original_name(value))
                value.name = name
        others = [value for value in graph.inputs if role_of(value) is not Role.PARAMETER]
        graph.inputs[:] = [*others, *sorted(parameters, key=name_of)]


@dataclass(frozen=True)
class Parameters(Pass):
    """Select the initializers that train, by default those that train in the program that was exported.

    The first rule that decides about a floating-point initializer applies:

    1. the fields of this pass;
    2. records of PyTorch's exporters about parameters and buffers, and about values folded, merged or computed from
       them; records of scikit-learn's and TensorFlow's converters;
    3. in files of PyTorch's older exporter, its name: `weight` and other names of parameters in PyTorch's modules;
       names of buffers, such as `mask` or `running_mean`, if its numbers or its use fit them;
    4. its use in the graph: running statistics, initial values of scatters and recurrences, bounds, the values of
       OneHot, the unit scale of a normalization, integers behind a scale; and its numbers: masks, tables of sines and
       cosines, frequencies, statistics of the model's input. A single number in arithmetic is a literal, unless the
       exporter calls it a parameter. Whole numbers in floats whose outputs have a scale are a quantized weight: they
       train, are rounded, and return;
    5. otherwise it is a parameter if a gradient flows to it from an output.

    Beside adapters, such as `passes.LoRA`, only their weights train, and those that `unfreeze` names.

    Zeros of a mask that the exporter folded into a weight stay zero. So do those of a pruned weight, of which at least
    an eighth are 0, if no record says how it trained; that is uncertain, and `unfreeze` trains them.

    A copy of a weight that the exporter folded, transposed or reshaped is computed from the weight (tied).
    A decision by uses and numbers, by a name that parameters and buffers have, or a tie by equal numbers, is unsure: a
    warning says which of them train, and `run=report` lists them, each with the option that changes it. Patterns are
    shell-style, one or several. They match names of initializers, and the paths of the parameters from which the
    exporter made them, such as that of the weight whose transpose is in the file. A pattern that reaches a bias but not
    the weight beside it, or a part of what the exporter joined, is warned of.

    Args:
        pattern: train only these.
        freeze: do not train these.
        unfreeze: train these regardless of the rules.
        untie: do not tie these, and copy them for each use.
        retie: tie these to the weights with equal numbers, transposed or not.
        operators: train only what one of these operators reads, such as BatchNormalization, also turned, cast
            or rounded; shell-style patterns.

    Raises:
        GraphoptError: no initializer trains, a pattern matches no floating-point initializer or no operator that reads
            one, or a quantized weight would train together with its scale.

    >>> steps = {"parameters": passes.Parameters(freeze="layers.0.*"), "loss": passes.MeanSquaredError()}
    >>> step = graphopt.compile(models.mlp((4,), 1, hidden=[8]), **steps)
    >>> [output.name for output in step.graph.outputs if output.name.endswith(".grad")]
    ['layers.2.bias.grad', 'layers.2.weight.grad']
    """

    pattern: Pattern = None
    freeze: Pattern = None
    unfreeze: Pattern = None
    untie: Pattern = None
    retie: Pattern = None
    operators: Pattern = None

    def requires(self, model: ir.Model) -> None:
        check_inference(model, "Parameters")
        self.precedes_gradient(model)

    def rewrite(self, model: ir.Model) -> None:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        ensure_typed(model)
        quantized = QuantizedWeights(model)
        for field in ("pattern", "freeze", "unfreeze", "untie", "retie"):
            _check(f"Parameters: {field}", getattr(self, field), _floating(model))
        reading = dict.fromkeys(op_type for value in _floating(model) for op_type in _operators_of(value))
        if self.operators and not any(matches(op_type, self.operators) for op_type in reading):
            raise no_match(f"Parameters: operators={self.operators!r}", "operator that reads a weight", reading, "has")
        if self.untie:
            Untie(self.untie).rewrite(model)
        _part_constant_uses(model)
        reached = evidence.reached(model.graph)
        floating, chosen = _floating(model), []
        if (adapters := [x for x in floating if ADAPTER.is_set(x)]) and self.pattern:
            _check_adapters(self.pattern, adapters)
        for value in floating:
            origin, trains = self._decide(value, value in reached, bool(adapters))
            origin.write(value)
            if trains:
                chosen.append(value)
            elif origin.trains and value in reached:
                UNTRAINED.set(value)
        if not chosen:
            raise GraphoptError(_nothing_to_train(model, floating))
        quantized.check_scales(chosen)
        roots = self._tie(model, chosen)
        pruned = [value for value in roots if self._keeps_zeros(value)]
        if missing := (LeftOut.read(model) or LeftOut()).names:
            names = some([repr(name) for name in missing], 4)
            counted = f"{len(missing)} parameter{'s' if len(missing) > 1 else ''}"
            warnings.warn(
                f"the exporter left out {counted}, which cannot train, or the module does not use them: "
                f"{names}: {EXPORT_ANEW}",
                stacklevel=2,
            )
        copies = {*chosen} - {*roots}
        _warn([value for value in floating if value in reached and value not in copies])
        for value in roots:
            weight = quantized.promote(value)
            if value in pruned:
                zeros.keep(model, weight)
        quantized.restore()

    def _decide(self, value: ir.Value, is_reached: bool, is_adapted: bool) -> tuple[Origin, bool]:
        """Return the kind of an initializer with the reason why it trains or not, and whether it does."""
        origin = origin_in_file(value)
        named = replace(origin, kind=Kind.PARAMETER, why="named by the user", evidence=Evidence.USER, certain=True)
        if selects(self.freeze, value):
            return replace(named, why="frozen by the user", named=True), False
        is_read = not self.operators or any(matches(op_type, self.operators) for op_type in _operators_of(value))
        if not is_read and not selects(self.unfreeze, value):
            return replace(origin, why="not of the named operators", evidence=Evidence.USER, certain=True), False
        if selects(self.unfreeze, value) or selects(self.pattern, value):
            return named, not self.pattern or selects(self.pattern, value)
        if self.pattern:
            return replace(origin, why="not named by the user", evidence=Evidence.USER, certain=True), False
        if origin.trains and not is_reached:
            ends = [f"{node.op_type} node {node.name!r}" for node in dead_ends(value)]
            why = f"no gradient passes {', '.join(ends[:3])}" if ends else "no gradient flows to it"
            return replace(origin, why=why, certain=True), False
        if is_adapted and origin.trains and not ADAPTER.is_set(value):
            return replace(origin, why=_BESIDE_ADAPTERS, certain=True), False
        return origin, origin.trains

    def _keeps_zeros(self, value: ir.Value) -> bool:
        """Return whether the zeros of a weight stay, and say so in its origin."""
        origin = _read(value)
        recorded = origin.named or origin.by_exporter or bool(origin.sources)
        if selects(self.unfreeze, value) or QUANTIZED.read(value) or not zeros.stay(value, recorded):
            return False
        replace(origin, why=f"{origin.why}; {zeros.why(value)}", certain=False).write(value)
        return True

    def _tie(self, model: ir.Model, chosen: Sequence[ir.Value]) -> list[ir.Value]:
        """Compute copies from their original weights, and return the weights."""
        weights = list(chosen)
        for group in folds.groups(chosen):
            roots: list[ir.Value] = []
            # Weights with original names come first, and weights made from others last.
            for value in sorted(group, key=lambda x: (not _read(x).named, bool(_read(x).sources))):
                tied = ((weight, how) for weight in roots if (how := self._how_tied(weight, value)))
                weight, how = next(tied, (None, None))
                if weight is None or how is None:
                    roots.append(value)
                    continue
                origin = _read(weight)
                certain = origin.certain and self._is_asked(weight, value)
                copies = (*origin.copies, folds.tie(model, weight, value, *how))
                replace(origin, copies=copies, certain=certain).write(weight)
                weights.remove(value)
        return weights

    def _is_asked(self, weight: ir.Value, copy: ir.Value) -> bool:
        """Return whether the user or the exporter says that a weight has this copy."""
        sources = _read(weight).sources
        retied = selects(self.retie, weight) or selects(self.retie, copy)
        return retied or _is_folded(weight, copy) or bool(sources and sources == _read(copy).sources)

    def _how_tied(self, weight: ir.Value, copy: ir.Value) -> folds.Relation | None:
        if selects(self.untie, weight) or selects(self.untie, copy):
            return None
        first, second = _read(weight), _read(copy)
        is_asked = self._is_asked(weight, copy)
        is_of_program = any(x.sources and not x.by_exporter for x in (first, second))
        if not is_asked and ((first.named and second.named) or is_of_program or not folds.tells(weight)):
            return None
        how = folds.relation(weight, copy, transposed=_is_folded(weight, copy))
        if how is None or is_asked:
            return how
        merged = first.by_exporter or second.by_exporter or _numberless(weight) == _numberless(copy)
        return None if not how[1] and merged else how


_BESIDE_ADAPTERS = "frozen beside adapters; unfreeze trains it"


def _check_adapters(pattern: Pattern, adapters: Sequence[ir.Value]) -> None:
    """Raise an error if the weights that alone are to train include none of an adapter."""
    if not any(selects(pattern, value) for value in adapters):
        raise GraphoptError(
            f"Parameters: pattern={pattern!r}: expected names of an adapter's weights, which else do not train, found "
            f"none, the adapters have: {some([name_of(x) for x in adapters])}: set unfreeze to train more than them"
        )


def _operators_of(value: ir.Value) -> list[str]:
    return [node.op_type for node, _ in readers_of(value)]


def _floating(model: ir.Model) -> list[ir.Value]:
    values = model.graph.initializers.values()
    return [value for value in values if is_floating(value) and RANGE.read(value) is None]


def _check(field: str, pattern: Pattern, floating: Sequence[ir.Value]) -> None:
    if pattern and not any(selects(pattern, value) for value in floating):
        names = (" or ".join(names_of(value)[:2]) for value in floating)
        raise no_match(f"{field}={pattern!r}", "floating-point initializer", names, "has")
    warn_of_parts(field, pattern, floating)


def _read(value: ir.Value) -> Origin:
    origin = Origin.read(value)
    assert origin is not None
    return origin


def _is_open(value: ir.Value) -> bool:
    """Return whether the exporter left the kind of an initializer open and gave it a generated name."""
    origin = Origin.read(value)
    return origin is None or not (origin.named or origin.certain)


def origin_in_file(value: ir.Value) -> Origin:
    """Return the kind of an initializer from the exporter's records, its uses and its numbers."""
    uses = list(value.uses())
    if FROZEN.is_set(value):
        why = "statistics of the data that the model was fitted to; unfreeze trains them"
        if QUANTIZED.read(value) is not None:
            why = "packed; unfreeze trains it"
        elif any(node.op_type in ("DequantizeLinear", "Gather", "Reshape") for node, _ in uses):
            why = "a table or scales that an operator keeps; unfreeze trains them"
        return Origin(Kind.CONSTANT, why)
    if uses and all(node.op_type == "BatchNormalization" and index in (3, 4) for node, index in uses):
        return Origin(Kind.BUFFER, "running statistics")
    if uses and all(node.op_type in ("DequantizeLinear", "QuantizeLinear") and index for node, index in uses):
        return Origin(Kind.CONSTANT, "the scale of a quantization")
    written = Origin.read(value)
    if written is not None and not written.trains:
        return replace(written, certain=written.certain or evidence.constant_value(value) is not None)
    is_recorded = written is not None and written.certain and written.named
    if origin := evidence.of_integers(value, is_recorded):
        return origin
    if written is not None and written.certain:
        return _doubted(value, written)
    if written is not None and written.kind is Kind.COMPUTED and written.sources and not written.by_exporter:
        return written
    if _is_open(value):
        reasons = [evidence.constant_use(*use) for use in uses]
        if reasons and reasons[0] is not None and all(reasons):
            return Origin(Kind.CONSTANT, reasons[0], certain=False)
        if origin := evidence.written_out(value):
            return origin
    if written is None and evidence.is_literal(value):
        return Origin(Kind.CONSTANT, "one number, taken for a literal", certain=evidence.is_short(value))
    if origin := evidence.constant_value(value):
        return replace(origin, named=written is not None and written.named)
    if written is None and name_of(value).startswith(FOLDED_BY_TF2ONNX):
        why = "folded by tf2onnx, of a variable or of numbers of the program"
        return Origin(Kind.PARAMETER, why, certain=False)
    return written or Origin(Kind.PARAMETER, "a gradient flows to it")


def _doubted(value: ir.Value, origin: Origin) -> Origin:
    """Return the origin of a parameter, which is unsure if its numbers are those of a constant.

    No file records that a parameter does not require a gradient. A record decides nevertheless, and a name, except
    about a table of sines and cosines.
    """
    if _is_recorded_table(value, origin):
        why = f"{origin.why}, which may have requires_grad=False: its numbers are sines and cosines of positions"
        return replace(origin, why=why, certain=False)
    looks = evidence.constant_value(value) if origin.by_exporter else None
    if looks is None:
        return origin
    if evidence.is_table(value):
        return replace(looks, named=origin.named)
    return replace(origin, why=f"{origin.why}, but {looks.why}", certain=False)


def _is_recorded_table(value: ir.Value, origin: Origin) -> bool:
    """Return whether a parameter by an exporter's record has sines and cosines of positions, which rarely train."""
    is_recorded = origin.evidence in (Evidence.RECORD, Evidence.NAME) and not origin.by_exporter
    is_stored = origin.named or bool(origin.sources)
    return is_recorded and origin.trains and is_stored and evidence.is_table(value)


def _part_constant_uses(model: ir.Model) -> None:
    """Copy initializers that are constants for some readers and not for others, for the former."""
    for value in [value for value in _floating(model) if _is_open(value)]:
        uses = list(value.uses())
        constant = [use for use in uses if evidence.constant_use(*use)]
        if 0 < len(constant) < len(uses):
            copy = register(model, constant_copy_of(value), array(value).copy())
            redirect(constant, copy)


def _is_folded(weight: ir.Value, copy: ir.Value) -> bool:
    """Return whether the exporter made a copy from a weight."""
    return _read(copy).sources == (weight.name,)


def _numberless(value: ir.Value) -> str:
    """Return a name without its digits, which layers share that start as copies of each other."""
    return re.sub(r"\d+", "#", name_of(value))


def _warn(values: Sequence[ir.Value]) -> None:
    """Warn about initializers that only a rule decided."""
    unsure = [(value, origin) for value in values if not (origin := _read(value)).certain]
    kept = [value for value, origin in unsure if _is_recorded_table(value, origin)]
    if kept:
        names = some([repr(value.name) for value in kept], 4)
        warnings.warn(
            f"{names}: recorded as parameters, which train, with sines and cosines of positions, which modules often "
            f"keep: no file records requires_grad=False, so freeze them by Parameters if they have it",
            stacklevel=2,
        )
    unsure = [(value, origin) for value, origin in unsure if value not in kept]
    if not unsure:
        return
    numbers = elements(value for value, _ in unsure)
    count = "1 initializer" if len(unsure) == 1 else f"{len(unsure)} initializers"
    ways = {
        "trained, which changes them if they are buffers": [x for x in unsure if x[1].trains],
        "not trained, which keeps them from learning if they are parameters": [x for x in unsure if not x[1].trains],
    }
    reasons = [
        f"{way}: {some([f'{value.name!r} ({origin.reason})' for value, origin in group], 4)}"
        for way, group in ways.items()
        if group
    ]
    warnings.warn(
        f"the model file does not say whether {count} of {numbers:,} number{'s' * (numbers != 1)} should train, so a "
        f"rule decides; "
        f"{'; '.join(reasons)}: set freeze, unfreeze, untie or retie of Parameters to change it, and run=report lists "
        f"what trains",
        stacklevel=2,
    )


def _nothing_to_train(model: ir.Model, floating: Sequence[ir.Value]) -> str:
    tree = next(filter(is_tree, model.graph), None)
    if tree is not None:
        return (
            f"nothing to train: {tree.op_type} node {tree.name!r} is piecewise constant, so that no gradient "
            f"passes it, and nothing after it trains: train a linear model or a network instead"
        )
    found = ", ".join(f"{x.name!r} ({_read(x).why})" for x in floating) or "no floating-point initializer"
    return (
        f"nothing to train: expected a floating-point initializer that receives a gradient from an output, found "
        f"{found}: name parameters with pattern or unfreeze of Parameters"
    )

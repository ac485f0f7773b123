"""Compare the update of a step with formulas in NumPy."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.graph.metadata import OWNER
from graphopt.graph.operators import ELEMENTWISE_OPERATORS
from graphopt.graph.roles import FED, STATE, Role, with_role
from graphopt.graph.state import ACCUMULATED, AVERAGE, LEARNING_RATE, LOSS_SCALE, MASK, STEP, accumulators
from graphopt.graph.traversal import ancestors, extracted_model
from graphopt.graph.values import constant_of, name_of, next_of
from graphopt.runtime.checks.findings import Finding
from graphopt.runtime.checks.slopes import SINGLE, Arrays, are_finite, inner_product, norm_of, wide

UPDATE_SAMPLE = 2**14  # numbers of a parameter that are compared if the update of one reads no others


class UpdatePart:
    """Hold the part of a step that makes a new state of gradients, for some numbers of each in place of all.

    Parameters whose new state is made by equal nodes are computed as one: their numbers follow each other.

    Attributes:
        model: the part, with the names of one parameter of each form.
        outputs: the names of what it computes, of all parameters.

    Args:
        same: for each input and output that several parameters share, its name in the part and those of the others,
            in the order of the parameters.
        parameters: the names of the parameters, in this order, by each of these names in the part.
    """

    def __init__(
        self, model: ir.Model, outputs: set[str], same: dict[str, list[str]], parameters: dict[str, list[str]]
    ) -> None:
        self.model, self.outputs, self._same, self._parameters = model, outputs, same, parameters

    def compute(self, run: Callable[[Arrays], Arrays], arrays: Arrays) -> Arrays:
        """Return the outputs of all parameters; `run` computes those of the part."""
        joined = {
            name: np.concatenate([arrays[each] for each in names])
            for name, names in self._same.items()
            if name in arrays
        }
        outputs = run({**arrays, **joined})
        for name, names in self._same.items():
            if name in outputs:
                sizes = [arrays[parameter].size for parameter in self._parameters[name]]
                parts = np.split(outputs[name], np.cumsum(sizes)[:-1])
                outputs |= dict(zip(names, parts, strict=True))
        return outputs


def update_part(step: ir.Model, gradients: Mapping[str, str]) -> UpdatePart | None:
    """Return the part of a step that makes a new state of gradients, for some numbers of each in place of all.

    Return None unless each new number depends only on those at its own place, and on numbers that all share.

    Args:
        gradients: the names of the gradients, by those of the parameters.
    """
    owners: dict[str | None, str] = {}
    for x in with_role(step, *STATE):
        owner = name_of(x) if x.name in gradients else OWNER.read(x)
        if owner is not None and owner in gradients:
            owners[x.name] = owner
    known = {y: name for name, y in gradients.items()}
    given = {y: known[y.name] for node in step.graph for y in node.outputs if y.name in known}
    counters = {name_of(x) for x in with_role(step, Role.COUNTER)}
    new = {next_of(name): owner for name, owner in owners.items() if name is not None}
    new |= dict.fromkeys((*map(next_of, counters), LEARNING_RATE), "")
    outputs = [y for y in step.graph.outputs if y.name in new]
    needed = ancestors(outputs, {node for y in given if (node := y.producer()) is not None})
    fed = {x.name for x in with_role(step, *FED)}
    forms = dict[ir.Value, tuple[object, str]]()  # of a value: how it is made, and of which parameter

    def form_of(x: ir.Value) -> tuple[object, str]:
        if x not in forms:
            owner = given.get(x) or owners.get(x.name, "")
            kind: object = "gradient" if x in given else name_of(x).removeprefix(owner)
            if not owner and not x.is_graph_input() and (number := constant_of(x)) is not None:
                kind = number.tobytes()
            forms[x] = (kind, x.dtype, bool(len(x.shape or ()))), owner
        return forms[x]

    numbers = dict[object, int]()
    for node in (node for node in step.graph if node in needed):
        inputs = [x for x in node.inputs if x is not None]
        shapes = {x.shape if x.shape is None else tuple(x.shape) for x in (*inputs, *node.outputs)} - {()}
        own = any(len(x.shape or ()) and constant_of(x) is not None and not x.is_graph_input() for x in inputs)
        read = [form_of(x) for x in inputs]
        of = {owner for _, owner in read if owner}
        is_elementwise = node.op_type in ELEMENTWISE_OPERATORS and not node.domain
        if not is_elementwise or len(shapes) > 1 or None in shapes or own or len(of) > 1:
            return None
        if any(x.name in fed for x in inputs):
            return None
        attributes = tuple((x.name, str(x.value)) for x in node.attributes.values())
        form = (node.op_type, attributes, *(x is not None for x in node.inputs), *(kind for kind, _ in read))
        for y in node.outputs:
            forms[y] = numbers.setdefault((form, y.index()), len(numbers)), next(iter(of), "")
    made: dict[str, dict[str, object]] = {}
    for y in outputs:
        made.setdefault(new[name_of(y)], {})[name_of(y).removeprefix(new[name_of(y)])] = form_of(y)[0]
    scalars = {owners.get(x.name, "") for x in step.graph.inputs if not len(x.shape or ())}
    groups: dict[object, list[str]] = {}
    for name, kinds in made.items():
        groups.setdefault(name if name in scalars else frozenset(kinds.items()), []).append(name)
    firsts = {names[0]: names for names in groups.values()}
    shown = [y for y in outputs if new[name_of(y)] in firsts]
    part = extracted_model(step, [*step.graph.inputs, *(y for y, name in given.items() if name in firsts)], shown)
    for x in list(part.graph.inputs):
        if not x.uses() and not x.is_graph_output():
            part.graph.inputs.remove(x)
    same, parameters = dict[str, list[str]](), dict[str, list[str]]()
    for x in (*part.graph.inputs, *part.graph.outputs):
        x.shape = ir.Shape([None] * min(1, len(x.shape or ())))
        name = name_of(x)
        first = known.get(name) or owners.get(name) or new.get(name, "")
        if first and len(names := firsts[first]) > 1:
            kind = name.removeprefix(first)
            same[name] = [gradients[each] if name in known else each + kind for each in names]
            parameters[name] = names
    forget_types(part)
    return UpdatePart(part, {name_of(y) for y in outputs}, same, parameters)


def forget_types(part: ir.Model) -> None:
    """Remove types and shapes between the inputs and outputs of a graph, which take longer to write than to infer."""
    for y in (y for node in part.graph for y in node.outputs if not y.is_graph_output()):
        y.type = y.shape = None


def some_of(x: np.ndarray) -> np.ndarray:
    """Return an array, or some numbers of it in one axis: of arrays of equal shapes, those at the same places."""
    return np.ascontiguousarray(x.ravel()[:: _stride(x)]) if x.ndim else x


def _stride(x: np.ndarray) -> int:
    return max(1, x.size // UPDATE_SAMPLE) | 1


class Updates:
    """Compare what a step does with its gradients.

    Args:
        model: the step.
        run: returns its outputs for a state.
        state: the state before it, or some numbers of it.
        outputs: its outputs for this state.
        gradients: the gradients at the same places, by the names of the parameters.
        norms: their norms.
    """

    def __init__(
        self,
        model: ir.Model,
        run: Callable[[Arrays], Arrays],
        state: Arrays,
        outputs: Arrays,
        gradients: Arrays,
        norms: Mapping[str, float],
    ) -> None:
        self._model, self._run, self._state, self._outputs = model, run, state, outputs
        self._gradients, self._norms = gradients, norms
        self._parameters = {x.name: x for x in with_role(model, Role.PARAMETER)}

    def findings(self, passes: Mapping[str, Sequence[Any]]) -> Iterator[Finding]:
        """Yield what is found about the update of each parameter by the passes of a pipeline."""
        optimizers = passes.get("optimizer", ())
        if len(optimizers) != 1:
            yield _unchecked("several passes update" if optimizers else "the optimizer is not known")
            return
        from passes.accumulate import APPLY, Accumulate
        from passes.optimizers.optimizer import Optimizer
        from passes.optimizers.reference import clipped, share_of

        (optimizer,), state, outputs, gradients = optimizers, self._state, self._outputs, self._gradients
        if accumulators(self._model):
            found = passes.get("accumulate", ())
            if [type(x) for x in found] != [Accumulate]:
                yield _unchecked("gradients of several batches are accumulated by a pass that is not known")
                return
            (accumulate,) = found
            count = accumulate.steps or 2
            before: Arrays = {
                **{f"{name}.{ACCUMULATED}": (count - 1) * np.flip(g) for name, g in gradients.items()},
                ACCUMULATED: np.array(count - 1, np.float32),
            }
            if count > 1:
                none = {name: np.zeros_like(x) for name, x in before.items()}
                yield self._accumulated({**state, **none, APPLY: np.array(False)})
            state = {**state, **before, APPLY: np.array(True)}
            outputs = self._run(state)
            scale = 1 / count if accumulate.mean else 1.0
            gradients = {name: (g + before[f"{name}.{ACCUMULATED}"]) * scale for name, g in gradients.items()}
        following = {name: y for name in gradients if (y := outputs.get(next_of(name))) is not None}
        if LOSS_SCALE in state and all(np.array_equal(y, state[name]) for name, y in following.items()):
            yield _unchecked("the scale of the loss skips this step")
            return
        after = {name: outputs[next_of(name)] for name in state if next_of(name) in outputs}
        if not all(_stays_finite(state[name], x) for name, x in after.items()):
            yield _unchecked("the new state is not finite")
            return
        clips = clipped(passes.get("clip", ()), gradients)
        if not isinstance(optimizer, Optimizer) or clips is None:
            name = type(optimizer if clips is not None else passes["clip"][-1]).__name__
            yield _unchecked(f"no formula of {name} is known")
            return
        time = int(state[STEP]) + 1
        averages = passes.get("average", ())
        share = share_of(averages[0], time) if averages else None
        if averages and share is None:
            yield _unchecked(f"no formula of {type(averages[0]).__name__} is known", "averages")
        rate = outputs.get(LEARNING_RATE, state.get(LEARNING_RATE, np.array(math.nan)))
        kinds, new_kinds = _by_owner(state), _by_owner(after)
        shared = {**kinds.get(STEP, {}), LEARNING_RATE: rate}
        for name, g in clips.items():
            yield self._update(optimizer, name, g, time, shared, (kinds.get(name, {}), new_kinds.get(name, {})), share)

    def _accumulated(self, state: Arrays) -> Finding:
        """Return whether a step that is not the last adds gradients up, and changes no parameter."""
        outputs = self._run(state)
        for name, g in self._gradients.items():
            moved = wide(outputs[next_of(name)]) - wide(self._state[name])
            for what, expected, found in (
                (name, np.zeros_like(moved), moved),
                (f"{name}.{ACCUMULATED}", g, wide(outputs[next_of(f"{name}.{ACCUMULATED}")])),
            ):
                finding = _compared(what, expected, found, 0.0, "Accumulate", self._norms[name])
                if finding.verdict == "differs":
                    return finding
        return Finding("update", ACCUMULATED, "agrees", reason="Accumulate")

    def _update(
        self,
        optimizer: Any,
        name: str,
        g: np.ndarray,
        time: int,
        shared: Arrays,
        kinds: tuple[Arrays, Arrays],
        share: float | None,
    ) -> Finding:
        """Compare the update of a parameter, its slots and its average with formulas.

        Args:
            time: the number of the update, from 1 on.
            shared: numbers that the updates of all parameters read.
            kinds: the parameter, under the empty name, and its slots before and after the step.
            share: that of the parameter in its average.
        """
        from passes.optimizers.reference import UPDATES, WHOLE, slot_numbers, update_of

        own = update_of(optimizer, self._parameters[name])
        norm = self._norms[name]
        before, after = kinds
        if own is None or "" not in after:
            return _unchecked(f"no formula of {type(optimizer).__name__} is known", name, norm)
        if not are_finite(before[""]):
            return _unchecked("it has numbers that are not finite", name, norm)
        if after[""].dtype.itemsize < 4:
            return _unchecked("its numbers have 16 bits", name, norm)
        rule, factor = own
        stride = 1 if isinstance(rule, WHOLE) else _stride(g)

        def read(kind: str, x: np.ndarray, known: Arrays) -> tuple[np.ndarray, np.ndarray | float]:
            """Return the numbers of a slot that are compared, and what rounding to 8 bits may change."""
            gap: np.ndarray | float = 0.0
            if f"{kind}_absmax" in known:
                x, gap = slot_numbers(x, known[f"{kind}_absmax"], g.shape, kind not in rule.unsigned)
            if stride > 1 and x.size == g.size:
                x, gap = x.ravel()[::stride], gap if isinstance(gap, float) else gap.ravel()[::stride]
            return x.astype(np.float64), gap

        old = {kind: read(kind, x, before)[0] for kind, x in before.items()}
        point = read("", g, {})[0]
        rate = float(shared[LEARNING_RATE]) * factor
        new, slots = UPDATES[type(rule)](rule, old[""], point, rate, time, {**shared, **old})
        expected = {"": new, **slots}
        if share is not None and AVERAGE in after:
            expected[AVERAGE] = old[AVERAGE] + share * (new - old[AVERAGE])
        mask = read("", np.broadcast_to(after[MASK], g.shape), {})[0] if MASK in after else None
        for kind, x in expected.items():
            y, gap = read(kind, after[kind], after)
            if mask is not None:  # what is pruned is 0, and its slots do not matter
                x = np.where(mask.reshape(np.shape(x)) != 0, x, 0.0 if kind == "" else y)
            off = y - x
            y = x + np.sign(off) * np.maximum(np.abs(off) - gap, 0.0)
            title = f"{name}.{kind}" if kind else name
            by = "the average" if kind == AVERAGE else type(rule).__name__
            compared = _compared(title, x - old[kind], y - old[kind], norm_of(old[kind]), by, norm)
            if kind == "" or compared.verdict == "differs":
                finding = compared
            if compared.verdict == "differs":
                break
        return finding


def _unchecked(reason: str, name: str = "all", norm: float | None = None) -> Finding:
    return Finding("update", name, "not checked", norm=norm, reason=reason)


def _stays_finite(old: np.ndarray, new: np.ndarray) -> bool:
    """Return whether a step makes no number of a state infinite or NaN that was finite."""
    return new.dtype.kind != "f" or are_finite(new) or are_finite(new[np.isfinite(old)])


def _by_owner(state: Arrays) -> dict[str, Arrays]:
    """Return state by its owner and kind; of a parameter itself, the kind is empty."""
    found: dict[str, Arrays] = {}
    for name, x in state.items():
        owner, _, kind = name.rpartition(".")
        found.setdefault(owner, {})[kind] = x
        found.setdefault(name, {})[""] = x
    return found


def _compared(name: str, expected: np.ndarray, found: np.ndarray, size: float, rule: str, norm: float) -> Finding:
    """Compare the change of a parameter or a slot of some size with that of a formula."""
    slack = 8 * SINGLE.unit * size
    lengths = [norm_of(x) for x in (expected, found)]
    off = norm_of(found - expected) - slack
    verdict = "agrees" if off <= 1e-3 * lengths[0] else "differs"
    along = inner_product(found, expected) / lengths[0] if lengths[0] else lengths[1]
    return Finding("update", name, verdict, lengths[0], along, norm, rule)  # type: ignore[arg-type]

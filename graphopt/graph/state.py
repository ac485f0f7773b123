"""Declare state and hyperparameters of a training graph: graph inputs with an initial value.

Between passes, each is an overridable initializer: an initializer that is also a graph input. While a pass runs,
`detached` removes the initial values, because rewriters would take such an input for a constant and fold, for
example, a step counter that starts at 0.
"""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import KIND, ORIGINAL_NAME, OWNER, ROLE, Note, expect
from graphopt.graph.roles import OF_MODEL, Role, check_inference, role_of, set_role, with_role
from graphopt.graph.values import Named, name_of, next_of

INITIAL = "graphopt.initial"
STEP = "step"
LEARNING_RATE = "learning_rate"
LOSS_SCALE = "loss_scale"
# Of private training: the bound of an example's gradient, the divisor of their sum, and the noise
MAX_NORM, EXPECTED_ROWS, MULTIPLIER, NOISE_KEY = "max_norm", "expected_rows", "noise_multiplier", "noise_key"
NORMS = "example_norms"  # the output of the norms of the gradients of examples
ACCUMULATED = "accumulated"  # how many gradients are, and of a parameter NAME.accumulated which
AVERAGE = "average"  # of a parameter: its average over the steps
MASK = "mask"  # of a parameter: which of its numbers are not pruned

_RESERVED = {STEP, LEARNING_RATE, LOSS_SCALE, ACCUMULATED, "loss", "target", "sample_weight"}


@dataclass(frozen=True)
class Pruning(Note, key="graphopt.pruning", expected="a number of updates and a share"):
    """Note until when a training graph prunes.

    Args:
        end: the update after which the masks stay; 0 if they never change.
        sparsity: the share of the numbers of the pruned weights that are 0 then.
    """

    end: int
    sparsity: float

    def check(self) -> None:
        expect(0 <= self.end < 2**53, 0 <= self.sparsity <= 1)


@contextlib.contextmanager
def detached(model: ir.Model) -> Iterator[None]:
    """Keep every state's initial value in its `meta` while the block runs, then put the values back."""
    graph = model.graph
    for value in graph.inputs:
        if value.is_initializer() and role_of(value) is not None:
            _detach(graph, value)
    try:
        yield
    finally:
        for value in graph.inputs:
            if INITIAL in value.meta:
                value.const_value = value.meta.pop(INITIAL)
                graph.register_initializer(value)


def _detach(graph: ir.Graph, value: ir.Value) -> None:
    value.meta[INITIAL], value.const_value = value.const_value, None
    del graph.initializers[name_of(value)]


def initial(value: ir.Value) -> ir.TensorProtocol | None:
    """Return the initial value of a state or hyperparameter, or None for data; inside or outside a pass."""
    return value.meta.get(INITIAL, value.const_value)


def take_initial(model: ir.Model) -> dict[str, np.ndarray]:
    """Remove and return the initial values of state and hyperparameters, which become plain inputs."""
    taken = {}
    for value in model.graph.inputs:
        if value.is_initializer() and value.const_value is not None:
            taken[name_of(value)] = value.const_value.numpy()
            del model.graph.initializers[name_of(value)]
            value.const_value = None
    return taken


def put_initial(model: ir.Model, arrays: Mapping[str, np.ndarray]) -> None:
    """Give state and hyperparameters initial values, which `take_initial` takes."""
    for value in model.graph.inputs:
        name = name_of(value)
        if name in arrays:
            value.const_value = ir.tensor(arrays[name], name=name)
            model.graph.register_initializer(value)


def promote(model: ir.Model, initializer: ir.Value, role: Role) -> ir.Value:
    """Turn an initializer into an input with an initial value; inside a pass only."""
    _detach(model.graph, initializer)
    model.graph.inputs.append(initializer)
    return set_role(initializer, role)


def demote(model: ir.Model, value: ir.Value) -> None:
    """Turn a promoted initializer into an initializer again; inside a pass only."""
    model.graph.inputs.remove(value)
    ROLE.remove(value)
    value.const_value = value.meta.pop(INITIAL)
    model.graph.register_initializer(value)


def declare(model: ir.Model, name: str, array: np.ndarray, role: Role) -> ir.Value:
    """Add an input `name` with initial value `array`; inside a pass only."""
    if role is not Role.SLOT:
        check_free(model, name)
    tensor = ir.tensor(array, name=name)
    value = ir.Value(name=name, type=ir.TensorType(tensor.dtype), shape=ir.Shape(array.shape))
    value.meta[INITIAL] = tensor
    model.graph.inputs.append(value)
    return set_role(value, role)


def declare_slot(model: ir.Model, owner: Named, kind: str, array: np.ndarray) -> ir.Value:
    """Add a slot of a parameter or other state, such as its `momentum`; inside a pass only."""
    slot = declare(model, f"{name_of(owner)}.{kind}", array, Role.SLOT)
    OWNER.write(slot, name_of(owner))
    KIND.write(slot, kind)
    return slot


def owners(graph: ir.Graph) -> dict[str, str]:
    """Return the names of the parameters or other state that slots belong to, by the names of the slots."""
    slots = [x for x in graph.inputs if role_of(x) is Role.SLOT]
    return {name_of(x): OWNER.read(x) or _cut(x)[0] or name_of(x) for x in slots}


def accumulators(model: ir.Model) -> list[ir.Value]:
    """Return the slots of `passes.Accumulate`: the sums of gradients, and their number."""
    slots = with_role(model, Role.SLOT)
    if all(x.name != ACCUMULATED for x in slots):
        return []
    return [x for x in slots if (KIND.read(x) or _cut(x)[1]) == ACCUMULATED]


def averages(model: ir.Model) -> list[ir.Value]:
    """Return the slots that contain averages of parameters; see `passes.Average`."""
    return [x for x in with_role(model, Role.SLOT) if KIND.read(x) == AVERAGE]


def masks(model: ir.Model) -> list[ir.Value]:
    """Return the slots that contain masks of parameters; see `passes.Prune`."""
    return [x for x in with_role(model, Role.SLOT) if KIND.read(x) == MASK]


def averages_read(model: ir.Model) -> dict[str, str]:
    """Return the parameters that inference reads averages of, by the names of the averages."""
    return {name_of(x): OWNER.read(x) or "" for x in averages(model) if ORIGINAL_NAME.read(x) is not None}


def _cut(slot: ir.Value) -> tuple[str, str]:
    """Return the owner and the kind of a slot by its name, for graphs that were saved without these notes."""
    owner, _, kind = name_of(slot).rpartition(".")
    return owner, kind


def set_next(model: ir.Model, value: ir.Value, following: ir.Value) -> None:
    """Add the output `NAME.next` that replaces state `value` after the step."""
    following.name = next_of(value)
    model.graph.outputs.append(set_role(following, Role.NEXT))


def counter(model: ir.Model) -> ir.Value:
    """Return the step counter, an int64 scalar that is 0 in the first step; declare it if missing."""
    found = with_role(model, Role.COUNTER)
    if found:
        return found[0]
    step = declare(model, STEP, np.array(0, np.int64), Role.COUNTER)
    with Emitter(model) as op:
        set_next(model, step, op.Add(step, 1))
    return step


def make_room(model: ir.Model) -> None:
    """Rename values whose names training needs: `step`, or `w.momentum` for a weight `w`.

    Initializers regain their names in the trained model.

    Raises:
        GraphoptError: an input or output, which cannot be renamed, has such a name, or the model has state.
    """
    values = ir.convenience.create_value_mapping(model.graph)
    for name, value in list(values.items()):
        weight, _, suffix = name.rpartition(".")
        if name in _RESERVED and not (value.is_graph_input() or value.is_graph_output()):
            _rename(value, values)
        elif suffix.isidentifier() and weight in model.graph.initializers:
            check_inference(model, "Normalize")
            reason = f"expected no input or output named like what training makes of weight {weight!r}"
            _rename(value, values, f"{name!r}: {reason}: rename it in the model")


def check_free(model: ir.Model, name: str) -> None:
    """Rename the inner value `name`, if it exists.

    Raises:
        GraphoptError: an input or output, which cannot be renamed, has this name.
    """
    values = ir.convenience.create_value_mapping(model.graph)
    if name in values:
        problem = f"the model already has a value named {name!r}, a name that training needs: rename it in the model"
        if role_of(values[name]) not in OF_MODEL:
            problem = (
                f"expected one part of training with {name!r}, found two: leave one out, or add losses by passes.Losses"
            )
        _rename(values[name], values, problem)


def _rename(value: ir.Value, taken: Mapping[str, ir.Value], problem: str = "") -> None:
    """Rename a value to a unique name; raise an error with the problem if it is an input or output."""
    if value.is_graph_input() or value.is_graph_output():
        raise GraphoptError(problem)
    own = name_of(value)
    names = (own.replace(".", "_") + "_" * i for i in itertools.count())
    value.name = next(name for name in names if name not in taken)
    if value.is_initializer() and ORIGINAL_NAME.read(value) is None:
        ORIGINAL_NAME.write(value, own)

"""Define the base class of optimizers, which update parameters from their gradients."""

from __future__ import annotations

import itertools
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal, final

import numpy as np
import onnx_ir as ir
from onnx_ir import Value

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError, kind_of
from graphopt.fields import check_options
from graphopt.graph import state
from graphopt.graph.authored import ask, call, floating, name_of_method, several, told
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.metadata import ADDS_ONE
from graphopt.graph.operators import MICROSOFT
from graphopt.graph.rewriting import Pass, Pattern, no_match, selects
from graphopt.graph.roles import Role, needs_training_runtime, updated, with_role
from graphopt.graph.state import LEARNING_RATE
from graphopt.graph.traversal import ancestors
from graphopt.graph.values import gradient_of, like, name_of, redirect, wide_type
from graphopt.intervals import within
from passes.optimizers.slots import Slot, initial_array, slot
from passes.weights.layers import warn_of_parts

__all__ = ["Group", "Optimizer"]

ValueTuple = tuple[Value, ...]
_TAKEN = ("average", "grad", "gradient", "next")  # what names of other values of a parameter end in
Start = float | Callable[[np.ndarray], np.ndarray | None]
Kernel = tuple[str, Mapping[str, float]]  # its name and attributes


@dataclass(frozen=True)
class Group(Checked):
    """Set the learning rate, the weight decay or the optimizer of the parameters whose names match `pattern`.

    Args:
        pattern: shell-style patterns of names, one or several.
        learning_rate: the factor by which the optimizer's rate is multiplied.
        weight_decay: the weight decay; None for the optimizer's.
        optimizer: another optimizer for them. Its rate keeps its ratio to that of the main optimizer, which a schedule
            changes.

    >>> passes.AdamW(groups=(passes.Group("*.bias", weight_decay=0.0),)).groups[0].learning_rate
    1.0
    >>> passes.Muon(0.02, groups=(passes.Group("*embed*", optimizer=passes.AdamW(3e-4)),)).learning_rate
    0.02
    """

    pattern: Pattern
    learning_rate: float = within("[0, inf)", 1.0)
    weight_decay: float | None = within("[0, inf)", None)
    optimizer: Optimizer | None = None

    def __post_init__(self) -> None:
        check_options(self)
        check_optimizer(self.optimizer, "Group(optimizer)")


@dataclass(frozen=True)
class Row:
    """Hold a parameter, its gradient, the optimizer that updates it with its factor of the rate, and its slots."""

    w: Value
    gradient: Value
    optimizer: Optimizer
    factor: float
    slots: Sequence[Slot]

    def rate(self, base: Value) -> Value:
        """Emit the rate of the parameter from that of the main optimizer."""
        return base if self.factor == 1 else base * self.factor


@dataclass(frozen=True)
class Optimizer(Pass):
    """Add an output `NAME.next` for every parameter that has a gradient, and the hyperparameter `learning_rate`.

    This is the base class of optimizers. A subclass implements `update`, and `slots` if it has state. 16-bit
    parameters are updated in float32, the type of their slots.

    Args:
        learning_rate: the rate of all parameters. Unless a schedule computes it, feed the input to change it.
        weight_decay: the multiple of the parameter that is added to its gradient. AdamW, Lion and others instead
            subtract this multiple times the rate from the parameter. Weights of norms that the file has as 1 + w, as
            files of Gemma by onnxruntime-genai's builder do, have none, unless a group names it.
        groups: rates, weight decays and optimizers for some parameters; the first group that matches a parameter's
            name applies.
        slot_bits: 8 stores slots of 4,096 or more numbers in blocks of 256 8-bit codes and a float32 scale (Dettmers
            et al. 2022), as bitsandbytes does, in a quarter of the memory. The step computes in float32.
        fused: use one kernel of onnxruntime-training for all parameters of this optimizer. Only AdamW and SGD without
            momentum have such a kernel, for float32 and 16-bit parameters.

    Raises:
        GraphoptError: a number is outside its interval, the graph has no gradients, a group matches no parameter, or
            the optimizer has no kernel. Rates, decays and epsilons are finite and at least 0. Moments' factors are in
            [0, 1).

    >>> class SignDescent(passes.Optimizer):
    ...     def update(self, op, w, g, rate, t):
    ...         return (w - rate * op.Sign(g),)
    >>> SignDescent(learning_rate=0.01).learning_rate
    0.01
    """

    learning_rate: float = within("[0, inf)", 1e-3)
    weight_decay: float = within("[0, inf)", 0.0, kw_only=True)
    groups: tuple[Group, ...] = field(default=(), kw_only=True)
    slot_bits: Literal[8, 32] = field(default=32, kw_only=True)
    fused: bool = field(default=False, kw_only=True)

    decoupled: ClassVar[bool] = False
    unsigned: ClassVar[tuple[str, ...]] = ()  # the slots without negative numbers
    exact: ClassVar[tuple[str, ...]] = ()  # the slots that 8 bits are too few for

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.fused and self.slot_bits == 8:
            name = type(self).__name__
            raise GraphoptError(f"{name}: expected slot_bits=32 with fused=True, found 8: set one of them")

    def slots(self) -> Mapping[str, Start]:
        """Return the initial value of each slot of a parameter, by the slot's name.

        It is a number for a slot in the shape of the parameter. Otherwise it is a function of the parameter's initial
        value, which returns None if the parameter has no such slot.
        """
        return {}

    @abstractmethod
    def update(self, op: Emitter, w: Value, g: Value, rate: Value, t: Value, *slots: Value) -> ValueTuple:
        """Emit the new parameter and its new slots; `t` is the number of the step, starting at 1.

        The values that `shared` returns follow the slots.
        """

    def decayed(self, op: Emitter, w: Value, g: Value, rate: Value) -> tuple[Value, Value]:
        """Emit the weight decay; return the parameter and its gradient."""
        if not self.weight_decay:
            return w, g
        if self.decoupled:
            return w * (1 - rate * self.weight_decay), g
        return w, g + self.weight_decay * w

    def of(self, w: Value) -> Optimizer:
        """Return the optimizer that updates a parameter, by default this one."""
        return self

    def shared(self, model: ir.Model, op: Emitter, rows: Sequence[Row], rate: Value, t: Value) -> ValueTuple:
        """Emit the numbers that the updates of all parameters of this optimizer share."""
        return ()

    def kernel(self) -> Kernel | None:
        """Return the name and attributes of the fused kernel, or None.

        The inputs of the kernel are the rate, the number of the step if there are slots, and the tensors.
        """
        return None

    def requires(self, model: ir.Model) -> None:
        if updated(model):
            raise GraphoptError(
                f"{type(self).__name__}: expected a model without an update, found one: use one optimizer, and groups "
                "for others"
            )
        self.required(model, Role.GRADIENT, "run Gradient first")

    def ensures(self, model: ir.Model) -> None:
        self.follows_optimizer(model)

    @final
    def rewrite(self, model: ir.Model) -> None:
        gradients = with_role(model, Role.GRADIENT)
        parameters = {gradient_of(p): p for p in with_role(model, Role.PARAMETER)}
        for gradient in gradients:
            if name_of(gradient) not in parameters:
                raise GraphoptError(
                    f"{type(self).__name__}: expected the gradient of a parameter, named NAME.grad, found "
                    f"{name_of(gradient)!r}: a pass before has given the role GRADIENT to another value"
                )
        for group in self.groups:
            if not isinstance(group, Group):
                raise GraphoptError(
                    f"{type(self).__name__}: groups: expected passes.Group(pattern, ...), found {kind_of(group)}"
                )
            place = f"{type(self).__name__}: groups: pattern"
            if not any(selects(group.pattern, parameter) for parameter in parameters.values()):
                raise no_match(f"{place} {group.pattern!r}", "parameter", map(name_of, parameters.values()))
            warn_of_parts(place, group.pattern, parameters.values())
        for gradient in gradients:
            model.graph.outputs.remove(gradient)
        types = {wide_type(p) for p in parameters.values()}
        rate_type = ir.DataType.DOUBLE if ir.DataType.DOUBLE in types else ir.DataType.FLOAT
        initial = np.array(self.learning_rate, rate_type.numpy())
        rate = state.declare(model, LEARNING_RATE, initial, Role.HYPERPARAMETER)
        counter = state.counter(model)
        rows = [self._row(model, parameters[name_of(gradient)], gradient) for gradient in gradients]
        with Emitter(model) as op:
            step = op.Add(counter, 1)
            plain, fused = ([row for row in rows if row.optimizer.fused is flag] for flag in (False, True))
            updates = (_updates(model, op, plain, rate, step), _fused_updates(model, op, fused, rate, step))
            for row, (w, *slots) in itertools.chain(*updates):
                state.set_next(model, row.w, op.Identity(op.cast(w, row.w.dtype)))
                for held, value in zip(row.slots, slots, strict=True):
                    held.write(model, op, value)

    @final
    def assigned(self, w: Value) -> tuple[Optimizer, float]:
        """Return the optimizer that updates a parameter, and its factor of the rate."""
        group = next((group for group in self.groups if selects(group.pattern, w)), Group(None))
        optimizer, factor = (group.optimizer or self).of(w), group.learning_rate
        if optimizer.learning_rate != self.learning_rate:
            if not self.learning_rate:
                raise GraphoptError(
                    f"{type(self).__name__}: learning_rate: expected one above 0, to which the rate of "
                    f"{type(optimizer).__name__} keeps its ratio, found 0: set another rate"
                )
            factor *= optimizer.learning_rate / self.learning_rate
        if group.weight_decay is not None or ADDS_ONE.is_set(w):  # decay would take 1 + w to 0
            optimizer = replace(optimizer, weight_decay=group.weight_decay or 0.0)
        return optimizer, factor

    def _row(self, model: ir.Model, w: Value, gradient: Value) -> Row:
        """Declare the slots of a parameter, and find out which optimizer updates it."""
        optimizer, factor = self.assigned(w)
        first, slots = initial_array(w), []
        for name, start in _starts(optimizer, first).items():
            if start is not None:
                bits = 32 if name in optimizer.exact else optimizer.slot_bits
                slots.append(slot(model, w, name, start, bits, signed=name not in optimizer.unsigned))
        return Row(w, gradient, optimizer, factor, slots)


def _starts(optimizer: Optimizer, first: np.ndarray) -> dict[str, np.ndarray | None]:
    """Return the initial value of each slot that `slots` has returned, for a parameter's initial value."""
    found, where = ask(optimizer, "slots"), name_of_method(optimizer, "slots")
    due = "initial values by the names of the slots, such as {'mean': 0.0}"
    if not isinstance(found, Mapping):
        raise GraphoptError(f"{where}: expected {due}, found {told(found)}")
    starts: dict[str, np.ndarray | None] = {}
    for name, given in found.items():
        if not isinstance(name, str) or not name.isidentifier() or name in _TAKEN:
            raise GraphoptError(f"{where}: expected {due}, found the name {name!r}: choose another one")
        start = call(given, f"{where}: {name}", "(w)", [first]) if callable(given) else given
        if start is None and callable(given):
            starts[name] = None
            continue
        array = np.asarray(start) if isinstance(start, int | float | np.generic | np.ndarray) else None
        if array is None or array.dtype.kind not in "fiu" or (array.ndim and not callable(given)):
            due = "a number, or a function of the parameter's initial value that returns an array or None"
            raise GraphoptError(f"{where}: {name}: expected {due}, found {told(start)}")
        if not callable(given):
            array = np.full_like(first, array)
        starts[name] = array.astype(first.dtype) if array.dtype.kind == "f" else array
    return starts


def _updated(optimizer: Optimizer, op: Emitter, row: Row, given: Sequence[Value], slots: Sequence[Value]) -> ValueTuple:
    """Return the new parameter and the new slots that `update` has returned."""
    w, g, rate, t, *numbers = given
    decayed, where = ask(optimizer, "decayed", op, w, g, rate), name_of_method(optimizer, "decayed")
    due = "the parameter and its gradient"
    pair = several(decayed, where, due, 2)
    new_w, new_g = (floating(x, where, due, like) for x, like in zip(pair, (w, g), strict=True))
    where = name_of_method(optimizer, "update")
    names = ["the new parameter", *(f"the slot {held.name!r}" for held in row.slots)]
    found = several(
        ask(optimizer, "update", op, new_w, new_g, rate, t, *slots, *numbers),
        where,
        "the new parameter" + (" and the new slots" if slots else ""),
        len(names),
    )
    states = zip(found, names, (w, *slots), strict=True)
    return tuple(floating(x, where, name, like) for x, name, like in states)


def _updates(
    model: ir.Model, op: Emitter, rows: Sequence[Row], base: Value, step: Value
) -> Iterator[tuple[Row, ValueTuple]]:
    """Emit the update of each parameter, from its gradient and its slots."""
    alike: dict[str, list[Row]] = {}  # by their optimizer
    for row in rows:
        alike.setdefault(repr(replace(row.optimizer, weight_decay=0.0, groups=())), []).append(row)
    shared: dict[Value, ValueTuple] = {}
    for some in alike.values():
        common = some[0].optimizer.shared(model, op, some, base, step)
        shared |= dict.fromkeys((row.w for row in some), common)
    for row in rows:
        optimizer, slots = row.optimizer, [held.read(op) for held in row.slots]
        given = (row.w, row.gradient, row.rate(base), step, *shared[row.w])
        wide = [op.cast(x, wide_type(row.w)) for x in given]
        yield row, _updated(optimizer, op, row, wide, slots)


def _fused_updates(
    model: ir.Model, op: Emitter, rows: Sequence[Row], base: Value, step: Value
) -> Iterator[tuple[Row, ValueTuple]]:
    """Emit a kernel of onnxruntime-training for all parameters of each optimizer, rate and weight decay."""
    groups: dict[tuple[str, float], list[Row]] = {}
    for row in rows:
        groups.setdefault((repr(row.optimizer), row.factor), []).append(row)
    for alike in groups.values():
        optimizer, inputs = alike[0].optimizer, []
        kernel, decay = optimizer.kernel(), optimizer.weight_decay
        if kernel is None:
            raise GraphoptError(
                f"{type(optimizer).__name__}: fused: onnxruntime-training has no kernel for {optimizer}, only for "
                f"AdamW and for SGD without momentum: leave it out"
            )
        for row in alike:
            w, g = (op.cast(x, wide_type(row.w)) for x in (row.w, row.gradient))
            g = g if optimizer.decoupled or not decay else g + decay * w
            inputs.append((w, g, *(held.read(op) for held in row.slots)))
        columns = list(zip(*inputs, strict=True))
        updated = [columns[0], *columns[2:]]  # all but the gradients
        scalars = (alike[0].rate(base), step)[: len(updated)]
        results = call_kernel(op, model, kernel[0], scalars, columns, updated, **kernel[1])
        yield from zip(alike, zip(*results, strict=True), strict=True)


def check_optimizer(optimizer: object, where: str) -> None:
    """Raise an error unless an option is an optimizer or None."""
    if optimizer is not None and not isinstance(optimizer, Optimizer):
        raise GraphoptError(f"{where}: expected an optimizer such as passes.AdamW(), found {kind_of(optimizer)}")


def read_at(op: Emitter, w: Value, point: Value) -> None:
    """Make all readers of a parameter so far read `point` in its place in training, but not in inference."""
    made = ancestors([point])
    uses = [(user, index) for user, index in w.uses() if user not in made]
    read = op.cast(point, w.dtype)
    for x in (point, read):
        InferenceForm(same_as=0).write(x)
    redirect(uses, read)


def call_kernel(
    op: Emitter,
    model: ir.Model,
    op_type: str,
    scalars: Sequence[Value],
    columns: Sequence[Sequence[Value]],
    updated: Sequence[Sequence[Value]],
    **attributes: float,
) -> list[list[Value]]:
    """Emit a kernel of onnxruntime-training that updates all tensors of a step at once; return those of its outputs.

    It updates in place. SequenceConstruct copies its inputs, so that the buffers of the state do not change.

    Args:
        scalars: the first inputs. The first output of a kernel that has any is a flag that it has run.
        columns: the tensors of the other inputs, each of which is a sequence of float32 tensors.
        updated: the columns that the kernel updates and returns.
    """
    for x in (x for column in columns for x in column):
        if x.dtype != ir.DataType.FLOAT:
            raise GraphoptError(
                f"fused: {op_type} of onnxruntime-training expects float32, found {x.name!r} of {x.dtype}: set "
                f"fused=False"
            )
    needs_training_runtime(model)
    sequences = [op.SequenceConstruct(*column) for column in columns]
    count = bool(scalars) + len(updated)
    node = ir.node(op_type, [*scalars, *sequences], attributes, domain=MICROSOFT, num_outputs=count)
    model.graph.append(node)
    results = []
    for sequence, column in zip(node.outputs[-len(updated) :], updated, strict=True):
        sequence.type = ir.SequenceType(ir.TensorType(ir.DataType.FLOAT))
        results.append([like(op.SequenceAt(sequence, i), x) for i, x in enumerate(column)])
    return results

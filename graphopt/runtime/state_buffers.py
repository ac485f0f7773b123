"""Hold the state and hyperparameters of a training graph in buffers on a device."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from math import isfinite
from typing import TYPE_CHECKING, Any, NoReturn

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, unknown
from graphopt.graph.emitter import Emitter
from graphopt.graph.opsets import IR_VERSION, OPSET
from graphopt.graph.roles import STATE, Role, with_role
from graphopt.graph.state import ACCUMULATED, LEARNING_RATE, LOSS_SCALE, accumulators, take_initial
from graphopt.graph.values import name_of, state_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.runtime.signature import InputSpec
from graphopt.runtime.tensors import (
    Allocate,
    OrtValues,
    Tensor,
    allocated,
    buffer,
    buffers,
    is_finite,
    number_or_array,
    overwrite,
)
from graphopt.targets.check import not_finite

if TYPE_CHECKING:
    import onnxruntime


class Copies(dict[str, Any]):
    """Hold what an executor has by name, and refuse to be changed, which would not change the executor.

    Args:
        setter: the method of an executor that changes it, as it is called.
    """

    def __init__(self, values: Mapping[str, object], setter: str) -> None:
        super().__init__(values)
        self._setter = setter
        for x in values.values():
            if isinstance(x, np.ndarray):
                x.flags.writeable = False

    def _refuse(self, *given: object, **named: object) -> NoReturn:
        raise GraphoptError(
            f"expected no change of a copy, which would not change the executor, found one: write "
            f"executor.{self._setter}, or copy the values, dict(...)"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[object, ...]:
        return dict, (dict(self),)


class StateBuffers:
    """Hold hyperparameters and two sets of state: a step reads the `current` set and writes the other.

    Args:
        model: a training graph, from which the initial values are removed.
        allocate: returns memory for floating-point state on the CPU.
    """

    def __init__(self, device: Device, model: ir.Model, allocate: Allocate = allocated) -> None:
        initial = take_initial(model)
        names = {name_of(x) for x in with_role(model, *STATE)}
        state = {name: array for name, array in initial.items() if name in names}
        self._inputs = {name_of(x): InputSpec(x) for x in model.graph.inputs if x.name in initial}
        self._device, self.allocate = device, allocate
        # The names of state that is not finite at first, of which the checks of steps on GPUs know.
        self.infinite = set() if device.machine.in_host_memory else not_finite(state)
        first, memory = buffers(device, state, allocate)
        self.sets = (first, first)
        self._are_finite = [_finite_check(device, first, memory)] * 2  # of all numbers in each set
        self.updated = {state_of(y) for y in with_role(model, Role.NEXT)} & first.keys()
        self._double({name: array for name, array in state.items() if name in self.updated})
        scaled = LOSS_SCALE in names  # with a loss scale, the step discards gradients that overflow
        self._may_overflow = {name_of(x) for x in accumulators(model) if scaled and x.name != ACCUMULATED}
        self.current = self.batches = 0  # the set to read, and the number of batches that trained
        self.version = 0  # a number of the state at hand, which grows when it changes
        fed = {name: array for name, array in initial.items() if name not in names}
        self.fed = {name: buffer(device, array) for name, array in fed.items()}
        self.hyperparameters: dict[str, Any] = {}
        self._note({name: number_or_array(np.array(array)) for name, array in fed.items()})

    def _double(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Give part of the state two buffers, and the rest one."""
        first = self.sets[0]
        second, memory = buffers(self._device, arrays, self.allocate)
        self.sets = (first, first | second)
        self._are_finite = [self._are_finite[0], _finite_check(self._device, second, memory)]

    def share(self, names: Collection[str]) -> None:
        """Give state one buffer, which a step reads and writes in place. Bindings from before are for two buffers."""
        first, second = self.sets
        left = {name: x.numpy() for name, x in second.items() if x is not first[name] and name not in names}
        if names and len(left) < sum(x is not first[name] for name, x in second.items()):
            self._double(left)
            shared, own = self._are_finite
            self._are_finite[1] = lambda: shared() and own()

    def separate(self) -> None:
        """Give all state that steps update two buffers again. Bindings from before are for one buffer."""
        first = self.sets[0]
        self._double({name: first[name].numpy() for name in first if name in self.updated})

    def advance(self, reported: Mapping[str, Tensor], is_checked: bool = False, batches: int = 1) -> str | None:
        """Make the next step read the set that the last one wrote, unless numbers are not finite; then say which.

        Args:
            reported: what the step reports; without the loss, nothing is checked.
            is_checked: whether the step itself found the new state to be finite.
            batches: the number of batches of the step.
        """
        loss = reported.get("loss")
        if loss is not None:
            if not (isfinite(loss) if isinstance(loss, float) else is_finite(loss)):
                return f"expected a finite loss, found {loss}"
            if not (is_checked or self._are_finite[1 - self.current]()) and (name := self.spoiled()):
                return f"expected finite numbers in state {name!r}, found others, though the loss is finite"
        self.current ^= 1
        self.version += 1
        self.batches += batches
        return None

    def spoiled(self) -> str | None:
        """Return the name of a state that the last step has made infinite or NaN, or None.

        A state that was already non-finite before the step does not count.
        """
        if self._are_finite[1 - self.current]():
            return None
        before, after = self.sets[self.current], self.sets[1 - self.current]
        for name, value in after.items():
            if name in self._may_overflow:
                continue
            wrong = ~np.isfinite(value.numpy())
            if wrong.any() and (value is before[name] or (wrong & np.isfinite(before[name].numpy())).any()):
                return name
        return None

    def read(self) -> dict[str, onnxruntime.OrtValue]:
        """Return the state and the hyperparameters for an evaluation to read."""
        return {**self.sets[self.current], **self.fed}

    @property
    def names(self) -> list[str]:
        return list(self.sets[0])

    def arrays(self, names: Iterable[str] | None = None) -> dict[str, np.ndarray]:
        """Return copies of the state, or of part of it, by name."""
        buffers = self.sets[self.current]
        return {name: np.array(buffers[name].numpy()) for name in (buffers if names is None else names)}

    def update(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Replace part of the state by name. If `check` rejects an array, nothing is replaced."""
        self.check(arrays)
        buffers = self.sets[self.current]
        for name, array in arrays.items():
            overwrite(self._device, buffers[name], np.asarray(array, self._inputs[name].dtype))
        self.version += 1

    def check(self, arrays: Mapping[str, np.ndarray]) -> None:
        """Raise an error unless arrays are part of the state by name and have the right types and shapes."""
        for name, array in arrays.items():
            if name not in self._inputs or name in self.fed:
                raise GraphoptError(f"state {name!r}: unknown; the graph has {', '.join(self.names)}")
            array = np.asarray(array)
            self._inputs[name].check_type(array.dtype, array.shape)

    def check_hyperparameters(self, values: Mapping[str, object]) -> None:
        """Raise an error unless values are of hyperparameters, have their types and shapes, and are valid numbers."""
        for name, value in values.items():
            if name not in self.hyperparameters:
                raise GraphoptError(unknown("hyperparameter", name, self.hyperparameters))
            array, accepted = np.asarray(value), self._inputs[name]
            if array.dtype.kind in "USO":
                raise GraphoptError(f"hyperparameter {name!r}: expected a number, found {value!r}")
            accepted.check_type(array.dtype, array.shape)
            number = np.asarray(value, accepted.dtype)
            if not np.isfinite(number).all() or (name.endswith(LEARNING_RATE) and (number < 0).any()):
                least = ", 0 or more" if name.endswith(LEARNING_RATE) else ""
                raise GraphoptError(f"hyperparameter {name!r}: expected a finite number{least}, found {value}")

    def feed(self, values: Mapping[str, object]) -> None:
        """Replace hyperparameters. If a value is invalid, nothing is replaced, and an error is raised."""
        self.check_hyperparameters(values)
        for name, value in values.items():
            if self.hyperparameters[name] is not value:
                array = np.asarray(value, self._inputs[name].dtype)
                overwrite(self._device, self.fed[name], array)
                self._note({name: number_or_array(np.array(array))})

    def _note(self, values: Mapping[str, object]) -> None:
        self.hyperparameters = Copies({**self.hyperparameters, **values}, "set_hyperparameters(name=value)")


# A dot product that overflows is the answer of a check; to tell NumPy so in each step takes half a microsecond.
warnings.filterwarnings("ignore", "(overflow|invalid value) encountered in dot", RuntimeWarning, __name__)


def _finite_check(device: Device, values: OrtValues, memory: Sequence[np.ndarray]) -> Callable[[], bool]:
    """Return a function that says whether all numbers in buffers are finite, by one sum.

    The sum is finite only if all numbers are, but it may also overflow. On the CPU, it is the dot product of the
    buffers' memory with itself, in parts for which OpenBLAS wakes no second thread, which would spin between steps.
    """
    if device.machine.in_host_memory:
        parts = [part for flat in memory for part in np.array_split(flat, _parts(flat))]
        if len(parts) == 1:
            # The function `vdot` takes half as long again, and so does a new number for each sum.
            whole, total = parts[0], np.zeros((), parts[0].dtype)
            dot = whole.dot
            return lambda: isfinite(dot(whole, total))
        return lambda: all([isfinite(part.dot(part)) for part in parts])
    model, floating = _summed(values)
    session = functools.cache(lambda: Session(device, model))  # most steps check their new state themselves
    return lambda: isfinite(session().compute(floating)["total"].numpy())


def _parts(flat: np.ndarray) -> int:
    """Return the number of parts whose dot products run in one thread: OpenBLAS shares float64 from 10,000 numbers."""
    return -(-flat.size // 8192) if flat.dtype == np.float64 else 1


def _summed(values: OrtValues) -> tuple[ir.Model, dict[str, onnxruntime.OrtValue]]:
    """Return a graph whose output `total` is the sum of all floating-point buffers, and these buffers."""
    typed = {name: ir.DataType(value.element_type()) for name, value in values.items()}
    floating = {name: values[name] for name, dtype in typed.items() if dtype.is_floating_point()}
    inputs = [
        ir.Value(name=name, type=ir.TensorType(typed[name]), shape=ir.Shape(value.shape()))
        for name, value in floating.items()
    ]
    model = ir.Model(ir.Graph(inputs, [], nodes=[], opset_imports={"": OPSET}), ir_version=IR_VERSION)
    with Emitter(model) as op:
        sums = [op.ReduceSum(op.Cast(x, to=ir.DataType.FLOAT), keepdims=0) for x in inputs]
        model.graph.outputs.append(op.Identity(functools.reduce(op.Add, sums, op.constant(0.0)), _outputs=["total"]))
    return model, floating

"""Check fed tensors against the inputs of a graph, and choose the outputs that a step reports."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from graphopt.errors import GraphoptError, kind_of
from graphopt.graph.metadata import ON_DEMAND
from graphopt.graph.roles import Role, check_trains, labels_of, role_of
from graphopt.graph.values import dtype_of, is_floating, name_of
from graphopt.runtime.device import Device
from graphopt.runtime.tensors import Tensor, on_host, to_ort

if TYPE_CHECKING:
    import onnxruntime

Description = list[tuple[str, object, object]]  # of tensors: names, shapes and types
Dimension = tuple[str, list[tuple[str, int]]]  # a name, and the inputs and axes that share the dimension


def shared_dimensions(values: Iterable[ir.Value]) -> list[Dimension]:
    """Return the symbolic dimensions that several inputs share, each with its inputs and axes."""
    places: dict[str, list[tuple[str, int]]] = {}
    for value in values:
        for axis, dim in enumerate(value.shape or ()):
            if not isinstance(dim, int) and dim.value is not None:
                places.setdefault(dim.value, []).append((name_of(value), axis))
    return [(dimension, axes) for dimension, axes in places.items() if len(axes) > 1]


def check_shared(dimensions: Iterable[Dimension], shapes: Mapping[str, Sequence[int]]) -> None:
    """Raise an error unless each shared dimension has the same size in all inputs in `shapes`."""
    for dimension, places in dimensions:
        sizes = {name: shapes[name][axis] for name, axis in places if name in shapes}
        if len(set(sizes.values())) > 1:
            found = ", ".join(f"{size} in {name!r}" for name, size in sizes.items())
            mend = _together(dict(places), sizes)
            raise GraphoptError(f"dimension {dimension!r}: expected one size in all inputs, found {found}{mend}")


def _together(axes: Mapping[str, int], sizes: Mapping[str, int]) -> str:
    """Return what to do about inputs whose rows a loss of pairs puts through the model together."""
    for name, size in sizes.items():
        for other in sizes:
            if other.startswith(f"{name}_") and sizes[other] != size:
                pad = "pad them to one size, and mask the padding" if axes[name] else "give each example a row in both"
                return f": the rows of {name!r} and {other!r} go through the model together: {pad}"
    return ""


class InputSpec:
    """Hold the element type and shape that an input accepts; errors name the input by `kind` and name."""

    def __init__(self, value: ir.Value, kind: str = "input") -> None:
        self.name, self._kind = value.name, kind
        self.dtype = np.dtype(dtype_of(value).numpy())
        self._dims, self._text = tuple(value.shape or ()), str(value.shape)
        sizes = tuple(d if isinstance(d, int) else None for d in self._dims)
        self.shape = None if value.shape is None else sizes
        self._fixes = role_of(value) is Role.TARGET and any(d is None for d in self.shape or ())

    def __str__(self) -> str:
        return f"{self._kind} {self.name!r}"

    def widens(self, tensor: Tensor) -> bool:
        """Return whether a tensor is an array of integers that fit into the input's larger ones."""
        return (
            isinstance(tensor, np.ndarray)
            and tensor.dtype.kind in "iu"
            and self.dtype.kind == "i"
            and tensor.dtype != self.dtype
            and np.can_cast(tensor.dtype, self.dtype)
        )

    def zeros(self, sizes: Mapping[str | None, int]) -> np.ndarray:
        """Return zeros of the input's type and shape; a dimension that is not in `sizes` is 1."""
        return np.zeros([d if isinstance(d, int) else sizes.get(d.value, 1) for d in self._dims], self.dtype)

    def converted(self, device: Device, tensor: Tensor) -> onnxruntime.OrtValue:
        """Return a tensor as a value of ONNX Runtime.

        Raises:
            GraphoptError: it is not a tensor, or has the wrong type or shape.
        """
        try:
            value = to_ort(device, tensor, self.dtype)
        except GraphoptError as error:
            raise GraphoptError(f"{self}: {error}") from error
        self.check_type(np.dtype(ir.DataType(value.element_type()).numpy()), value.shape())
        return value

    def check_type(self, dtype: np.dtype[np.generic], shape: Sequence[int]) -> None:
        """Raise an error unless an element type and a shape are right; a scalar may have any type."""
        if dtype != self.dtype and self.shape != ():
            raise GraphoptError(f"{self}: expected {self.dtype}, found {dtype}: convert it with .astype")
        if self.shape is None:
            return
        sizes = zip(self.shape, shape, strict=False)
        wrong = [axis for axis, (want, have) in enumerate(sizes) if want not in (None, have)]
        if len(self.shape) != len(shape) or wrong:
            hint = ""
            if self._fixes and len(self.shape) == len(shape):  # exporters that unroll a loop fix a size
                size = f"{self.shape[wrong[0]]} along axis {wrong[0]}"
                hint = f": the model computes {size} for every size of its inputs"
            raise GraphoptError(f"{self}: expected shape {self._text}, found {list(shape)}{hint}")


class Signature:
    """Check tensors for inputs by name: element types, shapes, shared dimensions and labels."""

    def __init__(self, device: Device, values: Sequence[ir.Value]) -> None:
        self._device, self._values = device, values
        self.accepted = {name_of(x): InputSpec(x) for x in values}
        self._unread = [
            name_of(x) for x in values if role_of(x) is Role.DATA and not x.uses() and not x.is_graph_output()
        ]
        self._shared = shared_dimensions(values)
        self.labels = {name_of(x): labels for x in values if (labels := labels_of(x)) is not None}

    def completed(self, tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Return tensors with integers in the type of their input, and with zeros for inputs that nothing reads."""
        if not isinstance(tensors, Mapping):
            names = ", ".join(f"{name!r}: ..." for name in self.accepted)
            raise GraphoptError(f"batch: expected arrays by name, {{{names}}}, found {kind_of(tensors)}")
        widened = {
            name: tensor.astype(self.accepted[name].dtype)
            for name, tensor in tensors.items()
            if name in self.accepted and self.accepted[name].widens(tensor)
        }
        missing = [name for name in self._unread if name not in tensors]
        if not widened and not missing:
            return tensors
        sizes = {
            dim.value: tensors[name_of(x)].shape[axis]
            for x in self._values
            if len(getattr(tensors.get(name_of(x)), "shape", ())) == len(x.shape or ())
            for axis, dim in enumerate(x.shape or ())
            if not isinstance(dim, int)
        }
        zeros = {name: self.accepted[name].zeros(sizes) for name in missing}
        return {**tensors, **widened, **zeros}

    def check(self, tensors: Mapping[str, Tensor], needed: Collection[str] | None = None) -> dict[str, Sequence[int]]:
        """Return the shapes of tensors.

        Args:
            needed: the names of values among which are the inputs that must be there; all by default.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type or shape.
        """
        for name in tensors:
            if name not in self.accepted:
                raise GraphoptError(f"input {name!r}: unknown; the graph takes {', '.join(self.accepted)}")
        shapes: dict[str, Sequence[int]] = {}
        for name, tensor in tensors.items():
            if isinstance(tensor, np.ndarray):
                self.accepted[name].check_type(tensor.dtype, tensor.shape)
                shapes[name] = tensor.shape
            else:
                shapes[name] = tuple(self.accepted[name].converted(self._device, tensor).shape())
        for name in self.accepted:
            if name not in tensors and (needed is None or name in needed):
                raise GraphoptError(f"input {name!r}: missing; found {', '.join(tensors) or 'nothing'}")
        check_shared(self._shared, shapes)
        return shapes

    def arrays(self, tensors: Mapping[str, Tensor]) -> dict[str, np.ndarray]:
        """Return tensors as arrays of the types that the inputs have."""
        arrays: dict[str, np.ndarray] = {}
        for name, x in tensors.items():
            dtype = self.accepted[name].dtype
            array = x if isinstance(x, np.ndarray) else to_ort(self._device, x, dtype).numpy()
            arrays[name] = np.asarray(array, dtype)  # a scalar may have another type
        return arrays

    def check_labels(self, tensors: Mapping[str, Tensor]) -> None:
        """Raise an error if labels in host memory are invalid for the loss."""
        for name, labels in self.labels.items():
            array = on_host(self._device, tensors[name]) if name in tensors else None
            if array is not None and not labels.fit(array):
                label = array[labels.wrong(array)][0]
                raise GraphoptError(f"input {name!r}: expected {labels}, found {label}")


def description(tensors: Mapping[str, Tensor]) -> Description:
    """Return the names, shapes and types of tensors."""
    return [(name, getattr(x, "shape", None), getattr(x, "dtype", None)) for name, x in tensors.items()]


class Seen:
    """Recognize tensors that are like those that were checked last: their names, shapes and types are equal."""

    def __init__(self) -> None:
        self._facts: Description | None = None

    def __contains__(self, tensors: Mapping[str, Tensor]) -> bool:
        return self._facts == description(tensors)

    def add(self, tensors: Mapping[str, Tensor]) -> Description:
        """Take tensors for checked, and return their description."""
        self._facts = description(tensors)
        return self._facts


def reportable(model: ir.Model) -> list[str]:
    """Return the names of the outputs of a training graph that are not state, `loss` first."""
    return [name_of(y) for y in model.graph.outputs if role_of(y) not in (Role.NEXT, Role.SOURCE)]


def chosen_outputs(model: ir.Model, report: Sequence[str] | None) -> list[str]:
    """Return the names of the outputs to report: those of `report` and the loss, or all that need not be named.

    Raises:
        GraphoptError: the graph has no state to update, or no output with one of the names.
    """
    check_trains(model, "executor")
    if isinstance(report, str) or not isinstance(report, Iterable | None):
        raise GraphoptError(f"report: expected names of outputs, found {report!r}: give a list, such as ['loss']")
    names = reportable(model)
    unknown = [name for name in report or () if name not in names]
    if unknown:
        raise GraphoptError(f"report: unknown outputs {unknown}; the graph has {', '.join(names)}")
    if report is None:
        waiting = {y.name for y in model.graph.outputs if ON_DEMAND.is_set(y)}
        return [name for name in names if name not in waiting]
    return [name for name in names if name in report or (report and name == "loss")]


def reporting(model: ir.Model, names: Sequence[str]) -> ir.Model:
    """Return a training graph, or a half of one, without the nodes that only compute unreported outputs."""
    if names == reportable(model):
        return model
    model = model.clone()
    always = (Role.NEXT, Role.GRADIENT, Role.SAVED, Role.SUMMED)
    model.graph.outputs[:] = [y for y in model.graph.outputs if role_of(y) in always or y.name in names]
    RemoveUnusedNodesPass()(model)
    return model


def numbers(outputs: Iterable[ir.Value], report: Sequence[str]) -> list[str]:
    """Return which of the reported outputs are floating-point numbers, of which workers take means."""
    floats = {y.name for y in outputs if y.shape == () and is_floating(y)}
    return [name for name in report if name in floats]

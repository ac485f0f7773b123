"""Hold the results of a layer's forward and backward passes by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import GraphoptError, unknown
from graphopt.runtime.tensors import OrtValues, Tensor

if TYPE_CHECKING:
    pass


class Values(Mapping[str, np.ndarray]):
    """Hold arrays by name. Each is fetched from the device on access; on the CPU, without a copy."""

    def __init__(self, values: OrtValues, copied: Collection[str] = ()) -> None:
        self._values, self._copied = values, copied

    def __getitem__(self, name: str) -> np.ndarray:
        array: np.ndarray = self._values[name].numpy()
        return array.copy() if name in self._copied else array

    def __iter__(self) -> Iterator[str]:
        return iter(self._values)

    def __len__(self) -> int:
        return len(self._values)

    @property
    def on_device(self) -> dict[str, Any]:
        """Return ONNX Runtime's own values on the device, for `from_dlpack` of PyTorch, NumPy and JAX."""
        return {name: value._get_c_value() for name, value in self._values.items()}


class Forward(Values):
    """Hold a model's outputs by name; after a forward pass in training, run its backward pass."""

    def __init__(
        self,
        values: OrtValues,
        copied: Collection[str] = (),
        backward: Callable[[dict[str, Tensor]], Values] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        super().__init__(values, copied)
        self._backward, self._lock = backward, lock or threading.RLock()

    def backward(self, *gradients: Tensor, **named: Tensor) -> Values:
        """Return the gradients with respect to inputs and parameters by name, and release the saved values.

        Args:
            gradients: the objective's gradients with respect to the outputs: one mapping by name, or tensors in
                order. Omitted gradients and None count as zero.
            named: these gradients by name.

        Raises:
            GraphoptError: a gradient is unknown or has the wrong type or shape, and you can call `backward` again; or
                nothing was saved, because the forward pass was not in training or already had its backward pass.
        """
        with self._lock:
            if self._backward is None:
                raise GraphoptError(
                    "backward: expected a forward pass in training without a backward pass so far, found nothing "
                    "saved: run forward again"
                )
            values = self._backward(by_name(gradients, named, list(self), "gradient of output"))
            self._backward = None
        return values


def by_name(
    args: Sequence[Tensor], named: Mapping[str, Tensor], names: Sequence[str], kind: str
) -> dict[str, Tensor]:
    """Return tensors by name; the caller may give them by name or in order."""
    if len(args) == 1 and isinstance(args[0], Mapping):
        tensors = dict(args[0])
    elif len(args) <= len(names):
        tensors = dict(zip(names, args, strict=False))
    else:
        raise GraphoptError(f"{kind}: expected at most {len(names)} ({', '.join(names)}), found {len(args)}")
    tensors |= named
    for name in tensors:
        if name not in names:
            raise GraphoptError(unknown(kind, name, names))
    return tensors

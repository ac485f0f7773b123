"""What a layer's forward and backward passes return, by name."""

from __future__ import annotations

import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from graphopt.errors import GraphoptError, unknown
from graphopt.runtime.tensors import Tensor

if TYPE_CHECKING:
    import onnxruntime


class Values(Mapping[str, np.ndarray]):
    """Hold arrays by name; each is taken from the device when it is asked for, on the CPU without a copy."""

    def __init__(self, values: Mapping[str, onnxruntime.OrtValue], copied: Collection[str] = ()) -> None:
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
        """The values where they lie: ONNX Runtime's own, which PyTorch, NumPy and JAX take by `from_dlpack`."""
        return {name: value._get_c_value() for name, value in self._values.items()}


class Forward(Values):
    """Hold a model's outputs by name, and, of a forward pass in training, the way back."""

    def __init__(
        self,
        values: Mapping[str, onnxruntime.OrtValue],
        copied: Collection[str] = (),
        back: Callable[[dict[str, Tensor]], Values] | None = None,
        lock: threading.RLock | None = None,
    ) -> None:
        super().__init__(values, copied)
        self._back, self._lock = back, lock or threading.RLock()

    def backward(self, *gradients: Tensor, **named: Tensor) -> Values:
        """Return the gradients by the inputs and the parameters, by name, and let go of what was saved for them.

        Args:
            gradients: of the objective by the outputs: a mapping by name, or one after the other; those that are left
                out or None are zero.
            named: the same by name.

        Raises:
            GraphoptError: a gradient is unknown, or of another type or shape than its output, and the way back stays
                open; or there is none: this was no forward pass in training, or had its backward.
        """
        with self._lock:
            if self._back is None:
                raise GraphoptError(
                    "backward: expected a forward pass in training that had no backward yet, found nothing saved: "
                    "run forward again"
                )
            found = self._back(by_name(gradients, named, list(self), "gradient of output"))
            self._back = None
        return found


def by_name(
    given: Sequence[Tensor], named: Mapping[str, Tensor], names: Sequence[str], kind: str
) -> dict[str, Tensor]:
    """Return tensors by name, which are given by name or one after the other."""
    if len(given) == 1 and isinstance(given[0], Mapping):
        found = dict(given[0])
    elif len(given) <= len(names):
        found = dict(zip(names, given, strict=False))
    else:
        raise GraphoptError(f"{kind}: expected at most {len(names)} ({', '.join(names)}), found {len(given)}")
    found |= named
    for name in found:
        if name not in names:
            raise GraphoptError(unknown(kind, name, names))
    return found

"""Draw batches from any Python iterable, check them, and continue in the middle of it, by its state as JSON."""

from __future__ import annotations

import base64
import importlib
import itertools
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.data.loader import Batches
from graphopt.errors import GraphoptError, kind_of, line, naming
from graphopt.graph.roles import Role, role_of

STATE_METHODS = (("state_dict", "load_state_dict"), ("get_state", "set_state"))  # of torchdata, and of grain
_PLAIN = (bool, int, float, str, type(None))
_END: object = object()  # of a pass


class Drawn(NamedTuple):
    """Hold a batch, the number of its rows, and the position after it, if a stream keeps positions."""

    rows: int
    arrays: dict[str, np.ndarray]
    position: object = None


class Stream:
    """Draw the batches of epochs from an iterable, and check each as `Batches` does.

    An item is a batch: a mapping from the names of the graph's inputs to arrays, tensors or lists whose first axis is
    the rows, or (X, y) for a graph of one input and one target. An epoch is one pass over the iterable, or `steps`
    batches; passes then follow one another, and an epoch begins where the one before ended. If the iterable has
    `set_epoch`, it is called before each pass.

    A position is JSON. The data continue from it if the iterable, or an iterator of it, has `state_dict` and
    `load_state_dict`, or `get_state` and `set_state`.

    Args:
        data: the iterable.
        inputs: the inputs of the graph, by name: `Executor.inputs`.
        allow_nan: accept NaN and infinities.
        steps: the number of batches of an epoch; None for one pass.
        keep_positions: return the position after each batch.

    Raises:
        GraphoptError: the data is no iterable, or `steps` is less than 1.
    """

    def __init__(
        self,
        data: Iterable[object],
        inputs: Mapping[str, ir.Value],
        *,
        allow_nan: bool = False,
        steps: int | None = None,
        keep_positions: bool = False,
    ) -> None:
        if not isinstance(data, Iterable) or isinstance(data, str | bytes):
            raise GraphoptError(
                f"data: expected (X, y), arrays by name, a data set or an iterable of batches, found {kind_of(data)}"
            )
        if steps is not None and steps < 1:
            raise GraphoptError(f"steps_per_epoch: expected 1 or more, found {steps}")
        self.name = type(data).__name__
        self.reads_state = bool(getattr(data, "reads_state", False))  # of the executor that trains on it
        self.passes = 0  # that have ended
        self.end: object = None  # the position after the last batch of an epoch
        self._data, self._inputs, self._allow_nan = data, inputs, allow_nan
        self._steps, self._keep_positions = steps, keep_positions
        self._pass: Iterator[object] | None = None
        self._epoch: Iterator[Drawn] | None = None  # what is left after `peek`
        self._done = 0  # batches of the epoch before `load`

    @property
    def steps(self) -> int | None:
        """Return the number of batches of an epoch, or None if the iterable does not tell."""
        if self._steps is not None:
            return self._steps
        try:
            return len(self._data)  # type: ignore[arg-type]
        except (TypeError, NotImplementedError):  # as PyTorch's samplers say it
            return None

    def draw(self, epoch: int) -> Iterator[Drawn]:
        """Yield the batches of an epoch, or those that are left of it.

        Raises:
            GraphoptError: a batch does not fit the graph, or the iterable has none.
        """
        yield from self._epoch or self._batches(epoch)
        self._epoch = None

    def peek(self, epoch: int) -> Iterator[Drawn]:
        """Yield the batches that `draw` will yield."""
        self._epoch, ahead = itertools.tee(self._epoch or self._batches(epoch))
        return ahead

    def __iter__(self) -> Iterator[Drawn]:
        """Yield the batches of one pass."""
        number = 0
        for number, item in enumerate(self._data, 1):
            yield self._checked(item, f"batch {number}")
        if not number:
            raise self._used_up("")

    def load(self, position: Any) -> bool:
        """Continue from a position; return False if the data has no state, so that it starts over."""
        self._done, self.passes = position["batches"], position["passes"]
        is_within = bool(self._done) or self._steps is not None
        if position["state"] is None:
            return not is_within
        if is_within and position["of"] == "iterator":
            self._pass = self._begin()
            _state_methods(self._pass)[1](decoded(position["state"]))
        elif position["of"] == "iterable":
            _state_methods(self._data)[1](decoded(position["state"]))
            self._pass = self._begin() if is_within else None
        return True

    def _batches(self, epoch: int) -> Iterator[Drawn]:
        done, self._done = self._done, 0
        while self._steps is None or done < self._steps:
            is_new = self._pass is None
            if self._pass is None:
                self._pass = self._begin()
            item = next(self._pass, _END)
            if item is not _END:
                done += 1
                checked = self._checked(item, f"epoch {epoch}, batch {done}")
                yield checked._replace(position=self._position(done))
                continue
            if is_new:
                raise self._used_up(f" in epoch {epoch}")
            self._pass = None
            self.passes += 1
            if self._steps is None:
                break
        self.end = self._position(0)

    def _begin(self) -> Iterator[object]:
        if hasattr(self._data, "set_epoch"):
            self._data.set_epoch(self.passes)
        return iter(self._data)

    def _position(self, done: int) -> object:
        """Return where the data is after a number of batches of the epoch."""
        if not self._keep_positions:
            return None
        position = {"batches": done, "passes": self.passes, "of": None, "state": None}
        for of, source in (("iterator", self._pass), ("iterable", self._data)):
            if methods := _state_methods(source):
                return {**position, "of": of, "state": encoded(methods[0]())}
        return position

    def _checked(self, item: object, where: str) -> Drawn:
        """Return a batch in the graph's types, or raise an error that says which one does not fit."""
        with naming(where):
            if isinstance(item, tuple | list) and len(item) == len(self._inputs) == 2:  # (X, y), as of a DataLoader
                item = dict(zip(sorted(self._inputs, key=self._is_target), item, strict=True))
            if not isinstance(item, Mapping):
                names = ", ".join(f"{name!r}: ..." for name in self._inputs)
                raise GraphoptError(
                    f"data: expected a dict of arrays by name, found {kind_of(item)}: yield {{{names}}}"
                )
            arrays = {name: _copied_array(name, value) for name, value in item.items()}
            batches = Batches(arrays, self._inputs, allow_nan=self._allow_nan)
            rows = len(batches)
            if batches.fixed_size not in (None, rows):
                raise GraphoptError(
                    f"data: expected {batches.fixed_size} rows, the batch of the model, found {rows}: drop an "
                    "incomplete last batch, or free the batch by passes.Normalize(batch='free')"
                )
            return Drawn(rows, batches.take(range(rows)))

    def _is_target(self, name: str) -> bool:
        return role_of(self._inputs[name]) is Role.TARGET

    def _used_up(self, where: str) -> GraphoptError:
        mend = (
            "an iterator is used up after one pass: give an object whose __iter__ begins a new one"
            if iter(self._data) is self._data
            else "give an iterable that is not empty"
        )
        return GraphoptError(f"data: expected batches{where}, found none in {self.name}: {mend}")


def _state_methods(source: object) -> Sequence[Any]:
    """Return the methods of an iterable that get and set its state, if it has any."""
    pairs = ([getattr(source, name, None) for name in names] for names in STATE_METHODS)
    return next((pair for pair in pairs if all(map(callable, pair))), ())


def _copied_array(name: object, value: object) -> np.ndarray:
    """Return a copy of an array, a tensor or a list: an iterable may change what it has yielded."""
    try:
        array = np.asarray(value).copy()
    except (TypeError, ValueError, RuntimeError) as error:
        raise GraphoptError(
            f"data {name!r}: expected an array, found a {type(value).__name__}: {line(error)}"
        ) from error
    if array.ndim == 0:
        raise GraphoptError(
            f"data {name!r}: expected an array whose first axis is the rows of a batch, found one "
            f"{type(value).__name__}: yield batches, such as those of .batch(32)"
        )
    return array


def encoded(state: Any, path: str = "state") -> Any:
    """Return a state as JSON: plain values and lists as they are, all else as an object whose only key is the type.

    Args:
        state: plain values, bytes, NumPy arrays and PyTorch tensors in lists, tuples and dicts.

    Raises:
        GraphoptError: the state contains another type.

    >>> from graphopt.data.streams import decoded, encoded
    >>> encoded({"position": (3, b"ab")})
    {'dict': [['position', {'tuple': [3, {'bytes': 'YWI='}]}]]}
    >>> decoded(encoded({"position": (3, b"ab")}))
    {'position': (3, b'ab')}
    """
    kind = type(state)
    if kind in _PLAIN:
        return state
    if kind is dict:
        return {"dict": [[encoded(key, path), encoded(x, f"{path}[{key!r}]")] for key, x in state.items()]}
    if kind in (list, tuple):
        values = [encoded(value, f"{path}[{i}]") for i, value in enumerate(state)]
        return values if kind is list else {"tuple": values}
    if kind is bytes:
        return {"bytes": base64.b64encode(state).decode()}
    is_tensor = kind.__module__ == "torch" and kind.__name__ == "Tensor"
    if is_tensor or isinstance(state, np.ndarray | np.generic):
        array = np.asarray(state)
        if array.dtype.kind in "biufc":
            content = base64.b64encode(array.tobytes()).decode()
            return {"tensor" if is_tensor else "array": [array.dtype.str, list(array.shape), content]}
    raise GraphoptError(
        f"data: {path}: expected numbers, strings, bytes or arrays in lists, tuples and dicts, found {kind.__name__}: "
        "return such a state, which a checkpoint keeps without pickle"
    )


def decoded(state: object) -> Any:
    """Return the state that `encoded` has written."""
    if isinstance(state, list):
        return [decoded(value) for value in state]
    if not isinstance(state, dict):
        return state
    ((kind, value),) = state.items()
    if kind == "dict":
        return {decoded(key): decoded(item) for key, item in value}
    if kind == "tuple":
        return tuple(decoded(item) for item in value)
    if kind == "bytes":
        return base64.b64decode(value)
    dtype, shape, text = value
    array = np.frombuffer(base64.b64decode(text), dtype).reshape(shape).copy()
    return importlib.import_module("torch").from_numpy(array) if kind == "tensor" else array

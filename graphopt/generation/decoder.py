"""Compute the logits of the next token: with a cache of keys and values, or of the whole text each time."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, line, some
from graphopt.graph.loading import load
from graphopt.graph.roles import Role, role_of
from graphopt.graph.values import dims_of, dtype_of, name_of, rank
from graphopt.pipeline import Pipeline
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.executor_state import trained_into
from graphopt.runtime.session import Session
from graphopt.runtime.tensors import Tensor, to_ort

_IDS, _MASK, _POSITIONS = "input_ids", "attention_mask", "position_ids"
_ZERO = ("token_type_ids", "segments", "labels", "completion_mask")
_PLACES = "cache_position"
_USES_CACHE = "use_cache_branch"  # of optimum's merged decoders
_KNOWN = (_MASK, _POSITIONS, *_ZERO, _PLACES, _USES_CACHE)
_LOGITS = "logits"
_PAST = re.compile(r"past(_key_values)?")

_Run = Callable[[dict[str, Any]], Mapping[str, Any]]


class Decoder(ABC):
    """Read texts of one length token by token, and return the logits of the next token of each.

    Attributes:
        most_rows: the number of texts that it reads at once; None for any number.
    """

    most_rows: int | None

    @abstractmethod
    def read(self, tokens: np.ndarray) -> np.ndarray:
        """Return the logits [rows, classes] of the token after tokens [rows, count] and all that were read before."""

    @abstractmethod
    def clear(self, rows: int = 1) -> None:
        """Forget the texts, and begin as many."""

    def put(self, weights: Mapping[str, np.ndarray]) -> None:
        """Compute with other values of slots from now on."""
        raise NotImplementedError


def decoder_of(model: ir.Model | Executor, device: Device, adapter: Path | None = None) -> Decoder:
    """Return a decoder of a model's file, or of the current weights of an executor.

    Raises:
        GraphoptError: the model does not take tokens, or does not return logits.
    """
    if isinstance(model, Executor):
        if adapter is not None:
            raise GraphoptError(
                f"adapter={str(adapter)!r}: expected a model's file beside it, found an executor: leave it out"
            )
        return _Whole(DecoderInputs(x for x in model.inputs.values() if role_of(x) is Role.DATA), model.predict)
    has_slots = any(x.is_initializer() for x in model.graph.inputs)
    if adapter is not None and (adapter.is_dir() or not has_slots):
        model, adapter = _with_adapter(model, adapter), None
    graph = model.graph
    inputs = [x for x in graph.inputs if not x.is_initializer()]
    caches = _caches(inputs, graph.outputs)
    session = _Session(device, model, adapter)
    feeds = DecoderInputs([x for x in inputs if x.name not in caches])
    logits = _logits([y for y in graph.outputs if y.name not in caches.values()])
    if caches:
        pairs = [(x, caches[name_of(x)]) for x in inputs if x.name in caches]
        return _Cached(feeds, session, name_of(logits), pairs)
    return _Whole(feeds, session, name_of(logits))


class _Session:
    """Run a model with an adapter; binding would ignore it."""

    def __init__(self, device: Device, model: ir.Model, adapter: Path | None) -> None:
        self._session, self._device = Session(device, model), device
        self._options = device.ort.RunOptions()
        self.slots: dict[str, object] = {}
        if adapter is not None:
            self._adapter = _adapter(device, adapter)  # the options do not keep it alive
            self._options.add_active_adapter(self._adapter)

    def __call__(self, feeds: dict[str, object]) -> dict[str, object]:
        values = {
            name: to_ort(self._device, x, x.dtype) if isinstance(x, np.ndarray) else x
            for name, x in {**feeds, **self.slots}.items()
        }
        names = self._session.outputs
        try:
            found = self._session.ort.run_with_ort_values(names, values, self._options)
        except RuntimeError as error:
            raise self._session.stopped(error) from error
        except Exception as error:  # of which onnxruntime's own are direct subclasses
            raise GraphoptError(f"onnxruntime: {line(error)}") from error
        return dict(zip(names, found, strict=True))


def _with_adapter(model: ir.Model, adapter: Path) -> ir.Model:
    import passes

    if not adapter.exists():
        raise _missing_adapter(adapter)
    steps = {"normalize": passes.Normalize(), "adapter": passes.LoRA.load(adapter)}
    prepared = Pipeline(**steps, parameters=passes.Parameters())(load(model))
    initial = prepared.graph.initializers.items()
    state = {name: x.const_value.numpy() for name, x in initial if x.const_value is not None}
    return load(trained_into(prepared, state, model, slots=False).message())


def _missing_adapter(path: Path) -> GraphoptError:
    return GraphoptError(f"{path}: expected an adapter, a file such as a.onnx_adapter or a folder of peft, found none")


def _adapter(device: Device, path: Path) -> object:
    """Load an adapter's file of ONNX Runtime."""
    if not hasattr(device.ort, "LoraAdapter"):
        raise GraphoptError(
            f"adapter: expected an ONNX Runtime with adapters, 1.20 or later, found {device.ort.__version__}"
        )
    if not path.is_file():
        raise _missing_adapter(path)
    adapter = device.ort.LoraAdapter()
    try:
        adapter.Load(str(path))
    except Exception as error:  # of which onnxruntime's own are direct subclasses
        raise GraphoptError(f"{path}: expected an adapter of ONNX Runtime: {line(error)}") from error
    return adapter


class DecoderInputs:
    """Make the inputs of a decoder, except its cache."""

    def __init__(self, values: Iterable[ir.Value]) -> None:
        self._values = {name_of(x): x for x in values}
        self.ids = self._ids()
        self.batch, self.length = (dim if isinstance(dim, int) else None for dim in dims_of(self._values[self.ids]))
        for name, x in self._values.items():
            if name not in (self.ids, *_KNOWN):
                raise GraphoptError(
                    f"input {name!r}: expected tokens, {_MASK}, {_POSITIONS} or caches of attention, found {x.dtype} "
                    f"of shape {x.shape}, which generate does not know"
                )

    def _ids(self) -> str:
        whole = [
            name
            for name, x in self._values.items()
            if name not in _KNOWN and x.dtype is not None and x.dtype.is_integer() and rank(x) == 2
        ]
        found = [name for name in whole if name == _IDS] or whole
        if len(found) != 1:
            raise GraphoptError(
                f"model: expected an input of tokens, whole numbers of shape [rows, length], such as {_IDS}, found "
                f"{some([f'{name} {x.dtype} {x.shape}' for name, x in self._values.items()]) or 'none'}"
            )
        return found[0]

    def feeds(self, tokens: np.ndarray, before: int, *, filled: int = 0) -> dict[str, np.ndarray]:
        """Return the inputs for rows of tokens, which follow `before` others; `filled` tokens fill a row up."""
        rows, count = tokens.shape
        if self.batch is not None:
            rows, tokens = self.batch, np.resize(tokens, (self.batch, count))
        places = np.arange(before, before + count + filled)
        made = {
            self.ids: np.pad(tokens, ((0, 0), (0, filled))),
            _MASK: np.arange(self._width(_MASK) or before + count + filled) < before + count,
            _POSITIONS: places,
            _PLACES: places,
            _USES_CACHE: np.array([before > 0]),
            **{name: np.zeros(count + filled) for name in _ZERO},
        }
        return {name: self._as_declared(x, made[name], rows) for name, x in self._values.items()}

    def _width(self, name: str) -> int | None:
        """Return the static length of an input's rows."""
        last = dims_of(self._values[name])[-1] if name in self._values else None
        return last if isinstance(last, int) else None

    def _as_declared(self, x: ir.Value, row: np.ndarray, rows: int) -> np.ndarray:
        """Return rows in the type of an input, or one as often as the batch has rows."""
        array = row.astype(dtype_of(x).numpy())
        if rank(x) == array.ndim:
            return array
        # such as time, height and width
        lead = [dim if isinstance(dim, int) else 1 for dim in dims_of(x)[:-2]]
        return np.tile(array, (*lead, rows if array.ndim == 1 else 1, 1))


class _Whole(Decoder):
    """Compute the logits of a whole text for each token; of a row of fixed length, of its last tokens."""

    def __init__(self, inputs: DecoderInputs, run: _Run, logits: str = _LOGITS) -> None:
        self._inputs, self._run, self._logits = inputs, run, logits
        self.most_rows = inputs.batch
        self.clear()

    def clear(self, rows: int = 1) -> None:
        self._tokens = np.zeros((rows, 0), np.int64)

    def read(self, tokens: np.ndarray) -> np.ndarray:
        self._tokens = np.concatenate([self._tokens, tokens], axis=1)
        length = self._inputs.length
        seen = self._tokens if length is None else self._tokens[:, -length:]
        filled = 0 if length is None else length - seen.shape[1]
        outputs = self._run(self._inputs.feeds(seen, 0, filled=filled))
        name = self._logits if self._logits in outputs else next(iter(outputs))
        return _last(outputs[name], *seen.shape)

    def put(self, weights: Mapping[str, np.ndarray]) -> None:
        _put(self._run, weights)


class _Cached(Decoder):
    """Compute the logits of new tokens by the keys and values of those before."""

    def __init__(self, inputs: DecoderInputs, run: _Run, logits: str, caches: Sequence[tuple[ir.Value, str]]) -> None:
        self._inputs, self._run, self._logits, self._caches = inputs, run, logits, caches
        if inputs.length not in (None, 1):
            raise GraphoptError(
                f"input {inputs.ids!r}: expected one token or any number of them beside a cache, found "
                f"{inputs.length} in each call: export it with a dynamic length"
            )
        self.most_rows = inputs.batch
        self.clear()

    def clear(self, rows: int = 1) -> None:
        self._before, count = 0, self._inputs.batch or rows
        self._past: dict[str, object] = {name_of(x): _empty(x, count) for x, _ in self._caches}

    def read(self, tokens: np.ndarray) -> np.ndarray:
        count = tokens.shape[1]
        parts = [tokens] if self._inputs.length is None else np.split(tokens, count, axis=1)
        for part in parts:
            outputs = self._run({**self._inputs.feeds(part, self._before), **self._past})
            self._past = {name_of(x): outputs[present] for x, present in self._caches}
            self._before += part.shape[1]
        return _last(outputs[self._logits], *part.shape)

    def put(self, weights: Mapping[str, np.ndarray]) -> None:
        _put(self._run, weights)


def _put(run: _Run, weights: Mapping[str, np.ndarray]) -> None:
    assert isinstance(run, _Session)
    run.slots = {**weights}


def _empty(cache: ir.Value, rows: int) -> np.ndarray:
    """Return a cache before any token: no positions where their number is free, otherwise zeros."""
    first, *others = dims_of(cache)
    sizes = [x if isinstance(x, int) else 0 for x in others]
    if len(others) == 3 and not isinstance(others[-1], int):
        sizes[-1] = _head_size(cache)
    return np.zeros([first if isinstance(first, int) else rows, *sizes], dtype_of(cache).numpy())


def _head_size(cache: ir.Value) -> int:
    """Return the numbers of a key or value of one head, which onnxruntime-genai's builder does not declare."""
    for node in cache.consumers():
        heads, shared = (node.attributes.get_int(name, 0) for name in ("num_heads", "kv_num_heads"))
        query, key = (*node.inputs, None, None)[:2]
        width = None if query is None or query.shape is None else query.shape[-1]
        count = heads if key is not None else heads + 2 * shared
        if heads and isinstance(width, int):
            return width // count
    raise GraphoptError(
        f"input {cache.name!r}: expected a static size of each head, found shape {cache.shape}: export it with one"
    )


def _caches(inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> dict[str, str]:
    """Return the outputs that replace inputs of floating-point numbers for the next token, by the inputs' names."""
    past = [x for x in inputs if x.name not in _KNOWN and x.dtype is not None and x.dtype.is_floating_point()]
    names = [name_of(y) for y in outputs]
    found = {name_of(x): _PAST.sub("present", name_of(x), count=1) for x in past}
    if not set(found.values()) <= set(names):
        others = [name for name in names if name != _LOGITS][-len(past) :]
        found = dict(zip(found, others, strict=False))
    by_name = {name_of(y): y for y in outputs}
    for x in past:
        y = by_name.get(found.get(name_of(x), ""))
        if y is None or rank(y) != rank(x):
            raise GraphoptError(
                f"input {x.name!r}: expected an output that replaces it for the next token, such as "
                f"{_PAST.sub('present', name_of(x), count=1)!r}, found {some(names)}"
            )
    return found


def _logits(outputs: Sequence[ir.Value]) -> ir.Value:
    """Return the output of logits: the one of this name, or the first one of numbers."""
    numbers = [y for y in outputs if y.dtype is None or y.dtype.is_floating_point()]
    named = [y for y in numbers if y.name == _LOGITS]
    if not numbers:
        raise GraphoptError(
            f"model: expected an output of logits, floating-point numbers of shape [rows, length, tokens], found "
            f"{some([name_of(y) for y in outputs]) or 'none'}"
        )
    return (named or numbers)[0]


def _last(logits: Tensor, rows: int, count: int) -> np.ndarray:
    """Return the logits of the last of `count` tokens of each row, or those of the only place that a model returns."""
    array = np.asarray(logits if isinstance(logits, np.ndarray) else logits.numpy())
    if array.ndim not in (2, 3):
        raise GraphoptError(
            f"model: expected logits of shape [rows, length, tokens], found an output of shape {list(array.shape)}"
        )
    array = array[:rows]
    return array if array.ndim == 2 else array[:, count - 1 if array.shape[1] >= count else -1]

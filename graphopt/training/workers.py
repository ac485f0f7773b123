"""Keep the workers of one training run together: the same checkpoint, the same decisions, shared validation."""

from __future__ import annotations

import itertools
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import safetensors.numpy

from graphopt.communicator import Communicator
from graphopt.runtime.checkpoint import state_bytes
from graphopt.training.callbacks.callback import Control
from graphopt.training.checkpoints import Checkpoint
from graphopt.training.signals import Signals

_STATE, _ARRAYS = "state/", "arrays/"
_POSITION = "graphopt.position"


def agree(communicator: Communicator, control: Control, signals: Signals) -> bool:
    """Let what one worker's callbacks ask for count for all; return whether any worker was asked to end."""
    ended = signals.received is not None or communicator.asked_to_end()
    control.should_stop, control.should_evaluate, ended = communicator.any(
        control.should_stop, control.should_evaluate, ended
    )
    if ended and signals.received is None:
        signals.received = signal.SIGTERM
    return ended


def from_first(communicator: Communicator, checkpoint: Checkpoint | None) -> Checkpoint | None:
    """Return the checkpoint of the first worker, whose disk the others need not share."""
    if communicator.size == 1:
        return checkpoint
    content, about = b"", None
    if checkpoint is not None:
        arrays = {f"{_STATE}{name}": x for name, x in checkpoint.state.items()}
        arrays |= {f"{_ARRAYS}{name}": x for name, x in checkpoint.arrays.items()}
        content, about = state_bytes(arrays), [str(checkpoint.path), checkpoint.progress]
    content, about = communicator.gather(content)[0], communicator.gather_json(about)[0]
    if communicator.leads or about is None:
        return checkpoint
    arrays = safetensors.numpy.load(content)
    state, callbacks = (
        {name.removeprefix(start): x for name, x in arrays.items() if name.startswith(start)}
        for start in (_STATE, _ARRAYS)
    )
    return Checkpoint(Path(about[0]), state, callbacks, about[1])


def summed(communicator: Communicator, rows: int, sums: Mapping[str, float]) -> tuple[int, dict[str, float]]:
    """Return the number of rows and sums over them, of all workers together; all have the same names."""
    if communicator.size == 1:
        return rows, dict(sums)
    totals = np.array([rows, *sums.values()], np.float64)
    communicator.sum(totals)
    return int(totals[0]), dict(zip(sums, totals[1:].tolist(), strict=True))


def evaluated(
    communicator: Communicator,
    batches: Iterable[dict[str, np.ndarray]],
    evaluate: Callable[[dict[str, np.ndarray]], Mapping[str, Any]],
) -> Iterator[tuple[dict[str, np.ndarray], Mapping[str, Any]]]:
    """Yield the data and the evaluation of each batch; the workers evaluate different batches at the same time."""
    left = iter(batches)
    while group := list(itertools.islice(left, communicator.size)):
        own = communicator.rank
        values = {own: evaluate(group[own])} if own < len(group) else {}
        if communicator.size > 1:
            values = _exchanged(communicator, values)
        yield from ((group[i], value) for i, value in values.items())
        lost = [batch for i, batch in enumerate(group) if i not in values]  # with a worker that has died
        left = itertools.chain(lost, left)


def _exchanged(
    communicator: Communicator, own: Mapping[int, Mapping[str, Any]]
) -> dict[int, Mapping[str, Any]]:
    """Return the numbers and arrays of all workers by the position of their batch."""
    results: dict[int, Mapping[str, Any]] = {}
    arrays = [{_POSITION: np.array(position), **values} for position, values in own.items()]
    for content in communicator.gather(state_bytes(arrays[0] if arrays else {})):
        values = safetensors.numpy.load(content)
        if values:
            position = int(values.pop(_POSITION))
            results[position] = {name: x if x.ndim else x.item() for name, x in values.items()}
    return results

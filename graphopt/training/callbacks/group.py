"""Call all callbacks of a run, and keep their states."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from graphopt.training.callbacks.callback import Callback, Run


class Group:
    """Call callbacks in order, and name each by its class, which is numbered from the second one on."""

    def __init__(self, callbacks: Sequence[Callback], run: Run) -> None:
        self._run = run
        self._named: dict[str, Callback] = {}
        counts: Counter[str] = Counter()
        for callback in callbacks:
            name = type(callback).__name__
            counts[name] += 1
            self._named[name if counts[name] == 1 else f"{name}.{counts[name]}"] = callback

    @property
    def reads_state(self) -> bool:
        """Return whether step events of any callback read or change the executor's state."""
        return any(callback.reads_state for callback in self._named.values())

    def tell(self, event: str, *arguments: Any) -> None:
        """Call the method of an event."""
        for callback in self._named.values():
            getattr(callback, event)(self._run, *arguments)

    def state(self) -> tuple[dict[str, dict[str, Any]], dict[str, np.ndarray]]:
        """Return the values of each callback for JSON, and copies of the arrays of all by `callback/name`."""
        values: dict[str, dict[str, Any]] = {name: {} for name in self._named}
        arrays: dict[str, np.ndarray] = {}
        for name, callback in self._named.items():
            for key, value in callback.state_dict().items():
                if isinstance(value, np.ndarray):
                    arrays[f"{name}/{key}"] = np.array(value)
                else:
                    values[name][key] = value
        return values, arrays

    def load_state(self, values: Mapping[str, Mapping[str, Any]], arrays: Mapping[str, np.ndarray]) -> None:
        """Continue from what `state` returned."""
        for name, callback in self._named.items():
            start = f"{name}/"
            own = {key.removeprefix(start): x for key, x in arrays.items() if key.startswith(start)}
            state = {**values.get(name, {}), **own}
            if state:
                callback.load_state_dict(state)

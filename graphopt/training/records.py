"""Hold the records of a run: a list of dicts that shows itself as a small table."""

from __future__ import annotations

from collections.abc import Iterator
from numbers import Real

from graphopt.inspection.table import ShownTable
from graphopt.training.callbacks.callback import Record

_LEFT_OUT = ("step", "samples_per_second", "tokens_per_second")
_FIRST, _LAST = 2, 8  # records that a longer table shows


class Records(ShownTable, list[Record]):
    """Hold a record for each epoch, as `fit` returns them: a list of dicts, which a table shows.

    >>> from graphopt.training.records import Records
    >>> Records([{"epoch": 1, "loss": 0.5, "accuracy": 0.75}, {"epoch": 2, "loss": 0.25, "accuracy": 0.875}])
    epoch  loss  accuracy
        1   0.5      0.75
        2  0.25     0.875
    """

    def __repr__(self) -> str:
        return super().__repr__() if self else "[]"

    def rows_shown(self) -> Iterator[list[str]]:
        """Yield the names of the numbers, and the numbers of each record, of many only of the first and the last."""
        names = dict.fromkeys(name for record in self for name, x in record.items() if isinstance(x, Real))
        shown = [name for name in names if name not in _LEFT_OUT]
        yield [name.replace("_", " ") for name in shown]
        for i, record in enumerate(self):
            if len(self) <= _FIRST + _LAST + 1 or i < _FIRST or i >= len(self) - _LAST:
                yield [_shown_number(record.get(name)) for name in shown]
            elif i == _FIRST:
                yield ["..." for _ in shown]


def _shown_number(number: object) -> str:
    if not isinstance(number, Real):
        return ""
    return str(number) if isinstance(number, int) else f"{float(number):.4g}"

"""Stop training runs, and compare them."""

from __future__ import annotations

import graphopt
from graphopt.training.callbacks import Record, Run


class StopAt(graphopt.Callback):
    """Stop after a step, and note all steps that it sees."""

    def __init__(self, step: int | None = None, *, reads_state: bool = True) -> None:
        self.last, self.steps, self.reads_state = step, [], reads_state

    def on_step_end(self, run: Run, record: Record) -> None:
        self.steps.append(record["step"])
        if record["step"] == self.last:
            run.stop("test")


def same(one: graphopt.Executor, other: graphopt.Executor) -> bool:
    return all((one.state[name] == other.state[name]).all() for name in one.state)


def alike(records: list[Record]) -> list[Record]:
    """Return records without what depends on the time."""
    return [{k: v for k, v in one.items() if "second" not in k} for one in records]

"""Run a training step in two halves, between which workers average their gradients."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from graphopt.distributed.exchange import Exchange
from graphopt.distributed.staged_runner import StagedRunner
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.runner import Runner
from graphopt.runtime.session import Session
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import Tensor, rows_of


class SplitRunner(Runner):
    """Run the half `grad` on a worker's rows, average over all workers, and run the half `apply`.

    A worker without rows reports no arrays.

    Args:
        grad: computes the loss and the gradients.
        exchange: averages them.
        apply: computes the new state.
        report: the outputs to return.
    """

    def __init__(
        self, grad: StagedRunner, exchange: Exchange, apply: StepRunner, report: Sequence[str]
    ) -> None:
        self._grad, self._exchange, self._apply, self._report = grad, exchange, apply, report
        self._is_finite = False

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        return self._grad.fits(feeds)

    def check(self, feeds: Mapping[str, Any]) -> None:
        self._grad.check(feeds)

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        rows = rows_of(feeds)
        self._exchange.begin(rows)
        stages = self._grad.run(source, feeds) if rows else self._grad.skip()
        reported = self._exchange.average(stages, rows) | self._apply.step(source, {})
        self._is_finite = self._exchange.agree(self._apply.state_is_finite)
        return {name: reported[name] for name in self._report if name in reported}

    @property
    def state_is_finite(self) -> bool:
        return self._is_finite

    @property
    def sessions(self) -> list[Session]:
        return [*self._grad.sessions, *self._apply.sessions]

"""Run a training step in two halves, between which workers average their gradients."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.communicator import Communicator
from graphopt.compiler import StepHalves
from graphopt.distributed.exchange import Exchange, SharedBuffers, SharedExchange, SummedBuffers
from graphopt.errors import GraphoptError
from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.graph.values import ROWS, name_of
from graphopt.runtime.bound_session import Reported, RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.forms import is_large_enough
from graphopt.runtime.reported_outputs import reporting
from graphopt.runtime.runners import Runner, StepRunner
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.tensors import Tensor, rows_of


class _Stage(NamedTuple):
    """Hold a stage, the names of the tensors that it reads, and of those that no later stage reads."""

    runner: StepRunner
    reads: list[str]
    reads_last: list[str]
    sums: SummedBuffers


class SplitRunner(Runner):
    """Run the half `grad` on a worker's rows, average over all workers, and run the half `apply`.

    `grad` runs in stages, of which most graphs have one: each reads data, values of earlier ones, and sums of theirs
    over all workers. A worker without rows adds nothing to the sums, and reports no arrays.
    """

    def __init__(
        self,
        device: Device,
        halves: StepHalves,
        buffers: StateBuffers,
        communicator: Communicator,
        options: RunnerOptions,
    ) -> None:
        self._communicator, self._options, self._is_finite = communicator, options, False
        parts = device, halves.grad, options.report, communicator
        self._exchange = (
            SharedExchange(*parts, buffers.allocate)
            if isinstance(buffers, SharedBuffers)
            else Exchange(*parts)
        )
        # The update comes first, because it may give the state one set of buffers in place of two.
        self._apply = self._updater(device, self._exchange.update(halves.apply), buffers)
        self._apply.check({})
        made = {name_of(y) for stage in halves.grad for y in stage.graph.outputs}
        read = [{name_of(x): x for x in with_role(stage, *FED)} for stage in halves.grad]
        fed = {name: x for each in read for name, x in each.items() if name not in made}
        self._signature = Signature(device, list(fed.values()))
        self._fit_stages = False  # whether what the stages read has the shapes that they have checked
        summed = [
            SummedBuffers(device, (y for y in stage.graph.outputs if role_of(y) is Role.SUMMED))
            for stage in halves.grad
        ]
        chosen = dataclasses.replace(
            options,
            fixed={**self._exchange.fixed, **{name: x for sums in summed for name, x in sums.values.items()}},
            as_numpy=options.as_numpy and len(summed) == 1,
            in_place=False,
            is_large=is_large_enough(halves.grad),
        )
        self._made = [*(name for name in options.report if name in made), ROWS]
        self._stages: list[_Stage] = []
        later = set(self._made)
        for stage, inputs, sums in reversed(list(zip(halves.grad, read, summed, strict=True))):
            outputs = [name_of(y) for y in stage.graph.outputs if y.name in later]
            own = dataclasses.replace(chosen, report=outputs)
            runner = StepRunner(device, reporting(stage, outputs), buffers, own)
            self._stages.insert(0, _Stage(runner, list(inputs), [x for x in inputs if x not in later], sums))
            later |= inputs.keys()

    def check(self, feeds: Mapping[str, Any]) -> None:
        self._signature.check(feeds)
        self._fit_stages = False

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        rows = rows_of(feeds)
        self._exchange.begin(rows)
        stages = self._run(source, feeds) if rows else self._skip()
        reported = self._exchange.average(stages, rows) | self._apply.step(source, {})
        self._is_finite = self._exchange.agree(self._apply.state_is_finite)
        return {name: reported[name] for name in self._options.report if name in reported}

    @property
    def state_is_finite(self) -> bool:
        return self._is_finite

    @property
    def sessions(self) -> list[Session]:
        runners = [*(stage.runner for stage in self._stages), self._apply]
        return [session for runner in runners for session in runner.sessions]

    def _updater(self, device: Device, apply: ir.Model, buffers: StateBuffers) -> StepRunner:
        """Return the runner of the half `apply`; all workers update in the same form."""
        outputs = {y.name for y in apply.graph.outputs}
        report = [name for name in self._options.report if name in outputs]
        graph = reporting(apply, report)
        options = dataclasses.replace(
            self._options,
            report=report,
            fixed=self._exchange.fixed,
            static_shapes=False,
            native=True,  # where there is a compiler
            verified=False,
        )
        updater = StepRunner(device, graph, buffers, options)
        lowered = np.array([float(updater.native is True)])
        self._communicator.sum(lowered)  # and all have written the initial state
        if isinstance(buffers, SharedBuffers) or lowered.item() in (0, self._communicator.size):
            return updater
        if options.in_place:
            raise GraphoptError(
                "in_place: expected a compiler on the machine of each worker, found some without: leave it out"
            )
        return StepRunner(device, graph, buffers, dataclasses.replace(options, native=False))

    def _run(self, source: int, feeds: Mapping[str, Tensor]) -> Iterator[Reported]:
        """Read the state from set `source`, and yield the reported outputs of each stage."""
        values: Reported = dict(feeds)
        for stage in self._stages:
            inputs = {name: np.asarray(x) if np.isscalar(x := values[name]) else x for name in stage.reads}
            if not self._fit_stages:
                stage.runner.check(inputs)
            outputs = stage.runner.step(source, inputs)
            values |= outputs
            stage.sums.sum(self._communicator.sum)
            for name in stage.reads_last:
                del values[name]
            yield {name: self._reported(outputs[name]) for name in self._made if name in outputs}
        self._fit_stages = True

    def _skip(self) -> Iterator[Reported]:
        """Add nothing to the sums of the other workers, without rows; yield nothing for each stage."""
        for stage in self._stages:
            stage.sums.sum(self._communicator.sum, 0.0)
            yield {}

    def _reported(self, value: Any) -> Any:
        return value.numpy() if self._options.as_numpy and hasattr(value, "numpy") else value

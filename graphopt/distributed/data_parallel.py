"""Train on all rows of a batch together: each worker computes gradients on its part, and all average them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.arguments import keywords_of
from graphopt.communicator import Communicator, digest
from graphopt.compiler import StepHalves
from graphopt.distributed.exchange import (
    Exchange,
    SharedBuffers,
    SharedExchange,
    SummedBuffers,
    WorkerOptions,
)
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph import storage
from graphopt.graph.loading import load
from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.graph.state import initial
from graphopt.graph.values import ROWS, name_of
from graphopt.runtime.bound_session import BoundSession, Reported, RunnerOptions
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.forms import is_large_enough
from graphopt.runtime.runners import Runner, StepRunner
from graphopt.runtime.signature import Signature, reporting
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.steps import Parts
from graphopt.runtime.tensors import Tensor, rows_of


@dataclass(frozen=True, kw_only=True, eq=False)
class DataParallelOptions(WorkerOptions):
    """Declare the options of `DataParallel`."""

    share_state: bool = True


class DataParallel(Executor):
    """Run a training step on the rows of several workers, as one process does on all rows.

    Each worker feeds its part of a batch: different numbers of rows, or none, are allowed. All workers average their
    gradients, weighted by rows, or by the sums of weights if the loss is a weighted mean. The losses and metrics that
    a step reports are means over all workers; other outputs are those of a worker's own rows. A single worker runs the
    whole step, as `Executor` does.

    On one machine with Linux, workers on the CPU share one copy of the state, of which each updates a part, from the
    gradients of all, where they lie. Elsewhere, and with `in_place`, they sum their gradients, and each updates its own
    copy. All workers call `update_state`, and each method that changes the state.

    Args:
        step: the halves of a training graph, from `graphopt.split_step`.
        communicator: the workers, such as `graphopt.MPI()`.
        share_state: let workers share one copy of the state; the attribute is False if they cannot.

    Raises:
        GraphoptError: as `Executor` does, or the workers have different graphs, initial states or options.

    >>> import numpy
    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> executor = graphopt.DataParallel(graphopt.split_step(pipeline, models.linear((1,), 1)))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> [round(executor.step(x=zero, target=one)["loss"], 4) for _ in range(3)]
    [1.0, 0.64, 0.4096]
    """

    Options = DataParallelOptions

    @keywords_of(DataParallelOptions)
    def __init__(self, step: StepHalves, **options: Any) -> None:
        chosen = DataParallelOptions(**options)
        if not isinstance(step, StepHalves):
            raise GraphoptError(
                f"DataParallel: expected a step in two halves, found {kind_of(step)}: write "
                "graphopt.split_step(graphopt.standard(...), model)"
            )
        device, model, workers = chosen.opened(), load(step.step), chosen.communicator
        if workers.size == 1:
            self._assemble(Parts(chosen, device, model, StateBuffers(device, model), workers=workers))
            return
        tensors = [tensor for x in model.graph.inputs if (tensor := initial(x)) is not None]
        workers.check_alike(
            {
                "training graph": ", ".join(map(storage.model_digest, (*step.grad, step.apply))),
                "state": digest(b"".join(tensor.tobytes() for tensor in tensors)),
                "options": f"share_state {chosen.share_state}, in_place {chosen.in_place}",
            }
        )
        on_host = device.on_cpu and not chosen.in_place
        if chosen.share_state and on_host and workers.shared_memory(1) is not None:
            buffers: StateBuffers = SharedBuffers(device, model, workers)
        else:
            buffers = StateBuffers(device, model)
        runner_of = functools.partial(SplitRunner, device, step, buffers, workers)
        self._assemble(Parts(chosen, device, model, buffers, workers=workers, runner_of=runner_of))

    @property
    def share_state(self) -> bool:
        """Return whether the workers share one copy of the state."""
        return isinstance(self._parts.buffers, SharedBuffers)


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
        kind = SharedExchange if isinstance(buffers, SharedBuffers) else Exchange
        self._exchange = kind(device, halves.grad, options.report, communicator, buffers.allocate)
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

    def check(self, feeds: Mapping[str, object]) -> None:
        self._signature.check(feeds)
        self._fit_stages = False

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        rows = rows_of(feeds)
        self._exchange.begin(rows)
        reported = self._exchange.average(self._run(source, feeds, rows), rows)
        reported |= self._apply.step(source, {})
        self._is_finite = self._exchange.agree(self._apply.state_is_finite)
        return {name: reported[name] for name in self._options.report if name in reported}

    @property
    def state_is_finite(self) -> bool:
        return self._is_finite

    @property
    def forms(self) -> list[BoundSession]:
        runners = [*(stage.runner for stage in self._stages), self._apply]
        return [form for runner in runners for form in runner.forms]

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

    def _run(self, source: int, feeds: Mapping[str, Tensor], rows: int) -> Iterator[Reported]:
        """Read the state from set `source`, and yield the reported outputs of each stage, without rows nothing."""
        values: Reported = dict(feeds)
        for stage in self._stages:
            if not rows:
                stage.sums.sum(self._communicator.sum, 0.0)  # adds nothing to those of the other workers
                yield {}
                continue
            inputs = {name: np.asarray(x) if np.isscalar(x := values[name]) else x for name in stage.reads}
            if not self._fit_stages:
                stage.runner.check(inputs)
            outputs = stage.runner.step(source, inputs)
            values |= outputs
            stage.sums.sum(self._communicator.sum)
            for name in stage.reads_last:
                del values[name]
            made = {name: outputs[name] for name in self._made if name in outputs}
            if self._options.as_numpy:
                made = {name: x.numpy() if hasattr(x, "numpy") else x for name, x in made.items()}
            yield made
        self._fit_stages = self._fit_stages or bool(rows)

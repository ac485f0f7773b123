"""Run the half `grad` of a training step in stages, between which workers sum batch statistics."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import onnx_ir as ir

from graphopt.communicator import Communicator
from graphopt.distributed.summed_buffers import SummedBuffers
from graphopt.graph.roles import FED, Role, role_of, with_role
from graphopt.runtime.bound_session import Reported
from graphopt.runtime.device import Device
from graphopt.runtime.forms import is_large_enough
from graphopt.runtime.reported_outputs import reporting
from graphopt.runtime.session import Session
from graphopt.runtime.signature import Signature, description
from graphopt.runtime.state_buffers import StateBuffers
from graphopt.runtime.step_runner import StepRunner
from graphopt.runtime.tensors import Tensor


class _Stage(NamedTuple):
    """Hold a stage, the names of the tensors that it reads, and of those that no later stage reads."""

    runner: StepRunner
    reads: list[str]
    reads_last: list[str]
    sums: SummedBuffers


class StagedRunner:
    """Run stages in turn on a worker's rows; most graphs have one.

    Args:
        stages: the stages; each reads data, values of earlier ones, and sums of theirs over all workers.
        state: the buffers of the state.
        report: the outputs to return.
        fixed: values for other inputs and outputs.
    """

    def __init__(
        self,
        device: Device,
        stages: Sequence[ir.Model],
        state: StateBuffers,
        report: Sequence[str],
        communicator: Communicator,
        *,
        fixed: Mapping[str, Any],
        static_shapes: bool,
        as_numpy: bool,
    ) -> None:
        self._report, self._communicator, self._as_numpy = list(report), communicator, as_numpy
        read = [{str(x.name): x for x in with_role(stage, *FED)} for stage in stages]
        made = {str(y.name) for stage in stages for y in stage.graph.outputs}
        given = {name: x for each in read for name, x in each.items() if name not in made}
        self._signature = Signature(device, list(given.values()))
        self._checked: list[Any] | None = None
        self._fit_stages = False  # whether what the stages read has the shapes that they have checked
        summed = [
            SummedBuffers(device, (y for y in stage.graph.outputs if role_of(y) is Role.SUMMED))
            for stage in stages
        ]
        fixed = {**fixed, **{name: x for sums in summed for name, x in sums.values.items()}}
        is_large = is_large_enough(stages)
        later = set(report)
        self._stages: list[_Stage] = []
        for stage, inputs, sums in reversed(list(zip(stages, read, summed, strict=True))):
            outputs = [str(y.name) for y in stage.graph.outputs if y.name in later]
            runner = StepRunner(
                device,
                reporting(stage, outputs),
                state,
                outputs,
                fixed=fixed,
                static_shapes=static_shapes,
                as_numpy=as_numpy and len(stages) == 1,
                is_large=is_large,
            )
            self._stages.insert(0, _Stage(runner, list(inputs), [x for x in inputs if x not in later], sums))
            later |= inputs.keys()

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether tensors have the same names, shapes and types as those checked last."""
        return self._checked == description(feeds)

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Check tensors."""
        if not self.fits(feeds):
            self._signature.check(feeds)
            self._checked, self._fit_stages = description(feeds), False

    def run(self, source: int, feeds: Mapping[str, Tensor]) -> Iterator[Reported]:
        """Read the state from set `source`, and yield the reported outputs of each stage.

        Args:
            feeds: tensors that `check` has accepted.
        """
        values: Reported = dict(feeds)
        for stage in self._stages:
            inputs = {name: np.asarray(x) if np.isscalar(x := values[name]) else x for name in stage.reads}
            if not self._fit_stages:
                stage.runner.check(inputs)
            found = stage.runner.step(source, inputs)
            values |= found
            self._sum(stage.sums)
            for name in stage.reads_last:
                del values[name]
            yield {name: self._reported(found[name]) for name in self._report if name in found}
        self._fit_stages = True

    def skip(self) -> Iterator[Reported]:
        """Add nothing to the sums of the other workers, without rows; yield nothing for each stage."""
        for stage in self._stages:
            with stage.sums.flat() as arrays:
                for array in arrays:
                    array[...] = 0
            self._sum(stage.sums)
            yield {}

    @property
    def sessions(self) -> list[Session]:
        """Return the sessions of the stages."""
        return [session for stage in self._stages for session in stage.runner.sessions]

    def _sum(self, sums: SummedBuffers) -> None:
        if sums.values:
            with sums.flat() as arrays:
                for array in arrays:
                    self._communicator.sum(array)

    def _reported(self, value: Any) -> Any:
        return value.numpy() if self._as_numpy and hasattr(value, "numpy") else value

"""What an executor is told beside its training graph."""

# Without `from __future__ import annotations`: Python 3.10 finds no type hints where an InitVar stands in a string.

from collections.abc import Sequence
from dataclasses import InitVar, dataclass, field
from typing import Literal

from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source
from graphopt.runtime.device import Device, DeviceOptions


@dataclass(kw_only=True, eq=False, repr=False)
class ExecutorOptions(DeviceOptions):
    """Declare the arguments of `Executor`: a training graph, a device with its options, and how steps run.

    Args:
        step: a training graph: a path, an onnx.ModelProto or an onnx_ir.Model.
        device: `cpu`, `cuda` or `cuda:N`, or a `Device`, which has the options of a device itself.
        on_nonfinite: what a step does whose loss, or a number of the state after it, is not finite: `raise` an error,
            `warn` and go on, or `skip` the step; with `raise` and `skip` the state stays as it was, so that all of
            it is finite if it was so at first.
        steps_per_call: how many steps `run` and `iterate` do in one call of the runtime; None tries calls of several,
            and keeps them if a step takes a tenth less time.
        report: the outputs to return from each step, the loss among them; all but the state by default. An empty list:
            nothing, so that nothing is read from the device and what is not finite goes unnoticed.
        static_shapes: a session for each shape of the batch, which the runtime then knows beforehand.
        as_numpy: return arrays; False: ONNX Runtime's OrtValues, on the device. Scalars are Python numbers with both.
    """

    step: InitVar[Source] = field(kw_only=False)
    device: "str | Device" = "cpu"
    on_nonfinite: "Literal['raise', 'warn', 'skip']" = "raise"
    steps_per_call: "int | None" = None
    report: "Sequence[str] | None" = None
    static_shapes: bool = False
    as_numpy: bool = True

    def __post_init__(self, step: Source) -> None:
        check_steps_per_call(self.steps_per_call)
        if self.on_nonfinite not in ("raise", "warn", "skip"):
            raise GraphoptError(
                f"on_nonfinite: expected 'raise', 'warn' or 'skip', found {self.on_nonfinite!r}"
            )


def check_steps_per_call(count: int | None) -> None:
    """Raise an error unless a call can do so many steps."""
    if count is not None and count < 1:
        raise GraphoptError(f"steps_per_call: expected 1 or more, or None, found {count}")

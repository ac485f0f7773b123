"""Declare the options of an executor."""

# No `from __future__ import annotations` here: Python 3.10 cannot resolve an InitVar in a string annotation.

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
        device: `cpu`, `cuda` or `cuda:N`, or a `Device`, which carries its own options.
        on_nonfinite: what to do if the loss or the new state is not finite: `raise` an error, `warn` and continue, or
            `skip` the step. `raise` and `skip` keep the previous state, so that a finite state stays finite.
        steps_per_call: the number of steps that `run` and `iterate` execute in one call of the runtime; None tries
            several, and keeps that if it saves a tenth of the time per step.
        report: the outputs to return from each step in addition to the loss; all but the state by default. With an
            empty list, a step returns nothing, reads nothing from the device and does not notice non-finite values.
        static_shapes: create a session for each batch shape, so that the runtime knows all shapes in advance.
        as_numpy: return NumPy arrays; otherwise OrtValues on the device. Scalars are Python numbers in both cases.
        in_place: let kernels of the option `native` write the new state over the old one. Steps are faster, and the
            state takes half the memory. A step whose loss or new state is not finite has then changed the state.
    """

    step: InitVar[Source] = field(kw_only=False)
    device: "str | Device" = "cpu"
    on_nonfinite: "Literal['raise', 'warn', 'skip']" = "raise"
    steps_per_call: "int | None" = None
    report: "Sequence[str] | None" = None
    static_shapes: bool = False
    as_numpy: bool = True
    in_place: bool = False

    def __post_init__(self, step: Source) -> None:
        check_steps_per_call(self.steps_per_call)
        if self.on_nonfinite not in ("raise", "warn", "skip"):
            raise GraphoptError(
                f"on_nonfinite: expected 'raise', 'warn' or 'skip', found {self.on_nonfinite!r}"
            )
        for name, wrong in {
            "on_nonfinite='skip'": self.on_nonfinite == "skip",
            "static_shapes": self.static_shapes,
        }.items():
            if self.in_place and wrong:
                raise GraphoptError(
                    f"in_place: expected an executor without {name}, which needs two sets of state, found both"
                )


ExecutorOptions.__init__.__annotations__["step"] = "Source"  # `help` shows this instead of an InitVar


def check_steps_per_call(count: int | None) -> None:
    """Raise an error unless the number of steps per call is valid."""
    if count is not None and count < 1:
        raise GraphoptError(f"steps_per_call: expected 1 or more, or None, found {count}")

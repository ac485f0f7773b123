"""Declare the options of an executor."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from graphopt.errors import GraphoptError
from graphopt.fields import check_options
from graphopt.runtime.device import Device
from graphopt.runtime.device_options import DeviceOptions


@dataclass(frozen=True, kw_only=True, eq=False)
class ExecutorOptions(DeviceOptions):
    """Declare the options of `Executor`: a device with its options, and how steps run.

    Args:
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

    device: str | Device = "cpu"
    on_nonfinite: Literal["raise", "warn", "skip"] = "raise"
    steps_per_call: int | None = None
    report: Sequence[str] | None = None
    static_shapes: bool = False
    as_numpy: bool = True
    in_place: bool = False

    def __post_init__(self) -> None:
        check_options(self, "executor")
        if self.steps_per_call is not None and self.steps_per_call < 1:
            raise GraphoptError(f"steps_per_call: expected 1 or more, or None, found {self.steps_per_call}")
        if self.on_nonfinite not in ("raise", "warn", "skip"):
            raise GraphoptError(f"on_nonfinite: expected 'raise', 'warn' or 'skip', found {self.on_nonfinite!r}")
        if self.in_place and (self.static_shapes or self.memory or self.on_nonfinite == "skip"):
            static = "static_shapes" if self.static_shapes else "memory"
            other = "on_nonfinite='skip'" if self.on_nonfinite == "skip" else static
            raise GraphoptError(
                f"in_place: expected an executor without {other}, which needs two sets of state, found both"
            )

    def opened(self) -> Device:
        """Return the device with its options.

        Raises:
            GraphoptError: the device is invalid, or a state cannot be written in place there.
        """
        device = Device.of(self.device, self)
        if self.in_place and not device.compiles:
            raise GraphoptError(
                "in_place: expected kernels on the CPU, which write in place, found another device or native=False: "
                "leave it out"
            )
        if device.memory is not None and not device.on_cpu:
            raise GraphoptError(f"memory: expected device='cpu', found {device.name!r}: leave it out")
        return device

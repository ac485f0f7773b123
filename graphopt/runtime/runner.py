"""Declare what runs the steps of an executor."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

from graphopt.runtime.bound_session import Reported
from graphopt.runtime.session import Session
from graphopt.runtime.tensors import Tensor


class Runner(Protocol):
    """Run steps of a training graph on the two sets of a `StateBuffers`.

    `StepRunner` runs a whole step in one session. `SplitRunner` runs it in two halves, between which workers exchange
    gradients.
    """

    def fits(self, feeds: Mapping[str, Any]) -> bool:
        """Return whether tensors have the same names, shapes and types as those checked last."""

    def check(self, feeds: Mapping[str, Any]) -> None:
        """Check the tensors of the next steps, and choose the sessions for their shapes.

        Raises:
            GraphoptError: a tensor is missing, is unknown, or has the wrong type or shape. Nothing has changed.
        """

    def step(self, source: int, feeds: Mapping[str, Tensor]) -> Reported:
        """Read the state from set `source`, write the other set, and return the reported outputs.

        The caller decides whether to keep the new state: a step on the same set can be repeated, unless kernels write
        in place.

        Args:
            feeds: tensors that `check` has accepted.
        """

    @property
    def state_is_finite(self) -> bool:
        """Return whether the latest step found its new state to be finite; not all steps look."""

    @property
    def sessions(self) -> list[Session]:
        """Return the sessions of the latest step.

        Raises:
            GraphoptError: sessions depend on shapes, and no step has run yet.
        """

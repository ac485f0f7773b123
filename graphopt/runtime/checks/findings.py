"""Hold what a check has found, as a table."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

from graphopt.errors import GraphoptError
from graphopt.runtime.checks.slopes import Verdict

_Part = Literal["file", "gradient", "update"]


@dataclass(frozen=True)
class Finding:
    """Hold what is found about an output of the file, the gradient of parameters, or the update of one.

    Args:
        part: what is compared: `file`, `gradient` or `update`.
        name: the output, the parameter, or several of them.
        verdict: `agrees`, `differs` or `not checked`.
        expected: the number by the file, by differences of the loss, or by the optimizer's rule.
        found: the number of the training graph.
        norm: the norm of the gradient.
        reason: why it is not checked, or what differs.
    """

    part: _Part
    name: str
    verdict: Verdict
    expected: float | None = None
    found: float | None = None
    norm: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        numbers = [f"{'' if x is None else format(x, '.6g'):>12}" for x in (self.norm, self.found, self.expected)]
        told = f" ({self.reason})" if self.reason else ""
        return f"{self.part:8} {self.name:40} {''.join(numbers)}  {self.verdict}{told}".rstrip()


@dataclass(frozen=True)
class CheckTable:
    """Hold the findings of a check.

    Args:
        findings: one for each output of the file, for parameters or groups of them, and for updates.
        data: what the check ran on, such as the first batch.

    >>> from graphopt import models
    >>> table = graphopt.check(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> table.differences
    []
    >>> table.agrees
    True
    """

    findings: Sequence[Finding] = field(default_factory=list)
    data: str = ""

    @property
    def differences(self) -> list[Finding]:
        """Return the findings that differ."""
        return [x for x in self.findings if x.verdict == "differs"]

    @property
    def agrees(self) -> bool:
        """Return whether nothing differs."""
        return not self.differences

    def __str__(self) -> str:
        counts = Counter(x.verdict for x in self.findings)
        head = f"{'':8} {'':40} {'norm':>12}{'found':>12}{'expected':>12}"
        total = ", ".join(f"{counts[verdict]} {verdict}" for verdict in ("agrees", "differs", "not checked"))
        return "\n".join([head, *map(str, self.findings), f"{total}; on {self.data}"])


class Disagreement(GraphoptError):
    """Report that a training graph disagrees with its file, with its loss, or with the rule of its optimizer."""

"""Schedule the numbers of a cluster: a row is passed over several times if numbers need the sum of the whole row."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from graphopt.targets.native.numbers import ELEMENT, Extent, Number, Numbers


@dataclass
class Stages:
    """Say in which loop over the columns each number is computed.

    Args:
        of: the loop that computes a number of an element; of a row's number, the loop before which it is known.
        kept: the numbers of elements that a loop leaves for later ones; these compute again what is not kept.
    """

    of: dict[Number, int] = field(default_factory=dict)
    kept: list[Number] = field(default_factory=list)

    @property
    def count(self) -> int:
        return max(self.of.values(), default=0) + 1

    def computed(self, stage: int, extent: Extent) -> list[Number]:
        """Return the numbers of an extent whose expressions belong to a loop, or come before it."""
        return [x for x, at in self.of.items() if at == stage and x.extent is extent and x.code]

    def reduced(self, stage: int) -> list[tuple[str, Number]]:
        """Return the reductions of a loop, and the numbers that they give."""
        return [(x.reduces, x) for x, at in self.of.items() if at == stage + 1 and x.reduces]


def scheduled(numbers: Numbers) -> Stages:
    """Return the stages of numbers: each is computed as late as its readers allow, if that needs nothing kept."""
    stages = Stages()
    for x in numbers.all:
        if x.reduces:
            stages.of[x] = stages.of[x.operands[0]] + 1
        else:
            stages.of[x] = max((stages.of.get(operand, 0) for operand in x.operands), default=0)
    readers: dict[Number, list[Number]] = {}
    for x in numbers.all:
        for operand in x.operands:
            readers.setdefault(operand, []).append(x)
    results = {store.number for store in numbers.stores} | {total.operand for total in numbers.totals}
    computed = [x for x in _elements(numbers.all) if not x.is_read]
    for x in reversed(computed):
        late = min(_uses(stages, readers.get(x, [])), default=0)
        if x not in results and late > stages.of[x] and all(y.is_read for y in _elements(x.operands)):
            stages.of[x] = late
    for x in computed:
        crosses = max(_uses(stages, readers.get(x, [])), default=0) > stages.of[x]
        if crosses and not _is_computed_again(x, stages.kept):
            stages.kept.append(x)
    return stages


def _uses(stages: Stages, readers: Iterable[Number]) -> list[int]:
    """Return the loops that read a number."""
    return [stages.of[x] - 1 if x.reduces else stages.of[x] for x in readers]


def _is_computed_again(x: Number, kept: list[Number]) -> bool:
    """Return whether a number is cheaper to compute again than to keep: no function, no division."""
    there = all(y.is_read or y in kept for y in _elements(x.operands))
    return there and not any(sign in x.code for sign in "/(")


def _elements(numbers: Iterable[Number]) -> list[Number]:
    return [x for x in numbers if x.extent is ELEMENT]

"""Find the fastest of several forms of a graph that compute the same, and remember it.

The *candidates* of a contest are forms. An *oracle* compares a form with the plain form before it may run. A *clock*
measures calls in turns. A *memory* keeps the times on this machine. Where calls train, they are the ones that are
measured (`live`); elsewhere, a call is repeated.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import math
import operator
import statistics
import time
from collections.abc import Callable, Generator, Iterable, Mapping
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.checks.verdicts import read_note, write_note
from graphopt.runtime.rehearsal import Rehearsal
from graphopt.runtime.signature import description
from graphopt.runtime.tensors import Tensor
from graphopt.runtime.translation import Translation

# How long to measure; no comparison of other values is on record.
# Calls of each form: a median of five is not moved by one in which another program runs, and a hundredth, which counts
# for evaluations, needs many.
MEASURED_STEPS, MEASURED_EVALUATIONS = 5, 200
# A call is repeated no more after so long, and evaluations have taken as long before others are measured.
MEASURING_SECONDS = 1.0
# Fewer calls of each form are enough if one takes less than this share of the others' time. Then no third form is
# expected to be faster still: in examples/benchmarks/RESULTS_OPENING.md (opening.py, Intel Xeon with AVX-512, one
# thread), kernels of four of six models were that fast.
CLEAR_CALLS, CLEARLY_FASTER = 2, 0.5

# What share of the time is worth its price.
# Constant weights in place of inputs: a CNN gains 2 to 5 % on batches of 256 rows, as the commit says that measures
# forms in turns, without machine or program.
WORTH_CONSTANTS = 0.99
# Several steps per call in place of one: what the option steps_per_call says; not measured.
WORTH_STACKING = 0.9

# How much is worth preparing; no measurement is on record.
# A call of several steps takes about so long, that batches which are drawn ahead are few, and beside which the cost of
# a call is small.
SECONDS_PER_CALL, MOST_STEPS_PER_CALL = 4e-3, 256
# Numbers in parameters, from which `auto` compiles kernels: smaller steps should never pay for the compiler.
COMPILED_PARAMETERS = 10_000
# Nodes from which lowering should take longer than a second, so that another process does it while steps run.
REHEARSED_NODES = 500

PLAIN, KERNELS, RUNTIME, CONSTANTS, OPENING = "plain", "kernels", "runtime", "constant weights", "opening"


class Clock:
    """Hold the times of calls of several forms, of which the first of each form does not count.

    Args:
        names: the forms.
        most: how many calls of each form count.
        seconds: the time after which no other round of calls begins.
    """

    def __init__(self, names: Iterable[str], most: int = MEASURED_STEPS, seconds: float = math.inf) -> None:
        self._times: dict[str, list[float]] = {name: [] for name in names}
        self._most, self._limit = most, seconds

    @property
    def turn(self) -> str:
        """Return the form whose turn it is."""
        return min(self._times, key=lambda name: len(self._times[name]))

    def add(self, name: str, seconds: float) -> None:
        """Add the time of a call, unless there are enough."""
        if not self.has(name):
            self._times[name].append(seconds)

    def has(self, name: str) -> bool:
        """Return whether enough calls of a form have been measured."""
        return len(self._times[name]) > self._most

    @property
    def seconds(self) -> dict[str, float]:
        """Return the median time of each form that has been measured, the fastest first."""
        medians = {name: statistics.median(times[1:]) for name, times in self._times.items() if times[1:]}
        return dict(sorted(medians.items(), key=operator.itemgetter(1)))

    @property
    def is_over(self) -> bool:
        """Return whether the times are known: sooner if one form is clearly faster than all others."""
        rounds = min(map(len, self._times.values())) - 1
        if rounds < 1:
            return False
        spent = sum(sum(times[1:]) for times in self._times.values())
        fastest, second, *_ = *self.seconds.values(), math.inf
        is_clear = rounds >= CLEAR_CALLS and fastest < CLEARLY_FASTER * second
        return rounds >= self._most or spent >= self._limit or is_clear


def measured(calls: Mapping[str, Callable[[], object]], most: int = MEASURED_STEPS) -> dict[str, float]:
    """Return the median seconds of calls by name, the fastest first, from calls in turns after a first one."""
    clock = Clock(calls, most, MEASURING_SECONDS)
    while not clock.is_over:
        turn, begun = clock.turn, time.perf_counter()
        calls[turn]()
        clock.add(turn, time.perf_counter() - begun)
    return clock.seconds


class Memory:
    """Remember on this machine how long forms take.

    Args:
        facts: returns what this depends on, in addition to the shapes of the tensors.
    """

    def __init__(self, facts: Callable[[], object]) -> None:
        self._facts, self._known = facts, dict[str, dict[str, float] | None]()

    def note_of(self, shapes: object) -> str:
        """Return the name of the note about tensors of some shapes."""
        return f"{hashlib.sha256(repr((self._facts(), shapes)).encode()).hexdigest()[:32]}.time.json"

    def read(self, note: str) -> dict[str, float] | None:
        """Return the seconds of each form, the fastest first, if the machine remembers them."""
        if note not in self._known:
            seconds = read_note("native", note, "seconds", dict)
            is_whole = seconds and all(isinstance(x, float) for x in seconds.values())
            self._known[note] = seconds if is_whole else None
        return self._known[note]

    def write(self, note: str, seconds: dict[str, float]) -> None:
        """Remember the seconds of each form."""
        self._known[note] = seconds
        write_note("native", note, {"seconds": seconds})


@dataclass(eq=False)
class Candidate:
    """Hold a form that may run, and is opened when it is asked for.

    Args:
        opened: opens it; returns None, after a warning, if that fails.
        rehearse: starts a process that prepares it.
        is_momentary: whether the form has to be opened again when the state has changed, and what that takes matters.
        agrees: whether it computes what the plain form does; None as long as this is not known.
    """

    opened: Callable[[], BoundSession | None]
    rehearse: Callable[[], Rehearsal] | None = None
    is_momentary: bool = False
    agrees: bool | None = None

    @functools.cached_property
    def form(self) -> BoundSession | None:
        return self.opened()

    @property
    def is_open(self) -> bool:
        return "form" in self.__dict__

    def close(self) -> None:
        """Release the form. It can be opened again, and is then another."""
        self.__dict__.pop("form", None)
        self.agrees = None

    @functools.cached_property
    def rehearsal(self) -> Rehearsal | None:
        """Return the process that prepares the form, which starts now; None if it is opened without one."""
        with contextlib.suppress(GraphoptError):  # no process starts: the form is prepared when it is opened
            return None if self.rehearse is None else self.rehearse()
        return None


@dataclass(eq=False)
class Contest:
    """Hold candidates, and answer which is the fastest that computes what the plain form does.

    Args:
        plain: the graph of the plain form, which needs no check.
        candidates: by name, the preferred ones first.
        oracle: compares a form with the plain one; None if none is to be compared.
        memory: the times; None if nothing is to be measured.
        most: how many calls of each form to measure.
    """

    plain: ir.Model
    candidates: Mapping[str, Candidate]
    oracle: Translation | None
    memory: Memory | None
    most: int = MEASURED_STEPS

    def fastest(self, source: int, feeds: Mapping[str, Tensor]) -> str | None:
        """Return the fastest candidate that agrees with the plain form, or None; without a memory, the first.

        Raises:
            GraphoptError: a form differs, and the oracle insists.
        """
        order = list(self.candidates)
        if self.memory is not None:
            times = self.times(self.memory, source, feeds)
            order.sort(key=lambda name: times.get(name, math.inf))
        return next((name for name in order if self.agrees(name, source, feeds)), None)

    def times(self, memory: Memory, source: int, feeds: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the seconds of candidates: as the machine remembers, or as repeated calls now show.

        Those that may run are compared with the plain form, and left out if they differ. `OPENING` is how long it
        takes to open the momentary one.
        """
        note = memory.note_of(description(feeds))
        if (known := memory.read(note)) is not None:
            return known
        calls: dict[str, Callable[[], object]] = {}
        opening: dict[str, float] = {}
        for name, candidate in self.candidates.items():
            begun = time.perf_counter()
            if (form := candidate.form) is not None:
                calls[name] = functools.partial(form.call, source, feeds)
            if candidate.is_momentary:
                opening[OPENING] = time.perf_counter() - begun
        times = measured(calls, self.most)
        for name in [*times]:
            if not self.agrees(name, source, feeds):
                del times[name]
            elif not self.candidates[name].is_momentary:
                break  # slower ones do not run
        times |= opening
        memory.write(note, times)
        return times

    def agrees(self, name: str, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether a candidate can be opened and computes what the plain form does; look once."""
        candidate, oracle = self.candidates[name], self.oracle
        if candidate.agrees is None:
            form = candidate.form
            if form is None or oracle is None or form.model is self.plain:
                candidate.agrees = form is not None
            else:
                candidate.agrees = oracle.agrees(form, source, feeds)
        return candidate.agrees

    def is_ready(self, name: str, source: int, feeds: Mapping[str, Tensor]) -> bool:
        """Return whether a candidate can be opened; have the process that prepares it compare it on this call."""
        rehearsal = self.candidates[name].rehearsal
        if rehearsal is not None and not rehearsal.is_told:
            rehearsal.compare_on(None if self.oracle is None else self.oracle.sample(source, feeds))
        return rehearsal is None or not rehearsal.is_running


# Source, feeds, and the seconds of the last step, if it ran.
Step = tuple[int, Mapping[str, Tensor], float | None]


def live(contest: Contest, plain: BoundSession) -> Generator[BoundSession, Step, str | None]:
    """Yield the form of each step that trains until the fastest is known; return it, or None for the plain form.

    Processes prepare the candidates one after the other. The plain form runs until the first one is ready, and stands
    for that of the runtime until that is. Those that are ready run in turns, and then the fastest until another is
    ready. One that is clearly faster ends the contest. If nothing is remembered, the first that agrees ends it.
    """
    forms, times, note, memory = {RUNTIME: plain}, dict[str, float](), "", contest.memory
    source, feeds, _ = yield plain
    for name, candidate in contest.candidates.items():
        while not contest.is_ready(name, source, feeds):
            source, feeds, _ = yield forms[next(iter(times), RUNTIME)]
        if not contest.agrees(name, source, feeds):
            continue
        if memory is None:
            return name
        note = memory.note_of(description(feeds))
        known = memory.read(note)
        if known is not None and next(iter(known)) == name:
            return name
        if known is None or name == RUNTIME:
            forms[name] = candidate.form or plain
        if len(forms) > 1:
            times, (source, feeds, _) = yield from _in_turns(forms, (source, feeds, None))
            fastest, second, *_ = times
            if fastest != RUNTIME and times[fastest] <= CLEARLY_FASTER * times[second]:
                break
    if memory is not None and times:
        memory.write(note, times)
    winner = next(iter(times), RUNTIME)
    return None if forms[winner] is plain else winner


def _in_turns(
    forms: Mapping[str, BoundSession], step: Step
) -> Generator[BoundSession, Step, tuple[dict[str, float], Step]]:
    """Yield each of the forms in turn until their times are known; return them, and the next step.

    A step on a batch of another shape takes another time, and does not count.
    """
    clock, shapes = Clock(forms), description(step[1])
    while not clock.is_over:
        turn, is_alike = clock.turn, description(step[1]) == shapes
        step = yield forms[turn]
        if is_alike and step[2] is not None:
            clock.add(turn, step[2])
    return clock.seconds, step

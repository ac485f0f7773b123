"""Change from the plain graph of a step to its fastest form while steps train."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from graphopt.errors import GraphoptError
from graphopt.runtime.bound_session import BoundSession
from graphopt.runtime.signature import description
from graphopt.runtime.tensors import Tensor
from graphopt.runtime.translation import Sample

ROUNDS, FEWEST = 5, 2  # of measuring, and if the times are far apart
CLEAR = 0.5  # of the plain graph's time: no other form is so much faster than the plain graph


class Rehearsed(Protocol):
    """Hold a process that prepares a form of a step; see `Rehearsal`."""

    native: bool

    @property
    def is_running(self) -> bool: ...

    def compare_on(self, sample: Sample | None) -> None: ...

    def wait(self) -> None: ...


class Forms(Protocol):
    """Open forms of a step, and check them; see `StepForms`."""

    def sample(self, source: int, feeds: Mapping[str, Tensor]) -> Sample | None: ...

    def kernels(self, rehearsal: Rehearsed) -> BoundSession | None: ...

    def for_runtime(self) -> BoundSession: ...

    def agrees(self, form: BoundSession, source: int, feeds: Mapping[str, Tensor]) -> bool: ...

    def fastest(self, facts: Sequence[object]) -> int | None: ...

    def note_fastest(self, facts: Sequence[object], seconds: Sequence[float]) -> None: ...


class Race:
    """Measure forms on steps that train, which they run in turns.

    The first step of a form takes longer, and one on a batch of another shape takes another time: they do not count.
    """

    def __init__(self, forms: Sequence[BoundSession], feeds: Mapping[str, Tensor]) -> None:
        self.forms, self.facts = forms, description(feeds)
        self._times: list[list[float]] = [[] for _ in forms]
        self._turn = 0

    @property
    def form(self) -> BoundSession:
        """Return the form whose turn it is."""
        return self.forms[self._turn]

    @contextlib.contextmanager
    def timed(self, feeds: Mapping[str, Tensor]) -> Iterator[None]:
        """Measure a step of the form whose turn it is."""
        begun = time.perf_counter()
        yield
        if description(feeds) == self.facts:
            self._times[self._turn].append(time.perf_counter() - begun)
            self._turn = (self._turn + 1) % len(self.forms)

    @property
    def is_over(self) -> bool:
        """Return whether the times are known: sooner if they are far apart."""
        rounds = min(map(len, self._times)) - 1
        return rounds >= ROUNDS or (rounds >= FEWEST and min(self.seconds) < CLEAR * max(self.seconds))

    @property
    def seconds(self) -> list[float]:
        """Return the median time of each form."""
        return [statistics.median(times[1:]) for times in self._times]


class Switch:
    """Run the plain graph while another process prepares kernels, and then what is fastest.

    Kernels race with the plain graph. Unless they are far faster, they race with the graph that is lowered for the
    runtime, too, when another process has prepared that. All runs are steps that train.

    Args:
        plain: the plain graph.
        rehearse: starts a process that prepares kernels, with `native=True`, or the graph for the runtime.

    Attributes:
        form: the form of the next step.
        native: whether kernels have won; None as long as this is not known.
    """

    def __init__(self, plain: BoundSession, rehearse: Callable[..., Rehearsed]) -> None:
        self.form, self._rehearse = plain, rehearse
        self.native: bool | None = None
        self._kernels: BoundSession | None = None
        self._other, self._other_is_plain = plain, True  # what kernels race with
        self._race: Race | None = None
        self._prepare(native=True)

    def _prepare(self, *, native: bool) -> None:
        self._rehearsal: Rehearsed | None = self._rehearse(native=native)
        self._has_sample = False

    def wait(self) -> None:
        """Wait for the other process, whether or not it fails."""
        with contextlib.suppress(GraphoptError):
            if self._rehearsal is not None:
                self._rehearsal.wait()

    def call(self, source: int, feeds: Mapping[str, Tensor]) -> dict[str, Any]:
        """Run a step in the form whose turn it is."""
        if self._race is None:
            return self.form.call(source, feeds)
        self.form = self._race.form
        with self._race.timed(feeds):
            return self.form.call(source, feeds)

    def advance(self, forms: Forms, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Open a form that has been prepared, or end a race that is over; the arguments are those of the next step."""
        if self._race is not None:
            if self._race.is_over:
                self._end_race(forms, self._race)
            return
        rehearsal = self._rehearsal
        assert rehearsal is not None
        if not self._has_sample:
            rehearsal.compare_on(forms.sample(source, feeds))
            self._has_sample = True
        if rehearsal.is_running:
            return
        self._rehearsal = None
        if rehearsal.native:
            self._take_kernels(forms.kernels(rehearsal), forms, source, feeds)
        else:
            self._take_other(forms, source, feeds)

    def _take_kernels(
        self, kernels: BoundSession | None, forms: Forms, source: int, feeds: Mapping[str, Tensor]
    ) -> None:
        """Let kernels race with the plain graph, unless the machine remembers what is fastest."""
        if kernels is not None and forms.agrees(kernels, source, feeds):
            known = forms.fastest(description(feeds))
            if known == 0:
                self.form, self.native = kernels, True
                return
            if known is None:
                self._kernels, self._race = kernels, Race([kernels, self._other], feeds)
                return
        self._prepare(native=False)

    def _take_other(self, forms: Forms, source: int, feeds: Mapping[str, Tensor]) -> None:
        """Run the graph for the runtime, or let it race with kernels."""
        other = forms.for_runtime()
        if other.model is self._other.model or forms.agrees(other, source, feeds):
            self._other = other
        self._other_is_plain = False
        if self._kernels is None:
            self.form, self.native = self._other, False
        else:
            self._race = Race([self._kernels, self._other], feeds)

    def _end_race(self, forms: Forms, race: Race) -> None:
        """Take the faster form; first let kernels race with the other one, unless they have clearly won."""
        self._race = None
        kernels, other = race.seconds
        self.form = race.forms[kernels > other]
        if self._other_is_plain and kernels > CLEAR * other:
            self._prepare(native=False)
        else:
            forms.note_fastest(race.facts, race.seconds)
            self.native = kernels <= other

"""Contests take the fastest form that computes what the plain form does, and remember how long forms take."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from graphopt.runtime import contest
from graphopt.runtime.checks.verdicts import machine
from graphopt.runtime.contest import KERNELS, RUNTIME, Candidate, Clock, Contest, Memory, live, measured

FEEDS = {"x": np.zeros((4, 2), np.float32)}


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give each test a cache of its own, which remembers nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "graphopt" / "native"


@pytest.fixture
def timer(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """Replace the clock of the machine by one that forms set forward."""
    timer = SimpleNamespace(now=0.0)
    monkeypatch.setattr(contest.time, "perf_counter", lambda: timer.now)
    return timer


@dataclass(eq=False)
class Form:
    """Stand for a session that takes some seconds, and longer the first time."""

    timer: SimpleNamespace
    seconds: float
    model: object = field(default_factory=object)
    calls: int = 0

    def call(self, source: int, feeds: Any) -> None:
        self.timer.now += self.seconds if self.calls else 60.0
        self.calls += 1


@dataclass
class Oracle:
    """Stand for a comparison that finds some forms wrong."""

    wrong: tuple[Form, ...] = ()
    compared: list[Form] = field(default_factory=list)

    def agrees(self, form: Form, source: int, feeds: Any) -> bool:
        self.compared.append(form)
        return form not in self.wrong

    def sample(self, source: int, feeds: Any) -> None:
        return None


def held(forms: dict[str, Form], oracle: Any = None, **options: Any) -> Contest:
    candidates = {name: Candidate(lambda form=form: form) for name, form in forms.items()}
    memory = Memory(lambda: "a graph")
    return Contest(object(), candidates, oracle, **{"memory": memory, **options})  # type: ignore[arg-type]


def test_the_median_of_calls_in_turns_counts_and_the_first_does_not() -> None:
    clock, turns = Clock("ab"), []
    times = {"a": iter([9.0, 1.0, 1.0, 50.0, 1.0, 1.0]), "b": iter([9.0, 1.5, 1.5, 1.5, 1.5, 1.5])}
    while not clock.is_over:
        turns.append(clock.turn)
        clock.add(turns[-1], next(times[turns[-1]]))
    assert turns == ["a", "b"] * 6
    assert clock.seconds == {"a": 1.0, "b": 1.5}


@pytest.mark.parametrize(("other", "calls"), [(1.5, 6), (2.5, 3)])
def test_measuring_ends_sooner_if_a_form_is_clearly_faster(
    timer: SimpleNamespace, other: float, calls: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contest, "MEASURING_SECONDS", 100.0)
    forms = {"a": Form(timer, 1.0), "b": Form(timer, other)}
    assert measured({name: lambda form=form: form.call(0, FEEDS) for name, form in forms.items()}) == {
        "a": 1.0,
        "b": other,
    }
    assert [form.calls for form in forms.values()] == [calls, calls]


def test_measuring_ends_when_it_has_taken_long(timer: SimpleNamespace) -> None:
    forms = {"a": Form(timer, 1.0), "b": Form(timer, 1.2)}
    measured({name: lambda form=form: form.call(0, FEEDS) for name, form in forms.items()})
    assert [form.calls for form in forms.values()] == [2, 2]


def test_the_fastest_form_is_remembered_for_shapes(timer: SimpleNamespace) -> None:
    forms = {KERNELS: Form(timer, 0.03), RUNTIME: Form(timer, 0.02)}
    assert held(forms).fastest(0, FEEDS) == RUNTIME
    assert [form.calls for form in forms.values()] == [6, 6]
    again = held(forms)
    assert again.fastest(0, FEEDS) == RUNTIME
    assert [form.calls for form in forms.values()] == [6, 6]
    assert not again.candidates[KERNELS].is_open
    assert held(forms).fastest(0, {"x": np.zeros((5, 2), np.float32)}) == RUNTIME
    assert [form.calls for form in forms.values()] == [12, 12]
    assert held(forms, memory=Memory(lambda: "another graph")).fastest(0, FEEDS) == RUNTIME
    assert [form.calls for form in forms.values()] == [18, 18]


@pytest.mark.parametrize(
    "note",
    [
        b"",
        b"damaged",
        b'{"fastest": 1, "seconds": [1.0, 2.0]}',
        b'{"kernels": true, "waits": -1, "seconds": {"plain": 1.0, "kernels": "0.5", "constant": 1.0}}',
        b'{"seconds": {}}',
        b'{"seconds": {"kernels": "inf"}}',
    ],
)
def test_notes_of_other_formats_are_measured_again(timer: SimpleNamespace, cache: Path, note: bytes) -> None:
    forms = {KERNELS: Form(timer, 0.02), RUNTIME: Form(timer, 0.03)}
    assert held(forms).fastest(0, FEEDS) == KERNELS
    (path,) = cache.glob(f"{machine()}-*.time.json")
    path.write_bytes(note)
    forms = {KERNELS: Form(timer, 0.03), RUNTIME: Form(timer, 0.02)}
    assert held(forms).fastest(0, FEEDS) == RUNTIME
    assert json.loads(path.read_text())["seconds"] == pytest.approx({KERNELS: 0.03, RUNTIME: 0.02})


@pytest.mark.parametrize("is_remembered", [False, True])
def test_a_wrong_form_is_not_taken_however_fast(timer: SimpleNamespace, is_remembered: bool) -> None:
    forms = {KERNELS: Form(timer, 0.02), RUNTIME: Form(timer, 0.03)}
    if is_remembered:
        assert held(forms, Oracle()).fastest(0, FEEDS) == KERNELS
    oracle = Oracle(wrong=(forms[KERNELS],))
    other = held(forms, oracle)
    assert other.fastest(0, FEEDS) == RUNTIME
    assert oracle.compared == [forms[KERNELS], forms[RUNTIME]]
    assert held(forms, Oracle(wrong=tuple(forms.values()))).fastest(0, FEEDS) is None


def test_without_a_memory_the_first_that_agrees_is_taken(timer: SimpleNamespace) -> None:
    forms = {KERNELS: Form(timer, 0.02), RUNTIME: Form(timer, 0.01)}
    assert held(forms, Oracle(), memory=None).fastest(0, FEEDS) == KERNELS
    assert held(forms, Oracle(wrong=(forms[KERNELS],)), memory=None).fastest(0, FEEDS) == RUNTIME
    assert not any(form.calls for form in forms.values())


def test_a_form_that_is_not_there_is_left_out(timer: SimpleNamespace) -> None:
    forms = {KERNELS: None, RUNTIME: Form(timer, 0.01)}
    assert held(forms, Oracle()).fastest(0, FEEDS) == RUNTIME  # type: ignore[arg-type]


CASES = {
    "kernels are clearly faster": ((0.1, 0.02, 0.09), (), KERNELS),
    "kernels are faster": ((0.1, 0.08, 0.09), (), KERNELS),
    "the runtime's form is faster": ((0.1, 0.08, 0.07), (), RUNTIME),
    "kernels are slower": ((0.1, 0.11, 0.09), (), RUNTIME),
    "kernels are wrong": ((0.1, 0.02, 0.09), (KERNELS,), RUNTIME),
    "the runtime's form is wrong": ((0.1, 0.08, 0.01), (RUNTIME,), KERNELS),
    "the runtime's form is wrong, and kernels are slower": ((0.1, 0.11, 0.01), (RUNTIME,), None),
    "both are wrong": ((0.1, 0.02, 0.01), (KERNELS, RUNTIME), None),
}


def trained(first: Contest, plain: Form, timer: SimpleNamespace) -> str | None:
    """Train until the fastest form is known, and return its name; no form runs that the oracle has found wrong."""
    oracle: Any = first.oracle
    turns = live(first, plain)  # type: ignore[arg-type]
    form, latest = next(turns), None
    while True:
        try:
            form = turns.send((0, FEEDS, latest))
        except StopIteration as end:
            return end.value
        assert form is plain or (form in oracle.compared and form not in oracle.wrong)
        begun = timer.now
        form.call(0, FEEDS)
        latest = timer.now - begun


@pytest.mark.parametrize("seconds", [(0.07, 0.08, 0.09), (0.08, 0.07, 0.09), (0.09, 0.08, 0.07)])
def test_any_number_of_forms_take_part(timer: SimpleNamespace, seconds: tuple[float, ...]) -> None:
    names = (KERNELS, "another form", RUNTIME)
    fastest = names[seconds.index(min(seconds))]
    forms = {name: Form(timer, each) for name, each in zip(names, seconds, strict=True)}
    assert trained(held(forms, Oracle()), Form(timer, 0.1), timer) == fastest
    assert held(forms, Oracle()).fastest(0, FEEDS) == fastest
    anew = held(forms, Oracle(), memory=Memory(lambda: "another graph"))
    assert anew.fastest(0, FEEDS) == fastest


@pytest.mark.parametrize("case", CASES)
def test_steps_that_train_take_turns(timer: SimpleNamespace, case: str) -> None:
    """Each step runs once, in a form that agrees; the next process needs no measurement to take the same form."""
    (plain_seconds, *seconds), wrong, winner = CASES[case]
    plain = Form(timer, plain_seconds)
    forms = {name: Form(timer, each) for name, each in zip((KERNELS, RUNTIME), seconds, strict=True)}
    oracle = Oracle(wrong=tuple(forms[name] for name in wrong))
    assert trained(held(forms, oracle), plain, timer) == winner
    calls = [each.calls for each in (plain, *forms.values())]
    if winner and not wrong:
        assert held(forms, oracle).fastest(0, FEEDS) == winner
        assert calls == [each.calls for each in (plain, *forms.values())]

"""Tables that the whole process shares: each entry has one owner, and a second one of the same name is refused."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from typing import Any

import pytest

import passes
from graphopt import GraphoptError
from graphopt.cli.composition.validation import CALLBACKS
from graphopt.data.columns import KINDS
from graphopt.graph import merging, weight_kinds
from graphopt.graph.metadata import Note
from graphopt.targets.onnxruntime import fuse
from graphopt.targets.target import TARGETS
from graphopt.targets.updates import UPDATES
from passes.gradients import registry, walk
from passes.lowering import registry as lowering

OTHER: Callable[..., Any] = lambda *given, **named: None  # noqa: E731
# What enters a twin of an entry, by the table.
TWINS: dict[str, tuple[Collection[Any], Callable[[], Any]]] = {
    "rules": (registry.RULES, lambda: registry.rule("Tanh")(OTHER)),
    "rules of a domain": (registry.RULES, lambda: registry.rule("Gelu", "Tanh")(OTHER)),
    "local derivatives": (registry.RULES, lambda: registry.elementwise({"Tanh": (OTHER,)})),
    "one-line rules": (registry.RULES, lambda: registry.one_line_rules({"Tanh": OTHER})),
    "expansions": (walk.EXPANSIONS, lambda: walk.expansion(next(iter(walk.EXPANSIONS)))(OTHER)),
    "refusals": (registry.REFUSED, lambda: registry.refused("another", next(iter(registry.REFUSED))[1])),
    "lowerings": (lowering.LOWERINGS, lambda: lowering.lowers("QuickGelu", domain="com.microsoft")(OTHER)),
    "weights": (weight_kinds.WEIGHT_KINDS, lambda: passes.weight_kind("", "MatMul", 1)),
    "adapters": (
        merging.MERGES,
        lambda: merging.register_merge(type("LoRA", (), {"__module__": "passes.others"}), OTHER),
    ),
}


@pytest.mark.parametrize("name", TWINS)
def test_a_twin_is_refused_and_changes_nothing(name: str) -> None:
    table, enter = TWINS[name]
    before = table.copy()  # type: ignore[attr-defined]
    with pytest.raises(GraphoptError, match="expected one "):
        enter()
    assert table == before


def _notes(kind: type = Note) -> Iterator[type[Note]]:
    for each in kind.__subclasses__():
        yield each
        yield from _notes(each)


NAMES: dict[str, tuple[list[Any], Collection[Any]]] = {
    "targets": ([target.name for target in TARGETS.values()], TARGETS),
    "fusions": ([*UPDATES, *(name for name in fuse.FUSIONS if name not in UPDATES)], fuse.FUSIONS),
    "callbacks": ([*CALLBACKS.values()], {*CALLBACKS.values()}),
    "notes": ([(note.KEY) for note in _notes()], {note.KEY for note in _notes()}),
    "columns": ([kind.__name__.lower() for kind in KINDS.values()], KINDS),
    "operators without a gradient": ([*registry.NO_GRADIENT], registry.NO_GRADIENT - {*registry.RULES}),
    "refused operators": (
        [*registry.REFUSED],
        {*registry.REFUSED} - {*registry.RULES} - registry.NO_GRADIENT,
    ),
}


@pytest.mark.parametrize("name", NAMES)
def test_no_name_stands_for_two(name: str) -> None:
    found, table = NAMES[name]
    assert sorted(found) == sorted(table) and found


def test_a_rule_of_one_s_own_replaces_the_last_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is what `passes.gradient` is for: a cell of a notebook may define the rule again."""
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(registry, "REPLACED", set(registry.REPLACED))
    for rule in (OTHER, lambda op, dy, x: [dy]):
        passes.gradient("graphopt.tests", "Twice")(rule)
        assert registry.RULES["graphopt.tests", "Twice"] is rule

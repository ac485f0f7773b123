"""Run named passes in order."""

from __future__ import annotations

import contextlib
import gc
import inspect
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from types import MappingProxyType
from typing import Any, cast

import onnx
import onnx_ir as ir

from graphopt.arguments import Checked
from graphopt.errors import GraphoptError, escaped, kind_of, library_of, unknown
from graphopt.graph import provenance
from graphopt.graph.loading import Source, load
from graphopt.graph.rewriting import Pass, Read
from graphopt.graph.roles import STATE, with_role
from graphopt.graph.strictness import is_strict, run_strictly
from graphopt.graph.traversal import nodes_of

_log = logging.getLogger(__name__)

Step = Callable[[ir.Model], object]
Rules = Mapping[tuple[str, str], Callable[..., Any]]

_rules: ContextVar[Rules] = ContextVar("rules", default=MappingProxyType({}))


class Pipeline(Mapping[str, tuple[Step, ...]], Checked):
    """Run named passes in order. A pipeline is a mapping of names to passes.

    `pipeline(model)` returns a rewritten copy of the model. `pipeline.until(name)` and `pipeline.after(name)` split
    the pipeline in two, so that you can save the model between them.

    Args:
        steps: by name, a pass, a sequence of passes, or None to omit the step.

    >>> from graphopt import models
    >>> pipeline = graphopt.Pipeline(sort=passes.SortInitializers(), simplify=passes.Simplify())
    >>> list(pipeline), list(pipeline.until("sort"))
    (['sort', 'simplify'], ['sort'])
    >>> model = pipeline(models.linear((2,), 1))
    """

    rules: Rules = MappingProxyType({})  # gradient rules that count while it runs

    def __init__(self, **steps: Step | Sequence[Step] | None) -> None:
        self._steps: dict[str, tuple[Step, ...]] = {}
        for name, step in steps.items():
            if step is not None:
                is_sequence = isinstance(step, Sequence) and not isinstance(step, str)
                self._steps[name] = tuple(cast(Sequence[Step], step if is_sequence else [step]))
                for item in self._steps[name]:
                    check_step(item, name)

    def with_rules(self, rules: Rules) -> Pipeline:
        """Return the pipeline with gradient rules of its own, which count while it runs, and nowhere else.

        Args:
            rules: as `graphopt.compile` takes them.

        Raises:
            GraphoptError: a key is no domain and name of an operator, or a rule is no function.
        """
        _check_rules(rules)
        return self._of(self._steps, rules)

    def _of(self, steps: Mapping[str, Sequence[Step]], rules: Rules | None = None) -> Pipeline:
        """Return a pipeline of other steps with the rules of this one, or with others."""
        pipeline = Pipeline(**steps)
        pipeline.rules = dict(self.rules if rules is None else rules)
        return pipeline

    def __getitem__(self, name: str) -> tuple[Step, ...]:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        steps = ", ".join(f"{name}={step!r}" for name, step in self._steps.items())
        return f"Pipeline({steps})" + (f".with_rules({self.rules!r})" if self.rules else "")

    def __call__(self, source: Source, observe: Callable[[str, ir.Model], None] | None = None) -> ir.Model:
        """Run the steps on a copy of a model and call `observe(name, model)` after each step.

        Raises:
            GraphoptError: the model cannot be read, or a pass rejects it.
        """
        with garbage_waits():
            model = load(source)
            known = _operators(model) if self.rules else set()
            is_of_other_passes = provenance.of(model) is None and bool(with_role(model, *STATE))
            model = self.rewrite(model, observe)
            for operator in self.rules.keys() - known - (_operators(model) if self.rules else set()):
                name = "::".join(filter(None, operator))
                raise GraphoptError(
                    f"rules: {name}: expected an operator or a function of the model, found none of this name: "
                    "leave the rule out, or correct its key"
                )
            if not is_of_other_passes:  # which a file does not name
                provenance.note_source(model, source, self._steps)
            return model

    def rewrite(self, model: ir.Model, observe: Callable[[str, ir.Model], None] | None = None) -> ir.Model:
        """Run the steps on a model itself, as a call does on a copy, and return it."""
        with garbage_waits(), using_rules(self.rules):
            for name, step in self._steps.items():
                start = time.perf_counter()
                for item in step:
                    _run(item, model)
                seconds = time.perf_counter() - start
                _log.info("%s: %s, %.3f s, %d nodes", escaped(name), escaped(str(step)), seconds, len(model.graph))
                if observe is not None:
                    observe(name, model)
        return model

    @property
    def learns(self) -> bool:
        """Return whether a pass learns options from data."""
        return any(isinstance(item, Pass) and item.learns for step in self._steps.values() for item in step)

    def adapted(self, model: ir.Model, read: Read) -> Pipeline:
        """Return the pipeline with what its passes learn from data; see `graphopt.adapt`.

        A pass learns about the model that earlier passes make, if these change its predictions, as a new head does, or
        if it says that it follows them.
        """
        done: dict[str, list[Step]] = {}
        waiting: dict[str, list[Step]] = {}  # steps whose changes `model` lacks
        for name, step in self._steps.items():
            done[name] = []
            for item in step:
                if isinstance(item, Pass) and item.learns:
                    altered = (isinstance(x, Pass) and x.alters for each in waiting.values() for x in each)
                    if item.follows or any(altered):
                        model, waiting = self._of(waiting).rewrite(model.clone()), {}
                    item = _as_pass(item, "adapted", item.adapted(model, read))
                done[name].append(item)
                waiting.setdefault(name, []).append(item)
        return self._of(done)

    def planned(self, steps: int) -> Pipeline:
        """Return the pipeline for a training of so many steps."""

        def planned(item: Step) -> Step:
            return _as_pass(item, "planned", item.planned(steps)) if isinstance(item, Pass) else item

        return self._of({name: tuple(map(planned, step)) for name, step in self._steps.items()})

    def without(self, name: str) -> Pipeline:
        """Return the pipeline without the step `name`, if it has one."""
        return self._of({key: step for key, step in self._steps.items() if key != name})

    def until(self, name: str) -> Pipeline:
        """Return the steps up to and including `name`."""
        return self._of(dict(list(self._steps.items())[: self._index(name) + 1]))

    def after(self, name: str) -> Pipeline:
        """Return the steps after `name`."""
        return self._of(dict(list(self._steps.items())[self._index(name) + 1 :]))

    def _index(self, name: str) -> int:
        if name not in self._steps:
            raise GraphoptError(unknown("step", name, self._steps))
        return list(self._steps).index(name)


def rules_in_use() -> Rules:
    """Return the gradient rules of the pipeline that runs in this thread."""
    return _rules.get()


@contextlib.contextmanager
def using_rules(rules: Rules) -> Iterator[None]:
    """Let gradient rules count for what is differentiated in a `with` block."""
    token = _rules.set(rules)
    try:
        yield
    finally:
        _rules.reset(token)


def _operators(model: ir.Model) -> set[tuple[str, str]]:
    """Return the operators and functions that a model calls, by domain and name."""
    return {(node.domain, node.op_type) for node in nodes_of(model)}


def _check_rules(rules: object) -> None:
    """Raise an error unless gradient rules are functions by the domains and names of operators."""
    if not isinstance(rules, Mapping):
        raise GraphoptError(
            f'rules: expected functions by operators, such as {{("", "Round"): rule}}, found {kind_of(rules)}'
        )
    for operator, rule in rules.items():
        is_pair = isinstance(operator, tuple) and len(operator) == 2
        if not is_pair or not all(isinstance(part, str) for part in operator):
            raise GraphoptError(
                f'rules: expected the domain and the name of an operator, such as ("", "Round"), found {operator!r}'
            )
        if not callable(rule) or isinstance(rule, type):
            raise GraphoptError(
                f"rules: {'::'.join(filter(None, operator))}: expected a function of op, dy and the operator's inputs, "
                f"found {kind_of(rule)}"
            )


def _as_pass(item: Pass, method: str, found: object) -> Pass:
    if not isinstance(found, Pass):
        raise GraphoptError(
            f"{type(item).__name__}.{method}: expected a pass, found {kind_of(found)}: return "
            "dataclasses.replace(self, ...), or self"
        )
    return found


def _run(step: Step, model: ir.Model) -> None:
    if isinstance(step, Pass):
        step.apply(model)
        return
    found = run_strictly(step, model) if is_strict() else step(model)
    inner = found.model if isinstance(found, ir.passes.PassResult) else found
    if isinstance(inner, ir.Model | onnx.ModelProto) and inner is not model:
        raise GraphoptError(
            f"{getattr(step, '__name__', type(step).__name__)}: expected changes of the model itself, found another "
            "model as a result, which nothing would read: change the model in place"
        )


@contextlib.contextmanager
def garbage_waits() -> Iterator[None]:
    """Collect no garbage during the block: that goes through all nodes of the model again and again, which live on."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def check_step(item: object, name: str) -> None:
    """Raise an error unless a step is a pass, or a function of a model."""
    if isinstance(item, Pass):
        return
    found, mend = kind_of(item), ""
    if isinstance(item, type):
        mend = f": write {name}={item.__module__.partition('.')[0]}.{item.__name__}()" if issubclass(item, Pass) else ""
    elif callable(item) and library_of(item) in (None, "onnx", "onnx_ir"):
        try:
            inspect.signature(item).bind(None)
        except TypeError:
            names = list(inspect.signature(item).parameters)
            found = f"a function of {' and '.join(names) or 'nothing'}"
            mend = ": passes.CustomLoss(function) makes a loss of it" if name == "loss" else ""
        except ValueError:  # a function without a signature
            return
        else:
            return
    raise GraphoptError(f"pipeline.{name}: expected a pass or a sequence of passes, found {found}{mend}")


def check_pipeline(thing: object, name: str, example: str) -> None:
    """Raise an error unless something that a function, which `name` calls, has been given is a pipeline."""
    if not isinstance(thing, Pipeline):
        raise GraphoptError(f"{name}: expected a pipeline, found {kind_of(thing)}: write {example}")

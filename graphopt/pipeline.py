"""Named steps from an inference model to a training graph."""

from __future__ import annotations

import logging
import pkgutil
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import onnx_ir as ir

from graphopt.errors import GraphoptError, known
from graphopt.loading import Source, load

logger = logging.getLogger(__name__)

Step = Callable[[ir.Model], Any]

# The standard pipeline: a step's name, and the pass that stands there unless another is given.
STANDARD: dict[str, str | None] = {
    "normalize": "passes.Normalize",
    "parameters": "passes.Parameters",
    "sort": "passes.SortInitializers",
    "training": None,
    "loss": None,
    "regularizer": None,
    "precision": None,
    "gradient": "passes.Gradient",
    "recompute": None,
    "clip": None,
    "optimizer": None,
    "schedule": None,
    "loss_scale": None,
    "accumulate": None,
    "simplify": "passes.Simplify",
    "fuse": "passes.Fuse",
}


class Pipeline(Mapping[str, tuple[Step, ...]]):
    """A mapping of named passes, run in order; a step is a pass, several, or None, which is left out.

    `pipeline(model)` returns a rewritten copy. `pipeline.until(name)` and `pipeline.after(name)` are its two parts:
    the model between them can be saved and loaded.
    """

    def __init__(self, **steps: Step | Sequence[Step] | None) -> None:
        self._steps: dict[str, tuple[Step, ...]] = {}
        for name, step in steps.items():
            if step is not None:
                self._steps[name] = tuple(step) if isinstance(step, Sequence) else (step,)
                for one in self._steps[name]:
                    if not callable(one):
                        raise GraphoptError(f"pipeline.{name}: expected a pass or several, found {one!r}")

    def __getitem__(self, name: str) -> tuple[Step, ...]:
        return self._steps[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._steps)

    def __len__(self) -> int:
        return len(self._steps)

    def __repr__(self) -> str:
        return f"Pipeline({', '.join(f'{name}={step!r}' for name, step in self._steps.items())})"

    def __call__(self, source: Source, observe: Callable[[str, ir.Model], None] | None = None) -> ir.Model:
        """Run the steps on a copy of a model, calling `observe(name, model)` after each.

        Raises:
            GraphoptError: the model cannot be read, or a pass refuses it.
        """
        model = load(source)
        for name, step in self._steps.items():
            start = time.perf_counter()
            for one in step:
                one(model)
            logger.info("%s: %s, %.3f s, %d nodes", name, step, time.perf_counter() - start, len(model.graph))
            if observe is not None:
                observe(name, model)
        return model

    def until(self, name: str) -> Pipeline:
        """Return the steps up to and with `name`."""
        return Pipeline(**dict(list(self._steps.items())[: self._index(name) + 1]))

    def after(self, name: str) -> Pipeline:
        """Return the steps that follow `name`."""
        return Pipeline(**dict(list(self._steps.items())[self._index(name) + 1 :]))

    def _index(self, name: str) -> int:
        if name not in self._steps:
            raise GraphoptError(known("step", name, self._steps))
        return list(self._steps).index(name)


def standard(**steps: Step | Sequence[Step] | None) -> Pipeline:
    """Return the standard pipeline with some steps given; None leaves a step out."""
    return filled(STANDARD, steps)


def filled(declared: Mapping[str, str | None], steps: Mapping[str, Step | Sequence[Step] | None]) -> Pipeline:
    """Return a pipeline of declared steps, some of them given; None leaves a step out."""
    for name in steps:
        if name not in declared:
            raise GraphoptError(known("step", name, declared))
    defaults = {name: pkgutil.resolve_name(target)() if target else None for name, target in declared.items()}
    return Pipeline(**{**defaults, **steps})


def grad(
    model: Source, wrt: Sequence[str], *, of: str | None = None, seeded: bool = False, keep: bool = True
) -> ir.Model:
    """Return a model with the gradients of one of its outputs by inputs or weights as outputs `OF.grad.X`.

    It is a model like any other, so that `grad` of it gives second derivatives.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        wrt: the names of the inputs and weights to differentiate by.
        of: the output to differentiate, which is summed; the only floating one by default.
        seeded: add an input `OF.seed` that weighs the output's elements: a vector-Jacobian product.
        keep: keep the model's own outputs.

    Raises:
        GraphoptError: the model cannot be read, a name is unknown, or operators on the way have no rule.
    """
    names = ("normalize", "differentiate", "simplify")
    normalize, differentiate, simplify = (pkgutil.resolve_name(f"passes.{name.title()}") for name in names)
    loaded = load(model)
    own = {output.name for output in loaded.graph.outputs}
    normalize()(loaded)
    differentiate(wrt, of, seeded)(loaded)
    if not keep:
        for output in [output for output in loaded.graph.outputs if output.name in own]:
            loaded.graph.outputs.remove(output)
    simplify()(loaded)
    return loaded


def compile(model: Source, **steps: Step | Sequence[Step] | None) -> ir.Model:
    """Compile an inference model to a training graph by the standard pipeline; see `STANDARD` for the steps.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        steps: the passes to put in: `loss`, `regularizer`, `clip`, `optimizer`, `schedule`, `parameters`, ...

    Raises:
        GraphoptError: the model cannot be read, a step is unknown, or a pass refuses the model.
    """
    return standard(**steps)(model)

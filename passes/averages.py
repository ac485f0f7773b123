"""Average the parameters over the steps of a training: the pipeline's step `average`."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field
from typing import Any, final

import numpy as np
import onnx
import onnx_ir as ir

from graphopt.arguments import checked
from graphopt.errors import GraphoptError, kind_of
from graphopt.graph import metadata, state
from graphopt.graph.authored import ask, name_of_method, scalar
from graphopt.graph.emitter import Emitter
from graphopt.graph.inference_form import InferenceForm
from graphopt.graph.merging import Adapted
from graphopt.graph.rewriting import Pass, Pattern, no_match, selects
from graphopt.graph.roles import Role, updated, with_role
from graphopt.graph.state import AVERAGE
from graphopt.graph.values import name_of, next_of, redirect, wide_type
from graphopt.intervals import Interval, within
from passes.optimizers.slots import initial_array

_VARIANCE, _DEVIATIONS = "variance", "deviations"  # of a parameter, over the averaged ones

__all__ = ["EMA", "SWA", "SWAG", "Average"]


@dataclass(frozen=True)
class Average(Pass):
    """Add state `NAME.average` for parameters: an average over the updates. Run it after the optimizer.

    This is the base class of averages. A subclass implements `share`. Until the average starts, it equals the
    parameter. Evaluation, prediction, export and the choice of the best epoch use the averages, and training goes on
    with the parameters themselves. Other state, such as running means, is not averaged.

    Args:
        start: the number of the update from which on parameters are averaged.
        every: the number of updates from one that is averaged to the next.
        parameters: shell-style patterns of the names of the parameters to average, one or several.
        infer: evaluate, predict and export with the averages; otherwise they are only state.

    Raises:
        GraphoptError: the model has no optimizer, it has averages already, no parameter matches, or a number is outside
            its interval.

    >>> class Halfway(passes.Average):
    ...     def share(self, op, count):
    ...         return op.constant(0.5, like=count)
    >>> steps = {"optimizer": passes.SGD(0.1), "average": Halfway()}
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), **steps)
    >>> sorted(graphopt.Executor(step).state)[:2]
    ['layers.0.bias', 'layers.0.bias.average']
    """

    start: int = within("[1, inf)", 1, kw_only=True)
    every: int = within("[1, inf)", 1, kw_only=True)
    parameters: Pattern = field(default="*", kw_only=True)
    infer: bool = field(default=True, kw_only=True)

    @abstractmethod
    def share(self, op: Emitter, count: ir.Value) -> ir.Value:
        """Emit the share of the parameter in the new average; `count` is how many it already contains, at least 1."""

    def requires(self, model: ir.Model) -> None:
        name = type(self).__name__
        self.follows_optimizer(model)
        if state.averages(model):
            raise GraphoptError(f"{name}: expected a model without averages, found some: use one average")
        if state.accumulators(model):
            raise GraphoptError(f"{name}: expected it before Accumulate, found it after: run it first")

    @final
    def rewrite(self, model: ir.Model) -> None:
        name, trained = type(self).__name__, updated(model)
        following = {name_of(y): y for y in with_role(model, Role.NEXT)}
        chosen = [w for w in trained if selects(self.parameters, w)]
        if not chosen:
            raise no_match(f"{name}: parameters={self.parameters!r}", "parameter", map(name_of, trained))
        with Emitter(model) as op:
            wide = max((wide_type(w) for w in chosen), key=lambda dtype: dtype.itemsize)
            share = self._share(op, op.Cast(op.Add(state.counter(model), 1), to=wide))
            for w in chosen:
                average = state.declare_slot(model, w, AVERAGE, initial_array(w))
                if self.infer:
                    _infer_with(op, w, average)
                new = op.cast(following[next_of(w)], average.dtype)
                moved = average + op.cast(share, average.dtype) * (new - average)
                state.set_next(model, average, moved)
                self.beside(op, model, w, new, average, moved, share)

    def beside(self, op: Emitter, model: ir.Model, w: ir.Value, *moments: ir.Value) -> None:
        """Add state of a parameter, from its new numbers, the average before and after them, and their share."""

    def _share(self, op: Emitter, t: ir.Value) -> ir.Value:
        """Emit the share of the parameters after update `t` in their averages, from 0 to 1."""
        since = t - float(self.start)
        count = op.Floor(since / float(self.every)) if self.every > 1 else since
        share = scalar(ask(self, "share", op, op.Max(count, 1.0)), name_of_method(self, "share"), "the share", t.dtype)
        share = op.Where(op.Greater(count, 0.0), share, op.constant(1.0, like=since))
        if self.every == 1:
            return share
        due = op.Or(op.Less(since, 0.0), op.Equal(count * float(self.every), since))
        return op.Where(due, share, op.constant(0.0, like=since))


def _infer_with(op: Emitter, w: ir.Value, average: ir.Value) -> None:
    """Make inference read the average in place of a parameter, under the name and in the form of the parameter."""
    notes = dict(metadata.all_of(average))
    metadata.copy(w, average)
    Adapted.remove(average)
    metadata.all_of(average).update(notes)
    metadata.ORIGINAL_NAME.write(average, metadata.original_name(w))
    uses = list(w.uses())
    read = InferenceForm(inputs={0: name_of(average)}).write(op.Identity(w))
    redirect(uses, read)


@dataclass(frozen=True)
class EMA(Average):
    """Keep an exponential moving average of the parameters: a + (1 - decay) (w - a), from the first one on.

    Polyak and Juditsky 1992. PyTorch's `AveragedModel` with `get_ema_multi_avg_fn(decay)` does the same.

    Args:
        decay: the weight of the previous average.

    >>> steps = {"optimizer": passes.SGD(0.1), "average": passes.EMA(0.99)}
    >>> executor = graphopt.Executor(graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), **steps))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> for _ in range(3):
    ...     report = executor.step(x=zero, target=one)
    >>> {name: round(float(x[0]), 3) for name, x in executor.state.items() if "bias" in name}
    {'layers.0.bias': 0.488, 'layers.0.bias.average': 0.204}
    >>> bool(executor.predict(x=zero)["y"][0] == executor.state["layers.0.bias.average"])
    True
    """

    decay: float = within("[0, 1)", 0.999)

    def share(self, op: Emitter, count: ir.Value) -> ir.Value:
        return op.constant(1 - self.decay, like=count)


@dataclass(frozen=True)
class SWA(Average):
    """Keep the mean of the parameters since an update (Izmailov et al. 2018), as PyTorch's `AveragedModel` does.

    Average once per epoch, late in the training, at a constant or cyclic rate. Afterwards, the running statistics of
    BatchNormalization fit the last parameters, not their mean.

    >>> steps = {"optimizer": passes.SGD(0.1), "average": passes.SWA(start=2)}
    >>> executor = graphopt.Executor(graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), **steps))
    >>> zero, one = numpy.zeros((4, 1), numpy.float32), numpy.ones((4, 1), numpy.float32)
    >>> for _ in range(3):
    ...     report = executor.step(x=zero, target=one)
    >>> {name: round(float(x[0]), 4) for name, x in executor.state.items() if "bias" in name}
    {'layers.0.bias': 0.488, 'layers.0.bias.average': 0.424}
    """

    def share(self, op: Emitter, count: ir.Value) -> ir.Value:
        return 1 / (count + 1.0)


@dataclass(frozen=True)
class SWAG(SWA):
    """Average as `SWA`, and keep variances and the last deviations (Maddox et al. 2019, arXiv:1902.02476).

    A parameter NAME gets the state `NAME.variance` and, with a rank, `NAME.deviations` [rank, ...]. `drawn` returns
    models whose weights are drawn from the normal distribution of this mean and covariance, for `passes.Ensemble`.
    Running statistics of BatchNormalization stay those of the last parameters, as with `SWA`; the article computes them
    anew for each drawn model.

    Args:
        rank: how many of the last averaged updates leave their deviation from the mean; 0 for variances alone.

    >>> steps = {"optimizer": passes.SGD(0.1), "average": passes.SWAG(start=2, rank=3)}
    >>> step = graphopt.compile(models.linear((4,), 3), loss=passes.CrossEntropy(), **steps)
    >>> executor = graphopt.Executor(step)
    >>> rows = {"x": numpy.eye(4, dtype=numpy.float32), "target": numpy.arange(4) % 3}
    >>> for _ in range(8):
    ...     report = executor.step(rows)
    >>> first, *others = passes.SWAG.drawn(executor, samples=5)
    >>> unsure = graphopt.explain(first, passes.Ensemble(others))
    """

    rank: int = within("[0, 1000]", 20)

    def beside(self, op: Emitter, model: ir.Model, w: ir.Value, *moments: ir.Value) -> None:
        new, average, moved, share = moments
        initial = initial_array(w)
        share = op.cast(share, average.dtype)
        variance = state.declare_slot(model, w, _VARIANCE, np.zeros_like(initial))
        product = (new - average) * (new - moved)  # Welford 1962: no squares that cancel
        state.set_next(model, variance, variance + share * (product - variance))
        if self.rank:
            rows = np.zeros((self.rank, *initial.shape), initial.dtype)
            deviations = state.declare_slot(model, w, _DEVIATIONS, rows)
            later = op.Concat(op.Slice(deviations, [1], [self.rank], [0]), op.Unsqueeze(new - moved, [0]), axis=0)
            counts = op.And(op.Greater(share, 0.0), op.Less(share, 1.0))  # it is 1 before the start, 0 in between
            state.set_next(model, deviations, op.Where(counts, later, deviations))

    @staticmethod
    @checked()
    def drawn(executor: Any, samples: int = 20, seed: int = 0) -> list[onnx.ModelProto]:
        """Return trained models, as `Executor.trained` does, whose weights are drawn; the executor stays as it is.

        Raises:
            GraphoptError: the executor has no such state, does not infer with it, or has not averaged the parameters of
                two updates; or a number is outside its interval.
        """
        for option, value, interval in ("samples", samples, "[1, inf)"), ("seed", seed, "[0, inf)"):
            if (allowed := Interval(interval, whole=True)).outside(value):
                raise GraphoptError(f"SWAG.drawn({option}={value!r}): expected {allowed}, found {value!r}")
        is_executor = isinstance(getattr(executor, "model", None), ir.Model)
        read = state.averages_read(executor.model) if is_executor else {}
        known, random = executor.state if read else {}, np.random.default_rng(seed)
        averages = {name: known[name] for name, owner in read.items() if f"{owner}.{_VARIANCE}" in known}
        if not averages:
            found = "another" if is_executor else kind_of(executor)
            raise GraphoptError(f"SWAG.drawn: expected an executor with average=passes.SWAG(infer=True), found {found}")
        if not any(known[f"{read[name]}.{_VARIANCE}"].any() for name in averages):
            raise GraphoptError(
                "SWAG.drawn: expected two averaged updates or more, found variances of 0: train past start"
            )
        models = []
        try:
            for _ in range(samples):
                factors = random.standard_normal(1000)  # of the deviations of all parameters
                near = {}
                for name, mean in averages.items():
                    owner = name.removesuffix(f".{AVERAGE}")
                    moved = np.sqrt(known[f"{owner}.{_VARIANCE}"].clip(0)) * random.standard_normal(mean.shape)
                    rows = known.get(f"{owner}.{_DEVIATIONS}")
                    if rows is not None:
                        count = max(int(rows.reshape(len(rows), -1).any(1).sum()), 2)
                        moved += np.tensordot(factors[: len(rows)], rows, 1) / np.sqrt(count - 1)
                        moved /= np.sqrt(2)
                    near[name] = (mean + moved).astype(mean.dtype)
                executor.update_state(near)
                models.append(executor.trained())
        finally:
            executor.update_state(averages)
        return models

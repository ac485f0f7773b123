"""Compile inference models to training graphs and gradient models."""

from __future__ import annotations

import enum
import inspect
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final, Literal

import onnx_ir as ir

from graphopt.arguments import checked, keywords_of
from graphopt.errors import GraphoptError, kind_of, library_of, nearest
from graphopt.graph.loading import Source
from graphopt.pipeline import Pipeline, Rules, Step, check_pipeline, check_step


class Default(enum.Enum):
    """Mark a step of the standard pipeline that keeps its default pass."""

    PASS = "default"

    def __repr__(self) -> str:
        return "DEFAULT"


DEFAULT: Final = Default.PASS
FIRST_SCALE = 2.0**15  # of the loss
Steps = Step | Sequence[Step] | None


@checked()
def standard(
    *,
    normalize: Steps | Default = DEFAULT,
    standardize: Steps = None,
    quantize: Steps = None,
    adapter: Steps = None,
    parameters: Steps | Default = DEFAULT,
    sort: Steps | Default = DEFAULT,
    augment: Steps = None,
    training: Steps | Default = DEFAULT,
    loss: Steps = None,
    regularizer: Steps = None,
    precision: Steps = None,
    gradient: Steps | Default = DEFAULT,
    recompute: Steps = None,
    clip: Steps = None,
    optimizer: Steps = None,
    average: Steps = None,
    prune: Steps = None,
    schedule: Steps = None,
    loss_scale: Steps = None,
    accumulate: Steps = None,
    simplify: Steps | Default = DEFAULT,
    fuse: Steps = None,
    rules: Rules | None = None,
) -> Pipeline:
    """Return the standard pipeline with the passes and rules given; see `compile` for them.

    >>> import graphopt, passes
    >>> list(graphopt.standard(loss=passes.MeanSquaredError()))
    ['normalize', 'parameters', 'sort', 'training', 'loss', 'gradient', 'simplify']
    """
    steps = {name: step for name, step in locals().items() if name != "rules"}
    import passes

    for name, given in steps.items():
        for item in given if isinstance(given, list | tuple) else [given]:
            check_family(name, item)
    default: dict[str, Callable[[], Step]] = {
        "normalize": passes.Normalize,
        "parameters": passes.Parameters,
        "sort": passes.SortInitializers,
        "training": partial(passes.TrainingMode, as_exported=True),
        "gradient": partial(passes.Gradient, loss_scale=None if loss_scale is None else FIRST_SCALE),
        "simplify": passes.Simplify,
    }
    chosen = {name: default[name]() if step is DEFAULT else step for name, step in steps.items()}
    return Pipeline(**chosen) if rules is None else Pipeline(**chosen).with_rules(rules)


# What to write in place of a word or a number.
_INSTEAD = {
    "parameters": "Parameters({})",
    "regularizer": "L2({})",
    "clip": "ClipGlobalNorm({})",
    "accumulate": "Accumulate({})",
    "augment": "AugmentImages()",
    "precision": "MixedPrecision({})",
    "average": "EMA({})",
    "prune": "Prune({})",
    "fuse": "Fuse()",
    "quantize": "QuantizeWeights()",
    "recompute": "Recompute()",
    "schedule": "Cosine()",
    "standardize": "Standardize()",
    "training": "TrainingMode()",
}


def check_family(name: str, item: object) -> None:
    """Raise an error if a step is a word or a number, or a pass of another family than its step."""
    import passes

    places = {passes.Loss: "loss", passes.Optimizer: "optimizer", passes.Schedule: "schedule"}
    for family, place in places.items():
        if isinstance(item, family) and name in places.values() and name != place:
            raise GraphoptError(
                f"pipeline.{name}: expected another pass, found {type(item).__name__}, which is for {place}: write "
                f"{place}=passes.{type(item).__name__}(...)"
            )
    if isinstance(item, str | int | float):
        kinds = {
            **{step: kind for kind, step in places.items()},
            **{"adapter": passes.Adapter, "average": passes.Average},
            **{"clip": passes.Clip, "regularizer": passes.Regularizer},
        }
        members = {each: getattr(passes, each) for each in passes.__all__}
        of_step = [
            each
            for each, member in members.items()
            if inspect.isclass(member) and issubclass(member, kinds.get(name, ())) and not inspect.isabstract(member)
        ]
        meant = nearest(item, of_step) if isinstance(item, str) else None
        given = item if name != "precision" or item in ("float16", "bfloat16") else "float16"
        instead = f"{meant}()" if meant else _INSTEAD.get(name, "").format("" if item is True else repr(given))
        mend = f": write {name}=passes.{instead}" if instead else ""
        mend = ": leave it out, or give None" if item is False else mend
        raise GraphoptError(f"pipeline.{name}: expected a pass or a sequence of passes, found {item!r}{mend}")
    if library_of(item) == "torch" and (meant := nearest(type(item).__name__, passes.__all__)):
        raise GraphoptError(
            f"pipeline.{name}: expected a pass or a sequence of passes, found {kind_of(item)}: write "
            f"{name}=passes.{meant}(...)"
        )
    if isinstance(item, type):
        check_step(item, name)


STANDARD = tuple(name for name in inspect.signature(standard).parameters if name != "rules")


@checked("name the steps, such as loss=passes.CrossEntropy(), optimizer=passes.AdamW()")
@keywords_of(standard, own=1)
def compile(model: Source, **steps: Any) -> ir.Model:
    """Compile an inference model to a training graph by the standard pipeline.

    A step is a pass, a sequence of passes, or None to omit it. Steps run in the order of the arguments.

    Args:
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        normalize: converts the model to opset 21 unless it needs a newer one, inlines functions, replaces operators of
            `com.microsoft` and `ai.onnx.ml` by standard ones, turns weights into initializers and infers all types;
            `passes.Normalize()` by default.
        standardize: centers and scales the model's inputs, so that the training graph and the trained model take raw
            input, for example `passes.Standardize(mean, scale)`; see `graphopt.adapt`.
        quantize: trains the model for its form in integers, for example `passes.FakeQuantize()`;
            `passes.QuantizeWeights(bits=4)` stores weights of products in a few bits and freezes them, as a base for
            adapters, and `passes.LowRank(energy=0.9)` replaces each by two of a low rank.
        adapter: trains few weights beside those of the model, which are frozen, for example `passes.LoRA(rank=8)`; a
            list adds several.
        parameters: chooses the weights that train: by default those that trained in the exported program;
            `passes.Parameters()` by default.
        sort: sorts the parameters by name; `passes.SortInitializers()` by default.
        augment: changes the rows that train at random, but not those of evaluation and export, for example
            `passes.AugmentImages()`, which moves and mirrors them, or `passes.MixUp()`; a list adds several.
        training: makes BatchNormalization use batch statistics and enables Dropout in training, but not in evaluation
            and export, for example `passes.TrainingMode()`; `passes.TrainingMode(as_exported=True)` by default, which
            does so in the nodes that the file has in training mode.
        loss: adds the loss, for example `passes.CrossEntropy()`; `passes.Losses` is for several outputs, `passes.CTC`
            for sequences of labels without times, `passes.OwnLoss` for a model that computes its own loss.
        regularizer: adds a penalty on parameters chosen by name, for example `passes.L2(1e-4)`; a list adds several.
            `passes.AdversarialTraining(0.03)` trains on inputs near by with a larger loss.
        precision: computes matrix products, convolutions and the operators between them in 16 bits, for example
            `passes.MixedPrecision()`; parameters, their updates and the trained model stay float32.
        gradient: differentiates the loss with respect to the parameters; `passes.Gradient()` by default.
            `passes.StopGradient(values)` before it treats values as constants. `passes.SharpnessAware(0.05)` takes the
            gradients at weights near by with a larger loss (SAM). `passes.OrtGradient()` uses the gradients of
            onnxruntime-training.
        recompute: saves memory by running parts of the forward pass again during the backward pass, for example
            `passes.Recompute()`.
        clip: clips gradients, for example `passes.ClipGlobalNorm(1.0)`; `passes.GradientNorm()` and
            `passes.ReportGradients()` only report them.
        optimizer: updates the parameters, for example `passes.AdamW(learning_rate=1e-3)`; `passes.Group` sets another
            rate or weight decay for some of them.
        average: averages the parameters over the steps for evaluation, prediction and export, for example
            `passes.EMA(0.999)`; `passes.SWA(start=1000)` takes the plain mean.
        prune: keeps weights at 0, for example `passes.Prune(0.9, end=1000)`, which prunes by and by; other structures
            are `2:4` and `channel`.
        schedule: sets the learning rate of each step, for example `passes.Cosine(steps=1000, warmup=100)`.
        loss_scale: adapts the scale of the loss of a model in 16 bits, for example `passes.DynamicLossScale()`, which
            skips a step whose gradients overflow and reduces the scale. The default gradient then starts from a scale
            of 32,768.
        accumulate: accumulates the gradients of several batches before each update, for example
            `passes.Accumulate(4)`.
        simplify: folds constants, merges equal nodes and rewrites arithmetic; `passes.Simplify()` by default.
        fuse: lowers the graph for ONNX Runtime's CPU kernels, for programs that run the file without graphopt:
            `passes.Fuse()`. `graphopt.Executor` lowers a plain graph itself, for the machine that it runs on.
        rules: gradient rules for this compilation, by the domain and the name of an operator, or of a function in the
            model: `{("", "Round"): rule}`. A rule is a function as `passes.gradient` takes it, and replaces the rule
            that counts otherwise. `passes.surrogate` declares one that is not the derivative on purpose; a rule of an
            operator that is constant almost everywhere is always one.

    Raises:
        GraphoptError: the model cannot be read, a pass rejects it, or it has no operator of a rule.

    >>> import graphopt, passes
    >>> from graphopt import models
    >>> step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    >>> [output.name for output in step.graph.outputs][:2]
    ['loss', 'y']
    """
    return standard(**steps)(model)


@dataclass(frozen=True)
class StepHalves:
    """Hold a training graph, and the same step in two halves between which workers average their gradients.

    Args:
        step: the whole step, as `compile` returns it.
        grad: computes the loss, the gradients and `rows`, the weight of the batch, from data and state. It is one
            graph, or several stages that are run in turn, if the workers compute batch statistics together. Workers
            sum the outputs with the role `summed` of a stage before the next one. A stage may
            read all outputs of earlier ones.
        apply: computes the new state from the gradients' sums over all workers.

    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> halves = graphopt.split_step(pipeline, models.linear((2,), 1))
    >>> "learning_rate" in [x.name for x in halves.apply.graph.inputs]
    True
    """

    step: ir.Model
    grad: tuple[ir.Model, ...]
    apply: ir.Model


@checked()
def split_step(
    pipeline: Pipeline, model: Source, *, statistics: Literal["synchronized", "local"] = "synchronized"
) -> StepHalves:
    """Compile an inference model by a pipeline to a training graph and to its halves.

    The halves are cut out of the graph that the pipeline returns.

    Args:
        pipeline: the passes, such as `graphopt.standard` returns them.
        model: a path, an onnx.ModelProto or an onnx_ir.Model; it is not changed.
        statistics: the mean and the variance by which BatchNormalization normalizes: with `synchronized`, those of the
            rows of all workers, as one process does; with `local`, those of a worker's own rows, which takes no
            exchanges. In both cases, running statistics are means over the workers.

    Raises:
        GraphoptError: the model cannot be read, a pass rejects it, the step cannot be split, or `statistics` is
            unknown.

    >>> import graphopt, passes
    >>> from graphopt import models
    >>> pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> halves = graphopt.split_step(pipeline, models.linear((2,), 1))
    >>> [output.name for output in halves.grad[0].graph.outputs]
    ['loss', 'y', 'rows', 'layers.0.weight.grad', 'layers.0.bias.grad']
    >>> [output.name for output in halves.apply.graph.outputs]
    ['step.next', 'layers.0.bias.next', 'layers.0.weight.next']
    """
    import passes
    from passes.parts.batch_statistics import stages_of_batch
    from passes.parts.halves import cut

    if statistics not in ("synchronized", "local"):
        raise GraphoptError(f"statistics: expected 'synchronized' or 'local', found {statistics!r}")
    check_pipeline(pipeline, "split_step", "split_step(graphopt.standard(...), model)")
    step = pipeline(model)
    grad, apply = cut(step.clone())
    parts = stages_of_batch(grad) if statistics == "synchronized" else [grad]
    simplify = passes.Simplify()
    for half in (*parts, apply):
        simplify.apply(half)
    return StepHalves(step, tuple(parts), apply)


def outer_step(step: ir.Model, optimizer: Step | None = None) -> ir.Model:
    """Return the graph that updates the weights of several workers after each has trained on its own.

    An input `NAME.grad` for each parameter NAME is what the workers' own steps have subtracted from it, in the mean
    over the workers. The optimizer takes it for the gradient. Running statistics are averaged. Names of the optimizer's
    own state begin with `outer.`.

    Args:
        step: a training graph; it is not changed.
        optimizer: an optimizer; by default that of DiLoCo (Douillard et al. 2023), `passes.SGD(0.7, momentum=0.9,
            nesterov=True)`. `passes.SGD(1.0)` replaces the weights by the mean over the workers.

    Raises:
        GraphoptError: the graph updates no weights, or the optimizer rejects them.

    >>> import graphopt, passes
    >>> from graphopt import models
    >>> step = graphopt.compile(models.linear((2,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> outer = graphopt.compiler.outer_step(step, passes.SGD(1.0))
    >>> [output.name for output in outer.graph.outputs]
    ['outer.step.next', 'layers.0.bias.next', 'layers.0.weight.next']
    """
    import passes
    from passes.parts.halves import outer_update

    return outer_update(step, optimizer or passes.SGD(0.7, momentum=0.9, nesterov=True))

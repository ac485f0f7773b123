"""Passes declare what they need and leave, and tell whether they changed a model."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

import graphopt
import passes
from graphopt import models
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass

MSE, SGD = passes.MeanSquaredError(), passes.SGD(0.1)
SCALED = passes.Gradient(loss_scale=8.0)
DIFFERENTIATED = [passes.Normalize(), passes.Parameters(), MSE, passes.Gradient()]
TRAINING = [*DIFFERENTIATED, SGD]


def run(steps: list[Any]) -> ir.Model:
    return graphopt.Pipeline(steps=steps)(models.mlp((4,), 2, hidden=[3]))


AFTER_GRADIENT = "expected a model without gradients, found gradients: run it before Gradient"
NEEDS_UPDATE = "needs an optimizer's update, found none: run the optimizer first"
USED = "needs gradients, found an update that has used them: run it before the optimizer"
MISSING = "needs gradients, found none: run Gradient first"
ORDERS: dict[str, tuple[list[Any], str]] = {
    "a gradient without a loss": (
        [*DIFFERENTIATED[:2], passes.Gradient()],
        "Gradient needs a loss, found none",
    ),
    "a gradient without parameters": (
        [passes.Normalize(), MSE, passes.Gradient()],
        "Gradient needs parameters, found none: run Parameters first",
    ),
    "two gradients": ([*DIFFERENTIATED, passes.Gradient()], f"Gradient: {AFTER_GRADIENT}"),
    "an optimizer without gradients": ([*DIFFERENTIATED[:3], SGD], f"SGD {MISSING}"),
    "two optimizers": (
        [*TRAINING, passes.AdamW()],
        "AdamW: expected a model without an update, found one: use one",
    ),
    "a penalty behind the gradient": ([*DIFFERENTIATED, passes.L2(0.1)], f"L2: {AFTER_GRADIENT}"),
    "a penalty behind the update": ([*TRAINING, passes.L2(0.1)], f"L2: {AFTER_GRADIENT}"),
    "a loss behind the gradient": ([*DIFFERENTIATED, MSE], f"MeanSquaredError: {AFTER_GRADIENT}"),
    "training behind the gradient": (
        [*DIFFERENTIATED, passes.TrainingMode()],
        f"TrainingMode: {AFTER_GRADIENT}",
    ),
    "precision behind the update": (
        [*TRAINING, passes.MixedPrecision()],
        f"MixedPrecision: {AFTER_GRADIENT}",
    ),
    "a stop behind the gradient": (
        [*DIFFERENTIATED, passes.StopGradient("x")],
        f"StopGradient: {AFTER_GRADIENT}",
    ),
    "parameters behind the gradient": (
        [*DIFFERENTIATED, passes.Parameters()],
        f"Parameters: {AFTER_GRADIENT}",
    ),
    "scaling behind the gradient": (
        [*DIFFERENTIATED, passes.Standardize(0.0, 1.0)],
        f"Standardize: {AFTER_GRADIENT}",
    ),
    "bits behind the gradient": (
        [*DIFFERENTIATED, passes.QuantizeWeights()],
        f"QuantizeWeights: {AFTER_GRADIENT}",
    ),
    "a head behind the gradient": ([*DIFFERENTIATED, passes.Head(classes=5)], f"Head: {AFTER_GRADIENT}"),
    "an adapter behind parameters": (
        [*DIFFERENTIATED[:2], passes.LoRA(rank=1)],
        "LoRA: expected an inference model, found a training graph with the state",
    ),
    **{
        f"{item} {place}": ([*before, item], f"{type(item).__name__} {message}")
        for item in (
            passes.ClipValue(1.0),
            passes.GradientNorm(),
            passes.ReportGradients(),
            passes.Recompute(),
        )
        for place, before, message in (
            ("first", DIFFERENTIATED[:3], MISSING),
            ("behind the update", TRAINING, USED),
        )
    },
    "an average first": ([*DIFFERENTIATED, passes.EMA()], f"EMA {NEEDS_UPDATE}"),
    "two averages": (
        [*TRAINING, passes.EMA(), passes.SWA()],
        "SWA: expected a model without averages, found some",
    ),
    "an average behind Accumulate": (
        [*TRAINING, passes.Accumulate(2), passes.EMA()],
        "EMA: expected it before Accumulate, found it after: run it first",
    ),
    "Accumulate first": ([*DIFFERENTIATED, passes.Accumulate(2)], f"Accumulate {NEEDS_UPDATE}"),
    "Accumulate twice": (
        [*TRAINING, passes.Accumulate(2), passes.Accumulate(2)],
        "Accumulate: expected a model without it, found its sums: use one Accumulate",
    ),
    "Accumulate behind Fuse": (
        [*TRAINING, passes.Fuse(), passes.Accumulate(2)],
        "Accumulate: expected it before Fuse, found it after: run it first",
    ),
    "a schedule first": (
        [*DIFFERENTIATED, passes.Constant()],
        "Constant needs the hyperparameter 'learning_rate', found none: run the optimizer first",
    ),
    "two schedules": (
        [*TRAINING, passes.Constant(), passes.Cosine(9)],
        "Cosine: expected a rate without a schedule, found one with: use one schedule",
    ),
    "a scale first": (
        [*DIFFERENTIATED[:3], SCALED, passes.DynamicLossScale()],
        "DynamicLossScale: expected a scaled loss and an optimizer's update, found no optimizer",
    ),
    "a scale behind Accumulate": (
        [*DIFFERENTIATED[:3], SCALED, SGD, passes.Accumulate(2), passes.DynamicLossScale()],
        "DynamicLossScale: expected it before Accumulate, found it after: run it first",
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("case", ORDERS)
def test_a_wrong_order_is_one_line(case: str) -> None:
    steps, message = ORDERS[case]
    with pytest.raises(graphopt.GraphoptError) as error:
        run(steps)
    assert str(error.value).startswith(message) and "\n" not in str(error.value)


def _negate(model: ir.Model) -> None:
    with Emitter(model) as op:
        model.graph.outputs[0] = op.Neg(model.graph.outputs[0], _outputs=["other"])


def own(rewriting: Callable[[ir.Model], None], **methods: Any) -> Any:
    """Return a pass of a user with a rewriting."""
    members = {"rewrite": lambda self, model: rewriting(model), **methods}
    return dataclasses.dataclass(frozen=True)(type("Own", (Pass,), members))()


def nothing(model: ir.Model) -> None: ...


def refuse(self: Any, model: ir.Model) -> None:
    raise graphopt.GraphoptError(f"{type(self).__name__} needs a shrubbery, found none: plant one")


@pytest.mark.parametrize("method", ["requires", "ensures"])
def test_a_declaration_is_checked_in_every_call(method: str) -> None:
    ran: list[ir.Model] = []
    item = own(ran.append, **{method: refuse})
    for call in (item, item.call, item.apply, graphopt.Pipeline(own=item)):
        ran.clear()
        with pytest.raises(graphopt.GraphoptError, match=r"^Own needs a shrubbery, found none"):
            call(models.linear((2,), 1))
        assert bool(ran) == (method == "ensures")


def _weights(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[ir.Model], None]:
    def rewrite(model: ir.Model) -> None:
        for x in model.graph.initializers.values():
            assert x.const_value is not None
            x.const_value = ir.tensor(change(x.const_value.numpy()), name=x.name)

    return rewrite


def _note(model: ir.Model) -> None:
    model.graph.outputs[0].metadata_props["noted"] = "yes"


def _reorder(model: ir.Model) -> None:
    weights = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    for x in reversed(weights):
        model.graph.register_initializer(x)


CHANGES: dict[str, tuple[Callable[[ir.Model], None], bool]] = {
    "nothing": (nothing, False),
    "a node": (_negate, True),
    "equal weights": (_weights(np.copy), False),
    "other weights": (_weights(lambda x: x + 1), True),
    "a note": (_note, True),
    "an attribute": (lambda m: m.graph[0].attributes.add(ir.AttrFloat32("alpha", 2.0)), True),
    "a name": (lambda m: setattr(m.graph[0], "name", "another"), True),
    "a shape": (lambda m: setattr(m.graph.inputs[0], "shape", ir.Shape([3, None])), True),
    "the order of weights": (_reorder, True),
    "an opset": (lambda m: m.graph.opset_imports.update({"": 22}), True),
}


@pytest.mark.whole
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [4, 40])  # weights in the message, and beside it
def test_a_pass_tells_whether_it_changed_the_model(change: str, size: int) -> None:
    rewriting, changes = CHANGES[change]
    model = graphopt.load(models.linear((size,), size))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = own(rewriting)(model)
    assert result.model is model and result.modified is changes
    assert changes == (ir.to_proto(model).SerializeToString(deterministic=True) != before)


def test_passes_of_the_library_stop_a_manager_of_onnx_ir_when_nothing_changes() -> None:
    """onnx_ir's manager runs passes until none has changed the model."""
    ran: list[ir.Model] = []
    steps = [passes.Normalize(), passes.SortInitializers(), passes.Simplify(), own(ran.append)]
    result = ir.passes.PassManager(steps, steps=20)(graphopt.load(models.mlp((4,), 2)))
    assert result.modified and 2 <= len(ran) < 20
    assert not passes.Simplify()(result).modified

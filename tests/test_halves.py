"""A step in two halves: two workers with the same rows compute exactly what one computes."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
from builders import model
from capabilities import CAPABILITIES, batches, network
from steps import assert_close, assert_equal

import graphopt
import passes
from graphopt import models
from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, role_of

RNG = np.random.default_rng(0)
X = np.random.default_rng(0).standard_normal((24, 1, 8, 8)).astype(np.float32)
T = np.random.default_rng(1).integers(0, 5, 24)

# Halves accumulate nothing, and add no update inside a product, as a fused step does; 16 bits round both otherwise.
NOT_BIT_FOR_BIT = {"plain descent", "accumulated", "accumulated points", "fused", "16 bits", "bfloat16"}
QUANTIZED = ["fake quantized", "scales that train"]  # by the ranges of another network
SPLIT = [name for name in CAPABILITIES if name not in {*NOT_BIT_FOR_BIT, *QUANTIZED}]


class Twins(Communicator):
    """Two workers in one process, the other of which always has what this one has."""

    size = 2

    def __init__(self) -> None:
        self.bytes = 0

    def sum(self, array: np.ndarray) -> None:
        self.bytes += array.nbytes
        array *= 2

    def gather(self, content: bytes) -> list[bytes]:
        return [content, content]


def halved(pipeline: graphopt.Pipeline, source: Any, **options: Any) -> graphopt.DataParallel:
    return graphopt.DataParallel(graphopt.split_step(pipeline, source), communicator=Twins(), threads=1, **options)


@pytest.mark.parametrize("native", [False, True], ids=["runtime", "native"])
@pytest.mark.parametrize("network", ["mlp", "cnn"])
@pytest.mark.parametrize("name", SPLIT)
@pytest.mark.slow
@pytest.mark.sample(12)
def test_twins_compute_what_the_fused_step_computes(name: str, network: str, native: bool) -> None:
    """Sums of two equal gradients and their halves are exact, so that all bits are those of the fused step."""
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), **CAPABILITIES[name])
    source = getattr(models, network)((1, 8, 8), 10)
    twins = halved(pipeline, source, native=native)
    fused = graphopt.Executor(pipeline(source), native=native, threads=1)
    for _ in range(5):
        one, other = fused.step(x=X, target=T), twins.step(x=X, target=T)
        for number in one.keys() - {"y"}:
            assert one[number] == pytest.approx(other[number], rel=3e-7)
    if name == "clip":  # the norm is a sum in another order, once the gradients are scaled
        assert all(np.allclose(x, twins.state[n], atol=1e-6) for n, x in fused.state.items())
    else:
        assert_equal(fused.state, twins.state)


@pytest.mark.parametrize("name", QUANTIZED)
def test_twins_move_ranges_and_scales_as_the_fused_step_does(name: str) -> None:
    pipeline, source = graphopt.standard(loss=passes.CrossEntropy(), **CAPABILITIES[name]), network(name)
    twins, fused = halved(pipeline, source), graphopt.Executor(pipeline(source), threads=1)
    for batch in batches(name, 3):
        assert fused.step(batch)["loss"] == pytest.approx(twins.step(batch)["loss"], rel=3e-7)
    assert_equal(fused.state, twins.state)


@pytest.mark.slow
def test_the_update_may_write_in_place() -> None:
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3))
    source = models.mlp((1, 8, 8), 10)
    twins = halved(pipeline, source, native=True, in_place=True)
    fused = graphopt.Executor(pipeline(source), native=True, threads=1)
    for _ in range(5):
        assert fused.step(x=X, target=T)["loss"] == pytest.approx(twins.step(x=X, target=T)["loss"], rel=3e-7)
    assert_equal(fused.state, twins.state)


@pytest.mark.slow
def test_an_update_inside_a_product_is_equal_up_to_rounding() -> None:
    """Plain SGD's fused step adds the update in the product of the gradient, which halves cannot."""
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    twins = halved(pipeline, models.mlp((1, 8, 8), 10))
    fused = graphopt.Executor(pipeline(models.mlp((1, 8, 8), 10)), threads=1)
    for _ in range(5):
        fused.step(x=X, target=T)
        twins.step(x=X, target=T)
    assert_close(fused.state, twins.state, rtol=1e-7)


def test_a_single_worker_runs_the_fused_step() -> None:
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    alone = graphopt.DataParallel(graphopt.split_step(pipeline, models.mlp((1, 8, 8), 10)), threads=1)
    fused = graphopt.Executor(pipeline(models.mlp((1, 8, 8), 10)), threads=1)
    for _ in range(5):
        assert fused.step(x=X, target=T)["loss"] == alone.step(x=X, target=T)["loss"]
    assert_equal(fused.state, alone.state)


def test_halves_have_the_interface_that_they_say() -> None:
    halves = graphopt.split_step(
        graphopt.standard(
            loss=passes.CrossEntropy(sample_weight=True),
            optimizer=passes.AdamW(1e-3),
            clip=passes.ClipGlobalNorm(1.0),
        ),
        models.mlp((4,), 3, hidden=[5]),
    )
    weights = ["layers.0.bias", "layers.0.weight", "layers.2.bias", "layers.2.weight"]

    def names(values: list[ir.Value], *chosen: Role) -> list[str]:
        return sorted(str(value.name) for value in values if not chosen or role_of(value) in chosen)

    assert names(halves.grad[0].graph.inputs) == sorted([*weights, "sample_weight", "target", "x"])
    assert names(halves.grad[0].graph.outputs) == sorted(["loss", "rows", "y", *(f"{w}.grad" for w in weights)])
    assert names(halves.apply.graph.inputs, Role.GRADIENT) == [f"{w}.grad" for w in weights]
    assert names(halves.apply.graph.outputs, Role.DIAGNOSTIC) == ["gradient_norm"]
    assert names(halves.apply.graph.outputs, Role.NEXT) == names(halves.step.graph.outputs, Role.NEXT)
    assert not any(x.is_initializer() for half in (*halves.grad, halves.apply) for x in half.graph.inputs)


def test_gradients_are_one_buffer() -> None:
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-3))
    twins = halved(pipeline, models.mlp((1, 8, 8), 10), report=["loss"])
    twins.step(x=X, target=T)
    before = twins.workers.bytes
    twins.step(x=X, target=T)
    numbers = sum(x.size for x in twins.parameters.values())
    sent = twins.workers.bytes - before
    assert 4 * numbers <= sent <= 4 * numbers + 64 * len(twins.parameters) + 16  # aligned; the weight and the loss


WITHOUT: dict[str, tuple[dict[str, Any], str]] = {
    "no optimizer": ({"loss": passes.CrossEntropy()}, "set an optimizer"),
    "accumulated": (
        {
            "loss": passes.CrossEntropy(),
            "optimizer": passes.SGD(0.1),
            "accumulate": passes.Accumulate(2),
        },
        "without accumulate",
    ),
    "a sum with a penalty": (
        {
            "loss": passes.CrossEntropy(reduction="sum"),
            "optimizer": passes.SGD(0.1),
            "regularizer": passes.L2(0.1),
        },
        "set loss.reduction=mean",
    ),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_what_cannot_be_split(name: str) -> None:
    steps, error = WITHOUT[name]
    with pytest.raises(GraphoptError, match=error):
        graphopt.split_step(graphopt.standard(**steps), models.mlp((4,), 3))


WEIGHTED = passes.CrossEntropy(class_weights=(1.0, 2.0))


@pytest.mark.parametrize(
    "losses",
    [
        {"y": WEIGHTED, "z": WEIGHTED},
        {"y": passes.CrossEntropy(), "z": passes.CrossEntropy(sample_weight=True)},
        {"y": passes.CrossEntropy(), "z": passes.CrossEntropy(reduction="sum")},
    ],
)
def test_losses_with_several_divisors_cannot_be_split(losses: dict[str, passes.CrossEntropy]) -> None:
    two = model(
        "g (float[batch, 3] x) => (float[batch, 2] y, float[batch, 2] z) {y = MatMul(x, v) z = MatMul(x, w)}",
        v=np.ones((3, 2), np.float32),
        w=np.ones((3, 2), np.float32),
    )
    pipeline = graphopt.standard(loss=passes.Losses(losses), optimizer=passes.SGD(0.1))
    with pytest.raises(GraphoptError, match="one loss that is a sum or a weighted mean, found several"):
        graphopt.split_step(pipeline, two)


@pytest.mark.slow
def test_halves_have_initializers_in_the_order_of_the_step() -> None:
    """The workers compare the bytes of their graphs."""
    source = models.transformer((6,), 3, width=8, heads=2)
    halves = graphopt.split_step(graphopt.standard(loss=passes.CrossEntropy(), optimizer=passes.AdamW()), source)
    for half in (*halves.grad, halves.apply):
        names = [name for name in halves.step.graph.initializers if name in half.graph.initializers]
        assert len(names) > 1
        assert [name for name in half.graph.initializers if name in names] == names

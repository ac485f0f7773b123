"""Trainings are PyTorch's: each optimizer, on each kind of network, in each form in which a step can run.

CI runs pairs that cover; `pytest -m exhaustive tests/test_training_matrix.py` runs each optimizer on each network from
each exporter, fused and not, as a graph, lowered to kernels and in place, and as the graphs for CUDA and WebGPU.
"""

from __future__ import annotations

import itertools
import random

import pytest
from training_matrix import (
    FACTORS,
    KERNELS,
    NETWORKS,
    TARGETS,
    Training,
    differences,
    expected,
    pairs,
    trained,
)

from graphopt.targets.native import toolchain

OF_LOSSES, OF_MOVES = 1e-5, 2e-4  # the largest relative errors; float32 reaches 5e-7 and 6e-5
PRODUCT = ("network", "optimizer", "exporter", "fuse", "form")
PAIRS = [Training(**choice) for choice in pairs(FACTORS)]


def product() -> list[Training]:
    """Return all choices of the factors of the product, each with settings of the others that are drawn."""
    draw = random.Random(0)
    return [
        Training(
            **{name: draw.choice(values) for name, values in FACTORS.items()} | dict(zip(PRODUCT, chosen, strict=True))
        )
        for chosen in itertools.product(*(FACTORS[name] for name in PRODUCT))
    ]


def wrong(training: Training) -> dict[str, float]:
    """Return what is not PyTorch's, with its relative error."""
    if training.form in KERNELS and toolchain.compiler() is None:
        pytest.skip("needs a C compiler")
    found = differences(trained(training), expected(training))
    return {name: error for name, error in found.items() if not error <= (OF_LOSSES if name == "loss" else OF_MOVES)}


@pytest.mark.parametrize(("loss", "static"), [("classes", False), ("squares", True)])
@pytest.mark.slow
def test_plain_descent_trains_each_network(loss: str, static: bool) -> None:
    trainings = [Training(network=name, loss=loss, static=static) for name in NETWORKS]
    assert {training.network: found for training in trainings if (found := wrong(training))} == {}


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("optimizer", ["SGD", "momentum", "AdamW"])
@pytest.mark.slow
def test_what_gpus_run_trains_each_network(optimizer: str, target: str) -> None:
    trainings = [Training(network=name, optimizer=optimizer, form=target) for name in NETWORKS]
    assert {training.network: found for training in trainings if (found := wrong(training))} == {}


@pytest.mark.parametrize("training", PAIRS, ids=str)
@pytest.mark.sample(8)
@pytest.mark.slow
def test_each_pair_of_settings_trains_as_pytorch_does(training: Training) -> None:
    assert wrong(training) == {}


@pytest.mark.exhaustive
@pytest.mark.parametrize("training", product(), ids=str)
def test_each_product_of_settings_trains_as_pytorch_does(training: Training) -> None:
    assert wrong(training) == {}


def test_pairs_have_every_two_settings() -> None:
    for a, b in itertools.combinations(FACTORS, 2):
        assert {(getattr(training, a), getattr(training, b)) for training in PAIRS} == set(
            itertools.product(FACTORS[a], FACTORS[b])
        )

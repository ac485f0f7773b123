"""Golden listings: every node of small training graphs. UPDATE_LISTINGS=1 rewrites them; read the diff."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from builders import attention, by_gates, linear, mlp, model

import graphopt
import passes
from graphopt import models
from graphopt.distributed.exchange import part_of_update
from graphopt.graph.listing import size

FOLDER = Path(__file__).parent / "listings"


def cnn():
    rng = np.random.default_rng(0)
    return model(
        """g (float[N,1,8,8] x) => (float[N,3] y) {
            c = Conv<pads=[1,1,1,1]>(x, kernel, bias)
            r = Relu(c)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            f = Flatten(p)
            y = Gemm(f, weight)
        }""",
        kernel=rng.standard_normal((2, 1, 3, 3)),
        bias=np.zeros(2),
        weight=rng.standard_normal((32, 3)),
    )


GRAPHS = {
    "linear_sgd": lambda: graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD()),
    "linear_momentum_l2": lambda: graphopt.compile(
        linear(),
        loss=passes.MeanSquaredError(),
        regularizer=passes.L2(parameters="w"),
        optimizer=passes.SGD(momentum=0.9),
    ),
    "mlp_cross_entropy": lambda: graphopt.compile(mlp(activation="Relu"), loss=passes.CrossEntropy()),
    "mlp_adamw_clip_cosine": lambda: graphopt.compile(
        mlp((4, 3)),
        loss=passes.MeanSquaredError(),
        clip=passes.ClipGlobalNorm(),
        optimizer=passes.AdamW(),
        schedule=passes.Cosine(steps=100, warmup=10),
    ),
    "cnn_gradient": lambda: graphopt.compile(cnn(), loss=passes.CrossEntropy()),
    "cnn_fused": lambda: graphopt.compile(
        cnn(), loss=passes.CrossEntropy(), optimizer=passes.SGD(momentum=0.9), fuse=passes.Fuse()
    ),
    "linear_sgd_fused": lambda: graphopt.lower(GRAPHS["linear_sgd"](), "onnxruntime"),
    "mlp_adamw_fused": lambda: graphopt.lower(
        graphopt.compile(mlp((4, 3, 3)), loss=passes.MeanSquaredError(), optimizer=passes.AdamW()),
        "onnxruntime",
    ),
    "lstm_by_gates_fused": lambda: graphopt.lower(
        graphopt.compile(by_gates(), loss=passes.MeanSquaredError(), optimizer=passes.SGD()),
        "onnxruntime",
    ),
    "mlp_mixed_precision": lambda: graphopt.compile(
        mlp(activation="Relu"),
        loss=passes.CrossEntropy(),
        precision=passes.MixedPrecision(),
        gradient=passes.Gradient(loss_scale=2.0**15),
        optimizer=passes.SGD(),
        loss_scale=passes.DynamicLossScale(),
    ),
    "mlp_lora": lambda: graphopt.compile(
        mlp((4, 3)), adapter=passes.LoRA(rank=2), loss=passes.MeanSquaredError(), optimizer=passes.SGD()
    ),
    "linear_dora": lambda: graphopt.compile(
        linear(), adapter=passes.LoRA("w", rank=1, dora=True), loss=passes.MeanSquaredError()
    ),
    "cnn_standardized": lambda: graphopt.compile(
        cnn(), standardize=passes.Standardize([0.5], [2.0]), loss=passes.CrossEntropy()
    ),
    "cnn_augmented": lambda: graphopt.compile(
        cnn(), augment=passes.AugmentImages(mixup=1.0), loss=passes.CrossEntropy(), gradient=None
    ),
    "linear_part_of_update": lambda: part_of_update(
        graphopt.split_step(
            graphopt.standard(
                loss=passes.MeanSquaredError(),
                clip=passes.ClipGlobalNorm(),
                optimizer=passes.SGD(momentum=0.9),
            ),
            linear(),
        ).apply,
        ["b.grad", "w.grad"],
        rank=1,
        workers=2,
    ),
    "normalized_stages": lambda: (
        graphopt.split_step(
            graphopt.standard(loss=passes.MeanSquaredError(), training=passes.TrainingMode(), optimizer=passes.SGD()),
            model(
                """g (float[N,3] x) => (float[N,2] y) {
                h = MatMul(x, v)
                n = BatchNormalization(h, scale, shift, mean, variance)
                y = MatMul(n, w)
            }""",
                v=np.eye(3),
                w=np.ones((3, 2)),
                **{name: np.ones(3) for name in ("scale", "shift", "mean", "variance")},
            ),
        ).grad
    ),
    "attention_gradient": lambda: graphopt.compile(attention(), loss=passes.MeanSquaredError()),
}


@pytest.mark.parametrize("name", GRAPHS)
def test_listing(name):
    graphs = GRAPHS[name]()
    found = "\n".join(map(graphopt.listing, graphs if isinstance(graphs, tuple) else [graphs]))
    path = FOLDER / f"{name}.txt"
    if os.environ.get("UPDATE_LISTINGS"):
        path.write_text(found)
    assert found == path.read_text()


def test_a_listing_is_the_same_every_time():
    assert graphopt.listing(GRAPHS["mlp_adamw_clip_cosine"]()) == graphopt.listing(GRAPHS["mlp_adamw_clip_cosine"]())


# Backward nodes a forward node, loss included, before fusion. A linear layer with an activation has 2 and needs 5 in
# standard operators: two products, a sum, a mask and its product; a convolution 6, a pool 11, which choose one of equal
# maxima. Each was measured against forms of fewer nodes, which take longer: MaxPool's positions, convolutions for the
# weights of 1x1 ones, rows of an embedding that are added along two axes.
DENSITY = {"mlp": 1.7, "cnn": 3.1, "transformer": 3.0}


@pytest.mark.parametrize("name", DENSITY)
def test_backward_nodes_a_forward_node(name):
    features = {"mlp": [8], "cnn": [1, 8, 8], "transformer": [6]}[name]
    network = getattr(models, name)(features, 4)
    forward = size(graphopt.compile(network, loss=passes.CrossEntropy(), gradient=None))
    whole = size(graphopt.compile(network, loss=passes.CrossEntropy()))
    assert whole - forward <= DENSITY[name] * forward

"""What a training graph can do: one row each, whose properties `test_capabilities.py` shows."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
from builders import mlp
from planted_mistakes import images

import graphopt
import passes

ADAMW = {"optimizer": passes.AdamW(1e-2)}
MOMENTUM = {"optimizer": passes.SGD(0.1, momentum=0.9)}
AUGMENT = passes.AugmentImages(vertical_flip=0.5, rotation=20, resized_crop=0.4, mixup=0.4, layout="NCHW")
IN_16_BITS = {**ADAMW, "precision": passes.MixedPrecision()}
RANGES = {"x": (-3.0, 3.0), "a0": (-1.0, 1.0)}  # of the activations of `mlp`
# The steps beside a loss of labels, of two layers.
LAYERS: dict[str, dict[str, Any]] = {
    "plain descent": {"optimizer": passes.SGD(0.1)},
    "momentum": MOMENTUM,
    "AdamW": ADAMW,
    "LAMB": {"optimizer": passes.LAMB(1e-2)},
    "Adagrad": {"optimizer": passes.Adagrad(1e-2)},
    "RMSprop": {"optimizer": passes.RMSprop(1e-3)},
    "Lion": {"optimizer": passes.Lion(1e-3)},
    "Muon": {"optimizer": passes.Muon(1e-2)},
    "Adafactor": {"optimizer": passes.Adafactor(1e-2)},
    "schedule-free": {"optimizer": passes.ScheduleFreeAdamW(1e-2)},
    "slots of 8 bits": {"optimizer": passes.AdamW(1e-3, slot_bits=8)},
    "groups": {"optimizer": passes.AdamW(1e-2, groups=[passes.Group("*.bias", learning_rate=2.0)])},
    "schedule": {**ADAMW, "schedule": passes.Cosine(steps=100, warmup=10)},
    "clip": {**ADAMW, "clip": passes.ClipGlobalNorm(0.1)},
    "penalties": {
        "optimizer": passes.SGD(0.1, momentum=0.9, nesterov=True),
        "regularizer": [passes.L1(1e-3), passes.L2(1e-2)],
    },
    "averages": {**ADAMW, "average": passes.EMA(0.9), "schedule": passes.Cosine(100, warmup=5)},
    "accumulated": {**ADAMW, "accumulate": passes.Accumulate(3), "clip": passes.ClipGlobalNorm(0.3)},
    "deviations": {**ADAMW, "average": passes.SWAG(start=2, every=2, rank=2)},
    "accumulated points": {"optimizer": passes.ScheduleFreeAdamW(1e-2), "accumulate": passes.Accumulate(2)},
    "mean of points": {"optimizer": passes.ScheduleFreeAdamW(1e-2), "average": passes.SWA(start=2, every=2)},
    "pruned": {**ADAMW, "average": passes.EMA(0.9), "prune": passes.Prune(0.7, end=4, every=2)},
    "frozen": {**ADAMW, "parameters": passes.Parameters(freeze="*.bias")},
    "LoRA": {**ADAMW, "adapter": passes.LoRA(rank=2)},
    "DoRA": {**ADAMW, "adapter": passes.LoRA(rank=2, dora=True)},
    "a head": {**ADAMW, "adapter": passes.Head(classes=5, standardize=True, center=(0.1,), scale=2.0)},
    "standardized": {**ADAMW, "standardize": passes.Standardize(0.5, 2.0)},
    "mixed rows": {**ADAMW, "augment": passes.MixUp(alpha=0.4)},
    "fake quantized": {**ADAMW, "quantize": passes.FakeQuantize(ranges=RANGES)},
    "scales that train": {**ADAMW, "quantize": passes.FakeQuantize(ranges=RANGES, observer="lsq")},
    "16 bits": IN_16_BITS,
    "bfloat16": {**ADAMW, "precision": passes.MixedPrecision("bfloat16")},
    "fused": {**MOMENTUM, "fuse": passes.Fuse()},
    "sharpness": {**MOMENTUM, "gradient": passes.SharpnessAware(0.1)},
    "attacked": {**MOMENTUM, "regularizer": passes.AdversarialTraining(0.1, steps=2, share=0.5)},
}
# Those of convolutions, a normalization, pooling and a layer.
IMAGES: dict[str, dict[str, Any]] = {
    "batch statistics": {**MOMENTUM, "training": passes.TrainingMode(seed=3)},
    "augmented": {**MOMENTUM, "augment": AUGMENT},
    "sharpness of batches": {
        **MOMENTUM,
        "training": passes.TrainingMode(seed=3),
        "gradient": passes.SharpnessAware(0.1),
    },
    "recomputed": {**ADAMW, "recompute": passes.Recompute()},
    "dynamic scale": {**IN_16_BITS, "loss_scale": passes.DynamicLossScale()},
    "pruned channels": {
        **MOMENTUM,
        "training": passes.TrainingMode(seed=3),
        "prune": passes.Prune(0.5, structure="channel", end=4, every=2),
    },
}
CAPABILITIES = LAYERS | IMAGES


def network(name: str) -> onnx.ModelProto:
    """Return the model that a capability trains."""
    return mlp((6, 16, 4)) if name in LAYERS else images()


def pipeline(name: str) -> graphopt.Pipeline:
    return graphopt.standard(loss=passes.CrossEntropy(), **CAPABILITIES[name])


def step(name: str) -> ir.Model:
    """Return the training graph of a capability."""
    return pipeline(name)(network(name))


def batches(name: str, count: int) -> list[dict[str, np.ndarray]]:
    """Return batches for it, the same in each call."""
    rng = np.random.default_rng(0)
    shape = (24, 6) if name in LAYERS else (6, 2, 8, 8)
    return [{"x": rng.standard_normal(shape, np.float32), "target": rng.integers(0, 3, shape[0])} for _ in range(count)]

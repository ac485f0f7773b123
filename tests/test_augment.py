"""Augmentation in the training graph: torchvision's formulas on the same random numbers, and training as PyTorch's."""

from __future__ import annotations

import colorsys
import math
from functools import partial
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx_ir as ir
import pytest
import scipy.stats
import torch
from builders import mlp, model
from numpy.typing import NDArray
from torch.nn import functional
from twins import descended

import graphopt
import passes
from graphopt import models
from graphopt.errors import GraphoptError
from passes.augment import _OF_IMAGES, _OF_MIXTURES, _OF_WARPS

pytestmark = pytest.mark.usefixtures("plain")
Array = NDArray[Any]
NONE: dict[str, Any] = {"horizontal_flip": 0.0, "crop": 0.0}
KINDS = ("horizontal_flip", "vertical_flip", "down", "right", "brightness", "contrast", "saturation")
WARPS = ("rotation", "area", "ratio", "top", "left", "hue")
executor_of = partial(
    graphopt.Executor, threads=1, verify=False
)  # `test_capabilities.py::test_the_first_check_finds_no_difference` has it


def draws(rows: int, count: int, seed: int, number: int, step: int) -> Array:
    """Return the random numbers of a step, by 64-bit integers, from 0 to 1."""
    even, odd, offset = np.random.default_rng([seed, number]).integers(-(2**31), 2**31, (3, 1), np.int32)

    def wrapped(x: Array) -> Array:
        return (x + 2**31) % 2**32 - 2**31

    t, even, odd, offset = step, *(x.astype(np.int64) for x in (even & ~1, odd | 1, offset))
    key = wrapped(even * t + odd)
    mixed = wrapped(np.arange(rows * count) * (0x9E3779B1 - 2**32) + wrapped(key * t + offset))
    for k in (key, 0x846CA68B - 2**32):
        product = wrapped(mixed * 128)
        quotient = np.sign(product) * (np.abs(product) // 2**16)
        mixed = wrapped(mixed * wrapped(quotient + k))
    return (mixed.reshape(rows, count).astype(np.float32) / np.float32(2**32) + np.float32(0.5)).astype(float)


def seen(augment: Any, x: Array, count: int = 1) -> list[Array]:
    """Return what the model reads in some steps, from a model that returns its input times 1."""
    dims = ",".join(map(str, x.shape[1:]))
    kind = "float" if x.dtype == np.float32 else "uint8"
    cast = "c = Identity(x)" if kind == "float" else "c = Cast<to=1>(x)"
    source = model(f"g ({kind}[N,{dims}] x) => (float[N,{dims}] y) {{ {cast}  y = Mul(c, w) }}", w=np.ones(1))
    steps = {
        "loss": passes.MeanSquaredError(),
        "optimizer": passes.SGD(1e-30),
        "parameters": passes.Parameters("w"),
    }
    step = graphopt.compile(source, augment=augment, **steps)
    executor = executor_of(step)
    target = np.zeros(x.shape, np.float32)
    return [executor.step(x=x, target=target)["y"] for _ in range(count)]


def expected_image(x: torch.Tensor, drawn: dict[str, float], options: dict[str, Any]) -> torch.Tensor:
    """Transform an image [C, H, W] from 0 to 1 as torchvision does: its formulas, on given random numbers."""
    height, width = size = x.shape[1:]
    if degrees := options.get("rotation", 0):  # as `rotate`, but reflected beyond the edges
        angle = math.radians(degrees * (2 * drawn["rotation"] - 1))
        y, z = torch.meshgrid(*(torch.arange(n) - (n - 1) / 2 for n in size), indexing="ij")
        y, z = math.sin(angle) * z + math.cos(angle) * y, math.cos(angle) * z - math.sin(angle) * y
        grid = torch.stack([2 * z / (width - 1), 2 * y / (height - 1)], 2)[None]
        x = functional.grid_sample(x[None], grid, padding_mode="reflection", align_corners=True)[0]
    if (least := options.get("resized_crop", 1)) < 1:  # as `RandomResizedCrop`
        area = height * width * (least + (1 - least) * drawn["area"])
        ratio = (4 / 3) ** (2 * drawn["ratio"] - 1)
        h, w = (
            min(max(round(math.sqrt(area / ratio)), 1), height),
            min(max(round(math.sqrt(area * ratio)), 1), width),
        )
        top, left = int(drawn["top"] * (height - h + 1)), int(drawn["left"] * (width - w + 1))
        x = functional.interpolate(x[None, :, top : top + h, left : left + w], (height, width), mode="bilinear")[0]
    margin = [round(options.get("crop", 0) * n) for n in size]
    top, left = (int(drawn[name] * (2 * m + 1)) for name, m in zip(("down", "right"), margin, strict=True))
    padded = functional.pad(x, (margin[1], margin[1], margin[0], margin[0]), mode="reflect")
    x = padded[:, top : top + size[0], left : left + size[1]]
    x = x.flip(2) if drawn["horizontal_flip"] < options.get("horizontal_flip", 0) else x
    x = x.flip(1) if drawn["vertical_flip"] < options.get("vertical_flip", 0) else x
    for name in ("brightness", "contrast", "saturation"):
        if strength := options.get(name, 0):
            factor = 1 + strength * (2 * drawn[name] - 1)
            gray = (0.2989 * x[0] + 0.587 * x[1] + 0.114 * x[2])[None] if len(x) == 3 else x
            other = {"brightness": 0 * x, "contrast": gray.mean(), "saturation": gray}[name]
            x = (factor * x + (1 - factor) * other).clamp(0, 1)
    if hue := options.get("hue", 0):
        colours = x.flatten(1).T.tolist()
        turned = [(h + hue * (2 * drawn["hue"] - 1), s, v) for h, s, v in (colorsys.rgb_to_hsv(*c) for c in colours)]
        x = torch.tensor([colorsys.hsv_to_rgb(h % 1, s, v) for h, s, v in turned]).T.reshape(x.shape)
    return x


@pytest.mark.parametrize("layout", ["NCHW", "NHWC"])
@pytest.mark.parametrize("bounds", [(0.0, 1.0), (-1.0, 3.0)], ids=str)
@pytest.mark.parametrize(
    ("channels", "options"),
    [
        (3, {"horizontal_flip": 0.5, "crop": 0.0}),
        (3, {"horizontal_flip": 0.0, "crop": 0.0, "vertical_flip": 0.3}),
        (1, {"horizontal_flip": 0.0, "crop": 0.25}),
        (3, {"horizontal_flip": 1.0, "crop": 0.5, "vertical_flip": 1.0}),
        (1, {"brightness": 0.8, "contrast": 0.7, **NONE}),
        (3, {"saturation": 1.0, **NONE}),
        (3, {"hue": 0.5, **NONE}),
        (3, {"rotation": 180.0, **NONE}),
        (1, {"resized_crop": 0.05, **NONE}),
        (3, {"horizontal_flip": 0.5, "crop": 0.3, "brightness": 0.4, "contrast": 0.9, "saturation": 0.4}),
        (3, {"horizontal_flip": 0.5, "crop": 0.0, "rotation": 20.0, "saturation": 0.4, "hue": 0.1}),
    ],
)
@pytest.mark.sample(10)
def test_images_are_those_of_torchvision(
    channels: int, options: dict[str, Any], bounds: tuple[float, float], layout: str
) -> None:
    images = torch.from_numpy(np.random.default_rng(0).random((6, channels, 5, 8), np.float32))
    augment = passes.AugmentImages(**options, value_range=bounds, layout=layout, seed=7)  # type: ignore[arg-type]
    low, high = bounds
    fed = images * (high - low) + low
    fed = fed if layout == "NCHW" else fed.permute(0, 2, 3, 1)
    for step, found in enumerate(seen(augment, fed.numpy(), 2)):
        drawn = np.hstack([draws(6, 7, 7, _OF_IMAGES, step), draws(6, 6, 7, _OF_WARPS, step)])
        rows = [
            expected_image(x, dict(zip(KINDS + WARPS, d, strict=True)), options)
            for x, d in zip(images, drawn, strict=True)
        ]
        expected = torch.stack(rows) * (high - low) + low
        expected = expected if layout == "NCHW" else expected.permute(0, 2, 3, 1)
        np.testing.assert_allclose(found, expected.numpy(), atol=2e-6 * (high - low))


def test_whole_numbers_move_too() -> None:
    x = np.random.default_rng(0).integers(0, 255, (8, 1, 4, 4)).astype(np.uint8)
    (moved,) = seen(passes.AugmentImages(crop=0.0, horizontal_flip=1.0, layout="NCHW"), x)
    assert np.array_equal(moved, x[..., ::-1])


def test_rows_and_steps_draw_apart_and_by_their_probabilities() -> None:
    """Half of the rows are mirrored, and each of 25 places comes as often as the others."""
    x = np.zeros((512, 1, 16, 16), np.float32)
    x[:, 0, 5, 6], x[:, 0, 5, 7] = 1, 2
    mirrored, places = [], []
    for y in seen(passes.AugmentImages(layout="NCHW", crop=0.125), x, 8):
        row, column = np.divmod(y.reshape(512, -1).argmax(1), 16)
        is_mirrored = y[np.arange(512), 0, row, np.minimum(column + 1, 15)] == 1
        mirrored.append(is_mirrored)
        places.append(5 * (row - 3) + np.where(is_mirrored, column - 6, column - 5))
    assert not np.array_equal(mirrored[0], mirrored[1])
    counts = np.bincount(np.concatenate(places), minlength=25)
    assert scipy.stats.chisquare(counts).pvalue > 1e-3
    assert scipy.stats.binomtest(int(np.sum(mirrored)), 4096).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.2, 0.4, 1.0, 3.0, 8.0])
def test_shares_follow_the_beta_distribution(alpha: float) -> None:
    x = np.zeros((2000, 1), np.float32)
    x[::2] = 1  # each second row is mixed with a row of the other kind
    shares = np.concatenate([np.where(x == 1, 1 - y, y) for y in seen(passes.MixUp(alpha), x, 5)])
    assert scipy.stats.kstest(shares.ravel(), scipy.stats.beta(alpha, alpha).cdf).pvalue > 1e-3


LOSSES = {
    "classes": passes.CrossEntropy(),
    "smoothed": passes.CrossEntropy(label_smoothing=0.1),
    "numbers": passes.MeanSquaredError(),
    "distances": passes.MeanAbsoluteError(),
}


@pytest.mark.parametrize("kind", LOSSES)
def test_mixed_rows_train_as_in_pytorch(kind: str) -> None:
    """One-hot targets, or numbers, are mixed with the share that mixes the rows."""
    loss = LOSSES[kind]
    rng = np.random.default_rng(1)
    x = rng.standard_normal((10, 4)).astype(np.float32)
    target: Array = (
        rng.integers(0, 3, 10) if kind in ("classes", "smoothed") else rng.standard_normal((10, 3), np.float32)
    )
    source = models.mlp((4,), 3, hidden=[8])
    step = graphopt.compile(source, augment=passes.MixUp(0.4, seed=5), loss=loss, optimizer=passes.SGD(0.5))
    executor = executor_of(step)
    weights = {name: torch.tensor(w, requires_grad=True) for name, w in executor.state.items() if name != "step"}
    optimizer = torch.optim.SGD(weights.values(), 0.5)
    sure = functional.one_hot(torch.tensor(target), 3).float() if target.ndim == 1 else torch.tensor(target)
    for i in range(4):
        share = torch.tensor(beta(draws(10, 1, 5, _OF_MIXTURES, i)[:, 0], 0.4), dtype=torch.float32)[:, None]
        rows, targets = (y + share * (y.roll(1, 0) - y) for y in (torch.tensor(x), sure))
        hidden = torch.relu(rows @ weights["layers.0.weight"] + weights["layers.0.bias"])
        y = hidden @ weights["layers.2.weight"] + weights["layers.2.bias"]
        if target.ndim == 1:
            smoothing = 0.1 if kind == "smoothed" else 0.0
            expected = functional.cross_entropy(y, targets, label_smoothing=smoothing)
        else:
            expected = (functional.mse_loss if kind == "numbers" else functional.l1_loss)(y, targets)
        descended(expected, optimizer)
        assert executor.step(x=x, target=target)["loss"] == pytest.approx(expected.item(), rel=1e-4)
    for name, w in weights.items():
        np.testing.assert_allclose(executor.state[name], w.detach().numpy(), atol=1e-4)


def beta(drawn: Array, alpha: float) -> Array:
    """Return the quantiles of Beta(alpha, alpha) that belong to uniform numbers."""
    small = scipy.stats.beta(alpha, alpha).ppf((1 - np.abs(2 * drawn - 1)) / 2)
    return np.where(drawn < 0.5, small, 1 - small)


def test_weights_of_classes_and_rows_and_ignored_labels_count_with_the_shares() -> None:
    rng = np.random.default_rng(2)
    x, weight = rng.standard_normal((12, 4)).astype(np.float32), rng.random(12).astype(np.float32)
    target, of_classes = rng.integers(-1, 3, 12), (0.5, 1.0, 3.0)
    loss = passes.CrossEntropy(class_weights=of_classes, ignore_index=-1, sample_weight=True)
    executor = executor_of(
        graphopt.compile(mlp((4, 3)), augment=passes.MixUp(1.0), loss=loss, optimizer=passes.SGD(0.1)),
    )
    share = torch.tensor(beta(draws(12, 1, 0, _OF_MIXTURES, 0)[:, 0], 1.0))
    reported = executor.step(x=x, target=target, sample_weight=weight)
    y, t, w = torch.tensor(reported["y"]), torch.tensor(target), torch.tensor(weight)
    classes = torch.tensor(of_classes)
    total, count = torch.tensor(0.0), torch.tensor(0.0)
    for labels, rows, part in ((t, w, 1 - share), (t.roll(1), w.roll(1), share)):
        each = functional.cross_entropy(y, labels, classes, ignore_index=-1, reduction="none")
        total = total + (part * rows * each).sum()
        count = count + (part * rows * torch.where(labels >= 0, classes[labels.clamp(0)], 0)).sum()
    assert reported["loss"] == pytest.approx((total / count).item(), rel=1e-4)


AUGMENT = passes.AugmentImages(brightness=0.3, contrast=0.3, saturation=0.2, value_range=(0, 1), mixup=0.3)


def images(steps: dict[str, Any] | None = None) -> tuple[ir.Model, dict[str, Array]]:
    source = models.cnn((3, 8, 8), 4, channels=[4], hidden=8)
    fixed = {"augment": AUGMENT, "loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-2)}
    rng = np.random.default_rng(0)
    data = {"x": rng.random((30, 3, 8, 8), np.float32), "target": rng.integers(0, 4, 30)}
    return graphopt.compile(source, **fixed, **(steps or {})), data


def test_evaluation_prediction_and_the_trained_model_have_none_of_it() -> None:
    step, data = images()
    plain, _ = (
        graphopt.compile(models.cnn((3, 8, 8), 4, channels=[4], hidden=8), loss=passes.CrossEntropy()),
        None,
    )
    executor = executor_of(step)
    before = graphopt.run(plain, data)
    assert graphopt.evaluate(executor, data)["loss"] == pytest.approx(float(before["loss"]), rel=1e-6)
    np.testing.assert_allclose(executor.predict(x=data["x"])["y"], before["y"], atol=1e-6)
    assert [node.op_type for node in executor.trained().graph.node] == [
        node.op_type for node in ir.to_proto(models.cnn((3, 8, 8), 4, channels=[4], hidden=8)).graph.node
    ]


def test_micro_batches_draw_apart() -> None:
    step, data = images({"accumulate": passes.Accumulate(2)})
    executor = executor_of(step)
    batch = {name: x[:6] for name, x in data.items()}
    assert executor.step(batch)["loss"] != executor.step(batch)["loss"]  # before the first update


def test_a_teacher_sees_the_images_that_the_student_sees(tmp_path: Path) -> None:
    source = models.cnn((3, 8, 8), 4, channels=[4], hidden=8)
    graphopt.save(source, tmp_path / "teacher.onnx")
    loss = passes.Distillation(tmp_path / "teacher.onnx", alpha=1.0, temperature=1.0)
    step = graphopt.compile(source, augment=passes.AugmentImages(), loss=loss, optimizer=passes.SGD(0.1))
    assert abs(executor_of(step).step(x=images()[1]["x"])["loss"]) < 1e-6  # the student is its teacher


def test_the_layout_is_that_of_the_convolutions() -> None:
    rng = np.random.default_rng(0)
    source = model(
        """g (float[N,6,7,3] x) => (float[N,4] y) {
            s = Mul(x, half)
            t = Transpose<perm=[0,3,1,2]>(s)
            c = Conv<pads=[1,1,1,1]>(t, kernel)
            p = GlobalAveragePool(c)
            y = Flatten(p)
        }""",
        half=np.full(1, 0.5),
        kernel=rng.standard_normal((4, 3, 3, 3)),
    )
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    found, given = (
        graphopt.listing(graphopt.compile(source, augment=passes.AugmentImages(layout=layout), **steps))
        for layout in (None, "NHWC")
    )
    assert found == given
    with pytest.raises(GraphoptError, match="takes axis 3 of 'x' for the channels: leave layout out"):
        graphopt.compile(source, augment=passes.AugmentImages(layout="NCHW"), **steps)


def test_open_sizes_of_images_are_those_of_the_batch() -> None:
    source = "g (float[N,3,H,W] x) => (float[N,4] y) { c = Conv(x, k)  p = GlobalAveragePool(c)  y = Flatten(p) }"
    kernel = np.random.default_rng(0).standard_normal((4, 3, 1, 1))
    steps = {
        "augment": passes.AugmentImages(crop=0.3, rotation=9, resized_crop=0.5),
        "loss": passes.CrossEntropy(),
        "optimizer": passes.SGD(0.1),
    }
    x, target = images()[1]["x"], images()[1]["target"]
    losses = [
        executor_of(graphopt.compile(model(text, k=kernel), **steps)).step(x=x, target=target)["loss"]
        for text in (source, source.replace("H,W", "8,8"))
    ]
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


IDS = "g (int64[N,3] x) => (float[N,3,2] y) { y = Gather(table, x) }"
CLASSES: dict[str, Any] = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}


@pytest.mark.exhaustive
def test_mixed_rows_lift_the_held_out_accuracy() -> None:
    digits = graphopt.data.digits()
    source = models.cnn((1, 8, 8), 10, channels=[8, 16], hidden=32)
    options: dict[str, Any] = {"epochs": 150, "validation": 0.9, "validation_every": 150}
    means = []
    for augment in (None, passes.MixUp(0.4)):
        step = graphopt.compile(source, augment=augment, loss=passes.CrossEntropy(), optimizer=passes.AdamW(3e-3))
        runs = [graphopt.fit(executor_of(step, threads=1, native=False), digits, seed=i, **options) for i in range(3)]
        means.append(np.mean([records[-1]["accuracy"] for records in runs]))
    assert means[1] > means[0] + 0.01


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("augment_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("augment_mistakes", call, globals())

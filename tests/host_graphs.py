"""Seven training graphs and their batches, on which hosts are compared with Python."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
from builders import linear, model
from steps import assert_close

import graphopt
import graphopt.models
import passes

STEPS = 50
Batch = Mapping[str, np.ndarray]


def linear_regression() -> ir.Model:
    return graphopt.compile(
        linear(features=3, outputs=2),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05, momentum=0.9),
    )


def mlp() -> ir.Model:
    return graphopt.compile(
        graphopt.models.mlp((8,), 4, hidden=(16, 16)),
        loss=passes.CrossEntropy(),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=1e-2),
        schedule=passes.Cosine(steps=STEPS, warmup=5),
    )


def cnn() -> ir.Model:
    return graphopt.compile(
        normalized_images(),
        training=passes.TrainingMode(seed=3),
        loss=passes.CrossEntropy(),
        optimizer=passes.AdamW(learning_rate=1e-3),
    )


def normalized_images() -> onnx.ModelProto:
    random = np.random.default_rng(2)
    return model(
        """g (float[N,1,8,8] x) => (float[N,4] y) {
            ratio = Constant<value = float {0.25}>()
            c = Conv<pads=[1,1,1,1]>(x, kernel, bias)
            b = BatchNormalization<momentum=0.9>(c, scale, shift, mean, variance)
            r = Relu(b)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            f = Flatten(p)
            d = Dropout(f, ratio)
            y = Gemm(d, weight, end)
        }""",
        kernel=random.standard_normal((4, 1, 3, 3)) / 3,
        bias=np.zeros(4),
        scale=np.ones(4),
        shift=np.zeros(4),
        mean=np.zeros(4),
        variance=np.ones(4),
        weight=random.standard_normal((64, 4)) / 8,
        end=np.zeros(4),
    )


def lstm() -> ir.Model:
    random, hidden = np.random.default_rng(3), 6
    recurrent = model(
        f"""g (float[5,N,3] x) => (float[N,2] y) {{
            axes = Constant<value_ints = [0]>()
            all, last, cell = LSTM<hidden_size={hidden}>(x, w, r, b)
            h = Squeeze(last, axes)
            y = MatMul(h, out)
        }}""",
        w=random.standard_normal((1, 4 * hidden, 3)) / 2,
        r=random.standard_normal((1, 4 * hidden, hidden)) / 3,
        b=random.standard_normal((1, 8 * hidden)) / 4,
        out=random.standard_normal((hidden, 2)) / 2,
    )
    return graphopt.compile(recurrent, loss=passes.MeanSquaredError(), optimizer=passes.Adam(learning_rate=1e-2))


def transformer() -> ir.Model:
    return graphopt.compile(
        graphopt.models.transformer((6,), 9, width=16, heads=2, layers=1),
        loss=passes.CrossEntropy(axis=-1),
        clip=passes.ClipGlobalNorm(1.0),
        optimizer=passes.AdamW(learning_rate=3e-3),
    )


def control_flow() -> ir.Model:
    random = np.random.default_rng(4)
    loops = model(
        """g (float[N,4] x) => (float[N,4] y) {
            three = Constant<value = int64 {3}>()
            zero = Constant<value = float {0}>()
            z = Loop<body = b (int64 i, bool on, float[N,4] h) => (bool go, float[N,4] k) {
                go = Identity(on) m = MatMul(h, w) t = Tanh(m) k = Add(t, x) }>(three, , x)
            total = ReduceSum<keepdims = 0>(x)
            positive = Greater(total, zero)
            y = If(positive)<
                then_branch = yes () => (float[N,4] p) { p = Mul(z, scale) },
                else_branch = no () => (float[N,4] q) { q = Add(z, shift) }>
        }""",
        w=random.standard_normal((4, 4)) / 4,
        scale=np.ones(4),
        shift=np.zeros(4),
    )
    return graphopt.compile(
        loops, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05), clip=passes.ClipGlobalNorm(5.0)
    )


def adapter() -> ir.Model:
    return graphopt.compile(
        graphopt.models.transformer((6,), 9, width=16, heads=2, layers=1),
        adapter=passes.LoRA(rank=2, dora=True),
        loss=passes.CrossEntropy(axis=-1),
        optimizer=passes.AdamW(learning_rate=3e-3, epsilon=1e-4),  # over gradients that are rounding alone
    )


def augmented() -> ir.Model:
    changes = passes.AugmentImages(
        crop=0.25, brightness=0.2, hue=0.1, rotation=20, resized_crop=0.5, mixup=0.3, value_range=(-2, 2)
    )
    return graphopt.compile(
        graphopt.models.cnn((3, 8, 8), 4, channels=[4], hidden=8),
        augment=changes,
        loss=passes.CrossEntropy(),
        optimizer=passes.SGD(0.05, momentum=0.9),
    )


def calibrated() -> ir.Model:
    """Return a step that trains a temperature on, of a file with sets."""
    random = np.random.default_rng(6)
    rows = {"x": _numbers(random, 90, 8), "target": random.integers(0, 4, 90)}
    sure = graphopt.calibrate(
        graphopt.models.mlp((8,), 4, hidden=(16,)),
        rows,
        passes.VectorScaling(),
        passes.PredictionSet(0.2, "raps"),
    )
    return graphopt.compile(
        sure,
        parameters=passes.Parameters(pattern=("y.scale", "y.bias")),
        loss=passes.CrossEntropy(),
        optimizer=passes.SGD(0.1),
    )


def unsure() -> ir.Model:
    """Return a step whose loss is of the mean over masks of Dropout."""
    network = model(
        "g (float[N,6] x) => (float[N,3] y) { r = Constant<value_float = 0.5>() d = Dropout(x, r) y = MatMul(d, w) }",
        w=np.random.default_rng(7).integers(-3, 4, (6, 3)).astype(np.float32),
    )
    file = graphopt.explain(network, passes.MonteCarloDropout(16))
    loss = passes.MeanSquaredError(output="y.mean")
    return graphopt.compile(file, training=None, loss=loss, optimizer=passes.SGD(2.0**-6))


def long_sequences() -> ir.Model:
    """Return a step with connectionist temporal classification of 400 frames: logarithms of sums of about -600."""
    network = model(
        "g (float[N,400,5] x) => (float[N,400,6] y) { h = MatMul(x, w)\n y = Add(h, b) }",
        w=np.random.default_rng(6).standard_normal((5, 6)) / 3,
        b=np.zeros(6),
    )
    return graphopt.compile(network, loss=passes.CTC(), optimizer=passes.SGD(0.01))


def far_from_zero() -> ir.Model:
    """Return a step with LayerNormalization of numbers near 1,000."""
    network = model(
        """g (float[N,16] x) => (float[N,4] y) {
            n = LayerNormalization(x, scale, shift)
            y = MatMul(n, w)
        }""",
        scale=np.ones(16),
        shift=np.zeros(16),
        w=np.random.default_rng(7).standard_normal((16, 4)) / 4,
    )
    return graphopt.compile(network, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))


def far_positions() -> ir.Model:
    """Return a step on sines and cosines of positions near 20,000."""
    network = model(
        """g (float[N,1] x) => (float[N,4] y) {
            angle = Mul(x, frequencies)
            s = Sin(angle) c = Cos(angle)
            both = Concat<axis = 1>(s, c)
            y = MatMul(both, w)
        }""",
        w=np.random.default_rng(8).standard_normal((16, 4)) / 4,
    )
    frequencies = (10_000.0 ** (-np.arange(8) / 8)).astype(np.float32)
    network.graph.initializer.append(onnx.numpy_helper.from_array(frequencies[None], "frequencies"))
    parameters = passes.Parameters(["w"])
    return graphopt.compile(network, parameters=parameters, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))


def u_net() -> ir.Model:
    """Return a step of a small U-Net: convolutions, AveragePool, Resize and a connection around them."""
    random = np.random.default_rng(9)
    network = model(
        """g (float[N,2,12,12] x) => (float[N,1,12,12] y) {
            a = Conv<pads=[1,1,1,1]>(x, first) r = Relu(a)
            d = AveragePool<kernel_shape=[2,2], strides=[2,2]>(r)
            e = Conv<pads=[1,1,1,1]>(d, second) f = Relu(e)
            u = Resize<mode="nearest">(f, , sizes)
            both = Concat<axis = 1>(u, r)
            y = Conv<pads=[1,1,1,1]>(both, last)
        }""",
        first=random.standard_normal((4, 2, 3, 3)) / 4,
        second=random.standard_normal((6, 4, 3, 3)) / 6,
        last=random.standard_normal((1, 10, 3, 3)) / 9,
    )
    network.graph.initializer.append(onnx.numpy_helper.from_array(np.array([1, 1, 2, 2], np.float32), "sizes"))
    return graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.Adam(1e-2))


def _numbers(random: np.random.Generator, *shape: int) -> np.ndarray:
    return random.standard_normal(shape).astype(np.float32)


GRAPHS: dict[str, tuple[Callable[[], ir.Model], Callable[[np.random.Generator], Batch]]] = {
    "linear": (linear_regression, lambda r: {"x": _numbers(r, 16, 3), "target": _numbers(r, 16, 2)}),
    "mlp": (mlp, lambda r: {"x": _numbers(r, 12, 8), "target": r.integers(0, 4, 12)}),
    "cnn": (cnn, lambda r: {"x": _numbers(r, 6, 1, 8, 8), "target": r.integers(0, 4, 6)}),
    "lstm": (lstm, lambda r: {"x": _numbers(r, 5, 7, 3), "target": _numbers(r, 7, 2)}),
    "transformer": (
        transformer,
        lambda r: {"x": r.integers(0, 9, (4, 6)), "target": r.integers(0, 9, (4, 6))},
    ),
    "adapter": (
        adapter,
        lambda r: {"x": r.integers(0, 9, (4, 6)), "target": r.integers(0, 9, (4, 6))},
    ),
    "control_flow": (control_flow, lambda r: {"x": _numbers(r, 5, 4), "target": _numbers(r, 5, 4)}),
}


def private() -> ir.Model:
    """Return a step that clips the gradient of each row."""
    steps = {"gradient": passes.PrivateGradient(0.5, rows=6), "optimizer": passes.SGD(0.1)}
    return graphopt.compile(graphopt.models.mlp((3,), 4), loss=passes.CrossEntropy(), **steps)


def derivatives() -> ir.Model:
    """Return a step that trains on a Jacobian and a saliency map of its own network."""
    network = graphopt.explain(
        graphopt.jacobian(graphopt.models.mlp((3,), 2), "x", of="y"), passes.Saliency(output="y")
    )
    losses = {name: passes.MeanSquaredError() for name in ("y.jacobian.x", "y.explanation")}
    return graphopt.compile(network, loss=passes.Losses(losses), optimizer=passes.SGD(0.1))


MORE = {
    "augmented": (augmented, lambda r: {"x": _numbers(r, 6, 3, 8, 8), "target": r.integers(0, 4, 6)}),
    "calibrated": (calibrated, lambda r: {"x": _numbers(r, 12, 8), "target": r.integers(0, 4, 12)}),
    "unsure": (unsure, lambda r: {"x": _numbers(r, 5, 6), "target": _numbers(r, 5, 3)}),
    "private": (private, lambda r: {"x": _numbers(r, 6, 3), "target": r.integers(0, 4, 6)}),
    "derivatives": (
        derivatives,
        lambda r: {
            "x": _numbers(r, 6, 3),
            "class": r.integers(0, 2, 6),
            "target_y.jacobian.x": _numbers(r, 6, 2, 3),
            "target_y.explanation": _numbers(r, 6, 3),
        },
    ),
}

# Numbers at the ends of what runtimes compute well, for a table beside that of GRAPHS.
ENDS: dict[str, tuple[Callable[[], ir.Model], Callable[[np.random.Generator], Batch]]] = {
    "long_sequences": (
        long_sequences,
        lambda r: {"x": _numbers(r, 2, 400, 5), "target": r.integers(1, 6, (2, 30))},
    ),
    "far_from_zero": (
        far_from_zero,
        lambda r: {"x": 1000 + _numbers(r, 12, 16), "target": r.integers(0, 4, 12)},
    ),
    "far_positions": (
        far_positions,
        lambda r: {
            "x": r.integers(19_000, 20_001, (12, 1)).astype(np.float32),
            "target": r.integers(0, 4, 12),
        },
    ),
    "u_net": (u_net, lambda r: {"x": _numbers(r, 2, 2, 12, 12), "target": _numbers(r, 2, 1, 12, 12)}),
}


def batches(name: str, steps: int = STEPS) -> list[Batch]:
    """Return the batches of a graph, the same in each call."""
    random = np.random.default_rng(1)
    return [{**GRAPHS, **MORE, **ENDS}[name][1](random) for _ in range(steps)]


def roots() -> ir.Model:
    """Return a step whose loss is finite on rows of zeros, where the gradient of the square root is NaN."""
    random = np.random.default_rng(5)
    network = model(
        "g (float[N,3] x) => (float[N,2] y) { h = MatMul(x, w)\n r = Relu(h)\n y = Sqrt(r) }",
        w=random.standard_normal((3, 2)) / 2 + 1,
    )
    return graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.01, momentum=0.9))


def large_gradients() -> ir.Model:
    """Return a step whose loss and parameters stay finite where the square of a gradient overflows."""
    return graphopt.compile(
        linear(features=3, outputs=2), loss=passes.MeanAbsoluteError(), optimizer=passes.AdamW(0.01)
    )


def _with(batch: Batch, **arrays: np.ndarray) -> Batch:
    return {**batch, **arrays}


def _huge(batch: Batch, number: float) -> Batch:
    x = batch["x"].copy()
    x.flat[1] = number
    return _with(batch, x=x)


def _squares(r: np.random.Generator) -> Batch:
    return {"x": abs(_numbers(r, 6, 3)) + 0.5, "target": abs(_numbers(r, 6, 2))}


# Steps, batches, and how a batch becomes a bad one, after which the loss or the new state is not finite.
BAD: dict[str, tuple[Callable[[], ir.Model], Callable[[np.random.Generator], Batch], Callable[[Batch], Batch]]] = {
    "NaN": (mlp, GRAPHS["mlp"][1], lambda b: _huge(b, np.nan)),
    "infinity": (cnn, GRAPHS["cnn"][1], lambda b: _huge(b, np.inf)),
    "overflow": (linear_regression, GRAPHS["linear"][1], lambda b: _huge(b, 1e30)),
    "squares": (large_gradients, GRAPHS["linear"][1], lambda b: _with(b, x=b["x"] * np.float32(1e21))),
    "gradient": (roots, _squares, lambda b: _with(b, x=np.zeros_like(b["x"]))),
    "statistics": (cnn, GRAPHS["cnn"][1], lambda b: _with(b, x=b["x"] * np.float32(1e25))),
}
BAD_AT = 3, 7, 8  # the places of bad batches


def with_bad_batches(name: str, steps: int = 14) -> list[Batch]:
    """Return batches of a step, some of which are bad."""
    _, draw, spoil = BAD[name]
    random = np.random.default_rng(1)
    drawn = [draw(random) for _ in range(steps)]
    made = [spoil(batch) if i in BAD_AT else batch for i, batch in enumerate(drawn)]
    return [{key: x.astype(drawn[0][key].dtype) for key, x in batch.items()} for batch in made]


LINEAR = "g (float[N,8] x) => (float[N,6] y) { h = MatMul(x, w)\n y = Add(h, b) }"
HALVES = """g (float16[N,8] x) => (float[N,6] y) {
    h = MatMul(x, w)
 a = Add(h, b)
 y = Cast<to=1>(a)
}"""
SPLIT = """g (float[N,8] x) => (float[N,12] y) {
    h = MatMul(x, w)\n q, k, v = Split<axis=1>(h, s)\n y = Concat<axis=1>(v, k, q)
}"""
FILTERS = "g (float[N,2,5,5] x) => (float[N,3,5,5] y) { y = Conv<pads=[1,1,1,1]>(x, w, b) }"
WORDS = "g (int64[N,3] x) => (float[N,3,4] y) { y = Gather(w, x) }"
PACKED = "m.0.attn.qkv_proj.MatMul.weight"
BOTH = ["onnxruntime", "peft"]
# Networks, the adapter and other passes, and the forms of files that a host writes.
ADAPTERS: dict[str, tuple[str, dict[str, Any], list[str]]] = {
    "plain": (LINEAR, {"adapter": passes.LoRA("layer.weight", rank=2, alpha=3)}, BOTH),
    "halves": (HALVES, {"adapter": passes.LoRA("layer.weight", rank=2, alpha=3)}, BOTH),
    "root": (LINEAR, {"adapter": passes.LoRA("layer.weight", rank=3, scaling="rank_stabilized")}, BOTH),
    "several": (
        LINEAR,
        {"adapter": [passes.LoRA("layer.weight", rank=2), passes.LoRA("layer.weight", rank=1, alpha=3)]},
        BOTH,
    ),
    "average": (LINEAR, {"adapter": passes.LoRA("layer.weight", rank=2), "average": passes.EMA(0.5)}, BOTH),
    "bias": (
        LINEAR,
        {
            "adapter": passes.LoRA("layer.weight", rank=2),
            "parameters": passes.Parameters(unfreeze=["layer.bias"]),
        },
        BOTH,
    ),
    "dora": (
        LINEAR,
        {"adapter": passes.LoRA("layer.weight", rank=2, alpha=3, dora=True)},
        BOTH,
    ),
    "dora of parts": (
        SPLIT,
        {"adapter": passes.LoRA("*qkv*", rank=2, alpha=5, parts={"q": 6, "_": 3, "v": 3}, dora=True)},
        BOTH,
    ),
    "average of dora": (
        LINEAR,
        {"adapter": passes.LoRA("layer.weight", rank=2, dora=True), "average": passes.EMA(0.5)},
        BOTH,
    ),
    "dora of filters": (FILTERS, {"adapter": passes.LoRA("layer.weight", rank=2, dora=True)}, BOTH),
    "dora of filters with an adapter": (
        FILTERS,
        {"adapter": [passes.LoRA("layer.weight", rank=1), passes.LoRA("layer.weight", rank=2, dora=True)]},
        ["onnxruntime"],
    ),
    "packed": (SPLIT, {"adapter": passes.LoRA("*qkv*", rank=2)}, BOTH),
    "parts": (
        SPLIT,
        {"adapter": passes.LoRA("*qkv*", rank=2, alpha=5, parts={"q": 6, "_": 3, "v": 3})},
        BOTH,
    ),
    "filters": (FILTERS, {"adapter": passes.LoRA("layer.weight", rank=2)}, BOTH),
    "words": (WORDS, {"adapter": passes.LoRA("layer.weight", rank=2)}, BOTH),
}
ADAPTER_FILES = {
    "onnxruntime": ["adapter.onnx_adapter"],
    "peft": ["adapter_config.json", "adapter_model.safetensors"],
}


def adapted(name: str) -> tuple[ir.Model, dict[str, np.ndarray], list[str]]:
    """Return a training graph with adapters, a batch for it, and the forms of files that a host writes."""
    text, steps, forms = ADAPTERS[name]
    random = np.random.default_rng(0)
    shapes = {LINEAR: (8, 6), HALVES: (8, 6), SPLIT: (8, 12), FILTERS: (3, 2, 3, 3), WORDS: (9, 4)}
    weights = {"w": random.standard_normal(shapes[text]), "b": np.zeros(3 if text is FILTERS else 6)}
    others = {"s": np.array([6, 3, 3])} if text is SPLIT else {}
    network = model(text, **{x: weights[x] for x in weights if f"{x})" in text or f"{x}," in text}, **others)
    names = {"w": PACKED if text is SPLIT else "layer.weight", "b": "layer.bias"}
    for holder in (*network.graph.initializer, *network.graph.node):
        if isinstance(holder, onnx.TensorProto):
            holder.name = names.get(holder.name, holder.name)
            if text is HALVES:
                array = onnx.numpy_helper.to_array(holder).astype(np.float16)
                holder.CopyFrom(onnx.numpy_helper.from_array(array, holder.name))
        else:
            holder.input[:] = [names.get(x, x) for x in holder.input]
    step = graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.02), **steps)
    dtype = np.float16 if text is HALVES else np.float32
    rows = {FILTERS: (4, 2, 5, 5), WORDS: (4, 3)}.get(text, (4, 8))
    x = random.integers(0, 9, rows) if text is WORDS else random.standard_normal(rows).astype(dtype)
    target = random.standard_normal(graphopt.run(network, {"x": x})["y"].shape).astype(np.float32)
    return step, {"x": x, "target": target}, forms


def same_adapters(first: Path, second: Path) -> None:
    """Compare two adapter files of ONNX Runtime."""
    files = [onnxruntime.AdapterFormat.read_adapter(str(path)) for path in (first, second)]  # they hold the numbers
    found, expected = ({name: x.numpy() for name, x in file.get_parameters().items()} for file in files)
    assert_close(found, expected, rtol=1e-6, atol=1e-7)

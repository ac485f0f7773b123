"""Run many graphs on a GPU and on the CPU, each case in a process that may crash, and tell how they differ.

python tests/gpu_sweep.py [--device webgpu|cuda] [--jobs 1] [PATTERN ...] prints a line for each case that fails,
differs, or needs the CPU.
"""

from __future__ import annotations

import argparse
import fnmatch
import functools
import json
import subprocess
import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from queue import Queue
from typing import Any

import numpy as np
import onnx_ir as ir
from adapter import software_adapter
from builders import attention, linear, mlp, model
from gradient_cases import CASES as RULE_CASES
from gradient_cases import Case, model_of, point
from host_graphs import GRAPHS, batches

import graphopt
import passes
from graphopt import models
from graphopt.derivatives import normal_form
from graphopt.graph.state import take_initial
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.portable import nodes_on_shapes
from graphopt.testing.gradients import distance, gradient_model, random_seeds

SECONDS = 120  # that a case may take
NOT_HERE = "not on the CPU of this runtime"
STEPS = 3
TOLERANCE = 2e-5
# State of which a gradient that is 0 but for rounding decides the sign of Adam's step.
NOISE = {"step/*transformer*": ("*.attention.key.bias.next",), "step/*/cnn": ("bias.*", "mean.next")}
Arrays = dict[str, np.ndarray]
Graph = tuple[ir.Model, list[Arrays]]  # the feeds of each call; the state of one call is that of the next


@dataclass
class Result:
    """Hold how a graph ran on a GPU.

    Args:
        case: its name.
        failed: how it failed, if it did.
        errors: the largest error of each output, relative to its largest element.
        cpu: the nodes that ran on the CPU, by operator and type of the first output, and their number; without those
            that compute with shapes alone.
        reads: the values that were copied from the device for them.
    """

    case: str
    failed: str = ""
    errors: dict[str, float] = field(default_factory=dict)
    cpu: dict[str, int] = field(default_factory=dict)
    reads: list[str] = field(default_factory=list)


# Graphs.


def forward(case: Case, dims: str) -> Graph:
    return normal_form(model_of(case, np.float32, dims)), [point(case, np.float32)]


def backward(case: Case, dims: str) -> Graph:
    plain, (feeds,) = forward(case, "static")
    seeds = random_seeds(on_cpu(plain, [feeds])[0])
    return gradient_model(model_of(case, np.float32, dims)), [{**feeds, **seeds}]


def of_rules() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Return the graphs of the cases of gradient rules: the operator, and its gradient."""
    seen: Counter[str] = Counter()
    for case in RULE_CASES:
        if not case.runtime or "refuse" in case.newer:
            continue
        name = str(case)
        seen[name] += 1
        name += f"#{seen[name]}" if seen[name] > 1 else ""
        for dims in ["static"] if case.rigid else ["static", "unknown"]:
            yield f"forward/{dims}/{name}", functools.partial(forward, case, dims)
            yield f"gradient/{dims}/{name}", functools.partial(backward, case, dims)


# How the first floating-point input of a rule's case is changed: numbers that are large, or far from 0.
ENDS = {"1e2": (1e2, 0.0), "1e4": (1e4, 0.0), "+300": (1.0, 300.0)}


def at_the_ends(graph: Callable[[Case, str], Graph], case: Case, end: str) -> Graph:
    """Return a graph of a case whose numbers are at one of the ends."""
    scale, shift = ENDS[end]
    written, (feeds,) = graph(case, "static")
    name = next(name for name, x in feeds.items() if x.dtype.kind == "f")
    return written, [{**feeds, name: np.asarray(feeds[name] * scale + shift, np.float32)}]


def of_ends() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Return the graphs of the first case of each operator that has other numbers at the ends."""
    firsts = {case.op_type: case for case in reversed(RULE_CASES) if case.runtime and "refuse" not in case.newer}
    for case in firsts.values():
        is_floating = any(x.dtype.kind == "f" for x in point(case, np.float32).values())
        if is_floating and case.op_type != "Atanh":  # it has no other numbers
            for end in ENDS:
                yield f"forward/{end}/{case}", functools.partial(at_the_ends, forward, case, end)
                yield f"gradient/{end}/{case}", functools.partial(at_the_ends, backward, case, end)


LONG = {
    **{name: f"{name}(x, axis)" for name in ("ReduceL1", "ReduceL2", "ReduceLogSumExp", "ReduceMax", "ReduceMean")},
    **{name: f"{name}(x, axis)" for name in ("ReduceMin", "ReduceSum", "ReduceSumSquare")},
    **{name: f"{name}<axis=1>(x)" for name in ("LogSoftmax", "LpNormalization", "Softmax")},
    "CumSum": "CumSum(x, last)",
    "LayerNormalization": "LayerNormalization<axis=1>(x, s, b)",
    "MatMul": "MatMul(x, s)",
}


def along(operator: str, size: int) -> Graph:
    """Return the graph of an operator and its gradient along an axis of many elements of mean 1."""
    text = f"g (float[2,{size}] x) => (y) {{ axis = Constant<value_ints=[1]>() y = {LONG[operator]} }}"
    x = numbers(size, 2, size) + np.float32(1)
    given = {"s": np.ones(size), "b": np.zeros(size), "last": np.array(1)}
    proto = model(text, **{name: one for name, one in given.items() if f" {name}" in LONG[operator]})
    y = on_cpu(normal_form(ir.from_proto(proto)), [{"x": x}])[0]
    return gradient_model(ir.from_proto(proto)), [{"x": x, **random_seeds(y)}]


def of_long_axes() -> Iterator[tuple[str, Callable[[], Graph]]]:
    for operator in LONG:
        for size in (1_000, 20_000):
            yield f"long/{operator}/{size}", functools.partial(along, operator, size)


def numbers(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def labels(seed: int, classes: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, classes, shape)


def trained(network: Any, x: tuple[int, ...], target: Any, **steps: Any) -> Graph:
    """Return a training step and its batches."""
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1), **steps}
    step = graphopt.compile(network() if callable(network) else network, **steps)
    fed = [{"x": numbers(i, *x), **(target(i) if callable(target) else {"target": target})} for i in range(STEPS)]
    return step, fed


def classes(count: int, *shape: int) -> Callable[[int], Arrays]:
    return lambda i: {"target": labels(i, count, *shape)}


def real(*shape: int) -> Callable[[int], Arrays]:
    return lambda i: {"target": numbers(i + 9, *shape)}


SMALL = {
    "mlp": (lambda: mlp((5, 7, 4)), (6, 5), classes(4, 6)),
    "cnn": (lambda: models.cnn((1, 6, 6), 4, channels=(3,), hidden=5), (6, 1, 6, 6), classes(4, 6)),
}

OPTIMIZERS = {
    "sgd": passes.SGD(0.1),
    "momentum": passes.SGD(0.05, momentum=0.9, dampening=0.1, weight_decay=0.01),
    "nesterov": passes.SGD(0.05, momentum=0.9, nesterov=True, rate_in_velocity=True),
    "adam": passes.Adam(0.01),
    "adamw": passes.AdamW(0.01, weight_decay=0.1),
    "adagrad": passes.Adagrad(0.05, initial_accumulator=0.01),
    "rmsprop": passes.RMSprop(0.01, epsilon=1e-2, momentum=0.8, centered=True),
    "lion": passes.Lion(1e-3, weight_decay=0.1),
    "lamb": passes.LAMB(0.01, weight_decay=0.1),
    "muon": passes.Muon(0.01),
    "adafactor": passes.Adafactor(0.01),
    "schedule-free": passes.ScheduleFreeAdamW(0.01, weight_decay=0.1),
    "groups": passes.AdamW(0.01, groups=(passes.Group("*", learning_rate=0.5, weight_decay=0.0),)),
}
SCHEDULES = {
    "constant": passes.Constant(warmup=2),
    "linear": passes.Linear(steps=5, warmup=2),
    "cosine": passes.Cosine(steps=5, warmup=1),
    "polynomial": passes.Polynomial(steps=5, power=2.0),
    "step": passes.StepDecay(every=2),
    "exponential": passes.Exponential(),
    "one cycle": passes.OneCycle(steps=6),
    "inverse": passes.InverseScaling(),
    "optimal": passes.Optimal(),
}
PARTS: dict[str, dict[str, Any]] = {
    **{f"optimizer {name}": {"optimizer": one} for name, one in OPTIMIZERS.items()},
    **{f"schedule {name}": {"schedule": one} for name, one in SCHEDULES.items()},
    "clip norm": {"clip": passes.ClipGlobalNorm(0.1)},
    "clip value": {"clip": passes.ClipValue(0.05)},
    "l1": {"regularizer": passes.L1(0.01)},
    "l2": {"regularizer": passes.L2(0.01)},
    "elastic": {"regularizer": passes.ElasticPenalty(0.01)},
    "accumulate": {"accumulate": passes.Accumulate(2), "optimizer": passes.AdamW(0.01)},
    "ema": {"average": passes.EMA(0.9)},
    "swa": {"average": passes.SWA(start=2, every=2)},
    "swag": {"average": passes.SWAG(start=2, every=2, rank=2)},
    "loss scale": {
        "gradient": passes.Gradient(loss_scale=2.0**10),
        "loss_scale": passes.DynamicLossScale(interval=2),
        "clip": passes.ClipGlobalNorm(1.0),
    },
    "mixed": {
        "precision": passes.MixedPrecision(),
        "gradient": passes.Gradient(loss_scale=2.0**10),
        "loss_scale": passes.DynamicLossScale(interval=2),
    },
    "recompute": {"recompute": passes.Recompute()},
    "standardize": {"standardize": passes.Standardize(0.5, 2.0)},
    "mixed rows": {"augment": passes.MixUp()},
    "last axis": {"loss": passes.CrossEntropy(axis=-1)},
}
LOSSES: dict[str, tuple[Any, Callable[[int], Arrays]]] = {
    "squared": (passes.MeanSquaredError(), real(6, 4)),
    "squared sum": (passes.MeanSquaredError(reduction="sum"), real(6, 4)),
    "absolute": (passes.MeanAbsoluteError(), real(6, 4)),
    "elastic": (passes.Elastic(l1=0.1, l2=0.9), real(6, 4)),
    "huber": (passes.Huber(0.7), real(6, 4)),
    "quantile": (passes.Quantile(0.3), real(6, 4)),
    "poisson": (passes.Poisson(), lambda i: {"target": abs(numbers(i, 6, 4))}),
    "hinge": (passes.Hinge(), lambda i: {"target": np.sign(numbers(i, 6, 4))}),
    "binary": (passes.BinaryCrossEntropy(), lambda i: {"target": (numbers(i, 6, 4) > 0).astype(np.float32)}),
    "binary weighted": (
        passes.BinaryCrossEntropy(class_weights=(0.5, 3.0)),
        lambda i: {"target": (numbers(i, 6, 4) > 0).astype(np.float32)},
    ),
    "smoothed": (passes.CrossEntropy(label_smoothing=0.2), classes(4, 6)),
    "weighted": (passes.CrossEntropy(class_weights=(0.5, 1.0, 2.0, 0.25)), classes(4, 6)),
    "ignoring": (passes.CrossEntropy(ignore_index=2), classes(4, 6)),
    "weights of rows": (
        passes.CrossEntropy(sample_weight=True),
        lambda i: {"target": labels(i, 4, 6), "sample_weight": abs(numbers(i, 6))},
    ),
    "entropy": (passes.Entropy(), lambda i: {}),
    "divergence": (passes.KLDivergence(), lambda i: {"target": np.full((6, 4), 0.25, np.float32)}),
}


def weights(*shape: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng((seed, *shape)).standard_normal(shape) / 2


def convolution(text: str, x: str, w: Sequence[int], bias: int, rank: int) -> Any:
    dims = ",".join("ABCD"[:rank])
    return model(f"g (float[{x}] x) => (float[N,M,{dims}] y) {{ {text} }}", w=weights(*w), b=weights(bias))


def step_of_convolution(op: str, x: tuple[int, ...], w: tuple[int, ...], **attributes: Any) -> Graph:
    """Return a step with the mean of all elements of a convolution as the objective, weighted at random."""
    shown = ", ".join(f"{k}={v}" for k, v in {"group": 1, **attributes}.items())
    bias = w[0] if op == "Conv" else w[1] * attributes.get("group", 1)
    text = f"c = {op}<{shown}>(x, w, b) t = Tanh(c) y = Flatten(t)"
    dims = ",".join(map(str, ("N", *x[1:])))
    proto = model(f"g (float[{dims}] x) => (float[N,M] y) {{ {text} }}", w=weights(*w), b=weights(bias))
    (y,) = Session(Device("cpu", threads=1), normal_form(proto)).compute_arrays({"x": numbers(0, *x)}).values()
    return trained(proto, x, real(*y.shape), loss=passes.MeanSquaredError())


CONVOLUTIONS: list[tuple[str, tuple[int, ...], tuple[int, ...], dict[str, Any]]] = [
    *(("Conv", (2, c, 7, 6), (f, c, 3, 3), {"pads": [1] * 4}) for c in (1, 3, 4, 5, 8) for f in (1, 3, 4, 8)),
    *(("Conv", (2, 4, 7, 6), (f, 4, 1, 1), {}) for f in (1, 3, 4, 6)),
    *(
        ("Conv", (n, c, 5, 6), (f, c, k, k), {})
        for n, c, f, k in [(6, 6, 8, 3), (9, 9, 4, 2), (15, 1, 4, 3), (3, 6, 4, 1)]
    ),
    *(("Conv", (2, 3, 9, 8), (5, 3, 3, 2), {"strides": s}) for s in ([2, 2], [3, 1], [1, 2])),
    *(("Conv", (2, 3, 9, 8), (5, 3, 3, 2), {"dilations": d, "pads": [1, 2, 2, 1]}) for d in ([2, 2], [1, 3])),
    *(
        ("Conv", (2, g * m, 6, 5), (g * f, m, 3, 3), {"group": g, "pads": [1, 1, 1, 1]})
        for g, m, f in zip((2, 2, 3, 4, 4, 6, 8, 8), (1, 2, 2, 1, 2, 1, 1, 2), (1, 3, 5, 1, 5, 2, 1, 9), strict=True)
    ),
    ("Conv", (2, 6, 7, 7), (6, 1, 3, 3), {"group": 6, "strides": [2, 2], "pads": [1, 1, 1, 1]}),
    *(("Conv", (2, 3, 11), (f, 3, 3), {"strides": [s]}) for f in (2, 4) for s in (1, 2)),
    ("Conv", (2, 8, 11), (8, 1, 3), {"group": 8}),
    ("Conv", (2, 4, 11), (6, 2, 3), {"group": 2, "dilations": [2]}),
    *(("Conv", (1, 2, 4, 5, 4), (f, 2, 3, 2, 3), {"pads": [1, 0, 1, 1, 0, 1]}) for f in (3, 4)),
    ("Conv", (1, 2, 4, 5, 4), (4, 1, 2, 2, 2), {"group": 2}),
    ("Conv", (1, 2, 6, 5, 4), (3, 2, 2, 2, 2), {"strides": [2, 2, 1]}),
    *(("ConvTranspose", (2, c, 4, 5), (c, f, 3, 3), {"strides": [2, 2]}) for c in (2, 4) for f in (1, 3, 4)),
    ("ConvTranspose", (2, 4, 4, 5), (4, 2, 3, 3), {"group": 2, "strides": [2, 1], "pads": [1, 1, 1, 1]}),
    ("ConvTranspose", (2, 4, 4, 5), (4, 1, 3, 3), {"group": 4, "strides": [2, 2], "output_padding": [1, 1]}),
    ("ConvTranspose", (2, 3, 4, 5), (3, 2, 2, 2), {"dilations": [2, 2]}),
    ("ConvTranspose", (2, 3, 6), (3, 2, 3), {"strides": [2]}),
    ("ConvTranspose", (1, 2, 3, 4, 3), (2, 3, 2, 2, 2), {"strides": [2, 1, 1]}),
]


def ended(body: str, x: str, out: int, size: int, **parameters: np.ndarray) -> Any:
    """Return a network whose features h end in a layer."""
    parameters |= {"end": weights(size, out, seed=5), "shift": np.zeros(out)}
    text = f"g (float[{x}] x) => (float[N,{out}] y) {{ {body} f = Flatten(h) y = Gemm(f, end, shift) }}"
    return model(text, **parameters)


def recurrent(kind: str, direction: str, gates: int) -> Any:
    ways, hidden = (2 if direction == "bidirectional" else 1), 3
    outputs = "all, last, cell" if kind == "LSTM" else "all, last"
    return ended(
        f'{outputs} = {kind}<hidden_size={hidden}, direction="{direction}">(x, w, r, b) '
        "h = Transpose<perm=[1,0,2]>(last)",
        "5,N,2",
        4,
        ways * hidden,
        w=weights(ways, gates * hidden, 2),
        r=weights(ways, gates * hidden, hidden),
        b=weights(ways, 2 * gates * hidden),
    )


def embedded(lookup: str, **parameters: np.ndarray) -> Graph:
    proto = model(
        f"g (int64[N,5] x) => (float[N,4] y) {{ {lookup} axes = Constant<value_ints=[1]>() "
        "m = ReduceMean<keepdims=0>(e, axes) y = MatMul(m, end) }",
        end=weights(6, 4),
        **parameters,
    )
    step = graphopt.compile(proto, loss=passes.CrossEntropy(), optimizer=passes.AdamW(0.01))
    return step, [{"x": labels(i, 9, 6, 5), "target": labels(i + 50, 4, 6)} for i in range(STEPS)]


NETWORKS: dict[str, tuple[Any, tuple[int, ...], Any, dict[str, Any]]] = {
    "linear": (linear, (6, 3), real(6, 2), {"loss": passes.MeanSquaredError()}),
    "attention": (attention, (3, 6, 4), real(3, 6, 4), {"loss": passes.MeanSquaredError()}),
    "vector": (
        lambda: model("g (float[N,3] x) => (float[N] y) { y = MatMul(x, w) }", w=weights(3)),
        (6, 3),
        real(6),
        {"loss": passes.MeanSquaredError()},
    ),
    "dropout": (
        lambda: ended("ratio = Constant<value = float {0.25}>() t = Tanh(x) h = Dropout(t, ratio)", "N,8", 4, 8),
        (6, 8),
        classes(4, 6),
        {"training": passes.TrainingMode(seed=3)},
    ),
    "batch normalization": (
        lambda: ended(
            "c = Conv(x, w) h = BatchNormalization(c, s, b, m, v)",
            "N,2,3,3",
            4,
            12,
            w=weights(3, 2, 2, 2),
            **{name: np.ones(3) if name in "sv" else np.zeros(3) for name in "sbmv"},
        ),
        (6, 2, 3, 3),
        classes(4, 6),
        {"training": passes.TrainingMode(seed=3)},
    ),
    **{
        f"{kind} {way}": (functools.partial(recurrent, kind, way, gates), (5, 6, 2), classes(4, 6), {})
        for kind, gates in (("RNN", 1), ("GRU", 3), ("LSTM", 4))
        for way in ("forward", "reverse", "bidirectional")
    },
    **{
        f"{pool} {n} {ceil}": (
            functools.partial(
                ended,
                f"p = {pool}<kernel_shape=[3,3], strides=[2,2], pads=[{n},{n},{n},{n}], ceil_mode={ceil}>(x) "
                "h = Mul(p, scale)",
                "N,2,6,6",
                4,
                2 * side * side,
                scale=weights(2, side, side),
            ),
            (6, 2, 6, 6),
            classes(4, 6),
            {},
        )
        for pool in ("MaxPool", "AveragePool")
        for n, ceil, side in ((0, 0, 2), (1, 0, 3), (0, 1, 3), (1, 1, 4))
    },
    "pooled ties": (
        lambda: ended(
            "g = Round(x) z = Mul(g, scale) p = MaxPool<kernel_shape=[2,2], strides=[1,1]>(z) h = Tanh(p)",
            "N,2,4,4",
            4,
            18,
            scale=np.ones(1),
        ),
        (6, 2, 4, 4),
        classes(4, 6),
        {},
    ),
    "images of labels": (
        lambda: model("g (float[N,2,4,5] x) => (float[N,3,A,B] y) { y = Conv(x, w) }", w=weights(3, 2, 1, 1)),
        (2, 2, 4, 5),
        classes(3, 2, 4, 5),
        {},
    ),
    "built-in cnn": (lambda: models.cnn((1, 8, 8), 5, channels=(8, 16)), (6, 1, 8, 8), classes(5, 6), {}),
    "built-in mlp": (lambda: models.mlp((6,), 5), (6, 6), classes(5, 6), {"optimizer": passes.AdamW(1e-3)}),
    "built-in linear": (lambda: models.linear((6,), 5), (6, 6), classes(5, 6), {}),
}


def transformer(**steps: Any) -> Graph:
    network = models.transformer((6,), 9, width=16, heads=2, layers=1)
    step = graphopt.compile(network, **{"loss": passes.CrossEntropy(axis=-1), "optimizer": passes.AdamW(3e-3), **steps})
    return step, [{"x": labels(i, 9, 4, 6), "target": labels(i + 50, 9, 4, 6)} for i in range(STEPS)]


def hosted(name: str) -> Graph:
    return GRAPHS[name][0](), [dict(batch) for batch in batches(name, STEPS)]


def several_steps(name: str) -> Graph:
    """Return a graph of several steps per call."""
    step = GRAPHS[name][0]()
    passes.Unroll()(step)
    fed = batches(name, 4)
    return step, [{key: np.stack([batch[key] for batch in pair]) for key in fed[0]} for pair in (fed[:2], fed[2:])]


def ctc(frames: int) -> Graph:
    proto = model(f"g (float[N,{frames},4] x) => (float[N,{frames},5] y) {{ y = MatMul(x, w) }}", w=weights(4, 5))
    step = graphopt.compile(proto, loss=passes.CTC(input_lengths=True), optimizer=passes.SGD(0.1))
    target, lengths = (
        np.array([[1, 2, 2], [3, 1, -1], [4, -1, -1]]),
        np.array([frames, frames - 1, frames - 2]),
    )
    fed = [{"x": numbers(i, 3, frames, 4), "target": target, "input_lengths": lengths} for i in range(STEPS)]
    return step, fed


def of_steps() -> Iterator[tuple[str, Callable[[], Graph]]]:
    for name, (network, x, target) in SMALL.items():
        for part, steps in PARTS.items():
            yield f"step/{name}/{part}", functools.partial(trained, network, x, target, **steps)
    for name, (loss, target) in LOSSES.items():
        yield f"step/loss/{name}", functools.partial(trained, SMALL["mlp"][0], (6, 5), target, loss=loss)
    yield "step/loss/ctc", functools.partial(ctc, 7)
    yield "step/loss/ctc of 400 frames", functools.partial(ctc, 400)
    for op, x, w, attributes in CONVOLUTIONS:
        shown = "-".join(f"{k}={v}" for k, v in attributes.items()).replace(" ", "")
        name = f"step/{op}/{'x'.join(map(str, x))}-{'x'.join(map(str, w))}-{shown}"
        yield name, functools.partial(step_of_convolution, op, x, w, **attributes)
    for name, (network, x, target, steps) in NETWORKS.items():
        yield f"step/network/{name}", functools.partial(trained, network, x, target, **steps)
    table = weights(9, 6)
    yield "step/network/embedding", functools.partial(embedded, "e = Gather(w, x)", w=table)
    yield (
        "step/network/embedding nd",
        functools.partial(embedded, "a = Constant<value_ints=[-1]>() i = Unsqueeze(x, a) e = GatherND(w, i)", w=table),
    )
    yield "step/network/transformer", transformer
    yield "step/network/transformer mixed", functools.partial(transformer, **PARTS["mixed"])
    for name in GRAPHS:
        yield f"step/host/{name}", functools.partial(hosted, name)
        yield f"step/several/{name}", functools.partial(several_steps, name)


def of_sureness() -> Iterator[tuple[str, Callable[[], Graph]]]:
    """Yield files that say how sure they are."""
    rows = {"x": numbers(0, 60, 1, 8, 8), "target": labels(0, 4, 60)}
    masked = model(
        "g (float[N,6] x) => (float[N,3] y) { r = Constant<value_float = 0.5>() d = Dropout(x, r) y = MatMul(d, w) }",
        w=weights(6, 3),
    )

    def calibrated(*learning: Any) -> Callable[[], Graph]:
        network = graphopt.models.cnn((1, 8, 8), 4)
        return lambda: (graphopt.calibrate(network, rows, *learning), [{"x": rows["x"][:6]}])

    for score in ("lac", "aps", "raps"):
        yield f"sure {score}", calibrated(passes.Temperature(0.3), passes.PredictionSet(0.2, score))
    for kind in ("full", "kron", "diag"):
        yield f"sure {kind}", calibrated(passes.LastLayerLaplace(1.0, kind))
    others = [graphopt.models.cnn((1, 8, 8), 4, seed=1)]
    for name, file, each, x in (
        ("ensemble", graphopt.models.cnn((1, 8, 8), 4), passes.Ensemble(others), rows["x"][:6]),
        ("dropout", masked, passes.MonteCarloDropout(12), numbers(0, 5, 6)),
    ):
        yield f"sure {name}", lambda file=file, each=each, x=x: (graphopt.explain(file, each), [{"x": x}])


CASES: dict[str, Callable[[], Graph]] = {
    **dict(of_rules()),
    **dict(of_ends()),
    **dict(of_long_axes()),
    **dict(of_steps()),
    **dict(of_sureness()),
}


# Running.


def on_cpu(graph: ir.Model, fed: Sequence[Arrays]) -> list[Arrays]:
    """Return the outputs of each call of a graph on the CPU, as it is."""
    graph = graph.clone()
    state = take_initial(graph)
    return _calls(Session(Device("cpu", threads=1), graph).ort, state, fed)


def _calls(session: Any, state: Arrays, fed: Sequence[Arrays]) -> list[Arrays]:
    inputs, names = [x.name for x in session.get_inputs()], [y.name for y in session.get_outputs()]
    results = []
    for feeds in fed:
        given = {**state, **feeds}
        outputs = dict(zip(names, session.run(names, {name: given[name] for name in inputs}), strict=True))
        state = {**state, **{name[:-5]: y for name, y in outputs.items() if name.endswith(".next")}}
        results.append(outputs)
    return results


def on_gpu(kind: str, graph: ir.Model, int64: bool, folder: str) -> tuple[Any, Arrays]:
    """Open a session that writes its profile into a folder; return it and the initial state of the graph."""
    if kind == "webgpu":
        assert not software_adapter()
    own = {"webgpu": {"enableInt64": int(int64)}, "cuda": {"use_tf32": 0}}
    device = Device(kind, threads=1, provider_options=own[kind])
    options = device.new_session_options()
    options.enable_profiling, options.profile_file_prefix = True, str(Path(folder) / "profile")
    state = take_initial(graph)
    return Session(device, graph, options).ort, state


def error_of(found: np.ndarray, expected: np.ndarray) -> float:
    """Return the error relative to the largest element, infinite where other elements are not finite."""
    if found.shape != expected.shape or found.dtype != expected.dtype:
        return float("inf")
    if expected.dtype.kind != "f":
        return float(np.any(found != expected))
    finite = np.isfinite(expected)
    if not np.array_equal(np.where(finite, 0, expected), np.where(np.isfinite(found), 0, found), equal_nan=True):
        return float("inf")
    return distance(np.where(finite, found, 0), np.where(finite, expected, 0), 1e-3)


def is_noise(case: str, name: str) -> bool:
    """Return whether an output of a case depends on rounding alone."""
    patterns = [pattern for of, own in NOISE.items() if fnmatch.fnmatchcase(case, of) for pattern in own]
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def run(name: str, int64: bool = True, kind: str = "webgpu") -> Result:
    """Run a case on a kind of device."""
    try:
        graph, fed = CASES[name]()
        expected = on_cpu(graph, fed) if graph.graph.outputs else []
    except Exception as error:  # noqa: BLE001 - versions raise different types
        return Result(name, f"{NOT_HERE}: {str(error).splitlines()[0]}")
    if not expected:
        return Result(name, f"{NOT_HERE}: there is no gradient")
    lowered = graphopt.lower(graph, kind).clone()
    names = nodes_on_shapes(lowered)
    with tempfile.TemporaryDirectory() as folder:
        session, state = on_gpu(kind, lowered, int64, folder)
        found = _calls(session, state, fed)
        events = json.loads(Path(session.end_profiling()).read_text())
    result = Result(name)
    for ours, theirs in zip(found, expected, strict=True):
        for key, y in theirs.items():
            result.errors[key] = max(result.errors.get(key, 0.0), error_of(ours[key], y))
    cpu: Counter[str] = Counter()
    for event in events:
        args = event.get("args", {})
        if event.get("cat") != "Node" or "op_name" not in args or not event["name"].endswith("_kernel_time"):
            continue
        shape = next((f"{t}{d}" for y in args.get("output_type_shape", []) for t, d in y.items()), "")
        if args["op_name"] == "MemcpyToHost":
            result.reads.append(shape)
        elif args["provider"] == "CPUExecutionProvider" and event["name"].removesuffix("_kernel_time") not in names:
            cpu[f"{args['op_name']} {shape}"] += 1
    result.cpu = dict(sorted(cpu.items()))
    result.reads = sorted(result.reads)
    return result


def worker() -> None:
    """Run the cases whose names standard input gives, and write a line for each."""
    out = sys.stdout
    sys.stdout = sys.stderr
    for line in sys.stdin:
        name, int64, kind = json.loads(line)
        try:
            result = run(name, int64, kind)
        except Exception as error:  # noqa: BLE001 - whatever fails is the result
            result = Result(name, f"{type(error).__name__}: {str(error).splitlines()[0][:400]}")
        out.write(json.dumps(asdict(result)) + "\n")
        out.flush()


class Worker:
    """Run cases in a process, which is replaced when it dies."""

    def __init__(self, kind: str = "webgpu") -> None:
        self._kind = kind
        self._process: Any = None

    def run(self, name: str, int64: bool = True) -> Result:
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, __file__, "--worker"]
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
            )
        process = self._process
        timer = threading.Timer(SECONDS, process.kill)
        timer.start()
        try:
            process.stdin.write(json.dumps([name, int64, self._kind]) + "\n")
            process.stdin.flush()
            line = process.stdout.readline()
        except BrokenPipeError:
            line = ""
        timer.cancel()
        if line:
            return Result(**json.loads(line))
        return Result(name, f"the process ended with {process.wait()}")

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("patterns", nargs="*", default=["*"])
    parser.add_argument("--device", choices=("webgpu", "cuda"), default="webgpu")
    parser.add_argument("--jobs", type=int, default=1, help="the number of processes")
    parser.add_argument("--worker", action="store_true")
    arguments = parser.parse_args()
    if arguments.worker:
        worker()
        return
    names = [name for name in CASES if any(fnmatch.fnmatchcase(name, p) for p in arguments.patterns)]
    idle, counts = Queue[Worker](), Counter[str]()
    for _ in range(arguments.jobs):
        idle.put(Worker(arguments.device))

    def swept(name: str) -> Result:
        own = idle.get()
        try:
            return own.run(name)
        finally:
            idle.put(own)

    with ThreadPoolExecutor(arguments.jobs) as pool:
        for i, result in enumerate(pool.map(swept, names)):
            wrong = {key: f"{error:.1e}" for key, error in result.errors.items() if not error <= TOLERANCE}
            kind = "failed" if result.failed else "wrong" if wrong else "cpu" if result.cpu else "fine"
            counts[kind] += 1
            if kind != "fine":
                what = result.failed or wrong or result.cpu
                print(f"{i}/{len(names)} {kind}: {result.case}: {what}", flush=True)
    while not idle.empty():
        idle.get().close()
    print(dict(counts))


if __name__ == "__main__":
    main()

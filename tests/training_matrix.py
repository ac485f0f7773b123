"""Trainings for tests: settings of each factor, the networks, and PyTorch's training in float64 of the same rows."""

from __future__ import annotations

import functools
import io
import itertools
import random
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx
import torch
from torch import nn

import graphopt
import passes

ROWS = (8, 8, 8, 8, 6, 6)  # of each batch; one size where the export is static
STEPS = len(ROWS)
CLASSES = 3


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.cell = kind(4, 6, batch_first=True, **options)
        self.head = nn.Linear(6 * (1 + self.cell.bidirectional), CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, 0.0, "gelu", batch_first=True, norm_first=True)
        self.head = nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.layer(x).mean(1))


class Embedding(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(11, 8), nn.Linear(8, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(torch.tanh(self.words(x).mean(1)))


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.first, self.second = nn.Linear(5, 16), nn.Linear(16, CLASSES), nn.Linear(16, 2)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        h = torch.tanh(self.trunk(x))
        return self.first(h), self.second(h)


class Normalized(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.first = nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.inner, self.second = nn.Conv2d(6, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6)
        self.head = nn.Linear(6, CLASSES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.relu(self.first(self.stem(x)))
        h = torch.relu(h + self.second(self.inner(h)))
        return self.head(h.mean((2, 3)))


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(6, 70), nn.Tanh(), nn.Linear(70, CLASSES)), (6,)),
    "1-D": (
        lambda: nn.Sequential(nn.Conv1d(2, 4, 5, stride=2), nn.ReLU(), nn.Flatten(), nn.Linear(120, CLASSES)),
        (2, 64),
    ),
    "2-D": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 4, 3),
            nn.ReLU(),
            nn.Conv2d(4, 6, 3, stride=2, padding=1),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(54, CLASSES),
        ),
        (1, 8, 8),
    ),
    "3-D": (
        lambda: nn.Sequential(nn.Conv3d(2, 4, 3, padding=(0, 1, 0)), nn.ReLU(), nn.Flatten(), nn.Linear(360, CLASSES)),
        (2, 5, 6, 7),
    ),
    "depthwise": (
        lambda: nn.Sequential(
            nn.Conv2d(4, 8, 3, padding=1, groups=4),
            nn.ReLU(),
            nn.Conv2d(8, 6, 1),
            nn.SiLU(),
            nn.Flatten(),
            nn.Linear(216, CLASSES),
        ),
        (4, 6, 6),
    ),
    "transposed": (
        lambda: nn.Sequential(
            nn.ConvTranspose2d(2, 36, 2, stride=2),
            nn.ReLU(),
            nn.Conv2d(36, 32, 3),
            nn.ReLU(),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Linear(32, CLASSES),
        ),
        (2, 3, 3),
    ),
    "max-pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 8, 3, padding=1),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(8, 8, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(48, CLASSES),
        ),
        (1, 8, 10),
    ),
    "average-pooled": (
        lambda: nn.Sequential(
            nn.Conv2d(1, 6, 5, padding=2),
            nn.Sigmoid(),
            nn.AvgPool2d(2),
            nn.Conv2d(6, 16, 3),
            nn.ReLU(),
            nn.Flatten(),
            nn.Linear(144, CLASSES),
        ),
        (1, 10, 10),
    ),
    "normalized": (Normalized, (2, 6, 6)),
    "LSTM": (functools.partial(Recurrent, nn.LSTM), (5, 4)),
    "GRU": (functools.partial(Recurrent, nn.GRU, bidirectional=True), (5, 4)),
    "RNN": (functools.partial(Recurrent, nn.RNN), (5, 4)),
    "attention": (Attention, (4, 8)),
    "embedding": (Embedding, (5,)),
    "heads": (Heads, (5,)),
}


class Lion(torch.optim.Optimizer):
    """Chen et al. 2023. `sure` says of which elements the sign never hung on rounding."""

    def __init__(self, parameters: Any, lr: float, betas: tuple[float, float], weight_decay: float) -> None:
        super().__init__(parameters, {"lr": lr, "betas": betas, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            b1, b2 = group["betas"]
            for w in group["params"]:
                state = self.state[w]
                m = state.setdefault("m", torch.zeros_like(w))
                c = b1 * m + (1 - b1) * w.grad
                state["sure"] = state.get("sure", True) & (c.abs() >= 1e-4 * c.abs().max())
                w.mul_(1 - group["lr"] * group["weight_decay"]).sub_(group["lr"] * c.sign())
                m.mul_(b2).add_((1 - b2) * w.grad)


class RateInVelocity(torch.optim.Optimizer):
    """Keras's and scikit-learn's momentum: v = mu v + lr g, w - v, or w - lr g - mu v."""

    def __init__(self, parameters: Any, lr: float, momentum: float, nesterov: bool = False) -> None:
        super().__init__(parameters, {"lr": lr, "momentum": momentum, "nesterov": nesterov})

    @torch.no_grad()
    def step(self) -> None:
        for group in self.param_groups:
            for w in group["params"]:
                v = self.state[w].setdefault("v", torch.zeros_like(w))
                scaled = group["lr"] * w.grad
                v.mul_(group["momentum"]).add_(scaled)
                w.sub_(scaled + group["momentum"] * v if group["nesterov"] else v)


class ScheduleFree(torch.optim.Optimizer):
    """Defazio et al. 2024, algorithm 1. Training has y in the parameters, and `eval` puts x there."""

    def __init__(self, parameters: Any, lr: float, eps: float) -> None:
        super().__init__(parameters, {"lr": lr, "eps": eps})
        self.t, self.total, self.most = 0, 0.0, 0.0

    @torch.no_grad()
    def step(self) -> None:
        (group,) = self.param_groups
        self.most = max(self.most, group["lr"])
        self.t, self.total = self.t + 1, self.total + self.most**2
        for y in group["params"]:
            state = self.state[y] or {"x": y.clone(), "z": y.clone(), "v": torch.zeros_like(y)}
            self.state[y] = state
            state["v"].mul_(0.999).add_(0.001 * y.grad**2)
            root = (state["v"] / (1 - 0.999**self.t)).sqrt()
            state["z"].sub_(group["lr"] * y.grad / (root + group["eps"]))
            state["x"].lerp_(state["z"], self.most**2 / self.total)
            y.copy_(0.9 * state["x"] + 0.1 * state["z"])

    @torch.no_grad()
    def eval(self) -> None:
        for y, state in self.state.items():
            y.copy_(state["x"])


# A large epsilon keeps rounding of gradients near zero small: their quotient has no jump there.
OPTIMIZERS: dict[str, tuple[passes.Optimizer, Callable[[Any], torch.optim.Optimizer]]] = {
    "SGD": (passes.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    "decayed SGD": (
        passes.SGD(0.1, weight_decay=0.05),
        lambda p: torch.optim.SGD(p, 0.1, weight_decay=0.05),
    ),
    "momentum": (passes.SGD(0.05, momentum=0.9), lambda p: torch.optim.SGD(p, 0.05, 0.9)),
    "Nesterov": (
        passes.SGD(0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.05, 0.9, nesterov=True, weight_decay=0.01),
    ),
    "dampened": (
        passes.SGD(0.05, momentum=0.8, dampening=0.3),
        lambda p: torch.optim.SGD(p, 0.05, 0.8, 0.3),
    ),
    "rate in velocity": (
        passes.SGD(0.05, momentum=0.9, nesterov=True, rate_in_velocity=True),
        lambda p: RateInVelocity(p, 0.05, 0.9, nesterov=True),
    ),
    "Adam": (
        passes.Adam(0.02, beta1=0.8, epsilon=1e-2),
        lambda p: torch.optim.Adam(p, 0.02, (0.8, 0.999), 1e-2),
    ),
    "AdamW": (
        passes.AdamW(0.02, epsilon=1e-2, weight_decay=0.1),
        lambda p: torch.optim.AdamW(p, 0.02, eps=1e-2, weight_decay=0.1),
    ),
    "Adagrad": (
        passes.Adagrad(0.05, initial_accumulator=0.01),
        lambda p: torch.optim.Adagrad(p, 0.05, initial_accumulator_value=0.01),
    ),
    "RMSprop": (passes.RMSprop(0.01, epsilon=1e-2), lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-2)),
    "centered RMSprop": (
        passes.RMSprop(0.01, epsilon=1e-1, momentum=0.8, centered=True),
        lambda p: torch.optim.RMSprop(p, 0.01, eps=1e-1, momentum=0.8, centered=True),
    ),
    "schedule-free": (
        passes.ScheduleFreeAdamW(0.02, epsilon=1e-2),
        lambda p: ScheduleFree(p, 0.02, 1e-2),
    ),
    "Lion": (passes.Lion(1e-3, weight_decay=0.1), lambda p: Lion(p, 1e-3, (0.9, 0.99), 0.1)),
}

Scheduler = torch.optim.lr_scheduler


def _cosine_after_warmup(optimizer: torch.optim.Optimizer) -> Any:
    rate = optimizer.param_groups[0]["lr"]
    parts = [
        Scheduler.LinearLR(optimizer, 0.5, 1.0, 1),
        Scheduler.CosineAnnealingLR(optimizer, STEPS - 2, 0.1 * rate),
    ]
    return Scheduler.SequentialLR(optimizer, parts, [2])


SCHEDULES: dict[str, tuple[passes.Schedule | None, Callable[[Any], Any] | None]] = {
    "constant": (None, None),
    "cosine": (passes.Cosine(steps=STEPS, end=0.1, warmup=2), _cosine_after_warmup),
    "stepwise": (passes.StepDecay(every=2, factor=0.5), lambda o: Scheduler.StepLR(o, 2, 0.5)),
}
NORM, LIMIT, STRENGTH = 0.3, 0.02, 0.01
CLIPS: dict[str, tuple[passes.Clip | None, Callable[[Any], Any]]] = {
    "unclipped": (None, lambda p: None),
    "norm": (passes.ClipGlobalNorm(NORM), lambda p: nn.utils.clip_grad_norm_(p, NORM)),
    "value": (passes.ClipValue(LIMIT), lambda p: nn.utils.clip_grad_value_(p, LIMIT)),
}
LOSSES: dict[str, tuple[passes.Loss, Callable[..., torch.Tensor]]] = {
    "classes": (passes.CrossEntropy(), nn.functional.cross_entropy),
    "squares": (passes.MeanSquaredError(), nn.functional.mse_loss),
}

KERNELS, TARGETS = ("kernels", "in place"), ("cuda", "webgpu")  # among forms; the CPU runs what targets write
FACTORS: dict[str, Sequence[Any]] = {
    "network": list(NETWORKS),
    "optimizer": list(OPTIMIZERS),
    "schedule": list(SCHEDULES),
    "clip": list(CLIPS),
    "loss": list(LOSSES),
    "exporter": ["dynamo", "torchscript"],
    "static": [False, True],
    "fuse": [True, False],
    "form": ["graph", "kernels", "in place", "cuda", "webgpu"],
    "per_call": [1, 4],
    "accumulate": [1, 2],
    "penalty": [False, True],
}


@dataclass(frozen=True)
class Training:
    """Choose a setting of each factor."""

    network: str = "2-D"
    optimizer: str = "SGD"
    schedule: str = "constant"
    clip: str = "unclipped"
    loss: str = "classes"
    exporter: str = "torchscript"
    static: bool = False
    fuse: bool = True
    form: str = "graph"
    per_call: int = 1
    accumulate: int = 1
    penalty: bool = False

    def __str__(self) -> str:
        chosen = ((name, getattr(self, name)) for name in FACTORS)
        return ", ".join(f"{name}={value}" for name, value in chosen)


def pairs(factors: Mapping[str, Sequence[Any]], seed: int = 0) -> Iterator[dict[str, Any]]:
    """Yield choices of a setting of each factor until every two settings of two factors were chosen together.

    Greedy, as in AETG (Cohen, Dalal, Fredman, Patton 1997): the best of several random completions of an open pair.
    """
    draw = random.Random(seed)
    open_ = {
        frozenset([(a, x), (b, y)])
        for (a, xs), (b, ys) in itertools.combinations(factors.items(), 2)
        for x, y in itertools.product(xs, ys)
    }

    def closed(choice: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
        return {frozenset(pair) for pair in itertools.combinations(choice.items(), 2)} & open_

    while open_:
        first = dict(min(open_, key=lambda pair: sorted(map(repr, pair))))
        candidates = [
            {name: first.get(name, draw.choice(values)) for name, values in factors.items()} for _ in range(40)
        ]
        best = max(candidates, key=lambda choice: len(closed(choice)))
        open_ -= closed(best)
        yield best


def network(name: str) -> nn.Module:
    """Return a network whose weights all differ: exporters merge equal ones and leave out zeros."""
    torch.manual_seed(0)
    module = NETWORKS[name][0]()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
        for part in module.modules():
            if isinstance(part, nn.BatchNorm2d):
                part.running_mean.normal_(0, 0.1)
                part.running_var.uniform_(0.5, 1.5)
    return module


def input_of(name: str, rows: int, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    shape = (rows, *NETWORKS[name][1])
    if name == "embedding":
        return torch.randint(0, 11, shape, generator=generator)
    return torch.randn(shape, generator=generator)


def targets_of(training: Training, rows: int, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed + 100)
    labels = torch.randint(0, CLASSES, (rows,), generator=generator)
    numbers = torch.randn((rows, CLASSES), generator=generator)
    target = labels if training.loss == "classes" else numbers
    return {"target_y": target, "target_z": numbers[:, :2]} if training.network == "heads" else {"target": target}


def batches(training: Training) -> list[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    sizes = ROWS[:1] * STEPS if training.static else ROWS
    return [
        (input_of(training.network, rows, seed), targets_of(training, rows, seed)) for seed, rows in enumerate(sizes)
    ]


@functools.cache
def exported(name: str, exporter: str, static: bool) -> onnx.ModelProto:
    """Return the file of an exporter with its usual options and a dynamic number of rows, or with that of a batch."""
    module, x = network(name).eval(), input_of(name, ROWS[0], 0)
    outputs = ["y", "z"] if name == "heads" else ["y"]
    options: dict[str, Any] = {"input_names": ["x"], "output_names": outputs}
    file = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            if not static:
                options["dynamic_shapes"] = ({0: torch.export.Dim("batch")},)
            if name == "normalized" or (name == "RNN" and static):
                # Otherwise the convolutions absorb the normalizations, and a matrix absorbs the first step's bias.
                options["optimize"] = False
            program = torch.onnx.export(module, (x,), dynamo=True, verbose=False, **options)
            return program.model_proto
        if not static:
            options["dynamic_axes"] = {value: {0: "batch"} for value in ["x", *outputs]}
        mode = torch.onnx.TrainingMode.PRESERVE if name == "normalized" else torch.onnx.TrainingMode.EVAL
        torch.onnx.export(module, (x,), file, dynamo=False, opset_version=17, training=mode, **options)
    return onnx.load_from_string(file.getvalue())


def compiled(training: Training) -> Any:
    """Return graphopt's training graph."""
    loss: Any = LOSSES[training.loss][0]
    if training.network == "heads":
        loss = passes.Losses({"y": loss, "z": passes.MeanSquaredError()}, weights={"z": 0.5})
    return graphopt.compile(
        exported(training.network, training.exporter, training.static),
        training=passes.TrainingMode(),
        loss=loss,
        regularizer=passes.L2(STRENGTH) if training.penalty else None,
        clip=CLIPS[training.clip][0],
        optimizer=OPTIMIZERS[training.optimizer][0],
        schedule=SCHEDULES[training.schedule][0],
        accumulate=passes.Accumulate(training.accumulate) if training.accumulate > 1 else None,
        fuse=passes.Fuse() if training.fuse else None,
    )


@dataclass
class Trained:
    """Store what a training leads to: the losses, and each weight and statistic before and after it.

    Args:
        sure: elements that do not hang on rounding, where an optimizer has such.
    """

    losses: list[float]
    before: dict[str, np.ndarray]
    after: dict[str, np.ndarray]
    sure: dict[str, np.ndarray]


def trained(training: Training) -> Trained:
    """Train with graphopt."""
    executor = graphopt.Executor(
        compiled(training),
        threads=1,
        steps_per_call=training.per_call,
        native=training.form in KERNELS,
        in_place=training.form == "in place",
        target=training.form if training.form in TARGETS else "auto",
    )
    before = {name: np.array(value) for name, value in executor.state.items()}
    rows = [{name: tensor.numpy() for name, tensor in {"x": x, **targets}.items()} for x, targets in batches(training)]
    losses = [reported["loss"] for reported in executor.run(rows)]
    return Trained(losses, before, dict(executor.state), {})


@functools.lru_cache(64)
def expected(training: Training) -> Trained:
    """Train with PyTorch, in float64."""
    module = network(training.network).double().train()
    before = {name: tensor.detach().numpy().copy() for name, tensor in module.state_dict().items()}
    parameters = dict(module.named_parameters())
    optimizer = OPTIMIZERS[training.optimizer][1](list(parameters.values()))
    schedule = SCHEDULES[training.schedule][1]
    scheduler = schedule and schedule(optimizer)
    losses = []
    for number, (x, targets) in enumerate(batches(training), 1):
        loss = _loss(training, module, x, targets)
        losses.append(loss.item())
        (loss / training.accumulate).backward()
        if number % training.accumulate:
            continue
        CLIPS[training.clip][1](parameters.values())
        optimizer.step()
        optimizer.zero_grad()
        if scheduler:
            scheduler.step()
    getattr(optimizer, "eval", lambda: None)()
    sure = {name: optimizer.state[w].get("sure") for name, w in parameters.items()}
    after = {name: tensor.detach().numpy() for name, tensor in module.state_dict().items()}
    return Trained(losses, before, after, {name: mask.numpy() for name, mask in sure.items() if mask is not None})


def _loss(training: Training, module: nn.Module, x: torch.Tensor, targets: Mapping[str, torch.Tensor]) -> torch.Tensor:
    outputs = module(x.double() if x.is_floating_point() else x)
    first, *second = (target.double() if target.is_floating_point() else target for target in targets.values())
    compare = LOSSES[training.loss][1]
    if second:
        loss = compare(outputs[0], first) + 0.5 * nn.functional.mse_loss(outputs[1], second[0])
    else:
        loss = compare(outputs, first)
    if training.penalty:
        loss = loss + STRENGTH * sum(w.square().sum() for w in module.parameters())
    return loss


def differences(found: Trained, wanted: Trained) -> dict[str, float]:
    """Return the largest error of the losses, and of each weight, the error of its move divided by the largest move.

    A weight that an exporter renamed, transposed or joined with others is found by its numbers before the training.
    """
    losses = np.array(wanted.losses)
    errors = {"loss": float(np.max(np.abs(found.losses - losses) / np.abs(losses)))}
    names = [
        name
        for name, value in wanted.after.items()
        if value.ndim and found.after.get(name, value[..., None]).shape == value.shape
    ]
    for name in names:
        errors[name] = _error(found.after[name] - found.before[name], wanted, [name], wanted.before[name].shape)
    left = [name for name, value in wanted.after.items() if value.ndim and name not in names]
    if left:
        others = [
            name for name in found.before if name not in names and found.before[name].ndim and not name.endswith(".z")
        ]
        before = np.concatenate([found.before[name].ravel() for name in others])
        moves = np.concatenate([(found.after[name] - found.before[name]).ravel() for name in others])
        theirs = np.concatenate([wanted.before[name].ravel() for name in left]).astype(np.float32)
        order = {number: place for place, number in enumerate(before)}
        missing = [number for number in theirs if number not in order]
        errors["numbers that do not train"] = float(len(missing))
        if not missing:
            chosen = np.array([moves[order[number]] for number in theirs])
            errors[", ".join(left)] = _error(chosen, wanted, left, chosen.shape)
    return errors


def _error(moved: np.ndarray, wanted: Trained, names: Sequence[str], shape: tuple[int, ...]) -> float:
    right = np.concatenate([(wanted.after[name] - wanted.before[name]).ravel() for name in names])
    sure = np.concatenate([np.ravel(wanted.sure.get(name, np.ones(wanted.after[name].shape, bool))) for name in names])
    distance = np.abs(moved.ravel() - right)[sure]
    return float(distance.max(initial=0.0) / np.abs(right).max())

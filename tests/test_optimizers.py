"""Optimizers and schedules against PyTorch's, and a NumPy twin where PyTorch has none."""

from __future__ import annotations

import messages
import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from builders import mlp, run
from twins import descended

import graphopt
import passes
from graphopt.graph.metadata import RUNTIME
from graphopt.graph.roles import TRAINING_RUNTIME, Role, with_role
from graphopt.testing.gradients import distance

X = np.random.default_rng(1).standard_normal((16, 4))
T = np.tanh(X[:, :3])

OPTIMIZERS = [
    (passes.SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
    (passes.SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, 0.9)),
    (
        passes.SGD(0.1, momentum=0.9, dampening=0.3, weight_decay=0.01),
        lambda p: torch.optim.SGD(p, 0.1, 0.9, 0.3, 0.01),
    ),
    (passes.SGD(0.1, momentum=0.9, nesterov=True), lambda p: torch.optim.SGD(p, 0.1, 0.9, nesterov=True)),
    (passes.Adam(0.01), lambda p: torch.optim.Adam(p, 0.01)),
    (
        passes.Adam(0.01, beta1=0.8, beta2=0.9, weight_decay=0.1),
        lambda p: torch.optim.Adam(p, 0.01, (0.8, 0.9), weight_decay=0.1),
    ),
    (passes.AdamW(0.01), lambda p: torch.optim.AdamW(p, 0.01)),
    (passes.AdamW(0.01, weight_decay=0.3), lambda p: torch.optim.AdamW(p, 0.01, weight_decay=0.3)),
    (
        passes.Adagrad(0.1, initial_accumulator=0.1),
        lambda p: torch.optim.Adagrad(p, 0.1, initial_accumulator_value=0.1),
    ),
    (passes.RMSprop(0.01), lambda p: torch.optim.RMSprop(p, 0.01)),
    (
        passes.RMSprop(0.01, momentum=0.9, centered=True),
        lambda p: torch.optim.RMSprop(p, 0.01, momentum=0.9, centered=True),
    ),
]

SCHEDULES = [
    (passes.Constant(), None),
    (passes.Linear(steps=12, end=0.1), lambda o: torch.optim.lr_scheduler.LinearLR(o, 1.0, 0.1, 12)),
    (
        passes.Cosine(steps=12, end=0.1),
        lambda o: torch.optim.lr_scheduler.CosineAnnealingLR(o, 12, 0.1 * o.param_groups[0]["lr"]),
    ),
    (passes.StepDecay(every=4, factor=0.5), lambda o: torch.optim.lr_scheduler.StepLR(o, 4, 0.5)),
    (passes.Exponential(factor=0.8), lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.8)),
    (
        passes.Polynomial(steps=12, power=2.0),
        lambda o: torch.optim.lr_scheduler.PolynomialLR(o, 12, 2.0),
    ),
    (passes.OneCycle(steps=13), lambda o: torch.optim.lr_scheduler.OneCycleLR(o, 0.05, 13)),
]


def torch_mlp(proto: onnx.ModelProto) -> dict[str, torch.Tensor]:
    return {
        tensor.name: torch.tensor(onnx.numpy_helper.to_array(tensor).copy(), requires_grad=True)
        for tensor in proto.graph.initializer
    }


def torch_loss(w: dict[str, torch.Tensor]) -> torch.Tensor:
    hidden = torch.tanh(torch.tensor(X) @ w["fc0.weight"].T + w["fc0.bias"])
    return torch.mean((hidden @ w["fc1.weight"].T + w["fc1.bias"] - torch.tensor(T)) ** 2)


@pytest.mark.parametrize(("optimizer", "twin"), OPTIMIZERS, ids=lambda x: repr(x) if hasattr(x, "update") else "")
@pytest.mark.slow
def test_optimizer_takes_pytorchs_steps(optimizer, twin):
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer)
    weights = torch_mlp(proto)
    reference = twin(list(weights.values()))
    for outputs in run(step, 12, {"x": X, "target": T}):
        loss = torch_loss(weights)
        np.testing.assert_allclose(outputs["loss"], loss.item(), rtol=1e-10)
        descended(loss, reference)
    for name, tensor in weights.items():
        np.testing.assert_allclose(outputs[f"{name}.next"], tensor.detach().numpy(), rtol=1e-8, atol=1e-12)


@pytest.mark.parametrize(
    ("schedule", "rate"),
    [
        (passes.Polynomial(steps=12, power=0.9), lambda t: (1 - t / 12) ** 0.9),
        (passes.InverseScaling(power=0.3), lambda t: 1 / (t + 1) ** 0.3),
        (passes.Exponential(factor=0.7), lambda t: 0.7**t),
        (passes.StepDecay(every=3, factor=0.7), lambda t: 0.7 ** (t // 3)),
    ],
)
def test_rates_of_a_graph_in_float64_have_its_digits(schedule, rate):
    proto = mlp((4, 3), dtype=np.float64)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(1.0), schedule=schedule)
    for t, outputs in enumerate(run(step, 10, {"x": X, "target": T})):
        np.testing.assert_allclose(outputs["learning_rate"], rate(t), rtol=1e-15)


def test_lion_takes_the_steps_of_its_numpy_twin():
    step = graphopt.compile(
        mlp((4, 3), dtype=np.float64),
        loss=passes.MeanSquaredError(),
        optimizer=passes.Lion(0.01, weight_decay=0.1),
    )
    w, b = (onnx.numpy_helper.to_array(tensor) for tensor in mlp((4, 3), dtype=np.float64).graph.initializer)
    moments = [np.zeros_like(w), np.zeros_like(b)]
    results = run(step, 8, {"x": X, "target": T})
    for _ in results:
        dy = 2 * (X @ w.T + b - T) / T.size
        gradients = [dy.T @ X, dy.sum(0)]
        w, b = (
            p * (1 - 0.01 * 0.1) - 0.01 * np.sign(0.9 * m + 0.1 * g)
            for p, m, g in zip((w, b), moments, gradients, strict=True)
        )
        moments = [0.99 * m + 0.01 * g for m, g in zip(moments, gradients, strict=True)]
    np.testing.assert_allclose(results[-1]["fc0.weight.next"], w, rtol=1e-10)
    np.testing.assert_allclose(results[-1]["fc0.bias.next"], b, rtol=1e-10)


def test_groups_have_rates_and_decays_of_their_own():
    proto = mlp(dtype=np.float64)
    groups = (passes.Group("*.bias", weight_decay=0.0), passes.Group("fc1.*", learning_rate=0.1))
    optimizer = passes.SGD(0.1, momentum=0.9, weight_decay=0.01, groups=groups)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer)
    weights = torch_mlp(proto)
    reference = torch.optim.SGD(
        [
            {"params": [weights["fc0.bias"], weights["fc1.bias"]], "weight_decay": 0.0},
            {"params": [weights["fc1.weight"]], "lr": 0.01},
            {"params": [weights["fc0.weight"]]},
        ],
        lr=0.1,
        momentum=0.9,
        weight_decay=0.01,
    )
    results = run(step, 5, {"x": X, "target": T})
    for _ in results:
        descended(torch_loss(weights), reference)
    for name, tensor in weights.items():
        np.testing.assert_allclose(results[-1][f"{name}.next"], tensor.detach().numpy(), rtol=1e-9)


@pytest.mark.parametrize(("schedule", "twin"), SCHEDULES, ids=lambda x: repr(x) if hasattr(x, "rate") else "")
def test_schedule_gives_pytorchs_rates(schedule, twin):
    step = graphopt.compile(
        mlp(dtype=np.float64), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.05), schedule=schedule
    )
    reference = torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.05)
    scheduler = twin and twin(reference)
    for outputs in run(step, 13, {"x": X, "target": T}):
        np.testing.assert_allclose(outputs["learning_rate"], reference.param_groups[0]["lr"], rtol=1e-9, atol=1e-16)
        reference.step()
        if scheduler and scheduler.last_epoch < 12:
            scheduler.step()


@pytest.mark.parametrize("kind", ["invscaling", "optimal"])
def test_schedule_gives_scikit_learns_rates(kind):
    schedule = passes.InverseScaling(power=0.25) if kind == "invscaling" else passes.Optimal(alpha=1e-3)
    step = graphopt.compile(
        mlp((4, 3), dtype=np.float64),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.05),
        schedule=schedule,
    )
    typical = np.sqrt(1 / np.sqrt(1e-3))
    for t, outputs in enumerate(run(step, 6, {"x": X, "target": T}), start=1):
        expected = 0.05 / t**0.25 if kind == "invscaling" else 1 / (1e-3 * (1 / (typical * 1e-3) + t - 1))
        np.testing.assert_allclose(outputs["learning_rate"], expected, rtol=1e-12)


@pytest.mark.parametrize("schedule", [passes.Cosine(steps=10, warmup=4), passes.Constant(warmup=4)], ids=repr)
def test_warmup_grows_to_the_base_rate(schedule):
    step = graphopt.compile(
        mlp((4, 3), dtype=np.float64),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.4),
        schedule=schedule,
    )
    rates = [float(outputs["learning_rate"]) for outputs in run(step, 5, {"x": X, "target": T})]
    np.testing.assert_allclose(rates, [0.1, 0.2, 0.3, 0.4, 0.4])
    np.testing.assert_allclose(schedule.rates(0.4, 5), rates)


def test_the_rate_reaches_the_update():
    step = graphopt.compile(
        mlp((4, 3), dtype=np.float64),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.4),
        schedule=passes.Constant(warmup=4),
    )
    slow = graphopt.compile(mlp((4, 3), dtype=np.float64), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    feeds = {"x": X, "target": T}
    np.testing.assert_allclose(
        run(step, 1, feeds)[0]["fc0.weight.next"], run(slow, 1, feeds)[0]["fc0.weight.next"], rtol=1e-12
    )


@pytest.mark.parametrize("optimizer", [passes.SGD(0.1, momentum=0.9), passes.AdamW(0.01)], ids=repr)
def test_half_precision_parameters_are_updated_in_single(optimizer):
    step = graphopt.compile(mlp(dtype=np.float16), loss=passes.MeanSquaredError(), optimizer=optimizer)
    values = {value.name: value.dtype for value in step.graph.inputs}
    assert values["fc0.weight"] == ir.DataType.FLOAT
    assert {dtype for name, dtype in values.items() if name.startswith("fc0.weight.")} == {ir.DataType.FLOAT}
    losses = [outputs["loss"] for outputs in run(step, 10, {"x": X.astype(np.float16), "target": T.astype(np.float16)})]
    assert losses[-1] < losses[0]
    assert losses[0].dtype == np.float16


TRAINS = hasattr(onnxruntime.capi._pybind_state, "GradientGraphBuilder")
training = pytest.mark.skipif(not TRAINS, reason="onnxruntime-training is not installed")
GROUPS = (passes.Group("*.bias", weight_decay=0.0), passes.Group("fc1.*", learning_rate=0.1))
FUSED = {
    "SGD": lambda fused: {"optimizer": passes.SGD(0.1, fused=fused)},
    "SGD of groups": lambda fused: {"optimizer": passes.SGD(0.1, weight_decay=0.1, groups=GROUPS, fused=fused)},
    "AdamW": lambda fused: {"optimizer": passes.AdamW(0.01, fused=fused)},
    "AdamW of groups": lambda fused: {
        "optimizer": passes.AdamW(0.01, beta1=0.8, weight_decay=0.3, groups=GROUPS, fused=fused)
    },
    "AdamW beside SGD": lambda fused: {
        "optimizer": passes.AdamW(0.01, groups=(passes.Group("*.bias", optimizer=passes.SGD(0.1)),), fused=fused)
    },
    "AdamW in a group": lambda fused: {
        "optimizer": passes.SGD(0.1, groups=(passes.Group("*.bias", optimizer=passes.AdamW(0.01, fused=fused)),))
    },
    "clip": lambda fused: {
        "optimizer": passes.SGD(0.1),
        "clip": passes.ClipGlobalNorm(0.1, fused=fused),
    },
    "all": lambda fused: {
        "optimizer": passes.AdamW(0.01, fused=fused),
        "clip": passes.ClipGlobalNorm(0.1, fused=fused),
        "schedule": passes.Cosine(steps=20),
    },
}
FEEDS = {"x": X.astype(np.float32), "target": T.astype(np.float32)}


def trained(steps: int = 20, **passes_: passes.Optimizer) -> graphopt.Executor:
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), **passes_)
    executor = graphopt.Executor(step, threads=1, on_nonfinite="skip")
    for _ in range(steps):
        executor.step(FEEDS)
    return executor


def check_parameters(plain, fused):
    names = [str(value.name) for value in with_role(plain.model, Role.PARAMETER)]
    assert names == [value.name for value in with_role(fused.model, Role.PARAMETER)]
    for name in names:
        assert distance(fused.state[name], plain.state[name]) <= 1e-5, name


@training
@pytest.mark.parametrize("name", FUSED)
def test_fused_kernels_take_the_plain_steps(name, tmp_path):
    plain, fused = trained(**FUSED[name](False)), trained(**FUSED[name](True))
    check_parameters(plain, fused)
    assert plain.hyperparameters.keys() == fused.hyperparameters.keys()
    graphopt.save(fused.model, tmp_path / "step.onnx")
    assert RUNTIME.read(graphopt.load(tmp_path / "step.onnx")) == TRAINING_RUNTIME
    assert RUNTIME.read(plain.model) is None


@training
def test_a_skipped_step_leaves_the_state_that_a_fused_kernel_updates_as_it_was():
    executor = trained(5, **FUSED["all"](True))
    before = executor.state
    with pytest.warns(UserWarning, match="step skipped"):
        executor.step(x=FEEDS["x"] * np.nan, target=FEEDS["target"])
    assert all((executor.state[name] == array).all() for name, array in before.items())
    executor.step(FEEDS)
    again = trained(6, **FUSED["all"](True)).state
    assert all((executor.state[name] == array).all() for name, array in again.items())


@training
def test_a_fused_kernel_in_the_branch_of_an_accumulated_step():
    plain, fused = (
        trained(6, **FUSED["AdamW"](fused), accumulate=passes.Accumulate(steps=2)) for fused in (False, True)
    )
    check_parameters(plain, fused)


@pytest.mark.parametrize(("name", "held"), [("AdamW beside SGD", "weight"), ("AdamW in a group", "bias")])
def test_each_optimizer_of_a_group_has_its_own_kernel_or_none(name, held):
    step = graphopt.compile(mlp(), loss=passes.MeanSquaredError(), **FUSED[name](True))
    (kernel,) = (node for node in step.graph if node.domain == "com.microsoft")
    (weights,) = (node for node in step.graph if node.outputs[0] is kernel.inputs[2])
    averages = {x.name for x in with_role(step, Role.SLOT)}
    assert {x.name for x in weights.inputs} == {f"fc{i}.{held}" for i in range(2)}
    assert averages == {f"fc{i}.{held}.{kind}" for i in range(2) for kind in ("exp_avg", "exp_avg_sq")}


def test_half_precision_parameters_go_to_a_fused_kernel_in_single():
    step = graphopt.compile(mlp(dtype=np.float16), loss=passes.MeanSquaredError(), optimizer=passes.AdamW(fused=True))
    dtypes = {value.name: value.dtype for value in step.graph.outputs}
    assert dtypes["fc0.weight.next"] == ir.DataType.FLOAT
    assert dtypes["fc0.weight.exp_avg.next"] == ir.DataType.FLOAT


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("optimizers_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("optimizers_mistakes", call, globals())

"""Muon, LAMB, Adafactor, schedule-free AdamW and 8-bit slots: over 100 steps, and with the rest of a pipeline.

`tests/peers/test_optimizers.py` compares LAMB and schedule-free AdamW with packages that have them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import messages
import numpy as np
import pytest
import torch
from builders import mlp, model, run
from test_optimizers import T, X, torch_loss, torch_mlp
from twins import descended

import graphopt
import passes
from graphopt.graph.roles import Role, with_role
from graphopt.graph.values import bytes_of
from passes.optimizers.slots import BLOCK, QuantizedSlot, dynamic_table

COEFFICIENTS = (3.5, -4.75, 2.0)  # which the attributes of Gemm, of float32, hold exactly
MATRICES, VECTORS = ("fc0.weight", "fc1.weight"), ("fc0.bias", "fc1.bias")


def muon(weights: dict[str, torch.Tensor], rate: float, **options: Any) -> list[torch.optim.Optimizer]:
    matrices, vectors = ([weights[name] for name in names] for names in (MATRICES, VECTORS))
    return [
        torch.optim.Muon(matrices, rate, ns_coefficients=COEFFICIENTS, **options),
        torch.optim.AdamW(vectors, 3e-3),
    ]


MUON = {"coefficients": COEFFICIENTS, "others": passes.AdamW(3e-3)}
TWINS = {
    "Adafactor": (
        passes.Adafactor(0.01),
        lambda w: [torch.optim.Adafactor(w.values(), 0.01)],
    ),
    "Adafactor of options": (
        passes.Adafactor(0.5, weight_decay=0.1, clip_threshold=1.5, decay_power=-0.7),
        lambda w: [torch.optim.Adafactor(w.values(), 0.5, weight_decay=0.1, d=1.5, beta2_decay=-0.7)],
    ),
    "Muon": (passes.Muon(0.02, **MUON), lambda w: muon(w, 0.02)),
    "Muon of options": (
        passes.Muon(0.02, nesterov=False, iterations=3, weight_decay=0.0, adjust="match_rms_adamw", **MUON),
        lambda w: muon(w, 0.02, nesterov=False, ns_steps=3, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ),
}


@pytest.fixture
def exact(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let PyTorch's Muon iterate in the numbers' own precision, not in bfloat16."""
    monkeypatch.setattr(torch.Tensor, "bfloat16", lambda x: x.clone())


@pytest.mark.usefixtures("exact")
@pytest.mark.parametrize("name", TWINS)
@pytest.mark.slow
def test_a_hundred_steps_are_those_of_its_twin(name: str) -> None:
    optimizer, twin = TWINS[name]
    proto = mlp(dtype=np.float64)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer)
    weights = torch_mlp(proto)
    references = twin(weights)
    for outputs in run(step, 100, {"x": X, "target": T}):
        loss = torch_loss(weights)
        np.testing.assert_allclose(outputs["loss"], loss.item(), rtol=1e-8)
        descended(loss, *references)
    for name, tensor in weights.items():
        np.testing.assert_allclose(outputs[f"{name}.next"], tensor.detach().numpy(), rtol=1e-6, atol=1e-10)


# --- Muon ---


def muons(step: Any) -> set[str]:
    """Return the parameters that have a momentum."""
    names = [str(x.name) for x in with_role(step, Role.SLOT)]
    return {name.removesuffix(".momentum") for name in names if name.endswith(".momentum")}


def test_embeddings_and_what_a_group_names_have_another_optimizer_than_muon() -> None:
    network = model(
        """g (int64[N,3] x) => (float[N,5] y) {
            e = Gather(words, x)  m = ReduceMean<keepdims=0>(e, axis)  h = MatMul(m, hidden)
            t = Tanh(h)  z = MatMul(t, head)  y = Add(z, bias) }""",
        words=np.random.default_rng(0).standard_normal((7, 4)),
        hidden=np.random.default_rng(1).standard_normal((4, 6)),
        head=np.random.default_rng(2).standard_normal((6, 5)),
        bias=np.zeros(5),
        axis=np.array([1]),
    )
    groups = (passes.Group("head", 0.5, optimizer=passes.SGD(0.1)),)
    step = graphopt.compile(network, loss=passes.CrossEntropy(), optimizer=passes.Muon(0.02, groups=groups))
    assert muons(step) == {"hidden"}
    assert {x.name for x in with_role(step, Role.SLOT)} >= {"words.exp_sum", "bias.exp_sum_sq"}
    assert not [x.name for x in with_role(step, Role.SLOT) if str(x.name).startswith("head.")]
    executor = graphopt.Executor(step)
    before = executor.parameters["head"]
    plain = graphopt.grad(graphopt.compile(network, loss=passes.CrossEntropy()), ["head"], of="loss")
    feeds = {"x": np.zeros((2, 3), np.int64), "target": np.array([1, 2])}
    gradient = graphopt.run(plain, feeds)["loss.grad.head"]
    executor.step(feeds)  # the ratio of the rates is 0.1 to 0.02, of which the group takes a half
    np.testing.assert_allclose(executor.parameters["head"], before - 0.05 * gradient, rtol=1e-6)
    executor.learning_rate = 0.002
    before = executor.parameters["head"]
    gradient = graphopt.run(plain, {**feeds})["loss.grad.head"]
    executor.step(feeds)
    assert np.abs(executor.parameters["head"] - before).max() < 0.3 * 0.05 * np.abs(gradient).max()


@pytest.mark.parametrize("layout", ["MatMul", "Gemm", "Gemm of rows", "transposed"])
def test_the_scale_is_that_of_a_matrix_with_a_row_for_each_output(layout: str) -> None:
    """A file's layout changes nothing: a layer of 2 inputs and 8 outputs has the factor 2."""
    w = np.random.default_rng(0).standard_normal((8, 2))
    product = {
        "MatMul": "y = MatMul(x, w)",
        "Gemm": "y = Gemm(x, w)",
        "Gemm of rows": "y = Gemm<transB=1>(x, w)",
        "transposed": "t = Transpose<perm=[1,0]>(w)  y = MatMul(x, t)",
    }[layout]
    rows = layout in ("Gemm of rows", "transposed")
    network = model(f"g (float[N,2] x) => (float[N,8] y) {{ {product} }}", w=w if rows else w.T)
    x, t = np.random.default_rng(1).standard_normal((2, 5, 8)).astype(np.float32)
    moves = []
    for adjust in ("original", 1.0):
        optimizer = passes.Muon(0.1, weight_decay=0.0, adjust=adjust)
        executor = graphopt.Executor(graphopt.compile(network, loss=passes.MeanSquaredError(), optimizer=optimizer))
        before = executor.parameters["w"]
        executor.step(x=x[:, :2], target=t)
        moves.append(executor.parameters["w"] - before)
    np.testing.assert_allclose(moves[0], 2 * moves[1], rtol=1e-4, atol=1e-6)


# --- Adafactor ---


def test_adafactor_may_take_a_rate_as_it_is() -> None:
    optimizer = passes.Adafactor(0.01, scale_parameter=False, relative_step=False, epsilon=1e-15)
    step = graphopt.compile(mlp((4, 3), dtype=np.float64), loss=passes.MeanSquaredError(), optimizer=optimizer)
    before = {str(x.name): run(step, 0, {}) for x in with_role(step, Role.PARAMETER)}
    outputs = run(step, 1, {"x": X, "target": T})[0]
    assert before.keys() == {"fc0.weight", "fc0.bias"}
    moves = outputs["fc0.bias.next"] - onnx_weight(mlp((4, 3), dtype=np.float64), "fc0.bias")
    np.testing.assert_allclose(np.abs(moves), 0.01, rtol=1e-6)  # in the first step, g / sqrt(v) is a sign


def onnx_weight(proto: Any, name: str) -> np.ndarray:
    return graphopt.load(proto).graph.initializers[name].const_value.numpy()


# --- Schedule-free ---


def test_evaluation_and_export_have_the_mean_and_a_step_computes_with_y(tmp_path: Any) -> None:
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.ScheduleFreeAdamW(0.05)}
    executor = graphopt.Executor(graphopt.compile(mlp(), **steps), threads=1)
    feeds = {"x": X.astype(np.float32), "target": T.astype(np.float32)}
    for _ in range(10):
        executor.step(feeds)
    state = executor.state
    evaluated = executor.evaluate(feeds)["loss"]
    graphopt.save(executor.trained(), tmp_path / "trained.onnx")
    y = graphopt.run(tmp_path / "trained.onnx", {"x": feeds["x"]})["y"]
    assert np.square(y - feeds["target"]).mean() == pytest.approx(evaluated, rel=1e-6)
    np.testing.assert_array_equal(y, executor.predict(x=feeds["x"])["y"])
    assert [x.name for x in executor.trained().graph.initializer] == [x.name for x in mlp().graph.initializer]
    points = {name: state[name] + 0.1 * (state[f"{name}.z"] - state[name]) for name in executor.parameters}
    found = executor.step(feeds)["loss"]
    executor.update_state({**points, **{f"{name}.z": x for name, x in points.items()}})
    assert executor.evaluate(feeds)["loss"] == pytest.approx(found, rel=1e-5) != pytest.approx(evaluated)


def test_a_rate_of_zero_moves_nothing() -> None:
    steps = {
        "optimizer": passes.ScheduleFreeAdamW(),
        "schedule": passes.Constant(warmup=3, warmup_from_zero=True),
    }
    executor = graphopt.Executor(graphopt.compile(mlp(), loss=passes.MeanSquaredError(), **steps))
    before = executor.parameters
    executor.step(x=X.astype(np.float32), target=T.astype(np.float32))
    assert all((executor.parameters[name] == array).all() for name, array in before.items())


# --- 8-bit slots ---


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("size", [2 * BLOCK, 2 * BLOCK + 100])
def test_codes_are_those_of_the_nearest_numbers(signed: bool, size: int) -> None:
    rng = np.random.default_rng(size)
    numbers = rng.standard_normal(size) * np.exp(4 * rng.standard_normal(size))
    numbers = (numbers if signed else np.abs(numbers)).astype(np.float32)
    numbers[:BLOCK] *= numbers[0] != 0
    network = model("g (float[N,1] x) => (float[N,1] y) { y = Mul(x, w) }", w=np.ones(1))
    step = graphopt.compile(
        network, loss=passes.MeanSquaredError(), optimizer=Recorded(0.0, numbers=numbers, signed=signed)
    )
    executor = graphopt.Executor(step, threads=1)
    executor.step(x=np.ones((1, 1), np.float32), target=np.zeros((1, 1), np.float32))
    codes, largest = executor.state["w.held"], executor.state["w.held_absmax"]
    blocks = np.pad(numbers, (0, -size % BLOCK)).reshape(-1, BLOCK)
    np.testing.assert_array_equal(largest[:, 0], np.abs(blocks).max(1))
    table = dynamic_table(signed)
    best = np.abs(blocks[..., None] / largest[..., None] - table).min(-1)
    error = np.abs(blocks / largest - table[codes])
    np.testing.assert_allclose(error, best, rtol=0, atol=1e-7)


@dataclass(frozen=True)
class Recorded(passes.SGD):
    """Write numbers to an 8-bit slot."""

    numbers: Any = None
    signed: bool = True

    def shared(self, model, op, rows, rate, t):
        w = with_role(model, Role.PARAMETER)[0]
        held = QuantizedSlot(model, w, "held", np.zeros_like(self.numbers), self.signed)
        held.write(model, op, op.constant(self.numbers) + 0 * op.ReduceSum(w))
        return ()


def test_slots_of_8_bits_take_a_quarter_of_the_memory_and_train_alike() -> None:
    rng = np.random.default_rng(0)
    x = rng.standard_normal((64, 70)).astype(np.float32)
    target = np.tanh(x[:, :3]) + rng.standard_normal((64, 3)).astype(np.float32)
    proto, held, losses = mlp((70, 65, 3)), {}, {}
    for bits in (8, 32):
        optimizer = passes.AdamW(1e-2, slot_bits=bits)
        step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=optimizer)
        slots = [y for y in with_role(step, Role.SLOT) if str(y.name).startswith("fc0.weight.")]
        held[bits] = sum(map(bytes_of, slots))
        executor = graphopt.Executor(step, threads=1)
        losses[bits] = [executor.step(x=x, target=target)["loss"] for _ in range(50)]
    assert held[8] <= 0.26 * held[32]
    np.testing.assert_allclose(losses[8], losses[32], rtol=0.05)
    assert losses[8][-1] < 0.5 * losses[8][0]
    assert {y.dtype.name for y in with_role(step, Role.SLOT) if "bias" in str(y.name)} == {"FLOAT"}


# --- With everything else ---

RNG = np.random.default_rng(3)
BATCHES = [
    {
        "x": RNG.standard_normal((8, 70)).astype(np.float32),
        "target": RNG.standard_normal((8, 3)).astype(np.float32),
    }
    for _ in range(12)
]
GROUPS = (passes.Group("*.bias", 0.5, weight_decay=0.0),)
STEPS: dict[str, dict[str, Any]] = {
    "LAMB": {"optimizer": passes.LAMB(0.01, weight_decay=0.1, groups=GROUPS)},
    "Muon": {"optimizer": passes.Muon(0.02, groups=GROUPS)},
    "Adafactor": {"optimizer": passes.Adafactor(0.02, weight_decay=0.1, groups=GROUPS)},
    "schedule-free": {"optimizer": passes.ScheduleFreeAdamW(0.01, weight_decay=0.1, groups=GROUPS)},
    "AdamW in 8 bits": {"optimizer": passes.AdamW(0.01, slot_bits=8, groups=GROUPS)},
    "Muon in 8 bits": {"optimizer": passes.Muon(0.01, slot_bits=8)},
    "EMA": {"optimizer": passes.AdamW(0.01), "average": passes.EMA(0.9)},
    "SWA": {"optimizer": passes.ScheduleFreeAdamW(0.01), "average": passes.SWA(start=4, every=3)},
}


def compiled(name: str, **others: Any) -> Any:
    return graphopt.compile(
        mlp((70, 65, 3)),
        **{
            "loss": passes.MeanSquaredError(),
            "clip": passes.ClipGlobalNorm(1.0),
            "schedule": passes.Cosine(steps=20, warmup=3),
            **STEPS[name],
            **others,
        },
    )


def close(one: graphopt.Executor, other: graphopt.Executor, tolerance: float = 1e-5) -> None:
    """Compare parameters, and averages."""
    for name, array in one.state.items():
        if name in one.parameters or name.endswith(".average"):
            np.testing.assert_allclose(other.state[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_targets_and_calls_of_several_steps_train_alike(name: str) -> None:
    step = compiled(name)
    plain = graphopt.Executor(step, threads=1, target="plain", steps_per_call=1)
    losses = [one["loss"] for one in plain.run(BATCHES)]
    assert all(np.isfinite(losses))
    for options in (
        {"target": "onnxruntime"},
        {"native": False, "steps_per_call": 4},
        {"native": True, "in_place": True},
    ):
        other = graphopt.Executor(step, threads=1, **options)
        np.testing.assert_allclose([one["loss"] for one in other.run(BATCHES)], losses, rtol=1e-3)
        close(plain, other, 5e-3 if "8 bits" in name else 2e-4)
        assert other.predict(x=BATCHES[0]["x"])["y"] == pytest.approx(plain.predict(x=BATCHES[0]["x"])["y"], abs=5e-3)


@pytest.mark.parametrize("name", STEPS)
@pytest.mark.slow
def test_16_bits_train_and_a_step_that_overflows_is_skipped(name: str) -> None:
    scaled = {"gradient": passes.Gradient(loss_scale=1024.0), "loss_scale": passes.DynamicLossScale()}
    executor = graphopt.Executor(compiled(name, precision=passes.MixedPrecision(), **scaled), threads=1)
    losses = [executor.step(BATCHES[0])["loss"] for _ in range(12)]
    assert losses[-1] < losses[0]
    trained = graphopt.run(executor.trained(), {"x": BATCHES[0]["x"]})["y"]
    np.testing.assert_allclose(trained, executor.predict(x=BATCHES[0]["x"])["y"], atol=1e-5)
    executor = graphopt.Executor(compiled(name, **scaled), threads=1)
    executor.run(BATCHES[:3])
    executor.update_state({"loss_scale": np.float32(2.0**127)})
    before = executor.state
    executor.step({**BATCHES[3], "target": 1e4 * BATCHES[3]["target"]})
    after = executor.state
    assert after["loss_scale"] == 2.0**126
    assert all(np.array_equal(after[n], x) for n, x in before.items() if n[:10] != "loss_scale")


# --- Wrong input ---


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("named_optimizers_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("named_optimizers_mistakes", call, globals())

"""Gradients of single examples beside torch.func, and private training on them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch
from builders import model
from steps import assert_equal
from test_derivatives import Attention, Recurrent, exported
from torch import nn

import graphopt
import passes
from graphopt import models
from graphopt.data.loader import draw
from graphopt.errors import GraphoptError
from graphopt.graph import roles
from graphopt.graph.emitter import Emitter
from graphopt.graph.randomness import normal
from graphopt.graph.rewriting import Pass
from graphopt.graph.roles import Role
from graphopt.graph.shapes import ensure_typed
from graphopt.runtime.steps import NonFiniteLoss
from graphopt.targets.native.lowering import plan
from passes.gradients.examples import Examples

N = 5


class Convolutions(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Conv2d(2, 6, 3, stride=2, padding=1)
        self.grouped, self.deep = (
            nn.Conv2d(6, 12, 3, groups=3, dilation=2, padding=2),
            nn.Conv2d(12, 12, 1, groups=12),
        )
        self.norm, self.head = nn.GroupNorm(3, 12), nn.Linear(12, 4)
        self.scale = nn.Parameter(torch.rand(12, 1, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = nn.functional.silu(self.grouped(nn.functional.gelu(self.first(x))))
        return self.head((self.norm(self.deep(h)) * self.scale).mean((2, 3)))


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cell, self.head = nn.GRU(6, 5, batch_first=True), nn.Linear(5, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0][:, -1])


class Tied(nn.Module):
    """A table that is read by tokens and multiplies the last state, and a layer that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.layer, self.positions = (
            nn.Embedding(4, 6),
            nn.Linear(6, 6),
            nn.Parameter(torch.rand(7, 6)),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = torch.tanh(self.layer(self.table(x) + self.positions))
        return torch.tanh(self.layer(h)).mean(1) @ self.table.weight.T


class Shared(nn.Module):
    """Layers that read one value at several places."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v, self.head = (nn.Linear(8, size) for size in (8, 8, 12, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = (self.q(x) @ self.k(x).transpose(1, 2)).softmax(2)
        return self.head((weights @ self.v(x)).mean(1)[:, :8])


class LastAxis(nn.Module):
    """Attention as of PyTorch without batch_first: rows are the second axis."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.attention, self.head = nn.LayerNorm(8), nn.MultiheadAttention(8, 2), nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.norm(x).transpose(0, 1)
        return self.head(self.attention(h, h, h)[0].mean(0))


class Tempered(nn.Module):
    """Logits behind a temperature of one number."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.temperature = nn.Linear(6, 4), nn.Parameter(torch.tensor(1.3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) / self.temperature


NETWORKS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "dense": (lambda: nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 4)), (6,)),
    "convolutions": (Convolutions, (2, 9, 9)),
    "recurrent": (Recurrent, (1, 8, 8)),
    "gated": (Gated, (3, 6)),
    "attention": (Attention, (3, 8)),
    "shared": (Shared, (3, 8)),
    "tied": (Tied, (7,)),
    "last-axis": (LastAxis, (5, 8)),
    "one number": (Tempered, (6,)),
}


def batch_of(name: str) -> tuple[nn.Module, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module = make().eval()
    if name == "recurrent":
        module.norm = nn.Identity()  # an exporter folds it
    x = torch.randint(0, 4, (N, *shape)) if name == "tied" else torch.randn(N, *shape)
    return module, x, torch.arange(N) % 4


def of_examples(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> dict[str, np.ndarray]:
    """Return the gradients of examples as PyTorch computes them, in float64."""
    module, rows = module.double(), []
    for i in range(len(x)):
        row = x[i : i + 1]
        loss = nn.functional.cross_entropy(module(row if row.dtype == torch.int64 else row.double()), target[i : i + 1])
        rows.append(torch.autograd.grad(loss, [*module.parameters()]))
    stacks = [torch.stack(each).numpy() for each in zip(*rows, strict=True)]
    return dict(zip(dict(module.named_parameters()), stacks, strict=True))


def norms_of(gradients: dict[str, np.ndarray]) -> np.ndarray:
    return np.sqrt(sum((each.reshape(len(each), -1) ** 2).sum(1) for each in gradients.values()))


def with_gradients(source: object, **options: bool) -> ir.Model:
    """Return a model with the gradients of examples as outputs."""
    step = graphopt.standard(loss=passes.CrossEntropy(), gradient=None, simplify=None)(source)
    ensure_typed(step)
    with Emitter(step) as op:
        loss, weights = roles.only(step, Role.LOSS, "test"), roles.with_role(step, Role.PARAMETER)
        for w, value in Examples(op, step, loss, weights, **options).gradients().items():
            step.graph.outputs.append(op.Identity(value, _outputs=[f"{w.name}.each"]))
    return step


@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_examples_have_the_norms_and_clipped_means_of_pytorch(name: str, dynamo: bool) -> None:
    module, x, target = batch_of(name)
    file = exported(module, x[:3], dynamo)
    gradient = passes.PrivateGradient(0.7, rows=N)
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=gradient, training=None)
    expected = of_examples(module, x, target)
    norms = norms_of(expected)
    found = graphopt.run(step, {"x": x.numpy(), "target": target.numpy()})
    np.testing.assert_allclose(found["example_norms"], norms, rtol=2e-6)
    factors = np.minimum(1, 0.7 / (norms + 1e-6))
    clipped = [np.tensordot(factors, each, 1) / N for each in expected.values()]
    own = sum(float(np.square(found[y]).sum()) for y in found if y.endswith(".grad"))
    np.testing.assert_allclose(own, sum(float(np.square(each).sum()) for each in clipped), rtol=1e-5)
    for weight, each in zip(expected, clipped, strict=True):
        if f"{weight}.grad" in found and found[f"{weight}.grad"].shape == each.shape:
            np.testing.assert_allclose(found[f"{weight}.grad"], each, atol=2e-6 * np.abs(each).max() + 1e-9)


def private_step(multiplier: float = 1.0, rows: int = 32, **changed: Any) -> ir.Model:
    steps = {
        "loss": passes.CrossEntropy(),
        "gradient": passes.PrivateGradient(0.5, rows=rows),
        "clip": passes.GaussianNoise(multiplier),
        "optimizer": passes.SGD(0.1),
    }
    return graphopt.compile(models.mlp((4,), 3), **{**steps, **changed})


def data_of(rows: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(0)
    x = random.standard_normal((rows, 4)).astype(np.float32)
    return {"x": x, "target": x[:, :3].argmax(1)}


def test_noise_is_normal_with_its_deviation_and_differs_from_step_to_step() -> None:
    stats = pytest.importorskip("scipy.stats")
    wide = graphopt.compile(
        models.linear((400,), 100),
        loss=passes.MeanSquaredError(),
        gradient=passes.PrivateGradient(0.5, rows=8),
        clip=passes.GaussianNoise(2.0),
        optimizer=passes.SGD(1.0),
    )
    executor = graphopt.Executor(wide)
    rows = {"x": np.zeros((3, 400), np.float32), "target": np.zeros((3, 100), np.float32)}
    drawn = []
    for key in ([1, 2], None, None, [7, -5]):
        before = executor.state["layers.0.weight"].copy()
        executor.step(rows if key is None else {**rows, "noise_key": np.int32(key)})
        drawn.append((before - executor.state["layers.0.weight"]).ravel() / (2.0 * 0.5 / 8))
    for i, noise in enumerate(drawn):
        assert abs(noise.mean()) < 0.02 and abs(noise.std() - 1) < 0.01
        assert stats.kstest(noise, "norm").pvalue > 0.001
        first, second = np.split(noise, 2)  # of cosines and of sines
        assert abs(np.corrcoef(first, second)[0, 1]) < 0.03 > abs(np.corrcoef(first**2, second**2)[0, 1])
        assert all(abs(np.corrcoef(noise, other)[0, 1]) < 0.02 for other in drawn[:i])
    for key, expected in (([1, 2], 1), ([1, 3], 0), ([2, 2], 0)):
        again = graphopt.Executor(wide)
        before = again.state["layers.0.weight"].copy()
        again.step({**rows, "noise_key": np.int32(key)})
        noise = (before - again.state["layers.0.weight"]).ravel()
        assert abs(np.corrcoef(noise, drawn[0])[0, 1] - expected) < 0.02


def test_normal_numbers_are_those_of_box_and_muller() -> None:
    edges = [-(2**31), -(2**31) + 1, -(2**30), -1, 0, 1, 2**30, 2**31 - 1]
    pairs = np.array([(a, b) for a in edges for b in edges], np.int32)
    drawn = np.random.default_rng(0).integers(-(2**31), 2**31, (10_000, 2), np.int32)
    a, b = np.concatenate([pairs, drawn]).T
    file = graphopt.load(model("g (int32[N] a, int32[N] b) => (int32[N] y) { y = Add(a, b) }"))
    with Emitter(file) as op:
        z = op.Identity(normal(op, file.graph.inputs.__getitem__, twice=True), _outputs=["z"])
    file.graph.outputs.append(z)
    first = (a.astype(np.float32) + np.float32(0.5)).astype(np.float64) / 2**31
    radius, angle = np.sign(first) * np.sqrt(-2 * np.log(np.abs(first))), np.pi / 2 * b.astype(np.float64) / 2**31
    found = np.split(graphopt.run(file, {"a": a, "b": b})["z"], 2)
    for numbers, expected in zip(found, (radius * np.cos(angle), radius * np.sin(angle)), strict=True):
        assert (np.abs(numbers - expected) <= 1e-6 * np.abs(radius)).all()


class Forget(Pass):
    """Take the sizes from the shapes of gradients."""

    def rewrite(self, model: ir.Model) -> None:
        for gradient in roles.with_role(model, Role.GRADIENT):
            gradient.shape = ir.Shape([f"size{i}" for i in range(len(gradient.shape))])


def test_noise_has_the_shapes_of_parameters() -> None:
    """Sizes that the gradient's shape does not know were left out of the count of random numbers."""
    found = []
    for clip in ([], [Forget()]):
        executor = graphopt.Executor(private_step(clip=[*clip, passes.GaussianNoise(1.0)]))
        executor.step({**data_of(8), "noise_key": np.int32([1, 2])})
        found.append(executor.state)
    for name, w in found[0].items():
        np.testing.assert_array_equal(found[1][name], w)


def test_fit_draws_batches_by_poisson_sampling_and_keeps_to_a_budget() -> None:
    accounting = pytest.importorskip("dp_accounting")
    data, budget = data_of(300), graphopt.callbacks.PrivacyBudget(3.0, 1e-4)
    executor = graphopt.Executor(private_step())
    options = {"batch_size": 30, "sampling": "poisson", "validation": None, "callbacks": [budget]}
    records = graphopt.fit(executor, data, epochs=9, **options)
    event = accounting.PoissonSampledDpEvent(0.1, accounting.GaussianDpEvent(1.0))

    def spent(steps: int) -> float:
        composed = accounting.SelfComposedDpEvent(event, steps)
        return accounting.pld.PLDAccountant().compose(composed).get_epsilon(1e-4)

    assert records[-1]["epsilon"] == pytest.approx(spent(executor.steps), rel=1e-3)
    assert spent(executor.steps) <= 3.0 < spent(executor.steps + 1)
    multiplier = graphopt.privacy.multiplier_for(3.0, rows=300, batch_size=30, steps=90, delta=1e-4)
    assert graphopt.privacy.epsilon(300, 30, 90, multiplier, 1e-4) == pytest.approx(3, abs=0.05)
    assert executor.hyperparameters["expected_rows"] == 30 and np.any(executor.hyperparameters["noise_key"])


def test_poisson_sampling_draws_each_row_by_itself() -> None:
    random, rows = np.random.default_rng(0), np.arange(100, 500)
    batches = [batch for _ in range(50) for batch in draw(rows, 40, "poisson", random)]
    sizes = np.array([len(batch) for batch in batches])
    assert len(batches) == 500 and abs(sizes.mean() - 40) < 1 and 30 < sizes.var() < 42
    assert all(len(np.unique(batch)) == len(batch) for batch in batches)
    again = list(draw(rows, 40, "poisson", np.random.default_rng(1)))
    rest = list(draw(rows, 40, "poisson", np.random.default_rng(1), len(again[0]) + len(again[1])))
    assert [x.tolist() for x in again[2:]] == [x.tolist() for x in rest]


def test_the_norms_of_examples_are_an_output() -> None:
    data = data_of(6)
    step = graphopt.compile(
        models.mlp((4,), 3), loss=passes.CrossEntropy(), clip=passes.ExampleNorms(), optimizer=passes.SGD(0.0)
    )
    found = graphopt.run(step, data)["example_norms"]
    alone = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), clip=passes.GradientNorm())
    rows = [{name: x[i : i + 1] for name, x in data.items()} for i in range(6)]
    np.testing.assert_allclose(found, [graphopt.run(alone, row)["gradient_norm"] for row in rows], rtol=1e-5)


@pytest.mark.parametrize("symmetric", [True, False])
def test_norms_beside_a_quantized_base_are_those_of_rows_alone(symmetric: bool) -> None:
    base, loss = models.mlp((64,), 3, hidden=[32]), passes.CrossEntropy()
    parts = {"quantize": passes.QuantizeWeights(symmetric=symmetric), "adapter": passes.LoRA(rank=2), "loss": loss}
    x, target = np.random.default_rng(0).normal(size=(N, 64)).astype(np.float32), np.arange(N) % 3
    step = graphopt.compile(base, **parts, clip=passes.ExampleNorms(), optimizer=passes.SGD(0.0))
    alone = graphopt.compile(base, **parts, clip=passes.GradientNorm())
    rows = [{"x": x[i : i + 1], "target": target[i : i + 1]} for i in range(N)]
    expected = [graphopt.run(alone, row)["gradient_norm"] for row in rows]
    np.testing.assert_allclose(graphopt.run(step, {"x": x, "target": target})["example_norms"], expected, rtol=1e-5)


def test_a_penalty_is_no_examples_gradient_and_a_row_that_is_not_finite_counts_as_none() -> None:
    data = data_of(6)
    steps = {"loss": passes.CrossEntropy(), "gradient": passes.PrivateGradient(0.1, rows=6)}
    plain = graphopt.run(graphopt.compile(models.mlp((4,), 3), **steps), data)
    penalized = graphopt.compile(models.mlp((4,), 3), **steps, regularizer=passes.L2(0.1))
    weights = {x.name: x.const_value for x in penalized.graph.initializers.values()}
    found = graphopt.run(penalized, data)
    np.testing.assert_allclose(found["example_norms"], plain["example_norms"], rtol=1e-5)
    w = weights["layers.0.weight"].numpy()
    difference = found["layers.0.weight.grad"] - plain["layers.0.weight.grad"]
    np.testing.assert_allclose(difference, difference.mean() / w.mean() * w, atol=1e-5)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"gradient": lambda: passes.PrivateGradient(0.0)}, "max_norm"),
        ({"loss": lambda: passes.CrossEntropy(sample_weight=True)}, "weighted mean: set loss.reduction=sum"),
        ({"loss": lambda: passes.CrossEntropy(ignore_index=-1)}, "weighted mean: set loss.reduction=sum"),
        ({"gradient": passes.Gradient}, "expected gradients of clipped examples"),
    ],
)
def test_what_is_not_private_is_refused(change: dict[str, Callable[[], passes.GradientSource]], message: str) -> None:
    steps = {
        "loss": passes.CrossEntropy,
        "gradient": passes.PrivateGradient,
        "clip": passes.GaussianNoise,
    } | change
    with pytest.raises(GraphoptError, match=message):
        graphopt.compile(models.mlp((4,), 3), **{name: make() for name, make in steps.items()})


class OfOutput(passes.Regularizer):
    """Punish the output `y`, or the loss times a weight."""

    def requires(self, model: ir.Model) -> None:
        super().requires(model)
        outputs = {x.name: x for x in model.graph.outputs}
        object.__setattr__(self, "read", outputs[self.name])

    def penalty(self, op: Emitter, w: ir.Value) -> ir.Value:
        y = op.ReduceMean(self.read, keepdims=0)
        return y * y if self.name == "y" else y * op.ReduceMean(w, keepdims=0)


class OfLoss(OfOutput):
    name = "loss"


OfOutput.name = "y"


@pytest.mark.parametrize(
    "regularizer",
    [
        passes.AdversarialTraining(0.1),
        passes.AdversarialTraining(0.1, share=0.5),
        OfOutput(parameters="layers.0.bias"),
        OfLoss(parameters="layers.0.bias"),
    ],
    ids=["attacked", "half attacked", "output", "learnt factor"],
)
@pytest.mark.parametrize("form", ["private", "norms"])
def test_penalties_that_read_rows_are_refused(regularizer: passes.Regularizer, form: str) -> None:
    private = {"gradient": passes.PrivateGradient()} if form == "private" else {"clip": passes.ExampleNorms()}
    with pytest.raises(GraphoptError, match="penalties of parameters alone"):
        graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), regularizer=regularizer, **private)


TAIL = "h = Tanh(c) p = GlobalAveragePool(h) y = Flatten(p)"


@pytest.mark.parametrize(
    ("x", "nodes", "shapes"),
    [
        ("float[N,4]", "c = MatMul(x, w) d = Sum(c, p, p) y = Tanh(d)", {"w": (4, 3), "p": (3,)}),
        ("float[N,4]", "c = MatMul(x, w) d = Max(c, p, p) y = Tanh(d)", {"w": (4, 3), "p": (3,)}),
        (
            "float[N,5,3]",
            "t = Transpose<perm=[1,0,2]>(x) a, b = RNN<hidden_size=3>(t, w, w) y = ReduceMean<keepdims=0>(b, axes)",
            {"w": (1, 3, 3)},
        ),
        ("float[N,2,5,5]", "c = Conv<pads=[1,1,1,1]>(x, w)" + TAIL, {"w": (3, 2, 1, 1)}),
        (
            "int32[N,7]",
            "e = Gather(w, x) h = Tanh(e) t = Transpose(w) q = MatMul(h, t) m = ReduceMean<keepdims=0>(q, one) "
            "y = MatMul(m, v)",
            {"w": (4, 6), "v": (4, 3)},
        ),
    ],
    ids=["sum", "max", "recurrent", "padded", "numbers of 32 bits"],
)
def test_norms_are_those_of_rows_alone(x: str, nodes: str, shapes: dict[str, tuple[int, ...]]) -> None:
    random = np.random.default_rng(0)
    weights = {name: random.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    constants = {"axes": np.array([0]), "one": np.array([1])}
    used = {name: value for name, value in constants.items() if f", {name})" in nodes}
    file = model(f"g ({x} x) => (float[N,3] y) {{ {nodes} }}", **weights, **used)
    sizes = [5, *map(int, x[x.index("N") + 2 : -1].split(","))]
    fed = random.standard_normal(sizes).astype(np.float32) if x[0] == "f" else random.integers(0, 4, sizes, np.int32)
    data = {"x": fed, "target": np.arange(5) % 3}
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=passes.PrivateGradient())
    alone = graphopt.compile(file, loss=passes.CrossEntropy(), clip=passes.GradientNorm())
    rows = [{name: value[i : i + 1] for name, value in data.items()} for i in range(5)]
    expected = [graphopt.run(alone, row)["gradient_norm"] for row in rows]
    np.testing.assert_allclose(graphopt.run(step, data)["example_norms"], expected, rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(3, 8, 3, padding=1),
        nn.Conv2d(3, 8, (3, 2), stride=2, padding=1),
        nn.Conv2d(3, 8, 3, stride=(1, 3), dilation=2),
        nn.Conv1d(3, 8, 5, stride=2, padding=2),
    ],
    ids=str,
)
def test_a_kernel_of_gradients_of_examples_reads_windows_where_they_lie(layer: nn.Module) -> None:
    torch.manual_seed(0)
    is_line = isinstance(layer, nn.Conv1d)
    x = torch.rand(6, 3, *([61] if is_line else [12, 11]))
    head = nn.Linear(layer(x)[0].numel(), 4)
    step = graphopt.compile(
        exported(nn.Sequential(layer, nn.Tanh(), nn.Flatten(), head), x),
        loss=passes.CrossEntropy(),
        gradient=passes.PrivateGradient(0.1, rows=6),
        optimizer=passes.SGD(0.5),
    )
    planned = plan(step, [])
    assert "1, 0, 0, 0, 1}" in "".join(kernel.code for kernel in planned.kernels if kernel.name.startswith("c"))
    assert not any(node.op_type == "Conv" and node.attributes.get_int("group", 1) == 3 for node in planned.model.graph)
    executors = [graphopt.Executor(step, native=native) for native in (True, False)]
    batch = {step.graph.inputs[0].name: x.numpy(), "target": np.arange(6) % 4}
    norms, due = (executor.step(batch)["example_norms"] for executor in executors)
    np.testing.assert_allclose(norms, due, rtol=1e-6)
    for name, found in executors[0].parameters.items():
        np.testing.assert_allclose(found, executors[1].parameters[name], atol=1e-7)


def test_examples_of_float64_are_those_of_pytorch() -> None:
    module, x, target = batch_of("dense")
    expected = norms_of(of_examples(module, x, target))
    gradient = passes.PrivateGradient(0.7, rows=N)
    step = graphopt.compile(
        exported(module, x[:3].double()),
        loss=passes.CrossEntropy(),
        gradient=gradient,
        clip=passes.GaussianNoise(1.0),
        optimizer=passes.SGD(0.1),
    )
    fed = {"x": x.double().numpy(), "target": target.numpy(), "noise_key": np.int32([1, 2])}
    np.testing.assert_allclose(graphopt.Executor(step).step(fed)["example_norms"], expected, rtol=2e-6)


def test_inputs_of_different_open_axes_are_refused() -> None:
    text = "g (float[M,3] a, float[N,3] x) => (float[N,2] y, float[M,2] z) { y = MatMul(x, w) z = MatMul(a, w) }"
    with pytest.raises(GraphoptError, match="share the axis of the rows"):
        graphopt.compile(
            model(text, w=np.ones((3, 2), np.float32)),
            loss=passes.MeanSquaredError(output="y"),
            gradient=passes.PrivateGradient(),
        )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"accumulate": passes.Accumulate(2, mean=False)}, r"Accumulate\(mean=False\)"),
        ({"clip": [passes.ClipGlobalNorm(1.0), passes.GaussianNoise(1.0)]}, "put GaussianNoise first"),
    ],
)
def test_what_makes_noise_too_small_is_refused(change: dict[str, Any], message: str) -> None:
    private_step(accumulate=passes.Accumulate(2), clip=[passes.GaussianNoise(1.0), passes.ClipGlobalNorm(1.0)])
    with pytest.raises(GraphoptError, match=message):
        private_step(**change)


def test_private_gradients_are_refused_with_several_workers_and_without_a_key() -> None:
    with pytest.raises(GraphoptError, match="train on one worker"):
        graphopt.split_step(
            graphopt.standard(loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(), optimizer=passes.SGD(0.1)),
            models.mlp((4,), 3),
        )
    with pytest.raises(NonFiniteLoss):
        graphopt.Executor(private_step()).step(data_of(6))


def poisson(executor: graphopt.Executor, *callbacks: graphopt.Callback, **options: Any) -> list[dict[str, Any]]:
    options = {"epochs": 1, "batch_size": 30, "sampling": "poisson", "validation": None, **options}
    return graphopt.fit(executor, data_of(300), callbacks=callbacks, **options)


def test_a_budget_counts_steps_of_earlier_calls_with_the_same_facts_only() -> None:
    pytest.importorskip("dp_accounting")
    executor, budget = graphopt.Executor(private_step()), graphopt.callbacks.PrivacyBudget(3.0, 1e-4)
    for _ in range(4):
        poisson(executor, budget)
    spent = [graphopt.privacy.epsilon(300, 30, executor.steps + more, 1.0, 1e-4) for more in (0, 1)]
    assert spent[0] <= 3.0 < spent[1]
    for other, options in ((budget, {"batch_size": 60}), (graphopt.callbacks.PrivacyBudget(), {})):
        with pytest.raises(GraphoptError, match="expected to have followed"):
            poisson(executor, other, **options)
    with pytest.raises(GraphoptError, match="1 / rows"):
        graphopt.privacy.epsilon(300, 30, 10, 1.0, delta=0.01)


def test_private_training_resumes_to_the_same_bits_with_the_same_batches_only(tmp_path: Path) -> None:
    pytest.importorskip("dp_accounting")
    whole = graphopt.Executor(private_step())
    poisson(
        whole,
        graphopt.callbacks.PrivacyBudget(),
        epochs=2,
        checkpoint=graphopt.Checkpoints(tmp_path, every="4 steps", keep=9),
    )
    first = sorted(tmp_path.glob("step-*"))[0]
    with pytest.raises(GraphoptError, match="expected batch_size 60"):
        poisson(graphopt.Executor(private_step()), resume=first, batch_size=60)
    again = graphopt.Executor(private_step())
    (*_, last) = poisson(again, graphopt.callbacks.PrivacyBudget(), epochs=2, resume=first)
    assert last["epsilon"] == pytest.approx(graphopt.privacy.epsilon(300, 30, 20, 1.0, 1 / 600))
    assert_equal(again.state, whole.state)


def test_batches_and_noise_of_two_private_runs_differ_and_batches_of_an_iterable_keep_their_number() -> None:
    runs = [graphopt.Executor(private_step(0.0)) for _ in range(2)]
    for executor in runs:
        poisson(executor)
    assert not np.array_equal(*(x.state["layers.0.weight"] for x in runs))
    data = data_of(300)
    batches = [{name: x[i : i + 100] for name, x in data.items()} for i in (0, 100, 200)]
    executor = graphopt.Executor(private_step(rows=100))
    graphopt.fit(executor, batches, validation=None)
    assert executor.hyperparameters["expected_rows"] == 100
    with pytest.raises(GraphoptError, match="LearningRateFinder: expected a training without GaussianNoise"):
        poisson(executor, graphopt.callbacks.LearningRateFinder())


MIXING = "g (float[N,3] x) => (float[N,2] y) { %s }"


@pytest.mark.parametrize(
    ("nodes", "message"),
    [
        ("m = ReduceMean(x) c = Sub(x, m) y = MatMul(c, w)", "treat each row"),
        (
            "h = MatMul(x, w) axes = Constant<value_ints=[0]>() s = ReduceSum(h, axes) y = Sub(h, s)",
            "treat each row",
        ),
    ],
)
def test_rows_that_depend_on_each_other_are_refused(nodes: str, message: str) -> None:
    mixing = model(MIXING % nodes, w=np.ones((3, 2), np.float32))
    with pytest.raises(GraphoptError, match=message):
        graphopt.compile(mixing, loss=passes.MeanSquaredError(), gradient=passes.PrivateGradient())
    fixed = model(MIXING.replace("N", "4") % "y = MatMul(x, w)", w=np.ones((3, 2), np.float32))
    with pytest.raises(GraphoptError, match="open batch"):
        graphopt.compile(fixed, loss=passes.MeanSquaredError(), gradient=passes.PrivateGradient())


def test_batch_statistics_and_sites_without_a_formula_are_refused() -> None:
    module = nn.Sequential(nn.Conv2d(1, 2, 3), nn.BatchNorm2d(2), nn.Flatten(), nn.Linear(8, 3))
    file = graphopt.export(module, torch.zeros(2, 1, 4, 4))
    steps = {"loss": passes.CrossEntropy(), "training": passes.TrainingMode()}
    with pytest.raises(GraphoptError, match="batch statistics"):
        graphopt.compile(file, **steps, gradient=passes.PrivateGradient())
    module, x = nn.Sequential(nn.ConvTranspose1d(2, 3, 2), nn.Flatten()), torch.randn(N, 2, 4)
    with pytest.raises(GraphoptError, match="scan=True"):
        graphopt.compile(
            exported(module, x[:3]), loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(scan=False)
        )


def test_masks_are_drawn_for_each_row_and_a_sum_counts_as_its_parts() -> None:
    module = nn.Sequential(nn.Linear(4, 8), nn.Dropout(0.5), nn.Tanh(), nn.Linear(8, 3))
    file, data = exported(module, torch.zeros(3, 4)), data_of(5)
    step = graphopt.compile(
        file,
        loss=passes.CrossEntropy(reduction="sum"),
        training=passes.TrainingMode(),
        gradient=passes.PrivateGradient(1e6, rows=1),
    )
    plain = graphopt.compile(file, loss=passes.CrossEntropy(reduction="sum"), training=passes.TrainingMode())
    found, expected = graphopt.run(step, data), graphopt.run(plain, data)
    for name in expected:
        np.testing.assert_allclose(found[name], expected[name], rtol=1e-4, atol=1e-6)


class Long(nn.Module):
    """A recurrent layer, of which large ones save their gates and small ones compute them again."""

    def __init__(self, kind: str, units: int, both: bool) -> None:
        super().__init__()
        layers = 2 if both else 1
        self.cell = getattr(nn, kind)(4, units, layers, batch_first=True, bidirectional=both)
        self.head = nn.Linear(units * layers, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.cell(x)[0].mean(1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("both", "units"),
    [
        (True, 6),
        (False, 33),
        *(pytest.param(both, n, marks=pytest.mark.exhaustive) for both, n in ((False, 6), (True, 33))),
    ],
)
@pytest.mark.parametrize("kind", ["RNN", "GRU", "LSTM"])
def test_recurrent_layers_have_a_formula_whose_clipped_sums_are_those_of_pytorch(
    kind: str, both: bool, units: int
) -> None:
    torch.manual_seed(0)
    module, x, target = Long(kind, units, both).eval(), torch.randn(N, 7, 4), torch.arange(N) % 3
    file = graphopt.export(module, x[:3])  # which keeps PyTorch's order of gates
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(0.3, N, scan=False))
    if (both, units) == (
        True,
        6,
    ) and kind != "RNN":  # one walk back for the factors of the second layer and for what it passes on
        assert sum(node.op_type == "Scan" for node in step.graph.all_nodes()) == {"GRU": 8, "LSTM": 12}[kind]
    found = graphopt.run(step, {"x": x.numpy(), "target": target.numpy()})
    gradients = of_examples(module, x, target)
    norms = norms_of(gradients)
    np.testing.assert_allclose(found["example_norms"], norms, rtol=2e-6)
    factors = np.minimum(1, 0.3 / (norms + 1e-6)) / N
    clipped = {name: np.tensordot(factors, g, 1) for name, g in gradients.items()}
    for name, expected in clipped.items():
        np.testing.assert_allclose(found[f"{name}.grad"], expected, rtol=0, atol=3e-6 * abs(expected).max())


RECURRENT = {
    "both ways": ("GRU<hidden_size=3, linear_before_reset=1, direction='bidirectional'>(t, w, r, b)", 3, 2, "b"),
    "peepholes": ("LSTM<hidden_size=3, input_forget=1>(t, w, r, b, , , , p)", 4, 1, "bp"),
    "reset before": ("GRU<hidden_size=3, direction='reverse'>(t, w, r)", 3, 1, ""),
    "backwards, clipped": ("LSTM<hidden_size=3, direction='reverse', clip=0.4>(t, w, r, b)", 4, 1, "b"),
    "no bias": ("LSTM<hidden_size=3>(t, w, r)", 4, 1, ""),
    "a first state": ("GRU<hidden_size=3, linear_before_reset=1>(t, w, r, b, , s)", 3, 1, "b"),
    "lengths": ("LSTM<hidden_size=3>(t, w, r, b, l)", 4, 1, "b"),
    "lengths, both ways": (
        "GRU<hidden_size=3, linear_before_reset=1, direction='bidirectional'>(t, w, r, b, l)",
        3,
        2,
        "b",
    ),
    "lengths, a first state": ("RNN<hidden_size=3, direction='reverse'>(t, w, r, b, l, s)", 1, 1, "b"),
}


@pytest.mark.parametrize("name", RECURRENT)
def test_other_forms_of_recurrent_operators_have_the_norms_of_rows_alone(name: str) -> None:
    """Their gradients are those of PyTorch: tests/test_recurrent.py."""
    call, gates, ways, more = RECURRENT[name]
    random = np.random.default_rng(0)
    shapes = {"w": (ways, gates * 3, 3), "r": (ways, gates * 3, 3), "b": (ways, gates * 6), "p": (ways, 9)}
    weights = {
        key: random.standard_normal(shape).astype(np.float32) for key, shape in shapes.items() if key in f"wr{more}"
    }
    state = "m = ReduceMean<keepdims=0>(t, axes) s = Unsqueeze(m, axes)"
    nodes = f"t = Transpose<perm=[1,0,2]>(x) {state} a, c = {call.replace(chr(39), chr(34))} "
    data = {"x": random.standard_normal((5, 5, 3)).astype(np.float32), "target": np.arange(5) % 3}
    if "lengths" in name:
        data["l"] = np.array([5, 1, 3, 2, 4], np.int32)
    more_inputs = ", int32[N] l" if "l" in data else ""
    file = model(
        f"g (float[N,5,3] x{more_inputs}) => (float[N,3] y) {{ {nodes} y = ReduceMean<keepdims=0>(c, axes) }}",
        axes=np.array([0]),
        **weights,
    )
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(1e6, 5))
    alone = graphopt.compile(file, loss=passes.CrossEntropy(), clip=passes.GradientNorm())
    rows = [{key: value[i : i + 1] for key, value in data.items()} for i in range(5)]
    found = graphopt.run(step, data)
    expected = [graphopt.run(alone, row)["gradient_norm"] for row in rows]
    np.testing.assert_allclose(found["example_norms"], expected, rtol=1e-5)
    np.testing.assert_allclose(graphopt.run(step, rows[0])["example_norms"], expected[:1], rtol=1e-5)
    whole = graphopt.run(alone, data)
    for key in weights:
        np.testing.assert_allclose(found[f"{key}.grad"], whole[f"{key}.grad"], rtol=1e-4, atol=1e-6)


def test_norms_of_rows_follow_the_names_of_the_models_classes() -> None:
    """Names were numbered in their own order, so that all rows looked mislabelled."""
    data = data_of(6)
    names = ["yes", "no", "maybe"]
    named = graphopt.data.Dataset(data, labels=names)
    step = graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    graphopt.fit(executor, named, epochs=1, validation=None, verbose=False)
    by_name = (data["x"], np.array(names)[data["target"]])
    expected, found = (
        graphopt.example_norms(executor.trained(), rows, passes.CrossEntropy()) for rows in (data, by_name)
    )
    np.testing.assert_array_equal(found, expected)


COMPUTED = {
    "viewed": ("LSTM", "v = Unsqueeze(c, zero)", (4 * 3, 3)),
    "moved": ("GRU", "a, b, e = Split<num_outputs=3, axis=1>(c) v = Concat<axis=1>(b, a, e)", (1, 3 * 3, 3)),
}


@pytest.mark.parametrize("steps", ["2", "T"])
@pytest.mark.parametrize("name", COMPUTED)
def test_a_row_is_clipped_whose_recurrent_weight_is_computed(name: str, steps: str) -> None:
    """The norm by what the operator reads was taken for the norm by the parameter."""
    kind, nodes, shape = COMPUTED[name]
    random = np.random.default_rng(0)
    call = f"{kind}<hidden_size=3{', linear_before_reset=1' * (kind == 'GRU')}>(t, v, r)"
    file = model(
        f"g (float[N,{steps},3] x) => (float[N,3] y) {{ t = Transpose<perm=[1,0,2]>(x) c = Mul(w, ten) {nodes} "
        f"s, h = {call} y = ReduceMean<keepdims=0>(h, zero) }}",
        **{"w": random.standard_normal(shape) / 10, "ten": np.array(10.0), "zero": np.array([0])},
        r=random.standard_normal((1, shape[-2], 3)),
    )
    step = graphopt.compile(file, loss=passes.CrossEntropy(), gradient=passes.PrivateGradient(0.1, 1))
    found = graphopt.run(step, {"x": random.standard_normal((1, 2, 3)).astype(np.float32), "target": np.array([1])})
    square = sum(float(np.square(g).sum()) for key, g in found.items() if key.endswith(".grad"))
    assert found["example_norms"] > 0.1
    np.testing.assert_allclose(np.sqrt(square), 0.1, rtol=1e-4)


def test_rounding_of_ranges_that_follow_the_rows_is_named() -> None:
    data = data_of(16)
    quantize = passes.FakeQuantize()
    pipeline = graphopt.standard(loss=passes.CrossEntropy(), quantize=quantize, gradient=passes.PrivateGradient())
    with pytest.raises(GraphoptError, match=r"found the rounding of passes\.FakeQuantize.*quantize=none"):
        graphopt.adapt(pipeline, models.mlp((4,), 3), data)(models.mlp((4,), 3))


def test_norms_of_a_trained_model_are_those_of_its_step_and_a_column_of_predictions(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("hydra")
    from graphopt import cli

    monkeypatch.chdir(tmp_path)
    data = data_of(40)
    np.savez("rows.npz", **data)
    common = ["data=npz", "data.path=rows.npz", "model=mlp", "clip=example_norms", "hydra.run.dir=run", "quiet=true"]
    assert cli.main(["run=train", *common, "fit.epochs=1"]) == 0
    assert cli.main(["predict", "folder=run", "rows=all"]) == 0
    assert "gradient norm" in Path("run/report.html").read_text()
    found = np.load("run/predictions.npz")["example_norms"]
    step = graphopt.compile("run/trained.onnx", loss=passes.CrossEntropy(), clip=passes.ExampleNorms())
    np.testing.assert_allclose(found, graphopt.run(step, data)["example_norms"], rtol=1e-5)
    np.savez("others.npz", x=data["x"])
    assert cli.main(["predict", "folder=run", "data.path=others.npz", "predictions=others_out.npz"]) == 0
    assert "example_norms" not in np.load("run/others_out.npz")

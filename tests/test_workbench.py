"""`graphopt.testing.try_*`: what holds passes, and each planted mistake fails in the row that is about it."""

from __future__ import annotations

import re
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
import torch
from builders import mlp

import graphopt
import passes
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass
from graphopt.testing import Trials, check_gradient, prove, try_gradient, try_loss, try_optimizer, try_pass
from passes.gradients.registry import NO_GRADIENT, REPLACED, RULES, UNIFORM, WITH_LOCAL_DERIVATIVES

RNG = np.random.default_rng(5)


@pytest.fixture(autouse=True)
def _registry():
    tables = (RULES, NO_GRADIENT, REPLACED, UNIFORM, WITH_LOCAL_DERIVATIVES)
    kept = [table.copy() for table in tables]
    yield
    for table, before in zip(tables, kept, strict=True):
        table.clear()
        table.update(before)


@dataclass(frozen=True)
class Focal(passes.Loss):
    """Lin et al. 2017, https://arxiv.org/abs/1708.02002."""

    gamma: float = 2.0
    factor: float = 1.0

    task = "classification"

    def target_type(self, prediction):
        return ir.DataType.INT64, ir.Shape(prediction.shape[:1])

    def metric(self, prediction):
        return {"axis": 1, "classes": prediction.shape[1]}

    def compare(self, op, prediction, target):
        logs = op.LogSoftmax(prediction, axis=1)
        log_p = op.Squeeze(op.GatherElements(logs, op.Unsqueeze(target, [1]), axis=1), [1])
        return -((1 - op.Exp(log_p)) ** self.gamma) * log_p * self.factor


@dataclass(frozen=True)
class Square(Focal):
    """A column meets a vector."""

    def compare(self, op, prediction, target):
        logs = op.LogSoftmax(prediction, axis=1)
        log_p = op.GatherElements(logs, op.Unsqueeze(target, [1]), axis=1)
        return -log_p * op.Squeeze(1 - op.Exp(log_p), [1])


@dataclass(frozen=True)
class FourRows(passes.Loss):
    def compare(self, op, prediction, target):
        return op.Reshape(op.Abs(prediction - target), [4, 3])


@dataclass(frozen=True)
class Single(passes.Loss):
    """A constant of float32."""

    def compare(self, op, prediction, target):
        return op.Abs(prediction - target) * op.constant(np.array(0.5, np.float32))


def focal(prediction: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    log_p = -torch.nn.functional.cross_entropy(prediction, target, reduction="none")
    return (-((1 - log_p.exp()) ** 2) * log_p).mean()


@dataclass(frozen=True)
class Adan(passes.Optimizer):
    """Xie et al. 2022, https://arxiv.org/abs/2208.06677."""

    beta1: float = 0.98
    beta2: float = 0.92
    beta3: float = 0.99
    corrected: bool = field(default=True, kw_only=True)

    def slots(self):
        return {"mean": 0.0, "change": 0.0, "square": 0.0, "previous": 0.0}

    def update(self, op, w, g, rate, t, mean, change, square, previous):
        d = (t > 1) * (g - previous)
        mean = self.beta1 * mean + (1 - self.beta1) * g
        change = self.beta2 * change + (1 - self.beta2) * d
        square = self.beta3 * square + (1 - self.beta3) * (g + self.beta2 * d) ** 2
        third = 1 - self.beta3**t if self.corrected else op.constant(1.0, like=t)
        root = op.Sqrt(square / third) + 1e-8
        moved = mean / (1 - self.beta1**t) + self.beta2 * change / (1 - self.beta2**t)
        return w - rate * moved / root, mean, change, square, g


class TorchAdan(torch.optim.Optimizer):
    """Adan as its authors write it, in place (sail-sg/Adan, `_single_tensor_adan`)."""

    def __init__(self, parameters: Any, lr: float) -> None:
        super().__init__(parameters, {"lr": lr, "step": 0})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            group["step"] += 1
            b1, b2, b3 = 0.98, 0.92, 0.99
            c1, c2, c3 = (1 - b ** group["step"] for b in (b1, b2, b3))
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state.update({name: torch.zeros_like(p) for name in ("avg", "diff", "sq")})
                    state["neg"] = -p.grad.clone()
                state["neg"].add_(p.grad)
                state["avg"].mul_(b1).add_(p.grad, alpha=1 - b1)
                state["diff"].mul_(b2).add_(state["neg"], alpha=1 - b2)
                state["neg"].mul_(b2).add_(p.grad)
                state["sq"].mul_(b3).addcmul_(state["neg"], state["neg"], value=1 - b3)
                denominator = (state["sq"].sqrt() / c3**0.5).add_(1e-8)
                p.addcdiv_(state["avg"], denominator, value=-group["lr"] / c1)
                p.addcdiv_(state["diff"], denominator, value=-group["lr"] * b2 / c2)
                state["neg"].zero_().add_(p.grad, alpha=-1.0)


def adan(parameters: list[Any]) -> torch.optim.Optimizer:
    return TorchAdan(parameters, 1e-2)


@dataclass(frozen=True)
class Noisy(passes.Optimizer):
    """Numbers that are drawn by the session are not resumed."""

    def update(self, op, w, g, rate, t):
        return (w - rate * g * op.RandomUniformLike(w, low=0.5, high=1.5),)


@dataclass(frozen=True)
class SameAndHalf(passes.Clip):
    """Some gradients stay as they are."""

    def clip(self, op, model, gradients):
        return [0.5 * g if len(g.shape) > 1 else g for g in gradients]


@dataclass(frozen=True)
class Renames(Pass):
    """The trained model loses its output."""

    def rewrite(self, model):
        with Emitter(model) as op:
            (y,) = (y for y in model.graph.outputs if y.name == "y")
            at = model.graph.outputs.index(y)
            model.graph.outputs[at] = op.Identity(y, _outputs=["z"])


def failed(found: Trials) -> set[str]:
    return {trial.property for trial in found.failures}


def test_a_focal_loss_on_class_numbers_is_pytorchs() -> None:
    found = try_loss(Focal(), twin=focal, kernels=False)
    assert found.raise_().passed
    assert {trial.property for trial in found.trials if trial.verdict == "passed"} >= {"PyTorch", "7 rows"}
    x, t = RNG.standard_normal((9, 3)).astype(np.float32), RNG.integers(0, 3, 9)
    step = graphopt.compile(mlp((3, 4, 3)), loss=Focal(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, native=False)
    y = torch.from_numpy(executor.predict(x=x)["y"])
    assert executor.step(x=x, target=t)["loss"] == pytest.approx(focal(y, torch.from_numpy(t)).item(), rel=1e-5)


@pytest.mark.slow
def test_an_optimizer_of_four_slots_is_its_authors() -> None:
    found = try_optimizer(Adan(1e-2), twin=adan, kernels=False)
    assert found.raise_().passed
    assert "passed   PyTorch" in str(found)


@pytest.mark.parametrize(
    ("tried", "properties"),
    [
        (lambda: try_loss(Square(), kernels=False), {"a sum over rows"}),
        (lambda: try_loss(Focal(factor=1.01), twin=focal, kernels=False), {"PyTorch"}),
        (lambda: try_loss(FourRows(), kernels=False), {"1 rows", "7 rows"}),
        (lambda: try_loss(Single(), kernels=False), {"float64"}),
        (lambda: try_optimizer(Adan(1e-2, corrected=False), twin=adan, kernels=False), {"PyTorch"}),
        (lambda: try_optimizer(Noisy(0.1), kernels=False), {"saved and resumed"}),
        (lambda: try_pass(Renames(), step="clip", kernels=False), {"the model's interface"}),
    ],
    ids=["a square", "a factor", "four rows", "float32", "no correction", "noise", "another output"],
)
@pytest.mark.slow
@pytest.mark.sample(3)
def test_a_planted_mistake_fails_where_it_shows(tried: Callable[[], Trials], properties: set[str]) -> None:
    found = tried()
    assert failed(found) >= properties
    assert not found.passed
    with pytest.raises(graphopt.GraphoptError, match=r"trials to pass, found \d+ that fail, first "):
        found.raise_()


@pytest.mark.slow
def test_a_clip_may_leave_gradients_as_they_are() -> None:
    assert try_pass(SameAndHalf(), kernels=False).raise_().passed


@pytest.mark.slow
def test_a_pass_that_learns_is_adapted_first() -> None:
    assert try_pass(passes.Standardize(), step="standardize", kernels=False).raise_().passed


def steep(op, dy, x):
    return [1.1 * dy * (x > 0)]


def right(op, dy, x):
    return [dy * (x > 0)]


@pytest.mark.slow
def test_the_program_of_a_failure_reproduces_it(tmp_path: Path) -> None:
    point = [np.linspace(-1, 1, 6)]
    assert try_gradient("Relu", point, rule=right).passed
    found = try_gradient("Relu", point, rule=steep)
    assert failed(found) == {"finite differences in float64", "finite differences in float32"}
    (tmp_path / "shown.py").write_text(found.program)
    paths = [str(Path(graphopt.__file__).parents[1]), str(Path(__file__).parent)]
    code = f"import sys, runpy; sys.path[:0] = {paths!r}; runpy.run_path('shown.py')"
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode != 0
    (said,) = re.findall(r"GraphoptError: (.*)", done.stderr)[-1:]
    assert said.startswith(found.failures[0].reason[:60])


def function(body: str, rule: Any, attributes: str = "", given: str = "") -> onnx.ModelProto:
    passes.gradient("mine", "F")(rule)
    return onnx.parser.parse_model(
        f"""<ir_version: 9, opset_import: ["" : 21, "mine" : 1]>
        g (float[N,4] x) => (float[N,4] y) {{ y = mine.F{given}(x) }}
        <domain: "mine", opset_import: ["" : 21]> F {attributes} (x) => (s) {{ {body} }}"""
    )


BETA = "b = Constant<value_float: float = @beta>() s = Mul(b, x)"
FUNCTIONS: dict[str, tuple[Any, ...]] = {
    "a float": ("b = Constant<value_float=1.5>() s = Mul(b, x)", lambda op, dy, x: [dy * 1.5]),
    "floats": (
        "b = Constant<value_floats=[1.5,2.0,1.0,0.5]>() s = Mul(b, x)",
        lambda op, dy, x: [dy * np.array([1.5, 2, 1, 0.5])],
    ),
    "a tensor": ("b = Constant<value=float {1.5}>() s = Mul(b, x)", lambda op, dy, x: [dy * 1.5]),
    "an attribute": (BETA, lambda op, dy, x, *, beta: [dy * beta], "<beta>", "<beta=0.25>"),
    "a default": (BETA, lambda op, dy, x, *, beta: [dy * beta], "<beta: float = 2.5>"),
    "a constant is read twice": (
        "b = Constant<value_float: float = @beta>() z = Mul(b, x) s = Add(z, b)",
        lambda op, dy, x, *, beta: [dy * beta],
        "<beta>",
        "<beta=0.25>",
    ),
    "a cast": (
        "c = Cast<to=1>(x) b = Constant<value_float=2.0>() s = Mul(c, b)",
        lambda op, dy, x: [2 * dy],
    ),
    "a shape": (
        "h = Shape(x) b = ConstantOfShape<value=float[1] {3.0}>(h) s = Mul(x, b)",
        lambda op, dy, x: [3 * dy],
    ),
    "a body": (
        """c = Constant<value=bool {1}>()
        s = If(c) <then_branch = t () => (a) { b = Constant<value_float=2.0>() a = Mul(x, b) },
                   else_branch = e () => (d) { d = Identity(x) }>""",
        lambda op, dy, x: [2 * dy],
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_with_constants_and_attributes_are_proved_in_float64(name: str) -> None:
    proto = function(*FUNCTIONS[name])
    proof = prove(proto, {"x": RNG.standard_normal((5, 4)).astype(np.float32)})
    assert (proof.forward, proof.compared, proof.vacuous) == ("runtime", 20, False)
    body, rule, *others = FUNCTIONS[name]
    wrong = function(body, lambda *values: [1.01 * rule(*values)[0]], *others)
    if "beta" not in body:
        with pytest.raises(graphopt.GraphoptError, match="gradients differ"):
            check_gradient(wrong, {"x": RNG.standard_normal((5, 4)).astype(np.float32)})


def emitted(formula: Callable[[Any, ir.Value], Any], x: np.ndarray) -> np.ndarray:
    model = graphopt.load(
        onnx.parser.parse_model('<ir_version: 9, opset_import: ["" : 21]> g (float[N,4] x) => () { }')
    )
    with Emitter(model) as op:
        y = formula(op, model.graph.inputs[0])
        y.name = "y"
        model.graph.outputs.append(y)
    return graphopt.run(model, {"x": x})["y"]


FORMULAS: dict[str, Callable[[Any, Any], Any]] = {
    "powers": lambda op, x: x**2 + 2**x + abs(x) ** 0.5,
    "reflected": lambda op, x: (2 - x) + 1 / (x + 5) + 3 * x + (1 + x),
    "products": lambda op, x: x @ np.eye(4, 3, dtype=np.float32),
    "a product of an array": lambda op, x: np.ones((4, 2), np.float32).T @ (x.T if op is None else op.Transpose(x)),
    "signs": lambda op, x: +(-x) - -x,
    "masks": lambda op, x: (x > 0) * x + 2.0 * ((x >= 1) * x) - (x < -0.5) * x - (x <= 0) * x,
    "logic": lambda op, x: ((x > 0) & (x < 1) | ~(x > -1)) * x + ((x > 0) ^ (x > 1)) * x,
    "remainders": lambda op, x: x // 0.7 + x % 0.7,
    "numbers of NumPy": lambda op, x: np.float32(2) * x + np.arange(4, dtype=np.float32) - x + (np.float32(0) < x) * x,
    "sums": lambda op, x: sum([x, x]),
}


@pytest.mark.parametrize("name", FORMULAS)
def test_values_have_the_arithmetic_of_numpy(name: str) -> None:
    x = RNG.standard_normal((5, 4)).astype(np.float32)
    found, expected = emitted(FORMULAS[name], x), FORMULAS[name](None, x)
    np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_threads_emit_into_graphs_of_their_own() -> None:
    model, other = graphopt.load(mlp()), graphopt.load(mlp())
    inside, done = threading.Event(), threading.Event()

    def emit() -> None:
        with Emitter(other):
            inside.set()
            done.wait()

    with Emitter(model), ThreadPoolExecutor(1) as threads:
        found = threads.submit(emit)
        inside.wait()
        x = model.graph.inputs[0]
        y, z = x + x, -x
        done.set()
        found.result()
    assert all(value.producer().graph is model.graph for value in (y, z))
    assert bool(x)  # no block is left


def test_values_are_equal_to_themselves_and_keys() -> None:
    model = graphopt.load(mlp())
    with Emitter(model) as op:
        (x,) = model.graph.inputs
        y = op.Tanh(x)
        assert x == x
        assert x != y
        assert {x: 1, y: 2}[y] == 2
        assert [x, y].index(y) == 1
    assert bool(x)


def test_a_name_in_place_of_inputs_is_refused() -> None:
    with pytest.raises(graphopt.GraphoptError, match="expected the arrays of its inputs, found 'Tanh'"):
        try_gradient("", "Tanh")  # type: ignore[arg-type]

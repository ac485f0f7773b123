"""Gradient rules for one compilation, against functions of PyTorch with a backward of their own."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnxscript
import pytest
import torch
from onnxscript import opset21

import graphopt
import passes
from graphopt import cli, models
from graphopt.errors import GraphoptError
from graphopt.runtime.checks.findings import Disagreement
from passes.gradients import registry

MSE, SGD = passes.MeanSquaredError(), passes.SGD(0.1)


def straight_through(op: Any, dy: Any, x: Any) -> list[Any]:
    """Bengio et al., https://arxiv.org/abs/1308.3432: pass the gradient as it is."""
    return [dy]


def hard(op: Any, dy: Any, x: Any) -> list[Any]:
    return [dy * op.Cast(op.Less(op.Abs(x), 1.0), to=dy.dtype)]


@onnxscript.script(default_opset=opset21)
def hard_script(dy: Any, x: Any) -> Any:
    return dy * opset21.CastLike(opset21.Less(opset21.Abs(x), opset21.CastLike(1.0, x)), dy)


def of_torch(forward: Callable[[Any], Any], backward: Callable[[Any, Any], Any]) -> Callable[[Any], Any]:
    """Return a function of PyTorch with a backward of its own."""

    class Own(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return forward(x)

        @staticmethod
        def backward(ctx: Any, dy: Any) -> Any:
            return backward(dy, *ctx.saved_tensors)

    return Own.apply  # type: ignore[no-any-return]


STRAIGHT = of_torch(torch.round, lambda dy, x: dy)
HARD_SIGN = of_torch(torch.sign, lambda dy, x: dy * (x.abs() < 1))
HALF_TANH = of_torch(torch.tanh, lambda dy, x: 0.5 * dy)
THRESHOLD = of_torch(torch.sign, lambda dy, x: dy * (x.abs() < 0.5))


def half(op: Any, dy: Any, x: Any) -> list[Any]:
    return [0.5 * dy]


def within(op: Any, dy: Any, x: Any, *, threshold: float) -> list[Any]:
    return [dy * op.Cast(op.Less(op.Abs(x), threshold), to=dy.dtype)]


def parsed(body: str, functions: str = "") -> onnx.ModelProto:
    """Return a model y = f(x w) v, where `body` computes s from h."""
    proto = onnx.parser.parse_model(
        f"""<ir_version: 10, opset_import: ["" : 21, "own" : 1]>
        g (float[N,4] x) => (float[N,2] y) {{ h = MatMul(x, w) {body} y = MatMul(s, v) }} {functions}"""
    )
    weights = np.random.default_rng(1)
    for name, shape in (("w", (4, 8)), ("v", (8, 2))):
        array = weights.standard_normal(shape).astype(np.float32)
        proto.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    return proto


IF = """one = Constant<value_float = 1.0>() zero = Constant<value_float = 0.0>() all = ReduceMax<keepdims = 0>(h)
    yes = Greater(all, zero) s = If(yes) <
        then_branch = a () => (float[N,8] t) { t = Round(h) }, else_branch = b () => (float[N,8] e) { e = Neg(h) }>"""
LOOP = """three = Constant<value_int = 3>() go = Cast<to = 9>(three) s = Loop(three, go, h) <
    body = a (int64 i, bool c, float[N,8] before) => (bool d, float[N,8] after) {
        d = Identity(c) t = Tanh(before) after = Add(t, h) }>"""
SCAN = """zeros = Sub(h, h) r = Transpose<perm = [1, 0]>(h) axis = Constant<value_ints = [1]>()
    start = ReduceSum<keepdims = 0>(zeros, axis) last, out = Scan<num_scan_inputs = 1,
        body = a (float[N] before, float[N] row) => (float[N] after, float[N] o) {
            q = Round(row) after = Add(before, q) o = Mul(after, row) }>(start, r)
    s = Transpose<perm = [1, 0]>(out)"""


def by_if(h: Any) -> Any:
    return STRAIGHT(h) if h.max() > 0 else -h


def by_loop(h: Any) -> Any:
    s = h
    for _ in range(3):
        s = HALF_TANH(s) + h
    return s


def by_scan(h: Any) -> Any:
    total, rows = torch.zeros(h.shape[0]), []
    for row in h.T:
        total = total + STRAIGHT(row)
        rows.append(total * row)
    return torch.stack(rows, 1)


STEP = '<domain: "own", opset_import: ["" : 21]> Step <threshold> (x) => (s) { s = Sign(x) }'
CALL = "s = own.Step<threshold = 0.5>(h)"
INSIDE = """zero = Constant<value_float = 0.0>() all = ReduceMax<keepdims = 0>(h) yes = Greater(all, zero) s = If(yes) <
    then_branch = a () => (float[N,8] t) { t = own.Step<threshold = 0.5>(h) },
    else_branch = b () => (float[N,8] e) { e = Neg(h) }>"""
CASES: dict[str, tuple[onnx.ModelProto, Mapping[tuple[str, str], Any], Callable[[Any], Any]]] = {
    "round": (parsed("s = Round(h)"), {("", "Round"): straight_through}, STRAIGHT),
    "sign": (parsed("s = Sign(h)"), {("", "Sign"): hard}, HARD_SIGN),
    "sign by a script": (parsed("s = Sign(h)"), {("", "Sign"): hard_script}, HARD_SIGN),
    "tanh": (parsed("s = Tanh(h)"), {("", "Tanh"): passes.surrogate(half)}, HALF_TANH),
    "tanh in a loop": (parsed(LOOP), {("", "Tanh"): passes.surrogate(half)}, by_loop),
    "round in a branch": (parsed(IF), {("", "Round"): straight_through}, by_if),
    "round in a scan": (parsed(SCAN), {("", "Round"): straight_through}, by_scan),
    "a function": (parsed(CALL, STEP), {("own", "Step"): passes.surrogate(within)}, THRESHOLD),
    "a function in a branch": (
        parsed(INSIDE, STEP),
        {("own", "Step"): passes.surrogate(within)},
        lambda h: THRESHOLD(h) if h.max() > 0 else -h,
    ),
}


@pytest.mark.whole
@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_a_function_of_torch(case: str) -> None:
    proto, rules, function = CASES[case]
    step = graphopt.compile(proto, loss=MSE, optimizer=SGD, rules=rules)
    rng = np.random.default_rng(0)
    x, target = (rng.standard_normal(shape).astype(np.float32) for shape in ((6, 4), (6, 2)))
    w, v = (torch.tensor(onnx.numpy_helper.to_array(t), requires_grad=True) for t in proto.graph.initializer)
    loss = torch.mean((function(torch.tensor(x) @ w) @ v - torch.tensor(target)) ** 2)
    loss.backward()
    executor = graphopt.Executor(step, native=False)
    assert executor.step(x=x, target=target)["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, value in {"w": w, "v": v}.items():
        assert value.grad is not None and value.grad.abs().max() > 0
        expected = (value - 0.1 * value.grad).detach().numpy()
        np.testing.assert_allclose(executor.state[name], expected, rtol=2e-5, atol=2e-6)


def test_a_surrogate_of_all_compilations_counts_in_bodies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "RULES", dict(registry.RULES))
    monkeypatch.setattr(registry, "REPLACED", set(registry.REPLACED))
    monkeypatch.setattr(registry, "SURROGATES", set(registry.SURROGATES))
    proto, _, _ = CASES["a function in a branch"]
    passes.gradient("own", "Step", surrogate=True)(within)
    step = graphopt.compile(proto, loss=MSE, optimizer=SGD)
    x, target = np.ones((6, 4), np.float32), np.zeros((6, 2), np.float32)
    graphopt.Executor(step, native=False).step(x=x, target=target)
    reasons = {x.reason for x in graphopt.check(step, {"x": x, "target": target}).findings}
    assert "the rule of Step declares a surrogate gradient" in reasons


def differs(rules: Any = None) -> bool:
    """Return whether Relu has another rule than the library's."""
    proto = models.mlp((4,), 2, hidden=[3])
    own = graphopt.listing(graphopt.compile(proto, loss=MSE, **({} if rules is None else {"rules": rules})))
    return own != PLAIN


PLAIN = graphopt.listing(graphopt.compile(models.mlp((4,), 2, hidden=[3]), loss=MSE))
RELU = {("", "Relu"): passes.surrogate(half)}


def test_rules_are_gone_after_the_compilation_and_no_other_thread_sees_them() -> None:
    tables = (registry.RULES, registry.NO_GRADIENT, registry.SURROGATES, registry.REPLACED, registry.UNIFORM)
    before = [table.copy() for table in tables]
    found: dict[str, bool] = {}

    def watching(op: Any, dy: Any, x: Any) -> list[Any]:
        thread = threading.Thread(target=lambda: found.update(other=differs()))
        thread.start()
        thread.join()
        found["nested"] = differs()  # a compilation of its own has its own rules
        found["nested with rules"] = differs(RELU)
        return [0.5 * dy]

    assert differs({("", "Relu"): watching})
    assert found == {"other": False, "nested": False, "nested with rules": True}
    assert not differs() and [table.copy() for table in tables] == before


def test_an_error_takes_the_rules_along() -> None:
    def failing(op: Any, dy: Any, x: Any) -> list[Any]:
        raise GraphoptError("it fails")

    with pytest.raises(GraphoptError, match=r"^no gradient of Relu node .*: it fails"):
        differs({("", "Relu"): failing})
    assert not differs()


def test_pipelines_keep_their_rules() -> None:
    pipeline = graphopt.standard(loss=MSE, rules=RELU)
    source = models.mlp((4,), 2, hidden=[3])
    expected = graphopt.listing(pipeline(source))
    assert expected != PLAIN
    for same in (pipeline.planned(5), pipeline.without("clip"), graphopt.adapt(pipeline, source, {})):
        assert graphopt.listing(same(source)) == expected
    assert graphopt.listing(pipeline.after("loss")(pipeline.until("loss")(source))) == expected
    halves = graphopt.split_step(graphopt.standard(loss=MSE, optimizer=SGD, rules=RELU), source)
    whole = graphopt.compile(source, loss=MSE, optimizer=SGD, rules=RELU)
    assert graphopt.listing(halves.step) == graphopt.listing(whole)


def test_a_target_keeps_nothing_that_was_made_by_rules(cache: Path) -> None:
    step = graphopt.compile(models.mlp((4,), 2, hidden=[3]), loss=MSE, optimizer=SGD)
    differentiate = graphopt.Pipeline(grad=passes.Differentiate(("x",), of="y"))
    listings = [
        graphopt.listing(graphopt.lower(step, graphopt.Target("mine", differentiate.with_rules(rules), "1")))
        for rules in ({}, RELU, {})
    ]
    assert listings[0] == listings[2] != listings[1]


def test_estimators_do_not_share_a_graph_that_was_compiled_by_rules() -> None:
    x = np.random.default_rng(0).standard_normal((32, 4)).astype(np.float32)

    def losses() -> list[float]:
        return list(
            graphopt.OnnxRegressor(hidden_layer_sizes=(8,), solver=SGD, random_state=0, max_iter=3)
            .fit(x, x.sum(1))
            .loss_curve_
        )

    before = losses()
    differs(RELU)
    assert losses() == before


def wrong(op: Any, dy: Any, x: Any) -> list[Any]:
    return [3.0 * dy * op.Cast(op.Greater(x, 0.0), to=dy.dtype)]


def test_the_check_compares_what_a_rule_does_not_declare() -> None:
    rng = np.random.default_rng(0)
    batch = {"x": rng.standard_normal((6, 4)).astype(np.float32), "target": np.ones((6, 2), np.float32)}

    def checked(rules: Any) -> set[str]:
        step = graphopt.compile(models.mlp((4,), 2, hidden=[8]), loss=MSE, optimizer=SGD, rules=rules)
        graphopt.Executor(step, native=False).step(batch)
        table = graphopt.check(step, batch)
        return {x.name for x in table.findings if x.part == "gradient" and x.verdict != "not checked"}

    with pytest.raises(Disagreement, match=r"passes\.surrogate for one compilation"):
        checked({("", "Relu"): wrong})
    behind = {"layers.2.weight", "layers.2.bias"}
    assert behind <= checked({("", "Relu"): passes.surrogate(wrong)})
    assert not {"layers.0.weight"} & checked({("", "Relu"): passes.surrogate(wrong)})
    assert {"layers.0.weight", *behind} <= checked({("", "Relu"): lambda op, dy, x, *, y: [dy * op.Sign(y)]})


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("rules_of_a_compilation_mistakes"))
def test_wrong_rules_are_one_line(call: str) -> None:
    messages.refused("rules_of_a_compilation_mistakes", call, globals())


def test_a_recipe_names_rules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """By half the gradient at Relu, the layer before it learns half as fast, and the one behind it as before."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    rule = "def halved(op, dy, x):\n    return [0.5 * dy * op.Cast(op.Greater(x, 0.0), to=dy.dtype)]\n"
    Path("own_rules.py").write_text(f"import passes\n\n\n@passes.surrogate\n{rule}")
    random = np.random.default_rng(0)
    rows = {"x": random.standard_normal((16, 4)).astype(np.float32), "target": np.arange(16) % 3}
    np.savez("rows.npz", **rows)  # type: ignore[arg-type]
    graphopt.save(models.mlp((4,), 3, hidden=[8]), "my.onnx")
    command = [
        "compile",
        "my.onnx",
        "data=npz",
        "data.path=rows.npz",
        "optimizer=sgd",
        "optimizer.learning_rate=1.0",
    ]
    named = ["rules={Relu: own_rules.halved}", "trust=[own_rules]"]
    moved = []
    for folder, rules in (("plain", []), ("halved", named)):
        assert cli.main([*command, f"folder={folder}", *rules]) == 0
        executor = graphopt.Executor(f"{folder}/step.onnx", native=False)
        before = {name: np.array(x) for name, x in executor.state.items()}
        executor.step(rows)
        moved.append({name: executor.state[name] - before[name] for name in before if "weight" in name})
    first, last = sorted(moved[0])
    np.testing.assert_allclose(moved[1][first], moved[0][first] / 2, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(moved[1][last], moved[0][last], rtol=1e-4, atol=1e-6)
    capsys.readouterr()
    for rules, said in (
        (named[:1], "rules.Relu: expected graphopt's own or trusted code, found 'own_rules.halved'"),
        (["rules={my.own.Relu: own_rules.halved}", named[1]], "rules: my.own::Relu: expected an operator"),
        (["rules={Relu: 3}"], "rules: expected a mapping from operators to functions, or null, found"),
    ):
        assert cli.main([*command, "folder=wrong", *rules]) == 1
        assert said in capsys.readouterr().err
        assert not Path("wrong").exists()

"""Recomputation keeps the numbers and lowers what is held; the estimate of memory is near what is measured."""

from __future__ import annotations

import contextlib
import importlib.util
import itertools
import sys
from pathlib import Path

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import mlp, model, run

import graphopt
import passes
from graphopt import models
from graphopt.graph import memory, traversal
from graphopt.graph.roles import Role, with_role
from graphopt.inspection.report import report

RNG = np.random.default_rng(0)


def deep_mlp():
    return (
        mlp((16,) * 9, activation="Sigmoid"),
        RNG.standard_normal((64, 16)),
        np.tanh(RNG.standard_normal((64, 16))),
    )


def cnn(depth=4):
    """Return convolutions with BatchNormalization and Dropout, images and labels."""
    lines, last, weights = [], "x", {}
    for i in range(depth):
        lines += [
            f"c{i} = Conv<pads=[1,1,1,1]>({last}, w{i})",
            f"n{i} = BatchNormalization(c{i}, scale{i}, shift{i}, mean{i}, var{i})",
            f"r{i} = Relu(n{i})",
            f"d{i} = Dropout(r{i}, ratio)",
        ]
        last = f"d{i}"
        weights[f"w{i}"] = RNG.standard_normal((4, 4 if i else 1, 3, 3)) / 3
        for name, number in (("scale", 1.0), ("shift", 0.1), ("mean", 0.0), ("var", 1.0)):
            weights[f"{name}{i}"] = np.full(4, number)
    lines += [f"f = Flatten({last})", "y = Gemm(f, head)"]
    text = f"g (float[N,1,8,8] x) => (float[N,3] y) {{ {' '.join(lines)} }}"
    weights |= {"head": RNG.standard_normal((256, 3)) / 16, "ratio": np.array(0.3)}
    return model(text, **weights), RNG.standard_normal((6, 1, 8, 8)), RNG.integers(0, 3, 6)


def transformer():
    network = models.transformer((12,), 7, width=16, heads=2, layers=3)
    return network, RNG.integers(0, 7, (5, 12)), RNG.integers(0, 7, (5, 12))


NETWORKS = {
    "mlp": (deep_mlp, passes.MeanSquaredError()),
    "cnn": (cnn, passes.CrossEntropy()),
    "transformer": (transformer, passes.CrossEntropy(axis=-1)),
}


def case(name, budgets, **steps):
    """Return training graphs of one network with some budgets, None for no recomputation, and what to feed."""
    build, loss = NETWORKS[name]
    network, x, target = build()
    floats = {"x": x, "target": target}
    feeds = {key: v.astype(np.float32) if v.dtype.kind == "f" else v for key, v in floats.items()}
    graphs = [
        graphopt.compile(
            network,
            training=passes.TrainingMode(),
            loss=loss,
            recompute=None if budget is None else passes.Recompute(None if budget == "least" else budget, len(x)),
            **{"optimizer": passes.SGD(0.05, momentum=0.9), **steps},
        )
        for budget in budgets
    ]
    return graphs, feeds


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_the_numbers_stay_the_same(name):
    (plain, *others), feeds = case(name, [None, 0.6, "least"])
    expected = graphopt.Executor(plain, threads=1)
    losses = [expected.step(feeds)["loss"] for _ in range(20)]
    assert losses[-1] < losses[0]
    for other in others:
        assert len(other.graph) > len(plain.graph)
        onnx.checker.check_model(ir.to_proto(other), full_check=True)
        found = graphopt.Executor(other, threads=1)
        assert [found.step(feeds)["loss"] for _ in range(20)] == pytest.approx(losses, rel=1e-6)
        for key, value in expected.state.items():
            np.testing.assert_allclose(found.state[key], value, rtol=1e-4, atol=1e-6, err_msg=key)


@pytest.mark.parametrize("name", NETWORKS)
@pytest.mark.slow
def test_less_is_saved_and_the_peak_is_lower(name):
    graphs, feeds = case(name, [None, 0.7, 0.5, "least"])
    found = [memory.estimate(graph, len(feeds["x"])) for graph in graphs]
    assert all(one.saved >= other.saved for one, other in itertools.pairwise(found))
    assert found[-1].saved < 0.6 * found[0].saved
    assert found[-1].step < 0.9 * found[0].step
    assert len({one.state for one in found}) == 1
    for budget, one in zip((0.7, 0.5), found[1:], strict=False):
        assert one.saved <= budget * found[0].saved


@pytest.mark.slow
def test_with_clipping_accumulation_and_several_steps_a_call():
    steps = {
        "clip": passes.ClipGlobalNorm(0.5),
        "accumulate": passes.Accumulate(2),
        "regularizer": passes.L2(1e-3),
        "optimizer": passes.AdamW(0.01),
    }
    graphs, feeds = case("cnn", [None, "least"], **steps)
    executors = [graphopt.Executor(graph, threads=1, steps_per_call=3) for graph in graphs]
    plain, other = ([one["loss"] for one in each.run([feeds] * 9)] for each in executors)
    assert other == pytest.approx(plain, rel=1e-5)


def test_the_reference_evaluator_agrees():
    (plain, other), feeds = case("cnn", [None, "least"])
    for expected, found in zip(run(plain, 2, feeds), run(other, 2, feeds), strict=True):
        for name, value in expected.items():
            np.testing.assert_allclose(found[name], value, rtol=1e-4, atol=1e-6, err_msg=name)


def test_random_numbers_are_drawn_once():
    layers = "".join(
        f"p{i} = MatMul(d{i}, w{i}) t{i} = Tanh(p{i}) n{i} = RandomUniformLike(t{i}) d{i + 1} = Mul(t{i}, n{i}) "
        for i in range(6)
    )
    weights = {f"w{i}": np.random.default_rng(i).standard_normal((32, 32)) / 6 for i in range(6)}
    proto = model(f"g (float[N,32] d0) => (float[N,32] y) {{ {layers} y = Identity(d6) }}", **weights)
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)}
    plain, other = (graphopt.compile(proto, **steps, recompute=one) for one in (None, passes.Recompute()))
    counts = [
        [sum(n.op_type == op for n in step.graph) for op in ("Tanh", "RandomUniformLike")] for step in (plain, other)
    ]
    assert counts[0] == [6, 6]
    assert counts[1][0] > 6 and counts[1][1] == 6


@pytest.mark.parametrize("bad", [np.inf, np.nan])
@pytest.mark.slow
def test_what_is_not_finite_ties_segments_all_the_same(bad):
    (plain, other), feeds = case("mlp", [None, "least"])
    feeds["x"][0, 0] = bad
    losses = [graphopt.Executor(graph, on_nonfinite="warn") for graph in (plain, other)]
    with pytest.warns(UserWarning, match="expected a finite loss") if np.isnan(bad) else contextlib.nullcontext():
        plain, other = (each.step(feeds)["loss"] for each in losses)
    np.testing.assert_equal(other, plain)


@pytest.mark.slow
def test_every_copy_waits_for_a_gradient():
    (plain, other), _ = case("transformer", [None, "least"])
    seeds = {y.producer() for y in with_role(other, Role.LOSS)}
    assert seeds
    forward = traversal.forward_nodes(other)
    rerun = [
        node
        for node in other.graph
        if node not in forward and node.op_type in ("LayerNormalization", "Softmax", "Relu")
    ]
    assert rerun
    assert not [n for n in plain.graph if n not in traversal.forward_nodes(plain) and n.op_type == "LayerNormalization"]
    for node in rerun:
        assert any(one.op_type == "Less" for one in traversal.ancestors(node.inputs))


@pytest.mark.parametrize("order", ["file", "runtime"])
@pytest.mark.slow
def test_the_order_of_the_file_and_that_of_the_runtime_are_valid(order):
    (graph,), _ = case("cnn", ["least"])
    nodes = list(graph.graph) if order == "file" else memory.execution_order(graph.graph)
    assert len(nodes) == len(graph.graph)
    seen = set()
    for node in nodes:
        assert {x.producer() for x in traversal.values_read(node)} - {None} <= seen
        seen.add(node)


def test_updates_come_as_soon_as_their_gradients():
    (graph,), _ = case("mlp", [None], optimizer=passes.AdamW())
    order = [node.outputs[0].name for node in memory.execution_order(graph.graph)]
    updates = [order.index(f"fc{i}.weight.next") for i in range(8)]
    assert updates == sorted(updates, reverse=True)


def test_nothing_is_kept_for_its_shape():
    (graph,), _ = case("cnn", [None])
    inside = [node for node in graph.graph if node.op_type == "Shape" and node.inputs[0].producer() is not None]
    forward = traversal.forward_nodes(graph)
    assert [node for node in graph.graph if node.op_type == "Shape" and node not in forward]
    assert not [node for node in inside if node not in forward]
    assert not {x.producer().op_type for x in memory.saved(graph)} & {"Conv"}


def test_bytes_are_those_of_shapes_and_lifetimes():
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { a = Exp(x)  b = Sin(a)  c = Add(b, a)  y = Mul(c, w) }",
        w=np.ones(4),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(), simplify=None, fuse=None)
    found = memory.estimate(step, {"N": 1000})
    assert found.parameters == 16
    assert found.state == 2 * 16 + 2 * 8  # w and the counter of steps
    assert found == memory.estimate(step, 1000)
    assert found.peak == found.state + found.step
    saved = {x.name for x in memory.saved(step)}
    assert "c" in saved
    assert not {"a", "b"} & saved
    forward = ir.from_proto(proto)
    assert memory.estimate(forward, 1000).step == 3 * 16000  # a, b and c
    with pytest.raises(
        graphopt.GraphoptError,
        match="dimension 'N' of input 'x': expected its size in `sizes`, found sizes of M",
    ):
        memory.estimate(step, {"M": 1})


def test_sizes_by_name_decide_what_is_recomputed():
    layers = [
        f"q{i} = Mul(x{i}, w) k{i} = Transpose<perm = [0, 2, 1]>(x{i}) scores{i} = MatMul(q{i}, k{i}) "
        f"weights{i} = Softmax(scores{i}) mixed{i} = MatMul(weights{i}, x{i}) x{i + 1} = Tanh(mixed{i})"
        for i in range(6)
    ]
    text = (
        f"g (float[batch,tokens,8] x) => (float[batch,tokens,8] y) {{ x0 = Identity(x) {' '.join(layers)} "
        f"y = Identity(x6) }}"
    )
    proto = model(text, w=RNG.standard_normal(8))

    def step(recompute):
        return graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1), recompute=recompute)

    sizes = {"batch": 1, "tokens": 512}
    steps = [step(recompute) for recompute in (None, passes.Recompute(batch=sizes))]
    plain, recomputed = (memory.estimate(each, sizes) for each in steps)
    assert recomputed.saved < plain.saved / 2 and recomputed.step < plain.step / 2
    feeds = {name: RNG.standard_normal((2, 5, 8)).astype(np.float32) for name in ("x", "target")}
    losses = [[float(x["loss"]) for x in run(each, 4, feeds)] for each in steps]
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)
    with pytest.raises(graphopt.GraphoptError, match=r"dimension 'tokens' of input 'x': expected its size .* of batch"):
        step(passes.Recompute(batch={"batch": 1}))


def test_no_slice_reads_a_vector_of_all_numbers():
    """ONNX's inference of shapes would write a dimension for each of them."""
    step = graphopt.compile(
        mlp((64, 64, 3)),
        quantize=passes.QuantizeWeights("fc0*"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
        recompute=passes.Recompute(),
    )
    read = [node.inputs[0] for node in step.graph if node.op_type == "Slice"]
    assert read and all(len(x.shape) > 1 for x in read)


def test_the_body_of_a_loop_counts():
    proto = model(
        """g (float[N,4] x) => (float[N,4] y) {
            n = Constant<value_int = 3>()
            t = Constant<value = bool {1}>()
            y = Loop(n, t, x) <body = b (int64 i, bool go, float[N,4] s) => (bool on, float[N,4] z)
                { on = Identity(go)  u = Exp(s)  v = Sin(u)  z = Add(u, v) }>
        }"""
    )
    assert memory.estimate(ir.from_proto(proto), 1000).step >= 4 * 16000


def test_the_report_estimates():
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD())
    lines = report(mlp(), pipeline, batch=8).summary().splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("memory "))
    assert "at batch size 8, estimated" in lines[start]
    assert lines[start + 1].startswith("  state")
    assert lines[start + 2].startswith("  a step")
    assert "memory " not in report(mlp(), pipeline).summary()
    assert " at batch size 1048576, estimated" in report(mlp(), pipeline, batch=2_000_000).summary()


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.slow
def test_the_estimate_is_near_what_a_process_takes(monkeypatch):
    path = Path(__file__).parents[1] / "examples/benchmarks/memory.py"
    spec = importlib.util.spec_from_file_location("memory_benchmark", path)
    benchmark = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "memory_benchmark", benchmark)
    spec.loader.exec_module(benchmark)
    monkeypatch.setattr(benchmark, "BUDGETS", (1.0, 0.5))
    rows = benchmark.main(batch=16, rounds=1, networks=["cnn"])
    plain, other = rows["cnn", 1.0], rows["cnn", 0.5]
    for row in (plain, other):
        assert 0.8 < row.measured / row.estimated < 1.6
        assert row.measured < row.by_default
        assert row.seconds > 0
    assert other.measured < 0.75 * plain.measured
    assert other.by_default < 0.75 * plain.by_default


@pytest.mark.slow
def test_what_is_wrong_is_said():
    for budget in (0, -1, 1.5):
        with pytest.raises(
            graphopt.GraphoptError,
            match=rf"Recompute\(budget=.*\): expected a number in \(0, 1\], found {budget}",
        ):
            passes.Recompute(budget)
    with pytest.raises(graphopt.GraphoptError, match="Recompute needs gradients, found none: run Gradient first"):
        graphopt.compile(mlp(), loss=passes.MeanSquaredError(), gradient=None, recompute=passes.Recompute())
    with pytest.raises(
        graphopt.GraphoptError,
        match=r"Recompute: budget=0.01: expected to keep .* MB .*, found at least .* MB: set it to 0\.\d+ or more",
    ) as error:
        case("transformer", [0.01])
    least = float(str(error.value).split("set it to ")[1].split()[0])
    case("transformer", [least])

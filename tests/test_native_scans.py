"""Scans as kernels: the results of the runtime's Scan, and of the same kernels within it bit for bit."""

from __future__ import annotations

import numpy as np
import onnx
import pytest
import test_recurrent as recurrent
from builders import model
from precisions import assert_equal_in_float32, assert_near

import graphopt
import passes
from graphopt.graph.loading import load
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session
from graphopt.targets.native import lowering, toolchain
from graphopt.targets.native.forms import NodeForms
from graphopt.targets.native.lowering import lower_to_kernels, plan
from graphopt.targets.native.scans import BY_ROWS, bodies, note_rows
from graphopt.targets.updates import fold_updates
from graphopt.testing import gradients

RNG = np.random.default_rng(0)
pytestmark = pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")

# The body and its attributes; inputs are states s[N,3] and u[N,3], and sequences x[T,N,3] and k[T,N,6].
SCANS = {
    "a sum": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d) "
        "{ c = Add(a, e) d = Identity(c) }, num_scan_inputs = 1>(s, x)"
    ),
    "two states that swap": (
        "s_, u_, y = Scan<body = b (float[N,3] a, float[N,3] b, float[N,3] e) "
        "=> (float[N,3] f, float[N,3] g, float[N,3] d) "
        "{ f = Identity(b) g = Identity(a) h = Tanh(e) d = Mul(h, a) }, num_scan_inputs = 1>(s, u, x)"
    ),
    "a state that does not change": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d) "
        "{ c = Identity(a) d = Sub(e, a) }, num_scan_inputs = 1>(s, x)"
    ),
    "states alone": (
        "s_ = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c) "
        "{ f = Exp(a) g = Neg(f) c = Add(g, e) }, num_scan_inputs = 1>(s, x)"
    ),
    "sequences alone": (
        "y, z = Scan<body = b (float[N,3] e, float[N,6] f) => (float[N,3] d, float[N,6] h) "
        "{ d = Identity(e) g = Tanh(f) h = Mul(g, f) }, num_scan_inputs = 2>(x, k)"
    ),
    "backwards": (
        "s_, y, z = Scan<body = b (float[N,3] a, float[N,3] e, float[N,6] f) "
        "=> (float[N,3] c, float[N,3] d, float[N,6] h) { c = Add(a, e) d = Mul(c, e) h = Tanh(f) }, "
        "num_scan_inputs = 2, scan_input_directions = [1,0], scan_output_directions = [0,1]>(s, x, k)"
    ),
    "one value returned three times": (
        "s_, y, z = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d, float[N,3] f) "
        "{ h = Mul(a, e) c = Tanh(h) d = Identity(c) f = Identity(d) }, num_scan_inputs = 1>(s, x)"
    ),
    "parts": (
        "s_, y, z = Scan<body = b (float[N,3] a, float[N,6] e) => (float[N,3] c, float[N,6] d, float[N,3] h) "
        "{ f, g = Split<axis = -1, num_outputs = 2>(e) c = Add(f, a) d = Concat<axis = 1>(g, c) "
        "h = Identity(f) }, num_scan_inputs = 1>(s, k)"
    ),
    "shapes": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,1,3] d) "
        "{ one = Constant<value_ints = [1]>() d = Unsqueeze(e, one) f = Squeeze(d, one) c = Add(a, f) }, "
        "num_scan_inputs = 1>(s, x)"
    ),
    "products": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,6] e) => (float[N,3] c, float[N,6] d) "
        "{ f = Gemm<transB = 1>(a, w, e) d = Tanh(f) c = MatMul(d, w) }, num_scan_inputs = 1>(s, k)"
    ),
    "a scan within": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d) "
        "{ c, d_ = Scan<body = i (float[N,3] a2, float[N,3] e2) => (float[N,3] c2, float[N,3] d2) "
        "{ f = Mul(a2, e) g = Sub(f, e2) c2 = Tanh(g) d2 = Add(c2, s) }, num_scan_inputs = 1>(a, x) "
        "d = Exp(c) }, num_scan_inputs = 1>(s, x)"
    ),
    "integers": (
        "t_, y = Scan<body = b (int64 a, float[N,3] e) => (int64 c, float[N,3] d) "
        "{ c = Add(a, step) f = Cast<to = 1>(c) d = Mul(e, f) }, num_scan_inputs = 1>(t, x)"
    ),
}

# Nodes that compute sequences, which become part of the body.
MOVED = {
    "one": "h = Tanh(x) y = Scan<BODY, num_scan_inputs = 1>(h)",
    "a chain from both ends": (
        "h = Mul(x, x) g = Sub(h, scale) y = Scan<BODY, num_scan_inputs = 1, scan_input_directions = [1]>(g)"
    ),
    "with a sequence that is read both ways": (
        "h = Mul(x, x) y = Scan<body = b (float[N,3] e, float[N,3] f) => (float[N,3] d) "
        "{ g = Mul(f, e) d = Tanh(g) }, num_scan_inputs = 2, scan_input_directions = [1,0]>(x, h)"
    ),
}
KEPT = {
    "read elsewhere": "h = Tanh(x) z = Mul(h, h) y = Scan<BODY, num_scan_inputs = 1>(h)",
    "a state": (
        "h = Tanh(s) s_ = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c) "
        "{ f = Exp(a) c = Add(f, e) }, num_scan_inputs = 1>(h, x)"
    ),
    "another shape": "h = Mul(x, s) y = Scan<BODY, num_scan_inputs = 1>(h)",
}
BODY = "body = b (float[N,3] e) => (float[N,3] d) { f = Exp(e) d = Mul(f, e) }"

# What stays as it is.
STAYS = {
    "another axis": (
        "s_, y = Scan<body = b (float[T,3] a, float[T,3] e) => (float[T,3] c, float[T,3] d) "
        "{ c = Add(a, e) d = Mul(c, e) }, num_scan_inputs = 1, scan_input_axes = [1]>(r, x)"
    ),
    "another axis of the result": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d) "
        "{ c = Add(a, e) d = Mul(c, e) }, num_scan_inputs = 1, scan_output_axes = [1]>(s, x)"
    ),
    "another operator": (
        "s_, y = Scan<body = b (float[N,3] a, float[N,3] e) => (float[N,3] c, float[N,3] d) "
        "{ c = Add(a, e) d = CumSum(c, zero) }, num_scan_inputs = 1>(s, x)"
    ),
}
RANKS = {"s_": "A,B", "u_": "A,B", "y": "T,E,F", "z": "T,G,H", "t_": ""}


def graph_of(text, results=None):
    outputs = []
    for name in results or text.split(" = ")[0].split(", "):
        rank = "T,E,1,F" if "N,1,3" in text and name == "y" else RANKS[name]
        kind = "int64" if name == "t_" else "float"
        outputs.append(f"{kind}[{rank}] {name}" if rank else f"{kind} {name}")
    proto = model(
        "g (float[N,3] s, float[N,3] u, float[T,3] r, int64 t, float[T,N,3] x, float[T,N,6] k, float[6,3] w) "
        f"=> ({', '.join(outputs)}) {{ {text} }}",
        zero=np.array(0),
        step=np.array(2),
        scale=np.array(0.5),
        zeros=np.array([0]),
    )
    return load(onnx.shape_inference.infer_shapes(proto))


def feeds_of(graph, steps=5, rows=4):
    shapes = {"s": (rows, 3), "u": (rows, 3), "r": (steps, 3), "x": (steps, rows, 3), "k": (steps, rows, 6)}
    shapes["w"] = (6, 3)
    feeds = {name: RNG.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    feeds["t"] = np.array(3)
    return {x.name: feeds[x.name] for x in graph.graph.inputs}


def computed(graph, feeds, lowered=None, threads=1):
    device = Device("cpu", threads=threads, native=False)
    if lowered is None:
        return Session(device, graph).compute_arrays(feeds)
    return Session(device, lowered.model, library=lowered.library).compute_arrays(feeds)


def operators(found):
    return [node.op_type for node in found.model.graph.all_nodes()]


@pytest.fixture
def within(monkeypatch, tmp_path_factory):
    """Return a function that lowers a graph to the same kernels but leaves its scans to the runtime."""
    folder = tmp_path_factory.getbasetemp() / "scans"  # a cache of its own, which knows graphs, and not this form

    def lowered(graph, threads=1):
        with monkeypatch.context() as patch:
            patch.setenv("XDG_CACHE_HOME", str(folder))
            patch.setattr(lowering, "scan_kernel", lambda *_, **__: None)
            found = lower_to_kernels(graph, threads=threads)
        assert "Scan" in operators(found)
        return found

    return lowered


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        np.testing.assert_array_equal(found[name], values, err_msg=name)
        assert found[name].shape == values.shape


def assert_close(found, expected):
    for name, values in expected.items():
        assert found[name].shape == values.shape
        np.testing.assert_allclose(found[name], values, rtol=1e-5, atol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", SCANS)
def test_a_scan_is_the_runtimes(name, within):
    graph = graph_of(SCANS[name])
    lowered, inside = lower_to_kernels(graph), within(graph)
    assert plan(graph).counts["scans"] == SCANS[name].count("Scan")
    assert "Scan" not in operators(lowered)
    for steps, rows in (5, 4), (1, 1), (2, 7), (3, 0):
        feeds = feeds_of(graph, steps, rows)
        found = computed(graph, feeds, lowered)
        assert_close(found, computed(graph, feeds))
        assert_same(found, computed(graph, feeds, inside))


@pytest.mark.parametrize("name", [name for name in SCANS if "within" not in name])
def test_without_iterations_states_stay_and_results_are_empty(name):
    """The runtime's Scan fails here."""
    graph = graph_of(SCANS[name])
    feeds, one = feeds_of(graph, 0), feeds_of(graph, 1)
    found, shapes = computed(graph, feeds, lower_to_kernels(graph)), computed(graph, one)
    for result, values in found.items():
        if result.endswith("_"):
            np.testing.assert_array_equal(values, feeds[result[0]])
        else:
            assert values.shape == (0, *shapes[result].shape[1:])


@pytest.mark.parametrize(("text", "moves"), [(x, True) for x in MOVED.values()] + [(x, False) for x in KEPT.values()])
def test_sequences_are_computed_where_they_are_read(text, moves):
    graph = graph_of(text.replace("BODY", BODY), [y for y in ("y", "z", "s_") if f" {y} = " in text])
    nodes = [node.op_type[0] for node in plan(graph).model.graph if node.op_type != "Constant"]
    assert (nodes == ["s"]) == moves
    for steps in 1, 5:
        feeds = feeds_of(graph, steps)
        assert_close(computed(graph, feeds, lower_to_kernels(graph)), computed(graph, feeds))


# Bodies whose rows meet, so that threads cannot share them.
MEET = {
    "a sum of rows": "f = ReduceSum<keepdims = 1>(a, zeros) g = Add(f, e) c = Tanh(g)",
    "a mean of all": "f = ReduceMean(e) c = Mul(a, f)",
    "products of rows": "f = Transpose(e) g = MatMul(a, f) h = Tanh(g) c = MatMul(h, e)",
    "a tensor of rows besides": "f = Mul(a, u) c = Add(f, e)",
}


@pytest.mark.parametrize("text", [*MEET.values(), "f = Exp(e) c = Sub(f, a)"])
@pytest.mark.slow
def test_threads_share_rows_that_do_not_meet(text):
    body = f"body = b (float[N,3] a, float[N,3] e) => (float[N,3] c) {{ {text} }}"
    graph = graph_of(f"s_ = Scan<{body}, num_scan_inputs = 1>(s, x)")
    (inner,) = bodies(graph.graph)
    note_rows(inner, NodeForms({"": 21}))
    assert inner.meta[BY_ROWS] == (text not in MEET.values())
    lowered = [lower_to_kernels(graph, threads=threads) for threads in (1, 2, 3)]
    for rows in 5, 16, 37:
        feeds = feeds_of(graph, 4, rows)
        found = [computed(graph, feeds, one, threads) for threads, one in enumerate(lowered, 1)]
        assert_close(found[0], computed(graph, feeds))
        assert_same(found[1], found[0])
        assert_same(found[2], found[0])


@pytest.mark.parametrize("name", STAYS)
def test_what_no_kernel_computes_stays(name):
    graph = graph_of(STAYS[name])
    assert plan(graph).counts["scans"] == 0
    assert "Scan" in operators(plan(graph))
    feeds = feeds_of(graph)
    lowered = lower_to_kernels(graph)
    if lowered is not None:
        assert_close(computed(graph, feeds, lowered), computed(graph, feeds))


def test_scans_can_be_left_out():
    graph = graph_of(SCANS["products"])
    assert plan(graph, ["scans"]).counts["scans"] == 0
    assert "Scan" in operators(plan(graph, ["scans"]))


def test_sequences_of_other_lengths_are_an_error():
    graph = graph_of(SCANS["sequences alone"])
    feeds = feeds_of(graph)
    feeds["k"] = feeds["k"][1:]
    with pytest.raises(graphopt.GraphoptError, match="another shape"):
        computed(graph, feeds, lower_to_kernels(graph))


UNINFERRED = {
    ("RNN-activations=['Relu','Softplus']-direction=bidirectional", True),
    ("GRU-direction=bidirectional-lengths", True),
    ("GRU-linear_before_reset=1-direction=bidirectional-no-bias", True),
    ("LSTM-direction=bidirectional-clip=0.3-lengths-peepholes", False),
    ("LSTM-direction=bidirectional-clip=0.3-lengths-peepholes", True),
    ("LSTM-direction=bidirectional-lengths", True),
    ("RNN-direction=bidirectional-lengths", True),
}


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("variant", [variant for variant in recurrent.VARIANTS if variant.runtime], ids=str)
@pytest.mark.sample(6)
@pytest.mark.slow
def test_gradients_of_recurrent_layers(variant, dynamic, within, monkeypatch):
    monkeypatch.setattr(recurrent.recurrent, "LARGE", 0)
    feeds = recurrent.inputs(variant, np.float32)
    proto = recurrent.model_of(variant, np.float32, dynamic)
    graph = gradients.gradient_model(proto)
    outputs = gradients.evaluate_reference(load(proto), feeds)
    feeds |= gradients.random_seeds(outputs)
    feeds = {x.name: feeds[x.name].astype(np.float32) for x in graph.graph.inputs if x.name in feeds}
    found = computed(graph, feeds, lower_to_kernels(graph))
    assert_close(found, computed(graph, feeds))
    if dynamic and (variant.states or "input_forget" in variant.attributes):
        return  # sizes that have two names, or are read at run time
    if (str(variant), dynamic) in UNINFERRED:
        return  # sizes that inference does not find, so that kernels would have to trust declared ones
    assert "Scan" not in operators(plan(graph))
    assert_same(found, computed(graph, feeds, within(graph)))


def trained(layer, rate=0.1, features=24, hidden=40):
    """Return the step of a layer of a size that products share among threads, and of a head."""
    gates = recurrent.GATES[layer]
    proto = model(
        f"""g (float[N,7,{features}] x) => (float[N,3] y) {{
            p = Transpose<perm = [1,0,2]>(x)
            o, h = {layer}<direction = "bidirectional", hidden_size = {hidden}>(p, w, r, b)
            q = Transpose<perm = [1,0,2]>(h)
            f = Flatten(q)
            y = MatMul(f, v)
        }}""",
        w=RNG.standard_normal((2, gates * hidden, features)) / 5,
        r=RNG.standard_normal((2, gates * hidden, hidden)) / 6,
        b=RNG.standard_normal((2, 2 * gates * hidden)),
        v=RNG.standard_normal((2 * hidden, 3)),
    )
    return graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(rate))


@pytest.mark.parametrize("layer", recurrent.GATES)
@pytest.mark.slow
def test_a_training_step_is_the_plain_one_on_any_threads(layer, within, monkeypatch):
    monkeypatch.setattr(recurrent.recurrent, "LARGE", 0)
    graph = load(trained(layer, 1e3))  # gradients are most of the new weights
    lowered = {threads: lower_to_kernels(graph, threads=threads) for threads in (1, 2)}
    assert plan(graph).counts["scans"] == 4
    hoisted = graph.clone()
    fold_updates(hoisted)
    for inner in bodies(hoisted.graph):
        note_rows(inner, NodeForms(hoisted.opset_imports))
        assert inner.meta[BY_ROWS]
    for rows in 1, 130:
        feeds = {
            "x": RNG.standard_normal((rows, 7, 24)).astype(np.float32),
            "target": RNG.standard_normal((rows, 3)).astype(np.float32),
        }
        found = {threads: computed(graph, feeds, each, threads) for threads, each in lowered.items()}
        expected = computed(graph, feeds)
        for name, values in expected.items():
            assert_near(found[1][name], values, name, layers=7)
        assert_same(found[2], found[1])
        packed = "in the runtime's Scan, weights are not packed, and few rows are multiplied in float32"
        for name, values in computed(graph, feeds, within(graph)).items():
            assert_equal_in_float32(found[1][name], values, packed, layers=7)


@pytest.mark.slow
def test_several_steps_in_a_call_are_single_steps(monkeypatch):
    monkeypatch.setattr(recurrent.recurrent, "LARGE", 0)
    step = trained("LSTM")
    batches = [
        {
            "x": RNG.standard_normal((4, 7, 24)).astype(np.float32),
            "target": RNG.standard_normal((4, 3)).astype(np.float32),
        }
        for _ in range(6)
    ]
    losses = []
    for count in 1, 3:
        executor = graphopt.Executor(step, native=True, steps_per_call=count)
        losses.append([x["loss"] for x in executor.run(batches)])
    assert losses[0] == losses[1]

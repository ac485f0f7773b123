"""Forward and backward apart: the gradients of the fused training graph, on every engine that the runtime has."""

from __future__ import annotations

import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import test_control_flow as control_flow
import torch
from builders import attention, linear, mlp, model
from onnx.reference import ReferenceEvaluator
from steps import assert_equal
from torch import nn

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.runtime.executor import run

AGENT = hasattr(onnxruntime.capi._pybind_state, "TrainingAgent")
ENGINES = [
    "graphs",
    pytest.param("agent", marks=pytest.mark.skipif(not AGENT, reason="onnxruntime-training alone has the agent")),
]
RNG = np.random.default_rng(17)


@pytest.fixture(params=ENGINES)
def engine(request):
    return request.param


def cnn():
    return model(
        """g (float[N,2,6,6] x) => (float[N,3] y) {
            c = Conv<pads=[1,1,1,1], strides=[2,2]>(x, kernel, bias)
            r = Relu(c)
            p = MaxPool<kernel_shape=[2,2]>(r)
            f = Flatten(p)
            y = MatMul(f, weight)
        }""",
        kernel=RNG.standard_normal((4, 2, 3, 3)),
        bias=RNG.standard_normal(4),
        weight=RNG.standard_normal((16, 3)),
    )


def recurrent(hidden=4):
    return model(
        f"""g (float[5,N,3] x) => (float[5,1,N,{hidden}] y) {{ y = LSTM<hidden_size={hidden}>(x, w, r, b) }}""",
        w=RNG.standard_normal((1, 4 * hidden, 3)),
        r=RNG.standard_normal((1, 4 * hidden, hidden)) / 2,
        b=RNG.standard_normal((1, 8 * hidden)),
    )


def large_recurrent():
    """From 32 units on a Scan stands in for the operator in training."""
    return recurrent(32)


def double_mlp():
    return mlp(dtype=np.float64)


def double_attention():
    return attention(np.float64)


def two_by_two():
    """Two inputs, of which one is a lookup's indices, and two outputs that share a layer."""
    return model(
        """g (double[N,3] x, int64[N] i) => (double[N,2] y, double[N] z, int64[N] best) {
            p = MatMul(x, w)
            e = Gather(table, i)
            h = Add(p, e)
            y = Tanh(h)
            z = ReduceSum<keepdims=0>(h, axis)
            best = ArgMax<axis=1, keepdims=0>(h)
        }""",
        dtype=np.float64,
        w=RNG.standard_normal((3, 2)),
        table=RNG.standard_normal((5, 2)),
        axis=np.array([1]),
    )


FUSED = {
    mlp: (7, 4),
    double_mlp: (7, 4),
    cnn: (3, 2, 6, 6),
    double_attention: (2, 6, 4),
    recurrent: (5, 2, 3),
    large_recurrent: (5, 2, 3),
}


@pytest.mark.parametrize("build", FUSED, ids=lambda build: build.__name__)
def test_gradients_are_the_fused_training_graphs(engine, build):
    if engine == "agent" and build in (recurrent, large_recurrent):
        pytest.skip("the agent takes no body that uses computed values")
    proto = build()
    layer = graphopt.ForwardBackward(proto, engine=engine, threads=1)
    assert layer.engine == engine
    fused = graphopt.standard(loss=passes.MeanSquaredError()).until("gradient")(proto)
    dtype = next(iter(layer.inputs.values())).dtype.numpy()
    x = RNG.standard_normal(FUSED[build]).astype(dtype)
    forward = layer.forward(x)
    target = RNG.standard_normal(forward["y"].shape).astype(dtype)
    found = forward.backward(2 * (forward["y"] - target) / target.size)
    expected = run(fused, {"x": x, "target": target})
    np.testing.assert_allclose(forward["y"], expected["y"], rtol=1e-5, atol=1e-6)
    assert sorted(found) == sorted([*layer.parameters, "x"])
    for name in layer.parameters:
        np.testing.assert_allclose(found[name], expected[f"{name}.grad"], rtol=2e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("build", [double_mlp, double_attention, two_by_two], ids=lambda build: build.__name__)
def test_gradients_by_finite_differences(engine, build):
    layer = graphopt.ForwardBackward(build(), engine=engine)
    x = RNG.standard_normal(tuple(d if isinstance(d, int) else 4 for d in layer.inputs["x"].shape))
    feeds = {"x": x} | ({"i": np.array([0, 3, 3, 1])} if build is two_by_two else {})
    forward = layer.forward(feeds)
    seeds = {n: RNG.standard_normal(y.shape) for n, y in forward.items() if y.dtype == np.float64}
    found = forward.backward(seeds)
    start = layer.parameters
    assert sorted(found) == sorted([*start, "x"])

    def objective(**changed):
        layer.set_parameters({name: array for name, array in changed.items() if name in start})
        outputs = layer.forward({**feeds, **{n: a for n, a in changed.items() if n == "x"}}, training=False)
        layer.set_parameters(start)
        return sum(np.vdot(outputs[name], seed) for name, seed in seeds.items())

    for name, at in {**start, "x": x}.items():
        direction = RNG.standard_normal(at.shape)
        slope = (objective(**{name: at + 1e-5 * direction}) - objective(**{name: at - 1e-5 * direction})) / 2e-5
        np.testing.assert_allclose(np.vdot(found[name], direction), slope, rtol=1e-6, err_msg=name)


@pytest.mark.parametrize("name", control_flow.CASES)
def test_what_bodies_keep_is_saved(name):
    layer = graphopt.ForwardBackward(control_flow.model_of(name, "float"), engine="graphs", parameters=None)
    values = {n: a.astype(np.float32) if a.dtype == float else a for n, a in control_flow.seeded(name).items()}
    forward = layer.forward({name: values[name] for name in layer.inputs})
    found = forward.backward({n: values[f"{n}.seed"] for n in layer.outputs if f"{n}.seed" in values})
    for x, expected in control_flow.proved(name).items():
        zeros = np.zeros_like(expected)
        np.testing.assert_allclose(found.get(x, zeros), expected, rtol=2e-5, atol=2e-5, err_msg=x)


@pytest.mark.skipif(not AGENT, reason="onnxruntime-training alone has the agent")
def test_the_agent_is_spared_bodies_that_it_aborts_on():
    proto = control_flow.model_of("if", "float")
    assert graphopt.ForwardBackward(proto, parameters=None).engine == "graphs"
    with pytest.raises(GraphoptError, match=r"^engine 'agent': .* none takes If node .*, whose body uses 'a' from aro"):
        graphopt.ForwardBackward(proto, engine="agent", parameters=None)
    assert graphopt.ForwardBackward(control_flow.model_of("scan", "float"), parameters=None).engine == "agent"


def test_several_in_flight_in_any_order(engine):
    layer = graphopt.ForwardBackward(double_mlp(), engine=engine)
    xs = [RNG.standard_normal((batch, 4)) for batch in (3, 8, 1)]
    seeds = [RNG.standard_normal((len(x), 3)) for x in xs]
    expected = [dict(layer.forward(x).backward(dy)) for x, dy in zip(xs, seeds, strict=True)]
    forwards = [layer.forward(x) for x in xs]
    for i in (1, 0, 2):
        found = forwards[i].backward(seeds[i])
        assert_equal(found, expected[i])


@pytest.mark.parametrize("end", ["y = Tanh(p)", "t = Tanh(p) y = Reshape(t, shape)", "t = Tanh(p) y = Identity(t)"])
def test_a_backward_sees_its_own_forwards_parameters_inputs_and_outputs(engine, end):
    proto = model(
        f"g (double[N,3] x) => (double[N,2] y) {{ p = MatMul(x, w) {end} }}",
        dtype=np.float64,
        w=RNG.standard_normal((3, 2)),
        shape=np.array([-1, 2]),
    )
    layer = graphopt.ForwardBackward(proto, engine=engine)
    x, dy = RNG.standard_normal((4, 3)), RNG.standard_normal((4, 2))
    expected = dict(layer.forward(x).backward(dy))
    given = x.copy()
    forward = layer.forward(given)
    y = forward["y"]
    y -= 1
    given[:] = 0
    layer.set_parameters([np.zeros((3, 2))])
    found = forward.backward(dy)
    assert_equal(found, expected)
    assert not layer.forward(x)["y"].any()


def test_backward_takes_the_latest_forward(engine):
    layer = graphopt.ForwardBackward(double_mlp(), engine=engine)
    x, dy = RNG.standard_normal((2, 4)), np.ones((2, 3))
    expected = dict(layer.forward(x).backward(dy))
    layer.forward(-x)
    layer.forward(x)
    layer.forward(-x, training=False)
    assert_equal(layer.backward({"y": dy}), expected)


def test_gradients_left_out_are_zero(engine):
    layer = graphopt.ForwardBackward(two_by_two(), engine=engine)
    feeds = {"x": RNG.standard_normal((4, 3)), "i": np.arange(4)}
    dy, dz = RNG.standard_normal((4, 2)), RNG.standard_normal(4)
    both = layer.forward(feeds).backward(dy, dz)
    alone = layer.forward(*feeds.values()).backward(y=dy), layer.forward(**feeds).backward(None, dz)
    nothing = layer.forward(feeds).backward()
    for name in both:
        np.testing.assert_allclose(alone[0][name] + alone[1][name], both[name], rtol=1e-12)
        assert not nothing[name].any()


def test_outputs_that_are_inputs_or_constants(engine):
    proto = model(
        "g (float[N,2] x, float[N,2] u) => (float[N,2] u2, float[N,2] y, float[2] w2) "
        "{ u2 = Identity(u)\n y = Mul(x, w)\n w2 = Identity(w) }",
        w=np.array([2.1, -3.3]),
    )
    layer = graphopt.ForwardBackward(proto, engine=engine)
    x, u = RNG.standard_normal((2, 3, 2)).astype(np.float32)
    forward = layer.forward(x, u)
    np.testing.assert_array_equal(forward["u2"], u)
    np.testing.assert_array_equal(forward["w2"], np.float32([2.1, -3.3]))
    found = forward.backward({"u2": u, "y": np.ones_like(x), "w2": np.array([5, 5], np.float32)})
    np.testing.assert_allclose(found["x"], np.broadcast_to(np.float32([2.1, -3.3]), (3, 2)))
    np.testing.assert_allclose(found["w"], x.sum(0) + 5, rtol=1e-5)
    np.testing.assert_array_equal(found["u"], u)


def test_running_statistics_go_on_in_training_alone(engine):
    rate = np.float32(0.9)  # of BatchNormalization: how much of the running statistics stays
    proto = model(
        """g (float[N,3] x) => (float[N,3] y) {
            h = MatMul(x, w)
            y = BatchNormalization(h, scale, shift, mean, var)
        }""",
        w=RNG.standard_normal((3, 3)),
        scale=np.ones(3),
        shift=np.zeros(3),
        mean=RNG.standard_normal(3),
        var=np.ones(3),
    )
    layer = graphopt.ForwardBackward(proto, engine=engine, training=passes.TrainingMode())
    x = RNG.standard_normal((6, 3)).astype(np.float32)
    before = layer.state
    inferred = ReferenceEvaluator(proto).run(None, {"x": x})[0]
    np.testing.assert_allclose(layer.forward(x, training=False)["y"], inferred, rtol=1e-4, atol=1e-5)
    assert all(np.array_equal(before[name], array) for name, array in layer.state.items())
    forward = layer.forward(x)
    h = torch.tensor(x @ before["w"], requires_grad=True)
    expected = nn.functional.batch_norm(h, None, None, training=True)
    np.testing.assert_allclose(forward["y"], expected.detach(), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(
        layer.state["mean"],
        rate * before["mean"] + (1 - rate) * h.detach().numpy().mean(0),
        rtol=1e-4,
        atol=1e-6,
    )
    np.testing.assert_allclose(
        layer.state["var"], rate * before["var"] + (1 - rate) * h.detach().numpy().var(0), rtol=1e-4
    )
    dy = torch.tensor(RNG.standard_normal((6, 3)), dtype=torch.float32)
    expected.backward(dy)
    np.testing.assert_allclose(forward.backward(dy)["w"], x.T @ h.grad.numpy(), rtol=1e-3, atol=1e-5)
    trained = ReferenceEvaluator(layer.trained()).run(None, {"x": x})[0]
    np.testing.assert_allclose(layer.forward(x, training=False)["y"], trained, rtol=1e-4, atol=1e-5)
    layer.update_state(before)
    np.testing.assert_allclose(layer.forward(x, training=False)["y"], inferred, rtol=1e-4, atol=1e-5)


def test_dropout_drops_alike_forward_and_back(engine):
    proto = model(
        "g (float[N,4] x) => (float[N,4] y) { p = Mul(x, w)\n y = Dropout(p, half) }",
        w=np.ones(4),
        half=np.array(0.5),
    )
    layer = graphopt.ForwardBackward(
        proto, engine=engine, training=passes.TrainingMode(), parameters=passes.Parameters("w")
    )
    x = np.ones((50, 4), np.float32)
    forwards = [layer.forward(x) for _ in range(3)]
    assert not np.array_equal(forwards[0]["y"], forwards[1]["y"])
    for forward in forwards:
        assert set(np.unique(forward["y"])) == {0, 2}
        np.testing.assert_array_equal(forward.backward(x)["x"], forward["y"])
    np.testing.assert_array_equal(layer.forward(x, training=False)["y"], x)


def test_only_what_backward_reads_is_saved():
    layer = graphopt.ForwardBackward(mlp())
    assert [value.name for value in layer.forward_model.graph.outputs] == ["y", "a0"]
    assert [value.name for value in layer.backward_model.graph.inputs] == [
        "x", "fc0.weight", "fc1.weight", "y.seed", "a0",
    ]  # fmt: skip
    flat = model("g (float[N,2,2] x) => (float[N,3] y) { f = Flatten(x)\n y = MatMul(f, w) }", w=np.ones((4, 3)))
    layer = graphopt.ForwardBackward(flat)
    assert [value.name for value in layer.forward_model.graph.outputs] == ["y"]  # f is a view of x


def test_both_files_run_by_any_host(tmp_path):
    layer = graphopt.ForwardBackward(double_attention(), engine="graphs")
    x, dy = RNG.standard_normal((2, 2, 6, 4))
    expected = layer.forward(x).backward(dy)
    for name in ("forward", "backward"):
        part = getattr(layer, f"{name}_model")
        onnx.checker.check_model(ir.to_proto(part), full_check=True)
        assert set(part.opset_imports) == {""}
        graphopt.save(part, tmp_path / f"{name}.onnx")
    forward, backward = (ReferenceEvaluator(onnx.load(tmp_path / f"{name}.onnx")) for name in ("forward", "backward"))
    values = {"x": x, "y.seed": dy, **layer.parameters}
    values |= dict(zip(forward.output_names, forward.run(None, {"x": x}), strict=True))
    found = backward.run(None, {name: values[name] for name in backward.input_names})
    for name, array in zip(backward.output_names, found, strict=True):
        np.testing.assert_allclose(array, expected[name.removesuffix(".grad")], rtol=1e-9, atol=1e-12)


def test_parameters_by_name_and_by_position(engine):
    layer = graphopt.ForwardBackward(mlp(), engine=engine)
    names = ["fc0.bias", "fc0.weight", "fc1.bias", "fc1.weight"]
    assert list(layer.parameters) == names
    arrays = [RNG.standard_normal(a.shape).astype(np.float32) for a in layer.parameters.values()]
    layer.set_parameters(arrays)
    arrays[0][:] = 7  # what was given is copied
    layer.set_parameters({"fc1.bias": np.ones(3, np.float32)})
    found = layer.parameters
    assert found["fc0.bias"].max() < 7
    np.testing.assert_array_equal(found["fc1.bias"], 1)
    np.testing.assert_array_equal(found["fc1.weight"], arrays[3])
    layer.parameters = arrays
    np.testing.assert_array_equal(layer.parameters["fc0.bias"], 7)
    x = np.ones((2, 4), np.float32)
    trained = ReferenceEvaluator(layer.trained()).run(None, {"x": x})[0]
    np.testing.assert_allclose(trained, layer.forward(x)["y"], rtol=1e-5)


def test_what_trains_is_chosen_and_inputs_may_be_left_out(engine):
    layer = graphopt.ForwardBackward(
        mlp(),
        engine=engine,
        parameters=passes.Parameters("fc1.*"),
        gradient=passes.VectorJacobianProduct(inputs=None),
    )
    found = layer.forward(np.ones((2, 4), np.float32)).backward(np.ones((2, 3), np.float32))
    assert sorted(found) == ["fc1.bias", "fc1.weight"] == list(layer.parameters)


def test_tensors_are_shared_where_they_lie(engine):
    layer = graphopt.ForwardBackward(mlp(), engine=engine)
    x, dy = torch.randn(5, 4), torch.randn(5, 3)
    forward = layer.forward(x.numpy())
    expected = forward.backward(dy.numpy())
    for tensors in (
        (x, dy),
        [onnxruntime.OrtValue.ortvalue_from_numpy(t.numpy()) for t in (x, dy)],
    ):
        again = layer.forward(tensors[0])
        y = torch.from_dlpack(again.on_device["y"])
        assert y.data_ptr() == again["y"].ctypes.data
        found = again.backward(tensors[1])
        for name in expected:
            np.testing.assert_array_equal(found[name], expected[name])
    given = torch.zeros(3)
    layer.set_parameters({"fc1.bias": given})
    given += 1  # a tensor becomes the parameter
    np.testing.assert_array_equal(layer.parameters["fc1.bias"], 1)
    layer.set_parameters({"fc1.bias": found.on_device["fc1.bias"]})
    np.testing.assert_array_equal(layer.parameters["fc1.bias"], found["fc1.bias"])


def test_boolean_tensors(engine):
    proto = model(
        "g (float[N] x, bool[N] c) => (float[N] y) { z = Mul(x, w)\n y = Where(c, z, x) }",
        w=np.array([3.0, 3]),
    )
    layer = graphopt.ForwardBackward(proto, engine=engine, parameters=passes.Parameters("w"))
    x, c = np.array([1, 2], np.float32), np.array([True, False])
    for given in (c, torch.tensor([True, False])):
        forward = layer.forward(x, given)
        np.testing.assert_array_equal(forward["y"], [3, 2])
        np.testing.assert_array_equal(forward.backward(x)["x"], [3, 2])


def test_auto_takes_the_agent_where_there_is_one():
    assert graphopt.ForwardBackward(linear()).engine == ("agent" if AGENT else "graphs")


@pytest.mark.skipif(AGENT, reason="this runtime has an agent")
def test_an_agent_that_is_not_there():
    with pytest.raises(GraphoptError, match=r"^engine 'agent': expected a TrainingAgent, onnxruntime .* has none: pip"):
        graphopt.ForwardBackward(linear(), engine="agent")


@pytest.mark.slow
def test_no_torch_is_needed():
    code = """
import sys, numpy as np
sys.modules["torch"] = None
sys.path.insert(0, "tests")
from builders import linear
import graphopt
layer = graphopt.ForwardBackward(linear())
print(layer.forward(np.ones((2, 3), np.float32)).backward(np.ones((2, 2), np.float32))["b"])
"""
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[2. 2.]\n"


ONES = np.ones((2, 3), np.float32)
STRIDED = r"expected a tensor to share: found a view that is not contiguous: copy it, in PyTorch with .contiguous\(\)$"


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda f: f.forward(), "input 'x': missing; found nothing"),
        (lambda f: f.forward(None), "input 'x': missing; found x"),
        (lambda f: f.forward(z=ONES), "unknown input 'z'; known: x"),
        (lambda f: f.forward(ONES, ONES), r"input: expected at most 1 \(x\), found 2"),
        (lambda f: f.forward(ONES.astype(float)), "input 'x': expected float32, found float64"),
        (lambda f: f.forward(torch.ones(2, 3, dtype=torch.int64)), "input 'x': expected float32, found int64"),
        (lambda f: f.forward(ONES[:, :2]), r"input 'x': expected shape \[N,3\], found \[2, 2\]"),
        (lambda f: f.forward([[1.0]]), "input 'x': expected an array, an OrtValue or a tensor with DLPack, found list"),
        (lambda f: f.forward(torch.ones(2, 3, requires_grad=True)), "input 'x': expected a tensor to share"),
        (lambda f: f.forward(torch.ones(3, 2).T), f"input 'x': {STRIDED}"),
        (lambda f: f.forward(torch.ones(2, 1).expand(2, 3)), f"input 'x': {STRIDED}"),
        (
            lambda f: f.forward(torch.ones(2, 3, dtype=torch.complex64)),
            "input 'x': expected a tensor to share: found an element type that onnxruntime does not take through "
            "DLPack: convert the tensor",
        ),
        (lambda f: f.set_parameters({"c": ONES}), "unknown parameter 'c'; known: b, w"),
        (lambda f: f.set_parameters({"w": ONES}), r"state 'w': expected shape \[3,2\], found \[2, 3\]"),
        (lambda f: f.set_parameters({"b": np.ones(2), "w": ONES}), "state 'b': expected float32, found float64"),
        (lambda f: f.set_parameters({"w": torch.ones(2, 3).T}), f"state 'w': {STRIDED}"),
        (lambda f: f.set_parameters([ONES]), r"parameters: expected 2 in alphabetical order \(b, w\), found 1"),
        (lambda f: f.forward(ONES, training=False).backward(ONES[:, :2]), "backward: expected a forward pass"),
    ],
)  # fmt: skip
def test_what_does_not_fit_is_refused_and_nothing_changes(engine, call, message):
    layer = graphopt.ForwardBackward(linear(), engine=engine)
    with pytest.raises(
        GraphoptError,
        match=r"^backward: expected a forward pass in training, found none: call forward first$",
    ):
        layer.backward(ONES[:, :2])
    before = layer.state
    with pytest.raises(GraphoptError, match=f"^{message}") as caught:
        call(layer)
    assert "\n" not in str(caught.value)
    assert all(np.array_equal(before[name], array) for name, array in layer.state.items())


@pytest.mark.parametrize(
    ("gradients", "message"),
    [
        ({"q": ONES}, "unknown gradient of output 'q'; known: best, y, z"),
        ({"y": np.ones((3, 2))}, r"gradient of output 'y': expected shape \[4,2\], found \[3, 2\]"),
        ({"y": np.ones((4, 2), np.float32)}, "gradient of output 'y': expected float64, found float32"),
        (
            {"best": np.ones(4)},
            "gradient of output 'best': expected none for type INT64, found one: leave it out",
        ),
    ],
)
def test_gradients_that_do_not_fit_leave_the_way_back_open(engine, gradients, message):
    layer = graphopt.ForwardBackward(two_by_two(), engine=engine)
    forward = layer.forward(np.ones((4, 3)), np.arange(4))
    with pytest.raises(GraphoptError, match=f"^{message}$|^{message}: convert"):
        forward.backward(gradients)
    assert "w" in forward.backward(np.ones((4, 2)))
    for again in (forward, layer):
        with pytest.raises(
            GraphoptError,
            match="backward: expected a forward pass in training without a backward pass so far",
        ):
            again.backward(np.ones((4, 2)))


def test_what_cannot_be_differentiated_or_started_is_refused():
    with pytest.raises(GraphoptError, match="engine: expected 'auto', 'graphs' or 'agent', found 'both'"):
        graphopt.ForwardBackward(linear(), engine="both")
    whole = model("g (int64[N] i) => (int64[N] y) { y = Add(i, i) }")
    with pytest.raises(GraphoptError, match="no gradient to compute: expected parameters"):
        graphopt.ForwardBackward(whole, parameters=None)
    two = model(
        "g (float[N,2] x) => (float[N,2] y, bool[N,2] z) { y = Mul(x, w)\n z = Less(x, v) }",
        w=np.ones(2),
        v=np.ones(2),
    )
    with pytest.raises(GraphoptError, match=r"the outputs do not depend on 'v' .*: freeze them"):
        graphopt.ForwardBackward(two, parameters=passes.Parameters("[vw]"))
    refused = model("g (float[N,2] x) => (float[N,2] y) { p = Mul(x, w)\n y = com.example.Odd(p) }", w=np.ones(2))
    refused.opset_import.add(domain="com.example", version=1)
    with pytest.raises(GraphoptError):
        graphopt.ForwardBackward(refused)
    taken = model(
        'g (float[N,2] x, float[N,2] "y.seed") => (float[N,2] y) { p = Mul(x, w)\n y = Add(p, "y.seed") }',
        w=np.ones(2),
    )
    with pytest.raises(GraphoptError, match=r"the model already has a value named 'y\.seed'"):
        graphopt.ForwardBackward(taken)

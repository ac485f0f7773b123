"""Forms for other runtimes compute the same values, on ONNX Runtime and by ONNX's reference evaluator."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import model
from host_graphs import GRAPHS, batches

import graphopt
import passes
from graphopt import models
from graphopt.graph.shapes import infer
from graphopt.targets.portable import FORMS
from graphopt.testing.reference import evaluator

RNG = np.random.default_rng(0)


def numbers(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


CASES = {
    "size": (None, "g (float[N,3] x) => (int64 y) { y = Size(x) }", {"x": numbers(4, 3)}),
    "size of a scalar": (None, "g (float x) => (int64 y) { y = Size(x) }", {"x": numbers()}),
    "sum": (
        None,
        "g (float[N,3] a, float[3] b, float[N,1] c) => (float[N,3] y) { y = Sum(a, b, c) }",
        {"a": numbers(4, 3), "b": numbers(3), "c": numbers(4, 1)},
    ),
    "sum in a body": (
        None,
        """g (float[3] a, bool c) => (float[3] y) { y = If(c) <
            then_branch = yes () => (float[3] p) { p = Sum(a, a, a) },
            else_branch = no () => (float[3] q) { q = Exp(a) }> }""",
        {"a": numbers(3), "c": np.array(True)},
    ),
    "log softmax": (
        "webgpu",
        "g (float[N,3,5] x) => (float[N,3,5] y) { y = LogSoftmax<axis=1>(x) }",
        {"x": 50 * numbers(4, 3, 5)},
    ),
    "log softmax of the last axis": (
        "webgpu",
        "g (float[N,5] x) => (float[N,5] y) { y = LogSoftmax(x) }",
        {"x": numbers(4, 5)},
    ),
    "grouped convolution": (
        "webgpu",
        """g (float[N,8,6,6] x, float[20,2,3,3] w, float[20] b) => (float[N,20,P,Q] y) {
            y = Conv<group=4, pads=[1,0,1,0], strides=[2,1]>(x, w, b) }""",
        {"x": numbers(2, 8, 6, 6), "w": numbers(20, 2, 3, 3), "b": numbers(20)},
    ),
    "grouped convolution of a batch as channels": (
        "webgpu",
        "g (float[3,C,6] x, float[72,M,4] w) => (float[3,72,P] y) { y = Conv<group=8, dilations=[1]>(x, w) }",
        {"x": numbers(3, 16, 6), "w": numbers(72, 2, 4)},
    ),
    "split into many": (
        "webgpu",
        """g (float[2,19] x) => (float[2,2] a, float[2,1] j) {
            a, b, c, d, e, f, g, h, i, j = Split<axis=-1, num_outputs=10>(x) }""",
        {"x": numbers(2, 19)},
    ),
    "batch normalization": (
        "tract",
        """g (float[N,3,4,4] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[N,3,4,4] y) {
            w = Exp(v) y = BatchNormalization<epsilon=0.01>(x, s, b, m, w) }""",
        {"x": numbers(2, 3, 4, 4)} | {name: numbers(3) for name in "sbmv"},
    ),
    "batch normalization of rows": (
        "mnn",
        """g (float[N,3] x, float[3] s, float[3] b, float[3] m, float[3] v) => (float[N,3] y) {
            w = Exp(v) y = BatchNormalization(x, s, b, m, w) }""",
        {"x": numbers(2, 3)} | {name: numbers(3) for name in "sbmv"},
    ),
    "layer normalization": (
        "tvm",
        """g (float[N,3,5] x, float[3,5] s, float[3,5] b) => (float[N,3,5] y, float[N,1,1] m, float[N,1,1] i) {
            y, m, i = LayerNormalization<axis=1, epsilon=0.01>(x, s, b) }""",
        {"x": numbers(2, 3, 5), "s": numbers(3, 5), "b": numbers(3, 5)},
    ),
    "layer normalization without a bias": (
        "tvm",
        """g (float[N,5] x, float[5] s) => (float[N,5] y, float[N,1] i) {
            y, m, i = LayerNormalization(x, s) }""",
        {"x": numbers(2, 5), "s": numbers(5)},
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_a_form_computes_the_same_values(name):
    target, text, feeds = CASES[name]
    given = ir.from_proto(model(text))
    infer(given)
    written = given.clone()
    passes.Portable(target)(written)
    onnx.checker.check_model(ir.to_proto(written), full_check=True)
    before, after = ({node.op_type for node in m.graph.all_nodes()} for m in (given, written))
    assert before - after or "Pad" in after
    expected, found = (graphopt.run(ir.to_proto(m), feeds) for m in (given, written))
    assert list(expected) == list(found)
    reference = dict(zip(found, evaluator(written).run(None, feeds), strict=True))
    for key, value in expected.items():
        for one in (found[key], reference[key]):
            assert (one.dtype, one.shape) == (value.dtype, value.shape)
            np.testing.assert_allclose(one, value, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize(
    ("group", "filters", "stays"), [(8, 72, False), (8, 64, True), (8, 8, True), (3, 30, False)]
)
def test_convolutions_that_webgpu_computes_correctly_stay(group, filters, stays):
    proto = model(
        f"""g (float[N,{2 * group},6] x, float[{filters},2,3] w) => (float[N,{filters},P] y) {{
            y = Conv<group={group}>(x, w) }}"""
    )
    written = passes.Portable("webgpu")(ir.from_proto(proto)).model
    assert (len(written.graph) == 1) == stays


@pytest.mark.parametrize("target", [None, *FORMS])
@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.sample(12)
@pytest.mark.slow
def test_training_graphs_stay_the_same(name, target):
    step = GRAPHS[name][0]()
    written = step.clone()
    passes.Portable(target)(written)
    assert [y.name for y in written.graph.outputs] == [y.name for y in step.graph.outputs]
    first, second = (graphopt.Executor(m, threads=1) for m in (step, written))
    start, *others = batches(name, 5)
    for key, value in first.evaluate(start).items():
        np.testing.assert_allclose(second.evaluate(start)[key], value, rtol=1e-5, atol=1e-5)
    for batch in (start, *others):
        expected, found = first.step(batch), second.step(batch)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-5)
    types = {node.op_type for node in written.graph.all_nodes()}
    assert "Size" not in types
    assert types.isdisjoint(
        set(FORMS[target]) - {"Conv", "LayerNormalization", "MaxPool", "Split"} if target else set()
    )


def filters(step):
    return [node.inputs[1].shape[0] for node in step.graph if node.op_type == "Conv"]


def test_a_network_of_grouped_convolutions_trains_the_same():
    """The gradient of its weights has convolutions of 72 filters in 8 groups."""
    proto = model(
        """g (float[N,16,5,5] x) => (float[N,72] y) {
            c = Conv<group=8>(x, w, b)
            r = Relu(c)
            s = GlobalAveragePool(r)
            y = Flatten(s)
        }""",
        w=numbers(72, 2, 3, 3),
        b=numbers(72),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    written = step.clone()
    passes.Portable("webgpu")(written)
    assert filters(step) == [72, 72]
    assert filters(written) == [96, 96]
    first, second = (graphopt.Executor(m, threads=1) for m in (step, written))
    for _ in range(10):
        batch = {"x": numbers(4, 16, 5, 5), "target": numbers(4, 72)}
        assert second.step(batch)["loss"] == pytest.approx(first.step(batch)["loss"], rel=1e-5)
    for key, value in first.state.items():
        np.testing.assert_allclose(second.state[key], value, rtol=1e-4, atol=1e-6)


def test_webgpu_pools_channels_and_the_cpu_planes():
    step = graphopt.compile(
        models.cnn((1, 8, 8), 10, channels=(8, 16)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1)
    )
    lowered = [graphopt.lower(step, target) for target in ("onnxruntime", "portable", "webgpu")]
    pooled = [[n.inputs[0].shape[1] for n in m.graph if n.op_type == "MaxPool"] for m in lowered]
    assert pooled == [[1, 1], [1, 1], [8, 16]]
    first, second = (graphopt.Executor(m, threads=1) for m in (step, lowered[2]))
    for _ in range(5):
        batch = {"x": numbers(4, 1, 8, 8), "target": np.arange(4)}
        assert second.step(batch)["loss"] == pytest.approx(first.step(batch)["loss"], rel=1e-6)


def test_an_unknown_target_lists_the_known_ones():
    with pytest.raises(graphopt.GraphoptError, match="unknown target 'cpu'; known: iree, mnn, openvino"):
        passes.Portable("cpu")

"""Files that declare wrong shapes: inferred shapes replace them, as ONNX Runtime, which runs these files, does."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from builders import model

import graphopt
import passes
from graphopt.inspection.report import report

LINEAR = "g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, w) t = Tanh(h) y = Identity(t) }"
ONES = np.ones((4, 3), np.float32)


def declared(text: str, inner: dict[str, list] | None = None, **given) -> onnx.ModelProto:
    """Return a model with shapes declared for inner values; a name in a body gets its shape there."""
    proto = model(text, **given)
    for name, dims in (inner or {}).items():
        proto.graph.value_info.append(onnx.helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, dims))
    return proto


def run_by_the_runtime(proto: onnx.ModelProto, feeds: dict[str, np.ndarray]) -> np.ndarray:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    return onnxruntime.InferenceSession(proto.SerializeToString(), options).run(None, feeds)[0]


WRONG = {
    "an output's size": ("g (float[N,4] x) => (float[N,7] y) { y = MatMul(x, w) }", {}),
    "an output's rank": ("g (float[N,4] x) => (float y) { y = MatMul(x, w) }", {}),
    "an output's fixed rows": ("g (float[N,4] x) => (float[5,3] y) { y = MatMul(x, w) }", {}),
    "an inner value's size": (LINEAR, {"h": ["N", 9], "t": [5, 3]}),
    "an inner value's rank": (LINEAR, {"h": [], "t": ["N"]}),
    "an input's name for another size": (
        "g (float[N,4] x) => (float[N,N] y) { y = MatMul(x, w) }",
        {},
    ),
    "a reshape by a computed size": (
        "g (float[N,4] x) => (float[5,4,3] y) { s = Shape<end=1>(x) k = Concat<axis=0>(s, rest) "
        "e = Unsqueeze(x, last) m = Mul(e, row) y = Reshape(m, k) }",
        {"m": [5, 4, 3]},
    ),
    "a slice of fewer rows": (
        "g (float[N,4] x) => (float[N,3] y) { a = Constant<value_ints = [1]>() b = Constant<value_ints = [99]>() "
        "k = Constant<value_ints = [0]>() h = MatMul(x, w) s = Slice(h, a, b, k) y = Tanh(s) }",
        {"h": ["N", 3], "s": ["N", 3]},
    ),
    "a slice that is an output": (
        "g (float[N,4] x) => (float[N,3] y) { a = Constant<value_ints = [1]>() b = Constant<value_ints = [99]>() "
        "k = Constant<value_ints = [0]>() h = MatMul(x, w) y = Slice(h, a, b, k) }",
        {"h": ["N", 3]},
    ),
    "an expansion to more": (
        "g (float[N,4] x) => (float[N,3] y) { e = Constant<value_ints = [6, 3]>() k = Constant<value_ints = [0]>() "
        "h = MatMul(x, w) m = ReduceMean<keepdims = 1>(h, k) s = Expand(m, e) y = Tanh(s) }",
        {"m": ["N", 3], "s": ["N", 3]},
    ),
    "a branch of an If": (
        "g (float[N,4] x) => (float[N] y) { r = Shape(x) s = Size(r) c = Equal(s, two) "
        "y = If (c) <then_branch = a () => (float[N] p) { p = MatMul(x, w) }, "
        "else_branch = b () => (float q) { q = ReduceSum<keepdims=0>(x) }> }",
        {},
    ),
    "a Loop's state and output": (
        "g (float[N,4] x, int64 n, bool c) => (float[7,7] y) { h = MatMul(x, w) "
        "y = Loop (n, c, h) <body = b (int64 i, bool on, float[5,5,5] s) => (bool go, float[2] k) { "
        "go = Identity(on) k = Tanh(s) }> }",
        {},
    ),
    "the outputs of a Scan": (
        "g (float[T,4] x) => (float[7] y) { last, y = Scan <num_scan_inputs = 1, "
        "body = b (float[4] h, float[4] i) => (float[M] k, float[L] o) { k = Add(h, i) o = Tanh(k) }> (start, x) }",
        {},
    ),
}


def given_for(text: str) -> dict[str, np.ndarray]:
    every = {
        "w": ONES, "rest": np.array([4, 3]), "last": np.array([2]), "row": np.ones(3),
        "two": np.array(2), "start": np.ones(4),
    }  # fmt: skip
    return {name: array for name, array in every.items() if f"{name})" in text or f"({name}" in text}


@pytest.mark.parametrize(("text", "inner"), WRONG.values(), ids=WRONG)
def test_inferred_shapes_win(text, inner):
    proto = declared(text, inner, **given_for(text))
    gradients = graphopt.grad(proto, ["x"])
    for rows in (3, 6):
        feeds = {"x": np.random.default_rng(rows).standard_normal((rows, 4)).astype(np.float32)}
        feeds |= {"n": np.array(2), "c": np.array(True)} if "Loop" in text else {}
        wanted = run_by_the_runtime(proto, feeds)
        session = onnxruntime.InferenceSession(ir.to_proto(gradients).SerializeToString())
        found = session.run(["y"], feeds)[0]
        np.testing.assert_allclose(found, wanted, rtol=1e-6)


@pytest.mark.parametrize("keepdims", [0, 1])
def test_a_loss_that_is_declared_as_a_scalar_trains(keepdims):
    """The runtime's own examples declare a ReduceSum of shape [1, 1] so."""
    proto = model(
        "g (float[N,4] x, float[N,3] label) => (float loss, float[N,3] y) { y = MatMul(x, w) d = Sub(y, label) "
        f"q = Mul(d, d) loss = ReduceSum<keepdims={keepdims}>(q) }}",
        w=ONES,
    )
    step = graphopt.compile(proto, loss=passes.OwnLoss("loss"), optimizer=passes.SGD(0.01))
    feeds = {"x": np.ones((2, 4), np.float32), "label": np.zeros((2, 3), np.float32)}
    wanted = run_by_the_runtime(proto, feeds)
    assert graphopt.Executor(step).step(feeds)["loss"] == pytest.approx(wanted.item())


def test_the_report_says_which_shapes_were_wrong():
    pipeline = graphopt.standard(loss=passes.MeanSquaredError())
    wrong = report(declared(*WRONG["an inner value's rank"], w=ONES), pipeline).summary()
    assert "shapes     2 of the file are wrong, such as 'h' as [] for [N,3]: inferred ones replace them" in wrong
    assert "\nshapes " not in report(model(LINEAR, w=ONES), pipeline).summary()


def test_a_rank_that_only_the_file_knows_stays_and_its_sizes_do_not():
    """An exporter writes the sizes of its example."""
    proto = model(
        "g (float[N,4] x, int64[K] s) => (float[N] y) { m = MatMul(x, w) r = Reshape(m, s) "
        "y = ReduceMean<keepdims=0>(r, one) }", w=ONES, one=np.array([1]),
    )  # fmt: skip
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("r", onnx.TensorProto.FLOAT, ["N", 3]))
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    assert [len(x.shape) for x in step.graph.inputs if x.name == "target"] == [1]
    x, t = np.ones((4, 4), np.float32), np.arange(2, dtype=np.float32)
    executor = graphopt.Executor(step)
    executor.step(x=x, s=np.array([2, 6]), target=t)
    w = torch.tensor(ONES, requires_grad=True)
    (((torch.tensor(x) @ w).reshape(2, 6).mean(1) - torch.tensor(t)) ** 2).mean().backward()
    np.testing.assert_allclose(executor.parameters["w"], ONES - 0.1 * w.grad.numpy(), rtol=1e-6)


@pytest.mark.parametrize("opset", [12, 21])
@pytest.mark.parametrize("declared", [True, False])
def test_a_rank_follows_from_the_length_of_a_vector_of_sizes(opset, declared):
    """ddddocr's recognizer declares an output of three axes as [1, seqlen]."""
    proto = model(
        "g (float[N,4] x, int64[3] s) => (float[1,S] y) { m = MatMul(x, w) y = Reshape(m, s) }",
        opset=opset, w=ONES,
    )  # fmt: skip
    if not declared:
        proto.graph.output[0].type.tensor_type.ClearField("shape")
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    assert [len(x.shape) for x in step.graph.inputs if x.name == "target"] == [3]
    feeds = {"x": np.ones((4, 4), np.float32), "s": np.array([2, 3, 2])}
    graphopt.Executor(step).step(**feeds, target=np.ones((2, 3, 2), np.float32))


def test_a_size_that_the_file_fixes_is_told():
    """PyTorch unrolls an nn.RNN of a dynamic length to the length of the export."""
    proto = model(
        "g (float[N,T,4] x) => (float[N,2,3] y) { h = MatMul(x, w) a = Gather<axis=1>(h, zero) "
        "b = Gather<axis=1>(h, one) y = Concat<axis=1>(a, b) }",
        w=ONES, zero=np.array([0]), one=np.array([1]),
    )  # fmt: skip
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    feeds = {"x": np.ones((1, 5, 4), np.float32), "target": np.ones((1, 5, 3), np.float32)}
    with pytest.raises(graphopt.GraphoptError, match="the model computes 2 along axis 1 for every size of its"):
        graphopt.Executor(step).step(feeds)


@pytest.mark.parametrize("how", ["value_info", "input"])
@pytest.mark.parametrize("dims", [["K", 3], [], [9, 9]])
def test_a_weight_has_the_shape_of_its_tensor(how, dims):
    proto = model("g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }", w=ONES)
    getattr(proto.graph, how).append(onnx.helper.make_tensor_value_info("w", onnx.TensorProto.FLOAT, dims))
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.AdamW())
    assert [str(x.shape) for x in step.graph.inputs if x.name == "w"] == ["[4,3]"]


@pytest.mark.parametrize("opset", [10, 11, 13])
@pytest.mark.parametrize("axes", [[0, 1], [1, 2], [2, 0]])
def test_a_slice_cuts_axes_of_open_sizes(opset, axes):
    """ONNX's inference of opset 10 keeps the names of axes that a Slice cuts, which is no slice of everything."""
    proto = model(
        "g (float[a,b,c] x) => (float[A,B,C] y) { s = Slice(x, first, last, axes) y = Mul(s, w) }",
        opset=opset, first=np.array([1, -3]), last=np.array([100, -1]), axes=np.array(axes), w=np.ones(1, np.float32),
    )  # fmt: skip
    loaded = graphopt.load(proto)
    passes.Normalize()(loaded)
    x = np.random.default_rng(0).standard_normal((4, 5, 6), np.float32)
    expected = run_by_the_runtime(proto, {"x": x})
    assert expected.shape != x.shape
    np.testing.assert_array_equal(run_by_the_runtime(ir.to_proto(loaded), {"x": x}), expected)

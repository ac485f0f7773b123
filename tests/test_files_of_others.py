"""Files as other programs write them: what they say comes back, or one line says what to do with them."""

from __future__ import annotations

import base64
import json
import zlib

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import linear, mlp, model
from onnx import numpy_helper

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.graph.postprocessing import Notes
from graphopt.inspection.report import report

RNG = np.random.default_rng(0)
X = RNG.standard_normal((6, 4)).astype(np.float32)
W = RNG.standard_normal((4, 3)).astype(np.float32)
TEXT = "g (float[N,4] x) => (float[N,3] y) { y = MatMul(x, w) }"


def opened(proto: onnx.ModelProto, steps_per_call: int | None = None, **steps) -> graphopt.Executor:
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)} | steps
    return graphopt.Executor(graphopt.compile(proto, **steps), threads=1, steps_per_call=steps_per_call)


def run(proto: onnx.ModelProto, feeds: dict[str, np.ndarray], names=None) -> list[np.ndarray]:
    return onnxruntime.InferenceSession(proto.SerializeToString()).run(names, feeds)


def stepped(w: np.ndarray, target: np.ndarray) -> np.ndarray:
    """Return w after one step on the mean squared error of x w."""
    return w - 0.1 * X.T @ (2 * (X @ w - target) / target.size)


def sparse(indices: np.ndarray) -> onnx.SparseTensorProto:
    values = numpy_helper.from_array(np.array([1, 2], np.float32), "w")
    return onnx.helper.make_sparse_tensor(values, numpy_helper.from_array(indices, "at"), [4, 3])


@pytest.mark.parametrize("indices", [[1, 5], [[0, 1], [1, 2]]], ids=["flat", "by axis"])
@pytest.mark.parametrize("holder", ["initializer", "constant"])
def test_sparse_weights_train_and_keep_their_zeros(indices, holder):
    proto = model(TEXT)
    if holder == "initializer":
        proto.graph.sparse_initializer.append(sparse(np.array(indices)))
    else:
        node = onnx.helper.make_node("Constant", [], ["w"], sparse_value=sparse(np.array(indices)))
        proto.graph.node.insert(0, node)
    w, target = np.zeros((4, 3), np.float32), np.ones((6, 3), np.float32)
    w[0, 1], w[1, 2] = 1, 2
    executor = opened(proto)
    executor.step(x=X, target=target)
    (found,) = (numpy_helper.to_array(each) for each in executor.trained().graph.initializer)
    np.testing.assert_allclose(found, np.where(w == 0, 0, stepped(w, target)), rtol=1e-5)


def test_large_sparse_weights_are_measured_first():
    proto = model(TEXT)
    proto.graph.sparse_initializer.append(sparse(np.array([1, 5])))
    proto.graph.sparse_initializer[0].dims[:] = [2**20, 2**20]
    with pytest.raises(GraphoptError, match="sparse tensors: expected at most"):
        graphopt.load(proto)


def test_an_output_may_be_a_weight_or_an_input():
    proto = model("g (float[N,4] x) => (float[N,3] y, float[4,3] w, float[N,4] x) { y = MatMul(x, w) }", w=W)
    target = np.ones((6, 3), np.float32)
    executor = opened(proto)
    executor.step(x=X, target=target)
    trained = executor.trained()
    assert [y.name for y in trained.graph.output] == ["y", "w", "x"]
    y, w, x = run(trained, {"x": X})
    np.testing.assert_allclose(w, stepped(W, target), rtol=1e-5)
    np.testing.assert_allclose(y, X @ w, rtol=1e-5)
    np.testing.assert_array_equal(x, X)


def test_inputs_that_nothing_reads_stay_and_need_no_values():
    text = "g (float[N,4] x, int64[N,T] ids, float[3] z) => (float[N,3] y) { y = MatMul(x, w) }"
    proto = model(text, w=W)
    executor = opened(proto, steps_per_call=2)
    batch = {"x": X, "target": np.ones((6, 3), np.float32)}
    unread = {"ids": np.zeros((6, 2), np.int64), "z": np.zeros(3, np.float32)}
    losses = [executor.step(batch)["loss"], executor.step({**batch, **unread})["loss"]]
    losses += [each["loss"] for each in executor.run([batch] * 4)]
    assert losses == sorted(losses, reverse=True)
    run(executor.trained(), {"x": X, **unread})
    with pytest.raises(GraphoptError, match="input 'x': missing"):
        executor.step(target=batch["target"])


@pytest.mark.parametrize("dtype", [np.int32, np.int16, np.int8, np.uint8, np.uint32])
def test_labels_of_narrower_integers_are_labels(dtype):
    labels = np.arange(6) % 3
    losses = []
    for each in (labels.astype(np.int64), labels.astype(dtype)):
        executor = opened(mlp(), loss=passes.CrossEntropy())
        losses.append([executor.step(x=X, target=each)["loss"] for _ in range(2)])
    assert losses[0] == losses[1]


@pytest.mark.parametrize("dtype", [np.uint64, np.float32, bool])
def test_labels_that_may_not_fit_are_refused(dtype):
    with pytest.raises(GraphoptError, match="input 'target': expected int64, found"):
        opened(mlp(), loss=passes.CrossEntropy()).step(x=X, target=np.zeros(6, dtype))


def test_what_the_file_says_comes_back():
    proto = model(TEXT.replace("y = MatMul", "[m] y = MatMul"), w=W)
    graph = proto.graph
    graph.node[0].ClearField("domain")
    graph.doc_string, graph.node[0].doc_string, graph.initializer[0].doc_string = "of g", "of node", "of w"
    graph.input[0].type.denotation = "IMAGE"
    graph.input[0].type.tensor_type.shape.dim[0].denotation = "DATA_BATCH"
    graph.initializer.append(numpy_helper.from_array(np.arange(3), "unread"))
    for holder in (graph, graph.node[0], proto):
        holder.metadata_props.add(key="k", value="v")
    trained = opened(proto).trained()
    np.testing.assert_array_equal(numpy_helper.to_array(trained.graph.initializer[1]), np.arange(3))
    for weight in (graph.initializer[0], trained.graph.initializer[0]):
        weight.ClearField("raw_data")
    del trained.graph.value_info[:]
    assert trained.graph == graph
    assert list(trained.metadata_props) == list(proto.metadata_props)


def test_weights_come_back_in_the_order_of_the_file():
    names = [each.name for each in linear().graph.initializer]
    assert [each.name for each in opened(linear()).trained().graph.initializer] == names


@pytest.mark.parametrize("opset", [7, 11, 12])
@pytest.mark.parametrize("operator", ["Softmax", "LogSoftmax"])
@pytest.mark.parametrize("axis", [0, 1, 2])
def test_softmax_along_several_axes_comes_back_in_its_opset(opset, operator, axis):
    proto = model(
        f"g (float[N,4,1,3] x) => (float[N,4,1,3] y) {{ h = Mul(x, w) y = {operator}<axis={axis}>(h) }}",
        opset=opset,
        w=RNG.standard_normal((4, 1, 3)),
    )
    proto.ir_version = 6
    trained = opened(proto).trained()
    assert trained.opset_import[0].version == opset
    for rows in (2, 5):
        x = RNG.standard_normal((rows, 4, 1, 3)).astype(np.float32)
        np.testing.assert_allclose(run(trained, {"x": x})[0], run(proto, {"x": x})[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("domain", "operator", "found"),
    [
        (
            "com.microsoft.nchwc",
            "Conv",
            "com.microsoft.nchwc::Conv node 'n': ONNX Runtime wrote this file for one",
        ),
        ("com.microsoft", "QAttention", "QAttention node 'n': the file computes with integers"),
    ],
)
def test_files_for_inference_alone_are_refused(domain, operator, found):
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["" : 17, "{domain}" : 1]> g (float[N,4] x) => (float[N,3] y) '
        f"{{ [n] y = {domain}.{operator}(x) }}"
    )
    with pytest.raises(GraphoptError, match=found):
        graphopt.compile(proto, loss=passes.MeanSquaredError())


def test_a_runtimes_operator_is_found_in_an_onnx_ir_model_too():
    proto = model(
        "g (float[N,4] x) => (float[N,3] y) { n = SimplifiedLayerNormalization(x, s) y = MatMul(n, w) }",
        opset=22, s=np.ones(4), w=W,
    )  # fmt: skip
    losses = [
        opened(source).step(x=X, target=np.ones((6, 3), np.float32))["loss"] for source in (proto, ir.from_proto(proto))
    ]
    assert losses[0] == losses[1]


def test_small_external_data_of_an_onnx_ir_model_is_read(tmp_path):
    proto = linear()
    onnx.save(linear(), tmp_path / "m.onnx", save_as_external_data=True, location="w", size_threshold=0)
    target = np.ones((6, 2), np.float32)
    losses = [
        opened(source).step(x=X[:, :3], target=target)["loss"] for source in (proto, ir.load(tmp_path / "m.onnx"))
    ]
    assert losses[0] == losses[1]


def test_text_beside_a_loop_trains():
    proto = model(
        "g (float[N,4] x, int64 n, bool c) => (float[N,3] y, string[2] kept) { h = MatMul(x, w) y = Loop (n, c, h) "
        "<body = b (int64 i, bool on, float[N,3] s) => (bool go, float[N,3] k) { go = Identity(on) k = Tanh(s) }> "
        "kept = Identity(names) }",
        w=W,
    )
    proto.graph.initializer.append(numpy_helper.from_array(np.array(["a", "b"], dtype=object), "names"))
    executor = opened(proto)
    executor.step(x=X, n=np.array(2), c=np.array(True), target=np.zeros((6, 3), np.float32))
    assert run(executor.trained(), {"x": X, "n": np.array(2), "c": np.array(True)}, ["kept"])[0].tolist() == [
        "a",
        "b",
    ]


@pytest.mark.parametrize("text", ["[" * 10**5, "set(" * 1000, "{" * 99 + "}" * 99, "['a'"])
def test_hostile_notes_of_an_exporter_are_ignored(text):
    proto = linear()
    proto.producer_name, proto.producer_version = "pytorch", "2.9.0"
    for holder in (*proto.graph.node, *proto.graph.initializer):
        holder.metadata_props.add(key="pkg.onnxscript.optimizer.folded_from", value=text)
        holder.metadata_props.add(key="pkg.torch.onnx.fx_node", value="%p : call_function[target=torch.ops.aten.t]")
    opened(proto)


def test_a_report_says_how_to_choose_an_output():
    proto = model("g (float[N,4] x) => (float[N,3] y, float[N,3] z) { y = MatMul(x, w) z = Tanh(y) }", w=W)
    summary = report(proto, graphopt.standard(loss=passes.MeanSquaredError())).summary()
    assert "write loss.output=y (in Python" in summary


EXTERNAL = onnx.TensorProto(name="u", data_type=1, data_location=onnx.TensorProto.EXTERNAL)
EXTERNAL.external_data.add(key="location", value="w")


def bomb() -> str:
    return base64.b64encode(zlib.compress(b" " * 2**28)).decode()


@pytest.mark.parametrize(
    "packed",
    [
        *("", "?", "eJw=", 5, base64.b64encode(b"{}").decode()),
        base64.b64encode(zlib.compress(b"{}")).decode(),
        base64.b64encode(Notes.pack(onnx.GraphProto(initializer=[EXTERNAL])).packed).decode(),
        pytest.param(None, id="bomb"),
    ],
)
@pytest.mark.slow
def test_notes_that_do_not_fit_are_refused(packed):
    step = ir.to_proto(graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)))
    kept = [each for each in step.metadata_props if each.key != Notes.KEY]
    del step.metadata_props[:]
    step.metadata_props.extend(kept)
    step.metadata_props.add(key=Notes.KEY, value=json.dumps({"packed": bomb() if packed is None else packed}))
    with pytest.raises(GraphoptError, match=r"metadata 'graphopt\.file': expected a compressed graph"):
        graphopt.load(step)


@pytest.mark.parametrize(
    "graph",
    [
        onnx.GraphProto(initializer=[onnx.TensorProto(name="u", data_type=1, dims=[3])]),
        onnx.GraphProto(initializer=[onnx.TensorProto(name="u", dims=[3])]),
        onnx.GraphProto.FromString(b"R\x02\xff\xfe"),
    ],
    ids=["size", "type", "text"],
)
@pytest.mark.slow
def test_a_noted_graph_is_checked(graph):
    step = ir.to_proto(graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)))
    for entry in step.metadata_props:
        if entry.key == Notes.KEY:
            entry.value = json.dumps({"packed": base64.b64encode(Notes.pack(graph).packed).decode()})
    with pytest.raises(GraphoptError, match="expected"):
        graphopt.load(step)


def test_an_operator_of_the_runtime_waits_for_the_shapes_before_it():
    """A Reshape by computed sizes stands between two of them, as where ONNX Runtime's optimizer fuses no attention."""
    proto = model(
        """g (float[N,T,4] x) => (float[N,T,4] y) {
            s = com.microsoft.SkipLayerNormalization(x, x, g, b)
            shape = Shape(s)
            n = Slice(shape, zero, two)
            to = Concat<axis=0>(n, heads)
            h = Reshape(s, to)
            r = Softmax(h)
            back = Concat<axis=0>(n, four)
            m = Reshape(r, back)
            p = MatMul(m, w)
            y = com.microsoft.SkipLayerNormalization(p, s, g, b)
        }""",
        opset=17, g=RNG.uniform(1, 2, 4), b=np.ones(4), w=RNG.standard_normal((4, 4)),
        zero=np.array([0]), two=np.array([2]), heads=np.array([2, 2]), four=np.array([4]),
    )  # fmt: skip
    proto.opset_import.add(domain="com.microsoft", version=1)
    executor = opened(proto)
    x = RNG.standard_normal((2, 3, 4)).astype(np.float32)
    np.testing.assert_allclose(executor.predict(x=x)["y"], run(proto, {"x": x})[0], rtol=1e-4, atol=1e-5)
    executor.step(x=x, target=x)
    assert {"g", "b", "w"} <= set(executor.parameters)


def test_a_recurrent_output_of_another_declared_rank_trains():
    proto = model(
        'g (float[T,N,4] x) => (float[T,N,6] y) { y = RNN<hidden_size=3, direction="bidirectional">(x, w, r) }',
        opset=14, w=RNG.standard_normal((2, 3, 4)), r=RNG.standard_normal((2, 3, 3)),
    )  # fmt: skip
    executor = opened(proto)
    x = RNG.standard_normal((5, 2, 4)).astype(np.float32)
    y = executor.predict(x=x)["y"]
    np.testing.assert_allclose(y, run(proto, {"x": x})[0], rtol=1e-5, atol=1e-6)
    losses = [executor.step(x=x, target=np.zeros_like(y))["loss"] for _ in range(3)]
    assert losses[2] < losses[0] == pytest.approx(np.mean(y**2), rel=1e-5)


@pytest.mark.parametrize("made", [lambda proto: proto, ir.from_proto])
def test_a_function_whose_opset_means_something_else_is_refused(made):
    proto = onnx.parser.parse_model(
        """<ir_version: 8, opset_import: ["" : 18, "local" : 1]>
        g (float[N,4] x) => (float[N,4] y) { h = local.Part(x) y = Mul(h, x) }
        <domain: "local", opset_import: ["" : 12]> Part (a) => (c) { c = Softmax<axis=0>(a) }"""
    )
    with pytest.raises(GraphoptError, match=r"opset|version"):
        opened(made(proto))

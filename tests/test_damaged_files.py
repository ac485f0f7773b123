"""A file whose order, types, shapes or form is unusual trains as the file without it, if ONNX Runtime runs it."""

from __future__ import annotations

import contextlib
import functools
import random
import warnings
from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
from builders import attention, mlp, model
from onnx import helper, numpy_helper
from steps import outputs

import graphopt
import passes
from graphopt.errors import GraphoptError


def weights(**shapes: tuple[int, ...]) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}


def convolutions() -> onnx.ModelProto:
    """Return a network of convolutions, as exporters of opset 13 write it."""
    return model(
        """g (float[N,3,8,8] x) => (float[N,5] y) {
            c = Conv<kernel_shape=[3,3], pads=[1,1,1,1]>(x, w, b)
            n = BatchNormalization(c, scale, shift, mean, var)
            r = Relu(n)
            p = MaxPool<kernel_shape=[2,2], strides=[2,2]>(r)
            shape = Shape(p)
            zero = Constant<value = int64 {0}>()
            rows = Gather<axis=0>(shape, zero)
            axes = Constant<value = int64[1] {0}>()
            row = Unsqueeze(rows, axes)
            rest = Constant<value = int64[1] {-1}>()
            to = Concat<axis=0>(row, rest)
            f = Reshape(p, to)
            y = Gemm<transB=1>(f, v, u)
        }""",
        opset=13,
        **weights(w=(4, 3, 3, 3), b=(4,), scale=(4,), shift=(4,), mean=(4,), v=(5, 64), u=(5,)),
        var=np.linspace(1, 2, 4),
    )


def recurrent() -> onnx.ModelProto:
    """Return a recurrent network in both directions."""
    return model(
        """g (float[T,N,3] x) => (float[T,N,2] y) {
            h, last = GRU<hidden_size=4, direction="bidirectional">(x, w, r, b)
            t = Transpose<perm=[0,2,1,3]>(h)
            to = Constant<value = int64[3] {0, 0, -1}>()
            f = Reshape(t, to)
            y = MatMul(f, v)
        }""",
        opset=14,
        **weights(w=(2, 12, 3), r=(2, 12, 4), b=(2, 24), v=(8, 2)),
    )


def control_flow() -> onnx.ModelProto:
    """Return a network with a branch and a loop, whose bodies read outer values."""
    return model(
        """g (float[N,3] x) => (float[N,3] y) {
            h = MatMul(x, w)
            limit = Constant<value = int64 {3}>()
            on = Constant<value = bool {1}>()
            l = Loop(limit, on, h) <body = b (int64 i, bool go, float[N,3] s) => (bool further, float[N,3] next) {
                further = Identity(go)
                m = MatMul(s, v)
                next = Add(m, h)
            }>
            total = ReduceSum<keepdims=0>(l)
            zero = Constant<value = float {0.0}>()
            positive = Greater(total, zero)
            y = If(positive) <
                then_branch = t () => (float[N,3] a) { a = Tanh(l) },
                else_branch = e () => (float[N,3] c) { c = Mul(l, u) }
            >
        }""",
        opset=16,
        **weights(w=(3, 3), v=(3, 3), u=(3,)),
    )


GOOD: dict[str, tuple[Callable[[], onnx.ModelProto], tuple[int, ...]]] = {
    "mlp": (mlp, (6, 4)),
    "attention": (attention, (3, 6, 4)),
    "convolutions": (convolutions, (4, 3, 8, 8)),
    "recurrent": (recurrent, (5, 3, 3)),
    "control flow": (control_flow, (4, 3)),
}

DAMAGES: dict[str, Callable[[onnx.ModelProto], None]] = {}


def damage(function: Callable[[onnx.ModelProto], None]) -> Callable[[onnx.ModelProto], None]:
    DAMAGES[function.__name__.replace("_", " ")] = function
    return function


def inferred(proto: onnx.ModelProto) -> list[onnx.ValueInfoProto]:
    """Return the types of all computed values."""
    return [*onnx.shape_inference.infer_shapes(proto).graph.value_info]


def declare(proto: onnx.ModelProto, change: Callable[[onnx.TensorShapeProto], None]) -> None:
    infos = inferred(proto)
    for info in infos:
        change(info.type.tensor_type.shape)
    del proto.graph.value_info[:]
    proto.graph.value_info.extend(infos)


def graphs(graph: onnx.GraphProto) -> list[onnx.GraphProto]:
    bodies = [x.g for node in graph.node for x in node.attribute if x.type == onnx.AttributeProto.GRAPH]
    return [graph, *(inner for body in bodies for inner in graphs(body))]


def rewrite_nodes(graph: onnx.GraphProto, nodes: list[onnx.NodeProto]) -> None:
    copies = [onnx.NodeProto.FromString(node.SerializeToString()) for node in nodes]
    del graph.node[:]
    graph.node.extend(copies)


@damage
def nodes_in_reverse(proto: onnx.ModelProto) -> None:
    rewrite_nodes(proto.graph, [*proto.graph.node][::-1])


@damage
def nodes_shuffled_in_bodies_too(proto: onnx.ModelProto) -> None:
    for graph in graphs(proto.graph)[::-1]:
        nodes = [*graph.node]
        random.Random(3).shuffle(nodes)
        rewrite_nodes(graph, nodes)


@damage
def types_of_all_values(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.extend(inferred(proto))


@damage
def other_element_types(proto: onnx.ModelProto) -> None:
    infos = inferred(proto)
    for info in infos:
        if info.type.tensor_type.elem_type == onnx.TensorProto.FLOAT:
            info.type.tensor_type.elem_type = onnx.TensorProto.FLOAT16
    proto.graph.value_info.extend(infos)


@damage
def other_element_types_of_weights(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        kind = onnx.TensorProto.FLOAT16
        proto.graph.value_info.append(helper.make_tensor_value_info(tensor.name, kind, tensor.dims))


@damage
def other_shapes_of_weights(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        dims = [dim + 1 for dim in tensor.dims]
        proto.graph.value_info.append(helper.make_tensor_value_info(tensor.name, tensor.data_type, dims))


@damage
def other_ranks(proto: onnx.ModelProto) -> None:
    declare(proto, lambda shape: shape.dim.add(dim_value=7) and None)


@damage
def other_sizes(proto: onnx.ModelProto) -> None:
    def change(shape: onnx.TensorShapeProto) -> None:
        for dim in shape.dim:
            dim.dim_value = 7

    declare(proto, change)


@damage
def fixed_batch_in_the_middle(proto: onnx.ModelProto) -> None:
    """As an exporter's trace leaves it."""

    def change(shape: onnx.TensorShapeProto) -> None:
        for dim in shape.dim:
            if dim.dim_param:
                dim.dim_value = 1

    declare(proto, change)


@damage
def one_name_for_all_sizes(proto: onnx.ModelProto) -> None:
    def change(shape: onnx.TensorShapeProto) -> None:
        for dim in shape.dim:
            dim.dim_param = "N"

    declare(proto, change)


@damage
def types_of_nothing(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.append(helper.make_tensor_value_info("nowhere", 1, [3]))
    proto.graph.value_info.append(onnx.ValueInfoProto(name="untyped"))


@damage
def types_twice(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.extend(inferred(proto))
    proto.graph.value_info.extend(inferred(proto)[::-1])


@damage
def types_of_inputs_and_outputs_again(proto: onnx.ModelProto) -> None:
    proto.graph.value_info.extend([*proto.graph.input, *proto.graph.output])


@damage
def output_without_a_shape(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].type.tensor_type.ClearField("shape")


@damage
def output_of_other_sizes(proto: onnx.ModelProto) -> None:
    for dim in proto.graph.output[0].type.tensor_type.shape.dim:
        dim.dim_value = 9


@damage
def output_of_another_rank(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].type.tensor_type.shape.dim.add(dim_value=1)


@damage
def output_without_a_type(proto: onnx.ModelProto) -> None:
    proto.graph.output[0].ClearField("type")


@damage
def input_without_a_shape(proto: onnx.ModelProto) -> None:
    proto.graph.input[0].type.tensor_type.ClearField("shape")


@damage
def input_of_unknown_sizes(proto: onnx.ModelProto) -> None:
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        dim.Clear()


@damage
def input_of_negative_sizes(proto: onnx.ModelProto) -> None:
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        if dim.dim_param:
            dim.dim_value = -1


@damage
def sizes_with_odd_names(proto: onnx.ModelProto) -> None:
    for dim in proto.graph.input[0].type.tensor_type.shape.dim:
        if dim.dim_param:
            dim.dim_param = "?"


@damage
def names_of_nodes_are_one(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        node.name = "node"


@damage
def texts_everywhere(proto: onnx.ModelProto) -> None:
    proto.doc_string = proto.graph.doc_string = "text " * 100
    for holder in (*proto.graph.node, *proto.graph.input, *proto.graph.initializer):
        holder.doc_string = "ä\n"


@damage
def opset_twice(proto: onnx.ModelProto) -> None:
    proto.opset_import.add(domain="", version=proto.opset_import[0].version)


@damage
def opset_by_both_names(proto: onnx.ModelProto) -> None:
    proto.opset_import.add(domain="ai.onnx", version=proto.opset_import[0].version)


@damage
def domain_by_its_long_name(proto: onnx.ModelProto) -> None:
    proto.opset_import[0].domain = "ai.onnx"
    for graph in graphs(proto.graph):
        for node in graph.node:
            node.domain = "ai.onnx"


@damage
def opsets_of_other_domains(proto: onnx.ModelProto) -> None:
    for domain in (
        "com.microsoft",
        "ai.onnx.ml",
        "com.microsoft.experimental",
        "ai.onnx.training",
        "somewhere.else",
    ):
        proto.opset_import.add(domain=domain, version=1)


@damage
def weights_are_inputs_of_ir_3(proto: onnx.ModelProto) -> None:
    proto.ir_version = 3
    infos = (helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in proto.graph.initializer)
    proto.graph.input.extend(infos)


@damage
def weights_are_inputs_first(proto: onnx.ModelProto) -> None:
    inputs = [*proto.graph.input]
    del proto.graph.input[:]
    infos = (helper.make_tensor_value_info(x.name, x.data_type, x.dims) for x in proto.graph.initializer)
    proto.graph.input.extend([*infos, *inputs])


@damage
def weights_that_nothing_reads(proto: onnx.ModelProto) -> None:
    proto.graph.initializer.append(numpy_helper.from_array(np.ones((3, 3), np.float32), "nobody"))
    proto.graph.initializer.append(numpy_helper.from_array(np.array(["a"], object), "text"))


@damage
def weights_in_constants(proto: onnx.ModelProto) -> None:
    nodes = [helper.make_node("Constant", [], [x.name], value=x) for x in proto.graph.initializer]
    del proto.graph.initializer[:]
    rewrite_nodes(proto.graph, [*nodes, *proto.graph.node])


@damage
def weights_in_constants_behind_their_readers(proto: onnx.ModelProto) -> None:
    nodes = [helper.make_node("Constant", [], [x.name], value=x) for x in proto.graph.initializer]
    del proto.graph.initializer[:]
    rewrite_nodes(proto.graph, [*proto.graph.node, *nodes])


@damage
def weights_as_lists(proto: onnx.ModelProto) -> None:
    for tensor in proto.graph.initializer:
        array = numpy_helper.to_array(tensor)
        tensor.ClearField("raw_data")
        tensor.float_data.extend(array.ravel().tolist())


@damage
def weights_behind_identities(proto: onnx.ModelProto) -> None:
    nodes = []
    for tensor in proto.graph.initializer:
        name, tensor.name = tensor.name, f"{tensor.name}_stored"
        nodes.append(helper.make_node("Identity", [tensor.name], [name]))
    rewrite_nodes(proto.graph, [*nodes, *proto.graph.node])


@damage
def nodes_that_nothing_reads(proto: onnx.ModelProto) -> None:
    name = proto.graph.input[0].name
    proto.graph.node.append(helper.make_node("Relu", [name], ["unread"]))
    proto.graph.node.append(helper.make_node("Tanh", ["unread"], ["unread too"]))


@damage
def names_with_all_signs(proto: onnx.ModelProto) -> None:
    names = {y: f"/{y} (1):0,\n ä" for graph in graphs(proto.graph) for node in graph.node for y in node.output}
    kept = {y.name for graph in graphs(proto.graph) for y in graph.output}
    for graph in graphs(proto.graph):
        for node in graph.node:
            for values in (node.input, node.output):
                values[:] = [names.get(x, x) if x not in kept else x for x in values]


@damage
def optional_inputs_left_out_by_name(proto: onnx.ModelProto) -> None:
    for node in proto.graph.node:
        if node.op_type in ("Clip", "Dropout", "GRU"):
            node.input.append("")


@damage
def a_part_in_a_function(proto: onnx.ModelProto) -> None:
    wrap(proto, proto.opset_import[0].version)


@damage
def a_part_in_a_function_of_another_opset(proto: onnx.ModelProto) -> None:
    wrap(proto, proto.opset_import[0].version + 1)


def wrap(proto: onnx.ModelProto, version: int) -> None:
    """Move the first node with weights into a function."""
    node = next(x for x in proto.graph.node if x.op_type in ("Conv", "Gemm", "MatMul", "GRU"))
    call = helper.make_node("Part", node.input, [y for y in node.output if y], domain="local")
    imports = [helper.make_opsetid("", version)]
    inner = onnx.NodeProto.FromString(node.SerializeToString())
    function = helper.make_function("local", "Part", [*node.input], [*call.output], [inner], imports)
    proto.functions.append(function)
    proto.opset_import.add(domain="local", version=1)
    rewrite_nodes(proto.graph, [call if x == node else x for x in proto.graph.node])


@damage
def the_end_in_a_branch(proto: onnx.ModelProto) -> None:
    """An If that captures all that its branch reads, and whose condition is constant."""
    *nodes, last = proto.graph.node
    outputs = [helper.make_tensor_value_info("branch_out", 1, None)]
    then = onnx.NodeProto.FromString(last.SerializeToString())
    then.output[:] = ["branch_out"]
    other = helper.make_node("Neg", [last.input[0]], ["other_out"])
    branches = {
        "then_branch": helper.make_graph([then], "then", [], outputs),
        "else_branch": helper.make_graph([other], "else", [], [helper.make_tensor_value_info("other_out", 1, None)]),
    }
    condition = numpy_helper.from_array(np.array(True), "chosen")
    proto.graph.initializer.append(condition)
    rewrite_nodes(proto.graph, [*nodes, helper.make_node("If", ["chosen"], [last.output[0]], **branches)])


@damage
def graph_without_a_name(proto: onnx.ModelProto) -> None:
    proto.graph.name = "g"
    proto.producer_name = proto.producer_version = proto.domain = ""
    proto.ClearField("model_version")


@damage
def the_newest_ir_version(proto: onnx.ModelProto) -> None:
    proto.ir_version = 12


def run(proto: onnx.ModelProto, x: np.ndarray) -> np.ndarray:
    return next(iter(outputs(proto, {"x": x}).values()))


def trained(source: onnx.ModelProto | Path, x: np.ndarray, target: np.ndarray) -> tuple[np.ndarray, list[float]]:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(source, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1, native=False)
    predicted = executor.predict(x=x)
    losses = [executor.step(x=x, target=target)["loss"] for _ in range(2)]
    result = next(iter(executor.predict(x=x).values()))
    again = run(executor.trained(), x)
    np.testing.assert_allclose(again, result, rtol=1e-5, atol=1e-6)
    return next(iter(predicted.values())), losses


@functools.cache
def losses_without_damage(name: str) -> list[float]:
    build, shape = GOOD[name]
    x, proto = np.random.default_rng(1).standard_normal(shape).astype(np.float32), build()
    return trained(proto, x, np.zeros_like(run(proto, x)))[1]


UNKNOWN = {("control flow", "input without a shape")}  # vectors would do as well as matrices


@pytest.mark.sample(20)
@pytest.mark.parametrize("how", DAMAGES)
@pytest.mark.parametrize("name", GOOD)
def test_what_the_runtime_runs_trains_as_the_file_without_damage(name: str, how: str) -> None:
    build, shape = GOOD[name]
    good, damaged = build(), build()
    DAMAGES[how](damaged)
    x = np.random.default_rng(1).standard_normal(shape).astype(np.float32)
    may_be_refused: contextlib.AbstractContextManager[None] = contextlib.nullcontext()
    try:
        expected = run(damaged, x)
    except Exception:  # noqa: BLE001
        expected, may_be_refused = run(good, x), contextlib.suppress(GraphoptError)
    target = np.zeros_like(expected)
    if (name, how) in UNKNOWN:
        with pytest.raises(GraphoptError, match="declare the shapes of the model's inputs"):
            trained(damaged, x, target)
        return
    with may_be_refused:
        predicted, losses = trained(damaged, x, target)
        np.testing.assert_allclose(predicted, expected, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(losses, losses_without_damage(name), rtol=1e-5)

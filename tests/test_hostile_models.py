"""Files that are broken, or made to break: refused in one line, before anything large is computed or trained."""

from __future__ import annotations

import contextlib
import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import linear, model, run

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.graph.limits import Limits
from graphopt.graph.memory import estimate
from graphopt.graph.message_inference import infer_message

W = np.ones((4, 3), np.float32)
SQUARES = passes.MeanSquaredError()


def compiled(source: Any) -> ir.Model:
    return graphopt.compile(source, loss=SQUARES, optimizer=passes.SGD(0.01, momentum=0.9))


def refused(source: Any, found: str) -> None:
    with pytest.raises(GraphoptError, match=found) as error:
        compiled(source)
    assert "\n" not in str(error.value)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """Return the path of a linear model whose weights are in a file of 32 bytes beside it."""
    path = tmp_path / "model.onnx"
    onnx.save(linear(), path, save_as_external_data=True, location="weights", size_threshold=0)
    return path


def moved(stored: Path, key: str, value: str) -> ir.Model:
    """Write another place of the weights to a file, and compile it."""
    proto = onnx.load(stored, load_external_data=False)
    entries = proto.graph.initializer[0].external_data
    for entry in [entry for entry in entries if entry.key == key]:
        entries.remove(entry)
    entries.add(key=key, value=value)
    stored.write_bytes(proto.SerializeToString())
    return compiled(stored)


def test_tensors_that_share_a_file_many_times_are_counted(stored: Path) -> None:
    proto = onnx.load(stored, load_external_data=False)
    for i in range(100):
        proto.graph.initializer.add().CopyFrom(proto.graph.initializer[0])
        proto.graph.initializer[-1].name = f"w{i}"
    stored.write_bytes(proto.SerializeToString())
    with pytest.raises(GraphoptError, match=r"limits\.constant_bytes=2432 allows it"):
        graphopt.load(stored, limits=Limits(constant_bytes=1000))
    assert len(graphopt.load(stored).graph.initializers) == 102


def test_a_pipe_a_device_and_a_ring_of_links_are_no_models(tmp_path: Path, stored: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "ring").symlink_to("ring")
    for name in (tmp_path / "pipe", "/dev/zero"):
        refused(name, "expected an ONNX file, found a device or a pipe")
    refused(tmp_path / "ring", "Too many levels of symbolic links")
    refused("a\0b", "null byte")
    (tmp_path / "weights").unlink()
    os.mkfifo(tmp_path / "weights")
    refused(stored, "tensor '[wb]': external data: expected bytes")


def _tensor(**fields: Any) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        for name, value in fields.items():
            if name == "dims":
                proto.graph.initializer[0].dims[:] = value
            else:
                setattr(proto.graph.initializer[0], name, value)

    return change


def _not_utf8(text: bytes) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        proto.ParseFromString(proto.SerializeToString().replace(text, b"\xff" + text[1:]))

    return change


def _claimed(place: str, key: str, value: str) -> Callable[[onnx.ModelProto], None]:
    def change(proto: onnx.ModelProto) -> None:
        parts = {"x": proto.graph.input[0], "y": proto.graph.output[0], "model": proto}
        if place == "p":
            parts["p"] = proto.graph.value_info.add(name="p")
        parts[place].metadata_props.add(key=f"graphopt.{key}", value=value)

    return change


def _reference(proto: onnx.ModelProto) -> None:
    attribute = proto.graph.node[0].attribute.add(name="axis", ref_attr_name="axis")
    attribute.type = onnx.AttributeProto.INT


def _reference_of_a_call(proto: onnx.ModelProto) -> None:
    """Let a call pass on an attribute that nothing around it has."""
    _function(proto, onnx.helper.make_node("LeakyRelu", ["a"], ["c"]))
    call = proto.graph.node[0].attribute.add(name="alpha", ref_attr_name="beta")
    call.type = onnx.AttributeProto.FLOAT


def _reference_in_a_function(proto: onnx.ModelProto) -> None:
    node = onnx.helper.make_node("LeakyRelu", ["a"], ["c"])
    node.attribute.add(name="alpha", ref_attr_name="beta", type=onnx.AttributeProto.FLOAT)
    _function(proto, node)


def _function(proto: onnx.ModelProto, node: onnx.NodeProto) -> None:
    """Make the first node a call of a function of one node, with an attribute `alpha`."""
    proto.opset_import.add(domain="own", version=1)
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "own", "f"
    opsets = [onnx.helper.make_opsetid("", 21)]
    made = onnx.helper.make_function("own", "f", ["a", "b"], ["c"], [node], opsets, attributes=["alpha"])
    proto.functions.add().CopyFrom(made)


def _recursive(proto: onnx.ModelProto) -> None:
    proto.opset_import.add(domain="own", version=1)
    proto.graph.node[0].domain, proto.graph.node[0].op_type = "own", "f"
    opsets = [onnx.helper.make_opsetid("", 21), onnx.helper.make_opsetid("own", 1)]
    body = [onnx.helper.make_node("f", ["a", "b"], ["c"], domain="own")]
    proto.functions.add().CopyFrom(onnx.helper.make_function("own", "f", ["a", "b"], ["c"], body, opsets))


def changed(change: Callable[[onnx.ModelProto], None]) -> ir.Model:
    proto = linear()
    change(proto)
    return compiled(proto)


@pytest.mark.parametrize(
    "noted",
    [
        {"same_as": 9},
        {"same_as": "0"},
        {"inputs": {"0": "nowhere"}},
        {"inputs": {"x": "x"}},
        {"inputs": []},
        {"operator": "Add"},
        {"operator": ["Add", {"axis": {}}], "read": [], "output": 0},
        {"operator": ["Add", {}], "read": [], "output": 10**9},
    ],
)
def test_notes_for_inference_are_checked_before_training(noted: dict[str, Any], tmp_path: Path) -> None:
    proto = ir.to_proto(compiled(linear()))
    name = next(name for node in proto.graph.node for name in node.output if "." not in name)
    value = next((v for v in proto.graph.value_info if v.name == name), None) or proto.graph.value_info.add(name=name)
    value.metadata_props.add(key="graphopt.inference", value=json.dumps(noted))
    onnx.save(proto, tmp_path / "step.onnx")
    with pytest.raises(GraphoptError, match=r"metadata 'graphopt\.inference': expected"):
        graphopt.load(tmp_path / "step.onnx")


@pytest.mark.parametrize("noted", ["-", "[]", "{}", '{"outputs": 3, "parts": []}', '{"outputs": ["q"], "parts": []}'])
def test_what_was_set_aside_is_checked_before_more_is(noted: str) -> None:
    proto = model(
        "g (float[N,4] x) => (float[N,3] y, seq(float[N,3]) s) { y = MatMul(x, w) s = SequenceConstruct(y) }",
        w=W,
    )
    proto.metadata_props.add(key="graphopt.aside", value=noted)
    refused(proto, r"^the model: metadata 'graphopt\.aside': expected")


def test_a_training_graph_is_not_compiled_again() -> None:
    refused(ir.to_proto(compiled(linear())), "expected an inference model, found a training graph")


@pytest.mark.parametrize("name", ["w.next", "w.momentum", "loss", "step", "learning_rate", "target"])
def test_names_that_training_needs_are_free_for_weights_and_inner_values(name: str) -> None:
    feeds = {"x": np.ones((2, 3), np.float32), "target": np.zeros((2, 2), np.float32)}
    own, expected = linear(), run(compiled(linear()), 3, feeds)
    for node in own.graph.node:
        node.input[:] = [{"b": name, "p": f"{name}.next"}.get(x, x) for x in node.input]
        node.output[:] = [{"p": f"{name}.next"}.get(x, x) for x in node.output]
    own.graph.initializer[1].name = name
    step = compiled(own)
    found = run(step, 3, feeds)
    assert [float(x["loss"]) for x in found] == [float(x["loss"]) for x in expected]
    executor = graphopt.Executor(step, device="cpu")
    executor.step(feeds)
    assert {x.name for x in executor.trained().graph.initializer} == {"w", name}


@pytest.mark.parametrize("name", ["w.next", "loss", "step"])
def test_names_that_training_needs_and_outputs_have_are_told(name: str) -> None:
    own = linear()
    own.graph.output[0].name = own.graph.node[-1].output[0] = name
    refused(own, f"{name!r}")


def doubling(text: str, count: int) -> str:
    lines = "\n".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(count))
    return f"g (float[N,4] x) => (float[N,3] y) {{ {text}\n{lines}\n m = MatMul(x, w)\n y = Add(m, c{count}) }}"


def nested_functions(count: int) -> str:
    functions = "\n".join(
        f'<domain: "own", opset_import: ["" : 21, "own" : 1]> f{i + 1} (a) => (c) {{ b = own.f{i}(a) c = own.f{i}(b) }}'
        for i in range(count)
    )
    return (
        f'<ir_version: 10, opset_import: ["" : 21, "own" : 1]> g (float[N,4] x) => (float[N,4] y) '
        f"<float[4] w = {{1.3, -0.2, 0.7, 2.9}}> {{ m = Mul(x, w) y = own.f{count}(m) }} "
        f'<domain: "own", opset_import: ["" : 21]> f0 (a) => (c) {{ c = Tanh(a) }} {functions}'
    )


SIZE = "s = Constant<value_ints=[%s]>()\n c0 = ConstantOfShape<value = float[1] {0.5}>(s)"
EXPANDING = {
    "a large constant of shape": model(doubling(SIZE % 2**31, 0), w=W),
    "one of more bytes than a number holds": model(doubling(SIZE % f"{2**40},{2**40}", 0), w=W),
    "several constants of shape": model(doubling(SIZE % 2**27, 4), w=W),
    "34 concatenations of floats": model(doubling("c0 = Constant<value_floats=[1.0]>()", 34), w=W),
    "34 concatenations of integers": model(
        "g (float[N,4] x) => (float[N,3] y) { c0 = Constant<value_ints=[1]>()\n"
        + "\n".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(34))
        + "f = Cast<to=1>(c34) m = MatMul(x, w)\n y = Add(m, f) }",
        w=W,
    ),
    "34 concatenations of as many integers as a product says": model(
        "g (float[N,4] x) => (float[N,3] y) { a = Constant<value_ints=[0]>() b = Constant<value_ints=[8]>()\n"
        "n = Mul(b, b) c0 = Slice(sizes, a, n)\n"
        + "\n".join(f"c{i + 1} = Concat<axis=0>(c{i}, c{i})" for i in range(34))
        + "f = Cast<to=1>(c34) r = ReduceMax<keepdims=0>(f) m = MatMul(x, w) y = Add(m, r) }",
        w=W,
        sizes=np.arange(100),
    ),
    "34 sequences of integers that are joined": model(
        "g (float[N,4] x) => (float[N,3] y) { c0 = Constant<value_ints=[1]>()\n"
        + "\n".join(
            f"s{i} = SequenceConstruct(c{i}, c{i}) c{i + 1} = ConcatFromSequence<axis=0>(s{i})" for i in range(34)
        )
        + "f = Cast<to=1>(c34) r = ReduceMax<keepdims=0>(f) m = MatMul(x, w) y = Add(m, r) }",
        w=W,
    ),
    "a range": model(
        f"g (float[N,4] x) => (float[N,3] y) {{ a = Constant<value_int=0>() b = Constant<value_int={2**33}>() "
        "d = Constant<value_int=1>() r = Range(a, b, d) f = Cast<to=1>(r) s = ReduceSum<keepdims=0>(f) "
        "m = MatMul(x, w) y = Add(m, s) }",
        w=W,
    ),
    "an expansion of a constant": model(
        f"g (float[N,4] x) => (float[N,3] y) {{ n = Constant<value_ints=[{2**33}]>() o = Constant<value_float=1.0>() "
        "e = Expand(o, n) s = ReduceSum<keepdims=0>(e) m = MatMul(x, w) y = Add(m, s) }",
        w=W,
    ),
    "what a static input's shape says": model(
        f"g (float[{2**40}] x) => (float[M] y) {{ s = Shape(x) c = ConstantOfShape(s) m = Mul(x, w) y = Add(m, c) }}",
        w=W[:1, 0],
    ),
    "a product of a static input's shape": model(
        "g (float[8,4] x) => (float[8,3] y) { s = Shape(x) n = Mul(s, sizes) c = ConstantOfShape(n) "
        "r = ReduceSum<keepdims=0>(c) m = MatMul(x, w) y = Add(m, r) }",
        w=W,
        sizes=np.array([2**20, 2**20]),
    ),
    "24 functions that call one another twice": onnx.parser.parse_model(nested_functions(23)),
    "40 functions that call one another": onnx.parser.parse_model(nested_functions(40)),
}


@pytest.mark.parametrize("case", EXPANDING)
def test_what_a_small_file_expands_to_is_measured_first(case: str) -> None:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    refused(EXPANDING[case], r"limits\.(constant_bytes|nodes|depth)=\d+ allows it")
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak < 300_000  # KiB


B = 2**40
IMAGE = "g (float[N,1,H,W] x) => (float[N,1,L,M] y) { v = Mul(x, w)"
LARGE_GRADIENTS = {
    "a kernel of many taps": (f"{IMAGE} y = AveragePool<kernel_shape=[{B},2]>(v) }}", {}),
    "many windows": (
        f"g (float[N,1,{B},4] x) => (float[N,1,L,M] y) {{ v = Mul(x, w) "
        "y = AveragePool<kernel_shape=[3,3], strides=[2,2], ceil_mode=1>(v) }",
        {},
    ),
    "a sum of powers": (f"{IMAGE} y = LpPool<kernel_shape=[{B},2]>(v) }}", {}),
    "minors": (f"g (float[N,{2**15},{2**15}] x) => (float[N] y) {{ v = Mul(x, w) y = Det(v) }}", {}),
    "samples of a bin": (
        f"{IMAGE} y = RoiAlign<sampling_ratio={B}>(v, rois, batch) }}",
        {"rois": np.zeros((1, 4)), "batch": np.array([0])},
    ),
    "a kernel of many offsets": (
        f"g (float[N,1,H,W] x, float[1,1,{2**20},{2**20}] k, float[N,C,L,M] o) => (float[N,1,L,M] y) "
        "{ v = Mul(x, w) y = DeformConv(v, k, o) }",
        {},
    ),
    "blocks of an image": (
        "g (float[N,C,L] x) => (float[N,D,H,W] y) { v = Mul(x, w) y = Col2Im(v, image, block) }",
        {"image": np.array([B, B]), "block": np.array([2**20, 2**20])},
    ),
}


@pytest.mark.parametrize("case", LARGE_GRADIENTS)
def test_constants_that_a_gradient_would_make_are_counted_first(case: str) -> None:
    text, given = LARGE_GRADIENTS[case]
    with pytest.raises(GraphoptError, match="it takes a constant of at most 16,777,216 elements, found"):
        graphopt.compile(model(text, w=np.ones(1), **given), parameters=passes.Parameters(unfreeze="w"), loss=SQUARES)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (
            "g (float[N,4] x) => (float[N,4] y) { v = Mul(x, w) y = InstanceNormalization(v, one, one) }",
            "expected axes after batch and channels, found 'v'",
        ),
        (
            'g (float[N,1,2,4] x) => (float[N,1,2,2] y) { v = Mul(x, w) y = GridSample<mode="">(v, grid) }',
            "unknown mode ''; known: cubic",
        ),
        (
            "g (float[T,N,4] x) => (float[T,1,N,1] y) "
            '{ v = Mul(x, w) y = LSTM<direction="up", hidden_size=1>(v, k, r) }',
            "expected a direction of forward, reverse, bidirectional, found 'up'",
        ),
    ],
)
def test_attributes_that_inference_leaves_unchecked(text: str, found: str) -> None:
    given = {"grid": np.zeros((1, 2, 2, 2)), "k": np.ones((1, 4, 4)), "r": np.ones((1, 4, 1))}
    refused(model(text, w=np.ones(4), one=np.ones(4), **given), found)


# Nodes that make a size below 0 of a value u of 1 x 1 x 4 x 4; inference itself refuses those that end with "refused".
NEGATIVE = {
    "AveragePool": "c = AveragePool<kernel_shape=[9,9]>(u)",
    "CenterCropPad": "c = CenterCropPad(u, shape)",
    "ConstantOfShape, refused": "c = ConstantOfShape(shape)",
    "Conv": "c = Conv(u, wide)",
    "Conv and Relu": "b = Conv(u, wide) c = Relu(b)",
    "ConvTranspose": "c = ConvTranspose<pads=[9,9,9,9]>(u, w)",
    "DeformConv": "c = DeformConv(u, wide, u)",
    "Expand, refused": "c = Expand(u, shape)",
    "If": "c = If(flag) <then_branch = a () => (float[1,1,A,B] a1) { a1 = Conv(u, wide) }, "
    "else_branch = b () => (float[1,1,A,B] b1) { b1 = Conv(u, wide) }>",
    "MaxPool": "c = MaxPool<kernel_shape=[9,9]>(u)",
    "OneHot, refused": "i = Cast<to=7>(u) c = OneHot(i, minus, pair)",
    "Pad": "c = Pad(u, crop)",
    "Pad of a Slice of a MaxPool": "s = MaxPool<kernel_shape=[2,2]>(u) b = Slice(s, zero, two, axes) c = Pad(b, crop)",
    "RandomNormal, refused": "c = RandomNormal<shape=[1,1,-4,4]>()",
    "Reshape, refused": "c = Reshape(u, shape)",
    "Split": "d, c = Split<axis=3>(u, split)",
    "Tile, refused": "c = Tile(u, shape)",
    "TopK": "c, d = TopK<axis=2>(u, minus)",
}
READERS = {
    "Relu": "v = Relu(c)",
    "Slice": "v = Slice(c, zero, two, axes)",
    "GatherND": "j = Cast<to=7>(c) v = GatherND(u, j)",
    "in a body": "v = If(flag) <then_branch = d () => (float[A,B,C,D] d1) { d1 = Slice(c, zero, two, axes) }, "
    "else_branch = e () => (float[A,B,C,D] e1) { e1 = Identity(u) }>",
}


def sliced(maker: str, reader: str) -> onnx.ModelProto:
    numbers = {"shape": [1, 1, -4, 4], "minus": [-3], "split": [6, -2], "crop": [0, 0, -9, 0, 0, 0, 0, 0]}
    numbers |= {"zero": [0, 0], "two": [2, 2], "axes": [2, 3]}
    nodes = f"u = Mul(x, w) {maker} {reader} y = ReduceSum<keepdims=0>(v)"
    return model(
        f"g (float[1,1,4,4] x, bool flag) => (float y) {{ {nodes} }}",
        w=np.ones((1, 1, 1, 1)),
        wide=np.ones((1, 1, 9, 9)),
        pair=np.ones(2),
        **{name: np.array(its) for name, its in numbers.items()},
    )


@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("maker", NEGATIVE)
def test_a_size_below_zero_does_not_end_the_process(maker: str, reader: str) -> None:
    refused(sliced(NEGATIVE[maker], READERS[reader]), "cannot infer|expected sizes of 0 or more")


def test_an_estimate_of_memory_assumes_no_size_that_ends_the_process() -> None:
    proto = model(
        """g (float[N,2,L] x) => (float[N,2] y) {
            c = Conv(x, w)
            z = Constant<value_ints = [0]>()
            one = Constant<value_ints = [1]>()
            two = Constant<value_ints = [2]>()
            s = Slice(c, z, one, two)
            y = Squeeze(s, two)
        }""",
        w=np.ones((2, 2, 40)),
    )
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    with pytest.raises(GraphoptError, match=r"sizes: expected .* all shapes follow, found \{'N': 2, 'L': 16\}"):
        estimate(step, {"N": 2, "L": 16})
    assert estimate(step, {"N": 2, "L": 64}).parameters == 640


@pytest.mark.parametrize("place", ["a function", "before a function", "declared"])
def test_a_size_below_zero_beside_a_function_does_not_end_the_process(place: str) -> None:
    bodies = {"a function": ("u", "b = Conv(z, wide) v = Slice(b, zero, two, axes)")}
    argument, body = bodies.get(place, ("c", "v = Slice(z, zero, two, axes)"))
    makers = {"before a function": "c = Conv(u, wide)", "declared": "c = own.Unknown(u)"}
    proto = sliced(makers.get(place, ""), f"v = own.Cut({argument}, wide, zero, two, axes)")
    proto.opset_import.add(domain="own", version=1)
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("c", onnx.TensorProto.FLOAT, [1, 1, -4, 4]))
    text = f'<domain: "own", opset_import: ["" : 21]> Cut (z, wide, zero, two, axes) => (v) {{ {body} }}'
    proto.functions.append(onnx.parser.parse_function(text))
    typed = infer_message(proto) if place != "before a function" else None
    assert typed is None or typed.graph.node
    with contextlib.suppress(GraphoptError):
        compiled(proto)


def test_sizes_behind_windows_are_inferred() -> None:
    """They take two rounds of inference."""
    maker = "b = MaxPool<kernel_shape=[2,2]>(u) s = Slice(b, zero, two, axes) c = MaxPool<kernel_shape=[2,2]>(s)"
    typed = infer_message(sliced(maker, READERS["Slice"]), propagate=True, strict=True)
    sizes = {x.name: [dim.dim_value for dim in x.type.tensor_type.shape.dim] for x in typed.graph.value_info}
    assert (sizes["s"], sizes["v"]) == ([1, 1, 2, 2], [1, 1, 1, 1])
    assert [node.domain for node in typed.graph.node] == [""] * 6


@pytest.mark.parametrize(
    "text",
    [
        "g (float[N,4] x) => (float[N,4] y) { v = Mul(x, w) y = GlobalMaxPool(v) }",
        "g (float[0,4] x) => (float[4] y) { v = Mul(x, w) y = Gather(v, zero) }",
        "g (float[N,4] x) => (float[M] y) { s = SplitToSequence(x) a = SequenceAt(s, several) y = Mul(a, w) }",
        "g (float[N,4] x) => (float[M] y) { s = SplitToSequence(x) a = SequenceAt(s, none) y = Mul(a, w) }",
        f"g (float[{B},4] x) => (float[M,4] y) {{ s = SplitToSequence(x) a = SequenceAt(s, zero) y = Mul(a, w) }}",
        f"g (float[N,{B}] x) => (float[N,M] y) "
        "{ s = SplitToSequence<axis=1>(x, four) a = SequenceAt(s, zero) y = Mul(a, w) }",
    ],
)
def test_what_is_odd_and_valid_compiles_at_once(text: str) -> None:
    given = {
        "zero": np.array(0),
        "several": np.array([0, 1]),
        "none": np.zeros(0, np.int64),
        "four": np.array(4),
    }
    with contextlib.suppress(GraphoptError):  # what has no gradient
        compiled(model(text, w=np.ones(4), **given))


def test_limits_can_be_raised_and_lowered() -> None:
    proto = onnx.parser.parse_model(nested_functions(6))
    with pytest.raises(GraphoptError, match=r"at most 100 nodes .* found 192: limits\.nodes=192 allows it"):
        graphopt.load(proto, limits=Limits(nodes=100))
    assert len(compiled(graphopt.load(proto, limits=Limits(nodes=200))).graph) > 64
    proto = model(
        "g (float[N,4] x) => (float[N,3] y) { c = ConstantOfShape(size) s = ReduceSum<keepdims=0>(c) "
        "m = MatMul(x, w) y = Add(m, s) }",
        w=W,
        size=np.array([1000]),
    )
    lowered = graphopt.load(proto, limits=Limits(constant_bytes=0))
    refused(lowered, r"ConstantOfShape node .*, found 4,004, .*limits\.constant_bytes=4004 allows it")
    compiled(proto)


@pytest.mark.parametrize(
    "text",
    [
        "g (float[N,4] x) => (float[N,3] y) { s = Shape(x) n = Mul(s, sizes) c = ConstantOfShape(n)",
        "g (float[8,4] x) => (float[8,3] y) { s = Shape(x) p = Pow(s, sizes) n = Div(p, p) c = ConstantOfShape(n)",
        "g (float[8,4] x) => (float[8,3] y) { c = Expand(x, row)",
    ],
)
def test_sizes_that_only_the_runtime_computes_are_not_counted(text: str) -> None:
    """The step compiles, and takes what it takes where it runs."""
    rest = "r = ReduceSum<keepdims=0>(c) m = MatMul(x, w) y = Add(m, r) }"
    sizes = np.array([2**20, 2**20])
    compiled(model(f"{text} {rest}", w=W, sizes=sizes, row=np.array([2**40, 1, 1])))


@pytest.mark.slow
def test_bodies_that_nest_too_deeply_are_told() -> None:
    def nested(depth: int) -> ir.Model:
        value = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
        condition = ir.Value(name="c", type=ir.TensorType(ir.DataType.BOOL), shape=ir.Shape([]))
        node = ir.node("Identity", [value])
        for _ in range(depth):
            bodies = {
                "then_branch": ir.Graph([], list(node.outputs), nodes=[node], name="a"),
                "else_branch": ir.Graph([], [], nodes=[], name="b"),
            }
            node = ir.node("If", [condition], bodies)
        graph = ir.Graph([value, condition], list(node.outputs), nodes=[node], opset_imports={"": 21}, name="g")
        return ir.Model(graph, ir_version=10)

    refused(nested(40), r"nested at most 24 deep, found 40: limits\.depth=40 allows it")
    refused(nested(2000), "nested")


@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=pytest.mark.exhaustive)])
@pytest.mark.slow
def test_inputs_of_a_fuzzer_are_taken_or_refused(count: int) -> None:
    fuzzer = Path(__file__).with_name("fuzzing.py")
    seed = ["--seed", "0"] if count < 5000 else []
    ended = subprocess.run(
        [sys.executable, str(fuzzer), str(count), *seed], capture_output=True, text=True, check=False
    )
    assert ended.returncode == 0, ended.stdout + ended.stderr


def test_slices_in_the_layers_of_a_decoder_take_no_round_of_inference_each(monkeypatch):
    """A file of 4 bits has a Slice after each product of what DequantizeLinear, Range and Split give."""
    layer = """
        w{i} = DequantizeLinear(q, scale) h{i} = MatMul(x{i}, w{i}) a{i}, b{i} = Split<axis=1, num_outputs=2>(h{i})
        c{i}, d{i} = Split<axis=1>(h{i}, parts) e{i} = Concat<axis=1>(a{i}, d{i})
        s{i} = Slice(e{i}, zero, one) n{i} = Size(s{i}) r{i} = Range(start, n{i}, step) f{i} = Cast<to=1>(r{i})
        g{i} = ReduceSum<keepdims=0>(f{i}) x{j} = Add(e{i}, g{i})"""
    text = "g (float[N,4] x0) => (float[N,4] x5) {" + "".join(layer.format(i=i, j=i + 1) for i in range(5)) + "}"
    weights = {"q": np.ones((4, 4), np.int8), "scale": np.float32(0.1), "parts": np.array([2, 2])}
    weights |= {"zero": np.array([0]), "one": np.array([1]), "start": np.array(0), "step": np.array(1)}
    calls, infer = [], onnx.shape_inference.infer_shapes
    monkeypatch.setattr(onnx.shape_inference, "infer_shapes", lambda *a, **k: calls.append(1) or infer(*a, **k))
    typed = infer_message(model(text, **weights))
    assert len(calls) == 1
    assert [dim.dim_value for dim in typed.graph.output[0].type.tensor_type.shape.dim][1] == 4


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("hostile_models_mistakes"))
def test_what_is_wrong_is_told_in_a_line(call: str, stored: Path) -> None:
    messages.refused("hostile_models_mistakes", call, {**globals(), "stored": stored})

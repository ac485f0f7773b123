"""Frozen weights of 2, 4 and 8 bits stay packed in training graphs and in memory, and compute as floats do."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from builders import model
from onnx import TensorProto, helper, numpy_helper
from steps import compiled as compiled_with
from steps import outputs

import graphopt
import passes
from graphopt import GraphoptError

RNG = np.random.default_rng(5)
OLD = tuple(map(int, onnxruntime.__version__.split(".")[:2])) < (1, 24)
MICROSOFT = "com.microsoft"


def numbers_in(packed: np.ndarray, bits: int) -> np.ndarray:
    """Return the numbers in bytes along the last axis, low bits first."""
    parts = [packed >> shift & 2**bits - 1 for shift in range(0, 8, bits)]
    return np.stack(parts, -1).reshape(*packed.shape[:-1], -1)


def graph(nodes, weights, inputs, outputs, opset=21):
    made = helper.make_graph(nodes, "g", inputs, outputs, weights)
    opsets = [helper.make_opsetid("", opset), helper.make_opsetid(MICROSOFT, 1)]
    return helper.make_model(made, opset_imports=opsets, ir_version=10)


def info(name, shape, code=TensorProto.FLOAT):
    return helper.make_tensor_value_info(name, code, shape)


class Packed:
    """A MatMulNBits between a trained gain of its inputs and a trained bias, and its weight as floats, [K,N]."""

    def __init__(self, bits=4, block=32, size=96, points="", rank=3, bias=False, outputs=5, dtype=np.float32):
        rows = -(-size // block)
        q = RNG.integers(0, 256, (outputs, rows, block * bits // 8), np.uint8)
        s = (RNG.uniform(0.08, 0.16, (outputs, rows)) / 2 ** (bits - 1)).astype(dtype)
        z = np.full((outputs, rows), 2.0 ** (bits - 1), np.float32)
        weights = {"w.Q": q, "w.scales": s}
        if points == "packed":
            weights["w.zeros"] = RNG.integers(0, 256, (outputs, -(-rows * bits // 8)), np.uint8)
            z = numbers_in(weights["w.zeros"], bits)[:, :rows].astype(np.float32)
        elif points == "floating":
            weights["w.zeros"] = z = (z + RNG.uniform(-2, 2, z.shape)).astype(dtype)
        inputs = ["h", *weights]
        if bias:
            weights["w.bias"] = RNG.standard_normal(outputs).astype(dtype)
            inputs += [""] * (5 - len(inputs)) + ["w.bias"]
        weights |= {"gain": RNG.standard_normal(size).astype(dtype), "shift": np.zeros(outputs, dtype)}
        steps = numbers_in(q, bits).astype(np.float32) - z.astype(np.float32)[..., None]
        floats = (steps * s.astype(np.float32)[..., None]).reshape(outputs, -1)[:, :size]
        self.w, self.weights, self.rank = floats.T.copy(), weights, rank
        code = helper.np_dtype_to_tensor_dtype(np.dtype(dtype))
        shape = ["M", *[4] * (rank - 2)]
        attributes = {"K": size, "N": outputs, "bits": bits, "block_size": block}
        nodes = [
            helper.make_node("Mul", ["x", "gain"], ["h"]),
            helper.make_node("MatMulNBits", inputs, ["p"], domain=MICROSOFT, name="proj", **attributes),
            helper.make_node("Add", ["p", "shift"], ["y"]),
        ]
        stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
        ends = [info("x", [*shape, size], code)], [info("y", [*shape, outputs], code)]
        self.proto = graph(nodes, stored, *ends)
        self.x = RNG.standard_normal((3, *shape[1:], size)).astype(dtype)
        self.t = RNG.standard_normal((3, *shape[1:], outputs)).astype(dtype)


FORMS = [
    *({"bits": bits, "block": block} for bits, block in itertools.product((2, 4, 8), (16, 32, 128, 256))),
    *({"bits": bits, "points": points, "bias": True} for bits in (2, 4, 8) for points in ("packed", "floating")),
    *({"bits": bits, "size": 40, "block": 16, "points": "packed"} for bits in (2, 4, 8)),
    {"rank": 2, "bias": True},
    {"rank": 4, "size": 50},
    {"rank": 2, "outputs": 1, "block": 64},
]


def runs_on_the_kernel(form):
    floating = form.get("points") == "floating" and form["bits"] == 8  # which the CPU provider lacks
    return not floating and not (OLD and (form.get("bits") != 4 or form.get("bias")))


def trained_by_torch(packed, rate, steps):
    """Return the losses of SGD of the gain and the biases, by PyTorch's autograd with the weight as floats."""
    names = [name for name in ("gain", "shift", "w.bias") if name in packed.weights]
    own = {name: torch.tensor(packed.weights[name], requires_grad=True) for name in names}
    optimizer, losses = torch.optim.SGD(own.values(), rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        y = (torch.tensor(packed.x) * own["gain"]) @ torch.tensor(packed.w) + own["shift"]
        y = y + own["w.bias"] if "w.bias" in own else y
        loss = torch.nn.functional.mse_loss(y, torch.tensor(packed.t))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def by_runtime(proto, **feeds):
    return next(iter(outputs(proto, feeds).values()))


def compiled(proto, **options):
    return compiled_with(proto, **{"optimizer": passes.SGD(0.01), **options})


@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.sample(12)
def test_what_is_not_packed_trains_as_with_float_weights(form):
    packed = Packed(**form)
    step = compiled(packed.proto)
    executor = graphopt.Executor(step, threads=1)
    assert set(executor.parameters) == {"gain", "shift", "w.bias"} & packed.weights.keys()
    y = executor.predict(x=packed.x)["y"]
    exact = (packed.x * packed.weights["gain"]) @ packed.w + packed.weights.get("w.bias", 0)
    np.testing.assert_allclose(y, exact, rtol=1e-6, atol=1e-6 * np.abs(exact).max())
    if runs_on_the_kernel(form):
        np.testing.assert_allclose(y, by_runtime(packed.proto, x=packed.x), atol=2e-6 * np.abs(y).max())
    losses = [executor.step(x=packed.x, target=packed.t)["loss"] for _ in range(20)]
    np.testing.assert_allclose(losses, trained_by_torch(packed, 0.01, 20), rtol=2e-6)
    assert losses[-1] < losses[0]


def dequantizing(model):
    return [node for node in model.graph if node.op_type == "DequantizeLinear"]


def test_the_bytes_of_the_file_are_in_the_training_graph_once():
    packed = Packed(size=1024, outputs=64)
    step = compiled(packed.proto)
    forward, backward = dequantizing(step)
    assert forward.inputs[0] is backward.inputs[0]
    assert forward.inputs[0].name == "w.Q" and forward.inputs[0].dtype is ir.DataType.UINT4
    assert forward.inputs[0].const_value.tobytes() == packed.weights["w.Q"].tobytes()
    large = [x for x in step.graph.initializers.values() if x.const_value.nbytes > 4096]
    assert {x.name for x in large} == {"w.Q", "w.scales"}


def test_each_use_waits_for_what_it_is_multiplied_with():
    """The scale of a DequantizeLinear depends on the other operand, so that no runtime computes it earlier."""
    step = compiled(Packed(size=1024, outputs=64).proto)
    for node in dequantizing(step):
        assert not node.inputs[1].is_initializer()
        (user,) = node.outputs[0].consumers()
        while user.op_type in ("Reshape", "Transpose"):
            (user,) = user.outputs[0].consumers()
        assert user.op_type in ("MatMul", "Gemm")
        assert node.inputs[0].name == "w.Q"
        other, before, seen = user.inputs[0], [node.inputs[1]], set()
        while before:
            x = before.pop()
            seen.add(x)
            before.extend(x.producer().inputs if x.producer() else ())
        assert other in seen


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("batch", ["M", 3])
def test_no_session_has_the_weight_as_floats(batch, native, tmp_path, monkeypatch):
    """Not even of a fixed batch size, of which a runtime knows all shapes."""
    packed = Packed(size=1024, outputs=64)
    for value in (packed.proto.graph.input[0], packed.proto.graph.output[0]):
        if batch != "M":
            value.type.tensor_type.shape.dim[0].dim_value = batch
    written = []
    new = graphopt.Device.new_session_options

    def writing(self, **more):
        options = new(self, **more)
        written.append(tmp_path / f"{len(written)}.onnx")
        options.optimized_model_filepath = str(written[-1])
        return options

    monkeypatch.setattr(graphopt.Device, "new_session_options", writing)
    executor = graphopt.Executor(compiled(packed.proto), threads=1, native=native, verify=False)
    executor.step(x=packed.x, target=packed.t)
    executor.predict(x=packed.x)
    found = [path for path in written if path.exists()]
    assert len(found) >= 2
    for path in found:
        weights = onnx.load(path).graph.initializer
        assert max(len(x.raw_data) for x in weights if x.data_type == TensorProto.FLOAT) <= 64 * 32 * 4


def test_a_weight_that_two_products_share_is_stored_once():
    packed = Packed(size=64, outputs=64, block=32)
    second = helper.make_node("MatMulNBits", ["y1", "w.Q", "w.scales"], ["y"], domain=MICROSOFT)
    second.attribute.extend(packed.proto.graph.node[1].attribute)
    packed.proto.graph.node[2].output[0] = "y1"
    packed.proto.graph.node.append(second)
    step = compiled(packed.proto)
    assert {node.inputs[0].name for node in dequantizing(step)} == {"w.Q"}
    found = graphopt.Executor(step, threads=1).predict(x=packed.x)["y"]
    np.testing.assert_allclose(found, (packed.x * packed.weights["gain"]) @ packed.w @ packed.w, rtol=1e-5, atol=1e-5)


def test_the_trained_model_dequantizes_once_and_waits_for_nothing():
    packed = Packed(size=1024, outputs=64)
    executor = graphopt.Executor(compiled(packed.proto), threads=1)
    executor.step(x=packed.x, target=packed.t)
    trained = executor.trained()
    onnx.checker.check_model(trained, full_check=True)
    operators = [node.op_type for node in trained.graph.node]
    assert operators == ["Mul", "DequantizeLinear", "Reshape", "Transpose", "MatMul", "Add"]
    np.testing.assert_allclose(executor.predict(x=packed.x)["y"], by_runtime(trained, x=packed.x), rtol=1e-5, atol=1e-4)


def test_packed_weights_compose_with_other_passes():
    packed = Packed(size=128, outputs=64)
    steps = {
        "recompute": passes.Recompute(),
        "clip": passes.ClipGlobalNorm(10.0),
        "accumulate": passes.Accumulate(1),
    }
    plain, other = (graphopt.Executor(compiled(packed.proto, **more), threads=1) for more in ({}, steps))
    for _ in range(3):
        losses = [x.step(x=packed.x, target=packed.t)["loss"] for x in (plain, other)]
        np.testing.assert_allclose(*losses, rtol=1e-5)


def test_half_precision_dequantizes_to_half():
    packed = Packed(size=128, outputs=64, dtype=np.float16)
    executor = graphopt.Executor(compiled(packed.proto, optimizer=passes.SGD(0.01)), threads=1)
    y = executor.predict(x=packed.x)["y"]
    exact = (packed.x * packed.weights["gain"]).astype(np.float32) @ packed.w
    np.testing.assert_allclose(y, exact, atol=2e-2 * np.abs(exact).max())
    losses = [executor.step(x=packed.x, target=packed.t)["loss"] for _ in range(10)]
    assert losses[-1] < losses[0]


@pytest.mark.parametrize("order", [np.zeros(63), np.full(64, 2), np.full(64, -1)])
def test_wrong_groups_are_refused(order):
    packed = Packed(size=64)
    packed.proto.graph.initializer.append(numpy_helper.from_array(order.astype(np.int32), "order"))
    packed.proto.graph.node[1].input.extend(["", "order"])
    with pytest.raises(GraphoptError, match="expected its input 4 to be 64 numbers below 2, found others"):
        compiled(packed.proto)


def test_an_adapter_trains_beside_reordered_weights_and_fp4():
    """Both compute the weight by more than a DequantizeLinear."""
    group = np.random.default_rng(0).permutation(np.arange(64) // 32).astype(np.int32)
    reordered, bnb = Packed(size=64), Packed(size=64)
    reordered.proto.graph.initializer.append(numpy_helper.from_array(group, "order"))
    reordered.proto.graph.node[1].input.extend(["", "order"])
    node = bnb.proto.graph.node[1]
    node.op_type = "MatMulBnb4"
    kept = [a for a in node.attribute if a.name != "bits"]
    del node.attribute[:]
    node.attribute.extend([*kept, helper.make_attribute("quant_type", 0)])
    for tensor in [x for x in bnb.proto.graph.initializer if x.name in ("w.Q", "w.scales")]:
        tensor.dims[:] = [np.prod(tensor.dims)]
    for packed in (reordered, bnb):
        step = graphopt.compile(
            packed.proto,
            adapter=passes.LoRA("w.Q", rank=2),
            loss=passes.MeanSquaredError(),
            optimizer=passes.Adam(0.01),
        )
        executor = graphopt.Executor(step, threads=1)
        target = np.zeros((3, 4, 5), np.float32)
        losses = [executor.step(x=packed.x, target=target)["loss"] for _ in range(4)]
        assert losses[3] < losses[0]
        found = outputs(executor.trained(into=packed.proto), {"x": packed.x})["y"]
        np.testing.assert_allclose(found, executor.predict(x=packed.x)["y"], rtol=1e-4, atol=1e-4)


def test_wrong_sizes_are_refused():
    packed = Packed(size=64)
    packed.proto.graph.node[1].attribute[0].i = 320
    with pytest.raises(GraphoptError, match=r"weight 'w.Q' to have 800 bytes, found 160"):
        compiled(packed.proto)


def embedding(kind, bits, width, block, points):
    """Return a table of packed rows, and the table as floats."""
    blocks, rows = -(-width // block), 11
    scales = RNG.uniform(0.01, 0.02, (rows, blocks)).astype(np.float32)
    low = -8 if kind == "int4" else 0
    if kind == "uint8":
        data = RNG.integers(0, 256, (rows, width * bits // 8), np.uint8)
        zeros = RNG.integers(0, 256, (rows, -(-blocks * bits // 8)), np.uint8)
        weights = [numpy_helper.from_array(data, "e"), numpy_helper.from_array(zeros, "z")]
        q, z = numbers_in(data, bits), numbers_in(zeros, bits)[:, :blocks]
        middle = 2 ** (bits - 1)
    else:
        q, z = (RNG.integers(low, low + 16, shape) for shape in ((rows, width), (rows, blocks)))
        code, middle = getattr(TensorProto, kind.upper()), 0
        pairs = (("e", q), ("z", z))
        weights = [helper.make_tensor(name, code, x.shape, x.ravel()) for name, x in pairs]
    z = z if points else np.full_like(z, middle)
    floats = (q.astype(np.float32) - np.repeat(z, block, 1)[:, :width]) * np.repeat(scales, block, 1)[:, :width]
    weights = [*weights[: 1 + points], numpy_helper.from_array(scales, "s")]
    weights += [numpy_helper.from_array(RNG.standard_normal((width, 3)).astype(np.float32), "w")]
    attributes = {"block_size": block, "quantize_axis": 1, "gather_axis": 0}
    attributes |= {"bits": bits} if kind == "uint8" else {}
    nodes = [
        helper.make_node(
            "GatherBlockQuantized",
            ["e", "ids", "s", "z"][: 3 + points],
            ["r"],
            domain=MICROSOFT,
            **attributes,
        ),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    shape = ["N", "T"]
    return graph(nodes, weights, [info("ids", shape, TensorProto.INT64)], [info("y", [*shape, 3])]), floats


TABLES = [("uint8", 4), ("uint8", 8), ("uint8", 2), ("int4", 4), ("uint4", 4)]


@pytest.mark.parametrize(("width", "block"), [(64, 32), (48, 16), (40, 16), (128, 128)])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize(("kind", "bits"), TABLES)
def test_rows_of_a_packed_table_are_gathered_packed(kind, bits, points, width, block):
    proto, table = embedding(kind, bits, width, block, points)
    ids = RNG.integers(-11, 11, (2, 5))
    step = compiled(proto)
    executor = graphopt.Executor(step, threads=1)
    assert set(executor.parameters) == {"w"}
    found = executor.predict(ids=ids)["y"]
    np.testing.assert_allclose(
        found, table[ids] @ numpy_helper.to_array(proto.graph.initializer[-1]), rtol=1e-5, atol=1e-5
    )
    if not OLD:
        np.testing.assert_allclose(found, by_runtime(proto, ids=ids), rtol=1e-6, atol=1e-6)
    target = RNG.standard_normal((2, 5, 3)).astype(np.float32)
    losses = [executor.step(ids=ids, target=target)["loss"] for _ in range(5)]
    assert losses[-1] < losses[0]
    floats = [x.const_value.size for x in step.graph.initializers.values() if x.dtype is ir.DataType.FLOAT]
    assert max(floats) < table.size


def test_a_table_of_odd_rows_of_4_bits_is_gathered():
    proto, table = embedding("int4", 4, 33, 16, True)
    ids = RNG.integers(0, 11, (2, 5))
    found = graphopt.Executor(compiled(proto), threads=1).predict(ids=ids)["y"]
    w = numpy_helper.to_array(proto.graph.initializer[-1])
    np.testing.assert_allclose(found, table[ids] @ w, rtol=1e-6, atol=1e-6)


def quantized_table(kind, form, points, axis=0):
    """Return a graph that gathers from a dequantized table, with a scale, one for each row or column, or blocks."""
    rows, width, block = 24, 32, 8
    low, high = {"int8": (-128, 128), "uint8": (0, 256), "int4": (-8, 8), "uint4": (0, 16)}[kind]
    code, along = getattr(TensorProto, kind.upper()), {"rows": 0}.get(form, 1)
    shape = {"one": (), "rows": (rows,), "columns": (width,), "blocks": (rows, width // block)}[form]
    scale = RNG.uniform(0.01, 0.02, shape).astype(np.float32)
    integers = {"q": RNG.integers(low, high, (rows, width)), "z": RNG.integers(low, high, shape)}
    weights = [helper.make_tensor(name, code, x.shape, x.ravel()) for name, x in integers.items()]
    weights = [*weights[: 1 + points], numpy_helper.from_array(scale, "s")]
    size = rows if axis else width
    weights.append(numpy_helper.from_array(RNG.standard_normal((size, 3)).astype(np.float32), "w"))
    attributes = {"block_size": block} if form == "blocks" else {}
    read = ["q", "s", "z"][: 2 + points]
    nodes = [
        helper.make_node("DequantizeLinear", read, ["table"], axis=along, **attributes),
        helper.make_node("Gather", ["table", "ids"], ["e"], axis=axis),
        helper.make_node("Transpose", ["e"], ["r"], perm=[1, 2, 0] if axis else [0, 1, 2]),
        helper.make_node("MatMul", ["r", "w"], ["y"]),
    ]
    inputs = [info("ids", ["N", "T"], TensorProto.INT64)]
    return graph(nodes, weights, inputs, [info("y", ["N", "T", 3]), info("r", ["N", "T", size])])


@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("form", ["one", "rows", "columns", "blocks"])
@pytest.mark.parametrize("kind", ["int8", "uint8", "int4", "uint4"])
def test_rows_of_a_dequantized_table_are_gathered_packed(kind, form, points):
    """They equal the rows of the file bit for bit, and no node dequantizes the table."""
    for axis in (0, 1) if kind.endswith("8") and form != "blocks" else (0,):
        proto = quantized_table(kind, form, points, axis)
        ids = RNG.integers(-24, 24, (2, 5))
        steps = {"loss": passes.MeanSquaredError(output="y"), "parameters": passes.Parameters(freeze="q")}
        step = compiled(proto, **steps)
        assert not dequantizing(step)
        executor = graphopt.Executor(step, threads=1)
        assert set(executor.parameters) == {"w"}
        y, r = onnxruntime.InferenceSession(proto.SerializeToString()).run(["y", "r"], {"ids": ids})
        np.testing.assert_array_equal(executor.predict(ids=ids)["r"], r)
        found = executor.step(ids=ids, target=np.zeros_like(y))["loss"]
        assert found == pytest.approx(np.square(y).mean(), rel=1e-5)
        trained = onnxruntime.InferenceSession(executor.trained(into=proto).SerializeToString())
        np.testing.assert_array_equal(trained.run(["r"], {"ids": ids})[0], r)
        np.testing.assert_array_equal(graphopt.run(executor.trained(), {"ids": ids})["r"], r)


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_two_gathers_share_a_table(kind):
    """As an encoder and a decoder do."""
    proto = quantized_table(kind, "blocks", True)
    proto.graph.node[3].output[0] = "first"
    proto.graph.input.append(info("others", ["N", "T"], TensorProto.INT64))
    proto.graph.node.append(helper.make_node("Gather", ["table", "others"], ["e2"]))
    proto.graph.node.append(helper.make_node("MatMul", ["e2", "w"], ["second"]))
    proto.graph.node.append(helper.make_node("Add", ["first", "second"], ["y"]))
    steps = {"loss": passes.MeanSquaredError(output="y"), "parameters": passes.Parameters(freeze="q")}
    step = compiled(proto, **steps)
    bits = [x for x in step.graph.initializers.values() if x.const_value.size >= 24 * 16]
    assert len(bits) == 1 and not dequantizing(step)
    feeds = {name: RNG.integers(0, 24, (2, 5)) for name in ("ids", "others")}
    expected = onnxruntime.InferenceSession(proto.SerializeToString()).run(["y"], feeds)[0]
    found = graphopt.Executor(step, threads=1).predict(**feeds)["y"]
    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)


def test_a_head_and_an_embedding_share_packed_bytes():
    """As in files of onnxruntime-genai's builder with shared embeddings."""
    vocabulary, width, block = 40, 64, 32
    q = RNG.integers(0, 256, (vocabulary, width // block, block // 2), np.uint8)
    scales = RNG.uniform(0.01, 0.02, (vocabulary, width // block)).astype(np.float32)
    weights = {"head.Q4": q, "head.scales": scales, "flat": np.array([vocabulary, width // 2])}
    weights["gain"] = np.ones(width, np.float32)
    gathers = {"bits": 4, "block_size": block, "gather_axis": 0, "quantize_axis": 1}
    multiplies = {"K": width, "N": vocabulary, "bits": 4, "block_size": block}
    nodes = [
        helper.make_node("Reshape", ["head.Q4", "flat"], ["table"]),
        helper.make_node("GatherBlockQuantized", ["table", "ids", "head.scales"], ["e"], domain=MICROSOFT, **gathers),
        helper.make_node("Mul", ["e", "gain"], ["h"]),
        helper.make_node("MatMulNBits", ["h", "head.Q4", "head.scales"], ["y"], domain=MICROSOFT, **multiplies),
    ]
    stored = [numpy_helper.from_array(array, name) for name, array in weights.items()]
    inputs, outputs = [info("ids", ["N", "T"], TensorProto.INT64)], [info("y", ["N", "T", vocabulary])]
    proto = graph(nodes, stored, inputs, outputs)
    floats = ((numbers_in(q, 4).astype(np.float32) - 8) * scales[..., None]).reshape(vocabulary, width)
    ids = RNG.integers(0, vocabulary, (2, 5))
    step = compiled(proto)
    executor = graphopt.Executor(step, threads=1)
    assert set(executor.parameters) == {"gain"}
    np.testing.assert_allclose(executor.predict(ids=ids)["y"], floats[ids] @ floats.T, rtol=1e-5, atol=1e-5)
    assert {node.inputs[0].name for node in dequantizing(step)} == {"head.Q4.rows"}
    assert [x.name for x in proto.graph.initializer] == list(weights)


@pytest.mark.parametrize("bits", [4, 8])
def test_a_packed_weight_that_is_asked_for_trains_by_a_master(bits):
    packed = Packed(bits=bits, size=64, outputs=64)
    step = compiled(packed.proto, parameters=passes.Parameters(unfreeze="w.Q"), optimizer=passes.SGD(1.0))
    executor = graphopt.Executor(step, threads=1)
    np.testing.assert_allclose(executor.parameters["w.Q"].reshape(64, 64).T, packed.w)
    losses = [executor.step(x=packed.x, target=packed.t)["loss"] for _ in range(30)]
    assert losses[-1] < 0.9 * losses[0]
    stored = {x.name: x for x in executor.trained().graph.initializer}["w.Q"]
    assert stored.data_type == (TensorProto.UINT4 if bits == 4 else TensorProto.UINT8)
    assert (numpy_helper.to_array(stored) != numbers_in(packed.weights["w.Q"], bits).reshape(-1, 32)).any()


def lora_by_torch(packed, values, rate, steps, *, dora):
    """Return the losses of an adapter of rank 4 and scale 2 that PyTorch trains beside the weight as floats."""
    a, b, *rest = (torch.tensor(x, requires_grad=True) for x in values)
    w, gain, shift = (torch.tensor(x) for x in (packed.w, packed.weights["gain"], packed.weights["shift"]))
    bias = torch.tensor(packed.weights.get("w.bias", np.zeros(len(shift), np.float32)))
    optimizer, losses = torch.optim.SGD([a, b, *rest], rate), []
    for _ in range(steps):
        optimizer.zero_grad()
        h, whole = torch.tensor(packed.x) * gain, w + 2 * (a @ b)
        y = h @ w + 2 * (h @ a) @ b
        if dora:
            y = (h @ whole) * (rest[0] / whole.norm(dim=0).detach())
        loss = torch.nn.functional.mse_loss(y + bias + shift, torch.tensor(packed.t))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize(
    "form",
    [
        {"size": 96},
        {"size": 40, "block": 16, "points": "packed", "bias": True},
        {"bits": 8, "points": "floating"},
        {"bits": 2, "rank": 2},
    ],
    ids=str,
)
def test_an_adapter_of_a_packed_weight_trains_as_pytorchs_beside_floats(form, dora):
    packed = Packed(**form, outputs=64)
    step = compiled(packed.proto, adapter=passes.LoRA("w.Q", rank=4, alpha=8, dora=dora), optimizer=passes.SGD(0.05))
    executor = graphopt.Executor(step, threads=1)
    names = ["w.Q.lora_A", "w.Q.lora_B", "w.Q.lora_magnitude"][: 2 + dora]
    assert list(executor.parameters) == names
    values = [executor.parameters[name] for name in names]
    losses = [executor.step(x=packed.x, target=packed.t)["loss"] for _ in range(20)]
    np.testing.assert_allclose(losses, lora_by_torch(packed, values, 0.05, 20, dora=dora), rtol=1e-6)
    assert losses[-1] < losses[0]
    floats = [x.const_value.size for x in step.graph.initializers.values() if x.dtype is ir.DataType.FLOAT]
    assert max(floats, default=0) < packed.w.size / 8


def test_a_stack_of_packed_weights_gets_adapters():
    """The backward pass of a layer below dequantizes the weight of the layer above."""
    packed = Packed(size=64, outputs=64)
    second = helper.make_node("MatMulNBits", ["y1", "w2.Q", "w.scales"], ["y"], domain=MICROSOFT)
    second.attribute.extend(packed.proto.graph.node[1].attribute)
    packed.proto.graph.node[2].output[0] = "y1"
    packed.proto.graph.node.append(second)
    other = RNG.integers(0, 256, packed.weights["w.Q"].shape, np.uint8)
    packed.proto.graph.initializer.append(numpy_helper.from_array(other, "w2.Q"))
    step = compiled(packed.proto, adapter=passes.LoRA("w*.Q", rank=4))
    assert sorted(node.inputs[0].name for node in dequantizing(step)) == ["w.Q", "w2.Q", "w2.Q"]


MEMORY = """
import sys, numpy as np, graphopt
def kilobytes(): return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith("VmHWM")))
executor = graphopt.Executor(sys.argv[1], threads=1, native=False, verify=False)
x = np.ones((4, 2048), np.float32)
executor.step(x=x, target=x)
open("/proc/self/clear_refs", "w").write("5")  # forget the peak of reading the file
executor.step(x=x, target=x)
print(kilobytes())
"""


@pytest.mark.slow
@pytest.mark.skipif(OLD, reason="onnxruntime takes values of 4 bits since 1.20")
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="/proc has the peak")
def test_a_layer_of_4_bits_takes_less_than_a_third_of_floats(tmp_path):
    """By the slope of the peak memory of a step over the number of layers."""
    peaks, width, layers = [], 2048, (2, 7)
    for count in layers:
        weights, lines, last = {}, [], "x"
        for i in range(count):
            weights |= {
                f"w{i}": RNG.standard_normal((width, width)).astype(np.float32) / 32,
                f"b{i}": np.zeros(width),
            }
            lines.append(f"m{i} = MatMul({last}, w{i}) a{i} = Add(m{i}, b{i}) h{i} = Tanh(a{i})")
            last = f"h{i}"
        text = f"g (float[M,{width}] x) => (float[M,{width}] y) {{ {' '.join(lines)} y = Identity({last}) }}"
        step = compiled(model(text, **weights), quantize=passes.QuantizeWeights(), parameters=passes.Parameters("b*"))
        path = tmp_path / f"{count}.onnx"
        graphopt.save(step, path)
        assert path.stat().st_size < 0.2 * 4 * width * width * count
        run = [sys.executable, "-c", MEMORY, str(path)]
        own = os.environ | {"MALLOC_MMAP_THRESHOLD_": "65536"}  # what is freed goes back to the system
        found = subprocess.run(run, check=True, capture_output=True, text=True, env=own).stdout
        peaks.append(1024 * int(found))
    slope = (peaks[1] - peaks[0]) / (layers[1] - layers[0])
    assert slope < 0.3 * 4 * width * width, slope / (4 * width * width)

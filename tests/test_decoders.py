"""Decoders with caches train on all positions at once, and go back into their files with the caches."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch
from steps import assert_close, assert_equal, normalized, outputs, weights

import graphopt
import passes
from graphopt.graph.metadata import TOKEN_POSITIONS
from graphopt.graph.postprocessing import Caches
from passes.lowering.attention import ATTENTION_SCORES

RNG = np.random.default_rng(0)
OLD = onnxruntime.__version__.startswith("1.19")
B, S, D = 2, 5, 16
HEADER = '<ir_version: 10, opset_import: ["" : {opset}, "com.microsoft" : 1]>'
CACHES = "float[B,2,P,8] past_key, float[B,2,P,8] past_value"
PRESENT = "float[B,2,T,8] present_key, float[B,2,T,8] present_value"
PROJECTED = "q = MatMul(x, wq) k = MatMul(x, wk) v = MatMul(x, wv)"
SPLIT = """four = Constant<value = int64[4] {0, 0, 2, 8}>()
    qr = Reshape(q, four) qh = Transpose<perm = [0, 2, 1, 3]>(qr)
    kr = Reshape(k, four) kh = Transpose<perm = [0, 2, 1, 3]>(kr)
    vr = Reshape(v, four) vh = Transpose<perm = [0, 2, 1, 3]>(vr)"""
ATTENDED = """kt = Transpose<perm = [0, 1, 3, 2]>(present_key) s = MatMul(qh, kt) p = Softmax<axis = -1>(s)
    a = MatMul(p, present_value) at = Transpose<perm = [0, 2, 1, 3]>(a)
    three = Constant<value = int64[3] {0, 0, 16}>() y = Reshape(at, three)"""
APPENDED = "present_key = Concat<axis = 2>(past_key, kh) present_value = Concat<axis = 2>(past_value, vh)"

# The inputs and outputs beside x and y, the nodes, the opset and what the training graph takes.
FORMS: dict[str, tuple[str, str, str, int]] = {
    "group query": (
        f"{CACHES}, int64[B,M] attention_mask",
        PRESENT,
        f"""{PROJECTED} axes = Constant<value = int64[1] {{1}}>() n = ReduceSum<keepdims = 0>(attention_mask, axes)
        less = Sub(n, axes) lengths = Cast<to = 6>(less) sizes = Shape(attention_mask)
        one = Constant<value = int64 {{1}}>() m = Gather(sizes, one) total = Cast<to = 6>(m)
        y, present_key, present_value = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 2>(
            q, k, v, past_key, past_value, lengths, total)""",
        21,
    ),
    "multi-head": (
        CACHES,
        PRESENT,
        f"""{PROJECTED} y, present_key, present_value = com.microsoft.MultiHeadAttention<num_heads = 2,
            unidirectional = 1>(q, k, v, , , , past_key, past_value)""",
        21,
    ),
    "stacked": (
        "float[2,B,2,P,8] past",
        "float[2,B,2,T,8] present",
        """y, present = com.microsoft.Attention<num_heads = 2, unidirectional = 1>(x, w, bias, , past)""",
        21,
    ),
    "of ONNX": (
        CACHES,
        PRESENT,
        f"""{PROJECTED} y, present_key, present_value = Attention<q_num_heads = 2, kv_num_heads = 2,
            is_causal = 1>(q, k, v, , past_key, past_value)""",
        23,
    ),
    "of ONNX, opset 24": (
        CACHES,
        PRESENT,
        f"""{PROJECTED} y, present_key, present_value = Attention<q_num_heads = 2, kv_num_heads = 2,
            is_causal = 1>(q, k, v, , past_key, past_value)""",
        24,
    ),
    "by hand": (CACHES, PRESENT, f"{PROJECTED} {SPLIT} {APPENDED} {ATTENDED}", 21),
    "by hand, begun with nothing": (
        CACHES,
        PRESENT,
        f"""{PROJECTED} {SPLIT} none = Constant<value = float[0] {{}}>() begun = Concat<axis = 2>(past_key)
        present_key = Concat<axis = 2>(begun, kh) present_value = Concat<axis = 2>(past_value, vh) {ATTENDED}""",
        21,
    ),
    "by hand, stacked": (
        "float[2,B,2,P,8] past",
        "float[2,B,2,T,8] present",
        f"""{PROJECTED} {SPLIT} zero = Constant<value = int64 {{0}}>() one = Constant<value = int64 {{1}}>()
        past_key = Gather(past, zero) past_value = Gather(past, one) {APPENDED}
        first = Constant<value = int64[1] {{0}}>() k5 = Unsqueeze(present_key, first)
        v5 = Unsqueeze(present_value, first) present = Concat<axis = 0>(k5, v5) {ATTENDED}""",
        21,
    ),
    "by hand, sizes": (
        CACHES,
        PRESENT,
        f"""{PROJECTED} {SPLIT} {APPENDED} two = Constant<value = int64 {{2}}>() sizes = Shape(past_key)
        before = Gather(sizes, two) number = Cast<to = 1>(before) {ATTENDED.replace("y = Reshape", "z = Reshape")}
        y = Add(z, number)""",
        21,
    ),
    "branches": (
        f"{CACHES}, bool[1] use_cache",
        PRESENT,
        f"""{PROJECTED} {SPLIT} present_key, present_value = If (use_cache) <
            then_branch = then () => (float[B,2,T,8] tk, float[B,2,T,8] tv) {{
                tk = Concat<axis = 2>(past_key, kh) tv = Concat<axis = 2>(past_value, vh) }},
            else_branch = other () => (float[B,2,S,8] ek, float[B,2,S,8] ev) {{
                ek = Identity(kh) ev = Identity(vh) }}> {ATTENDED}""",
        21,
    ),
}


def decoder(form: str) -> onnx.ModelProto:
    more, results, nodes, opset = FORMS[form]
    shapes = {"w": (D, 3 * D), "bias": (3 * D,)} if form == "stacked" else dict.fromkeys(("wq", "wk", "wv"), (D, D))
    weights = {name: RNG.standard_normal(shape).astype(np.float32) / 2 for name, shape in shapes.items()}
    text = f"{HEADER.format(opset=opset)} g (float[B,S,{D}] x, {more}) => (float[B,S,{D}] y, {results}) {{ {nodes} }}"
    proto = onnx.parser.parse_model(text)
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in weights.items())
    return proto


def run(model: onnx.ModelProto, x: np.ndarray) -> dict[str, np.ndarray]:
    """Run a model with an empty past."""
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    running = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    feeds: dict[str, np.ndarray] = {}
    for value in running.get_inputs():
        sizes = [{"B": B, "S": S, "P": 0, "M": S}.get(dim, dim) for dim in value.shape]
        feeds[value.name] = {
            "attention_mask": np.ones((B, S), np.int64),
            "use_cache": np.array([False]),
            "x": x,
        }.get(value.name, np.zeros([dim if isinstance(dim, int) else 0 for dim in sizes], np.float32))
    names = [y.name for y in running.get_outputs()]
    return dict(zip(names, running.run(names, feeds), strict=True))


@pytest.mark.parametrize("form", FORMS)
def test_a_decoder_trains_without_its_cache_and_keeps_it(form):
    if OLD and form.startswith("of ONNX"):
        pytest.skip("onnxruntime 1.19 has no opset 23")
    proto = decoder(form)
    x = RNG.standard_normal((B, S, D)).astype(np.float32)
    expected = run(proto, x)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    caches = Caches.read(step)
    assert {*caches.inputs} == {value.name for value in proto.graph.input} - {"x"}
    assert {*caches.outputs} == set(expected) - {"y"}
    executor = graphopt.Executor(step, threads=1)
    assert list(executor.inputs) == ["x", "target"]
    np.testing.assert_allclose(executor.predict(x=x)["y"], expected["y"], rtol=1e-4, atol=1e-6)
    assert_close(run(executor.trained(), x), expected, rtol=1e-4)
    assert_equal(run(executor.trained(into=proto), x), expected)
    losses = [executor.step(x=x, target=np.zeros_like(x))["loss"] for _ in range(3)]
    assert losses[2] < losses[0]
    file = executor.trained(into=proto)
    assert [value.name for value in file.graph.input] == [value.name for value in proto.graph.input]
    np.testing.assert_allclose(run(file, x)["y"], executor.predict(x=x)["y"], rtol=1e-4, atol=1e-6)


@pytest.mark.skipif(OLD, reason="onnxruntime 1.19 has no opset 24")
@pytest.mark.parametrize("causal", [0, 1])
def test_attention_of_rows_with_lengths_trains_as_pytorch_does(causal):
    """A causal query counts its position from the end of the keys of its row, and one without keys returns zeros."""
    proto = onnx.parser.parse_model(
        f"""{HEADER.format(opset=24)} g (float[B,S,{D}] x, int64[B] n) => (float[B,S,{D}] y) {{ {PROJECTED}
            y = Attention<q_num_heads = 2, kv_num_heads = 2, is_causal = {causal}>(q, k, v, , , , n) }}"""
    )
    weights = {name: RNG.standard_normal((D, D)).astype(np.float32) / 2 for name in ("wq", "wk", "wv")}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in weights.items())
    x, target = RNG.standard_normal((2, B, S, D)).astype(np.float32)
    n = np.array([3, S])
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step, threads=1)
    own = [torch.tensor(w, requires_grad=True) for w in weights.values()]
    optimizer, places = torch.optim.SGD(own, 0.1), torch.arange(S)
    lengths = torch.tensor(n)[:, None, None, None]
    allowed = (places < lengths).expand(B, 1, S, S)
    if causal:
        allowed = allowed & (places <= places[:, None] + lengths - S)
    losses = []
    for _ in range(5):
        heads = [(torch.tensor(x) @ w).reshape(B, S, 2, D // 2).transpose(1, 2) for w in own]
        y = torch.nn.functional.scaled_dot_product_attention(*heads, attn_mask=allowed)
        loss = ((y.transpose(1, 2).reshape(B, S, D) - torch.tensor(target)) ** 2).mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append((executor.step(x=x, n=n, target=target)["loss"], loss.item()))
    np.testing.assert_allclose(*np.transpose(losses), rtol=1e-5)


@pytest.mark.parametrize("form", ["group query", "multi-head", "stacked", "of ONNX", "of ONNX, opset 24", "by hand"])
def test_scores_of_attention_are_marked(form):
    model = normalized(decoder(form))
    marked = [node for node in model.graph if ATTENTION_SCORES.is_set(node)]
    assert len(marked) == 1
    assert {reader.op_type for reader in marked[0].outputs[0].consumers()} == {"Softmax"}


def test_positions_of_rotary_embeddings_are_marked():
    proto = onnx.parser.parse_model(
        f"""{HEADER.format(opset=21)} g (float[B,S,32] x, int32[B] n, int32 total) => (float[B,S,32] y) {{
            y = com.microsoft.GroupQueryAttention<num_heads = 2, kv_num_heads = 2, do_rotary = 1>(
                x, x, x, , , n, total, cos, sin) }}"""
    )
    tables = {name: np.ones((8, 8), np.float32) for name in ("cos", "sin")}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in tables.items())
    marked = [node for node in normalized(proto).graph if TOKEN_POSITIONS.is_set(node)]
    assert len(marked) == 1 and [*marked[0].outputs[0].shape] == [1, "S"]


@pytest.mark.parametrize(
    ("past", "nodes"),
    [
        (
            "float[B,P,8] past",
            "present = Concat<axis = 1>(past, x) r = ReduceSum(past) z = MatMul(present, w) y = Add(z, r)",
        ),
        ("float[B,3,8] past", "present = Concat<axis = 1>(past, x) y = MatMul(present, w)"),
        ("float[B,S,8] past", "present = Concat<axis = 1>(past, x) y = MatMul(present, w)"),
        (
            "float[B,P,8] past",
            "joined = Concat<axis = 1>(past, x) present = Relu(joined) y = MatMul(joined, w)",
        ),
    ],
    ids=["read by others", "of a fixed size", "as long as other inputs", "without an output"],
)
def test_an_input_that_is_no_cache_stays(past, nodes):
    proto = onnx.parser.parse_model(
        f"{HEADER.format(opset=21)} g (float[B,S,8] x, {past}) => (float[B,T,8] y, float[B,T,8] present) {{ {nodes} }}"
    )
    proto.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(8, dtype=np.float32), "w"))
    model = normalized(proto)
    assert [x.name for x in model.graph.inputs] == ["x", "past"] and Caches.read(model) is None


STATIC = {
    "TensorScatter": "present = TensorScatter<axis = 2>(past, h, at)",
    "ScatterND": "present = ScatterND(past, indices, h)",
}


@pytest.mark.parametrize("kind", STATIC)
def test_a_cache_of_a_fixed_size_stays_with_a_warning(kind):
    """Fed with zeros, and positions from 0, the model trains as PyTorch does with zeros in the other places."""
    if OLD and kind == "TensorScatter":
        pytest.skip("onnxruntime 1.19 has no opset 24")
    inputs = "int64[B] at" if kind == "TensorScatter" else "int64[B,2,S,3] indices"
    proto = onnx.parser.parse_model(
        f"""{HEADER.format(opset=24)} g (float[B,S,{D}] x, float[B,2,7,8] past, {inputs})
            => (float[B,2,7,8] y, float[B,2,7,8] present) {{
            m = MatMul(x, w) four = Constant<value = int64[4] {{0, 0, 2, 8}}>() r = Reshape(m, four)
            h = Transpose<perm = [0, 2, 1, 3]>(r) {STATIC[kind]} y = Tanh(present) }}"""
    )
    w = RNG.standard_normal((D, D)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(w, "w"))
    options = {"loss": passes.MeanSquaredError(output="y"), "optimizer": passes.SGD(0.1)}
    with pytest.warns(
        UserWarning,
        match=rf"^inputs 'past': caches of a fixed size .* found {kind} into 'past' of shape \[B,2,7,8\]",
    ):
        step = graphopt.compile(proto, **options)
    assert Caches.read(step) is None
    x, target = (RNG.standard_normal(shape).astype(np.float32) for shape in ((B, S, D), (B, 2, 7, 8)))
    places = np.stack(np.indices((B, 2, S)), axis=-1)
    feeds = {"at": np.zeros(B, np.int64)} if kind == "TensorScatter" else {"indices": places}
    executor = graphopt.Executor(step, threads=1)
    own = torch.tensor(w, requires_grad=True)
    for _ in range(4):
        h = (torch.tensor(x) @ own).reshape(B, S, 2, 8).transpose(1, 2)
        y = torch.tanh(torch.nn.functional.pad(h, (0, 0, 0, 7 - S)))
        loss = torch.nn.functional.mse_loss(y, torch.tensor(target))
        (gradient,) = torch.autograd.grad(loss, own)
        found = executor.step(x=x, past=np.zeros_like(target), target=target, **feeds)["loss"]
        assert found == pytest.approx(loss.item(), rel=1e-5)
        own = (own - 0.1 * gradient).detach().requires_grad_()


@pytest.mark.parametrize("index", ["int64 {2}", "int64[1] {2}"])
def test_one_size_of_a_cache_is_read_where_others_are_unknown(index):
    """In files of 16 bits for CPUs, a mask reads the length of the past, of which the file leaves a dimension open."""
    nodes = f"""{PROJECTED} sizes = Shape(past_key) at = Constant<value = {index}>() length = Gather(sizes, at)
        z, present_key, present_value = com.microsoft.MultiHeadAttention<num_heads = 2>(
            q, k, v, , , , past_key, past_value) number = Cast<to = 1>(length) y = Add(z, number)"""
    proto = onnx.parser.parse_model(
        f"""{HEADER.format(opset=21)} g (float[B,S,16] x, float[B,2,P,K] past_key, float[B,2,P,K] past_value)
            => (float[B,S,16] y, {PRESENT}) {{ {nodes} }}"""
    )
    rng = np.random.default_rng(0)
    weights = {name: rng.standard_normal((D, D)).astype(np.float32) / 2 for name in ("wq", "wk", "wv")}
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(w, name) for name, w in weights.items())
    model = normalized(proto)
    assert [x.name for x in model.graph.inputs] == ["x"]
    x, past = rng.standard_normal((B, S, D)).astype(np.float32), np.zeros((B, 2, 0, 8), np.float32)
    expected = outputs(proto, {"x": x, "past_key": past, "past_value": past})["y"]
    np.testing.assert_allclose(outputs(model, {"x": x})["y"], expected, rtol=1e-4, atol=1e-6)


def test_a_past_that_is_computed_is_refused():
    text = f"""{HEADER.format(opset=21)} g (float[B,S,16] x, float[B,2,P,8] past, int32[B] n, int32 total)
        => (float[B,S,16] y) {{ twice = Add(past, past) y = com.microsoft.GroupQueryAttention<num_heads = 2,
        kv_num_heads = 2>(x, x, x, twice, twice, n, total) }}"""
    with pytest.raises(graphopt.GraphoptError, match="its past 'twice' is not covered: expected an input that only"):
        normalized(onnx.parser.parse_model(text))


def test_declared_shapes_of_constants_give_way():
    """onnxruntime-genai's builder declares the outputs of all Constants as scalars."""
    proto = decoder("group query")
    proto.graph.value_info.append(onnx.helper.make_tensor_value_info("axes", onnx.TensorProto.INT64, []))
    x = RNG.standard_normal((B, S, D)).astype(np.float32)
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    np.testing.assert_allclose(graphopt.Executor(step).predict(x=x)["y"], run(proto, x)["y"], rtol=1e-4, atol=1e-6)


# The file that was compiled, with trained weights.


def tied() -> onnx.ModelProto:
    """Return a model with a weight, its transpose, and a weight in a node."""
    proto = onnx.parser.parse_model(
        f"""{HEADER.format(opset=21)} g (float[B,4] x) => (float[B,4] y) {{
            c = Constant<value = float[4] {{0.5, -1.5, 2.5, 3.5}}>() h = MatMul(x, first) a = Add(h, c)
            t = Tanh(a) z = MatMul(t, second) u = Mul(z, third) y = Add(u, frozen) }}"""
    )
    w = RNG.standard_normal((4, 9)).astype(np.float32)
    arrays = {
        "first": w[:, :4].copy(),
        "second": w[:, :4].T.copy(),
        "third": w[1, 4:8].copy(),
        "frozen": w[0, 4:8].copy(),
    }
    proto.graph.initializer.extend(onnx.numpy_helper.from_array(array, name) for name, array in arrays.items())
    return proto


def test_tied_weights_and_those_in_nodes_go_into_the_file(tmp_path):
    proto = tied()
    graphopt.save(proto, tmp_path / "model.onnx")
    parameters = passes.Parameters(freeze="frozen", retie="second")
    step = graphopt.compile(proto, parameters=parameters, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    graphopt.save(step, tmp_path / "step.onnx")
    executor = graphopt.Executor(graphopt.load(tmp_path / "step.onnx"), threads=1)
    assert numbers(executor.trained(into=proto)) == numbers(proto)
    x = RNG.standard_normal((6, 4)).astype(np.float32)
    for _ in range(3):
        executor.step(x=x, target=np.zeros_like(x))
    for source in (proto, tmp_path / "model.onnx", ir.from_proto(proto)):
        file = executor.trained(into=source)
        arrays = weights(file)
        np.testing.assert_array_equal(arrays["first"], arrays["second"].T)
        found = outputs(file, {"x": x})["y"]
        np.testing.assert_allclose(found, executor.predict(x=x)["y"], rtol=1e-5, atol=1e-6)


def numbers(proto: onnx.ModelProto) -> dict[str, list[float]]:
    return {x.name: onnx.numpy_helper.to_array(x).ravel().tolist() for x in proto.graph.initializer}


def test_another_file_is_refused():
    proto = tied()
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(freeze="frozen"),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.1),
    )
    executor = graphopt.Executor(step, threads=1)
    names = [x.name for x in proto.graph.initializer]
    for name, change, message in (
        (
            "first",
            lambda x: x.reshape(2, 8),
            r"weight 'first': expected the file .* FLOAT\[4, 4\], found FLOAT\[2, 8\]",
        ),
        ("third", None, "with weight 'third', found none of this name"),
        (
            "frozen",
            lambda x: x + 1,
            "weight 'frozen', which does not train: expected the numbers of the file",
        ),
    ):
        other = onnx.ModelProto.FromString(proto.SerializeToString())
        tensor = other.graph.initializer[names.index(name)]
        if change is None:
            tensor.name = "other"
        else:
            tensor.CopyFrom(onnx.numpy_helper.from_array(change(onnx.numpy_helper.to_array(tensor)), name))
        with pytest.raises(graphopt.GraphoptError, match=message):
            executor.trained(into=other)
    with pytest.raises(graphopt.GraphoptError, match="outputs: expected none with into"):
        executor.trained(["y"], into=proto)
    with pytest.raises(graphopt.GraphoptError, match=r"none\.onnx: no such file"):
        executor.trained(into="none.onnx")

"""A file of batch 1 trains with any batch where each row is computed by itself; others are refused."""

from __future__ import annotations

import io
import warnings

import numpy as np
import onnx
import pytest
import torch
import torch_models
from builders import model
from steps import assert_close, outputs
from twins import descended

import graphopt
import passes
from graphopt.errors import GraphoptError

RNG = np.random.default_rng(0)
W = RNG.standard_normal((4, 3)).astype(np.float32)
FREE = passes.Normalize(batch="free")


def weights() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(1)
    shapes = {
        "w": (4, 3),
        "k": (2, 3, 3, 3),
        "v": (32, 5),
        "row0": (6,),
        "k3": (3, 3, 3, 3),
        "gw": (1, 9, 4),
        "gr": (1, 9, 3),
        "state": (1, 1, 3),
        "cls": (1, 1, 4),
        "table": (9, 4),
        "row": (1, 4),
        "c": (4,),
    }
    numbers = {name: rng.standard_normal(shape) / 2 for name, shape in shapes.items()}
    integers = {
        "flat": [1, 32],
        "lines": [6, 4],
        "back": [1, 6, 4],
        "heads": [1, 6, 2, 2],
        "one": [1],
        "zero": [0],
    }
    integers |= {
        "two": [2],
        "all": [1, 6, 4],
        "twice": [2, 1, 1],
        "sizes": [1, 3, 8, 8],
        "beside": [6, 2, 2],
        "beside2": [6, 1, 4],
    }
    return numbers | {name: np.array(value) for name, value in integers.items()}


# Files of a batch B, and a text of their input without it.
KEPT = {
    "Gemm": ("float[B,4] x) => (float[B,3] y) { y = Gemm(x, w) }", (4,)),
    "Reshape": (
        "float[B,3,4,4] x) => (float[B,5] y) { h = Conv<pads=[1,1,1,1]>(x, k) r = Relu(h) "
        "f = Reshape(r, flat) y = MatMul(f, v) }", (3, 4, 4),
    ),
    "merged rows": (
        "float[B,6,4] x) => (float[B,6,4] y) { m = Reshape(x, lines) t = Tanh(m) p = Mul(t, c) y = Reshape(p, back) }",
        (6, 4),
    ),
    "attention": (
        "float[B,6,4] x) => (float[B,2,6,6] y) { h = Reshape(x, heads) q = Transpose<perm=[0,2,1,3]>(h) "
        "k1 = Transpose<perm=[0,2,3,1]>(h) s = MatMul(q, k1) a = Softmax(s) y = Mul(a, row0) }", (6, 4),
    ),
    "token of a class": (
        "float[B,6,4] x) => (float[B,4] y) { j = Concat<axis=1>(cls, x) n = LayerNormalization(j, c) "
        "y = Gather<axis=1>(n, nought) }", (6, 4),
    ),
    "a vector": ("float[B,6,4] x) => (float[B,6] y) { h = MatMul(x, c) y = Tanh(h) }", (6, 4)),
    "Squeeze and Unsqueeze": (
        "float[B,1,4] x) => (float[B,1,3] y) { s = Squeeze(x, one) m = MatMul(s, w) y = Unsqueeze(m, one) }", (1, 4),
    ),
    "Squeeze of the batch": (
        "float[B,6,4] x) => (float[B,6,3] y) { s = Squeeze(x, zero) m = MatMul(s, w) y = Unsqueeze(m, zero) }", (6, 4),
    ),
    "Slice, reductions": (
        "float[B,6,4] x) => (float[B,4] y) { s = Slice(x, one, two, one) m = ReduceMean(x, one) d = Sub(m, s) "
        "z = ReduceSum<keepdims=0>(d, one) y = Mul(z, c) }", (6, 4),
    ),
    "Expand, broadcast": (
        "float[B,1,4] x) => (float[B,6,4] y) { e = Expand(x, all) a = Add(e, row) y = Mul(a, c) }", (1, 4),
    ),
    "Resize": ('float[B,3,4,4] x) => (float[B,3,8,8] y) { h = Conv<pads=[1,1,1,1]>(x, k3) '
               'y = Resize<mode="linear">(h, , , sizes) }', (3, 4, 4)),
    "time first": (
        "float[B,6,4] x) => (float[B,3] y) { t = Transpose<perm=[1,0,2]>(x) "
        "h, last = GRU<hidden_size=3>(t, gw, gr, , , state) y = Squeeze(last, zero) }", (6, 4),
    ),
    "heads beside rows": (
        "float[B,6,4] x) => (float[B,6,4] y) { t = Transpose<perm=[1,0,2]>(x) h = Reshape(t, beside) "
        "q = Transpose<perm=[1,0,2]>(h) k1 = Transpose<perm=[0,2,1]>(q) s = MatMul(q, k1) a = Softmax(s) "
        "o = MatMul(a, q) b = Transpose<perm=[1,0,2]>(o) j = Reshape(b, beside2) p = Mul(j, c) "
        "y = Transpose<perm=[1,0,2]>(p) }", (6, 4),
    ),
    "batch statistics of no batch": (
        "float[B,4] x) => (float[B,4] y) { y = BatchNormalization(x, c, c, c, ones) }", (4,),
    ),
}  # fmt: skip


def file_of(text: str, batch: str, declared: str = "B") -> onnx.ModelProto:
    text = text.replace(f"[{declared},", f"[{batch},")
    proto = model(f"g ({text}", **weights(), nought=np.array(0), ones=np.ones(4))
    used = {name for node in proto.graph.node for name in node.input}
    kept = [x for x in proto.graph.initializer if x.name in used]
    del proto.graph.initializer[:]
    proto.graph.initializer.extend(kept)
    return proto


def compiled(proto: onnx.ModelProto, **steps) -> graphopt.Executor:
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.1)} | steps
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return graphopt.Executor(graphopt.compile(proto, **steps), threads=1, native=False)


@pytest.mark.parametrize("name", KEPT)
def test_rows_are_those_of_the_file_one_at_a_time(name):
    text, shape = KEPT[name]
    proto = file_of(text, "1")
    executor = compiled(proto, normalize=FREE)
    for rows in (1, 3, 7):
        x = np.random.default_rng(2).standard_normal((rows, *shape)).astype(np.float32)
        expected = np.concatenate([outputs(proto, {"x": x[i : i + 1]})["y"] for i in range(rows)])
        np.testing.assert_allclose(executor.predict(x=x)["y"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(outputs(executor.trained(), {"x": x})["y"], expected, rtol=1e-4, atol=1e-5)
    if executor.parameters:
        losses = [executor.step(x=x, target=np.zeros_like(expected))["loss"] for _ in range(3)]
        assert losses[0] == pytest.approx(np.mean(expected**2), rel=1e-4)
        assert losses[2] < losses[0]


REFUSED = {
    "a reduction": ("float[1,4] x) => (float[1,4] y) { m = Mul(x, c) y = ReduceMean(m, zero) }", "ReduceMean"),
    "a reduction of all": ("float[1,4] x) => (float y) { m = Mul(x, c) y = ReduceSum<keepdims=0>(m) }", "ReduceSum"),
    "softmax": ("float[1,4] x) => (float[1,4] y) { m = Mul(x, c) y = Softmax<axis=0>(m) }", "Softmax"),
    "join": ("float[1,4] x) => (float[2,4] y) { m = Mul(x, c) y = Concat<axis=0>(m, row) }", "Concat"),
    "repeat": ("float[1,6,4] x) => (float[2,6,4] y) { m = Mul(x, c) y = Expand(m, twice) }", "Expand"),
    "products of rows": (
        "float[1,4] x) => (float[4,4] y) { m = Mul(x, c) t = Transpose(m) y = MatMul(t, m) }", "MatMul",
    ),
    "rows by rows": (
        "float[1,6,4] x) => (float[6,6] y) { s = Reshape(x, lines) q = Mul(s, c) r = Reshape(x, columns) "
        "y = MatMul(q, r) }", "MatMul",
    ),
    "positions along merged rows": (
        "float[1,6,4] x) => (float[6,4] y) { s = Reshape(x, lines) m = Mul(s, c) y = Add(m, positions) }", "Add",
    ),
    "batch statistics": (
        "float[1,4] x) => (float[1,4] y) { y, m, n = BatchNormalization<training_mode=1>(x, c, c, c, ones) }",
        "BatchNormalization",
    ),
    "a running sum": ("float[1,4] x) => (float[1,4] y) { m = Mul(x, c) y = CumSum(m, nought) }", "CumSum"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_mixes_rows_is_refused_by_name(name):
    text, operator = REFUSED[name]
    proto = model(
        f"g ({text}",
        **weights(), nought=np.array(0), ones=np.ones(4), columns=np.array([4, 6]), positions=np.ones((6, 4)),
    )  # fmt: skip
    with pytest.raises(GraphoptError, match=f"batch='free': {operator} node .*: expected an operator that treats"):
        compiled(proto, normalize=FREE)


def test_two_inputs_of_two_batches_are_refused():
    proto = model("g (float[1,4] x, float[2,4] z) => (float[2,4] y) { h = Mul(x, c) y = Add(h, z) }", c=np.ones(4))
    with pytest.raises(GraphoptError, match="batch='free': expected inputs of one batch"):
        compiled(proto, normalize=FREE)


def test_the_error_for_a_fixed_batch_names_the_option():
    executor = compiled(file_of(KEPT["Gemm"][0], "1"))
    x, y = np.zeros((8, 4), np.float32), np.zeros((8, 3), np.float32)
    with pytest.raises(GraphoptError, match=r"passes\.Normalize\(batch='free'\)"):
        graphopt.fit(executor, {"x": x, "target": y}, batch_size=4)


MIXED = {"transformer"}  # its exporter joins time and batch into the rows of a Gemm


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(torch_models.MODELS))
def test_an_export_of_pytorch_without_dynamic_axes_is_freed(name):
    network, x, _ = torch_models.build(name)
    buffer = io.BytesIO()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(network.eval(), x[:1], buffer, input_names=["x"], output_names=["y"], dynamo=False)
    proto = onnx.load_from_string(buffer.getvalue())
    if name in MIXED:
        with pytest.raises(GraphoptError, match="batch='free'"):
            compiled(proto, normalize=FREE)
        return
    executor = compiled(proto, normalize=FREE)
    expected = np.concatenate([outputs(proto, {"x": x[i : i + 1].numpy()})["y"] for i in range(3)])
    np.testing.assert_allclose(executor.predict(x=x[:3].numpy())["y"], expected, rtol=1e-3, atol=1e-4)


class Squeezed(torch.nn.Module):
    """A head whose `squeeze()` removes the batch, too, if it is 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body = torch.nn.Conv2d(1, 3, 3, padding=1)
        self.head = torch.nn.Linear(3, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        features = torch.relu(self.body(x)).mean((2, 3), keepdim=True)
        if self.kind == "both":
            return self.head(features.squeeze()).squeeze()
        if self.kind == "score":
            return torch.sigmoid(self.head(features.flatten(1)).squeeze()) * 4 + 1
        return self.head(features.squeeze())


@pytest.mark.slow
@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize("kind", ["score", "features", "both"])
def test_a_squeeze_without_axes_trains_as_in_pytorch(kind, exporter):
    torch.manual_seed(0)
    network, rng = Squeezed(kind), np.random.default_rng(0)
    proto = torch_models.export(network, torch.rand(3, 1, 4, 4), exporter)
    executor = compiled(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    optimizer = torch.optim.SGD(network.parameters(), 0.1)
    for rows in (5, 2, 1, 4):
        x = rng.standard_normal((rows, 1, 4, 4)).astype(np.float32)
        target = rng.standard_normal((rows, 1) if kind == "features" else (rows,)).astype(np.float32)
        prediction = network(torch.tensor(x))
        loss = (prediction.reshape(target.shape) - torch.tensor(target)).square().mean()
        descended(loss, optimizer)
        found = executor.step({"x": x, "target": target})
        assert found["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert_close(executor.parameters, network.state_dict(), rtol=1e-4)


def test_a_squeeze_without_axes_before_what_mixes_rows_is_told():
    """Without a batch, the file takes the first two features; with one, the first two rows."""
    proto = model(
        "g (float[N,1,4] x) => (float[a] y) { h = MatMul(x, w) s = Squeeze(h) y = Slice(s, zero, two, zero) }",
        w=W, zero=np.array([0]), two=np.array([2]),
    )  # fmt: skip
    proto.graph.output[0].type.tensor_type.ClearField("shape")
    with pytest.warns(match=r"^Squeeze node '\w+' names no axes, so that it also removes the batch if its size is 1"):
        passes.Normalize()(graphopt.load(proto))


def of_a_rate(kind: str) -> onnx.ModelProto:
    """Return a model of samples that also takes their rate."""
    return model(
        f"""g (float[n,4] x, {kind} rate) => (float[n,3] y) {{
            numbers = Cast<to=1>(rate)
            scaled = Mul(x, numbers)
            y = MatMul(scaled, w)
        }}""",
        w=W,
    )


@pytest.mark.parametrize(("kind", "rate"), [("int64", np.int64(3)), ("float[1]", np.float32([3]))])
def test_an_input_becomes_a_number(kind: str, rate: np.ndarray) -> None:
    proto, x = of_a_rate(kind), np.random.default_rng(2).standard_normal((5, 4)).astype(np.float32)
    fixed = passes.Normalize(inputs={"rate": 3})(graphopt.load(proto)).model
    assert [value.name for value in fixed.graph.inputs] == ["x"]
    expected = outputs(proto, {"x": x, "rate": np.asarray(rate)})["y"]
    np.testing.assert_allclose(graphopt.run(fixed, {"x": x})["y"], expected, rtol=1e-5, atol=1e-5)


MISTAKES = [
    ("int64", {"speed": 3}, "unknown input 'speed'; known: rate, x"),
    ("int64", {"x": 3}, "x: expected an input of a known shape"),
    ("int8", {"rate": 8000}, "rate: expected a number in INT8, found 8000"),
]


@pytest.mark.parametrize(("kind", "inputs", "expected"), MISTAKES)
def test_numbers_in_place_of_inputs_are_checked(kind: str, inputs: dict[str, float], expected: str) -> None:
    with pytest.raises(GraphoptError, match=expected):
        passes.Normalize(inputs=inputs)(graphopt.load(of_a_rate(kind)))

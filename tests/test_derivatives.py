"""Jacobians, Hessians and products with them as graphs, beside PyTorch; training on derivatives."""

from __future__ import annotations

import functools
import io
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from builders import mlp, model
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static
from torch import nn

import graphopt
import passes
from graphopt import models
from graphopt.graph import storage
from passes import differentiate

FORCES = {"derive": passes.Differentiate("x", "y", name="forces", sign=-1)}


class Recurrent(nn.Module):
    """Everything whose rules emit more than a node: expansions, optional outputs, states made from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.pool = nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.MaxPool2d(2)
        self.layer, self.drop = nn.LayerNorm([4, 3, 3]), nn.Dropout(0.3)
        self.cell, self.head = nn.LSTM(9, 6, batch_first=True), nn.Linear(6, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        h = self.layer(self.pool(nn.functional.gelu(self.norm(self.conv(x)))))
        h, _ = self.cell(h.flatten(2))
        return self.head(self.drop(h[:, -1]))


class Rows(CalibrationDataReader):
    def __init__(self, x: np.ndarray) -> None:
        self.left = [{"x": x}]

    def get_next(self) -> dict[str, np.ndarray] | None:
        return self.left.pop() if self.left else None


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.block = nn.TransformerEncoderLayer(8, 2, 16, activation="gelu", batch_first=True)
        self.head = nn.Linear(24, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.head(self.block(x).flatten(1))


class Energy(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(6, 16), nn.SiLU(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.net(x.flatten(1))


def exported(module: nn.Module, example: torch.Tensor, dynamo: bool = True) -> onnx.ModelProto:
    file = io.BytesIO()
    open_batch = (
        {"dynamic_shapes": ({0: torch.export.Dim("n")},)}
        if dynamo
        else {"dynamic_axes": {"x": {0: "n"}, "y": {0: "n"}}}
    )
    module.eval()
    torch.onnx.export(
        module,
        (example,),
        file,
        input_names=["x"],
        output_names=["y"],
        dynamo=dynamo,
        verbose=False,
        **open_batch,
    )
    return onnx.load_from_string(file.getvalue())


NETWORKS = {
    "mlp": (lambda: nn.Sequential(nn.Linear(12, 16), nn.Tanh(), nn.Linear(16, 8)), (12,)),
    "recurrent": (Recurrent, (1, 8, 8)),
    "attention": (Attention, (3, 8)),
}


@functools.cache
def network(name: str, dynamo: bool) -> tuple[nn.Module, tuple[int, ...], onnx.ModelProto, torch.Tensor]:
    """Return a network, the shape of its rows, its file, and the state of PyTorch's generator afterwards."""
    torch.manual_seed(0)
    make, shape = NETWORKS[name]
    module = make().eval()
    return module, shape, exported(module, torch.randn(3, *shape), dynamo), torch.get_rng_state()


@pytest.mark.parametrize("rows", [1, 3])
@pytest.mark.parametrize("dynamo", [True, False], ids=["exporter", "torchscript"])
@pytest.mark.parametrize("name", NETWORKS)
def test_a_jacobian_is_that_of_pytorch(name: str, dynamo: bool, rows: int) -> None:
    module, shape, file, random = network(name, dynamo)
    torch.set_rng_state(random)
    graph = graphopt.jacobian(file, "x", rows=rows, keep=False)
    for batch in (1, 4):
        x = torch.randn(batch, *shape)
        expected = [torch.autograd.functional.jacobian(lambda row: module(row[None])[0], row) for row in x]
        (found,) = graphopt.run(graph, {"x": x.numpy()}).values()
        scale = float(torch.stack(expected).abs().max())
        np.testing.assert_allclose(found, torch.stack(expected), rtol=0, atol=2e-6 * scale)


def test_the_forward_pass_of_a_jacobian_runs_once() -> None:
    graph = graphopt.jacobian(exported(NETWORKS["mlp"][0](), torch.randn(3, 12)), "x")
    (loop,) = [node for node in graph.graph if node.op_type == "Scan"]
    assert "Tanh" in {node.op_type for node in graph.graph}
    assert "Tanh" not in {node.op_type for node in loop.attributes["body"].as_graph()}


def test_a_batch_of_no_rows_has_derivatives_of_no_rows() -> None:
    mlp = exported(NETWORKS["mlp"][0](), torch.randn(3, 12))
    found = graphopt.run(graphopt.jacobian(mlp, "x"), {"x": np.zeros((0, 12), np.float32)})
    assert found["y.jacobian.x"].shape == (0, 8, 12)
    energy = exported(Energy(), torch.randn(3, 2, 3))
    found = graphopt.run(graphopt.hessian(energy, "x"), {"x": np.zeros((0, 2, 3), np.float32)})
    assert found["y.hessian.x"].shape == (0, 2, 3, 2, 3)


def test_loops_of_a_derivative_that_cost_twice_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    first = graphopt.grad(exported(NETWORKS["recurrent"][0](), torch.randn(3, 1, 8, 8)), "x", keep=False)
    monkeypatch.setattr(differentiate, "_MANY", len(first.graph) + 10)  # bodies count
    with pytest.warns(UserWarning, match="'y.grad.x' is a derivative itself: each Scan of it"):
        graphopt.grad(first, "x", of="y.grad.x")


def test_a_family_has_products_of_both_sides_with_several_seeds(tmp_path: Path) -> None:
    torch.manual_seed(0)
    module = NETWORKS["mlp"][0]()
    x, left, right = torch.randn(5, 12), torch.randn(3, 5, 8), torch.randn(3, 5, 12)
    paths = graphopt.family(exported(module, x), tmp_path / "f.onnx")
    assert [path.name for path in paths] == ["f.onnx", "adj_f.onnx", "fwd_f.onnx", "fwd_adj_f.onnx"]

    def packed(seeds: torch.Tensor) -> np.ndarray:
        return seeds.detach().transpose(0, 1).flatten(1).numpy()

    def adjoint(x: torch.Tensor, seed: torch.Tensor) -> torch.Tensor:
        return torch.func.vjp(module, x)[1](seed)[0]

    expected = {
        "adj_x": [adjoint(x, seed) for seed in left],
        "fwd_y": [torch.func.jvp(module, (x,), (seed,))[1] for seed in right],
        "fwd_adj_x": [torch.func.jvp(adjoint, (x, left[0]), seeds)[1] for seeds in zip(right, left, strict=True)],
    }
    feeds = {"x": x.numpy(), "adj_y": packed(left), "fwd_x": packed(right), "fwd_adj_y": packed(left)}
    for path, (name, products) in zip(paths[1:], expected.items(), strict=True):
        own = {**feeds, "adj_y": left[0].numpy()} if name == "fwd_adj_x" else feeds
        read = [value.name for value in onnx.load(path).graph.input]
        found = graphopt.run(str(path), {each: own[each] for each in read})[name]
        np.testing.assert_allclose(found, packed(torch.stack(products)), rtol=0, atol=1e-6)


@pytest.mark.parametrize("written", ["f.onnx", "sub/../f.onnx"])
def test_a_family_writes_all_files_or_none_and_not_over_its_model(
    written: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    graphopt.save(models.mlp((3,), 2), tmp_path / "f.onnx")
    (tmp_path / "sub").mkdir()
    before = (tmp_path / "f.onnx").read_bytes()
    with pytest.raises(graphopt.GraphoptError, match="family: expected another file than the model, found"):
        graphopt.family(tmp_path / "f.onnx", tmp_path / written)
    (tmp_path / "fwd_g.onnx").mkdir()
    with pytest.raises(graphopt.GraphoptError, match="expected the path of a file to write, found a folder"):
        graphopt.family(tmp_path / "f.onnx", tmp_path / "g.onnx")
    monkeypatch.setattr(storage, "LIMIT", 10)
    with pytest.raises(graphopt.GraphoptError, match="family: expected models below 2 GB, which CasADi reads"):
        graphopt.family(models.mlp((3,), 2), tmp_path / "h.onnx")
    assert (tmp_path / "f.onnx").read_bytes() == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["f.onnx", "fwd_g.onnx", "sub"]


@pytest.mark.parametrize("rows", [1, 4])
def test_a_hessian_and_its_products_are_those_of_pytorch(rows: int) -> None:
    torch.manual_seed(0)
    module = Energy()
    file = exported(module, torch.randn(3, 2, 3))
    x, vector = torch.randn(5, 2, 3), torch.randn(5, 2, 3)
    expected = torch.func.vmap(torch.func.hessian(lambda row: module(row[None])[0, 0]))(x).detach()
    feeds = {"x": x.numpy()}
    (found,) = graphopt.run(graphopt.hessian(file, "x", rows=rows, keep=False), feeds).values()
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))
    pipeline = graphopt.Pipeline(normalize=passes.Normalize(), derive=passes.HessianVector("x"))
    product = pipeline(graphopt.load(file))
    found = graphopt.run(product, {**feeds, "x.vector": vector.numpy()})["y.hessian_vector.x"]
    expected = torch.einsum("nabcd,ncd->nab", expected, vector)
    np.testing.assert_allclose(found, expected, rtol=0, atol=1e-6 * float(expected.abs().max()))


def test_an_inner_value_and_several_values_may_be_differentiated_by() -> None:
    proto = model(
        "g (float[N,3] x, float[N,3] z) => (float[N,2] y) { h = Mul(x, z)\n t = Tanh(h)\n y = MatMul(t, w) }",
        w=np.arange(6.0).reshape(3, 2),
    )
    x, z = np.random.default_rng(0).standard_normal((2, 4, 3)).astype(np.float32)
    found = graphopt.run(graphopt.jacobian(proto, ["x", "z", "h"], rows=2, keep=False), {"x": x, "z": z})
    w = np.arange(6, dtype=np.float32).reshape(3, 2)
    by_h = (1 - np.tanh(x * z) ** 2)[:, None] * w.T
    for name, expected in {"h": by_h, "x": by_h * z[:, None], "z": by_h * x[:, None]}.items():
        np.testing.assert_allclose(found[f"y.jacobian.{name}"], expected, rtol=1e-5, atol=1e-6)


def test_second_derivatives_of_a_piecewise_linear_network_are_zeros() -> None:
    module = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    graph = graphopt.hessian(exported(module, torch.randn(2, 3)), "x", keep=False)
    assert not graphopt.run(graph, {"x": np.ones((2, 3), np.float32)})["y.hessian.x"].any()


def test_training_on_energies_and_forces_is_that_of_pytorch() -> None:
    torch.manual_seed(0)
    module, rng = Energy(), np.random.default_rng(0)
    file = exported(module, torch.randn(3, 2, 3))
    file = graphopt.Pipeline(normalize=passes.Normalize(), **FORCES)(graphopt.load(file))
    x, y, forces = (rng.standard_normal((16, *shape)).astype(np.float32) for shape in [(2, 3), (1,), (2, 3)])
    loss = passes.Losses({"y": passes.MeanSquaredError(), "forces": passes.MeanSquaredError()}, {"forces": 0.5})
    executor = graphopt.Executor(graphopt.compile(file, loss=loss, optimizer=passes.SGD(0.05)), native=False)
    optimizer = torch.optim.SGD(module.parameters(), 0.05)
    for _ in range(10):
        found = executor.step(x=x, target_y=y, target_forces=forces)["loss"]
        places = torch.tensor(x, requires_grad=True)
        energy = module(places)
        (slope,) = torch.autograd.grad(energy.sum(), places, create_graph=True)
        mse = nn.functional.mse_loss
        expected = mse(energy, torch.tensor(y)) + 0.5 * mse(-slope, torch.tensor(forces))
        optimizer.zero_grad()
        expected.backward()
        optimizer.step()
        np.testing.assert_allclose(found, expected.item(), rtol=1e-5)
    assert [output.name for output in executor.trained().graph.output] == ["y", "forces"]
    assert [output.name for output in executor.trained(outputs=["y"]).graph.output] == ["y"]


@pytest.mark.parametrize(
    ("derivative", "message"),
    [
        (passes.Jacobian("z", "y"), "unknown floating-point value 'z'"),
        (passes.Jacobian("token", "y"), "found 'token' of INT64: take the embedding's output 'rows'"),
        (passes.Jacobian("table", "y"), "found 'table' of shape"),
        (passes.Jacobian("rows", "cube"), r"jacobian: expected an output \[N, m\], found 'cube'"),
        (passes.Jacobian("rows", "mixed"), "found 'mixed' of shape .*, of which this is not known"),
        (passes.Hessian("rows", "y"), "hessian: expected a number for each row"),
        (passes.Jacobian("rows", "other"), "'other' does not depend on 'rows' differentiably"),
        (
            passes.Differentiate(("rows", "table"), "y", name="d"),
            "name='d': expected one value in wrt, found rows, table",
        ),
        (passes.Differentiate("rows", "y", name="cube"), "cube"),
    ],
)
def test_what_cannot_be_differentiated_is_named(derivative: graphopt.Pipeline, message: str) -> None:
    proto = model(
        """g (int64[N] token, float[N,3] v) => (float[N,3] y, float[N,1,3] cube, float[N,3] mixed, float[N,3] other) {
            rows = Gather(table, token)
            y = Tanh(rows)
            axes = Constant<value_ints = [1]>()
            cube = Unsqueeze(y, axes)
            first = Constant<value_ints = [0]>()
            mean = ReduceMean(rows, first)
            mixed = Sub(rows, mean)
            other = Tanh(v)
        }""",
        table=np.ones((5, 3)),
    )
    with pytest.raises(graphopt.GraphoptError, match=message):
        graphopt.Pipeline(normalize=passes.Normalize(), derive=derivative)(graphopt.load(proto))


def test_several_rows_at_once_need_an_open_batch() -> None:
    proto = model("g (float[2,3] x) => (float[2,3] y) { y = Tanh(x) }")
    with pytest.raises(graphopt.GraphoptError, match=r"rows=2: expected an open batch, found 'x' of shape \[2,3\]"):
        graphopt.jacobian(proto, "x", rows=2)
    found = graphopt.run(graphopt.jacobian(proto, "x"), {"x": np.zeros((2, 3), np.float32)})
    np.testing.assert_array_equal(found["y.jacobian.x"], np.stack([np.eye(3)] * 2))


@pytest.mark.parametrize("reader", ["Slice(s, zero, one)", "Gather(s, zero)"])
def test_a_size_after_the_first_axes_is_not_the_first_size(reader: str) -> None:
    proto = model(
        f"""g (float[N,3,5] x) => (float[N,3,5] y) {{
            s = Shape<start = 1>(x)
            r = {reader}
            f = Cast<to = 1>(r)
            y = Mul(x, f)
        }}""",
        zero=np.array([0]),
        one=np.array([1]),
    )
    x = np.ones((2, 3, 5), np.float32)
    np.testing.assert_array_equal(graphopt.run(graphopt.grad(proto, "x"), {"x": x})["y.grad.x"], 3 * x)


def test_rows_that_a_merge_hides_are_no_rows() -> None:
    """Each row of x becomes two rows of y."""
    proto = model(
        """g (float[2,6] x) => (float[4,3] y) {
            a = Reshape(x, parts)
            b = Mul(a, a)
            t = Transpose<perm = [1,0]>(b)
            f = Reshape(t, flat)
            r = Reshape(f, back)
            y = Transpose<perm = [1,0]>(r)
        }""",
        parts=np.array([4, 3]),
        flat=np.array([-1]),
        back=np.array([3, 4]),
    )
    with pytest.raises(graphopt.GraphoptError, match="of which this is not known"):
        graphopt.jacobian(proto, "x")


def test_a_number_beside_the_rows_is_no_batch() -> None:
    proto = model(
        """g (float t, float[N,3] x) => (float[N,3] y) {
            s = Shape(x)
            ones = ConstantOfShape(s)
            u = Add(x, ones)
            y = Mul(u, u)
        }"""
    )
    feeds = {"x": np.ones((2, 3), np.float32), "t": np.zeros((), np.float32)}
    for rows in (1, 2):
        found = graphopt.run(graphopt.jacobian(proto, "x", rows=rows), feeds)["y.jacobian.x"]
        np.testing.assert_array_equal(found, np.stack([2 * np.eye(3)] * 2))


def test_strings_that_are_left_out_have_a_warning() -> None:
    proto = model(
        """g (float[N,3] x) => (float[N,2] y, string[N] label) {
            y = MatMul(x, w)
            k = ArgMax<axis = 1, keepdims = 0>(y)
            label = Gather(names, k)
        }""",
        w=np.ones((3, 2)),
        names=np.array(["a", "b"], object),
    )
    with pytest.warns(UserWarning, match="strings, .* are left out of the new one: label"):
        assert [y.name for y in graphopt.grad(proto, "x").graph.outputs] == ["y", "y.grad.x"]


def test_files_of_integers_have_the_gradients_of_their_floats_nearly(tmp_path: Path) -> None:
    """Rounding passes gradients through; the range of a dynamic product depends on all rows."""
    floats, x = mlp(), np.random.default_rng(0).standard_normal((16, 4)).astype(np.float32)
    onnx.save(floats, tmp_path / "floats.onnx")
    static = tmp_path / "static.onnx"
    for kind in QuantFormat:
        quantize_static(tmp_path / "floats.onnx", static, Rows(x), quant_format=kind)
        for derive in (graphopt.grad, graphopt.jacobian):
            (found,) = graphopt.run(derive(static, "x", keep=False), {"x": x}).values()
            (expected,) = graphopt.run(derive(floats, "x", keep=False), {"x": x}).values()
            np.testing.assert_allclose(found, expected, rtol=0, atol=0.05 * abs(expected).max())
    quantize_dynamic(tmp_path / "floats.onnx", tmp_path / "dynamic.onnx")
    with pytest.raises(graphopt.GraphoptError, match=r"found 'y' of shape .*, of which this is not known"):
        graphopt.jacobian(tmp_path / "dynamic.onnx", "x")

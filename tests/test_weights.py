"""What an initializer is: trained, frozen, tied or constant, as the exported program has it."""

from __future__ import annotations

import dataclasses
import fnmatch
import functools
import warnings

import gradient_cases
import numpy as np
import onnx
import onnx_ir as ir
import pytest
import steps
import torch
from builders import model
from test_gradient import model_of, precision
from torch import nn
from twins import assert_trains_as

import graphopt
import passes
from graphopt import GraphoptError
from graphopt.graph.origins import Kind, Origin
from graphopt.graph.roles import Role, role_of, with_role
from graphopt.inspection.report import report
from graphopt.testing.gradients import gradient_model
from passes.gradients.registry import WITHOUT_FLOW

EXPORTERS = ("dynamo", "torchscript")


def decided(source, **options) -> tuple[ir.Model, list[str]]:
    """Return a model after Parameters, and the warnings on the way; a model in memory is normalized."""
    loaded = source.clone() if isinstance(source, ir.Model) else graphopt.load(source)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        if not isinstance(source, ir.Model):
            passes.Normalize()(loaded)
        passes.Parameters(**options)(loaded)
    return loaded, [str(warning.message) for warning in caught]


def trained(loaded: ir.Model) -> dict[str, ir.Value]:
    return {str(value.name): value for value in with_role(loaded, Role.PARAMETER)}


def origin(loaded: ir.Model, name: str) -> Origin:
    found = Origin.read(ir.convenience.create_value_mapping(loaded.graph)[name])
    assert found is not None
    return found


def carried(case: gradient_cases.Case) -> dict[int, bool]:
    """Return for the floating inputs of a case whether its rule has a gradient of them."""
    free = dataclasses.replace(case, constant=())
    found = {output.name for output in gradient_model(model_of(free, precision(free))).graph.outputs}
    arrays = {
        i: x for i, x in enumerate(case.inputs) if isinstance(x, tuple) or (x is not None and x.dtype.kind == "f")
    }
    return {i: f"x{i}.grad" in found for i in arrays}


@pytest.mark.slow
def test_inputs_without_flow_are_those_that_no_rule_has_a_gradient_of() -> None:
    flows: dict[tuple[str, int], bool] = {}
    for case in gradient_cases.CASES:
        if case.op_type in WITHOUT_FLOW or case.op_type in (
            "Clip",
            "GridSample",
            "AffineGrid",
            "LSTM",
            "GRU",
            "RNN",
        ):
            for index, flow in carried(case).items():
                flows[case.op_type, index] = flows.get((case.op_type, index), False) or flow
    for (op_type, index), flow in flows.items():
        if op_type != "BatchNormalization":  # running statistics have a gradient, and never train
            assert flow == (index not in WITHOUT_FLOW.get(op_type, ())), (op_type, index)


class Attention(nn.Module):
    """What exports most differently from how it trains: ties, buffers, tables, masks, one number."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(11, 8)
        self.positions = nn.Parameter(torch.randn(1, 5, 8))
        self.register_buffer("frequency", 1 / 100 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("mask", torch.triu(torch.full((5, 5), -1e9), 1))
        self.query = nn.Linear(8, 8)
        self.norm = nn.LayerNorm(8)
        self.groups = nn.GroupNorm(5, 5)
        self.plain = nn.InstanceNorm1d(5)
        self.recurrent = nn.LSTM(8, 8, batch_first=True)
        self.temperature = nn.Parameter(torch.tensor(0.3))
        self.head = nn.Linear(8, 11, bias=False)
        self.head.weight = self.words.weight

    def forward(self, x):
        h = self.words(x) + self.positions
        angles = torch.outer(torch.arange(5).float(), self.frequency).repeat(1, 2)
        h = h * angles.cos() + h.flip(-1) * angles.sin()
        scores = self.query(h) @ h.transpose(1, 2) * 0.3 + self.mask
        h = self.norm(scores.softmax(-1) @ h)
        h, _ = self.recurrent(self.plain(self.groups(h)))
        h = torch.zeros(len(x), 5, 8).scatter_add(1, (x % 5)[..., None].expand(-1, -1, 8), h)
        return (self.head(h) * self.temperature.exp()).mean(1)


class Clones(nn.Module):
    """Layers that start as copies of each other, as those of nn.TransformerEncoder do, and one that is used twice."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 6)
        self.second.load_state_dict(self.first.state_dict())
        self.shared = nn.Linear(6, 6, bias=False)
        self.norms = nn.ModuleList(nn.LayerNorm(6) for _ in range(3))
        self.groups = nn.GroupNorm(2, 4)
        self.head = nn.Linear(6, 11)

    def forward(self, x):
        h = nn.functional.one_hot(x, 6).float()
        for norm, layer in zip(self.norms, (self.first, self.shared, self.second), strict=True):
            h = norm(layer(h).tanh())
        return self.head(self.groups(self.shared(h))).mean(1)


class Positioned(nn.Module):
    """A bias of relative positions, which an exporter gathers once, and biases of zeros, which it drops."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.table = nn.Embedding(11, 8), nn.Parameter(torch.randn(9, 2))
        self.register_buffer("offsets", (torch.arange(5)[:, None] - torch.arange(5) + 4).flatten())
        self.convolution, self.head = nn.Conv1d(8, 6, 3), nn.Linear(6, 11)
        nn.init.zeros_(self.convolution.bias)
        nn.init.zeros_(self.head.bias)

    def forward(self, x):
        h = self.words(x).unflatten(2, (2, 4)).transpose(1, 2)
        bias = self.table[self.offsets].view(5, 5, 2).permute(2, 0, 1).unsqueeze(0)
        scores = h @ h.transpose(2, 3) + bias
        h = (scores.softmax(-1) @ h).transpose(1, 2).flatten(2)
        return self.head(self.convolution(h.transpose(1, 2)).tanh().mean(2))


FRESH = (Clones, Positioned)
KINDS = (Attention, *FRESH)


def network(kind: type[nn.Module]) -> nn.Module:
    torch.manual_seed(0)
    made = kind()
    if kind not in FRESH:
        with torch.no_grad():  # no two weights are equal
            for parameter in made.parameters():
                parameter += 0.1 * torch.randn(parameter.shape)
    return made.eval()


def tokens(kind: type[nn.Module], seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    most, length = (6, 4) if kind is Clones else (11, 5)
    return torch.randint(0, most, (3, length), generator=generator)


@functools.cache
def exported(kind: type[nn.Module], exporter: str, optimize: bool = True) -> onnx.ModelProto:
    options = {"optimize": optimize} if exporter == "dynamo" else {"opset_version": 17}
    return steps.exported(network(kind), tokens(kind), dynamo=exporter == "dynamo", **options)


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_as_many_numbers_train_as_in_pytorch(kind: type[nn.Module], exporter: str) -> None:
    loaded, _ = decided(exported(kind, exporter))
    expected = sorted(parameter.numel() for parameter in network(kind).parameters())
    found = {name: int(np.prod(value.shape.numpy())) for name, value in trained(loaded).items()}
    assert sum(found.values()) == sum(expected), found


@pytest.mark.parametrize("exporter", EXPORTERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.slow
def test_ten_steps_are_pytorchs(kind: type[nn.Module], exporter: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step = graphopt.compile(
            exported(kind, exporter), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.05, momentum=0.9)
        )
    executor = graphopt.Executor(step, threads=1)
    twin = network(kind)
    optimizer = torch.optim.SGD(twin.parameters(), 0.05, momentum=0.9)
    data = [(tokens(kind, seed), torch.tensor([seed % 11, 3, 7])) for seed in range(10)]
    assert_trains_as(executor, twin, optimizer, data, nn.functional.cross_entropy)
    x = tokens(kind, 10)
    found = executor.predict(x=x.numpy())["y"]
    np.testing.assert_allclose(found, twin(x).detach().numpy(), rtol=1e-3, atol=1e-4)


@pytest.mark.slow
def test_folded_transposes_are_the_weight_again() -> None:
    for exporter in EXPORTERS:
        loaded, _ = decided(exported(Attention, exporter))
        words = next(value for value in trained(loaded).values() if list(value.shape) == [11, 8])
        assert [copy.shape for copy in origin(loaded, words.name).copies] == [(8, 11)]
        assert any(node.op_type == "Transpose" and node.inputs[0] is words for node in loaded.graph)


@pytest.mark.slow
def test_merged_weights_are_parted_and_a_layer_used_twice_is_not() -> None:
    loaded, _ = decided(exported(Clones, "dynamo"))
    names = set(trained(loaded))
    assert {"norms.0.weight", "norms.1.weight", "norms.2.weight", "norms.1.bias"} <= names
    loaded, _ = decided(exported(Clones, "dynamo"), retie="norms.*.weight")
    assert len([name for name in trained(loaded) if name.startswith("norms") and name.endswith("weight")]) == 1


@pytest.mark.slow
def test_a_function_of_one_parameter_is_computed_from_it_again() -> None:
    loaded, _ = decided(exported(Attention, "dynamo"))
    assert "temperature" in trained(loaded)
    assert any(node.op_type == "Exp" for node in loaded.graph)


@pytest.mark.parametrize(("exporter", "name"), [("dynamo", "table"), ("torchscript", "onnx::Add_*.table")])
@pytest.mark.slow
def test_rows_that_the_exporter_gathered_are_the_parameters_again(exporter: str, name: str) -> None:
    loaded, _ = decided(exported(Positioned, exporter))
    table = next(value for path, value in trained(loaded).items() if fnmatch.fnmatch(path, name))
    rows = {row.tobytes() for row in table.const_value.numpy()}
    assert rows == {row.tobytes() for row in network(Positioned).table.detach().numpy()}


def test_biases_that_the_exporter_dropped_train() -> None:
    proto = exported(Positioned, "dynamo")
    assert not any("bias" in initializer.name for initializer in proto.graph.initializer)
    assert {"convolution.bias", "head.bias"} <= set(trained(decided(proto)[0]))


@pytest.mark.slow
def test_what_the_exporter_joined_with_a_buffer_is_unsure() -> None:
    class Joined(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer, self.a, self.b = (
                nn.Linear(4, 12, bias=False),
                *(nn.Parameter(torch.randn(4)) for _ in "ab"),
            )
            self.register_buffer("zeros", torch.zeros(4))

        def forward(self, x):
            return self.layer(x.float()[:, :4]) + torch.cat([self.a, self.zeros, self.b])

    proto = steps.exported(Joined().eval(), tokens(Attention), dynamo=True)
    found = origin(decided(proto)[0], "cat")
    assert found.trains and not found.certain and "zeros, which is no parameter" in found.why


def test_a_batch_normalization_that_is_written_out_keeps_its_mean() -> None:
    body = "s = Sub(t, mean)\n m = Mul(s, scale)\n y = Add(m, shift)"
    weights = {name: np.random.default_rng(i).normal(size=(1, 4)) for i, name in enumerate(("mean", "scale", "shift"))}
    weights["w"] = np.random.default_rng(3).normal(size=(4, 4))
    loaded, said = decided(model(f"g (float[3,4] x) => (float[3,4] y) {{ t = MatMul(x, w)\n {body} }}", **weights))
    assert set(trained(loaded)) == {"w", "scale", "shift"}
    assert [origin(loaded, name).certain for name in ("mean", "scale", "shift")] == [False, False, True]
    assert any("'mean'" in line and "'scale'" in line for line in said)


@pytest.mark.slow
def test_what_the_exporter_leaves_out_is_said() -> None:
    class Convolution(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.conv, self.norm = nn.Conv1d(3, 4, 3), nn.BatchNorm1d(4)

        def forward(self, x):
            return self.norm(self.conv(nn.functional.one_hot(x, 3).float().transpose(1, 2))).mean(2)

    proto = steps.exported(Convolution().eval(), torch.randint(0, 3, (2, 6)), dynamo=True)
    loaded, said = decided(proto)
    assert set(trained(loaded)) == {"conv.weight", "conv.bias"}
    assert any("left out" in line and "'norm.weight'" in line and "optimize=False" in line for line in said)
    found = report(proto, graphopt.standard(loss=passes.MeanSquaredError())).summary()
    assert "left out   norm.weight, norm.bias" in found


class Neutral(nn.Module):
    """Parameters whose first values change nothing, are equal to each other's, or are equal parts of one."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.layer = kind, nn.Linear(6, 6)
        if kind == "neutral":
            self.scale, self.shift = nn.Parameter(torch.ones([])), nn.Parameter(torch.zeros([]))
        elif kind == "parts":
            self.parts = nn.Parameter(torch.ones(3, 6))
        else:
            self.first, self.second = (nn.Parameter(torch.zeros(1, 1, 6)) for _ in range(2))

    def forward(self, x):
        h = nn.functional.one_hot(x, 6).float()
        if self.kind == "neutral":
            return torch.tanh(self.layer(h) * self.scale) + self.shift
        if self.kind == "equal":
            tokens = [token.expand(len(h), -1, -1) for token in (self.first, self.second)]
            return self.layer(torch.cat([*tokens, h], 1))
        if self.kind == "functions":  # both 0.5
            return self.layer(h) * torch.sigmoid(self.first) + h * (1 - torch.sigmoid(self.first))
        return torch.tanh(self.layer(h) * self.parts[0] + self.parts[1]) * self.parts[2]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "said"),
    [
        ("neutral", ["left out", "'scale', 'shift'"]),
        ("equal", ["left out", "'second'"]),
        ("functions", ["'sigmoid' (computed from first by the exporter"]),
        ("parts", ["a part of parts, merged by the exporter with select_"]),
    ],
)
def test_parameters_that_change_nothing_yet_are_said(kind: str, said: list[str]) -> None:
    proto = steps.exported(Neutral(kind).eval(), torch.randint(0, 6, (2, 5)), dynamo=True)
    _, lines = decided(proto)
    assert any(all(part in line for part in said) for line in lines), lines


def unsure(loaded: ir.Model) -> set[str]:
    values = [*loaded.graph.inputs, *loaded.graph.initializers.values()]
    return {x.name for x in values if (found := Origin.read(x)) and not found.certain}


class Sines(nn.Module):
    """A parameter that starts as sines of positions."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        table = torch.tensor(WAVES[:5], dtype=torch.float32)
        if kind == "embedding":
            self.table = nn.Embedding.from_pretrained(table, freeze=False)
        elif kind == "buffer":
            self.register_buffer("table", table)
        else:
            self.table = nn.Parameter(table)
        self.out = nn.Linear(8, 11)

    def forward(self, x):
        table = self.table(torch.arange(5)) if isinstance(self.table, nn.Module) else self.table
        return self.out(torch.tanh(nn.functional.one_hot(x, 11).float()[..., :8] + table)).mean(1)


@pytest.mark.parametrize("kind", ["parameter", "embedding", "buffer"])
@pytest.mark.parametrize("optimize", [False, True])
@pytest.mark.slow
def test_a_record_wins_over_numbers_that_look_like_sines(kind: str, optimize: bool) -> None:
    module = Sines(kind)
    proto = steps.exported(module, tokens(Attention), dynamo=True, optimize=optimize)
    loaded, said = decided(proto)
    expected = sum(parameter.numel() for parameter in module.parameters())
    assert sum(int(np.prod(value.shape.numpy())) for value in trained(loaded).values()) == expected
    assert len(unsure(loaded)) == (kind != "buffer") and not any("does not say" in line for line in said)
    assert any("recorded as parameters" in line for line in said) == (kind != "buffer")


WAVES = np.sin(np.arange(12)[:, None] * (1 / 10 ** (np.arange(8) // 2 / 4)) + np.pi / 2 * (np.arange(8) % 2))
GRAPHS = {
    "a mask": ("a = Add(x, c)\n s = Softmax(a)", np.triu(np.full((4, 4), -1e9), 1), "float[4,4]"),
    "infinities": ("a = Add(x, c)\n s = Softmax(a)", np.triu(np.full((4, 4), -np.inf), 1), "float[4,4]"),
    "a triangle": ("s = Mul(x, c)", np.tril(np.ones((4, 4))), "float[4,4]"),
    "a table of positions": ("s = Add(x, c)", WAVES, "float[12,8]"),
    "frequencies": ("a = Mul(x, c)\n s = Sin(a)", 2.0 ** np.arange(4), "float[4,4]"),
    "repeated frequencies": (
        "t = Constant<value_ints=[2]>()\n r = Tile(c, t)\n a = Mul(x, r)\n s = Sin(a)",
        2.0 ** np.arange(4),
        "float[12,8]",
    ),
    "random frequencies": ("a = MatMul(x, c)\n e = Sin(a)\n d = Cos(a)\n s = Add(e, d)", None, "float[4,4]"),
    "a mean of the input": ("s = Sub(x, c)", np.array([0.4, 0.5, 0.6, 0.7]), "float[4,4]"),
    "a mean of a part of the input": (
        "l, r = Split<axis=1, num_outputs=2>(x)\n d = Sub(l, c)\n s = Concat<axis=1>(d, r)",
        np.array([0.4, 0.5]),
        "float[4,4]",
    ),
    "a scale of the input": (
        "a = Transpose(x)\n s = Div(a, c)",
        np.array([0.4, 0.5, 0.6, 0.7]),
        "float[4,4]",
    ),
    "a first value": (
        's = ScatterElements<axis=0, reduction="add">(c, i, x)',
        np.zeros((4, 4)),
        "float[4,4]",
    ),
    "one number": ("s = Mul(x, c)", np.array(0.5), "float[4,4]"),
}


def graph(name: str) -> onnx.ModelProto:
    lines, c, shape = GRAPHS[name]
    rng = np.random.default_rng(0)
    c = rng.standard_normal((4, 3)) if c is None else c
    columns = 8 if "12" in shape else 3 if name == "random frequencies" else 4
    return model(
        f"g ({shape} x) => (float[N,M] y) {{ {lines}\n m = MatMul(s, w)\n y = Add(m, b) }}",
        c=c, w=rng.standard_normal((columns, 3)), b=rng.standard_normal(3), i=np.zeros((4, 4), np.int64),
    )  # fmt: skip


@pytest.mark.whole
@pytest.mark.parametrize("name", GRAPHS)
def test_constants_are_told_by_their_use_and_their_numbers(name: str) -> None:
    loaded, _ = decided(graph(name))
    assert sorted(trained(loaded)) == ["b", "w"]
    assert origin(loaded, "c").kind is Kind.CONSTANT
    assert origin(loaded, "c").certain or name != "a mask"


rng = np.random.default_rng(7)
INTEGERS = rng.integers(-127, 128, (8, 6)).astype(np.float32)
SCALES = rng.uniform(0.001, 0.002, 6).astype(np.float32)
# What is constant by its use: a graph from x [N, 8] to y [N, 6], what does not train, and the arrays.
CONSTANTS: dict[str, tuple[str, set[str], dict[str, np.ndarray]]] = {
    "values of OneHot": (
        "d = Constant<value_int=6>()\n i = ArgMax<axis=1, keepdims=0>(h)\n o = OneHot(i, d, v)\n y = Mul(h, o)",
        {"v"},
        {"v": np.array([0.1, 0.9])},
    ),
    "a bound of Max": ("m = Max(h, v)\n y = Sqrt(m)", {"v"}, {"v": np.array([[1.234567e-7]])}),
    "a bound of Min": ("y = Min(h, v)", {"v"}, {"v": np.array(0.7182818)}),
    "a number in an initial state": (
        "s = Constant<value_ints=[1, 1, 6]>()\n z = Expand(v, s)\n a = Constant<value_ints=[0]>()\n"
        "t = Unsqueeze(h, a)\n t1 = Transpose<perm=[1, 0, 2]>(t)\n n = Constant<value_ints=[1]>()\n"
        "l = Transpose<perm=[1, 0, 2]>(t1)\n k, k1 = GRU<hidden_size=6>(t1, W, R, , , z)\n y = Squeeze(k1, a)",
        {"v"},
        {"v": np.array([[[0.25]]]), "W": rng.normal(size=(1, 18, 6)), "R": rng.normal(size=(1, 18, 6))},
    ),
    "factors of a margin": (
        "a = Mul(h, c)\n b = Mul(a, s)\n y = Sub(one, b)",
        {"c", "s", "one"},
        {"c": np.array(np.cos(0.5)), "s": np.array(16.0), "one": np.array(1.0)},
    ),
    "integers, scaled before the product": (
        "q = Mul(v, s)\n y = MatMul(x, q)",
        {"s"},  # v trains by a master
        {"v": INTEGERS, "s": SCALES},
    ),
    "integers, scaled after the product": (
        "p = MatMul(x, v)\n m = Mul(p, s)\n y = Add(m, b)",
        {"s"},
        {"v": INTEGERS, "s": SCALES, "b": rng.normal(size=6)},
    ),
    "integers with zero points": (
        "z = Sub(v, o)\n q = Mul(z, s)\n t = Transpose(q)\n y = Gemm<transB=1>(x, t)",
        {"v", "s"},
        {"v": np.abs(INTEGERS), "s": SCALES, "o": rng.integers(1, 9, 6).astype(np.float32)},
    ),
    "three values": (
        "p = MatMul(x, v)\n y = Mul(p, s)",
        {"v", "s"},
        {"v": np.sign(INTEGERS) * (np.abs(INTEGERS) > 40), "s": np.array([0.0123456])},
    ),
}


@pytest.mark.parametrize("name", CONSTANTS)
@pytest.mark.parametrize("producer", ["", "pytorch"])
def test_what_is_constant_by_its_use_does_not_train(name: str, producer: str) -> None:
    lines, constant, arrays = CONSTANTS[name]
    arrays = arrays | {"w": np.random.default_rng(0).normal(size=(8, 6))}
    if "(h" not in lines:
        lines = f"{lines}\n u = Mul(h, y)".replace("y =", "y0 =").replace("(h, y)", "(h, y0)").replace("u =", "y =")
    proto = model(f"g (float[N,8] x) => (float[N,6] y) {{ h = MatMul(x, w)\n {lines} }}", **arrays)
    if producer:  # another tool added nodes to a file of PyTorch
        proto.graph.node[0].name, proto.producer_name = "/head/MatMul", producer
        proto.graph.node[0].input[1] = proto.graph.initializer[-1].name = "head.weight"
        assert {x.name for x in proto.graph.initializer} == {*arrays, "head.weight"} - {"w"}
    loaded, _ = decided(proto)
    assert not constant & trained(loaded).keys()
    assert trained(loaded).keys() >= {"head.weight" if producer else "w"}


@pytest.mark.parametrize("exporter", EXPORTERS)
def test_a_head_that_another_tool_added_trains(exporter: str) -> None:
    module = nn.Sequential(nn.Linear(8, 6), nn.Tanh()).eval()
    proto = steps.exported(module, torch.randn(3, 8), dynamo=exporter == "dynamo")
    rng, make = np.random.default_rng(0), onnx.helper.make_node
    arrays = {
        "centres": rng.normal(size=(6, 4)),
        "shift": rng.normal(size=4),
        "margin": np.cos(0.5),
        "s": 16.0,
    }
    for name, x in arrays.items():
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(x, np.float32), name))
    proto.graph.node.extend(
        [
            make("MatMul", ["y", "centres"], ["a"]),
            make("Add", ["a", "shift"], ["b"]),
            make("Mul", ["b", "margin"], ["c"]),
            make("Mul", ["c", "s"], ["z"]),
        ]
    )
    proto.graph.output.append(onnx.helper.make_tensor_value_info("z", 1, [3, 4]))
    assert sorted(trained(decided(proto)[0])) == ["0.bias", "0.weight", "centres", "shift"]


@pytest.mark.parametrize("name", ["dense", "embedding"])
def test_weights_of_whole_numbers_without_a_scale_train(name: str) -> None:
    text = {"dense": "MatMul(x, v)", "embedding": "MatMul(t, v)"}[name]
    lines = f"g (float[N,8] x) => (float[N,6] y) {{ t = Tanh(x)\n y = {text} }}"
    assert [*trained(decided(model(lines, v=INTEGERS))[0])] == ["v"]


@pytest.mark.parametrize("producer", ["", "tf2onnx", "skl2onnx"])
def test_numbers_in_a_constant_train_in_each_form(producer: str) -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, w)\n b = Constant()\n y = Add(h, b) }"
    bias = np.array([0.31, -0.72, 1.93, 0.54], np.float32)
    forms = {"value_floats": bias.tolist(), "value": onnx.numpy_helper.from_array(bias)}
    for name, form in forms.items():
        proto = model(text, w=np.random.default_rng(0).normal(size=(4, 4)))
        node = next(node for node in proto.graph.node if node.op_type == "Constant")
        node.attribute.append(onnx.helper.make_attribute(name, form))
        proto.producer_name = producer
        found = trained(decided(proto)[0])
        assert sorted(found) == ["b", "w"], name


@pytest.mark.parametrize("name", [name for name in GRAPHS if name != "infinities"])
def test_the_user_says_otherwise(name: str) -> None:
    loaded, said = decided(graph(name), unfreeze="c")
    assert sorted(trained(loaded)) == ["b", "c", "w"] and not said
    loaded, said = decided(graph(name), freeze=["c", "b"])
    assert sorted(trained(loaded)) == ["w"] and not said


@pytest.mark.parametrize(
    ("lines", "c"),
    [
        ("s = Add(x, c)", np.zeros((4, 4))),
        ("s = Mul(x, c)", np.ones(4)),
        ("s = Mul(x, c)", np.eye(4)),
        ("a = Mul(x, c)\n s = Sin(a)", np.random.default_rng(0).standard_normal(4)),
        ("s = Add(x, c)", np.linspace(0, 1, 16).reshape(4, 4)),
        ("s = Sub(c, x)", np.random.default_rng(0).standard_normal((4, 4))),
    ],
)
def test_fresh_weights_are_no_constants(lines: str, c: np.ndarray) -> None:
    rng = np.random.default_rng(1)
    text = f"g (float[4,4] x) => (float[4,3] y) {{ {lines}\n y = MatMul(s, w) }}"
    loaded, _ = decided(model(text, c=c, w=rng.standard_normal((4, 3))))
    assert sorted(trained(loaded)) == ["c", "w"]


def test_many_fresh_weights_are_no_grid() -> None:
    """So many numbers of a linear layer of PyTorch, whose exporter transposes them, fill each step of five decimals."""
    bound = 1 / np.sqrt(768)
    w = np.random.default_rng(0).uniform(-bound, bound, (192, 768))
    text = "g (float[N,2,768] x) => (float[N,2,192] y) { t = Transpose(w)\n y = MatMul(x, t) }"
    loaded, said = decided(model(text, w=w))
    assert [*trained(loaded)] == ["w"] and not said


def test_running_statistics_are_buffers() -> None:
    text = "g (float[N,4] x) => (float[N,3] y) { h = BatchNormalization(x, a, b, c, d)\n y = MatMul(h, w) }"
    rng = np.random.default_rng(1)
    weights = {name: rng.uniform(0.5, 1.5, 4) for name in "abcd"}
    loaded, said = decided(model(text, **weights, w=rng.standard_normal((4, 3))))
    assert sorted(trained(loaded)) == ["a", "b", "w"] and not said
    assert {origin(loaded, name).kind for name in "cd"} == {Kind.BUFFER}


def tied() -> onnx.ModelProto:
    w = np.random.default_rng(0).standard_normal((6, 4))
    text = "g (int64[N] x) => (float[N,6] y) { h = Gather(w, x)\n t = Tanh(h)\n y = MatMul(t, v) }"
    return model(text, w=w, v=w.T.copy())


def test_equal_weights_are_tied_and_it_is_said() -> None:
    loaded, said = decided(tied())
    assert list(trained(loaded)) == ["w"]
    assert any("'v' is the transpose of w" in line and "untie" in line for line in said)
    loaded, said = decided(tied(), untie="v")
    assert sorted(trained(loaded)) == ["v", "w"] and not said


def test_equal_fresh_weights_are_not() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, v)\n t = Tanh(h)\n y = MatMul(t, w) }"
    loaded, said = decided(model(text, v=np.zeros((4, 4)), w=np.zeros((4, 4))))
    assert sorted(trained(loaded)) == ["v", "w"] and not said


def test_untie_gives_each_use_a_copy() -> None:
    text = "g (float[N,4] x) => (float[N,4] y) { h = MatMul(x, w)\n t = Tanh(h)\n y = MatMul(t, w) }"
    loaded = graphopt.load(model(text, w=np.eye(4)))
    passes.Normalize()(loaded)
    passes.Untie("w")(loaded)
    passes.Parameters()(loaded)
    assert sorted(trained(loaded)) == ["w", "w.1"]
    with pytest.raises(GraphoptError, match="weights='z' matches no floating-point initializer"):
        passes.Untie("z")(graphopt.load(tied()))


def test_the_report_lists_what_trains_and_why() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = report(exported(Attention, "torchscript"), graphopt.standard(loss=passes.CrossEntropy())).summary()
    lines = [line.split() for line in found.splitlines()]
    heads = [
        line[0] for line in lines if line and line[0] in ("trains", "frozen", "tied", "buffer", "constant", "unsure")
    ]
    assert heads == ["trains", "tied", "buffer", "constant", "unsure"]
    assert any(line[:3] == ["mask", "float[5,5]", "25"] and "regular" in line for line in lines)
    assert any(line[1:5] == ["float[8,8]", "64", "query.weight,", "transposed"] for line in lines)
    temperature = next(line for line in found[found.index("unsure:") :].splitlines() if "temperature" in line)
    assert temperature.endswith("parameters.freeze=temperature changes it")


def test_roles_and_reasons_survive_saving(tmp_path) -> None:
    loaded, _ = decided(tied())
    graphopt.save(loaded, tmp_path / "model.onnx")
    again = graphopt.load(tmp_path / "model.onnx")
    found = next(value for value in again.graph.inputs if role_of(value) is Role.PARAMETER)
    assert Origin.read(found) == origin(loaded, "w")
    found.metadata_props["graphopt.origin"] = "{"
    with pytest.raises(GraphoptError, match="expected JSON, found"):
        Origin.read(found)


@pytest.mark.parametrize("kind", [Attention, Positioned])
@pytest.mark.slow
def test_a_step_leaves_stack_traces_out_and_trains_the_same_when_it_is_compiled_again(
    kind: type[nn.Module],
) -> None:
    def compiled(source: onnx.ModelProto) -> ir.Model:
        return graphopt.compile(source, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))

    step = compiled(exported(kind, "dynamo"))
    notes = {key for node in step.graph.all_nodes() for key in node.metadata_props}
    assert not notes & {"pkg.torch.onnx.stack_trace", "pkg.torch.onnx.class_hierarchy", "namespace"}
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        again = compiled(graphopt.Executor(step).trained())
    assert trained(again).keys() == trained(step).keys()


HEADS = """g (float[N,4] x) => (float[N,2] a, float[N,3] b) {
    h = MatMul(x, w)  t = Tanh(h)  a = MatMul(t, u)  b = MatMul(t, v) }"""


def heads() -> onnx.ModelProto:
    rng = np.random.default_rng(0)
    return model(HEADS, **{name: rng.normal(size=(4, n)) for name, n in (("w", 4), ("u", 2), ("v", 3))})


@pytest.mark.parametrize("fuse", [True, False])
def test_a_loss_on_one_of_two_outputs_keeps_the_weights_of_the_other(fuse: bool) -> None:
    options = {} if fuse else {"fuse": None}
    with pytest.warns(UserWarning, match="does not depend on 1 of 3 parameters, which do not train: 'v'$") as said:
        step = graphopt.compile(
            heads(),
            loss=passes.MeanSquaredError(output="a"),
            optimizer=passes.AdamW(0.1, weight_decay=0.1),
            **options,
        )
    assert len(said) == 1
    executor = graphopt.Executor(step)
    assert sorted(executor.parameters) == ["u", "w"]
    x = np.random.default_rng(1).normal(size=(5, 4)).astype(np.float32)
    executor.step(x=x, target=np.zeros((5, 2), np.float32))
    found = {value.name: onnx.numpy_helper.to_array(value) for value in executor.trained().graph.initializer}
    start = {value.name: onnx.numpy_helper.to_array(value) for value in heads().graph.initializer}
    np.testing.assert_array_equal(found["v"], start["v"])
    assert np.abs(found["u"] - start["u"]).max() > 0.05
    assert [y.name for y in executor.trained().graph.output] == ["a", "b"]


def test_the_report_says_which_weights_the_loss_does_not_reach() -> None:
    with pytest.warns(UserWarning, match="does not depend on"):
        found = report(heads(), graphopt.standard(loss=passes.MeanSquaredError(output="a"))).summary()
    assert "trains     2 tensors of 24 numbers" in found
    assert "v  float[4,3]  12  the loss does not depend on it" in found


def test_the_report_says_which_outputs_a_loss_can_compare() -> None:
    found = report(heads(), graphopt.standard(loss=passes.MeanSquaredError())).summary()
    line = next(line for line in found.splitlines() if line.startswith("blocked"))
    assert "the model has a [N, 2], b [N, 3]: write loss.output=a" in line and len(line) < 320


def test_a_loss_that_reaches_no_weight_is_refused() -> None:
    text = "g (float[N,4] x) => (float[N,4] a, float[N,3] b) { a = Tanh(x)\n b = MatMul(x, w) }"
    with pytest.raises(GraphoptError, match="the loss does not depend on 'w': freeze them, or compare another output"):
        graphopt.compile(model(text, w=np.ones((4, 3))), loss=passes.MeanSquaredError(output="a"))


def test_what_tf2onnx_folded_trains_and_is_not_certain():
    text = "g (float[N,4] x) => (float[N,3] y) { h = MatMul(x, const_fold_opt__1) y = Add(h, b) }"
    proto = model(text, const_fold_opt__1=np.random.default_rng(0).random((4, 3)), b=np.array([0.3, -0.2, 0.5]))
    proto.producer_name = "tf2onnx"
    loaded, said = decided(proto)
    assert {x.name for x in with_role(loaded, Role.PARAMETER)} == {"const_fold_opt__1", "b"}
    assert any("'const_fold_opt__1' (folded by tf2onnx" in text for text in said)


@pytest.mark.parametrize(
    "nodes", ["w2 = Mul(w, w) y = MatMul(x, w2)", "w2 = Mul(w, w) w3 = Mul(w2, w) y = MatMul(x, w3)"]
)
def test_powers_of_a_weight_are_no_scales(nodes: str) -> None:
    proto = onnx.parser.parse_model(
        f'<ir_version: 8, opset_import: ["": 17]> g (float[N,4] x) => (float[N,5] y) {{ {nodes} }}'
    )
    array = np.random.default_rng(0).standard_normal((4, 5)).astype(np.float32)
    proto.graph.initializer.append(onnx.numpy_helper.from_array(array, "w"))
    (parameter,) = with_role(decided(proto)[0], Role.PARAMETER)
    assert parameter.name == "w"

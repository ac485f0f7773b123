"""Sequences of tensors: models that hold them train as if they held tensors."""

from __future__ import annotations

import io

import numpy as np
import onnx
import pytest
import torch
from builders import model
from torch import nn
from twins import descended

import graphopt
import passes


class Bags(nn.Module):
    """Embeddings of bags of tokens."""

    def __init__(self, **options):
        super().__init__()
        self.bags = nn.EmbeddingBag(10, 4, **options)
        self.head = nn.Linear(4, 2)

    def forward(self, tokens, offsets=None, weights=None):
        return self.head(self.bags(tokens, offsets, weights))


def exported(network, inputs, exporter):
    names = [name for name, x in zip(["tokens", "offsets", "weights"], inputs, strict=False) if x is not None]
    if exporter == "dynamo":
        return torch.onnx.export(network, inputs, dynamo=True, input_names=names, verbose=False).model_proto
    buffer = io.BytesIO()
    torch.onnx.export(network, inputs, buffer, dynamo=False, opset_version=17, input_names=names)
    return onnx.load_from_string(buffer.getvalue())


ROWS, FLAT = torch.tensor([[1, 5, 5], [0, 9, 2]]), torch.tensor([4, 4, 0, 7, 2, 9, 1])
BAGS = [
    *(({"mode": mode}, (ROWS,)) for mode in ("sum", "mean", "max")),
    *(({"mode": mode}, (FLAT, torch.tensor([0, 3, 3, 5]))) for mode in ("sum", "mean", "max")),
    ({"mode": "sum"}, (ROWS, None, torch.tensor([[0.5, -1, 2], [1, 0.25, 3]]))),
    ({"mode": "sum", "include_last_offset": True}, (FLAT, torch.tensor([0, 3, 5, 7]))),
    ({"mode": "mean", "padding_idx": 5}, (ROWS,)),
]


@pytest.mark.parametrize("exporter", ["dynamo", "torchscript"])
@pytest.mark.parametrize(("options", "inputs"), BAGS, ids=lambda value: str(value) if isinstance(value, dict) else "")
@pytest.mark.slow
@pytest.mark.sample(6)
def test_bags_of_embeddings_train_as_in_pytorch(options, inputs, exporter):
    if exporter == "torchscript" and "padding_idx" in options:
        pytest.skip("the exporter refuses padding_idx")
    if exporter == "torchscript" and options["mode"] == "max" and len(inputs) > 1:
        pytest.skip("of an empty bag, its model returns minus infinity")
    torch.manual_seed(0)
    network = Bags(**options)
    proto = exported(network, inputs, exporter)
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(pattern=["bags.*", "head.*"]),
        loss=passes.MeanSquaredError(),
        optimizer=passes.SGD(0.2),
    )
    executor = graphopt.Executor(step, threads=1)
    assert len(executor.parameters) == 3
    optimizer = torch.optim.SGD(network.parameters(), 0.2)
    names = [name for name in executor.inputs if name != "target"]
    feeds = dict(zip(names, (x.numpy() for x in inputs if x is not None), strict=True))
    target = torch.randn(network(*inputs).shape)
    for _ in range(5):
        loss = nn.functional.mse_loss(network(*inputs), target)
        descended(loss, optimizer)
        found = executor.step(**feeds, target=target.numpy())["loss"]
        np.testing.assert_allclose(found, loss.item(), rtol=1e-5)
    np.testing.assert_allclose(
        executor.predict(**feeds)[next(iter(executor.trained().graph.output)).name],
        network(*inputs).detach(),
        rtol=1e-4,
        atol=1e-6,
    )


LOOPED = """t{turns} = Constant<value = int64 {{{turns}}}>()
        on = Constant<value = bool {{1}}>()
        first = {first}
        s = Loop(t{turns}, on, first) <body = body (int64 i, bool c, seq(float[N,3]) before)
                => (bool d, seq(float[N,3]) after) {{
            d = Identity(c)
            f = Cast<to = 1>(i)
            g = Add(f, w)
            row = Mul(h, g)
            {turn}
        }}>"""

CASES = {
    "put together": """s = SequenceConstruct(h, x)
        n = Neg(h)
        at = Constant<value = int64 {1}>()
        t = SequenceInsert(s, n, at)
        y = ConcatFromSequence<axis=1>(t)""",
    "erased, and read at a place from the end": """s = SequenceConstruct(h, x, h)
        last = Constant<value = int64 {-1}>()
        t = SequenceErase(s)
        a = SequenceAt(t, last)
        e = SequenceEmpty()
        u = SequenceInsert(e, a)
        v = SequenceInsert(u, h)
        y = ConcatFromSequence<axis=-1, new_axis=1>(v)""",
    "split into rows": """s = SplitToSequence<axis=1, keepdims=0>(h)
        two = Constant<value = int64 {2}>()
        a = SequenceAt(s, two)
        n = SequenceLength(s)
        f = Cast<to = 1>(n)
        y = Mul(a, f)""",
    "split into parts": """two = Constant<value = int64 {2}>()
        s = SplitToSequence<axis=1>(h, two)
        one = Constant<value = int64 {1}>()
        y = SequenceAt(s, one)""",
    "split into parts of given sizes": """sizes = Constant<value = int64[2] {1, 2}>()
        s = SplitToSequence<axis=1>(h, sizes)
        one = Constant<value = int64 {1}>()
        y = SequenceAt(s, one)""",
    "split into as many rows as there are": """s = SplitToSequence(h)
        one = Constant<value = int64 {1}>()
        a = SequenceAt(s, one)
        n = SequenceLength(s)
        f = Cast<to = 1>(n)
        y = Mul(a, f)""",
    "read at a place that the run tells": """s = SequenceConstruct(h, x)
        r = ReduceMax<keepdims=0>(x)
        zero = Constant<value = float {0}>()
        p = Greater(r, zero)
        i = Cast<to = 7>(p)
        y = SequenceAt(s, i)""",
    "appended to by a loop": LOOPED.format(turns=3, first="SequenceEmpty()", turn="after = SequenceInsert(before, row)")
    + "\n y = ConcatFromSequence<axis=1>(s)",
    "appended to by a loop, and stacked": LOOPED.format(
        turns=3, first="SequenceConstruct(x)", turn="after = SequenceInsert(before, row)"
    )
    + "\n y = ConcatFromSequence<axis=-1, new_axis=1>(s)",
    "appended to twice a turn": LOOPED.format(
        turns=2,
        first="SequenceEmpty()",
        turn="neg = Neg(row)\n m = SequenceInsert(before, row)\n after = SequenceInsert(m, neg)",
    )
    + """
        n = SequenceLength(s)
        f = Cast<to = 1>(n)
        two = Constant<value = int64 {-2}>()
        a = SequenceAt(s, two)
        y = Mul(a, f)""",
    "read by a loop": """s = SequenceConstruct(h, x)
        n = SequenceLength(s)
        on = Constant<value = bool {1}>()
        y, t = Loop(n, on, x, s) <body = body (int64 i, bool c, float[N,3] a, seq(float[N,3]) q)
                => (bool d, float[N,3] b, seq(float[N,3]) r) {
            d = Identity(c)
            e = SequenceAt(q, i)
            b = Mul(a, e)
            r = Identity(q)
        }>""",
}

DIMS = {
    "erased, and read at a place from the end": "A,B,C",
    "split into rows": "A",
    "appended to by a loop, and stacked": "A,B,C",
}


@pytest.mark.parametrize("case", CASES)
def test_a_sequence_is_the_tensors_that_it_holds(case):
    rng = np.random.default_rng(7)
    proto = model(
        f"g (float[N,3] x) => (float[{DIMS.get(case, 'A,B')}] y) {{ h = Mul(x, w)\n {CASES[case]} }}",
        w=rng.standard_normal(3),
    )
    x = rng.standard_normal((4, 3)).astype(np.float32)
    before = graphopt.run(proto, {"x": x})["y"]
    step = graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD(1.0))
    assert not any("Sequence" in node.op_type for node in step.graph.all_nodes())
    executor = graphopt.Executor(step)
    target = rng.standard_normal(before.shape).astype(np.float32)
    np.testing.assert_allclose(executor.predict(x=x)["y"], before, rtol=1e-6)
    w = executor.parameters["w"]
    executor.step(x=x, target=target)

    def loss(values):
        graph = onnx.ModelProto.FromString(proto.SerializeToString())
        graph.graph.initializer[0].CopyFrom(onnx.numpy_helper.from_array(values.astype(np.float32), "w"))
        return ((graphopt.run(graph, {"x": x})["y"].astype(np.float64) - target) ** 2).mean()

    expected = [(loss(w + d) - loss(w - d)) / 2e-2 for d in 1e-2 * np.eye(3)]  # with the sequences, on the runtime
    np.testing.assert_allclose(w - executor.parameters["w"], expected, rtol=2e-2, atol=2e-3)


def test_a_sequence_that_only_the_run_tells_is_refused_with_what_it_blocks():
    proto = model(
        """g (float[N,3] x, int64 place) => (float[A,B] y) {
            h = Mul(x, w)
            s = SequenceConstruct(h, x)
            t = SequenceInsert(s, h, place)
            y = ConcatFromSequence<axis=0>(t)
        }""",
        w=np.ones(3),
    )
    with pytest.raises(
        graphopt.GraphoptError, match=r"ConcatFromSequence \(nodes .*; blocks 'w'; it works on sequences"
    ):
        graphopt.compile(proto, loss=passes.MeanSquaredError(), optimizer=passes.SGD())

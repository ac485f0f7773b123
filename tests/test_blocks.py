"""Parts of arrays that a graph joins again are read where they lie, with the same bits."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import onnx
import pytest
import torch
from builders import by_gates, model
from steps import compiled
from test_first_check import OPTIMIZERS

import graphopt
import passes
from graphopt.graph.blocks import gather_blocks, starts_of_blocks
from graphopt.graph.storage import whole

RNG = np.random.default_rng(0)
CUT = "i = Constant<value_ints=[2]>() j = Constant<value_ints=[4]>() k = Constant<value_ints=[9]>()"
CUT += " o = Constant<value_ints=[0]>() e = Constant<value_ints=[-2]>() a = Slice(w, o, i, o) b = Slice(w, i, j, o)"
CUT += " c = Slice(w, e, k, o)"
PARTS = "p, q = Split<num_outputs=2>(w) r, s = Split<num_outputs=2>(v)"
FLAT = "f = Constant<value_ints=[1, 18]>() t = Constant<value_ints=[6, 3]>()"

# Nodes from w and v of 6 x 3 numbers to z, and the operators that are left of them.
GATHERED = {
    "slices in another order": (f"{CUT} z = Concat<axis=0>(c, a, b)", ["Gather"]),
    "a part is missing": (f"{CUT} z = Concat<axis=0>(c, a)", ["Gather"]),
    "a part comes twice": (f"{CUT} z = Concat<axis=0>(c, a, b, a)", ["Gather"]),
    "parts overlap": (f"{CUT} d = Slice(w, i, k, o) z = Concat<axis=0>(d, a, b)", ["Gather"]),
    "slices in order": (f"{CUT} z = Concat<axis=0>(a, b, c)", []),
    "two values in order": (f"{PARTS} z = Concat<axis=0>(p, q, r, s)", ["Concat"]),
    "nested": (
        f"{PARTS} m = Concat<axis=0>(q, p) n = Concat<axis=0>(s, r) z = Concat<axis=0>(m, n)",
        ["Concat", "Gather"],
    ),
    "parts of two values are mixed": (f"{PARTS} z = Concat<axis=0>(q, r, p, s)", ["Concat", "Gather"]),
    "with another axis": (
        f"{PARTS} f = Constant<value_ints=[0]>() m = Concat<axis=0>(q, p) z = Unsqueeze(m, f)",
        ["Gather"],
    ),
    "rows of a new axis": (
        f"{PARTS} f = Constant<value_ints=[0]>() m = Concat<axis=0>(q, p) n = Concat<axis=0>(s, r)"
        " a = Unsqueeze(m, f) b = Unsqueeze(n, f) k = Concat<axis=0>(a, b) z = ReduceSum<keepdims=0>(k, f)",
        ["Concat", "Gather", "ReduceSum"],
    ),
    "whole values of a new axis": (
        f"{PARTS} f = Constant<value_ints=[0]>() m = Concat<axis=0>(p, q) n = Concat<axis=0>(r, s)"
        " a = Unsqueeze(m, f) b = Unsqueeze(n, f) k = Concat<axis=0>(a, b) z = ReduceSum<keepdims=0>(k, f)",
        ["Unsqueeze", "Unsqueeze", "Concat", "ReduceSum"],
    ),
    "twice": (
        f"{PARTS} m = Concat<axis=0>(q, r) a, b = Split<num_outputs=2>(m) n = Concat<axis=0>(a, b) z = Add(m, n)",
        ["Split", "Split", "Concat", "Add"],
    ),
    "cut where it was joined": (
        "m = Concat<axis=0>(w, v) p, q = Split<num_outputs=2>(m) z = Identity(q)",
        [],
    ),
    "cut in another form": (
        f"{FLAT} m = Reshape(w, f) n = Reshape(v, f) l = Concat<axis=0>(m, n) p, q = Split<num_outputs=2>(l)"
        " z = Reshape(q, t)",
        [],
    ),
}
STAY = {
    "numbers without axes": "f = Constant<value_ints=[0]>() n = ReduceSum<keepdims=0>(w) m = ReduceMax<keepdims=0>(v)"
    " a = Unsqueeze(n, f) b = Unsqueeze(m, f) z = Concat<axis=0>(a, b)",
    "parts of two values, not all": f"{PARTS} z = Concat<axis=0>(q, r, p)",
    "of another axis": "p, q, r = Split<num_outputs=3, axis=1>(w) z = Concat<axis=1>(q, r, p)",
    "joined along another axis": f"{PARTS} z = Concat<axis=1>(q, p)",
}


def run(nodes: str) -> tuple[list[str], list[str], list[np.ndarray], list[np.ndarray]]:
    """Return the operators and the results before and after, of a graph from x, w and v to what x and z make."""
    proto = model(f"g (float[1] x, float[6,3] w, float[6,3] v) => (float[A,B] y) {{ {nodes} y = Add(z, x) }}")
    proto = onnx.shape_inference.infer_shapes(proto, data_prop=True)
    before, after = graphopt.load(proto), graphopt.load(proto)
    gather_blocks(after)
    feeds = {name: RNG.standard_normal(shape, np.float32) for name, shape in {"x": 1, "w": (6, 3), "v": (6, 3)}.items()}
    device = graphopt.Device("cpu")
    found = []
    for each in (before, after):
        session = device.open(whole(each))
        found.append(session.run(None, {x.name: feeds[x.name] for x in session.get_inputs()}))
    operators = [[node.op_type for node in each.graph if node.op_type != "Constant"][:-1] for each in (before, after)]
    return (*operators, *found)


@pytest.mark.parametrize("name", GATHERED)
def test_parts_are_gathered_at_once(name):
    nodes, expected = GATHERED[name]
    _, left, before, after = run(nodes)
    assert left == expected
    np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize("name", STAY)
def test_other_parts_stay(name):
    operators, left, before, after = run(STAY[name])
    assert left == operators
    np.testing.assert_array_equal(before[0], after[0])


@pytest.mark.parametrize(
    "nodes",
    [
        "z = Slice(w, s, e, o, k)",  # its steps are an input
        "a = Slice(w, s, e, o, k) b = Slice(w, s, e, o, k) z = Concat<axis=0>(b, a)",
        "a = Slice(w, t, e, o) b = Slice(w, s, e, o) z = Concat<axis=0>(b, a)",  # 1 number, declared as 6
    ],
)
def test_slices_of_unknown_steps_and_of_other_sizes_stay(nodes):
    constants = "s = Constant<value_ints=[5]>() e = Constant<value_ints=[-100]>() o = Constant<value_ints=[0]>()"
    constants += " t = Constant<value_ints=[5]>()"
    size = 12 if "Concat" in nodes else 6
    types = f"<float[6] a, float[6] b, float[{size}] z>"
    inputs = f"g (float[{size}] x, float[6] w, int64[1] k) => (float[{size}] y)"
    text = f"{inputs} {types} {{ {constants} {nodes} y = Add(z, x) }}"
    assert not gather_blocks(graphopt.load(model(text)))


@pytest.mark.parametrize(
    ("size", "nodes", "starts"),
    [
        (6, "a, b, c = Split<num_outputs=3>(w) z = Concat<axis=0>(c, a, b)", [4, 0, 2]),
        (6, "a, b, c = Split<num_outputs=3>(w) z = Concat<axis=0>(b, a, a)", None),  # one block twice
        (8, "a, b, c, d = Split<num_outputs=4>(w) z = Concat<axis=0>(d, b, a)", [6, 2, 0]),
        (9, "a, b, c = Split<num_outputs=3>(w) z = Concat<axis=0>(c, a)", None),  # blocks of 2 in parts of 3
        (0, "a, b, c = Split<num_outputs=3>(w) z = Concat<axis=0>(c, a, b)", None),
        (6, "a, b, c = Split<num_outputs=3>(w) d = Neg(a) z = Concat<axis=0>(d, b, c)", None),  # of two arrays
        (6, "z = Identity(w)", [0, 2, 4]),
    ],
)
def test_blocks_begin_where_the_array_has_them(size, nodes, starts):
    proto = onnx.shape_inference.infer_shapes(model(f"g (float[{size}] w) => (float[M] z) {{ {nodes} }}"))
    assert starts_of_blocks(graphopt.load(proto).graph.outputs[0], 3) == starts


def test_a_long_vector_is_not_gathered_number_by_number():
    proto = model(
        "g (float[1] x, float[6000] w) => (float[6000] y) {"
        " p, q = Split<num_outputs=2>(w) z = Concat<axis=0>(q, p) y = Add(z, x) }"
    )
    assert not gather_blocks(graphopt.load(onnx.shape_inference.infer_shapes(proto)))


@pytest.mark.parametrize("target", ["plain", "onnxruntime", None])
@pytest.mark.parametrize("units", [2, 33])  # the operator runs beside its gradient, or a Scan in its place
@pytest.mark.parametrize("op_type", ["LSTM", "GRU"])
def test_gates_that_are_laid_out_anew_train_as_in_pytorch(op_type, units, target):
    torch.manual_seed(0)
    layer = getattr(torch.nn, op_type)(3, units)
    weights = {name.removesuffix("_l0"): x.detach().numpy() for name, x in layer.named_parameters()}
    step = compiled(by_gates(op_type, units=units, **weights), optimizer=passes.SGD(0.5))
    options = {} if target is None else {"target": target}
    executor = graphopt.Executor(step, threads=1, **options)
    descent = torch.optim.SGD(layer.parameters(), 0.5)
    for _ in range(3):
        x, y = RNG.standard_normal((4, 5, 3), np.float32), RNG.standard_normal((5, units), np.float32)
        loss = torch.nn.functional.mse_loss(layer(torch.tensor(x))[0][-1], torch.tensor(y))
        descent.zero_grad()
        loss.backward()
        descent.step()
        assert executor.step({"x": x, "target": y})["loss"] == pytest.approx(loss.item(), rel=1e-5)
    for name, w in layer.named_parameters():
        np.testing.assert_allclose(executor.state[name.removesuffix("_l0")], w.detach(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("optimizer", [replace(x, groups=()) for x in OPTIMIZERS], ids=lambda x: type(x).__name__)
@pytest.mark.parametrize("op_type", ["LSTM", "GRU"])
@pytest.mark.sample(8)
def test_slots_of_gates_that_are_laid_out_anew_are_those_of_the_plain_step(op_type, optimizer):
    step = compiled(by_gates(op_type), optimizer=optimizer)
    plain, lowered = (graphopt.Executor(step, threads=1, target=x) for x in ("plain", "onnxruntime"))
    for _ in range(3):
        batch = {
            "x": RNG.standard_normal((4, 5, 3), np.float32),
            "target": RNG.standard_normal((5, 2), np.float32),
        }
        expected = plain.step(batch)["loss"]
        assert lowered.step(batch)["loss"] == pytest.approx(expected, rel=1e-5)
    for name, x in plain.state.items():
        np.testing.assert_allclose(lowered.state[name], x, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(("op_type", "left"), [("LSTM", [16, 17, 51]), ("GRU", [12, 17, 46])])
def test_no_slice_of_a_weight_is_left_in_a_lowered_step(op_type, left):
    step = compiled(by_gates(op_type))
    counts = []
    for leave_out in (["gather_blocks"], []):
        operators = [node.op_type for node in passes.Fuse(leave_out)(graphopt.load(step)).model.graph]
        counts.append((operators.count("Slice"), operators.count("Concat"), len(operators)))
    assert np.subtract(*counts).tolist() == left

"""Fusions of Scans: the same losses, over 50 steps, and the same results of Scans of any form."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model
from test_fusion import fused_step, opened

import graphopt
import passes

RNG = np.random.default_rng(0)
RECURRENT = {
    "RNN": ("Y, H = RNN<hidden_size = 8>(x, w, r, b)", 1, 8),
    "GRU": ("Y, H = GRU<hidden_size = 8>(x, w, r, b)", 3, 8),
    "LSTM": ("Y, H, C = LSTM<hidden_size = 8>(x, w, r, b)", 4, 8),
    "reverse": ('Y, H, C = LSTM<hidden_size = 8, direction = "reverse">(x, w, r, b)', 4, 8),
    "large": ("Y, H, C = LSTM<hidden_size = 64>(x, w, r, b)", 4, 64),
    "scan": (
        """H = Scan<num_scan_inputs = 1, body = s (float[N,8] h, float[N,3] i) => (float[N,8] k) {
            u = MatMul(h, q) v = MatMul(i, m) p = Add(u, v) k = Tanh(p) }>(start, x)""",
        1,
        8,
    ),
}


@pytest.mark.parametrize("fusion", ["hoist_weight_gradients", "vectorize_steps"])
@pytest.mark.parametrize("name", RECURRENT)
@pytest.mark.slow
def test_what_steps_of_a_scan_need_not_wait_for_is_done_at_once(name, fusion):
    random = np.random.default_rng(0)
    node, gates, units = RECURRENT[name]
    operands = {
        "w": random.standard_normal((1, units * gates, 3)) / 4,
        "r": random.standard_normal((1, units * gates, units)) / 4,
        "b": random.standard_normal((1, 2 * units * gates)) / 4,
    }
    if name == "scan":
        operands = {"q": random.standard_normal((8, units)) / 4, "m": random.standard_normal((3, units)) / 4}
        operands["start"] = random.standard_normal((5, units))
    proto = model(
        f"""g (float[T,5,3] x) => (float[5,2] y) {{
            {node}
            f = Reshape(H, shape)
            y = MatMul(f, head)
        }}""".replace("float[N,", "float[5,"),
        **operands,
        head=random.standard_normal((units, 2)),
        shape=np.array([5, units]),
    )
    steps = {"loss": passes.MeanSquaredError(), "optimizer": passes.SGD(0.002, momentum=0.9)}
    plain = fused_step(proto, **steps, fuse=passes.Fuse(leave_out=[fusion]))
    fused = fused_step(proto, **steps)
    measure = {"hoist_weight_gradients": _carried, "vectorize_steps": _in_bodies}[fusion]
    assert measure(fused) < measure(plain)
    onnx.checker.check_model(ir.to_proto(fused), full_check=True)
    executors = [opened(step, threads=1) for step in (plain, fused)]
    for step in range(50):
        x = random.standard_normal((4 + step % 3, 5, 3), np.float32)
        target = np.tanh(x.sum(axis=0)[:, :2])
        first, second = (executor.step(x=x, target=target)["loss"] for executor in executors)
        assert second == pytest.approx(first, rel=1e-6)


def _in_bodies(step):
    return sum(len(node.attributes["body"].as_graph()) for node in step.graph if node.op_type == "Scan")


def _carried(step):
    scans = [node for node in step.graph if node.op_type == "Scan"]
    return sum(len(node.inputs) - node.attributes["num_scan_inputs"].as_int() for node in scans)


ROWS = "float[2,3]"
FISSION = {  # a Scan's attributes, the body's text, and how many nodes the body keeps; of x, u: [4,2,3], h: [2,3]
    "all of it": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "k = Sub(h, i) m = Mul(i, j) o = Tanh(m)",
        1,
    ),
    "factors": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Mul(h, i) b = Mul(j, a) c = Mul(b, i) k = Tanh(c) o = Exp(k)",
        3,
    ),
    "factors that are read both ways": (
        "scan_input_directions = [0, 1], ",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Mul(h, i) k = Mul(j, a) o = Exp(k)",
        3,
    ),
    "other ways": (
        "scan_input_directions = [0, 1], ",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Sin(i) b = Cos(j) c = Mul(a, b) k = Add(h, c) o = Tanh(a)",
        2,
    ),
    "an output the other way": (
        "scan_output_directions = [1], ",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Sin(i) b = Mul(a, j) k = Add(h, b) o = Exp(b)",
        2,
    ),
    "an output along another axis": (
        "scan_output_axes = [1], ",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Sin(i) b = Mul(a, j) k = Add(h, b) o = Exp(b)",
        2,
    ),
    "products and parts": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        """g = Gemm<transB = 1>(i, w, j) m = MatMul(j, w) c = Concat<axis = 1>(g, m)
        a, b = Split<axis = 1, num_outputs = 2>(c) p = Less(a, b) q = Where(p, a, bias) k = Add(h, q) o = Mul(k, b)""",
        2,
    ),
    "parts of other sizes": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, float[2,2] o)",
        """k = Add(h, j) c = Concat<axis = 1>(i, j) a, b, d = Split<axis = 1, num_outputs = 3>(c)
        e = Mul(a, b) o = Add(e, d)""",
        1,
    ),
    "predicates": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        """p = GreaterOrEqual(i, j) q = LessOrEqual(i, j) r = IsNaN(j) t = Xor(p, q) e = Or(t, r)
        f = Where(e, i, j) k = Add(h, f) o = Mul(k, f)""",
        2,
    ),
    "a state that a slice replaces": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        "a = Mul(i, j) k = Tanh(a) o = Add(h, a)",
        2,
    ),
    "a branch that reads a row": (
        "",
        f"({ROWS} h, {ROWS} i, {ROWS} j)",
        f"({ROWS} k, {ROWS} o)",
        f"""a = Mul(i, j) k = If(yes) <then_branch = t () => ({ROWS} p) {{ p = Add(h, a) }},
            else_branch = e () => ({ROWS} q) {{ q = Sub(h, a) }}> o = Tanh(a)""",
        1,
    ),
}


@pytest.mark.parametrize("case", [case for case in FISSION if FISSION[case][0]])
def test_scans_with_directions_and_axes_are_parted(case):
    assert_parted(case)


@pytest.mark.parametrize("case", [case for case in FISSION if not FISSION[case][0]])
def test_scans_of_any_body_are_parted(case):
    assert_parted(case)


def assert_parted(case):
    attributes, takes, gives, body, left = FISSION[case]
    text = f"""g ({ROWS} s, float[4,2,3] x, float[4,2,3] u, bool yes) => ({ROWS} last, float[a,b,c] y) {{
        last, y = Scan<num_scan_inputs = 2, {attributes}body = step {takes} => {gives} {{ {body} }}>(s, x, u)
    }}"""
    weights = {"w": RNG.standard_normal((3, 3)), "bias": RNG.standard_normal(3)}
    proto = model(text, **{name: array for name, array in weights.items() if name in body})
    feeds = {
        x.name: RNG.standard_normal([d.dim_value for d in x.type.tensor_type.shape.dim]) for x in proto.graph.input
    }
    feeds = {name: array.astype(np.float32) for name, array in feeds.items()} | {"yes": np.array(True)}
    plain = graphopt.load(proto)
    passes.Normalize()(plain)
    fused = plain.clone()
    passes.Fuse()(fused)
    bodies = [n.attributes["body"].as_graph() for n in fused.graph if n.op_type == "Scan"]
    assert sum(map(len, bodies)) == left
    names = ["last", "y"]
    expected, found = (
        onnxruntime.InferenceSession(ir.to_proto(m).SerializeToString(), providers=["CPUExecutionProvider"]).run(
            names, {x.name: feeds[x.name] for x in m.graph.inputs}
        )
        for m in (plain, fused)
    )
    for one, other in zip(expected, found, strict=True):
        np.testing.assert_allclose(other, one, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("directions", [(0, 0), (1, 1), (0, 1), (1, 0)])
def test_a_sum_of_products_reads_each_sequence_its_own_way(directions):
    text = f"""g (float[3,3] s, float[4,2,3] x, float[4,2,3] u) => (float[3,3] last) {{
        last = Scan<num_scan_inputs = 2, scan_input_directions = [{directions[0]}, {directions[1]}],
            body = step (float[3,3] h, {ROWS} i, {ROWS} j) => (float[3,3] k) {{
                p = Gemm<transA = 1>(i, j) k = Add(h, p) }}>(s, x, u)
    }}"""
    feeds = {name: RNG.standard_normal((4, 2, 3), np.float32) for name in ("x", "u")}
    feeds["s"] = RNG.standard_normal((3, 3), np.float32)
    fused = graphopt.load(model(text))
    passes.Normalize()(fused)
    passes.Fuse()(fused)
    x, u = (feeds[name][::-1] if way else feeds[name] for name, way in zip("xu", directions, strict=True))
    np.testing.assert_allclose(
        graphopt.run(fused, feeds)["last"], feeds["s"] + np.einsum("tni,tnj->ij", x, u), rtol=1e-5, atol=1e-6
    )

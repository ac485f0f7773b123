"""Loops written out compute what the loops do, bit for bit; what cannot be written out is refused by name."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import model
from host_graphs import GRAPHS, batches
from test_control_flow import CASES as LOOPS

import graphopt
import passes
from graphopt.graph.limits import Limits, set_limits
from graphopt.graph.shapes import infer
from graphopt.testing.reference import evaluator

RNG = np.random.default_rng(0)
FURTHER = {
    "loop of a constant count": (
        """g (T[3] s, T[3] w) => (T[3] z, T[4, 3] ys) { four = Constant <value = int64[1] {4}> ()
        yes = Constant <value = bool {1}> ()
        z, ys = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k, T[3] o) {
          go = Constant <value = bool {1}> () f = CastLike(i, h) m = Mul(h, w) a = Sin(m) k = Add(a, f) o = Identity(h)
          }> (four, yes, s) }""",
        {},
    ),
    "loop that never runs": (
        """g (T[3] s, T[3] w) => (T[3] z) { four = Constant <value = int64 {4}> ()
        no = Constant <value = bool {0}> () z = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k) {
          go = Identity(on) k = Mul(h, w) }> (four, no, s) }""",
        {},
    ),
    "scan in a loop in a branch": (
        """g (T[3] s, T[2, 3] x, bool c) => (T[3] z, T[3] u) { two = Constant <value = int64 {2}> ()
        u = Exp(s) z = If(c) <
          then_branch = yes () => (T[3] p) { p = Loop <body = b (int64 i, bool on, T[3] h) => (bool go, T[3] k) {
            go = Identity(on) k, ys = Scan <num_scan_inputs = 1, body = d (T[3] e, T[3] r) => (T[3] f, T[3] o) {
              m = Mul(e, u) f = Add(m, r) o = Sin(f) }> (h, x) }> (two, , s) },
          else_branch = no () => (T[3] q) { q = Sin(u) }> }""",
        {"c": np.array(True)},
    ),
}


def parsed(text, dtype="float"):
    proto = model(text.replace("T[", f"{dtype}[").replace("[n, 3]", "[K, 3]"))
    names = [x.name for x in proto.graph.input]
    if "n" in names:  # a trip count that is known
        del proto.graph.input[names.index("n")]
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.array(3), "n"))
    return proto


def feeds_of(proto, feeds):
    made = {}
    for x in proto.graph.input:
        shape = [dim.dim_value for dim in x.type.tensor_type.shape.dim]
        made[x.name] = feeds.get(x.name, RNG.standard_normal(shape).astype(np.float32))
    return made


def has_loops(written):
    return any(node.op_type in ("Loop", "Scan") for node in written.graph.all_nodes())


UNROLLED = {name: case for name, case in (LOOPS | FURTHER).items() if "until" not in name}


@pytest.mark.parametrize("name", UNROLLED)
def test_turns_compute_what_the_loop_does(name):
    text, feeds = UNROLLED[name]
    proto = parsed(text)
    feeds = feeds_of(proto, feeds)
    written = passes.UnrollLoops()(ir.from_proto(proto)).model
    assert not has_loops(written)
    onnx.checker.check_model(ir.to_proto(written), full_check=True)
    expected, found = graphopt.run(proto, feeds), graphopt.run(ir.to_proto(written), feeds)
    assert list(expected) == list(found)
    reference = evaluator(written).run(None, feeds)
    for (key, value), other in zip(expected.items(), reference, strict=True):
        np.testing.assert_array_equal(found[key], value)
        np.testing.assert_allclose(other, value, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", ["lstm", "control_flow"])
def test_training_graphs_train_the_same(name):
    step = GRAPHS[name][0]()
    written = step.clone()
    passes.UnrollLoops()(written)
    assert has_loops(step)
    assert not has_loops(written)
    first, second = (graphopt.Executor(m, threads=1, target="plain") for m in (step, written))
    for batch in batches(name, 20):
        assert second.step(batch)["loss"] == first.step(batch)["loss"]
    for key, value in first.state.items():
        np.testing.assert_array_equal(second.state[key], value, err_msg=key)


@pytest.mark.parametrize("name", GRAPHS)
@pytest.mark.slow
def test_several_steps_a_call_are_written_out(name):
    step = GRAPHS[name][0]()
    several = passes.Unroll(steps=3)(step.clone()).model
    written = several.clone()
    passes.UnrollLoops()(written)
    assert not has_loops(written)
    given = batches(name, 3)
    stacked = {key: np.stack([batch[key] for batch in given]) for key in given[0]}
    first, second = (graphopt.run(m, stacked) for m in (several, written))
    for key, value in first.items():
        np.testing.assert_allclose(second[key], value, rtol=1e-4, atol=1e-5, err_msg=key)


REFUSED = {
    "Scan node 'scan': expected sequences of a known length, found 'x' of shape": """g (float[3] s, float[K,3] x)
        => (float[3] z) { [scan] z = Scan <num_scan_inputs = 1, body = b (float[3] h, float[3] i) => (float[3] k) {
          k = Add(h, i) }> (s, x) }""",
    "Loop node 'loop': expected a constant trip count, found 'n'": """g (float[3] s, int64 n) => (float[3] z) {
        [loop] z = Loop <body = b (int64 i, bool on, float[3] h) => (bool go, float[3] k) {
          go = Identity(on) k = Exp(h) }> (n, , s) }""",
    "Loop node 'loop': expected a constant trip count, found none": """g (float[3] s, bool c) => (float[3] z) {
        [loop] z = Loop <body = b (int64 i, bool on, float[3] h) => (bool go, float[3] k) {
          go = Identity(on) k = Exp(h) }> (, c, s) }""",
    "Loop node 'loop': expected a constant condition, found 'c'": """g (float[3] s, bool c) => (float[3] z) {
        n = Constant <value = int64 {3}> ()
        [loop] z = Loop <body = b (int64 i, bool on, float[3] h) => (bool go, float[3] k) {
          go = Identity(on) k = Exp(h) }> (n, c, s) }""",
    "Loop node 'loop': expected a condition that is always true, found 'go'": """g (float[3] s) => (float[3] z) {
        n = Constant <value = int64 {3}> () two = Constant <value = int64 {2}> ()
        [loop] z = Loop <body = b (int64 i, bool on, float[3] h) => (bool go, float[3] k) {
          go = Less(i, two) k = Exp(h) }> (n, , s) }""",
    "Loop node 'loop': expected at most 100 nodes after it is unrolled, found .* for 60 turns": """g (float[3] s)
        => (float[3] z) { n = Constant <value = int64 {60}> ()
        [loop] z = Loop <body = b (int64 i, bool on, float[3] h) => (bool go, float[3] k) {
          go = Identity(on) k = Exp(h) }> (n, , s) }""",
}


@pytest.mark.parametrize("message", REFUSED)
def test_a_loop_without_a_fixed_end_is_refused(message):
    given = ir.from_proto(model(REFUSED[message]))
    infer(given)
    set_limits(given, Limits(nodes=100))
    with pytest.raises(graphopt.GraphoptError, match=f"UnrollLoops: {message}"):
        passes.UnrollLoops()(given)

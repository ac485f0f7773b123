"""One number tells whether a step's new state is finite, also where a target joins the updates of many arrays."""

from __future__ import annotations

from collections import Counter

import numpy as np
import onnx_ir as ir
import onnxruntime
import pytest
from builders import model

import graphopt
import passes
from graphopt import models
from graphopt.graph.roles import Role, set_role
from graphopt.graph.shapes import infer
from graphopt.graph.state import take_initial
from graphopt.targets.check import CHECK, add_check

RNG = np.random.default_rng(0)
FEEDS = {"x": RNG.standard_normal((8, 4)).astype(np.float32), "target": RNG.integers(0, 3, 8)}
OPTIMIZERS = {
    "descent": passes.SGD(0.1),
    "momentum": passes.SGD(0.1, momentum=0.9),
    "adamw": passes.AdamW(1e-3),
    "adagrad": passes.Adagrad(1e-2),
}


def checked(optimizer, target):
    step = graphopt.compile(
        models.mlp((4,), 3, hidden=(16,) * 20), loss=passes.CrossEntropy(), optimizer=OPTIMIZERS[optimizer]
    )
    lowered = graphopt.lower(step, target).clone()
    state = take_initial(lowered)
    add_check(lowered, [], chained=True)
    return lowered, state


def opened(graph):
    return onnxruntime.InferenceSession(ir.to_proto(graph).SerializeToString(), providers=["CPUExecutionProvider"])


@pytest.mark.parametrize("target", ["plain", "cuda", "webgpu"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_each_infinite_number_is_seen(optimizer, target):
    graph, state = checked(optimizer, target)
    session = opened(graph)
    given = {**state, **FEEDS}
    names = {x.name for x in session.get_inputs()}
    given = {name: x for name, x in given.items() if name in names}
    assert np.isfinite(session.run([CHECK], given)[0])
    for name, x in state.items():
        if x.dtype.kind == "f" and x.ndim and name in names:
            bad = x.copy()
            bad.ravel()[-1] = np.inf
            assert not np.isfinite(session.run([CHECK], {**given, name: bad})[0]), name


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_joined_state_is_summed_as_one(optimizer):
    counts = [Counter(node.op_type for node in checked(optimizer, target)[0].graph) for target in ("plain", "cuda")]
    assert counts[1]["Add"] < counts[0]["Add"] - 15  # of 42 arrays; a Gemm updates a matrix of plain SGD


CUTS = {
    "both halves": ("a = Slice(v, zero, two, zero) b = Slice(v, two, four, zero)", True),
    "one half": ("a = Slice(v, zero, two, zero) b = Identity(a)", False),
    "the first half twice": ("a = Slice(v, zero, two, zero) b = Slice(v, zero, two, zero)", False),
    "with a gap": ("a = Slice(v, zero, two, zero) b = Slice(v, three, four, zero)", False),
    "a split": ("a, b = Split<num_outputs=2>(v)", True),
}


@pytest.mark.parametrize("cut", CUTS)
def test_what_is_not_state_is_not_summed(cut):
    """A vector is summed as a whole only if the state consists of all its parts."""
    text, is_seen = CUTS[cut]
    graph = ir.from_proto(
        model(
            f"g (float[4] x) => (float l, float[M] a, float[K] b) {{ v = Neg(x) l = ReduceMin<keepdims=0>(v) {text} }}",
            **{name: np.array([i], np.int64) for i, name in ((0, "zero"), (2, "two"), (3, "three"), (4, "four"))},
        )
    )
    infer(graph)
    for y, role in zip(graph.graph.outputs, (Role.LOSS, Role.NEXT, Role.NEXT), strict=True):
        set_role(y, role)
    add_check(graph, [], chained=True)
    x = np.array([1, 2, -np.inf, 4], np.float32)
    assert np.isfinite(opened(graph).run([CHECK], {"x": x})[0]) == (not is_seen)

"""Models that cannot train: one line that names the node and the reason, and nothing is changed."""

from __future__ import annotations

import re

import messages
import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import model

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.inspection.report import report

WEIGHT = np.ones((4, 3), np.float32)


def compiled(proto, pattern=None, **steps):
    before = proto.SerializeToString()
    try:
        return graphopt.compile(proto, parameters=passes.Parameters(pattern), loss=passes.MeanSquaredError(), **steps)
    finally:
        assert proto.SerializeToString() == before


@pytest.mark.parametrize("loss", [passes.CrossEntropy, passes.MeanSquaredError])
def test_an_output_of_unknown_rank_is_compared_with_no_target(loss):
    text = "g (float[N,4] x, int64[K] s) => (float[M] y) { m = MatMul(x, w)\n y = Reshape(m, s) }"
    undeclared = ir.from_proto(model(text, w=WEIGHT))
    undeclared.graph.outputs[0].shape = None
    with pytest.raises(GraphoptError, match=r"needs the rank of 'y', .* declare the output's shape"):
        graphopt.compile(undeclared, loss=loss(), optimizer=passes.SGD())


def test_a_cycle_among_onnx_ir_nodes_is_refused():
    cyclic = ir.from_proto(
        model("g (float[N,4] x) => (float[N,3] y) { a = Tanh(x)\n b = Tanh(a)\n y = MatMul(b, w) }", w=WEIGHT)
    )
    first, second, _ = cyclic.graph
    first.replace_input_with(0, second.outputs[0])
    with pytest.raises(GraphoptError, match="cycl"):
        graphopt.compile(cyclic, loss=passes.MeanSquaredError())


BODY = """g (float[N,2,3,3] x, bool c) => (float[N,2,3,3] y) {
    [choice] y = If (c) <
        then_branch = one () => (float[N,2,3,3] t) { [inner] t = %s },
        else_branch = two () => (float[N,2,3,3] e) { e = Mul(x, k) }>
}"""


@pytest.mark.parametrize(
    ("operator", "switch"),
    [("BatchNormalization(x, s, b, m, v)", "batch_normalization"), ("Dropout(x)", "dropout")],
)
def test_state_in_a_body_is_refused(operator, switch):
    vectors = {name: np.ones(2, np.float32) for name in "sbmv" if "Batch" in operator}
    proto = model(BODY % operator, k=np.ones((2, 1, 1)), **vectors)
    found = f"{operator.split('(')[0]} node 'inner' is in a body of If node 'choice'.*{switch}=False"
    with pytest.raises(GraphoptError, match=found):
        compiled(proto, training=passes.TrainingMode())
    compiled(proto, training=passes.TrainingMode(**{switch: False}))


def test_the_report_tells_what_would_help(tmp_path):
    proto = onnx.parser.parse_model(
        """<ir_version: 9, opset_import: ["" : 21, "my.domain" : 1]>
        g (float[N,4] x) => (float[N,4] y) <float[N,4] h> {
            m = Mul(x, u)
            [one] h = my.domain.Product(m, w)
            [two] r = Round(x)
            k = Mul(r, u)
            z = Add(h, k)
            f = Mul(x, dead)
            [three] d = Floor(f)
            y = Sub(z, d)
        }"""
    )
    for name in ("u", "w", "dead"):
        proto.graph.initializer.append(onnx.numpy_helper.from_array(np.ones(4, np.float32), name))
    pipeline = graphopt.standard(loss=passes.MeanSquaredError())
    lines = report(proto, pipeline).summary().splitlines()
    assert "  dead  float[4]  4  no gradient passes Floor node 'three'" in lines
    told = lines[lines.index("blocked    at gradient: operators without a gradient") + 2].split(maxsplit=2)
    assert told[:2] == ["my.domain::Product", "one"]
    assert re.split("  +", told[2]) == [
        "u, w",
        "freeze: parameters.freeze='[u,w]'; register a rule: passes.gradient('my.domain', 'Product')",
    ]


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("bad_models_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("bad_models_mistakes", call, globals())

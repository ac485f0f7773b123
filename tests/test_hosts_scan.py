"""Two layers in a Scan, and outputs of which one is computed from the other, reach every host."""

from __future__ import annotations

import json
import warnings
from pathlib import Path

import numpy as np
import pytest
from builders import model
from host_graphs import Batch
from test_hosts import Host

import graphopt
import passes
from graphopt.targets.portable import FORMS

pytestmark = pytest.mark.usefixtures("plain")
RNG = np.random.default_rng(0)
WEIGHTS = {name: RNG.standard_normal((4, 4)) / 2 for name in ("w1", "u1", "w2", "u2")}
TARGETS = sorted(FORMS)


def two_layers() -> tuple[object, Batch]:
    """Return a network of two recurrent layers of equal form in one Scan, and a batch."""
    layers = model(
        """g (float[5,4] x) => (float[1,3] y) {
            end1, end2 = Scan<num_scan_inputs = 1, body = b (float[4] h1, float[4] h2, float[4] t)
                => (float[4] n1, float[4] n2) {
                a1 = MatMul(t, w1) b1 = MatMul(h1, u1) c1 = Add(a1, b1) n1 = Tanh(c1)
                a2 = MatMul(n1, w2) b2 = MatMul(h2, u2) c2 = Add(a2, b2) n2 = Tanh(c2) }>(s1, s2, x)
            p = MatMul(end2, v)
            zero = Constant<value_ints = [0]>()
            y = Unsqueeze(p, zero)
        }""",
        **WEIGHTS,
        v=RNG.standard_normal((4, 3)),
        s1=np.zeros(4),
        s2=np.zeros(4),
    )
    return layers, {"x": RNG.standard_normal((5, 4)).astype(np.float32), "target": np.array([1])}


def two_outputs() -> tuple[object, Batch]:
    """Return a network with outputs of equal form, of which one is computed from the other, and a batch."""
    network = model(
        """g (float[4,4] x) => (float[4,3] y, float[4,4] h1, float[4,4] h2) {
            p = MatMul(x, w1) h1 = Tanh(p) q = MatMul(h1, w2) h2 = Tanh(q) y = MatMul(h2, v)
        }""",
        w1=WEIGHTS["w1"],
        w2=WEIGHTS["w2"],
        v=RNG.standard_normal((4, 3)),
    )
    return network, {"x": RNG.standard_normal((4, 4)).astype(np.float32), "target": np.array([0, 1, 2, 0])}


@pytest.mark.parametrize("network", [two_layers, two_outputs])
@pytest.mark.parametrize("target", [None, *TARGETS])
def test_what_is_computed_alike_and_in_turn_reaches_every_host(
    network: object, target: str | None, tmp_path: Path
) -> None:
    """Once: `Graph contains a cycle`, on `cuda` and `webgpu`, and from `export_hosts` for every target."""
    proto, batch = network()  # type: ignore[operator]
    names = [x for x in (*WEIGHTS, "v") if x in {t.name for t in proto.graph.initializer}]
    step = graphopt.compile(
        proto,
        parameters=passes.Parameters(names),
        loss=passes.CrossEntropy(output="y"),
        optimizer=passes.SGD(0.3),
    )
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        graphopt.export_hosts(step, tmp_path, target=target)
    assert json.loads((tmp_path / "host.json").read_text())["files"]["proof"] == "proof.safetensors"
    host, executor = Host(tmp_path), graphopt.Executor(step, target="plain", threads=1)
    for _ in range(3):
        expected = executor.step(batch)["loss"]
        np.testing.assert_allclose(host.run("train", batch)["loss"], expected, rtol=1e-5)

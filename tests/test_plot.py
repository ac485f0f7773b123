"""Pictures of graphs: what they show, as text and drawn."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET

import numpy as np
import pytest
from builders import linear, mlp, model

import graphopt
import passes
from graphopt.graph.listing import size
from graphopt.inspection import plot as plotting
from graphopt.inspection.drawing import BoxKind, kinds_of_nodes
from graphopt.inspection.report import report


def small():
    return model(
        "g (float[N,2] x) => (float[N] y) { a = Mul(x, two)\n y = ReduceSum <keepdims=0> (a, axes) }",
        two=np.array(2.0),
        axes=np.array([1]),
    )


def branches():
    return model(
        """g (bool c, float[2] x) => (float[2] y) {
            h = Mul(x, w)
            y = If(c) <
                then_branch = t () => (float[2] a) { a = Mul(h, h) },
                else_branch = e () => (float[2] b) { b = Neg(h) }
            >
        }""",
        w=np.array([1.0, 2.0]),
    )


def training(optimizer=None, **steps):
    return graphopt.compile(linear(), loss=passes.MeanSquaredError(), optimizer=optimizer or passes.SGD(), **steps)


def box(text: str, title: str) -> str:
    """Return the line of the one box with a title, in Graphviz's language."""
    (line,) = [line for line in text.splitlines() if f"<b>{title}</b>" in line and "fillcolor" in line]
    return line


def test_mermaid():
    assert (
        graphopt.mermaid(small(), titles=['a "small" one'])
        == """\
flowchart TB
subgraph legend["legend"]
direction LR
legend_DATA("<b>data</b>"):::DATA
legend_OUTPUT("<b>output</b>"):::OUTPUT
legend_MODEL_NODE["<b>model</b>"]:::MODEL_NODE
end
style legend fill:none,stroke:#adb5bd
subgraph g0["a #34;small#34; one"]
direction TB
g0_0("<b>x</b><br/>float[N,2]"):::DATA
g0_1["<b>Mul</b><br/>B=2"]:::MODEL_NODE
g0_2["<b>ReduceSum</b><br/>axes=[1]<br/>keepdims=0"]:::MODEL_NODE
g0_3("<b>y</b><br/>float[N]"):::OUTPUT
end
style g0 fill:none,stroke:#adb5bd
g0_0 --> g0_1
g0_1 --> g0_2
g0_2 --> g0_3
classDef DATA fill:#d0ebff,stroke:#1971c2,color:#000
classDef OUTPUT fill:#99e9f2,stroke:#0c8599,color:#000
classDef MODEL_NODE fill:#ffffff,stroke:#495057,color:#000
"""
    )


def test_dot():
    text = graphopt.dot(small(), names=True, types=True)
    head, _, rest = text.partition("subgraph")
    assert head.startswith("digraph {\ngraph [")
    assert (
        rest
        == """\
 cluster_g0 {
label=""; peripheries=0
g0_0 [label=<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td><b>x</b></td></tr>\
<tr><td><font point-size="10">float[N,2]</font></td></tr></table>>, style="filled,rounded", \
fillcolor="#d0ebff", color="#1971c2"]
g0_1 [label=<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td><b>Mul</b></td></tr>\
<tr><td><font point-size="10">B=2</font></td></tr></table>>, style="filled", \
fillcolor="#ffffff", color="#495057"]
g0_2 [label=<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td><b>ReduceSum</b></td></tr>\
<tr><td><font point-size="10">axes=[1]<br/>keepdims=0</font></td></tr></table>>, style="filled", \
fillcolor="#ffffff", color="#495057"]
g0_3 [label=<<table border="0" cellborder="0" cellspacing="0" cellpadding="1"><tr><td><b>y</b></td></tr>\
<tr><td><font point-size="10">float[N]</font></td></tr></table>>, style="filled,rounded", \
fillcolor="#99e9f2", color="#0c8599"]
}
g0_0 -> g0_1 [style=solid]
g0_1 -> g0_2 [style=solid, label="a"]
g0_2 -> g0_3 [style=solid]
}
"""
    )


def test_values_have_the_colours_of_their_roles():
    text = graphopt.dot(training(passes.SGD(momentum=0.9)))
    for title, kind in {
        "x": BoxKind.DATA,
        "target": BoxKind.TARGET,
        "w": BoxKind.PARAMETER,
        "w.next": BoxKind.PARAMETER,
        "w.momentum": BoxKind.OTHER_STATE,
        "w.momentum.next": BoxKind.OTHER_STATE,
        "step": BoxKind.OTHER_STATE,
        "learning_rate": BoxKind.HYPERPARAMETER,
        "loss": BoxKind.LOSS,
        "y": BoxKind.OUTPUT,
    }.items():
        assert f'fillcolor="{kind.fill}"' in box(text, title), title
        assert f">{kind.title}</font>" in text  # the legend
    assert f">{BoxKind.INITIALIZER.name}</font>" not in text
    assert f'fillcolor="{BoxKind.INITIALIZER.fill}"' in box(graphopt.dot(linear()), "w")


@pytest.mark.parametrize(
    "steps",
    [
        {"optimizer": passes.SGD(momentum=0.9)},
        {"optimizer": passes.AdamW(), "regularizer": passes.L2()},
        {"optimizer": passes.Lion(), "schedule": passes.Cosine(steps=10)},
        {"optimizer": passes.AdamW(), "clip": passes.ClipGlobalNorm()},
    ],
    ids=repr,
)
def test_nodes_have_the_colours_of_what_they_compute(steps):
    """Each kind has as many nodes as the steps that it stands for add."""
    counts = []
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), **steps)
    loss = "regularizer" if "regularizer" in steps else "loss"
    for until in ("sort", loss, "clip" if "clip" in steps else "gradient", "simplify"):
        made = pipeline.until(until)(linear())
        passes.Simplify()(made)
        counts.append(size(made))
    kinds = list(kinds_of_nodes(training(**steps, fuse=None).graph).values())
    found = [
        kinds.count(kind)
        for kind in (BoxKind.MODEL_NODE, BoxKind.LOSS_NODE, BoxKind.GRADIENT_NODE, BoxKind.UPDATE_NODE)
    ]
    assert found == [counts[0], *np.diff(counts)]


def test_large_initializers_are_abbreviated():
    weights = np.arange(2000.0).reshape(100, 20) / 7
    text = graphopt.dot(model("g (float[N,100] x) => (float[N,20] y) { y = MatMul(x, w) }", w=weights))
    assert "float[100,20]<br/>[0,0.143,0.286,...]" in box(text, "w")
    assert len(text) < 3000
    assert "float[2]<br/>[1,2]" in box(graphopt.dot(branches()), "w")


def test_long_and_odd_names_stay_in_their_boxes():
    name = "/model/layers.0/" + "block/" * 20 + 'end<&>\t`"'
    proto = model("g (float[2] x) => (float[2] y) { y = Relu(x) }")
    proto.graph.input[0].name = proto.graph.node[0].input[0] = name
    assert box(graphopt.dot(proto), "/model/layers.0/b..k/block/end&lt;&amp;&gt;?`&quot;")
    assert '"<b>/model/layers.0/b..k/block/end#60;#38;#62;?#96;#34;</b><br/>float[2]"' in graphopt.mermaid(proto)
    ET.fromstring(graphopt.plot(proto))


def test_bodies_are_frames_that_lead_to_their_node():
    text = graphopt.dot(branches())
    assert "<b>then_branch</b>" in text
    assert "<b>else_branch</b>" in text
    owner, inner = box(text, "If").split()[0], box(text, "b").split()[0]
    assert f"{inner} -> {owner} [style=dashed]" in text
    assert f"{box(text, 'Neg').split()[0]} -> {inner} [style=solid]" in text
    outer = next(line for line in text.splitlines() if line.startswith("g0_3 "))
    assert "<b>Mul</b>" in outer
    assert f"g0_3 -> {box(text, 'Neg').split()[0]} " in text  # what a body reads of the graph around it
    assert 'subgraph g0_4_else_branch["else_branch"]' in graphopt.mermaid(branches())


def test_svg(tmp_path):
    path = tmp_path / "graph.svg"
    assert graphopt.plot(linear(), training(), path=path, titles=["model", "training"]) is None
    texts = [element.text for element in ET.parse(path).iter("{http://www.w3.org/2000/svg}text")]
    assert {"model", "training", "learning_rate", "w.next", "MatMul", "Gemm"} <= {*texts}
    assert texts.count("MatMul") == 2
    svg = graphopt.plot(linear())
    assert ET.fromstring(svg).tag.endswith("svg")
    assert svg._repr_svg_() == svg


@pytest.mark.parametrize(("ending", "start"), [("png", b"\x89PNG"), ("PNG", b"\x89PNG"), ("pdf", b"%PDF")])
def test_other_pictures(tmp_path, ending, start):
    path = tmp_path / f"graph.{ending}"
    graphopt.plot(linear(), path=str(path))
    assert path.read_bytes().startswith(start)


@pytest.mark.parametrize("ending", ["dot", "gv", "mmd", "mermaid"])
def test_text_needs_no_library(tmp_path, monkeypatch, ending):
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    source = tmp_path / "model.onnx"
    graphopt.save(linear(), source)
    path = tmp_path / f"graph.{ending}"
    graphopt.plot(source, path=path)
    assert path.read_text() == (graphopt.dot if ending in ("dot", "gv") else graphopt.mermaid)(linear())


def test_large_graphs_are_laid_out_in_haste(monkeypatch):
    assert "nslimit" not in graphopt.dot(mlp((4,) * 70))
    assert "nslimit=2;" in graphopt.dot(mlp((4,) * 80))
    assert "splines=line" in graphopt.dot(mlp((4,) * 210))
    monkeypatch.setattr(plotting, "MOST_BOXES", 5)
    with pytest.raises(graphopt.GraphoptError, match=r"at most 5 boxes, found 6: draw a part"):
        graphopt.plot(linear())


def test_errors_are_one_line(tmp_path, monkeypatch):
    with pytest.raises(graphopt.GraphoptError, match=r"graph\.jpg: expected \.svg, .*\.mermaid, found '\.jpg'$"):
        graphopt.plot(linear(), path=tmp_path / "graph.jpg")
    with pytest.raises(graphopt.GraphoptError, match=r"graph: expected .*, found 'no ending'$"):
        graphopt.plot(linear(), path=tmp_path / "graph")
    with pytest.raises(graphopt.GraphoptError, match=r"titles: expected 1, one for each graph, found 2$"):
        graphopt.dot(linear(), titles=["a", "b"])
    with pytest.raises(graphopt.GraphoptError, match="no such file"):
        graphopt.plot(tmp_path / "missing.onnx")
    with pytest.raises(graphopt.GraphoptError, match="expected a folder to write to"):
        graphopt.plot(linear(), path=tmp_path / "missing" / "graph.svg")
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    with pytest.raises(graphopt.GraphoptError, match=r"pygraphviz, found none: pip install pygraphviz, or write \.dot"):
        graphopt.plot(linear(), path=tmp_path / "graph.svg")
    assert not list(tmp_path.iterdir())


def test_a_report_draws_what_is_small(tmp_path, monkeypatch):
    pipeline = graphopt.standard(loss=passes.MeanSquaredError(), optimizer=passes.SGD())
    found = report(linear(), pipeline)
    assert found.picture(tmp_path / "graph.svg")
    assert "before the first pass" in (tmp_path / "graph.svg").read_text()
    assert not report(mlp((4,) * 40), pipeline).picture(tmp_path / "large.svg")
    monkeypatch.setitem(sys.modules, "pygraphviz", None)
    assert not found.picture(tmp_path / "undrawn.svg")
    assert [path.name for path in tmp_path.iterdir()] == ["graph.svg"]

"""Tools of `graphopt.graph` by themselves: exchanged values, kept interfaces, and where weights are."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from builders import mlp, model

import graphopt
import passes
from graphopt.errors import GraphoptError
from graphopt.graph import storage
from graphopt.graph.classified import LABELS
from graphopt.graph.emitter import Emitter
from graphopt.graph.metadata import ORIGINAL_NAME
from graphopt.graph.parts import ModelParts
from graphopt.graph.rewriting import Pass, interface_kept
from graphopt.graph.roles import Role
from graphopt.graph.values import name_of, swap


def test_a_value_that_replaces_another_has_its_name_metadata_and_readers() -> None:
    loaded = graphopt.load(model("g (float[4] x) => (float[4] y, float[4] z) { y = Abs(x)\n z = Neg(y) }"))
    graph = loaded.graph
    old = graph.outputs[0]
    ORIGINAL_NAME.write(old, "first")
    with Emitter(loaded) as op:
        new = swap(old, op.Relu(graph.inputs[0]))
    assert list(map(name_of, graph.outputs)) == ["y", "z"]
    assert graph.outputs[0] is new and ORIGINAL_NAME.read(new) == "first"
    assert [node.op_type for node in new.consumers()] == ["Neg"] and not old.uses()


def test_a_node_that_is_emitted_again_has_the_domain_the_attributes_and_the_outputs() -> None:
    a, b = (ir.val(name, ir.DataType.FLOAT, [4]) for name in "ab")
    nodes = [
        ir.node("Scaler", [a], {"scale": [3.0]}, domain="ai.onnx.ml"),
        ir.node("TopK", [b, ir.val("k", ir.DataType.INT64, [1])], {"largest": 0}, num_outputs=2),
    ]
    graph = ir.Graph([], [], nodes=nodes, opset_imports={"": 21, "ai.onnx.ml": 3})
    with Emitter(ir.Model(graph, ir_version=10)) as op:
        for node in nodes:
            made = op.emit_again(node, node.inputs)
            again = made[0].producer()
            assert (again.op_identifier(), again.attributes) == (node.op_identifier(), node.attributes)
            assert (list(again.inputs), list(again.outputs)) == (
                list(node.inputs),
                list(made),
            ) and again is not node


def test_an_interface_is_kept_after_an_error_too() -> None:
    loaded = graphopt.load(model("g (float[4] x) => (float[4] y) { y = Abs(x) }"))

    def rename_and_fail() -> None:
        with interface_kept(loaded):
            loaded.graph.inputs[0].name, loaded.graph.outputs[0].name = "a", "b"
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        rename_and_fail()
    assert [name_of(x) for x in (*loaded.graph.inputs, *loaded.graph.outputs)] == ["x", "y"]


def test_a_pass_names_what_it_needs() -> None:
    class Reporting(Pass):
        def rewrite(self, model: ir.Model) -> None:
            self.required(model, Role.GRADIENT, "run Gradient first")

    with pytest.raises(GraphoptError, match="Reporting needs gradients, found none: run Gradient first"):
        Reporting()(graphopt.load(mlp((4, 3))))


def test_bytes_without_weights_refer_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = graphopt.load(mlp((64, 64, 3)))
    content, weights = storage.skeleton(loaded)
    assert list(weights) == ["fc0.weight"]
    tensors = {x.name: x for x in onnx.load_model_from_string(content).graph.initializer}
    assert [bool(x.external_data) for x in tensors.values()] == [name in weights for name in tensors]
    assert storage.message(loaded) == (storage.whole(loaded), {})
    assert storage.model_digest(loaded) == hashlib.sha256(storage.whole(loaded)).hexdigest()
    monkeypatch.setattr(storage, "LIMIT", 1000)
    assert storage.message(loaded)[0] == content


WRITERS = {
    **{write.__name__: write for write in (storage.skeleton, storage.identity_of, storage.without_weights)},
    "parts": ModelParts.of,
    "whole": storage.whole,
    "message": lambda loaded: storage.message_without_weights(loaded, lambda _: True),
    "save": lambda loaded: storage.save(loaded, "saved.onnx"),
}


@pytest.mark.parametrize("write", WRITERS)
@pytest.mark.parametrize("limit", [storage.LIMIT, 1000])
def test_a_model_stays_as_it_is_while_it_is_written(
    write: str, limit: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Another thread may read its weights and notes, or write it, too."""
    loaded: Any = graphopt.load(mlp((64, 64, 3)))
    own = ir.node("LayerNormalization", loaded.graph.outputs, {"epsilon": 1e-5}, domain="com.microsoft")
    loaded.graph.append(own)
    LABELS.write(loaded, '["cat", "dog"]')
    weight, to_proto = loaded.graph.initializers["fc0.weight"], ir.to_proto
    before, notes = weight.const_value, dict(loaded.metadata_props)

    def written(model: ir.Model) -> onnx.ModelProto:
        assert weight.const_value is before
        assert loaded.metadata_props == notes
        assert own.domain == "com.microsoft"
        return to_proto(model)

    monkeypatch.setattr(ir, "to_proto", written)
    monkeypatch.setattr(storage, "LIMIT", limit)
    monkeypatch.chdir(tmp_path)
    WRITERS[write](loaded)


def test_the_documentation_of_a_large_weight_changes_no_identity() -> None:
    loaded: Any = graphopt.load(mlp((64, 64, 3)))
    before, _ = storage.identity_of(loaded)
    tensor = loaded.graph.initializers["fc0.weight"].const_value
    tensor.doc_string = "from a paper"
    tensor.metadata_props["origin"] = "a paper"
    assert storage.identity_of(loaded)[0] == before


@pytest.mark.parametrize("limit", [storage.LIMIT, 1000])
def test_a_digest_tells_weights_apart(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "LIMIT", limit)
    loaded: Any = graphopt.load(mlp((64, 64, 3)))
    before = storage.model_digest(loaded)
    assert storage.model_digest(loaded.clone()) == before
    weight = loaded.graph.initializers["fc0.weight"]
    weight.const_value = ir.tensor(weight.const_value.numpy() + np.float32(1), name=weight.name)
    assert storage.model_digest(loaded) != before


def test_a_second_lowering_of_an_operator_is_refused() -> None:
    from passes.lowering.registry import lowers

    with pytest.raises(GraphoptError, match=r"com\.microsoft::QuickGelu: expected one rule, found a second"):
        lowers("QuickGelu", domain="com.microsoft")(lambda op, x: x)


def test_nodes_lead_to_those_that_they_come_before() -> None:
    from graphopt.targets.native.reach import Reach

    step = graphopt.compile(mlp((4, 3)), loss=passes.MeanSquaredError(), optimizer=passes.AdamW(0.1))
    nodes = list(step.graph)
    reach = Reach(step.graph, nodes)
    before = {node: set[ir.Node]() for node in nodes}
    for node in nodes:
        for x in node.inputs:
            if x is not None and (producer := x.producer()) is not None:
                before[node] |= {producer, *before[producer]}
    for node in nodes:
        assert {other for other in nodes if reach.leads(node, [other])} == {o for o in nodes if node in before[o]}

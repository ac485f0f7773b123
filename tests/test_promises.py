"""Passes declare what they need and leave, tell whether they changed a model, and break no promise unnoticed."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable
from typing import Any

import messages
import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
import pytest

import graphopt
import passes
from graphopt import models
from graphopt.graph.emitter import Emitter
from graphopt.graph.rewriting import Pass
from graphopt.targets.native import lowering, toolchain
from graphopt.targets.onnxruntime.fuse import FUSIONS
from graphopt.testing import strict
from graphopt.training.estimator import Structure

MSE, SGD = passes.MeanSquaredError(), passes.SGD(0.1)
SCALED = passes.Gradient(loss_scale=8.0)
DIFFERENTIATED = [passes.Normalize(), passes.Parameters(), MSE, passes.Gradient()]
TRAINING = [*DIFFERENTIATED, SGD]


def run(steps: list[Any]) -> ir.Model:
    return graphopt.Pipeline(steps=steps)(models.mlp((4,), 2, hidden=[3]))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("promises_mistakes"))
def test_a_wrong_order_is_one_line(call: str) -> None:
    messages.refused("promises_mistakes", call, globals())


def _negate(model: ir.Model) -> None:
    with Emitter(model) as op:
        model.graph.outputs[0] = op.Neg(model.graph.outputs[0], _outputs=["other"])


def own(rewriting: Callable[[ir.Model], None], **methods: Any) -> Any:
    """Return a pass of a user with a rewriting."""
    members = {"rewrite": lambda self, model: rewriting(model), **methods}
    return dataclasses.dataclass(frozen=True)(type("Own", (Pass,), members))()


def nothing(model: ir.Model) -> None: ...


def refuse(self: Any, model: ir.Model) -> None:
    raise graphopt.GraphoptError(f"{type(self).__name__} needs a shrubbery, found none: plant one")


@pytest.mark.parametrize("method", ["requires", "ensures"])
@pytest.mark.parametrize("is_strict", [True, False])
def test_a_declaration_is_checked_in_every_call(method: str, is_strict: bool) -> None:
    ran: list[ir.Model] = []
    item = own(ran.append, **{method: refuse})
    for call in (item, item.call, item.apply, graphopt.Pipeline(own=item)):
        ran.clear()
        with (
            strict(is_strict),
            pytest.raises(graphopt.GraphoptError, match=r"^Own needs a shrubbery, found none"),
        ):
            call(models.linear((2,), 1))
        assert bool(ran) == (method == "ensures")


def _weights(change: Callable[[np.ndarray], np.ndarray]) -> Callable[[ir.Model], None]:
    def rewrite(model: ir.Model) -> None:
        for x in model.graph.initializers.values():
            assert x.const_value is not None
            x.const_value = ir.tensor(change(x.const_value.numpy()), name=x.name)

    return rewrite


def _note(model: ir.Model) -> None:
    model.graph.outputs[0].metadata_props["noted"] = "yes"


def _reorder(model: ir.Model) -> None:
    weights = list(model.graph.initializers.values())
    model.graph.initializers.clear()
    for x in reversed(weights):
        model.graph.register_initializer(x)


CHANGES: dict[str, tuple[Callable[[ir.Model], None], bool]] = {
    "nothing": (nothing, False),
    "a node": (_negate, True),
    "equal weights": (_weights(np.copy), False),
    "other weights": (_weights(lambda x: x + 1), True),
    "a note": (_note, True),
    "an attribute": (lambda m: m.graph[0].attributes.add(ir.AttrFloat32("alpha", 2.0)), True),
    "a name": (lambda m: setattr(m.graph[0], "name", "another"), True),
    "a shape": (lambda m: setattr(m.graph.inputs[0], "shape", ir.Shape([3, None])), True),
    "the order of weights": (_reorder, True),
    "an opset": (lambda m: m.graph.opset_imports.update({"": 22}), True),
}


@pytest.mark.whole
@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.parametrize("size", [4, 40])  # weights in the message, and beside it
def test_a_pass_tells_whether_it_changed_the_model(change: str, size: int) -> None:
    rewriting, changes = CHANGES[change]
    model = graphopt.load(models.linear((size,), size))
    before = ir.to_proto(model).SerializeToString(deterministic=True)
    result = own(rewriting)(model)
    assert result.model is model and result.modified is changes
    assert changes == (ir.to_proto(model).SerializeToString(deterministic=True) != before)


def test_passes_of_the_library_stop_a_manager_of_onnx_ir_when_nothing_changes() -> None:
    """onnx_ir's manager runs passes until none has changed the model."""
    ran: list[ir.Model] = []
    steps = [passes.Normalize(), passes.SortInitializers(), passes.Simplify(), own(ran.append)]
    result = ir.passes.PassManager(steps, steps=20)(graphopt.load(models.mlp((4,), 2)))
    assert result.modified and 2 <= len(ran) < 20
    assert not passes.Simplify()(result).modified


def _swapped_nodes(model: ir.Model) -> None:
    first = model.graph[0]
    model.graph.remove(first)
    model.graph.append(first)


def _equal_names(model: ir.Model) -> None:
    for node in model.graph:
        node.name = "same"


def _equal_values(model: ir.Model) -> None:
    model.graph[0].outputs[0].name = model.graph[1].outputs[0].name


def _unsorted_body(model: ir.Model) -> None:
    (y,) = model.graph.outputs
    x, late = ir.Value(name="inside"), ir.Value(name="late")
    nodes = [
        ir.Node("", "Neg", [late], outputs=[x], name="one"),
        ir.Node("", "Abs", [y], outputs=[late], name="two"),
    ]
    body = ir.Graph([], [x], nodes=nodes, name="body")
    for value in (x, late):
        value.type, value.shape = y.type, y.shape
    condition = ir.node("Constant", [], {"value": ir.tensor(np.array(True))}, name="c")
    condition.outputs[0].type = ir.TensorType(ir.DataType.BOOL)
    other = body.clone(allow_outer_scope_values=True)
    for i, node in enumerate(other):
        node.outputs[0].name = f"other {i}"
    branches = {"then_branch": body, "else_branch": other}
    model.graph.extend([condition, ir.node("If", condition.outputs, branches, name="if")])


def _declared(dtype: ir.DataType | None, shape: list[Any] | None) -> Callable[[ir.Model], None]:
    def rewrite(model: ir.Model) -> None:
        y = model.graph[0].outputs[0]
        y.dtype, y.shape = dtype or y.dtype, y.shape if shape is None else ir.Shape(shape)

    return rewrite


def _mixed(model: ir.Model) -> None:
    (y,) = model.graph.outputs
    double = ir.node("Constant", [], {"value": ir.tensor(np.float64(1))}, name="c")
    sum_ = ir.node("Add", [y, double.outputs[0]], name="sum")
    double.outputs[0].type, sum_.outputs[0].type = ir.TensorType(ir.DataType.DOUBLE), y.type
    model.graph.extend([double, sum_])


class Claims(ir.passes.InPlacePass):
    """Claim to have changed a model, or not."""

    def __init__(self, claim: bool, rewriting: Callable[[ir.Model], None] = nothing) -> None:
        self.claim, self.rewriting = claim, rewriting

    def call(self, model: ir.Model) -> ir.passes.PassResult:
        self.rewriting(model)
        return ir.passes.PassResult(model, self.claim)


def broken(step: Any) -> None:
    """Run a step that keeps no promise: strictly, it is refused."""
    pipeline = graphopt.Pipeline(normalize=passes.Normalize(), own=step)
    source = models.mlp((4,), 2, hidden=[3])
    with strict(False):
        pipeline(source)
    with strict():
        pipeline(source)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("promises_faults"))
def test_a_broken_promise_is_one_line(call: str) -> None:
    messages.refused("promises_faults", call, globals())


def test_right_passes_of_others_run_strictly() -> None:
    steps = [common.RemoveUnusedNodesPass(), common.TopologicalSortPass(), Claims(True, _note), nothing]
    with strict():
        graphopt.Pipeline(normalize=passes.Normalize(), own=steps)(models.mlp((4,), 2))


def test_fusions_find_sorted_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    last = list(FUSIONS)[-1]

    def unsorted(model: ir.Model) -> bool:
        _swapped_nodes(model)
        return False  # so that nobody sorts

    monkeypatch.setitem(FUSIONS, list(FUSIONS)[-2], unsorted)
    step = run(TRAINING)
    with strict(False):
        passes.Fuse()(step.clone())
    with (
        strict(),
        pytest.raises(graphopt.GraphoptError, match=rf"^what runs before {last}: expected sorted nodes"),
    ):
        passes.Fuse()(step)


FACTOR = {"of a loss": 1.0}  # what a loss reads beside its fields


@dataclasses.dataclass(frozen=True)
class Scaled(passes.Loss):
    """Compute what a variable decides, which no key contains."""

    def compare(self, op: Any, prediction: ir.Value, target: ir.Value) -> ir.Value:
        return FACTOR["of a loss"] * op.Pow(prediction - target, 2.0)


def _stale_estimators(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    monkeypatch.setattr(Structure, "is_complete", True)
    content = ir.to_proto(models.linear((2,), 1)).SerializeToString()
    structure = Structure(content, "digest", (("loss", Scaled()), ("optimizer", SGD)), "cpu", None)
    structure.step()
    monkeypatch.setitem(FACTOR, "of a loss", 10.0)
    return structure.step


def _stale_target(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    def scale(model: ir.Model) -> None:
        model.graph.outputs[0].metadata_props["factor"] = str(FACTOR["of a loss"])

    target = graphopt.Target("mine", graphopt.Pipeline(scale=scale), version="1")
    step = run(TRAINING)
    target.lower(step)
    monkeypatch.setitem(FACTOR, "of a loss", 10.0)
    return lambda: target.lower(step)


def _stale_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    step = graphopt.compile(models.mlp((4,), 2, hidden=[64]), loss=MSE, optimizer=SGD)
    assert lowering.lower_to_kernels(step, threads=1) is not None
    place = lowering.place_kernels
    monkeypatch.setattr(lowering, "place_kernels", lambda model, without=(): place(model, ["kernels"]))
    return lambda: lowering.lower_to_kernels(step, threads=1)


def _stale_kept_kernels(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Any]:
    step = graphopt.compile(models.mlp((4,), 2, hidden=[64]), loss=MSE, optimizer=SGD)
    assert lowering.lower_to_kernels(step, threads=1, precision="highest") is not None
    place = lowering.place_kernels
    monkeypatch.setattr(lowering, "place_kernels", lambda model, without=(): place(model, ["kernels"]))
    return lambda: lowering.kept_kernels(step, 1, "highest")


MEMORIES = {
    "the training graph that estimators share": _stale_estimators,
    "the graph in the cache for mine": _stale_target,
    "the graph with kernels in the cache": _stale_kernels,
    "the graph with kernels in the cache,": _stale_kept_kernels,
}


@pytest.mark.whole
@pytest.mark.parametrize("memory", MEMORIES)
def test_a_stale_memory_is_one_line(memory: str, parts: None, monkeypatch: pytest.MonkeyPatch) -> None:
    if "kernels" in memory and toolchain.compiler() is None:
        pytest.skip("needs a C compiler")
    again = MEMORIES[memory](monkeypatch)
    with strict(False):
        again()
    with strict(), pytest.raises(graphopt.GraphoptError) as error:
        again()
    assert str(error.value).startswith(f"{memory.rstrip(',')}: expected the graph that is made anew, found another one")


def test_a_fresh_memory_is_silent(parts: None) -> None:
    step = graphopt.compile(models.mlp((4,), 2, hidden=[64]), loss=MSE, optimizer=passes.AdamW(), average=passes.EMA())
    with strict():
        for _ in range(2):
            for target in ("onnxruntime", "portable", "webgpu"):
                graphopt.lower(step, target)
            if toolchain.compiler() is not None:
                lowering.lower_to_kernels(step, threads=1)


def test_blocks_nest_and_count_for_all_threads() -> None:
    pipeline = graphopt.Pipeline(own=_equal_names)
    source = models.mlp((4,), 2)
    found: list[Exception] = []

    def other() -> None:
        try:
            pipeline(source)
        except graphopt.GraphoptError as error:
            found.append(error)

    with strict():
        with strict(False):
            pipeline(source)
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()
    assert len(found) == 1

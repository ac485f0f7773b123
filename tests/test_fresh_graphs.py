"""Each fit trains the graph that its options stand for now: the file, the function and the rule as they are."""

from __future__ import annotations

import dataclasses
import importlib
import pickle
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from sklearn.base import clone

import graphopt
import passes
from graphopt import models
from graphopt.graph.node_inference import infer_outputs
from graphopt.graph.operators import defaults, schema_of
from graphopt.training.estimator import Estimator, Structure
from passes.gradients import registry

RNG = np.random.default_rng(0)
X = RNG.standard_normal((64, 4)).astype(np.float32)
Y = np.sin(X.sum(1))
Given = Mapping[str, Any]
OWN = {"factor": 1.0}  # what functions of this file read beside their arguments


def own(op: Any, prediction: Any, target: Any) -> Any:
    return OWN["factor"] * op.Pow(prediction - target, 2.0)


def _above(op: Any, y: Any) -> Any:
    return op.Cast(op.Greater(y, 0.0), to=y.dtype)


def _ten_times(loss: passes.Loss, op: Any, prediction: Any, target: Any) -> Any:
    return 10.0 * op.Pow(prediction - target, 2.0)


@pytest.fixture(autouse=True)
def _rules() -> Iterator[None]:
    """Put the library's rules back in their place."""
    tables = [
        *(registry.RULES, registry.REPLACED, registry.NO_GRADIENT),
        *(registry.UNIFORM, registry.WITH_LOCAL_DERIVATIVES, registry.SURROGATES),
    ]
    before = [table.copy() for table in tables]
    registry.REPLACED.clear()
    yield
    for table, content in zip(tables, before, strict=True):
        table.clear()
        table.update(content)  # type: ignore[arg-type]


@dataclasses.dataclass(frozen=True)
class Own(passes.Loss):
    """Compute what a variable of this file decides."""

    def compare(self, op: Any, prediction: Any, target: Any) -> Any:
        return own(op, prediction, target)


class Case:
    """Make the options of an estimator, and change what they stand for without changing them."""

    needs_model = False

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.folder, self.monkeypatch = folder, monkeypatch

    def options(self) -> dict[str, Any]:
        return {}

    def change(self) -> None: ...


class Global(Case):
    def options(self) -> dict[str, Any]:
        return {"loss": passes.CustomLoss(own)}

    def change(self) -> None:
        self.monkeypatch.setitem(OWN, "factor", 10.0)


class LossOfOnesOwn(Global):
    def options(self) -> dict[str, Any]:
        return {"loss": Own()}


class Patched(Case):
    """Replace a method of a class of the library."""

    def options(self) -> dict[str, Any]:
        return {"loss": passes.MeanSquaredError()}

    def change(self) -> None:
        self.monkeypatch.setattr(passes.MeanSquaredError, "compare", _ten_times)


class Reloaded(Case):
    """Name a function of a file that is edited and loaded again."""

    name = "graphopt_losses_of_a_test"

    def _write(self, factor: float) -> None:
        body = f"def loss(op, prediction, target):\n    return {factor} * op.Pow(prediction - target, 2.0)\n"
        (self.folder / f"{self.name}.py").write_text(body)
        importlib.invalidate_caches()

    def options(self) -> dict[str, Any]:
        self.monkeypatch.syspath_prepend(self.folder)
        self.monkeypatch.setattr(sys, "dont_write_bytecode", True)
        self.monkeypatch.delitem(sys.modules, self.name, raising=False)
        self._write(1.0)
        return {"loss": passes.CustomLoss(f"{self.name}:loss")}

    def change(self) -> None:
        self._write(10.0)
        importlib.reload(sys.modules[self.name])


class Rule(Case):
    """Replace the rule of an operator, and then what the new rule reads."""

    def options(self) -> dict[str, Any]:
        return {}

    def change(self) -> None:
        passes.gradient("", "Relu", surrogate=True)(lambda op, dy, x, *, y: [10.0 * dy * _above(op, y)])


class RuleThatReads(Rule):
    def options(self) -> dict[str, Any]:
        super().options()
        passes.gradient("", "Relu", surrogate=True)(lambda op, dy, x, *, y: [OWN["factor"] * dy * _above(op, y)])
        return {}

    def change(self) -> None:
        self.monkeypatch.setitem(OWN, "factor", 10.0)


class Exported(Case):
    """Export another model into the same file."""

    needs_model = True

    def _write(self, hidden: list[int]) -> Path:
        path = self.folder / "model.onnx"
        graphopt.save(models.mlp((4,), 1, hidden=hidden), path)
        return path

    def options(self) -> dict[str, Any]:
        return {"model": str(self._write([8]))}

    def change(self) -> None:
        self._write([32, 32])


class OtherWeights(Case):
    """Change the weights in a message."""

    needs_model = True

    def options(self) -> dict[str, Any]:
        self.proto = ir.to_proto(models.mlp((4,), 1, hidden=[8]))
        return {"model": self.proto}

    def change(self) -> None:
        for tensor in self.proto.graph.initializer:
            array = np.float32(3) * onnx.numpy_helper.to_array(tensor)
            tensor.CopyFrom(onnx.numpy_helper.from_array(array, tensor.name))


class OtherWeightsInMemory(OtherWeights):
    """Change the weights of a model of onnx_ir."""

    def options(self) -> dict[str, Any]:
        self.model = models.mlp((4,), 1, hidden=[8])
        return {"model": self.model}

    def change(self) -> None:
        for x in self.model.graph.initializers.values():
            assert x.const_value is not None
            x.const_value = ir.tensor(np.float32(3) * x.const_value.numpy(), name=x.name)


class BesideTheFile(Exported):
    """Change the weights in a file beside the model's."""

    def options(self) -> dict[str, Any]:
        path = self.folder / "model.onnx"
        model = ir.to_proto(models.mlp((4,), 1, hidden=[8]))
        onnx.save(model, path, save_as_external_data=True, location="weights", size_threshold=0)
        return {"model": str(path)}

    def change(self) -> None:
        weights = self.folder / "weights"
        weights.write_bytes((np.float32(3) * np.frombuffer(weights.read_bytes(), np.float32)).tobytes())


CASES = (Global, LossOfOnesOwn, Patched, Reloaded, Rule, RuleThatReads)
WITH_MODEL = (Exported, OtherWeights, OtherWeightsInMemory, BesideTheFile)


def trainer(options: Given, **more: Any) -> Any:
    given = {"model": models.mlp((4,), 1, hidden=[8]), **options}
    return graphopt.Trainer(given.pop("model"), optimizer=passes.SGD(1e-3), max_iter=2, **given, **more)


def regressor(options: Given, **more: Any) -> Any:
    given = {"model": None, "hidden_layer_sizes": (8,), **options}
    fixed = {"solver": passes.SGD(1e-3), "random_state": 0, "max_iter": 2, "tol": 0.0, "batch_size": 16}
    return graphopt.OnnxRegressor(given.pop("model"), **fixed, **given, **more)


def losses(estimator: Any) -> list[float]:
    of_trainer = isinstance(estimator, graphopt.Trainer)
    return list(estimator.train_losses_ if of_trainer else estimator.loss_curve_)


def targets(estimator: Any) -> np.ndarray:
    return Y[:, None] if isinstance(estimator, graphopt.Trainer) else Y


@pytest.mark.parametrize("make", [trainer, regressor])
@pytest.mark.parametrize("case", [*CASES, *WITH_MODEL])
@pytest.mark.filterwarnings("ignore:max_iter")
def test_a_fit_trains_what_its_options_stand_for_now(
    case: type[Case], make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = case(tmp_path, monkeypatch)
    options = changing.options()
    estimator = make(options)
    before = losses(estimator.fit(X, targets(estimator)))
    assert losses(estimator.fit(X, targets(estimator))) == before
    changing.change()
    after = losses(estimator.fit(X, targets(estimator)))
    monkeypatch.setattr(Structure, "is_complete", False)  # nothing is shared
    fresh = make(options)
    assert after == losses(fresh.fit(X, targets(fresh))) != before


@pytest.mark.parametrize("make", [trainer, regressor])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:max_iter")
def test_a_new_estimator_and_a_clone_train_what_their_options_stand_for_now(
    case: type[Case], make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = case(tmp_path, monkeypatch)
    options = changing.options()
    estimator = make(options)
    before = losses(estimator.fit(X, targets(estimator)))
    changing.change()
    after = losses(clone(estimator).fit(X, targets(estimator)))
    assert after == losses(make(options).fit(X, targets(estimator))) != before


@pytest.mark.parametrize("make", [trainer, regressor])
@pytest.mark.parametrize("call", ["partial_fit", "warm_start"])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.filterwarnings("ignore:max_iter")
def test_training_goes_on_with_what_the_options_stand_for_now(
    case: type[Case], call: str, make: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = case(tmp_path, monkeypatch)
    options = changing.options()

    def trained(changes: bool) -> Any:
        estimator = make(options, warm_start=call == "warm_start", **({"alpha": 0.0} if make is regressor else {}))
        go_on = estimator.fit if call == "warm_start" else estimator.partial_fit
        go_on(X, targets(estimator))
        if changes:
            changing.change()
        return losses(go_on(X, targets(estimator)))[-1]

    assert trained(False) < 0.99 * trained(True) or case in (Rule, RuleThatReads)


@pytest.mark.parametrize("case", WITH_MODEL)
@pytest.mark.parametrize("call", ["partial_fit", "warm_start"])
@pytest.mark.filterwarnings("ignore:max_iter")
def test_a_regressor_goes_on_with_its_model_alone(
    case: type[Case], call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = case(tmp_path, monkeypatch)
    estimator = regressor(changing.options(), warm_start=call == "warm_start").fit(X, Y)
    predicted = estimator.predict(X)
    changing.change()
    np.testing.assert_array_equal(estimator.predict(X), predicted)
    with pytest.raises(graphopt.GraphoptError, match=r"^model: expected the model that the last fit has trained"):
        (estimator.partial_fit if call == "partial_fit" else estimator.fit)(X, Y)


@pytest.mark.parametrize("case", [Exported, BesideTheFile])
def test_a_pickled_trainer_does_not_predict_with_another_model(
    case: type[Case], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    changing = case(tmp_path, monkeypatch)
    estimator = trainer(changing.options()).fit(X, Y[:, None])
    content, predicted = pickle.dumps(estimator), estimator.predict(X)
    np.testing.assert_array_equal(pickle.loads(content).predict(X), predicted)
    changing.change()
    np.testing.assert_array_equal(estimator.predict(X), predicted)
    copy = pickle.loads(content)
    with pytest.raises(graphopt.GraphoptError, match=r"^model: expected the model that the pickled trainer"):
        copy.predict(X)
    assert losses(copy.fit(X, Y[:, None])) == losses(estimator.fit(X, Y[:, None]))


@pytest.mark.parametrize("model", [models.mlp((4,), 1, hidden=[8]), ir.to_proto(models.mlp((4,), 1, hidden=[8]))])
def test_a_pickled_model_in_memory_is_the_same(model: Any) -> None:
    estimator = trainer({"model": model}).fit(X, Y[:, None])
    np.testing.assert_array_equal(pickle.loads(pickle.dumps(estimator)).predict(X), estimator.predict(X))


def test_equal_fits_of_passes_of_the_library_share_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[Any] = []
    monkeypatch.setattr(Structure, "executor", _noting(compiled, Structure.executor))
    for _ in range(2):
        graphopt.OnnxRegressor(solver=passes.Adam(1e-3), loss=passes.Huber(0.5), max_iter=1).fit(X, Y)
    assert compiled[0] is compiled[1]


def test_a_trainer_keeps_its_executor_as_long_as_its_graph_is_the_same() -> None:
    for loss in (passes.MeanSquaredError(), passes.CustomLoss(own)):
        estimator: Estimator = trainer({"loss": loss}).fit(X, Y[:, None])
        executor = estimator._running()
        estimator.partial_fit(X, Y[:, None]).fit(X, Y[:, None])
        assert estimator._running() is executor


def _noting(noted: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def noting(structure: Structure, step: ir.Model) -> Any:
        noted.append(step)
        return function(structure, step)

    return noting


def test_a_schema_that_is_registered_later_counts() -> None:
    """Operators of other domains may be declared at any time, and declared anew."""
    domain, typed = "graphopt.tests.later", [("T", ["tensor(float)"], "")]
    attribute, formal = onnx.defs.OpSchema.Attribute, onnx.defs.OpSchema.FormalParameter

    def declare(default: float) -> None:
        onnx.defs.register_schema(
            onnx.defs.OpSchema(
                "Later",
                domain,
                1,
                inputs=[formal("x", "T")],
                outputs=[formal("y", "T")],
                type_constraints=typed,
                attributes=[attribute("rate", onnx.helper.make_attribute("rate", default))],
            )
        )

    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([2]))
    node = ir.Node(domain, "Later", [x], outputs=[ir.Value(name="y")])
    assert schema_of(domain, "Later", 1) is None and defaults(domain, "Later", 1) == {}
    with pytest.raises(onnx.defs.SchemaError):
        infer_outputs(node, 1)
    declare(0.5)
    try:
        assert defaults(domain, "Later", 1) == {"rate": 0.5}
        infer_outputs(node, 1)
        onnx.defs.deregister_schema("Later", 1, domain)
        declare(0.25)
        assert defaults(domain, "Later", 1) == {"rate": 0.25}
    finally:
        onnx.defs.deregister_schema("Later", 1, domain)
    with pytest.raises(onnx.defs.SchemaError):
        infer_outputs(node, 1)

"""Built-in models: valid ONNX, sized by the data, of a dynamic batch, differentiable."""

from __future__ import annotations

import numpy as np
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator

import graphopt
import passes
from graphopt import models

CASES = {
    "linear": ((1, 2, 3), 1, np.float32),
    "mlp": ((1, 2, 3), 4, np.float32),
    "cnn": ((2, 5, 7), 3, np.float32),
    "transformer": ((6,), 9, np.int64),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("batch", [1, 5])
def test_predicts_for_any_batch(name: str, batch: int) -> None:
    features, outputs, dtype = CASES[name]
    proto = ir.to_proto(getattr(models, name)(features, outputs))
    onnx.checker.check_model(proto, full_check=True)
    (y,) = ReferenceEvaluator(proto).run(None, {"x": np.ones((batch, *features), dtype)})
    assert y.shape == ((batch, *features, outputs) if name == "transformer" else (batch, outputs))
    assert np.isfinite(y).all()


@pytest.mark.parametrize("name", CASES)
def test_compiles_and_trains_every_weight(name: str) -> None:
    features, outputs, _ = CASES[name]
    model = getattr(models, name)(features, outputs)
    step = graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD())
    weights = {n for n, v in model.graph.initializers.items() if v.dtype == ir.DataType.FLOAT and v.shape.rank()}
    assert {v.name.removesuffix(".next") for v in step.graph.outputs if v.name.endswith(".next")} >= weights


def test_the_seed_decides_the_weights() -> None:
    def first(seed: int) -> np.ndarray:
        return next(iter(models.mlp((3,), 2, seed=seed).graph.initializers.values())).const_value.numpy()

    assert (first(0) == first(0)).all()
    assert (first(0) != first(1)).any()


def test_a_causal_transformer_sees_nothing_ahead() -> None:
    x = np.array([[1, 2, 3, 4]], np.int64)
    changed = np.array([[1, 2, 3, 0]], np.int64)
    for causal in (True, False):
        runner = ReferenceEvaluator(ir.to_proto(models.transformer((4,), 5, causal=causal)))
        before, after = (runner.run(None, {"x": tokens})[0][0, :3] for tokens in (x, changed))
        assert np.allclose(before, after) == causal


def test_errors_say_what_was_expected() -> None:
    with pytest.raises(graphopt.GraphoptError, match=r"expected images.* found \[64\]"):
        models.cnn((64,), 10)
    with pytest.raises(graphopt.GraphoptError, match="sequences of tokens"):
        models.transformer((3, 4), 10)
    with pytest.raises(graphopt.GraphoptError, match="heads that divide width 10, found 3"):
        models.transformer((3,), 10, width=10, heads=3)

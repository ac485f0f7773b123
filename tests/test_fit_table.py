"""A table trains in one call, and its file gives labels and probabilities to whoever has only ONNX Runtime."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnxruntime
import pandas as pd
import polars as pl
import pyarrow as pa
import pytest
import scipy.special
from sklearn.compose import ColumnTransformer
from sklearn.preprocessing import OneHotEncoder

import graphopt
import passes
from graphopt import data, models

RNG = np.random.default_rng(0)
AGE = RNG.integers(18, 80, 200)
ZIP = RNG.choice(["00001", "00023", "98052"], 200)
FRAME = pd.DataFrame({"age": AGE, "zip": ZIP, "bought": np.where(AGE + 20 * (ZIP == "00001") > 55, "yes", "no")})
NUMBERS = FRAME.assign(pay=AGE * 1000.5)[["zip", "age", "pay"]]
SHORT = {"epochs": 4, "verbose": False}


def fed(frame: pd.DataFrame) -> dict[str, np.ndarray]:
    """Return what a host without graphopt feeds."""
    return {"age": frame[["age"]].to_numpy(np.float32), "zip": frame[["zip"]].to_numpy(object)}


def outputs(path: Path, frame: pd.DataFrame) -> dict[str, np.ndarray]:
    session = onnxruntime.InferenceSession(path)
    return dict(zip([y.name for y in session.get_outputs()], session.run(None, fed(frame)), strict=True))


def test_one_file_from_a_frame(tmp_path: Path) -> None:
    fitted = graphopt.fit_table(FRAME, "bought", epochs=25, seed=1, verbose=False)
    fitted.save(tmp_path / "bought.onnx")
    found = outputs(tmp_path / "bought.onnx", FRAME)
    np.testing.assert_allclose(found["probabilities"], scipy.special.softmax(found["y"], axis=1), rtol=1e-5, atol=1e-7)
    assert found["label"].tolist() == np.array(["no", "yes"])[found["y"].argmax(axis=1)].tolist()
    assert fitted.predict(FRAME).tolist() == found["label"].tolist()
    np.testing.assert_allclose(fitted.predict_proba(FRAME), found["probabilities"], rtol=1e-6)
    accuracy = np.mean(found["label"] == FRAME["bought"])
    assert accuracy > 0.85 and fitted.evaluate(FRAME)["accuracy"] == accuracy
    again = graphopt.predict(str(tmp_path / "bought.onnx"), FRAME)
    assert [*again] == ["y", "label", "probabilities"]
    rows, _ = data.hold_out(len(FRAME), 0.2, seed=1)
    own = ColumnTransformer([("zip", OneHotEncoder(), ["zip"])]).fit(FRAME.iloc[rows])  # learnt from rows that train
    assert fitted.columns.columns["zip"].known == (*own.named_transformers_["zip"].categories_[0],)
    assert fitted.best["validation_loss"] == min(x["validation_loss"] for x in fitted.records)
    held = np.setdiff1d(np.arange(len(FRAME)), rows)
    measured = fitted.evaluate(FRAME.iloc[held])["loss"]
    np.testing.assert_allclose(measured, fitted.best["validation_loss"], rtol=1e-5)  # the best weights are out


TABLES: dict[str, Any] = {
    "polars": lambda _: pl.from_pandas(FRAME),
    "pyarrow": lambda _: pa.Table.from_pandas(FRAME),
    "columns": lambda _: {name: FRAME[name].tolist() for name in FRAME},
    "csv": lambda folder: FRAME.to_csv(folder / "t.csv", index=False) or folder / "t.csv",
    "parquet": lambda folder: FRAME.to_parquet(folder / "t.parquet") or str(folder / "t.parquet"),
}


@pytest.mark.sample(2)
@pytest.mark.parametrize("kind", TABLES)
def test_any_table_trains_alike(kind: str, tmp_path: Path) -> None:
    given = TABLES[kind](tmp_path)
    fitted = graphopt.fit_table(given, "bought", **{**SHORT, "epochs": 1})
    expected = _expected()
    assert [x["loss"] for x in fitted.records] == [expected.records[0]["loss"]]
    np.testing.assert_array_equal(fitted.predict_proba(given), fitted.predict_proba(FRAME))
    assert fitted.evaluate(given)["loss"] == fitted.evaluate(FRAME)["loss"]


def _expected(cache: list[Any] = []) -> Any:  # noqa: B006
    cache[:] = cache or [graphopt.fit_table(FRAME, "bought", **{**SHORT, "epochs": 1})]
    return cache[0]


@pytest.mark.sample(2)
@pytest.mark.parametrize(
    ("values", "task"),
    [
        (np.array([0, 1]), None),
        (np.array([1, 2]), None),
        (np.array([False, True]), None),
        (np.array([0.0, 1.0]), None),
        (np.array([3, 5, 9]), "classification"),
        (pd.Categorical(["u", "v"]), None),
    ],
)
def test_classes_are_predicted_as_the_target_has_them(values: Any, task: Any) -> None:
    target = values[AGE % len(values)]
    table = pd.DataFrame({"age": AGE, "target": target})
    fitted = graphopt.fit_table(table, "target", task=task, **SHORT)
    predicted = fitted.predict(table)
    assert {*predicted.tolist()} <= {*np.asarray(values).tolist()}
    assert predicted.dtype == np.asarray(values).dtype
    assert fitted.predict_proba(table).shape == (200, len(values))
    assert fitted.evaluate(table)["accuracy"] == np.mean(predicted == np.asarray(target))


@pytest.mark.slow
def test_a_regression_predicts_in_the_units_of_the_target(tmp_path: Path) -> None:
    fitted = graphopt.fit_table(NUMBERS, "pay", epochs=20, verbose=False)
    fitted.save(tmp_path / "pay.onnx")
    found = outputs(tmp_path / "pay.onnx", NUMBERS)
    assert [*found] == ["y"] and fitted.classes is None
    np.testing.assert_allclose(fitted.predict(NUMBERS), found["y"][:, 0], rtol=1e-6)
    residual = np.mean((found["y"][:, 0] - NUMBERS["pay"]) ** 2) / NUMBERS["pay"].var()
    assert fitted.evaluate(NUMBERS)["r2"] == pytest.approx(1 - residual, abs=0.01) and residual < 0.1


@pytest.mark.slow
def test_a_model_of_ones_own_weights_and_other_data(tmp_path: Path) -> None:
    table = FRAME.assign(w=np.where(FRAME["bought"] == "yes", 2.0, 1.0))
    for count in (1, 2):
        fitted = graphopt.fit_table(
            table,
            "bought",
            model=models.linear((4,), count),
            sample_weight="w",
            validation=table[:50],
            **SHORT,
        )
        assert fitted.predict_proba(FRAME).shape == (200, 2) and "accuracy" in fitted.evaluate(table)
    balanced = graphopt.fit_table(FRAME, "bought", class_weights="balanced", **SHORT)
    rows, _ = data.hold_out(200, 0.2, seed=0)
    counts = FRAME["bought"].iloc[rows].value_counts()
    weights = [len(rows) / (2 * counts[name]) for name in ("no", "yes")]  # as scikit-learn's compute_class_weight
    given = graphopt.fit_table(FRAME, "bought", class_weights=weights, **SHORT)
    np.testing.assert_allclose([x["loss"] for x in balanced.records], [x["loss"] for x in given.records], rtol=1e-5)


LOSSES = {
    "logits of classes": (passes.CrossEntropy(), 3),
    "a logit": (passes.BinaryCrossEntropy(), 1),
    "margins": (passes.Hinge(), 1),
    "numbers": (passes.MeanSquaredError(), 1),
}


@pytest.mark.parametrize("name", LOSSES)
def test_predict_gives_labels_and_probabilities(name: str) -> None:
    loss, count = LOSSES[name]
    x, model = RNG.normal(size=(20, 3)).astype(np.float32), models.mlp(3, count)
    executor = graphopt.Executor(graphopt.compile(model, loss=loss, optimizer=passes.SGD(0.1)), native=False)
    for given in (executor, executor.trained()):
        found = graphopt.predict(given, x)
        y = found["y"]
        if name == "numbers":
            assert [*found] == ["y"]
        elif name == "margins":
            assert [*found] == ["y", "label"] and found["label"].tolist() == (y[:, 0] > 0).astype(int).tolist()
        elif count == 1:
            assert found["label"].tolist() == (y[:, 0] > 0).astype(int).tolist()
            np.testing.assert_allclose(found["probabilities"][:, 1], scipy.special.expit(y[:, 0]), rtol=1e-5)
            np.testing.assert_allclose(found["probabilities"].sum(axis=1), 1, rtol=1e-6)
        else:
            assert found["label"].tolist() == y.argmax(axis=1).tolist()
            np.testing.assert_allclose(found["probabilities"], scipy.special.softmax(y, axis=1), rtol=1e-5)
    executor.labels = ["u", "v", "w"][: max(count, 2)]
    if name != "numbers":
        named, numbered = (
            graphopt.predict(executor, x)["label"],
            graphopt.predict(executor.model and executor, x),
        )
        assert {*named.tolist()} <= {"u", "v", "w"} and len(named) == len(numbered["y"])


def fit_table(**changed: Any) -> Any:
    given = {"table": FRAME, "target": "bought", **SHORT, **changed}
    return graphopt.fit_table(**given)


@pytest.mark.parametrize("call", messages.calls("fit_table_mistakes"))
def test_mistakes(call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    messages.refused("fit_table_mistakes", call, globals())

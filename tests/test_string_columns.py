"""Columns of tables feed inputs of strings by the inputs' types, whatever their cells look like.

The oracle is ONNX Runtime on the file, fed with the strings that were written.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnxruntime
import pytest

import graphopt
import passes
from graphopt import GraphoptError

pandas = pytest.importorskip("pandas")
pytest.importorskip("pyarrow")
STEPS = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
CELLS = {  # of one column, in its rows
    "leading zeros": ["007", "7", "12", "007"],
    "whole numbers": ["1", "2", "12", "1"],
    "numbers among words": ["1", "a", "12", "1"],
    "missing": ["1", "", "12", ""],
    "missing words": ["a", "", "", "b"],
    "signs, points, exponents": ["+1", "1.0", "1e3", "-0"],
    "dates": ["2026-11-28", "2026-11-29", "1", "2026-11-28"],
    "nothing": ["", "", "", ""],
}
NUMBERS = np.array([0.5, -1.0, 2.0, 0.0], np.float32)
LABELS = np.array([0, 1, 1, 0])


def model_of(categories: list[str], columns: int = 1, with_number: bool = True) -> onnx.ModelProto:
    """Return a model of columns of strings, as one-hot vectors, and a number."""
    known = [*dict.fromkeys(categories), "another"]
    keys = ", ".join(f'"{x}"' for x in known)
    inputs, joined = (
        (f"string[N,{columns}] s, float[N,1] x", "r, x") if with_number else (f"string[N,{columns}] s", "r")
    )
    model = onnx.parser.parse_model(
        f'<ir_version: 10, opset_import: ["": 21, "ai.onnx.ml": 2]> g ({inputs}) => (float[N,2] y) {{'
        f" hot = ai.onnx.ml.OneHotEncoder<cats_strings = [{keys}], zeros = 1>(s)"
        f" r = Reshape(hot, shape) j = Concat<axis = 1>({joined}) y = MatMul(j, w) }}"
    )
    weight = np.random.default_rng(0).standard_normal((columns * len(known) + with_number, 2)).astype(np.float32)
    shape = np.array([-1, columns * len(known)])
    model.graph.initializer.extend(map(onnx.numpy_helper.from_array, (weight, shape), ("w", "shape")))
    return model


def computed(model: Any, texts: list[str]) -> np.ndarray:
    proto = model if isinstance(model, onnx.ModelProto) else onnx.load(model)
    session = onnxruntime.InferenceSession(proto.SerializeToString())
    feeds = {"s": np.array(texts, object).reshape(-1, 1), "x": NUMBERS[:, None]}
    return session.run(["y"], {x.name: feeds[x.name] for x in session.get_inputs()})[0]


def frame(texts: list[str]) -> Any:
    cells = [None if x == "" else x for x in texts]
    return pandas.DataFrame({"s": pandas.Series(cells, dtype=object), "x": NUMBERS, "target": LABELS})


def as_csv(texts: list[str], folder: Path) -> Any:
    frame(texts).to_csv(folder / "t.csv", index=False)
    return graphopt.data.csv(folder / "t.csv", features={"s": "s", "x": "x"})


def as_parquet(texts: list[str], folder: Path) -> Any:
    frame(texts).to_parquet(folder / "t.parquet")
    return graphopt.data.parquet(folder / "t.parquet", features={"s": ["s"], "x": ["x"]})


def as_table(texts: list[str], folder: Path) -> Any:
    return graphopt.data.table(frame(texts), features={"s": "s", "x": "x"})


def as_frame(texts: list[str], folder: Path) -> Any:
    return frame(texts)


def as_tuple(texts: list[str], folder: Path) -> Any:
    return frame(texts)[["x", "s"]], LABELS


READERS = [as_csv, as_parquet, as_table, as_frame, as_tuple]


@pytest.mark.parametrize("read", READERS)
@pytest.mark.parametrize("name", CELLS)
def test_a_column_feeds_an_input_of_strings(name: str, read: Any, tmp_path: Path) -> None:
    texts = CELLS[name]
    model, data = model_of(texts), read(texts, tmp_path)
    expected = computed(model, texts)
    np.testing.assert_allclose(graphopt.predict(model, data)["y"], expected, rtol=1e-6)
    executor = graphopt.Executor(graphopt.compile(model, **STEPS), native=False)
    np.testing.assert_allclose(graphopt.predict(executor, data)["y"], expected, rtol=1e-6)
    losses = np.log(np.exp(expected).sum(1)) - expected[range(4), LABELS]
    assert graphopt.evaluate(executor, data)["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    records = graphopt.fit(executor, data, epochs=2, validation=data)
    assert records[0]["loss"] == pytest.approx(losses.mean(), rel=1e-5)
    found = graphopt.predict(executor, data)["y"]
    np.testing.assert_allclose(computed(executor.trained(), texts), found, rtol=1e-5)


COLUMNS = {  # of a DataFrame, and the strings that they stand for
    "int": (np.array([1, 2, 12, 1]), ["1", "2", "12", "1"]),
    "int with missing": (np.array([1, np.nan, 12, 1]), ["1", "", "12", "1"]),
    "Int64 with missing": (pandas.array([1, None, 12, 1], dtype="Int64"), ["1", "", "12", "1"]),
    "category": (pandas.Categorical([7, 2, 12, 7]), ["7", "2", "12", "7"]),
    "string": (pandas.array(["007", None, "7", "1"], dtype="string"), ["007", "", "7", "1"]),
    "large": (np.array([2**60 + 1, 2**60 + 2, 1, 1]), [str(2**60 + 1), str(2**60 + 2), "1", "1"]),
    "bool": (np.array([True, False, True, True]), ["True", "False", "True", "True"]),
}


@pytest.mark.parametrize("name", COLUMNS)
@pytest.mark.parametrize("read", ["frame", "parquet"])
def test_numbers_feed_an_input_of_strings(name: str, read: str, tmp_path: Path) -> None:
    column, texts = COLUMNS[name]
    table = pandas.DataFrame({"s": column, "x": NUMBERS, "target": LABELS})
    data = table
    if read == "parquet":
        table.to_parquet(tmp_path / "t.parquet")
        data = graphopt.data.parquet(tmp_path / "t.parquet", features={"s": "s", "x": "x"})
    model = model_of(texts)
    np.testing.assert_allclose(graphopt.predict(model, data)["y"], computed(model, texts), rtol=1e-6)


def test_whole_numbers_with_missing_ones_keep_all_digits(tmp_path: Path) -> None:
    """Float64, which NumPy makes of them, has 53 bits."""
    texts = [str(2**60 + 1), "", str(2**60 + 2), "5"]
    column = pandas.array([int(x) if x else None for x in texts], dtype="Int64")
    pandas.DataFrame({"s": column, "x": NUMBERS, "target": LABELS}).to_parquet(tmp_path / "t.parquet")
    data = graphopt.data.parquet(tmp_path / "t.parquet", features={"s": "s", "x": "x"})
    model = model_of(texts)
    np.testing.assert_allclose(graphopt.predict(model, data)["y"], computed(model, texts), rtol=1e-6)


def test_several_columns_feed_one_input_of_strings(tmp_path: Path) -> None:
    table = pandas.DataFrame({"a": ["x", "y"], "b": ["007", "7"], "target": [0, 1]})
    model = model_of(["x", "y", "007", "7"], columns=2, with_number=False)
    session = onnxruntime.InferenceSession(model.SerializeToString())
    expected = session.run(None, {"s": np.array([["x", "007"], ["y", "7"]], object)})[0]
    table.to_csv(tmp_path / "t.csv", index=False)
    read = graphopt.data.csv(tmp_path / "t.csv", features={"s": ["a", "b"]})
    for data in (read, table, table[["a", "b"]].to_numpy()):
        np.testing.assert_allclose(graphopt.predict(model, data)["y"], expected, rtol=1e-6)


def test_an_input_of_numbers_reads_codes_as_numbers(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("s,x,target\n1,007,0\n1,08,1\n")
    data = graphopt.data.csv(tmp_path / "t.csv", features={"s": "s", "x": "x"})
    model = model_of(["1"])
    session = onnxruntime.InferenceSession(model.SerializeToString())
    feeds = {"s": np.array([["1"], ["1"]], object), "x": np.array([[7], [8]], np.float32)}
    with pytest.warns(UserWarning, match="'007' is read as the number 7"):
        found = graphopt.predict(model, data)["y"]
    np.testing.assert_allclose(found, session.run(None, feeds)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("text", "features", "message"),
    [
        (
            "s,x,target\n1,a,0\n",
            {"s": "s", "x": "x"},
            r"t\.csv: column 'x', row 0: expected a number, found 'a'",
        ),
        (
            "s,target\n1,0\n2,1\n",
            ["s"],
            r"data 's': expected strings, found int64: .*data\.features=\{s: \[s\]\}",
        ),
    ],
)
def test_cells_that_an_input_cannot_read_are_refused(
    text: str, features: Any, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("t.csv").write_text(text)
    model = model_of(["1"], with_number=len(features) == 2)
    with pytest.raises(GraphoptError, match=message):
        graphopt.predict(model, graphopt.data.csv("t.csv", features=features))


@pytest.mark.slow
@pytest.mark.parametrize("reader", ["csv", "parquet"])
def test_the_command_reads_codes(reader: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from graphopt.cli.command import main

    monkeypatch.chdir(tmp_path)
    texts = CELLS["leading zeros"]
    onnx.save(model_of(texts), "m.onnx")
    table = pandas.concat([frame(texts)] * 5)
    table.to_csv("t.csv", index=False) if reader == "csv" else table.to_parquet("t.parquet")
    options = [f"data={reader}", f"data.path=t.{reader}", "loss=cross_entropy"]
    assert main(["model=m.onnx", *options, "fit.epochs=1", f"fit.validation=t.{reader}", "folder=run"]) == 0
    assert main(["evaluate", "folder=run"]) == 0
    assert main(["predict", "folder=run", "rows=all"]) == 0
    found = np.load("run/predictions.npz")["y"]
    np.testing.assert_allclose(found[:4], computed("run/trained.onnx", texts), rtol=1e-5)


def test_a_trainer_takes_arrays_of_strings() -> None:
    texts = np.array(CELLS["leading zeros"])[:, None]
    trainer = graphopt.Trainer(model_of(CELLS["leading zeros"]), max_iter=1, **STEPS)
    trainer.fit({"s": texts, "x": NUMBERS[:, None]}, LABELS)
    assert trainer.predict({"s": texts, "x": NUMBERS[:, None]}).shape == (4,)


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("string_columns_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("string_columns_mistakes", call, globals())

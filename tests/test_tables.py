"""Tables of text, categories, dates and missing values: scikit-learn's numbers, in NumPy and as nodes of a model."""

from __future__ import annotations

import csv
import datetime
import json
import re
import shutil
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx
import onnxruntime
import pytest
import scipy.special
from builders import mlp

import graphopt
import passes
from graphopt import cli, data, models
from graphopt.data import Category, Columns, Date, Number
from graphopt.errors import GraphoptError
from graphopt.graph.metadata import column_names_in
from graphopt.graph.roles import data_inputs
from graphopt.training.evaluation import predict

pandas = pytest.importorskip("pandas")

RNG = np.random.default_rng(0)
CITIES = ["Bern", "Oslo", "Łódź", "São Paulo", "東京", "a,b", "'q'", " "]
QUICK = ("fit.epochs=3", "executor.threads=1", "data.columns=auto")


def people(rows: int = 300) -> Any:
    """Return a table with a column of each kind, in which every column but some lacks values."""
    age = RNG.integers(18, 80, rows).astype(float)
    city = RNG.choice(CITIES[:4], rows).astype(object)
    day = np.datetime64("2024-01-01") + RNG.integers(0, 700, rows)
    bought = np.where(age + 20 * (city == "Oslo") + RNG.normal(0, 5, rows) > 50, "yes", "no")
    age[RNG.random(rows) < 0.1] = np.nan
    city[RNG.random(rows) < 0.1] = None
    member = RNG.random(rows) > 0.5
    return pandas.DataFrame({"age": age, "city": city, "day": day, "member": member, "bought": bought})


@pytest.fixture
def table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Write people.csv into the working directory."""
    monkeypatch.chdir(tmp_path)
    frame = people()
    frame.to_csv("people.csv", index=False)
    return frame


def session(model: Any) -> onnxruntime.InferenceSession:
    graphopt.save(model, "model.onnx")
    onnx.checker.check_model("model.onnx", full_check=True)
    return onnxruntime.InferenceSession("model.onnx")


# scikit-learn


@pytest.mark.parametrize("impute", ["mean", "median", "most_frequent", -3.5, None])
@pytest.mark.parametrize("scale", ["standard", "minmax", None])
@pytest.mark.parametrize("kind", ["normal", "integers", "constant", "large", "binary"])
def test_numbers_are_those_of_scikit_learn(impute: Any, scale: Any, kind: str) -> None:
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import MinMaxScaler, StandardScaler

    drawn = {
        "normal": RNG.normal(3, 2, 60),
        "integers": RNG.integers(0, 5, 60),
        "constant": np.full(60, 7.25),
        "large": RNG.normal(size=60) * 1e9,
        "binary": RNG.random(60) > 0.5,
    }[kind].astype(np.float32)
    x = drawn.astype(np.float64)
    if impute is not None:
        x[[3, 4, 50]] = np.nan
    fill = {} if isinstance(impute, str | None) else {"strategy": "constant", "fill_value": impute}
    imputer = SimpleImputer(**(fill or {"strategy": impute or "mean"}))
    scaler = {"standard": StandardScaler(), "minmax": MinMaxScaler(), None: "passthrough"}[scale]
    expected = make_pipeline(imputer, scaler).fit(x[:40, None]).transform(x[:, None])
    columns = Columns({"x": Number(impute, scale)}).learn({"x": x}, range(40))
    np.testing.assert_allclose(columns.encode({"x": x}), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("kind", ["text", "integers", "booleans", "floats", "one", "mixed"])
def test_categories_are_those_of_scikit_learn(kind: str) -> None:
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder

    x = {
        "text": RNG.choice(CITIES, 80).astype(object),
        "integers": RNG.integers(-3, 12, 80),
        "booleans": RNG.random(80) > 0.5,
        "floats": RNG.choice([0.5, 10, -2, 3], 80),
        "one": np.full(80, "same", object),
        "mixed": np.array(["2", "10", "ten"], object)[RNG.integers(0, 3, 80)],
    }[kind]
    training = x[:60] if kind != "text" else x[x != "東京"][:40]  # one has not been seen
    one_hot = OneHotEncoder(handle_unknown="ignore", sparse_output=False).fit(training[:, None])
    ordinal = OrdinalEncoder(handle_unknown="use_encoded_value", unknown_value=-1)
    ordinal.fit(training[:, None])
    for column, oracle in ((Category(), one_hot), (Category("ordinal"), ordinal)):
        found = Columns({"x": column}).learn({"x": training}).encode({"x": x})
        expected = oracle.transform(x[:, None])
        if kind == "mixed":  # numbers by size come before texts, where scikit-learn sorts all as texts
            expected = expected[:, [1, 0, 2]] if expected.shape[1] == 3 else np.choose(expected.astype(int), [1, 0, 2])
        np.testing.assert_array_equal(found, expected)


def test_missing_categories_are_those_of_scikit_learn() -> None:
    from sklearn.impute import SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder

    x = RNG.choice(["u", "v", "w"], 50).astype(object)
    x[[3, 20, 40]] = None
    encoder = OneHotEncoder(handle_unknown="ignore", sparse_output=False)
    for impute, imputer in (
        (None, "passthrough"),
        ("most_frequent", SimpleImputer(strategy="most_frequent", missing_values=None)),
        ("other", SimpleImputer(strategy="constant", missing_values=None, fill_value="other")),
    ):
        expected = make_pipeline(imputer, encoder).fit(x[:30, None]).transform(x[:, None])
        columns = Columns({"x": Category(impute=impute)}).learn({"x": x}, range(30))
        order = np.argsort(columns.columns["x"].known) if impute == "other" else slice(None)  # type: ignore[attr-defined]
        np.testing.assert_array_equal(columns.encode({"x": x})[:, order], expected)
    given = Columns({"x": Category("ordinal", categories=["w", "v", "u"])}).learn({"x": x})
    assert given.encode({"x": ["u", "w", None, "z"]}).ravel().tolist() == [2, 0, -1, -1]


def test_a_table_equals_the_column_transformer(table: Any) -> None:
    from sklearn.compose import ColumnTransformer
    from sklearn.impute import MissingIndicator, SimpleImputer
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import OneHotEncoder, OrdinalEncoder, StandardScaler

    columns = Columns(
        {
            "age": Number("median", add_indicator=True),
            "city": "category",
            "member": {"kind": "category", "encode_as": "ordinal"},
        }
    )
    rows, _ = data.hold_out(len(table), 0.3)
    columns = columns.learn(table, rows)
    transformer = ColumnTransformer(
        [
            ("age", make_pipeline(SimpleImputer(strategy="median"), StandardScaler()), ["age"]),
            ("missing", MissingIndicator(features="all"), ["age"]),
            ("city", OneHotEncoder(handle_unknown="ignore", sparse_output=False), ["city"]),
            ("member", OrdinalEncoder(), ["member"]),
        ]
    )
    expected = transformer.fit(table.iloc[rows]).transform(table)
    np.testing.assert_allclose(columns.encode(table), expected.astype(float), atol=1e-6)
    assert columns.names == [
        "age",
        "age is missing",
        *(f"city={x}" for x in sorted(CITIES[:4])),
        "city=missing",
        "member",
    ]


# Nodes


def test_nodes_give_the_bits_of_numpy(table: Any) -> None:
    table["kids"] = RNG.integers(0, 4, len(table))
    columns = Columns(
        {
            "age": Number("median", "minmax", add_indicator=True),
            "city": Category(impute="most_frequent"),
            "day": Date(("days", "year", "month", "day", "weekday")),
            "kids": Category("ordinal"),
            "member": "category",
        }
    ).learn(table[:200])
    table.loc[5, "kids"], table.loc[6, "city"], table.loc[7, "day"] = 9, "Nowhere", pandas.NaT
    x = columns.encode(table)
    model = models.linear((columns.width,), 3, seed=1)
    expected = graphopt.run(model, {"x": x})["y"]
    whole = columns.before(model, labels=["u", "v", "wörld"])
    runtime = session(whole)
    found, label = runtime.run(None, columns.inputs(table))
    np.testing.assert_array_equal(found, expected)
    assert label.tolist() == np.array(["u", "v", "wörld"])[expected.argmax(axis=1)].tolist()
    assert {x.name: x.type for x in runtime.get_inputs()}["city"] == "tensor(string)"
    outputs = predict("model.onnx", table)
    np.testing.assert_array_equal(outputs["y"], expected)
    assert outputs["label"].tolist() == label.tolist()
    # back
    assert Columns.of("model.onnx") == columns
    plain = Columns.without("model.onnx")
    assert ([x.name for x in plain.graph.inputs], [y.name for y in plain.graph.outputs]) == (["x"], ["y"])
    np.testing.assert_array_equal(graphopt.run(plain, {"x": x})["y"], expected)
    assert Columns.without(model) is model and Columns.of(model) is None


def test_dates_are_those_of_python_from_the_first_to_the_last() -> None:
    days = np.r_[datetime.date.min.toordinal(), RNG.integers(1, datetime.date.max.toordinal(), 3000)]
    days = np.r_[
        days,
        [datetime.date(y, m, 28).toordinal() + i for y in (1900, 2000, 2024) for m in (2, 12) for i in range(4)],
    ]
    dates = [datetime.date.fromordinal(day) for day in [*days.tolist(), datetime.date.max.toordinal()]]
    table = {"day": [str(day) for day in dates]}
    columns = Columns({"day": Date(("year", "month", "day", "weekday"))}).learn(table)
    parts = columns.columns["day"]
    assert isinstance(parts, Date)
    found = columns.encode(table) * parts.divisors + parts.offsets
    expected = [[day.year, day.month, day.day, day.weekday()] for day in dates]
    np.testing.assert_array_equal(found.round(), expected)
    model = models.linear((4,), 2)
    y = graphopt.run(columns.before(model), columns.inputs(table))["y"]
    np.testing.assert_array_equal(y, graphopt.run(model, {"x": columns.encode(table)})["y"])
    objects = {"day": np.array(dates, object)}
    np.testing.assert_array_equal(columns.encode(objects), columns.encode(table))
    europe = Columns({"day": Date(format="%d.%m.%Y")}).inputs({"day": ["02.01.1970", None, "NA"]})["day"]
    assert europe[0] == 1 and np.isnan(europe[1:]).all()


@pytest.mark.parametrize("names", [("x", "y", "label", "features"), ("layers.0.weight", "batch", "ü \\ b", "y_")])
def test_columns_may_have_the_names_of_the_model(names: tuple[str, ...]) -> None:
    table = {name: RNG.normal(size=9) for name in names}
    columns = Columns(dict.fromkeys(names, "number")).learn(table)
    model = models.linear((4,), 2)
    whole = columns.before(model, labels=["u", "v"])
    runtime = session(whole) if not Path("model.onnx").exists() else None
    Path("model.onnx").unlink()
    assert runtime is not None and [x.name for x in runtime.get_inputs()] == list(names)
    found = runtime.run(None, columns.inputs(table))[0]
    np.testing.assert_array_equal(found, graphopt.run(model, {"x": columns.encode(table)})["y"])
    plain = Columns.without(whole)
    x = {plain.graph.inputs[0].name: columns.encode(table)}
    np.testing.assert_array_equal(next(iter(graphopt.run(plain, x).values())), found)


@pytest.mark.parametrize("opset", [9, 11, 13, 21])
def test_models_of_any_opset_take_columns(opset: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    table = people(40)
    columns = Columns.auto(table, leave_out=["bought"]).learn(table)
    model = onnx.ModelProto.FromString(mlp((columns.width, 2)).SerializeToString())
    model.opset_import[0].version = opset
    runtime = session(columns.before(model, labels=["no", "yes"]))
    y, label = runtime.run(None, columns.inputs(table))
    assert (label == np.array(["no", "yes"])[y.argmax(axis=1)]).all()


# Kinds


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ([1, 2.5, None], Number),
        (["1", "2.5", "", "NA", "?"], Number),
        (np.array([True, False]), Category),
        (["true", "false", ""], Category),
        (["u", "v", None], Category),
        (["2024-01-31", "", "2024-02-01 10:30:00"], Date),
        (np.array(["2024-01-31", "NaT"], "datetime64[ns]"), Date),
        ([datetime.date(2024, 1, 31), None], Date),
        (["1", "2", "many"], Category),
        ([f"{i % 30}u" for i in range(100)], Category),
    ],
)
def test_auto_finds_the_kind(cells: Any, kind: type) -> None:
    assert type(Columns.auto({"x": cells}).columns["x"]) is kind


@pytest.mark.parametrize(
    ("cells", "error"),
    [
        (
            [f"name {i}" for i in range(50)],
            r"column 'x': expected few different values, found 50 in 50 rows: .*, columns={\*: auto, x: null}, or",
        ),
        (
            [*map(str, range(50)), "12x"],
            "column 'x', row 50: expected a number, as in most rows, found '12x'",
        ),
        ([None, ""], "column 'x': expected values, found none"),
        (
            ["1,5", "2", ""],
            r"column 'x': expected plain numbers, found '1,5': .*, x: {kind: number, decimal: ','}}, or x: categ",
        ),
        ([[1, 2], [3, 4]], r"column 'x': expected a cell in each row, found arrays of shape \[2\]"),
        ([{"a": 1}, {"a": 2}], None),
    ],
)
def test_auto_names_columns_without_a_kind(cells: Any, error: str | None) -> None:
    if error is None:
        assert Columns.auto({"x": cells}).columns["x"].kind == "category"
        return
    with pytest.raises(GraphoptError, match=error):
        Columns.auto({"x": cells})


@pytest.mark.parametrize(
    ("description", "expected"),
    [
        ("auto", {"a": "number", "b": "category", "c": "number"}),
        ({"a": "number"}, {"a": "number"}),
        ({"c": "category", "*": "auto"}, {"a": "number", "b": "category", "c": "category"}),
        ({"*": "category", "b": None}, {"a": "category", "c": "category"}),
        ({"*": "auto", "target": None}, {"a": "number", "b": "category", "c": "number"}),
    ],
)
def test_descriptions(description: Any, expected: dict[str, str]) -> None:
    table = {"a": np.arange(3), "b": np.array(["u", "v", "u"], object), "c": np.arange(3)}
    found = data.table({**table, "target": [0, 1, 1]}, columns=description).columns
    assert found is not None and {name: column.kind for name, column in found.columns.items()} == expected


def described(columns: Any) -> Any:
    return data.table({"a": [1, 2], "target": [0, 1]}, columns=columns)


def learnt(column: Any, cells: Any) -> Any:
    return Columns({"x": column}).learn({"x": cells})


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("tables_mistakes"))
def test_wrong_columns_cells_and_calls(call: str) -> None:
    messages.refused("tables_mistakes", call, globals())


def test_many_different_texts() -> None:
    texts = "u" + np.arange(200_000).astype(str).astype(object)
    with pytest.raises(GraphoptError, match="data: column 'id': expected few different values, found 200,000"):
        data.table({"id": texts, "target": texts}, target=None, columns="auto")
    with pytest.raises(GraphoptError, match="data: column 'id': expected at most 1,000 categories, found 200,000"):
        data.table({"id": texts}, target=None, columns={"id": "category"}).learn()
    with pytest.raises(
        GraphoptError, match=r"column 'target': expected numbers or at most 1,000 classes, found 200,000"
    ):
        data.table({"id": texts, "target": texts}, columns={"id": "category"})
    wide = {f"c{i}": np.array([f"{j}u" for j in range(1000)] * 2, object) for i in range(3)}
    columns = Columns.auto(wide).learn(wide)
    huge = {name: np.full(500_000, "1u", object) for name in wide}
    with pytest.raises(GraphoptError, match="found 500,000 rows of 3,000 features: encode categories as ordinal"):
        columns.encode(huge)


def test_decimal_commas() -> None:
    columns = Columns({"x": Number(scale=None, decimal=",")}).learn({"x": ["1,5", "-2", None, "1e3"]})
    assert columns.encode({"x": ["1,5", "7"]}).ravel().tolist() == [1.5, 7]
    with pytest.raises(GraphoptError, match=r"row 0: expected a number, found '1\.234,5'"):
        columns.encode({"x": ["1.234,5"]})


def test_a_warning_of_numbers_that_float32_cannot_tell_apart() -> None:
    with pytest.warns(UserWarning, match="column 'x': float32 cannot tell numbers apart near 1e.09"):
        Columns({"x": "number"}).learn({"x": 1e9 + np.arange(5.0)})


@pytest.mark.parametrize(
    "note",
    [
        "",
        "[]",
        '{"columns": {}}',
        '{"columns": {"a": {"kind": "number"}}}',
        '{"columns": {"a": "number"}, "x": 1}',
    ]
    + [
        json.dumps({"columns": {"a": {"kind": kind, "rows": 3, **fields}}, "features": "f", "input": "x"})
        for kind, fields in (
            ("number", {"fill": "x"}),
            ("number", {"divisor": 0}),
            ("category", {"known": 3}),
            ("category", {"known": [f"{i}" for i in range(1001)]}),
            ("date", {"offsets": [1.0]}),
            ("date", {"offsets": [1, 2, 3], "divisors": [1, 2, 0]}),
            ("date", {"offsets": [1, 2, 3], "divisors": [1, 2, 3], "fill": 1e30}),
            ("own", {}),
        )
    ]
    + [json.dumps({"columns": {"a": {"kind": "number", "rows": 3}}, "features": "none", "input": "x"})],
)
def test_hostile_metadata(note: str) -> None:
    model = onnx.ModelProto.FromString(mlp((1, 2)).SerializeToString())
    model.metadata_props.add(key="graphopt.columns", value=note)
    with pytest.raises(
        GraphoptError, match=r"metadata 'graphopt\.columns': expected (JSON|columns as graphopt writes them)"
    ):
        Columns.without(model)


# Files and frames


def test_what_is_learnt_comes_from_training_rows(table: Any) -> None:
    rows, held_out = data.hold_out(len(table), 0.2, seed=3)
    read = {"target": "bought", "columns": "auto"}
    before = data.csv("people.csv", **read).learn(rows)
    table.loc[held_out, "age"] = 1e6
    table.loc[held_out, "city"] = "Nowhere"
    table.loc[held_out, "day"] = np.datetime64("1900-01-01")
    table.to_csv("other.csv", index=False)
    after = data.csv("other.csv", **read).learn(rows)
    assert before.columns == after.columns
    np.testing.assert_array_equal(before.arrays["x"][rows], after.arrays["x"][rows])
    again = data.csv("people.csv", target="bought", columns=before.columns)
    np.testing.assert_array_equal(again.arrays["x"], before.arrays["x"])
    assert before.names == before.columns.names and before.labels == ("no", "yes")


@pytest.mark.parametrize("kind", ["parquet", "arrow"])
def test_parquet_and_arrow(kind: str, tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    import pyarrow.parquet

    written = arrow.table(
        {
            "text": arrow.array(["u", None, "v", "u"]),
            "word": arrow.array(["p", "q", None, "p"]).dictionary_encode(),
            "flag": arrow.array([True, None, False, True]),
            "count": arrow.array([1, None, 3, 4], arrow.int64()),
            "time": arrow.array([datetime.datetime(2024, 1, i, 5) for i in (1, 2, 3)] + [None], arrow.timestamp("us")),
            "day": arrow.array([datetime.date(2024, 1, i) for i in (1, 2, 3)] + [None]),
            "target": arrow.array(["no", "no", "yes", "no"]),
        }
    )
    path = str(tmp_path / f"t.{kind}")
    if kind == "parquet":
        pyarrow.parquet.write_table(written, path)
    else:
        with arrow.OSFile(path, "wb") as sink, arrow.ipc.new_file(sink, written.schema) as writer:
            writer.write(written)
    found = getattr(data, kind)(path, columns="auto").learn()
    kinds = {name: column.kind for name, column in found.columns.columns.items()}
    assert kinds == {
        **dict.fromkeys(("text", "word", "flag"), "category"),
        "count": "number",
        **dict.fromkeys(("time", "day"), "date"),
    }
    assert found.labels == ("no", "yes") and found.arrays["target"].tolist() == [0, 0, 1, 0]
    assert found.names[:9] == [
        *("text=u", "text=v", "text=missing", "word=p", "word=q", "word=missing"),
        *("flag=False", "flag=True", "flag=missing"),
    ]
    np.testing.assert_array_equal(found.arrays["x"][:, 10:13], found.arrays["x"][:, 13:16])
    with pytest.raises(GraphoptError, match=r"column 'text', row 0: expected a number, found 'u': data.columns=auto"):
        getattr(data, kind)(path)


@pytest.mark.parametrize("library", ["pandas", "polars"])
def test_frames(library: str, table: Any) -> None:
    frame = table if library == "pandas" else pytest.importorskip("polars").from_pandas(table)
    if library == "pandas":
        frame = frame.assign(city=frame["city"].astype("category"), age=frame["age"].astype("Int64"))
    found = data.table(frame, target="bought", columns="auto").learn(range(200))
    expected = data.csv("people.csv", target="bought", columns="auto").learn(range(200))
    np.testing.assert_array_equal(found.arrays["x"], expected.arrays["x"])
    np.testing.assert_array_equal(found.arrays["target"], expected.arrays["target"])
    step = graphopt.compile(
        models.mlp((found.columns.width,), 2), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2)
    )
    executor = graphopt.Executor(step, threads=1)
    assert graphopt.fit(executor, found, epochs=10)[-1]["accuracy"] > 0.7
    whole = found.columns.before(executor.trained(), found.labels)
    outputs = predict(whole, frame)
    assert np.mean(outputs["label"] == np.asarray(frame["bought"])) > 0.7
    np.testing.assert_array_equal(outputs["y"], predict(executor.trained(), found)["y"])
    np.testing.assert_array_equal(outputs["y"], predict(whole, found)["y"])


def test_what_is_learnt_again_replaces_what_was_learnt() -> None:
    table = {"age": [1.0, 3.0, 11.0, 13.0], "city": ["u", "v", "u", "w"], "target": [0, 1, 0, 1]}
    people = data.table(table, columns="auto").learn()
    for rows in (range(2), range(0, 4, 2), range(3, 0, -2), [0, 1], np.array([True, False, True, False])):
        again = people.learn(rows)
        expected = people.columns.learn({name: np.asarray(x)[np.asarray(rows)] for name, x in table.items()})
        assert again.columns == expected and again.arrays["x"].shape == (4, expected.width)
        np.testing.assert_array_equal(again.arrays["x"], expected.encode(table))
    for rows in (range(5), [0, 4], np.array([7])):
        with pytest.raises(GraphoptError, match=r"data: rows: expected indices of 4 rows, found [47]"):
            people.learn(rows)


def test_models_of_tables_predict_with_targets(table: Any) -> None:
    columns = Columns.auto(table, leave_out=["bought"]).learn(table)
    model = columns.before(models.linear((columns.width,), 2), ["no", "yes"])
    expected = predict(model, table)["label"]
    assert predict(model, (table.drop(columns="bought"), table["bought"]))["label"].tolist() == expected.tolist()


def test_frames_that_need_columns(table: Any) -> None:
    step = graphopt.compile(models.linear((4,), 2), loss=passes.CrossEntropy(), optimizer=passes.SGD())
    executor = graphopt.Executor(step)
    frame = table.rename(columns={"bought": "target"})
    with pytest.raises(
        GraphoptError,
        match=r"data: column 'city', row \d: expected a number, found '.*': graphopt.data.table\(.*'auto'\)",
    ):
        graphopt.fit(executor, frame[["age", "city", "target"]])
    with pytest.raises(GraphoptError, match=r"data: column 'age', row \d+: expected finite numbers, found NaN; .*auto"):
        graphopt.fit(executor, frame.assign(b=1, c=2, d=3)[["age", "b", "c", "d", "target"]])
    with pytest.raises(GraphoptError, match=r"expected columns that have learnt .* data = data.learn\(rows\)"):
        graphopt.fit(executor, data.table(frame, columns="auto"))
    trainer = graphopt.Trainer(models.linear((2,), 2), loss=passes.CrossEntropy())
    with pytest.raises(GraphoptError, match=r"expected float32, found object: .*auto'\) makes features of text"):
        trainer.fit(frame[["age", "city"]], frame["target"])
    numbers = frame.assign(age=1.0, b=1, c=2, d=3)[["age", "b", "c", "d", "target"]]
    assert graphopt.fit(executor, numbers, epochs=1)[0]["accuracy"] >= 0  # class strings


# The command


@pytest.mark.parametrize("call", messages.calls("tables_of_the_command"))
def test_messages(
    call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)

    def told(text: str, *given: str) -> str:
        Path("t.csv").write_text(text)
        command = ["data=csv", "data.path=t.csv", "folder=run", "fit.validation=null", *given]
        assert cli.main(command) == 1
        return capsys.readouterr().err

    said = eval(call, {"told": told})
    assert said.count("\n") == 1
    messages.check("tables_of_the_command", call, said.rstrip())
    assert not Path("run/config.yaml").exists()


TABLE = ("data=csv", "data.path=people.csv", "data.target=bought")


def test_the_command_writes_a_model_of_the_columns(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*TABLE, *QUICK, "folder=run"]) == 0
    said = capsys.readouterr().out
    assert "columns   age: number, " in said and "city: one-hot of 5, " in said and "classes   no, yes" in said
    rows, _ = data.hold_out(len(table), 0.2)
    columns = Columns.of("run/step.onnx")
    assert columns == data.csv("people.csv", target="bought", columns="auto").learn(rows).columns
    new = table.drop(columns="bought").head(20)
    new.to_csv("new.csv", index=False)
    runtime = onnxruntime.InferenceSession("run/trained.onnx")
    onnx.checker.check_model("run/trained.onnx", full_check=True)
    feeds = {name: np.asarray(new[name].astype(str)).astype(object)[:, None] for name in ("city", "member")}
    feeds["city"][new["city"].isna()] = ""
    days = (new["day"].to_numpy() - np.datetime64("1970-01-01")).astype("timedelta64[D]").astype(np.float32)
    feeds |= {"age": new[["age"]].to_numpy(np.float32), "day": days[:, None]}
    y, label, probabilities = runtime.run(["y", "label", "probabilities"], feeds)
    np.testing.assert_allclose(probabilities, scipy.special.softmax(y, axis=1), rtol=1e-5, atol=1e-7)
    for i, source in enumerate((["folder=run"], ["resume=run"], ["run/trained.onnx", "folder=out"])):
        read = [
            "data=csv",
            "data.path=new.csv",
            "data.target=null",
            *(["data.columns=auto"] if i < 2 else []),
        ]
        assert cli.main(["predict", *source, *read, *(QUICK[:2] if i < 2 else []), "predictions=p.csv"]) == 0
        with open("out/p.csv" if i == 2 else "run/p.csv", newline="", encoding="utf-8") as file:
            found = list(csv.DictReader(file))
        assert [row["label"] for row in found] == label.tolist()
        np.testing.assert_allclose([float(row["y_yes"]) for row in found], y[:, 1], rtol=1e-5, atol=1e-6)
        said = [float(row["probabilities_yes"]) for row in found]
        np.testing.assert_allclose(said, probabilities[:, 1], rtol=1e-5, atol=1e-6)


def test_the_page_shows_rows_as_the_file_has_them(table: Any) -> None:
    assert cli.main([*TABLE, *QUICK[1:], "fit.epochs=1", "folder=run", "quiet=true"]) == 0
    page = Path("run/report.html").read_text(encoding="utf-8")
    section = page[page.index("most in error") :].partition("</table>")[0]
    header = re.findall(r"<th [^>]*>(.*?)</th>", section)
    shown = [re.findall(r"<td[^>]*>(.*?)</td>", row) for row in re.findall(r"<tr[^>]*>(.*?)</tr>", section)]
    with open("people.csv", newline="", encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    shown = [dict(zip(header, cells, strict=True)) for cells in shown if cells]
    assert len(shown) == 12
    for row in shown:
        own = rows[int(row["row"])]
        assert {name: row[name] for name in ("age", "city", "day", "member")} == {
            name: own[name] for name in ("age", "city", "day", "member")
        }
        assert row["target"] == own["bought"]


def test_evaluation_reads_new_rows_as_the_run_did(table: Any) -> None:
    assert cli.main([*TABLE, *QUICK, "folder=run", "quiet=true"]) == 0
    few = table[table["bought"] == "yes"].head(8).assign(city="Bern")  # one class, one city
    few.to_csv("few.csv", index=False)
    read = ["data=csv", "data.path=few.csv", "data.target=bought", "data.columns=auto"]
    label = predict("run/trained.onnx", few)["label"]
    for source in (["folder=run"], ["run/trained.onnx", "folder=out"]):
        assert cli.main(["evaluate", *source, *read, "executor.threads=1"]) == 0
        found = json.loads(Path("out" if len(source) == 2 else "run", "metrics.json").read_text())
        assert found["accuracy"] == np.mean(label == "yes")


@pytest.mark.slow
def test_runs_of_tables_resume_and_go_on(table: Any, capsys: pytest.CaptureFixture[str]) -> None:
    run = [
        *TABLE,
        "data.columns={age: number, city: {kind: category, encode_as: ordinal}, day: date}",
        *QUICK[:2],
    ]
    assert cli.main([*run, "folder=whole"]) == 0
    often = "fit.checkpoint={every: 5 steps, keep: 2, best: null, keep_best: 0}"
    assert cli.main([*run, often, "folder=cut"]) == 0
    shutil.rmtree(sorted(Path("cut/checkpoints").glob("step-*"))[-1])
    assert cli.main([*run, often, "folder=cut", "resume=cut"]) == 0
    assert Path("cut/trained.onnx").read_bytes() == Path("whole/trained.onnx").read_bytes()
    table.head(50).to_csv("held.csv", index=False)
    assert cli.main([*run, "fit.validation=held.csv", "folder=other"]) == 0
    described = {"age": "number", "city": {"kind": "category", "encode_as": "ordinal"}, "day": "date"}
    assert Columns.of("other/trained.onnx") == Columns(described).learn(table)
    assert cli.main(["whole/trained.onnx", *TABLE, *QUICK[:2], "folder=more"]) == 0
    assert Columns.of("more/trained.onnx") == Columns.of("whole/trained.onnx")
    for name in ("hosts", "artifacts", "compile"):
        assert cli.main([name, *run, f"folder={name}"]) == 0
    assert json.loads(Path("hosts/columns.json").read_text())["features"][:2] == ["age", "city"]
    assert Columns.of("compile/step.onnx") == Columns.of("whole/step.onnx")
    binary = ["loss=binary_cross_entropy", "models.mlp.outputs=1"]
    assert cli.main([*run, *binary, "folder=binary"]) == 0
    outputs = predict("binary/trained.onnx", table)
    assert (outputs["label"] == np.where(outputs["y"][:, 0] > 0, "yes", "no")).all()
    numeric = ["data.target=age", "data.columns={city: category}", "loss=mean_squared_error"]
    table.dropna().to_csv("people.csv", index=False)
    assert cli.main([*TABLE, *QUICK[:2], *numeric, "folder=numeric"]) == 0
    assert [y.name for y in onnx.load("numeric/trained.onnx").graph.output] == ["y"]


@pytest.mark.slow
def test_workers_learn_the_same(table: Any) -> None:
    assert cli.main([*TABLE, *QUICK, "folder=one", "quiet=true"]) == 0
    assert cli.main([*TABLE, *QUICK, "folder=two", "quiet=true", "launcher=local", "launcher.workers=2"]) == 0
    assert Columns.of("one/trained.onnx") == Columns.of("two/trained.onnx")


@pytest.mark.usefixtures("plain")
def test_frames_of_plain_columns_are_read_by_name(tmp_path: Path) -> None:
    """By an executor that has trained on one, and by its file; arrays are read by place."""
    frame = pandas.DataFrame(RNG.standard_normal((30, 3)).astype(np.float32), columns=list("abc"))
    other = frame[["c", "a", "b"]].assign(row=range(30))
    step = graphopt.compile(mlp((3, 4, 2)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    executor = graphopt.Executor(step)
    graphopt.fit(executor, frame.assign(target=(frame.a > 0).astype(int)), epochs=1)
    graphopt.save(executor.trained(), file := tmp_path / "trained.onnx")
    expected = predict(executor, frame.to_numpy())["y"]
    for model in (executor, file):
        np.testing.assert_array_equal(predict(model, other)["y"], expected)
        with pytest.raises(GraphoptError, match=r"expected the column 'a', .* found b, c: rename.*array"):
            predict(model, frame[["b", "c"]])


@pytest.mark.usefixtures("plain")
def test_names_of_columns_are_no_part_of_what_resumes(tmp_path: Path) -> None:
    """A checkpoint of rows from a DataFrame continues on the same rows from arrays."""
    frame = pandas.DataFrame(RNG.standard_normal((30, 3)).astype(np.float32), columns=list("abc"))
    labels = (frame.a > 0).to_numpy().astype(np.int64)
    step = graphopt.compile(mlp((3, 4, 2)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.1))
    run = str(tmp_path / "run")
    graphopt.fit(graphopt.Executor(step), frame.assign(target=labels), epochs=1, checkpoint=run)
    records = graphopt.fit(graphopt.Executor(step), (frame.to_numpy(), labels), epochs=2, checkpoint=run, resume=run)
    assert len(records) == 2


def line_of_two() -> pandas.DataFrame:
    """Return rows whose target depends on two columns, on each in another way."""
    a, b = np.random.default_rng(0).standard_normal((2, 64)).astype(np.float32)
    return pandas.DataFrame({"a": a, "b": b, "target": 3 * a - b})


def learner() -> graphopt.Executor:
    model = models.linear((2,), 1)
    return graphopt.Executor(graphopt.compile(model, loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1)))


def loss_of(executor: graphopt.Executor, rows: Any) -> float:
    return float(graphopt.evaluate(executor, rows)["loss"])


def from_csv(rows: pandas.DataFrame) -> Any:
    rows.to_csv("t.csv", index=False)
    return data.csv("t.csv")


READERS = {"frame": lambda rows: rows, "table": data.table, "csv": from_csv}


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("reader", READERS)
@pytest.mark.parametrize("names", [("a", "b"), ("2019", "2020"), (0, 1)], ids=str)
def test_rows_of_every_reader_are_read_by_name(
    reader: str, names: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Names that are numbers are names, too; other names are refused, and leave the note as it is."""
    monkeypatch.chdir(tmp_path)
    read, rows = READERS[reader], line_of_two().rename(columns=dict(zip("ab", names, strict=True)))
    first, second = names
    other = rows[[second, first, "target"]].assign(**{"row": np.arange(64.0)})
    executor = learner()
    assert (
        graphopt.fit(executor, read(rows), epochs=20, batch_size=16, validation=read(other))[-1]["validation_loss"]
        < 1e-6
    )
    assert loss_of(executor, read(other)) < 1e-6
    graphopt.fit(executor, read(other), epochs=1, batch_size=16)
    assert column_names_in(data_inputs(executor.model)) == [str(first), str(second)]
    assert loss_of(executor, read(rows)) < 1e-6
    graphopt.save(executor.trained(), "trained.onnx")
    x = rows[[first, second]].to_numpy()
    np.testing.assert_array_equal(predict("trained.onnx", read(other))["y"], predict("trained.onnx", x)["y"])
    strange = data.table(rows.rename(columns={second: "c"}))
    for call in (lambda: loss_of(executor, strange), lambda: graphopt.fit(executor, strange, epochs=1)):
        with pytest.raises(
            GraphoptError,
            match=rf"expected the column '{second}', .* found {first}, c: rename",
        ):
            call()
    assert column_names_in(data_inputs(executor.model)) == [str(first), str(second)]


@pytest.mark.usefixtures("plain")
def test_columns_without_names_are_read_by_place(tmp_path: Path) -> None:
    rows, executor = line_of_two(), learner()
    graphopt.fit(executor, rows, epochs=20, batch_size=16)
    rows.to_csv(path := str(tmp_path / "t.csv"), index=False, header=False)
    unnamed = data.csv(path, header=False, target="2")
    assert unnamed.names == ["0", "1"] and loss_of(executor, unnamed) < 1e-6
    other = learner()
    graphopt.fit(other, unnamed, epochs=1)
    assert column_names_in(data_inputs(other.model)) is None


@pytest.mark.usefixtures("plain")
@pytest.mark.parametrize("cached", [False, True], ids=["whole", "cached"])
def test_checkpoints_carry_the_names_of_columns(cached: bool, tmp_path: Path) -> None:
    rows = line_of_two()
    other, run = rows[["b", "a", "target"]], str(tmp_path / "run")

    def opened() -> graphopt.Executor:
        loss, chosen = passes.MeanSquaredError(), passes.Parameters("layers.2.*") if cached else passes.Parameters()
        model = models.mlp((2,), 1, hidden=[4], seed=0)
        return graphopt.Executor(graphopt.compile(model, loss=loss, optimizer=passes.SGD(0.1), parameters=chosen))

    executor, options = opened(), {"batch_size": 16, "cache_features": cached, "checkpoint": run}
    graphopt.fit(executor, rows, epochs=1, **options)
    executor.save(path := tmp_path / "state.safetensors")
    (loaded := opened()).load(path)
    assert loaded.properties == {} and loss_of(loaded, other) == loss_of(executor, rows)
    with pytest.raises(
        GraphoptError, match=r"expected columns \['b', 'a'\] as in this run, found columns \['a', 'b'\]"
    ):
        graphopt.fit(again := opened(), other, epochs=2, resume=True, **options)
    assert len(graphopt.fit(again, rows, epochs=2, resume=True, **options)) == 2
    assert column_names_in(data_inputs(again.model)) == ["a", "b"]


def test_earlier_rows_are_read_by_name() -> None:
    rows = line_of_two()
    both = data.replay(data.table(rows), data.table(rows[["b", "a", "target"]]), share=1.0)
    np.testing.assert_array_equal(both.arrays["x"][64:], both.arrays["x"][:64])

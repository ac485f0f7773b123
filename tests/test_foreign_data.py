"""Data sets of Hugging Face and DataFrames: the bits of training on them are those of arrays."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import messages
import numpy as np
import pytest
from builders import mlp
from interruptions import StopAt, alike, same

import graphopt
import passes
from graphopt import cli, data
from graphopt.data import Batches
from graphopt.data.foreign import as_dataset, has_rows
from graphopt.errors import GraphoptError
from graphopt.training.evaluation import predict

RNG = np.random.default_rng(0)
X = RNG.standard_normal((103, 3))
DATA = {"x": X, "target": (X.sum(axis=1) > 0).astype(np.int64)}
OPTIONS: dict[str, Any] = {"epochs": 3, "batch_size": 10}


def executor() -> graphopt.Executor:
    step = graphopt.compile(mlp((3, 8, 2)), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
    return graphopt.Executor(step, threads=1)


def hugging_face(columns: dict[str, Any] = DATA) -> Any:
    datasets = pytest.importorskip("datasets")
    lists = {name: array.tolist() if isinstance(array, np.ndarray) else array for name, array in columns.items()}
    return datasets.Dataset.from_dict(lists)


@pytest.mark.parametrize("shuffle", [True, "consecutive", False])
@pytest.mark.slow
def test_a_hugging_face_data_set_gives_the_bits_of_arrays(shuffle: Any) -> None:
    one, other = executor(), executor()
    expected = graphopt.fit(one, DATA, **OPTIONS, shuffle=shuffle)
    found = graphopt.fit(other, hugging_face(), **OPTIONS, shuffle=shuffle)
    assert same(one, other)
    assert alike(found) == alike(expected)
    assert graphopt.evaluate(other, hugging_face()) == graphopt.evaluate(one, DATA)
    found, expected = (predict(one.trained(), rows)["y"] for rows in (hugging_face(), DATA))
    assert (found == expected).all()


def test_a_stopped_run_on_a_hugging_face_data_set_continues_bit_for_bit(tmp_path: Path) -> None:
    one, other = executor(), executor()
    expected = graphopt.fit(one, hugging_face(), **OPTIONS)
    graphopt.fit(executor(), hugging_face(), **OPTIONS, checkpoint=tmp_path, callbacks=[StopAt(13)])
    found = graphopt.fit(other, hugging_face(), **OPTIONS, checkpoint=tmp_path, resume=True)
    assert same(one, other)
    assert alike(found) == alike(expected)


def test_rows_are_read_when_a_batch_needs_them() -> None:
    read: list[int] = []

    def transform(batch: dict[str, list[Any]]) -> dict[str, Any]:
        read.extend(batch["target"])
        return {"x": [np.asarray(row, np.float32) * 2 for row in batch["x"]], "target": batch["target"]}

    rows = hugging_face({"x": X[:5], "target": np.arange(5) % 2, "name": list("abcde")}).with_transform(transform)
    batches = Batches(rows, executor().inputs)
    read.clear()
    found = batches.take(np.array([3, 1, 2]))
    assert (found["x"] == (X[[3, 1, 2]].astype(np.float32) * 2)).all()
    assert read == [1, 1, 0]  # once, for both columns


def test_types_of_columns() -> None:
    datasets = pytest.importorskip("datasets")
    images = RNG.integers(0, 256, (4, 5, 6), np.uint8)
    labels = datasets.Features(
        image=datasets.Array2D((5, 6), "uint8"),
        whole=datasets.Value("int32"),
        target=datasets.ClassLabel(names=["a", "b"]),
    )
    rows = {"image": images, "whole": np.arange(4), "target": [0, 1, 1, 0]}
    found = as_dataset(datasets.Dataset.from_dict(rows, labels))
    assert (found.labels, found.classes, found.outputs("classification")) == (("a", "b"), 2, 2)
    assert (np.asarray(found.arrays["image"]) == images).all()
    assert np.asarray(found.arrays["whole"]).tolist() == [0, 1, 2, 3]
    assert found.arrays["target"][1:3].tolist() == [1, 1]
    exact = as_dataset(hugging_face({"x": X, "target": X[:, 0]}))
    assert (np.asarray(exact.arrays["x"]) == X).all()
    assert (np.asarray(exact.arrays["target"]) == X[:, 0]).all()


def frame(library: Any, weight: bool = False) -> Any:
    columns = {f"feature_{i}": X[:, i] for i in range(3)}
    return library.DataFrame(
        {**columns, "target": DATA["target"], **({"sample_weight": X[:, 0] ** 2} if weight else {})}
    )


@pytest.mark.parametrize("name", ["pandas", "polars"])
@pytest.mark.slow
def test_a_data_frame_gives_the_bits_of_arrays(name: str) -> None:
    library = pytest.importorskip(name)
    one, other = executor(), executor()
    graphopt.fit(one, DATA, **OPTIONS)
    graphopt.fit(other, frame(library), **OPTIONS)
    assert same(one, other)
    found = as_dataset(frame(library, weight=True))
    assert (found.arrays["sample_weight"] == X[:, 0] ** 2).all()
    assert set(as_dataset(frame(library)[["feature_0", "feature_2"]]).arrays) == {"x"}
    with pytest.raises(GraphoptError, match="data: column 'kind', row 0: expected a number, found 'u'"):
        as_dataset(library.DataFrame({"kind": ["u", "v"], "target": [0, 1]}))


def test_what_has_rows() -> None:
    assert has_rows(DATA)
    assert has_rows(data.digits())
    assert has_rows((X, DATA["target"]))
    assert not any(map(has_rows, ([DATA], (DATA, DATA), iter([DATA]), 7, None)))
    with pytest.raises(GraphoptError, match=r"data: expected \(X, y\), arrays by name .* or a data set, found an int"):
        as_dataset(7)


def test_hugging_face_data_sets_learn_a_standardization() -> None:
    pipeline = graphopt.standard(standardize=passes.Standardize(), loss=passes.CrossEntropy(), optimizer=passes.AdamW())
    model = mlp((3, 8, 2))
    adapted = [graphopt.adapt(pipeline, model, rows)(model) for rows in (DATA, hugging_face())]
    assert same(*map(graphopt.Executor, adapted))


@pytest.mark.slow
def test_a_function_of_one_s_own_may_return_them_in_a_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "my_tables.py").write_text(
        "import polars\n"
        "def table():\n    return polars.DataFrame({'a': [1.0, 2, 3, 4], 'target': [0, 1, 0, 1]})\n"
        "def batches():\n    return [{'x': [[1.0]], 'target': [0]}]\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.chdir(tmp_path)
    run = ["model=mlp", "trust=[my_tables]", "fit.epochs=1", "executor.threads=1", "~data.images"]
    assert cli.main([*run, "data._target_=my_tables.table", "folder=one"]) == 0
    assert cli.main([*run, "data._target_=my_tables.batches", "folder=two"]) == 1
    assert "a DataFrame or a data set, found a list" in capsys.readouterr().err


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("foreign_data_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("foreign_data_mistakes", call, globals())

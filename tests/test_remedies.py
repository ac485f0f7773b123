"""A remedy in an error is right: what it says to do is done here, and keeps the numbers beside each other."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import messages
import numpy as np
import PIL.Image
import pytest
import yaml

import graphopt
import passes
from graphopt import GraphoptError, data, models

RNG = np.random.default_rng(0)
CHANNELS = RNG.standard_normal((20, 6, 6, 3)).astype(np.float32)


def executor(shape: tuple[int, ...] = (3, 6, 6)) -> graphopt.Executor:
    steps = {"loss": passes.CrossEntropy(), "optimizer": passes.SGD(0.1)}
    return graphopt.Executor(graphopt.compile(models.mlp(shape, 3), **steps), native=False)


def test_channels_last_are_not_scrambled_by_an_estimator() -> None:
    y = np.arange(20) % 3
    classifier = graphopt.OnnxClassifier(models.mlp((3, 6, 6), 3), max_iter=1)
    with pytest.raises(GraphoptError, match=r"^X: expected rows of shape \[3, 6, 6\].*X\.transpose\(0, 3, 1, 2\)$"):
        classifier.fit(CHANNELS, y)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        moved = classifier.fit(CHANNELS.transpose(0, 3, 1, 2), y)
    np.testing.assert_array_equal(moved.predict(CHANNELS.transpose(0, 3, 1, 2)).shape, (20,))
    with pytest.raises(ValueError, match="X has 6 features"):
        moved.predict(CHANNELS)


def table(path: Path, cells: list[str]) -> Any:
    path.write_text("a,y\n" + "\n".join(f'"{cell}",{"uv"[i % 2]}' for i, cell in enumerate(cells)))
    return lambda columns: data.csv(str(path), target="y", columns=columns).learn()


# Cells, and the descriptions of columns that read them.
COMMAS: dict[str, tuple[list[str], list[dict[str, str]]]] = {
    "thousands": ([f"{i},{i:03}" for i in range(1, 60)], [{"thousands": ","}, {"decimal": ","}]),
    "millions": ([f"{i},000,{i:03}" for i in range(1, 60)], [{"thousands": ","}]),
    "both": ([f"{i},{i:03}.5" for i in range(1, 60)], [{"thousands": ","}]),
    "fractions": ([f"{i},{i % 9}" for i in range(60)], [{"decimal": ","}]),
    "a fraction among thousands": (["1,500", "2,5"] * 30, [{"decimal": ","}]),
    "mixed": (["1,500,000", "2,5"] * 30, []),
}


@pytest.mark.parametrize("name", COMMAS)
@pytest.mark.parametrize("columns", ["auto", {"a": {"kind": "number"}}], ids=["auto", "number"])
def test_commas_are_read_as_the_remedy_says(name: str, columns: Any, tmp_path: Path) -> None:
    cells, expected = COMMAS[name]
    if not expected:
        if columns != "auto":
            with pytest.raises(GraphoptError) as found:
                table(tmp_path / "t.csv", cells)(columns)
            assert "decimal" not in str(found.value) and "thousands" not in str(found.value)
        return
    with pytest.raises(GraphoptError) as raised:
        table(tmp_path / "t.csv", cells)(columns)
    said = [yaml.safe_load(way) for way in re.findall(r"\{kind: number, [^}]*\}", str(raised.value))]
    assert sorted(map(str, said)) == sorted(str({"kind": "number", **way}) for way in expected)
    for way in said:
        read = table(tmp_path / "t.csv", cells)({"a": way})
        mark = way.get("thousands")
        number = [float(x.replace(mark, "") if mark else x.replace(",", ".")) for x in cells]
        np.testing.assert_allclose(read.columns.columns["a"].read(np.array(cells, object)), number)


def test_codes_keep_their_zeros(tmp_path: Path) -> None:
    codes = ["00001", "10001", "00017", "99999"] * 10
    (column,) = table(tmp_path / "t.csv", codes)("auto").columns.columns.values()
    assert isinstance(column, data.Category) and {*column.known} >= {*codes}
    (column,) = table(tmp_path / "t.csv", ["0", "10", "0.5", "-3"] * 10)("auto").columns.columns.values()
    assert isinstance(column, data.Number)


def test_codes_that_are_read_as_numbers_are_named(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("zip,target\n" + "".join(f"0000{i % 7},{i}\n" for i in range(40)))
    with pytest.warns(UserWarning, match=r"column 'zip': '00000' is read as the number 0: data\.columns=auto makes"):
        data.csv(str(tmp_path / "t.csv"))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        data.csv(str(tmp_path / "t.csv"), columns="auto")


def test_codes_of_a_target_are_names_of_classes(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,target\n" + "".join(f"{i},{8 + i % 3:02d}\n" for i in range(40)))
    read = data.csv(str(tmp_path / "t.csv"))
    assert read.labels == ("08", "09", "10")
    np.testing.assert_array_equal(read.arrays["target"], np.arange(40) % 3)


def test_one_class_in_all_rows_does_not_train(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,target\n" + "".join(f"{i},yes\n" for i in range(40)))
    read = data.csv(str(tmp_path / "t.csv"))
    with pytest.raises(GraphoptError, match="expected a target of two classes or more, found 'yes' in all rows"):
        graphopt.fit(executor((1,)), read, epochs=1, verbose=False)


@pytest.mark.parametrize(("numbers", "expected"), [((0, 3, 6), "4 of the 7 classes .* are 0, 3, 6"), ((0, 1, 2), "")])
def test_numbers_of_classes_that_are_left_out_are_told(numbers: Sequence[int], expected: str, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,target\n" + "".join(f"{i},{numbers[i % 3]}\n" for i in range(40)))
    read = data.csv(str(tmp_path / "t.csv"))
    model = models.linear((1,), 7)
    step = graphopt.compile(model, loss=passes.CrossEntropy(), optimizer=passes.SGD(0.01))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        graphopt.fit(graphopt.Executor(step, native=False), read, epochs=1, verbose=False)
    told = [str(warning.message) for warning in caught if "have no row" in str(warning.message)]
    assert len(told) == bool(expected) and all(re.search(expected, line) for line in told)


@pytest.mark.parametrize("names", [("train", "val"), ("Train", "Test"), ("training", "validation", "test")])
def test_the_parts_of_a_split_are_no_classes(names: tuple[str, ...], tmp_path: Path) -> None:
    for part in names:
        for kind in ("cat", "dog"):
            (tmp_path / part / kind).mkdir(parents=True)
            PIL.Image.new("RGB", (4, 4), "red").save(tmp_path / part / kind / "1.png")
    with pytest.raises(GraphoptError, match="found the parts of a split") as found:
        data.images(str(tmp_path))
    paths = re.search(r"data\.path=(\S+) and fit\.validation=(\S+)$", str(found.value))
    assert paths is not None
    for path in paths.groups():
        assert data.images(path).labels == ("cat", "dog")
    assert data.images(str(tmp_path), labels=sorted(names)).labels == tuple(sorted(names))


def test_other_names_are_classes(tmp_path: Path) -> None:
    for kind in ("train", "car"):
        (tmp_path / kind).mkdir()
        PIL.Image.new("RGB", (4, 4), "red").save(tmp_path / kind / "1.png")
    assert data.images(str(tmp_path)).labels == ("car", "train")


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("remedies_mistakes"))
def test_mistakes_are_told_in_a_line(call: str) -> None:
    messages.refused("remedies_mistakes", call, globals())

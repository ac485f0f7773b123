"""Numbers with separators and units, and dates of other countries, are asked for by name, and read as asked."""

from __future__ import annotations

import gzip
import re
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest
import yaml

from graphopt import GraphoptError, data
from graphopt.data import Category, Columns, Date, Number

NUMBERS = np.random.default_rng(0).uniform(1000, 99_000, 40).round(2)


def swapped(text: str) -> str:
    return text.translate(str.maketrans(",.", ".,"))


# Cells as a file has them, and what they mean by the first way that the error names; None for a category.
FORMATS: dict[str, tuple[list[str], Any]] = {
    "percent": ([f"{i}%" for i in range(40)], np.arange(40.0)),
    "percent apart": ([f"{i / 8} %" for i in range(40)], np.arange(40) / 8),
    "few percents": ([f"{i % 3}%" for i in range(40)], np.arange(40.0) % 3),
    "dollars": ([f"${i}" for i in range(40)], np.arange(40.0)),
    "negative dollars": ([f"-${i + 1}" for i in range(40)], -np.arange(1.0, 41)),
    "dollars with commas": ([f"${x:,.2f}" for x in NUMBERS], NUMBERS),
    "euros": ([swapped(f"{x:,.2f} €") for x in NUMBERS], NUMBERS),
    "a currency code": ([f"CHF {x:.2f}" for x in NUMBERS], NUMBERS),
    "a currency code after": ([f"{x:.2f} EUR" for x in NUMBERS], NUMBERS),
    "points and commas": ([swapped(f"{x:,.2f}") for x in NUMBERS], NUMBERS),
    "millions": (
        [f"{1000 * x:,.0f}" for x in NUMBERS],
        np.array([float(f"{1000 * x:.0f}") for x in NUMBERS]),
    ),
    "apostrophes": ([f"{x:,.2f}".replace(",", "'") for x in NUMBERS], NUMBERS),
    "spaces": ([swapped(f"{x:,.2f}").replace(".", "\u202f") for x in NUMBERS], NUMBERS),
    "many kilograms": ([f"{x} kg" for x in NUMBERS], NUMBERS),
    "few quarters": ([f"Q{i % 4 + 1}" for i in range(40)], None),
    "few sizes": ([f"{i % 4 + 1} rooms" for i in range(40)], None),
    "codes": ([f"{i % 9:05d}" for i in range(40)], None),
    "codes with letters": ([f"A{i % 9}" for i in range(40)], None),
    "telephones": ([f"04{i % 5} 123 456" for i in range(40)], None),
}


def read(cells: list[str], column: Any) -> np.ndarray:
    columns = Columns({"x": column}).learn({"x": cells})
    return columns.columns["x"].read(np.array(cells, object))


def ways(message: str) -> list[str]:
    """Return the descriptions that an error names, in order."""
    return re.findall(r"\{kind: [^}]*\}", message)


@pytest.mark.parametrize("name", FORMATS)
def test_numbers_in_other_forms_are_read_as_the_error_says(name: str) -> None:
    cells, expected = FORMATS[name]
    table = {"x": [*cells, ""], "target": [0, 1] * 20 + [1]}
    if expected is None:
        assert isinstance(Columns.auto(table).columns["x"], Category)
        return
    with pytest.raises(GraphoptError, match="column 'x': expected plain numbers, found") as found:
        data.table(table, columns="auto")
    way = yaml.safe_load(ways(str(found.value))[0])
    np.testing.assert_allclose(read(cells, way), expected, rtol=1e-12)
    with pytest.raises(GraphoptError, match="column 'x', row 0: expected a number") as plain:
        data.table(table, columns={"x": "number"}).learn()
    with pytest.raises(GraphoptError) as numeric:
        data.table(table)
    assert ways(str(found.value))[0] in str(plain.value)
    assert ways(str(found.value))[0] in str(numeric.value)


@pytest.mark.parametrize("form", ["%d/%m/%Y", "%m/%d/%Y", "%d.%m.%Y", "%Y/%m/%d", "%d %b %Y", "%d/%m/%y", "%d-%b-%Y"])
@pytest.mark.parametrize("time", ["", " %H:%M"])
def test_dates_in_other_forms_are_read_as_the_error_says(form: str, time: str) -> None:
    days = pd.date_range("2023-01-28 10:30", periods=60, freq="7D")
    cells = [*days.strftime(form + time)]
    table = {"x": cells, "target": [0, 1] * 30}
    with pytest.raises(GraphoptError, match="column 'x': expected dates such as 2026-11-26, found") as found:
        data.table(table, columns="auto")
    found_ways = [yaml.safe_load(way) for way in ways(str(found.value))]
    assert [way["format"] for way in found_ways] == [form + time]
    expected = (days.normalize() - pd.Timestamp("1970-01-01")).days.to_numpy()
    np.testing.assert_array_equal(read(cells, found_ways[0]), expected)
    with pytest.raises(GraphoptError, match=re.escape(f"it is {{kind: date, format: '{form + time}'}}")):
        data.table(table, columns={"x": "date"}).learn()


def test_what_has_two_meanings_names_both() -> None:
    cases = {
        ("01/02/2024", "03/04/2024"): ["%d/%m/%Y", "%m/%d/%Y"],
        ("1,500", "2,250"): [{"thousands": ","}, {"decimal": ","}],
        ("1.500 €", "2.250 €"): [{}, {"decimal": ",", "thousands": "."}],
    }
    for cells, expected in cases.items():
        with pytest.raises(GraphoptError) as found:
            Columns.auto({"x": [*cells] * 30})
        for way, own in zip(map(yaml.safe_load, ways(str(found.value))), expected, strict=True):
            given = {"format": own} if isinstance(own, str) else own
            assert {name: x for name, x in way.items() if name not in ("kind", "unit")} == given
            read([*cells], way)


def test_points_that_may_group_thousands() -> None:
    with pytest.raises(GraphoptError, match=r"group thousands, found '1\.500' beside whole numbers") as found:
        Columns.auto({"x": ["1.500", "900", "12.250"]})
    (way,) = ways(str(found.value))
    assert read(["1.500", "900", "12.250"], yaml.safe_load(way)).tolist() == [1500, 900, 12250]
    assert read(["1.500", "900"], "number").tolist() == [1.5, 900]
    with pytest.raises(GraphoptError, match="data: column 'y': expected points that begin fractions"):
        data.table({"x": [1, 2], "y": ["1.500", "900"]}, target="y")
    with pytest.warns(UserWarning, match=r"column 'x': '1\.100' is read as 1\.1: if points group thousands"):
        Columns.auto({"x": [f"{i}.{i}00" for i in range(1, 10)] + [f"{i}.{i}" for i in range(101, 130)]})
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for cells in (["1.5", "900"], ["0.123", "5"], ["1.500", "1500"], ["-0.250", "3.125"]):
            assert isinstance(Columns.auto({"x": cells}).columns["x"], Number)


def test_a_format_takes_no_other_cell() -> None:
    column = Number(thousands=",", unit="$", impute=0.0)
    assert read(["$1,500.25", "-$2", "$ 3", "", "NA", "$-7"], column)[[0, 1, 2, 5]].tolist() == [
        1500.25,
        -2,
        3,
        -7,
    ]
    for wrong in ("1,500", "$1,50", "€2", "$1,500,0", "$", "5%", "$0,500"):
        with pytest.raises(GraphoptError, match=r"row 0: expected a number with '\$', found"):
            read([wrong], column)
    with pytest.raises(GraphoptError, match=r"thousands=\.\.\.\): expected another character than decimal"):
        Number(decimal=",", thousands=",")
    assert Date(format="%d/%m/%Y").described() == "{kind: date, format: '%d/%m/%Y'}"


def test_the_options_survive_the_file_of_the_model() -> None:
    from graphopt import models

    columns = Columns({"x": Number(thousands=",", unit="$")}).learn({"x": ["$1,000", "$3,000"]})
    again = Columns.of(columns.before(models.linear((1,), 1)))
    assert again is not None and again.encode({"x": ["$2,000"]}).tolist() == [[0.0]]


@pytest.mark.parametrize("cells", [["5%", "7%"], ["$1", "$2"], ["1,500", "2,500"], ["01/02/2024", "28/03/2024"]])
def test_a_target_in_such_a_form_is_refused(cells: list[str]) -> None:
    with pytest.raises(GraphoptError, match="column 'y': expected plain numbers, or names of classes, found"):
        data.table({"a": range(40), "y": cells * 20}, target="y", columns="auto")
    named = data.table({"a": range(40), "y": cells * 20}, target="y", labels=cells, columns="auto")
    assert named.arrays["target"][:2].tolist() == [0, 1]


def test_a_target_of_different_texts_is_refused() -> None:
    with pytest.raises(GraphoptError, match="1,000 classes, found 60 different texts in 60 rows"):
        data.table({"a": range(60), "y": [f"u{i}" for i in range(60)]}, target="y", columns="auto")


@pytest.mark.parametrize(
    ("labels", "cells", "expected"),
    [
        ([0, 1], [1, 0, 1], [1, 0, 1]),
        ([1, 0], ["1", "0", "1"], [0, 1, 0]),
        ([2.0, 3.0], [3.0, 2.0, 2.0], [1, 0, 0]),
        ([False, True], np.array([True, False, True]), [1, 0, 1]),
    ],
)
def test_labels_may_be_numbers(labels: Any, cells: Any, expected: list[int]) -> None:
    read = data.table({"a": [1, 2, 3], "target": cells}, labels=labels)
    assert read.arrays["target"].tolist() == expected and len(read.labels or ()) == 2


WORKBOOK = b"PK\x03\x04\x14\x00\x06\x00" + bytes(range(256))


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [
        ("t.xlsx", WORKBOOK, r"found an Excel workbook \(\.xlsx\): save the sheet as CSV"),
        ("t.ods", WORKBOOK, r"found a sheet of OpenDocument \(\.ods\): save the sheet as CSV"),
        ("t.zip", WORKBOOK, "found a zip archive: unpack it"),
        ("t.xls", b"\xd0\xcf\x11\xe0" + bytes(range(256)), r"found an Excel workbook \(\.xls\)"),
        ("t.csv.gz", gzip.compress(b"a,target\n1,2\n", mtime=0), "found a file compressed by gzip: unpack it"),
        ("t.csv", "a,target\n1,2\n".encode("utf-16"), "found text in UTF-16: save it as UTF-8"),
    ],
)
@pytest.mark.parametrize("reader", [data.csv, data.parquet])
def test_files_of_another_format_are_named(name: str, content: bytes, said: str, reader: Any, tmp_path: Path) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(GraphoptError, match=said):
        reader(str(tmp_path / name))

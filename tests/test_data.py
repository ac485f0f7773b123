"""Data sets from files, and the batches that a training graph takes."""

from __future__ import annotations

import itertools
import os
import shlex
import string
import threading
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import messages
import numpy as np
import onnx_ir as ir
import pytest
from builders import mlp

import graphopt
import passes
from graphopt import data
from graphopt.cli.tuning.proposal import read
from graphopt.data import Batches, Dataset, prefetched
from graphopt.data.language.tokenizer import CHARACTERS
from graphopt.errors import GraphoptError

X = np.arange(20, dtype=np.float32).reshape(5, 4)
LABELS = np.array([0, 1, 2, 1, 0])


def inputs(loss: Any = None) -> dict[str, ir.Value]:
    model = graphopt.standard(loss=loss or passes.CrossEntropy(), gradient=None, simplify=None)(mlp((4, 8, 3)))
    return {v.name: v for v in model.graph.inputs if v.name in ("x", "target", "sample_weight")}


def taken(arrays: Any, loss: Any = None, **options: Any) -> dict[str, np.ndarray]:
    return Batches(arrays, inputs(loss), **options).take(range(1, 3))


def test_batches_have_the_graph_s_types_and_share_memory_where_they_can() -> None:
    batch = taken({"x": X, "target": LABELS})
    assert batch["x"].dtype == np.float32
    assert np.shares_memory(batch["x"], X)
    assert taken({"x": X.astype(np.float64), "target": LABELS.astype(np.uint8)})["x"].dtype == np.float32
    assert taken({"x": X.astype(np.float64), "target": LABELS.astype(np.uint8)})["target"].dtype == np.int64


def test_a_vector_and_a_column_stand_for_each_other() -> None:
    model = graphopt.standard(loss=passes.MeanSquaredError(), gradient=None, simplify=None)(mlp((4, 1)))
    target = {v.name: v for v in model.graph.inputs if v.name in ("x", "target")}
    assert Batches({"x": X, "target": LABELS}, target).take(range(2))["target"].shape == (2, 1)
    assert taken({"x": X, "target": LABELS[:, None]})["target"].shape == (2,)


def test_nan_can_be_allowed() -> None:
    assert np.isnan(taken({"x": X * np.nan, "target": LABELS}, allow_nan=True)["x"]).all()


def test_ignored_and_binary_labels() -> None:
    taken({"x": X, "target": LABELS - 1}, passes.CrossEntropy(ignore_index=-1))
    signs = np.sign(X - 9.5)[:, :3]
    taken({"x": X, "target": signs}, passes.Hinge())
    with pytest.raises(graphopt.GraphoptError, match=r"expected labels -1 and 1, found -?0"):
        taken({"x": X, "target": signs * 0}, passes.Hinge())
    taken({"x": X, "target": signs * 0 + 0.3}, passes.BinaryCrossEntropy())
    with pytest.raises(graphopt.GraphoptError, match="expected labels 0 and 1"):
        taken({"x": X, "target": signs}, passes.BinaryCrossEntropy())


def test_npz(tmp_path: Path) -> None:
    np.savez(tmp_path / "a.npz", x=X, target=LABELS)
    assert (data.npz(str(tmp_path / "a.npz")).arrays["x"] == X).all()
    (tmp_path / "b.npz").write_text("no archive")
    with pytest.raises(graphopt.GraphoptError, match="expected a NumPy archive"):
        data.npz(str(tmp_path / "b.npz"))
    with pytest.raises(graphopt.GraphoptError, match="no such file"):
        data.npz(str(tmp_path / "c.npz"))
    np.savez(tmp_path / "d.npz", x=np.array([{}, "s"], object))
    with pytest.raises(graphopt.GraphoptError, match="expected arrays of numbers"):
        data.npz(str(tmp_path / "d.npz"))


def test_npy_is_read_as_it_is_needed(tmp_path: Path) -> None:
    np.save(tmp_path / "x.npy", np.where(X == 19, np.nan, X))
    np.save(tmp_path / "target.npy", LABELS)
    found = data.npy(str(tmp_path))
    assert all(isinstance(array, np.memmap) for array in found.arrays.values())
    batches = Batches(found, inputs())
    assert (batches.take(np.array([0, 3]))["x"] == X[[0, 3]]).all()
    with pytest.raises(graphopt.GraphoptError, match="found NaN in row 4"):
        batches.take(range(3, 5))
    with pytest.raises(graphopt.GraphoptError, match="expected a folder with a file NAME"):
        data.npy(str(tmp_path / "x.npy"))


def test_csv_columns(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text("a,b,kind,w,target\n1,2.5,u,1,0\n3,,v,2,1\n")
    found = data.csv(str(path), features=["a", "b"], sample_weight="w")
    assert found.arrays["x"].dtype == np.float64
    assert np.isnan(found.arrays["x"][1, 1])
    assert found.arrays["target"].tolist() == [0, 1]
    assert found.arrays["sample_weight"].tolist() == [1, 2]
    assert data.csv(str(path), features=["a"]).arrays["x"].dtype == np.int64
    labelled = data.csv(str(path), features=["a"], target="kind", labels=["v", "u"])
    assert (labelled.arrays["target"].tolist(), labelled.classes) == ([1, 0], 2)
    assert set(data.csv(str(path), features={"p": "a", "q": ["b", "w"]}).arrays) == {"p", "q", "target"}


def read_csv(tmp_path: Path, text: str, options: dict[str, Any]) -> Any:
    (tmp_path / "t.csv").write_text(text)
    return data.csv(str(tmp_path / "t.csv"), **options)


def test_csv_without_a_header(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("1;2;0\n3;4;1\n")
    found = data.csv(str(tmp_path / "t.csv"), target=2, header=False, delimiter=";")
    assert found.arrays["x"].tolist() == [[1, 2], [3, 4]]


@pytest.mark.parametrize("word", ["par1", "PAR1", "BZh1", "bzh", "arrow1", "GIF8", "gif8x", "PK"])
def test_a_header_may_begin_like_a_file_of_another_format(word: str, tmp_path: Path) -> None:
    assert read_csv(tmp_path, f"{word},b,target\n1,2,3\n", {}).names == [word, "b"]


@pytest.mark.parametrize("start", ["<HTML>", "<!DocType html>", "version https://git-lfs.github.com/spec/v1"])
def test_text_of_another_format_is_named(start: str, tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match=r"found a (web page|pointer of Git LFS)"):
        read_csv(tmp_path, f"{start}\n", {})


def test_a_database_is_named(tmp_path: Path) -> None:
    """Also one of which all bytes are characters."""
    with pytest.raises(GraphoptError, match="found a database of SQLite"):
        read_csv(tmp_path, "SQLite format 3\0a,b,target\n1,2,3\n", {})


def test_errors_write_options_as_a_shell_takes_them(tmp_path: Path) -> None:
    with pytest.raises(GraphoptError, match=r"unknown column 'w'; known: a, target$"):
        read_csv(tmp_path, "a,target\n1,2\n", {"sample_weight": "w"})
    with pytest.raises(GraphoptError, match=r"unknown column 'w'; known: a, target: data.features=\[\.\.\.\] names"):
        read_csv(tmp_path, "a,target\n1,2\n", {"features": ["w"]})
    with pytest.raises(GraphoptError) as raised:
        read_csv(tmp_path, "a,target\n1,New York\n2,\n3,it's\n", {})
    (field,) = shlex.split(str(raised.value).partition("name the classes, ")[2])
    assert read(field) == ["New York", "it's"]
    rows = "".join(f"1,{letter}{letter}\n" for letter in string.ascii_lowercase)
    with pytest.raises(GraphoptError, match=r"tt\]' and 6 more$"):
        read_csv(tmp_path, f"a,target\n{rows}2,\n", {})


def test_parquet(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table({"a": [1.0, None], "target": [0, 1]}), tmp_path / "t.parquet")
    found = data.parquet(str(tmp_path / "t.parquet"))
    assert np.isnan(found.arrays["x"][1, 0])
    assert found.arrays["target"].tolist() == [0, 1]
    (tmp_path / "u.parquet").write_text("no parquet at all")
    with pytest.raises(graphopt.GraphoptError, match="expected a Parquet file or an Arrow file"):
        data.parquet(str(tmp_path / "u.parquet"))


def arrow_file(path: Path, table: Any, *, stream: bool = False, compression: str | None = None) -> str:
    ipc = pytest.importorskip("pyarrow").ipc
    start = ipc.new_stream if stream else ipc.new_file
    with start(str(path), table.schema, options=ipc.IpcWriteOptions(compression=compression)) as writer:
        writer.write_table(table, max_chunksize=7)
    return str(path)


@pytest.mark.parametrize("compression", [None, "lz4", "zstd"])
@pytest.mark.parametrize("stream", [False, True])
def test_arrow_files_and_streams(tmp_path: Path, stream: bool, compression: str | None) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    random = np.random.default_rng(0)
    columns = {
        "a": random.normal(size=20).astype(np.float32),
        "b": random.integers(0, 9, 20),
        "kind": random.choice(["u", "v"], 20),
        "target": random.integers(0, 3, 20),
    }
    table = pyarrow.table(columns)
    parquet.write_table(table, tmp_path / "t.parquet")
    path = arrow_file(tmp_path / "t.arrow", table, stream=stream, compression=compression)
    for options in ({"features": ["a", "b"]}, {"features": "b", "target": "kind", "labels": ["v", "u"]}):
        found = data.arrow(path, **options).arrays
        expected = data.parquet(str(tmp_path / "t.parquet"), **options).arrays
        assert all((found[name] == array).all() for name, array in expected.items())
        assert {name: x.dtype for name, x in found.items()} == {name: x.dtype for name, x in expected.items()}
    assert (data.arrow(path, features=["a", "b"]).arrays["x"][:, 0] == columns["a"]).all()


def test_feather(tmp_path: Path) -> None:
    feather = pytest.importorskip("pyarrow.feather")
    table = pytest.importorskip("pyarrow").table({"a": [1.5, None], "kind": ["u", "v"], "target": [0, 1]})
    feather.write_feather(table, str(tmp_path / "t.feather"))
    found = data.arrow(str(tmp_path / "t.feather"), features=["a"])
    assert np.isnan(found.arrays["x"][1, 0])
    assert found.arrays["target"].tolist() == [0, 1]
    (tmp_path / "old.feather").write_bytes(b"FEA1" + bytes(40) + b"FEA1")
    with pytest.raises(GraphoptError, match=r"old\.feather: expected a Parquet file or an Arrow file"):
        data.arrow(str(tmp_path / "old.feather"))


@pytest.mark.parametrize("reader", [data.arrow, data.parquet])
def test_columns_of_lists_of_a_fixed_size_are_arrays(tmp_path: Path, reader: Any) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    images = np.arange(120.0, dtype=np.float32).reshape(10, 3, 4)
    lists = pyarrow.FixedSizeListArray.from_arrays
    nested = lists(lists(pyarrow.array(images.ravel()), 4), 3)
    pair, target = lists(pyarrow.array(np.arange(20)), 2), np.arange(10) % 3
    table = pyarrow.table({"image": nested, "pair": pair, "one": np.arange(10.0), "target": target})
    path = str(tmp_path / "t")
    parquet.write_table(table, path) if reader is data.parquet else arrow_file(tmp_path / "t", table)
    assert (reader(path, features=["image"]).arrays["x"] == images).all()
    joined = reader(path, features=["one", "pair"]).arrays["x"]
    assert (joined == np.stack([np.arange(10), np.arange(0, 20, 2), np.arange(1, 20, 2)], axis=1)).all()
    assert (reader(path, features=["one"], target="pair").arrays["target"] == joined[:, 1:]).all()
    with pytest.raises(GraphoptError, match=r"expected columns of cells or lists .*'image' \[3, 4\], 'one' \[\]"):
        reader(path, features=["image", "one"])
    missing = pyarrow.table({"a": pyarrow.array([[1, 2], None], pyarrow.list_(pyarrow.int64(), 2)), "target": [0, 1]})
    parquet.write_table(missing, path) if reader is data.parquet else arrow_file(tmp_path / "t", missing)
    with pytest.raises(GraphoptError, match="column 'a': expected a list in every row, found rows without"):
        reader(path)


def test_damaged_arrow_files(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"a": np.arange(100.0), "target": np.arange(100)})
    for stream in (False, True):
        path = tmp_path / f"{stream}.arrow"
        content = Path(arrow_file(path, table, stream=stream, compression="lz4")).read_bytes()
        for end in range(0, len(content) - 20, 97):
            path.write_bytes(content[:end])
            with pytest.raises(GraphoptError) as error:
                data.arrow(str(path))
            assert str(error.value).startswith(str(path))
            assert "\n" not in str(error.value)


@pytest.mark.parametrize("kind", ["arrow", "parquet"])
def test_a_file_of_few_bytes_and_many_rows_is_refused(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    writer = pytest.importorskip("pyarrow.feather" if kind == "arrow" else "pyarrow.parquet")
    read: Any = getattr(data, kind)
    path = str(tmp_path / f"t.{kind}")
    table = pyarrow.table({"a": np.zeros(2**20), "target": np.zeros(2**20)})
    if kind == "arrow":
        writer.write_feather(table, path, compression="zstd")
    else:
        writer.write_table(table, path)
    read(path)
    monkeypatch.setattr(data.files, "_UNSUSPICIOUS", 2**20)
    with pytest.raises(GraphoptError, match=r"at most 100 times the file.*data\.expansion=\d+ to read"):
        read(path)
    assert len(read(path, expansion=10**6)) == 2**20


def test_whole_numbers_beyond_int64_are_floats(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text(f"a,target\n{10**20},1\n-3,0\n")
    assert data.csv(str(tmp_path / "t.csv")).arrays["x"].tolist() == [[1e20], [-3]]


def header(text: str, version: int = 1) -> bytes:
    """Return the start of an array's file, and 80 bytes."""
    length = (len(text) + 1).to_bytes(2 if version == 1 else 4, "little")
    return b"\x93NUMPY" + bytes([version, 0]) + length + text.encode() + b"\n" + bytes(80)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"\x93NUMPY",
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (-5, 4), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9), }"),
        header("{'descr': '<f4', 'fortran_order': False, 'shape': 'x', }"),
        header("{'descr': '|O', 'fortran_order': False, 'shape': (5, 4), }"),
        header("{'descr': '<f4'"),
        header("[" * 3000),
        header("[" * 3000, version=3),
    ],
)
@pytest.mark.parametrize("reader", [data.npy, data.npz])
def test_broken_arrays(tmp_path: Path, content: bytes, reader: Any) -> None:
    path = tmp_path / "x.npy"
    path.write_bytes(content)
    if reader is data.npz:
        with zipfile.ZipFile(tmp_path / "x.npz", "w") as archive:
            archive.write(path, "x.npy")
        path = tmp_path / "x.npz"
    with pytest.raises(graphopt.GraphoptError) as error:
        reader(str(path if reader is data.npz else tmp_path))
    assert str(error.value).startswith(str(path))
    assert "\n" not in str(error.value)


def test_damaged_archives(tmp_path: Path) -> None:
    path = tmp_path / "a.npz"
    np.savez_compressed(path, x=np.arange(1000.0), target=np.arange(1000))
    content = bytearray(path.read_bytes())
    for place in range(60, 200):
        damaged = content.copy()
        damaged[place] ^= 0xFF
        path.write_bytes(damaged)
        with pytest.raises(graphopt.GraphoptError):
            data.npz(str(path))


def test_a_small_archive_of_a_large_array_is_refused_before_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = str(tmp_path / "a.npz")
    np.savez_compressed(path, x=np.zeros((2**18, 4)), target=np.zeros(2**18))
    data.npz(path)
    monkeypatch.setattr(data.files, "_UNSUSPICIOUS", 2**20)
    with pytest.raises(graphopt.GraphoptError, match=r"at most 100 times the file.*data\.expansion=\d+ to read"):
        data.npz(path)
    assert len(data.npz(path, expansion=2000)) == 2**18


def test_pipes_and_folders_are_no_data(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.npy")
    for reader in (data.arrow, data.csv, data.npz, data.parquet, data.text):
        with pytest.raises(graphopt.GraphoptError, match=r"x\.npy: expected a file, found a device or a pipe"):
            reader(str(tmp_path / "x.npy"))
        with pytest.raises(graphopt.GraphoptError, match="expected a file, found a folder"):
            reader(str(tmp_path))
    with pytest.raises(graphopt.GraphoptError, match="found a device or a pipe"):
        data.npy(str(tmp_path))


@pytest.mark.parametrize(
    ("columns", "error"),
    [
        ({"a": [[1], [2, 3]], "target": [0, 1]}, "column 'a': expected numbers, found list<"),
        ({"a": [{"k": 1}, {"k": 2}], "target": [0, 1]}, "column 'a': expected numbers, found struct<"),
        ({"a": [b"1", b"x"], "target": [0, 1]}, "column 'a', row 0: expected a number"),
    ],
)
def test_parquet_columns_of_no_numbers(tmp_path: Path, columns: dict[str, Any], error: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(graphopt.GraphoptError, match=error):
        data.parquet(str(tmp_path / "t.parquet"))


def test_the_only_features_go_to_the_only_input() -> None:
    renamed = mlp((4, 8, 3))
    renamed.graph.input[0].name = renamed.graph.node[0].input[0] = "pixels"
    model = graphopt.standard(loss=passes.CrossEntropy(), gradient=None, simplify=None)(renamed)
    named = {v.name: v for v in model.graph.inputs if v.name in ("pixels", "target")}
    batch = Batches(Dataset({"x": X, "target": LABELS}, features="x"), named).take(range(2))
    assert set(batch) == {"pixels", "target"}


def test_samples(monkeypatch: pytest.MonkeyPatch) -> None:
    digits = data.digits().arrays
    assert digits["x"].shape == (1797, 1, 8, 8)
    monkeypatch.setattr(Path, "is_file", lambda path: False)  # as if scikit-learn moved its file
    for name, array in data.digits().arrays.items():
        assert digits[name].dtype == array.dtype and np.array_equal(digits[name], array)
    monkeypatch.undo()
    assert data.digits(images=False).arrays["x"].shape == (1797, 64)
    assert data.diabetes().outputs("regression") == 1
    found = data.text(context=10, characters=1000)
    assert found.arrays["x"].shape == (99, 10)
    assert (found.arrays["x"][1:, 0] == found.arrays["target"][:-1, -1]).all()
    assert found.outputs("classification") == len(CHARACTERS)


def test_text_of_one_s_own(tmp_path: Path) -> None:
    (tmp_path / "t.txt").write_text("abcabcabc\N{SNOWMAN}")
    assert data.text(str(tmp_path / "t.txt"), context=4).arrays["x"].shape == (2, 4)
    with pytest.raises(graphopt.GraphoptError, match="more than 9 characters, found 9"):
        data.text(str(tmp_path / "t.txt"), context=9)
    with pytest.raises(graphopt.GraphoptError, match="no such file"):
        data.text(str(tmp_path / "u.txt"))
    with pytest.raises(graphopt.GraphoptError, match=r"data\.context: expected 1 token or more, found 0"):
        data.text(str(tmp_path / "t.txt"), context=0)


def test_batches_made_ahead_come_in_order_and_the_thread_ends() -> None:
    before = threading.active_count()
    for depth in (0, 1, 3, 20):
        assert list(prefetched(range(10), depth)) == list(range(10))
        assert list(prefetched([], depth)) == []
    assert threading.active_count() == before


def test_an_exception_comes_where_its_batch_would_have() -> None:
    def failing() -> Iterator[int]:
        yield from (0, 1)
        raise GraphoptError("data 'x': torn")

    ahead = prefetched(failing(), 3)
    assert [next(ahead), next(ahead)] == [0, 1]
    with pytest.raises(GraphoptError, match="torn"):
        next(ahead)
    with pytest.raises(GraphoptError, match="prefetch: expected 0 or more batches, found -1"):
        prefetched([], -1)


def test_a_thread_makes_no_more_batches_than_are_asked_for_and_ends_with_its_consumer() -> None:
    made = []
    before = threading.active_count()
    ahead = prefetched((made.append(i) or i for i in itertools.count()), 3)
    assert [next(ahead), next(ahead)] == [0, 1]
    assert threading.active_count() == before + 1
    ahead.close()
    assert threading.active_count() == before
    assert len(made) <= 5


def test_a_batch_is_made_before_it_is_asked_for() -> None:
    made = threading.Event()

    def batches() -> Iterator[int]:
        yield 0
        made.set()
        yield 1

    ahead = prefetched(batches(), 1)
    assert next(ahead) == 0
    assert made.wait(10)
    assert list(ahead) == [1]


def _written(path: Path, table: Any) -> str:
    """Write a table with the library that the ending of a file's name stands for."""
    import polars
    import pyarrow

    if path.suffix == ".parquet":
        pyarrow.parquet.write_table(table, path, compression="zstd")
    elif path.suffix == ".polars":
        polars.from_arrow(table).write_ipc(path, compression="zstd")
    elif path.suffix == ".stream":
        options = pyarrow.ipc.IpcWriteOptions(compression="zstd")
        with pyarrow.ipc.new_stream(str(path), table.schema, options=options) as writer:
            writer.write_table(table)
    else:
        pyarrow.feather.write_feather(table, str(path), compression="zstd")
    return str(path)


ENDINGS = ("parquet", "feather", "stream", "polars")


@pytest.mark.parametrize("ending", ENDINGS)
def test_texts_and_lists_are_read_from_what_other_libraries_write(tmp_path: Path, ending: str) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.feather")
    x = np.random.default_rng(0).standard_normal((100, 2))
    texts = ["cat", "dog"] * 50
    table = pyarrow.table({"a": x[:, 0], "b": x[:, 1], "kind": texts, "unused": ["x"] * 100})
    read = data.parquet if ending == "parquet" else data.arrow
    found = read(_written(tmp_path / f"t.{ending}", table), features=["a", "b"], target="kind", labels=["cat", "dog"])
    assert (found.arrays["x"] == x).all()
    assert found.arrays["target"].tolist() == [0, 1] * 50
    with pytest.raises(GraphoptError, match="unknown column 'c'; known: a, b, kind, unused"):
        read(str(tmp_path / f"t.{ending}"), features=["c"], target=None)


@pytest.mark.parametrize("ending", ENDINGS[1:])
def test_arrow_buffers_are_measured_before_they_are_expanded(
    tmp_path: Path, ending: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each text has a megabyte; the file has a few kilobytes."""
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.feather")
    monkeypatch.setattr("graphopt.data.files._UNSUSPICIOUS", 2**20)
    table = pyarrow.table({"x": np.arange(50.0), "unused": ["x" * 10**6] * 50})
    path = _written(tmp_path / f"t.{ending}", table)
    before = pyarrow.total_allocated_bytes()
    with pytest.raises(GraphoptError, match=r"at most 100 times the file.*data\.expansion=\d+ to read"):
        data.arrow(path, features=["x"], target=None)
    assert pyarrow.total_allocated_bytes() - before < 10**6


@pytest.mark.slow
def test_a_column_that_is_not_used_is_not_read(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    pytest.importorskip("pyarrow.parquet")
    table = pyarrow.table({"x": np.arange(500.0), "unused": ["x" * 10**6] * 500})
    path = _written(tmp_path / "t.parquet", table)
    pool = pyarrow.system_memory_pool()
    assert (data.parquet(path, features=["x"], target=None).arrays["x"][:, 0] == np.arange(500)).all()
    assert pool.bytes_allocated() < 10**8
    with pytest.raises(GraphoptError, match=r"column 'unused', row 0: expected a number, found 'x+") as caught:
        data.parquet(path, target=None)  # which holds the text once
    assert len(str(caught.value)) < 500


def test_rows_without_bytes_count(tmp_path: Path) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    schema = pyarrow.schema({"x": pyarrow.null()})
    path = str(tmp_path / "t.stream")
    with pyarrow.ipc.new_stream(path, schema) as writer:
        writer.write_batch(pyarrow.record_batch([pyarrow.nulls(10**9)], schema=schema))
    with pytest.raises(GraphoptError, match="at most 100 times the file"):
        data.arrow(path, target=None)


@pytest.mark.slow
def test_one_long_cell_widens_no_column(tmp_path: Path) -> None:
    """NumPy would hold 4 bytes for each character of the longest cell, in each row."""
    path = tmp_path / "t.csv"
    path.write_text("a,target\n" + "1" * 100_000 + ",1\n" + "1,2\n" * 100_000)
    with pytest.raises(GraphoptError, match=r"column 'a', row 0: expected a number, found '1+"):
        data.csv(str(path))


@pytest.mark.whole
@pytest.mark.parametrize("call", messages.calls("data_mistakes"))
def test_mistakes_are_told_in_a_line(call: str, tmp_path: Path) -> None:
    messages.refused("data_mistakes", call, {**globals(), "tmp_path": tmp_path})

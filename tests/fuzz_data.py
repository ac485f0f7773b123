"""Data files for the fuzzer."""

from __future__ import annotations

import functools
import io
import random
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from builders import mlp
from fuzz_models import _flip

import graphopt
import passes
from graphopt import data
from graphopt.data import Batches

DTYPES = ["f4", "f8", "i8", "i4", "u1", "u8", "?", "c8", "f2", "S3", "U3", "M8[s]", ">f4", "O"]
SHAPES = [(5, 4), (5,), (), (0, 4), (5, 4, 1), (4, 5), (1, 4)]
FIELDS = [
    "1", "0", "2", "-1", "1.5", "", "nan", "inf", "1e400", "99999999999999999999", "-9223372036854775809", "a",
    '"', "'", "\0", "\ufeff", "1,5", " 3 ", "0x10", "1_000", "True", "None", "\N{SNOWMAN}", "\x1a", "\u0663",
]  # fmt: skip
DELIMITERS = [",", ";", "\t", "", ",,", "\n", '"', " ", "\0", "\N{SNOWMAN}"]
HEADERS = [
    "{'descr': '<f4', 'fortran_order': False, 'shape': (-5, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (9223372036854775807, 9), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (1000000000,), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': (5.5, 4), }",
    "{'descr': '<f4', 'fortran_order': False, 'shape': 'x', }",
    "{'descr': '|O', 'fortran_order': False, 'shape': (5, 4), }",
    "{'descr': [('a', '<f4')], 'fortran_order': False, 'shape': (5, 4), }",
    "{'descr': '<f4', 'fortran_order': 3, 'shape': (5, 4), }",
    "{'descr': '<V0', 'fortran_order': False, 'shape': (5, 4), }",
    "{'descr': '<f4'",
    "[" * 2000,
    "",
]


def _array(draw: random.Random) -> np.ndarray:
    if draw.random() < 0.85:
        return np.arange(20, dtype=np.float32).reshape(5, 4)
    dtype, shape = np.dtype(draw.choice(DTYPES)), draw.choice(SHAPES)
    return np.ones(shape).astype(dtype) if dtype.kind not in "SUMO" else np.zeros(shape, dtype)


def _target(draw: random.Random) -> np.ndarray:
    return np.array([0, 1, 2, 1, 0]) if draw.random() < 0.85 else _array(draw)


def _npy(draw: random.Random, array: np.ndarray) -> bytes:
    if draw.random() < 0.1:
        header = draw.choice(HEADERS).encode("latin1") + b"\n"
        version = draw.choice([b"\x01\x00", b"\x02\x00", b"\x03\x00", b"\x09\x00"])
        length = len(header).to_bytes(2 if version == b"\x01\x00" else 4, "little")
        return b"\x93NUMPY" + version + length + header + b"\0" * 80
    file = io.BytesIO()
    np.save(file, array, allow_pickle=True)
    content = file.getvalue()
    return _flip(draw, content) if draw.random() < 0.2 else content


def _npz(draw: random.Random) -> bytes:
    file = io.BytesIO()
    method = draw.choice([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_LZMA, zipfile.ZIP_BZIP2])
    with zipfile.ZipFile(file, "w", method) as archive:
        for name in (
            "x",
            "target",
            *draw.choices(["x", "sample_weight", "../e", " ", "n"], k=draw.randrange(2)),
        ):
            end = draw.choice([".npy", ".npy", ".npy", ".npy", ".npy", ".txt"])
            array = _target(draw) if name == "target" else _array(draw)
            archive.writestr(f"{name}{end}", _npy(draw, array))
    content = file.getvalue()
    return _flip(draw, content) if draw.random() < 0.3 else content


@functools.cache
def _bomb() -> bytes:
    """Return an archive of 4 MB whose only array is 4 GB of zeros."""
    file = io.BytesIO()
    header = b"{'descr': '|u1', 'fortran_order': False, 'shape': (4294967296,), }\n"
    archive = zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED, compresslevel=1)
    with archive, archive.open("x.npy", "w", force_zip64=True) as member:
        member.write(b"\x93NUMPY\x01\x00" + len(header).to_bytes(2, "little") + header)
        for _ in range(4096):
            member.write(bytes(2**20))
    return file.getvalue()


def _csv(draw: random.Random) -> bytes:
    delimiter = draw.choice([",", ",", ",", ";", "\t"])
    names = ["a", "b", "c", "d", "target"]
    if draw.random() < 0.3:
        names[draw.randrange(5)] = draw.choice([*names, *FIELDS])
    rows = [names, *[[str(i + j) for j in range(4)] + [str(i % 3)] for i in range(5)]]
    for _ in range(draw.choice([0, 0, 1, 1, 3])):
        row = draw.choice(rows)
        place = draw.randrange(len(row) + 1)
        action = draw.choice(["set", "set", "set", "insert", "remove"])
        if action == "insert":
            row.insert(place, draw.choice(FIELDS))
        elif place < len(row):
            row[place : place + 1] = [draw.choice(FIELDS)] if action == "set" else []
        if not row:
            row.append("")
    text = draw.choice(["\n", "\r\n", "\n\n"]).join(delimiter.join(row) for row in rows)
    content = text.encode(draw.choice(["utf-8", "utf-8", "utf-8-sig", "utf-16", "latin1"]), errors="replace")
    return _flip(draw, content) if draw.random() < 0.3 else content


def _columnar(draw: random.Random, reader: Any) -> bytes:
    import pyarrow
    import pyarrow.parquet

    kinds: list[Any] = [
        [1.0, 2.0, 3.0, 4.0, 5.0],
        [1, None, 3, 4, 5],
        [[1], [2, 3], [], None, [5]],
        ["1", "x", None, "", "5"],
        [{"k": 1}] * 5,
        [b"1"] * 5,
        [True, False, True, None, True],
        [None] * 5,
        [2**63 - 1] * 5,
        [np.datetime64("2020-01-01", "s")] * 5,
    ]
    kinds.append(pyarrow.FixedSizeListArray.from_arrays(pyarrow.array(np.arange(10.0)), 2))
    columns = {name: draw.choice(kinds[:1] * 6 + kinds) for name in "abcd"}
    columns["target"] = draw.choice([[0, 1, 2, 1, 0]] * 8 + kinds)
    names = list(columns)
    if draw.random() < 0.1:
        names[draw.randrange(5)] = draw.choice([*names, *FIELDS])
    table = pyarrow.table([pyarrow.array(column) for column in columns.values()], names=names)
    file = io.BytesIO()
    if reader is data.parquet:
        pyarrow.parquet.write_table(table, file)
    else:
        start = draw.choice([pyarrow.ipc.new_file, pyarrow.ipc.new_stream])
        options = pyarrow.ipc.IpcWriteOptions(compression=draw.choice([None, "lz4", "zstd"]))
        with start(file, table.schema, options=options) as writer:
            writer.write_table(table, max_chunksize=draw.choice([2, 5]))
    return _flip(draw, file.getvalue()) if draw.random() < 0.4 else file.getvalue()


def write(draw: random.Random, folder: Path) -> tuple[Any, str, dict[str, Any]]:
    """Write a file, mutated, and return its reader, its path and the reader's options."""
    reader = draw.choice([data.npz, data.npy, data.csv, data.parquet, data.arrow, data.text])
    path = folder / "data"
    options: dict[str, Any] = {}
    if reader is data.npy:
        path.mkdir()
        (path / "x.npy").write_bytes(_npy(draw, _array(draw)))
        (path / "target.npy").write_bytes(_npy(draw, _target(draw)))
        return reader, str(path), options
    if reader is data.text:
        options = {"context": draw.choice([1, 4, 10**9, 0, -1])}
        content = _flip(draw, b"the quick brown fox jumps over the lazy dog" * 3)
    elif reader is data.npz:
        content = _bomb() if draw.random() < 0.02 else _npz(draw)
    elif reader is data.csv:
        content = _csv(draw)
        if draw.random() < 0.3:
            options["delimiter"] = draw.choice(DELIMITERS)
        options["header"] = draw.random() < 0.9
    else:
        content = _columnar(draw, reader)
    if reader in (data.csv, data.parquet, data.arrow):
        if draw.random() < 0.2:
            options["target"] = draw.choice(["a", "b", ["a", "b"], [], "zzz", "4"])
        if draw.random() < 0.2:
            options["labels"] = draw.choice([["0", "1", "2"], [], ["x"], ["0", "0", "1", "2"]])
        if draw.random() < 0.2:
            options["features"] = draw.choice([["a"], [], {"x": ["a", "b", "c", "d"]}, {"p": "a"}, {}])
        if draw.random() < 0.2:
            options["sample_weight"] = draw.choice(["a", "target", "zzz"])
    path.write_bytes(content)
    return reader, str(path), options


@functools.cache
def _inputs() -> dict[str, Any]:
    step = graphopt.compile(mlp((4, 5, 3)), loss=passes.CrossEntropy(), optimizer=passes.SGD(0.01))
    return {str(x.name): x for x in step.graph.inputs if x.name in ("x", "target")}


def attempt(case: tuple[Any, str, dict[str, Any]], folder: Path) -> None:
    """Read the file, and cut it into batches."""
    reader, path, options = case
    batches = Batches(reader(path, **options), _inputs())
    for rows in batches.split(range(len(batches)), 2):
        batches.take(rows)

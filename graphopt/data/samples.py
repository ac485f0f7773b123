"""Real data that an installation carries."""

from __future__ import annotations

import string
from typing import Any

import numpy as np

from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import check_regular, reason
from graphopt.errors import GraphoptError

CHARACTERS = string.printable


def digits(*, images: bool = True) -> Dataset:
    """Return scikit-learn's 1797 handwritten digits, gray from 0 to 1, as labels and images of 1 x 8 x 8.

    Args:
        images: rows are images; otherwise flat, of 64 numbers.
    """
    bunch = _datasets("digits").load_digits()
    x = np.asarray(bunch.data / 16, np.float32)
    arrays = {"x": x.reshape(-1, 1, 8, 8) if images else x, TARGET: bunch.target.astype(np.int64)}
    return Dataset(arrays, features="x", classes=10)


def diabetes(*, standardize: bool = True) -> Dataset:
    """Return scikit-learn's 442 diabetes patients: ten measurements and the disease's progress in a year.

    Args:
        standardize: measurements have mean 0 and deviation 1; otherwise they are as measured.
    """
    x, target = _datasets("diabetes").load_diabetes(return_X_y=True, scaled=False)
    if standardize:
        x = (x - x.mean(axis=0)) / x.std(axis=0)
    return Dataset({"x": x.astype(np.float32), TARGET: target.astype(np.float32)}, features="x")


def text(path: str | None = None, *, context: int = 64, characters: int | None = 200_000) -> Dataset:
    """Return runs of characters, and for each character the one that follows it.

    Characters are numbered by their place in Python's `string.printable`; others are left out.

    Args:
        path: a text file; by default the Python reference that every Python carries for `help()`.
        context: the length of a run.
        characters: how much of the text to take; all by default.

    Raises:
        GraphoptError: the file is missing, is not text, or is shorter than a run.
    """
    if context < 1:
        raise GraphoptError(f"data.context: expected runs of 1 character or more, found {context}")
    places = {character: i for i, character in enumerate(CHARACTERS)}
    tokens = np.array([places[c] for c in _read(path) if c in places][:characters], np.int64)
    runs = (len(tokens) - 1) // context
    if runs < 1:
        raise GraphoptError(f"data=text: expected more than {context} characters, found {len(tokens)}")
    x, following = (tokens[i : i + runs * context].reshape(runs, context) for i in (0, 1))
    return Dataset({"x": x, TARGET: following}, features="x", classes=len(CHARACTERS))


def _read(path: str | None) -> str:
    if path is None:
        from pydoc_data.topics import topics

        return "\n".join(topics[name] for name in sorted(topics))
    check_regular(path)
    try:
        with open(path, encoding="utf-8") as file:
            return file.read()
    except OSError as error:
        raise GraphoptError(f"{path}: {reason(error)}") from error
    except UnicodeDecodeError as error:
        raise GraphoptError(f"{path}: expected text in UTF-8: {error}") from error


def _datasets(name: str) -> Any:
    try:
        import sklearn.datasets
    except ImportError as error:
        raise GraphoptError(f"data={name} needs scikit-learn: pip install scikit-learn") from error
    return sklearn.datasets

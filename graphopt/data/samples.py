"""Load sample data that is part of installed packages."""

from __future__ import annotations

import importlib.util
import string
from pathlib import Path

import numpy as np

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import imported, reading
from graphopt.errors import GraphoptError

CHARACTERS = string.printable
SAMPLES = "sklearn.datasets", "scikit-learn"


@checked()
def digits(*, images: bool = True) -> Dataset:
    """Return scikit-learn's 1797 handwritten digits: labels, and gray images of 1 x 8 x 8 from 0 to 1.

    Args:
        images: keep the shape of images; otherwise, flatten them to 64 numbers.
    """
    pixels, labels = _digits()
    x = np.asarray(pixels / 16, np.float32).reshape((-1, 1, 8, 8) if images else (-1, 64))
    return Dataset({"x": x, TARGET: labels.astype(np.int64)}, features="x", classes=10)


def _digits() -> tuple[np.ndarray, np.ndarray]:
    """Read scikit-learn's file of digits where it lies today, since importing scikit-learn takes a second."""
    package = importlib.util.find_spec("sklearn")
    file = Path(package.origin).parent / "datasets/data/digits.csv.gz" if package and package.origin else None
    if file is None or not file.is_file():
        return imported("data=digits", *SAMPLES).load_digits(return_X_y=True)
    table = np.loadtxt(file, delimiter=",")
    return table[:, :-1], table[:, -1]


@checked()
def diabetes(*, standardize: bool = True) -> Dataset:
    """Return scikit-learn's 442 diabetes patients: ten measurements, and the disease progression after a year.

    Args:
        standardize: scale the measurements of all rows to mean 0 and standard deviation 1; `passes.Standardize` does so
            in the model, by the rows that train.
    """
    x, target = imported("data=diabetes", *SAMPLES).load_diabetes(return_X_y=True, scaled=False)
    if standardize:
        x = (x - x.mean(axis=0)) / x.std(axis=0)
    return Dataset({"x": x.astype(np.float32), TARGET: target.astype(np.float32)}, features="x")


@checked()
def text(path: str | None = None, *, context: int = 64, characters: int | None = 200_000) -> Dataset:
    """Return sequences of characters; the target of each character is the next one.

    Characters are numbered by their index in Python's `string.printable`. Other characters are omitted.

    Args:
        path: a text file; by default, the Python reference that Python includes for `help()`.
        context: the length of a sequence.
        characters: the number of characters to read; None for all.

    Raises:
        GraphoptError: the file is missing, is not text, or is shorter than a sequence.
    """
    if context < 1:
        raise GraphoptError(f"data.context: expected 1 character or more, found {context}")
    if path is None:
        from pydoc_data.topics import topics

        content = "\n".join(topics[name] for name in sorted(topics))
    else:
        with reading(path, "text in UTF-8"), open(path, encoding="utf-8") as file:
            content = file.read()
    places = {character: i for i, character in enumerate(CHARACTERS)}
    tokens = np.array([places[c] for c in content if c in places][:characters], np.int64)
    runs = (len(tokens) - 1) // context
    if runs < 1:
        raise GraphoptError(f"data=text: expected more than {context} characters, found {len(tokens)}")
    x, following = (tokens[i : i + runs * context].reshape(runs, context) for i in (0, 1))
    return Dataset({"x": x, TARGET: following}, features="x", classes=len(CHARACTERS))

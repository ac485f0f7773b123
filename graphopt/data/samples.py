"""Load sample data that is part of installed packages."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import numpy as np

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.files import imported

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

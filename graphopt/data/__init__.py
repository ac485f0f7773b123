"""Read data sets from files and cut them into batches. This package imports `graph`."""

from graphopt.data.batches import Batches
from graphopt.data.dataset import Dataset
from graphopt.data.files import arrow, csv, npy, npz, parquet
from graphopt.data.loader import Loader
from graphopt.data.prefetch import prefetched
from graphopt.data.samples import diabetes, digits, text

__all__ = [
    "Batches",
    "Dataset",
    "Loader",
    "arrow",
    "csv",
    "diabetes",
    "digits",
    "npy",
    "npz",
    "parquet",
    "prefetched",
    "text",
]

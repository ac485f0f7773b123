"""Read data to train on: named arrays from files, and the batches that a training graph takes. Imports `graph`."""

from graphopt.data.batches import Batches
from graphopt.data.dataset import Dataset
from graphopt.data.files import csv, npy, npz, parquet
from graphopt.data.loader import Loader
from graphopt.data.prefetch import prefetched
from graphopt.data.samples import diabetes, digits, text

__all__ = [
    "Batches",
    "Dataset",
    "Loader",
    "csv",
    "diabetes",
    "digits",
    "npy",
    "npz",
    "parquet",
    "prefetched",
    "text",
]

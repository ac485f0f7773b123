"""Mix rows of earlier data into new data, so that what trains on both forgets less."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np

from graphopt.arguments import checked
from graphopt.data import columnar, files
from graphopt.data.dataset import Dataset
from graphopt.data.foreign import as_dataset, check_both_named, relabelled
from graphopt.errors import GraphoptError
from graphopt.files import ReadName


@checked()
def replay(path: ReadName | Dataset, replay: ReadName | Dataset, *, share: float = 0.5, seed: int = 0) -> Dataset:
    """Return new rows, and beside them rows of earlier data that are drawn (Robins 1995, "rehearsal").

    Args:
        path: the new data: a file, of which the reader's default options are taken, or a data set.
        replay: the earlier data, whose arrays have the same names and shapes of rows. Classes have names in both or
            in neither.
        share: the number of earlier rows for each new one; there are at most all of them.
        seed: the seed of the earlier rows.

    Raises:
        GraphoptError: a file is no data, the arrays differ, or classes have names in one of them alone, or names that
            the new data lack.

    >>> new, earlier = (graphopt.data.Dataset({"x": numpy.full((4, 2), i)}) for i in (1.0, 0.0))
    >>> graphopt.data.replay(new, earlier, share=0.5).arrays["x"][:, 0].tolist()
    [1.0, 1.0, 1.0, 1.0, 0.0, 0.0]
    """
    if not (isinstance(share, int | float) and 0 <= share < float("inf")):
        raise GraphoptError(f"replay: share: expected a number of 0 or more, found {share!r}")
    if not (isinstance(seed, int) and seed >= 0):
        raise GraphoptError(f"replay: seed: expected a whole number of 0 or more, found {seed!r}")
    new, earlier = (x if isinstance(x, Dataset) else _read(x) for x in (path, replay))
    check_both_named(earlier, new.labels, "replay")
    earlier = relabelled(earlier, new.labels, "replay")
    if new.column_names is not None:
        earlier = as_dataset(earlier, names=new.column_names)
    drawn = np.sort(np.random.default_rng(seed).permutation(len(earlier))[: round(share * len(new))])
    parts = [{**x.arrays, **x.table} for x in (new, earlier)]
    forms = [{name: x.shape[1:] for name, x in part.items()} for part in parts]
    if forms[0] != forms[1]:
        raise GraphoptError(f"replay: expected arrays with rows of shapes {forms[0]}, found {forms[1]}")
    both = {name: np.concatenate([x[:], parts[1][name][drawn]]) for name, x in parts[0].items()}
    arrays, table = ({name: both[name] for name in x} for x in (new.arrays, new.table))
    return dataclasses.replace(new, arrays=arrays, table=table)


def _read(path: ReadName) -> Dataset:
    """Return the data of a file, which the end of its name tells, or of a folder of .npy files."""
    readers = {**files.ENDINGS, **columnar.ENDINGS}
    name = "npy" if Path(path).is_dir() else readers.get(Path(path).suffix.lower())
    if name is None:
        raise GraphoptError(
            f"replay: expected a file {', '.join(readers)}, or a folder of .npy, found {path}: give the data set of "
            "another reader"
        )
    data: Dataset = getattr(columnar if name in columnar.__all__ else files, name)(path)
    return data

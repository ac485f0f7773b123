"""Compute the outputs of an inference model on a data set."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from graphopt.data import Batches, Dataset
from graphopt.data.foreign import as_dataset
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load
from graphopt.graph.roles import Role, set_role
from graphopt.graph.values import name_of
from graphopt.runtime.device import Device
from graphopt.runtime.session import Session


def predict(
    model: Source,
    data: Dataset | Mapping[str, np.ndarray],
    *,
    batch_size: int = 256,
    allow_nan: bool = False,
    device: Device | None = None,
) -> dict[str, np.ndarray]:
    """Return the outputs of a model on all rows of a data set, by name. Targets and weights in the data are ignored.

    Args:
        model: an inference model.
        data: a data set, or arrays named like the model's inputs.
        batch_size: the number of rows per call; a model with a fixed batch uses its own.
        allow_nan: accept data that contains NaN or infinities.
        device: where to compute; by default, the CPU.

    Raises:
        GraphoptError: the data does not fit the model, or an output does not have a row for each row of data.
    """
    loaded = load(model)
    data = as_dataset(data)
    weights = loaded.graph.initializers
    inputs = {name_of(x): set_role(x, Role.DATA) for x in loaded.graph.inputs if x.name not in weights}
    if not data.inputs():
        raise GraphoptError(f"data: expected arrays {', '.join(inputs)}, found targets alone")
    batches = Batches(Dataset(data.inputs(), features=data.features), inputs, allow_nan=allow_nan)
    size = batches.fixed_size or batch_size
    session = Session(device or Device(), loaded)
    parts: dict[str, list[np.ndarray]] = {}
    for rows in Batches.split(np.arange(len(batches)), size):
        filled = np.resize(rows, size) if batches.fixed_size else rows
        for name, array in session.compute_arrays(batches.take(filled)).items():
            if np.ndim(array) == 0 or len(array) != len(filled):
                raise GraphoptError(
                    f"output {name!r}: expected a row for each of {len(filled)} rows of data, found shape "
                    f"{list(np.shape(array))}"
                )
            parts.setdefault(name, []).append(array[: len(rows)])
    return {name: np.concatenate(arrays) for name, arrays in parts.items()}

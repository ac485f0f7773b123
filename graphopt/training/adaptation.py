"""Let the passes of a pipeline learn options from the rows that `fit` trains on."""

from __future__ import annotations

from graphopt.data.foreign import as_dataset, has_rows
from graphopt.data.loader import Shuffle, TrainingRows, hold_out
from graphopt.errors import GraphoptError
from graphopt.graph.loading import Source, load
from graphopt.pipeline import Pipeline
from graphopt.training.options import Data


def adapt(
    pipeline: Pipeline,
    model: Source,
    data: Data,
    *,
    validation: float | Data | None = 0.2,
    shuffle: Shuffle = True,
    seed: int = 0,
    allow_nan: bool = False,
) -> Pipeline:
    """Return a pipeline whose passes have learnt from the training rows of a data set.

    `passes.Standardize()` learns means and standard deviations, and `class_weights="balanced"` of `passes.CrossEntropy`
    and `passes.BinaryCrossEntropy` learns class weights. Held-out rows do not count. Give `validation`, `shuffle` and
    `seed` as to `fit`.

    Args:
        pipeline: the pipeline; it is not changed.
        model: the inference model that the pipeline will rewrite.
        data: data with rows, as in `fit`; arrays that are memory-mapped or read from files are read once for each pass,
            in pieces.
        validation: the share of rows to hold out; with other data or None, all rows train.
        shuffle: whether held-out rows are drawn, as in `fit`.
        seed: the seed of what is drawn.
        allow_nan: accept NaN and infinities in arrays that no pass learns from.

    Raises:
        GraphoptError: the data does not fit the model, or a pass cannot learn from it.

    >>> from graphopt import data, models
    >>> digits, model = data.digits(), models.mlp((1, 8, 8), 10)
    >>> loss = passes.CrossEntropy(class_weights="balanced")
    >>> pipeline = graphopt.standard(standardize=passes.Standardize(), loss=loss, optimizer=passes.AdamW())
    >>> executor = graphopt.Executor(graphopt.adapt(pipeline, model, digits)(model))
    >>> graphopt.fit(executor, digits, epochs=5)[-1]["accuracy"] > 0.9
    True
    """
    if not pipeline.learns:
        return pipeline
    if not has_rows(data):
        raise GraphoptError(
            f"adapt: expected a data set or arrays by name, found {type(data).__name__}: give the passes their "
            "numbers, such as passes.Standardize(mean, scale)"
        )
    data, loaded = as_dataset(data), load(model)
    share = validation if isinstance(validation, int | float) else 0.0
    rows, _ = hold_out(len(data), share, shuffle=shuffle, seed=seed)
    return pipeline.adapted(loaded, TrainingRows(data, loaded, rows, allow_nan=allow_nan).read)

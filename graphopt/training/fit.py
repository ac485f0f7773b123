"""Train on a data set: `fit`, which prepares a run for `TrainingLoop`, and `adapt`, by which passes learn from it."""

from __future__ import annotations

import dataclasses
import math
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import numpy as np
import onnx_ir as ir

from graphopt.arguments import checked, keywords_of
from graphopt.communicator import digest
from graphopt.data import Dataset
from graphopt.data.dataset import TARGET
from graphopt.data.foreign import as_dataset, check_both_named, has_rows, relabelled
from graphopt.data.loader import LEAST_POISSON, Runs, Shuffle, TrainingRows, fixed_batch, hold_out
from graphopt.data.streams import Stream
from graphopt.errors import GraphoptError, some
from graphopt.graph import state
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import OWNER, note_column_names
from graphopt.graph.roles import TargetSpec, data_inputs
from graphopt.graph.state import Pruning
from graphopt.graph.storage import model_digest
from graphopt.graph.values import name_of
from graphopt.pipeline import Pipeline, check_pipeline
from graphopt.runtime.device import Device
from graphopt.runtime.executor import Executor
from graphopt.runtime.session import Session
from graphopt.training.callbacks.callback import Callback, Run, callbacks_of
from graphopt.training.callbacks.progress import ProgressBar
from graphopt.training.callbacks.terminal import is_watched
from graphopt.training.evaluation import HeldOut, check_executor
from graphopt.training.features import FrozenLayers
from graphopt.training.loop import TrainingLoop
from graphopt.training.metrics import listed
from graphopt.training.metrics import metrics as metrics_of
from graphopt.training.options import Data, FitOptions
from graphopt.training.progress import versions
from graphopt.training.records import Records
from graphopt.training.sources import Epochs, RowEpochs, StreamEpochs, read_batches


@checked("give X and y as one tuple, fit(executor, (X, y)), and name the options")
@keywords_of(FitOptions)
def fit(executor: Executor, data: Data, **keywords: Any) -> Records:
    """Train on all batches of a data set, and return a record per epoch.

    A record has the epoch, the number of steps so far, the mean of each reported number over the epoch, the
    `learning_rate`, `validation_loss` and metrics of held-out rows, with `validation_` before names that training
    reports, too, `seconds`, `samples_per_second`, and `tokens_per_second` of text. The records are a list, which shows
    itself as a table.

    The order of rows in an epoch depends only on the seed and on the number of epochs so far. Two epochs, followed by
    `executor.save`, `load` and two more epochs, therefore give the same bits as four epochs. With `resume`, an
    interrupted run continues from a checkpoint, in the middle of an epoch too, to the same bits.

    Data may also be an iterable of batches, such as the data loader of another library. It keeps its own order and
    needs no length: an epoch is one pass over it. With `resume`, it continues where it was if it has `state_dict` and
    `load_state_dict`, or its iterators have `get_state` and `set_state`. Otherwise it starts over, and a warning says
    so.

    Ctrl-C, SIGTERM, SIGHUP and SIGUSR1 take effect between two steps. With `checkpoint`, the state is written before.

    Args:
        executor: the executor of a training graph.
        data: a tuple `(X, y)` or `(X, y, sample_weight)`, whose X feeds the only input; arrays named like the model's
            inputs, and `target`; a DataFrame; a data set; or an iterable of batches: mappings from these names to
            arrays, tensors or lists.
        epochs: the number of times to train on all rows; with 0, the record is that of the model as it is.
        steps_per_epoch: the number of batches of an iterable in an epoch; None for one pass, which needs an end.
        batch_size: the number of rows of a batch; the last batch of an epoch may have fewer. Batches of an iterable
            have their own.
        shuffle: True to draw the held-out rows and the order of each epoch; `consecutive` to draw the order of
            batches of neighbouring rows; False to keep the order of the rows and hold out the last ones.
        sampling: `poisson` draws each row for each batch by itself, with the probability of `batch_size` / rows, as
            private training needs it: batches differ in size, and an epoch is rows / `batch_size` of them. A batch
            that would be empty is drawn again. Their seed is a secret of the run, which its checkpoints keep.
        seed: the seed of what is drawn otherwise.
        validation: the share of rows to hold out, other data, or None. An iterable has no rows to hold out.
        validation_every: the number of epochs from one validation to the next; the last epoch is always validated.
        metrics: the metrics of held-out rows: names such as `accuracy`, names with options such as
            `{"top_k": {"k": 3}}`, and functions of all targets and predictions; or one of them. None for the accuracy
            of a classification, and for R2 and the mean absolute error of a regression.
        allow_nan: train on data that contains NaN or infinities.
        prefetch: the number of batches that a thread prepares while steps run; None for 2 with data that is read
            when a batch needs it or on a GPU, and 0 otherwise.
        callbacks: objects that watch the run and steer it, see `graphopt.Callback`, and functions, which are called
            with the run and its record at the end of each epoch; or one of them.
        checkpoint: when and where to write checkpoints, or only the folder; None to write none.
        resume: True to continue from the newest checkpoint of `checkpoint`, if there is one; or the path of a
            checkpoint, or of a folder of checkpoints. `epochs` then counts those before the interruption, too.
        transform: a function of a batch that trains, its arrays by name, and a numpy.random.Generator, which returns
            what trains in its place: augmentation. It runs where batches are prepared. The generator depends on the
            seed, the epoch and the place in it, so that a resumed run draws the same. Held-out rows stay as they are.
        cache_features: compute what frozen layers return once for each row, and keep it, so that later epochs cost only
            the layers that train, such as a new head. Results are those of the whole graph to rounding.
        verbose: True to show the progress, False for silence; None to show it in terminals and notebooks.

    Raises:
        GraphoptError: the data does not fit the model, an option is wrong, or a checkpoint cannot be written or is
            another graph's.
        NonFiniteLoss: the loss is infinite or not a number.

    >>> step = graphopt.compile(models.linear((1,), 1), loss=passes.MeanSquaredError(), optimizer=passes.SGD(0.1))
    >>> X = numpy.linspace(-1, 1, 40, dtype=numpy.float32)[:, None]
    >>> records = graphopt.fit(graphopt.Executor(step), {"x": X, "target": 2 * X + 1}, epochs=50, batch_size=10)
    >>> len(records), records[-1]["validation_loss"] < 1e-3
    (50, True)
    """
    check_executor("fit", executor, data)
    options = FitOptions(**keywords)
    if "loss" not in executor.reported:
        raise GraphoptError("report: expected an executor that reports its loss, found an empty report: leave it out")
    metrics_of(executor.inputs, listed(options.metrics))  # raises an error if one is wrong
    if has_rows(data):
        data = _numbered(executor, as_dataset(data, executor.inputs))
        _check_classes(executor, data)
    if options.cache_features:
        return _fit_on_features(executor, data, options)
    source, held_out = _batch_sources(executor, data, options)
    counts = [part.count for part in (source, held_out) if part is not None]
    _check_sizes(executor, options.batch_size, counts)
    workers = executor.workers
    if workers.size > 1:
        if not isinstance(source, RowEpochs):
            raise GraphoptError(
                f"data: expected rows, which {workers.size} workers share, found an iterable, {type(data).__name__}"
            )
        workers.check_alike(_facts(executor, source, options))
    if isinstance(data, Dataset) and data.labels:
        executor.labels = data.labels
    callbacks = [*callbacks_of(options.callbacks), *_progress(options)]
    _begin_privacy(executor, source, options)
    loop = TrainingLoop(executor, source, held_out, dataclasses.replace(options, callbacks=callbacks))
    loop.begin()
    _note_columns(executor, data)
    loop.train()
    _warn_of_unfinished_pruning(loop.run)
    return Records(loop.run.records)


def _note_columns(executor: Executor, data: Data) -> None:
    """Note the names of plain columns that train, by which later tables are read."""
    if isinstance(data, Dataset) and (names := data.column_names) is not None:
        note_column_names(data_inputs(executor.model), names)


def _begin_privacy(executor: Executor, source: Epochs, options: FitOptions) -> None:
    """Check the sampling, tell a private step how many rows to expect, and draw the secret of its noise."""
    if options.sampling == "poisson":
        wrong = {
            f"an iterable, {type(source).__name__}": not isinstance(source, RowEpochs),
            f"shuffle={options.shuffle!r}": options.shuffle is not True,
            f"{executor.workers.size} workers": executor.workers.size > 1,
            f"batch_size={options.batch_size}, of which some are empty": options.batch_size < LEAST_POISSON,
        }
        for found in (found for found, is_wrong in wrong.items() if is_wrong):
            raise GraphoptError(
                f"sampling='poisson': expected rows on one worker, shuffle=True and batch_size={LEAST_POISSON} "
                f"or more, found {found}"
            )
    values: dict[str, object] = {state.NOISE_KEY: np.frombuffer(secrets.token_bytes(8), np.int32)}
    if isinstance(source, RowEpochs):
        values[state.EXPECTED_ROWS] = float(options.batch_size)
    executor.set_hyperparameters(**{k: x for k, x in values.items() if k in executor.hyperparameters})


@checked()
def adapt(
    pipeline: Pipeline,
    model: Source,
    data: Data,
    *,
    validation: float | Data | None = 0.2,
    shuffle: Shuffle = True,
    seed: int = 0,
    allow_nan: bool = False,
    epochs: int | None = None,
    batch_size: int = FitOptions.batch_size,
) -> Pipeline:
    """Return a pipeline whose passes have learnt from the training rows of a data set.

    `passes.Standardize()` learns means and standard deviations, and `class_weights="balanced"` of `passes.CrossEntropy`
    and `passes.BinaryCrossEntropy` learns class weights. Held-out rows do not count. With `epochs`, a schedule such as
    `passes.Cosine()` learns the steps of the training. Give `validation`, `shuffle`, `seed`, `epochs` and `batch_size`
    as to `fit`.

    Args:
        pipeline: the pipeline; it is not changed.
        model: the inference model that the pipeline will rewrite.
        data: data with rows, as in `fit`; arrays that are memory-mapped or read from files are read once for each pass,
            in pieces.
        validation: the share of rows to hold out; with other data or None, all rows train.
        shuffle: whether held-out rows are drawn, as in `fit`.
        seed: the seed of what is drawn.
        allow_nan: accept NaN and infinities in arrays that no pass learns from.
        epochs: the number of epochs of the training, if a schedule needs it.
        batch_size: the number of rows of a batch.

    Raises:
        GraphoptError: the data does not fit the model, or a pass cannot learn from it.

    >>> digits, model = graphopt.data.digits(), models.mlp((1, 8, 8), 10)
    >>> loss = passes.CrossEntropy(class_weights="balanced")
    >>> pipeline = graphopt.standard(standardize=passes.Standardize(), loss=loss, optimizer=passes.AdamW())
    >>> executor = graphopt.Executor(graphopt.adapt(pipeline, model, digits)(model))
    >>> graphopt.fit(executor, digits, epochs=5)[-1]["accuracy"] > 0.9
    True
    """
    check_pipeline(pipeline, "adapt", "adapt(graphopt.standard(...), model, data)")
    if not pipeline.learns and epochs is None:
        return pipeline
    if not has_rows(data):
        raise GraphoptError(
            f"adapt: expected a data set or arrays by name, found {type(data).__name__}: give the passes their "
            "numbers, such as passes.Standardize(mean, scale)"
        )
    loaded = load(model)
    data = as_dataset(data, {name_of(x): x for x in loaded.graph.inputs if not x.is_initializer()})
    rows, _ = hold_out(len(data), _held_out_share(validation), shuffle=shuffle, seed=seed)
    if epochs is not None:
        options = FitOptions(epochs=epochs, batch_size=batch_size)
        pipeline = pipeline.planned((options.epochs or 1) * math.ceil(len(rows) / options.batch_size))
    return pipeline.adapted(loaded, TrainingRows(data, loaded, rows, opened, allow_nan=allow_nan))


def opened(model: ir.Model) -> Runs:
    """Return a function that runs a model on the CPU, in one session."""
    return Session(Device("cpu"), model).compute_arrays


def _warn_of_unfinished_pruning(run: Run) -> None:
    executor, plan = run.executor, Pruning.read(run.executor.model)
    if plan is None or not run.is_pruning:
        return
    masks = {name_of(x): OWNER.read(x) or "" for x in state.masks(executor.model)}
    arrays = executor.state
    sizes = {mask: arrays[owner].size for mask, owner in masks.items()}
    reached = sum((1 - arrays[mask].mean()) * size for mask, size in sizes.items()) / sum(sizes.values())
    warnings.warn(
        f"Prune: expected {plan.end:,} updates, found {executor.steps:,}: {reached:.3f} of the weights are 0 in place "
        f"of {plan.sparsity:.3f}: train longer, or set end to {executor.steps:,} or less",
        stacklevel=3,
    )


def _batch_sources(executor: Executor, data: Data, options: FitOptions) -> tuple[Epochs, HeldOut | None]:
    """Return the source of the epochs' batches, and the held-out rows, if there are any."""
    validation, keep = options.validation, options.checkpoint is not None
    share, held_out = _held_out_share(validation), None
    if validation is not None and not isinstance(validation, int | float):
        held_out = _held_out(executor, validation, data, options)
    batches = read_batches(data, executor, options.allow_nan, options.steps_per_epoch, keep_positions=keep)
    if isinstance(batches, Stream):
        if share:
            raise GraphoptError(
                f"validation: expected other data or None, found a share, {share}, of the rows of an iterable: "
                "pass validation=None, or batches to measure on"
            )
        return StreamEpochs(batches, options, executor), held_out
    rows, held = hold_out(len(batches), share, shuffle=options.shuffle, seed=options.seed)
    if share:
        held_out = HeldOut(batches, options.batch_size, listed(options.metrics), held)
    return RowEpochs(batches, rows, options, executor), held_out


def _fit_on_features(executor: Executor, data: Data, options: FitOptions) -> Records:
    """Train on features of frozen layers, which are computed once."""
    if options.transform is not None or not isinstance(data, Dataset):
        found = "batches of an iterable" if options.transform is None else "a transform, which changes them"
        raise GraphoptError(f"cache_features: expected rows that stay the same, found {found}: leave it out")
    layers, validation = FrozenLayers(executor), options.validation
    size, allow_nan = options.batch_size, options.allow_nan
    if validation is not None and not isinstance(validation, int | float):
        validation = layers.features(_alike(executor, validation, data), size, allow_nan=allow_nan)
    rest = dataclasses.replace(options, cache_features=False, validation=validation)
    keywords = {field.name: getattr(rest, field.name) for field in dataclasses.fields(rest)}
    try:
        return fit(layers.executor, layers.features(data, size, allow_nan=allow_nan), **keywords)
    finally:
        layers.give_back()
        if executor.batches:
            _note_columns(executor, data)


def _check_classes(executor: Executor, data: Dataset) -> None:
    """Raise an error if all rows of a table have the same class; warn if numbers of classes are left out."""
    target, input_, named = data.arrays.get(TARGET), executor.inputs.get(TARGET), data.labels or ()
    spec = None if input_ is None else TargetSpec.read(input_)
    is_classified = spec is not None and spec.task != "regression" and len(data) > 1
    is_of_table = bool(data.names or data.table)
    found = named[0] if len(named) == 1 else None
    if is_classified and is_of_table and isinstance(target, np.ndarray):
        same = (target == target[:1]).all()
        found = (named[int(target.flat[0])] if named else str(target.flat[0])) if same else found
    if found is not None:
        raise GraphoptError(f"{data.source}: expected a target of two classes or more, found {found!r} in all rows")
    is_numbered = is_classified and is_of_table and not named
    if is_numbered and isinstance(target, np.ndarray) and target.ndim == 1:
        used = [int(number) for number in np.unique(target) if number >= 0]
        if used[-1:] > [len(used) - 1]:
            warnings.warn(
                f"{data.source}: {used[-1] + 1 - len(used):,} of the {used[-1] + 1:,} classes from 0 on have no row: "
                f"those in the target are {some([*map(str, used)], 10)}",
                stacklevel=2,
            )


def _held_out_share(validation: object) -> float:
    """Return the share of rows to hold out, which is 0 with other data and with none."""
    return validation if isinstance(validation, int | float) else 0.0


def _numbered(executor: Executor, data: Dataset) -> Dataset:
    """Return data whose classes have the numbers that they had in earlier training, or have in the model."""
    labels = executor.labels
    if labels and data.labels and (executor.batches or set(data.labels) <= set(labels)):
        return relabelled(data, labels, "data")
    return data


def _alike(executor: Executor, validation: Any, data: Data) -> Dataset:
    """Return other rows to validate on, whose classes have the numbers of those that train."""
    names = data.column_names if isinstance(data, Dataset) else None
    rows = as_dataset(validation, executor.inputs, names)
    of_rows = isinstance(data, Dataset) and TARGET in data.arrays
    labels = (data.labels if isinstance(data, Dataset) else None) or executor.labels
    if of_rows and rows.labels and not labels:
        check_both_named(rows, None, "data")
    return relabelled(rows, labels, "data")


def _held_out(executor: Executor, validation: object, data: Data, options: FitOptions) -> HeldOut:
    """Return other data than the training's to validate on."""
    try:
        if has_rows(validation):
            validation = _alike(executor, validation, data)
        batches = read_batches(validation, executor, options.allow_nan)
    except GraphoptError as error:
        raise GraphoptError(f"validation: {error}") from error
    return HeldOut(batches, options.batch_size, listed(options.metrics))


def _progress(options: FitOptions) -> Sequence[Callback]:
    """Return the callback that shows the progress, unless another one does or nobody looks."""
    is_shown = any(isinstance(callback, ProgressBar) for callback in callbacks_of(options.callbacks))
    is_seen = is_watched() if options.verbose is None else options.verbose
    return [ProgressBar()] if is_seen and not is_shown else ()


def _check_sizes(executor: Executor, batch_size: int, counts: Sequence[int | None]) -> None:
    """Raise an error unless batches, and numbers of rows, fit the model's fixed batch, if it has one."""
    fixed = (fixed_batch(executor.inputs) or 0) * executor.workers.size
    known = [count for count in counts if count]
    if fixed and known and (batch_size != fixed or any(count % fixed for count in known)):
        raise GraphoptError(
            f"batch_size: expected {fixed}, the batch of the model, and a multiple of it as number of rows, found "
            f"batch_size={batch_size} and {' and '.join(map(str, known))} rows: "
            f"passes.Normalize(batch='free') frees it where no row depends on another (pipeline.normalize.batch=free)"
        )


def _facts(executor: Executor, source: RowEpochs, options: FitOptions) -> dict[str, str]:
    """Return the facts that have to be the same for all workers."""
    return {
        "versions": ", ".join(f"{name} {version}" for name, version in versions(executor).items()),
        "training graph": model_digest(executor.model),
        "state": digest(b"".join(x.tobytes() for x in executor.state.values())),
        "data": source.batches.digest(),
        "options of fit": f"batch_size {options.batch_size}, shuffle {options.shuffle}, seed {options.seed}, "
        f"epochs {options.epochs}",
    }

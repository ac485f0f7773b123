"""Show the predictions of held-out rows: confusion matrices, residuals, and the rows most in error."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from graphopt.data.columns import is_missing
from graphopt.errors import GraphoptError
from graphopt.graph.roles import Role, role_of
from graphopt.inspection import html
from graphopt.inspection.charts import scatter_chart
from graphopt.inspection.words import percent, readable
from graphopt.training.callbacks.callback import Run
from graphopt.training.metrics import Metrics, ScoredBatch, metrics

Norms = Callable[[Mapping[str, np.ndarray]], np.ndarray]  # of gradients, for rows by the names of inputs

MOST_ROWS = 10_000  # held-out rows that the page looks at
_MOST_CLASSES = 30  # of a confusion matrix
_MOST_BESIDE = 12  # classes of a confusion matrix beside pictures
_MOST_CONFUSED = 5  # pairs of classes that are named
_MOST_POINTS = 1000  # of a chart of predictions
_WORST = 12  # rows most in error
_MOST_COLUMNS = 12  # of an input in the table of such rows
_LEAST_SIDE = 4  # pixels of a picture


@dataclass(frozen=True)
class _Example:
    """Hold a row that a model predicts wrongly: its place among held-out rows, its error, and its captions.

    `measure` is the name and the text of how wrong it is, and `fed` what the training graph reads of the row.
    """

    place: int
    error: float
    expected: str
    predicted: str
    measure: tuple[str, str]
    inputs: dict[str, np.ndarray]
    fed: dict[str, np.ndarray]
    norm: float | None = None  # of the gradient of its loss


@dataclass
class _Predictions:
    """Gather the predictions of a target."""

    metrics: Metrics
    names: Sequence[str] | None
    batches: list[ScoredBatch] = field(default_factory=list)
    worst: list[_Example] = field(default_factory=list)

    @property
    def is_regression(self) -> bool:
        return self.batches[0].spec.task == "regression"

    def add(
        self,
        place: int,
        prediction: np.ndarray,
        target: np.ndarray,
        inputs: Collection[str],
        feeds: Mapping[str, np.ndarray],
    ) -> None:
        """Add a batch; `place` is that of its first row, and `inputs` names the feeds that are data."""
        batch, rows = self.metrics.batch(prediction, target), len(target)
        self.batches.append(batch)
        if not rows or len(batch.target) % rows:
            return  # some elements are ignored
        errors = _element_errors(batch).reshape(rows, -1).mean(axis=1)
        known = np.where(np.isfinite(errors), errors, np.inf)
        for i in np.argsort(-known, kind="stable")[:_WORST]:
            fed = {name: np.array(array[i]) for name, array in feeds.items()}
            own = {name: fed[name] for name in inputs if name in fed}
            texts = self._told(batch, int(i), len(batch.target) // rows, float(errors[i]))
            self.worst.append(_Example(place + int(i), float(known[i]), *texts, own, fed))
        self.worst = sorted(self.worst, key=lambda example: -example.error)[:_WORST]

    def measure_norms(self, norms: Norms) -> None:
        """Note the norms of the gradients of the worst rows, if the model has any."""
        with contextlib.suppress(GraphoptError):
            fed = {name: np.stack([x.fed[name] for x in self.worst]) for name in self.worst[0].fed}
            self.worst = [replace(x, norm=float(n)) for x, n in zip(self.worst, norms(fed), strict=True)]

    def name(self, label: float) -> str:
        """Return the name of a class."""
        if self.names is not None and float(label).is_integer() and 0 <= label < len(self.names):
            return self.names[int(label)]
        return f"{label:g}"

    def _told(self, batch: ScoredBatch, i: int, elements: int, error: float) -> tuple[str, str, tuple[str, str]]:
        """Return a row's target, prediction and error in words."""
        if batch.spec.task == "regression":
            expected, predicted = (np.reshape(x[i], -1)[:_MOST_COLUMNS] for x in (batch.target, batch.predicted))
            told, said = (", ".join(readable(float(x)) for x in numbers) for numbers in (expected, predicted))
            return told, said, ("error", readable(error))
        if elements > 1:
            own = slice(i * elements, (i + 1) * elements)
            right = float((batch.predicted[own] == batch.target[own]).mean())
            return f"{elements} labels", f"{percent(right)} right", ("loss", readable(error))
        names = self.name(batch.target[i]), self.name(batch.predicted[i])
        if batch.spec.task == "binary":
            return *names, ("output", readable(float(batch.scores[i])))
        return *names, ("confidence", percent(float(np.exp(batch.log_probabilities()[i].max()))))


def predictions(run: Run, norms: Norms | None = None) -> Iterator[str]:
    """Yield the sections of a page about the predictions of held-out rows.

    `norms` returns the norms of the gradients of rows, for those that are most in error.
    """
    if run.evaluated is None:
        return
    names, place = run.labels, 0
    inputs = [name for name, x in run.executor.inputs.items() if role_of(x) is Role.DATA]
    chosen = metrics(run.executor.inputs)
    gathered = {target: _Predictions(metric, names) for target, (_, metric) in chosen.items()}
    for feeds, values in run.evaluated():
        for target, (output, _) in chosen.items():
            gathered[target].add(place, np.asarray(values[output]), feeds[target], inputs, feeds)
        place += len(next(iter(feeds.values())))
        if place >= MOST_ROWS:
            break
    first = f"the first {place:,} of " if place < (run.validation_rows or 0) else ""
    for target, found in gathered.items():
        of = "" if len(gathered) == 1 else f" of {target}"
        if norms is not None and found.worst:
            found.measure_norms(norms)
        if sum(batch.target.size for batch in found.batches):
            yield from _sections(run, found, of, f"{first}{run.validation_rows or place:,} held-out rows")


def _sections(run: Run, found: _Predictions, of: str, rows: str) -> Iterator[str]:
    predicted = np.concatenate([batch.predicted for batch in found.batches])
    expected = np.concatenate([batch.target for batch in found.batches])
    labels = np.unique([*np.unique(expected), *np.unique(predicted)])
    has_matrix = not found.is_regression and len(labels) <= _MOST_CLASSES
    has_pictures = bool(found.worst) and image_of(_shown(found.worst[0], run)) is not None
    half = has_matrix and has_pictures and len(labels) <= _MOST_BESIDE
    if found.is_regression:
        yield html.section(f"Predictions{of} on {rows}", html.charts(_residuals(predicted, expected)))
    else:
        part = _confusion(found, predicted, expected, rows, labels if has_matrix else None)
        yield html.section(f"{'Confusion matrix' if has_matrix else 'Mistakes'}{of}", part, half=half)
    if found.worst:
        about = "largest error" if found.is_regression else "largest loss"
        yield html.section(
            f"Held-out rows most in error{of}",
            _shown_examples(found.worst, run),
            html.note(f"The {len(found.worst)} of {rows} with the {about}, the worst first."),
            half=half,
        )


def _residuals(predicted: np.ndarray, expected: np.ndarray) -> list[str]:
    every = -(-predicted.size // _MOST_POINTS)
    y, x = (np.asarray(array, np.float64).reshape(-1)[::every] for array in (predicted, expected))
    return [
        scatter_chart("Prediction", list(zip(x, y, strict=True)), "target", "prediction", through="y = x"),
        scatter_chart(
            "Residual", list(zip(y, x - y, strict=True)), "prediction", "target - prediction", through="y = 0"
        ),
    ]


def _confusion(
    found: _Predictions, predicted: np.ndarray, expected: np.ndarray, rows: str, labels: np.ndarray | None
) -> str:
    """Return the confusion matrix of some labels, if any are given, and the classes that are most often confused."""
    is_wrong = expected != predicted
    pairs, counts = np.unique(np.stack([expected, predicted])[:, is_wrong], axis=1, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:_MOST_CONFUSED].tolist()
    names = [[found.name(label) for label in pairs[:, i].tolist()] for i in order]
    said = [f"{a} taken for {b} ({counts[i]:,})" for i, (a, b) in zip(order, names, strict=True)]
    what = "Rows are the targets and columns the predictions. " if labels is not None else ""
    text = f"{what}{is_wrong.sum():,} of {len(expected):,} are wrong"
    text += "" if rows.startswith(f"{len(expected):,} ") else f", on {rows}"
    part = html.note(f"{text}; most often {', '.join(said)}." if said else f"{text}.")
    if labels is None:
        return part
    matrix = np.zeros((len(labels), len(labels)), np.int64)
    np.add.at(matrix, (np.searchsorted(labels, expected), np.searchsorted(labels, predicted)), 1)
    return html.confusion("target", [found.name(label) for label in labels.tolist()], matrix.tolist()) + part


def _shown_examples(worst: Sequence[_Example], run: Run) -> str:
    """Return pictures, if an input is one, or a table of the inputs' numbers."""
    images = [image_of(_shown(example, run)) for example in worst]
    if all(image is not None for image in images):
        pixels = np.concatenate([np.ravel(image) for image in images])  # type: ignore[arg-type]
        low, spread = float(pixels.min()), float(np.ptp(pixels)) or 1.0
        return html.pictures(
            (
                (image - low) / spread,
                x.expected,
                (*_captions(x), *(f"gradient norm {n}" for n in _norm(x)), _row_label(x, run)),
            )
            for image, x in zip(images, worst, strict=True)
            if image is not None
        )
    columns = [dict(_row_numbers(_shown(x, run), run.names)) for x in worst]
    of_norm = [] if worst[0].norm is None else ["gradient norm"]
    header = ["row", "target", "prediction", worst[0].measure[0], *of_norm, *columns[0]]
    rows = [
        (_row_label(x, run).removeprefix("row "), x.expected, x.predicted, x.measure[1], *_norm(x), *numbers.values())
        for x, numbers in zip(worst, columns, strict=True)
    ]
    return html.html_table(header, rows)


def _norm(example: _Example) -> list[str]:
    return [] if example.norm is None else [readable(example.norm)]


def _captions(example: _Example) -> tuple[str, str]:
    name, text = example.measure
    right = "right" if example.expected == example.predicted else f"taken for {example.predicted}"
    is_class = name in ("confidence", "output")
    return (
        right if is_class else f"predicted {example.predicted}",
        f"{text} sure" if name == "confidence" else f"{name} {text}",
    )


def _row_number(example: _Example, run: Run) -> int:
    """Return the number of an example's row in the data, from 0; of held-out rows where these are other data."""
    rows = run.held_out_rows
    return example.place if rows is None else int(rows[example.place])


def _row_label(example: _Example, run: Run) -> str:
    return f"row {_row_number(example, run)}"


def image_of(inputs: Mapping[str, np.ndarray]) -> np.ndarray | None:
    """Return the first input of a row that is a picture, as [height, width, 1 or 3]."""
    for array in inputs.values():
        if np.ndim(array) == 3 and array.dtype.kind in "fui" and np.isfinite(array).all():
            for image in (np.moveaxis(array, 0, -1), array):
                if image.shape[-1] in (1, 3) and min(image.shape[:2]) >= _LEAST_SIDE:
                    return image.astype(np.float64)
    return None


def _shown(example: _Example, run: Run) -> Mapping[str, np.ndarray]:
    """Return what a row was made of, as the data has it."""
    row, table = _row_number(example, run), run.held_out_table
    return {name: np.asarray(column[row : row + 1])[0] for name, column in table.items()} or example.inputs


def _row_numbers(inputs: Mapping[str, np.ndarray], names: Sequence[str] | None) -> Iterator[tuple[str, str]]:
    """Yield the name and the text of the first numbers of each input, and of the first inputs of one number."""
    for name, array in [*inputs.items()][:_MOST_COLUMNS]:
        values = np.reshape(array, -1)
        for i, value in enumerate(values[:_MOST_COLUMNS].tolist()):
            if len(inputs) == 1 and len(names or ()) == values.size:
                column = (names or ())[i]
            else:
                column = name if values.size == 1 else f"{name} {i}"
            shown = readable(value) if isinstance(value, float) else str(value)
            yield column, "" if is_missing(value) else shown
        if values.size > _MOST_COLUMNS:
            yield f"{name} …", f"{values.size - _MOST_COLUMNS:,} more"
    if len(inputs) > _MOST_COLUMNS:
        yield "…", f"{len(inputs) - _MOST_COLUMNS:,} more"


def _element_errors(batch: ScoredBatch) -> np.ndarray:
    """Return the error of each element: the loss of a class, the distance to the threshold, or the absolute error."""
    if batch.spec.task == "regression":
        return np.abs(np.asarray(batch.predicted, np.float64) - batch.target)
    if batch.spec.task == "binary":
        distance = np.abs(np.asarray(batch.scores, np.float64) - (batch.spec.threshold or 0.0))
        return np.where(batch.predicted == batch.target, -distance, distance)
    return -np.take_along_axis(batch.log_probabilities(), batch.target[:, None].astype(np.int64), axis=1)

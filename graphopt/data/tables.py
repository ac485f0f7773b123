"""Turn tables into features, and models of features into models of the columns of tables."""

from __future__ import annotations

import dataclasses
import json
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import numpy as np
import onnx_ir as ir

from graphopt.arguments import Checked
from graphopt.data.columns import MACHINE_LEARNING, Column, column_of
from graphopt.data.kinds import Unread, inferred, remedy
from graphopt.errors import GraphoptError, kind_of, some, unknown
from graphopt.graph.classified import (
    LABEL,
    PROBABILITIES,
    activation_of,
    classification_of,
    emit_classes,
    has_label_per_row,
    labels_in,
    named_classes,
)
from graphopt.graph.emitter import Emitter
from graphopt.graph.loading import Source, load
from graphopt.graph.metadata import LABELS, Note
from graphopt.graph.rewriting import remove_unused_nodes
from graphopt.graph.roles import TargetSpec
from graphopt.graph.values import dims_of, is_floating, name_of, swap
from graphopt.moments import row_index

AUTO, _OTHERS = "auto", "*"
_ENCODED = "features"  # the value between the nodes of columns and the model
_MOST_NUMBERS = 2**30  # in an array of features
_MOST_SUMMARIZED = 20  # columns

Table = Mapping[str, Any]
_Given = TypeVar("_Given")
_Made = TypeVar("_Made")


@dataclass(frozen=True)
class Columns(Checked):
    """Turn a table into an array of features, and a model of features into a model of the table's columns.

    A table is a DataFrame, or a mapping from names to arrays or lists of cells. Columns learn from the training rows
    of one table, and encode any.

    Args:
        columns: the columns that become features, in order: each a `Number`, a `Category`, a `Date`, the name of one of
            these kinds, or a mapping of `kind` and its fields, such as `{"kind": "category", "encode_as": "ordinal"}`.

    Raises:
        GraphoptError: a kind or a field is unknown, or a field has a wrong value.

    >>> table = {"age": [20, 40, None], "city": ["Bern", "Oslo", "Bern"]}
    >>> columns = graphopt.data.Columns({"age": "number", "city": "category"}).learn(table)
    >>> columns.names
    ['age', 'city=Bern', 'city=Oslo']
    >>> columns.encode(table).round(3).tolist()
    [[-1.225, 1.0, 0.0], [1.225, 0.0, 1.0], [0.0, 1.0, 0.0]]
    """

    columns: Mapping[str, Column]

    def __post_init__(self) -> None:
        if not isinstance(self.columns, Mapping) or not self.columns:
            raise GraphoptError(f"columns: expected columns by name, found {self.columns!r}")
        columns = {str(name): _of_column(name, column_of, x) for name, x in self.columns.items()}
        object.__setattr__(self, "columns", columns)

    @classmethod
    def auto(cls, table: Table, leave_out: Sequence[str] = ("target",)) -> Columns:
        """Return columns of the kinds that suit the cells of a table.

        Numbers and texts that are numbers become a `Number`, dates and texts such as 2026-11-26 a `Date`, and few
        different texts or booleans a `Category`. A column of many different texts is an error that names it.

        Args:
            table: the table.
            leave_out: the names of columns that are no features.

        >>> columns = graphopt.data.Columns.auto({"age": [20, 40], "city": ["Bern", None], "target": [0, 1]})
        >>> {name: column.kind for name, column in columns.columns.items()}
        {'age': 'number', 'city': 'category'}
        """
        keys = names_in(table).items()
        features = {name: cells(name, table[key]) for name, key in keys if name not in leave_out}
        return columns_of({_OTHERS: AUTO}, features)

    @property
    def has_learnt(self) -> bool:
        """Return whether the columns have learnt from rows."""
        return all(column.rows for column in self.columns.values())

    @property
    def names(self) -> list[str]:
        """Return the names of the features."""
        return [feature for name, column in self._learnt.items() for feature in column.names(name)]

    @property
    def width(self) -> int:
        """Return the number of features."""
        return len(self.names)

    def learn(self, table: Table, rows: range | np.ndarray | None = None) -> Columns:
        """Return columns that have learnt from rows of a table.

        Args:
            table: the table.
            rows: the indices of the rows, such as the first that `graphopt.data.hold_out` returns; all by default.

        Raises:
            GraphoptError: the table lacks a column, or a cell is not what its column expects.
        """
        learnt = {}
        for name, column, x in self._read(table):
            if rows is not None and len(rows) and np.max(rows) >= len(x):
                raise GraphoptError(f"rows: expected indices of {len(x):,} rows, found {np.max(rows)}")
            learnt[name] = _of_column(name, column.learn, x if rows is None else x[row_index(rows)])
            if problem := learnt[name].warning:
                warnings.warn(f"column {name!r}: {problem}", stacklevel=2)
        return Columns(learnt)

    def encode(self, table: Table) -> np.ndarray:
        """Return the features of all rows of a table, [rows, features], in float32.

        Raises:
            GraphoptError: the columns have not learnt, the table lacks one, or a cell is not what its column expects.
        """
        width, parts = self.width, []
        for name, column, x in self._read(table):
            if len(x) * width > _MOST_NUMBERS:
                raise GraphoptError(
                    f"columns: expected at most {_MOST_NUMBERS:,} numbers, found {len(x):,} rows of {width:,} "
                    "features: encode categories as ordinal, or leave columns out"
                )
            parts.append(_of_column(name, column.encode, x).astype(np.float32))
        return np.concatenate(parts, axis=1)

    def inputs(self, table: Table) -> dict[str, np.ndarray]:
        """Return a table as a model that `before` returns takes it: an array [rows, 1] for each column.

        >>> graphopt.data.Columns({"day": "date"}).inputs({"day": ["1970-01-03", None]})["day"].tolist()
        [[2.0], [nan]]
        """
        return {name: x[:, None].astype(column.dtype.numpy()) for name, column, x in self._read(table)}

    def before(self, model: Source, labels: Sequence[str] | None = None, threshold: float | None = None) -> ir.Model:
        """Return a model that takes the columns in place of features, each as an input [rows, 1].

        Numbers are float32, with NaN for a missing one; categories are strings, empty if missing; dates are the number
        of days since 1970-01-01 in float32. Values of the model that have the name of a column are renamed.

        A trained classifier gets two more outputs, `label` and `probabilities`, beside its scores. Its file notes which
        loss it had; of another model, labels are known only with their names, and probabilities are not.

        Args:
            model: a model with one input [rows, features].
            labels: the names of the classes; by default, those in the model's metadata. Without names, labels are the
                numbers of the classes.
            threshold: what a single output exceeds for the second of two classes; by default, what the loss says, or 0.

        Raises:
            GraphoptError: the columns have not learnt, or the model does not take their features.

        >>> columns = graphopt.data.Columns({"city": "category"}).learn({"city": ["Bern", "Oslo", "Rome"]})
        >>> model = columns.before(models.linear((columns.width,), 2), labels=["cold", "warm"])
        >>> [(x.name, str(x.dtype)) for x in [*model.graph.inputs, *model.graph.outputs]]
        [('city', 'STRING'), ('y', 'FLOAT'), ('label', 'STRING')]
        """
        width, loaded = self.width, load(model)
        inputs = [x for x in loaded.graph.inputs if not x.is_initializer()]
        if len(inputs) != 1 or not _takes(inputs[0], width):
            found = ", ".join(f"{x.name}{x.shape}" for x in inputs) or "none"
            raise GraphoptError(f"columns: expected a model with one input [rows, {width}], found {found}")
        return _prepended(self, loaded, inputs[0], labels or labels_in(loaded), threshold)

    @staticmethod
    def of(model: Source | None) -> Columns | None:
        """Return the columns that a model or a training graph notes, which have learnt, or None."""
        note = None if model is None else _Encoded.read(model if isinstance(model, ir.Model) else load(model))
        return None if note is None else note.all

    @staticmethod
    def taken_by(model: ir.Model) -> Columns | None:
        """Return the columns that a model takes in place of features, or None."""
        note = _Encoded.read(model)
        return None if note is None or note.features is None else note.all

    @staticmethod
    def without(model: Source) -> ir.Model:
        """Return a model that takes features again, as before `before`; another model is returned as it is."""
        loaded = model if isinstance(model, ir.Model) else load(model)
        note = _Encoded.read(loaded)
        return loaded if note is None or note.features is None else _with_features_as_input(load(loaded), note)

    def noted(self, model: ir.Model) -> ir.Model:
        """Write the columns into the metadata of a model or a training graph of features, and return it."""
        return _Encoded(self._as_fields()).write(model)

    def text(self) -> str:
        """Return the names of the features, and the columns with the fields that they have learnt, as JSON."""
        return json.dumps({"features": self.names, "columns": self._as_fields()}, indent=1, ensure_ascii=False)

    def summary(self) -> str:
        """Return the encoding of each column, in one line."""
        texts = [f"{name}: {column.summary()}" for name, column in self._learnt.items()]
        left = len(texts) - _MOST_SUMMARIZED
        return "; ".join(texts[:_MOST_SUMMARIZED]) + (f"; and {left} more" if left > 0 else "")

    def _as_fields(self) -> dict[str, object]:
        return {name: column.as_fields() for name, column in self._learnt.items()}

    @property
    def _learnt(self) -> Mapping[str, Column]:
        if not self.has_learnt:
            raise GraphoptError(
                f"columns: expected columns that have learnt from training rows, found {some([*self.columns])}: call "
                "learn first"
            )
        return self.columns

    def _read(self, table: Table) -> Iterator[tuple[str, Column, np.ndarray]]:
        keys = names_in(table)
        for name, column in self.columns.items():
            if name not in keys:
                raise GraphoptError(unknown("column", name, keys))
            values = cells(name, table[keys[name]])
            try:
                yield name, column, _of_column(name, column.read, values)
            except GraphoptError as error:
                raise GraphoptError(f"{error}{remedy(values, column.kind)}") from error


@dataclass(frozen=True)
class _Encoded(Note, key="graphopt.columns", expected="columns as graphopt writes them"):
    """Record the columns that become features.

    Args:
        columns: the fields of each column by its name.
        features: the name of the value that the nodes of the columns compute; None if the model has no such nodes.
        input: the name of the input that it has replaced.
        label, probabilities: the names of the outputs of classes and of their probabilities, if there are some.
    """

    columns: dict[str, Any]
    features: str | None = None
    input: str | None = None
    label: str | None = None
    probabilities: str | None = None
    MOST: ClassVar[int] = 100_000

    def check(self) -> None:
        is_whole = (self.features is None) == (self.input is None)
        if len(self.columns) > self.MOST or not is_whole or not self.all.has_learnt:
            raise ValueError

    @property
    def all(self) -> Columns:
        """Return the columns."""
        return Columns({name: column_of(x, has_learnt=True) for name, x in self.columns.items()})


def columns_of(wanted: Mapping[str, Any], table: Mapping[str, np.ndarray]) -> Columns:
    """Return the columns of a description, which can say `auto` for all columns or for some.

    Args:
        wanted: what `check_description` returns.
        table: the columns that can become features.

    Raises:
        GraphoptError: a name is unknown, or no kind suits a column.
    """
    for name in wanted:
        if name not in table and name != _OTHERS:
            raise GraphoptError(unknown("column", name, table))
    kinds, without = {}, {}
    for name, cells in table.items():
        kind = wanted.get(name, wanted.get(_OTHERS))
        try:
            kinds[name] = inferred(cells, name) if kind == AUTO else kind
        except GraphoptError as error:
            without[name] = error
    for name, problem in without.items():
        ways = {other: x.ways if isinstance(x, Unread) else ["null"] for other, x in without.items()}
        described = ", ".join(f"{other}: {first}" for other, (first, *_) in ways.items())
        others = "".join(f", or {name}: {way}" for way in [*ways[name][1:], "category"])
        if isinstance(problem, Unread):
            mend = f"describe it, columns={{*: auto, {described}}}{others}"
        else:
            mend = f"leave it out, columns={{*: auto, {described}}}, or describe it: {name}: category, number or date"
        raise GraphoptError(f"{_located(name, problem)}: {mend}")
    chosen = {name: kind for name, kind in kinds.items() if kind is not None}
    if not chosen:
        raise GraphoptError(f"columns: expected a feature or more, found none in {wanted}")
    return Columns(chosen)


def check_description(description: object) -> dict[str, object]:
    """Return a column, `auto` or None by the name of each column, or raise an error if a description is wrong.

    Args:
        description: `auto`; `Columns`; or a mapping from names to descriptions of columns, `auto`, or None to leave one
            out, in which `*` stands for all other names.
    """
    if isinstance(description, Columns):
        return {**description.columns}
    wanted = {_OTHERS: AUTO} if isinstance(description, str) and description == AUTO else description
    if not isinstance(wanted, Mapping) or not wanted:
        raise GraphoptError(f"columns: expected auto, or kinds by the names of columns, found {description!r}")
    return {
        str(name): x if x is None or str(x) == AUTO else _of_column(name, column_of, x) for name, x in wanted.items()
    }


def named_in(wanted: Mapping[str, object], names: Sequence[str]) -> list[str]:
    """Return the names of columns that a description, as `check_description` returns it, needs of a table."""
    needed = dict.fromkeys([*(names if _OTHERS in wanted else ()), *wanted])
    return [name for name in needed if name != _OTHERS]


def cells(name: str, column: object) -> np.ndarray:
    """Return a column of a table as an array of cells."""
    try:
        array = np.asarray(column)
    except ValueError as error:
        raise GraphoptError(
            f"column {name!r}: expected a cell in each row, found lists of different lengths"
        ) from error
    if array.dtype.kind in "TU":  # NumPy makes text of numbers beside text
        array = np.array(column, object) if isinstance(column, list | tuple) else array.astype(object)
    elif array.dtype.kind == "S":
        array = _of_column(name, np.char.decode, array).astype(object)
    if array.ndim != 1:
        raise GraphoptError(
            f"column {name!r}: expected a cell in each row, found arrays of shape {list(array.shape[1:])}"
        )
    return array


def is_frame(data: object) -> bool:
    """Return whether data is a DataFrame of pandas or Polars."""
    return all(hasattr(data, name) for name in ("to_numpy", "columns", "__getitem__"))


def names_in(table: Any) -> dict[str, Any]:
    """Return the keys of the columns of a table by their names."""
    if not isinstance(table, Mapping) and not is_frame(table):
        raise GraphoptError(f"columns: expected a DataFrame, or columns by name, found {kind_of(table)}")
    return {str(key): key for key in getattr(table, "columns", table)}


def _of_column(name: object, function: Callable[[_Given], _Made], argument: _Given) -> _Made:
    """Call a function, and name the column in its error."""
    try:
        return function(argument)
    except (GraphoptError, ValueError, TypeError, OverflowError) as error:
        raise GraphoptError(_located(name, error)) from error


def _located(name: object, error: Exception) -> str:
    text = str(error)
    return f"column {str(name)!r}{', ' if text.startswith('row ') else ': '}{text}"


def _takes(x: ir.Value, width: int) -> bool:
    """Return whether an input takes rows of features."""
    if x.shape is None or len(x.shape) != 2 or not is_floating(x):
        return False
    return not isinstance(x.shape[1], int) or x.shape[1] == width


def _prepended(
    columns: Columns, model: ir.Model, x: ir.Value, labels: Sequence[str] | None, threshold: float | None
) -> ir.Model:
    """Put the nodes of columns in front of an input."""
    graph, name = model.graph, name_of(x)
    rows = x.shape[0] if x.shape is not None else None
    inputs = [
        ir.Value(name=name, type=ir.TensorType(column.dtype), shape=ir.Shape([rows, 1]), doc_string=column.note)
        for name, column in columns.columns.items()
    ]
    model.opset_imports[MACHINE_LEARNING] = max(2, model.opset_imports.get(MACHINE_LEARNING, 2))
    with Emitter(model) as op:
        parts = [column.emit(op, value) for column, value in zip(columns.columns.values(), inputs, strict=True)]
        features = op.Cast(op.Concat(*parts, axis=1), to=x.dtype)
        classes = _classified(op, model, labels, threshold)
    swap(x, features)
    graph.inputs.remove(x)
    taken = {value.name for value in inputs}
    for value in _all_values(graph):
        value.name = _free(_ENCODED if value is features else value.name, taken)
    for output, value in classes.items():
        value.name = _free(output, taken)
        value.shape = ir.Shape([rows, *dims_of(value)[1:]])
        graph.outputs.append(value)
    graph.inputs.extend(inputs)
    graph.sort()
    names = {output: name_of(value) for output, value in classes.items()}
    _Encoded(columns._as_fields(), name_of(features), name, **names).write(model)
    if labels:
        LABELS.write(model, json.dumps(list(labels)))
    return model


def _all_values(graph: ir.Graph) -> list[ir.Value]:
    """Return the outputs of a graph, and then its other values."""
    inner = [y for node in graph.all_nodes() for y in node.outputs]
    return list(dict.fromkeys([*graph.outputs, *graph.inputs, *graph.initializers.values(), *inner]))


def _free(name: str | None, taken: set[str | None]) -> str | None:
    while name is not None and name in taken:
        name += "_"
    taken.add(name)
    return name


def _classified(
    op: Emitter, model: ir.Model, names: Sequence[str] | None, threshold: float | None
) -> dict[str, ir.Value]:
    """Emit the labels and the probabilities of rows, if one output tells them."""
    outputs = [y for y in model.graph.outputs if is_floating(y) and y.shape is not None]
    spec, count = classification_of(model), len(names or ())
    if spec is None:
        sizes = (count, 1) if count == 2 else (count,)
        scores = [y for y in outputs if len(dims_of(y)) == 2 and dims_of(y)[1] in sizes]
        if not names or len(scores) != 1:
            return {}
        two = dims_of(scores[0])[1] == 1
        kind = {"threshold": 0.0, "labels": (0.0, 1.0)} if two else {"axis": 1}
        known, activation = (
            TargetSpec(name_of(scores[0]), "binary" if two else "classification", **kind),
            None,
        )
    else:
        scores = [y for y in outputs if y.name == spec.output and has_label_per_row(y, spec)]
        known, activation = spec, activation_of(spec)
    if len(scores) != 1:
        return {}
    if threshold is not None and known.labels is not None:
        known = dataclasses.replace(known, threshold=threshold)
    classes = 2 if known.labels is not None else dims_of(scores[0])[1]
    label, rates = emit_classes(op, op.Cast(scores[0], to=ir.DataType.FLOAT), known, activation)
    named = named_classes(op, label, names) if names and count == classes else label
    return {LABEL: op.Identity(named), **({} if activation is None else {PROBABILITIES: op.Identity(rates)})}


def _with_features_as_input(model: ir.Model, note: _Encoded) -> ir.Model:
    """Make the features an input again."""
    graph = model.graph
    features = next((y for node in graph for y in node.outputs if y.name == note.features), None)
    if features is None:
        raise note.wrong(model)
    x = swap(features, ir.Value(type=features.type, shape=features.shape))
    for output in [y for y in graph.outputs if y.name in (note.label, note.probabilities) and y.name]:
        graph.outputs.remove(output)
    remove_unused_nodes(graph)
    for value in [value for value in graph.inputs if value.name in note.columns]:
        if value.uses():
            raise note.wrong(model)
        graph.inputs.remove(value)
    x.name = _free(note.input, {value.name for value in _all_values(graph)})
    graph.inputs.append(x)
    dataclasses.replace(note, features=None, input=None, label=None, probabilities=None).write(model)
    return model

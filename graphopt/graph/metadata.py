"""Read and write notes in a model's metadata, which passes leave for later passes, the executor and the export.

Each note has a type: a flag, a text, or a dataclass in JSON. Notes are saved with the model and may come from an
untrusted file, so reading checks their form. No other module accesses `metadata_props`.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import enum
import functools
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import onnx
import onnx_ir as ir

from graphopt.errors import GraphoptError
from graphopt.fields import hints, read_value

Holder = ir.Model | ir.Graph | ir.GraphView | ir.Node | ir.Value
H = TypeVar("H", bound=Holder)
N = TypeVar("N", bound="Note")

PREFIX = "graphopt."
# Keys of notes that others write
ARCHITECTURE, DERIVED, EXPORTED = (f"{PREFIX}{name}" for name in ("architecture", "derived", "exported"))


@dataclass(frozen=True)
class _Entry:
    """Store one entry of metadata under a key."""

    key: str

    def remove(self, holder: Holder) -> None:
        """Remove the entry if it exists."""
        holder.metadata_props.pop(self.key, None)

    def write_in(self, proto: onnx.ModelProto | onnx.ValueInfoProto, text: str | None, *, keep: bool = False) -> None:
        """Write the entry of a message, or remove it if `text` is None; `keep` keeps one that exists."""
        found = [i for i, entry in enumerate(proto.metadata_props) if entry.key == self.key]
        if found and keep:
            return
        for i in reversed(found):
            del proto.metadata_props[i]
        if text is not None:
            proto.metadata_props.add(key=self.key, value=text)


@dataclass(frozen=True)
class Flag(_Entry):
    """Mark models, graphs, nodes or values."""

    def set(self, holder: Holder) -> None:
        """Mark a holder."""
        holder.metadata_props[self.key] = "true"

    def mark(self, value: ir.Value) -> ir.Value:
        """Mark the node that computes a value, and return the value."""
        if (node := value.producer()) is None:
            raise GraphoptError(f"value {value.name!r}: expected a node to mark, found none")
        self.set(node)
        return value

    def is_set(self, holder: Holder) -> bool:
        """Return whether a holder is marked."""
        return self.key in holder.metadata_props


@dataclass(frozen=True)
class Text(_Entry):
    """Store one text as a note."""

    def write(self, holder: Holder, text: str) -> None:
        """Write the text."""
        holder.metadata_props[self.key] = text

    def read(self, holder: Holder) -> str | None:
        """Return the text, or None."""
        return holder.metadata_props.get(self.key)


ROLE = Text("graphopt.role")  # of an input or output: see `Role`
OWNER = Text("graphopt.owner")  # of a slot: the name of the parameter or other state that it belongs to
KIND = Text("graphopt.kind")  # of a slot: what it is called, such as `momentum`
ORIGINAL_NAME = Text("graphopt.original_name")  # of a renamed value: its name in the original model
GRADIENT_OF = Text("graphopt.gradient_of")  # of a value: the parameter that it is the gradient of
# Of a value: the weights that sum to the loss's divisor, a sum, or a mean over rows
BATCH_WEIGHT = Text("graphopt.batch_weight")
RUNTIME = Text("graphopt.needs_runtime")  # of a model: the package of the only runtime that runs it
# Of a model of images, in the words of ONNX's documentation, MetadataProps.md: how its pixels are scaled
PIXEL_RANGE = Text("Image.NominalPixelRange")
LABELS = Text("labels")  # of a model: the names of its classes, a list in JSON; the trained model has it, too
# Of an input: the names of the columns of the table that trained, a list in JSON; the trained model has it, too
COLUMN_NAMES = Text("graphopt.column_names")
ADDITIVE = Flag("graphopt.additive")  # an explanation whose elements sum to a difference of outputs
# A weight that is 1 more in the file than in its module, as of Gemma's norms
ADDS_ONE = Flag("graphopt.adds_one")
FROZEN = Flag("graphopt.frozen")  # an initializer that trains only if selected by name
UNTRAINED = Flag("graphopt.untrained")  # a weight that could train but does not in this training graph
# A BatchNormalization or Dropout whose module is in training mode, and which is in its inference form in the file
IN_TRAINING = Flag("graphopt.in_training")
OF_BATCH = Flag("graphopt.of_batch")  # a BatchNormalization that uses batch statistics in its inference form
# Several workers compute the second input of these nodes from the rows of all:
BATCH_COUNT = Flag("graphopt.batch_count")  # the number of a batch's elements per channel
BATCH_CORRECTION = Flag("graphopt.batch_correction")  # n / (n - 1) of this number n
BATCH_GRADIENT = Flag("graphopt.batch_gradient")  # a sum over a batch in the gradient of batch statistics
POSITIONS = Flag("graphopt.positions")  # a node that counts the positions in a mask
MIXED = Flag("graphopt.mixed")  # a node that computes the share of another row in each row
IN_BLOCKS = Flag("graphopt.in_blocks")  # a Scan that saves memory: its work stays in the loop
# Of a training graph: the divisor of logits when completions are drawn
TEMPERATURE = Text("graphopt.temperature")
ON_DEMAND = Flag("graphopt.on_demand")  # an output that a step reports only if it is named
# A node of the positions of tokens, int64 [tokens] or [rows, tokens], by which a table of angles is read
TOKEN_POSITIONS = Flag("graphopt.token_positions")
STOP_GRADIENT = Flag("graphopt.stop_gradient")  # a node that no gradient passes
# A node whose gradient is another than its slope on purpose, or such a gradient of the loss
SURROGATE = Flag("graphopt.surrogate")
FAKE = Flag("graphopt.fake")  # a node that rounds to integers or back, which the float model leaves out
RANGE = Text("graphopt.range")  # of an initializer: which end of an activation's range it is, low or high
EXPORTED_GRAPH = Text("pkg.torch.export.ExportedProgram.graph_signature")  # of a graph: what PyTorch exported
EXPORTED_CALL = Text("pkg.torch.onnx.fx_node")  # of a node: the call that PyTorch exported it from


def original_name(value: ir.Value) -> str:
    """Return the name of a value in the original model."""
    noted = ORIGINAL_NAME.read(value)
    return str(value.name) if noted is None else noted


def copy(source: Holder | ir.TensorProtocol, target: Holder | ir.TensorProtocol) -> None:
    """Copy all notes of `source` to `target`."""
    target.metadata_props.update(source.metadata_props)


def has_notes(node: ir.Node) -> bool:
    """Return whether a node or its outputs have metadata, which few have."""
    return bool(node.metadata_props) or any(y.metadata_props for y in node.outputs)


def all_of(holder: Holder) -> dict[str, str]:
    """Return all metadata by key, including other programs' entries; what is changed in it changes in the holder."""
    return holder.metadata_props


def remove_own(holder: Holder) -> None:
    """Remove graphopt's notes except those of the file: what is frozen, derived, or recorded."""
    kept = (FROZEN.key, EXPORTED, DERIVED, COLUMN_NAMES.key)
    for key in [key for key in holder.metadata_props if key.startswith(PREFIX) and key not in kept]:
        del holder.metadata_props[key]


def remove_foreign(node: ir.Node) -> None:
    """Remove the documentation of a node and exporters' notes that no pass reads, such as stack traces."""
    node.doc_string = None
    kept = (PREFIX, EXPORTED_CALL.key)
    for key in [key for key in node.metadata_props if not key.startswith(kept)]:
        del node.metadata_props[key]


@dataclass(frozen=True)
class Note:
    """Store several fields as a note in JSON, under a key. A subclass declares the fields, and may check them.

    Args:
        expected: the description of the fields in errors.
    """

    KEY: ClassVar[str]
    EXPECTED: ClassVar[str]

    def __init_subclass__(cls, key: str, expected: str) -> None:
        cls.KEY, cls.EXPECTED = key, expected

    def write(self, holder: H) -> H:
        """Write the note without fields that have their defaults, and return the holder."""
        defaults = {f.name: f.default for f in dataclasses.fields(self)}
        fields = {name: x for name, x in dataclasses.asdict(self).items() if x != defaults[name]}
        holder.metadata_props[self.KEY] = json.dumps(fields, default=_encoded)
        return holder

    @classmethod
    def read(cls: type[N], holder: Holder) -> N | None:
        """Return the note, or None.

        Raises:
            GraphoptError: the metadata is malformed.
        """
        text = holder.metadata_props.get(cls.KEY)
        if text is None:
            return None
        try:
            note: N = (_noted if len(text) <= _SHORT else _noted.__wrapped__)(cls, text)  # type: ignore[arg-type]
        except (json.JSONDecodeError, RecursionError) as error:
            raise cls.wrong(holder, "JSON") from error
        except (AttributeError, KeyError, TypeError, ValueError) as error:
            raise cls.wrong(holder) from error
        return note

    @classmethod
    def of_values(cls: type[N], model: ir.Model) -> Iterator[tuple[ir.Value, N]]:
        """Yield the inputs and initializers that have the note, with it."""
        for value in dict.fromkeys([*model.graph.inputs, *model.graph.initializers.values()]):
            if (note := cls.read(value)) is not None:
                yield value, note

    def check(self) -> None:
        """Raise a ValueError if a field has an invalid value of its type."""

    @classmethod
    def is_on(cls, holder: Holder) -> bool:
        """Return whether a holder has the note."""
        return cls.KEY in holder.metadata_props

    @classmethod
    def remove(cls, holder: Holder) -> None:
        """Remove the note if it exists."""
        holder.metadata_props.pop(cls.KEY, None)

    @classmethod
    def wrong(cls, holder: Holder, expected: str = "") -> GraphoptError:
        """Return the error for a malformed note."""
        return malformed(holder, cls.KEY, expected or cls.EXPECTED)


def malformed(holder: Holder, key: str, expected: str) -> GraphoptError:
    """Return the error for malformed metadata."""
    name = "the model" if isinstance(holder, ir.Model) else f"value {holder.name!r}"
    found = holder.metadata_props.get(key, "")[:80]
    return GraphoptError(f"{name}: metadata {key!r}: expected {expected}, found {found!r}")


_fields_of = functools.cache(hints)
_SHORT = 1024  # characters of a note that is decoded once


@functools.lru_cache(maxsize=2**12)
def _noted(kind: type[N], text: str) -> N:
    """Return the note that a text contains. Nobody changes a note."""
    note: N = read_value(json.loads(text), kind, _built)
    note.check()
    return note


def _encoded(x: enum.Enum | bytes) -> object:
    """Return the value of an enumeration, or bytes in base64."""
    return x.value if isinstance(x, enum.Enum) else base64.b64encode(x).decode()


def _built(x: Any, kind: Any) -> Any:
    """Return bytes, a value of an enumeration, or a dataclass from decoded JSON."""
    if kind is bytes:
        return base64.b64decode(x, validate=True)
    if isinstance(kind, enum.EnumMeta):
        return kind(x)
    return kind(**{name: read_value(value, _fields_of(kind)[name], _built) for name, value in x.items()})


def expect(*right: bool) -> None:
    """Raise the ValueError of an invalid note unless all conditions hold."""
    if not all(right):
        raise ValueError


# Notes of a model from which nothing is computed: what a folder or a page says about it
_DESCRIBING = (_Entry(ARCHITECTURE), LABELS, PIXEL_RANGE)


def forget_description(model: ir.Model) -> None:
    """Remove the notes that only describe a model."""
    for entry in _DESCRIBING:
        entry.remove(model)
    for value in model.graph.inputs:
        COLUMN_NAMES.remove(value)


def forget_description_of(proto: onnx.ModelProto) -> None:
    """Remove from a model's message the notes that only describe it, and what references to its weights describe."""
    for entry in _DESCRIBING:
        entry.write_in(proto, None)
    forget_column_names_of(proto)
    for tensor in proto.graph.initializer:
        if tensor.external_data:  # a reference
            tensor.ClearField("doc_string")
            tensor.ClearField("metadata_props")


def forget_column_names_of(proto: onnx.ModelProto) -> None:
    """Remove from a model's message the names of the columns that it has trained on."""
    for value in proto.graph.input:
        COLUMN_NAMES.write_in(value, None)


def names_in(text: str | None) -> list[str] | None:
    """Return the names in a note, or None if it is missing or another program's."""
    with contextlib.suppress(ValueError, TypeError, RecursionError):
        names = json.loads(text or "")
        if isinstance(names, list) and all(isinstance(name, str) for name in names):
            return names
    return None


def column_names_in(inputs: Sequence[ir.Value]) -> list[str] | None:
    """Return the names of the columns that the only one of a model's inputs read when it trained, or None."""
    return names_in(COLUMN_NAMES.read(inputs[0])) if len(inputs) == 1 else None


def note_column_names(inputs: Sequence[ir.Value], names: Sequence[str]) -> None:
    """Note the names of the columns that train at the only one of a model's inputs."""
    if len(inputs) == 1:
        COLUMN_NAMES.write(inputs[0], json.dumps(list(names)))


def add_note(proto: onnx.ModelProto, note: Note) -> None:
    """Write a note into a model's metadata."""
    holder = note.write(ir.Model(ir.Graph([], [], nodes=[]), ir_version=proto.ir_version))
    _Entry(note.KEY).write_in(proto, holder.metadata_props[note.KEY])

"""What each floating initializer of a model is, and who says so; kept in metadata, so it survives saving."""

from __future__ import annotations

import dataclasses
import enum
import json
from dataclasses import dataclass

import onnx_ir as ir

from graphopt.errors import GraphoptError

_KEY = "graphopt.origin"
_LEFT_OUT = "graphopt.left_out"
EXPORT_ANEW = "torch.onnx.export(..., optimize=False) keeps them"


class Kind(enum.Enum):
    """What an initializer is in the program that the model was exported from."""

    PARAMETER = "parameter"  # trains there
    COMPUTED = "computed"  # computed by the exporter from parameters, which the file no longer holds
    BUFFER = "buffer"  # state that does not train there: running statistics, tables, masks
    CONSTANT = "constant"  # a number of the program


@dataclass(frozen=True)
class Copy:
    """An initializer that is computed from a weight again, of which the exporter had made it; and how."""

    name: str
    shape: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Origin:
    """What an initializer is.

    Args:
        why: the evidence, as a phrase that a report shows.
        certain: whether the user or the exporter says so; otherwise a rule decided.
        named: whether it bears the name of one parameter or buffer of the exported program.
        by_exporter: whether an exporter that merges equal weights wrote it.
        sources: the parameters and buffers that the exporter made it from.
        copies: the initializers that were tied to it.
    """

    kind: Kind
    why: str
    certain: bool = True
    named: bool = False
    by_exporter: bool = False
    sources: tuple[str, ...] = ()
    copies: tuple[Copy, ...] = ()

    @property
    def trains(self) -> bool:
        """Whether it trains, unless the user says otherwise."""
        return self.kind in (Kind.PARAMETER, Kind.COMPUTED)

    @property
    def reason(self) -> str:
        """The evidence, and what is tied."""
        return "; ".join([self.why, *(f"{copy.name!r} is {copy.how}" for copy in self.copies)])

    def write(self, value: ir.Value) -> None:
        """Keep this in the metadata of `value`."""
        fields = dataclasses.asdict(self) | {"kind": self.kind.value}
        value.metadata_props[_KEY] = json.dumps({name: field for name, field in fields.items() if field})

    @classmethod
    def read(cls, value: ir.Value) -> Origin | None:
        """Return what the metadata of `value` says, or None."""
        text = value.metadata_props.get(_KEY)
        if text is None:
            return None
        try:
            fields = {"certain": False} | json.loads(text)
            fields["kind"], fields["why"] = Kind(fields["kind"]), str(fields["why"])
            fields["sources"] = tuple(map(str, fields.get("sources", ())))
            copies = fields.get("copies", ())
            fields["copies"] = tuple(Copy(copy["name"], tuple(copy["shape"]), copy["how"]) for copy in copies)
            return cls(**fields)
        except (KeyError, TypeError, ValueError) as error:
            raise GraphoptError(
                f"{value.name!r}: expected metadata {_KEY!r} as graphopt writes it, found {text!r}: remove it"
            ) from error


def write_left_out(model: ir.Model, names: list[str]) -> None:
    """Keep the names of the exported program's parameters that the exporter left out of the file."""
    model.metadata_props[_LEFT_OUT] = json.dumps(names)


def left_out(model: ir.Model) -> list[str]:
    """Return the names of the exported program's parameters that the exporter left out of the file."""
    text = model.metadata_props.get(_LEFT_OUT, "[]")
    try:
        return list(map(str, json.loads(text)))
    except (TypeError, ValueError) as error:
        raise GraphoptError(
            f"the model: expected metadata {_LEFT_OUT!r} as graphopt writes it, found {text!r}"
        ) from error

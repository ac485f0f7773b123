"""Record what a file's initializers were in the program from which it was exported.

`passes.weights` derives the records from each exporter's files, and `graphopt.exporting` writes what it knows of the
module.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

import onnx

from graphopt.graph.metadata import EXPORTED, Note, expect

EXPORT_ANEW = "graphopt.export(module, example) or torch.onnx.export(..., optimize=False) keeps them"


class Kind(enum.Enum):
    """Classify an initializer by its role in the exported program."""

    PARAMETER = "parameter"  # trained in that program
    FROZEN = "frozen"  # a parameter with requires_grad=False
    COMPUTED = "computed"  # computed by the exporter from parameters that the file no longer contains
    BUFFER = "buffer"  # state that is not trained: running statistics, tables, masks
    CONSTANT = "constant"  # a constant of the program


class Evidence(enum.Enum):
    """Say what tells the kind of an initializer. The first that exists decides."""

    USER = "the user"
    EXPORT = "graphopt.export"  # which knew the module
    RECORD = "a record of the exporter"
    NAME = "its name"  # and that nothing speaks against it
    USE = "its use and its numbers"


class Layout(enum.Enum):
    """Say how a file stores the numbers of the parameter that an initializer was made from."""

    SAME = "as in the framework"
    TRANSPOSED = "transposed"
    ANEW = "laid out anew"  # reshaped, reordered, or joined with others


@dataclass(frozen=True)
class Copy:
    """Record how to compute an initializer from the weight that the exporter derived it from."""

    name: str
    shape: tuple[int, ...]
    how: str


@dataclass(frozen=True)
class Origin(Note, key="graphopt.origin", expected="what an initializer is, as graphopt writes it"):
    """Record what a floating-point initializer is: its path in the framework, its layout, its kind and the evidence.

    `passes.weights` derives the records, for each exporter in its own way. Patterns, groups, adapters, warnings and
    reports read them.

    Args:
        why: the reason, as a phrase that a report shows.
        evidence: what tells the kind.
        certain: whether the user or the exporter declared the kind; otherwise, a rule decided, and it is unsure.
        named: whether its name is its path: that of a parameter or buffer of the exported program.
        by_exporter: whether the exporter that wrote it merges equal weights.
        sources: the paths of the parameters and buffers that the exporter derived it from.
        module: the path of the module that reads it, if the file does not tell its own.
        layout: how the numbers of its source are stored.
        copies: the initializers that were tied to it.
    """

    kind: Kind
    why: str
    evidence: Evidence = Evidence.USE
    certain: bool = True
    named: bool = False
    by_exporter: bool = False
    sources: tuple[str, ...] = ()
    module: str = ""
    layout: Layout = Layout.SAME
    copies: tuple[Copy, ...] = ()

    @property
    def trains(self) -> bool:
        """Return whether the initializer trains by default."""
        return self.kind in (Kind.PARAMETER, Kind.COMPUTED)

    @property
    def reason(self) -> str:
        """Return the evidence and the names of tied initializers."""
        return "; ".join([self.why, *(f"{copy.name!r} is {copy.how}" for copy in self.copies)])


@dataclass(frozen=True)
class ModuleWeight:
    """Record what an initializer is in the module from which it was exported.

    Args:
        kind: `parameter`, `frozen` or `buffer`.
        paths: its paths in the module, more than one if several modules share it.
        persistent: whether the module's state_dict contains it.
    """

    kind: Kind
    paths: tuple[str, ...]
    persistent: bool = True


@dataclass(frozen=True)
class Exported(
    Note,
    key=EXPORTED,
    expected="an exporter and a module's parameters and buffers, as graphopt.export writes them",
):
    """Record what no ONNX file says about a PyTorch module: which of its initializers train in the module.

    Nodes carry the rest: `STOP_GRADIENT`, `IN_TRAINING`, `CumulativeAverage` and `PaddingIndex`.

    Args:
        exporter: `dynamo` or `torchscript`.
        weights: parameters and buffers by the names of their initializers. Other initializers are constants.
    """

    exporter: str
    weights: Mapping[str, ModuleWeight]

    def check(self) -> None:
        kinds = (Kind.PARAMETER, Kind.FROZEN, Kind.BUFFER)
        expect(all(weight.kind in kinds and weight.paths for weight in self.weights.values()))


@dataclass(frozen=True)
class CumulativeAverage(Note, key="graphopt.cumulative_average", expected="a number of batches"):
    """Mark a BatchNormalization whose running statistics are the means of all batches (`momentum=None`).

    Args:
        batches: how many batches they are means of.
    """

    batches: int

    def check(self) -> None:
        expect(0 <= self.batches < 2**53)


@dataclass(frozen=True)
class PaddingIndex(Note, key="graphopt.padding_index", expected="a row of a table"):
    """Mark a Gather through which one row of its table gets no gradient.

    Args:
        index: the row.
    """

    index: int

    def check(self) -> None:
        expect(0 <= self.index < 2**31)


@dataclass(frozen=True)
class LeftOut(Note, key="graphopt.left_out", expected="names of parameters"):
    """Record the exported program's parameters that are missing in the file."""

    names: tuple[str, ...] = ()


@dataclass(frozen=True)
class Folded(Note, key="graphopt.folded", expected="models by the names of initializers"):
    """Record how initializers of the file are computed from weights that took their places.

    Args:
        parts: for each of these initializers, a serialized model from weights to its numbers.
    """

    parts: Mapping[str, bytes] = field(default_factory=dict)

    def models(self) -> dict[str, onnx.ModelProto]:
        """Return the models by the names of the initializers."""
        return {name: onnx.ModelProto.FromString(part) for name, part in self.parts.items()}

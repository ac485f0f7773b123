"""Collect the fields of a proposed recipe, and why each was chosen."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser

from graphopt.overrides import list_text

HEAD_RATE = "0.005"  # of AdamW, on features of a head that are standardized
VALIDATION_LOSS = "validation_loss"
GIVE_ROWS = "give rows of what it takes, a table or an .npz of arrays by the names of its inputs, with 'target'"


@dataclass
class Proposal:
    """Hold the fields of a recipe, as the command line writes them, and lines that say why, by their topics.

    Args:
        said: the fields that the user has named, which win.
        fields: those that are proposed.
        lines: what to print about them.
    """

    said: Mapping[str, str]
    fields: dict[str, str] = field(default_factory=dict)
    lines: dict[str, str] = field(default_factory=dict)

    @property
    def overrides(self) -> list[str]:
        """Return the fields as arguments of the command."""
        return [f"{name}={text}" for name, text in {**self.fields, **self.said}.items()]

    def value(self, name: str) -> str | None:
        """Return a field, as text."""
        return self.said.get(name, self.fields.get(name))

    def arguments(self, part: str, names: Sequence[str]) -> dict[str, Any]:
        """Return those of a part's fields that the user has named, as Hydra reads them."""
        given = {name: self.said[f"{part}.{name}"] for name in names if f"{part}.{name}" in self.said}
        return {name: read(f"{name}={text}") for name, text in given.items()}

    def wait(self, epochs: int, patience: int) -> None:
        """Propose to train until the measure that chooses the epoch has not improved in some epochs."""
        if self.said.get("fit.validation") not in ("null", "0"):
            measure = self.said.get("fit.checkpoint.best", "null")
            monitor = "" if measure in ("null", VALIDATION_LOSS) else f"monitor: {measure}, "
            self.fields["callbacks.early_stopping"] = f"{{{monitor}patience: {patience}}}"
        self.fields["fit.epochs"] = str(epochs)

    def cache(self) -> None:
        """Propose to compute the features of frozen layers once, unless each epoch has other images."""
        if self.said.get("augment", "none") == "none":
            self.fields["fit.cache_features"] = "true"

    def head(self, labels: Sequence[str] | None, *, grow: bool = False) -> None:
        """Propose a head, which trains on features that are computed once; `labels` are the names of its classes."""
        if self.said.get("adapter", "head") != "head":
            return
        self.fields |= {
            "adapter": "head",
            "adapter.standardize": "true",
            "optimizer.learning_rate": HEAD_RATE,
        }
        self.cache()
        if (output := self.value("loss.output")) is not None:
            self.fields["adapter.output"] = output
        if grow:
            self.fields["adapter.grow"] = "true"
        if labels is not None:
            self.fields["data.labels"] = list_text(labels)


def read(override: str) -> Any:
    """Return the value of a field as Hydra reads it."""
    return OverridesParser.create().parse_override(override).value()

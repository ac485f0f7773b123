"""Adapt weights by matrices of low rank."""

from __future__ import annotations

import glob
import math
import os
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar, Literal

import numpy as np
import onnx_ir as ir
import onnx_ir.passes.common as common
from onnx_ir import Value

from graphopt.adapters.naming import Names
from graphopt.adapters.targets import AdapterTarget
from graphopt.errors import GraphoptError
from graphopt.files import ReadPath
from graphopt.graph.emitter import Emitter
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import original_name
from graphopt.graph.rewriting import Pass, Pattern
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.weight_kinds import weight_kinds_of
from graphopt.intervals import within
from passes.adapters.adapter import Adapter
from passes.adapters.loaded import Given, given_by, set_value
from passes.differentiate import stop_gradient


@dataclass(frozen=True)
class LoadedLoRA(Pass):
    """Add the adapters of a folder of peft, or of an adapter file of ONNX Runtime, to continue their training.

    Ranks and scales, and whether the norms train (DoRA), come from there. Modules that trained in full replace the
    model's weights and train, too. Names of modules may differ from those of the file by one prefix.

    Files may be untrusted: tensors come from safetensors or from ONNX Runtime's format, nothing is unpickled, and no
    path in a config is followed.

    Args:
        path: the folder of peft, with adapter_config.json and adapter_model.safetensors, or the adapter file.
        names: the modules by patterns of names of weights, if these do not tell them; see `graphopt.save_adapter`.
        dropout: the share of the elements of x that a step drops before A.
        leave_out: patterns of modules of the folder to leave out, such as a pooler that no output of the model needs.

    Raises:
        GraphoptError: a file is missing or malformed, or has an adapter of a module that the model lacks, or of another
            shape.

    >>> steps = {"loss": passes.CrossEntropy(), "optimizer": passes.AdamW(1e-3)}
    >>> step = graphopt.compile(models.mlp((4,), 3, hidden=[8]), adapter=passes.LoRA("layers.0.*", rank=2), **steps)
    >>> graphopt.save_adapter(graphopt.Executor(step), "adapter", form="peft")
    >>> again = graphopt.compile(models.mlp((4,), 3, hidden=[8]), adapter=passes.LoadedLoRA("adapter"), **steps)
    >>> list(graphopt.Executor(again).parameters)
    ['layers.0.weight.lora_A', 'layers.0.weight.lora_B']
    """

    alters: ClassVar[str] = "adds a trained adapter"

    path: ReadPath
    names: Names = None
    dropout: float = within("[0, 1)", 0.0)
    leave_out: Pattern = field(default=None, kw_only=True)
    changes_forward = True

    def rewrite(self, model: ir.Model) -> None:
        common.LiftSubgraphInitializersToMainGraphPass()(model)
        ensure_typed(model)
        everything = given_by(model, self.path, self.names, self.leave_out)
        alike: dict[str, list[Given]] = {}
        for given in everything:
            alike.setdefault(repr(replace(given, weight="", arrays={})), []).append(given)
        for first, *others in alike.values():
            root = math.sqrt(first.rank) if first.rank_stabilized else first.rank
            LoRA(
                [glob.escape(given.weight) for given in (first, *others)],
                rank=first.rank,
                alpha=first.scale * root,
                dropout=self.dropout,
                scaling="rank_stabilized" if first.rank_stabilized else "standard",
                dora=first.dora,
                parts=dict(first.sizes) or None,
            ).rewrite(model)
        notes = {(note.weight, note.part): note for note in reversed(adapted(model))}  # the last is the new one
        for given in everything:
            for part, arrays in given.arrays.items():
                weight = original_name(model.graph.initializers[given.weight])
                for name, array in zip(notes[weight, part].values, arrays, strict=True):
                    set_value(model.graph.initializers[name], array, os.fspath(self.path))


@dataclass(frozen=True)
class LoRA(Adapter):
    """Add scale (x A) B to a product x W, where A and B have few columns and rows (Hu et al. 2021).

    A is [inputs, rank] and B is [rank, outputs]. B starts at zero, so that the model starts as it is. For a
    convolution, A has `rank` filters of the same window, and B mixes their channels. For an embedding, A has `rank`
    numbers for each row and starts at zero, and B starts with normal random numbers. A weight W of a recurrence becomes
    W + scale A B, for each direction. All of this is as in PEFT, except for what PEFT lacks: recurrences, transposed
    convolutions, and A of grouped and dilated convolutions, which has the groups and the dilations of the weight.

    Without a pattern, gates of one output get none, unless the rank is 1, nor do grouped convolutions that the rank
    does not fit.

    Args:
        rank: the number of columns of A.
        alpha: the numerator of the scale.
        dropout: the share of the elements of x that a step drops before A, but not before W; `passes.TrainingMode` has
            the seed.
        scaling: the scale: `standard` is alpha / rank, and `rank_stabilized` is alpha / sqrt(rank) (Kalajdzievski
            2023).
        init: the initial values of A: `kaiming` is uniform in +-1 / sqrt(inputs), and `gaussian` has the standard
            deviation 1 / rank.
        dora: train the norms of the weight's columns, too: m (W + scale A B) / |W + scale A B|, where the gradient
            takes the norm in the denominator for a constant (Liu et al. 2024).

    Raises:
        GraphoptError: the rank is larger than a weight, or not a multiple of a convolution's groups.

    >>> steps = {"adapter": passes.LoRA("layers.0.*", rank=2), "loss": passes.CrossEntropy()}
    >>> step = graphopt.compile(models.mlp((8,), 3, hidden=[16]), **steps, optimizer=passes.AdamW(1e-3))
    >>> {name: array.shape for name, array in graphopt.Executor(step).parameters.items()}
    {'layers.0.weight.lora_A': (8, 2), 'layers.0.weight.lora_B': (2, 16)}
    """

    rank: int = within("[1, inf)", 8)
    alpha: float = within("(0, inf)", 16.0)
    dropout: float = within("[0, 1)", 0.0)
    scaling: Literal["standard", "rank_stabilized"] = "standard"
    init: Literal["kaiming", "gaussian"] = "kaiming"
    dora: bool = False

    @staticmethod
    def load(
        path: str | os.PathLike[str], names: Names = None, *, dropout: float = 0.0, leave_out: Pattern = None
    ) -> LoadedLoRA:
        """Return the pass that adds the adapters of a folder of peft or of an adapter file; see `LoadedLoRA`."""
        return LoadedLoRA(path, names, dropout, leave_out=leave_out)

    @property
    def scale(self) -> float:
        """Return the factor of the change."""
        return self.alpha / (self.rank if self.scaling == "standard" else math.sqrt(self.rank))

    def noted(self, target: AdapterTarget) -> dict[str, Any]:
        stabilized = self.scaling == "rank_stabilized"
        return {"scale": self.scale, "alpha": float(self.alpha), "rank_stabilized": stabilized}

    def fits(self, target: AdapterTarget) -> bool:
        groups, (inputs, outputs) = target.groups, target.sizes
        if groups == 1:
            return outputs > 1 or self.rank == 1  # of one output are gates, such as that of shared experts
        return not (self.rank % groups or self.rank > min(inputs, outputs) * groups)

    def check(self, target: AdapterTarget) -> None:
        name, groups = target.name, target.groups
        most = min(target.sizes) * groups
        if self.rank > most:
            raise GraphoptError(
                f"LoRA(rank={self.rank}): weight {name!r}: expected at most {most}, the rank of "
                f"{'x'.join(map(str, target.sizes))} numbers, found {self.rank}: leave it out, or reduce the rank"
            )
        if self.rank % groups:
            raise GraphoptError(
                f"LoRA(rank={self.rank}): weight {name!r}: expected a multiple of the {groups} groups of its "
                f"convolution, found {self.rank}: leave it out by leave_out={name!r}"
            )
        is_own = weight_kinds_of(target.node)[target.index].x is None
        if self.dropout and (is_own or target.source.unrounded is not None):
            raise GraphoptError(
                f"LoRA(dropout={self.dropout}): weight {name!r}: expected no dropout for a {target.kind}, whose "
                "adapter changes the weight itself, found some: adapt it by another LoRA without dropout"
            )
        if self.dora and target.reading.scale is not None:
            raise GraphoptError(
                f"LoRA(dora=True): weight {name!r}: expected floating-point numbers, whose norms change, found packed "
                "ones: set dora=False"
            )

    def initial(self, target: AdapterTarget, generator: np.random.Generator) -> dict[str, np.ndarray]:
        a, b = target.shapes(self.rank)
        bound = 1 / math.sqrt(target.sizes[0])
        if target.kind == "embedding":
            values = {"lora_A": np.zeros(a), "lora_B": generator.standard_normal(b)}
        elif self.init == "gaussian":
            values = {"lora_A": generator.normal(0, 1 / self.rank, a), "lora_B": np.zeros(b)}
        else:
            values = {"lora_A": generator.uniform(-bound, bound, a), "lora_B": np.zeros(b)}
        return {**values, **({"lora_magnitude": _norms(target)} if self.dora else {})}

    def delta(self, op: Emitter, target: AdapterTarget, x: Value, *values: Value) -> Value:
        a, b, *magnitude = values
        if self.dropout and target.droppable:
            x = op.Dropout(x, op.constant(np.array(self.dropout, np.float32)), op.constant(np.array(True)))
        change = target.up(op, self.scale * target.down(op, x, a), b)
        if not magnitude:
            return change
        w, (first, last) = target.matrix(op, target.w), target.columns or (0, 0)
        w = op.Slice(w, [first], [last], [-1]) if last else w
        product = op.MatMul(target.matrix(op, a), target.matrix(op, b, up=True))
        norms = op.ReduceL2(w + self.scale * product, [-2], keepdims=0)
        norms = stop_gradient(op, op.Reshape(norms, op.shape_of(magnitude[0])))
        factor = target.spread(op, magnitude[0] / norms)
        return (factor - 1) * target.product(op) + factor * change

    @staticmethod
    def merge(w: np.ndarray, scale: float, *values: np.ndarray) -> np.ndarray:
        a, b, *magnitude = values
        changed: np.ndarray = w + scale * (a @ b)
        if magnitude:
            changed *= magnitude[0] / np.sqrt((changed * changed).sum(-2, keepdims=True))
        return changed


def _norms(target: AdapterTarget) -> np.ndarray:
    """Return the norms of the columns of a target's weight, in the shape in which they are stored."""
    matrix = target.reading.matrix(target.numbers().astype(np.float64), target.groups)
    columns = matrix[..., slice(*target.columns)] if target.columns else matrix
    keepdims = not target.reading.is_filters and matrix.ndim > 2
    norms = np.sqrt((columns * columns).sum(-2, keepdims=keepdims))
    return norms if keepdims else norms.ravel()

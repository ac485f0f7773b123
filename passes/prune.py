"""Prune weights in the training graph: the pipeline's step `prune`."""

from __future__ import annotations

import math
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Literal

import numpy as np
import onnx_ir as ir

from graphopt.errors import GraphoptError, some
from graphopt.graph import inference, state
from graphopt.graph.channels import OF_OUTPUT, Channels
from graphopt.graph.emitter import Emitter
from graphopt.graph.merging import adapted
from graphopt.graph.metadata import OWNER, original_name
from graphopt.graph.rewriting import Pass, Pattern, retire, selects
from graphopt.graph.roles import STATE, Role, updated, with_role
from graphopt.graph.shapes import ensure_typed
from graphopt.graph.state import MASK, Pruning
from graphopt.graph.values import constant_of, is_static, name_of, next_of, wide_type
from graphopt.intervals import within
from passes.optimizers.slots import initial_array
from passes.quantization.quantize_weights import readings_of

_N_OF_M = re.compile(r"([1-9]\d{0,3}):([1-9]\d{0,3})")
_Masks = Mapping[str, np.ndarray]
_AS_IT_IS = (
    "Cast",
    "DequantizeLinear",
    "Identity",
    "QuantizeLinear",
)  # 0 stays 0, and axes stay where they are


@dataclass(frozen=True)
class Prune(Pass):
    """Keep weights at 0: the smallest of each layer, of all layers, of each few neighbours, or whole channels.

    Each pruned weight NAME has state `NAME.mask`, true where it is not pruned. Each step ends by setting the others to
    0, also in averages and other copies of the weight, so that neither momentum nor weight decay moves them. Run it
    after the optimizer and the average. What is pruned stays pruned. Without `start` and `end`, the initial weights are
    pruned. With `end`, the share of zeros after update t is

        sparsity (1 - (1 - (t - start) / (end - start))^3)

    (Zhu and Gupta 2017, https://arxiv.org/abs/1710.01878). `graphopt.remove_channels` makes a trained model smaller
    whose channels are pruned.

    Args:
        sparsity: the share of numbers to prune; of channels, at least one of each layer stays.
        structure: `element`; N:M for the N largest of every M neighbours that a product sums over, such as `2:4`, which
            sets the sparsity; or `channel`, the outputs of a layer with the smallest filters in the Euclidean norm,
            with their biases and normalization.
        scope: prune the share of each `layer`, or of all elements together (`global`), which suits small layers.
        start: the update after which pruning starts; 0 for the initial weights.
        end: the update after which the masks stay; None to prune at once.
        every: the number of updates from one pruning to the next.
        parameters: shell-style patterns of the names of weights, one or several; by default, all weights of products
            and convolutions that train.
        leave_out: do not prune these.
        masks: the masks of weights by name, in place of all of this, such as those of an earlier run, from which a
            lottery ticket starts again (Frankle and Carbin 2019, https://arxiv.org/abs/1803.03635).

    Raises:
        GraphoptError: options contradict each other, the model has no optimizer, a pattern matches no parameter,
            nothing is left beside adapters and the weights that they change, or masks do not fit the parameters.

    Warns:
        UserWarning: weights that are named cannot be pruned in this structure.

    >>> steps = {"optimizer": passes.AdamW(), "prune": passes.Prune(0.75)}
    >>> executor = graphopt.Executor(graphopt.compile(models.mlp((4,), 3), loss=passes.CrossEntropy(), **steps))
    >>> float((executor.parameters["layers.0.weight"] == 0).mean())
    0.75
    """

    alters: ClassVar[str] = "sets weights to 0"

    sparsity: float | None = within("[0, 1)", None)
    structure: str = field(default="element", kw_only=True)
    scope: Literal["layer", "global"] = field(default="layer", kw_only=True)
    start: int = within("[0, inf)", 0, kw_only=True)
    end: int | None = within("[1, inf)", None, kw_only=True)
    every: int = within("[1, inf)", 10, kw_only=True)
    parameters: Pattern = field(default=None, kw_only=True)
    leave_out: Pattern = field(default=None, kw_only=True)
    masks: _Masks | None = field(default=None, kw_only=True, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        n, m = self._n_of_m or (0, 1)
        if self.structure not in ("element", "channel") and not 0 < n < m:
            raise GraphoptError(
                f"Prune(structure={self.structure!r}): expected 'element', 'channel', or N:M with N below M, such as "
                "'2:4'"
            )
        if self.scope == "global" and self.structure != "element":
            raise GraphoptError(
                f"Prune(scope='global'): expected structure='element', found {self.structure!r}: leave scope out"
            )
        needless = [name for name in ("sparsity", "end") if getattr(self, name) is not None]
        if (self.masks is not None or n) and needless:
            due = "masks" if self.masks is not None else f"structure={self.structure!r}"
            raise GraphoptError(f"Prune: expected {due} without {needless[0]}, found both: leave one out")
        if self.masks is None and not n and self.sparsity is None:
            raise GraphoptError("Prune: expected a sparsity or masks, found neither: write passes.Prune(0.9)")
        if self.end is not None and self.end <= self.start:
            raise GraphoptError(f"Prune(end={self.end}): expected an update after start={self.start}")

    @property
    def _n_of_m(self) -> tuple[int, int] | None:
        found = _N_OF_M.fullmatch(self.structure)
        return None if found is None else (int(found[1]), int(found[2]))

    def requires(self, model: ir.Model) -> None:
        self.follows_optimizer(model)
        if state.masks(model):
            raise GraphoptError("Prune: expected a model without masks, found some: use one Prune")
        if state.accumulators(model):
            raise GraphoptError("Prune: expected it before Accumulate, found it after: run it first")

    def rewrite(self, model: ir.Model) -> None:
        busy = {name for note in adapted(model) for name in (note.weight, *note.values)}
        trained = {name_of(w): w for w in updated(model) if busy.isdisjoint((w.name, original_name(w)))}
        pools = self._given(trained) if self.masks is not None else list(self._pools(model, trained))
        if not pools:
            raise GraphoptError(
                f"Prune: expected weights of products to prune in the structure {self.structure!r}, found "
                f"{some([repr(name) for name in trained]) or 'none'}{', and adapters' if busy else ''}"
            )
        fixed = self.masks is not None or (self.start == 0 and self.end is None)
        owners: dict[str, list[ir.Value]] = {}
        for x in with_role(model, Role.SLOT):
            owners.setdefault(OWNER.read(x) or "", []).append(x)
        masks: dict[ir.Value, ir.Value] = {}
        for pool in pools:
            own = pool.start(self._kept(pool) if fixed else pool.size)
            for part, numbers in zip(pool.parts, own, strict=True):
                if not (numbers.any() and self._kept(pool)):
                    self._warn(f"leaves nothing of {name_of(part.w)!r}: name it in leave_out, or prune less of it")
                masks[part.w] = state.declare_slot(model, part.w, MASK, numbers)
        following = {name_of(y): y for y in with_role(model, Role.NEXT)}
        with Emitter(model) as op:
            new = masks if fixed else self._renewed(model, op, pools, masks, following)
            for w, mask in masks.items():
                for x in [w, *filter(_Copy(w), owners.get(name_of(w), ()))]:
                    y = following[next_of(x)]
                    model.graph.outputs.remove(y)
                    retire(model, y)
                    state.set_next(model, x, op.Where(new[w], y, op.constant(0.0, like=x)))
                    first = x.meta[state.INITIAL].numpy()
                    start = np.where(mask.meta[state.INITIAL].numpy(), first, first.dtype.type(0))
                    x.meta[state.INITIAL] = ir.tensor(start, name=x.name)
                state.set_next(model, mask, op.Identity(new[w]))
        sizes = [pool.rows * pool.size for pool in pools]
        pruned = sum(pool.rows * (pool.size - self._kept(pool)) for pool in pools)
        Pruning(0 if fixed else self.end or self.start, pruned / sum(sizes)).write(model)

    def _kept(self, pool: _Pool) -> int:
        """Return how many numbers of each row of a pool are not 0 at the end; PyTorch rounds their share as well."""
        if pool.given is not None:
            return int(pool.given.sum())
        if self._n_of_m is not None:
            return self._n_of_m[0]
        pruned = round((self.sparsity or 0.0) * pool.size)
        return pool.size - (min(pruned, pool.size - 1) if self.structure == "channel" else pruned)

    def _renewed(
        self,
        model: ir.Model,
        op: Emitter,
        pools: Sequence[_Pool],
        masks: Mapping[ir.Value, ir.Value],
        following: Mapping[str, ir.Value],
    ) -> dict[ir.Value, ir.Value]:
        """Emit the masks after this step, which an If renews when it is time to."""
        end = self.start if self.end is None else self.end
        t = state.counter(model) + 1
        due = op.Equal(t, end)
        if end > self.start:
            since = t - self.start
            each = op.Equal(op.Mod(since, self.every), 0)
            due = op.Or(due, op.And(each, op.And(op.Greater(since, 0), op.Less(t, end))))
        pruned = np.array([pool.size - self._kept(pool) for pool in pools], np.int64)
        sizes = np.array([pool.size for pool in pools], np.int64)
        kept = op.constant(sizes - pruned)
        if end > self.start:
            done = op.Cast(since, to=ir.DataType.FLOAT) / float(end - self.start)
            left = 1.0 - done
            share = (1.0 - left * left * left) * float(self.sparsity or 0.0)
            now = op.Cast(op.Round(share * op.constant(sizes.astype(np.float32))), to=ir.DataType.INT64)
            kept = op.constant(sizes) - op.Min(now, op.constant(pruned))
        then, other = (ir.Graph([], [], nodes=[], name=name) for name in ("renewed", "kept"))
        inside, outside = op.within(then), op.within(other)
        for i, pool in enumerate(pools):
            count = inside.Slice(kept, [i], [i + 1], [0])
            values = {part.w: (following[next_of(part.w)], masks[part.w]) for part in pool.parts}
            then.outputs.extend(pool.emit(inside, values, count))
            other.outputs.extend(outside.Identity(masks[part.w]) for part in pool.parts)
        parts = [part.w for pool in pools for part in pool.parts]
        made = op.If(due, then_branch=then, else_branch=other, _outputs=len(parts))
        new = dict(zip(parts, [made] if len(parts) == 1 else made, strict=True))
        for w, mask in new.items():
            mask.type, mask.shape = masks[w].type, masks[w].shape
        return new

    # --- what is pruned together ---

    def _given(self, trained: Mapping[str, ir.Value]) -> list[_Pool]:
        pools = []
        for name, mask in (self.masks or {}).items():
            w, found = trained.get(name), np.asarray(mask)
            shape = None if w is None or w.shape is None else w.shape.numpy()
            if w is None:
                raise GraphoptError(
                    f"Prune(masks): {name!r}: expected a parameter that trains, found none of this name; the model "
                    f"trains {some([repr(each) for each in trained])}"
                )
            if found.dtype != bool or not _broadcasts(found.shape, shape):
                raise GraphoptError(
                    f"Prune(masks): {name!r}: expected bool{list(shape or ())}, found {found.dtype}{list(found.shape)}"
                )
            pools.append(_Pool([_Part(w, found.shape)], 1, found.size, given=found))
        return pools

    def _pools(self, model: ir.Model, trained: Mapping[str, ir.Value]) -> Iterator[_Pool]:
        for option in ("parameters", "leave_out"):
            pattern = getattr(self, option)
            if pattern and not any(selects(pattern, w) for w in trained.values()):
                raise GraphoptError(
                    f"Prune: {option}={pattern!r} matches no parameter; the model trains: {', '.join(trained)}"
                )
        outputs = with_role(model, Role.PREDICTION, Role.SOURCE) or with_role(model, Role.LOSS)
        part = inference.extract(model, outputs)
        ensure_typed(part)
        summed = _summed_axes(part)
        chosen = [w for name, w in trained.items() if self._chooses(w, name in summed)]
        if self.structure == "channel":
            yield from self._channel_pools(part, trained, chosen)
            return
        parts = [_Part(w, _dims(w)) for w in chosen]
        if self.structure == "element":
            together = [parts] if self.scope == "global" and parts else [[each] for each in parts]
            yield from (_Pool(group, 1, sum(math.prod(each.shape) for each in group)) for group in together)
            return
        m = (self._n_of_m or (1, 1))[1]
        for each in parts:
            axis = summed.get(name_of(each.w))
            if axis is None or each.shape[axis] % m:
                found = "no product sums over it" if axis is None else f"a product sums over {each.shape[axis]} numbers"
                self._warn(f"leaves {name_of(each.w)!r}, since {found}, expected a multiple of {m}")
                continue
            yield _Pool([replace(each, last=axis)], math.prod(each.shape) // m, m)

    def _chooses(self, w: ir.Value, is_of_product: bool) -> bool:
        if not is_static(w) or selects(self.leave_out, w):
            return False
        return selects(self.parameters, w) if self.parameters else is_of_product

    def _warn(self, what: str) -> None:
        warnings.warn(f"Prune: {what}", stacklevel=2)

    def _channel_pools(
        self, part: ir.Model, trained: Mapping[str, ir.Value], chosen: Sequence[ir.Value]
    ) -> Iterator[_Pool]:
        own = {x: trained.get(_owner(x)) for x in with_role(part, *STATE)}
        names, channels = {name_of(w) for w in chosen}, Channels(part, [*own])
        left: list[str] = []
        for slices, reason in channels.sets():
            filters = [each for each in slices if len(each.weight.shape or ()) > 1]
            own_names = {_owner(each.weight) for each in filters}
            if not own_names or not own_names <= names:
                continue
            frozen = {name_of(each.weight): constant_of(each.weight) for each in slices if own.get(each.weight) is None}
            fixed = [name for name, numbers in frozen.items() if numbers is None or numbers.any()]
            if fixed:
                reason = f"{fixed[0]!r} does not train"
            if reason is not None:
                if self.parameters or reason != OF_OUTPUT:
                    left.append(f"{some([repr(x) for x in sorted(own_names)])}, since {reason}")
                continue
            parts = []
            for each in slices:
                if (w := own.get(each.weight)) is None:
                    continue
                shape = [len(each.labels) if i == each.axis else 1 for i in range(len(_dims(w)))]
                parts.append(_Part(w, tuple(shape), each.axis, scores=each in filters))
            yield _Pool(parts, 1, len(slices[0].labels), channels=True)
        if left:
            self._warn(f"leaves the channels of {some(left)}")


def _owner(x: ir.Value) -> str:
    """Return the name of the parameter that an input of an inference model is, or is the average of."""
    return OWNER.read(x) or name_of(x)


def _dims(w: ir.Value) -> tuple[int, ...]:
    return () if w.shape is None else tuple(int(size) for size in w.shape.numpy())


def _broadcasts(shape: tuple[int, ...], other: tuple[int, ...] | None) -> bool:
    pairs = zip(shape, other or (), strict=False)
    return other is not None and len(shape) == len(other) and all(a in (1, b) for a, b in pairs)


class _Copy:
    """Tell whether a slot starts as a copy of a parameter, as averages and points of optimizers do."""

    def __init__(self, w: ir.Value) -> None:
        self._first = initial_array(w)

    def __call__(self, x: ir.Value) -> bool:
        tensor = x.meta.get(state.INITIAL)
        return tensor is not None and np.array_equal(tensor.numpy(), self._first)


def _summed_axes(part: ir.Model) -> dict[str, int | None]:
    """Return the axis of each weight that products or convolutions sum over, of filters the channels; None for two."""
    found: dict[str, set[int]] = defaultdict(set)
    for w in with_role(part, *STATE):
        found[_owner(w)].update(axis for _, kind, axis in readings_of(w, _AS_IT_IS) if kind is not None)
    return {name: min(axes) if len(axes) == 1 else None for name, axes in found.items() if axes}


@dataclass(frozen=True)
class _Part:
    """Hold a parameter that is pruned.

    Args:
        w: the parameter.
        shape: the shape of its mask.
        last: the axis of neighbours, or of channels.
        scores: whether its numbers decide, and not only follow.
    """

    w: ir.Value
    shape: tuple[int, ...]
    last: int | None = None
    scores: bool = True

    @property
    def perm(self) -> list[int]:
        rank = len(self.shape)
        last = rank - 1 if self.last is None else self.last
        return [*(axis for axis in range(rank) if axis != last), last]


@dataclass(frozen=True)
class _Pool:
    """Hold parameters among whose numbers, in rows, the largest are kept.

    Args:
        parts: the parameters.
        rows: the number of rows.
        size: the length of a row.
        channels: whether a number of a row is the norm of a channel in all parts; otherwise, rows hold the numbers of
            one part after the other.
        given: the mask of the only part.
    """

    parts: Sequence[_Part]
    rows: int
    size: int
    channels: bool = False
    given: np.ndarray | None = None

    def start(self, kept: int) -> list[np.ndarray]:
        """Return the masks that keep the largest initial numbers, so many of each row."""
        if self.given is not None:
            return [self.given]
        if kept == self.size:
            return [np.ones(part.shape, bool) for part in self.parts]
        rows = []
        for part in self.parts:
            w = np.abs(initial_array(part.w)).transpose(part.perm)
            if self.channels and part.scores:
                rows.append(np.square(w, dtype=np.float32).reshape(-1, self.size).sum(0, keepdims=True))
            elif not self.channels:
                rows.append(w.reshape(self.rows, -1))
        scores = np.sum(rows, axis=0) if self.channels else np.concatenate(rows, axis=1)
        chosen = np.zeros(scores.shape, bool)
        if kept:
            largest = np.argpartition(scores, -kept, axis=1)[:, -kept:]
            np.put_along_axis(chosen, largest, True, axis=1)
        if self.channels:
            return [chosen.reshape(part.shape) for part in self.parts]
        ends = np.cumsum([math.prod(part.shape) // self.rows for part in self.parts])
        return [
            self._masked(piece, part) for piece, part in zip(np.split(chosen, ends[:-1], 1), self.parts, strict=True)
        ]

    def _masked(self, piece: np.ndarray, part: _Part) -> np.ndarray:
        turned = piece.reshape([part.shape[axis] for axis in part.perm])
        return np.ascontiguousarray(turned.transpose(np.argsort(part.perm)))

    def emit(
        self, op: Emitter, values: Mapping[ir.Value, tuple[ir.Value, ir.Value]], kept: ir.Value
    ) -> Iterator[ir.Value]:
        """Emit the masks that keep the largest numbers, so many of each row, of those that the old masks keep.

        Args:
            values: the new value of each parameter, and its old mask.
            kept: how many, an int64 vector of one number.
        """
        rows = []
        for part in self.parts:
            y, mask = values[part.w]
            wide = op.cast(y, wide_type(part.w))
            w = op.Where(mask, op.Abs(wide), op.constant(0.0, like=wide))
            turned = op.Transpose(w, perm=part.perm)
            if self.channels and part.scores:
                rows.append(op.ReduceSum(op.Reshape(op.Mul(turned, turned), [-1, self.size]), [0], keepdims=1))
            elif not self.channels:
                flat = op.Reshape(turned, [self.rows, -1])
                rows.append(flat if len(self.parts) == 1 else op.cast(flat, ir.DataType.FLOAT))
        scores = op.Sum(*rows) if self.channels else op.Concat(*rows, axis=1)
        _, places = op.TopK(scores, kept, axis=1, sorted=0, _outputs=2)
        marks = op.Expand(op.constant(-1.0, like=scores), op.Shape(places))
        chosen = op.Less(op.ScatterElements(scores, places, marks, axis=1), op.constant(0.0, like=scores))
        start = 0
        for part in self.parts:
            mask = values[part.w][1]
            if self.channels:
                yield op.And(op.Reshape(chosen, list(part.shape)), mask)
                continue
            end = start + math.prod(part.shape) // self.rows
            piece = op.Slice(chosen, [start], [end], [1]) if len(self.parts) > 1 else chosen
            turned = op.Reshape(piece, [part.shape[axis] for axis in part.perm])
            yield op.And(op.Transpose(turned, perm=np.argsort(part.perm).tolist()), mask)
            start = end

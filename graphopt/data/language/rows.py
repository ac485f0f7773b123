"""Arrange sequences of tokens in rows: cut them, pad them, or pack several into a row."""

from __future__ import annotations

import warnings
from bisect import bisect_left, insort
from collections.abc import Mapping, Sequence

import numpy as np

from graphopt.data.dataset import TARGET, Array, LazyArray
from graphopt.data.language.documents import Tokenized
from graphopt.data.language.preferences import LABEL, REJECTED
from graphopt.errors import GraphoptError

TOKENS, LABELS, COMPLETION = "input_ids", "labels", "completion_mask"
SEGMENTS, ATTENTION, POSITIONS = "segments", "attention_mask", "position_ids"
PADDED_TO = ("longest", "context")
IGNORED = -100  # a target that does not count, as in PyTorch
MOST_TOKENS = 2**34  # in all rows

Pieces = list[tuple[np.ndarray, np.ndarray]]  # the tokens of sequences, and which count


def arranged(
    sequences: Tokenized,
    length: int,
    source: str,
    *,
    packed: bool = False,
    filled: bool = False,
    pad: int = 0,
) -> dict[str, Array]:
    """Return rows of tokens, and the arrays that models and losses read beside them.

    Documents are joined and cut into full rows. Examples have a row each, and are cut off at `length`; rows are as
    long as the longest, or of `length` if they are `filled`. If `packed`, rows hold several sequences, documents in
    pieces of at most `length`. The other text of each example has arrays of its own.
    """
    pieces = list(zip(sequences.tokens, sequences.counted, strict=True))
    if sequences.are_documents and not packed:
        return _stream(pieces, length, source)
    if sequences.are_documents:
        pieces = [piece for whole in pieces for piece in _split_document(*whole, length)]
    else:
        pieces, kept = _shortened(pieces, length, source, 1 if sequences.other is None else 2)
    pieces = [piece for piece in pieces if len(piece[0])]
    rows = _packed([len(x) for x, _ in pieces], length) if packed else [[i] for i in range(len(pieces))]
    if not rows:
        raise GraphoptError(f"{source}: expected texts, found none with a token")
    width = length if packed or filled else max(len(x) for x, _ in pieces)
    if sequences.other is None:
        return _padded_rows(rows, pieces, width, pad)
    first, other = (_padded_rows(rows[i::2], pieces, width, pad) for i in range(2))
    labels = {} if sequences.labels is None else {LABEL: np.asarray(sequences.labels, np.int64)[kept]}
    return {**first, **{f"{name}_{sequences.other}": x for name, x in other.items()}, **labels}


def marks(arrays: Mapping[str, Array], *, completion_only: bool, packed: bool) -> list[tuple[tuple[str, ...], str]]:
    """Return the names of arrays of which a graph reads one of each group, with the warning for one that does not."""
    groups: list[tuple[tuple[str, ...], str]] = []
    for name, what, loss in (
        (f"{COMPLETION}_{REJECTED}", "rejected completions", "dpo"),
        (LABEL, "labels", "kto"),
    ):
        if name in arrays:
            unread = f"{what} are not read, because the graph has no input {name!r}: set loss={loss}"
            groups.append(((name,), unread))
            completion_only = True
    if packed:
        alone = "texts in one row read each other, because the graph has no input 'segments': set packed of the loss"
        groups.append(((SEGMENTS,), alone))
    if not np.asarray(arrays[COMPLETION]).all():
        counted = "prompts and padding" if completion_only else "padding"
        wrong = f"the loss counts {counted}, because the graph has no input 'labels': set labels of the loss, such as "
        names = (TARGET, LABELS, COMPLETION, *(() if completion_only else (SEGMENTS, ATTENTION)))
        groups.append((names, wrong + "loss.labels=true"))
    return groups


def _stream(pieces: Pieces, length: int, source: str) -> dict[str, Array]:
    """Return all tokens in rows of `length`, without the last ones if they do not fill a row."""
    tokens = np.concatenate([x for x, _ in pieces])
    count = len(tokens) // length
    if count < 1:
        raise GraphoptError(
            f"{source}: expected {length:,} tokens or more, a row, found {len(tokens):,}: reduce data.context"
        )
    inside = tokens[: count * length].reshape(count, length)
    following = np.append(tokens[1:], np.int32(IGNORED))[: count * length].reshape(count, length)
    return _row_arrays(inside, np.zeros_like(inside), following, np.ones_like(inside, np.bool_))


def _split_document(tokens: np.ndarray, counted: np.ndarray, length: int) -> Pieces:
    starts = range(0, len(tokens), length)
    return [(tokens[i : i + length], counted[i : i + length]) for i in starts]


def _shortened(pieces: Pieces, length: int, source: str, per_example: int) -> tuple[Pieces, list[int]]:
    """Return the examples, and their numbers, each text of which has a token that counts after the first.

    Texts have at most `length` tokens. Warn of others.
    """
    examples = [pieces[i : i + per_example] for i in range(0, len(pieces), per_example)]
    cut = [[(x[:length], counted[:length]) for x, counted in example] for example in examples]
    kept = [i for i, example in enumerate(cut) if all(counted[1:].any() for _, counted in example)]
    long = sum(any(len(x) > length for x, _ in example) for example in examples)
    lost = sum(max(0, len(x) - length) for x, _ in pieces)
    total = sum(len(x) for x, _ in pieces)
    texts = []
    if long:
        texts.append(
            f"{long:,} of {len(examples):,} examples have more than {length:,} tokens: {lost:,} of {total:,} tokens "
            "are cut off: raise data.context to keep them"
        )
    if len(kept) < len(examples):
        texts.append(
            f"{len(examples) - len(kept):,} of {len(examples):,} examples have no token to learn and are left out"
        )
    for text in texts:
        warnings.warn(f"{source}: {text}", stacklevel=2)
    if not kept:
        raise GraphoptError(f"{source}: expected examples with tokens to learn, found none: raise data.context")
    return [piece for i in kept for piece in cut[i]], kept


def _packed(lengths: Sequence[int], length: int) -> list[list[int]]:
    """Return which sequences each row holds: the longest first, each in the fullest row that has room."""
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # that rows have left, in order, with their numbers
    for i in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        place = bisect_left(room, (lengths[i], -1))
        if place == len(room):
            left, row = length, len(rows)
            rows.append([])
        else:
            left, row = room.pop(place)
        rows[row].append(i)
        if left > lengths[i]:
            insort(room, (left - lengths[i], row))
    return rows


def _padded_rows(rows: Sequence[Sequence[int]], pieces: Pieces, width: int, pad: int) -> dict[str, Array]:
    """Return rows of sequences, filled up on the right."""
    if len(rows) * width > MOST_TOKENS:
        raise GraphoptError(
            f"data: expected at most {MOST_TOKENS:,} tokens in all rows, found more: lower data.context"
        )
    tokens = np.full((len(rows), width), pad, np.int32)
    segments = np.full((len(rows), width), -1, np.int32)
    following = np.full((len(rows), width), IGNORED, np.int32)
    mask = np.zeros((len(rows), width), np.bool_)
    for i, row in enumerate(rows):
        at = 0
        for number, piece in enumerate(row):
            found, counted = pieces[piece]
            part = slice(at, at + len(found))
            tokens[i, part], segments[i, part], mask[i, part] = found, number, counted
            following[i, at : at + len(found) - 1] = np.where(counted[1:], found[1:], IGNORED)
            at += len(found)
    return _row_arrays(tokens, segments, following, mask)


def _row_arrays(
    tokens: np.ndarray, segments: np.ndarray, following: np.ndarray, counted: np.ndarray
) -> dict[str, Array]:
    return {
        TOKENS: tokens,
        TARGET: following,
        LABELS: np.where(counted, tokens, np.int32(IGNORED)),
        COMPLETION: counted,
        SEGMENTS: segments,
        ATTENTION: segments >= 0,
        POSITIONS: _Positions(segments),
    }


class _Positions(LazyArray):
    """Count the tokens of each segment from 0."""

    def __init__(self, segments: np.ndarray) -> None:
        super().__init__(segments.shape, np.int64)
        self._segments = segments

    def read(self, rows: np.ndarray) -> np.ndarray:
        segments = self._segments[rows]
        places = np.broadcast_to(np.arange(segments.shape[1]), segments.shape)
        begins = np.diff(segments, axis=1, prepend=-2) != 0
        starts = np.maximum.accumulate(np.where(begins, places, 0), axis=1)
        return places - starts

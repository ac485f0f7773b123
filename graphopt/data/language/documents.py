"""Read files of text, and of JSON lines of texts, completions, chats, labels or preferences, as sequences of tokens."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from graphopt.data.files import reading
from graphopt.data.language.chats import (
    COMPLETION,
    MESSAGES,
    PROMPT,
    ChatTemplate,
    Message,
    Span,
    check_messages,
)
from graphopt.data.language.preferences import (
    CHOSEN,
    LABEL,
    MISMATCHED,
    REJECTED,
    check_preference,
    completions,
    mismatched,
)
from graphopt.data.language.tokenizer import Tokenizer, read_text
from graphopt.errors import GraphoptError, kind_of, naming

_LINES = (".jsonl", ".ndjson", ".json")
_TEXTS = (".txt", ".md", ".text")
_TEXT = "text"
_PREFERENCE = (CHOSEN, REJECTED)
_LABELLED = (PROMPT, COMPLETION, LABEL)
_KINDS = (_PREFERENCE, (_TEXT,), _LABELLED, (PROMPT, COMPLETION), (MESSAGES,))


@dataclass(frozen=True)
class Tokenized:
    """Hold tokens of several texts.

    Args:
        tokens: the tokens of each text.
        counted: for each text, which of its tokens are targets.
        are_documents: whether the texts may be cut anywhere, as an example of a prompt and its completion may not.
        other: what the names of arrays of every second text end with, if an example has two; otherwise None.
        labels: whether the completion of each example is desirable, if the file tells.
    """

    tokens: Sequence[np.ndarray]
    counted: Sequence[np.ndarray]
    are_documents: bool
    other: str | None = None
    labels: Sequence[bool] | None = None


def read_sequences(
    path: str | None, vocabulary: Tokenizer, *, completion_only: bool = False, template: Path | None = None
) -> Tokenized:
    """Read a file, or all files of text in a folder, as sequences of tokens; without a path, Python's reference.

    Raises:
        GraphoptError: a file is missing or is not text, or a line of JSON is not what is expected.
    """
    if path is None:
        return _documents([reference()], vocabulary)
    files = _text_files(Path(path))
    if files[0].suffix.lower() not in _LINES:
        if completion_only:
            raise GraphoptError(
                f"{path}: expected JSON lines of prompts and completions, or of chats, for completion_only, found text"
            )
        return _documents(map(read_text, files), vocabulary)
    found = [(file, line, item) for file in files for line, item in read_objects(file)]
    if not found:
        raise GraphoptError(f"{path}: expected an object per line, found an empty file")
    kinds = {_fields_of_line(file, line, item): (file, line) for file, line, item in reversed(found)}
    if len(kinds) > 1:
        for file, line, item in found if _LABELLED in kinds else ():
            if LABEL in item and item[LABEL] not in (True, False):
                raise GraphoptError(f"{file}: line {line}: {LABEL}: expected true or false, found {item[LABEL]!r}")
        (first, _), (other, (file, line)) = sorted(kinds.items(), key=lambda kind: kind[1])[:2]
        raise GraphoptError(
            f"{file}: line {line}: expected {' and '.join(first)} as in the lines before, found {' and '.join(other)}"
        )
    (kind,) = kinds
    if kind == (_TEXT,):
        if completion_only:
            raise GraphoptError(f"{path}: expected prompts and completions, or chats, for completion_only, found texts")
        return _documents((item[_TEXT] for _, _, item in found), vocabulary)
    items = [(line, item) for _, line, item in found]
    with naming(path):
        if kind in (_PREFERENCE, _LABELLED):
            labels = [bool(item[LABEL]) for _, item in items] if kind == _LABELLED else None
            pairs = mismatched([item for _, item in items]) if labels else [completions(item) for _, item in items]
            both = [(line, x) for (line, _), pair in zip(items, pairs, strict=True) for x in pair]
            tokenized = _tokenized_examples(both, vocabulary, True, template)
            return replace(tokenized, other=REJECTED if labels is None else MISMATCHED, labels=labels)
        return _tokenized_examples(items, vocabulary, completion_only, template)


def read_prompts(path: Path) -> list[Message]:
    """Read the objects of JSON lines, each with a prompt."""
    found = []
    for file in _text_files(path):
        for number, item in read_objects(file):
            with naming(f"{file}: line {number}"):
                if PROMPT not in item:
                    raise GraphoptError(f"expected an object with {PROMPT}, found {', '.join(item) or 'none'}")
                if isinstance(item[PROMPT], list):
                    check_messages(item[PROMPT], PROMPT)
                elif not isinstance(item[PROMPT], str):
                    raise GraphoptError(f"{PROMPT}: expected text, found {kind_of(item[PROMPT])}")
                found.append(item)
    if not found:
        raise GraphoptError(f"{path}: expected an object per line, found an empty file")
    return found


def is_lines(path: str) -> bool:
    """Return whether a file has JSON lines, by its name."""
    return Path(path).suffix.lower() in _LINES


def reference() -> str:
    """Return the Python reference that Python includes for `help()`."""
    from pydoc_data.topics import topics

    return "\n".join(topics[name] for name in sorted(topics))


def _text_files(path: Path) -> list[Path]:
    """Return a file, or the files of text or of JSON lines in a folder and below it."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file() and not file.name.startswith("."))
    for endings in (_LINES, _TEXTS):
        if chosen := [file for file in files if file.suffix.lower() in endings]:
            return chosen
    raise GraphoptError(f"{path}: expected files that end in {', '.join(_TEXTS + _LINES)}, found none")


def read_objects(path: Path) -> Iterator[tuple[int, Message]]:
    """Yield the number and the object of each line that is not empty."""
    with reading(path, "JSON lines in UTF-8"), open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            with naming(f"{path}: line {number}"):
                yield number, _object_of_line(line)


def _object_of_line(line: str) -> Message:
    is_list = line.lstrip().startswith("[") or line.strip() == "{"
    mend = ": write each object on a line of its own, such as by jq -c '.[]'" if is_list else ""
    try:
        found = json.loads(line)
        json.dumps(found, ensure_ascii=False).encode()  # half a character is no text
    except (ValueError, RecursionError) as error:
        raise GraphoptError(f"expected an object in JSON: {error}{mend}") from error
    if not isinstance(found, dict):
        raise GraphoptError(f"expected an object in JSON, found {kind_of(found)}{mend}")
    return found


def _fields_of_line(file: Path, line: int, item: Message) -> tuple[str, ...]:
    """Return the names of the fields that an object has, of which a file has the same in each line."""
    with naming(f"{file}: line {line}"):
        kind = next((kind for kind in _KINDS if all(name in item for name in kind)), None)
        if kind == _LABELLED and item[LABEL] not in (True, False):
            kind = kind[:-1]  # a column of another meaning
        if kind is None:
            raise GraphoptError(
                f"expected an object with {', '.join(' and '.join(kind) for kind in _KINDS)}, found "
                f"{', '.join(item) or 'none of them'}"
            )
        if kind == _PREFERENCE:
            check_preference(item)
            return kind
        is_chat = kind == (MESSAGES,) or isinstance(item[kind[0]], list)
        for name in kind[:2]:
            if is_chat:
                check_messages(item[name], name)
            elif not isinstance(item[name], str):
                raise GraphoptError(f"{name}: expected text, found {kind_of(item[name])}")
        return kind


def _documents(texts: Iterable[str], vocabulary: Tokenizer) -> Tokenized:
    """Return texts, each with the token that ends it."""
    tokens = [_with_end(found, vocabulary) for found, _ in vocabulary.encoded(texts)]
    return Tokenized(tokens, [np.ones(len(x), np.bool_) for x in tokens], are_documents=True)


def _with_end(tokens: np.ndarray, vocabulary: Tokenizer) -> np.ndarray:
    """Return tokens with the one that ends a text, unless they have it."""
    if vocabulary.end is None or (len(tokens) and tokens[-1] == vocabulary.end):
        return tokens
    return np.append(tokens, np.int32(vocabulary.end))


def _tokenized_examples(
    items: Sequence[tuple[int, Message]], vocabulary: Tokenizer, completion_only: bool, template: Path | None
) -> Tokenized:
    """Return prompts with their completions, or chats, and which tokens the model is to write."""
    plain = [(line, item) for line, item in items if isinstance(item.get(PROMPT), str)]
    if len(plain) == len(items):
        texts = [item[PROMPT] + item[COMPLETION] for _, item in items]
        spans = [[(len(item[PROMPT]), len(text))] for (_, item), text in zip(items, texts, strict=True)]
        return _marked(texts, spans, vocabulary, completion_only, is_ended=False)
    if plain:
        raise GraphoptError(f"line {plain[0][0]}: expected messages as in the other lines, found text")
    chats = ChatTemplate(vocabulary, template)
    texts, spans = chats.render(items, finds_answers=completion_only)
    return _marked(texts, spans, vocabulary, completion_only, is_ended=True)


def _marked(
    texts: Sequence[str],
    spans: Sequence[Sequence[Span]],
    vocabulary: Tokenizer,
    completion_only: bool,
    *,
    is_ended: bool,
) -> Tokenized:
    """Return the tokens of texts, and those in the spans that the model is to write.

    A template of chats writes the tokens that start and end a text itself.
    """
    tokens, counted = [], []
    for (found, places), those in zip(vocabulary.encoded(texts, special=not is_ended), spans, strict=True):
        inside = np.zeros(len(found), np.bool_)
        for start, end in those:
            inside |= (places[:, 1] > start) & (places[:, 0] < end) & (places[:, 1] > places[:, 0])
        if not is_ended:
            ended = _with_end(found, vocabulary)
            inside = np.append(inside, np.ones(len(ended) - len(found), np.bool_))
            inside[ended.size - 1 :] |= ended[-1:] == vocabulary.end
            found = ended
        tokens.append(found)
        counted.append(inside if completion_only else np.ones(len(found), np.bool_))
    return Tokenized(tokens, counted, are_documents=False)

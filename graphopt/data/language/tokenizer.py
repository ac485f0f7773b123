"""Turn text into tokens and back: by files of the package `tokenizers`, or by characters."""

from __future__ import annotations

import contextlib
import json
import os
import string
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np

from graphopt.arguments import Checked
from graphopt.confined import answer
from graphopt.data.files import imported, reading
from graphopt.errors import GraphoptError, kind_of, naming
from graphopt.graph.model_folders import CONFIG, config_in, place_of

CHARACTERS = string.printable
OF_CHARACTERS = "characters"  # the name of the tokenizer of characters
FILE = "tokenizer.json"
TEMPLATE_FILE = "chat_template.jinja"
EXTRA = "text"  # of the packages that these functions need
_TOGETHER = 1_000  # texts that are tokenized at once
_MOST_TOKENS = 2**24  # of a vocabulary
_CONFIGS = ("special_tokens_map.json", "tokenizer_config.json")  # which name tokens, the later one first
_ENDS = "eos_token_id"  # one or several, in:
_GENERATION = ("generation_config.json", "genai_config.json")
_MOST_BYTES = 2**26  # of a file of options; vocabularies lie in tokenizer.json
_PROGRAM = Path(__file__).with_name("trial.py")
_MEGABYTES, _SECONDS = 2_048, 20  # that a process which tries a tokenizer may take, at least
_BYTES_PER_BYTE = 64  # of memory, for each byte of the tokenizer's file, in addition
_WHOLE = f"a tokenizer ({FILE}) of the package tokenizers"
BESIDE = (FILE, TEMPLATE_FILE, *_CONFIGS, *_GENERATION)  # what is read beside a model or a tokenizer

Encoded = tuple[np.ndarray, np.ndarray]  # tokens, and where each starts and ends in its text
# Tokens, the number of the text of each, and whether some are cut off
_Row = tuple[np.ndarray, np.ndarray, bool]


class Vocabulary(Checked):
    """Turn text into tokens, and tokens into text.

    Attributes:
        size: the number of different tokens: the largest one + 1.
        start: the token that starts a text, or None.
        end: the token that ends a text in training data, or None.
        ends: the tokens that end a text which a model writes.
    """

    size: int
    start: int | None = None
    end: int | None = None
    ends: frozenset[int] = frozenset()

    @abstractmethod
    def encode(self, text: str) -> list[int]:
        """Return the tokens of a text, with those that the tokenizer adds to it."""

    @abstractmethod
    def decode(self, tokens: Iterable[int]) -> str:
        """Return the text of tokens, without special ones."""

    @abstractmethod
    def stream(self) -> Callable[[int], str]:
        """Return a function that takes token after token, and returns the text that each one completes."""


class Characters(Vocabulary):
    """Number characters by their index in Python's `string.printable`, and omit all others.

    >>> characters = graphopt.data.Characters()
    >>> characters.encode("Hi!"), characters.decode([43, 18, 62])
    ([43, 18, 62], 'Hi!')
    """

    size = len(CHARACTERS)

    def __init__(self) -> None:
        self._places = {character: i for i, character in enumerate(CHARACTERS)}

    def encode(self, text: str) -> list[int]:
        return [self._places[c] for c in text if c in self._places]

    def decode(self, tokens: Iterable[int]) -> str:
        return "".join(CHARACTERS[token] for token in tokens if 0 <= token < self.size)

    def stream(self) -> Callable[[int], str]:
        return lambda token: self.decode([token])


class Tokenizer(Vocabulary):
    """Read the tokenizer of a language model: a file of Hugging Face's package `tokenizers`, with the files beside it.

    `tokenizer_config.json` and `special_tokens_map.json` name the tokens that start and end a text.
    `generation_config.json`, or `genai_config.json` of onnxruntime-genai, has the tokens that end what a model
    writes. The template of chats is `chat_template.jinja`, or `chat_template` in `tokenizer_config.json`. Each of these
    files may be missing. Truncation and padding that tokenizer.json describes are left out.

    Args:
        path: tokenizer.json, or the folder of a model.

    Attributes:
        path: the file.
        template: the template of chats, or None.
        special: the special tokens by their names in templates, such as `eos_token`.
        pad: the token that fills up rows, of tokenizer_config.json, tokenizer.json or the model's config.json; or None.

    Raises:
        GraphoptError: `tokenizers` is not installed, or a file is missing or is not what its name says.

    >>> import tokenizers
    >>> made = tokenizers.Tokenizer(tokenizers.models.WordLevel({"never": 0, "mind": 1, "?": 2}, unk_token="?"))
    >>> made.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    >>> made.save("tokenizer.json")
    >>> tokenizer = graphopt.data.Tokenizer("tokenizer.json")
    >>> tokenizer.encode("never mind"), tokenizer.decode([0, 1]), tokenizer.size
    ([0, 1], 'never mind', 3)
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path) / FILE if Path(path).is_dir() else Path(path)
        library = imported(str(self.path), "tokenizers", extra=EXTRA)
        with reading(self.path, _WHOLE):
            text = self.path.read_text(encoding="utf-8")
        _try(self.path, text)
        with reading(self.path, _WHOLE, Exception):
            self._tokenizer = library.Tokenizer.from_str(text)
        self._tokenizer.no_truncation()
        padding = self._tokenizer.padding or {}
        self._tokenizer.no_padding()
        self.size = max(self._tokenizer.get_vocab().values(), default=-1) + 1
        if not 1 <= self.size <= _MOST_TOKENS:
            raise GraphoptError(
                f"{self.path}: expected tokens numbered from 0 to at most {_MOST_TOKENS - 1:,}, found {self.size - 1:,}"
            )
        self._read_configs()
        noted = _json_object(self.path.parent / CONFIG).get("pad_token_id")
        known = (self._number(self.special.get("pad_token")), padding.get("pad_id"), noted)
        self.pad = next((x for x in known if type(x) is int and 0 <= x < self.size), None)

    def encode(self, text: str) -> list[int]:
        return next(self.encoded([text]))[0].tolist()

    def encoded(self, texts: Iterable[str], *, special: bool = True) -> Iterator[Encoded]:
        """Yield the tokens of each text, and where each token starts and ends in it.

        Args:
            special: add the tokens that the tokenizer adds to a text, such as one that starts it.
        """
        left = iter(texts)
        while part := list(islice(left, _TOGETHER)):
            with reading(self.path, "a tokenizer that reads the texts", Exception), _panics():
                found = self._tokenizer.encode_batch(part, add_special_tokens=special)
            for encoding in found:
                yield np.array(encoding.ids, np.int32), np.array(encoding.offsets, np.int64).reshape(-1, 2)

    def encoded_rows(self, texts: Sequence[Sequence[str]], most: int) -> Iterator[_Row]:
        """Yield rows of one text or of a pair, with the tokens that the tokenizer adds, and at most `most` tokens.

        Args:
            texts: the first text of each row, and the second ones, if there are any.
        """
        added = self._tokenizer.num_special_tokens_to_add(len(texts) > 1)
        if most <= added:
            raise GraphoptError(
                f"data.context: expected more than the {added} tokens that {self.path} adds to a row, found {most}: "
                "raise it"
            )
        self._tokenizer.enable_truncation(most)
        try:
            left = zip(*texts, strict=True)
            while part := list(islice(left, _TOGETHER)):
                with reading(self.path, "a tokenizer that reads the texts", Exception), _panics():
                    found = self._tokenizer.encode_batch([row if len(row) > 1 else row[0] for row in part])
                for row in found:
                    yield np.array(row.ids, np.int32), np.array(row.type_ids, np.int32), bool(row.overflowing)
        finally:
            self._tokenizer.no_truncation()

    def decode(self, tokens: Iterable[int]) -> str:
        return str(self._tokenizer.decode(list(tokens)))

    def stream(self) -> Callable[[int], str]:
        decoders = imported(str(self.path), "tokenizers.decoders", extra=EXTRA)
        stream = decoders.DecodeStream(skip_special_tokens=True)
        return lambda token: stream.step(self._tokenizer, token) or ""

    def _read_configs(self) -> None:
        """Read the options in the files beside the tokenizer's."""
        folder = self.path.parent
        config: dict[str, Any] = {}
        for name in _CONFIGS:
            config |= _json_object(folder / name)
        self.special = {name: text for name, x in config.items() if name.endswith("_token") and (text := _text_of(x))}
        self.start, self.end = (self._number(self.special.get(name)) for name in ("bos_token", "eos_token"))
        self.ends = frozenset(() if self.end is None else (self.end,))
        for name in _GENERATION:
            found = _json_object(folder / name)
            ends = found.get("model", found).get(_ENDS) if isinstance(found.get("model", found), dict) else None
            known = [x for x in (ends if isinstance(ends, list) else [ends]) if type(x) is int]
            self.ends |= frozenset(known)
            self.end = known[0] if self.end is None and known else self.end
        self.template = self._template(config.get("chat_template"))

    def _template(self, configured: object) -> str | None:
        """Return the template of chats; of several, the one named `default`."""
        file = self.path.parent / TEMPLATE_FILE
        if file.exists():
            return read_text(file)
        if isinstance(configured, list):
            named = {x.get("name"): x.get("template") for x in configured if isinstance(x, Mapping)}
            configured = named.get("default")
        return configured if isinstance(configured, str) else None

    def _number(self, text: str | None) -> int | None:
        return None if text is None else self._tokenizer.token_to_id(text)


def _try(path: Path, text: str) -> None:
    """Raise an error if the library cannot read a tokenizer: in a process of its own, which a panic may end."""
    content = json.dumps(text)
    megabytes = _MEGABYTES + len(content) * _BYTES_PER_BYTE // 2**20
    with naming(str(path)):
        found = answer(_PROGRAM, content, _WHOLE, megabytes=megabytes, seconds=_SECONDS + len(content) // 2**20)
    if "error" in found:
        raise GraphoptError(f"{path}: expected {_WHOLE}: {found['error']}")


@contextlib.contextmanager
def _panics() -> Iterator[None]:
    """Raise a panic of the library, which is no Exception, as an error, in a `with` block."""
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException":
            raise
        raise ValueError(f"the library panics: {error}") from error


def vocabulary_of(
    tokenizer: str | os.PathLike[str] | Vocabulary | None, near: str | os.PathLike[str] | None = None
) -> Vocabulary:
    """Return a tokenizer: the one of a file or a folder, `characters`, or the one that lies beside a model.

    Raises:
        GraphoptError: there is none.
    """
    if isinstance(tokenizer, Vocabulary):
        return tokenizer
    if tokenizer == OF_CHARACTERS:
        return Characters()
    if isinstance(tokenizer, str | os.PathLike):
        return Tokenizer(tokenizer)
    if tokenizer is not None:
        raise GraphoptError(f"tokenizer: expected {FILE}, its folder or {OF_CHARACTERS!r}, found {kind_of(tokenizer)}")
    beside = None if near is None else tokenizer_beside(near)
    if beside is None:
        where = "" if near is None else f" beside {near}"
        raise GraphoptError(
            f"tokenizer: expected {FILE}{where}, found none: name it, or {OF_CHARACTERS!r} for single characters"
        )
    return Tokenizer(beside)


def tokenizer_beside(model: str | os.PathLike[str]) -> Path | None:
    """Return the tokenizer's file in a folder, or beside a model's file, if there is one."""
    place = Path(model)
    folders = (place,) if place.is_dir() else (place.parent, place_of(place))
    return next((folder / FILE for folder in folders if (folder / FILE).is_file()), None)


def read_text(path: Path) -> str:
    """Return the text of a file."""
    with reading(path, "text in UTF-8"):
        return path.read_text(encoding="utf-8")


def _json_object(path: Path) -> dict[str, Any]:
    """Return the object in a JSON file, which may be missing."""
    if not path.exists():
        return {}
    with reading(path, "an object in JSON"):
        return config_in(path, _MOST_BYTES)


def _text_of(token: object) -> str | None:
    """Return the text of a token, which a config has as a text, or in a mapping with options."""
    text = token.get("content") if isinstance(token, Mapping) else token
    return text if isinstance(text, str) else None

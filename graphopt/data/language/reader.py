"""Read text for language models: rows of tokens, with the arrays that models and losses read beside them."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from graphopt.arguments import checked
from graphopt.data.dataset import TARGET, Dataset
from graphopt.data.language.documents import is_lines, read_prompts, read_sequences, reference
from graphopt.data.language.rows import ATTENTION, PADDED_TO, TOKENS, arranged, marks
from graphopt.data.language.tokenizer import Characters, Tokenizer, Vocabulary, read_text, vocabulary_of
from graphopt.errors import GraphoptError, unknown
from graphopt.files import ReadName


@checked()
def text(
    path: ReadName | None = None,
    *,
    tokenizer: ReadName | Vocabulary | None = None,
    context: int = 64,
    completion_only: bool = False,
    packed: bool = False,
    pad_to: Literal["longest", "context"] = "longest",
    chat_template: ReadName | None = None,
    characters: int | None = 200_000,
) -> Dataset:
    """Return rows of tokens; the target of each token is the next one.

    A text file, or each text file in a folder, is a document. A file of JSON lines (.jsonl) has a document
    `{"text": ...}`, an example `{"prompt": ..., "completion": ...}` or a chat `{"messages": [{"role": ..., "content":
    ...}]}` in each line. Documents are joined, each with the token that ends it, and cut into rows of `context` tokens.
    An example or a chat has a row of its own, filled up on the right, and is cut off at `context`. A preference is
    `{"prompt": ..., "chosen": ..., "rejected": ...}`, of texts or of lists of messages, or two chats `chosen` and
    `rejected` that begin alike. It has a row of the prompt with the chosen completion, and one with the rejected
    completion in arrays such as `input_ids_rejected`, as `passes.DPO`, `ORPO` and `SimPO` read them. An example with
    a `label`, true or false, is a completion that is desirable or not, for `passes.KTO`: it has an array `label`, and a
    row of the prompt with the completion of the line before in arrays such as `input_ids_mismatched`. Of both, only
    completions count.

    The array `input_ids` feeds a model with a single input. A graph may also have these inputs, which `passes.
    CausalLanguageModel` adds: `labels`, the tokens, or -100 for those that do not count as targets; `completion_mask`,
    1 for those that do; and `segments`, the number of a token's text in its row, -1 behind all texts. It may also read
    `attention_mask`, `position_ids`, counted from 0 in each text, and `target`, the next token or -100.

    Without a tokenizer, tokens are characters, numbered by their index in Python's `string.printable`, in an array `x`;
    other characters are omitted.

    Args:
        path: a file or a folder; by default, the Python reference that Python includes for `help()`.
        tokenizer: a file tokenizer.json or its folder, read by the package `tokenizers`; `characters`; or None, which
            is the file that lies beside the model in the command, and characters elsewhere.
        context: the length of a row.
        completion_only: only tokens of completions, or of the assistant's messages, count as targets.
        packed: rows hold several texts. The loss or the model has to separate them by `segments`.
        pad_to: fill rows of examples up to the longest one, or to `context`, for a model of a fixed length.
        chat_template: the file of a template of chats, in Jinja; by default, the tokenizer's own.
        characters: the number of characters to read without a tokenizer; None for all.

    Raises:
        GraphoptError: a file is missing, is not text or is shorter than a row, or a package is not installed.

    >>> import pathlib
    >>> _ = pathlib.Path("rhyme.txt").write_text("Twinkle, twinkle, little star")
    >>> rows = graphopt.data.text("rhyme.txt", context=7)
    >>> rows.arrays["x"].shape, graphopt.data.Characters().decode(rows.arrays["target"][1])
    ((4, 7), 'twinkle')
    """
    if not isinstance(context, int) or context < 1:
        raise GraphoptError(f"data.context: expected 1 token or more, found {context!r}")
    if pad_to not in PADDED_TO:
        raise GraphoptError(f"data.pad_to: {unknown('length', str(pad_to), PADDED_TO)}")
    vocabulary = Characters() if tokenizer is None else vocabulary_of(tokenizer)
    if not isinstance(vocabulary, Tokenizer):
        if completion_only or packed or chat_template is not None:
            raise GraphoptError(
                "data: expected a tokenizer for completions, chats and packed rows, found none: set "
                "data.tokenizer=tokenizer.json, or put it beside the model"
            )
        return _of_characters(path, vocabulary, context, characters)
    source = "data=text" if path is None else path
    template = None if chat_template is None else Path(chat_template)
    sequences = read_sequences(path, vocabulary, completion_only=completion_only, template=template)
    if packed and sequences.other is not None:
        raise GraphoptError(f"{source}: data.packed: expected false for preferences, found true")
    pad = 0 if vocabulary.end is None else vocabulary.end
    arrays = arranged(sequences, context, source, packed=packed, filled=pad_to == "context", pad=pad)
    needed = marks(arrays, completion_only=completion_only, packed=packed)
    spare = [name for name in arrays if name != TOKENS]
    return Dataset(
        arrays,
        features=TOKENS,
        classes=vocabulary.size,
        source=source,
        spare=spare,
        marks=needed,
        tokens=sum(int(np.count_nonzero(np.asarray(x))) for name, x in arrays.items() if name.startswith(ATTENTION)),
    )


@checked()
def prompts(path: ReadName) -> Dataset:
    """Return the prompts in a file of JSON lines, `{"prompt": ...}`, and their other columns, for `graphopt.Rollouts`.

    Args:
        path: a file of JSON lines, or a folder of such files. A prompt is a text, or a list of messages of a chat.

    Raises:
        GraphoptError: a file is missing, or a line is not an object with a prompt.

    >>> import pathlib
    >>> _ = pathlib.Path("sums.jsonl").write_text('{"prompt": "1+2=", "answer": "3"}')
    >>> list(graphopt.data.prompts("sums.jsonl").table)
    ['prompt', 'answer']
    """
    rows = read_prompts(Path(path))
    table = {}
    for name in dict.fromkeys(name for row in rows for name in row):
        table[name] = np.empty(len(rows), object)
        table[name][:] = [row.get(name) for row in rows]
    return Dataset({}, table=table, source=str(path))


def _of_characters(path: str | None, vocabulary: Vocabulary, context: int, most: int | None) -> Dataset:
    if path is not None and is_lines(path):
        raise GraphoptError(
            f"{path}: expected a tokenizer for JSON lines, found none: set data.tokenizer=tokenizer.json, or put it "
            "beside the model"
        )
    content = reference() if path is None else read_text(Path(path))
    tokens = np.array(vocabulary.encode(content)[:most], np.int64)
    runs = (len(tokens) - 1) // context
    if runs < 1:
        raise GraphoptError(f"data=text: expected more than {context} characters, found {len(tokens)}")
    x, following = (tokens[i : i + runs * context].reshape(runs, context) for i in (0, 1))
    arrays = {"x": x, TARGET: following}
    return Dataset(arrays, features="x", classes=vocabulary.size, spare=[TARGET], tokens=x.size)

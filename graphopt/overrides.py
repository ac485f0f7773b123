"""Write fields of recipes as one types them: as Hydra reads their values, and as a shell passes them on."""

from __future__ import annotations

import re
import shlex
from collections.abc import Sequence

_OF_SHELL = {*"$`\\!"}  # what has a meaning in double quotes
_PLAIN = re.compile(r"(?!\.\d)[A-Za-z_./][\w./-]*", re.ASCII)  # what Hydra reads as a text without quotes


def quoted(text: str) -> str:
    """Return a text as Hydra reads it: in quotes, if it has characters of its grammar.

    >>> from graphopt.overrides import quoted
    >>> quoted("photos/dogs"), quoted("my photos"), quoted("2026_11"), quoted("1e5"), quoted("-inf")
    ('photos/dogs', "'my photos'", "'2026_11'", "'1e5'", "'-inf'")
    """
    if _PLAIN.fullmatch(text) and text.lower() not in ("null", "true", "false", "nan", "inf"):
        return text
    quote = '"' if "'" in text and '"' not in text else "'"

    def escaped(found: re.Match[str]) -> str:  # backslashes before a quote, also before the last one
        return 2 * found[1] + (f"\\{quote}" if found[2] else "")

    return quote + re.sub(rf"(\\*)({quote}|\Z)", escaped, text.replace("${", "\\${")) + quote


def in_shell(words: Sequence[str]) -> str:
    """Return words as one types them in a shell.

    >>> from graphopt.overrides import in_shell
    >>> print(in_shell(["graphopt", "data.path='my photos'", "data.size=[8,8]"]))
    graphopt "data.path='my photos'" 'data.size=[8,8]'
    """
    texts = {x: '"' + x.replace('"', '\\"') + '"' for x in words if "'" in x and not _OF_SHELL & {*x}}
    return " ".join(texts.get(x) or shlex.quote(x) for x in words)


def list_text(texts: Sequence[str]) -> str:
    """Return texts as a list that Hydra reads."""
    return f"[{','.join(map(quoted, texts))}]"

"""Turn chats into text by the template of a tokenizer."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from graphopt.confined import answer
from graphopt.data.files import imported
from graphopt.data.language.tokenizer import EXTRA, TEMPLATE_FILE, Tokenizer, read_text
from graphopt.errors import GraphoptError, kind_of, naming

_PROGRAM = Path(__file__).with_name("renderer.py")
_MEGABYTES, _SECONDS = 2_048, 20  # of a process that renders, at least
_BYTES_PER_MEGABYTE = 2**16  # of chats, for which a process has a megabyte more
_PER_SECOND = 100  # renderings for which it has a second more
_LONGEST = 2**20  # characters of a template
_GENERATION = re.compile(r"\{%-?\s*generation\s*-?%\}")

PROMPT, COMPLETION, MESSAGES, TOOLS = "prompt", "completion", "messages", "tools"
Message = Mapping[str, Any]
Span = tuple[int, int]  # characters of a text, from one to before another


class ChatTemplate:
    """Render chats by a template in Jinja, as transformers' `apply_chat_template` does.

    The template runs in Jinja's sandbox, and in a process of its own that has limits of time and memory.

    Args:
        tokenizer: the tokenizer that has the template and the special tokens.
        file: the file of another template.

    Raises:
        GraphoptError: Jinja is not installed, or there is no template.
    """

    def __init__(self, tokenizer: Tokenizer, file: Path | None = None) -> None:
        imported("chats", "jinja2", extra=EXTRA)
        self._source = str(file or f"the template of chats of {tokenizer.path}")
        text = tokenizer.template if file is None else read_text(file)
        if text is None:
            raise GraphoptError(
                f"{tokenizer.path}: expected a template of chats, {TEMPLATE_FILE} beside it, found none: name one with "
                "chat_template"
            )
        if len(text) > _LONGEST:
            raise GraphoptError(f"{self._source}: expected at most {_LONGEST:,} characters, found {len(text):,}")
        self._text, self._variables = text, tokenizer.special
        # No chat has these marks, which are drawn at random.
        self._marks = [f"<{secrets.token_hex(16)}{end}>" for end in ("", "/")]

    def prompt(self, messages: Sequence[Message]) -> str:
        """Return the text of a chat that the model is to continue."""
        return self._unmarked(self._rendered([_request(messages, True)])[0])[0]

    def render(
        self, chats: Sequence[tuple[int, Message]], *, finds_answers: bool
    ) -> tuple[list[str], list[list[Span]]]:
        """Return the text of each chat, and which parts of it the model is to write.

        They are the completion, or all messages of the assistant. The template marks these by `{% generation %}`.
        Otherwise, they are what such a message adds to the text of the messages before it, with the start of an answer.

        Args:
            chats: the number of a line, and its object: `messages`, or `prompt` and `completion`, and `tools` if there
                are any.
            finds_answers: look for these parts.
        """
        lines = [line for line, _ in chats]
        texts = self._rendered([_request(_messages(chat), False, chat) for _, chat in chats], lines)
        texts, marked = map(list, zip(*map(self._unmarked, texts), strict=True))
        are_marked = _GENERATION.search(self._text) is not None and not any(PROMPT in chat for _, chat in chats)
        if are_marked or not finds_answers:
            return texts, marked
        parts = [(line, asked) for line, chat in chats for pair in _answers(chat) for asked in pair]
        plain = self._rendered([asked for _, asked in parts], [line for line, _ in parts])
        found = iter([self._unmarked(text)[0] for text in plain])
        spans = [
            [self._span(line, text, next(found), next(found)) for _ in _answers(chat)]
            for (line, chat), text in zip(chats, texts, strict=True)
        ]
        return texts, spans

    def _span(self, line: int, text: str, before: str, after: str) -> Span:
        """Return the characters that an answer adds."""
        end = min(len(text), len(after))
        if not text.startswith(before) or not text.startswith(after.rstrip()):
            raise GraphoptError(
                f"line {line}: expected a template that renders the messages before an answer as it does in the whole "
                f"chat, found {self._source}, which does not: mark answers in it with {{% generation %}}"
            )
        return len(before), end

    def _unmarked(self, text: str) -> tuple[str, list[Span]]:
        """Return a text without its marks, and the characters between them; marks in others add none."""
        start, end = self._marks
        plain, depth, begin = "", 0, 0
        spans: list[Span] = []
        for part in re.split(f"({re.escape(start)}|{re.escape(end)})", text):
            if part == start:
                begin = begin if depth else len(plain)
                depth += 1
            elif part == end:
                depth -= 1
                if not depth:
                    spans.append((begin, len(plain)))
            else:
                plain += part
        return plain, spans

    def _rendered(self, chats: Sequence[Message], lines: Sequence[int] = ()) -> list[str]:
        if not chats:
            return []
        asked = {"template": self._text, "variables": self._variables, "marks": self._marks, "chats": chats}
        content = json.dumps(asked)
        limits = {
            "megabytes": _MEGABYTES + len(content) // _BYTES_PER_MEGABYTE,
            "seconds": _SECONDS + len(chats) // _PER_SECOND,
        }
        with naming(self._source):
            found = answer(_PROGRAM, content, "a template that renders chats", **limits)
        if "error" in found:
            place = f"line {lines[found['number']]}: " if lines else ""
            raise GraphoptError(f"{place}expected a chat that {self._source} renders: {found['error']}")
        texts: list[str] = found["texts"]
        return texts


def _messages(chat: Message) -> list[Message]:
    return [*chat[MESSAGES]] if MESSAGES in chat else [*chat[PROMPT], *chat[COMPLETION]]


def _answers(chat: Message) -> list[tuple[dict[str, object], dict[str, object]]]:
    """Return the variables of the renderings before and after each answer."""
    messages = _messages(chat)
    places = [(i, i + 1) for i, message in enumerate(messages) if message["role"] == "assistant"]
    if PROMPT in chat:
        places = [(len(chat[PROMPT]), len(messages))]
    return [(_request(messages[:start], True, chat), _request(messages[:end], False, chat)) for start, end in places]


def _request(messages: Sequence[Message], begins: bool, chat: Message | None = None) -> dict[str, object]:
    """Return the variables of a rendering; fields that are null are left out."""
    plain = [{name: x for name, x in message.items() if x is not None} for message in messages]
    return {"messages": plain, TOOLS: (chat or {}).get(TOOLS), "add_generation_prompt": begins}


def check_messages(messages: object, what: str = "messages") -> None:
    """Raise an error unless messages are a list of objects, each with a role."""
    if not isinstance(messages, list) or not messages:
        raise GraphoptError(f"{what}: expected a list of messages, found {kind_of(messages)}")
    for message in messages:
        if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
            raise GraphoptError(
                f"{what}: expected objects such as {{'role': 'user', 'content': 'Hello'}}, found {message!r}"
            )

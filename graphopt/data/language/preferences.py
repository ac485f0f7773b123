"""Read preferences: prompts, each with a chosen and a rejected completion, or with one that is desirable or not."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

from graphopt.data.language.chats import COMPLETION, PROMPT, TOOLS, Message, check_messages
from graphopt.errors import GraphoptError, kind_of

CHOSEN, REJECTED = "chosen", "rejected"
LABEL, MISMATCHED = "label", "mismatched"
# The fields of JSON lines that inputs come from, by the ends of the names of these
FIELDS = {
    f"_{REJECTED}": "prompt, chosen and rejected",
    f"_{MISMATCHED}": "prompt, completion and label, true or false",
}


def check_preference(item: Message) -> None:
    """Raise an error unless an object has two texts or two chats, and if any, a prompt that goes with them."""
    names = [name for name in (PROMPT, CHOSEN, REJECTED) if item.get(name) is not None]
    if isinstance(item[CHOSEN], list):
        for name in names:
            if name != PROMPT or not isinstance(item[PROMPT], str):
                check_messages(item[name], name)
    else:
        for name in names:
            if not isinstance(item[name], str):
                raise GraphoptError(f"{name}: expected text, found {kind_of(item[name])}")
    if any(not example[COMPLETION] for example in completions(item)):
        raise GraphoptError(
            f"expected a chosen and a rejected completion that differ, found {item[CHOSEN]!r} and {item[REJECTED]!r}"
        )


def completions(item: Message) -> list[Message]:
    """Return the prompt of a preference with its chosen completion, and with its rejected one.

    If there is no prompt, or a text beside chats, the prompt is what both begin with, as in TRL's `extract_prompt`.
    """
    prompt, both = item.get(PROMPT), [item[CHOSEN], item[REJECTED]]
    if prompt is None or isinstance(prompt, str) != isinstance(both[0], str):
        prompt = both[0][: _common_start(*both)]
        both = [x[len(prompt) :] for x in both]
    return [{PROMPT: prompt, COMPLETION: x, TOOLS: item.get(TOOLS)} for x in both]


def mismatched(items: Sequence[Message]) -> list[list[Message]]:
    """Return the prompt of each example with its completion, and with that of the example before.

    TRL does so within each batch of the file's order, to estimate how far the model is from the reference.
    """
    before = [*items[-1:], *items[:-1]]
    return [
        [{PROMPT: item[PROMPT], COMPLETION: x[COMPLETION], TOOLS: item.get(TOOLS)} for x in (item, other)]
        for item, other in zip(items, before, strict=True)
    ]


def _common_start(first: Sequence[object], second: Sequence[object]) -> int:
    """Return how many messages two chats begin with, or characters two texts, without a space at their end."""
    count = sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(first, second, strict=False)))
    return count - 1 if count and first[count - 1] == " " else count

"""Messages as listings: `tests/listings/NAME.txt` has calls, each after `>>> `, and the line that answers each.

In an answer, `...` stands for any text. UPDATE_LISTINGS=1 writes the answers that differ; read the diff. A new case is
a line with a call, and an empty one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from graphopt.errors import GraphoptError

FOLDER = Path(__file__).parent / "listings"
CALL = ">>> "
LONG = re.compile(r"((?:known: |option of \w+, )(?:[\w.]+, ){2})(?:[\w.]+, ){3,}")  # lists that grow with each new name
MACHINES = re.compile(r"(?<=device: expected 'cpu', ).+(?=, found)")  # tests/test_providers.py has them all
OWN_FOLDER = re.compile(r"/\S*/pytest-\d+/[^/\s]+")  # of a test: pytest's tmp_path


def calls(name: str) -> list[str]:
    """Return the calls of a listing."""
    return [*_answers(name)]


def check(name: str, call: str, said: str) -> None:
    """Compare what a call says with its answer in the listing."""
    answers = _answers(name)
    expected = ".*".join(map(re.escape, answers[call].split("...")))
    if os.environ.get("UPDATE_LISTINGS") and not re.fullmatch(expected, said):
        answers[call] = OWN_FOLDER.sub("...", MACHINES.sub("...", LONG.sub(r"\1..., ", said)))
        text = "".join(f"{CALL}{each}\n{answer}\n" for each, answer in answers.items())
        (FOLDER / f"{name}.txt").write_text(text)
        return
    assert re.fullmatch(expected, said), f"{call}\nexpected: {answers[call]}\nfound:    {said}"


def refused(name: str, call: str, names: Mapping[str, Any]) -> None:
    """Compare the error that an expression of Python ends with, given the values of its names."""
    with pytest.raises(GraphoptError) as error:
        eval(call, dict(names))
    check(name, call, str(error.value))


def _answers(name: str) -> dict[str, str]:
    lines = (FOLDER / f"{name}.txt").read_text().splitlines()
    return {call.removeprefix(CALL): answer for call, answer in zip(lines[::2], lines[1::2], strict=True)}

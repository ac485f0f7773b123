"""Broken and hostile inputs: a model, a data file or a recipe is taken, or refused by a GraphoptError of one line.

    python tests/fuzzing.py 5000                # 5,000 inputs of a seed that is drawn and printed
    python tests/fuzzing.py 5000 --seed 7       # the same inputs again
    python tests/fuzzing.py --only 7:123        # input 123 of seed 7 alone, with its traceback

Inputs run in a child process with bounded memory, so that a crash of native code, too much memory and too much time
are found and told like any other failure.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import os
import random
import resource
import secrets
import selectors
import subprocess
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fuzz_data
import fuzz_models
import fuzz_recipes

from graphopt.errors import GraphoptError

MEMORY = 6 << 30  # bytes of address space, of which the libraries alone take 2 GiB
SECONDS = 60  # for one input
ROOT = Path(__file__).parent.parent
CRASHES = 50  # in one run, after which it ends


@dataclass(frozen=True)
class Kind:
    """What is fuzzed: writes a case of a random source to a folder, then tries it."""

    name: str
    write: Callable[[random.Random, Path], Any]
    attempt: Callable[[Any, Path], None]


KINDS = [
    *[Kind("model", fuzz_models.write, fuzz_models.attempt)] * 4,
    Kind("data", fuzz_data.write, fuzz_data.attempt),
    Kind("recipe", fuzz_recipes.write, fuzz_recipes.attempt),
]


@dataclass(frozen=True)
class Outcome:
    """What became of an input: `taken`, `refused`, or how it failed."""

    input: str
    kind: str
    result: str
    detail: str

    @property
    def failed(self) -> bool:
        return self.result not in ("taken", "refused")


def attempt(seed: int, index: int) -> Outcome:
    """Make an input, which depends on the seed and the index alone, and try it in this process."""
    draw = random.Random(f"{seed}:{index}")
    kind = draw.choice(KINDS)
    result, detail = "taken", ""
    with tempfile.TemporaryDirectory() as name, contextlib.chdir(name), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        folder = Path(name)
        case = kind.write(draw, folder)
        try:
            kind.attempt(case, folder)
        except GraphoptError as error:
            result, detail = "refused", str(error)
            if "\n" in detail or not detail.strip():
                result = "refused in other than one line"
        except Exception as error:  # noqa: BLE001 - any other is a failure, which is what is looked for
            result, detail = _place(error), "".join(traceback.format_exception(error))
    return Outcome(f"{seed}:{index}", kind.name, result, detail)


def _place(error: BaseException) -> str:
    """Return an exception's type, and the last line of the project that it passed."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if Path(frame.filename).is_relative_to(ROOT)]
    frame = own[-1]
    return f"{type(error).__name__} {Path(frame.filename).name}:{frame.lineno}"


def run(seed: int, indices: range) -> Iterator[Outcome]:
    """Try inputs in child processes, each bounded in memory, one after another."""
    crashes = 0
    while indices and crashes < CRASHES:
        command = [sys.executable, __file__, "--child", f"{seed}:{indices.start}:{indices.stop}"]
        with (
            tempfile.TemporaryFile() as errors,
            subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors) as child,
        ):
            ended = "crash"
            for line in _lines(child):
                if line is None:
                    child.kill()
                    ended = "timeout"
                    break
                yield Outcome(**json.loads(line))
                indices = indices[1:]
            child.wait()
            errors.seek(0)
            told = errors.read()[-2000:].decode(errors="replace")
        if indices:
            crashes += 1
            ended = f"{ended}, exit code {child.returncode}"
            yield Outcome(f"{seed}:{indices.start}", "?", ended, told)
            indices = indices[1:]


def _lines(child: subprocess.Popen[bytes]) -> Iterator[str | None]:
    """Yield the lines of a child as they come, and None when it takes too long for one."""
    assert child.stdout is not None
    with selectors.DefaultSelector() as selector:
        selector.register(child.stdout, selectors.EVENT_READ)
        waiting = b""
        while True:
            if not selector.select(SECONDS):
                yield None
                return
            got = os.read(child.stdout.fileno(), 1 << 16)
            if not got:
                return
            *lines, waiting = (waiting + got).split(b"\n")
            yield from (line.decode() for line in lines)


def _child(seed: int, first: int, last: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    out = os.fdopen(os.dup(1), "w")
    os.dup2(os.open(os.devnull, os.O_WRONLY), 1)  # what native code and the command print
    for index in range(first, last):
        with contextlib.redirect_stderr(io.StringIO()):
            outcome = attempt(seed, index)
        print(json.dumps(vars(outcome)), file=out, flush=True)


def main() -> int:
    """Run the inputs that the command line asks for; the exit code is 0 where none fails."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("count", type=int, nargs="?", default=5000)
    parser.add_argument("--seed", type=int, default=secrets.randbelow(10**6))
    parser.add_argument("--only")
    parser.add_argument("--details", type=Path, help="a file for the tracebacks")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.child:
        _child(*map(int, options.child.split(":")))
        return 0
    if options.only:
        seed, index = map(int, options.only.split(":"))
        found = [attempt(seed, index)]
    else:
        found = []
        print(f"seed {options.seed}", flush=True)
        for outcome in run(options.seed, range(options.count)):
            found.append(outcome)
            if len(found) % 100 == 0:
                print(f"{len(found)} tried", flush=True)
            if outcome.failed:
                print(f"{outcome.input} {outcome.kind}: {outcome.result}", flush=True)
                if options.details:
                    with options.details.open("a") as file:
                        print(outcome.input, outcome.kind, outcome.result, outcome.detail, sep="\n", file=file)
    for (kind, result), count in Counter((o.kind, o.result) for o in found).most_common():
        print(f"{count:6} {kind:7} {result}")
    if options.only:
        print(found[0].detail)
    return int(any(outcome.failed for outcome in found))


if __name__ == "__main__":
    sys.exit(main())

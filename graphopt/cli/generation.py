"""Continue a text by a language model, and write it to the output while it grows."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from pathlib import Path

from rich.console import Console

from graphopt.cli.composition.recipe import Recipe
from graphopt.cli.messages import say, tell_record
from graphopt.cli.trained import Trained
from graphopt.data.language.tokenizer import OF_CHARACTERS
from graphopt.errors import GraphoptError, escaped
from graphopt.generation.text import Prompt, TextGenerator
from graphopt.inspection.words import counted
from graphopt.runtime.executor import Executor
from graphopt.training.callbacks.terminal import open_console

_INPUT = "-"  # a prompt that is read from the input
_KEPT = "\n\t"  # characters that do more than to show themselves


def write_text(recipe: Recipe, folder: Path) -> None:
    """Write the text by which a model continues the prompt; the model is that of a file, or of a run."""
    console = open_console(quiet=recipe.fields["quiet"])
    options = dict(recipe.fields["generate"])
    trained = Trained.find(recipe, folder)
    prompt, is_chat = _prompt(recipe), options.pop("chat")
    writer = _writer(recipe, trained, options.pop("tokenizer"), options.pop("adapter"))
    tell_record(console, recipe.command_line)
    say(console, "model", str(trained.checkpoint or trained.model or recipe.fields["model"]))
    asked: Prompt = [{"role": "user", "content": prompt or ""}] if is_chat else prompt
    tokens = writer.encoded(asked)
    following = writer.tokens(tokens, **options)
    say(console, "prompt", counted(len(tokens), "token"))
    if not console.quiet and prompt and not is_chat:
        _show(prompt)
    _write_tokens(writer, console, following)


def _prompt(recipe: Recipe) -> str | None:
    """Return the recipe's prompt, or the text of the input."""
    prompt: str | None = recipe.fields["prompt"]
    return sys.stdin.read() if prompt == _INPUT else prompt


def _writer(recipe: Recipe, trained: Trained, tokenizer: str | None, adapter: str | None) -> TextGenerator:
    """Return the model of a file, or the one that a run has trained, with its tokenizer."""
    source = trained.executor() if trained.checkpoint is not None else recipe.model(trained.model)
    reads_text = recipe.choices["data"] == "text"
    named = tokenizer or recipe.tokenizer or (OF_CHARACTERS if reads_text else None)
    if named is None:
        raise GraphoptError(
            f"generate: expected tokenizer.json beside {trained.model or recipe.fields['model']}, found none: name one "
            f"by generate.tokenizer=FILE, or generate.tokenizer={OF_CHARACTERS} for single characters"
        )
    if isinstance(source, Executor):
        return TextGenerator(source, named, adapter=adapter)
    return TextGenerator(source, named, adapter=adapter, device=recipe.device)


def _write_tokens(writer: TextGenerator, console: Console, tokens: Iterator[int]) -> None:
    """Write tokens as they come, and then how fast they came."""
    text, count, start = writer.vocabulary.stream(), 0, time.perf_counter()
    for token in tokens:
        _show(text(token))
        count += 1
    seconds = time.perf_counter() - start
    _show("\n")
    if count:
        say(
            console,
            "written",
            f"{counted(count, 'token')} in {seconds:.1f} s, {count / seconds:,.0f} tokens/s",
        )


def _show(text: str) -> None:
    """Write text without characters that would control the terminal."""
    sys.stdout.write(escaped(text, keep=_KEPT))
    sys.stdout.flush()

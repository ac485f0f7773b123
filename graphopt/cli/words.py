"""Read the words of a command line as fields of a recipe, and suggest fields for those that are none."""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from graphopt.cli.composition.hydra_config import BASE, BRACKETS, RECIPES, known_fields, options_of
from graphopt.cli.composition.recipe import check_format, nearest_file
from graphopt.cli.composition.record import RunRecord, mapping
from graphopt.cli.run_folder import CONFIG
from graphopt.data import READERS
from graphopt.data.audio_folders import ENDINGS as RECORDINGS
from graphopt.data.columnar import column_names
from graphopt.data.columns import cell_text
from graphopt.data.files import csv_columns
from graphopt.errors import GraphoptError, nearest
from graphopt.graph.model_folders import is_model_folder, model_in
from graphopt.overrides import list_text, quoted

PROMPT = "prompt="  # the field of a text, which needs no quotes of Hydra's
TUNE = "tune"  # the verb of graphopt.cli.tuning
BUILT_IN = ("linear", "mlp", "cnn", "transformer")  # models
_OF_RUNS = (
    "calibrate",
    "compare",
    "evaluate",
    "export",
    "generate",
    "predict",
)  # verbs that take the folder of runs
# A text such as `Übung/a&b.csv` or `C:\Übung` that means nothing else in Hydra's grammar, which lacks its letters
_LETTER = r"""[^\s,'"=()[\]{}$\\]"""
_TEXT = re.compile(rf"{_LETTER}(?:(?:{_LETTER}|\s|\\(?={_LETTER}))*{_LETTER})?")
_OF_HYDRA = re.compile(r"[\w\s./+%*@?|:\\-]*", re.ASCII)
_TABLES = {"csv", "parquet", "arrow"}
_OF_TABLES = ("target", "features", "sample_weight", "labels")  # fields of all their readers; the model notes columns
_MEANT = {  # by words that other programs take
    **dict.fromkeys(("fit", "run"), "train"),
    **dict.fromkeys(("infer", "inference"), "predict"),
    **dict.fromkeys(("convert", "build"), "compile"),
    **dict.fromkeys(("test", "eval", "validate"), "evaluate"),
    "deploy": "hosts",
    **{name: f"--{name}" for name in ("help", "version")},
}


def field_of(word: str, verbs: Iterable[str]) -> str:
    """Return a word as `key=value`: the file or the folder of a model sets `model`, a verb sets `run`."""
    if word.startswith(PROMPT):
        text = word.removeprefix(PROMPT)
        is_quoted = len(text) > 1 and text[0] == text[-1] and text[0] in "'\""
        if text in ("", "null", "~") or is_quoted:
            return word
        return PROMPT + quoted(text)
    if "=" in word or word.startswith("~"):
        key, _, value = word.partition("=")
        return f"{key}={quoted(value)}" if _TEXT.fullmatch(value) and not _OF_HYDRA.fullmatch(value) else word
    if word in verbs:
        return f"run={word}"
    if names_model(word):
        if word.count(".onnx,") and not os.path.exists(word):
            raise GraphoptError(f"{word}: expected one model, found several: -m model={word} runs each")
        model = str(model_in(Path(word))) if os.path.isdir(word) else word
        return f"model={quoted(model)}"
    check_format(word)
    near = nearest_file(word, ".onnx") if Path(word).suffix else None
    if word in _MEANT or word.removesuffix(".data").endswith(".onnx"):
        near = _MEANT.get(word) or word.removesuffix(".data")
    stands_for, meant = _stands_for(word), nearest(word, verbs)
    first, second = (stands_for, meant) if os.path.exists(word) else (meant, stands_for)
    instead = near if word in _MEANT else first or second or near or f"model={word}"
    raise GraphoptError(
        f"{word}: expected {', '.join(verbs)}, FILE.onnx or FIELD=VALUE, such as {instead}: see graphopt --help"
    )


def with_folders(words: Sequence[str]) -> list[str]:
    """Return the words with fields for what stands after a verb of runs: `evaluate RUN`, and `predict RUN DATA`.

    The folder of a run is one that is no model. Data to predict need no target, which a table may have, and
    no earlier rows beside them.
    """

    def is_run(before: str, word: str) -> bool:
        return before in _OF_RUNS and "=" not in word and os.path.isdir(word) and not is_model_folder(Path(word))

    if words[:1] == ["predict"] and len(words) > 2 and is_run(*words[:2]) and _is_path(words[2]):
        record = RunRecord.read(Path(words[1]))
        options, fields = mapping(record and record.resolved.get("data")), [f"data.path={quoted(words[2])}"]
        kind = reader_of(words[2])
        if "replay" in options and kind:
            options, fields = options_of("data")[kind], [f"data={kind}", *fields]
        elif record and kind != record.choices.get("data") and {kind, record.choices.get("data")} <= _TABLES:
            carried = {name: options[name] for name in _OF_TABLES if options.get(name) is not None}
            if not isinstance(carried.get("features"), Mapping):
                fields = [f"data={kind}", *fields, *(f"data.{name}={_text(x)}" for name, x in carried.items())]
        is_left_out = "target" in options and not _has_target(words[2], options)
        words = [*words[:2], *fields, *["data.target=null"] * is_left_out, *words[3:]]
    runs = [word for word in words if "=" not in word and os.path.isdir(word)]
    if "compare" in words and len(runs) > 1:
        above = os.path.relpath(os.path.commonpath(list(map(os.path.abspath, runs))))
        raise GraphoptError(
            f"compare: expected one folder, whose runs are compared, found {', '.join(runs)}: name the one above them, "
            f"graphopt compare {above}"
        )
    return [
        f"folder={quoted(word)}" if is_run(before, word) else word
        for before, word in zip(["", *words], words, strict=False)
    ]


def _text(value: Any) -> str:
    """Return a name or a class, or a list of these, as Hydra reads it."""
    return list_text([*map(cell_text, value)]) if isinstance(value, list) else quoted(cell_text(value))


def _has_target(path: str, options: Mapping[str, Any]) -> bool:
    """Return whether a table names the columns that a run predicts, which are no features then."""
    kind, target = reader_of(path), options["target"]
    targets = [str(name) for name in (target if isinstance(target, list) else [target])]
    names: Collection[str] = ()
    with suppress(GraphoptError):
        if kind == "csv" and options.get("header", True):
            own = {name: options[name] for name in ("delimiter",) if name in options}
            names, _ = csv_columns(path, target=targets[0], **own)
        elif kind in _TABLES and kind != "csv":
            names = column_names(path)
    return {*targets} <= {*names}


def _is_path(word: str) -> bool:
    return "=" not in word and not names_model(word) and (os.path.exists(word) or bool(Path(word).suffix))


def names_model(word: str) -> bool:
    """Return whether a word is the file of a model, or a folder that programs open as a model."""
    return word.endswith(".onnx") or is_model_folder(Path(word))


def check_words(words: Sequence[str], verbs: Iterable[str]) -> None:
    """Raise an error if a shell has split an argument at its spaces, or two words name models or verbs."""

    def is_bare(word: str) -> bool:
        return "=" not in word and word not in verbs and not names_model(word) and word[:1] not in "~"

    for i, (before, word, after) in enumerate(zip(["", *words], words, [*words[1:], ""], strict=False)):
        if word.startswith("=") and before and "=" not in before:
            split = f"{before}{word}{after if word == '=' else ''}"
        elif "=" not in word and before.endswith("=") and word not in verbs and not names_model(word):
            split = f"{before}{word}"
        else:
            split = ""
        if split.startswith(PROMPT) or (is_bare(word) and before.startswith(PROMPT)):
            text = " ".join([before.removeprefix(PROMPT), *words[i:]]).strip()
            raise GraphoptError(f'{before}: expected one text, found spaces in it: quote it, as in {PROMPT}"{text}"')
        if is_bare(word) and before in _OF_RUNS and not os.path.exists(word) and not _stands_for(word):
            raise GraphoptError(f"{word}: expected the folder of a run or FIELD=VALUE, found no such folder")
        if "://" in word and "=" not in word:
            check_format(word)
        if split:
            raise GraphoptError(f"{split}: expected FIELD=VALUE, found spaces around =: remove them")
        if (
            after
            and "=" in word
            and not word.startswith(PROMPT)
            and any(word.count(one) > word.count(other) for one, other in BRACKETS)
        ):
            raise GraphoptError(
                f'{word}: expected its brackets to close, found a space: quote it, as in "{" ".join(words[i:])}"'
            )
    models = [word for word in words if "=" not in word and word not in verbs and names_model(word)]
    for what, named in (("model", models), ("verb", [word for word in words if word in verbs])):
        first, *others = dict.fromkeys(named) or [""]
        if others:
            raise GraphoptError(f"{others[0]}: expected one {what}, found {first}, too: leave one out")


def reader_of(path: str) -> str:
    """Return the option of `data` that reads a file or a folder, by its name; an empty text if none does."""
    ending = path[path.rfind(".") :].lower() if "." in path else ""
    return READERS.get(ending) or (_reader_of_folder(path) if os.path.isdir(path) else "")


def _reader_of_folder(path: str) -> str:
    """Return the option of `data` that reads a folder, by the first file in it."""
    for _, folders, names in os.walk(path):
        folders.sort()
        for name in sorted(names):
            if not name.startswith("."):
                return "audio" if Path(name).suffix.lower() in RECORDINGS else "images"
    return "images"


def _stands_for(word: str) -> str | None:
    """Return the field that a word could mean, as `FIELD=VALUE`, or None."""
    if (Path(word) / CONFIG).is_file():
        return f"{word}/trained.onnx or folder={word}"
    if kind := reader_of(word):
        return f"data={kind} data.path={word}"
    field, colon, value = word.partition(":")
    if field in known_fields():
        return f"{field}={value if colon else 'VALUE'}"
    if word in (BASE, "none"):
        return None
    groups = [path.parent.name for path in sorted(RECIPES.glob("*/*.yaml")) if path.stem == word]
    groups += ["model"] if word in BUILT_IN else []
    return f"{groups[0]}={word}" if groups else None

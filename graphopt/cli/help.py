"""Write the text of `graphopt --help` from docstrings of classes and functions."""

from __future__ import annotations

import inspect
import json
import re
import shutil
import textwrap
from collections.abc import Callable, Iterator, Mapping
from pkgutil import resolve_name
from typing import Any

from graphopt.cli.composition.hydra_config import BASE
from graphopt.cli.composition.validation import CALLBACKS, COMMAND_LINE_ONLY, OWN, PLAIN, TARGET_KEY, resolve

USAGE = {
    "": "train a classifier of handwritten digits",
    "my.onnx data=npz data.path=train.npz": "train your own model",
    "my.onnx optimizer=sgd optimizer.learning_rate=0.1": "",
    "experiment=text_transformer": "run another recipe",
    "-m optimizer=sgd,adamw fit.epochs=5,10": "run every combination, and print a table",
    "--config-dir my_recipes experiment=mine": "run your own recipe",
    "--cfg job": "show the whole recipe without running it",
    "tune my.onnx photos": "train it on your data, with a recipe that graphopt proposes",
    "train my.onnx": "train it; the default",
    "evaluate runs/mine": "compute metrics of what a run has trained",
    "predict runs/mine": "write the outputs of what a run has trained",
    "calibrate runs/mine calibrate=temperature": "write calibrated.onnx, which is as sure as it is right",
    "resume=runs/mine": "continue a run, with its own recipe",
    'generate my.onnx prompt="Once upon"': "continue a text",
    "compile my.onnx": "write step.onnx without training",
    "hosts my.onnx": "write files for hosts in other languages",
    "artifacts my.onnx": "write artifacts for onnxruntime-training on a device",
    "derive my.onnx derive=jacobian": "write derived.onnx, which computes derivatives, too",
    "explain my.onnx explain=gradcam": "write explained.onnx, which shows what its predictions depend on",
    "report my.onnx": "list what would train, and what blocks training",
    "check my.onnx": "check its gradients against slopes of the loss, and its predictions against the file",
    "export runs/mine": "write its model or adapter for programs that serve language models",
    "compare runs": "put runs side by side",
    "serve": "print the address of a page that trains any model file in a browser on this machine",
    "doctor": "check this environment",
}
USAGE_OF_TUNE = {
    "my.onnx photos": "images, in a folder for each class",
    "my.onnx recordings": "recordings, in a folder for each class",
    "my.onnx rows.csv data.target=price": "a table, and the column to predict",
    "my.onnx lines.jsonl": "texts, for a language model",
    "my.onnx photos --deeper": "train the head, and then the last layers, too",
    "my.onnx photos --pixels=imagenet": "say what the model takes: unit (0 to 1), symmetric (-1 to 1), imagenet, bytes",
    "my.onnx photos fit.epochs=20": "set any field of the recipe; graphopt --help describes them",
}
ENTRY = re.compile(r"    (\w+(?:, \w+)*): (.*)")
AS_IN = re.compile(r"as in `(graphopt\.[\w.]+)`\.")
_IN_YAML = {"None": "null", "True": "true", "False": "false"}


def help_page_of_tune() -> str:
    """Return the text of `graphopt tune --help`."""
    width = max(map(len, USAGE_OF_TUNE))
    lines = [f"  graphopt tune {words:{width}}  {meaning}" for words, meaning in USAGE_OF_TUNE.items()]
    return "\n".join(["Train a model file on your data, with a recipe that graphopt proposes and prints.", "", *lines])


def described(target: Any) -> dict[str, str]:
    """Return the descriptions of arguments in the docstring of a function, or of a class and its bases."""
    descriptions: dict[str, str] = {}
    owners = inspect.getmro(target) if inspect.isclass(target) else (target,)
    if inspect.isclass(options := getattr(target, "Options", None)):
        owners += inspect.getmro(options)
    for owner in reversed(owners):
        lines = inspect.cleandoc(owner.__doc__ or "").partition("Args:\n")[2].splitlines()
        names: list[str] = []
        for line in lines:
            entry = ENTRY.fullmatch(line)
            if entry:
                names = entry[1].split(", ")
                descriptions.update(dict.fromkeys(names, entry[2]))
            elif line.startswith("        "):
                descriptions.update({name: f"{descriptions[name]} {line.strip()}" for name in names})
            else:
                break
    for name, text in descriptions.items():
        if other := AS_IN.fullmatch(text):
            descriptions[name] = described(resolve_name(other[1])).get(name, text)
    return descriptions


def in_yaml(text: str) -> str:
    """Return a description with the words of YAML for Python's."""
    return re.sub(r"\b(None|True|False)\b", lambda match: _IN_YAML[match[0]], text)


def fields(node: Mapping[str, object], path: str = "") -> Iterator[tuple[str, Any, str]]:
    """Yield the path, value and description of each field of a composed recipe, with unresolved references."""
    texts = described(resolve(node[TARGET_KEY], path)) if TARGET_KEY in node else DESCRIBED.get(path, {})
    for name, value in node.items():
        place = f"{path}.{name}" if path else str(name)
        if name == TARGET_KEY or (path == "pipeline" and value == f"${{{name}}}"):
            continue
        if isinstance(value, Mapping) and (TARGET_KEY in value or place == "models" or place in DESCRIBED):
            yield from fields(value, place)
        elif value is not None or path:  # otherwise a group that is omitted
            text = in_yaml(texts.get(name, ""))
            if place in COMMAND_LINE_ONLY:
                text = f"{text.rstrip('.')}; only on the command line"
            yield place, value, text


def help_page(options: str, groups: str, recipe: Mapping[str, object]) -> str:
    """Return the text of `graphopt --help`."""
    width = max(80, shutil.get_terminal_size((110, 24)).columns) - 1
    lines = []
    for place, value, text in fields(recipe):
        plain = json.dumps(value, separators=(",", ":"), ensure_ascii=False).replace('"', "")
        head = f"  {place}={plain}"
        wrapped = textwrap.wrap(text, width, initial_indent=f"{head:<40}  ", subsequent_indent=" " * 42)
        lines += wrapped or [head]
    examples = [f"  graphopt {arguments:<39} {text}".rstrip() for arguments, text in USAGE.items()]
    groups = textwrap.indent(re.sub(rf"\b{BASE}, ", "", groups), "  ")
    parts = ["Train an ONNX model with a recipe.\n", *examples, f"\nOptions:\n\n{options}"]
    parts.append(f"Choose one of each group with GROUP=OPTION:\n\n{groups}")
    other = "graphopt --help GROUP=OPTION lists the fields of another option"
    return "\n".join([*parts, f"Set any field with FIELD=VALUE ({other}):\n", *lines])


def _callback_line(kind: Callable[..., object]) -> str:
    """Return the summary of a callback, and its fields."""
    summary = str(inspect.getdoc(kind)).partition("\n")[0].rstrip(".")
    return f"{summary}: {', '.join(name for name in inspect.signature(kind).parameters if name != 'folder')}"


DESCRIBED = {  # the parts of a recipe that name no class or function
    "callbacks": {name: _callback_line(resolve_name(kind)) for name, kind in CALLBACKS.items()},
    **{path: described(target) for path, target in PLAIN.items()},
}
DESCRIBED |= {path: {**DESCRIBED.get(path, {}), **described(target)} for path, target in OWN.items()}

"""Show docstrings and signatures as a reader of the site needs them: an extension of griffe, which reads the source."""

from __future__ import annotations

import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import griffe

sys.path.insert(0, str(Path(__file__).parent))
import hooks

EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)
KINDS = {kind: griffe.ParameterKind[kind.name.lower()] for kind in inspect._ParameterKind}


class Shown(griffe.Extension):
    """Fence doctests, link public names, and take from Python what decorators and fields make of a signature."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        for each in _members(pkg):
            if each.docstring is not None:
                parts = EXAMPLE.split(each.docstring.value)
                examples = [f"```pycon\n{x.rstrip()}\n```\n" for x in EXAMPLE.findall(each.docstring.value)]
                texts = [hooks.linked(part) for part in parts]
                each.docstring.value = "".join(
                    text + example for text, example in zip(texts, [*examples, ""], strict=True)
                )
            if isinstance(each, griffe.Function) and "keywords_of" in str([x.value for x in each.decorators]):
                each.parameters = _parameters(each.parameters, griffe.dynamic_import(each.path))
            elif isinstance(each, griffe.Class) and "dataclass" in each.labels and "__init__" in each.members:
                made = each.members["__init__"]
                if isinstance(made, griffe.Function):
                    made.parameters = _parameters(made.parameters, griffe.dynamic_import(each.path).__init__)


def _members(within: griffe.Object) -> Iterator[griffe.Object]:
    for member in within.members.values():
        if isinstance(member, griffe.Object):
            yield member
            yield from _members(member)


def _parameters(read: griffe.Parameters, function: Any) -> griffe.Parameters:
    """Return the parameters of a function, with types as they stand in the source where it names them."""
    shown = []
    for name, parameter in inspect.signature(function).parameters.items():
        source = {each.name: each for each in read}.get(name)
        annotation: Any = source.annotation if source is not None else parameter.annotation
        if annotation is parameter.empty:
            annotation = None
        elif isinstance(annotation, type):
            annotation = inspect.formatannotation(annotation)
        default = None if parameter.default is parameter.empty else repr(parameter.default)
        if source is not None and source.default is not None and "within(" not in str(source.default):
            default = source.default
        kind = KINDS[parameter.kind]
        shown.append(griffe.Parameter(name, annotation=annotation, kind=kind, default=default))
    return griffe.Parameters(*shown)

"""Show docstrings and signatures as they are meant: an extension of griffe, which reads the source."""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"(?:^[ \t]*>>> .*\n?(?:^[ \t]*\S.*\n?)*)", re.MULTILINE)
KINDS = {kind.name: griffe.ParameterKind[kind.name.lower()] for kind in inspect._ParameterKind}


class Shown(griffe.Extension):
    """Fence doctests, and take signatures from Python where a decorator spells `**keywords` out."""

    def on_object(self, *, obj: griffe.Object, **_: Any) -> None:
        if obj.docstring is not None:
            obj.docstring.value = EXAMPLE.sub(
                lambda found: f"```pycon\n{found[0].rstrip()}\n```\n", obj.docstring.value
            )

    def on_function(self, *, func: griffe.Function, **_: Any) -> None:
        if not any("keywords_of" in str(decorator.value) for decorator in func.decorators):
            return
        parameters = inspect.signature(griffe.dynamic_import(func.path)).parameters.values()
        func.parameters = griffe.Parameters(
            *(
                griffe.Parameter(
                    parameter.name,
                    annotation=_text(parameter.annotation),
                    kind=KINDS[parameter.kind.name],
                    default=None if parameter.default is parameter.empty else repr(parameter.default),
                )
                for parameter in parameters
            )
        )


def _text(annotation: Any) -> str | None:
    if annotation is inspect.Parameter.empty:
        return None
    return annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)

"""Render templates of chats in a process of its own, which has limits of time and memory.

This program reads JSON from its input and writes JSON to its output. It imports nothing of graphopt: `chats` runs it
as a file. Its environment is that of transformers' `apply_chat_template`.
"""

import datetime
import json
import sys
from collections.abc import Callable
from typing import Any

import jinja2
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment


class Generation(Extension):
    """Put marks around the body of `{% generation %}`, which is the text that the model is to write."""

    tags = {"generation"}  # noqa: RUF012 (as Jinja declares it)

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_marked"), [], [], body).set_lineno(line)

    def _marked(self, caller: Callable[[], str]) -> str:
        start, end = self.environment.marks  # type: ignore[attr-defined]
        return f"{start}{caller()}{end}"


class Plain(jinja2.utils.Namespace):
    """Refuse names that start with an underscore, which lead to Python's own attributes."""

    def __init__(*args: object, **fields: object) -> None:  # so that `self` may be a field
        for name in dict(*args[1:], **fields):
            _check_name(name)
        jinja2.utils.Namespace.__init__(*args, **fields)

    def __setitem__(self, name: str, value: object) -> None:
        _check_name(name)
        super().__setitem__(name, value)


def _check_name(name: object) -> None:
    if str(name).startswith("_"):
        raise jinja2.exceptions.SecurityError(f"expected no name that starts with _, found {name!r}")


def environment(marks: list[str]) -> ImmutableSandboxedEnvironment:
    """Return Jinja's sandbox with the functions that templates of chats use."""
    sandbox = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[Generation, loopcontrols])
    sandbox.marks = marks  # type: ignore[attr-defined]

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def tojson(x: object, ensure_ascii: bool = False, **options: Any) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, **options)

    sandbox.filters["tojson"] = tojson
    sandbox.globals |= {
        "raise_exception": raise_exception,
        "strftime_now": lambda form: datetime.datetime.now().strftime(form),
        "namespace": Plain,
    }
    return sandbox


def _main() -> None:
    asked = json.loads(sys.stdin.buffer.read())
    rendered: list[str] = []
    answer: dict[str, object]
    try:
        template = environment(asked["marks"]).from_string(asked["template"])
        for chat in asked["chats"]:
            rendered.append(template.render(**asked["variables"], **chat))
        answer = {"texts": rendered}
    except MemoryError:
        number = len(rendered)
        rendered.clear()
        answer = {"number": number, "error": "it needs more memory than it may have"}
    except Exception as error:  # noqa: BLE001 (whatever a template raises)
        place = f", line {error.lineno}" if isinstance(error, jinja2.TemplateSyntaxError) else ""
        answer = {"number": len(rendered), "error": f"{error or type(error).__name__}{place}"}
    sys.stdout.buffer.write(json.dumps(answer).encode())


if __name__ == "__main__":
    _main()

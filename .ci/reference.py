"""Write the API reference, from docstrings, to build/docs: python -W error .ci/reference.py"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import shutil
import sys
import typing
from pathlib import Path

import onnxruntime
import pdoc

ROOT = Path(__file__).parents[1]
PUBLIC = (
    "graphopt",
    "graphopt.callbacks",
    "graphopt.data",
    "graphopt.models",
    "graphopt.testing",
    "graphopt.hosts.export",
    "graphopt.hosts.contract",
    "graphopt.training.fit",
    "graphopt.runtime.device",
    "graphopt.runtime.executor_options",
    "graphopt.graph.emitter",
    "graphopt.graph.rewriting",
    "graphopt.graph.roles",
    "passes",
    "passes.gradients.registry",
    "passes.lowering.registry",
)


def resolve_inherited_fields() -> None:
    """Evaluate the annotations of dataclasses, each in the module that declares the field, where pdoc does not look."""
    for module in [sys.modules[name] for name in sys.modules if name.split(".")[0] in ("graphopt", "passes")]:
        for member in list(vars(module).values()):
            if (
                isinstance(member, type)
                and dataclasses.is_dataclass(member)
                and member.__module__ == module.__name__
            ):
                init = vars(member).get("__init__")
                if init is not None:
                    hints = typing.get_type_hints(
                        member, localns={"onnxruntime": onnxruntime}
                    )  # imported for types only
                    init.__annotations__ |= {
                        name: hint for name, hint in hints.items() if name in init.__annotations__
                    }
            elif isinstance(getattr(member, "Options", None), type):
                function = vars(member).get("__init__") if isinstance(member, type) else member
                if function is not None:
                    hints = typing.get_type_hints(member.Options)
                    shown = inspect.signature(function)
                    typed = [
                        x.replace(annotation=hints.get(x.name, x.annotation))
                        for x in shown.parameters.values()
                    ]
                    for each in (function, inspect.unwrap(function)):  # pdoc reads the one that is decorated
                        each.__signature__ = shown.replace(parameters=typed)


if __name__ == "__main__":
    sys.path.insert(0, str(ROOT))
    for module in map(importlib.import_module, PUBLIC):
        for name in getattr(module, "__all__", ()):
            setattr(module, name, getattr(module, name))  # pdoc does not see what a module imports late
    resolve_inherited_fields()
    pdoc.render.configure(docformat="google")
    pdoc.pdoc(*PUBLIC, output_directory=ROOT / "build" / "docs")
    shutil.copy(ROOT / "graphopt" / "hosts" / "host.schema.json", ROOT / "build" / "docs")

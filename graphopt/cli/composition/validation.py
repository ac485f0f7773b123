"""Validate a recipe, a plain mapping, before any of its code runs, and build the objects that it describes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pkgutil
import re
import types
import typing
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from graphopt.errors import GraphoptError, unknown
from graphopt.training import callbacks
from graphopt.training.metrics import Wanted, named

MISSING = "???"
TARGET_KEY = "_target_"
_WITHOUT_SHORT_NAME = {"Callback", "Control", "Log", "Monitor", "ProgressBar", "Record", "Run"}


def _short_name(kind: str) -> str:
    """Return the name of a class in recipes: EarlyStopping is early_stopping, StopOnNaN stop_on_nan."""
    words = re.sub(r"(?<=[a-z])(?=[A-Z][a-z])", "_", kind.replace("TensorBoard", "Tensorboard"))
    return words.lower()


CALLBACKS = {  # the classes of callbacks by their short names in recipes
    _short_name(kind): f"graphopt.callbacks.{kind}"
    for kind in callbacks.__all__
    if kind not in _WITHOUT_SHORT_NAME
}
NAMED: dict[str, Sequence[str]] = {  # the names that recipes may use, by path; all other paths accept passes
    "callbacks": tuple(CALLBACKS.values()),
    "data": tuple(
        f"graphopt.data.{name}"
        for name in ("arrow", "csv", "diabetes", "digits", "images", "npy", "npz", "parquet", "text")
    ),
    "executor": ("graphopt.Executor",),
    "launcher": tuple(
        f"graphopt.distributed.{name}"
        for name in ("launchers.LocalLauncher", "launchers.MPILauncher", "ray.RayLauncher")
    ),
    "models": tuple(f"graphopt.models.{name}" for name in ("cnn", "linear", "mlp", "transformer")),
    "pipeline": ("graphopt.Pipeline",),
}


def check(node: Any, path: str, trust: Sequence[str], added: Mapping[str, Sequence[str]]) -> None:
    """Raise an error if a part of a recipe names code that is neither listed nor trusted, or has invalid fields.

    `trust` names packages and modules whose code recipes may also name; `added` has the fields that the caller adds to
    a target, by its path.
    """
    if isinstance(node, list):
        for i, value in enumerate(node):
            check(value, f"{path}[{i}]", trust, added)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            check(value, f"{path}.{key}", trust, added)
        if TARGET_KEY in node:
            target = resolve(node[TARGET_KEY], path, trust)
            fields = {name: value for name, value in node.items() if name != TARGET_KEY}
            check_fields(target, fields, path, added.get(path, ()), trust)


def expanded(callbacks: Any) -> dict[str, Any]:
    """Return the callbacks of a recipe by name, each a mapping with `_target_`; null and false leave one out.

    A value that is not a mapping is that of the first field, and true sets no field.
    """
    if not isinstance(callbacks, Mapping | None):
        raise GraphoptError(f"callbacks: expected a mapping of callbacks, found {callbacks!r}")
    result: dict[str, Any] = {}
    for name, value in (callbacks or {}).items():
        if value is None or value is False:
            continue
        fields = value if isinstance(value, Mapping) else {}
        if name not in CALLBACKS and TARGET_KEY not in fields:
            raise GraphoptError(
                f"callbacks: {unknown('callback', str(name), CALLBACKS)}; a class of your own needs {TARGET_KEY}"
            )
        if not isinstance(value, Mapping | bool):
            first = next(iter(inspect.signature(pkgutil.resolve_name(CALLBACKS[name])).parameters))
            fields = {first: value}
        result[name] = {TARGET_KEY: CALLBACKS.get(name), **fields}
    return result


def create(node: Any, path: str, trust: Sequence[str] = (), /, **arguments: Any) -> Any:
    """Build the object that a checked recipe describes: each mapping with `_target_` becomes a call of its target.

    Strings stay as they are: nothing is interpolated. `arguments` are further arguments of the node's target.
    """
    if isinstance(node, list):
        return [create(value, f"{path}[{i}]", trust) for i, value in enumerate(node)]
    if not isinstance(node, Mapping):
        return node
    built = {key: create(x, f"{path}.{key}", trust) for key, x in node.items() if key != TARGET_KEY}
    if TARGET_KEY not in node:
        return built
    target = resolve(node[TARGET_KEY], path, trust)
    for name, hint in _hints(target).items():
        if isinstance(built.get(name), str) and _is_code(hint):
            built[name] = _trusted(built[name], f"{path}.{name}", trust)
    return target(**built, **arguments)


def metrics_of(wanted: Any, trust: Sequence[str] = ()) -> list[Wanted] | None:
    """Return the metrics of a recipe, in which a name with a dot is a function of a trusted package."""
    if wanted is None:
        return None
    chosen = [_trusted(x, "fit.metrics", trust) if isinstance(x, str) and "." in x else x for x in wanted]
    for metric in chosen:
        named(metric)
    return chosen


def check_fields(
    target: Any, fields: Mapping[str, Any], path: str, given: Sequence[str] = (), trust: Sequence[str] = ()
) -> None:
    """Raise an error if a class or function does not accept a field, or a value does not match its annotation."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if parameter.kind is not parameter.VAR_POSITIONAL
    }
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    hints = _hints(target)
    for name, value in fields.items():
        if not isinstance(name, str) or (name.startswith("_") and name.endswith("_")):
            raise GraphoptError(f"{path}.{name}: expected no such field in a recipe: remove it")
        if is_open:
            continue
        if name not in parameters or name in given:
            raise GraphoptError(
                f"{path}: {unknown('field', name, [x for x in parameters if x not in given])}"
            )
        hint = hints.get(name, Any)
        if isinstance(value, str) and value != MISSING and _is_code(hint):
            _trusted(value, f"{path}.{name}", trust)
        elif value != MISSING and not _fits(value, hint, trust):
            raise GraphoptError(f"{path}.{name}: expected {_named(parameters[name])}, found {value!r}")
    for name, parameter in parameters.items():
        if not is_open and parameter.default is parameter.empty and name not in (*fields, *given):
            raise GraphoptError(f"{path}.{name}: expected a value, found none: add +{path}.{name}=...")


def resolve(name: Any, path: str, trust: Sequence[str] = ()) -> Any:
    """Return the object that `_target_` names in a recipe: one of the listed names, or code of a trusted package."""
    if isinstance(name, str):
        if name in _offered(path):
            return pkgutil.resolve_name(name)
        if _within(name.replace(":", "."), trust):
            return _trusted(name, f"{path}.{TARGET_KEY}", trust)
    package = str(name).partition(".")[0].partition(":")[0]
    if package in ("graphopt", "passes"):
        raise GraphoptError(f"{path}.{TARGET_KEY}: {unknown('name', name, _offered(path))}")
    raise _untrusted(name, f"{path}.{TARGET_KEY}")


def _offered(path: str) -> Sequence[str]:
    """Return the names of graphopt's own code that a path of the recipe accepts."""
    group, _, rest = path.partition(".")
    if group in NAMED and bool(rest) == (group in ("callbacks", "models")) and "." not in rest:
        return NAMED[group]
    return _passes()


@functools.cache
def _passes() -> tuple[str, ...]:
    """Return the names of the passes and their parts: the concrete dataclasses that `passes` exports."""
    library = pkgutil.resolve_name("passes")
    return tuple(
        f"passes.{name}"
        for name, member in vars(library).items()
        if inspect.isclass(member) and dataclasses.is_dataclass(member) and not inspect.isabstract(member)
    )


def _trusted(name: str, path: str, trust: Sequence[str]) -> Any:
    """Return the object with a dotted name if a trusted package defines it."""
    dotted = name.replace(":", ".")
    if not _within(dotted, trust) or any(part.startswith("__") for part in dotted.split(".")):
        raise _untrusted(name, path)
    try:
        member = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphoptError(f"{path}: cannot find {name!r}: {error}") from error
    if not callable(member):
        raise GraphoptError(f"{path}: expected a class or a function, found {name!r}")
    if inspect.isroutine(member) or inspect.isclass(member):
        home = str(member.__module__)
    else:  # an object such as an onnxscript function belongs to the module that contains it
        holder = pkgutil.resolve_name(name.rpartition(":" if ":" in name else ".")[0])
        home = getattr(holder, "__name__", "")
    if not _within(home, trust):
        raise _untrusted(name, path, f" of {home!r}", home)
    return member


def _untrusted(name: Any, path: str, of: str = "", home: str = "") -> GraphoptError:
    package = (home or str(name)).partition(".")[0].partition(":")[0]
    return GraphoptError(
        f"{path}: expected graphopt's own or trusted code, found {name!r}{of}; "
        f"trust=[{package}] on the command line trusts all code of {package}"
    )


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package.rstrip('.')}.") for package in packages)


def _hints(target: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(options := getattr(target, "Options", None)):
        target = options
    is_plain_class = inspect.isclass(target) and not hasattr(target, "__dataclass_fields__")
    try:
        return typing.get_type_hints(target.__init__ if is_plain_class else target)
    except (NameError, TypeError):  # a user's annotations may not resolve
        return {}


def _named(parameter: inspect.Parameter) -> str:
    """Return what a parameter expects: its types, or the values of a Literal."""
    text = str(parameter.annotation).removeprefix("<class '").removesuffix("'>")
    values = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", lambda match: match[1].replace(", ", " or "), text)
    return values.replace(" | ", " or ")


def _is_code(hint: Any) -> bool:
    """Return whether a type hint asks for a function, which a string may name."""
    parts = typing.get_args(hint) if typing.get_origin(hint) in (typing.Union, types.UnionType) else (hint,)
    return any(typing.get_origin(part) is Callable for part in parts) and str in parts


def _fits(value: Any, hint: Any, trust: Sequence[str]) -> bool:
    """Return whether a recipe's value, or the object that it describes, has a type."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any:
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part, trust) for part in parts)
    if isinstance(value, Mapping) and TARGET_KEY in value:
        return _makes(value[TARGET_KEY], hint, trust)
    if origin is Literal:
        return any(value == part and type(value) is type(part) for part in parts)
    if hint is None or hint is type(None):
        return value is None
    if hint in (bool, int, float, str):
        return isinstance(value, int | float if hint is float else hint) and (
            hint is bool or not isinstance(value, bool)
        )
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return isinstance(value, Mapping) and all(_fits(item, parts[1], trust) for item in value.values())
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(_fits(item, parts[0], trust) for item in value)
    if inspect.isclass(origin):
        return isinstance(value, (origin, str) if origin is os.PathLike else origin)
    return value is not None and not isinstance(value, Mapping) and not dataclasses.is_dataclass(hint)


def _makes(target: Any, hint: Any, trust: Sequence[str]) -> bool:
    """Return whether calling a target can return an instance of a type; a function is assumed to."""
    made, kind = resolve(target, "", trust), typing.get_origin(hint) or hint
    return not inspect.isclass(made) or (inspect.isclass(kind) and issubclass(made, kind))

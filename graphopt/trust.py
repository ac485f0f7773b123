"""Checks what a recipe names before anything of it runs: whose code, which fields, of what types."""

from __future__ import annotations

import inspect
import pkgutil
import types
import typing
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

from graphopt.errors import GraphoptError, known

OWN = ("passes", "graphopt")
CODE = ("_target_", "function")  # the keys whose values name code
MISSING = "???"


def check(node: Any, path: str, trust: Sequence[str] = (), given: Sequence[str] = ()) -> None:
    """Refuse a resolved recipe that names code that is not trusted, or fields that do not fit.

    Args:
        node: mappings, lists and plain values.
        path: where the node stands in the recipe, for errors.
        trust: names of more packages or modules.
        given: fields of the node's own target that come from elsewhere.

    Raises:
        GraphoptError: names the place, what was expected and what was found.
    """
    for where, mapping in mappings(node, path):
        for key in CODE:
            if isinstance(mapping.get(key), str) and mapping[key] != MISSING:
                resolve(mapping[key], f"{where}.{key}", trust)
    for where, mapping in mappings(node, path):
        if "_target_" in mapping:
            check_fields(
                resolve(mapping["_target_"], where, trust), mapping, where, given if where == path else ()
            )


def check_fields(target: Any, fields: Mapping[str, Any], path: str, given: Sequence[str] = ()) -> None:
    """Refuse fields that a class or function does not take, and values of another type than it says.

    Raises:
        GraphoptError: names the field, what was expected and what was found.
    """
    parameters = inspect.signature(target).parameters
    if any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    taken = [name for name in parameters if name not in given]
    hints = _hints(target)
    for name, value in fields.items():
        if name.startswith("_") and name.endswith("_"):
            if name not in ("_target_", "_partial_"):
                raise GraphoptError(f"{path}.{name}: recipes may not use it")
            continue
        if name not in parameters:
            raise GraphoptError(f"{path}: {known('field', name, taken)}")
        if name in hints and name not in given and value != MISSING and not _fits(value, hints[name]):
            expected = str(parameters[name].annotation).removeprefix("<class '").removesuffix("'>")
            raise GraphoptError(f"{path}.{name}: expected {expected}, found {value!r}")
    for name in taken:
        if parameters[name].default is inspect.Parameter.empty and name not in fields:
            raise GraphoptError(f"{path}.{name}: missing: add +{path}.{name}=...")


def resolve(name: Any, path: str, trust: Sequence[str] = (), own: Sequence[str] = OWN) -> Any:
    """Return what a dotted name names, if its code is in `trust`, or is in `own` and was written there.

    Raises:
        GraphoptError: it is not, or there is no such thing.
    """
    allowed = (*own, *trust)
    if not isinstance(name, str) or not _within(name.replace(":", "."), allowed):
        package = str(name).partition(".")[0].partition(":")[0]
        raise GraphoptError(
            f"{path}: expected code of {' or '.join(allowed)}, found {name!r}: trust=[{package}] allows it"
        )
    try:
        found = pkgutil.resolve_name(name)
    except (ImportError, AttributeError, ValueError) as error:
        raise GraphoptError(f"{path}: cannot find {name!r}: {error}") from error
    home = str(getattr(found, "__module__", None) or getattr(found, "__name__", ""))
    if not _within(name.replace(":", "."), trust) and not _within(home, allowed):
        raise GraphoptError(f"{path}: expected code of {' or '.join(allowed)}, found {name!r} of {home!r}")
    return found


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package.rstrip('.')}.") for package in packages)


def mappings(node: Any, path: str) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield every mapping in a recipe and where it stands."""
    if isinstance(node, Mapping):
        yield path, node
        for key, value in node.items():
            yield from mappings(value, f"{path}.{key}")
    elif isinstance(node, list):
        for i, value in enumerate(node):
            yield from mappings(value, f"{path}[{i}]")


def _hints(target: Any) -> dict[str, Any]:
    is_plain_class = inspect.isclass(target) and not hasattr(target, "__dataclass_fields__")
    try:
        return typing.get_type_hints(target.__init__ if is_plain_class else target)
    except (NameError, TypeError):  # a user's own annotations, which need not resolve
        return {}


def _fits(value: Any, hint: Any) -> bool:
    """Tell whether a recipe's value is of a type; what a recipe builds first is not looked into."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is Any or (isinstance(value, Mapping) and "_target_" in value):
        return True
    if origin in (typing.Union, types.UnionType):
        return any(_fits(value, part) for part in parts)
    if origin is Literal:
        return value in parts
    if hint is None or hint is type(None):
        return value is None
    if hint is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if hint is int:
        return isinstance(value, int) and not isinstance(value, bool)
    if hint in (bool, str):
        return isinstance(value, hint)
    if inspect.isclass(origin) and issubclass(origin, Mapping):
        return isinstance(value, Mapping)
    if inspect.isclass(origin) and issubclass(origin, Sequence):
        return isinstance(value, list) and all(_fits(one, parts[0]) for one in value)
    return value is not None and not isinstance(value, Mapping)

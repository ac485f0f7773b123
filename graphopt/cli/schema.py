"""Write a JSON Schema of recipes, by which editors complete and check them, from annotations and docstrings."""

from __future__ import annotations

import dataclasses
import inspect
import os
import typing
from collections.abc import Iterable, Mapping, Sequence
from pkgutil import resolve_name
from typing import Any, Literal

from graphopt.cli.composition.hydra_config import RECIPES, base_recipe, options_of
from graphopt.cli.composition.validation import (
    CALLBACKS,
    NAMED,
    OWN,
    PLAIN,
    TARGET_KEY,
    added_arguments,
    offered,
)
from graphopt.cli.help import DESCRIBED, described, in_yaml
from graphopt.fields import alternatives, hints
from graphopt.intervals import KEY, Interval

Schema = dict[str, Any]

_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", type(None): "null"}
_LARGEST = 1.7976931348623157e308  # of finite numbers
_GIVEN = {"executor": added_arguments("executor"), "models": ("features",)}  # arguments of named targets
_NULL: Schema = {"type": "null"}


def recipe_schema(verbs: Iterable[str]) -> Schema:
    """Return the schema, of draft 2020-12, of recipes, and of files of a group's option, which have `_target_`.

    Args:
        verbs: the values of the field `run`.
    """
    primary, steps = base_recipe(), offered("pipeline.*")
    others = [name for names in NAMED.values() for name in names]
    groups = [path.name for path in sorted(RECIPES.iterdir()) if any(path.glob("*.yaml"))]
    parts = [group for group in groups if group not in ("experiment", "sweep")]
    fields = _object_schema(OWN[""])["properties"]
    fields["run"] = {"description": DESCRIBED[""]["run"], "enum": [*verbs]}
    fields |= {name: _object_schema(target, without=added_arguments(name)) for name, target in PLAIN.items()}
    fit, checkpoint = fields["fit"]["properties"], fields.pop("fit.checkpoint")
    fit |= _object_schema(OWN["fit"])["properties"]
    fit["checkpoint"] = _any(checkpoint, _NULL, _ref("reference"))
    fields |= {name: _ref(name) for name in parts}
    fields |= {
        "callbacks": _mapping({name: _callback_schema(name) for name in CALLBACKS}, _ref("part")),
        "models": _mapping({}, _any(*map(_ref, NAMED["models"]))),
        "parameters": _any(_ref(primary["parameters"][TARGET_KEY]), _ref("step")),
        "defaults": _ref("defaults"),
        "hydra": {"type": "object"},
    }
    pipeline = {
        name: _any(_ref(node[TARGET_KEY]) if isinstance(node, Mapping) else fields[name], _ref("step"))
        for name, node in primary["pipeline"].items()
        if name != TARGET_KEY
    }
    fields["pipeline"] = _mapping({TARGET_KEY: {"type": "string"}, **pipeline}, _ref("step"))
    part = {"required": [TARGET_KEY], **_any(*map(_ref, (*steps, *others, "trusted")))}
    trusted = {TARGET_KEY: {"type": "string", "pattern": r"^(?!(graphopt|passes)\b)"}}
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "a recipe of graphopt",
        "if": {"required": [TARGET_KEY]},
        "then": _ref("part"),
        "else": _mapping(fields, False),
        "$defs": {
            "reference": {"type": "string", "pattern": r"\$\{|^\?\?\?$"},
            "trusted": {"type": "object", "required": [TARGET_KEY], "properties": trusted},
            "part": part,
            "step": _any(part, {"type": "array", "items": _ref("step")}, _NULL, _ref("reference")),
            "defaults": {"type": "array", "items": _any({"type": "string"}, _choices_schema(groups))},
            **{group: _group(group, "step" if group in pipeline else "trusted") for group in parts},
            **{name: _object_schema(resolve_name(name), name) for name in steps},
            **{
                name: _object_schema(resolve_name(name), name, _GIVEN.get(group, ()))
                for group, names in NAMED.items()
                for name in names
            },
        },
    }


def _group(group: str, other: str) -> Schema:
    """Return the schema of a part of the recipe, which may leave out `_target_`: that of the option stays."""
    default = next((x[group] for x in base_recipe()["defaults"] if isinstance(x, Mapping) and group in x), "")
    options = sorted(options_of(group).items(), key=lambda option: option[0] != default)
    names = dict.fromkeys(x[TARGET_KEY] for _, x in options if TARGET_KEY in x)  # editors show the first
    return _any(*map(_ref, (*names, other, "reference")), _NULL)


def _choices_schema(groups: Iterable[str]) -> Schema:
    """Return the schema of an entry of `defaults`, with the known options, beside which there may be others."""
    other = {"type": ["string", "array", "null"]}
    choices = {group: _any({"enum": [*options_of(group)]}, other) for group in groups}
    return _mapping({**choices, **{f"override /{group}": x for group, x in choices.items()}}, True)


def _callback_schema(name: str) -> Schema:
    """Return the schema of a callback: true, the value of its first field, or its fields."""
    kind = resolve_name(CALLBACKS[name])
    first = next(iter(inspect.signature(kind).parameters), "")
    forms = _any({"type": ["boolean", "null"]}, _ref(CALLBACKS[name]), *_forms(hints(kind).get(first, bool)))
    return {"description": DESCRIBED["callbacks"][name], **forms}


def _object_schema(target: Any, name: str = "", without: Sequence[str] = ()) -> Schema:
    """Return the schema of the fields of a class or a function, but for those that the command gives."""
    parameters = [x for x in inspect.signature(target).parameters.values() if x.name not in without]
    options, kinds, texts = getattr(target, "Options", target), hints(target), described(target)
    is_dataclass = dataclasses.is_dataclass(options)
    intervals = {x.name: x.metadata.get(KEY) for x in dataclasses.fields(options)} if is_dataclass else {}
    properties = {
        x.name: _field(kinds.get(x.name, Any), texts.get(x.name, ""), intervals.get(x.name))
        for x in parameters
        if x.kind not in (x.VAR_POSITIONAL, x.VAR_KEYWORD)
    }
    if name in NAMED["models"]:
        properties["outputs"] = _field(int | None, texts["outputs"])  # null: as many as the data needs
    if name:
        properties |= {TARGET_KEY: {"const": name}, "defaults": _ref("defaults")}
    schema = _mapping(properties, any(x.kind is x.VAR_KEYWORD for x in parameters))
    return {"description": str(inspect.getdoc(target)).partition("\n")[0], **schema}


def _field(hint: object, text: str = "", interval: Interval | None = None) -> Schema:
    """Return the schema of a field: values of its type, or a reference."""
    forms = _forms(hint, interval)
    schema = _any(*forms, _ref("reference")) if {} not in forms else {}
    return {"description": in_yaml(text), **schema} if text else schema


def _forms(hint: object, interval: Interval | None = None) -> list[Schema]:
    """Return the schemas of the types of a hint that YAML has; [{}] if there are none."""
    forms = [form for kind in alternatives(hint) if (form := _type_schema(kind, interval)) is not None]
    return [form for i, form in enumerate(forms) if form not in forms[:i]] or [{}]


def _type_schema(kind: object, interval: Interval | None) -> Schema | None:
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    holder = origin if inspect.isclass(origin) else object
    if kind is Any:
        return {}
    if kind in _TYPES:
        return {
            "type": _TYPES[kind],
            **(_interval_schema(interval, kind) if interval and kind in (int, float) else {}),
        }
    if origin is Literal:
        return {"enum": [*parts]}
    if issubclass(holder, Mapping):
        return {"type": "object", "additionalProperties": _field(parts[1], "", interval)}
    if issubclass(holder, Sequence):
        has_items = any(_type_schema(part, None) is not None for part in alternatives(parts[0]))
        return {"type": "array", "items": _field(parts[0], "", interval)} if has_items else None
    if holder is os.PathLike:
        return {"type": "string"}
    if inspect.isclass(kind) and dataclasses.is_dataclass(kind):
        names = [name for name in offered("pipeline.*") if issubclass(resolve_name(name), kind)]
        return {"required": [TARGET_KEY], **_any(*map(_ref, (*names, "trusted")))} if names else None
    return None


def _interval_schema(interval: Interval, kind: type) -> Schema:
    """Return the bounds of numbers; only a bracket includes infinity."""
    (low, high), bounds = interval.bounds, {}
    if low > -_LARGEST:
        bounds["minimum" if interval.text[0] == "[" else "exclusiveMinimum"] = kind(low)
    if high <= _LARGEST:
        bounds["maximum" if interval.text[-1] == "]" else "exclusiveMaximum"] = kind(high)
    elif interval.text[-1] == ")" and kind is float:
        bounds["maximum"] = _LARGEST
    return bounds


def _mapping(fields: Mapping[str, Schema], others: Schema | bool) -> Schema:
    return {"type": "object", "properties": fields, "additionalProperties": others}


def _any(*schemas: Schema) -> Schema:
    return {"anyOf": [*schemas]} if len(schemas) > 1 else schemas[0]


def _ref(name: str) -> Schema:
    return {"$ref": f"#/$defs/{name}"}

"""Answer calls with wrong arguments in one line: the unknown argument, the nearest known one, and all known ones."""

from __future__ import annotations

import functools
import inspect
import os
import re
from abc import ABC
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Literal, ParamSpec, TypeVar, overload

from graphopt.errors import GraphoptError, kind_of, nearest, unknown

_P = ParamSpec("_P")
_R = TypeVar("_R")
_S = TypeVar("_S")
_T = TypeVar("_T")

_MOST_LISTED = 20  # names of a module
_PATH = re.compile(r"^(ReadName|ReadPath|WriteName|WritePath|Path|_PathLike|str \| os\.PathLike\[str\])$")

# Where arguments belong that are often given to another function.
_OPTIMIZER = "an optimizer takes it, such as optimizer=passes.AdamW({name}=...)"
_PLACES = {
    **dict.fromkeys(("beta1", "epsilon", "learning_rate", "momentum", "weight_decay"), _OPTIMIZER),
    **dict.fromkeys(("optimizer", "loss", "schedule", "clip", "accumulate"), "graphopt.compile takes {name}"),
    **dict.fromkeys(
        ("batch_size", "callbacks", "checkpoint", "epochs", "metrics", "validation", "verbose"),
        "graphopt.fit takes {name}",
    ),
    **dict.fromkeys(("device", "threads"), "graphopt.Executor takes {name}"),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), "epochs times the steps of an epoch is their number"),
    "early_stopping": "callbacks=[graphopt.callbacks.EarlyStopping()] does it",
    "patience": "the callback EarlyStopping takes it",
}


class WrongArguments(GraphoptError, TypeError):
    """Report a call with an unknown argument, with too many or without one that is needed."""


class _Arguments:
    """Show the arguments of `__init__` as those of a class: `inspect` would take those of `__new__`."""

    def __get__(self, instance: object, cls: type) -> inspect.Signature:
        if instance is not None:  # which may be a function of other arguments
            raise AttributeError("__signature__")
        return inspect.Signature() if cls.__init__ is object.__init__ else _signature_of(cls.__init__)  # type: ignore[misc]


class Checked(ABC):  # noqa: B024 (subclasses have abstract methods)
    """Name wrong arguments, and what an abstract class lacks, in one line.

    The first call of a class puts `checked` on its `__init__`, which `dataclass` writes after `__init_subclass__`.
    Copies call `__new__` without arguments.
    """

    if not TYPE_CHECKING:
        __signature__ = _Arguments()

        def __new__(cls, *args: object, **keywords: object) -> Checked:
            missing = getattr(cls, "__abstractmethods__", ())
            if missing or cls.__init__ is object.__init__:
                _explain(cls.__name__, cls.__signature__, len(args), keywords)
            if missing:
                raise GraphoptError(
                    f"{cls.__name__}: expected the method {' and '.join(sorted(missing))}, found none: define "
                    "it in the class, or call a subclass"
                )
            if not hasattr(cls.__init__, "is_checked") and cls.__init__ is not object.__init__:
                cls.__init__ = checked()(cls.__init__)
                cls.__init__.is_checked = True
            return super().__new__(cls)


def checked(advice: str = "") -> Callable[[Callable[_P, _R]], Callable[_P, _R]]:
    """Return a decorator that makes calls of a function or a method name wrong arguments in one line.

    Args:
        advice: what to do about arguments without a name that are too many.
    """

    def decorated(function: Callable[_P, _R]) -> Callable[_P, _R]:
        @functools.wraps(function)
        def call(*args: _P.args, **keywords: _P.kwargs) -> _R:
            try:
                return function(*args, **keywords)
            except TypeError:
                given = len(args) - ("self" in inspect.signature(function).parameters)
                is_class = function.__name__ == "__init__"
                name = type(args[0]).__name__ if is_class else function.__name__
                _explain(name, _signature_of(function), given, keywords, advice)
                _explain_paths(name, inspect.signature(function).bind(*args, **keywords).arguments, function)
                raise

        return call

    return decorated


def _signature_of(function: Callable[..., object]) -> inspect.Signature:
    """Return the signature of a function, or of a method without `self`."""
    own = inspect.signature(function)
    return own.replace(parameters=[x for x in own.parameters.values() if x.name != "self"])


@overload
def keywords_of(
    options: Callable[_P, object], own: Literal[2] = 2
) -> Callable[[Callable[Concatenate[_S, _T, ...], _R]], Callable[Concatenate[_S, _T, _P], _R]]: ...
@overload
def keywords_of(
    options: Callable[_P, object], own: Literal[1]
) -> Callable[[Callable[Concatenate[_S, ...], _R]], Callable[Concatenate[_S, _P], _R]]: ...
def keywords_of(options: Any, own: int = 2) -> Any:
    """Show the arguments of a function, or the fields of a dataclass, in place of `**keywords` in a signature.

    Args:
        own: the number of other arguments.
    """

    def shown(function: Any) -> Any:
        signature = inspect.signature(function)
        parameters = *signature.parameters.values(), *inspect.signature(options).parameters.values()
        function.__signature__ = signature.replace(parameters=parameters[:own] + parameters[own + 1 :])
        if isinstance(options, type):
            function.Options = options  # explains them to the command
        return function

    return shown


def _explain(name: str, signature: inspect.Signature, given: int, keywords: Iterable[str], advice: str = "") -> None:
    """Raise an error in one line if so many arguments without a name, and keywords, do not fit a signature."""
    parameters = signature.parameters.values()
    kinds = [p.kind for p in parameters]
    named = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    unnamed = [p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if inspect.Parameter.VAR_KEYWORD not in kinds:
        for word in keywords:
            if word not in named:
                raise WrongArguments(f"{name}: {_unknown(word, named)}") from None
    if given > len(unnamed) and inspect.Parameter.VAR_POSITIONAL not in kinds:
        most = f"at most {len(unnamed)} without a name" if unnamed else "none without a name"
        rest = [name for name in named if name not in unnamed]
        if inspect.Parameter.VAR_KEYWORD in kinds and not rest:
            advice = advice or "give a name to each"
        example = advice or (f"name the others, such as {rest[0]}=..." if rest else "leave the others out")
        raise WrongArguments(f"{name}: expected arguments, {most}, found {given}: {example}") from None
    taken = set(unnamed[:given])
    if twice := taken & set(keywords):
        raise WrongArguments(f"{name}: argument {min(twice)!r}: expected it once, found it twice") from None
    left = {*named, *unnamed} - taken - set(keywords)
    if lacking := [p.name for p in parameters if p.default is p.empty and p.name in left]:
        raise WrongArguments(f"{name}: expected {', '.join(map(repr, lacking))}, found none: give it") from None


def _explain_paths(name: str, given: Mapping[str, object], function: Callable[..., object]) -> None:
    """Raise an error in one line if an argument that the annotation calls a path is none."""
    for argument, value in given.items():
        hint = str(function.__annotations__.get(argument, ""))
        if _PATH.search(hint) and not isinstance(value, str | os.PathLike):
            raise WrongArguments(f"{name}: {argument}: expected a path, found {kind_of(value)}") from None


def _unknown(word: str, names: Iterable[str]) -> str:
    """Return the error of an unknown argument, with where it belongs if another function takes it."""
    known = sorted(names)
    place = None if nearest(word, known) else nearest(word, _PLACES)
    if place is None:
        return unknown("argument", word, known)
    return f"unknown argument {word!r}: {_PLACES[place].format(name=place)}; known: {', '.join(known)}"


def check_function(function: object, name: str, arguments: Sequence[str]) -> None:
    """Raise an error unless something, which `name` calls, is a function of so many arguments."""
    expected = f"a function of ({', '.join(arguments)})"
    if not callable(function) or isinstance(function, type):
        raise GraphoptError(f"{name}: expected {expected}, found {kind_of(function)}")
    try:
        inspect.signature(function).bind(*arguments)
    except TypeError:
        raise GraphoptError(f"{name}: expected {expected}, found one of {inspect.signature(function)}") from None
    except ValueError:  # a function without a signature
        return


def no_attribute(module: str, name: str, names: Iterable[str]) -> AttributeError:
    """Return the error for a name that a module lacks, with the nearest one that it has."""
    known, told = [] if name[:1] == "_" else sorted(names), ""
    if meant := nearest(name, known):
        told = f", nearest: {meant!r}"
    if 0 < len(known) <= _MOST_LISTED:
        told += f"; known: {', '.join(known)}"
    return AttributeError(f"module {module!r} has no attribute {name!r}{told}")

"""Check a recipe, a plain mapping, before any of its code runs, and build the objects that it describes."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import os
import pkgutil
import re
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

from graphopt.cli.composition.expansion import Fields, flattened
from graphopt.cli.composition.hydra_config import CommandLine, on_the_command_line
from graphopt.cli.run_folder import OWN_FILES
from graphopt.data import READERS
from graphopt.data.files import EXPANSION, check_ending
from graphopt.data.language.tokenizer import BESIDE
from graphopt.data.tables import check_description
from graphopt.errors import GraphoptError, unknown
from graphopt.fields import alternatives, hints, read_value
from graphopt.files import Access, ReadPath, WritePath
from graphopt.generation.sampling import GenerateOptions
from graphopt.graph.limits import Limits
from graphopt.graph.model_folders import place_of
from graphopt.hosts.export import export_hosts
from graphopt.intervals import within
from graphopt.pipeline import Rules
from graphopt.training import callbacks
from graphopt.training.callbacks import MLflow, Tracker
from graphopt.training.checkpoints import Checkpoints
from graphopt.training.fit import fit
from graphopt.training.metrics import Wanted, named
from graphopt.training.options import FitOptions
from graphopt.training.rollouts import Rollouts

MISSING = "???"
TARGET_KEY = "_target_"
_WITHOUT_SHORT_NAME = {"Callback", "Control", "Log", "Monitor", "ProgressBar", "Record", "Run"}
# The classes of callbacks by their short names in recipes, such as early_stopping and stop_on_nan.
CALLBACKS = {
    re.sub(r"(?<=[a-z])(?!Board)(?=[A-Z][a-z])", "_", kind).lower(): f"graphopt.callbacks.{kind}"
    for kind in callbacks.__all__
    if kind not in _WITHOUT_SHORT_NAME
}
NAMED: dict[str, Sequence[str]] = {  # the names that recipes may use, by path; all other paths accept passes
    "callbacks": tuple(CALLBACKS.values()),
    "data": tuple(
        f"graphopt.data.{name}"
        for name in sorted(
            {*READERS.values(), "audio", "diabetes", "digits", "images", "labelled_text", "prompts", "replay"}
        )
    ),
    "executor": ("graphopt.Executor",),
    "launcher": tuple(
        f"graphopt.distributed.{name}"
        for name in ("launchers.LocalLauncher", "launchers.MPILauncher", "ray.RayLauncher")
    ),
    "models": tuple(f"graphopt.models.{name}" for name in ("cnn", "linear", "mlp", "transformer")),
    "pipeline": ("graphopt.Pipeline",),
}

OF_COMMAND = ("log_steps", "checkpoint", "export")  # fields of `fit` that are no arguments of the function


@dataclasses.dataclass(frozen=True)
class RecipeFields:
    """Declare the fields of a recipe that no class or function takes, with their types in words.

    Args:
        run: what to do with the model: see above
        model: an ONNX file, or a built-in model: linear, mlp, cnn, transformer
        folder: the folder for the run's files
        resume: true: continue the newest run of the same recipe; or the path of a run or of a checkpoint; also for
            run=evaluate and run=predict
        recipe: the folder of a run whose recipe to take, for a new run
        predictions: the file that run=predict writes in the folder: .npz, .csv or .parquet
        prompt: the text that run=generate continues; -: from the input; null: the model starts a text
        rows: of a run's own data, for run=evaluate, run=calibrate, run=explain and run=predict: all, held_out or
            trained; null: held_out to evaluate or calibrate a run that held rows out, otherwise all
        form: what run=export writes: merged, slots, peft, gguf, or small, without the channels that are 0
        base_name: of run=export form=peft: the name of the base, such as Qwen/Qwen3-0.6B; null: that in config.json
        time: of run=report: also compile kernels, and time a step with them and without
        sensitivity: of run=report quantize=int8: also measure, on training rows, how much each product changes the
            outputs when it alone is rounded
        quiet: print nothing while training, except warnings and errors
        trust: packages, in addition to graphopt and passes, whose code recipes may name
        reward: the function that rewards completions of data=prompts for loss=grpo, or several, whose rewards are
            added: my_package:function, or [my_package:first, my_package:second]
        rules: gradient rules for this run, by operator: {Round: my_package.rules.through, my.domain.Cube: ...}
    """

    run: Annotated[str, "a name"]
    model: Annotated[ReadPath, "a name"]
    folder: Annotated[str | float, "a path"]
    resume: Annotated[bool | ReadPath, "true, false or a path"]
    recipe: Annotated[ReadPath | None, "the folder of a run, or null"]
    predictions: Annotated[WritePath, "a name"]
    prompt: Annotated[str | None, "a text in quotes, or null"]
    rows: Annotated[Literal["all", "held_out", "trained"] | None, "all, held_out, trained or null"]
    form: Annotated[Literal["merged", "slots", "peft", "gguf", "small"], "merged, slots, peft, gguf or small"]
    base_name: Annotated[str | None, "a name, or null"]
    time: bool
    sensitivity: bool
    quiet: bool
    trust: Annotated[Sequence[str], "a list of packages, as in trust=[my_package]"]
    reward: Annotated[
        str | Sequence[str] | None, "names of functions, as my_package:function or a list of such, or null"
    ]
    rules: Annotated[Mapping[str, str] | None, "a mapping from operators to functions, or null"]


@dataclasses.dataclass(frozen=True)
class FitFields:
    """Declare the fields of `fit` in a recipe that are others than those of the function.

    Args:
        validation: the share of rows to hold out, a file like data.path, or null
        log_steps: write a line per step to metrics.jsonl, in addition to the line per epoch.
        export: best: trained.onnx gets the weights of the epoch whose held-out measure, fit.checkpoint.best, is best;
            last: those of the last epoch. callbacks.early_stopping decides by its own measure.
        seed: the seed of the initial weights, the order of the rows and Dropout
    """

    export: Literal["best", "last"]
    validation: Annotated[float | ReadPath | None, "a share of the rows or a file"] = None
    log_steps: bool = False
    seed: int = within("[0, inf)", 0)


OWN = {"": RecipeFields, "fit": FitFields}
PARTS = ("data", "executor", "fit", "generate", "hosts", "limits", "models", "pipeline", "rollouts")
PLAIN: dict[str, object] = {  # what takes the fields of the parts that name no class or function
    "fit": fit,
    "fit.checkpoint": Checkpoints,
    "generate": GenerateOptions,
    "hosts": export_hosts,
    "limits": Limits,
    "rollouts": Rollouts,
}
_ADDED: dict[str, Sequence[str]] = {  # arguments that the command adds
    "executor": ("step",),
    "fit": (
        "executor",
        "data",
        "callbacks",
        "checkpoint",
        "resume",
        "steps_per_epoch",
        "transform",
        "verbose",
    ),
    "fit.checkpoint": ("folder",),
    "hosts": ("step", "folder"),
    "rollouts": ("executor", "prompts", "reward", "model", "tokenizer", "batch_size", "shuffle", "seed"),
}
_PREDICTIONS = "predictions"  # the name, without its ending, of the file that run=predict writes
# These may name libraries to load and files to write.
_HOST = ("executor.provider_options", "executor.session_options", "executor.custom_ops")
# Of numbers that take memory, however small the data is.
_LARGEST_NUMBERS = {"executor.steps_per_call": 10_000, "fit.prefetch": 1_000}
_LIMITS = {  # these protect the memory from a small file that describes a large model
    "data.expansion": EXPANSION,
    **{f"limits.{name}": value for name, value in dataclasses.asdict(Limits()).items()},
}
COMMAND_LINE_ONLY = {*_HOST, *_LIMITS, "trust", "callbacks.tracker", "callbacks.mlflow"}


def check_recipe(fields: Fields, command_line: CommandLine) -> None:
    """Check the names, fields and types of a recipe, and the restrictions of untrusted recipes."""
    leaves = dict(flattened(fields))
    for field, value in leaves.items():
        if isinstance(value, str) and "\0" in value:
            raise GraphoptError(f"{field}: expected text without the character NUL, found {value!r}")
    for key in PARTS:
        check_mapping(fields.get(key), key)
    if fields["data"].get("columns") is not None:
        _check_columns(fields["data"]["columns"])
    models, added = {}, dict(_ADDED)
    for name, node in fields["models"].items():
        check_mapping(node, f"models.{name}")
        outputs = node.get("outputs")  # null: the number that the data needs
        if outputs is not None and (type(outputs) is not int or outputs < 1):
            raise GraphoptError(f"models.{name}.outputs: expected a number of outputs or null, found {outputs!r}")
        models[name] = {field: value for field, value in node.items() if field != "outputs"}
        added[f"models.{name}"] = ("features", "outputs")
    training = {name: value for name, value in fields["fit"].items() if name not in OF_COMMAND}
    checkpoint = fields["fit"].get("checkpoint")
    checkpoint = {} if checkpoint is None else checkpoint
    check_mapping(checkpoint, "fit.checkpoint", " or null")
    parts = {**fields, "fit": {**training, "validation": None}, "fit.checkpoint": checkpoint}
    every = checkpoint.get("every")
    if isinstance(every, int | float):
        raise GraphoptError(
            f"fit.checkpoint.every: expected '100 steps', '1 epoch', '5 min' or null, found {every}: it needs a unit"
        )
    limit = (fields["callbacks"].get("time_limit") or {}).get("limit")
    if isinstance(limit, int | float) and not isinstance(limit, bool):
        raise GraphoptError(f"callbacks.time_limit: expected a time, such as '30 min', found {limit}: it needs a unit")
    for key, target in PLAIN.items():
        check_fields(target, parts[key], key, _ADDED.get(key, ()))
    for key in sorted(fields, key="pipeline".__eq__):  # the pipeline repeats the others, so it comes last
        check_node(models if key == "models" else fields[key], str(key), command_line.trust, added)
    _check_own(fields)
    check_ending("predictions", fields["predictions"])
    for field, most in _LARGEST_NUMBERS.items():
        if isinstance(leaves.get(field), int) and leaves[field] > most:
            raise GraphoptError(f"{field}: expected at most {most:,}, found {leaves[field]}")
    FitOptions(**{name: x for name, x in training.items() if name not in ("metrics", "validation")})
    metrics_of(training.get("metrics"), command_line.trust)
    rules_of(fields["rules"], command_line.trust)
    reward_of(fields["reward"], command_line.trust)
    _check_logs(fields["callbacks"], command_line)
    if command_line.strangers:
        _check_untrusted(leaves, command_line)
        _check_paths(fields, command_line)


def _check_columns(description: object) -> None:
    try:
        check_description(description)
    except GraphoptError as error:
        raise GraphoptError(f"data.columns: {str(error).removeprefix('columns: ')}") from error


def _check_own(fields: Fields) -> None:
    """Raise an error if a field that no class or function takes does not match its annotation."""
    for group, target in OWN.items():
        node, kinds = fields[group] if group else fields, hints(target)
        for name, kind in kinds.items():
            literals = [part for part in alternatives(kind) if typing.get_origin(part) is Literal]
            choices, value = [x for part in literals for x in typing.get_args(part)], node.get(name)
            if choices and isinstance(value, str) and value not in choices:
                raise GraphoptError(unknown(_place(group, name), value, choices))
        check_fields(target, {name: node[name] for name in kinds if name in node}, group)


def check_mapping(node: object, path: str, other: str = "") -> None:
    """Raise an error unless a part of a recipe is a mapping."""
    if not isinstance(node, Mapping):
        raise GraphoptError(f"{path}: expected a mapping of fields{other}, found {node!r}")


def _check_untrusted(leaves: Mapping[str, object], command_line: CommandLine) -> None:
    """Raise an error if a recipe sets options of the machine or raises limits."""
    for field, value in leaves.items():
        is_guarded = field.startswith(_HOST) or field in _LIMITS
        if is_guarded and value != _LIMITS.get(field) and not command_line.names(field):
            raise on_the_command_line(field)


def _check_paths(fields: Mapping[str, object], command_line: CommandLine) -> None:
    """Raise an error if a recipe names a file of the user, to read or to write."""
    folders = [os.path.realpath(x.removeprefix("file://")) for x in (os.getcwd(), *command_line.strangers)]
    for field, value, access in paths_in(fields, command_line.trust):
        if command_line.names(field) or value == MISSING:
            continue
        if field in ("recipe", "resume"):
            raise GraphoptError(f"{field}: expected a path on the command line alone, found it in a recipe")
        if field == "predictions":
            if os.path.splitext(value)[0] != _PREDICTIONS:
                raise _elsewhere(field, f"{_PREDICTIONS} with .npz, .csv or .parquet", value)
        elif access is Access.WRITE:
            if not field.startswith("callbacks."):  # which `_check_logs` checks
                raise on_the_command_line(field)
        else:
            places = {Path(value).parent, place_of(Path(value))}
            beside = [place / name for place in places for name in BESIDE if os.path.lexists(place / name)]
            for path in map(os.path.realpath, [value, *map(str, beside), *_beneath(value)]):
                if not any(os.path.commonpath((path, folder)) == folder for folder in folders):
                    raise _elsewhere(field, "a file below the working directory or the recipe's folder", value)


def paths_in(fields: Fields, trust: Sequence[str] = ()) -> Iterator[tuple[str, str, Access]]:
    """Yield each path that a recipe names, with its field, by the annotations of the function that takes it."""
    for group, target in OWN.items():
        node = fields[group] if group else fields
        for name, access in accesses(target).items():
            value = node.get(name)
            if isinstance(value, str) and (name != "model" or value not in fields["models"]):
                yield _place(group, name), value, access
    for key, node in fields.items():
        own = {name: x for name, x in node.items() if x != fields.get(name)} if key == "pipeline" else node
        yield from _paths_of(own, str(key), trust)


def _paths_of(node: object, path: str, trust: Sequence[str]) -> Iterator[tuple[str, str, Access]]:
    if isinstance(node, list):
        for i, value in enumerate(node):
            yield from _paths_of(value, f"{path}[{i}]", trust)
    elif isinstance(node, Mapping):
        target = resolve(node[TARGET_KEY], path, trust) if TARGET_KEY in node else PLAIN.get(path)
        known = {} if target is None else accesses(target)
        for name, value in node.items():
            field = f"{path}.{name}"
            for text in value if isinstance(value, list) else [value]:
                if name in known and isinstance(text, str):
                    yield field, text, known[name]
            yield from _paths_of(value, field, trust)


def accesses(target: object) -> dict[str, Access]:
    """Return the arguments of a class or a function that are paths, and the access to the files there."""
    known = hints(target, include_extras=True)
    return {name: access for name, hint in known.items() if (access := access_of(hint)) is not None}


def access_of(hint: Any) -> Access | None:
    """Return the access to the file that an argument of a type names; None if it names none.

    A path without an annotation, as in packages that the user trusts, counts as one to read.
    """
    if typing.get_origin(hint) is Annotated:
        marks = [mark for mark in hint.__metadata__ if isinstance(mark, Access)]
        return marks[0] if marks else access_of(hint.__origin__)
    kind = typing.get_origin(hint) or hint
    if inspect.isclass(kind) and issubclass(kind, os.PathLike):
        return Access.READ
    return next((found for part in typing.get_args(hint) if (found := access_of(part))), None)


def _elsewhere(field: str, expected: str, path: str, place: Path | None = None) -> GraphoptError:
    """Return the error of a file that only the command line may name; `place` is where the path leads."""
    log = field.removesuffix(".path") if field.startswith("callbacks.") else ""
    setting = f"{log}={{path: {path}}}" if log else f"{field}={path}"
    return GraphoptError(
        f"{field}: expected {expected}, found {str(place or path)!r} in a recipe: to allow it, say {setting} on the "
        "command line"
    )


def _beneath(folder: str) -> Iterator[str]:
    """Yield the paths in a folder and below it, and below links to folders in it."""
    tops = [folder, *(entry.path for entry in os.scandir(folder))] if os.path.isdir(folder) else []
    for top in tops:
        for at, folders, files in os.walk(top):
            yield from (os.path.join(at, name) for name in (*folders, *files))


def _check_logs(callbacks: Fields, command_line: CommandLine) -> None:
    """Raise an error if a log replaces a file of the run, or a recipe logs to other places than the run's folder."""
    for name, node in callbacks.items():
        key = f"callbacks.{name}"
        kind = resolve(node[TARGET_KEY], key, command_line.trust)
        if inspect.isclass(kind) and issubclass(kind, Tracker | MLflow):
            for field, value in flattened(node, key) if command_line.strangers else ():
                is_class = field == f"{key}.{TARGET_KEY}"
                is_short = is_class and value == CALLBACKS.get(name)
                if not command_line.names(key if is_short else field):
                    raise on_the_command_line(key if is_class else field)
        for field, path in _written_files(node, key, command_line.trust):
            place = os.path.normpath(path)
            top = place.split(os.sep)[0]
            if top.casefold() in OWN_FILES:
                raise GraphoptError(f"{field}: expected a name that the run's own files do not have, found {path!r}")
            outside = os.path.isabs(place) or top == os.pardir
            if outside and command_line.strangers and not command_line.names(field):
                raise _elsewhere(field, "a file below the run's folder", path)


def _written_files(node: Mapping[str, object], key: str, trust: Sequence[str]) -> Iterator[tuple[str, str]]:
    """Yield the fields of a callback that name files to write, and these."""
    for field, path, access in _paths_of(node, key, trust):
        if access is Access.WRITE and path != MISSING:
            yield field, path


def check_new_logs(callbacks: Fields, folder: Path, command_line: CommandLine, is_new: bool) -> None:
    """Raise an error if a recipe's log is outside the run's folder by a link, or replaces a file there."""
    for name, node in callbacks.items():
        for field, path in _written_files(node, f"callbacks.{name}", command_line.trust):
            place, is_named = Path(folder, path), command_line.names(field)
            is_inside = place.resolve().is_relative_to(folder.resolve())
            if not is_named and (not is_inside or (is_new and place.is_file())):
                raise _elsewhere(field, "a new file in the run's folder", path, place)


def check_node(node: object, path: str, trust: Sequence[str], added: Mapping[str, Sequence[str]]) -> None:
    """Raise an error if a part of a recipe names code that is neither listed nor trusted, or has invalid fields.

    `trust` names packages and modules whose code recipes may also name; `added` has the fields that the caller adds to
    a target, by its path.
    """
    if isinstance(node, list):
        for i, value in enumerate(node):
            check_node(value, f"{path}[{i}]", trust, added)
    elif isinstance(node, Mapping):
        for key, value in node.items():
            check_node(value, f"{path}.{key}", trust, added)
        if TARGET_KEY in node:
            target = resolve(node[TARGET_KEY], path, trust)
            fields = {name: value for name, value in node.items() if name != TARGET_KEY}
            check_fields(target, fields, path, added.get(path, ()), trust)


def expanded(callbacks: object) -> dict[str, object]:
    """Return the callbacks of a recipe by name, each a mapping with `_target_`; null and false leave one out.

    A value that is not a mapping is that of the first field, and true sets no field.
    """
    if not isinstance(callbacks, Mapping | None):
        raise GraphoptError(f"callbacks: expected a mapping of callbacks, found {callbacks!r}")
    result: dict[str, object] = {}
    for name, value in (callbacks or {}).items():
        if value is None or value is False:
            continue
        fields = value if isinstance(value, Mapping) else {}
        if name not in CALLBACKS and TARGET_KEY not in fields:
            raise GraphoptError(
                f"callbacks: {unknown('callback', str(name), CALLBACKS)}; a class of your own needs {TARGET_KEY}"
            )
        if not isinstance(value, Mapping | bool):
            kind = pkgutil.resolve_name(CALLBACKS[name])
            first, *others = inspect.signature(kind).parameters
            meant = next((other for other in others if _fits(value, hints(kind).get(other), ())), None)
            if meant is not None and not _fits(value, hints(kind).get(first, Any), ()):
                raise GraphoptError(
                    f"callbacks.{name}: expected true, a value of {first} or fields, found {value!r}: write "
                    f"callbacks.{name}={{{meant}: {value}}}"
                )
            fields = {first: value}
        result[name] = {TARGET_KEY: CALLBACKS.get(name), **fields}
    return result


def create(node: object, path: str, trust: Sequence[str] = (), /, **arguments: object) -> Any:
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
    for name, hint in hints(target).items():
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


def rules_of(named: Mapping[str, str] | None, trust: Sequence[str] = ()) -> Rules:
    """Return the gradient rules of a recipe, which are functions of trusted packages."""
    rules = {}
    for name, function in (named or {}).items():
        domain, _, op_type = name.rpartition(".")
        rules[domain, op_type] = _trusted(function, f"rules.{name}", trust)
    return rules


def reward_of(named: str | Sequence[str] | None, trust: Sequence[str] = ()) -> list[Callable[..., Any]] | None:
    """Return the functions of trusted packages that reward completions, if a recipe names some."""
    names = [named] if isinstance(named, str) else named
    for name in names or ():
        if not {":", "."} & {*name}:
            raise GraphoptError(f"reward: expected module:function, found {name!r}")
    return None if names is None else [_trusted(name, "reward", trust) for name in names]


def check_fields(
    target: Any, fields: Mapping[str, object], path: str, given: Sequence[str] = (), trust: Sequence[str] = ()
) -> None:
    """Raise an error if a class or function does not accept a field, or a value does not match its annotation."""
    parameters = {
        name: parameter
        for name, parameter in inspect.signature(target).parameters.items()
        if name not in given and parameter.kind is not parameter.VAR_POSITIONAL
    }
    is_open = any(parameter.kind is parameter.VAR_KEYWORD for parameter in parameters.values())
    kinds = hints(target, include_extras=True)
    for name, value in fields.items():
        place = _place(path, name)
        if not isinstance(name, str) or (name.startswith("_") and name.endswith("_")):
            raise GraphoptError(f"{place}: expected no such field in a recipe: remove it")
        if is_open:
            continue
        if name not in parameters:
            raise GraphoptError(f"{path}: {unknown('field', name, parameters)}")
        hint = kinds.get(name, Any)
        if isinstance(value, str) and value != MISSING and _is_code(hint):
            _trusted(value, place, trust)
        elif value != MISSING and not _fits(value, hint, trust):
            expected = _words(hint) or _annotation_text(parameters[name])
            raise GraphoptError(f"{place}: expected {expected}, found {value!r}")
    for name, parameter in parameters.items():
        if not is_open and parameter.default is parameter.empty and name not in fields:
            place = _place(path, name)
            raise GraphoptError(f"{place}: expected a value, found none: add +{place}=...")


def _place(path: str, name: object) -> str:
    return f"{path}.{name}" if path else str(name)


def resolve(name: object, path: str, trust: Sequence[str] = ()) -> Any:
    """Return the object that `_target_` names in a recipe: one of the listed names, or code of a trusted package."""
    if isinstance(name, str):
        if name in offered(path):
            return pkgutil.resolve_name(name)
        if _within(name.replace(":", "."), trust):
            return _trusted(name, f"{path}.{TARGET_KEY}", trust)
    package = str(name).partition(".")[0].partition(":")[0]
    if package in ("graphopt", "passes"):
        raise GraphoptError(f"{path}.{TARGET_KEY}: {unknown('name', str(name), offered(path))}")
    raise _untrusted(name, f"{path}.{TARGET_KEY}")


def added_arguments(path: str) -> Sequence[str]:
    """Return the arguments that the command adds to those of a part of the recipe."""
    return _ADDED.get(path, ())


def offered(path: str) -> Sequence[str]:
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
        raise GraphoptError(f"{path}: cannot find {name!r}: {error}{_advice(dotted, error)}") from error
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


def _advice(dotted: str, error: Exception) -> str:
    """Return how to import a module of the working directory, which the installed command does not search."""
    module = dotted.partition(".")[0]
    is_here = any(Path(file).is_file() for file in (f"{module}.py", f"{module}/__init__.py"))
    is_missing = isinstance(error, ModuleNotFoundError) and error.name == module
    return f": {module} is in this folder, which python -m graphopt searches" if is_here and is_missing else ""


def _untrusted(name: object, path: str, of: str = "", home: str = "") -> GraphoptError:
    package = (home or str(name)).partition(".")[0].partition(":")[0]
    return GraphoptError(
        f"{path}: expected graphopt's own or trusted code, found {name!r}{of}; "
        f"trust=[{package}] on the command line trusts all code of {package}"
    )


def _within(name: str, packages: Sequence[str]) -> bool:
    return any(name == package or name.startswith(f"{package.rstrip('.')}.") for package in packages)


def _annotation_text(parameter: inspect.Parameter) -> str:
    """Return the type of a parameter in words: its types, or the values of a Literal."""
    text = str(parameter.annotation).removeprefix("<class '").removesuffix("'>")
    values = re.sub(r"(?:typing\.)?Literal\[(.*?)\]", lambda match: match[1].replace(", ", " or "), text)
    return values.replace(" | ", " or ")


def _words(hint: object) -> str | None:
    """Return a type hint in words of YAML, its own if it has some; None if it is no type of plain values."""
    if typing.get_origin(hint) is Annotated:
        own = [mark for mark in typing.get_args(hint)[1:] if isinstance(mark, str)]
        is_path = any(isinstance(mark, Access) for mark in typing.get_args(hint))
        return own[0] if own else "a path" if is_path else _words(typing.get_args(hint)[0])
    if hint in (None, type(None)):
        return "null"
    if hint is bool:
        return "true or false"
    if hint in (int, float, str):
        return str(hint.__name__)
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if origin is Callable:
        return "a function"
    if origin is Literal:
        return " or ".join(map(repr, parts))
    if inspect.isclass(origin) and issubclass(origin, Mapping) and parts[1:] == (Any,):
        return "a mapping"
    if origin in (tuple, Sequence) and inspect.isclass(parts[0]) and dataclasses.is_dataclass(parts[0]):
        return f"a list of {parts[0].__name__}, each {{{TARGET_KEY}: passes.{parts[0].__name__}, ...}}"
    is_list = origin is Sequence or (origin is tuple and parts[1:] == (...,))
    if is_list or len(alternatives(hint)) > 1:
        words = [_words(part) for part in (parts[:1] if is_list else parts)]
        if None not in words:
            return f"a list of {words[0]}" if is_list else " or ".join(map(str, words))
    return None


def _is_code(hint: object) -> bool:
    """Return whether a type hint asks for a function, which a string may name."""
    parts = alternatives(hint)
    return any(typing.get_origin(part) is Callable for part in parts) and str in parts


def _fits(value: object, hint: object, trust: Sequence[str]) -> bool:
    """Return whether a recipe's value, or the object that it describes, has a type."""
    if isinstance(value, Mapping) and TARGET_KEY in value:  # a function is assumed to return such an object
        made, kinds = (
            resolve(value[TARGET_KEY], "", trust),
            [typing.get_origin(x) or x for x in alternatives(hint)],
        )
        is_one = any(kind is Any or (inspect.isclass(kind) and issubclass(made, kind)) for kind in kinds)
        return not inspect.isclass(made) or is_one

    def other(value: object, hint: Any) -> None:
        """Raise an error unless a value that no plain type describes may be one."""
        kind = typing.get_origin(hint) or hint
        if isinstance(value, Mapping) and TARGET_KEY in value:
            is_right = _fits(value, hint, trust)
        elif kind is hint:
            is_right = not (value is None or isinstance(value, Mapping) or dataclasses.is_dataclass(kind))
        else:
            is_right = isinstance(value, (kind, str) if kind is os.PathLike else kind)
        if not is_right:
            raise TypeError

    try:
        read_value(value, hint, other)
    except TypeError:
        return False
    except ValueError:  # of what is refused elsewhere: a list's length by its class, a name by `check`
        return True
    return True

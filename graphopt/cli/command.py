"""Parse the arguments of the `graphopt` command and run a recipe."""

from __future__ import annotations

import argparse
import contextlib
import io
import itertools
import json
import os
import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir
from hydra.core.hydra_config import HydraConfig
from hydra.errors import HydraException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError  # type: ignore[import-untyped]

from graphopt.cli.calibrated import write_calibrated
from graphopt.cli.check import write_check
from graphopt.cli.comparison import say_compared
from graphopt.cli.composition.expansion import plain_of
from graphopt.cli.composition.hydra_config import (
    COMPOSITION_ERRORS,
    PRIMARY,
    CommandLine,
    composing,
    known_fields,
)
from graphopt.cli.composition.recipe import Recipe, nearest_file
from graphopt.cli.composition.record import HYDRA, write_record
from graphopt.cli.doctor import DOCTOR, examine
from graphopt.cli.explanation import shows_rows, write_explanations
from graphopt.cli.generation import write_text
from graphopt.cli.help import help_page, help_page_of_tune
from graphopt.cli.messages import complain, line_of, say, tell_record, warn
from graphopt.cli.processes import check_processes, installed_first
from graphopt.cli.run_folder import STEP, check_no_run, leave
from graphopt.cli.schema import recipe_schema
from graphopt.cli.serving import SERVE, serve
from graphopt.cli.train import parameter_count, train
from graphopt.cli.trained import Trained, write_metrics, write_predictions
from graphopt.cli.tuning.notes import PIXELS
from graphopt.cli.words import TUNE, check_words, field_of, reader_of, with_folders
from graphopt.data.loader import TrainingRows
from graphopt.errors import GraphoptError, cause, escaped, nearest, unknown
from graphopt.files import write
from graphopt.graph.listing import size
from graphopt.graph.model_folders import DECODER, Architecture
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import save
from graphopt.graph.values import is_floating
from graphopt.hosts.export import CONTRACT, STATE_FILE, export_hosts
from graphopt.inspection.report import report, saved_by_kernels
from graphopt.inspection.sensitivity import sensitivity
from graphopt.inspection.words import counted
from graphopt.on_device.artifacts import FILES, export_artifacts
from graphopt.pipeline import Pipeline, Step
from graphopt.runtime.saved_folder import OF_TOKENIZER, save_folder
from graphopt.targets.native.precision import chosen_precision, precision_in_words
from graphopt.training.callbacks.terminal import open_console, print_line
from graphopt.training.fit import opened
from graphopt.training.signals import ending

INTERRUPTED = 130
_MOST_ROWS = 10  # of a table of `report` in a terminal
USER_ERRORS = (GraphoptError, HydraException, OmegaConfBaseException, YAMLError, OSError, MemoryError)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code.

    0; 1 after an error; 3 after a loss or a state that is not finite; 130 after Ctrl-C, 143 after SIGTERM, 129 after
    SIGHUP, 138 after SIGUSR1.

    Args:
        arguments: the command line after `graphopt`; sys.argv by default.
    """
    try:
        with warnings.catch_warnings():
            warnings.showwarning = warn
            with installed_first(), ending():
                _run(*_parser().parse_known_intermixed_args(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit:
        return int(exit.code or 0)
    except BrokenPipeError:  # a program that read the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        complain(error)
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    """Report wrong arguments as a GraphoptError."""

    def error(self, message: str) -> NoReturn:
        raise GraphoptError(f"{message}: see graphopt --help")

    def unrecognized(self, arguments: Sequence[str]) -> GraphoptError:
        option = arguments[0].partition("=")[0]
        near = nearest(option, [name for action in self._actions for name in action.option_strings])
        field = near or nearest(option, known_fields())
        meant = (field if field == near else f"{field}=value") if field else "fit.epochs=5"
        return GraphoptError(
            f"unrecognized arguments: {' '.join(arguments)}: write fields as key=value, such as {meant}, and see "
            "graphopt --help for options"
        )


def _parser() -> _Parser:
    parser = _Parser(prog="graphopt", add_help=False, allow_abbrev=False)
    option, flag = parser.add_argument, partial(parser.add_argument, action="store_true")
    option("arguments", nargs="*", help="FILE.onnx, what to do with it, key=value")
    flag("--help", "-h", help="show this, with the fields of the recipe")
    flag("--version", help="show the versions of graphopt and the runtime")
    flag("--multirun", "-m", help="run every combination of a=1,2 b=3,4")
    option("--config-dir", "-cd", metavar="FOLDER", help="add a folder of recipes")
    option("--cfg", "-c", choices=["job", "hydra", "all"], help="show the recipe without running it")
    flag("--resolve", help="with --cfg: show values instead of references")
    option("--package", "-p", metavar="FIELD", help="with --cfg: show only this part")
    option("--schema", metavar="FILE", help="write a JSON Schema of recipes for editors")
    option("--info", "-i", nargs="?", const="all", help="show how Hydra composes the recipe")
    flag("--deeper", help="with tune: then train the last layers, too, at a smaller rate")
    option(
        "--pixels",
        choices=PIXELS,
        help="with tune: what the model takes: 0 to 1, -1 to 1, standardized, 0 to 255",
    )
    flag("--hydra-help", help="show the help of Hydra")
    flag("--shell-completion", "-sc", help="install=SHELL, uninstall=SHELL")
    return parser


def _run(arguments: argparse.Namespace, unrecognized: Sequence[str]) -> None:
    alone = next((verb for verb in (DOCTOR, SERVE) if verb in arguments.arguments), None)
    if others := [*(word for word in arguments.arguments if word != alone), *unrecognized] if alone else []:
        raise GraphoptError(f"{alone}: expected no other words, found {' '.join(others)}: leave them out")
    if unrecognized:
        raise _parser().unrecognized(unrecognized)
    if arguments.version:
        print(_version())
        return
    if arguments.schema is not None:
        write(Path(arguments.schema), json.dumps(recipe_schema(_RUNS), indent=1))
        print(f"written   {arguments.schema}: a recipe names it in a line, # yaml-language-server: $schema=PATH")
        return
    words, verbs = with_folders(arguments.arguments), (*_RUNS, TUNE, SERVE, DOCTOR)
    check_words(words, verbs)
    if arguments.multirun and (one := [word for word in ("compare", DOCTOR, TUNE, SERVE) if word in words]):
        raise GraphoptError(f"-m: expected a verb that runs several times, found {one[0]}: leave -m out")
    if alone:
        {DOCTOR: examine, SERVE: serve}[alone](open_console())
        return
    if TUNE in words and arguments.help:
        print(help_page_of_tune())
        return
    if TUNE in words:
        from graphopt.cli.tuning.command import tune

        tune(words, main, pixels=arguments.pixels, deeper=arguments.deeper)
        return
    if arguments.pixels or arguments.deeper:
        raise GraphoptError(
            f"{'--pixels' if arguments.pixels else '--deeper'}: expected graphopt {TUNE} FILE.onnx FOLDER beside it, "
            "found another command"
        )
    if not arguments.cfg and (beside := "--resolve" * arguments.resolve or "--package" * bool(arguments.package)):
        raise GraphoptError(f"{beside}: expected --cfg job beside it, whose output it changes, found none")
    overrides = words if arguments.shell_completion else [field_of(word, verbs) for word in words]
    command_line = CommandLine.of(overrides, arguments.config_dir)
    shows = arguments.help or arguments.hydra_help or arguments.cfg or arguments.info
    with composing(command_line) as hydra, _escaping() if shows else contextlib.nullcontext():
        if arguments.help:
            config = hydra.config_loader.load_configuration(PRIMARY, overrides, RunMode.RUN)
            groups = hydra.format_config_groups(lambda group: not group.startswith("hydra"))
            recipe = plain_of(config)
            del recipe["hydra"]
            options = argparse.HelpFormatter("", max_help_position=40)
            options.add_arguments([action for action in _parser()._actions if action.option_strings])
            print(help_page(options.format_help(), groups, recipe))
        elif arguments.hydra_help:
            hydra.hydra_help(None, _parser(), argparse.Namespace(overrides=overrides))
        elif arguments.cfg:
            if arguments.package:
                config = hydra.config_loader.load_configuration(PRIMARY, overrides, RunMode.RUN)
                if OmegaConf.select(config, arguments.package.partition("=")[0]) is None:
                    raise GraphoptError(f"--package: {unknown('field', arguments.package, config, known_fields())}")
            hydra.show_cfg(PRIMARY, overrides, arguments.cfg, arguments.package, arguments.resolve)
        elif arguments.info:
            hydra.show_info(arguments.info, PRIMARY, overrides)
        elif arguments.shell_completion:
            if len(overrides) != 1 or overrides[0].partition("=")[0] not in ("install", "uninstall", "query"):
                raise GraphoptError(f"--shell-completion: expected install=SHELL or uninstall=SHELL, found {overrides}")
            try:
                hydra.shell_completion(PRIMARY, overrides)
            except ValueError as error:
                raise GraphoptError(f"--shell-completion: expected bash, fish or zsh, found {overrides[0]}") from error
        else:
            mode = RunMode.MULTIRUN if arguments.multirun or command_line.is_sweep else RunMode.RUN
            _start(hydra, command_line, overrides, mode)


@contextlib.contextmanager
def _escaping() -> Iterator[None]:
    """Print what a `with` block prints without control characters: a recipe may have any."""
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        yield
    sys.stdout.write(escaped(printed.getvalue(), keep="\n\t"))


def _start(hydra: Any, command_line: CommandLine, overrides: list[str], mode: RunMode) -> None:
    """Run a recipe, or the recipes of a sweep, by Hydra."""
    started = False

    def job(config: DictConfig) -> float | None:
        nonlocal started
        started = True
        return _job(command_line, config)

    swept = ""
    command_line.check_sweep(is_multirun=mode == RunMode.MULTIRUN)
    try:
        if mode == RunMode.MULTIRUN:
            own = hydra.config_loader.load_configuration(PRIMARY, overrides, mode).hydra
            check_processes(own)
            swept = own.sweep.dir
            hydra.config_loader.before = None  # the folder's name may be the time
            hydra.config_loader.check = partial(_check_job, command_line)
        start = hydra.multirun if mode == RunMode.MULTIRUN else hydra.run
        start(PRIMARY, job, [*overrides, f"hydra.mode={mode.name}"])
    except OSError as error:
        if started or not error.filename:
            raise
        raise GraphoptError(
            f"{error.filename}: expected a folder to write to: {error.strerror}: choose another with folder=..."
        ) from error
    except COMPOSITION_ERRORS as error:
        if swept and isinstance(error, GraphoptError):  # of a job: others may be complete
            with contextlib.suppress(GraphoptError):
                say_compared(swept)
        if started or isinstance(error, GraphoptError):
            raise
        raise GraphoptError(f"hydra: expected a config that Hydra can run: {cause(error)}") from error
    finally:
        if hydra.config_loader.before is not None:
            hydra.config_loader.before.clear()


def _check_job(command_line: CommandLine, composed: DictConfig) -> None:
    """Raise an error if a job of a sweep cannot start: a sweep ends before its first job then."""
    config = composed.copy()
    with open_dict(config):
        del config["hydra"]
    Recipe(config, composed.hydra.runtime.choices, command_line, reads=False).check_model()


def _job(command_line: CommandLine, config: DictConfig) -> float | None:
    """Run a recipe; return the validation loss, or the training loss if no rows are held out."""
    composed = config.copy()
    try:
        hydra = HydraConfig.get()
        here, there = os.getcwd(), hydra.runtime.cwd  # a process of a running cluster can be elsewhere
        if here != there and not os.path.isabs(hydra.sweep.dir):
            raise GraphoptError(
                f"folder: expected an absolute path, because the cluster runs jobs in {here}, found {hydra.sweep.dir!r}"
            )
        os.chdir(there)
        recipe = Recipe(config, hydra.runtime.choices, command_line)
        name = recipe.fields.get("run")
        if name not in _RUNS:
            raise GraphoptError(unknown("run", str(name), _RUNS))
        command_line.check_fields_of_verbs(name)
        with _explaining(recipe):
            return _RUNS[name](recipe, Path(os.path.relpath(hydra.runtime.output_dir)))
    except USER_ERRORS as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra carries it from the job's process to this one
            folder = Path(HydraConfig.get().runtime.output_dir)
            if not (folder / HYDRA).exists():  # the comparison of the sweep names jobs that have failed
                write_record(folder, composed, command_line.record, command_line.strangers, is_checked=False)
            raise GraphoptError(line_of(error)) from None
        raise SystemExit(complain(error)) from error  # Hydra passes it on without a message of its own


@contextlib.contextmanager
def _explaining(recipe: Recipe) -> Iterator[None]:
    """Name the file of data that is wrong, and where a run was started whose files are missing here."""
    try:
        yield
    except GraphoptError as error:
        text = _explained_text(recipe, str(error))
        if text == str(error):
            raise
        raise GraphoptError(text) from error


def _explained_text(recipe: Recipe, text: str) -> str:
    record, fields = recipe.command_line.record, recipe.fields
    path = fields["data"].get("path")
    if record is not None and record.started_in not in ("", os.getcwd()) and "no such file" in text:
        return f"{text}: the run was started in {record.started_in}: start this there, too, or name the file"
    if text.startswith(("data:", "data '")) and not isinstance(fields["fit"].get("validation"), str):
        return f"{path if isinstance(path, str) else 'data=' + recipe.choices['data']}: {text}"
    if not isinstance(path, str):
        return text
    chosen, kind = recipe.choices["data"], reader_of(path)
    if text.startswith(f"{path}: expected") and kind and kind != chosen and os.path.exists(path):
        head = ": ".join(text.split(": ")[:2])
        return f"{head}{'' if 'found' in head else ', found another kind'}: set data={kind}"
    near = nearest_file(path, Path(path).suffix) if text == f"{path}: no such file" else None
    return f"{text}, nearest: {near!r}" if near else text


def _with_trained(write_file: Callable[[Trained, Console], Path], recipe: Recipe, folder: Path) -> None:
    """Write a file about the data by the model that another run has trained."""
    console = open_console(quiet=recipe.fields["quiet"])
    trained = Trained.find(recipe, folder)
    tell_record(console, recipe.command_line)
    say(console, "model", str(trained.checkpoint or trained.model or recipe.fields["model"]))
    say(console, "data", trained.chosen[1])
    say(console, "written", str(write_file(trained, console)))


def _export(write_files: Callable[[Recipe, Path, Console], str], recipe: Recipe, folder: Path) -> None:
    """Train nothing: write files, and the recipe."""
    console = open_console()
    check_no_run(folder, recipe.fields["run"])
    written = write_files(recipe, folder, console)
    recipe.write_record(folder)
    say(console, "written", f"{folder}: {written}")


def _training_graph(recipe: Recipe, folder: Path) -> ir.Model:
    """Return the training graph, with the state of the run or the checkpoint that `resume` names, if it does."""
    return Trained.resumed(recipe, folder).graph() if recipe.fields.get("resume") else recipe.compile()


def _check_no_resume(recipe: Recipe) -> None:
    """Raise an error if `resume` names a run whose state would not be used."""
    run, resume = recipe.fields["run"], recipe.fields.get("resume")
    if resume:
        raise GraphoptError(
            f"{run}: expected no resume, found resume={resume}: it uses no state of a run; model=RUN/trained.onnx "
            "starts from the weights that a run has trained"
        )


def _compile(recipe: Recipe, folder: Path, console: Console) -> str:
    if recipe.fields.get("launcher"):
        _check_no_resume(recipe)
        halves = recipe.halves()
        stages = {f"grad.{i}.onnx": stage for i, stage in enumerate(halves.grad)}
        grad = stages if len(stages) > 1 else {"grad.onnx": halves.grad[0]}
        graphs = {STEP: halves.step, **grad, "apply.onnx": halves.apply}
    else:
        graphs = {STEP: _training_graph(recipe, folder)}
    for name, graph in graphs.items():
        save(graph, folder / name)
    say(console, "model", f"{recipe.fields['model']}, {parameter_count(graphs[STEP])}")
    return ", ".join(f"{name} {size(graph)} nodes" for name, graph in graphs.items())


def _hosts(recipe: Recipe, folder: Path, console: Console) -> str:
    fields = recipe.fields["hosts"]
    export_hosts(_training_graph(recipe, folder), folder, **fields)
    _describe_columns(recipe, folder, console)
    graphs = sorted(folder.glob("*.onnx"))
    say(console, "state", f"{(folder / STATE_FILE).stat().st_size / 1e6:.3g} MB, which a host holds twice")
    say(console, "graphs", ", ".join(f"{x.name} {x.stat().st_size / 1e3:.3g} kB" for x in graphs))
    program = [f"{fields['language']}/"] if fields["language"] else []
    return ", ".join([CONTRACT, STATE_FILE, *(path.name for path in graphs), *program])


def _artifacts(recipe: Recipe, folder: Path, console: Console) -> str:
    _check_no_resume(recipe)
    export_artifacts(recipe.model(), recipe.pipeline, folder)
    _describe_columns(recipe, folder, console)
    return ", ".join(FILES)


def _derive(recipe: Recipe, folder: Path, console: Console) -> str:
    """Write derived.onnx, or explained.onnx and a page about rows that the command names."""
    _check_no_resume(recipe)
    run = recipe.fields["run"]
    model, name = recipe.derived(run), {"derive": "derived.onnx", "explain": "explained.onnx"}[run]
    page = f", {write_explanations(recipe, model, folder)}" if run == "explain" and shows_rows(recipe) else ""
    save(model, folder / name)
    for what, values in (("input", model.graph.inputs), ("output", model.graph.outputs)):
        for value in values:
            say(console, what, f"{value.name} {value.dtype}{value.shape}")
    return f"{name} {size(model)} nodes{page}"


def _describe_columns(recipe: Recipe, folder: Path, console: Console) -> None:
    """Write columns.json, by which a host makes the features of a table itself."""
    if recipe.columns is not None:
        write(folder / "columns.json", recipe.columns.text())
        say(console, "columns", "the graph takes features, which the host makes as columns.json says")


def _report(recipe: Recipe, folder: Path, console: Console) -> str:
    _check_no_resume(recipe)
    fields = recipe.fields["executor"]
    model, pipeline = recipe.model(), recipe.pipeline
    is_said = any(item.lstrip("+~").startswith("loss") for item in recipe.command_line.said)
    is_decoder = (Architecture.read(model) or Architecture()).task == DECODER
    if is_decoder and recipe.choices["loss"] == "cross_entropy" and not is_said:
        import passes

        say(console, "loss", "causal_language_model, as the model's config says that it predicts tokens")
        steps: dict[str, Sequence[Step]] = {**pipeline, "loss": [passes.CausalLanguageModel()]}
        pipeline = Pipeline(**steps).with_rules(pipeline.rules)
    result = report(model, pipeline, recipe.fields["fit"]["batch_size"])
    step, on_cpu = result.step, fields["device"] == "cpu"
    result.kernels = recipe.fields["time"] and on_cpu and fields.get("native") is not False
    if step is not None and result.kernels:
        in_place = fields.get("in_place", False)
        result.step_time = saved_by_kernels(
            result, lambda native: recipe.executor(step, native=native, in_place=native and in_place)
        )
    summary = result.summary()
    if step is not None and not on_cpu:
        summary += _placement(recipe, step)
    precision = chosen_precision(fields.get("matmul_precision"))
    if step is not None and on_cpu and precision != "highest":
        summary += f"products   {precision_in_words(precision)}\n"
    if recipe.fields["sensitivity"]:
        rows = TrainingRows(recipe.data, model, recipe.split(len(recipe.data))[0], opened)
        summary += "".join(f"{line}\n" for line in sensitivity(result, pipeline, rows.run))
    write(folder / "report.txt", f"{summary}\n{result.listings()}")
    for text in _without_long_tables(summary.splitlines()):
        print_line(console, text, indent=11)
    drawn = result.picture(folder / "graph.svg")
    picture = "; graph.svg, before the first pass and after the last" if drawn else ""
    return f"report.txt, with the graph after each pass{picture}"


def _without_long_tables(lines: Sequence[str]) -> Iterator[str]:
    """Yield lines with the first rows of each table; a table's rows start with spaces."""
    for is_row, rows in itertools.groupby(lines, lambda line: line.startswith("  ")):
        shown = [*rows]
        left = len(shown) - _MOST_ROWS if is_row and len(shown) > _MOST_ROWS + 1 else 0
        yield from shown[: len(shown) - left]
        if left:
            yield f"  and {left} more, in report.txt"


def _placement(recipe: Recipe, step: ir.Model) -> str:
    """Return lines that say which nodes of a step the device runs, and which the CPU, and why."""
    device = recipe.fields["executor"]["device"]
    title = f"on {device.partition(':')[0]}".ljust(11)
    try:
        executor = recipe.executor(step, static_shapes=False, graph_capture=False)
        total = sum(sum(counts.values()) for counts in executor.placement().values())
        reasons = Counter(executor.fallbacks().values())
    except GraphoptError as error:
        return f"{title}not known: {error}\n"
    left = reasons.total()
    lines = [f"{title}{counted(total - left, 'node')} on the device, {left} on the CPU"]
    lines += [f"{'':11}{count} {reason}" for reason, count in reasons.most_common()]
    return "\n".join(lines) + "\n"


def _export_run(recipe: Recipe, folder: Path) -> None:
    """Write the model or the adapter that a run has trained as a folder that other programs open."""
    trained, form = Trained.find(recipe, folder), recipe.fields["form"]
    base = Path(recipe.fields["model"])
    if trained.step is None or not base.is_file():
        found = (
            f"model={base}, which is built in: its run has trained.onnx"
            if trained.step
            else "no run: train first; for programs in other languages, write graphopt hosts"
        )
        raise GraphoptError(f"export: expected folder=RUN, the run of a model's file, found {found}")
    console = open_console(quiet=recipe.fields["quiet"])
    tell_record(console, recipe.command_line)
    say(console, "model", str(trained.checkpoint or trained.model))
    executor = trained.executor()
    save_folder(executor, target := trained.folder / form, base=base, form=form, base_name=recipe.fields["base_name"])
    files = sorted(str(path.relative_to(target)) for path in target.rglob("*") if path.is_file())
    reads_tokens = not any(is_floating(x) for x in with_role(executor.model, Role.DATA))
    if form != "gguf" and reads_tokens and not {*files} & {*OF_TOKENIZER}:
        say(console, "tokenizer", f"none beside {base}: put the model's into {target}")
    say(console, "written", f"{target}: {', '.join(files)}")


def _compare_runs(recipe: Recipe, folder: Path) -> None:
    _check_no_resume(recipe)
    if not recipe.names_folder:
        leave(folder, folder.parents[1])
        folder = folder.parents[1]
    say_compared(folder)


_RUNS: dict[str, Callable[[Recipe, Path], float | None]] = {
    "train": partial(train, main=main),
    "evaluate": partial(_with_trained, write_metrics),
    "predict": partial(_with_trained, write_predictions),
    "calibrate": partial(_with_trained, write_calibrated),
    "generate": write_text,
    "compile": partial(_export, _compile),
    "hosts": partial(_export, _hosts),
    "artifacts": partial(_export, _artifacts),
    "derive": partial(_export, _derive),
    "explain": partial(_export, _derive),
    "report": partial(_export, _report),
    "check": write_check,
    "export": _export_run,
    "compare": _compare_runs,
}


def _version() -> str:
    versions = {}
    runtimes = "onnxruntime", "onnxruntime-gpu", "onnxruntime-webgpu", "onnxruntime-ep-webgpu"
    for package in ("graphopt", *runtimes, "onnxruntime-training"):
        with contextlib.suppress(metadata.PackageNotFoundError):
            versions[package] = f"{package} {metadata.version(package)}"
    graphopt = versions.pop("graphopt", "graphopt (not installed)")
    return f"{graphopt}, {', '.join(versions.values()) or 'no ONNX Runtime'}"

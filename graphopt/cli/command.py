"""Parse the arguments of the `graphopt` command and run a recipe."""

from __future__ import annotations

import argparse
import math
import os
import re
import sys
import warnings
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any, NoReturn

import onnx_ir as ir
from hydra.conf import HydraConf
from hydra.core.hydra_config import HydraConfig
from hydra.core.override_parser.types import Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from hydra.types import RunMode
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException
from rich.console import Console
from yaml import YAMLError  # type: ignore[import-untyped]

from graphopt.cli.comparison import Comparison
from graphopt.cli.header import Header, compilations, counted, say
from graphopt.cli.help import BASE, fields, page
from graphopt.cli.hydra_config import COMPOSITION_ERRORS, PRIMARY, RECIPES, CommandLine, composing
from graphopt.cli.processes import check_processes, installed_first
from graphopt.cli.recipe import Recipe
from graphopt.cli.run_folder import (
    RunFolder,
    check_new,
    held,
    leave,
    result,
    resumed,
    write_hydra,
    write_result,
)
from graphopt.cli.trained import Trained, write_metrics, write_predictions
from graphopt.cli.workers import NOT_FINITE, follow, leave_to_first, together
from graphopt.communicator import Communicator
from graphopt.errors import GraphoptError, cause, shortened, unknown
from graphopt.files import write
from graphopt.graph.listing import size
from graphopt.graph.roles import Role, with_role
from graphopt.graph.storage import save
from graphopt.hosts.export import CONTRACT, STATE_FILE, export_hosts
from graphopt.inspection.report import report
from graphopt.inspection.step_times import saved_by_kernels
from graphopt.on_device.artifacts import FILES, export_artifacts
from graphopt.runtime.executor import NonFiniteLoss
from graphopt.training.callbacks.page import Page
from graphopt.training.callbacks.progress import ProgressBar, measures
from graphopt.training.fit import fit
from graphopt.training.signals import deferred, ending

INTERRUPTED = 130
RUNS = ("train", "evaluate", "predict", "compile", "hosts", "artifacts", "report", "compare")
PLUGINS = {  # of recipes/sweep
    "joblib": "hydra-joblib-launcher",
    "optuna": "hydra-optuna-sweeper",
    "ray": "hydra-ray-launcher",
    "submitit_slurm": "hydra-submitit-launcher",
}
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
            warnings.showwarning = _warn
            with installed_first(), ending():
                _run(_parser().parse_intermixed_args(arguments))
    except KeyboardInterrupt:
        return INTERRUPTED
    except SystemExit as exit:
        return int(exit.code or 0)
    except BrokenPipeError:  # a program that read the output, such as `head`, has ended
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except USER_ERRORS as error:
        _complain(error)
        return 1
    return 0


class _Parser(argparse.ArgumentParser):
    """Report wrong arguments as a GraphoptError."""

    def error(self, message: str) -> NoReturn:
        raise GraphoptError(f"{message}: write fields as key=value, and see graphopt --help for options")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="graphopt", add_help=False, allow_abbrev=False)
    parser.add_argument("arguments", nargs="*", help="FILE.onnx, what to do with it, key=value")
    parser.add_argument("--help", "-h", action="store_true", help="show this, with the fields of the recipe")
    parser.add_argument(
        "--version", action="store_true", help="show the versions of graphopt and the runtime"
    )
    parser.add_argument("--multirun", "-m", action="store_true", help="run every combination of a=1,2 b=3,4")
    parser.add_argument("--config-dir", "-cd", metavar="FOLDER", help="add a folder of recipes")
    parser.add_argument(
        "--cfg", "-c", choices=["job", "hydra", "all"], help="show the recipe without running it"
    )
    parser.add_argument(
        "--resolve", action="store_true", help="with --cfg: show values instead of references"
    )
    parser.add_argument("--package", "-p", metavar="FIELD", help="with --cfg: show only this part")
    parser.add_argument("--info", "-i", nargs="?", const="all", help="show how Hydra composes the recipe")
    parser.add_argument("--hydra-help", action="store_true", help="show the help of Hydra")
    parser.add_argument(
        "--shell-completion", "-sc", action="store_true", help="install=SHELL, uninstall=SHELL"
    )
    return parser


def _run(arguments: argparse.Namespace) -> None:
    if arguments.version:
        print(_version())
        return
    overrides = (
        arguments.arguments if arguments.shell_completion else [_field(one) for one in arguments.arguments]
    )
    command_line = CommandLine.of(overrides, arguments.config_dir)
    with composing(command_line) as hydra:
        if arguments.help:
            config = hydra.config_loader.load_configuration(PRIMARY, overrides, RunMode.RUN)
            groups = hydra.format_config_groups(lambda group: not group.startswith("hydra"))
            recipe: Any = OmegaConf.to_container(config, resolve=False)
            choices = recipe.pop("hydra")["runtime"]["choices"]
            print(page(_options(), groups, fields(recipe, RECIPES, choices)))
        elif arguments.hydra_help:
            hydra.hydra_help(None, _parser(), argparse.Namespace(overrides=overrides))
        elif arguments.cfg:
            hydra.show_cfg(PRIMARY, overrides, arguments.cfg, arguments.package, arguments.resolve)
        elif arguments.info:
            hydra.show_info(arguments.info, PRIMARY, overrides)
        elif arguments.shell_completion:
            if len(overrides) != 1 or overrides[0].partition("=")[0] not in ("install", "uninstall", "query"):
                raise GraphoptError(
                    f"--shell-completion: expected install=SHELL or uninstall=SHELL, found {overrides}"
                )
            hydra.shell_completion(PRIMARY, overrides)
        else:
            started = False

            def job(config: DictConfig) -> float | None:
                nonlocal started
                started = True
                return _job(command_line, config)

            mode = RunMode.MULTIRUN if arguments.multirun or command_line.is_sweep else RunMode.RUN
            start = hydra.multirun if mode == RunMode.MULTIRUN else hydra.run
            try:
                if mode == RunMode.MULTIRUN:
                    check_processes(hydra.config_loader.load_configuration(PRIMARY, overrides, mode).hydra)
                start(PRIMARY, job, [*overrides, f"hydra.mode={mode.name}"])
            except COMPOSITION_ERRORS as error:
                if started or isinstance(error, GraphoptError):
                    raise
                raise GraphoptError(f"hydra: expected a config that Hydra can run: {cause(error)}") from error


def _job(command_line: CommandLine, config: DictConfig) -> float | None:
    """Run a recipe; return the validation loss, or the training loss if no rows are held out."""
    try:
        hydra = HydraConfig.get()
        _go_where_the_sweep_is(hydra)
        recipe = Recipe(config, hydra.runtime.choices, command_line)
        runners = (_train, _evaluate, _predict, _compile, _hosts, _artifacts, _report, _compare)
        runs = dict(zip(RUNS, runners, strict=True))
        run = recipe.fields.get("run")
        if run not in RUNS:
            raise GraphoptError(unknown("run", str(run), runs))
        folder = Path(os.path.relpath(hydra.runtime.output_dir))
        if run in ("compile", "hosts", "artifacts", "report"):
            write_hydra(folder, recipe.composed)
        return runs[run](recipe, folder)
    except USER_ERRORS as error:
        if HydraConfig.get().mode == RunMode.MULTIRUN:  # Hydra carries it from the job's process to this one
            raise GraphoptError(_line(error)) from None
        raise SystemExit(_complain(error)) from error  # Hydra passes it on without a message of its own


def _go_where_the_sweep_is(hydra: HydraConf) -> None:
    """Change to the working directory of the command, from which a process of a running cluster can differ.

    Raises:
        GraphoptError: it differs, and the folder is relative to it.
    """
    here, there = os.getcwd(), hydra.runtime.cwd
    if here != there and not os.path.isabs(hydra.sweep.dir):
        raise GraphoptError(
            f"folder: expected an absolute path, because the cluster runs jobs in {here}, found {hydra.sweep.dir!r}"
        )
    if here != there:
        os.chdir(there)


def _train(recipe: Recipe, folder: Path) -> float | None:
    launcher = recipe.launcher
    if recipe.fields.get("launcher") and HydraConfig.get().mode == RunMode.MULTIRUN:
        raise GraphoptError(
            "launcher: expected a single run, found a sweep: leave it out, or run the jobs of the sweep one by one"
        )
    if launcher.starts():
        beside = not recipe.names_folder
        folder, _ = resumed(recipe.fields.get("resume", False), folder, recipe.text(), beside=beside)
        leave_to_first(recipe, folder)
        recipe.training_step()  # raises its errors before any worker starts
        launcher.start(recipe.arguments, folder, main)
    communicator = launcher.communicator()
    with together(communicator, _complain):
        if communicator.leads:
            return _lead(recipe, communicator, folder)
        follow(recipe, communicator, folder)
    return None


def _lead(recipe: Recipe, communicator: Communicator, folder: Path) -> float:
    console = Console(quiet=recipe.fields["quiet"])
    hydra = HydraConfig.get()
    sweep = hydra.mode == RunMode.MULTIRUN
    text = recipe.text()
    title = f"[{hydra.job.num}] {' '.join(hydra.overrides.task)}" if sweep else None
    asked = recipe.fields.get("resume", False) or sweep  # a sweep that is run again continues its runs
    folder, resume = resumed(asked, folder, text, beside=not sweep and not recipe.names_folder)
    with held(folder), compilations(console):
        if sweep and (value := result(folder, text)) is not None:
            say(console, "complete", f"{title}: {folder}")
            return value
        if not resume:
            check_new(folder)
        write_hydra(folder, recipe.composed)
        step, parts = recipe.training_step()
        executor = recipe.worker(parts, communicator)
        trained = folder / "trained.onnx"
        files = RunFolder(folder, step, text, log_steps=bool(recipe.fields["fit"]["log_steps"]))
        model = f"{recipe.fields['model']}, {_parameters(step)}"
        header = Header(console, title, model=model, data=recipe.choices["data"], workers=communicator.size)
        page = Page(
            folder / "report.html",
            f"{recipe.fields['model']} on {recipe.choices['data']}",
            model=recipe.model(),
            recipe=text,
            batch_size=recipe.fields["fit"]["batch_size"],
        )
        checkpoint, callbacks = (
            recipe.checkpoint(folder / "checkpoints"),
            recipe.callbacks(folder, is_new=not resume),
        )
        try:
            records = fit(
                executor,
                recipe.data,
                **recipe.fit,
                callbacks=[*callbacks, files, header, ProgressBar(console, epochs=not sweep), page],
                checkpoint=checkpoint,
                resume=False if resume is True else resume,
            )
        except (KeyboardInterrupt, SystemExit, NonFiniteLoss) as error:
            spoiled = executor.in_place and isinstance(error, NonFiniteLoss)
            if executor.batches and not spoiled:
                with deferred():
                    save(executor.trained(), trained)
                    say(console, "stopped", f"after step {executor.batches}: {trained}")
                    page.write()
            if isinstance(error, NonFiniteLoss) and sweep:
                _complain(error)
                write_result(folder, math.inf)
                return math.inf
            raise
        with deferred():
            save(executor.trained(), trained)
            page.write()
        last = records[-1]
        final = files.run.restored or last
        value = float(final["validation_loss"] if "validation_loss" in final else final["loss"])
        if sweep:
            write_result(folder, value)
    if files.run.stopped is not None:
        say(console, "stopped", files.run.stopped)
    seconds = sum(record["seconds"] for record in records)
    say(console, "trained", f"{counted(last['step'], 'step')} in {seconds:.1f} s, loss {last['loss']:.4g}")
    if files.run.restored is not None:
        say(console, "restored", f"the weights of epoch {final['epoch']}")
    if "validation_loss" in final:
        names = list(final)
        held_out = {name: final[name] for name in names[names.index("validation_loss") :]}
        say(console, "held out", measures(held_out))
    written = "report.html, step.onnx, trained.onnx, metrics.jsonl, config.yaml" + (
        ", checkpoints" if checkpoint else ""
    )
    say(console, "written", f"{folder}: {written}")
    return value


def _evaluate(recipe: Recipe, folder: Path) -> None:
    console = Console(quiet=recipe.fields["quiet"])
    trained = Trained.find(recipe, folder)
    say(console, "model", trained.name)
    say(console, "data", f"{recipe.choices['data']}, {len(recipe.data):,} rows")
    say(console, "written", str(write_metrics(trained, console)))


def _predict(recipe: Recipe, folder: Path) -> None:
    console = Console(quiet=recipe.fields["quiet"])
    trained = Trained.find(recipe, folder)
    say(console, "model", trained.name)
    say(console, "data", f"{recipe.choices['data']}, {len(recipe.data):,} rows")
    say(console, "written", str(write_predictions(trained)))


def _compile(recipe: Recipe, folder: Path) -> None:
    console = Console()
    if recipe.fields.get("launcher"):
        halves = recipe.halves()
        stages = {f"grad.{i}.onnx": stage for i, stage in enumerate(halves.grad)}
        grad = stages if len(stages) > 1 else {"grad.onnx": halves.grad[0]}
        graphs = {"step.onnx": halves.step, **grad, "apply.onnx": halves.apply}
    else:
        graphs = {"step.onnx": recipe.compile()}
    for name, graph in graphs.items():
        save(graph, folder / name)
    write(folder / "config.yaml", recipe.text())
    say(console, "model", f"{recipe.fields['model']}, {_parameters(graphs['step.onnx'])}")
    sizes = ", ".join(f"{name} {size(graph)} nodes" for name, graph in graphs.items())
    say(console, "written", f"{folder}: {sizes}")


def _hosts(recipe: Recipe, folder: Path) -> None:
    export_hosts(recipe.compile(), folder, **recipe.fields["hosts"])
    write(folder / "config.yaml", recipe.text())
    graphs = ", ".join(path.name for path in sorted(folder.glob("*.onnx")))
    say(Console(), "written", f"{folder}: {CONTRACT}, {STATE_FILE}, {graphs}")


def _artifacts(recipe: Recipe, folder: Path) -> None:
    export_artifacts(recipe.model(), recipe.pipeline, folder)
    write(folder / "config.yaml", recipe.text())
    say(Console(), "written", f"{folder}: {', '.join(FILES)}")


def _report(recipe: Recipe, folder: Path) -> None:
    found = report(recipe.model(), recipe.pipeline, recipe.fields["fit"]["batch_size"])
    on_cuda = str(recipe.fields["executor"]["device"]).startswith("cuda")
    step, fields = found.step, recipe.fields["executor"]
    if step is not None and not on_cuda and fields.get("native") is not False:
        found.step_time = saved_by_kernels(
            step,
            lambda native: recipe.executor(
                step, native=native, in_place=native and fields.get("in_place", False)
            ),
            found.batch or 1,
        )
    summary = found.summary()
    if on_cuda:
        summary += found.on_cuda()
    write(folder / "report.txt", f"{summary}\n{found.listings()}")
    write(folder / "config.yaml", recipe.text())
    console = Console()
    console.print(summary, markup=False, highlight=False, soft_wrap=True, end="")
    files = "report.txt, with the graph after each pass"
    if found.picture(folder / "graph.svg"):
        files += "; graph.svg, before the first pass and after the last"
    say(console, "written", f"{folder}/{files}")


def _compare(recipe: Recipe, folder: Path) -> None:
    if not recipe.names_folder:
        leave(folder, folder.parents[1])
        folder = folder.parents[1]
    comparison = Comparison(folder)
    comparison.print()
    say(Console(), "written", str(comparison.write()))


def _parameters(step: ir.Model) -> str:
    trained = with_role(step, Role.PARAMETER)
    numbers = sum(math.prod(value.shape.numpy()) for value in trained if value.shape is not None)
    tensors = counted(len(trained), "tensor")
    return f"{counted(numbers, 'parameter')} in {tensors}, a step of {size(step)} nodes"


def _field(argument: str) -> str:
    """Return an argument as `key=value`: FILE.onnx sets `model`, a verb sets `run`.

    Raises:
        GraphoptError: the argument is none of these.
    """
    if "=" in argument or argument.startswith("~"):
        return argument
    if argument in RUNS:
        return f"run={argument}"
    if argument.endswith(".onnx"):
        return f"model={QuotedString(argument, Quote.single).with_quotes()}"
    ending = Path(argument).suffix[1:]
    kind = "arrow" if ending == "feather" else ending
    is_data = kind in ("arrow", "csv", "npz", "parquet")
    instead = f"data={kind} data.path={argument}" if is_data else f"model={argument}"
    raise GraphoptError(
        f"{argument}: expected {', '.join(RUNS)}, FILE.onnx or FIELD=VALUE, such as {instead}: see "
        "graphopt --help"
    )


def _options() -> str:
    formatter = argparse.HelpFormatter("", max_help_position=40)
    formatter.add_arguments([action for action in _parser()._actions if action.option_strings])
    return formatter.format_help()


def _version() -> str:
    runtimes = [
        name for name in ("onnxruntime", "onnxruntime-gpu", "onnxruntime-training") if _installed(name)
    ]
    found = ", ".join(f"{name} {_installed(name)}" for name in runtimes) or "no ONNX Runtime"
    return f"graphopt {_installed('graphopt') or '(not installed)'}, {found}"


def _installed(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    print(f"graphopt: warning: {shortened(' '.join(str(message).split()))}", file=sys.stderr)


def _complain(error: BaseException) -> int:
    """Print an error in one line, and return the exit code."""
    print(f"graphopt: error: {shortened(_line(error))}", file=sys.stderr)
    return NOT_FINITE if isinstance(error, NonFiniteLoss) else 1


def _line(error: BaseException) -> str:
    """Return an error as one line that lists the alternatives."""
    text = " ".join(str(error).split()).partition("full_key:")[0].strip()
    text = text or " ".join(str(error.__cause__).split())
    if isinstance(error, MemoryError):
        return f"out of memory: {text}: try a smaller fit.batch_size or model"
    if isinstance(error, MissingConfigException):
        group, _, name = (error.missing_cfg_file or "").rpartition("/")
        if name in PLUGINS:
            return f"{group}={name}: expected the package {PLUGINS[name]}, which is not installed: pip install it"
        return (
            unknown(group, name, [one for one in error.options if one != BASE])
            if error.options
            else text.partition(" Config search path")[0]
        )
    override = re.match(r"Could not override '([^']+)'", text)
    if override:
        parent = getattr(error.__cause__, "parent_node", None)
        path, _, name = override[1].rpartition(".")
        if isinstance(parent, DictConfig):
            names = [key for key in parent if not str(key).startswith("_")]
            return f"{path}: {unknown('field', name, names)}" if path else unknown("option", name, names)
    if isinstance(error, OSError) and not isinstance(error, HydraException):
        return f"{error.filename}: {error.strerror}" if error.filename else text
    text = re.sub(r" (See https|full_key:|object_type=|To append).*", "", text)
    field = getattr(error, "full_key", None) or getattr(error.__cause__, "full_key", None)
    return f"{field}: {text}" if field and str(field) not in text else text

"""Look for what is broken in an environment, for `graphopt doctor`."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib import metadata
from importlib.machinery import PathFinder
from pathlib import Path

import numpy as np
from packaging.requirements import Requirement
from rich.console import Console

from graphopt.cli.messages import line_of, say
from graphopt.compiler import compile
from graphopt.errors import GraphoptError, some
from graphopt.inspection.words import counted
from graphopt.models import mlp
from graphopt.namesakes import NAME, check_namesake
from graphopt.runtime.executor import Executor
from graphopt.targets.native import toolchain
from graphopt.targets.native.cache import cache_folder
from graphopt.targets.native.precision import UNITS, obstacle
from graphopt.targets.native.rates import kept_rates, rates_file

DOCTOR = "doctor"
_OWN = "graphopt"
_RUNTIME = "onnxruntime"  # the import name of all its packages
EXTRAS = {  # what each extra is for; the runtimes are no choice between abilities
    "sklearn": "estimators of scikit-learn",
    "parquet": "Parquet and Arrow files",
    "images": "folders of images",
    "text": "tokenizers and chats of language models",
    "torch": "graphopt.export of PyTorch modules",
    "native": "a C compiler from a wheel",
    "sweep": "parallel sweeps and searches",
    "plot": "pictures of graphs",
    "trackers": "TensorBoard, wandb, MLflow and trackio",
    "mpi": "launcher=mpi",
    "ray": "launcher=ray",
    "cluster": "sweeps by Ray or Slurm",
    "federated": "federated training with Flower",
}


@dataclass(frozen=True)
class _Line:
    """Hold what is found about a topic, and what to do if it is broken."""

    topic: str
    text: str
    advice: str = ""


def examine(console: Console) -> None:
    """Print what an environment has, one line for each topic, with advice beside what is broken.

    Raises:
        GraphoptError: something is broken.
    """
    broken = []
    for look in _LOOKS:
        try:
            lines = [*look()]
        except GraphoptError as error:
            lines = [_Line(look.__name__.lstrip("_"), "", line_of(error))]
        for line in lines:
            text = f"BROKEN: {line.text}{line.text and ': '}{line.advice}" if line.advice else line.text
            say(console, line.topic, text)
            broken += [line.topic] if line.advice else []
    if broken:
        raise GraphoptError(f"{DOCTOR}: expected nothing broken, found {', '.join(dict.fromkeys(broken))}: see above")
    say(console, "healthy", "nothing is broken")


def _python() -> Iterator[_Line]:
    version = ".".join(map(str, sys.version_info[:3]))
    yield _Line("python", f"{version}, {sys.executable}")


def _runtime() -> Iterator[_Line]:
    """Find the packages that provide the runtime: two of them overwrite each other's files."""
    packages = sorted({*metadata.packages_distributions().get(_RUNTIME, ())})
    found = [f"{name} {metadata.version(name)}" for name in packages]
    if len(packages) != 1:
        some_found = f"{' and '.join(found)}, which overwrite each other's files" if found else "none"
        advice = f"pip install {_RUNTIME}"
        if found:
            advice = f"pip uninstall -y {' '.join(packages)}, then pip install the one that you want"
        yield _Line("runtime", some_found, advice)
        if not found:
            return
    try:
        import onnxruntime
    except ImportError as error:
        yield _Line("runtime", str(error), f"pip install --force-reinstall {' '.join(packages)}")
        return
    if len(packages) == 1:
        yield _Line("runtime", f"{found[0]}, with {', '.join(onnxruntime.get_available_providers())}")


def _packages() -> Iterator[_Line]:
    """Compare the installed packages with the versions that graphopt allows."""
    shown = []
    for text in _requirements():
        requirement = Requirement(text)
        if requirement.marker is not None and not requirement.marker.evaluate({"extra": ""}):
            continue
        version = _version(requirement.name)
        if version is None or not requirement.specifier.contains(version, prereleases=True):
            allowed = f"{requirement.name}{requirement.specifier}"
            yield _Line("packages", f"{requirement.name} {version or 'is missing'}", f'pip install "{allowed}"')
        else:
            shown.append(f"{requirement.name} {version}")
    own = f"{_OWN} {_version(_OWN) or 'is not installed, only found'} in {Path(__file__).parents[2]}"
    yield _Line("packages", ", ".join([own, *shown]))


def _extras() -> Iterator[_Line]:
    marked = [(x, x.marker) for x in map(Requirement, _requirements()) if x.marker is not None]
    optional = [(x, marker) for x, marker in marked if not marker.evaluate({"extra": ""})]
    there = []
    for extra, purpose in EXTRAS.items():
        chosen = [x.name for x, marker in optional if marker.evaluate({"extra": extra})]
        missing = [name for name in chosen if _version(name) is None]
        if missing:
            advice = f'pip install "{_OWN}[{extra}]"'
            yield _Line("extra", f"{extra}, for {purpose}, lacks {some(missing)}: {advice}")
        elif chosen:
            there.append(extra)
    if there:
        yield _Line("extras", ", ".join(there))


def _compiler() -> Iterator[_Line]:
    command = toolchain.compiler()
    if command is None:
        yield _Line("compiler", f'none, so that steps run without kernels: install gcc or clang, or "{_OWN}[native]"')
    elif not toolchain.macros():
        yield _Line("compiler", f"{' '.join(command)} compiles nothing", "install gcc or clang, or unset CC")
    else:
        yield _Line("compiler", " ".join(command))
        rates = kept_rates()
        if rates is not None:
            copy, product, low = (f"{1e12 * rate:.3g} ps" for rate in rates[:3])
            text = f"{product} a multiplication, {low} one of bfloat16 numbers, {copy} a copy of a number"
            yield _Line("rates", f"{text}: to measure anew, delete {cache_folder() / rates_file()}")
        for precision in UNITS:
            reason = obstacle(precision)
            yield _Line("processor", f"matmul_precision={precision}: {reason or 'has the instructions'}")


def _cache() -> Iterator[_Line]:
    folder = cache_folder().parent
    sizes = []
    for path in folder.rglob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process has just moved it
            sizes += [path.stat().st_size] if path.is_file() else []
    yield _Line("cache", f"{folder}, {sum(sizes) / 1e6:,.1f} MB in {counted(len(sizes), 'file')}, which may be deleted")


def _folder() -> Iterator[_Line]:
    """Look for a module of the working directory that hides the package of passes."""
    here, other = (PathFinder.find_spec(name, [os.getcwd()]) for name in (NAME, "graphopt"))
    if other is None or other.origin is None:  # in a checkout, programs import both from there
        check_namesake(None if here is None else here.origin)
    yield _Line("folder", f"nothing in {os.getcwd()} hides {NAME!r}")


def _training() -> Iterator[_Line]:
    """Train a small network for one step, whose first check compares its gradient with slopes of the loss."""
    import passes

    rng, native = np.random.default_rng(0), toolchain.compiler() is not None
    step = compile(mlp((4,), 3, hidden=(8,)), loss=passes.CrossEntropy(), optimizer=passes.AdamW(1e-2))
    feeds = {"x": rng.standard_normal((6, 4), np.float32), "target": rng.integers(0, 3, 6)}
    executor = Executor(step, threads=1, native=native, verify="full")
    losses = [executor.step(feeds)["loss"] for _ in range(2)]
    if not losses[1] < losses[0]:
        yield _Line("training", f"the loss went from {losses[0]:.4g} to {losses[1]:.4g}", "reinstall the runtime")
        return
    kernels = "compiled kernels" if native else "the runtime's kernels"
    yield _Line(
        "training",
        f"one step of a small network with {kernels}: loss {losses[0]:.4g} to {losses[1]:.4g}, checked",
    )


_LOOKS: tuple[Callable[[], Iterator[_Line]], ...] = (
    _python,
    _runtime,
    _packages,
    _compiler,
    _cache,
    _folder,
    _extras,
    _training,
)


def _requirements() -> list[str]:
    try:
        return metadata.requires(_OWN) or []
    except metadata.PackageNotFoundError:
        return []


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None

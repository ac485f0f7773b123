"""Fixtures of all tests, and the sample of them that runs by default."""

from __future__ import annotations

import copy
import functools
import gc
import logging
import os
import pickle
import sys
import types
import typing
import zlib
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

if "PYTEST_XDIST_WORKER" in os.environ:
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # workers share the cores; libraries read it when they are loaded

import numpy as np
import omegaconf
import pytest
import yaml
from hydra._internal import defaults_list

from graphopt.targets.native.cache import read_cached, write_cached
from graphopt.targets.native.library import parts_for
from graphopt.targets.native.toolchain import PART, Objects, compiler
from graphopt.testing import strict

if sys.version_info < (3, 12):  # these read the members of onnx_ir's protocols anew for each `isinstance`
    typing._get_protocol_attrs = functools.cache(typing._get_protocol_attrs)

# Cases of a parametrized test that run by default; the others are marked `slow`, which CI runs.
SAMPLE = int(os.environ.get("GRAPHOPT_SAMPLE", 3))
# Cases of a test with several parameters, all of whose combinations CI runs; `SAMPLE` of a slow test.
FEW = int(os.environ.get("GRAPHOPT_SAMPLE", 8))


@pytest.fixture(autouse=True)
def generator_of_its_own(request: pytest.FixtureRequest) -> None:
    """Give each test its own random generator, `RNG` of its module: it draws the same numbers alone as among others."""
    if hasattr(request.module, "RNG"):
        request.module.RNG = np.random.default_rng(zlib.crc32(request.node.name.encode()))


@pytest.fixture(autouse=True)
def log_files_are_closed() -> Iterator[None]:
    """Close the log files of a test's runs: pytest deletes their folders, and later tests write logs, too."""
    before = list(logging.root.handlers)
    yield
    for handler in [*logging.root.handlers]:
        if isinstance(handler, logging.FileHandler) and handler not in before:
            logging.root.removeHandler(handler)
            handler.close()


@pytest.fixture(autouse=True, scope="session")
def absl_keeps_no_stream_of_pytest() -> None:
    """Let absl, which dp-accounting, grain and optax import, write to the process's standard error.

    It keeps the one of its import, pytest's, and closes it when Hydra configures logging: all later tests fail.
    """
    with suppress(ImportError):
        import absl.logging

        absl.logging.get_absl_handler().python_handler.setStream(sys.__stderr__)


@pytest.fixture
def plain(monkeypatch: pytest.MonkeyPatch) -> None:
    """Run steps as their graphs say: a test compares small numbers bit by bit, or watches what processes start."""
    monkeypatch.setenv("GRAPHOPT_NATIVE", "false")


@pytest.fixture(autouse=True, scope="session")
def promises_are_checked() -> Iterator[None]:
    """Check every pass of all tests, and all that is remembered."""
    with strict():
        yield


@pytest.fixture(autouse=True, scope="session")
def functions_of_the_exporter_are_read_once() -> None:
    """Keep what PyTorch's exporter reads anew in each export, most of the time of a small one."""
    if "torch" in sys.modules:
        import torch
        from torch.onnx._internal._lazy_import import onnxscript_apis
        from torch.onnx._internal.exporter import _schemas

        onnxscript_apis.get_torchlib_ops = functools.cache(onnxscript_apis.get_torchlib_ops)
        _schemas.op_signature_from_function = functools.cache(_schemas.op_signature_from_function)
        torch._export.utils._materialize_cpp_cia_ops = functools.cache(torch._export.utils._materialize_cpp_cia_ops)


@pytest.fixture(autouse=True, scope="session")
def recipes_are_composed_quickly() -> Iterator[None]:
    """Keep what each command makes anew, a third of its time: what texts of recipes say, and trees of `${...}`.

    Choices are gathered only for defaults such as `${model}`, and what OmegaConf notes of a value is copied by hand.
    """
    gathered = defaults_list._create_interpolation_map

    @functools.cache
    def parsed(text: str | bytes, Loader: type) -> bytes:
        return pickle.dumps(yaml.load(text, Loader))

    def load(stream: str | bytes | IO[str], Loader: type) -> Any:
        if isinstance(stream, str | bytes):
            return pickle.loads(parsed(stream, Loader))
        try:
            return pickle.loads(parsed(stream.read(), Loader))
        except yaml.YAMLError:
            stream.seek(0)
            return yaml.load(stream, Loader)  # whose message names the file

    def gather(overrides: Any, defaults: Any, self_added: bool) -> Any:
        is_read = any(default.is_interpolation() for default in defaults)
        return gathered(overrides, defaults, self_added) if is_read else None

    def copied(self: Any, memo: dict[int, Any]) -> Any:
        found = copy.copy(self)
        found.flags, found.resolver_cache = {**self.flags}, copy.deepcopy(self.resolver_cache, memo)
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(omegaconf._utils, "get_yaml_loader", functools.cache(omegaconf._utils.get_yaml_loader))
        patch.setattr(omegaconf.omegaconf, "yaml", types.SimpleNamespace(**{**vars(yaml), "load": load}))
        patch.setattr(omegaconf.base, "parse", functools.cache(omegaconf.base.parse))
        patch.setattr(omegaconf.base.Metadata, "__deepcopy__", copied, raising=False)
        patch.setattr(defaults_list, "_create_interpolation_map", gather)
        yield


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Give a test a cache folder of its own, and return where its kernels are."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "graphopt" / "native"


@pytest.fixture(scope="session")
def objects() -> dict[str, bytes]:
    """Return what libraries of kernels share, by the names of the cache's files: it takes seconds to compile."""
    with Objects() as begun:
        names = begun.add([*parts_for({"Conv"}), *parts_for({"MatMul"})] if compiler() else [], PART)
        begun.wait()
    return {name: read_cached(name) or b"" for name in names}


@pytest.fixture
def parts(cache: Path, objects: dict[str, bytes]) -> None:
    """Write these to the cache of a test, which has a folder of its own."""
    for name, content in objects.items():
        write_cached(name, content)


def pytest_configure(config: pytest.Config) -> None:
    for line in (
        "whole: all cases of a test run by default, since each takes milliseconds",
        "sample(count): CI runs so many of a test's cases; the others are `exhaustive`",
    ):
        config.addinivalue_line("markers", line)


def pytest_collectstart() -> None:
    """Look for no garbage while tests are collected: they and their modules stay, and this took a third of the time."""
    gc.disable()


def pytest_collection_finish() -> None:
    """Look for garbage from now on, and not among what is there; as often as 3.11 does it took a tenth of the time."""
    gc.freeze()
    gc.set_threshold(20_000)
    gc.enable()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what samples leave out of a test with many cases: always the same cases, drawn by their names.

    Of a test with several parameters, CI runs the first `FEW` cases, or `SAMPLE` if it is slow, and each later one
    with a value that no earlier one has, so that each value occurs. The other combinations are `exhaustive`.
    """
    tests: dict[tuple[Path, str], list[pytest.Function]] = {}
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("exhaustive") is None:
            tests.setdefault((item.path, item.originalname), []).append(item)
    for cases in tests.values():
        cases.sort(key=lambda case: zlib.crc32(case.name.encode()))
        sample, whole = (cases[0].get_closest_marker(name) for name in ("sample", "whole"))
        for case in cases[sample.args[0] :] if sample else [] if whole else repetitions(cases):
            case.add_marker(pytest.mark.exhaustive)
        for case in [] if whole else cases[SAMPLE:]:
            case.add_marker(pytest.mark.slow)


def repetitions(cases: list[pytest.Function]) -> list[pytest.Function]:
    """Return the cases after the first few that only combine anew what earlier ones have of each parameter."""
    few = SAMPLE if cases[0].get_closest_marker("slow") else FEW
    seen: set[tuple[int, ...]] = set()
    found = []
    for i, case in enumerate(cases):
        rows = rows_of(case)
        if i >= few and rows <= seen:
            found.append(case)
        seen |= rows
    return found


def rows_of(case: pytest.Function) -> set[tuple[int, ...]]:
    """Return what a case has of each `parametrize`, and of each fixture with parameters, as identities of objects."""
    values = dict(case.callspec.params) if hasattr(case, "callspec") else {}
    marks = [mark.args[0] if mark.args else mark.kwargs["argnames"] for mark in case.iter_markers("parametrize")]
    groups = [names.replace(",", " ").split() if isinstance(names, str) else names for names in marks]
    rows = {(i, *(id(values.pop(name, None)) for name in names)) for i, names in enumerate(groups)}
    return rows | {(hash(name), id(value)) for name, value in values.items()}

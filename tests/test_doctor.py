"""`graphopt doctor` names what is broken in an environment, by packages that a test pretends to have."""

from __future__ import annotations

import re
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import graphopt
from graphopt import cli
from graphopt.cli import doctor
from graphopt.errors import GraphoptError
from graphopt.targets.native import toolchain
from graphopt.targets.native.cache import write_cached
from graphopt.targets.native.rates import rates_file

COMPILER = toolchain.compiler  # before tests pretend that there is none


@pytest.fixture(autouse=True)
def _folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))  # it counts the files of the user's
    monkeypatch.setattr(toolchain, "compiler", lambda: None)
    monkeypatch.setattr(toolchain, "macros", frozenset)


def told(capsys: pytest.CaptureFixture[str]) -> dict[str, str]:
    """Return what the last command said, by topic; the error as one of them."""
    said = capsys.readouterr()
    lines = {line.split()[0]: line for line in said.out.splitlines()}
    return {**lines, "error": said.err.strip()}


def pretend(folder: Path, name: str, version: str, module: str) -> None:
    """Install the metadata of a package, without the package."""
    place = folder / f"{name.replace('-', '_')}-{version}.dist-info"
    place.mkdir(parents=True)
    (place / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    (place / "top_level.txt").write_text(f"{module}\n")


@pytest.mark.skipif(toolchain.compiler() is None, reason="needs a C compiler")
def test_measured_rates_are_shown(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(toolchain, "compiler", COMPILER)
    monkeypatch.setattr(toolchain, "macros", lambda: {"__x86_64__"})
    monkeypatch.setattr(doctor, "_LOOKS", (doctor._compiler,))
    assert cli.main(["doctor"]) == 0 and "rates" not in told(capsys)
    file = write_cached(rates_file(), b"[1.5e-10, 1.77e-11, 8.5e-12, 3e-9]")
    assert cli.main(["doctor"]) == 0
    line = told(capsys)["rates"]
    assert "17.7 ps a multiplication, 8.5 ps one of bfloat16 numbers, 150 ps a copy" in line and str(file) in line


def test_a_file_of_the_cache_that_another_process_moves_is_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    write_cached("kept", b"12345")
    write_cached("moved", b"1")

    def is_file(path: Path) -> bool:
        path.unlink() if path.name == "moved" else None
        return not path.is_dir()

    monkeypatch.setattr(Path, "is_file", is_file)
    assert ["in 3 files" in line.text for line in doctor._cache()] == [True]  # with sums


def test_an_environment_is_healthy(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = told(capsys)
    assert {"python", "runtime", "packages", "compiler", "cache", "folder", "training", "healthy"} <= set(lines)
    assert re.search(r"loss 1\.\d+ to 1\.\d+, checked", lines["training"]) and not lines["error"]
    assert not list(Path().iterdir())


def test_two_runtimes_in_one_environment_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pretend(tmp_path / "site", "onnxruntime-gpu", "1.26.0", "onnxruntime")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    assert cli.main(["doctor"]) == 1
    lines = told(capsys)
    assert "onnxruntime-gpu 1.26.0" in lines["runtime"]
    assert ", which overwrite each other's files: pip uninstall -y" in lines["runtime"]
    assert "expected nothing broken, found runtime: see above" in lines["error"]


@pytest.mark.parametrize("version", ["0.6.0", None])
def test_a_version_that_is_not_allowed_is_named(
    version: str | None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = doctor._version
    monkeypatch.setattr(doctor, "_version", lambda name: version if name == "onnxscript" else real(name))
    assert cli.main(["doctor"]) == 1
    lines = capsys.readouterr().out.splitlines()
    told = f"BROKEN: onnxscript {version or 'is missing'}: pip install"
    assert any(told in line and '"onnxscript<0.8,>=0.7.2"' in line for line in lines)


def test_a_namesake_in_the_folder_and_a_network_that_does_not_learn_are_named(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Frozen:
        def __init__(self, *_: Any, **__: Any) -> None: ...

        def step(self, _: object) -> dict[str, float]:
            return {"loss": 1.0}

    Path("passes.py").write_text("")
    monkeypatch.setattr(doctor, "Executor", Frozen)
    assert cli.main(["doctor"]) == 1
    lines = told(capsys)
    assert "BROKEN" in lines["folder"] and "rename the file" in lines["folder"]
    assert "the loss went from 1 to 1" in lines["training"]
    assert lines["error"].endswith("expected nothing broken, found folder, training: see above")


def test_the_doctor_takes_no_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor", "fit.epochs=3"]) == 1
    assert "doctor: expected no other words, found fit.epochs=3: leave them out" in told(capsys)["error"]


def test_every_extra_is_one_of_the_package() -> None:
    text = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert all(re.search(rf"^{extra} = \[", text, re.MULTILINE) for extra in doctor.EXTRAS)


def test_the_version_is_that_of_the_installed_package(monkeypatch: pytest.MonkeyPatch) -> None:
    assert graphopt.__version__ == metadata.version("graphopt")

    def missing(_: str) -> str:
        raise metadata.PackageNotFoundError

    monkeypatch.setattr(metadata, "version", missing)
    assert graphopt.__version__ == "unknown"


def test_a_checkout_beside_an_installed_package_is_not_broken() -> None:
    for name in ("graphopt", "passes"):
        Path(name).mkdir()
        Path(name, "__init__.py").write_text("")
    assert [line.advice for line in doctor._folder()] == [""]
    Path("graphopt", "__init__.py").unlink()
    with pytest.raises(GraphoptError, match="rename the folder"):
        list(doctor._folder())

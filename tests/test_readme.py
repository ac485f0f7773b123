"""The README's blocks run as they are written, in order, in one folder."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from graphopt import cli

ROOT = Path(__file__).parents[1]
INSTALLS = "python -m venv"  # blocks that install graphopt; CI's jobs do that


def blocks(language: str) -> list[str]:
    return re.findall(
        rf"^```{language}\n(.*?)^```", (ROOT / "README.md").read_text(), re.DOTALL | re.MULTILINE
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the Python blocks have run, one after the other, as one program."""
    path = tmp_path_factory.mktemp("readme")
    script = path / "readme.py"
    script.write_text("\n".join(blocks("python")))
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, script], cwd=path, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[0]) < 0.7
    return path


def test_the_python_blocks_run(folder: Path) -> None:
    assert {"my.onnx", "step.onnx", "trained.onnx", "train.npz"} <= set(os.listdir(folder))


COMMANDS = [
    line
    for block in blocks("sh")
    if INSTALLS not in block
    for line in block.replace("\\\n", " ").splitlines()
    if line.strip()
]


@pytest.mark.parametrize("command", COMMANDS)
def test_a_command_runs(command: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *arguments = shlex.split(command, comments=True)
    assert program == "graphopt"
    monkeypatch.chdir(folder)
    shorter = [] if "--help" in arguments or "fit.epochs" in command else ["fit.epochs=1"]
    assert cli.main([*arguments, *shorter]) == 0


def test_every_block_is_run() -> None:
    assert len(COMMANDS) >= 7
    languages = set(re.findall(r"^```(\w+)", (ROOT / "README.md").read_text(), re.MULTILINE))
    assert languages <= {"python", "sh", "mermaid"}

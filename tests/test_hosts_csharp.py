"""The loop in C# of the guide trains as graphopt's executor does."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import onnxruntime
import pytest
from host_graphs import BAD, BAD_AT, GRAPHS, Batch, batches, with_bad_batches

import graphopt

ROOT = Path(__file__).parents[1]
PROGRAMS = ROOT / "examples" / "hosts" / "csharp" / "test"
TOOLS = Path(os.environ.get("CSHARP_TOOLS", PROGRAMS / "tools"))
LIBRARIES = sorted(Path(onnxruntime.__file__).parent.glob("capi/libonnxruntime.so.*"))  # of Python's ONNX Runtime
TYPES = {"float32": "float", "int64": "long"}
pytestmark = [
    pytest.mark.slow,
    pytest.mark.usefixtures("plain"),
    pytest.mark.skipif(
        not TOOLS.exists() or not LIBRARIES,
        reason="needs ONNX Runtime's library, and the tools that examples/hosts/csharp/test/tools.py makes",
    ),
]


def dotnet(folder: Path, program: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    command = [TOOLS / "dotnet" / "dotnet", "exec", "--runtimeconfig", TOOLS / "net.runtimeconfig.json", program]
    return subprocess.run([*command, *map(str, arguments)], cwd=folder, capture_output=True, text=True, check=False)


def program(fed: Sequence[Batch]) -> str:
    """Return the guide's loop, whose batches are files of rows in a folder."""
    page = (ROOT / "examples" / "guides" / "other_languages.md").read_text()
    (loop,) = re.findall(r"```csharp\n(.*?)```", page, re.DOTALL)
    own, feeds = re.subn(r'    inputs\["(x|target)"\] = .*\n', "", loop)
    assert feeds == 2
    arrays = {name: np.stack([batch[name] for batch in fed]) for name in fed[0]}
    lines = []
    for name, x in arrays.items():
        numbers = f'MemoryMarshal.Cast<byte, {TYPES[x.dtype.name]}>(File.ReadAllBytes($"{name}{{batch}}"))'
        sizes = ", ".join(map(str, x.shape[1:]))
        lines.append(f'    inputs["{name}"] = Tensor({numbers}.ToArray(), {sizes});\n')
    given = f"foreach (var batch in Enumerable.Range(0, {len(fed)})) {{\n"
    assert own.count("foreach (var batch in batches) {\n") == 1
    return own.replace("foreach (var batch in batches) {\n", given + "".join(lines))


def train(folder: Path, fed: Sequence[Batch]) -> tuple[list[float], str]:
    """Return the losses that the program prints, and what it says beside them, in a folder with the folder `host`."""
    for i, batch in enumerate(fed):
        for name, x in batch.items():
            x.tofile(folder / f"{name}{i}")
    (folder / "program.cs").write_text(program(fed))
    package = "Microsoft.ML.OnnxRuntime.dll"
    shutil.copy(TOOLS / package, folder)
    (folder / "libonnxruntime.so").symlink_to(LIBRARIES[0])
    sources = [folder / "program.cs", PROGRAMS / "usings.cs"]
    options = ["/nullable:enable", "/warnaserror", f"/reference:{TOOLS / package}", "/out:program.dll"]
    done = dotnet(folder, TOOLS / "csc.dll", *sources, *options)
    assert not done.returncode, done.stderr
    done = dotnet(folder, folder / "program.dll")
    assert not done.returncode, done.stderr
    return [float(line) for line in done.stdout.split()], done.stderr


@pytest.mark.sample(2)
@pytest.mark.parametrize("name", ["linear", "mlp", "cnn", "lstm", "transformer"])
def test_csharp_trains_as_python_does(name: str, tmp_path: Path) -> None:
    step, fed = GRAPHS[name][0](), batches(name, 20)
    graphopt.export_hosts(step, tmp_path / "host")
    executor = graphopt.Executor(step)
    expected = [float(executor.step(batch)["loss"]) for batch in fed]
    found, said = train(tmp_path, fed)
    np.testing.assert_allclose(found, expected, rtol=1e-5)
    assert not said


@pytest.mark.sample(1)
@pytest.mark.parametrize("name", ["NaN", "statistics"])
def test_a_bad_batch_does_not_spoil_the_state(name: str, tmp_path: Path) -> None:
    step, fed = BAD[name][0](), with_bad_batches(name)
    graphopt.export_hosts(step, tmp_path / "host")
    executor = graphopt.Executor(step)
    expected = [float(executor.step(batch)["loss"]) for i, batch in enumerate(fed) if i not in BAD_AT]
    found, said = train(tmp_path, fed)
    np.testing.assert_allclose([loss for i, loss in enumerate(found) if i not in BAD_AT], expected, rtol=1e-5)
    assert said.splitlines() == ["a bad batch: the state stays"] * len(BAD_AT)

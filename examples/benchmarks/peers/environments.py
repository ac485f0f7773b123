"""Create an environment for each peer with venv and pip when it is first needed, outside the repository."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[3]
CACHE = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "graphopt-benchmarks"
REQUIREMENTS = {
    "graphopt": [f"--editable={ROOT}[cpu]", "matplotlib"],
    "graphopt-training": [f"--editable={ROOT}[training]"],
    "torch": ["torch==2.13.0", "numpy", "setuptools"],
    "jax": ["jax", "jaxlib", "optax"],
    "onnxruntime-training": ["onnxruntime-training==1.19.2", "onnx==1.17.0", "torch==2.13.0", "setuptools"],
    "onnxsim": ["onnxsim==0.8.*", "onnxruntime"],
}
PACKAGES = [
    "graphopt",
    "onnxruntime",
    "onnxruntime-gpu",
    "onnxruntime-training",
    "torch",
    "jax",
    "optax",
    "onnxsim",
    "onnx",
    "numpy",
]


class Missing(Exception):
    """Report why an environment cannot be created."""


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment, which is created again if its packages differ.

    Raises:
        Missing: pip finds no package for this Python or system, or the folder is inside the repository.
    """
    home = (folder / name).resolve()
    if home.is_relative_to(ROOT):
        raise Missing(f"{folder}: expected a folder outside the repository {ROOT}")
    python = home / "bin" / "python"
    stamp, wanted = home / "requirements.txt", "\n".join(REQUIREMENTS[name])
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"creating the environment {name} in {home}", flush=True)
        call(sys.executable, "-m", "venv", "--clear", str(home))
        call(str(python), "-m", "pip", "install", "--quiet", *REQUIREMENTS[name])
        stamp.write_text(wanted)
    return python


def call(*command: str) -> None:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "ERROR" in line] or done.stderr.splitlines()
        raise Missing(lines[-1] if lines else f"{command[-1]} ended with {done.returncode}")


def versions(python: Path) -> str:
    """Return the versions of the measured packages in an environment."""
    code = (
        "from importlib.metadata import distributions as d; import sys\n"
        "print(*(f'{x.name} {x.version}' for x in sorted(d(), key=lambda x: x.name) if x.name in sys.argv))"
    )
    done = subprocess.run([str(python), "-c", code, *PACKAGES], capture_output=True, text=True)
    return done.stdout.strip()

"""The environments that peers run in: one each, made by venv and pip when first needed, outside of the repository."""

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
    "graphopt-gpu": [f"--editable={ROOT}[gpu]"],
    "torch-gpu": ["torch", "numpy", "setuptools"],
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
    """An environment cannot be made; says why."""


def python_of(name: str, folder: Path) -> Path:
    """Return the interpreter of an environment, which is made if its packages are not those wanted.

    Raises:
        Missing: pip finds a package for no such Python or system, or the folder is inside of the repository.
    """
    home = (folder / name).resolve()
    if home.is_relative_to(ROOT):
        raise Missing(f"{folder}: expected a folder outside of the repository {ROOT}")
    python = home / "bin" / "python"
    stamp, wanted = home / "requirements.txt", "\n".join(REQUIREMENTS[name])
    if not (stamp.exists() and stamp.read_text() == wanted):
        print(f"making the environment {name} in {home}", flush=True)
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
    """Return the versions of what is measured in an environment."""
    code = (
        "from importlib.metadata import distributions as d; import sys\n"
        "print(*(f'{x.name} {x.version}' for x in sorted(d(), key=lambda x: x.name) if x.name in sys.argv))"
    )
    done = subprocess.run([str(python), "-c", code, *PACKAGES], capture_output=True, text=True)
    return done.stdout.strip()

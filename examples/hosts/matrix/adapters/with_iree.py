"""IREE: imported with iree-import-onnx, compiled for the processor."""

import subprocess
import sys
import tempfile
from pathlib import Path

import iree.runtime as runtime
import onnx


def open_graph(path, feeds):
    tools = Path(sys.executable).parent
    with tempfile.TemporaryDirectory() as folder:
        imported, compiled = Path(folder, "graph.mlir"), Path(folder, "graph.vmfb")
        _run(tools / "iree-import-onnx", path, "--opset-version", "17", "-o", imported)
        flags = "--iree-hal-target-backends=llvm-cpu", "--iree-llvmcpu-target-cpu=host"
        _run(tools / "iree-compile", imported, *flags, "-o", compiled)
        module = runtime.load_vm_flatbuffer(compiled.read_bytes(), driver="local-sync")
    graph = onnx.load(path).graph
    call = module[graph.name]
    names = [x.name for x in graph.input]

    def run(inputs):
        found = call(*(inputs[name] for name in names))
        return {y.name: value.to_host() for y, value in zip(graph.output, found, strict=True)}

    return run


def _run(*command):
    done = subprocess.run([*map(str, command)], capture_output=True, text=True)
    if done.returncode:
        lines = [line for line in done.stderr.splitlines() if "error:" in line] or done.stderr.splitlines()
        raise RuntimeError(lines[0] if lines else f"{command[0].name} returned {done.returncode}")
